"""Lower average pools, and `top.max_pool` of codes and fp16.

The kernel's size is carried by a `tensor.empty` operand that only bounds the loops, as upstream's
own pooling ops do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from xdsl.dialects.builtin import AnyFloat, IntegerType
from xdsl.ir import Attribute, Operation, SSAValue

from tilewright.diagnostics import TilewrightError
from tilewright.dialects.quant import shape_of
from tilewright.transforms.linalg.attributes import ints, layer_name
from tilewright.transforms.linalg.convolution import finish_scalar, image, layout_of, pad_window
from tilewright.transforms.linalg.emit import (
    Body,
    BodyFunction,
    Emitter,
    Scalar,
    accumulator_of,
    affine_map,
    dims,
    element_of,
    is_float,
    tag,
    zero_point,
)
from tilewright.transforms.linalg.half import LOWEST

LOWEST_CODE = -128


def lower_avg_pool(emit: Emitter, op: Operation, operands: list[SSAValue]) -> SSAValue:
    """Sum each window (padding holds the zero point).

    Codes are summed in i32, then requantised. In fp16 every element is multiplied by the window's
    reciprocal, rounded to fp16 as all weights are, and summed in f32.
    """
    source = operands[0]
    wide = accumulator_of(element_of(source))
    kernel = ints(op, "kernel")
    weight = float(np.float16(1.0 / (kernel[0] * kernel[1])))

    def body(inner: Body) -> SSAValue:
        value, _, acc = inner.args
        value = inner.extend(value, wide)
        if is_float(wide):
            value = inner.times(value, inner.constant(weight, wide))
        return inner.plus(acc, value)

    acc = _pool(emit, op, source, [1, 1], zero_point(op.operands[0]), (0, wide), "sum", body)
    if is_float(wide):
        tag(acc, "sum", {"weight": weight})
    return finish_scalar(emit, op, acc)


def lower_max_pool(emit: Emitter, op: Operation, operands: list[SSAValue]) -> SSAValue:
    """Take the largest element of each window; padding holds `lowest`.

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
        value, _, best = inner.args
        return inner.larger(value, best)

    dilations = ints(op, "dilations", [1, 1])
    element = element_of(operands[0])
    assert isinstance(element, IntegerType | AnyFloat)
    start = lowest(element)
    return _pool(emit, op, operands[0], dilations, start, (start, element), "max", body)


def lowest(element: Attribute) -> float:
    """Return what padding of a maximum holds."""
    return LOWEST if is_float(element) else LOWEST_CODE


def _pool(
    emit: Emitter,
    op: Operation,
    source: SSAValue,
    dilations: Sequence[int],
    padding: float,
    start: tuple[float, Scalar],
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
    window = emit.empty((kernel[0], kernel[1]), element_of(source))
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
