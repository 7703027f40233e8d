"""The counters of the machine; simulator, trace, report and RTL registers are views of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Scope(Enum):
    """What a counter is kept for."""

    ENGINE = "engine"
    """Per engine and per layer on each engine."""
    SEQUENCER = "sequencer"
    LAYER = "layer"
    """Per layer, and for the whole program."""


@dataclass(frozen=True)
class Counter:
    """A counter."""

    name: str
    scope: Scope
    unit: str
    doc: str


COUNTERS: tuple[Counter, ...] = (
    Counter("busy", Scope.ENGINE, "cycles", "Doing work; waits inside an instruction left out."),
    Counter(
        "wait_semaphore",
        Scope.ENGINE,
        "cycles",
        "An instruction is at the head of the queue, the engine free, a semaphore zero.",
    ),
    Counter(
        "wait_accumulator",
        Scope.ENGINE,
        "cycles",
        "MAC: the half of the M registers is not free. Vector unit: the block is not full, and "
        "nothing else of it moved.",
    ),
    Counter(
        "wait_ddr",
        Scope.ENGINE,
        "cycles",
        "DDR did not grant its request: slower than the channel, or shared; no wait for a bank.",
    ),
    Counter("wait_bank", Scope.ENGINE, "cycles", "An SRAM bank did not grant one of its requests."),
    Counter(
        "idle",
        Scope.ENGINE,
        "cycles",
        "The queue is empty, or an instruction is taken from it (a cycle each).",
    ),
    Counter("busy", Scope.SEQUENCER, "cycles", "Instructions dispatched."),
    Counter("wait_queue", Scope.SEQUENCER, "cycles", "An engine's queue is full."),
    Counter("wait_fetch", Scope.SEQUENCER, "cycles", "The next instruction is not fetched yet."),
    Counter("wait_engines", Scope.SEQUENCER, "cycles", "A fence, halt or own wait mask."),
    Counter("instructions", Scope.LAYER, "instructions", "Dispatched, loops unrolled."),
    Counter("bytes_loaded", Scope.LAYER, "bytes", "Useful bytes from DDR to SRAM."),
    Counter("bytes_stored", Scope.LAYER, "bytes", "Useful bytes from SRAM to DDR."),
    Counter("ddr_bytes", Scope.LAYER, "bytes", "Moved by DDR: units whole, no code."),
    Counter("useful_macs", Scope.LAYER, "MACs", "Multiply-accumulates asked for."),
    Counter(
        "padded_macs", Scope.LAYER, "MACs", "The same with every array cell of a step counted."
    ),
    Counter("start", Scope.LAYER, "cycle", "The layer's first instruction starts."),
    Counter("end", Scope.LAYER, "cycle", "Its last instruction has completed."),
)


def names(scope: Scope) -> tuple[str, ...]:
    """Return the names of the counters of a scope, in order of the table."""
    return tuple(counter.name for counter in COUNTERS if counter.scope is scope)
