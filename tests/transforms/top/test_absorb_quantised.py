"""`top-absorb-weights`, `top-absorb-qdq`, `top-replace-dynamic`, `top-widen-half`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

from tests.quantised_models import model, node, pair
from tilewright.diagnostics import UsageError
from tilewright.frontends.onnx import import_onnx
from tilewright.ir.context import CompileContext
from tilewright.passes import make_pass, run_passes
from tilewright.runtime.float_executor import TopSession
from tilewright.transforms.convert_onnx_to_top import ConvertOnnxToTopPass

RNG = np.random.default_rng(1)
CONSTANTS: dict[str, Any] = {
    "s": np.float32(0.03),
    "z": np.uint8(120),
    "t": np.float32(0.05),
    "w": RNG.integers(-127, 128, (3, 2, 1, 1)).astype(np.int8),
    "sw": np.array([0.1, 0.2, 0.3], np.float32),
    "b": np.array([1000, -2000, 3000], np.int32),
    "sb": np.array([0.003, 0.006, 0.009], np.float32),
}
LAYER = [
    node("DequantizeLinear", ["w", "sw"], ["wd"], axis=0),
    node("DequantizeLinear", ["b", "sb"], ["bd"], axis=0),
    node("Conv", ["a", "wd", "bd"], ["c"]),
]
X = RNG.standard_normal((1, 2, 4, 4)).astype(np.float32)


class Run:
    """A model on its way through passes of `top`."""

    def __init__(self, proto: ModelProto) -> None:
        self.ctx = CompileContext()
        self.module = import_onnx(proto, None, self.ctx)
        ConvertOnnxToTopPass().apply(self.ctx, self.module)

    def then(self, *names: str) -> Run:
        run_passes(self.module, self.ctx, [make_pass(name) for name in names])
        self.module.verify()
        return self

    @property
    def text(self) -> str:
        return str(self.module)

    def reasons(self, fired: bool) -> list[str]:
        return [item.reason for item in self.ctx.decisions if item.fired == fired]

    def result(self) -> np.ndarray[Any, Any]:
        session = TopSession(self.module, self.ctx.weights, optimise=False)
        return session.run({"x": X})[session.outputs[0]]


def quantised(*nodes: Any, output: str = "y", **constants: Any) -> ModelProto:
    return model(nodes, {"x": X.shape}, [output], {**CONSTANTS, **constants})


def test_weights_and_biases_are_taken() -> None:
    run = Run(quantised(*pair("x", "s", "z", "a"), *LAYER, output="c"))
    before = run.result()
    run.then("top-absorb-weights")
    assert 'weight_scale = "c.given_scale"' in run.text
    np.testing.assert_array_equal(
        run.ctx.weights.get("c.given_scale"), CONSTANTS["sw"].astype(np.float64)
    )
    np.testing.assert_array_equal(run.ctx.weights.get("c.bias_codes"), CONSTANTS["b"])
    assert run.text.count("dequantize_linear") == 1
    np.testing.assert_array_equal(run.result(), before)
    once = run.text
    assert run.then("top-absorb-weights").text == once


def test_quantised_constants_are_evaluated() -> None:
    real = RNG.standard_normal((3, 2, 1, 1)).astype(np.float32)
    run = Run(
        quantised(
            node("QuantizeLinear", ["f", "sw", "zw"], ["q"], axis=0),
            node("DequantizeLinear", ["q", "sw", "zw"], ["d"], axis=0),
            node("Conv", ["x", "d"], ["c"]),
            output="c",
            # A constant that import does not fold.
            f=real,
            zw=np.zeros(3, np.int8),
        )
    )
    before = run.result()
    run.then("top-absorb-weights")
    assert "quantize_linear" not in run.text
    np.testing.assert_array_equal(run.result(), before)


def test_scales_along_the_inputs_have_no_integer_form() -> None:
    nodes = [
        node("DequantizeLinear", ["w", "si"], ["wd"], axis=1),
        node("Conv", ["x", "wd"], ["c"]),
    ]
    run = Run(quantised(*nodes, output="c", si=np.array([0.1, 0.2], np.float32)))
    run.then("top-absorb-weights")
    assert "weight_scale" not in run.text
    assert "its weights have several scales inside an output channel" in run.reasons(False)


@pytest.mark.parametrize(("zero", "parts"), [(128, 1), (100, 2), (0, 3), (255, 2)])
def test_weights_with_zero_points_are_split(zero: int, parts: int) -> None:
    codes = np.array([0, 255, 128, 127, 1, 254], np.uint8).reshape(3, 2, 1, 1)
    nodes = [
        node("DequantizeLinear", ["u", "t", "zu"], ["wd"]),
        node("Conv", ["x", "wd"], ["c"]),
    ]
    run = Run(quantised(*nodes, output="c", u=codes, zu=np.uint8(zero)))
    before = run.result()
    run.then("top-absorb-weights")
    assert f"tensor<3x{2 * parts}x1x1xf32>" in run.text
    np.testing.assert_allclose(run.result(), before, rtol=1e-5, atol=1e-4)


def test_grouped_weights_are_not_split() -> None:
    codes = np.array([0, 255], np.uint8).reshape(2, 1, 1, 1)
    nodes = [
        node("DequantizeLinear", ["u", "t", "zu"], ["wd"]),
        node("Conv", ["x", "wd"], ["c"], group=2),
    ]
    run = Run(quantised(*nodes, output="c", u=codes, zu=np.uint8(0)))
    run.then("top-absorb-weights")
    assert any("exceed 8 bits" in reason for reason in run.reasons(False))


def test_a_factor_behind_changes_scales_and_not_codes() -> None:
    nodes = [*LAYER, node("Mul", ["c", "k"], ["y"])]
    factors = np.array([2, -3, 0.5], np.float32).reshape(1, 3, 1, 1)
    run = Run(quantised(node("Identity", ["x"], ["a"]), *nodes, k=factors))
    before = run.result()
    run.then("top-absorb-weights", "top-fold-constants", "top-fold-scale")
    assert "top.mul" not in run.text
    name = run.text.partition('weight_scale = "')[2].partition('"')[0]
    scales = run.ctx.weights.get(name)
    np.testing.assert_allclose(scales, CONSTANTS["sw"] * np.abs(factors).reshape(-1), rtol=1e-7)
    np.testing.assert_allclose(run.result(), before, rtol=1e-5, atol=1e-5)


def test_pairs_become_scales() -> None:
    run = Run(quantised(*pair("x", "s", "z", "a"), *LAYER, *pair("c", "t", "z", "y")))
    run.then("top-absorb-weights", "top-absorb-qdq")
    assert "quantize_linear" not in run.text
    assert "quant_scale = 0.05" in run.text
    assert "quant_zero = -8 : i32" in run.text
    assert "arg_quant_scales = [0.029" in run.text
    assert "arg_quant_zeros = [-8 : i32]" in run.text
    once = run.text
    assert run.then("top-absorb-qdq").text == once


def several(*between: Any) -> ModelProto:
    """Return a layer whose result is quantised with two scales, one behind `between`."""
    source = between[-1].output[0] if between else "c"
    nodes = [*LAYER, *between, *pair("c", "t", "z", "y"), *pair(source, "s", "z", "u")]
    return quantised(*pair("x", "s", "z", "a"), *nodes, node("Add", ["y", "u"], ["v"]), output="v")


@pytest.mark.parametrize("between", [[], [node("Relu", ["c"], ["r"])]], ids=["none", "relu"])
def test_a_layer_of_two_scales_is_computed_twice(between: list[Any]) -> None:
    run = Run(several(*between))
    before = run.result()
    run.then("top-absorb-weights", "top-separate-scales")
    assert run.text.count("= top.conv") == 2
    np.testing.assert_array_equal(run.result(), before)
    once = run.text
    assert run.then("top-separate-scales").text == once
    run.then("top-fuse-activation", "top-absorb-qdq")
    assert "quantize_linear" not in run.text


def test_layers_are_not_copied_for_ever() -> None:
    run = Run(several()).then("top-separate-scales{most=1}")
    assert run.text.count("= top.conv") == 1
    assert "its result is quantised in 2 ways" in run.reasons(False)


def test_a_layer_that_is_read_in_float_too_is_not_copied() -> None:
    run = Run(several(node("Tanh", ["c"], ["h"]))).then("top-separate-scales")
    assert run.text.count("= top.conv") == 1


def test_two_scales_of_one_value_stay() -> None:
    nodes = [*LAYER, *pair("c", "t", "z", "y"), *pair("c", "s", "z", "u")]
    proto = quantised(*pair("x", "s", "z", "a"), *nodes, node("Add", ["y", "u"], ["v"]), output="v")
    run = Run(proto).then("top-absorb-weights", "top-absorb-qdq")
    assert run.text.count("= top.quantize_linear") == 2
    assert "the value is quantised with several scales" in run.reasons(False)


def test_scales_computed_at_run_time_stay() -> None:
    nodes = [node("ReduceMax", ["x"], ["m"], keepdims=0), *pair("x", "m", "z", "y")]
    run = Run(quantised(*nodes)).then("top-absorb-weights", "top-absorb-qdq")
    assert "its scale is computed at run time" in run.reasons(False)


def test_a_pair_that_does_not_undo_stays() -> None:
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        node("DequantizeLinear", ["q", "t", "z"], ["y"]),
    ]
    run = Run(quantised(*nodes))
    before = run.result()
    run.then("top-absorb-qdq")
    assert "top.quantize_linear" in run.text
    np.testing.assert_array_equal(run.result(), before)


def test_the_option_of_wide_codes() -> None:
    proto = quantised(*pair("x", "s", "z16", "y"), z16=np.uint16(5))
    assert "uint16" in " ".join(Run(proto).then("top-absorb-qdq").reasons(False))
    dropped = Run(proto).then("top-absorb-qdq{wide=drop}")
    assert "quantize_linear" not in dropped.text
    with pytest.raises(UsageError, match="wide is `x`"):
        Run(proto).then("top-absorb-qdq{wide=x}")


def dynamic(scale: str = "s") -> ModelProto:
    return quantised(
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "sx", "zx"], name="d"),
        node("ConvInteger", ["q", "w", "zx"], ["i"]),
        node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        node("Mul", ["f", "sx" if scale == "s" else "t"], ["m"]),
        node("Mul", ["m", "s"], ["y"]),
    )


def test_dynamic_layers_are_replaced_if_asked_for() -> None:
    assert Run(dynamic()).then("top-replace-dynamic").text.count("top.conv_integer") == 1
    run = Run(dynamic())
    before = run.result()
    run.then("top-replace-dynamic{calibrated=true}")
    assert "integer" not in run.text
    assert "top.dynamic" not in run.text
    np.testing.assert_allclose(run.result(), before, atol=0.2)
    once = run.text
    assert run.then("top-replace-dynamic{calibrated=true}").text == once


def test_dynamic_layers_of_another_scale_are_not() -> None:
    run = Run(dynamic("t")).then("top-replace-dynamic{calibrated=true}")
    assert "its sums are not multiplied by the scale of its operand" in run.reasons(False)


def test_half_precision_is_widened_in_quantised_models_only() -> None:
    half = np.float16
    nodes = [*pair("x", "s", "z", "a"), node("Relu", ["a"], ["y"])]
    constants = {"s": half(0.03), "z": np.uint8(9)}
    proto = model(nodes, {"x": (4,)}, ["y"], constants, kind=TensorProto.FLOAT16)
    run = Run(proto).then("top-widen-half")
    assert "f16" not in run.text
    once = run.text
    assert run.then("top-widen-half").text == once
    plain = model([node("Relu", ["x"], ["y"])], {"x": (4,)}, ["y"], {}, kind=TensorProto.FLOAT16)
    assert "f16" in Run(plain).then("top-widen-half").text
