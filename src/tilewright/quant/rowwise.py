"""Integer parameters of softmax and layer normalisation, worked out in float64 at compile time.

`docs/concepts/numerics.md`, "Rows", is the contract.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import TilewrightError
from tilewright.dialects._quant_rows import MAX_ROW

TABLE_UNIT = 65535
"""What the exponential of zero is stored as."""

VARIANCE_UNIT = 2**8
"""What a variance of one (times the squared length of the row) is as an integer."""

MAX_EPSILON = 2**50
"""Beyond it epsilon drowns every variance that codes can have."""

GAIN_BITS = 15
"""Fractional bits of a normalised element; those of the gain are that many less."""

MAX_ROW_SHIFT = 31
"""Largest final shift of a layer normalisation."""


def exponential_table(input_scale: float) -> npt.NDArray[np.int16]:
    """Return the 256 entries `round(65535 * exp(-d * input_scale))`.

    They are unsigned; their bits are stored as int16, as all levels know no unsigned types.
    """
    steps = np.arange(256, dtype=np.float64)
    return np.rint(TABLE_UNIT * np.exp(-steps * input_scale)).astype(np.uint16).view(np.int16)


def softmax_multiplier(output_scale: float) -> tuple[int, int]:
    """Return `(m, s)` with `1 / output_scale = m / 2^s` to 15 bits, `0 <= s <= 15`.

    Raises:
        TilewrightError: E0304, no such pair exists.
    """
    fraction, exponent = math.frexp(1.0 / output_scale)
    mult, shift = round(math.ldexp(fraction, 15)), 15 - exponent
    if mult == 2**15:
        mult, shift = 2**14, shift - 1
    if not 0 <= shift <= 15:
        raise TilewrightError(
            "E0304",
            f"a softmax whose result has scale {output_scale:.6g} has no integer form",
            [f"legal are scales from 2^-14 to 1; probabilities of 8 bits want {1 / 256:.6g}"],
        )
    return mult, shift


@dataclass(frozen=True)
class LayerNormParameters:
    """Epsilon, shift and the arrays of a layer normalisation."""

    epsilon: int
    shift: int
    gain: npt.NDArray[np.int16]
    """For every element of a row, -32767..32767."""
    bias: npt.NDArray[np.int32]
    """For every element of a row; half a unit of the shift is in it, so that it rounds half up."""


def layer_norm_refusal(
    row: int, epsilon: float, input_scale: float, steps: float, offset: float
) -> str | None:
    """Return why a layer normalisation has no integer form, or None.

    Args:
        row: elements of a row.
        epsilon: as the model has it.
        input_scale: of its codes.
        steps: largest `abs(gamma) / output_scale`.
        offset: largest `abs(beta) / output_scale`.
    """
    if row > MAX_ROW:
        return f"its rows have {row} elements; the chip normalises {MAX_ROW}"
    if VARIANCE_UNIT * row**2 * epsilon / input_scale**2 > MAX_EPSILON:
        return f"its epsilon {epsilon:g} is larger than any variance of its codes"
    if _shift(steps, offset) < 1:
        return "its scale or bias is too large for its result's range"
    return None


def _shift(steps: float, offset: float) -> int:
    for shift in range(MAX_ROW_SHIFT, 0, -1):
        gain = math.ldexp(steps, shift - GAIN_BITS)
        bias = math.ldexp(offset, shift) + 2 ** (shift - 1)
        if round(gain) <= 32767 and bias + 1 < 2**31:
            return shift
    return 0


def layer_norm_parameters(
    layer: str,
    gamma: npt.NDArray[np.floating],
    beta: npt.NDArray[np.floating],
    *,
    epsilon: float,
    input_scale: float,
    output_scale: float,
) -> LayerNormParameters:
    """Encode a layer normalisation; `gamma` and `beta` have one value an element of a row.

    Raises:
        TilewrightError: E0304, a value is not finite or there is no integer form.
    """
    scale = np.asarray(gamma, np.float64).reshape(-1) / output_scale
    offset = np.asarray(beta, np.float64).reshape(-1) / output_scale
    if not np.isfinite(scale).all() or not np.isfinite(offset).all():
        raise TilewrightError("E0304", f'scale or bias of "{layer}" is not finite')
    steps, farthest = float(np.abs(scale).max()), float(np.abs(offset).max())
    reason = layer_norm_refusal(scale.size, epsilon, input_scale, steps, farthest)
    if reason is not None:
        raise TilewrightError("E0304", f'"{layer}" has no integer form', [reason])
    shift = _shift(steps, farthest)
    return LayerNormParameters(
        epsilon=max(1, round(VARIANCE_UNIT * scale.size**2 * epsilon / input_scale**2)),
        shift=shift,
        gain=np.rint(np.ldexp(scale, shift - GAIN_BITS)).astype(np.int16),
        bias=(np.rint(np.ldexp(offset, shift)) + 2 ** (shift - 1)).astype(np.int32),
    )
