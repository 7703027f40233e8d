"""Buffers and views of the affine level, with every index known.

A view is a linear element offset and one size and stride a dimension, all in elements of the
buffer's logical shape (dense, last dimension fastest). SRAM tiles have a physical form of their
own: pixels lie `pitch` bytes apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tilewright.transforms.tpu.instruction import Instr, Region


@dataclass
class DdrBuffer:
    """A tensor in DDR: an argument of the function or a `memref.alloc` in the default space."""

    name: str
    shape: tuple[int, ...]
    item_bytes: int
    constant: bool
    """Weights and parameters: never written by the program."""
    offset: int = 0
    """Bytes from R2, set by the DDR placement (not for constants)."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the dense tensor."""
        size = self.item_bytes
        for extent in self.shape:
            size *= extent
        return size


@dataclass
class Tile:
    """One instance of an SRAM tile: each execution of its `memref.alloc` makes a new one."""

    role: str
    shape: tuple[int, ...]
    address: int
    pitch: int
    """Bytes between pixels (last dimension = channels)."""
    size_bytes: int
    fill: tuple[View, int] | None = None
    """A constant written before the data: part filled, byte."""
    source: View | None = None
    """For weights, parameters and tables: the DDR view loaded into it."""
    constants: tuple[int, int] | None = None
    """What it was last loaded with: offset and bytes in the constants segment."""
    item_bytes: int = 1
    """Bytes of an element."""
    drains: list[int] = field(default_factory=list[int])
    """Positions in the program of the `vec_drain`s that produced it."""

    @property
    def region(self) -> Region:
        """All bytes of the tile."""
        return Region("sram", self.address, self.address + self.size_bytes)


@dataclass
class Alternating:
    """Tiles that are filled in turn, so that one is read while the next is filled."""

    tiles: tuple[Tile, ...] = ()
    taken: int = 0

    def take(self) -> Tile:
        """Return the tile that was filled longest ago."""
        self.taken += 1
        return self.tiles[(self.taken - 1) % len(self.tiles)]


@dataclass
class Accumulator:
    """An int32 accumulator tile, streamed through the M registers."""

    shape: tuple[int, ...]
    chunks: list[Instr] = field(default_factory=list[Instr])
    """`mac_conv`s of a split reduction issued so far."""
    pending: object | None = None
    """A whole reduction not yet issued (see `emit_conv`)."""


@dataclass(frozen=True)
class View:
    """A strided window into a buffer."""

    buffer: DdrBuffer | Tile | Accumulator
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def squeezed(self, rank: int) -> View:
        """Return the view without leading dimensions of one, down to (or filled up to) `rank`."""
        sizes, strides = list(self.sizes), list(self.strides)
        while len(sizes) > rank and sizes[0] == 1:
            del sizes[0], strides[0]
        while len(sizes) < rank:
            sizes.insert(0, 1)
            strides.insert(0, 0)
        assert len(sizes) == rank, (self.sizes, rank)
        return View(self.buffer, self.offset, tuple(sizes), tuple(strides))

    def starts(self) -> tuple[int, ...]:
        """Return the index of the first element in the buffer's own shape."""
        rest, starts = self.offset, list[int]()
        for stride in dense_strides(self.buffer.shape):
            starts.append(rest // stride)
            rest %= stride
        return tuple(starts)


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a dense tensor."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def whole(buffer: DdrBuffer | Tile | Accumulator) -> View:
    """Return the view of all of `buffer`."""
    return View(buffer, 0, tuple(buffer.shape), dense_strides(buffer.shape))


def tile_address(view: View) -> int:
    """Return the SRAM address of a tile view's first element."""
    tile = view.buffer
    assert isinstance(tile, Tile)
    channels = tile.shape[-1] if tile.shape else 1
    pixel, channel = divmod(view.offset, channels)
    return tile.address + pixel * tile.pitch + channel * tile.item_bytes


def tile_strides(view: View) -> tuple[int, ...]:
    """Return a tile view's strides in SRAM bytes."""
    tile = view.buffer
    assert isinstance(tile, Tile)
    channels = tile.shape[-1] if tile.shape else 1
    result: list[int] = []
    for stride in view.strides:
        if stride % channels == 0:
            result.append(stride // channels * tile.pitch)
        else:
            # A stride over part of the channels stays inside a pixel.
            assert stride < channels, (view.strides, tile.shape)
            result.append(stride * tile.item_bytes)
    return tuple(result)


@dataclass(frozen=True)
class Loop:
    """A loop of an elementwise instruction: count, and byte steps of every operand."""

    count: int
    steps: tuple[int, ...]


def merge_loops(loops: list[Loop]) -> list[Loop]:
    """Drop loops of one and merge neighbours (outermost first) that all operands walk as one."""
    merged: list[Loop] = []
    for loop in loops:
        if loop.count == 1:
            continue
        outer = merged[-1] if merged else None
        if outer is not None and all(
            big == small * loop.count for big, small in zip(outer.steps, loop.steps, strict=True)
        ):
            merged[-1] = Loop(outer.count * loop.count, loop.steps)
        else:
            merged.append(loop)
    return merged


def fit_loops(
    loops: list[Loop], limits: Sequence[int], operands: int
) -> list[tuple[tuple[int, ...], list[Loop]]]:
    """Cut a loop nest into pieces that fit an instruction's counters.

    `limits` are the largest counts, outermost first. Returns one (offsets of the operands, loops,
    outermost first and as many as there are limits) a piece.
    """
    rank = len(limits)
    nest = [Loop(1, (0,) * operands)] * (rank - len(loops)) + loops
    pieces: list[tuple[tuple[int, ...], list[Loop]]] = [((0,) * operands, nest)]
    while any(len(nest) > rank for _, nest in pieces):
        pieces = [
            (_add(offset, nest[0].steps, index), nest[1:])
            for offset, nest in pieces
            for index in range(nest[0].count)
        ]
    for axis, limit in enumerate(limits):
        cut: list[tuple[tuple[int, ...], list[Loop]]] = []
        for offset, nest in pieces:
            loop = nest[axis]
            for first in range(0, loop.count, limit):
                part = Loop(min(limit, loop.count - first), loop.steps)
                cut.append(
                    (_add(offset, loop.steps, first), [*nest[:axis], part, *nest[axis + 1 :]])
                )
        pieces = cut
    return pieces


def _add(offset: tuple[int, ...], steps: tuple[int, ...], count: int) -> tuple[int, ...]:
    return tuple(a + b * count for a, b in zip(offset, steps, strict=True))
