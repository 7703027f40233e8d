"""What a layer costs at the least on a target (docs/concepts/bound.md): two figures.

Its *roofline* is the best mapping that the instructions have (`schedule/mapping.py`); its *floor*
holds for every program of the machine, whatever compiles it: only what can be proven counts, no
choice of tiles, of packing or of order. `report/network.py` makes the network's of them, with what
must still happen after the last of a layer's work and after the last of its weights. What may be
done as part of the layer before (a table, a clamp) or by DMA alone (a reshape, a concatenation)
counts nothing.
"""

from __future__ import annotations

from math import ceil, prod
from typing import Any

import numpy as np
import numpy.typing as npt
from xdsl.dialects import func
from xdsl.dialects.builtin import f16, i32
from xdsl.ir import Operation, SSAValue

from tilewright.dialects.quant import i4, shape_of
from tilewright.ir.weights import WeightStore
from tilewright.schedule.mapping import Mapping, Reduction, best_mapping, maxima, product_cycles
from tilewright.schedule.reach import (
    ELEMENTWISE,
    WINDOWS,
    After,
    Axis,
    Cost,
    Reach,
    axes_of,
    group_of,
    text_of,
)
from tilewright.schedule.rows import row_cycles
from tilewright.spec.hardware import Hardware

I64 = npt.NDArray[np.int64]

_CONSTANTS = ("top.weight", "top.none")


def layer_bounds(
    main: func.FuncOp,
    weights: WeightStore,
    hardware: Hardware,
    sram_bytes: dict[str, int],
    nests: dict[str, str],
) -> list[dict[str, Any]]:
    """Return one record a layer of a partitioned integer graph, in order (see `codegen.program`).

    Args:
        main: the quant level's `@main`.
        weights: its constants.
        hardware: the target.
        sram_bytes: SRAM use by layer, for the record.
        nests: the layer in whose nest a layer runs, where that is another one; for the record.
    """
    ops = [
        op
        for op in main.body.block.ops
        if op.name not in _CONSTANTS and not isinstance(op, func.ReturnOp)
    ]
    traffic = Traffic(weights)
    work = [array_floor(op, hardware) for op in ops]
    moved = [traffic.of(op) for op in ops]
    mappings = [array_mapping(op, hardware) for op in ops]
    costs = [
        Cost(
            kernel,
            max(mapping.cycles if mapping else 0, floor),
            vector_roofline(op, hardware),
            floor,
            vector_floor(op, hardware),
        )
        for op, mapping, (_, floor), (_, kernel) in zip(ops, mappings, work, moved, strict=True)
    ]
    # A tensor's rows and columns are found by its shape: NHWC only, as everything on the chip is.
    traced = not any(
        text_of(op, "layout") == "nchw" for op in ops if text_of(op, "device") == "tpu"
    )
    reach = Reach(ops if traced else [], costs if traced else [])
    records: list[dict[str, Any]] = []
    for at, (op, cost) in enumerate(zip(ops, costs, strict=True)):
        element = reach.after_element(at) if traced else After()
        weight = reach.after_weight(at) if traced else After()
        name = text_of(op, "name")
        records.append(
            {
                "name": name,
                "op": op.name,
                "device": text_of(op, "device"),
                "macs": work[at][0],
                "array_cycles": cost.array,
                "padded_cycles": padded_work(op, hardware),
                "vector_cycles": cost.vector,
                "mapping": str(mappings[at] or ""),
                "array_floor": cost.array_floor,
                "vector_floor": cost.vector_floor,
                "min_ddr_bytes": moved[at][0],
                "kernel_bytes": cost.weights,
                "weights_after": element.weights,
                "array_after": weight.array,
                "vector_after": weight.vector,
                "array_floor_after": weight.array_floor,
                "vector_floor_after": weight.vector_floor,
                "sram_bytes": sram_bytes.get(name, 0),
                "reason": text_of(op, "host"),
                "nest": nests.get(name, ""),
            }
        )
    return records


def array_floor(op: Operation, hardware: Hardware) -> tuple[int, int]:
    """Return multiply-accumulates, padding included, and least array cycles (0 for other ops).

    In a cycle the array takes `n` elements of activations (its rows, or what a word holds), and
    gives each of them to all `N` columns; a column works for one result. See docs/concepts/bound.md
    for the three counts.
    """
    kind = op.name.split(".")[-1]
    if text_of(op, "device") != "tpu" or not op.results:
        return 0, 0
    result = shape_of(op.results[0])
    size, taken = hardware.array_size, _taken(op.operands[0], hardware)
    if kind in ("conv", "avg_pool") and len(result) == 4:
        rows, columns = axes_of(op)
        channels = result[-1 if text_of(op, "layout") == "nhwc" else 1]
        depth = shape_of(op.operands[1])[1] if kind == "conv" else 1
        fan_out = channels // group_of(op) if kind == "conv" else 1
        macs = prod(result) * depth * rows.kernel * columns.kernel
        made = result[0] * channels * _slots(_taps(rows), _taps(columns), depth, taken) / size
        read_channels = depth * channels // fan_out
        fed = _slots(rows.uses(), columns.uses(), fan_out, size)
        fed = result[0] * read_channels * fed / taken
        held = 0.0
        if kind == "conv":
            held = live_taps(op) * channels * depth / _held(op.operands[1], taken, hardware)
        return macs, ceil(max(made, fed, held))
    if kind == "linear":
        columns, depth = shape_of(op.operands[1])
        rows = prod(result) // columns
        made = rows * columns * ceil(depth / taken) / size
        fed = rows * depth * ceil(columns / size) / taken
        held = columns * depth / _held(op.operands[1], taken, hardware)
        return rows * columns * depth, ceil(max(made, fed, held))
    if kind == "matmul":
        depth = shape_of(op.operands[1])[-2]
        macs = prod(result) * depth
        made = prod(result) * ceil(depth / taken) / size
        counts = [prod(shape_of(value)) for value in op.operands[:2]]
        # Either operand may be the one that the array holds.
        ways = [
            max(fed * ceil(macs / fed / size), held) / taken for fed, held in (counts, counts[::-1])
        ]
        return macs, ceil(max(made, min(ways)))
    return 0, 0


def array_mapping(op: Operation, hardware: Hardware) -> Mapping | None:
    """Return the best mapping of an op on the array, if it needs it."""
    kind = op.name.split(".")[-1]
    if text_of(op, "device") != "tpu" or not op.results:
        return None
    result, item = shape_of(op.results[0]), _item_bytes(op.operands[0])
    if kind in ("conv", "avg_pool") and len(result) == 4:
        rows, columns = axes_of(op)
        last = text_of(op, "layout") == "nhwc"
        source, channels = (
            shape_of(value)[-1 if last else 1] for value in (op.operands[0], op.results[0])
        )
        # Windows may read nothing but padding: the array takes a step for that too.
        live = [max(1, int(axis.inside().any(axis=0).sum())) for axis in (rows, columns)]
        read = int((rows.uses() > 0).sum() * (columns.uses() > 0).sum())
        work = Reduction(
            pixels=prod(result) // channels,
            columns=columns.target,
            in_channels=source,
            out_channels=channels,
            group=group_of(op) if kind == "conv" else channels,
            kernel=(live[0], live[1]),
            stride=columns.stride,
            dilation=columns.dilation,
            inputs=result[0] * read,
            element_bytes=item,
        )
        return best_mapping(hardware, work)
    if kind == "linear":
        columns, depth = shape_of(op.operands[1])
        rows = prod(result) // columns
        return best_mapping(hardware, Reduction(rows, rows, depth, columns, element_bytes=item))
    if kind == "matmul":
        left, right = (shape_of(value) for value in op.operands[:2])
        depth, rows, columns = left[-1], prod(result) // right[-1], prod(result) // left[-2]
        # Either operand may be the one that the array holds.
        cycles = min(
            product_cycles(hardware, rows, depth, right[-1], prod(right[:-2]), item),
            product_cycles(hardware, columns, depth, left[-2], prod(left[:-2]), item),
        )
        return Mapping(cycles, 1, 1, 1)
    return None


def padded_work(op: Operation, hardware: Hardware) -> int:
    """Return the array cycles of an op's products padded to whole blocks, one result pixel a pass.

    Depthwise takes the diagonal. A step takes the longer of its pixels and the rows of its weights.
    """
    kind = op.name.split(".")[-1]
    if text_of(op, "device") != "tpu" or not op.results:
        return 0
    result, size = shape_of(op.results[0]), hardware.array_size
    if kind in ("conv", "avg_pool") and len(result) == 4:
        rows, columns = axes_of(op)
        taps = rows.kernel * columns.kernel
        channels = result[-1 if text_of(op, "layout") == "nhwc" else 1]
        pixels = prod(result) // channels
        depth = shape_of(op.operands[1])[1] if kind == "conv" else 1
        group = group_of(op) if kind == "conv" else channels
        if group > 1 and depth == 1 and channels == group:
            return pixels * taps * ceil(channels / size)
        of_group = channels // group
        pack = max(1, min(group, size // depth, size // of_group)) if group > 1 else 1
        blocks = ceil(group / pack) * ceil(pack * of_group / size)
        deep = pack * depth * taps
        return blocks * max(pixels * ceil(deep / size), deep)
    if kind in ("linear", "matmul"):
        shape = shape_of(op.operands[1])
        columns, depth = shape if kind == "linear" else shape[:-3:-1]
        rows = prod(result) // columns
        return ceil(columns / size) * max(rows * ceil(depth / size), depth)
    return 0


def _taken(value: SSAValue, hardware: Hardware) -> int:
    """Return the elements a port hands to the array, or to the vector unit, in a cycle."""
    return min(hardware.array_size, hardware.sram_word_bytes // _item_bytes(value))


def _held(weights: SSAValue, taken: int, hardware: Hardware) -> int:
    """Return the weights that enter the array in a cycle: of 4 bits a word holds twice as many."""
    return min(hardware.array_size, 2 * taken) if _half_bytes(weights) else taken


def _half_bytes(value: SSAValue) -> bool:
    return getattr(value.type, "element_type", None) == i4


def _taps(axis: Axis) -> I64:
    """Return how many taps of each window lie inside the operand: `[target]`."""
    return axis.inside().sum(axis=1)


def _slots(rows: I64, columns: I64, factor: int, size: int) -> int:
    """Return the sum of `ceil(row * column * factor / size)` over all pairs."""
    row_values, row_counts = np.unique(rows, return_counts=True)
    column_values, column_counts = np.unique(columns, return_counts=True)
    products = np.multiply.outer(row_values, column_values) * factor
    counts = np.multiply.outer(row_counts, column_counts)
    return int((-(-products // size) * counts).sum())


def live_taps(op: Operation) -> int:
    """Return the kernel positions of a convolution that ever read anything but padding."""
    rows, columns = (int(axis.inside().any(axis=0).sum()) for axis in axes_of(op))
    return rows * columns


def vector_roofline(op: Operation, hardware: Hardware) -> int:
    """Return the vector unit's cycles of an op by the best way known (0 where it need not work).

    Maxima one axis after the other, each of windows that share comparisons; all else takes what
    any program does.
    """
    if text_of(op, "device") != "tpu" or op.name.split(".")[-1] != "max_pool":
        return vector_floor(op, hardware)
    shape = shape_of(op.results[0])
    if len(shape) != 4:
        return 0
    rows, columns = axes_of(op)
    images, channels = shape[0], shape[-1 if text_of(op, "layout") == "nhwc" else 1]
    taken = _taken(op.results[0], hardware)
    # Whole rows are dense; pixels apart by a stride are a vector each, or several.
    dense = channels / taken
    across = dense if columns.stride == 1 else ceil(channels / taken)
    down, along = maxima(rows.kernel, rows.stride), maxima(columns.kernel, columns.stride) * across
    # The pass over one axis is made for what the other still reads.
    high, wide = (int((axis.uses() > 0).sum()) for axis in (rows, columns))
    cycles = min(
        high * columns.target * along + rows.target * columns.target * down * dense,
        rows.target * wide * down * dense + rows.target * columns.target * along,
    )
    return max(ceil(images * cycles), vector_floor(op, hardware))


def vector_floor(op: Operation, hardware: Hardware) -> int:
    """Return the least cycles of the vector unit of an op (0 where it need not work).

    It writes at most a vector, and a word, a cycle; a maximum of many takes a cycle for every two
    vectors that become one; a linear resize reads four neighbours a pixel; a softmax or layer
    normalisation takes its passes over every row.
    """
    if text_of(op, "device") != "tpu" or not op.results:
        return 0
    kind = op.name.split(".")[-1]
    result = op.results[0]
    shape, taken = shape_of(result), _taken(result, hardware)
    if kind == "max_pool" and len(shape) == 4:
        channels = shape[-1 if text_of(op, "layout") == "nhwc" else 1]
        return ceil(shape[0] * channels * _comparisons(*axes_of(op)) / taken)
    if kind == "resize" and len(shape) == 4:
        channels = shape[-1 if text_of(op, "layout") == "nhwc" else 1]
        linear = text_of(op, "mode") == "linear"
        return prod(shape) // channels * 4 * ceil(channels / taken) if linear else 0
    if kind in ("softmax", "layer_norm"):
        size = shape[-1] if kind == "softmax" else shape_of(op.operands[1])[0]
        return row_cycles(hardware, size, taken, kind == "softmax") * (prod(shape) // size)
    if kind in ELEMENTWISE or kind in ("conv", "avg_pool", "linear", "matmul"):
        return ceil(prod(shape) / taken)
    return 0


def _comparisons(rows: Axis, columns: Axis) -> int:
    """Return the least comparisons of two values that a channel's maxima take.

    A comparison joins two values, so that `I` inputs that hang together take `I - 1`; and every
    maximum of more than one input that is not another one's twin takes one of its own.
    """
    parts: list[tuple[int, int, int, int]] = []
    for axis in (rows, columns):
        inside, at = axis.inside(), axis.positions()
        windows = {tuple(at[r][inside[r]].tolist()) for r in range(axis.target)} - {()}
        part: dict[int, set[int]] = {}
        for window in windows:
            joined = set(window).union(*(part[place] for place in window if place in part))
            part.update(dict.fromkeys(joined, joined))
        pieces = len({id(piece) for piece in part.values()})
        parts.append((len(part), pieces, len(windows), sum(len(window) == 1 for window in windows)))
    inputs, pieces, windows, single = (a * b for a, b in zip(*parts, strict=True))
    return max(inputs - pieces, windows - single)


class Traffic:
    """The DDR bytes no schedule can avoid, every constant and every tensor counted once.

    Constants may have any values: equal or uniform ones are not looked for.
    """

    def __init__(self, weights: WeightStore) -> None:
        self.weights = weights
        self.seen: set[str | SSAValue] = set()

    def of(self, op: Operation) -> tuple[int, int]:
        """Return an op's bytes, and how many of them are kernel weights.

        Constants, and the tensors that pass between host and chip. A tensor between two layers of
        the chip counts nothing: it can be made and used up a few rows at a time.
        """
        if text_of(op, "device") != "tpu":
            return 0, 0
        total = kernel = 0
        for index, value in enumerate(op.operands):
            owner = value.owner
            if not isinstance(owner, Operation) or owner.name == "top.none":
                continue
            if owner.name == "top.weight":
                size = self._constant(op, index, text_of(owner, "name"))
                total += size
                if index == 1 and op.name.split(".")[-1] in ("conv", "linear"):
                    kernel = size
            elif text_of(owner, "device") != "tpu" and value not in self.seen:
                self.seen.add(value)
                total += _read(op, value)
        for value in op.results:
            if any(text_of(use.operation, "device") != "tpu" for use in value.uses):
                total += prod(shape_of(value)) * _item_bytes(value)
        return total, kernel

    def _constant(self, op: Operation, index: int, name: str) -> int:
        """Return the bytes of a constant that must be loaded."""
        kind = op.name.split(".")[-1]
        wide = kind == "linear" and _item_bytes(op.results[0]) == 4
        if wide and index > 2:
            # The sums themselves are the result: nothing is multiplied or shifted.
            return 0
        if name in self.seen:
            return 0
        self.seen.add(name)
        array = self.weights.get(name)
        if index != 1 or kind not in ("conv", "linear"):
            return array.nbytes
        count = array.size
        if kind == "conv":
            taps = prod(array.shape[2:])
            count = count // taps * live_taps(op)
        if _half_bytes(op.operands[1]):
            return -(-count // 2)
        return count * min(array.itemsize, _item_bytes(op.operands[0]))


def _read(op: Operation, value: SSAValue) -> int:
    """Return the bytes of a tensor from the host that an op cannot do without."""
    shape, size = shape_of(value), prod(shape_of(value))
    if op.name.split(".")[-1] in WINDOWS and len(shape) == 4:
        rows, columns = axes_of(op)
        places = int((rows.uses() > 0).sum() * (columns.uses() > 0).sum())
        size = size // (rows.source * columns.source) * places
    else:
        size = min(size, sum(prod(shape_of(result)) for result in op.results))
    return size * _item_bytes(value)


def _item_bytes(value: SSAValue) -> int:
    """Return the bytes of an element on the chip: codes take one, fp16 two, sums four."""
    element = getattr(value.type, "element_type", None)
    return 2 if element == f16 else 4 if element == i32 else 1
