"""`cosim` on small models: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cosim.support import needs_verilator
from tilewright.cli import main
from tilewright.cosim import compare, driver


@needs_verilator
def test_model_from_source(
    model: Path, samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = tmp_path / "x.npy"
    np.save(inputs, np.load(samples)["x"][0])
    command = [
        "cosim", str(model), "--target", "tiny8", "--calibration-data", str(samples), "--quiet",
    ]  # fmt: skip
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "small.onnx on tiny8: equal" in text
    assert "outputs equal bit for bit" in text
    assert "(measured)" in text
    assert "(simulated)" in text
    assert main([*command, "--input", str(inputs), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["equal"]
    assert content["outputs"] == {"y": True}
    (program,) = content["programs"]
    assert program["rtl_cycles"] == program["simulated_cycles"] > 100
    assert program["rtl_counters"]["mac"]["busy"] > 0
    assert program["differences"] == []


@needs_verilator
@pytest.mark.parametrize("suffix", ["vcd", "fst"])
def test_package_with_a_trace(
    package: Path, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / f"t.{suffix}"
    assert main(["cosim", str(package), "--trace", str(trace), "--segment", "tpu_0", "-q"]) == 0
    assert f"trace: {trace}" in capsys.readouterr().out
    content = trace.read_bytes()
    assert len(content) > 1000
    assert [path.name for path in tmp_path.iterdir()] == [trace.name]
    if suffix == "vcd":
        assert b"$scope module tw_top" in content


@needs_verilator
def test_differences_are_told(
    package: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = compare.functional_memory

    def wrong(*arguments: Any) -> Any:
        sram = real(*arguments)
        sram[1] ^= 1
        return sram

    monkeypatch.setattr(compare, "functional_memory", wrong)
    assert main(["cosim", str(package), "--quiet"]) == 1
    text = capsys.readouterr().out
    assert "NOT equal" in text
    assert "sram: 1 bytes differ; 0x1 must be" in text
    assert "instruction 0 (dma_load)" in text


@needs_verilator
def test_limit_of_cycles(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cosim", str(package), "--quiet", "--max-cycles", "10"]) == 1
    assert "error[E0804]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--trace", "x.json"], "must end in .vcd or .fst"),
        (["--trace-from", "5"], "need --trace FILE"),
        (["--max-cycles", "0"], "--max-cycles must be 1 or more, not 0"),
        (["--seed", "-1"], "--seed must be 0 or more, not -1"),
        (["--segment", "tpu_7"], "there is no program `tpu_7`"),
    ],
)
def test_wrong_options(
    package: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cosim", str(package), "--quiet", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_without_verilator(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["cosim", str(package), "--quiet"]) == 1
    said = capsys.readouterr().err
    assert "error[E0801]" in said
    assert "apt-get install verilator g++" in said


def test_model_that_runs_on_the_host(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(path: Path) -> None:
        raise AssertionError(path)

    monkeypatch.setattr(driver, "_load", never)
    assert main(["cosim", str(model), "--fp32", "--quiet"]) == 0
    assert "nothing to co-simulate" in capsys.readouterr().out
