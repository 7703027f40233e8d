"""A model made ready for a sweep: imported, calibrated and quantised once, then kept as IR.

Of all fields of a target only the rounding changes the integer graph, and it is not varied. The
graph lies in the cache folder under the digest of everything it is made from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import TilewrightError

if TYPE_CHECKING:
    from tilewright.spec.hardware import Hardware

Array = npt.NDArray[Any]

ZOO_SAMPLES = 8
"""Inputs a zoo model is calibrated on."""
RANDOM_SAMPLES = 4
"""Inputs drawn for a model without calibration data; cycles hardly depend on the ranges."""


@dataclass(frozen=True)
class Calibration:
    """Where the ranges of models come from."""

    data: Path | None = None
    """Folder or file of samples; None: a zoo model's own, else random inputs."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, "tuple[int, ...]"])
    """Of inputs with dynamic dimensions."""


@dataclass(frozen=True)
class Prepared:
    """A quantised model on disk."""

    name: str
    """As the user named it."""
    path: Path
    """The quant level's IR; its weights lie beside it."""
    key: str
    """Digest of what it was made from."""


def code_digest() -> str:
    """Return a digest of tilewright's own code: results of another version are not used."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha3_256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def prepare(
    model: str, target: Hardware, calibration: Calibration, folder: Path, code: str
) -> Prepared:
    """Return a model's integer graph for chips with the target's rounding, made if not cached.

    Args:
        model: an ONNX file, or `zoo:NAME`.
        target: any chip of the sweep.
        calibration: where ranges come from.
        folder: the cache's.
        code: `code_digest()`.

    Raises:
        TilewrightError: the model or its samples cannot be used; E0701, the cache is not writable.
    """
    from tilewright.api import resolve_model

    path, shapes, preprocess = resolve_model(model)
    shapes = {**shapes, **calibration.shapes}
    content = {
        "code": code,
        "model": hashlib.sha3_256(path.read_bytes()).hexdigest(),
        "shapes": {name: list(shape) for name, shape in sorted(shapes.items())},
        "samples": _samples_digest(model, calibration),
        "rounding": target.rounding,
    }
    key = hashlib.sha3_256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
    prepared = Prepared(model, folder / f"{key}.mlir", key)
    if prepared.path.is_file():
        return prepared
    from tilewright.compiler import front_end
    from tilewright.ir.io import write_module
    from tilewright.ir.stage import Stage
    from tilewright.levels import signature
    from tilewright.ptq.options import QuantOptions
    from tilewright.ptq.prepare import observe_samples, quantise
    from tilewright.runtime.preprocess import load_samples

    front = front_end(path, target, shapes=shapes)
    module, context = front.stage.module, front.context
    inputs = {name: shape for name, shape, _ in signature(module, context)}
    samples: Iterable[Mapping[str, Array]]
    if calibration.data is not None:
        read = load_samples(calibration.data, inputs, preprocess, ZOO_SAMPLES)
        samples = ({name: array.astype(np.float32) for name, array in it.items()} for it in read)
    elif model.startswith("zoo:"):
        from tilewright.zoo import inputs as zoo_inputs

        samples = zoo_inputs(model[4:], ZOO_SAMPLES, seed=1).samples()
    else:
        samples = _drawn(inputs)
    # Codes and biases do not change cycles: the quickest way to them will do.
    asked = QuantOptions(level=0).resolved()
    top = Stage(module.clone(), context.weights.copy())
    quantise(module, context, observe_samples(top, context, samples, asked), asked)
    # The file names no target: any with this rounding may use it.
    context.target = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TilewrightError("E0701", f"cannot write `{folder}`", [str(error)]) from error
    write_module(module, context, prepared.path)
    return prepared


def _drawn(inputs: Mapping[str, tuple[int, ...]]) -> Iterator[dict[str, Array]]:
    generator = np.random.default_rng(0)
    for _ in range(RANDOM_SAMPLES):
        yield {
            name: generator.standard_normal(shape).astype(np.float32)
            for name, shape in inputs.items()
        }


def _samples_digest(model: str, calibration: Calibration) -> str:
    from tilewright.runtime.preprocess import list_samples

    if calibration.data is None:
        return "zoo" if model.startswith("zoo:") else "random"
    digest = hashlib.sha3_256()
    for path in list_samples(calibration.data)[:ZOO_SAMPLES]:
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()
