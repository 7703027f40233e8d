"""Differential runs: one program on every level of the machine, and what differs.

The functional simulator in program order is the meaning. It runs again in a random legal order of
the engines; the cycle simulator gives the time of every instruction; the RTL must agree with both:
DDR, SRAM, and issue, start and end of every instruction.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tilewright.cosim.compare import counter_differences
from tilewright.cosim.driver import RtlSimulator
from tilewright.diagnostics import TilewrightError
from tilewright.sim.cycle import CycleSimulator
from tilewright.sim.cycle_tables import table_indices
from tilewright.sim.functional import FunctionalSimulator
from tilewright.sim.retire import CycleResult, RetireLog
from tilewright.sim.state import SRAM_RESET, State
from tilewright.spec.access import accesses
from tilewright.spec.program import ENGINE_NAMES, Dispatched, sequence
from tilewright.testgen.memory import Ddr
from tilewright.testgen.programs import Case

Bytes = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]

BACKENDS = ("functional", "cycle", "rtl")
RANDOM_ORDERS = 2
SPARE_CYCLES = 20_000
"""Cycles beyond four times the expected ones after which a run on the RTL has hung."""
OF_THE_CHIP = ("deadlock", "rtl error", "dispatch", "value", "time")
"""Kinds of findings that say that the chip is wrong; others say that a test or a tool is."""
_CHIP_CODES = ("E0602", "E0804")
"""What a run on the RTL raises when the chip trapped, hung, or left its memories."""


@dataclass(frozen=True)
class Finding:
    """A way in which two levels disagree."""

    kind: str
    """`illegal`, `order`, `cycle error`, `tool`, or one of `OF_THE_CHIP`."""
    where: str
    """Instruction and engine it shows in first."""
    message: str
    """One line."""
    error: TilewrightError | None = field(default=None, compare=False, repr=False)
    """What was raised, if it is an error."""

    @property
    def signature(self) -> tuple[str, str]:
        """What must stay the same while a program is shrunk."""
        return self.kind, self.where


@dataclass
class Expected:
    """What a program must do, by the simulators."""

    stream: list[Dispatched]
    sram: Bytes
    ddr: Ddr
    cycle: CycleResult | None = None
    """By the cycle simulator; None when it was not asked."""

    @property
    def log(self) -> RetireLog | None:
        """When everything happens."""
        return self.cycle.log if self.cycle else None

    @property
    def cycles(self) -> int:
        """Simulated cycles; 0 when they are not known."""
        return self.cycle.cycles if self.cycle else 0


@dataclass
class Outcome:
    """What came of a program."""

    findings: list[Finding] = field(default_factory=list[Finding])
    cycles: int = 0
    instructions: int = 0


class _Watch:
    """Keeps what the functional simulator only shows to its hook."""

    def __init__(self, size: int) -> None:
        self.sram: Bytes = np.full(size, SRAM_RESET, np.uint8)
        self.tables: list[tuple[I64, I64]] = []

    def __call__(self, at: Dispatched, state: State) -> None:
        self.sram = state.sram
        if at.name == "vec_resize":
            self.tables.append(table_indices(state, at.fields))


def _error(kind: str, error: TilewrightError) -> Finding:
    text = error.message
    if "deadlock" in text or error.code == "E0804":
        kind = "deadlock"
    named = re.search(r"instruction \d+ \((\w+)\)", text)
    where = named.group(1) if named else ""
    return Finding(kind, where, "; ".join([text, *error.details[:3]]), error)


def _describe(item: Dispatched | None, position: int) -> str:
    if item is None:
        return "no instruction"
    return f"instruction {item.index} ({item.name}, dispatch {position})"


def writer_of(
    case: Case, stream: Sequence[Dispatched], sram: bool, addresses: I64
) -> tuple[Dispatched | None, int, int]:
    """Return the earliest of the instructions that wrote differing bytes last, and one byte.

    Later ones may only have passed on what it left.
    """
    left = addresses
    found: tuple[Dispatched | None, int, int] = (None, -1, int(addresses[0]))
    for position in range(len(stream) - 1, -1, -1):
        item = stream[position]
        for region in accesses(case.hardware, item.name, item.fields):
            if region.sram != sram or not region.write:
                continue
            if region.end <= left[0] or region.address > left[-1]:
                continue
            starts = region.starts()
            before = np.searchsorted(starts, left, side="right") - 1
            inside = (before >= 0) & (left < starts[np.maximum(before, 0)] + region.run)
            if inside.any():
                found = (item, position, int(left[inside][0]))
                left = left[~inside]
            if not len(left):
                return found
    return found


def _memory(
    case: Case, stream: Sequence[Dispatched], expected: Expected, ddr: Ddr, sram: Bytes
) -> list[Finding]:
    """Return the differences of the two memories, at most one each."""
    findings: list[Finding] = []
    parts = [
        np.flatnonzero(
            expected.ddr.content[w.address : w.end] != ddr.content[w.address : w.end]
        ).astype(np.int64)
        + w.address
        for w in case.windows
    ]
    places = [("ddr", expected.ddr.content, ddr.content, np.unique(np.concatenate(parts)))]
    places.append(("sram", expected.sram, sram, np.flatnonzero(expected.sram != sram)))
    for name, want, have, wrong in places:
        if not len(wrong):
            continue
        item, position, at = writer_of(case, stream, name == "sram", wrong)
        findings.append(
            Finding(
                "value",
                f"{item.name if item else ''} {name}",
                f"{name}: {len(wrong)} bytes differ; 0x{at:x} must be 0x{int(want[at]):02x}, not "
                f"0x{int(have[at]):02x}, by {_describe(item, position)}",
            )
        )
    if strays := ddr.strays():
        findings.append(
            Finding("value", "stray ddr", f"ddr: 0x{strays[0]:x} was written by no instruction")
        )
    return findings


def expect(
    case: Case, backends: Sequence[str] = ("functional", "cycle")
) -> tuple[Expected | None, list[Finding]]:
    """Run the simulators; return what must happen and where they disagree already."""
    hw = case.hardware
    findings: list[Finding] = []
    watch = _Watch(hw.sram_size)
    simulator = FunctionalSimulator(hw)
    ddr = case.ddr()
    try:
        stream = list(sequence(case.program, hw.scalar_registers, case.registers))
        simulator.run(case.program, ddr.content, registers=case.registers, hook=watch)
    except TilewrightError as error:
        return None, [_error("illegal", error)]
    expected = Expected(stream, watch.sram, ddr)
    if "functional" in backends:
        for seed in range(RANDOM_ORDERS):
            other, seen = case.ddr(), _Watch(hw.sram_size)
            try:
                simulator.run(case.program, other.content, registers=case.registers, hook=seen,
                              order="random", seed=seed)  # fmt: skip
            except TilewrightError as error:
                findings.append(_error("order", error))
                continue
            for finding in _memory(case, stream, expected, other, seen.sram):
                findings.append(Finding("order", finding.where, finding.message))
            other.close()
    if "cycle" in backends:
        try:
            expected.cycle = CycleSimulator(hw).run(
                case.program, registers=case.registers, tables=watch.tables
            )
        except TilewrightError as error:
            findings.append(_error("cycle error", error))
    return expected, findings


def _times(stream: Sequence[Dispatched], want: RetireLog, have: RetireLog) -> list[Finding]:
    count = min(len(want.issue), len(have.issue))
    wrong = np.flatnonzero(want.engine[:count] != have.engine[:count])
    if len(wrong):
        at = int(wrong[0])
        message = (
            f"dispatch {at} must be {stream[at].name} on {ENGINE_NAMES[int(want.engine[at])]}, "
            f"not on {ENGINE_NAMES[int(have.engine[at])]}"
        )
        return [Finding("dispatch", stream[at].name, message)]
    if len(want.issue) != len(have.issue):
        message = f"{len(want.issue)} instructions must be dispatched, not {len(have.issue)}"
        return [Finding("dispatch", "", message)]
    first: tuple[int, int, str] | None = None
    total = np.zeros(count, np.bool_)
    for name in ("issue", "start", "end"):
        expected, found = getattr(want, name), getattr(have, name)
        differs = np.flatnonzero(expected != found)
        total[differs] = True
        if len(differs):
            at = int(differs[np.argmin(expected[differs])])
            when = int(expected[at])
            if first is None or when < first[0]:
                first = (when, at, f"{name} must be {when}, not {int(found[at])}")
    if first is None:
        return []
    _, at, text = first
    item = stream[at]
    message = (
        f"{_describe(item, at)} on {ENGINE_NAMES[item.engine]}: {text} "
        f"(start {int(want.start[at])}, end {int(want.end[at])}; {int(total.sum())} differ)"
    )
    return [Finding("time", item.name, message)]


def run_rtl(
    case: Case, expected: Expected, simulator: RtlSimulator, fault: int = 0
) -> list[Finding]:
    """Run the program on the RTL and compare it with what must happen.

    Raises:
        TilewrightError: E0701, E0801..E0803 when the RTL cannot be built: no finding of a test.
    """
    simulator.library  # noqa: B018  built here if it is not yet
    ddr = case.ddr()
    limit = 4 * expected.cycles + SPARE_CYCLES if expected.cycles else None
    try:
        result = simulator.run(
            case.program, ddr.content, registers=case.registers, fault=fault, max_cycles=limit
        )
    except TilewrightError as error:
        return [_error("rtl error" if error.code in _CHIP_CODES else "tool", error)]
    findings = _memory(case, expected.stream, expected, ddr, result.sram)
    ddr.close()
    if expected.cycle is not None:
        times = _times(expected.stream, expected.cycle.log, result.log)
        if not times and expected.cycles != result.cycles:
            message = f"the run must take {expected.cycles} cycles, not {result.cycles}"
            times = [Finding("time", "halt", message)]
        if not times and (counters := counter_differences(result, expected.cycle)):
            first = counters[0]
            message = f"{first.lines()[0]} ({len(counters)} counters differ)"
            times = [Finding("time", f"{first.engine} {first.counter}", message)]
        findings += times
    return findings


def run_case(
    case: Case, backends: Sequence[str] = BACKENDS, rtl: RtlSimulator | None = None, fault: int = 0
) -> Outcome:
    """Run a program on the chosen levels; `rtl` is needed when they contain `rtl`."""
    expected, findings = expect(case, backends)
    if expected is None:
        return Outcome(findings)
    if "rtl" in backends and rtl is not None:
        findings = findings + run_rtl(case, expected, rtl, fault)
    outcome = Outcome(findings, expected.cycles, len(expected.stream))
    expected.ddr.close()
    return outcome
