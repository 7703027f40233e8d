"""Models built here, node by node, with seeded random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

RESNET50_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Middle channels, blocks, stride of the first block."""


class _Graph:
    """Collects nodes and initializers."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.Generator(np.random.PCG64(seed))
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def node(self, kind: str, name: str, inputs: list[str], **attributes: Any) -> str:
        from onnx import helper

        self.nodes.append(helper.make_node(kind, inputs, [f"{name}_out"], name, **attributes))
        return f"{name}_out"

    def weight(self, name: str, array: np.ndarray[Any, Any]) -> str:
        from onnx import numpy_helper

        self.weights.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def normal(self, shape: tuple[int, ...], deviation: float) -> np.ndarray[Any, Any]:
        return self.random.standard_normal(shape, np.float32) * np.float32(deviation)

    def conv(
        self, name: str, x: str, c_in: int, c_out: int, kernel: int, stride: int, gain: float
    ) -> str:
        """Convolution with `gain` times He's deviation, and a small bias."""
        weights = self.normal((c_out, c_in, kernel, kernel), gain / np.sqrt(c_in * kernel**2))
        return self.node(
            "Conv",
            name,
            [
                x,
                self.weight(f"{name}.weight", weights),
                self.weight(f"{name}.bias", self.normal((c_out,), 0.05)),
            ],
            kernel_shape=[kernel, kernel],
            strides=[stride, stride],
            pads=[kernel // 2] * 4,
        )


def resnet50(seed: int = 50) -> bytes:
    """Return ResNet-50 (53 convolutions, 25.5 M parameters, batch norms folded) as an ONNX file.

    The last convolution of a block has a small gain, so that the sums of 16 residual blocks stay of
    one order of magnitude.
    """
    from onnx import TensorProto, helper

    g = _Graph(seed)
    he = float(np.sqrt(2.0))
    x = g.node("Relu", "stem.relu", [g.conv("stem.conv", "input", 3, 64, 7, 2, he)])
    x = g.node("MaxPool", "stem.pool", [x], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    channels = 64
    for stage, (middle, blocks, first_stride) in enumerate(RESNET50_STAGES, start=1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            stride = 1 if block else first_stride
            y = g.conv(f"{name}.conv1", x, channels, middle, 1, 1, he)
            y = g.node("Relu", f"{name}.relu1", [y])
            y = g.conv(f"{name}.conv2", y, middle, middle, 3, stride, he)
            y = g.node("Relu", f"{name}.relu2", [y])
            y = g.conv(f"{name}.conv3", y, middle, 4 * middle, 1, 1, 0.5)
            if not block:
                x = g.conv(f"{name}.shortcut", x, channels, 4 * middle, 1, stride, 1.0)
            x = g.node("Relu", f"{name}.relu3", [g.node("Add", f"{name}.add", [y, x])])
            channels = 4 * middle
    x = g.node("GlobalAveragePool", "pool", [x])
    x = g.node("Flatten", "flatten", [x], axis=1)
    weights = g.weight("fc.weight", g.normal((1000, channels), channels**-0.5))
    bias = g.weight("fc.bias", g.normal((1000,), 0.05))
    x = g.node("Gemm", "fc", [x, weights, bias], transB=1)
    graph = helper.make_graph(
        g.nodes,
        "resnet50",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, [1, 3, 224, 224])],
        [helper.make_tensor_value_info(x, TensorProto.FLOAT, [1, 1000])],
        g.weights,
    )
    model = helper.make_model(
        graph, producer_name="tilewright", opset_imports=[helper.make_opsetid("", 17)]
    )
    model.ir_version = 8
    return model.SerializeToString(deterministic=True)


BUILDERS: dict[str, Callable[[], bytes]] = {"resnet50": resnet50}
