"""Weights of 4 bits at the quant level: who gets them, what is refused and why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from xdsl.dialects.builtin import IntegerAttr, ModuleOp, TensorType, i8, i32
from xdsl.ir import Operation
from xdsl.utils.exceptions import VerifyException

from tests.quant_graphs import Graph, codes
from tests.unit.quant_top_graphs import TopGraph
from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.dialects import quant
from tilewright.dialects.quant import i4, weight_bits_of, weight_code_limit
from tilewright.ir.context import CompileContext
from tilewright.passes import make_pass
from tilewright.quant.graph import layer_of, main_function
from tilewright.spec.hardware import load_target
from tilewright.transforms.quant.mark_weight_bits import mark_weight_bits
from tilewright.transforms.quant.quantize import quantize_module
from tilewright.transforms.quant.verify_scales import VerifyScalesPass


def network() -> tuple[TopGraph, ModuleOp]:
    g, rng = TopGraph(x=(1, 5, 5, 4)), np.random.default_rng(0)
    x = g.input("x")
    for name in ("one", "two"):
        x = g.conv(name, x, rng.normal(size=(4, 4, 1, 1)), layout="nhwc")
    return g, g.finish(y=x)


def bits_of(module: ModuleOp) -> dict[str, int | None]:
    return {
        layer_of(op): int(value.value.data) if isinstance(value, IntegerAttr) else None
        for op in main_function(module).body.block.ops
        if op.name == "top.conv"
        for value in [op.attributes.get("weight_bits")]
    }


def quantised_convs(
    module: ModuleOp, context: CompileContext
) -> tuple[list[quant.ConvOp], CompileContext]:
    quantize_module(context, module, {"x": 3.0, "one": 4.0, "two": 5.0}, "half_up")
    module.verify()
    return [op for op in module.walk() if isinstance(op, quant.ConvOp)], context


def test_layers_are_marked_and_a_second_time_changes_nothing() -> None:
    g, module = network()
    step = make_pass('quant-mark-weight-bits{bits=4 layers="two=8"}')
    step.apply(g.ctx, module)
    assert bits_of(module) == {"one": 4, "two": None}
    text = str(module)
    step.apply(g.ctx, module)
    assert str(module) == text
    reasons = {item.layer: (item.fired, item.reason) for item in g.ctx.decisions}
    assert reasons == {
        "one": (True, "its weights shall have 4 bits"),
        "two": (False, "its weights keep 8 bits, as asked for"),
    }
    mark_weight_bits(module, 8, {"two": 4})
    assert bits_of(module) == {"one": 4, "two": 4}
    mark_weight_bits(module, 8, {"one": 8})
    assert bits_of(module) == {"one": None, "two": 4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ('layers="tow=8"', "`tow` is no layer with weights"),
        ('layers="two=3"', "`two`: weights have 8 or 4 bits, not 3"),
        ('layers="two"', "`two` is not NAME=BITS"),
        ("bits=5", "`weight bits`: weights have 8 or 4 bits, not 5"),
    ],
)
def test_marks_that_are_refused(options: str, message: str) -> None:
    g, module = network()
    with pytest.raises(UsageError) as error:
        make_pass(f"quant-mark-weight-bits{{{options}}}").apply(g.ctx, module)
    assert error.value.message == message
    assert bits_of(module) == {"one": None, "two": None}
    if "tow" in options:
        assert error.value.hint == "did you mean `two`?"


@pytest.mark.parametrize(
    ("target", "stored", "reason"),
    [
        ("tpu_v2", i4, "weights of 4 bits, two a byte"),
        ("edge16", i8, "weights of 4 bits take a byte each: `edge16` has no int4"),
        ("", i8, "weights of 4 bits take a byte each: no target is known"),
    ],
)
def test_the_chip_decides_how_they_are_stored(target: str, stored: Any, reason: str) -> None:
    g, module = network()
    mark_weight_bits(module, 4, {"two": 8})
    context = CompileContext(g.ctx.weights, load_target(target) if target else None)
    (one, two), context = quantised_convs(module, context)
    assert one.w.type == TensorType(stored, [4, 4, 1, 1])
    assert two.w.type == TensorType(i8, [4, 4, 1, 1])
    assert (weight_bits_of(one), weight_code_limit(one)) == (4, 7)
    assert (weight_bits_of(two), weight_code_limit(two)) == (8, 127)
    assert isinstance(one.w.owner, Operation)
    found = context.weights.get(layer_of(one.w.owner))
    assert found.dtype == np.int8
    assert np.abs(found).max() == 7
    assert reason in [item.reason for item in context.decisions if item.layer == "one"]
    VerifyScalesPass().apply(context, module)


def test_another_number_of_bits_is_an_error() -> None:
    g, module = network()
    for op in module.walk():
        if op.name == "top.conv":
            op.attributes["weight_bits"] = IntegerAttr(5, i32)
    with pytest.raises(TilewrightError, match='weights of "one" have 8 or 4 bits, not 5'):
        quantised_convs(module, g.ctx)


def one_layer(array: np.ndarray) -> tuple[Graph, ModuleOp]:
    graph = Graph(x=codes([1, 4, 4, 2]))
    made = graph.conv("a", graph.input("x"), np.random.default_rng(0), 3, (1, 1), bits=4)
    graph.weights.set("a.w", array)
    return graph, graph.module(made)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.full((3, 2, 1, 1), 8, np.int8), r"weights of 4 bits must be -7\.\.7"),
        (np.full((3, 2, 1, 1), -8, np.int8), r"weights of 4 bits must be -7\.\.7"),
        (np.full((3, 2, 1, 1), 3, np.int16), "lie in an array of int8, not of int16"),
    ],
)
def test_codes_that_are_no_4_bits_are_refused(array: np.ndarray, message: str) -> None:
    graph, module = one_layer(array)
    with pytest.raises(TilewrightError, match=message):
        VerifyScalesPass().apply(graph.context(), module)
    graph, module = one_layer(np.full((3, 2, 1, 1), -7, np.int8))
    VerifyScalesPass().apply(graph.context(), module)


@pytest.mark.parametrize(
    ("bits", "message"),
    [(8, r"weights of 8 bits are no tensor<3x2x1x1xi4>"), (5, "weight_bits must be 8 or 4, not 5")],
)
def test_types_and_bits_must_agree(bits: int, message: str) -> None:
    _, module = one_layer(np.zeros((3, 2, 1, 1), np.int8))
    (conv,) = (op for op in module.walk() if isinstance(op, quant.ConvOp))
    conv.attributes["weight_bits"] = IntegerAttr(bits, i32)
    with pytest.raises(VerifyException, match=message):
        conv.verify()
