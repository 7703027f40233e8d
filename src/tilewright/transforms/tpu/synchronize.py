"""Insert semaphores: order instructions of different engines that touch the same bytes.

Before: instructions in program order, wait and signal masks empty.
After: for any two instructions of different engines that touch a common byte, one of them writing,
the later waits (directly, or through what it already waited for) for the earlier.

Each ordered pair of engines has its own semaphore. Engines run their queues in order, so waiting
for the *latest* instruction needed of an engine covers all earlier ones, and the k-th wait on a
semaphore matches its k-th signal. What an instruction has waited for, directly or not, is kept as a
vector of the latest completed instruction of every engine (a vector clock), so a wait already
implied is not repeated.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from tilewright.spec.hardware import Hardware
from tilewright.spec.program import MAC, SEQ, VEC
from tilewright.transforms.tpu.instruction import ENGINES, Instr, Region

DDR_GRANULE = 1024
"""Bytes of workspace tracked together: coarser costs waits that are not needed, never a missing
one.
"""


def semaphore(producer: int, consumer: int) -> int:
    """Return the semaphore that `producer` signals and `consumer` waits on."""
    return producer * (ENGINES - 1) + consumer - (consumer > producer)


class _Tracker:
    """Latest reader and writer of every granule, an engine."""

    def __init__(self, size: int, granule: int) -> None:
        self._granule = granule
        count = -(-size // granule)
        self._written = np.full((ENGINES, count), -1, np.int32)
        self._read = np.full((ENGINES, count), -1, np.int32)

    def _slice(self, region: Region) -> slice:
        return slice(region.low // self._granule, -(-region.high // self._granule))

    def before_read(self, region: Region) -> np.ndarray:
        return self._written[:, self._slice(region)].max(axis=1)

    def before_write(self, region: Region) -> np.ndarray:
        part = self._slice(region)
        return np.maximum(self._written[:, part].max(axis=1), self._read[:, part].max(axis=1))

    def note_read(self, region: Region, engine: int, index: int) -> None:
        self._read[engine, self._slice(region)] = index

    def note_write(self, region: Region, engine: int, index: int) -> None:
        self._written[engine, self._slice(region)] = index


def synchronize(program: list[Instr], hardware: Hardware, workspace_bytes: int) -> int:
    """Fill in the wait and signal masks of `program`; return how many waits were needed."""
    trackers = {
        "sram": _Tracker(hardware.sram_size, hardware.sram_word_bytes),
        "ddr": _Tracker(max(workspace_bytes, 1), DDR_GRANULE),
    }
    known = np.full(
        (ENGINES, ENGINES), -1, np.int64
    )  # known[c, e]: e's latest instruction c has seen end
    clocks: dict[int, np.ndarray] = {}
    pushed: deque[int] = deque()
    waits = 0
    for index, instr in enumerate(program):
        engine = instr.engine
        if engine == SEQ:
            continue
        need = np.full(ENGINES, -1, np.int64)
        for region in instr.reads:
            if region.space in trackers:
                need = np.maximum(need, trackers[region.space].before_read(region))
        for region in instr.writes:
            need = np.maximum(need, trackers[region.space].before_write(region))
        mine = known[engine]
        # Latest first: what it brings along may make the others needless.
        for producer in np.argsort(-need, kind="stable"):
            wanted = int(need[producer])
            if producer == engine or wanted <= mine[producer]:
                continue
            bit = 1 << semaphore(int(producer), engine)
            source = program[wanted].fields
            assert not source.get("signal", 0) & bit, "one signal a wait"
            source["signal"] = source.get("signal", 0) | bit
            instr.fields["wait"] = instr.fields.get("wait", 0) | bit
            np.maximum(mine, clocks[wanted], out=mine)
            waits += 1
        for region in instr.reads:
            if region.space in trackers:
                trackers[region.space].note_read(region, engine, index)
        for region in instr.writes:
            trackers[region.space].note_write(region, engine, index)
        # Engines execute in order: when this one ends, all before it on the engine have ended.
        mine[engine] = index
        if instr.name == "mac_conv" and instr.fields["push"]:
            pushed.append(index)
        if instr.name == "vec_drain":
            # The accumulators it emptied were complete, so that multiplication has ended too.
            paired = pushed.popleft()
            mine[MAC] = max(int(mine[MAC]), paired)
            np.maximum(mine, clocks[paired], out=mine)
            assert engine == VEC
        clocks[index] = mine.copy()
    return waits
