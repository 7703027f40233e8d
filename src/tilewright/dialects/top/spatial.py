"""Convolutions, products, pools, resizing and normalisations of `top`.

Image operations carry `layout`: absent or `"nchw"` means axes batch, channel, spatial...;
`"nhwc"` means batch, spatial..., channel. Weights keep their order in either layout.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override
from xdsl.dialects.builtin import (
    DenseArrayBase,
    FloatAttr,
    IntegerAttr,
    NoneType,
    StringAttr,
    TensorType,
    i64,
)
from xdsl.ir import Attribute
from xdsl.irdl import (
    attr_def,
    irdl_op_definition,
    operand_def,
    opt_attr_def,
    opt_result_def,
    result_def,
)
from xdsl.utils.exceptions import VerifyException

from tilewright.dialects.top.base import (
    Attrs,
    TopOp,
    Types,
    broadcast,
    same_element,
    tensor,
    with_shape,
)

LAYOUTS = ("nchw", "nhwc")
COORDINATES = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_crop_and_resize",
)


def split_image(shape: Sequence[int], attrs: Attrs) -> tuple[int, int, tuple[int, ...]]:
    """Return batch, channels and spatial sizes of an image tensor in the layout of `attrs`."""
    if len(shape) < 3:
        raise VerifyException(f"an image operand needs rank 3 or more, has shape {list(shape)}")
    if attrs.choice("layout", LAYOUTS, "nchw") == "nhwc":
        return shape[0], shape[-1], tuple(shape[1:-1])
    return shape[0], shape[1], tuple(shape[2:])


def join_image(batch: int, channels: int, spatial: Sequence[int], attrs: Attrs) -> list[int]:
    """Return the shape of an image tensor in the layout of `attrs`."""
    if attrs.string("layout", "nchw") == "nhwc":
        return [batch, *spatial, channels]
    return [batch, channels, *spatial]


def _check_vector(types: Types, index: int, size: int, what: str) -> None:
    """Check an optional per-channel vector."""
    if isinstance(types[index], NoneType):
        return
    shape = tensor(types, index).get_shape()
    if tuple(shape) != (size,):
        raise VerifyException(f"{what} has shape {list(shape)}, needs [{size}]")


def _check_clamp(attrs: Attrs) -> None:
    low, high = attrs.number("clamp_min"), attrs.number("clamp_max")
    if low is not None and high is not None and low > high:
        raise VerifyException(f"`clamp_min` {low} is above `clamp_max` {high}")


@irdl_op_definition
class ConvOp(TopOp):
    """Convolution: `x`, `w` (output channel, input channel / group, kernel...), `bias` or none.

    `pads` are zeros: all begins, then all ends (`[top, left, bottom, right]`).
    """

    name = "top.conv"
    x = operand_def()
    w = operand_def()
    bias = operand_def()
    result = result_def()
    strides = attr_def(DenseArrayBase)
    pads = attr_def(DenseArrayBase)
    dilations = attr_def(DenseArrayBase)
    group = attr_def(IntegerAttr)
    clamp_min = opt_attr_def(FloatAttr)
    clamp_max = opt_attr_def(FloatAttr)
    layout = opt_attr_def(StringAttr)

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        x, w = tensor(types, 0), tensor(types, 1)
        batch, channels, spatial = split_image(x.get_shape(), attrs)
        rank = len(spatial)
        if len(w.get_shape()) != rank + 2:
            raise VerifyException(f"weights have shape {list(w.get_shape())}, need rank {rank + 2}")
        out, per_group, *kernel = w.get_shape()
        group = attrs.integer("group")
        if group < 1 or out % group or per_group * group != channels:
            raise VerifyException(
                f"{channels} input channels, weights {list(w.get_shape())} and group {group} "
                "do not fit"
            )
        _check_vector(types, 2, out, "bias")
        _check_clamp(attrs)
        strides = attrs.per_axis("strides", rank, 1)
        dilations = attrs.per_axis("dilations", rank, 1)
        pads = attrs.per_axis("pads", 2 * rank, 0)
        sizes = [
            (dim + pads[i] + pads[i + rank] - dilations[i] * (kernel[i] - 1) - 1) // strides[i] + 1
            for i, dim in enumerate(spatial)
        ]
        if any(size < 1 for size in sizes):
            raise VerifyException(f"kernel {kernel} is larger than padded input {list(spatial)}")
        return [with_shape(x, join_image(batch, out, sizes, attrs))]


@irdl_op_definition
class ConvTransposeOp(TopOp):
    """Transposed convolution; `w` is (input channel, output channel / group, kernel...)."""

    name = "top.conv_transpose"
    x = operand_def()
    w = operand_def()
    bias = operand_def()
    result = result_def()
    strides = attr_def(DenseArrayBase)
    pads = attr_def(DenseArrayBase)
    dilations = attr_def(DenseArrayBase)
    output_pads = attr_def(DenseArrayBase)
    group = attr_def(IntegerAttr)
    clamp_min = opt_attr_def(FloatAttr)
    clamp_max = opt_attr_def(FloatAttr)
    layout = opt_attr_def(StringAttr)

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        x, w = tensor(types, 0), tensor(types, 1)
        batch, channels, spatial = split_image(x.get_shape(), attrs)
        rank = len(spatial)
        if len(w.get_shape()) != rank + 2:
            raise VerifyException(f"weights have shape {list(w.get_shape())}, need rank {rank + 2}")
        inner, per_group, *kernel = w.get_shape()
        group = attrs.integer("group")
        if group < 1 or inner != channels or channels % group:
            raise VerifyException(
                f"{channels} input channels, weights {list(w.get_shape())} and group {group} "
                "do not fit"
            )
        _check_vector(types, 2, per_group * group, "bias")
        _check_clamp(attrs)
        strides = attrs.per_axis("strides", rank, 1)
        dilations = attrs.per_axis("dilations", rank, 1)
        # Negative pads appear when an explicit output shape asks for more than the formula gives.
        pads = attrs.per_axis("pads", 2 * rank)
        extra = attrs.per_axis("output_pads", rank, 0)
        sizes = [
            strides[i] * (dim - 1)
            + dilations[i] * (kernel[i] - 1)
            + 1
            + extra[i]
            - pads[i]
            - pads[i + rank]
            for i, dim in enumerate(spatial)
        ]
        if any(size < 1 for size in sizes):
            raise VerifyException(f"pads {list(pads)} leave nothing of the output: {sizes}")
        return [with_shape(x, join_image(batch, per_group * group, sizes, attrs))]


@irdl_op_definition
class MatmulOp(TopOp):
    """Matrix product by numpy's rules, batch axes broadcast."""

    name = "top.matmul"
    a = operand_def()
    b = operand_def()
    result = result_def()

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        a, b = tensor(types, 0), tensor(types, 1)
        same_element(a, b)
        left, right = list(a.get_shape()), list(b.get_shape())
        if not left or not right:
            raise VerifyException("a matrix product needs operands of rank 1 or more")
        row = [1, *left] if len(left) == 1 else left
        column = [*right, 1] if len(right) == 1 else right
        if row[-1] != column[-2]:
            raise VerifyException(f"inner sizes of {left} and {right} differ")
        shape = list(broadcast(row[:-2], column[:-2])) if len(row) + len(column) > 4 else []
        shape += [] if len(left) == 1 else [row[-2]]
        shape += [] if len(right) == 1 else [column[-1]]
        return [with_shape(a, shape)]


@irdl_op_definition
class LinearOp(TopOp):
    """`x[..., K] @ w[N, K]^T + bias[N]`, then the clamp; `bias` may be none."""

    name = "top.linear"
    x = operand_def()
    w = operand_def()
    bias = operand_def()
    result = result_def()
    clamp_min = opt_attr_def(FloatAttr)
    clamp_max = opt_attr_def(FloatAttr)

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        x, w = tensor(types, 0), tensor(types, 1)
        shape, weights = x.get_shape(), w.get_shape()
        if len(weights) != 2 or not shape or shape[-1] != weights[1]:
            raise VerifyException(f"input {list(shape)} and weights {list(weights)} do not fit")
        _check_vector(types, 2, weights[0], "bias")
        _check_clamp(attrs)
        return [with_shape(x, [*shape[:-1], weights[0]])]


class PoolOp(TopOp):
    """Base of the pools: window sizes and the rules of the result's shape.

    With `ceil_mode` a last window that would start in the end padding is dropped.
    """

    x = operand_def()
    result = result_def()
    kernel = attr_def(DenseArrayBase)
    strides = attr_def(DenseArrayBase)
    pads = attr_def(DenseArrayBase)
    dilations = attr_def(DenseArrayBase)
    ceil_mode = attr_def(IntegerAttr)
    layout = opt_attr_def(StringAttr)

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        x = tensor(types, 0)
        batch, channels, spatial = split_image(x.get_shape(), attrs)
        rank = len(spatial)
        kernel = attrs.per_axis("kernel", rank, 1)
        strides = attrs.per_axis("strides", rank, 1)
        dilations = attrs.per_axis("dilations", rank, 1)
        pads = attrs.per_axis("pads", 2 * rank, 0)
        ceil = attrs.flag("ceil_mode")
        sizes: list[int] = []
        for i, dim in enumerate(spatial):
            free = dim + pads[i] + pads[i + rank] - dilations[i] * (kernel[i] - 1) - 1
            size = (-(-free // strides[i]) if ceil else free // strides[i]) + 1
            if ceil and (size - 1) * strides[i] >= dim + pads[i]:
                size -= 1
            sizes.append(size)
        if any(size < 1 for size in sizes):
            raise VerifyException(f"window {list(kernel)} is larger than the padded input")
        pooled = with_shape(x, join_image(batch, channels, sizes, attrs))
        if len(declared) == 2:
            return [pooled, TensorType(i64, pooled.get_shape())]
        return [pooled]


@irdl_op_definition
class MaxPoolOp(PoolOp):
    """Maximum of each window; padding counts as minus infinity.

    The second result, if present, is the flat index of each maximum in the whole `x`
    (`storage_order` 1: column major).
    """

    name = "top.max_pool"
    indices = opt_result_def()
    storage_order = opt_attr_def(IntegerAttr)


@irdl_op_definition
class AvgPoolOp(PoolOp):
    """Mean of each window; padding counts as zeros only with `count_include_pad`.

    What `ceil_mode` adds behind the padding never counts.
    """

    name = "top.avg_pool"
    count_include_pad = attr_def(IntegerAttr)


@irdl_op_definition
class ResizeOp(TopOp):
    """Interpolation as ONNX Resize defines it; the result type has the sizes.

    `scales` (and `roi`, twice as long) have one entry for each axis of `x` as stored.
    """

    name = "top.resize"
    x = operand_def()
    result = result_def()
    mode = attr_def(StringAttr)
    coordinate = attr_def(StringAttr)
    scales = attr_def(DenseArrayBase)
    nearest_mode = opt_attr_def(StringAttr)
    cubic_coeff_a = opt_attr_def(FloatAttr)
    exclude_outside = opt_attr_def(IntegerAttr)
    extrapolation_value = opt_attr_def(FloatAttr)
    antialias = opt_attr_def(IntegerAttr)
    roi = opt_attr_def(DenseArrayBase)
    layout = opt_attr_def(StringAttr)

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        x = tensor(types, 0)
        attrs.choice("mode", ("nearest", "linear", "cubic"))
        attrs.choice("coordinate", COORDINATES)
        attrs.choice("layout", LAYOUTS, "nchw")
        attrs.choice(
            "nearest_mode",
            ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"),
            "round_prefer_floor",
        )
        scales = attrs.floats("scales")
        shape = x.get_shape()
        if len(scales) != len(shape) or any(scale <= 0 for scale in scales):
            raise VerifyException(f"`scales` {list(scales)} does not fit shape {list(shape)}")
        if "roi" in attrs and len(attrs.floats("roi")) != 2 * len(shape):
            raise VerifyException(f"`roi` needs {2 * len(shape)} entries")
        if not declared:
            return [with_shape(x, [int(d * s) for d, s in zip(shape, scales, strict=True)])]
        result = tensor(declared, 0, "result")
        if len(result.get_shape()) != len(shape):
            raise VerifyException("the result has another rank")
        for dim, scale, size in zip(shape, scales, result.get_shape(), strict=True):
            # Scales are float32: their product may miss the size by rounding (or by one, where
            # sizes were given and the scale follows from them).
            if abs(dim * scale - size) > 1 and "roi" not in attrs:
                raise VerifyException(f"size {dim} times {scale} is not {size}")
        return [with_shape(x, result.get_shape())]


@irdl_op_definition
class BatchNormOp(TopOp):
    """`(x - mean) / sqrt(var + epsilon) * scale + bias` with stored statistics, along `axis`."""

    name = "top.batch_norm"
    x = operand_def()
    scale = operand_def()
    bias = operand_def()
    mean = operand_def()
    var = operand_def()
    result = result_def()
    epsilon = attr_def(FloatAttr)
    axis = attr_def(IntegerAttr)

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        x = tensor(types, 0)
        size = x.get_shape()[attrs.axis(len(x.get_shape()))]
        for index, what in enumerate(("scale", "bias", "mean", "var"), 1):
            _check_vector(types, index, size, what)
        return [x]


@irdl_op_definition
class InstanceNormOp(TopOp):
    """Each image's channel (axis `axis`) normalised over its spatial axes, scaled and shifted."""

    name = "top.instance_norm"
    x = operand_def()
    scale = operand_def()
    bias = operand_def()
    result = result_def()
    epsilon = attr_def(FloatAttr)
    axis = attr_def(IntegerAttr)

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        x = tensor(types, 0)
        size = x.get_shape()[attrs.axis(len(x.get_shape()))]
        _check_vector(types, 1, size, "scale")
        _check_vector(types, 2, size, "bias")
        return [x]


@irdl_op_definition
class LayerNormOp(TopOp):
    """Normalised over axes `axis`.. to the last, then scaled and shifted (`bias` may be none)."""

    name = "top.layer_norm"
    x = operand_def()
    scale = operand_def()
    bias = operand_def()
    result = result_def()
    epsilon = attr_def(FloatAttr)
    axis = attr_def(IntegerAttr)

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        x = tensor(types, 0)
        shape = x.get_shape()
        tail = tuple(shape[attrs.axis(len(shape)) :])
        for index in (1, 2):
            if isinstance(types[index], NoneType):
                continue
            vector = tensor(types, index)
            if broadcast(vector.get_shape(), tail) != tail:
                raise VerifyException(f"operand {index} does not broadcast to {list(tail)}")
        return [x]


@irdl_op_definition
class LrnOp(TopOp):
    """Local response normalisation over `size` neighbouring channels (axis `axis`)."""

    name = "top.lrn"
    x = operand_def()
    result = result_def()
    size = attr_def(IntegerAttr)
    alpha = attr_def(FloatAttr)
    beta = attr_def(FloatAttr)
    bias = attr_def(FloatAttr)
    axis = attr_def(IntegerAttr)

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        x = tensor(types, 0)
        attrs.axis(len(x.get_shape()))
        if attrs.integer("size") < 1:
            raise VerifyException("`size` must be at least 1")
        return [x]
