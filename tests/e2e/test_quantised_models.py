"""Small networks quantised by onnxruntime, compiled without data, against onnxruntime itself.

Its graph optimisations are off: they replace the float arithmetic between Q and DQ by kernels that
saturate in 16 bits on some processors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto

from tests.level_checks import assert_levels_agree
from tests.quantised_models import (
    compiled,
    float_net,
    host_reasons,
    model,
    node,
    pair,
    quantised_by_ort,
    run_both,
    run_ort,
    warnings,
)
from tilewright.zoo import find, inputs, prepare

TARGETS = ("edge16", "tiny8", "tpu_v2")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("qdq", [True, False], ids=["qdq", "qoperator"])
@pytest.mark.parametrize("seed", range(8))
def test_codes_are_those_of_onnxruntime(seed: int, qdq: bool, tmp_path: Path) -> None:
    proto, shape = float_net(seed)
    rng = np.random.default_rng(seed)
    samples = [{"x": rng.standard_normal(shape).astype(np.float32)} for _ in range(4)]
    weights = "QUInt8" if seed % 4 == 2 else "QInt8"
    quantised = quantised_by_ort(
        proto,
        tmp_path,
        samples,
        qdq=qdq,
        activations="QUInt8" if weights == "QUInt8" or seed % 3 else "QInt8",
        weights=weights,
        per_channel=bool(seed % 2) and weights == "QInt8",
    )
    built = compiled(quantised, TARGETS[seed % 3])
    assert built.program.tpu_steps
    for layer, reason in host_reasons(built).items():
        known = layer.startswith("softmax") or "exceed 8 bits" in reason or "output of" in reason
        assert known, (layer, reason)
    if seed % 4 == 1:
        assert_levels_agree(built, samples[0])
    values: list[float] = []
    step = np.inf
    for _ in range(3):
        # Louder than the samples, so that codes saturate too.
        feed = {"x": (1.5 * rng.standard_normal(shape)).astype(np.float32)}
        found, wanted = run_both(built, feed)["y"], run_ort(quantised, feed)["y"]
        values.extend(np.abs(found - wanted).reshape(-1).tolist())
        # One step of the result is about a 255th of the largest value it takes.
        step = min(step, float(np.abs(wanted).max()) / 127)
    assert max(values) <= 1.5 * step
    assert np.mean(np.array(values) > 1e-5) <= (0.25 if warnings(built) else 0.1)


def test_every_level_takes_the_least_code() -> None:
    """-128 is a legal weight and activation code of models that bring their own."""
    rng = np.random.default_rng(3)
    codes = rng.choice(np.array([-128, -127, 127], np.int8), (8, 8, 3, 3))
    proto = model(
        [
            *pair("x", "s", "z", "a"),
            node("DequantizeLinear", ["w", "sw"], ["wd"]),
            node("Conv", ["a", "wd"], ["m"], pads=[1, 1, 1, 1]),
            *pair("m", "sy", "z", "y"),
        ],
        {"x": (1, 8, 6, 6)},
        ["y.q"],
        {
            "s": np.float32(0.01),
            "z": np.int8(0),
            "w": codes,
            "sw": np.float32(0.01),
            "sy": np.float32(0.4),
        },
    )
    feed = {"x": rng.choice(np.array([-9, 9], np.float32), (1, 8, 6, 6))}
    for target in TARGETS:
        built = compiled(proto, target)
        assert_levels_agree(built, feed)
        found, wanted = run_both(built, feed)["y.q"], run_ort(proto, feed)["y.q"]
        assert np.abs(found.astype(int) - wanted.astype(int)).max() <= 1


def attention(seed: int) -> ModelProto:
    """A layer of a transformer: products of activations, softmax, normalisation, residual sums."""
    rng = np.random.default_rng(seed)
    nodes: list[NodeProto] = []
    constants: dict[str, Any] = {
        "quarter": np.float32(0.25),
        "gain": np.full(16, 1.1, np.float32),
        "shift": np.full(16, 0.1, np.float32),
    }

    def add(op_type: str, *inputs: str, **extra: Any) -> str:
        nodes.append(node(op_type, inputs, [f"{op_type.lower()}{len(nodes)}"], **extra))
        return nodes[-1].output[0]

    def linear(x: str) -> str:
        for shape in ((16, 16), (16,)):
            constants[f"w{len(constants)}"] = (rng.standard_normal(shape) / 4).astype(np.float32)
        weights, bias = list(constants)[-2:]
        return add("Add", add("MatMul", x, weights), bias)

    q, k, v = (linear("x") for _ in range(3))
    scores = add("Mul", add("MatMul", q, add("Transpose", k, perm=[0, 2, 1])), "quarter")
    mixed = linear(add("MatMul", add("Softmax", scores, axis=-1), v))
    normal = add("LayerNormalization", add("Add", mixed, "x"), "gain", "shift", axis=-1)
    add("Add", linear(add("Relu", linear(normal))), normal)
    nodes[-1].output[0] = "y"
    return model(nodes, {"x": (1, 12, 16)}, ["y"], constants, opset=17)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("activations", "target"), [("QUInt8", "edge16"), ("QInt8", "tiny8")])
def test_a_transformer_layer(activations: str, target: str, tmp_path: Path) -> None:
    """Zero points everywhere; all of it on the chip."""
    rng = np.random.default_rng(5)
    samples = [{"x": rng.standard_normal((1, 12, 16)).astype(np.float32)} for _ in range(4)]
    quantised = quantised_by_ort(
        attention(5),
        tmp_path,
        samples,
        qdq=True,
        activations=activations,
        weights="QInt8",
        per_channel=True,
    )
    built = compiled(quantised, target)
    assert not host_reasons(built)
    assert_levels_agree(built, samples[0])
    found, wanted = run_both(built, samples[1])["y"], run_ort(quantised, samples[1])["y"]
    apart = np.abs(found - wanted)
    assert apart.max() <= 2 * np.abs(wanted).max() / 127
    assert (apart > 1e-5).mean() <= 0.05


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("qdq", [True, False], ids=["qdq", "qoperator"])
def test_a_real_model(qdq: bool, tmp_path: Path) -> None:
    """PP-OCR's direction classifier, quantised by onnxruntime: the same codes throughout."""
    recipe = find("ppocr-cls")
    proto = onnx.load(prepare(recipe.name))
    for dim, size in zip(
        proto.graph.input[0].type.tensor_type.shape.dim, recipe.input_shape, strict=True
    ):
        dim.dim_value = size
    samples = [dict(item) for item in inputs(recipe.name, 5, seed=1).samples()]
    quantised = quantised_by_ort(
        proto,
        tmp_path,
        samples[:3],
        qdq=qdq,
        activations="QUInt8",
        weights="QInt8",
        per_channel=True,
    )
    built = compiled(quantised, "tiny8")
    for sample in samples[3:]:
        found = next(iter(run_both(built, sample).values()))
        wanted = next(iter(run_ort(quantised, sample).values()))
        np.testing.assert_allclose(found, wanted, atol=0.01)
