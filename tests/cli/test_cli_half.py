"""fp16 from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tilewright.cli.command import main


def test_fp16_needs_no_calibration(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m.tpupkg"
    arguments = ["compile", str(model), "--target", "tpu_v2", "--dtype", "fp16", "--quiet"]
    assert main([*arguments, "-o", str(out)]) == 0
    capsys.readouterr()
    assert main(["run", str(out), "--random", "3", "--json", "--quiet"]) == 0
    half = json.loads(capsys.readouterr().out)["samples"]
    other = tmp_path / "f.tpupkg"
    assert main(["compile", str(model), "--fp32", "-o", str(other), "--quiet"]) == 0
    capsys.readouterr()
    assert main(["run", str(other), "--random", "3", "--json", "--quiet"]) == 0
    full = json.loads(capsys.readouterr().out)["samples"]
    for name, values in full[0].items():
        for got, want in zip(half[0][name]["largest"], values["largest"], strict=True):
            assert got["value"] == pytest.approx(want["value"], rel=2.0**-6)


def test_a_target_without_fp16_says_what_it_has(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m.tpupkg"
    arguments = ["compile", str(model), "--target", "edge16", "--dtype", "fp16", "-o", str(out)]
    assert main([*arguments, "--quiet"]) == 1
    told = capsys.readouterr().err
    assert "error[E0402]: target `edge16` has no fp16" in told
    assert "int8" in told
    assert not out.exists()
