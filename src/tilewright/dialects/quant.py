"""The `quant` dialect: integer arithmetic on int8 codes whose scales are in the types.

Every integer parameter (zero points, multipliers, shifts, clamps, rounding) is spelled out as an
attribute or an operand; `docs/concepts/numerics.md` defines what each op computes. Ops that only
move codes stay `top` ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

from xdsl.dialects.builtin import (
    ArrayAttr,
    DenseArrayBase,
    FloatAttr,
    IntAttr,
    IntegerAttr,
    IntegerType,
    StringAttr,
    TensorType,
    f32,
    f64,
    i8,
    i16,
    i32,
    i64,
)
from xdsl.ir import Attribute, Dialect, ParametrizedAttribute, SSAValue, TypeAttribute
from xdsl.irdl import (
    IRDLOperation,
    attr_def,
    irdl_attr_definition,
    irdl_op_definition,
    operand_def,
    opt_attr_def,
    result_def,
    traits_def,
)
from xdsl.parser import AttrParser
from xdsl.printer import Printer
from xdsl.traits import Pure
from xdsl.utils.exceptions import VerifyException

ROUNDINGS = ("half_up", "half_away", "half_even", "truncate")
LAYOUTS = ("nchw", "nhwc")

MAX_MULTIPLIER = 2**31 - 1
MAX_SHIFT = 62


def _float_literal(value: float) -> str:
    """Return `repr(value)` as an MLIR literal (a dot is needed before an exponent)."""
    text = repr(value)
    if "e" in text and "." not in text:
        mantissa, exponent = text.split("e")
        return f"{mantissa}.0e{exponent}"
    return text


@irdl_attr_definition
class UniformType(ParametrizedAttribute, TypeAttribute):
    """An int8 code `q` that stands for the real value `scale * (q - zero_point)`.

    ```mlir
    tensor<1x56x56x64x!quant.uniform<i8:f32, 0.025:0>>
    ```

    `scale` is a float64 and printed so that it reads back exactly; quantising and dequantising use
    it rounded to float32.
    """

    name = "quant.uniform"

    storage: IntegerType
    expressed: Attribute
    scale: FloatAttr
    zero_point: IntAttr

    @staticmethod
    def of(scale: float, zero_point: int = 0) -> UniformType:
        """Return the int8 type of float32 values with this scale and zero point."""
        return UniformType(i8, f32, FloatAttr(float(scale), f64), IntAttr(int(zero_point)))

    @property
    def step(self) -> float:
        """The scale as a Python float (real value of one code step)."""
        return float(self.scale.value.data)

    @property
    def zero(self) -> int:
        """The zero point, -128..127."""
        return int(self.zero_point.data)

    def verify(self) -> None:
        """Check that storage is i8, the scale normal and positive, the zero point a code."""
        if self.storage != i8:
            raise VerifyException(f"quant.uniform storage must be i8, not {self.storage}")
        if self.expressed != f32:
            raise VerifyException(f"quant.uniform expressed type must be f32, not {self.expressed}")
        if not 2.0**-126 <= self.step < 2.0**127:
            raise VerifyException(
                f"quant.uniform scale must be a positive normal float32, not {self.step!r}"
            )
        if not -128 <= self.zero <= 127:
            raise VerifyException(f"quant.uniform zero point must be -128..127, not {self.zero}")

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> list[Attribute]:
        """Parse `<i8:f32, scale:zero_point>`; a missing zero point is 0, as upstream has it."""
        with parser.in_angle_brackets():
            storage = parser.parse_type()
            parser.parse_punctuation(":")
            expressed = parser.parse_type()
            parser.parse_punctuation(",")
            scale = float(parser.parse_number())
            zero_point = 0
            if parser.parse_optional_punctuation(":") is not None:
                zero_point = parser.parse_integer(allow_boolean=False)
        return [storage, expressed, FloatAttr(scale, f64), IntAttr(zero_point)]

    def print_parameters(self, printer: Printer) -> None:
        """Print `<i8:f32, scale:zero_point>`."""
        with printer.in_angle_brackets():
            printer.print_attribute(self.storage)
            printer.print_string(":")
            printer.print_attribute(self.expressed)
            printer.print_string(f", {_float_literal(self.step)}:{self.zero}")


def uniform_of(value: SSAValue | Attribute) -> UniformType | None:
    """Return the quantised element type of a value or tensor type, or None if it has none."""
    kind = value.type if isinstance(value, SSAValue) else value
    if isinstance(kind, TensorType) and isinstance(kind.element_type, UniformType):
        return kind.element_type
    return None


def quantised(value: SSAValue | Attribute, what: str = "value") -> UniformType:
    """Return the quantised element type of a value or tensor type.

    Raises:
        VerifyException: it is not a tensor of `!quant.uniform`.
    """
    kind = uniform_of(value)
    if kind is None:
        got = value.type if isinstance(value, SSAValue) else value
        raise VerifyException(f"{what} must be a tensor of !quant.uniform, not {got}")
    return kind


def shape_of(value: SSAValue | Attribute) -> tuple[int, ...]:
    """Return the static shape of a tensor value or type.

    Raises:
        VerifyException: it is not a tensor, or has a dynamic size.
    """
    kind = value.type if isinstance(value, SSAValue) else value
    if not isinstance(kind, TensorType):
        raise VerifyException(f"expected a tensor, not {kind}")
    shape = tuple(int(size) for size in kind.get_shape())
    if any(size < 0 for size in shape):
        raise VerifyException(f"tensor shapes must be static, not {kind}")
    return shape


def int_list(attr: Attribute) -> list[int]:
    """Return the integers of an `array<i64: ...>` or `[...]` attribute."""
    if isinstance(attr, DenseArrayBase):
        return [int(value) for value in attr.get_values()]
    if isinstance(attr, ArrayAttr):
        return [int(item.value.data) for item in attr.data if isinstance(item, IntegerAttr)]
    raise VerifyException(f"expected a list of integers, not {attr}")


def int_of(attr: Attribute) -> int:
    """Return the value of an integer attribute."""
    if not isinstance(attr, IntegerAttr):
        raise VerifyException(f"expected an integer attribute, not {attr}")
    return int(attr.value.data)


def to_attribute(value: Any) -> Attribute:
    """Turn a Python int (i64), string, or list of ints (`array<i64>`) into an attribute."""
    if isinstance(value, Attribute):
        return value
    if isinstance(value, str):
        return StringAttr(value)
    if isinstance(value, int):
        return IntegerAttr(value, i64)
    if isinstance(value, (list, tuple)):
        return DenseArrayBase.from_list(i64, [int(item) for item in value])
    raise TypeError(f"no attribute for {value!r}")


def _check_range(name: str, attr: Attribute, low: int, high: int) -> int:
    value = int_of(attr)
    if not low <= value <= high:
        raise VerifyException(f"{name} must be {low}..{high}, not {value}")
    return value


def _check_weight(value: SSAValue, what: str, element: IntegerType, shape: tuple[int, ...]) -> None:
    kind = value.type
    if not isinstance(kind, TensorType) or kind.element_type != element or shape_of(kind) != shape:
        wanted = "x".join(map(str, (*shape, element)))
        raise VerifyException(f"{what} must be tensor<{wanted}>, not {kind}")


_Q = TypeVar("_Q", bound="QuantOp")


class QuantOp(IRDLOperation):
    """What all ops of the dialect share: making them, and checking requantising attributes."""

    SCALARS: ClassVar[tuple[str, ...]] = ()
    """Names of the op's `mult*`/`shift`/`bias`/`bias_shift` attributes, all range-checked."""

    @classmethod
    def make(
        cls: type[_Q], operands: Sequence[SSAValue], result: Attribute, /, **attributes: Any
    ) -> _Q:
        """Build the op from Python ints, strings, int lists or attributes (None is left out)."""
        return cls.build(
            operands=list(operands),
            result_types=[result],
            attributes={
                key: to_attribute(value) for key, value in attributes.items() if value is not None
            },
        )

    def check_output(self) -> None:
        """Check `zp`, `lo`, `hi`, `rounding` against the result type, and the scalars' ranges."""
        kind = quantised(self.results[0], "result")
        zp = _check_range("zp", self.attributes["zp"], -256, 127)
        low = _check_range("lo", self.attributes["lo"], -128, 127)
        high = _check_range("hi", self.attributes["hi"], -128, 127)
        if low > high:
            raise VerifyException(f"lo ({low}) is above hi ({high})")
        rounding = self.attributes["rounding"]
        if not isinstance(rounding, StringAttr) or rounding.data not in ROUNDINGS:
            raise VerifyException(f"rounding must be one of {', '.join(ROUNDINGS)}, not {rounding}")
        legal = {kind.zero}
        if rounding.data == "truncate":
            legal.add(kind.zero - 128)
        if zp not in legal:
            raise VerifyException(
                f"zp is {zp}; the result type has zero point {kind.zero}"
                + (" (or that minus 128)" if rounding.data == "truncate" else "")
            )
        for name in self.SCALARS:
            if name.startswith("mult"):
                _check_range(name, self.attributes[name], 0, MAX_MULTIPLIER)
            elif name == "bias":
                _check_range(name, self.attributes[name], -(2**31), 2**31 - 1)
            else:
                _check_range(name, self.attributes[name], 0, MAX_SHIFT)
        if "bias_shift" in self.SCALARS:
            self._check_wide_bias()

    def _check_wide_bias(self) -> None:
        # Largest |factor| times |multiplier| plus the bias must stay inside int64.
        offset = abs(int_of(self.attributes["bias"])) << int_of(self.attributes["bias_shift"])
        factor = self.largest_factor()
        product = sum(
            factor * int_of(self.attributes[name])
            for name in self.SCALARS
            if name.startswith("mult")
        )
        if product + offset >= 2**63:
            raise VerifyException("the sum before the shift could exceed 64 bits")

    def largest_factor(self) -> int:
        """Largest magnitude that a `mult` attribute multiplies."""
        return 255


def window_size(size: int, pads: int, kernel: int, stride: int, dilation: int) -> int:
    """Return how many windows fit along one axis (floor)."""
    return (size + pads - ((kernel - 1) * dilation + 1)) // stride + 1


def image_axes(layout: str) -> tuple[int, int, int]:
    """Return the positions of channel, height and width in a rank-4 tensor."""
    return (3, 1, 2) if layout == "nhwc" else (1, 2, 3)


def _layout(op: QuantOp, rank: SSAValue) -> tuple[int, int, int]:
    attr = op.attributes.get("layout", StringAttr("nchw"))
    if not isinstance(attr, StringAttr) or attr.data not in LAYOUTS:
        raise VerifyException(f"layout must be one of {', '.join(LAYOUTS)}, not {attr}")
    if len(shape_of(rank)) != 4:
        raise VerifyException(f"expected a rank-4 tensor, not {rank.type}")
    return image_axes(attr.data)


def _lengths(op: QuantOp, **counts: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for name, count in counts.items():
        found[name] = int_list(op.attributes[name])
        if len(found[name]) != count:
            raise VerifyException(f"{name} must have {count} entries, not {len(found[name])}")
        low = 0 if name == "pads" else 1
        if any(value < low for value in found[name]):
            raise VerifyException(f"{name} must be at least {low}: {found[name]}")
    return found


_FORMAT_1 = "$x attr-dict `:` functional-type(operands, results)"
_FORMAT_A = "$a attr-dict `:` functional-type(operands, results)"
_FORMAT_2 = "$a `,` $b attr-dict `:` functional-type(operands, results)"
_FORMAT_MAC = (
    "$x `,` $w `,` $bias `,` $mult `,` $shift attr-dict `:` functional-type(operands, results)"
)


@irdl_op_definition
class QuantizeOp(QuantOp):
    """Round floats to codes (half to even), saturating at the ends; runs on the host."""

    name = "quant.quantize"
    x = operand_def(TensorType)
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = _FORMAT_1

    def verify_(self) -> None:
        """Check f32 (or f16) in, codes out, same shape."""
        quantised(self.result, "result")
        if shape_of(self.x) != shape_of(self.result):
            raise VerifyException("quantize must not change the shape")
        if uniform_of(self.x) is not None:
            raise VerifyException("quantize takes a float tensor")


@irdl_op_definition
class DequantizeOp(QuantOp):
    """Turn codes into floats, `scale * (q - zero_point)`; runs on the host.

    An int32 sum becomes the float32 nearest to it: its scales, one a channel, are a factor of
    their own.
    """

    name = "quant.dequantize"
    x = operand_def(TensorType)
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = _FORMAT_1

    def verify_(self) -> None:
        """Check codes (or int32 sums) in, floats out, same shape."""
        kind = self.x.type
        if not (isinstance(kind, TensorType) and kind.element_type == i32):
            quantised(self.x, "operand")
        if shape_of(self.x) != shape_of(self.result):
            raise VerifyException("dequantize must not change the shape")
        if uniform_of(self.result) is not None:
            raise VerifyException("dequantize gives a float tensor")


@irdl_op_definition
class ConvOp(QuantOp):
    """Convolve int8 codes with int8 weights (OIHW), requantising each output channel.

    `w` is `tensor<OxIxHxWxi8>` (I is per group), `bias` and `mult` `tensor<Oxi32>`, `shift`
    `tensor<Oxi8>`. `pads` is `[top, left, bottom, right]`; padding holds the input's zero point,
    whose part of the sum is in `bias`.
    """

    name = "quant.conv"
    x = operand_def(TensorType)
    w = operand_def(TensorType)
    bias = operand_def(TensorType)
    mult = operand_def(TensorType)
    shift = operand_def(TensorType)
    result = result_def(TensorType)
    strides = attr_def(DenseArrayBase)
    pads = attr_def(DenseArrayBase)
    dilations = attr_def(DenseArrayBase)
    group = attr_def(IntegerAttr)
    layout = attr_def(StringAttr)
    zp = attr_def(IntegerAttr)
    lo = attr_def(IntegerAttr)
    hi = attr_def(IntegerAttr)
    rounding = attr_def(StringAttr)
    weight_scale = opt_attr_def(StringAttr)
    traits = traits_def(Pure())
    assembly_format = _FORMAT_MAC

    def verify_(self) -> None:
        """Check shapes of all operands and the result, and the requantising attributes."""
        self.check_output()
        quantised(self.x, "input")
        c, h, w = _layout(self, self.x)
        lists = _lengths(self, strides=2, pads=4, dilations=2)
        source, target, weight = shape_of(self.x), shape_of(self.result), shape_of(self.w)
        if len(target) != 4 or len(weight) != 4:
            raise VerifyException("conv takes a rank-4 input, weight and result")
        group = int_of(self.group)
        if group < 1 or source[c] != weight[1] * group or weight[0] % group:
            raise VerifyException(
                f"{source[c]} input channels and weight {weight} do not fit group {group}"
            )
        pads, kernel = lists["pads"], weight[2:]
        sizes = [
            window_size(source[axis], pads[k] + pads[k + 2], kernel[k], stride, dilation)
            for k, (axis, stride, dilation) in enumerate(
                zip((h, w), lists["strides"], lists["dilations"], strict=True)
            )
        ]
        if (target[0], target[c], target[h], target[w]) != (source[0], weight[0], *sizes):
            raise VerifyException(
                f"result {target} does not fit {source[0]} images of {weight[0]} x {sizes}"
            )
        _check_mac_parameters(self, weight)


def _check_mac_parameters(op: ConvOp | LinearOp, weight: tuple[int, ...]) -> None:
    channels = (weight[0],)
    _check_weight(op.w, "weight", i8, weight)
    _check_weight(op.bias, "bias", i32, channels)
    _check_weight(op.mult, "multiplier", i32, channels)
    _check_weight(op.shift, "shift", i8, channels)


@irdl_op_definition
class LinearOp(QuantOp):
    """Multiply codes `x[.., K]` by int8 `w[N, K]` transposed, requantising each output channel."""

    name = "quant.linear"
    x = operand_def(TensorType)
    w = operand_def(TensorType)
    bias = operand_def(TensorType)
    mult = operand_def(TensorType)
    shift = operand_def(TensorType)
    result = result_def(TensorType)
    zp = attr_def(IntegerAttr)
    lo = attr_def(IntegerAttr)
    hi = attr_def(IntegerAttr)
    rounding = attr_def(StringAttr)
    weight_scale = opt_attr_def(StringAttr)
    traits = traits_def(Pure())
    assembly_format = _FORMAT_MAC

    @property
    def wide(self) -> bool:
        """Whether the result is the int32 sum itself, bias included, not requantised."""
        kind = self.result.type
        return isinstance(kind, TensorType) and kind.element_type == i32

    def verify_(self) -> None:
        """Check shapes of all operands and the result, and the requantising attributes."""
        if not self.wide:
            self.check_output()
        quantised(self.x, "input")
        source, target, weight = shape_of(self.x), shape_of(self.result), shape_of(self.w)
        if len(weight) != 2 or not source or source[-1] != weight[1]:
            raise VerifyException(f"input {source} and weight {weight} do not fit")
        if target != (*source[:-1], weight[0]):
            raise VerifyException(f"result {target} must be {(*source[:-1], weight[0])}")
        _check_mac_parameters(self, weight)


@irdl_op_definition
class MatmulOp(QuantOp):
    """Multiply two code tensors of zero point 0 (numpy batch rules), with one multiplier."""

    name = "quant.matmul"
    a = operand_def(TensorType)
    b = operand_def(TensorType)
    result = result_def(TensorType)
    bias = attr_def(IntegerAttr)
    mult = attr_def(IntegerAttr)
    shift = attr_def(IntegerAttr)
    zp = attr_def(IntegerAttr)
    lo = attr_def(IntegerAttr)
    hi = attr_def(IntegerAttr)
    rounding = attr_def(StringAttr)
    traits = traits_def(Pure())
    assembly_format = _FORMAT_2
    SCALARS: ClassVar[tuple[str, ...]] = ("bias", "mult", "shift")

    def verify_(self) -> None:
        """Check the shapes, the zero points and the requantising attributes."""
        self.check_output()
        left, right = quantised(self.a, "a"), quantised(self.b, "b")
        if left.zero or right.zero:
            raise VerifyException("quant.matmul operands must have zero point 0")
        a, b = shape_of(self.a), shape_of(self.b)
        if len(a) < 2 or len(b) < 2 or a[-1] != b[-2]:
            raise VerifyException(f"operands {a} and {b} do not fit")
        batch = broadcast_shapes(a[:-2], b[:-2])
        if shape_of(self.result) != (*batch, a[-2], b[-1]):
            raise VerifyException(
                f"result {shape_of(self.result)} must be {(*batch, a[-2], b[-1])}"
            )


def broadcast_shapes(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Return the numpy broadcast of two shapes.

    Raises:
        VerifyException: they do not broadcast.
    """
    rank = max(len(a), len(b))
    left, right = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    if any(x != y and 1 not in (x, y) for x, y in zip(left, right, strict=True)):
        raise VerifyException(f"shapes {a} and {b} do not broadcast")
    return tuple(y if x == 1 else x for x, y in zip(left, right, strict=True))


@irdl_op_definition
class AvgPoolOp(QuantOp):
    """Sum the codes of each window and requantise; all windows count the same number of codes."""

    name = "quant.avg_pool"
    x = operand_def(TensorType)
    result = result_def(TensorType)
    kernel = attr_def(DenseArrayBase)
    strides = attr_def(DenseArrayBase)
    pads = attr_def(DenseArrayBase)
    layout = attr_def(StringAttr)
    bias = attr_def(IntegerAttr)
    mult = attr_def(IntegerAttr)
    shift = attr_def(IntegerAttr)
    zp = attr_def(IntegerAttr)
    lo = attr_def(IntegerAttr)
    hi = attr_def(IntegerAttr)
    rounding = attr_def(StringAttr)
    traits = traits_def(Pure())
    assembly_format = _FORMAT_1
    SCALARS: ClassVar[tuple[str, ...]] = ("bias", "mult", "shift")

    def verify_(self) -> None:
        """Check that the result has one element a window, and the requantising attributes."""
        self.check_output()
        quantised(self.x, "input")
        c, h, w = _layout(self, self.x)
        lists = _lengths(self, kernel=2, strides=2, pads=4)
        source, target = shape_of(self.x), shape_of(self.result)
        pads = lists["pads"]
        sizes = [
            window_size(source[axis], pads[k] + pads[k + 2], kernel, stride, 1)
            for k, (axis, kernel, stride) in enumerate(
                zip((h, w), lists["kernel"], lists["strides"], strict=True)
            )
        ]
        if len(target) != 4 or (target[0], target[c], target[h], target[w]) != (
            source[0],
            source[c],
            *sizes,
        ):
            raise VerifyException(f"result {target} does not fit windows {sizes}")


class _BinaryOp(QuantOp):
    def check_binary(self) -> None:
        """Check that both operands are codes and broadcast to the result."""
        self.check_output()
        for operand in self.operands:
            quantised(operand, "operand")
        shape = broadcast_shapes(shape_of(self.operands[0]), shape_of(self.operands[1]))
        if shape_of(self.results[0]) != shape:
            raise VerifyException(f"result {shape_of(self.results[0])} must be {shape}")


@irdl_op_definition
class AddOp(_BinaryOp):
    """Add codes of two scales in a common fixed point and round once."""

    name = "quant.add"
    a = operand_def(TensorType)
    b = operand_def(TensorType)
    result = result_def(TensorType)
    mult_a = attr_def(IntegerAttr)
    mult_b = attr_def(IntegerAttr)
    shift = attr_def(IntegerAttr)
    bias = attr_def(IntegerAttr)
    bias_shift = attr_def(IntegerAttr)
    zp = attr_def(IntegerAttr)
    lo = attr_def(IntegerAttr)
    hi = attr_def(IntegerAttr)
    rounding = attr_def(StringAttr)
    traits = traits_def(Pure())
    assembly_format = _FORMAT_2
    SCALARS: ClassVar[tuple[str, ...]] = ("mult_a", "mult_b", "shift", "bias", "bias_shift")

    def verify_(self) -> None:
        """Check shapes, types and ranges."""
        self.check_binary()


@irdl_op_definition
class SubOp(_BinaryOp):
    """Subtract codes of two scales and round once; `mult_b` is stored non-negative."""

    name = "quant.sub"
    a = operand_def(TensorType)
    b = operand_def(TensorType)
    result = result_def(TensorType)
    mult_a = attr_def(IntegerAttr)
    mult_b = attr_def(IntegerAttr)
    shift = attr_def(IntegerAttr)
    bias = attr_def(IntegerAttr)
    bias_shift = attr_def(IntegerAttr)
    zp = attr_def(IntegerAttr)
    lo = attr_def(IntegerAttr)
    hi = attr_def(IntegerAttr)
    rounding = attr_def(StringAttr)
    traits = traits_def(Pure())
    assembly_format = _FORMAT_2
    SCALARS: ClassVar[tuple[str, ...]] = ("mult_a", "mult_b", "shift", "bias", "bias_shift")

    def verify_(self) -> None:
        """Check shapes, types and ranges."""
        self.check_binary()


@irdl_op_definition
class MulOp(_BinaryOp):
    """Multiply codes of two scales and round once."""

    name = "quant.mul"
    a = operand_def(TensorType)
    b = operand_def(TensorType)
    result = result_def(TensorType)
    mult = attr_def(IntegerAttr)
    shift = attr_def(IntegerAttr)
    bias = attr_def(IntegerAttr)
    bias_shift = attr_def(IntegerAttr)
    zp = attr_def(IntegerAttr)
    lo = attr_def(IntegerAttr)
    hi = attr_def(IntegerAttr)
    rounding = attr_def(StringAttr)
    traits = traits_def(Pure())
    assembly_format = _FORMAT_2
    SCALARS: ClassVar[tuple[str, ...]] = ("mult", "shift", "bias", "bias_shift")

    def verify_(self) -> None:
        """Check shapes, types and ranges."""
        self.check_binary()

    def largest_factor(self) -> int:
        """Product of two code differences."""
        return 255 * 255


@irdl_op_definition
class RequantizeOp(QuantOp):
    """Change the scale and zero point of codes."""

    name = "quant.requantize"
    a = operand_def(TensorType)
    result = result_def(TensorType)
    mult = attr_def(IntegerAttr)
    shift = attr_def(IntegerAttr)
    bias = attr_def(IntegerAttr)
    bias_shift = attr_def(IntegerAttr)
    zp = attr_def(IntegerAttr)
    lo = attr_def(IntegerAttr)
    hi = attr_def(IntegerAttr)
    rounding = attr_def(StringAttr)
    traits = traits_def(Pure())
    assembly_format = _FORMAT_A
    SCALARS: ClassVar[tuple[str, ...]] = ("mult", "shift", "bias", "bias_shift")

    def verify_(self) -> None:
        """Check shapes, types and ranges."""
        self.check_output()
        quantised(self.a, "input")
        if shape_of(self.a) != shape_of(self.result):
            raise VerifyException("requantize must not change the shape")


@irdl_op_definition
class LutOp(QuantOp):
    """Replace code `a` by `table[a + 128]`; `table` names 256 int8 values of the weight store."""

    name = "quant.lut"
    a = operand_def(TensorType)
    result = result_def(TensorType)
    table = attr_def(StringAttr)
    function = attr_def(StringAttr)
    traits = traits_def(Pure())
    assembly_format = _FORMAT_A

    def verify_(self) -> None:
        """Check codes in and out, same shape."""
        quantised(self.a, "input")
        quantised(self.result, "result")
        if shape_of(self.a) != shape_of(self.result):
            raise VerifyException("lut must not change the shape")
        if not self.table.data:
            raise VerifyException("lut needs the name of its table")


@irdl_op_definition
class ResizeOp(QuantOp):
    """Interpolate codes from two rows and two columns with 11-bit weights, then round once.

    `table_y` is `tensor<OHx4xi16>` (first row, second row, their weights), `table_x`
    `tensor<OWx4xi16>` likewise for columns; each pair of weights sums to 2048.
    """

    name = "quant.resize"
    x = operand_def(TensorType)
    table_y = operand_def(TensorType)
    table_x = operand_def(TensorType)
    result = result_def(TensorType)
    layout = attr_def(StringAttr)
    mode = attr_def(StringAttr)
    mult = attr_def(IntegerAttr)
    shift = attr_def(IntegerAttr)
    bias = attr_def(IntegerAttr)
    bias_shift = attr_def(IntegerAttr)
    zp = attr_def(IntegerAttr)
    lo = attr_def(IntegerAttr)
    hi = attr_def(IntegerAttr)
    rounding = attr_def(StringAttr)
    traits = traits_def(Pure())
    assembly_format = (
        "$x `,` $table_y `,` $table_x attr-dict `:` functional-type(operands, results)"
    )
    SCALARS: ClassVar[tuple[str, ...]] = ("mult", "shift", "bias", "bias_shift")

    def verify_(self) -> None:
        """Check shapes, types and ranges."""
        self.check_output()
        quantised(self.x, "input")
        c, h, w = _layout(self, self.x)
        source, target = shape_of(self.x), shape_of(self.result)
        if len(target) != 4 or (target[0], target[c]) != (source[0], source[c]):
            raise VerifyException(f"result {target} must keep batch and channels of {source}")
        if self.mode.data not in ("nearest", "linear"):
            raise VerifyException(f"mode must be nearest or linear, not {self.mode.data!r}")
        if max(source[h], source[w]) > 32767:
            raise VerifyException("resize indices are int16")
        _check_weight(self.table_y, "table_y", i16, (target[h], 4))
        _check_weight(self.table_x, "table_x", i16, (target[w], 4))

    def largest_factor(self) -> int:
        """A code difference times 2048 times 2048."""
        return 255 << 22


Quant = Dialect(
    "quant",
    [
        QuantizeOp,
        DequantizeOp,
        ConvOp,
        LinearOp,
        MatmulOp,
        AvgPoolOp,
        AddOp,
        SubOp,
        MulOp,
        RequantizeOp,
        LutOp,
        ResizeOp,
    ],
    [UniformType],
)
