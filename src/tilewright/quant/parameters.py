"""Integer parameters of quantised operations, worked out from float scales and real weights.

`docs/concepts/numerics.md` is the contract: scale of a threshold, encoding of a real multiplier,
per-channel weights with
dead channels and overflowing biases, the overflow proof, and what truncating targets need.
Everything here runs at compile time in float64; what comes out is exact integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import TilewrightError

QMAX = 127
"""Largest code of a symmetric quantiser; the smallest it produces is -127."""

BIAS_LIMIT = 2**30
"""Stored biases stay below this magnitude, so that accumulator plus bias has head room."""

SMALLEST_SCALE = 2.0**-126
"""Scales below the smallest normal float32 are of no use."""


def lift(zero_point: int) -> int:
    """Return the whole output steps added before a truncating shift: `B` of the contract less 1/2.

    The least code lies `128 + zero_point` steps below real zero, and sums may round to any code.
    """
    return 128 + max(zero_point, 0)


MAX_COMPENSATED_SHIFT = 54
"""`511 * 2^(s-1)` and the products beside it stay inside int64 up to this shift."""

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def threshold_of(low: float, high: float) -> float:
    """Return the largest magnitude of a range."""
    return max(abs(float(low)), abs(float(high)))


def scale_of(threshold: float) -> float:
    """Return the scale of a symmetric int8 quantiser: `threshold / 127`.

    A threshold of zero (a tensor that was always zero) gives 1/127, since any scale represents
    zero.

    Raises:
        TilewrightError: E0304, the threshold is negative or not finite.
    """
    if not math.isfinite(threshold) or threshold < 0:
        raise TilewrightError(
            "E0304", f"a quantisation threshold must be finite and positive, not {threshold!r}"
        )
    scale = threshold / QMAX
    return scale if scale >= SMALLEST_SCALE else 1.0 / QMAX


def encode_multiplier(real: float, max_shift: int = 62) -> tuple[int, int]:
    """Return `(m, s)`, `m = round(real * 2^s)` the largest below 2^31 with `s <= max_shift`.

    Raises:
        TilewrightError: E0304, `real` is negative, not finite, or at least 2^31.
    """
    m, s = encode_multipliers(np.array([real], dtype=np.float64), max_shift)
    return int(m[0]), int(s[0])


def encode_multipliers(real: FloatArray, max_shift: int = 62) -> tuple[IntArray, IntArray]:
    """Encode an array of real multipliers; see `encode_multiplier`."""
    values = np.asarray(real, dtype=np.float64)
    if not np.all(np.isfinite(values)) or np.any(values < 0) or np.any(values >= 2.0**31):
        bad = values[~(np.isfinite(values) & (values >= 0) & (values < 2.0**31))]
        raise TilewrightError(
            "E0304",
            f"a requantising multiplier must be at least 0 and below 2^31, not {float(bad[0])!r}",
            hint="the scales on both sides of the layer differ too much",
        )
    _, exponent = np.frexp(values)
    shift = np.minimum(31 - exponent.astype(np.int64), max_shift)
    # Scaling by a power of two is exact, so this is one rounding (half to even).
    m = np.rint(np.ldexp(values, shift)).astype(np.int64)
    over = m == 2**31
    shift = np.where(over, shift - 1, shift)
    if np.any(shift < 0):
        raise TilewrightError("E0304", "a requantising multiplier rounds to 2^31")
    m = np.where(over, 2**30, m)
    return m, np.where(values == 0, 0, shift)


def output_bounds(
    scale: float,
    zero_point: int,
    clamp_min: float | None = None,
    clamp_max: float | None = None,
    full: bool = False,
) -> tuple[int, int]:
    """Return the code bounds `lo, hi` that apply a fused float clamp.

    Without a clamp the bounds are -127..127 when the zero point is 0 (unless `full`: scales that a
    model gives have all codes) and -128..127 otherwise. A bound is the code of its real value, as
    quantising (float32 division, half to even) gives it: rounding is monotonic, so that clamping
    codes is clamping before they are rounded.
    """
    least = -QMAX if zero_point == 0 and not full else -128

    def code(bound: float | None, missing: int) -> int:
        if bound is None or not math.isfinite(bound):
            return missing
        with np.errstate(over="ignore"):
            steps = float(np.rint(np.float32(bound) / np.float32(scale)))
        return int(min(max(steps + zero_point, least), QMAX))

    low, high = code(clamp_min, least), code(clamp_max, QMAX)
    return low, max(low, high)


@dataclass(frozen=True)
class ScalarParameters:
    """Shift, wide bias and stored zero point of an op that rounds one fixed-point sum."""

    multipliers: tuple[int, ...]
    """One `m` (0..2^31-1) an operand, all with the same shift."""
    shift: int
    bias: int
    bias_shift: int
    zp: int
    """Zero point added after the shift: the output's, minus 128 on truncating targets."""


def scalar_parameters(
    ratios: tuple[float, ...], zero_point: int, rounding: str
) -> ScalarParameters:
    """Encode the scale ratios (operand over result) of add, sub, mul, requantize or resize.

    The common shift is that of the largest ratio. On truncating targets `lift + 1/2` output steps
    (`257 * 2^(s-1)` for zero point 0) are added before the shift and the stored zero point is
    `lift` less, which makes truncation round half up exactly.
    """
    truncating = rounding == "truncate"
    largest = max(ratios)
    m, shift = encode_multiplier(largest, MAX_COMPENSATED_SHIFT if truncating else 62)
    if largest == 0:
        shift = 1
    multipliers = tuple(min(round(math.ldexp(ratio, shift)), 2**31 - 1) for ratio in ratios)
    assert max(multipliers) == m or largest == 0
    if truncating and shift > 0:
        up = lift(zero_point)
        return ScalarParameters(multipliers, shift, 2 * up + 1, shift - 1, zero_point - up)
    # Without a shift nothing is rounded, so there is nothing to make up for.
    return ScalarParameters(multipliers, shift, 0, 0, zero_point)


@dataclass(frozen=True)
class PoolParameters:
    """Requantising parameters of an average pool or an activation-by-activation product."""

    mult: int
    shift: int
    bias: int
    zp: int


def pool_parameters(
    layer: str, ratio: float, window: int, zero_in: int, zero_out: int, rounding: str
) -> PoolParameters:
    """Encode `ratio` (input scale over output scale over window size) for a sum of `window` codes.

    Raises:
        TilewrightError: E0302, the sum or the bias could overflow int32.
    """
    m, s = encode_multiplier(ratio)
    bias = -zero_in * window
    zp = zero_out
    if rounding == "truncate" and s > 0:
        bias += truncation_term(layer, m, s, zero_out)
        zp -= lift(zero_out)
    if window * 128 + abs(bias) >= 2**31:
        raise TilewrightError(
            "E0302",
            f'the sum of "{layer}" could overflow 32 bits',
            details=[f"{window} codes of up to 128, plus {bias}"],
        )
    return PoolParameters(m, s, bias, zp)


def truncation_term(layer: str, m: int, s: int, zero_point: int) -> int:
    """Return `round((lift + 1/2) * 2^s / m)`, what a truncating target adds to a bias.

    Raises:
        TilewrightError: E0302, the term does not fit 32 bits.
    """
    twice = 2 * lift(zero_point) + 1
    if m == 0 or (twice << s) // (2 * m) >= 2**31 - 1:
        raise TilewrightError(
            "E0302",
            f'"{layer}" cannot be rounded properly on a truncating target',
            details=[f"multiplier {m} / 2^{s} is too small for a 32-bit bias"],
        )
    return (twice * 2**s + m) // (2 * m)


@dataclass(frozen=True)
class ChannelParameters:
    """Integer weights and per-channel requantisation of a convolution or a linear layer."""

    weight: npt.NDArray[np.int8]
    """Codes -127..127, shape of the float weight (output channel first)."""
    bias: npt.NDArray[np.int32]
    """Per channel; input zero point and truncation term are folded in."""
    mult: npt.NDArray[np.int32]
    shift: npt.NDArray[np.int8]
    scale: npt.NDArray[np.float32]
    """Weight scale per channel (for reports; the arithmetic does not need it)."""
    zp: int
    """Zero point added after the shift."""
    dead: tuple[int, ...]
    """Channels whose weights are all zero or too small to be represented."""
    raised: tuple[int, ...]
    """Channels whose scale was raised so that the bias fits."""


def weight_scales(weight: FloatArray, qmax: int = QMAX) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """Return per-channel scales `max|w| / qmax` of `weight[O, ...]` and the dead channels' mask.

    A dead channel gets the smallest useful scale of the layer (0 if there is none).
    """
    flat = np.abs(np.asarray(weight, dtype=np.float64)).reshape(weight.shape[0], -1)
    scales = (flat.max(axis=1) if flat.shape[1] else np.zeros(weight.shape[0])) / qmax
    dead = scales < SMALLEST_SCALE
    if not dead.all():
        scales[dead] = scales[~dead].min()
    else:
        scales[:] = 0.0
    return scales, dead


def quantise_channels(
    layer: str,
    weight: npt.NDArray[np.floating],
    bias: npt.NDArray[np.floating] | None,
    *,
    input_scale: float,
    input_zero: int,
    output_scale: float,
    output_zero: int,
    rounding: str,
    input_mean: npt.NDArray[np.floating] | None = None,
    group: int = 1,
    qmax: int = QMAX,
    given: npt.NDArray[np.floating] | None = None,
    clip: bool = False,
    input_square: npt.NDArray[np.floating] | None = None,
    given_bias: tuple[npt.NDArray[np.int64], FloatArray] | None = None,
) -> ChannelParameters:
    """Quantise float `weight[O, ...]` per output channel, and its bias, for given scales.

    With `input_mean`, the mean of every input channel, the bias takes back the mean error that
    rounding the weights makes: `bias -= sum((q * scale - w) * mean)`. (At zero padding the mean is
    less; the correction is that of the interior.)

    Codes are `-qmax..qmax`. `given`, one scale a channel, takes the place of `max|w| / qmax`; with
    `clip` each scale is searched for the least squared error of its channel, weighted by
    `input_square`, the mean square of every input channel, where that is known. With `given` codes
    reach -128 (the model's own may). `given_bias` are codes of the bias and their scales, which are
    kept where the scale is that of the accumulator.

    Raises:
        TilewrightError: E0304, weights or biases are not finite; E0302, an accumulator could
        overflow.
    """
    real = np.asarray(weight, dtype=np.float64)
    channels = real.shape[0]
    real_bias = np.zeros(channels) if bias is None else np.asarray(bias, np.float64).reshape(-1)
    if not np.isfinite(real).all() or not np.isfinite(real_bias).all():
        raise TilewrightError("E0304", f'weights or biases of "{layer}" are not finite')
    scales, dead = weight_scales(real, qmax)
    if given is not None:
        scales = np.asarray(given, np.float64).reshape(channels).copy()
        dead = np.zeros(channels, dtype=np.bool_)
    elif clip and not dead.all():
        scales = clipped_scales(real, scales, qmax, input_square, group)
    if dead.all():
        # Nothing but biases: any scale will do that keeps them to a fraction of an output step.
        scales[:] = max(output_scale / input_scale * 2.0**-16, SMALLEST_SCALE)

    truncating = rounding == "truncate"
    steps = (lift(output_zero) + 0.5) * output_scale if truncating else 0.0
    float_bias = real_bias
    raised = np.zeros(channels, dtype=np.bool_)
    lowest = -qmax if given is None or qmax != QMAX else -QMAX - 1
    codes = _round_codes(real, scales, qmax, lowest)
    for _ in range(4):
        shifted = abs(input_zero) * np.abs(codes).reshape(channels, -1).sum(axis=1, dtype=np.int64)
        room = BIAS_LIMIT - 4096 - shifted
        if (room <= 0).any():
            raise _overflow(layer, int(np.argmin(room)), "the input's zero point fills the bias")
        real_bias = float_bias - _mean_error(real, codes, scales, input_mean, group)
        least = (np.abs(real_bias) + steps) / (input_scale * room)
        low = least > scales
        if not low.any():
            break
        raised |= low
        scales = np.where(low, least * (1 + 2.0**-20), scales)
        codes = _round_codes(real, scales, qmax, lowest)

    m, s = encode_multipliers(input_scale * scales / output_scale)
    flat = codes.reshape(channels, -1).astype(np.int64)
    integer_bias = np.rint(real_bias / (input_scale * scales)).astype(np.int64)
    if given_bias is not None:
        kept = np.abs(given_bias[1] - input_scale * scales) <= 1e-6 * given_bias[1]
        integer_bias = np.where(kept, given_bias[0], integer_bias)
    integer_bias -= input_zero * flat.sum(axis=1)
    zp = output_zero
    if truncating:
        integer_bias += np.array(
            [
                truncation_term(layer, int(a), int(b), output_zero)
                for a, b in zip(m, s, strict=True)
            ],
            dtype=np.int64,
        )
        zp -= lift(output_zero)
    prove_accumulator(layer, flat, integer_bias)
    return ChannelParameters(
        weight=codes.astype(np.int8),
        bias=integer_bias.astype(np.int32),
        mult=m.astype(np.int32),
        shift=s.astype(np.int8),
        scale=scales.astype(np.float32),
        zp=zp,
        dead=tuple(int(c) for c in np.flatnonzero(dead)),
        raised=tuple(int(c) for c in np.flatnonzero(raised)),
    )


def _mean_error(
    real: FloatArray,
    codes: IntArray,
    scales: FloatArray,
    mean: npt.NDArray[np.floating] | None,
    group: int,
) -> FloatArray:
    """Return the mean of each output channel's error that comes from rounding the weights."""
    channels = real.shape[0]
    if mean is None or real.ndim < 2 or mean.shape != (real.shape[1] * group,):
        return np.zeros(channels)
    error = codes * scales.reshape(-1, *([1] * (real.ndim - 1))) - real
    summed = error.reshape(channels, real.shape[1], -1).sum(axis=2)
    grouped = summed.reshape(group, channels // group, real.shape[1])
    means = np.asarray(mean, np.float64).reshape(group, real.shape[1], 1)
    return (grouped @ means).reshape(channels)


def _round_codes(
    real: FloatArray, scales: FloatArray, qmax: int = QMAX, lowest: int | None = None
) -> npt.NDArray[np.int64]:
    low = -qmax if lowest is None else lowest
    column = scales.reshape(-1, *([1] * (real.ndim - 1)))
    return np.clip(np.rint(real / column), low, qmax).astype(np.int64)


CLIP_CANDIDATES = np.linspace(1.0, 0.4, 31)
"""Shares of a channel's largest weight that the search for its scale tries."""


def clipped_scales(
    real: FloatArray,
    scales: FloatArray,
    qmax: int,
    square: npt.NDArray[np.floating] | None,
    group: int,
) -> FloatArray:
    """Return for every channel the scale, at most `scales`, of least squared rounding error.

    The error of a weight is weighted by the mean square of the input channel it multiplies.
    """
    channels = real.shape[0]
    flat = real.reshape(channels, -1)
    cost = np.ones_like(flat)
    if square is not None and real.ndim >= 2 and square.shape == (real.shape[1] * group,):
        owner = np.arange(channels) // max(1, channels // group)
        rows = np.asarray(square, np.float64).reshape(group, real.shape[1])[owner]
        cost = np.repeat(rows, flat.shape[1] // real.shape[1], axis=1)
    best, least = scales.copy(), np.full(channels, math.inf)
    for share in CLIP_CANDIDATES:
        step = scales * share
        codes = _round_codes(flat, step, qmax)
        error = ((codes * step[:, None] - flat) ** 2 * cost).sum(axis=1)
        better = error < least
        best[better], least[better] = step[better], error[better]
    return best


def _overflow(layer: str, channel: int, why: str) -> TilewrightError:
    return TilewrightError(
        "E0302",
        f'the accumulator of "{layer}" could overflow 32 bits',
        details=[f"output channel {channel}: {why}"],
        hint="reduce the number of products a channel sums, or coarsen the layer's weights",
    )


def accumulator_bounds(codes: IntArray) -> tuple[IntArray, IntArray]:
    """Return the least and greatest sum of `codes[O, K]` with any input codes -128..127.

    Every partial sum, in any order, lies within these bounds too.
    """
    positive = np.where(codes > 0, codes, 0).sum(axis=1, dtype=np.int64)
    negative = np.where(codes < 0, -codes, 0).sum(axis=1, dtype=np.int64)
    return -128 * positive - 127 * negative, 127 * positive + 128 * negative


def prove_accumulator(layer: str, codes: IntArray, bias: IntArray) -> None:
    """Prove from the real weights that accumulator and accumulator plus bias stay in int32.

    Raises:
        TilewrightError: E0302, with the layer and channel that could overflow.
    """
    low, high = accumulator_bounds(codes)
    least = np.minimum(np.minimum(low, low + bias), bias)
    greatest = np.maximum(np.maximum(high, high + bias), bias)
    bad = (least < -(2**31)) | (greatest > 2**31 - 1)
    if bad.any():
        channel = int(np.flatnonzero(bad)[0])
        raise _overflow(
            layer, channel, f"sums reach {int(least[channel])}..{int(greatest[channel])}"
        )
