# pyright: basic
"""A placement problem as the plain arrays of `allocator_kernel`, one set per independent part."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import gcd

import numpy as np

from tilewright.schedule import allocator_kernel as kernel
from tilewright.schedule.allocator_model import Problem

MAX_NEIGHBOURS = 30_000_000
"""Pairs alive at once that the exact search may look at; about 0.5 GB."""


class TooManyNeighboursError(Exception):
    """More pairs of buffers are alive at once than memory is taken for."""

    def __init__(self) -> None:
        super().__init__("too many pairs of buffers are alive at once")


@dataclass
class Arrays:
    """The buffers that have to be placed (not fixed), by index into `free`."""

    free: np.ndarray
    """Their indices in the problem."""
    static: kernel.Static
    lower: np.ndarray
    upper: np.ndarray
    needed: int
    """No memory of fewer bytes will do."""
    conflict: str | None
    """Why the fixed buffers alone rule out every placement."""
    unit: int
    """All offsets are multiples of this."""
    step: int
    """Heights of lowest placements are multiples of this."""


def prepare(problem: Problem) -> Arrays:
    """Lay out a problem.

    Raises:
        TooManyNeighboursError: it is too dense.
    """
    buffers = problem.buffers
    everything = list(range(len(buffers)))
    free = np.array([i for i in everything if buffers[i].offset is None], np.int64)
    sections, spans = _sections(problem)
    local = {int(index): k for k, index in enumerate(free)}
    size = np.array([buffers[i].size for i in free], np.int64)
    align = np.array([buffers[i].alignment for i in free], np.int64)

    fixed = [i for i in everything if buffers[i].offset is not None]
    by_section: list[list[int]] = [[] for _ in range(sections)]
    blocked: dict[int, set[tuple[int, int]]] = {}
    for i in fixed:
        for section in spans[i]:
            by_section[section].append(i)
    span_at, span = _csr([spans[int(i)] for i in free])
    members: list[list[int]] = [[] for _ in range(sections)]
    for k, i in enumerate(free):
        for section in spans[int(i)]:
            members[section].append(k)
    member_at, member = _csr(members)
    for section, pinned in enumerate(by_section):
        for i in pinned:
            for k in members[section]:
                blocked.setdefault(k, set()).add((i, 1))
    fixed_ranges = [
        sorted((buffers[i].offset or 0, (buffers[i].offset or 0) + buffers[i].size) for i in row)
        for row in by_section
    ]
    fixed_at = _starts(fixed_ranges)
    flat = np.array([item for row in fixed_ranges for item in row], np.int64).reshape(-1, 2)

    near_at = np.zeros(len(free) + 1, np.int64)
    empty = np.zeros(0, np.int64)
    count = kernel.find_neighbours(span_at, span, member_at, member, near_at, empty)
    if count > MAX_NEIGHBOURS:
        raise TooManyNeighboursError
    near = np.zeros(max(count, 1), np.int64)
    kernel.find_neighbours(span_at, span, member_at, member, near_at, near)
    near = near[:count]
    grain = np.ones(count, np.int64)
    bank = problem.bank_bytes
    pairs = {(min(pair), max(pair)) for pair in problem.apart}
    free_pairs: list[tuple[int, int]] = []
    for i, j in sorted(pairs):
        if i in local and j in local:
            free_pairs += [(local[i], local[j]), (local[j], local[i])]
        elif i in local:
            blocked.setdefault(local[i], set()).add((j, bank))
        elif j in local:
            blocked.setdefault(local[j], set()).add((i, bank))
    near_at, near, grain = _with_pairs(near_at, near, grain, free_pairs, bank)

    ranges = [_ranges(problem, int(i), blocked.get(k, set())) for k, i in enumerate(free)]
    range_at = _starts(ranges)
    bounds = np.array([item for row in ranges for item in row], np.int64).reshape(-1, 2)
    linked = np.array([int(len(buffers[int(i)].alive()) > 1) for i in free], np.int64)
    for k, _ in free_pairs:
        linked[k] = 1
    unit = gcd(*(int(a) for a in align), *(buffers[i].offset or 0 for i in fixed)) or 1
    room = (size + unit - 1) // unit * unit
    static = kernel.Static(
        size, room, align, range_at, bounds[:, 0].copy(), bounds[:, 1].copy(), near_at, near,
        grain, linked, span_at, span, member_at, member, fixed_at, flat[:, 0].copy(),
        flat[:, 1].copy(),
    )  # fmt: skip
    needed = max([buffers[i].size + (buffers[i].offset or 0) for i in everything], default=0)
    step = gcd(*(int(value) for value in (*size, *align))) if len(size) else 1
    regions = any(buffers[i].regions for i in everything)
    if fixed or regions or pairs:
        step = 1
    for section in range(sections):
        inside = members[section]
        total = sum(int(room[k]) for k in inside)
        # The topmost need not be followed by what its size is rounded up by.
        spare = max((int(room[k] - size[k]) for k in inside), default=0)
        total += sum(high - low for low, high in fixed_ranges[section])
        needed = max(needed, total - spare)
    return Arrays(
        free, static,
        np.array([buffers[i].lower for i in free], np.int64),
        np.array([buffers[i].upper for i in free], np.int64),
        needed, _conflict(problem, fixed, fixed_ranges, ranges, free), unit, max(step, 1),
    )  # fmt: skip


def room_for(arrays: Arrays, capacity: int) -> int:
    """Return what the rounded sizes of one section may add up to."""
    return -(-capacity // arrays.unit) * arrays.unit


def _sections(problem: Problem) -> tuple[int, dict[int, list[int]]]:
    """Return how many maximal sets of buffers alive at once there are, and each buffer's."""
    events: list[tuple[int, int, int]] = []
    spans: dict[int, list[int]] = {i: [] for i in range(len(problem.buffers))}
    for i, buffer in enumerate(problem.buffers):
        for first, last in buffer.alive():
            events += [(first, 1, i), (last, 0, i)]
    count = 0
    since: dict[int, int] = {}
    grown = False
    incidences = 0
    for _, starts, i in sorted(events):
        if starts:
            since[i] = count
            grown = True
            continue
        if grown:
            # Something ends that started since: what is alive now is a set no other contains.
            count += 1
            grown = False
        spans[i] += range(since.pop(i), count)
        incidences += len(spans[i])
        if incidences > MAX_NEIGHBOURS:
            raise TooManyNeighboursError
    return count, spans


def _starts(rows: list) -> np.ndarray:
    at = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=at[1:])
    return at


def _csr(rows: list) -> tuple[np.ndarray, np.ndarray]:
    flat = np.fromiter((item for row in rows for item in row), np.int64)
    return _starts(rows), flat


def _with_pairs(
    near_at: np.ndarray,
    near: np.ndarray,
    grain: np.ndarray,
    pairs: list[tuple[int, int]],
    bank: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if not pairs:
        return near_at, near, grain
    rows = [{int(c): 1 for c in near[near_at[b] : near_at[b + 1]]} for b in range(len(near_at) - 1)]
    for b, c in pairs:
        rows[b][c] = bank
    at, flat = _csr([list(row) for row in rows])
    return at, flat, np.array([value for row in rows for value in row.values()], np.int64)


def _ranges(problem: Problem, i: int, blocked: set[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the offsets a buffer may get as ranges (first, last), first aligned."""
    buffer = problem.buffers[i]
    regions = buffer.regions if buffer.regions is not None else ((0, problem.capacity),)
    found: list[tuple[int, int]] = [
        (first, min(last, problem.capacity) - buffer.size) for first, last in regions
    ]
    for other, grain in blocked:
        pinned = problem.buffers[other]
        assert pinned.offset is not None
        top = -(-(pinned.offset + pinned.size) // grain) * grain
        bottom = pinned.offset // grain * grain - buffer.size
        cut: list[tuple[int, int]] = []
        for first, last in found:
            cut += [(first, min(last, bottom)), (max(first, top), last)]
        found = [item for item in cut if item[0] <= item[1]]
    aligned = [
        (-(-first // buffer.alignment) * buffer.alignment, last) for first, last in sorted(found)
    ]
    return sorted({item for item in aligned if item[0] <= item[1]})


def _conflict(
    problem: Problem,
    fixed: list[int],
    fixed_ranges: list[list[tuple[int, int]]],
    ranges: list[list[tuple[int, int]]],
    free: np.ndarray,
) -> str | None:
    buffers = problem.buffers
    for row in fixed_ranges:
        for (_, high), (low, _) in pairwise(row):
            if low < high:
                return f"two fixed buffers overlap at {low}"
    for i in fixed:
        low = buffers[i].offset or 0
        high = low + buffers[i].size
        if high > problem.capacity:
            return f"`{buffers[i].name}` is fixed at {low} and ends beyond the capacity"
        regions = buffers[i].regions
        if regions is not None and not any(a <= low and high <= b for a, b in regions):
            return f"`{buffers[i].name}` is fixed at {low}, outside its regions"
    pinned = set(fixed)
    bank = problem.bank_bytes
    for i, j in problem.apart:
        if i in pinned and j in pinned:
            a, b = ((buffers[k].offset or 0) for k in (i, j))
            first, second = (
                (x // bank, (x + buffers[k].size - 1) // bank) for x, k in ((a, i), (b, j))
            )
            if first[0] <= second[1] and second[0] <= first[1]:
                return f"`{buffers[i].name}` and `{buffers[j].name}` are fixed in the same bank"
    for k, row in enumerate(ranges):
        if not row:
            return f"`{buffers[int(free[k])].name}` has no legal offset"
    return None
