"""Softmax and layer normalisation at the quant level: what the ops and the passes refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from xdsl.dialects.builtin import IntegerAttr, StringAttr, i64
from xdsl.ir import Operation
from xdsl.utils.exceptions import VerifyException

from tests.quant_graphs import Graph, codes
from tests.row_graphs import layer_norm, softmax
from tests.unit.quant_top_graphs import TopGraph
from tilewright.diagnostics import TilewrightError
from tilewright.ir.context import CompileContext
from tilewright.quant.graph import layer_of, main_function
from tilewright.spec.hardware import load_target
from tilewright.transforms.quant.quantize import quantize_module
from tilewright.transforms.quant.verify_scales import VerifyScalesPass


def changed(kind: str, **attributes: Any) -> None:
    """Build an op, change attributes, verify."""
    graph = Graph(x=codes([2, 4, 8], zero=3))
    x = graph.input("x")
    made = softmax(graph, "s", x) if kind == "softmax" else layer_norm(graph, "n", x, RNG)
    assert isinstance(made.owner, Operation)
    for key, value in attributes.items():
        made.owner.attributes[key] = (
            StringAttr(value) if isinstance(value, str) else IntegerAttr(value, i64)
        )
    made.owner.verify()


RNG = np.random.default_rng(0)
REFUSED = [
    ("softmax", {"mult": 2**15}, "mult must be 16384..32767, not 32768"),
    ("softmax", {"shift": 16}, r"shift must be 0..15, not 16"),
    ("softmax", {"zp": 0}, "zp must be the result's zero point, -128"),
    ("softmax", {"lo": 5, "hi": 4}, r"lo \(5\) is above hi \(4\)"),
    ("softmax", {"table": ""}, "needs the name of its table"),
    ("layer_norm", {"epsilon": 0}, "epsilon must be 1"),
    ("layer_norm", {"shift": 32}, "shift must be 1..31, not 32"),
    ("layer_norm", {"axis": 3}, "axis must be 0..2, not 3"),
    ("layer_norm", {"axis": 1}, "gain must be tensor<32xi16>"),
]


@pytest.mark.parametrize(("kind", "attributes", "message"), REFUSED)
def test_what_is_no_such_op(kind: str, attributes: dict[str, Any], message: str) -> None:
    changed(kind)
    with pytest.raises(VerifyException, match=message):
        changed(kind, **attributes)


def test_rows_have_a_largest_length() -> None:
    with pytest.raises(VerifyException, match=r"1\.\.16384 elements, not 16385"):
        softmax(graph := Graph(x=codes([1, 16385])), "s", graph.input("x"))


def test_a_softmax_of_another_scale_is_found() -> None:
    graph = Graph(x=codes([2, 8]))
    made = softmax(graph, "s", graph.input("x"))
    assert isinstance(made.owner, Operation)
    made.owner.attributes["mult"] = IntegerAttr(20000, i64)
    module = graph.module(made)
    with pytest.raises(TilewrightError, match=r'"s" .* mult does not fit'):
        VerifyScalesPass().apply(graph.context(), module)


def quantised(epsilon: float, reach: float) -> dict[str, tuple[str, str]]:
    """Quantise relu, normalisation, relu; return op and reason of every layer."""
    g = TopGraph(x=(1, 4, 16))
    relu = g.op("relu", "r", [g.input("x")])
    scale = g.weight("g", np.ones(16))
    norm = g.op("layer_norm", "n", [relu, scale, g.none()], epsilon=epsilon, axis=2)
    module = g.finish(out=g.op("relu", "y", [norm]))
    target = load_target("tiny8").model_copy(update={"vector_rows": True})
    ctx = CompileContext(g.ctx.weights, target)
    quantize_module(ctx, module, {"x": reach, "r": reach, "n": 4.0, "y": 4.0}, "half_up")
    module.verify()
    reasons = {d.layer: d.reason for d in ctx.decisions if not d.fired}
    return {
        layer_of(op): (op.name, reasons.get(layer_of(op), ""))
        for op in main_function(module).body.block.ops
        if "name" in op.attributes
    }


def test_an_epsilon_beyond_all_codes_keeps_a_layer_on_the_host() -> None:
    assert quantised(1e-5, 4.0)["n"] == ("quant.layer_norm", "")
    name, reason = quantised(1.0, 1e-6)["n"]
    assert name == "top.layer_norm"
    assert reason == "its epsilon 1 is larger than any variance of its codes"
