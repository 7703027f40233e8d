"""Lower `quant.resize`: gather two rows and columns by the index tables, blend by 11-bit weights.

The tables are `tensor<OHx4xi16>` and `tensor<OWx4xi16>` of (first index, second index, first
weight, second weight)::

    v = sum over both rows and columns of (x[y, x] - zero) * wy * wx,   then   v * m + bias, one
    rounding
"""

from __future__ import annotations

from xdsl.dialects import arith, tensor
from xdsl.dialects.builtin import IndexType, i8, i64
from xdsl.ir import Operation, SSAValue

from tilewright.dialects.quant import shape_of
from tilewright.transforms.linalg.attributes import integer, layer_name
from tilewright.transforms.linalg.convolution import image, layout_of
from tilewright.transforms.linalg.elementwise import WIDEST
from tilewright.transforms.linalg.emit import Body, Emitter, affine_map, dims, tag, zero_point
from tilewright.transforms.linalg.rounding import Output, WideSum, scalar_tags

UNITY = 1 << 11
"""What each pair of weights sums to."""


def lower_resize(emit: Emitter, op: Operation, operands: list[SSAValue]) -> SSAValue:
    """Lower a `quant.resize`; `operands` are the codes and the two tables."""
    source, table_y, table_x = operands
    shape, layout = shape_of(op.results[0]), layout_of(op)
    mult, zero = integer(op, "mult"), zero_point(op.operands[0])
    wide = WideSum.of(op, layer_name(op), WIDEST * UNITY * UNITY * abs(mult))
    output = Output.of(op)
    space = dims(4)
    axis_n, axis_c = image(layout, 0, 1, 2, [3]).index(0), image(layout, 0, 1, 2, [3]).index(3)
    axis_h, axis_w = (1, 2) if layout == "nhwc" else (2, 3)
    inputs = [
        *((table_y, affine_map(4, [space[axis_h], field])) for field in range(4)),
        *((table_x, affine_map(4, [space[axis_w], field])) for field in range(4)),
    ]

    def body(inner: Body) -> SSAValue:
        def position(value: SSAValue) -> SSAValue:
            return inner.add(arith.IndexCastOp(value, IndexType()))

        n, c = inner.index(axis_n), inner.index(axis_c)
        rows = [position(value) for value in inner.args[0:2]]
        columns = [position(value) for value in inner.args[4:6]]
        row_weights = [inner.extend(value, i64) for value in inner.args[2:4]]
        column_weights = [inner.extend(value, i64) for value in inner.args[6:8]]
        lines = list[SSAValue]()
        for row, row_weight in zip(rows, row_weights, strict=True):
            parts = list[SSAValue]()
            for column, weight in zip(columns, column_weights, strict=True):
                at = image(layout, n, row, column, [c])
                code = inner.add(tensor.ExtractOp(source, at, i8))
                parts.append(inner.times(inner.code_offset(code, zero, i64), weight))
            lines.append(inner.times(inner.plus(parts[0], parts[1]), row_weight))
        total = inner.times(inner.plus(lines[0], lines[1]), inner.constant(mult, i64))
        return wide.finish(inner, total, output)

    result = emit.elementwise("resize", inputs, shape, i8, body)
    tags = scalar_tags(op, "mult", "shift", "bias", "bias_shift")
    return tag(result, "resize", {"za": zero, "layout": layout, **tags})
