"""The placement solver on files of buffers and on generated ones.

    python bench/place.py --files 'DIR/*.csv' --seeds 20 --output bench/results/place.json
    python bench/place.py --generate 7 --kinds cut --slacks 0.02 > buffers.csv

A file's capacity is the number in its name (`A.1048576.csv`), or --capacity. Two kinds of buffers
are generated: `cut`, a full rectangle of memory and time cut into pieces (so that a placement
exists, without any slack unless some is asked for), and `net`, the lifetimes of a network's tensors
with skip connections, weights and scratch (whether the fullest moment's bytes are enough is not
known). Times are CPU seconds of one process, without the compilation of the solver.
"""

from __future__ import annotations

import argparse
import csv
import glob
import json
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

from tilewright.schedule.allocator import STEPS, Budget, Buffer, Problem, solve
from tilewright.schedule.allocator_csv import read_table
from tilewright.schedule.allocator_model import check

UNIT = 1024
CAPACITY = 1 << 20
KINDS = ("cut", "net")


def cut(seed: int, count: int = 250, slack: float = 0.0) -> Problem:
    """Cut memory x time into `count` pieces; then take `slack` of the area away."""
    draw = random.Random(f"cut {seed}")
    pieces = [(0, 1024, 0, CAPACITY // UNIT)]
    while len(pieces) < count:
        # Large pieces are cut first, but not always, so that some long and large ones stay.
        sample = draw.sample(range(len(pieces)), min(len(pieces), 4))
        chosen = max(sample, key=lambda i: _area(pieces[i]))
        pieces += _parts(draw, *pieces.pop(chosen))
    kept = []
    for t0, t1, m0, m1 in pieces:
        if draw.random() < slack:
            t1 = draw.randint(t0 + 1, t1)
            m1 = draw.randint(m0 + 1, m1)
        kept.append((t0, t1, m1 - m0))
    draw.shuffle(kept)
    return _problem([(t0 * UNIT, t1 * UNIT, size * UNIT) for t0, t1, size in kept], CAPACITY)


def _area(piece: tuple[int, int, int, int]) -> int:
    return (piece[1] - piece[0]) * (piece[3] - piece[2])


def _parts(
    draw: random.Random, t0: int, t1: int, m0: int, m1: int
) -> list[tuple[int, int, int, int]]:
    wide, high = t1 - t0, m1 - m0
    if wide >= 6 and high >= 6 and draw.random() < 0.3:
        # A pinwheel: five pieces that no straight cuts make.
        a, b = sorted(draw.sample(range(t0 + 1, t1), 2))
        c, d = sorted(draw.sample(range(m0 + 1, m1), 2))
        return [
            (t0, b, m0, c), (b, t1, m0, d), (a, t1, d, m1), (t0, a, c, m1), (a, b, c, d),
        ]  # fmt: skip
    if high < 2 or (wide >= 2 and draw.random() < 0.5):
        if wide < 2:
            return [(t0, t1, m0, m1)]
        at = draw.randint(t0 + 1, t1 - 1)
        return [(t0, at, m0, m1), (at, t1, m0, m1)]
    at = draw.randint(m0 + 1, m1 - 1)
    return [(t0, t1, m0, at), (t0, t1, at, m1)]


def net(seed: int, count: int = 250, slack: float = 0.0) -> Problem:
    """Tensors of a network of `count` buffers, in the fullest moment's bytes and `slack` more."""
    draw = random.Random(f"net {seed}")
    found: list[tuple[int, int, int]] = []
    size = 64
    layer = 0
    while len(found) < count:
        if draw.random() < 0.06:
            size = max(4, min(160, int(size * draw.choice((0.5, 0.5, 1.5, 2)))))
        tiles = draw.choice((1, 1, 2, 4))
        for tile in range(tiles):
            now = layer * 8 + tile
            reach = draw.choice((1, 1, 1, 1, 2, 3, 8)) * 8
            found.append((now, now + reach + tiles - 1, max(1, size // tiles)))
            if draw.random() < 0.4:
                found.append((max(0, now - draw.randint(1, 16)), now + 1, draw.randint(1, 60)))
            if draw.random() < 0.2:
                found.append((now, now + 1, draw.randint(1, 120)))
        layer += 1
    end = max(upper for _, upper, _ in found)
    found += [(0, end, draw.randint(1, 6)) for _ in range(3)]
    draw.shuffle(found)
    events = sorted([(a, 1, s) for a, _, s in found] + [(b, 0, -s) for _, b, s in found])
    alive = most = 0
    for _, _, change in events:
        alive += change
        most = max(most, alive)
    capacity = int(most * (1 + slack)) * UNIT
    return _problem([(a, b, s * UNIT) for a, b, s in found], capacity)


def _problem(rows: list[tuple[int, int, int]], capacity: int) -> Problem:
    return Problem(tuple(Buffer(str(i), *row) for i, row in enumerate(rows)), capacity)


GENERATORS = {"cut": cut, "net": net}


def measure(problem: Problem, steps: int) -> dict[str, Any]:
    """Solve one problem; the placement is checked by the definition, not by the solver."""
    start = time.process_time()
    answer = solve(problem, steps=steps)
    seconds = time.process_time() - start
    if answer.offsets is not None:
        broken = check(problem, answer.offsets)
        if broken:
            raise SystemExit(f"wrong placement: {broken}")
    return {
        "buffers": len(problem.buffers),
        "status": answer.status,
        "method": answer.method,
        "steps": answer.steps,
        "cpu_seconds": round(seconds, 2),
    }


def main() -> int:
    """Run the bench; exit code 1 when a file is not placed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", help="pattern of CSV files")
    parser.add_argument("--capacity", type=int, help="of all files")
    parser.add_argument("--seeds", type=int, default=0, help="generated problems of each kind")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--counts", default="150,300", help="buffers of generated problems")
    parser.add_argument("--slacks", default="0,0.02,0.1")
    parser.add_argument("--kinds", default=",".join(KINDS), help="cut, net or both")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed-steps", type=int, default=100_000, help="of generated problems")
    parser.add_argument("--generate", type=int, metavar="SEED", help="print a problem as CSV")
    parser.add_argument("--output", type=Path, default=Path("build/place.json"))
    options = parser.parse_args()
    slacks = [float(word) for word in options.slacks.split(",")]
    counts = [int(word) for word in options.counts.split(",")]
    if options.generate is not None:
        made = GENERATORS[options.kinds.split(",")[0]](options.generate, counts[0], slacks[0])
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(("id", "lower", "upper", "size"))
        writer.writerows((b.name, b.lower, b.upper, b.size) for b in made.buffers)
        print(f"capacity {made.capacity}", file=sys.stderr)
        return 0
    warm_up()
    result: dict[str, Any] = {
        "steps_files": options.steps,
        "steps_generated": options.seed_steps,
        "files": {},
        "generated": [],
    }
    for name in sorted(glob.glob(options.files)) if options.files else []:
        path = Path(name)
        digits = re.search(r"\.(\d+)\.csv$", path.name)
        capacity = options.capacity or int(digits[1] if digits else 0)
        row = measure(read_table(path, capacity).problem(capacity, 1), options.steps)
        result["files"][path.stem] = row
        print(f"{path.stem:12} {row}", flush=True)
    files = list(result["files"].values())
    result["placed_files"] = sum(row["status"] == "placed" for row in files)
    result["cpu_seconds_files"] = round(sum(row["cpu_seconds"] for row in files), 2)
    for kind in options.kinds.split(","):
        for count in counts:
            for slack in slacks:
                if options.seeds:
                    seeds = range(options.first, options.first + options.seeds)
                    row = share(kind, count, slack, list(seeds), options.seed_steps)
                    result["generated"].append(row)
                    print(row, flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print(f"{result['placed_files']} of {len(files)} files in {result['cpu_seconds_files']} CPU s")
    return 0 if result["placed_files"] == len(files) else 1


def warm_up() -> None:
    """Have everything compiled: a problem that only the search can decide, and a beam's."""
    from tilewright.schedule.allocator_search import Search

    buffers = tuple(Buffer(str(i), i, i + 1, 2) for i in range(3))
    problem = Problem(buffers, 8, ((0, 1), (0, 2), (1, 2)), 4)
    budget = Budget(100, None)
    assert solve(problem).method == "search"
    assert Search(problem, [0, 1], [0, 1]).run_beam((0, "WA", 0), 2, budget) == "placed"


def share(kind: str, count: int, slack: float, seeds: list[int], steps: int) -> dict[str, Any]:
    """Solve the problems of all seeds."""
    rows = [measure(GENERATORS[kind](seed, count, slack), steps) for seed in seeds]
    seconds = sorted(row["cpu_seconds"] for row in rows)
    return {
        "kind": kind,
        "buffers": count,
        "slack": slack,
        "seeds": [seeds[0], seeds[-1]],
        "placed": sum(row["status"] == "placed" for row in rows),
        "infeasible": sum(row["status"] == "infeasible" for row in rows),
        "unknown": sum(row["status"] == "unknown" for row in rows),
        "by_greedy": sum(row["method"] == "greedy" for row in rows),
        "cpu_seconds_median": seconds[len(seconds) // 2],
        "cpu_seconds_total": round(sum(seconds), 2),
    }


if __name__ == "__main__":
    sys.exit(main())
