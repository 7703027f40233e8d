"""Layers of the vector unit: elementwise, tables, transposition, pooling, resizing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from xdsl.dialects import tensor
from xdsl.dialects.builtin import ArrayAttr, IntegerAttr, i8, i64
from xdsl.dialects.linalg.ops import GenericOp
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.ir.affine import AffineMap

from tilewright.diagnostics import TilewrightError
from tilewright.schedule.box import (
    BoxAxis,
    BoxChoice,
    BoxNoFit,
    BoxOperand,
    BoxProblem,
    BoxTiling,
    choose_box,
)
from tilewright.schedule.permutation import MAX_RANK, merged_permutation
from tilewright.spec.hardware import Hardware
from tilewright.spec.isa import BY_NAME
from tilewright.transforms.affine import bodies
from tilewright.transforms.affine.box import BoxNest, BoxTensor, Compute
from tilewright.transforms.affine.convolution import emit_lookup
from tilewright.transforms.affine.held import Place, SramImage
from tilewright.transforms.affine.nest import ACCUMULATORS, Nest, View, dims, table, view_of
from tilewright.transforms.affine.segment import (
    Buffers,
    element_of,
    item_bytes,
    numbers,
    out_of_memory,
    tensor_shape,
    text,
    values_of,
)
from tilewright.transforms.affine.units import Image, Reading, Strip, Tiling, Unit, Work, image_of
from tilewright.transforms.linalg.pooling import lowest

POOL = BY_NAME["vec_pool"].field
SCALARS = (
    "mult_a", "mult_b", "mult", "shift", "bias", "bias_shift", "za", "zb", "zp", "lo", "hi",
    "function",
)  # fmt: skip
"""Attributes of a linalg op that its tile-level op keeps: integer parameters, or a float clamp."""
FIXED = BoxAxis(-1)


def choose(
    buffers: Buffers,
    layer: str,
    problem: BoxProblem,
    tiling: BoxTiling | None = None,
    held: tuple[int, ...] = (),
) -> BoxTiling:
    """Return the tiling of a layer (a given one, or the best for the SRAM that is left); log it.

    Raises:
        TilewrightError: E0401, nothing fits.
    """
    hardware, choice = buffers.hardware, None
    if tiling is None or buffers.apart:
        choice = choose_box(hardware, problem, 0 if tiling is not None else buffers.held_bytes)
    if tiling is not None and not (isinstance(choice, BoxChoice) and choice.tiling == tiling):
        tiles = tiling.buffers(hardware, replace(problem, held=held))
        size = sum(item.slots * item.size_bytes for item in tiles)
        buffers.decide(layer, _describe(problem, tiling), None, size)
        return tiling
    assert choice is not None
    if isinstance(choice, BoxNoFit):
        raise out_of_memory(layer, choice.buffers, choice.needed_bytes, hardware)
    other = choice.runner_up
    buffers.decide(
        layer,
        _describe(problem, choice.tiling),
        choice.cycles,
        choice.sram_bytes,
        "x".join(map(str, other.tile)) if other else "",
        choice.runner_up_cycles,
    )
    return choice.tiling


def _describe(problem: BoxProblem, tiling: BoxTiling) -> str:
    return f"tiles of {'x'.join(map(str, tiling.tile))} of {'x'.join(map(str, problem.sizes))}"


def scalars(op: Operation) -> dict[str, Attribute]:
    """Return the parameters of a linalg op for its tile-level op."""
    return {key: op.attributes[key] for key in SCALARS if key in op.attributes}


# Elementwise


def merged_shape(
    shape: tuple[int, ...], operands: Sequence[tuple[int, ...]], word: int
) -> tuple[list[int], list[list[bool]]]:
    """Merge axes of a broadcast operation; returns sizes and, per operand, whether it spans each.

    Neighbours that every operand walks alike become one axis; the last axis stays (its elements are
    a pixel's channels). Without broadcasting the whole tensor is cut into rows of whole words where
    the channels are not.
    """
    padded = [(1,) * (len(shape) - len(item)) + item for item in operands]
    if all(item == shape for item in padded):
        total, channels = prod(shape), shape[-1] if shape else 1
        if channels % word:
            fit = [n for n in range(word, 4097, word) if total % n == 0]
            channels = fit[-1] if fit else (total if total <= 4096 else channels)
        return [total // channels, channels], [[True, True] for _ in operands]
    sizes: list[int] = []
    spans: list[list[bool]] = [[] for _ in operands]
    for axis, size in enumerate(shape):
        last = axis == len(shape) - 1
        if size == 1 and not last:
            continue
        pattern = [item[axis] == size for item in padded]
        if (
            not last
            and sizes
            and all(span[-1] == own for span, own in zip(spans, pattern, strict=True))
        ):
            sizes[-1] *= size
            continue
        sizes.append(size)
        for span, own in zip(spans, pattern, strict=True):
            span.append(own)
    if len(sizes) == 1:
        return [1, *sizes], [[True, *span] for span in spans]
    return sizes, spans


def _elementwise_problem(
    hardware: Hardware, op: GenericOp, inputs: Sequence[SSAValue], table: bool
) -> tuple[list[int], list[list[bool]], BoxProblem]:
    """Return merged sizes, which of them each operand spans, and what the tiler is asked."""
    result = op.results[0]
    size_bytes = item_bytes(result)
    sizes, spans = merged_shape(
        tensor_shape(result),
        [tensor_shape(value) for value in inputs],
        max(1, hardware.sram_word_bytes // size_bytes),
    )
    cut = max(0, len(sizes) - 3)
    inner = sizes[cut:]
    operands = [
        BoxOperand(
            role,
            tuple(BoxAxis(axis) if own else FIXED for axis, own in enumerate(span[cut:])),
            tuple(size if own else 1 for size, own in zip(inner, span[cut:], strict=True)),
            size_bytes,
        )
        for role, span in zip(
            [*("input" for _ in inputs), "output"], [*spans, [True] * len(sizes)], strict=True
        )
    ]
    problem = BoxProblem(
        tuple(inner),
        tuple(operands),
        outer=prod(sizes[:cut]),
        parameters=not table,
        table=table,
    )
    return sizes, spans, problem


def elementwise_cycles(hardware: Hardware, op: GenericOp) -> float:
    """Return the estimated cycles of an elementwise layer in a nest of its own."""
    *_, problem = _elementwise_problem(hardware, op, list(op.inputs), table=False)
    choice = choose_box(hardware, problem)
    return choice.cycles if isinstance(choice, BoxChoice) else math.inf


@dataclass(frozen=True)
class Elementwise:
    """An operation that writes each element once: of two operands, of one, or a table's values."""

    op: GenericOp
    kind: str
    inputs: tuple[SSAValue, ...]
    attributes: dict[str, Attribute]
    values: SSAValue | None = None
    """A table."""

    def prepare(self, buffers: Buffers) -> View | None:
        """Load the table."""
        if self.values is None:
            return None
        tile = buffers.nest.alloc([256], i8, "table", 1)
        buffers.nest.copy(view_of(buffers.of(self.values)), tile)
        return tile

    def compute(
        self, nest: Nest, tiles: list[View], spans: Sequence[Sequence[bool]], loaded: View | None
    ) -> None:
        """Append the compute op; `spans` tells which axes of the result each operand has."""
        if loaded is not None:
            emit_lookup(nest, self.op, tiles[0], loaded, tiles[1])
            return
        rank = len(spans[0])
        space = dims(rank)
        maps = [
            table(rank, [space[axis] if own else 0 for axis, own in enumerate(span)])
            for span in spans
        ]
        pairs = list(zip(tiles[:-1], maps, strict=True))
        identity = AffineMap.identity(rank)
        body = bodies.plain(self.op)
        nest.generic(self.kind, pairs, (tiles[-1], identity), body, self.attributes)


def emit_merged(buffers: Buffers, work: Elementwise, tiling: BoxTiling | None = None) -> None:
    """Append the nest of an operation whose tensors all lie in DDR, on merged axes."""
    op, result = work.op, work.op.results[0]
    sizes, spans, problem = _elementwise_problem(
        buffers.hardware, op, work.inputs, work.values is not None
    )
    operands, inner = problem.operands, problem.sizes
    cut = len(sizes) - len(inner)
    layer = text(op, "layer")
    tiling = choose(buffers, layer, problem, tiling)
    sources = [
        buffers.nest.reshape(
            buffers.of(value), [size if own else 1 for size, own in zip(sizes, span, strict=True)]
        )
        for value, span in zip(work.inputs, spans, strict=True)
    ]
    target = buffers.nest.reshape(buffers.make(result, op), sizes)
    loaded: list[View | None] = []

    def prepare() -> None:
        loaded.append(work.prepare(buffers))

    def compute(tiles: list[View]) -> None:
        work.compute(buffers.nest, tiles, [span[cut:] for span in spans], loaded[0])

    tensors = [
        BoxTensor(value, operand)
        for value, operand in zip([*sources, target], operands, strict=True)
    ]
    _run(buffers, layer, problem, tiling, tuple(sizes[:cut]), tensors, compute, prepare)


def elementwise_unit(hardware: Hardware, work: Elementwise, in_place: bool) -> Unit:
    """Return the unit of an operation; `in_place`: it writes a part of a concatenation."""
    op, result = work.op, work.op.results[0]
    shape = tensor_shape(result)
    sizes, layer = image_of(shape), text(op, "layer")
    images = [
        image_of((1,) * (len(shape) - len(own)) + own)
        for own in (tensor_shape(value) for value in work.inputs)
    ]
    plain = all(
        own in (1, full) for image in images for own, full in zip(image, sizes, strict=True)
    )
    reads = tuple(
        Reading(value, image, whole=image[0] < sizes[0])
        for value, image in zip(work.inputs, images, strict=True)
    )

    def merged(
        buffers: Buffers,
        tiling: Tiling | None,
        sources: Sequence[SramImage | None],
        target: SramImage | None,
    ) -> None:
        del sources, target
        assert tiling is None
        emit_merged(buffers, work)

    if not plain or 0 in shape:
        why = "its operands differ in more than rows, columns or channels of one image"
        return Unit(layer, reads, result, op, Work(merged), why_opaque=why)
    spans = [[own == full for own, full in zip(image, sizes, strict=True)] for image in images]
    size_bytes = item_bytes(result)
    operands = tuple(
        BoxOperand(
            role,
            tuple(BoxAxis(axis) if own else FIXED for axis, own in enumerate(span)),
            tuple(full if own else 1 for full, own in zip(sizes, span, strict=True)),
            size_bytes,
        )
        for role, span in zip(
            [*("input" for _ in images), "output"], [*spans, [True] * 3], strict=True
        )
    )
    table_read = work.values is not None
    problem = BoxProblem(sizes, operands, parameters=not table_read, table=table_read)
    box = BoxLayer(
        layer,
        problem,
        tuple(zip(work.inputs, images, strict=True)),
        result,
        op,
        prepare=work.prepare,
        compute=lambda nest, tiles, loaded: work.compute(nest, tiles, spans, loaded),
    )

    def alone(
        buffers: Buffers,
        tiling: Tiling | None,
        sources: Sequence[SramImage | None],
        target: SramImage | None,
    ) -> None:
        assert tiling is None or isinstance(tiling, BoxTiling)
        if in_place or any(place is not None for place in (*sources, target)):
            box.alone(buffers, tiling, sources, target)
        else:
            emit_merged(buffers, work, tiling)

    *_, merged_axes = _elementwise_problem(hardware, op, work.inputs, table_read)
    in_ddr = None if in_place else merged_axes
    return Unit(layer, reads, result, op, Work(alone, box.begin), problem, in_ddr, sizes)


@dataclass(frozen=True)
class BoxLayer:
    """A layer whose tiles are boxes of images: how its nest is built, in DDR, in SRAM or both."""

    layer: str
    problem: BoxProblem
    sources: tuple[tuple[SSAValue, Image], ...]
    """Operands, and the shape each is read under."""
    result: SSAValue
    producer: Operation
    prepare: Callable[[Buffers], View | None]
    """Loads or makes what all tiles share."""
    compute: Callable[[Nest, list[View], View | None], None]
    pads: tuple[tuple[int, ...], tuple[int, ...], float] = ((), (), 0)
    """Of the operands: padding before and after every axis, and what it holds."""
    images: int = 1

    def alone(
        self,
        buffers: Buffers,
        tiling: Tiling | None,
        sources: Sequence[SramImage | None],
        target: SramImage | None,
    ) -> None:
        """Append the nest."""
        assert tiling is None or isinstance(tiling, BoxTiling)
        inside = [*(place is not None for place in sources), target is not None]
        held_ones = tuple(at for at, place in enumerate(inside) if place)
        tiling = choose(buffers, self.layer, self.problem, tiling, held_ones)
        places: list[Place] = [
            held or buffers.nest.reshape(buffers.of(value), [self.images, *image])
            for held, (value, image) in zip(sources, self.sources, strict=True)
        ]
        shape = (self.images, *self.problem.sizes)
        places.append(target or buffers.target(self.result, self.producer, shape))
        nest, shared = self._nest(buffers, tiling, places)
        nest.prepare = lambda: shared.append(self.prepare(buffers))
        nest.emit()

    def begin(self, buffers: Buffers, tiling: Tiling) -> Strip:
        """Append what all rows share; returns what appends some rows."""
        assert isinstance(tiling, BoxTiling)
        buffers.nest.layer = self.layer
        values: list[Place] = [*(value for value, _ in self.sources), self.result]
        nest, shared = self._nest(buffers, tiling, values)
        shared.append(self.prepare(buffers))

        def strip(first: int, last: int, sources: Sequence[SramImage], target: SramImage) -> None:
            nest.strip(first, last, [*sources, target])

        return strip

    def _nest(
        self, buffers: Buffers, tiling: BoxTiling, places: Sequence[Place]
    ) -> tuple[BoxNest, list[View | None]]:
        """Return the nest, and the list that its `compute` takes what all tiles share from."""
        shared: list[View | None] = []
        before, after, fill = self.pads
        *operands, result = self.problem.operands
        tensors = [
            *(
                BoxTensor(place, operand, before, after, fill)
                for place, operand in zip(places[:-1], operands, strict=True)
            ),
            BoxTensor(places[-1], result),
        ]

        def compute(tiles: list[View]) -> None:
            self.compute(buffers.nest, tiles, shared[0])

        nest = BoxNest(
            buffers.nest, self.layer, self.problem, tiling, (self.images,), tensors, compute
        )
        return nest, shared


def _run(
    buffers: Buffers,
    layer: str,
    problem: BoxProblem,
    tiling: BoxTiling,
    outer: tuple[int, ...],
    tensors: Sequence[BoxTensor],
    compute: Compute,
    prepare: Callable[[], None] | None = None,
) -> None:
    nest = BoxNest(buffers.nest, layer, problem, tiling, outer, tensors, compute)
    if prepare is not None:
        nest.prepare = prepare
    nest.emit()


def table_of(op: GenericOp) -> SSAValue:
    """Return the table a lookup extracts from."""
    for inner in op.body.block.ops:
        if isinstance(inner, tensor.ExtractOp):
            return inner.tensor
    raise TilewrightError("E0501", f'lookup "{text(op, "layer")}" reads no table')


def elementwise_of(op: GenericOp) -> Elementwise:
    """Return the work of an `eltwise`, `lut` or `copy` op: of two operands, or one."""
    kind = text(op, "kind")
    if kind == "lut":
        return Elementwise(op, kind, tuple(op.inputs), {}, table_of(op))
    return Elementwise(op, kind, tuple(op.inputs), scalars(op))


# Transposition


def lower_transpose(buffers: Buffers, op: GenericOp) -> None:
    """Any permutation of at most four groups of axes.

    Raises:
        TilewrightError: E0402, more groups.
    """
    layer, source = text(op, "layer"), tensor_shape(op.inputs[0])
    sizes, perm = merged_permutation(source, numbers(op, "perm"))
    if len(sizes) > MAX_RANK:
        raise TilewrightError(
            "E0402",
            f'transpose "{layer}" cannot run on the chip',
            [f"it permutes {len(sizes)} separate axes; the chip moves {MAX_RANK}"],
        )
    rank, size = len(sizes), item_bytes(op.results[0])
    # Source axis k is result axis at[k].
    at = [perm.index(axis) for axis in range(rank)]
    source_sizes = tuple(sizes[axis] for axis in at)
    operands = (
        BoxOperand("input", tuple(BoxAxis(axis) for axis in at), source_sizes, size),
        BoxOperand("output", tuple(BoxAxis(axis) for axis in range(rank)), tuple(sizes), size),
    )
    problem = BoxProblem(tuple(sizes), operands, element_wise=at[-1] != rank - 1)
    tiling = choose(buffers, layer, problem)
    x = buffers.nest.reshape(buffers.of(op.inputs[0]), source_sizes)
    y = buffers.nest.reshape(buffers.make(op.results[0], op), sizes)
    space = dims(rank)

    def compute(tiles: list[View]) -> None:
        reads = table(rank, [space[axis] for axis in at])
        body = bodies.plain(op)
        identity = AffineMap.identity(rank)
        buffers.nest.generic("copy", [(tiles[0], reads)], (tiles[1], identity), body, {})

    tensors = [BoxTensor(x, operands[0]), BoxTensor(y, operands[1])]
    _run(buffers, layer, problem, tiling, (), tensors, compute)


# Windows


def pool_unit(op: GenericOp, source: SSAValue, pad: tensor.PadOp | None) -> Unit:
    """Return the unit of a maximum pooling of an NHWC image.

    Raises:
        TilewrightError: E0402, a window the chip cannot walk.
    """
    layer = text(op, "layer")
    kernel, strides, dilations = (numbers(op, key) for key in ("kernel", "strides", "dilations"))
    n, rows, columns, channels = tensor_shape(source)
    _, out_rows, out_columns, _ = tensor_shape(op.results[0])
    element, size = element_of(source), item_bytes(source)
    if max(kernel) > POOL["k_h"].high:
        raise TilewrightError(
            "E0402",
            f'max_pool "{layer}" cannot run on the chip',
            [f"its window is {kernel[0]} x {kernel[1]}; the chip walks {POOL['k_h'].high}"],
        )
    low = values_of(pad.static_low) if pad is not None else (0, 0, 0, 0)
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    after = [
        max(0, (outs - 1) * stride + window - before - full)
        for outs, stride, window, before, full in zip(
            (out_rows, out_columns), strides, reach, low[1:3], (rows, columns), strict=True
        )
    ]
    operands = (
        BoxOperand(
            "input",
            (BoxAxis(0, strides[0], reach[0]), BoxAxis(1, strides[1], reach[1]), BoxAxis(2)),
            (rows, columns, channels),
            size,
        ),
        BoxOperand(
            "output", (BoxAxis(0), BoxAxis(1), BoxAxis(2)), (out_rows, out_columns, channels), size
        ),
    )
    problem = BoxProblem(
        (out_rows, out_columns, channels),
        operands,
        outer=n,
        work=kernel[0] * kernel[1],
        limits=(POOL["out_h"].high, POOL["out_w"].high, POOL["n0"].high),
    )

    def prepare(buffers: Buffers) -> View:
        return buffers.nest.alloc(kernel, element, "window", 1, ACCUMULATORS)

    def compute(nest: Nest, tiles: list[View], window: View | None) -> None:
        assert window is not None
        space = dims(5)
        at = [space[axis] * strides[axis] + space[3 + axis] * dilations[axis] for axis in (0, 1)]
        nest.fill(lowest(element), tiles[1])
        attributes: dict[str, Attribute] = {
            "kernel": _ints(kernel),
            "strides": _ints(strides),
            "dilations": _ints(dilations),
        }
        inputs = [
            (tiles[0], table(5, [*at, space[2]])),
            (window, table(5, [space[3], space[4]])),
        ]
        output = (tiles[1], table(5, space[:3]))
        nest.generic("pool", inputs, output, bodies.plain(op), attributes, 2)

    image, result = (rows, columns, channels), (out_rows, out_columns, channels)
    box = BoxLayer(
        layer,
        problem,
        ((source, image),),
        op.results[0],
        op,
        prepare,
        compute,
        ((low[1], low[2], 0), (after[0], after[1], 0), lowest(element)),
        n,
    )
    read = Reading(
        source,
        image,
        strides[0],
        reach[0],
        low[1],
        pads=(low[1], low[2], after[0], after[1]),
        fill=lowest(element),
    )
    return Unit(
        layer,
        (read,),
        op.results[0],
        op,
        Work(box.alone, box.begin),
        None if n > 1 else problem,
        image=result,
        why_opaque=f"it has {n} images" if n > 1 else "",
    )


def lower_resize(buffers: Buffers, op: GenericOp) -> None:
    """Interpolation of an NHWC image; a tile holds all rows and columns of the source."""
    layer = text(op, "layer")
    source = table_of(op)
    n, rows, columns, channels = tensor_shape(source)
    _, out_rows, out_columns, _ = tensor_shape(op.results[0])
    operands = (
        BoxOperand(
            "input",
            (BoxAxis(-1, 1, rows), BoxAxis(-1, 1, columns), BoxAxis(2)),
            (rows, columns, channels),
        ),
        BoxOperand("table_y", (BoxAxis(0), BoxAxis(-1, 1, 4)), (out_rows, 4), 2),
        BoxOperand("table_x", (BoxAxis(1), BoxAxis(-1, 1, 4)), (out_columns, 4), 2),
        BoxOperand(
            "output", (BoxAxis(0), BoxAxis(1), BoxAxis(2)), (out_rows, out_columns, channels)
        ),
    )
    problem = BoxProblem(
        (out_rows, out_columns, channels),
        operands,
        outer=n,
        order=(2, 0, 1),
        work=4,
        parameters=True,
    )
    tiling = choose(buffers, layer, problem)
    values = [
        buffers.of(source),
        buffers.of(op.inputs[0]),
        buffers.of(op.inputs[4]),
        buffers.make(op.results[0], op, strided=True),
    ]

    def compute(tiles: list[View]) -> None:
        x, table_y, table_x, y = tiles
        space = dims(3)
        # The first three operands are the tensors; the other fields of the tables follow.
        body = bodies.reordered(op, [i8, 0, 4, 1, 2, 3, 5, 6, 7, 8])
        body = bodies.shift_axes(bodies.load_from(body, x.value, drop_leading=1), 1)
        inputs = [
            (x, table(3, [0, 0, space[2]])),
            (table_y, table(3, [space[0], 0])),
            (table_x, table(3, [space[1], 0])),
            *((table_y, table(3, [space[0], item])) for item in (1, 2, 3)),
            *((table_x, table(3, [space[1], item])) for item in (1, 2, 3)),
        ]
        buffers.nest.generic("resize", inputs, (y, AffineMap.identity(3)), body, scalars(op))

    tensors = [BoxTensor(value, operand) for value, operand in zip(values, operands, strict=True)]
    _run(buffers, layer, problem, tiling, (n,), tensors, compute)


def _ints(values: Sequence[int]) -> Attribute:
    return ArrayAttr([IntegerAttr(value, i64) for value in values])
