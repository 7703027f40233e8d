"""DDR of stress tests: sparse, seeded, with a catalogue of parameter blocks and resize tables.

Its content follows from target, seed and windows alone, so that a program's text and a seed are a
whole test. What a program may touch lies in *windows*; the first begins at address 0 with the
catalogue (never written by programs): blocks as `vec_param` reads them, tables as `vec_resize`
reads them, then one of exponentials for `vec_softmax`. Everything outside the windows is a hole of
zeros that costs nothing.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tilewright.spec.hardware import Hardware

Bytes = npt.NDArray[np.uint8]
PAGE = 4096
POWER_BYTES = 512
DATA_BYTES = 1 << 16
CHUNK = 1 << 20
"""Bytes of data made at once; bounds the memory it takes."""
PARAM_BLOCKS = 24
RESIZE_LIMITS = (1, 2, 3, 5, 8, 13)
"""Sizes of sources the resize tables are made for."""
RESIZE_ENTRIES = 16
WILD = 1 << 8
"""Added to a limit: the table whose weights leave 0..2048 (pairs still sum to 2048)."""


@dataclass(frozen=True)
class Window:
    """A range of DDR that programs use."""

    address: int
    size: int

    @property
    def end(self) -> int:
        """First address after it."""
        return self.address + self.size

    def holds(self, low: int, high: int) -> bool:
        """Tell whether `low .. high` lies inside."""
        return self.address <= low and high <= self.end


@dataclass(frozen=True)
class Catalogue:
    """Where the catalogue's parts lie, and the multipliers that decide about overflows."""

    block_bytes: int
    tables: dict[int, int]
    """Address of a table by its limit (plus `WILD`)."""
    powers: int
    """Address of the table of exponentials of a softmax."""
    size: int
    """Bytes, a multiple of a page."""


@lru_cache(maxsize=32)
def catalogue(hardware: Hardware) -> Catalogue:
    """Return the layout of a target's catalogue."""
    block = 9 * hardware.vector_lanes
    position = -(-PARAM_BLOCKS * block // 64) * 64
    tables: dict[int, int] = {}
    for limit in RESIZE_LIMITS:
        for kind in (0, WILD):
            tables[limit + kind] = position
            position += 8 * RESIZE_ENTRIES
    return Catalogue(block, tables, position, -(-(position + POWER_BYTES) // PAGE) * PAGE)


def low_window(hardware: Hardware) -> Window:
    """Return the window at address 0: the catalogue and 64 KiB."""
    return Window(0, min(catalogue(hardware).size + DATA_BYTES, hardware.ddr_size))


def small_multiplier(block: int) -> bool:
    """Tell whether a catalogue block's multipliers are below 2^20 (for wild resize weights)."""
    return block % 4 == 3


def _parameters(hardware: Hardware, rng: np.random.Generator) -> Bytes:
    lanes = hardware.vector_lanes
    blocks: list[Bytes] = []
    for block in range(PARAM_BLOCKS):
        bias = rng.integers(-2000, 2000, lanes)
        extremes = rng.choice([-(2**31), 2**31 - 1, 0, 1, -1, 2**31 - 130000], lanes)
        bias = np.where(rng.random(lanes) < 0.15, extremes, bias).astype("<i4")
        shift = rng.integers(0, 63, lanes)
        # Mostly scales that leave codes in range: 2^-12 .. 1; ties where the multiplier is 2^k.
        exponent = shift - rng.integers(0, 13, lanes)
        power = np.left_shift(np.int64(1), np.clip(exponent, 0, 30))
        jitter = np.where(rng.random(lanes) < 0.4, 0, rng.integers(0, 1 << 30, lanes) % power)
        multiplier = np.minimum(power + jitter, 2**31 - 1)
        special = rng.choice([0, 1, 2, 3, 2**30, 2**31 - 1], lanes)
        multiplier = np.where(rng.random(lanes) < 0.12, special, multiplier)
        far = rng.random(lanes) < 0.1
        shift = np.where(far, rng.choice([0, 1, 31, 32, 33, 61, 62], lanes), shift)
        if small_multiplier(block):
            multiplier = np.minimum(multiplier, (1 << 20) - 1)
        blocks += [
            bias.view(np.uint8),
            multiplier.astype("<u4").view(np.uint8),
            shift.astype(np.uint8),
        ]
    return np.concatenate(blocks)


def _table(rng: np.random.Generator, limit: int, wild: bool) -> Bytes:
    entries = np.zeros((RESIZE_ENTRIES, 4), "<i2")
    entries[:, :2] = rng.integers(0, limit, (RESIZE_ENTRIES, 2))
    entries[0, :2] = limit - 1
    first = rng.integers(0, 2049, RESIZE_ENTRIES)
    first[rng.random(RESIZE_ENTRIES) < 0.3] = 2048
    if wild:
        first = rng.choice([-30719, 32767, -1, 2049, 4096, -2048], RESIZE_ENTRIES)
    entries[:, 2] = first
    entries[:, 3] = 2048 - first
    return entries.reshape(-1).view(np.uint8)


def _powers(seed: int) -> Bytes:
    """Return a table of exponentials: steep, flat, or of any values but for its first, not 0."""
    rng = np.random.default_rng([seed, 3])
    scale = rng.choice([0.004, 0.02, 0.1, 0.7, 12.0])
    table = np.round(65535 * np.exp(-scale * np.arange(256)))
    if rng.random() < 0.3:
        table = rng.choice([0, 1, 2, 32767, 32768, 65535], 256)
        table[0] = rng.choice([1, 40000, 65535])
    return table.astype("<u2").view(np.uint8)


@lru_cache(maxsize=8)
def _catalogue_bytes(hardware: Hardware, seed: int) -> Bytes:
    rng = np.random.default_rng([seed, 1])
    layout = catalogue(hardware)
    content = np.zeros(layout.size, np.uint8)
    blocks = _parameters(hardware, rng)
    content[: blocks.size] = blocks
    for key, address in layout.tables.items():
        table = _table(rng, key % WILD, key >= WILD)
        content[address : address + table.size] = table
    content[layout.powers : layout.powers + POWER_BYTES] = _powers(seed)
    return content


def _fill(content: Bytes, seed: int, window: Window) -> None:
    """Write a window's data."""
    for address in range(window.address, window.end, CHUNK):
        part = Window(address, min(CHUNK, window.end - address))
        content[address : part.end] = _data(seed, part)


def _data(seed: int, window: Window) -> Bytes:
    """Return a window's bytes: 32-byte stretches of all codes, small ones, or extremes."""
    words = (window.address & 0xFFFFFFFF, window.address >> 32)
    rng = np.random.default_rng([seed, 2, *words])
    count = -(-window.size // 32)
    kind = rng.integers(0, 4, (count, 1))
    every = rng.integers(0, 256, (count, 32))
    small = rng.integers(-3, 4, (count, 32)) & 0xFF
    extreme = rng.choice([0x80, 0x7F, 0x81, 0, 0xFF], (count, 32))
    content = np.where(kind == 0, small, np.where(kind == 1, extreme, every))
    return content.reshape(-1)[: window.size].astype(np.uint8)


@dataclass(frozen=True)
class Ddr:
    """A sparse DDR; `content` may be given to any simulator."""

    content: Bytes
    windows: tuple[Window, ...]
    descriptor: int

    def strays(self) -> list[int]:
        """Return addresses outside the windows that are not zero any more, one a page."""
        found: list[int] = []
        for low, high in _extents(self.descriptor, self.content.size):
            for start in range(low, high, PAGE):
                end = min(start + PAGE, self.content.size)
                if any(window.holds(start, end) for window in self.windows):
                    continue
                page = self.content[start:end].copy()
                for window in self.windows:
                    a, b = max(window.address, start), min(window.end, end)
                    if a < b:
                        page[a - start : b - start] = 0
                wrong = np.flatnonzero(page)
                if wrong.size:
                    found.append(start + int(wrong[0]))
        return found

    def close(self) -> None:
        """Give the memory back (once no array refers to it)."""
        os.close(self.descriptor)


def _extents(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    position = 0
    while position < size:
        try:
            low = os.lseek(descriptor, position, os.SEEK_DATA)
        except OSError:  # No data from here on.
            return
        position = os.lseek(descriptor, low, os.SEEK_HOLE)
        yield low, position


def make_ddr(hardware: Hardware, seed: int, windows: Sequence[Window]) -> Ddr:
    """Return DDR with its seeded content."""
    size = max(window.end for window in windows)
    descriptor = os.memfd_create("ddr")
    os.ftruncate(descriptor, size)
    memory = mmap.mmap(descriptor, size)
    content = np.frombuffer(memory, np.uint8)
    for window in windows:
        _fill(content, seed, window)
    blocks = _catalogue_bytes(hardware, seed)
    content[: blocks.size] = blocks
    return Ddr(content, tuple(windows), descriptor)


def far_windows(hardware: Hardware) -> tuple[Window, ...]:
    """Return windows around powers of two up to the last DDR address."""
    half = 2 * PAGE
    bits = hardware.ddr_address_bits
    middle = [Window((1 << bit) - half, 2 * half) for bit in range(24, bits) if bit > bits - 6]
    return (*middle, Window((1 << bits) - 2 * half, 2 * half))
