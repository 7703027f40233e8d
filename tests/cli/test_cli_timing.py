"""Timing reports and measured times on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.waves.vcd import log_signals, write_vcd
from tilewright.cli import main
from tilewright.runtime.runtime import load
from tilewright.runtime.simulation import simulate
from tilewright.spec.isa import BY_NAME


def waveform(package: Path, folder: Path, *, period: int = 5000) -> Path:
    loaded = load(package)
    (result,) = simulate(loaded).programs.values()
    return write_vcd(folder / "run.vcd", log_signals(result.log), period=period)


def test_a_simulated_report(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(package), "--timing-report", "--deadline-us", "1e6"]) == 0
    text = capsys.readouterr().out
    assert "timing of tpu_0 (simulated)" in text
    assert "critical chain" in text
    assert "deadline   1,000,000.000 us: met" in text
    assert "measured" not in text


def test_a_measured_report(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = waveform(package, tmp_path, period=6000)
    command = ["simulate", str(package), "--timing-report", "--waveform", str(path)]
    assert main([*command, "--json", "--quiet"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    # tiny8 runs at 200 MHz.
    assert found["clock"] == {
        "target_ps": 5000.0, "measured_ps": 6000.0, "slack_ps": -1000.0, "met": False,
    }  # fmt: skip
    assert found["source"] == "run.vcd"
    assert found["nanoseconds"] == found["cycles"] * 6
    assert found["chain"]
    assert main(command) == 1
    text = capsys.readouterr()
    assert "MISSED by 1,000.0 ps" in text.out
    # The made-up waveform shows neither chip nor code.
    (warning,) = [line for line in text.err.splitlines() if line.startswith("warning")]
    assert "`run.vcd` does not show its chip" in warning
    assert warning == f"warning: {found['warning']}"
    assert sum(link["end"] - link["begin"] for link in found["chain"]) == found["cycles"]


def traced(package: Path, path: Path, change: Callable[[bytearray], None], digest: str) -> Path:
    """Write the waveform of a package's run that shows a digest and the code, changed."""
    loaded = load(package)
    (result,) = simulate(loaded).programs.values()
    (step,) = loaded.content.program.tpu_steps
    unit = loaded.executor.target.ddr_bus_bytes
    code = bytearray(step.code)
    change(code)
    signals = log_signals(result.log)
    scope = "TOP.tw_top"
    count = len(code) // unit
    words = [int.from_bytes(code[i * unit :][:unit], "little") for i in range(count)]
    signals |= {
        f"{scope}.target_digest": (64, [int(digest[:16], 16)] * (count + 9)),
        f"{scope}.code_length": (32, [len(code) // 64] * (count + 9)),
        f"{scope}.mem_valid": (1, [1] * count),
        f"{scope}.mem_code": (1, [1] * count),
        f"{scope}.mem_address": (40, [i * unit for i in range(count)]),
        f"{scope}.mem_read_data": (8 * unit, [0, *words]),
    }
    return write_vcd(path, signals, period=5000)


def test_a_waveform_of_another_model_or_chip(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = load(package).executor.target.digest()

    def other_code(code: bytearray) -> None:
        # A bit of the stride of the first load's runs.
        at = next(i for i in range(0, len(code), 64) if code[i] == BY_NAME["dma_load"].opcode)
        code[at + 24] ^= 8

    def report(path: Path) -> tuple[int, str, str]:
        status = main(["simulate", str(package), "--timing-report", "--waveform", str(path)])
        text = capsys.readouterr()
        return status, text.out, text.err

    status, out, err = report(traced(package, tmp_path / "a.vcd", lambda code: None, digest))
    assert status == 0
    assert "timing of tpu_0 (a.vcd)" in out
    assert "warning" not in err
    status, out, err = report(traced(package, tmp_path / "b.vcd", other_code, digest))
    assert (status, out) == (1, "")
    assert "error[E0603]: `b.vcd` is of another program: differs first in instruction" in err
    assert "(dma_load)" in err
    assert "hint: " in err
    status, out, err = report(traced(package, tmp_path / "c.vcd", lambda code: None, "9" * 16))
    assert (status, out) == (1, "")
    assert "error[E0603]: `c.vcd` is of another chip than target `tiny8`" in err


def test_a_model_of_the_host_has_no_times(
    model: Path, package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "host.tpupkg"
    command = ["compile", str(model), "--target", "tiny8", "--fp32", "--quiet", "-o", str(output)]
    assert main(command) == 0
    capsys.readouterr()
    assert main(["simulate", str(output), "--timing-report"]) == 2
    assert "the model has no program of the chip" in capsys.readouterr().err
    assert main([*command, "--timing-constraints", str(waveform(package, tmp_path))]) == 2
    assert "in float32 there is no program of the chip" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--waveform", "a.vcd"], "--waveform needs --timing-report"),
        (["--deadline-us", "3"], "--deadline-us needs --timing-report"),
        (["--timing-report", "--deadline-us", "-1"], "must be above 0"),
        (["--timing-report", "--deadline-us", "nan"], "must be above 0"),
        (["--timing-report", "--level", "functional"], "goes without"),
        (["--timing-report", "--scope", "a"], "--scope needs --waveform"),
        (["--timing-report", "--program", "tpu_7"], "no program `tpu_7`"),
    ],
)
def test_what_does_not_go_together(
    package: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(package), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_foreign_waveform(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none.vcd"
    command = ["simulate", str(package), "--timing-report", "--waveform", str(path)]
    assert main(command) == 1
    assert "E0701" in capsys.readouterr().err
    path.write_bytes(b"nonsense")
    assert main(command) == 1
    assert "E0701" in capsys.readouterr().err


def test_compile_by_measured_times(
    model: Path, samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [
        "compile", str(model), "--target", "tiny8", "--calibration-data", str(samples),
        "--no-simulate", "--quiet", "--keep-ir", "tpu",
    ]  # fmt: skip
    first, second = tmp_path / "a.tpupkg", tmp_path / "b.tpupkg"
    assert main([*common, "-o", str(first)]) == 0
    path = waveform(first, tmp_path)
    assert main([*common, "-o", str(second), "--timing-constraints", str(path)]) == 0
    assert "warning: `run.vcd` does not show its chip" in capsys.readouterr().err
    assert main(["inspect", str(second), "--ir", "tpu"]) == 0
    text = capsys.readouterr().out
    assert "tpu.timing_constraint" in text
    before, after = load(first).content.program, load(second).content.program
    assert len(before.tpu_steps[0].code) == len(after.tpu_steps[0].code)
    # The annotated IR serves in the waveform's place.
    measured = tmp_path / "measured.mlir"
    measured.write_text(text)
    third = tmp_path / "c.tpupkg"
    assert main([*common, "-o", str(third), "--timing-constraints", str(measured)]) == 0
    assert load(third).content.program.tpu_steps[0].code == after.tpu_steps[0].code
    missing = [*common, "-o", str(third), "--timing-constraints", str(tmp_path / "no.vcd")]
    assert main(missing) == 1
    assert "there is no file" in capsys.readouterr().err
