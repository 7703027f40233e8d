"""The cycle simulator: hand-worked schedules, closed forms, arbitration, loops, deadlock, trace."""

from __future__ import annotations

import json
import re
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.sim_programs import DMA0, MAC, VEC, bit, conv_case, dma_alone, full, pipeline
from tilewright.diagnostics import TilewrightError
from tilewright.sim import cycle_kernel
from tilewright.sim.cycle import CycleSimulator
from tilewright.sim.cycle_tables import resize_tables
from tilewright.sim.trace import trace_events, trace_json
from tilewright.spec.counters import COUNTERS, Scope, names
from tilewright.spec.hardware import Hardware, load_target
from tilewright.spec.program import Instr, encode_program

TINY, EDGE, V2 = load_target("tiny8"), load_target("edge16"), load_target("tpu_v2")
BANK = TINY.bank_size
FETCH = 1 + 16 + 8 + 1
"""Dispatch of a program's first instruction on `tiny8`: decision, latency, 64 bytes at 8 a cycle,
and the cycle in which the last of them arrive."""
EACH = 8
"""Cycles between instructions as they come from DDR."""
BLOCK = 1 + 16 + 128
"""Cycles from one block of 16 instructions to the next."""
LOAD = {"n0": 2048}
LATENCY = 16
CONV = {"wgt": BANK, "c_rows": 8, "c_last": 8, "cols": 8, "cols_last": 8, "wgt_pitch": 8}
DRAIN = {"dst": 2 * BANK, "cols": 8, "cols_last": 8}


def spans(result: Any) -> list[tuple[int, int]]:
    return list(zip(result.log.start.tolist(), result.log.end.tolist(), strict=True))


def run(*program: Instr, hardware: Hardware = TINY) -> Any:
    return CycleSimulator(hardware).run([*program, Instr("halt")])


def touched(address: int, size: int, unit: int) -> int:
    return (address + size - 1) // unit - address // unit + 1


# Single instructions alone: closed forms.


def test_a_burst_load_alone() -> None:
    result = run(Instr("dma_load", LOAD, "x"))
    words = 2048 // 8
    # Granted, arrived, in the FIFO: moved two cycles after the grant. The last word waits one cycle
    # for the end of the moves and is written in the cycle after it was passed on.
    end = FETCH + 1 + 1 + LATENCY + words + 4
    assert result.log.issue[0] == FETCH
    assert spans(result) == [(FETCH + 1, end), (end, end + 1)]
    assert result.cycles == end + 1
    assert result.totals["ddr_bytes"] == result.totals["bytes_loaded"] == 2048
    assert result.fetch_bytes == 128


CHIPS = (
    TINY,
    EDGE,
    V2,
    TINY.model_copy(update={"ddr_bus_bytes": 32, "dma_clock_mhz": 130, "ddr_clock_mhz": 70}),
    TINY.model_copy(update={"ddr_bus_bytes": 1, "dma_burst_size": 8, "ddr_clock_mhz": 900}),
    TINY.model_copy(update={"ddr_bus_bytes": 256, "sram_word_bytes": 4, "dma_clock_mhz": 500}),
    TINY.model_copy(update={"dma_bus_bytes": 3, "ddr_clock_mhz": 199, "dma_latency": 1}),
)


@settings(max_examples=150, deadline=None)
@given(
    hardware=st.sampled_from(CHIPS),
    name=st.sampled_from(("dma_load", "dma_store", "dma_fill")),
    n=st.tuples(st.integers(1, 70), st.integers(1, 4), st.integers(1, 3), st.integers(1, 2)),
    gaps=st.tuples(*[st.integers(0, 40)] * 6),
    at=st.tuples(st.integers(0, 300), st.integers(0, 80)),
    pads=st.tuples(*[st.integers(0, 2)] * 4),
)
def test_dma_alone_equals_a_plain_walk(
    hardware: Hardware,
    name: str,
    n: tuple[int, int, int, int],
    gaps: tuple[int, ...],
    at: tuple[int, int],
    pads: tuple[int, int, int, int],
) -> None:
    n0, n1, n2, n3 = n
    all1, all2 = n1 + pads[0] + pads[1], n2 + pads[2] + pads[3]
    f = {"sram": at[1], "n0": n0, "n1": n1, "n2": n2, "sram_s1": n0 + gaps[3]}
    f["sram_s2"] = f["sram_s1"] * all1 + gaps[4]
    if name != "dma_fill":
        f |= {"stream": 1, "ddr": at[0], "n3": n3, "ddr_s1": n0 + gaps[0]}
        f["ddr_s2"] = f["ddr_s1"] * n1 + gaps[1]
        f["ddr_s3"] = f["ddr_s2"] * n2 + gaps[2]
        f["sram_s3"] = f["sram_s2"] * all2 + gaps[5]
    if name == "dma_load":
        f |= dict(zip(("pad1_lo", "pad1_hi", "pad2_lo", "pad2_hi"), pads, strict=True))
    # The code is fetched before the latency is over, or the channel waits for the fetch.
    result = run(Instr("fence"), Instr(name, {**f, "channel": 1}, "x"), hardware=hardware)
    start, end = spans(result)[1]
    fetched = result.log.issue[2]
    plain = dma_alone(hardware, name, f, start)
    if name == "dma_fill" or fetched <= start:
        assert end == plain
    else:
        assert end >= plain


def test_mac_conv_alone_takes_the_longer_of_reads_and_loads() -> None:
    shape = {"out_h": 3, "out_w": 5, "block_rows": 2, "k_h": 2, "c_blocks": 2, "c_rows": 7,
             "c_last": 3, "cols": 8, "cols_last": 5, "oc_blocks": 2}  # fmt: skip
    f = full("mac_conv", act=3, wgt=BANK + 6, push=0, oy_stride=90, ox_stride=13, ky_stride=9,
             cb_stride=7, wgt_pitch=9, wgt_ob_stride=700, **shape)  # fmt: skip
    f["out_h"] = 2  # without push: at most two blocks
    steps: list[tuple[int, int]] = []
    for ob in range(2):
        weights = f["wgt"] + ob * 700
        for ky, cb in product(range(2), range(2)):
            rows = (7, 3)[cb]
            load = sum(touched(weights + row * 9, (8, 5)[ob], 8) for row in range(rows))
            weights += rows * 9
            pixels = product(range(2), range(5))
            base = 3 + ky * 9 + cb * 7
            read = sum(touched(base + y * 90 + x * 13, rows, 8) for y, x in pixels)
            steps.append((read, load))
    cycles = steps[0][1] + steps[-1][0]
    cycles += sum(max(read, load) for (read, _), (_, load) in pairwise(steps))
    result = run(Instr("mac_conv", f, "m"))
    start, end = spans(result)[0]
    assert start == FETCH + 1
    assert end == start + 1 + cycles + TINY.mac_latency
    assert result.engines["mac"]["busy"] == end - start - 1
    assert result.engines["mac"]["wait_bank"] == result.engines["mac"]["wait_accumulator"] == 0


def vectors(reads: list[int], writes: list[int], hardware: Hardware = TINY) -> int:
    """Return the cycles from start to end of vectors with these cycles of reading and writing."""
    window, latency = hardware.vector_latency + 3, hardware.vector_latency
    read = retired = 0
    done: list[int] = []
    for j, (reading, writing) in enumerate(zip(reads, writes, strict=True)):
        if j >= window:
            read = max(read, done[j - window])
        read += reading
        retired = max(retired, read + latency) + max(1, writing)
        done.append(retired)
    return retired + 1


@pytest.mark.parametrize(
    ("name", "fields", "reads", "writes"),
    [
        ("vec_param", {"count": 2}, [9, 9], [0, 0]),
        ("vec_param", {"count": 3, "bias_only": 1, "src": 4}, [5, 5, 5], [0, 0, 0]),
        ("vec_table", {"src": 5}, [33], [0]),
        # 3 chunks a run; a in bank 0, b in 1, the result in 2.
        ("vec_eltwise", {"b": BANK, "dst": 2 * BANK, "n0": 20, "n1": 2, "a_s1": 24, "b_s1": 24,
                         "dst_s1": 24}, [1] * 6, [1] * 6),
        # Misaligned by one byte: two words, but for the last, short chunk.
        ("vec_eltwise", {"b": BANK + 1, "dst": 2 * BANK, "n0": 20}, [2, 2, 1], [1] * 3),
        ("vec_eltwise", {"a": 7, "b": BANK + 7, "b_scalar": 1, "dst": 2 * BANK + 5, "n0": 12},
         [2, 2], [2, 2]),
        ("vec_copy", {"dst": BANK, "n0": 5, "src_s0": 3, "dst_s0": 9, "n1": 2, "src_s1": 50,
                      "dst_s1": 100}, [1] * 10, [1] * 10),
        ("vec_copy", {"src": 6, "dst": BANK + 3, "n0": 20, "src_s0": 1, "dst_s0": 1}, [2, 2, 2],
         [2, 2, 1]),
        ("vec_pool", {"dst": BANK, "n0": 9, "out_w": 3, "k_h": 2, "k_w": 3, "ky_stride": 160,
                      "kx_stride": 16, "src_sx": 16, "dst_sx": 16}, [6] * 6, [1] * 6),
        ("vec_pool", {"dst": BANK + 4, "n0": 64, "out_w": 9, "src_sx": 64, "dst_sx": 64},
         [1] * 72, [2] * 72),
    ],
)  # fmt: skip
def test_vector_instructions_alone(
    name: str, fields: dict[str, int], reads: list[int], writes: list[int]
) -> None:
    result = run(Instr(name, fields, "v"))
    start, end = spans(result)[0]
    assert end - start == vectors(reads, writes)
    assert result.engines["vec"]["busy"] == end - start - 1


def test_a_resize_reads_its_tables_first() -> None:
    f = {"dst": BANK, "table_y": 2 * BANK, "table_x": 3 * BANK, "n0": 12, "out_h": 2, "out_w": 3,
         "in_h": 4, "in_w": 4, "src_sy": 64, "src_sx": 16, "dst_sy": 48, "dst_sx": 16}  # fmt: skip
    result = run(Instr("vec_resize", f, "r"))
    start, end = spans(result)[0]
    # First chunk of a pixel: entries (two in a row's first pixel), a cycle for the last to arrive,
    # four neighbours. Second chunk: four neighbours.
    first, other = 2 + 1 + 4, 1 + 1 + 4
    reads = [first, 4, other, 4, other, 4] * 2
    assert end - start == vectors(reads, [1] * 12)
    # Neighbours that straddle words, as these tables name them.
    rows = np.array([[0, 1], [1, 2]])
    columns = np.array([[0, 0], [1, 2], [2, 3]])
    simulator = CycleSimulator(TINY)
    odd = [Instr("vec_resize", {**f, "src_sx": 9, "n0": 8}), Instr("halt")]
    start, end = spans(simulator.run(odd, tables=[(rows, columns)]))[0]
    costs = [2 * sum(touched(9 * int(c), 8, 8) for c in pair) for pair in columns]
    reads = [head + cost for head, cost in zip((3, 2, 2), costs, strict=True)] * 2
    assert end - start == vectors(reads, [1] * 6)


# Engines that meet.


def test_blocks_of_mac_and_vector_unit_overlap() -> None:
    shape = {"out_h": 4, "out_w": 16, "block_rows": 1}
    result = run(
        Instr("mac_conv", {**CONV, **shape, "k_h": 2, "ox_stride": 8}, "a"),
        Instr("vec_drain", {**DRAIN, **shape, "ox_stride": 8, "oy_stride": 128}, "a"),
    )
    # Both steps of a block hide the load of 8 rows behind 16 pixels.
    first = FETCH + 1
    work = first + 1 + 8
    assert spans(result)[0] == (first, work + 4 * 32 + 12)
    # The last block is full when the mac_conv ends: 16 pixels, each a cycle, then the pipeline.
    full_at = work + 4 * 32 + 12
    assert spans(result)[1] == (FETCH + EACH + 1, full_at + 16 + 3 + 1)
    # From the drain's first cycle on: the first block, then what a drain is faster than a block,
    # less the cycles in which the writer still worked on the last ones (4 of 16 a block).
    waited = (work + 32 + 12) - (FETCH + EACH + 2) + 3 * (32 - 16 - 4)
    assert result.engines["vec"]["wait_accumulator"] == waited
    assert result.engines["mac"]["wait_accumulator"] == 0


def test_a_slow_drain_holds_the_array_back() -> None:
    shape = {"out_h": 4, "out_w": 8, "block_rows": 1}
    result = run(
        Instr("mac_conv", {**CONV, **shape, "ox_stride": 8}, "a"),
        Instr("vec_drain", {**DRAIN, **shape, "raw": 1, "ox_stride": 32, "oy_stride": 256}, "a"),
    )
    # A pixel takes 4 words; 6 may be read ahead of the writer.
    work = FETCH + 2 + 8
    full0, full1 = work + 8 + 12, work + 16 + 12
    writes = full0 + 4  # in this cycle the first word
    # Pixel 7 of block 0 is read when pixel 1 has been written.
    freed0 = writes + 2 * 4
    # Block 2 runs once half 0 is free; pixel 7 of block 1 is read when pixel 9 has been written.
    block2 = freed0 + 1
    freed1 = max(full1, writes + 10 * 4)
    block3 = max(block2 + 8, freed1 + 1)
    assert spans(result)[0] == (FETCH + 1, block3 + 8 + 12)
    assert spans(result)[1][1] == writes + 32 * 4
    waited = (block2 - (work + 16)) + (block3 - (block2 + 8))
    assert result.engines["mac"]["wait_accumulator"] == waited


def test_semaphores_order_and_are_accounted() -> None:
    result = run(
        Instr("dma_load", {**LOAD, "signal": bit(DMA0, VEC)}, "a"),
        Instr("vec_pool", {"dst": 4096, "wait": bit(DMA0, VEC)}, "b"),
    )
    (_, loaded), (start, _), _ = spans(result)
    assert start == loaded
    waited = loaded - (FETCH + EACH + 1)
    assert result.engines["vec"]["wait_semaphore"] == waited
    assert result.layer_engines["b"]["vec"]["wait_semaphore"] == waited


def test_bursts_of_two_channels_take_turns() -> None:
    result = run(
        Instr("dma_load", LOAD, "a"),
        Instr("dma_load", {**LOAD, "channel": 1, "sram": BANK}, "b"),
    )
    # Channel 0 has one burst of 8 units before channel 1 begins; then burst by burst.
    data = FETCH + 1 + 1 + LATENCY
    last = data + 31 * 16 + 7
    assert spans(result)[0] == (FETCH + 1, last + 5)
    assert spans(result)[1] == (FETCH + EACH + 1, last + 8 + 5)
    assert result.engines["dma0"]["wait_ddr"] == result.engines["dma1"]["wait_ddr"] == 31 * 8
    assert result.totals["bytes_loaded"] == result.totals["ddr_bytes"] == 4096


def test_streams_of_two_channels_alternate_units() -> None:
    stream = {**LOAD, "stream": 1}
    result = run(
        Instr("dma_load", stream, "a"),
        Instr("dma_load", {**stream, "channel": 1, "sram": BANK}, "b"),
    )
    data = FETCH + 1 + 1 + 3 * LATENCY
    # Eight units alone, then turns: channel 1 first, it was not the last.
    last = data + 8 + 2 * 248 - 1
    assert spans(result)[0][1] == last + 5
    assert spans(result)[1][1] == data + 8 + 2 * 248 + 8 - 1 + 5
    assert result.engines["dma0"]["wait_ddr"] == 248


def test_ports_of_a_bank_take_turns() -> None:
    # Three vectors of one word; a, b and the result in one bank.
    result = run(Instr("vec_eltwise", {"n0": 24, "b": 1024, "dst": 2048}, "e"))
    start, end = spans(result)[0]
    # a 1, b 2, a 3, b 4, a 5, b 6 (before the writer: it follows a); writes 7, 8 and 10.
    assert end - start == 11
    assert result.engines["vec"]["wait_bank"] == 4
    assert result.engines["vec"]["busy"] == 10 - 4


def test_two_fills_of_a_bank_share_it() -> None:
    fill = {"n0": 800, "sram": 2 * BANK}
    alone = run(Instr("fence"), Instr("dma_fill", fill, "f"))
    start, end = spans(alone)[1]
    # Moved from the first cycle of DATA on; the last word is passed on, then written.
    assert end - start == 1 + LATENCY + 100 + 2
    both = run(
        Instr("dma_fill", fill, "f"),
        Instr("dma_fill", {**fill, "sram": 2 * BANK + 1024, "channel": 1}, "g"),
    )
    (first, one), (second, other), _ = spans(both)
    assert second == first + EACH
    # The first writes 8 words more when the second begins; from then on every second cycle.
    assert one - first == 1 + LATENCY + 100 + 2 + 92
    assert other - first == 1 + LATENCY + 200 + 2
    assert both.engines["dma0"]["wait_bank"] == 92
    apart = run(
        Instr("dma_fill", fill, "f"),
        Instr("dma_fill", {**fill, "sram": 3 * BANK, "channel": 1}, "g"),
    )
    assert [b - a for a, b in spans(apart)[:2]] == [end - start] * 2


def test_a_full_queue_stalls_the_sequencer() -> None:
    depth = TINY.queue_depth
    fills = [Instr("dma_fill", {"n0": 800}, "f") for _ in range(depth + 4)]
    result = run(*fills, Instr("dma_fill", {"channel": 1, "sram": 4096, "n0": 8}, "late"))
    late = result.log.layers.index("late")
    each = LATENCY + 1 + 100 + 2
    # The fifth but last fill leaves the queue when it starts; a cycle later the last gets in.
    assert result.log.issue[late] == FETCH + 1 + 3 * each + 2
    assert sum(result.engines["seq"].values()) == result.cycles
    assert result.engines["seq"]["busy"] == depth + 6


def test_fence_waits_for_all() -> None:
    result = run(
        Instr("dma_load", LOAD, "a"),
        Instr("fence", {}, "a"),
        Instr("vec_pool", {"dst": 4096}, "b"),
    )
    (_, loaded), (fence, _), (start, _), _ = spans(result)
    assert fence == loaded
    assert start == loaded + 2


# Fetch and loops.


def test_long_programs_wait_for_code() -> None:
    result = run(*[Instr("set_reg", {"rd": 1}) for _ in range(640)])
    # 40 blocks of 16, and the halt in a block of its own.
    assert result.fetch_bytes == 641 * 64
    assert result.cycles == 40 * BLOCK + FETCH + 1
    assert result.engines["seq"]["wait_fetch"] == result.cycles - 641


def test_a_short_loop_stays_in_the_buffer() -> None:
    body = [Instr("set_reg", {"rd": 1}) for _ in range(3)]
    result = run(Instr("loop", {"count": 100}), *body, Instr("end_loop"))
    # The first iteration as the code comes, then an instruction a cycle.
    assert result.cycles == FETCH + 4 * EACH + 99 * 4 + 1 + 1
    assert result.fetch_bytes == 6 * 64


@pytest.mark.parametrize(("length", "flushed"), [(62, False), (63, True)])
def test_a_long_loop_is_fetched_again(length: int, flushed: bool) -> None:
    # Positions: loop 0, body from 1, end_loop, halt; 64 from the body's first on fit.
    body = [Instr("set_reg", {"rd": 1}) for _ in range(length)]
    result = run(Instr("loop", {"count": 3}), *body, Instr("end_loop"))
    code = length + 3
    ends = [i for i, name in enumerate(result.log.names) if name == "end_loop"]
    jumps = result.log.issue[ends].tolist()
    if not flushed:
        # Iterations 2 and 3 take a cycle an instruction.
        assert result.fetch_bytes == 64 * code
        assert jumps[2] - jumps[1] == jumps[1] - jumps[0] == length + 1
        return
    # The jump leaves the block of the halt (2 instructions with end_loop's, 16 units) as it is in
    # flight: end_loop goes as soon as it is there, and what is left of that block is dropped.
    first = jumps[0]
    assert first == 4 * BLOCK + FETCH
    # Anew from the body on, decided a cycle after the jump: blocks of 16 from position 1.
    assert jumps[1] - first == 1 + 3 * BLOCK + FETCH + 15 * EACH
    # Position 64 (end_loop) is the last of the fourth block, the halt follows in a fifth, which is
    # decided a cycle before the next jump and dropped by it.
    assert jumps[2] - jumps[1] == jumps[1] - jumps[0]


# Clocks, counters, errors.


def test_clocks_of_dma_and_ddr() -> None:
    faster = TINY.model_copy(update={"dma_clock_mhz": 200, "ddr_clock_mhz": 400})
    slow, fast = (run(Instr("dma_load", LOAD), hardware=chip) for chip in (TINY, faster))
    assert spans(slow)[0][1] - spans(slow)[0][0] == 1 + 16 + 256 + 4
    # One unit a cycle and requester, however fast DDR is.
    assert spans(fast)[0][1] - spans(fast)[0][0] == 1 + 8 + 256 + 4
    half = TINY.model_copy(update={"ddr_clock_mhz": 100})
    result = run(Instr("fence"), Instr("dma_load", LOAD), hardware=half)
    start, end = spans(result)[1]
    first = start + 1 + 16
    first += (first + 1) % 2  # DDR moves in odd cycles
    assert end == first + 2 * 255 + 1 + 4


def test_counters_of_layers() -> None:
    case = conv_case(TINY, 1, channels=16, outputs=24)
    result = CycleSimulator(TINY).run(encode_program(case.program))
    named = CycleSimulator(TINY).run(case.program)
    assert named.cycles == result.cycles
    layer = named.layers["c"]
    assert list(named.layers) == ["c"]
    assert tuple(layer) == names(Scope.LAYER)
    assert layer["instructions"] == 7
    assert layer["bytes_loaded"] == 6 * 5 * 16 + 9 * 16 * 24 + 3 * 72
    assert layer["bytes_stored"] == 4 * 3 * 24
    assert layer["ddr_bytes"] == layer["bytes_loaded"] + layer["bytes_stored"]
    assert layer["useful_macs"] == layer["padded_macs"] == 12 * 24 * 16 * 9
    assert layer["start"] == named.log.start.min()
    assert layer["end"] == named.log.end[-2]
    assert tuple(named.engines["seq"]) == names(Scope.SEQUENCER)
    for engine in ("dma0", "dma1", "mac", "vec"):
        assert tuple(named.engines[engine]) == names(Scope.ENGINE)
    assert len({(counter.scope, counter.name) for counter in COUNTERS}) == len(COUNTERS)


def test_ddr_units_are_counted_whole() -> None:
    result = run(Instr("dma_load", {"n0": 20, "n1": 10, "ddr": 4, "ddr_s1": 28, "sram_s1": 20,
                                    "stream": 1}, "a"))  # fmt: skip
    units = [unit for row in range(10) for unit in
             range((4 + 28 * row) // 8, (4 + 28 * row + 19) // 8 + 1)]  # fmt: skip
    # A unit that follows itself is not asked for again.
    assert result.totals["ddr_bytes"] == 8 * (1 + sum(a != b for a, b in pairwise(units)))
    assert result.totals["bytes_loaded"] == 200
    moved = np.sum(result.ddr_rate[:-1] * np.diff(result.ddr_time))
    assert moved == pytest.approx(result.totals["ddr_bytes"] + result.fetch_bytes)


def test_padding_of_the_array_is_counted() -> None:
    result = run(
        Instr("mac_conv", {**CONV, "c_last": 3, "cols_last": 5, "out_w": 4, "ox_stride": 8}, "a"),
        Instr("vec_drain", {**DRAIN, "cols_last": 5, "out_w": 4, "ox_stride": 8}, "a"),
    )
    assert result.totals["useful_macs"] == 4 * 3 * 5
    assert result.totals["padded_macs"] == 4 * 64


def test_deadlock_names_what_each_engine_waits_for() -> None:
    program = [
        Instr("mac_conv", {**CONV, "out_h": 4, "wait": bit(DMA0, MAC)}, "a"),
        Instr("dma_fill", {"wait": bit(VEC, DMA0), "signal": bit(DMA0, MAC)}, "b"),
        Instr("vec_drain", {**DRAIN, "out_h": 4, "oy_stride": 8}, "a"),
    ]
    with pytest.raises(TilewrightError, match="deadlock") as error:
        run(*program)
    assert error.value.details == [
        f'dma0: instruction 1 (dma_fill) of layer "b" waits for semaphore {5 * VEC + DMA0}',
        f'mac: instruction 0 (mac_conv) of layer "a" waits for semaphore {5 * DMA0 + MAC - 1}',
        'vec: instruction 2 (vec_drain) of layer "a" waits for a pushed half of the M registers '
        "at block 0",
    ]
    shape = {"out_h": 4, "block_rows": 1}
    with pytest.raises(TilewrightError, match="deadlock") as error:
        run(Instr("mac_conv", {**CONV, **shape}, "a"))
    assert error.value.details == [
        'mac: instruction 0 (mac_conv) of layer "a" waits for an emptied half of the M registers '
        "at block 2"
    ]


def test_limits_are_checked() -> None:
    with pytest.raises(TilewrightError, match=r'layer "x".*not divisible by burst_size 64'):
        run(Instr("dma_load", {"n0": 300}, "x"))
    with pytest.raises(TilewrightError, match="semaphore 0 overflows"):
        run(Instr("loop", {"count": 65536}), Instr("fence", {"signal": 1}), Instr("end_loop"))


def test_the_profile_of_a_long_run_is_bounded() -> None:
    pool = {"n0": 1, "out_h": 64, "out_w": 64, "k_h": 15, "k_w": 15, "dst": 2 * BANK,
            "dst_sx": 1, "dst_sy": 64}  # fmt: skip
    result = run(Instr("vec_pool", pool, "p"), Instr("dma_load", {**LOAD, "sram": BANK}, "l"))
    assert result.cycles > 64 * 64 * 225
    assert result.ddr_time.size == result.ddr_rate.size <= 8193
    moved = np.sum(result.ddr_rate[:-1] * np.diff(result.ddr_time))
    assert moved == pytest.approx(2048 + result.fetch_bytes)


def test_trace_tracks_do_not_overlap() -> None:
    result = CycleSimulator(EDGE).run(pipeline(EDGE, 6, layers=2))
    events = json.loads(trace_json(result, EDGE))["traceEvents"]
    assert events == json.loads(json.dumps(trace_events(result, EDGE)))
    slices = [event for event in events if event["ph"] == "X"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if "tid" in event
              and event["ph"] == "M"}  # fmt: skip
    assert tracks == {1: "dma0", 2: "dma1", 5: "mac", 6: "vec"}
    assert len(slices) == sum(1 for name in result.log.names if name != "halt")
    for track in tracks:
        mine = [event for event in slices if event["tid"] == track]
        for before, after in pairwise(mine):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-9
    assert slices[0]["name"] == "layer0 dma_load"
    last = max(event["ts"] + event["dur"] for event in slices)
    assert last == pytest.approx((result.cycles - 1) / EDGE.core_clock_mhz)
    counters = [event for event in events if event["ph"] == "C"]
    assert counters
    rates = np.array([event["args"]["GB/s"] for event in counters])
    assert 0 < rates.max() <= EDGE.ddr_bus_bytes * EDGE.core_clock_mhz / 1000 + 1e-3
    assert rates[-1] == 0


def test_tables_of_a_resize_are_found() -> None:
    rows, columns = [(0, 1), (2, 3), (3, 3)], [(1, 2), (0, 3)]
    entries = [(a, b, 1024, 1024) for a, b in [*rows, *columns]]
    ddr = np.zeros(4096, np.uint8)
    ddr[256 : 256 + 8 * len(entries)] = np.array(entries, "<u2").view(np.uint8).ravel()
    block = np.zeros(9 * 8, np.uint8)
    block[8 * 8 :] = 11
    ddr[: block.size] = block
    f = {"dst": BANK, "table_y": 2 * BANK, "table_x": 2 * BANK + 24, "n0": 8, "out_h": 3,
         "out_w": 2, "in_h": 4, "in_w": 4, "src_sy": 32, "src_sx": 8, "dst_sy": 16,
         "dst_sx": 8}  # fmt: skip
    program = [
        Instr("dma_load", {"sram": 3 * BANK, "n0": 72, "stream": 1}),
        Instr("dma_load", {"ddr": 256, "sram": 2 * BANK, "n0": 40, "stream": 1}),
        Instr("dma_fill", {"n0": 128}),
        Instr("fence"),
        Instr("vec_param", {"src": 3 * BANK}),
        Instr("vec_resize", f),
        Instr("halt"),
    ]
    (found,) = resize_tables(TINY, program, ddr)
    assert [table.tolist() for table in found] == [
        [list(pair) for pair in rows],
        [list(pair) for pair in columns],
    ]
    simulator = CycleSimulator(TINY)
    assert simulator.run(program, tables=[found]).cycles == simulator.run(program).cycles
    crowded = [*program[:5], Instr("vec_resize", {**f, "src": 4}), program[6]]
    assert simulator.run(crowded, tables=[found]).cycles > simulator.run(program).cycles


def test_the_cached_kernel_depends_on_every_file_it_is_made_from() -> None:
    folder = Path(cycle_kernel.__file__).parent
    for name in cycle_kernel.SOURCES:
        text = (folder / f"cycle_{name}.py").read_text("utf-8")
        used = set(re.findall(r"^from tilewright\.(\S+) import", text, re.MULTILINE))
        assert used <= {f"sim.cycle_{source}" for source in cycle_kernel.SOURCES}
