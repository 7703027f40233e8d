"""Measured times of instructions, found again by what decides how long an instruction takes.

Addresses are reduced to their alignment, which counts words and bursts; semaphores, registers,
parameters and constants do not matter. So the times of one compile hold for the next one, as far as
it still has the same instructions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tilewright.spec.hardware import Hardware
from tilewright.spec.isa import BY_NAME, Kind
from tilewright.spec.program import DEFAULTS, Dispatched

_TIMELESS_KINDS = (Kind.MASK, Kind.R, Kind.V, Kind.M)
_TIMELESS = frozenset(
    ("fill", "param", "bias", "bias_shift", "za", "zb", "zp", "lo", "hi", "function", "use_table")
)

Fields = tuple[tuple[str, int], ...]
Key = tuple[str, Fields]


def _kept() -> dict[str, tuple[tuple[str, Kind], ...]]:
    return {
        name: tuple(
            (field.name, field.kind)
            for field in instruction.fields
            if field.kind not in _TIMELESS_KINDS and field.name not in _TIMELESS
        )
        for name, instruction in BY_NAME.items()
    }


_KEPT = _kept()


def duration_fields(hardware: Hardware, name: str, fields: Mapping[str, int]) -> Fields:
    """Return the fields that decide an instruction's time, those of default value left out."""
    defaults = DEFAULTS[name]
    found: list[tuple[str, int]] = []
    for field, kind in _KEPT[name]:
        value = fields[field]
        if kind is Kind.SRAM:
            value %= hardware.sram_word_bytes
        elif kind is Kind.DDR:
            value %= hardware.dma_burst_size
        if value != defaults[field]:
            found.append((field, value))
    return tuple(found)


@dataclass
class Samples:
    """Measurements of one instruction of one layer."""

    cycles: list[int]

    @property
    def mean(self) -> int:
        """Their mean, rounded up."""
        return -(-sum(self.cycles) // len(self.cycles))


def group(
    hardware: Hardware, stream: Sequence[Dispatched], cycles: Sequence[int]
) -> dict[tuple[str, Key], Samples]:
    """Return measurements by (layer, key), in order of first appearance."""
    found: dict[tuple[str, Key], Samples] = {}
    for item, measured in zip(stream, cycles, strict=True):
        key = (item.name, duration_fields(hardware, item.name, item.fields))
        found.setdefault((item.layer, key), Samples([])).cycles.append(measured)
    return found


@dataclass(frozen=True)
class Constraint:
    """The mean of `count` measurements of an instruction of a layer."""

    layer: str
    key: Key
    cycles: int
    count: int


class Constraints:
    """Looks up measured cycles: of the same layer, else of any layer with the same fields."""

    def __init__(self, hardware: Hardware, items: Iterable[Constraint]) -> None:
        self._hardware = hardware
        self._exact: dict[tuple[str, Key], Constraint] = {}
        sums: dict[Key, tuple[int, int]] = {}
        for item in items:
            self._exact[item.layer, item.key] = item
            cycles, count = sums.get(item.key, (0, 0))
            sums[item.key] = (cycles + item.cycles * item.count, count + item.count)
        self._any = {key: -(-cycles // count) for key, (cycles, count) in sums.items()}

    def __len__(self) -> int:
        return len(self._exact)

    def cycles(self, item: Dispatched) -> int | None:
        """Return the measured cycles of an instruction, or None.

        A `vec_drain` mostly waits for its `mac_conv`; what it took says nothing about another
        schedule, and is not used.
        """
        if item.name == "vec_drain" or not self._any:
            return None
        key = (item.name, duration_fields(self._hardware, item.name, item.fields))
        exact = self._exact.get((item.layer, key))
        return exact.cycles if exact is not None else self._any.get(key)
