# pyright: basic
"""The inner loops of learning codes, compiled by numba; `reconstruct.py` explains them."""

from __future__ import annotations

import numpy as np

from tilewright.quant.jit import compiled


@compiled()
def descend_rows(codes, slope, hessian, limit, sweeps):
    """Move every code to the best for the others as they are, until none moves; in place.

    `slope[group, O, K]` is half the loss's gradient at `codes[group, O, K]` and is kept up to
    date; `hessian[group, K, K]`.
    """
    groups, rows, size = codes.shape
    for group in range(groups):
        for row in range(rows):
            for _ in range(sweeps):
                moved = False
                for k in range(size):
                    curve = hessian[group, k, k]
                    if curve <= 0:
                        continue
                    old = codes[group, row, k]
                    new = np.rint(old - slope[group, row, k] / curve)
                    new = min(max(new, -limit), limit)
                    step = new - old
                    # A tie of rounding would go to and fro.
                    if step == 0 or step * (2 * slope[group, row, k] + step * curve) >= 0:
                        continue
                    codes[group, row, k] = new
                    moved = True
                    for j in range(size):
                        slope[group, row, j] += step * hessian[group, k, j]
                if not moved:
                    break


@compiled(fastmath={"contract"})
def settle_rows(weights, upper, limit):
    """Round `weights[group, O, K]` in place, from the first on; `upper[group, K, K]` is `U`."""
    groups, rows, size = weights.shape
    for group in range(groups):
        for row in range(rows):
            for k in range(size):
                value = weights[group, row, k]
                code = min(max(np.rint(value), -limit), limit)
                weights[group, row, k] = code
                apart = (value - code) / upper[group, k, k]
                for j in range(k + 1, size):
                    weights[group, row, j] -= apart * upper[group, k, j]
