"""Whole networks on the RTL: values against the functional, times against the cycle simulator.

    python bench/cosim.py --output bench/results/cosim.json
    python bench/cosim.py --models pplcnet,resnet50 --targets edge16

For each pair: instructions, cycles measured on the RTL and simulated, whether values and times of
all instructions are equal, wall seconds of the RTL and cycles a second.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

RUN = "import sys; from tilewright.cli import main; sys.exit(main())"


def main() -> int:
    """Run the bench; exit code 1 when anything differs or fails."""
    from tilewright.zoo import RECIPES

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(recipe.name for recipe in RECIPES))
    parser.add_argument("--targets", default="edge16,tiny8")
    parser.add_argument("--output", type=Path, default=Path("build/cosim.json"))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for model in options.models.split(","):
        for target in options.targets.split(","):
            row = measure(model, target)
            rows.append(row)
            print(line(row), flush=True)
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    good = all(row.get("equal", False) for row in rows)
    print(f"{len(rows)} pairs, {'all equal' if good else 'NOT all equal'}: {options.output}")
    return 0 if good else 1


def measure(model: str, target: str) -> dict[str, Any]:
    """Co-simulate one model in a process of its own."""
    command = [sys.executable, "-c", RUN, "cosim", f"zoo:{model}", "--target", target]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or not done.stdout:
        last = done.stderr.strip().splitlines()[-3:] or ["died"]
        return {"model": model, "target": target, "error": " ".join(last)}
    found = json.loads(done.stdout)
    programs = found["programs"]
    seconds = sum(item["rtl_seconds"] for item in programs)
    cycles = sum(item["rtl_cycles"] for item in programs)
    return {
        "model": model,
        "target": target,
        "equal": found["equal"],
        "programs": len(programs),
        "instructions": sum(item["instructions"] for item in programs),
        "rtl_cycles": cycles,
        "simulated_cycles": sum(item["simulated_cycles"] for item in programs),
        "equal_values": all(item["equal_values"] for item in programs),
        "equal_times": all(item["equal_times"] for item in programs),
        "rtl_seconds": round(seconds, 2),
        "rtl_cycles_per_second": round(cycles / max(seconds, 1e-9)),
    }


def line(row: dict[str, Any]) -> str:
    """Return a row as text."""
    head = f"{row['model']:<20} {row['target']:<7}"
    if "error" in row:
        return f"{head} FAILED: {row['error']}"
    equal = "equal" if row["equal"] else "NOT equal"
    return (
        f"{head} {equal:<9} {row['rtl_cycles']:>12,} cycles on RTL, "
        f"{row['simulated_cycles']:>12,} simulated, {row['instructions']:>8,} instructions, "
        f"{row['rtl_seconds']:>7.1f} s, {row['rtl_cycles_per_second']:>10,} cycles/s"
    )


if __name__ == "__main__":
    sys.exit(main())
