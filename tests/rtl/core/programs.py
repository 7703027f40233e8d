"""Programs for the stub engines: makers of single instructions, and random programs."""

from __future__ import annotations

import numpy as np

from tilewright.spec.hardware import Hardware
from tilewright.spec.program import MAC, VEC, Instr, engine_of, full_fields

REGISTERS = {1: 0x12_3456_7800, 2: 0xFF_FFFF_F000, 3: 0x800}


def dma(
    channel: int, units: int, words: int, cycles: int = 0, *, store: bool = False, **more: int
) -> Instr:
    """A channel's instruction: DDR units, SRAM words, cycles."""
    fields = {"channel": channel, "n1": units + 1, "n2": words + 1, "n3": cycles + 1}
    return Instr("dma_store" if store else "dma_load", fields | more)


def mac(pixels: int, weights: int, cycles: int = 0, **more: int) -> Instr:
    """A MAC instruction: words of activations, of weights, cycles."""
    fields = {"out_h": pixels + 1, "out_w": weights + 1, "block_rows": cycles + 1}
    return Instr("mac_conv", fields | more)


def vec(a: int, b: int, written: int, cycles: int = 0, **more: int) -> Instr:
    """A vector instruction: words read on A, on B, written, cycles."""
    fields = {"n1": a + 1, "n2": b + 1, "n3": written + 1, "n0": cycles + 1}
    return Instr("vec_copy", fields | more)


def semaphore(producer: int, consumer: int) -> int:
    """Return the bit of the semaphore of an ordered pair of engines."""
    return 1 << (producer * 5 + consumer - (consumer > producer))


class Random:
    """Makes random programs: loops, registers, semaphores, all engines."""

    def __init__(self, hardware: Hardware, seed: int) -> None:
        self.hardware = hardware
        self.rng = np.random.default_rng(seed)
        self.busy = int(self.rng.integers(0, 3))

    def program(self, length: int) -> list[Instr]:
        """Return a program of about `length` instructions, `halt` included."""
        code = self._body(length, 0)
        return [*code, Instr("halt")]

    def _below(self, high: int) -> int:
        return int(self.rng.integers(0, high))

    def _body(self, length: int, depth: int) -> list[Instr]:
        code: list[Instr] = []
        straight: list[Instr] = []
        while len(code) + len(straight) < length:
            kind = self._below(40)
            if kind == 0 and depth < 4:
                self._synchronise(straight)
                code += straight
                straight = []
                inner = self._body(1 + self._below(24 if self._below(3) else 60), depth + 1)
                count = 1 + self._below(4)
                code += [Instr("loop", {"count": count}), *inner, Instr("end_loop")]
            elif kind == 1:
                straight.append(Instr("fence"))
            elif kind in (2, 3):
                rd = 1 + self._below(self.hardware.scalar_registers - 1)
                step = self._below(1 << 18) - (1 << 17)
                straight.append(
                    Instr("add_reg", {"rd": rd, "value": step})
                    if kind == 2
                    else Instr("set_reg", {"rd": rd, "value": self._below(1 << 40)})
                )
            else:
                straight.append(self._engine())
        self._synchronise(straight)
        return code + straight

    def _word(self) -> int:
        """An SRAM address; half of all fall into one small bank region."""
        high = self.hardware.sram_size - 64 * self.hardware.sram_word_bytes
        return self._below(high if self._below(2) else max(1, self.hardware.bank_size // 4))

    def _engine(self) -> Instr:
        long = self._below(12) if self.busy else self._below(4)
        wait = self._below(30) if self.busy == 2 and not self._below(6) else self._below(3)
        engine = self._below(self.hardware.dma_channels + 2)
        if engine < self.hardware.dma_channels:
            return dma(
                engine,
                self._below(20) if self._below(2) else 0,
                long,
                wait,
                store=bool(self._below(2)),
                stream=self._below(2),
                ddr=self._below(1 << 20) // 64 * 64,
                ddr_r=self._below(min(4, self.hardware.scalar_registers)),
                sram=self._word(),
            )
        if engine == self.hardware.dma_channels:
            return mac(long, self._below(12), wait, act=self._word(), wgt=self._word())
        return vec(long, self._below(4), self._below(12), wait, src=self._word(), dst=self._word())

    def _synchronise(self, code: list[Instr]) -> None:
        """Let random instructions wait for earlier ones, each engine pair in order."""
        newest: dict[tuple[int, int], tuple[int, int]] = {}
        for place, instr in enumerate(code):
            consumer = engine_of(instr.name, full_fields(instr))
            if self._below(3) or not place:
                continue
            earlier = self._below(place)
            producer = engine_of(code[earlier].name, full_fields(code[earlier]))
            if producer in (consumer, 6):
                continue
            if consumer == 6:
                # The sequencer waits for any engine on its own semaphore.
                bit = 1 << (30 + (producer == VEC))
                pair = (30 + (producer == VEC), 6)
            else:
                bit = semaphore(producer, consumer)
                pair = (producer, consumer)
            if pair in newest and newest[pair][0] >= earlier:
                continue
            if code[earlier].fields.get("signal", 0) & bit:
                continue
            newest[pair] = (earlier, place)
            for at, name in ((earlier, "signal"), (place, "wait")):
                code[at].fields[name] = code[at].fields.get(name, 0) | bit


__all__ = ["MAC", "REGISTERS", "VEC", "Random", "dma", "mac", "semaphore", "vec"]
