"""What limits a layer: hand-made logs, cycle by cycle, and the invariants on a real program."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.unit.package_samples import copy_content
from tilewright.report.html import to_html
from tilewright.report.limits import (
    BEFORE,
    BESIDE,
    INSIDE,
    NOT_SIMULATED,
    PARTS,
    Spans,
    layer_spans,
    limit_of,
)
from tilewright.report.report import make_report
from tilewright.report.text import slow_layers, span_table
from tilewright.runtime.runtime import Package
from tilewright.runtime.simulation import simulate
from tilewright.sim.retire import CycleResult, RetireLog
from tilewright.spec.counters import Scope, names
from tilewright.spec.program import ENGINE_NAMES, Dispatched

ENGINE = {name: number for number, name in enumerate(ENGINE_NAMES)}

Row = tuple[str, str, str, int, int, int, int, int]
"""Instruction, layer, engine, issue, start, end, semaphores waited for, semaphores signalled."""


def run_of(
    rows: list[Row], counters: dict[str, dict[str, dict[str, int]]]
) -> tuple[CycleResult, list[Dispatched]]:
    """Return a simulation with this log; counters not given are all `busy`."""
    stream = [
        Dispatched(index, name, ENGINE[engine], {"wait": wait, "signal": signal}, layer)
        for index, (name, layer, engine, _, _, _, wait, signal) in enumerate(rows)
    ]
    columns = [np.array([row[at] for row in rows], np.int64) for at in (3, 4, 5)]
    engines: dict[str, dict[str, dict[str, int]]] = {}
    for row, item in zip(rows, stream, strict=True):
        own = engines.setdefault(item.layer, {}).setdefault(
            row[2], dict.fromkeys(names(Scope.ENGINE), 0)
        )
        own["busy"] += row[5] - row[4] - 1
    for layer, given in counters.items():
        for engine, values in given.items():
            for key, value in values.items():
                engines[layer][engine][key] += value
                engines[layer][engine]["busy"] -= value
    log = RetireLog(
        tuple(item.name for item in stream),
        tuple(item.layer for item in stream),
        np.arange(len(rows)),
        np.array([item.engine for item in stream], np.int64),
        *columns,
    )
    cycles = int(columns[2].max())
    empty = np.zeros(0)
    return CycleResult(cycles, log, {}, {}, engines, {}, 0, empty, empty), stream


LOAD, CONV, DRAIN, STORE = "dma_load", "mac_conv", "vec_drain", "dma_store"


def test_every_cycle_of_a_span_has_one_part() -> None:
    # The array: 0..10 idle while the load runs, 11..40 executes; the load's signal came last.
    result, stream = run_of(
        [
            (LOAD, "a", "dma0", 0, 1, 11, 0, 0b1),
            (CONV, "a", "mac", 1, 11, 41, 0b1, 0b10),
            (DRAIN, "a", "vec", 2, 3, 50, 0, 0b100),
            (STORE, "a", "dma1", 3, 50, 61, 0b100, 0),
        ],
        {"a": {"mac": {"wait_bank": 4}, "vec": {"wait_accumulator": 30}, "dma0": {"wait_ddr": 2}}},
    )
    (span,) = layer_spans(result, stream, [["a"]])
    assert span.cycles == 60  # from cycle 1 to 60
    assert span.engines == {
        # Issued in cycle 1: at the queue's head from 2 on, taken in 11.
        "mac": _parts(busy=25, wait_bank=4, wait_load=9, idle=22, single=0, overlapped=29),
        "vec": _parts(busy=16, wait_accumulator=30, idle=14, single=10, overlapped=36),
        "dma0": _parts(busy=7, wait_ddr=2, idle=51, single=2, overlapped=7),
        # The store waits for the vector unit from 4 to 49, and then runs by itself.
        "dma1": _parts(busy=10, wait_compute=46, idle=4, single=10, overlapped=0),
    }


def _parts(**given: int) -> dict[str, int]:
    return {**dict.fromkeys((*PARTS, *BESIDE), 0), **given}


def test_waits_are_told_by_who_signalled_last() -> None:
    rows: list[Row] = [
        (LOAD, "a", "dma0", 0, 1, 20, 0, 0b001),
        (STORE, "a", "dma1", 0, 1, 30, 0, 0b010),
        (CONV, "a", "mac", 0, 30, 41, 0b011, 0b100),
        (DRAIN, "a", "vec", 0, 41, 51, 0b100, 0),
    ]
    result, stream = run_of(rows, {})
    (span,) = layer_spans(result, stream, [["a"]])
    assert span.engines["mac"]["wait_store"] == 29
    assert span.engines["mac"]["wait_load"] == 0
    assert span.engines["vec"]["wait_compute"] == 40
    # The other way round: the load ends last.
    rows[0], rows[1] = (*rows[0][:5], 30, 0, 0b001), (*rows[1][:5], 20, 0, 0b010)
    (span,) = layer_spans(*run_of(rows, {}), [["a"]])
    assert (span.engines["mac"]["wait_store"], span.engines["mac"]["wait_load"]) == (0, 29)


def test_a_semaphore_is_taken_in_order_of_time() -> None:
    # Two signals of one semaphore; the store's, dispatched first, comes second.
    result, stream = run_of(
        [
            (STORE, "a", "dma1", 0, 1, 40, 0, 0b1),
            (LOAD, "a", "dma0", 0, 1, 20, 0, 0b1),
            (CONV, "a", "mac", 0, 20, 25, 0b1, 0),
            (CONV, "a", "mac", 0, 40, 45, 0b1, 0),
        ],
        {},
    )
    (span,) = layer_spans(result, stream, [["a"]])
    assert (span.engines["mac"]["wait_load"], span.engines["mac"]["wait_store"]) == (19, 15)


def test_other_layers_work_in_the_span() -> None:
    result, stream = run_of(
        [
            (CONV, "a", "mac", 0, 1, 31, 0, 0),
            (LOAD, "b", "dma0", 0, 5, 21, 0, 0b1),
            (CONV, "b", "mac", 1, 31, 41, 0b1, 0),
            ("fence", "b", "seq", 41, 60, 61, 0, 0),
        ],
        {},
    )
    a, b = layer_spans(result, stream, [["a"], ["b"]])
    assert a.cycles == 30
    assert a.engines == {"mac": _parts(busy=29, idle=1, single=14, overlapped=15)}
    # The sequencer's instruction is no work; of the 36 cycles from 5 on, the array spends 26 on a.
    assert b.cycles == 36
    assert b.engines["mac"] == _parts(busy=9, other=26, idle=1, single=9, overlapped=0)


def test_waits_before_the_span_are_left_out() -> None:
    # The array stands ready from cycle 1; the layer begins when its load does.
    result, stream = run_of(
        [
            (LOAD, "a", "dma0", 10, 11, 31, 0, 0b1),
            (CONV, "a", "mac", 0, 31, 41, 0b1, 0),
        ],
        {},
    )
    (span,) = layer_spans(result, stream, [["a"]])
    assert span.engines["mac"]["wait_load"] == 20
    assert layer_spans(result, stream, [["x"]])[0] == Spans()


@pytest.mark.parametrize(
    ("mac", "vec", "ddr", "what"),
    [
        ({"busy": 60, "wait_load": 40}, {"busy": 10}, 50, "array"),
        ({"busy": 60, "wait_load": 40}, {"busy": 10}, 85, "dma"),
        ({"busy": 90, "wait_load": 10}, {"busy": 10}, 85, "array"),
        ({"busy": 40, "wait_load": 60}, {"busy": 10}, 50, "dma"),
        ({"busy": 40, "wait_store": 60}, {"busy": 10}, 50, "dma"),
        ({"busy": 40, "wait_bank": 60}, {"busy": 10}, 50, "bank"),
        ({"busy": 30, "wait_accumulator": 70}, {"busy": 60}, 50, "vector"),
        ({"busy": 30, "wait_accumulator": 70}, {"busy": 20}, 50, "dependency"),
        ({"busy": 30, "wait_compute": 70}, {"busy": 20}, 50, "dependency"),
        ({"busy": 30, "idle": 70}, {"busy": 20, "single": 20}, 50, "dependency"),
        ({"busy": 30, "idle": 70}, {"busy": 50, "single": 40}, 50, "vector"),
        ({}, {"busy": 60, "wait_load": 40}, 50, "vector"),
        ({}, {"busy": 10, "wait_load": 90}, 50, "dma"),
        ({}, {}, 50, "dma"),
    ],
)
def test_the_limit(mac: dict[str, int], vec: dict[str, int], ddr: int, what: str) -> None:
    engines = {"mac": mac, "vec": vec, "dma0": {"busy": 100}}
    spans = Spans(100, {name: _parts(**parts) for name, parts in engines.items() if parts})
    limit = limit_of(spans, ddr)
    assert limit.what == what
    assert limit.why.endswith(f"; DDR {ddr}% of its peak")
    assert limit_of(Spans(), 0) == NOT_SIMULATED


def test_time_for_other_layers_is_no_limit_and_the_bound_is_named() -> None:
    spans = Spans(200, {"mac": _parts(other=100, busy=80, wait_load=20)})
    limit = limit_of(spans, 20, array=40)
    assert limit.what == "array"
    assert limit.why == "array busy 80% (bound 40%), waits for a load 20%; DDR 10% of its peak"


def test_parts_add_up_on_the_simulator() -> None:
    package = Package(copy_content())
    simulation = simulate(package)
    report = make_report(package, simulation)
    (result,) = simulation.programs.values()
    found = [row for row in report.layers if row.spans.cycles]
    assert found
    for row in [*found, report]:
        for engine, parts in row.spans.engines.items():
            assert sum(parts[key] for key in PARTS) == row.spans.cycles
            assert all(value >= 0 for value in parts.values()), engine
            inside = sum(parts[key] for key in INSIDE)
            assert inside == parts["single"] + parts["overlapped"]
    for name, counters in result.engines.items():
        if name == "seq":
            continue
        parts = report.spans.engines[name]
        assert all(parts[key] == counters[key] for key in INSIDE)
        assert sum(parts[key] for key in BEFORE) <= counters["wait_semaphore"]
    content = json.loads(json.dumps(report.to_json(), allow_nan=False))
    (layer,) = (item for item in content["layers"] if item["name"] == found[0].name)
    assert layer["spans"]["engines"] == found[0].spans.engines
    assert layer["limited"] == {"what": found[0].limited.what, "why": found[0].limited.why}
    assert content["limited"]["what"] == report.limited.what != ""
    assert found[0].name in span_table(report)
    assert "What limits each layer" in to_html(report)
    lines = slow_layers(report)
    assert all(any(row.name in line for line in lines) for row in report.slow)
