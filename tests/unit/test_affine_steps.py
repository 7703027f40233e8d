"""Held tensors and cascades at the affine level, by plans made by hand: the same integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from xdsl.dialects import memref
from xdsl.dialects.builtin import IntegerAttr, MemRefType, StringAttr, TensorType

from tests.affine_plans import (
    Case,
    alone,
    built,
    cascade_plan,
    check,
    held_plan,
    strip_tiling,
    units_by_layer,
)
from tests.quant_graphs import Graph, codes
from tilewright.diagnostics import TilewrightError
from tilewright.dialects import quant, top
from tilewright.dialects.quant import shape_of
from tilewright.interp.stock import accepts
from tilewright.schedule.plan import Home, Plan, Stage, Step, TensorSpec, UnitSpec
from tilewright.spec.hardware import Hardware, load_target

TARGETS = ["tiny8", "edge16"]


class Net(Graph):
    """A graph that grows from an image `x`; zero points are not 0."""

    def __init__(self, target: str = "tiny8", h: int = 11, w: int = 9, c: int = 5) -> None:
        super().__init__(x=codes([1, h, w, c], zero=7))
        self.rounding = load_target(target).rounding
        self.rng = np.random.default_rng(h * 100 + w)
        self.end = {"zp": 3, "lo": -127, "hi": 127, "rounding": self.rounding}

    def result(self, shape: Sequence[int]) -> Any:
        return codes(list(shape), zero=3)

    def window(self, name: str, x: Any, out: int, k: int = 3, s: int = 1, group: int = 1) -> Any:
        """Add a convolution that pads half its window; with a stride not on the left."""
        pads = (k // 2, k // 2 if s == 1 else 0, k // 2, k // 2)
        zero = 4 if group == 1 else -5
        return self.conv(
            name, x, self.rng, out, (k, k), (s, s), pads, (1, 1), group, "nhwc", self.rounding, zero
        )


def like(x: Any, shape: Sequence[int]) -> Any:
    """Return the type of codes as `x` has, of another shape."""
    return TensorType(x.type.element_type, list(shape))


def add(net: Net, name: str, a: Any, b: Any) -> Any:
    scalars = {"mult_a": 2**30, "mult_b": 2**29 + 1, "shift": 31, "bias": 0, "bias_shift": 0}
    return net.quant(quant.AddOp, name, [a, b], net.result(shape_of(a)), **scalars, **net.end)


def mul(net: Net, name: str, a: Any, b: Any) -> Any:
    scalars = {"mult": 2**30, "shift": 36, "bias": 0, "bias_shift": 0}
    return net.quant(quant.MulOp, name, [a, b], net.result(shape_of(a)), **scalars, **net.end)


def max_pool(net: Net, name: str, x: Any, stride: int = 2) -> Any:
    _, h, w, c = shape_of(x)
    shape = [1, (h - 1) // stride + 1, (w - 1) // stride + 1, c]
    options = {"kernel": [3, 3], "strides": [stride] * 2, "pads": [1] * 4, "dilations": [1, 1]}
    out = like(x, shape)
    return net.top(top.MaxPoolOp, name, [x], out, ceil_mode=False, layout="nhwc", **options)


def mean(net: Net, name: str, x: Any) -> Any:
    _, h, w, c = shape_of(x)
    options = {"kernel": [h, w], "strides": [1, 1], "pads": [0] * 4, "layout": "nhwc"}
    options |= {"bias": 0, "mult": min(round(2**31 / (h * w)) * 2, 2**31 - 1), "shift": 31}
    return net.quant(quant.AvgPoolOp, name, [x], net.result([1, 1, 1, c]), **options, **net.end)


def lookup(net: Net, name: str, x: Any) -> Any:
    entries = np.random.default_rng(len(name)).integers(-128, 128, 256).astype(np.int8)
    net.weights.set(f"{name}.table", entries)
    out = codes(shape_of(x), zero=9)
    return net.quant(quant.LutOp, name, [x], out, table=f"{name}.table", function="f")


def concat(net: Net, name: str, *parts: Any) -> Any:
    shapes = [shape_of(part) for part in parts]
    shape = [*shapes[0][:3], sum(item[3] for item in shapes)]
    return net.top(top.ConcatOp, name, list(parts), like(parts[0], shape), axis=3)


def chain(net: Net) -> list[Any]:
    a = net.window("a", net.input("x"), 12)
    b = net.window("b", a, 20, k=1)
    return [net.window("c", b, 7, k=5)]


def residual(net: Net) -> list[Any]:
    a = net.window("a", net.input("x"), 12)
    b = net.window("b", a, 12)
    c = net.window("c", b, 12)
    r = add(net, "r", a, c)
    return [net.window("d", r, 6, k=1)]


def separable(net: Net) -> list[Any]:
    a = net.window("a", net.input("x"), 20, k=1)
    b = net.window("b", a, 20, s=2, group=20)
    c = lookup(net, "c", net.window("p", b, 8, k=1))
    d = net.window("d", c, 8, k=5, group=8)
    return [net.window("e", d, 24, s=2, group=4)]


def inception(net: Net) -> list[Any]:
    a = net.window("a", net.input("x"), 8)
    b = net.window("b", a, 6, k=1)
    c = net.window("c", a, 10, k=3)
    d = max_pool(net, "d", net.window("p", a, 7, k=1), stride=1)
    whole = concat(net, "whole", b, c, d)
    return [net.window("e", whole, 9)]


def pooled(net: Net) -> list[Any]:
    a = net.window("a", net.input("x"), 16)
    b = max_pool(net, "b", a)
    c = add(net, "c", b, net.window("d", b, 16))
    return [c, mean(net, "m", c)]


def gated(net: Net) -> list[Any]:
    a = net.window("a", net.input("x"), 12)
    g = net.window("g", mean(net, "m", a), 12, k=1)
    return [net.window("e", mul(net, "z", a, g), 4)]


NETS = [chain, residual, separable, inception, pooled, gated]


def allocs(case: Case, role: str) -> list[memref.AllocOp]:
    return [
        op
        for op in case.affine.walk()
        if isinstance(op, memref.AllocOp) and op.attributes.get("role") == StringAttr(role)
    ]


def ddr_buffers(case: Case) -> list[str]:
    names: list[str] = []
    for op in case.affine.walk():
        if isinstance(op, memref.AllocOp) and isinstance(
            value := op.attributes.get("value"), StringAttr
        ):
            names.append(value.data)
    return names


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("net", NETS)
def test_everything_held(net: Any, target: str) -> None:
    graph = Net(target)
    case = built(graph, net(graph), target, held_plan)
    check(case)
    assert ddr_buffers(case) == []
    for op in allocs(case, "held"):
        assert op.attributes["slots"] == IntegerAttr(1, 32)
        kind = op.memref.type
        assert isinstance(kind, MemRefType)
        assert len(kind.get_shape()) == 3
        # At the top of the function's block, not inside a loop.
        parent = op.parent_op()
        assert parent is not None
        assert parent.name == "func.func"
    assert accepts(case.affine) is None


@pytest.mark.parametrize("net", NETS)
def test_copies_in_memory_hold_the_same(net: Any) -> None:
    graph = Net()
    results = net(graph)

    def plan(hardware: Hardware, units: Sequence[UnitSpec], tensors: Sequence[TensorSpec]) -> Plan:
        names = [spec.name for spec in tensors if not spec.ddr_only]
        # The first tensor leaves SRAM early: a reader takes it from DDR.
        return held_plan(hardware, units, tensors, names, {names[0]: 1})

    values = check(built(graph, results, "tiny8", plan))
    assert len(values) > len(results)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("seed", range(4))
def test_cascades(net: Any, target: str, seed: int) -> None:
    graph, rng = Net(target), np.random.default_rng(seed)

    def plan(hardware: Hardware, units: Sequence[UnitSpec], tensors: Sequence[TensorSpec]) -> Plan:
        assert all(unit.stripable for unit in units), units
        free = [spec.name for spec in tensors if not spec.ddr_only and spec.inside is None]
        whole = [name for name in free if rng.integers(4) == 0]
        return cascade_plan(hardware, units, tensors, rng, spare=seed, whole=whole)

    case = built(graph, net(graph), target, plan, seed=seed)
    check(case)
    assert not any(op.name == "affine.for" for op in case.affine.walk())
    if seed == 0:
        assert accepts(case.affine) is None


def test_rolling_buffers_move_rows() -> None:
    graph, rng = Net(h=40), np.random.default_rng(1)
    case = built(
        graph, chain(graph), "tiny8", lambda *asked: cascade_plan(asked[0], asked[1], asked[2], rng)
    )
    check(case)
    moves = [op for op in case.affine.walk() if op.attributes.get("kind") == StringAttr("copy")]
    assert moves
    for op in allocs(case, "held"):
        kind = op.memref.type
        assert isinstance(kind, MemRefType)
        assert kind.get_shape()[0] < 40


def test_too_few_rows_are_refused() -> None:
    graph, rng = Net(h=40), np.random.default_rng(1)

    def plan(hardware: Hardware, units: Sequence[UnitSpec], tensors: Sequence[TensorSpec]) -> Plan:
        made = cascade_plan(hardware, units, tensors, rng)
        for buffer in made.steps[0].capacity:
            made.steps[0].capacity[buffer] -= 1
        return made

    with pytest.raises(TilewrightError, match="too few rows"):
        built(graph, chain(graph), "tiny8", plan)


def test_readers_that_disagree_about_padding_keep_a_tensor_in_memory() -> None:
    graph = Net()
    a = graph.window("a", graph.input("x"), 8)
    results = [max_pool(graph, "p", a), graph.window("c", a, 4)]
    reasons: dict[str, str] = {}

    def plan(hardware: Hardware, units: Sequence[UnitSpec], tensors: Sequence[TensorSpec]) -> Plan:
        reasons.update({spec.name: spec.ddr_only for spec in tensors})
        assert not any(unit.stripable for unit in units)
        return held_plan(hardware, units, tensors)

    check(built(graph, results, "tiny8", plan))
    assert "different padding" in reasons["a"]


def test_opaque_units_take_their_tensors_from_memory() -> None:
    graph = Net(h=8, w=6, c=4)
    a = graph.window("a", graph.input("x"), 8)
    t = graph.top(top.TransposeOp, "t", [a], like(a, [1, 6, 8, 8]), perm=[0, 2, 1, 3])
    results = [graph.window("c", t, 4)]

    def plan(hardware: Hardware, units: Sequence[UnitSpec], tensors: Sequence[TensorSpec]) -> Plan:
        names = units_by_layer(units)
        assert units[names["t"]].problem is None
        assert tensors[units[names["t"]].writes].ddr_only
        assert not tensors[units[names["a"]].writes].ddr_only
        return held_plan(hardware, units, tensors)

    case = built(graph, results, "tiny8", plan)
    check(case)
    assert sorted(ddr_buffers(case)) == ["a", "t"]
    assert any("a in SRAM and DDR" in reason for reason in case.decisions)


def test_mixed_steps() -> None:
    """A held skip runs over a cascade to a step of its own."""
    graph = Net("edge16")

    def plan(hardware: Hardware, units: Sequence[UnitSpec], tensors: Sequence[TensorSpec]) -> Plan:
        at = units_by_layer(units)
        a, b, c, d = (at[name] for name in "abcd")
        skip, inner, total = (units[unit].writes for unit in (a, b, c))
        out = units[d].writes
        homes = [Home(True, False)] * len(tensors)
        homes[skip], homes[inner] = Home(False, True, 1), Home(False, False)
        homes[total] = Home(False, True, 2)
        rng = np.random.default_rng(0)
        stages: list[Stage] = []
        for row in range(11):
            if row == 0:
                stages.append(Stage("compute", b, 0, 1))
            if row < 10:
                stages.append(Stage("compute", b, row + 1, row + 2))
            stages.append(Stage("compute", c, row, row + 1))
        steps = (
            Step((a,), (alone(hardware, units[a], tensors, [skip]),)),
            Step(
                (b, c),
                tuple(strip_tiling(units[unit], rng, hardware) for unit in (b, c)),
                tuple(stages),
                {inner: 6},
            ),
            Step((d,), (alone(hardware, units[d], tensors, [total]),)),
        )
        assert out not in (skip, inner, total)
        return Plan(steps, tuple(homes), 0, 0, 0)

    case = built(graph, residual(graph), "edge16", plan)
    check(case)
    assert any("computes b, c a few rows at a time" in reason for reason in case.decisions)
