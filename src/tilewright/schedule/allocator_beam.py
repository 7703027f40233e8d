# pyright: basic
"""A beam search over the decisions of `allocator_kernel`: incomplete, but it does not dwell.

All states of a level have as many buffers placed. The best of a level are taken one by one: the
buffer chosen is put on its lowest offset, which gives a state of the next level, or is not, which
gives another state of this one. A level ends when `width` different states of the next are found.
A state is as good as the room left in its sections, the tightest counting most.

Depth-first search spends its budget below its first wrong decisions. Here all levels get the same
share, so that a wrong one is outlived wherever another state of the level avoids it.

What is called here is compiled into these functions, and numba looks only at this file to tell
whether what it kept is still good: after a change to `allocator_kernel`, touch this file.
"""

from __future__ import annotations

import numpy as np

from tilewright.schedule import allocator_kernel as kernel
from tilewright.schedule.allocator_kernel import (
    C_HEAD,
    C_LEFT,
    C_PARTS,
    C_ROOM,
    C_STATUS,
    C_STEPS,
    C_TAIL,
    C_TRAIL,
    EXHAUSTED,
    RUNNING,
    SOLVED,
)  # fmt: skip

TRIES = 8
"""States of a level that are gone on from, by state of the next that is wanted."""
SHARPNESS = 256
"""Room that does not count as tight any more, as a part of the memory: a 256th."""
GONE = np.inf


@kernel.compiled
def _value(s, grain):
    """Return how tight a state is; lower is better."""
    value = 0.0
    room = s.control[C_ROOM]
    for section in range(len(s.total)):
        if s.total[section]:
            value += 1.0 / (room - s.floor[section] - s.total[section] + grain)
    return value


@kernel.compiled
def _copy(s, row, out):
    """Copy what tells states apart into `row` (`out`) or from it."""
    at = 0
    for array in (s.placed, s.act, s.low, s.total, s.floor, s.across):
        if out:
            row[at : at + len(array)] = array
        else:
            array[:] = row[at : at + len(array)]
        at += len(array)


@kernel.compiled
def _put(s, rows, values, grain):
    """Keep the state, if need be instead of the worst that is not better."""
    value = _value(s, grain)
    worst = 0
    for i in range(len(values)):
        if values[i] > values[worst]:
            worst = i
    if value < values[worst]:
        values[worst] = value
        _copy(s, rows[worst], True)


@kernel.compiled
def keep(search, rows, values):
    """Make the state of `search` the only one."""
    values[:] = GONE
    values[0] = 0.0
    _copy(kernel.state_of(search), rows[0], True)


@kernel.compiled
def advance(problem, search, here, here_values, there, there_values, seen, level, steps):
    """Make the states of the next level from those of this one; return the status.

    Args:
        problem: `addresses` of a `Static`.
        search: `addresses` of a `State`, of which only the last state made is kept.
        here: states with `level` buffers placed, a row each.
        here_values: theirs; `GONE` where the row is free. All are used up.
        there: for the next level's, without any yet.
        there_values: theirs.
        seen: room for hashes of states, at least twice the width.
        level: how many buffers are placed.
        steps: when to stop.
    """
    p, s = kernel.static_of(problem), kernel.state_of(search)
    control = s.control
    grain = max(1.0, control[C_ROOM] / SHARPNESS)
    width = len(here_values) // 2
    there_values[:] = GONE
    seen[:] = 0
    found = tries = 0
    while found < width and tries < TRIES * width:
        best = 0
        for i in range(len(here_values)):
            if here_values[i] < here_values[best]:
                best = i
        if here_values[best] == GONE:
            break
        if control[C_STEPS] >= steps:
            return RUNNING
        control[C_STEPS] += 1
        tries += 1
        here_values[best] = GONE
        _copy(s, here[best], False)
        control[C_TRAIL] = control[C_HEAD] = control[C_TAIL] = 0
        control[C_PARTS] = 1
        control[C_LEFT] = s.part_count[0] = len(s.placed) - level
        b = kernel.choose(p, s, 0)
        good = kernel.place(p, s, b)
        kernel.clear_queue(s)
        if good and control[C_LEFT] == 0:
            control[C_STATUS] = SOLVED
            return SOLVED
        if good:
            key, _ = kernel.keys(s, 0)
            at = key % len(seen)
            while seen[at] != 0 and seen[at] != key:
                at = (at + 1) % len(seen)
            if seen[at] == 0:
                seen[at] = key
                found += 1
                _put(s, there, there_values, grain)
        kernel.undo(p, s, 0)
        good = kernel.skip(p, s, b)
        kernel.clear_queue(s)
        if good:
            _put(s, here, here_values, grain)
    return RUNNING if found else EXHAUSTED
