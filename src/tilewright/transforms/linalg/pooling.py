"""Lower `quant.avg_pool`, and `top.max_pool` of codes.

The kernel's size is carried by a `tensor.empty` operand that only bounds the loops, as upstream's
own pooling ops do.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects import arith
from xdsl.dialects.builtin import IntegerType, i8, i32
from xdsl.ir import Operation, SSAValue
from xdsl.ir.affine import AffineMap

from tilewright.diagnostics import TilewrightError
from tilewright.dialects.quant import shape_of
from tilewright.transforms.linalg.attributes import ints, layer_name
from tilewright.transforms.linalg.convolution import image, layout_of, pad_window
from tilewright.transforms.linalg.emit import (
    Body,
    BodyFunction,
    Emitter,
    affine_map,
    dims,
    tag,
    zero_point,
)
from tilewright.transforms.linalg.rounding import Output, requantise_scalar, scalar_tags

LOWEST_CODE = -128


def lower_avg_pool(emit: Emitter, op: Operation, operands: list[SSAValue]) -> SSAValue:
    """Sum each window in i32 (padding holds the zero point), then requantise."""
    shape = shape_of(op.results[0])

    def body(inner: Body) -> SSAValue:
        code, _, acc = inner.args
        return inner.plus(acc, inner.extend(code, i32))

    padding = zero_point(op.operands[0])
    acc = _pool(emit, op, operands[0], [1, 1], padding, (0, i32), "sum", body)
    tail = requantise_scalar(op, Output.of(op))
    result = emit.elementwise("requantise", [(acc, AffineMap.identity(4))], shape, i8, tail)
    return tag(result, "requant", scalar_tags(op, "bias", "mult", "shift"))


def lower_max_pool(emit: Emitter, op: Operation, operands: list[SSAValue]) -> SSAValue:
    """Take the largest code of each window; padding holds -128.

    Raises:
        TilewrightError: E0402, the pool also gives indices, or is not two-dimensional.
    """
    kernel = ints(op, "kernel")
    if len(op.results) > 1 or len(kernel) != 2:
        raise TilewrightError(
            "E0402",
            f'max_pool "{layer_name(op)}" cannot run on the chip',
            [f"it has {len(op.results)} results and {len(kernel)} axes; the chip gives 1, on 2"],
        )

    def body(inner: Body) -> SSAValue:
        code, _, best = inner.args
        return inner.add(arith.MaxSIOp(code, best))

    dilations = ints(op, "dilations", [1, 1])
    return _pool(emit, op, operands[0], dilations, LOWEST_CODE, (LOWEST_CODE, i8), "max", body)


def _pool(
    emit: Emitter,
    op: Operation,
    source: SSAValue,
    dilations: Sequence[int],
    padding: int,
    start: tuple[int, IntegerType],
    role: str,
    body: BodyFunction,
) -> SSAValue:
    layout, target = layout_of(op), shape_of(op.results[0])
    kernel, strides, pads = (ints(op, key) for key in ("kernel", "strides", "pads"))
    spatial = target[1:3] if layout == "nhwc" else target[2:4]
    extent = (
        (spatial[0] - 1) * strides[0] + (kernel[0] - 1) * dilations[0] + 1,
        (spatial[1] - 1) * strides[1] + (kernel[1] - 1) * dilations[1] + 1,
    )
    source = pad_window(emit, source, layout, pads, extent, padding)
    space = dims(6)
    order = image(layout, 0, 1, 2, [3])
    n, h, w, c = (space[order.index(which)] for which in range(4))
    kh, kw = space[4:]
    rows, columns = h * strides[0] + kh * dilations[0], w * strides[1] + kw * dilations[1]
    window = emit.empty((kernel[0], kernel[1]), i8)
    result = emit.generic(
        role,
        [
            (source, affine_map(6, image(layout, n, rows, columns, [c]))),
            (window, affine_map(6, [kh, kw])),
        ],
        (emit.filled(start[0], target, start[1]), affine_map(6, space[:4])),
        body,
        reductions=(4, 5),
    )
    kind = "pool" if role == "max" else role
    tags = {"kernel": kernel, "strides": strides, "dilations": dilations, "layout": layout}
    return tag(result, kind, tags)
