"""Layer normalisations as exporters spell them: ONNX in, one `top.layer_norm` out."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from xdsl.dialects.builtin import ArrayAttr, StringAttr

from tilewright.compiler import FrontEnd, front_end
from tilewright.quant.graph import layer_of, main_function
from tilewright.runtime.float_executor import TopSession
from tilewright.spec.hardware import load_target

SHAPE = [2, 5, 8]


def node(kind: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs.split(), [output], name=output, **attributes)


def network(nodes: list[onnx.NodeProto], opset: int) -> onnx.ModelProto:
    random = np.random.default_rng(0)
    constants = {
        "two": np.array(2, np.float32),
        "half": np.array(0.5, np.float32),
        "minus_half": np.array(-0.5, np.float32),
        "one": np.array(1, np.float32),
        "eps": np.array(1e-5, np.float32),
        "axes": np.array([-1], np.int64),
        "g": random.normal(1, 0.2, 8).astype(np.float32),
        "b": random.normal(0, 0.2, 8).astype(np.float32),
    }
    used = {name for item in nodes for name in item.input}
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPE)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, SHAPE)],
        [numpy_helper.from_array(v, k) for k, v in constants.items() if k in used],
    )
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def mean(name: str, operand: str, opset: int) -> onnx.NodeProto:
    """Return a mean over the last axis: axes are an input from opset 18 on."""
    if opset >= 18:
        return node("ReduceMean", f"{operand} axes", name)
    return node("ReduceMean", operand, name, axes=[-1])


SQUARES = {
    "pow": lambda d: [node("Pow", f"{d} two", "sq")],
    "mul": lambda d: [node("Mul", f"{d} {d}", "sq")],
}
ROOTS = {
    "sqrt, div": [node("Sqrt", "ve", "r"), node("Div", "d r", "n")],
    "sqrt, reciprocal, mul": [
        node("Sqrt", "ve", "r"), node("Reciprocal", "r", "i"), node("Mul", "d i", "n")
    ],
    "reciprocal first": [
        node("Sqrt", "ve", "r"), node("Reciprocal", "r", "i"), node("Mul", "i d", "n")
    ],
    "one over sqrt": [
        node("Sqrt", "ve", "r"), node("Div", "one r", "i"), node("Mul", "d i", "n")
    ],
    "pow 1/2": [node("Pow", "ve half", "r"), node("Div", "d r", "n")],
    "pow -1/2": [node("Pow", "ve minus_half", "i"), node("Mul", "d i", "n")],
}  # fmt: skip
AFFINES = {
    "scale and bias": [node("Mul", "n g", "s"), node("Add", "s b", "y")],
    "constants first": [node("Mul", "g n", "s"), node("Add", "b s", "y")],
    "plain": [node("Identity", "n", "y")],
}


def spelled(
    opset: int = 13, square: str = "pow", root: str = "sqrt, div", affine: str = "scale and bias",
    eps: str = "v eps",
) -> onnx.ModelProto:  # fmt: skip
    nodes = [mean("m", "x", opset), node("Sub", "x m", "d"), *SQUARES[square]("d")]
    nodes += [mean("v", "sq", opset), node("Add", eps, "ve"), *ROOTS[root], *AFFINES[affine]]
    return network(nodes, opset)


def kinds(front: FrontEnd) -> list[str]:
    ops = main_function(front.stage.module).body.block.ops
    quiet = ("top.weight", "top.none", "func.return")
    return [op.name.removeprefix("top.") for op in ops if op.name not in quiet]


def check(model: onnx.ModelProto) -> FrontEnd:
    """Import a model, and compare it with onnxruntime."""
    import onnxruntime

    front = front_end(model, load_target("edge16"))
    x = np.random.default_rng(1).normal(3, 2, SHAPE).astype(np.float32)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    wanted = np.asarray(session.run(None, {"x": x})[0])
    got = TopSession(front.stage.module, front.stage.weights).run({"x": x})["y"]
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
    return front


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("square", SQUARES)
@pytest.mark.parametrize("affine", AFFINES)
def test_of_every_opset_square_and_affine(opset: int, square: str, affine: str) -> None:
    assert kinds(check(spelled(opset, square, affine=affine))) == ["layer_norm"]


@pytest.mark.parametrize("root", ROOTS)
def test_of_every_root(root: str) -> None:
    assert kinds(check(spelled(root=root))) == ["layer_norm"]


def test_epsilon_first() -> None:
    assert kinds(check(spelled(eps="eps v"))) == ["layer_norm"]


def test_differences_that_are_computed_twice() -> None:
    nodes = [
        mean("m", "x", 13), node("Sub", "x m", "d"), node("Sub", "x m", "d2"),
        node("Pow", "d2 two", "sq"), mean("v", "sq", 13), node("Add", "v eps", "ve"),
        *ROOTS["sqrt, div"], *AFFINES["scale and bias"],
    ]  # fmt: skip
    assert kinds(check(network(nodes, 13))) == ["layer_norm"]


def test_the_operator_itself() -> None:
    model = network([node("LayerNormalization", "x g b", "y", axis=-1, epsilon=1e-5)], 17)
    assert kinds(check(model)) == ["layer_norm"]


def test_it_stands_for_what_it_was_made_of() -> None:
    front = check(spelled())
    [op] = [
        op for op in main_function(front.stage.module).body.block.ops if op.name == "top.layer_norm"
    ]
    fused = op.attributes["fused"]
    assert isinstance(fused, ArrayAttr)
    names = {item.data for item in fused if isinstance(item, StringAttr)} | {layer_of(op)}
    assert {"d", "n", "s", "y"} <= names


REFUSED = {
    "another value's mean": [
        node("Neg", "x", "w"), mean("m", "w", 13), node("Sub", "x m", "d"),
        node("Mul", "d d", "sq"), mean("v", "sq", 13), node("Add", "v eps", "ve"),
        *ROOTS["sqrt, div"], *AFFINES["plain"],
    ],
    "the square of another value": [
        mean("m", "x", 13), node("Sub", "x m", "d"), node("Mul", "x x", "sq"), mean("v", "sq", 13),
        node("Add", "v eps", "ve"), *ROOTS["sqrt, div"], *AFFINES["plain"],
    ],
    "another axis": [
        node("ReduceMean", "x", "m", axes=[1]), node("Sub", "x m", "d"), node("Mul", "d d", "sq"),
        node("ReduceMean", "sq", "v", axes=[1]), node("Add", "v eps", "ve"), *ROOTS["sqrt, div"],
        *AFFINES["plain"],
    ],
    "a cube": [
        mean("m", "x", 13), node("Sub", "x m", "d"), node("Mul", "d d", "s2"),
        node("Mul", "s2 d", "sq"), node("Abs", "sq", "sa"), mean("v", "sa", 13),
        node("Add", "v eps", "ve"), *ROOTS["sqrt, div"], *AFFINES["plain"],
    ],
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_near_misses_stay_as_they_are(what: str) -> None:
    assert "layer_norm" not in kinds(check(network(REFUSED[what], 13)))


def test_another_axis_is_refused_with_a_reason() -> None:
    front = front_end(network(REFUSED["another axis"], 13), load_target("edge16"))
    reasons = [item.reason for item in front.context.decisions if not item.fired]
    assert "a normalisation over axes [1], not the last ones" in reasons
