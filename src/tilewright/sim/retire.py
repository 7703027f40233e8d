"""What the cycle simulator hands back: the retire log and the counters made from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tilewright.spec.counters import Scope, names
from tilewright.spec.program import ENGINE_NAMES, SEQ, Dispatched

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Counters = dict[str, int]


@dataclass(frozen=True)
class RetireLog:
    """Cycles of every instruction, in the order dispatched."""

    names: tuple[str, ...]
    layers: tuple[str, ...]
    index: I64
    """Position in the program."""
    engine: I64
    """As in `ENGINE_NAMES`."""
    issue: I64
    """Appended to the engine's queue."""
    start: I64
    """Taken from the queue; its work begins in the next cycle."""
    end: I64
    """First cycle after completion."""


@dataclass(frozen=True)
class CycleResult:
    """Cycles and counters of a run; all of them simulated."""

    cycles: int
    log: RetireLog
    engines: dict[str, Counters]
    """Counters of `Scope.ENGINE` by engine; those of `Scope.SEQUENCER` under `seq`."""
    layers: dict[str, Counters]
    """Counters of `Scope.LAYER` by layer, in order of first instruction."""
    layer_engines: dict[str, dict[str, Counters]]
    """Counters of `Scope.ENGINE` but `idle`, by layer and engine."""
    totals: Counters
    """Counters of `Scope.LAYER` summed over the program."""
    fetch_bytes: int
    """DDR bytes of code."""
    ddr_time: F64
    """Cycles at which windows of the DDR rate begin; the last is the end of the run."""
    ddr_rate: F64
    """DDR bytes a cycle in each window (code included); 0 at the end."""


@dataclass(frozen=True, slots=True)
class Work:
    """What an instruction asks for."""

    loaded: int = 0
    """Useful bytes from DDR."""
    stored: int = 0
    """Useful bytes to DDR."""
    macs: int = 0
    padded_macs: int = 0
    """Multiply-accumulates with every cell of the array counted."""


@dataclass(frozen=True)
class Measured:
    """What a run measured, in core cycles; arrays have one entry an instruction."""

    issue: I64
    start: I64
    end: I64
    wait_accumulator: I64
    wait_ddr: I64
    wait_bank: I64
    ddr_bytes: I64
    """Moved by DDR, units whole."""
    sequencer: dict[str, int]
    fetch_bytes: int
    ddr_time: F64
    ddr_rate: F64


def _waited(engine: I64, issue: I64, start: I64, end: I64) -> I64:
    """Return how long each instruction stood at the head of its queue before a free engine."""
    waited = np.zeros(len(engine), np.int64)
    for number in range(SEQ):
        mine = np.flatnonzero(engine == number)
        free = np.concatenate((np.zeros(1, np.int64), end[mine][:-1]))[: mine.size]
        waited[mine] = start[mine] - np.maximum(issue[mine] + 1, free)
    return waited


def collect(
    stream: list[Dispatched], work: list[Work], measured: Measured, cycles: int
) -> CycleResult:
    """Make log and counters of a finished run."""
    engine = np.array([item.engine for item in stream], np.int64)
    layer_ids: dict[str, int] = {}
    layer = np.array(
        [layer_ids.setdefault(item.layer, len(layer_ids)) for item in stream], np.int64
    )
    log = RetireLog(
        tuple(item.name for item in stream),
        tuple(item.layer for item in stream),
        np.array([item.index for item in stream], np.int64),
        engine,
        measured.issue,
        measured.start,
        measured.end,
    )
    waits = {
        "wait_semaphore": _waited(engine, measured.issue, measured.start, measured.end),
        "wait_accumulator": measured.wait_accumulator,
        "wait_ddr": measured.wait_ddr,
        "wait_bank": measured.wait_bank,
    }
    inside = measured.wait_accumulator + measured.wait_ddr + measured.wait_bank
    # The cycle in which an instruction is taken from the queue is none of its work.
    columns = {"busy": measured.end - measured.start - 1 - inside, **waits}
    cell = layer * len(ENGINE_NAMES) + engine
    cells = len(layer_ids) * len(ENGINE_NAMES)
    sums = {
        name: np.bincount(cell, values, cells).reshape(-1, len(ENGINE_NAMES))
        for name, values in columns.items()
    }
    counts = np.bincount(cell, minlength=cells).reshape(-1, len(ENGINE_NAMES))
    engines: dict[str, Counters] = {}
    for number in range(SEQ):
        if not counts[:, number].any():
            continue
        values = {name: int(table[:, number].sum()) for name, table in sums.items()}
        values["idle"] = cycles - sum(values.values())
        engines[ENGINE_NAMES[number]] = {key: values[key] for key in names(Scope.ENGINE)}
    engines["seq"] = {name: measured.sequencer[name] for name in names(Scope.SEQUENCER)}
    layer_engines = {
        name: {
            ENGINE_NAMES[number]: {key: int(table[row, number]) for key, table in sums.items()}
            for number in range(SEQ)
            if counts[row, number]
        }
        for name, row in layer_ids.items()
    }
    layers = _layer_counters(stream, work, measured.ddr_bytes.tolist(), layer_ids, layer, log)
    layer_engines = {name: layer_engines[name] for name in layers}
    totals = {
        name: sum(counters[name] for counters in layers.values())
        for name in names(Scope.LAYER)
        if name not in ("start", "end")
    }
    totals |= {"start": 0, "end": cycles}
    return CycleResult(
        cycles, log, engines, layers, layer_engines, totals,
        measured.fetch_bytes, measured.ddr_time, measured.ddr_rate,
    )  # fmt: skip


def _layer_counters(
    stream: list[Dispatched],
    work: list[Work],
    ddr_bytes: list[int],
    layer_ids: dict[str, int],
    layer: I64,
    log: RetireLog,
) -> dict[str, Counters]:
    tables = [dict.fromkeys(names(Scope.LAYER), 0) for _ in layer_ids]
    for asked, moved, row in zip(work, ddr_bytes, layer.tolist(), strict=True):
        counters = tables[row]
        counters["instructions"] += 1
        counters["ddr_bytes"] += moved
        counters["bytes_loaded"] += asked.loaded
        counters["bytes_stored"] += asked.stored
        counters["useful_macs"] += asked.macs
        counters["padded_macs"] += asked.padded_macs
    first = np.full(len(layer_ids), np.iinfo(np.int64).max)
    np.minimum.at(first, layer, log.start)
    last = np.zeros(len(layer_ids), np.int64)
    np.maximum.at(last, layer, log.end)
    for row, counters in enumerate(tables):
        counters["start"], counters["end"] = int(first[row]), int(last[row])
    # Sequencer instructions outside layers (`halt`) make no layer of their own.
    unnamed = [item for item in stream if not item.layer and item.engine != SEQ]
    return {name: tables[row] for name, row in layer_ids.items() if name or unnamed}
