"""The `quant` dialect: integer arithmetic on int8 codes whose scales are in the types.

Every integer parameter (zero points, multipliers, shifts, clamps, rounding) is spelled out as an
attribute or an operand; `docs/concepts/numerics.md` defines what each op computes. Ops that only
move codes stay `top` ops.
"""

from __future__ import annotations

from typing import ClassVar

from xdsl.dialects.builtin import (
    DenseArrayBase,
    IntegerAttr,
    IntegerType,
    StringAttr,
    TensorType,
    i8,
    i16,
    i32,
)
from xdsl.ir import Dialect
from xdsl.irdl import (
    attr_def,
    irdl_op_definition,
    operand_def,
    opt_attr_def,
    result_def,
    traits_def,
)
from xdsl.traits import Pure
from xdsl.utils.exceptions import VerifyException

from tilewright.dialects._quant_base import (
    LAYOUTS,
    MAX_MULTIPLIER,
    MAX_SHIFT,
    ROUNDINGS,
    QuantOp,
    UniformType,
    check_range,
    check_weight,
    image_axes,
    int_list,
    int_of,
    layout_axes,
    lengths,
    quantised,
    shape_of,
    to_attribute,
    uniform_of,
    window_size,
)
from tilewright.dialects._quant_rows import LayerNormOp, SoftmaxOp

__all__ = [
    "LAYOUTS",
    "MAX_MULTIPLIER",
    "MAX_SHIFT",
    "ROUNDINGS",
    "WEIGHT_CODES",
    "AddOp",
    "AvgPoolOp",
    "ConvOp",
    "DequantizeOp",
    "LayerNormOp",
    "LinearOp",
    "LutOp",
    "MatmulOp",
    "MulOp",
    "Quant",
    "QuantOp",
    "QuantizeOp",
    "RequantizeOp",
    "ResizeOp",
    "SoftmaxOp",
    "SubOp",
    "UniformType",
    "broadcast_shapes",
    "check_range",
    "check_weight",
    "i4",
    "image_axes",
    "int_list",
    "int_of",
    "layout_axes",
    "lengths",
    "quantised",
    "shape_of",
    "to_attribute",
    "uniform_of",
    "weight_bits_of",
    "weight_code_limit",
    "window_size",
]

i4 = IntegerType(4)
"""Element type of weights that the chip stores two a byte."""

WEIGHT_CODES = {8: 127, 4: 7}
"""Largest code of weights of so many bits; the least is its negative."""

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
    `tensor<Oxi8>`. With `weight_bits = 4` codes of weights are -7..7, and `w` is `xi4` if the chip
    stores them two a byte. `pads` is `[top, left, bottom, right]`; padding holds the input's zero
    point, whose part of the sum is in `bias`.
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
    weight_bits = opt_attr_def(IntegerAttr)
    traits = traits_def(Pure())
    assembly_format = _FORMAT_MAC

    def verify_(self) -> None:
        """Check shapes of all operands and the result, and the requantising attributes."""
        self.check_output()
        quantised(self.x, "input")
        c, h, w = layout_axes(self, self.x)
        lists = lengths(self, strides=2, pads=4, dilations=2)
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


def weight_bits_of(op: ConvOp | LinearOp) -> int:
    """Return the bits of a layer's weight codes, 8 or 4, whatever type stores them."""
    return int_of(op.weight_bits) if op.weight_bits is not None else 4 if _packed(op) else 8


def weight_code_limit(op: ConvOp | LinearOp) -> int:
    """Return the largest code a layer's weights may have: 127, or 7 of 4 bits."""
    return WEIGHT_CODES[weight_bits_of(op)]


def _packed(op: ConvOp | LinearOp) -> bool:
    return isinstance(op.w.type, TensorType) and op.w.type.element_type == i4


def _check_mac_parameters(op: ConvOp | LinearOp, weight: tuple[int, ...]) -> None:
    channels, bits, packed = (weight[0],), weight_bits_of(op), _packed(op)
    if bits not in WEIGHT_CODES:
        raise VerifyException(f"weight_bits must be 8 or 4, not {bits}")
    if packed and bits != 4:
        raise VerifyException(f"weights of {bits} bits are no {op.w.type}")
    check_weight(op.w, "weight", i4 if packed else i8, weight)
    check_weight(op.bias, "bias", i32, channels)
    check_weight(op.mult, "multiplier", i32, channels)
    check_weight(op.shift, "shift", i8, channels)


@irdl_op_definition
class LinearOp(QuantOp):
    """Multiply codes `x[.., K]` by int8 `w[N, K]` transposed, requantising each output channel.

    Weights may have 4 bits, as those of `quant.conv`.
    """

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
    weight_bits = opt_attr_def(IntegerAttr)
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
    """Multiply two code tensors of zero point 0 (numpy batch rules), with one multiplier.

    A result of i32 is the sum itself, bias included, not requantised.
    """

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

    @property
    def wide(self) -> bool:
        """Whether the result is the int32 sum itself, bias included, not requantised."""
        kind = self.result.type
        return isinstance(kind, TensorType) and kind.element_type == i32

    def verify_(self) -> None:
        """Check the shapes, the zero points and the requantising attributes."""
        if not self.wide:
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
        c, h, w = layout_axes(self, self.x)
        lists = lengths(self, kernel=2, strides=2, pads=4)
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
        c, h, w = layout_axes(self, self.x)
        source, target = shape_of(self.x), shape_of(self.result)
        if len(target) != 4 or (target[0], target[c]) != (source[0], source[c]):
            raise VerifyException(f"result {target} must keep batch and channels of {source}")
        if self.mode.data not in ("nearest", "linear"):
            raise VerifyException(f"mode must be nearest or linear, not {self.mode.data!r}")
        if max(source[h], source[w]) > 32767:
            raise VerifyException("resize indices are int16")
        check_weight(self.table_y, "table_y", i16, (target[h], 4))
        check_weight(self.table_x, "table_x", i16, (target[w], 4))

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
        SoftmaxOp,
        LayerNormOp,
    ],
    [UniformType],
)
