"""The critical chain of a run: which instruction waited for which, from the end back to the start.

An instruction starts when its engine is free, its semaphores were signalled and it was dispatched;
the last of these is what it waited for. A `vec_drain` also waits for the blocks of its `mac_conv`,
and a `mac_conv` for halves of the M registers to be drained. A dispatch waits for a full queue, or
for code to be fetched. `fence` and `halt` wait for all engines; the chain ends with `halt`, and its
links add up to the run's cycles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import UsageError
from tilewright.spec.hardware import Hardware
from tilewright.spec.program import ENGINE_NAMES, MAC, SEQ, Dispatched, sequence
from tilewright.spec.timing import mac_cycles
from tilewright.waves.identity import Candidate, program_of, warning_of
from tilewright.waves.retire import read_retired

if TYPE_CHECKING:
    from tilewright.runtime.runtime import Package

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Link:
    """A stretch of time that the rest of the run waited for."""

    index: int
    """Instruction, by position in the program; -1 for code fetched before the first."""
    name: str
    layer: str
    engine: str
    begin: int
    end: int
    """The stretch is the cycles `begin..end - 1`."""
    after: str
    """What had to happen before: `engine order`, `semaphore N of ENGINE`, `accumulators`,
    `all engines`, `queue full`, `dispatch` or `start`."""

    @property
    def cycles(self) -> int:
        """Cycles of the stretch."""
        return self.end - self.begin


@dataclass(frozen=True)
class Times:
    """Cycles of the dispatched instructions: simulated, or measured in a waveform."""

    issue: I64
    start: I64
    end: I64


class _Causes:
    """What each instruction of a run may have waited for."""

    def __init__(self, stream: Sequence[Dispatched], hardware: Hardware) -> None:
        count = len(stream)
        self.previous = [-1] * count
        """On the same engine."""
        self.slot = [-1] * count
        """The instruction whose start made room in the queue."""
        self.signals: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        """(semaphore, producer)."""
        self.pair: dict[int, int] = {}
        """The `mac_conv` of a `vec_drain`."""
        self.drained: dict[int, int] = {}
        """The `vec_drain` that emptied the halves before a pushing `mac_conv`."""
        self.engines: dict[int, list[int]] = {}
        """The last instruction of each engine before a `fence` or `halt`."""
        on: list[list[int]] = [[] for _ in range(SEQ + 1)]
        signalled: list[deque[int]] = [deque() for _ in range(32)]
        pushed: deque[int] = deque()
        last_push = -1
        before: dict[int, int] = {}
        for index, item in enumerate(stream):
            own = on[item.engine]
            if own:
                self.previous[index] = own[-1]
            if item.engine != SEQ and len(own) >= hardware.queue_depth:
                self.slot[index] = own[-hardware.queue_depth]
            if item.name in ("fence", "halt"):
                self.engines[index] = [others[-1] for others in on[:SEQ] if others]
            own.append(index)
            for number in range(32):
                if item.fields["wait"] >> number & 1 and signalled[number]:
                    self.signals[index].append((number, signalled[number].popleft()))
                if item.fields["signal"] >> number & 1:
                    signalled[number].append(index)
            if item.name == "mac_conv" and item.fields["push"]:
                pushed.append(index)
                before[index] = last_push
                last_push = index
            elif item.name == "vec_drain" and pushed:
                self.pair[index] = pushed.popleft()
        drains = {mac: drain for drain, mac in self.pair.items()}
        for mac, earlier in before.items():
            if earlier in drains:
                self.drained[mac] = drains[earlier]


def critical_chain(stream: Sequence[Dispatched], hardware: Hardware, times: Times) -> list[Link]:
    """Return the critical chain of a complete run, first link first."""
    causes = _Causes(stream, hardware)
    issue, start, end = (array.tolist() for array in (times.issue, times.start, times.end))
    links: list[Link] = []
    if not stream:
        return links

    def link(index: int, begin: int, finish: int, after: str) -> None:
        if finish > begin:
            item = stream[index]
            engine = ENGINE_NAMES[item.engine]
            links.append(Link(item.index, item.name, item.layer, engine, begin, finish, after))

    index = max(range(len(stream)), key=lambda place: (end[place], place))
    limit = end[index]
    while True:
        item = stream[index]
        best = (issue[index], 0, "dispatch", -1)
        previous = causes.previous[index]
        if previous >= 0 and item.engine != SEQ:
            best = max(best, (end[previous], 1, "engine order", previous))
        for other in causes.engines.get(index, ()):
            best = max(best, (end[other], 1, "all engines", other))
        for number, producer in causes.signals[index]:
            best = max(
                best,
                (
                    end[producer],
                    2,
                    f"semaphore {number} of {ENGINE_NAMES[stream[producer].engine]}",
                    producer,
                ),
            )
        mac = causes.pair.get(index, -1)
        if mac >= 0 and end[mac] > start[index]:
            best = max(best, (min(end[mac], limit), 3, "accumulators", mac))
        drain = causes.drained.get(index, -1)
        if drain >= 0 and start[index] < end[drain] < limit and item.engine == MAC:
            waited = end[index] - start[index] - mac_cycles(hardware, item.fields)
            if waited > 0:
                best = max(best, (end[drain], 3, "accumulators", drain))
        at, _, after, other = best
        if other >= 0:
            link(index, min(at, limit), limit, after)
            index, limit = other, min(at, limit)
            continue
        # The sequencer was late: go back to the dispatch that stopped it.
        stopped = index
        while stopped > 0 and issue[stopped] == issue[stopped - 1] + 1:
            stopped -= 1
        if stopped != index and stream[stopped].engine == SEQ:
            # What an instruction of the sequencer waited for is asked of itself.
            link(index, min(issue[stopped], limit), limit, "dispatch")
            index, limit = stopped, min(issue[stopped], limit)
            continue
        slot = causes.slot[stopped]
        if slot >= 0 and stopped > 0 and issue[stopped] <= start[slot] + 1:
            link(index, start[slot], limit, "queue full")
            # What held up the start of that instruction did it; its own execution did not.
            index, limit = slot, start[slot]
            continue
        begin = min(issue[stopped - 1], limit) if stopped > 0 else 0
        link(index, begin, limit, "dispatch" if stopped > 0 else "start")
        if stopped == 0:
            break
        # Code was not there, or a sequencer instruction waited: follow the one before.
        index, limit = stopped - 1, begin
    return links[::-1]


@dataclass(frozen=True)
class Clock:
    """The target's clock and the one a waveform shows."""

    target_fs: int
    measured_fs: int | None

    @property
    def slack_fs(self) -> int | None:
        """Femtoseconds by which the measured period is shorter; negative: missed."""
        return None if self.measured_fs is None else self.target_fs - self.measured_fs

    @property
    def period_fs(self) -> int:
        """The measured period, or the target's."""
        return self.target_fs if self.measured_fs is None else self.measured_fs


@dataclass(frozen=True)
class TimingReport:
    """The critical chain of one program and how it stands to the clock."""

    program: str
    source: str
    """`simulated`, or the waveform's name."""
    cycles: int
    clock: Clock
    links: list[Link]
    deadline_us: float | None = None
    warning: str = ""
    """What the waveform does not prove."""

    @property
    def nanoseconds(self) -> float:
        """The run's time at the clock's period."""
        return self.cycles * self.clock.period_fs / 1e6

    @property
    def met(self) -> bool:
        """Whether nothing that was asked for is missed: the clock's period, the deadline."""
        slack, left = self.clock.slack_fs, self.deadline_slack_us
        return (slack is None or slack >= 0) and (left is None or left >= 0)

    @property
    def deadline_slack_us(self) -> float | None:
        """Microseconds left to the deadline; negative: missed."""
        return None if self.deadline_us is None else self.deadline_us - self.nanoseconds / 1e3

    def shares(self, attribute: str) -> list[tuple[str, int]]:
        """Return the cycles of the chain by `layer`, `engine`, `name` or `after`, most first."""
        sums: dict[str, int] = {}
        for item in self.links:
            key = str(getattr(item, attribute))
            sums[key] = sums.get(key, 0) + item.cycles
        return sorted(sums.items(), key=lambda pair: (-pair[1], pair[0]))

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        clock = self.clock
        slack = clock.slack_fs
        return {
            "program": self.program,
            "source": self.source,
            "warning": self.warning or None,
            "cycles": self.cycles,
            "nanoseconds": self.nanoseconds,
            "clock": {
                "target_ps": clock.target_fs / 1000,
                "measured_ps": None if clock.measured_fs is None else clock.measured_fs / 1000,
                "slack_ps": None if slack is None else slack / 1000,
                "met": None if slack is None else slack >= 0,
            },
            "deadline_us": self.deadline_us,
            "deadline_slack_us": self.deadline_slack_us,
            "layers": dict(self.shares("layer")),
            "engines": dict(self.shares("engine")),
            "waits": dict(self.shares("after")),
            "chain": [asdict(item) for item in self.links],
        }

    def lines(self, longest: int = 10) -> list[str]:
        """Return the report as text, with the `longest` links of the chain."""
        clock, slack = self.clock, self.clock.slack_fs
        lines = [f"timing of {self.program} ({self.source})"]
        lines.append(f"  time       {self.cycles:,} cycles, {self.nanoseconds:,.0f} ns")
        text = f"target {clock.target_fs / 1000:,.1f} ps"
        if slack is not None and clock.measured_fs is not None:
            verdict = "met" if slack >= 0 else "MISSED"
            by = f" by {-slack / 1000:,.1f} ps" if slack < 0 else ""
            text += f", measured {clock.measured_fs / 1000:,.1f} ps: {verdict}{by}"
        lines.append(f"  clock      {text}")
        left = self.deadline_slack_us
        if left is not None:
            verdict = "met" if left >= 0 else "MISSED"
            lines.append(
                f"  deadline   {self.deadline_us:,.3f} us: {verdict}, slack {left:,.3f} us"
            )
        total = sum(item.cycles for item in self.links) or 1
        lines.append(f"  critical chain: {len(self.links)} links, {total:,} cycles")
        for title, attribute, count in (
            ("by layer", "layer", 8),
            ("by engine", "engine", 6),
            ("by what was waited for", "after", 6),
        ):
            lines.append(f"  {title}")
            for name, cycles in self.shares(attribute)[:count]:
                lines.append(f"    {cycles / total:6.1%}  {cycles:>10,}  {name or '(set-up)'}")
        lines.append("  longest links")
        ranked = sorted(self.links, key=lambda item: (-item.cycles, item.begin))[:longest]
        for item in sorted(ranked, key=lambda item: item.begin):
            lines.append(
                f"    {item.begin:>9,}..{item.end - 1:<9,} {item.cycles:>8,}  {item.engine:<5} "
                f"{item.index:>6} {item.name:<11} {item.layer}  (after {item.after})"
            )
        return lines


def target_period_fs(hardware: Hardware) -> int:
    """Return the core clock's period in femtoseconds, rounded down."""
    return 10**9 // hardware.core_clock_mhz


def timing_reports(
    package: Package,
    *,
    waveform: Path | None = None,
    program: str = "",
    scope: str = "",
    deadline_us: float | None = None,
) -> list[TimingReport]:
    """Return the timing report of each program of a package, or of the one a waveform shows.

    Args:
        package: a compiled model.
        waveform: a complete run of one program; without it the programs are simulated.
        program: which program; needed when the waveform fits several.
        scope: scope of the chip's log in the waveform.
        deadline_us: time allowed.

    Raises:
        TilewrightError: E0603 the waveform is of no program of the package; E0701, E0703 it cannot
            be read; E0702 there is no such program.
    """
    executor = package.executor
    hardware = executor.target
    every = executor.program.tpu_steps
    steps = [s for s in every if program in ("", s.name)]
    if not every:
        raise UsageError(
            "E0702", "the model has no program of the chip: all of it runs on the host",
            hint="there is no time of the chip to report",
        )  # fmt: skip
    if not steps:
        names = ", ".join(step.name for step in every)
        raise UsageError("E0702", f"there is no program `{program}`", [f"programs: {names}"])
    candidates = [
        Candidate(
            step.name,
            executor.code(step),
            list(sequence(executor.code(step), hardware.scalar_registers, executor.registers)),
        )
        for step in steps
    ]
    target = target_period_fs(hardware)
    if waveform is None:
        from tilewright.runtime.simulation import tables_of
        from tilewright.sim.cycle import CycleSimulator

        reports: list[TimingReport] = []
        for step, item in zip(steps, candidates, strict=True):
            result = CycleSimulator(hardware).run(
                item.code,
                registers=executor.registers,
                tables=tables_of(executor, step),
            )
            log = result.log
            chain = critical_chain(item.stream, hardware, Times(log.issue, log.start, log.end))
            clock = Clock(target, None)
            reports.append(
                TimingReport(step.name, "simulated", result.cycles, clock, chain, deadline_us)
            )
        return reports
    retired = read_retired(waveform, scope)
    found = program_of(retired, hardware, candidates, "name one by --program")
    times = Times(retired.issue, retired.start, retired.end)
    chain = critical_chain(found.stream, hardware, times)
    return [
        TimingReport(
            found.name,
            retired.source,
            int(retired.end.max()),
            Clock(target, retired.clock_fs),
            chain,
            deadline_us,
            warning_of(retired),
        )
    ]
