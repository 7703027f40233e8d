"""Builds the harness of `tw_mac` for a target with Verilator, and runs jobs on it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright.rtl.package import sv_package
from tilewright.spec.hardware import Hardware
from tilewright.spec.isa import encode

HERE = Path(__file__).parent
HARNESS = HERE / "mac_bench.cpp"
Dump = tuple[int, npt.NDArray[np.int32]]
"""A half's number and its rows."""


@dataclass(frozen=True)
class Plan:
    """What the array's surroundings do, the same for the harness and the model."""

    act: str = "1"
    """Cycles in which port 0 is granted: '1' or '0' a cycle, repeated."""
    wgt: str = "1"
    offers: str = "1"
    """Cycles in which the queue shows its head."""
    drains: tuple[int, ...] = (0,)
    """Cycles a half stays full, in the order of filling, repeated."""


@dataclass(frozen=True)
class Job:
    """Instructions on a memory, from reset on."""

    instructions: list[dict[str, int]]
    """Fields of each `mac_conv`."""
    sram: bytes
    plan: Plan = field(default_factory=Plan)
    preloads: dict[tuple[int, int], npt.NDArray[np.int32]] = field(
        default_factory=dict[tuple[int, int], Any]
    )
    """Accumulators by half and row, there before the first instruction."""


@dataclass
class Seen:
    """What the array did."""

    log: list[str] = field(default_factory=list[str])
    """Events in order: `cycle what...`."""
    full: list[Dump] = field(default_factory=list[Dump])
    """Halves in their first full cycle."""
    kept: list[Dump] = field(default_factory=list[Dump])
    """Both halves behind each instruction that pushes nothing."""
    ended: bool = False


@dataclass(frozen=True)
class Bench:
    """A built harness."""

    hardware: Hardware
    program: Path

    def run(self, jobs: Sequence[Job], *, fault: int = 0, limit: int = 1_000_000) -> list[Seen]:
        """Return what the array does in each job, at most `limit` cycles long."""
        lines: list[str] = []
        for number, job in enumerate(jobs):
            memory = self.program.with_name(f"sram{number}")
            memory.write_bytes(job.sram)
            lines += _lines(job, memory, fault, limit, self.hardware.accumulator_rows)
        done = subprocess.run(
            [str(self.program)],
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        seen = _parse(done.stdout, self.hardware)
        assert len(seen) == len(jobs)
        return seen


def _lines(job: Job, memory: Path, fault: int, limit: int, rows: int) -> list[str]:
    plan = job.plan
    lines = [f"sram {memory}", f"grants {plan.act} {plan.wgt}", f"offers {plan.offers}"]
    lines.append("drains " + " ".join(map(str, plan.drains)))
    lines += [f"fault {fault}", f"rows {rows}"]
    for (half, row), values in job.preloads.items():
        text = "".join(f"{int(value) & 0xFFFFFFFF:08x}" for value in values)
        lines.append(f"preload {half} {row} {text}")
    for fields in job.instructions:
        word = int.from_bytes(encode("mac_conv", fields), "little")
        lines.append(f"instruction {word:0128x} {int(not fields['push'])}")
    return [*lines, f"run {limit}"]


def _parse(text: str, hardware: Hardware) -> list[Seen]:
    result: list[Seen] = []
    seen = Seen()
    for line in text.splitlines():
        words = line.split()
        if words[0] in ("ended", "limit"):
            seen.ended = words[0] == "ended"
            result.append(seen)
            seen = Seen()
        elif words[1] in ("full", "kept"):
            numbers = "".join(word for word in words[3:] if word != "differs")
            rows = np.frombuffer(bytes.fromhex(numbers), ">i4").astype(np.int32)
            dump = int(words[2]), rows.reshape(-1, hardware.array_size)
            if words[1] == "full":
                seen.full.append(dump)
                seen.log.append(" ".join(words[:3]))
            else:
                seen.kept.append(dump)
            if "differs" in words:
                seen.log.append(f"{words[0]} differs")
        else:
            seen.log.append(line)
    return result


def _call(command: Sequence[str | Path], folder: Path) -> None:
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command[0]}:\n{done.stdout}\n{done.stderr}"


def sources() -> list[Path]:
    """Return the array's modules."""
    return sorted(Path(str(resources.files("tilewright.rtl"))).glob("tw_mac*.sv"))


@dataclass(frozen=True)
class Builder:
    """Builds harnesses; what all of them share, once."""

    folder: Path

    def _include(self) -> Path:
        root = subprocess.run(
            ["verilator", "--getenv", "VERILATOR_ROOT"], capture_output=True, text=True, check=True
        ).stdout.strip()
        return Path(root) / "include"

    def _runtime(self) -> list[Path]:
        include = self._include()
        objects: list[Path] = []
        for source in ("verilated", "verilated_threads"):
            target = self.folder / f"{source}.o"
            if not target.exists():
                command = ["g++", "-O1", "-std=c++17", f"-I{include}", f"-I{include}/vltstd"]
                _call([*command, "-c", include / f"{source}.cpp", "-o", target], self.folder)
            objects.append(target)
        return objects

    def build(self, hardware: Hardware, *, faults: bool, pair: bool) -> Bench:
        """Build the harness of a target.

        Args:
            hardware: the target.
            faults: whether planted faults are built.
            pair: whether the form with a module for each element runs beside the fast one.
        """
        folder = self.folder / hardware.name
        folder.mkdir()
        (folder / "tw_pkg.sv").write_text(sv_package(hardware, faults=faults))
        _call(
            [
                *("verilator", "--cc", "-O3", "-Wall", "--x-initial", "unique"),
                *("--x-assign", "unique", "--unroll-count", "4"),
                *(f"-GPAIR={int(pair)}", "--top-module", "mac_bench", "-Mdir", "model"),
                *(HERE / "waivers.vlt", "tw_pkg.sv", *sources(), HERE / "mac_bench.sv"),
            ],
            folder,
        )
        include = self._include()
        program = folder / "mac_bench"
        # One unit: most of a small one's time goes to the headers.
        units = [*sorted((folder / "model").glob("*.cpp")), HARNESS]
        unit = folder / "all.cpp"
        unit.write_text("".join(f'#include "{source}"\n' for source in units))
        rows = (hardware.accumulator_rows - 1).bit_length()
        sizes = {"W": hardware.sram_word_bytes, "N": hardware.array_size, "REGISTERS": 2 << rows}
        _call(
            [
                *("g++", "-O1", "-std=c++17", "-Imodel", f"-I{include}", f"-I{include}/vltstd"),
                *(f"-DTW_{name}={value}" for name, value in sizes.items()),
                *(["-DTW_PAIR"] if pair else []),
                *(unit, *self._runtime(), "-pthread", "-o", program),
            ],
            folder,
        )
        return Bench(hardware, program)
