"""Tile sizes of layers that run on the vector unit or only move data.

The tile is a box of the loop axes of the layer; every operand says which part of it a tile needs.
`choose_box` takes the cheapest box that fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import ceil, prod

from tilewright.schedule.cost import HELD_TILE_OVERHEAD_CYCLES, NestCost, rates
from tilewright.schedule.footprint import activation_bytes, align, parameter_bytes
from tilewright.schedule.placement import TileBuffer
from tilewright.schedule.tiling import TABLE_BYTES, TileLoop, loads, packed_bytes, shares
from tilewright.spec.hardware import Hardware


@dataclass(frozen=True)
class BoxAxis:
    """How an operand's dimension follows a tile: `stride * (tile extent - 1) + window` elements."""

    axis: int
    """Loop axis; -1 if the dimension does not depend on any."""
    stride: int = 1
    window: int = 1

    def extent(self, tile: tuple[int, ...]) -> int:
        """Return the elements of the dimension that a tile needs."""
        return self.window if self.axis < 0 else self.stride * (tile[self.axis] - 1) + self.window


@dataclass(frozen=True)
class BoxOperand:
    """A tensor of the layer; its last dimension holds the channels of a pixel."""

    role: str
    """`input`, `output`, or another role of docs/concepts/machine.md."""
    axes: tuple[BoxAxis, ...]
    full: tuple[int, ...]
    """Sizes in DDR."""
    element_bytes: int = 1

    def extents(self, tile: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the operand's tile."""
        return tuple(axis.extent(tile) for axis in self.axes)

    def size_bytes(self, hardware: Hardware, tile: tuple[int, ...]) -> int:
        """Return the SRAM bytes of one slot."""
        *outer, channels = self.extents(tile)
        return activation_bytes(hardware, prod(outer), channels, self.element_bytes)

    def loops(self) -> tuple[str, ...]:
        """Return the names of the loops the operand's tile changes with."""
        return tuple(str(axis.axis) for axis in self.axes if axis.axis >= 0)


@dataclass(frozen=True)
class BoxProblem:
    """A layer of the vector unit: loop axes (outermost first, channels last) and operands."""

    sizes: tuple[int, ...]
    operands: tuple[BoxOperand, ...]
    outer: int = 1
    """Iterations of loops around, never part of a tile."""
    order: tuple[int, ...] = ()
    """Order of the tile loops, outermost first; the axes' own order if empty."""
    work: int = 1
    """Vectors read for every vector written."""
    parameters: bool = False
    """A block of scalar parameters is needed."""
    table: bool = False
    row_bytes: int = 0
    """SRAM of constants that all rows share (softmax, layer normalisation); a pixel is a row then,
    and never cut."""
    row_cycles: int = 0
    """Cycles a row takes besides its vectors."""
    limits: tuple[int, ...] = ()
    """Largest tile extents; empty for none."""
    held: tuple[int, ...] = ()
    """Operands that lie whole in SRAM: no tile, no DMA."""
    element_wise: bool = False
    """The vector unit moves single elements (layout conversions)."""


@dataclass(frozen=True)
class BoxTiling:
    """A tile's extents and the slots of each operand."""

    tile: tuple[int, ...]
    slots: tuple[int, ...]

    def loops(self, problem: BoxProblem) -> list[TileLoop]:
        """Return the loops, outermost first; names are `outer` and the axes' numbers."""
        order = problem.order or tuple(range(len(self.tile)))
        inner = [TileLoop(str(axis), problem.sizes[axis], self.tile[axis]) for axis in order]
        return [TileLoop("outer", problem.outer, 1), *inner]

    def buffers(self, hardware: Hardware, problem: BoxProblem) -> list[TileBuffer]:
        """Return the SRAM tiles of the nest, all alive together."""
        buffers = [
            TileBuffer(
                f"{operand.role} {index}",
                operand.role,
                operand.size_bytes(hardware, self.tile),
                slots,
            )
            for index, (operand, slots) in enumerate(zip(problem.operands, self.slots, strict=True))
            if index not in problem.held
        ]
        if problem.parameters:
            buffers.append(TileBuffer("parameters", "bias", parameter_bytes(hardware, 1), 1))
        if problem.table:
            size = align(TABLE_BYTES, hardware.sram_word_bytes)
            buffers.append(TileBuffer("table", "table", size, 1))
        if problem.row_bytes:
            size = align(problem.row_bytes, hardware.sram_word_bytes)
            buffers.append(TileBuffer("constants of rows", "row_table", size, 1))
        return buffers


@dataclass(frozen=True)
class BoxChoice:
    """What the tiler chose."""

    tiling: BoxTiling
    cycles: float
    sram_bytes: int
    runner_up: BoxTiling | None
    runner_up_cycles: float
    candidates: int
    cost: NestCost


@dataclass(frozen=True)
class BoxNoFit:
    """Nothing fits: the smallest tiles, and the SRAM they need."""

    buffers: tuple[TileBuffer, ...]
    needed_bytes: int


@lru_cache(maxsize=4096)
def choose_box(
    hardware: Hardware, problem: BoxProblem, reserved: int = 0, limit: int | None = None
) -> BoxChoice | BoxNoFit:
    """Return the cheapest box that fits, or why there is none.

    `reserved` bytes of SRAM hold tensors, those of the problem's `held` operands included. With
    `limit`, tiles of activations take no more bytes than that.
    """
    rank = len(problem.sizes)
    limits = problem.limits or (1 << 30,) * rank
    choices = [
        [
            part
            for part in shares(size, hardware.vector_lanes if axis == rank - 1 else 1)
            if part <= limit
        ]
        or [min(size, limit)]
        for axis, (size, limit) in enumerate(zip(problem.sizes, limits, strict=True))
    ]
    # A channel tile below the vector's width wastes lanes, but may be all that fits.
    least = shares(min(choices[-1][-1], hardware.vector_lanes))
    choices[-1] = [*choices[-1], *(part for part in least if part < choices[-1][-1])]
    if problem.row_bytes:
        choices[-1] = [problem.sizes[-1]]
    found: list[tuple[float, float, int, BoxTiling, NestCost]] = []
    smallest: tuple[int, BoxTiling] | None = None
    for number, tile in enumerate(product(*choices)):
        plain = BoxTiling(tile, (1,) * len(problem.operands))
        loops = plain.loops(problem)
        times = [
            1 if index in problem.held else loads(loops, ("outer", *operand.loops()))
            for index, operand in enumerate(problem.operands)
        ]
        options = dict.fromkeys(
            (tuple(min(slots, 2 if time > 1 else 1) for time in times)) for slots in (2, 1)
        )
        for slots in options:
            tiling = BoxTiling(tile, slots)
            buffers = tiling.buffers(hardware, problem)
            needed = packed_bytes(hardware, buffers, reserved)
            tiles = sum(b.slots * b.size_bytes for b in buffers if b.role in ("input", "output"))
            if needed > hardware.sram_size or (limit is not None and tiles > limit):
                if smallest is None or needed < smallest[0]:
                    smallest = (needed, tiling)
                continue
            cost = _price(hardware, problem, tiling, loops, times)
            found.append((cost.cycles(), cost.ddr_bytes, number, tiling, cost))
            break
    if not found:
        assert smallest is not None
        return BoxNoFit(tuple(smallest[1].buffers(hardware, problem)), smallest[0])
    ranked = sorted(found, key=lambda item: item[:3])
    best = ranked[0]
    used = sum(b.slots * b.size_bytes for b in best[3].buffers(hardware, problem))
    other = ranked[1] if len(ranked) > 1 else None
    return BoxChoice(
        best[3],
        best[0],
        used,
        other[3] if other else None,
        other[0] if other else 0.0,
        len(ranked),
        best[4],
    )


def _price(
    hardware: Hardware,
    problem: BoxProblem,
    tiling: BoxTiling,
    loops: list[TileLoop],
    times: list[int],
) -> NestCost:
    cost, rate = NestCost(), rates(hardware)
    last = len(problem.operands) - 1
    for index, operand in enumerate(problem.operands):
        if index in problem.held:
            continue
        extents = operand.extents(tiling.tile)
        # Dimensions from the last one on that are whole form one run.
        run = len(extents) - 1
        while run > 0 and extents[run] >= operand.full[run]:
            run -= 1
        part = prod(
            loop.size / (loop.count * loop.step) for loop in loops if loop.name in operand.loops()
        )
        clipped = [min(have, full) for have, full in zip(extents, operand.full, strict=True)]
        size = prod(clipped) * part * operand.element_bytes
        runs = prod(clipped[:run]) * part
        overlapped = tiling.slots[index] > 1
        cost.move(size, runs, times[index], overlapped, rate, loads=index < last)
    tiles = prod(loop.count for loop in loops)
    *outer, channels = tiling.tile
    vectors = channels if problem.element_wise else ceil(channels / hardware.vector_lanes)
    part = prod(loop.size / (loop.count * loop.step) for loop in loops)
    pixel = vectors * problem.work + problem.row_cycles
    cost.vector = tiles * (prod(outer) * pixel * part + hardware.vector_latency)
    cost.tiles = tiles
    if len(problem.held) == len(problem.operands):
        cost.overhead = HELD_TILE_OVERHEAD_CYCLES
    if last in problem.held:
        cost.fill = hardware.vector_latency
    return cost
