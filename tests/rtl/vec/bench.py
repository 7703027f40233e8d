"""Builds the bench of `tw_vec` for a target with Verilator, and runs scenarios on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.rtl.tools import call, compiler
from tests.rtl.vec.contract import Event
from tests.rtl.vec.programs import Scenario
from tilewright.rtl.package import sv_package
from tilewright.spec.hardware import Hardware

HERE = Path(__file__).parent
SOURCES = ("tw_vec_reader.sv", "tw_vec_rows.sv", "tw_vec_lanes.sv", "tw_vec_writer.sv", "tw_vec.sv")


def write_package(hardware: Hardware, folder: Path, *, faults: bool) -> list[Path]:
    """Write the target's package; return it and the module's sources."""
    package = folder / "tw_pkg.sv"
    package.write_text(sv_package(hardware, faults=faults))
    rtl = resources.files("tilewright.rtl")
    return [package, *(Path(str(rtl / name)) for name in SOURCES)]


def build(hardware: Hardware, folder: Path, runtime: Sequence[Path]) -> Path:
    """Return the bench's program for a target, built in `folder` (with planted faults)."""
    sources = write_package(hardware, folder, faults=True)
    call(
        [
            *("verilator", "--cc", "-Wall", "--x-initial", "unique", "--top-module", "bench"),
            *("-Mdir", "model", HERE / "waivers.vlt", *sources, HERE / "bench.sv"),
        ],
        folder,
    )
    # One unit: the model's headers are most of what the compiler reads.
    models = sorted(path.name for path in (folder / "model").glob("*.cpp"))
    whole = folder / "model" / "whole.cc"
    whole.write_text("".join(f'#include "{name}"\n' for name in models))
    program = folder / "bench"
    call([*compiler(), "-Imodel", whole, HERE / "bench.cpp", *runtime, "-o", program], folder)
    return program


@dataclass(frozen=True)
class Seen:
    """What the bench saw."""

    events: list[Event]
    after: list[npt.NDArray[np.uint8]]
    """Memory when each instruction had ended."""


def run(program: Path, scenario: Scenario, *, fault: int = 0, limit: int = 1_000_000) -> Seen:
    """Run a scenario, for `limit` cycles at most."""
    files = [program.with_suffix(suffix) for suffix in (".scenario", ".trace", ".memory")]
    scenario.write(files[0], fault=fault, limit=limit)
    call([program, *files], program.parent)
    rows = np.fromfile(files[1], np.int32).reshape(-1, 4)
    events = [(row[0], row[1], row[2], row[3]) for row in rows.tolist()]
    memory = np.fromfile(files[2], np.uint8).reshape(-1, scenario.memory.size)
    return Seen(events, list(memory))
