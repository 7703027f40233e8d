"""Random plans of random networks: held tensors and cascades change no integer at any level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import onnx
import pytest

from tests.affine_plans import RandomPlan
from tests.e2e.test_fusion import residual_network
from tests.level_checks import assert_levels_agree, normal_sample
from tests.random_networks import random_network
from tilewright.compare import compare
from tilewright.compiler import Compiled, compile_model, front_end
from tilewright.ptq.options import QuantOptions
from tilewright.schedule.plan import Plan, TensorSpec, UnitSpec
from tilewright.spec.hardware import Hardware, load_target
from tilewright.transforms.affine import layers

ROOM = 1 << 20
"""SRAM bytes: what a random plan holds has to fit."""
TARGETS = [
    load_target(name).model_copy(update={"name": f"{name}_1m", "sram_size": ROOM})
    for name in ("tiny8", "edge16", "tpu_v2")
]

each_target = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


def compiled(
    model: onnx.ModelProto,
    shape: tuple[int, ...],
    target: Hardware,
    seed: int,
    dtype: Literal["int8", "fp16"] = "int8",
) -> Compiled:
    """Compile a model by random plans, and compare its levels."""
    rng = np.random.default_rng(seed)

    def plan(
        hardware: Hardware,
        units: Sequence[UnitSpec],
        tensors: Sequence[TensorSpec],
        *,
        effort: int,
        goal: str,
    ) -> Plan:
        del effort, goal
        return RandomPlan(hardware, units, tensors, rng).make()

    samples = [normal_sample({"x": shape}, rng) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "plan_network", plan)
        return compile_model(
            front_end(model, target), target, samples=samples, dtype=dtype,
            quant=QuantOptions(level=0, activations="asymmetric" if seed % 2 else "symmetric"),
        )  # fmt: skip


def check(model: onnx.ModelProto, shape: tuple[int, ...], target: Hardware, seed: int) -> None:
    made = compiled(model, shape, target, seed)
    assert_levels_agree(made, normal_sample({"x": shape}, np.random.default_rng(seed)), seed)


@each_target
@pytest.mark.parametrize("seed", range(5))
def test_residual_networks(seed: int, target: Hardware) -> None:
    model, shape = residual_network(seed)
    check(model, shape, target, seed)


@each_target
@pytest.mark.parametrize("seed", range(5))
def test_networks_of_everything(seed: int, target: Hardware) -> None:
    model, shape = random_network(seed)
    check(model, shape, target, seed)


@pytest.mark.parametrize("seed", range(4))
def test_halves(seed: int) -> None:
    target = TARGETS[-1]
    for model, shape in (residual_network(seed), random_network(seed)):
        made = compiled(model, shape, target, seed, "fp16")
        sample = normal_sample({"x": shape}, np.random.default_rng(seed))
        # Sums of floats depend on the tiles.
        for level in ("affine", "tpu"):
            found = compare(made, "quant", level, sample)
            assert found.layers
            assert found.agrees, (level, found.layers[0])
