"""The nest of a convolution, matrix product or window sum with its requantisation and lookup.

Each tile is loaded inside the innermost loop it changes with; loops of one iteration vanish::

    affine.for %o, %h ... {            // output tile; the order is the tiler's
      load weights, bias, mult, shift, input (filled with the zero point where it leaves the image)
      linalg.fill 0 -> acc
      affine.for %k ... {              // only if the reduction is split
        conv ins(x, w) outs(acc)
      }
      requant ins(acc, bias, mult, shift) outs(y);  lut ins(y, table) outs(y)
      eltwise ins(y, z) outs(y);  store y        // z: a tile of another tensor
    }

What lies in SRAM as a whole is neither loaded nor stored: its tiles are views of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from xdsl.dialects.builtin import (
    ArrayAttr,
    IntegerAttr,
    UnitAttr,
    i8,
    i64,
)
from xdsl.dialects.linalg.ops import GenericOp
from xdsl.dialects.memref import SubviewOp
from xdsl.ir import Attribute, Operation, Region, SSAValue
from xdsl.ir.affine import AffineMap

from tilewright.schedule.tiling import (
    INPUT_LOOPS,
    OUTPUT_LOOPS,
    REDUCTIONS,
    ConvProblem,
    ConvTiling,
)
from tilewright.transforms.affine import bodies
from tilewright.transforms.affine.held import Place, SramImage
from tilewright.transforms.affine.index import Index
from tilewright.transforms.affine.nest import ACCUMULATORS, Nest, View, dims, table, view_of
from tilewright.transforms.affine.segment import element_of
from tilewright.transforms.affine.tiles import Span, load, store
from tilewright.transforms.linalg.emit import accumulator_of

Ranges = list[tuple[dict[str, Index], dict[str, View]]]
KEPT = "kept"
"""Attribute of tiles that stay to the end of the program."""
PARAMETERS = ("bias", "mult", "shift")
"""Roles of the per-channel parameters, in the order of the requantisation's operands."""


@dataclass(frozen=True)
class Join:
    """An elementwise operation of the layer's result and another tensor."""

    op: GenericOp
    layer: str
    other: Place
    """[n, oh, ow, o]."""
    first: bool
    """Whether the layer's result is the first operand."""
    attributes: dict[str, Attribute]


@dataclass(frozen=True)
class ConvLayer:
    """A layer and its tensors: x [n, h, w, c], w [o, i/group, kh, kw], y [n, oh, ow, o].

    What lies in SRAM has no n. The weights of a product of two activations are [n, o, i, 1, 1]; n
    may be 1 in x or w.
    """

    layer: str
    problem: ConvProblem
    tiling: ConvTiling
    x: Place
    weights: SSAValue | None
    parameters: tuple[SSAValue, ...]
    """Bias, and for codes multiplier and shift."""
    y: Place
    pads: tuple[int, int]
    """Rows above and columns to the left of the image."""
    zero: float
    """What padding holds."""
    reduce: GenericOp
    """The linalg op of the reduction."""
    requant: Callable[[], Region]
    requant_attributes: dict[str, Attribute]
    elements: tuple[Attribute, Attribute]
    """Of x and of y."""
    lut: GenericOp | None = None
    lut_table: SSAValue | None = None
    lut_layer: str = ""
    join: Join | None = None


@dataclass
class ConvNest:
    """Emits the nest of one layer."""

    nest: Nest
    work: ConvLayer
    at: dict[str, Index] = field(default_factory=dict[str, Index])
    tiles: dict[str, View] = field(default_factory=dict[str, View])
    ranges: Ranges = field(default_factory=list[tuple[dict[str, Index], dict[str, View]]])
    """Of output channels: where each starts, and its constants."""
    loads_constants: bool = True
    last_row: int = 0
    """Behind the last row that is computed."""

    def emit(self, kept: Ranges | None = None) -> None:
        """Append the nest; `kept`: its constants lie in SRAM, one nest a range of channels."""
        loops = self.work.tiling.loops(self.work.problem)
        self.active = [loop for loop in loops if loop.count > 1]
        self.last_row = self.work.problem.out_rows
        self.nest.layer = self.work.layer
        if kept is None:
            self.at = {loop.name: Index(0) for loop in loops}
            self._load_shared()
            self._level(0)
            return
        self.loads_constants = False
        self.active = [loop for loop in self.active if loop.name in ("n", "h", "w")]
        for at, tiles in kept:
            self.at, self.tiles = dict(at), {}
            # Nests that share no tile may have theirs at different times.
            self._load_shared()
            self.tiles |= tiles
            self._level(0)

    def take_constants(self, kept: Ranges) -> None:
        """As `load_constants`, with constants that lie in SRAM already."""
        self.nest.layer = self.work.layer
        self._load_shared()
        self.ranges = [(at, self.tiles | tiles) for at, tiles in kept]

    def load_constants(self, *, stay: bool = False) -> None:
        """Append what rows computed one by one share: weights and parameters of all channels.

        With `stay` they are for the whole program, and a lookup's table is left out.
        """
        problem, tiling = self.work.problem, self.work.tiling
        loops = {loop.name: loop for loop in tiling.loops(problem)}
        assert all(loops[name].count == 1 for name in REDUCTIONS), self.work.layer
        self.nest.layer = self.work.layer
        if not stay:
            self._load_shared()
        shared = dict(self.tiles)
        for group in range(0, problem.group, tiling.groups):
            for channel in range(0, problem.group_out, tiling.out_channels):
                self.at = dict.fromkeys(loops, Index(0))
                self.at |= {"g": Index(group), "o": Index(channel)}
                self.tiles = dict(shared)
                if self.work.weights is not None:
                    self._load_weights()
                self._load_parameters()
                self.ranges.append((self.at, self.tiles))
                for role in ("weights", *PARAMETERS) if stay else ():
                    if role in self.tiles:
                        _mark(self.tiles[role], KEPT)

    def strip(self, first: int, last: int, x: Place, y: Place, other: Place | None) -> None:
        """Append the computation of rows `first..last` (exclusive), by constants loaded before."""
        join = self.work.join
        if join is not None:
            assert other is not None
            join = replace(join, other=other)
        self.work = replace(self.work, x=x, y=y, join=join)
        self.last_row = last
        self.nest.layer = self.work.layer
        tiling = self.work.tiling
        for at, tiles in self.ranges:
            for row in range(first, last, tiling.rows):
                for column in range(0, self.work.problem.out_columns, tiling.columns):
                    self.at = at | {"h": Index(row), "w": Index(column)}
                    self.tiles = dict(tiles)
                    self._start()
                    self._load_input()
                    if join is not None:
                        self._load_second(join)
                    self._reduce()
                    self._finish()

    def _load_shared(self) -> None:
        """Load what all tiles share."""
        if self.work.lut_table is not None:
            tile = self.nest.alloc([256], i8, "table", 1)
            self.nest.copy(view_of(self.work.lut_table), tile)
            self.tiles["table"] = tile
        if self.work.problem.kind == "sum":
            self.tiles["window"] = self.nest.alloc(
                self.work.tiling.kernel, self.work.elements[0], "window", 1, ACCUMULATORS
            )

    def _depth(self, names: tuple[str, ...]) -> int:
        """Return how many loops are open where a tile that changes with `names` is filled."""
        inside = [index for index, loop in enumerate(self.active) if loop.name in names]
        return inside[-1] + 1 if inside else 0

    def _level(self, depth: int) -> None:
        if self.loads_constants:
            weight_loops = self.work.problem.weight_loops
            if depth == self._depth(weight_loops) and self.work.weights is not None:
                self._load_weights()
            if depth == self._depth(("g", "o")):
                self._load_parameters()
        if depth == self._depth(OUTPUT_LOOPS):
            self._start()
        if depth == self._depth(INPUT_LOOPS):
            self._load_input()
        if depth == self._depth(OUTPUT_LOOPS) and self.work.join is not None:
            self._load_second(self.work.join)
        if depth < len(self.active):
            loop = self.active[depth]
            with self.nest.loop(loop.size, loop.step) as index:
                self.at[loop.name] = index
                self._level(depth + 1)
            self.at[loop.name] = Index(0)
        else:
            self._reduce()
        if depth == self._depth(OUTPUT_LOOPS):
            self._finish()

    # Extents of the current tile

    def _extent(self, name: str, size: int, step: int) -> Index:
        return self.nest.minimum(step, Index(size) - self.at[name])

    def _rows(self) -> Index:
        return self._extent("h", self.last_row, self.work.tiling.rows)

    def _columns(self) -> Index:
        return self._extent("w", self.work.problem.out_columns, self.work.tiling.columns)

    def _channels(self, output: bool) -> tuple[Index, Index]:
        """Return first channel and channels of the tile."""
        problem, tiling = self.work.problem, self.work.tiling
        group = problem.group_out if output else problem.group_in
        part = tiling.out_channels if output else tiling.in_channels
        if tiling.groups > 1:
            return self.at["g"] * group, self._extent("g", problem.group, tiling.groups) * group
        name = "o" if output else "k"
        return self.at["g"] * group + self.at[name], self._extent(name, group, part)

    def _kernel(self) -> tuple[Index, Index]:
        problem, tiling = self.work.problem, self.work.tiling
        return (
            self._extent("kr", problem.kernel[0], tiling.kernel[0]),
            self._extent("kc", problem.kernel[1], tiling.kernel[1]),
        )

    # Loads

    def _load_weights(self) -> None:
        nest, problem, tiling = self.nest, self.work.problem, self.work.tiling
        assert self.work.weights is not None
        start, count = self._channels(output=True)
        kernel = self._kernel()
        if tiling.groups > 1:
            first, depth = Index(0), Index(problem.group_in)
        else:
            first = self.at["k"]
            depth = self._extent("k", problem.group_in, tiling.in_channels)
        shape = [
            count.high,
            min(problem.group_in, tiling.in_channels),
            *tiling.kernel,
        ]
        element = element_of(self.work.weights)
        tile = nest.alloc(shape, element, "weights", tiling.weight_slots)
        used = nest.view(tile, [0] * 4, [count, depth, *kernel])
        source = view_of(self.work.weights)
        outer = [self._image(source)] if len(source.sizes) == 5 else []
        offsets = [*outer, start, first, self.at["kr"], self.at["kc"]]
        sizes = [*(1 for _ in outer), *used.sizes]
        nest.copy(nest.view(source, offsets, sizes, drop=range(len(outer))), used)
        self.tiles["weights"] = used

    def _load_parameters(self) -> None:
        nest, tiling = self.nest, self.work.tiling
        start, count = self._channels(output=True)
        slots = tiling.parameter_slots(self.work.problem)
        for role, source in zip(PARAMETERS, self.work.parameters, strict=False):
            whole = view_of(source)
            tile = nest.alloc([count.high], whole.type.element_type, role, slots)
            used = nest.view(tile, [0], [count])
            nest.copy(nest.view(whole, [start], [count]), used)
            self.tiles[role] = used

    def _load_input(self) -> None:
        nest, problem, tiling = self.nest, self.work.problem, self.work.tiling
        spans: list[Span] = []
        for axis, (outs, kernel, position, reduction) in enumerate(
            zip(
                (self._rows(), self._columns()),
                self._kernel(),
                ("h", "w"),
                ("kr", "kc"),
                strict=True,
            )
        ):
            stride, dilation = problem.strides[axis], problem.dilations[axis]
            before = self.work.pads[axis]
            full = (problem.in_rows, problem.in_columns)[axis]
            total = (problem.out_rows, problem.out_columns)[axis]
            reach = (total - 1) * stride + (problem.kernel[axis] - 1) * dilation + 1 - before
            spans.append(
                Span(
                    self.at[position] * stride + self.at[reduction] * dilation - before,
                    (outs - 1) * stride + (kernel - 1) * dilation + 1,
                    full,
                    before > 0 or reach > full,
                )
            )
        start, count = self._channels(output=False)
        spans.append(Span(start, count, problem.in_channels))
        if isinstance(self.work.x, SramImage):
            starts, lengths = [span.first for span in spans], [span.length for span in spans]
            self.tiles["input"] = self.work.x.box(nest, starts, lengths)
            return
        shape = [*tiling.in_extent(problem), tiling.groups * tiling.in_channels]
        tile = nest.alloc(shape, self.work.elements[0], "input", tiling.input_slots)
        if tiling.packing.dense:
            _mark(tile, "dense")
        source = view_of(self.work.x)
        self.tiles["input"] = load(nest, source, [self._image(source)], spans, tile, self.work.zero)

    def _image(self, source: View) -> Index:
        """Return the index of the current image in a tensor that may be the same for all."""
        return Index(0) if source.sizes[0] == Index(1) else self.at["n"]

    # Compute

    def _result_shape(self) -> list[int]:
        tiling = self.work.tiling
        return [tiling.rows, tiling.columns, tiling.groups * tiling.out_channels]

    def _start(self) -> None:
        nest = self.nest
        _, count = self._channels(output=True)
        sizes = [self._rows(), self._columns(), count]
        element = accumulator_of(self.work.elements[0])
        tile = nest.alloc(self._result_shape(), element, "accumulator", 1, ACCUMULATORS)
        used = nest.view(tile, [0] * 3, sizes)
        nest.fill(0, used)
        self.tiles["acc"] = used

    def _load_second(self, join: Join) -> None:
        """Load what is joined to the results; early, so that it is there when they are."""
        nest, problem, sizes = self.nest, self.work.problem, self.tiles["acc"].sizes
        start, _ = self._channels(output=True)
        if isinstance(join.other, SramImage):
            starts = [self.at["h"], self.at["w"], start]
            self.tiles["second"] = join.other.box(nest, starts, sizes)
            return
        spans = [
            Span(self.at["h"], sizes[0], problem.out_rows),
            Span(self.at["w"], sizes[1], problem.out_columns),
            Span(start, sizes[2], problem.out_channels),
        ]
        slots = self.work.tiling.second_slots
        tile = nest.alloc(self._result_shape(), element_of(join.other), "input", slots)
        self.tiles["second"] = load(nest, view_of(join.other), [self.at["n"]], spans, tile)

    def _reduce(self) -> None:
        problem, tiling = self.work.problem, self.work.tiling
        (sy, sx), (dy, dx) = problem.strides, problem.dilations
        diagonal = problem.diagonal and (tiling.groups > 1 or problem.kind == "sum")
        space = dims(5 if diagonal else 6)
        row, column, out, kr, kc = space[:5]
        at = [row * sy + kr * dy, column * sx + kc * dx]
        rank = len(space)
        acc = (self.tiles["acc"], table(rank, [row, column, out]))
        attributes: dict[str, Attribute] = {
            "strides": _ints(problem.strides),
            "dilations": _ints(problem.dilations),
        }
        packing = tiling.packing
        if not packing.plain:
            numbers = (packing.pixels, int(packing.runs))
            if packing.stack:
                numbers = (*numbers, packing.stack, packing.stack_pitch)
            attributes["packing"] = _ints(numbers)
        if problem.kind == "sum":
            window = self.tiles["window"]
            attributes["kernel"] = _ints(tiling.kernel)
            if "weight" in self.work.reduce.attributes:
                attributes["weight"] = self.work.reduce.attributes["weight"]
            inputs = [
                (self.tiles["input"], table(rank, [*at, out])),
                (window, table(rank, [kr, kc])),
            ]
            body = bodies.plain(self.work.reduce)
            self.nest.generic("sum", inputs, acc, body, attributes, 2)
            return
        attributes["group"] = IntegerAttr(tiling.groups, i64)
        if tiling.groups > 1:
            attributes["group_out"] = IntegerAttr(problem.group_out, i64)
        if diagonal:
            channel, weights = out, [out, 0, kr, kc]
        elif tiling.groups > 1:
            group = out // problem.group_out if problem.group_out > 1 else out
            channel = group * problem.group_in + space[5]
            weights = [out, space[5], kr, kc]
        else:
            channel, weights = space[5], [out, space[5], kr, kc]
        inputs = [
            (self.tiles["input"], table(rank, [*at, channel])),
            (self.tiles["weights"], table(rank, weights)),
        ]
        body = bodies.plain(self.work.reduce)
        self.nest.generic("conv", inputs, acc, body, attributes, rank - 3)

    def _finish(self) -> None:
        nest, work, tiling = self.nest, self.work, self.work.tiling
        acc = self.tiles["acc"]
        start, _ = self._channels(output=True)
        starts = [self.at["h"], self.at["w"], start]
        if isinstance(work.y, SramImage):
            used = work.y.box(nest, starts, acc.sizes)
        else:
            shape = self._result_shape()
            tile = nest.alloc(shape, work.elements[1], "output", tiling.output_slots)
            used = nest.view(tile, [0] * 3, acc.sizes)
        identity = AffineMap.identity(3)
        along = table(3, [dims(3)[2]])
        inputs = [
            (acc, identity),
            *((self.tiles[role], along) for role in PARAMETERS if role in self.tiles),
        ]
        nest.generic("requant", inputs, (used, identity), work.requant(), work.requant_attributes)
        if work.lut is not None:
            nest.layer = work.lut_layer
            emit_lookup(nest, work.lut, used, self.tiles["table"], used)
            nest.layer = work.layer
        if work.join is not None:
            nest.layer = work.join.layer
            pair = [(used, identity), (self.tiles["second"], identity)]
            inputs = pair if work.join.first else pair[::-1]
            body = bodies.plain(work.join.op)
            nest.generic("eltwise", inputs, (used, identity), body, work.join.attributes)
            nest.layer = work.layer
        if not isinstance(work.y, SramImage):
            store(nest, used, view_of(work.y), [self.at["n"]], starts)


def emit_lookup(nest: Nest, op: GenericOp, source: View, values: View, target: View) -> None:
    """Append `lut ins(source, values) outs(target)`: the body reads the table by `memref.load`."""
    rank = len(source.sizes)
    body = bodies.load_from(bodies.reordered(op, [0, i8, 1]), values.value)
    identity = AffineMap.identity(rank)
    inputs = [(source, identity), (values, table(rank, [0]))]
    nest.generic("lut", inputs, (target, identity), body, {})


def _mark(tile: View, name: str) -> None:
    """Give the allocation that a view is of an attribute."""
    owner = tile.value.owner
    while isinstance(owner, SubviewOp):
        owner = owner.source.owner
    assert isinstance(owner, Operation)
    owner.attributes[name] = UnitAttr()


def _ints(values: Sequence[int]) -> Attribute:
    return ArrayAttr([IntegerAttr(value, i64) for value in values])
