"""Small networks quantised by onnxruntime, compiled without data, against onnxruntime itself.

Its graph optimisations are off: they replace the float arithmetic between Q and DQ by kernels that
saturate in 16 bits on some processors.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.quantised_models import (
    compiled,
    float_net,
    host_reasons,
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
