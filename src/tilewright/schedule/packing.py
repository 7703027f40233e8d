"""Which packings of pixels a tile should try: how many share a pass, and by which weights.

The more pixels share a pass, the more columns of the array work and the fewer vectors are read and
drained; the weights, embedded in zeros, grow by more than as much.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from tilewright.schedule.cost import drain_cycles, mac_cycles, rates, tile_words
from tilewright.schedule.footprint import (
    PLAIN,
    ConvForm,
    Packing,
    align,
    conv_form,
    pixel_pitch,
)
from tilewright.spec.hardware import Hardware
from tilewright.spec.isa import BY_NAME

MAX_CHANNEL_BLOCKS = BY_NAME["mac_conv"].field["c_blocks"].high
GAIN = 0.8
"""A packing with more weights is tried if it takes at most this part of the cycles."""


@dataclass(frozen=True)
class PackingProblem:
    """What one reduction of a tile is; channels and groups are those of the tile."""

    in_channels: int
    out_channels: int
    group: int
    kernel: tuple[int, int]
    stride_x: int
    dilation_x: int
    rows: int
    """Output rows of a tile."""
    columns: int
    """Output columns of a tile."""
    least_columns: int
    """Output columns of the narrowest tile with the same weights."""
    loaded: tuple[int, int] | None = None
    """Rows and columns of the input tile, if it is loaded from DDR with all its channels."""
    half_bytes: bool = False
    """Weights have 4 bits."""

    def form(self, hardware: Hardware, packing: Packing) -> ConvForm:
        """Return how it lies on the array, its tensors in tiles of its own."""
        return conv_form(
            hardware,
            self.in_channels,
            self.out_channels,
            self.group,
            self.kernel,
            self.dilation_x,
            pitch=self.in_channels if packing.dense else None,
            stride_x=self.stride_x,
            packing=packing,
            half_bytes=self.half_bytes,
        )

    def cycles(self, hardware: Hardware, packing: Packing) -> float:
        """Return what the busiest of array, vector unit and load of the input takes for a tile."""
        form = self.form(hardware, packing)
        cycles = max(
            mac_cycles(hardware, form, self.rows, self.columns),
            drain_cycles(hardware, form, self.rows, self.columns),
        )
        if self.loaded is None:
            return cycles
        rows, columns = self.loaded
        pitch = self.in_channels if packing.dense else pixel_pitch(hardware, self.in_channels)
        words = tile_words(hardware, rows, columns, self.in_channels, pitch)
        size = rows * columns * self.in_channels
        return max(cycles, words, rates(hardware).transfer(size, rows))


@lru_cache(maxsize=4096)
def packings(hardware: Hardware, problem: PackingProblem) -> tuple[Packing, ...]:
    """Return the packings worth trying, from least to most weights.

    First the plain one, last the fastest; each takes clearly fewer cycles than those before. Codes
    only; the reduction must not be split, the result's tile hold nothing but the result, and the
    weights be constants.
    """
    found: list[tuple[int, float, int, Packing]] = []
    for packing in _options(hardware, problem):
        form = problem.form(hardware, packing)
        if packing.plain or form.row_blocks > MAX_CHANNEL_BLOCKS:
            continue
        if packing.runs != form.merge_kernel_row or form.pixel_pack != packing.pixels:
            continue
        if bool(packing.stack) != (form.stack is not None):
            continue
        cycles = problem.cycles(hardware, packing)
        found.append((form.weight_bytes(hardware), cycles, len(found), packing))
    answer, last = [PLAIN], problem.cycles(hardware, PLAIN)
    best = min((cycles for _, cycles, _, _ in found), default=last)
    for _, cycles, _, packing in sorted(found, key=lambda item: item[:3]):
        if cycles <= GAIN * last or (cycles == best and cycles < last):
            answer.append(packing)
            last = cycles
    return tuple(answer)


def _options(hardware: Hardware, problem: PackingProblem) -> Iterator[Packing]:
    """Yield packings that may be possible."""
    gap = pixel_pitch(hardware, problem.in_channels) > problem.in_channels
    options = [(False, False), (True, False)]
    if problem.loaded is not None and gap:
        options.append((True, True))
    pitch = pixel_pitch(hardware, problem.out_channels)
    most = (hardware.array_size - problem.out_channels) // pitch + 1
    for pixels in range(1, min(max(1, most), problem.least_columns) + 1):
        for runs, dense in options:
            yield Packing(pixels, runs, dense)
    k_h, k_w = problem.kernel
    # Wider pixels fill the array by themselves.
    if k_h == 1 or problem.in_channels * 2 >= hardware.array_size:
        return
    for runs, dense in options:
        pixel = problem.in_channels if dense else pixel_pitch(hardware, problem.in_channels)
        for pixels in (part for part in range(1, k_w + 1) if runs and k_w % part == 0):
            size = k_h * ((pixels - 1) * pixel + problem.in_channels)
            unit = 1
            pitches: set[int] = set()
            while unit <= hardware.sram_word_bytes:
                pitches.add(align(size, unit))
                unit *= 2
            for wide in sorted(pitches):
                yield Packing(1, True, dense, pixels, wide)
