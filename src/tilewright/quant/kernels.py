"""Exact integer kernels of the numeric contract (`docs/concepts/numerics.md`), in plain numpy.

These define what the quantised graph means. They share no code with the compiler's other oracles
(the linalg interpreter, the simulators), so that each can check the others.

Codes are int8 arrays, accumulators int32 or int64. Products of codes are summed through float32
matrix products, which is exact: every partial sum of at most 1024 products of magnitude at most
128 * 127 is an integer below 2^24, whatever the order; longer sums are cut and added as integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
Codes = npt.NDArray[np.int8]
Wide = npt.NDArray[np.int64]
Acc = npt.NDArray[np.int32]
_T = TypeVar("_T", np.int8, np.int32)

EXACT_K = 1024
"""Products of a code and a weight (-127..127) float32 sums exactly: 1024 * 128 * 127 < 2^24."""

BLOCK_ELEMENTS = 1 << 22
"""Unfolded convolution input held at once (float32 elements)."""


def rshift(v: Wide, s: Wide | int, rounding: str) -> Wide:
    """Return `v / 2^s` (`0 <= s <= 62`) rounded as the contract's table says."""
    value = np.asarray(v, dtype=np.int64)
    shift = np.asarray(s, dtype=np.int64)
    half = np.where(shift > 0, np.left_shift(np.int64(1), np.maximum(shift - 1, 0)), 0)
    if rounding == "half_up":
        return (value + half) >> shift
    if rounding == "half_away":
        return np.sign(value) * ((np.abs(value) + half) >> shift)
    if rounding == "truncate":
        return np.sign(value) * (np.abs(value) >> shift)
    if rounding == "half_even":
        quotient = (value + half) >> shift
        # A tie went up; step back if that gave an odd number.
        tie = (value & (np.left_shift(np.int64(1), shift) - 1)) == half
        return quotient - (tie & (shift > 0) & ((quotient & 1) == 1))
    raise ValueError(f"unknown rounding {rounding!r}")


def finish(v: Wide, s: Wide | int, zp: int, lo: int, hi: int, rounding: str) -> Codes:
    """Shift, add the zero point, clamp: the end of every arithmetic operation."""
    return np.clip(rshift(v, s, rounding) + zp, lo, hi).astype(np.int8)


def requant(
    acc: Acc | Wide,
    bias: npt.NDArray[np.int32] | int,
    m: npt.NDArray[np.int32] | int,
    s: npt.NDArray[np.int8] | int,
    zp: int,
    lo: int,
    hi: int,
    rounding: str,
) -> Codes:
    """Requantise an accumulator; `bias`, `m` and `s` broadcast along its last axis."""
    # The sum wraps at 32 bits, as the contract's int32(acc + bias) does.
    total = (np.asarray(acc, np.int64) + np.asarray(bias, np.int64)).astype(np.int32)
    wide = total.astype(np.int64) * np.asarray(m, dtype=np.int64)
    return finish(wide, np.asarray(s, np.int64), zp, lo, hi, rounding)


def quantize(x: npt.NDArray[np.floating], scale: float, zero: int, low: int | None = None) -> Codes:
    """Return the codes of `x`: float32 division, half to even, saturating.

    The least code is `low`; by default -127 for zero point 0, else -128.

    Raises:
        ValueError: a value is not a number.
    """
    ratio = np.asarray(x, dtype=np.float32) / np.float32(scale)
    if np.isnan(ratio).any():
        raise ValueError("a value to be quantised is not a number")
    least = low if low is not None else -127 if zero == 0 else -128
    # Clipped before the conversion too: infinities have no integer.
    rounded = np.clip(np.rint(ratio), -1024.0, 1024.0).astype(np.int32) + zero
    return np.clip(rounded, least, 127).astype(np.int8)


def dequantize(q: Codes, scale: float, zero: int) -> npt.NDArray[np.float32]:
    """Return the real values of codes, float32."""
    return (q.astype(np.int32) - zero).astype(np.float32) * np.float32(scale)


def exact_product(a: Codes, b: Codes) -> Acc:
    """Return `a[M, K] @ b[K, N]` exactly as int32 (`b` holds -127..127 if K > 1023)."""
    left, right = a.astype(np.float32), b.astype(np.float32)
    return _exact_float_product(left, right)


def _exact_float_product(left: npt.NDArray[np.float32], right: npt.NDArray[np.float32]) -> Acc:
    depth = left.shape[1]
    total = (left[:, :EXACT_K] @ right[:EXACT_K]).astype(np.int32)
    for start in range(EXACT_K, depth, EXACT_K):
        total += (left[:, start : start + EXACT_K] @ right[start : start + EXACT_K]).astype(
            np.int32
        )
    return total


def pad_image(x: Codes, pads: Sequence[int], code: int) -> Codes:
    """Return an NHWC image with `[top, left, bottom, right]` rows and columns of `code` around."""
    top, left, bottom, right = pads
    if not any(pads):
        return x
    widths = ((0, 0), (top, bottom), (left, right), (0, 0))
    return np.pad(x, widths, constant_values=np.int8(code))


def conv(
    x: Codes,
    w: Codes,
    *,
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    group: int,
    pad_code: int,
) -> Acc:
    """Return the int32 sums `[N, OH, OW, O]` of an NHWC input and OIHW weights.

    The codes are summed as stored; padded positions hold `pad_code` (the zero point), whose share
    the bias takes back.
    """
    padded = pad_image(x, pads, pad_code)
    out, inner, kh, kw = w.shape
    n, height, width, channels = padded.shape
    oh = (height - (kh - 1) * dilations[0] - 1) // strides[0] + 1
    ow = (width - (kw - 1) * dilations[1] - 1) // strides[1] + 1
    if inner == 1 and group == channels:
        return _depthwise(padded, w, (oh, ow), strides, dilations)
    result = np.empty((n, oh, ow, out), dtype=np.int32)
    per_out = out // group
    for g in range(group):
        source = padded[..., g * inner : (g + 1) * inner]
        weight = w[g * per_out : (g + 1) * per_out].transpose(2, 3, 1, 0)
        matrix = weight.reshape(kh * kw * inner, per_out).astype(np.float32)
        target = result[..., g * per_out : (g + 1) * per_out]
        rows = max(1, BLOCK_ELEMENTS // (n * ow * matrix.shape[0]))
        for row in range(0, oh, rows):
            count = min(rows, oh - row)
            columns = _unfold(source, (kh, kw), (row, count), ow, strides, dilations)
            sums = _exact_float_product(columns, matrix)
            target[:, row : row + count] = sums.reshape(n, count, ow, per_out)
    return result


def _unfold(
    x: Codes,
    kernel: tuple[int, int],
    rows: tuple[int, int],
    ow: int,
    strides: Sequence[int],
    dilations: Sequence[int],
) -> npt.NDArray[np.float32]:
    """Return float32 `[N * rows * OW, KH * KW * C]`, the window of each output position."""
    first, count = rows
    n, _, _, channels = x.shape
    kh, kw = kernel
    columns = np.empty((n, count, ow, kh, kw, channels), dtype=np.float32)
    for i in range(kh):
        for j in range(kw):
            columns[:, :, :, i, j] = _shifted(x, i, j, (first, count), ow, strides, dilations)
    return columns.reshape(n * count * ow, kh * kw * channels)


def _shifted(
    x: npt.NDArray[_T],
    i: int,
    j: int,
    rows: tuple[int, int],
    ow: int,
    strides: Sequence[int],
    dilations: Sequence[int],
) -> npt.NDArray[_T]:
    """Return the NHWC element each output position meets at kernel row `i`, column `j`."""
    first, count = rows
    top = first * strides[0] + i * dilations[0]
    left = j * dilations[1]
    return x[
        :,
        top : top + (count - 1) * strides[0] + 1 : strides[0],
        left : left + (ow - 1) * strides[1] + 1 : strides[1],
    ]


def _depthwise(
    x: Codes,
    w: Codes,
    size: tuple[int, int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> Acc:
    out, _, kh, kw = w.shape
    n, _, _, channels = x.shape
    oh, ow = size
    multiplier = out // channels
    source = x.astype(np.int32)
    weight = w.reshape(channels, multiplier, kh, kw).astype(np.int32)
    total = np.zeros((n, oh, ow, channels, multiplier), dtype=np.int32)
    for i in range(kh):
        for j in range(kw):
            patch = _shifted(source, i, j, (0, oh), ow, strides, dilations)
            total += patch[..., None] * weight[:, :, i, j]
    return total.reshape(n, oh, ow, out)


def windows_sum(
    x: Codes, kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int], pad_code: int
) -> Acc:
    """Return the int32 sum of the codes of each window of an NHWC image."""
    padded = pad_image(x, pads, pad_code).astype(np.int32)
    oh = (padded.shape[1] - kernel[0]) // strides[0] + 1
    ow = (padded.shape[2] - kernel[1]) // strides[1] + 1
    if (oh, ow) == (1, 1):
        inside = padded[:, : kernel[0], : kernel[1]]
        return inside.sum(axis=(1, 2), keepdims=True, dtype=np.int32)
    total = np.zeros((x.shape[0], oh, ow, x.shape[3]), dtype=np.int32)
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            total += _shifted(padded, i, j, (0, oh), ow, strides, (1, 1))
    return total


def max_pool(
    x: Codes,
    kernel: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    size: tuple[int, int],
) -> Codes:
    """Return the maximum of each window of an NHWC image; padding, and what lies behind, is -128.

    `size` is the output's height and width, which with ceil mode reaches past the padding.
    """
    oh, ow = size
    need = [
        (count - 1) * stride + (k - 1) * dilation + 1
        for count, stride, k, dilation in zip(size, strides, kernel, dilations, strict=True)
    ]
    top, left, bottom, right = pads
    bottom = max(bottom, need[0] - x.shape[1] - top)
    right = max(right, need[1] - x.shape[2] - left)
    padded = pad_image(x, (top, left, bottom, right), -128)
    best = np.full((x.shape[0], oh, ow, x.shape[3]), -128, dtype=np.int8)
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            np.maximum(best, _shifted(padded, i, j, (0, oh), ow, strides, dilations), out=best)
    return best


def interpolate(
    x: Codes, zero: int, table_y: npt.NDArray[np.int16], table_x: npt.NDArray[np.int16]
) -> Wide:
    """Return `sum (a - za) * wy * wx` over two rows and two columns of an NHWC image."""
    centred = x.astype(np.int64) - zero
    ty, tx = table_y.astype(np.int64), table_x.astype(np.int64)
    column = (slice(None), None, None)
    rows = centred[:, ty[:, 0]] * ty[:, 2][column] + centred[:, ty[:, 1]] * ty[:, 3][column]
    across = (slice(None), None)
    return rows[:, :, tx[:, 0]] * tx[:, 2][across] + rows[:, :, tx[:, 1]] * tx[:, 3][across]
