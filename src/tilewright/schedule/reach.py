"""What must still happen after one element, or one weight, of a layer (docs/concepts/bound.md).

From a layer's result one element is taken, at every row and column in turn, and followed through
the layers behind it. A rectangle of rows and columns is kept that surely depends on it, and whether
it does so in all channels. Where nothing sure is known (an operation that moves elements, dilated
windows) the trace is lost, which only weakens the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
from xdsl.dialects.builtin import StringAttr, TensorType
from xdsl.ir import Operation, SSAValue

from tilewright.dialects.quant import int_list, int_of, shape_of

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

ELEMENTWISE = frozenset(("add", "sub", "mul", "min", "max", "div"))
"""Kinds of operations with two operands, each result element one lane's work."""
_SAME_PLACE = ELEMENTWISE | {
    "lut", "requantize", "relu", "clip", "leaky_relu", "sigmoid", "tanh", "hard_sigmoid",
    "hard_swish", "silu", "gelu", "identity",
}  # fmt: skip
"""Kinds whose result at a place depends on the operands there."""
WINDOWS = frozenset(("conv", "avg_pool", "max_pool"))


@dataclass(frozen=True)
class Axis:
    """Windows along one axis."""

    source: int
    """Positions of the operand."""
    target: int
    """Positions of the result."""
    kernel: int
    stride: int
    dilation: int
    before: int
    """Padding before the operand's first position."""

    def inside(self) -> npt.NDArray[np.bool_]:
        """Return whether tap k of window r reads inside the operand: `[target, kernel]`."""
        at = self.positions()
        return (at >= 0) & (at < self.source)

    def positions(self) -> I64:
        """Return where tap k of window r reads: `[target, kernel]`."""
        windows = np.arange(self.target)[:, None] * self.stride - self.before
        return windows + np.arange(self.kernel)[None] * self.dilation

    def uses(self) -> I64:
        """Return how many windows read each position of the operand: `[source]`."""
        return np.bincount(self.positions()[self.inside()], minlength=self.source)

    def reached(self, low: I64, high: I64) -> tuple[I64, I64]:
        """Return the windows that read anything of `low..high` (dilation 1); may be empty."""
        first = -((self.kernel - 1 - self.before - low) // self.stride)
        last = (high + self.before) // self.stride
        none = low > high
        return (
            np.where(none, 1, np.maximum(first, 0)),
            np.where(none, 0, np.minimum(last, self.target - 1)),
        )

    def taps(self, low: I64, high: I64) -> I64:
        """Return how many taps some window uses on `low..high`."""
        if (self.kernel, self.stride, self.before) == (1, 1, 0):
            return (low <= high).astype(np.int64)
        count = np.zeros_like(low)
        for tap in range(self.kernel):
            shift = self.before - tap * self.dilation
            first = np.maximum(-((-(low + shift)) // self.stride), 0)
            last = np.minimum((high + shift) // self.stride, self.target - 1)
            count += (first <= last) & (low <= high)
        return count


def axes_of(op: Operation) -> tuple[Axis, Axis]:
    """Return rows and columns of a convolution's or a pooling's windows."""
    where = (1, 2) if text_of(op, "layout") == "nhwc" else (2, 3)
    source, target = shape_of(op.operands[0]), shape_of(op.results[0])
    if op.name.endswith(".conv"):
        kernel = list(shape_of(op.operands[1])[2:])
    else:
        kernel = numbers(op, "kernel")
    strides, pads = numbers(op, "strides"), numbers(op, "pads")
    dilations = numbers(op, "dilations") if has(op, "dilations") else [1, 1]
    rows, columns = (
        Axis(source[axis], target[axis], kernel[k], strides[k], dilations[k], pads[k])
        for k, axis in enumerate(where)
    )
    return rows, columns


def text_of(op: Operation, key: str) -> str:
    """Return an attribute's text, or nothing."""
    value = op.attributes.get(key, op.properties.get(key))
    return value.data if isinstance(value, StringAttr) else ""


def numbers(op: Operation, key: str) -> list[int]:
    """Return an attribute that lists integers."""
    value = op.attributes.get(key, op.properties.get(key))
    assert value is not None, (op.name, key)
    return int_list(value)


def has(op: Operation, key: str) -> bool:
    """Tell whether an op has an attribute."""
    return key in op.attributes or key in op.properties


def group_of(op: Operation) -> int:
    """Return the groups of a convolution."""
    value = op.attributes.get("group", op.properties.get("group"))
    assert value is not None, op.name
    return int_of(value)


@dataclass(frozen=True)
class Trace:
    """What surely depends on each candidate in one tensor of `height` x `width` positions."""

    height: int
    width: int
    rows: tuple[I64, I64]
    """First and last row by row candidate; empty where the last is the smaller."""
    columns: tuple[I64, I64]
    channels: bool
    """Whether all channels do."""

    @property
    def whole(self) -> bool:
        """Every element depends on every candidate."""
        return bool(
            self.channels
            and (self.rows[0] == 0).all()
            and (self.rows[1] == self.height - 1).all()
            and (self.columns[0] == 0).all()
            and (self.columns[1] == self.width - 1).all()
        )

    @property
    def extent(self) -> int:
        """Rows and columns over all candidates."""
        spans = (self.rows, self.columns)
        return sum(int(np.maximum(last - first + 1, 0).sum()) for first, last in spans)


@dataclass
class After:
    """What follows one element or one weight, whichever is chosen."""

    weights: int = 0
    """Bytes of kernel weights that some work after it uses."""
    array: int = 0
    """Array cycles of the layers that take nothing but what depends on it."""
    vector: int = 0


@dataclass(frozen=True)
class Cost:
    """What a layer asks for."""

    weights: int
    """Bytes of kernel weights."""
    array: int
    """Cycles."""
    vector: int
    """Cycles."""


class Reach:
    """A graph's layers, and what follows what."""

    def __init__(self, ops: Sequence[Operation], costs: Sequence[Cost]) -> None:
        self.ops, self.costs = ops, costs
        self.kinds = [op.name.split(".")[-1] if _followed(op) else "" for op in ops]
        self.axes = [
            axes_of(op) if kind in WINDOWS else (Axis(1, 1, 1, 1, 1, 0),) * 2
            for op, kind in zip(ops, self.kinds, strict=True)
        ]
        self.sizes = [_image(op.results[0]) if len(op.results) == 1 else None for op in ops]

    def after_element(self, at: int) -> After:
        """Return what follows the element of a layer's result behind which the least follows."""
        size = self.sizes[at]
        if size is None:
            return After()
        rows, columns = np.arange(size[0]), np.arange(size[1])
        return self._follow(at, Trace(*size, (rows, rows), (columns, columns), False))

    def after_weight(self, at: int) -> After:
        """Return what follows the kernel weight of a layer behind which the least follows."""
        size = self.sizes[at]
        if size is None:
            return After()
        zero = np.zeros(1, np.int64)
        spans: list[tuple[I64, I64]] = [(zero, zero)] * 2
        if self.kinds[at] == "conv":
            for number, axis in enumerate(self.axes[at]):
                inside = axis.inside()
                # A tap that reads nothing but padding is no weight that anything needs.
                inside = inside[:, inside.any(axis=0)]
                last = len(inside) - 1 - inside[::-1].argmax(axis=0)
                spans[number] = inside.argmax(axis=0), last
        return self._follow(at, Trace(*size, spans[0], spans[1], False))

    def _follow(self, at: int, start: Trace) -> After:
        traces: dict[SSAValue, Trace] = {self.ops[at].results[0]: start}
        found = After()
        row_shares: list[F64] = []
        column_shares: list[F64] = []
        for number in range(at + 1, len(self.ops)):
            op, cost = self.ops[number], self.costs[number]
            known = [traces[value] for value in op.operands if value in traces]
            if not known:
                continue
            source = traces.get(op.operands[0])
            if cost.weights and source is not None and source.channels:
                rows, columns = self.axes[number]
                row_shares.append(cost.weights * rows.taps(*source.rows) / rows.kernel)
                column_shares.append(columns.taps(*source.columns) / columns.kernel)
            if cost.array and any(trace.whole for trace in known):
                found.array += cost.array
            result = self._through(number, source, traces)
            if result is not None:
                traces[op.results[0]] = result
                found.vector += cost.vector if cost.vector and result.whole else 0
        if row_shares:
            found.weights = int((np.array(row_shares).T @ np.array(column_shares)).min())
        return found

    def _through(
        self, number: int, source: Trace | None, traces: dict[SSAValue, Trace]
    ) -> Trace | None:
        """Return the trace of an op's result, or None where it is lost.

        Args:
            number: the op's place.
            source: the trace of its first operand, if there is one.
            traces: those of all values.
        """
        op, kind, size = self.ops[number], self.kinds[number], self.sizes[number]
        if size is None:
            return None
        if kind in WINDOWS and source is not None:
            rows, columns = self.axes[number]
            if rows.dilation != 1 or columns.dilation != 1:
                return None
            return Trace(
                *size,
                rows.reached(*source.rows),
                columns.reached(*source.columns),
                source.channels or (kind == "conv" and group_of(op) == 1),
            )
        if kind == "linear" and source is not None and size == (1, 1):
            return Trace(1, 1, source.rows, source.columns, True)
        if kind == "reshape" and source is not None and size == (1, 1):
            every = (source.height, source.width) == (1, 1) or source.whole
            rows, columns = _one(source.rows), _one(source.columns)
            return Trace(1, 1, rows, columns, every and source.channels)
        if kind in _SAME_PLACE:
            found = [
                spread
                for value in op.operands
                if value in traces
                and (spread := _spread(value, traces[value], op.results[0])) is not None
            ]
            # Any of them is sure; their union need not be a rectangle.
            return max(found, key=lambda trace: (trace.channels, trace.extent), default=None)
        if kind == "concat":
            return _joined(op, size, traces)
        return None


def _followed(op: Operation) -> bool:
    """Tell whether a trace goes on through an op: what the chip does, windows of images only."""
    if text_of(op, "device") != "tpu" or len(op.results) != 1:
        return False
    return op.name.split(".")[-1] not in WINDOWS or len(shape_of(op.operands[0])) == 4


def _one(span: tuple[I64, I64]) -> tuple[I64, I64]:
    """Return the only position there is, or none where there was none."""
    zero = np.zeros_like(span[0])
    return zero, np.where(span[0] <= span[1], 0, -1)


def _spread(value: SSAValue, trace: Trace, result: SSAValue) -> Trace | None:
    """Return the trace of an operand in a result it is broadcast to."""
    shape, target = shape_of(value), shape_of(result)
    if shape == target:
        return trace
    size = _image(result)
    if size is None or len(shape) != 4 or len(target) != 4:
        return None
    if (trace.height, trace.width) != (1, 1) or prod(target) != prod(shape) * prod(size):
        return None
    spans = [
        (np.zeros_like(first), np.where(first <= last, length - 1, -1))
        for (first, last), length in zip((trace.rows, trace.columns), size, strict=True)
    ]
    return Trace(*size, spans[0], spans[1], trace.channels)


def _joined(op: Operation, size: tuple[int, int], traces: dict[SSAValue, Trace]) -> Trace | None:
    """Return the trace of a concatenation of channels."""
    known = [traces[value] for value in op.operands if value in traces]
    if any((trace.height, trace.width) != size for trace in known):
        return None
    if len(known) < len(op.operands) or not all(trace.channels for trace in known):
        best = max(known, key=lambda trace: trace.extent)
        return Trace(*size, best.rows, best.columns, False)
    spans = [
        (
            np.max([getattr(trace, name)[0] for trace in known], axis=0),
            np.min([getattr(trace, name)[1] for trace in known], axis=0),
        )
        for name in ("rows", "columns")
    ]
    return Trace(*size, spans[0], spans[1], True)


def _image(value: SSAValue) -> tuple[int, int] | None:
    """Return rows and columns of a tensor of codes: NHWC, or a vector of features."""
    if not isinstance(value.type, TensorType):
        return None
    shape = shape_of(value)
    if len(shape) == 4:
        return shape[1], shape[2]
    return (1, 1) if prod(shape[:-1]) == 1 else None
