"""Networks by name that strain the planner: one pixel, one channel, deep, wide, tall, tangled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import helper

from tests.e2e.test_edges import graph

Shape = tuple[int, ...]


class Net:
    """Grows a network of one input `x`; values go by name."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}
        self.channels = {"x": shape[1]}
        self.rng = np.random.default_rng(0)

    def add(self, kind: str, *inputs: str, out: int | None = None, **attributes: Any) -> str:
        """Add a node; it has the channels of its first input unless `out` says otherwise."""
        name = f"{kind.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        self.channels[name] = self.channels[inputs[0]] if out is None else out
        return name

    def constant(self, array: Any) -> str:
        name = f"k{len(self.weights)}"
        self.weights[name] = np.asarray(array, np.float32)
        return name

    def conv(
        self,
        value: str,
        out: int,
        side: int = 3,
        *,
        width: int | None = None,
        stride: int = 1,
        step: int = 1,
        group: int = 1,
        act: str | None = "Relu",
    ) -> str:
        """Add a convolution that keeps the size, but for its stride, and an activation."""
        depth, width = self.channels[value] // group, width or side
        scale = 1 / np.sqrt(depth * side * width)
        weight = self.constant(self.rng.standard_normal((out, depth, side, width)) * scale)
        bias = self.constant(self.rng.standard_normal(out) * 0.2)
        edges = [step * (side - 1) // 2, step * (width - 1) // 2] * 2
        made = self.add(
            "Conv", value, weight, bias, out=out, strides=[stride] * 2, dilations=[step] * 2,
            group=group, pads=edges, kernel_shape=[side, width],
        )  # fmt: skip
        return made if act is None else self.add(act, made)

    def deep(self, value: str, side: int = 3, **options: Any) -> str:
        """Add a depthwise convolution."""
        return self.conv(value, self.channels[value], side, group=self.channels[value], **options)

    def joined(self, *values: str) -> str:
        return self.add("Concat", *values, out=sum(self.channels[item] for item in values), axis=1)

    def half(self, value: str) -> str:
        return self.add("MaxPool", value, kernel_shape=[2, 2], strides=[2, 2])

    def model(self, *outputs: str) -> onnx.ModelProto:
        return graph(self.nodes, {"x": self.shape}, list(outputs), **self.weights)


def one_pixel() -> tuple[Net, list[str]]:
    net = Net(1, 3, 1, 1)
    value = net.deep(net.conv(net.conv("x", 16, 1), 24))
    value = net.conv(value, 16, 1, act=None)
    return net, [net.add("Add", value, net.conv(value, 16))]


def one_channel() -> tuple[Net, list[str]]:
    net = Net(1, 1, 40, 37)
    value = "x"
    for _ in range(5):
        value = net.conv(value, 1)
    value = net.deep(net.add("Add", value, net.conv(value, 1, 5)), stride=2)
    return net, [net.half(value)]


def large_image() -> tuple[Net, list[str]]:
    net = Net(1, 1, 1000, 1000)
    value = net.deep(net.conv("x", 4, stride=2))
    value = net.add("Add", value, net.conv(value, 4, 1, act=None))
    value = net.conv(net.deep(net.conv(value, 8, stride=2), 5), 8, 1)
    return net, [net.add("GlobalAveragePool", net.half(value)), net.conv(value, 2)]


def wide() -> tuple[Net, list[str]]:
    net = Net(1, 4, 7, 700)
    value = net.conv(net.conv(net.deep(net.conv("x", 16)), 8, 1), 8, step=2)
    return net, [net.add("Add", value, net.conv(value, 8))]


def tall() -> tuple[Net, list[str]]:
    net = Net(1, 4, 700, 7)
    value = net.conv(net.conv(net.deep(net.conv("x", 16), 5, stride=2), 8, 1), 8, step=3)
    return net, [net.add("Add", value, net.conv(value, 8))]


def dilated() -> tuple[Net, list[str]]:
    net = Net(1, 8, 40, 40)
    value = net.conv("x", 16)
    for step in (2, 4, 8, 16):
        value = net.conv(value, 16, step=step)
    for step in (2, 7):
        value = net.deep(value, step=step)
    return net, [value]


def sixty_layers() -> tuple[Net, list[str]]:
    net = Net(1, 6, 24, 24)
    value = net.conv("x", 12)
    for index in range(59):
        value = net.conv(value, 12, (1, 3)[index % 2]) if index % 3 else net.deep(value)
    return net, [value]


def residuals() -> tuple[Net, list[str]]:
    net = Net(1, 8, 28, 28)
    value, kept = net.conv("x", 24), list[str]()
    for index in range(8):
        block = net.conv(net.deep(net.conv(value, 48, 1)), 24, 1, act=None)
        value = net.add("Add", *((value, block) if index % 2 else (block, value)))
        kept += [value] if index % 3 == 0 else []
    for item in kept:
        value = net.add("Add", value, item)
    return net, [value, kept[1]]


def concatenations() -> tuple[Net, list[str]]:
    net = Net(1, 8, 20, 20)
    value = net.conv("x", 8)
    for index in range(4):
        left, right = net.conv(value, 8), net.conv(value, 5, 1)
        other = net.deep(left)
        if index % 2:
            value = net.joined(value, net.joined(left, right), other)
        else:
            value = net.joined(net.joined(right, net.joined(left, other)), value)
    means = net.add("AveragePool", value, kernel_shape=[2, 2], strides=[2, 2])
    return net, [net.joined(means, net.half(value)), value]


def gates() -> tuple[Net, list[str]]:
    net = Net(1, 8, 20, 20)
    value = net.conv("x", 24, act="HardSwish")
    for _ in range(2):
        wide = net.deep(net.conv(value, 48, 1, act="HardSwish"), 5, act="HardSwish")
        gate = net.conv(net.add("GlobalAveragePool", wide), 12, 1)
        gated = net.add("Mul", wide, net.conv(gate, 48, 1, act="HardSigmoid"))
        value = net.add("Add", value, net.conv(gated, 24, 1, act=None))
    return net, [value]


def down_and_up() -> tuple[Net, list[str]]:
    net = Net(1, 3, 48, 48)
    value, skips = "x", list[str]()
    for channels in (8, 16, 24):
        value = net.conv(net.conv(value, channels), channels)
        skips.append(value)
        value = net.half(value)
    for channels in (24, 16, 8):
        options: dict[str, Any] = {"mode": "nearest", "nearest_mode": "floor"}
        options["coordinate_transformation_mode"] = "asymmetric"
        if channels == 16:
            options = {"mode": "linear", "coordinate_transformation_mode": "half_pixel"}
        value = net.add("Resize", value, "", net.constant([1, 1, 2, 2]), **options)
        value = net.conv(net.joined(skips.pop(), value), channels)
    return net, [net.conv(value, 1, 1, act="Sigmoid")]


def lines() -> tuple[Net, list[str]]:
    net = Net(2, 6, 30, 30)
    value = net.conv(net.conv("x", 12, 1, width=7), 12, 7, width=1)
    return net, [net.conv(net.conv(value, 13, 3, width=5), 26, group=13)]


NETWORKS: dict[str, Callable[[], tuple[Net, list[str]]]] = {
    made.__name__: made
    for made in (
        one_pixel, one_channel, large_image, wide, tall, dilated, sixty_layers, residuals,
        concatenations, gates, down_and_up, lines,
    )
}  # fmt: skip


def odd_network(name: str) -> tuple[onnx.ModelProto, Shape]:
    """Return a network and the shape of its input `x`."""
    net, outputs = NETWORKS[name]()
    return net.model(*outputs), net.shape
