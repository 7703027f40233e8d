"""Estimates of timing and limits of instructions against enumeration and figures by hand."""

from __future__ import annotations

import itertools
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.sim_programs import full
from tilewright.spec.access import accesses
from tilewright.spec.hardware import load_target
from tilewright.spec.limits import overlaps_itself, violations
from tilewright.spec.timing import (
    dma_timing,
    mac_timing,
    vec_cycles,
    vec_timing,
    words,
)

TINY, EDGE, V2 = load_target("tiny8"), load_target("edge16"), load_target("tpu_v2")


@given(st.integers(1, 200), st.integers(0, 3))
def test_words_is_the_worst_alignment(size: int, power: int) -> None:
    word, alignment = TINY.sram_word_bytes, 1 << power
    touched = [
        len({byte // word for byte in range(start, start + size)})
        for start in range(0, word, alignment)
    ]
    assert words(TINY, size, alignment) == max(touched)


def slow_mac_blocks(f: dict[str, int], word: int, align_act: int, align_wgt: int) -> list[int]:
    """Cycles of every block by walking all steps, as docs/concepts/machine.md words it."""

    def port(size: int, alignment: int) -> int:
        return ceil((word - alignment + size) / word)

    steps: list[tuple[int, int, int, int]] = []  # (block, pixels, activation words, load)
    rows_left = f["out_h"]
    sizes = []
    while rows_left:
        sizes.append(min(f["block_rows"], rows_left) * f["out_w"])
        rows_left -= min(f["block_rows"], rows_left)
    block = 0
    for ob in range(f["oc_blocks"]):
        cols = f["cols_last"] if ob == f["oc_blocks"] - 1 else f["cols"]
        for pixels in sizes:
            for _, _, cb in itertools.product(
                range(f["k_h"]), range(f["k_w"]), range(f["c_blocks"])
            ):
                rows = f["c_last"] if cb == f["c_blocks"] - 1 else f["c_rows"]
                vector = cols if f["diag"] else rows
                load = (1 if f["diag"] else rows) * port(cols, align_wgt)
                steps.append((block, pixels, port(vector, align_act), load))
            block += 1
    cycles = [0] * block
    for index, (number, pixels, act, _) in enumerate(steps):
        following = steps[index + 1][3] if index + 1 < len(steps) else 0
        cycles[number] += max(pixels * act, following)
    return cycles


@given(
    out=st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 8), st.integers(1, 8)),
    columns=st.tuples(st.integers(1, 3), st.integers(1, 8), st.integers(1, 8)),
    diag=st.integers(0, 1),
)
def test_mac_timing_equals_walking_the_steps(
    out: tuple[int, int, int],
    kernel: tuple[int, int],
    channels: tuple[int, int, int],
    columns: tuple[int, int, int],
    diag: int,
) -> None:
    f = full("mac_conv", diag=diag, act=4, wgt=8192, out_h=out[0], out_w=out[1],
             block_rows=out[2], k_h=kernel[0], k_w=kernel[1], c_blocks=channels[0],
             c_rows=channels[1], c_last=channels[2], oc_blocks=columns[0], cols=columns[1],
             cols_last=columns[2], wgt_pitch=8, wgt_ob_stride=16, oy_stride=256, ox_stride=16,
             ky_stride=64, kx_stride=16, cb_stride=8, ob_stride=8)  # fmt: skip
    timing = mac_timing(TINY, f)
    blocks = slow_mac_blocks(f, 8, 4, 8)
    assert list(timing.blocks) == blocks
    rows = 1 if diag else f["c_rows"] if channels[0] > 1 else f["c_last"]
    assert timing.first_load == rows
    assert timing.cycles == 1 + timing.first_load + sum(blocks) + TINY.mac_latency
    # Port cycles never exceed the time, and MACs the array's cells.
    for port in timing.ports:
        assert port.cycles <= timing.first_load + sum(blocks)
    assert timing.macs <= timing.padded_macs


def test_single_dimensions_do_not_spoil_the_alignment() -> None:
    f = full(
        "mac_conv", wgt=8192, c_rows=8, c_last=8, cols=8, cols_last=8, wgt_pitch=8, ox_stride=3
    )
    assert mac_timing(TINY, f).blocks == (1,)
    # Two pixels 3 bytes apart: 8 bytes may touch two words.
    assert mac_timing(TINY, {**f, "out_w": 2}).blocks == (4,)


def test_fp16_and_int4_rows() -> None:
    f = full("mac_conv", dtype=2, wgt=V2.bank_size, c_rows=128, c_last=128, cols=128, cols_last=128,
             wgt_pitch=256)  # fmt: skip
    assert mac_timing(V2, f).first_load == 128 * 2
    assert mac_timing(V2, {**f, "dtype": 1, "wgt_pitch": 64}).first_load == 128


DMA = {"stream": 1, "ddr": 0x1000, "sram": 0}


def test_dma_bursts_merge_into_one_run() -> None:
    f = full("dma_load", n0=64, n1=4, n2=2, ddr_s1=64, ddr_s2=256, sram_s1=64, sram_s2=256)
    timing = dma_timing(TINY, f)
    # 8 DMA cycles of latency at half the core clock; 512 bytes: 32 DMA cycles, 64 words, 64 DDR.
    assert (timing.latency, timing.channel, timing.sram, timing.ddr) == (16, 64, 64, 64)
    assert (timing.ddr_bytes, timing.bytes, timing.cycles) == (512, 512, 1 + 80 + 4)


def test_dma_stream_pays_granules_and_runs() -> None:
    f = full("dma_load", **DMA, n0=20, n1=10, ddr_s1=100, sram_s1=24)
    timing = dma_timing(TINY, f)
    # Runs start at multiples of 4: 20 bytes may touch 3 granules of 8 (4 + 20 = 24).
    assert timing.ddr_bytes == 10 * 24
    assert timing.bytes == 200
    assert timing.channel == 2 * 10 * (2 + 1)
    assert timing.sram == 10 * 3
    assert timing.latency == 2 * 8 * 3
    aligned = dma_timing(TINY, {**f, "ddr_s1": 104, "n0": 16})
    assert aligned.ddr_bytes == 160


def test_dma_padding_is_written_and_not_read() -> None:
    f = full("dma_load", **DMA, n0=8, n1=4, n2=4, ddr_s1=8, ddr_s2=32, sram_s1=8, sram_s2=48,
             pad1_lo=1, pad1_hi=1, pad2_lo=1, pad2_hi=1)  # fmt: skip
    timing = dma_timing(TINY, f)
    assert timing.ddr_bytes == timing.bytes == 128
    assert timing.sram == 36
    fill = dma_timing(TINY, full("dma_fill", n0=64, n1=2, sram_s1=64), "dma_fill")
    assert (fill.ddr_bytes, fill.bytes, fill.sram, fill.channel) == (0, 0, 16, 16)


def test_drain_blocks() -> None:
    f = full("vec_drain", dst=8, out_h=5, out_w=4, block_rows=2, oc_blocks=2, cols=8, cols_last=3,
             ox_stride=8, oy_stride=32, ob_stride=1024 - 512)  # fmt: skip
    timing = vec_timing(TINY, "vec_drain", f)
    assert timing.blocks == (8, 8, 4, 8, 8, 4)
    assert timing.cycles == 40 + TINY.vector_latency + 2
    raw = vec_timing(TINY, "vec_drain", {**f, "raw": 1, "ox_stride": 32, "oy_stride": 128})
    assert raw.blocks == (32, 32, 16, 16, 16, 8)


@pytest.mark.parametrize(
    ("name", "fields", "cycles"),
    [
        # 3 vectors a run of 20, two runs: a and b in bank 0, dst in bank 1.
        ("vec_eltwise", {"b": 1024, "dst": 8192, "n0": 20, "n1": 2, "a_s1": 24, "b_s1": 24,
                         "dst_s1": 24}, 6 * 2),
        ("vec_eltwise", {"b": 8192, "dst": 16384, "n0": 20, "n1": 2, "a_s1": 24, "b_s1": 24,
                         "dst_s1": 24}, 6),
        ("vec_eltwise", {"b": 1024, "dst": 2048, "n0": 8}, 3),
        # b misaligned: two words.
        ("vec_eltwise", {"b": 8193, "dst": 16384, "n0": 8}, 2),
        ("vec_copy", {"dst": 8192, "n0": 20, "n1": 3, "src_s0": 1, "dst_s0": 1, "src_s1": 24,
                      "dst_s1": 24}, 9),
        ("vec_copy", {"dst": 8192, "n0": 20, "n1": 3, "src_s0": 2, "dst_s0": 1, "src_s1": 40,
                      "dst_s1": 20}, 60),
        ("vec_pool", {"dst": 8192, "n0": 8, "out_h": 2, "out_w": 3, "k_h": 3, "k_w": 2,
                      "src_sy": 64, "src_sx": 8, "ky_stride": 64, "kx_stride": 8, "dst_sy": 24,
                      "dst_sx": 8}, 36),
        ("vec_resize", {"dst": 8192, "table_y": 16384, "table_x": 16400, "n0": 8, "out_h": 2,
                        "out_w": 3, "in_h": 2, "in_w": 2, "src_sy": 16, "src_sx": 8, "dst_sy": 24,
                        "dst_sx": 8}, 6 * 4 + 2 + 3),
        ("vec_param", {"count": 2}, 18),
        ("vec_param", {"count": 2, "bias_only": 1}, 8),
        ("vec_table", {}, 32),
    ],
)  # fmt: skip
def test_vector_cycles(name: str, fields: dict[str, int], cycles: int) -> None:
    assert vec_cycles(TINY, name, full(name, **fields)) == cycles + TINY.vector_latency + 2


# Regions, checked against enumeration of every byte.


@given(
    run=st.integers(1, 9),
    dims=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 40)), max_size=3),
    other=st.tuples(st.integers(0, 150), st.integers(1, 5), st.integers(1, 5), st.integers(1, 60)),
)
def test_overlap_is_exact(
    run: int, dims: list[tuple[int, int]], other: tuple[int, int, int, int]
) -> None:
    def pick(index: int, default: tuple[int, int]) -> tuple[int, int]:
        return dims[index] if index < len(dims) else default

    (n1, s1), (n2, s2), (n3, s3) = (pick(index, (1, 0)) for index in range(3))
    f = full("dma_store", sram=20, n0=run, n1=n1, n2=n2, n3=n3, sram_s1=s1, sram_s2=s2, sram_s3=s3)
    mine = next(region for region in accesses(TINY, "dma_store", f) if region.sram)
    start, size, count, stride = other
    g = full("dma_fill", sram=start, n0=size, n1=count, sram_s1=stride)
    (theirs,) = accesses(TINY, "dma_fill", g)
    first = {
        20 + a * s1 + b * s2 + c * s3 + byte
        for a, b, c, byte in itertools.product(range(n1), range(n2), range(n3), range(run))
    }
    second = {start + a * stride + byte for a in range(count) for byte in range(size)}
    assert mine.end == max(first) + 1
    assert mine.overlaps(theirs) == theirs.overlaps(mine) == bool(first & second)


@given(
    out=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 8), st.integers(1, 8)),
    columns=st.tuples(st.integers(1, 3), st.integers(1, 8), st.integers(1, 8)),
    diag=st.integers(0, 1),
)
def test_regions_of_a_convolution_are_the_bytes_it_reads(
    out: tuple[int, int],
    kernel: tuple[int, int],
    channels: tuple[int, int, int],
    columns: tuple[int, int, int],
    diag: int,
) -> None:
    f = full("mac_conv", diag=diag, act=100, wgt=8192, out_h=out[0], out_w=out[1], k_h=kernel[0],
             k_w=kernel[1], c_blocks=channels[0], c_rows=channels[1], c_last=channels[2],
             oc_blocks=columns[0], cols=columns[1], cols_last=columns[2], wgt_pitch=11,
             wgt_ob_stride=3000, oy_stride=130, ox_stride=31, ky_stride=61, kx_stride=29,
             cb_stride=9, ob_stride=7)  # fmt: skip
    read = {"act": np.zeros(1 << 15, bool), "wgt": np.zeros(1 << 15, bool)}
    for ob in range(columns[0]):
        cols = f["cols_last"] if ob == columns[0] - 1 else f["cols"]
        step = f["wgt"] + ob * f["wgt_ob_stride"]
        for ky, kx, cb in itertools.product(*map(range, (*kernel, channels[0]))):
            rows = f["c_last"] if cb == channels[0] - 1 else f["c_rows"]
            for _ in range(1 if diag else rows):
                read["wgt"][step : step + cols] = True
                step += f["wgt_pitch"]
            for oy, ox in itertools.product(*map(range, out)):
                base = f["act"] + ob * 7 + oy * 130 + ox * 31 + ky * 61 + kx * 29 + cb * 9
                read["act"][base : base + (cols if diag else rows)] = True
    covered = {"act": np.zeros(1 << 15, bool), "wgt": np.zeros(1 << 15, bool)}
    for region in accesses(TINY, "mac_conv", f):
        for start in region.starts().tolist():
            covered[region.operand][start : start + region.run] = True
    np.testing.assert_array_equal(covered["act"], read["act"])
    # Weights: gaps between rows are inside the region, nothing before or after.
    assert (covered["wgt"] >= read["wgt"]).all()
    assert np.flatnonzero(covered["wgt"])[[0, -1]].tolist() == (
        np.flatnonzero(read["wgt"])[[0, -1]].tolist()
    )


# Limits.


@given(
    run=st.integers(1, 6),
    dims=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 14)), min_size=1, max_size=4),
)
def test_overlap_with_itself_is_exact(run: int, dims: list[tuple[int, int]]) -> None:
    seen: set[int] = set()
    twice = False
    for steps in itertools.product(*[range(count) for count, _ in dims]):
        start = sum(step * stride for step, (_, stride) in zip(steps, dims, strict=True))
        for byte in range(start, start + run):
            twice |= byte in seen
            seen.add(byte)
    assert overlaps_itself(run, tuple(dims)) == twice


def broken(name: str, **fields: int) -> list[str]:
    return [rule.message for rule in violations(TINY, name, full(name, **fields))]


TWICE = "the runs it writes must not overlap each other"


def test_a_byte_is_written_once() -> None:
    load = {"stream": 1, "n0": 8, "n1": 4, "ddr_s1": 8}
    # In the order of the runs the padding after the data would be written over them.
    assert broken("dma_load", **load, sram_s1=4, pad1_hi=1) == [TWICE]
    assert broken("dma_load", **load, sram_s1=0, pad1_lo=1)
    assert broken("dma_load", **load, sram_s1=8, n2=2, sram_s2=40, pad1_lo=2)
    assert not broken("dma_load", **load, sram_s1=8, n2=2, sram_s2=48, pad1_lo=2)
    assert not broken("dma_load", **{**load, "n1": 1}, sram_s1=0, n2=2, sram_s2=8, pad2_lo=1)
    # Without padding too: which run stayed would depend on the order inside the instruction.
    assert broken("dma_load", **load, sram_s1=4) == [TWICE]
    store = {"stream": 1, "n0": 8, "n1": 4, "sram_s1": 8}
    assert broken("dma_store", **store, ddr_s1=7) == [TWICE]
    assert not broken("dma_store", **store, ddr_s1=8)
    assert broken("dma_fill", n0=4, n1=2, sram_s1=3) == [TWICE]
    drain = {"out_h": 2, "out_w": 2, "block_rows": 2, "cols_last": 8, "oy_stride": 16}
    assert broken("vec_drain", **drain, ox_stride=4) == [TWICE]
    assert not broken("vec_drain", **drain, ox_stride=8)
    pool = {"n0": 8, "out_h": 2, "out_w": 2, "src_sx": 8, "src_sy": 16, "dst": 256}
    assert broken("vec_pool", **pool, dst_sx=8, dst_sy=8) == [TWICE]
    assert not broken("vec_pool", **pool, dst_sx=8, dst_sy=16)


def test_results_in_place() -> None:
    copy = {"n0": 8, "src_s0": 1, "dst_s0": 1, "n1": 3, "src": 64, "dst": 64}
    assert not broken("vec_copy", **copy, src_s1=8, dst_s1=8)
    for stride in (0, 7):
        assert broken("vec_copy", **copy, src_s1=stride, dst_s1=stride) == [TWICE]
    add = {"n0": 8, "n1": 3, "b": 1024, "a_s1": 8, "b_s1": 8}
    assert not broken("vec_eltwise", **add, dst_s1=8)
    assert broken("vec_eltwise", **{**add, "a_s1": 0}, dst_s1=0) == [TWICE]
    assert broken("vec_eltwise", **{**add, "a_s1": 16}, dst_s1=8) == [
        "dst (0x0) must not overlap a (0x0) unless both have the same address and strides"
    ]
