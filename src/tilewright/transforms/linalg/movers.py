"""Lower the `top` ops that only move elements: reshape, transpose, concat, slice, pad."""

from __future__ import annotations

from xdsl.dialects import tensor
from xdsl.dialects.builtin import IndexType, TensorType
from xdsl.ir import Operation, SSAValue

from tilewright.diagnostics import TilewrightError
from tilewright.dialects.quant import shape_of
from tilewright.transforms.linalg.attributes import integer, ints, layer_name, number, text
from tilewright.transforms.linalg.emit import (
    Body,
    Emitter,
    affine_map,
    dims,
    element_of,
    tag,
    zero_point,
)


def lower_reshape(emit: Emitter, op: Operation, operands: list[SSAValue]) -> SSAValue:
    """Collapse to one axis and expand again; the order of the elements does not change."""
    value, target = operands[0], shape_of(op.results[0])
    source = shape_of(value)
    if source == target:
        return emit.add(tensor.CastOp(value, TensorType(element_of(value), target)), "reshape")
    if len(source) > 1:
        value = emit.collapse(value, [len(source)])
    elif not source:
        value = emit.expand(value, [])
    if len(target) == 1:
        return value
    return emit.expand(value, [list(target)]) if target else emit.collapse(value, [])


def lower_transpose(emit: Emitter, op: Operation, operands: list[SSAValue]) -> SSAValue:
    """Result axis `k` is source axis `perm[k]`."""
    perm, shape = ints(op, "perm"), shape_of(op.results[0])
    space = dims(len(shape))
    reads = affine_map(len(shape), [space[perm.index(axis)] for axis in range(len(shape))])
    result = emit.elementwise(
        "transpose", [(operands[0], reads)], shape, element_of(operands[0]), _first
    )
    return tag(result, "copy", {"perm": perm})


def lower_concat(emit: Emitter, op: Operation, operands: list[SSAValue]) -> SSAValue:
    """Insert the operands one behind the other along `axis`."""
    axis, shape = integer(op, "axis"), shape_of(op.results[0])
    result, position = emit.empty(shape, element_of(operands[0])), 0
    for value in operands:
        offsets = [0] * len(shape)
        offsets[axis] = position
        sizes = shape_of(value)
        insert = tensor.InsertSliceOp.from_static_parameters(value, result, offsets, sizes)
        result = emit.add(insert, "concat")
        position += sizes[axis]
    return result


def lower_slice(emit: Emitter, op: Operation, operands: list[SSAValue]) -> SSAValue:
    """Take every `step`-th element from `start`; a negative step counts backwards."""
    source, shape = operands[0], shape_of(op.results[0])
    starts = ints(op, "starts")
    steps = ints(op, "steps", [1] * len(starts))
    if all(step > 0 for step in steps):
        take = tensor.ExtractSliceOp.from_static_parameters(source, starts, shape, steps)
        return emit.add(take, "slice")

    def body(inner: Body) -> SSAValue:
        at = list[SSAValue]()
        for axis, (start, step) in enumerate(zip(starts, steps, strict=True)):
            steps_taken = inner.times(inner.index(axis), inner.constant(step, IndexType()))
            at.append(inner.plus(steps_taken, inner.constant(start, IndexType())))
        return inner.add(tensor.ExtractOp(source, at, element_of(source)))

    return emit.elementwise("slice", [], shape, element_of(source), body)


def lower_pad(emit: Emitter, op: Operation, operands: list[SSAValue]) -> SSAValue:
    """Surround with the zero point (real value 0); negative padding cuts off.

    Raises:
        TilewrightError: E0402, padding other than with real zeros.
    """
    mode, value = text(op, "mode", "constant"), number(op, "value", 0.0)
    if mode != "constant" or value != 0.0:
        raise TilewrightError(
            "E0402",
            f'pad "{layer_name(op)}" cannot run on the chip',
            [f"it pads in mode {mode} with {value:g}; the chip pads with zero"],
        )
    low, high = ints(op, "pads_begin"), ints(op, "pads_end")
    source = operands[0]
    if any(amount < 0 for amount in (*low, *high)):
        starts = [max(-amount, 0) for amount in low]
        sizes = [
            size + min(before, 0) + min(after, 0)
            for size, before, after in zip(shape_of(source), low, high, strict=True)
        ]
        source = emit.add(
            tensor.ExtractSliceOp.from_static_parameters(source, starts, sizes), "slice"
        )
        low, high = ([max(amount, 0) for amount in pads] for pads in (low, high))
    elif not any(low) and not any(high):
        return emit.add(
            tensor.CastOp(source, TensorType(element_of(source), shape_of(source))), "pad"
        )
    return emit.pad(source, low, high, zero_point(op.operands[0]))


def _first(body: Body) -> SSAValue:
    return body.args[0]
