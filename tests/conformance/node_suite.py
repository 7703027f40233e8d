"""Runs ONNX's own node tests, as shipped in the `onnx` package, on the front half."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import numpy_helper

from tilewright import onnx_backend
from tilewright.diagnostics import TilewrightError


@dataclass(frozen=True)
class Outcome:
    """What became of one test."""

    name: str
    kind: str
    """`passed`, `bound` (passed with inputs made constants), `refused`, `runtime` (compiled, but
    onnxruntime has no kernel for it) or `wrong`."""
    reason: str = ""


def node_tests() -> list[Path]:
    """Return the folders of all node tests, in order."""
    root = Path(onnx.__file__).parent / "backend/test/data/node"
    return sorted(path for path in root.iterdir() if (path / "model.onnx").exists())


def read_value(path: Path) -> Any:
    """Read an input or output; None for what is no tensor."""
    tensor = onnx.TensorProto()
    data = path.read_bytes()
    try:
        tensor.ParseFromString(data)
        return numpy_helper.to_array(tensor)
    except (DecodeError, TypeError, ValueError):
        # Sequences and optionals are other messages; their tests are refused before this is read.
        return None


def read_set(folder: Path, stem: str) -> list[Any]:
    """Read `stem_0.pb`, `stem_1.pb`... of a data set."""
    files = sorted(folder.glob(f"{stem}_*.pb"), key=lambda p: int(p.stem.rpartition("_")[2]))
    return [read_value(path) for path in files]


def close(found: Any, wanted: Any) -> str:
    """Return what differs, or an empty string; the tolerance is that of ONNX's own runner."""
    if found.shape != wanted.shape:
        return f"shape {found.shape}, not {wanted.shape}"
    if found.dtype != wanted.dtype:
        return f"type {found.dtype}, not {wanted.dtype}"
    if found.dtype.kind in "fc":
        rtol = 1e-2 if found.dtype == np.float16 else 1e-3
        same = np.isclose(found, wanted, rtol=rtol, atol=1e-6, equal_nan=True)
    else:
        same = found == wanted
    if same.all():
        return ""
    where = tuple(int(axis) for axis in np.argwhere(~same)[0])
    return f"{int((~same).sum())} of {same.size} values, first {found[where]} for {wanted[where]}"


def run_test(folder: Path) -> Outcome:
    """Run all data sets of one test."""
    name = folder.name
    model = onnx.load(folder / "model.onnx")
    bound = False
    for data in sorted(folder.glob("test_data_set_*")):
        inputs, outputs = read_set(data, "input"), read_set(data, "output")
        try:
            rep, feed = onnx_backend.prepare_for(model, inputs)
        except TilewrightError as error:
            return Outcome(name, "refused", summary(error))
        bound = bound or bool(rep.bound)
        try:
            found = rep.run(feed)
        except TilewrightError as error:
            kind = "wrong" if error.code == "E0502" else "runtime"
            return Outcome(name, kind, summary(error))
        for index, (got, want) in enumerate(zip(found, outputs, strict=True)):
            if difference := close(np.asarray(got), want):
                return Outcome(name, "wrong", f"output {index}: {difference}")
    return Outcome(name, "bound" if bound else "passed")


def summary(error: TilewrightError) -> str:
    """Return the reason of a refusal without the names of this model."""
    detail = error.details[0] if error.details else ""
    if error.code == "E0102":
        operator, _, rest = detail.partition(" (domain ")
        return f"{error.code} {operator}: {rest.partition('): ')[2].partition('; nodes')[0]}"
    if error.code == "E0104" and detail:
        return f"{error.code} {re.sub(chr(34) + '.*?' + chr(34), '', detail)[:110]}"
    message = re.sub("'.*?'", "...", error.message)[:90]
    return f"{error.code} {message} {detail[:160]}"


def run_all(folders: list[Path]) -> list[Outcome]:
    """Run tests in this process."""
    with open(os.devnull, "w") as quiet, contextlib.redirect_stderr(quiet):
        return [run_test(folder) for folder in folders]


def tally(outcomes: list[Outcome]) -> str:
    """Return the counts, and the reasons of refusals, most frequent first."""
    kinds = Counter(outcome.kind for outcome in outcomes)
    lines = [
        ", ".join(
            f"{kind} {kinds[kind]}" for kind in ("passed", "bound", "refused", "runtime", "wrong")
        )
    ]
    reasons = Counter(f"{o.kind}: {o.reason}" for o in outcomes if o.kind in ("refused", "runtime"))
    lines += [f"{count:5} {reason}" for reason, count in reasons.most_common()]
    lines += [f"WRONG {o.name}: {o.reason}" for o in outcomes if o.kind == "wrong"]
    return "\n".join(lines)
