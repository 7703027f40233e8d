"""`tilewright tune`: a chip's parameters against time and area."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.epilog = (
        "tilewright tune zoo:pplcnet zoo:mobilenet-v2 --target edge16 \\\n"
        "    --vary mac_array_size=8,16,32 --vary sram_size=128K,256K,1M --html tune.html\n"
        "Results are kept in ~/.cache/tilewright ($TILEWRIGHT_CACHE): an interrupted sweep goes\n"
        "on where it was, and a larger one tries only what is new."
    )
    parser.add_argument("models", nargs="+", metavar="model", help="ONNX files, or zoo:NAME")
    parser.add_argument(
        "--target", default="edge16", help="target whose other fields are kept (default edge16)"
    )
    parser.add_argument(
        "--vary", action="append", default=[], metavar="FIELD=V,V",
        help="values of a numeric field of the target (K, M: x 1024); may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--accumulators", choices=("rows", "bits"), default="rows",
        help="what an M register keeps when the array's size changes: its rows (default) or bits",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (default 2)")
    parser.add_argument(
        "--area", action="append", default=[], metavar="PART=WEIGHT",
        help="weight of a part in the area: mac, sram_byte, accumulator_bit or lane",
    )  # fmt: skip
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write a line a result")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with a plot")
    group = parser.add_argument_group("models")
    group.add_argument(
        "--calibration-data", type=Path, metavar="PATH",
        help="samples for one model (zoo models have their own; else ranges from random inputs)",
    )  # fmt: skip
    group.add_argument(
        "--shape", action="append", default=[], metavar="NAME=1x3x224x224",
        help="shape of an input, or size of a symbolic dimension (N=1); may be repeated",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from tilewright.api import resolve_model
    from tilewright.cli.compile import parse_shapes
    from tilewright.cli.output import print_json
    from tilewright.codegen.files import atomic_output, check_writable
    from tilewright.diagnostics import TilewrightError, UsageError
    from tilewright.runtime.preprocess import list_samples
    from tilewright.spec.hardware import load_target
    from tilewright.tune.area import parse_weights
    from tilewright.tune.output import sweep_csv, sweep_html, sweep_text
    from tilewright.tune.prepare import Calibration
    from tilewright.tune.run import run_sweep
    from tilewright.tune.space import make_space, parse_vary
    from tilewright.zoo import cache_folder

    if options.jobs < 1:
        raise UsageError("E0702", f"--jobs must be 1 or more, not {options.jobs}")
    if twice := {name for name in options.models if options.models.count(name) > 1}:
        raise UsageError("E0702", f"model `{min(twice)}` is given twice")
    if options.calibration_data is not None:
        if len(options.models) > 1:
            raise UsageError("E0702", "--calibration-data is for one model")
        list_samples(options.calibration_data)
    weights = parse_weights(options.area)
    base = load_target(options.target)
    space = make_space(base, parse_vary(options.vary), options.accumulators)
    read = (*options.models, options.target, options.calibration_data)
    for path in filter(None, (options.csv, options.html)):
        check_writable(path, *read)
    for model in options.models:
        resolve_model(model)
    calibration = Calibration(options.calibration_data, shapes=parse_shapes(options.shape))

    def tell(line: str) -> None:
        if not options.quiet:
            print(line, file=sys.stderr, flush=True)

    if not space.points:
        lines = [f"{item.settings}: {'; '.join(item.reasons)}" for item in space.illegal[:5]]
        raise TilewrightError("E0201", "no combination is a legal chip", lines)
    sweep = run_sweep(
        options.models, base, space, cache=cache_folder() / "tune", jobs=options.jobs,
        weights=weights, calibration=calibration, tell=tell,
    )  # fmt: skip
    for path, make in ((options.csv, sweep_csv), (options.html, sweep_html)):
        if path is not None:
            with atomic_output(path) as scratch:
                scratch.write_text(make(sweep), "utf-8")
    if options.json:
        print_json(sweep.to_json())
    else:
        print(sweep_text(sweep))
        for path in filter(None, (options.csv, options.html)):
            print(path)
    if sweep.faults:
        tell("\n".join(sweep.faults))
        return 70
    return 0 if any(row.milliseconds for row in sweep.rows) else 1
