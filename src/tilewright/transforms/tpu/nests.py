"""Static facts about an affine-level function: what feeds what, and where SRAM tiles lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from xdsl.dialects import func, memref
from xdsl.dialects.builtin import (
    AnyFloat,
    ArrayAttr,
    DenseArrayBase,
    Float16Type,
    FloatAttr,
    IntAttr,
    IntegerAttr,
    IntegerType,
    MemRefType,
    StringAttr,
)
from xdsl.dialects.linalg.ops import GenericOp
from xdsl.ir import Operation, SSAValue

from tilewright.diagnostics import TilewrightError
from tilewright.dialects.quant import i4
from tilewright.schedule.footprint import (
    PLAIN,
    ConvForm,
    Packing,
    activation_bytes,
    align,
    conv_form,
    parameter_bytes,
    pixel_pitch,
    row_table_bytes,
)
from tilewright.spec.access import row_parameter_bytes
from tilewright.spec.hardware import Hardware
from tilewright.transforms.tpu.emitter import Emitter
from tilewright.transforms.tpu.views import Alternating, Tile, View, whole

HELD = "held"
"""Role of buffers that live across nests: whole tensors, and rows of one."""

ALIASES = (
    "memref.subview",
    "memref.collapse_shape",
    "memref.expand_shape",
    "memref.cast",
    "memref.reinterpret_cast",
)
INDICES = ("affine.apply", "affine.min", "arith.constant")


def attr_int(op: Operation, name: str, default: int | None = None) -> int:
    """Return an integer attribute of `op`."""
    value = op.attributes.get(name)
    if isinstance(value, IntegerAttr):
        return value.value.data
    if default is None:
        raise TilewrightError("E0501", f"`{op.name}` lacks the attribute `{name}`")
    return default


def attr_ints(op: Operation, name: str, default: Sequence[int]) -> tuple[int, ...]:
    """Return an attribute that is a list of integers."""
    value = op.attributes.get(name)
    if isinstance(value, DenseArrayBase):
        return tuple(int(item) for item in value.get_values())
    if isinstance(value, ArrayAttr):
        return tuple(item.value.data for item in value if isinstance(item, IntegerAttr))
    return tuple(default)


def attr_str(op: Operation, name: str) -> str:
    """Return a string attribute, or an empty string."""
    value = op.attributes.get(name)
    return value.data if isinstance(value, StringAttr) else ""


def memory_space(kind: MemRefType[Any]) -> int:
    """Return the memory space of a memref: 0 DDR, 1 SRAM, 2 accumulators."""
    space = kind.memory_space
    if isinstance(space, IntegerAttr):
        return space.value.data
    if isinstance(space, IntAttr):
        return space.data
    return 0


def item_bytes_of(kind: MemRefType[Any]) -> int:
    """Return the bytes of an element of a memref."""
    element = kind.element_type
    assert isinstance(element, IntegerType | AnyFloat), element
    return -(-element.bitwidth // 8)


def has_half_bytes(value: SSAValue) -> bool:
    """Tell whether a memref value holds weights of 4 bits, which the chip has two a byte."""
    kind = value.type
    return isinstance(kind, MemRefType) and kind.element_type == i4


def value_bytes(value: SSAValue) -> int:
    """Return the bytes of an element of a memref value."""
    kind = value.type
    assert isinstance(kind, MemRefType)
    return item_bytes_of(kind)


def attr_float(op: Operation, name: str, default: float) -> float:
    """Return a float attribute of `op`."""
    value = op.attributes.get(name)
    return float(value.value.data) if isinstance(value, FloatAttr) else default


def ends_in_half(op: GenericOp) -> bool:
    """Tell whether an op changes values in float and rounds them to fp16."""
    kind = op.outputs[0].type
    assert isinstance(kind, MemRefType)
    changes = any(key in op.attributes for key in ("function", "lo", "hi"))
    return isinstance(kind.element_type, Float16Type) and changes


def layer_of(op: Operation) -> str:
    """Return the user's node an op was made for, or an empty string."""
    return attr_str(op, "layer")


def root(value: SSAValue) -> SSAValue:
    """Return the buffer a chain of views starts from."""
    while isinstance(value.owner, Operation) and value.owner.name in ALIASES:
        value = value.owner.operands[0]
    return value


def users(value: SSAValue) -> Iterator[Operation]:
    """Yield the ops that use a buffer, directly or through views."""
    for use in value.uses:
        if use.operation.name in ALIASES:
            yield from users(use.operation.results[0])
        else:
            yield use.operation


def is_held(value: SSAValue) -> bool:
    """Tell whether a value lies in a buffer that lives across nests."""
    owner = root(value).owner
    return isinstance(owner, Operation) and attr_str(owner, "role") == HELD


def is_part(value: SSAValue) -> bool:
    """Tell whether a value is some channels of a held buffer."""
    kind, whole_kind = value.type, root(value).type
    assert isinstance(kind, MemRefType)
    assert isinstance(whole_kind, MemRefType)
    return is_held(value) and kind.get_shape()[-1] != whole_kind.get_shape()[-1]


def same_place(one: SSAValue, two: SSAValue) -> bool:
    """Tell whether two values are the same part of a buffer; any part of a tile is that tile."""
    if root(one) is not root(two):
        return False
    if one is two or not is_held(one):
        return True
    first, second = one.owner, two.owner
    return (
        isinstance(first, memref.SubviewOp)
        and isinstance(second, memref.SubviewOp)
        and first.properties == second.properties
        and all(a is b for a, b in zip(first.operands[1:], second.operands[1:], strict=True))
        and same_place(first.source, second.source)
    )


def neighbours(op: Operation, forward: bool) -> Iterator[Operation]:
    """Yield the ops of a block behind or before one, without those that only make values."""
    step = op.next_op if forward else op.prev_op
    while step is not None:
        if step.name not in (*ALIASES, *INDICES):
            yield step
        step = step.next_op if forward else step.prev_op


@dataclass
class Nests:
    """Tile addresses, DDR buffers and op relations of one function."""

    function: func.FuncOp
    hardware: Hardware
    ddr: dict[SSAValue, View] = field(default_factory=dict[SSAValue, View])
    """Views of the DDR buffers made by `memref.alloc`."""
    tiles: dict[Operation, tuple[list[int], int]] = field(
        default_factory=dict[Operation, tuple[list[int], int]]
    )
    """Slot addresses and size of every SRAM alloc."""
    second_inputs: set[SSAValue] = field(default_factory=set[SSAValue])
    """Tiles that are second operands, loaded on a channel of their own."""
    keep: list[object] = field(default_factory=list[object])
    peak_bytes: int = 0
    """Most SRAM bytes alive at once; buffers that are loaded ahead count from their own step."""
    peaks: dict[str, int] = field(default_factory=dict[str, int])
    """Most SRAM bytes alive at once while a layer's nest runs."""
    members: dict[str, str] = field(default_factory=dict[str, str])
    """Layers that run in the nest of another layer, by name."""
    implicit: dict[Operation, Tile] = field(default_factory=dict[Operation, Tile])
    """Tiles of an op's own: equal weights of a window sum, scalar parameters."""
    gathered: dict[Operation, Alternating] = field(default_factory=dict[Operation, Alternating])
    """Two tiles for the kernel rows that an op gathers; the ops of a layer share them."""
    _filled: set[int] = field(default_factory=set[int])
    _joining: dict[GenericOp, GenericOp | None] = field(
        default_factory=dict[GenericOp, GenericOp | None]
    )
    _joined: dict[GenericOp, GenericOp] = field(default_factory=dict[GenericOp, GenericOp])

    def conv_of(self, value: SSAValue) -> GenericOp:
        """Return the convolution that reads a weights tile."""
        return self._user(value, ("conv",), 1)

    def requant_of(self, value: SSAValue) -> GenericOp:
        """Return the requantisation that reads a bias tile."""
        return self._user(value, ("requant",), 1)

    def reduction_of(self, acc: SSAValue) -> GenericOp:
        """Return a reduction that writes an accumulator."""
        for user in users(root(acc)):
            if isinstance(user, GenericOp) and attr_str(user, "kind") in ("conv", "sum"):
                return user
        raise TilewrightError("E0501", "an accumulator is requantised but never written")

    def joining_of(self, requant: GenericOp) -> GenericOp | None:
        """Return the elementwise op that works in place on the results of a requantisation.

        It is issued with the drains. In a held buffer other layers may work between the two; then
        it is an op by itself. (A nest's own tiles are all loaded before.)
        """
        if requant not in self._joining:
            target = requant.outputs[0]
            if is_held(target):
                candidates = neighbours(requant, forward=True)
            else:
                candidates = users(root(target))
            found = None
            for op in candidates:
                kind = attr_str(op, "kind")
                if (
                    isinstance(op, GenericOp)
                    and kind == "eltwise"
                    and same_place(op.outputs[0], target)
                    and any(same_place(value, target) for value in op.inputs)
                ):
                    found = op
                    self._joined[op] = requant
                    break
                if is_held(target) and kind != "lut":
                    break
            self._joining[requant] = found
        return self._joining[requant]

    def joined_to(self, op: GenericOp) -> GenericOp | None:
        """Return the requantisation whose results an elementwise op takes up in place."""
        target = op.outputs[0]
        candidates = neighbours(op, forward=False) if is_held(target) else users(root(target))
        for candidate in candidates:
            kind = attr_str(candidate, "kind")
            if isinstance(candidate, GenericOp) and kind == "requant":
                self.joining_of(candidate)
            if is_held(target) and kind != "lut":
                break
        return self._joined.get(op)

    def fused_of(self, lut: GenericOp) -> GenericOp | None:
        """Return the requantisation whose drains apply a lookup's table themselves.

        In a held buffer the lookup is in place and follows it; what else it reads there is another
        layer's.
        """
        source = lut.inputs[0]
        if is_held(source):
            if not same_place(source, lut.outputs[0]):
                return None
            candidates = islice(neighbours(lut, forward=False), 1)
        else:
            candidates = users(root(source))
        for op in candidates:
            if (
                isinstance(op, GenericOp)
                and attr_str(op, "kind") == "requant"
                and same_place(op.outputs[0], source)
            ):
                return op
        return None

    def _user(self, value: SSAValue, kinds: tuple[str, ...], operand: int) -> GenericOp:
        base = root(value)
        for user in users(base):
            if not isinstance(user, GenericOp) or attr_str(user, "kind") not in kinds:
                continue
            if root(user.inputs[operand]) is base:
                return user
        raise TilewrightError("E0501", f"a tile is loaded for no {' or '.join(kinds)}")

    def group_out(self, conv: GenericOp) -> int:
        """Return the output channels of one group of a grouped convolution."""
        return attr_int(conv, "group_out")

    def pitch(self, buffer: SSAValue) -> int:
        """Return the bytes between the pixels of an SRAM buffer."""
        kind, owner = buffer.type, buffer.owner
        assert isinstance(kind, MemRefType)
        channels, item = kind.get_shape()[-1], item_bytes_of(kind)
        if isinstance(owner, Operation) and "dense" in owner.attributes:
            return channels * item
        return pixel_pitch(self.hardware, channels, item)

    def form(self, op: GenericOp, weights: tuple[int, ...]) -> tuple[ConvForm, int]:
        """Return how a reduction with weights [o, i/group, kh, kw] runs, and its input's pitch.

        A window sum counts every channel as a group.
        """
        out_channels, group_in, k_h, k_w = weights
        total = attr_int(op, "group", 1)
        group = out_channels if attr_str(op, "kind") == "sum" else 1
        if total > 1:
            group = out_channels // self.group_out(op)
        item, pitch = value_bytes(op.inputs[0]), self.pitch(root(op.inputs[0]))
        if group == 1 and attr_str(op, "kind") == "sum":
            # A depthwise convolution of one group.
            return ConvForm(True, False, 1, 1, 1, 1, 1, 1, k_h * k_w, 1, item), pitch
        packing, out_pitch = self._packing(op, out_channels)
        # Between the pixels of some channels of a held buffer lie those of other tensors: they may
        # be no numbers, and a merged kernel row would take more weights than the tile was made for.
        part = is_part(op.inputs[0])
        if part:
            packing = PLAIN
        form = conv_form(
            self.hardware,
            group_in * group,
            out_channels,
            group,
            (k_h, k_w),
            attr_ints(op, "dilations", (1, 1))[1],
            pitch,
            item,
            may_merge=total == 1 and not part,
            stride_x=attr_ints(op, "strides", (1, 1))[1],
            out_pitch=out_pitch,
            packing=packing,
            half_bytes=has_half_bytes(op.inputs[1]),
        )
        return form, pitch

    def form_of_output(self, op: GenericOp, out_channels: int) -> ConvForm:
        """Return how a reduction runs that makes `out_channels` channels."""
        if attr_str(op, "kind") == "sum":
            return self.form(op, (out_channels, 1, *attr_ints(op, "kernel", (1, 1))))[0]
        weights = root(op.inputs[1]).type
        assert isinstance(weights, MemRefType)
        return self.form(op, (out_channels, *weights.get_shape()[1:]))[0]

    def _packing(self, op: GenericOp, out_channels: int) -> tuple[Packing, int | None]:
        """Return how the tiler wants pixels packed, if the result's buffer allows, and its pitch.

        What lies between the channels of two packed pixels is overwritten: nothing of another
        tensor may lie there. A split reduction stays as it is.
        """
        pixels, runs, *stack = attr_ints(op, "packing", (1, 0))
        accumulator = root(op.outputs[0])
        owner = accumulator.owner
        assert isinstance(owner, Operation)
        if (pixels == 1 and not runs) or owner.parent is not op.parent:
            return PLAIN, None
        result = root(self._user(accumulator, ("requant",), 0).outputs[0]).type
        assert isinstance(result, MemRefType)
        alone = pixels == 1 or result.get_shape()[-1] == out_channels
        if not alone or item_bytes_of(result) != 1:
            return PLAIN, None
        stacked = (stack[0], stack[1]) if stack else (0, 0)
        return Packing(pixels, bool(runs), False, *stacked), pixel_pitch(
            self.hardware, out_channels
        )

    def ones_tile(self, op: GenericOp, emitter: Emitter) -> Tile:
        """Return the row of equal weights of a window sum, written when first asked for.

        They are ones for codes, and the window's reciprocal in fp16.
        """
        tile = self.implicit[op]
        if id(tile) not in self._filled:
            self._filled.add(id(tile))
            if value_bytes(op.inputs[0]) == 1:
                emitter.fill(whole(tile), 1)
            else:
                weight = attr_float(op, "weight", 1.0)
                row = np.full(self.hardware.array_size, weight, np.float16)
                place = emitter.constants.add(("window", weight), row.view(np.uint8))
                emitter.load_constant(*place, tile, emitter.channel_weights)
        return tile

    def gathered_bytes(self, op: GenericOp) -> int:
        """Return the bytes of one of the two tiles that kernel rows are gathered into, or 0."""
        if attr_str(op, "kind") != "conv":
            return 0
        accumulator = root(op.outputs[0]).type
        assert isinstance(accumulator, MemRefType)
        rows, columns, channels = accumulator.get_shape()
        return self.form_of_output(op, channels).stack_bytes(self.hardware, rows, columns)

    def scalar_tile(self, op: GenericOp) -> Tile:
        """Return the tile through which scalar parameters of an op reach the vector unit."""
        return self.implicit[op]

    def tile_bytes(self, op: memref.AllocOp) -> int:
        """Return the SRAM bytes of an alloc's tile."""
        kind = op.memref.type
        assert isinstance(kind, MemRefType)
        shape = kind.get_shape()
        role = attr_str(op, "role")
        hardware, item = self.hardware, item_bytes_of(kind)
        if role in ("mult", "shift", "row_gain"):
            return 0
        if role == "table":
            return 256
        if role == "row_table":
            return row_table_bytes(hardware)
        if role == "row_bias":
            return row_parameter_bytes(hardware, shape[0])
        if role in ("table_y", "table_x"):
            return align(8 * shape[0], hardware.sram_word_bytes)
        if role == "weights":
            form, _ = self.form(self.conv_of(op.memref), tuple(shape))
            return form.weight_bytes(hardware)
        if role == "bias":
            conv = self.reduction_of(self.requant_of(op.memref).inputs[0])
            form = self.form_of_output(conv, shape[-1])
            return parameter_bytes(hardware, form.blocks, value_bytes(conv.inputs[0]))
        pixels = 1
        for extent in shape[:-1]:
            pixels *= extent
        return activation_bytes(hardware, pixels, shape[-1], item, "dense" in op.attributes)
