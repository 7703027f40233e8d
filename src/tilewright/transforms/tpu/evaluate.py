"""Evaluate the loops of an affine-level function and emit instructions for what they do.

Every index of the affine level is static once loop counters are known, so the function is simply
run: loops step their counters, allocations make tile instances at their slots' addresses, copies
become DMA, compute ops become MAC and vector instructions. Each op is turned into a thunk once,
with all that is static read out of the IR, since loop bodies run thousands of times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from xdsl.dialects import affine, arith, func, memref
from xdsl.dialects.builtin import DenseArrayBase, FloatAttr, IntegerAttr, IntegerType, MemRefType
from xdsl.dialects.linalg.ops import FillOp, GenericOp
from xdsl.ir import Operation, SSAValue

from tilewright.diagnostics import TilewrightError
from tilewright.transforms.tpu import emit_vector
from tilewright.transforms.tpu.compute import Compute, Forms, Thunk, clamp_of
from tilewright.transforms.tpu.constants import (
    pack_biases,
    pack_parameters,
    pack_row_parameters,
    pack_weights,
)
from tilewright.transforms.tpu.emitter import Emitter
from tilewright.transforms.tpu.nests import (
    HELD,
    Nests,
    attr_str,
    is_held,
    item_bytes_of,
    layer_of,
    memory_space,
    root,
    same_place,
    users,
    value_bytes,
)
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
        self.forms = Forms(nests)
        self._compute = Compute(emitter, nests, self.values, self.forms, self._view)
        self._makers: dict[str, Callable[[Any], Thunk]] = {
            "arith.constant": self._constant,
            "affine.apply": self._apply,
            "affine.min": self._min,
            "affine.for": self._for,
            "memref.alloc": self._alloc,
            "memref.subview": self._subview,
            "memref.reinterpret_cast": self._reinterpret,
            "memref.collapse_shape": self._reshape,
            "memref.expand_shape": self._reshape,
            "memref.copy": self._copy,
            "linalg.fill": self._fill,
            "linalg.generic": self._compute.thunk,
        }

    def run(self) -> None:
        """Evaluate the whole body."""
        for op in self.function.body.block.ops:
            thunk = self._thunk(op)
            if thunk is not None:
                thunk()

    def _thunk(self, op: Operation) -> Thunk | None:
        make = self._makers.get(op.name)
        if make is not None:
            return make(op)
        if op.name in ("func.return", "affine.yield", "memref.dealloc"):
            return None
        raise TilewrightError(
            "E0501", f"`{op.name}` has no place at the affine level", [f"layer {layer_of(op)}"]
        )

    def _view(self, op: Operation) -> Thunk:
        """Return the thunk of an op that only makes a value."""
        thunk = self._thunk(op)
        assert thunk is not None
        return thunk

    # -- indices --------------------------------------------------------------------------------

    def _constant(self, op: arith.ConstantOp) -> Thunk:
        value, result = op.value, op.result

        def run() -> None:
            if isinstance(value, IntegerAttr | FloatAttr):
                self.values[result] = value.value.data

        return run

    def _map(self, attribute: Any, operands: Sequence[SSAValue]) -> Callable[[], tuple[int, ...]]:
        table, names = attribute.data, list(operands)
        split = table.num_dims

        def run() -> tuple[int, ...]:
            values = [self.values[name] for name in names]
            return table.eval(values[:split], values[split:])

        return run

    def _apply(self, op: affine.ApplyOp) -> Thunk:
        table, result = self._map(op.map, op.mapOperands), op.result

        def run() -> None:
            self.values[result] = table()[0]

        return run

    def _min(self, op: affine.MinOp) -> Thunk:
        table, result = self._map(op.map, op.arguments), op.result

        def run() -> None:
            self.values[result] = min(table())

        return run

    def _for(self, op: affine.ForOp) -> Thunk:
        low = self._map(op.lowerBoundMap, op.lowerBoundOperands)
        high = self._map(op.upperBoundMap, op.upperBoundOperands)
        step, counter = op.step.value.data, op.body.block.args[0]
        body: list[Thunk] | None = None

        def run() -> None:
            nonlocal body
            if body is None:
                body = [t for item in op.body.block.ops if (t := self._thunk(item)) is not None]
            for index in range(max(low()), min(high()), step):
                self.values[counter] = index
                for thunk in body:
                    thunk()

        return run

    # -- buffers --------------------------------------------------------------------------------

    def _alloc(self, op: memref.AllocOp) -> Thunk:
        kind, result = op.memref.type, op.memref
        assert isinstance(kind, MemRefType)
        shape = kind.get_shape()
        space = memory_space(kind)
        if space == 0:
            view = self.nests.ddr[result]

            def ddr() -> None:
                self.values[result] = view

            return ddr
        strides = dense_strides(shape)
        if space == 2:

            def accumulator() -> None:
                self.values[result] = View(Accumulator(shape), 0, shape, strides)

            return accumulator
        addresses, size = self.nests.tiles[op]
        item = item_bytes_of(kind)
        pitch = self.nests.pitch(result) if shape else item
        role, slot = attr_str(op, "role"), 0
        clean = not self._reads_gaps(result, pitch - shape[-1] * item if shape else 0, item)

        def tile() -> None:
            nonlocal slot, clean
            if not clean:
                self.emitter.layer = layer_of(op)
                raw = Tile(role, (size,), addresses[slot], size, size)
                self.emitter.fill(whole(raw), 0)
                clean = slot == len(addresses) - 1
            buffer = Tile(role, shape, addresses[slot], pitch, size, item_bytes=item)
            slot = (slot + 1) % len(addresses)
            self.values[result] = View(buffer, 0, shape, strides)

        return tile

    def _reads_gaps(self, value: SSAValue, gap: int, item: int) -> bool:
        """Tell whether bytes between a tile's pixels, which nothing writes, are read as fp16."""
        if gap == 0 or item == 1:
            return False
        for user in users(value):
            if attr_str(user, "kind") != "conv" or root(user.operands[0]) is not value:
                continue
            assert isinstance(user, GenericOp)
            weights = root(user.inputs[1]).type
            assert isinstance(weights, MemRefType)
            form, _ = self.forms.of_weights(user, tuple(weights.get_shape()))
            if form.merge_kernel_row:
                return True
        return False

    def _reinterpret(self, op: memref.ReinterpretCastOp) -> Thunk:
        before, after = op.source, op.result
        sizes, strides = (
            tuple(int(item) for item in array.get_values())
            for array in (op.static_sizes, op.static_strides)
        )
        assert DYNAMIC not in (*sizes, *strides)
        assert list(op.static_offsets.get_values()) == [0]

        def run() -> None:
            base: View = self.values[before]
            self.values[after] = View(base.buffer, base.offset, sizes, strides)

        return run

    def _subview(self, op: memref.SubviewOp) -> Thunk:
        source, result = op.source, op.result
        offsets = self._mixed(op.static_offsets, op.offsets)
        sizes = self._mixed(op.static_sizes, op.sizes)
        steps = self._mixed(op.static_strides, op.strides)
        result_type = op.result.type
        assert isinstance(result_type, MemRefType)
        wanted = list(result_type.get_shape())
        static_sizes = [int(item) for item in op.static_sizes.get_values()]
        kept = (
            _kept_dimensions(static_sizes, wanted)
            if len(wanted) < len(sizes)
            else list(range(len(sizes)))
        )
        values = self.values
        # Most offsets and all steps are constants: keep only those that move the view.
        moving = [(axis, item) for axis, item in enumerate(offsets) if item != 0]
        plain = all(item == 1 for item in steps)

        def run() -> None:
            base: View = values[source]
            strides = base.strides
            offset = base.offset
            for axis, item in moving:
                offset += (item if isinstance(item, int) else values[item]) * strides[axis]
            extents: list[int] = []
            for axis in kept:
                item = sizes[axis]
                extents.append(item if isinstance(item, int) else values[item])
            if plain:
                places = tuple(strides[axis] for axis in kept)
            else:
                places = tuple(
                    strides[axis] * (step if isinstance(step := steps[axis], int) else values[step])
                    for axis in kept
                )
            values[result] = View(base.buffer, offset, tuple(extents), places)

        return run

    def _mixed(
        self, static: DenseArrayBase[IntegerType], dynamic: Sequence[SSAValue]
    ) -> list[int | SSAValue]:
        rest = iter(dynamic)
        return [next(rest) if item == DYNAMIC else int(item) for item in static.get_values()]

    def _reshape(self, op: memref.CollapseShapeOp | memref.ExpandShapeOp) -> Thunk:
        source, result = op.src, op.result
        shape = result.type
        assert isinstance(shape, MemRefType)
        groups = [
            [item.value.data for item in group if isinstance(item, IntegerAttr)]
            for group in op.reassociation
        ]
        change = _collapse if op.name == "memref.collapse_shape" else _expand
        target = list(shape.get_shape())

        def run() -> None:
            self.values[result] = change(self.values[source], groups, target)

        return run

    # -- transfers ------------------------------------------------------------------------------

    def _fill(self, op: FillOp) -> Thunk:
        target, value = op.outputs[0], op.inputs[0]
        base, layer = root(target), layer_of(op)
        held = is_held(target)
        # `vec_pool` starts from its first element and needs no filled result.
        pooled = any(
            isinstance(user, GenericOp)
            and attr_str(user, "kind") == "pool"
            and same_place(user.outputs[0], target)
            for user in users(base)
        )
        # A load pads its tile itself. Held buffers are filled part by part, at once.
        loaded = not held and any(
            isinstance(user, memref.CopyOp) and root(user.destination) is base
            for user in users(base)
        )

        def run() -> None:
            view: View = self.values[target]
            if isinstance(view.buffer, Accumulator):
                of_rows = any(attr_str(user, "kind") == "row" for user in users(base))
                assert of_rows or self.values.get(value) == 0, "accumulators start from zero"
                view.buffer.chunks.clear()
                return
            assert isinstance(view.buffer, Tile)
            if 0 in view.sizes or (pooled and view.buffer.role in ("output", HELD)):
                return
            self.emitter.layer = layer or self.emitter.layer
            byte = fill_byte(self.values[value], view.buffer.item_bytes)
            if loaded:
                assert view.buffer.fill is None
                view.buffer.fill = (view, byte)
            else:
                self.emitter.fill(view, byte)

        return run

    def _copy(self, op: memref.CopyOp) -> Thunk:
        before, after, layer = op.source, op.destination, layer_of(op)
        second = root(after) in self.nests.second_inputs
        channel = self.emitter.channel_second if second else self.emitter.channel_input

        def run() -> None:
            source: View = self.values[before]
            target: View = self.values[after]
            self.emitter.layer = layer or self.emitter.layer
            if isinstance(target.buffer, Tile) and isinstance(source.buffer, DdrBuffer):
                if target.buffer.role in ("input", "output", HELD):
                    self.emitter.load(source, target, channel)
                elif target.buffer.role == "weights" and not source.buffer.constant:
                    self._load_matrix(op, source, target.buffer)
                else:
                    self._load_constant(op, source, target.buffer)
            elif isinstance(source.buffer, Tile) and isinstance(target.buffer, DdrBuffer):
                self.emitter.store(source, target)
            else:
                raise TilewrightError(
                    "E0501", "a copy at the affine level moves between DDR and SRAM", [layer]
                )

        return run

    def _load_matrix(self, op: memref.CopyOp, source: View, tile: Tile) -> None:
        """Load an activation [o, i, 1, 1] in the weights' place: rows of a block's columns."""
        form, _ = self.forms.of_weights(self.nests.conv_of(op.destination), source.sizes)
        columns, depth = source.sizes[:2]
        column_step, row_step = source.strides[:2]
        block_bytes = form.weight_rows * form.weight_pitch
        for first in range(0, columns, form.columns):
            sizes = (depth, min(form.columns, columns - first))
            offset = source.offset + first * column_step
            block = Tile(
                tile.role, sizes, tile.address + first // form.columns * block_bytes,
                form.weight_pitch, block_bytes, item_bytes=form.element_bytes,
            )  # fmt: skip
            far = View(source.buffer, offset, sizes, (row_step, column_step))
            self.emitter.load(far, whole(block), self.emitter.channel_weights)

    def _load_constant(self, op: memref.CopyOp, source: View, tile: Tile) -> None:
        emitter, role = self.emitter, tile.role
        tile.source = source
        buffer = source.buffer
        assert isinstance(buffer, DdrBuffer)
        key: tuple[object, ...] = (role, buffer.name, source.offset, source.sizes)
        if role in ("mult", "shift", "row_gain"):
            return
        found = emitter.constants.lookup(key)
        if role == "weights":
            consumer = self.nests.conv_of(op.destination)
            form, pitch = self.forms.of_weights(consumer, source.sizes)
            key = (*key, form, pitch)
            found = emitter.constants.lookup(key)
            if found is None:
                found = emitter.constants.add(
                    key, pack_weights(form, self._constant_array(source), pitch)
                )
                if form.half_bytes:
                    emitter.constants.count_half_bytes(layer_of(op), form, found[1])
        elif role == "bias":
            self._load_parameters(op, source, tile)
            return
        elif role == "row_bias":
            reader = next(user for user in users(op.destination) if isinstance(user, GenericOp))
            gain = self.emitter.weights.get(self._argument_name(reader.inputs[4]))
            if found is None:
                bias = self._constant_array(source)
                packed = pack_row_parameters(emitter.hardware, gain, bias)
                found = emitter.constants.add(key, packed)
        elif found is None and role == "row_table":
            content = self._constant_array(source).view(np.uint8)
            padded = np.zeros(tile.size_bytes, np.uint8)
            padded[: content.size] = content
            found = emitter.constants.add(key, padded)
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
        form = self.forms.of_output(conv, channels)
        start = source.starts()[-1]
        names = [self._argument_name(value) for value in requant.inputs[1:4]]
        key: tuple[object, ...] = ("parameters", *names, start, channels, form)
        emitter = self.emitter
        half, clamp = value_bytes(requant.outputs[0]) == 2, clamp_of(requant)
        key = (*key, clamp) if half else key
        found = emitter.constants.lookup(key)
        if found is None:
            arrays = [
                emitter.weights.get(name).reshape(-1)[start : start + channels] for name in names
            ]
            packed = (
                pack_biases(emitter.hardware, form, arrays[0], clamp)
                if half
                else pack_parameters(emitter.hardware, form, arrays[0], arrays[1], arrays[2])
            )
            found = emitter.constants.add(key, packed)
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


def fill_byte(value: float, item_bytes: int) -> int:
    """Return the byte that fills elements with a constant.

    Raises:
        TilewrightError: E0501, the bytes of an fp16 constant differ.
    """
    if item_bytes == 1:
        return int(value)
    low, high = np.float16(value).tobytes()
    if low != high:
        raise TilewrightError("E0501", f"a DMA fills by bytes, and those of {value} differ")
    return low


def _collapse(base: View, groups: list[list[int]], target: list[int]) -> View:
    """Return `base` with each group of dimensions merged into one."""
    del target
    sizes: list[int] = []
    strides: list[int] = []
    for group in groups:
        parts = [(base.sizes[k], base.strides[k]) for k in group if base.sizes[k] != 1]
        for (_, outer), (size, inner) in pairwise(parts):
            assert outer == size * inner, "collapsed dimensions are not contiguous"
        sizes.append(int(np.prod([size for size, _ in parts], dtype=np.int64)))
        strides.append(parts[-1][1] if parts else 1)
    return View(base.buffer, base.offset, tuple(sizes), tuple(strides))


def _expand(base: View, groups: list[list[int]], target: list[int]) -> View:
    """Return `base` with each dimension split into its group; one dynamic extent is worked out."""
    if not groups:
        # A scalar: any number of dimensions of one.
        return View(base.buffer, base.offset, (1,) * len(target), (1,) * len(target))
    sizes: list[int] = []
    strides: list[int] = []
    for axis, group in enumerate(groups):
        extents = [target[k] for k in group]
        known = int(np.prod([extent for extent in extents if extent >= 0], dtype=np.int64))
        extents = [extent if extent >= 0 else base.sizes[axis] // known for extent in extents]
        sizes += extents
        strides += [base.strides[axis] * step for step in dense_strides(extents)]
    return View(base.buffer, base.offset, tuple(sizes), tuple(strides))


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
