"""Held tensors and cascades on the RTL: same bytes, same cycles as the simulators."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.cosim.support import needs_verilator
from tests.e2e import test_steps
from tests.e2e.test_edges import graph, normal
from tests.e2e.test_fusion import residual_network
from tests.level_checks import normal_sample
from tests.random_networks import random_network
from tilewright.compiler import Compiled, compile_model, front_end
from tilewright.cosim.driver import RtlSimulator
from tilewright.cosim.model import compare_model
from tilewright.ptq.options import QuantOptions
from tilewright.spec.hardware import load_target

PLAIN = QuantOptions(level=0)


def assert_equal(compiled: Compiled, shape: tuple[int, ...], seed: int) -> None:
    sample = normal_sample({"x": shape}, np.random.default_rng(seed))
    found = compare_model(compiled.program, RtlSimulator(compiled.target), sample)
    assert found.equal, [line for item in found.programs.values() for line in item.lines()]
    # A network may be left to the host, but then there is nothing to see here.
    assert found.programs
    assert found.outputs


def bottlenecks(size: int, blocks: int) -> tuple[onnx.ModelProto, tuple[int, ...]]:
    """Return blocks whose middles are too large for SRAM, so that they are made row by row."""
    nodes: list[onnx.NodeProto] = []
    weights: dict[str, Any] = {}

    def conv(value: str, out: int, depth: int, side: int, **attributes: Any) -> str:
        name = f"c{len(nodes)}"
        weight = normal(out, depth, side, side, seed=len(nodes)) / np.sqrt(depth * side * side)
        weights[f"w_{name}"] = weight.astype(np.float32)
        pads = [side // 2] * 4
        nodes.append(
            helper.make_node(
                "Conv", [value, f"w_{name}"], [name], name=name, pads=pads, **attributes
            )
        )
        return name

    def unary(kind: str, *values: str) -> str:
        name = f"e{len(nodes)}"
        nodes.append(helper.make_node(kind, list(values), [name], name=name))
        return name

    value = conv("x", 8, 3, 3, strides=[2, 2])
    for index in range(blocks):
        wide = unary("HardSwish", conv(value, 32, 8, 1))
        deep = unary("Relu", conv(wide, 32, 1, (3, 5)[index % 2], group=32))
        value = unary("Add", value, conv(deep, 8, 32, 1))
    shape = (1, 3, size, size)
    return graph(nodes, {"x": shape}, [value], **weights), shape


@needs_verilator
@pytest.mark.parametrize(("target", "size"), [("tiny8", 48), ("edge16", 150)])
def test_cascades_that_the_planner_makes(target: str, size: int) -> None:
    model, shape = bottlenecks(size, 2)
    hardware = load_target(target)
    samples = [normal_sample({"x": shape}, np.random.default_rng(1))]
    compiled = compile_model(front_end(model, hardware), hardware, samples=samples, quant=PLAIN)
    assert any("cascade" in item.reason for item in compiled.decisions if item.fired)
    assert_equal(compiled, shape, 2)


@needs_verilator
@pytest.mark.parametrize("seed", range(6))
def test_random_plans(seed: int) -> None:
    network = residual_network if seed % 2 else random_network
    model, shape = network(seed)
    assert_equal(test_steps.compiled(model, shape, load_target("edge16"), seed), shape, seed)


@needs_verilator
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_many_more_random_plans(seed: int) -> None:
    network = residual_network if seed % 2 else random_network
    model, shape = network(seed)
    assert_equal(test_steps.compiled(model, shape, load_target("edge16"), seed), shape, seed)
