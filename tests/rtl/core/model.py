"""The contract's core, cycle by cycle, written down plainly, with the engines of stub_engines.sv.

Follows docs/concepts/microarchitecture.md sentence by sentence and shares nothing with the RTL.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from tilewright.sim.state import SRAM_RESET
from tilewright.spec.hardware import Hardware
from tilewright.spec.program import ADDRESSES, Instr, engine_of, full_fields

MASK = (1 << 40) - 1
BUFFER = 64
SEQ = 6


@dataclass
class Access:
    """A request of an SRAM port or a DDR requester."""

    address: int
    write: bool
    data: int = 0
    mask: int = 0
    burst: bool = False


@dataclass
class Port:
    """The accesses a stub makes on one port."""

    number: int
    accesses: deque[Access]


@dataclass
class Job:
    """An instruction in a queue or an engine."""

    name: str
    fields: dict[str, int]
    ports: list[Port] = field(default_factory=list[Port])
    cycles: int = 0
    waiting: bool = False


@dataclass
class Core:
    """State of the machine."""

    hardware: Hardware
    program: Sequence[Instr | None]
    """None: a word that does not decode."""
    registers: Mapping[int, int] = field(default_factory=dict[int, int])

    def __post_init__(self) -> None:
        self.r = [self.registers.get(i, 0) for i in range(32)]
        self.t = 0
        self.pc = self.base = self.fetch_end = self.valid_end = 0
        self.ring: dict[int, int] = {}
        self.block: list[int] | None = None  # start, size, granted units; None: IDLE
        self.fetch_wait = 0
        self.arriving: tuple[int, int, int] | None = None
        self.loops: list[list[int]] = []
        self.queues: list[deque[Job]] = [deque() for _ in range(6)]
        self.engines: list[Job | None] = [None] * 6
        self.semaphores = [0] * 32
        self.ddr_acc = 0
        self.ddr_last, self.ddr_lock = 4, -1
        self.bank_last = [8] * self.hardware.sram_banks
        self.sram = bytearray([SRAM_RESET]) * self.hardware.sram_size
        self.reads: list[str] = []
        self.counters = [[0] * 4 for _ in range(6)]
        self.log: list[str] = []
        self.end = ""

    def run(self, limit: int) -> None:
        """Run to the end of the program, a trap, or `limit` cycles."""
        while not self.end and self.t < limit:
            self._cycle()
        if not self.end:
            self.end = f"limit {self.t}"

    # One cycle: everything reads the state of the cycle; changes are collected in `after`.
    def _cycle(self) -> None:
        zero = [count == 0 for count in self.semaphores]
        idle = [job is None for job in self.engines]
        valid = [bool(queue) for queue in self.queues]
        takes, gives = list[int](), list[int]()

        # Dispatch.
        dispatched, appended, jump, trap = -1, None, None, False
        pc = self.pc
        next_pc, next_r = pc, list(self.r)
        if pc == len(self.program):
            trap = True
        elif pc < self.valid_end:
            assert self.ring[pc % BUFFER] == pc, "the buffer was overwritten"
            instr = self.program[pc]
            if instr is None:
                trap = True
            else:
                fields = full_fields(instr)
                engine = engine_of(instr.name, fields)
                if engine != SEQ:
                    if len(self.queues[engine]) < self.hardware.queue_depth:
                        dispatched, next_pc = engine, pc + 1
                        appended = self._job(instr.name, fields)
                elif (instr.name, len(self.loops)) in (("loop", 4), ("end_loop", 0)):
                    trap = True
                elif not any(zero[i] for i in _bits(fields["wait"])) and (
                    instr.name not in ("fence", "halt") or (all(idle) and not any(valid))
                ):
                    dispatched, next_pc = SEQ, pc + 1
                    takes += _bits(fields["wait"])
                    gives += _bits(fields["signal"])
                    if instr.name == "halt":
                        self.end = f"finished {self.t}"
                    elif instr.name == "set_reg":
                        next_r[fields["rd"]] = fields["value"]
                    elif instr.name == "add_reg":
                        next_r[fields["rd"]] = (self.r[fields["rd"]] + fields["value"]) & MASK
                    elif instr.name == "loop":
                        self.loops.append([pc + 1, fields["count"]])
                    elif instr.name == "end_loop":
                        self.loops[-1][1] -= 1
                        if self.loops[-1][1]:
                            jump = next_pc = self.loops[-1][0]
                        else:
                            self.loops.pop()
        if trap:
            self.end = f"trapped {self.t}"

        # Pops.
        popped: list[Job | None] = [None] * 6
        for engine in range(6):
            queue = self.queues[engine]
            if idle[engine] and queue:
                waits = _bits(queue[0].fields["wait"])
                if not any(zero[i] for i in waits):
                    popped[engine] = queue[0]
                    takes += waits

        # DDR.
        ddr: list[Access | None] = [None] * 5
        sram: list[Access | None] = [None] * 9
        for job in self.engines:
            for port in job.ports if job else ():
                if port.accesses and port.number >= 100:
                    ddr[port.number - 100] = port.accesses[0]
                elif port.accesses:
                    sram[port.number] = port.accesses[0]
        if self.block is not None and self.fetch_wait == 0:
            start, _, units = self.block
            ddr[4] = Access(64 * start + units * self.hardware.ddr_bus_bytes, False)
        ddr_granted = self._arbitrate_ddr(ddr)
        sram_granted = self._arbitrate_sram(sram)
        reads = self._access_sram(sram, sram_granted)

        # Engines.
        done = 0
        bank_stall = ddr_stall = 0
        for engine, job in enumerate(self.engines):
            if job is None:
                continue
            stall = 3 if engine == 4 and not any(p.accesses for p in job.ports[:2]) else 0
            for port in job.ports:
                if not port.accesses:
                    continue
                if port.number >= 100:
                    granted = ddr_granted == port.number - 100
                    ddr_stall |= 0 if granted else 1 << engine
                else:
                    granted = port.number in sram_granted
                    bank_stall |= 0 if granted else 1 << engine
                if granted:
                    port.accesses.popleft()
            if bank_stall >> engine & 1:
                stall = 1
            elif ddr_stall >> engine & 1:
                stall = 2
            self.counters[engine][stall] += 1
            if job.waiting or not any(port.accesses for port in job.ports):
                if job.cycles == 0:
                    done |= 1 << engine
                    gives += _bits(job.fields["signal"])
                    self.engines[engine] = None
                else:
                    job.waiting = True
                    job.cycles -= 1

        counting = self.block is not None and self.fetch_wait > 0
        start_mask = sum(1 << engine for engine in range(6) if popped[engine])
        active = bool(
            sram_granted or ddr_granted >= 0 or dispatched >= 0 or start_mask or done or counting
        )
        line = f"{self.t} {dispatched} start {start_mask:x} done {done:x}"
        if ddr_granted >= 0:
            access = ddr[ddr_granted]
            assert access is not None
            line += f" mem {ddr_granted // 4}{access.write:d} {access.address:x}"
        line += f" bank {bank_stall:x} ddr {ddr_stall:x} queue {_mask(valid):x}"
        line += f" idle {_mask(idle):x} zero {_mask(zero):x} active {active:d}"
        self.log.append(line)
        self.log += sorted(self.reads)
        self.reads = reads

        self._fetch(ddr_granted == 4, jump)
        self.pc, self.r = next_pc, next_r
        for number in takes:
            self.semaphores[number] -= 1
        for number in gives:
            self.semaphores[number] += 1
        for engine, job in enumerate(popped):
            if job is not None:
                self.engines[engine] = self.queues[engine].popleft()
        if appended is not None:
            self.queues[dispatched].append(appended)
        self.t += 1

    def _fetch(self, granted: bool, jump: int | None) -> None:
        pc = self.pc
        bus = self.hardware.ddr_bus_bytes
        flush = jump is not None and jump < max(self.base, self.fetch_end - BUFFER)
        if self.arriving is not None and not flush:
            start, size, units = self.arriving
            reached = start + min(size, units * bus // 64)
            for position in range(self.valid_end, reached):
                self.ring[position % BUFFER] = position
            self.valid_end = reached
        self.arriving = None
        if self.block is None:
            size = min(16, len(self.program) - self.fetch_end)
            if size > 0 and self.fetch_end - pc + size <= BUFFER and jump is None:
                self.block = [self.fetch_end, size, 0]
                self.fetch_wait = ceil(
                    self.hardware.dma_latency
                    * self.hardware.core_clock_mhz
                    / self.hardware.dma_clock_mhz
                )
                self.fetch_end += size
        elif self.fetch_wait:
            self.fetch_wait -= 1
        elif granted:
            self.block[2] += 1
            start, size, units = self.block
            self.arriving = (start, size, units)
            if units == ceil(64 * size / bus):
                self.block = None
        if flush:
            assert jump is not None
            self.base = self.fetch_end = self.valid_end = jump
            self.block = self.arriving = None

    def _arbitrate_ddr(self, requests: list[Access | None]) -> int:
        beats, self.ddr_acc = divmod(
            self.ddr_acc + self.hardware.ddr_clock_mhz, self.hardware.core_clock_mhz
        )
        wanting = [number for number in range(5) if requests[number] is not None]
        if not beats or not wanting:
            return -1
        if self.ddr_lock in wanting:
            chosen = self.ddr_lock
        else:
            chosen = min(wanting, key=lambda number: (number - self.ddr_last - 1) % 5)
        access = requests[chosen]
        assert access is not None
        self.ddr_last = chosen
        after = access.address + self.hardware.ddr_bus_bytes
        locks = chosen < 4 and access.burst and after % self.hardware.dma_burst_size != 0
        self.ddr_lock = chosen if locks else -1
        return chosen

    def _arbitrate_sram(self, requests: list[Access | None]) -> set[int]:
        words = self.hardware.bank_size // self.hardware.sram_word_bytes
        granted: set[int] = set()
        for bank in range(self.hardware.sram_banks):
            wanting = [
                port
                for port, access in enumerate(requests)
                if access is not None and access.address // words == bank
            ]
            if wanting:
                last = self.bank_last[bank]
                chosen = min(wanting, key=lambda port: (port - last - 1) % 9)
                self.bank_last[bank] = chosen
                granted.add(chosen)
        return granted

    def _access_sram(self, requests: list[Access | None], granted: set[int]) -> list[str]:
        word = self.hardware.sram_word_bytes
        reads: list[str] = []
        for port in granted:
            access = requests[port]
            assert access is not None
            start = access.address * word
            if not access.write:
                data = self.sram[start : start + word][::-1].hex()
                reads.append(f"R {port} {data}")
                continue
            for i in range(word):
                if access.mask >> i & 1:
                    self.sram[start + i] = access.data
        return reads

    def _job(self, name: str, fields: dict[str, int]) -> Job:
        fields = dict(fields)
        for address, register in ADDRESSES[name]:
            bits = 40 if address == "ddr" else 24
            total = fields[address] + self.r[fields[register]]
            fields[address] = total & ((1 << bits) - 1)
        job = Job(name, fields)
        word = self.hardware.sram_word_bytes
        full = (1 << word) - 1

        def port(number: int, address: str, count: int, write: bool, masked: bool) -> None:
            job.ports.append(
                Port(
                    number,
                    deque(
                        Access(
                            fields[address] // word + i,
                            write,
                            i & 0xFF,
                            1 << (i & 3) if masked else full,
                        )
                        for i in range(count)
                    ),
                )
            )

        if name in ("dma_load", "dma_store"):
            channel, burst = fields["channel"], not fields["stream"]
            units = deque(
                Access(
                    (fields["ddr"] + i * self.hardware.ddr_bus_bytes) & MASK,
                    name == "dma_store",
                    burst=burst,
                )
                for i in range(fields["n1"] - 1)
            )
            job.ports.append(Port(100 + channel, units))
            port(5 + channel, "sram", fields["n2"] - 1, name == "dma_load", False)
            job.cycles = fields["n3"] - 1
        elif name == "mac_conv":
            port(0, "act", fields["out_h"] - 1, False, False)
            port(1, "wgt", fields["out_w"] - 1, False, False)
            job.cycles = fields["block_rows"] - 1
        else:
            assert name == "vec_copy"
            port(2, "src", fields["n1"] - 1, False, False)
            port(3, "src", fields["n2"] - 1, False, False)
            port(4, "dst", fields["n3"] - 1, True, True)
            job.cycles = fields["n0"] - 1
        return job


def _bits(mask: int) -> list[int]:
    return [number for number in range(32) if mask >> number & 1]


def _mask(values: Sequence[bool]) -> int:
    return sum(value << number for number, value in enumerate(values))
