"""Builds `tw_top` with stub engines for a target by Verilator, and runs programs on it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from tilewright.rtl.package import sv_package
from tilewright.spec.hardware import Hardware

HERE = Path(__file__).parent
CORE = ("enable", "queue", "fetch", "seq", "sem", "bank", "sram", "ddr", "counters", "top")
"""The core's modules; the engines are stubs."""


def call(command: Sequence[str | Path], folder: Path) -> str:
    """Run a tool that must succeed; return what it prints."""
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command[0]}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def core_sources() -> list[Path]:
    """Return the core's modules."""
    return [Path(str(resources.files("tilewright.rtl") / f"tw_{name}.sv")) for name in CORE]


def build(hardware: Hardware, folder: Path) -> Path:
    """Return the bench's program for a target, built in `folder` (with planted faults)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tw_pkg.sv").write_text(sv_package(hardware, faults=True))
    words = hardware.sram_size // hardware.sram_word_bytes
    sizes = (
        f"-DG_BYTES={hardware.ddr_bus_bytes}",
        f"-DW_BYTES={hardware.sram_word_bytes}",
        f"-DSRAM_WORDS={words}",
    )
    call(
        [
            *("verilator", "--cc", "-Wall", "-Wno-DECLFILENAME", "--x-initial", "unique", "-O3"),
            *("--top-module", "tw_top", "-Mdir", "model", "tw_pkg.sv", *core_sources()),
            HERE / "stub_engines.sv",
        ],
        folder,
    )
    include = Path(call(["verilator", "--getenv", "VERILATOR_ROOT"], folder).strip()) / "include"
    program = folder / "core_bench"
    call(
        [
            *("g++", "-O1", "-std=c++17", "-w", *sizes, "-Imodel"),
            *(f"-I{include}", f"-I{include}/vltstd", *sorted((folder / "model").glob("*.cpp"))),
            *(include / "verilated.cpp", include / "verilated_threads.cpp"),
            *(HERE / "core_bench.cpp", "-pthread", "-o", program),
        ],
        folder,
    )
    return program


@dataclass(frozen=True)
class Seen:
    """What a run showed."""

    log: list[str]
    """A line a cycle, each followed by the words read (sorted by port)."""
    end: str
    """`finished`, `trapped` or `limit`, and the cycle."""
    counters: list[int]
    sram: bytes
    rest: list[str]
    """Lines that should not be there."""


def run(
    program: Path,
    code: bytes,
    limit: int,
    *,
    fault: int = 0,
    registers: Mapping[int, int] | None = None,
) -> Seen:
    """Run encoded instructions, at most `limit` cycles."""
    folder = program.parent
    (folder / "code.bin").write_bytes(code)
    values = [f"{number}={value}" for number, value in (registers or {}).items()]
    text = call(
        [program, "code.bin", "sram.bin", str(limit), str(fault), *values], folder
    ).splitlines()
    log: list[str] = []
    reads: list[str] = []
    end, counters, rest = "", list[int](), list[str]()
    for line in text:
        kind = line.split(maxsplit=1)[0]
        if kind == "R":
            reads.append(line)
        elif kind in ("finished", "trapped", "limit"):
            end = line
        elif kind == "counters":
            counters = [int(word) for word in line.split()[1:]]
        elif kind.isdigit():
            log += sorted(reads)
            reads = []
            log.append(line)
        elif kind != "digest":
            rest.append(line)
    if end.startswith("finished"):
        log += sorted(reads)  # of the last cycle
    return Seen(log, end, counters, (folder / "sram.bin").read_bytes(), rest)
