"""The arithmetic of the contract against exact Python integers and naive loops."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.quant import kernels
from tilewright.quant.parameters import (
    encode_multiplier,
    prove_accumulator,
    quantise_channels,
    scalar_parameters,
)

ROUNDINGS = ("half_up", "half_away", "half_even", "truncate")


def exact_round(value: Fraction, rounding: str) -> int:
    """Round a fraction as the contract's table says, with unbounded integers."""
    if rounding == "half_up":
        return floor(value + Fraction(1, 2))
    if rounding == "half_even":
        return round(value)
    sign = -1 if value < 0 else 1
    if rounding == "half_away":
        return sign * floor(abs(value) + Fraction(1, 2))
    return sign * floor(abs(value))


@st.composite
def shifted(draw: st.DrawFn) -> tuple[int, int]:
    """Draw a value and a shift, often near a tie."""
    s = draw(st.integers(0, 62))
    if draw(st.booleans()):
        half = 1 << max(s - 1, 0)
        near = draw(st.integers(-(2**61) >> s, 2**61 >> s)) * (1 << s) + half
        return max(min(near + draw(st.integers(-1, 1)), 2**62 - 1), -(2**62)), s
    return draw(st.integers(-(2**62), 2**62 - 1)), s


@given(shifted(), st.sampled_from(ROUNDINGS))
@settings(max_examples=600, deadline=None)
def test_rshift_is_exact(case: tuple[int, int], rounding: str) -> None:
    v, s = case
    got = int(kernels.rshift(np.array([v], np.int64), s, rounding)[0])
    assert got == (v if s == 0 else exact_round(Fraction(v, 1 << s), rounding))


@given(
    st.integers(-(2**31), 2**31 - 1),
    st.integers(-(2**31), 2**31 - 1),
    st.integers(0, 2**31 - 1),
    st.integers(0, 62),
    st.integers(-256, 127),
    st.sampled_from(ROUNDINGS),
)
@settings(max_examples=300, deadline=None)
def test_requant_is_exact_and_wraps(
    acc: int, bias: int, m: int, s: int, zp: int, rounding: str
) -> None:
    total = (acc + bias + 2**31) % 2**32 - 2**31
    v = total * m
    y = (v if s == 0 else exact_round(Fraction(v, 1 << s), rounding)) + zp
    got = kernels.requant(np.array([acc], np.int32), bias, m, s, zp, -127, 127, rounding)
    assert int(got[0]) == max(-127, min(127, y))


@given(
    st.lists(st.integers(-(2**29), 2**29), min_size=2, max_size=40),
    st.integers(0, 2**31 - 1),
    st.integers(0, 62),
    st.sampled_from(ROUNDINGS),
)
@settings(max_examples=200, deadline=None)
def test_requant_is_monotone(values: list[int], m: int, s: int, rounding: str) -> None:
    acc = np.sort(np.array(values, np.int32))
    got = kernels.requant(acc, 0, m, s, 0, -127, 127, rounding).astype(int)
    assert (np.diff(got) >= 0).all()


@given(st.floats(2.0**-30, 2.0**30, allow_nan=False))
@settings(max_examples=400, deadline=None)
def test_multiplier_has_31_significant_bits(real: float) -> None:
    m, s = encode_multiplier(real)
    assert 2**30 <= m < 2**31
    assert 0 <= s <= 62
    assert abs(Fraction(m, 1 << s) - Fraction(real)) <= Fraction(1, 1 << (s + 1))


@given(st.floats(0, 2.0**-31, allow_nan=False))
@settings(max_examples=200, deadline=None)
def test_small_multipliers_stop_at_shift_62(real: float) -> None:
    m, s = encode_multiplier(real)
    if m:
        assert s <= 62
        assert abs(Fraction(m, 1 << s) - Fraction(real)) <= Fraction(1, 1 << (s + 1))
    else:
        assert Fraction(real) <= Fraction(1, 1 << 63)


@given(
    st.floats(2.0**-20, 2.0**8),
    st.floats(2.0**-20, 2.0**8),
    st.lists(st.tuples(st.integers(-128, 127), st.integers(-128, 127)), min_size=1, max_size=20),
)
@settings(max_examples=300, deadline=None)
def test_truncating_sums_equal_half_up(ra: float, rb: float, pairs: list[tuple[int, int]]) -> None:
    """The wide bias of add, sub, mul and requantize restores half-up exactly within the clamp."""
    codes = np.array(pairs, np.int64)
    results: list[list[int]] = []
    for rounding in ("half_up", "truncate"):
        p = scalar_parameters((ra, rb), 0, rounding)
        v = codes[:, 0] * p.multipliers[0] + codes[:, 1] * p.multipliers[1]
        v = v + (np.int64(p.bias) << np.int64(p.bias_shift))
        done = kernels.finish(v, p.shift, p.zp, -127, 127, rounding)
        results.append([int(x) for x in done])
    assert results[0] == results[1]


def naive_conv(
    x: np.ndarray,
    w: np.ndarray,
    strides: tuple[int, int],
    pads: tuple[int, int, int, int],
    dilations: tuple[int, int],
    group: int,
    zero: int,
) -> np.ndarray:
    """NHWC by OIHW with five loops and Python integers."""
    n, height, width, _ = x.shape
    out, inner, kh, kw = w.shape
    oh = (height + pads[0] + pads[2] - (kh - 1) * dilations[0] - 1) // strides[0] + 1
    ow = (width + pads[1] + pads[3] - (kw - 1) * dilations[1] - 1) // strides[1] + 1
    result = np.zeros((n, oh, ow, out), np.int64)
    for b, y, z, o in np.ndindex(n, oh, ow, out):
        total = 0
        for c, i, j in np.ndindex(inner, kh, kw):
            row = y * strides[0] + i * dilations[0] - pads[0]
            column = z * strides[1] + j * dilations[1] - pads[1]
            inside = 0 <= row < height and 0 <= column < width
            channel = o // (out // group) * inner + c
            code = int(x[b, row, column, channel]) if inside else zero
            total += code * int(w[o, c, i, j])
        result[b, y, z, o] = total
    return result


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_conv_equals_naive_loops(data: st.DataObject) -> None:
    draw = data.draw
    group = draw(st.sampled_from([1, 1, 2, 3]))
    inner = draw(st.integers(1, 4))
    per_out = draw(st.integers(1, 3))
    if draw(st.booleans()):  # depthwise
        inner = 1
    kernel = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    dilations = (draw(st.integers(1, 2)), draw(st.integers(1, 2)))
    strides = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    pads = tuple(draw(st.integers(0, 2)) for _ in range(4))
    size = tuple(
        draw(st.integers((k - 1) * d + 1, 7)) for k, d in zip(kernel, dilations, strict=True)
    )
    seed = draw(st.integers(0, 2**16))
    generator = np.random.default_rng(seed)
    x = generator.integers(-128, 128, (draw(st.integers(1, 2)), *size, inner * group), np.int8)
    w = generator.integers(-127, 128, (per_out * group, inner, *kernel)).astype(np.int8)
    zero = draw(st.integers(-128, 127))
    got = kernels.conv(
        x,
        w,
        strides=strides,
        pads=pads,
        dilations=dilations,
        group=group,
        pad_code=zero,
    )
    expected = naive_conv(
        x, w, strides, (pads[0], pads[1], pads[2], pads[3]), dilations, group, zero
    )
    assert np.array_equal(got, expected)


@pytest.mark.parametrize("depth", [1, 1023, 1024, 1025, 2048, 5000])
def test_long_sums_at_the_ends_of_the_range_are_exact(depth: int) -> None:
    a = np.full((2, depth), -128, np.int8)
    a[1] = 127
    b = np.full((depth, 3), 127, np.int8)
    b[:, 1] = -127
    b[::2, 2] = -126
    expected = a.astype(np.int64) @ b.astype(np.int64)
    assert np.array_equal(kernels.exact_product(a, b), expected)


@given(st.integers(0, 2**16), st.sampled_from(["half_up", "truncate"]), st.integers(-128, 127))
@settings(max_examples=60, deadline=None)
def test_channels_stay_within_their_limits(seed: int, rounding: str, zero: int) -> None:
    """Whatever the weights: biases below 2^30 and accumulators proven, results near the float."""
    generator = np.random.default_rng(seed)
    w = generator.normal(size=(6, 4, 3, 3)) * 10.0 ** generator.integers(-12, 3, (6, 1, 1, 1))
    w[generator.integers(0, 6)] = 0
    bias = generator.normal(size=6) * 10.0 ** generator.integers(-6, 3, 6)
    s_in, s_out = 0.03, 0.05
    p = quantise_channels(
        "layer",
        w,
        bias,
        input_scale=s_in,
        input_zero=zero,
        output_scale=s_out,
        output_zero=0,
        rounding=rounding,
    )
    assert (np.abs(p.bias.astype(np.int64)) < 2**30).all()
    prove_accumulator("layer", p.weight.reshape(6, -1).astype(np.int64), p.bias.astype(np.int64))
    x = generator.integers(-128, 128, (1, 5, 5, 4), np.int8)
    acc = kernels.conv(
        x, p.weight, strides=(1, 1), pads=(0, 0, 0, 0), dilations=(1, 1), group=1, pad_code=zero
    )
    got = kernels.requant(acc, p.bias, p.mult, p.shift, p.zp, -127, 127, rounding)
    effective = p.weight.reshape(6, -1) * (p.scale.astype(np.float64)[:, None] * s_in)
    columns = np.lib.stride_tricks.sliding_window_view(
        x.astype(np.float64) - zero, (3, 3), axis=(1, 2)
    )
    real = columns.reshape(1, 3, 3, 36) @ effective.T + bias
    # Half a step of the output, half a unit of the bias (and of the truncation term).
    slack = 0.5 + 1.01 * (p.scale.astype(np.float64) * s_in / s_out)
    difference = np.abs(got - np.clip(real / s_out, -127, 127))
    assert (difference <= slack + 1e-3).all()
