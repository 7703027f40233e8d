"""Builds the harness of `tw_dma` for a target with Verilator, and runs scenarios on it."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from tests.rtl.dma.model import DDR_FREE, SRAM_FREE, TICK, Job
from tests.rtl.tools import call, compiler
from tilewright.rtl.package import sv_package
from tilewright.spec.hardware import Hardware
from tilewright.spec.isa import encode

HERE = Path(__file__).parent
DDR_BASE = 0xF2_FFFF_8000
"""Window of DDR the scenarios use: all upper address bits matter in it, and bit 32 changes."""
DDR_SIZE = 1 << 16


def build(hardware: Hardware, folder: Path, runtime: Sequence[Path]) -> Path:
    """Return the harness' program for a target, built in `folder` (with planted faults)."""
    (folder / "tw_pkg.sv").write_text(sv_package(hardware, faults=True))
    rtl = resources.files("tilewright.rtl")
    sources = [str(rtl / name) for name in ("tw_dma_walk.sv", "tw_dma.sv")]
    call(
        [
            *("verilator", "--cc", "-Wall", "--x-initial", "unique", "--top-module", "dma_bench"),
            *("-Mdir", "model", HERE / "waivers.vlt", "tw_pkg.sv", *sources),
            HERE / "dma_bench.sv",
        ],
        folder,
    )
    program = folder / "dma_bench"
    models = sorted((folder / "model").glob("*.cpp"))
    call(
        [*compiler(), "-Imodel", *models, HERE / "dma_bench.cpp", *runtime, "-o", program],
        folder,
    )
    return program


@dataclass(frozen=True)
class Seen:
    """What the harness saw."""

    log: list[str]
    ddr: bytes
    sram: bytes


def clock_enables(cycles: int, clock_mhz: int, core_mhz: int) -> list[bool]:
    """Return, for each core cycle, whether a slower clock ticks in it."""
    rest, result = 0, list[bool]()
    for _ in range(cycles):
        ticks, rest = divmod(rest + clock_mhz, core_mhz)
        assert ticks <= 1, "the RTL has one tick a cycle at most"
        result.append(bool(ticks))
    return result


def schedule(hardware: Hardware, cycles: int, seed: int | None) -> bytes:
    """Return what is allowed in each cycle; without a seed, all that the clocks allow.

    The chance of a denial changes every now and then, for both memories separately.
    """
    rng = np.random.default_rng(seed)
    chances = np.array([0.0, 0.1, 0.5, 0.9, 0.98]) if seed is not None else np.zeros(1)
    denied = [
        rng.random(cycles) < np.repeat(rng.choice(chances, -(-cycles // 61)), 61)[:cycles]
        for _ in range(2)
    ]
    core = hardware.core_clock_mhz
    ticks = clock_enables(cycles, hardware.dma_clock_mhz, core)
    beats = clock_enables(cycles, hardware.ddr_clock_mhz, core)
    return bytes(
        TICK * tick + DDR_FREE * (beat and not no_ddr) + SRAM_FREE * (not no_sram)
        for tick, beat, no_ddr, no_sram in zip(ticks, beats, *denied, strict=True)
    )


def run(
    program: Path,
    hardware: Hardware,
    jobs: Iterable[Job],
    plan: bytes,
    ddr: bytes,
    sram: bytes,
    fault: int = 0,
    limit: int = 10_000_000,
) -> Seen:
    """Run instructions on the harness, for `limit` cycles at most."""
    jobs = list(jobs)
    numbers = (len(jobs), len(plan), DDR_BASE, len(ddr), len(sram), fault, limit)
    sizes = (hardware.sram_word_bytes, hardware.ddr_bus_bytes)
    content = struct.pack("<9Q", *numbers, *sizes)
    for job in jobs:
        content += struct.pack("<Q", job.gap) + encode(job.name, job.fields)
    files = [program.with_suffix(suffix) for suffix in (".scenario", ".log", ".memories")]
    files[0].write_bytes(content + plan + ddr + sram)
    call([program, *files], program.parent)
    memories = files[2].read_bytes()
    return Seen(files[1].read_text().splitlines(), memories[: len(ddr)], memories[len(ddr) :])
