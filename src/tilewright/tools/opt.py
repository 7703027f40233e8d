"""`tpu-mlir-opt`: run passes and whole phases of the compiler on a module, in the order written."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.tools.common import (
    DEFAULT_TARGET,
    ToolParser,
    load_target,
    read_input,
    run_tool,
    write_output,
)

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp
    from xdsl.passes import ModulePass

    from tilewright.ir.context import CompileContext
    from tilewright.ir.weights import WeightStore
    from tilewright.passes import Hook

PHASE_FLAGS = ("--convert-onnx-to-top", "--quantize", "--convert-top-to-tpu")
"""Flags that run a whole phase of `pipelines.py`, not one pass."""

DUMP_FLAGS = ("--print-ir-before", "--print-ir-after")

DESCRIPTION = """\
Read a module, run passes, print or write the result.

Passes run in the order written: `--NAME` or `--NAME="option=value"` for any pass, or a textual
pipeline. Modules keep their weights in NAME.weights.safetensors beside NAME.mlir.

  tpu-mlir-opt --convert-onnx-to-top m.mlir -o top.mlir
  tpu-mlir-opt --quantize --calibration-data=images/ --hardware-config=edge16 top.mlir -o quant.mlir
  tpu-mlir-opt --convert-top-to-tpu quant.mlir -o tpu.mlir
  tpu-mlir-opt --pass-pipeline="builtin.module(func.func(top-fold-constants,canonicalize))" top.mlir
"""


@dataclass(frozen=True)
class Step:
    """One thing to do: a pass, a textual pipeline or a phase."""

    kind: str
    """"pass", "pipeline" or "phase"."""
    text: str


def build_parser() -> ToolParser:
    """Return the parser of everything but the steps, which `split_steps` takes out first."""
    parser = ToolParser("tpu-mlir-opt", DESCRIPTION)
    add = parser.add_argument
    add("input", nargs="?", help="module to read; `-` or nothing is standard input")
    add("-o", "--output", metavar="FILE", help="write the module and its weights here")
    steps = parser.add_argument_group(
        "steps, run in the order written", "and `--NAME` for every pass that --list-passes prints"
    )
    for flag, what in (
        ("--convert-onnx-to-top", "import phase: onnx operators to the hardware-independent graph"),
        ("--quantize", "quantise phase: calibrate, choose scales, make every parameter explicit"),
        ("--convert-top-to-tpu", "lower to instructions of the target, by linalg and affine"),
    ):
        steps.add_argument(flag, action="store_true", help=what)
    steps.add_argument("--pass-pipeline", "-p", metavar="TEXT", help="passes in MLIR's notation")
    quant = parser.add_argument_group("quantisation")
    quant.add_argument("--calibration-data", metavar="DIR", help="folder of images, .npy or .npz")
    quant.add_argument(
        "--calibration-method",
        metavar="NAME",
        help="max, mean, kl, mse, percentile or best (default: as --quant-level has it)",
    )
    quant.add_argument(
        "--quant-level",
        type=int,
        choices=(0, 1, 2, 3),
        default=2,
        help="0 plain, 1 better ranges, 2 learned codes too (default), 3 more",
    )
    quant.add_argument(
        "--calibration-samples",
        metavar="N",
        type=int,
        default=200,
        help="how many at most (default 200)",
    )
    quant.add_argument(
        "--preprocess",
        metavar="TEXT",
        default="imagenet",
        help="how pictures become inputs (default imagenet)",
    )
    add(
        "--hardware-config",
        metavar="TARGET",
        help="name of a shipped target, or a YAML file (default: the one the module was quantised "
        f"for, else {DEFAULT_TARGET})",
    )
    show = parser.add_argument_group("looking inside")
    show.add_argument("--print-op-stats", action="store_true", help="count operations, not the IR")
    show.add_argument("--print-ir-before", metavar="PASS,...", help="print before (all) passes")
    show.add_argument("--print-ir-after", metavar="PASS,...", help="print after (all) passes")
    show.add_argument("--print-ir-before-all", action="store_true", help="the same for all passes")
    show.add_argument("--print-ir-after-all", action="store_true", help="the same for all passes")
    show.add_argument("--dump-stages", metavar="DIR", help="write the module after every pass")
    show.add_argument("--timing", action="store_true", help="print the seconds of each pass")
    show.add_argument(
        "--check-each-pass",
        action="store_true",
        help="execute before and after each pass; stop at the first that changes a number",
    )
    show.add_argument("--seed", type=int, default=0, help="of the inputs of --check-each-pass")
    show.add_argument(
        "--verify-each",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="verify after every pass (default on)",
    )
    show.add_argument("--mlir-print-op-generic", action="store_true", help="print the generic form")
    show.add_argument("--list-passes", action="store_true", help="print the passes and stop")
    return parser


def split_steps(argv: Sequence[str]) -> tuple[list[Step], list[str]]:
    """Take the steps out of the arguments, in order; return them and the other arguments.

    `--print-ir-before` and `--print-ir-after` without a value become `=*`: argparse would take the
    input file for their value.
    """
    from tilewright.passes import registry

    steps: list[Step] = []
    rest: list[str] = []
    words = list(argv)
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        flag, equals, value = word.partition("=")
        if word == "--":
            rest += words[index - 1 :]
            break
        if flag in ("--pass-pipeline", "-p"):
            if not equals:
                if index >= len(words):
                    raise UsageError("E0702", f"`{flag}` needs a pipeline")
                value = words[index]
                index += 1
            steps.append(Step("pipeline", value))
        elif flag in PHASE_FLAGS:
            if equals:
                raise UsageError("E0702", f"`{flag}` takes no value")
            steps.append(Step("phase", flag.removeprefix("--")))
        elif flag in DUMP_FLAGS and not equals:
            named = index < len(words) and words[index].split(",")[0] in registry()
            rest.append(f"{flag}={words[index] if named else '*'}")
            index += named
        elif word.startswith("--") and flag.removeprefix("--") in registry():
            name = flag.removeprefix("--")
            steps.append(Step("pass", f"{name}{{{value}}}" if equals else name))
        else:
            rest.append(word)
    return steps, rest


class DumpIR:
    """Prints the module before and after chosen passes, to standard error, as MLIR's tools do."""

    def __init__(self, before: set[str] | None, after: set[str] | None, generic: bool) -> None:
        """None: all passes."""
        self._before, self._after, self._generic = before, after, generic

    def before(self, step: ModulePass, module: ModuleOp, context: CompileContext) -> None:
        """Print if asked for."""
        if self._before is None or step.name in self._before:
            self._print("Before", step, module)

    def after(self, step: ModulePass, module: ModuleOp, context: CompileContext) -> None:
        """Print if asked for."""
        if self._after is None or step.name in self._after:
            self._print("After", step, module)

    def _print(self, when: str, step: ModulePass, module: ModuleOp) -> None:
        from tilewright.ir.io import print_module

        sys.stderr.write(f"// -----// IR Dump {when} {step.name} //----- //\n")
        sys.stderr.write(print_module(module, generic=self._generic) + "\n")


class DumpStages:
    """Writes `NN-PASS.mlir` after every pass, the input as `00-input.mlir`, each with its weights.

    A weights file is written only when the weights changed; other modules name the one before.
    """

    def __init__(self, folder: Path, generic: bool) -> None:
        self._folder, self._generic = folder, generic
        self._count = 0
        self._weights: tuple[str, WeightStore, int] | None = None

    def before(self, step: ModulePass, module: ModuleOp, context: CompileContext) -> None:
        """Write the input, once."""
        if not self._count:
            self._write("input", module, context)

    def after(self, step: ModulePass, module: ModuleOp, context: CompileContext) -> None:
        """Write the stage."""
        self._write(step.name, module, context)

    def _write(self, name: str, module: ModuleOp, context: CompileContext) -> None:
        from tilewright.ir.io import text_with_records, write_atomically, write_module

        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TilewrightError("E0701", f"cannot make folder `{self._folder}`") from error
        path = self._folder / f"{self._count:02}-{name}.mlir"
        self._count += 1
        store = context.weights
        last = self._weights
        if last is not None and last[1] is store and last[2] == store.version:
            text = text_with_records(module, context, last[0], generic=self._generic)
            write_atomically(path, text.encode())
        else:
            write_module(module, context, path, generic=self._generic)
            if len(store):
                self._weights = (f"{path.stem}.weights.safetensors", store, store.version)


class Timing:
    """Prints the seconds of each pass to standard error."""

    def __init__(self) -> None:
        self._start = 0.0

    def before(self, step: ModulePass, module: ModuleOp, context: CompileContext) -> None:
        """Start the watch."""
        self._start = time.perf_counter()

    def after(self, step: ModulePass, module: ModuleOp, context: CompileContext) -> None:
        """Print."""
        sys.stderr.write(f"{time.perf_counter() - self._start:9.3f} s  {step.name}\n")


def hooks_for(options: argparse.Namespace) -> list[Hook]:
    """Return the hooks that the command line asks for, in the order in which they must look."""
    from tilewright.ir.check import CheckEachPass
    from tilewright.passes import VerifyEach

    hooks: list[Hook] = []
    # First, so that the others' work is not counted.
    if options.timing:
        hooks.append(Timing())

    def chosen(text: str | None, everything: bool) -> set[str] | None:
        from tilewright.passes import find_pass

        if everything or text == "*":
            return None
        return {find_pass(name.strip()).name for name in text.split(",")} if text else set()

    before = chosen(options.print_ir_before, options.print_ir_before_all)
    after = chosen(options.print_ir_after, options.print_ir_after_all)
    # Printed before it is verified: a module that does not verify is the one to look at.
    if before is None or after is None or before or after:
        hooks.append(DumpIR(before, after, options.mlir_print_op_generic))
    if options.dump_stages:
        hooks.append(DumpStages(Path(options.dump_stages), options.mlir_print_op_generic))
    if options.verify_each:
        hooks.append(VerifyEach())
    if options.check_each_pass:
        hooks.append(CheckEachPass(options.seed))
    return hooks


def op_stats(module: ModuleOp) -> str:
    """Return how many operations of each kind the module has, most first, as a table."""
    from collections import Counter

    counts = Counter(op.name for op in module.walk() if op is not module)
    width = max((len(name) for name in counts), default=9)
    lines = [f"{'operation':<{width}}   count"]
    rows = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    lines += [f"{name:<{width}}  {count:>6}" for name, count in rows]
    lines.append(f"{'total':<{width}}  {sum(counts.values()):>6}")
    return "\n".join(lines) + "\n" + _dma_stats(module)


def _dma_stats(module: ModuleOp) -> str:
    """Return how many transfers the chip programs make, loops unrolled, and how many bytes."""
    from tilewright.dialects.tpu import ProgramOp
    from tilewright.spec.isa import BY_NAME
    from tilewright.spec.program import sequence

    registers = BY_NAME["set_reg"].field["rd"].high + 1
    totals: dict[str, list[int]] = {}
    for program in module.body.ops:
        if not isinstance(program, ProgramOp):
            continue
        for item in sequence(program.instructions(), registers, {1: 0, 2: 1 << 39}):
            if item.name in ("dma_load", "dma_store"):
                size = 1
                for axis in range(4):
                    size *= item.fields[f"n{axis}"]
                total = totals.setdefault(item.name, [0, 0])
                total[0] += 1
                total[1] += size
    return "".join(
        f"{name}: {count} transfers dispatched, {size} bytes\n"
        for name, (count, size) in sorted(totals.items())
    )


def list_passes() -> str:
    """Return every pass with its folder and first line of documentation."""
    from tilewright.passes import registry

    entries = registry().values()
    width = max(len(entry.name) for entry in entries)
    return "".join(
        f"{entry.folder:<10} {entry.name:<{width}}  {summary(entry.load().__doc__)}\n"
        for entry in sorted(entries, key=lambda entry: (entry.folder, entry.name))
    )


def summary(text: str | None) -> str:
    """Return the first non-empty line of a docstring."""
    return next((line.strip() for line in (text or "").splitlines() if line.strip()), "")


def run(argv: list[str]) -> int:
    """Do what the arguments say; see `main`."""
    from tilewright.passes import registry

    steps, rest = split_steps(argv)
    options = build_parser().parse(rest, [f"--{name}" for name in registry()])
    if options.list_passes:
        sys.stdout.write(list_passes())
        return 0

    from tilewright.ir.check import CheckEachPass
    from tilewright.passes import make_pass, parse_pipeline, run_passes
    from tilewright.tools import phases

    target = load_target(options.hardware_config) if options.hardware_config else None
    # Pipelines are read before the module: a misspelt pass should not cost a minute.
    ready: list[list[ModulePass] | str] = [
        step.text
        if step.kind == "phase"
        else [make_pass(step.text)]
        if step.kind == "pass"
        else parse_pipeline(step.text)
        for step in steps
    ]
    hooks = hooks_for(options)
    module, context, _ = read_input(options.input, target)
    if context.target is None and any(s.text in ("quantize", "convert-top-to-tpu") for s in steps):
        context.target = load_target(None)
        sys.stderr.write(f"no --hardware-config: target `{context.target.name}`\n")
    for item in ready:
        if not isinstance(item, str):
            run_passes(module, context, item, hooks)
        elif item == "quantize":
            calibration = phases.CalibrationOptions(
                data=Path(options.calibration_data) if options.calibration_data else None,
                level=options.quant_level,
                method=options.calibration_method,
                samples=options.calibration_samples,
                preprocess=options.preprocess,
            )
            phases.quantize(module, context, calibration, hooks)
        elif item == "convert-onnx-to-top":
            phases.convert_onnx_to_top(module, context, hooks)
        else:
            phases.convert_top_to_tpu(module, context, hooks)
    for hook in hooks:
        if isinstance(hook, CheckEachPass):
            sys.stderr.write(hook.summary())
    if options.print_op_stats:
        sys.stdout.write(op_stats(module))
    if options.output or not options.print_op_stats:
        write_output(module, context, options.output, generic=options.mlir_print_op_generic)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run_tool(run, argv)


if __name__ == "__main__":
    sys.exit(main())
