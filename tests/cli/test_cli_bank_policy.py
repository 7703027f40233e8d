"""`compile --quant-bank-policy`: what `explain` says, that packages record it, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from tests.bank_networks import wide
from tilewright.cli import main


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(wide(), tmp_path / "wide.onnx")
    return tmp_path / "wide.onnx"


def command(model: Path, out: Path, *more: str) -> list[str]:
    return [
        "compile", str(model), "--target", "tiny8", "--random-calibration", "-Oq0",
        "--no-simulate", "--quiet", "-o", str(out), *more,
    ]  # fmt: skip


def test_explain_tells_the_banks(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for policy in ("shared", "strict"):
        out = tmp_path / f"{policy}.tpupkg"
        assert main(command(model, out, "--quant-bank-policy", policy)) == 0
        capsys.readouterr()
        assert main(["explain", str(out), "sum"]) == 0
        told = capsys.readouterr().out
        assert "parameters of activations in bank 2 (1 of 16)" in told
        assert f"({policy})" in told
        assert main(["inspect", str(out), "--json"]) == 0
        options = json.dumps(json.loads(capsys.readouterr().out))
        assert ('"quant_bank_policy": "strict"' in options) is (policy == "strict")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--quant-bank-policy", "loose"], "shared"),
        (["--quant-bank-policy", "strict", "--fp32"], "in float32 there are no such parameters"),
        (["--weight-bits", "3"], "8, 4"),
        (["--layer-bits", "wide"], "NAME=BITS"),
        (["--layer-bits", "wide=5"], "8 or 4"),
        (["--activations", "odd"], "asymmetric"),
        (["--rounding", "up"], "learned"),
        (["--bias-correction", "some"], "sequential"),
        (["--smooth-quant", "2"], "0..1"),
        (["--calibration-method", "median"], "percentile"),
        (["--calibration-samples", "0"], "1 or more"),
        (["--accuracy-budget", "much"], "dB"),
        (["-Oq7"], "q0..q3"),
    ],
)
def test_wrong_options_of_quantisation_are_refused_with_legal_values(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    out = tmp_path / "a.tpupkg"
    try:
        code = main(command(model, out, *more))
    except SystemExit as exit_:
        code = exit_.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert not out.exists()
