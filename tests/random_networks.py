"""Seeded random small networks in ONNX: odd shapes, every operator the chip runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class Builder:
    """Grows a network layer by layer from an image."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.count = 0
        channels = int(self.rng.integers(1, 20))
        height, width = (int(self.rng.integers(5, 20)) for _ in range(2))
        self.shape = (channels, height, width)
        self.batch = 1
        self.input_shape = (1, *self.shape)
        self.value = "x"
        self.saved: list[tuple[str, tuple[int, int, int]]] = []

    def node(self, kind: str, inputs: list[str], **attributes: Any) -> str:
        self.count += 1
        output = f"{kind.lower()}{self.count}"
        self.nodes.append(
            helper.make_node(kind, inputs, [output], name=f"{kind}_{self.count}", **attributes)
        )
        return output

    def constant(self, array: np.ndarray) -> str:
        name = f"c{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def pick(self, *options: int) -> int:
        return int(self.rng.choice(options))

    def conv(self, depthwise: bool = False, grouped: bool = False) -> None:
        channels, height, width = self.shape
        k_h, k_w = self.pick(1, 1, 2, 3, 5), self.pick(1, 1, 2, 3, 5)
        d_y, d_x = self.pick(1, 1, 2), self.pick(1, 1, 3)
        s_y, s_x = self.pick(1, 1, 2, 3), self.pick(1, 1, 2, 4)
        pads = [int(self.rng.integers(0, k)) for k in (k_h, k_w, k_h, k_w)]
        out_h = (height + pads[0] + pads[2] - d_y * (k_h - 1) - 1) // s_y + 1
        out_w = (width + pads[1] + pads[3] - d_x * (k_w - 1) - 1) // s_x + 1
        if out_h < 1 or out_w < 1:
            return
        group, out = 1, int(self.rng.integers(1, 40))
        if depthwise:
            group = out = channels
        elif grouped:
            group = max(g for g in range(1, 5) if channels % g == 0)
            out = group * int(self.rng.integers(1, 12))
        depth = channels // group
        scale = 1 / np.sqrt(depth * k_h * k_w)
        weight = self.rng.standard_normal((out, depth, k_h, k_w)) * scale
        inputs = [self.value, self.constant(weight.astype(np.float32))]
        if self.rng.random() < 0.8:
            inputs.append(self.constant(self.rng.standard_normal(out).astype(np.float32) * 0.3))
        self.value = self.node(
            "Conv", inputs, strides=[s_y, s_x], pads=pads, dilations=[d_y, d_x], group=group,
            kernel_shape=[k_h, k_w],
        )  # fmt: skip
        self.shape = (out, out_h, out_w)

    def activation(self) -> None:
        kind = str(self.rng.choice(["Relu", "HardSwish", "Sigmoid", "Clip", "LeakyRelu", "Tanh"]))
        inputs = [self.value]
        if kind == "Clip":
            inputs += [self.constant(np.array(v, np.float32)) for v in (-0.5, 0.8)]
        self.value = self.node(kind, inputs)

    def pool(self) -> None:
        channels, height, width = self.shape
        kind = str(self.rng.choice(["MaxPool", "AveragePool"]))
        k_h, k_w = self.pick(1, 2, 3), self.pick(2, 3)
        s_y, s_x = self.pick(1, 2), self.pick(1, 2, 3)
        pads = [int(self.rng.integers(0, k)) for k in (k_h, k_w, k_h, k_w)]
        extra: dict[str, int] = {"count_include_pad": 1} if kind == "AveragePool" else {}
        out_h = (height + pads[0] + pads[2] - k_h) // s_y + 1
        out_w = (width + pads[1] + pads[3] - k_w) // s_x + 1
        if out_h < 1 or out_w < 1:
            return
        self.value = self.node(
            kind, [self.value], kernel_shape=[k_h, k_w], strides=[s_y, s_x], pads=pads, **extra
        )
        self.shape = (channels, out_h, out_w)

    def residual(self) -> None:
        same = [name for name, shape in self.saved if shape == self.shape and name != self.value]
        other = str(self.rng.choice(same)) if same else self.value
        kind = str(self.rng.choice(["Add", "Sub", "Mul"]))
        self.value = self.node(kind, [self.value, other])

    def excite(self) -> None:
        channels, _, _ = self.shape
        mean = self.node("GlobalAveragePool", [self.value])
        weight = (self.rng.standard_normal((channels, channels, 1, 1)) / channels).astype(
            np.float32
        )
        gate = self.node("Conv", [mean, self.constant(weight)])
        gate = self.node("HardSigmoid", [gate], alpha=0.2, beta=0.5)
        self.value = self.node("Mul", [self.value, gate])

    def concat(self) -> None:
        same = [(n, s) for n, s in self.saved if s[1:] == self.shape[1:]]
        if same:
            name, shape = same[int(self.rng.integers(len(same)))]
            self.value = self.node("Concat", [self.value, name], axis=1)
            self.shape = (self.shape[0] + shape[0], *self.shape[1:])

    def resize(self) -> None:
        channels, height, width = self.shape
        if height * width > 150:
            return
        out_h, out_w = height + int(self.rng.integers(1, 9)), width * 2
        mode = str(self.rng.choice(["nearest", "linear"]))
        sizes = self.constant(np.array([self.batch, channels, out_h, out_w], np.int64))
        self.value = self.node("Resize", [self.value, "", "", sizes], mode=mode)
        self.shape = (channels, out_h, out_w)

    def move(self) -> None:
        channels, height, width = self.shape
        choice = self.pick(0, 1, 2)
        if choice == 0 and channels % 2 == 0:  # channel shuffle
            split = self.constant(np.array([self.batch, 2, channels // 2, height, width], np.int64))
            back = self.constant(np.array([self.batch, channels, height, width], np.int64))
            value = self.node("Reshape", [self.value, split])
            value = self.node("Transpose", [value], perm=[0, 2, 1, 3, 4])
            self.value = self.node("Reshape", [value, back])
        elif choice == 1 and height > 2 and width > 3:
            names = [
                self.constant(np.array(v, np.int64)) for v in ([1, 0], [height, width - 1], [2, 3])
            ]
            step = self.constant(np.array([1, 2], np.int64))
            self.value = self.node("Slice", [self.value, *names, step])
            self.shape = (channels, height - 1, -(-(width - 1) // 2))
        else:
            pads = self.constant(np.array([0, 0, 1, 2, 0, 0, 0, 1], np.int64))
            self.value = self.node("Pad", [self.value, pads])
            self.shape = (channels, height + 1, width + 3)

    def grow(self, layers: int) -> None:
        steps = [
            self.conv, self.conv, self.conv, lambda: self.conv(depthwise=True),
            lambda: self.conv(grouped=True), self.activation, self.activation, self.pool,
            self.residual, self.residual, self.excite, self.concat, self.resize, self.move,
        ]  # fmt: skip
        self.conv()
        for _ in range(layers):
            self.saved.append((self.value, self.shape))
            steps[int(self.rng.integers(len(steps)))]()

    def finish(self) -> onnx.ModelProto:
        channels, height, width = self.shape
        if self.rng.random() < 0.5:
            features = channels * height * width
            out = int(self.rng.integers(1, 30))
            flat = self.node("Flatten", [self.value])
            weight = self.rng.standard_normal((out, features)).astype(np.float32)
            inputs = [flat, self.constant(weight / np.float32(np.sqrt(features)))]
            inputs.append(self.constant(self.rng.standard_normal(out).astype(np.float32)))
            self.value = self.node("Gemm", inputs, transB=1)
            shape = [1, out]
        else:
            shape = [1, channels, height, width]
        graph = helper.make_graph(
            self.nodes,
            "random",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(self.input_shape))],
            [helper.make_tensor_value_info(self.value, TensorProto.FLOAT, shape)],
            self.weights,
        )
        opsets = [helper.make_opsetid("", 18)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def random_network(seed: int, layers: int = 8) -> tuple[onnx.ModelProto, tuple[int, ...]]:
    """Return a network and its input's shape."""
    builder = Builder(seed)
    builder.grow(layers)
    return builder.finish(), builder.input_shape
