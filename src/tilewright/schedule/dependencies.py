"""What must stay before what: the order of a straight-line program that its meaning needs.

An instruction depends on an earlier one when both touch a byte of SRAM or DDR, a V register or a
parameter entry, one of them writing. Regions are taken as their hulls: a dependency too many costs
freedom, never correctness. Accumulators are no memory: a `vec_drain` depends on the `mac_conv` it
drains, and a `mac_conv` that keeps or takes up accumulators stays where it is among all others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.spec.access import FP16, Access, Fields, accesses
from tilewright.spec.hardware import Hardware
from tilewright.spec.limits import row_table_registers, table_registers
from tilewright.spec.program import SEQ, Dispatched

_LIMIT = 1 << 41
"""Above every address."""


class _Segments:
    """A space cut where accesses begin and end; each part knows its last writer and readers since.

    A write joins what it covers into one part, so that there are about as many parts as tiles.
    """

    def __init__(self) -> None:
        self._starts = [0]
        self._writers = [-1]
        self._readers: list[list[int]] = [[]]

    def _cut(self, at: int) -> int:
        place = bisect_right(self._starts, at) - 1
        if self._starts[place] == at:
            return place
        self._starts.insert(place + 1, at)
        self._writers.insert(place + 1, self._writers[place])
        self._readers.insert(place + 1, list(self._readers[place]))
        return place + 1

    def read(self, low: int, high: int, index: int, found: set[int]) -> None:
        """Note a read of `[low, high)` by instruction `index`; add what it depends on."""
        first, last = self._cut(low), self._cut(high)
        found.update(self._writers[first:last])
        for readers in self._readers[first:last]:
            if not readers or readers[-1] != index:
                readers.append(index)

    def write(self, low: int, high: int, index: int, found: set[int]) -> None:
        """Note a write of `[low, high)` by instruction `index`; add what it depends on."""
        first, last = self._cut(low), self._cut(high)
        found.update(self._writers[first:last])
        for readers in self._readers[first:last]:
            found.update(readers)
        self._starts[first:last] = [low]
        self._writers[first:last] = [index]
        self._readers[first:last] = [[]]


@dataclass(frozen=True)
class Dependencies:
    """Order of a straight-line run of instructions, by position in it."""

    before: list[list[int]]
    """Positions each instruction must come after, ascending."""
    drains: dict[int, int]
    """Position of the `vec_drain` of each pushing `mac_conv`."""


def regions_of(stream: Sequence[Dispatched], hardware: Hardware) -> list[list[Access]]:
    """Return what each instruction touches; equal ones share one list."""
    known: dict[tuple[object, ...], list[Access]] = {}
    found: list[list[Access]] = []
    for item in stream:
        # Wait and signal masks come first and touch nothing.
        key = (item.name, *list(item.fields.values())[2:])
        own = known.get(key)
        if own is None:
            own = known[key] = accesses(hardware, item.name, item.fields)
        found.append(own)
    return found


def _registers(
    hardware: Hardware, name: str, f: Fields
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the ranges of V registers and of parameter entries a vector instruction uses."""
    count = f["count"] if name == "vec_param" else f.get("oc_blocks", 1)
    v: list[tuple[int, int]] = []
    entries: list[tuple[int, int]] = []
    if "v" in f:
        v.append((f["v"], table_registers(hardware) if name == "vec_table" else count))
    if f.get("use_table"):
        v.append((f["v_table"], table_registers(hardware)))
    if name == "vec_softmax":
        v.append((f["v_table"], row_table_registers(hardware)))
    if f.get("dtype", 0) == FP16 and "v_clamp" in f:
        v.append((f["v_clamp"], 1))
    if "param" in f and not f.get("bias_only"):
        entries.append((f["param"], count))
    return v, entries


def find_dependencies(
    stream: Sequence[Dispatched],
    hardware: Hardware,
    regions: Sequence[list[Access]] | None = None,
) -> Dependencies:
    """Return the dependencies of instructions without any of the sequencer's among them.

    `regions` are the instructions' `regions_of`, if the caller has them already.
    """
    sram, ddr, vectors, entries, halves = (_Segments() for _ in range(5))
    if regions is None:
        regions = regions_of(stream, hardware)
    stores = [r for own in regions for r in own if r.write and not r.sram]
    low = min((region.address for region in stores), default=_LIMIT)
    high = max((region.end for region in stores), default=0)
    before: list[list[int]] = []
    pushed: deque[int] = deque()
    drains: dict[int, int] = {}
    for index, item in enumerate(stream):
        assert item.engine != SEQ, "sequencer instructions end a run"
        found: set[int] = set()
        f = item.fields
        for write in (False, True):
            # Reads first: an instruction never depends on itself.
            for region in regions[index]:
                if region.write is not write:
                    continue
                if region.sram:
                    space = sram
                elif region.end <= low or region.address >= high:
                    continue  # a constant: nobody writes it
                else:
                    space = ddr
                act = space.write if write else space.read
                act(region.address, region.end, index, found)
        if item.name.startswith("vec_"):
            loads = item.name in ("vec_param", "vec_table")
            for space, ranges in zip(
                (vectors, entries), _registers(hardware, item.name, f), strict=True
            ):
                for first, count in ranges:
                    act = space.write if loads else space.read
                    act(first, first + count, index, found)
        if item.name == "mac_conv":
            simple = f["push"] and not f["accumulate"]
            (halves.read if simple else halves.write)(0, 2, index, found)
            if f["push"]:
                pushed.append(index)
        elif item.name == "vec_drain" and pushed:
            drains[pushed[0]] = index
            found.add(pushed.popleft())
        found -= {-1, index}
        # A mac_conv of many blocks only ends when it is drained: what waits for its end must not
        # be in the way of the drain.
        found |= {drains[other] for other in found if drains.get(other, index) != index}
        before.append(sorted(found))
    return Dependencies(before, drains)
