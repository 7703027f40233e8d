"""`compile --weight-bits 4`: the summary, its warning, what `explain` says, what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.e2e.test_half_bytes import odd_network
from tilewright.cli import main


@pytest.fixture
def odd(tmp_path: Path) -> tuple[Path, Path]:
    model, shape = odd_network()
    onnx.save(model, tmp_path / "odd.onnx")
    np.savez(tmp_path / "s.npz", x=np.random.default_rng(0).normal(size=(2, *shape[1:])))
    return tmp_path / "odd.onnx", tmp_path / "s.npz"


def test_padding_is_reported_and_warned_of(
    odd: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, samples = odd
    package = tmp_path / "odd.tpupkg"
    command = [
        "compile", str(model), "--target", "tpu_v2", "--calibration-data", str(samples),
        "-Oq0", "--weight-bits", "4", "--layer-bits", "wide=8", "-o", str(package),
    ]  # fmt: skip
    assert main(command) == 0
    told = capsys.readouterr()
    assert "4 bits     13.90 KiB of weights, 2.44 KiB (17.5%) of it alignment" in told.out
    assert "warning: 17.5% of the weights of 4 bits (2496 of 14236 bytes) is alignment" in told.err
    assert main(["explain", str(package), "grouped"]) == 0
    told = capsys.readouterr()
    assert "quantize did: weights of 4 bits, two a byte" in told.out
    assert "lower-affine-to-tpu did: weights of 4 bits take " in told.out
    assert main(["explain", str(package), "wide"]) == 0
    told = capsys.readouterr()
    assert "its weights keep 8 bits, as asked for" in told.out
    assert "weights of 4 bits" not in told.out


def test_a_chip_without_int4_gets_no_smaller_weights(
    odd: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, samples = odd
    package = tmp_path / "odd.tpupkg"
    command = [
        "compile", str(model), "--target", "edge16", "--calibration-data", str(samples),
        "-Oq0", "--weight-bits", "4", "-o", str(package),
    ]  # fmt: skip
    assert main(command) == 0
    told = capsys.readouterr()
    assert "4 bits" not in told.out
    assert "alignment" not in told.err
    assert main(["explain", str(package), "one"]) == 0
    assert "take a byte each: `edge16` has no int4" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["fp16", "float32"])
@pytest.mark.parametrize("option", [("--weight-bits", "4"), ("--layer-bits", "one=4")])
def test_weights_that_are_floats_have_no_bits(
    odd: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    dtype: str,
    option: tuple[str, str],
) -> None:
    command = ["compile", str(odd[0]), "--target", "tpu_v2", "--dtype", dtype, *option]
    assert main(command) == 2
    assert f"in {dtype} weights are floats" in capsys.readouterr().err
