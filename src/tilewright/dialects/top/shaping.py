"""Constants, data movement, indexing and reductions of `top`."""

from __future__ import annotations

from math import prod

from typing_extensions import override
from xdsl.dialects.builtin import (
    DenseArrayBase,
    FloatAttr,
    IntegerAttr,
    NoneType,
    StringAttr,
    TensorType,
    i1,
    i64,
)
from xdsl.ir import Attribute
from xdsl.irdl import (
    IRDLOperation,
    attr_def,
    irdl_op_definition,
    operand_def,
    result_def,
    traits_def,
    var_operand_def,
)
from xdsl.traits import Pure
from xdsl.utils.exceptions import VerifyException

from tilewright.dialects.top.base import (
    Attrs,
    TopOp,
    Types,
    broadcast,
    same_element,
    tensor,
    with_shape,
)

REDUCTIONS = (
    "mean",
    "sum",
    "max",
    "min",
    "prod",
    "l1",
    "l2",
    "log_sum",
    "log_sum_exp",
    "sum_square",
)
SCATTER_REDUCTIONS = ("none", "add", "mul", "min", "max")


def _declared(declared: Types) -> TensorType[Attribute]:
    if len(declared) != 1:
        raise VerifyException("the result type must be given: it carries the shape or type")
    return tensor(declared, 0, "result")


def _drop(shape: tuple[int, ...], axes: tuple[int, ...], keepdims: bool) -> list[int]:
    if keepdims:
        return [1 if axis in axes else dim for axis, dim in enumerate(shape)]
    return [dim for axis, dim in enumerate(shape) if axis not in axes]


@irdl_op_definition
class NoneOp(IRDLOperation):
    """An absent optional operand."""

    name = "top.none"
    result = result_def(NoneType)
    traits = traits_def(Pure())
    assembly_format = "attr-dict `:` type($result)"


@irdl_op_definition
class WeightOp(TopOp):
    """A constant: the array called `name` in the weight store."""

    name = "top.weight"
    assembly_format = "attr-dict `:` type($result)"
    result = result_def()

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        return [_declared(declared)]


@irdl_op_definition
class PreluOp(TopOp):
    """`x if x >= 0 else slope * x`; `slope` broadcasts to `x`'s shape."""

    name = "top.prelu"
    x = operand_def()
    slope = operand_def()
    result = result_def()

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        x, slope = tensor(types, 0), tensor(types, 1)
        if broadcast(x.get_shape(), slope.get_shape()) != tuple(x.get_shape()):
            raise VerifyException(f"slope {list(slope.get_shape())} does not broadcast to `x`")
        return [x]


class AxisOp(TopOp):
    """Base of operations along one axis whose result has the operand's type."""

    x = operand_def()
    result = result_def()
    axis = attr_def(IntegerAttr)

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        x = tensor(types, 0)
        attrs.axis(len(x.get_shape()))
        return [x]


@irdl_op_definition
class SoftmaxOp(AxisOp):
    """`exp(x) / sum(exp(x))` along `axis`."""

    name = "top.softmax"


@irdl_op_definition
class LogSoftmaxOp(AxisOp):
    """Logarithm of the softmax along `axis`."""

    name = "top.log_softmax"


@irdl_op_definition
class HardmaxOp(AxisOp):
    """1 at the first maximum along `axis`, else 0."""

    name = "top.hardmax"


@irdl_op_definition
class CumsumOp(AxisOp):
    """Running sum along `axis`; `exclusive` leaves the own element out, `reverse` runs back."""

    name = "top.cumsum"
    exclusive = attr_def(IntegerAttr)
    reverse = attr_def(IntegerAttr)


@irdl_op_definition
class ReduceOp(TopOp):
    """Reduction of `kind` over `axes` (sorted, resolved)."""

    name = "top.reduce"
    x = operand_def()
    result = result_def()
    kind = attr_def(StringAttr)
    axes = attr_def(DenseArrayBase)
    keepdims = attr_def(IntegerAttr)

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        x = tensor(types, 0)
        attrs.choice("kind", REDUCTIONS)
        shape, axes = tuple(x.get_shape()), attrs.ints("axes")
        if list(axes) != sorted(set(axes)) or any(not 0 <= a < len(shape) for a in axes):
            raise VerifyException(f"`axes` {list(axes)} must be sorted axes of rank {len(shape)}")
        return [with_shape(x, _drop(shape, axes, attrs.flag("keepdims")))]


@irdl_op_definition
class ArgOp(TopOp):
    """Index (i64) of the maximum or minimum along `axis`; the first, or with `select_last` last."""

    name = "top.arg"
    x = operand_def()
    result = result_def()
    kind = attr_def(StringAttr)
    axis = attr_def(IntegerAttr)
    keepdims = attr_def(IntegerAttr)
    select_last = attr_def(IntegerAttr)

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        shape = tuple(tensor(types, 0).get_shape())
        attrs.choice("kind", ("max", "min"))
        axis = attrs.axis(len(shape))
        return [TensorType(i64, _drop(shape, (axis,), attrs.flag("keepdims")))]


@irdl_op_definition
class TopkOp(TopOp):
    """The `k` largest (or smallest) entries along `axis`, and their indices (i64)."""

    name = "top.topk"
    x = operand_def()
    values = result_def()
    indices = result_def()
    k = attr_def(IntegerAttr)
    axis = attr_def(IntegerAttr)
    largest = attr_def(IntegerAttr)
    sorted = attr_def(IntegerAttr)

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        x = tensor(types, 0)
        shape, k = list(x.get_shape()), attrs.integer("k")
        axis = attrs.axis(len(shape))
        if not 0 <= k <= shape[axis]:
            raise VerifyException(f"`k` is {k}, axis {axis} has {shape[axis]} entries")
        shape[axis] = k
        return [with_shape(x, shape), TensorType(i64, shape)]


@irdl_op_definition
class ReshapeOp(TopOp):
    """The same elements in row-major order under another shape (the result type's)."""

    name = "top.reshape"
    x = operand_def()
    result = result_def()

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        x, result = tensor(types, 0), _declared(declared)
        if prod(x.get_shape()) != prod(result.get_shape()):
            raise VerifyException(
                f"{list(x.get_shape())} has other than the elements of {list(result.get_shape())}"
            )
        return [with_shape(x, result.get_shape())]


@irdl_op_definition
class TransposeOp(TopOp):
    """Axis `i` of the result is axis `perm[i]` of `x`."""

    name = "top.transpose"
    x = operand_def()
    result = result_def()
    perm = attr_def(DenseArrayBase)

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        x = tensor(types, 0)
        perm, shape = attrs.ints("perm"), x.get_shape()
        if sorted(perm) != list(range(len(shape))):
            raise VerifyException(f"`perm` {list(perm)} does not permute rank {len(shape)}")
        return [with_shape(x, [shape[axis] for axis in perm])]


@irdl_op_definition
class ConcatOp(TopOp):
    """Operands joined along `axis`."""

    name = "top.concat"
    inputs = var_operand_def()
    result = result_def()
    axis = attr_def(IntegerAttr)

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        if not types:
            raise VerifyException("needs at least one operand")
        tensors = [tensor(types, index) for index in range(len(types))]
        same_element(*tensors)
        shape = list(tensors[0].get_shape())
        axis = attrs.axis(len(shape))
        shape[axis] = 0
        for value in tensors:
            other = list(value.get_shape())
            if len(other) != len(shape):
                raise VerifyException("operands differ in rank")
            shape[axis] += other[axis]
            if other[:axis] + other[axis + 1 :] != shape[:axis] + shape[axis + 1 :]:
                raise VerifyException(f"operands differ outside axis {axis}: {other} and {shape}")
        return [with_shape(tensors[0], shape)]


@irdl_op_definition
class SliceOp(TopOp):
    """Elements `starts[i] + k * steps[i]`, `k` below the result type's size; steps may be < 0."""

    name = "top.slice"
    x = operand_def()
    result = result_def()
    starts = attr_def(DenseArrayBase)
    steps = attr_def(DenseArrayBase)

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        x, result = tensor(types, 0), _declared(declared)
        shape, sizes = x.get_shape(), result.get_shape()
        starts = attrs.per_axis("starts", len(shape))
        steps = attrs.per_axis("steps", len(shape))
        if len(sizes) != len(shape):
            raise VerifyException("the result has another rank")
        for axis, (dim, size) in enumerate(zip(shape, sizes, strict=True)):
            last = starts[axis] + (size - 1) * steps[axis]
            if steps[axis] == 0 or (size and not (0 <= starts[axis] < dim and 0 <= last < dim)):
                raise VerifyException(
                    f"axis {axis}: {size} elements from {starts[axis]} by {steps[axis]} "
                    f"leave 0..{dim - 1}"
                )
        return [with_shape(x, sizes)]


@irdl_op_definition
class PadOp(TopOp):
    """`x` with `pads_begin` before and `pads_end` behind each axis (negative: cut off).

    `mode` is `constant` (filled with `value`), `reflect`, `edge` or `wrap`.
    """

    name = "top.pad"
    x = operand_def()
    result = result_def()
    pads_begin = attr_def(DenseArrayBase)
    pads_end = attr_def(DenseArrayBase)
    mode = attr_def(StringAttr)
    value = attr_def(FloatAttr | IntegerAttr)

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        x = tensor(types, 0)
        shape = x.get_shape()
        begin = attrs.per_axis("pads_begin", len(shape))
        end = attrs.per_axis("pads_end", len(shape))
        attrs.choice("mode", ("constant", "reflect", "edge", "wrap"))
        sizes = [dim + b + e for dim, b, e in zip(shape, begin, end, strict=True)]
        if any(size < 0 for size in sizes):
            raise VerifyException(f"pads {list(begin)}, {list(end)} cut more than there is")
        return [with_shape(x, sizes)]


@irdl_op_definition
class GatherOp(TopOp):
    """`data` taken at `indices` along `axis` (negative indices count from the end)."""

    name = "top.gather"
    data = operand_def()
    indices = operand_def()
    result = result_def()
    axis = attr_def(IntegerAttr)

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        data, indices = tensor(types, 0), tensor(types, 1)
        shape = list(data.get_shape())
        axis = attrs.axis(len(shape))
        return [with_shape(data, [*shape[:axis], *indices.get_shape(), *shape[axis + 1 :]])]


@irdl_op_definition
class GatherElementsOp(TopOp):
    """Element `[..., indices[i], ...]` of `data` along `axis` for each position of `indices`."""

    name = "top.gather_elements"
    data = operand_def()
    indices = operand_def()
    result = result_def()
    axis = attr_def(IntegerAttr)

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        data, indices = tensor(types, 0), tensor(types, 1)
        attrs.axis(len(data.get_shape()))
        if len(data.get_shape()) != len(indices.get_shape()):
            raise VerifyException("data and indices differ in rank")
        return [with_shape(data, indices.get_shape())]


@irdl_op_definition
class GatherNdOp(TopOp):
    """Slices of `data` at the index tuples in the last axis of `indices`."""

    name = "top.gather_nd"
    data = operand_def()
    indices = operand_def()
    result = result_def()
    batch_dims = attr_def(IntegerAttr)

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        data, indices = tensor(types, 0), tensor(types, 1)
        shape, index = list(data.get_shape()), list(indices.get_shape())
        batch = attrs.integer("batch_dims")
        if not index or batch + index[-1] > len(shape) or shape[:batch] != index[:batch]:
            raise VerifyException(f"indices {index} do not fit data {shape}")
        return [with_shape(data, index[:-1] + shape[batch + index[-1] :])]


class ScatterOp(TopOp):
    """Base of the scatters: a copy of `data`, changed at `indices` by `updates`."""

    data = operand_def()
    indices = operand_def()
    updates = operand_def()
    result = result_def()
    reduction = attr_def(StringAttr)

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        data, _, updates = (tensor(types, index) for index in range(3))
        same_element(data, updates)
        attrs.choice("reduction", SCATTER_REDUCTIONS)
        if "axis" in attrs:
            attrs.axis(len(data.get_shape()))
        return [data]


@irdl_op_definition
class ScatterElementsOp(ScatterOp):
    """Element `[..., indices[i], ...]` along `axis` set to, or reduced with, `updates[i]`."""

    name = "top.scatter_elements"
    axis = attr_def(IntegerAttr)


@irdl_op_definition
class ScatterNdOp(ScatterOp):
    """Slices at the index tuples in the last axis of `indices` set, or reduced."""

    name = "top.scatter_nd"


@irdl_op_definition
class ExpandOp(TopOp):
    """`x` repeated along axes of size 1 (and new leading ones) to the result type's shape."""

    name = "top.expand"
    x = operand_def()
    result = result_def()

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        x, result = tensor(types, 0), _declared(declared)
        if broadcast(x.get_shape(), result.get_shape()) != tuple(result.get_shape()):
            raise VerifyException(
                f"{list(x.get_shape())} does not broadcast to {list(result.get_shape())}"
            )
        return [with_shape(x, result.get_shape())]


@irdl_op_definition
class TileOp(TopOp):
    """The whole of `x` repeated `repeats[i]` times along axis `i`."""

    name = "top.tile"
    x = operand_def()
    result = result_def()
    repeats = attr_def(DenseArrayBase)

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        x = tensor(types, 0)
        repeats = attrs.per_axis("repeats", len(x.get_shape()), 0)
        return [with_shape(x, [d * r for d, r in zip(x.get_shape(), repeats, strict=True)])]


@irdl_op_definition
class CastOp(TopOp):
    """Conversion to the result type's element type; floats to integers towards zero."""

    name = "top.cast"
    x = operand_def()
    result = result_def()

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        x, result = tensor(types, 0), _declared(declared)
        return [with_shape(result, x.get_shape())]


@irdl_op_definition
class WhereOp(TopOp):
    """`a` where `condition` (i1) holds, else `b`; all broadcast."""

    name = "top.where"
    condition = operand_def()
    a = operand_def()
    b = operand_def()
    result = result_def()

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        condition, a, b = (tensor(types, index) for index in range(3))
        if condition.get_element_type() != i1:
            raise VerifyException(f"condition must be i1, is {condition.get_element_type()}")
        same_element(a, b)
        shape = broadcast(condition.get_shape(), a.get_shape(), b.get_shape())
        return [with_shape(a, shape)]
