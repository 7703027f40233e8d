"""If, Loop and Scan of known course, and Einsum: against onnxruntime and numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tests.unit.onnx_graphs import F, model_of, normal, run_ort, run_ours, to_top, top_ops
from tilewright import onnx_backend
from tilewright.diagnostics import TilewrightError
from tilewright.dialects.onnx import UnknownValueError
from tilewright.frontends.onnx import import_onnx
from tilewright.ir.context import CompileContext
from tilewright.ir.weights import Array
from tilewright.transforms.onnx.base import RefusedError
from tilewright.transforms.onnx.einsum import parse_equation


def graph(
    nodes: Sequence[NodeProto],
    inputs: dict[str, tuple[int, list[int]]],
    outputs: dict[str, tuple[int, list[int]]],
    weights: dict[str, Array] | None = None,
) -> GraphProto:
    return helper.make_graph(
        list(nodes),
        "inner",
        [helper.make_tensor_value_info(n, t, s) for n, (t, s) in inputs.items()],
        [helper.make_tensor_value_info(n, t, s) for n, (t, s) in outputs.items()],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in (weights or {}).items()],
    )


def power_loop(stop: int | None = None) -> GraphProto:
    """`h = h * x + k` with `x` of the outer graph; gives each `h` out; ends after step `stop`."""
    condition = (
        helper.make_node("Identity", ["go"], ["on"])
        if stop is None
        else helper.make_node("Less", ["i", "stop"], ["on"])
    )
    nodes = [
        helper.make_node("Mul", ["h", "x"], ["m"], name="mul"),
        helper.make_node("Add", ["m", "k"], ["h2"], name="add"),
        helper.make_node("Identity", ["h2"], ["seen"]),
        condition,
    ]
    weights: dict[str, Array] = {"k": normal(3, seed=9)}
    if stop is not None:
        weights["stop"] = np.array(stop)
    return graph(
        nodes,
        {"i": (TensorProto.INT64, []), "go": (TensorProto.BOOL, []), "h": (F, [3])},
        {"on": (TensorProto.BOOL, []), "h2": (F, [3]), "seen": (F, [3])},
        weights,
    )


def loop_model(body: GraphProto, count: int | None, condition: bool | None = True) -> ModelProto:
    names = ["" if count is None else "n", "" if condition is None else "c", "x"]
    node = helper.make_node("Loop", names, ["y", "all"], name="loop", body=body)
    constants: dict[str, Array] = {}
    if count is not None:
        constants["n"] = np.array(count)
    if condition is not None:
        constants["c"] = np.array(condition)
    return model_of([node], {"x": [3]}, ["y", "all"], constants)


@pytest.mark.parametrize(
    ("count", "condition", "stop"),
    [(4, True, None), (4, None, None), (1, True, None), (None, True, 2), (9, True, 3)],
)
def test_loop_is_unrolled(count: int | None, condition: bool | None, stop: int | None) -> None:
    model = loop_model(power_loop(stop), count, condition)
    feed = {"x": normal(3)}
    for got, want in zip(run_ours(model, feed), run_ort(model, feed), strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-5)
    module, ctx = to_top(model)
    steps = 4 if count == 4 else 1 if count == 1 else stop + 1 if stop is not None else 0
    assert top_ops(module).count("top.mul") == steps
    assert [d.reason for d in ctx.decisions if d.layer == "loop"] == [f"unrolled to {steps} steps"]
    assert "loop/0/mul" in str(module)


def refusal(model: ModelProto) -> TilewrightError:
    with pytest.raises(TilewrightError) as caught:
        import_onnx(model, None, CompileContext())
    return caught.value


def test_loops_that_cannot_be_unrolled() -> None:
    error = refusal(loop_model(power_loop(), 5000))
    assert error.code == "E0102"
    assert "1024" in error.details[0]
    assert "no known shape" in refusal(loop_model(power_loop(), 0)).details[0]
    model = loop_model(power_loop(), None)
    model.graph.node[0].input[0] = "count"
    model.graph.input.append(helper.make_tensor_value_info("count", TensorProto.INT64, []))
    error = refusal(model)
    assert isinstance(error, UnknownValueError)
    assert error.inputs == ("count",)
    found = onnx_backend.run_model(model, {"x": normal(3), "count": np.array(2)})
    wanted = run_ort(loop_model(power_loop(), 2), {"x": normal(3)})
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-6)


@pytest.mark.parametrize("backward", [0, 1])
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("out_axis", [0, 1, -1])
def test_scan_is_unrolled(backward: int, axis: int, out_axis: int) -> None:
    body = graph(
        [
            helper.make_node("Mul", ["s", "half"], ["f"]),
            helper.make_node("Add", ["f", "p"], ["s2"]),
            helper.make_node("Sub", ["p", "s"], ["o"]),
        ],
        {"s": (F, [3]), "p": (F, [3])},
        {"s2": (F, [3]), "o": (F, [3])},
        {"half": np.array(0.5, np.float32)},
    )
    node = helper.make_node(
        "Scan",
        ["s0", "x"],
        ["final", "all"],
        name="scan",
        body=body,
        num_scan_inputs=1,
        scan_input_axes=[axis],
        scan_input_directions=[backward],
        scan_output_axes=[out_axis],
        scan_output_directions=[1 - backward],
    )
    model = model_of([node], {"x": [3, 3]}, ["final", "all"], {"s0": normal(3, seed=4)})
    feed = {"x": normal(3, 3)}
    for got, want in zip(run_ours(model, feed), run_ort(model, feed), strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_scan_of_different_lengths_is_malformed() -> None:
    body = graph(
        [helper.make_node("Add", ["p", "q"], ["o"])],
        {"p": (F, [2]), "q": (F, [2])},
        {"o": (F, [2])},
    )
    node = helper.make_node("Scan", ["x", "w"], ["y"], body=body, num_scan_inputs=2)
    model = model_of([node], {"x": [3, 2]}, ["y"], {"w": normal(4, 2)})
    assert "different lengths" in refusal(model).message


def test_branch_is_named_after_the_outer_output() -> None:
    then = graph([helper.make_node("Relu", ["x"], ["t"])], {}, {"t": (F, [2])})
    other = graph([helper.make_node("Neg", ["x"], ["e"])], {}, {"e": (F, [2])})
    for flag, kind in ((True, "top.relu"), (False, "top.neg")):
        node = helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other)
        model = model_of([node], {"x": [2]}, ["y"], {"c": np.array(flag)})
        module, _ = to_top(model)
        assert top_ops(module) == [kind]
        assert 'result_names = ["y"]' in str(module)


EQUATIONS: list[tuple[str, list[tuple[int, ...]]]] = [
    ("ij,jk->ik", [(2, 3), (3, 4)]),
    ("ij,jk", [(2, 3), (3, 4)]),
    ("bhqd,bhkd->bhqk", [(2, 3, 4, 5), (2, 3, 6, 5)]),
    ("bij,bjk->kbi", [(2, 3, 4), (2, 4, 5)]),
    ("i,j->ij", [(3,), (4,)]),
    ("i,i->", [(3,), (3,)]),
    ("ij->ji", [(2, 3)]),
    ("ij->", [(2, 3)]),
    ("ij->j", [(2, 3)]),
    ("ba", [(2, 3)]),
    ("...ij,...jk->...ik", [(2, 3, 4), (2, 4, 5)]),
    ("b...,b...->...", [(2, 3, 4), (2, 3, 4)]),
    ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 5)]),
    ("ij,kj,k->i", [(2, 3), (4, 3), (4,)]),
    ("ijm,jk->ik", [(2, 3, 6), (3, 4)]),
]


@pytest.mark.parametrize(("equation", "shapes"), EQUATIONS)
def test_einsum(equation: str, shapes: list[tuple[int, ...]]) -> None:
    arrays = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    names = ["x", *(f"w{i}" for i in range(1, len(shapes)))]
    weights: dict[str, Array] = dict(zip(names[1:], arrays[1:], strict=True))
    node = helper.make_node("Einsum", names, ["y"], equation=equation)
    model = model_of([node], {"x": list(shapes[0])}, ["y"], weights)
    untyped: Any = np.einsum
    wanted = untyped(equation, *arrays)
    found = run_ours(model, {"x": arrays[0]})[0]
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("equation", "ranks"),
    [("ii->i", [2]), ("ij,jk->ik", [2]), ("ij->ik", [2]), ("ij", [3]), ("ij->ii", [2])],
)
def test_equations_that_are_refused(equation: str, ranks: list[int]) -> None:
    with pytest.raises(RefusedError):
        parse_equation(equation, ranks)


def test_einsum_of_sizes_that_differ_is_refused() -> None:
    node = helper.make_node("Einsum", ["x", "w"], ["y"], equation="ij,jk->ik")
    model = model_of([node], {"x": [2, 3]}, ["y"], {"w": normal(4, 5)})
    with pytest.raises(TilewrightError):
        to_top(model)
