"""Grows a random program that is legal for a chip: places, registers, what may be read when.

Instruction makers (`patterns.py`) propose fields; `Builder.add` accepts what keeps the machine's
rules for all contents the R registers can have there. Semaphores come last (`sync.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tilewright.spec.access import Access, accesses
from tilewright.spec.hardware import Hardware
from tilewright.spec.isa import BY_NAME
from tilewright.spec.limits import table_registers, violations
from tilewright.spec.program import ADDRESSES, REGISTER_MASK, Instr, engine_of, full_fields
from tilewright.testgen.memory import Window, catalogue
from tilewright.testgen.sync import GATE, GATE_END
from tilewright.testgen.values import Pick

Fields = dict[str, int]


@dataclass
class Builder:
    """A program under construction."""

    hardware: Hardware
    pick: Pick
    windows: tuple[Window, ...]
    registers: dict[int, int]
    """Initial R registers."""
    program: list[Instr] = field(default_factory=list[Instr])

    def __post_init__(self) -> None:
        hw = self.hardware
        self.values: list[dict[int, int]] = [dict(self.registers)]
        """What the R registers may hold at this place: one entry an iteration."""
        self.live: list[tuple[int, int]] = []
        """Regions of SRAM written lately, to be read."""
        self.v_written = np.zeros(hw.vector_registers, np.bool_)
        self.entry: dict[int, int] = {}
        """Catalogue block in every parameter entry written."""
        self.in_loop = False
        self.data = Window(catalogue(hw).size, windows_low(self.windows) - catalogue(hw).size)
        self.table_registers = table_registers(hw)
        self.banks: tuple[int, ...] | None = None
        """Banks data are to lie in (contention)."""
        self.disturb_depth = 0

    # Places.

    def sram(self, span: int, *, read: bool = False, banks: Sequence[int] | None = None) -> int:
        """Return a place for `span` bytes (the caller checks that it fits)."""
        hw, pick = self.hardware, self.pick
        banks = banks if banks is not None else self.banks
        low, high = 0, hw.sram_size - span
        if banks is not None:
            bank = pick.one(list(banks))
            low = bank * hw.bank_size
            high = min((max(banks) + 1) * hw.bank_size - span, hw.sram_size - span)
        elif read and self.live and pick.chance(0.75):
            start, size = pick.one(self.live)
            place = start + (pick.between(0, max(0, size - span)) if pick.chance(0.6) else 0)
            return max(0, min(place, high))
        if high <= low:
            return max(0, min(low, hw.sram_size - span))
        kind = pick.rng.random()
        if kind < 0.1 and banks is None:
            border = hw.bank_size * pick.between(1, hw.sram_banks - 1)
            return max(low, min(high, border - pick.between(0, span)))
        if kind < 0.15:
            return pick.of(low, high)
        place = pick.between(low, high)
        if kind < 0.45:
            place -= place % hw.sram_word_bytes
        return max(low, place)

    def written(self, address: int, size: int) -> None:
        """Note bytes that hold data now."""
        self.live.append((address, size))
        del self.live[:-12]

    def ddr(self, span: int, align: int = 1, *, low: bool = False) -> int:
        """Return a place for `span` bytes in a window, outside the catalogue."""
        pick = self.pick
        windows = [self.data, *self.windows[1:]]
        windows = [window for window in windows if window.size >= span + align]
        if not windows:
            return self.data.address
        far = len(windows) > 1 and not low and pick.chance(0.75)
        window = pick.one(windows[1:]) if far else windows[0]
        first, last = window.address, window.end - span
        kind = pick.rng.random()
        if kind < 0.3:
            border = -(-first // 4096) * 4096 + 4096 * pick.between(0, window.size // 4096 - 1)
            place = border - pick.between(0, span)
        elif kind < 0.4:
            place = pick.of(first, last)
        elif kind < 0.6 and first < (power := 1 << (window.end - 1).bit_length() - 1) < last:
            place = power - pick.between(0, span)
        else:
            place = pick.between(first, last)
        place = min(max(place, first), last)
        place -= place % align
        return place if place >= first else -(-first // align) * align

    def address(self, name: str, place: int, bits: int = 24, *, steady: bool = False) -> Fields:
        """Return the fields of address operand `name`: sometimes relative to an R register.

        In a loop the place is that of the first iteration; `steady`: of all.
        """
        first = self.values[0]
        usable = [
            number
            for number, value in first.items()
            if number
            and (place - value) & REGISTER_MASK < 1 << bits
            and not (steady and any(values.get(number) != value for values in self.values))
        ]
        if usable and self.pick.chance(0.6):
            number = self.pick.one(usable)
            return {name: (place - first[number]) & REGISTER_MASK, f"{name}_r": number}
        return {name: place, f"{name}_r": 0}

    # Instructions.

    def fits(self, name: str, fields: Fields) -> bool:
        """Tell whether the machine's rules are kept whatever the registers hold here."""
        instruction = BY_NAME[name]
        for key, value in fields.items():
            item = instruction.field[key]
            if not item.low <= value <= item.high:
                return False
        f = full_fields(Instr(name, fields))
        moved = any(f[register] for _, register in ADDRESSES[name])
        for values in self.values if moved else self.values[:1]:
            at = dict(f)
            for address, register in ADDRESSES[name]:
                at[address] = (f[address] + values.get(f[register], 0)) & REGISTER_MASK
            regions = accesses(self.hardware, name, at)
            if any(True for _ in violations(self.hardware, name, at, regions)):
                return False
            if not all(self._in_window(region) for region in regions if not region.sram):
                return False
        return True

    def _in_window(self, region: Access) -> bool:
        low, high = region.address, region.end
        if region.write and low < self.data.address:
            return False
        if any(window.holds(low, high) for window in self.windows):
            return True
        # Runs in several windows: a few runs far apart.
        if region.runs > 64:
            return False
        return all(
            any(window.holds(int(start), int(start) + region.run) for window in self.windows)
            for start in region.starts()
        )

    def add(self, name: str, fields: Fields, layer: str = "") -> bool:
        """Append an instruction if it is legal here; tell whether it was."""
        if not self.fits(name, fields):
            return False
        self.append(Instr(name, fields, layer))
        return True

    def append(self, instr: Instr) -> None:
        """Append an instruction that is known to be legal."""
        self.program.append(instr)
        if instr.name == "set_reg":
            for values in self.values:
                values[instr.fields["rd"]] = instr.fields["value"]
        elif instr.name == "add_reg":
            for values in self.values:
                total = values.get(instr.fields["rd"], 0) + instr.fields["value"]
                values[instr.fields["rd"]] = total & REGISTER_MASK

    # Loops.

    def _scratch(self, body: Sequence[Instr]) -> tuple[int, int] | None:
        """Return 8 bytes and one of another bank that no instruction of a loop's body touches."""
        hw, pick = self.hardware, self.pick
        used: list[Access] = []
        for instr in body:
            f = full_fields(instr)
            pairs = ADDRESSES[instr.name]
            moved = any(f[register] for _, register in pairs)
            for values in self.values if moved else self.values[:1]:
                at = dict(f)
                for address, register in pairs:
                    at[address] = (f[address] + values.get(f[register], 0)) & REGISTER_MASK
                used += [r for r in accesses(hw, instr.name, at) if r.sram]
        for _ in range(20):
            scratch = pick.between(0, (hw.sram_size - 8) // 8) * 8
            bank = (scratch // hw.bank_size + pick.between(1, hw.sram_banks - 1)) % hw.sram_banks
            other = bank * hw.bank_size + pick.between(0, hw.bank_size - 1)
            own = (Access("", True, True, scratch, 8, ()), Access("", True, True, other, 1, ()))
            if not any(a.overlaps(r) for a in own for r in used):
                return scratch, other
        return None

    def gate(self, engine: int, layer: str, scratch: int, other: int) -> Instr:
        """Return an instruction of an engine that touches only a byte of its own."""
        if engine == 4:
            fields = {"act": scratch + 6, "wgt": other, "push": 0, "c_last": 1, "cols_last": 1}
            return Instr("mac_conv", fields, layer)
        if engine == 5:
            return Instr("vec_copy", {"src": scratch + 5, "dst": scratch + 5}, layer)
        return Instr("dma_fill", {"channel": engine, "sram": scratch + engine, "fill": 90}, layer)

    def close_loop(
        self, start: int, counts: Sequence[int], steps: dict[int, int], gated: bool
    ) -> None:
        """Wrap what was added from `start` on into loops of these counts, outermost first.

        Registers in `steps` grow by that much an iteration of the innermost loop.
        """
        body = self.program[start:]
        del self.program[start:]
        engines = sorted({engine_of(i.name, full_fields(i)) for i in body} - {6})
        place = self._scratch(body) if gated else None
        gated = place is not None
        scratch, other = place or (0, 0)
        if gated:
            self.program += [self.gate(engine, GATE, scratch, other) for engine in engines]
        else:
            self.program.append(Instr("fence"))
            body = [*body, Instr("fence")]
        self.program += [Instr("loop", {"count": count}) for count in counts]
        self.program += body
        for register, step in steps.items():
            self.program.append(Instr("add_reg", {"rd": register, "value": step}))
        self.program += [Instr("end_loop") for _ in counts]
        if gated:
            self.program += [self.gate(engine, GATE_END, scratch, other) for engine in engines]


def windows_low(windows: Sequence[Window]) -> int:
    """Return the end of the first window."""
    return windows[0].end


def valuations(first: dict[int, int], steps: dict[int, int], count: int) -> list[dict[int, int]]:
    """Return what the registers hold in every iteration."""
    result: list[dict[int, int]] = []
    for iteration in range(count if steps else 1):
        values = dict(first)
        for register, step in steps.items():
            values[register] = (values.get(register, 0) + iteration * step) & REGISTER_MASK
        result.append(values)
    return result
