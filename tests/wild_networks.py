"""Seeded networks at the edges: batches, lines of pixels, tokens, many outputs, absurd numbers.

Where `random_networks` asks whether ordinary networks come out right, these ask whether unusual
ones come out right or are refused.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.random_networks import Builder

SHAPES = (
    (1, 1, 1), (1, 1, 40), (3, 60, 1), (1, 9, 9), (2, 1, 300), (70, 3, 2), (3, 7, 5), (130, 1, 1),
    (8, 16, 16), (5, 2, 31),
)  # fmt: skip
"""Channels, height and width of the first input."""
SIZES = (1.0, 1.0, 1.0, 1.0, 1e-3, 300.0, 0.0, 1e-12, 1e-38)
"""Factors on a layer's weights."""


class WildBuilder(Builder):
    """Grows a network whose shapes, graph and numbers are all unusual."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.batch = self.pick(1, 1, 1, 2, 3)
        self.shape = SHAPES[int(self.rng.integers(len(SHAPES)))]
        self.input_shape = (self.batch, *self.shape)
        self.inputs: dict[str, tuple[int, ...]] = {"x": self.input_shape}
        self.outputs: list[str] = []

    def scaled(self, array: np.ndarray) -> np.ndarray:
        return (array * self.rng.choice(SIZES)).astype(np.float32)

    def pads(self, k_h: int, k_w: int) -> list[int]:
        return [int(self.rng.integers(0, k)) for k in (k_h, k_w, k_h, k_w)]

    def conv(self, depthwise: bool = False, grouped: bool = False) -> None:
        channels, height, width = self.shape
        k_h, k_w = self.pick(1, 1, 2, 3, 7), self.pick(1, 1, 3, 5, 9)
        d_y, d_x = self.pick(1, 1, 2, 7), self.pick(1, 1, 3, 7)
        s_y, s_x = self.pick(1, 1, 2, 5), self.pick(1, 1, 3, 7)
        pads = self.pads((k_h - 1) * d_y + 1, (k_w - 1) * d_x + 1)
        out_h = (height + pads[0] + pads[2] - d_y * (k_h - 1) - 1) // s_y + 1
        out_w = (width + pads[1] + pads[3] - d_x * (k_w - 1) - 1) // s_x + 1
        if min(out_h, out_w) < 1 or out_h * out_w > 700:
            return
        group, out = 1, self.pick(1, 2, 9, 33)
        if depthwise:
            group, out = channels, channels * self.pick(1, 1, 2)
        elif grouped:
            group = max(g for g in range(1, 8) if channels % g == 0)
            out = group * self.pick(1, 3, 10)
        depth = channels // group
        weight = self.rng.standard_normal((out, depth, k_h, k_w)) / np.sqrt(depth * k_h * k_w)
        if self.rng.random() < 0.2:
            weight[self.rng.random(out) < 0.5] *= self.rng.choice([0.0, 1e-20, 1e3])
        inputs = [self.value, self.constant(self.scaled(weight))]
        if self.rng.random() < 0.7:
            bias = self.rng.standard_normal(out) * self.rng.choice([0.0, 0.3, 0.3, 200.0])
            inputs.append(self.constant(bias.astype(np.float32)))
        self.value = self.node(
            "Conv", inputs, strides=[s_y, s_x], pads=pads, dilations=[d_y, d_x], group=group,
            kernel_shape=[k_h, k_w],
        )  # fmt: skip
        self.shape = (out, out_h, out_w)

    def transposed_conv(self) -> None:
        channels, height, width = self.shape
        kernel, stride, out = self.pick(1, 2, 3, 4), self.pick(1, 2, 3), self.pick(1, 3, 9)
        pad = int(self.rng.integers(0, kernel))
        sizes = [(size - 1) * stride + kernel - 2 * pad for size in (height, width)]
        if min(sizes) < 1 or sizes[0] * sizes[1] > 500:
            return
        weight = self.rng.standard_normal((channels, out, kernel, kernel)) / np.sqrt(channels * 2)
        self.value = self.node(
            "ConvTranspose", [self.value, self.constant(weight.astype(np.float32))],
            strides=[stride] * 2, pads=[pad] * 4, kernel_shape=[kernel] * 2,
        )  # fmt: skip
        self.shape = (out, sizes[0], sizes[1])

    def pool(self) -> None:
        kind = str(self.rng.choice(["MaxPool", "AveragePool", "GlobalMaxPool", "ReduceMean"]))
        channels, height, width = self.shape
        if kind == "GlobalMaxPool":
            self.value, self.shape = self.node(kind, [self.value]), (channels, 1, 1)
        elif kind == "ReduceMean":
            axis = self.pick(2, 3)
            axes = self.constant(np.array([axis], np.int64))
            self.value = self.node(kind, [self.value, axes], keepdims=1)
            self.shape = (channels, 1, width) if axis == 2 else (channels, height, 1)
        else:
            k_h, k_w, stride = self.pick(1, 2, 5), self.pick(1, 3, 8), self.pick(1, 2, 9)
            pads = self.pads(k_h, k_w)
            ceil = self.pick(0, 1)
            out_h, out_w = (
                -(-(size + low + high - k) // stride) + 1 if ceil
                else (size + low + high - k) // stride + 1
                for size, low, high, k in (
                    (height, pads[0], pads[2], k_h), (width, pads[1], pads[3], k_w)
                )
            )  # fmt: skip
            # A last window that starts in the padding is dropped, by rules that differ.
            starts = (
                (out_h - 1) * stride < height + pads[0],
                (out_w - 1) * stride < width + pads[1],
            )
            if min(out_h, out_w) < 1 or not all(starts) or k_h > height or k_w > width:
                return
            extra = {"count_include_pad": self.pick(0, 1)} if kind == "AveragePool" else {}
            self.value = self.node(
                kind, [self.value], kernel_shape=[k_h, k_w], strides=[stride] * 2, pads=pads,
                ceil_mode=ceil, **extra,
            )  # fmt: skip
            self.shape = (channels, out_h, out_w)

    def activation(self) -> None:
        kind = str(
            self.rng.choice(
                ["Relu", "Gelu", "Exp", "Abs", "Neg", "Elu", "Softplus", "PRelu", "Mish"]
            )
        )
        inputs = [self.value]
        if kind == "PRelu":
            slope = self.rng.random((self.shape[0], 1, 1)) - 0.3
            inputs.append(self.constant(slope.astype(np.float32)))
        if kind == "Exp":
            inputs = [self.node("Tanh", inputs)]
        self.value = self.node(kind, inputs)

    def scalar(self) -> None:
        """Arithmetic with a constant: a number, one per channel, or a whole tensor."""
        shape = [(), (self.shape[0], 1, 1), self.shape, (1,)][self.pick(0, 1, 2, 3)]
        value = self.rng.standard_normal(shape) * self.rng.choice([1.0, 1e-4, 50.0])
        constant = self.constant(np.asarray(value, np.float32))
        kind = str(self.rng.choice(["Add", "Sub", "Mul", "Max", "Min"]))
        pair = [self.value, constant]
        self.value = self.node(kind, pair[::-1] if self.rng.random() < 0.3 else pair)

    def lopsided(self) -> None:
        """Add operands whose ranges are a million apart."""
        factor = self.constant(np.array(self.rng.choice([1e-6, 1e6, 1e3]), np.float32))
        other = self.node("Mul", [self.value, factor])
        self.value = self.node("Add", [self.value, other])

    def tokens(self) -> None:
        """A product with weights, and one of two activations, over pixels as tokens."""
        channels, height, width = self.shape
        if height * width > 200:
            return
        flat = self.constant(np.array([self.batch, channels, height * width], np.int64))
        back = self.constant(np.array([self.batch, -1, height, width], np.int64))
        value = self.node("Transpose", [self.node("Reshape", [self.value, flat])], perm=[0, 2, 1])
        out = self.pick(1, 5, 24)
        weight = self.rng.standard_normal((channels, out)) / np.sqrt(channels)
        value = self.node("MatMul", [value, self.constant(weight.astype(np.float32))])
        if self.rng.random() < 0.6:
            scores = self.node("MatMul", [value, self.node("Transpose", [value], perm=[0, 2, 1])])
            if self.rng.random() < 0.5:
                scores = self.node("Softmax", [scores], axis=-1)
            value = self.node("MatMul", [scores, value])
        value = self.node("Transpose", [value], perm=[0, 2, 1])
        self.value, self.shape = self.node("Reshape", [value, back]), (out, height, width)

    def transpose(self) -> None:
        channels, height, width = self.shape
        perm = [(0, 1, 3, 2), (0, 3, 2, 1), (0, 2, 1, 3), (0, 2, 3, 1)][self.pick(0, 1, 2, 3)]
        self.value = self.node("Transpose", [self.value], perm=list(perm))
        sizes = (0, channels, height, width)
        self.shape = (sizes[perm[1]], sizes[perm[2]], sizes[perm[3]])

    def split(self) -> None:
        channels, height, width = self.shape
        if channels < 2:
            return
        first = int(self.rng.integers(1, channels))
        sizes = self.constant(np.array([first, channels - first], np.int64))
        self.count += 1
        names = [f"split{self.count}_{part}" for part in "ab"]
        node = helper.make_node("Split", [self.value, sizes], names, f"Split_{self.count}", axis=1)
        self.nodes.append(node)
        self.saved.append((names[1], (channels - first, height, width)))
        self.value, self.shape = names[0], (first, height, width)

    def second_input(self) -> None:
        name = f"y{len(self.inputs)}"
        self.inputs[name] = (self.batch, *self.shape)
        if self.rng.random() < 0.8:
            self.value = self.node(str(self.rng.choice(["Add", "Mul"])), [self.value, name])

    def emit(self) -> None:
        self.outputs.append(self.value)

    def grow(self, layers: int) -> None:
        steps: list[Callable[[], None]] = [
            self.conv, self.conv, self.conv, lambda: self.conv(depthwise=True),
            lambda: self.conv(grouped=True), self.activation, self.activation, self.pool, self.pool,
            self.residual, self.excite, self.concat, self.resize, self.move, self.scalar,
            self.lopsided, self.tokens, self.tokens, self.transpose, self.split,
            self.second_input, self.emit, self.emit, self.transposed_conv,
        ]  # fmt: skip
        for _ in range(layers):
            self.saved.append((self.value, self.shape))
            steps[int(self.rng.integers(len(steps)))]()
            if self.shape[0] * self.shape[1] * self.shape[2] > 20000:
                break

    def finish(self) -> onnx.ModelProto:
        self.outputs.append(self.value)
        if self.rng.random() < 0.1:
            self.outputs.append("x")
        outputs: list[str] = []
        for name in self.outputs:
            # A graph may not name one value twice; two results of one value need a node.
            again = name in outputs or name in self.inputs
            outputs.append(self.node("Identity", [name]) if again else name)
        if self.rng.random() < 0.05:
            outputs.append(self.constant(np.ones((2, 3), np.float32)))
        graph = helper.make_graph(
            self.nodes,
            "wild",
            [
                helper.make_tensor_value_info(n, TensorProto.FLOAT, s)
                for n, s in self.inputs.items()
            ],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
            self.weights,
        )
        opsets = [helper.make_opsetid("", 20)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def wild_network(seed: int, layers: int = 7) -> tuple[onnx.ModelProto, dict[str, tuple[int, ...]]]:
    """Return a network and the shapes of its inputs."""
    builder = WildBuilder(seed)
    builder.grow(layers)
    return builder.finish(), builder.inputs
