"""List scheduling: an order of a program's instructions that keeps its engines busy.

Engines execute in order, and the sequencer dispatches in order, so the order of the program decides
what every engine does next. Instructions are placed on a time line one after another: of those
whose dependencies are placed, the one that can start first; of several, the one with the longest
path of latencies to the program's end. A window bounds how far ahead of the oldest instruction not
yet placed one may be.

Times are those of `spec/timing`, or measured ones. The model (`Timeline`) is coarser than the cycle
simulator: queues, the handshake of the accumulators, and DDR's bandwidth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from tilewright.schedule.dependencies import Dependencies
from tilewright.spec.hardware import Hardware
from tilewright.spec.program import MAC, SEQ, VEC, Dispatched
from tilewright.spec.timing import dma_timing, mac_timing, vec_timing

WINDOWS = (4, 32)
"""Instructions looked ahead: nearly always best, and far enough for an instruction much slower than
its neighbours.
"""
MANY = 30_000
"""Above so many instructions only the first window is tried."""
GAIN, FAR_GAIN = 0.002, 0.02
"""Least gains by the model for which a program is reordered, and for which the far window is taken:
below, it is noise of the model.
"""
PENDING = 2
"""`mac_conv`s ahead of the drains; more only wait for a half of the M registers."""

Measured = Callable[[Dispatched], int | None]
"""Measured cycles of an instruction, None where there are none."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cycles of one instruction in the model."""

    cycles: int
    """From start to end when nothing has to wait."""
    latency: int = 0
    """DMA: before the first byte."""
    ddr: int = 0
    """DMA: cycles of DDR."""
    blocks: int = 1
    last_block: int = 0
    """mac_conv and vec_drain: cycles of the last block."""
    measured: bool = False
    """`cycles` were measured."""


def cost_of(hardware: Hardware, name: str, f: dict[str, int]) -> Cost:
    """Return the estimated cost of an instruction with all its fields `f`."""
    if name.startswith("dma_"):
        dma = dma_timing(hardware, f, name)
        return Cost(dma.cycles, dma.latency, dma.ddr)
    if name == "mac_conv":
        mac = mac_timing(hardware, f)
        return Cost(mac.cycles, blocks=len(mac.blocks), last_block=mac.blocks[-1])
    vec = vec_timing(hardware, name, f)
    return Cost(vec.cycles, blocks=len(vec.blocks), last_block=vec.blocks[-1] + vec.latency)


def costs(
    stream: Sequence[Dispatched], hardware: Hardware, measured: Measured | None = None
) -> list[Cost]:
    """Return the cost of every instruction, measured where that is known."""
    known: dict[tuple[object, ...], Cost] = {}
    found: list[Cost] = []
    for item in stream:
        key = (item.name, *list(item.fields.values())[2:])
        cost = known.get(key)
        if cost is None:
            cost = known[key] = cost_of(hardware, item.name, item.fields)
        cycles = measured(item) if measured is not None else None
        if cycles is not None:
            cost = Cost(cycles, cost.latency, cost.ddr, cost.blocks, cost.last_block, True)
        found.append(cost)
    return found


class Bandwidth:
    """DDR's cycles, given out in slices of time to whoever asks first, gaps included."""

    SLICE = 64

    def __init__(self) -> None:
        self._left: list[int] = []
        """Of every slice: cycles not given out; means nothing once `_next` points beyond it."""
        self._next: list[int] = []
        """Of a slice given out: one after it that may have cycles left; else itself."""
        self._touched = bytearray()
        """1 for slices of which some was given out."""

    def _open(self, number: int) -> int:
        """Return the first slice from `number` on that has cycles left."""
        following = self._next
        if number >= len(following):
            self._grow(2 * number + 1024)
        end = number
        while following[end] != end:
            end = following[end]
            if end >= len(following):
                self._grow(2 * end)
        while number != end:
            following[number], number = end, following[number]
        return end

    def _grow(self, size: int) -> None:
        old = len(self._next)
        self._next += range(old, size)
        self._left += [self.SLICE] * (size - old)
        self._touched.extend(bytes(size - old))

    def take(self, start: int, cycles: int) -> int:
        """Take `cycles` from `start` on, as early as possible; return when the last is over."""
        size = self.SLICE
        number, at = start // size, start
        while cycles:
            number = self._open(number)
            first = number * size
            if at <= first:
                at = first
                whole = cycles // size
                if whole and not self._touched[number]:
                    # All slices up to the next of which something is gone, at once.
                    limit = min(number + whole, len(self._next))
                    stop = self._touched.find(1, number, limit)
                    stop = limit if stop < 0 else stop
                    count = stop - number
                    self._touched[number:stop] = b"\1" * count
                    self._next[number:stop] = [stop] * count
                    cycles -= count * size
                    number, at = stop, stop * size
                    continue
            left = self._left[number]
            taken = min(cycles, left, first + size - at)
            cycles -= taken
            self._left[number] = left - taken
            self._touched[number] = 1
            at = first + size if cycles else at + taken
            if left == taken:
                self._next[number] = number + 1
            number += 1
        return at


class Timeline:
    """When instructions would start and end, dispatched one after another."""

    def __init__(
        self,
        stream: Sequence[Dispatched],
        hardware: Hardware,
        dependencies: Dependencies,
        cost: Sequence[Cost],
    ) -> None:
        self._stream = stream
        self._cost = cost
        self._pair = {drain: mac for mac, drain in dependencies.drains.items()}
        self._before = list(dependencies.before)
        """What each instruction waits for to end: a drain does not wait for its own mac_conv."""
        for drain, mac in self._pair.items():
            self._before[drain] = [other for other in self._before[drain] if other != mac]
        self._depth = hardware.queue_depth
        self.start = [0] * len(stream)
        self.end = [0] * len(stream)
        self.free = [0] * SEQ
        """When each engine can start its next instruction."""
        self._queues: list[deque[int]] = [deque() for _ in range(SEQ)]
        self._issue = 0
        self._ddr = Bandwidth()
        self._half = [0, 0]
        """When each half of the M registers was drained."""

    def ready(self, index: int) -> int:
        """Return when all an instruction depends on has ended."""
        end = self.end
        return max([end[other] for other in self._before[index]], default=0)

    def place(self, index: int) -> int:
        """Dispatch an instruction next; return its start."""
        item, cost = self._stream[index], self._cost[index]
        engine, f = item.engine, item.fields
        queue = self._queues[engine]
        issue = self._issue + 1
        if len(queue) == self._depth:
            room = queue.popleft() + 1
            issue = room if room > issue else issue
        self._issue = issue
        start = max(issue + 1, self.free[engine], self.ready(index))
        end = start + cost.cycles
        if cost.ddr:
            done = self._ddr.take(start + cost.latency, cost.ddr)
            if not cost.measured:
                end = max(end, done)
        elif engine == MAC and f["push"]:
            wait = self._half[f["m_half"]] - start
            if wait > 0 and not cost.measured:
                end += wait
        elif index in self._pair:
            mac = self._pair[index]
            end = max(end, self.end[mac] + cost.last_block)
            number = f["m_half"] ^ (cost.blocks - 1 & 1)
            self._half[number] = end
            if cost.blocks > 1:
                self._half[number ^ 1] = end - cost.last_block
            if cost.blocks > 2:
                # The multiplication cannot end before the last but two blocks are drained.
                late = end - 2 * cost.last_block + self._cost[mac].last_block
                self.end[mac] = max(self.end[mac], late)
                self.free[MAC] = max(self.free[MAC], late)
        queue.append(start)
        self.start[index], self.end[index] = start, end
        self.free[engine] = end
        return start


def estimate(
    stream: Sequence[Dispatched],
    hardware: Hardware,
    dependencies: Dependencies,
    cost: Sequence[Cost],
    order: Sequence[int],
) -> int:
    """Return the cycles of an order by the model."""
    timeline = Timeline(stream, hardware, dependencies, cost)
    for index in order:
        timeline.place(index)
    return max(timeline.end, default=0)


def critical_lengths(dependencies: Dependencies, cost: Sequence[Cost]) -> list[int]:
    """Return the longest path of latencies from the start of each instruction to the end."""
    lengths = [item.cycles for item in cost]
    for index in range(len(cost) - 1, -1, -1):
        length = lengths[index]
        for other in dependencies.before[index]:
            # A drain runs beside its mac_conv and ends a block after it.
            own = cost[other].cycles
            after = cost[index].last_block if dependencies.drains.get(other) == index else length
            lengths[other] = max(lengths[other], own + after)
    return lengths


class _Placer:
    """The placing of one straight-line run."""

    def __init__(
        self,
        stream: Sequence[Dispatched],
        hardware: Hardware,
        dependencies: Dependencies,
        cost: Sequence[Cost],
        priority: list[int],
        window: int,
    ) -> None:
        self.stream = stream
        self.dependencies = dependencies
        self.window = window
        self.priority = priority
        self.timeline = Timeline(stream, hardware, dependencies, cost)
        count = len(stream)
        self.after: list[list[int]] = [[] for _ in range(count)]
        self.missing = [len(own) for own in dependencies.before]
        for index, own in enumerate(dependencies.before):
            for other in own:
                self.after[other].append(index)
        self.placed = [False] * count
        self.order: list[int] = []
        self.oldest = 0
        self.far: list[int] = [index for index in range(count) if not self.missing[index]]
        """Ready, by position, but perhaps beyond the window."""
        heapify(self.far)
        self.waiting: list[list[tuple[int, int]]] = [[] for _ in range(SEQ)]
        """By engine: (time it is ready, position)."""
        self.startable: list[list[tuple[int, int]]] = [[] for _ in range(SEQ)]
        """By engine: (minus priority, position), ready when the engine is free."""
        self.macs = deque(sorted(dependencies.drains))
        """Pushing `mac_conv`s in program order."""
        self.drains = set(dependencies.drains.values())
        self.fifo: deque[int] = deque()
        """`vec_drain`s of those placed, in the order in which they must come."""

    def run(self) -> list[int]:
        while len(self.order) < len(self.stream):
            self._admit()
            best: tuple[int, int, int, int] | None = None
            for engine in range(SEQ):
                candidate = self._candidate(engine)
                if candidate is not None and (best is None or candidate < best):
                    best = candidate
            assert best is not None, "the oldest instruction can always be placed"
            self._take(best[3], best[2])
        return self.order

    def _admit(self) -> None:
        while self.oldest < len(self.placed) and self.placed[self.oldest]:
            self.oldest += 1
        limit = self.oldest + self.window
        while self.far and self.far[0] < limit:
            index = heappop(self.far)
            heappush(self.waiting[self.stream[index].engine], (self.timeline.ready(index), index))

    def _may(self, index: int) -> bool:
        """Return whether accumulators allow an instruction now."""
        drain = self.dependencies.drains.get(index)
        if drain is None:
            return self.stream[index].name != "vec_drain" or self.fifo[0] == index
        # Out of order only when its drain can follow at once: drains come in the order of their
        # multiplications, and one that waits would hold up what it waits for.
        if index == self.oldest:
            return True
        if len(self.fifo) >= PENDING:
            return False
        return index == self._first_mac() or self.missing[drain] == 1

    def _first_mac(self) -> int:
        while self.placed[self.macs[0]]:
            self.macs.popleft()
        return self.macs[0]

    def _candidate(self, engine: int) -> tuple[int, int, int, int] | None:
        waiting, startable = self.waiting[engine], self.startable[engine]
        if not waiting and not startable:
            return None
        free = self.timeline.free[engine]
        while waiting and waiting[0][0] <= free:
            _, index = heappop(waiting)
            heappush(startable, (-self.priority[index], index))
        skipped: list[tuple[int, int]] = []
        found: tuple[int, int, int, int] | None = None
        for heap, at_once in ((startable, True), (waiting, False)):
            while heap and found is None:
                key, index = heap[0]
                if self._may(index):
                    start = free if at_once else key
                    found = (start, -self.priority[index], index, engine)
                else:
                    skipped.append(heappop(heap))
            for entry in skipped:
                heappush(heap, entry)
            skipped.clear()
            if found is not None:
                break
        return found

    def _take(self, engine: int, index: int) -> None:
        for heap in (self.startable[engine], self.waiting[engine]):
            if heap and heap[0][1] == index:
                heappop(heap)
                break
            place = next((i for i, entry in enumerate(heap) if entry[1] == index), -1)
            if place >= 0:
                heap[place] = heap[-1]
                heap.pop()
                heapify(heap)
                break
        self.timeline.place(index)
        self.placed[index] = True
        self.order.append(index)
        drain = self.dependencies.drains.get(index)
        if drain is not None:
            self.fifo.append(drain)
        elif engine == VEC and self.fifo and self.fifo[0] == index:
            self.fifo.popleft()
        for other in self.after[index]:
            self.missing[other] -= 1
            if self.missing[other]:
                continue
            if other in self.drains:
                # Others may wait behind it for their turn: it comes in from beyond the window.
                heappush(self.waiting[VEC], (self.timeline.ready(other), other))
            else:
                heappush(self.far, other)


def _interleave(
    stream: Sequence[Dispatched],
    dependencies: Dependencies,
    order: Sequence[int],
    start: Sequence[int],
    ahead: int,
) -> list[int]:
    """Order the engines' instructions among each other: early, so that queues are never empty.

    Each is dispatched when the one `ahead` before it on its engine starts, but after what it
    depends on; engines keep their own order.
    """
    recent: list[deque[int]] = [deque(maxlen=ahead) for _ in range(SEQ)]
    last = [0] * SEQ
    key = [0] * len(stream)
    for index in order:
        engine = stream[index].engine
        queue = recent[engine]
        at = queue[0] if len(queue) == ahead else 0
        at = max(at, last[engine])
        for other in dependencies.before[index]:
            at = max(at, key[other])
        key[index] = last[engine] = at
        queue.append(start[index])
    return sorted(order, key=lambda index: key[index])


def list_schedule(
    stream: Sequence[Dispatched],
    hardware: Hardware,
    dependencies: Dependencies,
    cost: Sequence[Cost],
    windows: Sequence[int] = WINDOWS,
) -> tuple[list[int], int, int]:
    """Return the best order found, as positions in `stream`, and cycles of the old and of it.

    Every instruction comes after all it depends on, and `vec_drain`s in the order of their
    `mac_conv`s. The order is the old one when no other gains. The same input gives the same order.
    """
    best = list(range(len(stream)))
    old = shortest = estimate(stream, hardware, dependencies, cost, best)
    priority = critical_lengths(dependencies, cost)
    # Queues are kept full but for the place that the next dispatch needs.
    ahead = max(1, hardware.queue_depth - 1)
    gain = GAIN
    for window in windows if len(stream) <= MANY else windows[:1]:
        placer = _Placer(stream, hardware, dependencies, cost, priority, window)
        placed = placer.run()
        order = _interleave(stream, dependencies, placed, placer.timeline.start, ahead)
        cycles = estimate(stream, hardware, dependencies, cost, order)
        if cycles < shortest * (1 - gain):
            best, shortest = order, cycles
        gain = FAR_GAIN
    return best, old, shortest
