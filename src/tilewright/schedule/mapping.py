"""The cycles of the best mapping of a layer: what its roofline is made of (docs/concepts/bound.md).

A mapping is uniform: every pass takes `p` horizontally adjacent output pixels of `g` groups, and
every step `t` kernel columns as one vector. Counted are passes and steps alone, without start-ups,
words at odd addresses, and what is left of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tilewright.spec.hardware import Hardware

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Reduction:
    """A convolution, a window sum, or a product with weights: one row of pixels."""

    pixels: int
    """Of the result, all images."""
    columns: int
    """Pixels of a row of it."""
    in_channels: int
    out_channels: int
    group: int = 1
    kernel: tuple[int, int] = (1, 1)
    """Rows and columns that ever read anything but padding."""
    stride: int = 1
    """Along a row."""
    dilation: int = 1
    """Along a row."""
    inputs: int = 0
    """Pixels of the operand that windows read, all images."""
    element_bytes: int = 1


@dataclass(frozen=True, order=True)
class Mapping:
    """How a layer is laid on the array."""

    cycles: int
    pixels: int
    """Output pixels of a pass."""
    groups: int
    """Groups of a pass."""
    taps: int
    """Kernel columns of a step."""
    diagonal: bool = False
    """Channels by themselves; then `groups` are all of them."""
    rows: int = 1
    """Kernel rows of a step: all, if the vector unit gathers them."""

    def __str__(self) -> str:
        if self.diagonal:
            return "diagonal"
        parts = (
            (self.pixels, "pixels"),
            (self.groups, "groups"),
            (self.rows, "kernel rows"),
            (self.taps, "kernel columns"),
        )
        return " x ".join(f"{count} {what}" for count, what in parts if count > 1) or "plain"


def reads(hardware: Hardware, elements: I64, item: int) -> I64:
    """Return the least cycles in which the array takes a vector, cut into its rows."""
    blocks = -(-elements // hardware.array_size)
    return np.maximum(blocks, -(-elements * item // hardware.sram_word_bytes))


@lru_cache(maxsize=4096)
def best_mapping(hardware: Hardware, work: Reduction) -> Mapping:
    """Return the mapping of the fewest cycles of the array; of equal ones the plainest."""
    best = min(_runs(hardware, work, gathered) for gathered in (True, False))
    if work.group == work.element_bytes == 1 and work.kernel[0] > 1:
        best = min(best, _whole_windows(hardware, work))
    if work.group == work.in_channels == work.out_channels > 1:
        diagonal = Mapping(_diagonal(hardware, work), 1, work.group, 1, True)
        best = diagonal if diagonal.cycles <= best.cycles else best
    return best


def _whole_windows(hardware: Hardware, work: Reduction) -> Mapping:
    """Return the mapping of one vector a window, whose kernel rows the vector unit gathers.

    It takes the longer of the passes and of the gathering, in which every row of results needs
    `kernel[0]` rows of the operand.
    """
    k_h, k_w = work.kernel
    elements = k_h * k_w * work.in_channels
    words = int(reads(hardware, np.array(elements), work.element_bytes))
    loads = -(-work.pixels // hardware.accumulator_rows)
    blocks = -(-work.out_channels // hardware.array_size)
    passes = blocks * max(work.pixels * words, loads * elements)
    moved = work.pixels * min(work.stride, k_w) * k_h * work.in_channels
    return Mapping(max(passes, -(-moved // hardware.vector_lanes)), 1, 1, k_w, False, k_h)


def _diagonal(hardware: Hardware, work: Reduction) -> int:
    """Return the cycles of channels by themselves: pixels side by side fill the array's width."""
    taken = min(hardware.array_size, hardware.sram_word_bytes // work.element_bytes)
    steps = work.pixels * work.kernel[0] * work.kernel[1]
    if work.stride > 1:
        return steps * -(-work.group // taken)
    return -(-steps * work.group // taken)


def _runs(hardware: Hardware, work: Reduction, gathered: bool) -> Mapping:
    """Return the best mapping of vectors that are runs of pixels, which meet weights among zeros.

    `gathered`: the tile holds the channels of `g` groups alone, loaded from DDR for that if there
    are more; else pixels lie as far apart as all channels take.
    """
    size, group = hardware.array_size, work.group
    columns = work.kernel[1]
    # With one kernel column pixels of the next row go on where a row ends.
    most = work.pixels if columns == work.stride == 1 else work.columns
    # More pixels, or groups, than the array has columns only repeat what fewer do.
    pixels = np.arange(1, min(most, size) + 1)[:, None]
    groups = np.arange(1, min(group, size) + 1)[None]
    least: list[Mapping] = []
    for taps in range(1, columns + 1):
        words, rows = _tile(hardware, work, (pixels, groups, taps), gathered)
        words, rows = words * (group // groups), rows * (group // groups)
        if group > 1:
            last = _tile(hardware, work, (pixels, group % groups, taps), gathered)
            words, rows = words + last[0], rows + last[1]
        passes = -(-work.pixels // pixels)
        # A row of weights a cycle, anew for what accumulators hold at a time.
        loads = -(-passes // hardware.accumulator_rows)
        cycles = np.maximum(-(-work.pixels * words // pixels), loads * rows)
        if gathered and group > 1:
            apart = (taps == 1) & (pixels == 1)
            cycles = np.maximum(cycles, np.where(apart, 0, _gather(hardware, work, groups)))
        row, column = divmod(int(cycles.argmin()), cycles.shape[1])
        least.append(Mapping(int(cycles[row, column]), row + 1, column + 1, taps))
    return min(least)


def _tile(
    hardware: Hardware, work: Reduction, shape: tuple[I64, I64, int], gathered: bool
) -> tuple[I64, I64]:
    """Return the cycles of a pass over a tile and the rows of its weights.

    Args:
        hardware: the target.
        work: the layer.
        shape: pixels of a pass, groups of the tile (0: nothing), and kernel columns of a step.
        gathered: see `_runs`.
    """
    pixels, groups, taps = shape
    own = groups * (work.in_channels // work.group)
    pitch = own if gathered else work.in_channels
    blocks = -(-pixels * groups * (work.out_channels // work.group) // hardware.array_size)
    words = rows = np.zeros(1, np.int64)
    whole, rest = divmod(work.kernel[1], taps)
    for count, step in ((whole, taps), (1, rest)):
        if step:
            run = (step - 1) * work.dilation + (pixels - 1) * work.stride
            vector = run * pitch + own
            words = words + count * reads(hardware, vector, work.element_bytes)
            rows = rows + count * vector
    return work.kernel[0] * blocks * words, work.kernel[0] * blocks * rows


def _gather(hardware: Hardware, work: Reduction, groups: I64) -> I64:
    """Return the cycles in which DDR hands over the operand in runs of the channels of `groups`."""
    unit, item = hardware.ddr_bus_bytes, work.element_bytes * work.in_channels // work.group
    full, rest = work.group // groups, work.group % groups
    units = full * -(-groups * item // unit) + -(-rest * item // unit)
    cycles = work.inputs * units * unit / hardware.ddr_bytes_per_cycle
    return np.where(groups == work.group, 0, np.ceil(cycles)).astype(np.int64)


def product_cycles(
    hardware: Hardware, rows: int, deep: int, columns: int, images: int, item: int
) -> int:
    """Return the array's cycles of a product of activations; `images` matrices are the weights.

    `rows` are those of all images together. Zeros cannot lie among activations: one row a pass.
    """
    size = hardware.array_size
    blocks = -(-columns // size)
    vector = int(reads(hardware, np.array(deep), item))
    loads = images * -(-rows // (images * hardware.accumulator_rows))
    return blocks * max(rows * vector, loads * deep)


@lru_cache(maxsize=1024)
def maxima(kernel: int, stride: int) -> int:
    """Return the comparisons a maximum of `kernel` neighbours takes, windows `stride` apart.

    The best way that is known: maxima of what windows have in common are made once.
    """
    if kernel <= 1:
        return 0
    if stride == 1:
        # Doubling: windows of 2, 4, 8; two that overlap make any other. Or, for long ones, running
        # maxima from both ends of blocks as long as the window.
        return min((kernel - 1).bit_length(), 3)
    blocks, rest = divmod(kernel, stride)
    if not blocks:
        return kernel - 1
    return stride - 1 + maxima(blocks, 1) + rest
