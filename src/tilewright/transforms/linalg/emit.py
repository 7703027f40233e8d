"""Emit upstream `tensor`/`linalg`/`arith` ops for one layer at a time.

Every op emitted for a layer carries `layer = "conv1"` and `role = "pad" | "contract" |
"requantise" | ...` (what part of
the layer it is). Ops that become compute of the affine level also carry its `kind` and parameters
(`tag`). Both are for later stages; executing the IR never needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from xdsl.dialects import arith, tensor
from xdsl.dialects.builtin import (
    AffineMapAttr,
    AnyFloat,
    ArrayAttr,
    FloatAttr,
    IndexType,
    IntegerAttr,
    IntegerType,
    StringAttr,
    TensorType,
    f32,
    i8,
    i32,
    i64,
)
from xdsl.dialects.linalg import ops as linalg
from xdsl.dialects.linalg.attrs import IteratorTypeAttr
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.ir.affine import AffineExpr, AffineMap

from tilewright.dialects.quant import UniformType, quantised, shape_of

Shape = tuple[int, ...]
Results = Sequence[AffineExpr | int]
Scalar = IntegerType | IndexType | AnyFloat


def storage_type(kind: Attribute) -> Attribute:
    """Return the type that holds a value at the linalg level: codes become `i8`."""
    if isinstance(kind, TensorType) and isinstance(kind.element_type, UniformType):
        return TensorType(i8, kind.get_shape())
    return kind


def element_of(value: SSAValue) -> Attribute:
    """Return the type of a tensor's elements as stored at the linalg level (of a scalar: its own).

    Everything that depends on the number type - widths of elements and sums, float or integer
    arithmetic - follows from it.
    """
    kind = storage_type(value.type)
    return kind.element_type if isinstance(kind, TensorType) else kind


def is_float(kind: Attribute) -> bool:
    """Tell whether a scalar type is a float."""
    return isinstance(kind, AnyFloat)


def accumulator_of(element: Attribute) -> Scalar:
    """Return the type that products of `element` are summed in: i32 of codes, f32 of fp16."""
    return f32 if is_float(element) else i32


def number_attribute(value: float, kind: Scalar) -> IntegerAttr | FloatAttr:
    """Return `value` as an attribute of `kind`."""
    if isinstance(kind, AnyFloat):
        return FloatAttr(float(value), kind)
    return IntegerAttr(int(value), kind)


def zero_point(value: SSAValue) -> int:
    """Return the code that stands for zero in the type of a value; 0 for floats."""
    return 0 if is_float(element_of(value)) else quantised(value).zero


def dims(count: int) -> list[AffineExpr]:
    """Return the dimension expressions `d0 .. d(count-1)`."""
    return [AffineExpr.dimension(index) for index in range(count)]


def affine_map(rank: int, results: Results) -> AffineMap:
    """Return the map from `rank` dimensions to `results` (expressions or constants)."""
    return AffineMap(
        rank,
        0,
        tuple(AffineExpr.constant(item) if isinstance(item, int) else item for item in results),
    )


def broadcast_map(shape: Shape, target: Shape) -> AffineMap:
    """Return the map that reads an operand of `shape` at each index of `target`, as numpy does."""
    space, skip = dims(len(target)), len(target) - len(shape)
    return affine_map(
        len(target),
        [
            0 if size == 1 and target[skip + axis] != 1 else space[skip + axis]
            for axis, size in enumerate(shape)
        ],
    )


class Body:
    """Scalar arithmetic inside the region of a `linalg.generic`."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.args = list(block.args)

    def add(self, op: Operation) -> SSAValue:
        """Append `op` and return its result."""
        self.block.add_op(op)
        return op.results[0]

    def constant(self, value: float, kind: Scalar) -> SSAValue:
        """Return `value` as a constant of `kind`."""
        return self.add(arith.ConstantOp(number_attribute(value, kind)))

    def extend(self, value: SSAValue, kind: Scalar) -> SSAValue:
        """Sign-extend, or widen a float, to `kind` (unchanged if it already is of that type)."""
        if value.type == kind:
            return value
        if isinstance(kind, AnyFloat):
            return self.add(arith.ExtFOp(value, kind))
        assert isinstance(kind, IntegerType)
        return self.add(arith.ExtSIOp(value, kind))

    def plus(self, left: SSAValue, right: SSAValue) -> SSAValue:
        """Sum; of integers it wraps."""
        kind = arith.AddfOp if is_float(left.type) else arith.AddiOp
        return self.add(kind(left, right))

    def minus(self, left: SSAValue, right: SSAValue) -> SSAValue:
        """Difference; of integers it wraps."""
        kind = arith.SubfOp if is_float(left.type) else arith.SubiOp
        return self.add(kind(left, right))

    def times(self, left: SSAValue, right: SSAValue) -> SSAValue:
        """Product; of integers it wraps."""
        kind = arith.MulfOp if is_float(left.type) else arith.MuliOp
        return self.add(kind(left, right))

    def larger(self, left: SSAValue, right: SSAValue) -> SSAValue:
        """Signed maximum."""
        kind = arith.MaximumfOp if is_float(left.type) else arith.MaxSIOp
        return self.add(kind(left, right))

    def smaller(self, left: SSAValue, right: SSAValue) -> SSAValue:
        """Signed minimum."""
        kind = arith.MinimumfOp if is_float(left.type) else arith.MinSIOp
        return self.add(kind(left, right))

    def code_offset(self, code: SSAValue, zero: int, kind: Scalar) -> SSAValue:
        """Return `code - zero`, extended to `kind` first."""
        wide = self.extend(code, kind)
        return wide if zero == 0 else self.minus(wide, self.constant(zero, kind))

    def index(self, axis: int) -> SSAValue:
        """Return the loop index of `axis`."""
        return self.add(linalg.IndexOp(axis))


Tags = Mapping[str, int | float | str | Sequence[int]]


def tag(value: SSAValue, kind: str, tags: Tags) -> SSAValue:
    """Record on the op that made `value` what later stages must know of it; returns `value`.

    `docs/concepts/machine.md` lists kinds and their parameters.
    """
    owner = value.owner
    assert isinstance(owner, Operation)
    owner.attributes["kind"] = StringAttr(kind)
    for name, item in tags.items():
        if isinstance(item, str):
            owner.attributes[name] = StringAttr(item)
        elif isinstance(item, int):
            owner.attributes[name] = IntegerAttr(item, i64)
        elif isinstance(item, float):
            owner.attributes[name] = FloatAttr(item, f32)
        else:
            owner.attributes[name] = ArrayAttr([IntegerAttr(number, i64) for number in item])
    return value


BodyFunction = Callable[[Body], SSAValue]


class Emitter:
    """Appends the ops of one layer to a block."""

    def __init__(self, block: Block, layer: str) -> None:
        self.block = block
        self.layer = layer

    def add(self, op: Operation, role: str) -> SSAValue:
        """Append `op`, mark it with the layer and `role`, and return its first result."""
        op.attributes["layer"] = StringAttr(self.layer)
        op.attributes["role"] = StringAttr(role)
        self.block.add_op(op)
        return op.results[0]

    def constant(self, value: float, kind: Scalar) -> SSAValue:
        """Return `value` as a scalar constant."""
        return self.add(arith.ConstantOp(number_attribute(value, kind)), "constant")

    def empty(self, shape: Shape, element: Attribute) -> SSAValue:
        """Return a tensor whose contents nothing reads."""
        return self.add(tensor.EmptyOp([], TensorType(element, shape)), "empty")

    def filled(self, value: float, shape: Shape, element: Scalar) -> SSAValue:
        """Return a tensor of `value` everywhere."""
        scalar = self.constant(value, element)
        target = self.empty(shape, element)
        return self.add(linalg.FillOp([scalar], [target], [target.type]), "fill")

    def generic(
        self,
        role: str,
        inputs: Sequence[tuple[SSAValue, AffineMap]],
        output: tuple[SSAValue, AffineMap],
        body: BodyFunction,
        reductions: Sequence[int] = (),
    ) -> SSAValue:
        """Append a `linalg.generic` with one output; loops listed in `reductions` are reductions.

        The last block argument of the body is the output's current value.
        """
        operands = [*(value for value, _ in inputs), output[0]]
        maps = [*(item for _, item in inputs), output[1]]
        block = Block(arg_types=[element_of(value) for value in operands])
        region = Body(block)
        block.add_op(linalg.YieldOp(body(region)))
        iterators = [
            IteratorTypeAttr.reduction() if loop in reductions else IteratorTypeAttr.parallel()
            for loop in range(output[1].num_dims)
        ]
        op = linalg.GenericOp(
            operands[:-1],
            operands[-1:],
            Region(block),
            [AffineMapAttr(item) for item in maps],
            iterators,
            [output[0].type],
        )
        return self.add(op, role)

    def elementwise(
        self,
        role: str,
        inputs: Sequence[tuple[SSAValue, AffineMap]],
        shape: Shape,
        element: Attribute,
        body: BodyFunction,
    ) -> SSAValue:
        """Append a parallel `linalg.generic` that writes every element of a new tensor once."""
        target = self.empty(shape, element)
        return self.generic(role, inputs, (target, AffineMap.identity(len(shape))), body)

    def pad(
        self, value: SSAValue, low: Sequence[int], high: Sequence[int], fill: float
    ) -> SSAValue:
        """Surround a tensor by `fill`; returns `value` itself if there is nothing to add."""
        if not any(low) and not any(high):
            return value
        shape = shape_of(value)
        sizes = [
            size + before + after for size, before, after in zip(shape, low, high, strict=True)
        ]
        block = Block(arg_types=[IndexType()] * len(shape))
        element = element_of(value)
        assert isinstance(element, IntegerType | AnyFloat)
        scalar = Body(block).constant(fill, element)
        block.add_op(tensor.YieldOp(scalar))
        op = tensor.PadOp(
            value, [], [], Region(block), list(low), list(high), TensorType(element, sizes)
        )
        return self.add(op, "pad")

    def expand(self, value: SSAValue, groups: Sequence[Sequence[int]]) -> SSAValue:
        """Split each axis of `value` into the sizes given for it."""
        sizes = [size for group in groups for size in group]
        kind = TensorType(element_of(value), sizes)
        op = tensor.ExpandShapeOp(
            value, [], _reassociation([len(group) for group in groups]), sizes, kind
        )
        return self.add(op, "reshape")

    def collapse(self, value: SSAValue, counts: Sequence[int]) -> SSAValue:
        """Merge runs of adjacent axes; `counts` says how many axes go into each result axis."""
        shape = shape_of(value)
        sizes, position = list[int](), 0
        for count in counts:
            size = 1
            for item in shape[position : position + count]:
                size *= item
            sizes.append(size)
            position += count
        op = tensor.CollapseShapeOp.build(
            operands=[value],
            result_types=[TensorType(element_of(value), sizes)],
            properties={"reassociation": _reassociation(counts)},
        )
        return self.add(op, "reshape")


def _reassociation(counts: Sequence[int]) -> ArrayAttr[ArrayAttr[IntegerAttr]]:
    groups, position = list[ArrayAttr[IntegerAttr]](), 0
    for count in counts:
        groups.append(
            ArrayAttr([IntegerAttr(axis, i64) for axis in range(position, position + count)])
        )
        position += count
    return ArrayAttr(groups)
