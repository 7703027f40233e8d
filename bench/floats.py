"""The float paths against onnxruntime on the original model, one random input.

    python bench/floats.py --output bench/results/floats.json

float32: `compile(dtype="float32")`, everything on the host: largest error over the largest output.
fp16: the functional simulator of `--target`: signal to noise of the outputs, or why it is refused.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np


def main() -> int:
    """Run the bench."""
    import onnxruntime

    import tilewright
    from tilewright.diagnostics import TilewrightError
    from tilewright.quant.compare import sqnr
    from tilewright.zoo import RECIPES, prepare

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(recipe.name for recipe in RECIPES))
    parser.add_argument("--target", default="tpu_v2")
    parser.add_argument("--output", type=Path, default=Path("build/floats.json"))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for recipe in RECIPES:
        if recipe.name not in options.models.split(","):
            continue
        generator = np.random.default_rng(0)
        image = generator.standard_normal(recipe.input_shape).astype(np.float32)
        inputs = {recipe.input_name: image}
        session = onnxruntime.InferenceSession(str(prepare(recipe.name)))
        wanted: Any = session.run(None, inputs)[0]
        row: dict[str, Any] = {"model": recipe.name, "target": options.target}
        (plain,) = (
            tilewright.compile(f"zoo:{recipe.name}", options.target, dtype="float32")
            .run(inputs)
            .values()
        )
        row["float32_error"] = float(np.abs(plain - wanted).max() / np.abs(wanted).max())
        try:
            (half,) = (
                tilewright.compile(f"zoo:{recipe.name}", options.target, dtype="fp16")
                .run(inputs)
                .values()
            )
            row["fp16_sqnr_db"] = round(sqnr(wanted, half), 1)
        except TilewrightError as error:
            row["fp16_refused"] = f"{error.code}: {error.message}"
        rows.append(row)
        print(row, flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
