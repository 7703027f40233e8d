"""Where the rows of a tensor lie in a buffer that holds only some of them at a time.

Rows are written in ascending order, each once, behind the ones before; when they do not fit at the
end of the buffer, what is still needed moves to its start. Rows are counted as in the image:
padding above has negative numbers, padding below starts at the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Event:
    """Rows `first..last` (exclusive) are written, or read, at one point of the program."""

    kind: Literal["write", "read"]
    first: int
    last: int


@dataclass(frozen=True)
class Action:
    """What happens to the buffer just before an event.

    `fill`: `count` rows at position `target` get the fill value. `move`: `count` rows at `source`
    are copied to `target`; the two never overlap.
    """

    kind: Literal["fill", "move"]
    target: int
    count: int
    source: int = 0


@dataclass(frozen=True)
class Place:
    """Where an event finds its rows."""

    position: int
    """Of the first row, in rows from the start of the buffer; the others follow."""
    actions: tuple[Action, ...]
    """In order, before the event."""


def roll(rows: int, events: Sequence[Event], capacity: int) -> list[Place] | None:
    """Return where every event finds its rows, or None if the capacity does not do.

    Args:
        rows: of the image.
        events: in order of the program. Writes ascend without gaps from row 0; a read needs rows
            that are written by then, or padding.
        capacity: rows of the buffer.

    Raises:
        ValueError: the events are not in such an order.
    """
    needed = _needed_from(events)
    top = max(0, -min((e.first for e in events if e.kind == "read"), default=0))
    bottom = max(0, max((e.last for e in events if e.kind == "read"), default=0) - rows)
    if top > capacity:
        return None
    places: list[Place] = []
    # Row r lies at position r - base; rows up to `written` are there.
    base, written = -top, 0
    actions: list[Action] = [Action("fill", 0, top)] if top else []
    for index, event in enumerate(events):
        if event.kind == "write":
            if event.first != written or event.last > rows:
                raise ValueError(f"rows {event.first}..{event.last} after row {written}")
            last = event.last + (bottom if event.last == rows else 0)
            if last - base > capacity:
                kept = min(needed[index], written)
                source, count = kept - base, written - kept
                if count > source or last - kept > capacity:
                    return None
                if count:
                    actions.append(Action("move", 0, count, source))
                base = kept
            if last > event.last:
                actions.append(Action("fill", event.last - base, bottom))
            written = last
        elif event.last > written or event.first < base:
            raise ValueError(f"rows {event.first}..{event.last} are read, {base}..{written} held")
        places.append(Place(event.first - base, tuple(actions)))
        actions = []
    return places


def least_capacity(rows: int, events: Sequence[Event]) -> int:
    """Return the fewest rows with which `roll` succeeds."""
    needed = _needed_from(events)
    most = rows + sum(
        max(0, size)
        for size in (
            -min((e.first for e in events), default=0),
            max((e.last for e in events), default=0) - rows,
        )
    )
    least = max(
        (e.last - min(needed[i], e.first) for i, e in enumerate(events)), default=0
    )  # fmt: skip
    return next(size for size in range(least, most + 1) if roll(rows, events, size) is not None)


def _needed_from(events: Sequence[Event]) -> list[int]:
    """Return, by event, the first row that it or a later one reads."""
    needed: list[int] = []
    least = max((event.last for event in events), default=0)
    for event in reversed(events):
        if event.kind == "read":
            least = min(least, event.first)
        needed.append(least)
    return needed[::-1]
