"""Physical sizes of SRAM tiles: what the tiler counts and the tpu lowering builds.

One definition for both, so that a tile that was planned to fit does fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, gcd

from tilewright.spec.hardware import Hardware
from tilewright.spec.limits import row_table_registers


def align(value: int, unit: int) -> int:
    """Return `value` rounded up to a multiple of `unit`."""
    return -(-value // unit) * unit


def pixel_pitch(hardware: Hardware, channels: int, element_bytes: int = 1) -> int:
    """Return the SRAM bytes between two pixels of `channels` elements.

    The next power of two below a word, else whole words: a vector of channels never straddles
    words.
    """
    size = channels * element_bytes
    word = hardware.sram_word_bytes
    if size >= word:
        return align(size, word)
    pitch = 1
    while pitch < size:
        pitch *= 2
    return pitch


def activation_bytes(
    hardware: Hardware, pixels: int, channels: int, element_bytes: int = 1, dense: bool = False
) -> int:
    """Return the SRAM bytes of an activation tile of `pixels` pixels, rounded up to words.

    `dense`: nothing lies between the pixels.
    """
    pitch = channels * element_bytes if dense else pixel_pitch(hardware, channels, element_bytes)
    return align(pixels * pitch, hardware.sram_word_bytes)


@dataclass(frozen=True)
class Packing:
    """How many pixels share a pass through the array, and how its weights are laid out.

    A choice of the tiler that changes no result: the affine level carries it as the attribute
    `packing = [pixels, runs]` of a `conv` or `sum` (or `[pixels, runs, stack, stack_pitch]`), and
    `dense` of the allocation of its input.
    """

    pixels: int = 1
    """Horizontally adjacent output pixels of one activation vector."""
    runs: bool = False
    """The vector is a run of whole pixels, which meets weights embedded in zeros; groups too are
    laid into one such matrix. Otherwise a depthwise reduction stays on the diagonal."""
    dense: bool = False
    """Nothing lies between the pixels of the input tile, which is loaded from DDR: a row is one
    run for the DMA, not a run a pixel. Only with `runs`."""
    stack: int = 0
    """If not zero, the vector unit first gathers the kernel rows: for so many pixels side by side,
    those of all kernel rows lie behind each other, and one vector takes in the whole window. Only
    with `runs`, and one pixel a pass."""
    stack_pitch: int = 0
    """Bytes from one such group of pixels to the next."""

    @property
    def plain(self) -> bool:
        """Whether it is what a tile gets that nothing was chosen for."""
        return self.pixels == 1 and not self.runs


PLAIN = Packing()


@dataclass(frozen=True)
class Stack:
    """How kernel rows are gathered (`Packing.stack`): units of some pixels of all kernel rows."""

    pixels: int
    """Pixels of a unit."""
    advance: int
    """Pixels from the first of one unit to the first of the next."""
    units: int
    """Units a window spans."""
    kernel_rows: int
    run: int
    """Bytes a unit has of one kernel row."""
    pixel: int
    """Bytes from one pixel to the next, as in the tile they are copied from."""
    pitch: int
    """Bytes from one unit to the next."""

    def row_units(self, hardware: Hardware, columns: int, step: int) -> int:
        """Return the units of a row of `columns` windows, `step` units apart, in whole words."""
        whole = hardware.sram_word_bytes // gcd(hardware.sram_word_bytes, self.pitch)
        return align((columns - 1) * step + self.units, whole)


@dataclass(frozen=True)
class ConvForm:
    """How one convolution tile is laid on the array.

    A tile is cut into `parts` of equal size (packs of groups; one part when not grouped), each
    executed by its own `mac_conv`; all other counts are of one part.
    """

    diagonal: bool
    """Depthwise: one input channel a column."""
    merge_kernel_row: bool
    """The pixels of a kernel row, and of all packed output pixels, are read as one vector.

    What lies between the channels of two pixels then meets weights of zero. As fp16 those bytes may
    be no number: such tiles are filled with zeros once.
    """
    parts: int
    """Packs of groups in the tile."""
    group_pack: int
    """Groups side by side on the array (block-diagonal weights) in one part."""
    part_in_channels: int
    """Input channels of a part."""
    part_out_channels: int
    """Output channels of a part."""
    vector: int
    """Elements of the activation vector read at one kernel position."""
    rows: int
    """Array rows of a full channel block."""
    kernel_steps: int
    """Kernel positions that are separate steps (k_h * k_w, or k_h when merged)."""
    columns: int
    """Output channels of a full output-channel block; of packed pixels all columns in use."""
    element_bytes: int = 1
    """Bytes of an activation, and of a weight of more than 4 bits."""
    pixel_pack: int = 1
    """Output pixels of a pass; if several, there is one block, and `part_out_channels` counts its
    columns."""
    out_pitch: int = 0
    """Columns from one packed pixel to the next: how far apart their results lie."""
    pitch: int = 0
    """Bytes between the pixels of the input tile; 0: does not matter."""
    steps: tuple[int, int] = (1, 1)
    """Stride and dilation along a row, in input pixels."""
    kernel_columns: int = 1
    """Kernel positions along a row."""
    stack: Stack | None = None
    """Kernel rows are gathered first: `pitch`, `steps` and `kernel_columns` are those of units."""
    half_bytes: bool = False
    """Weights have 4 bits: two a byte, rows in whole bytes."""

    @property
    def pixel_channels(self) -> int:
        """Output channels of one pixel of a part."""
        return self.part_out_channels - (self.pixel_pack - 1) * self.out_pitch

    @property
    def run_pixels(self) -> int:
        """Input pixels a merged vector spans."""
        stride, dilation = self.steps
        return (self.kernel_columns - 1) * dilation + (self.pixel_pack - 1) * stride + 1

    def vectors(self, columns: int) -> int:
        """Return the activation vectors of a row of `columns` output pixels.

        A rest of less than `pixel_pack` pixels is one vector that ends with the row: some pixels
        are computed twice.
        """
        return ceil(columns / self.pixel_pack)

    @property
    def row_blocks(self) -> int:
        """Channel blocks a kernel position takes."""
        return ceil(self.vector / self.rows)

    @property
    def last_rows(self) -> int:
        """Rows of the last channel block."""
        return self.vector - (self.row_blocks - 1) * self.rows

    @property
    def part_blocks(self) -> int:
        """Output-channel blocks of a part."""
        return ceil(self.part_out_channels / self.columns)

    @property
    def blocks(self) -> int:
        """Output-channel blocks of the tile."""
        return self.parts * self.part_blocks

    @property
    def weight_pitch(self) -> int:
        """Bytes between weight rows."""
        return align(self.row_bytes(min(self.part_out_channels, self.columns)), 4)

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a weight row of so many columns."""
        return ceil(columns / 2) if self.half_bytes else columns * self.element_bytes

    @property
    def weight_rows(self) -> int:
        """Weight rows of one output-channel block."""
        return self.kernel_steps * (1 if self.diagonal else self.vector)

    @property
    def filled_bytes(self) -> int:
        """Bytes of the packed weights without those that only keep rows and blocks apart.

        Zeros among which weights are embedded count: the array multiplies by them.
        """
        weights = self.parts * self.weight_rows * self.part_out_channels
        return self.row_bytes(weights)

    def piece_rows(self, hardware: Hardware, rows: int, columns: int) -> int:
        """Return the rows that one instruction takes of what is gathered for it: a block's."""
        most = max(1, hardware.accumulator_rows // columns)
        return ceil(rows / ceil(rows / most))

    def stack_bytes(self, hardware: Hardware, rows: int, columns: int) -> int:
        """Return the bytes of one of the two tiles that kernel rows are gathered into, or 0."""
        if self.stack is None:
            return 0
        units = self.stack.row_units(hardware, columns, self.steps[0])
        most = max(1, hardware.accumulator_rows // columns)
        return min(rows, most) * units * self.stack.pitch

    def weight_bytes(self, hardware: Hardware) -> int:
        """Return the bytes of the tile's packed weights, rounded up to words."""
        size = self.blocks * self.weight_rows * self.weight_pitch
        return align(size, hardware.sram_word_bytes)


def conv_form(
    hardware: Hardware,
    in_channels: int,
    out_channels: int,
    group: int,
    kernel: tuple[int, int],
    dilation_x: int,
    pitch: int | None = None,
    element_bytes: int = 1,
    may_merge: bool = True,
    stride_x: int = 1,
    out_pitch: int | None = None,
    packing: Packing = PLAIN,
    half_bytes: bool = False,
) -> ConvForm:
    """Choose how a convolution with these *tile* sizes is laid on the array.

    `in_channels`, `out_channels` and `group` are those of the tile, all groups together. `pitch`
    is the distance in bytes of pixels in the input tile if that is not what `in_channels` alone
    would give: the last part of a split reduction lies in a tile made for a larger part;
    `out_pitch` likewise of the result. Without `may_merge` kernel rows stay apart: the last group
    alone of a grouped convolution has room for weights as its tile of several groups needs them,
    and that is without merging. A `packing` that is not possible (see `can_pack`) is ignored.
    `half_bytes`: weights of 4 bits, which lie as others do but two a byte.
    """
    size = hardware.array_size
    k_h, k_w = kernel
    group_in, group_out = in_channels // group, out_channels // group
    if pitch is None:
        pitch = pixel_pitch(hardware, in_channels, element_bytes)
    if out_pitch is None:
        out_pitch = pixel_pitch(hardware, out_channels, element_bytes)
    steps = (stride_x, dilation_x)
    diagonal = group > 1 and group_in == 1 and group_out == 1
    packed = can_pack(
        hardware, in_channels, out_channels, diagonal, stride_x, pitch, out_pitch, element_bytes,
        packing,
    )  # fmt: skip
    if packed and not packing.runs:
        columns = (packing.pixels - 1) * out_pitch + out_channels
        return ConvForm(
            True, False, 1, 1, columns, columns, columns, columns, k_h * k_w, columns,
            element_bytes, packing.pixels, out_pitch, pitch, steps, k_w, half_bytes=half_bytes,
        )  # fmt: skip
    stack = None
    if packed:
        stack = _stack_of(packing, in_channels, group, kernel, stride_x, dilation_x, pitch)
    if stack is not None:
        vector = (stack.units - 1) * stack.pitch + k_h * stack.run
        return ConvForm(
            False, True, 1, 1, in_channels, out_channels, vector, min(size, vector), 1,
            min(size, out_channels), element_bytes, pitch=stack.pitch,
            steps=(stride_x // stack.advance, 1), kernel_columns=stack.units, stack=stack,
            half_bytes=half_bytes,
        )  # fmt: skip
    wide = pitch // element_bytes
    merged = packed or (
        group == 1
        and may_merge
        and k_w > 1
        and dilation_x == 1
        and wide * 2 <= size
        and _merging_pays(hardware, pitch, k_w, element_bytes)
    )
    if merged:
        pixels = packing.pixels if packed else 1
        run = (k_w - 1) * dilation_x + (pixels - 1) * stride_x + 1
        vector = (run - 1) * wide + in_channels
        columns = (pixels - 1) * out_pitch + out_channels
        return ConvForm(
            False, True, 1, 1, in_channels, columns, vector, min(size, vector), k_h,
            min(size, columns), element_bytes, pixels, out_pitch if pixels > 1 else 0, pitch, steps,
            k_w, half_bytes=half_bytes,
        )  # fmt: skip
    if diagonal:
        columns = min(size, out_channels)
        return ConvForm(
            True, False, 1, 1, in_channels, out_channels, columns, columns, k_h * k_w, size,
            element_bytes, half_bytes=half_bytes,
        )  # fmt: skip
    pack = max(1, min(group, size // group_in, size // group_out))
    while group % pack:
        pack -= 1
    channels, columns = pack * group_in, pack * group_out
    return ConvForm(
        False, False, group // pack, pack, channels, columns, channels, min(size, channels),
        k_h * k_w, min(size, columns), element_bytes, half_bytes=half_bytes,
    )  # fmt: skip


def can_pack(
    hardware: Hardware,
    in_channels: int,
    out_channels: int,
    diagonal: bool,
    stride_x: int,
    pitch: int,
    out_pitch: int,
    element_bytes: int,
    packing: Packing,
) -> bool:
    """Tell whether a tile's pixels can be packed that way (the columns of a row apart).

    The results of several pixels lie in one block of columns, as far apart as in memory. On the
    diagonal packed pixels read what lies side by side: a stride of 1, the pixels of input and
    result equally far apart. Only codes: in fp16 what lies between two pixels may be no number, and
    what is summed in which order would change results.
    """
    if packing.plain or element_bytes != 1:
        return False
    columns = (packing.pixels - 1) * out_pitch + out_channels
    if packing.pixels > 1 and columns > hardware.array_size:
        return False
    if packing.runs:
        return True
    return diagonal and stride_x == 1 and pitch == out_pitch and in_channels == out_channels


def _stack_of(
    packing: Packing,
    in_channels: int,
    group: int,
    kernel: tuple[int, int],
    stride_x: int,
    dilation_x: int,
    pitch: int,
) -> Stack | None:
    """Return how a packing gathers kernel rows; None: not at all, or it cannot."""
    k_h, k_w = kernel
    pixels = packing.stack
    if not pixels or packing.pixels > 1 or group > 1 or dilation_x > 1 or k_w % pixels:
        return None
    advance = stride_x if pixels == k_w else pixels
    run = (pixels - 1) * pitch + in_channels
    if stride_x % advance or packing.stack_pitch < k_h * run:
        return None
    return Stack(pixels, advance, k_w // pixels, k_h, run, pitch, packing.stack_pitch)


def vector_words(hardware: Hardware, size_bytes: int, alignment: int) -> int:
    """Return the words a vector takes at the worst address of an alignment that divides a word."""
    word = hardware.sram_word_bytes
    return -(-(word - min(alignment, word) + size_bytes) // word)


def _merging_pays(hardware: Hardware, pitch: int, k_w: int, element_bytes: int) -> bool:
    """Tell whether one long vector a kernel row reads fewer words than one short vector a position.

    The long one starts at any pixel, so that it straddles words.
    """
    size = hardware.array_size * element_bytes
    full, rest = divmod(k_w * pitch, size)
    merged = full * vector_words(hardware, size, pitch)
    merged += vector_words(hardware, rest, pitch) if rest else 0
    return merged < k_w * vector_words(hardware, pitch, pitch)


def max_parameter_blocks(hardware: Hardware) -> int:
    """Return the output-channel blocks one `vec_drain` may cover.

    Bounded by a parameter bank and by the V registers left beside one lookup table, halved because
    the next tile's biases are loaded while this one's are in use.
    """
    table = table_registers(hardware)
    return max(1, min(hardware.quant_bank_entries, 16, (hardware.vector_registers - table) // 2))


def table_registers(hardware: Hardware) -> int:
    """Return the V registers a 256-byte lookup table takes."""
    return ceil(256 / (4 * hardware.vector_lanes))


def row_table_bytes(hardware: Hardware) -> int:
    """Return the bytes of a softmax's table, in whole V registers."""
    return row_table_registers(hardware) * 4 * hardware.vector_lanes


def parameter_bytes(hardware: Hardware, blocks: int, element_bytes: int = 1) -> int:
    """Return the bytes of the parameters of `blocks` blocks of channels, rounded up to words.

    Codes: a bias, a multiplier and a shift a lane. fp16: a float32 bias a lane, and after all
    blocks one more with the bounds of the clamp.
    """
    lanes = hardware.vector_lanes
    size = blocks * 9 * lanes if element_bytes == 1 else (blocks + 1) * 4 * lanes
    return align(size, hardware.sram_word_bytes)


def ones_bytes(hardware: Hardware, element_bytes: int = 1) -> int:
    """Return the bytes of the row of equal weights that a window sum multiplies by."""
    return align(hardware.array_size * element_bytes, hardware.sram_word_bytes)
