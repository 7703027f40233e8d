"""What limits a layer: where the cycles of its span go on every engine (docs/concepts/bound.md).

The parts of an engine's span add up to it exactly. What an instruction does inside comes from the
simulator's counters; what its start waited for, and what runs beside it, from the retire log.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewright.spec.program import ENGINE_NAMES, MAC, SEQ, VEC, Dispatched

if TYPE_CHECKING:
    from tilewright.sim.retire import CycleResult

I64 = npt.NDArray[np.int64]

INSIDE: tuple[str, ...] = ("busy", "wait_bank", "wait_ddr", "wait_accumulator")
"""Parts of the cycles in which an engine executes an instruction of the layer."""
BEFORE: tuple[str, ...] = ("wait_load", "wait_store", "wait_compute", "wait_sequencer")
"""Parts of those in which the next instruction of the layer waits for a semaphore."""
PARTS: tuple[str, ...] = (*INSIDE, *BEFORE, "other", "idle")
"""All parts; `other`: executes another layer's instruction; `idle`: the rest."""
BESIDE: tuple[str, ...] = ("single", "overlapped")
"""The cycles of `INSIDE` once more: whether another unit executes anything meanwhile."""

SLOW = 1.5
"""Layers above so many times their bound are listed with their reason."""
WORKING = 0.5
"""An engine that works in this part of the time limits those who wait for it."""
SATURATED = 0.8
"""DDR used so much of a span, and more than the engine that leads, is the limit."""


@dataclass
class Spans:
    """The cycles of a layer, or a group of fused ones, from its first start to its last end."""

    cycles: int = 0
    engines: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    """By engine that executes anything of the layer: cycles of `PARTS`, and of `BESIDE`."""

    def add(self, other: Spans) -> None:
        """Add the spans of another program."""
        self.cycles += other.cycles
        for engine, parts in other.engines.items():
            sums = self.engines.setdefault(engine, dict.fromkeys(parts, 0))
            for name, value in parts.items():
                sums[name] += value


@dataclass(frozen=True)
class Limit:
    """What limits a layer."""

    what: str
    """`array`, `vector`, `dma`, `dependency` or `bank`; empty when nothing was simulated."""
    why: str
    """The largest parts of the engine that leads, in words."""


NOT_SIMULATED = Limit("", "")


def layer_spans(
    result: CycleResult, stream: Sequence[Dispatched], groups: Sequence[Collection[str]]
) -> list[Spans]:
    """Return the spans of groups of layers in one program's run.

    Args:
        result: the simulation.
        stream: the program as dispatched, of which `result` has the times.
        groups: the layers of each group; groups have none in common.
    """
    spans = [Spans() for _ in groups]
    count = len(result.log.start)
    if not count:
        return spans
    number = {name: at for at, names in enumerate(groups) for name in names}
    run = _Run(result, list(stream)[:count], number, len(groups))
    for at, span in enumerate(spans):
        if run.last[at] <= run.first[at]:
            continue
        span.cycles = int(run.last[at] - run.first[at])
        for engine in range(SEQ):
            parts = run.parts(at, engine)
            if parts:
                span.engines[ENGINE_NAMES[engine]] = parts
    for name, engines in result.layer_engines.items():
        at = number.get(name)
        if at is None:
            continue
        for engine, counters in engines.items():
            parts = spans[at].engines.get(engine)
            if parts is not None:
                for key in INSIDE:
                    parts[key] += counters[key]
    for span in spans:
        for parts in span.engines.values():
            parts["idle"] = span.cycles - sum(parts[key] for key in PARTS if key != "idle")
    return spans


class _Run:
    """Sums over the retire log, by group and engine."""

    def __init__(
        self,
        result: CycleResult,
        stream: Sequence[Dispatched],
        number: Mapping[str, int],
        groups: int,
    ) -> None:
        log = result.log
        self.engine, self.start, self.end = log.engine, log.start, log.end
        self.group = np.array([number.get(name, -1) for name in log.layers], np.int64)
        # Sequencer instructions are no work of a layer.
        self.mine = (self.group >= 0) & (self.engine != SEQ)
        chosen = self.group[self.mine]
        self.first = np.full(groups, np.iinfo(np.int64).max)
        np.minimum.at(self.first, chosen, self.start[self.mine])
        self.last = np.zeros(groups, np.int64)
        np.maximum.at(self.last, chosen, self.end[self.mine])
        self.cell = self.group * SEQ + self.engine
        self.cells = groups * SEQ
        self.work = np.maximum(self.end - self.start - 1, 0)
        """The cycle in which an instruction is taken is none of its work."""
        self.executed = self._sum(self.work)
        self.count = self._sum(np.ones_like(self.work))
        alone = self._alone()
        self.single = self._sum(alone)
        self.waits = self._waits(log.issue, stream)

    def _sum(self, values: I64) -> I64:
        sums = np.zeros(self.cells, np.int64)
        np.add.at(sums, self.cell[self.mine], values[self.mine])
        return sums

    def parts(self, group: int, engine: int) -> dict[str, int]:
        """Return what the log says of an engine in a group's span, or nothing."""
        cell = group * SEQ + engine
        if not self.count[cell]:
            return {}
        own = int(self.executed[cell])
        low, high = int(self.first[group]), int(self.last[group])
        parts = dict.fromkeys((*PARTS, *BESIDE), 0)
        for key, sums in self.waits.items():
            parts[key] = int(sums[cell])
        parts["other"] = self._executing(engine, high) - self._executing(engine, low) - own
        parts["single"] = int(self.single[cell])
        parts["overlapped"] = own - parts["single"]
        return parts

    def _executing(self, engine: int, cycle: int) -> int:
        """Return the cycles before `cycle` in which an engine executes."""
        at = self.engine == engine
        begin, work = self.start[at] + 1, self.work[at]
        return int(np.clip(cycle - begin, 0, work).sum())

    def _alone(self) -> I64:
        """Return each instruction's cycles in which array, vector unit or DMA works by itself."""
        unit = np.where(self.engine == MAC, 1, np.where(self.engine == VEC, 2, 0))
        units = self.engine != SEQ
        places = np.unique(np.concatenate((self.start[units] + 1, self.end[units])))
        active = np.zeros((3, places.size), np.int64)
        for number in range(3):
            at = units & (unit == number) & (self.work > 0)
            np.add.at(active[number], np.searchsorted(places, self.start[at] + 1), 1)
            np.add.at(active[number], np.searchsorted(places, self.end[at]), -1)
        working = active.cumsum(axis=1) > 0
        lonely = working & (working.sum(axis=0) == 1)
        lengths = np.append(np.diff(places), 0)
        before = np.concatenate(
            (np.zeros((3, 1), np.int64), (lonely * lengths).cumsum(axis=1)), axis=1
        )
        found = np.zeros_like(self.work)
        at = units & (self.work > 0)
        low = np.searchsorted(places, self.start[at] + 1)
        high = np.searchsorted(places, self.end[at])
        found[at] = before[unit[at], high] - before[unit[at], low]
        return found

    def _waits(self, issue: I64, stream: Sequence[Dispatched]) -> dict[str, I64]:
        """Return the cycles waited for semaphores by who signalled last, clipped to the span."""
        begin = issue + 1
        for engine in range(SEQ):
            at = np.flatnonzero(self.engine == engine)
            begin[at[1:]] = np.maximum(begin[at[1:]], self.end[at[:-1]])
        begin[self.mine] = np.maximum(begin[self.mine], self.first[self.group[self.mine]])
        waited = np.where(self.mine, np.maximum(self.start - begin, 0), 0)
        kind = np.array(
            [_kind(stream[at]) if at >= 0 else 3 for at in _last_signals(stream, self)], np.int64
        )
        return {
            name: self._sum(np.where(kind == number, waited, 0))
            for number, name in enumerate(BEFORE)
        }


def _kind(item: Dispatched) -> int:
    """Return what a signal of an instruction stands for, as an index of `BEFORE`."""
    if item.name == "dma_store":
        return 1
    return 0 if item.engine < MAC else 2 if item.engine < SEQ else 3


def _last_signals(stream: Sequence[Dispatched], run: _Run) -> list[int]:
    """Return for each instruction which one gave the last of the signals it waited for, or -1.

    The k-th to take a semaphore takes the k-th signal: both in order of time.
    """
    last = [-1] * len(stream)
    start, end = run.start.tolist(), run.end.tolist()
    given: list[list[int]] = [[] for _ in range(32)]
    taken: list[list[int]] = [[] for _ in range(32)]
    for at, item in enumerate(stream):
        for mask, lists in ((item.fields["signal"], given), (item.fields["wait"], taken)):
            while mask:
                lists[(mask & -mask).bit_length() - 1].append(at)
                mask &= mask - 1
    for givers, takers in zip(given, taken, strict=True):
        givers.sort(key=end.__getitem__)
        takers.sort(key=start.__getitem__)
        for giver, taker in zip(givers, takers, strict=False):
            if last[taker] < 0 or end[giver] > end[last[taker]]:
                last[taker] = giver
    return last


def limit_of(spans: Spans, ddr_cycles: float, array: float = 0.0, vector: float = 0.0) -> Limit:
    """Return what limits a layer: the largest part of the span of the engine that leads.

    The array leads where it has work, else the vector unit, else the busiest DMA channel.

    Args:
        spans: the layer's.
        ddr_cycles: cycles DDR needs at its peak for the bytes the layer moves.
        array: the layer's bound by the array.
        vector: its bound by the vector unit.
    """
    engines = spans.engines
    if not engines:
        return NOT_SIMULATED
    channels = [name for name in engines if name.startswith("dma")]
    lead = next(
        (name for name in ("mac", "vec") if name in engines),
        max(channels, key=lambda name: engines[name]["busy"], default="vec"),
    )
    own = engines[lead]
    # While it works for other layers this one does not limit anything.
    room = spans.cycles - own["other"]
    largest = max((key for key in PARTS if key != "other"), key=lambda key: own[key])
    beside = {"mac": engines.get("vec"), "vec": engines.get("mac")}.get(lead)
    what = {
        "busy": {"mac": "array", "vec": "vector"}.get(lead, "dma"),
        "wait_bank": "bank",
        "wait_ddr": "dma",
        "wait_load": "dma",
        "wait_store": "dma",
    }.get(largest, "dependency")
    if largest in ("wait_accumulator", "wait_compute"):
        works = beside is not None and beside["busy"] >= WORKING * room
        what = {"mac": "vector", "vec": "array"}.get(lead, what) if works else what
    elif largest == "idle":
        alone = {
            "vector": engines["vec"]["single"] if "vec" in engines else 0,
            "dma": max((engines[name]["single"] for name in channels), default=0),
        }
        longest = max(alone, key=lambda key: alone[key])
        what = longest if alone[longest] >= WORKING * own["idle"] else what
    if own["busy"] < ddr_cycles >= SATURATED * spans.cycles:
        what = "dma"
    parts = sorted((key for key in PARTS if key != "other"), key=lambda key: -own[key])
    least = {"mac": array, "vec": vector}.get(lead, 0.0)
    words = [
        f"{_WORDS[key]} {own[key] / room:.0%}"
        + (f" (bound {least / room:.0%})" if key == "busy" and least else "")
        for key in parts[:3]
        if own[key] >= 0.01 * room > 0
    ]
    name = {"mac": "array", "vec": "vector unit"}.get(lead, "DMA")
    why = f"{name} {', '.join(words)}" if words else name
    return Limit(what, f"{why}; DDR {ddr_cycles / spans.cycles:.0%} of its peak")


_WORDS = {
    "busy": "busy",
    "wait_bank": "waits for a bank",
    "wait_ddr": "waits for DDR",
    "wait_accumulator": "waits for accumulators",
    "wait_load": "waits for a load",
    "wait_store": "waits for a store",
    "wait_compute": "waits for another engine",
    "wait_sequencer": "waits for the sequencer",
    "idle": "idle",
}


def share(engines: Mapping[str, Mapping[str, Any]], engine: str, part: str, cycles: int) -> float:
    """Return a part of an engine's span, 0..1; of `dma` the largest of its channels."""
    names = [name for name in engines if name.startswith("dma")] if engine == "dma" else [engine]
    found = max((engines[name][part] for name in names if name in engines), default=0)
    return found / cycles if cycles else 0.0
