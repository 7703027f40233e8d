"""Convolutions, pools, matrix products and normalisations."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
from xdsl.ir import SSAValue
from xdsl.utils.exceptions import VerifyException

from tilewright.dialects import top
from tilewright.transforms.onnx.base import (
    Node,
    RefusedError,
    axis_of,
    element,
    is_float,
    rule,
    shape_of,
)

MAX_WINDOW = 1 << 16
"""Largest size or padding of a pooling window."""


def _per_axis(node: Node, key: str, rank: int) -> list[int]:
    values = node.ints(key) or [1] * rank
    if len(values) != rank:
        raise RefusedError(f"`{key}` has {len(values)} entries for {rank} spatial axes")
    return values


def _kernel(node: Node, weights: Sequence[int], rank: int) -> list[int]:
    """Return the kernel's sizes; `kernel_shape`, if given, must say the same as the weights."""
    kernel = list(weights[2:])
    if len(kernel) != rank or not rank:
        raise RefusedError(f"weights of shape {list(weights)} do not fit {rank} spatial axes")
    given = node.ints("kernel_shape")
    if given is not None and given != kernel:
        raise RefusedError(f"`kernel_shape` is {given}, the weights have {kernel}")
    return kernel


def same_pads(
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    upper: bool,
) -> list[int]:
    """Return the padding for `ceil(size / stride)` results; the odd one at the end if `upper`."""
    begins: list[int] = []
    ends: list[int] = []
    for size, k, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        results = -(-size // stride)
        total = max((results - 1) * stride + dilation * (k - 1) + 1 - size, 0)
        small, large = total // 2, total - total // 2
        begins.append(small if upper else large)
        ends.append(large if upper else small)
    return [*begins, *ends]


def _pads(
    node: Node,
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> list[int]:
    """Resolve `auto_pad` and `pads`."""
    mode = node.string("auto_pad", "NOTSET")
    pads = node.ints("pads")
    if mode != "NOTSET" and pads is not None and any(pads):
        raise RefusedError(f"`pads` and `auto_pad = {mode}` contradict each other")
    match mode:
        case "NOTSET":
            pads = pads or [0] * (2 * len(sizes))
        case "VALID":
            pads = [0] * (2 * len(sizes))
        case "SAME_UPPER" | "SAME_LOWER":
            pads = same_pads(sizes, kernel, strides, dilations, mode == "SAME_UPPER")
        case _:
            raise RefusedError(f"`auto_pad` is {mode!r}")
    if len(pads) != 2 * len(sizes):
        raise RefusedError(f"`pads` has {len(pads)} entries for {len(sizes)} spatial axes")
    if any(pad < 0 for pad in pads):
        raise RefusedError(f"`pads` {pads} has negative entries")
    return pads


def conv_attributes(node: Node, x: SSAValue, w: SSAValue) -> dict[str, top.AttrValue]:
    """Return the attributes of a convolution, padding resolved."""
    sizes = shape_of(x)[2:]
    kernel = _kernel(node, shape_of(w), len(sizes))
    strides = _per_axis(node, "strides", len(sizes))
    dilations = _per_axis(node, "dilations", len(sizes))
    pads = _pads(node, sizes, kernel, strides, dilations)
    return {
        "strides": strides,
        "pads": pads,
        "dilations": dilations,
        "group": node.integer("group", 1),
    }


@rule("Conv")
def _conv(node: Node) -> SSAValue:
    x, w, bias = node.operand(0), node.operand(1), node.optional(2)
    return node.emit("conv", [x, w, bias], conv_attributes(node, x, w))


@rule("ConvTranspose")
def _conv_transpose(node: Node) -> SSAValue:
    x, w, bias = node.operand(0), node.operand(1), node.optional(2)
    sizes = shape_of(x)[2:]
    rank = len(sizes)
    kernel = _kernel(node, shape_of(w), len(sizes))
    strides = _per_axis(node, "strides", rank)
    dilations = _per_axis(node, "dilations", rank)
    extra = node.ints("output_padding") or [0] * rank
    wanted = node.ints("output_shape")
    mode = node.string("auto_pad", "NOTSET")
    pads = node.ints("pads")
    if mode not in ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"):
        raise RefusedError(f"`auto_pad` is {mode!r}")
    if mode != "NOTSET" and pads is not None and any(pads):
        raise RefusedError(f"`pads` and `auto_pad = {mode}` contradict each other")
    if wanted is None and mode.startswith("SAME"):
        wanted = [size * stride for size, stride in zip(sizes, strides, strict=True)]
    if wanted is not None:
        # Some exporters list batch and channels too.
        wanted = wanted[-rank:]
        begins: list[int] = []
        ends: list[int] = []
        for i in range(rank):
            total = strides[i] * (sizes[i] - 1) + extra[i] + dilations[i] * (kernel[i] - 1) + 1
            total -= wanted[i]
            if total < 0:
                # More is asked for than the kernel reaches: zeros (and the bias) at the far end.
                extra[i] -= total
                total = 0
            small, large = total // 2, total - total // 2
            begins.append(small if mode == "SAME_UPPER" else large)
            ends.append(large if mode == "SAME_UPPER" else small)
        pads = [*begins, *ends]
    pads = pads or [0] * (2 * rank)
    if len(pads) != 2 * rank or len(extra) != rank or any(pad < 0 for pad in pads):
        raise RefusedError(f"`pads` {pads} or `output_padding` {extra} do not fit {rank} axes")
    for i in range(rank):
        if extra[i] >= max(strides[i], dilations[i]):
            raise RefusedError(
                f"`output_padding` {extra[i]} on axis {i} is not below the stride {strides[i]} "
                f"or the dilation {dilations[i]}"
            )
    attributes: dict[str, top.AttrValue] = {
        "strides": strides,
        "pads": pads,
        "dilations": dilations,
        "output_pads": extra,
        "group": node.integer("group", 1),
    }
    return node.emit("conv_transpose", [x, w, bias], attributes)


def _pool_attributes(node: Node) -> dict[str, top.AttrValue]:
    sizes = shape_of(node.operand(0))[2:]
    kernel = node.ints("kernel_shape")
    if kernel is None or len(kernel) != len(sizes):
        raise RefusedError(f"`kernel_shape` {kernel} does not fit {len(sizes)} spatial axes")
    strides = _per_axis(node, "strides", len(sizes))
    dilations = _per_axis(node, "dilations", len(sizes))
    pads = _pads(node, sizes, kernel, strides, dilations)
    if max(*kernel, *pads) > MAX_WINDOW:
        raise RefusedError(f"a window of {kernel} with pads {pads}; the limit is {MAX_WINDOW}")
    return {
        "kernel": kernel,
        "strides": strides,
        "pads": pads,
        "dilations": dilations,
        "ceil_mode": bool(node.integer("ceil_mode", 0)),
    }


def _refuse_empty_windows(node: Node, attributes: dict[str, top.AttrValue]) -> None:
    """Refuse a pool with a window wholly in padding: there is no maximum or mean of nothing."""
    x, numbers = node.operand(0), _as_attrs(attributes)
    try:
        shape = top.MaxPoolOp.infer([x.type], numbers, [])[0].get_shape()
    except VerifyException as error:
        raise RefusedError(str(error)) from error
    for axis, (size, results) in enumerate(zip(shape_of(x)[2:], shape[2:], strict=True)):
        first = np.arange(results) * numbers.ints("strides")[axis] - numbers.ints("pads")[axis]
        dilation, kernel = numbers.ints("dilations")[axis], numbers.ints("kernel")[axis]
        # The first element of each window that is not before the data.
        steps = -(np.minimum(first, 0) // dilation)
        if not ((steps < kernel) & (first + steps * dilation < size)).all():
            raise RefusedError(f"a window lies wholly in the padding of axis {axis + 2}")


def _as_attrs(attributes: dict[str, top.AttrValue]) -> top.Attrs:
    return top.Attrs({key: top.to_attribute(value) for key, value in attributes.items()})


@rule("MaxPool")
def _max_pool(node: Node) -> Sequence[SSAValue | None]:
    attributes = _pool_attributes(node)
    _refuse_empty_windows(node, attributes)
    order = node.integer("storage_order", 0)
    x = node.operand(0)
    if not node.wants(1):
        # The order speaks of the indices only.
        return [node.emit("max_pool", [x], attributes)]
    attributes["storage_order"] = order
    types = [node.result_type(0), node.result_type(1)]
    return node.emit_all("max_pool", [x], attributes, types)


@rule("AveragePool")
def _average_pool(node: Node) -> SSAValue:
    attributes = _pool_attributes(node)
    attributes["count_include_pad"] = bool(node.integer("count_include_pad", 0))
    if not attributes["count_include_pad"]:
        _refuse_empty_windows(node, attributes)
    return node.emit("avg_pool", [node.operand(0)], attributes)


@rule("LpPool")
def _lp_pool(node: Node) -> SSAValue:
    """The p-th root of a window's sum of p-th powers: its padded mean times its size."""
    attributes = _pool_attributes(node)
    attributes["count_include_pad"] = True
    x, order = node.operand(0), node.integer("p", 2)
    window = prod(node.ints("kernel_shape") or [])
    if order not in (1, 2) or attributes["ceil_mode"]:
        raise RefusedError("only p = 1 and 2 without `ceil_mode` are supported")
    powers = node.emit("abs", [x]) if order == 1 else node.emit("mul", [x, x])
    mean = node.emit("avg_pool", [powers], attributes)
    total = node.emit("mul", [mean, node.scalar(window, mean, "count")])
    return total if order == 1 else node.emit("sqrt", [total])


@rule("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def _global_pool(node: Node) -> SSAValue:
    x = node.operand(0)
    kind = {"GlobalAveragePool": "mean", "GlobalMaxPool": "max"}.get(node.op_type)
    if kind is None:
        order = node.integer("p", 2)
        if order not in (1, 2):
            raise RefusedError(f"`p` is {order}; 1 and 2 are supported")
        kind = f"l{order}"
    axes = list(range(2, len(shape_of(x))))
    return node.emit("reduce", [x], {"kind": kind, "axes": axes, "keepdims": True})


@rule("MatMul")
def _matmul(node: Node) -> SSAValue:
    return node.emit("matmul", [node.operand(0), node.operand(1)])


@rule("Gemm")
def _gemm(node: Node) -> SSAValue:
    """`alpha * A' @ B' + beta * C`; a `top.linear` when it is a plain fully connected layer."""
    a, b = node.operand(0), node.operand(1)
    alpha, beta = node.number("alpha", 1.0), node.number("beta", 1.0)
    flip_a, flip_b = node.integer("transA", 0), node.integer("transB", 0)
    if flip_a:
        a = node.emit("transpose", [a], {"perm": [1, 0]})
    c = node.operand(2) if node.given(2) else None
    if c is not None and beta == 0.0:
        c = None
    outputs = shape_of(b)[0 if flip_b else 1]
    vector = c is None or shape_of(c) in ((outputs,), (1, outputs))
    value = node.value_of(b)
    if value is not None and alpha == 1.0 and beta == 1.0 and vector and is_float(b):
        if not flip_b:
            b = node.weight(np.ascontiguousarray(value.T), "weights")
        bias = node.optional(2) if c is None else _as_vector(node, c, outputs)
        if c is None and node.given(2):
            bias = node.weight(np.zeros(outputs, value.dtype), "bias")
        return node.emit("linear", [a, b, bias])
    if flip_b:
        b = node.emit("transpose", [b], {"perm": [1, 0]})
    result = node.emit("matmul", [a, b])
    if alpha != 1.0:
        result = node.emit("mul", [result, _factor(node, alpha, result, "alpha")])
    if c is not None:
        if beta != 1.0:
            c = node.emit("mul", [c, _factor(node, beta, c, "beta")])
        result = node.emit("add", [result, c])
    return result


def _factor(node: Node, number: float, like: SSAValue, label: str) -> SSAValue:
    if not is_float(like) and number != int(number):
        raise RefusedError(f"`{label}` is {number} and the operands are integers")
    return node.scalar(number, like, label)


def _as_vector(node: Node, c: SSAValue, size: int) -> SSAValue:
    if shape_of(c) == (size,):
        return c
    value = node.value_of(c)
    return (
        node.weight(value.reshape(size), "bias") if value is not None else node.reshape(c, [size])
    )


@rule("BatchNormalization")
def _batch_norm(node: Node) -> SSAValue:
    """Stored statistics always; `momentum` is a matter of training."""
    node.only_first_result()
    node.meaningless("momentum")
    node.must_be("spatial", 1, [1], "statistics for each position are not supported")
    node.must_be("training_mode", 0, [0], "only inference is compiled")
    epsilon = float(np.float32(node.number("epsilon", 1e-5)))
    values = [node.operand(index) for index in range(5)]
    if len({element(value) for value in values}) != 1:
        raise RefusedError("statistics of another type than the data are not supported")
    if len(shape_of(values[0])) < 2:
        raise RefusedError("an operand of rank 1 has no channels")
    return node.emit("batch_norm", values, {"epsilon": epsilon, "axis": 1})


@rule("InstanceNormalization")
def _instance_norm(node: Node) -> SSAValue:
    epsilon = float(np.float32(node.number("epsilon", 1e-5)))
    values = [node.operand(index) for index in range(3)]
    return node.emit("instance_norm", values, {"epsilon": epsilon, "axis": 1})


@rule("LayerNormalization")
def _layer_norm(node: Node) -> Sequence[SSAValue | None]:
    x, scale, bias = node.operand(0), node.operand(1), node.optional(2)
    node.must_be("stash_type", 1, [1], "only statistics in single precision are supported")
    epsilon = float(np.float32(node.number("epsilon", 1e-5)))
    rank = len(shape_of(x))
    axis = axis_of(node.integer("axis", -1), rank)
    if element(scale) != element(x):
        raise RefusedError("a scale of another type than the data is not supported")
    y = node.emit("layer_norm", [x, scale, bias], {"epsilon": epsilon, "axis": axis})
    results: list[SSAValue | None] = [y]
    if node.wants(1) or node.wants(2):
        over: dict[str, top.AttrValue] = {
            "kind": "mean",
            "axes": list(range(axis, rank)),
            "keepdims": True,
        }
        mean = node.emit("reduce", [x], over)
        centred = node.emit("sub", [x, mean])
        variance = node.emit("reduce", [node.emit("mul", [centred, centred])], over)
        shifted = node.emit("add", [variance, node.scalar(epsilon, variance, "epsilon")])
        results += [mean, node.emit("rsqrt", [shifted])]
    return results


@rule("LRN")
def _lrn(node: Node) -> SSAValue:
    attributes: dict[str, top.AttrValue] = {
        "size": node.integer("size", 0),
        "alpha": node.number("alpha", 0.0001),
        "beta": node.number("beta", 0.75),
        "bias": node.number("bias", 1.0),
        "axis": 1,
    }
    return node.emit("lrn", [node.operand(0)], attributes)


@rule("DepthToSpace")
def _depth_to_space(node: Node) -> SSAValue:
    x = node.operand(0)
    batch, channels, height, width = _image(x)
    block, mode = node.integer("blocksize", 0), node.string("mode", "DCR")
    if block < 1 or channels % (block * block):
        raise RefusedError(f"`blocksize` {block} does not fit {channels} channels")
    inner = channels // (block * block)
    match mode:
        case "DCR":
            split, perm = [batch, block, block, inner, height, width], [0, 3, 4, 1, 5, 2]
        case "CRD":
            split, perm = [batch, inner, block, block, height, width], [0, 1, 4, 2, 5, 3]
        case _:
            raise RefusedError(f"`mode` is {mode!r}")
    moved = node.emit("transpose", [node.reshape(x, split)], {"perm": perm})
    return node.reshape(moved, [batch, inner, height * block, width * block])


@rule("SpaceToDepth")
def _space_to_depth(node: Node) -> SSAValue:
    x = node.operand(0)
    batch, channels, height, width = _image(x)
    block = node.integer("blocksize", 0)
    if block < 1 or height % block or width % block:
        raise RefusedError(f"`blocksize` {block} does not divide {height}x{width}")
    split = [batch, channels, height // block, block, width // block, block]
    moved = node.emit("transpose", [node.reshape(x, split)], {"perm": [0, 3, 5, 1, 2, 4]})
    return node.reshape(moved, [batch, channels * block * block, height // block, width // block])


def _image(x: SSAValue) -> tuple[int, ...]:
    if len(shape_of(x)) != 4:
        raise RefusedError(f"needs rank 4, has {len(shape_of(x))}")
    return shape_of(x)


COORDINATES = {
    "half_pixel": "half_pixel",
    "half_pixel_symmetric": "half_pixel_symmetric",
    "pytorch_half_pixel": "pytorch_half_pixel",
    "align_corners": "align_corners",
    "asymmetric": "asymmetric",
    "tf_crop_and_resize": "tf_crop_and_resize",
}


@rule("Upsample")
def _upsample(node: Node) -> SSAValue:
    """Nearest takes the source pixel at `floor(i / scale)`; both modes are asymmetric."""
    x = node.operand(0)
    mode = node.string("mode", "nearest")
    if mode not in ("nearest", "linear"):
        raise RefusedError(f"`mode` is {mode!r}")
    if node.opset < 9:
        scales = node.floats("scales")
    else:
        scales = [float(s) for s in node.needs_constant(1, "the scales").reshape(-1)]
    if scales is None:
        raise RefusedError("`scales` is missing")
    attributes: dict[str, top.AttrValue] = {
        "mode": mode,
        "coordinate": "asymmetric",
        "scales": scales,
        "nearest_mode": "floor",
    }
    return node.emit("resize", [x], attributes, [node.result_type()])


@rule("Resize")
def _resize(node: Node) -> SSAValue:
    x = node.operand(0)
    shape, rank = shape_of(x), len(shape_of(x))
    mode = node.string("mode", "nearest")
    if mode not in ("nearest", "linear", "cubic"):
        raise RefusedError(f"`mode` is {mode!r}")
    if node.opset < 11:
        # Opset 10 has no attributes but the mode, and means asymmetric coordinates.
        scales = [float(s) for s in node.needs_constant(1, "the scales").reshape(-1)]
        if mode == "nearest" and any(s < 1 and (1 / s) % 1 for s in scales):
            raise RefusedError(
                "operator set 10 does not say which pixel is nearest when shrinking by a fraction"
            )
        attributes: dict[str, top.AttrValue] = {
            "mode": mode,
            "coordinate": "asymmetric",
            "scales": scales,
            "nearest_mode": "floor",
        }
        return node.emit("resize", [x], attributes, [node.result_type()])
    coordinate = node.string("coordinate_transformation_mode", "half_pixel")
    if coordinate not in COORDINATES:
        raise RefusedError(f"`coordinate_transformation_mode` is {coordinate!r}")
    listed = node.ints("axes")
    axes = [axis_of(a, rank) for a in listed] if listed is not None else list(range(rank))
    if len(set(axes)) != len(axes):
        raise RefusedError(f"`axes` {listed} has one twice")
    scales = _scales(node, shape, axes)
    if coordinate == "align_corners" and any(
        abs(s * d - round(s * d)) > 1e-4 for s, d in zip(scales, shape, strict=True)
    ):
        # ONNX divides by the fractional length, onnxruntime by the cut one.
        raise RefusedError("`align_corners` with a fractional size is read differently by tools")
    attributes = {
        "mode": mode,
        "coordinate": coordinate,
        "scales": scales,
        "nearest_mode": node.string("nearest_mode", "round_prefer_floor"),
        "cubic_coeff_a": node.number("cubic_coeff_a", -0.75),
        "exclude_outside": bool(node.integer("exclude_outside", 0)),
        "extrapolation_value": node.number("extrapolation_value", 0.0),
        "antialias": bool(node.integer("antialias", 0)),
    }
    if attributes["antialias"] and mode == "cubic" and attributes["cubic_coeff_a"] != -0.75:
        raise RefusedError("`antialias` with a `cubic_coeff_a` other than -0.75 is not supported")
    roi = node.constant(1)
    if coordinate == "tf_crop_and_resize":
        if roi is None or roi.size != 2 * len(axes):
            raise RefusedError("`roi` must be known at compile time, two numbers an axis")
        full = [0.0] * rank + [1.0] * rank
        for place, axis in enumerate(axes):
            full[axis], full[rank + axis] = float(roi[place]), float(roi[place + len(axes)])
        attributes["roi"] = full
    else:
        # The region speaks only to tf_crop_and_resize.
        node.settled(1)
    return node.emit("resize", [x], attributes, [node.result_type()])


def _scales(node: Node, shape: Sequence[int], axes: Sequence[int]) -> list[float]:
    """Return the scale of each axis from operand `scales` or `sizes` and the policy."""
    policy = node.string("keep_aspect_ratio_policy", "stretch")
    full = [1.0] * len(shape)
    given = node.constant(2)
    sizes = node.constant(3)
    if given is not None and given.size:
        if sizes is not None and sizes.size:
            raise RefusedError("both `scales` and `sizes` are given")
        if given.size != len(axes):
            raise RefusedError(f"{given.size} scales for {len(axes)} axes")
        for axis, scale in zip(axes, given.reshape(-1), strict=True):
            full[axis] = float(scale)
        return full
    if sizes is None or sizes.size != len(axes):
        raise RefusedError("`scales` or `sizes` must be known at compile time")
    if not all(shape[axis] for axis in axes):
        raise RefusedError("an empty tensor has no scale")
    ratios = [float(size) / shape[axis] for axis, size in zip(axes, sizes.reshape(-1), strict=True)]
    match policy:
        case "stretch":
            pass
        case "not_larger":
            ratios = [min(ratios)] * len(ratios)
        case "not_smaller":
            ratios = [max(ratios)] * len(ratios)
        case _:
            raise RefusedError(f"`keep_aspect_ratio_policy` is {policy!r}")
    for axis, ratio in zip(axes, ratios, strict=True):
        full[axis] = ratio
    return full
