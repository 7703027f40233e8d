"""What the network planner is asked and what it answers: units, tensors, steps and homes.

The affine level is built from a plan (docs/concepts/groups.md). A *unit* is what one nest does: a
layer and what is fused to it. The planner puts the units, in program order, into *steps*, and gives
every tensor between them a *home*.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tilewright.schedule.box import BoxProblem, BoxTiling
from tilewright.schedule.tiling import ConvProblem, ConvTiling


@dataclass(frozen=True)
class TensorSpec:
    """A tensor between units, as an image of one batch: `rows` x `columns` x `channels`."""

    name: str
    rows: int
    columns: int
    channels: int
    element_bytes: int
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Top, left, bottom, right: the most that any reader reads beyond the image."""
    fill: float = 0
    """What padding holds."""
    ddr_only: str = ""
    """Why it cannot be held in SRAM (an argument, a result, readers that disagree about padding, a
    reader or writer that works on DDR only ...); empty if it can."""
    inside: int | None = None
    """The tensor it is a part of: an operand of a concatenation of channels."""
    channel: int = 0
    """First channel of the part."""


@dataclass(frozen=True)
class Read:
    """How rows of an operand follow rows of the result.

    Row r of the result needs rows `r * stride - before` to `r * stride - before + extent - 1`.
    """

    tensor: int
    stride: int = 1
    extent: int = 1
    before: int = 0
    whole: bool = False
    """Every row of the result needs all rows."""

    def rows(self, first: int, last: int) -> tuple[int, int]:
        """Return the rows needed for rows `first..last` (exclusive); may lie outside the image."""
        low = first * self.stride - self.before
        return low, (last - 1) * self.stride - self.before + self.extent


@dataclass(frozen=True)
class UnitSpec:
    """What one nest does."""

    layer: str
    problem: ConvProblem | BoxProblem | None
    """None: the unit is opaque: alone in its step, its tensors in DDR; it tiles itself.

    A box problem's axes are rows, columns and channels of the result.
    """
    reads: tuple[Read, ...]
    """Activations, in the order of the nest's operands (a joined second operand last)."""
    writes: int
    rows: int
    """Rows of the result."""
    stripable: bool = False
    """Whether it can be computed some rows at a time, all its tensors held."""
    in_ddr: BoxProblem | None = None
    """What it is instead of `problem` while it is by itself and none of its tensors is held:
    elementwise work walks dense tensors in longer rows. Its tiling in the step is one of this."""
    kept_bytes: int = 0
    """SRAM of constants that stay throughout the program, of a unit that tiles itself."""


@dataclass(frozen=True)
class Stage:
    """A part of a cascade: rows `first..last` (exclusive) of one unit's result or of one tensor."""

    kind: Literal["compute", "load", "store"]
    index: int
    """The unit that is computed; the tensor that is loaded from DDR to its held rows, or stored."""
    first: int
    last: int


@dataclass(frozen=True)
class Home:
    """Where a tensor lies between its writer and its readers."""

    ddr: bool
    """It is written to DDR."""
    held: bool
    """Whole in SRAM from its writer to the step `until`; later readers take it from DDR."""
    until: int = -1


@dataclass(frozen=True)
class Step:
    """One unit by itself, or a cascade of several."""

    units: tuple[int, ...]
    tilings: tuple[ConvTiling | BoxTiling | None, ...]
    """By unit. In a cascade: no loop loads or stores, weights stay for the whole step."""
    stages: tuple[Stage, ...] = ()
    """In order; empty for one unit by itself, whose own loops load and store what is in DDR."""
    capacity: dict[int, int] = field(default_factory=dict[int, int])
    """Cascade: the rows held of every tensor that is not held whole, padding included."""
    reason: str = ""
    """For the decision log."""


@dataclass(frozen=True)
class Plan:
    """Steps in order, and the home of every tensor."""

    steps: tuple[Step, ...]
    homes: tuple[Home, ...]
    """By tensor. Tensors inside a cascade that nobody else reads are neither held nor in DDR."""
    cycles: float
    """Estimated."""
    ddr_bytes: float
    sram_bytes: int
    kept_bytes: int = 0
    """SRAM of the weights and parameters that stay throughout the program."""
    activation_bytes: int = 0
    """SRAM and DDR of activations at the largest instant (`planner_memory.py`)."""
