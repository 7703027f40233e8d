"""Small networks quantised by onnxruntime, compiled without data, against onnxruntime itself.

Its graph optimisations are off: they replace the float arithmetic between Q and DQ by kernels that
saturate in 16 bits on some processors.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

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
