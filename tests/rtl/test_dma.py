"""The RTL's DMA channel: against the contract's model to the cycle, the simulator to the bit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest

from tests.cosim.support import needs_verilator
from tests.rtl.dma import bench, programs
from tests.rtl.dma.model import Channel, Job, Memory
from tests.rtl.tools import build_runtime
from tilewright.rtl.faults import FAULTS, Fault
from tilewright.sim.state import State
from tilewright.spec.hardware import Hardware, load_target
from tilewright.spec.isa import BY_NAME

pytestmark = needs_verilator

SCHEDULE_CYCLES = 20_011
"""Long enough that denials do not repeat in step with anything."""
Bench = tuple[Hardware, Path]


def _changed(name: str, base: str, **changes: int) -> Hardware:
    content = load_target(base).model_dump() | changes | {"name": name}
    return Hardware.model_validate(content)


def _targets() -> dict[str, Hardware]:
    return {
        "tiny8": load_target("tiny8"),
        "edge16": load_target("edge16"),
        "wide_ddr": _changed(
            "wide_ddr",
            "tiny8",
            ddr_bus_bytes=32,
            ddr_clock_mhz=70,
            dma_clock_mhz=200,
            dma_bus_bytes=3,
            dma_latency=1,
            dma_stream_latency_factor=1,
        ),
        "wide_sram": _changed(
            "wide_sram",
            "tiny8",
            sram_word_bytes=32,
            ddr_clock_mhz=199,
            dma_clock_mhz=37,
            dma_bus_bytes=64,
        ),
    }


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bench]:
    """Return a function that builds a target's harness once."""
    built: dict[str, Bench] = {}
    runtime = build_runtime(tmp_path_factory.mktemp("runtime"))

    def get(name: str) -> Bench:
        if name not in built:
            hardware = _targets()[name]
            built[name] = hardware, bench.build(hardware, tmp_path_factory.mktemp(name), runtime)
        return built[name]

    return get


def _memories(hardware: Hardware, seed: int) -> tuple[bytes, bytes]:
    rng = np.random.default_rng(seed)
    return rng.bytes(bench.DDR_SIZE), rng.bytes(hardware.sram_size)


def _model(
    hardware: Hardware, jobs: list[Job], plan: bytes, ddr: bytes, sram: bytes
) -> tuple[Channel, list[str]]:
    channel = Channel(
        hardware, Memory(bytearray(ddr), bench.DDR_BASE), Memory(bytearray(sram)), plan
    )
    for job in jobs:
        channel.execute(job)
    assert channel.log[-1].endswith("idle")  # the harness stops before
    return channel, channel.log[:-1]


def _first_difference(seen: list[str], wanted: list[str]) -> str | None:
    for number, (got, want) in enumerate(zip_longest(seen, wanted)):
        if got != want:
            before = "\n  ".join(wanted[max(0, number - 12) : number])
            return f"after\n  {before}\nthe RTL has\n  {got}\nthe contract\n  {want}"
    return None


def _compare(target: Bench, jobs: list[Job], plan: bytes, seed: int, fault: int = 0) -> str | None:
    """Return what the RTL does otherwise than the contract, or None."""
    hardware, program = target
    ddr, sram = _memories(hardware, seed)
    channel, log = _model(hardware, jobs, plan, ddr, sram)
    limit = channel.free_at + 1000
    seen = bench.run(program, hardware, jobs, plan, ddr, sram, fault, limit)
    if difference := _first_difference(seen.log, log):
        return difference
    assert seen.ddr == bytes(channel.ddr.content)
    assert seen.sram == bytes(channel.sram.content)
    return None


@pytest.mark.parametrize("name", list(_targets()))
def test_random_instructions(name: str, build: Callable[[str], Bench]) -> None:
    hardware, program = build(name)
    for seed, denials in ((1, None), (2, 2), (3, 3)):
        jobs = programs.random_jobs(hardware, 90, seed, bench.DDR_SIZE, hardware.sram_size)
        plan = bench.schedule(hardware, SCHEDULE_CYCLES, denials)
        assert _compare((hardware, program), jobs, plan, seed) is None

        ddr, sram = _memories(hardware, seed)
        state = State(hardware, np.frombuffer(ddr, np.uint8).copy())
        state.sram[:] = np.frombuffer(sram, np.uint8)
        for job in jobs:
            programs.apply(state, job)
        seen = bench.run(program, hardware, jobs, plan, ddr, sram)
        assert seen.ddr == state.ddr.tobytes()
        assert seen.sram == state.sram.tobytes()


def _job(name: str, gap: int = 0, **fields: int) -> Job:
    return Job(name, {f.name: f.default for f in BY_NAME[name].fields} | fields, gap)


def _cycles(log: list[str], what: str) -> list[int]:
    return [int(line.split()[0]) for line in log if what in line]


def test_cycles_worked_out_by_hand(build: Callable[[str], Bench]) -> None:
    """Tiny8: 8 DMA cycles of latency are 16 core cycles; 16 bytes every other cycle; W = G = 8."""
    hardware, program = build("tiny8")
    plan = bench.schedule(hardware, SCHEDULE_CYCLES, None)
    ddr, sram = _memories(hardware, 1)
    at = bench.DDR_BASE
    jobs = [
        _job("dma_load", n0=64, ddr=at, sram=0),
        _job("dma_store", n0=3, ddr=at + 7, sram=5, stream=1),
        _job("dma_fill", n0=16, sram=8),
    ]
    log = bench.run(program, hardware, jobs, plan, ddr, sram).log
    pops, dones = _cycles(log, "pop"), _cycles(log, "done")
    # The load waits in 1..16 and reads from 17 on. A unit granted in t is in the FIFO in t + 2 and
    # moves into the collector, out of it with the next chunk in t + 3, and is written in t + 4.
    # The last chunk, read in 24, has none behind it: all having moved, it leaves in 27.
    assert _cycles(log, "ddr read burst granted") == list(range(17, 25))
    assert pops[0] == 0
    assert _cycles(log, "sram write granted")[:8] == [21, 22, 23, 24, 25, 26, 27, 28]
    assert dones[0] == 28
    # The store waits 48 cycles in stream mode. SRAM's word is read in 78 and moves in 80 (a byte of
    # DDR's first unit) and 81 (two of the second).
    assert pops[1] == 29
    assert _cycles(log, "sram read granted") == [78]
    assert _cycles(log, "ddr write granted") == [82, 83]
    assert dones[1] == 83
    # The fill has no source: its chunks move in 101 and 102.
    assert pops[2] == 84
    assert _cycles(log, "sram write granted")[8:] == [103, 104]
    assert dones[2] == 104


def test_extreme_fields(build: Callable[[str], Bench]) -> None:
    """Largest counts, paddings, strides and addresses; DDR's window comes round again."""
    target = build("tiny8")
    far = (1 << 32) - 64
    jobs = [
        _job(
            "dma_load",
            n0=64,
            n1=3,
            n2=2,
            n3=2,
            ddr_s1=far,
            ddr_s2=far,
            ddr_s3=far,
            ddr=1 << 38,
            sram_s1=64,
            sram_s2=192,
            sram_s3=384,
        ),
        _job(
            "dma_load",
            n0=1,
            n1=4,
            pad1_lo=255,
            pad1_hi=255,
            ddr=3,
            sram=9,
            stream=1,
            sram_s1=1,
            fill=0x5A,
        ),
        _job(
            "dma_load",
            n0=2,
            n2=3,
            pad2_lo=255,
            pad2_hi=254,
            ddr=3,
            sram=9,
            stream=1,
            sram_s2=5,
            ddr_s2=1,
            fill=0xC3,
        ),
        _job("dma_store", n0=1, n1=1 << 14, ddr=(1 << 40) - 1, sram=32767, stream=1),
        _job("dma_store", n0=1, n3=1 << 12, ddr_s3=1, ddr=(1 << 39) + 3, sram=5, stream=1),
        _job("dma_load", n0=1, n2=1 << 14, ddr=(1 << 39) + 3, sram=7, stream=1),
        _job("dma_store", n0=32768, ddr=1 << 39, sram=0),
        _job("dma_store", n0=50, ddr=(7 << 32) - 20, sram=3, stream=1),
        _job("dma_load", n0=50, ddr=(7 << 32) - 21, sram=3, stream=1),
        _job("dma_fill", n0=32768, sram=0, fill=0xFF),
    ]
    plan = bench.schedule(target[0], SCHEDULE_CYCLES, 4)
    assert _compare(target, jobs, plan, 4) is None


def test_nothing_is_kept_between_instructions(build: Callable[[str], Bench]) -> None:
    """The unit an instruction ends with is read again by the next."""
    target = build("tiny8")
    load = _job("dma_load", n0=3, ddr=bench.DDR_BASE + 1, sram=2, stream=1)
    store = _job("dma_store", n0=3, ddr=bench.DDR_BASE + 1, stream=1)
    plan = bench.schedule(target[0], SCHEDULE_CYCLES, None)
    assert _compare(target, [load, load, store, store, load, load], plan, 6) is None


FAULTY = {
    "ddr_high_bits": [_job("dma_load", n0=8, ddr=bench.DDR_BASE, stream=1)],
    "burst_boundary": [_job("dma_load", n0=128, ddr=bench.DDR_BASE + 4096 - 64)],
    "pad_off_by_one": [_job("dma_load", n0=8, pad1_lo=2, sram_s1=8, ddr=bench.DDR_BASE)],
    "store_mask": [_job("dma_store", n0=3, ddr=bench.DDR_BASE, stream=1)],
}
"""For each planted fault the least that shows it."""
HARMLESS = [
    _job("dma_load", n0=64, ddr=bench.DDR_BASE - bench.DDR_BASE % (1 << 36) - (14 << 36)),
    _job("dma_load", n0=4096, ddr=bench.DDR_BASE, pad1_lo=1, sram_s1=4096),
    _job("dma_load", n0=128, ddr=bench.DDR_BASE + 4096 - 64, stream=1),
    _job("dma_store", n0=64, ddr=bench.DDR_BASE + 64),
]


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.module == "tw_dma"])
def test_planted_faults_show(fault: Fault, build: Callable[[str], Bench]) -> None:
    target = build("tiny8")
    plan = bench.schedule(target[0], SCHEDULE_CYCLES, None)
    assert _compare(target, FAULTY[fault.name], plan, 5) is None
    assert _compare(target, FAULTY[fault.name], plan, 5, fault.number) is not None
    others = [job for name, jobs in FAULTY.items() if name != fault.name for job in jobs]
    if fault.name != "ddr_high_bits":
        assert _compare(target, others + HARMLESS, plan, 5, fault.number) is None
