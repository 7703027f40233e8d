"""The DMA channel of docs/concepts/microarchitecture.md, written down as plainly as possible.

Lists of runs, (run, unit) pairs and chunks are made first; a loop over cycles then works them off.
It writes the same lines as the harness (dma_bench.cpp), so that two logs can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.spec.hardware import Hardware

Fields = dict[str, int]
TICK, DDR_FREE, SRAM_FREE = 1, 2, 4
"""Bits of a schedule's cycle: DMA tick, DDR may grant, SRAM may grant."""
FIFO_UNITS = 4


@dataclass
class Memory:
    """A memory behind a port; addresses beyond its window come round again."""

    content: bytearray
    base: int = 0

    def read(self, address: int) -> int:
        """Return a byte."""
        return self.content[(address - self.base) % len(self.content)]

    def write(self, address: int, value: int) -> None:
        """Set a byte."""
        self.content[(address - self.base) % len(self.content)] = value


@dataclass(frozen=True)
class Job:
    """An instruction and the cycles after the last one's end until it is offered."""

    name: str
    fields: Fields
    gap: int = 0


@dataclass(frozen=True)
class Run:
    """A run: where it is written, and read (None: padding or fill)."""

    to: int
    source: int | None


@dataclass(frozen=True)
class Chunk:
    """Bytes that move in one cycle."""

    source_unit: int | None
    sink_unit: int
    to: int
    data: bytes


@dataclass
class Collected:
    """A sink unit with the bytes it has so far."""

    unit: int
    data: dict[int, int]


def runs(name: str, f: Fields) -> list[Run]:
    """Return an instruction's runs in order."""
    if name == "dma_fill":
        return [
            Run(f["sram"] + i2 * f["sram_s2"] + i1 * f["sram_s1"], None)
            for i2 in range(f["n2"])
            for i1 in range(f["n1"])
        ]
    padded = name == "dma_load"
    low1, high1 = (f["pad1_lo"], f["pad1_hi"]) if padded else (0, 0)
    low2, high2 = (f["pad2_lo"], f["pad2_hi"]) if padded else (0, 0)
    result: list[Run] = []
    for i3 in range(f["n3"]):
        for row in range(low2 + f["n2"] + high2):
            for column in range(low1 + f["n1"] + high1):
                i2, i1 = row - low2, column - low1
                sram = f["sram"] + i3 * f["sram_s3"] + row * f["sram_s2"] + column * f["sram_s1"]
                ddr = f["ddr"] + i3 * f["ddr_s3"] + i2 * f["ddr_s2"] + i1 * f["ddr_s1"]
                inside = 0 <= i2 < f["n2"] and 0 <= i1 < f["n1"]
                if name == "dma_store":
                    result.append(Run(ddr, sram))
                else:
                    result.append(Run(sram, ddr if inside else None))
    return result


def units(address: int, count: int, unit: int) -> list[int]:
    """Return the addresses of the aligned units that `count` bytes touch."""
    return list(range(address // unit * unit, address + count, unit))


class Channel:
    """One DMA channel with its memories; `log` is what a harness would see."""

    def __init__(self, hardware: Hardware, ddr: Memory, sram: Memory, schedule: bytes) -> None:
        self.hardware = hardware
        self.ddr = ddr
        self.sram = sram
        self.schedule = schedule
        self.log: list[str] = []
        self.free_at = 0
        """Cycle in which the channel is IDLE again."""

    def latency(self, job: Job) -> int:
        """Return the core cycles of LAT."""
        cycles = self.hardware.dma_latency
        if job.name != "dma_fill" and job.fields["stream"]:
            cycles *= self.hardware.dma_stream_latency_factor
        return -(-cycles * self.hardware.core_clock_mhz // self.hardware.dma_clock_mhz)

    def chunks(self, job: Job, source: Memory, source_unit: int, sink_unit: int) -> list[Chunk]:
        """Return the chunks in order, with their bytes."""
        result: list[Chunk] = []
        for run in runs(job.name, job.fields):
            done = 0
            while done < job.fields["n0"]:
                to = run.to + done
                size = min(job.fields["n0"] - done, sink_unit - to % sink_unit)
                unit = None
                if run.source is None:
                    data = bytes([job.fields["fill"]]) * size
                else:
                    at = run.source + done
                    size = min(size, source_unit - at % source_unit)
                    unit = at // source_unit * source_unit
                    data = bytes(source.read(at + i) for i in range(size))
                result.append(Chunk(unit, to // sink_unit * sink_unit, to, data))
                done += size
        return result

    def execute(self, job: Job) -> None:
        """Execute one instruction."""
        start = self.free_at + job.gap
        self.log.append(f"{start} pop")
        self.log.append(f"{start + 1} busy")
        store = job.name == "dma_store"
        word, granule = self.hardware.sram_word_bytes, self.hardware.ddr_bus_bytes
        source, sink = (self.sram, self.ddr) if store else (self.ddr, self.sram)
        source_unit, sink_unit = (word, granule) if store else (granule, word)
        pairs = [
            unit
            for run in runs(job.name, job.fields)
            if run.source is not None
            for unit in units(run.source, job.fields["n0"], source_unit)
        ]
        chunks = self.chunks(job, source, source_unit, sink_unit)
        burst = " burst" if "stream" in job.fields and not job.fields["stream"] else ""

        pair = moved = 0
        fifo: list[int] = []
        arriving: int | None = None
        held: int | None = None
        collector: Collected | None = None
        output: Collected | None = None
        budget = bus = self.hardware.dma_bus_bytes
        t = start + 1
        while True:
            now = self.schedule[t % len(self.schedule)]
            ddr_free, sram_free = bool(now & DDR_FREE), bool(now & SRAM_FREE)
            source_free, sink_free = (sram_free, ddr_free) if store else (ddr_free, sram_free)
            lines: dict[str, str] = {}
            source_name, sink_name = ("sram", "ddr") if store else ("ddr", "sram")

            # Source.
            requested: int | None = None
            next_pair = pair
            if t >= start + 1 + self.latency(job) and pair < len(pairs):
                unit = pairs[pair]
                if pair and pairs[pair - 1] == unit:
                    next_pair = pair + 1
                elif len(fifo) + (arriving is not None) < FIFO_UNITS:
                    marks = " read" + (burst if source is self.ddr else "")
                    if source_free:
                        requested = unit
                        next_pair = pair + 1
                        marks += " granted"
                    lines[source_name] = f"{t} {source_name}{marks} {unit:x}"

            # Sink.
            if output is not None:
                marks = " write" + (burst if sink is self.ddr else "")
                marks += " granted" if sink_free else ""
                data = [output.data.get(output.unit + i) for i in range(sink_unit)]
                text = "".join("--" if byte is None else f"{byte:02x}" for byte in data)
                lines[sink_name] = f"{t} {sink_name}{marks} {output.unit:x} {text}"
            self.log += [lines[name] for name in ("sram", "ddr") if name in lines]
            granted = output is not None and sink_free
            can_pass = output is None or granted
            all_moved = moved == len(chunks)
            if granted and all_moved and collector is None:
                assert output is not None
                for address, byte in output.data.items():
                    sink.write(address, byte)
                self.log.append(f"{t} done {job.fields['signal']}")
                self.log.append(f"{t + 1} idle")
                self.free_at = t + 1
                return

            # Mover.
            chunk = None if all_moved else chunks[moved]
            in_data = t >= start + 1 + self.latency(job)
            same_unit = (
                chunk is not None and collector is not None and collector.unit == chunk.sink_unit
            )
            moves = (
                in_data
                and chunk is not None
                and budget > 0
                and (chunk.source_unit in (None, held) or bool(fifo))
                and (collector is None or same_unit or can_pass)
            )
            passes = collector is not None and can_pass and (all_moved or (moves and not same_unit))

            # The state of the next cycle.
            if granted:
                assert output is not None
                for address, byte in output.data.items():
                    sink.write(address, byte)
                output = None
            if passes:
                output, collector = collector, None
            if moves:
                assert chunk is not None
                if chunk.source_unit not in (None, held):
                    held = fifo.pop(0)
                    assert held == chunk.source_unit
                if collector is None:
                    collector = Collected(chunk.sink_unit, {})
                collector.data.update({chunk.to + i: byte for i, byte in enumerate(chunk.data)})
                budget -= len(chunk.data)
                moved += 1
            if now & TICK:
                budget += bus
            budget = min(budget, bus)
            if arriving is not None:
                fifo.append(arriving)
            arriving = requested
            pair = next_pair
            t += 1
