"""Programs on the RTL of `tiny8`: what a run leaves, and what is said of one that does not end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cosim.support import needs_verilator
from tests.unit.sim_programs import DMA0, VEC, bit, conv_case, pipeline
from tilewright.cosim.driver import RtlSimulator, trace_format
from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.sim.state import SRAM_RESET
from tilewright.spec.hardware import load_target
from tilewright.spec.program import SEQ, Instr, encode_program

pytestmark = needs_verilator
TINY = load_target("tiny8")
CHIP = RtlSimulator(TINY)
HALT = Instr("halt", {})


def ddr(size: int = 4096) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.arange(size, dtype=np.uint32).astype(np.uint8)


def failed(code: bytes | list[Instr], memory: int = 4096, **more: int) -> TilewrightError:
    with pytest.raises(TilewrightError) as caught:
        CHIP.run(code, ddr(memory), **more)  # pyright: ignore[reportArgumentType]
    return caught.value


@pytest.mark.parametrize("depthwise", [False, True])
def test_a_convolution(depthwise: bool) -> None:
    case = conv_case(TINY, 3, depthwise=depthwise)
    result = CHIP.run(case.program, case.ddr)
    address, size = case.result
    found = result.ddr[address : address + size].view(np.int8)
    assert np.array_equal(found, case.expected.ravel())
    assert result.ddr is case.ddr
    assert result.log.names == tuple(item.name for item in case.program)
    assert result.log.layers == tuple(item.layer for item in case.program)
    assert result.log.index.tolist() == list(range(len(case.program)))


def test_log_and_counters_agree() -> None:
    """The chip counts every cycle of an instruction but its first and its last of `end`."""
    result = CHIP.run(pipeline(TINY, 5), np.zeros(1 << 17, np.uint8))
    log = result.log
    assert (log.issue <= log.start).all()
    assert (log.start < log.end).all()
    assert (np.diff(log.issue) > 0).all()
    assert result.counted_cycles == result.cycles == log.end.max()
    for number, counters in enumerate(result.counters.values()):
        mine = log.engine == number
        assert sum(counters.values()) == int((log.end - log.start - 1)[mine].sum())
        assert (log.start[mine][1:] >= log.end[mine][:-1]).all()


def test_registers_loops_and_memory_nobody_wrote() -> None:
    program = [
        Instr("loop", {"count": 3}),
        Instr("dma_load", {"ddr": 8, "ddr_r": 1, "sram": 0, "sram_r": 2, "n0": 8, "stream": 1}),
        Instr("add_reg", {"rd": 1, "value": 64}),
        Instr("add_reg", {"rd": 2, "value": 16}),
        Instr("end_loop", {}),
        HALT,
    ]
    for code in (program, encode_program(program)):
        result = CHIP.run(code, ddr(), registers={1: 100, 2: 1024})
        for step in range(3):
            at, start = 1024 + 16 * step, 108 + 64 * step
            assert result.sram[at : at + 8].tolist() == [i % 256 for i in range(start, start + 8)]
        assert (np.flatnonzero(result.sram != SRAM_RESET) >= 1024).all()
        assert (result.sram_before == SRAM_RESET).all()
        assert result.log.index.tolist() == [0, *(1, 2, 3, 4) * 3, 5]
    assert result.log.names[-1] == "halt"


def test_reads_may_reach_over_the_end_of_memory() -> None:
    program = [Instr("dma_load", {"ddr": 4090, "n0": 9, "stream": 1}), HALT]
    result = CHIP.run(program, ddr(4099))
    assert result.sram[:9].tolist() == [i % 256 for i in range(4090, 4099)]


def test_deadlock_names_what_each_engine_waits_for() -> None:
    error = failed(
        [
            Instr("vec_table", {"wait": bit(DMA0, VEC) | 1 << 29}, "table"),
            Instr("dma_fill", {"n0": 8, "channel": 1, "wait": 2}, "zeros"),
            Instr("fence", {}, "end"),
            HALT,
        ]
    )
    assert error.code == "E0602"
    assert "instruction 2 (fence) on seq: deadlock" in error.message
    numbers = f"{(bit(DMA0, VEC) | 1 << 29).bit_length() - 1}"
    assert error.details == [
        'dma1: instruction 1 (dma_fill) of layer "zeros" waits for semaphore 1',
        f'vec: instruction 0 (vec_table) of layer "table" waits for semaphore '
        f"{bit(DMA0, VEC).bit_length() - 1}, {numbers}",
        'seq: instruction 2 (fence) of layer "end" waits for all engines',
    ]


def test_deadlock_of_a_full_queue_and_of_the_sequencer() -> None:
    fill = Instr("dma_fill", {"n0": 8, "wait": 1}, "zeros")
    error = failed([fill] * (TINY.queue_depth + 1) + [HALT])
    assert error.details[-1].endswith("waits for a place in the queue of dma0")
    error = failed([Instr("fence", {"wait": 4}, "end"), HALT])
    assert error.details == ['seq: instruction 0 (fence) of layer "end" waits for semaphore 2']


def test_deadlock_of_the_accumulators() -> None:
    case = conv_case(TINY, 3, block_rows=1)
    program = [item for item in case.program if item.name != "vec_drain"]
    program[-2].fields["wait"] = 0
    error = failed(program, 1 << 16)
    assert any(
        line.startswith("mac: instruction 4 (mac_conv)")
        and line.endswith("waits for an emptied half of the M registers")
        for line in error.details
    )


def test_trap() -> None:
    fill = Instr("dma_fill", {"n0": 8}, "zeros")
    for word in (b"\xff" * 64, encode_program([fill])[:60] + b"\0\0\0\x80"):
        error = failed(encode_program([fill]) + word + encode_program([HALT]))
        assert error.code == "E0602"
        assert "after 1 instructions: the chip trapped" in error.message
    error = failed([fill])
    assert "the chip trapped" in error.message


@pytest.mark.parametrize("store", [False, True])
def test_memory_that_does_not_exist(store: bool) -> None:
    name = "dma_store" if store else "dma_load"
    program = [Instr(name, {"ddr": 4096, "n0": 8, "stream": 1}, "far"), HALT]
    error = failed(program)
    what = "write to DDR" if store else "read from DDR"
    assert f"{what} at address 0x1000, which has 0x1000 bytes" in error.message
    assert 'dma0: instruction 0 (dma_load) of layer "far"' in error.details[0].replace(
        "store", "load"
    )


def test_limit_of_cycles() -> None:
    fill = Instr("dma_fill", {"n0": 8, "signal": 0}, "zeros")
    program = [Instr("loop", {"count": 60000}), fill, Instr("end_loop"), HALT]
    error = failed(program, max_cycles=1000)
    assert error.code == "E0804"
    assert "1000 cycles" in error.message
    assert "dma_fill" in error.details[0]


def test_what_callers_must_not_do() -> None:
    with pytest.raises(TilewrightError, match=r"R16 must be R1\.\.R15"):
        CHIP.run([HALT], ddr(), registers={16: 1})
    with pytest.raises(ValueError, match="fault 3 needs"):
        CHIP.run([HALT], ddr(), fault=3)
    with pytest.raises(ValueError, match="contiguous"):
        CHIP.run([HALT], ddr()[::2])
    with pytest.raises(UsageError, match=r"must end in \.vcd or \.fst"):
        trace_format(Path("x.json"))


def test_fp16_is_refused_not_computed_wrong() -> None:
    error = failed([Instr("vec_pool", {"dtype": 2}, "pool"), HALT])
    assert error.code == "E0802"
    assert 'layer "pool": instruction 0 (vec_pool) is fp16' in error.message


def test_runs_are_independent() -> None:
    case = conv_case(TINY, 3)
    first = CHIP.run(case.program, case.ddr.copy())
    assert failed([Instr("fence", {"wait": 4}), HALT])
    second = CHIP.run(case.program, case.ddr.copy())
    assert first.cycles == second.cycles
    assert np.array_equal(first.sram, second.sram)
    for name in ("issue", "start", "end"):
        assert np.array_equal(getattr(first.log, name), getattr(second.log, name))


def test_trace_shows_the_log(tmp_path: Path) -> None:
    """The file's own times of `dispatch_valid` are those of the log; only the window is there."""
    case = conv_case(TINY, 3)
    whole = tmp_path / "t.vcd"
    result = RtlSimulator(TINY, trace=whole).run(case.program, case.ddr)
    period = 1_000_000 // TINY.core_clock_mhz
    values = vcd_values(whole, "dispatch_valid")
    issued = [t for t in range(result.cycles) if values_at(values, t * period) == 1]
    assert issued == result.log.issue.tolist()
    done = vcd_values(whole, "done")
    for end, engine in zip(result.log.end.tolist(), result.log.engine.tolist(), strict=True):
        if engine != SEQ:
            assert values_at(done, (end - 1) * period) >> engine & 1
    text = whole.read_text()
    assert "$timescale 1ps" in text.replace("\n", " ")
    for name in ("granted", "mem_address", "start"):
        assert f" {name} " in text
    part = tmp_path / "p.vcd"
    RtlSimulator(TINY, trace=part, trace_from=100, trace_cycles=10).run(case.program, case.ddr)
    times = [int(line[1:]) for line in part.read_text().splitlines() if line.startswith("#")]
    assert times[0] == 100 * period
    assert times[-1] == 110 * period


def test_trace_that_cannot_be_written(tmp_path: Path) -> None:
    simulator = RtlSimulator(TINY, trace=tmp_path / "nowhere" / "t.vcd")
    with pytest.raises(TilewrightError) as caught:
        simulator.run([HALT], ddr())
    assert caught.value.code == "E0701"


def vcd_values(path: Path, name: str) -> list[tuple[int, int]]:
    """Return (time, value) of a signal of `tw_top`, in order."""
    scopes: list[str] = []
    code = ""
    time, found = 0, list[tuple[int, int]]()
    for line in path.read_text().splitlines():
        words = line.split()
        if words[:1] == ["$scope"]:
            scopes.append(words[2])
        elif words[:1] == ["$upscope"]:
            scopes.pop()
        elif words[:1] == ["$var"] and scopes[-1] == "tw_top" and words[4] == name:
            code = words[3]
        elif line.startswith("#"):
            time = int(line[1:])
        elif code and line.endswith(code) and line[:1] in "01":
            if line[1:] == code:
                found.append((time, int(line[0])))
        elif code and words[:1] and words[0][:1] == "b" and words[1:] == [code]:
            found.append((time, int(words[0][1:], 2)))
    assert found, name
    return found


def values_at(values: list[tuple[int, int]], time: int) -> int:
    return next(value for at, value in reversed(values) if at <= time)
