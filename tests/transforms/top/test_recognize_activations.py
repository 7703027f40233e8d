"""`top-recognize-activations`: each spelling is found, near misses are not."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from xdsl.ir import SSAValue

from tests.unit.top_graphs import Net, refusals

PASS = "top-recognize-activations"


def k(net: Net, value: float) -> SSAValue:
    return net.weight(np.array([value], np.float32), "k")


def gate(net: Net, x: SSAValue, shift: float = 3.0, high: float = 6.0) -> SSAValue:
    return net.op("clip", net.op("add", x, k(net, shift)), min=0.0, max=high)


SPELLINGS: dict[str, tuple[Callable[[Net, SSAValue], SSAValue], list[str]]] = {
    "clip(x+3)/6": (lambda n, x: n.op("div", gate(n, x), k(n, 6)), ["hard_sigmoid"]),
    "clip(x+3)*0.1666667": (
        lambda n, x: n.op("mul", k(n, 0.1666667), gate(n, x)),
        ["hard_sigmoid"],
    ),
    "clip(x+1,0,2)/2": (lambda n, x: n.op("div", gate(n, x, 1.0, 2.0), k(n, 2)), ["hard_sigmoid"]),
    "(x*clip)/6": (lambda n, x: n.op("div", n.op("mul", x, gate(n, x)), k(n, 6)), ["hard_swish"]),
    "x*(clip/6)": (lambda n, x: n.op("mul", x, n.op("div", gate(n, x), k(n, 6))), ["hard_swish"]),
    "(x/6)*clip": (lambda n, x: n.op("mul", n.op("div", x, k(n, 6)), gate(n, x)), ["hard_swish"]),
    "x*hard_sigmoid": (
        lambda n, x: n.op("mul", x, n.op("hard_sigmoid", x, alpha=0.1666667, beta=0.5)),
        ["hard_swish"],
    ),
    "x*sigmoid": (lambda n, x: n.op("mul", n.op("sigmoid", x), x), ["silu"]),
    "x*tanh(softplus)": (lambda n, x: n.op("mul", x, n.op("tanh", n.op("softplus", x))), ["mish"]),
    "1/sqrt": (
        lambda n, x: n.op(
            "div", n.weight(np.ones((2, 8), np.float32)), n.op("sqrt", n.op("exp", x))
        ),
        ["exp", "rsqrt"],
    ),
    "max(x,0)": (lambda n, x: n.op("max", x, k(n, 0)), ["relu"]),
    "min(6,x)": (lambda n, x: n.op("min", k(n, 6), x), ["clip"]),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling: str) -> None:
    build, kinds = SPELLINGS[spelling]
    net = Net([2, 8])
    x = net.op("neg", net.x)
    net.outputs(build(net, x))
    net.check(PASS, 1e-6)
    assert net.kinds() == ["neg", *kinds]


def gelu(net: Net, x: SSAValue, order: int) -> SSAValue:
    if order == 0:
        inner = net.op("erf", net.op("div", x, k(net, math.sqrt(2))))
        return net.op("mul", net.op("mul", x, net.op("add", inner, k(net, 1))), k(net, 0.5))
    inner = net.op("erf", net.op("mul", x, k(net, 0.70710678)))
    return net.op("mul", net.op("add", k(net, 1), inner), net.op("mul", k(net, 0.5), x))


@pytest.mark.parametrize("order", [0, 1])
def test_gelu_by_erf(order: int) -> None:
    net = Net([2, 8])
    net.outputs(gelu(net, net.x, order))
    net.check(PASS, 1e-6)
    assert net.kinds() == ["gelu"]
    assert net.layer("mul1" if order == 0 else "mul2").attrs.string("approximate") == "none"


@pytest.mark.parametrize("power", [False, True])
def test_gelu_by_tanh(power: bool) -> None:
    net = Net([2, 8])
    x = net.x
    cube = net.op("pow", x, k(net, 3)) if power else net.op("mul", net.op("mul", x, x), x)
    total = net.op("add", x, net.op("mul", cube, k(net, 0.044715)))
    inner = net.op("tanh", net.op("mul", total, k(net, math.sqrt(2 / math.pi))))
    net.outputs(net.op("mul", net.op("mul", k(net, 0.5), x), net.op("add", inner, k(net, 1))))
    net.check(PASS, 1e-6)
    assert net.kinds() == ["gelu"]


def layer_norm(net: Net, axes: list[int], affine: bool, square: str) -> SSAValue:
    x = net.x
    d = net.op("sub", x, reduce(net, x, axes))
    squared = net.op("mul", d, d) if square == "mul" else net.op("pow", d, k(net, 2))
    v = net.op("add", reduce(net, squared, axes), k(net, 1e-3))
    y = net.op("div", d, net.op("sqrt", v))
    if affine:
        y = net.op("mul", y, net.random(6, name="g"))
        y = net.op("add", y, net.random(1, 5, 6, name="b"))
    return y


def reduce(net: Net, x: SSAValue, axes: list[int]) -> SSAValue:
    return net.op("reduce", x, kind="mean", axes=axes, keepdims=True)


@pytest.mark.parametrize("square", ["mul", "pow"])
@pytest.mark.parametrize("affine", [False, True])
def test_layer_norm(affine: bool, square: str) -> None:
    net = Net([3, 5, 6])
    net.outputs(layer_norm(net, [1, 2], affine, square))
    net.check(PASS)
    assert net.kinds() == ["layer_norm"]


def test_layer_norm_keeps_a_bias_of_another_axis() -> None:
    net = Net([3, 5, 6])
    y = layer_norm(net, [2], False, "mul")
    net.outputs(net.op("mul", y, net.random(5, 1)))
    net.check(PASS)
    assert net.kinds() == ["layer_norm", "mul"]


def test_normalisation_over_other_axes_is_refused() -> None:
    net = Net([3, 5, 6])
    net.outputs(layer_norm(net, [1], False, "mul"))
    assert refusals(net.check(PASS)) == ["a normalisation over axes [1], not the last ones"]
    assert "layer_norm" not in net.kinds()


NEAR_MISSES: dict[str, Callable[[Net, SSAValue], SSAValue]] = {
    "other shift": lambda n, x: n.op("div", n.op("mul", x, gate(n, x, 2.9)), k(n, 6)),
    "other scale": lambda n, x: n.op("div", n.op("mul", x, gate(n, x)), k(n, 5.9)),
    "hard_sigmoid of Keras": lambda n, x: n.op(
        "mul", x, n.op("hard_sigmoid", x, alpha=0.2, beta=0.5)
    ),
    "gate of another value": lambda n, x: n.op("mul", x, n.op("sigmoid", n.op("neg", x))),
    "lower bound": lambda n, x: n.op(
        "div", n.op("clip", n.op("add", x, k(n, 3)), min=-1.0, max=6.0), k(n, 6)
    ),
    "broadcast": lambda n, x: n.op("max", x, n.weight(np.zeros((3, 2, 8), np.float32))),
}


@pytest.mark.parametrize("miss", NEAR_MISSES)
def test_near_misses(miss: str) -> None:
    net = Net([2, 8])
    net.outputs(NEAR_MISSES[miss](net, net.x))
    before = net.kinds()
    net.check(PASS)
    assert net.kinds() == before


def test_a_value_used_twice_is_kept_for_the_other_user() -> None:
    net = Net([2, 8])
    product = net.op("mul", net.x, gate(net, net.x))
    net.outputs(net.op("div", product, k(net, 6)), product)
    net.check(PASS)
    # The product is needed anyway, so the division alone would gain nothing.
    assert "hard_swish" not in net.kinds()
