"""What works row by row: where rows lie, and the instructions for some of them.

A unit is an instruction whose outermost loop can be cut, or a `mac_conv` with its `vec_drain`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from tilewright.schedule.list_schedule import Cost, cost_of
from tilewright.spec.access import Access, accesses
from tilewright.spec.hardware import Hardware
from tilewright.spec.program import DEFAULTS
from tilewright.transforms.tpu.instruction import Instr, Region

Fields = dict[str, int]
Axis = tuple[str, dict[str, str]]
"""A loop: the field of its count, and of every address field that of the stride."""


@dataclass(frozen=True)
class Rows:
    """Bytes of rows: row `r` lies in `[base + r * stride, base + r * stride + span)`."""

    base: int
    stride: int
    span: int

    def before(self, end: int) -> int:
        """Return how many of the first rows lie below an address."""
        if end < self.base + self.span:
            return 0
        return (end - self.span - self.base) // self.stride + 1


def _axis(name: str, f: Fields) -> Axis | None:
    """Return the outermost loop of an instruction that can be cut."""
    match name:
        case "mac_conv":
            return "out_h", {"act": "oy_stride"}
        case "vec_drain":
            return "out_h", {"dst": "oy_stride"}
        case "vec_pool":
            return "out_h", {"src": "src_sy", "dst": "dst_sy"}
        case "vec_eltwise":
            numbers, operands = (2, 1), ("a", "b", "dst")
        case "vec_copy":
            numbers, operands = (3, 2, 1), ("src", "dst")
        case "dma_load":
            numbers, operands = (3, 2, 1), ("ddr", "sram")
        case _:
            return None
    for number in numbers:
        if f[f"n{number}"] > 1:
            return f"n{number}", {key: f"{key}_s{number}" for key in operands}
        if f.get(f"pad{number}_lo") or f.get(f"pad{number}_hi"):
            return None
    return None


class Unit:
    """What one loop over rows does."""

    def __init__(self, hardware: Hardware, items: Sequence[tuple[int, Instr]]) -> None:
        self.hardware = hardware
        self.positions = [position for position, _ in items]
        self.instructions = [instr for _, instr in items]
        self.full = [DEFAULTS[instr.name] | instr.fields for instr in self.instructions]
        self.cuts: set[int] = set()
        """Rows at which a new piece begins."""
        self._known: dict[tuple[int, int], list[Cost]] = {}
        axis = _axis(self.instructions[0].name, self.full[0])
        self.rows = self.full[0][axis[0]] if axis else 1
        self.reads: list[Rows] = []
        self.writes: list[Rows] = []
        self.only_rows = True
        """All it reads are rows: no weights, nothing that all rows share."""
        if self.rows > 1:
            self._find()

    def _find(self) -> None:
        """Find out where the rows of all operands lie; a row without a stride forbids cuts."""
        for instr, full in zip(self.instructions, self.full, strict=True):
            axis = _axis(instr.name, full)
            assert axis is not None
            count, strides = axis
            low = full.get(f"pad{count[1:]}_lo", 0)
            one = full | {count: 1}
            if low or full.get(f"pad{count[1:]}_hi"):
                one |= {f"pad{count[1:]}_lo": 0, f"pad{count[1:]}_hi": 0}
            for region in accesses(self.hardware, instr.name, one):
                stride = full[strides[region.operand]] if region.operand in strides else 0
                if not region.sram:
                    continue
                first = region.address + low * stride
                if region.write:
                    if stride == 0:
                        self.rows = 1
                    self.writes.append(Rows(first, stride, region.end - region.address))
                elif stride == 0:
                    self.only_rows = False
                else:
                    self.reads.append(Rows(first, stride, region.end - region.address))

    @property
    def engine(self) -> int:
        """Engine of the first instruction."""
        return self.instructions[0].engine

    def pieces(self, cuts: Iterable[int]) -> list[tuple[int, int]]:
        """Return (first row, rows) of the pieces that cuts make."""
        edges = [0, *sorted(cuts), self.rows]
        return [(a, b - a) for a, b in pairwise(edges)]

    def cost(self, first: int, count: int) -> list[Cost]:
        """Return the costs of the instructions of some rows."""
        known = self._known.get((first, count))
        if known is None:
            known = self._known[first, count] = [
                cost_of(self.hardware, instr.name, fields)
                for instr, fields in zip(self.instructions, self._fields(first, count), strict=True)
            ]
        return known

    def cycles(self, cuts: Iterable[int]) -> int:
        """Return the cycles of all pieces on the unit's first engine."""
        return sum(self.cost(*piece)[0].cycles for piece in self.pieces(cuts))

    def written_before(self, row: int) -> int:
        """Return the address below which only rows before `row` write."""
        return min(rows.base + row * rows.stride for rows in self.writes)

    def rows_within(self, low: int, end: int, high: int) -> int:
        """Return how many first rows read nothing of `[low, high)` at `end` or above."""
        found = self.rows
        for rows in self.reads:
            if rows.base < high and rows.base + (self.rows - 1) * rows.stride + rows.span > low:
                found = min(found, rows.before(end))
        return max(0, found)

    def hull(self) -> tuple[int, int]:
        """Return the first written address and the one after the last."""
        last = self.rows - 1
        return (
            min(rows.base for rows in self.writes),
            max(rows.base + last * rows.stride + rows.span for rows in self.writes),
        )

    def accesses(self) -> list[Access]:
        """Return what all its rows touch."""
        return [
            region
            for instr, full in zip(self.instructions, self.full, strict=True)
            for region in accesses(self.hardware, instr.name, full)
        ]

    def meets(self, region: Access, first: int) -> bool:
        """Tell whether rows from `first` on touch bytes of a region, one of the two writing."""
        if not region.sram:
            return False
        last = self.rows - 1
        return any(
            region.address < rows.base + last * rows.stride + rows.span
            and rows.base + first * rows.stride < region.end
            for rows in (*self.writes, *(self.reads if region.write else ()))
        )

    def _fields(self, first: int, count: int) -> list[Fields]:
        """Return all fields of the instructions for some rows."""
        found: list[Fields] = []
        for instr, full in zip(self.instructions, self.full, strict=True):
            axis = _axis(instr.name, full)
            assert axis is not None
            name, strides = axis
            piece = full | {name: count}
            low, high = f"pad{name[1:]}_lo", f"pad{name[1:]}_hi"
            before = full.get(low, 0) if first else 0
            for address, stride in strides.items():
                piece[address] += first * full[stride]
                if address == "sram":
                    piece[address] += before * full[stride]
            if low in full:
                piece[low] = 0 if first else full[low]
                piece[high] = full[high] if first + count == self.rows else 0
            if "block_rows" in full:
                most = self.hardware.accumulator_rows // full["out_w"]
                piece["block_rows"] = ceil(count / ceil(count / most))
            found.append(piece)
        return found

    def make(self, first: int, count: int) -> list[Instr]:
        """Return the instructions for some rows."""
        made: list[Instr] = []
        for instr, full, piece in zip(
            self.instructions, self.full, self._fields(first, count), strict=True
        ):
            changed = {k: v for k, v in piece.items() if v != full[k] or k in instr.fields}
            reads = list(instr.reads)
            if instr.name == "dma_load":
                (far,) = (region for region in reads if region.space != "sram")
                near = next(r for r in accesses(self.hardware, instr.name, piece) if not r.sram)
                reads = [Region(far.space, near.address, near.end)]
            made.append(
                Instr(instr.name, changed, instr.layer, reads, list(instr.writes), instr.wants)
            )
        return made
