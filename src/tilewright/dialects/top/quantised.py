"""What stays as ONNX defines it of quantised models: conversions and products on the host.

What a chip computes in integers is *not* written with these: `top-absorb-qdq` makes float
operations with given scales of them (`quant_scale`, `quant_zero`; see
`docs/concepts/quantisation.md`). Those that are left have exactly ONNX's meaning.
"""

from __future__ import annotations

from typing_extensions import override
from xdsl.dialects.builtin import (
    AnyFloat,
    DenseArrayBase,
    IntegerAttr,
    IntegerType,
    NoneType,
    Signedness,
    TensorType,
    f32,
    i32,
)
from xdsl.ir import Attribute
from xdsl.irdl import attr_def, irdl_op_definition, operand_def, opt_attr_def, result_def
from xdsl.utils.exceptions import VerifyException

from tilewright.dialects.top.base import Attrs, TopOp, Types, tensor, with_shape

UI8 = IntegerType(8, Signedness.UNSIGNED)


def _declared(declared: Types) -> TensorType[Attribute]:
    if not declared:
        raise VerifyException("the result type must be given")
    return tensor(declared, 0, "result")


def check_scales(types: Types, attrs: Attrs) -> None:
    """Check that scale and zero point fit the tensor they are for.

    The scale has rank 0 (one for the tensor), rank 1 (one for each index of `axis`), or the
    tensor's rank with `block_size` neighbours along `axis` sharing each.

    Raises:
        VerifyException: they do not.
    """
    shape, scale = tensor(types, 0).get_shape(), tensor(types, 1).get_shape()
    zero = types[2]
    if not isinstance(zero, NoneType) and tensor(types, 2).get_shape() != scale:
        raise VerifyException(
            f"the zero point has shape {list(tensor(types, 2).get_shape())}, "
            f"the scale {list(scale)}"
        )
    if not scale:
        return
    axis, block = attrs.axis(len(shape)), attrs.integer("block_size", 0)
    wanted = (shape[axis],)
    if block:
        if block < 0:
            raise VerifyException(f"`block_size` is {block}, must be at least 1")
        count = -(-shape[axis] // block)
        wanted = (*shape[:axis], count, *shape[axis + 1 :])
    if scale != wanted:
        blocks = f" in blocks of {block}" if block else ""
        raise VerifyException(
            f"the scale has shape {list(scale)}; along axis {axis} of {list(shape)}{blocks} it "
            f"must have {list(wanted)}"
        )


@irdl_op_definition
class QuantizeLinearOp(TopOp):
    """`saturate(round_half_even(x / scale) + zero)`, the division in float, as ONNX defines it."""

    name = "top.quantize_linear"
    x = operand_def()
    scale = operand_def()
    zero = operand_def()
    result = result_def()
    axis = opt_attr_def(IntegerAttr)
    block_size = opt_attr_def(IntegerAttr)

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        check_scales(types, attrs)
        x, result = tensor(types, 0), _declared(declared)
        if not isinstance(x.get_element_type(), AnyFloat):
            raise VerifyException(f"it quantises floats, not {x.get_element_type()}")
        if not isinstance(result.get_element_type(), IntegerType):
            raise VerifyException(f"it gives integers, not {result.get_element_type()}")
        return [with_shape(result, x.get_shape())]


@irdl_op_definition
class DequantizeLinearOp(TopOp):
    """`(x - zero) * scale`; the result has the scale's element type."""

    name = "top.dequantize_linear"
    x = operand_def()
    scale = operand_def()
    zero = operand_def()
    result = result_def()
    axis = opt_attr_def(IntegerAttr)
    block_size = opt_attr_def(IntegerAttr)

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        check_scales(types, attrs)
        x = tensor(types, 0)
        if not isinstance(x.get_element_type(), IntegerType):
            raise VerifyException(f"it dequantises integers, not {x.get_element_type()}")
        return [with_shape(tensor(types, 1), x.get_shape())]


@irdl_op_definition
class DynamicQuantizeLinearOp(TopOp):
    """uint8 codes of a float tensor, their scale and zero point, found from its own range."""

    name = "top.dynamic_quantize_linear"
    x = operand_def()
    codes = result_def()
    scale = result_def()
    zero = result_def()

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        return [
            TensorType(UI8, tensor(types, 0).get_shape()),
            TensorType(f32, []),
            TensorType(UI8, []),
        ]


@irdl_op_definition
class MatmulIntegerOp(TopOp):
    """`(a - a_zero) @ (b - b_zero)` in int32; zero points may be absent."""

    name = "top.matmul_integer"
    a = operand_def()
    b = operand_def()
    a_zero = operand_def()
    b_zero = operand_def()
    result = result_def()

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        return [TensorType(i32, _declared(declared).get_shape())]


@irdl_op_definition
class ConvIntegerOp(TopOp):
    """Convolution of `x - x_zero` with `w - w_zero` in int32; padding holds `x_zero`."""

    name = "top.conv_integer"
    x = operand_def()
    w = operand_def()
    x_zero = operand_def()
    w_zero = operand_def()
    result = result_def()
    strides = attr_def(DenseArrayBase)
    pads = attr_def(DenseArrayBase)
    dilations = attr_def(DenseArrayBase)
    group = attr_def(IntegerAttr)

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        return [TensorType(i32, _declared(declared).get_shape())]


QUANTISED_OPS = [
    QuantizeLinearOp,
    DequantizeLinearOp,
    DynamicQuantizeLinearOp,
    MatmulIntegerOp,
    ConvIntegerOp,
]
"""All of them."""
