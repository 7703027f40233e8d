"""When every instruction was dispatched, started and ended, read from a waveform of the chip.

The chip shows `dispatch_valid`, `dispatch_engine`, `start` and `done` (microarchitecture.md,
"Signals of the RTL's log"). Engines execute in order, so the n-th start of an engine is that of the
n-th instruction dispatched to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import TilewrightError
from tilewright.spec.program import ENGINE_NAMES, SEQ, Dispatched
from tilewright.waves.identity import Shown, identity_places, shown_of
from tilewright.waves.reader import Sampled, Waveform

I64 = npt.NDArray[np.int64]
LOG_SIGNALS = ("dispatch_valid", "dispatch_engine", "start", "done")


@dataclass(frozen=True)
class Retired:
    """Cycles of every dispatched instruction, in the order dispatched; -1 where none was seen."""

    source: str
    """The waveform's file name."""
    scope: str
    engine: I64
    """As in `ENGINE_NAMES`."""
    issue: I64
    start: I64
    end: I64
    """First cycle after the last of the execution."""
    cycles: int
    """Cycles the waveform shows."""
    clock_fs: int
    """Measured clock period in femtoseconds."""
    shown: Shown = field(default_factory=Shown)
    """What the waveform shows of its chip and its code."""

    def latency(self, index: int) -> int:
        """Return the cycles from start to end of a dispatched instruction."""
        return int(self.end[index] - self.start[index])


def log_places(scope: str) -> dict[str, str]:
    """Return the full names of the log's signals."""
    return {name: f"{scope}.{name}" for name in LOG_SIGNALS}


def read_retired(path: Path | str, prefix: str = "") -> Retired:
    """Read the retire log of a waveform.

    Args:
        path: VCD or FST file.
        prefix: scope to look in; otherwise all are searched.

    Raises:
        TilewrightError: E0701 the file cannot be read; E0603 the signals are not there, or are no
            log of this machine.
    """
    waveform = Waveform(path)
    scope = waveform.scope_with((*LOG_SIGNALS, "clk"), prefix)
    places = log_places(scope) | identity_places(waveform, scope)
    return retired_of(waveform.sample(places, scope), str(waveform.path.name))


def retired_of(sampled: Sampled, source: str) -> Retired:
    """Return the retire log of sampled signals.

    Raises:
        TilewrightError: E0603, an engine starts what was not dispatched, or ends what did not
            start.
    """
    signals = sampled.signals
    engine: list[int] = []
    issue: list[int] = []
    start: list[int] = []
    end: list[int] = []
    queued: list[deque[int]] = [deque() for _ in range(SEQ)]
    running = [-1] * SEQ

    def wrong(cycle: int, number: int, what: str) -> TilewrightError:
        return TilewrightError(
            "E0603", f"`{source}`: in cycle {cycle} {ENGINE_NAMES[number]} {what}",
            [f"scope {sampled.scope}; {len(engine)} instructions dispatched so far"],
        )  # fmt: skip

    rows = zip(*(signals[name] for name in LOG_SIGNALS), strict=True)
    for cycle, (valid, number, started, done) in enumerate(rows):
        # Dispatch first: a queue that is empty can be passed through in one cycle.
        if valid:
            if number > SEQ:
                raise TilewrightError("E0603", f"`{source}`: there is no engine {number}")
            engine.append(number)
            issue.append(cycle)
            own = number == SEQ
            start.append(cycle if own else -1)
            end.append(cycle + 1 if own else -1)
            if not own:
                queued[number].append(len(engine) - 1)
        for bit in range(SEQ) if started or done else ():
            begins, ends = started >> bit & 1, done >> bit & 1
            if ends and running[bit] >= 0:
                end[running[bit]] = cycle + 1
                running[bit], ends = -1, 0
            if begins:
                if running[bit] >= 0:
                    raise wrong(cycle, bit, "starts an instruction while another one runs")
                if not queued[bit]:
                    raise wrong(cycle, bit, "starts an instruction that was not dispatched")
                running[bit] = queued[bit].popleft()
                start[running[bit]] = cycle
            if ends:
                if running[bit] < 0:
                    raise wrong(cycle, bit, "ends an instruction that did not start")
                end[running[bit]] = cycle + 1
                running[bit] = -1
    return Retired(
        source,
        sampled.scope,
        np.array(engine, np.int64),
        np.array(issue, np.int64),
        np.array(start, np.int64),
        np.array(end, np.int64),
        sampled.cycles,
        sampled.clock_fs,
        shown_of(sampled),
    )


def mismatch(retired: Retired, stream: Sequence[Dispatched]) -> TilewrightError | None:
    """Return how a log differs from a program's dispatched instructions, or None.

    Complete means: every instruction was dispatched to its engine, in order, and has ended. Chip
    and code are not looked at (`identity.misfit` does).
    """
    for index, (number, item) in enumerate(zip(retired.engine.tolist(), stream, strict=False)):
        if number != item.engine:
            return TilewrightError(
                "E0603",
                f"`{retired.source}` is not a run of this program: instruction {item.index} "
                f'({item.name}) of layer "{item.layer}" goes to {ENGINE_NAMES[item.engine]}, '
                f"dispatch {index} in cycle {int(retired.issue[index])} to {ENGINE_NAMES[number]}",
            )
    seen, wanted = len(retired.engine), len(stream)
    if seen > wanted:
        return TilewrightError(
            "E0603",
            f"`{retired.source}` is not a run of this program: it dispatches {seen} instructions, "
            f"the program {wanted}",
        )
    if seen < wanted:
        item = stream[seen]
        return TilewrightError(
            "E0603",
            f"`{retired.source}` ends before the program: {seen} of {wanted} instructions were "
            "dispatched",
            [f'the next is instruction {item.index} ({item.name}) of layer "{item.layer}"'],
            "trace the whole run, up to `halt`",
        )
    open_ = np.flatnonzero(retired.end < 0)
    if len(open_):
        item = stream[int(open_[0])]
        return TilewrightError(
            "E0603",
            f"`{retired.source}` ends before the program: instruction {item.index} ({item.name}) "
            f'of layer "{item.layer}" has not completed',
            hint="trace the whole run, up to `halt`",
        )
    return None
