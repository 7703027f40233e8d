"""The quant dialect: types read back exactly, broken ops are refused with the reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xdsl.context import Context
from xdsl.dialects.builtin import Builtin, ModuleOp
from xdsl.dialects.func import Func
from xdsl.parser import Parser
from xdsl.utils.exceptions import VerifyException

from tilewright.dialects.quant import Quant, UniformType, uniform_of


def parse(text: str) -> ModuleOp:
    context = Context()
    for dialect in (Builtin, Func, Quant):
        context.load_dialect(dialect)
    return Parser(context, text).parse_module()


@given(st.floats(2.0**-126, 2.0**126), st.integers(-128, 127))
def test_types_read_back_exactly(scale: float, zero: int) -> None:
    kind = UniformType.of(scale, zero)
    module = parse(f"func.func private @f(tensor<3x{kind}>) -> ()")
    assert str(parse(str(module))) == str(module)
    function = next(iter(module.body.ops))
    found = uniform_of(function.function_type.inputs.data[0])  # type: ignore[attr-defined]
    assert found is not None
    assert found.step == scale
    assert found.zero == zero


def test_upstream_notation_without_zero_point_is_understood() -> None:
    module = parse("func.func private @f(tensor<3x!quant.uniform<i8:f32, 0.5>>) -> ()")
    assert "!quant.uniform<i8:f32, 0.5:0>" in str(module)


@pytest.mark.parametrize("kind", ["i8:f32, 0.0:0", "i8:f32, 0.5:128", "i4:f32, 0.5:0"])
def test_impossible_types_are_refused(kind: str) -> None:
    with pytest.raises(VerifyException, match=r"quant\.uniform"):
        parse(f"func.func private @f(tensor<3x!quant.uniform<{kind}>>) -> ()")


Q = "!quant.uniform<i8:f32, 0.5:0>"
Q3 = "!quant.uniform<i8:f32, 0.5:3>"
END = "zp = 0 : i64, lo = -127 : i64, hi = 127 : i64"
WIDE = "shift = 3 : i64, bias = 0 : i64, bias_shift = 0 : i64"
SPATIAL = (
    'strides = array<i64: 1, 1>, pads = array<i64: 0, 0, 0, 0>, layout = "nhwc", '
    f'{END}, rounding = "half_up"'
)
CONV = f"dilations = array<i64: 1, 1>, group = 1 : i64, {SPATIAL}"
CONV_TYPES = "tensor<5x2x3x3xi8>, tensor<5xi32>, tensor<5xi32>, tensor<5xi8>"

BROKEN = {
    "multiplier of 2^31": (
        f"mult = 2147483648 : i64, {WIDE}, {END}",
        "mult must be 0..2147483647",
    ),
    "negative multiplier": (f"mult = -1 : i64, {WIDE}, {END}", "mult must be 0"),
    "shift of 63": (f"mult = 1 : i64, {WIDE}, {END}".replace("= 3", "= 63"), "shift must be 0..62"),
    "empty clamp": (f"mult = 1 : i64, {WIDE}, {END}".replace("= -127", "= 128"), "lo must be"),
    "crossed clamp": (
        f"mult = 1 : i64, {WIDE}, zp = 0 : i64, lo = 5 : i64, hi = 4 : i64",
        r"lo \(5\) is above hi \(4\)",
    ),
    "other zero point": (
        f"mult = 1 : i64, {WIDE}, {END}".replace("zp = 0", "zp = 4"),
        "zp is 4; the result type has zero point 0",
    ),
    "compensated zero point without truncation": (
        f"mult = 1 : i64, {WIDE}, {END}".replace("zp = 0", "zp = -128"),
        "zp is -128",
    ),
    "sum beyond 64 bits": (
        f"mult = 1 : i64, {WIDE}, {END}".replace("bias = 0", "bias = 4").replace(
            "bias_shift = 0", "bias_shift = 62"
        ),
        "exceed 64 bits",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_requantize_limits(case: str) -> None:
    attributes, message = BROKEN[case]
    text = (
        f"func.func @main(%a: tensor<4x{Q}>) {{\n"
        f'  %0 = quant.requantize %a {{{attributes}, rounding = "half_up"}}'
        f" : (tensor<4x{Q}>) -> tensor<4x{Q}>\n  func.return\n}}"
    )
    with pytest.raises(VerifyException, match=message):
        parse(text).verify()


OPS = {
    "conv result": (
        f"quant.conv %a, %w, %b, %b, %s {{{CONV}}} : (tensor<1x6x6x2x{Q}>, {CONV_TYPES})"
        f" -> tensor<1x5x4x5x{Q}>",
        "does not fit 1 images of 5 x",
    ),
    "conv channels": (
        f"quant.conv %a, %w, %b, %b, %s {{{CONV.replace('group = 1', 'group = 2')}}} : "
        f"(tensor<1x6x6x2x{Q}>, {CONV_TYPES}) -> tensor<1x4x4x5x{Q}>",
        "do not fit group 2",
    ),
    "rounding": (
        f"quant.conv %a, %w, %b, %b, %s {{{CONV.replace('half_up', 'up')}}} : "
        f"(tensor<1x6x6x2x{Q}>, {CONV_TYPES}) -> tensor<1x4x4x5x{Q}>",
        "rounding must be one of",
    ),
    "bias type": (
        f"quant.conv %a, %w, %s, %b, %s {{{CONV}}} : (tensor<1x6x6x2x{Q}>, tensor<5x2x3x3xi8>, "
        f"tensor<5xi8>, tensor<5xi32>, tensor<5xi8>) -> tensor<1x4x4x5x{Q}>",
        "bias must be tensor<5xi32>",
    ),
    "pool result": (
        f"quant.avg_pool %a {{kernel = array<i64: 2, 2>, bias = 0 : i64, mult = 1 : i64, "
        f"shift = 2 : i64, {SPATIAL}}} : (tensor<1x6x6x2x{Q}>) -> tensor<1x3x3x2x{Q}>",
        "does not fit windows",
    ),
    "float operand": (
        f'quant.lut %f {{table = "t", function = "relu"}} : (tensor<4xf32>) -> tensor<4x{Q}>',
        "input must be a tensor of !quant.uniform",
    ),
    "matmul zero point": (
        f"quant.matmul %z, %z {{bias = 0 : i64, mult = 1 : i64, shift = 2 : i64, {END}, "
        f'rounding = "half_up"}} : (tensor<2x2x{Q3}>, tensor<2x2x{Q3}>) -> tensor<2x2x{Q}>',
        "must have zero point 0",
    ),
}


@pytest.mark.parametrize("case", OPS)
def test_broken_ops_are_refused(case: str) -> None:
    body, message = OPS[case]
    text = (
        f"func.func @main(%a: tensor<1x6x6x2x{Q}>, %w: tensor<5x2x3x3xi8>, %b: tensor<5xi32>, "
        f"%s: tensor<5xi8>, %f: tensor<4xf32>, %z: tensor<2x2x{Q3}>) {{\n"
        f"  %0 = {body}\n  func.return\n}}"
    )
    with pytest.raises(VerifyException, match=message):
        parse(text).verify()
