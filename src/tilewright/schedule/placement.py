"""Addresses of a function's SRAM buffers, with the chip's bank rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.schedule.footprint import align
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


SPREADS = (
    ("slot", "slot"),
    ("slot", "none"),
    ("turn", "slot"),
    ("turn", "none"),
    ("none", "slot"),
    ("none", "none"),
)
"""What starts a bank of its own, most first: for activations and weights, every slot of a tile, all
tiles of one turn (slot 0 of all, slot 1 of all), or nothing."""

STREAMED = ("input", "output")
"""Roles of tiles that two engines work on at the same time; the others are small or read once."""


def place_nest(
    hardware: Hardware, buffers: list[TileBuffer]
) -> dict[str, list[int]] | TileDoesNotFit:
    """Give every slot of every tile an address; tiles of one nest are alive together.

    Weights grow from the top of SRAM downwards, everything else from the bottom upwards, so that
    weights never share a bank with another tile (an instruction's operands must be in different
    banks). A bank has one port: as far as SRAM allows, the slot being filled, the slot being
    computed on and the results lie in different banks.
    """
    answer = place_packed(hardware, buffers)
    if isinstance(answer, TileDoesNotFit):
        return answer
    for activations, weights in SPREADS:
        found = _lay(hardware, buffers, activations, weights)
        if not isinstance(found, TileDoesNotFit):
            return found
    return answer


def place_packed(
    hardware: Hardware, buffers: list[TileBuffer]
) -> dict[str, list[int]] | TileDoesNotFit:
    """As `place_nest`, without spreading over banks: fits if anything does."""
    return _lay(hardware, buffers, "none", "none")


def _lay(
    hardware: Hardware, buffers: list[TileBuffer], activations: str, weights: str
) -> dict[str, list[int]] | TileDoesNotFit:
    word, bank = hardware.sram_word_bytes, hardware.bank_size
    low, high = 0, hardware.sram_size
    addresses: dict[str, list[int]] = {buffer.name: [] for buffer in buffers}
    streamed = [buffer for buffer in buffers if buffer.role in STREAMED]
    small = [buffer for buffer in buffers if buffer.role not in (*STREAMED, "weights")]
    for slot in range(max((buffer.slots for buffer in buffers), default=0)):
        if activations == "turn":
            low = align(low, bank)
        for buffer in streamed:
            if slot < buffer.slots:
                low = align(low, bank) if activations == "slot" else low
                addresses[buffer.name].append(low)
                low += align(buffer.size_bytes, word)
        for buffer in buffers:
            if buffer.role == "weights" and slot < buffer.slots:
                high -= align(buffer.size_bytes, word)
                high = high // bank * bank if weights == "slot" else high
                addresses[buffer.name].append(high)
    for buffer in small:
        for _ in range(buffer.slots):
            addresses[buffer.name].append(low)
            low += align(buffer.size_bytes, word)
    weight_bytes = hardware.sram_size - high
    needed = align(low, bank) + align(weight_bytes, bank)
    if needed > hardware.sram_size:
        return TileDoesNotFit(
            needed,
            f"tiles need {low} bytes beside {weight_bytes} bytes of weights, in separate banks "
            f"of {bank} bytes",
        )
    return addresses
