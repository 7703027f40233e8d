"""Layers that only move data through SRAM: concatenation, slices, padding, copies of results."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from xdsl.dialects import arith, tensor
from xdsl.dialects.builtin import FloatAttr, IntegerAttr
from xdsl.ir import SSAValue

from tilewright.diagnostics import TilewrightError
from tilewright.schedule.box import BoxAxis, BoxOperand, BoxProblem
from tilewright.schedule.permutation import MAX_RANK
from tilewright.transforms.affine.box import MoveNest
from tilewright.transforms.affine.nest import view_of
from tilewright.transforms.affine.segment import (
    Buffers,
    item_bytes,
    tensor_shape,
    text,
    values_of,
)
from tilewright.transforms.affine.vector import choose


def move(
    buffers: Buffers,
    layer: str,
    source: SSAValue,
    target: SSAValue,
    sizes: Sequence[int],
    starts: Sequence[int],
    steps: Sequence[int],
    offsets: Sequence[int],
    fill: float | None = None,
) -> None:
    """Append the nest that copies a box between buffers of equal rank, or fills it."""
    if 0 in sizes:
        return
    rank = len(sizes)
    axes, size = tuple(BoxAxis(axis) for axis in range(rank)), item_bytes(target)
    operand = BoxOperand("input", axes, tuple(tensor_shape(source)), size)
    result = BoxOperand("output", axes, tuple(tensor_shape(target)), size)
    # One DMA walks four dimensions.
    limits = tuple(1 if axis < rank - MAX_RANK else 1 << 14 for axis in range(rank))
    problem = BoxProblem(tuple(sizes), (operand, result), limits=limits)
    tiling = choose(buffers, layer, problem)
    MoveNest(
        buffers.nest,
        layer,
        tiling.tile,
        max(tiling.slots),
        view_of(source),
        view_of(target),
        tuple(sizes),
        tuple(starts),
        tuple(steps),
        tuple(offsets),
        fill,
    ).emit()


def copy_whole(buffers: Buffers, layer: str, source: SSAValue, target: SSAValue) -> None:
    """Copy a dense buffer to another of as many elements."""
    total = prod(tensor_shape(source))
    word = max(1, buffers.hardware.sram_word_bytes // item_bytes(target))
    row = next((n for n in range(min(4096, total) // word * word, 0, -word) if total % n == 0), 1)
    shape = [total // row, row] if row > 1 else [1, total]
    flat, to = buffers.nest.reshape(source, shape), buffers.nest.reshape(target, shape)
    move(buffers, layer, flat, to, shape, [0, 0], [1, 1], [0, 0])


def lower_insert(buffers: Buffers, op: tensor.InsertSliceOp) -> None:
    """One operand of a concatenation; nothing moves if its nest wrote it in place.

    Raises:
        TilewrightError: E0501, the insertion is not a concatenation's.
    """
    target = buffers.concatenation(op)
    if op.source in buffers.inside:
        return
    offsets, sizes = values_of(op.static_offsets), values_of(op.static_sizes)
    shape = tensor_shape(op.result)
    differing = [axis for axis, size in enumerate(sizes) if size != shape[axis]]
    if len(differing) > 1:
        raise TilewrightError("E0501", f'concat "{text(op, "layer")}" inserts along several axes')
    axis = differing[0] if differing else 0
    inner, outer = prod(shape[axis + 1 :]), prod(shape[:axis])
    source = buffers.nest.reshape(buffers.of(op.source), [outer, sizes[axis] * inner])
    whole = buffers.nest.reshape(target, [outer, shape[axis] * inner])
    box = [outer, sizes[axis] * inner]
    at = [0, offsets[axis] * inner]
    move(buffers, text(op, "layer"), source, whole, box, [0, 0], [1, 1], at)


def lower_extract(buffers: Buffers, op: tensor.ExtractSliceOp) -> None:
    """A slice with steps of one or more."""
    starts, steps = list(values_of(op.static_offsets)), list(values_of(op.static_strides))
    full, sizes = list(tensor_shape(op.source)), list(values_of(op.static_sizes))
    # A last axis taken whole continues the one before it.
    while len(full) > 1 and sizes[-1] == full[-1] and steps[-1] == 1 and steps[-2] == 1:
        run = full.pop()
        for item in (sizes, starts, steps):
            item.pop()
        full[-1] *= run
        sizes[-1] *= run
        starts[-1] *= run
    source = buffers.nest.reshape(buffers.of(op.source), full)
    target = buffers.nest.reshape(buffers.make(op.result, op), sizes)
    move(buffers, text(op, "layer"), source, target, sizes, starts, steps, [0] * len(sizes))


def pad_value(op: tensor.PadOp) -> float:
    """Return the constant that `op` pads with."""
    for inner in op.region.block.ops:
        if isinstance(inner, arith.ConstantOp):
            value = inner.value
            if isinstance(value, IntegerAttr | FloatAttr):
                return value.value.data
    raise TilewrightError("E0501", f'pad "{text(op, "layer")}" has no constant value')


def lower_pad(buffers: Buffers, op: tensor.PadOp) -> None:
    """Padding that no window absorbs: the inside is copied, each border filled."""
    low, high = values_of(op.static_low), values_of(op.static_high)
    source, target = buffers.of(op.source), buffers.make(op.result, op)
    inside, whole = tensor_shape(op.source), tensor_shape(op.result)
    rank, layer, value = len(whole), text(op, "layer"), pad_value(op)
    zeros, ones = [0] * rank, [1] * rank
    move(buffers, layer, source, target, inside, zeros, ones, low)
    for axis in range(rank):
        for start, size in ((0, low[axis]), (whole[axis] - high[axis], high[axis])):
            if size == 0:
                continue
            # Axes before this one: the inside only, their borders are done.
            sizes = [*inside[:axis], size, *whole[axis + 1 :]]
            at = [*low[:axis], start, *zeros[axis + 1 :]]
            move(buffers, layer, target, target, sizes, zeros, ones, at, fill=value)
