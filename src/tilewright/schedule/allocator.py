"""Placing buffers in a memory: proven answers by search, quick ones by heuristics.

First greedy placement in several orders, moving to the front what does not fit. Where that does not
do, each set of buffers that touches no other (by lifetimes or banks) is searched by itself, exactly
(`allocator_kernel`), by several orders of preference in turn, each round with a larger budget.
What a round has proven to fail is remembered by the next. In every round there are beams too
(`allocator_beam`): they prove nothing, but find placements that the search has no luck with.

The ideas of sections, of placing in order of offsets, of dominated idle space and of several orders
in turn are those of M. D. Moffitt, "MiniMalloc: A Lightweight Memory Allocator for
Hardware-Accelerated Machine Learning", ASPLOS 2023.

Budgets count steps (decisions of the search, or buffers placed greedily), so that answers do not
depend on the machine. `seconds` is a safety net on top.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tilewright.schedule.allocator_model import Buffer, Problem, check

if TYPE_CHECKING:
    from tilewright.schedule.allocator_arrays import Arrays

__all__ = ["Answer", "Buffer", "Problem", "check", "minimise", "solve"]

STEPS = 4_000_000
"""Default budget."""
CHUNK = 20_000
"""Steps between looks at the clock."""
FIRST_ROUND = 2_000
QUICK = 20
"""Part of the budget for a capacity in the first pass of `minimise`."""
GROWTH = 4


@dataclass(frozen=True)
class Answer:
    """What is known about a problem."""

    status: str
    """`placed`, `infeasible` (proven) or `unknown` (the budget ended)."""
    offsets: tuple[int, ...] | None
    """By buffer, when placed."""
    peak: int
    """Bytes the placement uses; 0 without one."""
    bound: int
    """No placement in fewer bytes exists."""
    steps: int
    method: str
    """`greedy`, `search`, `bound`, or `none`."""
    reason: str = ""
    """Why there is no placement."""

    @property
    def optimal(self) -> bool:
        """Whether fewer bytes are proven impossible."""
        return self.status == "placed" and self.peak <= self.bound


class Budget:
    """Steps left, and whether the clock still allows them."""

    def __init__(self, steps: int, seconds: float | None) -> None:
        self.limit, self.used = steps, 0
        self.end = None if seconds is None else time.monotonic() + seconds

    @property
    def over(self) -> bool:
        return self.late or self.used >= self.limit

    @property
    def late(self) -> bool:
        return self.end is not None and time.monotonic() > self.end


def solve(problem: Problem, *, steps: int = STEPS, seconds: float | None = None) -> Answer:
    """Place all buffers within the capacity, or prove that it cannot be done.

    Args:
        problem: what to place.
        steps: the budget; the answer depends on the problem and this alone.
        seconds: give up earlier when this much time is over.
    """
    return _solve(problem, Budget(steps, seconds))


def minimise(problem: Problem, *, steps: int = STEPS, seconds: float | None = None) -> Answer:
    """Place all buffers in as few bytes as the budget allows, `problem.capacity` at most.

    `Answer.optimal` tells whether fewer are proven impossible. The budget is per capacity tried.
    """
    budget = Budget(steps, seconds)
    best = _solve(problem, budget)
    if best.status != "placed":
        return best
    arrays, _ = _lay_out(problem)
    # Peaks of lowest placements are multiples of this.
    unit = arrays.step if arrays else 1
    proven = -(-best.bound // unit) * unit
    # A quick pass first: what it finds narrows the range for the thorough one.
    for portion in (max(1, steps // QUICK), steps):
        bound = at = proven
        while bound < best.peak and not budget.late:
            # The bound itself is the likeliest to be met exactly; then halve what is left.
            share = Budget(portion, None)
            share.end = budget.end
            found = _solve(replace(problem, capacity=at), share)
            budget.used += share.used
            if found.status == "placed":
                best = found
            else:
                bound = at + unit
                if found.status == "infeasible":
                    proven = max(proven, at + unit)
            at = max(bound, (bound + best.peak) // 2 // unit * unit)
    return replace(best, bound=max(best.bound, min(proven, best.peak)), steps=budget.used)


def _lay_out(problem: Problem) -> tuple[Arrays | None, str]:
    from tilewright.schedule.allocator_arrays import TooManyNeighboursError, prepare

    try:
        return prepare(problem), ""
    except TooManyNeighboursError as error:
        return None, str(error)


def _solve(problem: Problem, budget: Budget) -> Answer:
    arrays, reason = _lay_out(problem)
    if arrays is None:
        return Answer("unknown", None, 0, 0, 0, "none", reason)
    bound = arrays.needed
    if arrays.conflict:
        return Answer("infeasible", None, 0, bound, 0, "bound", arrays.conflict)
    if bound > problem.capacity:
        reason = f"buffers alive at once need {bound} bytes, {problem.capacity} are there"
        return Answer("infeasible", None, 0, bound, 0, "bound", reason)
    found, missing = _greedy(arrays, budget)
    method = "greedy"
    if missing:
        method = "search"
        status = _search(problem, arrays, found, missing, budget)
        if status != "placed":
            reason = {
                "infeasible": "the search has ruled out every placement",
                "unknown": "the budget ended before a placement or a proof was found",
            }[status]
            return Answer(status, None, 0, bound, budget.used, method, reason)
    offsets = [0] * len(problem.buffers)
    for i, buffer in enumerate(problem.buffers):
        if buffer.offset is not None:
            offsets[i] = buffer.offset
    for k, i in enumerate(arrays.free):
        offsets[int(i)] = int(found[k])
    broken = check(problem, offsets)
    assert not broken, broken
    peak = max((o + b.size for o, b in zip(offsets, problem.buffers, strict=True)), default=0)
    return Answer("placed", tuple(offsets), peak, bound, budget.used, method)


GREEDY_ORDERS = ("WA", "AW", "SW", "WS", "TA", "TW", "TS")
"""What to prefer, most important first: W long lives, A area, S size, T the fullest section."""
CONFIGURATIONS = tuple((mode, order) for order in ("WA", "AW", "TW", "TA", "SW") for mode in (0, 1))
"""Where to decide next (the lowest offset, or the section with the least slack), and order."""


def ranks(arrays: Arrays, orders: Iterable[str]) -> dict[str, Any]:
    """Return, for every order, the buffers in that order."""
    import numpy as np

    p = arrays.static
    count = len(p.size)
    member_size = np.zeros(len(p.member) + 1, np.int64)
    member_size[1:] = np.cumsum(p.size[p.member])
    filled = np.diff(member_size[p.member_at])
    width = arrays.upper - arrays.lower
    # Areas as floats: they may pass 2^63, and only their order counts.
    values = {"W": width, "S": p.size, "A": width.astype(float) * p.size.astype(float)}
    fullest = [
        max((int(filled[x]) for x in p.span[p.span_at[b] : p.span_at[b + 1]]), default=0)
        for b in range(count)
    ]
    values["T"] = np.array(fullest, np.int64)
    return {
        order: np.lexsort([-values[key] for key in reversed(order)]) for order in orders
    }  # fmt: skip


SHUFFLES = 10
"""Orders by lifetime with noise in every round, each used in both places."""
GREEDY_ROUNDS = 12
BEAMS = ((1, "WA"), (1, "TW"), (0, "WA"), (0, "TW"))
"""As `CONFIGURATIONS`, for the beams of every round."""
SHUFFLED_BEAMS = 1
"""Orders with noise for beams in every round, each used in both places."""
BEAM_WIDTH = 50
"""States of a level, in the first round."""


def _greedy(arrays: Arrays, budget: Budget) -> tuple[Any, list[list[int]]]:
    """Return offsets, and the independent sets of buffers for which they do not do."""
    import numpy as np

    from tilewright.schedule import allocator_kernel as kernel

    p = arrays.static
    count = len(p.size)
    label = kernel.components(p.near_at, p.near)
    sets = int(label.max()) + 1 if count else 0
    done = np.zeros(sets, bool)
    offsets = np.zeros(count, np.int64)
    trial = np.zeros(count, np.int64)
    lows, highs = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    for order in ranks(arrays, GREEDY_ORDERS).values():
        for best_fit in (False, True):
            if done.all():
                break
            rounds = kernel.repair(p, order.copy(), best_fit, GREEDY_ROUNDS, trial, lows, highs)
            budget.used += count * int(rounds)
            bad = np.zeros(sets, bool)
            bad[label[trial < 0]] = True
            fresh = ~bad & ~done
            chosen = fresh[label]
            offsets[chosen] = trial[chosen]
            done |= fresh
    missing = [np.flatnonzero(label == one).tolist() for one in np.flatnonzero(~done)]
    return offsets, missing


def _search(
    problem: Problem, arrays: Arrays, offsets: Any, missing: list[list[int]], budget: Budget
) -> str:
    """Search set after set, in rounds; fill in `offsets`."""
    from tilewright.schedule.allocator_search import Search

    free = arrays.free
    left = [
        Search(problem, [int(free[k]) for k in ones], ones)
        for ones in sorted(missing, key=lambda ones: (len(ones), ones))
    ]
    room, width = FIRST_ROUND, BEAM_WIDTH
    seed = 0
    while left:
        seeds = range(seed + 1, seed + 1 + SHUFFLES)
        seed += SHUFFLES
        turns = [((mode, order, 0), False) for mode, order in CONFIGURATIONS]
        turns += [((mode, order, 0), True) for mode, order in BEAMS]
        turns += [((mode, "WA", one), True) for one in seeds[:SHUFFLED_BEAMS] for mode in (1, 0)]
        turns += [((mode, "WA", one), False) for one in seeds for mode in (0, 1)]
        for configuration, wide in turns:
            for search in list(left):
                if wide:
                    status = search.run_beam(configuration, width, budget)
                else:
                    status = search.run(configuration, room, budget, CHUNK)
                if status == "infeasible":
                    return status
                if status == "placed":
                    offsets[search.places] = search.offsets
                    left.remove(search)
                elif budget.over:
                    return "unknown"
            if not left:
                break
        room, width = room * GROWTH, width * GROWTH
    return "placed"
