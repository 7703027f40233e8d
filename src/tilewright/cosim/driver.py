"""Runs programs on the RTL, with the face of the simulators."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from tilewright.codegen.files import atomic_output
from tilewright.cosim.build import TraceFormat, build_library, quiet_limit
from tilewright.cosim.children import cleanup_on_sigterm
from tilewright.cosim.fst import fst_problem
from tilewright.cosim.library import load_library
from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.rtl.faults import FAULTS
from tilewright.sim.retire import RetireLog
from tilewright.sim.state import machine_error
from tilewright.spec.access import FP16
from tilewright.spec.hardware import Hardware
from tilewright.spec.isa import INSTRUCTION_BYTES, IllegalInstructionError
from tilewright.spec.program import (
    ENGINE_NAMES,
    MAC,
    REGISTER_MASK,
    SEQ,
    VEC,
    Dispatched,
    Instr,
    decode_program,
    encode_program,
    sequence,
)

Bytes = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]

RUNNING, FINISHED, TRAPPED, QUIET, OUT_OF_RANGE, FATAL, TRACE_LOST = range(7)
SLICE = 1 << 20
"""Cycles between two looks at the keyboard."""
COUNTERS = ("busy", "wait_bank", "wait_ddr", "wait_accumulator")
"""Performance counters of an engine, by their number in the chip."""
CYCLE_COUNTER = 48
FETCH = 2
"""Kind of an access outside memory: instructions."""
LAST_TRACED = 1 << 62
"""No run gets so far; sums of such cycles fit in 64 bits."""
NEVER = -1
"""Time of what did not happen."""


@dataclass(frozen=True)
class RtlResult:
    """What a run on the RTL leaves. Cycles are measured on the modules, not simulated."""

    cycles: int
    log: RetireLog
    """Every instruction dispatched, in order, as the chip's log signals told."""
    counters: dict[str, dict[str, int]]
    """The chip's own performance counters, by engine and name (`COUNTERS`)."""
    counted_cycles: int
    """The chip's own count of cycles."""
    sram: Bytes
    sram_before: Bytes
    """What SRAM held at power-up."""
    ddr: Bytes
    """The array that was given, changed in place."""
    seconds: float
    """Wall time of the run itself, build not counted."""


def trace_format(path: Path) -> TraceFormat:
    """Return the format of a trace file by its name.

    Raises:
        UsageError: E0702 when it is neither `.vcd` nor `.fst`.
    """
    match path.suffix:
        case ".vcd":
            return "vcd"
        case ".fst":
            return "fst"
        case _:
            raise UsageError("E0702", f"`{path}` must end in .vcd or .fst")


def dispatch_order(
    hardware: Hardware, code: bytes, layers: Sequence[str], registers: Mapping[int, int]
) -> list[Dispatched]:
    """Return what the sequencer should dispatch, as far as the program has a meaning.

    The chip also runs programs that are wrong, to show that it notices; names end where they do.
    """
    program: list[Instr] = []
    try:
        program = decode_program(code, layers)
    except IllegalInstructionError:
        words = [code[at : at + INSTRUCTION_BYTES] for at in range(0, len(code), INSTRUCTION_BYTES)]
        try:
            for word in words:
                program += decode_program(word, layers[len(program) : len(program) + 1])
        except IllegalInstructionError:
            pass  # the chip traps here
    stream: list[Dispatched] = []
    # No `halt`, loops that do not nest: what is wrong shows in the run.
    with suppress(TilewrightError):
        stream.extend(sequence(program, hardware.scalar_registers, registers))
    return stream


@dataclass(frozen=True)
class RtlSimulator:
    """Runs programs on the RTL of one target, built when first needed.

    Raises:
        TilewrightError: E0801..E0803, see `build_library`.
    """

    hardware: Hardware
    faults: bool = False
    """Build with the input that plants a fault."""
    trace: Path | None = None
    """Write a trace of each run there (`.vcd` or `.fst`): ports of the top and of its modules."""
    sources: tuple[Path, ...] | None = None
    """Other modules than the shipped ones."""
    trace_from: int = 0
    """First cycle traced."""
    trace_cycles: int | None = None
    """Cycles traced; all when None."""
    progress: Callable[[str], None] | None = field(default=None, compare=False)
    """Told before a build begins."""

    @cached_property
    def library(self) -> Any:
        """The built RTL."""
        built = build_library(
            self.hardware,
            faults=self.faults,
            trace=trace_format(self.trace) if self.trace else None,
            sources=self.sources,
            progress=self.progress,
        )
        return load_library(built.path)

    def run(
        self,
        code: bytes | Sequence[Instr],
        ddr: Bytes,
        *,
        registers: Mapping[int, int] | None = None,
        layers: Sequence[str] = (),
        fault: int = 0,
        max_cycles: int | None = None,
    ) -> RtlResult:
        """Run a program to its `halt`.

        Args:
            code: encoded or decoded instructions; it is fetched from a memory of its own.
            ddr: all of DDR that exists, uint8, contiguous, changed in place.
            registers: initial R registers.
            layers: the layer of each instruction when `code` is bytes.
            fault: number of the planted fault (`rtl/faults.py`), 0 for none.
            max_cycles: give up after so many.

        Raises:
            TilewrightError: E0602 when the chip traps, deadlocks or accesses DDR that does not
                exist, naming what each engine is blocked in; E0802 for fp16 instructions; E0804
                after `max_cycles`; E0701 when the trace cannot be written. A run that fails for
                another reason leaves its trace; a trace that is not whole leaves no file.
        """
        if ddr.dtype != np.uint8 or ddr.ndim != 1 or not ddr.flags.c_contiguous:
            raise ValueError("ddr must be a contiguous one-dimensional uint8 array")
        if fault and not (self.faults and any(item.number == fault for item in FAULTS)):
            raise ValueError(f"fault {fault} needs a simulator with faults and a known number")
        given = dict(registers or {})
        for number in given:
            if not 0 < number < self.hardware.scalar_registers:
                last = self.hardware.scalar_registers - 1
                raise TilewrightError("E0602", f"R{number} must be R1..R{last} to be given a value")
        if isinstance(code, bytes | bytearray | memoryview):
            encoded = bytes(code)
        else:
            encoded = encode_program(code)
            layers = [item.layer for item in code]
        stream = dispatch_order(self.hardware, encoded, layers, given)
        _refuse_fp16(stream)
        with nullcontext(None) if self.trace is None else _trace_file(self.trace) as scratch:
            run = _Run(self, stream, encoded, ddr, given, fault, scratch)
            try:
                outcome = run.outcome(max_cycles)
            finally:
                run.close()
        if isinstance(outcome, TilewrightError):
            # Raised only here: the trace, which shows why, stays.
            raise outcome
        return outcome


@contextmanager
def _trace_file(path: Path) -> Generator[Path]:
    """Give the file that becomes the trace; nothing is left when the run is ended from outside."""
    with cleanup_on_sigterm(), atomic_output(path) as scratch:
        yield scratch


def _refuse_fp16(stream: Sequence[Dispatched]) -> None:
    """Refuse what the modules do not compute, and would run as int8.

    Raises:
        TilewrightError: E0802.
    """
    for item in stream:
        if item.fields.get("dtype") == FP16:
            raise TilewrightError(
                "E0802",
                f'layer "{item.layer}": instruction {item.index} ({item.name}) is fp16, '
                "which the RTL does not compute",
                ["dtype: fp16; the RTL needs int8 or int4"],
                "the simulators run it all the same: `tilewright simulate`",
            )


def _copied(address: int | None, count: int, dtype: Any) -> I64:
    if not count or address is None:
        return np.zeros(0, np.int64)
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer(ctypes.string_at(address, size), dtype).astype(np.int64)


@dataclass(frozen=True)
class _State:
    """What the engines wait for, a bit each, when the run stopped."""

    idle: int
    queue: int
    bank: int
    ddr: int
    accumulator: int
    semaphore_zero: int


class _Run:
    def __init__(
        self,
        simulator: RtlSimulator,
        stream: list[Dispatched],
        code: bytes,
        ddr: Bytes,
        registers: Mapping[int, int],
        fault: int,
        trace: Path | None,
    ) -> None:
        self.simulator = simulator
        self.hardware = simulator.hardware
        self.stream = stream
        self.code = code
        self.ddr = ddr
        self.library = simulator.library
        self.trace = trace
        """The file that becomes the trace when it is whole."""
        self.sim = self.library.tw_create()
        if not self.sim:
            raise TilewrightError("E0803", "the built RTL cannot be started")
        self.registers = registers
        self.fault = fault
        self.traced = False
        """Whether the trace was begun."""

    def outcome(self, max_cycles: int | None) -> RtlResult | TilewrightError:
        """Run; return what it leaves or, when it failed but its trace is whole, why it failed.

        Raises:
            TilewrightError: E0701 when the trace is not whole; why the run failed when both are so.
        """
        try:
            found = self._execute(max_cycles)
        except TilewrightError as error:
            if self.trace is not None and not self.traced:
                raise
            problem = self._end_trace()
            if not problem:
                return error
            if error.code != "E0701":
                error.details.append(self._trace_lost(problem).message + f": {problem}")
            raise
        if problem := self._end_trace():
            raise self._trace_lost(problem)
        return found

    def close(self) -> None:
        self.library.tw_destroy(self.sim)

    def _load(self) -> None:
        values = np.zeros(32, np.uint64)
        for number, value in self.registers.items():
            values[number] = value & REGISTER_MASK
        status = self.library.tw_load(
            self.sim, self.code, len(self.code) // INSTRUCTION_BYTES, values.ctypes.data,
            sum(1 << number for number in self.registers), self.ddr.ctypes.data, self.ddr.size,
            self.fault,
        )  # fmt: skip
        if status == FATAL:
            self._fatal()

    # The trace.

    def _open_trace(self) -> None:
        if self.trace is None:
            return
        first = min(self.simulator.trace_from, LAST_TRACED)
        count = self.simulator.trace_cycles
        opened = self.library.tw_trace(
            self.sim, str(self.trace).encode(), first,
            LAST_TRACED - first if count is None else min(count, LAST_TRACED - first),
            self.hardware.core_clock_mhz,
        )  # fmt: skip
        if opened != 0:
            raise self._trace_lost(self._reason(opened))
        self.traced = True

    def _reason(self, error: int) -> str:
        """Return what an `errno` of the harness means."""
        if error < 0:
            return self.library.tw_message(self.sim).decode(errors="replace")
        return os.strerror(error)

    def _trace_lost(self, problem: str) -> TilewrightError:
        return TilewrightError("E0701", f"cannot write `{self.simulator.trace}`", [problem])

    def _end_trace(self) -> str:
        """Close the trace; return why it is not whole, or an empty string."""
        if self.trace is None:
            return ""
        if error := self.library.tw_trace_end(self.sim):
            return self._reason(error)
        if self.simulator.trace is not None and trace_format(self.simulator.trace) == "fst":
            cycles = self.library.tw_cycle(self.sim)
            return fst_problem(self.trace, empty=cycles <= self.simulator.trace_from)
        return ""

    def _execute(self, max_cycles: int | None) -> RtlResult:
        library, sim = self.library, self.sim
        self._load()
        self._open_trace()
        before = self._sram()
        expected = int(self.hardware.digest()[:16], 16)
        if library.tw_target_digest(sim) != expected:
            raise TilewrightError("E0803", "the built RTL is not of this target")
        limit = quiet_limit(self.hardware)
        start = time.perf_counter()
        left = max_cycles
        status = RUNNING
        while status == RUNNING and left != 0:
            step = SLICE if left is None else min(SLICE, left)
            status = library.tw_run(sim, step, limit)
            left = None if left is None else left - step
        seconds = time.perf_counter() - start
        if status != FINISHED:
            self._fail(status)
        counters = np.zeros(CYCLE_COUNTER + 1, np.uint64)
        if library.tw_counters(sim, counters.ctypes.data) == FATAL:
            self._fatal()
        by_engine = {
            name: {key: int(counters[8 * number + i]) for i, key in enumerate(COUNTERS)}
            for number, name in enumerate(ENGINE_NAMES[:SEQ])
        }
        return RtlResult(
            library.tw_cycle(sim), self._log(), by_engine, int(counters[CYCLE_COUNTER]),
            self._sram(), before, self.ddr, seconds,
        )  # fmt: skip

    def _sram(self) -> Bytes:
        sram = np.zeros(self.hardware.sram_size, np.uint8)
        if self.library.tw_sram(self.sim, sram.ctypes.data) == FATAL:
            self._fatal()
        return sram

    def _log(self) -> RetireLog:
        library, sim, stream = self.library, self.sim, self.stream
        count = library.tw_dispatched(sim)
        issue = _copied(library.tw_dispatch_cycle(sim), count, np.uint64)
        engine = _copied(library.tw_dispatch_engine(sim), count, np.uint8)
        # The sequencer's own start when they are dispatched.
        start = np.where(engine == SEQ, issue, NEVER)
        end = np.where(engine == SEQ, issue + 1, NEVER)
        for number in range(SEQ):
            mine = np.flatnonzero(engine == number)
            starts = _copied(
                library.tw_start_cycle(sim, number), library.tw_starts(sim, number), np.uint64
            )
            ends = _copied(
                library.tw_done_cycle(sim, number), library.tw_ends(sim, number), np.uint64
            )
            known = min(len(mine), len(starts))
            start[mine[:known]] = starts[:known]
            known = min(len(mine), len(ends))
            end[mine[:known]] = ends[:known] + 1
        known = stream[:count]
        missing = count - len(known)
        return RetireLog(
            tuple(item.name for item in known) + ("",) * missing,
            tuple(item.layer for item in known) + ("",) * missing,
            np.array([item.index for item in known] + [NEVER] * missing, np.int64),
            engine, issue, start, end,
        )  # fmt: skip

    # What went wrong.

    def _fatal(self) -> NoReturn:
        message = self.library.tw_message(self.sim).decode(errors="replace")
        raise TilewrightError("E0803", "the built RTL broke off", message.splitlines()[:4])

    def _fail(self, status: int) -> NoReturn:
        if status == FATAL:
            self._fatal()
        if status == TRACE_LOST:
            # What it was is known when the trace is closed.
            raise self._trace_lost(self._end_trace())
        cycle = self.library.tw_cycle(self.sim)
        blocked = self._blocked()
        if status == RUNNING:
            raise TilewrightError(
                "E0804",
                f"the program has not ended after {cycle} cycles",
                blocked,
                "`--max-cycles` sets the limit",
            )
        if status == OUT_OF_RANGE:
            kind = self.library.tw_fault_kind(self.sim)
            what = ("read from DDR", "write to DDR", "fetch from code")[kind]
            size = len(self.code) if kind == FETCH else self.ddr.size
            address = self.library.tw_fault_address(self.sim)
            message = f"cycle {cycle}: {what} at address 0x{address:x}, which has 0x{size:x} bytes"
        elif status == TRAPPED:
            message = f"the chip trapped in cycle {cycle}: not a legal instruction"
        else:
            message = f"deadlock: no engine can go on after cycle {cycle}"
        at = self.library.tw_dispatched(self.sim)
        if at < len(self.stream):
            raise machine_error(self.stream[at], message, blocked)
        raise TilewrightError("E0602", f"after {at} instructions: {message}", blocked)

    def _blocked(self) -> list[str]:
        """Return a line for each engine that has something to do: what it waits for."""
        raw = np.zeros(6, np.uint32)
        self.library.tw_state(self.sim, raw.ctypes.data)
        state = _State(*(int(value) for value in raw))
        log = self._log()
        lines: list[str] = []
        waiting: dict[int, int] = {}
        for number in range(SEQ):
            mine = np.flatnonzero(log.engine == number)
            started = int(np.count_nonzero(log.start[mine] != NEVER))
            ended = int(np.count_nonzero(log.end[mine] != NEVER))
            waiting[number] = len(mine) - started
            if started > ended:
                lines.append(self._line(number, int(mine[started - 1]), _stall(number, state)))
            elif len(mine) > started:
                lines.append(self._line(number, int(mine[started]), "", state))
        at = len(log.issue)
        if at < len(self.stream):
            item = self.stream[at]
            if item.engine != SEQ and waiting[item.engine] >= self.hardware.queue_depth:
                why = f"waits for a place in the queue of {ENGINE_NAMES[item.engine]}"
                lines.append(self._line(SEQ, at, why))
            elif item.engine == SEQ and not item.fields["wait"] & state.semaphore_zero:
                lines.append(self._line(SEQ, at, "waits for all engines"))
            elif item.engine == SEQ:
                lines.append(self._line(SEQ, at, "", state))
        return lines

    def _line(self, engine: int, position: int, why: str, state: _State | None = None) -> str:
        name = ENGINE_NAMES[engine]
        if position >= len(self.stream):
            return f"{name}: an instruction beyond the program {why}"
        item = self.stream[position]
        if state is not None:
            missing = item.fields["wait"] & state.semaphore_zero
            numbers = [str(bit) for bit in range(32) if missing >> bit & 1]
            why = f"waits for semaphore {', '.join(numbers)}" if numbers else "does not start"
        return f'{name}: instruction {item.index} ({item.name}) of layer "{item.layer}" {why}'


def _stall(engine: int, state: _State) -> str:
    if state.accumulator >> engine & 1 and engine in (MAC, VEC):
        half = "an emptied half" if engine == MAC else "a pushed half"
        return f"waits for {half} of the M registers"
    if state.bank >> engine & 1:
        return "waits for a bank of SRAM"
    if state.ddr >> engine & 1:
        return "waits for DDR"
    return "has started and does not end"
