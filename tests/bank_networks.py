"""Networks that put much into the parameter banks, compiled for chips with few of them."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tilewright.compiler import Compiled, compile_model, front_end
from tilewright.dialects.tpu import ProgramOp
from tilewright.ptq.options import QuantOptions
from tilewright.spec.hardware import Hardware, load_target
from tilewright.spec.program import Instr

Policy = Literal["shared", "strict"]
PLAIN = QuantOptions(level=0)
SHAPE = (1, 4, 6, 5)


def chip(banks: int, entries: int, name: str = "tiny8") -> Hardware:
    """Return a target with other banks."""
    return load_target(name).model_copy(
        update={"quant_banks": banks, "quant_bank_entries": entries}
    )


def _model(nodes: list[Any], weights: list[onnx.TensorProto], last: str) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "banks",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPE)],
        [helper.make_tensor_value_info(last, TensorProto.FLOAT, None)],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def deep(convs: int, seed: int = 0) -> onnx.ModelProto:
    """Return `convs` convolutions with an addition after every second one."""
    rng = np.random.default_rng(seed)
    nodes: list[Any] = []
    weights: list[onnx.TensorProto] = []
    value = before = "x"
    for index in range(convs):
        kernel = rng.standard_normal((4, 4, 1, 1)).astype(np.float32) / 2
        weights.append(numpy_helper.from_array(kernel, f"w{index}"))
        nodes.append(helper.make_node("Conv", [value, f"w{index}"], [f"c{index}"], f"conv{index}"))
        value = f"c{index}"
        if index % 2:
            nodes.append(helper.make_node("Add", [value, before], [f"s{index}"], f"sum{index}"))
            before = value = f"s{index}"
    return _model(nodes, weights, value)


def joined(parts: int, seed: int = 0) -> onnx.ModelProto:
    """Return a concatenation of the input and `parts` convolutions' results."""
    rng = np.random.default_rng(seed)
    nodes: list[Any] = []
    weights: list[onnx.TensorProto] = []
    for index in range(parts):
        kernel = (rng.standard_normal((4, 4, 1, 1)) * 1.7**index).astype(np.float32)
        weights.append(numpy_helper.from_array(kernel, f"w{index}"))
        nodes.append(helper.make_node("Conv", ["x", f"w{index}"], [f"c{index}"], f"conv{index}"))
        nodes.append(helper.make_node("MaxPool", [f"c{index}"], [f"p{index}"], f"pool{index}",
                                      kernel_shape=[1, 1]))  # fmt: skip
    names = ["x", *(f"p{index}" for index in range(parts))]
    nodes.append(helper.make_node("Concat", names, ["all"], "concat", axis=1))
    return _model(nodes, weights, "all")


def wide(seed: int = 0) -> onnx.ModelProto:
    """Return a wide and a grouped convolution, an addition and a lookup table."""
    rng = np.random.default_rng(seed)
    kernels = {
        "wide": rng.standard_normal((96, 4, 3, 3)),
        "groups": rng.standard_normal((96, 24, 1, 1)),
    }
    weights = [numpy_helper.from_array(k.astype(np.float32), n) for n, k in kernels.items()]
    nodes = [
        helper.make_node("Conv", ["x", "wide"], ["a"], "wide", pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["a", "groups"], ["b"], "groups", group=4),
        helper.make_node("Add", ["a", "b"], ["s"], "sum"),
        helper.make_node("HardSwish", ["s"], ["y"], "curve"),
    ]
    return _model(nodes, weights, "y")


@cache
def _network(kind: str, size: int) -> onnx.ModelProto:
    return {"deep": deep, "joined": joined}[kind](size) if size else wide()


def compiled(
    kind: str, size: int, hardware: Hardware, policy: Policy = "shared", level: Literal[1, 2] = 2
) -> Compiled:
    """Compile one of the networks."""
    rng = np.random.default_rng(3)
    samples = [{"x": rng.standard_normal(SHAPE).astype(np.float32)} for _ in range(2)]
    front = front_end(_network(kind, size), hardware)
    return compile_model(
        front, hardware, samples=samples, quant=PLAIN, bank_policy=policy, level=level
    )


def programs(made: Compiled) -> list[ProgramOp]:
    """Return the programs of a compile."""
    return [op for op in made.stages["tpu"].module.ops if isinstance(op, ProgramOp)]


def changed(program: list[Instr], index: int, **fields: int) -> list[Instr]:
    """Return a program with other fields in one instruction."""
    old = program[index]
    new = Instr(old.name, {**old.fields, **fields}, old.layer)
    return [*program[:index], new, *program[index + 1 :]]
