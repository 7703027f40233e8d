"""The nests of layers whose tiles are boxes: vector work and plain moves.

Loops over the axes in the tiler's order; every operand is loaded inside the innermost loop it
changes with, the result is stored after the compute op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from xdsl.dialects.builtin import MemRefType
from xdsl.ir import SSAValue

from tilewright.schedule.box import BoxOperand, BoxProblem, BoxTiling
from tilewright.schedule.tiling import TileLoop
from tilewright.transforms.affine.held import Place, SramImage
from tilewright.transforms.affine.index import Index
from tilewright.transforms.affine.nest import Nest, View, view_of
from tilewright.transforms.affine.tiles import Span, load, store


@dataclass(frozen=True)
class BoxTensor:
    """An operand's tensor.

    In DDR its leading dimensions are the outer loops (1 where it broadcasts), the others the
    operand's. An image in SRAM is neither loaded nor stored: its tiles are views of it.
    """

    value: Place
    operand: BoxOperand
    before: tuple[int, ...] = ()
    """Padding in front of each of the operand's dimensions; empty for none."""
    after: tuple[int, ...] = ()
    """How far tiles reach beyond the end of each dimension."""
    fill: float = 0
    """What padding holds."""


Compute = Callable[[list[View]], None]
"""Emits the compute op on the tiles of all operands, the result's last."""


@dataclass
class BoxNest:
    """Emits one nest; the last tensor is the result."""

    nest: Nest
    layer: str
    problem: BoxProblem
    tiling: BoxTiling
    outer: tuple[int, ...]
    """Sizes of the outer loops."""
    tensors: Sequence[BoxTensor]
    compute: Compute
    prepare: Callable[[], None] = lambda: None
    """Emits what is loaded once, before all loops."""
    at: dict[str, Index] = field(default_factory=dict[str, Index])
    outer_at: list[Index] = field(default_factory=list[Index])
    tiles: dict[int, View] = field(default_factory=dict[int, View])

    last: int = 0
    """Behind the last index of the first axis."""

    def emit(self) -> None:
        """Append the nest."""
        self.nest.layer = self.layer
        self.last = self.problem.sizes[0]
        self.prepare()
        self._outer(0)

    def strip(self, first: int, last: int, places: Sequence[SramImage]) -> None:
        """Append the computation of rows `first..last` (exclusive) of images in SRAM, unrolled."""
        self.nest.layer = self.layer
        self.last = last
        self.tensors = [
            replace(tensor, value=place) for tensor, place in zip(self.tensors, places, strict=True)
        ]
        _, columns, channels = self.problem.sizes
        ranges = zip((first, 0, 0), (last, columns, channels), self.tiling.tile, strict=True)
        for at in product(*(range(*item) for item in ranges)):
            self.at = {str(axis): Index(value) for axis, value in enumerate(at)}
            for number, tensor in enumerate(self.tensors[:-1]):
                self.tiles[number] = self._load(number, tensor)
            self._result()

    def _outer(self, depth: int) -> None:
        if depth < len(self.outer):
            with self.nest.loop(self.outer[depth], 1) as index:
                self.outer_at.append(index)
                self._outer(depth + 1)
            self.outer_at.pop()
            return
        # Loops of several outer dimensions count as one here: all operands follow all of them.
        loops = self.tiling.loops(self.problem)[1:]
        self.at = {loop.name: Index(0) for loop in loops}
        self._level([loop for loop in loops if loop.count > 1], 0)

    def _level(self, active: list[TileLoop], depth: int) -> None:
        for number, tensor in enumerate(self.tensors[:-1]):
            if depth == self._depth(active, tensor.operand):
                self.tiles[number] = self._load(number, tensor)
        if depth < len(active):
            loop = active[depth]
            with self.nest.loop(loop.size, loop.step) as index:
                self.at[loop.name] = index
                self._level(active, depth + 1)
            self.at[loop.name] = Index(0)
            return
        self._result()

    def _depth(self, active: list[TileLoop], operand: BoxOperand) -> int:
        inside = [index for index, loop in enumerate(active) if loop.name in operand.loops()]
        return inside[-1] + 1 if inside else 0

    def _extent(self, axis: int) -> Index:
        size = self.problem.sizes[axis] if axis else self.last
        step = self.tiling.tile[axis]
        return self.nest.minimum(step, Index(size) - self.at[str(axis)])

    def _spans(self, tensor: BoxTensor) -> list[Span]:
        rank = len(tensor.operand.axes)
        before = tensor.before or (0,) * rank
        after = tensor.after or (0,) * rank
        spans: list[Span] = []
        for dimension, axis in enumerate(tensor.operand.axes):
            full = tensor.operand.full[dimension]
            padded = before[dimension] > 0 or after[dimension] > 0
            if axis.axis < 0:
                spans.append(Span(Index(-before[dimension]), Index(axis.window), full, padded))
                continue
            first = self.at[str(axis.axis)] * axis.stride - before[dimension]
            length = (self._extent(axis.axis) - 1) * axis.stride + axis.window
            spans.append(Span(first, length, full, padded))
        return spans

    def _tile(self, number: int, tensor: BoxTensor, value: SSAValue) -> View:
        kind = value.type
        assert isinstance(kind, MemRefType)
        shape = tensor.operand.extents(self.tiling.tile)
        slots = self.tiling.slots[number]
        return self.nest.alloc(shape, kind.element_type, tensor.operand.role, slots)

    def _place(self, tensor: BoxTensor, value: SSAValue) -> list[Index]:
        """Return the index of the leading dimensions of a tensor in DDR."""
        kind = value.type
        assert isinstance(kind, MemRefType)
        leading = (
            kind.get_shape()[: len(self.outer)]
            if len(tensor.operand.axes) + len(self.outer) == len(kind.get_shape())
            else ()
        )
        return [
            Index(0) if size == 1 else index
            for size, index in zip(leading, self.outer_at, strict=False)
        ]

    def _load(self, number: int, tensor: BoxTensor) -> View:
        value, spans = tensor.value, self._spans(tensor)
        if isinstance(value, SramImage):
            return self._box(value, spans)
        tile, outer = self._tile(number, tensor, value), self._place(tensor, value)
        return load(self.nest, view_of(value), outer, spans, tile, tensor.fill)

    def _box(self, image: SramImage, spans: Sequence[Span]) -> View:
        starts, lengths = [span.first for span in spans], [span.length for span in spans]
        return image.box(self.nest, starts, lengths)

    def _result(self) -> None:
        number = len(self.tensors) - 1
        tensor = self.tensors[number]
        value, spans = tensor.value, self._spans(tensor)
        if isinstance(value, SramImage):
            used = self._box(value, spans)
        else:
            tile = self._tile(number, tensor, value)
            used = self.nest.view(tile, [0] * len(spans), [span.length for span in spans])
        self.compute([*(self.tiles[index] for index in range(number)), used])
        if not isinstance(value, SramImage):
            starts = [span.first for span in spans]
            store(self.nest, used, view_of(value), self._place(tensor, value), starts)


@dataclass
class MoveNest:
    """Copies a box of one DDR tensor to another through SRAM.

    `source` and `target` have equal rank; element i of the box is read at `starts[i] + i *
    steps[i]` and written at `offsets`.
    """

    nest: Nest
    layer: str
    tile: tuple[int, ...]
    slots: int
    source: View
    target: View
    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    steps: tuple[int, ...]
    offsets: tuple[int, ...]
    fill: float | None = None
    """Write this constant instead of reading a source."""

    def emit(self) -> None:
        """Append the nest."""
        self.nest.layer = self.layer
        self._level([])

    def _level(self, at: list[Index]) -> None:
        axis = len(at)
        if axis < len(self.sizes):
            with self.nest.loop(self.sizes[axis], self.tile[axis]) as index:
                self._level([*at, index])
            return
        nest = self.nest
        extents = [
            nest.minimum(step, Index(size) - index)
            for size, step, index in zip(self.sizes, self.tile, at, strict=True)
        ]
        tile = nest.alloc(self.tile, self.target.type.element_type, "input", self.slots)
        used = nest.view(tile, [0] * len(extents), extents)
        if self.fill is not None:
            nest.fill(self.fill, used)
        else:
            places = [
                index * step + start
                for index, step, start in zip(at, self.steps, self.starts, strict=True)
            ]
            nest.copy(nest.view(self.source, places, extents, strides=self.steps), used)
        places = [index + offset for index, offset in zip(at, self.offsets, strict=True)]
        nest.copy(used, nest.view(self.target, places, extents))
