"""`top-simplify-shapes`: data movement that moves nothing, or could move less, is simplified.

    transpose(transpose(x))            ->   transpose(x), or x
    reshape(reshape(x))                ->   reshape(x)
    a transpose that only moves axes of size 1          ->   reshape
    transpose, reshape that splits axes, transpose      ->   reshape, transpose
    transpose, reshape that joins axes, transpose       ->   transpose, reshape
    slice(slice(x)), concat(concat(..))                 ->   one

Identities (reshape to the same shape, empty pads, full slices, 1x1 pools, ...) disappear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue
from xdsl.passes import ModulePass

from tilewright.dialects import top
from tilewright.transforms.top.graph import Graph, shape_of

AxisGroup = tuple[list[int], list[int]]


def reshape_groups(before: Sequence[int], after: Sequence[int]) -> list[AxisGroup] | None:
    """Split a reshape into the smallest independent ones: axes before, axes after.

    Products over both lists of each group are equal. None if a size is 0, or if axes of size 1
    are left over at the end of either shape.
    """
    if 0 in before or 0 in after:
        return None
    groups: list[AxisGroup] = []
    i = j = 0
    while i < len(before) and j < len(after):
        left, right = before[i], after[j]
        group: AxisGroup = ([i], [j])
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                if i == len(before):
                    return None
                left *= before[i]
                group[0].append(i)
                i += 1
            else:
                if j == len(after):
                    return None
                right *= after[j]
                group[1].append(j)
                j += 1
        groups.append(group)
    return groups if i == len(before) and j == len(after) else None


def _is_identity(op: top.TopOp) -> bool:
    """Return whether an operation gives back its first operand."""
    if not op.operands or len(op.results) != 1 or op.results[0].type != op.operands[0].type:
        return False
    attrs, shape = op.attrs, shape_of(op.results[0]) if op.results else ()
    if isinstance(op, top.ReshapeOp | top.ExpandOp | top.CastOp):
        return True
    if isinstance(op, top.TransposeOp):
        return list(attrs.ints("perm")) == list(range(len(shape)))
    if isinstance(op, top.SliceOp):
        steps = zip(attrs.ints("steps"), shape, strict=True)
        return not any(attrs.ints("starts")) and all(step == 1 or dim == 1 for step, dim in steps)
    if isinstance(op, top.PadOp):
        return not any((*attrs.ints("pads_begin"), *attrs.ints("pads_end")))
    if isinstance(op, top.ConcatOp):
        return len(op.operands) == 1
    if isinstance(op, top.TileOp):
        return all(repeat == 1 for repeat in attrs.ints("repeats"))
    if isinstance(op, top.PoolOp):
        return all(
            value == 1 for value in (*attrs.ints("kernel"), *attrs.ints("strides"))
        ) and not any(attrs.ints("pads"))
    if isinstance(op, top.ResizeOp):
        return all(scale == 1.0 for scale in attrs.floats("scales")) and "roi" not in attrs
    if isinstance(op, top.ClipOp):
        return "min" not in attrs and "max" not in attrs
    if isinstance(op, top.ReduceOp):
        return not attrs.ints("axes") and attrs.string("kind") in ("mean", "sum", "max", "min")
    return False


def _reshape(graph: Graph, op: top.TopOp, x: SSAValue, shape: Sequence[int], name: str) -> SSAValue:
    return graph.insert(top.ReshapeOp, [x], name=name, before=op, shape=shape)


def _drop_identity(graph: Graph, op: top.TopOp) -> bool:
    if not _is_identity(op):
        return False
    graph.replace(op, op.operands[0])
    return True


def _merge_reshapes(graph: Graph, op: top.TopOp) -> bool:
    if not isinstance(op, top.ReshapeOp):
        return False
    inner = op.x.owner
    if not isinstance(inner, top.ReshapeOp):
        return False
    value = _reshape(graph, op, inner.x, shape_of(op.result), op.layer_name)
    graph.replace(op, value)
    return True


def _merge_transposes(graph: Graph, op: top.TopOp) -> bool:
    if not isinstance(op, top.TransposeOp):
        return False
    inner = op.x.owner
    if not isinstance(inner, top.TransposeOp):
        return False
    first, second = inner.attrs.ints("perm"), op.attrs.ints("perm")
    value = graph.insert(
        top.TransposeOp,
        [inner.x],
        {"perm": [first[axis] for axis in second]},
        name=op.layer_name,
        before=op,
    )
    graph.replace(op, value)
    return True


def _transpose_to_reshape(graph: Graph, op: top.TopOp) -> bool:
    if not isinstance(op, top.TransposeOp):
        return False
    shape = shape_of(op.x)
    moved = [axis for axis in op.attrs.ints("perm") if shape[axis] != 1]
    if moved != sorted(moved):
        return False
    graph.replace(op, _reshape(graph, op, op.x, shape_of(op.result), op.layer_name))
    return True


def _through_reshape(graph: Graph, op: top.TopOp) -> bool:
    """Bring two transposes round a splitting or joining reshape together."""
    if not isinstance(op, top.TransposeOp) or not isinstance(op.x.owner, top.ReshapeOp):
        return False
    reshape = op.x.owner
    inner = reshape.x.owner
    if not isinstance(inner, top.TransposeOp):
        return False
    groups = reshape_groups(shape_of(reshape.x), shape_of(reshape.result))
    if groups is None:
        return False
    first, second = inner.attrs.ints("perm"), op.attrs.ints("perm")
    after = shape_of(reshape.result)
    if all(len(before) == 1 for before, _ in groups):
        # `parts[a]`: the axes of the reshape's result that axis `a` of the innermost value makes.
        parts = {first[before[0]]: axes for before, axes in groups}
        order = [axis for source in range(len(first)) for axis in parts[source]]
        split = _reshape(
            graph, op, inner.x, [after[a] for a in order], graph.fresh(reshape.layer_name)
        )
        perm = [order.index(axis) for axis in second]
        value = graph.insert(
            top.TransposeOp, [split], {"perm": perm}, name=op.layer_name, before=op
        )
    elif all(len(axes) == 1 for _, axes in groups):
        joined = [before for before, _ in groups]
        perm = [first[axis] for target in second for axis in joined[target]]
        moved = graph.insert(
            top.TransposeOp,
            [inner.x],
            {"perm": perm},
            name=graph.fresh(reshape.layer_name),
            before=op,
        )
        value = _reshape(graph, op, moved, shape_of(op.result), op.layer_name)
    else:
        return False
    graph.replace(op, value)
    return True


def _merge_slices(graph: Graph, op: top.TopOp) -> bool:
    if not isinstance(op, top.SliceOp):
        return False
    inner = op.x.owner
    if not isinstance(inner, top.SliceOp) or "quant_scale" in inner.attributes:
        return False
    outer = list(zip(op.attrs.ints("starts"), op.attrs.ints("steps"), strict=True))
    base = list(zip(inner.attrs.ints("starts"), inner.attrs.ints("steps"), strict=True))
    value = graph.insert(
        top.SliceOp,
        [inner.x],
        {
            "starts": [b + s * d for (s, _), (b, d) in zip(outer, base, strict=True)],
            "steps": [t * d for (_, t), (_, d) in zip(outer, base, strict=True)],
        },
        name=op.layer_name,
        before=op,
        shape=shape_of(op.result),
    )
    graph.replace(op, value)
    return True


def _merge_concats(graph: Graph, op: top.TopOp) -> bool:
    if not isinstance(op, top.ConcatOp):
        return False
    axis = op.attrs.integer("axis")
    parts: list[SSAValue] = []
    absorbed: list[top.ConcatOp] = []
    for value in op.inputs:
        inner = value.owner
        alone = value.has_one_use()
        given = isinstance(inner, top.ConcatOp) and "quant_scale" in inner.attributes
        if given:
            parts.append(value)
        elif isinstance(inner, top.ConcatOp) and alone and inner.attrs.integer("axis") == axis:
            parts += inner.inputs
            absorbed.append(inner)
        else:
            parts.append(value)
    if not absorbed:
        return False
    value = graph.insert(top.ConcatOp, parts, {"axis": axis}, name=op.layer_name, before=op)
    assert isinstance(value.owner, top.TopOp)
    graph.absorb(value.owner, op, *absorbed)
    graph.replace(op, value)
    return True


RULES = (
    _drop_identity,
    _merge_reshapes,
    _merge_transposes,
    _transpose_to_reshape,
    _through_reshape,
    _merge_slices,
    _merge_concats,
)


def simplify(graph: Graph) -> int:
    """Apply all rules until none applies; return how often one did."""
    total = 0
    while True:
        fired = 0
        for op in graph.layers():
            if "quant_scale" in op.attributes:
                continue  # it may move nothing, and yet change the scale
            for rule in RULES:
                if op.parent is None:
                    break
                name, kind = op.layer_name, op.name.removeprefix("top.")
                if rule(graph, op):
                    what = rule.__name__.strip("_").replace("_", " ")
                    graph.fired(name, f"{kind}: {what}")
                    fired += 1
        total += fired
        if not fired:
            return total


@dataclass(frozen=True)
class SimplifyShapesPass(ModulePass):
    """Simplify reshapes, transposes, slices and other data movement."""

    name = "top-simplify-shapes"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Run the pass."""
        simplify(Graph(ctx, op, self.name))
