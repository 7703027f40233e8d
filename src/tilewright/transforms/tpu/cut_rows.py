"""Cut instructions by rows, so that what needs their results starts on the first of them.

Before: one `mac_conv` and one `vec_drain` a tile, whose reader waits for the last row.
After: where the array would wait for longer than the pieces cost, writer and reader are cut:
`mac_conv` rows 0..k, rows k..h; its reader's rows that need only the first, then the others.

Waits are found by the scheduler's model of the program in its order. A piece costs the weights of
its first step and the engine's latency anew (`spec/timing.py`): a cut is made only where the
reader's end, by a small simulation of the two, comes earlier. The vector unit's pieces (pooling,
additions) are put between those of the writer before and the reader behind, if nothing in between
is in the way. The halves of the M registers are given out anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tilewright.schedule.dependencies import Dependencies, find_dependencies
from tilewright.schedule.list_schedule import WINDOWS, Timeline, costs, list_schedule
from tilewright.spec.access import accesses
from tilewright.spec.hardware import Hardware
from tilewright.spec.program import DEFAULTS, MAC, SEQ, VEC, Dispatched
from tilewright.transforms.tpu.instruction import Instr
from tilewright.transforms.tpu.rows import Unit

MOST_PIECES = 8
LEAST_GAIN = 32
"""Cycles of a gain below which it is noise of the model."""
MOST = 1 << 20
"""More than all pieces of a unit."""
WORKSPACE = 1 << 36
"""Added to addresses of the workspace, which so lie behind all constants."""


def cut_rows(program: Sequence[Instr], hardware: Hardware) -> list[Instr]:
    """Return the program with instructions cut where that makes the array wait less.

    The results are the same. Instructions that stay whole are the same objects.
    """
    if any(instr.engine == SEQ for instr in program):
        return list(program)
    cutter = _Cutter(program, hardware)
    cutter.choose()
    return cutter.rewritten()


class _Cutter:
    def __init__(self, program: Sequence[Instr], hardware: Hardware) -> None:
        self.program = program
        self.hardware = hardware
        stream = [_dispatched(index, instr) for index, instr in enumerate(program)]
        self.dependencies: Dependencies = find_dependencies(stream, hardware)
        cost = costs(stream, hardware)
        timeline = Timeline(stream, hardware, self.dependencies, cost)
        self.order, _, _ = list_schedule(stream, hardware, self.dependencies, cost, WINDOWS[:1])
        """What the program is reordered to afterwards, or near to it: waits are counted there."""
        for index in self.order:
            timeline.place(index)
        self.start, self.end = timeline.start, timeline.end
        self.fixed = [
            index
            for index, item in enumerate(stream)
            if item.name == "mac_conv" and (item.fields["accumulate"] or not item.fields["push"])
        ]
        """Multiplications whose sums stay in the M registers."""
        self.units: dict[int, Unit] = {}
        self.behind: dict[int, int] = {}
        """First position of a unit: that of the one whose pieces follow its own in turn."""

    def unit(self, index: int) -> Unit | None:
        """Return the unit of an instruction, if its rows can be told apart."""
        drains = self.dependencies.drains
        if self.program[index].name == "vec_drain":
            index = next(
                (mac for mac in self.dependencies.before[index] if drains.get(mac) == index), -1
            )
            if index < 0:
                return None
        known = self.units.get(index)
        if known is None:
            items = [(index, self.program[index])]
            if self.program[index].name == "mac_conv":
                if index in self.fixed or index not in drains:
                    return None
                between = range(index + 1, drains[index])
                if any(
                    self.program[other].engine == MAC or index in self.dependencies.before[other]
                    for other in between
                ):
                    return None
                items.append((drains[index], self.program[drains[index]]))
            known = self.units[index] = Unit(self.hardware, items)
        return known if known.rows > 1 and known.writes else None

    # -- what to cut ----------------------------------------------------------------------------

    def choose(self) -> None:
        """Choose the cuts, reader by reader."""
        previous = -1
        for index in self.order:
            instr = self.program[index]
            if instr.engine != MAC:
                continue
            free = self.end[previous] if previous >= 0 else 0
            if self.start[index] - free > 2 * LEAST_GAIN:
                self._relieve(index, previous, free)
            previous = index

    def _relieve(self, index: int, previous: int, free: int) -> None:
        """Cut a `mac_conv` that waits, and what it waits for."""
        needed = [
            other for other in self.dependencies.before[index] if self.program[other].engine != MAC
        ]
        if not needed:
            return
        last = max(needed, key=lambda other: (self.end[other], other))
        reader, writer = self.unit(index), self.unit(last)
        if reader is None or writer is None:
            return
        others = max(
            (self.end[other] for other in needed if other not in writer.positions), default=0
        )
        others = max(others, free)
        if self.end[last] - others < LEAST_GAIN:
            return
        if writer.engine == MAC:
            if writer.positions[0] == previous:
                self._two(writer, reader, max(0, others - free))
        else:
            self._several(writer, reader, free, others)

    def _two(self, writer: Unit, reader: Unit, ready: int) -> None:
        """Cut a `mac_conv` and the next one once each. Times count from the first's end."""
        whole, own = writer.cycles(writer.cuts), reader.cost(0, reader.rows)[0].cycles
        last = writer.pieces(writer.cuts)[-1]
        before = max(ready, writer.cost(*last)[1].last_block) + own
        best: tuple[int, int, int] | None = None
        for row in sorted({0, *writer.cuts, *self._tails(writer)}):
            split = reader.rows_within(*_span(writer, row))
            if not 0 < split < reader.rows:
                continue
            cuts = writer.cuts | {row} if row else writer.cuts
            late = writer.cycles(cuts) - whole
            pieces = writer.pieces(cuts)
            tail = sum(writer.cost(*piece)[0].cycles for piece in pieces if piece[0] >= row)
            head = next((piece for piece in pieces if sum(piece) == row), None)
            start = max(ready, late)
            if head is not None:
                start = max(start, late - tail + writer.cost(*head)[1].last_block)
            at = start + reader.cost(0, split)[0].cycles
            at = max(at, late + writer.cost(*pieces[-1])[1].last_block)
            at += reader.cost(split, reader.rows - split)[0].cycles
            if best is None or at < best[0]:
                best = at, row, split
        if best is None:
            return
        at, row, split = best
        cuts = writer.cuts | ({row} - {0})
        added = writer.cycles(cuts) - whole + reader.cycles({split}) - own
        # As much again as the pieces cost: the model's waits are not those of the chip.
        if before - at >= LEAST_GAIN + added:
            writer.cuts = cuts
            reader.cuts.add(split)

    def _tails(self, writer: Unit) -> Iterable[int]:
        """Return the rows at which the last piece of a unit might begin."""
        rows = writer.rows
        block = writer.full[0]["block_rows"]
        ends = {rows - count * block for count in (1, 2, 3)}
        ends |= {rows - rows // part for part in (2, 3, 4, 8)}
        return (end for end in ends if 0 < end < rows)

    def _several(self, writer: Unit, reader: Unit, free: int, ready: int) -> None:
        """Cut what the vector unit or DMA makes for a `mac_conv`, in equal pieces."""
        first = writer.positions[0]
        if first in self.behind:
            return  # its pieces have their places among those of another reader
        own, begin = reader.cost(0, reader.rows)[0].cycles, self.start[first]
        before = max(ready, self.end[first]) + own
        best: tuple[int, list[int], list[int], list[int]] | None = None
        source = self._source(writer)
        options: list[Unit | None] = [None] if source is None else [None, source]
        for made in options:
            for count in range(2, min(MOST_PIECES, writer.rows) + 1):
                cuts = [number * writer.rows // count for number in range(1, count)]
                back = [] if made is None else _needed(made, writer, cuts)
                if made is not None and (not back or len(set(back)) < len(back)):
                    continue
                splits = [reader.rows_within(*_span(writer, row)) for row in cuts]
                edges = sorted({split for split in splits if 0 < split < reader.rows})
                if not edges:
                    continue
                ends, late = self._ends(writer, cuts, made, back, begin)
                at = max(free + late, ready)
                for low, rows in reader.pieces(edges):
                    need = next(
                        (
                            end
                            for end, split in zip(ends, splits, strict=False)
                            if split >= low + rows
                        ),
                        ends[-1],
                    )
                    at = max(at, need) + reader.cost(low, rows)[0].cycles
                if best is None or at < best[0] - LEAST_GAIN:
                    best = at, cuts, edges, back
        if best is None or before - best[0] < LEAST_GAIN:
            return
        _, cuts, edges, back = best
        writer.cuts.update(cuts)
        reader.cuts.update(edges)
        sinks = writer.engine == VEC and self._may_sink(writer, reader)
        if back and source is not None:
            source.cuts.update(back)
            self.behind[source.positions[0]] = first
            sinks = sinks and self._may_sink(source, reader, first)
        if sinks:
            self.behind[first] = reader.positions[0]

    def _ends(
        self, writer: Unit, cuts: list[int], source: Unit | None, back: list[int], begin: int
    ) -> tuple[list[int], int]:
        """Return when the pieces of a writer end, and by how much the array is later."""
        ends: list[int] = []
        pieces = writer.pieces(cuts)
        if source is None:
            for piece in pieces:
                begin += writer.cost(*piece)[0].cycles
                ends.append(begin)
            return ends, 0
        mac, vec = self.start[source.positions[0]], 0
        for piece, made in zip(pieces, source.pieces(back), strict=True):
            multiply, drain = source.cost(*made)
            mac += multiply.cycles
            vec = max(mac + drain.last_block, vec + drain.cycles)
            vec += writer.cost(*piece)[0].cycles
            ends.append(vec)
        return ends, max(0, mac - self.end[source.positions[0]])

    def _source(self, writer: Unit) -> Unit | None:
        """Return the `mac_conv` whose drain a vector instruction follows and reads, if uncut."""
        if writer.engine != VEC:
            return None
        drains = [
            other
            for other in self.dependencies.before[writer.positions[0]]
            if self.program[other].name == "vec_drain"
        ]
        if not drains:
            return None
        source = self.unit(max(drains, key=lambda other: (self.end[other], other)))
        if source is None or source.cuts or not self._may_sink(source, writer):
            return None
        return source

    def _may_sink(self, unit: Unit, reader: Unit, but: int = -1) -> bool:
        """Tell whether all but the first piece of a unit may come as late as another.

        `but` goes along with them. What lies between and needs the unit's end must not need that of
        these pieces.
        """
        own, first, last = set(unit.positions), unit.positions[0], reader.positions[0]
        if any(first < index < last for index in self.fixed) or _clash(reader, unit):
            return False
        for index in range(first + 1, last):
            if (
                index in own
                or index == but
                or not own.intersection(self.dependencies.before[index])
            ):
                continue
            if self.program[index].engine == VEC or not unit.only_rows:
                return False
            regions = accesses(self.hardware, self.program[index].name, self.full(index))
            if any(unit.meets(region, min(unit.cuts)) for region in regions):
                return False
        return True

    def full(self, index: int) -> dict[str, int]:
        """Return all fields of an instruction."""
        instr = self.program[index]
        return DEFAULTS[instr.name] | instr.fields

    # -- the new program ------------------------------------------------------------------------

    def rewritten(self) -> list[Instr]:
        """Return the program with all cuts made."""
        made: list[Instr] = []
        emitted: dict[Unit, int] = {}
        """Pieces of a unit that are there already."""
        before: dict[int, list[Unit]] = {}
        """By the first position of a unit: those whose later pieces come between its own."""
        for first, then in self.behind.items():
            before.setdefault(then, []).append(self.units[first])
        # What stands between a `mac_conv` and its drain is for the drain.
        cut = {unit.positions[-1]: unit for unit in self.units.values() if unit.cuts}
        moved = {unit.positions[0] for unit in cut.values() if len(unit.positions) > 1}

        def emit(unit: Unit, count: int) -> None:
            """Emit the first `count` pieces of a unit, those it needs of others before them."""
            pieces = unit.pieces(unit.cuts)
            for number in range(emitted.get(unit, 0), min(count, len(pieces))):
                low, rows = pieces[number]
                for source in before.get(unit.positions[0], ()):
                    emit(source, _pieces_for(source, unit, low + rows) + (unit.engine == MAC))
                emitted[unit] = number + 1
                made.extend(unit.make(low, rows))
            if emitted.get(unit) == len(pieces):
                # Others read what this unit does not need.
                for source in before.get(unit.positions[0], ()):
                    emit(source, MOST)

        for index, instr in enumerate(self.program):
            unit = cut.get(index)
            if unit is None:
                if index not in moved:
                    made.append(instr)
            else:
                emit(unit, 1 if unit.positions[0] in self.behind else MOST)
        assert all(emitted[unit] == len(unit.cuts) + 1 for unit in cut.values())
        _halves(made)
        return made


def _dispatched(index: int, instr: Instr) -> Dispatched:
    fields = DEFAULTS[instr.name] | instr.fields
    if any(region.space == "ddr" for region in (*instr.reads, *instr.writes)):
        fields["ddr"] += WORKSPACE
    return Dispatched(index, instr.name, instr.engine, fields, instr.layer)


def _span(writer: Unit, row: int) -> tuple[int, int, int]:
    low, high = writer.hull()
    return low, writer.written_before(row), high


def _clash(later: Unit, earlier: Unit) -> bool:
    """Tell whether a unit overwrites what another before it reads or writes, but for in place."""
    own, others = later.accesses(), earlier.accesses()
    reads = [region for region in own if not region.write]
    return any(
        region.write
        and region.address < other.end
        and other.address < region.end
        and not (
            other.write
            and any((read.address, read.dims) == (region.address, region.dims) for read in reads)
        )
        for region in own
        for other in others
        if other.sram
    )


def _pieces_for(source: Unit, reader: Unit, end: int) -> int:
    """Return the pieces of a unit that the first `end` rows of its reader need."""
    pieces = source.pieces(source.cuts)
    for number, (low, rows) in enumerate(pieces[:-1]):
        if reader.rows_within(*_span(source, low + rows)) >= end:
            return number + 1
    return len(pieces)


def _needed(source: Unit, writer: Unit, cuts: list[int]) -> list[int]:
    """Return the first rows of `source` that pieces of `writer` need, up to the last piece."""
    found: list[int] = []
    for row in cuts:
        most = next(
            (
                rows
                for rows in range(1, source.rows)
                if writer.rows_within(*_span(source, rows)) >= row
            ),
            source.rows,
        )
        if most == source.rows:
            return []
        found.append(most)
    return found


def _halves(program: Sequence[Instr]) -> None:
    """Give out the halves of the M registers in turn."""
    half, pushed = 0, list[int]()
    for instr in program:
        if instr.name == "mac_conv":
            instr.fields["m_half"] = half
            if instr.fields["push"]:
                pushed.append(half)
                rows = -(-instr.fields["out_h"] // instr.fields["block_rows"])
                half = (half + rows * instr.fields["oc_blocks"]) % 2
        elif instr.name == "vec_drain":
            instr.fields["m_half"] = pushed.pop(0)
