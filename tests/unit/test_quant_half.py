"""fp16: conversion, range checks, and the reference's rounding."""

from __future__ import annotations

import numpy as np
import pytest
from xdsl.dialects.builtin import ModuleOp

from tests.unit.quant_top_graphs import TopGraph
from tilewright.diagnostics import TilewrightError
from tilewright.ir.context import CompileContext
from tilewright.quant.calibrate import calibrate
from tilewright.quant.graph import layer_of, main_function
from tilewright.quant.host import to_half
from tilewright.quant.reference import QuantSession, run_quant
from tilewright.quant.table import CalibrationTable, write_attribute
from tilewright.runtime.float_executor import TopSession
from tilewright.spec.hardware import load_target
from tilewright.transforms.quant.convert_to_half import ConvertToHalfPass, convert_module
from tilewright.transforms.quant.partition import PartitionPass


def net(gain: float = 1.0) -> tuple[TopGraph, ModuleOp]:
    rng = np.random.default_rng(0)
    g = TopGraph(x=(1, 3, 8, 8))
    c1 = g.conv(
        "c1", g.input("x"), rng.normal(size=(8, 3, 3, 3)) * gain, rng.normal(size=8), clamp_min=0.0
    )
    swish = g.op("hard_swish", "swish", [c1])
    leaky = g.op("leaky_relu", "leaky", [swish], alpha=0.1)
    add = g.op("add", "add", [leaky, g.weight("c", rng.normal(size=(1, 8, 1, 1)))])
    return g, g.finish(y=add)


def samples(count: int = 3) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [{"x": rng.normal(size=(1, 3, 8, 8)).astype(np.float32)} for _ in range(count)]


def test_fp16_follows_the_float_graph() -> None:
    g, module = net()
    half, ctx = module.clone(), CompileContext(g.ctx.weights.copy())
    table = calibrate(module, g.ctx.weights, samples())
    write_attribute(half, table)
    ConvertToHalfPass().apply(ctx, half)
    half.verify()
    assert [(d.layer, d.reason) for d in ctx.decisions if not d.fired] == [
        ("leaky", "leaky_relu is no fp16 function of the vector unit")
    ]
    session = QuantSession(half, ctx.weights)
    reference = TopSession(module, g.ctx.weights)
    for sample in samples():
        expected = reference.run_values(sample)
        outputs, layers = session.run_layers(sample)
        assert layers["c1"].dtype == layers["add"].dtype == np.float16
        assert layers["leaky"].dtype == outputs["y"].dtype == np.float32
        for name in ("c1", "swish", "add"):
            largest = float(np.abs(expected[name]).max())
            error = np.abs(layers[name].astype(np.float32) - expected[name]).max()
            # Weaker than the contract's 2^-9 only by the layers before.
            assert 0 < error <= largest * 2.0**-8
    text = str(half)
    ConvertToHalfPass().apply(ctx, half)
    assert str(half) == text


def test_sums_are_float32_and_rounded_once() -> None:
    """4096 + 1 is no fp16 number, but 4096 + 1 - 4096 is exact in float32."""
    g = TopGraph(x=(1, 3))
    y = g.op("linear", "fc", [g.input("x"), g.weight("w", [[1.0, 1.0, -1.0]]), g.none()])
    module = g.finish(y=y)
    convert_module(g.ctx, module, {"x": 4096.0, "fc": 1.0})
    got = run_quant(module, g.ctx.weights, {"x": np.array([[4096, 1, 4096]], np.float32)})
    assert got["y"].item() == 1.0


def test_partition_puts_fp16_on_the_device() -> None:
    g, module = net()
    convert_module(g.ctx, module, {})
    PartitionPass().apply(g.ctx, module)
    devices = {
        layer_of(op): str(op.attributes["device"])
        for op in main_function(module).body.block.ops
        if "device" in op.attributes
    }
    assert devices == {
        "x/to_half": '"host"',
        "c1": '"tpu"',
        "swish": '"tpu"',
        "swish/to_float": '"host"',
        "leaky": '"host"',
        "leaky/to_half": '"host"',
        "add": '"tpu"',
        "add/to_float": '"host"',
    }


def test_overflow_seen_in_calibration_is_refused() -> None:
    """Even where the threshold was cut below: codes clip, fp16 does not."""
    g, module = net()
    table = CalibrationTable(
        dict.fromkeys(("x", "c1", "swish", "leaky", "add"), 10.0), details={"c1": {"max": 7e4}}
    )
    write_attribute(module, table)
    with pytest.raises(TilewrightError, match='"c1" overflows fp16') as caught:
        ConvertToHalfPass(overflow="refuse").apply(g.ctx, module)
    assert caught.value.code == "E0304"


def test_overflow_at_run_time_is_an_error() -> None:
    g, module = net()
    convert_module(g.ctx, module, {})
    with pytest.raises(TilewrightError, match='"c1" overflows fp16') as caught:
        run_quant(module, g.ctx.weights, {"x": np.full((1, 3, 8, 8), 6e4, np.float32)})
    assert caught.value.code == "E0304"


def test_weights_that_overflow_are_named() -> None:
    g, module = net(gain=1e6)
    with pytest.raises(TilewrightError, match=r'constant "c1\.w" overflows fp16'):
        convert_module(g.ctx, module, {}, overflow="refuse")


def test_targets_without_fp16_refuse() -> None:
    g, module = net()
    g.ctx.target = load_target("edge16")
    with pytest.raises(TilewrightError, match="`edge16` has no fp16") as caught:
        convert_module(g.ctx, module, {})
    assert caught.value.code == "E0402"


def test_ranges_are_needed() -> None:
    g, module = net()
    with pytest.raises(TilewrightError, match="needs calibrated ranges"):
        ConvertToHalfPass().apply(g.ctx, module)


def test_infinities_of_the_input_pass() -> None:
    _, module = net()
    op = main_function(module).body.block.first_op
    assert op is not None
    assert np.isinf(to_half(op, np.array([np.inf], np.float32)))[0]
    # 65519.99 rounds to the largest fp16, 65520 to infinity.
    assert to_half(op, np.array([65519.0], np.float32))[0] == 65504
    with pytest.raises(TilewrightError):
        to_half(op, np.array([65520.0], np.float32))
