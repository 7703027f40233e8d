"""Runs a compiled model with its programs on the RTL, each compared with both simulators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright.codegen.program import Program, TpuStep
from tilewright.cosim.compare import Comparison, compare_program
from tilewright.cosim.driver import RtlSimulator
from tilewright.runtime.runtime import Executor, Hook

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

    def _tpu(self, step: TpuStep, hook: Hook | None) -> None:
        if self.segment not in (None, step.name):
            super()._tpu(step, hook)
            return
        self.comparisons[step.name] = compare_program(
            self.simulator,
            step.code,
            self.ddr,
            registers=self.registers,
            layers=step.layers,
            max_cycles=self.max_cycles,
        )


@dataclass(frozen=True)
class ModelComparison:
    """A model on the RTL and on the simulators."""

    programs: dict[str, Comparison]
    outputs: dict[str, bool]
    """Whether each output equals that of a run on the functional simulator alone, bit for bit."""

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
    return ModelComparison(executor.comparisons, outputs)


def _same(first: Array, second: Array) -> bool:
    return np.asarray(first).tobytes() == np.asarray(second).tobytes()
