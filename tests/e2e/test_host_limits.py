"""What exceeds an instruction's counters runs on the host, with the reason, and stays right."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from tilewright.compare import compare
from tilewright.compiler import compile_model
from tilewright.ptq.options import QuantOptions
from tilewright.quant.compare import sqnr
from tilewright.runtime.runtime import Executor
from tilewright.spec.hardware import load_target

TINY = load_target("tiny8")
WEIGHT = np.random.default_rng(1).standard_normal((4, 3, 3, 3)).astype(np.float32)

Case = tuple[list[onnx.NodeProto], list[int], list[int], dict[str, np.ndarray], str]


def relu_around(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return `node` between two ReLUs, so that it stands between ops of the chip."""
    return [
        helper.make_node("Relu", ["x"], ["a"]),
        node,
        helper.make_node("Relu", ["b"], ["y"]),
    ]


CASES: dict[str, Case] = {
    "five axes": (
        relu_around(helper.make_node("Transpose", ["a"], ["b"], perm=[4, 2, 0, 3, 1])),
        [2, 3, 4, 5, 6], [6, 4, 2, 5, 3], {}, "permutes 5 separate axes",
    ),
    "padding": (
        relu_around(helper.make_node("Conv", ["a", "w"], ["b"], pads=[300, 0, 300, 0])),
        [1, 3, 8, 8], [1, 4, 606, 6], {"w": WEIGHT}, "padded by 300; the chip pads 255",
    ),
    "batches": (
        [
            helper.make_node("ReduceMean", ["x", "axes"], ["m"], keepdims=1),
            helper.make_node("MatMul", ["x", "m"], ["y"]),
        ],
        [2, 3, 4, 4], [2, 3, 4, 4], {"axes": np.array([1])}, "along some batch axes only",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_beyond_the_chip_is_the_hosts(case: str) -> None:
    nodes, shape, result, constants, reason = CASES[case]
    graph = helper.make_graph(
        nodes,
        "limits",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, result)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 18)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    rng = np.random.default_rng(0)
    samples = [{"x": rng.standard_normal(shape).astype(np.float32)} for _ in range(3)]
    compiled = compile_model(model, TINY, samples=samples, quant=QuantOptions(level=0))
    assert any(reason in item.reason for item in compiled.decisions)
    if compiled.program.tpu_steps:
        assert compare(compiled, "quant", "tpu", samples[0]).exact
    (got,) = Executor(compiled.program, TINY).run(samples[0]).values()
    session = onnxruntime.InferenceSession(model.SerializeToString())
    expected: Any = session.run(None, samples[0])[0]
    assert sqnr(expected, got) > 25
