"""Held tensors and cascades as programs: the machine computes what the affine level says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from xdsl.dialects.builtin import ArrayAttr, DictionaryAttr, IntegerAttr, ModuleOp, StringAttr

from tests.affine_plans import Case, built, cascade_plan, held_plan
from tests.e2e import test_half, test_steps
from tests.random_networks import random_network
from tests.unit.test_affine_steps import NETS, TARGETS, Net, chain
from tilewright.codegen.verify import verify_program
from tilewright.dialects.tpu import ProgramOp
from tilewright.interp import run_affine
from tilewright.ir.io import new_context
from tilewright.passes import make_pass
from tilewright.schedule.plan import Plan, TensorSpec, UnitSpec
from tilewright.sim.functional import FunctionalSimulator
from tilewright.spec.hardware import Hardware, load_target
from tilewright.spec.program import Instr

Array = np.ndarray[Any, Any]
WIDE = load_target("tpu_v2").model_copy(update={"name": "tpu_v2_1m", "sram_size": 1 << 20})
"""Room for what a random plan holds."""


def integer(value: object) -> int:
    """Return the value of an integer attribute."""
    assert isinstance(value, IntegerAttr)
    return value.value.data


class Lowered:
    """A case as a program, and its DDR."""

    def __init__(self, case: Case, target: str, schedule: bool = False) -> None:
        self.case, self.hardware = case, load_target(target)
        context = new_context(case.weights.copy(), self.hardware)
        self.module: ModuleOp = case.affine.clone()
        make_pass("lower-affine-to-tpu").apply(context, self.module)
        if schedule:
            make_pass("schedule-instructions").apply(context, self.module)
        self.module.verify()
        (self.op,) = (op for op in self.module.ops if isinstance(op, ProgramOp))
        self.program: list[Instr] = self.op.instructions()
        verify_program(self.program, self.hardware)
        self.constants = context.weights.get("tpu.constants")
        self.base = next(
            i.fields["value"] for i in self.program if i.name == "set_reg" and i.fields["rd"] == 2
        )

    def tensor(self, name: str) -> tuple[int, tuple[int, ...]]:
        """Return a tensor's DDR address and shape."""
        tensors = self.module.attributes["tensors"]
        assert isinstance(tensors, DictionaryAttr)
        entry = tensors.data[name]
        assert isinstance(entry, DictionaryAttr)
        shape = entry.data["shape"]
        assert isinstance(shape, ArrayAttr)
        return self.base + integer(entry.data["offset"]), tuple(integer(x) for x in shape)

    def results(self, seed: int | None = None) -> dict[str, Array]:
        """Run the program, engines in a random order if there is a seed."""
        size = self.base + integer(self.module.attributes["workspace_bytes"])
        memory = np.random.default_rng(5).integers(0, 256, size).astype(np.uint8)
        memory[: self.constants.size] = self.constants
        for name, value in self.case.inputs.items():
            at, _ = self.tensor(name)
            memory[at : at + value.size] = value.astype(np.int8).view(np.uint8).reshape(-1)
        order = "program" if seed is None else "random"
        FunctionalSimulator(self.hardware).run(self.program, memory, order=order, seed=seed or 0)
        outputs = self.op.attributes["outputs"]
        assert isinstance(outputs, ArrayAttr)
        found: dict[str, Array] = {}
        for item in outputs:
            assert isinstance(item, StringAttr)
            at, shape = self.tensor(item.data)
            found[item.data] = memory[at : at + int(np.prod(shape))].view(np.int8).reshape(shape)
        return found

    def check(self) -> None:
        """Compare results with those of the affine level, in program order and out of it."""
        wanted = run_affine(self.case.affine, self.case.weights, self.case.inputs, keep=True)
        for seed in (None, 1, 2):
            found = self.results(seed)
            assert found
            for name, value in found.items():
                np.testing.assert_array_equal(value, wanted[name].reshape(value.shape), name)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("net", NETS)
def test_everything_held(net: Any, target: str) -> None:
    graph = Net(target)
    case = built(graph, net(graph), target, held_plan)
    Lowered(case, target).check()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("seed", range(2))
def test_cascades(net: Any, target: str, seed: int) -> None:
    graph, rng = Net(target), np.random.default_rng(seed)

    def plan(hardware: Hardware, units: Sequence[UnitSpec], tensors: Sequence[TensorSpec]) -> Plan:
        return cascade_plan(hardware, units, tensors, rng, spare=seed)

    case = built(graph, net(graph), target, plan, seed=seed)
    Lowered(case, target).check()
    Lowered(case, target, schedule=True).check()


def test_rows_are_moved_within_sram() -> None:
    graph, rng = Net(h=40), np.random.default_rng(1)
    case = built(
        graph, chain(graph), "tiny8", lambda *asked: cascade_plan(asked[0], asked[1], asked[2], rng)
    )
    lowered = Lowered(case, "tiny8")
    lowered.check()
    assert any(instr.name == "vec_copy" for instr in lowered.program)
    peak = integer(lowered.module.attributes["sram_peak_bytes"])
    assert 0 < peak <= lowered.hardware.sram_size


@pytest.mark.parametrize("seed", range(2))
def test_half_networks_by_random_plans(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Any byte of SRAM read before it is written makes a NaN, even if it is multiplied by zero.
    monkeypatch.setattr("tilewright.sim.state.SRAM_RESET", 0xFF)
    model, shape = random_network(seed)
    made = test_steps.compiled(model, shape, WIDE, seed, dtype="fp16")
    assert 'role = "held"' in str(made.stages["affine"].module)
    test_half.check(made, test_half.normal(seed + 1000, *shape))
