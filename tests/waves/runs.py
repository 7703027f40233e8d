"""Waveforms of whole runs, made up from both simulators: times of one, values of the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.waves.vcd import log_signals, write_vcd
from tilewright.sim.cycle import CycleSimulator
from tilewright.sim.functional import FunctionalSimulator
from tilewright.sim.state import State
from tilewright.spec.access import accesses
from tilewright.spec.hardware import Hardware
from tilewright.spec.program import VEC, Dispatched, Instr, sequence
from tilewright.waves.retire import Retired, mismatch

Bytes = npt.NDArray[np.uint8]
TOP = "TOP.tw_top"


@dataclass
class UnitWrite:
    """A write of one word of SRAM or unit of DDR, as a port shows it."""

    place: int
    """Instruction, by place in the stream."""
    item: Dispatched
    sram: bool
    address: int
    mask: int
    data: int
    cycle: int = -1


def _units(
    regions: Sequence[tuple[int, int]], memory: Bytes, size: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (address, mask, data) of the units that byte ranges touch."""
    bytes_of: dict[int, dict[int, int]] = {}
    for low, high in regions:
        for address in range(low, high):
            bytes_of.setdefault(address // size, {})[address % size] = int(memory[address])
    for unit, content in bytes_of.items():
        mask = sum(1 << offset for offset in content)
        data = sum(value << 8 * offset for offset, value in content.items())
        yield unit * size, mask, data


def unit_writes(program: Sequence[Instr], hardware: Hardware, ddr: Bytes) -> list[UnitWrite]:
    """Return all writes of a run with their cycles."""
    stream = list(sequence(program, hardware.scalar_registers))
    log = CycleSimulator(hardware).run(program).log
    queues: dict[int, list[int]] = {}
    for place, item in enumerate(stream):
        queues.setdefault(item.engine, []).append(place)
    writes: list[UnitWrite] = []

    def hook(at: Dispatched, state: State) -> None:
        place = queues[at.engine].pop(0)
        for region in accesses(hardware, at.name, at.fields):
            if region.write:
                size = hardware.sram_word_bytes if region.sram else hardware.ddr_bus_bytes
                ranges = [(start, start + region.run) for start in region.starts().tolist()]
                memory = state.sram if region.sram else state.ddr
                for address, mask, data in _units(ranges, memory, size):
                    writes.append(UnitWrite(place, at, region.sram, address, mask, data))

    FunctionalSimulator(hardware).run(program, ddr.copy(), hook=hook)
    taken: set[tuple[int, int]] = set()
    for write in reversed(writes):
        port = write.item.engine if write.sram else -1
        cycle = int(log.end[write.place]) - 1
        while (port, cycle) in taken:
            cycle -= 1
        assert cycle > int(log.start[write.place]), "there is time for all of its writes"
        taken.add((port, cycle))
        write.cycle = cycle
    return writes


def write_run(
    path: Path,
    program: Sequence[Instr],
    hardware: Hardware,
    ddr: Bytes,
    change: Callable[[list[UnitWrite]], None] | None = None,
    *,
    ddr_ports: bool = True,
    split: bool = False,
) -> Path:
    """Write the waveform of a run; `change` may spoil its writes.

    With `split` the fields of SRAM's ports are signals of their own.
    """
    log = CycleSimulator(hardware).run(program).log
    writes = unit_writes(program, hardware, ddr)
    if change is not None:
        change(writes)
    signals = log_signals(log)
    cycles = len(signals[f"{TOP}.start"][1])
    word, unit = hardware.sram_word_bytes, hardware.ddr_bus_bytes
    address_bits = (hardware.sram_size // word - 1).bit_length()
    bits = 2 + address_bits + 9 * word
    request, granted, ddr_granted = [0] * cycles, [0] * cycles, [0] * cycles
    memory = {name: [0] * cycles for name in
              ("valid", "write", "code", "address", "mask", "data")}  # fmt: skip
    for write in writes:
        at = write.cycle
        if write.sram:
            port = 4 if write.item.engine == VEC else 5 + write.item.engine
            value = write.data | write.mask << 8 * word | write.address // word << 9 * word
            value |= 3 << 9 * word + address_bits
            request[at] |= value << port * bits
            granted[at] |= 1 << port
        else:
            ddr_granted[at] = 1 << write.item.engine
            memory["valid"][at] = memory["write"][at] = 1
            memory["address"][at] = write.address
            memory["mask"][at], memory["data"][at] = write.mask, write.data
    # Reads and requests that wait are on the ports too; they are no writes.
    for cycle in range(0, cycles, 3):
        if not request[cycle]:
            request[cycle], granted[cycle] = 1 << bits - 1, 1
        request[cycle] |= (3 << bits - 2) << 8 * bits
        granted[cycle] &= ~(1 << 8)
    if split:
        low = {"data": (0, 8 * word), "mask": (8 * word, word), "address": (9 * word, address_bits),
               "write": (bits - 2, 1), "valid": (bits - 1, 1)}  # fmt: skip
        for port in range(9):
            for name, (at, width) in low.items():
                values = [value >> port * bits + at & (1 << width) - 1 for value in request]
                signals[f"{TOP}.sram.request[{port}].{name}"] = (width, values)
    else:
        signals[f"{TOP}.sram.request"] = (9 * bits, request)
    signals[f"{TOP}.sram.granted"] = (9, granted)
    if ddr_ports:
        signals |= {f"{TOP}.ddr.request": (5, [0] * cycles), f"{TOP}.ddr.granted": (5, ddr_granted)}
    widths = {"valid": 1, "write": 1, "code": 1, "address": 40, "mask": unit, "data": 8 * unit}
    signals |= {f"{TOP}.mem_{name}": (widths[name], memory[name]) for name in memory}
    return write_vcd(path, signals)


def require_match(retired: Retired, stream: Sequence[Dispatched]) -> None:
    """Raise what tells a log from a complete run of a program, if anything does."""
    error = mismatch(retired, stream)
    if error is not None:
        raise error
