"""Exact contraction of integer arrays on floating-point matrix units.

Sums of integer products are computed by BLAS and are still exact: every partial sum, in any
order, is bounded by
`max |a| * sum |b|` over the contracted axes, and while that is below 2^24 (float32) or 2^53
(float64) all intermediate values are
integers the float type holds. The bound is taken from the data; where it fails the contracted
axis is cut into pieces.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

EXACT_FLOAT32 = 1 << 24
EXACT_FLOAT64 = 1 << 52
"""Half of what float64 holds, since the bound itself is computed in float64."""


def magnitude(array: Array) -> int:
    """Return the largest absolute value (0 if empty)."""
    if array.size == 0:
        return 0
    return max(abs(int(array.max())), abs(int(array.min())))


def matmul_exact(left: Array, right: Array, accumulator: np.dtype[Any]) -> Array:
    """Return `left @ right`, (batch, M, K) x (batch, K, N), wrapped to type `accumulator`.

    Operands are integers in integer or float32 arrays. Wrapping at the end equals wrapping at
    each step.
    """
    depth = right.shape[-2]
    if depth == 0 or left.size == 0 or right.size == 0:
        return np.zeros((left.shape[0], left.shape[1], right.shape[2]), accumulator)
    largest = magnitude(left)
    # Integers go through float64 first: the absolute value of the lowest one does not exist.
    sizes = np.abs(right if right.dtype == np.float32 else right.astype(np.float64))
    columns = sizes.sum(axis=1, dtype=np.float64).max()
    del sizes
    bound = float(largest) * float(columns)
    if bound < EXACT_FLOAT32:
        return _to_integer(_product(left, right, np.float32), accumulator, bound)
    if largest * magnitude(right) >= EXACT_FLOAT32 // 16:
        # Wide operands: pieces would be short.
        if bound < EXACT_FLOAT64:
            return _to_integer(_product(left, right, np.float64), accumulator, bound)
        return np.matmul(_integers(left), _integers(right)).astype(accumulator)
    pieces = int(bound // EXACT_FLOAT32) + 1
    if pieces == 1 or depth == 1:
        return _to_integer(_product(left, right, np.float64), accumulator, bound)
    total: Array | None = None
    step = -(-depth // pieces)
    for start in range(0, depth, step):
        part = matmul_exact(
            left[:, :, start : start + step], right[:, start : start + step, :], accumulator
        )
        total = part if total is None else np.add(total, part, out=total)
    assert total is not None
    return total


def _product(left: Array, right: Array, kind: Any) -> Array:
    return np.matmul(left.astype(kind, copy=False), right.astype(kind, copy=False))


def _integers(array: Array) -> Array:
    return array.astype(np.int64, copy=False)


def _to_integer(value: Array, accumulator: np.dtype[Any], bound: float) -> Array:
    if accumulator.itemsize * 8 < 64 and bound < 2.0 ** (accumulator.itemsize * 8 - 1):
        return value.astype(accumulator)
    return value.astype(np.int64).astype(accumulator)
