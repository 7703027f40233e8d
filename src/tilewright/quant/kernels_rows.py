"""Exact integer softmax and layer normalisation of rows, in plain numpy: the reference.

As `quant/kernels.py` is for the other operations: these define what the quantised graph means
(`docs/concepts/numerics.md`, "Rows"), and share no code with the other oracles.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.int8]
Wide = npt.NDArray[np.int64]


def bit_length(value: Wide) -> Wide:
    """Return the number of bits of positive integers below 2^53."""
    _, exponent = np.frexp(value.astype(np.float64))
    return exponent.astype(np.int64)


def reciprocal(mult: int, divisor: Wide) -> Wide:
    """Return `min(65535, floor(mult * 2^32 / divisor))` for `2^31 <= divisor < 2^32`."""
    return np.minimum(65535, (np.int64(mult) << np.int64(32)) // divisor)


def softmax(
    q: Codes, table: npt.NDArray[np.int16], mult: int, shift: int, zp: int, lo: int, hi: int
) -> Codes:
    """Return the softmax of every row of `q[..., n]`; entries of the table are unsigned."""
    wide = q.astype(np.int64)
    power = table.view(np.uint16).astype(np.int64)[wide.max(axis=-1, keepdims=True) - wide]
    total = power.sum(axis=-1, keepdims=True)
    bits = bit_length(total)
    scale = reciprocal(mult, total << (32 - bits))
    amount = bits + shift
    result = (power * scale + (np.int64(1) << (amount - 1))) >> amount
    return np.clip(result + zp, lo, hi).astype(np.int8)


def layer_norm(
    q: Codes,
    gain: npt.NDArray[np.int16],
    bias: npt.NDArray[np.int32],
    epsilon: int,
    shift: int,
    zp: int,
    lo: int,
    hi: int,
) -> Codes:
    """Return the normalised rows of `q[..., n]`, scaled and shifted by element, as codes."""
    wide = q.astype(np.int64)
    count = wide.shape[-1]
    total = wide.sum(axis=-1, keepdims=True)
    squares = (wide * wide).sum(axis=-1, keepdims=True)
    spread = ((count * squares - total * total) << np.int64(8)) + epsilon
    bits = bit_length(spread)
    bits += bits & 1
    normal = np.where(
        bits <= 32, spread << (32 - np.minimum(bits, 32)), spread >> np.maximum(bits - 32, 0)
    )
    root = np.vectorize(math.isqrt, otypes=[np.int64])(normal)
    scale = reciprocal(2**15, root << np.int64(16))
    normalised = ((count * wide - total) * scale) >> np.maximum((bits >> 1) - 4, 0)
    result = (normalised * gain.astype(np.int64) + bias.astype(np.int64)) >> np.int64(shift)
    return np.clip(result + zp, lo, hi).astype(np.int8)
