"""Ranges chosen by the error at the network's output."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.unit.quant_top_graphs import TopGraph
from tilewright.compiler import Stage, compile_model, front_end
from tilewright.diagnostics import UsageError
from tilewright.ir.context import CompileContext
from tilewright.ptq.options import QuantOptions
from tilewright.ptq.range_trials import NetworkTrials, ValueTrials, quantised
from tilewright.ptq.ranges import STAGE, choose_ranges
from tilewright.quant.calibrate import observe
from tilewright.quant.compare import sqnr
from tilewright.quant.reference import QuantSession
from tilewright.quant.table import CalibrationTable
from tilewright.runtime.float_executor import TopSession
from tilewright.spec.hardware import load_target
from tilewright.transforms.quant.scales import EdgeScale

Array = npt.NDArray[Any]
CASE = Path(__file__).parents[1] / "cases" / "quant-kl-sparse-peaks"
METHODS = ("best", "max", "mean", "kl", "mse", "percentile")


def gated(peak: float, share: float, count: int = 12) -> tuple[Stage, list[dict[str, Array]]]:
    """Return a network whose answer is in rare peaks of its input, and samples.

    `b = relu(x)` carries them; what `c` makes of everything below 5 is zero.
    """
    g = TopGraph(x=(1, 8, 8, 8))
    rng = np.random.default_rng(0)
    b = g.conv("b", g.input("x"), np.eye(8)[:, :, None, None], clamp_min=0.0)
    c = g.conv("c", b, 4 * np.eye(8)[:, :, None, None], np.full(8, -20.0), clamp_min=0.0)
    y = g.conv("d", c, rng.normal(size=(8, 8, 1, 1)))
    module = g.finish(y=y)
    samples: list[dict[str, Array]] = []
    for _ in range(count):
        x = np.abs(rng.normal(size=(1, 8, 8, 8))) * 0.3
        where = rng.random(x.shape) < share
        where.reshape(-1)[rng.integers(x.size)] = True
        x[where] = rng.uniform(0.7, 1.0, int(where.sum())) * peak
        samples.append({"x": x.astype(np.float32)})
    return Stage(module, g.ctx.weights), samples


def chosen(
    stage: Stage, samples: Sequence[dict[str, Array]], **options: Any
) -> tuple[CalibrationTable, CompileContext]:
    statistics = observe(stage.module, stage.weights, samples)
    context = CompileContext(stage.weights.copy())
    return choose_ranges(stage, statistics, context, samples, QuantOptions(**options)), context


def noise(stage: Stage, samples: Sequence[dict[str, Array]], table: CalibrationTable) -> float:
    trials = NetworkTrials(stage, CompileContext(stage.weights.copy()), samples)
    return float(trials.noise(table, table.activations == "asymmetric").mean())


@pytest.mark.parametrize("method", METHODS)
def test_the_peaks_of_the_reported_case_are_kept(method: str) -> None:
    arrays = dict(np.load(CASE / "calib.npz"))
    count = len(next(iter(arrays.values())))
    target = load_target("edge16")
    front = front_end(CASE / "model.onnx", target)
    samples: list[dict[str, Array]] = []
    session = TopSession(front.stage.module, front.stage.weights)
    inputs = dict(np.load(CASE / "inputs.npz"))
    for index in range(count):
        samples.append(
            {name: arrays[name][index].reshape(inputs[name].shape) for name in session.inputs}
        )
    quant = QuantOptions(method=None if method == "best" else method)  # pyright: ignore[reportArgumentType]
    compiled = compile_model(front, target, samples=samples, quant=quant)
    stage = compiled.stages["quant"]
    found = QuantSession(stage.module, stage.weights).run(inputs)
    for name, wanted in np.load(CASE / "outputs.npz").items():
        assert sqnr(wanted, found[name]) >= 25


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("share", [0.004, 0.0])
def test_peaks_that_carry_the_answer_are_kept(method: str, share: float) -> None:
    stage, samples = gated(9.0, share)
    table, _ = chosen(stage, samples[:6], method=method)
    fresh = samples[6:]
    plain, _ = chosen(stage, samples[:6], method="max")
    assert noise(stage, fresh, table) < max(-25.0, noise(stage, fresh, plain) + 1.0)


def test_a_rule_that_costs_the_output_is_taken_back_with_a_warning() -> None:
    """One peak in 200 000 elements: rarer than what `percentile` may clip."""
    stage, samples = gated(9.0, 0.0, 40)
    rng = np.random.default_rng(5)
    quiet = [
        {"x": (np.abs(rng.normal(size=(1, 8, 8, 8))) * 0.3).astype(np.float32)} for _ in range(400)
    ]
    statistics = observe(stage.module, stage.weights, [*quiet, *samples[:4]], limit=None)
    table = statistics.table("percentile")
    assert table.thresholds["b"] < 5
    context = CompileContext(stage.weights.copy())
    options = QuantOptions(method="percentile", activations="asymmetric")
    found = choose_ranges(stage, statistics, context, samples[4:20], options)
    assert found.thresholds["b"] > 7
    warnings = [item for item in context.decisions if "warning" in item.details]
    assert len(warnings) == 1
    assert warnings[0].stage == STAGE
    assert "percentile" in warnings[0].details["warning"]
    assert "b" in warnings[0].details["layers"]
    assert "`b`" in warnings[0].details["warning"]
    plain = statistics.table("max")
    plain.activations = "asymmetric"
    assert noise(stage, samples[20:], found) <= noise(stage, samples[20:], plain) + 1.0


def bell(seed: int = 0) -> tuple[Stage, list[dict[str, Array]]]:
    """Return a network of bell-shaped values with outliers that do not matter, and samples."""
    rng = np.random.default_rng(seed)
    g = TopGraph(x=(1, 4, 12, 12))
    y = g.conv("a", g.input("x"), rng.normal(size=(8, 4, 3, 3)), pads=(1, 1, 1, 1))
    z = g.conv("b", y, rng.normal(size=(16, 8, 3, 3)) * 0.2, pads=(1, 1, 1, 1), clamp_min=0.0)
    module = g.finish(z=z)
    samples = [{"x": rng.standard_t(4, (1, 4, 12, 12)).astype(np.float32)} for _ in range(24)]
    return Stage(module, g.ctx.weights), samples


@pytest.mark.parametrize("level", [1, 2])
def test_best_is_no_worse_than_any_rule(level: int) -> None:
    stage, samples = bell()
    best, context = chosen(stage, samples, method="best", level=level, activations="symmetric")
    assert best.method == "best"
    reached = noise(stage, samples, best)
    for rule in METHODS[1:]:
        table = observe(stage.module, stage.weights, samples).table(rule)
        # A smaller gain may be chance, and is not taken.
        assert reached <= noise(stage, samples, table) + 0.3, rule
    assert any(item.stage == STAGE for item in context.decisions)
    again, _ = chosen(stage, samples, method="best", level=level, activations="symmetric")
    assert (again.thresholds, again.ranges) == (best.thresholds, best.ranges)


def test_codes_are_chosen_by_the_output() -> None:
    stage, samples = gated(9.0, 0.01)
    table, context = chosen(stage, samples, method="max", activations="auto")
    assert table.activations == "asymmetric"
    assert any("asymmetric ones change" in item.reason for item in context.decisions)
    fixed, context = chosen(stage, samples, method="max", activations="symmetric")
    assert fixed.activations == "symmetric"
    assert context.decisions == []


def test_without_samples_a_value_is_judged_by_itself() -> None:
    stage, samples = bell()
    statistics = observe(stage.module, stage.weights, samples)
    context = CompileContext(stage.weights.copy())
    other = [{"x": np.zeros((1, 4, 9, 9), np.float32)}]
    for few in ([], other):
        table = choose_ranges(stage, statistics, context, few, QuantOptions())
        assert table.thresholds == statistics.table("kl").thresholds
        assert table.activations == "asymmetric"


def test_unknown_rules_are_refused() -> None:
    stage, samples = bell()
    with pytest.raises(UsageError, match="must be one of best, max"):
        chosen(stage, samples, method="median")


def test_the_error_of_one_value_is_what_its_codes_make() -> None:
    stage, samples = bell()
    trials = ValueTrials(stage, samples[:3])
    scales = [EdgeScale(0.1), EdgeScale(0.02, -20)]
    found = trials.errors("a", scales)
    assert found is not None
    assert found.shape == (2, 3)
    g = TopGraph(a=(1, 8, 12, 12))
    z = g.conv("b", g.input("a"), stage.weights.get("b.w"), pads=(1, 1, 1, 1), clamp_min=0.0)
    rest = TopSession(g.finish(z=z), g.ctx.weights)
    whole = TopSession(stage.module, stage.weights)
    energy = sum(float((whole.run(sample)["z"] ** 2).sum()) for sample in samples[:3])
    for row, scale in enumerate(scales):
        for index, sample in enumerate(samples[:3]):
            values = whole.run(sample, ["a", "z"])
            got = rest.run({"a": quantised(values["a"], scale)})["z"]
            wanted = float(((got - values["z"]) ** 2).sum()) / energy
            assert found[row, index] == pytest.approx(wanted, rel=1e-3)
    # Nothing lies behind the output itself.
    assert trials.errors("b", scales) is None


def test_codes_saturate_at_both_ends() -> None:
    values = np.array([-10.0, -1.0, -0.26, 0.0, 0.24, 1.0, 10.0], np.float32)
    assert quantised(values, EdgeScale(0.01)).tolist() == pytest.approx(
        [-1.27, -1.0, -0.26, 0.0, 0.24, 1.0, 1.27]
    )
    assert quantised(values, EdgeScale(0.5, -128)).tolist() == pytest.approx(
        [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 10.0]
    )
