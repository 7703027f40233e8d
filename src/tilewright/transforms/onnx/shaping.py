"""Movement of data, indexing and reductions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from xdsl.dialects.builtin import TensorType
from xdsl.ir import SSAValue

from tilewright.dialects import top
from tilewright.dialects.top.base import element_type
from tilewright.transforms.onnx.base import (
    MAX_MADE_ELEMENTS,
    Node,
    RefusedError,
    axis_of,
    element,
    rule,
    shape_of,
)

HUGE = (2**63 - 1, 2**31 - 1)


@rule("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def _reshape(node: Node) -> SSAValue:
    """Shape inference has worked out the target from attributes or constant operands."""
    node.meaningless("allowzero", "axis", "axes", "shape")
    x = node.operand(0)
    node.settled(1)
    return node.reshape(x, node.result_type().get_shape())


@rule("Expand")
def _expand(node: Node) -> SSAValue:
    x, result = node.operand(0), node.result_type()
    node.settled(1)
    if x.type == result:
        return x
    return node.emit("expand", [x], {}, [result])


@rule("Tile")
def _tile(node: Node) -> SSAValue:
    x = node.operand(0)
    repeats = node.needs_ints(1, "`repeats`")
    if all(r == 1 for r in repeats):
        return x
    return node.emit("tile", [x], {"repeats": repeats})


@rule("Transpose")
def _transpose(node: Node) -> SSAValue:
    x = node.operand(0)
    rank = len(shape_of(x))
    perm = node.ints("perm")
    if perm is None:
        perm = list(range(rank))[::-1]
    if sorted(perm) != list(range(rank)):
        raise RefusedError(f"`perm` {perm} does not permute rank {rank}")
    if perm == list(range(rank)):
        return x
    return node.emit("transpose", [x], {"perm": perm})


@rule("Concat")
def _concat(node: Node) -> SSAValue:
    values = node.operands()
    axis = axis_of(node.integer("axis", 1), len(shape_of(values[0])))
    return values[0] if len(values) == 1 else node.emit("concat", values, {"axis": axis})


@rule("Split")
def _split(node: Node) -> list[SSAValue | None]:
    """Sizes from attribute, operand or equal parts: all of them are in the results' types."""
    x = node.operand(0)
    rank = len(shape_of(x))
    axis = axis_of(node.integer("axis", 0), rank)
    node.meaningless("split", "num_outputs")
    node.settled(1)
    start = 0
    results: list[SSAValue | None] = []
    for index, declared in enumerate(node.declared):
        if not isinstance(declared, TensorType):
            raise RefusedError(f"result {index} is left out")
        starts = [start if i == axis else 0 for i in range(rank)]
        results.append(node.emit("slice", [x], {"starts": starts, "steps": [1] * rank}, [declared]))
        start += declared.get_shape()[axis]
    if start != shape_of(x)[axis]:
        raise RefusedError(f"the parts have {start} of {shape_of(x)[axis]} entries")
    return results


def resolve_slice(size: int, start: int, end: int, step: int) -> tuple[int, int, int]:
    """Return first index, step and count of one axis, as ONNX clamps them.

    Raises:
        RefusedError: the step is 0, or the case that tools read differently.
    """
    if step == 0:
        raise RefusedError("a step is 0")
    if step < 0 and end in HUGE:
        raise RefusedError(
            "a negative step towards a huge positive end is read differently by tools"
        )
    if step < 0 and start < -size:
        raise RefusedError("a negative step from before the first is read differently by tools")
    start = start + size if start < 0 else start
    end = end + size if end < 0 else end
    if step > 0:
        start, end = min(max(start, 0), size), min(max(end, 0), size)
    else:
        start, end = min(max(start, 0), size - 1), min(max(end, -1), size - 1)
    count = max(0, -(-(end - start) // step)) if size else 0
    return (start if count else 0), step, count


@rule("Slice")
def _slice(node: Node) -> SSAValue:
    x = node.operand(0)
    shape = shape_of(x)
    if node.opset < 10:
        starts, ends, listed = node.ints("starts"), node.ints("ends"), node.ints("axes")
        steps = None
    else:
        starts = node.needs_ints(1, "`starts`")
        ends = node.needs_ints(2, "`ends`")
        listed = node.needs_ints(3, "`axes`") if node.given(3) else None
        steps = node.needs_ints(4, "`steps`") if node.given(4) else None
    if starts is None or ends is None:
        raise RefusedError("`starts` and `ends` are missing")
    listed = list(range(len(starts))) if listed is None else listed
    steps = [1] * len(starts) if steps is None else steps
    if not len(starts) == len(ends) == len(listed) == len(steps):
        raise RefusedError("`starts`, `ends`, `axes` and `steps` differ in length")
    axes = [axis_of(axis, len(shape)) for axis in listed]
    if len(set(axes)) != len(axes):
        raise RefusedError(f"`axes` {listed} has one twice")
    first, stride, sizes = [0] * len(shape), [1] * len(shape), list(shape)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        first[axis], stride[axis], sizes[axis] = resolve_slice(shape[axis], start, end, step)
    result = TensorType(element(x), sizes)
    if result == x.type and all(s == 1 for s in stride):
        return x
    return node.emit("slice", [x], {"starts": first, "steps": stride}, [result])


@rule("Pad")
def _pad(node: Node) -> SSAValue:
    x = node.operand(0)
    rank = len(shape_of(x))
    mode = node.string("mode", "constant")
    if mode not in ("constant", "reflect", "edge", "wrap"):
        raise RefusedError(f"`mode` is {mode!r}")
    value: float | int = 0.0
    axes = list(range(rank))
    if node.opset < 11:
        pads = node.ints("pads") or node.ints("paddings") or []
        value = node.number("value", 0.0)
    else:
        pads = node.needs_ints(1, "`pads`")
        if node.given(3):
            axes = [axis_of(int(a), rank) for a in node.needs_constant(3, "`axes`").reshape(-1)]
        if mode != "constant":
            # Only a constant fill has a value.
            node.settled(2)
        elif node.given(2):
            value = node.needs_scalar(2, "the fill value").item()
    if len(pads) != 2 * len(axes) or len(set(axes)) != len(axes):
        raise RefusedError(f"{len(pads)} pads for axes {axes}")
    begin, end = [0] * rank, [0] * rank
    for place, axis in enumerate(axes):
        begin[axis], end[axis] = pads[place], pads[place + len(axes)]
    if not any(begin) and not any(end):
        return x
    if mode == "reflect":
        for axis, size in enumerate(shape_of(x)):
            if max(begin[axis], end[axis]) >= size:
                raise RefusedError(f"reflection of {begin[axis]}, {end[axis]} beyond size {size}")
    kind = top.numpy_dtype(element(x)).kind
    fill_value: top.AttrValue = float(value) if kind == "f" else int(value)
    if kind == "f" and float(np.float32(value)) != float(value) and np.isfinite(value):
        raise RefusedError(f"the fill value {value} is no single precision number")
    attributes: dict[str, top.AttrValue] = {
        "pads_begin": begin,
        "pads_end": end,
        "mode": mode,
        "value": fill_value,
    }
    return node.emit("pad", [x], attributes)


@rule("Gather")
def _gather(node: Node) -> SSAValue:
    data, indices = node.operand(0), node.operand(1)
    axis = axis_of(node.integer("axis", 0), len(shape_of(data)))
    return node.emit("gather", [data, indices], {"axis": axis})


@rule("GatherElements")
def _gather_elements(node: Node) -> SSAValue:
    data, indices = node.operand(0), node.operand(1)
    axis = axis_of(node.integer("axis", 0), len(shape_of(data)))
    return node.emit("gather_elements", [data, indices], {"axis": axis})


@rule("GatherND")
def _gather_nd(node: Node) -> SSAValue:
    operands = [node.operand(0), node.operand(1)]
    return node.emit("gather_nd", operands, {"batch_dims": node.integer("batch_dims", 0)})


@rule("Scatter", "ScatterElements")
def _scatter_elements(node: Node) -> SSAValue:
    operands = [node.operand(index) for index in range(3)]
    axis = axis_of(node.integer("axis", 0), len(shape_of(operands[0])))
    reduction = node.string("reduction", "none")
    return node.emit("scatter_elements", operands, {"axis": axis, "reduction": reduction})


@rule("ScatterND")
def _scatter_nd(node: Node) -> SSAValue:
    operands = [node.operand(index) for index in range(3)]
    return node.emit("scatter_nd", operands, {"reduction": node.string("reduction", "none")})


@rule("ConstantOfShape")
def _constant_of_shape(node: Node) -> SSAValue:
    result = node.result_type()
    fill = node.tensor("value")
    node.settled(0)
    if fill is not None and fill.size != 1:
        raise RefusedError(f"`value` must be one number, has shape {list(fill.shape)}")
    number = np.zeros((), np.float32) if fill is None else fill.reshape(())
    # A view of one element: the size costs no memory until it is written out.
    return node.weight(np.broadcast_to(number, result.get_shape()), "value")


@rule("EyeLike")
def _eye_like(node: Node) -> SSAValue:
    node.meaningless("dtype")
    node.settled(0)
    result = node.result_type()
    rows, columns = result.get_shape()
    if rows * columns > MAX_MADE_ELEMENTS:
        raise RefusedError(f"it needs a constant of shape {[rows, columns]}")
    dtype = top.numpy_dtype(result.get_element_type())
    return node.weight(np.eye(rows, columns, node.integer("k", 0), dtype), "value")


@rule("TopK")
def _topk(node: Node) -> Sequence[SSAValue | None]:
    x = node.operand(0)
    axis = axis_of(node.integer("axis", -1), len(shape_of(x)))
    k = node.integer("k", 0) if node.opset < 10 else int(node.needs_scalar(1, "`k`"))
    attributes: dict[str, top.AttrValue] = {
        "k": k,
        "axis": axis,
        "largest": bool(node.integer("largest", 1)),
        "sorted": bool(node.integer("sorted", 1)),
    }
    return node.emit_all("topk", [x], attributes)


@rule("ArgMax", "ArgMin")
def _arg(node: Node) -> SSAValue:
    x = node.operand(0)
    attributes: dict[str, top.AttrValue] = {
        "kind": "max" if node.op_type == "ArgMax" else "min",
        "axis": axis_of(node.integer("axis", 0), len(shape_of(x))),
        "keepdims": bool(node.integer("keepdims", 1)),
        "select_last": bool(node.integer("select_last_index", 0)),
    }
    return node.emit("arg", [x], attributes)


REDUCTIONS = {
    "ReduceMean": "mean",
    "ReduceSum": "sum",
    "ReduceMax": "max",
    "ReduceMin": "min",
    "ReduceProd": "prod",
    "ReduceL1": "l1",
    "ReduceL2": "l2",
    "ReduceLogSum": "log_sum",
    "ReduceLogSumExp": "log_sum_exp",
    "ReduceSumSquare": "sum_square",
}


@rule(*REDUCTIONS)
def _reduce(node: Node) -> SSAValue:
    """Axes are an attribute below opset 18 (ReduceSum: 13), then an operand.

    Without axes all are reduced, or with `noop_with_empty_axes` none; what is done to each element
    (squares, logarithms) is done even so.
    """
    x = node.operand(0)
    rank = len(shape_of(x))
    listed = node.ints("axes")
    if node.given(1):
        listed = node.needs_ints(1, "`axes`")
    noop = bool(node.integer("noop_with_empty_axes", 0))
    if not listed:
        axes = [] if noop else list(range(rank))
    else:
        axes = sorted({axis_of(axis, rank) for axis in listed})
    keepdims = bool(node.integer("keepdims", 1))
    if element(x) == element_type(np.dtype(np.bool_)):
        raise RefusedError("booleans are not reduced")
    kind = REDUCTIONS[node.op_type]
    attributes: dict[str, top.AttrValue] = {"kind": kind, "axes": axes, "keepdims": keepdims}
    return node.emit("reduce", [x], attributes)


@rule("ReverseSequence")
def _reverse_sequence(node: Node) -> SSAValue:
    """Constant lengths make it a gather of elements."""
    x = node.operand(0)
    shape = shape_of(x)
    time, batch = node.integer("time_axis", 0), node.integer("batch_axis", 1)
    if {time, batch} != {0, 1}:
        raise RefusedError("`time_axis` and `batch_axis` must be 0 and 1")
    lengths = node.needs_constant(1, "`sequence_lens`")
    if 0 in shape:
        raise RefusedError("the tensor is empty")
    if lengths.shape != (shape[batch],) or lengths.min() < 0 or lengths.max() > shape[time]:
        raise RefusedError(f"`sequence_lens` {lengths.tolist()} does not fit {list(shape)}")
    steps = np.arange(shape[time])
    table = np.stack([np.where(steps < n, n - 1 - steps, steps) for n in lengths])
    table = table.T if time == 0 else table
    table = np.broadcast_to(table.reshape(*table.shape, *[1] * (len(shape) - 2)), shape)
    indices = node.weight(np.ascontiguousarray(table, np.int64), "indices")
    return node.emit("gather_elements", [x, indices], {"axis": time})


@rule("Compress")
def _compress(node: Node) -> SSAValue:
    """A constant condition makes it a gather."""
    x = node.operand(0)
    keep = np.flatnonzero(node.needs_constant(1, "the condition"))
    rank = len(shape_of(x))
    if node.has("axis"):
        axis = axis_of(node.integer("axis", 0), rank)
    else:
        x, axis = node.reshape(x, [int(np.prod(shape_of(x), dtype=np.int64))]), 0
    return node.emit("gather", [x, node.weight(keep, "indices")], {"axis": axis})
