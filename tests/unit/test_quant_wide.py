"""A linear layer whose result is only read as floats keeps its 32-bit sums."""

from __future__ import annotations

import numpy as np
import pytest
from xdsl.dialects.builtin import ModuleOp
from xdsl.utils.exceptions import VerifyException

from tests.unit.quant_top_graphs import TopGraph
from tilewright.dialects import quant
from tilewright.quant.calibrate import calibrate
from tilewright.quant.graph import main_function
from tilewright.quant.reference import QuantSession
from tilewright.runtime.float_executor import run_top
from tilewright.transforms.quant.quantize import quantize_module

DEPTH, CLASSES = 40, 300


def classifier(*, relu: bool = False, softmax: bool = False) -> tuple[TopGraph, ModuleOp]:
    g = TopGraph(x=(2, DEPTH))
    rng = np.random.default_rng(0)
    weight = g.weight("w", rng.standard_normal((CLASSES, DEPTH)))
    bias = g.weight("b", rng.standard_normal(CLASSES))
    clamp = {"clamp_min": 0.0} if relu else {}
    value = g.op("linear", "fc", [g.input("x"), weight, bias], **clamp)
    if softmax:
        value = g.op("softmax", "soft", [value], axis=1)
    return g, g.finish(y=value)


def quantised(g: TopGraph, module: ModuleOp, rounding: str) -> tuple[quant.LinearOp, np.ndarray]:
    """Quantise; return the linear op and the noise of the result over its largest magnitude."""
    sample = {"x": np.random.default_rng(1).standard_normal((2, DEPTH)).astype(np.float32)}
    table = calibrate(module, g.ctx.weights, [sample], method="max")
    (wanted,) = run_top(module, g.ctx.weights, sample).values()
    quantize_module(g.ctx, module, table.thresholds, rounding)
    module.verify()
    (got,) = QuantSession(module, g.ctx.weights).run(sample).values()
    ops = main_function(module).body.block.ops
    (linear,) = [op for op in ops if isinstance(op, quant.LinearOp)]
    return linear, np.abs(got - wanted).max() / np.abs(wanted).max()


@pytest.mark.parametrize("rounding", ["half_up", "half_away", "half_even", "truncate"])
@pytest.mark.parametrize("softmax", [False, True])
def test_sums_are_kept_before_floats(softmax: bool, rounding: str) -> None:
    linear, noise = quantised(*classifier(softmax=softmax), rounding)
    assert linear.wide
    assert noise < 0.02


def test_a_clamped_layer_is_requantised() -> None:
    linear, _ = quantised(*classifier(relu=True), "half_up")
    assert not linear.wide


def test_classes_are_told_apart_that_eight_bits_would_tie() -> None:
    g, module = classifier()
    sample = {"x": np.random.default_rng(2).standard_normal((2, DEPTH)).astype(np.float32)}
    table = calibrate(module, g.ctx.weights, [sample], method="max")
    quantize_module(g.ctx, module, table.thresholds, "half_up")
    (got,) = QuantSession(module, g.ctx.weights).run(sample).values()
    assert len(np.unique(got[0])) > 256


def test_a_float_result_is_no_sum() -> None:
    g, module = classifier()
    linear, _ = quantised(g, module, "half_up")
    from xdsl.dialects.builtin import TensorType, f32
    from xdsl.rewriter import Rewriter

    Rewriter.replace_value_with_new_type(linear.result, TensorType(f32, [2, CLASSES]))
    with pytest.raises(VerifyException, match="result must be a tensor of !quant"):
        linear.verify_()
