"""What the stages of a cascade do to its rolling buffers: one definition for planner and builder.

Tensors are named by the buffer they lie in: a part of a concatenation by the whole's number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.schedule.plan import Home, Stage, Step, TensorSpec, UnitSpec
from tilewright.schedule.rolling import Event, Place, roll


@dataclass(frozen=True)
class Access:
    """An event, and whose it is."""

    stage: int
    """Position in the step's stages."""
    operand: int
    """Position in the unit's reads; `RESULT` for what the stage writes, and for loads and stores.
    """
    event: Event


RESULT = -1


def buffer_of(tensors: Sequence[TensorSpec], tensor: int) -> int:
    """Return the tensor that a tensor lies in: itself, or the concatenation it is a part of."""
    inside = tensors[tensor].inside
    return tensor if inside is None else inside


def held_at(home: Home, step: int) -> bool:
    """Tell whether a tensor, made by then, lies in SRAM as a whole during a step."""
    return home.held and step <= home.until


def accesses(
    stages: Sequence[Stage], units: Sequence[UnitSpec], tensors: Sequence[TensorSpec]
) -> dict[int, list[Access]]:
    """Return, by buffer, what the stages write to it and read from it, in order.

    Parts of a concatenation are written to the same rows one after the other: the first to reach a
    row writes it, the others only need it to be there, as a reader does. So do stores. A stage that
    writes rows of both kinds has two events; the last one tells where its rows are.
    """
    found: dict[int, list[Access]] = {}
    written: dict[int, int] = {}

    def read(stage: int, operand: int, buffer: int, first: int, last: int) -> None:
        found.setdefault(buffer, []).append(Access(stage, operand, Event("read", first, last)))

    def write(stage: int, tensor: int, first: int, last: int) -> None:
        buffer = buffer_of(tensors, tensor)
        done = written.get(buffer, 0)
        if last > done:
            begin = max(first, done)
            event = Event("write", begin, last)
            found.setdefault(buffer, []).append(Access(stage, RESULT, event))
            written[buffer] = last
        if first < done:
            read(stage, RESULT, buffer, first, last)

    for number, stage in enumerate(stages):
        if stage.kind == "load":
            write(number, stage.index, stage.first, stage.last)
        elif stage.kind == "store":
            buffer = buffer_of(tensors, stage.index)
            read(number, RESULT, buffer, stage.first, stage.last)
        else:
            unit = units[stage.index]
            for operand, needed in enumerate(unit.reads):
                first, last = needed.rows(stage.first, stage.last)
                if needed.whole:
                    first, last = 0, tensors[needed.tensor].rows
                read(number, operand, buffer_of(tensors, needed.tensor), first, last)
            write(number, unit.writes, stage.first, stage.last)
    return found


def events_of(
    step: Step,
    units: Sequence[UnitSpec],
    tensors: Sequence[TensorSpec],
    homes: Sequence[Home],
    number: int,
) -> dict[int, list[Event]]:
    """Return the events of every rolling buffer of a cascade, by tensor.

    Args:
        step: the cascade.
        units: all units.
        tensors: all tensors.
        homes: by tensor; what is held as a whole has no rolling buffer.
        number: the step's, which says what is held.
    """
    return {
        buffer: [access.event for access in of_buffer]
        for buffer, of_buffer in accesses(step.stages, units, tensors).items()
        if not held_at(homes[buffer], number)
    }


def places_of(
    step: Step,
    units: Sequence[UnitSpec],
    tensors: Sequence[TensorSpec],
    homes: Sequence[Home],
    number: int,
) -> dict[tuple[int, int], list[tuple[int, Event, Place]]] | None:
    """Return where the operands of every stage find their rows: by (stage, operand).

    Each is a list of (buffer, event, place), of which the last tells the position; the actions of
    all come before it. Operands held as a whole are left out. None: a capacity does not do.

    Raises:
        ValueError: the order of the stages is impossible.
    """
    found: dict[tuple[int, int], list[tuple[int, Event, Place]]] = {}
    for buffer, of_buffer in accesses(step.stages, units, tensors).items():
        if held_at(homes[buffer], number):
            continue
        events = [access.event for access in of_buffer]
        places = roll(tensors[buffer].rows, events, step.capacity[buffer])
        if places is None:
            return None
        for access, place in zip(of_buffer, places, strict=True):
            key = (access.stage, access.operand)
            found.setdefault(key, []).append((buffer, access.event, place))
    return found
