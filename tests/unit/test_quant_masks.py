"""Masks before softmaxes of the host and squares that it reads: what eight bits would spoil."""

from __future__ import annotations

import numpy as np
import pytest
from xdsl.dialects.builtin import ModuleOp

from tests.unit.quant_top_graphs import TopGraph
from tilewright.quant.calibrate import calibrate
from tilewright.quant.graph import layer_of, main_function
from tilewright.quant.reference import QuantSession
from tilewright.runtime.float_executor import TopSession
from tilewright.transforms.quant.classify import place
from tilewright.transforms.quant.quantize import quantize_module


def attention(through_chip: bool = False) -> tuple[TopGraph, ModuleOp]:
    """Scores of two activations, a mask made of an input by three ops, softmax, product."""
    random = np.random.default_rng(0)
    net = TopGraph(x=(6, 8), m=(1, 6))
    keys = net.weight("k.w", random.normal(0, 0.5, (8, 8)))
    rows = net.op("linear", "keys", [net.input("x"), keys, net.none()])
    turned = net.op("transpose", "turned", [rows], perm=(1, 0))
    scores = net.op("matmul", "scores", [net.input("x"), turned])
    mask = net.op("sub", "inverse", [net.weight("one", np.ones(1)), net.input("m")])
    mask = net.op("mul", "mask", [mask, net.weight("large", np.full(1, -1e4))])
    if through_chip:
        identity = net.weight("i.w", np.eye(6))
        mask = net.op("linear", "layer", [mask, identity, net.none()])
    total = net.op("add", "masked", [scores, mask])
    soft = net.op("softmax", "soft", [total], axis=1)
    return net, net.finish(y=net.op("matmul", "seen", [soft, rows]))


def placed(module: ModuleOp) -> dict[str, str]:
    ops = [
        op
        for op in main_function(module).body.block.ops
        if op.name not in ("top.weight", "top.none", "func.return")
    ]
    net_weights = attention()[0].ctx.weights
    return {layer_of(op): reason for op, reason in place(ops, net_weights).items()}


def test_mask_and_its_making_are_the_hosts():
    hosts = placed(attention()[1])
    assert {"soft", "masked", "mask", "inverse"} <= set(hosts)
    assert "take the range" in hosts["masked"]
    assert "makes a mask" in hosts["inverse"]
    assert not {"keys", "scores", "seen"} & set(hosts)


def test_what_a_layer_of_the_chip_makes_stays_there():
    hosts = placed(attention(through_chip=True)[1])
    assert "masked" in hosts
    assert not {"layer", "mask", "inverse"} & set(hosts)


def test_other_sums_stay_on_the_chip():
    net = TopGraph(x=(4, 8), y=(4, 8))
    total = net.op("add", "total", [net.input("x"), net.input("y")])
    soft = net.op("softmax", "soft", [total], axis=1)
    both = net.op("mul", "both", [soft, total])
    assert set(placed(net.finish(z=both))) == {"soft"}


@pytest.mark.parametrize("kept", [3, 6])
def test_masked_scores_keep_their_signal(kept: int):
    net, module = attention()
    random = np.random.default_rng(1)
    mask = np.repeat([1.0, 0.0], [kept, 6 - kept]).astype(np.float32)[None]
    sample = {"x": random.normal(0, 1, (6, 8)).astype(np.float32), "m": mask}
    wanted = TopSession(module, net.ctx.weights).run(sample)["y"]
    table = calibrate(module, net.ctx.weights, [sample], method="max")
    quantize_module(net.ctx, module, table.thresholds, "half_up")
    found = QuantSession(module, net.ctx.weights).run(sample)["y"]
    error = np.sum((wanted - found) ** 2)
    assert 10 * np.log10(np.sum(wanted**2) / error) > 25


def magnitudes(read_on_chip: bool = False) -> ModuleOp:
    """The square root of a sum of squares of two layers, then a layer."""
    net = TopGraph(x=(4, 8))
    parts = [
        net.op("linear", name, [net.input("x"), net.weight(f"{name}.w", np.eye(8)), net.none()])
        for name in ("real", "imaginary")
    ]
    squares = [net.op("mul", f"square{i}", [part, part]) for i, part in enumerate(parts)]
    total = net.op("add", "sum", squares)
    root = net.op("sqrt", "root", [total])
    end = net.op("linear", "end", [root, net.weight("e.w", np.eye(8)), net.none()])
    if read_on_chip:
        end = net.op("add", "both", [end, squares[0]])
    return net.finish(y=end)


def test_squares_that_the_host_reads_are_its_own():
    hosts = placed(magnitudes())
    assert set(hosts) == {"root", "sum", "square0", "square1"}
    assert "sixteen" in hosts["square0"]


def test_squares_that_the_chip_reads_stay_there():
    assert set(placed(magnitudes(read_on_chip=True))) == {"root", "sum", "square1"}
