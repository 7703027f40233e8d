"""How fast both simulators are, and how their time grows with the length of a program.

    python bench/simulators.py --output bench/results/simulators.json \
        --plot bench/results/simulators.png
    python bench/simulators.py --pairs mobilenet-v2:edge16 --times 1,2 --compiled ""

Three parts. *Networks*: decoding, functional and cycle simulation of one input. *Growth*: the
first pair's program repeated up to ten times (its instructions without `halt`, a `fence` between
two of them), and the longer programs of `--compiled`, as they are; `exponent` is the slope of the
repeated programs' times on logarithmic scales, 1 where time is in proportion to instructions.
*Start*: a fresh process that simulates three instructions, with the compiled kernel of the cycle
simulator in numba's cache and without.

Seconds are CPU seconds of one thread (start: wall), the median of `--runs` after one more, which is
reported as `first`. The plot needs matplotlib.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tilewright.api import CompileOptions, build
from tilewright.runtime.runtime import Executor
from tilewright.sim.cycle import CycleSimulator
from tilewright.sim.functional import FunctionalSimulator
from tilewright.spec.hardware import load_target
from tilewright.spec.program import Instr, decode_program, encode_program
from tilewright.zoo import inputs

PAIRS = "resnet50:edge16,resnet50:tpu_v2,resnet50:tpu_v2_1m"
PHASES = ("decode", "functional", "cycle")
START = """
import numpy as np
from tilewright.sim.cycle import CycleSimulator
from tilewright.sim.functional import FunctionalSimulator
from tilewright.spec.hardware import load_target
from tilewright.spec.program import Instr
target = load_target("edge16")
program = [Instr("dma_fill", {"n0": 64}), Instr("fence"), Instr("halt")]
{FUNCTIONAL}
{CYCLE}
"""
MOST_EXPONENT = 1.15
"""A larger one is worse than linear: beyond the scatter of timings, and the step from programs that
fit into caches to those that do not.
"""


def compiled(pair: str) -> Executor:
    """Compile MODEL:TARGET with the defaults; its network must be one program."""
    model, target = pair.split(":")
    samples = inputs(model, 4, seed=1).samples()
    made = build(
        f"zoo:{model}", load_target(target), CompileOptions(calibration=samples, keep_ir=())
    )
    executor = made.package.executor
    assert len(executor.program.tpu_steps) == 1, "a network of one program"
    return executor


def timed(run: Callable[[], Any], runs: int) -> tuple[float, float, Any]:
    """Return CPU seconds of the first run, the median of `runs` more, and the last result."""
    seconds: list[float] = []
    result = None
    for _ in range(runs + 1):
        gc.collect()
        start = time.process_time()
        result = run()
        seconds.append(time.process_time() - start)
    return seconds[0], statistics.median(seconds[1:]), result


def measure(executor: Executor, program: Sequence[Instr], runs: int) -> dict[str, Any]:
    """Time a program with all its phases."""
    code = encode_program(program)
    target, registers = executor.target, executor.registers
    ddr = executor.ddr.copy()
    # All but the first run start from what the last left: the work is the same.
    functional, cycle = FunctionalSimulator(target), CycleSimulator(target)
    row: dict[str, Any] = {"instructions": len(program)}
    phases: dict[str, Callable[[], Any]] = {
        "decode": lambda: decode_program(code),
        "functional": lambda: functional.run(program, ddr, registers=registers),
        "cycle": lambda: cycle.run(program, registers=registers),
    }
    for name, run in phases.items():
        first, median, result = timed(run, runs)
        row[name] = {
            "first": round(first, 3),
            "median": round(median, 3),
            "us_per_instruction": round(median / len(program) * 1e6, 1),
        }
        if name == "functional":
            row["macs"] = result.macs
        elif name == "cycle":
            row["cycles"] = result.cycles
            row["mega_cycles_per_second"] = round(result.cycles / median / 1e6, 1)
    return row


def repeated(program: Sequence[Instr], times: int) -> list[Instr]:
    """Return a program `times` over; addresses are relative to registers set once, at its start."""
    assert program[-1].name == "halt"
    body = list(program[:-1])
    whole: list[Instr] = []
    for _ in range(times):
        whole += [*body, Instr("fence")]
    return [*whole[:-1], program[-1]]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the least-squares slope of (instructions, seconds) on logarithmic scales."""
    xs, ys = zip(*((math.log(n), math.log(s)) for n, s in points), strict=True)
    mean_x, mean_y = statistics.mean(xs), statistics.mean(ys)
    above = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return above / sum((x - mean_x) ** 2 for x in xs)


def start_up() -> dict[str, float]:
    """Return wall seconds of a fresh process that simulates three instructions."""
    functional = "FunctionalSimulator(target).run(program, np.zeros(64, np.uint8))"
    cycle = "CycleSimulator(target).run(program)"

    def once(functional: str, cycle: str, cache: str | None) -> float:
        text = START.replace("{FUNCTIONAL}", functional).replace("{CYCLE}", cycle)
        environment = os.environ | ({"NUMBA_CACHE_DIR": cache} if cache else {})
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", text], check=True, env=environment)
        return time.perf_counter() - start

    with tempfile.TemporaryDirectory() as cache:
        # The first of two in an empty cache compiles the kernel, the second finds it.
        cold = once("", cycle, cache)
        warm = statistics.median(once("", cycle, cache) for _ in range(3))
    return {
        "functional": round(statistics.median(once(functional, "", None) for _ in range(3)), 2),
        "cycle_kernel_cached": round(warm, 2),
        "cycle_kernel_compiled": round(cold, 2),
    }


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw seconds over instructions, with the line of proportion through the shortest program."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 5))
    growth = result["growth"]
    for name in PHASES:
        points = [(row["instructions"], row[name]["median"]) for row in growth["repeated"]]
        (line,) = axes.plot(*zip(*points, strict=True), "o-", label=f"{name}, repeated")
        first = points[0]
        axes.plot(
            [first[0], points[-1][0]],
            [first[1], first[1] * points[-1][0] / first[0]],
            ":", color=line.get_color(),
        )  # fmt: skip
        for pair, row in growth["compiled"].items():
            axes.plot(
                row["instructions"], row[name]["median"], "x", color=line.get_color(),
                label=f"{name}, {pair}",
            )  # fmt: skip
    axes.set(
        xlabel="instructions", ylabel="CPU seconds", xlim=(0, None), ylim=(0, None),
        title=f"{growth['pair']} repeated; dotted: in proportion to the shortest",
    )  # fmt: skip
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def main() -> int:
    """Run the bench; exit code 1 when a time grows faster than in proportion."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", default=PAIRS, help="MODEL:TARGET, by comma")
    parser.add_argument("--times", default="1,2,4,6,8,10", help="repetitions of the first pair")
    parser.add_argument("--compiled", default="resnet50:tiny8", help="longer programs, by comma")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("build/simulators.json"))
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {"runs": options.runs, "networks": {}, "start_seconds": start_up()}
    print("start", result["start_seconds"], flush=True)
    pairs = options.pairs.split(",")
    growth: dict[str, Any] = {"pair": pairs[0], "repeated": [], "compiled": {}, "exponent": {}}
    for pair in pairs:
        executor = compiled(pair)
        program = executor.code(executor.program.tpu_steps[0])
        result["networks"][pair] = row = measure(executor, program, options.runs)
        print(pair, row, flush=True)
        for times in map(int, options.times.split(",")) if pair == pairs[0] else ():
            row = measure(executor, repeated(program, times), options.runs)
            growth["repeated"].append(row)
            print(f"{pair} x {times}", row, flush=True)
    for pair in filter(None, options.compiled.split(",")):
        executor = compiled(pair)
        program = executor.code(executor.program.tpu_steps[0])
        growth["compiled"][pair] = row = measure(executor, program, options.runs)
        print(pair, row, flush=True)
    for name in PHASES if len(growth["repeated"]) > 1 else ():
        points = [(row["instructions"], row[name]["median"]) for row in growth["repeated"]]
        growth["exponent"][name] = round(slope(points), 3)
    result["growth"] = growth
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    if options.plot is not None:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        plot(result, options.plot)
    print("exponents", growth["exponent"])
    return int(any(value > MOST_EXPONENT for value in growth["exponent"].values()))


if __name__ == "__main__":
    sys.exit(main())
