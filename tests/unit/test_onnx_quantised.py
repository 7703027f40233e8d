"""Import of quantised ONNX: every form, exactly; what has none, on the host with a reason."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto, helper

from tests.quantised_models import (
    Array,
    compiled,
    host_reasons,
    model,
    node,
    packed,
    pair,
    run_both,
    run_ort,
    warnings,
)
from tilewright.diagnostics import TilewrightError
from tilewright.transforms.quant.given import exact_table, tie_share
from tilewright.transforms.quant.scales import EdgeScale
from tilewright.transforms.top.qdq import quantise_constant

RNG = np.random.default_rng(0)
X = (2 * RNG.standard_normal((2, 16))).astype(np.float32)
W = RNG.integers(-127, 128, (16, 8)).astype(np.int8)
EDGES: dict[str, Any] = {
    "sx": np.float32(0.03),
    "zx": np.uint8(120),
    "sy": np.float32(0.05),
    "zy": np.uint8(128),
    "w": W,
    "sw": np.float32(0.01),
}
WEIGHTS = node("DequantizeLinear", ["w", "sw"], ["wd"])


def product(
    weights: Any = WEIGHTS, outputs: tuple[str, ...] = ("y", "y.q"), **own: Any
) -> ModelProto:
    """Return Q/DQ, a product with dequantised weights, Q/DQ."""
    nodes = [
        *pair("x", "sx", "zx", "a"),
        weights,
        node("MatMul", ["a", "wd"], ["m"]),
        *pair("m", "sy", "zy", "y"),
    ]
    opset = own.pop("opset", 21)
    return model(nodes, {"x": (2, 16)}, ["y", "y.q"], {**EDGES, **own}, opset=opset)


def assert_same(proto: ModelProto, feed: dict[str, Array] | None = None, apart: int = 0) -> Any:
    feed = {"x": X} if feed is None else feed
    built = compiled(proto)
    found, wanted = run_both(built, feed), run_ort(proto, feed)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        if array.dtype.kind == "f":
            np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-5, err_msg=name)
        else:
            delta = np.abs(found[name].astype(int) - array.astype(int))
            assert delta.max() <= apart, name
    return built


# What the chip computes, code by code.


@pytest.mark.parametrize("opset", [10, 13, 19, 21, 23, 25])
def test_every_opset(opset: int) -> None:
    built = assert_same(product(opset=opset))
    assert built.program.tpu_steps
    assert host_reasons(built) == {"y.q": "codes are an output of the model"}


def per_channel(axis: int) -> Any:
    return node("DequantizeLinear", ["w", "sw", "zw"], ["wd"], axis=axis)


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize(("name", "low", "zero"), [("INT4", -8, 0), ("UINT4", 0, 8)])
def test_four_bit_weights(name: str, low: int, zero: int, axis: int) -> None:
    kind = getattr(TensorProto, name)
    built = assert_same(
        product(
            per_channel(axis),
            w=packed("w", RNG.integers(low, low + 16, (16, 8)), kind),
            sw=(RNG.random(8) * 0.1 + 0.01).astype(np.float32),
            zw=packed("zw", np.full(8, zero), kind),
        )
    )
    assert built.program.tpu_steps


def test_codes_of_four_bits_are_marked() -> None:
    built = assert_same(product(w=np.clip(W, -7, 7)))
    assert "weight_bits = 4" in str(built.stages["top"].module)


@pytest.mark.parametrize("zero", [0, 100, 128, 255])
def test_unsigned_weights(zero: int) -> None:
    """Codes beyond 8 bits, the zero point taken off, are split in parts side by side."""
    built = assert_same(
        product(
            node("DequantizeLinear", ["w", "sw", "zw"], ["wd"]),
            w=RNG.integers(0, 256, (16, 8)).astype(np.uint8),
            zw=np.uint8(zero),
        )
    )
    assert "MatMul" not in host_reasons(built)
    assert built.program.tpu_steps


def test_the_least_code_is_a_weight() -> None:
    w = W.copy()
    w[::2] = -128
    assert_same(product(w=w))


def test_scale_of_one_entry_and_no_zero_point() -> None:
    nodes = [
        *pair("x", "sx", "zx", "a"),
        WEIGHTS,
        node("MatMul", ["a", "wd"], ["m"]),
        node("QuantizeLinear", ["m", "sz"], ["y.q"], output_dtype=TensorProto.INT8),
        node("DequantizeLinear", ["y.q", "sz"], ["y"]),
    ]
    sz = np.array([0.05], np.float32)
    built = assert_same(model(nodes, {"x": (2, 16)}, ["y", "y.q"], {**EDGES, "sz": sz}))
    # Zero point 0, and yet all 256 codes.
    loud = {"x": 100 * X}
    assert run_both(built, loud)["y.q"].min() == -128


def test_scales_of_half_precision() -> None:
    """Computed in float32: half precision's own roundings may be one code away."""
    half = np.float16
    constants = {**EDGES, "sx": half(0.03), "sw": half(0.01), "sy": half(0.05)}
    nodes = [
        *pair("x", "sx", "zx", "a"),
        WEIGHTS,
        node("MatMul", ["a", "wd"], ["m"]),
        *pair("m", "sy", "zy", "y"),
    ]
    kind = TensorProto.FLOAT16
    proto = model(nodes, {"x": (2, 16)}, ["y.q"], constants, kind=kind)
    assert assert_same(proto, {"x": X.astype(half)}, apart=1).program.tpu_steps


def test_integers_at_the_interface() -> None:
    nodes = [
        node("DequantizeLinear", ["x", "sx", "zx"], ["a"]),
        WEIGHTS,
        node("MatMul", ["a", "wd"], ["m"]),
        node("QuantizeLinear", ["m", "sy", "zy"], ["y"]),
    ]
    proto = model(nodes, {"x": (2, 16)}, ["y"], EDGES, kind=TensorProto.UINT8)
    codes = RNG.integers(0, 256, (2, 16)).astype(np.uint8)
    built = assert_same(proto, {"x": codes})
    assert [port.dtype for port in (*built.program.inputs, *built.program.outputs)] == ["uint8"] * 2


def test_two_scales_in_a_row_are_a_table() -> None:
    nodes = [
        *pair("x", "sx", "zx", "a"),
        *pair("a", "sy", "zy", "b"),
        WEIGHTS,
        node("MatMul", ["b", "wd"], ["m"]),
        *pair("m", "sx", "zx", "y"),
    ]
    built = assert_same(model(nodes, {"x": (2, 16)}, ["y", "y.q"], EDGES))
    assert "quant.lut" in str(built.stages["quant"].module)


def test_constants_keep_their_codes() -> None:
    nodes = [
        *pair("x", "sx", "zx", "a"),
        node("DequantizeLinear", ["c", "sc", "zc"], ["cd"]),
        node("Mul", ["a", "cd"], ["m"]),
        *pair("m", "sy", "zy", "y"),
    ]
    constants = {
        **EDGES,
        "c": RNG.integers(0, 256, 16).astype(np.uint8),
        "sc": np.float32(0.02),
        "zc": np.uint8(7),
    }
    built = assert_same(model(nodes, {"x": (2, 16)}, ["y.q"], constants))
    assert built.program.tpu_steps


def test_large_biases_keep_their_integers() -> None:
    """float32 holds 24 bits of a bias of 30."""
    bias = np.array([2**29 + 1, -(2**29) - 3, 2**26 + 1, 5, 0, -7, 2**25 + 1, 1], np.int32)
    nodes = [
        *pair("x", "sx", "zx", "a"),
        WEIGHTS,
        node("DequantizeLinear", ["b", "sb"], ["bd"]),
        node("Gemm", ["a", "wd", "bd"], ["m"]),
        *pair("m", "sy", "zy", "y"),
    ]
    sb = np.float32(EDGES["sx"]) * np.float32(EDGES["sw"])
    built = compiled(model(nodes, {"x": (2, 16)}, ["y"], {**EDGES, "b": bias, "sb": sb}))
    stage = built.stages["quant"]
    stored = next(stage.weights.get(name) for name in stage.weights if ".bias" in name)
    # Of the stored bias the zero point's part is taken off.
    zero = 120 - 128
    np.testing.assert_array_equal(stored + zero * W.astype(np.int64).sum(axis=0), bias)


# Operators on codes.


def microsoft(op_type: str, operands: list[str], output: str, **extra: Any) -> Any:
    return helper.make_node(
        op_type, operands, [output], name=output, domain="com.microsoft", **extra
    )


IMAGE = {
    "s0": np.float32(0.02),
    "z0": np.uint8(110),
    "s1": np.float32(0.05),
    "z1": np.uint8(90),
    "k": RNG.integers(-127, 128, (4, 3, 3, 3)).astype(np.int8),
    "sk": (RNG.random(4) * 0.01 + 0.001).astype(np.float32),
    "zk": np.zeros(4, np.int8),
    "b": RNG.integers(-9999, 9999, 4).astype(np.int32),
}
OPERATORS = {
    "Sigmoid": microsoft("QLinearSigmoid", ["q", "s0", "z0", "s1", "z1"], "y"),
    "LeakyRelu": microsoft("QLinearLeakyRelu", ["q", "s0", "z0", "s1", "z1"], "y", alpha=0.2),
    "Add": microsoft("QLinearAdd", ["q", "s0", "z0", "q", "s0", "z0", "s1", "z1"], "y"),
    "Mul": microsoft("QLinearMul", ["q", "s0", "z0", "q", "s0", "z0", "s1", "z1"], "y"),
    "Concat": microsoft(
        "QLinearConcat", ["s1", "z1", "q", "s0", "z0", "q", "s0", "z0"], "y", axis=1
    ),
    "Pool": microsoft("QLinearGlobalAveragePool", ["q", "s0", "z0", "s1", "z1"], "y"),
    "Softmax": microsoft("QLinearSoftmax", ["q", "s0", "z0", "s2", "z2"], "y", axis=-1, opset=13),
    "Conv": node(
        "QLinearConv", ["q", "s0", "z0", "k", "sk", "zk", "s1", "z1", "b"], ["y"], pads=[1] * 4
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_on_codes(name: str) -> None:
    nodes = [node("QuantizeLinear", ["x", "s0", "z0"], ["q"]), OPERATORS[name]]
    constants = {**IMAGE, "s2": np.float32(1 / 256), "z2": np.uint8(0)}
    proto = model(nodes, {"x": (1, 3, 6, 6)}, ["y"], constants, opset=17)
    x = (2 * RNG.standard_normal((1, 3, 6, 6))).astype(np.float32)
    built = assert_same(proto, {"x": x}, apart=1 if name in ("Pool", "Mul") else 0)
    assert bool(built.program.tpu_steps) == (name != "Softmax")


@pytest.mark.parametrize("bias", [True, False])
def test_qgemm(bias: bool) -> None:
    operands = ["q", "sx", "zx", "w", "sw", "zw", "b" if bias else "", "sy", "zy"]
    nodes = [
        node("QuantizeLinear", ["x", "sx", "zx"], ["q"]),
        microsoft("QGemm", operands, "y", transB=0),
    ]
    constants = {**EDGES, "zw": np.int8(0), "b": np.arange(8, dtype=np.int32) * 1000}
    built = assert_same(model(nodes, {"x": (2, 16)}, ["y"], constants, opset=17))
    assert built.program.tpu_steps


def test_moving_codes_is_moving_values() -> None:
    """Pools, reshapes and slices of codes, as the format with operators on codes has them."""
    nodes = [
        node("QuantizeLinear", ["x", "s0", "z0"], ["q"]),
        node("MaxPool", ["q"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Transpose", ["p"], ["t"], perm=[0, 2, 3, 1]),
        node("Reshape", ["t", "shape"], ["r"]),
        node("DequantizeLinear", ["r", "s0", "z0"], ["d"]),
        WEIGHTS,
        node("MatMul", ["d", "wd"], ["m"]),
        *pair("m", "s1", "z1", "y"),
    ]
    constants = {**IMAGE, "shape": np.array([1, 16]), "w": W, "sw": np.float32(0.01)}
    proto = model(nodes, {"x": (1, 4, 4, 4)}, ["y.q"], constants, opset=17)
    x = (2 * RNG.standard_normal((1, 4, 4, 4))).astype(np.float32)
    built = assert_same(proto, {"x": x})
    assert host_reasons(built) == {"y.q": "codes are an output of the model"}


# What the host computes, and why.


def test_blocked_weights_run_on_the_host() -> None:
    proto = product(
        node("DequantizeLinear", ["w", "sw"], ["wd"], axis=0, block_size=4),
        sw=(RNG.random((4, 8)) * 0.1 + 0.01).astype(np.float32),
    )
    assert "several scales inside" in " ".join(host_reasons(assert_same(proto)).values())


def wide_pair() -> ModelProto:
    nodes = [
        *pair("x", "s16", "z16", "a"),
        WEIGHTS,
        node("MatMul", ["a", "wd"], ["m"]),
        *pair("m", "sy", "zy", "y"),
    ]
    constants = {**EDGES, "s16": np.float32(3e-4), "z16": np.uint16(32000)}
    return model(nodes, {"x": (2, 16)}, ["y"], constants)


def test_sixteen_bits_run_on_the_host() -> None:
    reasons = host_reasons(assert_same(wide_pair()))
    assert "uint16" in reasons["a.q"]
    assert "no scale is given" in reasons["m"]


def test_sixteen_bits_become_eight_with_data() -> None:
    built = compiled(wide_pair(), samples=[{"x": X}, {"x": -X}])
    assert not host_reasons(built)
    assert any("16-bit" in text for text in warnings(built))
    delta = run_both(built, {"x": X})["y"] - run_ort(wide_pair(), {"x": X})["y"]
    assert np.abs(delta).max() < 0.2


def test_a_scale_for_each_channel_of_an_activation() -> None:
    nodes = [
        *pair("x", "s", "z", "a", axis=-1),
        WEIGHTS,
        node("MatMul", ["a", "wd"], ["m"]),
        *pair("m", "sy", "zy", "y"),
    ]
    scales = (RNG.random(16) * 0.05 + 0.01).astype(np.float32)
    constants = {**EDGES, "s": scales, "z": np.full(16, 128, np.uint8)}
    reasons = host_reasons(assert_same(model(nodes, {"x": (2, 16)}, ["y"], constants)))
    assert "a scale for each channel" in reasons["a.q"]


def test_ops_without_scales_stay_float_without_data() -> None:
    nodes = [
        *pair("x", "sx", "zx", "a"),
        WEIGHTS,
        node("MatMul", ["a", "wd"], ["m"]),
        node("Tanh", ["m"], ["t"]),
        node("Relu", ["t"], ["r"]),
        *pair("r", "sy", "zy", "y"),
    ]
    proto = model(nodes, {"x": (2, 16)}, ["y"], EDGES)
    reasons = host_reasons(assert_same(proto))
    assert any("no scale is given" in reason for reason in reasons.values())
    assert not host_reasons(compiled(proto, samples=[{"x": X}]))


def test_given_codes_stay_with_data() -> None:
    """Calibration data change nothing of a model that is quantised throughout."""
    built = compiled(product(), samples=[{"x": X}, {"x": 3 * X}])
    np.testing.assert_array_equal(
        run_both(built, {"x": X})["y.q"], run_ort(product(), {"x": X})["y.q"]
    )


def test_a_float_model_still_asks_for_data() -> None:
    proto = model([node("Relu", ["x"], ["y"])], {"x": (2, 16)}, ["y"], {})
    with pytest.raises(TilewrightError, match="int8 needs calibration data"):
        compiled(proto)


# Scales found at run time.


def dynamic() -> ModelProto:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"], name="quantise"),
        node("MatMulInteger", ["q", "w", "z"], ["i"]),
        node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        node("Mul", ["s", "sw"], ["scale"]),
        node("Mul", ["f", "scale"], ["m"]),
        node("Add", ["m", "bias"], ["y"]),
    ]
    constants = {**EDGES, "bias": np.linspace(-1, 1, 8, dtype=np.float32)}
    return model(nodes, {"x": (2, 16)}, ["y"], constants, opset=17)


def test_dynamic_scales_run_on_the_host() -> None:
    reasons = host_reasons(assert_same(dynamic()))
    assert "found at run time" in reasons["i"]


def test_dynamic_scales_become_static_with_data() -> None:
    built = compiled(dynamic(), samples=[{"x": X}, {"x": -X}])
    assert not host_reasons(built)
    assert any("`i`" in text and "run time" in text for text in warnings(built))
    wanted = run_ort(dynamic(), {"x": X})["y"]
    np.testing.assert_allclose(run_both(built, {"x": X})["y"], wanted, atol=0.1)
    stage = built.stages["quant"]
    codes = next(stage.weights.get(name) for name in stage.weights if name.endswith(".i8"))
    np.testing.assert_array_equal(codes, W.T)


def test_convolutions_of_integers() -> None:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"], name="quantise"),
        node("ConvInteger", ["q", "k", "z"], ["i"], pads=[1] * 4),
        node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        node("Mul", ["f", "s"], ["m"]),
        node("Mul", ["m", "sk"], ["y"]),
    ]
    constants = {**IMAGE, "sk": IMAGE["sk"].reshape(1, 4, 1, 1)}
    proto = model(nodes, {"x": (1, 3, 6, 6)}, ["y"], constants, opset=17)
    x = RNG.standard_normal((1, 3, 6, 6)).astype(np.float32)
    assert_same(proto, {"x": x})
    built = compiled(proto, samples=[{"x": x}])
    assert not host_reasons(built)
    np.testing.assert_allclose(
        run_both(built, {"x": x})["y"], run_ort(proto, {"x": x})["y"], atol=0.05
    )


# Rounding.


@pytest.mark.parametrize(
    ("ratios", "share"),
    [([0.5], 0.5), ([0.75], 0.25), ([2.0], 0.0), ([0.1], 0.0), ([0.25, 3.0], 0.25)],
)
def test_share_of_ties(ratios: list[float], share: float) -> None:
    assert tie_share(ratios) == share


def test_ties_are_warned_of() -> None:
    nodes = [
        *pair("x", "s", "zx", "a"),
        node("ReduceMean", ["a", "axes"], ["m"], keepdims=1),
        *pair("m", "s", "zx", "y"),
    ]
    constants = {**EDGES, "s": np.float32(0.5), "axes": np.array([1])}
    proto = model(nodes, {"x": (64, 4)}, ["y.q"], constants, opset=18)
    built = compiled(proto)
    (text,) = warnings(built)
    found = re.search(r"about (\d+) %", text)
    assert found
    assert "`m`" in text
    feed = {"x": RNG.uniform(-30, 30, (64, 4)).astype(np.float32)}
    delta = run_both(built, feed)["y.q"].astype(int) - run_ort(proto, feed)["y.q"].astype(int)
    assert 0 < (delta != 0).mean() <= int(found[1]) / 100 + 0.1
    assert np.abs(delta).max() == 1


@given(
    st.floats(1e-3, 10), st.floats(1e-3, 10), st.integers(-128, 127), st.integers(-128, 127)
)  # fmt: skip
def test_tables_round_as_onnx_does(s: float, t: float, z: int, w: int) -> None:
    source, target = EdgeScale(float(np.float32(s)), z), EdgeScale(float(np.float32(t)), w)
    codes = np.arange(-128, 128)
    real = (codes - z).astype(np.float32) * np.float32(s)
    wanted = quantise_constant(real, np.array(t, np.float32), np.array(w), np.dtype(np.int8))
    np.testing.assert_array_equal(exact_table("clip", {}, source, target), wanted)


@given(st.lists(st.floats(-300, 300, width=32), min_size=1, max_size=20), st.integers(0, 255))
def test_constants_are_quantised_as_onnxruntime_does(values: list[float], zero: int) -> None:
    x = np.array([*values, 0.5, 1.5, -2.5, 400, -400], np.float32)
    found = quantise_constant(x, np.array(1, np.float32), np.array(zero), np.dtype(np.uint8))
    proto = model(
        [node("QuantizeLinear", ["x", "s", "z"], ["y"])],
        {"x": x.shape},
        ["y"],
        {"s": np.float32(1), "z": np.uint8(zero)},
    )
    np.testing.assert_array_equal(found, run_ort(proto, {"x": x})["y"])


# Files that are wrong.


def refusal(proto: ModelProto) -> str:
    with pytest.raises(TilewrightError) as caught:
        compiled(proto)
    return str(caught.value)


def test_scales_that_do_not_fit() -> None:
    scales = np.full(7, 0.1, np.float32)
    text = refusal(product(node("DequantizeLinear", ["w", "sw"], ["wd"], axis=1), sw=scales))
    assert '"wd"' in text
    assert "[7]" in text


def test_a_huge_block() -> None:
    """One block; nothing is made larger than the weights."""
    proto = product(
        node("DequantizeLinear", ["w", "sw"], ["wd"], axis=0, block_size=2**40),
        sw=np.full((1, 8), 0.1, np.float32),
    )
    built = compiled(proto)
    assert built.program.tpu_steps
    run_both(built, {"x": X})


@pytest.mark.parametrize("block", [-1, 3])
def test_blocks_that_do_not_fit(block: int) -> None:
    proto = product(
        node("DequantizeLinear", ["w", "sw"], ["wd"], axis=0, block_size=block),
        sw=np.full((4, 8), 0.1, np.float32),
    )
    assert "wd" in refusal(proto)


@pytest.mark.parametrize("scale", [np.inf, np.nan])
def test_scales_that_are_not_finite(scale: float) -> None:
    assert "sw" in refusal(product(sw=np.float32(scale))) or "wd" in refusal(
        product(sw=np.float32(scale))
    )


@pytest.mark.parametrize("scale", [0.0, -0.01, 1e-44])
def test_scales_of_no_use(scale: float) -> None:
    built = compiled(product(sw=np.float32(scale)))
    assert "not a positive normal number" in " ".join(host_reasons(built).values())


def test_an_axis_outside_the_tensor() -> None:
    scales = np.full(8, 0.1, np.float32)
    proto = product(node("DequantizeLinear", ["w", "sw"], ["wd"], axis=5), sw=scales)
    assert "wd" in refusal(proto)


def test_too_few_operands() -> None:
    nodes = [
        node("QuantizeLinear", ["x", "sx", "zx"], ["q"]),
        microsoft("QLinearAdd", ["q", "sx", "zx"], "y"),
    ]
    text = refusal(model(nodes, {"x": (2, 16)}, ["y"], EDGES, opset=17))
    assert 'QLinearAdd "y" has 3 inputs' in text


def test_a_domain_that_is_not_imported() -> None:
    proto = product()
    del proto.opset_import[1]
    proto.graph.node.append(microsoft("QLinearAdd", ["y"] * 8, "z"))
    proto.graph.output.append(helper.make_empty_tensor_value_info("z"))
    assert "QLinearAdd" in refusal(proto)


def resized(mode: str, codes: bool) -> ModelProto:
    operands = ["q" if codes else "d", "", "k2"]
    shape = np.array([1, 1, 2, 2], np.float32)
    nodes = [
        node("QuantizeLinear", ["x", "s0", "z0"], ["q"]),
        *([] if codes else [node("DequantizeLinear", ["q", "s0", "z0"], ["d"])]),
        node("Resize", operands, ["r"], mode=mode),
        *(
            [node("DequantizeLinear", ["r", "s0", "z0"], ["y"])]
            if codes
            else pair("r", "s0", "z0", "y")
        ),
    ]
    return model(nodes, {"x": (1, 3, 5, 5)}, ["y"], {**IMAGE, "k2": shape}, opset=17)


def test_nearest_neighbours_of_codes() -> None:
    x = RNG.standard_normal((1, 3, 5, 5)).astype(np.float32)
    built = assert_same(resized("nearest", codes=True), {"x": x})
    assert built.program.tpu_steps
    assert not host_reasons(built)


def test_ties_of_interpolation_are_warned_of() -> None:
    """Weights are quarters: every sixteenth sum is a tie."""
    (text,) = warnings(compiled(resized("linear", codes=False)))
    assert "`r`" in text
    assert "about 3.1 %" in text
