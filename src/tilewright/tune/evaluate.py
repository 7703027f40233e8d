"""One model on one chip: lowered from its integer graph, simulated, measured."""

from __future__ import annotations

import signal
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.diagnostics import TilewrightError
from tilewright.spec.hardware import Hardware

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp

    from tilewright.codegen.program import Program
    from tilewright.ir.weights import WeightStore


@dataclass(frozen=True)
class Task:
    """What a worker is given."""

    model: str
    path: Path
    """The quant level's IR."""
    hardware: Hardware


@dataclass(frozen=True)
class Result:
    """A model on a chip: figures, or the error why there are none."""

    cycles: int = 0
    """Simulated."""
    milliseconds: float = 0.0
    """At the core clock."""
    bound_cycles: float = 0.0
    ratio: float = 0.0
    """Cycles over bound."""
    array_use: float = 0.0
    ddr_bytes: int = 0
    sram_peak: int = 0
    limited_by: str = ""
    """What limits the network (docs/concepts/bound.md)."""
    error: str = ""
    """Code and message."""
    details: list[str] = field(default_factory=list[str])

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; of a failure only what it is."""
        if self.error:
            return {"error": self.error, "details": self.details}
        content = asdict(self)
        del content["error"], content["details"]
        return content


def ignore_interrupts() -> None:
    """Leave Ctrl-C to the process that started this worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@lru_cache(maxsize=4)
def _read(path: Path) -> tuple[ModuleOp, WeightStore]:
    from tilewright.ir.io import read_module

    module, context = read_module(path)
    return module, context.weights


def compile_quantised(path: Path, hardware: Hardware) -> Program:
    """Lower an integer graph to a program for a chip.

    Raises:
        TilewrightError: a layer does not fit the chip.
    """
    from tilewright.codegen.assemble import assemble
    from tilewright.codegen.verify_compiled import verify_compiled
    from tilewright.dialects.tpu import ProgramOp
    from tilewright.ir.io import new_context
    from tilewright.pipelines import run_phases

    quant, weights = _read(path)
    context = new_context(weights.copy(), hardware)
    module = quant.clone()
    run_phases(module, context, ["linalg", "affine", "tpu"])
    for op in module.ops:
        if isinstance(op, ProgramOp):
            verify_compiled(op, hardware)
    return assemble(quant, module, context.weights, hardware)


def evaluate(task: Task) -> Result:
    """Compile and simulate a model on a chip; what the chip cannot run is a result too."""
    from tilewright.codegen.package import PackageContent
    from tilewright.report.report import make_report
    from tilewright.runtime.runtime import Package
    from tilewright.runtime.simulation import simulate

    try:
        program = compile_quantised(task.path, task.hardware)
        package = Package(PackageContent(program, task.hardware, task.model, ""))
        report = make_report(package, simulate(package))
    except TilewrightError as error:
        return Result(error=f"{error.code}: {error.message}", details=error.details)
    if not report.cycles:
        return Result(error="E0402: everything runs on the host; nothing to simulate")
    return Result(
        cycles=report.cycles,
        milliseconds=report.milliseconds,
        bound_cycles=report.bound,
        ratio=report.ratio,
        array_use=report.array_use,
        ddr_bytes=report.ddr_bytes,
        sram_peak=report.sram_peak,
        limited_by=report.limited.what,
    )
