"""What the modules' benches share: calling tools, Verilator's runtime, and when to skip."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path


def call(command: Sequence[str | Path], folder: Path) -> None:
    """Run a tool; what it says is the failure's text."""
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command[0]}:\n{done.stdout}\n{done.stderr}"


def compiler() -> list[str]:
    """Return the compiler's command with Verilator's include folders."""
    root = subprocess.run(
        ["verilator", "--getenv", "VERILATOR_ROOT"], capture_output=True, text=True, check=True
    ).stdout.strip()
    include = Path(root) / "include"
    return ["g++", "-O1", "-std=c++17", "-pthread", f"-I{include}", f"-I{include}/vltstd"]


def build_runtime(folder: Path) -> list[Path]:
    """Return Verilator's runtime as object files, which all targets share."""
    command = compiler()
    include = Path(command[-2].removeprefix("-I"))
    names = ("verilated", "verilated_threads")
    call([*command, "-c", *(include / f"{name}.cpp" for name in names)], folder)
    return [folder / f"{name}.o" for name in names]
