"""No program beats its bound: random small networks, compiled and simulated."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from tilewright.api import CompileOptions, build
from tilewright.report.report import make_report
from tilewright.runtime.simulation import simulate
from tilewright.spec.hardware import load_target

Layer = tuple[int, int, int, bool, bool]
"""Kernel, stride, output channels, depthwise first, then a maximum pooling."""


def network(size: int, channels: int, layers: list[Layer], features: int) -> onnx.ModelProto:
    """Return a chain of convolutions, then a mean over the image and a linear layer."""
    random = np.random.default_rng(1)
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []
    last = "x"

    def add(kind: str, shape: tuple[int, ...] | None = None, **attributes: Any) -> None:
        nonlocal last
        name = f"n{len(nodes)}"
        inputs = [last]
        if shape is not None:
            value = random.normal(size=shape).astype(np.float32)
            weights.append(numpy_helper.from_array(value, f"{name}.w"))
            inputs.append(f"{name}.w")
        nodes.append(helper.make_node(kind, inputs, [name], name, **attributes))
        last = name

    source = channels
    for kernel, stride, target, depthwise, pooled in layers:
        pads = [kernel // 2] * 4
        if depthwise:
            shape = (source, 1, kernel, kernel)
            add("Conv", shape, pads=pads, group=source, strides=[stride, stride])
            add("Conv", (target, source, 1, 1))
        else:
            add("Conv", (target, source, kernel, kernel), pads=pads, strides=[stride, stride])
        if pooled:
            add("MaxPool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
        source = target
    add("GlobalAveragePool")
    add("Flatten")
    add("Gemm", (features, source), transB=1)
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "random",
        [helper.make_tensor_value_info("x", kind, [1, channels, size, size])],
        [helper.make_tensor_value_info(last, kind, [1, features])],
        weights,
    )
    opset = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opset, ir_version=9)


layer = st.tuples(
    st.sampled_from((1, 3, 5)), st.integers(1, 2), st.integers(1, 40), st.booleans(), st.booleans()
)


@pytest.mark.parametrize("target", ["tiny8", "edge16"])
@settings(max_examples=12, deadline=None)
@given(
    size=st.integers(1, 20),
    channels=st.integers(1, 24),
    layers=st.lists(layer, min_size=1, max_size=3),
    features=st.integers(1, 300),
)
def test_no_network_beats_its_bound(
    tmp_path_factory: pytest.TempPathFactory,
    target: str,
    size: int,
    channels: int,
    layers: list[Layer],
    features: int,
) -> None:
    path = tmp_path_factory.mktemp("bound") / "random.onnx"
    onnx.save(network(size, channels, layers, features), path)
    made = build(path, load_target(target), CompileOptions(random_calibration=True))
    report = make_report(made.package, simulate(made.package))
    assert 0 < report.bound <= report.cycles
    assert report.min_ddr_bytes <= report.ddr_bytes
    assert sum(row.cycles for row in report.layers) == report.cycles
    for row in report.layers:
        # Of a layer by itself the array's and the vector unit's work is done inside its span.
        assert max(row.array_bound, row.vector_bound) <= row.spans.cycles, row.name
        assert row.min_ddr_bytes <= row.ddr_bytes or row.device != "tpu", row.name
