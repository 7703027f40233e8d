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
Bits = npt.NDArray[np.bool_]
Span = tuple[I64, I64]
"""First and last position."""

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
    """What of one tensor surely depends on each candidate of each start.

    Candidates of all starts lie one behind the other. Where nothing is sure the span is empty.
    """

    height: int
    width: int
    rows: Span
    """First and last row by row candidate; empty where the last is the smaller."""
    columns: Span
    channels: Bits
    """Whether all channels do, by start."""


@dataclass(frozen=True)
class After:
    """What follows one element or one weight, whichever is chosen."""

    weights: int = 0
    """Bytes of kernel weights that some work after it uses."""
    array: int = 0
    """Array cycles of the layers that take nothing but what depends on it."""
    vector: int = 0
    array_floor: int = 0
    """The same of their `array_floor`."""
    vector_floor: int = 0


@dataclass(frozen=True)
class Cost:
    """What a layer asks for."""

    weights: int
    """Bytes of kernel weights."""
    array: int
    """Cycles."""
    vector: int
    """Cycles."""
    array_floor: int = 0
    """Cycles, by another count; both are followed at once."""
    vector_floor: int = 0

    @property
    def works(self) -> bool:
        """Whether it asks for the array or the vector unit at all."""
        return bool(self.array or self.vector or self.array_floor or self.vector_floor)


class Reach:
    """A graph's layers, and what follows what.

    All starts, an element and a weight of each layer, are followed in one pass over the graph.
    """

    def __init__(self, ops: Sequence[Operation], costs: Sequence[Cost]) -> None:
        self.ops, self.costs = ops, costs
        self.kinds = [op.name.split(".")[-1] if _followed(op) else "" for op in ops]
        self.axes = [
            axes_of(op) if kind in WINDOWS else (Axis(1, 1, 1, 1, 1, 0),) * 2
            for op, kind in zip(ops, self.kinds, strict=True)
        ]
        self.sizes = [_image(op.results[0]) if len(op.results) == 1 else None for op in ops]
        begins: dict[tuple[int, bool], tuple[Span, Span]] = {}
        for at, size in enumerate(self.sizes):
            if size is not None and costs[at].works:
                rows, columns = (np.arange(length) for length in size)
                begins[at, False] = (rows, rows), (columns, columns)
        self.elements = len(begins)
        for at, size in enumerate(self.sizes):
            if size is not None and costs[at].weights:
                begins[at, True] = self._of_weights(at)
        self.begins = begins
        self.found = self._follow() if begins else {}

    def after_element(self, at: int) -> After:
        """Return what follows the element of a layer's result behind which the least follows."""
        return self.found.get((at, False), After())

    def after_weight(self, at: int) -> After:
        """Return what follows the kernel weight of a layer behind which the least follows."""
        return self.found.get((at, True), After())

    def _of_weights(self, at: int) -> tuple[Span, Span]:
        """Return what of a layer's result depends on each of its taps."""
        zero = np.zeros(1, np.int64)
        spans: list[Span] = [(zero, zero)] * 2
        if self.kinds[at] == "conv":
            for number, axis in enumerate(self.axes[at]):
                inside = axis.inside()
                # A tap that reads nothing but padding is no weight that anything needs.
                inside = inside[:, inside.any(axis=0)]
                last = len(inside) - 1 - inside[::-1].argmax(axis=0)
                spans[number] = inside.argmax(axis=0), last
        return spans[0], spans[1]

    def _follow(self) -> dict[tuple[int, bool], After]:
        begins = list(self.begins)
        self.row_at, self.row_of = _segments([len(rows[0]) for rows, _ in self.begins.values()])
        self.column_at, self.column_of = _segments(
            [len(span[0]) for _, span in self.begins.values()]
        )
        of_layer: dict[int, list[int]] = {}
        for number, (at, _) in enumerate(begins):
            of_layer.setdefault(at, []).append(number)
        # Only an element's weights are asked for: its starts come first.
        rows_end = int((self.row_of < self.elements).sum())
        columns_end = int((self.column_of < self.elements).sum())
        traces: dict[SSAValue, Trace] = {}
        work = np.zeros((4, len(begins)), np.int64)
        shares: list[tuple[int, F64, F64]] = []
        for number, (op, cost) in enumerate(zip(self.ops, self.costs, strict=True)):
            known = [traces[value] for value in op.operands if value in traces]
            source = traces.get(op.operands[0]) if op.operands else None
            if cost.weights and source is not None:
                rows, columns = self.axes[number]
                low, high = (edge[:rows_end] for edge in source.rows)
                uses = rows.taps(low, high) * source.channels[self.row_of[:rows_end]]
                first, last = (edge[:columns_end] for edge in source.columns)
                across = columns.taps(first, last) / columns.kernel
                shares.append((number, cost.weights * uses / rows.kernel, across))
            if known and (cost.array or cost.array_floor):
                whole = np.any([self._whole(trace) for trace in known], axis=0)
                work[0] += cost.array * whole
                work[2] += cost.array_floor * whole
            result = self._through(number, source, traces) if known else None
            if result is not None and (cost.vector or cost.vector_floor):
                whole = self._whole(result)
                work[1] += cost.vector * whole
                work[3] += cost.vector_floor * whole
            starts = of_layer.get(number, [])
            if starts:
                result = self._begun(number, result, starts)
            if result is not None:
                traces[op.results[0]] = result
        used = self._used(begins, shares)
        return {
            begin: After(used.get(begin, 0), *(int(count) for count in work[:, number]))
            for number, begin in enumerate(begins)
        }

    def _begun(self, number: int, result: Trace | None, starts: list[int]) -> Trace:
        """Return the trace of a layer's result with what begins there."""
        size = self.sizes[number]
        assert size is not None
        if result is None:
            rows, columns = (
                (np.ones(count, np.int64), np.zeros(count, np.int64))
                for count in (len(self.row_of), len(self.column_of))
            )
            channels = np.zeros(len(self.row_at), np.bool_)
        else:
            rows, columns = (
                (span[0].copy(), span[1].copy()) for span in (result.rows, result.columns)
            )
            channels = result.channels.copy()
        channels[starts] = False
        spans = list(self.begins.values())
        for start in starts:
            for whole, part, at in zip(
                (rows, columns),
                spans[start],
                (self.row_at[start], self.column_at[start]),
                strict=True,
            ):
                for edge, values in zip(whole, part, strict=True):
                    edge[at : at + len(values)] = values
        return Trace(*size, rows, columns, channels)

    def _used(
        self, begins: list[tuple[int, bool]], shares: list[tuple[int, F64, F64]]
    ) -> dict[tuple[int, bool], int]:
        """Return the least weights that follow any element of each layer."""
        found: dict[tuple[int, bool], int] = {}
        if not shares:
            return found
        layers = np.array([number for number, _, _ in shares])
        rows, columns = (np.array([share[k] for share in shares]) for k in (1, 2))
        for start in range(self.elements):
            behind = int(np.searchsorted(layers, begins[start][0], "right"))
            row, column = self.row_at[start], self.column_at[start]
            spans = self.begins[begins[start]]
            mine = rows[behind:, row : row + len(spans[0][0])]
            across = columns[behind:, column : column + len(spans[1][0])]
            found[begins[start]] = int((mine.T @ across).min())
        return found

    def _whole(self, trace: Trace) -> Bits:
        """Return by start whether every element depends on every candidate."""
        (top, bottom), (left, right) = trace.rows, trace.columns
        rows = (top == 0) & (bottom == trace.height - 1)
        columns = (left == 0) & (right == trace.width - 1)
        return (
            trace.channels
            & np.logical_and.reduceat(rows, self.row_at)
            & np.logical_and.reduceat(columns, self.column_at)
        )

    def _extent(self, trace: Trace) -> I64:
        """Return by start rows and columns over all candidates; 0 where the trace is lost."""
        (top, bottom), (left, right) = trace.rows, trace.columns
        rows = np.add.reduceat(np.maximum(bottom - top + 1, 0), self.row_at)
        return rows + np.add.reduceat(np.maximum(right - left + 1, 0), self.column_at)

    def _where(self, chosen: Bits, this: Trace, other: Trace) -> Trace:
        """Return `this` for the starts that are chosen, `other` for the rest."""
        rows, columns = chosen[self.row_of], chosen[self.column_of]
        return Trace(
            this.height,
            this.width,
            (
                np.where(rows, this.rows[0], other.rows[0]),
                np.where(rows, this.rows[1], other.rows[1]),
            ),
            (
                np.where(columns, this.columns[0], other.columns[0]),
                np.where(columns, this.columns[1], other.columns[1]),
            ),
            np.where(chosen, this.channels, other.channels),
        )

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
            every = kind == "conv" and group_of(op) == 1
            return Trace(
                *size,
                rows.reached(*source.rows),
                columns.reached(*source.columns),
                np.ones_like(source.channels) if every else source.channels,
            )
        if kind == "linear" and source is not None and size == (1, 1):
            return Trace(1, 1, source.rows, source.columns, np.ones_like(source.channels))
        if kind == "reshape" and source is not None and size == (1, 1):
            single = (source.height, source.width) == (1, 1)
            channels = source.channels if single else self._whole(source)
            return Trace(1, 1, _one(source.rows), _one(source.columns), channels)
        if kind in _SAME_PLACE:
            found = [
                spread
                for value in op.operands
                if value in traces
                and (spread := _spread(value, traces[value], op.results[0])) is not None
            ]
            # Any of them is sure; their union need not be a rectangle.
            return self._largest(found, True) if found else None
        if kind == "concat":
            return self._joined(op, size, traces)
        return None

    def _largest(self, found: Sequence[Trace], channels_first: bool) -> Trace:
        """Return by start the trace of the largest extent."""
        best, most = found[0], self._rank(found[0], channels_first)
        for trace in found[1:]:
            rank = self._rank(trace, channels_first)
            best, most = self._where(rank > most, trace, best), np.maximum(rank, most)
        return best

    def _rank(self, trace: Trace, channels_first: bool) -> I64:
        extent = self._extent(trace)
        return (
            np.where(trace.channels & (extent > 0), extent + _FAR, extent)
            if channels_first
            else extent
        )

    def _joined(
        self, op: Operation, size: tuple[int, int], traces: dict[SSAValue, Trace]
    ) -> Trace | None:
        """Return the trace of a concatenation of channels."""
        known = [traces[value] for value in op.operands if value in traces]
        if any((trace.height, trace.width) != size for trace in known):
            return None
        best = self._largest(known, False)
        part = Trace(*size, best.rows, best.columns, np.zeros_like(best.channels))
        if len(known) < len(op.operands):
            return part
        spans = [
            (
                np.max([getattr(trace, name)[0] for trace in known], axis=0),
                np.min([getattr(trace, name)[1] for trace in known], axis=0),
            )
            for name in ("rows", "columns")
        ]
        every = np.all([trace.channels for trace in known], axis=0)
        return self._where(every, Trace(*size, spans[0], spans[1], every), part)


_FAR = 1 << 40
"""More than any extent."""


def _segments(lengths: list[int]) -> tuple[I64, I64]:
    """Return where each start's candidates begin, and whose each candidate is."""
    counts = np.array(lengths, np.int64)
    return np.cumsum(counts) - counts, np.repeat(np.arange(len(counts)), counts)


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


def _image(value: SSAValue) -> tuple[int, int] | None:
    """Return rows and columns of a tensor of codes: NHWC, or a vector of features."""
    if not isinstance(value.type, TensorType):
        return None
    shape = shape_of(value)
    if len(shape) == 4:
        return shape[1], shape[2]
    return (1, 1) if prod(shape[:-1]) == 1 else None
