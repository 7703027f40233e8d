"""Layers by themselves: the parts of an error, and seeded faults that must be pointed at."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from xdsl.dialects.builtin import ModuleOp

from tests.unit.quant_top_graphs import TopGraph
from tilewright.ir.context import CompileContext
from tilewright.quant.advice import fusion_step, layer_step, scale_step
from tilewright.quant.calibrate import calibrate
from tilewright.quant.channels import (
    Channels,
    Inspector,
    ScaleFinding,
    channel_axes,
    inspect_scales,
    outliers,
    weight_magnitudes,
)
from tilewright.quant.compare import (
    Comparison,
    Layer,
    LayerError,
    compare,
    holds_scores,
    saturating,
)
from tilewright.quant.probe import FloatProbe
from tilewright.report.accuracy import AccuracyReport, short, text, to_json
from tilewright.report.accuracy_html import accuracy_html
from tilewright.runtime.float_executor import TopSession
from tilewright.transforms.quant.convert_to_half import convert_module
from tilewright.transforms.quant.quantize import quantize_module

Sample = dict[str, np.ndarray[Any, Any]]
CHAIN = ("c1", "c2", "c3", "c4", "c5")


def network(loud: float = 1.0) -> tuple[TopGraph, ModuleOp]:
    """Five convolutions, a residual sum, a table, a pool and a classifier.

    `loud`: channel 3 of c3 is so many times the others, and c4 reads so much less of it.
    """
    rng = np.random.default_rng(0)
    g = TopGraph(x=(1, 6, 10, 10))
    value = g.input("x")
    sizes = (6, 16, 16, 16, 16, 16)
    kept = value
    for place, name in enumerate(CHAIN):
        weight = rng.normal(size=(sizes[place + 1], sizes[place], 3, 3))
        weight *= math.sqrt(2 / (9 * sizes[place]))
        bias = rng.normal(0, 0.1, sizes[place + 1])
        if name == "c3":
            weight[3] *= loud
            bias[3] *= loud
        if name == "c4":
            weight[:, 3] /= loud
        value = g.conv(name, value, weight, bias, pads=(1, 1, 1, 1), clamp_min=0.0)
        if name == "c1":
            kept = value
    total = g.op("add", "sum", [value, kept])
    table = g.op("hard_swish", "swish", [total])
    pooled = g.op("reduce", "pool", [table], kind="mean", axes=(2, 3), keepdims=False)
    fc = g.op("linear", "fc", [pooled, g.weight("fc.w", rng.normal(size=(7, 16))), g.none()])
    return g, g.finish(y=fc)


def samples(count: int = 6) -> list[Sample]:
    rng = np.random.default_rng(7)
    return [{"x": rng.normal(size=(1, 6, 10, 10)).astype(np.float32)} for _ in range(count)]


@dataclass
class Made:
    top: TopGraph
    module: ModuleOp
    quantised: ModuleOp
    ctx: CompileContext
    thresholds: dict[str, float]


def quantised(wrecked: dict[str, float] | None = None, loud: float = 1.0) -> Made:
    """Quantise the network, some thresholds multiplied by hand."""
    g, module = network(loud)
    table = calibrate(module, g.ctx.weights, samples(), method="max")
    thresholds = {
        name: value * (wrecked or {}).get(name, 1.0) for name, value in table.thresholds.items()
    }
    copy, ctx = module.clone(), CompileContext(g.ctx.weights.copy())
    quantize_module(ctx, copy, thresholds, "half_up")
    return Made(g, module, copy, ctx, thresholds)


def examined(made: Made) -> tuple[Comparison, list[ScaleFinding], Inspector]:
    watch = Inspector(made.module)
    found = compare(
        made.module, made.top.ctx.weights, made.quantised, made.ctx.weights, samples(),
        watch=watch,
    )  # fmt: skip
    findings = inspect_scales(
        found, watch.found, made.module, made.top.ctx.weights, made.ctx.decisions
    )
    return found, findings, watch


def layer(found: Comparison, name: str) -> Layer:
    return next(item for item in found.layers if item.name == name)


def test_a_sound_network_has_no_findings() -> None:
    found, findings, _ = examined(quantised())
    assert [item.name for item in found.layers] == ["x", *CHAIN, "sum", "swish", "pool", "fc"]
    assert found.samples == 6
    assert found.injected == 2
    assert not [item for item in findings if not item.weights]
    assert scale_step(findings).verdict == "ok"
    assert layer_step(found).verdict == "ok"
    assert all(item.isolated.sqnr > 25 for item in found.layers)


def test_errors_of_a_layer_by_itself_do_not_add_up() -> None:
    found, _, _ = examined(quantised())
    # What arrives holds all layers before; alone, each has only its operands' codes and its own.
    for name in ("c3", "c4", "c5"):
        item = layer(found, name)
        assert item.sqnr < item.isolated.sqnr < item.own.sqnr
    first = layer(found, "x")
    assert first.kind == "input"
    assert first.isolated.noise == pytest.approx(first.own.noise)
    assert sum(item.to_output or 0 for item in found.layers) == pytest.approx(1)
    assert all(item.clipped == 0 for item in found.layers)


def test_the_isolated_error_is_that_of_quantised_float_operands() -> None:
    """Against arithmetic done here: a linear layer whose sums are kept as they are."""
    g = TopGraph(x=(1, 4))
    weight = np.random.default_rng(3).normal(size=(3, 4)).astype(np.float32)
    fc = g.op("linear", "fc", [g.input("x"), g.weight("w", weight), g.none()])
    module = g.finish(y=g.op("relu", "r", [fc]))
    x = np.array([[0.31, -0.77, 0.02, 0.5]], np.float32)
    copy, ctx = module.clone(), CompileContext(g.ctx.weights.copy())
    quantize_module(ctx, copy, {"x": 1.0, "fc": 4.0, "r": 4.0}, "half_up")
    found = compare(module, g.ctx.weights, copy, ctx.weights, [{"x": x}])
    scale = np.abs(weight).max(axis=1) / 127
    codes = np.rint(weight / scale[:, None])
    held = np.rint(x * 127) / 127
    wanted = np.rint(held @ (codes * scale[:, None]).T * 127 / 4) * 4 / 127
    real = x @ weight.T
    item = layer(found, "fc")
    assert item.isolated.noise == pytest.approx(((wanted - real) ** 2).sum(), rel=1e-3)
    twin = held @ weight.T
    assert item.own.noise == pytest.approx(((wanted - twin) ** 2).sum(), rel=1e-3)
    straight = np.rint(real * 127 / 4) * 4 / 127
    assert item.codes.noise == pytest.approx(((straight - real) ** 2).sum(), rel=1e-3)


@pytest.mark.parametrize("name", [*CHAIN, "sum", "swish"])
@pytest.mark.parametrize(("factor", "kind"), [(0.1, "clips"), (64.0, "too wide")])
def test_a_wrecked_scale_is_pointed_at(name: str, factor: float, kind: str) -> None:
    made = quantised({name: factor})
    found, findings, _ = examined(made)
    assert found.blamed(1)[0].name == name
    assert (found.blamed(1)[0].to_output or 0) > 0.8
    assert found.cause(layer(found, name)) == ("range", name)
    faults = [item for item in findings if item.kind in ("clips", "too wide")]
    assert [(item.layer, item.kind) for item in faults] == [(name, kind)]
    step = scale_step(findings)
    assert (step.verdict, step.names[0]) == ("suspect", name)
    assert layer_step(found).names[0] == name
    if kind == "clips":
        assert layer(found, name).clipped_share > 0.01
    # Whoever reads the layer is not blamed: its error comes with the operand.
    if name in CHAIN[:-1]:
        reader = CHAIN[CHAIN.index(name) + 1]
        assert found.cause(layer(found, reader)) == ("operand", name)


def test_an_outlier_channel_is_pointed_at() -> None:
    found, findings, watch = examined(quantised(loud=60.0))
    of_results = [item for item in findings if not item.weights and item.kind != "dead channels"]
    assert [(item.layer, item.kind, item.channels) for item in of_results] == [
        ("c3", "outlier channels", (3,))
    ]
    assert of_results[0].ratio > 20
    # Its weights are outlying too: that is where the channel comes from.
    of_weights = [item for item in findings if item.weights]
    assert [(item.layer, item.channels) for item in of_weights] == [("c3", (3,))]
    assert found.blamed(1)[0].name in ("c3", "c4")
    step = scale_step(findings)
    assert step.names == ["c3"]
    assert any("--equalize" in item for item in step.tries)
    assert outliers(watch.found["c3"].magnitudes)[0] == [3]


def test_clipping_without_effect_is_no_suspect() -> None:
    """As in a mask of attention: huge negative values whose exact size does not matter."""
    rng = np.random.default_rng(0)
    g = TopGraph(x=(1, 6, 16))
    mask = np.where(np.arange(16) < 5, 0.0, -1e4)[None, None]
    masked = g.op("add", "masked", [g.input("x"), g.weight("mask", mask)])
    kept = g.op("relu", "kept", [masked])
    fc = g.op("linear", "fc", [kept, g.weight("w", rng.normal(size=(4, 16))), g.none()])
    module = g.finish(y=fc)
    feed = [{"x": rng.normal(size=(1, 6, 16)).astype(np.float32)} for _ in range(3)]
    copy, ctx = module.clone(), CompileContext(g.ctx.weights.copy())
    quantize_module(ctx, copy, {"x": 4.0, "masked": 4.0, "kept": 4.0, "fc": 12.0}, "half_up")
    watch = Inspector(module)
    found = compare(module, g.ctx.weights, copy, ctx.weights, feed, watch=watch)
    [finding] = [item for item in inspect_scales(found, watch.found) if item.kind == "clips"]
    assert finding.layer == "masked"
    assert not finding.noticeable
    assert scale_step([finding]).names == []


def test_what_costs_nothing_is_said_but_no_suspect() -> None:
    _, findings, _ = examined(quantised(loud=60.0))
    step = scale_step(findings, bad=False)
    assert (step.verdict, step.names) == ("ok", ["c3"])


def test_dead_channels_are_shown_and_cost_nothing() -> None:
    g, module = network()
    name = next(item for item in g.ctx.weights if item.startswith("c2.w"))
    weight = g.ctx.weights.get(name).copy()
    weight[5] = 0
    g.ctx.weights.set(name, weight)
    bias = next(item for item in g.ctx.weights if item.startswith("c2.b"))
    values = g.ctx.weights.get(bias).copy()
    values[5] = 0
    g.ctx.weights.set(bias, values)
    copy, ctx = module.clone(), CompileContext(g.ctx.weights.copy())
    table = calibrate(module, g.ctx.weights, samples(), method="max")
    quantize_module(ctx, copy, table.thresholds, "half_up")
    _, findings, _ = examined(Made(g, module, copy, ctx, table.thresholds))
    dead = [(item.layer, item.channels, item.weights) for item in findings]
    assert dead == [("c2", (5,), False), ("c2", (5,), True)]
    assert scale_step(findings).verdict == "ok"
    assert weight_magnitudes(module, g.ctx.weights)["c2"][5] == 0


def test_few_channels_have_no_outliers() -> None:
    assert outliers(np.array([1.0, 100.0, 1.0])) == ([], 1.0)
    assert outliers(np.array([1.0, 0.0, 0.0, 0.0])) == ([], 1.0)
    found, ratio = outliers(np.array([1.0, 9.0, 1.0, 0.0, 1.0, 20.0, 1.0]))
    assert found == [5, 1]
    assert ratio == 20


def test_a_threshold_from_in_front_of_a_fused_clamp_is_found() -> None:
    g = TopGraph(x=(1, 4, 6, 6))
    weight = np.random.default_rng(0).normal(size=(4, 4, 1, 1)) * 5
    module = g.finish(y=g.conv("c", g.input("x"), weight, clamp_min=0.0, clamp_max=6.0))
    good = fusion_step(module, None, {"x": 1.0, "c": 6.0}, None)
    assert not good.names
    late = fusion_step(module, None, {"x": 1.0, "c": 23.0}, None)
    assert (late.verdict, late.names) == ("suspect", ["c"])
    assert "observed in front of the clamp" in late.evidence[0]


def test_codes_are_clamped_where_the_activation_is() -> None:
    made = quantised()
    assert fusion_step(made.module, made.quantised, made.thresholds, None).names == []
    from xdsl.dialects.builtin import IntegerAttr, i64

    for op in made.quantised.walk():
        if op.name == "quant.conv" and "c2" in str(op.attributes["name"]):
            op.attributes["lo"] = IntegerAttr(-127, i64)
    step = fusion_step(made.module, made.quantised, made.thresholds, None)
    assert (step.verdict, step.names) == ("suspect", ["c2"])


def test_codes_that_stand_for_an_activation_are_no_error() -> None:
    """A quantised model without its ReLU: codes from -128 up hold nothing negative."""
    rng = np.random.default_rng(0)
    g = TopGraph(x=(1, 4, 6, 6))
    c = g.conv("c", g.input("x"), rng.normal(size=(8, 4, 1, 1)))
    module = g.finish(y=g.conv("d", c, rng.normal(size=(3, 8, 1, 1))))
    assert saturating(module) is module
    from xdsl.dialects.builtin import FloatAttr, IntegerAttr, f64, i32

    for op in module.walk():
        if op.attributes.get("name") is not None and '"c"' in str(op.attributes["name"]):
            op.attributes["quant_scale"] = FloatAttr(0.05, f64)
            op.attributes["quant_zero"] = IntegerAttr(-128, i32)
    feed = [{"x": rng.normal(size=(1, 4, 6, 6)).astype(np.float32)} for _ in range(3)]
    copy, ctx = module.clone(), CompileContext(g.ctx.weights.copy())
    quantize_module(ctx, copy, {"x": 4.0, "c": 12.0, "d": 30.0}, "half_up")
    found = compare(module, g.ctx.weights, copy, ctx.weights, feed)
    assert layer(found, "c").clipped == 0
    assert layer(found, "c").isolated.sqnr > 30
    assert found.outputs[0].sqnr > 25
    wanted = TopSession(saturating(module), g.ctx.weights).run_values(feed[0])["c"]
    assert wanted.min() == 0


def test_fp16_layers_are_compared_too() -> None:
    g, module = network()
    half, ctx = module.clone(), CompileContext(g.ctx.weights.copy())
    convert_module(ctx, half, {})
    found = compare(module, g.ctx.weights, half, ctx.weights, samples(2))
    assert {"c1", "sum", "fc"} <= {item.name for item in found.layers}
    assert all(item.isolated.sqnr > 50 for item in found.layers)
    assert layer(found, "c3").scale is None
    assert layer(found, "c3").steps is None


def test_the_probe_computes_layers_from_what_is_given() -> None:
    g, module = network()
    probe, session = FloatProbe(module, g.ctx.weights), TopSession(module, g.ctx.weights)
    sample = samples(1)[0]
    values = session.run_values(sample)
    for name, value in probe.each(values).items():
        np.testing.assert_allclose(value, values[name], rtol=1e-4, atol=1e-4)
    shifted = dict(values)
    shifted["c2"] = values["c2"] + 1
    moved = probe.each(shifted)
    assert np.abs(moved["c3"] - values["c3"]).max() > 0.1
    np.testing.assert_allclose(moved["c4"], values["c4"], rtol=1e-4, atol=1e-4)


def test_the_probe_adds_an_error_to_one_value() -> None:
    g, module = network()
    probe, session = FloatProbe(module, g.ctx.weights), TopSession(module, g.ctx.weights)
    sample = samples(1)[0]
    values = session.run_values(sample)
    plain = probe.shifted(sample, None)["y"]
    np.testing.assert_allclose(plain, session.run(sample)["y"], rtol=1e-4, atol=1e-4)
    moved = probe.shifted(sample, "fc", np.full_like(values["fc"], 0.5))["y"]
    np.testing.assert_allclose(moved, plain + 0.5, rtol=1e-4, atol=1e-4)
    at_input = probe.shifted(sample, "x", np.ones_like(values["x"]))["y"]
    wanted = session.run({"x": sample["x"] + 1})["y"]
    np.testing.assert_allclose(at_input, wanted, rtol=1e-3, atol=1e-3)


def test_channels_are_where_the_layout_says() -> None:
    g = TopGraph(x=(1, 6, 6, 4))
    c = g.conv("c", g.input("x"), np.ones((8, 4, 1, 1)), layout="nhwc")
    r = g.op("relu", "r", [c])
    t = g.op("transpose", "t", [r], perm=(0, 3, 1, 2))
    f = g.op("reshape", "f", [t], (1, 288))
    fc = g.op("linear", "fc", [f, g.weight("w", np.ones((5, 288))), g.none()])
    axes = channel_axes(g.finish(y=fc))
    assert axes == {"x": 3, "c": 3, "r": 3, "t": 1, "fc": 1}


def test_the_table_fits_a_hundred_columns_and_names_the_worst() -> None:
    made = quantised({"c3": 0.1})
    found, findings, watch = examined(made)
    found.layers[2].name = "/a/very/long/name/of/a/layer" * 4 + "/tail"
    report = AccuracyReport("m.onnx", "edge16", "int8", found, findings, watch.found)
    lines = text(report, rows=3)
    assert max(map(len, lines)) <= 100
    assert any(line.startswith("c3") and line.endswith("range") for line in lines)
    assert any("and 7 layers more" in line for line in lines)
    assert short("abc" * 20).startswith("…")
    kept = to_json(report)
    assert kept["blamed"][0] == "c3"
    alone = [row["isolated_db"] for row in kept["layers"]]
    assert alone == sorted(alone)
    assert kept["scales"][0]["layer"] == "c3"


def test_the_page_is_whole_and_reads_nothing_from_elsewhere() -> None:
    import re
    from xml.etree import ElementTree

    made = quantised({"c3": 0.1}, loud=60.0)
    found, findings, watch = examined(made)
    found.layers[1].name = "<script>alert(1)</script>"
    page = accuracy_html(
        AccuracyReport("m<b>.onnx", "edge16", "int8", found, findings, watch.found)
    )
    assert "<script" not in page
    assert not re.search(r"(?:src|href)\s*=|url\(|https?:", page)
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    # Along the network; a distribution and channels for each of the layers that are drawn.
    assert len(pictures) > 10
    for picture in pictures:
        ElementTree.fromstring(picture)
    assert page.count('stroke="#c23b3b"') >= 2 * 7  # two ends of a range in each distribution


def test_histograms_count_every_value_once() -> None:
    made = quantised()
    found, _, watch = examined(made)
    for item in found.layers:
        kept: Channels = watch.found[item.name]
        assert kept.real.sum() == kept.coded.sum() == item.elements


def test_what_can_hold_class_scores() -> None:
    assert holds_scores((1, 10))
    assert holds_scores((10,))
    assert holds_scores((1, 10, 1, 1))
    assert not holds_scores((1, 1))
    assert not holds_scores((1, 4, 10))
    assert not holds_scores(())


def test_cosine_and_largest_are_those_of_the_sums() -> None:
    error = LayerError("a")
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=50), rng.normal(size=50)) for _ in range(3)]
    for a, b in parts:
        error.update(a, b)
    a, b = (np.concatenate(items) for items in zip(*parts, strict=True))
    assert error.cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), abs=1e-5)
    assert error.largest == pytest.approx(np.abs(a - b).max(), rel=1e-6)
    huge = LayerError("b")
    huge.update(np.array([1e30]), np.array([1.1e30]))
    assert huge.sqnr == pytest.approx(20, abs=1e-3)
