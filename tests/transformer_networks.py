"""Small transformer encoders as ONNX models, with weights drawn at random."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class _Net:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def constant(self, name: str, array: np.ndarray) -> str:
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def node(self, kind: str, name: str, inputs: list[str], **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [name], name=name, **attributes))
        return name

    def linear(self, name: str, x: str, rows: int, columns: int) -> str:
        w = self.rng.standard_normal((rows, columns)).astype(np.float32) / math.sqrt(rows)
        b = self.rng.standard_normal(columns).astype(np.float32) * np.float32(0.1)
        product = self.node("MatMul", f"{name}.product", [x, self.constant(f"{name}.w", w)])
        return self.node("Add", name, [product, self.constant(f"{name}.b", b)])

    def norm(self, name: str, x: str, width: int) -> str:
        gamma = self.rng.uniform(0.5, 1.5, width).astype(np.float32)
        beta = self.rng.standard_normal(width).astype(np.float32) * np.float32(0.2)
        operands = [x, self.constant(f"{name}.g", gamma), self.constant(f"{name}.b", beta)]
        return self.node("LayerNormalization", name, operands, axis=-1, epsilon=1e-5)

    def heads(self, name: str, x: str, tokens: int, heads: int, size: int) -> str:
        shape = self.constant(f"{name}.shape", np.array([1, tokens, heads, size], np.int64))
        split = self.node("Reshape", f"{name}.split", [x, shape])
        return self.node("Transpose", f"{name}.heads", [split], perm=[0, 2, 1, 3])


def encoder(
    *,
    tokens: int = 16,
    width: int = 32,
    heads: int = 2,
    layers: int = 1,
    hidden: int = 64,
    seed: int = 0,
    masked: bool = False,
) -> onnx.ModelProto:
    """Return an encoder `x[1, tokens, width] -> y`, normalised behind each sum, GELU between.

    `masked`: it has another input `mask[1, tokens]`, 0 for tokens that nobody looks at.
    """
    net, size = _Net(seed), width // heads
    flat = net.constant("flat", np.array([1, tokens, width], np.int64))
    x = net.linear("embed", "x", width, width)
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, tokens, width])]
    if masked:
        inputs.append(helper.make_tensor_value_info("mask", TensorProto.FLOAT, [1, tokens]))
        one = net.constant("one", np.array(1, np.float32))
        away = net.constant("away", np.array(-1e4, np.float32))
        hidden_ones = net.node("Mul", "hide", [net.node("Sub", "hidden", [one, "mask"]), away])
        shape = net.constant("mask.shape", np.array([1, 1, 1, tokens], np.int64))
        net.node("Reshape", "masks", [hidden_ones, shape])
    for layer in range(layers):
        p = f"layer{layer}"
        q, k, v = (
            net.heads(f"{p}.{n}", net.linear(f"{p}.{n}", x, width, width), tokens, heads, size)
            for n in "qkv"
        )
        turned = net.node("Transpose", f"{p}.k.turned", [k], perm=[0, 1, 3, 2])
        scores = net.node("MatMul", f"{p}.scores", [q, turned])
        root = net.constant(f"{p}.root", np.array(2.0 / math.sqrt(size), np.float32))
        scaled = net.node("Mul", f"{p}.scaled", [scores, root])
        if masked:
            scaled = net.node("Add", f"{p}.masked", [scaled, "masks"])
        weights = net.node("Softmax", f"{p}.softmax", [scaled], axis=-1)
        mixed = net.node("MatMul", f"{p}.mixed", [weights, v])
        back = net.node("Transpose", f"{p}.back", [mixed], perm=[0, 2, 1, 3])
        joined = net.node("Reshape", f"{p}.joined", [back, flat])
        out = net.linear(f"{p}.out", joined, width, width)
        x = net.norm(f"{p}.norm1", net.node("Add", f"{p}.sum1", [x, out]), width)
        up = net.node("Gelu", f"{p}.gelu", [net.linear(f"{p}.up", x, width, hidden)])
        down = net.linear(f"{p}.down", up, hidden, width)
        x = net.norm(f"{p}.norm2", net.node("Add", f"{p}.sum2", [x, down]), width)
    net.linear("y", x, width, 8)
    graph = helper.make_graph(
        net.nodes,
        "encoder",
        inputs,
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, tokens, 8])],
        net.weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    model.ir_version = 9
    onnx.checker.check_model(model)
    return model
