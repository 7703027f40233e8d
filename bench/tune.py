"""A sweep as an architect would run it: array and SRAM of edge16 over small networks of the zoo.

    python bench/tune.py --output bench/results/tune.json
    python bench/tune.py --models zoo:resnet50 --vary sram_size=128K,512K,2M --jobs 1

Writes the sweep (`tilewright tune --json`) with the seconds it took and what was already known.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

MODELS = "zoo:pplcnet,zoo:mobilenet-v2,zoo:squeezenet-light"
VARY = ("mac_array_size=8,16,32", "sram_size=64K,256K,1M")


def main() -> int:
    """Run the sweep; exit code 1 when a chip cannot run a model or tilewright has a fault."""
    from tilewright.spec.hardware import load_target
    from tilewright.tune.output import sweep_text
    from tilewright.tune.run import run_sweep
    from tilewright.tune.space import make_space, parse_vary
    from tilewright.zoo import cache_folder

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=MODELS, help="by comma")
    parser.add_argument("--target", default="edge16")
    parser.add_argument("--vary", action="append", help=f"default: {' '.join(VARY)}")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("build/tune.json"))
    options = parser.parse_args()
    base = load_target(options.target)
    space = make_space(base, parse_vary(options.vary or VARY))
    start = time.perf_counter()
    sweep = run_sweep(
        options.models.split(","), base, space, cache=cache_folder() / "tune", jobs=options.jobs,
        tell=lambda line: print(line, file=sys.stderr, flush=True),
    )  # fmt: skip
    content = {
        "seconds": round(time.perf_counter() - start, 1),
        "jobs": options.jobs,
        "known_before": sweep.known,
        **sweep.to_json(),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    print(sweep_text(sweep))
    return 1 if sweep.faults or any(row.failed for row in sweep.rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
