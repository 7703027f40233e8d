"""Seeded random DMA instructions that stress every rule of the channel, and their meaning."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from tests.rtl.dma.bench import DDR_BASE
from tests.rtl.dma.model import Fields, Job, runs
from tilewright.sim import vector
from tilewright.sim.state import State
from tilewright.spec.hardware import Hardware
from tilewright.spec.isa import BY_NAME

MAX_BYTES = 700
"""Bytes of an instruction, about: a scenario shall have many of them."""
NAMES = ("dma_load", "dma_store", "dma_fill")


class _Draw:
    """Draws one instruction for a chip with the given memories."""

    def __init__(
        self, hardware: Hardware, rng: np.random.Generator, ddr_size: int, sram_size: int
    ) -> None:
        self.hardware = hardware
        self.rng = rng
        self.ddr_size = ddr_size
        self.sram_size = sram_size

    def pick(self, *options: int) -> int:
        return int(self.rng.choice(options))

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def between(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high, endpoint=True))

    def run_bytes(self) -> int:
        word, granule = self.hardware.sram_word_bytes, self.hardware.ddr_bus_bytes
        near = self.pick(word, granule, 2 * word, 4 * granule) + self.between(-1, 1)
        long = self.between(1, 3 * self.hardware.dma_burst_size)
        return max(1, self.pick(1, 1, 2, 3, near, near, self.between(1, 40), long))

    def strides(self, counts: list[int], run: int, apart: bool, step: int) -> list[int]:
        """Return strides of dimensions 1, 2, 3: multiples of `step`."""

        def up(value: int) -> int:
            return -(-value // step) * step

        if not apart:
            options = (0, up(run), up(max(1, run // 2)), up(1), up(self.between(0, 300)))
            return [self.pick(*options) for _ in counts]
        # Far enough apart in one order of the dimensions: not always the order of execution.
        result = [0] * len(counts)
        order = list(range(len(counts)))
        if self.chance(0.4):
            self.rng.shuffle(order)
        span = run
        for dimension in order:
            stride = up(span + self.pick(0, 0, 1, self.between(0, 70)))
            result[dimension] = stride
            span = stride * counts[dimension]
        return result

    def instruction(self) -> Job | None:
        """Return an instruction, or None when it does not fit."""
        name = NAMES[self.pick(0, 0, 0, 1, 1, 1, 2)]
        f: Fields = {field.name: field.default for field in BY_NAME[name].fields}
        f["signal"] = self.between(0, (1 << 32) - 1)
        burst = name != "dma_fill" and self.chance(0.4)
        step = self.hardware.dma_burst_size if burst else 1
        f["n0"] = step * self.pick(1, 1, 2, 3) if burst else self.run_bytes()
        rows = max(1, MAX_BYTES // f["n0"])
        counts = [self.pick(1, 2, 3, self.between(1, rows)) for _ in range(3)]
        while prod(counts) > min(rows, 60):
            counts[self.between(0, 2)] = 1
        f["n1"], f["n2"] = counts[:2]
        if name == "dma_fill":
            counts = counts[:2]
        else:
            f["n3"] = counts[2]
            f["stream"] = int(not burst)
        inside = list(counts)
        padded = name == "dma_load" and self.chance(0.5)
        if padded:
            for side in ("pad1_lo", "pad1_hi", "pad2_lo", "pad2_hi"):
                f[side] = self.pick(0, 0, 1, 2, 3)
            counts = [
                f["pad1_lo"] + f["n1"] + f["pad1_hi"],
                f["pad2_lo"] + f["n2"] + f["pad2_hi"],
                f["n3"],
            ]
            if prod(counts) * f["n0"] > 3 * MAX_BYTES:
                return None
        if "fill" in f:
            f["fill"] = self.between(0, 255)
        written_apart = padded or self.chance(0.75)
        to_ddr = name == "dma_store"
        sram = self.strides(counts, f["n0"], written_apart and not to_ddr, 1)
        sram_span = sum((n - 1) * s for n, s in zip(counts, sram, strict=True)) + f["n0"]
        if sram_span > self.sram_size:
            return None
        f["sram"] = self.place(self.sram_size - sram_span, 1)
        f |= {f"sram_s{i + 1}": stride for i, stride in enumerate(sram)}
        if name != "dma_fill":
            ddr = self.strides(inside, f["n0"], written_apart and to_ddr, step)
            ddr_span = sum((n - 1) * s for n, s in zip(inside, ddr, strict=True)) + f["n0"]
            if ddr_span > self.ddr_size:
                return None
            f["ddr"] = DDR_BASE + self.place(self.ddr_size - ddr_span, step)
            f |= {f"ddr_s{i + 1}": stride for i, stride in enumerate(ddr)}
        gap = self.pick(0, 0, 0, 1, self.between(2, 9))
        return Job(name, f, gap)

    def place(self, last: int, step: int) -> int:
        """Return an offset, at times just before a multiple of 4 KiB."""
        offset = self.between(0, last)
        if self.chance(0.3):
            offset = min(last, max(0, self.between(1, 15) * 4096 - self.pick(1, 5, 64, 90)))
        return offset // step * step


def random_jobs(
    hardware: Hardware, count: int, seed: int, ddr_size: int, sram_size: int
) -> list[Job]:
    """Return instructions that stay in their memories and write padding only once."""
    draw = _Draw(hardware, np.random.default_rng(seed), ddr_size, sram_size)
    jobs: list[Job] = []
    while len(jobs) < count:
        job = draw.instruction()
        if job is not None:
            jobs.append(job)
    return jobs


def _written(job: Job) -> Iterator[int]:
    for run in runs(job.name, job.fields):
        yield from range(run.to, run.to + job.fields["n0"])


def overwrites(job: Job) -> bool:
    """Tell whether the instruction writes a byte twice, so that the order of its runs matters."""
    addresses = list(_written(job))
    return len(set(addresses)) != len(addresses)


def apply(state: State, job: Job) -> None:
    """Execute an instruction on a state whose DDR is the window at `DDR_BASE`."""
    fields = dict(job.fields)
    if "ddr" in fields:
        fields["ddr"] -= DDR_BASE
    if not overwrites(job):
        getattr(vector, job.name)(state, fields)
        return
    # The last run written wins; a strided assignment promises no order.
    store = job.name == "dma_store"
    to, source = (state.ddr, state.sram) if store else (state.sram, state.ddr)
    size = fields["n0"]
    for run in runs(job.name, fields):
        content = fields.get("fill", 0)
        if run.source is not None:
            content = source[run.source : run.source + size]
        to[run.to : run.to + size] = content
