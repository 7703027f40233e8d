"""The rule `mean`: ranges that one odd sample does not stretch."""

import numpy as np
import pytest

from tilewright.quant.observers import Observer, choose


def observed(samples: list[list[float]]) -> Observer:
    observer = Observer("x")
    for sample in samples:
        observer.update(np.array(sample, np.float32))
    return observer


def test_ends_are_the_means_of_the_samples_ends() -> None:
    choice = choose(observed([[-1.0, 3.0], [-2.0, 5.5], [0.25, 0.5]]), "mean")
    assert (choice.low, choice.high) == (-1.0, 3.0)
    assert choice.threshold == pytest.approx((3.0 + 5.5 + 0.5) / 3)


def test_the_order_of_samples_does_not_matter() -> None:
    rng = np.random.default_rng(0)
    samples = [list(rng.normal(size=5) * 10.0 ** rng.integers(-20, 20)) for _ in range(40)]
    ordered = choose(observed(samples), "mean")
    one, other = observed(samples[::2][::-1]), observed(samples[1::2])
    other.merge(one)
    assert choose(other, "mean") == ordered


@pytest.mark.parametrize("sample", [[0.0, 0.0], [2.0, 2.0], [-3.0, -3.0]])
def test_constant_values(sample: list[float]) -> None:
    choice = choose(observed([sample, sample]), "mean")
    assert (choice.low, choice.high) == (min(sample[0], 0.0), max(sample[0], 0.0))
