"""Offsets of DDR tensors: those not alive together share bytes."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.schedule.footprint import align


@dataclass(frozen=True)
class Lifetime:
    """A tensor to place: alive in the steps `first..last`, both included."""

    name: str
    size_bytes: int
    first: int
    last: int


def place_ddr(tensors: list[Lifetime], alignment: int) -> tuple[dict[str, int], int]:
    """Return an offset a tensor (multiples of `alignment`) and the bytes needed in all.

    Largest first, each into the lowest gap among those placed that are alive with it;
    deterministic.
    """
    placed: list[tuple[int, int, Lifetime]] = []
    offsets: dict[str, int] = {}
    total = 0
    for tensor in sorted(tensors, key=lambda item: (-item.size_bytes, item.first, item.name)):
        size = align(max(tensor.size_bytes, 1), alignment)
        at = 0
        for low, high, other in sorted(placed, key=lambda item: item[0]):
            if other.first > tensor.last or other.last < tensor.first:
                continue
            if at + size <= low:
                break
            at = max(at, high)
        placed.append((at, at + size, tensor))
        offsets[tensor.name] = at
        total = max(total, at + size)
    return offsets, total
