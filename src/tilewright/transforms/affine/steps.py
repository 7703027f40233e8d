"""Build the steps of a plan: nests one by one, held tensors, cascades."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from xdsl.dialects import tensor
from xdsl.dialects.linalg.ops import YieldOp
from xdsl.ir import Block, Operation, Region, SSAValue
from xdsl.ir.affine import AffineMap

from tilewright.diagnostics import TilewrightError
from tilewright.schedule.box import BoxTiling
from tilewright.schedule.cascade import RESULT, buffer_of, held_at, places_of
from tilewright.schedule.footprint import activation_bytes
from tilewright.schedule.plan import Plan, Stage, Step
from tilewright.schedule.rolling import Action, Event, Place
from tilewright.transforms.affine.extract import Network
from tilewright.transforms.affine.held import SramImage
from tilewright.transforms.affine.index import Index
from tilewright.transforms.affine.nest import View, view_of
from tilewright.transforms.affine.segment import PASS, Buffers, element_of
from tilewright.transforms.affine.units import Strip, Tiling

STORES = 8
"""The most pieces in which a held tensor is stored, so that they overlap with what comes next."""

Places = dict[tuple[int, int], list[tuple[int, Event, Place]]]


@dataclass
class Emission:
    """Appends the steps of a plan to a function."""

    buffers: Buffers
    network: Network
    plan: Plan
    held: dict[int, SramImage] = field(default_factory=dict[int, SramImage])
    """Tensors that lie in SRAM as a whole."""
    rolling: dict[int, View] = field(default_factory=dict[int, View])
    """Buffers of the current cascade."""

    def run(self) -> None:
        """Append all steps."""
        self._made = self._first_writes()
        self._keep()
        for number, step in enumerate(self.plan.steps):
            self.buffers.held_bytes = self._held_bytes(number)
            self._explain(number, step)
            if step.stages:
                self._cascade(number, step)
            else:
                (unit,), (tiling,) = step.units, step.tilings
                self._single(number, unit, tiling)

    def _keep(self) -> None:
        """Append constants that stay for the whole program."""
        for number, step in enumerate(self.plan.steps):
            for unit, tiling in zip(step.units, step.tilings, strict=True):
                keep = self.network.units[unit].work.keep
                if keep is not None:
                    keep(self.buffers, tiling, self._held_bytes(number))

    def _first_writes(self) -> dict[int, int]:
        """Return by buffer the step that first writes it."""
        found: dict[int, int] = {}
        for number, step in enumerate(self.plan.steps):
            for unit in step.units:
                buffer = buffer_of(self.network.tensors, self.network.specs[unit].writes)
                found.setdefault(buffer, number)
        return found

    def _held_bytes(self, number: int) -> int:
        return self.plan.kept_bytes + sum(
            self._bytes(tensor)
            for tensor, home in enumerate(self.plan.homes)
            if self.network.tensors[tensor].inside is None
            and held_at(home, number)
            and self._made.get(tensor, number) <= number
        )

    def _bytes(self, number: int) -> int:
        spec = self.network.tensors[number]
        top, left, bottom, right = spec.pads
        pixels = (spec.rows + top + bottom) * (spec.columns + left + right)
        hardware = self.buffers.hardware
        return activation_bytes(hardware, pixels, spec.channels, spec.element_bytes)

    def _explain(self, number: int, step: Step) -> None:
        """Log where the tensors of every unit of a step lie, and why."""
        specs, tensors = self.network.specs, self.network.tensors
        what = f"step {number}"
        if len(step.units) > 1:
            names = ", ".join(specs[unit].layer for unit in step.units)
            what += f" computes {names} a few rows at a time"
        if step.reason:
            what += f" ({step.reason})"
        for unit in step.units:
            places: list[str] = []
            touched = [*(read.tensor for read in specs[unit].reads), specs[unit].writes]
            for item in dict.fromkeys(touched):
                base, spec = buffer_of(tensors, item), tensors[item]
                home = self.plan.homes[base]
                if held_at(home, number) and specs[unit].problem is not None:
                    where = "in SRAM" + (" and DDR" if home.ddr else "")
                elif base in step.capacity:
                    where = f"{step.capacity[base]} rows in SRAM"
                else:
                    where = "in DDR" + (f" ({spec.ddr_only})" if spec.ddr_only else "")
                places.append(f"{spec.name} {where}")
            reason = f"{what}: {'; '.join(places)}"
            self.buffers.context.decide(specs[unit].layer, PASS, True, reason)

    # Tensors

    def _element(self, number: int) -> SSAValue:
        value = self.network.values[number]
        assert value is not None
        return value

    def _alloc(self, number: int, rows: int) -> View:
        """Append a buffer for some rows of a tensor, its padding at the sides filled."""
        spec, nest = self.network.tensors[number], self.buffers.nest
        _, left, _, right = spec.pads
        shape = [rows, left + spec.columns + right, spec.channels]
        buffer = nest.alloc(shape, element_of(self._element(number)), "held", 1)
        for first, count in ((0, left), (left + spec.columns, right)):
            self._fill(number, buffer, (0, rows), (first, count))
        return buffer

    def _fill(
        self, number: int, buffer: View, rows: tuple[int, int], columns: tuple[int, int]
    ) -> None:
        """Append padding: (first, count) of rows and of columns."""
        if 0 in (rows[1], columns[1]):
            return
        nest, spec = self.buffers.nest, self.network.tensors[number]
        starts, sizes = [rows[0], columns[0], 0], [rows[1], columns[1], spec.channels]
        nest.fill(spec.fill, nest.view(buffer, starts, sizes))

    def _image(self, number: int) -> SramImage:
        """Return a tensor that is held as a whole; what is written to first gets its buffer."""
        tensors = self.network.tensors
        base = buffer_of(tensors, number)
        if base not in self.held:
            spec = tensors[base]
            top, left, bottom, right = spec.pads
            buffer = self._alloc(base, top + spec.rows + bottom)
            width = left + spec.columns + right
            self._fill(base, buffer, (0, top), (0, width))
            self._fill(base, buffer, (top + spec.rows, bottom), (0, width))
            self.held[base] = SramImage(buffer, top, left)
        return self._part(number, self.held[base])

    def _part(self, number: int, whole: SramImage) -> SramImage:
        spec = self.network.tensors[number]
        if spec.inside is None:
            return whole
        return SramImage(whole.buffer, whole.rows, whole.columns, spec.channel)

    def _is_held(self, number: int, step: int) -> bool:
        return held_at(self.plan.homes[buffer_of(self.network.tensors, number)], step)

    def _in_ddr(self, number: int, first: int, last: int, write: bool) -> View:
        """Return rows `first..last` of a tensor's buffer in DDR, as an image."""
        value, nest = self._element(number), self.buffers.nest
        spec, owner = self.network.tensors[number], value.owner
        shape = (1, spec.rows, spec.columns, spec.channels)
        if write and isinstance(owner, tensor.InsertSliceOp):
            found = nest.reshape(self.buffers.concatenation(owner), shape)
        elif write:
            assert isinstance(owner, Operation)
            found = self.buffers.target(value, owner, shape)
        else:
            found = nest.reshape(self.buffers.of(value), shape)
        sizes = [1, last - first, spec.columns, spec.channels]
        return nest.view(view_of(found), [0, first, 0, 0], sizes, drop=[0])

    def _move(self, number: int, image: SramImage, first: int, last: int, store: bool) -> None:
        """Append the copy of rows between an image in SRAM and the tensor's buffer in DDR."""
        nest, spec = self.buffers.nest, self.network.tensors[number]
        ddr = self._in_ddr(number, first, last, store)
        starts = [Index(first), Index(0), Index(0)]
        rows = image.box(
            nest, starts, [Index(last - first), Index(spec.columns), Index(spec.channels)]
        )
        if store:
            nest.copy(rows, ddr)
        else:
            nest.copy(ddr, rows)

    # One unit by itself

    def _single(self, number: int, unit: int, tiling: Tiling | None) -> None:
        made, spec = self.network.units[unit], self.network.specs[unit]
        nest = self.buffers.nest
        nest.layer = made.layer
        if spec.problem is None:
            made.work.alone(self.buffers, None, [None] * len(spec.reads), None)
            return
        sources = [
            self._image(read.tensor) if self._is_held(read.tensor, number) else None
            for read in spec.reads
        ]
        target = self._image(spec.writes) if self._is_held(spec.writes, number) else None
        made.work.alone(self.buffers, tiling, sources, target)
        home = self.plan.homes[buffer_of(self.network.tensors, spec.writes)]
        if target is not None and home.ddr:
            nest.layer = made.layer
            tile = tiling.tile[0] if isinstance(tiling, BoxTiling) else 1
            rows = max(tile, ceil(spec.rows / STORES))
            for first in range(0, spec.rows, rows):
                self._move(spec.writes, target, first, min(spec.rows, first + rows), store=True)

    # Cascades

    def _cascade(self, number: int, step: Step) -> None:
        network = self.network
        places = places_of(step, network.specs, network.tensors, self.plan.homes, number)
        if places is None:
            raise TilewrightError("E0501", f"step {number} of the plan has too few rows")
        self.rolling = {}
        strips: dict[int, Strip] = {}
        for unit, tiling in zip(step.units, step.tilings, strict=True):
            begin = network.units[unit].work.begin
            assert begin is not None
            assert tiling is not None
            strips[unit] = begin(self.buffers, tiling)
        copied = self._copied(number, step)
        for at, stage in enumerate(step.stages):
            self.buffers.nest.layer = self._label(step, stage)
            if stage.kind != "compute":
                image = self._operand(number, step, places, at, RESULT, stage.index)
                store = stage.kind == "store"
                self._move(stage.index, image, stage.first, stage.last, store)
                continue
            spec = network.specs[stage.index]
            sources = [
                self._operand(number, step, places, at, operand, read.tensor)
                for operand, read in enumerate(spec.reads)
            ]
            target = self._operand(number, step, places, at, RESULT, spec.writes)
            strips[stage.index](stage.first, stage.last, sources, target)
            if spec.writes in copied:
                self.buffers.nest.layer = spec.layer
                self._move(spec.writes, target, stage.first, stage.last, store=True)

    def _copied(self, number: int, step: Step) -> set[int]:
        """Return the results held as a whole that go to DDR too, without stages for that."""
        tensors = self.network.tensors
        stored = {buffer_of(tensors, stage.index) for stage in step.stages if stage.kind == "store"}
        results = {self.network.specs[unit].writes for unit in step.units}
        return {
            result
            for result in results
            if self._is_held(result, number)
            and self.plan.homes[buffer_of(tensors, result)].ddr
            and buffer_of(tensors, result) not in stored
        }

    def _label(self, step: Step, stage: Stage) -> str:
        """Return the layer that a stage counts for: the one that loads, or has stored."""
        specs, tensors = self.network.specs, self.network.tensors
        if stage.kind == "compute":
            return specs[stage.index].layer
        base = buffer_of(tensors, stage.index)
        if stage.kind == "load":
            near = [
                unit
                for unit in step.units
                if base in (buffer_of(tensors, read.tensor) for read in specs[unit].reads)
            ]
        else:
            near = [unit for unit in step.units if buffer_of(tensors, specs[unit].writes) == base]
        return specs[near[0] if near else step.units[0]].layer

    def _operand(
        self, number: int, step: Step, places: Places, stage: int, operand: int, item: int
    ) -> SramImage:
        """Append what an operand's buffer needs before a stage; return where its rows are."""
        if self._is_held(item, number):
            return self._image(item)
        base = buffer_of(self.network.tensors, item)
        if base not in self.rolling:
            self.rolling[base] = self._alloc(base, step.capacity[base])
        buffer = self.rolling[base]
        entries = places[stage, operand]
        for _, _, place in entries:
            for action in place.actions:
                self._act(base, buffer, action)
        _, event, place = entries[-1]
        left = self.network.tensors[base].pads[1]
        return self._part(item, SramImage(buffer, place.position - event.first, left))

    def _act(self, number: int, buffer: View, action: Action) -> None:
        nest = self.buffers.nest
        _, *rest = buffer.sizes
        if action.kind == "fill":
            width = rest[0].constant
            self._fill(number, buffer, (action.target, action.count), (0, width))
            return
        sizes = [Index(action.count), *rest]
        source, target = (
            nest.view(buffer, [row, 0, 0], sizes) for row in (action.source, action.target)
        )
        element = element_of(self._element(number))
        block = Block(arg_types=[element, element])
        block.add_op(YieldOp(block.args[0]))
        identity = AffineMap.identity(3)
        nest.generic("copy", [(source, identity)], (target, identity), Region(block), {})
