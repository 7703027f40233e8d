"""Tilings for the planner: few candidates, and reductions split where that pays.

`choose_conv` tries many sizes and splits a reduction only if nothing fits otherwise. The planner
asks for hundreds of tilings, with operands held and little SRAM left: of every tile of channels the
tallest that fits is enough, and a reduction in parts may be what reads everything once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil

from tilewright.schedule.cost import TRAFFIC_WEIGHT, NestCost
from tilewright.schedule.footprint import ConvForm, activation_bytes, align
from tilewright.schedule.placement import TileBuffer
from tilewright.schedule.tiling import (
    INPUT_LOOPS,
    MAX_EXTENT,
    OPERANDS,
    OUTPUT_LOOPS,
    Choice,
    ConvProblem,
    ConvTiling,
    NoFit,
    Search,
    accumulates,
    channel_tiles,
    choose_by,
    kernel_tiles,
    legal,
    loads,
    packed_bytes,
    row_tiles,
    shares,
)
from tilewright.spec.hardware import Hardware

NEAR = 1.15
"""A tiling this close to the least cycles of a layer is not worth splitting its reduction."""
SLOTS = ((2, 2, 2, 2), (2, 2, 1, 1), (1, 2, 1, 1), (1, 1, 1, 1))
"""Of input, weights, output and second operand."""
ACTIVATIONS = ("input", "output")
"""Roles of tiles of activations."""
MIN_WIDTH = 64
"""Narrower arrays are never used in part."""
AHEAD = 0.98
"""A second tiling must be that much better."""
COUNTS = frozenset((1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128))
"""Parts into which channels are cut."""


class _Few(Search):
    def __init__(
        self, hardware: Hardware, problem: ConvProblem, reserved: int, limit: int | None
    ) -> None:
        super().__init__(hardware, problem, reserved)
        self.limit = hardware.sram_size if limit is None else limit
        """Bytes that all tiles of activations may take together."""
        self._sizes: dict[object, list[tuple[str, str, int]]] = {}
        """Name, role and bytes of one slot of every buffer, by tile."""

    def run(self) -> None:
        """Try splitting the reduction more and more, until nothing is to be gained."""
        problem, least = self.problem, self._least()
        for level in range(4):
            for kernel in kernel_tiles(problem, level)[:3]:
                for channels in self._channels(level > 0):
                    self._tallest(ConvTiling(*channels, kernel, 1, 1))
            if not self.found or (problem.kind == "sum" and level < 2):
                continue
            costs = [item[4] for item in self.found]
            best = min(max(cost.mac, cost.vector, cost.memory) + cost.waiting for cost in costs)
            if problem.kind == "sum" or problem.group > 1 or best <= NEAR * least:
                return

    def _channels(self, split: bool) -> list[tuple[int, int, int]]:
        """Return groups, output and input channels of a group.

        Less than the array is wide, if the rest of SRAM is then enough to read inputs once.
        """
        problem, size = self.problem, self.hardware.array_size
        if problem.group > 1 or problem.kind == "sum":
            return list(channel_tiles(self.hardware, problem, split))
        outs = _parts(problem.out_channels, size)
        ins = _parts(problem.in_channels, size, 8) if split else [problem.in_channels]
        return [(1, out, part) for out in outs for part in ins]

    def _least(self) -> float:
        """Return the cycles that no tiling can avoid."""
        problem = self.problem
        area = problem.kernel[0] * problem.kernel[1]
        size = float(problem.group_in * problem.out_channels * area)
        if "input" not in problem.held:
            size += problem.batch * problem.in_rows * problem.in_columns * problem.in_channels
        pixels = problem.batch * problem.out_rows * problem.out_columns
        outputs = pixels * problem.out_channels
        size += outputs * ("output" not in problem.held)
        size += outputs * (problem.second and "second" not in problem.held)
        width = self.hardware.array_size
        steps = area if problem.diagonal else area * ceil(problem.group_in / width)
        blocks = ceil(problem.out_channels / width)
        # A step takes as long as loading the weights of the next.
        depth = 1 if problem.diagonal else min(problem.group_in, width)
        tiles = ceil(pixels / self.hardware.accumulator_rows)
        memory = size * problem.element_bytes / self.rates.ddr_bytes_per_cycle
        return max(memory, float(max(pixels, depth * tiles) * steps * blocks))

    def _tallest(self, base: ConvTiling) -> None:
        """Price the tallest tiles of these channels that fit, by slots and order."""
        hardware, problem = self.hardware, self.problem
        form = base.form(hardware, problem)
        split = base.kernel != problem.kernel or (
            base.groups == 1 and base.in_channels < problem.group_in
        )
        weights = problem.weight_bytes(hardware, form)
        room = hardware.sram_size - self.reserved - align(weights, hardware.bank_size)
        room = min(room, self.limit)
        if not legal(hardware, problem, base, form):
            return
        widths = [part for part in shares(problem.out_columns) if part <= hardware.accumulator_rows]
        for columns in (widths[0], widths[-1]):
            fits = False
            taken: set[int] = set()
            heights: list[tuple[int, int]] = []
            for rows in row_tiles(hardware, problem, columns):
                if rows > MAX_EXTENT:
                    continue
                if split and not accumulates(hardware, rows, columns, form):
                    continue
                heights.append((rows, self._bytes(base, rows, columns)))
            for slots in SLOTS:
                for rows, size in heights:
                    if size > room:
                        continue
                    if rows in taken:
                        break
                    tiling = replace(base, rows=rows, columns=columns)
                    if self._both_orders(tiling, form, slots):
                        for packing in tiling.packings(hardware, problem)[1:]:
                            packed = replace(tiling, packing=packing)
                            self._both_orders(packed, packed.form(hardware, problem), slots)
                        taken.add(rows)
                        fits = True
                        break
            if fits:
                return
        tiling = replace(base, columns=widths[-1])
        needed = packed_bytes(hardware, tiling.buffers(hardware, problem), self.reserved)
        self.remember_smallest(needed, tiling)

    def _bytes(self, base: ConvTiling, rows: int, columns: int) -> int:
        """Return the SRAM of one slot of each tile of activations, `rows` x `columns` pixels."""
        problem, hardware, held = self.problem, self.hardware, self.problem.held
        size = problem.element_bytes
        total = 0
        if "input" not in held:
            high, wide = (
                (pixels - 1) * stride + (kernel - 1) * dilation + 1
                for pixels, stride, kernel, dilation in zip(
                    (rows, columns), problem.strides, base.kernel, problem.dilations, strict=True
                )
            )
            channels = base.groups * base.in_channels
            total += activation_bytes(hardware, high * wide, channels, size)
        outputs = ("output" not in held) + (problem.second and "second" not in held)
        if outputs:
            channels = base.groups * base.out_channels
            item = problem.output_bytes or size
            total += outputs * activation_bytes(hardware, rows * columns, channels, item)
        return total

    def _both_orders(
        self, tiling: ConvTiling, form: ConvForm, slots: tuple[int, int, int, int]
    ) -> bool:
        """Price a tile with both orders of its loops; False if it does not fit."""
        problem, fits = self.problem, False
        for weights_outer in (True, False) if self.order_matters(tiling) else (True,):
            ordered = tiling if weights_outer else replace(tiling, weights_outer=False)
            loops = ordered.loops(problem)
            results = loads(loops, OUTPUT_LOOPS)
            times = (loads(loops, INPUT_LOOPS), self.weight_loads(loops), results, results)
            chosen = tuple(
                1 if time == 1 or name in problem.held else slot
                for name, slot, time in zip(OPERANDS, slots, times, strict=True)
            )
            if not self._fits(tiling, chosen, loads(loops, "go") > 1):
                continue
            fits = True
            inputs, weights, outputs, seconds = chosen
            candidate = replace(
                ordered,
                input_slots=inputs,
                weight_slots=weights,
                output_slots=outputs,
                second_slots=seconds,
            )
            self.price(candidate, form, loops, times)
        return fits

    def _fits(self, tiling: ConvTiling, slots: tuple[int, ...], many: bool) -> bool:
        """Tell whether a tile fits with these slots; `many`: parameters change between tiles."""
        hardware = self.hardware
        key = (tiling.kernel, tiling.out_channels, tiling.in_channels, tiling.groups)
        key = (*key, tiling.rows, tiling.columns, tiling.packing)
        if key not in self._sizes:
            self._sizes[key] = [
                (buffer.name, buffer.role, buffer.size_bytes)
                for buffer in tiling.buffers(hardware, self.problem)
            ]
        by_name = {"parameters": slots[1] if many else 1}
        by_name.update(zip(OPERANDS, slots, strict=True))
        weights = tiles = others = 0
        for name, role, size in self._sizes[key]:
            count = by_name.get(name, 1)
            if role == "weights":
                weights += count * align(size, hardware.sram_word_bytes)
            else:
                others += count * align(size, hardware.sram_word_bytes)
                tiles += count * size if role in ACTIVATIONS else 0
        if tiles > self.limit:
            return False
        bank = hardware.bank_size
        return align(others + self.reserved, bank) + align(weights, bank) <= hardware.sram_size


def tile_bytes(buffers: Sequence[TileBuffer]) -> int:
    """Return the bytes of tiles of activations."""
    return sum(b.slots * b.size_bytes for b in buffers if b.role in ACTIVATIONS)


def _parts(size: int, unit: int, least: int = 4) -> list[int]:
    """Return parts of channels: multiples of the array's width, then less, largest first.

    The smallest is the array's width by `least`.
    """
    every = shares(size, unit)
    parts = [part for part in every if part == every[-1] or ceil(size / part) in COUNTS]
    if unit >= MIN_WIDTH:
        less = dict.fromkeys((unit // 2, unit // 4, unit // least))
        parts += [part for part in less if part < parts[-1]]
    return parts


@lru_cache(maxsize=8192)
def choose_few(
    hardware: Hardware, problem: ConvProblem, reserved: int, limit: int | None = None
) -> tuple[Choice, ...] | NoFit:
    """Return cheap tilings that fit beside `reserved` bytes of tensors, or why there is none.

    With `limit`, tiles of activations take no more bytes than that. The first is the best by
    itself; a second one is better if its first tiles are loaded while the step before works.
    """
    search = _Few(hardware, problem, reserved, limit)
    choice = choose_by(search)
    if isinstance(choice, NoFit):
        return choice
    ahead = min(search.found, key=lambda item: (_ahead(item[4]), item[2]))
    if ahead[3] == choice.tiling or _ahead(ahead[4]) > AHEAD * _ahead(choice.cost):
        return (choice,)
    used = sum(b.slots * b.size_bytes for b in ahead[3].buffers(hardware, problem))
    other = Choice(
        ahead[3], ahead[0], used, choice.tiling, choice.cycles, choice.candidates, ahead[4]
    )
    return choice, other


def _ahead(cost: NestCost) -> float:
    """Return the cycles of a nest whose transfers all overlap with other work."""
    return cost.engines() + cost.waiting + TRAFFIC_WEIGHT * cost.memory
