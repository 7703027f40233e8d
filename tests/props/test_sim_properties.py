"""Properties of the simulators: arithmetic on any operands, order independence, time bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.sim_programs import (
    conv_case,
    parameter_block,
    pipeline,
    rshift,
    semaphore,
)
from tilewright.codegen.verify import verify_program
from tilewright.diagnostics import TilewrightError
from tilewright.sim.cycle import CycleSimulator
from tilewright.sim.functional import FunctionalSimulator
from tilewright.sim.numeric import shift_round
from tilewright.spec.hardware import Hardware, load_target
from tilewright.spec.program import Instr

TINY, EDGE, V2 = load_target("tiny8"), load_target("edge16"), load_target("tpu_v2")
ROUNDINGS = ("half_up", "half_away", "half_even", "truncate")

near_ties = st.integers(0, 62).flatmap(
    lambda shift: st.tuples(
        st.just(shift),
        st.one_of(
            st.integers(-(2**62) + 1, 2**62 - 1),
            # k + 1/2 and its neighbours, both signs.
            st.tuples(st.integers(-500, 500), st.integers(-1, 1)).map(
                lambda pair: max(
                    min(pair[0] * 2**shift + 2**shift // 2 + pair[1], 2**62 - 1), -(2**62) + 1
                )
            ),
        ),
    )
)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@given(st.lists(near_ties, min_size=1, max_size=8))
def test_rounding_shift_equals_python_integers(rounding: str, cases: list[tuple[int, int]]) -> None:
    value = np.array([value for _, value in cases], np.int64)
    shift = np.array([shift for shift, _ in cases], np.int64)
    got = shift_round(value, shift, rounding)
    assert got.tolist() == [rshift(value, shift, rounding) for shift, value in cases]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    hardware=st.sampled_from((TINY, EDGE, V2)),
    rounding=st.sampled_from(ROUNDINGS),
    channels=st.integers(1, 40),
    outputs=st.integers(1, 40),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    size=st.tuples(st.integers(4, 7), st.integers(4, 7)),
    depthwise=st.booleans(),
    block_rows=st.integers(1, 4),
)
def test_any_convolution_in_any_order_equals_plain_loops(
    seed: int,
    hardware: Hardware,
    rounding: Any,
    channels: int,
    outputs: int,
    kernel: int,
    stride: int,
    size: tuple[int, int],
    depthwise: bool,
    block_rows: int,
) -> None:
    hardware = hardware.model_copy(update={"rounding": rounding})
    channels = min(channels, 24 if hardware.sram_size < 1 << 16 else 40)
    outputs = min(outputs, 24)
    case = conv_case(
        hardware,
        seed,
        height=size[0],
        width=size[1],
        channels=channels,
        outputs=outputs,
        kernel=kernel,
        stride=stride,
        depthwise=depthwise,
        block_rows=block_rows,
    )
    verify_program(case.program, hardware, registers={})
    start, length = case.result
    for order in ("program", "random"):
        ddr = case.ddr.copy()
        FunctionalSimulator(hardware).run(case.program, ddr, order=order, seed=seed)
        got = ddr[start : start + length].view(np.int8).reshape(case.expected.shape)
        np.testing.assert_array_equal(got, case.expected)


def pipeline_memory(hardware: Hardware, seed: int) -> np.ndarray[Any, Any]:
    lanes = hardware.vector_lanes
    rng = np.random.default_rng(seed)
    ddr = rng.integers(0, 256, 1 << 17).astype(np.uint8)
    block = parameter_block(
        lanes, rng.integers(-1000, 1000, lanes), np.full(lanes, 2**30), np.full(lanes, 42)
    )
    ddr[: len(block)] = np.frombuffer(block, np.uint8)
    return ddr


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.sampled_from((TINY, EDGE)))
def test_synchronised_programs_do_not_depend_on_the_order(
    seed: int, tiles: int, hardware: Hardware
) -> None:
    program = pipeline(hardware, tiles, seed=seed)
    verify_program(program, hardware, registers={})
    reference = pipeline_memory(hardware, seed)
    FunctionalSimulator(hardware).run(program, reference)
    for number in range(3):
        ddr = pipeline_memory(hardware, seed)
        FunctionalSimulator(hardware).run(program, ddr, order="random", seed=seed + number)
        np.testing.assert_array_equal(ddr, reference)


def without_semaphore(program: list[Instr], number: int) -> list[Instr]:
    """Drop every wait and signal of one semaphore."""
    keep = ~(1 << number)
    return [
        Instr(
            instr.name,
            {
                name: value & keep if name in ("wait", "signal") else value
                for name, value in instr.fields.items()
            },
            instr.layer,
        )
        for instr in program
    ]


PAIRS = [(0, 4), (1, 4), (4, 1), (5, 0), (0, 5)]


def test_a_wait_implied_by_others_is_not_asked_for() -> None:
    # Channel 0 stores tile t - 1, which mac_conv t - 1 must have made, before it loads tile t + 1.
    program = without_semaphore(pipeline(TINY, 8), semaphore(4, 0))
    verify_program(program, TINY, registers={})
    reference = pipeline_memory(TINY, 0)
    FunctionalSimulator(TINY).run(pipeline(TINY, 8), reference)
    for seed in range(20):
        ddr = pipeline_memory(TINY, 0)
        FunctionalSimulator(TINY).run(program, ddr, order="random", seed=seed)
        np.testing.assert_array_equal(ddr, reference)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_missing_wait_is_found_by_the_verifier_and_shows_in_random_order(
    pair: tuple[int, int],
) -> None:
    program = without_semaphore(pipeline(TINY, 8), semaphore(*pair))
    with pytest.raises(TilewrightError, match=r"it may (read|write)"):
        verify_program(program, TINY, registers={})
    reference = pipeline_memory(TINY, 0)
    FunctionalSimulator(TINY).run(pipeline(TINY, 8), reference)
    different = 0
    for seed in range(40):
        ddr = pipeline_memory(TINY, 0)
        try:
            FunctionalSimulator(TINY).run(program, ddr, order="random", seed=seed)
        except TilewrightError:
            different += 1
            continue
        different += not np.array_equal(ddr, reference)
    assert different


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 12), st.sampled_from((TINY, EDGE, V2)))
def test_time_is_consistent(seed: int, tiles: int, hardware: Hardware) -> None:
    program = pipeline(hardware, tiles, seed=seed, layers=3)
    result = CycleSimulator(hardware).run(program)
    log = result.log
    assert (log.issue <= log.start).all()
    assert (log.start < log.end).all()
    assert result.cycles == log.end[-1]
    for engine in range(6):
        mine = log.engine == engine
        assert (log.start[mine][1:] >= log.end[mine][:-1]).all(), "one instruction at a time"
    for name, counters in result.engines.items():
        if name != "seq":
            assert all(value >= 0 for value in counters.values())
            assert sum(counters.values()) == result.cycles
    busiest = max(counters["busy"] for counters in result.engines.values())
    assert busiest <= result.cycles
    peak = hardware.ddr_bytes_per_cycle
    assert (result.ddr_rate <= peak * (1 + 1e-9)).all()
    moved = np.sum(result.ddr_rate[:-1] * np.diff(result.ddr_time))
    assert moved == pytest.approx(result.totals["ddr_bytes"] + result.fetch_bytes, rel=1e-6)
    again = CycleSimulator(hardware).run(program)
    assert again.cycles == result.cycles
    np.testing.assert_array_equal(again.log.start, log.start)
