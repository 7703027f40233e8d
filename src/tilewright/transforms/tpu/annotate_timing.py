"""Write the times that a waveform shows into the IR.

Before: `tpu.program`s. After: also one `tpu.timing_constraint` for each different instruction of
each layer of the program that ran, with the cycles it took. The waveform's instructions are matched
to the program by position: dispatched to the same engines, in the same order, to the end. Where the
waveform shows the chip and the code it fetched, they must be the target and the program.
Constraints of an earlier waveform are replaced where the new one has the same instruction.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.dialects.tpu import ProgramOp, TimingConstraintOp
from tilewright.ir.context import CompileContext, compile_context
from tilewright.schedule.constraints import Constraint, Constraints, group
from tilewright.spec.hardware import Hardware
from tilewright.spec.program import SEQ, Dispatched, sequence
from tilewright.waves.identity import OWN_RUN, Candidate, program_of, warning_of
from tilewright.waves.retire import Retired, read_retired


@dataclass(frozen=True)
class AnnotateTimingPass(ModulePass):
    """Add the measured times of a waveform's run as `tpu.timing_constraint`s.

    Requires: the program that ran, as it was compiled. Ensures: one constraint for each different
    instruction of each layer.
    """

    name = "annotate-timing"

    waveform: str = ""
    """VCD or FST file of one run."""
    program: str = ""
    """The program that ran; needed when several fit."""
    scope: str = ""
    """Scope of the chip's log in the waveform; searched when empty."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Rewrite the module in place.

        Raises:
            TilewrightError: E0603 the waveform is not a complete run of a program of the module;
                E0701, E0703 it cannot be read.
        """
        context = compile_context(ctx)
        hardware = context.target
        if hardware is None:
            raise TilewrightError("E0201", "measured times need a target", [], "give the target")
        if not self.waveform:
            raise UsageError("E0702", "`annotate-timing` needs `waveform=FILE`")
        programs = self._programs(op)
        retired = read_retired(self.waveform, self.scope)
        program, stream = self._program(programs, hardware, retired)
        annotate(op, context, hardware, stream, retired, program)

    def _programs(self, module: ModuleOp) -> list[ProgramOp]:
        programs = [item for item in module.ops if isinstance(item, ProgramOp)]
        if not programs:
            raise UsageError(
                "E0702",
                "the model has no program of the chip: there is nothing a waveform could measure",
                hint="all of it runs on the host; compile it without measured times",
            )
        named = [item for item in programs if self.program in ("", item.sym_name.data)]
        if not named:
            names = ", ".join(f"@{item.sym_name.data}" for item in programs)
            raise UsageError(
                "E0702", f"there is no program @{self.program}", [f"programs: {names}"]
            )
        return named

    def _program(
        self, named: list[ProgramOp], hardware: Hardware, retired: Retired
    ) -> tuple[ProgramOp, list[Dispatched]]:
        candidates = [
            Candidate(
                f"@{item.sym_name.data}", code, list(sequence(code, hardware.scalar_registers))
            )
            for item in named
            for code in (item.instructions(),)
        ]
        found = program_of(
            retired, hardware, candidates, "name it: annotate-timing{waveform=... program=NAME}"
        )
        return named[candidates.index(found)], found.stream


def annotate(
    module: ModuleOp,
    context: CompileContext,
    hardware: Hardware,
    stream: list[Dispatched],
    retired: Retired,
    program: ProgramOp,
) -> None:
    """Add the constraints of a log that belongs to `stream`."""
    places = [index for index, item in enumerate(stream) if item.engine != SEQ]
    grouped = group(
        hardware, [stream[place] for place in places], [retired.latency(p) for p in places]
    )
    replaced = {
        (op.text("layer"), op.instruction.data, op.given): op
        for op in module.ops
        if isinstance(op, TimingConstraintOp)
    }
    for (layer, (name, fields)), samples in grouped.items():
        old = replaced.pop((layer, name, fields), None)
        if old is not None:
            old.detach()
            old.erase()
        module.body.block.add_op(
            TimingConstraintOp.of(
                name, dict(fields), samples.mean, layer=layer, waveform=retired.source,
                clock_fs=retired.clock_fs, count=len(samples.cycles),
                lowest=min(samples.cycles), highest=max(samples.cycles),
            )
        )  # fmt: skip
    context.decide(
        program.sym_name.data,
        AnnotateTimingPass.name,
        True,
        f"{len(places)} instructions measured in `{retired.source}`, {len(grouped)} different",
        **({"warning": warning} if (warning := warning_of(retired)) else {}),
    )


def constraints_of(module: ModuleOp, hardware: Hardware) -> Constraints:
    """Return the measured times a module carries."""
    return Constraints(
        hardware,
        [
            Constraint(
                op.text("layer"),
                (op.instruction.data, op.given),
                op.cycles.value.data,
                op.number("count"),
            )
            for op in module.ops
            if isinstance(op, TimingConstraintOp)
        ],
    )


def schedule_by(source: Path, module: ModuleOp, context: CompileContext) -> None:
    """Schedule a module's programs by measured times, in place.

    Args:
        source: a waveform of one of the programs as they are, or a module (`.mlir`) with
            `tpu.timing_constraint`s of this or an earlier compile.
        module: at the tpu level.
        context: its context, with the target.

    Raises:
        TilewrightError: E0603 the waveform is of another program, or the module has no measured
            times; E0701, E0703 the file cannot be read.
    """
    from tilewright.transforms.tpu.schedule_instructions import ScheduleInstructionsPass

    if source.suffix == ".mlir":
        _copy_constraints(source, module)
    else:
        try:
            AnnotateTimingPass(waveform=str(source)).apply(context, module)
        except TilewrightError as error:
            if error.code == "E0603" and error.hint in (None, OWN_RUN):
                error.hint = (
                    "the waveform must be of the program compiled without measured times; to use "
                    "one of another compile, annotate that program and give the .mlir file"
                )
            raise
    ScheduleInstructionsPass().apply(context, module)


def _copy_constraints(source: Path, module: ModuleOp) -> None:
    from tilewright.ir.io import new_context, parse_text

    try:
        text = source.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TilewrightError("E0701", f"`{source}` cannot be read", [str(error)]) from error
    given = parse_text(text, new_context(), str(source))
    given.verify()
    found = [op for op in given.ops if isinstance(op, TimingConstraintOp)]
    if not found:
        raise TilewrightError(
            "E0603",
            f"`{source}` has no `tpu.timing_constraint`",
            hint="`tpu-mlir-opt --annotate-timing=waveform=FILE` writes them",
        )
    for op in found:
        op.detach()
        module.body.block.add_op(op)
