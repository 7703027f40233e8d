"""The RTL's vector unit: against the contract to the cycle, the simulator to the bit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest

from tests.cosim.support import needs_verilator
from tests.random_targets import random_target
from tests.rtl.tools import build_runtime, call
from tests.rtl.vec import bench, contract
from tests.rtl.vec.programs import Builder, Scenario, random_scenario
from tilewright.rtl.faults import FAULTS, Fault
from tilewright.spec.hardware import Hardware, load_target

pytestmark = needs_verilator

Bench = tuple[Hardware, Path]
Build = Callable[[str], Bench]


def _changed(name: str, base: str, **changes: object) -> Hardware:
    content = load_target(base).model_dump() | changes | {"name": name}
    return Hardware.model_validate(content)


def _targets() -> dict[str, Hardware]:
    return {
        "tiny8": _changed("tiny8", "tiny8", vector_rows=True),
        # A word of four lanes, unused places of every memory, the shortest pipeline.
        "away16": _changed(
            "away16", "edge16", sram_word_bytes=4, vector_latency=1, vector_registers=17,
            vector_rows=True, sram_size=3 * 8192, sram_banks=3,
        ),
        "even4": _changed(
            "even4", "tiny8", mac_array_size=(4, 4), vector_lanes=4, rounding="half_even",
            sram_word_bytes=16, vector_latency=2, quant_banks=3, quant_bank_entries=5,
            vector_registers=37, vector_rows=True,
        ),
        "cut8": _changed(
            "cut8", "tiny8", rounding="truncate", sram_word_bytes=32, vector_latency=9,
            vector_registers=128, matrix_registers=6, matrix_register_rows=5, quant_banks=2,
            vector_rows=False,
        ),
    }  # fmt: skip


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Return a function that builds a target's bench once."""
    built: dict[str, Bench] = {}
    runtime = build_runtime(tmp_path_factory.mktemp("runtime"))

    def get(name: str) -> Bench:
        if name not in built:
            hardware = _targets()[name]
            built[name] = hardware, bench.build(hardware, tmp_path_factory.mktemp(name), runtime)
        return built[name]

    return get


def _difference(scenario: Scenario, seen: bench.Seen) -> str:
    """Return the first difference in words; empty: none."""
    expected = scenario.expected()
    pops = 0
    for want, got in zip_longest(expected, seen.events):
        if want != got:
            name = scenario.names[max(0, pops - 1)]
            return f"instruction {pops - 1} ({name}): event {got}, not {want}"
        pops += want is not None and want[1] == contract.POP
    for number, (want, got) in enumerate(zip_longest(scenario.after, seen.after)):
        if want is None or got is None:
            return f"instruction {number}: one of two did not end"
        if not np.array_equal(want, got):
            place = int(np.flatnonzero(want != got)[0])
            name = scenario.names[number]
            return (
                f"instruction {number} ({name}): byte 0x{place:x} is {got[place]}, "
                f"not {want[place]}"
            )
    return ""


@pytest.mark.parametrize("name", list(_targets()))
@pytest.mark.parametrize("refusal", [0.0, 0.4])
def test_random(build: Build, name: str, refusal: float) -> None:
    hardware, program = build(name)
    scenario = random_scenario(hardware, int(refusal * 10), 140, refusal)
    assert _difference(scenario, bench.run(program, scenario)) == ""


@pytest.mark.parametrize("name", list(_targets()))
def test_extremes(build: Build, name: str) -> None:
    """Sums of -2^31, wrapping biases, shifts of 0 and 62, the largest multiplier, ties, limits."""
    hardware, program = build(name)
    builder = Builder(hardware, 3, 0.0)
    builder.fill()
    low, high = -(1 << 31), (1 << 31) - 1
    zero_points = ((0, -128, 127), (-256, -128, 127), (255, -128, 127), (0, 5, 5))
    for multiplier, shift in (
        (high, 62), (high, 61), (high, 31), (high, 0), (1, 62), (1, 0), (1, 1), (3, 2), (1, 5),
        (1 << 30, 62), (1 << 30, 55), (1 << 30, 30), (0, 62), (1, 31), (1, 32), (1, 33), (2, 32),
    ):  # fmt: skip
        half = 1 << max(shift - 1, 0) if shift < 31 else 1
        values = [low, high, low + 1, high - 1, 0, 1, -1, 3, -3, half, -half, 3 * half, -3 * half]
        values += [half + 1, half - 1, -half + 1, -half - 1]
        for bias in (0, low, high, -1):
            builder.entry(1, 2, bias, multiplier, shift)
            zero, lowest, highest = zero_points[builder.below(4)]
            f = {"param": 1, "v": 2, "zp": zero, "lo": lowest, "hi": highest}
            builder.drain_of(values, **f)
        builder.drain_of(values, v=2, raw=1)
        for bias, bias_shift in ((0, 0), (-512, 52), (511, 52), (1, 61)):
            scaled = {"bias": bias, "bias_shift": bias_shift, "param": 1, "requantise": 1}
            if max(255 * multiplier, 1) + (abs(bias) << bias_shift) + (1 << shift) < 1 << 63:
                builder.every_code(za=builder.code(), **scaled)
    builder.draw("table")
    table = builder.v_table()
    assert builder.add("vec_table", builder.table() | {"v": table})
    builder.every_code(use_table=1, v_table=table)
    scenario = builder.scenario
    assert _difference(scenario, bench.run(program, scenario)) == ""


OWN_FAULTS = [fault for fault in FAULTS if fault.module == "tw_vec"]


@pytest.mark.parametrize("fault", OWN_FAULTS, ids=lambda fault: fault.name)
@pytest.mark.parametrize("name", list(_targets()))
def test_faults_are_found(build: Build, name: str, fault: Fault) -> None:
    hardware, program = build(name)
    if fault.name in ("row_tail", "root_odd") and not hardware.vector_rows:
        pytest.skip("the chip has no row instructions")
    scenario = random_scenario(hardware, 1, 270, 0.2)
    assert _difference(scenario, bench.run(program, scenario)) == ""
    assert _difference(scenario, bench.run(program, scenario, fault=fault.number)) != ""


@pytest.mark.parametrize("name", [*_targets(), "tpu_v2"])
def test_no_warning_without_faults(name: str, tmp_path: Path) -> None:
    hardware = _targets().get(name) or load_target(name)
    sources = bench.write_package(hardware, tmp_path, faults=False)
    options = ("verilator", "--lint-only", "-Wall", "--top-module", "tw_vec")
    call([*options, bench.HERE / "waivers.vlt", *sources], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_chips(seed: int, tmp_path: Path) -> None:
    hardware = random_target(seed)
    program = bench.build(hardware, tmp_path, build_runtime(tmp_path))
    for refusal in (0.0, 0.3, 0.8):
        scenario = random_scenario(hardware, seed, 210, refusal)
        assert _difference(scenario, bench.run(program, scenario)) == ""
