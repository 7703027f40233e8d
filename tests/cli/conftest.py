"""A small model, its calibration data, and a package, made once a session."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.unit.package_samples import copy_content
from tilewright.codegen.package import write_package


def small_cnn() -> bytes:
    """A convolution, ReLU, pooling and a fully connected layer on 1x3x12x12."""
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(0)

    def weight(name: str, *shape: int):
        return numpy_helper.from_array(random.normal(0, 0.2, shape).astype(np.float32), name)

    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w", "b"], ["c"], "conv", pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["c"], ["r"], "relu"),
            helper.make_node("MaxPool", ["r"], ["p"], "pool", kernel_shape=[2, 2], strides=[2, 2]),
            helper.make_node("Flatten", ["p"], ["f"], "flat"),
            helper.make_node("Gemm", ["f", "v", "d"], ["y"], "fc", transB=1),
        ],
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 12, 12])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 5])],
        [weight("w", 4, 3, 3, 3), weight("b", 4), weight("v", 5, 144), weight("d", 5)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    return model.SerializeToString(deterministic=True)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small.onnx"
    path.write_bytes(small_cnn())
    return path


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("samples") / "samples.npz"
    array = np.random.default_rng(1).normal(0, 1, (8, 3, 12, 12)).astype(np.float32)
    np.savez(path, x=array)
    return path


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("package") / "copy.tpupkg"
    write_package(path, copy_content())
    return path
