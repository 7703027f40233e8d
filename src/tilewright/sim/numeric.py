"""Integer and float arithmetic of the machine: rounding shifts, saturation, float functions.

Written for the simulators alone: they check the compiler's other levels and share no
code with them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


def shift_round(value: I64, shift: I64, rounding: str) -> I64:
    """Shift right with rounding; `value` is overwritten.

    Args:
        value: int64, magnitude below 2^62.
        shift: 0..62, broadcast against `value`.
        rounding: as in docs/concepts/numerics.md.
    """
    # All four are one floor shift after adding a constant that depends on the sign or parity; a
    # shift by zero adds nothing.
    half = (np.int64(1) << shift) >> 1
    if rounding == "half_up":
        value += half
    elif rounding == "half_away":
        # A negative tie must go down: one less than half, so that the floor does.
        value += (value >> 63) * np.minimum(half, 1)
        value += half
    elif rounding == "half_even":
        # A tie goes up from an odd quotient only.
        one = np.minimum(half, 1)
        odd = (value >> shift) & one
        value += half - one
        value += odd
    elif rounding == "truncate":
        # A negative value is floored after adding all but one of the divisor: a ceiling.
        value += (value >> 63) & ((np.int64(1) << shift) - 1)
    else:
        raise ValueError(f"unknown rounding {rounding!r}")
    value >>= shift
    return value


def scale_codes(
    value: I64, shift: I64, rounding: str, zero: int, low: int, high: int
) -> npt.NDArray[np.int8]:
    """Return `clamp(rshift(value, shift) + zero, low, high)` as codes; `value` is overwritten."""
    result = shift_round(value, shift, rounding)
    result += zero
    # Not np.clip: its own checks cost more than the clamping of a small tile.
    np.maximum(result, low, out=result)
    np.minimum(result, high, out=result)
    return result.astype(np.int8)


def saturate32(value: I64) -> npt.NDArray[np.int32]:
    """Clamp to int32."""
    return np.clip(value, INT32_MIN, INT32_MAX).astype(np.int32)


def _erf(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Abramowitz and Stegun 7.1.26; absolute error below 1.5e-7, far below an fp16 step."""
    t = 1.0 / (1.0 + 0.3275911 * np.abs(x))
    poly = t * (
        0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    )
    return np.sign(x) * (1.0 - poly * np.exp(-x * x))


def _sigmoid(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def _hard_sigmoid(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.clip(x / 6.0 + 0.5, 0.0, 1.0)


_Function = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]
_FUNCTIONS: dict[str, _Function] = {
    "none": lambda x: x,
    "hard_sigmoid": _hard_sigmoid,
    "hard_swish": lambda x: x * _hard_sigmoid(x),
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "tanh": np.tanh,
    "gelu": lambda x: 0.5 * x * (1.0 + _erf(x / np.sqrt(2.0))),
    "exp": np.exp,
    "reciprocal": lambda x: 1.0 / x,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "sqrt": np.sqrt,
}


def float_function(name: str, value: F32) -> F32:
    """Apply a function of the vector unit; computed in float64, rounded once to float32."""
    if name == "none":
        return value
    with np.errstate(all="ignore"):  # The caller refuses results that are not finite.
        return _FUNCTIONS[name](value.astype(np.float64)).astype(np.float32)
