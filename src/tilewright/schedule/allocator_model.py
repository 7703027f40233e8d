"""The placement problem: buffers with lifetimes, a memory, and what a placement must keep.

`check` here is the definition; it shares no code with the solver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.diagnostics import TilewrightError

MAX_CAPACITY = 1 << 40
"""Largest memory in bytes; sums of sizes then stay far below 2^63."""
MAX_BUFFERS = 1 << 20
MAX_TIME = 1 << 60


@dataclass(frozen=True)
class Buffer:
    """Bytes that are needed from time `lower` up to, but not including, `upper`."""

    name: str
    lower: int
    upper: int
    size: int
    alignment: int = 1
    """The offset is a multiple of this."""
    offset: int | None = None
    """Where it must lie, if that is decided already."""
    gaps: tuple[tuple[int, int], ...] = ()
    """Times [first, last) within the life in which other buffers may use its bytes."""
    regions: tuple[tuple[int, int], ...] | None = None
    """Parts [first, last) of the memory; the buffer lies inside one of them. None: anywhere."""

    def alive(self) -> list[tuple[int, int]]:
        """Return the times in which the buffer holds its bytes."""
        found: list[tuple[int, int]] = []
        at = self.lower
        for first, last in sorted(self.gaps):
            if first > at:
                found.append((at, first))
            at = max(at, last)
        if at < self.upper:
            found.append((at, self.upper))
        return found


@dataclass(frozen=True)
class Problem:
    """Buffers to place in a memory of `capacity` bytes."""

    buffers: tuple[Buffer, ...]
    capacity: int
    apart: tuple[tuple[int, int], ...] = ()
    """Pairs of buffers, by index, that must not touch the same bank."""
    bank_bytes: int = 1

    def __post_init__(self) -> None:
        """Refuse what is no problem.

        Raises:
            TilewrightError: E0401.
        """
        if not 0 < self.capacity <= MAX_CAPACITY:
            raise _wrong(f"the capacity must be 1..{MAX_CAPACITY} bytes, not {self.capacity}")
        if len(self.buffers) > MAX_BUFFERS:
            raise _wrong(f"at most {MAX_BUFFERS} buffers can be placed, not {len(self.buffers)}")
        if self.bank_bytes < 1:
            raise _wrong(f"a bank must have at least 1 byte, not {self.bank_bytes}")
        for buffer in self.buffers:
            problem = fault(buffer)
            if problem:
                raise _wrong(f"buffer `{buffer.name}`: {problem}")
        for pair in self.apart:
            if len(set(pair)) != 2 or not all(0 <= i < len(self.buffers) for i in pair):
                raise _wrong(f"{pair} must be two different buffers' indices")


def fault(buffer: Buffer) -> str | None:
    """Return what is wrong with a buffer in itself, or None."""
    if not -MAX_TIME <= buffer.lower < buffer.upper <= MAX_TIME:
        if buffer.upper <= buffer.lower:
            return f"upper {buffer.upper} must be above lower {buffer.lower}"
        return f"times must be {-MAX_TIME}..{MAX_TIME}"
    if not 1 <= buffer.size <= MAX_CAPACITY:
        return f"size must be 1..{MAX_CAPACITY}, not {buffer.size}"
    if not 1 <= buffer.alignment <= MAX_CAPACITY:
        return f"alignment must be 1..{MAX_CAPACITY}, not {buffer.alignment}"
    if buffer.offset is not None:
        if not 0 <= buffer.offset <= MAX_CAPACITY:
            return f"offset must be 0..{MAX_CAPACITY}, not {buffer.offset}"
        if buffer.offset % buffer.alignment:
            return f"offset {buffer.offset} must be a multiple of alignment {buffer.alignment}"
    for first, last in buffer.gaps:
        if not buffer.lower <= first < last <= buffer.upper:
            return f"gap {first}..{last} must lie in {buffer.lower}..{buffer.upper}"
    for first, last in buffer.regions or ():
        if not 0 <= first < last <= MAX_CAPACITY:
            return f"region {first}..{last} must lie in 0..{MAX_CAPACITY}"
    if not buffer.alive():
        return "its gaps leave nothing of its life"
    return None


def _wrong(message: str) -> TilewrightError:
    return TilewrightError("E0401", "these buffers cannot be placed", [message])


def check(problem: Problem, offsets: Sequence[int]) -> list[str]:
    """Return every rule that a placement breaks (at most 20), in words."""
    found: list[str] = []
    buffers = problem.buffers
    events: list[tuple[int, int, int]] = []
    for i, buffer in enumerate(buffers):
        at = offsets[i]
        end = at + buffer.size
        if at < 0 or end > problem.capacity:
            found.append(f"`{buffer.name}` at {at} leaves the memory")
        if at % buffer.alignment:
            found.append(f"`{buffer.name}` at {at} is not aligned to {buffer.alignment}")
        if buffer.offset not in (None, at):
            found.append(f"`{buffer.name}` is at {at}, not at {buffer.offset}")
        if buffer.regions is not None:
            inside = [first <= at and end <= last for first, last in buffer.regions]
            if not any(inside):
                found.append(f"`{buffer.name}` at {at} is in none of its regions")
        for first, last in buffer.alive():
            # At one time, ends (0) come before starts (1).
            events += [(first, 1, i), (last, 0, i)]
    alive: set[int] = set()
    for _, starts, i in sorted(events):
        if not starts:
            alive.discard(i)
            continue
        for j in alive:
            if offsets[i] < offsets[j] + buffers[j].size and (
                offsets[j] < offsets[i] + buffers[i].size
            ):
                found.append(f"`{buffers[i].name}` and `{buffers[j].name}` overlap")
        alive.add(i)
        if len(found) >= 20:
            return found[:20]
    for i, j in problem.apart:
        first, second = (
            (
                offsets[k] // problem.bank_bytes,
                (offsets[k] + buffers[k].size - 1) // problem.bank_bytes,
            )
            for k in (i, j)
        )
        if first[0] <= second[1] and second[0] <= first[1]:
            found.append(f"`{buffers[i].name}` and `{buffers[j].name}` share a bank")
    return found[:20]
