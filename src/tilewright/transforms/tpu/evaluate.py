"""Evaluate the loops of an affine-level function and emit instructions for what they do.

Every index of the affine level is static once loop counters are known, so the function is simply
run: loops step their counters, allocations make tile instances at their slots' addresses, copies
become DMA, compute ops become MAC and vector instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from xdsl.dialects import affine, arith, func, memref
from xdsl.dialects.builtin import (
    ArrayAttr,
    DenseArrayBase,
    IntAttr,
    IntegerAttr,
    IntegerType,
    MemRefType,
    StringAttr,
)
from xdsl.dialects.linalg.ops import FillOp, GenericOp
from xdsl.ir import Block, Operation, SSAValue
from xdsl.ir.affine import AffineConstantExpr, AffineDimExpr

from tilewright.diagnostics import TilewrightError
from tilewright.schedule.footprint import ConvForm, conv_form, pixel_pitch
from tilewright.transforms.tpu import emit_conv, emit_vector
from tilewright.transforms.tpu.constants import pack_parameters, pack_weights
from tilewright.transforms.tpu.emitter import Emitter
from tilewright.transforms.tpu.nests import Nests, attr_int, attr_ints, attr_str, root, users
from tilewright.transforms.tpu.views import (
    Accumulator,
    DdrBuffer,
    Tile,
    View,
    dense_strides,
    whole,
)

DYNAMIC = -(2**63)


class Evaluator:
    """Runs one function; `values` maps SSA values to integers and views."""

    def __init__(
        self, emitter: Emitter, function: func.FuncOp, nests: Nests, arguments: dict[SSAValue, View]
    ) -> None:
        self.emitter = emitter
        self.function = function
        self.nests = nests
        self.values: dict[SSAValue, Any] = dict(arguments)
        self._slot: dict[Operation, int] = {}
        self._handlers: dict[str, Callable[[Any], None]] = {
            "arith.constant": self._constant,
            "affine.apply": self._apply,
            "affine.min": self._min,
            "affine.for": self._for,
            "memref.alloc": self._alloc,
            "memref.subview": self._subview,
            "memref.collapse_shape": self._reshape,
            "memref.expand_shape": self._reshape,
            "memref.copy": self._copy,
            "linalg.fill": self._fill,
            "linalg.generic": self._generic,
        }

    def run(self) -> None:
        """Evaluate the whole body."""
        self._block(self.function.body.block)

    def _block(self, block: Block) -> None:
        for op in block.ops:
            handler = self._handlers.get(op.name)
            if handler is not None:
                handler(op)
            elif op.name not in ("func.return", "affine.yield", "memref.dealloc"):
                raise TilewrightError(
                    "E0501",
                    f"`{op.name}` has no place at the affine level",
                    [f"layer {_layer(op)}"],
                )

    # -- indices --------------------------------------------------------------------------------

    def _constant(self, op: arith.ConstantOp) -> None:
        value = op.value
        if isinstance(value, IntegerAttr):
            self.values[op.result] = value.value.data

    def _map(self, attribute: Any, operands: Any) -> tuple[int, ...]:
        affine_map = attribute.data
        values = [self.values[operand] for operand in operands]
        return affine_map.eval(values[: affine_map.num_dims], values[affine_map.num_dims :])

    def _apply(self, op: affine.ApplyOp) -> None:
        self.values[op.result] = self._map(op.map, op.mapOperands)[0]

    def _min(self, op: affine.MinOp) -> None:
        self.values[op.result] = min(self._map(op.map, op.arguments))

    def _for(self, op: affine.ForOp) -> None:
        low = max(self._map(op.lowerBoundMap, op.lowerBoundOperands))
        high = min(self._map(op.upperBoundMap, op.upperBoundOperands))
        body = op.body.block
        for index in range(low, high, op.step.value.data):
            self.values[body.args[0]] = index
            self._block(body)

    # -- buffers --------------------------------------------------------------------------------

    def _alloc(self, op: memref.AllocOp) -> None:
        kind = op.memref.type
        assert isinstance(kind, MemRefType)
        shape = kind.get_shape()
        space = memory_space(kind)
        if space == 0:
            self.values[op.memref] = self.nests.ddr[op.memref]
        elif space == 2:
            self.values[op.memref] = whole(Accumulator(shape))
        else:
            addresses, size = self.nests.tiles[op]
            slot = self._slot.get(op, 0)
            self._slot[op] = (slot + 1) % max(len(addresses), 1)
            pitch = pixel_pitch(self.emitter.hardware, shape[-1]) if shape else 1
            address = addresses[slot] if addresses else 0
            tile = Tile(attr_str(op, "role"), shape, address, pitch, size)
            self.values[op.memref] = whole(tile)

    def _subview(self, op: memref.SubviewOp) -> None:
        base: View = self.values[op.source]
        offsets = self._mixed(op.static_offsets, op.offsets)
        sizes = self._mixed(op.static_sizes, op.sizes)
        steps = self._mixed(op.static_strides, op.strides)
        offset = base.offset + sum(a * b for a, b in zip(offsets, base.strides, strict=True))
        strides = tuple(a * b for a, b in zip(steps, base.strides, strict=True))
        kept = list(range(len(sizes)))
        result_type = op.result.type
        assert isinstance(result_type, MemRefType)
        wanted = list(result_type.get_shape())
        if len(wanted) < len(sizes):
            kept = _kept_dimensions(list(op.static_sizes.get_values()), wanted)
        self.values[op.result] = View(
            base.buffer, offset, tuple(sizes[k] for k in kept), tuple(strides[k] for k in kept)
        )

    def _mixed(self, static: DenseArrayBase[IntegerType], dynamic: Any) -> list[int]:
        rest = iter(dynamic)
        return [
            self.values[next(rest)] if value == DYNAMIC else int(value)
            for value in static.get_values()
        ]

    def _reshape(self, op: memref.CollapseShapeOp | memref.ExpandShapeOp) -> None:
        base: View = self.values[op.src]
        shape = op.result.type
        assert isinstance(shape, MemRefType)
        groups = [
            [item.value.data for item in group if isinstance(item, IntegerAttr)]
            for group in op.reassociation
        ]
        if op.name == "memref.collapse_shape":
            sizes: list[int] = []
            strides: list[int] = []
            for group in groups:
                parts = [(base.sizes[k], base.strides[k]) for k in group if base.sizes[k] != 1]
                for (_, outer), (size, inner) in pairwise(parts):
                    assert outer == size * inner, "collapsed dimensions are not contiguous"
                total = int(np.prod([size for size, _ in parts], dtype=np.int64))
                sizes.append(total)
                strides.append(parts[-1][1] if parts else 1)
        else:
            target = list(shape.get_shape())
            sizes, strides = [], []
            for axis, group in enumerate(groups):
                extents = [target[k] for k in group]
                known = int(
                    np.prod([e for e in extents if e != DYNAMIC and e >= 0], dtype=np.int64)
                )
                extents = [e if e >= 0 else base.sizes[axis] // known for e in extents]
                inner = dense_strides(extents)
                sizes += extents
                strides += [base.strides[axis] * step for step in inner]
        buffer = base.buffer
        self.values[op.result] = View(buffer, base.offset, tuple(sizes), tuple(strides))

    # -- transfers ------------------------------------------------------------------------------

    def _fill(self, op: FillOp) -> None:
        view: View = self.values[op.outputs[0]]
        if isinstance(view.buffer, Accumulator):
            assert self.values.get(op.inputs[0]) == 0, "accumulators start from zero"
            view.buffer.chunks.clear()
            return
        assert isinstance(view.buffer, Tile)
        if any(attr_str(user, "kind") == "pool" for user in users(root(op.outputs[0]))) and (
            view.buffer.role == "output"
        ):
            return  # `vec_pool` starts from its first element
        self.emitter.layer = _layer(op) or self.emitter.layer
        assert view.buffer.fill is None
        view.buffer.fill = (view, int(self.values[op.inputs[0]]))
        base = root(op.outputs[0])
        loaded = any(
            isinstance(user, memref.CopyOp) and root(user.destination) is base
            for user in users(base)
        )
        if not loaded:
            self.emitter.fill(*view.buffer.fill)
            view.buffer.fill = None

    def _copy(self, op: memref.CopyOp) -> None:
        source: View = self.values[op.source]
        target: View = self.values[op.destination]
        self.emitter.layer = _layer(op) or self.emitter.layer
        if isinstance(target.buffer, Tile) and isinstance(source.buffer, DdrBuffer):
            self._load(op, source, target)
        elif isinstance(source.buffer, Tile) and isinstance(target.buffer, DdrBuffer):
            self.emitter.store(source, target)
        else:
            raise TilewrightError(
                "E0501", "a copy at the affine level moves between DDR and SRAM", [_layer(op)]
            )

    def _load(self, op: memref.CopyOp, source: View, target: View) -> None:
        tile = target.buffer
        assert isinstance(tile, Tile)
        emitter = self.emitter
        role = tile.role
        if role in ("input", "output"):
            second = self.nests.second_inputs
            channel = (
                emitter.channel_second if root(op.destination) in second else emitter.channel_input
            )
            emitter.load(source, target, channel)
            return
        tile.source = source
        buffer = source.buffer
        assert isinstance(buffer, DdrBuffer)
        key: tuple[object, ...] = (role, buffer.name, source.offset, source.sizes)
        if role in ("mult", "shift"):
            return
        found = emitter.constants.lookup(key)
        if role == "weights":
            consumer = self.nests.conv_of(op.destination)
            form, pitch = self._form(consumer, source.sizes)
            key = (*key, form, pitch)
            found = emitter.constants.lookup(key)
            if found is None:
                found = emitter.constants.add(
                    key, pack_weights(form, self._constant_array(source), pitch)
                )
        elif role == "bias":
            self._load_parameters(op, source, tile)
            return
        elif found is None:
            content = self._constant_array(source)
            packed = (
                emit_vector.resize_table_bytes(content)
                if role.startswith("table_")
                else np.ascontiguousarray(content).view(np.uint8).reshape(-1)
            )
            found = emitter.constants.add(key, packed)
        emitter.load_constant(*found, tile, emitter.channel_weights)

    def _load_parameters(self, op: memref.CopyOp, source: View, tile: Tile) -> None:
        requant = self.nests.requant_of(op.destination)
        conv = self.nests.reduction_of(requant.inputs[0])
        channels = source.sizes[-1]
        form = self._form_for(conv, channels)
        start = source.starts()[-1]
        names = [self._argument_name(value) for value in requant.inputs[1:4]]
        key = ("parameters", *names, start, channels, form)
        emitter = self.emitter
        found = emitter.constants.lookup(key)
        if found is None:
            bias, mult, shift = (
                emitter.weights.get(name).reshape(-1)[start : start + channels] for name in names
            )
            found = emitter.constants.add(
                key, pack_parameters(emitter.hardware, form, bias, mult, shift)
            )
        emitter.load_constant(*found, tile, emitter.channel_weights)
        tile.source = source

    def _argument_name(self, value: SSAValue) -> str:
        """Return the constant a parameter tile is loaded from."""
        for user in users(root(value)):
            if isinstance(user, memref.CopyOp) and root(user.destination) is root(value):
                view: View = self.values[root(user.source)]
                assert isinstance(view.buffer, DdrBuffer)
                return view.buffer.name
        raise TilewrightError("E0501", "a parameter tile is never loaded")

    def _constant_array(self, view: View) -> np.ndarray:
        buffer = view.buffer
        assert isinstance(buffer, DdrBuffer)
        array = self.emitter.weights.get(buffer.name)
        flat = np.ascontiguousarray(array).reshape(-1)
        item = flat.itemsize
        return np.lib.stride_tricks.as_strided(
            flat[view.offset :], view.sizes, [s * item for s in view.strides]
        )

    # -- compute --------------------------------------------------------------------------------

    def _form(self, conv: GenericOp, weights: tuple[int, ...]) -> tuple[ConvForm, int]:
        """Return how a conv runs with a weight tile [o, i/group, kh, kw], and the pitch."""
        out_channels, group_in, k_h, k_w = weights
        group = self._groups(conv, out_channels)
        x_type = root(conv.inputs[0]).type
        assert isinstance(x_type, MemRefType)
        pitch = pixel_pitch(self.emitter.hardware, x_type.get_shape()[-1])
        dilation = attr_ints(conv, "dilations", (1, 1))[1]
        form = conv_form(
            self.emitter.hardware, group_in * group, out_channels, group, (k_h, k_w),
            dilation, pitch,
        )
        assert not form.merge_kernel_row or form.vector == k_w * pitch
        return form, pitch

    def _groups(self, conv: GenericOp, out_channels: int) -> int:
        """Return the groups of a tile with `out_channels` output channels."""
        group = attr_int(conv, "group", 1)
        if group == 1:
            return 1
        return out_channels // self.nests.group_out(conv)

    def _form_for(self, conv: GenericOp, out_channels: int) -> ConvForm:
        if attr_str(conv, "kind") == "sum":
            kernel = attr_ints(conv, "kernel", (1, 1))
            return conv_form(
                self.emitter.hardware, out_channels, out_channels, out_channels,
                (kernel[0], kernel[1]), 1,
            ) if out_channels > 1 else _single_channel(self.emitter, kernel)  # fmt: skip
        weights = root(conv.inputs[1]).type
        assert isinstance(weights, MemRefType)
        _, group_in, k_h, k_w = weights.get_shape()
        return self._form(conv, (out_channels, group_in, k_h, k_w))[0]

    def _generic(self, op: GenericOp) -> None:
        self.emitter.layer = _layer(op)
        kind = attr_str(op, "kind")
        handler = {
            "conv": self._reduction,
            "sum": self._reduction,
            "requant": self._requant,
            "lut": self._lut,
            "eltwise": self._eltwise,
            "copy": self._copy_tile,
            "pool": self._pool,
            "resize": self._resize,
        }.get(kind)
        if handler is None:
            raise TilewrightError("E0402", f'"{_layer(op)}": no instruction for kind `{kind}`')
        handler(op)

    def _reduction(self, op: GenericOp) -> None:
        act: View = self.values[op.inputs[0]]
        out: View = self.values[op.outputs[0]]
        ones = attr_str(op, "kind") == "sum"
        if ones:
            form = self._form_for(op, out.sizes[-1])
            kernel = attr_ints(op, "kernel", (1, 1))
            tile = self.nests.ones_tile(op, self.emitter)
        else:
            weights: View = self.values[op.inputs[1]]
            form, _ = self._form(op, weights.sizes)
            kernel = (weights.sizes[2], weights.sizes[3])
            assert isinstance(weights.buffer, Tile)
            tile = weights.buffer
        strides, dilations = attr_ints(op, "strides", (1, 1)), attr_ints(op, "dilations", (1, 1))
        work = emit_conv.Reduction(
            _layer(op), form, act, tile, ones, out, (kernel[0], kernel[1]),
            (strides[0], strides[1]), (dilations[0], dilations[1]),
        )  # fmt: skip
        acc = root(op.outputs[0]).owner
        assert isinstance(acc, Operation)
        emit_conv.reduce(self.emitter, work, split=acc.parent is not op.parent)

    def _requant(self, op: GenericOp) -> None:
        acc, bias, *_ = (self.values[value] for value in op.inputs)
        target: View = self.values[op.outputs[0]]
        parameters = bias.buffer
        assert isinstance(parameters, Tile)
        emit_conv.requantise(
            self.emitter, acc, parameters, id(parameters), target,
            attr_int(op, "zp", 0), attr_int(op, "lo", -128), attr_int(op, "hi", 127),
        )  # fmt: skip
        # Keep the tile alive: its identity is the key of what the registers hold.
        self.nests.keep.append(parameters)

    def _lut(self, op: GenericOp) -> None:
        source, table = (self.values[value] for value in op.inputs)
        target: View = self.values[op.outputs[0]]
        tile = table.buffer
        assert isinstance(tile, Tile)
        assert tile.source is not None
        assert isinstance(tile.source.buffer, DdrBuffer)
        key = tile.source.buffer.name
        if source.buffer.drains:
            emit_conv.fuse_table(self.emitter, source, key, tile, target)
            return
        register = self.emitter.table(key, tile)
        counts, steps = self._loops(op, [source, target])
        emit_vector.copy(
            self.emitter, source, target, (steps[0], steps[1]), counts, table_register=register
        )

    def _loops(self, op: GenericOp, views: list[View]) -> tuple[list[int], list[list[int]]]:
        """Return counts of the loop dimensions and byte steps of every given operand."""
        maps = list(op.indexing_maps)
        maps = [*maps[: len(views) - 1], maps[-1]]
        rank = maps[-1].data.num_dims
        counts = [1] * rank
        steps: list[list[int]] = []
        for view, attribute in zip(views, maps, strict=True):
            dims: list[int | None] = []
            for axis, expr in enumerate(attribute.data.results):
                if isinstance(expr, AffineDimExpr):
                    dims.append(expr.position)
                    counts[expr.position] = max(counts[expr.position], view.sizes[axis])
                else:
                    assert isinstance(expr, AffineConstantExpr), "only plain dimensions"
                    dims.append(None)
            steps.append(emit_vector.operand_steps(view, dims, rank))
        return counts, steps

    def _rescale(self, op: GenericOp) -> emit_vector.Rescale:
        return emit_vector.Rescale(
            attr_int(op, "mult_a", attr_int(op, "mult", 1)), attr_int(op, "mult_b", 0),
            attr_int(op, "shift", 0), attr_int(op, "bias", 0), attr_int(op, "bias_shift", 0),
            attr_int(op, "za", 0), attr_int(op, "zb", 0), attr_int(op, "zp", 0),
            attr_int(op, "lo", -128), attr_int(op, "hi", 127),
        )  # fmt: skip

    def _eltwise(self, op: GenericOp) -> None:
        views: list[View] = [self.values[value] for value in (*op.inputs, op.outputs[0])]
        if len(op.inputs) == 1:
            views.insert(1, views[0])
        function = attr_str(op, "function")
        counts, steps = self._loops(op, views)
        plain = function in ("max", "min")
        emit_vector.eltwise(
            self.emitter, function, views[0], views[1], views[2],
            (steps[0], steps[1], steps[2]), counts,
            None if plain else self._rescale(op),
            None if plain else self.nests.scalar_tile(op),
        )  # fmt: skip

    def _copy_tile(self, op: GenericOp) -> None:
        source: View = self.values[op.inputs[0]]
        target: View = self.values[op.outputs[0]]
        counts, steps = self._loops(op, [source, target])
        rescaled = "shift" in op.attributes
        emit_vector.copy(
            self.emitter, source, target, (steps[0], steps[1]), counts,
            self._rescale(op) if rescaled else None,
            self.nests.scalar_tile(op) if rescaled else None,
        )  # fmt: skip

    def _pool(self, op: GenericOp) -> None:
        kernel, strides = attr_ints(op, "kernel", (1, 1)), attr_ints(op, "strides", (1, 1))
        dilations = attr_ints(op, "dilations", (1, 1))
        emit_vector.pool(
            self.emitter, self.values[op.inputs[0]], self.values[op.outputs[0]],
            (kernel[0], kernel[1]), (strides[0], strides[1]), (dilations[0], dilations[1]),
        )  # fmt: skip

    def _resize(self, op: GenericOp) -> None:
        source, table_y, table_x = (self.values[value] for value in op.inputs[:3])
        emit_vector.resize(
            self.emitter, source, (table_y.buffer, table_x.buffer), self.values[op.outputs[0]],
            self._rescale(op), self.nests.scalar_tile(op),
        )  # fmt: skip


def _single_channel(emitter: Emitter, kernel: tuple[int, ...]) -> ConvForm:
    """Return the form of a window sum over one channel (a depthwise convolution of one group)."""
    del emitter
    return ConvForm(True, False, 1, 1, 1, 1, 1, 1, kernel[0] * kernel[1], 1)


def _kept_dimensions(sizes: list[int], wanted: list[int]) -> list[int]:
    """Return which dimensions a rank-reducing subview keeps; leading ones go first."""
    kept: list[int] = []
    rest = list(wanted)
    for axis in range(len(sizes) - 1, -1, -1):
        # A dynamic extent stays dynamic, so that equality is exact.
        if rest and sizes[axis] == rest[-1]:
            rest.pop()
            kept.append(axis)
        else:
            assert sizes[axis] == 1, (sizes, wanted)
    assert not rest, (sizes, wanted)
    return kept[::-1]


def memory_space(kind: MemRefType[Any]) -> int:
    """Return the memory space of a memref: 0 DDR, 1 SRAM, 2 accumulators."""
    space = kind.memory_space
    if isinstance(space, IntegerAttr):
        return space.value.data
    if isinstance(space, IntAttr):
        return space.data
    return 0


def _layer(op: Operation) -> str:
    attribute = op.attributes.get("layer")
    return attribute.data if isinstance(attribute, StringAttr) else ""


__all__ = ["ArrayAttr", "Evaluator", "memory_space"]
