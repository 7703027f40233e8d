"""Differential runs notice what is wrong, wherever it is, and say where it began."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from tilewright.cosim.driver import RtlResult
from tilewright.diagnostics import TilewrightError
from tilewright.rtl.faults import FAULTS
from tilewright.sim.retire import RetireLog
from tilewright.spec.hardware import Hardware, load_target
from tilewright.spec.program import Instr
from tilewright.testgen import catalogue
from tilewright.testgen.catalogue import Test, Verdict, run_catalogue
from tilewright.testgen.memory import low_window
from tilewright.testgen.programs import Case, generate
from tilewright.testgen.run import Expected, expect, run_case, run_rtl

TINY = load_target("tiny8")


@dataclass
class FakeRtl:
    """Answers with what the simulators expect, but for what a test changes."""

    hardware: Hardware
    expected: Expected
    sram: dict[int, int]
    ddr: dict[int, int]
    late: Mapping[int, tuple[int, int, int]]
    error: TilewrightError | None = None
    library: object = None

    def run(self, code: Sequence[Instr], ddr: Any, **_: Any) -> RtlResult:
        if self.error is not None:
            raise self.error
        log = self.expected.log
        assert log is not None
        for window in self.expected.ddr.windows:
            ddr[window.address : window.end] = self.expected.ddr.content[
                window.address : window.end
            ]
        for address, value in self.ddr.items():
            ddr[address] = value
        sram = self.expected.sram.copy()
        for address, value in self.sram.items():
            sram[address] = value
        times = {name: getattr(log, name).copy() for name in ("issue", "start", "end")}
        for at, (issue, start, end) in self.late.items():
            for name, by in zip(times, (issue, start, end), strict=True):
                times[name][at] += by
        found = RetireLog(log.names, log.layers, log.index, log.engine, **times)
        return RtlResult(self.expected.cycles, found, {}, 0, sram, sram, ddr, 0.0)


CASE = Case(
    "by hand",
    TINY,
    [
        Instr("dma_fill", {"sram": 0x100, "n0": 32, "fill": 7, "signal": 1 << 4}),
        Instr("vec_copy", {"src": 0x100, "dst": 0x200, "n0": 32, "src_s0": 1, "dst_s0": 1,
                           "wait": 1 << 4, "signal": 1 << 25}),
        Instr("dma_store", {"sram": 0x200, "ddr": 0x8000, "n0": 32, "stream": 1,
                            "wait": 1 << 25}),
        Instr("halt"),
    ],
    5,
    (low_window(TINY),),
    {},
)  # fmt: skip


def check(**changes: Any) -> list[tuple[str, str, str]]:
    expected, findings = expect(CASE, ("cycle",))
    assert expected is not None
    assert not findings
    parts: dict[str, Any] = {"sram": {}, "ddr": {}, "late": {}} | changes
    rtl: Any = FakeRtl(TINY, expected, **parts)
    return [(f.kind, f.where, f.message) for f in run_rtl(CASE, expected, rtl)]


def test_the_same_is_no_finding() -> None:
    assert check() == []


def test_a_wrong_byte_is_laid_to_the_instruction_that_made_it() -> None:
    ((kind, where, message),) = check(sram={0x205: 9})
    assert (kind, where) == ("value", "vec_copy sram")
    assert message == (
        "sram: 1 bytes differ; 0x205 must be 0x07, not 0x09, by instruction 1 (vec_copy, "
        "dispatch 1)"
    )


def test_the_earliest_of_several_wrong_instructions_is_named() -> None:
    findings = check(sram={0x205: 9, 0x105: 9}, ddr={0x8005: 9})
    assert [f[1] for f in findings] == ["dma_store ddr", "dma_fill sram"]


def test_a_byte_that_no_instruction_writes() -> None:
    assert [f[1] for f in check(sram={0x1000: 1})] == [" sram"]
    assert [f[1] for f in check(ddr={0x8021: 255})] == [" ddr"]


def test_the_first_time_that_differs_is_told() -> None:
    ((kind, where, message),) = check(late={1: (0, 2, 2), 2: (0, 0, 5)})
    assert (kind, where) == ("time", "vec_copy")
    assert "vec: start must be" in message
    assert "2 differ" in message


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        ("E0602", "deadlock: no engine can go on after cycle 9", "deadlock"),
        ("E0804", "the program has not ended after 20000 cycles", "deadlock"),
        ("E0602", "the chip trapped in cycle 3: not a legal instruction", "rtl error"),
        ("E0602", "cycle 9: read from DDR at address 0x100000, which has 0x11000", "rtl error"),
        ("E0802", "instruction 0 (mac_conv) is fp16, which the RTL does not compute", "tool"),
        ("E0803", "the built RTL broke off", "tool"),
    ],
)
def test_a_run_that_does_not_end_is_a_finding(code: str, text: str, kind: str) -> None:
    assert [f[0] for f in check(error=TilewrightError(code, text))] == [kind]


def test_what_does_not_build_is_no_finding() -> None:
    @dataclass
    class Unbuilt(FakeRtl):
        @property
        def library(self) -> object:
            raise TilewrightError("E0801", "a tool that simulates the RTL is missing")

        @library.setter
        def library(self, value: object) -> None:
            del value

    expected, _ = expect(CASE, ("cycle",))
    assert expected is not None
    rtl: Any = Unbuilt(TINY, expected, {}, {}, {})
    with pytest.raises(TilewrightError, match="E0801"):
        run_rtl(CASE, expected, rtl)


@dataclass
class Chip:
    """A simulator for the suite, which ends every run with an error."""

    hardware: Hardware
    error: TilewrightError
    library: object = None

    def run(self, *_: Any, **__: Any) -> RtlResult:
        raise self.error


def verdicts(monkeypatch: pytest.MonkeyPatch, code: str, text: str) -> list[Verdict]:
    error = TilewrightError(code, text)
    monkeypatch.setattr(catalogue, "RtlSimulator", lambda hardware, **_: Chip(hardware, error))
    return list(run_catalogue([FAULTS[0]], tests=[Test("tiny8", "dma", 1)]))


@pytest.mark.parametrize("code", ["E0701", "E0801", "E0802", "E0803"])
def test_a_broken_tool_catches_no_fault(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    with pytest.raises(TilewrightError, match="it broke") as caught:
        verdicts(monkeypatch, code, "it broke")
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        ("E0602", "the chip trapped in cycle 3: not a legal instruction", "rtl error"),
        ("E0602", "cycle 9: write to DDR at address 0x100000, which has 0x11000", "rtl error"),
        ("E0602", "deadlock: no engine can go on after cycle 9", "deadlock"),
        ("E0804", "the program has not ended after 20000 cycles", "deadlock"),
    ],
)
def test_a_chip_that_breaks_a_rule_is_caught(
    monkeypatch: pytest.MonkeyPatch, code: str, text: str, kind: str
) -> None:
    (verdict,) = verdicts(monkeypatch, code, text)
    assert verdict.good
    assert verdict.finding is not None
    assert verdict.finding.kind == kind


def test_a_test_that_a_simulator_refuses_catches_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    test = Test("tiny8", "dma", 1)
    # The simulator finds the deadlock, not the chip.
    program = [Instr("dma_fill", {"n0": 8, "wait": 1 << 4}), Instr("halt")]
    test.case = test.case.with_program(program)
    quiet = TilewrightError("E0602", "deadlock: no engine can go on after cycle 9")
    monkeypatch.setattr(catalogue, "RtlSimulator", lambda hardware, **_: Chip(hardware, quiet))
    with pytest.raises(TilewrightError, match="deadlock: it waits for all engines"):
        list(run_catalogue([FAULTS[0]], tests=[test]))


def test_missing_order_shows_in_random_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.testgen.run.RANDOM_ORDERS", 12)
    program = [Instr(i.name, dict(i.fields)) for i in CASE.program]
    for instr in program[:2]:
        for key in ("wait", "signal"):
            if instr.fields.get(key) == 1 << 4:
                del instr.fields[key]
    outcome = run_case(CASE.with_program(program), ("functional",))
    assert {finding.kind for finding in outcome.findings} == {"order"}


def test_an_illegal_program_is_told_apart() -> None:
    program = [Instr("vec_param", {"count": 15, "param": 1}), Instr("halt")]
    (finding,) = run_case(CASE.with_program(program), ("functional", "cycle")).findings
    assert finding.kind == "illegal"


def test_times_do_not_depend_on_ddr_content() -> None:
    case = generate(TINY, "dma", 4)
    one, _ = expect(case, ("cycle",))
    two, _ = expect(replace(case, seed=case.seed + 1), ("cycle",))
    assert one is not None
    assert two is not None
    assert one.cycles == two.cycles
    assert one.log is not None
    assert two.log is not None
    np.testing.assert_array_equal(one.log.end, two.log.end)
