"""fp16: layers whose values leave its range stay float32 on the host, with the reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from xdsl.dialects.builtin import ModuleOp, StringAttr

from tests.unit.quant_top_graphs import TopGraph
from tilewright.diagnostics import TilewrightError
from tilewright.ir.context import CompileContext
from tilewright.quant.calibrate import calibrate
from tilewright.quant.graph import layer_of, main_function
from tilewright.quant.reference import run_quant
from tilewright.quant.table import write_attribute
from tilewright.runtime.float_executor import TopSession
from tilewright.transforms.quant.convert_to_half import ConvertToHalfPass, convert_module

Sample = dict[str, np.ndarray[Any, Any]]


def spelled_out(gain: float) -> tuple[TopGraph, ModuleOp]:
    """A linear layer, a normalisation in single operations, a linear layer."""
    rng = np.random.default_rng(0)
    g = TopGraph(x=(1, 6, 16))
    first = g.op(
        "linear", "first", [g.input("x"), g.weight("w1", rng.normal(size=(16, 16))), g.none()]
    )
    wide = g.op("mul", "wide", [first, g.weight("gain", [gain])])
    mean = g.op("reduce", "mean", [wide], kind="mean", axes=(2,), keepdims=True)
    d = g.op("sub", "d", [wide, mean])
    square = g.op("mul", "square", [d, d])
    spread = g.op("reduce", "spread", [square], kind="mean", axes=(2,), keepdims=True)
    eps = g.op("add", "eps", [spread, g.weight("e", [1e-5])])
    root = g.op("sqrt", "root", [eps])
    normal = g.op("div", "normal", [d, root])
    last = g.op("linear", "last", [normal, g.weight("w2", rng.normal(size=(4, 16))), g.none()])
    return g, g.finish(y=last)


def samples() -> list[Sample]:
    rng = np.random.default_rng(1)
    return [{"x": rng.normal(size=(1, 6, 16)).astype(np.float32)} for _ in range(3)]


def converted(gain: float, **options: Any) -> tuple[ModuleOp, CompileContext, ModuleOp, TopGraph]:
    g, module = spelled_out(gain)
    half, ctx = module.clone(), CompileContext(g.ctx.weights.copy())
    write_attribute(half, calibrate(module, g.ctx.weights, samples(), method="max"))
    ConvertToHalfPass(**options).apply(ctx, half)
    return half, ctx, module, g


def reasons(module: ModuleOp) -> dict[str, str]:
    ops = main_function(module).body.block.ops
    hosts = {layer_of(op): op.attributes.get("host") for op in ops}
    return {layer: host.data for layer, host in hosts.items() if isinstance(host, StringAttr)}


def test_squares_beyond_the_range_stay_float32() -> None:
    half, ctx, module, g = converted(gain=40.0)
    half.verify()
    kept = reasons(half)
    assert kept["square"].startswith('"square" reaches ')
    assert kept["square"].endswith("; the largest fp16 is 65504")
    # Its reader cannot take the squares as fp16 either; what does not overflow is computed in it.
    assert "square" in kept["spread"]
    assert not {"first", "wide", "mean", "d", "last"} & kept.keys()
    reference = TopSession(module, g.ctx.weights)
    for sample in samples():
        wanted = reference.run(sample)["y"]
        got = run_quant(half, ctx.weights, sample)["y"]
        assert np.abs(got - wanted).max() <= 2.0**-7 * np.abs(wanted).max()


def test_a_warning_names_the_layer_and_the_remedies() -> None:
    _, ctx, _, _ = converted(gain=40.0)
    [text] = [item.details["warning"] for item in ctx.decisions if "warning" in item.details]
    assert '"square" reaches' in text
    assert "the square of a normalisation in single operations" in text
    assert "LayerNormalization" in text
    assert "int8" in text


def test_nothing_is_kept_that_fits() -> None:
    half, ctx, _, _ = converted(gain=1.0)
    assert not any("largest fp16" in reason for reason in reasons(half).values())
    assert not any("warning" in item.details for item in ctx.decisions)


def test_the_model_is_refused_where_that_is_asked_for() -> None:
    with pytest.raises(TilewrightError, match='"square" overflows fp16') as caught:
        converted(gain=40.0, overflow="refuse")
    assert caught.value.code == "E0304"
    assert "--fp16-overflow" in str(caught.value)


def test_another_word_is_refused() -> None:
    with pytest.raises(TilewrightError, match="overflow must be host or refuse"):
        converted(gain=1.0, overflow="ignore")


def test_the_pass_changes_a_converted_module_no_more() -> None:
    half, ctx, _, _ = converted(gain=40.0)
    text = str(half)
    ConvertToHalfPass().apply(ctx, half)
    assert str(half) == text


def test_weights_beyond_the_range_keep_their_layer_in_float32() -> None:
    g = TopGraph(x=(1, 4))
    weight = g.weight("w", [[1e5, 0, 0, 0], [0, 1, 0, 0]])
    module = g.finish(y=g.op("linear", "fc", [g.input("x"), weight, g.none()]))
    convert_module(g.ctx, module, {"x": 1.0, "fc": 1e5})
    assert reasons(module) == {"fc": '"w" reaches 100000; the largest fp16 is 65504'}
    x = np.array([[0.5, 2, 0, 0]], np.float32)
    np.testing.assert_array_equal(run_quant(module, g.ctx.weights, {"x": x})["y"], [[5e4, 2]])


def test_biases_are_float32_whatever_they_hold() -> None:
    g = TopGraph(x=(1, 2))
    fc = g.op("linear", "fc", [g.input("x"), g.weight("w", [[1.0, 1.0]]), g.weight("b", [-7e4])])
    module = g.finish(y=fc)
    convert_module(g.ctx, module, {"x": 6e4, "fc": 5e4})
    assert not reasons(module)
