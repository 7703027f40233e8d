"""The cycle simulator: hand-worked schedules, sharing, handshake, deadlock, speed, trace."""

from __future__ import annotations

import json
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from tests.unit.sim_programs import DMA0, MAC, VEC, bit, conv_case, full, pipeline
from tilewright.diagnostics import TilewrightError
from tilewright.sim.cycle import CycleSimulator
from tilewright.sim.trace import trace_events, trace_json
from tilewright.spec.counters import COUNTERS, Scope, names
from tilewright.spec.hardware import load_target
from tilewright.spec.program import Instr, encode_program
from tilewright.spec.timing import dma_timing, mac_timing, vec_timing

TINY, EDGE, V2 = load_target("tiny8"), load_target("edge16"), load_target("tpu_v2")
BANK = TINY.bank_size
FETCH = 16 + 128
"""Cycles until the first 16 instructions of `tiny8` are there: latency, then 1024 bytes at 8."""
LOAD = {"n0": 2048}
CONV = {"wgt": BANK, "c_rows": 8, "c_last": 8, "cols": 8, "cols_last": 8, "wgt_pitch": 8}
DRAIN = {"dst": 2 * BANK, "cols": 8, "cols_last": 8}


def spans(result: Any) -> list[tuple[int, int]]:
    return list(zip(result.log.start.tolist(), result.log.end.tolist(), strict=True))


def run(*program: Instr) -> Any:
    return CycleSimulator(TINY).run([*program, Instr("halt")])


def test_one_instruction_takes_what_the_timing_rules_say() -> None:
    for name, fields in (
        ("dma_load", LOAD),
        ("dma_store", {"n0": 20, "n1": 7, "ddr_s1": 100, "sram_s1": 24, "stream": 1}),
        ("dma_fill", {"n0": 100}),
        ("vec_pool", {"n0": 20, "out_w": 9, "dst": 4096}),
        ("vec_table", {}),
    ):
        result = run(Instr(name, fields, "x"))
        f = full(name, **fields)
        timing = vec_timing(TINY, name, f) if name[0] == "v" else dma_timing(TINY, f, name)
        assert spans(result)[0] == (FETCH, FETCH + timing.cycles)
        assert result.cycles == FETCH + timing.cycles + 1


def test_blocks_of_mac_and_vector_unit_overlap() -> None:
    shape = {"out_h": 4, "out_w": 16, "block_rows": 1}
    conv = {**CONV, **shape, "k_h": 2, "ox_stride": 8}
    result = run(
        Instr("mac_conv", conv, "a"),
        Instr("vec_drain", {**DRAIN, **shape, "ox_stride": 8}, "a"),
    )
    mac = mac_timing(TINY, full("mac_conv", **conv))
    # Both steps of a block hide the load of 8 rows behind 16 pixels.
    assert (mac.first_load, mac.blocks) == (8, (32, 32, 32, 32))
    assert spans(result)[0] == (FETCH, FETCH + 8 + 128 + 12)
    # Drained 16 cycles a block, as soon as it is full; 3 of latency.
    assert spans(result)[1] == (FETCH + 1, FETCH + 8 + 128 + 12 + 16 + 3)
    assert result.engines["vec"]["wait_accumulator"] == 8 + 32 + 12 - 1 + 3 * (32 - 16)
    assert result.engines["mac"]["wait_accumulator"] == 0


def test_a_slow_drain_holds_the_array_back() -> None:
    shape = {"out_h": 4, "out_w": 8, "block_rows": 1}
    result = run(
        Instr("mac_conv", {**CONV, **shape, "ox_stride": 8}, "a"),
        Instr("vec_drain", {**DRAIN, **shape, "raw": 1, "ox_stride": 32}, "a"),
    )
    # Blocks 8, drains 32. Block 0 is full at 8 + 8 + 12 and drained 32 later; 2 waits for that.
    first_drained = FETCH + 8 + 8 + 12 + 32
    assert spans(result)[0] == (FETCH, first_drained + 32 + 8 + 12)
    assert spans(result)[1][1] == first_drained + 3 * 32 + 3
    assert result.engines["mac"]["wait_accumulator"] == (first_drained - FETCH - 24) + (32 - 8)


def test_semaphores_order_and_are_accounted() -> None:
    result = run(
        Instr("dma_load", {**LOAD, "signal": bit(DMA0, VEC)}, "a"),
        Instr("vec_pool", {"dst": 4096, "wait": bit(DMA0, VEC)}, "b"),
    )
    (_, loaded), (start, _), _ = spans(result)
    assert start == loaded
    assert result.engines["vec"]["wait_semaphore"] == loaded - (FETCH + 1)
    assert result.layer_engines["b"]["vec"]["wait_semaphore"] == loaded - (FETCH + 1)


def test_ddr_is_shared_fairly() -> None:
    # Two equal loads and nothing else: DDR (8 bytes a cycle) is the bound for both together.
    result = run(
        Instr("dma_load", LOAD, "a"),
        Instr("dma_load", {**LOAD, "channel": 1, "sram": BANK}, "b"),
    )
    (first, end), (second, last), _ = spans(result)
    assert (first, second) == (FETCH, FETCH + 1)
    # Alone for one cycle after the latency, then half each.
    assert end == FETCH + 16 + 511
    assert last == FETCH + 16 + 512
    assert result.engines["dma0"]["wait_ddr"] == pytest.approx(255, abs=1)
    assert result.totals["bytes_loaded"] == result.totals["ddr_bytes"] == 4096


def test_a_slow_channel_leaves_its_share_to_the_other() -> None:
    # Runs of 8 bytes in stream mode: 2 DMA cycles each, 2 bytes a core cycle.
    slow = {"n0": 8, "n1": 100, "ddr_s1": 16, "sram_s1": 8, "stream": 1}
    result = run(
        Instr("dma_load", {**slow, "sram": BANK}, "slow"),
        Instr("dma_load", {"n0": 3072, "channel": 1}, "fast"),
    )
    (start, end), (second, last), _ = spans(result)
    alone = dma_timing(TINY, full("dma_load", **slow)).cycles
    assert end - start == alone == 48 + 400
    # 6 bytes a cycle once the slow one moves data, 8 before and after.
    latency, before = 16, 48 - 1 - 16
    after = 3072 - before * 8 - 400 * 6
    assert last - second == pytest.approx(latency + before + 400 + after / 8, abs=1)


def test_a_shared_bank_slows_both() -> None:
    pool = {
        "n0": 8,
        "out_w": 200,
        "src_sx": 8,
        "dst_sx": 8,
        "src": 2 * BANK,
        "dst": 2 * BANK + 4096,
    }
    alone = run(Instr("vec_pool", pool, "p"))
    fill = {"n0": 2048, "sram": 0}
    apart = run(Instr("vec_pool", pool, "p"), Instr("dma_fill", fill, "f"))
    assert spans(apart)[0] == spans(alone)[0]
    together = run(Instr("vec_pool", pool, "p"), Instr("dma_fill", {**fill, "sram": 2 * BANK}, "f"))
    # The pool uses its bank's port all the time (a word read, a word written), the fill too.
    assert spans(together)[0][1] - spans(alone)[0][1] > 100
    assert together.engines["vec"]["wait_bank"] > 100
    assert together.engines["dma0"]["wait_bank"] > 100
    assert together.engines["vec"]["busy"] == alone.engines["vec"]["busy"]


def test_a_full_queue_stalls_the_sequencer() -> None:
    depth = TINY.queue_depth
    fills = [Instr("dma_fill", {"n0": 800}, "f") for _ in range(depth + 4)]
    result = run(*fills, Instr("dma_fill", {"channel": 1, "sram": 4096, "n0": 8}, "late"))
    late = result.log.layers.index("late")
    each = dma_timing(TINY, full("dma_fill", n0=800), "dma_fill").cycles
    # It is dispatched after the last fill has got into the queue: when fill 4 starts... minus one.
    assert result.log.issue[late] == FETCH + 3 * each + 1
    # The second block of code arrives while the queue is full already.
    waited = result.engines["seq"]["wait_queue"] + result.engines["seq"]["wait_fetch"]
    assert waited == FETCH + 3 * each + 1 - (depth + 4)
    assert sum(result.engines["seq"].values()) == result.cycles


def test_fence_waits_for_all() -> None:
    result = run(
        Instr("dma_load", LOAD, "a"),
        Instr("fence", {}, "a"),
        Instr("vec_pool", {"dst": 4096}, "b"),
    )
    (_, loaded), (fence, _), (start, _), _ = spans(result)
    assert fence == loaded
    assert start == loaded + 1


def test_long_programs_wait_for_code() -> None:
    # One instruction a cycle cannot be fetched: 64 bytes at 8 bytes a cycle and latency.
    result = run(*[Instr("set_reg", {"rd": 1}) for _ in range(640)])
    blocks = 41
    assert result.fetch_bytes == blocks * 1024
    assert result.cycles == pytest.approx(blocks * FETCH, rel=0.02)
    assert result.engines["seq"]["wait_fetch"] == pytest.approx(result.cycles - 641, rel=0.01)


def test_clocks_of_dma_and_ddr() -> None:
    faster = TINY.model_copy(update={"dma_clock_mhz": 200, "ddr_clock_mhz": 400})
    slow = CycleSimulator(TINY).run([Instr("dma_load", LOAD), Instr("halt")])
    fast = CycleSimulator(faster).run([Instr("dma_load", LOAD), Instr("halt")])
    assert spans(slow)[0][1] - spans(slow)[0][0] == 16 + 256
    assert spans(fast)[0][1] - spans(fast)[0][0] == 8 + 256  # the SRAM port: 8 bytes a cycle
    wide = faster.model_copy(update={"sram_word_bytes": 32})
    third = CycleSimulator(wide).run([Instr("dma_load", LOAD), Instr("halt")])
    assert spans(third)[0][1] - spans(third)[0][0] == 8 + 128  # 16 bytes a cycle: channel and DDR


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
    assert layer["useful_macs"] == layer["padded_macs"] == 12 * 24 * 16 * 9
    assert layer["start"] == named.log.start.min()
    assert layer["end"] == named.log.end[-2]
    assert tuple(named.engines["seq"]) == names(Scope.SEQUENCER)
    for engine in ("dma0", "dma1", "mac", "vec"):
        assert tuple(named.engines[engine]) == names(Scope.ENGINE)
    assert len({(counter.scope, counter.name) for counter in COUNTERS}) == len(COUNTERS)


def test_padding_of_the_array_is_counted() -> None:
    result = run(
        Instr("mac_conv", {**CONV, "c_last": 3, "cols_last": 5, "out_w": 4, "ox_stride": 8}, "a"),
        Instr("vec_drain", {**DRAIN, "cols_last": 5, "out_w": 4}, "a"),
    )
    assert result.totals["useful_macs"] == 4 * 3 * 5
    assert result.totals["padded_macs"] == 4 * 64


def test_deadlock_names_what_each_engine_waits_for() -> None:
    program = [
        Instr("mac_conv", {**CONV, "out_h": 4, "wait": bit(DMA0, MAC)}, "a"),
        Instr("dma_fill", {"wait": bit(VEC, DMA0), "signal": bit(DMA0, MAC)}, "b"),
        Instr("vec_drain", {**DRAIN, "out_h": 4}, "a"),
    ]
    with pytest.raises(TilewrightError, match="deadlock") as error:
        run(*program)
    assert error.value.details == [
        f'dma0: instruction 1 (dma_fill) of layer "b" waits for semaphore {5 * VEC + DMA0}',
        f'mac: instruction 0 (mac_conv) of layer "a" waits for semaphore {5 * DMA0 + MAC - 1}',
        'vec: instruction 2 (vec_drain) of layer "a" waits for a pushed half of the M registers '
        "at block 0",
    ]


def test_limits_are_checked() -> None:
    with pytest.raises(TilewrightError, match=r'layer "x".*not divisible by burst_size 64'):
        run(Instr("dma_load", {"n0": 300}, "x"))
    with pytest.raises(TilewrightError, match="semaphore 0 overflows"):
        run(Instr("loop", {"count": 65536}), Instr("fence", {"signal": 1}), Instr("end_loop"))


def test_twenty_thousand_instructions_take_seconds() -> None:
    program = pipeline(V2, 4000, layers=50)
    start = perf_counter()
    CycleSimulator(V2).run(program)
    assert perf_counter() - start < 20  # 0.5 s on an idle machine


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
    assert rates.max() <= EDGE.ddr_bytes_per_cycle * EDGE.core_clock_mhz / 1000 + 1e-3
    assert rates[-1] == 0
