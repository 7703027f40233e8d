"""Plans made by hand or at random, and running them: the affine level against the linalg level."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from xdsl.dialects.builtin import ModuleOp

from tests.quant_graphs import Graph, random_codes
from tilewright.dialects.quant import shape_of
from tilewright.interp import run_affine, run_linalg
from tilewright.ir.weights import WeightStore
from tilewright.schedule.box import BoxChoice, BoxProblem, BoxTiling, choose_box
from tilewright.schedule.cascade import buffer_of, events_of, held_at
from tilewright.schedule.footprint import max_parameter_blocks
from tilewright.schedule.plan import Home, Plan, Stage, Step, TensorSpec, UnitSpec
from tilewright.schedule.rolling import least_capacity, roll
from tilewright.schedule.tiling import Choice, ConvProblem, ConvTiling, choose_conv
from tilewright.spec.hardware import Hardware
from tilewright.transforms.affine import layers
from tilewright.transforms.affine.tile_and_bufferize import TileAndBufferizePass

Array = np.ndarray[Any, Any]
Planner = Callable[[Hardware, Sequence[UnitSpec], Sequence[TensorSpec]], Plan]


@dataclass
class Case:
    """A graph at both levels, and inputs for it."""

    linalg: ModuleOp
    affine: ModuleOp
    weights: WeightStore
    inputs: dict[str, Array]
    decisions: list[str]


def built(
    graph: Graph,
    results: Sequence[Any],
    target: str,
    planner: Planner,
    inputs: Mapping[str, Array] | None = None,
    seed: int = 0,
) -> Case:
    """Lower a graph to the affine level by a plan of the given planner."""
    linalg = graph.lowered(*results)
    rng = np.random.default_rng(seed)
    shapes = {name: shape_of(arg) for name, arg in zip(graph.names, graph.block.args, strict=True)}
    feed = dict(inputs or {name: random_codes(rng, shape) for name, shape in shapes.items()})
    affine, context = linalg.clone(), graph.context(target)

    def plan(
        hardware: Hardware,
        units: Sequence[UnitSpec],
        tensors: Sequence[TensorSpec],
        *,
        effort: int,
        goal: str,
    ) -> Plan:
        assert effort
        assert goal
        return planner(hardware, units, tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "plan_network", plan)
        TileAndBufferizePass(effort=1).apply(context, affine)
    affine.verify()
    reasons = [decision.reason for decision in context.decisions]
    return Case(linalg, affine, graph.weights, feed, reasons)


def check(case: Case) -> dict[str, Array]:
    """Compare all values that both levels have; return those of the affine level."""
    expected = run_linalg(case.linalg, case.weights, case.inputs, keep=True)
    actual = run_affine(case.affine, case.weights, case.inputs, keep=True)
    assert actual
    for name, value in actual.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    return actual


def units_by_layer(units: Sequence[UnitSpec]) -> dict[str, int]:
    return {unit.layer: number for number, unit in enumerate(units)}


def alone(
    hardware: Hardware,
    unit: UnitSpec,
    tensors: Sequence[TensorSpec],
    held: Sequence[int],
) -> ConvTiling | BoxTiling | None:
    """Return a unit's tiling in a step of its own, given the tensors that are held."""
    places = [buffer_of(tensors, read.tensor) in held for read in unit.reads]
    places.append(buffer_of(tensors, unit.writes) in held)
    problem = unit.problem if any(places) else unit.in_ddr or unit.problem
    if problem is None:
        return None
    if isinstance(problem, BoxProblem):
        numbers = tuple(at for at, place in enumerate(places) if place)
        box = choose_box(hardware, replace(problem, held=numbers))
        assert isinstance(box, BoxChoice)
        return box.tiling
    names = ["input", *(["second"] if problem.second else []), "output"]
    inside = tuple(name for name, place in zip(names, places, strict=True) if place)
    if places[-1] and tensors[unit.writes].inside is not None:
        inside = (*inside, "part")
    conv = choose_conv(hardware, replace(problem, held=inside))
    assert isinstance(conv, Choice)
    return conv.tiling


def held_plan(
    hardware: Hardware,
    units: Sequence[UnitSpec],
    tensors: Sequence[TensorSpec],
    copied: Sequence[str] = (),
    until: Mapping[str, int] | None = None,
) -> Plan:
    """Every unit by itself, everything held that can be; `copied` tensors are in DDR besides."""
    opaque = {
        buffer_of(tensors, number)
        for unit in units
        if unit.problem is None
        for number in (*(read.tensor for read in unit.reads), unit.writes)
    }
    homes: list[Home] = []
    for number in range(len(tensors)):
        base = buffer_of(tensors, number)
        last = max(
            (
                at
                for at, unit in enumerate(units)
                if base in (buffer_of(tensors, read.tensor) for read in unit.reads)
            ),
            default=0,
        )
        spec = tensors[base]
        end = (until or {}).get(spec.name, last)
        held = not spec.ddr_only
        ddr = not held or base in opaque or spec.name in copied or end < last
        homes.append(Home(ddr, held, end if held else -1))
    steps: list[Step] = []
    for number, unit in enumerate(units):
        inside = [at for at, home in enumerate(homes) if home.held and number <= home.until]
        steps.append(Step((number,), (alone(hardware, unit, tensors, inside),)))
    return Plan(tuple(steps), tuple(homes), 0, 0, 0)


def strip_tiling(
    unit: UnitSpec, rng: np.random.Generator, hardware: Hardware
) -> ConvTiling | BoxTiling:
    """Return some tile of a unit in a cascade: channels in one range or two, a row or several."""
    problem = unit.problem
    rows = int(rng.integers(1, 4))
    if isinstance(problem, BoxProblem):
        _, columns, channels = problem.sizes
        part = channels if rng.integers(2) else -(-channels // 2)
        return BoxTiling((rows, columns, part), (1,) * len(problem.operands))
    assert isinstance(problem, ConvProblem)
    columns = problem.out_columns
    if columns > 1 and rng.integers(3) == 0:
        columns = -(-columns // 2)
    columns = min(columns, hardware.accumulator_rows)
    outs = {problem.group_out, -(-problem.group_out // 2)}
    channels = [(1, part) for part in outs] if not problem.diagonal else []
    groups = {problem.group, -(-problem.group // 2), -(-problem.group // 3)}
    groups |= {hardware.array_size, 1} if problem.diagonal else set[int]()
    channels += [
        (group, problem.group_out)
        for group in groups
        if group <= problem.group and (problem.diagonal or problem.group % group == 0)
    ]
    channels.append((1, min(problem.group_out, hardware.array_size)))
    found = [
        tiling
        for group, part in sorted(set(channels))
        if (tiling := ConvTiling(group, part, problem.group_in, problem.kernel, rows, columns))
        .form(hardware, problem)
        .blocks
        <= max_parameter_blocks(hardware)
    ]
    return found[int(rng.integers(len(found)))]


def random_stages(
    units: Sequence[UnitSpec],
    members: Sequence[int],
    tensors: Sequence[TensorSpec],
    loaded: Sequence[int],
    stored: Sequence[int],
    rng: np.random.Generator,
) -> tuple[Stage, ...]:
    """Return the stages of a cascade in some legal order, each of some rows.

    `loaded` tensors come from DDR a few rows at a time, `stored` ones go there.
    """
    stages: list[Stage] = []
    writers: dict[int, list[int]] = {}
    for unit in members:
        writers.setdefault(buffer_of(tensors, units[unit].writes), []).append(unit)
    done = dict.fromkeys(members, 0)
    there = dict.fromkeys(loaded, 0)
    kept = dict.fromkeys(stored, 0)

    def need(tensor: int, rows: int) -> None:
        """Append what makes rows up to `rows` of a tensor."""
        if tensor in there:
            while there[tensor] < rows:
                last = min(tensors[tensor].rows, max(rows, there[tensor] + int(rng.integers(1, 5))))
                stages.append(Stage("load", tensor, there[tensor], last))
                there[tensor] = last
            return
        for unit in writers.get(tensor, []):
            compute(unit, rows)

    def compute(unit: int, rows: int) -> None:
        spec = units[unit]
        while done[unit] < rows:
            first = done[unit]
            last = min(spec.rows, first + int(rng.integers(1, 5)))
            for read in spec.reads:
                tensor = buffer_of(tensors, read.tensor)
                full = tensors[tensor].rows
                need(tensor, full if read.whole else min(full, read.rows(first, last)[1]))
            stages.append(Stage("compute", unit, first, last))
            done[unit] = last
            base = buffer_of(tensors, spec.writes)
            whole = min(done[item] for item in writers[base])
            if base in kept and whole > kept[base] and (rng.integers(2) or whole == spec.rows):
                stages.append(Stage("store", base, kept[base], whole))
                kept[base] = whole

    left = list(members)
    while left:
        unit = left[int(rng.integers(len(left)))] if rng.integers(3) == 0 else left[-1]
        compute(unit, min(units[unit].rows, done[unit] + int(rng.integers(1, 5))))
        left = [item for item in left if done[item] < units[item].rows]
    return tuple(stages)


def cascade_plan(
    hardware: Hardware,
    units: Sequence[UnitSpec],
    tensors: Sequence[TensorSpec],
    rng: np.random.Generator,
    spare: int = 0,
    whole: Sequence[str] = (),
) -> Plan:
    """One cascade of all units; what leaves the function is stored, the tensors `whole` are held.

    `spare` is how many rows its buffers may have above the least.
    """
    written = {buffer_of(tensors, unit.writes) for unit in units}
    read = {buffer_of(tensors, read.tensor) for unit in units for read in unit.reads}
    stored = [number for number in sorted(written) if tensors[number].ddr_only]
    homes = tuple(
        Home(
            bool(tensors[buffer_of(tensors, number)].ddr_only),
            tensors[buffer_of(tensors, number)].name in whole,
            0,
        )
        for number in range(len(tensors))
    )
    members = tuple(range(len(units)))
    stages = random_stages(units, members, tensors, sorted(read - written), stored, rng)
    tilings = tuple(strip_tiling(unit, rng, hardware) for unit in units)
    step = Step(members, tilings, stages)
    asked = RandomPlan(hardware, units, tensors, rng)
    capacity = capacities(step, asked, homes, 0, spare)
    return Plan((replace(step, capacity=capacity),), homes, 0, 0, 0)


@dataclass
class RandomPlan:
    """A random plan for any network: cascades of neighbours, tensors held for any time."""

    hardware: Hardware
    units: Sequence[UnitSpec]
    tensors: Sequence[TensorSpec]
    rng: np.random.Generator

    def make(self) -> Plan:
        groups = self._groups()
        homes = self._homes(groups)
        steps: list[Step] = []
        for number, group in enumerate(groups):
            held = [at for at, home in enumerate(homes) if held_at(home, number)]
            if len(group) == 1:
                unit = self.units[group[0]]
                steps.append(Step(group, (alone(self.hardware, unit, self.tensors, held),)))
                continue
            steps.append(self._cascade(number, group, homes))
        return Plan(tuple(steps), homes, 0, 0, 0)

    def _buffers(self, unit: int) -> tuple[set[int], int]:
        spec = self.units[unit]
        reads = {buffer_of(self.tensors, read.tensor) for read in spec.reads}
        return reads, buffer_of(self.tensors, spec.writes)

    def _groups(self) -> list[tuple[int, ...]]:
        groups: list[tuple[int, ...]] = []
        at = 0
        while at < len(self.units):
            size = int(self.rng.choice([1, 1, 2, 3, 5]))
            while size > 1 and not self._may_cascade(range(at, at + size)):
                size -= 1
            groups.append(tuple(range(at, at + size)))
            at += size
        return groups

    def _may_cascade(self, members: range) -> bool:
        if members.stop > len(self.units):
            return False
        if not all(self.units[unit].stripable for unit in members):
            return False
        written = {self._buffers(unit)[1] for unit in members}
        return all(
            unit in members for unit in range(len(self.units)) if self._buffers(unit)[1] in written
        )

    def _homes(self, groups: Sequence[tuple[int, ...]]) -> tuple[Home, ...]:
        step_of = {unit: number for number, group in enumerate(groups) for unit in group}
        homes: dict[int, Home] = {}
        for buffer in range(len(self.tensors)):
            readers = [u for u in step_of if buffer in self._buffers(u)[0]]
            writers = [u for u in step_of if self._buffers(u)[1] == buffer]
            steps = {step_of[unit] for unit in (*readers, *writers)}
            last = max(steps, default=0)
            if self.tensors[buffer].ddr_only or not readers:
                homes[buffer] = Home(True, False)
            elif len(steps) == 1 and self.rng.integers(3):
                homes[buffer] = Home(False, False)
            elif self.rng.integers(4) == 0:
                homes[buffer] = Home(True, False)
            else:
                end = int(self.rng.choice([last, last, max(step_of[u] for u in writers)]))
                far = end < last or any(self.units[u].problem is None for u in readers)
                homes[buffer] = Home(bool(far or self.rng.integers(4) == 0), True, end)
        return tuple(homes[buffer_of(self.tensors, number)] for number in range(len(self.tensors)))

    def _cascade(self, number: int, group: tuple[int, ...], homes: Sequence[Home]) -> Step:
        read = {buffer for unit in group for buffer in self._buffers(unit)[0]}
        written = {self._buffers(unit)[1] for unit in group}
        loaded = [b for b in sorted(read - written) if not held_at(homes[b], number)]
        # What is held besides needs no stages: it is stored as its rows are made.
        stored = [
            buffer
            for buffer in sorted(written)
            if homes[buffer].ddr and (not held_at(homes[buffer], number) or self.rng.integers(2))
        ]
        stages = random_stages(self.units, group, self.tensors, loaded, stored, self.rng)
        tilings = tuple(strip_tiling(self.units[u], self.rng, self.hardware) for u in group)
        step = Step(group, tilings, stages)
        return replace(step, capacity=capacities(step, self, homes, number))


def capacities(
    step: Step, plan: RandomPlan, homes: Sequence[Home], number: int, spare: int = 6
) -> dict[int, int]:
    """Return the rows of every rolling buffer: the least, or up to `spare` more."""
    found: dict[int, int] = {}
    for buffer, events in events_of(step, plan.units, plan.tensors, homes, number).items():
        rows = plan.tensors[buffer].rows
        least = least_capacity(rows, events)
        # More rows may do worse: moves come at other times.
        sizes = range(least + int(plan.rng.integers(spare + 1)), least - 1, -1)
        found[buffer] = next(size for size in sizes if roll(rows, events, size) is not None)
    return found
