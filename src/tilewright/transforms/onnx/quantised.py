"""Quantising and dequantising, and products of integer codes.

Everything enters `top` with scale and zero point as operands, float32 scales, and both of one
shape; `top-absorb-qdq` then finds what the chip can compute in integers. Half precision: an int8
code times a float16 scale is exact in float32, so computing there and rounding once is the same.
"""

from __future__ import annotations

import numpy as np
from xdsl.dialects.builtin import NoneType, TensorType, f32
from xdsl.ir import SSAValue

from tilewright.dialects import top
from tilewright.transforms.onnx.base import (
    Node,
    RefusedError,
    axis_of,
    element,
    rule,
    shape_of,
)
from tilewright.transforms.onnx.spatial import conv_attributes

FLOAT = 1
"""`TensorProto.FLOAT`."""


def _scale(node: Node, shape: tuple[int, ...]) -> tuple[SSAValue, SSAValue, dict[str, int]]:
    """Return scale (float32), zero point or none, and the attributes, for a tensor of `shape`."""
    scale, zero = node.operand(1), node.optional(2)
    axis = node.integer("axis", 1)
    block = node.integer("block_size", 0)
    array = node.value_of(scale)
    if array is not None and not np.isfinite(array.astype(np.float32)).all():
        raise RefusedError("a scale is not finite")
    form = shape_of(scale)
    if not isinstance(zero.type, NoneType) and shape_of(zero) != form:
        if np.prod(shape_of(zero)) != 1 or np.prod(form) != 1:
            raise RefusedError(
                f"the zero point has shape {list(shape_of(zero))}, the scale {list(form)}"
            )
        zero = _reshaped(node, zero, form, "zero_point")
    if not block and np.prod(form) == 1:
        # Exporters write one scale as a list of one.
        form = ()
    scale = _reshaped(node, scale, form, "scale")
    if not isinstance(zero.type, NoneType):
        zero = _reshaped(node, zero, form, "zero_point")
    if element(scale) != f32:
        known = node.value_of(scale)
        if known is not None:
            scale = node.weight(known.astype(np.float32), "scale")
        else:
            scale = node.cast(scale, f32)
    attributes: dict[str, int] = {}
    if form:
        attributes["axis"] = axis_of(axis, len(shape))
        if block:
            attributes["block_size"] = block
    return scale, zero, attributes


def _reshaped(node: Node, value: SSAValue, shape: tuple[int, ...], label: str) -> SSAValue:
    if shape_of(value) == shape:
        return value
    array = node.value_of(value)
    if array is not None:
        return node.weight(array.reshape(shape), label)
    return node.reshape(value, shape)


@rule("QuantizeLinear")
def _quantize(node: Node) -> SSAValue:
    x = node.operand(0)
    node.meaningless("saturate", "output_dtype")
    node.must_be("precision", 0, (0, FLOAT), "divisions are computed in float32")
    scale, zero, attributes = _scale(node, shape_of(x))
    result = node.result_type()
    if isinstance(zero.type, NoneType):
        dtype = top.numpy_dtype(result.get_element_type())
        zero = node.weight(np.zeros(shape_of(scale), dtype), "zero_point")
    return node.emit(
        "quantize_linear", [node.cast(x, f32), scale, zero], attributes, result_types=[result]
    )


@rule("DequantizeLinear")
def _dequantize(node: Node) -> SSAValue:
    x = node.operand(0)
    node.meaningless("output_dtype")
    scale, zero, attributes = _scale(node, shape_of(x))
    real = node.emit("dequantize_linear", [x, scale, zero], attributes)
    return node.cast(real, node.result_type().get_element_type())


@rule("DynamicQuantizeLinear")
def _dynamic(node: Node) -> list[SSAValue]:
    return list(node.emit_all("dynamic_quantize_linear", [node.operand(0)]))


@rule("MatMulInteger")
def _matmul_integer(node: Node) -> SSAValue:
    operands = [node.operand(0), node.operand(1), node.optional(2), node.optional(3)]
    return node.emit("matmul_integer", operands, result_types=[node.result_type()])


@rule("ConvInteger")
def _conv_integer(node: Node) -> SSAValue:
    operands = [node.operand(0), node.operand(1), node.optional(2), node.optional(3)]
    attributes = conv_attributes(node, operands[0], operands[1])
    result = node.result_type()
    assert isinstance(result, TensorType)
    return node.emit("conv_integer", operands, attributes, result_types=[result])
