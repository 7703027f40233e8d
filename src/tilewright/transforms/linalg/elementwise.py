"""Lower `quant.add`, `sub`, `mul`, `requantize` and `lut`, and the fp16 forms of the like.

The arithmetic ones form `v` in i64 from `code - zero point`, add the bias and round once::

    add: v = (a - za) * ma + (b - zb) * mb     sub: minus     mul: v = (a - za) * (b - zb) * m
    requantize: v = (a - za) * m

A lookup reads `table[a + 128]` by `tensor.extract`.
"""

from __future__ import annotations

from xdsl.dialects import arith, tensor
from xdsl.dialects.builtin import IndexType, f32, i8, i64
from xdsl.ir import Operation, SSAValue

from tilewright.dialects.quant import shape_of
from tilewright.transforms.linalg.attributes import integer, layer_name
from tilewright.transforms.linalg.emit import (
    Body,
    BodyFunction,
    Emitter,
    broadcast_map,
    element_of,
    tag,
    zero_point,
)
from tilewright.transforms.linalg.half import HalfOutput, without_bias
from tilewright.transforms.linalg.rounding import Output, WideSum, scalar_tags

WIDEST = 255
"""Largest magnitude of `code - zero point`."""


def lower_sum(emit: Emitter, op: Operation, operands: list[SSAValue]) -> SSAValue:
    """Lower a `quant.add` or `quant.sub`."""
    mult_a, mult_b = integer(op, "mult_a"), integer(op, "mult_b")
    wide = WideSum.of(op, layer_name(op), WIDEST * (abs(mult_a) + abs(mult_b)))
    output, (za, zb) = Output.of(op), (zero_point(value) for value in op.operands)
    subtract = op.name == "quant.sub"

    def body(inner: Body) -> SSAValue:
        a, b = inner.args[:2]
        left = inner.times(inner.code_offset(a, za, i64), inner.constant(mult_a, i64))
        right = inner.times(inner.code_offset(b, zb, i64), inner.constant(mult_b, i64))
        total = inner.minus(left, right) if subtract else inner.plus(left, right)
        return wide.finish(inner, total, output)

    function = op.name.removeprefix("quant.")
    result = _map_codes(emit, op, operands, function, body)
    tags = scalar_tags(op, "mult_a", "mult_b", "shift", "bias", "bias_shift")
    return tag(result, "eltwise", {"function": function, "za": za, "zb": zb, **tags})


def lower_mul(emit: Emitter, op: Operation, operands: list[SSAValue]) -> SSAValue:
    """Lower a `quant.mul`."""
    mult = integer(op, "mult")
    wide = WideSum.of(op, layer_name(op), WIDEST * WIDEST * abs(mult))
    output, (za, zb) = Output.of(op), (zero_point(value) for value in op.operands)

    def body(inner: Body) -> SSAValue:
        a, b = inner.args[:2]
        product = inner.times(inner.code_offset(a, za, i64), inner.code_offset(b, zb, i64))
        return wide.finish(inner, inner.times(product, inner.constant(mult, i64)), output)

    result = _map_codes(emit, op, operands, "mul", body)
    tags = {"mult_a": mult, "mult_b": 0, **scalar_tags(op, "shift", "bias", "bias_shift")}
    return tag(result, "eltwise", {"function": "mul", "za": za, "zb": zb, **tags})


def lower_requantize(emit: Emitter, op: Operation, operands: list[SSAValue]) -> SSAValue:
    """Lower a `quant.requantize`."""
    mult = integer(op, "mult")
    wide = WideSum.of(op, layer_name(op), WIDEST * abs(mult))
    output, za = Output.of(op), zero_point(op.operands[0])

    def body(inner: Body) -> SSAValue:
        code = inner.code_offset(inner.args[0], za, i64)
        return wide.finish(inner, inner.times(code, inner.constant(mult, i64)), output)

    result = _map_codes(emit, op, operands, "requantise", body)
    tags = scalar_tags(op, "mult", "shift", "bias", "bias_shift")
    return tag(result, "copy", {"requantise": 1, "za": za, **tags})


def lower_lut(emit: Emitter, op: Operation, operands: list[SSAValue]) -> SSAValue:
    """Lower a `quant.lut`; `operands` are the codes and the table `tensor<256xi8>`."""
    source, table = operands

    def body(inner: Body) -> SSAValue:
        kind = IndexType()
        code = inner.add(arith.IndexCastOp(inner.args[0], kind))
        position = inner.plus(code, inner.constant(128, kind))
        return inner.add(tensor.ExtractOp(table, [position], i8))

    return tag(_map_codes(emit, op, [source], "lut", body), "lut", {})


def lower_half_binary(emit: Emitter, op: Operation, operands: list[SSAValue]) -> SSAValue:
    """Lower an fp16 `top.add`, `sub`, `mul`, `min` or `max`: in f32, clamped, rounded once."""
    function, output = op.name.removeprefix("top."), HalfOutput.of(op)

    def body(inner: Body) -> SSAValue:
        a, b = (inner.extend(value, f32) for value in inner.args[:2])
        operation = {
            "add": inner.plus,
            "sub": inner.minus,
            "mul": inner.times,
            "min": inner.smaller,
            "max": inner.larger,
        }[function]
        return output.finish(inner, operation(a, b))

    result = _map_codes(emit, op, operands, function, body)
    return tag(result, "eltwise", {"function": function, **output.tags})


def lower_half_function(emit: Emitter, op: Operation, operands: list[SSAValue]) -> SSAValue:
    """Lower an fp16 function of one value."""
    output = HalfOutput.of_function(op)
    result = _map_codes(emit, op, operands, "function", without_bias(output))
    return tag(result, "copy", {"function": output.function, **output.tags})


def _map_codes(
    emit: Emitter, op: Operation, operands: list[SSAValue], role: str, body: BodyFunction
) -> SSAValue:
    shape = shape_of(op.results[0])
    inputs = [(value, broadcast_map(shape_of(value), shape)) for value in operands]
    return emit.elementwise(role, inputs, shape, element_of(op.results[0]), body)
