"""`tilewright compare`: two levels of a model, layer by layer, worst first."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewright.api import Build, CompileOptions
    from tilewright.cli.progress import Progress
    from tilewright.report.accuracy import AccuracyReport

NAMED = 6
"""Results that were not compared, listed by name."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    from tilewright.cli.compile import add_compile_options

    parser.epilog = (
        "tilewright compare zoo:pplcnet --levels quant,tpu       must be equal, code by code\n"
        "tilewright compare m.onnx --levels float,quant ...       what quantisation costs\n"
        "Exit code 1 when two integer levels differ, or two fp16 levels by more than 2^-9 of a\n"
        "layer's largest magnitude.\n"
    )
    parser.add_argument(
        "--levels", default="float,quant", metavar="A,B",
        help="two of float, quant, linalg, affine, tpu, or `all`: quant against each lower one",
    )  # fmt: skip
    parser.add_argument(
        "--input", "-i", type=Path, metavar="PATH", help="inputs (default: the calibration's)"
    )
    parser.add_argument(
        "--samples", type=int, default=20, metavar="N",
        help="float,quant: over at most N inputs (default 20); other levels compare the first",
    )  # fmt: skip
    parser.add_argument(
        "--html", type=Path, metavar="FILE",
        help="float,quant: write a page with distributions, channel ranges and SQNR by layer",
    )  # fmt: skip
    parser.add_argument(
        "--advice", action="store_true",
        help="float,quant: find the cause, in order: float model, layers, scales, fusion, "
        "preprocessing",
    )  # fmt: skip
    parser.add_argument(
        "--labels", type=Path, metavar="FILE",
        help="--advice: CSV with columns file and label, to judge preprocessing by",
    )  # fmt: skip
    parser.add_argument("--rows", type=int, default=20, metavar="N", help="show the N worst layers")
    add_compile_options(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from tilewright.api import build
    from tilewright.cli.compile import compile_options
    from tilewright.cli.output import print_json
    from tilewright.cli.progress import Progress
    from tilewright.compare import LEVELS, compare
    from tilewright.diagnostics import UsageError
    from tilewright.spec.hardware import load_target

    pairs = [("quant", level) for level in LEVELS[2:]]
    if options.levels != "all":
        names = options.levels.split(",")
        if len(names) != 2 or not all(name in LEVELS for name in names) or names[0] == names[1]:
            raise UsageError(
                "E0702",
                f"--levels `{options.levels}` must be two different levels joined by a comma",
                hint=f"levels: {', '.join(LEVELS)}; or `all`",
            )
        pairs = [(names[0], names[1])]
    if options.dtype == "float32":
        raise UsageError(
            "E0702", "compare needs an int8 or fp16 compile: float32 has only one level"
        )
    _check(options, pairs)
    target = load_target(options.target)
    asked = compile_options(options, "none")
    with Progress(options.quiet) as progress:
        made = build(options.model, target, asked, progress)
        assert made.compiled is not None
        if pairs == [("float", "quant")]:
            return _accuracy(options, asked, made, progress)
        sample = next(_samples(options, asked, made))
        found = []
        for first, second in pairs:
            progress(f"compare {first},{second}")
            found.append(compare(made.compiled, first, second, sample))
    lower = [item for item in found if "float" not in (item.first, item.second)]
    # The float level is never expected to be equal: there the answer is the error, not a word.
    equal = all(item.exact for item in lower) if lower else None
    agrees = all(item.agrees for item in lower) if lower else None
    if options.json:
        comparisons = [_json(item) for item in found]
        print_json({"equal": equal, "agrees": agrees, "comparisons": comparisons})
    else:
        for item in found:
            print(_text(item, options.rows))
            if item.in_sram:
                print(_unseen(item))
    return 1 if agrees is False else 0


def _check(options: argparse.Namespace, pairs: list[tuple[str, str]]) -> None:
    """Check the options before the compile.

    Raises:
        UsageError: one is out of range or does not go with the levels.
    """
    from tilewright.codegen.files import check_writable
    from tilewright.diagnostics import UsageError

    if options.samples < 1:
        raise UsageError("E0702", f"--samples must be 1 or more, not {options.samples}")
    if options.labels is not None and not options.advice:
        raise UsageError("E0702", "--labels serves --advice: give both")
    for name, given in (("--html", options.html), ("--advice", options.advice)):
        if given and pairs != [("float", "quant")]:
            raise UsageError("E0702", f"{name} goes with `--levels float,quant`")
    if options.html:
        check_writable(options.html, options.model, options.target, options.input, options.labels)


def _accuracy(
    options: argparse.Namespace, asked: CompileOptions, made: Build, progress: Progress
) -> int:
    """Compare float and quantised over many samples, and print, write and explain it."""
    from tilewright.cli.output import print_json
    from tilewright.codegen.files import atomic_output
    from tilewright.report.accuracy import text, to_json

    samples = _samples(options, asked, made)
    report = accuracy_report(made, samples, progress, drawn=options.html is not None)
    steps = _advice(options, asked, made, report, progress) if options.advice else []
    if options.html:
        from tilewright.report.accuracy_html import accuracy_html

        with atomic_output(options.html) as scratch:
            scratch.write_text(accuracy_html(report), "utf-8")
    if options.json:
        found: dict[str, Any] = {"accuracy": to_json(report)}
        if options.advice:
            found["advice"] = [step.to_json() for step in steps]
        print_json(found)
        return 0
    lines = text(report, options.rows)
    for step in steps:
        lines += step.lines()
    print("\n".join(lines))
    if options.html:
        print(f"page: {options.html}")
    return 0


def accuracy_report(
    made: Build, samples: Iterator[Mapping[str, Any]], progress: Progress, drawn: bool = False
) -> AccuracyReport:
    """Return the comparison of a build's float and quant levels over `samples`."""
    from tilewright.quant.channels import Inspector, inspect_scales, weight_magnitudes
    from tilewright.quant.compare import compare
    from tilewright.report.accuracy import AccuracyReport

    compiled = made.compiled
    assert compiled is not None
    progress("compare float,quant")
    top, quant = compiled.stages["top"], compiled.stages["quant"]
    inspector = Inspector(top.module, compiled.table.maxima(), histograms=drawn)
    found = compare(top.module, top.weights, quant.module, quant.weights, samples, watch=inspector)
    return AccuracyReport(
        made.package.content.model_name,
        compiled.target.name,
        compiled.dtype,
        found,
        inspect_scales(found, inspector.found, top.module, top.weights, compiled.decisions),
        inspector.found,
        weight_magnitudes(top.module, top.weights),
    )


def _advice(
    options: argparse.Namespace,
    asked: CompileOptions,
    made: Build,
    report: AccuracyReport,
    progress: Progress,
) -> list[Any]:
    from tilewright.diagnose import advise

    progress("advice")
    source = options.input or asked.calibration
    return advise(
        made,
        report.comparison,
        report.findings,
        options.model,
        asked,
        source if isinstance(source, Path) else None,
        options.labels,
    )


def _samples(
    options: argparse.Namespace, asked: CompileOptions, made: Build
) -> Iterator[dict[str, Any]]:
    """Return the inputs to compare on.

    Raises:
        UsageError: there are none.
    """
    from tilewright.diagnose import samples_of
    from tilewright.diagnostics import UsageError

    source = options.input or asked.calibration
    if source is None:
        raise UsageError("E0702", "there is no calibration sample to compare on: give --input PATH")
    return samples_of(made, source, options.samples)


def _json(item: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return {**asdict(item), "exact": item.exact, "agrees": item.agrees}


def _relative(item: Any, worst: list[Any]) -> str:
    """Return the table of two fp16 levels: differences relative to the largest magnitude."""
    from tilewright.cli.output import number, table
    from tilewright.compare import HALF_TOLERANCE

    apart = sum(not layer.agrees for layer in item.layers)
    verdict = f"{apart} DIFFER" if apart else "all agree"
    body = table(
        ("layer", "elements", "differing", "of tolerance"),
        [
            (
                row.layer,
                number(row.elements),
                number(row.differing),
                f"{100 * row.relative / HALF_TOLERANCE:.0f} %",
            )
            for row in worst
        ],
        "lrrr",
    )
    return f"{verdict} (tolerance 2^-9 of the largest magnitude), worst first\n{body}"


def _unseen(item: Any) -> str:
    """Return which results could not be compared, and how they can be."""
    names = item.in_sram[:NAMED]
    more = len(item.in_sram) - len(names)
    listed = ", ".join(names) + (f" and {more} more (--json has all)" if more else "")
    return (
        f"  not compared: {len(item.in_sram)} results that never leave SRAM: {listed}\n"
        f"  --no-fusion compiles the same integers with all of them in DDR"
    )


def _text(item: Any, rows: int) -> str:
    from tilewright.cli.output import number, table

    real = item.layers[0].sqnr_db is not None
    head = f"{item.first} against {item.second}: {len(item.layers)} layers"
    if not real:
        wrong = [layer for layer in item.layers if layer.differing]
        if not wrong:
            return f"{head}, all equal bit for bit"
        if wrong[0].relative is not None:
            return f"{head}, {_relative(item, wrong[:rows])}"
        body = table(
            ("layer", "elements", "differing", "largest"),
            [
                (row.layer, number(row.elements), number(row.differing), f"{row.largest:g}")
                for row in wrong[:rows]
            ],
            "lrrr",
        )
        return f"{head}, {len(wrong)} DIFFER, worst first\n{body}"
    body = table(
        ("layer", "SQNR dB", "cosine", "largest error"),
        [
            (row.layer, f"{row.sqnr_db:.1f}", f"{row.cosine:.5f}", f"{row.largest:.4g}")
            for row in item.layers[:rows]
        ],
        "lrrr",
    )
    return f"{head}, worst first\n{body}"
