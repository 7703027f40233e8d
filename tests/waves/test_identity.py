"""Waveforms of another chip or another program are refused, by what they show of themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.sim_programs import conv_case, pipeline
from tests.waves.vcd import log_signals, write_vcd
from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.sim.cycle import CycleSimulator
from tilewright.spec.hardware import Hardware, load_target
from tilewright.spec.program import Instr, encode_program, sequence
from tilewright.waves.difference import first_difference
from tilewright.waves.identity import (
    Candidate,
    first_dispatch,
    impossible,
    misfit,
    program_of,
    warning_of,
)
from tilewright.waves.retire import read_retired

TINY = load_target("tiny8")
SCOPE = "TOP.tw_top"
FST = Path(__file__).with_name("data") / "conv-tiny8.fst"
"""Of `conv_case(TINY, 0, height=5, width=4)`; traced anew when the target's digest changes."""


def slower(**more: int) -> Hardware:
    """Return another chip: a latency has so many cycles more."""
    return TINY.model_copy(update={name: getattr(TINY, name) + n for name, n in more.items()})


OTHER = slower(mac_latency=900)


def candidate(program: list[Instr], name: str = "tpu_0") -> Candidate:
    return Candidate(name, program, list(sequence(program, TINY.scalar_registers)))


def own() -> list[Instr]:
    return conv_case(TINY, 0, height=5, width=4).program


def identified(
    path: Path,
    program: list[Instr],
    hardware: Hardware = TINY,
    *,
    leave_out: str = "",
    loops: int = 1,
) -> Path:
    """Write the waveform of a run that shows its chip and code, fetched `loops` times."""
    signals = log_signals(CycleSimulator(TINY).run(program).log)
    code, unit = encode_program(program), hardware.ddr_bus_bytes
    cycles = max(len(signals[f"{SCOPE}.start"][1]), 20 + loops * len(code) // unit)
    valid, address, data = [0] * cycles, [0] * cycles, [0] * cycles
    for number in range(loops * len(code) // unit):
        at = number * unit % len(code)
        valid[10 + number], address[10 + number] = 1, at
        data[11 + number] = int.from_bytes(code[at : at + unit], "little")
    # DDR is also read for the engines; that is no code.
    valid[4], address[4], data[5] = 1, 0, 0x55
    fetch = [level if cycle != 4 else 0 for cycle, level in enumerate(valid)]
    signals |= {
        f"{SCOPE}.target_digest": (64, [int(hardware.digest()[:16], 16)] * cycles),
        f"{SCOPE}.code_length": (32, [len(program)] * cycles),
        f"{SCOPE}.mem_valid": (1, valid),
        f"{SCOPE}.mem_code": (1, fetch),
        f"{SCOPE}.mem_address": (40, address),
        f"{SCOPE}.mem_read_data": (8 * unit, data),
    }
    signals.pop(f"{SCOPE}.{leave_out}", None)
    return write_vcd(path, signals, period=5000)


def changed(program: list[Instr], place: int, **fields: int) -> list[Instr]:
    made = [Instr(i.name, dict(i.fields), i.layer) for i in program]
    made[place].fields.update(fields)
    return made


def refusal(path: Path, program: list[Instr], hardware: Hardware = TINY) -> TilewrightError:
    error = misfit(read_retired(path), hardware, candidate(program))
    assert error is not None
    assert error.code == "E0603"
    assert error.hint
    return error


def test_the_rtl_shows_its_chip_and_its_code() -> None:
    retired = read_retired(FST)
    assert retired.shown.target == int(TINY.digest()[:16], 16)
    assert retired.shown.length == len(own())
    assert warning_of(retired) == ""
    assert misfit(retired, TINY, candidate(own())) is None


def test_another_chip_is_refused() -> None:
    error = refusal(FST, own(), OTHER)
    assert "another chip" in error.message
    assert TINY.digest()[:16] in error.details[0]
    assert OTHER.digest()[:16] in error.details[0]


def test_the_same_engines_do_not_make_it_the_same_program() -> None:
    larger = conv_case(TINY, 0, height=7, width=6).program
    assert [i.name for i in larger] == [i.name for i in own()]
    larger[0].layer = "first"
    error = refusal(FST, larger)
    assert 'instruction 0 (dma_load) of layer "first"' in error.message
    assert "n0 = 160 (here 336)" in error.details[0]
    case = conv_case(TINY, 0, height=5, width=4)
    with pytest.raises(TilewrightError, match="is of another program") as caught:
        first_difference(FST, larger, TINY, case.ddr)
    assert caught.value.code == "E0603"
    with pytest.raises(TilewrightError, match="is of another chip"):
        first_difference(FST, own(), OTHER, case.ddr)


@pytest.mark.parametrize("place", [0, 3, 7])
def test_one_field_of_one_instruction_is_enough(tmp_path: Path, place: int) -> None:
    program = pipeline(TINY, 1)
    assert len(program) == 8
    path = identified(tmp_path / "a.vcd", program, loops=2)
    assert misfit(read_retired(path), TINY, candidate(program)) is None
    other = changed(program, place, signal=program[place].fields.get("signal", 0) ^ 1 << 31)
    error = refusal(path, other)
    assert f"differs first in instruction {place} ({program[place].name})" in error.message
    assert "signal = " in error.details[0]


def test_another_length_is_refused(tmp_path: Path) -> None:
    program = pipeline(TINY, 1)
    path = identified(tmp_path / "a.vcd", program)
    error = refusal(path, pipeline(TINY, 2))
    assert f"has {len(program)} instructions, this one {len(pipeline(TINY, 2))}" in error.message
    # Code after `halt` is not run, but fetched.
    path = identified(tmp_path / "b.vcd", [*program, Instr("fence")], leave_out="code_length")
    assert "fetches beyond the 8 instructions" in refusal(path, program).message


@pytest.mark.parametrize(
    ("leave_out", "part"),
    [("target_digest", "its chip"), ("mem_read_data", "the code it fetches")],
)
def test_what_is_not_shown_is_said(tmp_path: Path, leave_out: str, part: str) -> None:
    path = identified(tmp_path / "a.vcd", pipeline(TINY, 1), leave_out=leave_out)
    retired = read_retired(path)
    assert misfit(retired, TINY, candidate(pipeline(TINY, 1))) is None
    text = warning_of(retired)
    assert text.startswith("`a.vcd` does not show")
    assert text.count(part) == 1
    assert "\n" not in text
    # What is shown still counts.
    if leave_out == "target_digest":
        assert "another program" in refusal(path, changed(pipeline(TINY, 1), 0, n0=8)).message
    else:
        assert "another chip" in refusal(path, pipeline(TINY, 1), OTHER).message


def test_without_them_impossible_times_are_refused(tmp_path: Path) -> None:
    """The log alone: same engines, but the run was too fast for this chip, or for more work."""
    small, large = conv_case(TINY, 0, height=5, width=4), conv_case(TINY, 0, height=9, width=9)
    path = write_vcd(tmp_path / "a.vcd", log_signals(CycleSimulator(TINY).run(small.program).log))
    assert misfit(read_retired(path), TINY, candidate(small.program)) is None
    error = refusal(path, large.program)
    assert "and cannot take less than" in error.message
    place = [i.name for i in small.program].index("mac_conv")
    error = refusal(path, small.program, OTHER)
    assert f"instruction {place} (mac_conv)" in error.message
    slow = slower(dma_latency=500)
    assert "(dma_load)" in refusal(path, small.program, slow).message
    slow = slower(vector_latency=500)
    assert "(vec_" in refusal(path, small.program, slow).message


@pytest.mark.parametrize("tiles", [1, 4])
@pytest.mark.parametrize("name", ["tiny8", "edge16"])
def test_no_simulated_run_is_impossible(tmp_path: Path, name: str, tiles: int) -> None:
    target = load_target(name)
    for program in (pipeline(target, tiles), conv_case(target, tiles, kernel=1).program):
        log = CycleSimulator(target).run(program).log
        path = write_vcd(tmp_path / "a.vcd", log_signals(log))
        stream = list(sequence(program, target.scalar_registers))
        assert impossible(read_retired(path), target, stream) is None


@pytest.mark.parametrize("missing", [1, 5])
def test_a_trace_that_begins_late_is_refused(tmp_path: Path, missing: int) -> None:
    program = own()
    signals = log_signals(CycleSimulator(TINY).run(program).log)
    late = {name: (width, values[missing:]) for name, (width, values) in signals.items()}
    error = refusal(write_vcd(tmp_path / "a.vcd", late), program)
    first = read_retired(FST).issue[0]
    assert f"the first dispatch in cycle {first - missing}" in error.message
    assert f"before cycle {first}" in error.message


@pytest.mark.parametrize("ddr_clock", [100, 30, 71])
@pytest.mark.parametrize("unit", [8, 32, 128])
def test_the_first_dispatch_is_known(ddr_clock: int, unit: int) -> None:
    target = TINY.model_copy(
        update={"ddr_clock_mhz": ddr_clock, "ddr_bus_bytes": unit, "dma_burst_size": 256}
    )
    log = CycleSimulator(target).run([Instr("halt")]).log
    assert first_dispatch(target) == int(log.issue[0])


def test_the_program_is_chosen_by_its_code(tmp_path: Path) -> None:
    one = pipeline(TINY, 1)
    # Equal in engines and times.
    two = changed(one, 6, signal=1 << 31)
    path = identified(tmp_path / "a.vcd", two)
    both = [candidate(one, "one"), candidate(two, "two")]
    assert program_of(read_retired(path), TINY, both, "").name == "two"
    with pytest.raises(TilewrightError, match="is of another program"):
        program_of(read_retired(path), TINY, both[:1], "")
    third = candidate(changed(one, 2, signal=1 << 31), "third")
    with pytest.raises(TilewrightError, match="none of the programs") as caught:
        program_of(read_retired(path), TINY, [both[0], third], "")
    assert [line.split(":")[0] for line in caught.value.details] == ["one", "third"]
    with pytest.raises(TilewrightError, match="another chip"):
        program_of(read_retired(path), OTHER, [both[0], third], "")
    plain = write_vcd(tmp_path / "b.vcd", log_signals(CycleSimulator(TINY).run(two).log))
    with pytest.raises(UsageError, match="fits several programs"):
        program_of(read_retired(plain), TINY, both, "name it")
