"""Accuracy of quantised models on real tasks, beside other quantisers on the same data.

    python bench/quantisation.py --images DIR --sentences FILE.csv --output build/quantisation.json
    python bench/quantisation.py --models mobilenet-v2 --images DIR --peers --limit 20
    python bench/quantisation.py --methods-compare --images DIR

The integers of the quantised graph are measured, which all later levels equal bit for bit; the
float figure is the original file's on onnxruntime. Every row is made by a process of its own:
its seconds are CPU time from the model's file to the quantised graph, its memory the peak.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tasks import metrics
from tasks.catalogue import STANDARD, TASKS, Data, MissingDataError, session
from tasks.peers import PeerError, methods_of, peers_python, run_peer
from tasks.task import Feed, Task, evaluate

METHODS = ("max", "kl", "percentile", "mse", "best")
ALLOWED_LOSS_DB = 1.0
"""What a calibration method may lose against `max` on any model."""


@dataclass(frozen=True)
class Asked:
    """What one row is made with."""

    model: str
    target: str
    level: int
    method: str | None
    activations: str | None
    weight_bits: int

    def text(self) -> str:
        """Return the options that differ from the defaults."""
        parts = [f"-Oq{self.level}"]
        parts += [self.method] if self.method else []
        parts += [self.activations] if self.activations else []
        parts += [f"{self.weight_bits} bit"] if self.weight_bits != 8 else []
        return " ".join(parts)


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=Path, help="folder of photographs with labels.csv")
    parser.add_argument("--sentences", type=Path, help="CSV: sentence1, sentence2, score, split")
    parser.add_argument("--models", default=",".join(STANDARD), help="names by comma")
    parser.add_argument("--target", default="edge16", help="a target's name or file")
    parser.add_argument("--level", default="2", help="levels of quantisation by comma (0..3)")
    parser.add_argument("--method", help="calibration method, instead of the level's")
    parser.add_argument("--activations", choices=("auto", "symmetric", "asymmetric"))
    parser.add_argument("--weight-bits", type=int, choices=(8, 4), default=8)
    parser.add_argument("--limit", type=int, help="at most so many evaluations (development)")
    parser.add_argument("--peers", action="store_true", help="other quantisers, too")
    parser.add_argument("--peers-only", action="store_true", help="nothing but them")
    parser.add_argument(
        "--peers-python", type=Path, help="Python with nncf and onnxruntime (default: made)"
    )
    parser.add_argument(
        "--methods-compare", action="store_true", help=f"every method of {', '.join(METHODS)}"
    )
    parser.add_argument("--output", type=Path, default=Path("build/quantisation.json"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    data = Data(options.images, options.sentences, options.limit)
    if options.one:
        return one(Asked(**json.loads(options.one)), data, options.output)
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(line(row), flush=True)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")

    for model in options.models.split(","):
        if model not in TASKS:
            parser.error(f"no task for `{model}`; there are {', '.join(TASKS)}")
        if not options.peers_only:
            for asked in asked_rows(model, options):
                add(own(asked, sys.argv[1:]))
        if options.peers or options.peers_only:
            python = options.peers_python or peers_python(Path("build/peers-venv"))
            for row in peers(model, data, python, options.weight_bits):
                add(row)
    failed = any("error" in row for row in rows)
    if options.methods_compare:
        failed = not compare_methods(rows) or failed
    return int(failed)


def asked_rows(model: str, options: argparse.Namespace) -> list[Asked]:
    """Return the rows a command line asks for, for one model."""
    methods: Sequence[str | None] = METHODS if options.methods_compare else (options.method,)
    return [
        Asked(model, options.target, int(level), method, options.activations, options.weight_bits)
        for level in options.level.split(",")
        for method in methods
    ]


def own(asked: Asked, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the row that a process of its own makes; `arguments` are this bench's."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        command = [sys.executable, __file__, *arguments, "--one", json.dumps(vars(asked))]
        done = subprocess.run(
            [*command, "--output", str(path)], capture_output=True, text=True, check=False
        )
        if path.is_file():
            return json.loads(path.read_text("utf-8"))
    lines = done.stderr.strip().splitlines() or ["it ended without a word"]
    return {"model": asked.model, "by": "tilewright", "options": asked.text(), "error": lines[-1]}


def one(asked: Asked, data: Data, output: Path) -> int:
    """Measure one row and write it to `output`."""
    from tilewright.compiler import compile_model
    from tilewright.diagnostics import TilewrightError
    from tilewright.ptq.options import QuantOptions
    from tilewright.quant.reference import QuantSession
    from tilewright.spec.hardware import load_target

    row: dict[str, Any] = {
        "model": asked.model,
        "by": "tilewright",
        "target": asked.target,
        "options": asked.text(),
    }
    used: dict[str, float] = {}

    def progress(phase: str, done: float) -> None:
        del done
        if phase == "linalg" and not used:
            # The graph is quantised; what follows is not quantisation's time.
            used["seconds"] = time.process_time() - start
            used["peak_mb"] = peak_mb()

    try:
        task = TASKS[asked.model](asked.model, data)
        quant = QuantOptions(
            level=asked.level,  # pyright: ignore[reportArgumentType]
            method=asked.method,  # pyright: ignore[reportArgumentType]
            activations=asked.activations,  # pyright: ignore[reportArgumentType]
            weight_bits=asked.weight_bits,  # pyright: ignore[reportArgumentType]
        )
        before, start = peak_mb(), time.process_time()
        compiled = compile_model(
            task.model,
            load_target(asked.target),
            samples=task.calibration,
            quant=quant,
            shapes=task.shapes,
            level=0,
            progress=progress,
        )
    except (MissingDataError, TilewrightError) as error:
        row["error"] = str(error).splitlines()[0]
    else:
        stage = compiled.stages["quant"]
        run = QuantSession(stage.module, stage.weights).run
        found = evaluate(run, task.evaluation, task.carry)
        row |= judged(task, float_outputs(task), found)
        row |= {**used, "peak_mb_before": before}
        row["host_layers"] = sum(op.name.startswith("top.") for op in layers(stage.module))
    output.write_text(json.dumps(row), "utf-8")
    return 0


def layers(module: Any) -> list[Any]:
    """Return the operations of a module that compute."""
    return [op for op in module.walk() if op.name not in ("top.weight", "top.none")]


def float_outputs(task: Task) -> list[Feed]:
    """Return what the float model gives."""
    return evaluate(session(task.model), task.evaluation, task.carry)


def judged(task: Task, wanted: Sequence[Feed], found: Sequence[Feed]) -> dict[str, Any]:
    """Return the figures of a task for the outputs of the float and of a quantised model."""
    names = list(wanted[0])
    # In the float model's order: what is judged may be the first output.
    found = [{name: item[name] for name in names} for item in found]
    signals = [
        [np.asarray(task.signal(index, item)) for index, item in enumerate(outputs)]
        for outputs in (wanted, found)
    ]
    each = [metrics.sqnr_db([a], [b]) for a, b in zip(*signals, strict=True)]
    row: dict[str, Any] = {
        "metric": task.metric,
        "float": task.score(wanted),
        "int8": task.score(found),
        "sqnr_db": metrics.sqnr_db(*signals),
        "median_sqnr_db": float(np.median(each)),
        "evaluations": len(found),
        "calibration_samples": len(task.calibration),
    }
    if task.agree:
        row["agreement"] = metrics.agreement(*signals)
    if task.remark:
        row["remark"] = task.remark
    return row


def peers(model: str, data: Data, python: Path, weight_bits: int) -> Iterator[dict[str, Any]]:
    """Make the rows of other quantisers on one task."""
    try:
        task = TASKS[model](model, data)
    except MissingDataError as error:
        yield {"model": model, "by": "peers", "options": "", "error": str(error)}
        return
    wanted = float_outputs(task)
    for method in methods_of(task, weight_bits):
        row: dict[str, Any] = {"model": model, "by": method, "options": f"{weight_bits} bit"}
        try:
            found, used = run_peer(task, method, python, weight_bits)
        except PeerError as error:
            yield {**row, "error": str(error)}
        else:
            yield {**row, **judged(task, wanted, found), **used}


def peak_mb() -> float:
    """Return the largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def line(row: dict[str, Any]) -> str:
    """Return one row as text."""
    head = f"{row['model']:<18} {row['by']:<22} {row['options']:<16}"
    if "error" in row:
        return f"{head} {row['error']}"
    agreed = f", agreement {row['agreement']:.1%}" if "agreement" in row else ""
    return (
        f"{head} {row['metric']} {row['float']:.4f} -> {row['int8']:.4f}{agreed}, "
        f"{row['sqnr_db']:.2f} dB, {row['seconds']:.1f} s, {row['peak_mb']:.0f} MB"
    )


def compare_methods(rows: Sequence[dict[str, Any]]) -> bool:
    """Print the loss of every method against `max`; return whether none is above the allowed."""
    good = True
    by_model: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["by"] == "tilewright" and "error" not in row:
            method = next(item for item in METHODS if item in row["options"].split())
            by_model.setdefault(row["model"], {})[method] = row["sqnr_db"]
    print(f"{'dB':<18} " + " ".join(f"{method:>11}" for method in METHODS))
    for model, found in by_model.items():
        shown = [f"{found[method]:11.2f}" if method in found else " " * 11 for method in METHODS]
        print(f"{model:<18} {' '.join(shown)}")
        for method, value in found.items():
            if "max" in found and value < found["max"] - ALLOWED_LOSS_DB:
                print(f"  {method} loses {found['max'] - value:.2f} dB against max")
                good = False
    return good


if __name__ == "__main__":
    raise SystemExit(main())
