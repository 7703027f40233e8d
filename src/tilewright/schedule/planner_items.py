"""The SRAM buffers that a plan will have, to see whether they can be placed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from tilewright.schedule.box import BoxProblem
from tilewright.schedule.cascade import buffer_of, held_at
from tilewright.schedule.footprint import activation_bytes, align, parameter_bytes
from tilewright.schedule.placement import Item, TileBuffer, TileDoesNotFit, place_network
from tilewright.schedule.plan import Plan, Step, TensorSpec, UnitSpec
from tilewright.schedule.planner_cascade import held_problem, unit_form
from tilewright.schedule.tiling import ConvProblem, ConvTiling
from tilewright.spec.hardware import Hardware

KEPT = "k"
"""First letter of the names of constants that stay throughout the program."""


def first_misfit(
    hardware: Hardware, units: Sequence[UnitSpec], tensors: Sequence[TensorSpec], plan: Plan
) -> int | None:
    """Return the step at which most bytes are missing, or None if all buffers can be placed."""
    placed = place_network(hardware, items_of(hardware, units, tensors, plan))
    if not isinstance(placed, TileDoesNotFit):
        return None
    return min(max(placed.position, 0), len(plan.steps) - 1)


def items_of(
    hardware: Hardware, units: Sequence[UnitSpec], tensors: Sequence[TensorSpec], plan: Plan
) -> list[Item]:
    """Return the buffers of a plan; positions are steps."""
    items: list[Item] = []
    first: dict[int, int] = {}
    for number, step in enumerate(plan.steps):
        for unit in step.units:
            first.setdefault(buffer_of(tensors, units[unit].writes), number)
    for tensor, home in enumerate(plan.homes):
        if home.held and tensors[tensor].inside is None:
            size = tensor_bytes(hardware, tensors[tensor])
            items.append(Item(f"t{tensor}", "held", size, 1, first[tensor], home.until))
    for number, step in enumerate(plan.steps):
        if step.stages:
            items += _cascade(hardware, units, tensors, step, number, plan)
        else:
            items += _single(hardware, units, tensors, step, number, plan)
    return items


def kept_bytes(
    hardware: Hardware, units: Sequence[UnitSpec], tensors: Sequence[TensorSpec], plan: Plan
) -> int:
    """Return the SRAM of all weights and parameters that stay throughout a plan."""
    if not any(keeps(unit) for unit in units):
        return 0
    return sum(
        align(item.size_bytes, hardware.sram_word_bytes)
        for item in items_of(hardware, units, tensors, plan)
        if item.name.startswith(KEPT)
    )


def keeps(unit: UnitSpec) -> bool:
    """Tell whether constants of a unit stay throughout the program."""
    return unit.kept_bytes > 0 or (isinstance(unit.problem, ConvProblem) and unit.problem.kept)


def constant_tiles(
    hardware: Hardware, problem: ConvProblem, tiling: ConvTiling
) -> tuple[int, int, int]:
    """Return the ranges of output channels, and the bytes of weights and parameters of each."""
    form = tiling.form(hardware, problem)
    count = ceil(problem.group / tiling.groups) * ceil(problem.group_out / tiling.out_channels)
    parameters = parameter_bytes(hardware, form.blocks, problem.element_bytes)
    return count, problem.weight_bytes(hardware, form), parameters


def _kept_items(
    hardware: Hardware,
    unit: int,
    problem: ConvProblem,
    tiling: ConvTiling,
    last: int,
    apart: tuple[str, ...],
) -> list[Item]:
    """Return the weights and parameters that a unit keeps: a tile of each a range of channels."""
    count, weights, parameters = constant_tiles(hardware, problem, tiling)
    return [
        item
        for at in range(count)
        for item in (
            Item(f"{KEPT}{unit} w{at}", "weights", weights, 1, 0, last, apart),
            Item(f"{KEPT}{unit} p{at}", "bias", parameters, 1, 0, last),
        )
    ]


def tensor_bytes(hardware: Hardware, tensor: TensorSpec, rows: int | None = None) -> int:
    """Return the SRAM bytes of a tensor's rows (all with padding, if not given)."""
    top, left, bottom, right = tensor.pads
    count = tensor.rows + top + bottom if rows is None else rows
    pixels = count * (tensor.columns + left + right)
    return activation_bytes(hardware, pixels, tensor.channels, tensor.element_bytes)


def _single(
    hardware: Hardware,
    units: Sequence[UnitSpec],
    tensors: Sequence[TensorSpec],
    step: Step,
    number: int,
    plan: Plan,
) -> list[Item]:
    unit, tiling = units[step.units[0]], step.tilings[0]
    if tiling is None:
        last, index = len(plan.steps) - 1, step.units[0]
        return [Item(f"{KEPT}{index} w", "weights", unit.kept_bytes, 1, 0, last)][: keeps(unit)]
    reads = [buffer_of(tensors, read.tensor) for read in unit.reads]
    buffers = [*reads, buffer_of(tensors, unit.writes)]
    flags = [held_at(plan.homes[buffer], number) for buffer in buffers]
    apart: tuple[str, ...] = ()
    kept: list[Item] = []
    tiles: list[TileBuffer]
    if isinstance(tiling, ConvTiling):
        assert isinstance(unit.problem, ConvProblem)
        names = ("input", "second", "output") if unit.problem.second else ("input", "output")
        held = tuple(name for name, flag in zip(names, flags, strict=True) if flag)
        if flags[-1] and tensors[unit.writes].inside is not None:
            held = (*held, "part")
        loaded = replace(unit.problem, held=held).as_loaded()
        tiles = tiling.buffers(hardware, loaded)
        apart = (f"t{buffers[0]}" if flags[0] else f"s{number} input",)
        if any(tile.role == "gathered" for tile in tiles):
            apart = (f"s{number} gathered",)
        if loaded.kept:
            last = len(plan.steps) - 1
            kept = _kept_items(hardware, step.units[0], loaded, tiling, last, apart)
    else:
        assert isinstance(unit.problem, BoxProblem)
        problem = unit.problem
        if unit.in_ddr is not None and not any(flags):
            problem = unit.in_ddr
        places = (*range(len(flags) - 1), len(problem.operands) - 1)
        held = tuple(at for at, flag in zip(places, flags, strict=True) if flag)
        tiles = tiling.buffers(hardware, replace(problem, held=held))
    return kept + [
        Item(
            f"s{number} {tile.name}",
            tile.role,
            tile.size_bytes,
            tile.slots,
            number,
            number,
            apart if tile.role == "weights" else (),
        )
        for tile in tiles
    ]


def _cascade(
    hardware: Hardware,
    units: Sequence[UnitSpec],
    tensors: Sequence[TensorSpec],
    step: Step,
    number: int,
    plan: Plan,
) -> list[Item]:
    items = [
        Item(
            f"s{number} r{tensor}",
            "held",
            tensor_bytes(hardware, tensors[tensor], rows),
            1,
            number,
            number,
        )
        for tensor, rows in step.capacity.items()
    ]
    for index, tiling in zip(step.units, step.tilings, strict=True):
        unit = units[index]
        assert unit.problem is not None
        part = tensors[unit.writes].inside is not None
        problem = held_problem(unit.problem, part)
        made = unit_form(hardware, problem)
        assert made is not None
        source = buffer_of(tensors, unit.reads[0].tensor)
        apart = f"t{source}" if held_at(plan.homes[source], number) else f"s{number} r{source}"
        if made.gathered_bytes:
            apart = f"s{number} g{index}"
            items.append(Item(apart, "gathered", made.gathered_bytes, 2, number, number))
        if isinstance(problem, ConvProblem) and problem.kept:
            assert isinstance(tiling, ConvTiling)
            last = len(plan.steps) - 1
            items += _kept_items(hardware, index, problem, tiling, last, (apart,))
        if made.weight_bytes:
            name = f"s{number} w{index}"
            items.append(
                Item(name, "weights", made.weight_bytes, 1, number, number, apart=(apart,))
            )
        if made.parameter_bytes:
            name = f"s{number} p{index}"
            items.append(Item(name, "bias", made.parameter_bytes, 1, number, number))
    return items
