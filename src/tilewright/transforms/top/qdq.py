"""What the passes on quantised models share: reading scales, exact arithmetic on constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from xdsl.dialects.builtin import FloatAttr, IntegerAttr, f64, i32
from xdsl.ir import Attribute, Operation, SSAValue

from tilewright.dialects import top
from tilewright.ir.weights import Array
from tilewright.transforms.top.graph import Graph, element_of, shape_of

SMALLEST, LARGEST = 2.0**-126, 2.0**127
"""Scales outside are of no use to fixed-point multipliers (see `!quant.uniform`)."""


@dataclass(frozen=True)
class Edge:
    """Scale and zero point of int8 codes; those of uint8 codes are 128 less, and mean the same."""

    scale: float
    zero: int

    def attributes(self) -> dict[str, Attribute]:
        """Return the attributes that give an operation's result this scale."""
        return {
            "quant_scale": FloatAttr(self.scale, f64),
            "quant_zero": IntegerAttr(self.zero, i32),
        }


def edge_of(graph: Graph, op: top.QuantizeLinearOp | top.DequantizeLinearOp) -> Edge | str:
    """Return the int8 codes that a Q or DQ makes or reads, or why the chip has no such codes."""
    scale = graph.array(op.scale)
    if scale is None:
        return "its scale is computed at run time"
    codes = op.results[0] if isinstance(op, top.QuantizeLinearOp) else op.operands[0]
    dtype = top.numpy_dtype(element_of(codes))
    if dtype.name not in ("int8", "uint8"):
        return f"its codes are {dtype}; the chip's activations have 8 bits"
    if scale.ndim:
        return "it has a scale for each channel; activations have one"
    zero: int | None = 0
    if not top.is_absent(op.zero):
        array = graph.array(op.zero)
        if array is None:
            return "its zero point is computed at run time"
        zero = int(array.reshape(-1)[0])
    value = float(scale.reshape(-1)[0])
    if not SMALLEST <= value < LARGEST:
        return f"its scale is {value:g}, which no multiplier spans"
    return Edge(value, zero - 128 if dtype == np.uint8 else zero)


def given_edge(op: Operation) -> Edge | None:
    """Return the scale an operation's result was given before."""
    scale, zero = op.attributes.get("quant_scale"), op.attributes.get("quant_zero")
    if not isinstance(scale, FloatAttr):
        return None
    return Edge(scale.value.data, zero.value.data if isinstance(zero, IntegerAttr) else 0)


def spread(array: Array, op: top.TopOp, shape: tuple[int, ...]) -> Array:
    """Return scales or zero points of a Q or DQ as an array that broadcasts to `shape`.

    Blocks are repeated; what is beyond the tensor's end is cut off. The result is never larger than
    the tensor.
    """
    if array.ndim == 0:
        return array
    axis, block = op.attrs.integer("axis"), op.attrs.integer("block_size", 0)
    if block:
        # A block longer than the axis is one block.
        block = min(block, shape[axis])
        index = np.arange(shape[axis]) // max(1, block)
        return np.take(array, index, axis=axis)
    form = [1] * len(shape)
    form[axis] = shape[axis]
    return array.reshape(form)


def quantise_constant(
    x: Array, scale: Array, zero: Array, dtype: np.dtype[Any]
) -> npt.NDArray[np.integer[Any]]:
    """Return `saturate(round_half_even(x / scale) + zero)`, the division in float32."""
    info = np.iinfo(dtype)
    with np.errstate(all="ignore"):
        ratio = np.rint(x.astype(np.float32) / scale.astype(np.float32)).astype(np.float64)
    ratio = np.nan_to_num(ratio, nan=0.0, posinf=2.0**40, neginf=-(2.0**40))
    return np.clip(ratio + zero.astype(np.float64), info.min, info.max).astype(dtype)


@dataclass(frozen=True)
class Codes:
    """Constant codes with the scale and zero point of every element, all of one shape."""

    codes: Array
    scale: Array
    zero: Array

    @property
    def steps(self) -> npt.NDArray[np.signedinteger[Any]]:
        """Codes minus zero points: the real value in units of the scale."""
        wide = np.int16 if self.codes.dtype.itemsize == 1 else np.int64
        return self.codes.astype(wide) - self.zero.astype(wide)

    @property
    def real(self) -> npt.NDArray[np.float32]:
        """The real values, float32 as ONNX computes them."""
        return self.steps.astype(np.float32) * self.scale.astype(np.float32)

    def moved(self, op: Operation) -> Codes:
        """Return the codes behind a reshape or transpose."""

        def move(array: Array) -> Array:
            if isinstance(op, top.TransposeOp):
                return array.transpose(op.attrs.ints("perm"))
            return array.reshape(shape_of(op.results[0]))

        return Codes(move(self.codes), move(self.scale), move(self.zero))


def constant_codes(graph: Graph, value: SSAValue) -> Codes | None:
    """Return the codes that a value is computed from, if they are constants.

    `value` is a DQ of constants, reshaped and transposed at will.
    """
    movers: list[Operation] = []
    while isinstance(value.owner, top.ReshapeOp | top.TransposeOp):
        movers.append(value.owner)
        value = value.owner.operands[0]
    op = value.owner
    if not isinstance(op, top.DequantizeLinearOp):
        return None
    codes, scale = graph.array(op.x), graph.array(op.scale)
    if codes is None or scale is None:
        return None
    zero: Array | None = np.zeros((), codes.dtype)
    if not top.is_absent(op.zero):
        zero = graph.array(op.zero)
        if zero is None:
            return None
    shape = codes.shape
    found = Codes(
        codes,
        np.broadcast_to(spread(scale, op, shape), shape),
        np.broadcast_to(spread(zero, op, shape), shape),
    )
    for mover in reversed(movers):
        found = found.moved(mover)
    return found
