"""Faults that users of other compilers met with quantised models (`tests/cases/quant-*`).

Each model runs on the quantised reference and on the functional simulator of three chips, which
round in three ways; and so do more models of the same kind, drawn at random, against onnxruntime.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.level_checks import assert_levels_agree
from tests.quantised_models import (
    Array,
    compiled,
    host_reasons,
    model,
    node,
    pair,
    run_both,
    run_ort,
)

CASES = Path(__file__).parents[1] / "cases"
TARGETS = ("edge16", "tiny8", "tpu_v2")
FOLDERS = {
    "quant-relu-signed-not-free": 0.0,
    "quant-residual-two-scales": 0.02,
    "quant-ties-and-saturation": 0.0,
    "quant-wide-accumulator": 0.0,
    "codegen-odd-k-both-zero-points": 0.01,
}
"""Share of codes that may be one apart."""


def assert_close(found: Array, wanted: Array, share: float, name: str) -> None:
    assert found.dtype == wanted.dtype, name
    if wanted.dtype.kind == "f":
        return
    apart = np.abs(found.astype(np.int64) - wanted.astype(np.int64))
    assert apart.max(initial=0) <= (1 if share else 0), name
    assert (apart > 0).mean() <= share, name


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("folder", FOLDERS)
def test_case(folder: str, target: str) -> None:
    built = compiled(onnx.load(CASES / folder / "model.onnx"), target)
    found = run_both(built, dict(np.load(CASES / folder / "inputs.npz")))
    wanted = dict(np.load(CASES / folder / "outputs.npz"))
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        assert_close(found[name], array, FOLDERS[folder], name)
        if array.dtype.kind == "f" and not FOLDERS[folder]:
            np.testing.assert_allclose(found[name], array, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("seed", range(6))
def test_clamps_before_signed_codes(seed: int) -> None:
    """A ReLU or Clip stays unless the ends of the codes are its bounds."""
    rng = np.random.default_rng(seed)
    zero = int(rng.choice([-128, -60, -1, 0, 20, 127]))
    clamp = ["m"] if seed % 2 else ["m", "low", "high"]
    proto = model(
        [
            *pair("x", "sx", "", "a"),
            node("DequantizeLinear", ["w", "sw"], ["wd"]),
            node("Conv", ["a", "wd"], ["m"]),
            node("Relu" if seed % 2 else "Clip", clamp, ["r"]),
            *pair("r", "sy", "zy", "y"),
        ],
        {"x": (1, 3, 6, 5)},
        ["y", "y.q"],
        {
            "sx": np.float32(0.05),
            "w": rng.integers(-127, 128, (4, 3, 3, 3)).astype(np.int8),
            "sw": np.float32(0.003 + rng.random() * 0.01),
            "sy": np.float32(0.01 + rng.random() * 0.02),
            "zy": np.int8(zero),
            "low": np.float32(-0.3),
            "high": np.float32(1.5),
        },
        opset=13,
    )
    # Without a zero point the quantiser of the input is unsigned.
    feed = {"x": (3 * rng.standard_normal((1, 3, 6, 5))).astype(np.float32)}
    built = compiled(proto, TARGETS[seed % 3])
    found, wanted = run_both(built, feed), run_ort(proto, feed)
    np.testing.assert_array_equal(found["y.q"], wanted["y.q"])
    np.testing.assert_array_equal(found["y"], wanted["y"])


@pytest.mark.parametrize("seed", range(6))
def test_sums_of_two_scales(seed: int) -> None:
    rng = np.random.default_rng(10 + seed)
    steps = np.exp(rng.uniform(-6, -2, 3)).astype(np.float32)
    op_type = ("Add", "Sub", "Mul")[seed % 3]
    proto = model(
        [
            *pair("p", "s0", "z0", "a"),
            *pair("q", "s1", "z1", "b"),
            node(op_type, ["a", "b"], ["m"]),
            *pair("m", "s2", "z2", "y"),
        ],
        {"p": (2, 7, 9), "q": (2, 7, 9)},
        ["y.q"],
        {f"s{i}": step for i, step in enumerate(steps)}
        | {"z0": np.uint8(rng.integers(256)), "z1": np.int8(rng.integers(-128, 128))}
        | {"z2": np.uint8(rng.integers(256))},
    )
    feed = {name: rng.standard_normal((2, 7, 9)).astype(np.float32) for name in "pq"}
    built = compiled(proto, TARGETS[seed % 3])
    assert built.program.tpu_steps
    assert_close(run_both(built, feed)["y.q"], run_ort(proto, feed)["y.q"], 0.01, op_type)


@pytest.mark.parametrize("seed", range(4))
def test_long_products_at_the_ends_of_the_codes(seed: int) -> None:
    rng = np.random.default_rng(20 + seed)
    depth = int(rng.integers(600, 1500))
    proto = model(
        [
            *pair("x", "sx", "zx", "a"),
            node("DequantizeLinear", ["w", "sw"], ["wd"]),
            node("MatMul", ["a", "wd"], ["m"]),
            *pair("m", "sy", "zy", "y"),
        ],
        {"x": (3, depth)},
        ["y.q"],
        {
            "sx": np.float32(0.1),
            "zx": np.uint8(0 if seed % 2 else 255),
            "w": rng.choice(np.array([-127, 127], np.int8), (depth, 5), p=[0.1, 0.9]),
            "sw": np.float32(0.02),
            "sy": np.float32(depth * 0.41),
            "zy": np.uint8(100),
        },
    )
    x = rng.choice(np.array([-25.5, 0, 25.5], np.float32), (3, depth))
    built = compiled(proto, TARGETS[seed % 3])
    assert built.program.tpu_steps
    np.testing.assert_array_equal(run_both(built, {"x": x})["y.q"], run_ort(proto, {"x": x})["y.q"])


@pytest.mark.parametrize("seed", range(5))
def test_products_of_activations_with_zero_points(seed: int) -> None:
    rng = np.random.default_rng(30 + seed)
    m, k, n = (int(value) for value in rng.integers(1, 40, 3))
    zeros = [(131, 113), (0, 255), (128, 9), (128, 128), (0, 0)][seed]
    proto = model(
        [
            *pair("p", "s0", "z0", "a"),
            *pair("q", "s1", "z1", "b"),
            node("MatMul", ["a", "b"], ["m"]),
            *pair("m", "s2", "z2", "y"),
        ],
        {"p": (2, m, k), "q": (2, k, n)},
        ["y.q"],
        {"s0": np.float32(0.02), "s1": np.float32(0.017), "s2": np.float32(0.31)}
        | {"z0": np.uint8(zeros[0]), "z1": np.uint8(zeros[1]), "z2": np.uint8(125)},
    )
    feed = {
        "p": (2 * rng.standard_normal((2, m, k))).astype(np.float32),
        "q": (2 * rng.standard_normal((2, k, n))).astype(np.float32),
    }
    built = compiled(proto, TARGETS[seed % 3])
    # Nine products of 8 bits in place of one are not worth it.
    assert ("zero points" in host_reasons(built).get("m", "")) == (zeros == (0, 0))
    assert_levels_agree(built, feed)
    assert_close(run_both(built, feed)["y.q"], run_ort(proto, feed)["y.q"], 0.01, "y.q")
