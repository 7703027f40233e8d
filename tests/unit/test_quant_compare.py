"""Comparison measures, channel equalisation, verification of scales."""

from __future__ import annotations

import math

import numpy as np
import pytest
from xdsl.dialects.builtin import IntegerAttr, ModuleOp, TensorType, i64
from xdsl.ir import Operation

from tests.unit.quant_top_graphs import TopGraph
from tilewright.diagnostics import TilewrightError
from tilewright.dialects.quant import UniformType, quantised, shape_of
from tilewright.ir.context import CompileContext
from tilewright.ptq.equalize import equalize
from tilewright.quant.calibrate import calibrate
from tilewright.quant.compare import compare, cosine, sqnr, top1_agreement
from tilewright.quant.graph import layer_of, main_function
from tilewright.quant.reference import run_quant
from tilewright.runtime.float_executor import TopSession
from tilewright.transforms.quant.quantize import quantize_module
from tilewright.transforms.quant.verify_scales import VerifyScalesPass

ROUNDINGS = ("half_up", "half_away", "half_even", "truncate")


def test_measures() -> None:
    a = np.array([3.0, 4.0])
    assert sqnr(a, a) == math.inf
    assert sqnr(np.zeros(2), a) == -math.inf
    assert sqnr(a, a + 0.5) == pytest.approx(10 * math.log10(25 / 0.5))
    assert cosine(a, 2 * a) == pytest.approx(1)
    assert cosine(a, np.array([-4.0, 3.0])) == pytest.approx(0)
    assert cosine(np.zeros(2), np.zeros(2)) == 1
    scores = [np.array([[1.0, 2.0]]), np.array([[3.0, 0.0]])]
    assert top1_agreement(scores, [np.array([[0.0, 9.0]]), np.array([[0.0, 1.0]])]) == 0.5


def uneven_net(seed: int = 0) -> tuple[TopGraph, ModuleOp]:
    """Expand, depthwise, project, with channel ranges a hundredfold apart."""
    rng = np.random.default_rng(seed)
    g = TopGraph(x=(1, 4, 10, 10))
    spread = 10.0 ** rng.uniform(-2, 0, (16, 1, 1, 1))
    c1 = g.conv(
        "expand", g.input("x"), rng.normal(size=(16, 4, 1, 1)) * spread,
        rng.normal(size=16) * 0.1 * spread.ravel(), clamp_min=0.0, clamp_max=6.0,
    )  # fmt: skip
    c2 = g.conv(
        "depth", c1, rng.normal(size=(16, 1, 3, 3)) / spread, rng.normal(size=16), group=16,
        clamp_min=0.0, clamp_max=6.0,
    )  # fmt: skip
    c3 = g.conv("project", c2, rng.normal(size=(4, 16, 1, 1)), rng.normal(size=4))
    return g, g.finish(y=c3)


def samples(count: int = 8) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(7)
    return [{"x": rng.normal(size=(1, 4, 10, 10)).astype(np.float32)} for _ in range(count)]


def noise(equalised: bool) -> float:
    g, module = uneven_net()
    reference = TopSession(module, g.ctx.weights.copy())
    ctx = CompileContext(g.ctx.weights.copy())
    if equalised:
        assert equalize(ctx, module, samples()) == 2
    table = calibrate(module, ctx.weights, samples(), method="max")
    quantize_module(ctx, module, table.thresholds, "half_up")
    results = [
        (reference.run(sample)["y"], run_quant(module, ctx.weights, sample)["y"])
        for sample in samples()
    ]
    return sqnr(np.stack([a for a, _ in results]), np.stack([b for _, b in results]))


def test_equalising_keeps_the_float_function_and_lowers_the_noise() -> None:
    g, module = uneven_net()
    before = [TopSession(module, g.ctx.weights).run(s)["y"] for s in samples()]
    changed = g.ctx.weights.copy()
    ctx = CompileContext(changed)
    assert equalize(ctx, module, samples()) == 2
    session = TopSession(module, changed)
    for expected, sample in zip(before, samples(), strict=True):
        np.testing.assert_allclose(session.run(sample)["y"], expected, rtol=1e-3, atol=1e-3)
    assert {d.layer for d in ctx.decisions if d.fired} == {"expand", "depth"}
    assert noise(True) > noise(False) + 5


def test_equalising_refuses_and_says_why() -> None:
    g = TopGraph(x=(1, 4, 6, 6))
    one = np.ones((4, 4, 1, 1))
    c1 = g.conv("bounded", g.input("x"), one, clamp_min=-1.0)
    c2 = g.conv("even", c1, one)
    c3 = g.conv("last", c2, one)
    module = g.finish(y=c3)
    assert equalize(g.ctx, module, [{"x": np.ones((1, 4, 6, 6), np.float32)}]) == 0
    assert {d.layer: d.reason for d in g.ctx.decisions} == {
        "bounded": "its lower bound -1 does not scale",
        "even": "its channels have like ranges",
    }


def test_values_with_other_readers_are_not_equalised() -> None:
    g = TopGraph(x=(1, 4, 6, 6))
    spread = np.array([1, 0.01, 1, 1]).reshape(4, 1, 1, 1) * np.ones((4, 4, 1, 1))
    c1 = g.conv("a", g.input("x"), spread, clamp_min=0.0)
    c2 = g.conv("b", c1, np.ones((4, 4, 1, 1)))
    module = g.finish(y=g.op("add", "s", [c1, c2]))
    assert equalize(g.ctx, module, [{"x": np.ones((1, 4, 6, 6), np.float32)}]) == 0


def quantised_net() -> tuple[TopGraph, ModuleOp, ModuleOp, CompileContext]:
    g, module = uneven_net()
    table = calibrate(module, g.ctx.weights, samples(), method="max")
    copy, ctx = module.clone(), CompileContext(g.ctx.weights.copy())
    quantize_module(ctx, copy, table.thresholds, "half_up")
    return g, module, copy, ctx


def test_layers_are_compared_worst_first() -> None:
    g, module, copy, ctx = quantised_net()
    result = compare(module, g.ctx.weights, copy, ctx.weights, samples(3))
    assert result.samples == 3
    assert [layer.name for layer in result.layers] == ["x", "expand", "depth", "project"]
    worst = result.worst()
    alone = [layer.isolated.sqnr for layer in result.layers]
    assert [layer.isolated.sqnr for layer in worst] == sorted(alone)
    assert result.worst(1) == worst[:1]
    [output] = result.outputs
    last = result.layers[-1]
    assert output.sqnr == pytest.approx(last.sqnr)
    assert last.scale == quantised(find(copy, "project").results[0]).step
    assert not result.agreement  # an image holds no class scores
    assert 0.9 < last.accumulated.cosine < 1


def find(module: ModuleOp, layer: str) -> Operation:
    return next(op for op in main_function(module).body.block.ops if layer_of(op) == layer)


def test_consistent_scales_pass_unchanged() -> None:
    _, _, copy, ctx = quantised_net()
    text = str(copy)
    VerifyScalesPass().apply(ctx, copy)
    assert str(copy) == text


def test_a_scale_that_does_not_fit_its_multiplier_is_an_error() -> None:
    _, _, copy, ctx = quantised_net()
    result = find(copy, "depth").results[0]
    kind = TensorType(UniformType.of(quantised(result).step * 1.01), shape_of(result))
    object.__setattr__(result, "_type", kind)
    with pytest.raises(TilewrightError, match=r'"depth".*multiplier of channel 0') as caught:
        VerifyScalesPass().apply(ctx, copy)
    assert caught.value.code == "E0501"


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_movers_that_change_the_scale_get_a_requantisation(rounding: str) -> None:
    g = TopGraph(x=(1, 4, 6, 6))
    a = g.op("tanh", "t", [g.input("x")])
    r = g.op("reshape", "r", [a], (4, 36))
    s = g.op("sigmoid", "s", [r])
    module = g.finish(y=s)
    quantize_module(g.ctx, module, {"x": 4.0, "t": 1.0, "s": 1.0}, rounding)
    reshape = find(module, "r")
    result = reshape.results[0]
    object.__setattr__(result, "_type", TensorType(UniformType.of(2.0 / 127), shape_of(result)))
    VerifyScalesPass().apply(g.ctx, module)
    module.verify()
    added = find(module, "r/requantize")
    assert reshape.operands[0] is added.results[0]
    # 1/127 to 2/127: half the codes.
    ratio = added.attributes["mult"], added.attributes["shift"]
    assert all(isinstance(item, IntegerAttr) for item in ratio)
    m, shift = (item.value.data for item in ratio if isinstance(item, IntegerAttr))
    assert m / 2**shift == 0.5
    text = str(module)
    VerifyScalesPass().apply(g.ctx, module)
    assert str(module) == text


def test_a_wrong_multiplier_is_an_error() -> None:
    g = TopGraph(x=(1, 4))
    module = g.finish(y=g.op("add", "sum", [g.input("x"), g.op("tanh", "t", [g.input("x")])]))
    quantize_module(g.ctx, module, {"x": 4.0, "t": 1.0, "sum": 5.0}, "half_up")
    VerifyScalesPass().apply(g.ctx, module)
    find(module, "sum").attributes["mult_b"] = IntegerAttr(12345, i64)
    with pytest.raises(TilewrightError, match=r'"sum".*mult_b does not fit'):
        VerifyScalesPass().apply(g.ctx, module)
