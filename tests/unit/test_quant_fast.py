"""Fast execution of quantised modules against the reference, layer by layer."""

from __future__ import annotations

import numpy as np
import pytest
from xdsl.dialects.builtin import TensorType, i32

from tests.odd_networks import odd_network
from tests.quant_graphs import Graph, codes, f32, random_codes
from tests.quant_modules import normal_samples, quantised_stages
from tests.random_networks import random_network
from tilewright.diagnostics import TilewrightError
from tilewright.dialects import quant
from tilewright.ir.stage import Stage
from tilewright.quant.fast import FastSession
from tilewright.quant.reference import QuantSession

ROUNDINGS = ("half_up", "half_away", "half_even", "truncate")


def assert_layers_agree(stage: Stage, inputs: dict[str, np.ndarray], share: float = 2e-3) -> None:
    """Each layer from the operands that the fast one had: at most few codes apart, by one."""
    session = FastSession(stage.module, stage.weights)
    outputs, fast = session.run_layers(inputs)
    _, exact = QuantSession(stage.module, stage.weights).run_layers(inputs, replace=fast)
    assert fast.keys() == exact.keys()
    for name, value in exact.items():
        got = fast[name]
        assert (got.dtype, got.shape) == (value.dtype, value.shape), name
        if value.dtype == np.int8:
            apart = np.abs(got.astype(int) - value)
            assert apart.max(initial=0) <= 1, name
            assert (apart > 0).mean() <= share or apart.sum() <= 1, (name, (apart > 0).mean())
        else:
            np.testing.assert_allclose(got, value, rtol=1e-5, atol=1e-5, err_msg=name)
    alone = session.run(inputs)
    for name, value in outputs.items():
        assert alone[name].dtype == value.dtype
        np.testing.assert_allclose(alone[name].astype(float), value.astype(float), atol=1e-4)


@pytest.mark.parametrize("seed", range(12))
def test_random_networks(seed: int) -> None:
    model, shape = random_network(seed, 8)
    _, stage = quantised_stages(
        model,
        normal_samples(shape, 2),
        rounding=ROUNDINGS[seed % 4],
        activations=("symmetric", "asymmetric")[seed % 2],
    )
    assert_layers_agree(stage, normal_samples(shape, 1, seed=7)[0])


@pytest.mark.parametrize("name", ["dilated", "residuals", "concatenations", "gates", "down_and_up"])
def test_odd_networks(name: str) -> None:
    model, shape = odd_network(name)
    _, stage = quantised_stages(model, normal_samples(shape, 2))
    assert_layers_agree(stage, normal_samples(shape, 1, seed=7)[0])


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_ties_of_every_rounding(rounding: str, layout: str) -> None:
    """Multipliers that are powers of two: every other sum is a tie, and not one code differs."""
    rng = np.random.default_rng(0)
    shape = [1, 3, 6, 5] if layout == "nchw" else [1, 6, 5, 3]
    g = Graph(x=codes(shape, 0.05, 3), y=codes(shape, 0.05, -7))
    x, y = g.input("x"), g.input("y")
    end = {"zp": 5, "lo": -100, "hi": 90, "rounding": rounding}
    wide = {"bias": 3, **end}
    kind = codes(shape, 0.05, 5)
    half = {"shift": 31, "bias_shift": 29, **wide}
    results = [
        g.quant(quant.AddOp, "add", [x, y], kind, mult_a=2**30, mult_b=2**29, **half),
        g.quant(quant.SubOp, "sub", [x, y], kind, mult_a=2**30, mult_b=2**30, **half),
        g.quant(quant.MulOp, "mul", [x, y], kind, mult=2**30, shift=35, bias_shift=33, **wide),
        g.quant(quant.RequantizeOp, "scale", [x], kind, mult=2**30, **half),
    ]
    weight = rng.integers(-2, 3, (3, 3, 1, 1), dtype=np.int8)
    parameters = [
        g.weight("w", weight),
        g.weight("b", rng.integers(-9, 9, 3).astype(np.int32)),
        g.weight("m", np.full(3, 2**30, np.int32)),
        g.weight("s", np.full(3, 32, np.int8)),
    ]
    lists = {"strides": [1, 1], "pads": [0, 1, 0, 1]}
    wider = [1, 3, 6, 7] if layout == "nchw" else [1, 6, 7, 3]
    results.append(
        g.quant(
            quant.ConvOp, "conv", [x, *parameters], codes(wider, 0.05, 5),
            dilations=[1, 1], group=1, layout=layout, **lists, **end,
        )
    )  # fmt: skip
    pooled = [1, 3, 5, 5] if layout == "nchw" else [1, 5, 5, 3]
    results.append(
        g.quant(
            quant.AvgPoolOp, "pool", [y], codes(pooled, 0.05, 5), kernel=[2, 3], layout=layout,
            strides=[1, 1], pads=[0, 1, 0, 1], bias=11, mult=2**30, shift=32, **end,
        )
    )  # fmt: skip
    module = g.module(*results)
    inputs = {name: random_codes(rng, shape) for name in ("x", "y")}
    fast = FastSession(module, g.weights).run(inputs)
    exact = QuantSession(module, g.weights).run(inputs)
    for name, value in exact.items():
        np.testing.assert_array_equal(fast[name], value, err_msg=name)
        assert len(np.unique(value)) > 10


def test_update_reads_the_constants_again() -> None:
    model, shape = random_network(3, 4)
    _, stage = quantised_stages(model, normal_samples(shape, 2))
    sample = normal_samples(shape, 1)[0]
    session = FastSession(stage.module, stage.weights)
    before = session.run(sample)
    for name in stage.weights:
        if name.endswith(".bias"):
            stage.weights.set(name, stage.weights.get(name) // 2 + 90)
    assert_equal(session.run(sample), before)
    session.update()
    assert_equal(session.run(sample), FastSession(stage.module, stage.weights).run(sample))
    assert any((session.run(sample)[name] != before[name]).any() for name in before)


def assert_equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name])


def test_only_the_layers_asked_for() -> None:
    model, shape = random_network(1, 6)
    _, stage = quantised_stages(model, normal_samples(shape, 2))
    session = FastSession(stage.module, stage.weights)
    sample = normal_samples(shape, 1)[0]
    _, every = session.run_layers(sample)
    name = next(key for key, value in every.items() if value.dtype == np.int8)
    _, one = session.run_layers(sample, [name])
    assert list(one) == [name]
    np.testing.assert_array_equal(one[name], every[name])
    with pytest.raises(TilewrightError, match='no layer is called "nothing"'):
        session.run_layers(sample, ["nothing"])


def test_sums_of_products_of_activations() -> None:
    rng = np.random.default_rng(0)
    g = Graph(x=codes([2, 3, 40]), y=codes([2, 40, 5]))
    end = {"bias": 7, "mult": 1, "shift": 0, "zp": 0, "lo": -128, "hi": 127, "rounding": "half_up"}
    operands = [g.input("x"), g.input("y")]
    sums = g.quant(quant.MatmulOp, "sums", operands, TensorType(i32, [2, 3, 5]), **end)
    module = g.module(g.quant(quant.DequantizeOp, "z", [sums], TensorType(f32, [2, 3, 5])))
    inputs = {"x": random_codes(rng, [2, 3, 40]), "y": random_codes(rng, [2, 40, 5])}
    fast = FastSession(module, g.weights).run_layers(inputs)
    exact = QuantSession(module, g.weights).run_layers(inputs)
    for one, other in zip(fast, exact, strict=True):
        assert_equal(one, other)
    assert fast[1]["sums"].dtype == np.int32


def test_refusals_say_what_is_wrong() -> None:
    g = Graph(x=codes([1, 4]))
    y = g.quant(quant.DequantizeOp, "y", [g.input("x")], TensorType(f32, [1, 4]))
    session = FastSession(g.module(y), g.weights)
    with pytest.raises(TilewrightError, match='no value for input "x"'):
        session.run({})
    with pytest.raises(TilewrightError, match=r"given \[1, 5\]; needs \[1, 4\]"):
        session.run({"x": np.zeros((1, 5), np.int8)})
    np.testing.assert_allclose(session.run({"x": np.full((1, 4), 3, np.int8)})["result0"], 0.15)
