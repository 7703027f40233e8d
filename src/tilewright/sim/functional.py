"""The functional simulator: the definition of what programs compute, bit for bit.

Instructions are executed whole, vectorised over their tile; `mac.py` and `vector.py` hold what each
does. Here is when: engines with in-order queues, semaphores, and the handshake of the M registers'
halves. A correctly synchronised program gives the same bytes in every legal order; `order="random"`
picks one by a seed (block by block for `mac_conv` and `vec_drain`), to show a missing wait.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from tilewright.diagnostics import TilewrightError
from tilewright.sim import mac, vector
from tilewright.sim.legality import checker
from tilewright.sim.state import MAX_ELEMENTS, MachineError, PushGroup, State, machine_error
from tilewright.spec.hardware import Hardware
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

SEMAPHORE_MAX = 65535
Order = Literal["program", "random"]
Hook = Callable[[Dispatched, State], None]

_PAIRED = ("dtype", "out_h", "out_w", "block_rows", "oc_blocks", "cols_last", "m_half")
"""Fields a `vec_drain` has in common with the `mac_conv` it drains."""


@dataclass
class _Running:
    """The instruction an engine is executing."""

    instr: Dispatched
    blocks: int
    done: int = 0
    group: PushGroup | None = None


@dataclass(frozen=True)
class FunctionalResult:
    """What a run leaves."""

    ddr: npt.NDArray[np.uint8]
    """DDR's content; the array that was given, changed in place."""
    instructions: int
    """Instructions dispatched, loops unrolled."""
    macs: int
    """Multiply-accumulates of all `mac_conv`s."""


@dataclass(frozen=True)
class FunctionalSimulator:
    """Executes programs of one target."""

    hardware: Hardware

    def run(
        self,
        code: bytes | Sequence[Instr],
        ddr: npt.NDArray[np.uint8],
        *,
        registers: Mapping[int, int] | None = None,
        order: Order = "program",
        seed: int = 0,
        hook: Hook | None = None,
    ) -> FunctionalResult:
        """Run a program to its `halt`.

        Args:
            code: encoded or decoded instructions.
            ddr: all of DDR that exists, uint8, contiguous, changed in place.
            registers: initial R registers (by convention R1 constants, R2 workspace).
            order: program order, or a random legal order of the engines.
            seed: of the random order.
            hook: called after each instruction of an engine has completed, with the state.

        Raises:
            TilewrightError: E0602 naming instruction, engine and layer, when the program breaks a
                rule of the machine or deadlocks.
        """
        if ddr.dtype != np.uint8 or ddr.ndim != 1 or not ddr.flags.c_contiguous:
            raise ValueError("ddr must be a contiguous one-dimensional uint8 array")
        run = _Run(self.hardware, ddr, hook, None if order == "program" else random.Random(seed))
        program = as_program(code)
        # A tile's product is small: handing it to a second thread costs more than it saves.
        with threadpool_limits(1, "blas"):
            return run.execute(sequence(program, self.hardware.scalar_registers, registers))


@dataclass
class _Run:
    hardware: Hardware
    ddr: npt.NDArray[np.uint8]
    hook: Hook | None
    rng: random.Random | None
    semaphores: list[int] = field(init=False)
    queues: list[deque[Dispatched]] = field(init=False)
    running: list[_Running | None] = field(init=False)
    count: int = 0
    unfinished: int = 0
    """Instructions queued or running."""
    macs: int = 0

    def __post_init__(self) -> None:
        self.state = State(self.hardware, self.ddr)
        self.checker = checker(self.hardware)
        self.semaphores = [0] * 32
        self.queues = [deque() for _ in range(SEQ)]
        self.running = [None] * SEQ

    def execute(self, instructions: Any) -> FunctionalResult:
        for instr in instructions:
            self.count += 1
            self.checker.check(instr)
            if instr.engine == SEQ:
                self._sequencer(instr)
                continue
            queue = self.queues[instr.engine]
            while len(queue) >= self.hardware.queue_depth:
                if not self._step():
                    raise self._deadlock(instr, f"{ENGINE_NAMES[instr.engine]}'s queue is full")
            queue.append(instr)
            self.unfinished += 1
            self._advance()
        return FunctionalResult(self.ddr, self.count, self.macs)

    def _advance(self) -> None:
        """Let the engines work: as far as they get, or (random order) a random number of steps."""
        if self.rng is None:
            while self.unfinished and self._step():
                pass
            return
        while self.rng.random() < 0.5 and self._step():
            pass

    def _sequencer(self, instr: Dispatched) -> None:
        fields = instr.fields
        while not self._available(fields["wait"]):
            if not self._step():
                raise self._deadlock(instr, "it waits for a semaphore")
        self._take(fields["wait"])
        if instr.name in ("fence", "halt"):
            while self._step():
                pass
            if self.unfinished:
                raise self._deadlock(instr, "it waits for all engines")
        if instr.name == "halt" and self.state.groups:
            raise machine_error(
                instr, f"{len(self.state.groups)} pushed mac_conv were never drained", []
            )
        self._signal(instr)

    def _step(self) -> bool:
        """Execute one step of one engine; return False if none can."""
        engines = [engine for engine in range(SEQ) if self.queues[engine] or self.running[engine]]
        if self.rng is not None:
            self.rng.shuffle(engines)
        elif len(engines) > 1:
            engines.sort(key=self._age)
        return any(self._try(engine) for engine in engines)

    def _age(self, engine: int) -> int:
        running = self.running[engine]
        return running.instr.index if running is not None else self.queues[engine][0].index

    def _try(self, engine: int) -> bool:
        running = self.running[engine]
        started = running is None
        if running is None:
            instr = self.queues[engine][0]
            if not self._available(instr.fields["wait"]):
                return False
            if instr.name == "vec_drain" and not self.state.groups:
                return False
            self.queues[engine].popleft()
            self._take(instr.fields["wait"])
            try:
                running = self._start(instr)
            except MachineError as error:
                raise machine_error(instr, str(error), error.details, error.code) from error
            if running is None:
                self._complete(instr)
                return True
            self.running[engine] = running
            if engine == VEC and self.rng is None:
                self._skip_handshake(running)
        block = self._mac_block if engine == MAC else self._drain_block
        try:
            moved = block(running)
            if self.rng is None:
                # As far as it gets at once: nothing else can change what these blocks compute.
                while moved and running.done < running.blocks and block(running):
                    pass
        except MachineError as error:
            raise machine_error(running.instr, str(error), error.details, error.code) from error
        if moved and running.done == running.blocks:
            self.running[engine] = None
            self._complete(running.instr)
        # Starting is progress too, even when the first block has to wait.
        return moved or started

    def _start(self, instr: Dispatched) -> _Running | None:
        """Execute an atomic instruction, or set up one of several blocks."""
        if instr.name in vector.ATOMIC:
            vector.ATOMIC[instr.name](self.state, instr.fields)
            return None
        f = instr.fields
        if instr.engine == VEC:
            return self._start_drain(instr)
        columns = mac.columns(f, 0, f["oc_blocks"])
        pixels = f["out_h"] * f["out_w"]
        if pixels * columns > MAX_ELEMENTS:
            raise MachineError(
                f"{pixels} pixels x {columns} columns are more than the simulator handles at once "
                f"({MAX_ELEMENTS})"
            )
        depth = f["k_h"] * f["k_w"]
        depth *= f["c_blocks"] if f["diag"] else (f["c_blocks"] - 1) * f["c_rows"] + f["c_last"]
        self.macs += pixels * columns * depth
        dtype = np.float32 if f["dtype"] == mac.FP16 else np.int32
        if self.rng is None and not f["accumulate"]:
            acc = mac.convolve(self.state, f, 0, f["oc_blocks"], 0, f["out_h"], None)
        else:
            acc = np.empty((pixels, columns), dtype)
        return _Running(instr, mac.block_count(f), group=PushGroup(f, acc))

    def _start_drain(self, instr: Dispatched) -> _Running:
        group = self.state.groups[0]
        f = instr.fields
        names = (*_PAIRED, "cols") if f["oc_blocks"] > 1 else _PAIRED
        for name in names:
            if name == "dtype" and (f[name] == mac.FP16) == (group.fields[name] == mac.FP16):
                continue  # int4 is a type of weights: it is drained as int8
            if f[name] != group.fields[name]:
                raise MachineError(
                    f"{name} must be {group.fields[name]} as in the mac_conv it drains, "
                    f"not {f[name]}"
                )
        return _Running(instr, mac.block_count(f), group=group)

    def _mac_block(self, running: _Running) -> bool:
        f, block, group = running.instr.fields, running.done, running.group
        assert group is not None
        half = self.state.halves[f["m_half"] ^ (block & 1)]
        if half.full:
            return False
        if self.rng is not None or f["accumulate"] or not f["push"]:
            ob, row, rows = mac.block_place(f, block)
            width = mac.columns(f, ob, 1)
            pixels = slice(row * f["out_w"], (row + rows) * f["out_w"])
            target = group.acc[pixels, ob * f["cols"] : ob * f["cols"] + width]
            if self.rng is not None or f["accumulate"]:
                start = mac.kept_start(self.state, f, block)
                target[...] = mac.convolve(self.state, f, ob, 1, row, rows, start)
            if not f["push"]:
                half.kept = target
        running.done += 1
        if not f["push"]:
            return True
        half.kept = None
        half.full = True
        if block == 0:
            self.state.groups.append(group)
        group.pushed += 1
        return True

    def _drain_block(self, running: _Running) -> bool:
        f, group = running.instr.fields, running.group
        assert group is not None
        if running.done == group.pushed:
            return False
        if self.rng is not None:
            ob, row, rows = mac.block_place(f, running.done)
            vector.drain(self.state, f, group, ob, 1, row, rows)
        elif running.done == running.blocks - 1:
            vector.drain(self.state, f, group, 0, f["oc_blocks"], 0, f["out_h"])
        self.state.halves[f["m_half"] ^ (running.done & 1)].full = False
        running.done += 1
        group.drained += 1
        if running.done == running.blocks:
            self.state.groups.pop(0)
        return True

    def _skip_handshake(self, drain: _Running) -> None:
        """Complete the `mac_conv` that a starting `vec_drain` drains, and leave its last blocks.

        All full halves hold blocks of theirs, so that nothing but these two instructions decides
        how they go on: in turn, to their ends.
        """
        conv = self.running[MAC]
        if conv is None or conv.group is not drain.group or conv.instr.fields["accumulate"]:
            return
        assert drain.group is not None
        drain.done = drain.group.drained = drain.blocks - 2
        drain.group.pushed = drain.blocks
        for half in self.state.halves:
            half.full, half.kept = True, None
        self.running[MAC] = None
        self._complete(conv.instr)

    def _available(self, mask: int) -> bool:
        while mask:
            bit = mask & -mask
            if not self.semaphores[bit.bit_length() - 1]:
                return False
            mask ^= bit
        return True

    def _take(self, mask: int) -> None:
        while mask:
            bit = mask & -mask
            self.semaphores[bit.bit_length() - 1] -= 1
            mask ^= bit

    def _complete(self, instr: Dispatched) -> None:
        self.unfinished -= 1
        self._signal(instr)
        if self.hook is not None:
            self.hook(instr, self.state)

    def _signal(self, instr: Dispatched) -> None:
        mask = instr.fields["signal"]
        while mask:
            bit = mask & -mask
            number = bit.bit_length() - 1
            self.semaphores[number] += 1
            if self.semaphores[number] > SEMAPHORE_MAX:
                raise machine_error(instr, f"semaphore {number} overflows {SEMAPHORE_MAX}", [])
            mask ^= bit

    def _deadlock(self, instr: Dispatched, why: str) -> TilewrightError:
        details: list[str] = []
        for engine in range(SEQ):
            running = self.running[engine]
            blocked = running.instr if running is not None else None
            if blocked is None and self.queues[engine]:
                blocked = self.queues[engine][0]
            if blocked is None:
                continue
            details.append(
                f"{ENGINE_NAMES[engine]}: instruction {blocked.index} ({blocked.name}) of layer "
                f'"{blocked.layer}" {self._reason(blocked, running)}'
            )
        return machine_error(instr, f"deadlock: {why}", details)

    def _reason(self, blocked: Dispatched, running: _Running | None) -> str:
        if running is not None:
            what = "an emptied half of the M registers" if blocked.engine == MAC else "a pushed one"
            return f"waits for {what} at block {running.done}"
        missing = [
            number
            for number in range(32)
            if blocked.fields["wait"] >> number & 1 and not self.semaphores[number]
        ]
        if missing:
            return f"waits for semaphore {', '.join(map(str, missing))}"
        return "waits for a mac_conv to push"
