"""int8 against float on photographs: top-1, agreement, and signal to noise of the logits.

    python bench/accuracy.py --images DIR --model efficientnet-lite0 --target edge16

DIR holds `labels.csv` with columns file, label and split; the split `calibration` is calibrated on,
`evaluation` is measured. The integer model runs on the integer reference, which the other levels
equal bit for bit; the float model is the ONNX file itself on onnxruntime.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=Path, required=True, help="folder with labels.csv")
    parser.add_argument("--models", default="efficientnet-lite0,mobilenet-v2")
    parser.add_argument("--targets", default="edge16,tpu_v2")
    parser.add_argument("--method", default="kl", help="calibration method")
    parser.add_argument("--activations", choices=("symmetric", "asymmetric"), default="symmetric")
    parser.add_argument("--calibration", type=int, default=100, help="at most so many pictures")
    parser.add_argument("--evaluation", type=int, default=200, help="at most so many pictures")
    parser.add_argument("--output", type=Path, default=Path("build/accuracy.json"))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for model in options.models.split(","):
        for target in options.targets.split(","):
            row = measure(model, target, options)
            rows.append(row)
            print(
                f"{model:<18} {target:<8} {options.method}: float {row['float_top1']:.1%}, "
                f"int8 {row['int8_top1']:.1%}, agreement {row['agreement']:.1%}, "
                f"SQNR {row['sqnr_db']:.2f} dB over {row['pictures']} pictures, "
                f"{row['seconds']:.0f} s",
                flush=True,
            )
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    return 0


def measure(model: str, target: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one model on one target."""
    import onnxruntime

    from tilewright.compiler import compile_model, front_end
    from tilewright.quant.reference import QuantSession
    from tilewright.runtime.preprocess import read_picture
    from tilewright.spec.hardware import load_target
    from tilewright.zoo import find, prepare

    start = time.perf_counter()
    recipe, path, chip = find(model), prepare(model), load_target(target)
    with (options.images / "labels.csv").open(encoding="utf-8") as file:
        listed = list(csv.DictReader(file))

    def pictures(split: str, limit: int) -> list[tuple[Any, int]]:
        chosen = [row for row in listed if row["split"] == split][:limit]
        return [
            (read_picture(options.images / row["file"], recipe.preprocess), int(row["label"]))
            for row in chosen
        ]

    samples = [
        {recipe.input_name: array} for array, _ in pictures("calibration", options.calibration)
    ]
    front = front_end(path, chip, shapes={recipe.input_name: recipe.input_shape})
    compiled = compile_model(
        front,
        chip,
        samples=samples,
        method=options.method,
        limit=options.calibration,
        activations=options.activations,
    )
    quant = compiled.stages["quant"]
    reference = QuantSession(quant.module, quant.weights)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    signal = noise = 0.0
    float_right = int_right = agreed = 0
    each: list[float] = []
    evaluated = pictures("evaluation", options.evaluation)
    for array, label in evaluated:
        result: Any = session.run(None, {recipe.input_name: array})[0]
        wanted = result.astype(np.float64).ravel()
        found = next(iter(reference.run({recipe.input_name: array}).values()))
        got = found.astype(np.float64).ravel()
        one, apart = float(wanted @ wanted), float(np.sum((wanted - got) ** 2))
        signal, noise = signal + one, noise + apart
        each.append(10 * math.log10(one / apart) if apart else math.inf)
        float_right += int(wanted.argmax() == label)
        int_right += int(got.argmax() == label)
        agreed += int(wanted.argmax() == got.argmax())
    count = len(evaluated)
    return {
        "model": model,
        "target": target,
        "method": options.method,
        "activations": options.activations,
        "calibration_pictures": len(samples),
        "pictures": count,
        "float_top1": float_right / count,
        "int8_top1": int_right / count,
        "agreement": agreed / count,
        "sqnr_db": 10 * math.log10(signal / noise) if noise else math.inf,
        "worst_sqnr_db": min(each),
        "seconds": time.perf_counter() - start,
    }


if __name__ == "__main__":
    raise SystemExit(main())
