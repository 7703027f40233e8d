"""Differences are laid to the instruction that made them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from tests.cosim.support import needs_verilator
from tests.unit.sim_programs import conv_case, pipeline
from tilewright.cosim.compare import (
    Comparison,
    compare_program,
    compare_results,
    functional_memory,
)
from tilewright.cosim.driver import COUNTERS, RtlSimulator
from tilewright.sim.cycle import CycleSimulator
from tilewright.spec.hardware import load_target
from tilewright.spec.program import Instr, encode_program, sequence
from tilewright.testgen.programs import Case, generate

pytestmark = needs_verilator
TINY = load_target("tiny8")
CHIP = RtlSimulator(TINY)


class Runs:
    """The three runs of a convolution, to be changed before they are compared."""

    def __init__(self) -> None:
        case = conv_case(TINY, 3)
        self.program = case.program
        self.result = case.result
        self.ddr = case.ddr.copy()
        self.sram = functional_memory(TINY, case.program, self.ddr, None, [])
        self.cycle = CycleSimulator(TINY).run(case.program)
        self.rtl = CHIP.run(case.program, case.ddr)
        self.stream = list(sequence(case.program, TINY.scalar_registers))

    def compare(self) -> Comparison:
        return compare_results(TINY, self.stream, self.rtl, self.cycle, self.ddr, self.sram)


@pytest.fixture
def runs() -> Runs:
    return Runs()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("depthwise", [False, True])
def test_equal(seed: int, depthwise: bool) -> None:
    case = conv_case(TINY, seed, depthwise=depthwise, channels=8 + 4 * seed)
    found = compare_program(CHIP, case.program, case.ddr)
    assert found.equal, found.lines()
    assert found.lines() == []


def test_equal_in_a_pipeline_from_bytes() -> None:
    program = pipeline(TINY, 6, layers=2)
    layers = [item.layer for item in program]
    found = compare_program(
        CHIP, encode_program(program), np.zeros(1 << 17, np.uint8), layers=layers
    )
    assert found.equal, found.lines()
    assert found.stream[2].layer == found.rtl.log.layers[2] == "layer0"


def test_a_wrong_byte_of_ddr(runs: Runs) -> None:
    address = runs.result[0] + 5
    right = int(runs.ddr[address])
    runs.ddr[address] ^= 0x40
    found = runs.compare()
    assert not found.same_values
    assert found.same_times
    (difference,) = found.bytes
    assert (difference.memory, difference.count, difference.address) == ("ddr", 1, address)
    assert (difference.expected, difference.found) == (right ^ 0x40, right)
    assert difference.writer is not None
    assert (difference.writer.name, difference.position) == ("dma_store", 6)
    text = "\n".join(found.lines())
    assert f"0x{address:x} must be 0x{right ^ 0x40:02x}, not 0x{right:02x}" in text
    assert 'instruction 6 (dma_store) of layer "c", dispatch 6' in text


def test_the_earliest_wrong_writer_is_told(runs: Runs) -> None:
    """The drain's bytes lie at higher addresses than the load's."""
    bank = TINY.bank_size
    runs.sram[3 * bank + 7] ^= 1
    runs.sram[bank + 2] ^= 1
    (difference,) = runs.compare().bytes
    assert (difference.memory, difference.count, difference.address) == ("sram", 2, bank + 2)
    assert difference.writer is not None
    assert difference.writer.index == 2
    runs.sram[bank + 2] ^= 1
    (difference,) = runs.compare().bytes
    assert difference.writer is not None
    assert difference.writer.name == "vec_drain"


def test_bytes_nobody_wrote(runs: Runs) -> None:
    runs.sram[-1] ^= 1
    (difference,) = runs.compare().bytes
    assert difference.writer is None
    assert "never written" in "\n".join(difference.lines())


def test_gaps_between_runs_are_not_written() -> None:
    fill = {"n0": 4, "n1": 5, "sram_s1": 16}
    program = [
        Instr("dma_fill", {**fill, "sram": 0, "fill": 1}, "first"),
        Instr("dma_fill", {**fill, "sram": 8, "fill": 2}, "second"),
        Instr("halt"),
    ]
    ddr = np.zeros(64, np.uint8)
    found = compare_program(CHIP, program, ddr)
    assert found.equal, found.lines()
    for address, layer in ((16, "first"), (26, "second"), (20, None)):
        sram = found.rtl.sram.copy()
        sram[address] ^= 1
        (difference,) = compare_results(TINY, found.stream, found.rtl, found.cycle, ddr, sram).bytes
        assert (difference.writer.layer if difference.writer else None) == layer


def test_wrong_times(runs: Runs) -> None:
    log = runs.cycle.log
    start, end = log.start.copy(), log.end.copy()
    end[4] += 1
    start[5] += 2
    runs.cycle = replace(runs.cycle, log=replace(log, start=start, end=end))
    found = runs.compare()
    assert found.same_values
    assert not found.same_times
    assert {item.engine: item.position for item in found.times} == {"mac": 4, "vec": 5}
    mac = next(item for item in found.times if item.engine == "mac")
    assert mac.expected[2] == mac.found[2] + 1
    assert f"end must be {mac.expected[2]}, not {mac.found[2]} (1 differ)" in mac.lines()[0]
    first = min(int(start[5]), int(end[4]))
    assert found.times[0].engine == ("vec" if first == start[5] else "mac")


def test_wrong_cycles(runs: Runs) -> None:
    runs.cycle = replace(runs.cycle, cycles=runs.cycle.cycles + 1)
    found = runs.compare()
    assert not found.equal
    assert found.lines() == [f"cycles must be {runs.rtl.cycles + 1}, not {runs.rtl.cycles}"]


def test_wrong_counters(runs: Runs) -> None:
    """The chip's own counters say where its cycles went; the simulator must say the same."""
    engines = {name: dict(counters) for name, counters in runs.cycle.engines.items()}
    engines["mac"]["busy"] += 2
    engines["dma0"]["wait_ddr"] += 1
    runs.cycle = replace(runs.cycle, engines=engines)
    found = runs.compare()
    assert found.same_values
    assert not found.same_times
    busy, ddr = engines["mac"]["busy"], engines["dma0"]["wait_ddr"]
    assert found.lines() == [
        f"dma0: counter wait_ddr must be {ddr}, not {ddr - 1}",
        f"mac: counter busy must be {busy}, not {busy - 2}",
    ]


def used(case: Case) -> npt.NDArray[np.uint8]:
    """The low part of DDR, in which the program stays: all of it is half a gigabyte."""
    (window,) = case.windows
    ddr = case.ddr()
    content = ddr.content[: window.end].copy()
    ddr.close()
    return content


@pytest.mark.parametrize("target", ["tiny8", "edge16"])
def test_counters_of_random_programs(target: str) -> None:
    hardware = load_target(target)
    chip = RtlSimulator(hardware)
    waits: Counter[str] = Counter()
    for profile in ("vector", "contention", "mac"):
        for seed in range(20, 23):
            case = generate(hardware, profile, seed)
            found = compare_program(chip, case.program, used(case), registers=case.registers)
            assert found.equal, (profile, seed, found.lines())
            assert not found.counters
            for counters in found.rtl.counters.values():
                waits.update(counters)
    assert all(waits[name] for name in COUNTERS), "every kind of wait was counted"


@pytest.mark.parametrize("seed", [16, 21, 39])
def test_resize_reads_where_its_table_says(seed: int) -> None:
    """Which words a resize reads stands in a table that only the functional simulator knows."""
    case = generate(TINY, "vector", seed)
    found = compare_program(CHIP, case.program, used(case), registers=case.registers)
    assert found.equal, found.lines()
    even = CycleSimulator(TINY).run(case.program, registers=case.registers)
    assert even.cycles != found.rtl.cycles, "the table does not matter in this program"


def test_other_instructions(runs: Runs) -> None:
    kept = list(runs.stream)
    runs.stream = [*kept[:3], kept[4], *kept[3:]]
    found = runs.compare()
    assert "dispatch 3 must be instruction 4 (mac_conv)" in found.order
    assert "on mac, not on vec" in found.order
    runs.stream = kept[:-1]
    assert runs.compare().order == "7 instructions must be dispatched, not 8"
    assert not runs.compare().equal
