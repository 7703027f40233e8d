"""Units of a function: what one nest each does, before it is known where their tensors lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from xdsl.ir import Operation, SSAValue

from tilewright.schedule.box import BoxProblem, BoxTiling
from tilewright.schedule.tiling import ConvProblem, ConvTiling
from tilewright.transforms.affine.held import SramImage
from tilewright.transforms.affine.segment import Buffers

Tiling = ConvTiling | BoxTiling
Image = tuple[int, int, int]
"""Rows, columns, channels."""


def image_of(shape: Sequence[int]) -> Image:
    """Return a tensor's shape as that of an image.

    One image [1, h, w, c] is h x w x c. Everything else is one row of pixels: all axes but the last
    are columns, so that no reader needs more than one row of it.
    """
    if len(shape) == 4 and shape[0] == 1:
        return shape[1], shape[2], shape[3]
    return (1, prod(shape[:-1]), shape[-1]) if shape else (1, 1, 1)


@dataclass(frozen=True)
class Reading:
    """How a unit reads a tensor."""

    value: SSAValue
    image: Image
    """The shape that it reads it under."""
    stride: int = 1
    extent: int = 1
    before: int = 0
    """Row r of the result needs `extent` rows from `r * stride - before` on."""
    whole: bool = False
    """Every row of the result needs all rows."""
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Top, left, bottom, right: how far it reads beyond the image."""
    fill: float = 0
    """What it wants to find there."""


Strip = Callable[[int, int, Sequence[SramImage], SramImage], None]
"""Appends the computation of rows `first..last` (exclusive) from images in SRAM to one."""


@dataclass(frozen=True)
class Work:
    """How a unit is built.

    `keep` appends constants that stay for the whole program, before all nests, given the tiling
    (None: it chooses its own beside some bytes of SRAM).
    `alone` appends a nest, given the tiling (None: it chooses its own) and for every operand and
    for the result the image in SRAM (None: it lies in DDR). `begin` appends what all rows need, and
    returns what appends some rows.
    """

    alone: Callable[[Buffers, Tiling | None, Sequence[SramImage | None], SramImage | None], None]
    begin: Callable[[Buffers, Tiling], Strip] | None = None
    keep: Callable[[Buffers, Tiling | None, int], None] | None = None


@dataclass
class Unit:
    """What one nest does."""

    layer: str
    reads: tuple[Reading, ...]
    result: SSAValue | None
    """As the nest makes it; other shapes of it and the concatenation around it come later. None:
    it copies a tensor to a result of the function."""
    producer: Operation | None
    """The op that gives the result its name."""
    work: Work
    problem: ConvProblem | BoxProblem | None = None
    """None: it takes its tensors from DDR and tiles itself."""
    in_ddr: BoxProblem | None = None
    """What it is instead while all its tensors lie in DDR."""
    image: Image = (0, 0, 0)
    """Of the result; of no interest if it tiles itself."""
    strided: bool = False
    """Whether it can write a part of a concatenation in place."""
    kept_bytes: int = 0
    """SRAM of constants that stay, about."""
    why_opaque: str = ""
    """Why there is no problem."""
