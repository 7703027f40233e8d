"""Strided views of operands over the iteration space of a `linalg.generic`.

A linear indexing map turns an array into a view with one axis for each loop (size 1 for loops the
map does not mention), so that a
convolution window is read without copying: axis `oh` has stride `s * row` and axis `kh` stride `d
* row`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided
from xdsl.ir.affine import (
    AffineBinaryOpExpr,
    AffineBinaryOpKind,
    AffineConstantExpr,
    AffineDimExpr,
    AffineExpr,
    AffineMap,
)

from tilewright.interp.scalars import fault

Array = npt.NDArray[Any]
Range = tuple[int, int]


@dataclass(frozen=True)
class Linear:
    """`constant + sum(factors[d] * loop d)`; only loops with a non-zero factor are listed."""

    constant: int
    factors: dict[int, int]


def linear(expr: AffineExpr) -> Linear | None:
    """Return the linear form of an affine expression, or None if it has `mod` or a division."""
    if isinstance(expr, AffineConstantExpr):
        return Linear(expr.value, {})
    if isinstance(expr, AffineDimExpr):
        return Linear(0, {expr.position: 1})
    if not isinstance(expr, AffineBinaryOpExpr):
        return None
    left, right = linear(expr.lhs), linear(expr.rhs)
    if left is None or right is None:
        return None
    if expr.kind is AffineBinaryOpKind.Add:
        factors = dict(left.factors)
        for loop, factor in right.factors.items():
            factors[loop] = factors.get(loop, 0) + factor
        factors = {loop: factor for loop, factor in factors.items() if factor}
        return Linear(left.constant + right.constant, factors)
    if expr.kind is AffineBinaryOpKind.Mul and (not left.factors or not right.factors):
        form, scale = (right, left.constant) if not left.factors else (left, right.constant)
        factors = {loop: factor * scale for loop, factor in form.factors.items() if scale}
        return Linear(form.constant * scale, factors)
    return None


@dataclass(frozen=True)
class Access:
    """How one operand is indexed."""

    map: AffineMap
    forms: tuple[Linear, ...] | None
    """Linear forms of all results, or None if one of them is not linear."""
    loops: frozenset[int]
    """Loops the map mentions."""

    @staticmethod
    def of(indexing: AffineMap) -> Access:
        """Analyse an indexing map.

        Raises:
            TilewrightError: E0501, the map has symbols.
        """
        if indexing.num_symbols:
            raise fault(f"an indexing map with symbols: {indexing}")
        forms = [linear(expr) for expr in indexing.results]
        used = frozenset(expr.position for result in indexing.results for expr in _dims(result))
        known = [form for form in forms if form is not None]
        return Access(indexing, tuple(known) if len(known) == len(forms) else None, used)

    def sizes(self, shape: Sequence[int]) -> dict[int, int]:
        """Return the extents that an operand of `shape` gives to loops that index an axis alone."""
        found: dict[int, int] = {}
        for expr, size in zip(self.map.results, shape, strict=True):
            if isinstance(expr, AffineDimExpr):
                found[expr.position] = int(size)
        return found

    def view(self, array: Array, ranges: Sequence[Range], writeable: bool = False) -> Array:
        """Return `array` over the loops `ranges` (start, stop), one axis a loop.

        Raises:
            TilewrightError: E0501, an index leaves the array.
        """
        if self.forms is None:
            if writeable:
                raise fault(f"an output indexed by {self.map}")
            return self._gather(array, ranges)
        rank = len(ranges)
        strides, begin = [0] * rank, list[int]()
        shape = [1] * rank
        empty = any(start >= stop for start, stop in ranges)
        for form, size, stride in zip(self.forms, array.shape, array.strides, strict=True):
            first = low = high = form.constant
            for loop, factor in form.factors.items():
                start, stop = ranges[loop]
                first += factor * start
                low += factor * (start if factor > 0 else stop - 1)
                high += factor * (stop - 1 if factor > 0 else start)
                strides[loop] += factor * stride
                shape[loop] = stop - start
            if not empty and not 0 <= low <= high < size:
                raise fault(
                    f"{self.map} reads {low}..{high} of an axis of {size}", f"loops {list(ranges)}"
                )
            begin.append(first)
        if empty:
            return np.empty([max(stop - start, 0) for start, stop in ranges], array.dtype)
        # The ellipsis makes this a view for a scalar too.
        base = array[(*(slice(position, None) for position in begin), ...)]
        return as_strided(base, shape, strides, writeable=writeable)

    def _gather(self, array: Array, ranges: Sequence[Range]) -> Array:
        loops = [loop_index(axis, ranges) for axis in range(len(ranges))]
        index = tuple(evaluate(expr, loops) for expr in self.map.results)
        return gather(array, index)


def loop_index(loop: int, ranges: Sequence[Range]) -> Array:
    """Return the index of `loop` along its own axis of the iteration space."""
    shape = [1] * len(ranges)
    shape[loop] = -1
    return np.arange(*ranges[loop], dtype=np.int64).reshape(shape)


def gather(array: Array, index: Sequence[Array]) -> Array:
    """Return `array[index]` for index arrays that broadcast together.

    Raises:
        TilewrightError: E0501, an index leaves the array.
    """
    for position, size in zip(index, array.shape, strict=True):
        if position.size and not (int(position.min()) >= 0 and int(position.max()) < size):
            raise fault(
                f"index {int(position.min())}..{int(position.max())} into an axis of {size}"
            )
    return array[tuple(index)] if index else array[()]


def evaluate(expr: AffineExpr, dims: Sequence[Any], symbols: Sequence[Any] = ()) -> Any:
    """Evaluate an affine expression on integers or index arrays."""
    if isinstance(expr, AffineConstantExpr):
        return expr.value
    if isinstance(expr, AffineDimExpr):
        return dims[expr.position]
    if not isinstance(expr, AffineBinaryOpExpr):
        return symbols[expr.position]  # pyright: ignore[reportAttributeAccessIssue]
    left, right = evaluate(expr.lhs, dims, symbols), evaluate(expr.rhs, dims, symbols)
    match expr.kind:
        case AffineBinaryOpKind.Add:
            return left + right
        case AffineBinaryOpKind.Mul:
            return left * right
        case AffineBinaryOpKind.Mod:
            return left % right
        case AffineBinaryOpKind.FloorDiv:
            return left // right
        case AffineBinaryOpKind.CeilDiv:
            return -(-left // right)


def _dims(expr: AffineExpr) -> list[AffineDimExpr]:
    if isinstance(expr, AffineDimExpr):
        return [expr]
    if isinstance(expr, AffineBinaryOpExpr):
        return [*_dims(expr.lhs), *_dims(expr.rhs)]
    return []
