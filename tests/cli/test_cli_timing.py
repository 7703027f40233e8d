"""Timing reports and measured times on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.waves.vcd import log_signals, write_vcd
from tilewright.cli import main
from tilewright.runtime.runtime import load
from tilewright.runtime.simulation import simulate


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
    assert main([*command, "--json", "--quiet"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    # tiny8 runs at 200 MHz.
    assert found["clock"] == {
        "target_ps": 5000.0, "measured_ps": 6000.0, "slack_ps": -1000.0, "met": False,
    }  # fmt: skip
    assert found["source"] == "run.vcd"
    assert found["nanoseconds"] == found["cycles"] * 6
    assert found["chain"]
    assert main(command) == 0
    assert "MISSED by 1,000.0 ps" in capsys.readouterr().out


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
    capsys.readouterr()
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
