"""`tilewright compare`: two levels of a model, layer by layer, worst first."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

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
        "--input", "-i", type=Path, metavar="PATH", help="input (default: a calibration sample)"
    )
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
    target = load_target(options.target)
    asked = compile_options(options, "none")
    with Progress(options.quiet) as progress:
        made = build(options.model, target, asked, progress)
        assert made.compiled is not None
        sample = _sample(options, asked, made)
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


def _sample(options: argparse.Namespace, asked: Any, made: Any) -> dict[str, Any]:
    import numpy as np

    from tilewright.diagnostics import UsageError
    from tilewright.runtime.preprocess import Preprocess, load_samples

    kept = made.package.content.preprocess
    preprocess = Preprocess.from_json(kept) if kept else None
    shapes = {port.name: port.shape for port in made.package.inputs}
    source = options.input or asked.calibration
    if source is None:
        raise UsageError("E0702", "there is no calibration sample to compare on: give --input PATH")
    if not isinstance(source, Path):
        return dict(next(iter(source)))
    sample = next(load_samples(source, shapes, preprocess, 1))
    return {name: array.astype(np.float32) for name, array in sample.items()}


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
