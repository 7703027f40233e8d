"""Reorder the instructions of each program so that its engines wait less.

Before: programs in the order of their tiles. After: every program in an order of the list scheduler
(`schedule/list_schedule.py`) that keeps its meaning, with semaphores assigned anew; `written` says
after which instructions tensors are complete in it. The times are estimates, or those of the
module's `tpu.timing_constraint`s. A program stays as it is when it has loops, when its semaphores
are not the compiler's, or when the model sees no gain; the decision log has the reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from xdsl.context import Context
from xdsl.dialects.builtin import ArrayAttr, DictionaryAttr, IntegerAttr, ModuleOp, StringAttr, i64
from xdsl.ir import Attribute
from xdsl.passes import ModulePass

from tilewright.codegen.verify import verify_program
from tilewright.codegen.verify_parameters import contents
from tilewright.diagnostics import TilewrightError
from tilewright.dialects.tpu import InstructionOp, ProgramOp
from tilewright.ir.context import compile_context
from tilewright.schedule.constraints import Constraints
from tilewright.schedule.dependencies import find_dependencies, regions_of
from tilewright.schedule.list_schedule import costs, estimate, list_schedule
from tilewright.spec.access import Access
from tilewright.spec.hardware import Hardware
from tilewright.spec.program import SEQ, Dispatched, Instr, sequence
from tilewright.transforms.tpu.annotate_timing import constraints_of
from tilewright.transforms.tpu.instruction import Instr as TouchingInstr
from tilewright.transforms.tpu.instruction import Region
from tilewright.transforms.tpu.synchronize import synchronize

MARK = "schedule"
"""Attribute of a program: digest of its instructions and the times it was scheduled by."""


@dataclass(frozen=True)
class ScheduleInstructionsPass(ModulePass):
    """Reorder instructions by a list scheduler; measured times are used where there are any.

    Requires: the tpu level. Ensures: the same meaning; semaphores for the new order.

    Options: `max_instructions`: a longer program keeps the tiles' own order unless there are
    measured times, since it would cost more compile time than it gains cycles; 0: no limit.
    """

    name = "schedule-instructions"
    max_instructions: int = 200_000

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Rewrite the module in place.

        Raises:
            TilewrightError: E0201 without a target; E0602 for a program the sequencer cannot run.
        """
        context = compile_context(ctx)
        hardware = context.target
        programs = [item for item in op.ops if isinstance(item, ProgramOp)]
        if not programs:
            return
        if hardware is None:
            raise TilewrightError("E0201", "scheduling needs a target", [], "give the target")
        measured = constraints_of(op, hardware)
        for program in programs:
            count = sum(1 for _ in program.body.block.ops)
            if 0 < self.max_instructions < count and not len(measured):
                fired = False
                reason = f"{count} instructions are above max-instructions={self.max_instructions}"
            else:
                fired, reason = schedule_program(program, hardware, measured)
            context.decide(program.sym_name.data, self.name, fired, reason)


def schedule_program(
    program: ProgramOp, hardware: Hardware, measured: Constraints
) -> tuple[bool, str]:
    """Reorder one program in place; return whether it changed, and why or why not."""
    instructions = program.instructions()
    mark = program.attributes.get(MARK)
    if isinstance(mark, StringAttr) and mark.data == _digest(instructions, measured, hardware):
        return False, "it is scheduled by these times already"
    if any(instr.name in ("loop", "end_loop") for instr in instructions):
        return False, "it has loops: the order of their instructions is the user's"
    stream = list(sequence(instructions, hardware.scalar_registers))
    if any(item.fields["wait"] or item.fields["signal"] for item in stream if item.engine == SEQ):
        return False, "the sequencer takes part in its semaphores"
    regions = regions_of(stream, hardware)
    order: list[int] = []
    before = after = 0
    for first, last in _runs(stream):
        run = stream[first:last]
        if run and run[0].engine != SEQ:
            chosen, old, new = _schedule_run(run, regions[first:last], hardware, measured)
            before, after = before + old, after + new
            order += [first + index for index in chosen]
        else:
            order += range(first, last)
    if order == list(range(len(stream))):
        return False, f"no order is better than the tiles' own: {before} cycles by the model"
    reordered = _resynchronised(instructions, stream, regions, order, hardware)
    try:
        verify_program(reordered, hardware)
        _check_contents(instructions, reordered, order, hardware)
    except TilewrightError as error:
        # Never seen; were the model of what blocks whom wrong, the order of the tiles is right.
        return False, f"the new order does not verify: {error.message}"
    written = _written(program, stream, order)
    _reorder(program, order, reordered)
    if written is not None:
        program.attributes["written"] = written
    program.attributes[MARK] = StringAttr(_digest(reordered, measured, hardware))
    moved = sum(1 for place, index in enumerate(order) if place != index)
    times = f", {len(measured)} of them measured" if len(measured) else ""
    return True, (
        f"{moved} of {len(order)} instructions moved: {before} -> {after} cycles by the model"
        f"{times}"
    )


def _check_contents(
    instructions: Sequence[Instr],
    reordered: Sequence[Instr],
    order: Sequence[int],
    hardware: Hardware,
) -> None:
    """Check that every instruction finds in registers what it found in the old order.

    Raises:
        TilewrightError: E0501, one does not.
    """
    new = sorted((order[index], *rest) for index, *rest in contents(reordered, hardware))
    if new != sorted(contents(instructions, hardware)):
        raise TilewrightError("E0501", "an instruction would find other parameters")


def _reorder(program: ProgramOp, order: Sequence[int], reordered: Sequence[Instr]) -> None:
    block = program.body.block
    ops = [op for op in block.ops if isinstance(op, InstructionOp)]
    for op in ops:
        op.detach()
    for index, instr in zip(order, reordered, strict=True):
        ops[index].synchronise(instr.fields["wait"], instr.fields["signal"])
    block.add_ops([ops[index] for index in order])


def _runs(stream: Sequence[Dispatched]) -> list[tuple[int, int]]:
    """Cut at the sequencer's instructions, which stay where they are."""
    cuts = [0]
    for index, item in enumerate(stream):
        if item.engine == SEQ:
            cuts += [index, index + 1]
    cuts.append(len(stream))
    return [(a, b) for a, b in pairwise(cuts) if a < b]


def _schedule_run(
    run: list[Dispatched],
    regions: Sequence[list[Access]],
    hardware: Hardware,
    measured: Constraints,
) -> tuple[list[int], int, int]:
    """Return the best order known, and the model's cycles of the old and the new one."""
    same = list(range(len(run)))
    dependencies = find_dependencies(run, hardware, regions)
    pushing = sum(1 for item in run if item.name == "mac_conv" and item.fields["push"])
    draining = sum(1 for item in run if item.name == "vec_drain")
    cost = costs(run, hardware, measured.cycles if len(measured) else None)
    if not pushing == draining == len(dependencies.drains):
        # Accumulators stay in the M registers across the run's ends.
        old = estimate(run, hardware, dependencies, cost, same)
        return same, old, old
    return list_schedule(run, hardware, dependencies, cost)


def _resynchronised(
    instructions: Sequence[Instr],
    stream: Sequence[Dispatched],
    regions: Sequence[list[Access]],
    order: Sequence[int],
    hardware: Hardware,
) -> list[Instr]:
    """Return the instructions in a new order with their semaphores."""
    stores = [r for own in regions for r in own if r.write and not r.sram]
    low = min((region.address for region in stores), default=0)
    high = max((region.end for region in stores), default=0)

    def region(item: Access) -> Region:
        if item.sram:
            return Region("sram", item.address, item.end)
        if item.end <= low or item.address >= high:
            return Region("const", item.address, item.end)
        return Region("ddr", max(item.address, low) - low, min(item.end, high) - low)

    touched: dict[int, tuple[list[Region], list[Region]]] = {}
    touching: list[TouchingInstr] = []
    for index in order:
        own = regions[index]
        known = touched.get(id(own))
        if known is None:
            known = touched[id(own)] = (
                [region(item) for item in own if not item.write],
                [region(item) for item in own if item.write],
            )
        fields = {**stream[index].fields, **instructions[index].fields, "wait": 0, "signal": 0}
        touching.append(TouchingInstr(stream[index].name, fields, stream[index].layer, *known))
    synchronize(touching, hardware, high - low)
    # `channel` and `push` were asked for above; defaults are left out of the IR again.
    return [
        Instr(
            item.name,
            {
                **instructions[index].fields,
                "wait": item.fields["wait"], "signal": item.fields["signal"],
            },
            item.layer,
        )
        for index, item in zip(order, touching, strict=True)
    ]  # fmt: skip


def _written(
    program: ProgramOp, stream: Sequence[Dispatched], order: Sequence[int]
) -> DictionaryAttr | None:
    """Return `written` for the new order: the last of the stores that complete each tensor."""
    old = program.attributes.get("written")
    if not isinstance(old, DictionaryAttr):
        return None
    place = {index: position for position, index in enumerate(order)}
    stores = [index for index, item in enumerate(stream) if item.name == "dma_store"]
    registers = {i.fields["rd"]: i.fields["value"] for i in stream if i.name == "set_reg"}
    found: dict[str, Attribute] = {}
    for name, value in old.data.items():
        assert isinstance(value, IntegerAttr)
        last = value.value.data
        # Stores of the same layer, and those of others into the tensor (parts of a concatenation).
        # Earlier tensors at the same bytes do no harm: their stores come before these.
        low, high = _span(program, name, stream[last], registers)
        places = [
            place[index]
            for index in stores
            if index <= last
            and (
                stream[index].layer == stream[last].layer
                or low <= stream[index].fields["ddr"] < high
            )
        ]
        found[name] = IntegerAttr(max(places, default=place[last]), i64)
    return DictionaryAttr(found)


def _span(
    program: ProgramOp, name: str, store: Dispatched, registers: Mapping[int, int]
) -> tuple[int, int]:
    """Return the DDR addresses in which a tensor's elements start, a byte each at least."""
    module = program.parent_op()
    table = module.attributes.get("tensors") if module is not None else None
    entry = table.data.get(name) if isinstance(table, DictionaryAttr) else None
    if not isinstance(entry, DictionaryAttr):
        return 0, 0
    offset, shape = entry.data["offset"], entry.data["shape"]
    assert isinstance(offset, IntegerAttr)
    assert isinstance(shape, ArrayAttr)
    size = prod(item.value.data for item in shape if isinstance(item, IntegerAttr))
    base = registers.get(store.fields["ddr_r"], 0)
    return base + offset.value.data, base + offset.value.data + size


def _digest(instructions: Sequence[Instr], measured: Constraints, hardware: Hardware) -> str:
    stream = sequence(instructions, hardware.scalar_registers)
    digest = hashlib.sha3_256()
    for item in stream:
        digest.update(repr((item.name, item.fields, measured.cycles(item))).encode())
    return digest.hexdigest()[:16]
