"""Physical sizes of SRAM tiles: what the tiler counts and the tpu lowering builds.

One definition for both, so that a tile that was planned to fit does fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tilewright.spec.hardware import Hardware


def align(value: int, unit: int) -> int:
    """Return `value` rounded up to a multiple of `unit`."""
    return -(-value // unit) * unit


def pixel_pitch(hardware: Hardware, channels: int, element_bytes: int = 1) -> int:
    """Return the SRAM bytes between two pixels of `channels` elements.

    The next power of two below a word, else whole words: a vector of channels never straddles words.
    """
    size = channels * element_bytes
    word = hardware.sram_word_bytes
    if size >= word:
        return align(size, word)
    pitch = 1
    while pitch < size:
        pitch *= 2
    return pitch


def activation_bytes(hardware: Hardware, pixels: int, channels: int, element_bytes: int = 1) -> int:
    """Return the SRAM bytes of an activation tile of `pixels` pixels, rounded up to words."""
    return align(pixels * pixel_pitch(hardware, channels, element_bytes), hardware.sram_word_bytes)


@dataclass(frozen=True)
class ConvForm:
    """How one convolution tile is laid on the array; all counts are of one `mac_conv`."""

    diagonal: bool
    """Depthwise: one input channel a column."""
    merge_kernel_row: bool
    """A whole kernel row (k_w pixels) is read as one vector: for few input channels and a dilation of 1."""
    group_pack: int
    """Groups side by side on the array (block-diagonal weights); 1 for ungrouped convolutions."""
    block_channels: int
    """Input channels of the vector one output-channel block reads (per kernel position)."""
    rows: int
    """Rows of a full channel block."""
    row_blocks: int
    """Channel blocks."""
    last_rows: int
    """Rows of the last channel block."""
    block_columns: int
    """Output channels of a full output-channel block."""
    kernel_steps: int
    """Kernel positions that are separate steps (k_h * k_w, or k_h when merged)."""

    def weight_pitch(self, columns: int) -> int:
        """Return the bytes between weight rows of a tile whose widest block has `columns` columns."""
        return align(columns, 4)

    def step_rows(self) -> int:
        """Return the weight rows of one output-channel block."""
        if self.diagonal:
            return self.kernel_steps
        return self.kernel_steps * ((self.row_blocks - 1) * self.rows + self.last_rows)

    def oc_blocks(self, out_channels: int) -> int:
        """Return the output-channel blocks of a tile of `out_channels` channels."""
        return ceil(out_channels / self.block_columns)

    def weight_bytes(self, hardware: Hardware, out_channels: int) -> int:
        """Return the bytes of the packed weights of a tile of `out_channels` channels."""
        pitch = self.weight_pitch(min(out_channels, self.block_columns))
        size = self.oc_blocks(out_channels) * self.step_rows() * pitch
        return align(size, hardware.sram_word_bytes)


def conv_form(
    hardware: Hardware,
    in_channels: int,
    out_channels: int,
    group: int,
    kernel: tuple[int, int],
    dilation_x: int,
) -> ConvForm:
    """Choose how a convolution with these *tile* sizes is laid on the array.

    `in_channels` and `out_channels` are those of the tile, all groups of it together; `group` the groups of the tile.
    """
    size = hardware.array_size
    k_h, k_w = kernel
    per_group_in, per_group_out = in_channels // group, out_channels // group
    if group > 1 and per_group_in == 1 and per_group_out == 1:
        return ConvForm(True, False, 1, size, size, 1, size, size, k_h * k_w)
    if group > 1:
        pack = max(1, min(group, size // per_group_in, size // per_group_out))
        while group % pack:
            pack -= 1
        channels = pack * per_group_in
        rows = min(size, channels)
        blocks = ceil(channels / rows)
        columns = pack * per_group_out if pack > 1 or per_group_out <= size else size
        return ConvForm(
            False,
            False,
            pack,
            channels,
            rows,
            blocks,
            channels - (blocks - 1) * rows,
            columns,
            k_h * k_w,
        )
    pitch = pixel_pitch(hardware, in_channels)
    if k_w > 1 and dilation_x == 1 and pitch * 2 <= size:
        channels = k_w * pitch
        rows = min(size, channels)
        blocks = ceil(channels / rows)
        return ConvForm(
            False, True, 1, channels, rows, blocks, channels - (blocks - 1) * rows, size, k_h
        )
    rows = min(size, in_channels)
    blocks = ceil(in_channels / rows)
    return ConvForm(
        False,
        False,
        1,
        in_channels,
        rows,
        blocks,
        in_channels - (blocks - 1) * rows,
        size,
        k_h * k_w,
    )


def parameter_bytes(hardware: Hardware, blocks: int) -> int:
    """Return the bytes of `blocks` quantisation-parameter blocks, rounded up to words."""
    return align(blocks * 9 * hardware.vector_lanes, hardware.sram_word_bytes)
