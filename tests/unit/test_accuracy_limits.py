"""Measuring a quantised model, and limits it must keep."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from xdsl.dialects.builtin import ModuleOp

from tests.unit.quant_top_graphs import TopGraph
from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.ir.context import CompileContext
from tilewright.ir.weights import WeightStore
from tilewright.quant.accuracy import Accuracy, Limits, OutputAccuracy, measure, parse_drop
from tilewright.quant.calibrate import calibrate
from tilewright.quant.reference import QuantSession
from tilewright.runtime.float_executor import TopSession
from tilewright.transforms.quant.quantize import quantize_module

Sample = dict[str, np.ndarray[Any, Any]]


@dataclass
class Stage:
    module: ModuleOp
    weights: WeightStore


@dataclass
class Made:
    stages: dict[str, Stage]


def samples(count: int = 40) -> list[Sample]:
    rng = np.random.default_rng(5)
    return [{"x": rng.normal(size=(1, 6, 4, 4)).astype(np.float32)} for _ in range(count)]


def compiled(coarse: float = 1.0, both: bool = True) -> Made:
    """An image and class scores of one convolution; `coarse` widens its range."""
    rng = np.random.default_rng(0)
    g = TopGraph(x=(1, 6, 4, 4))
    image = g.conv("c", g.input("x"), rng.normal(size=(8, 6, 1, 1)))
    pooled = g.op("reduce", "p", [image], kind="mean", axes=(2, 3), keepdims=False)
    scores = g.op("linear", "fc", [pooled, g.weight("w", rng.normal(size=(5, 8))), g.none()])
    module = g.finish(image=image, scores=scores) if both else g.finish(image=image)
    table = calibrate(module, g.ctx.weights, samples(8), method="max")
    thresholds = {**table.thresholds, "c": table.thresholds["c"] * coarse}
    copy, ctx = module.clone(), CompileContext(g.ctx.weights.copy())
    quantize_module(ctx, copy, thresholds, "half_up")
    return Made({"top": Stage(module, g.ctx.weights), "quant": Stage(copy, ctx.weights)})


def test_outputs_are_measured_each_by_itself() -> None:
    made = compiled()
    found = measure(made, samples())
    assert found.samples == 40
    by_name = {item.name: item for item in found.outputs}
    assert by_name["image"].agreement is None  # no class scores
    assert by_name["scores"].agreement is not None
    assert found.sqnr_db == min(item.sqnr_db for item in found.outputs)
    assert by_name["image"].worst_sqnr_db <= by_name["image"].sqnr_db
    # The same by hand.
    top, quant = made.stages["top"], made.stages["quant"]
    real, held = TopSession(top.module, top.weights), QuantSession(quant.module, quant.weights)
    pairs = [(real.run(item), held.run(item)) for item in samples()]
    same = [int(a["scores"].argmax() == b["scores"].argmax()) for a, b in pairs]
    assert found.agreement == pytest.approx(np.mean(same))
    signal = sum(float((a["image"].astype(float) ** 2).sum()) for a, _ in pairs)
    noise = sum(float(((a["image"] - b["image"]).astype(float) ** 2).sum()) for a, b in pairs)
    assert by_name["image"].sqnr_db == pytest.approx(10 * math.log10(signal / noise), abs=1e-3)


def test_labels_count_right_answers_of_both() -> None:
    made = compiled(coarse=60.0)
    top = made.stages["top"]
    session = TopSession(top.module, top.weights)
    labels = [int(session.run(item)["scores"].argmax()) for item in samples()]
    labels[0] = (labels[0] + 1) % 5
    found = measure(made, samples(), labels)
    assert found.top1_float == pytest.approx(39 / 40)
    assert found.top1_quant is not None
    assert found.top1_quant < 0.9
    assert found.drop == pytest.approx(39 / 40 - found.top1_quant)
    [words] = Limits(max_drop=0.01).broken(found)
    assert "top-1 is" in words
    assert "97.5%" in words
    assert "40 labelled samples" in words
    assert Limits(max_drop=0.9).broken(found) == []


def test_limits_that_are_kept_and_broken() -> None:
    good, bad = measure(compiled(), samples()), measure(compiled(coarse=60.0), samples())
    limits = Limits(max_drop=0.1, min_sqnr=20)
    assert limits.broken(good) == []
    first, second = limits.broken(bad)
    assert "the best class differs from the float model's for" in first
    assert "10.00% at most" in first
    assert f'output "{min(bad.outputs, key=lambda o: o.sqnr_db).name}" has an SQNR of' in second
    assert "at least 20 dB" in second
    assert not Limits()
    assert Limits(min_sqnr=0.0)


def test_models_without_class_scores_have_signal_to_noise_only() -> None:
    made = compiled(both=False)
    found = measure(made, samples(3))
    assert found.agreement is None
    assert found.drop is None
    assert found.sqnr_db > 30
    assert "best class" not in found.words()
    with pytest.raises(UsageError, match="needs an output of class scores"):
        Limits(max_drop=0.01).broken(found)
    with pytest.raises(TilewrightError, match="no output holds class scores") as caught:
        measure(made, samples(2), [0, 1])
    assert caught.value.code == "E0301"


def test_samples_and_labels_must_fit() -> None:
    with pytest.raises(TilewrightError, match="no samples to measure"):
        measure(compiled(), [])
    with pytest.raises(TilewrightError, match="more samples than labels"):
        measure(compiled(), samples(3), [1])


def test_an_exact_model_has_no_number_of_decibels_in_json() -> None:
    exact = Accuracy(3, (OutputAccuracy("y", math.inf, math.inf, 1.0, 1.0),))
    assert exact.to_json()["sqnr_db"] is None
    json.dumps(exact.to_json(), allow_nan=False)
    assert Limits(min_sqnr=300).broken(exact) == []
    assert exact.drop == 0


@pytest.mark.parametrize(("text", "value"), [("1%", 0.01), ("0.01", 0.01), ("0", 0), ("100%", 1)])
def test_drops_are_shares(text: str, value: float) -> None:
    assert parse_drop(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["one", "-1%", "101%", "2", "nan", "%", ""])
def test_other_drops_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="must be a share of samples"):
        parse_drop(text)
