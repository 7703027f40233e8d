"""Runs a compiled model with its programs on the RTL, each compared with both simulators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright.codegen.program import Program, TpuStep
from tilewright.cosim.compare import Comparison, compare_program
from tilewright.cosim.driver import RtlSimulator
from tilewright.diagnostics import TilewrightError
from tilewright.runtime.runtime import Executor, Hook
from tilewright.spec.program import Instr
from tilewright.waves.difference import Difference, first_difference

Array = npt.NDArray[Any]


class CosimExecutor(Executor):
    """An executor whose DDR is that of the RTL."""

    def __init__(
        self,
        program: Program,
        simulator: RtlSimulator,
        segment: str | None = None,
        max_cycles: int | None = None,
    ) -> None:
        super().__init__(program, simulator.hardware)
        self.simulator = simulator
        self.segment = segment
        """The only program that runs on the RTL; all when None."""
        self.max_cycles = max_cycles
        self.comparisons: dict[str, Comparison] = {}
        """By program, in the order run."""
        self.traced: dict[str, TracedDifference] = {}
        """What the trace shows of a program whose values differ."""

    def _tpu(self, step: TpuStep, hook: Hook | None) -> None:
        if self.segment not in (None, step.name):
            super()._tpu(step, hook)
            return
        # The trace is compared with a run of the program from what DDR held before.
        before = self.ddr.copy() if self.simulator.trace else None
        found = self.comparisons[step.name] = compare_program(
            self.simulator,
            step.code,
            self.ddr,
            registers=self.registers,
            layers=step.layers,
            max_cycles=self.max_cycles,
        )
        if before is not None and not found.same_values:
            self.traced[step.name] = _traced(
                self.simulator, self.code(step), before, self.registers
            )


@dataclass(frozen=True)
class TracedDifference:
    """What the trace of a run whose values differ shows."""

    difference: Difference | None
    note: str = ""
    """Why there is no difference to show."""

    def lines(self) -> list[str]:
        """Return what to tell a user."""
        if self.difference is None:
            return [f"the trace does not tell where it began: {self.note}"]
        first, *rest = self.difference.lines()
        return [f"first in the trace: {first}", *rest]


def _traced(
    simulator: RtlSimulator, code: list[Instr], ddr: Array, registers: Mapping[int, int]
) -> TracedDifference:
    """Look for the first wrong write in the trace of a run."""
    assert simulator.trace is not None
    if simulator.trace_from:
        return TracedDifference(None, f"it begins in cycle {simulator.trace_from}, not 0")
    try:
        found = first_difference(
            simulator.trace, code, simulator.hardware, ddr, registers=registers
        )
    except TilewrightError as error:
        # No library to read it, or a chip with other ports: the comparison stands all the same.
        parts = [error.message, *error.details, *([error.hint] if error.hint else [])]
        return TracedDifference(None, "; ".join(parts))
    return TracedDifference(found, "" if found else "no write in it is wrong")


@dataclass(frozen=True)
class ModelComparison:
    """A model on the RTL and on the simulators."""

    programs: dict[str, Comparison]
    outputs: dict[str, bool]
    """Whether each output equals that of a run on the functional simulator alone, bit for bit."""
    traced: dict[str, TracedDifference] = field(default_factory=dict[str, TracedDifference])
    """By program whose values differ, when there is a trace."""

    @property
    def equal(self) -> bool:
        """Whether values, times and outputs are equal."""
        programs = self.programs.values()
        return all(item.equal for item in programs) and all(self.outputs.values())


def compare_model(
    program: Program,
    simulator: RtlSimulator,
    inputs: Mapping[str, Array],
    *,
    segment: str | None = None,
    max_cycles: int | None = None,
) -> ModelComparison:
    """Run a model once on the RTL and once without it.

    Raises:
        TilewrightError: as `compare_program` and `Executor.run`.
    """
    executor = CosimExecutor(program, simulator, segment, max_cycles)
    found = executor.run(inputs)
    expected = Executor(program, simulator.hardware).run(inputs)
    outputs = {name: _same(found[name], array) for name, array in expected.items()}
    return ModelComparison(executor.comparisons, outputs, executor.traced)


def _same(first: Array, second: Array) -> bool:
    return np.asarray(first).tobytes() == np.asarray(second).tobytes()
