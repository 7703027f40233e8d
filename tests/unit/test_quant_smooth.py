"""Smoothing: outlying channels of a layer normalisation go into the weights behind it."""

import numpy as np
import pytest
from xdsl.dialects.builtin import ModuleOp

from tests.unit.quant_top_graphs import TopGraph
from tilewright.ptq.smooth import find_places, smooth
from tilewright.runtime.float_executor import TopSession

CHANNELS = 16


def network(*, residual: bool, outlier: float) -> tuple[TopGraph, ModuleOp]:
    rng = np.random.default_rng(0)
    g = TopGraph(x=(1, 8, CHANNELS))
    gamma = np.ones(CHANNELS)
    gamma[3] = outlier
    y = g.op(
        "layer_norm",
        "norm",
        [g.input("x"), g.weight("gamma", gamma), g.weight("beta", rng.normal(size=CHANNELS))],
        None,
        epsilon=1e-5,
        axis=2,
    )
    z = g.op(
        "linear",
        "fc",
        [y, g.weight("w", rng.normal(size=(CHANNELS, CHANNELS))), g.none()],
    )
    out = g.op("add", "sum", [y, z]) if residual else z
    return g, g.finish(out=out)


def sample() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).normal(size=(1, 8, CHANNELS)).astype(np.float32)}


@pytest.mark.parametrize("residual", [False, True])
def test_the_function_stays_and_channels_come_closer(residual: bool) -> None:
    g, module = network(residual=residual, outlier=200.0)
    before = TopSession(module, g.ctx.weights).run(sample())
    assert smooth(g.ctx, module, [sample()]) == 1
    session = TopSession(module, g.ctx.weights)
    after = session.run(sample())
    for name, array in before.items():
        np.testing.assert_allclose(after[name], array, rtol=1e-4, atol=1e-3)
    values = session.run_values(sample())
    assert ("norm/smooth" in values) == residual
    peaks = np.abs(values["norm/smooth" if residual else "norm"]).max(axis=(0, 1))
    assert peaks.max() / np.median(peaks) < 40
    if residual:
        plain = np.abs(values["norm"]).max(axis=(0, 1))
        assert plain.max() / np.median(plain) > 40, "the addition reads the old one"


def test_it_is_idempotent_but_for_rounding() -> None:
    g, module = network(residual=False, outlier=200.0)
    assert smooth(g.ctx, module, [sample()]) == 1
    first = g.ctx.weights.get("w").copy()
    smooth(g.ctx, module, [sample()])
    ratio = g.ctx.weights.get("w") / first
    assert ratio.min() >= 0.5
    assert ratio.max() <= 2.0


def test_equal_channels_are_left_alone_and_it_says_so() -> None:
    g = TopGraph(x=(1, 1, 4))
    y = g.op(
        "layer_norm", "norm", [g.input("x"), g.weight("gamma", np.ones(4)), g.none()], None,
        epsilon=1e-5, axis=2,
    )  # fmt: skip
    z = g.op("linear", "fc", [y, g.weight("w", np.ones((4, 4))), g.none()])
    module = g.finish(out=z)
    data = {"x": np.array([[[1.0, -1.0, 1.0, -1.0]]], np.float32)}
    assert smooth(g.ctx, module, [data]) == 0
    assert "like ranges" in g.ctx.decisions[-1].reason


def test_nothing_to_do_without_layer_normalisation() -> None:
    g = TopGraph(x=(1, 4))
    z = g.op("linear", "fc", [g.input("x"), g.weight("w", np.ones((4, 4))), g.none()])
    assert not find_places(g.finish(out=z))
