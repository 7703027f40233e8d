"""Images that lie in SRAM: whole tensors, parts of them, and rows in rolling buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.ir import SSAValue

from tilewright.transforms.affine.index import Index
from tilewright.transforms.affine.nest import Nest, View


@dataclass(frozen=True)
class SramImage:
    """An image `rows x columns x channels` inside a buffer of role `held`.

    Pixel (r, c), channel k lies at `[r + rows, c + columns, k + channels]` of the buffer. Padding
    around the image is part of the buffer.
    """

    buffer: View
    rows: int
    columns: int
    channels: int = 0

    def box(self, nest: Nest, starts: Sequence[Index], lengths: Sequence[Index]) -> View:
        """Return the view of a box [rows, columns, channels] of the image."""
        moved = zip(starts, (self.rows, self.columns, self.channels), strict=True)
        return nest.view(self.buffer, [start + by for start, by in moved], lengths)


Place = SSAValue | SramImage
"""Where a nest finds or leaves a tensor: a buffer in DDR, or SRAM."""
