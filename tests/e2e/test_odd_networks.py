"""What a plan keeps in SRAM, and at which level it was made, changes no integer of any network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.level_checks import normal_sample
from tests.odd_networks import NETWORKS, odd_network
from tests.unit.test_zoo_nets import needs_torch
from tilewright.api import resolve_model
from tilewright.compiler import compile_model, front_end
from tilewright.ptq.options import Activations, QuantOptions
from tilewright.quant.reference import QuantSession
from tilewright.runtime.runtime import Executor
from tilewright.spec.hardware import Hardware, load_target
from tilewright.zoo import inputs

LEVELS: dict[str, dict[str, Any]] = {
    "apart": {"fuse": False},
    "O0": {"level": 0},
    "O1": {"level": 1},
    "O2": {"level": 2},
    "O3": {"level": 3},
    "size": {"goal": "size"},
}


def sized(name: str, kilobytes: int) -> Hardware:
    """Return a target with another SRAM."""
    changes = {"name": f"{name}_{kilobytes}k", "sram_size": kilobytes << 10}
    return load_target(name).model_copy(update=changes)


SMALL = [sized("edge16", 48), load_target("tiny8")]
TARGETS = [
    sized("edge16", 24), sized("tiny8", 64), sized("tpu_v2", 768),
    *(load_target(name) for name in ("edge16", "edge16_vela_128k", "tpu_v2_1m")),
]  # fmt: skip


def check(
    model: onnx.ModelProto | Path,
    shapes: dict[str, tuple[int, ...]],
    samples: Sequence[Mapping[str, np.ndarray]],
    target: Hardware,
    levels: Iterable[str],
    activations: Activations = "symmetric",
) -> None:
    """Compare the results of every level with those of the quantised graph."""
    wanted: list[dict[str, np.ndarray]] = []
    table = None
    for name in levels:
        made = compile_model(
            front_end(model, target, shapes=shapes), target, samples=samples, table=table,
            quant=QuantOptions(level=0, activations=activations), **LEVELS[name],
        )  # fmt: skip
        table = made.table
        quant = made.stages["quant"]
        if not wanted:
            session = QuantSession(quant.module, quant.weights)
            wanted = [session.run(sample) for sample in samples]
            assert any(np.ptp(array) for array in wanted[0].values()), "nothing to compare"
        executor = Executor(made.program, target)
        assert made.program.tpu_steps
        # A second input runs in the memory that the first one left.
        for sample, expected in zip(samples, wanted, strict=True):
            got = executor.run(sample)
            for output, array in expected.items():
                np.testing.assert_array_equal(got[output], array, f"{name}: {output}")


def check_odd(name: str, target: Hardware, levels: Iterable[str], activations: Activations) -> None:
    model, shape = odd_network(name)
    rng = np.random.default_rng(len(name))
    samples = [normal_sample({"x": shape}, rng) for _ in range(2)]
    check(model, {"x": shape}, samples, target, levels, activations)


@pytest.mark.parametrize("name", list(NETWORKS))
def test_odd_networks(name: str) -> None:
    target = SMALL[list(NETWORKS).index(name) % len(SMALL)]
    check_odd(name, target, ("O2",), "asymmetric")


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("name", list(NETWORKS))
def test_odd_networks_at_every_level(name: str, target: Hardware, activations: Activations) -> None:
    check_odd(name, target, LEVELS, activations)


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", ["edge16", "tiny8", "tpu_v2", "tpu_v2_1m", "edge16_vela_128k", "edge16_vela_512k"]
)
@pytest.mark.parametrize(
    "model", ["pplcnet", "squeezenet-light", pytest.param("mobilenet-v2", marks=needs_torch)]
)
def test_real_networks_at_every_level(model: str, target: str) -> None:
    path, shapes, _ = resolve_model(f"zoo:{model}")
    samples = list(inputs(model, 2, seed=3).samples())
    check(path, shapes, samples, load_target(target), LEVELS)
