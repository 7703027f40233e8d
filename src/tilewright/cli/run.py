"""`tilewright run`: run a package on inputs, bit for bit as the chip would."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from tilewright.runtime.runtime import Package


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.epilog = (
        "The chip's part runs on the functional simulator, the host's on onnxruntime.\n"
        "Pictures are preprocessed as in calibration; the package says how.\n"
    )
    parser.add_argument("package", type=Path, help="the .tpupkg file")
    parser.add_argument(
        "--input", "-i", type=Path, action="append", default=[], metavar="PATH",
        help="picture, .npy, .npz or a folder of them (may be repeated)",
    )  # fmt: skip
    parser.add_argument("--random", type=int, metavar="SEED", help="random inputs instead")
    parser.add_argument("--count", type=int, metavar="N", help="at most N samples")
    parser.add_argument("--output", "-o", type=Path, metavar="FILE.npz", help="write all outputs")
    parser.add_argument("--top", type=int, default=3, metavar="K", help="show the K largest values")


CODES = ("int8", "uint8", "int16", "uint16")
"""Types of inputs that are codes of a quantised model."""


def random_inputs(package: Package, seed: int) -> dict[str, Any]:
    """Return seeded normal inputs for a package, in the range it was calibrated for."""
    import numpy as np

    from tilewright.codegen.program import StoreStep

    random = np.random.Generator(np.random.PCG64(seed))
    program = package.content.program
    reach = {
        # int8: a third of the calibrated range is one standard deviation; fp16 has no such range.
        step.value: 40 * scale if (scale := program.tensors[step.tensor].scale) else 1.0
        for step in program.steps
        if isinstance(step, StoreStep)
    }
    values: dict[str, Any] = {}
    for port in package.inputs:
        if port.dtype in ("float32", "fp16"):
            noise = random.standard_normal(port.shape, np.float32)
            values[port.name] = noise * np.float32(reach.get(port.name, 1.0))
        elif port.dtype == "bool":
            values[port.name] = random.integers(0, 2, port.shape).astype(np.bool_)
        elif port.dtype in CODES:
            limits = np.iinfo(port.dtype)
            codes = random.integers(limits.min, limits.max, port.shape, endpoint=True)
            values[port.name] = codes.astype(port.dtype)
        else:
            values[port.name] = random.integers(0, 2, port.shape).astype(port.dtype)
    return values


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    import numpy as np

    from tilewright.cli.output import print_json
    from tilewright.cli.progress import Progress
    from tilewright.codegen.files import atomic_output, check_writable
    from tilewright.diagnostics import UsageError
    from tilewright.runtime.preprocess import Preprocess, load_samples
    from tilewright.runtime.runtime import load

    if bool(options.input) == (options.random is not None):
        raise UsageError("E0702", "give either --input PATH or --random SEED")
    if options.random is not None and options.random < 0:
        raise UsageError("E0702", f"--random must be 0 or more, not {options.random}")
    if options.output is not None:
        if options.output.suffix != ".npz":
            raise UsageError("E0702", f"`{options.output}` must end in .npz")
        check_writable(options.output, options.package, *options.input)
    package = load(options.package)
    kept = package.content.preprocess
    preprocess = Preprocess.from_json(kept) if kept else None
    shapes = {port.name: port.shape for port in package.inputs}
    samples: list[dict[str, Any]] = []
    if options.random is not None:
        samples = [
            random_inputs(package, options.random + index) for index in range(options.count or 1)
        ]
    for path in options.input:
        left = None if options.count is None else options.count - len(samples)
        samples += load_samples(path, shapes, preprocess, left)
    results: list[dict[str, Any]] = []
    with Progress(options.quiet) as progress:
        for index, sample in enumerate(samples):
            progress("run", index / len(samples))
            fitted = {port.name: _typed(sample[port.name], port.dtype) for port in package.inputs}
            results.append(package.run(fitted))
    if options.output is not None:
        arrays: dict[str, Any] = {
            name: np.stack([result[name] for result in results]) for name in results[0]
        }
        with atomic_output(options.output) as scratch, scratch.open("wb") as file:
            np.savez(file, **arrays)
    shown = [
        {name: _top(array, options.top) for name, array in result.items()} for result in results
    ]
    if options.json:
        print_json({"samples": shown, "output": str(options.output) if options.output else None})
        return 0
    for index, result in enumerate(shown):
        for name, row in result.items():
            best = ", ".join(f"{item['index']}: {item['value']:.4g}" for item in row["largest"])
            shape = "x".join(map(str, row["shape"]))
            print(f"sample {index}  {name} ({shape})  largest  {best}")
    return 0


def _typed(array: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    import numpy as np

    if dtype == "float32" and array.dtype.kind in "iub":
        return array.astype(np.float32)
    if dtype in CODES and array.dtype.kind == "f":
        # A picture, as its preprocessing gives it.
        limits = np.iinfo(dtype)
        return np.clip(np.rint(array), limits.min, limits.max).astype(dtype)
    return array


def _top(array: np.ndarray[Any, Any], count: int) -> dict[str, Any]:
    import numpy as np

    flat = array.ravel()
    order = np.argsort(-flat.astype(np.float64), kind="stable")[: max(0, count)]
    return {
        "shape": list(array.shape),
        "largest": [{"index": int(index), "value": float(flat[index])} for index in order],
    }
