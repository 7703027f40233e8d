"""The ONNX Backend API, and whole models through it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tests.unit.onnx_graphs import F, model_of, normal, run_ort, run_ours
from tilewright import onnx_backend
from tilewright.diagnostics import TilewrightError

LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"


def test_prepare_and_run_by_position_and_name() -> None:
    nodes = [helper.make_node("Sub", ["a", "b"], ["y"])]
    model = model_of(nodes, {"a": [3], "b": [3]}, ["y"])
    a, b = normal(3), normal(3, seed=1)
    rep = onnx_backend.prepare(model)
    assert isinstance(rep, onnx_backend.TilewrightRep)
    assert rep.inputs == ["a", "b"]
    np.testing.assert_array_equal(rep.run([a, b])[0], a - b)
    np.testing.assert_array_equal(rep.run({"b": b, "a": a})["y"], a - b)  # type: ignore[call-overload]
    with pytest.raises(TilewrightError, match="1 inputs were given"):
        rep.run([a])
    with pytest.raises(TilewrightError):
        rep.run([a, b.astype(np.float64)])


def test_run_model_takes_shapes_and_shape_operands_from_the_inputs() -> None:
    nodes = [helper.make_node("Reshape", ["x", "s"], ["y"])]
    model = model_of(nodes, {"x": ["N", 4]}, ["y"])
    model.graph.input.append(helper.make_tensor_value_info("s", TensorProto.INT64, [1]))
    x = normal(3, 4)
    (y,) = onnx_backend.run_model(model, [x, np.array([-1])])
    np.testing.assert_array_equal(y, x.reshape(-1))


def test_prepare_waits_for_shapes_and_shape_operands() -> None:
    model = model_of([helper.make_node("Reshape", ["x", "s"], ["y"])], {"x": ["N", 4]}, ["y"])
    model.graph.input.append(helper.make_tensor_value_info("s", TensorProto.INT64, [2]))
    rep = onnx_backend.prepare(model)
    assert isinstance(rep, onnx_backend.DeferredRep)
    assert not onnx_backend.is_compatible(model)
    for rows in (3, 2):
        x = normal(rows, 4)
        (y,) = rep.run([x, np.array([2, -1])])
        np.testing.assert_array_equal(y, x.reshape(2, -1))
    with pytest.raises(TilewrightError):
        rep.run([normal(3, 4), np.array([5, 5])])


def test_run_model_overrides_a_default() -> None:
    model = model_of(
        [helper.make_node("Mul", ["x", "w"], ["y"])], {"x": [3], "w": [3]}, ["y"], {"w": normal(3)}
    )
    x, w = normal(3, seed=1), normal(3, seed=2)
    np.testing.assert_array_equal(onnx_backend.run_model(model, [x])[0], x * normal(3))
    np.testing.assert_array_equal(onnx_backend.run_model(model, [x, w])[0], x * w)


def test_run_node() -> None:
    x = normal(2, 3)
    node = helper.make_node("Transpose", ["x"], ["y"])
    np.testing.assert_array_equal(onnx_backend.run_node(node, [x])[0], x.T)
    softmax = helper.make_node("Softmax", ["x"], ["y"])
    (y,) = onnx_backend.run_node(softmax, [normal(1, 2, 3)], opset_version=11)
    assert y.sum() == pytest.approx(1.0)


def test_devices_and_compatibility() -> None:
    model = model_of([helper.make_node("Relu", ["x"], ["y"])], {"x": [3]}, ["y"])
    assert onnx_backend.supports_device("CPU")
    assert onnx_backend.supports_device("CPU:0")
    assert not onnx_backend.supports_device("CUDA")
    with pytest.raises(TilewrightError):
        onnx_backend.prepare(model, "CUDA")
    assert onnx_backend.is_compatible(model)
    bad = model_of([helper.make_node("NonZero", ["x"], ["y"])], {"x": [3]}, ["y"])
    assert not onnx_backend.is_compatible(bad)


def with_random_weights(model: ModelProto) -> ModelProto:
    """Replace the filled constants of ONNX's light models (all one number) by drawn weights."""
    shapes = {t.name: numpy_helper.to_array(t).tolist() for t in model.graph.initializer}
    rng = np.random.default_rng(0)
    scale_like = {n.input[1] for n in model.graph.node if n.op_type == "BatchNormalization"}
    positive = {n.input[4] for n in model.graph.node if n.op_type == "BatchNormalization"}
    kept: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node.op_type != "ConstantOfShape":
            kept.append(node)
            continue
        name, shape = node.output[0], shapes[node.input[0]]
        fan_in = int(np.prod(shape[1:])) if len(shape) > 1 else 100
        array = rng.standard_normal(shape) * np.sqrt(2 / fan_in)
        if name in positive or name in scale_like:
            array = 0.5 + rng.random(shape)
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    del model.graph.node[:]
    model.graph.node.extend(kept)
    used = {name for node in kept for name in node.input}
    left = [t for t in model.graph.initializer if t.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(left)
    inputs = [i for i in model.graph.input if i.name in used and i.name not in shapes]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    return model


@pytest.mark.parametrize(
    "name", ["squeezenet", "shufflenet", "inception_v1", "resnet50", "densenet121"]
)
def test_light_models_equal_onnxruntime(name: str) -> None:
    model = with_random_weights(onnx.load(LIGHT / f"light_{name}.onnx"))
    feed = {model.graph.input[0].name: normal(1, 3, 224, 224)}
    (wanted,), (found,) = run_ort(model, feed), run_ours(model, feed)
    assert found.shape == wanted.shape
    assert np.abs(wanted).max() > 0
    assert np.abs(wanted).std() > 0
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


def test_elements_of_an_input_keep_their_type() -> None:
    model = model_of(
        [helper.make_node("Neg", ["x"], ["y"])], {"x": [3]}, ["y"], elem_type=TensorProto.INT32
    )
    (y,) = onnx_backend.run_model(model, [np.array([1, 2, 3], np.int32)])
    assert y.dtype == np.int32
    assert F != TensorProto.INT32
