"""Asymmetric activations: who gets the zero point -128, and what it is worth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from xdsl.dialects.builtin import ModuleOp

from tests.unit.quant_top_graphs import TopGraph
from tilewright.diagnostics import TilewrightError
from tilewright.dialects.quant import quantised, uniform_of
from tilewright.passes import make_pass
from tilewright.quant.calibrate import calibrate
from tilewright.quant.compare import sqnr
from tilewright.quant.graph import layer_of, main_function
from tilewright.quant.reference import run_quant
from tilewright.quant.table import write_attribute
from tilewright.runtime.float_executor import run_top
from tilewright.transforms.quant.quantize import quantize_module
from tilewright.transforms.quant.verify_scales import VerifyScalesPass

SHAPE = (1, 3, 6, 5)


def zeros(module: ModuleOp) -> dict[str, int]:
    """Return the zero point of every layer's codes."""
    return {
        layer_of(op): quantised(op.results[0]).zero
        for op in main_function(module).body.block.ops
        if op.name != "top.weight" and op.results and uniform_of(op.results[0]) is not None
    }


def quantise(
    g: TopGraph, module: ModuleOp, asymmetric: bool, rounding: str = "half_up"
) -> tuple[dict[str, int], float]:
    """Quantise in place; return zero points and the signal to noise of the result."""
    rng = np.random.default_rng(3)
    samples = [{"x": rng.standard_normal(SHAPE).astype(np.float32)} for _ in range(4)]
    table = calibrate(module, g.ctx.weights, samples, method="max")
    (wanted,) = run_top(module, g.ctx.weights, samples[0]).values()
    quantize_module(g.ctx, module, table.thresholds, rounding, table.means, asymmetric=asymmetric)
    module.verify()
    VerifyScalesPass().apply(g.ctx, module)
    (got,) = run_quant(module, g.ctx.weights, samples[0]).values()
    return zeros(module), sqnr(wanted, got)


def chain(**clamp: Any) -> tuple[TopGraph, ModuleOp]:
    """Return conv (clamped) -> conv -> relu -> max pool -> residual sum of two that are >= 0."""
    g = TopGraph(x=SHAPE)
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((3, 3, 1, 1)) for _ in range(2)]
    first = g.conv("first", g.input("x"), weights[0], **clamp)
    second = g.conv("second", first, weights[1])
    relu = g.op("relu", "relu", [second])
    total = g.op("add", "total", [relu, first])
    return g, g.finish(y=total)


def test_only_values_that_cannot_be_negative_are_shifted() -> None:
    g, module = chain(clamp_min=0.0)
    found, _ = quantise(g, module, asymmetric=True)
    assert found["first"] == found["relu"] == found["total"] == -128
    assert found["second"] == found["x/quantize"] == 0


def test_a_sum_with_one_signed_operand_stays_symmetric() -> None:
    g, module = chain()
    found, _ = quantise(g, module, asymmetric=True)
    assert found["first"] == found["total"] == 0
    assert found["relu"] == -128


def test_a_clamp_that_ends_below_zero_is_not_taken_for_positive() -> None:
    g = TopGraph(x=SHAPE)
    relu = g.op("relu", "relu", [g.input("x")])
    clip = g.op("clip", "clip", [relu], max=-0.5)
    found, _ = quantise(g, g.finish(y=clip), asymmetric=True)
    assert found["clip"] == 0


def test_operands_of_a_product_of_activations_stay_symmetric() -> None:
    g = TopGraph(x=SHAPE)
    relu = g.op("relu", "relu", [g.input("x")])
    turned = g.op("transpose", "turned", [relu], perm=(0, 1, 3, 2))
    product = g.op("matmul", "product", [relu, turned])
    found, _ = quantise(g, g.finish(y=product), asymmetric=True)
    assert found["relu"] == found["turned"] == 0


def test_symmetric_is_the_default() -> None:
    g, module = chain(clamp_min=0.0)
    found, _ = quantise(g, module, asymmetric=False)
    assert set(found.values()) == {0}


def deep() -> tuple[TopGraph, ModuleOp]:
    """Return eight clamped convolutions with weights that int8 holds exactly."""
    g = TopGraph(x=SHAPE)
    rng = np.random.default_rng(1)
    value = g.input("x")
    for index in range(8):
        codes = rng.integers(-60, 127, (3, 3, 1, 1))
        codes[:, 0] = 127
        value = g.conv(f"layer{index}", value, codes / 127.0, clamp_min=0.0)
    return g, g.finish(y=value)


@pytest.mark.parametrize("rounding", ["half_away", "truncate"])
def test_the_extra_bit_is_worth_decibels(rounding: str) -> None:
    g, module = deep()
    _, plain = quantise(g, module, False, rounding)
    g, module = deep()
    _, shifted = quantise(g, module, True, rounding)
    assert shifted > plain + 2


def test_the_option_of_the_pass() -> None:
    g, module = chain(clamp_min=0.0)
    samples = [{"x": np.ones(SHAPE, np.float32)}]
    write_attribute(module, calibrate(module, g.ctx.weights, samples, method="max"))
    copy = module.clone()
    make_pass("quantize{activations=asymmetric}").apply(g.ctx, copy)
    assert zeros(copy)["first"] == -128
    with pytest.raises(TilewrightError, match="symmetric or asymmetric") as caught:
        make_pass("quantize{activations=odd}").apply(g.ctx, module)
    assert caught.value.code == "E0702"
