"""Other quantisers on the same task: their environment, and a process for each run of `peer.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from .task import Feed, Task

PACKAGES = ("nncf==3.4.0", "onnxruntime==1.23.2", "onnx==1.23.2", "sympy")
SECONDS = 3600
"""For one run; full correction of biases is the slowest."""


class PeerError(Exception):
    """A tool refused a model or failed."""


def peers_python(folder: Path) -> Path:
    """Return the Python of an environment with the other tools, made in `folder` if need be.

    Raises:
        PeerError: it cannot be made.
    """
    python = folder / "bin" / "python"
    if not (folder / ".ready").is_file():
        for command in (
            [sys.executable, "-m", "venv", str(folder)],
            [str(python), "-m", "pip", "--quiet", "install", *PACKAGES],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise PeerError(f"{' '.join(command)}: {done.stderr.strip()[-300:]}")
        (folder / ".ready").touch()
    return python


def methods_of(task: Task, weight_bits: int) -> list[str]:
    """Return what is tried on a task: names that `peer.py` knows."""
    if weight_bits == 4:
        return ["ort-minmax", "nncf-weights"]
    names = ["ort-minmax", "ort-percentile", "ort-entropy", "nncf", "nncf-full"]
    names += ["nncf-mixed", "nncf-mixed-full"]
    if task.transformer:
        names += ["nncf-transformer", "nncf-transformer-full"]
    return names


def run_peer(
    task: Task, method: str, python: Path, weight_bits: int
) -> tuple[list[Feed], dict[str, float]]:
    """Return the outputs of the model that a tool quantised, and what it used.

    Raises:
        PeerError: it failed; the message is its last line.
    """
    with tempfile.TemporaryDirectory(prefix="peer-") as name:
        folder = Path(name)
        (folder / "model.onnx").write_bytes(task.model.read_bytes())
        for part, feeds in (("calibration", task.calibration), ("evaluation", task.evaluation)):
            arrays: dict[str, Any] = {
                f"{index}/{key}": array
                for index, feed in enumerate(feeds)
                for key, array in feed.items()
            }
            np.savez(folder / f"{part}.npz", **arrays)
        what = {"weight_bits": weight_bits, "carry": task.carry, "shapes": task.shapes}
        (folder / "task.json").write_text(json.dumps(what), "utf-8")
        script = Path(__file__).with_name("peer.py")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                [str(python), str(script), str(folder), method],
                capture_output=True, text=True, check=False, timeout=SECONDS, env=environment,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PeerError(str(error)) from error
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise PeerError(lines[-1][:300])
        used = json.loads(done.stdout.strip().splitlines()[-1])
        with np.load(folder / f"{method}.npz") as file:
            outputs: list[Feed] = [{} for _ in task.evaluation]
            for key in file.files:
                index, _, output = key.partition("/")
                outputs[int(index)][output] = file[key]
    return outputs, used
