"""Comparing levels: equal when they are, and able to see and name a difference."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.conftest import small_cnn
from tilewright.api import Build, CompileOptions, build
from tilewright.compare import compare, level_values, scales, sqnr_db, writers
from tilewright.diagnostics import UsageError
from tilewright.spec.hardware import load_target

RANDOM = np.random.default_rng(3)
SAMPLES = [{"x": RANDOM.normal(0, 1, (1, 3, 12, 12)).astype(np.float32)} for _ in range(4)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Build:
    path: Path = tmp_path_factory.mktemp("m") / "small.onnx"
    path.write_bytes(small_cnn())
    return build(path, load_target("tiny8"), CompileOptions(calibration=SAMPLES))


def _compiled(made: Build) -> Any:
    assert made.compiled is not None
    return made.compiled


@pytest.mark.parametrize("level", ["linalg", "affine", "tpu"])
def test_levels_agree(made: Build, level: str):
    found = compare(_compiled(made), "quant", level, SAMPLES[0])
    assert found.exact
    assert {"fc"} <= {layer.layer for layer in found.layers} | {"output y"}
    assert all(layer.elements > 0 for layer in found.layers)


def test_a_wrong_weight_is_seen_and_named(made: Build):
    compiled = _compiled(made)
    constants = compiled.program.constants.copy()
    constants[:] = np.where(constants == 0, constants, constants ^ 1)
    broken = replace(compiled, program=replace(compiled.program, constants=constants))
    found = compare(broken, "quant", "tpu", SAMPLES[0])
    assert not found.exact
    shares = [layer.differing / layer.elements for layer in found.layers]
    assert shares == sorted(shares, reverse=True)
    assert found.layers[0].largest >= 1
    # The good program is not changed by the experiment.
    assert compare(compiled, "quant", "tpu", SAMPLES[0]).exact


@pytest.mark.parametrize("level", ["affine", "tpu"])
def test_results_that_stay_in_sram_are_named(made: Build, level: str, tmp_path: Path):
    path = tmp_path / "small.onnx"
    path.write_bytes(small_cnn())
    options = CompileOptions(calibration=SAMPLES, fuse=False)
    apart = compare(
        _compiled(build(path, load_target("tiny8"), options)), "quant", level, *SAMPLES[:1]
    )
    found = compare(_compiled(made), "quant", level, SAMPLES[0])
    seen = {item.layer for item in found.layers}
    # Exactly those that the compile without fusion shows besides.
    assert set(found.in_sram) == {item.layer for item in apart.layers} - seen
    assert found.in_sram
    assert not apart.in_sram
    assert set(found.in_sram) <= set(found.only_first)


def test_float_against_int8(made: Build):
    found = compare(_compiled(made), "float", "quant", SAMPLES[0])
    assert "fc" in {layer.layer for layer in found.layers}
    noise = [layer.sqnr_db for layer in found.layers]
    assert all(value is not None and value > 20 for value in noise)
    assert noise == sorted(noise, key=lambda value: value or 0.0)
    assert all((layer.cosine or 0) > 0.99 for layer in found.layers)


def test_writers_are_the_layers_of_instructions(made: Build):
    compiled = _compiled(made)
    named = {layer for step in compiled.program.tpu_steps for layer in step.layers}
    found = writers(compiled)
    assert set(found) <= named
    written = {name for names in found.values() for name in names}
    for step in compiled.program.tpu_steps:
        assert set(step.outputs) <= written


def test_scales_belong_to_tensors(made: Build):
    compiled = _compiled(made)
    known = scales(compiled)
    tensors = compiled.program.tensors
    assert tensors["fc"].dtype == "int32"
    for tensor in tensors.values():
        if tensor.dtype == "int8":
            assert known[tensor.name][0] == pytest.approx(tensor.scale)


def test_unknown_level(made: Build):
    with pytest.raises(UsageError):
        level_values(_compiled(made), "rtl", SAMPLES[0])


@pytest.mark.parametrize(
    ("signal", "noise", "expected"), [(100.0, 1.0, 20.0), (1.0, 0.0, math.inf), (0.0, 1.0, 0.0)]
)
def test_sqnr(signal: float, noise: float, expected: float):
    assert sqnr_db(signal, noise) == expected
