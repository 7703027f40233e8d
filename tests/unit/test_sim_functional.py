"""The functional simulator against plain loops and Python integers, and the machine's errors."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from tests.unit.sim_programs import (
    DMA0,
    MAC,
    VEC,
    ConvCase,
    bit,
    clamp,
    conv_case,
    parameter_block,
    rshift,
    wrap32,
)
from tilewright.diagnostics import TilewrightError
from tilewright.sim.functional import FunctionalSimulator
from tilewright.sim.numeric import float_function
from tilewright.spec.hardware import Hardware, load_target
from tilewright.spec.isa import FUNCTIONS
from tilewright.spec.program import Instr, encode_program

TINY, EDGE, V2 = load_target("tiny8"), load_target("edge16"), load_target("tpu_v2")
STREAM = {"stream": 1}


def output(case: ConvCase) -> np.ndarray[Any, Any]:
    start, size = case.result
    return case.ddr[start : start + size].view(np.int8).reshape(case.expected.shape)


SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"depthwise": True},
    {"channels": 16, "outputs": 24},
    {"channels": 20, "outputs": 12, "stride": 2, "height": 9, "width": 9},
    {"depthwise": True, "channels": 20},
    {"kernel": 1, "channels": 4, "outputs": 3},
    {"kernel": 6, "height": 6, "width": 6, "channels": 9, "outputs": 2, "block_rows": 1},
    {"block_rows": 3, "height": 9, "width": 4},
)


@pytest.mark.parametrize("hardware", [TINY, EDGE, V2], ids=lambda hardware: hardware.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("order", ["program", "random"])
def test_convolution_equals_plain_loops(
    hardware: Hardware, shape: dict[str, Any], order: Any
) -> None:
    case = conv_case(hardware, 5, **shape)
    FunctionalSimulator(hardware).run(case.program, case.ddr, order=order, seed=7)
    np.testing.assert_array_equal(output(case), case.expected)


def test_encoded_and_decoded_programs_do_the_same() -> None:
    one, two = conv_case(TINY, 1), conv_case(TINY, 1)
    first = FunctionalSimulator(TINY).run(one.program, one.ddr)
    second = FunctionalSimulator(TINY).run(encode_program(two.program), two.ddr)
    np.testing.assert_array_equal(one.ddr, two.ddr)
    assert first.macs == second.macs == 4 * 3 * 8 * 8 * 9
    assert first.instructions == len(one.program)


@pytest.mark.parametrize("rounding", ["half_up", "half_away", "half_even", "truncate"])
def test_every_rounding_of_the_drain(rounding: Any) -> None:
    hardware = TINY.model_copy(update={"rounding": rounding})
    case = conv_case(hardware, 3)
    FunctionalSimulator(hardware).run(case.program, case.ddr)
    np.testing.assert_array_equal(output(case), case.expected)


# Accumulators beyond 32 bits: one pixel, 128 x 128 products, accumulated on a start value.


def accumulation(hardware: Hardware, repeats: int, signs: list[int]) -> int:
    """Return the raw accumulator after mac_convs whose column sums are sign * depth * 127^2."""
    bank, array = hardware.bank_size, hardware.array_size
    depth = array * 256
    ddr = np.zeros(1 << 20, np.uint8)
    ddr[:array] = 127
    ddr[4096 : 4096 + 256 * array * 4] = 127
    ddr[1 << 17 : (1 << 17) + 256 * array * 4] = np.uint8(129)
    weights = 256 * array * 4
    program = [
        Instr("dma_load", {"ddr": 0, "n0": array, **STREAM}),
        Instr("dma_load", {"ddr": 4096, "sram": bank, "n0": weights, **STREAM}),
        Instr("dma_load", {"ddr": 1 << 17, "sram": 3 * bank, "n0": weights, **STREAM}),
        Instr("dma_fill", {"sram": 2 * bank, "n0": 4 * hardware.vector_lanes}),
        Instr("fence"),
        Instr("vec_param", {"src": 2 * bank, "bias_only": 1}),
    ]
    calls = [sign for sign in signs for _ in range(repeats)]
    for number, sign in enumerate(calls):
        last = number == len(calls) - 1
        program.append(
            Instr("mac_conv", {
                "accumulate": int(number > 0), "push": int(last),
                "wgt": bank if sign > 0 else 3 * bank,
                "k_h": 256, "c_rows": array, "c_last": array, "wgt_pitch": 4,
            })
        )  # fmt: skip
    program += [
        Instr("vec_drain", {"raw": 1, "dst": 2 * bank + 1024}),
        Instr("fence"),
        Instr("dma_store", {"ddr": 64, "sram": 2 * bank + 1024, "n0": 4, **STREAM}),
        Instr("halt"),
    ]
    assert depth * 127 * 127 * len(calls) < 2**62
    FunctionalSimulator(hardware).run(program, ddr)
    return int(ddr[64:68].view("<i4")[0])


def test_accumulators_wrap_or_saturate_step_by_step() -> None:
    step = 8 * 127 * 127
    wrapping = TINY.model_copy(update={"mac_saturation": False})
    repeats = 2**31 // (256 * step) + 1
    exact = repeats * 256 * step
    assert exact > 2**31
    assert accumulation(wrapping, repeats, [1]) == wrap32(exact)
    assert accumulation(TINY, repeats, [1]) == 2**31 - 1
    # Saturated on the way up, then down again: not the same as saturating the sum, 0.
    assert accumulation(TINY, repeats, [1, -1]) == 2**31 - 1 - exact
    assert accumulation(wrapping, repeats, [1, -1]) == 0
    assert accumulation(TINY, 2, [1]) == 2 * 256 * step


# Vector instructions, one at a time on random data.

SRC_A, SRC_B, DST, PARAM = 0, 1024, 4096, 8192


def vector_run(
    hardware: Hardware, instruction: Instr, data: np.ndarray[Any, Any], *, mult: list[int],
    shift: int, size: int, table: np.ndarray[Any, Any] | None = None, bias_bytes: bytes = b"",
) -> np.ndarray[Any, Any]:  # fmt: skip
    """Load `data` at SRAM 0, run the instruction, return `size` bytes from DST."""
    ddr = np.zeros(1 << 16, np.uint8)
    ddr[: data.nbytes] = data.view(np.uint8).ravel()
    block = parameter_block(
        hardware.vector_lanes, np.zeros(1), np.array(mult), np.full(hardware.vector_lanes, shift)
    )
    if bias_bytes:
        block = bias_bytes.ljust(4 * hardware.vector_lanes, b"\0") + block[len(bias_bytes) :]
        block = block[: 4 * hardware.vector_lanes]
    ddr[1 << 14 : (1 << 14) + len(block)] = np.frombuffer(block, np.uint8)
    if table is not None:
        ddr[1 << 15 : (1 << 15) + 256] = table.view(np.uint8)
    param = {"src": PARAM, "param": 5, "v": 3, "bias_only": int(bool(bias_bytes))}
    program = [
        Instr("dma_load", {"ddr": 0, "n0": data.view(np.uint8).size, **STREAM}),
        Instr("dma_load", {"ddr": 1 << 14, "sram": PARAM, "n0": len(block), **STREAM}),
        Instr("dma_load", {"ddr": 1 << 15, "sram": PARAM + 4096, "n0": 256, **STREAM}),
        Instr("dma_fill", {"sram": DST, "n0": size, "fill": 0x77}),
        Instr("fence"),
        Instr("vec_param", param),
        Instr("vec_table", {"src": PARAM + 4096, "v": 8}),
        instruction,
        Instr("fence"),
        Instr("dma_store", {"ddr": 1 << 13, "sram": DST, "n0": size, **STREAM}),
        Instr("halt"),
    ]
    FunctionalSimulator(hardware).run(program, ddr)
    return ddr[1 << 13 : (1 << 13) + size]


def random_codes(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(-128, 128, shape).astype(np.int8)


@pytest.mark.parametrize("hardware", [TINY, EDGE, V2], ids=lambda hardware: hardware.name)
@pytest.mark.parametrize("op", range(5))
@pytest.mark.parametrize("scalar", [0, 1])
def test_eltwise_equals_python_integers(hardware: Hardware, op: int, scalar: int) -> None:
    data = random_codes(op, 2048)
    n2, n1, n0 = 2, 3, 5
    shift = 31 if op < 2 else 38
    f = {"op": op, "a": SRC_A, "b": SRC_B, "dst": DST, "n0": n0, "n1": n1, "n2": n2, "a_s1": 7,
         "a_s2": 40, "b_s1": 0, "b_s2": 11, "dst_s1": 5, "dst_s2": 15, "za": -7, "zb": 100,
         "param": 5, "bias": -257, "bias_shift": shift - 3, "zp": 9, "lo": -90, "hi": 101,
         "b_scalar": scalar}  # fmt: skip
    mult = [2**30 + 12345, 2**29 + 17]
    got = vector_run(hardware, Instr("vec_eltwise", f), data, mult=mult, shift=shift, size=30).view(
        np.int8
    )
    for number, (i2, i1, i0) in enumerate(itertools.product(range(n2), range(n1), range(n0))):
        a = int(data[SRC_A + i2 * 40 + i1 * 7 + i0])
        b = int(data[SRC_B + i2 * 11 + (0 if scalar else i0)])
        if op == 3:
            want = max(a, b)
        elif op == 4:
            want = min(a, b)
        else:
            x, y = a + 7, b - 100
            value = x * mult[0] + (y if op == 0 else -y) * mult[1]
            if op == 2:
                value = x * y * mult[0]
            value += -257 * 2 ** (shift - 3)
            want = clamp(rshift(value, shift, hardware.rounding) + 9, -90, 101)
        assert got[number] == want, (number, a, b)


@pytest.mark.parametrize("requantise", [0, 1])
@pytest.mark.parametrize("use_table", [0, 1])
def test_copy_permutes_requantises_and_looks_up(requantise: int, use_table: int) -> None:
    data = random_codes(1, 512)
    table = random_codes(2, 256)
    counts = (2, 3, 4, 5)
    src, dst = (200, 1, 24, 4), (60, 20, 1, 4)
    f = {
        "src": 3,
        "dst": DST,
        "za": 11,
        "param": 5,
        "zp": -5,
        "v_table": 8,
        "requantise": requantise,
        "use_table": use_table,
        "bias": 3,
        "bias_shift": 30,
    }
    for axis in range(4):
        f[f"n{3 - axis}"] = counts[axis]
        f[f"src_s{3 - axis}"], f[f"dst_s{3 - axis}"] = src[axis], dst[axis]
    got = vector_run(
        TINY, Instr("vec_copy", f), data, mult=[2**30 + 3], shift=31, size=120, table=table
    ).view(np.int8)
    for index in itertools.product(*map(range, counts)):
        code = int(data[3 + sum(i * s for i, s in zip(index, src, strict=True))])
        if requantise:
            value = (code - 11) * (2**30 + 3) + 3 * 2**30
            code = clamp(rshift(value, 31, "half_up") - 5, -128, 127)
        if use_table:
            code = int(table[code + 128])
        assert got[sum(i * s for i, s in zip(index, dst, strict=True))] == code


def test_pool_takes_the_maximum_of_the_window() -> None:
    data = random_codes(4, 6, 7, 8)
    f = {
        "src": 0,
        "dst": DST,
        "n0": 6,
        "out_h": 2,
        "out_w": 3,
        "k_h": 3,
        "k_w": 2,
        "src_sy": 2 * 56,
        "src_sx": 16,
        "ky_stride": 56,
        "kx_stride": 8,
        "dst_sy": 18,
        "dst_sx": 6,
    }
    got = vector_run(TINY, Instr("vec_pool", f), data, mult=[1], shift=0, size=36)
    got = got.view(np.int8).reshape(2, 3, 6)
    for y, x in itertools.product(range(2), range(3)):
        window = data[2 * y : 2 * y + 3, 2 * x : 2 * x + 2, :6]
        np.testing.assert_array_equal(got[y, x], window.max((0, 1)))


def test_resize_interpolates_between_neighbours() -> None:
    rng = np.random.default_rng(0)
    image = random_codes(3, 4, 5, 8)
    rows = np.stack([rng.integers(0, 4, 6), rng.integers(0, 4, 6)], 1)
    cols = np.stack([rng.integers(0, 5, 7), rng.integers(0, 5, 7)], 1)
    wy = rng.integers(-200, 2249, 6)
    wx = rng.integers(0, 2049, 7)
    tables = [
        np.concatenate([index, np.stack([2048 - w, w], 1)], 1).astype("<i2")
        for index, w in ((rows, wy), (cols, wx))
    ]
    data = np.zeros(1024, np.int8)
    data[:160] = image.ravel()
    data[512:560] = tables[0].view(np.int8).ravel()
    data[768:824] = tables[1].view(np.int8).ravel()
    f = {
        "src": 0,
        "table_y": 512,
        "table_x": 768,
        "dst": DST,
        "n0": 8,
        "out_h": 6,
        "out_w": 7,
        "in_h": 4,
        "in_w": 5,
        "src_sy": 40,
        "src_sx": 8,
        "dst_sy": 56,
        "dst_sx": 8,
        "za": 5,
        "param": 5,
        "zp": 4,
        "bias": 257,
        "bias_shift": 40,
    }
    mult = 2**27 + 99
    got = vector_run(TINY, Instr("vec_resize", f), data, mult=[mult], shift=49, size=336)
    got = got.view(np.int8).reshape(6, 7, 8)
    for y, x, c in itertools.product(range(6), range(7), range(8)):
        value = 0
        for i, j in itertools.product(range(2), range(2)):
            code = int(image[rows[y, i], cols[x, j], c]) - 5
            value += code * int(tables[0][y, 2 + i]) * int(tables[1][x, 2 + j])
        value = value * mult + 257 * 2**40
        assert got[y, x, c] == clamp(rshift(value, 49, "half_up") + 4, -128, 127)


def test_resize_refuses_an_index_outside_the_source() -> None:
    data = np.zeros(64, np.int8)
    data[32:34] = np.array([3], "<i2").view(np.int8)
    f = {"src": 0, "table_y": 32, "table_x": 40, "dst": DST, "in_h": 3, "param": 5}
    with pytest.raises(TilewrightError, match="table_y: index 3 must be below 3"):
        vector_run(TINY, Instr("vec_resize", f), data, mult=[1], shift=0, size=4)


def test_load_pads_and_keeps_gaps() -> None:
    ddr = np.arange(256, dtype=np.uint8)
    program = [
        Instr("dma_fill", {"sram": 64, "n0": 200, "fill": 0x11}),
        Instr("dma_load", {"ddr": 10, "sram": 64, "n0": 3, "n1": 2, "n2": 2, "n3": 2, "ddr_s1": 4,
                           "ddr_s2": 16, "ddr_s3": 64, "sram_s1": 4, "sram_s2": 20, "sram_s3": 100,
                           "pad1_lo": 1, "pad1_hi": 2, "pad2_lo": 1, "pad2_hi": 1, "fill": 0xEE,
                           **STREAM}),
        Instr("dma_store", {"ddr": 0, "sram": 64, "n0": 200, **STREAM}),
        Instr("halt"),
    ]  # fmt: skip
    memory = ddr.copy()
    FunctionalSimulator(TINY).run(program, memory)
    want = np.full(200, 0x11, np.uint8)
    for i3, r2, r1, byte in itertools.product(range(2), range(4), range(5), range(3)):
        i2, i1 = r2 - 1, r1 - 1
        inside = 0 <= i2 < 2 and 0 <= i1 < 2
        source = 10 + 64 * i3 + 16 * i2 + 4 * i1 + byte
        want[100 * i3 + 20 * r2 + 4 * r1 + byte] = ddr[source] if inside else 0xEE
    np.testing.assert_array_equal(memory[:200], want)
    np.testing.assert_array_equal(memory[200:], ddr[200:])


def test_loops_and_registers() -> None:
    ddr = np.arange(256, dtype=np.uint8)
    program = [
        Instr("set_reg", {"rd": 3, "value": 8}),
        Instr("loop", {"count": 3}),
        Instr("loop", {"count": 2}),
        Instr("dma_load", {"ddr": 0, "ddr_r": 3, "sram": 100, "sram_r": 4, "n0": 4, **STREAM}),
        Instr("add_reg", {"rd": 3, "value": 8}),
        Instr("add_reg", {"rd": 4, "value": 4}),
        Instr("end_loop"),
        Instr("add_reg", {"rd": 3, "value": -4}),
        Instr("end_loop"),
        Instr("dma_store", {"ddr": 0, "ddr_r": 1, "sram": 100, "n0": 24, **STREAM}),
        Instr("halt"),
    ]
    result = FunctionalSimulator(TINY).run(program, ddr, registers={1: 128})
    starts = [8, 16, 20, 28, 32, 40]
    want = [start + byte for start in starts for byte in range(4)]
    assert ddr[128:152].tolist() == want
    assert result.instructions == 1 + 1 + 3 * (1 + 2 * 4 + 1 + 1) + 2


def fp16_case(values: np.ndarray[Any, Any], weights: np.ndarray[Any, Any], function: int) -> Any:
    bank = V2.bank_size
    pixels, depth, outputs = values.shape[0], values.shape[1], weights.shape[1]
    ddr = np.zeros(1 << 16, np.uint8)
    for place, image in (
        (0, values.astype(np.float16)),
        (1 << 13, weights.astype(np.float16)),
        (1 << 14, np.linspace(-1, 1, V2.vector_lanes, dtype=np.float32)),
        ((1 << 14) + 512, np.array([-3.0, 60000.0], np.float32)),
    ):
        raw = image.view(np.uint8).ravel()
        ddr[place : place + raw.size] = raw
    program = [
        Instr("dma_load", {"ddr": 0, "n0": 8192, **STREAM}),
        Instr("dma_load", {"ddr": 1 << 13, "sram": bank, "n0": 8192, **STREAM}),
        Instr("dma_load", {"ddr": 1 << 14, "sram": 2 * bank, "n0": 1024, **STREAM}),
        Instr("fence"),
        Instr("vec_param", {"src": 2 * bank, "count": 2, "bias_only": 1, "v": 7}),
        Instr("mac_conv", {"dtype": 2, "wgt": bank, "out_w": pixels, "ox_stride": 2 * depth,
                           "c_rows": depth, "c_last": depth, "cols": outputs,
                           "cols_last": outputs, "wgt_pitch": 2 * outputs}),
        Instr("vec_drain", {"dtype": 2, "dst": 3 * bank, "out_w": pixels,
                            "ox_stride": 2 * outputs, "cols": outputs, "cols_last": outputs,
                            "v": 7, "v_clamp": 8, "function": function}),
        Instr("fence"),
        Instr("dma_store", {"ddr": 1 << 15, "sram": 3 * bank, "n0": 2 * pixels * outputs,
                            **STREAM}),
        Instr("halt"),
    ]  # fmt: skip
    FunctionalSimulator(V2).run(program, ddr)
    size = 2 * pixels * outputs
    return ddr[1 << 15 : (1 << 15) + size].view(np.float16).reshape(pixels, outputs)


def test_fp16_product_bias_function_and_clamp() -> None:
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=(5, 24)), rng.normal(size=(24, 6))
    exact = values.astype(np.float16).astype(float) @ weights.astype(np.float16).astype(float)
    exact += np.linspace(-1, 1, V2.vector_lanes, dtype=np.float32)[:6]
    got = fp16_case(values, weights, 0).astype(float)
    np.testing.assert_allclose(got, np.clip(exact, -3, 60000), rtol=2e-3, atol=2e-3)
    got = fp16_case(values, weights, 5).astype(float)
    np.testing.assert_allclose(got, np.tanh(exact), rtol=2e-3, atol=2e-3)


def test_fp16_results_that_are_not_finite_are_errors() -> None:
    with pytest.raises(TilewrightError, match="overflows or is not a number"):
        fp16_case(np.full((1, 24), -1.0), np.ones((24, 6)), FUNCTIONS.index("sqrt"))
    assert fp16_case(np.full((1, 24), 4096.0), np.full((24, 6), 4096.0), 0).max() == 60000


def test_int4_weights_are_signed_nibbles_low_first() -> None:
    bank = V2.bank_size
    rng = np.random.default_rng(1)
    x = rng.integers(-128, 128, 6).astype(np.int8)
    w = rng.integers(-8, 8, (6, 5))
    packed = np.zeros((6, 4), np.uint8)
    for row, col in itertools.product(range(6), range(5)):
        packed[row, col // 2] |= (int(w[row, col]) & 15) << 4 * (col % 2)
    ddr = np.zeros(4096, np.uint8)
    ddr[:6] = x.view(np.uint8)
    ddr[512:536] = packed.ravel()
    program = [
        Instr("dma_load", {"ddr": 0, "n0": 6, **STREAM}),
        Instr("dma_load", {"ddr": 512, "sram": bank, "n0": 24, **STREAM}),
        Instr("dma_fill", {"sram": 2 * bank, "n0": 512}),
        Instr("fence"),
        Instr("vec_param", {"src": 2 * bank, "bias_only": 1}),
        Instr("mac_conv", {"dtype": 1, "wgt": bank, "c_rows": 6, "c_last": 6, "cols": 5,
                           "cols_last": 5, "wgt_pitch": 4}),
        Instr("vec_drain", {"raw": 1, "dst": 3 * bank, "cols": 5, "cols_last": 5}),
        Instr("fence"),
        Instr("dma_store", {"ddr": 1024, "sram": 3 * bank, "n0": 20, **STREAM}),
        Instr("halt"),
    ]  # fmt: skip
    FunctionalSimulator(V2).run(program, ddr)
    assert ddr[1024:1044].view("<i4").tolist() == (x.astype(int) @ w).tolist()


@pytest.mark.parametrize("order", ["program", "random"])
@pytest.mark.parametrize("hardware", [TINY, V2], ids=lambda hardware: hardware.name)
def test_a_split_reduction_equals_the_whole(hardware: Hardware, order: Any) -> None:
    case = conv_case(hardware, 9, block_rows=2)
    position = next(i for i, instr in enumerate(case.program) if instr.name == "mac_conv")
    whole = case.program[position].fields
    first = {**whole, "k_h": 1, "push": 0, "m_half": 1}
    rest = {**whole, "k_h": 2, "accumulate": 1, "m_half": 1, "wait": 0}
    rest["act"] += whole["ky_stride"]
    rest["wgt"] += whole["k_w"] * whole["c_last"] * whole["wgt_pitch"]
    case.program[position : position + 1] = [Instr("mac_conv", first), Instr("mac_conv", rest)]
    case.program[position + 2].fields["m_half"] = 1
    FunctionalSimulator(hardware).run(case.program, case.ddr, order=order, seed=1)
    np.testing.assert_array_equal(output(case), case.expected)


def test_the_drain_applies_the_table_last() -> None:
    table = random_codes(8, 256)
    case = conv_case(TINY, 2)
    case.ddr[40000:40256] = table.view(np.uint8)
    load = Instr("dma_load", {"ddr": 40000, "sram": 3 * TINY.bank_size + 4096, "n0": 256, **STREAM})
    case.program[:0] = [
        load,
        Instr("fence"),
        Instr("vec_table", {"src": load.fields["sram"], "v": 20}),
    ]
    drain = next(instr for instr in case.program if instr.name == "vec_drain")
    drain.fields |= {"use_table": 1, "v_table": 20}
    FunctionalSimulator(TINY).run(case.program, case.ddr)
    np.testing.assert_array_equal(output(case), table[case.expected.astype(int) + 128])


def halves(seed: int, count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=count).astype(np.float16)


CLAMP = np.array([-1.5, 2.0], np.float32).tobytes()


@pytest.mark.parametrize(
    ("op", "function"),
    [(0, np.add), (1, np.subtract), (2, np.multiply), (3, np.maximum), (4, np.minimum)],
)
def test_fp16_eltwise_is_float32_rounded_once(op: int, function: Any) -> None:
    data = halves(op, 1024)
    f = {"dtype": 2, "op": op, "b": SRC_B, "dst": DST, "n0": 5, "n1": 3, "a_s1": 12, "b_s1": 0,
         "dst_s1": 10, "v_clamp": 3}  # fmt: skip
    got = vector_run(
        V2, Instr("vec_eltwise", f), data, mult=[1], shift=0, size=30, bias_bytes=CLAMP
    ).view(np.float16)
    a = np.stack([data[6 * run : 6 * run + 5] for run in range(3)]).astype(np.float32)
    b = data[512:517].astype(np.float32)
    want = np.clip(function(a, b), -1.5, 2.0).astype(np.float16)
    np.testing.assert_array_equal(got.reshape(3, 5), want)


@pytest.mark.parametrize("requantise", [0, 1])
def test_fp16_copy_applies_function_then_clamp(requantise: int) -> None:
    data = halves(0, 64)
    f = {"dtype": 2, "dst": DST, "n0": 4, "n1": 8, "src_s0": 2, "src_s1": 8, "dst_s0": 16,
         "dst_s1": 2, "v_clamp": 3, "requantise": requantise,
         "function": FUNCTIONS.index("hard_swish")}  # fmt: skip
    got = vector_run(
        V2, Instr("vec_copy", f), data, mult=[1], shift=0, size=64, bias_bytes=CLAMP
    ).view(np.float16)
    x = data[:32].astype(np.float64)
    y = x * np.clip(x / 6 + 0.5, 0, 1)
    if requantise:
        y = np.clip(y, -1.5, 2.0)
    np.testing.assert_allclose(got.reshape(4, 8).T.ravel(), y, rtol=1e-3, atol=1e-6)


def test_fp16_pool() -> None:
    data = halves(3, 64)
    f = {"dtype": 2, "dst": DST, "n0": 4, "out_w": 3, "k_w": 2, "src_sx": 16, "kx_stride": 8,
         "dst_sx": 8}  # fmt: skip
    got = vector_run(V2, Instr("vec_pool", f), data, mult=[1], shift=0, size=24).view(np.float16)
    want = data[:24].reshape(3, 2, 4).max(1)
    np.testing.assert_array_equal(got.reshape(3, 4), want)


def test_float_functions_against_the_standard_library() -> None:
    x = np.linspace(-6, 6, 241, dtype=np.float32)
    positive = np.abs(x) + np.float32(0.1)
    cases: dict[str, tuple[np.ndarray[Any, Any], Any]] = {
        "sigmoid": (x, lambda v: 1 / (1 + math.exp(-v))),
        "silu": (x, lambda v: v / (1 + math.exp(-v))),
        "tanh": (x, math.tanh),
        "gelu": (x, lambda v: 0.5 * v * (1 + math.erf(v / math.sqrt(2)))),
        "exp": (x, math.exp),
        "reciprocal": (positive, lambda v: 1 / v),
        "rsqrt": (positive, lambda v: 1 / math.sqrt(v)),
        "sqrt": (positive, math.sqrt),
        "hard_sigmoid": (x, lambda v: min(max(v / 6 + 0.5, 0.0), 1.0)),
        "hard_swish": (x, lambda v: v * min(max(v / 6 + 0.5, 0.0), 1.0)),
        "none": (x, lambda v: v),
    }
    assert set(cases) == set(FUNCTIONS)
    for name, (values, function) in cases.items():
        want = [function(float(value)) for value in values]
        np.testing.assert_allclose(float_function(name, values), want, rtol=1e-6, atol=1e-6)


# Errors of the machine.

CONV = {"wgt": 8192, "c_rows": 8, "c_last": 8, "wgt_pitch": 4}
ERRORS: list[tuple[list[Instr], str]] = [
    ([Instr("dma_load", {"ddr": 4090, "n0": 64, **STREAM}, "c"), Instr("halt")],
     'layer "c": instruction 0 (dma_load) on dma0: ddr: bytes 0xffa..0x1039 must lie in DDR'),
    ([Instr("dma_fill", {"sram": 32760, "n0": 16})], "must lie in SRAM"),
    ([Instr("vec_copy", {"n0": 16000, "n1": 16000, "n2": 4, "src_s0": 1, "src_s1": 1, "dst": 32700,
                         "dst_s0": 0})], "the runs it writes must not overlap each other"),
    ([Instr("dma_fill", {"channel": 2})], "channel must be 0..1, not 2"),
    ([Instr("dma_load", {"n0": 300})], "length 300 not divisible by burst_size 64"),
    ([Instr("vec_drain"), Instr("halt")], "deadlock: it waits for all engines"),
    ([Instr("mac_conv", CONV), Instr("halt")], "1 pushed mac_conv were never drained"),
    ([Instr("mac_conv", {**CONV, "accumulate": 1})], "half 0 of the M registers, which holds noth"),
    ([Instr("mac_conv", {**CONV, "push": 0}),
      Instr("mac_conv", {**CONV, "accumulate": 1, "out_w": 2}), Instr("halt")],
     "accumulate reads 2 pixels x 1 columns of half 0, which holds 1 x 1"),
    ([Instr("mac_conv", CONV), Instr("vec_drain", {"out_w": 2, "ox_stride": 1})],
     "out_w must be 1 as in the mac"),
    ([Instr("mac_conv", CONV), Instr("vec_drain", {})], "V0 is read but was never written"),
    ([Instr("vec_eltwise", {"a": 0, "b": 64, "dst": 128})], "entry 0 is read but was never"),
    ([Instr("vec_pool", {"dst": 64, "wait": 1 << 9}, "p"), Instr("halt")], "deadlock"),
    ([Instr("fence", {"wait": 1})], "deadlock: it waits for a semaphore"),
    ([Instr("loop"), Instr("halt")], "the loop has no end"),
    ([Instr("end_loop"), Instr("halt")], "there is no open loop"),
    ([Instr("loop")] * 5 + [Instr("end_loop")] * 5, "at most 4 deep"),
    ([Instr("set_reg", {"rd": 0}), Instr("halt")], "rd must be R1..R15, not R0"),
    ([Instr("dma_fill", {"sram_r": 16}), Instr("halt")], "sram_r must be R0..R15, not R16"),
    ([Instr("fence")], "the program has no `halt`"),
    ([Instr("loop", {"count": 65536}), Instr("fence", {"signal": 1}), Instr("end_loop"),
      Instr("halt")], "semaphore 0 overflows 65535"),
]  # fmt: skip


@pytest.mark.parametrize(("program", "message"), ERRORS, ids=[text for _, text in ERRORS])
def test_broken_rules_name_instruction_engine_and_layer(program: list[Instr], message: str) -> None:
    with pytest.raises(TilewrightError) as error:
        FunctionalSimulator(TINY).run(program, np.zeros(4096, np.uint8))
    assert message in error.value.message
    assert error.value.code == "E0602"


def test_a_deadlock_names_what_each_engine_waits_for() -> None:
    program = [
        Instr("mac_conv", {**CONV, "out_h": 4, "wait": bit(DMA0, MAC)}, "a"),
        Instr("dma_fill", {"wait": bit(VEC, DMA0), "signal": bit(DMA0, MAC)}, "b"),
        Instr("vec_drain", {"out_h": 4, "oy_stride": 1}, "a"),
        Instr("halt"),
    ]
    with pytest.raises(TilewrightError, match="deadlock") as error:
        FunctionalSimulator(TINY).run(program, np.zeros(64, np.uint8))
    assert error.value.details == [
        f'dma0: instruction 1 (dma_fill) of layer "b" waits for semaphore {5 * VEC + DMA0}',
        f'mac: instruction 0 (mac_conv) of layer "a" waits for semaphore {5 * DMA0 + MAC - 1}',
        'vec: instruction 2 (vec_drain) of layer "a" waits for a mac_conv to push',
    ]


def test_more_blocks_than_halves_need_a_drain_that_can_run() -> None:
    blocks = {"out_h": 4, "block_rows": 1}
    program = [
        Instr("dma_fill", {"sram": 2048, "n0": 72}),
        Instr("fence"),
        Instr("vec_param", {"src": 2048, "count": 1}),
        Instr("mac_conv", {**CONV, **blocks, "signal": bit(MAC, VEC)}),
        Instr("vec_drain", {**blocks, "oy_stride": 1, "dst": 4096, "wait": bit(MAC, VEC)}),
        Instr("halt"),
    ]
    with pytest.raises(TilewrightError, match="deadlock"):
        FunctionalSimulator(TINY).run(program, np.zeros(64, np.uint8))
    program[4].fields["wait"] = program[3].fields["signal"] = 0
    FunctionalSimulator(TINY).run(program, np.zeros(64, np.uint8))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("order", ["program", "random"])
def test_a_drain_dispatched_before_its_mac_conv_waits_for_it(split: bool, order: Any) -> None:
    # Split: the mac_conv that pushes accumulates, so that its blocks are computed one by one.
    case = conv_case(TINY, 9, block_rows=2 if split else 1)
    position = next(i for i, instr in enumerate(case.program) if instr.name == "mac_conv")
    if split:
        whole = case.program[position].fields
        case.program.insert(position, Instr("mac_conv", {**whole, "k_h": 1, "push": 0}))
        rest = {**whole, "k_h": 2, "accumulate": 1, "wait": 0}
        rest["act"] += whole["ky_stride"]
        rest["wgt"] += whole["k_w"] * whole["c_last"] * whole["wgt_pitch"]
        position += 1
        case.program[position] = Instr("mac_conv", rest)
    conv, drain = case.program[position : position + 2]
    case.program[position : position + 2] = [drain, conv]
    names: list[str] = []
    FunctionalSimulator(TINY).run(
        case.program, case.ddr, order=order, seed=2, hook=lambda at, _: names.append(at.name)
    )
    np.testing.assert_array_equal(output(case), case.expected)
    convs = ["mac_conv"] * (1 + split)
    assert [n for n in names if n in ("mac_conv", "vec_drain")] == [*convs, "vec_drain"]


def test_what_one_chip_or_one_run_accepts_another_may_refuse() -> None:
    legal = [Instr("dma_fill", {"sram": EDGE.sram_size - 8, "n0": 8}), Instr("halt")]
    ddr = np.zeros(64, np.uint8)
    for _ in range(2):
        assert FunctionalSimulator(EDGE).run(legal, ddr).instructions == 2
        with pytest.raises(TilewrightError, match="must lie in SRAM"):
            FunctionalSimulator(TINY).run(legal, ddr)
    # Masks are no part of what is remembered; everything else is.
    legal[0].fields["sram"] += 1
    for _ in range(2):
        with pytest.raises(TilewrightError, match="must lie in SRAM"):
            FunctionalSimulator(EDGE).run(legal, ddr)


def test_a_bad_multiplier_or_shift_is_an_error() -> None:
    data = np.zeros(8, np.int8)
    for mult, shift, message in (([2**31], 3, "below 2\\^31"), ([5], 63, "shift 63 must be")):
        with pytest.raises(TilewrightError, match=message):
            vector_run(TINY, Instr("fence"), data, mult=mult, shift=shift, size=4)


def test_a_sum_that_may_leave_64_bits_is_an_error() -> None:
    data = np.zeros(128, np.int8)
    data[0] = 127
    for place in (32, 40):
        data[place : place + 8] = np.array([0, 0, 1024, 1024], "<i2").view(np.int8)
    f = {"table_y": 32, "table_x": 40, "dst": DST, "za": -128, "param": 5}

    def run(bias: int, bias_shift: int) -> int:
        fields = {**f, "bias": bias, "bias_shift": bias_shift}
        instr = Instr("vec_resize", fields)
        return int(vector_run(TINY, instr, data, mult=[2**31 - 1], shift=62, size=1)[0])

    # 255 * 2^22 * (2^31 - 1) is just below 2^61: a quarter of the divisor, and all but one more.
    assert run(0, 0) == 0
    assert run(511, 52) == 1
    with pytest.raises(TilewrightError, match="the sum before the shift may leave 64 bits"):
        run(511, 53)
    with pytest.raises(TilewrightError, match="must be below 2\\^62"):
        run(-512, 53)


def test_hook_sees_ddr_after_each_instruction() -> None:
    case = conv_case(TINY, 1)
    seen: list[tuple[str, int]] = []
    start, size = case.result

    def hook(instr: Any, state: Any) -> None:
        seen.append((instr.name, int(state.ddr[start : start + size].any())))

    FunctionalSimulator(TINY).run(case.program, case.ddr, hook=hook)
    assert [name for name, _ in seen][-2:] == ["vec_drain", "dma_store"]
    assert [stored for _, stored in seen] == [0] * (len(seen) - 1) + [1]


def test_strides_of_zero_cannot_ask_for_any_amount_of_memory() -> None:
    shape = {"out_h": 4096, "out_w": 1024, "oc_blocks": 64, "cols": 128, "cols_last": 128}
    program = [Instr("mac_conv", {**shape, "wgt": V2.bank_size}, "huge"), Instr("halt")]
    with pytest.raises(TilewrightError, match="4194304 pixels x 8192 columns are more than"):
        FunctionalSimulator(V2).run(program, np.zeros(64, np.uint8))


HUGE_KERNEL = {"k_h": 256, "k_w": 256, "c_blocks": 1024, "c_rows": 8, "c_last": 8}


@pytest.mark.parametrize("order", ["program", "random"])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (HUGE_KERNEL, "wgt: 536870912 rows x 8 columns are more than"),
        (HUGE_KERNEL | {"dtype": 1}, "wgt: 536870912 rows x 8 columns are more than"),
        (HUGE_KERNEL | {"oc_blocks": 2, "cols": 8}, "wgt: 536870912 rows x "),
        (HUGE_KERNEL | {"oc_blocks": 2, "cols": 8, "ob_stride": 1}, "wgt: 536870912 rows x "),
        ({"diag": 1, "k_h": 256, "k_w": 256, "c_blocks": 1024}, "wgt: 67108864 rows x 8 columns"),
        (
            {"k_h": 2, "k_w": 256, "c_blocks": 1024, "c_rows": 8, "c_last": 7, "out_w": 128},
            "act: 536805376 elements are more than",
        ),
    ],
)
def test_a_long_reduction_over_repeated_weights_is_refused(
    fields: dict[str, int], message: str, order: Any
) -> None:
    target = EDGE.model_copy(update={"dtypes": ("int8", "int4")})
    conv = {"wgt": EDGE.bank_size, "cols_last": 8, "wgt_pitch": 0, "push": 0, **fields}
    program = [Instr("mac_conv", conv, "huge"), Instr("halt")]
    with pytest.raises(TilewrightError, match=message) as caught:
        FunctionalSimulator(target).run(program, np.zeros(64, np.uint8), order=order, seed=1)
    assert caught.value.code == "E0602"
    assert 'layer "huge": instruction 0 (mac_conv) on mac' in caught.value.message
