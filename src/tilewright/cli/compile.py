"""`tilewright compile`: from a model to a package."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewright.api import Build, CompileOptions
    from tilewright.diagnose import Gate
    from tilewright.ptq.options import QuantOptions
    from tilewright.quant.accuracy import Accuracy
    from tilewright.spec.hardware import Hardware


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.epilog = (
        "tilewright compile m.onnx --target edge16 --calibration-data pictures/ -o m.tpupkg\n"
        "tilewright compile zoo:pplcnet --target tiny8 -o p.tpupkg\n"
    )
    parser.add_argument(
        "--output", "-o", type=Path, help="package to write (default MODEL-TARGET.tpupkg)"
    )
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="also write a report")
    parser.add_argument(
        "--no-simulate", action="store_true", help="do not simulate cycles for the summary"
    )
    parser.add_argument(
        "--keep-ir", default="quant", metavar="LEVELS",
        help="levels whose IR goes into the package, by comma, `all` or `none` (default quant)",
    )  # fmt: skip
    parser.add_argument(
        "--save-calibration", type=Path, metavar="FILE",
        help="also write the table of ranges, to be read, edited and given to --calibration-table; "
        "no channels are balanced then by default, so that the ranges are those of the model",
    )  # fmt: skip
    add_gate_options(parser)
    add_compile_options(parser)


def add_gate_options(parser: argparse.ArgumentParser) -> None:
    """Add the limits of accuracy a compile must keep."""
    group = parser.add_argument_group("accuracy: without a limit nothing is measured")
    group.add_argument(
        "--max-drop", metavar="SHARE",
        help="refuse (exit code 1, no package) if top-1 with --labels falls, or else the best "
        "class changes, for more than this share of samples: 1%% or 0.01",
    )  # fmt: skip
    group.add_argument(
        "--min-sqnr", type=float, metavar="DB",
        help="refuse if the output's signal to quantisation noise ratio is below this",
    )  # fmt: skip
    group.add_argument(
        "--evaluation-data", type=Path, metavar="PATH",
        help="samples to measure on (default: those of calibration)",
    )  # fmt: skip
    group.add_argument(
        "--labels", type=Path, metavar="FILE",
        help="CSV with columns file and label (class index) for the samples measured on",
    )  # fmt: skip
    group.add_argument(
        "--evaluation-samples", type=int, default=100, metavar="N",
        help="measure on at most N (default 100)",
    )  # fmt: skip


def gate_of(options: argparse.Namespace) -> Gate | None:
    """Return the limits of accuracy of a command line, or None.

    Raises:
        UsageError: a limit is wrong, or something is given that only a limit uses.
        TilewrightError: E0301, the samples or labels cannot be found or read.
    """
    import math

    from tilewright.diagnose import Gate
    from tilewright.diagnostics import UsageError
    from tilewright.quant.accuracy import Limits, parse_drop
    from tilewright.quant.variants import read_labels
    from tilewright.runtime.preprocess import list_samples

    drop = None if options.max_drop is None else parse_drop(options.max_drop)
    limits = Limits(drop, options.min_sqnr)
    if not limits:
        for name in ("evaluation_data", "labels"):
            if getattr(options, name) is not None:
                raise UsageError(
                    "E0702",
                    f"--{name.replace('_', '-')} serves a limit of accuracy: give --max-drop or "
                    "--min-sqnr too",
                )
        return None
    if options.dtype == "float32":
        raise UsageError("E0702", "--max-drop, --min-sqnr: float32 is not quantised")
    if options.min_sqnr is not None and not math.isfinite(options.min_sqnr):
        raise UsageError("E0702", f"--min-sqnr must be a number of dB, not {options.min_sqnr}")
    if options.evaluation_samples < 1:
        raise UsageError(
            "E0702", f"--evaluation-samples must be 1 or more, not {options.evaluation_samples}"
        )
    if options.evaluation_data is not None:
        list_samples(options.evaluation_data)
    if options.labels is not None:
        read_labels(options.labels)
    return Gate(limits, options.evaluation_data, options.labels, options.evaluation_samples)


def add_compile_options(parser: argparse.ArgumentParser) -> None:
    """Add what decides how a model is compiled (also for `compare`)."""
    parser.add_argument("model", help="the ONNX file, or zoo:NAME")
    parser.add_argument("--target", default="edge16", help="target name or file (default edge16)")
    group = parser.add_argument_group("calibration")
    sources = group.add_mutually_exclusive_group()
    sources.add_argument(
        "--calibration-data", type=Path, metavar="PATH",
        help="folder of pictures or .npy/.npz files, or one .npz (zoo models have their own)",
    )  # fmt: skip
    sources.add_argument(
        "--random-calibration", action="store_true",
        help="ranges from random inputs, to see cycles without data; results mean nothing",
    )  # fmt: skip
    group.add_argument(
        "--calibration-method",
        metavar="NAME",
        help="max, mean, kl, mse, percentile, or best: what suits each value (default)",
    )
    group.add_argument(
        "--calibration-samples", type=int, default=200, metavar="N", help="at most N (default 200)"
    )
    group.add_argument(
        "--calibration-table", type=Path, metavar="FILE",
        help="take the ranges of this table (YAML); calibration data then serve only to fit codes",
    )  # fmt: skip
    add_quant_options(parser)
    group.add_argument(
        "--preprocess", metavar="TEXT",
        help="for pictures: imagenet, unit, signed, caffe or raw, then ,key=value...",
    )  # fmt: skip
    parser.add_argument(
        "--shape", action="append", default=[], metavar="NAME=1x3x224x224",
        help="shape of an input, or size of a symbolic dimension (N=1); may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--timing-constraints", type=Path, metavar="FILE",
        help="schedule by measured times: a waveform (VCD, FST) of the program compiled without "
        "this option, or a .mlir file with tpu.timing_constraint operations",
    )  # fmt: skip
    speed = parser.add_argument_group("optimisation (never changes a result)")
    speed.add_argument(
        "-O", dest="level", action=_LevelAction, default=2, metavar="LEVEL",
        help="0 layer by layer; 1 tensors stay in SRAM, instructions reordered; 2 layers take "
        "turns row by row too (default); 3 more plans, programs of any length reordered",
    )  # fmt: skip
    speed.add_argument(
        "--optimise", choices=("speed", "size"), default="speed",
        help="speed (default), or size: the least memory for activations, then speed",
    )  # fmt: skip
    speed.add_argument(
        "--constant-in-sram", metavar="NAMES",
        help="layers or constants by comma, or `all`: their weights are loaded once, when the "
        "program starts, and stay in SRAM",
    )  # fmt: skip
    speed.add_argument(
        "--no-fusion", action="store_true",
        help="every layer and addition in a loop nest of its own, its operands in DDR",
    )  # fmt: skip
    speed.add_argument(
        "--quant-bank-policy", choices=("shared", "strict"), default="shared",
        help="the chip's banks of quantisation parameters: shared (default), or strict: those of a "
        "layer's weights and of its activations are always in different banks, none is overwritten "
        "by the same layer, and a layer that does not fit so is an error",
    )  # fmt: skip
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--dtype", choices=("int8", "fp16", "float32"), default="int8",
        help="number type: int8, fp16 (targets that declare it; calibration optional), float32",
    )  # fmt: skip
    parser.add_argument(
        "--fp16-overflow", choices=("host", "refuse"), default="host",
        help="fp16: layers whose values leave its range stay float32 on the host (default), or are "
        "an error",
    )  # fmt: skip
    kinds.add_argument(
        "--fp32", dest="dtype", action="store_const", const="float32",
        help="no quantisation: everything in float on the host",
    )  # fmt: skip


class _LevelAction(argparse.Action):
    """`-O2` sets the effort for speed, `-Oq2` that for accuracy."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store a level, 0 to 3."""
        name, digit = ("quant_level", values[1:]) if values[:1] == "q" else ("level", values)
        if digit not in ("0", "1", "2", "3"):
            parser.error(f"argument -O: invalid level `{values}` (0..3, or q0..q3)")
        setattr(namespace, name, int(digit))


def add_quant_options(parser: argparse.ArgumentParser) -> None:
    """Add what decides how codes are chosen."""
    group = parser.add_argument_group("quantisation (-Oq0 plain ... -Oq3; default -Oq2)")
    group.set_defaults(quant_level=2)
    group.add_argument(
        "--activations", choices=("auto", "symmetric", "asymmetric"),
        help="symmetric: zero point 0; asymmetric: all 256 codes for each value's range; auto: "
        "whichever the network's output says (default)",
    )  # fmt: skip
    group.add_argument(
        "--weight-bits", type=int, choices=(8, 4), default=8, help="bits of weights (default 8)"
    )
    group.add_argument(
        "--layer-bits", metavar="NAME=BITS,...", help="bits of the weights of single layers"
    )
    group.add_argument(
        "--accuracy-budget", metavar="LOSS",
        help="mixed precision: 4-bit weights where they save cycles, as many as may be lost "
        "against 8 bits: `0.5%%` agreement with the float model, or `1dB` of the outputs",
    )  # fmt: skip
    group.add_argument(
        "--rounding", choices=("nearest", "learned"),
        help="weight codes: the nearest, or fitted layer after layer to the float model (default)",
    )  # fmt: skip
    group.add_argument(
        "--bias-correction", choices=("none", "mean", "sequential"),
        help="what biases take back of the error of codes (default sequential)",
    )  # fmt: skip
    for name, what in (
        ("clip-weights", "search each channel's weight scale for the least error"),
        ("equalize", "balance channels between layers before calibration"),
    ):
        group.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, help=what)
    group.add_argument(
        "--float-layers", metavar="NAMES",
        help="elementwise layers that stay in float on the host, by comma, or `none` (default: "
        "those whose codes alone would cost the outputs too much)",
    )  # fmt: skip
    group.add_argument(
        "--smooth-quant", type=float, metavar="SHARE",
        help="move this share (0..1) of outlying channels into the weights of linear layers",
    )  # fmt: skip


def parse_layer_bits(text: str | None) -> dict[str, int]:
    """Read `--layer-bits`.

    Raises:
        UsageError: an entry is not of the form NAME=BITS.
    """
    from tilewright.diagnostics import UsageError

    found: dict[str, int] = {}
    for entry in filter(None, (text or "").split(",")):
        name, equals, bits = entry.rpartition("=")
        if not equals or not name or not bits.isdecimal():
            raise UsageError(
                "E0702",
                f"--layer-bits `{entry}` must be written NAME=BITS",
                ["for example conv1=8"],
            )
        found[name.strip()] = int(bits)
    return found


def parse_float_layers(text: str | None) -> tuple[str, ...] | None:
    """Read `--float-layers`: names by comma; nothing for `none`; None if it was not given."""
    if text is None or text.strip() == "none":
        return None if text is None else ()
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def quant_options(options: argparse.Namespace) -> QuantOptions:
    """Return the options of quantisation of a command line.

    Raises:
        UsageError: one is wrong.
    """
    from tilewright.diagnostics import UsageError
    from tilewright.ptq.options import QuantOptions

    if options.calibration_samples < 1:
        raise UsageError(
            "E0702", f"--calibration-samples must be 1 or more, not {options.calibration_samples}"
        )
    made = QuantOptions(
        level=options.quant_level,
        method=options.calibration_method,
        samples=options.calibration_samples,
        activations=options.activations,
        weight_bits=options.weight_bits,
        layer_bits=parse_layer_bits(options.layer_bits),
        rounding=options.rounding,
        bias=options.bias_correction,
        equalise=options.equalize,
        smooth=options.smooth_quant,
        clip_weights=options.clip_weights,
        float_layers=parse_float_layers(options.float_layers),
    )
    made.resolved()
    return made


def parse_shapes(texts: list[str]) -> dict[str, tuple[int, ...]]:
    """Read `--shape` values.

    Raises:
        UsageError: one is not of the form NAME=AxBxC with positive sizes.
    """
    from tilewright.diagnostics import UsageError

    shapes: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, equals, sizes = text.rpartition("=")
        parts = sizes.lower().split("x")
        if not equals or not name or not all(p.isdecimal() and int(p) > 0 for p in parts):
            raise UsageError(
                "E0702",
                f"--shape `{text}` must be written NAME=AxBxC",
                ["for example x=1x3x224x224, or N=1 for a symbolic dimension"],
            )
        shapes[name] = tuple(int(part) for part in parts)
    return shapes


def compile_options(options: argparse.Namespace, keep_ir: str) -> CompileOptions:
    """Return the compile options of a command line.

    Raises:
        UsageError: an option is wrong.
        TilewrightError: E0301 when the calibration data cannot be found.
    """
    from tilewright.api import CompileOptions
    from tilewright.compiler import LEVELS
    from tilewright.diagnostics import UsageError
    from tilewright.ptq.precision import Budget
    from tilewright.quant.table import CalibrationTable
    from tilewright.runtime.preprocess import list_samples, parse_preprocess

    calibration: Any = options.calibration_data
    if calibration is not None:
        list_samples(calibration)
    elif (
        not options.random_calibration
        and options.dtype != "float32"
        and options.model.startswith("zoo:")
    ):
        from tilewright.zoo import inputs

        calibration = inputs(
            options.model[4:], min(32, options.calibration_samples), seed=1
        ).samples()
    if options.optimise == "size" and (options.level == 0 or options.no_fusion):
        raise UsageError(
            "E0702",
            "--optimise size has nothing to choose when every layer is by itself",
            hint="leave out -O0 and --no-fusion",
        )
    table = options.calibration_table
    if table and options.dtype == "float32":
        raise UsageError("E0702", "--calibration-table: in float32 there are no codes")
    if table and (options.random_calibration or options.calibration_method):
        other = "--random-calibration" if options.random_calibration else "--calibration-method"
        raise UsageError("E0702", f"{other} would be ignored beside --calibration-table")
    kept: tuple[str, ...] = ()
    if options.constant_in_sram is not None:
        names = (name.strip() for name in options.constant_in_sram.split(","))
        kept = tuple(filter(None, names))
        if not kept:
            raise UsageError("E0702", "--constant-in-sram names nothing")
    if kept and options.dtype == "float32":
        raise UsageError("E0702", "--constant-in-sram: in float32 nothing runs on the chip")
    if options.quant_bank_policy == "strict" and options.dtype != "int8":
        raise UsageError(
            "E0702", f"--quant-bank-policy strict: in {options.dtype} there are no such parameters"
        )
    if options.dtype != "int8" and (options.weight_bits != 8 or options.layer_bits):
        raise UsageError(
            "E0702", f"--weight-bits, --layer-bits: in {options.dtype} weights are floats"
        )
    levels = {"all": LEVELS, "none": ()}.get(keep_ir, tuple(filter(None, keep_ir.split(","))))
    for level in levels:
        if level not in LEVELS:
            raise UsageError(
                "E0702", f"there is no level `{level}`", hint=f"levels: {', '.join(LEVELS)}"
            )
    return CompileOptions(
        calibration=calibration,
        random_calibration=options.random_calibration,
        table=CalibrationTable.load(table) if table else None,
        quant=quant_options(options),
        budget=Budget.parse(options.accuracy_budget) if options.accuracy_budget else None,
        shapes=parse_shapes(options.shape),
        preprocess=parse_preprocess(options.preprocess) if options.preprocess else None,
        dtype=options.dtype,
        timing=options.timing_constraints,
        overflow=options.fp16_overflow,
        bank_policy=options.quant_bank_policy,
        fuse=not options.no_fusion,
        level=options.level,
        optimise=options.optimise,
        constants_in_sram=kept,
        keep_ir=levels,
    )


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    import time

    from tilewright.api import build, resolve_model
    from tilewright.cli.progress import Progress
    from tilewright.codegen.files import check_writable
    from tilewright.diagnostics import TilewrightError, UsageError
    from tilewright.spec.hardware import is_changed_copy, load_target

    target = load_target(options.target)
    if is_changed_copy(target):
        sys.stderr.write(
            f"note: `{options.target}` calls itself `{target.name}`, but is not the shipped target "
            "of that name; give it a `name` of its own\n"
        )
    output = options.output or default_output(options.model, target)
    read = (options.model, options.target, options.calibration_data, options.timing_constraints)
    check_writable(output, *read)
    if options.report:
        check_writable(options.report, *read, output)
    if options.save_calibration and options.dtype == "float32":
        raise UsageError("E0702", "--save-calibration: in float32 nothing is calibrated")
    if options.save_calibration:
        check_writable(options.save_calibration, *read, output)
    resolve_model(options.model)
    if options.timing_constraints and not options.timing_constraints.is_file():
        raise TilewrightError("E0701", f"there is no file `{options.timing_constraints}`")
    if options.timing_constraints and options.dtype == "float32":
        raise UsageError(
            "E0702", "--timing-constraints: in float32 there is no program of the chip"
        )
    asked = compile_options(options, options.keep_ir)
    if options.save_calibration:
        asked = replace(asked, quant=_without_balance(asked.quant))
    gate = gate_of(options)
    start = time.perf_counter()
    with Progress(options.quiet) as progress:
        made = build(options.model, target, asked, progress)
        accuracy = None
        if gate is not None:
            from tilewright.diagnose import hold

            accuracy = hold(made, options.model, asked, gate, progress)
            made.package.content.options.update(accuracy.record())
        size = made.package.save(output)
        if options.save_calibration and made.compiled:
            made.compiled.table.save(options.save_calibration)
        seconds = time.perf_counter() - start
        for item in made.compiled.decisions if made.compiled else ():
            if "warning" in item.details:
                print(f"warning: {item.details['warning']}", file=sys.stderr)
        return _finish(options, made, output, size, seconds, progress, accuracy)


def _without_balance(quant: QuantOptions) -> QuantOptions:
    """Return options that balance channels only where asked: a saved table must be of the model."""
    return replace(
        quant,
        smooth=0.0 if quant.smooth is None else quant.smooth,
        equalise=bool(quant.equalise),
    )


def default_output(model: str, target: Hardware) -> Path:
    """Return `MODEL-TARGET.tpupkg` in the current folder."""
    stem = model[4:] if model.startswith("zoo:") else Path(model).stem
    return Path(f"{stem}-{target.name}.tpupkg")


def _finish(
    options: argparse.Namespace,
    made: Build,
    output: Path,
    size: int,
    seconds: float,
    progress: Any,
    accuracy: Accuracy | None,
) -> int:
    from tilewright.cli.output import print_json
    from tilewright.cli.output import size as human

    report = None
    if not options.no_simulate or options.report:
        from tilewright.report.report import make_report
        from tilewright.runtime.simulation import simulate

        progress("simulate", 0.0)
        report = make_report(made.package, simulate(made.package))
        if options.report:
            write_html(options.report, report)
    phases = made.compiled.seconds if made.compiled else made.front.seconds
    if options.json:
        print_json(
            {
                "package": str(output),
                "bytes": size,
                "compile_seconds": seconds,
                "phase_seconds": phases,
                "report": report.to_json() if report else None,
                "accuracy": accuracy.to_json() if accuracy else None,
            }
        )
        return 0
    from tilewright.report.text import summary

    lines = summary(report) if report else [f"{made.package.content.model_name} compiled"]
    if options.random_calibration:
        lines.append("  results    mean nothing: ranges come from random inputs")
    if accuracy is not None:
        lines.append(f"  accuracy   {accuracy.words()}")
    lines.append(f"  compile    {seconds:.1f} s (measured here)")
    lines.append(f"  package    {output} ({human(size)})")
    if options.report:
        lines.append(f"  report     {options.report}")
    lines.append(f"next: tilewright run {output} --input FILE")
    print("\n".join(lines))
    return 0


def write_html(path: Path, report: Any) -> None:
    """Write the report's page, all of it or nothing."""
    from tilewright.codegen.files import atomic_output
    from tilewright.report.html import to_html

    with atomic_output(path) as scratch:
        scratch.write_text(to_html(report), "utf-8")
