"""The float executor against plain numpy definitions, one for each operation of `top`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from xdsl.dialects.builtin import i32, i64

from tests.unit.top_graphs import Net
from tilewright.diagnostics import TilewrightError
from tilewright.dialects import top
from tilewright.runtime.float_executor import TopSession, run_top
from tilewright.runtime.onnx_nodes import HANDLERS
from tilewright.runtime.top_to_onnx import top_to_onnx

Array = np.ndarray
erf = np.vectorize(math.erf)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


UNARY: dict[str, tuple[dict[str, Any], Callable[[Array], Array]]] = {
    "relu": ({}, lambda x: np.where(x > 0, x, 0)),
    "clip": ({"min": -1.0, "max": 2.0}, lambda x: np.clip(x, -1, 2)),
    "leaky_relu": ({"alpha": 0.25}, lambda x: np.where(x >= 0, x, 0.25 * x)),
    "elu": ({"alpha": 1.5}, lambda x: np.where(x >= 0, x, 1.5 * (np.exp(x) - 1))),
    "selu": (
        {"alpha": 1.5, "gamma": 0.5},
        lambda x: 0.5 * np.where(x > 0, x, 1.5 * (np.exp(x) - 1)),
    ),
    "celu": (
        {"alpha": 2.0},
        lambda x: np.maximum(0, x) + np.minimum(0, 2 * (np.exp(x / 2) - 1)),
    ),
    "thresholded_relu": ({"alpha": 1.25}, lambda x: np.where(x > 1.25, x, 0)),
    "sigmoid": ({}, sigmoid),
    "hard_sigmoid": ({"alpha": 0.25, "beta": 0.5}, lambda x: np.clip(0.25 * x + 0.5, 0, 1)),
    "hard_swish": ({}, lambda x: x * np.clip(x / 6 + 0.5, 0, 1)),
    "silu": ({}, lambda x: x * sigmoid(x)),
    "mish": ({}, lambda x: x * np.tanh(np.log1p(np.exp(x)))),
    "softplus": ({}, lambda x: np.log1p(np.exp(x))),
    "softsign": ({}, lambda x: x / (1 + np.abs(x))),
    "shrink": (
        {"bias": 0.5, "lambd": 1.5},
        lambda x: np.where(x < -1.5, x + 0.5, np.where(x > 1.5, x - 0.5, 0)),
    ),
    "gelu": ({"approximate": "none"}, lambda x: x / 2 * (1 + erf(x / math.sqrt(2)))),
    "tanh": ({}, np.tanh),
    "erf": ({}, erf),
    "exp": ({}, np.exp),
    "neg": ({}, np.negative),
    "abs": ({}, np.abs),
    "sign": ({}, np.sign),
    "floor": ({}, np.floor),
    "ceil": ({}, np.ceil),
    "round": ({}, np.round),
    "sin": ({}, np.sin),
    "cos": ({}, np.cos),
    "tan": ({}, np.tan),
    "sinh": ({}, np.sinh),
    "cosh": ({}, np.cosh),
    "asinh": ({}, np.arcsinh),
    "atan": ({}, np.arctan),
}
POSITIVE: dict[str, Callable[[Array], Array]] = {
    "log": np.log,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": lambda x: 1 / x,
}
INSIDE_ONE: dict[str, Callable[[Array], Array]] = {
    "asin": np.arcsin,
    "acos": np.arccos,
    "atanh": np.arctanh,
}


def values(low: float = -3.0, high: float = 3.0) -> Array:
    # Halves are in it, for the rounding functions.
    return np.linspace(low, high, 49, dtype=np.float32).reshape(1, 7, 7)


def run_unary(kind: str, x: Array, **attributes: Any) -> Array:
    net = Net(x.shape)
    net.outputs(net.op(kind, net.x, **attributes))
    return net.run({"in0": x})[0]


@pytest.mark.parametrize("kind", UNARY)
def test_unary(kind: str) -> None:
    attributes, definition = UNARY[kind]
    x = values()
    np.testing.assert_allclose(
        run_unary(kind, x, **attributes), definition(x.astype(np.float64)), rtol=2e-5, atol=2e-6
    )


@pytest.mark.parametrize("kind", POSITIVE)
def test_unary_of_positive_numbers(kind: str) -> None:
    x = values(0.1, 5.0)
    np.testing.assert_allclose(run_unary(kind, x), POSITIVE[kind](x), rtol=1e-5)


@pytest.mark.parametrize("kind", INSIDE_ONE)
def test_unary_inside_one(kind: str) -> None:
    x = values(-0.9, 0.9)
    np.testing.assert_allclose(run_unary(kind, x), INSIDE_ONE[kind](x), rtol=1e-5, atol=1e-6)


def test_acosh_and_tanh_gelu() -> None:
    x = values(1.1, 4.0)
    np.testing.assert_allclose(run_unary("acosh", x), np.arccosh(x), rtol=1e-5)
    x = values()
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x.astype(np.float64) ** 3)
    want = x / 2 * (1 + np.tanh(inner))
    np.testing.assert_allclose(run_unary("gelu", x, approximate="tanh"), want, atol=1e-6)


def test_predicates() -> None:
    x = np.array([[1, np.nan, np.inf, -np.inf]], np.float32)
    assert run_unary("is_nan", x).tolist() == [[False, True, False, False]]
    got = run_unary("is_inf", x, detect_negative=False, detect_positive=True)
    assert got.tolist() == [[False, False, True, False]]


BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "min": np.minimum,
    "max": np.maximum,
    "equal": np.equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "less": np.less,
    "less_equal": np.less_equal,
}


@pytest.mark.parametrize("kind", BINARY)
def test_binary_broadcasts(kind: str) -> None:
    net = Net([2, 3, 1], [3, 4])
    net.outputs(net.op(kind, *net.inputs))
    a = np.round(net.feed()["in0"])
    b = np.round(net.feed()["in1"]) + 0.5 * (kind == "div")
    np.testing.assert_allclose(net.run({"in0": a, "in1": b})[0], BINARY[kind](a, b), rtol=1e-6)


def test_integers_and_truth_values() -> None:
    net = Net([4], [4], elements=[i64, i64])
    a, b = net.inputs
    less = net.op("less", a, b)
    net.outputs(
        net.op("mod", a, b, fmod=False),
        net.op("mod", a, b, fmod=True),
        net.op("pow", a, b),
        net.op("and", less, net.op("not", less)),
        net.op("or", less, net.op("not", less)),
        net.op("xor", less, less),
        net.op("where", less, a, b),
        net.op("bitwise_and", a, b),
        net.op("bitwise_or", a, b),
        net.op("bitwise_xor", a, b),
        net.op("bitwise_not", a),
        net.op("cast", less, shape=[4], element=i32),
    )
    x, y = np.array([-7, 7, 3, 0]), np.array([3, 2, 5, 1])
    got = net.run({"in0": x, "in1": y})
    small = x < y
    want = [
        np.mod(x, y), np.fmod(x, y), x**y, small & ~small, small | ~small, small ^ small,
        np.where(small, x, y), x & y, x | y, x ^ y, ~x, small.astype(np.int32),
    ]  # fmt: skip
    for a_, b_ in zip(got, want, strict=True):
        np.testing.assert_array_equal(a_, b_)


def conv_definition(
    x: Array,
    w: Array,
    b: Array,
    strides: list[int],
    pads: list[int],
    dilations: list[int],
    group: int,
) -> Array:
    padded = np.pad(x, [(0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])])
    out, per_group, kh, kw = w.shape
    height = (padded.shape[2] - dilations[0] * (kh - 1) - 1) // strides[0] + 1
    width = (padded.shape[3] - dilations[1] * (kw - 1) - 1) // strides[1] + 1
    result = np.zeros((x.shape[0], out, height, width))
    for o, i, r, s in itertools.product(range(out), range(per_group), range(kh), range(kw)):
        source = padded[:, o // (out // group) * per_group + i]
        rows = slice(r * dilations[0], r * dilations[0] + (height - 1) * strides[0] + 1, strides[0])
        cols = slice(s * dilations[1], s * dilations[1] + (width - 1) * strides[1] + 1, strides[1])
        result[:, o] += w[o, i, r, s] * source[:, rows, cols]
    return result + b.reshape(1, -1, 1, 1)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_conv(layout: str, group: int) -> None:
    strides, pads, dilations = [2, 1], [1, 0, 2, 1], [1, 2]
    nhwc = layout == "nhwc"
    net = Net([2, 7, 6, 4] if nhwc else [2, 4, 7, 6])
    w = net.random(8, 4 // group, 3, 2)
    b = net.random(8)
    net.outputs(
        net.op("conv", net.x, w, b, strides=strides, pads=pads, dilations=dilations, group=group,
               clamp_min=-1.0, clamp_max=2.0, layout=layout)
    )  # fmt: skip
    x = net.feed()["in0"]
    first = x.transpose(0, 3, 1, 2) if nhwc else x
    arrays = [net.ctx.weights.get(name) for name in ("w", "w#1")]
    want = conv_definition(first, arrays[0], arrays[1], strides, pads, dilations, group)
    want = np.clip(want, -1, 2)
    got = net.run()[0]
    np.testing.assert_allclose(got.transpose(0, 3, 1, 2) if nhwc else got, want, atol=1e-5)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("group", [1, 2])
def test_conv_transpose_scatters(layout: str, group: int) -> None:
    nhwc = layout == "nhwc"
    net = Net([1, 3, 4, 4] if nhwc else [1, 4, 3, 4])
    w, b = net.random(4, 3, 3, 2), net.random(3 * group)
    net.outputs(
        net.op("conv_transpose", net.x, w, b, strides=[2, 3], pads=[1, 0, 0, 1], dilations=[1, 1],
               output_pads=[1, 2], group=group, layout=layout)
    )  # fmt: skip
    x = net.feed()["in0"]
    x = x.transpose(0, 3, 1, 2) if nhwc else x
    weights, bias = net.ctx.weights.get("w"), net.ctx.weights.get("w#1")
    full = np.zeros((1, 3 * group, 2 * 2 + 3 + 1, 3 * 3 + 2 + 2))
    for c, o, i, j in itertools.product(range(4), range(3), range(3), range(4)):
        target = c // (4 // group) * 3 + o
        full[0, target, 2 * i : 2 * i + 3, 3 * j : 3 * j + 2] += x[0, c, i, j] * weights[c, o]
    want = full[:, :, 1:, : full.shape[3] - 1] + bias.reshape(1, -1, 1, 1)
    got = net.run()[0]
    np.testing.assert_allclose(got.transpose(0, 3, 1, 2) if nhwc else got, want, atol=1e-5)


def pool_definition(
    x: Array, kind: str, k: int, s: int, pads: list[int], ceil: bool, count: bool
) -> Array:
    sizes: list[int] = []
    for i, dim in enumerate(x.shape[2:]):
        free = dim + pads[i] + pads[i + 2] - k
        size = (math.ceil(free / s) if ceil else free // s) + 1
        if ceil and (size - 1) * s >= dim + pads[i]:
            size -= 1
        sizes.append(size)
    result = np.zeros((*x.shape[:2], *sizes))
    for n, c, i, j in itertools.product(
        range(x.shape[0]), range(x.shape[1]), range(sizes[0]), range(sizes[1])
    ):
        inside: list[float] = []
        counted = 0
        for r, q in itertools.product(range(k), range(k)):
            row, column = i * s + r - pads[0], j * s + q - pads[1]
            real = 0 <= row < x.shape[2] and 0 <= column < x.shape[3]
            padding = (
                -pads[0] <= row < x.shape[2] + pads[2] and -pads[1] <= column < x.shape[3] + pads[3]
            )
            if real:
                inside.append(float(x[n, c, row, column]))
            counted += real or (count and padding)
        result[n, c, i, j] = max(inside) if kind == "max_pool" else sum(inside) / counted
    return result


@pytest.mark.parametrize("count", [False, True])
@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("pads", [[0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 1]])
@pytest.mark.parametrize("size", [(5, 6), (7, 4)])
@pytest.mark.parametrize("kernel", [2, 3])
@pytest.mark.parametrize("kind", ["max_pool", "avg_pool"])
def test_pools(
    kind: str, kernel: int, size: tuple[int, int], pads: list[int], ceil: bool, count: bool
) -> None:
    net = Net([1, 2, *size])
    extra = {"count_include_pad": count} if kind == "avg_pool" else {}
    net.outputs(net.pool(kind, net.x, kernel, strides=[2, 2], pads=pads, ceil_mode=ceil, **extra))
    want = pool_definition(net.feed()["in0"], kind, kernel, 2, pads, ceil, count)
    np.testing.assert_allclose(net.run()[0], want, atol=1e-5)


def test_max_pool_indices() -> None:
    net = Net([1, 1, 4, 4])
    from xdsl.dialects.builtin import TensorType, f32

    op = top.create(
        top.MaxPoolOp,
        [net.x],
        {
            "kernel": [2, 2],
            "strides": [2, 2],
            "pads": [0] * 4,
            "dilations": [1, 1],
            "ceil_mode": False,
        },
        name="pool",
        result_types=[TensorType(f32, [1, 1, 2, 2]), TensorType(i64, [1, 1, 2, 2])],
    )
    net.block.add_op(op)
    net.outputs(*op.results)
    x = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
    pooled, where = net.run({"in0": x})
    assert pooled.reshape(-1).tolist() == [5, 7, 13, 15]
    assert where.reshape(-1).tolist() == [5, 7, 13, 15]
    assert TopSession(net.module, net.ctx.weights).values == ["in0", "pool", "pool:1"]


def test_products() -> None:
    net = Net([2, 1, 3, 4], [5, 4, 2], [3, 4])
    a, b, c = net.inputs
    w, bias = net.random(5, 4), net.random(5)
    net.outputs(
        net.op("matmul", a, b),
        net.op("linear", c, w, bias, clamp_min=0.0),
        net.op("linear", a, w, bias),
        net.op("linear", a, w, net.none()),
    )
    feed = net.feed()
    weights, shift = net.ctx.weights.get("w"), net.ctx.weights.get("w#1")
    want = [
        feed["in0"] @ feed["in1"],
        np.maximum(feed["in2"] @ weights.T + shift, 0),
        feed["in0"] @ weights.T + shift,
        feed["in0"] @ weights.T,
    ]
    for got, right in zip(net.run(), want, strict=True):
        np.testing.assert_allclose(got, right, atol=1e-5)


def test_normalisations() -> None:
    net = Net([2, 3, 4, 5])
    vectors = [net.random(3) for _ in range(3)]
    var = net.weight(np.array([0.5, 1.0, 2.0]), "var")
    scale, shift = net.random(4, 5, name="ln"), net.random(5, name="ln.b")
    net.outputs(
        net.op("batch_norm", net.x, *vectors, var, epsilon=1e-3, axis=1),
        net.op("instance_norm", net.x, *vectors[:2], epsilon=1e-3, axis=1),
        net.op("layer_norm", net.x, scale, shift, epsilon=1e-3, axis=2),
        net.op("lrn", net.x, size=3, alpha=0.5, beta=0.75, bias=1.5, axis=1),
    )
    x = net.feed()["in0"].astype(np.float64)
    g, b, m = (net.ctx.weights.get(name).reshape(1, 3, 1, 1) for name in ("w", "w#1", "w#2"))
    v = np.array([0.5, 1.0, 2.0]).reshape(1, 3, 1, 1)

    def normed(axes: tuple[int, ...]) -> Array:
        centred = x - x.mean(axes, keepdims=True)
        return centred / np.sqrt((centred**2).mean(axes, keepdims=True) + 1e-3)

    squares = np.zeros_like(x)
    for c in range(3):
        low, high = max(0, c - 1), min(2, c + 1)
        squares[:, c] = (x[:, low : high + 1] ** 2).sum(1)
    want = [
        (x - m) / np.sqrt(v + 1e-3) * g + b,
        normed((2, 3)) * g + b,
        normed((2, 3)) * net.ctx.weights.get("ln") + net.ctx.weights.get("ln.b"),
        x / (1.5 + 0.5 / 3 * squares) ** 0.75,
    ]
    for got, right in zip(net.run(), want, strict=True):
        np.testing.assert_allclose(got, right, atol=1e-4)


def test_channels_last_normalisations_equal_channels_first() -> None:
    first, last = Net([2, 3, 4, 5]), Net([2, 4, 5, 3])
    for net, axis in ((first, 1), (last, 3)):
        b = net.batch_norm(net.x, axis)
        i = net.op("instance_norm", b, net.random(3), net.random(3), epsilon=1e-3, axis=axis)
        net.outputs(net.op("lrn", i, size=3, alpha=0.5, beta=0.75, bias=1.0, axis=axis))
    x = first.feed()["in0"]
    got = last.run({"in0": np.ascontiguousarray(x.transpose(0, 2, 3, 1))})[0]
    np.testing.assert_allclose(got.transpose(0, 3, 1, 2), first.run({"in0": x})[0], atol=1e-5)


REDUCE: dict[str, Callable[..., Array]] = {
    "mean": np.mean,
    "sum": np.sum,
    "max": np.max,
    "min": np.min,
    "prod": np.prod,
    "l1": lambda x, a, keepdims: np.abs(x).sum(a, keepdims=keepdims),
    "l2": lambda x, a, keepdims: np.sqrt((x * x).sum(a, keepdims=keepdims)),
    "log_sum": lambda x, a, keepdims: np.log(x.sum(a, keepdims=keepdims)),
    "log_sum_exp": lambda x, a, keepdims: np.log(np.exp(x).sum(a, keepdims=keepdims)),
    "sum_square": lambda x, a, keepdims: (x * x).sum(a, keepdims=keepdims),
}


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("axes", [(0, 2), (1,), ()])
@pytest.mark.parametrize("kind", REDUCE)
def test_reduce(kind: str, axes: tuple[int, ...], keep: bool) -> None:
    net = Net([2, 3, 4])
    attributes = {"kind": kind, "axes": axes, "keepdims": keep}
    op = top.create(top.ReduceOp, [net.x], attributes, name="r")
    net.block.add_op(op)
    net.outputs(op.result)
    x = net.feed(0.5, 2.0)["in0"]
    want = REDUCE[kind](x.astype(np.float64), axes, keepdims=keep)
    np.testing.assert_allclose(net.run({"in0": x})[0], want, rtol=1e-5)


def test_along_one_axis() -> None:
    net = Net([2, 5, 3])
    x = net.x
    net.outputs(
        net.op("softmax", x, axis=1),
        net.op("log_softmax", x, axis=1),
        net.op("hardmax", x, axis=1),
        net.op("cumsum", x, axis=1, exclusive=True, reverse=True),
        net.op("arg", x, kind="min", axis=1, keepdims=False, select_last=False),
        net.op("topk", x, k=2, axis=1, largest=False, sorted=True),
    )
    a = net.feed()["in0"].astype(np.float64)
    soft = np.exp(a) / np.exp(a).sum(1, keepdims=True)
    hard = np.arange(5).reshape(1, 5, 1) == a.argmax(1)[:, None]
    running = a[:, ::-1].cumsum(1)[:, ::-1] - a
    want = [soft, np.log(soft), hard, running, a.argmin(1), np.sort(a, 1)[:, :2]]
    for got, right in zip(net.run(), want, strict=True):
        np.testing.assert_allclose(got, right, atol=1e-5)


def test_arg_takes_the_first_or_the_last() -> None:
    net = Net([1, 4])
    common = {"kind": "max", "axis": 1, "keepdims": True}
    ops = [
        top.create(top.ArgOp, [net.x], {**common, "select_last": last}, name=f"arg{last}")
        for last in (False, True)
    ]
    for op in ops:
        net.block.add_op(op)
    net.outputs(*(op.result for op in ops))
    got = net.run({"in0": np.array([[1, 5, 5, 0]], np.float32)})
    assert [int(value[0, 0]) for value in got] == [1, 2]


def test_movers() -> None:
    net = Net([2, 3, 4])
    x = net.x
    net.outputs(
        net.op("reshape", x, shape=[4, 6]),
        net.op("transpose", x, perm=[2, 0, 1]),
        net.op("concat", x, x, axis=2),
        net.op("slice", x, starts=[0, 2, 3], steps=[1, -1, -2], shape=[2, 3, 2]),
        net.op("slice", x, starts=[1, 0, 0], steps=[1, 2, 3], shape=[1, 2, 2]),
        net.op("slice", x, starts=[0, 0, 0], steps=[1, 1, 1], shape=[2, 0, 4]),
        net.op("pad", x, pads_begin=[0, 1, 0], pads_end=[1, 0, 2], mode="constant", value=7.0),
        net.op("pad", x, pads_begin=[0, 1, 1], pads_end=[1, 0, 2], mode="reflect", value=0.0),
        net.op("pad", x, pads_begin=[0, 1, 1], pads_end=[1, 0, 2], mode="edge", value=0.0),
        net.op("pad", x, pads_begin=[0, 1, 1], pads_end=[1, 0, 2], mode="wrap", value=0.0),
        net.op("tile", x, repeats=[1, 2, 1]),
        net.op("expand", net.op("slice", x, starts=[0] * 3, steps=[1] * 3, shape=[2, 1, 4]),
               shape=[5, 2, 3, 4]),
    )  # fmt: skip
    a = net.feed()["in0"]
    pads = [(0, 1), (1, 0), (1, 2)]
    want = [
        a.reshape(4, 6),
        a.transpose(2, 0, 1),
        np.concatenate([a, a], 2),
        a[:, ::-1, ::-2],
        a[1:, ::2, ::3],
        a[:, :0],
        np.pad(a, [(0, 1), (1, 0), (0, 2)], constant_values=7),
        np.pad(a, pads, "reflect"),
        np.pad(a, pads, "edge"),
        np.pad(a, pads, "wrap"),
        np.tile(a, (1, 2, 1)),
        np.broadcast_to(a[:, :1], (5, 2, 3, 4)),
    ]
    for got, right in zip(net.run(), want, strict=True):
        np.testing.assert_array_equal(got, right)


def test_gathers_and_scatters() -> None:
    net = Net([3, 4])
    x = net.x
    rows = net.weight(np.array([[2, -1], [0, 0]]))
    picks = net.weight(np.array([[3, 0], [1, 1], [2, 2]]))
    tuples = net.weight(np.array([[2, 1], [0, 3]]))
    updates = net.weight(np.full((3, 2), 10, np.float32))
    pair = net.weight(np.array([5, 6], np.float32))
    net.outputs(
        net.op("gather", x, rows, axis=0),
        net.op("gather_elements", x, picks, axis=1),
        net.op("gather_nd", x, tuples, batch_dims=0),
        net.op("scatter_elements", x, picks, updates, axis=1, reduction="add"),
        net.op("scatter_nd", x, tuples, pair, reduction="none"),
    )
    a = net.feed()["in0"]
    chosen = np.array([[3, 0], [1, 1], [2, 2]])
    added = a.copy()
    np.add.at(added, (np.arange(3)[:, None], chosen), 10)
    placed = a.copy()
    placed[[2, 0], [1, 3]] = [5, 6]
    want = [
        a[[[2, -1], [0, 0]]],
        np.take_along_axis(a, chosen, 1),
        a[[2, 0], [1, 3]],
        added,
        placed,
    ]
    for got, right in zip(net.run(), want, strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-6)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_resize(layout: str) -> None:
    nhwc = layout == "nhwc"
    net = Net([1, 2, 3, 1] if nhwc else [1, 1, 2, 3])
    common: dict[str, Any] = {
        "scales": [1.0, 2.0, 3.0, 1.0] if nhwc else [1.0, 1.0, 2.0, 3.0],
        "shape": [1, 4, 9, 1] if nhwc else [1, 1, 4, 9],
        "layout": layout,
    }
    net.outputs(
        net.op(
            "resize", net.x, mode="nearest", coordinate="asymmetric", nearest_mode="floor", **common
        ),
        net.op("resize", net.x, mode="linear", coordinate="align_corners", **common),
    )
    a = net.feed()["in0"].reshape(2, 3)
    nearest, linear = net.run()
    np.testing.assert_array_equal(nearest.reshape(4, 9), a.repeat(2, 0).repeat(3, 1))
    rows = np.array([np.interp(np.linspace(0, 2, 9), range(3), row) for row in a])
    right = np.array([np.interp(np.linspace(0, 1, 4), range(2), column) for column in rows.T]).T
    np.testing.assert_allclose(linear.reshape(4, 9), right, atol=1e-5)


def test_resize_by_sizes_when_the_scale_misses_them() -> None:
    net = Net([1, 1, 1, 49])
    net.outputs(net.op("resize", net.x, mode="nearest", coordinate="half_pixel",
                       scales=[1.0, 1.0, 1.0, 0.2], shape=[1, 1, 1, 10]))  # fmt: skip
    assert net.run()[0].shape == (1, 1, 1, 10)


def test_every_operation_has_a_handler() -> None:
    assert set(top.OPS) - set(HANDLERS) == {"weight", "none"}


# Names


def test_users_names_survive() -> None:
    net = Net([1, 2, 4, 4])
    a = net.op("relu", net.x, name="in0")  # a layer called like the input
    b = net.op("relu", a, name="out0")  # and one like the result, which it is not
    c = net.op("neg", b, name="last")
    net.outputs(c, net.x, c)
    session = TopSession(net.module, net.ctx.weights)
    x = net.feed()["in0"]
    every = session.run_values({"in0": x})
    np.testing.assert_array_equal(every["in0"], x)
    np.testing.assert_array_equal(every["in0#"], np.maximum(x, 0))
    np.testing.assert_array_equal(every["out0"], np.maximum(x, 0))
    results = session.run({"in0": x})
    assert list(results) == ["out0", "out1", "out2"]
    np.testing.assert_array_equal(results["out0"], -np.maximum(x, 0))
    np.testing.assert_array_equal(results["out1"], x)
    np.testing.assert_array_equal(results["out2"], results["out0"])
    np.testing.assert_array_equal(session.run({"in0": x}, ["last"])["last"], results["out0"])


def test_the_exported_model_is_valid_onnx() -> None:
    net = Net([1, 3, 8, 8])
    net.outputs(net.op("relu", net.conv(net.x, 4, pad=1)))
    proto = top_to_onnx(net.module, net.ctx.weights)
    onnx.checker.check_model(proto, full_check=True)
    assert [value.name for value in proto.graph.input] == ["in0"]
    assert [node.output[0] for node in proto.graph.node] == ["conv0", "out0"]


def test_a_session_keeps_what_it_was_made_from() -> None:
    net = Net([1, 3, 8, 8])
    net.outputs(net.batch_norm(net.conv(net.x, 4, pad=1)))
    session = TopSession(net.module, net.ctx.weights)
    before = session.run(net.feed())["out0"]
    net.apply("top-fold-batch-norm")
    net.apply("top-eliminate-dead-code")
    assert set(session.run_values(net.feed())) == {"in0", "conv0", "batch_norm0"}
    np.testing.assert_array_equal(session.run(net.feed())["out0"], before)


# Errors


def test_inputs_are_checked() -> None:
    net = Net([1, 2])
    net.outputs(net.op("relu", net.x))
    session = TopSession(net.module, net.ctx.weights)
    with pytest.raises(TilewrightError, match=r"E0103.*\[\] were given, the model has \['in0'\]"):
        session.run({})
    with pytest.raises(TilewrightError, match=r'"in0" is float32\[2, 2\], the model takes float32'):
        session.run({"in0": np.zeros((2, 2), np.float32)})
    with pytest.raises(TilewrightError, match=r'"in0" is float64'):
        session.run({"in0": np.zeros((1, 2))})
    with pytest.raises(TilewrightError, match="E0702"):
        session.run(net.feed(), ["nothing"])


def test_what_cannot_run_is_refused() -> None:
    from xdsl.dialects.builtin import IntegerType

    net = Net([4], elements=[IntegerType(16)])
    net.outputs(net.op("erf", net.x))
    with pytest.raises(TilewrightError, match="E0402"):
        run_top(net.module, net.ctx.weights, net.feed())


def test_what_onnxruntime_lacks_is_said() -> None:
    net = Net([1, 4, 2, 2])
    net.outputs(net.op("lrn", net.x, size=2, alpha=0.5, beta=0.75, bias=1.0, axis=1))
    with pytest.raises(TilewrightError, match=r"E0402.*onnxruntime cannot prepare"):
        net.run()


def test_two_layers_of_one_name_are_refused() -> None:
    net = Net([4])
    net.outputs(net.op("relu", net.op("neg", net.x, name="a"), name="a"))
    with pytest.raises(TilewrightError, match=r'E0501.*two layers are called "a"'):
        TopSession(net.module, net.ctx.weights)


def test_a_missing_or_wrong_constant_is_refused() -> None:
    net = Net([4], elements=[])
    net.outputs(net.op("add", net.x, net.random(4)))
    net.ctx.weights.set("w", np.zeros(5, np.float32))
    with pytest.raises(TilewrightError, match=r'E0501.*"w" has shape \(5,\)'):
        TopSession(net.module, net.ctx.weights)
    net.ctx.weights.remove("w")
    with pytest.raises(TilewrightError, match=r'E0501.*"w" is not in the weight store'):
        TopSession(net.module, net.ctx.weights)


def test_large_constants_are_not_copied_into_the_model() -> None:
    net = Net([1, 1000])
    net.outputs(net.op("linear", net.x, net.random(1000, 1000), net.random(1000)))
    session = TopSession(net.module, net.ctx.weights)
    assert set(session._model.external) == {"w", "w#1"}
    assert session._model.proto.ByteSize() < 10_000
    feed = net.feed()
    want = feed["in0"] @ net.ctx.weights.get("w").T + net.ctx.weights.get("w#1")
    np.testing.assert_allclose(session.run(feed)["out0"], want, atol=1e-3)
