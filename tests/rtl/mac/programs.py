"""Random `mac_conv`s that are legal on a target, and the memories and plans they run with."""

from __future__ import annotations

import numpy as np

from tests.rtl.mac.bench import Plan
from tilewright.spec.hardware import Hardware
from tilewright.spec.limits import violations
from tilewright.spec.program import DEFAULTS

SHAPE = ("m_half", "out_h", "out_w", "block_rows", "oc_blocks", "cols", "cols_last")
"""Fields an accumulating instruction shares with the one that filled its halves."""


class Programs:
    """A seeded source of instructions."""

    def __init__(self, hardware: Hardware, seed: int) -> None:
        self.hardware = hardware
        self.rng = np.random.default_rng(seed)

    def pick(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def stride(self) -> int:
        """Return a stride: often small and odd, sometimes a word or two, or zero."""
        word = self.hardware.sram_word_bytes
        choices = (0, self.pick(1, 12), word, 2 * word, self.pick(1, 4 * word))
        return min(int(self.rng.choice(choices)), 1023)  # the shortest field of a stride

    def count(self, high: int) -> int:
        return high if self.chance(0.4) else self.pick(1, high)

    def instruction(self, like: dict[str, int] | None = None) -> dict[str, int]:
        """Return a legal instruction; `like` (None: none) gives the shape to accumulate on."""
        while True:
            fields = self._draw() if like is None else self._draw() | {n: like[n] for n in SHAPE}
            fields["accumulate"] = int(like is not None)
            if not any(True for _ in violations(self.hardware, "mac_conv", fields)):
                return fields

    def _draw(self) -> dict[str, int]:
        hardware = self.hardware
        size, banks = hardware.array_size, hardware.sram_banks
        small = self.chance(0.5)
        out_h, out_w = (
            (self.pick(1, 3), self.pick(1, 3)) if small else (self.count(7), self.count(7))
        )
        bank = self.pick(0, banks - 1)
        other = (bank + self.pick(1, banks - 1)) % banks
        fields = DEFAULTS["mac_conv"] | {
            "signal": int(self.rng.integers(1 << 32)),
            "dtype": int("int4" in hardware.dtypes and self.chance(0.5)),
            "diag": int(self.chance(0.3)),
            "push": int(self.chance(0.7)),
            "m_half": self.pick(0, 1),
            "act": bank * hardware.bank_size + self.pick(0, hardware.bank_size // 2),
            "wgt": other * hardware.bank_size + self.pick(0, hardware.bank_size // 2),
            "out_h": out_h,
            "out_w": out_w,
            "block_rows": self.pick(1, out_h + 1),
            "oy_stride": self.stride() * self.pick(1, 3),
            "ox_stride": self.stride(),
            "k_h": self.pick(1, 3),
            "k_w": self.pick(1, 3),
            "ky_stride": self.stride() * self.pick(1, 3),
            "kx_stride": self.stride(),
            "c_blocks": self.pick(1, 3),
            "cb_stride": self.stride(),
            "c_rows": self.count(size),
            "c_last": self.count(size),
            "oc_blocks": self.pick(1, 3),
            "ob_stride": self.stride(),
            "cols": self.count(size),
            "cols_last": self.count(size),
            "wgt_pitch": self.stride(),
            "wgt_ob_stride": self.stride() * self.pick(1, 9),
        }
        if self.chance(0.2):
            # A field nothing uses may hold anything the encoding can.
            if fields["c_blocks"] == 1:
                fields["c_rows"] = self.pick(1, 256)
            if fields["oc_blocks"] == 1:
                fields["cols"] = self.pick(1, 256)
        return fields

    def sequence(self, count: int) -> list[dict[str, int]]:
        """Return instructions of which some accumulate on what those before them left."""
        result: list[dict[str, int]] = []
        while len(result) < count:
            fields = self.instruction()
            result.append(fields)
            while not fields["push"] and self.chance(0.7):
                fields = self.instruction(fields)
                result.append(fields)
        return result

    def memory(self) -> bytes:
        """Return the SRAM's content; a part of it the extreme codes only."""
        data = self.rng.integers(0, 256, self.hardware.sram_size, np.uint8)
        extremes = self.rng.choice(np.array([0x80, 0x7F, 0xFF, 0x81], np.uint8), data.size)
        return np.where(self.rng.random(data.size) < 0.3, extremes, data).tobytes()

    def plan(self, busy: float) -> Plan:
        """Return surroundings that deny about that share of the requests."""
        return Plan(
            self._bits(busy, 4001),
            self._bits(busy, 3989),
            self._bits(busy / 2, 4003),
            self._drains(),
        )

    def _bits(self, zeros: float, length: int) -> str:
        return "".join("0" if low else "1" for low in self.rng.random(length) < zeros)

    def _drains(self) -> tuple[int, ...]:
        return tuple(self.pick(0, 2) if self.chance(0.4) else self.pick(3, 90) for _ in range(29))
