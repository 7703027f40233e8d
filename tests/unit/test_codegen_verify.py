"""Every rule of the chip-level verifier, each with a program that breaks it."""

from __future__ import annotations

from copy import deepcopy
from time import perf_counter

import pytest

from tests.unit.sim_programs import DMA0, DMA1, MAC, VEC, bit, conv_case, pipeline, semaphore
from tilewright.codegen.verify import verify_program
from tilewright.diagnostics import TilewrightError
from tilewright.spec.hardware import Hardware, load_target
from tilewright.spec.program import Instr

TINY, V2 = load_target("tiny8"), load_target("tpu_v2")
HALT = Instr("halt")
STREAM = {"stream": 1}
BANK = TINY.bank_size
CONV = {"wgt": BANK, "c_rows": 8, "c_last": 8, "cols": 8, "cols_last": 8, "wgt_pitch": 8}
DRAIN = {"dst": 2 * BANK, "cols": 8, "cols_last": 8}


def refused(program: list[Instr], hardware: Hardware = TINY) -> TilewrightError:
    with pytest.raises(TilewrightError) as error:
        verify_program([*program, HALT], hardware)
    assert error.value.code == "E0501"
    return error.value


def test_correct_programs_pass() -> None:
    for hardware in (TINY, V2):
        summary = verify_program(conv_case(hardware, 1).program, hardware)
        assert summary.instructions == 8
        assert summary.ddr_high == (1 << 15) + 96
        verify_program(pipeline(hardware, 9), hardware)


SINGLE: list[tuple[Instr, str]] = [
    (Instr("jump"), "unknown instruction"),
    (Instr("fence", {"n0": 1}), "there is no field `n0`"),
    (Instr("loop", {"count": 0}), "count must be 1..65536, not 0"),
    (Instr("dma_load", {"n0": 300}), "length 300 not divisible by burst_size 64"),
    (Instr("dma_load", {"n0": 64, "ddr": 100}), "address 0x64 not divisible by burst_size 64"),
    (Instr("dma_store", {"n0": 64, "n1": 2, "ddr_s1": 100}), "stride 100 not divisible by burst_"),
    (Instr("dma_load", {"channel": 3, "n0": 64}), "channel must be 0..1, not 3"),
    (Instr("dma_fill", {"sram": 32767, "n0": 2}),
     "sram: bytes 0x7fff..0x8000 must lie in SRAM (0x0..0x7fff)"),
    (Instr("dma_load", {"n1": 256, "sram_s1": 256, **STREAM, "pad1_hi": 1}), "must lie in SRAM"),
    (Instr("dma_load", {"ddr": (1 << 32) - 1, "n0": 2, **STREAM}), "must lie in DDR"),
    (Instr("dma_load", {"ddr_r": 16, "n0": 64}), "ddr_r must be R0..R15, not R16"),
    (Instr("set_reg", {"rd": 0}), "rd must be R1..R15, not R0"),
    (Instr("mac_conv", {**CONV, "dtype": 2}), "dtype must be one of int8, not fp16"),
    (Instr("mac_conv", {**CONV, "c_last": 9}), "c_last must be 1..8 (the array), not 9"),
    (Instr("mac_conv", {**CONV, "c_blocks": 2, "c_rows": 9}), "c_rows must be 1..8"),
    (Instr("mac_conv", {**CONV, "cols_last": 9}), "cols_last must be 1..8"),
    (Instr("mac_conv", {**CONV, "oc_blocks": 2, "cols": 9}), "cols must be 1..8"),
    (Instr("mac_conv", {**CONV, "out_w": 65}),
     "block_rows * out_w must be at most 64 (a half of the M registers), not 65"),
    (Instr("mac_conv", {**CONV, "act": BANK + 512}), "must not share a bank of 8192 bytes"),
    (Instr("mac_conv", {**CONV, "out_h": 3, "push": 0}), "has at most 2 blocks, not 3"),
    (Instr("mac_conv", {**CONV, "accumulate": 1}), "which holds nothing"),
    (Instr("mac_conv", CONV), "its accumulators are pushed but never drained"),
    (Instr("vec_drain", DRAIN), "there is no mac_conv with push = 1 before it"),
    (Instr("vec_param", {"count": 2, "param": 15}), "2 entries from 15 must stay inside one bank"),
    (Instr("vec_param", {"count": 2, "v": 31}), "v: V31..V32 must lie in V0..V31"),
    (Instr("vec_table", {"v": 25}), "v: V25..V32 must lie in V0..V31"),
    (Instr("vec_copy", {"dst": 64, "use_table": 1, "v_table": 25}), "v_table: V25..V32"),
    (Instr("vec_copy", {"n0": 8, "src_s0": 1, "dst_s0": 1, "dst": 4}), "must not overlap src"),
    (Instr("vec_pool", {"n0": 8, "dst": 7}), "must not overlap src"),
    (Instr("vec_eltwise", {"lo": 5, "hi": 4, "dst": 9, "b": 4}), "lo must be at most hi (4)"),
    (Instr("vec_eltwise", {"bias": 511, "bias_shift": 54, "dst": 9, "b": 4}), "below 2^62"),
    (Instr("vec_pool", {"dtype": 1, "dst": 9}), "dtype must be one of int8, not int4"),
    (Instr("loop"), "the loop has no end"),
    (Instr("end_loop"), "there is no open loop"),
    (Instr("fence", {"wait": 4}), "waits for semaphore 2, which no earlier instruction signals"),
    (Instr("fence", {"signal": 4}), "semaphore 2 is signalled 1 times more than it is waited for"),
]  # fmt: skip


@pytest.mark.parametrize(("instr", "message"), SINGLE, ids=[text for _, text in SINGLE])
def test_limits_of_one_instruction(instr: Instr, message: str) -> None:
    error = refused([Instr(instr.name, instr.fields, "block3/conv2")])
    assert message in error.message
    assert "block3/conv2" in error.message
    assert instr.name in error.message


def test_params_and_dtypes_of_larger_targets() -> None:
    blocks = {"oc_blocks": 9}
    drain = [
        Instr("mac_conv", {**CONV, **blocks, "wgt": V2.bank_size, "wgt_ob_stride": 8}),
        Instr(
            "vec_drain", {**DRAIN, **blocks, "ob_stride": 8, "dst": 5 * V2.bank_size, "param": 56}
        ),
    ]
    assert "param: entries 56..64 must lie in 0..63" in refused(drain, V2).message
    assert "int4 is a type of weights" in refused([Instr("vec_copy", {"dtype": 1})], V2).message


def test_the_burst_message_is_the_documents() -> None:
    error = refused([Instr("dma_load", {"n0": 300}, "conv1")], V2)
    assert str(error) == (
        'error[E0501]: layer "conv1": instruction 0 (dma_load): '
        "length 300 not divisible by burst_size 256\n"
        "hint: use stream mode, or pad to a multiple of 256 bytes"
    )


@pytest.mark.parametrize(
    "field", ["out_h", "out_w", "block_rows", "oc_blocks", "cols", "cols_last", "m_half"]
)
def test_a_drain_has_the_geometry_of_its_mac_conv(field: str) -> None:
    shape = {"out_h": 2, "out_w": 2, "block_rows": 2, "oc_blocks": 2}
    conv = Instr("mac_conv", {**CONV, **shape, "wgt_ob_stride": 64}, "a")
    strides = {"ob_stride": 8, "ox_stride": 16, "oy_stride": 32}
    drain = Instr("vec_drain", {**DRAIN, **shape, **strides}, "b")
    drain.fields[field] = 1
    assert f"{field} must be " in refused([conv, drain]).message


def test_a_drain_must_not_write_what_its_mac_conv_reads() -> None:
    program = [
        Instr("mac_conv", {**CONV, "act": 2 * BANK}, "a"),
        Instr("vec_drain", {**DRAIN, "dst": 2 * BANK + 7}, "a"),
    ]
    assert "dst overlaps act of the mac_conv it drains" in refused(program).message


def test_accumulating_needs_the_same_shape() -> None:
    program = [
        Instr("mac_conv", {**CONV, "push": 0, "out_w": 3}, "a"),
        Instr("mac_conv", {**CONV, "accumulate": 1, "out_w": 2}, "b"),
    ]
    assert "accumulate reads 2 pixels x 8 columns of half 0, which holds 3 x 8" in (
        refused(program).message
    )


# Order.


def test_read_after_write() -> None:
    error = refused([
        Instr("dma_load", {"sram": 100, "n0": 64, **STREAM}, "early"),
        Instr("vec_pool", {"src": 163, "dst": 4096}, "late"),
    ])  # fmt: skip
    assert error.message == (
        'layer "late": instruction 1 (vec_pool): src: it may read SRAM near 0xa3 before '
        'instruction 0 (dma_load) of layer "early" has wrote it'
    ).replace("has wrote", "has written")
    assert "dma0 and vec are not ordered here by a semaphore" in error.details


def test_write_after_read_and_write_after_write() -> None:
    store = Instr("dma_store", {"sram": 64, "n0": 64, "ddr": 1 << 20, **STREAM}, "early")
    fill = Instr("dma_fill", {"sram": 64, "n0": 4, "channel": 1}, "late")
    assert "it may write SRAM near 0x40 before instruction 0 (dma_store)" in (
        refused([store, fill]).message
    )
    other = Instr("dma_fill", {"sram": 64, "n0": 4}, "early")
    assert "it may write SRAM near 0x40 before instruction 0 (dma_fill)" in (
        refused([other, fill]).message
    )
    verify_program([store, Instr("fence"), fill, HALT], TINY)


def test_ddr_is_ordered_too() -> None:
    store = Instr("dma_store", {"ddr": 4096, "ddr_r": 2, "n0": 64}, "early")
    load = Instr("dma_load", {"ddr": 4159, "ddr_r": 2, "n0": 1, "channel": 1, "sram": 64, **STREAM})
    assert "it may read DDR near" in refused([store, load]).message
    constants = deepcopy(load)
    constants.fields["ddr_r"] = 1
    verify_program([store, constants, HALT], TINY)
    next_to = deepcopy(load)
    next_to.fields["ddr"] = 4160
    verify_program([store, next_to, HALT], TINY)


def test_interleaved_regions_do_not_conflict() -> None:
    runs = {"n0": 4, "n1": 16, "sram_s1": 8}
    program = [
        Instr("dma_fill", {**runs, "sram": 0}),
        Instr("dma_fill", {**runs, "sram": 4, "channel": 1}),
    ]
    verify_program([*program, HALT], TINY)
    program[1].fields["sram"] = 3
    assert "near 0x3 " in refused(program).message


def test_order_is_transitive_through_engines() -> None:
    program = [
        Instr("dma_fill", {"sram": 0, "n0": 8, "signal": bit(DMA0, VEC)}, "a"),
        Instr("vec_pool", {"src": 512, "dst": 1024, "wait": bit(DMA0, VEC),
                           "signal": bit(VEC, DMA1)}, "b"),
        Instr("dma_fill", {"sram": 0, "n0": 8, "channel": 1, "wait": bit(VEC, DMA1)}, "c"),
    ]  # fmt: skip
    verify_program([*program, HALT], TINY)
    program[0].fields["signal"] = program[1].fields["wait"] = 0
    assert 'layer "c"' in refused(program).message


def test_a_drain_completes_after_its_mac_conv() -> None:
    # The vector unit's signal tells that the activations have been read.
    program = [
        Instr("mac_conv", CONV, "a"),
        Instr("vec_drain", {**DRAIN, "signal": bit(VEC, DMA0)}, "a"),
        Instr("dma_fill", {"sram": 0, "n0": 8, "wait": bit(VEC, DMA0)}, "b"),
    ]
    verify_program([*program, HALT], TINY)
    # A vector instruction before the drain does not.
    program.insert(1, Instr("vec_pool", {"src": 512, "dst": 1024, "signal": bit(VEC, DMA0)}, "p"))
    program[2].fields["signal"] = 0
    assert "it may write SRAM near 0x0 before instruction 0 (mac_conv)" in refused(program).message


@pytest.mark.parametrize("verb", ["waited for", "signalled"])
def test_a_semaphore_has_one_producer_and_one_consumer(verb: str) -> None:
    number = semaphore(DMA0, VEC)
    fills = [
        Instr("dma_fill", {"sram": 64 * i, "channel": i, "signal": 1 << number}, "f")
        for i in range(2)
    ]
    pools = [Instr("vec_pool", {"src": 4096, "dst": 5000, "wait": 1 << number}, "p")] * 2
    if verb == "waited for":
        fills[1].fields["channel"] = 0
        pools[1] = Instr("dma_fill", {"sram": 999, "channel": 1, "wait": 1 << number}, "q")
    assert f"semaphore {number} must be {verb} by one engine" in refused([*fills, *pools]).message


# Progress.


def test_a_drain_that_waits_for_its_own_mac_conv_is_a_deadlock() -> None:
    shape = {"out_h": 3}
    program = [
        Instr("mac_conv", {**CONV, **shape, "signal": bit(MAC, VEC)}, "a"),
        Instr("vec_drain", {**DRAIN, **shape, "oy_stride": 8, "wait": bit(MAC, VEC)}, "a"),
    ]
    error = refused(program)
    assert "deadlock" in error.message
    assert len(error.details) == 2
    for instr in program:
        instr.fields["out_h"] = 2
    verify_program([*program, HALT], TINY)


def test_drains_out_of_the_queues_reach_are_a_deadlock() -> None:
    def rounds(count: int) -> list[Instr]:
        convs = [Instr("mac_conv", {**CONV, "m_half": i % 2}, "a") for i in range(count)]
        return [*convs, *(Instr("vec_drain", {**DRAIN, "m_half": i % 2}) for i in range(count))]

    # Two halves are full, one instruction waits on the engine, `queue_depth` in its queue.
    verify_program([*rounds(TINY.queue_depth + 3), HALT], TINY)
    assert "the queue of mac is full" in refused(rounds(TINY.queue_depth + 4)).message


def test_loops_are_unrolled() -> None:
    body = [
        Instr("loop", {"count": 3}),
        Instr("dma_fill", {"sram": 32760, "sram_r": 5, "n0": 4}),
        Instr("add_reg", {"rd": 5, "value": 4}),
        Instr("end_loop"),
    ]
    assert "bytes 0x8000..0x8003 must lie in SRAM" in refused(body).message
    body[0].fields["count"] = 2
    assert verify_program([*body, HALT], TINY).instructions == 8


def test_twenty_thousand_instructions_take_seconds() -> None:
    program = pipeline(V2, 4000)
    start = perf_counter()
    verify_program(program, V2)
    assert perf_counter() - start < 20  # 2 s on an idle machine
