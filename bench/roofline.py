"""How near real networks come to their roofline, on every target that the goals name.

    python bench/roofline.py --output bench/results/roofline.json
    python bench/roofline.py --pairs resnet50:edge16_vela_512k,pplcnet:edge16 --jobs 2

The zoo on edge16, tpu_v2 and tpu_v2_1m; ResNet-50 and MobileNetV2 on edge16_vela with 128 KB, 512
KB and 2 MB of SRAM. Each pair runs in a process of its own: cycles, roofline and floor
(docs/concepts/bound.md), the roofline's parts, what limits the network and every layer above 1.5 x
its roofline, how busy the array is in layers that it bounds, DDR bytes, SRAM peak, compile seconds
and the most memory the process used. ResNet-50 on tpu_v2 is compiled without fusion, too: `unfused`
has what that costs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewright.report.report import Report

TARGETS = ("edge16", "tpu_v2", "tpu_v2_1m")
VELA_TARGETS = ("edge16_vela_128k", "edge16_vela_512k", "edge16_vela_2m")
VELA_MODELS = ("resnet50", "mobilenet-v2")
UNFUSED = ("resnet50:tpu_v2",)
"""Pairs that are compiled without fusion, too."""
MODELS = (
    "resnet50", "mobilenet-v2", "efficientnet-lite0", "pplcnet", "ppocr-cls", "opennsfw",
    "squeezenet-light", "resnet50-light",
)  # fmt: skip


def main() -> int:
    """Run the bench; exit code 1 when a pair fails or is faster than its roofline."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", help="MODEL:TARGET, by comma (default: all)")
    parser.add_argument("--samples", type=int, default=16, help="calibration samples")
    parser.add_argument("--output", type=Path, default=Path("build/roofline.json"))
    parser.add_argument("--jobs", type=int, default=1, help="pairs at a time")
    parser.add_argument("--one", metavar="MODEL:TARGET", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        model, target = options.one.split(":")
        print(json.dumps(measure(model, target, options.samples)))
        return 0
    pairs = options.pairs.split(",") if options.pairs else all_pairs()
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        # In the order of the pairs, whichever ends first.
        for row in pool.map(lambda pair: in_process(pair, options.samples), pairs):
            rows.append(row)
            print(line(row), flush=True)
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(summary(rows), indent=1) + "\n", "utf-8")
    to_padded = means(rows, "padded_ratio")
    for name, mean in means(rows, "ratio").items():
        print(f"{name:<18} geometric mean {mean:.3f} x bound, {to_padded[name]:.3f} x padded")
    good = all(row.get("ratio", 0) >= 1 for row in rows)
    print(f"{len(rows)} pairs, {'all good' if good else 'NOT all good'}: {options.output}")
    return 0 if good else 1


def in_process(pair: str, samples: int) -> dict[str, Any]:
    """Return the row of one pair, measured in a process of its own."""
    command = [sys.executable, __file__, "--samples", str(samples), "--one", pair]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    if not done.returncode:
        return json.loads(done.stdout.splitlines()[-1])
    model, target = pair.split(":")
    last = done.stderr.strip().splitlines()[-1:] or ["died"]
    return {"model": model, "target": target, "error": last[0]}


def all_pairs() -> list[str]:
    """Return the pairs of the goals: networks with few layers first."""
    zoo = [f"{model}:{target}" for target in TARGETS for model in MODELS]
    return zoo + [f"{model}:{target}" for target in VELA_TARGETS for model in VELA_MODELS]


def measure(model: str, target: str, count: int) -> dict[str, Any]:
    """Return the row of one pair."""
    from dataclasses import replace

    from tilewright.api import CompileOptions, build
    from tilewright.report.report import make_report
    from tilewright.runtime.simulation import simulate
    from tilewright.spec.hardware import load_target
    from tilewright.zoo import inputs

    samples = inputs(model, count, seed=1).samples()
    asked = CompileOptions(calibration=samples, keep_ir=())
    start = time.process_time()
    made = build(f"zoo:{model}", load_target(target), asked)
    processor = time.process_time() - start
    compiled = made.compiled
    assert compiled is not None
    # ru_maxrss is in KiB on Linux: the most this process has used, calibration included.
    memory = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    report = make_report(made.package, simulate(made.package))
    limits: dict[str, int] = {}
    for row in report.slow:
        limits[row.limited.what] = limits.get(row.limited.what, 0) + 1
    seconds = compiled.seconds
    unfused: dict[str, Any] = {}
    if f"{model}:{target}" in UNFUSED:
        apart = build(f"zoo:{model}", load_target(target), replace(asked, fuse=False))
        other = simulate(apart.package)
        unfused = {
            "cycles": other.cycles,
            "ddr_bytes": other.ddr_bytes,
            "ddr_saved": round(1 - report.ddr_bytes / other.ddr_bytes, 4),
        }
    chosen = sum(seconds.get(phase, 0.0) for phase in ("calibrate", "fit"))
    return {
        "model": model,
        "target": target,
        "cycles": report.cycles,
        "milliseconds": report.milliseconds,
        "bound_cycles": report.bound,
        "bound_by": report.bound_by,
        "array_bound": report.array_bound,
        "vector_bound": report.vector_bound,
        "ddr_bound": report.ddr_bound,
        "order_bound": report.order_bound,
        "floor_cycles": report.floor,
        "floor_by": report.floor_by,
        "ratio": round(report.ratio, 4),
        "padded_cycles": report.padded,
        "padded_ratio": round(report.cycles / report.padded, 4),
        "limited_by": report.limited.what,
        "why": report.limited.why,
        "layers": sum(row.device == "tpu" for row in report.layers),
        "slow_layers": limits,
        "slow_share": round(sum(row.cycles for row in report.slow) / report.cycles, 4),
        "slow": [
            {
                "layer": row.name,
                "cycles": row.cycles,
                "ratio": round(row.ratio, 3),
                "bound_by": row.limit,
                "mapping": row.mapping,
                "limited_by": row.limited.what,
                "why": row.limited.why,
            }
            for row in report.slow
        ],
        "array_use": round(report.array_use, 4),
        "array_bound_layers": array_layers(report),
        "ddr_bytes": report.ddr_bytes,
        "min_ddr_bytes": report.min_ddr_bytes,
        "unfused": unfused,
        "steps": len(report.steps),
        "sram_peak": report.sram_peak,
        "instructions": report.instructions,
        "compile_seconds": round(sum(seconds.values()) - chosen, 2),
        # Of the processor, all threads, calibration included: a busy machine does not change it.
        "processor_seconds": round(processor, 2),
        "calibrate_seconds": round(chosen, 2),
        "compile_mb": memory,
    }


def array_layers(report: Report) -> dict[str, Any]:
    """Return how well the layers that the array bounds use it, all of them together.

    `busy`: of their cycles those in which the array works; `bound`: their array bounds; `use`:
    multiply-accumulates over what all cells could do.
    """
    rows = [row for row in report.layers if row.limit == "array" and row.bound_cycles]
    cycles = sum(row.cycles for row in rows)
    if not cycles:
        return {"layers": 0}
    return {
        "layers": len(rows),
        "share": round(cycles / report.cycles, 4),
        "busy": round(sum(row.mac_busy for row in rows) / cycles, 4),
        "bound": round(sum(row.array_bound for row in rows) / cycles, 4),
        "use": round(sum(row.macs for row in rows) / cycles / report.array_size**2, 4),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the rows with the geometric means of cycles over roofline and over padded cycles."""
    machine = {"python": platform.python_version(), "cpus": os.cpu_count()}
    return {
        "geometric_mean": means(rows, "ratio"),
        "geometric_mean_padded": means(rows, "padded_ratio"),
        "machine": machine,
        "pairs": rows,
    }


def means(rows: list[dict[str, Any]], key: str) -> dict[str, float]:
    """Return the geometric mean of a ratio by target, over the zoo's targets and the others."""
    groups = {target: (target,) for target in (*TARGETS, *VELA_TARGETS)}
    groups |= {"zoo": TARGETS, "vela": VELA_TARGETS}
    found: dict[str, float] = {}
    for name, targets in groups.items():
        ratios = [row[key] for row in rows if row["target"] in targets and key in row]
        if ratios:
            logs = sum(math.log(ratio) for ratio in ratios)
            found[name] = round(math.exp(logs / len(ratios)), 4)
    return found


def line(row: dict[str, Any]) -> str:
    """Return one line of the table."""
    head = f"{row['model']:<18} {row['target']:<16}"
    if "error" in row:
        return f"{head} FAILED {row['error']}"
    return (
        f"{head} {row['cycles']:>11,} cycles {row['ratio']:>5.2f} x bound ({row['bound_by']:<6}) "
        f"{row['padded_ratio']:>5.2f} x padded "
        f"limited by {row['limited_by']:<10} "
        f"use {row['array_use']:>6.1%} busy {row['array_bound_layers'].get('busy', 0):>6.1%} "
        f"DDR {row['ddr_bytes'] / 2**20:>7.2f} MiB compile {row['compile_seconds']:>5.1f} s "
        f"(processor {row['processor_seconds']:.1f}) "
        f"{row['compile_mb']:>5} MB"
        + (f" fusion saves {row['unfused']['ddr_saved']:.1%} of DDR" if row["unfused"] else "")
    )


if __name__ == "__main__":
    raise SystemExit(main())
