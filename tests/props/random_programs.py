"""Random programs on a few hundred bytes of SRAM, synchronised by their exact dependencies."""

from __future__ import annotations

import random

from tests.unit.sim_programs import DMA0, VEC, bit, semaphore
from tilewright.spec.access import accesses
from tilewright.spec.hardware import Hardware
from tilewright.spec.program import Instr, engine_of, full_fields

AREA = 160
"""Bytes of each bank the programs work on: small, so that they often meet."""
DDR_AREA = 512


class Generator:
    """Makes instructions by a seed; all keep the limits of the target."""

    def __init__(self, hardware: Hardware, seed: int) -> None:
        self.hardware = hardware
        self.rng = random.Random(seed)

    def place(self, size: int, bank: int | None = None) -> int:
        number = self.rng.randrange(3) if bank is None else bank
        return number * self.hardware.bank_size + self.rng.randrange(AREA - size)

    def dma(self) -> list[Instr]:
        rng = self.rng
        n0, n1 = rng.randint(1, 12), rng.randint(1, 4)
        step = rng.randint(n0, 20)
        fields = {"channel": rng.randrange(2), "n0": n0, "n1": n1, "sram_s1": step,
                  "sram": self.place(4 * 20)}  # fmt: skip
        name = rng.choice(("dma_load", "dma_store", "dma_fill"))
        if name == "dma_fill":
            return [Instr(name, {**fields, "fill": rng.randrange(256)})]
        fields |= {"ddr": rng.randrange(DDR_AREA), "ddr_s1": rng.randint(n0, 40), "stream": 1}
        return [Instr(name, fields)]

    def vector(self) -> list[Instr]:
        rng = self.rng
        n0, n1 = rng.randint(1, 10), rng.randint(1, 3)
        a, b, dst = self.place(40, 0), self.place(40, 1), self.place(40, 2)
        if rng.random() < 0.5:
            a, dst = dst, a
        if rng.random() < 0.5:
            fields = {"src": a, "dst": dst, "n0": n0, "n1": n1, "src_s0": 1, "dst_s0": 1,
                      "src_s1": 12, "dst_s1": rng.randint(n0, 12)}  # fmt: skip
            return [Instr("vec_copy", fields)]
        fields = {"a": a, "b": b, "dst": dst, "n0": n0, "n1": n1, "a_s1": 12, "b_s1": 0,
                  "dst_s1": rng.randint(n0, 12), "op": rng.randrange(5)}  # fmt: skip
        return [Instr("vec_eltwise", fields)]

    def conv(self) -> list[Instr]:
        rng = self.rng
        act, out = rng.sample((0, 2), 2)
        shape = {"out_h": rng.randint(1, 4), "out_w": rng.randint(1, 2),
                 "block_rows": rng.randint(1, 2), "m_half": rng.randrange(2)}  # fmt: skip
        cols = rng.randint(1, 4)
        rows = rng.randint(1, 4)
        conv = {**shape, "act": self.place(60, act), "wgt": self.place(16, 1), "c_rows": rows,
                "c_last": rows, "cols": cols, "cols_last": cols, "wgt_pitch": 4,
                "oy_stride": rng.randint(1, 12), "ox_stride": 4}  # fmt: skip
        drain = {**shape, "dst": self.place(60, out), "cols": cols, "cols_last": cols,
                 "oy_stride": 10, "ox_stride": 4}  # fmt: skip
        middle = self.dma() if rng.random() < 0.3 else []
        return [Instr("mac_conv", conv), *middle, Instr("vec_drain", drain)]

    def program(self, length: int) -> list[Instr]:
        """Return unsynchronised instructions, without the set-up and `halt`."""
        program: list[Instr] = []
        while len(program) < length:
            program += self.rng.choice((self.dma, self.dma, self.vector, self.conv))()
        for number, instr in enumerate(program):
            instr.layer = f"l{number}"
        return program


def synchronise(program: list[Instr], hardware: Hardware) -> list[Instr]:
    """Add a wait for the latest earlier instruction of every other engine that meets a byte."""
    regions = [accesses(hardware, instr.name, full_fields(instr)) for instr in program]
    engines = [engine_of(instr.name, full_fields(instr)) for instr in program]
    known: dict[tuple[int, int], int] = {}
    for later, instr in enumerate(program):
        for engine in range(6):
            if engine == engines[later]:
                continue
            latest = max(
                (
                    earlier
                    for earlier in range(later)
                    if engines[earlier] == engine
                    and any(
                        (one.write or two.write) and one.overlaps(two)
                        for one in regions[earlier]
                        for two in regions[later]
                    )
                ),
                default=-1,
            )
            pair = (engine, engines[later])
            # A mac_conv and its drain run at once: the generator keeps their bytes apart.
            if latest > known.get(pair, -1):
                known[pair] = latest
                mask = 1 << semaphore(*pair)
                producer = program[latest]
                producer.fields["signal"] = producer.fields.get("signal", 0) | mask
                instr.fields["wait"] = instr.fields.get("wait", 0) | mask
    return program


def setup(hardware: Hardware) -> list[Instr]:
    """Return instructions that load one parameter entry from DDR address 2048."""
    place = 3 * hardware.bank_size
    size = 9 * hardware.vector_lanes
    return [
        Instr("dma_load", {"ddr": 2048, "sram": place, "n0": size, "stream": 1,
                           "signal": bit(DMA0, VEC)}, "setup"),
        Instr("vec_param", {"src": place, "wait": bit(DMA0, VEC)}, "setup"),
    ]  # fmt: skip


def drop_one(program: list[Instr], rng: random.Random) -> str:
    """Remove one wait and the signal it is matched to; say which."""
    choices = [
        (index, number)
        for index, instr in enumerate(program)
        for number in range(32)
        if instr.fields.get("wait", 0) >> number & 1
    ]
    if not choices:
        return ""
    index, number = rng.choice(choices)
    mask = 1 << number
    order = sum(1 for place, other in choices if other == number and place < index)
    signals = [i for i, instr in enumerate(program) if instr.fields.get("signal", 0) & mask]
    program[index].fields["wait"] ^= mask
    program[signals[order]].fields["signal"] ^= mask
    return f"semaphore {number} of instruction {index}"
