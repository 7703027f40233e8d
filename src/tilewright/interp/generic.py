"""Execution of `linalg.generic` by structure, not by name.

- No reduction loops: the body is evaluated on whole arrays, in chunks of the outer loop.
- `acc + f(a) * g(b)` over reductions: an exact matrix product (`contract.py`) of windows.
- `acc op h(...)` with few reduction points: one array operation for each point; with many: the
  reduction of the whole chunk.
- Anything else: the body at each reduction point in order, on whole arrays of the parallel loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from xdsl.dialects.linalg.attrs import IteratorType
from xdsl.dialects.linalg.ops import GenericOp
from xdsl.ir import Operation, SSAValue

from tilewright.interp.body import Body, Lookup
from tilewright.interp.contract import EXACT_FLOAT32, magnitude, matmul_exact
from tilewright.interp.scalars import fault
from tilewright.interp.views import Access, Range

Array = npt.NDArray[Any]

CHUNK = 1 << 17
"""Points evaluated at once: temporaries stay in the cache."""

FEW_POINTS = 64
"""Up to this many reduction points, the points are walked one by one."""

WINDOW_BYTES = 96 << 20
"""Largest copy of convolution windows."""

_REDUCERS: dict[str, np.ufunc] = {
    "arith.addi": np.add,
    "arith.maxsi": np.maximum,
    "arith.minsi": np.minimum,
}
"""Reductions whose result does not depend on the order."""


@dataclass(frozen=True)
class _Reduction:
    """The body is `acc <op> term`, and `term` does not use `acc`."""

    op: str
    term: SSAValue
    factors: tuple[tuple[int, SSAValue], tuple[int, SSAValue]] | None
    """If `term` is a product of functions of one input each: input number and value."""


class Generic:
    """One `linalg.generic`, analysed."""

    def __init__(self, op: GenericOp) -> None:
        self.op = op
        self.accesses = [Access.of(item.data) for item in op.indexing_maps.data]
        self.input_values, self.output_values = list(op.inputs), list(op.outputs)
        self.inputs = len(self.input_values)
        self.loops = self.accesses[0].map.num_dims if self.accesses else 0
        self.reductions = [
            loop
            for loop, kind in enumerate(op.iterator_types.data)
            if kind.data is not IteratorType.PARALLEL
        ]
        self.parallel = [loop for loop in range(self.loops) if loop not in self.reductions]
        self.body = Body.of(op.body.block)
        self.reads_output = [bool(arg.uses) for arg in self.body.arguments[self.inputs :]]
        for access in self.accesses[self.inputs :]:
            if access.loops != frozenset(self.parallel):
                raise fault(f"an output indexed by {access.map}")
        self.reduction = self._reduction() if self.reductions else None

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array], lookup: Lookup) -> None:
        """Execute, writing into `outputs`."""
        ranges = self._ranges([*inputs, *outputs])
        if any(start >= stop for start, stop in ranges):
            return  # no point at all: the outputs keep their values
        reduction = self.reduction
        if (
            reduction is not None
            and reduction.factors is not None
            and self._contract(reduction, reduction.factors, inputs, outputs[0], lookup, ranges)
        ):
            return
        points = prod(ranges[loop][1] - ranges[loop][0] for loop in self.reductions)
        whole = reduction is not None and reduction.op in _REDUCERS and points > FEW_POINTS
        for chunk in _chunks(ranges, self.parallel, max(CHUNK // (points if whole else 1), 1)):
            if whole:
                assert reduction is not None
                self._reduce(reduction, inputs, outputs[0], lookup, chunk)
            else:
                self._walk(inputs, outputs, lookup, chunk)

    def _ranges(self, operands: Sequence[Array]) -> list[Range]:
        sizes: dict[int, int] = {}
        for access, operand in zip(self.accesses, operands, strict=True):
            for loop, size in access.sizes(operand.shape).items():
                if sizes.setdefault(loop, size) != size:
                    raise fault(f"loop {loop} is {sizes[loop]} for one operand, {size} for another")
        if len(sizes) != self.loops:
            raise fault("a loop whose extent no operand gives")
        return [(0, sizes[loop]) for loop in range(self.loops)]

    def _walk(
        self,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        lookup: Lookup,
        ranges: list[Range],
    ) -> None:
        """Evaluate the body at each reduction point in turn."""
        targets = [
            access.view(array, ranges, writeable=True)
            for access, array in zip(self.accesses[self.inputs :], outputs, strict=True)
        ]
        current = [
            target.copy() if reads else target
            for target, reads in zip(targets, self.reads_output, strict=True)
        ]
        spans = [range(*ranges[loop]) for loop in self.reductions]
        at = list(ranges)
        for point in product(*spans):
            for loop, position in zip(self.reductions, point, strict=True):
                at[loop] = (position, position + 1)
            reads = [
                access.view(array, at)
                for access, array in zip(self.accesses[: self.inputs], inputs, strict=True)
            ]
            current = self.body.run([*reads, *current], lookup, at)
        for target, value in zip(targets, current, strict=True):
            if value.dtype != target.dtype:
                raise fault(f"a region that yields {value.dtype} for {target.dtype}")
            target[...] = value

    def _reduce(
        self,
        reduction: _Reduction,
        inputs: Sequence[Array],
        output: Array,
        lookup: Lookup,
        ranges: list[Range],
    ) -> None:
        """Evaluate the term at all points of the chunk and reduce."""
        reads = [
            access.view(array, ranges)
            for access, array in zip(self.accesses[: self.inputs], inputs, strict=True)
        ]
        values = dict(zip(self.body.arguments, reads, strict=False))
        for target, step in self.body.slice_of(reduction.term):
            values[target] = step(values, lookup, ranges)
        term = self.body.fetch(reduction.term, values, lookup)
        shape = [stop - start for start, stop in ranges]
        for loop in self.parallel:
            shape[loop] = term.shape[loop] if term.ndim else 1
        term = np.broadcast_to(term, shape)
        combine = _REDUCERS[reduction.op]
        reduced = combine.reduce(term, axis=tuple(self.reductions), keepdims=True, dtype=term.dtype)
        target = self.accesses[self.inputs].view(output, ranges, writeable=True)
        target[...] = combine(target, reduced)

    def _contract(
        self,
        reduction: _Reduction,
        factors: tuple[tuple[int, SSAValue], tuple[int, SSAValue]],
        inputs: Sequence[Array],
        output: Array,
        lookup: Lookup,
        ranges: list[Range],
    ) -> bool:
        """Compute `out += f(a) x g(b)` as matrix products; False if the loops do not fit that."""
        (first, left_value), (second, right_value) = factors
        a, b = self.accesses[first], self.accesses[second]
        extent = [stop - start for start, stop in ranges]
        both, only_a, only_b = a.loops & b.loops, a.loops - b.loops, b.loops - a.loops
        reduced = frozenset(self.reductions)
        if a.forms is None or b.forms is None or (only_a | only_b) & reduced:
            return False
        if (a.loops | b.loops) != frozenset(range(self.loops)):
            return False
        batch = sorted(both - reduced)
        rows, columns, deep = sorted(only_a), sorted(only_b), sorted(both & reduced)
        sizes = [prod(extent[loop] for loop in group) for group in (batch, rows, columns, deep)]
        if sizes[0] > 1 and min(sizes[1], sizes[2]) == 1 and sizes[3] <= FEW_POINTS:
            return False  # depthwise: many tiny products, better point by point
        left = _narrow(self._applied(left_value, first, inputs[first], lookup))
        right = _narrow(self._applied(right_value, second, inputs[second], lookup))
        integers = np.issubdtype(output.dtype, np.integer)
        if not integers and output.dtype != np.float32:
            return False
        weight = _matrix(b.view(right, ranges), (batch, deep, columns))
        split = max(rows, key=lambda loop: extent[loop], default=None)
        cost = 4 * sizes[0] * sizes[1] * sizes[3]
        parts = min(-(-cost // WINDOW_BYTES), extent[split]) if split is not None else 1
        for part in _split(ranges, split, parts):
            window = _matrix(a.view(left, part), (batch, rows, deep))
            if integers:
                value = matmul_exact(window, weight, output.dtype)
            else:
                value = np.matmul(window, weight)
            target = self.accesses[self.inputs].view(output, part, writeable=True)
            order = [*batch, *rows, *columns, *self.reductions]
            shaped = target.transpose(order)
            shaped += value.reshape(shaped.shape)
        return True

    def _applied(self, value: SSAValue, number: int, array: Array, lookup: Lookup) -> Array:
        """Return the function of one input that `value` is, on the whole operand."""
        values = {self.body.arguments[number]: array}
        for target, step in self.body.slice_of(value):
            values[target] = step(values, lookup, [])
        result = self.body.fetch(value, values, lookup)
        return np.broadcast_to(result, array.shape)

    def _reduction(self) -> _Reduction | None:
        if len(self.body.yields) != 1:
            return None
        accumulator = self.body.arguments[self.inputs]
        owner = self.body.yields[0].owner
        if not isinstance(owner, Operation) or len(owner.operands) != 2:
            return None
        terms = [value for value in owner.operands if value is not accumulator]
        if len(terms) != 1 or len(list(accumulator.uses)) != 1:
            return None
        floats = owner.name == "arith.addf"
        if owner.name not in _REDUCERS and not floats:
            return None
        factors = self._factors(terms[0], "arith.mulf" if floats else "arith.muli")
        if owner.name not in _REDUCERS and factors is None:
            return None
        if owner.name not in ("arith.addi", "arith.addf"):
            factors = None
        if floats:
            return _Reduction(owner.name, terms[0], factors) if factors else None
        return _Reduction(owner.name, terms[0], factors)

    def _factors(
        self, term: SSAValue, times: str
    ) -> tuple[tuple[int, SSAValue], tuple[int, SSAValue]] | None:
        owner = term.owner
        if not isinstance(owner, Operation) or owner.name != times:
            return None
        found = list[tuple[int, SSAValue]]()
        for value in owner.operands:
            sources = self._sources(value)
            if sources is None or len(sources) != 1:
                return None
            found.append((sources.pop(), value))
        if found[0][0] == found[1][0]:
            return None
        return found[0], found[1]

    def _sources(self, value: SSAValue) -> set[int] | None:
        """Return which inputs a value depends on; None if on anything but inputs and constants."""
        if value in self.body.arguments:
            number = self.body.arguments.index(value)
            return {number} if number < self.inputs else None
        owner = value.owner
        if not isinstance(owner, Operation) or value in self.body.captured:
            return None
        if owner.name == "arith.constant":
            return set()
        if not owner.name.startswith("arith."):
            return None
        found: set[int] = set()
        for operand in owner.operands:
            sources = self._sources(operand)
            if sources is None:
                return None
            found |= sources
        return found


def _matrix(view: Array, groups: tuple[list[int], list[int], list[int]]) -> Array:
    """Copy a view over all loops to rank 3, one axis for each group of loops."""
    used = [loop for group in groups for loop in group]
    rest = [loop for loop in range(view.ndim) if loop not in used]
    ordered = view.transpose([*used, *rest])
    sizes = [prod(view.shape[loop] for loop in group) for group in groups]
    return np.ascontiguousarray(ordered).reshape(sizes)


def _narrow(array: Array) -> Array:
    """Return integers as float32 where every one of them is exact in it; otherwise as they are."""
    if not np.issubdtype(array.dtype, np.integer) or not array.size:
        return array
    if array.dtype.itemsize > 2 and magnitude(array) > EXACT_FLOAT32:
        return array
    return array.astype(np.float32)


def _chunks(ranges: list[Range], parallel: list[int], points: int) -> list[list[Range]]:
    """Cut the parallel loops, outer ones first, until a chunk has about `points` points."""
    pieces, total = [ranges], prod(ranges[item][1] - ranges[item][0] for item in parallel)
    for loop in parallel:
        if total <= points:
            break
        length = ranges[loop][1] - ranges[loop][0]
        parts = min(-(-total // points), length)
        pieces = [piece for item in pieces for piece in _split(item, loop, parts)]
        total = -(-total // parts)
    return pieces


def _split(ranges: list[Range], loop: int | None, parts: int) -> list[list[Range]]:
    if loop is None or parts <= 1:
        return [ranges]
    start, stop = ranges[loop]
    step = max(-(-(stop - start) // parts), 1)
    result = list[list[Range]]()
    for begin in range(start, stop, step):
        piece = list(ranges)
        piece[loop] = (begin, min(begin + step, stop))
        result.append(piece)
    return result
