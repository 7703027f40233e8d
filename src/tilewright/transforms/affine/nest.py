"""Builder of loop nests: tile loops, SRAM tiles, views, copies and compute ops.

All ops it makes carry `layer`. Extents that are the same expression on both sides of a copy give
the same SSA values, so that types match.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from xdsl.dialects import affine, arith, memref
from xdsl.dialects.builtin import (
    DYNAMIC_INDEX,
    AffineMapAttr,
    AnyFloat,
    ArrayAttr,
    DenseArrayBase,
    IndexType,
    IntegerAttr,
    IntegerType,
    MemRefType,
    NoneAttr,
    StridedLayoutAttr,
    StringAttr,
    i32,
    i64,
)
from xdsl.dialects.linalg.attrs import IteratorTypeAttr
from xdsl.dialects.linalg.ops import FillOp, GenericOp
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.ir.affine import AffineExpr, AffineMap

from tilewright.transforms.affine.index import Index, Variable
from tilewright.transforms.linalg.emit import number_attribute

SRAM = IntegerAttr(1, i32)
ACCUMULATORS = IntegerAttr(2, i32)
Extent = Index | int


@dataclass(frozen=True)
class View:
    """A memref value and its extents."""

    value: SSAValue
    sizes: tuple[Index, ...]

    @property
    def type(self) -> MemRefType[Attribute]:
        """The memref type."""
        kind = self.value.type
        assert isinstance(kind, MemRefType)
        return kind


def view_of(value: SSAValue) -> View:
    """Return the whole of a statically shaped memref."""
    kind = value.type
    assert isinstance(kind, MemRefType)
    return View(value, tuple(Index(size) for size in kind.get_shape()))


class Nest:
    """Appends the loop nest of one layer to a block; `layer` marks its ops."""

    def __init__(self, block: Block, constants: Constants) -> None:
        self.blocks = [block]
        self.constants = constants
        self.layer = ""
        self._known: list[dict[object, SSAValue]] = [{}]

    def add(self, op: Operation) -> Operation:
        """Append `op` to the innermost open loop."""
        if self.layer:
            op.attributes["layer"] = StringAttr(self.layer)
        self.blocks[-1].add_op(op)
        return op

    @contextmanager
    def loop(self, size: int, step: int) -> Generator[Index]:
        """Open a loop over `0, step, ... < size`; one iteration needs none and gives 0."""
        if step >= size:
            yield Index(0)
            return
        block = Block(arg_types=[IndexType()])
        op = affine.ForOp.from_region([], [], [], [], 0, size, Region(block), step)
        self.add(op)
        self.blocks.append(block)
        self._known.append({})
        last = (size - 1) // step * step
        yield Index(0, ((Variable(block.args[0], 0, last), 1),))
        block.add_op(affine.YieldOp.get())
        self.blocks.pop()
        self._known.pop()

    def minimum(self, *options: Extent) -> Index:
        """Return the least of the options."""
        kept: list[Index] = []
        for option in map(Index.of, options):
            if any((option - other).low >= 0 for other in kept):
                continue
            kept = [other for other in kept if (other - option).low < 0]
            kept.append(option)
        if len(kept) == 1:
            return kept[0]
        variables = list(dict.fromkeys(v for item in kept for v, _ in item.terms))
        expressions = tuple(item.expression(variables) for item in kept)
        key = ("min", expressions, tuple(id(v.value) for v in variables))
        value = self._lookup(key)
        if value is None:
            table = AffineMapAttr(AffineMap(len(variables), 0, expressions))
            op = self.add(affine.MinOp([v.value for v in variables], table))
            value = self._known[-1][key] = op.results[0]
        low, high = min(item.low for item in kept), min(item.high for item in kept)
        return Index(0, ((self._variable(value, low, high), 1),))

    def maximum(self, *options: Extent) -> Index:
        """Return the greatest of the options."""
        return -self.minimum(*(-Index.of(option) for option in options))

    def index(self, value: Extent) -> SSAValue | int:
        """Return the expression as an SSA value, or as a number if it is constant."""
        value = Index.of(value)
        if not value.terms:
            return value.constant
        variables = [variable for variable, _ in value.terms]
        if value.constant == 0 and value.terms[0][1] == 1 and len(value.terms) == 1:
            return variables[0].value
        expression = value.expression(variables)
        key = ("apply", expression, tuple(id(v.value) for v in variables))
        found = self._lookup(key)
        if found is None:
            table = AffineMapAttr(AffineMap(len(variables), 0, (expression,)))
            op = self.add(affine.ApplyOp([v.value for v in variables], table))
            found = self._known[-1][key] = op.results[0]
        return found

    def _lookup(self, key: object) -> SSAValue | None:
        for scope in reversed(self._known):
            if key in scope:
                return scope[key]
        return None

    def _variable(self, value: SSAValue, low: int, high: int) -> Variable:
        # One variable an SSA value, so that differences of equal terms cancel.
        return self.constants.variables.setdefault(value, Variable(value, low, high))

    def alloc(
        self,
        shape: Sequence[int],
        element: Attribute,
        role: str,
        slots: int,
        space: IntegerAttr = SRAM,
    ) -> View:
        """Allocate a tile of its largest shape."""
        kind = MemRefType(element, list(shape), NoneAttr(), space)
        op = memref.AllocOp([], [], kind)
        op.attributes["role"] = StringAttr(role)
        op.attributes["slots"] = IntegerAttr(slots, i32)
        self.add(op)
        return view_of(op.results[0])

    def view(
        self,
        source: View,
        offsets: Sequence[Extent],
        sizes: Sequence[Extent],
        drop: Sequence[int] = (),
        strides: Sequence[int] | None = None,
    ) -> View:
        """Take a box of `source` (itself if that is all of it); dimensions in `drop` vanish."""
        starts, extents = [Index.of(item) for item in offsets], [Index.of(item) for item in sizes]
        steps = list(strides or [1] * len(extents))
        whole = all(
            start == Index(0) and extent == full and step == 1
            for start, extent, full, step in zip(starts, extents, source.sizes, steps, strict=True)
        )
        if whole and not drop:
            return source
        kind = source.type
        own = kind.get_strides()
        assert own is not None
        numbers = [self.index(item) for item in extents]
        places = [self.index(item) for item in starts]
        offset = kind.get_offset()
        for place, stride in zip(places, own, strict=True):
            if place == 0:
                continue
            if offset is None or stride is None or not isinstance(place, int):
                offset = None
            else:
                offset += place * stride
        kept = [axis for axis in range(len(extents)) if axis not in drop]
        layout = StridedLayoutAttr(
            [None if (s := own[axis]) is None else s * steps[axis] for axis in kept], offset
        )
        shape = [n if isinstance(n := numbers[axis], int) else DYNAMIC_INDEX for axis in kept]
        result = MemRefType(kind.element_type, shape, layout, kind.memory_space)
        op = memref.SubviewOp(
            source.value,
            [item for item in places if not isinstance(item, int)],
            [item for item in numbers if not isinstance(item, int)],
            [],
            [item if isinstance(item, int) else DYNAMIC_INDEX for item in places],
            [item if isinstance(item, int) else DYNAMIC_INDEX for item in numbers],
            steps,
            result,
        )
        self.add(op)
        return View(op.results[0], tuple(extents[axis] for axis in kept))

    def reshape(self, source: SSAValue, shape: Sequence[int]) -> SSAValue:
        """Return a dense memref under another shape of as many elements (no data moves)."""
        kind = source.type
        assert isinstance(kind, MemRefType)
        have, want = list(kind.get_shape()), list(shape)
        if have == want:
            return source
        value = source
        if len(have) != 1:
            total = 1
            for size in have:
                total *= size
            flat = MemRefType(kind.element_type, [total], NoneAttr(), kind.memory_space)
            groups = [list(range(len(have)))] if have else []
            if not have:
                value = self._expand(value, groups, [1], flat)
            else:
                op = memref.CollapseShapeOp.build(
                    operands=[value],
                    result_types=[flat],
                    properties={"reassociation": _reassociation(groups)},
                )
                value = self.add(op).results[0]
        if len(want) == 1:
            return value
        result = MemRefType(kind.element_type, want, NoneAttr(), kind.memory_space)
        if not want:
            op = memref.CollapseShapeOp.build(
                operands=[value],
                result_types=[result],
                properties={"reassociation": _reassociation([])},
            )
            return self.add(op).results[0]
        return self._expand(value, [list(range(len(want)))], want, result)

    def transposed(self, source: SSAValue, axes: Sequence[int], ones: int) -> SSAValue:
        """Return a dense memref with its axes in another order and `ones` axes of size 1 added."""
        kind = source.type
        assert isinstance(kind, MemRefType)
        strides = kind.get_strides()
        assert strides is not None
        shape = [*(kind.get_shape()[axis] for axis in axes), *[1] * ones]
        steps = [*(strides[axis] or 0 for axis in axes), *[1] * ones]
        layout = StridedLayoutAttr(steps, 0)
        result = MemRefType(kind.element_type, shape, layout, kind.memory_space)
        op = memref.ReinterpretCastOp(source, [], [], [], [0], shape, steps, result)
        return self.add(op).results[0]

    def _expand(
        self, value: SSAValue, groups: list[list[int]], sizes: list[int], kind: Attribute
    ) -> SSAValue:
        op = memref.ExpandShapeOp.build(
            operands=[value, []],
            result_types=[kind],
            properties={
                "reassociation": _reassociation(groups),
                "static_output_shape": DenseArrayBase.from_list(i64, sizes),
            },
        )
        return self.add(op).results[0]

    def copy(self, source: View, target: View) -> None:
        """Move a tile between DDR and SRAM."""
        self.add(memref.CopyOp(source.value, target.value))

    def fill(self, value: float, target: View) -> None:
        """Write `value` everywhere."""
        element = target.type.element_type
        assert isinstance(element, IntegerType | AnyFloat)
        constant = self.constants.get(value, element)
        self.add(FillOp([constant], [target.value], []))

    def generic(
        self,
        kind: str,
        inputs: Sequence[tuple[View, AffineMap]],
        output: tuple[View, AffineMap],
        body: Region,
        attributes: Mapping[str, Attribute],
        reductions: int = 0,
    ) -> None:
        """Append a compute op; the last `reductions` loops are reductions."""
        maps = [*(table for _, table in inputs), output[1]]
        rank = output[1].num_dims
        iterators = [
            IteratorTypeAttr.parallel()
            if axis < rank - reductions
            else IteratorTypeAttr.reduction()
            for axis in range(rank)
        ]
        op = GenericOp(
            [view.value for view, _ in inputs],
            [output[0].value],
            body,
            [AffineMapAttr(table) for table in maps],
            iterators,
        )
        op.attributes["kind"] = StringAttr(kind)
        op.attributes.update(attributes)
        self.add(op)


class Constants:
    """Scalar constants of a function, at its top, each once."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.variables: dict[SSAValue, Variable] = {}
        self._values: dict[tuple[float, Attribute], SSAValue] = {}
        self._last: Operation | None = None

    def get(self, value: float, element: IntegerType | AnyFloat) -> SSAValue:
        """Return the constant."""
        key = (value, element)
        if key not in self._values:
            op = arith.ConstantOp(number_attribute(value, element))
            if self._last is None:
                first = self.block.first_op
                if first is None:
                    self.block.add_op(op)
                else:
                    self.block.insert_op_before(op, first)
            else:
                self.block.insert_op_after(op, self._last)
            self._last = op
            self._values[key] = op.results[0]
        return self._values[key]


def dims(count: int) -> list[AffineExpr]:
    """Return the dimension expressions `d0 .. d(count-1)`."""
    return [AffineExpr.dimension(axis) for axis in range(count)]


def table(rank: int, results: Sequence[AffineExpr | int]) -> AffineMap:
    """Return the map from `rank` loops to `results`."""
    return AffineMap(
        rank,
        0,
        tuple(AffineExpr.constant(item) if isinstance(item, int) else item for item in results),
    )


def _reassociation(groups: list[list[int]]) -> ArrayAttr[ArrayAttr[IntegerAttr]]:
    return ArrayAttr([ArrayAttr([IntegerAttr(axis, i64) for axis in group]) for group in groups])
