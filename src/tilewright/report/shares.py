"""Whose cycles they are: every cycle of a run belongs to one layer (docs/concepts/bound.md)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tilewright.spec.program import MAC, SEQ, VEC

if TYPE_CHECKING:
    from tilewright.sim.retire import CycleResult

I64 = npt.NDArray[np.int64]


def cycles_of(result: CycleResult, groups: Sequence[Collection[str]]) -> list[int]:
    """Return the cycles of groups of layers in one program's run; they add up to the run's.

    A cycle belongs to the layer whose instruction the array executes in it; where it executes none,
    the vector unit; where neither does, the DMA channel with the instruction that was dispatched
    first. A cycle in which nothing executes belongs to the layer that starts next, and those at the
    end to the one that ended last.

    Args:
        result: the simulation.
        groups: the layers of each group; groups have none in common. Other layers own no cycles.
    """
    log = result.log
    number = {name: at for at, names in enumerate(groups) for name in names}
    group = np.array([number.get(name, -1) for name in log.layers], np.int64)
    mine = np.flatnonzero((group >= 0) & (log.engine != SEQ))
    if not mine.size:
        return [0] * len(groups)
    engine, begin, end = log.engine[mine], log.start[mine] + 1, log.end[mine]
    places = np.unique(np.concatenate((begin, end, np.array([0, result.cycles]))))
    places, lengths = places[:-1], np.diff(places)
    owner = np.full(places.size, -1, np.int64)
    for units in ((MAC,), (VEC,), tuple(range(MAC))):
        # Positions in program order: the least of several channels was dispatched first.
        found = np.min([_executing(engine == unit, begin, end, places) for unit in units], axis=0)
        owner = np.where((owner < 0) & (found < mine.size), found, owner)
    order = np.lexsort((np.arange(mine.size), begin))
    following = np.searchsorted(begin[order], places, side="right")
    last = int(end.argmax())
    following = np.append(order, last)[following]
    owner = np.where(owner < 0, following, owner)
    spent = np.bincount(group[mine][owner], lengths, len(groups))
    return [round(cycles) for cycles in spent.tolist()]


def _executing(chosen: npt.NDArray[np.bool_], begin: I64, end: I64, places: I64) -> I64:
    """Return the instruction an engine executes at each place; their number where it does none."""
    at = np.flatnonzero(chosen & (end > begin))
    none = np.full(places.size, len(begin), np.int64)
    if not at.size:
        return none
    # An engine executes in order, one at a time.
    latest = np.searchsorted(begin[at], places, side="right") - 1
    found = at[np.maximum(latest, 0)]
    return np.where((latest >= 0) & (places < end[found]), found, none)
