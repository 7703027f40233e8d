"""Tiles of tensors in DDR: which box a tile covers, loading it with padding, storing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.transforms.affine.index import Index
from tilewright.transforms.affine.nest import Nest, View


@dataclass(frozen=True)
class Span:
    """The part of one dimension that a tile needs; it may reach beyond the tensor."""

    first: Index
    length: Index
    full: int
    """The tensor's size."""
    padded: bool = False
    """Whether any tile of the layer leaves the tensor here."""

    def clip(self, nest: Nest) -> tuple[Index, Index, Index]:
        """Return (positions before the tensor, first element read, elements read)."""
        if not self.padded:
            return Index(0), self.first, self.length
        before = nest.minimum(nest.maximum(-self.first, 0), self.length)
        begin = nest.minimum(nest.maximum(self.first, 0), self.full)
        end = nest.minimum(nest.maximum(self.first + self.length, 0), self.full)
        return before, begin, end - begin


def load(
    nest: Nest,
    source: View,
    outer: Sequence[Index],
    spans: Sequence[Span],
    tile: View,
    fill: float = 0,
) -> View:
    """Fill `tile` from a box of `source`; returns the part used.

    `outer` is the index of the leading dimensions.

    Where the box leaves the tensor the tile holds `fill`.
    """
    used = nest.view(tile, [0] * len(spans), [span.length for span in spans])
    target = used
    if any(span.padded for span in spans):
        nest.fill(fill, used)
    clipped = [span.clip(nest) for span in spans]
    if any(span.padded for span in spans):
        target = nest.view(used, [item[0] for item in clipped], [item[2] for item in clipped])
    box = nest.view(
        source,
        [*outer, *(item[1] for item in clipped)],
        [*(1 for _ in outer), *(item[2] for item in clipped)],
        drop=range(len(outer)),
    )
    nest.copy(box, target)
    return used


def store(
    nest: Nest, tile: View, target: View, outer: Sequence[Index], starts: Sequence[Index]
) -> None:
    """Write the used part of a tile to its box of `target`."""
    box = nest.view(
        target,
        [*outer, *starts],
        [*(1 for _ in outer), *tile.sizes],
        drop=range(len(outer)),
    )
    nest.copy(tile, box)
