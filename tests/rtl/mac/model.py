"""The contract's MAC array, written plainly: when each thing happens, and what the halves hold.

Cycles follow from microarchitecture.md: addresses are products of indices and strides, and a
stretch of work ends at its last grant. Values are the functional simulator's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import numpy.typing as npt

from tests.rtl.mac.bench import Job
from tilewright.sim import mac
from tilewright.sim.state import State
from tilewright.spec.hardware import Hardware

INT4 = 1
Sums = npt.NDArray[np.int32]


@dataclass
class Wanted:
    """What the array has to do."""

    log: list[str] = field(default_factory=list[str])
    full: list[tuple[int, Sums]] = field(default_factory=list[tuple[int, Sums]])
    """Half and accumulators `[pixels, columns]` of each pushed block."""
    kept: list[list[tuple[int, Sums]]] = field(default_factory=list[list[tuple[int, Sums]]])
    """Half and accumulators of each block of every instruction that pushes nothing."""
    cycles: int = 0


@dataclass(frozen=True)
class _Step:
    act: list[int]
    """Words read on port 0."""
    wgt: list[int]
    first: bool
    """Of its block."""
    last: bool


def _touched(address: int, size: int, word: int) -> Iterator[int]:
    return iter(range(address // word, (address + size - 1) // word + 1))


def _steps(hardware: Hardware, f: dict[str, int]) -> Iterator[_Step]:
    word = hardware.sram_word_bytes
    pixel_blocks = -(-f["out_h"] // f["block_rows"])
    kernel = list(product(range(f["k_h"]), range(f["k_w"]), range(f["c_blocks"])))
    for ob, pb in product(range(f["oc_blocks"]), range(pixel_blocks)):
        columns = f["cols_last"] if ob == f["oc_blocks"] - 1 else f["cols"]
        row_bytes = -(-columns // 2) if f["dtype"] == INT4 else columns
        oy = range(pb * f["block_rows"], min((pb + 1) * f["block_rows"], f["out_h"]))
        weight = f["wgt"] + ob * f["wgt_ob_stride"]
        for number, (ky, kx, cb) in enumerate(kernel):
            rows = f["c_last"] if cb == f["c_blocks"] - 1 else f["c_rows"]
            act: list[int] = []
            for y, x in product(oy, range(f["out_w"])):
                address = f["act"] + ob * f["ob_stride"]
                address += y * f["oy_stride"] + x * f["ox_stride"]
                address += ky * f["ky_stride"] + kx * f["kx_stride"] + cb * f["cb_stride"]
                act += _touched(address, columns if f["diag"] else rows, word)
            wgt: list[int] = []
            for _ in range(1 if f["diag"] else rows):
                wgt += _touched(weight, row_bytes, word)
                weight += f["wgt_pitch"]
            yield _Step(act, wgt, number == 0, number == len(kernel) - 1)


@dataclass
class _Timing:
    hardware: Hardware
    job: Job
    events: list[tuple[int, int, str]] = field(default_factory=list[tuple[int, int, str]])
    """Cycle, order within the cycle, text."""
    free_from: list[int] = field(default_factory=lambda: [0, 0])
    """Cycle from which each half is FREE."""
    pushed: int = 0
    free_at: int = 0
    """Cycle in which the engine may pop."""

    def log(self, cycle: int, order: int, text: str) -> None:
        self.events.append((cycle, order, f"{cycle} {text}"))

    def reads(self, port: str, words: list[int], cycle: int) -> int:
        """Request `words` one after another; return the cycle of the last grant."""
        plan = self.job.plan.act if port == "act" else self.job.plan.wgt
        order = 2 if port == "act" else 3
        for word in words:
            while plan[cycle % len(plan)] == "0":
                cycle += 1
            self.log(cycle, order, f"{port} {word:x}")
            cycle += 1
        return cycle - 1

    def execute(self, f: dict[str, int]) -> None:
        plan, latency = self.job.plan, self.hardware.mac_latency
        start = self.free_at
        while plan.offers[start % len(plan.offers)] == "0":
            start += 1
        self.log(start, 1, "pop")
        steps = list(_steps(self.hardware, f))
        cycle = self.reads("wgt", steps[0].wgt, start + 1) + 1
        half = f["m_half"]
        end = cycle
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            if step.first:
                while cycle < self.free_from[half]:
                    self.log(cycle, 4, "stall")
                    cycle += 1
            end = self.reads("act", step.act, cycle)
            if following is not None:
                end = max(end, self.reads("wgt", following.wgt, cycle))
            cycle = end + 1
            if step.last:
                if f["push"]:
                    full = end + 1 + latency
                    self.log(full, 0, f"full {half}")
                    delay = plan.drains[self.pushed % len(plan.drains)]
                    self.free_from[half] = full + delay + 1
                    self.pushed += 1
                half ^= 1
        self.log(end + latency, 5, f"done {f['signal']:x}")
        self.free_at = end + latency + 1


def predict(hardware: Hardware, job: Job) -> Wanted:
    """Return what the contract wants of a job."""
    wanted = Wanted()
    timing = _Timing(hardware, job)
    state = State(hardware, np.zeros(1, np.uint8))
    state.sram[:] = np.frombuffer(job.sram, np.uint8)
    held: dict[int, Sums] = {}
    preloaded = {half for half, _ in job.preloads}
    for f in job.instructions:
        timing.execute(f)
        blocks: list[tuple[int, Sums]] = []
        for number in range(mac.block_count(f)):
            ob, row, rows = mac.block_place(f, number)
            half = f["m_half"] ^ (number & 1)
            start = None
            if f["accumulate"]:
                if half not in held and half in preloaded:
                    pixels = range(rows * f["out_w"])
                    held[half] = np.stack([job.preloads[half, p] for p in pixels])
                start = held[half][:, : mac.columns(f, ob, 1)]
            sums = mac.convolve(state, f, ob, 1, row, rows, start).astype(np.int32)
            held[half] = sums
            blocks.append((half, sums))
        if f["push"]:
            wanted.full += blocks
        else:
            wanted.kept.append(blocks)
    timing.events.sort()
    wanted.log = [text for _, _, text in timing.events]
    wanted.cycles = timing.free_at
    return wanted
