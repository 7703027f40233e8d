"""Folding into linear layers: batch norms, per-channel arithmetic, activations, padding."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest

from tests.unit.top_graphs import Net, assert_close, refusals
from tilewright.transforms.top.graph import compose_clamps


def fused(net: Net, name: str) -> list[str]:
    names: Any = net.layer(name).attributes["fused"]
    return [item.data for item in names]


# top-fold-batch-norm


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_batch_norm_into_convolution(group: int, bias: bool) -> None:
    net = Net([2, 4, 6, 6])
    net.outputs(net.batch_norm(net.conv(net.x, 8, pad=1, group=group, bias=bias)))
    net.check("top-fold-batch-norm")
    assert net.kinds().count("conv") == 1
    assert "batch_norm" not in net.kinds()
    assert fused(net, "conv0") == ["batch_norm0"]


@pytest.mark.parametrize("group", [1, 2])
def test_batch_norm_into_transposed_convolution(group: int) -> None:
    net = Net([1, 4, 3, 3])
    c = net.op("conv_transpose", net.x, net.random(4, 3, 2, 2), net.none(), strides=[2, 2],
               pads=[0] * 4, dilations=[1, 1], output_pads=[0, 0], group=group)  # fmt: skip
    net.outputs(net.batch_norm(c))
    net.check("top-fold-batch-norm")
    assert "batch_norm" not in net.kinds()


def test_batch_norm_into_linear() -> None:
    net = Net([3, 4])
    net.outputs(net.batch_norm(net.op("linear", net.x, net.random(5, 4), net.random(5))))
    net.check("top-fold-batch-norm")
    assert net.kinds() == ["linear"]


@pytest.mark.parametrize("group", [1, 2])
def test_batch_norm_into_the_convolution_behind(group: int) -> None:
    net = Net([1, 4, 6, 6])
    net.outputs(net.conv(net.batch_norm(net.op("sigmoid", net.x)), 6, group=group))
    net.check("top-fold-batch-norm")
    assert net.kinds() == ["sigmoid", "conv"]


def test_batch_norm_before_padding_stays_exact() -> None:
    net = Net([1, 4, 6, 6])
    net.outputs(net.conv(net.batch_norm(net.op("sigmoid", net.x)), 6, pad=1))
    decisions = net.check("top-fold-batch-norm")
    assert refusals(decisions) == ["the layer behind pads with zeros, which the shift would move"]
    assert net.kinds() == ["sigmoid", "conv", "conv"]
    assert net.layer("batch_norm0").attrs.integer("group") == 4


def test_lone_batch_norm_of_a_matrix() -> None:
    net = Net([3, 4])
    net.outputs(net.op("relu", net.batch_norm(net.x)))
    net.check("top-fold-batch-norm")
    assert net.kinds() == ["mul", "add", "relu"]


def test_shared_weights_are_copied() -> None:
    net = Net([1, 3, 6, 6], [1, 3, 6, 6])
    w = net.random(4, 3, 3, 3)
    a = net.conv(net.inputs[0], 4, w=w)
    b = net.conv(net.inputs[1], 4, w=w)
    net.outputs(net.batch_norm(a), b)
    before = net.ctx.weights.get("w").copy()
    net.check("top-fold-batch-norm")
    assert "batch_norm" not in net.kinds()
    np.testing.assert_array_equal(net.ctx.weights.get("w"), before)


@pytest.mark.parametrize("other", ["user", "output"])
def test_a_shared_result_is_not_folded_into(other: str) -> None:
    net = Net([1, 3, 6, 6])
    c = net.conv(net.x, 4)
    second = net.op("neg", c) if other == "user" else c
    net.outputs(net.op("relu", net.batch_norm(c)), second)
    decisions = net.check("top-fold-batch-norm")
    why = "has another user" if other == "user" else "is a graph output"
    assert refusals(decisions) == [f'"conv0": its result {why}']
    assert net.kinds().count("conv") == 2


def test_statistics_that_are_no_constants_or_no_spread() -> None:
    net = Net([1, 3, 6, 6], [3])
    one = net.weight(np.ones(3))
    n = net.op("batch_norm", net.inputs[0], one, one, one, net.inputs[1], epsilon=1e-5, axis=1)
    bad = net.weight(np.array([1.0, -1.0, 1.0]))
    net.outputs(net.op("batch_norm", n, one, one, one, bad, epsilon=0.0, axis=1))
    decisions = net.apply("top-fold-batch-norm")
    assert refusals(decisions) == [
        "its statistics are not constants",
        "a variance plus epsilon is not positive",
    ]


def test_an_overflow_is_refused() -> None:
    net = Net([1, 3, 6, 6])
    one, tiny = net.weight(np.ones(4)), net.weight(np.full(4, 1e-30))
    large = net.weight(np.full((4, 3, 1, 1), 1e30))
    c = net.conv(net.x, 4, 1, w=large)
    huge = net.weight(np.full(4, 1e20))
    net.outputs(net.op("batch_norm", c, huge, one, one, tiny, epsilon=0.0, axis=1))
    assert "the folded constants overflow" in refusals(net.apply("top-fold-batch-norm"))


# top-fold-scale


@pytest.mark.parametrize("kind", ["add", "sub", "mul", "div"])
@pytest.mark.parametrize("shape", [(), (1,), (4, 1, 1), (1, 4, 1, 1)])
@pytest.mark.parametrize("first", [False, True])
def test_arithmetic_into_convolution(kind: str, shape: tuple[int, ...], first: bool) -> None:
    net = Net([1, 3, 6, 6])
    c = net.conv(net.x, 4, pad=1)
    k = net.weight(np.random.default_rng(1).uniform(0.5, 2, shape))
    net.outputs(net.op(kind, k, c) if first else net.op(kind, c, k))
    net.check("top-fold-scale")
    folds = not (kind == "div" and first)
    assert net.kinds() == (["conv"] if folds else ["conv", "div"])


def test_a_chain_before_and_behind() -> None:
    net = Net([1, 3, 6, 6])
    scaled = net.op("mul", net.op("div", net.x, net.weight(np.float32(255))), net.random(3, 1, 1))
    c = net.conv(net.op("neg", net.conv(scaled, 4, pad=1)), 4)
    net.outputs(net.op("add", net.op("mul", c, net.random(4, 1, 1)), net.random(4, 1, 1)))
    net.check("top-fold-scale")
    assert net.kinds() == ["conv", "neg", "conv"]


def test_what_scale_does_not_fold() -> None:
    net = Net([1, 4, 6, 6])
    c = net.conv(net.x, 4, pad=1)
    wide = net.op("mul", c, net.random(6, 6))  # differs along the image
    clamped = net.conv(wide, 4, clamp_min=0.0)
    scaled = net.op("mul", clamped, net.weight(np.float32(2)))
    shifted = net.op("add", scaled, net.weight(np.float32(2)))
    net.outputs(net.conv(shifted, 4, pad=1))
    decisions = net.check("top-fold-scale")
    assert refusals(decisions) == [
        "an activation is fused into the layer before",
        "the layer behind pads with zeros, which the shift would move",
    ]
    assert net.kinds() == ["conv", "mul", "conv", "mul", "add", "conv"]


def test_bias_of_a_linear_layer() -> None:
    net = Net([2, 5, 4])
    net.outputs(net.op("add", net.op("linear", net.x, net.random(3, 4), net.none()), net.random(3)))
    net.check("top-fold-scale")
    assert net.kinds() == ["linear"]


# top-fuse-activation


@pytest.mark.parametrize("kind", ["conv", "linear", "add"])
def test_activations_become_clamps(kind: str) -> None:
    net = Net([1, 4, 6, 6])
    y = {
        "conv": lambda: net.conv(net.x, 4),
        "linear": lambda: net.op("linear", net.x, net.random(3, 6), net.random(3)),
        "add": lambda: net.op("add", net.x, net.random(6)),
    }[kind]()
    net.outputs(net.op("clip", net.op("relu", y), max=1.5))
    net.check("top-fuse-activation")
    assert net.kinds() == [kind]
    layer = net.layer(f"{kind}0")
    assert (layer.attrs.number("clamp_min"), layer.attrs.number("clamp_max")) == (0.0, 1.5)
    assert fused(net, f"{kind}0") == ["relu0", "clip0"]


def test_chained_clips_join() -> None:
    net = Net([1, 4])
    joined = net.op("clip", net.op("relu", net.op("sigmoid", net.x)), min=0.2, max=0.7)
    net.outputs(joined)
    decisions = net.check("top-fuse-activation")
    assert net.kinds() == ["sigmoid", "clip"]
    assert 'sigmoid "sigmoid0" has no clamp' in refusals(decisions)


def test_an_activation_of_a_shared_value_stays() -> None:
    net = Net([1, 4, 6, 6])
    c = net.conv(net.x, 4)
    net.outputs(net.op("relu", c), c)
    assert refusals(net.check("top-fuse-activation")) == ['"conv0": its result is a graph output']
    net = Net([1, 4, 6, 6])
    net.outputs(net.op("relu", net.conv(net.x, 4)))
    assert refusals(net.check("top-fuse-activation")) == []


@pytest.mark.parametrize("first", [(None, None), (0.0, None), (-1.0, 1.0), (2.0, 3.0)])
@pytest.mark.parametrize("second", [(None, 0.5), (0.0, 6.0), (-3.0, -2.0), (2.5, None)])
def test_composed_clamps(
    first: tuple[float | None, float | None], second: tuple[float | None, float | None]
) -> None:
    def clamp(x: np.ndarray, bounds: tuple[float | None, float | None]) -> np.ndarray:
        low, high = bounds
        return np.minimum(
            np.maximum(x, -inf if low is None else low), inf if high is None else high
        )

    x = np.linspace(-5, 8, 400)
    joined = clamp(x, compose_clamps(first, second))
    np.testing.assert_array_equal(joined, clamp(clamp(x, first), second))


# top-absorb-pad


def padded(net: Net, value: float, mode: str = "constant", channels: int = 0) -> Any:
    return net.op(
        "pad",
        net.x,
        pads_begin=[0, channels, 1, 0],
        pads_end=[0, 0, 1, 2],
        mode=mode,
        value=value,
    )


def test_zeros_become_padding_of_a_convolution() -> None:
    net = Net([1, 3, 5, 5])
    net.outputs(net.conv(padded(net, 0.0), 4, pad=1))
    net.check("top-absorb-pad")
    assert net.kinds() == ["conv"]
    assert net.layer("conv0").attrs.ints("pads") == (2, 1, 2, 3)


@pytest.mark.parametrize(
    ("value", "mode", "channels", "reason"),
    [
        (1.0, "constant", 0, "it pads with 1.0, a convolution with 0"),
        (0.0, "edge", 0, "it pads by edge"),
        (0.0, "constant", 1, "it pads batch or channels"),
    ],
)
def test_other_padding_stays(value: float, mode: str, channels: int, reason: str) -> None:
    net = Net([1, 3, 5, 5])
    net.outputs(net.conv(padded(net, value, mode, channels), 4))
    assert refusals(net.check("top-absorb-pad")) == [f'not into "conv0": {reason}']
    assert "pad" in net.kinds()


def test_max_pool_takes_minus_infinity_only() -> None:
    net = Net([1, 3, 5, 5])
    net.outputs(net.pool("max_pool", padded(net, 0.0), 3))
    reason = refusals(net.check("top-absorb-pad"))
    assert reason == ['not into "max_pool0": it pads with 0.0, a max_pool with minus infinity']
    # The case it must not lose: negative data, zero border.
    net.apply("top-eliminate-dead-code")
    x = {"in0": np.full((1, 3, 5, 5), -1.0, np.float32)}
    assert net.run(x)[0].max() == 0

    net = Net([1, 3, 5, 5])
    net.outputs(net.pool("max_pool", padded(net, -inf), 3))
    net.check("top-absorb-pad")
    assert net.kinds() == ["max_pool"]


def test_zeros_into_a_max_pool_of_values_never_negative() -> None:
    net = Net([1, 3, 5, 5])
    r = net.op("relu", net.x)
    p = net.op("pad", r, pads_begin=[0, 0, 1, 1], pads_end=[0, 0, 1, 1], mode="constant", value=0.0)
    net.outputs(net.pool("max_pool", p, 3, strides=[2, 2]))
    net.check("top-absorb-pad")
    assert net.kinds() == ["relu", "max_pool"]


def test_average_pools() -> None:
    net = Net([1, 3, 5, 5])
    net.outputs(net.pool("avg_pool", padded(net, 0.0), 3))
    net.check("top-absorb-pad")
    assert net.kinds() == ["avg_pool"]
    assert net.layer("avg_pool0").attrs.flag("count_include_pad")

    net = Net([1, 3, 5, 5])
    net.outputs(net.pool("avg_pool", padded(net, 0.0), 4, pads=[1, 1, 1, 1]))
    reason = refusals(net.check("top-absorb-pad"))
    assert reason == ['not into "avg_pool0": the avg_pool does not count padding']

    net = Net([1, 3, 5, 5])
    pool = net.pool("avg_pool", padded(net, 0.0), 4, pads=[1] * 4, count_include_pad=True)
    net.outputs(pool)
    net.check("top-absorb-pad")
    assert net.kinds() == ["avg_pool"]


def test_a_pool_that_rounds_up_or_is_too_small_refuses() -> None:
    net = Net([1, 3, 5, 5])
    net.outputs(net.pool("max_pool", padded(net, -inf), 3, strides=[2, 2], ceil_mode=True))
    assert "rounds its size up" in refusals(net.check("top-absorb-pad"))[0]
    net = Net([1, 3, 5, 5])
    net.outputs(net.pool("max_pool", padded(net, -inf), 2))
    assert "as large as the window" in refusals(net.check("top-absorb-pad"))[0]


def test_a_shared_pad_stays_for_the_other_user() -> None:
    net = Net([1, 3, 5, 5])
    p = padded(net, 0.0)
    net.outputs(net.conv(p, 4), net.op("neg", p))
    net.check("top-absorb-pad")
    assert net.kinds() == ["pad", "conv", "neg"]


def test_numbers_are_compared_at_all() -> None:
    with pytest.raises(AssertionError):
        assert_close([np.ones(2)], [np.ones(2) + 1e-3])
