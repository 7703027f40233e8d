"""Properties of the arithmetic that learns codes: errors never rise, codes stay in range."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tilewright.ptq.reconstruct import (
    Moments,
    best_bias,
    descend,
    errors,
    fit_codes,
    loss,
    settle,
)


def problem(
    seed: int, groups: int, outputs: int, depth: int, limit: int, *, noise: float
) -> tuple[np.ndarray, np.ndarray, Moments]:
    """Return start codes, float weights and moments of inputs that depend on each other."""
    rng = np.random.default_rng(seed)
    mixing = rng.standard_normal((groups, depth, depth)) + 0.1 * np.eye(depth)
    x = np.rint(mixing @ rng.standard_normal((groups, depth, 64)) * 20 + 30)
    real = rng.uniform(-limit - 0.4, limit + 0.4, (groups, outputs, depth))
    y = real @ x + noise * rng.standard_normal((groups, outputs, 64)) * 50
    start = np.clip(np.rint(real), -limit, limit)
    return start, real, Moments.of(x.astype(np.float32), y.astype(np.float32))


sizes = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 12))
limits = st.sampled_from([7, 127])


@given(st.integers(0, 2**32), sizes, limits, st.integers(1, 5), st.sampled_from([0.0, 1.0]))
def test_descent_never_raises_a_channels_loss(
    seed: int, size: tuple[int, int, int], limit: int, sweeps: int, noise: float
) -> None:
    start, real, moments = problem(seed, *size, limit, noise=noise)
    hessian = moments.xx + 0.01 * np.eye(size[2])
    goal = moments.yx - real @ moments.xx
    found = descend(start, real, hessian, goal, limit, sweeps)
    before, after = (loss(codes, real, hessian, goal) for codes in (start, found))
    assert (after <= before + 1e-6 * np.abs(before) + 1e-6).all()
    np.testing.assert_array_equal(found, np.rint(found))
    assert np.abs(found).max() <= limit
    again = descend(found, real, hessian, goal, limit, 40)
    assert (loss(again, real, hessian, goal) <= after + 1e-6 * np.abs(after) + 1e-6).all()
    np.testing.assert_array_equal(descend(again, real, hessian, goal, limit, 40), again)


@given(st.integers(0, 2**32), sizes, limits)
def test_a_fit_is_at_least_as_good_as_its_start(
    seed: int, size: tuple[int, int, int], limit: int
) -> None:
    start, real, moments = problem(seed, *size, limit, noise=0.3)
    found = fit_codes(start, real, moments, limit=limit, damping=0.0)
    before, after = (errors(codes, best_bias(codes, moments), moments) for codes in (start, found))
    assert (after <= before * (1 + 1e-6) + 1e-3).all()
    settled = settle(real, moments.xx + np.eye(size[2]), np.zeros_like(real), limit)
    np.testing.assert_array_equal(settled, np.rint(settled))
    assert np.abs(settled).max() <= limit


@given(st.integers(0, 2**32), sizes)
def test_errors_are_those_of_the_positions(seed: int, size: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(seed)
    groups, outputs, depth = size
    x = rng.integers(-128, 128, (groups, depth, 50)).astype(np.float32)
    y = rng.normal(0, 1000, (groups, outputs, 50)).astype(np.float32)
    codes = rng.integers(-7, 8, (groups, outputs, depth)).astype(np.float64)
    bias = rng.normal(0, 100, (groups, outputs))
    direct = ((y - codes @ x - bias[..., None]) ** 2).mean(axis=2)
    np.testing.assert_allclose(errors(codes, bias, Moments.of(x, y)), direct, rtol=1e-4)


def test_settling_makes_up_for_rounding() -> None:
    """Inputs that nearly move together: nearest codes add up their errors, settled ones do not."""
    rng = np.random.default_rng(0)
    common = rng.standard_normal((1, 1, 500)) * 40
    x = (common + rng.standard_normal((1, 16, 500))).astype(np.float32)
    real = rng.uniform(-6, 6, (1, 8, 16))
    moments = Moments.of(x, (real @ x).astype(np.float32))
    nearest = np.rint(real)
    found = fit_codes(nearest, real, moments, limit=7, damping=1e-4)
    before, after = (
        errors(codes, best_bias(codes, moments), moments) for codes in (nearest, found)
    )
    assert after.mean() < before.mean() / 3


def test_inputs_that_never_change_keep_their_codes() -> None:
    x = np.full((1, 4, 30), 5, np.float32)
    real = np.array([[[0.4, 1.6, -2.3, 3.0]]])
    moments = Moments.of(x, (real @ x).astype(np.float32))
    start = np.rint(real)
    np.testing.assert_array_equal(fit_codes(start, real, moments, limit=7), start)
