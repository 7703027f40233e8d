"""Statistics of single values: exact ends, histograms that merge, the rules on both sides."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tilewright.quant.observer_kernel import divergences, quantise_flat
from tilewright.quant.observers import (
    ASYMMETRIC_STEPS,
    BINS,
    METHODS,
    SAMPLED_FIRST,
    Observer,
    choose,
    expected_errors,
)
from tilewright.quant.parameters import scale_of

Array = npt.NDArray[Any]

FLOATS = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=True)
SAMPLES = st.lists(arrays.arrays(np.float32, st.integers(1, 40), elements=FLOATS), min_size=1)


def observed(*samples: Array) -> Observer:
    observer = Observer("v")
    for sample in samples:
        observer.update(sample)
    return observer


@given(SAMPLES)
def test_nothing_is_lost_and_the_ends_are_exact(samples: list[Array]) -> None:
    observer = observed(*samples)
    everything = np.concatenate(samples)
    assert (observer.least, observer.greatest) == (everything.min(), everything.max())
    assert observer.low == min(everything.min(), 0)
    assert observer.high == max(everything.max(), 0)
    assert observer.bins is not None
    assert observer.bins.sum() + observer.zeros == observer.count == everything.size
    assert observer.zeros == np.count_nonzero(everything == 0)
    if observer.width:
        index = BINS + np.floor(everything[everything != 0].astype(np.float64) / observer.width)
        assert np.array_equal(observer.bins, np.bincount(index.astype(int), minlength=2 * BINS))


@given(SAMPLES, st.randoms(use_true_random=False))
def test_order_and_merging_do_not_matter(samples: list[Array], random: Any) -> None:
    whole = observed(*samples)
    shuffled = list(samples)
    random.shuffle(shuffled)
    cut = random.randint(0, len(samples))
    first, second = observed(*shuffled[:cut]), observed(*shuffled[cut:])
    first.merge(second)
    for name in ("low", "high", "least", "greatest", "count", "zeros", "exponent", "samples"):
        assert getattr(first, name) == getattr(whole, name), name
    assert np.array_equal(first.bins, whole.bins)  # pyright: ignore[reportArgumentType]


@given(SAMPLES, st.sampled_from(METHODS))
def test_ranges_hold_zero_and_lie_within_what_was_seen(samples: list[Array], method: str) -> None:
    observer = observed(*samples)
    choice = choose(observer, method)
    assert 0 <= choice.threshold <= observer.maximum
    assert observer.low <= choice.low <= 0 <= choice.high <= observer.high
    if observer.maximum > 0:
        assert choice.threshold > 0
        assert choice.high > choice.low
    assert choose(observer, method) == choice


@pytest.mark.parametrize("method", METHODS)
def test_worked_example_of_an_activation(method: str) -> None:
    """Values in [-6.0, 5.8] give the scale 6.0 / 127 where nothing is clipped."""
    choice = choose(observed(np.linspace(-6.0, 5.8, 4097, dtype=np.float32)), "max")
    assert scale_of(choice.threshold) == 6.0 / 127
    assert (choice.low, choice.high) == (-6.0, float(np.float32(5.8)))
    even = choose(observed(np.linspace(-6.0, 5.8, 4097, dtype=np.float32)), method)
    assert even.threshold == pytest.approx(6.0, rel=0.02)


def test_a_part_of_a_large_tensor_stands_for_all_of_it() -> None:
    rng = np.random.default_rng(0)
    values = rng.gamma(2.0, 1.0, (1, 56, 56, 192)).astype(np.float32)
    values[0, 31, 17, 5] = 70.0
    values[0, 2, 3, 100] = -9.0
    observer = observed(values)
    assert (observer.least, observer.greatest) == (-9.0, 70.0)
    assert observer.bins is not None
    taken = observer.bins.sum() + observer.zeros
    assert taken == pytest.approx(values.size, rel=0.01)
    # Rare ends are counted although the part has none of them.
    assert observer.bins[BINS + math.floor(70.0 / observer.width)] >= 1
    assert observer.bins[BINS + math.floor(-9.0 / observer.width)] >= 1
    share = observer.bins[BINS : BINS + math.floor(2.0 / observer.width)].sum() / taken
    assert share == pytest.approx(float((values < 2.0).mean()), abs=0.01)


def test_all_channels_have_a_share_in_the_part() -> None:
    """Channels of one value each: none may be left out, wherever the part begins."""
    channels = 64
    rows = SAMPLED_FIRST // channels * 8
    values = np.broadcast_to(np.arange(1, channels + 1, dtype=np.float32), (rows, channels))
    for turn in (0, 1, 5):
        observer = Observer("v")
        observer.update(np.ascontiguousarray(values), turn=turn)
        assert observer.bins is not None
        index = BINS + np.floor(np.arange(1, channels + 1) / observer.width).astype(int)
        share = observer.bins[index] / observer.bins.sum()
        assert share.min() > 0.8 / channels
        assert share.max() < 1.2 / channels


def test_infinity_and_nan_are_seen_at_the_ends() -> None:
    for bad in (np.nan, np.inf, -np.inf):
        values = np.zeros(300_000, np.float32)
        values[200_001] = bad
        with pytest.raises(Exception, match="not finite"):
            observed(values)


def reference_divergences(mass: Array, levels: int) -> Array:
    """Divergence of every clipping point, the long way."""
    found: list[float] = []
    for i in range(levels, len(mass) + 1):
        head = mass[:i].astype(float)
        p = head.copy()
        p[-1] += mass[i:].sum()
        level = np.arange(i) * levels // i
        occupied = head > 0
        sums, counts = np.bincount(level, head, levels), np.bincount(level, occupied, levels)
        q = np.where(occupied, (sums / np.maximum(counts, 1))[level], 0.0)
        if q.sum() == 0:
            found.append(math.inf)
            continue
        p, q = p / p.sum(), q / q.sum()
        there = p > 0
        found.append(float(np.sum(p[there] * np.log(p[there] / np.maximum(q[there], 1e-12)))))
    return np.array(found)


@given(arrays.arrays(np.int64, st.integers(16, 90), elements=st.integers(0, 50)))
def test_divergence_of_every_clipping_point(mass: Array) -> None:
    if mass.sum() == 0:
        return
    found = divergences(mass.astype(np.float64), 16)
    np.testing.assert_allclose(found, reference_divergences(mass, 16), rtol=1e-9, atol=1e-9)


def test_asymmetric_ranges_of_lopsided_values() -> None:
    rng = np.random.default_rng(1)
    values = rng.exponential(1.0, 100_000).astype(np.float32) - np.float32(0.3)
    observer = observed(values)
    for method in METHODS:
        choice = choose(observer, method)
        assert choice.low == pytest.approx(-0.3, abs=0.05), method
        assert choice.high > 5
    everything, best = choose(observer, "max"), choose(observer, "mse")
    _, errors = expected_errors(observer, [everything, best])
    assert errors[1] < errors[0]


def test_expected_errors_are_those_of_real_codes() -> None:
    values = np.random.default_rng(2).normal(1.0, 2.0, 200_000).astype(np.float32)
    observer = observed(values)
    choice = choose(observer, "mse")
    step = (choice.high - choice.low) / ASYMMETRIC_STEPS
    first = round(choice.low / step)
    out = np.empty_like(values)
    quantise_flat(
        values, np.float32(step), np.float32(first), np.float32(first + ASYMMETRIC_STEPS), out
    )
    real = float(np.mean((values.astype(np.float64) - out) ** 2))
    assert expected_errors(observer, [choice])[1][0] == pytest.approx(real, rel=0.03)
