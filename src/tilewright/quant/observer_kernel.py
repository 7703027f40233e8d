# pyright: basic
"""The inner loops of calibration's statistics, compiled by numba; `observers.py` explains them.

All of them release the interpreter's lock, so that two samples can be observed at once.
"""

from __future__ import annotations

import math

import numpy as np

from tilewright.quant.jit import compiled

RUN = 16
"""Neighbouring elements that are taken or left together when a large tensor is sampled."""

_ORDER_FREE = {"reassoc", "contract", "arcp", "nsz"}
"""Sums may be taken in any order; NaN and infinity keep their meaning."""


@compiled()
def count_bins(flat, stride, offset, scale, bins, weight):
    """Add every `stride`-th run of `flat` (float32), from run `offset` on, to the histogram.

    Bin `i` of `2N` holds values from `(i - N) / scale`; exact zeros are not binned. Each element
    counts `weight`. `scale` is float64, so that none becomes zero on the way. Returns how many of
    those taken were zero.
    """
    half = bins.size // 2
    zeros = 0
    start = offset * RUN
    while start < flat.size:
        for i in range(start, min(start + RUN, flat.size)):
            value = flat[i]
            if value == 0:
                zeros += 1
            else:
                bins[half + math.floor(value * scale)] += weight
        start += stride * RUN
    return zeros


@compiled()
def channel_rows(rows, sums, squares, lows, highs):
    """Take `rows[n, channel]` (float32) into sums and sums of squares (float64), least, greatest.

    Sums are float32 within 64 rows.
    """
    count, channels = rows.shape
    sum_part = np.zeros(channels, np.float32)
    square_part = np.zeros(channels, np.float32)
    for first in range(0, count, 64):
        sum_part[:] = 0
        square_part[:] = 0
        for row in range(first, min(first + 64, count)):
            for c in range(channels):
                value = rows[row, c]
                sum_part[c] += value
                square_part[c] += value * value
                highs[c] = max(highs[c], value)
                lows[c] = min(lows[c], value)
        for c in range(channels):
            sums[c] += sum_part[c]
            squares[c] += square_part[c]


@compiled(fastmath=_ORDER_FREE)
def range_errors(centres, mass, lows, highs, steps):
    """Return the squared error of codes for each range: `sum(mass * (x - quantised(x))^2)`.

    A range's codes are `steps` equal steps from `low` to `high` with a code at zero, saturating at
    both ends.
    """
    found = np.empty(lows.size)
    for k in range(lows.size):
        step = (highs[k] - lows[k]) / steps
        inverse = 1.0 / step
        first = np.rint(lows[k] * inverse)
        last = first + steps
        total = 0.0
        for i in range(centres.size):
            code = min(max(np.rint(centres[i] * inverse), first), last)
            error = centres[i] - code * step
            total += mass[i] * error * error
        found[k] = total
    return found


@compiled()
def divergences(mass, levels):
    """Return for each clipping point `i = levels..n` the divergence of the clipped histogram.

    `mass[n]` holds magnitudes without exact zeros. Reference `P`: the first `i` bins, everything
    beyond added to the last of them. Candidate `Q`: the first `i` bins in `levels` groups, the mass
    of a group spread evenly over its bins that are not empty. Returned is
    `sum(P * log(P / Q))` with both normalised, infinity where there is nothing below the point.

    As `Q` is constant in a group, `sum(P * log(Q))` needs one logarithm a group: every point can be
    tried.
    """
    n = mass.size
    below = np.zeros(n + 1)
    occupied = np.zeros(n + 1, np.int64)
    entropy = np.zeros(n + 1)
    for i in range(n):
        below[i + 1] = below[i] + mass[i]
        occupied[i + 1] = occupied[i] + (1 if mass[i] > 0 else 0)
        entropy[i + 1] = entropy[i] + (mass[i] * math.log(mass[i]) if mass[i] > 0 else 0.0)
    total = below[n]
    found = np.full(n + 1 - min(levels, n + 1), np.inf)
    for k in range(found.size):
        i = levels + k
        inside = below[i]
        if inside <= 0:
            continue
        beyond = total - inside
        last = mass[i - 1] + beyond
        p_log_p = entropy[i - 1] + (last * math.log(last) if last > 0 else 0.0)
        p_log_q = 0.0
        q_last = 0.0
        for group in range(levels):
            # The groups' ends: `level = bin * levels // i`.
            start = (group * i + levels - 1) // levels
            end = ((group + 1) * i + levels - 1) // levels
            bins = occupied[end] - occupied[start]
            if bins == 0:
                continue
            amount = below[end] - below[start]
            density = amount / bins
            p_log_q += amount * math.log(density)
            if group == levels - 1 and mass[i - 1] > 0:
                q_last = density
        if beyond > 0:
            # Clipped mass on an empty last bin: a tiny mass stands in for zero.
            p_log_q += beyond * math.log(max(q_last, 1e-12 * inside))
        found[k] = (p_log_p - p_log_q) / total - math.log(total) + math.log(inside)
    return found


@compiled()
def quantise_flat(flat, step, first, last, out):
    """Write the nearest of the codes `first..last` times `step` for each float32 of `flat`."""
    inverse = np.float32(1.0) / step
    for i in range(flat.size):
        out[i] = min(max(np.rint(flat[i] * inverse), first), last) * step
