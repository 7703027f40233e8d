"""Float and quantised modules of small networks, for tests of what works on the quant level."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from tilewright.compiler import Stage, front_end
from tilewright.pipelines import run_phases
from tilewright.quant.calibrate import calibrate
from tilewright.quant.table import write_attribute
from tilewright.spec.hardware import load_target
from tilewright.transforms.quant.mark_weight_bits import mark_weight_bits

Sample = dict[str, np.ndarray]


def quantised_stages(
    model: onnx.ModelProto,
    samples: Sequence[Sample],
    *,
    target: str = "tiny8",
    rounding: str = "",
    activations: str = "asymmetric",
    weight_bits: int = 8,
) -> tuple[Stage, Stage]:
    """Return a model's float `top` stage and its `quant` stage."""
    chip = load_target(target)
    front = front_end(model, chip)
    context, top = front.context, front.stage
    context.target = chip
    context.weights = top.weights.copy()
    module = top.module.clone()
    mark_weight_bits(module, weight_bits, {}, context)
    write_attribute(module, calibrate(module, context.weights, samples, method="max"))
    options = f"activations={activations}" + (f" rounding={rounding}" if rounding else "")
    run_phases(module, context, ["quantise"], options={"quantize": options})
    return top, Stage(module, context.weights.copy())


def normal_samples(
    shape: Sequence[int], count: int, seed: int = 0, name: str = "x"
) -> list[Sample]:
    """Return inputs of normally distributed values."""
    rng = np.random.default_rng(seed)
    return [{name: rng.standard_normal(shape).astype(np.float32)} for _ in range(count)]
