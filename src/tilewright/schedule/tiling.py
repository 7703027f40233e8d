"""Tile sizes of convolutions, matrix products and window sums.

A tile is a box of output pixels and channels, and with a split reduction a part of the input
channels and of the kernel. `choose_conv` enumerates tiles that fit SRAM and the chip's limits, and
returns the cheapest by `schedule/cost.py`. Reductions are split only when no tile fits
without: input channels first, then kernel rows, then kernel columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from tilewright.schedule.cost import (
    HELD_TILE_OVERHEAD_CYCLES,
    NestCost,
    drain_cycles,
    drain_tail,
    join_cycles,
    mac_cycles,
    rates,
    tile_words,
)
from tilewright.schedule.footprint import (
    PLAIN,
    ConvForm,
    Packing,
    activation_bytes,
    align,
    conv_form,
    max_parameter_blocks,
    ones_bytes,
    parameter_bytes,
    pixel_pitch,
)
from tilewright.schedule.packing import PackingProblem, packings
from tilewright.schedule.placement import TileBuffer
from tilewright.spec.hardware import Hardware
from tilewright.spec.isa import BY_NAME

MAC = BY_NAME["mac_conv"].field
MAX_KERNEL = MAC["k_h"].high
MAX_CHANNEL_BLOCKS = MAC["c_blocks"].high
MAX_EXTENT = MAC["out_h"].high
MAX_PIXEL_STRIDE = MAC["ox_stride"].high
REDUCTIONS = ("k", "kr", "kc")
WEIGHT_LOOPS = ("g", "o", *REDUCTIONS)
SHARES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 48, 64, 96, 128, 192, 256)
TABLE_BYTES = 256
KEPT = ("weights", "parameters")
"""Tiles that a problem with `kept` constants has not."""


@dataclass(frozen=True)
class ConvProblem:
    """The sizes of a layer that runs on the MAC array; a matrix product is one row of pixels."""

    kind: str
    """`conv`, or `sum`: every channel is its own group and the weights are ones."""
    batch: int
    in_rows: int
    in_columns: int
    in_channels: int
    out_rows: int
    out_columns: int
    out_channels: int
    kernel: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    dilations: tuple[int, int] = (1, 1)
    group: int = 1
    table: bool = False
    """A lookup table is applied to the result."""
    second: bool = False
    """An elementwise operation joins a tensor of the result's shape to it."""
    batched_weights: bool = False
    """Every image has weights of its own: a product of two activations."""
    computed_weights: bool = False
    """The weights are an activation: they are loaded as they are, never embedded in zeros."""
    element_bytes: int = 1
    """Bytes of an activation, and of a weight of more than 4 bits."""
    output_bytes: int = 0
    """Bytes of an element of the result; 0: as `element_bytes`."""
    held: tuple[str, ...] = ()
    """Operands that lie whole in SRAM, `input`, `second` or `output`: no tile, no DMA. `part`: the
    held output lies inside a concatenation of channels."""
    skips: bool = False
    """A kernel of one pixel with a stride, no padding: it passes over most of its input."""
    sparse: bool = False
    """Pixels of the input do not lie side by side in DDR (see `as_loaded`)."""
    kept: bool = False
    """Weights and parameters lie in SRAM throughout the program: no tiles here, no DMA. The
    reduction is never split, and channels are the outermost loops."""
    half_bytes: bool = False
    """Weights have 4 bits and lie two a byte."""

    def as_loaded(self) -> ConvProblem:
        """Return the problem whose input tiles hold nothing but pixels that are used.

        While the input of a problem that skips lies in DDR, DMA leaves out what is not used, and
        the rest has no stride. Other problems are returned as they are.
        """
        if not self.skips or "input" in self.held:
            return self
        return replace(
            self,
            in_rows=self.out_rows,
            in_columns=self.out_columns,
            strides=(1, 1),
            skips=False,
            sparse=True,
        )

    @property
    def weight_loops(self) -> tuple[str, ...]:
        """The tile loops that a weight tile changes with."""
        return ("n", *WEIGHT_LOOPS) if self.batched_weights else WEIGHT_LOOPS

    @property
    def group_in(self) -> int:
        """Input channels of a group."""
        return self.in_channels // self.group

    @property
    def group_out(self) -> int:
        """Output channels of a group."""
        return self.out_channels // self.group

    @property
    def diagonal(self) -> bool:
        """Whether groups are single channels."""
        return self.kind == "sum" or (self.group > 1 and self.group_in == 1 and self.group_out == 1)

    def weight_bytes(self, hardware: Hardware, form: ConvForm) -> int:
        """Return the SRAM bytes of a weight tile: one row of ones for a window sum."""
        if self.kind == "sum":
            return ones_bytes(hardware, self.element_bytes)
        return form.weight_bytes(hardware)


@dataclass(slots=True)
class TileLoop:
    """A tile loop: `name` covers `size` in steps of `step`."""

    name: str
    size: int
    step: int

    @property
    def count(self) -> int:
        """Iterations."""
        return -(-self.size // self.step)


@dataclass(frozen=True)
class ConvTiling:
    """A tile and the order of the loops around it."""

    groups: int
    """Groups of a tile. Channels are split inside a group only if this is 1."""
    out_channels: int
    """Output channels of a tile, of one group."""
    in_channels: int
    """Input channels of a tile, of one group."""
    kernel: tuple[int, int]
    rows: int
    columns: int
    weights_outer: bool = True
    """Channel loops are outside: weights are loaded once, activations once a channel tile."""
    input_slots: int = 1
    weight_slots: int = 1
    output_slots: int = 1
    second_slots: int = 1
    packing: Packing = PLAIN
    """Output pixels that share a pass through the array."""

    def loops(self, problem: ConvProblem) -> list[TileLoop]:
        """Return all loops, outermost first, those of one iteration included."""
        pixels = [
            TileLoop("n", problem.batch, 1),
            TileLoop("h", problem.out_rows, self.rows),
            TileLoop("w", problem.out_columns, self.columns),
        ]
        channels = [
            TileLoop("g", problem.group, self.groups),
            TileLoop("o", problem.group_out, self.out_channels),
        ]
        reduction = [
            TileLoop("k", problem.group_in, self.in_channels),
            TileLoop("kr", problem.kernel[0], self.kernel[0]),
            TileLoop("kc", problem.kernel[1], self.kernel[1]),
        ]
        outer = channels + pixels if self.weights_outer else pixels + channels
        return outer + reduction

    def form(self, hardware: Hardware, problem: ConvProblem) -> ConvForm:
        """Return how the tile lies on the array."""
        if problem.kind == "sum" and self.groups == 1:
            area = self.kernel[0] * self.kernel[1]
            return ConvForm(True, False, 1, 1, 1, 1, 1, 1, area, 1, problem.element_bytes)
        return conv_form(
            hardware,
            self.groups * self.in_channels,
            self.groups * self.out_channels,
            self.groups,
            self.kernel,
            problem.dilations[1],
            element_bytes=problem.element_bytes,
            pitch=self._pitch(hardware, problem, "input"),
            stride_x=problem.strides[1],
            out_pitch=self._pitch(hardware, problem, "output"),
            packing=self.packing,
            half_bytes=problem.half_bytes,
        )

    def _pitch(self, hardware: Hardware, problem: ConvProblem, operand: str) -> int | None:
        """Return the bytes between pixels of a held tensor; None: those of a tile of its own."""
        inputs = operand == "input"
        if operand not in problem.held:
            return self.groups * self.in_channels if inputs and self.packing.dense else None
        channels = problem.in_channels if inputs else problem.out_channels
        item = problem.element_bytes
        return pixel_pitch(hardware, channels, item if inputs else problem.output_bytes or item)

    def packings(self, hardware: Hardware, problem: ConvProblem) -> tuple[Packing, ...]:
        """Return the packings that are worth trying for the tile, the plain one first."""
        whole = self.kernel == problem.kernel and (
            self.groups > 1 or self.in_channels == problem.group_in
        )
        codes = problem.element_bytes == 1 and problem.output_bytes in (0, 1)
        # Pixels of a held tensor are as far apart as all its channels take.
        inputs = "input" not in problem.held or (
            self.groups * self.in_channels == problem.in_channels
        )
        outputs = "output" not in problem.held or (
            "part" not in problem.held and self.groups * self.out_channels == problem.out_channels
        )
        computed = problem.batched_weights or problem.computed_weights
        if computed or not (whole and codes and inputs and outputs):
            return (PLAIN,)
        rest = problem.out_columns % self.columns
        loaded = None
        if "input" not in problem.held and self.groups * self.in_channels == problem.in_channels:
            rows, columns = self.in_extent(problem)
            loaded = min(rows, problem.in_rows), min(columns, problem.in_columns)
        tile = PackingProblem(
            self.groups * self.in_channels,
            self.groups * self.out_channels,
            self.groups,
            self.kernel,
            problem.strides[1],
            problem.dilations[1],
            self.rows,
            self.columns,
            rest or self.columns,
            loaded,
            problem.half_bytes,
        )
        found = packings(hardware, tile)
        # The weights of a window sum are one row of ones; rows of sparse pixels are no runs.
        return tuple(
            item
            for item in found
            if not (item.runs and problem.kind == "sum") and not (item.dense and problem.sparse)
        )

    def in_extent(self, problem: ConvProblem) -> tuple[int, int]:
        """Return rows and columns of the input tile, padding included."""
        return (
            (self.rows - 1) * problem.strides[0] + (self.kernel[0] - 1) * problem.dilations[0] + 1,
            (self.columns - 1) * problem.strides[1]
            + (self.kernel[1] - 1) * problem.dilations[1]
            + 1,
        )

    def buffers(self, hardware: Hardware, problem: ConvProblem) -> list[TileBuffer]:
        """Return the SRAM tiles of the nest, all alive together."""
        form, size = self.form(hardware, problem), problem.element_bytes
        rows, columns = self.in_extent(problem)
        result = activation_bytes(
            hardware,
            self.rows * self.columns,
            self.groups * self.out_channels,
            problem.output_bytes or size,
        )
        buffers = [
            TileBuffer(
                "input",
                "input",
                activation_bytes(
                    hardware,
                    rows * columns,
                    self.groups * self.in_channels,
                    size,
                    self.packing.dense,
                ),
                self.input_slots,
            ),
            TileBuffer(
                "weights", "weights", problem.weight_bytes(hardware, form), self.weight_slots
            ),
            TileBuffer(
                "parameters",
                "bias",
                parameter_bytes(hardware, form.blocks, size),
                self.parameter_slots(problem),
            ),
            TileBuffer("output", "output", result, self.output_slots),
        ]
        if problem.second:
            buffers += [
                TileBuffer("second", "input", result, self.second_slots),
                TileBuffer("scalars", "scalar", parameter_bytes(hardware, 1), 1),
            ]
        gathered = form.stack_bytes(hardware, self.rows, self.columns)
        if gathered:
            buffers.append(TileBuffer("gathered", "gathered", gathered, 2))
        if problem.table:
            buffers.append(
                TileBuffer("table", "table", align(TABLE_BYTES, hardware.sram_word_bytes), 1)
            )
        kept = KEPT if problem.kept else ()
        return [b for b in buffers if b.name not in problem.held and b.name not in kept]

    def describe(self, problem: ConvProblem) -> str:
        """Return the tile and the loop order in words."""
        channels = self.groups * self.out_channels
        text = f"tiles of {self.rows}x{self.columns} pixels, {channels} channels"
        if self.in_channels < problem.group_in or self.kernel != problem.kernel:
            kernel = f"{self.kernel[0]}x{self.kernel[1]}"
            text += f", reducing {self.in_channels} inputs x {kernel} at a time"
        if self.packing.pixels > 1:
            text += f", {self.packing.pixels} pixels a pass"
        return text + (", weights outer" if self.weights_outer else ", activations outer")

    def parameter_slots(self, problem: ConvProblem) -> int:
        """Return the slots of bias, multiplier and shift."""
        return self.weight_slots if loads(self.loops(problem), "go") > 1 else 1


@dataclass(frozen=True)
class Choice:
    """What the tiler chose."""

    tiling: ConvTiling
    cycles: float
    """Estimated."""
    sram_bytes: int
    runner_up: ConvTiling | None
    runner_up_cycles: float
    candidates: int
    """How many tilings fitted."""
    cost: NestCost


@dataclass(frozen=True)
class NoFit:
    """Nothing fits."""

    buffers: tuple[TileBuffer, ...]
    """The tiles of the smallest candidate; empty if not memory but a limit is in the way."""
    needed_bytes: int
    """The SRAM that candidate needs."""
    reason: str


def packed_bytes(hardware: Hardware, buffers: list[TileBuffer], reserved: int = 0) -> int:
    """Return the SRAM that buffers need without gaps, beside `reserved` bytes of tensors.

    Weights lie in banks of their own.
    """
    weights = others = 0
    for buffer in buffers:
        size = buffer.slots * align(buffer.size_bytes, hardware.sram_word_bytes)
        if buffer.role == "weights":
            weights += size
        else:
            others += size
    return align(others + reserved, hardware.bank_size) + align(weights, hardware.bank_size)


def loads(loops: list[TileLoop], names: str | tuple[str, ...]) -> int:
    """Return how often a tile is filled that changes with the loops in `names`.

    It is filled inside the innermost of them that has more than one iteration, hence once for every
    iteration of all loops around.
    """
    total = count = 1
    for loop in loops:
        if loop.step < loop.size:
            count *= loop.count
            if loop.name in names:
                total = count
    return total


INPUT_LOOPS = ("n", "h", "w", "g", *REDUCTIONS)
OUTPUT_LOOPS = ("n", "h", "w", "g", "o")


def shares(size: int, unit: int = 1) -> list[int]:
    """Return even parts of `size`, multiples of `unit` (or all of it), largest first."""
    blocks = ceil(size / unit)
    parts = {min(size, ceil(blocks / count) * unit) for count in SHARES}
    parts.add(min(size, unit))
    return sorted(parts, reverse=True)


def channel_tiles(
    hardware: Hardware, problem: ConvProblem, split: bool
) -> Iterator[tuple[int, int, int]]:
    """Yield (groups, output channels of a group, input channels of a group)."""
    size = hardware.array_size
    if problem.diagonal:
        for groups in shares(problem.group, size):
            yield groups, 1, 1
        # Below the array's width tiles waste it, but may be all that fits.
        for groups in shares(min(problem.group, size)):
            yield groups, 1, 1
        return
    if problem.group > 1 and not split:
        for groups in range(problem.group, 1, -1):
            if problem.group % groups == 0:
                yield groups, problem.group_out, problem.group_in
    ins = _even(problem.group_in, size) if split else [problem.group_in]
    for out_channels in shares(problem.group_out, size):
        for in_channels in ins:
            yield 1, out_channels, in_channels


def _even(size: int, unit: int) -> list[int]:
    """Return parts of `size`; those that leave no remainder if there are several."""
    parts = shares(size, unit)
    even = [part for part in parts if size % part == 0]
    return even if len(even) >= min(4, len(parts)) else parts


def kernel_tiles(problem: ConvProblem, level: int) -> list[tuple[int, int]]:
    """Return parts of the kernel: all of it below level 2, then rows, then columns."""
    rows, columns = problem.kernel

    def parts(size: int) -> list[int]:
        # A window sum has its kernel in an attribute: no remainders.
        return [part for part in shares(size) if problem.kind != "sum" or size % part == 0]

    if level < 2:
        return [(rows, columns)]
    if level < 3:
        return [(part, columns) for part in parts(rows) if part < rows or rows == 1]
    return [(1, part) for part in parts(columns)]


def legal(hardware: Hardware, problem: ConvProblem, tiling: ConvTiling, form: ConvForm) -> bool:
    """Tell whether a tile keeps the limits of instructions and registers (memory apart)."""
    if form.blocks > max_parameter_blocks(hardware) or form.row_blocks > MAX_CHANNEL_BLOCKS:
        return False
    if problem.kept and (
        tiling.kernel != problem.kernel
        or (tiling.groups == 1 and tiling.in_channels < problem.group_in)
    ):
        return False
    if max(tiling.kernel) > MAX_KERNEL or tiling.rows > MAX_EXTENT:
        return False
    return tiling.columns <= hardware.accumulator_rows


def accumulates(hardware: Hardware, rows: int, columns: int, form: ConvForm) -> bool:
    """Tell whether all blocks of a tile of pixels stay in the two halves of the M registers."""
    block_rows = max(1, hardware.accumulator_rows // columns)
    return form.blocks * ceil(rows / block_rows) <= 2


def row_tiles(hardware: Hardware, problem: ConvProblem, columns: int) -> list[int]:
    """Return heights of a tile: even parts, and whole blocks of the accumulators; tallest first."""
    block = max(1, hardware.accumulator_rows // columns)
    whole = {
        block * count for count in (1, 2, 3, 4, 6, 8, 12, 16) if block * count < problem.out_rows
    }
    return sorted({*shares(problem.out_rows), *whole}, reverse=True)


OPERANDS = ("input", "weights", "output", "second")
SLOTS = ((2, 2, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 1, 1), (1, 2, 1), (1, 1, 1))
"""Slots of input, weights, output, most overlap first."""


def _slot_choices(problem: ConvProblem) -> list[tuple[int, int, int, int]]:
    """Return slots of input, weights, output and second operand, most overlap first."""
    choices = [
        (*slots, seconds) for slots in SLOTS for seconds in ((2, 1) if problem.second else (1,))
    ]
    return sorted(choices, key=lambda item: -sum(item))


class Search:
    """Tries tiles from large to small, and prices those that fit."""

    def __init__(self, hardware: Hardware, problem: ConvProblem, reserved: int) -> None:
        self.hardware = hardware
        self.problem = problem
        self.reserved = reserved
        self.rates = rates(hardware)
        self.slots = _slot_choices(problem)
        self.found: list[tuple[float, float, int, ConvTiling, NestCost]] = []
        self.smallest: tuple[int, ConvTiling] | None = None

    def run(self) -> None:
        """Find tilings; a reduction is split only if nothing fits otherwise."""
        for level in range(4):
            for kernel in kernel_tiles(self.problem, level):
                for groups, outs, ins in channel_tiles(self.hardware, self.problem, level > 0):
                    self._pixels(ConvTiling(groups, outs, ins, kernel, 1, 1))
            # Splitting a window sum costs little, and may be what lets a tile keep its channels.
            if self.found and (self.problem.kind != "sum" or level >= 2):
                return

    def _pixels(self, base: ConvTiling) -> None:
        problem, hardware = self.problem, self.hardware
        form = base.form(hardware, problem)
        split = base.kernel != problem.kernel or (
            base.groups == 1 and base.in_channels < problem.group_in
        )
        if problem.weight_bytes(hardware, form) >= hardware.sram_size:
            needed = packed_bytes(hardware, base.buffers(hardware, problem), self.reserved)
            if needed > hardware.sram_size:
                self.remember_smallest(needed, base)
            return
        columns_fit = [
            part for part in shares(problem.out_columns) if part <= hardware.accumulator_rows
        ]
        for columns in columns_fit[:6] + columns_fit[-1:]:
            good = 0
            for rows in row_tiles(hardware, problem, columns):
                tiling = replace(base, rows=rows, columns=columns)
                if not legal(hardware, problem, tiling, form):
                    continue
                if split and not accumulates(hardware, rows, columns, form):
                    continue
                complete = self._slots(tiling, form)
                for packing in tiling.packings(hardware, problem)[1:]:
                    packed = replace(tiling, packing=packing)
                    self._slots(packed, packed.form(hardware, problem))
                if complete:
                    good += 1
                if good > 3:
                    break
            # Narrower tiles only read more; they are for what does not fit otherwise.
            if good and columns < problem.out_columns:
                break

    def _slots(self, tiling: ConvTiling, form: ConvForm) -> bool:
        """Price every order and slot count that fits; True if full double buffering does."""
        single = tiling.buffers(self.hardware, self.problem)
        needed = packed_bytes(self.hardware, single, self.reserved)
        if needed > self.hardware.sram_size:
            self.remember_smallest(needed, tiling)
            return False
        complete = False
        for weights_outer in [True, False] if self.order_matters(tiling) else [True]:
            ordered = replace(tiling, weights_outer=weights_outer)
            loops = ordered.loops(self.problem)
            results = loads(loops, OUTPUT_LOOPS)
            times = (loads(loops, INPUT_LOOPS), self.weight_loads(loops), results, results)
            held = self.problem.held
            changes = tuple(
                1 if name in held else time for name, time in zip(OPERANDS, times, strict=True)
            )
            shared = loads(loops, "go") > 1
            wanted = dict.fromkeys(
                tuple(
                    min(slot, 2 if time > 1 else 1)
                    for slot, time in zip(slots, changes, strict=True)
                )
                for slots in self.slots
            )
            for number, (inputs, weights, outputs, seconds) in enumerate(wanted):
                slots = {"input": inputs, "weights": weights, "output": outputs, "second": seconds}
                slots["parameters"] = weights if shared else 1
                buffers = [
                    TileBuffer(b.name, b.role, b.size_bytes, slots.get(b.name, b.slots))
                    for b in single
                ]
                if packed_bytes(self.hardware, buffers, self.reserved) > self.hardware.sram_size:
                    continue
                candidate = replace(
                    ordered,
                    input_slots=inputs,
                    weight_slots=weights,
                    output_slots=outputs,
                    second_slots=seconds,
                )
                self.price(candidate, form, loops, times)
                if number == 0:
                    complete = True
                    break
        return complete

    def remember_smallest(self, needed_bytes: int, tiling: ConvTiling) -> None:
        """Note a tile that does not fit, for the error."""
        if self.smallest is None or needed_bytes < self.smallest[0]:
            self.smallest = (needed_bytes, tiling)

    def order_matters(self, tiling: ConvTiling) -> bool:
        """Tell whether there are loops over channels and over pixels."""
        problem = self.problem
        if problem.kept:
            return False
        if problem.group <= tiling.groups and problem.group_out <= tiling.out_channels:
            return False
        whole = problem.out_rows <= tiling.rows and problem.out_columns <= tiling.columns
        return problem.batch > 1 or not whole

    def weight_loads(self, loops: list[TileLoop]) -> int:
        """Return how often weights are loaded."""
        # The ones of a window sum are the same for every tile.
        return 1 if self.problem.kind == "sum" else loads(loops, self.problem.weight_loops)

    def price(
        self,
        tiling: ConvTiling,
        form: ConvForm,
        loops: list[TileLoop],
        times: tuple[int, int, int, int],
    ) -> None:
        """Add a tiling that fits to those found; `times` are the loads of its operands."""
        problem, hardware = self.problem, self.hardware
        cost = NestCost()
        counts = {loop.name: loop.count for loop in loops}
        part = {loop.name: loop.size / (counts[loop.name] * loop.step) for loop in loops}
        pixel_tiles = counts["n"] * counts["h"] * counts["w"]
        channel_tiles = counts["g"] * counts["o"]
        reductions = counts["k"] * counts["kr"] * counts["kc"]
        tiles = pixel_tiles * channel_tiles * reductions
        pixel_part = part["h"] * part["w"]
        cost.mac = (
            mac_cycles(hardware, form, tiling.rows, tiling.columns)
            * tiles
            * pixel_part
            * part["k"]
            * part["kr"]
        )
        cost.vector = (
            drain_cycles(hardware, form, tiling.rows, tiling.columns)
            * pixel_tiles
            * channel_tiles
            * pixel_part
        )
        rows, columns = tiling.in_extent(problem)
        rows, columns = min(rows, problem.in_rows), min(columns, problem.in_columns)
        channels = tiling.groups * tiling.in_channels
        runs = _runs(rows, columns, channels, problem.in_columns, problem.in_channels)
        runs = rows * columns if problem.sparse else runs
        size = rows * columns * channels * part["h"] * part["w"] * part["k"] * part["g"]
        size *= problem.element_bytes
        if "input" not in problem.held:
            own = channels * problem.element_bytes
            pitch = pixel_pitch(hardware, channels, problem.element_bytes)
            words = tile_words(hardware, rows, columns, own, own if tiling.packing.dense else pitch)
            cost.move(size, runs, times[0], tiling.input_slots > 1, self.rates, words=words)
        weight_bytes = problem.weight_bytes(hardware, form) * part["o"] * part["g"]
        if not problem.kept:
            cost.move(weight_bytes, 1, times[1], tiling.weight_slots > 1, self.rates)
        out_channels = tiling.groups * tiling.out_channels
        runs = _runs(
            tiling.rows, tiling.columns, out_channels, problem.out_columns, problem.out_channels
        )
        size = tiling.rows * tiling.columns * out_channels * pixel_part * part["o"] * part["g"]
        size *= problem.output_bytes or problem.element_bytes
        if "output" in problem.held:
            # What follows waits for the last block only.
            cost.fill = drain_tail(hardware, form, tiling.rows, tiling.columns)
        else:
            cost.move(size, runs, times[2], tiling.output_slots > 1, self.rates, loads=False)
        if problem.second:
            if "second" not in problem.held:
                cost.move(size, runs, times[3], tiling.second_slots > 1, self.rates)
            join = join_cycles(hardware, form, tiling.rows, tiling.columns)
            work = pixel_tiles * channel_tiles * pixel_part
            cost.vector += join.vector * work
            cost.mac += join.stall * work
        cost.tiles = tiles
        if {"input", "output"} <= set(problem.held):
            cost.overhead = HELD_TILE_OVERHEAD_CYCLES
        self.found.append((cost.cycles(), cost.ddr_bytes, len(self.found), tiling, cost))


def _runs(rows: int, columns: int, channels: int, all_columns: int, all_channels: int) -> int:
    """Return the contiguous runs of a box in a dense NHWC tensor."""
    if channels < all_channels:
        return rows * columns
    return rows if columns < all_columns else 1


@lru_cache(maxsize=4096)
def choose_conv(hardware: Hardware, problem: ConvProblem, reserved: int = 0) -> Choice | NoFit:
    """Return the cheapest tiling that fits, or why there is none.

    `reserved` bytes of SRAM hold tensors, those of the problem's `held` operands included.
    """
    return choose_by(Search(hardware, problem, reserved))


def choose_by(search: Search) -> Choice | NoFit:
    """Return what a search finds."""
    hardware, problem = search.hardware, search.problem
    pixel = max(1, problem.in_channels) * problem.element_bytes
    if problem.strides[1] * pixel > MAX_PIXEL_STRIDE * 4:
        return NoFit((), 0, f"a horizontal stride of {problem.strides[1]} is too far for the chip")
    search.run()
    if not search.found:
        if search.smallest is None:
            return NoFit((), 0, "no tile keeps the limits of the instructions")
        needed, tiling = search.smallest
        return NoFit(
            tuple(tiling.buffers(hardware, problem)), needed, "the smallest tile is too large"
        )
    ranked = sorted(search.found, key=lambda item: item[:3])
    best = ranked[0]
    # A runner-up that differs in slots only would tell the user nothing.
    other = next((item for item in ranked if _shape(item[3]) != _shape(best[3])), None)
    used = sum(b.slots * b.size_bytes for b in best[3].buffers(hardware, problem))
    return Choice(
        best[3],
        best[0],
        used,
        other[3] if other else None,
        other[0] if other else 0.0,
        len(ranked),
        best[4],
    )


def _shape(tiling: ConvTiling) -> tuple[object, ...]:
    return (
        tiling.groups,
        tiling.out_channels,
        tiling.in_channels,
        tiling.kernel,
        tiling.rows,
        tiling.columns,
        tiling.weights_outer,
        tiling.packing,
    )
