"""Scalar bodies of tile-level compute ops, taken from the linalg ops they implement."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects import memref, tensor
from xdsl.dialects.builtin import i8
from xdsl.dialects.linalg.ops import GenericOp
from xdsl.ir import Attribute, Region, SSAValue

from tilewright.transforms.linalg.emit import Body
from tilewright.transforms.linalg.rounding import Output, requantise


def plain(op: GenericOp) -> Region:
    """Return a copy of the body of `op`."""
    return op.body.clone()


def reordered(op: GenericOp, order: Sequence[int | Attribute]) -> Region:
    """Return a copy with the arguments in `order`; a type stands for one that is not read."""
    region = op.body.clone()
    block = region.block
    old = list(block.args)
    for item in order:
        kind = old[item].type if isinstance(item, int) else item
        new = block.insert_arg(kind, len(block.args))
        if isinstance(item, int):
            old[item].replace_all_uses_with(new)
    for argument in old:
        block.erase_arg(argument)
    return region


def load_from(region: Region, buffer: SSAValue, drop_leading: int = 0) -> Region:
    """Read `buffer` where the body extracts from a tensor, by all but the leading indices."""
    for op in list(region.block.ops):
        if isinstance(op, tensor.ExtractOp):
            indices = list(op.indices)[drop_leading:]
            new = memref.LoadOp.get(buffer, indices)
            region.block.insert_op_before(new, op)
            op.results[0].replace_all_uses_with(new.results[0])
            op.detach()
            op.erase()
    for op in reversed(list(region.block.ops)):
        # Indices of dimensions that went with the batch.
        if op.name == "linalg.index" and not op.results[0].uses:
            op.detach()
            op.erase()
    return region


def shift_axes(region: Region, by: int) -> Region:
    """Renumber `linalg.index`: tiles lack the first `by` axes."""
    from xdsl.dialects.builtin import IntegerAttr, i64
    from xdsl.dialects.linalg.ops import IndexOp

    for op in region.block.ops:
        if isinstance(op, IndexOp):
            op.properties["dim"] = IntegerAttr(op.dim.value.data - by, i64)
    return region


def requantising(output: Output) -> Region:
    """Return the per-channel requantisation `(acc, bias, mult, shift, _) -> i8`."""
    from xdsl.dialects.builtin import i32
    from xdsl.dialects.linalg.ops import YieldOp
    from xdsl.ir import Block

    block = Block(arg_types=[i32, i32, i32, i8, i8])
    block.add_op(YieldOp(requantise(output)(Body(block))))
    return Region(block)
