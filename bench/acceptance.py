"""The acceptance table: every zoo model on every target, each in a process of its own.

    python bench/acceptance.py --output build/acceptance.json
    python bench/acceptance.py --models pplcnet,resnet50 --targets edge16 --levels tpu

For each pair: cycles, bound, ratio, array use, DDR bytes, SRAM peak, compile seconds and memory,
seconds of both simulators, and whether the integer levels are equal bit for bit at every layer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def main() -> int:
    """Run the bench; exit code 1 when a pair fails or levels differ."""
    from tilewright.spec.hardware import shipped_targets
    from tilewright.zoo import RECIPES

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(recipe.name for recipe in RECIPES))
    parser.add_argument("--targets", default=",".join(shipped_targets()))
    parser.add_argument(
        "--levels", default="linalg,affine,tpu", help="compared with quant; or none"
    )
    parser.add_argument("--twice", action="store_true", help="compile twice and compare the bytes")
    parser.add_argument("--stock", action="store_true", help="give linalg and affine to mlir-opt")
    parser.add_argument("--samples", type=int, default=16, help="calibration samples")
    parser.add_argument("--quant-level", type=int, default=2, help="as -Oq (default 2)")
    parser.add_argument("--output", type=Path, default=Path("build/acceptance.json"))
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "TARGET"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one[0], options.one[1], options)))
        return 0
    rows: list[dict[str, Any]] = []
    passed = sys.argv[1:]
    for model in options.models.split(","):
        for target in options.targets.split(","):
            command = [sys.executable, __file__, *passed, "--one", model, target]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                last = done.stderr.strip().splitlines()[-1:] or ["died"]
                row: dict[str, Any] = {"model": model, "target": target, "error": last[0]}
            else:
                row = json.loads(done.stdout.splitlines()[-1])
            rows.append(row)
            print(line(row), flush=True)
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    good = all("error" not in row and all(row["equal"].values()) for row in rows)
    print(f"{len(rows)} pairs, {'all good' if good else 'NOT all good'}: {options.output}")
    return 0 if good else 1


def measure(model: str, target_name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the row of one pair."""
    from tilewright.api import CompileOptions, build
    from tilewright.codegen.package import package_bytes
    from tilewright.compare import compare
    from tilewright.diagnostics import TilewrightError
    from tilewright.ptq.options import QuantOptions
    from tilewright.report.report import make_report
    from tilewright.runtime.simulation import simulate
    from tilewright.spec.hardware import load_target
    from tilewright.zoo import inputs

    row: dict[str, Any] = {"model": model, "target": target_name}
    target = load_target(target_name)
    samples = inputs(model, options.samples, seed=1).samples()
    asked = CompileOptions(
        calibration=samples, quant=QuantOptions(level=options.quant_level), keep_ir=()
    )
    try:
        made = build(f"zoo:{model}", target, asked)
    except TilewrightError as error:
        return {**row, "error": str(error)}
    compiled = made.compiled
    assert compiled is not None
    # ru_maxrss is in KiB on Linux: the most this process has used, imports included.
    row["compile_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    chosen = sum(compiled.seconds.get(phase, 0.0) for phase in ("calibrate", "fit"))
    row["calibrate_seconds"] = round(chosen, 2)
    row["compile_seconds"] = round(sum(compiled.seconds.values()) - chosen, 2)
    row["phase_seconds"] = {name: round(value, 2) for name, value in compiled.seconds.items()}
    data = package_bytes(made.package.content)
    row["package_bytes"] = len(data)
    row["package_sha3"] = hashlib.sha3_256(data).hexdigest()
    if options.twice:
        again = build(f"zoo:{model}", target, asked).package.content
        row["same_bytes"] = package_bytes(again) == data
    report = make_report(made.package, simulate(made.package))
    row |= {
        "cycles": report.cycles,
        "milliseconds": report.milliseconds,
        "bound_cycles": report.bound,
        "limit": report.limit,
        "ratio": round(report.ratio, 3),
        "array_use": round(report.array_use, 4),
        "ddr_bytes": report.ddr_bytes,
        "min_ddr_bytes": report.min_ddr_bytes,
        "sram_peak": report.sram_peak,
        "instructions": report.instructions,
        "host_layers": [layer for step in report.host for layer in step["layers"]],
        "cycle_simulator_seconds": round(report.simulator_seconds, 2),
    }
    sample = inputs(model, 1, seed=5).samples()[0]
    start = time.perf_counter()
    made.package.run(sample)
    row["functional_simulator_seconds"] = round(time.perf_counter() - start, 2)
    row["equal"], row["compared_layers"] = {}, {}
    for level in filter(None, options.levels.replace("none", "").split(",")):
        found = compare(compiled, "quant", level, sample)
        row["equal"][level] = found.exact
        row["compared_layers"][level] = len(found.layers)
        if not found.exact:
            row["worst"] = found.layers[0].layer
    if options.stock:
        from tilewright.interp.stock import accepts

        row["mlir_opt"] = {
            level: accepts(compiled.stages[level].module) or "accepted"
            for level in ("linalg", "affine")
        }
    return row


def line(row: dict[str, Any]) -> str:
    """Return one line of the table."""
    head = f"{row['model']:<18} {row['target']:<10}"
    if "error" in row:
        return f"{head} FAILED {row['error'].splitlines()[0]}"
    equal = " ".join(f"{k}{'=' if v else '!='}" for k, v in row["equal"].items())
    return (
        f"{head} {row['cycles']:>12,} cycles {row['ratio']:>6.2f}x {row['limit']:<5} "
        f"use {row['array_use']:>6.1%} DDR {row['ddr_bytes'] / 2**20:>7.2f} MiB "
        f"SRAM {row['sram_peak'] / 1024:>7.1f} KiB "
        f"compile {row['compile_seconds']:>5.1f} s {row['compile_mb']:>5} MB "
        f"simulators {row['cycle_simulator_seconds']:.1f} "
        f"{row['functional_simulator_seconds']:.1f} s "
        f"{equal}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
