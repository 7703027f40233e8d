"""Calibration on unusual samples: clear results or clear errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from xdsl.dialects.builtin import ModuleOp

from tests.unit.quant_top_graphs import TopGraph
from tilewright.diagnostics import TilewrightError
from tilewright.ir.context import CompileContext
from tilewright.ir.stage import Stage
from tilewright.ir.weights import WeightStore
from tilewright.ptq.options import QuantOptions
from tilewright.ptq.range_trials import NetworkTrials
from tilewright.ptq.ranges import choose_ranges
from tilewright.quant import calibrate as calibration
from tilewright.quant.calibrate import calibrate, observe
from tilewright.runtime.preprocess import load_samples

Array = npt.NDArray[Any]
RULES = ("max", "mean", "kl", "mse", "percentile")


def network(size: int = 6, layout: str = "nchw") -> tuple[ModuleOp, WeightStore]:
    """Return `conv a`, a clamp, `conv b`, and a linear layer over the mean of each channel."""
    rng = np.random.default_rng(0)
    g = TopGraph(x=(1, 3, size, size) if layout == "nchw" else (1, size, size, 3))
    extra = {"layout": layout}
    a = g.conv(
        "a", g.input("x"), rng.normal(size=(8, 3, 1, 1)), clamp_min=0.0, clamp_max=6.0, **extra
    )
    b = g.conv("b", a, rng.normal(size=(4, 8, 1, 1)), rng.normal(size=4), **extra)
    return g.finish(y=b), g.ctx.weights


def drawn(count: int, size: int = 6, seed: int = 0) -> list[dict[str, Array]]:
    rng = np.random.default_rng(seed)
    return [{"x": rng.normal(size=(1, 3, size, size)).astype(np.float32)} for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("method", ["best", *RULES])
def test_few_samples_give_ranges(count: int, method: str) -> None:
    module, weights = network()
    samples = drawn(count)
    stage, context = Stage(module, weights), CompileContext(weights.copy())
    table = choose_ranges(
        stage,
        observe(module, weights, samples),
        context,
        samples,
        QuantOptions(method=method),  # pyright: ignore[reportArgumentType]
    )
    assert table.samples == count
    noise = NetworkTrials(stage, CompileContext(weights.copy()), drawn(4, seed=9))
    assert noise.noise(table, table.activations == "asymmetric").mean() < -15


@pytest.mark.parametrize("value", [0.0, 2.5, -2.5])
@pytest.mark.parametrize("method", ["best", *RULES])
def test_constant_values_give_ranges(value: float, method: str) -> None:
    module, weights = network()
    samples = [{"x": np.full((1, 3, 6, 6), value, np.float32)}] * 3
    context = CompileContext(weights.copy())
    table = choose_ranges(
        Stage(module, weights),
        observe(module, weights, samples),
        context,
        samples,
        QuantOptions(method=method),  # pyright: ignore[reportArgumentType]
    )
    assert table.thresholds["x"] == pytest.approx(abs(value), rel=0.02)
    assert table.ranges["x"] == pytest.approx((min(value, 0), max(value, 0)), rel=0.02)


@pytest.mark.parametrize(("bad", "word"), [(np.nan, "NaN"), (np.inf, "infinity")])
def test_an_input_that_is_not_finite_is_named_with_its_sample(bad: float, word: str) -> None:
    module, weights = network()
    samples = drawn(5)
    samples[3]["x"][0, 1, 2, 3] = bad
    with pytest.raises(TilewrightError) as caught:
        observe(module, weights, samples)
    assert caught.value.code == "E0301"
    assert caught.value.message == f'input "x" of calibration sample 4 holds {word}'


def test_the_first_layer_that_is_not_finite_is_named() -> None:
    g = TopGraph(x=(1, 2, 4, 4))
    a = g.conv("a", g.input("x"), np.full((2, 2, 1, 1), 1e30))
    b = g.conv("b", a, np.full((2, 2, 1, 1), 1e30))
    c = g.conv("c", b, np.full((2, 2, 1, 1), 1.0))
    module = g.finish(y=c)
    samples = [{"x": np.full((1, 2, 4, 4), v, np.float32)} for v in (0.0, 1.0)]
    with pytest.raises(TilewrightError) as caught:
        observe(module, g.ctx.weights, samples)
    assert caught.value.message == '"b" is not finite for calibration sample 2'
    assert "the inputs are finite" in caught.value.details[0]


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ({"x": np.zeros((1, 3, 5, 6), np.float32)}, "[1, 3, 5, 6]"),
        ({"x": np.zeros((1, 3, 6, 6))}, "float64"),
        ({"z": np.zeros((1, 3, 6, 6), np.float32)}, "['z']"),
    ],
)
def test_samples_that_do_not_fit_are_refused(sample: dict[str, Array], said: str) -> None:
    module, weights = network()
    with pytest.raises(TilewrightError) as caught:
        observe(module, weights, [*drawn(1), sample])
    assert caught.value.code == "E0103"
    assert "calibration sample 2 does not fit" in caught.value.message
    assert said in "\n".join(caught.value.details)


def test_no_samples_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    module, weights = network()
    with pytest.raises(TilewrightError, match="no calibration samples"):
        observe(module, weights, [])
    with pytest.raises(TilewrightError, match="holds no samples"):
        list(load_samples(tmp_path, {"x": (1, 3, 6, 6)}, None))
    with pytest.raises(TilewrightError, match="no file or folder"):
        list(load_samples(tmp_path / "none", {"x": (1, 3, 6, 6)}, None))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_statistics_of_channels(layout: str) -> None:
    module, weights = network(layout=layout)
    samples = drawn(5)
    if layout == "nhwc":
        samples = [{"x": np.ascontiguousarray(s["x"].transpose(0, 2, 3, 1))} for s in samples]
    table = calibrate(module, weights, samples, method="kl")
    everything = np.concatenate([sample["x"] for sample in samples]).astype(np.float64)
    axes = (0, 2, 3) if layout == "nchw" else (0, 1, 2)
    np.testing.assert_allclose(table.means["x"], everything.mean(axis=axes), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(table.squares["x"], (everything**2).mean(axis=axes), rtol=1e-5)
    assert np.array_equal(table.peaks["x"], np.abs(everything).max(axis=axes).astype(np.float32))
    assert set(table.means) == set(table.squares) == set(table.peaks) == {"x", "a"}


def test_the_result_does_not_depend_on_how_many_run_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, weights = network(40)
    samples = drawn(7, 40)
    found: list[dict[str, Any]] = []
    for cores in (1, 2):
        monkeypatch.setattr(calibration.os, "cpu_count", lambda cores=cores: cores)
        statistics = observe(module, weights, iter(samples))
        found.append(
            {name: (o.bins, o.least, o.greatest) for name, o in statistics.observers.items()}
        )
    for name, (bins, *ends) in found[0].items():
        # Convolutions on one core and on two may differ in the last bit.
        assert found[1][name][1:] == pytest.approx(ends, rel=1e-6)
        assert np.abs(found[1][name][0] - bins).sum() <= 0.01 * bins.sum()


def test_samples_of_other_shapes_are_run_at_their_shape() -> None:
    module, weights = network()
    made: list[dict[str, tuple[int, ...]]] = []

    def at_shape(shapes: dict[str, tuple[int, ...]]) -> tuple[ModuleOp, WeightStore]:
        made.append(shapes)
        return network(shapes["x"][2])

    samples = [*drawn(3), *drawn(2, 9, 1), *drawn(2), *drawn(1, 5, 2)]
    statistics = observe(module, weights, samples, at_shape=at_shape)
    assert statistics.samples == 8
    assert made == [{"x": (1, 3, 9, 9)}, {"x": (1, 3, 5, 5)}]
    table = statistics.table("max")
    assert table.thresholds["x"] == max(float(np.abs(s["x"]).max()) for s in samples)
    everything = np.concatenate([s["x"].reshape(3, -1) for s in samples], axis=1)
    np.testing.assert_allclose(table.means["x"], everything.mean(axis=1), rtol=1e-4, atol=1e-6)


def test_a_model_of_fixed_shape_says_so() -> None:
    module, weights = network()

    def at_shape(shapes: dict[str, tuple[int, ...]]) -> tuple[ModuleOp, WeightStore]:
        raise TilewrightError("E0103", f"the model fixes x, not {shapes['x']}")

    with pytest.raises(TilewrightError) as caught:
        observe(module, weights, drawn(1, 9), at_shape=at_shape)
    assert "calibration sample 1 does not fit" in caught.value.message
    assert "the model fixes x, not (1, 3, 9, 9)" in caught.value.details
