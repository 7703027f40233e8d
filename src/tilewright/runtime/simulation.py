"""Cycles of a package: its programs on the cycle simulator, one after another."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tilewright.codegen.program import TpuStep
    from tilewright.runtime.runtime import Executor, Package
    from tilewright.sim.cycle_plan import ResizeTables
    from tilewright.sim.retire import CycleResult


@dataclass(frozen=True)
class Simulation:
    """Simulated time of all programs; the host's parts are not timed."""

    programs: dict[str, CycleResult]
    """By name of the TPU step, in order."""
    seconds: float
    """Wall time of the simulation itself."""

    @property
    def cycles(self) -> int:
        """Core cycles of all programs."""
        return sum(result.cycles for result in self.programs.values())

    def total(self, counter: str) -> int:
        """Return a per-layer counter summed over all programs (`spec.counters`)."""
        return sum(result.totals[counter] for result in self.programs.values())

    @property
    def ddr_bytes(self) -> int:
        """Bytes DDR moves: data in whole granules, and code."""
        return self.total("ddr_bytes") + sum(r.fetch_bytes for r in self.programs.values())


def tables_of(executor: Executor, step: TpuStep) -> Sequence[ResizeTables] | None:
    """Return the indices each `vec_resize` of a program finds; None when it has no such.

    They are constants of the model, which loads bring to SRAM: no input is needed.
    """
    from tilewright.sim.cycle_tables import resize_tables

    code = executor.code(step)
    if not any(instr.name == "vec_resize" for instr in code):
        return None
    return resize_tables(executor.target, code, executor.ddr, registers=executor.registers)


def simulate(package: Package) -> Simulation:
    """Simulate every program of a package.

    Raises:
        TilewrightError: E0602 when a program breaks a limit or deadlocks.
    """
    from tilewright.sim.cycle import CycleSimulator

    executor = package.executor
    simulator = CycleSimulator(executor.target)
    start = time.perf_counter()
    programs = {
        step.name: simulator.run(
            executor.code(step), registers=executor.registers, tables=tables_of(executor, step)
        )
        for step in executor.program.tpu_steps
    }
    return Simulation(programs, time.perf_counter() - start)


def write_trace(simulation: Simulation, package: Package, path: Path) -> None:
    """Write a trace for https://ui.perfetto.dev; programs follow each other on one time line."""
    import json

    from tilewright.sim.trace import trace_events

    target = package.content.target
    events: list[dict[str, object]] = []
    base = 0.0
    for result in simulation.programs.values():
        for event in trace_events(result, target):
            if event["ph"] != "M":
                event["ts"] = event["ts"] + base
            elif base:
                continue  # tracks are named once
            events.append(event)
        base += result.cycles / target.core_clock_mhz
    content = {"traceEvents": events, "displayTimeUnit": "ns"}
    path.write_text(json.dumps(content, separators=(",", ":")), "utf-8")
