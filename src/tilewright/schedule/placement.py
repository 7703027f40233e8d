"""Addresses of the SRAM tiles of one loop nest, with the chip's bank rules."""

from __future__ import annotations

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
class TileDoesNotFit:
    """Why a nest's tiles cannot be placed; the tiler answers with the next candidate."""

    needed_bytes: int
    """Smallest SRAM that would do for these tiles."""
    reason: str


def place_nest(
    hardware: Hardware, buffers: list[TileBuffer]
) -> dict[str, list[int]] | TileDoesNotFit:
    """Give every slot of every tile an address; tiles of one nest are alive together.

    Weights grow from the top of SRAM downwards, everything else from the bottom upwards, so that
    weights never share a bank with another tile (an instruction's operands must be in different
    banks). Among the rest, slots of one tile are laid in turn (slot 0 of all tiles, then slot 1),
    which keeps the tiles being filled apart from those being computed on.
    """
    word, bank = hardware.sram_word_bytes, hardware.bank_size
    low, high = 0, hardware.sram_size
    addresses: dict[str, list[int]] = {buffer.name: [] for buffer in buffers}
    for slot in range(max((buffer.slots for buffer in buffers), default=0)):
        for buffer in buffers:
            if slot >= buffer.slots:
                continue
            size = align(buffer.size_bytes, word)
            if buffer.role == "weights":
                high -= size
                addresses[buffer.name].append(high)
            else:
                addresses[buffer.name].append(low)
                low += size
    weight_bytes = hardware.sram_size - high
    needed = align(low, bank) + align(weight_bytes, bank)
    if needed > hardware.sram_size:
        return TileDoesNotFit(
            needed,
            f"tiles need {low} bytes beside {weight_bytes} bytes of weights, in separate banks of {bank} bytes",
        )
    return addresses
