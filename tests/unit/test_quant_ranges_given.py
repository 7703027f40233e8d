"""Asymmetric scales of a range, given scales of activations and weights, 4-bit codes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.quant.parameters import clipped_scales, quantise_channels
from tilewright.transforms.quant.scales import asymmetric_scale


@given(st.floats(-1e4, 0), st.floats(0, 1e4))
def test_an_asymmetric_range_is_represented_within_half_a_step(low: float, high: float) -> None:
    edge = asymmetric_scale(low, high)
    assert -128 <= edge.zero <= 127
    if max(-low, high) < 1e-30:
        return
    least, most = edge.step * (-128 - edge.zero), edge.step * (127 - edge.zero)
    if -low == high:
        assert (edge.zero, edge.step) == (0, pytest.approx(high / 127))
        return
    assert least <= low + 0.5001 * edge.step
    assert most >= high - 0.5001 * edge.step


def test_a_range_without_negative_values_uses_every_code() -> None:
    assert asymmetric_scale(0.0, 25.5).zero == -128
    assert asymmetric_scale(0.0, 25.5).step == pytest.approx(0.1)


def channels(weight: np.ndarray, **extra: object) -> object:
    return quantise_channels(
        "layer",
        weight,
        None,
        input_scale=0.1,
        input_zero=0,
        output_scale=0.2,
        output_zero=0,
        rounding="half_up",
        **extra,  # pyright: ignore[reportArgumentType]
    )


def test_given_weight_scales_bring_back_the_codes() -> None:
    codes = np.random.default_rng(0).integers(-100, 101, (5, 7))
    scales = np.array([0.5, 0.01, 3e-4, 7.0, 0.125])
    found = channels((codes * scales[:, None]).astype(np.float32), given=scales)
    np.testing.assert_array_equal(found.weight, codes)  # pyright: ignore[reportAttributeAccessIssue]


def test_four_bit_codes_stay_within_seven() -> None:
    weight = np.random.default_rng(1).normal(size=(6, 40))
    found = channels(weight, qmax=7).weight  # pyright: ignore[reportAttributeAccessIssue]
    assert np.abs(found).max() == 7


def test_clipping_never_raises_the_weighted_error() -> None:
    rng = np.random.default_rng(2)
    weight = rng.standard_t(2, size=(8, 64))
    square = rng.uniform(0.1, 10.0, 64)
    plain = np.abs(weight).max(axis=1) / 7

    def error(step: np.ndarray) -> np.ndarray:
        codes = np.clip(np.rint(weight / step[:, None]), -7, 7)
        return ((codes * step[:, None] - weight) ** 2 * square).sum(axis=1)

    found = clipped_scales(weight, plain, 7, square, 1)
    assert (error(found) <= error(plain)).all()
    assert (error(found) < error(plain)).any()
    assert (found <= plain).all()
