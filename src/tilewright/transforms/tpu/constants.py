"""The constants segment: packed weights, parameter blocks and tables, each distinct one once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import TilewrightError
from tilewright.schedule.footprint import ConvForm, Stack, align
from tilewright.spec.hardware import Hardware

Bytes = npt.NDArray[np.uint8]


class ConstantSegment:
    """Bytes at R1, in order of first use; equal content is stored once."""

    def __init__(self, hardware: Hardware) -> None:
        self._unit = max(hardware.tensor_alignment, hardware.dma_burst_size)
        self._parts: list[Bytes] = []
        self._size = 0
        self._by_content: dict[bytes, int] = {}
        self._by_key: dict[tuple[object, ...], tuple[int, int]] = {}
        self.half_bytes: dict[str, tuple[int, int]] = {}
        """Of layers with weights of 4 bits: bytes of their tiles, and bytes no weight fills."""

    def lookup(self, key: tuple[object, ...]) -> tuple[int, int] | None:
        """Return offset and size of what was added under `key`, if anything."""
        return self._by_key.get(key)

    def add(self, key: tuple[object, ...], content: Bytes) -> tuple[int, int]:
        """Append `content` (aligned), or find it; return its offset and size in bytes."""
        flat = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
        digest = hashlib.sha3_256(flat.tobytes()).digest()
        offset = self._by_content.get(digest)
        if offset is None:
            offset = self._size
            self._by_content[digest] = offset
            padded = align(flat.size, self._unit)
            self._parts.append(np.concatenate([flat, np.zeros(padded - flat.size, np.uint8)]))
            self._size += padded
        self._by_key[key] = (offset, flat.size)
        return self._by_key[key]

    def count_half_bytes(self, layer: str, form: ConvForm, size: int) -> None:
        """Take note of a tile of a layer's weights of 4 bits, `size` bytes as it lies in DDR."""
        before = self.half_bytes.get(layer, (0, 0))
        padding = size - form.filled_bytes
        self.half_bytes[layer] = (before[0] + size, before[1] + padding)

    def content(self) -> Bytes:
        """Return the whole segment."""
        return np.concatenate(self._parts) if self._parts else np.zeros(0, np.uint8)


def pack_weights(form: ConvForm, weights: npt.NDArray[Any], pitch: int) -> Bytes:
    """Pack a tile's weights [o, i/group, kh, kw] (int8 or fp16) in the order `mac_conv` reads them.

    `pitch` is the SRAM bytes from pixel to pixel, which merged kernel rows step over. Returns
    [part, block, row, column] bytes, rows `form.weight_pitch` bytes apart. Weights of 4 bits (int8
    values of -8..7) lie two a byte: even columns in the low half, odd ones in the high half.

    Raises:
        TilewrightError: E0501, a weight of 4 bits is none.
    """
    out_channels, group_in, k_h, k_w = weights.shape
    kind = weights.dtype
    assert kind.itemsize == form.element_bytes, (kind, form)
    width = form.weight_pitch * 2 if form.half_bytes else form.weight_pitch // kind.itemsize
    packed = np.zeros((form.parts, form.part_blocks, form.weight_rows, width), kind)
    if form.diagonal:
        row = weights.reshape(out_channels, k_h * k_w).T
        matrix = np.zeros((1, k_h * k_w, form.part_out_channels), kind)  # part, step, column
        for first in _pixel_columns(form):
            matrix[0, :, first : first + out_channels] = row
    elif form.group_pack > 1:
        pack, group_out = form.group_pack, form.part_out_channels // form.group_pack
        grouped = weights.reshape(form.parts, pack, group_out, group_in, k_h * k_w)
        blocks = np.zeros((form.parts, k_h * k_w, pack, group_in, pack, group_out), kind)
        for index in range(pack):
            blocks[:, :, index, :, index, :] = grouped[:, index].transpose(0, 3, 2, 1)
        matrix = blocks.reshape(form.parts, -1, pack * group_out)
    elif form.merge_kernel_row:
        matrix = _run_matrix(form, weights, pitch // kind.itemsize)
    else:
        parts = weights.reshape(form.parts, form.part_out_channels, group_in, k_h, k_w)
        matrix = parts.transpose(0, 3, 4, 2, 1).reshape(form.parts, -1, form.part_out_channels)
    for block in range(form.part_blocks):
        columns = matrix[:, :, block * form.columns : (block + 1) * form.columns]
        packed[:, block, :, : columns.shape[2]] = columns
    if form.half_bytes:
        return two_a_byte(packed)
    return packed.reshape(-1).view(np.uint8)


def two_a_byte(codes: npt.NDArray[np.int8]) -> Bytes:
    """Return codes of -8..7, an even number of them, two a byte, the first in the low half.

    Raises:
        TilewrightError: E0501, a code does not fit 4 bits.
    """
    if codes.size and not -8 <= int(codes.min()) <= int(codes.max()) <= 7:
        found = f"{int(codes.min())}..{int(codes.max())}"
        raise TilewrightError("E0501", f"weights of 4 bits are -8..7, not {found}")
    low, high = (codes.reshape(-1)[first::2].view(np.uint8) & np.uint8(15) for first in (0, 1))
    return low | np.left_shift(high, np.uint8(4))


def _pixel_columns(form: ConvForm) -> list[int]:
    """Return the first column of every output pixel of a pass."""
    return [pixel * form.out_pitch for pixel in range(form.pixel_pack)]


def _run_matrix(form: ConvForm, weights: npt.NDArray[Any], wide: int) -> npt.NDArray[Any]:
    """Return [1, kernel row and element of the run, column], zero where nothing belongs.

    `wide` is the elements from one pixel of the run to the next.
    """
    out_channels, group_in, k_h, k_w = weights.shape
    if form.stack is not None:
        return _stack_matrix(form, form.stack, weights)
    groups = form.part_in_channels // group_in
    group_out = out_channels // groups
    stride, dilation = form.steps
    rows = np.zeros((k_h, form.run_pixels, wide, form.part_out_channels), weights.dtype)
    by_position = weights.transpose(2, 3, 1, 0)  # ky, kx, input, output
    for pixel, first in enumerate(_pixel_columns(form)):
        begin = pixel * stride
        window = rows[:, begin : begin + (k_w - 1) * dilation + 1 : dilation]
        for group in range(groups):
            ins, outs = group * group_in, group * group_out
            window[:, :, ins : ins + group_in, first + outs : first + outs + group_out] = (
                by_position[..., outs : outs + group_out]
            )
    run = rows.reshape(k_h, -1, form.part_out_channels)[:, : form.vector]
    return run.reshape(1, k_h * form.vector, form.part_out_channels)


def _stack_matrix(form: ConvForm, stack: Stack, weights: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return [1, element of the window's units, column], zero where nothing belongs."""
    out_channels, in_channels, k_h, k_w = weights.shape
    rows = np.zeros((stack.units, stack.pitch, out_channels), weights.dtype)
    by_position = weights.transpose(2, 3, 1, 0)  # ky, kx, input, output
    for ky in range(k_h):
        for kx in range(k_w):
            unit, pixel = divmod(kx, stack.pixels)
            first = ky * stack.run + pixel * stack.pixel
            rows[unit, first : first + in_channels] = by_position[ky, kx]
    return rows.reshape(1, -1, out_channels)[:, : form.vector]


def pack_parameters(
    hardware: Hardware,
    form: ConvForm,
    bias: npt.NDArray[np.int32],
    mult: npt.NDArray[np.int32],
    shift: npt.NDArray[np.int8],
) -> Bytes:
    """Pack per-channel parameters into `vec_param` blocks: biases, multipliers, shifts."""
    lanes = hardware.vector_lanes
    columns = (
        (0, bias.astype("<i4")),
        (4 * lanes, mult.astype("<i4")),
        (8 * lanes, shift.astype(np.uint8)),
    )
    return _pack_columns(form, 9 * lanes, columns).reshape(-1)


def pack_row_parameters(
    hardware: Hardware, gain: npt.NDArray[np.int16], bias: npt.NDArray[np.int32]
) -> Bytes:
    """Pack the arrays of a layer normalisation into blocks of `lanes` biases and `lanes` gains."""
    lanes = hardware.vector_lanes
    blocks = -(-gain.size // lanes)
    packed = np.zeros((blocks, 6 * lanes), np.uint8)
    for first, array in ((0, bias.astype("<i4")), (4 * lanes, gain.astype("<i2"))):
        padded = np.zeros(blocks * lanes, array.dtype)
        padded[: array.size] = array
        size = lanes * array.itemsize
        packed[:, first : first + size] = padded.view(np.uint8).reshape(blocks, size)
    return packed.reshape(-1)


def pack_biases(
    hardware: Hardware, form: ConvForm, bias: npt.NDArray[np.float32], clamp: tuple[float, float]
) -> Bytes:
    """Pack float32 biases into blocks for `vec_param`, and one more with the clamp's bounds."""
    lanes = hardware.vector_lanes
    blocks = _pack_columns(form, 4 * lanes, [(0, bias.astype("<f4"))])
    return np.concatenate((blocks.reshape(-1), pack_clamp(hardware, clamp)))


def pack_clamp(hardware: Hardware, clamp: tuple[float, float]) -> Bytes:
    """Pack the bounds of a float clamp: lanes 0 and 1 of a V register."""
    block = np.zeros(hardware.vector_lanes, "<f4")
    block[:2] = clamp
    return block.view(np.uint8)


def _pack_columns(
    form: ConvForm, block_bytes: int, columns: Sequence[tuple[int, npt.NDArray[Any]]]
) -> Bytes:
    """Return [part, block, byte]; `columns` are the first byte and the values of all channels."""
    blocks = np.zeros((form.parts, form.part_blocks, block_bytes), np.uint8)
    if form.pixel_pack > 1:
        for start, values in columns:
            raw = np.ascontiguousarray(values).view(np.uint8)
            for first in _pixel_columns(form):
                place = start + first * values.itemsize
                blocks[0, 0, place : place + raw.size] = raw
        return blocks
    for part in range(form.parts):
        for block in range(form.part_blocks):
            first = part * form.part_out_channels + block * form.columns
            last = min(first + form.columns, (part + 1) * form.part_out_channels)
            for start, values in columns:
                raw = np.ascontiguousarray(values[first:last]).view(np.uint8)
                blocks[part, block, start : start + raw.size] = raw
    return blocks


def pack_scalars(hardware: Hardware, mult_a: int, mult_b: int, shift: int) -> Bytes:
    """Pack an elementwise operation's parameters: multiplier a and shift, multiplier b."""
    lanes = hardware.vector_lanes
    block = np.zeros(9 * lanes, np.uint8)
    block[4 * lanes : 4 * lanes + 8] = np.array([mult_a, mult_b], "<i4").view(np.uint8)
    block[8 * lanes] = shift
    return block
