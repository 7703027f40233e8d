"""Scalar bodies of tile-level compute ops, taken from the linalg ops they implement."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xdsl.dialects import memref, tensor
from xdsl.dialects.builtin import IntegerAttr, f16, f32, i8, i32, i64
from xdsl.dialects.linalg.ops import GenericOp, IndexOp, YieldOp
from xdsl.ir import Attribute, Block, Region, SSAValue

from tilewright.transforms.linalg.emit import Body
from tilewright.transforms.linalg.half import HalfOutput, with_bias
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
    for op in region.block.ops:
        if isinstance(op, IndexOp):
            op.properties["dim"] = IntegerAttr(op.dim.value.data - by, i64)
    return region


def rounding_to_half(output: HalfOutput) -> Region:
    """Return the end of a sum `(acc, bias, _) -> f16`."""
    block = Block(arg_types=[f32, f32, f16])
    block.add_op(YieldOp(with_bias(output)(Body(block))))
    return Region(block)


def requantising(output: Output) -> Callable[[], Region]:
    """Return what makes the per-channel requantisation `(acc, bias, mult, shift, _) -> i8`."""
    block = Block(arg_types=[i32, i32, i32, i8, i8])
    block.add_op(YieldOp(requantise(output)(Body(block))))
    # Copies cost a fraction of building it: cascades have hundreds.
    return Region(block).clone


def sum_with_bias() -> Region:
    """Return the end of a layer that keeps its sums `(acc, bias, mult, shift, _) -> i32`."""
    block = Block(arg_types=[i32, i32, i32, i8, i32])
    body = Body(block)
    block.add_op(YieldOp(body.plus(body.args[0], body.args[1])))
    return Region(block)
