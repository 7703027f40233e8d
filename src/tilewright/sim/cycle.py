"""The cycle simulator: event-driven, one or a few events an instruction.

Engines, queues, semaphores, the handshake of the M registers' halves, DDR shared among channels and
instruction fetch, banks shared among engines, three clocks; the rules are those of
docs/concepts/machine.md. Between two events every engine works at a constant rate (fluid model): 1
is its full speed, less when DDR or a bank is shared. Values are not computed, only time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from tilewright.diagnostics import TilewrightError
from tilewright.sim.retire import CycleResult, Measured, Timing, collect
from tilewright.sim.state import machine_error
from tilewright.spec.hardware import Hardware
from tilewright.spec.limits import violations
from tilewright.spec.program import (
    ENGINE_NAMES,
    MAC,
    SEQ,
    VEC,
    Dispatched,
    Instr,
    as_program,
    sequence,
)
from tilewright.spec.timing import (
    FETCH_BLOCKS,
    FETCH_BYTES,
    FETCH_INSTRUCTIONS,
    DmaTiming,
    MacTiming,
    PortUse,
    VecTiming,
    ddr_to_core,
    dma_timing,
    dma_to_core,
    mac_timing,
    vec_timing,
)

EPSILON = 1e-7
"""Cycles; differences below are rounding of the fluid rates."""
SEMAPHORE_MAX = 65535
FETCH = 6
"""The fetcher's place among the engines that use DDR."""

Ports = tuple[tuple[int, float], ...]


@dataclass(slots=True)
class _Engine:
    """An engine's queue and what it is doing."""

    number: int
    queue: deque[int] = field(default_factory=deque[int])
    current: int = -1
    """Instruction being executed, by position in the stream; -1 when free."""
    free_at: float = 0.0
    phase: str = ""
    """Empty when nothing runs down (free, or waiting for the other side of the handshake)."""
    remaining: float = 0.0
    """Cycles at full speed until the phase ends."""
    rate: float = 1.0
    ddr_rate: float = 1.0
    """What the rate would be without bank conflicts."""
    ports: Ports = ()
    """(mask of banks, cycles a cycle in each of them) at full speed in this phase."""
    mask: int = 0
    """All banks of `ports`."""
    demand: float = 0.0
    """DDR bytes a cycle at full speed."""
    block: int = 0
    push: int = -1
    """Number of the pushing mac_conv that runs or is drained."""


@dataclass(frozen=True)
class CycleSimulator:
    """Times programs of one target."""

    hardware: Hardware

    def run(
        self, code: bytes | Sequence[Instr], *, registers: Mapping[int, int] | None = None
    ) -> CycleResult:
        """Simulate a program to its `halt`.

        Raises:
            TilewrightError: E0602 if an instruction breaks a limit, a semaphore overflows, or the
                program deadlocks; each engine's blocked instruction is named.
        """
        hardware = self.hardware
        stream = list(sequence(as_program(code), hardware.scalar_registers, registers))
        return _Run(hardware, stream).execute()


def _bank_ports(hardware: Hardware, ports: Sequence[PortUse], cycles: int) -> tuple[Ports, int]:
    """Spread each operand's port cycles evenly over `cycles` and the banks it spans."""
    bank = hardware.bank_size
    result: list[tuple[int, float]] = []
    whole = 0
    for port in ports:
        first, last = port.low // bank, (port.high - 1) // bank
        mask = ((1 << (last - first + 1)) - 1) << first
        result.append((mask, port.cycles / (max(1, cycles) * (last - first + 1))))
        whole |= mask
    return tuple(result), whole


@dataclass(slots=True)
class _Plan:
    """Timing of an instruction as the event loop uses it."""

    timing: Timing
    ports: Ports = ()
    mask: int = 0


class _Run:
    def __init__(self, hardware: Hardware, stream: list[Dispatched]) -> None:
        self.hardware = hardware
        self.stream = stream
        self.plans = self._plan()
        count = len(stream)
        self.engines = [_Engine(number) for number in range(FETCH + 1)]
        self.semaphores = [0] * 32
        self.available = 0
        self.now = 0.0
        zeros = [0.0] * count
        self.measured = Measured(
            zeros[:], zeros[:], zeros[:], zeros[:], zeros[:], zeros[:], zeros[:],
            dict.fromkeys(("busy", "wait_queue", "wait_fetch", "wait_engines"), 0.0), 0, [],
        )  # fmt: skip
        self.next = 0
        self.ready_at = 0.0
        self.blocked = ""
        self.finished = False
        self.fetched = 0
        self.bandwidth = hardware.ddr_bytes_per_cycle
        self.half_full = [False, False]
        self.full_at: list[list[float]] = []
        """For every pushing mac_conv so far: when each pushed block becomes full."""
        self.drains = 0

    def _plan(self) -> list[_Plan]:
        hardware = self.hardware
        known: dict[tuple[object, ...], _Plan] = {}
        plans: list[_Plan] = []
        for item in self.stream:
            f = item.fields
            # Wait and signal masks come first and do not change the timing.
            key = (item.name, *list(f.values())[2:])
            plan = known.get(key)
            if plan is None:
                broken = [rule.message for rule in violations(hardware, item.name, f)]
                if broken:
                    raise machine_error(item, broken[0], broken[1:])
                plan = known[key] = self._plan_one(item.name, f)
            plans.append(plan)
        return plans

    def _plan_one(self, name: str, f: dict[str, int]) -> _Plan:
        hardware = self.hardware
        if name.startswith("dma_"):
            dma = dma_timing(hardware, f, name)
            return _Plan(dma, *_bank_ports(hardware, dma.ports, dma.data))
        if name == "mac_conv":
            mac = mac_timing(hardware, f)
            cycles = mac.first_load + sum(mac.blocks)
            return _Plan(mac, *_bank_ports(hardware, mac.ports, cycles))
        if name.startswith("vec_"):
            vec = vec_timing(hardware, name, f)
            return _Plan(vec, *_bank_ports(hardware, vec.ports, sum(vec.blocks)))
        return _Plan(None)

    def execute(self) -> CycleResult:
        """Run the event loop to the end."""
        self._start_fetch()
        while True:
            self._settle()
            if self.finished:
                break
            self._set_rates()
            self._advance(self._next_time())
        self.measured.ddr_profile.append((self.now, 0.0))
        timings = [plan.timing for plan in self.plans]
        return collect(self.stream, timings, self.measured, self.ready_at)

    def _settle(self) -> None:
        """Start everything that can start now."""
        moved = True
        while moved and not self.finished:
            moved = self._dispatch()
            for engine in self.engines[:SEQ]:
                if engine.current < 0:
                    moved |= bool(engine.queue) and self._start(engine)
                elif not engine.phase:
                    moved |= self._next_block(engine)
            self._start_fetch()

    # Sequencer and fetch.

    def _dispatch(self) -> bool:
        moved = False
        depth = self.hardware.queue_depth
        waited = self.measured.sequencer
        while self.next < len(self.stream):
            position = self.next
            if position // FETCH_INSTRUCTIONS >= self.fetched:
                self.blocked = "wait_fetch"
                break
            item = self.stream[position]
            at = max(self.ready_at, self.now)
            if item.engine == SEQ:
                # What a fence sees depends on the time: wait until it has come.
                if at > self.now + EPSILON:
                    self.blocked = ""
                    break
                if not self._sequencer_ready(item):
                    self.blocked = "wait_engines"
                    break
                self._take(item.fields["wait"])
                self.measured.start[position] = at
                self.measured.end[position] = at + 1
                self._signal(item)
            else:
                queue = self.engines[item.engine].queue
                if len(queue) >= depth:
                    self.blocked = "wait_queue"
                    break
                queue.append(position)
            if at > self.ready_at and self.blocked:
                waited[self.blocked] += at - self.ready_at
            self.blocked = ""
            waited["busy"] += 1
            self.measured.issue[position] = at
            self.ready_at = at + 1
            self.next += 1
            moved = True
            if item.name == "halt":
                self.finished = True
                break
        return moved

    def _sequencer_ready(self, item: Dispatched) -> bool:
        if item.fields["wait"] & ~self.available:
            return False
        if item.name not in ("fence", "halt"):
            return True
        return not any(engine.queue or engine.current >= 0 for engine in self.engines[:SEQ])

    def _start_fetch(self) -> None:
        engine = self.engines[FETCH]
        if engine.phase or self.fetched * FETCH_INSTRUCTIONS >= len(self.stream):
            return
        if self._fetch_at() <= self.now + EPSILON:
            engine.phase = "latency"
            engine.remaining = float(dma_to_core(self.hardware, self.hardware.dma_latency))
            engine.demand = 0.0

    def _fetch_at(self) -> float:
        """Return when the buffer has room for the next block (infinity: not known yet)."""
        leaving = (self.fetched - FETCH_BLOCKS + 1) * FETCH_INSTRUCTIONS - 1
        if leaving < 0:
            return 0.0
        return self.measured.issue[leaving] if leaving < self.next else inf

    # Engines.

    def _start(self, engine: _Engine) -> bool:
        position = engine.queue[0]
        issue = self.measured.issue[position]
        item = self.stream[position]
        if issue > self.now + EPSILON or item.fields["wait"] & ~self.available:
            return False
        self._take(item.fields["wait"])
        engine.queue.popleft()
        engine.current = position
        measured = self.measured
        measured.start[position] = self.now
        measured.wait_semaphore[position] = max(0.0, self.now - max(issue, engine.free_at))
        plan = self.plans[position]
        timing = plan.timing
        engine.block = 0
        if isinstance(timing, DmaTiming):
            self._run_phase(engine, "latency", timing.latency)
        elif isinstance(timing, MacTiming):
            engine.push = -1
            if item.fields["push"]:
                engine.push = len(self.full_at)
                self.full_at.append([])
            self._run_phase(engine, "load", timing.first_load, plan)
        elif isinstance(timing, VecTiming):
            if item.name == "vec_drain":
                engine.push = self.drains
                self.drains += 1
                engine.phase = ""
            else:
                self._run_phase(engine, "work", timing.blocks[0], plan)
        return True

    def _run_phase(
        self, engine: _Engine, phase: str, cycles: float, plan: _Plan | None = None
    ) -> None:
        engine.phase = phase
        engine.remaining = float(cycles)
        engine.demand = 0.0
        engine.ports, engine.mask = (plan.ports, plan.mask) if plan is not None else ((), 0)

    def _next_block(self, engine: _Engine) -> bool:
        """Start the next block of a mac_conv or vec_drain if the other side allows it."""
        plan = self.plans[engine.current]
        timing = plan.timing
        fields = self.stream[engine.current].fields
        assert isinstance(timing, MacTiming | VecTiming), "only these have blocks"
        if engine.number == MAC:
            if self.half_full[fields["m_half"] ^ (engine.block & 1)]:
                return False
        elif self._full_time(engine) > self.now + EPSILON:
            return False
        self._run_phase(engine, "block", timing.blocks[engine.block], plan)
        return True

    def _full_time(self, engine: _Engine) -> float:
        if engine.push >= len(self.full_at):
            return inf
        times = self.full_at[engine.push]
        return times[engine.block] if engine.block < len(times) else inf

    def _end_phase(self, engine: _Engine) -> None:
        if engine.number == FETCH:
            self._end_fetch(engine)
            return
        plan = self.plans[engine.current]
        timing = plan.timing
        if isinstance(timing, DmaTiming):
            if engine.phase == "latency":
                self._run_phase(engine, "data", timing.data, plan)
                engine.demand = timing.ddr_bytes / timing.data
                return
        elif engine.phase == "load":
            engine.phase = ""
            return
        elif engine.phase == "block":
            assert isinstance(timing, MacTiming | VecTiming), "only these have blocks"
            fields = self.stream[engine.current].fields
            half = fields["m_half"] ^ (engine.block & 1)
            if engine.number == MAC and fields["push"]:
                self.half_full[half] = True
                self.full_at[engine.push].append(self.now + self.hardware.mac_latency)
            elif engine.number == VEC:
                self.half_full[half] = False
            engine.block += 1
            if engine.block < len(timing.blocks):
                engine.phase = ""
            else:
                self._run_phase(engine, "latency", timing.latency)
            return
        elif engine.phase == "work":
            assert isinstance(timing, VecTiming), "vector instructions"
            self._run_phase(engine, "latency", timing.latency)
            return
        item = self.stream[engine.current]
        self.measured.end[engine.current] = self.now
        engine.free_at = self.now
        engine.current = -1
        engine.phase = ""
        engine.demand = 0.0
        self._signal(item)

    def _end_fetch(self, engine: _Engine) -> None:
        if engine.phase == "latency":
            cycles = ddr_to_core(self.hardware, FETCH_BYTES)
            engine.phase = "data"
            engine.remaining = float(cycles)
            engine.demand = FETCH_BYTES / cycles
            return
        engine.phase = ""
        engine.demand = 0.0
        self.fetched += 1
        self.measured.fetch_bytes += FETCH_BYTES

    # Semaphores.

    def _take(self, mask: int) -> None:
        while mask:
            bit = mask & -mask
            number = bit.bit_length() - 1
            self.semaphores[number] -= 1
            if not self.semaphores[number]:
                self.available ^= bit
            mask ^= bit

    def _signal(self, item: Dispatched) -> None:
        mask = item.fields["signal"]
        self.available |= mask
        while mask:
            bit = mask & -mask
            number = bit.bit_length() - 1
            self.semaphores[number] += 1
            if self.semaphores[number] > SEMAPHORE_MAX:
                raise machine_error(item, f"semaphore {number} overflows {SEMAPHORE_MAX}", [])
            mask ^= bit

    # Time.

    def _set_rates(self) -> None:
        """Share DDR max-min fairly, then slow engines that meet in a bank."""
        active = [engine for engine in self.engines if engine.phase]
        moving = [engine for engine in active if engine.demand]
        used = sum(engine.demand for engine in moving)
        for engine in active:
            engine.ddr_rate = engine.rate = 1.0
        if used > self.bandwidth:
            left, waiting = self.bandwidth, len(moving)
            for engine in sorted(moving, key=lambda engine: engine.demand):
                given = min(engine.demand, left / waiting)
                engine.ddr_rate = engine.rate = given / engine.demand
                left -= given
                waiting -= 1
        self._share_banks([engine for engine in active if engine.mask])
        rate = sum(engine.demand * engine.rate for engine in moving)
        profile = self.measured.ddr_profile
        if not profile or profile[-1][1] != rate:
            if profile and profile[-1][0] == self.now:
                profile.pop()
            profile.append((self.now, rate))

    def _share_banks(self, users: list[_Engine]) -> None:
        seen = shared = 0
        for engine in users:
            shared |= seen & engine.mask
            seen |= engine.mask
        if not shared:
            return
        load: dict[int, float] = {}
        for engine in users:
            for mask, use in engine.ports:
                both = mask & shared
                while both:
                    bit = both & -both
                    load[bit] = load.get(bit, 0.0) + use * engine.ddr_rate
                    both ^= bit
        for engine in users:
            worst = max((amount for bit, amount in load.items() if engine.mask & bit), default=0.0)
            if worst > 1.0:
                engine.rate = engine.ddr_rate / worst

    def _next_time(self) -> float:
        time = inf
        for engine in self.engines:
            if engine.phase:
                time = min(time, self.now + engine.remaining / engine.rate)
            elif engine.number == FETCH:
                if self.fetched * FETCH_INSTRUCTIONS < len(self.stream):
                    time = min(time, self._fetch_at())
            elif engine.current >= 0:
                if engine.number == VEC:
                    time = min(time, self._full_time(engine))
            elif engine.queue:
                issue = self.measured.issue[engine.queue[0]]
                if issue > self.now + EPSILON:
                    time = min(time, issue)
        if self.next < len(self.stream) and self.ready_at > self.now + EPSILON:
            time = min(time, self.ready_at) if self._sequencer_next() else time
        if time == inf:
            raise self._deadlock()
        return max(time, self.now)

    def _sequencer_next(self) -> bool:
        return self.stream[self.next].engine == SEQ and not self.blocked

    def _advance(self, time: float) -> None:
        step = time - self.now
        self.now = time
        measured = self.measured
        ended: list[_Engine] = []
        for engine in self.engines:
            if engine.phase:
                engine.remaining -= step * engine.rate
                if engine.remaining <= EPSILON:
                    ended.append(engine)
                if engine.rate != 1.0 and engine.current >= 0:
                    measured.wait_ddr[engine.current] += step * (1.0 - engine.ddr_rate)
                    measured.wait_bank[engine.current] += step * (engine.ddr_rate - engine.rate)
            elif engine.current >= 0:
                measured.wait_accumulator[engine.current] += step
        for engine in ended:
            self._end_phase(engine)

    def _deadlock(self) -> TilewrightError:
        details: list[str] = []
        for engine in self.engines[:SEQ]:
            position = engine.current if engine.current >= 0 else -1
            if position < 0 and engine.queue:
                position = engine.queue[0]
            if position < 0:
                continue
            item = self.stream[position]
            missing = item.fields["wait"] & ~self.available
            if engine.current >= 0:
                half = "an emptied half" if engine.number == MAC else "a pushed half"
                why = f"waits for {half} of the M registers at block {engine.block}"
            else:
                numbers = [str(bit) for bit in range(32) if missing >> bit & 1]
                why = f"waits for semaphore {', '.join(numbers)}"
            details.append(
                f"{ENGINE_NAMES[engine.number]}: instruction {item.index} ({item.name}) of layer "
                f'"{item.layer}" {why}'
            )
        item = self.stream[self.next]
        return machine_error(item, "deadlock: no engine can go on", details)
