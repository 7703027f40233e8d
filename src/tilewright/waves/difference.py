"""Where a run of the chip first leaves its program: the first write that is wrong.

The writes a waveform shows at SRAM's ports and DDR's are compared, in time order, with what the
functional simulator says the instruction running there writes. The result names cycle, signal,
instruction and the user's node.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import TilewrightError
from tilewright.sim.functional import FunctionalSimulator
from tilewright.sim.state import State
from tilewright.spec.access import Access, accesses
from tilewright.spec.hardware import Hardware
from tilewright.spec.program import (
    DEFAULTS,
    ENGINE_NAMES,
    SEQ,
    VEC,
    Dispatched,
    Instr,
    as_program,
    sequence,
)
from tilewright.waves.identity import identity_places, stranger
from tilewright.waves.reader import Sampled, Waveform
from tilewright.waves.retire import LOG_SIGNALS, Retired, log_places, retired_of

Bytes = npt.NDArray[np.uint8]
Kind = Literal["value", "outside", "missing", "idle", "dispatch"]
SRAM_PORTS, DDR_PORTS = 9, 5
VECTOR_WRITE, FIRST_CHANNEL = 4, 5
"""SRAM ports that write: the vector unit's, and those of DMA channels 0..3 from 5 on."""
MEM_SIGNALS = ("mem_valid", "mem_write", "mem_code", "mem_address", "mem_mask", "mem_data")

_WHAT = {
    "value": "writes a wrong value",
    "outside": "writes where its instruction does not",
    "missing": "has ended without writing a byte",
    "idle": "writes while none of its instructions runs",
    "dispatch": "gets another instruction than the program has",
}


@dataclass(frozen=True)
class Difference:
    """The first write, or dispatch, that differs from the program."""

    kind: Kind
    cycle: int
    signal: str
    """Full name of the signal that shows it, with the index of the port."""
    engine: int
    memory: str
    """`sram`, `ddr`, or empty."""
    address: int
    """Byte."""
    expected: int
    """By the functional simulator; -1 when the instruction writes nothing there."""
    found: int
    """In the waveform; -1 when nothing was written."""
    index: int
    """Instruction, by position in the program; -1 when none runs."""
    name: str
    layer: str
    """The user's node."""
    op: str
    """The operation of the tpu level."""
    conv: int = -1
    """The `mac_conv` whose accumulators a `vec_drain` writes, by position in the program."""

    def lines(self) -> list[str]:
        """Return what to tell a user."""
        engine = ENGINE_NAMES[self.engine]
        lines = [f"cycle {self.cycle}: {engine} {_WHAT[self.kind]} ({self.signal})"]
        if self.memory:
            must = f"must be 0x{self.expected:02x}" if self.expected >= 0 else "is not its to write"
            found = f", found 0x{self.found:02x}" if self.found >= 0 else ""
            lines.append(f"  {self.memory} 0x{self.address:x} {must}{found}")
        if self.index >= 0:
            lines.append(f'  instruction {self.index} ({self.name}) of layer "{self.layer}"')
            lines.append(f"  {self.op}")
        if self.conv >= 0:
            lines.append(f"  its accumulators are of instruction {self.conv} (mac_conv)")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "engine": ENGINE_NAMES[self.engine]}


def first_difference(
    waveform: Path | str,
    program: bytes | Sequence[Instr],
    hardware: Hardware,
    ddr: Bytes,
    *,
    registers: Mapping[int, int] | None = None,
    prefix: str = "",
) -> Difference | None:
    """Return the first difference of a run from its program, or None.

    Args:
        waveform: VCD or FST file with the signals of `tw_top` and of the ports of its SRAM.
        program: what ran; decoded, it also has the user's node names.
        hardware: the target.
        ddr: DDR's content before the run; not changed.
        registers: R registers before the run.
        prefix: scope to look in; otherwise all are searched.

    Raises:
        TilewrightError: E0603 the signals are not there, or are of another chip or code; E0701,
            E0703 the file cannot be read; E0602 the program breaks a rule of the machine.
    """
    code = as_program(program)
    wave = _Wave(waveform, hardware, prefix)
    # A fault of the chip is looked for: times may be anything, but the program must be this one.
    foreign = stranger(wave.retired, hardware, code)
    if foreign is not None:
        raise foreign
    stream = list(sequence(code, hardware.scalar_registers, registers))
    wrong = _first_dispatch(wave.retired, stream)
    known = wrong if wrong is not None else len(wave.retired.engine)
    expected = _expected(code, stream, hardware, ddr, registers, wave.retired, known)
    found = _Replay(wave, stream, code, expected, known).run()
    if found is not None and found.name == "vec_drain":
        found = replace(found, conv=_conv_of(found, stream, wave.retired))
    if wrong is None:
        return found
    cycle = int(wave.retired.issue[wrong])
    if found is not None and found.cycle <= cycle:
        return found
    number = int(wave.retired.engine[wrong])
    item = stream[wrong] if wrong < len(stream) else None
    return _difference(
        "dispatch",
        cycle,
        f"{wave.retired.scope}.dispatch_engine",
        number,
        "",
        0,
        -1,
        -1,
        item,
        code,
    )


def _conv_of(found: Difference, stream: Sequence[Dispatched], retired: Retired) -> int:
    """Return the `mac_conv` of the `vec_drain` that ran in the cycle of a difference."""
    pushed: deque[int] = deque()
    conv = -1
    for place, item in enumerate(stream):
        if item.name == "mac_conv" and item.fields["push"]:
            pushed.append(item.index)
        elif item.name == "vec_drain" and pushed:
            conv = pushed.popleft()
            # A program in a loop has the same drain many times.
            if item.index == found.index and place < len(retired.end):
                end = int(retired.end[place])
                if end < 0 or found.cycle < end:
                    break
    return conv


def _first_dispatch(retired: Retired, stream: Sequence[Dispatched]) -> int | None:
    for index, number in enumerate(retired.engine.tolist()):
        if index >= len(stream) or stream[index].engine != number:
            return index
    return None


def _difference(
    kind: Kind,
    cycle: int,
    signal: str,
    engine: int,
    memory: str,
    address: int,
    expected: int,
    found: int,
    item: Dispatched | None,
    code: Sequence[Instr],
) -> Difference:
    index, name, layer, op = -1, "", "", ""
    if item is not None:
        index, name, layer = item.index, item.name, item.layer
        op = _operation(code[index])
    return Difference(
        kind, cycle, signal, engine, memory, address, expected, found, index, name, layer, op
    )


def _operation(instr: Instr) -> str:
    from tilewright.dialects.tpu import format_field

    defaults = DEFAULTS[instr.name]
    fields = [
        f"{name} = {format_field(name, value)}"
        for name, value in instr.fields.items()
        if defaults[name] != value
    ]
    return f"tpu.{instr.name}" + (f" #tpu.f<{', '.join(fields)}>" if fields else "")


# What instructions write.


class _Written:
    """The bytes an instruction writes: disjoint intervals and their content."""

    def __init__(self, regions: Sequence[Access], memory: Bytes) -> None:
        self.sram = regions[0].sram
        spans = sorted(
            (start, start + region.run) for region in regions for start in region.starts().tolist()
        )
        self.lows: list[int] = []
        self.highs: list[int] = []
        for low, high in spans:
            if self.highs and low <= self.highs[-1]:
                self.highs[-1] = max(self.highs[-1], high)
            else:
                self.lows.append(low)
                self.highs.append(high)
        self.content = [
            memory[low:high].tobytes() for low, high in zip(self.lows, self.highs, strict=True)
        ]
        self.done = [bytearray(len(part)) for part in self.content]

    def find(self, address: int) -> tuple[int, int] | None:
        """Return the interval of a byte and the byte's place in it."""
        place = bisect_right(self.lows, address) - 1
        if place < 0 or address >= self.highs[place]:
            return None
        return place, address - self.lows[place]

    def missing(self) -> int | None:
        """Return the address of a byte not written yet."""
        for low, done in zip(self.lows, self.done, strict=True):
            hole = done.find(0)
            if hole >= 0:
                return low + hole
        return None


def _expected(
    code: Sequence[Instr],
    stream: Sequence[Dispatched],
    hardware: Hardware,
    ddr: Bytes,
    registers: Mapping[int, int] | None,
    retired: Retired,
    known: int,
) -> dict[int, _Written]:
    """Return what each instruction that started writes, by place in the stream."""
    places: list[list[int]] = [[] for _ in range(SEQ)]
    for place, item in enumerate(stream):
        if item.engine != SEQ:
            places[item.engine].append(place)
    completed = [0] * SEQ
    found: dict[int, _Written] = {}

    def hook(at: Dispatched, state: State) -> None:
        place = places[at.engine][completed[at.engine]]
        completed[at.engine] += 1
        if place >= known or retired.start[place] < 0:
            return
        writes = [r for r in accesses(hardware, at.name, at.fields) if r.write]
        if writes:
            found[place] = _Written(writes, state.sram if writes[0].sram else state.ddr)

    FunctionalSimulator(hardware).run(code, ddr.copy(), registers=registers, hook=hook)
    return found


# The waveform.


@dataclass(frozen=True)
class _Write:
    cycle: int
    engine: int
    """-1: DDR does not show whose it is."""
    sram: bool
    address: int
    mask: int
    data: int
    signal: str


def _request_places(wave: Waveform, scope: str) -> dict[str, str]:
    """Return the signals of SRAM's requests: one packed array, or a scope a port with its fields.

    Simulators show a packed array of structures either way.
    """
    if wave.has(scope, "request"):
        return {"request": f"{scope}.request"}
    fields = ("write", "address", "mask", "data")
    places = {
        f"{port}.{name}": f"{scope}.request[{port}].{name}"
        for port in range(VECTOR_WRITE, SRAM_PORTS)
        for name in fields
    }
    shown = all(
        wave.has(f"{scope}.request[{port}]", name)
        for port in range(VECTOR_WRITE, SRAM_PORTS)
        for name in fields
    )
    return places if shown else {}


class _Wave:
    """Signals of one run: the log, and the ports of the memories."""

    def __init__(self, path: Path | str, hardware: Hardware, prefix: str) -> None:
        wave = Waveform(path)
        self.hardware = hardware
        top = wave.scope_with((*LOG_SIGNALS, "clk"), prefix)
        places = log_places(top) | identity_places(wave, top)
        self.sram = self.ddr = ""
        for scope in wave.scopes(("granted",), top):
            width = wave.changes([f"{scope}.granted"])[f"{scope}.granted"].width
            if width == SRAM_PORTS and not self.sram:
                ports = _request_places(wave, scope)
                if ports:
                    self.sram = scope
                    places |= {**ports, "granted": f"{scope}.granted"}
            elif width == DDR_PORTS and not self.ddr:
                self.ddr = scope
                places["ddr_granted"] = f"{scope}.granted"
        if not self.sram:
            raise TilewrightError(
                "E0603",
                f"`{path}` does not show the ports of SRAM",
                [f"`request` and `granted` ({SRAM_PORTS} ports) in a scope below `{top}`"],
                "trace the ports of `tw_sram`",
            )
        self.has_memory = all(wave.has(top, name) for name in MEM_SIGNALS)
        if self.has_memory:
            places |= {name: f"{top}.{name}" for name in MEM_SIGNALS}
        self.sampled: Sampled = wave.sample(places, top)
        self.retired = retired_of(self.sampled, wave.path.name)
        self._check_width(str(path))

    def _check_width(self, path: str) -> None:
        word = self.hardware.sram_word_bytes
        widths = {
            "request": SRAM_PORTS * self._request_bits,
            f"{VECTOR_WRITE}.address": self._address_bits,
            f"{VECTOR_WRITE}.mask": word,
            f"{VECTOR_WRITE}.data": 8 * word,
        }
        for name, expected in widths.items():
            width = self.sampled.widths.get(name, expected)
            if width != expected:
                raise TilewrightError(
                    "E0603",
                    f"`{path}` is not of target `{self.hardware.name}`",
                    [f"`{self.sram}.request` ({name}) has {width} bits, not {expected}"],
                )

    @property
    def _address_bits(self) -> int:
        words = self.hardware.sram_size // self.hardware.sram_word_bytes
        return (words - 1).bit_length()

    @property
    def _request_bits(self) -> int:
        return 2 + self._address_bits + 9 * self.hardware.sram_word_bytes

    def writes(self) -> Iterator[_Write]:
        """Yield the writes in order of time."""
        signals = self.sampled.signals
        for cycle, granted in enumerate(signals["granted"]):
            for port in range(VECTOR_WRITE, SRAM_PORTS) if granted >> VECTOR_WRITE else ():
                if not granted >> port & 1:
                    continue
                write, address, mask, data = self._request(cycle, port)
                if not write:
                    continue
                engine = VEC if port == VECTOR_WRITE else port - FIRST_CHANNEL
                address *= self.hardware.sram_word_bytes
                signal = f"{self.sram}.request[{port}]"
                yield _Write(cycle, engine, True, address, mask, data, signal)
            if self.has_memory and signals["mem_valid"][cycle]:
                yield from self._ddr_write(cycle)

    def _request(self, cycle: int, port: int) -> tuple[int, int, int, int]:
        """Return (write, address, mask, data) of an SRAM port."""
        signals = self.sampled.signals
        if "request" not in signals:
            write, address, mask, data = (
                signals[f"{port}.{name}"][cycle] for name in ("write", "address", "mask", "data")
            )
            return write, address, mask, data
        word, bits = self.hardware.sram_word_bytes, self._request_bits
        value = signals["request"][cycle] >> port * bits
        data = value & (1 << 8 * word) - 1
        mask = value >> 8 * word & (1 << word) - 1
        address = value >> 9 * word & (1 << self._address_bits) - 1
        return value >> bits - 2 & 1, address, mask, data

    def _ddr_write(self, cycle: int) -> Iterator[_Write]:
        signals = self.sampled.signals
        if not signals["mem_write"][cycle] or signals["mem_code"][cycle]:
            return
        engine = -1
        if self.ddr:
            granted = signals["ddr_granted"][cycle]
            engine = granted.bit_length() - 1
        yield _Write(
            cycle, engine, False, signals["mem_address"][cycle], signals["mem_mask"][cycle],
            signals["mem_data"][cycle], f"{self.sampled.scope}.mem_data",
        )  # fmt: skip


class _Replay:
    """Compares the writes of a waveform with those of the program."""

    def __init__(
        self,
        wave: _Wave,
        stream: Sequence[Dispatched],
        code: Sequence[Instr],
        expected: Mapping[int, _Written],
        known: int,
    ) -> None:
        self.wave = wave
        self.stream = stream
        self.code = code
        self.expected = expected
        retired = wave.retired
        self.places: list[list[int]] = [[] for _ in range(SEQ)]
        for place, number in enumerate(retired.engine[:known].tolist()):
            if number != SEQ and retired.start[place] >= 0:
                self.places[number].append(place)
        self.starts = [[int(retired.start[p]) for p in own] for own in self.places]
        self.ends = sorted(
            (int(retired.end[p]) - 1, p) for own in self.places for p in own if retired.end[p] >= 0
        )

    def run(self) -> Difference | None:
        """Return the first difference."""
        ended = 0
        word, unit = self.wave.hardware.sram_word_bytes, self.wave.hardware.ddr_bus_bytes
        for write in self.wave.writes():
            while ended < len(self.ends) and self.ends[ended][0] < write.cycle:
                found = self._end(*self.ends[ended])
                if found is not None:
                    return found
                ended += 1
            found = self._write(write, word if write.sram else unit)
            if found is not None:
                return found
        for cycle, place in self.ends[ended:]:
            found = self._end(cycle, place)
            if found is not None:
                return found
        return None

    def _running(self, engine: int, cycle: int) -> int:
        """Return the instruction an engine executes in a cycle, by place, or -1."""
        at = bisect_left(self.starts[engine], cycle) - 1
        if at < 0:
            return -1
        place = self.places[engine][at]
        end = int(self.wave.retired.end[place])
        return place if end < 0 or cycle < end else -1

    def _whose(self, write: _Write) -> tuple[int, int]:
        """Return the engine and instruction of a write."""
        if write.engine >= 0:
            return write.engine, self._running(write.engine, write.cycle)
        # DDR shows only the address: take the store whose it is, else any that runs.
        running = [(e, self._running(e, write.cycle)) for e in range(4)]
        stores = [(e, p) for e, p in running if p in self.expected and not self.expected[p].sram]
        first = write.address + (write.mask & -write.mask).bit_length() - 1
        for engine, place in stores:
            if self.expected[place].find(first) is not None:
                return engine, place
        return stores[0] if stores else (0, -1)

    def _write(self, write: _Write, size: int) -> Difference | None:
        engine, place = self._whose(write)
        written = self.expected.get(place)
        data = write.data.to_bytes(size, "little")
        memory = "sram" if write.sram else "ddr"
        item = self.stream[place] if place >= 0 else None
        if written is not None and written.sram == write.sram:
            found = written.find(write.address)
            full = write.mask == (1 << size) - 1
            if full and found is not None:
                part, at = found
                content = written.content[part]
                if content[at : at + size] == data:
                    written.done[part][at : at + size] = b"\x01" * size
                    return None
        for offset in range(size):
            if not write.mask >> offset & 1:
                continue
            address, value = write.address + offset, data[offset]
            found = None
            if written is not None and written.sram == write.sram:
                found = written.find(address)
            if found is None or written is None:
                kind: Kind = "outside" if place >= 0 else "idle"
                return _difference(
                    kind, write.cycle, write.signal, engine, memory, address, -1, value,
                    item, self.code,
                )  # fmt: skip
            part, at = found
            must = written.content[part][at]
            written.done[part][at] = 1
            if must != value:
                return _difference(
                    "value", write.cycle, write.signal, engine, memory, address, must, value,
                    item, self.code,
                )  # fmt: skip
        return None

    def _end(self, cycle: int, place: int) -> Difference | None:
        written = self.expected.get(place)
        if written is None or (not written.sram and not self.wave.has_memory):
            return None
        item = self.stream[place]
        memory = "sram" if written.sram else "ddr"
        signal = f"{self.wave.sampled.scope}.done[{item.engine}]"
        hole = written.missing()
        if hole is None:
            return None
        found = written.find(hole)
        assert found is not None, "it is one of its bytes"
        must = written.content[found[0]][found[1]]
        return _difference(
            "missing", cycle, signal, item.engine, memory, hole, must, -1, item, self.code
        )
