"""Whose cycles they are: hand-made logs of layers that take turns."""

from __future__ import annotations

import numpy as np

from tilewright.report.shares import cycles_of
from tilewright.sim.retire import CycleResult, RetireLog
from tilewright.spec.program import ENGINE_NAMES

ENGINE = {name: number for number, name in enumerate(ENGINE_NAMES)}

Row = tuple[str, str, int, int]
"""Layer, engine, start, end: it executes from `start + 1` to `end - 1`."""


def run_of(rows: list[Row], cycles: int) -> CycleResult:
    layers, engines, starts, ends = zip(*rows, strict=True)
    numbers = np.array([ENGINE[name] for name in engines], np.int64)
    at = np.arange(len(rows))
    start, end = np.array(starts, np.int64), np.array(ends, np.int64)
    log = RetireLog(tuple("" for _ in rows), layers, at, numbers, start - 1, start, end)
    empty = np.zeros(0)
    return CycleResult(cycles, log, {}, {}, {}, {}, 0, empty, empty)


def shares(rows: list[Row], cycles: int, *groups: str) -> list[int]:
    return cycles_of(run_of(rows, cycles), [group.split() for group in groups])


def test_the_array_comes_first_then_the_vector_unit_then_dma() -> None:
    rows = [("b", "dma0", 9, 100), ("c", "vec", 19, 80), ("a", "mac", 29, 60)]
    # 0..9 waits for the load and 10..19 is of it, 20..29 c, 30..59 a, 60..79 c, 80..99 b.
    assert shares(rows, 100, "a", "b", "c") == [30, 20 + 20, 10 + 20]


def test_layers_that_take_turns() -> None:
    rows = [
        ("load", "dma0", 0, 10),
        ("a", "mac", 10, 20), ("b", "mac", 20, 25), ("a", "mac", 25, 40), ("b", "mac", 40, 50),
    ]  # fmt: skip
    # A cycle in which an instruction is taken from its queue is of the one that begins.
    assert shares(rows, 50, "a", "b", "load") == [10 + 15, 5 + 10, 10]


def test_waits_belong_to_who_starts_next_and_the_end_to_the_last() -> None:
    rows = [("a", "mac", 5, 10), ("b", "mac", 50, 60), ("", "seq", 64, 65)]
    assert shares(rows, 65, "a", "b") == [10, 55]


def test_of_several_channels_the_first_dispatched_counts() -> None:
    rows = [("a", "dma0", 0, 30), ("b", "dma1", 10, 60), ("a", "dma0", 30, 40)]
    # From 31 on `b`'s load, dispatched second, is before `a`'s, the third.
    assert shares(rows, 60, "a", "b") == [30, 30]


def test_layers_of_no_group_own_nothing() -> None:
    rows = [("a", "mac", 0, 10), ("x", "mac", 10, 20), ("b", "vec", 20, 30)]
    assert shares(rows, 30, "a", "b") == [10, 20]
    assert cycles_of(run_of(rows, 30), [["y"]]) == [0]
