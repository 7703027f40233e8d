"""Estimated cycles of a loop nest, from the timing formulas of docs/concepts/machine.md.

Good enough to rank tilings; the cycle simulator is the judge. All results are core cycles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, gcd

from tilewright.schedule.footprint import ConvForm
from tilewright.spec.hardware import Hardware

TILE_OVERHEAD_CYCLES = 100
"""Sequencer, synchronisation and pipeline work of one tile that nothing hides.

Fitted to the cycle simulator: of 16, 100, 200 and 400, this gave the fastest programs.
"""
HELD_TILE_OVERHEAD_CYCLES = 40
"""The same of a tile whose activations are neither loaded nor stored (measured likewise)."""
INSTRUCTION_CYCLES = 8
"""From the end of an instruction's work to the start of the next one's that waits for nothing."""
EXPOSED = 0.5
"""The part of a nest's first load and last store that the nests around it do not hide (fitted)."""
TRAFFIC_WEIGHT = 0.05
"""What DDR time costs even while it is hidden: it shares banks with the engines it overlaps."""


@dataclass(frozen=True)
class Rates:
    """What the memory system of a chip can do."""

    ddr_bytes_per_cycle: float
    """Peak of DDR and of all DMA channels together."""
    run_cycles: float
    """Extra cycles of DDR a contiguous run costs: half a granule and one DMA cycle."""
    latency_cycles: float
    """From the start of a transfer to its first byte, in stream mode."""

    def transfer(self, size_bytes: float, runs: float) -> float:
        """Return the cycles DDR is busy moving `size_bytes` in `runs` contiguous runs."""
        return size_bytes / self.ddr_bytes_per_cycle + runs * self.run_cycles


@lru_cache(maxsize=64)
def rates(hardware: Hardware) -> Rates:
    """Return the memory rates of a chip."""
    dma_cycle = hardware.core_clock_mhz / hardware.dma_clock_mhz
    total = min(hardware.ddr_bytes_per_cycle, hardware.dma_bytes_per_cycle * hardware.dma_channels)
    granule = hardware.ddr_bus_bytes / hardware.ddr_bytes_per_cycle
    return Rates(
        total,
        granule / 2 + dma_cycle / hardware.dma_channels,
        hardware.dma_latency * hardware.dma_stream_latency_factor * dma_cycle,
    )


def words(hardware: Hardware, size_bytes: int) -> int:
    """Return the SRAM words an aligned vector of `size_bytes` takes."""
    return ceil(size_bytes / hardware.sram_word_bytes)


def tile_words(hardware: Hardware, rows: int, columns: int, channels: int, pitch: int) -> int:
    """Return the SRAM words a DMA writes or reads for a tile, pixels `pitch` bytes apart.

    A row is one run if nothing lies between its pixels, else a run a pixel. All sizes in bytes.
    """
    if pitch == channels:
        return rows * words(hardware, columns * channels)
    return rows * columns * words(hardware, channels)


def mean_words(hardware: Hardware, size_bytes: int, step: int, first: int = 0) -> float:
    """Return the words a vector of `size_bytes` touches, on average over a row of vectors.

    They lie `step` bytes apart, the first of them `first` bytes behind the start of a word.
    """
    word = hardware.sram_word_bytes
    unit = gcd(word, step)
    first %= unit
    places = word // unit
    return sum(ceil((first + place * unit + size_bytes) / word) for place in range(places)) / places


def _step_cycles(hardware: Hardware, form: ConvForm) -> list[tuple[float, int]]:
    """Return, by channel block, the words an activation vector touches and the weights' rows.

    Averages over the kernel positions of a row where these are steps of their own.
    """
    item = form.element_bytes
    if form.diagonal:
        if form.pixel_pack == 1:
            return [(words(hardware, form.columns * item), 1)]
        step = form.pixel_pack * form.steps[0] * form.pitch
        shifts = [form.steps[1] * form.pitch * index for index in range(form.kernel_columns)]
        touched = [mean_words(hardware, form.columns * item, step, shift) for shift in shifts]
        return [(sum(touched) / len(touched), 1)]
    blocks = [form.rows] * (form.row_blocks - 1) + [form.last_rows]
    if not form.merge_kernel_row:
        return [(words(hardware, rows * item), rows) for rows in blocks]
    step = form.pixel_pack * form.steps[0] * form.pitch
    return [
        (mean_words(hardware, rows * item, step, index * form.rows * item), rows)
        for index, rows in enumerate(blocks)
    ]


def mac_cycles(hardware: Hardware, form: ConvForm, rows: int, columns: int) -> float:
    """Return the cycles of the MAC array for a tile of `rows` x `columns` output pixels."""
    if form.stack is not None:
        part = form.piece_rows(hardware, rows, columns)
        full, rest = divmod(rows, part)
        # What the first rows need is gathered before.
        cycles = part * _gather_cycles(hardware, form, columns)
        for count, size in ((full, part), (1, rest)):
            if size:
                pieces = ceil(form.blocks / join_blocks(hardware, size, columns))
                each = hardware.mac_latency + form.rows + INSTRUCTION_CYCLES
                work = _instruction_cycles(hardware, form, size, columns)
                cycles += count * (work + pieces * each)
        return cycles
    vectors, rest = divmod(columns, form.pixel_pack)
    # What is left of a row is an instruction of its own.
    return sum(
        _instruction_cycles(hardware, form, rows, count)
        for count in (vectors, min(1, rest))
        if count
    )


def _instruction_cycles(hardware: Hardware, form: ConvForm, rows: int, vectors: int) -> float:
    """Return the cycles of the `mac_conv`s that read `vectors` vectors a row, one a part."""
    block_rows = max(1, hardware.accumulator_rows // vectors)
    full, rest = divmod(rows, block_rows)
    row_words = words(hardware, form.weight_pitch)
    steps = _step_cycles(hardware, form)
    block = 0.0
    for activation, weight_rows in steps:
        weights = weight_rows * row_words
        block += full * max(block_rows * vectors * activation, weights)
        if rest:
            block += max(rest * vectors * activation, weights)
    first = steps[0][1] * row_words
    return form.blocks * block * form.kernel_steps + form.parts * (first + hardware.mac_latency)


def drain_cycles(hardware: Hardware, form: ConvForm, rows: int, columns: int) -> float:
    """Return the cycles of the vector unit that requantises the tile, and gathers its inputs."""
    vector = max(1, words(hardware, form.columns * form.element_bytes))
    vectors = form.vectors(columns)
    drain = form.blocks * rows * vectors * vector + form.parts * hardware.vector_latency
    return drain + rows * _gather_cycles(hardware, form, columns)


def _gather_cycles(hardware: Hardware, form: ConvForm, columns: int) -> float:
    """Return the cycles of the vector unit that gathers kernel rows for a row of pixels."""
    stack = form.stack
    if stack is None:
        return 0.0
    cycles = 0.0
    for row in range(stack.kernel_rows):
        for first in range(0, stack.run, hardware.vector_lanes):
            size = min(hardware.vector_lanes, stack.run - first)
            read = mean_words(hardware, size, stack.advance * stack.pixel, first)
            cycles += max(read, mean_words(hardware, size, stack.pitch, row * stack.run + first))
    return cycles * ((columns - 1) * form.steps[0] + stack.units)


def drain_tail(hardware: Hardware, form: ConvForm, rows: int, columns: int) -> int:
    """Return the cycles from the array's last sum of a tile to the tile's last result."""
    block_rows = max(1, hardware.accumulator_rows // columns)
    pixels = (rows % block_rows or block_rows) * columns
    vector = max(1, words(hardware, form.columns * form.element_bytes))
    return pixels * vector + hardware.mac_latency + hardware.vector_latency


@dataclass(frozen=True)
class JoinCost:
    """What an elementwise operation on the results of a tile costs inside its nest."""

    vector: float
    """Cycles of the vector unit."""
    stall: float
    """Cycles the MAC array waits, both halves of its accumulators being full, and overheads."""


def join_cycles(hardware: Hardware, form: ConvForm, rows: int, columns: int) -> JoinCost:
    """Return the cost of an operation that joins a second tensor to a tile, in place.

    It follows the drain of every `join_blocks`; meanwhile the array fills the accumulators.
    """
    channels = min(form.columns, form.pixel_channels)
    vector = max(1, words(hardware, channels * form.element_bytes))
    vectors = form.vectors(columns)
    block_rows = max(1, hardware.accumulator_rows // vectors)
    pieces = form.parts * ceil(form.part_blocks / join_blocks(hardware, rows, vectors))
    # Read and written in one bank, two words a vector.
    work = 2 * form.blocks * rows * columns * vector + pieces * hardware.vector_latency
    steps = form.kernel_steps * form.row_blocks
    hidden = 2 * min(rows, block_rows) * vectors * steps * pieces
    overhead = (pieces - form.parts) * (hardware.mac_latency + form.rows)
    return JoinCost(work, max(0, work - hidden) + overhead)


def join_blocks(hardware: Hardware, rows: int, columns: int) -> int:
    """Return the blocks of output channels that are drained before a second tensor is joined.

    As many as the two halves of the accumulators hold, so that the array need not wait long.
    """
    block_rows = max(1, hardware.accumulator_rows // columns)
    return max(1, 2 // ceil(rows / block_rows))


@dataclass
class NestCost:
    """Adds up what a nest costs; engines overlap except where a tile has one slot only."""

    mac: float = 0.0
    vector: float = 0.0
    memory: float = 0.0
    ddr_bytes: float = 0.0
    tiles: int = 1
    overhead: float = TILE_OVERHEAD_CYCLES
    """Cycles of every tile that nothing hides."""
    head: float = 0.0
    """DDR cycles of the first tile's loads."""
    tail: float = 0.0
    """DDR cycles of the last tile's store."""
    waiting: float = 0.0
    """Cycles of transfers that the engines wait for, the first and the last apart."""
    fill: float | None = None
    """Cycles in which only one of array and vector unit works; None: guessed from the tiles."""

    def move(
        self,
        size_bytes: float,
        runs: float,
        times: int,
        overlapped: bool,
        rate: Rates,
        loads: bool = True,
        words: float = 0,
    ) -> None:
        """Count `times` transfers of a tile; without overlap all of them stand alone.

        `words`: SRAM words of a transfer, one a cycle.
        """
        cycles = max(rate.transfer(size_bytes, runs), words)
        if loads:
            self.head += cycles + rate.latency_cycles
        else:
            self.tail += cycles + rate.latency_cycles
        self.memory += times * cycles
        self.ddr_bytes += times * size_bytes
        if not overlapped:
            self.waiting += (times - 1) * (cycles + rate.latency_cycles)

    def engines(self) -> float:
        """Return the cycles of the array and the vector unit side by side, and of overheads."""
        fill = self.fill
        if fill is None:
            both = self.mac + self.vector
            fill = both / (2 * self.tiles) if self.tiles > 1 else min(self.mac, self.vector)
        return max(self.mac, self.vector) + fill + self.tiles * self.overhead

    def cycles(self) -> float:
        """Return the estimate for the nest by itself."""
        extra = max(0, self.memory - max(self.mac, self.vector))
        exposed = EXPOSED * (self.head + self.tail) + self.waiting
        return self.engines() + extra + TRAFFIC_WEIGHT * self.memory + exposed
