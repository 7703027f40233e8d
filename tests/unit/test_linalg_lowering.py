"""`lower-quant-to-linalg`: its integers against the reference, its structure, its refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xdsl.dialects.builtin import ModuleOp, TensorType, f32, i8
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation

from tests.quant_graphs import Graph, codes, random_codes
from tilewright.diagnostics import TilewrightError
from tilewright.dialects import quant, top
from tilewright.dialects.quant import shape_of
from tilewright.interp import run_linalg
from tilewright.quant.reference import run_quant
from tilewright.transforms.linalg.lower_quant_to_linalg import LowerQuantToLinalgPass

ROUNDINGS = ["half_up", "half_away", "half_even", "truncate"]
LAYOUTS = ["nhwc", "nchw"]


def check(graph: Graph, *results: Any, seed: int = 0) -> dict[str, np.ndarray]:
    """Run the reference before and the interpreter after lowering; every layer must agree."""
    module = graph.module(*results)
    rng = np.random.default_rng(seed)
    inputs = {
        name: random_codes(rng, shape_of(arg))
        for name, arg in zip(graph.names, graph.block.args, strict=True)
    }
    expected = run_quant(module, graph.weights, inputs, keep=True)
    LowerQuantToLinalgPass().apply(graph.context(), module)
    module.verify()
    actual = run_linalg(module, graph.weights, inputs, keep=True)
    assert set(expected) == set(actual)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        np.testing.assert_array_equal(actual[name], value, err_msg=name)
    return actual


def end(rounding: str, zero: int = 0, lo: int = -127, hi: int = 127) -> dict[str, Any]:
    zp = zero - 128 if rounding == "truncate" else zero
    return {"zp": zp, "lo": lo, "hi": hi, "rounding": rounding}


def wide(rounding: str, zero: int, shift: int) -> dict[str, Any]:
    """Attributes of an op with a wide bias, with the truncation term where it belongs."""
    bias, bias_shift = (257, shift - 1) if rounding == "truncate" else (3, 2)
    return {"shift": shift, "bias": bias, "bias_shift": bias_shift, **end(rounding, zero)}


@st.composite
def convolutions(draw: st.DrawFn) -> dict[str, Any]:
    group = draw(st.sampled_from([1, 1, 2, 3]))
    per_group_in, per_group_out = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    kernel = (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    dilations = (draw(st.integers(1, 2)), draw(st.integers(1, 3)))
    pads = tuple(draw(st.integers(0, 2)) for _ in range(4))
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    return {
        "size": [draw(st.integers(reach[i], reach[i] + 6)) for i in range(2)],
        "batch": draw(st.integers(1, 2)),
        "channels": group * per_group_in,
        "out_channels": group * per_group_out,
        "group": group,
        "kernel": kernel,
        "strides": (draw(st.integers(1, 3)), draw(st.integers(1, 3))),
        "pads": pads,
        "dilations": dilations,
        "layout": draw(st.sampled_from(LAYOUTS)),
        "rounding": draw(st.sampled_from(ROUNDINGS)),
        "zero_in": draw(st.integers(-128, 127)),
        "zero": draw(st.integers(-20, 20)),
        "seed": draw(st.integers(0, 2**31)),
    }


@settings(max_examples=120, deadline=None, derandomize=True)
@given(convolutions())
def test_convolution(case: dict[str, Any]) -> None:
    rng = np.random.default_rng(case["seed"])
    n, c, (h, w) = case["batch"], case["channels"], case["size"]
    shape = [n, h, w, c] if case["layout"] == "nhwc" else [n, c, h, w]
    graph = Graph(x=codes(shape, zero=case["zero_in"]))
    keys = ("kernel", "strides", "pads", "dilations", "group", "layout", "rounding", "zero")
    options = {key: case[key] for key in keys}
    result = graph.conv("conv", graph.input("x"), rng, case["out_channels"], **options)
    check(graph, result, seed=case["seed"])


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_convolution_by_hand(rounding: str) -> None:
    """Loops and Python integers only, against a third implementation."""
    rng = np.random.default_rng(7)
    graph = Graph(x=codes([1, 5, 6, 3], zero=9))
    result = graph.conv(
        "c", graph.input("x"), rng, 4, (3, 2), (2, 1), (1, 0, 1, 1), rounding=rounding
    )
    x, store = random_codes(rng, [1, 5, 6, 3]), graph.weights
    actual = run_linalg(graph.lowered(result), store, {"x": x})["result0"]
    weight = store.get("c.w")
    zp = -128 if rounding == "truncate" else 0
    for oh, ow, c in np.ndindex(actual.shape[1:]):
        acc = int(store.get("c.bias")[c])
        for kh, kw, ic in np.ndindex(3, 2, 3):
            row, column = oh * 2 + kh - 1, ow + kw
            inside = 0 <= row < 5 and 0 <= column < 6
            code = int(x[0, row, column, ic]) if inside else 9
            acc += code * int(weight[c, ic, kh, kw])
        value = acc * int(store.get("c.mult")[c])
        s = int(store.get("c.shift")[c])
        up = (value + (1 << s >> 1)) >> s
        sizes = {"half_away": abs(value) + (1 << s >> 1), "truncate": abs(value)}
        if rounding in sizes:
            up = (sizes[rounding] >> s) * (1 if value >= 0 else -1)
        elif rounding == "half_even" and value % (1 << s) == 1 << (s - 1):
            up = (value >> s) + ((value >> s) & 1)
        assert actual[0, oh, ow, c] == min(max(up + zp, -127), 127)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("shift", [0, 1, 2, 5])
def test_rounding_at_every_tie(rounding: str, shift: int) -> None:
    """A multiplier of 1 or 3 over small shifts meets all ties, both signs, and the clamps."""
    for mult in (1, 3):
        graph = Graph(x=codes([256]))
        attributes = {"shift": shift, "bias": 0, "bias_shift": 0, "zp": 0, "lo": -100, "hi": 99}
        result = graph.quant(
            quant.RequantizeOp,
            "r",
            [graph.input("x")],
            codes([256]),
            mult=mult,
            rounding=rounding,
            **attributes,
        )
        x = np.arange(-128, 128, dtype=np.int8)
        actual = run_linalg(graph.lowered(result), graph.weights, {"x": x})["result0"]
        for code, got in zip(x.tolist(), actual.tolist(), strict=True):
            value, unit = code * mult, 1 << shift
            low, rest = divmod(value, unit)
            if rounding == "truncate":
                nearest = low + (1 if rest and value < 0 else 0)
            elif 2 * rest != unit:
                nearest = low + (1 if 2 * rest > unit else 0)
            else:
                upper = {
                    "half_up": True,
                    "half_away": value > 0,
                    "half_even": low % 2 == 1,
                }[rounding]
                nearest = low + (1 if upper else 0)
            assert got == min(max(nearest, -100), 99), (code, mult)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_depthwise(layout: str, rounding: str) -> None:
    rng = np.random.default_rng(3)
    graph = Graph(x=codes([2, 9, 9, 12] if layout == "nhwc" else [2, 12, 9, 9], zero=-7))
    x = graph.input("x")
    y = graph.conv("d", x, rng, 12, (5, 3), (2, 1), (2, 1, 2, 1), (1, 1), 12, layout, rounding)
    check(graph, y)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_linear(rank: int) -> None:
    rng = np.random.default_rng(4)
    shape = [3, 2, 40][3 - rank :]
    graph = Graph(x=codes(shape, zero=5))
    weight = graph.weight("w", rng.integers(-127, 128, (9, 40), dtype=np.int8))
    operands = [graph.input("x"), weight, *graph.parameters("fc", rng, 9, 20000)]
    result = graph.quant(
        quant.LinearOp, "fc", operands, codes([*shape[:-1], 9], zero=-3), **end("half_even", -3)
    )
    check(graph, result)


def test_matmul_broadcasts_batches() -> None:
    graph = Graph(a=codes([3, 1, 4, 33]), b=codes([2, 33, 5]))
    result = graph.quant(
        quant.MatmulOp,
        "m",
        [graph.input("a"), graph.input("b")],
        codes([3, 2, 4, 5]),
        bias=77,
        mult=2**30 + 12345,
        shift=39,
        **end("half_away"),
    )
    check(graph, result)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("kernel", "strides", "pads"),
    [([2, 3], [2, 1], [0, 0, 0, 0]), ([3, 3], [2, 2], [1, 1, 1, 1]), ([11, 9], [1, 1], [0] * 4)],
)
def test_avg_pool(layout: str, kernel: list[int], strides: list[int], pads: list[int]) -> None:
    nhwc = [2, 11, 9, 5]
    size = [
        (n + pads[k] + pads[k + 2] - kernel[k]) // strides[k] + 1 for k, n in enumerate((11, 9))
    ]
    out = [2, *size, 5]
    order = (0, 1, 2, 3) if layout == "nhwc" else (0, 3, 1, 2)
    graph = Graph(x=codes([nhwc[i] for i in order], zero=11))
    result = graph.quant(
        quant.AvgPoolOp,
        "p",
        [graph.input("x")],
        codes([out[i] for i in order], zero=11),
        kernel=kernel,
        strides=strides,
        pads=pads,
        layout=layout,
        bias=-11 * kernel[0] * kernel[1],
        mult=round(2**37 / (kernel[0] * kernel[1]) / 64),
        shift=31,
        **end("half_up", 11),
    )
    check(graph, result)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ceil", [False, True])
def test_max_pool(layout: str, ceil: bool) -> None:
    order = (0, 1, 2, 3) if layout == "nhwc" else (0, 3, 1, 2)
    graph = Graph(x=codes([[1, 10, 11, 6][i] for i in order], zero=4))
    out = [1, 5 + ceil, 5 + ceil, 6]
    result = graph.top(
        top.MaxPoolOp,
        "p",
        [graph.input("x")],
        codes([out[i] for i in order], zero=4),
        kernel=[3, 2],
        strides=[2, 2],
        pads=[1, 0, 1, 1],
        dilations=[1, 2],
        ceil_mode=ceil,
        layout=layout,
    )
    check(graph, result)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("kind", [quant.AddOp, quant.SubOp])
def test_sums(rounding: str, kind: type[quant.QuantOp]) -> None:
    graph = Graph(a=codes([2, 5, 4], zero=3), b=codes([5, 1], zero=-9))
    result = graph.quant(
        kind,
        "s",
        [graph.input("a"), graph.input("b")],
        codes([2, 5, 4], zero=2),
        mult_a=2**29 + 11,
        mult_b=2**30 - 5,
        **wide(rounding, 2, 31),
    )
    check(graph, result)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_mul_and_requantize(rounding: str) -> None:
    graph = Graph(a=codes([2, 1, 4], zero=3), b=codes([7, 1], zero=-9))
    product = graph.quant(
        quant.MulOp,
        "m",
        [graph.input("a"), graph.input("b")],
        codes([2, 7, 4], zero=2),
        mult=2**30 + 77,
        **wide(rounding, 2, 37),
    )
    result = graph.quant(
        quant.RequantizeOp,
        "r",
        [product],
        codes([2, 7, 4], zero=-6),
        mult=2**30 + 3,
        **wide(rounding, -6, 31),
    )
    check(graph, result)


def test_lut_reads_every_entry() -> None:
    rng = np.random.default_rng(9)
    graph = Graph(x=codes([16, 16]))
    graph.weights.set("table", rng.permutation(256).astype(np.uint8).view(np.int8))
    attributes = {"table": "table", "function": "hard_swish"}
    result = graph.quant(quant.LutOp, "l", [graph.input("x")], codes([16, 16]), **attributes)
    x = np.arange(-128, 128, dtype=np.int8).reshape(16, 16)
    actual = run_linalg(graph.lowered(result), graph.weights, {"x": x})["result0"]
    np.testing.assert_array_equal(actual.reshape(-1), graph.weights.get("table"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_resize(layout: str, rounding: str) -> None:
    rng = np.random.default_rng(10)
    order = (0, 1, 2, 3) if layout == "nhwc" else (0, 3, 1, 2)
    graph = Graph(x=codes([[2, 5, 4, 3][i] for i in order], zero=-8))

    def table(size: int, source: int) -> np.ndarray:
        index = np.sort(rng.integers(0, source, (size, 2)), axis=1)
        weight = rng.integers(0, 2049, (size, 1))
        return np.concatenate([index, weight, 2048 - weight], axis=1).astype(np.int16)

    operands = [
        graph.input("x"),
        graph.weight("ty", table(9, 5)),
        graph.weight("tx", table(7, 4)),
    ]
    result = graph.quant(
        quant.ResizeOp,
        "r",
        operands,
        codes([[2, 9, 7, 3][i] for i in order], zero=1),
        layout=layout,
        mode="linear",
        mult=2**14 - 3,
        **wide(rounding, 1, 36),
    )
    check(graph, result)


def test_movers() -> None:
    graph = Graph(x=codes([2, 3, 4, 5], zero=6), y=codes([2, 3, 2, 5], zero=6))

    def kind(*shape: int) -> TensorType[Any]:
        return codes(shape, zero=6)

    x, y = graph.input("x"), graph.input("y")
    joined = graph.top(top.ConcatOp, "cat", [x, y, x], kind(2, 3, 10, 5), axis=2)
    turned = graph.top(top.TransposeOp, "t", [joined], kind(5, 2, 3, 10), perm=[3, 0, 1, 2])
    flat = graph.top(top.ReshapeOp, "r", [turned], kind(10, 30))
    same = graph.top(top.ReshapeOp, "same", [flat], kind(10, 30))
    line = graph.top(top.ReshapeOp, "line", [same], kind(300))
    back = graph.top(top.ReshapeOp, "back", [line], kind(3, 4, 25))
    cut = graph.top(top.SliceOp, "s", [back], kind(2, 2, 8), starts=[0, 1, 2], steps=[2, 2, 3])
    rev = graph.top(top.SliceOp, "n", [cut], kind(2, 2, 4), starts=[1, 0, 7], steps=[-1, 1, -2])
    begin, stop = [1, 0, 2], [0, 3, 1]
    options = {"mode": "constant", "value": 0.0}
    wider = graph.top(
        top.PadOp, "p", [rev], kind(3, 5, 7), pads_begin=begin, pads_end=stop, **options
    )
    crop = graph.top(
        top.PadOp,
        "c",
        [wider],
        kind(4, 3, 7),
        pads_begin=[0, -1, 0],
        pads_end=[1, -1, 0],
        **options,
    )
    kept = graph.top(
        top.PadOp, "k", [crop], kind(4, 3, 7), pads_begin=[0] * 3, pads_end=[0] * 3, **options
    )
    check(graph, kept)


def segments(graph: Graph) -> ModuleOp:
    """host 0 quantises, tpu 1 convolves, host 2 dequantises."""
    rng = np.random.default_rng(11)
    graph.on("host", 0)
    q = graph.quant(quant.QuantizeOp, "q", [graph.input("x")], codes([1, 4, 4, 3]))
    graph.on("tpu", 1)
    a = graph.conv("a", q, rng, 5)
    b = graph.conv("b", a, rng, 2, (1, 1))
    graph.on("host", 2)
    real = TensorType(f32, [1, 2, 2, 2])
    return graph.module(graph.quant(quant.DequantizeOp, "dq", [b], real), a)


def test_host_segments_are_declared_and_called() -> None:
    graph = Graph(x=TensorType(f32, [1, 4, 4, 3]))
    module = segments(graph)
    x = np.random.default_rng(1).normal(0, 2, (1, 4, 4, 3)).astype(np.float32)
    expected = run_quant(module, graph.weights, {"x": x}, keep=True)
    context = graph.context()
    LowerQuantToLinalgPass().apply(context, module)
    module.verify()
    functions = {op.sym_name.data: op for op in module.body.block.ops if isinstance(op, FuncOp)}
    assert list(functions) == ["host_0", "tpu_1", "host_2", "main"]
    assert not functions["host_0"].body.blocks
    assert functions["tpu_1"].function_type.inputs.data[0] == TensorType(i8, [1, 4, 4, 3])
    calls = list[str]()

    def host(name: str, arguments: Any) -> list[np.ndarray]:
        calls.append(name)
        wanted = {"host_0": (x, "q"), "host_2": (expected["b"], "dq")}[name]
        np.testing.assert_array_equal(arguments[0], wanted[0])
        return [expected[wanted[1]]]

    actual = run_linalg(module, graph.weights, {"x": x}, keep=True, host=host)
    assert calls == ["host_0", "host_2"]
    assert set(actual) == {"q", "a", "b", "dq", "result0", "result1"}
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)
    # Without a host of its own the interpreter runs the graphs that the declarations carry.
    alone = run_linalg(module, graph.weights, {"x": x}, keep=True)
    for name, value in expected.items():
        np.testing.assert_array_equal(alone[name], value, err_msg=name)
    refused = {item.layer: item.reason for item in context.decisions if not item.fired}
    assert refused == {
        "q": "quant.quantize runs on the host",
        "dq": "quant.dequantize runs on the host",
    }
    assert {item.layer for item in context.decisions if item.fired} == {"a", "b"}


def test_again_changes_nothing() -> None:
    graph = Graph(x=TensorType(f32, [1, 4, 4, 3]))
    module = segments(graph)
    LowerQuantToLinalgPass().apply(graph.context(), module)
    before = str(module)
    LowerQuantToLinalgPass().apply(graph.context(), module)
    assert str(module) == before


def test_only_upstream_dialects_and_no_weights() -> None:
    graph = Graph(x=TensorType(f32, [1, 4, 4, 3]))
    module = segments(graph)
    LowerQuantToLinalgPass().apply(graph.context(), module)
    for op in module.walk():
        assert op.name.split(".")[0] in {"builtin", "func", "linalg", "tensor", "arith"}
        assert not any("." in key for key in op.attributes), op.name
        if op.name == "arith.constant":
            assert not isinstance(op.results[0].type, TensorType)


def failure(graph: Graph, module: ModuleOp) -> TilewrightError:
    with pytest.raises(TilewrightError) as caught:
        LowerQuantToLinalgPass().apply(graph.context(), module)
    return caught.value


def test_padding_with_other_than_zero_is_refused() -> None:
    graph = Graph(x=codes([4]))
    options = {"pads_begin": [1], "pads_end": [0], "mode": "constant", "value": 2.5}
    result = graph.top(top.PadOp, "my_pad", [graph.input("x")], codes([5]), **options)
    error = failure(graph, graph.module(result))
    assert error.code == "E0402"
    assert "my_pad" in str(error)
    assert "2.5" in str(error)


def test_an_unknown_op_is_refused() -> None:
    graph = Graph(x=codes([4]))
    module = graph.module(graph.top(top.ReluOp, "my_relu", [graph.input("x")], codes([4])))
    error = failure(graph, module)
    assert error.code == "E0402"
    assert "my_relu" in str(error)


def test_a_sum_that_could_leave_64_bits_is_refused() -> None:
    graph = Graph(x=codes([4]))
    # The rounding term 2^61 on top of nearly 2^63: the verifier accepts it, the shift would wrap.
    attributes = {"mult": 1, "shift": 62, "bias": 2**31 - 1, "bias_shift": 32}
    result = graph.quant(
        quant.RequantizeOp, "big", [graph.input("x")], codes([4]), **attributes, **end("half_up")
    )
    error = failure(graph, graph.module(result))
    assert error.code == "E0302"
    assert "big" in str(error)


def test_an_unpartitioned_op_is_refused() -> None:
    graph = Graph(x=codes([1, 4, 4, 3]))
    result = graph.conv("lonely", graph.input("x"), np.random.default_rng(0), 2)
    module = graph.module(result)
    assert isinstance(result.owner, Operation)
    del result.owner.attributes["segment"]
    error = failure(graph, module)
    assert error.code == "E0501"
    assert "lonely" in str(error)
    assert error.hint is not None
    assert "quant-partition" in error.hint


def test_missing_constant_is_refused() -> None:
    graph = Graph(x=codes([1, 4, 4, 3]))
    result = graph.conv("c", graph.input("x"), np.random.default_rng(0), 2)
    module = graph.module(result)
    graph.weights.remove("c.mult")
    assert "c.mult" in str(failure(graph, module))


def test_max_pool_of_the_lowest_code() -> None:
    """Padding is not larger than any code."""
    graph = Graph(x=codes([1, 4, 4, 2]))
    options = {"kernel": [3, 3], "strides": [1, 1], "pads": [1] * 4, "dilations": [1, 1]}
    result = graph.top(
        top.MaxPoolOp,
        "p",
        [graph.input("x")],
        codes([1, 4, 4, 2]),
        ceil_mode=False,
        layout="nhwc",
        **options,
    )
    x = np.full((1, 4, 4, 2), -128, np.int8)
    got = run_linalg(graph.lowered(result), graph.weights, {"x": x})["result0"]
    np.testing.assert_array_equal(got, x)
