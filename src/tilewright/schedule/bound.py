"""The bound: the least a layer, and a network, can cost on a target (docs/concepts/bound.md).

Bound of a layer = the largest of its array cycles, its vector unit's cycles and its least DDR bytes
over DDR's peak bandwidth; bound of the network = the largest of the three sums over all layers.
Products are padded to whole blocks, results to whole vectors and words; what may be done as part of
the layer before it (a table, a clamp) or by DMA alone (a reshape, a concatenation) counts nothing.
"""

from __future__ import annotations

from math import ceil, prod
from typing import Any

from xdsl.dialects import func
from xdsl.dialects.builtin import ArrayAttr, DenseArrayBase, IntegerAttr, StringAttr, f16, i32
from xdsl.ir import Operation, SSAValue

from tilewright.dialects.quant import shape_of
from tilewright.ir.weights import WeightStore
from tilewright.spec.hardware import Hardware

_CONSTANTS = ("top.weight", "top.none")
_COPIES = ("top.reshape",)
_ELEMENTWISE = frozenset(("add", "sub", "mul", "min", "max", "div"))
"""Kinds of operations with two operands, each result element one lane's work."""


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
    records: list[dict[str, Any]] = []
    for op in main.body.block.ops:
        if op.name in _CONSTANTS or isinstance(op, func.ReturnOp):
            continue
        device = _text(op, "device")
        macs, cycles = array_work(op, hardware)
        records.append(
            {
                "name": _text(op, "name"),
                "op": op.name,
                "device": device,
                "macs": macs,
                "padded_cycles": cycles,
                "vector_cycles": vector_work(op, hardware),
                "min_ddr_bytes": least_ddr_bytes(op, weights, hardware) if device == "tpu" else 0,
                "sram_bytes": sram_bytes.get(_text(op, "name"), 0),
                "reason": _text(op, "host"),
                "nest": nests.get(_text(op, "name"), ""),
            }
        )
    return records


def bound_cycles(records: list[dict[str, Any]], hardware: Hardware) -> float:
    """Return the network's bound in core cycles."""
    array = sum(record["padded_cycles"] for record in records)
    vector = sum(record["vector_cycles"] for record in records)
    ddr = sum(record["min_ddr_bytes"] for record in records) / hardware.ddr_bytes_per_cycle
    return max(float(array), float(vector), ddr)


def vector_work(op: Operation, hardware: Hardware) -> int:
    """Return the least cycles of the vector unit of an op (0 where it need not work).

    One vector a cycle, and one word a cycle on each port: results of the array are requantised and
    written pixel by pixel, elementwise operations take whole tensors, a window reads each element.
    """
    if _text(op, "device") != "tpu" or not op.results:
        return 0
    kind = op.name.split(".")[-1]
    result = op.results[0]
    shape, item = shape_of(result), _item_bytes(result)
    if kind in ("conv", "avg_pool", "max_pool", "resize") and len(shape) == 4:
        channels = shape[-1 if _text(op, "layout") == "nhwc" else 1]
        pixels = prod(shape) // channels
        if kind == "max_pool":
            return shape[0] * _window_reads(op) * _pixel(channels, item, hardware)
        if kind == "resize" and _text(op, "mode") == "linear":
            pixels *= 4
        return pixels * _pixel(channels, item, hardware)
    if kind in ("linear", "matmul"):
        columns = shape[-1]
        return prod(shape) // columns * _pixel(columns, item, hardware)
    if kind in _ELEMENTWISE:
        return _pixel(prod(shape), item, hardware)
    return 0


def _pixel(elements: int, item: int, hardware: Hardware) -> int:
    """Return the cycles of a run of elements: vectors of all lanes, or the words they take."""
    return max(
        ceil(elements / hardware.vector_lanes), ceil(elements * item / hardware.sram_word_bytes)
    )


def _window_reads(op: Operation) -> int:
    """Return the pixels an image's windows read: at once, or along rows first, then columns."""
    where = (1, 2) if _text(op, "layout") == "nhwc" else (2, 3)
    source, target = shape_of(op.operands[0]), shape_of(op.results[0])
    kernel, strides, pads = (_numbers(op, key) for key in ("kernel", "strides", "pads"))
    dilations = _numbers(op, "dilations") if _has(op, "dilations") else [1, 1]
    # Padding is not read: positions inside the picture only.
    inside = [
        sum(
            0 <= place * stride - before + tap * step < source[axis]
            for place in range(target[axis])
            for tap in range(window)
        )
        for axis, window, stride, before, step in zip(
            where, kernel, strides, pads, dilations, strict=False
        )
    ]
    rows, columns = (target[axis] for axis in where)
    apart = min(
        source[where[0]] * inside[1] + columns * inside[0],
        source[where[1]] * inside[0] + rows * inside[1],
    )
    return min(inside[0] * inside[1], apart)


def _has(op: Operation, key: str) -> bool:
    return key in op.attributes or key in op.properties


def array_work(op: Operation, hardware: Hardware) -> tuple[int, int]:
    """Return multiply-accumulates and least array cycles of an op (0 for other ops)."""
    size = hardware.array_size
    kind = op.name.split(".")[-1]
    if _text(op, "device") != "tpu":
        return 0, 0
    if kind == "conv":
        out_channels, group_in, k_h, k_w = shape_of(op.operands[1])
        pixels = prod(shape_of(op.results[0])) // out_channels
        group = _number(op, "group")
        group_out = out_channels // group
        macs = pixels * out_channels * group_in * k_h * k_w
        if group > 1 and group_in == group_out == 1:
            return macs, pixels * k_h * k_w * ceil(out_channels / size)
        pack = max(1, min(group, size // group_in, size // group_out)) if group > 1 else 1
        blocks = ceil(group / pack) * ceil(pack * group_out / size)
        return macs, pixels * blocks * ceil(pack * group_in * k_h * k_w / size)
    if kind == "linear":
        columns, depth = shape_of(op.operands[1])
        rows = prod(shape_of(op.results[0])) // columns
        return rows * columns * depth, rows * ceil(columns / size) * ceil(depth / size)
    if kind == "matmul":
        depth, columns = shape_of(op.operands[1])[-2:]
        rows = prod(shape_of(op.results[0])) // columns
        return rows * columns * depth, rows * ceil(columns / size) * ceil(depth / size)
    if kind == "avg_pool":
        kernel = _numbers(op, "kernel")
        count = prod(shape_of(op.results[0]))
        channels = shape_of(op.results[0])[-1 if _text(op, "layout") == "nhwc" else 1]
        window = prod(kernel)
        return count * window, count // channels * ceil(channels / size) * window
    return 0, 0


def least_ddr_bytes(op: Operation, weights: WeightStore, hardware: Hardware) -> int:
    """Return the DDR bytes no schedule of this op can avoid."""
    if op.name in _COPIES:
        return 0
    total = 0
    for value in op.operands:
        owner = value.owner
        if isinstance(owner, Operation) and owner.name == "top.weight":
            total += weights.get(_text(owner, "name")).nbytes
        elif isinstance(owner, Operation) and owner.name not in _CONSTANTS:
            total += _crossing(value, owner, op, hardware)
    for value in op.results:
        users = [use.operation for use in value.uses]
        size = prod(shape_of(value)) * _item_bytes(value)
        if any(_text(user, "device") != "tpu" for user in users):
            total += size
        else:
            total += max(0, size - hardware.sram_size)
    return total


def _crossing(value: SSAValue, owner: Operation, op: Operation, hardware: Hardware) -> int:
    size = prod(shape_of(value)) * _item_bytes(value)
    if _text(owner, "device") != _text(op, "device"):
        return size
    return max(0, size - hardware.sram_size)


def _item_bytes(value: SSAValue) -> int:
    """Return the bytes of an element on the chip: codes take one, fp16 two, sums four."""
    element = getattr(value.type, "element_type", None)
    return 2 if element == f16 else 4 if element == i32 else 1


def _text(op: Operation, key: str) -> str:
    value = op.attributes.get(key, op.properties.get(key))
    return value.data if isinstance(value, StringAttr) else ""


def _number(op: Operation, key: str) -> int:
    value = op.attributes.get(key, op.properties.get(key))
    assert isinstance(value, IntegerAttr), (op.name, key)
    return value.value.data


def _numbers(op: Operation, key: str) -> list[int]:
    value = op.attributes.get(key, op.properties.get(key))
    if isinstance(value, ArrayAttr):
        return [item.value.data for item in value if isinstance(item, IntegerAttr)]
    assert isinstance(value, DenseArrayBase), (op.name, key)
    return [int(item) for item in value.iter_values()]
