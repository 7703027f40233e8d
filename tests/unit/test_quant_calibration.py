"""Observers, thresholds, the calibration table, and calibration of a graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from xdsl.dialects.builtin import ModuleOp

from tests.unit.quant_top_graphs import TopGraph
from tilewright.diagnostics import TilewrightError
from tilewright.quant.calibrate import calibrate
from tilewright.quant.observers import (
    BINS,
    Choice,
    Observer,
    choose,
    expected_errors,
    kl_threshold,
)
from tilewright.quant.parameters import (
    encode_multiplier,
    output_bounds,
    quantise_channels,
    scale_of,
    threshold_of,
    weight_scales,
)
from tilewright.quant.table import CalibrationTable


def observe(*samples: np.ndarray) -> Observer:
    observer = Observer("v")
    for sample in samples:
        observer.update(sample.astype(np.float32))
    return observer


def test_worked_examples_of_scales() -> None:
    weights = np.array([[-2.5, 3.2, 0.1]])
    assert weight_scales(weights)[0][0] == 3.2 / 127
    assert scale_of(threshold_of(-6.0, 5.8)) == 6.0 / 127
    assert scale_of(5.0) == 5.0 / 127
    assert [round(s, 4) for s in (3.2 / 127, 6.0 / 127, 5.0 / 127)] == [0.0252, 0.0472, 0.0394]


@pytest.mark.parametrize("threshold", [-1.0, float("nan"), float("inf")])
def test_impossible_thresholds_are_refused(threshold: float) -> None:
    with pytest.raises(TilewrightError) as caught:
        scale_of(threshold)
    assert caught.value.code == "E0304"


@pytest.mark.parametrize("real", [-1.0, 2.0**31, float("nan")])
def test_impossible_multipliers_are_refused(real: float) -> None:
    with pytest.raises(TilewrightError) as caught:
        encode_multiplier(real)
    assert caught.value.code == "E0304"


def test_multipliers_that_round_up_to_2_31_stay_in_range() -> None:
    m, s = encode_multiplier(1.0 - 2.0**-40)
    assert (m, s) == (2**30, 30)


def test_fused_clamps_become_code_bounds() -> None:
    assert output_bounds(0.05, 0) == (-127, 127)
    assert output_bounds(0.05, 0, 0.0, 6.0) == (0, 120)
    assert output_bounds(0.01, 0, 0.0, 6.0) == (0, 127)
    # Neither bound is an end of the range when the zero point is not.
    assert output_bounds(0.025, -60, 0.0, 1.5) == (-60, 0)
    assert output_bounds(0.04, 20, 0.0) == (20, 127)
    assert output_bounds(0.05, 0, float("-inf"), float("inf")) == (-127, 127)


def test_dead_channels_take_the_smallest_useful_scale() -> None:
    weight = np.array([[1.0, -0.5], [0.0, 0.0], [1e-45, 0.0], [4.0, 2.0]])
    p = quantise_channels(
        "c", weight, np.array([0.1, 0.2, -0.3, 0.0]),
        input_scale=0.1, input_zero=0, output_scale=0.01, output_zero=0, rounding="half_up",
    )  # fmt: skip
    assert p.dead == (1, 2)
    assert p.scale[1] == p.scale[2] == p.scale[0]
    assert not p.weight[1].any()
    # Such a channel still gives its bias.
    assert np.rint(p.bias[1] * float(p.mult[1]) / 2.0 ** int(p.shift[1])) == 20


def test_a_layer_of_dead_channels_gives_its_biases() -> None:
    p = quantise_channels(
        "c", np.zeros((2, 3)), np.array([0.5, -1.0]),
        input_scale=0.1, input_zero=0, output_scale=0.01, output_zero=0, rounding="truncate",
    )  # fmt: skip
    v = (p.bias.astype(np.int64) * p.mult) / 2.0 ** p.shift.astype(np.float64)
    assert list(np.trunc(v) + p.zp) == [50, -100]


def test_weights_that_are_not_finite_are_refused() -> None:
    with pytest.raises(TilewrightError, match='"bad/layer"'):
        quantise_channels(
            "bad/layer", np.array([[np.nan]]), None,
            input_scale=1.0, input_zero=0, output_scale=1.0, output_zero=0, rounding="half_up",
        )  # fmt: skip


def test_histogram_grows_without_losing_anything() -> None:
    rng = np.random.default_rng(0)
    samples = [rng.normal(size=1000) * scale for scale in (1, 0, 0.1, 30, 2, 500)]
    observer = observe(*samples)
    everything = np.abs(np.concatenate(samples)).astype(np.float32)
    assert observer.maximum == everything.max()
    bins, width = observer.magnitudes()
    assert bins.sum() + observer.zeros == observer.count == everything.size
    assert observer.zeros == 1000
    assert BINS // 2 <= len(bins) <= BINS
    edges = np.arange(len(bins) + 1) * width
    expected = np.histogram(everything[everything > 0], edges)[0]
    # A value on an edge may fall to either side.
    assert np.abs(bins - expected).sum() <= 4
    signed = np.concatenate(samples).astype(np.float32)
    assert (observer.low, observer.high) == (signed.min(), signed.max())
    assert observer.bins is not None
    assert observer.bins[:BINS].sum() == (signed < 0).sum()


def test_memory_does_not_depend_on_the_samples() -> None:
    observer = observe(*[np.full(10, 2.0**k) for k in range(40)])
    assert observer.bins is not None
    assert observer.bins.size == 2 * BINS


def test_values_that_are_not_finite_name_the_layer() -> None:
    with pytest.raises(TilewrightError, match='"v" is not finite') as caught:
        observe(np.array([1.0, np.inf]))
    assert caught.value.code == "E0301"


def test_sparse_peaks_are_kept_by_kl() -> None:
    """Divergence alone clips them; the comparison of squared errors does not."""
    rng = np.random.default_rng(3)
    values = np.abs(rng.normal(size=20_000)) * 0.1
    values[::250] = rng.uniform(6, 10, 80)
    observer = observe(values)
    bins, width = observer.magnitudes()
    clipped = kl_threshold(bins, width)
    assert clipped < 7
    choice = choose(observer, "kl")
    assert choice.rule == "percentile"
    assert 9.5 < choice.threshold <= observer.maximum


def test_peaks_rarer_than_the_percentile_are_kept_too() -> None:
    values = np.abs(np.random.default_rng(3).normal(size=200_000)) * 0.01
    values[:5] = 10.0
    choice = choose(observe(values), "kl")
    assert choice.threshold > 9


def test_kl_clips_a_lonely_outlier_of_a_bell() -> None:
    rng = np.random.default_rng(4)
    values = rng.normal(size=200_000)
    values[0] = 9.0
    choice = choose(observe(values), "kl")
    assert choice.rule == "kl"
    assert 2.5 < choice.threshold < 6


@pytest.mark.parametrize("method", ["max", "mean", "kl", "mse", "percentile"])
def test_degenerate_values(method: str) -> None:
    assert choose(observe(np.zeros(10)), method).threshold == 0
    assert choose(observe(np.full(10, 3.0)), method).threshold == pytest.approx(3.0, rel=0.01)
    # All but one bin empty, and one value at each end.
    two = choose(observe(np.array([1e-6] * 1000 + [5.0])), method)
    assert 0 < two.threshold <= 5.0


def test_mse_is_the_least_of_its_candidates() -> None:
    observer = observe(np.random.default_rng(5).standard_t(3, 50_000))
    choice = choose(observer, "mse")
    others = [Choice(t, -t, t, "mse") for t in observer.maximum * np.linspace(0.1, 1, 200)]
    errors, ranges = expected_errors(observer, [choice, *others])
    assert errors[0] <= errors[1:].min() * 1.001
    assert ranges[0] <= ranges[1:].min() * 1.001
    # The formula agrees with quantising the values themselves.
    values = np.random.default_rng(5).standard_t(3, 50_000).astype(np.float32)
    step = choice.threshold / 127
    real = np.mean((np.clip(np.rint(values / step), -127, 127) * step - values) ** 2)
    assert errors[0] == pytest.approx(real, rel=0.05)
    step = (choice.high - choice.low) / 255
    zero = round(choice.low / step)
    real = np.mean((np.clip(np.rint(values / step), zero, zero + 255) * step - values) ** 2)
    assert ranges[0] == pytest.approx(real, rel=0.05)


def relu_graph() -> tuple[TopGraph, ModuleOp]:
    g = TopGraph(x=(1, 2, 4, 4))
    y = g.conv("c/1", g.input("x"), np.full((3, 2, 1, 1), 2.0), clamp_min=0.0, clamp_max=6.0)
    r = g.op("reshape", "flat", [y], (1, 48))
    return g, g.finish(y=r)


def test_values_are_seen_behind_fused_clamps() -> None:
    g, module = relu_graph()
    samples = ({"x": np.full((1, 2, 4, 4), v, np.float32)} for v in (-100.0, 50.0))
    table = calibrate(module, g.ctx.weights, samples, method="max")
    assert table.thresholds == {"x": 100.0, "c/1": 6.0, "flat": 6.0}
    assert table.samples == 2
    assert table.ranges == {"x": (-100.0, 50.0), "c/1": (0.0, 6.0), "flat": (0.0, 6.0)}
    assert table.details["flat"] == {"rule": "as c/1"}
    assert table.details["x"] == {"rule": "max", "min": -100.0, "max": 50.0}
    assert table.maxima()["x"] == 100.0


def test_limit_and_progress() -> None:
    g, module = relu_graph()
    samples = ({"x": np.full((1, 2, 4, 4), v, np.float32)} for v in range(10))
    done: list[int] = []
    table = calibrate(module, g.ctx.weights, samples, method="max", limit=3, progress=done.append)
    assert table.thresholds["x"] == 2.0
    assert done == [1, 2, 3]


def test_no_samples_and_unknown_methods_are_refused() -> None:
    g, module = relu_graph()
    with pytest.raises(TilewrightError, match="no calibration samples") as caught:
        calibrate(module, g.ctx.weights, [])
    assert caught.value.code == "E0301"
    with pytest.raises(TilewrightError, match="no calibration method `best`"):
        calibrate(module, g.ctx.weights, [], method="best")


def test_table_reads_back_and_can_be_edited(tmp_path: Path) -> None:
    table = CalibrationTable(
        {"conv: 1/a": 0.1, "b": 3.0},
        "kl",
        7,
        {"resize": "short", "mean": [0.5, 0.5, 0.5]},
        {"b": {"rule": "kl", "min": -4.5, "max": 4.0}},
        {"b": np.array([0.1, -2.5e-7], np.float32)},
        {"b": (-4.0, 4.0)},
        {"b": np.array([0.2, 1e-9], np.float32)},
        "asymmetric",
        {"b": np.array([4.5, 0.0], np.float32)},
        {"conv: 1/a": 4},
    )
    path = tmp_path / "table.yaml"
    table.save(path)
    loaded = CalibrationTable.load(path)
    assert loaded.thresholds == table.thresholds
    assert (loaded.method, loaded.samples) == ("kl", 7)
    assert loaded.preprocessing == table.preprocessing
    assert loaded.details == {"conv: 1/a": {}, **table.details}
    assert loaded.ranges == table.ranges
    assert (loaded.activations, loaded.bits) == ("asymmetric", {"conv: 1/a": 4})
    assert loaded.maxima() == {"conv: 1/a": 0.1, "b": 4.5}
    for kind in ("means", "squares", "peaks"):
        assert getattr(loaded, kind)["b"].tobytes() == getattr(table, kind)["b"].tobytes()
    path.write_text(path.read_text().replace("threshold: 3.0", "threshold: 2.5"))
    assert CalibrationTable.load(path).thresholds["b"] == 2.5
    # Saving is deterministic and leaves nothing half-written.
    table.save(path)
    first = path.read_bytes()
    table.save(path)
    assert path.read_bytes() == first
    assert [item.name for item in tmp_path.iterdir()] == ["table.yaml"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version: 1\nvalues: {a: {threshold: -1}}", "threshold must be a number >= 0"),
        ("version: 1\nvalues: {a: {threshold: .nan}}", "threshold must be a number >= 0"),
        ("version: 1\nvalues: {a: {max: 2}}", "`a`: threshold must be"),
        ("version: 9\nvalues: {}", "needs `version: 1`"),
        ("version: 1", "needs `values`"),
        ("version: 1\nvalues: {}\nmeans: {a: '###'}", "`a` is not base64"),
        ("version: 1\nvalues: {}\nmeans: {a: 'AADAfw=='}", "`a` is not finite"),
        ("a: [", "malformed"),
        ("!!python/object/apply:os.getcwd []", "malformed"),
        ("[" * 5000, "malformed"),
        ("version: 2026-13-45", "malformed"),
        ("version: 1\nvalues: {a: {threshold: 1.0, max: big}}", "`a`: max must be a finite"),
        ("version: 1\nvalues: {a: {threshold: 1.0, max: .nan}}", "`a`: max must be a finite"),
        ("version: 1\nvalues: {a: {threshold: 1.0, min: -.inf}}", "`a`: min must be a finite"),
        ("version: 1\nvalues: {a: {threshold: 1" + "0" * 400 + "}}", "threshold must be a number"),
        ("version: 1\nvalues: {a: {threshold: 1.0, low: 0.5, high: 1}}", "low must be at most 0"),
        ("version: 1\nvalues: {a: {threshold: 1.0, low: -1}}", "`a`: high must be a finite"),
        ("version: 1\nvalues: {a: 1.0, b: 2.0, a: 3.0}", "`a` is given twice"),
        ("version: 1\nvalues: {a: {threshold: 1.0, threshold: 2.0}}", "`threshold` is given"),
        ("version: 1\nvalues: {a: 1.0}\nvalues: {a: 2.0}", "`values` is given twice"),
        ("version: 1\nvalues: {}\nbits: {a: 5}", "`a` must have 4 or 8, not 5"),
        ("version: 1\nvalues: {}\nbits: [4]", "`bits` must be a mapping"),
        ("version: 1\nvalues: {}\nactivations: odd", "`activations` must be"),
        ("version: 1\nsamples: many\nvalues: {a: 1.0}", "`samples` must be a count"),
        ("version: 1\nsamples: true\nvalues: {a: 1.0}", "`samples` must be a count"),
    ],
)
def test_malformed_tables_say_where(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "table.yaml"
    path.write_text(text)
    with pytest.raises(TilewrightError) as caught:
        CalibrationTable.load(path)
    assert caught.value.code == "E0301"
    assert message in str(caught.value)


def test_missing_table() -> None:
    with pytest.raises(TilewrightError) as caught:
        CalibrationTable.load("/nonexistent/table.yaml")
    assert caught.value.code == "E0701"
