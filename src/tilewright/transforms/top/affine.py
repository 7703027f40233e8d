"""Per-channel `y = s * x + t` folded into a linear operation before or after it.

A linear operation L (convolution, transposed convolution, linear layer) has weights `w[o, i, ...]`
and a bias `b[o]`. In exact arithmetic:

- after it, `s[o] * L(x) + t[o]`: `w'[o] = s[o] * w[o]`, `b'[o] = s[o] * b[o] + t[o]`;
- before it, `L(s[i] * x + t[i])`: `w'[o, i] = w[o, i] * s[i]` and
  `b'[o] = b[o] + sum over i, kernel of w[o, i, kernel] * t[i]`, which needs that no window meets
  padding unless all `t` are 0 (padding is 0, not `t`).

All of it is computed in float64 and rounded once to the weights' type. New constants are added
under new names, so other users of the old ones are not touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Operation, SSAValue

from tilewright.dialects import top
from tilewright.transforms.top.graph import Graph, channel_axis, has_clamp, is_float, shape_of

Vector: TypeAlias = npt.NDArray[np.float64]

LINEAR = (top.ConvOp, top.ConvTransposeOp, top.LinearOp)


@dataclass(frozen=True)
class Affine:
    """`y = scale * x + shift` along one axis of `x`; vectors have that axis' size, or 1."""

    x: SSAValue
    scale: Vector
    shift: Vector
    axis: int


def batch_norm_affine(graph: Graph, op: top.BatchNormOp) -> Affine | str:
    """Return a batch norm as affine function, or why it is none.

    `scale = gamma / sqrt(var + epsilon)`, `shift = beta - mean * scale`.
    """
    arrays = [graph.array(value) for value in op.operands[1:]]
    if any(array is None for array in arrays):
        return "its statistics are not constants"
    gamma, beta, mean, var = (np.asarray(array, np.float64) for array in arrays)
    spread = var + (op.attrs.number("epsilon") or 0.0)
    if (spread <= 0).any():
        return "a variance plus epsilon is not positive"
    scale = gamma / np.sqrt(spread)
    return Affine(op.x, scale, beta - mean * scale, op.attrs.integer("axis"))


def arithmetic_affine(graph: Graph, op: top.TopOp, axis: int) -> Affine | None:
    """Return add, sub, mul or div with a constant that varies along `axis` only, else None."""
    kind = op.name.removeprefix("top.")
    if kind not in ("add", "sub", "mul", "div") or has_clamp(op) or not is_float(op.results[0]):
        return None
    a, b = op.operands
    constant_first = graph.array(a) is not None
    x, constant = (b, a) if constant_first else (a, b)
    array = graph.array(constant)
    if array is None or (constant_first and kind == "div"):
        return None
    shape = shape_of(op.results[0])
    if shape_of(x) != shape:
        return None
    full = (1,) * (len(shape) - array.ndim) + array.shape
    if any(dim != 1 for index, dim in enumerate(full) if index != axis):
        return None
    value = np.asarray(array, np.float64).reshape(-1)
    one, zero = np.ones_like(value), np.zeros_like(value)
    if kind == "add":
        return Affine(x, one, value, axis)
    if kind == "sub":
        return Affine(x, -one, value, axis) if constant_first else Affine(x, one, -value, axis)
    if kind == "mul":
        return Affine(x, value, zero, axis)
    if (value == 0).any():
        return None
    return Affine(x, 1 / value, zero, axis)


def linear_axis(op: Operation) -> int:
    """Return the channel axis of a linear operation's result (and operand)."""
    if isinstance(op, top.LinearOp):
        return len(shape_of(op.results[0])) - 1
    return channel_axis(op)


def _read(graph: Graph, op: top.TopOp) -> tuple[Vector, Vector, npt.DTypeLike] | str:
    """Return weights and bias (zeros if absent) in float64, and the weights' type."""
    weights = graph.array(op.operands[1])
    if weights is None:
        return "the weights are not constants"
    channels = shape_of(op.results[0])[linear_axis(op)]
    bias: Any = np.zeros(channels)
    if not top.is_absent(op.operands[2]):
        bias = graph.array(op.operands[2])
        if bias is None:
            return "the bias is not a constant"
    return np.asarray(weights, np.float64), np.asarray(bias, np.float64), weights.dtype


def _write(
    graph: Graph, op: top.TopOp, weights: Vector, bias: Vector, dtype: npt.DTypeLike
) -> str | None:
    """Give an operation new weights and bias; return a reason if they cannot be represented."""
    with np.errstate(over="ignore"):
        rounded = weights.astype(dtype), bias.astype(dtype)
    if not all(np.isfinite(array).all() for array in rounded):
        return "the folded constants overflow"
    weight_source, bias_source = op.operands[1].owner, op.operands[2].owner
    assert isinstance(weight_source, top.WeightOp)
    bias_name = (
        bias_source.layer_name if isinstance(bias_source, top.WeightOp) else f"{op.layer_name}.bias"
    )
    op.operands[1] = graph.weight(weight_source.layer_name, rounded[0], op)
    op.operands[2] = graph.weight(bias_name, rounded[1], op)
    for source in (weight_source, bias_source):
        if isinstance(source, Operation) and source.results[0].first_use is None:
            graph.remove(source)
    return None


def _output_view(op: top.TopOp, weights: Vector) -> tuple[Vector, tuple[int, ...]]:
    """Return weights with the output channels as axis 0, and the shape to go back to."""
    if not isinstance(op, top.ConvTransposeOp):
        return weights, weights.shape
    # (C, O / group, k...): output channel o of group g stands in column o % (O / group).
    group = op.attrs.integer("group")
    inner, per_group, *kernel = weights.shape
    split = weights.reshape(group, inner // group, per_group, *kernel)
    moved = np.moveaxis(split, 2, 1).reshape(group * per_group, inner // group, *kernel)
    return moved, weights.shape


def _output_back(op: top.TopOp, moved: Vector, shape: tuple[int, ...]) -> Vector:
    """Invert `_output_view`."""
    if not isinstance(op, top.ConvTransposeOp):
        return moved
    group = op.attrs.integer("group")
    inner, per_group, *kernel = shape
    split = moved.reshape(group, per_group, inner // group, *kernel)
    return np.moveaxis(split, 1, 2).reshape(shape)


def fold_after(graph: Graph, producer: top.TopOp, affine: Affine) -> str | None:
    """Fold `affine`, applied to `producer`'s result, into `producer`; return why not, or None.

    The caller has checked that nothing else uses the result.
    """
    if has_clamp(producer):
        return "an activation is fused into the layer before"
    if affine.axis != linear_axis(producer):
        return "it runs along another axis than the channels"
    read = _read(graph, producer)
    if isinstance(read, str):
        return read
    weights, bias, dtype = read
    scale = np.broadcast_to(affine.scale, bias.shape)
    given = producer.attributes.get("weight_scale")
    if isinstance(given, StringAttr):
        # The codes stay what they are, up to their sign.
        if (scale == 0).any():
            return "a factor of zero would lose the given scale of its weights"
        scales = graph.weights.get(given.data) * np.abs(scale)
        graph.set(
            producer,
            weight_scale=graph.weights.add(given.data, scales),
            bias_codes=None,
            bias_scale=None,
        )
    view, shape = _output_view(producer, weights)
    scaled = view * scale.reshape(-1, *[1] * (view.ndim - 1))
    return _write(
        graph,
        producer,
        _output_back(producer, scaled, shape),
        bias * scale + affine.shift,
        dtype,
    )


def fold_before(graph: Graph, affine: Affine, consumer: top.TopOp) -> str | None:
    """Fold `affine`, applied to `consumer`'s input, into `consumer`; return why not, or None."""
    if "weight_scale" in consumer.attributes:
        return "its weights have given scales, which do not vary along its inputs"
    if isinstance(consumer, top.ConvTransposeOp):
        return "folding forward into a transposed convolution is not exact at the border"
    if affine.axis != linear_axis(consumer):
        return "it runs along another axis than the channels"
    padded = isinstance(consumer, top.ConvOp) and any(consumer.attrs.ints("pads"))
    if padded and affine.shift.any():
        return "the layer behind pads with zeros, which the shift would move"
    read = _read(graph, consumer)
    if isinstance(read, str):
        return read
    weights, bias, dtype = read
    channels = shape_of(consumer.operands[0])[affine.axis]
    scale = np.broadcast_to(affine.scale, (channels,))
    shift = np.broadcast_to(affine.shift, (channels,))
    group = consumer.attrs.integer("group", 1)
    out, per_group = weights.shape[:2]
    kernel = [1] * (weights.ndim - 2)
    # Input channels that each output channel sees: its group's.
    own = np.repeat(np.arange(group), out // group)
    scales = scale.reshape(group, per_group)[own].reshape(out, per_group, *kernel)
    shifts = shift.reshape(group, per_group)[own].reshape(out, per_group, *kernel)
    extra = (weights * shifts).reshape(out, -1).sum(1)
    return _write(graph, consumer, weights * scales, bias + extra, dtype)
