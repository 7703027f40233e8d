"""Softmax and layer normalisation of rows: the contract word for word, its bounds, its error."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tilewright.diagnostics import TilewrightError
from tilewright.quant import kernels_rows
from tilewright.quant.rowwise import (
    exponential_table,
    layer_norm_parameters,
    layer_norm_refusal,
    softmax_multiplier,
)

ROWS = st.integers(1, 40).flatmap(
    lambda n: arrays(np.int8, (n,), elements=st.integers(-128, 127), fill=st.integers(-128, 127))
)
SCALES = st.floats(1e-4, 2.0)


def softmax_of(q: list[int], table: list[int], m: int, s: int, zp: int) -> list[int]:
    """The contract in Python's integers, its bounds checked."""
    most = max(q)
    total = sum(table[most - code] for code in q)
    assert 65535 <= total < 2**30
    k = total.bit_length()
    scale = m * 2**k // total
    assert 2**14 <= scale < 2**16
    t = k + s
    found = []
    for code in q:
        product = table[most - code] * scale
        assert product < 2**32
        found.append(min(max(((product + 2 ** (t - 1)) >> t) + zp, -128), 127))
    return found


def layer_norm_of(
    q: list[int], gain: list[int], bias: list[int], e: int, s: int, zp: int
) -> list[int]:
    n, first, second = len(q), sum(q), sum(code * code for code in q)
    spread = (n * second - first * first) * 2**8 + e
    assert 1 <= spread < 2**51
    b = spread.bit_length() + spread.bit_length() % 2
    root = math.isqrt(spread * 2**32 // 2**b)
    assert 2**15 <= root < 2**16
    scale = min(65535, 2**31 // root)
    assert scale >= 2**15
    found = []
    for code, factor, addend in zip(q, gain, bias, strict=True):
        u = n * code - first
        assert b >= 8 or u == 0
        z = (u * scale) >> max(0, b // 2 - 4)
        assert abs(z) <= 2**22 + 2**9
        value = z * factor + addend
        assert abs(value) < 2**38
        found.append(min(max((value >> s) + zp, -128), 127))
    return found


@given(ROWS, SCALES, st.floats(2.0**-14, 1.0), st.sampled_from([0, -128, 5]))
def test_softmax_is_the_contract_and_near_the_function(
    q: np.ndarray, scale: float, step: float, zp: int
) -> None:
    m, s = softmax_multiplier(step)
    table = exponential_table(scale)
    unsigned = table.view(np.uint16)
    assert unsigned[0] == 65535
    assert (np.diff(unsigned.astype(int)) <= 0).all()
    got = kernels_rows.softmax(q, table, m, s, zp, -128, 127)
    assert got.tolist() == softmax_of(q.tolist(), unsigned.tolist(), m, s, zp)
    power = np.exp((q.astype(float) - q.max()) * scale)
    exact = np.clip(power / power.sum() / step + zp, -128, 127)
    bound = 0.5 + ((q.size + 1) / 131070 + 2.0**-13) / step
    assert np.abs(got - exact).max() <= bound
    if step >= 1 / 256:
        assert np.abs(got - exact).max() < 1


@given(
    ROWS,
    SCALES,
    st.floats(1e-12, 1e-3),
    st.floats(0.01, 60),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, -128, 5]),
)
def test_layer_norm_is_the_contract_and_within_a_code_of_the_function(
    q: np.ndarray, scale: float, epsilon: float, steps: float, seed: int, zp: int
) -> None:
    rng = np.random.default_rng(seed)
    gamma, beta = rng.uniform(-steps, steps, q.size), rng.uniform(-120, 120, q.size)
    p = layer_norm_parameters(
        "n", gamma, beta, epsilon=epsilon, input_scale=scale, output_scale=1.0
    )
    got = kernels_rows.layer_norm(q, p.gain, p.bias, p.epsilon, p.shift, zp, -128, 127)
    assert got.tolist() == layer_norm_of(
        q.tolist(), p.gain.tolist(), p.bias.tolist(), p.epsilon, p.shift, zp
    )
    x = q.astype(float) * scale
    exact = (x - x.mean()) / math.sqrt(x.var() + epsilon) * gamma + beta + zp
    assert np.abs(got - np.clip(exact, -128, 127)).max() < 1


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 4095, 16384]))
def test_long_rows_stay_within_the_bounds(seed: int, size: int) -> None:
    """The longest row, and the widest values: the checks in the two functions above hold."""
    rng = np.random.default_rng(seed)
    ends = rng.choice([-128, 127], size, p=rng.choice([[0.5, 0.5], [0.999, 0.001]]))
    for q in (ends, np.full(size, 127), rng.integers(-128, 128, size)):
        codes, unit = q.astype(np.int8), np.full(size, 32767, np.int16)
        bias = np.full(size, 2**31 - 1, np.int32)
        epsilon = int(rng.choice([1, 2**50]))
        got = kernels_rows.layer_norm(codes, unit, bias, epsilon, 31, 0, -128, 127)
        assert got.tolist() == layer_norm_of(
            q.tolist(), unit.tolist(), bias.tolist(), epsilon, 31, 0
        )
        table = exponential_table(float(rng.choice([1e-6, 0.05])))
        soft = kernels_rows.softmax(codes, table, 2**14, 6, -128, -128, 127)
        assert soft.tolist() == softmax_of(
            q.tolist(), table.view(np.uint16).tolist(), 2**14, 6, -128
        )


@pytest.mark.parametrize("scale", [1e-5, 3.0])
def test_scales_without_a_multiplier_are_refused(scale: float) -> None:
    with pytest.raises(TilewrightError, match="softmax whose result has scale"):
        softmax_multiplier(scale)


def test_softmax_multipliers_have_fifteen_bits() -> None:
    assert softmax_multiplier(1 / 256) == (2**14, 6)
    assert softmax_multiplier(1 / 255) == (255 * 2**7, 7)
    assert softmax_multiplier(1 / 127) == (127 * 2**8, 8)
    assert softmax_multiplier(1 / 16383.9) == (2**14, 0)


def test_what_layer_norm_has_no_integers_for() -> None:
    assert layer_norm_refusal(384, 1e-5, 0.01, 30.0, 100.0) is None
    assert "16385 elements" in str(layer_norm_refusal(16385, 1e-5, 0.01, 30.0, 100.0))
    assert "epsilon" in str(layer_norm_refusal(16384, 1e-5, 1e-6, 30.0, 100.0))
    assert "too large" in str(layer_norm_refusal(384, 1e-5, 0.01, 30.0, 2.0**31))
    with pytest.raises(TilewrightError, match='"n" has no integer form'):
        layer_norm_parameters(
            "n", np.ones(4), np.full(4, 1e12), epsilon=1.0, input_scale=1.0, output_scale=1.0
        )
    with pytest.raises(TilewrightError, match='"n" is not finite'):
        layer_norm_parameters(
            "n", np.full(4, np.nan), np.ones(4), epsilon=1.0, input_scale=1.0, output_scale=1.0
        )
