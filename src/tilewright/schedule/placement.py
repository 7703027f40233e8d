"""Addresses of a function's SRAM buffers, with the chip's bank rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.spec.hardware import Hardware


@dataclass(frozen=True)
class TileBuffer:
    """An SRAM tile: `slots` copies of `size_bytes` bytes each."""

    name: str
    role: str
    size_bytes: int
    slots: int


@dataclass(frozen=True)
class Item:
    """An SRAM buffer of a function: `slots` copies, alive from one top-level op to another."""

    name: str
    role: str
    """As of the affine level; `weights` grow from the top of SRAM downwards."""
    size_bytes: int
    slots: int
    first: int
    """Position of the top-level op that first writes it."""
    last: int
    """Position of the last that uses it, inclusive."""
    apart: tuple[str, ...] = ()
    """Names of items it must share no bank with; saying so on one side is enough."""
    beside: tuple[str, ...] = ()
    """Names of items it had better share no bank with: they are in use at the same time."""
    early: int | None = None
    """Position from which it would like to be alive, to be loaded ahead; None: `first`."""


@dataclass(frozen=True)
class TileDoesNotFit:
    """Why buffers cannot be placed; the tiler answers with the next candidate."""

    needed_bytes: int
    """Smallest SRAM that would do, as far as is known."""
    reason: str
    position: int = -1
    """The instant at which the most bytes are alive; of `place_network` only."""


def place_network(
    hardware: Hardware, items: Sequence[Item]
) -> dict[str, list[int]] | TileDoesNotFit:
    """Give every slot of every item an address, a multiple of the SRAM word.

    No two that are alive at one position overlap, and items that are `apart` share no bank. What
    is only wished for (`beside`, slots of one item in different banks, `early`) never decides
    whether the items fit. The answer depends on the arguments alone.

    Raises:
        ValueError: two items have one name, or `apart` or `beside` names an item that is not there.
    """
    from tilewright.schedule.placement_search import search

    return search(hardware, items)
