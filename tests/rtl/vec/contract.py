"""The vector unit's part of docs/concepts/microarchitecture.md, written down plainly.

Says in which cycle each port asks for which word, when halves become free and when instructions
end, given which grants are refused. Shares nothing with the simulators' timing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tilewright.spec.timing import LAYER_NORM_WAIT, SOFTMAX_WAIT

POP, READ_A, READ_B, WRITE, FREED, DONE, STALL = range(7)
"""Kinds of events; an event is (cycle, kind, value, granted)."""
Event = tuple[int, int, int, int]
Bytes = tuple[int, int]
"""Address and number of bytes."""
Fields = dict[str, int]


@dataclass
class Vector:
    """What one vector reads and writes, in order."""

    a: list[Bytes] = field(default_factory=list[Bytes])
    b: list[Bytes] = field(default_factory=list[Bytes])
    tables: list[Bytes] = field(default_factory=list[Bytes])
    """Read on port B before A begins."""
    result: Bytes | None = None
    half: int = -1
    """The half a drain reads; -1: none."""
    frees: bool = False
    after: int = -1
    """Begins this many cycles behind the one after the retirement of all before it; -1: at once."""


@dataclass
class Timed:
    """An instruction as the bench gets it."""

    vectors: list[Vector]
    hold: int
    """Cycles its head stays away after the pop before."""
    signals: int


def _chunks(count: int, lanes: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, lanes):
        yield start, min(lanes, count - start)


def _drain(f: Fields) -> Iterator[Vector]:
    half = f["m_half"]
    size = 4 if f["raw"] else 1
    for ob in range(f["oc_blocks"]):
        cols = f["cols_last"] if ob == f["oc_blocks"] - 1 else f["cols"]
        for first in range(0, f["out_h"], f["block_rows"]):
            rows = range(first, min(first + f["block_rows"], f["out_h"]))
            for oy in rows:
                for ox in range(f["out_w"]):
                    address = f["dst"] + ob * f["ob_stride"]
                    address += oy * f["oy_stride"] + ox * f["ox_stride"]
                    frees = oy == rows[-1] and ox == f["out_w"] - 1
                    yield Vector(result=(address, cols * size), half=half, frees=frees)
            half ^= 1


def _eltwise(f: Fields, lanes: int) -> Iterator[Vector]:
    for i2 in range(f["n2"]):
        for i1 in range(f["n1"]):
            a, b, dst = (
                f[name] + i2 * f[f"{name}_s2"] + i1 * f[f"{name}_s1"] for name in ("a", "b", "dst")
            )
            for at, count in _chunks(f["n0"], lanes):
                second = (b, 1) if f["b_scalar"] else (b + at, count)
                yield Vector([(a + at, count)], [second], result=(dst + at, count))


def _copy(f: Fields, lanes: int) -> Iterator[Vector]:
    dense = f["n0"] == 1 or (f["src_s0"] == 1 and f["dst_s0"] == 1)
    for i3 in range(f["n3"]):
        for i2 in range(f["n2"]):
            for i1 in range(f["n1"]):
                src, dst = (
                    f[x] + i3 * f[f"{x}_s3"] + i2 * f[f"{x}_s2"] + i1 * f[f"{x}_s1"]
                    for x in ("src", "dst")
                )
                if dense:
                    for at, count in _chunks(f["n0"], lanes):
                        yield Vector([(src + at, count)], result=(dst + at, count))
                else:
                    for i0 in range(f["n0"]):
                        read = (src + i0 * f["src_s0"], 1)
                        yield Vector([read], result=(dst + i0 * f["dst_s0"], 1))


def _pool(f: Fields, lanes: int) -> Iterator[Vector]:
    for oy in range(f["out_h"]):
        for ox in range(f["out_w"]):
            src = f["src"] + oy * f["src_sy"] + ox * f["src_sx"]
            dst = f["dst"] + oy * f["dst_sy"] + ox * f["dst_sx"]
            for at, count in _chunks(f["n0"], lanes):
                window = [
                    (src + ky * f["ky_stride"] + kx * f["kx_stride"] + at, count)
                    for ky in range(f["k_h"])
                    for kx in range(f["k_w"])
                ]
                yield Vector(window, result=(dst + at, count))


def _resize(f: Fields, lanes: int, sram: npt.NDArray[np.uint8]) -> Iterator[Vector]:
    def indices(address: int) -> tuple[int, int]:
        low, high = sram[address : address + 4].view("<u2")
        return int(low), int(high)

    for oy in range(f["out_h"]):
        row_entry = f["table_y"] + 8 * oy
        for ox in range(f["out_w"]):
            column_entry = f["table_x"] + 8 * ox
            tables = [(column_entry, 8)] if ox else [(row_entry, 8), (column_entry, 8)]
            for at, count in _chunks(f["n0"], lanes):
                near = [
                    (f["src"] + row * f["src_sy"] + column * f["src_sx"] + at, count)
                    for row in indices(row_entry)
                    for column in indices(column_entry)
                ]
                dst = f["dst"] + oy * f["dst_sy"] + ox * f["dst_sx"] + at
                yield Vector(near, tables=[] if at else tables, result=(dst, count))


def _rows(name: str, f: Fields, lanes: int) -> Iterator[Vector]:
    passes, wait = (3, SOFTMAX_WAIT) if name == "vec_softmax" else (2, LAYER_NORM_WAIT)
    for i2 in range(f["n2"]):
        for i1 in range(f["n1"]):
            src, dst = (
                f[name] + i2 * f[f"{name}_s2"] + i1 * f[f"{name}_s1"] for name in ("src", "dst")
            )
            for number in range(passes):
                last = number == passes - 1
                for at, count in _chunks(f["n0"], lanes):
                    vector = Vector([(src + at, count)])
                    if last:
                        vector.result = (dst + at, count)
                    if last and name == "vec_layer_norm":
                        vector.b = [(f["params"] + 6 * at, 6 * lanes)]
                    if number and not at:
                        vector.after = wait if last else 0
                    yield vector


def vectors(name: str, f: Fields, lanes: int, sram: npt.NDArray[np.uint8]) -> Iterator[Vector]:
    """Yield an instruction's vectors; `sram` as it is before the instruction."""
    if name == "vec_param":
        size = (4 if f["bias_only"] else 9) * lanes
        for block in range(f["count"]):
            yield Vector([(f["src"] + block * size, size)])
    elif name == "vec_table":
        yield Vector([(f["src"], 256)])
    elif name == "vec_drain":
        yield from _drain(f)
    elif name == "vec_eltwise":
        yield from _eltwise(f, lanes)
    elif name == "vec_copy":
        yield from _copy(f, lanes)
    elif name == "vec_pool":
        yield from _pool(f, lanes)
    elif name in ("vec_softmax", "vec_layer_norm"):
        yield from _rows(name, f, lanes)
    else:
        yield from _resize(f, lanes, sram)


@dataclass
class Halves:
    """When the M halves are full: each block some cycles after its half is free."""

    gaps: tuple[list[int], list[int]]
    free_from: list[int] = field(default_factory=lambda: [0, 0])

    def full(self, half: int, cycle: int) -> bool:
        """Return whether the half is full in a cycle's state."""
        gaps = self.gaps[half]
        return bool(gaps) and cycle >= self.free_from[half] + gaps[0]

    def free(self, half: int, cycle: int) -> None:
        """Empty a half in a cycle."""
        self.gaps[half].pop(0)
        self.free_from[half] = cycle + 1


def _words(reads: list[Bytes], word: int) -> list[int]:
    return [
        number
        for address, count in reads
        for number in range(address // word, (address + count - 1) // word + 1)
    ]


def trace(
    program: Sequence[Timed], word: int, latency: int, refused: bytes, halves: Halves
) -> list[Event]:
    """Return everything that happens, cycle by cycle, until the program's last instruction ends."""
    events: list[Event] = []
    cycle = 0
    last_pop = -1
    for number, instruction in enumerate(program):
        cycle = max(cycle, last_pop + 1 + instruction.hold)
        events.append((cycle, POP, number, 1))
        last_pop = cycle
        cycle = _run(instruction, cycle + 1, word, latency, refused, halves, events) + 1
    return events


def _run(
    instruction: Timed, cycle: int, word: int, latency: int, refused: bytes, halves: Halves,
    events: list[Event],
) -> int:  # fmt: skip
    """Add an instruction's events from its first cycle of work on; return its last cycle."""
    vectors = instruction.vectors
    read = written = 0
    ready: list[int] = []
    """Cycle from which each vector read may be written."""
    asks_a: list[int] = []
    asks_b: list[int] = []
    tables = 0
    """Words of table entries left in `asks_b`."""
    a_from = 0
    fresh = True
    """The next vector to read has not begun."""
    free_from = 0
    """Cycle after the latest retirement."""
    results: list[int] = []
    """Words the oldest vector has yet to write."""
    write_begun = False

    while True:
        no = refused[cycle % len(refused)]
        wrote = stalled = freed = False
        done_reading = False
        retired = False

        # Reader.
        begins = read < len(vectors)
        if begins and fresh:
            after = vectors[read].after
            begins = read - written < latency + 3 and (
                after < 0 or (written == read and cycle >= free_from + after)
            )
        if begins:
            vector = vectors[read]
            if fresh:
                asks_a = _words(vector.a, word)
                table_words = _words(vector.tables, word)
                asks_b = table_words + _words(vector.b, word)
                tables = len(table_words)
                a_from = cycle
                fresh = False
            if vector.half >= 0:
                done_reading = halves.full(vector.half, cycle)
                stalled = not done_reading
                freed = done_reading and vector.frees
            else:
                if asks_a and not tables and cycle >= a_from:
                    granted = not no & 1
                    events.append((cycle, READ_A, asks_a[0], int(granted)))
                    if granted:
                        asks_a.pop(0)
                if asks_b:
                    granted = not no & 2
                    events.append((cycle, READ_B, asks_b[0], int(granted)))
                    if granted:
                        asks_b.pop(0)
                        if tables:
                            tables -= 1
                            a_from = cycle + 2
                done_reading = not asks_a and not asks_b

        # Writer.
        if written < len(ready) and ready[written] <= cycle:
            result = vectors[written].result
            if result is None:
                retired = True
            else:
                if not write_begun:
                    results = _words([result], word)
                    write_begun = True
                wrote = not no & 4
                events.append((cycle, WRITE, results[0], int(wrote)))
                if wrote:
                    results.pop(0)
                    retired = not results

        if freed:
            events.append((cycle, FREED, vectors[read].half, 1))
            halves.free(vectors[read].half, cycle)
        if stalled and not wrote:
            events.append((cycle, STALL, 0, 1))
        if done_reading:
            ready.append(cycle + 1 + latency)
            read += 1
            fresh = True
        if retired:
            written += 1
            free_from = cycle + 1
            write_begun = False
            if written == len(vectors):
                events.append((cycle, DONE, instruction.signals, 1))
                return cycle
        cycle += 1
