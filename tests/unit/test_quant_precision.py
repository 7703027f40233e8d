"""Mixed precision: which layers get 4-bit weights under a budget."""

import math

import numpy as np
import pytest

from tests.unit.quant_top_graphs import TopGraph
from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.ir.stage import Stage
from tilewright.ptq.options import QuantOptions
from tilewright.ptq.precision import Budget, Outcome, choose
from tilewright.ptq.prepare import Prepared, observe_samples, quantise
from tilewright.runtime.float_executor import TopSession

LAYERS = 4


def network() -> tuple[TopGraph, Stage]:
    """Return layers one after another; the last but one multiplies a hundred times as much."""
    rng = np.random.default_rng(3)
    g = TopGraph(x=(1, 6, 6, 8))
    value = g.input("x")
    for index in range(LAYERS):
        weight = rng.normal(size=(8, 8, 1, 1)) * 0.4
        value = g.conv(f"conv{index}", value, weight, rng.normal(size=8) * 0.1, layout="nhwc")
    module = g.finish(out=value)
    return g, Stage(module, g.ctx.weights.copy())


def quantised(top: Stage, g: TopGraph, bits: dict[str, int], prepared: Prepared) -> Stage:
    module = top.module.clone()
    g.ctx.weights = top.weights.copy()
    options = QuantOptions(level=0, layer_bits=bits).resolved()
    quantise(module, g.ctx, prepared, options)
    return Stage(module, g.ctx.weights)


def samples() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(4)
    return [{"x": rng.normal(size=(1, 6, 6, 8)).astype(np.float32)} for _ in range(12)]


def outcome(budget: str, cycles: dict[str, tuple[int, int]] | None = None) -> Outcome:
    g, top = network()
    data = samples()
    prepared = observe_samples(top, g.ctx, data, QuantOptions(level=0).resolved())
    names = [f"conv{index}" for index in range(LAYERS)]
    eight = quantised(top, g, {}, prepared)
    four = quantised(top, g, dict.fromkeys(names, 4), prepared)
    session = TopSession(top.module, top.weights)
    expected = [session.run(sample) for sample in data]
    faster = cycles or dict.fromkeys(names, (100, 60))
    return choose(eight, four, faster, data, expected, Budget.parse(budget))


def test_no_budget_keeps_eight_bits_and_all_of_it_takes_four() -> None:
    none, everything = outcome("0dB"), outcome("100dB")
    assert set(none.layer_bits.values()) == {8}
    assert none.loss == none.loss8
    assert set(everything.layer_bits.values()) == {4}
    assert everything.loss > everything.loss8


def test_the_choice_keeps_within_its_budget_and_uses_it() -> None:
    found = outcome("6dB")
    assert found.loss - found.loss8 <= 6
    bits = list(found.layer_bits.values())
    assert bits == sorted(bits), "layers are exchanged in their order"
    assert 4 in bits
    assert all(math.isfinite(row.noise_db) for row in found.layers)


def test_layers_that_save_nothing_keep_eight_bits() -> None:
    cycles = {"conv0": (100, 60), "conv1": (100, 100), "conv2": (100, 120), "conv3": (100, 60)}
    found = outcome("100dB", cycles).layer_bits
    assert found == {"conv0": 4, "conv3": 4, "conv1": 8, "conv2": 8}


def test_without_samples_it_says_what_is_missing() -> None:
    g, top = network()
    prepared = observe_samples(top, g.ctx, samples(), QuantOptions(level=0).resolved())
    stage = quantised(top, g, {}, prepared)
    with pytest.raises(TilewrightError, match="samples") as caught:
        choose(stage, stage, {}, [], [], Budget(1, "dB"))
    assert caught.value.code == "E0301"


@pytest.mark.parametrize("text", ["", "1", "x%", "-1%", "nandB", "1 db", "infdB"])
def test_a_budget_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="budget"):
        Budget.parse(text)


def test_budgets_are_read() -> None:
    assert Budget.parse("0.5%") == Budget(0.5, "%")
    assert Budget.parse(" 1dB") == Budget(1.0, "dB")
