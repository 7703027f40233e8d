"""What the cycle simulator hands back: the retire log and the counters made from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tilewright.spec.counters import Scope, names
from tilewright.spec.program import ENGINE_NAMES, SEQ, Dispatched
from tilewright.spec.timing import DmaTiming, MacTiming

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
    """First cycle of execution."""
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
    """Cycles at which the DDR rate changes."""
    ddr_rate: F64
    """DDR bytes a cycle from then on."""


@dataclass
class Measured:
    """Raw times of a run, one entry an instruction, in core cycles."""

    issue: list[float]
    start: list[float]
    end: list[float]
    wait_semaphore: list[float]
    wait_accumulator: list[float]
    wait_ddr: list[float]
    wait_bank: list[float]
    sequencer: dict[str, float]
    fetch_bytes: int
    ddr_profile: list[tuple[float, float]]


Timing = DmaTiming | MacTiming | object


def _whole(values: list[float]) -> I64:
    # Rounding is monotone, so that slices of one engine stay disjoint.
    return np.ceil(np.asarray(values) - 1e-6).astype(np.int64)


def _rounded(value: float) -> int:
    return round(float(value))


def collect(
    stream: list[Dispatched], timings: list[Timing], measured: Measured, total: float
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
        _whole(measured.issue),
        _whole(measured.start),
        _whole(measured.end),
    )
    waits = {
        "wait_semaphore": np.asarray(measured.wait_semaphore),
        "wait_accumulator": np.asarray(measured.wait_accumulator),
        "wait_ddr": np.asarray(measured.wait_ddr),
        "wait_bank": np.asarray(measured.wait_bank),
    }
    inside = waits["wait_accumulator"] + waits["wait_ddr"] + waits["wait_bank"]
    spent = np.asarray(measured.end) - np.asarray(measured.start) - inside
    columns = {"busy": spent, **waits}
    cell = layer * len(ENGINE_NAMES) + engine
    cells = len(layer_ids) * len(ENGINE_NAMES)
    sums = {
        name: np.bincount(cell, values, cells).reshape(-1, len(ENGINE_NAMES))
        for name, values in columns.items()
    }
    counts = np.bincount(cell, minlength=cells).reshape(-1, len(ENGINE_NAMES))
    cycles = int(np.ceil(total - 1e-6))
    engines: dict[str, Counters] = {}
    for number in range(SEQ):
        if not counts[:, number].any():
            continue
        values = {name: _rounded(table[:, number].sum()) for name, table in sums.items()}
        values["idle"] = cycles - sum(values.values())
        engines[ENGINE_NAMES[number]] = {key: values[key] for key in names(Scope.ENGINE)}
    engines["seq"] = {name: _rounded(measured.sequencer[name]) for name in names(Scope.SEQUENCER)}
    layer_engines = {
        name: {
            ENGINE_NAMES[number]: {key: _rounded(table[row, number]) for key, table in sums.items()}
            for number in range(SEQ)
            if counts[row, number]
        }
        for name, row in layer_ids.items()
    }
    layers = _layer_counters(stream, timings, layer_ids, layer, log)
    layer_engines = {name: layer_engines[name] for name in layers}
    totals = {
        name: sum(counters[name] for counters in layers.values())
        for name in names(Scope.LAYER)
        if name not in ("start", "end")
    }
    totals |= {"start": 0, "end": cycles}
    profile = np.asarray(measured.ddr_profile, np.float64).reshape(-1, 2)
    return CycleResult(
        cycles, log, engines, layers, layer_engines, totals,
        measured.fetch_bytes, profile[:, 0], profile[:, 1],
    )  # fmt: skip


def _layer_counters(
    stream: list[Dispatched],
    timings: list[Timing],
    layer_ids: dict[str, int],
    layer: I64,
    log: RetireLog,
) -> dict[str, Counters]:
    tables = [dict.fromkeys(names(Scope.LAYER), 0) for _ in layer_ids]
    for item, timing, row in zip(stream, timings, layer.tolist(), strict=True):
        counters = tables[row]
        counters["instructions"] += 1
        if isinstance(timing, DmaTiming):
            counters["ddr_bytes"] += timing.ddr_bytes
            if item.name == "dma_load":
                counters["bytes_loaded"] += timing.bytes
            elif item.name == "dma_store":
                counters["bytes_stored"] += timing.bytes
        elif isinstance(timing, MacTiming):
            counters["useful_macs"] += timing.macs
            counters["padded_macs"] += timing.padded_macs
    first = np.full(len(layer_ids), np.iinfo(np.int64).max)
    np.minimum.at(first, layer, log.start)
    last = np.zeros(len(layer_ids), np.int64)
    np.maximum.at(last, layer, log.end)
    for row, counters in enumerate(tables):
        counters["start"], counters["end"] = int(first[row]), int(last[row])
    # Sequencer instructions outside layers (`halt`) make no layer of their own.
    unnamed = [item for item in stream if not item.layer and item.engine != SEQ]
    return {name: tables[row] for name, row in layer_ids.items() if name or unnamed}
