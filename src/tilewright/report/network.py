"""Roofline and floor of a network, from the records of its layers (docs/concepts/bound.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewright.spec.hardware import Hardware


@dataclass(frozen=True)
class NetworkBound:
    """Core cycles that the network takes at the least, and what they are made of."""

    array: float
    """Sum over the layers."""
    vector: float
    """Sum over the layers."""
    ddr: float
    """Sum over the layers."""
    order: float
    """What the order of layers adds to them: work that cannot be done while weights are loaded."""
    cycles: float
    """The largest of the sums, with the latencies nothing hides, and of `order`."""
    limit: str
    """Which one: `array`, `vector`, `ddr` or `order`."""


def roofline(records: Sequence[Mapping[str, Any]], hardware: Hardware) -> NetworkBound:
    """Return the network's cycles by the best mapping of every layer.

    Args:
        records: one a layer, as `schedule.bound.layer_bounds` makes them; keys left out are zero.
        hardware: the target.
    """
    return _bound([_Row.of(record, *_ROOFLINE) for record in records], hardware)


def floor(records: Sequence[Mapping[str, Any]], hardware: Hardware) -> NetworkBound:
    """Return the cycles that no program of the network can beat; arguments as of `roofline`."""
    return _bound([_Row.of(record, *_FLOOR) for record in records], hardware)


def padded(records: Sequence[Mapping[str, Any]], bound: NetworkBound) -> float:
    """Return the cycles of a program that packs no pixels.

    The largest of the padded products' cycles, the vector unit's and DDR's.

    Args:
        records: as of `roofline`.
        bound: their roofline.
    """
    return max(float(sum(int(r.get("padded_cycles", 0)) for r in records)), bound.vector, bound.ddr)


def _bound(rows: Sequence[_Row], hardware: Hardware) -> NetworkBound:
    rate = hardware.ddr_bytes_per_cycle
    array, vector = float(sum(row.array for row in rows)), float(sum(row.vector for row in rows))
    ddr = sum(row.moved for row in rows) / rate
    if not max(array, vector, ddr):
        return NetworkBound(0.0, 0.0, 0.0, 0.0, 0.0, "array")
    latency = ceil(hardware.dma_latency * hardware.core_clock_mhz / hardware.dma_clock_mhz)
    # The code's first block, then the first load; at the end a last store.
    begin = 2 * latency
    last = hardware.vector_latency + latency
    found = {
        "array": begin + array + hardware.mac_latency + last if array else 0.0,
        "vector": begin + vector + last if vector else 0.0,
        "ddr": begin + ddr,
        "order": begin + max(_weights_last(rows, hardware), _work_last(rows, hardware)),
    }
    limit = max(found, key=lambda name: found[name])
    return NetworkBound(array, vector, ddr, found["order"], found[limit], limit)


def binding(array: float, vector: float, ddr: float) -> str:
    """Return which part of a layer's bound is the largest; of equal ones the first."""
    return max((array, "array"), (vector, "vector"), (ddr, "ddr"), key=lambda pair: pair[0])[1]


@dataclass(frozen=True)
class _Row:
    moved: int
    kernel: int
    weights_after: int
    array: int
    vector: int
    array_after: int
    vector_after: int

    @classmethod
    def of(cls, record: Mapping[str, Any], *work: str) -> _Row:
        return cls(*(int(record.get(key, 0)) for key in (*_BYTES, *work)))


_BYTES = ("min_ddr_bytes", "kernel_bytes", "weights_after")
_ROOFLINE = ("array_cycles", "vector_cycles", "array_after", "vector_after")
_FLOOR = ("array_floor", "vector_floor", "array_floor_after", "vector_floor_after")


def _weights_last(rows: Sequence[_Row], hardware: Hardware) -> float:
    """Return the most cycles of work on first layers, then weights that cannot be there already."""
    most = 0.0
    for unit in ("array", "vector"):
        done, least = 0, None
        for row in rows:
            work = row.array if unit == "array" else row.vector
            if not work:
                continue
            done += work
            least = row.weights_after if least is None else min(least, row.weights_after)
            missing = max(0, least - _room(hardware)) / hardware.ddr_bytes_per_cycle
            most = max(most, done + missing)
    return most


def _work_last(rows: Sequence[_Row], hardware: Hardware) -> float:
    """Return the most cycles of loading first layers' weights, then work that needs them."""
    most, loaded = 0.0, 0
    array = vector = None
    for row in rows:
        if not row.kernel:
            continue
        loaded += row.kernel
        array = row.array_after if array is None else min(array, row.array_after)
        vector = row.vector_after if vector is None else min(vector, row.vector_after)
        most = max(most, loaded / hardware.ddr_bytes_per_cycle + max(array, vector))
    return most


def _room(hardware: Hardware) -> int:
    """Return the bytes of weights a chip can hold: SRAM, both sets of the array, DMA's buffers."""
    # fp16 weights take two bytes a cell.
    cells = 2 * 2 * hardware.array_size**2
    # A channel holds up to four units of DDR and one that is moved, and two words of SRAM.
    buffers = 5 * hardware.ddr_bus_bytes + 2 * hardware.sram_word_bytes
    return hardware.sram_size + cells + hardware.dma_channels * buffers
