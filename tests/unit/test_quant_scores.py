"""Scores before a softmax: what is far below the best of a row does not widen the range."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.quant_top_graphs import TopGraph
from tilewright.quant.calibrate import observe
from tilewright.quant.scores import PART, Scores, reach


def masked(also_read: bool = False) -> TopGraph:
    net = TopGraph(s=(4, 6), m=(1, 6))
    mask = net.op("reshape", "mask", [net.op("relu", "made", [net.input("m")])], (1, 6))
    total = net.op("add", "total", [net.input("s"), mask])
    soft = net.op("softmax", "soft", [total], axis=1)
    if also_read:
        soft = net.op("mul", "both", [soft, total])
    net.module = net.finish(y=soft)  # pyright: ignore[reportAttributeAccessIssue]
    return net


def scores_of(net: TopGraph) -> Scores:
    return Scores(net.module)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownArgumentType]


@pytest.mark.parametrize("low", [-1e4, -3.4e38])
def test_a_mask_does_not_widen_the_range(low: float):
    random = np.random.default_rng(0)
    scores = random.normal(0, 3, (4, 6)).astype(np.float32)
    mask = np.array([[0, 0, 0, 0, low, low]], np.float32)
    total = scores + mask
    found = scores_of(masked()).bounded(
        {"s": scores, "m": mask, "made": mask, "mask": mask, "total": total, "soft": total}
    )
    best = total.max(axis=1)
    assert found["total"].min() >= best.min() - reach(6) - 1e-4
    assert -100 < found["made"].min() < -10
    # Sums of bounded operands are below what counts where the sum was.
    again = found["s"] + found["made"]
    np.testing.assert_allclose(again[:, :4], total[:, :4], rtol=1e-6)
    assert (again[:, 4:] <= found["total"].min() + 1e-4).all()


def test_values_that_others_read_are_left_alone():
    net = masked(also_read=True)
    values = {name: np.full((4, 6), -1e4, np.float32) for name in ("s", "m", "made", "total")}
    found = scores_of(net).bounded(values)
    assert all(found[name] is values[name] for name in values)


@given(st.integers(2, 40), st.floats(0.1, 50), st.integers(0, 1000))
def test_what_is_raised_takes_no_part(count: int, spread: float, seed: int):
    scores = np.random.default_rng(seed).normal(0, spread, (3, count))
    best = scores.max(axis=1, keepdims=True)
    part = np.exp(scores - best)
    part /= part.sum(axis=1, keepdims=True)
    left_out = np.where(scores < best - reach(count), part, 0).sum(axis=1)
    assert (left_out <= 1 / PART).all()
    assert reach(1) == pytest.approx(math.log(PART))


def test_calibration_sees_bounded_scores():
    net = masked()
    sample = {
        "s": np.ones((4, 6), np.float32),
        "m": np.array([[0, 0, 0, 2000, 0, 0]], np.float32),
    }
    module = net.module  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
    statistics = observe(module, net.ctx.weights, [sample])  # pyright: ignore[reportUnknownArgumentType]
    seen = statistics.observers["total"]
    assert seen.least == pytest.approx(2001 - reach(6))
