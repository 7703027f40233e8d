"""Properties of the simulators: arithmetic on any operands, order independence, time bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.props.random_programs import Generator, setup, synchronise
from tests.unit.sim_programs import (
    conv_case,
    parameter_block,
    pipeline,
    rshift,
    semaphore,
)
from tilewright.codegen.verify import verify_program
from tilewright.diagnostics import TilewrightError
from tilewright.sim import cycle
from tilewright.sim.cycle import CycleSimulator
from tilewright.sim.functional import FunctionalSimulator
from tilewright.sim.numeric import shift_round
from tilewright.sim.retire import CycleResult
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
    engines = log.engine < 6
    assert (log.issue[engines] < log.start[engines]).all()
    assert (log.issue[~engines] == log.start[~engines]).all()
    assert (np.diff(log.issue) > 0).all(), "one instruction a cycle"
    assert (log.start < log.end).all()
    assert result.cycles == log.end[-1]
    for engine in range(6):
        mine = log.engine == engine
        assert (log.start[mine][1:] >= log.end[mine][:-1]).all(), "one instruction at a time"
    for name, counters in result.engines.items():
        assert all(value >= 0 for value in counters.values())
        assert sum(counters.values()) == result.cycles, name
    busiest = max(counters["busy"] for counters in result.engines.values())
    assert busiest <= result.cycles
    moved = np.sum(result.ddr_rate[:-1] * np.diff(result.ddr_time))
    assert moved == pytest.approx(result.totals["ddr_bytes"] + result.fetch_bytes, rel=1e-9)
    # No window moves more than DDR's beats in it, of which one may be left over from before.
    length = np.diff(result.ddr_time)
    peak = hardware.ddr_bytes_per_cycle + hardware.ddr_bus_bytes / length
    assert (result.ddr_rate[:-1] <= peak).all()
    assert_equal_runs(result, CycleSimulator(hardware).run(program))


def assert_equal_runs(one: CycleResult, other: CycleResult) -> None:
    for name in ("issue", "start", "end"):
        np.testing.assert_array_equal(getattr(one.log, name), getattr(other.log, name))
    assert one.cycles == other.cycles
    assert one.engines == other.engines
    assert one.layers == other.layers
    assert one.layer_engines == other.layer_engines
    assert one.fetch_bytes == other.fetch_bytes
    np.testing.assert_array_equal(one.ddr_rate, other.ddr_rate)


@st.composite
def chips(draw: st.DrawFn) -> Hardware:
    """Draw a chip that runs programs made for `tiny8`, at other widths, clocks and latencies."""
    power = st.integers(0, 8).map(lambda value: 1 << value)
    clock = st.integers(1, 600)
    return TINY.model_copy(
        update={
            "sram_word_bytes": draw(st.sampled_from((4, 8, 16, 64, 256))),
            "ddr_bus_bytes": draw(power),
            "dma_bus_bytes": draw(st.integers(1, 64)),
            "core_clock_mhz": draw(st.sampled_from((100, 101, 500))),
            "ddr_clock_mhz": draw(clock),
            "dma_clock_mhz": draw(clock),
            "dma_latency": draw(st.integers(1, 40)),
            "mac_latency": draw(st.integers(1, 40)),
            "vector_latency": draw(st.integers(1, 40)),
            "queue_depth": draw(st.integers(2, 16)),
        }
    )


def refusal(program: list[Instr], hardware: Hardware) -> str | None:
    try:
        verify_program(program, hardware, registers={})
    except TilewrightError as error:
        return error.message
    return None


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**9), length=st.integers(1, 25), hardware=chips())
def test_cycles_skipped_are_as_if_walked(seed: int, length: int, hardware: Hardware) -> None:
    body = synchronise(setup(TINY) + Generator(TINY, seed).program(length), TINY)
    program = [*body, Instr("halt")]
    refused = refusal(program, hardware)
    if refused is not None:
        # The generator may put a wait between a mac_conv and its drain that closes a circle.
        assert "deadlock" in refused
        return
    skipped = CycleSimulator(hardware).run(program)
    walked = CycleSimulator(hardware, skip_ahead=False).run(program)
    assert_equal_runs(skipped, walked)
    # Any engine's lower bound: it moves a unit a cycle, and its instructions take their latency.
    dma = skipped.log.engine < 4
    assert (skipped.log.end[dma] - skipped.log.start[dma] > hardware.dma_latency
            * hardware.core_clock_mhz / hardware.dma_clock_mhz).all()  # fmt: skip
    units = (skipped.totals["ddr_bytes"] + skipped.fetch_bytes) // hardware.ddr_bus_bytes
    assert units * hardware.core_clock_mhz <= skipped.cycles * hardware.ddr_clock_mhz


@pytest.mark.parametrize("cycles", [1, 7, 100])
def test_a_run_goes_on_where_it_was_interrupted(
    cycles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = pipeline(EDGE, 9, layers=3)
    whole = CycleSimulator(EDGE).run(program)
    monkeypatch.setattr(cycle, "CHUNK", cycles)
    assert_equal_runs(whole, CycleSimulator(EDGE).run(program))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9), length=st.integers(1, 25), more=st.integers(1, 200))
def test_a_slower_pipeline_of_an_engine_alone_is_later(seed: int, length: int, more: int) -> None:
    # Of one engine's program nothing overtakes anything: a longer latency never helps.
    generator = Generator(TINY, seed)
    body = [instr for instr in setup(TINY) + generator.program(length)
            if instr.name.startswith("vec_") and instr.name != "vec_drain"]  # fmt: skip
    program = [Instr(i.name, {**i.fields, "wait": 0, "signal": 0}, i.layer) for i in body]
    program = [Instr("fence"), *program, Instr("halt")]
    slow = TINY.model_copy(update={"dma_latency": min(1000, TINY.dma_latency + more)})
    fast = CycleSimulator(TINY).run(program)
    late = CycleSimulator(slow).run(program)
    assert (late.log.issue >= fast.log.issue).all()
    assert late.cycles >= fast.cycles
