"""Models with 16-bit activations and calibration data: the float graph is the model's own.

Exporters leave out a ReLU or Clip whose bounds are the ends of the quantiser's codes, so that
leaving out the quantiser must not leave out its saturation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.quantised_models import (
    compiled,
    float_net,
    model,
    node,
    pair,
    quantised_by_ort,
    run_both,
    run_ort,
)
from tilewright.compiler import front_end
from tilewright.runtime.float_executor import TopSession
from tilewright.spec.hardware import load_target

Array = np.ndarray[Any, Any]


def sqnr(wanted: Array, found: Array) -> float:
    noise = float(((wanted - found).astype(np.float64) ** 2).sum())
    return 10 * np.log10(float((wanted.astype(np.float64) ** 2).sum()) / max(noise, 1e-30))


def float_graph(proto: Any, feed: dict[str, Array], target: str = "tiny8") -> Array:
    stage = front_end(proto, load_target(target), calibrated=True).stage
    return TopSession(stage.module, stage.weights).run(feed)["y"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["QUInt16", "QInt16"])
@pytest.mark.parametrize("seed", range(6))
def test_float_graph_and_codes_are_the_models(seed: int, kind: str, tmp_path: Path) -> None:
    proto, shape = float_net(seed)
    rng = np.random.default_rng(seed)
    samples = [{"x": rng.standard_normal(shape).astype(np.float32)} for _ in range(12)]
    quantised = quantised_by_ort(
        proto, tmp_path, samples, qdq=True, activations=kind, weights="QInt8", per_channel=True
    )
    # Louder than the samples: codes saturate.
    feeds = [{"x": 1.5 * samples[0]["x"]}, samples[1], samples[2]]
    for feed in feeds:
        wanted = run_ort(quantised, feed)["y"]
        found = float_graph(quantised, feed)
        np.testing.assert_allclose(found, wanted, atol=2e-3 * float(np.abs(wanted).max()))
    if seed < 3:
        built = compiled(quantised, ("edge16", "tiny8")[seed % 2], samples)
        outputs = [run_both(built, feed)["y"] for feed in samples[:4]]
        wanted = np.stack([run_ort(quantised, feed)["y"] for feed in samples[:4]])
        assert sqnr(wanted, np.stack(outputs)) > 30


CODES = {"s": np.float32(1 / 1024), "z": np.uint16(0), "c": np.int16(-31744)}


@pytest.mark.parametrize("zero", ["z", "c"])
@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Neg"])
def test_saturation_stays_wherever_it_is(op: str, zero: str) -> None:
    operands = ["x"] if op == "Neg" else ["x", "x1"]
    proto = model(
        [node(op, operands, ["a"]), *pair("a", "s", zero, "r"), node("Exp", ["r"], ["y"])],
        {"x": (4, 8)},
        ["y"],
        {**CODES, "x1": np.array([0.5, 3, -2, 1, 9, -40, 4, 2], np.float32)},
    )
    feed = {"x": np.random.default_rng(3).standard_normal((4, 8)).astype(np.float32)}
    np.testing.assert_allclose(float_graph(proto, feed), run_ort(proto, feed)["y"], rtol=1e-3)


def test_a_value_with_other_readers_is_saturated_for_the_quantised_ones_alone() -> None:
    proto = model(
        [
            node("Add", ["x", "x1"], ["a"]),
            *pair("a", "s", "z", "r"),
            node("Mul", ["a", "r"], ["y"]),
        ],
        {"x": (4, 8)},
        ["y"],
        {**CODES, "x1": np.float32(-0.25) * np.ones(8, np.float32)},
    )
    feed = {"x": np.random.default_rng(4).standard_normal((4, 8)).astype(np.float32)}
    np.testing.assert_allclose(float_graph(proto, feed), run_ort(proto, feed)["y"], atol=3e-3)


def dynamic(kind: str, rng: np.random.Generator) -> Any:
    """Return a dynamically quantised layer with a bias, and a ReLU behind it."""
    conv = kind == "ConvInteger"
    shape = (6, 4, 3, 3) if conv else (8, 6)
    bias = rng.standard_normal((1, 6, 1, 1) if conv else (6,)).astype(np.float32)
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["q", "sx", "zx"]),
        node(kind, ["q", "w", "zx"], ["i"]),
        node("Cast", ["i"], ["f"], to=1),
        node("Mul", ["sx", "sw"], ["m"]),
        node("Mul", ["f", "m"], ["p"]),
        node("Add", ["p", "b"], ["a"]),
        node("Relu", ["a"], ["y"]),
    ]
    weights = rng.integers(-127, 128, shape).astype(np.int8)
    constants = {"w": weights, "sw": np.float32(0.004), "b": bias}
    return model(nodes, {"x": (1, 4, 6, 6) if conv else (5, 8)}, ["y"], constants)


@pytest.mark.parametrize("kind", ["ConvInteger", "MatMulInteger"])
def test_dynamic_layers_keep_their_biases(kind: str) -> None:
    rng = np.random.default_rng(7)
    proto = dynamic(kind, rng)
    dims = [d.dim_value for d in proto.graph.input[0].type.tensor_type.shape.dim]
    samples = [{"x": rng.standard_normal(dims).astype(np.float32)} for _ in range(8)]
    wanted = np.stack([run_ort(proto, feed)["y"] for feed in samples])
    floats = np.stack([float_graph(proto, feed) for feed in samples])
    assert sqnr(wanted, floats) > 35
    built = compiled(proto, "tiny8", samples)
    assert sqnr(wanted, np.stack([run_both(built, feed)["y"] for feed in samples])) > 30
