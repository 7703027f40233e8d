"""The cycle simulator: every cycle of docs/concepts/microarchitecture.md. Values are not computed.

What the machine does in a cycle stands in `cycle_kernel.py`; here a program is brought into its
arrays, run, and its log read back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.diagnostics import TilewrightError
from tilewright.sim.retire import CycleResult, Measured, collect
from tilewright.sim.state import machine_error
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

if TYPE_CHECKING:
    from tilewright.sim.cycle_plan import Plans, ResizeTables

CHUNK = 1 << 25
"""Cycles between two returns from compiled code, so that a run can be interrupted."""
LAST_PORT, LAST_REQUESTER = 8, 4
"""Who was granted last when the machine starts: port 0 and channel 0 come first."""


@dataclass(frozen=True)
class CycleSimulator:
    """Times programs of one target."""

    hardware: Hardware
    skip_ahead: bool = True
    """Skip cycles in which only counters run; without it the same is simulated more slowly."""

    def run(
        self,
        code: bytes | Sequence[Instr],
        *,
        registers: Mapping[int, int] | None = None,
        tables: Sequence[ResizeTables] | None = None,
    ) -> CycleResult:
        """Simulate a program to its `halt`.

        Args:
            code: encoded or decoded instructions.
            registers: initial R registers.
            tables: row and column indices that each `vec_resize` finds in its tables, in order of
                dispatch (`cycle_tables.resize_tables`). They decide which words it reads; without
                them they are taken to be those of an even resize.

        Raises:
            TilewrightError: E0602 if an instruction breaks a limit, a semaphore overflows, or the
                program deadlocks; each engine's blocked instruction is named.
        """
        # Compiled code is loaded on first use only: numba takes a while to import.
        from tilewright.sim.cycle_plan import make_plans

        program = as_program(code)
        stream = list(sequence(program, self.hardware.scalar_registers, registers))
        plans = make_plans(self.hardware, stream, tables)
        run = _Run(self.hardware, stream, plans, len(program))
        return run.execute(self.skip_ahead)


class _Run:
    """The state of a run, in the arrays of the kernel."""

    def __init__(
        self, hardware: Hardware, stream: list[Dispatched], plans: Plans, length: int
    ) -> None:
        from tilewright.sim import cycle_state as kernel
        from tilewright.sim.cycle_plan import hardware_row

        self.hardware, self.stream, self.plans = hardware, stream, plans
        zeros = np.zeros
        integer = np.int64
        self.scalars = zeros(kernel.SCALARS, integer)
        self.scalars[kernel.S_LAST] = LAST_REQUESTER
        self.scalars[kernel.S_LOCK] = self.scalars[kernel.S_F_ARRIVING] = -1
        self.constants = hardware_row(hardware, length)
        self.state, self.wake, self.current = (zeros(SEQ, integer) for _ in range(3))
        self.dma = zeros(4 * kernel.ENGINE_COLUMNS, integer)
        self.mac, self.vec = (zeros(kernel.ENGINE_COLUMNS, integer) for _ in range(2))
        self.ready = zeros(kernel.READY, integer)
        self.ring = zeros(SEQ * hardware.queue_depth, integer)
        self.queue = zeros(SEQ * 2, integer)
        self.semaphores = zeros(32, integer)
        self.banks = np.full(64, LAST_PORT, integer)
        self.scratch = [zeros(16, integer) for _ in range(5)]
        self.lost = zeros(SEQ * 3, integer)
        self.profile = zeros(kernel.WINDOWS, integer)
        self.sequencer = zeros(4, integer)
        self.result = zeros((kernel.RESULT_ROWS, len(stream)), integer)

    def execute(self, skip: bool) -> CycleResult:
        from tilewright.sim import cycle_kernel
        from tilewright.sim import cycle_state as kernel

        # numba has no types for what it compiles.
        simulate: Any = cycle_kernel.simulate
        plans = self.plans
        arrays = (
            self.scalars, self.constants, plans.rows.reshape(-1), plans.plan, plans.engine,
            plans.wait, plans.signal, plans.index, plans.table_at, plans.tables, self.state,
            self.wake, self.current, self.dma, self.mac, self.vec, self.ready, self.ring,
            self.queue, self.semaphores, self.banks, self.lost, self.profile, self.sequencer,
            self.result.reshape(-1), *self.scratch,
        )  # fmt: skip
        for array in arrays:
            assert array.dtype == np.int64, "the kernel knows only their addresses"
            assert array.flags.c_contiguous
        addresses = np.array([array.ctypes.data for array in arrays], np.int64)
        lengths = np.array([array.size for array in arrays], np.int64)
        until = status = 0
        while status == kernel.RUNNING:
            until += CHUNK
            status = simulate(addresses, lengths, until, skip)
        if status == kernel.OVERFLOW:
            item = self.stream[self.scalars[kernel.S_ERROR]]
            number = self.scalars[kernel.S_SEMAPHORE]
            raise machine_error(item, f"semaphore {number} overflows 65535", [])
        if status == kernel.DEADLOCK:
            raise self._deadlock()
        return self._collect()

    def _collect(self) -> CycleResult:
        from tilewright.sim import cycle_state as kernel

        result = self.result
        granule = self.hardware.ddr_bus_bytes
        cycles = int(self.scalars[kernel.S_T])
        width, profile = 1 << int(self.scalars[kernel.S_SHIFT]), self.profile
        while cycles > width * profile.size:
            profile, width = profile.reshape(-1, 2).sum(axis=1), 2 * width
            profile = np.concatenate((profile, np.zeros_like(profile)))
        time = np.arange(0, cycles, width, dtype=np.int64)
        lengths = np.minimum(cycles - time, width)
        rates = profile[: time.size] / lengths
        keys = ("busy", "wait_queue", "wait_fetch", "wait_engines")
        measured = Measured(
            issue=result[kernel.O_ISSUE],
            start=result[kernel.O_START],
            end=result[kernel.O_END],
            wait_accumulator=result[kernel.O_ACCUMULATOR],
            wait_ddr=result[kernel.O_DDR],
            wait_bank=result[kernel.O_BANK],
            ddr_bytes=result[kernel.O_UNITS] * granule,
            sequencer=dict(zip(keys, self.sequencer.tolist(), strict=True)),
            fetch_bytes=int(self.scalars[kernel.S_F_UNITS]) * granule,
            ddr_time=np.append(time, cycles).astype(np.float64),
            ddr_rate=np.append(rates, 0.0),
        )
        work = [self.plans.work[row] for row in self.plans.plan.tolist()]
        return collect(self.stream, work, measured, cycles)

    def _deadlock(self) -> TilewrightError:
        from tilewright.sim import cycle_state as kernel

        details: list[str] = []
        for engine in range(SEQ):
            running = bool(self.state[engine])
            if not running and not self.queue[2 * engine + 1]:
                continue
            first = engine * self.hardware.queue_depth + self.queue[2 * engine]
            head = self.current[engine] if running else self.ring[first]
            item = self.stream[head]
            f = item.fields
            if running:
                why = self._stuck(engine, f)
            else:
                missing = f["wait"] & ~int(self.scalars[kernel.S_AVAILABLE])
                numbers = [str(bit) for bit in range(32) if missing >> bit & 1]
                why = f"waits for semaphore {', '.join(numbers)}"
            details.append(
                f"{ENGINE_NAMES[engine]}: instruction {item.index} ({item.name}) of layer "
                f'"{item.layer}" {why}'
            )
        item = self.stream[self.scalars[kernel.S_NEXT]]
        return machine_error(item, "deadlock: no engine can go on", details)

    def _stuck(self, engine: int, f: Mapping[str, int]) -> str:
        """Return what a started instruction waits for: only the other side of the M registers."""
        from tilewright.sim import cycle_state as kernel

        assert engine in (MAC, VEC), "DMA moves on its own"
        blocks = -(-f["out_h"] // f["block_rows"])
        if engine == MAC:
            block = self.mac[kernel.A_OB] * blocks + self.mac[kernel.A_PB]
            return f"waits for an emptied half of the M registers at block {block}"
        block = self.vec[kernel.U_3] * blocks + self.vec[kernel.U_2] // f["block_rows"]
        return f"waits for a pushed half of the M registers at block {block}"
