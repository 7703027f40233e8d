"""Runs a program on the RTL and on both simulators; says first where they differ.

Values come from the functional simulator, times from the cycle simulator. A byte that differs is
laid to the instruction that wrote it last in program order; of all such instructions the earliest
is the one to look at, since later ones may only have read what it left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright.cosim.driver import COUNTERS, NEVER, RtlResult, RtlSimulator
from tilewright.sim.cycle import CycleSimulator
from tilewright.sim.cycle_tables import table_indices
from tilewright.sim.functional import FunctionalSimulator
from tilewright.sim.retire import CycleResult, RetireLog
from tilewright.sim.state import SRAM_RESET, State
from tilewright.spec.access import MAX_RUNS, Access, accesses
from tilewright.spec.hardware import Hardware
from tilewright.spec.program import (
    ADDRESSES,
    ENGINE_NAMES,
    Dispatched,
    Instr,
    as_program,
    sequence,
)

Bytes = npt.NDArray[np.uint8]
Tables = list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]

MAX_WRITERS = 4096
"""Differing bytes, spread over all of them, whose writers are looked for."""


@dataclass(frozen=True)
class ByteDifference:
    """Memory that differs, and who wrote it."""

    memory: str
    """`sram` or `ddr`."""
    count: int
    """Bytes that differ."""
    address: int
    """The first of them (of a sample, when they are many) that the instruction below wrote."""
    expected: int
    """By the functional simulator."""
    found: int
    """In the RTL."""
    writer: Dispatched | None
    """The earliest instruction whose result differs; None when the program wrote none of it."""
    position: int = NEVER
    """Its place in the order of dispatch."""

    def lines(self) -> list[str]:
        """Return what to tell a user."""
        who = f"written by {_named(self.writer, self.position)}" if self.writer else "never written"
        return [
            f"{self.memory}: {self.count} bytes differ; 0x{self.address:x} must be "
            f"0x{self.expected:02x}, not 0x{self.found:02x}",
            f"  {who}",
            *([f"  {_assembly(self.writer)}"] if self.writer else []),
        ]


@dataclass(frozen=True)
class TimeDifference:
    """The first instruction of an engine whose times differ."""

    engine: str
    count: int
    """Instructions of the engine whose times differ."""
    at: Dispatched | None
    position: int
    """Its place in the order of dispatch."""
    expected: tuple[int, int, int]
    """Issue, start and end by the cycle simulator."""
    found: tuple[int, int, int]
    """The same in the RTL; -1 for what did not happen."""

    def lines(self) -> list[str]:
        """Return what to tell a user."""
        parts = [
            f"{name} must be {expected}, not {found}"
            for name, expected, found in zip(
                ("issue", "start", "end"), self.expected, self.found, strict=True
            )
            if expected != found
        ]
        where = _named(self.at, self.position) if self.at else f"dispatch {self.position}"
        return [f"{self.engine}: {where}: {', '.join(parts)} ({self.count} differ)"]


@dataclass(frozen=True)
class CounterDifference:
    """A performance counter of the chip that has another count than the cycle simulator."""

    engine: str
    counter: str
    """As in `COUNTERS`."""
    expected: int
    """By the cycle simulator."""
    found: int

    def lines(self) -> list[str]:
        """Return what to tell a user."""
        return [f"{self.engine}: counter {self.counter} must be {self.expected}, not {self.found}"]


@dataclass(frozen=True)
class Comparison:
    """What three runs of one program gave."""

    rtl: RtlResult
    cycle: CycleResult
    stream: list[Dispatched]
    bytes: list[ByteDifference] = field(default_factory=list[ByteDifference])
    """A memory's first difference, DDR before SRAM."""
    order: str = ""
    """How the instructions dispatched differ; empty when they do not."""
    times: list[TimeDifference] = field(default_factory=list[TimeDifference])
    """Each engine's first difference, the earliest first."""
    counters: list[CounterDifference] = field(default_factory=list[CounterDifference])
    """Where the chip's performance counters differ, though it has some."""

    @property
    def same_values(self) -> bool:
        """Whether SRAM and DDR are equal bit for bit."""
        return not self.bytes

    @property
    def same_times(self) -> bool:
        """Whether every issue, start and end is equal, the cycles, and what they went into."""
        differ = self.order or self.times or self.counters
        return not differ and self.rtl.cycles == self.cycle.cycles

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return self.same_values and self.same_times

    def lines(self) -> list[str]:
        """Return all differences for a user; empty when there are none."""
        found = [self.order] if self.order else []
        if self.rtl.cycles != self.cycle.cycles:
            found.append(f"cycles must be {self.cycle.cycles}, not {self.rtl.cycles}")
        # Other times make other counts: those are told only where they are all that differs.
        counters = () if self.times or self.order else self.counters
        for difference in (*self.bytes, *self.times, *counters):
            found += difference.lines()
        return found


def _named(item: Dispatched | None, position: int) -> str:
    if item is None:
        return f"dispatch {position}"
    return f'instruction {item.index} ({item.name}) of layer "{item.layer}", dispatch {position}'


def _assembly(item: Dispatched | None) -> str:
    """Return what the engine saw: registers are in the addresses already."""
    from tilewright.codegen.assembler import format_instruction

    if item is None:
        return ""
    added = {register: 0 for _, register in ADDRESSES[item.name]}
    return format_instruction(Instr(item.name, {**item.fields, **added}))


@dataclass
class _Memory:
    """Keeps SRAM, which the functional simulator shows only to its hook, and what it held."""

    sram: Bytes
    tables: Tables

    def __call__(self, at: Dispatched, state: State) -> None:
        self.sram = state.sram
        if at.name == "vec_resize":
            self.tables.append(table_indices(state, at.fields))


def functional_memory(
    hardware: Hardware,
    code: bytes | Sequence[Instr],
    ddr: Bytes,
    registers: Mapping[int, int] | None,
    tables: Tables,
) -> Bytes:
    """Run the functional simulator; return SRAM.

    `ddr` is changed in place; `tables` gets the indices of each `vec_resize`, as of
    `cycle_tables.resize_tables`.
    """
    memory = _Memory(np.full(hardware.sram_size, SRAM_RESET, np.uint8), tables)
    FunctionalSimulator(hardware).run(code, ddr, registers=registers, hook=memory)
    return memory.sram


def compare_program(
    simulator: RtlSimulator,
    code: bytes | Sequence[Instr],
    ddr: Bytes,
    *,
    registers: Mapping[int, int] | None = None,
    layers: Sequence[str] = (),
    fault: int = 0,
    max_cycles: int | None = None,
) -> Comparison:
    """Run a program three times and compare; `ddr` is left as the RTL leaves it.

    Args:
        simulator: the RTL of the target.
        code: encoded or decoded instructions.
        ddr: all of DDR that exists.
        registers: initial R registers.
        layers: the layer of each instruction when `code` is bytes.
        fault: number of the planted fault, see `RtlSimulator.run`.
        max_cycles: see `RtlSimulator.run`.

    Raises:
        TilewrightError: what the simulators or the RTL say of a program that breaks a rule.
    """
    hardware = simulator.hardware
    program = as_program(code, layers)
    expected = ddr.copy()
    tables: Tables = []
    sram = functional_memory(hardware, program, expected, registers, tables)
    cycle = CycleSimulator(hardware).run(program, registers=registers, tables=tables)
    rtl = simulator.run(
        code, ddr, registers=registers, layers=layers, fault=fault, max_cycles=max_cycles
    )
    stream = list(sequence(program, hardware.scalar_registers, registers))
    return compare_results(hardware, stream, rtl, cycle, expected, sram)


def compare_results(
    hardware: Hardware,
    stream: list[Dispatched],
    rtl: RtlResult,
    cycle: CycleResult,
    ddr: Bytes,
    sram: Bytes,
) -> Comparison:
    """Compare a run on the RTL with what the simulators left (`ddr` and `sram`: functional)."""
    memories = [("ddr", ddr, rtl.ddr), ("sram", sram, rtl.sram)]
    found = [_bytes(hardware, stream, *memory) for memory in memories]
    order = _order(stream, rtl.log)
    times = [] if order else _times(stream, rtl.log, cycle.log)
    counters = counter_differences(rtl, cycle)
    return Comparison(rtl, cycle, stream, [item for item in found if item], order, times, counters)


def counter_differences(rtl: RtlResult, cycle: CycleResult) -> list[CounterDifference]:
    """Return where the chip's performance counters differ; a chip that counts nothing has none."""
    if not rtl.counted_cycles and not any(any(own.values()) for own in rtl.counters.values()):
        return []
    return [
        CounterDifference(engine, name, expected, own[name])
        for engine, own in rtl.counters.items()
        for name in COUNTERS
        # Engines without instructions are not in the simulator's.
        if own[name] != (expected := cycle.engines.get(engine, {}).get(name, 0))
    ]


def _bytes(
    hardware: Hardware, stream: Sequence[Dispatched], memory: str, expected: Bytes, found: Bytes
) -> ByteDifference | None:
    wrong = np.flatnonzero(expected != found)
    if not len(wrong):
        return None
    # Of many, look at some: a wrong instruction leaves many bytes behind.
    chosen = wrong[np.linspace(0, len(wrong) - 1, min(MAX_WRITERS, len(wrong))).astype(np.int64)]
    writers = _writers(hardware, stream, memory == "sram", chosen)
    position, address = min((writers.get(int(at), len(stream)), int(at)) for at in chosen)
    writer = stream[position] if position < len(stream) else None
    return ByteDifference(
        memory, len(wrong), address, int(expected[address]), int(found[address]), writer,
        position if writer else NEVER,
    )  # fmt: skip


def _written(hardware: Hardware, item: Dispatched, sram: bool) -> Iterator[Access]:
    for region in accesses(hardware, item.name, item.fields):
        if region.write and region.sram == sram:
            yield region


def _contains(region: Access, addresses: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Tell for each address whether the region holds it (its span, when it has too many runs)."""
    if region.runs > MAX_RUNS:
        return (addresses >= region.address) & (addresses < region.end)
    starts = region.starts()
    before = np.searchsorted(starts, addresses, side="right") - 1
    return (before >= 0) & (addresses < starts[np.maximum(before, 0)] + region.run)


def _writers(
    hardware: Hardware, stream: Sequence[Dispatched], sram: bool, addresses: npt.NDArray[np.int64]
) -> dict[int, int]:
    """Return the position of the last instruction that wrote each address."""
    left = addresses
    writers: dict[int, int] = {}
    for position in range(len(stream) - 1, -1, -1):
        for region in _written(hardware, stream[position], sram):
            inside = _contains(region, left)
            if inside.any():
                writers.update(dict.fromkeys(left[inside].tolist(), position))
                left = left[~inside]
        if not len(left):
            break
    return writers


def _order(stream: Sequence[Dispatched], log: RetireLog) -> str:
    expected = np.array([item.engine for item in stream], np.int64)
    common = min(len(expected), len(log.engine))
    wrong = np.flatnonzero(expected[:common] != log.engine[:common])
    if len(wrong):
        at = int(wrong[0])
        return (
            f"dispatch {at} must be {_named(stream[at], at)} on {ENGINE_NAMES[expected[at]]}, "
            f"not on {ENGINE_NAMES[int(log.engine[at])]}"
        )
    if len(expected) != len(log.engine):
        return f"{len(expected)} instructions must be dispatched, not {len(log.engine)}"
    return ""


def _times(stream: Sequence[Dispatched], rtl: RetireLog, cycle: RetireLog) -> list[TimeDifference]:
    if len(rtl.issue) != len(cycle.issue):
        raise ValueError("the logs are of different programs")
    pairs = [(cycle.issue, rtl.issue), (cycle.start, rtl.start), (cycle.end, rtl.end)]
    wrong: Any = np.zeros(len(rtl.issue), np.bool_)
    earliest = np.full(len(rtl.issue), np.iinfo(np.int64).max)
    for expected, found in pairs:
        differs = expected != found
        wrong |= differs
        np.minimum(earliest, np.where(differs, expected, earliest), out=earliest)
    result: list[tuple[int, TimeDifference]] = []
    for engine, name in enumerate(ENGINE_NAMES):
        mine = np.flatnonzero(wrong & (rtl.engine == engine))
        if not len(mine):
            continue
        at = int(mine[0])
        times = [tuple(int(side[at]) for side in sides) for sides in zip(*pairs, strict=True)]
        difference = TimeDifference(
            name, len(mine), stream[at], at, _three(times[0]), _three(times[1])
        )
        result.append((int(earliest[at]), difference))
    return [difference for _, difference in sorted(result, key=lambda pair: pair[0])]


def _three(values: tuple[int, ...]) -> tuple[int, int, int]:
    issue, start, end = values
    return issue, start, end
