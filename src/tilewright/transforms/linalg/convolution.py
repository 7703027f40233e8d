"""Lower convolutions, linear layers and matmuls, of codes (`quant`) and of fp16 (`top`).

A convolution becomes padding with the input's zero point, a contraction into i32, and the
requantisation::

    %p = tensor.pad %x                                     # value: zero point
    %acc = linalg.generic(%p, %w) outs(%zeros : i32)       # acc += extsi(x) * extsi(w)
    %y = linalg.generic(%acc, %bias, %mult, %shift)        # i64 arith, one rounding

The window is in the maps (`oh * stride + kh * dilation`). Groups are an extra axis made by
`tensor.expand_shape`, except for
depthwise convolution, which reads its weight at input channel 0.

In fp16 sums are f32, and `truncf(clamp(acc + bias))` takes the requantisation's place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from xdsl.dialects.builtin import AnyFloat, IntegerType, StringAttr, f16, i8, i32
from xdsl.ir import Operation, SSAValue
from xdsl.ir.affine import AffineExpr, AffineMap

from tilewright.dialects.quant import int_list, int_of, shape_of
from tilewright.transforms.linalg.emit import (
    Body,
    Emitter,
    accumulator_of,
    affine_map,
    broadcast_map,
    dims,
    element_of,
    tag,
    zero_point,
)
from tilewright.transforms.linalg.half import HalfOutput, is_half, with_bias, without_bias
from tilewright.transforms.linalg.rounding import Output, requantise, requantise_scalar, scalar_tags

T = TypeVar("T")


def layout_of(op: Operation) -> str:
    """Return the op's image layout, `nchw` if it says none."""
    layout = op.attributes.get("layout", op.properties.get("layout"))
    return layout.data if isinstance(layout, StringAttr) else "nchw"


def multiply_add(body: Body) -> SSAValue:
    """Return `acc + wide(a) * wide(b)` in the type of `acc`; block arguments: `a`, `b`, `acc`."""
    left, right, acc = body.args
    kind = acc.type
    assert isinstance(kind, IntegerType | AnyFloat)
    return body.plus(acc, body.times(body.extend(left, kind), body.extend(right, kind)))


def pad_window(
    emit: Emitter,
    value: SSAValue,
    layout: str,
    pads: list[int],
    extent: tuple[int, int],
    fill: float,
) -> SSAValue:
    """Pad an image so that windows reaching to `extent` rows and columns fit.

    `pads` is `[top, left, bottom, right]`; rows or columns that no window reads are still padded
    as stated.
    """
    axes = (1, 2) if layout == "nhwc" else (2, 3)
    shape = shape_of(value)
    low, high = [0] * 4, [0] * 4
    for which, axis in enumerate(axes):
        low[axis] = pads[which]
        # ceil_mode pooling lets its last window run past the stated padding.
        high[axis] = max(pads[which + 2], extent[which] - shape[axis] - pads[which])
    return emit.pad(value, low, high, fill)


def per_channel(
    emit: Emitter, acc: SSAValue, channel: int, parameters: list[SSAValue], op: Operation
) -> SSAValue:
    """End sums with their parameters along axis `channel`.

    Those of codes are requantised by bias, multiplier and shift; those of fp16 get a bias.
    """
    shape = shape_of(acc)
    space = dims(len(shape))
    along = affine_map(len(shape), [space[channel]])
    inputs = [(acc, AffineMap.identity(len(shape))), *((value, along) for value in parameters)]
    if is_half(op):
        half = HalfOutput.of(op)
        result = emit.elementwise("round", inputs, shape, f16, with_bias(half))
        return tag(result, "requant", half.tags)
    output = Output.of(op)
    if element_of(op.results[0]) == i32:
        # The sums themselves; multiplier and shift are read by nothing.
        result = emit.elementwise("sum", inputs, shape, i32, lambda b: b.plus(b.args[0], b.args[1]))
        return tag(result, "requant", output.tags)
    result = emit.elementwise("requantise", inputs, shape, i8, requantise(output))
    return tag(result, "requant", output.tags)


def lower_conv(emit: Emitter, op: Operation, operands: list[SSAValue]) -> SSAValue:
    """Lower a `quant.conv` or fp16 `top.conv`.

    `operands` are the input, the weight, the bias and, of codes, multiplier and shift.
    """
    source, weight, *parameters = operands
    layout = layout_of(op)
    strides, dilations = int_list(op.attributes["strides"]), int_list(op.attributes["dilations"])
    kernel = shape_of(weight)[2:]
    target = shape_of(op.results[0])
    spatial = target[1:3] if layout == "nhwc" else target[2:4]
    extent = (
        (spatial[0] - 1) * strides[0] + (kernel[0] - 1) * dilations[0] + 1,
        (spatial[1] - 1) * strides[1] + (kernel[1] - 1) * dilations[1] + 1,
    )
    pads = int_list(op.attributes["pads"])
    source = pad_window(emit, source, layout, pads, extent, zero_point(op.operands[0]))
    group = int_of(op.attributes["group"])
    window = _Window(layout, strides, dilations, target, group)
    acc = _accumulate(emit, window, source, weight)
    return per_channel(emit, acc, 3 if layout == "nhwc" else 1, parameters, op)


def image(layout: str, n: T, h: T, w: T, channels: list[T]) -> list[T]:
    """Order what belongs to batch, height, width and channels as `layout` does."""
    return [n, h, w, *channels] if layout == "nhwc" else [n, *channels, h, w]


@dataclass(frozen=True)
class _Window:
    layout: str
    strides: list[int]
    dilations: list[int]
    target: tuple[int, ...]
    group: int

    def contract(
        self,
        emit: Emitter,
        source: SSAValue,
        weight: SSAValue,
        channels: list[int],
        input_channels: Callable[[list[AffineExpr], AffineExpr], list[AffineExpr | int]],
        weight_channels: Callable[[list[AffineExpr], AffineExpr], list[AffineExpr | int]],
        depth: int,
    ) -> SSAValue:
        """Emit the contraction; `channels` are the sizes of the result's channel axes.

        Loops: the result's axes in order, kernel row, kernel column and, if `depth` is 1, input
        channel of the group.
        The two functions say which channel axes are read, from the result's channel loops and the
        input channel loop.
        """
        outer = 3 + len(channels)
        loops = outer + 2 + depth
        space = dims(loops)
        order = image(self.layout, 0, 1, 2, list(range(3, outer)))
        # `named[k]`: loop of batch, height, width, then the channel axes.
        named = [space[order.index(which)] for which in range(outer)]
        (n, h, w), out = named[:3], named[3:]
        kh, kw, deep = space[outer], space[outer + 1], space[-1]
        rows = h * self.strides[0] + kh * self.dilations[0]
        columns = w * self.strides[1] + kw * self.dilations[1]
        reads = image(self.layout, n, rows, columns, input_channels(out, deep))
        batch, height, width = image_sizes(self.layout, self.target)
        shape = image(self.layout, batch, height, width, channels)
        result = emit.generic(
            "contract",
            [
                (source, affine_map(loops, reads)),
                (weight, affine_map(loops, [*weight_channels(out, deep), kh, kw])),
            ],
            (
                emit.filled(0, tuple(shape), accumulator_of(element_of(source))),
                affine_map(loops, space[:outer]),
            ),
            multiply_add,
            reductions=range(outer, loops),
        )
        tags = {
            "strides": self.strides,
            "dilations": self.dilations,
            "group": self.group,
            "layout": self.layout,
        }
        return tag(result, "conv", tags)


def image_sizes(layout: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return batch, height and width of an image shape."""
    return (shape[0], shape[1], shape[2]) if layout == "nhwc" else (shape[0], shape[2], shape[3])


def _accumulate(emit: Emitter, window: _Window, source: SSAValue, weight: SSAValue) -> SSAValue:
    group = window.group
    out_channels, in_channels = shape_of(weight)[:2]
    per_group = out_channels // group
    if group == 1:
        return window.contract(
            emit,
            source,
            weight,
            [out_channels],
            lambda out, deep: [deep],
            lambda out, deep: [out[0], deep],
            1,
        )
    if in_channels == 1 and per_group == 1:
        return window.contract(
            emit,
            source,
            weight,
            [out_channels],
            lambda out, deep: [out[0]],
            lambda out, deep: [out[0], 0],
            0,
        )
    batch, height, width = image_sizes(window.layout, shape_of(source))
    source = emit.expand(
        source,
        image(window.layout, [batch], [height], [width], [[group, in_channels]]),
    )
    weight = emit.expand(weight, [[group, per_group], *([size] for size in shape_of(weight)[1:])])
    acc = window.contract(
        emit,
        source,
        weight,
        [group, per_group],
        lambda out, deep: [out[0], deep],
        lambda out, deep: [out[0], out[1], deep],
        1,
    )
    return emit.collapse(acc, image(window.layout, 1, 1, 1, [2]))


def lower_linear(emit: Emitter, op: Operation, operands: list[SSAValue]) -> SSAValue:
    """Lower a linear layer: the last axis of the input against the last axis of the weight."""
    source, weight, *parameters = operands
    shape = shape_of(op.results[0])
    rank = len(shape)
    space = dims(rank + 1)
    acc = emit.generic(
        "contract",
        [
            (source, affine_map(rank + 1, [*space[: rank - 1], space[rank]])),
            (weight, affine_map(rank + 1, [space[rank - 1], space[rank]])),
        ],
        (
            emit.filled(0, shape, accumulator_of(element_of(source))),
            affine_map(rank + 1, space[:rank]),
        ),
        multiply_add,
        reductions=(rank,),
    )
    tag(acc, "conv", {"strides": [1, 1], "dilations": [1, 1], "group": 1, "layout": "rows"})
    return per_channel(emit, acc, rank - 1, parameters, op)


def lower_matmul(emit: Emitter, op: Operation, operands: list[SSAValue]) -> SSAValue:
    """Lower a matmul (numpy batch rules) of two activations."""
    left, right = operands
    shape = shape_of(op.results[0])
    rank = len(shape)
    space = dims(rank + 1)
    zeros = [zero_point(value) for value in op.operands]
    wide = accumulator_of(element_of(left))

    def reads(value: SSAValue, last: list[AffineExpr]) -> AffineMap:
        size = shape_of(value)[:-2]
        batch = broadcast_map(size, shape[:-2]).results
        return affine_map(rank + 1, [*batch, *last])

    def body(inner: Body) -> SSAValue:
        a, b, acc = inner.args
        product = inner.times(
            inner.code_offset(a, zeros[0], wide), inner.code_offset(b, zeros[1], wide)
        )
        return inner.plus(acc, product)

    acc = emit.generic(
        "contract",
        [
            (left, reads(left, [space[rank - 2], space[rank]])),
            (right, reads(right, [space[rank], space[rank - 1]])),
        ],
        (emit.filled(0, shape, wide), affine_map(rank + 1, space[:rank])),
        body,
        reductions=(rank,),
    )
    tag(acc, "matmul", {"za": zeros[0], "zb": zeros[1]})
    return finish_scalar(emit, op, acc)


def finish_scalar(emit: Emitter, op: Operation, acc: SSAValue) -> SSAValue:
    """End sums that have the same parameters in all channels."""
    shape = shape_of(acc)
    inputs = [(acc, AffineMap.identity(len(shape)))]
    if is_half(op):
        half = HalfOutput.of(op)
        result = emit.elementwise("round", inputs, shape, f16, without_bias(half))
        return tag(result, "requant", half.tags)
    if element_of(op.results[0]) == i32:
        # The sums themselves; multiplier and shift are read by nothing.
        bias = int_of(op.attributes["bias"])
        result = emit.elementwise(
            "sum", inputs, shape, i32, lambda b: b.plus(b.args[0], b.constant(bias, i32))
        )
        return tag(result, "requant", scalar_tags(op, "bias", "mult", "shift"))
    tail = requantise_scalar(op, Output.of(op))
    result = emit.elementwise("requantise", inputs, shape, i8, tail)
    return tag(result, "requant", scalar_tags(op, "bias", "mult", "shift"))
