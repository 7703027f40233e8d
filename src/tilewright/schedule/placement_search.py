"""How `place_network` finds addresses: greedy placements with repair, then exact search.

Blocks (one a slot) are placed one after the other at the lowest address that nothing alive at the
same time forbids, weights at the highest. Several orders are tried; what finds no room moves to
the front of the order. Where none does, the exact allocator searches, with a budget of steps.

Then wishes: every block has a level, and fulfils all wishes of it. Blocks that find no room, and
those alive at the same time, go down a level; at the lowest there are no wishes and the placement
is the one found first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tilewright.schedule.footprint import align
from tilewright.schedule.placement import Item, TileDoesNotFit
from tilewright.spec.hardware import Hardware

REPAIRS = 8
"""Rounds in which what found no room goes first."""
WISH_ROUNDS = 40
STEPS = 30_000
"""Budget of the exact search."""

TURN, SLOT, WEIGHTS, EARLY = 1, 2, 3, 4
"""Levels from which on a wish is kept: different slots of what is in use together, and weights
and the rest, in different banks; equal slots too; slots of weights; to be alive early.
"""


@dataclass
class _Block:
    """One slot of an item."""

    item: int
    slot: int
    size: int
    high: bool
    """Placed from the top downwards."""
    first: int
    last: int
    early: int
    apart: set[int] = field(default_factory=set[int])
    """Blocks in no common bank."""
    wishes: dict[int, int] = field(default_factory=dict[int, int])
    """Blocks better in no common bank: the level from which on."""
    near: list[int] = field(default_factory=list[int])
    """Blocks alive at one time, early or not."""


def search(hardware: Hardware, items: Sequence[Item]) -> dict[str, list[int]] | TileDoesNotFit:
    """Do what `place_network` says."""
    blocks = _blocks(hardware, items)
    live, position = _most_alive(blocks)
    if live > hardware.sram_size:
        return TileDoesNotFit(
            live,
            f"{live} bytes are alive at once, {hardware.sram_size} are there",
            position,
        )
    _relate(items, blocks)
    place = _Greedy(hardware, blocks)
    found, order = _pack(place)
    found = _exact(hardware, items, blocks) if found is None else _spread(place, order) or found
    if found is None:
        # In a memory without end: what that takes would certainly do.
        ends, _ = place.run(order, [0] * len(blocks), unbounded=True)
        needed = max(at + block.size for at, block in zip(ends, blocks, strict=True))
        return TileDoesNotFit(
            max(needed, hardware.sram_size + 1),
            f"{live} bytes are alive at once, for which there is no arrangement in "
            f"{hardware.sram_banks} banks of {hardware.bank_size} bytes",
            position,
        )
    answer: dict[str, list[int]] = {item.name: [] for item in items}
    for block, at in zip(blocks, found, strict=True):
        answer[items[block.item].name].append(at)
    return answer


def _blocks(hardware: Hardware, items: Sequence[Item]) -> list[_Block]:
    word = hardware.sram_word_bytes
    if len({item.name for item in items}) != len(items):
        raise ValueError("two items have one name")
    return [
        _Block(
            index, slot, align(item.size_bytes, word), item.role == "weights", item.first,
            item.last, min(item.first, item.first if item.early is None else item.early),
        )
        for index, item in enumerate(items)
        for slot in range(item.slots)
    ]  # fmt: skip


def _most_alive(blocks: Sequence[_Block]) -> tuple[int, int]:
    """Return the most bytes alive at one position, and the first such position."""
    change: dict[int, int] = {}
    for block in blocks:
        change[block.first] = change.get(block.first, 0) + block.size
        change[block.last + 1] = change.get(block.last + 1, 0) - block.size
    most, at, alive = 0, -1, 0
    for position in sorted(change):
        alive += change[position]
        if alive > most:
            most, at = alive, position
    return most, at


def _relate(items: Sequence[Item], blocks: Sequence[_Block]) -> None:
    """Fill in which blocks are alive together, must be apart, and had better be."""
    slots: dict[str, list[int]] = {item.name: [] for item in items}
    for number, block in enumerate(blocks):
        slots[items[block.item].name].append(number)

    def named(item: Item, names: Iterable[str]) -> list[int]:
        for name in names:
            if name not in slots:
                raise ValueError(f"`{item.name}` names `{name}`, which is not there")
        return [number for name in names for number in slots[name]]

    for number, block in enumerate(blocks):
        item = items[block.item]
        for other in named(item, item.apart):
            block.apart.add(other)
            blocks[other].apart.add(number)
        for other in named(item, item.beside):
            same = blocks[other].slot == block.slot and blocks[other].high == block.high
            level = SLOT if same else TURN
            block.wishes[other] = blocks[other].wishes[number] = level
        for other in slots[item.name]:
            if other != number:
                block.wishes[other] = WEIGHTS if block.high else TURN
    alive: list[int] = []
    for number in sorted(range(len(blocks)), key=lambda n: (blocks[n].early, n)):
        block = blocks[number]
        if block.size == 0:
            continue
        alive = [other for other in alive if blocks[other].last >= block.early]
        for other in alive:
            block.near.append(other)
            blocks[other].near.append(number)
        alive.append(number)


class _Greedy:
    """Places blocks in a given order."""

    def __init__(self, hardware: Hardware, blocks: Sequence[_Block]) -> None:
        self.blocks = blocks
        self.size = hardware.sram_size
        self.bank = hardware.bank_size

    def run(
        self, order: Sequence[int], levels: Sequence[int], unbounded: bool = False
    ) -> tuple[list[int], list[int]]:
        """Place all blocks; return addresses, and the blocks that found no room (at -1).

        `unbounded`: in a memory without end, all from the bottom upwards.
        """
        blocks, bank = self.blocks, self.bank
        at = [-1] * len(blocks)
        failed: list[int] = []
        for number in order:
            block, level = blocks[number], levels[number]
            first = block.early if level >= EARLY else block.first
            if block.size == 0:
                at[number] = 0
                continue
            taken: list[tuple[int, int]] = []
            for other in block.near:
                low = at[other]
                if low < 0:
                    continue
                near = blocks[other]
                if near.last < first or block.last < (
                    near.early if levels[other] >= EARLY else near.first
                ):
                    continue
                end = low + near.size
                wish = block.wishes.get(other)
                if other in block.apart or (
                    wish is not None and level >= wish and levels[other] >= wish
                ):
                    low, end = low // bank * bank, -(-end // bank) * bank
                taken.append((low, end))
            size = block.size
            if block.high and not unbounded:
                taken.sort(key=lambda pair: -pair[1])
                free = self.size
                for low, end in taken:
                    if free - end >= size:
                        break
                    free = min(free, low)
                place = free - size
            else:
                taken.sort()
                place = 0
                for low, end in taken:
                    if low - place >= size:
                        break
                    place = max(place, end)
                if place + size > self.size and not unbounded:
                    place = -1
            if place < 0:
                failed.append(number)
            else:
                at[number] = place
        return at, failed


def _orders(blocks: Sequence[_Block]) -> list[list[int]]:
    """Return the orders to try: long lives, sizes, areas, as they come."""
    numbers = range(len(blocks))

    def life(number: int) -> int:
        return blocks[number].last - blocks[number].first + 1

    def size(number: int) -> int:
        return blocks[number].size

    return [
        sorted(numbers, key=lambda n: (-life(n), blocks[n].first, n)),
        sorted(numbers, key=lambda n: (-life(n), -size(n), n)),
        sorted(numbers, key=lambda n: (-size(n), -life(n), n)),
        sorted(numbers, key=lambda n: (-size(n) * life(n), n)),
        sorted(numbers, key=lambda n: (blocks[n].first, -life(n), n)),
    ]


def _pack(place: _Greedy) -> tuple[list[int] | None, list[int]]:
    """Return a placement without wishes, or None, and the order it was found in."""
    plain = [0] * len(place.blocks)
    orders = _orders(place.blocks)
    for order in orders:
        tried = order
        for _ in range(REPAIRS):
            found, failed = place.run(tried, plain)
            if not failed:
                return found, tried
            front = set(failed)
            tried = [*failed, *(number for number in tried if number not in front)]
    return None, orders[0]


def _spread(place: _Greedy, order: Sequence[int]) -> list[int] | None:
    """Return a placement with as many wishes kept as the rounds allow."""
    blocks = place.blocks
    levels = [EARLY] * len(blocks)
    for _ in range(WISH_ROUNDS):
        found, failed = place.run(order, levels)
        if not failed:
            return found
        lowered: dict[int, int] = {}
        for number in failed:
            block, level = blocks[number], max(0, levels[number] - 1)
            around = block.near
            if levels[number] == 0:
                # Its neighbours wish nothing any more: those around them do.
                around = sorted({far for n in around for far in (n, *blocks[n].near)})
            elif levels[number] < EARLY:
                around = [n for n in around if _overlap(blocks[n], block)]
            for other in (number, *around):
                lowered[other] = min(level, lowered.get(other, level))
        for number, level in lowered.items():
            levels[number] = min(level, levels[number])
    return None


def _overlap(one: _Block, two: _Block) -> bool:
    return one.first <= two.last and two.first <= one.last


def _exact(hardware: Hardware, items: Sequence[Item], blocks: Sequence[_Block]) -> list[int] | None:
    """Return a placement by the exact allocator, or None if it finds none within its budget."""
    from tilewright.schedule.allocator import Buffer, Problem, solve

    numbers = [number for number, block in enumerate(blocks) if block.size]
    places = {number: index for index, number in enumerate(numbers)}
    pairs = {
        (min(a, b), max(a, b))
        for number in numbers
        for other in blocks[number].apart
        if other in places
        for a, b in [(places[number], places[other])]
    }
    buffers = tuple(
        Buffer(
            f"{items[block.item].name}:{block.slot}", block.first, block.last + 1, block.size,
            hardware.sram_word_bytes,
        )
        for block in (blocks[number] for number in numbers)
    )  # fmt: skip
    problem = Problem(buffers, hardware.sram_size, tuple(sorted(pairs)), hardware.bank_size)
    answer = solve(problem, steps=STEPS)
    if answer.offsets is None:
        return None
    found = [0] * len(blocks)
    for number, offset in zip(numbers, answer.offsets, strict=True):
        found[number] = offset
    return found
