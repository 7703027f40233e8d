"""The whole chip's RTL: small programs against the functional simulator, and what the top shows."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.cosim.support import needs_verilator
from tests.unit.sim_programs import conv_case, pipeline
from tilewright.cosim.driver import RtlResult, RtlSimulator
from tilewright.diagnostics import TilewrightError
from tilewright.sim.functional import FunctionalSimulator
from tilewright.sim.state import SRAM_RESET
from tilewright.spec.hardware import load_target
from tilewright.spec.program import ENGINE_NAMES, Instr, encode_program

pytestmark = needs_verilator

TARGETS = ["tiny8", pytest.param("edge16", marks=pytest.mark.slow)]
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "depthwise": {"depthwise": True},
    "blocks": {"channels": 20, "outputs": 20, "height": 9, "width": 9},
    "saturating": {"stride": 2, "large": True},
}


@cache
def _chip(target: str) -> RtlSimulator:
    return RtlSimulator(load_target(target))


def _agree(target: str, program: list[Instr], ddr: np.ndarray) -> RtlResult:
    wanted = ddr.copy()
    FunctionalSimulator(load_target(target)).run(program, wanted)
    found = ddr.copy()
    result = _chip(target).run(program, found)
    np.testing.assert_array_equal(found, wanted)
    return result


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", list(CASES))
def test_convolutions(target: str, case: str) -> None:
    conv = conv_case(load_target(target), 5, **CASES[case])
    result = _agree(target, conv.program, conv.ddr)
    start, size = conv.result
    found = result.ddr[start : start + size].view(np.int8)
    np.testing.assert_array_equal(found, conv.expected.reshape(-1))
    assert (result.sram_before == SRAM_RESET).all()


@pytest.mark.parametrize("target", TARGETS)
def test_a_pipeline_and_its_counters(target: str) -> None:
    hardware = load_target(target)
    ddr = np.random.default_rng(0).integers(0, 256, 1 << 17, dtype=np.uint8)
    ddr[: 9 * hardware.vector_lanes] = 0  # parameters: shifts must stay in range
    result = _agree(target, pipeline(hardware, 40), ddr)
    assert result.counted_cycles == result.cycles
    assert result.log.end.max() == result.cycles
    for number, name in enumerate(ENGINE_NAMES[:6]):
        mine = result.log.engine == number
        # An engine's cycles are those from the one after the start to the last.
        times = (result.log.end - result.log.start)[mine].sum() - mine.sum()
        assert sum(result.counters[name].values()) == times
    assert result.counters["mac"]["busy"] > 0
    assert result.counters["dma0"]["wait_ddr"] > 0


def test_a_trap_names_the_instruction() -> None:
    code = encode_program([Instr("fence"), Instr("fence")]) + bytes(64)
    with pytest.raises(TilewrightError, match="trapped"):
        _chip("tiny8").run(code, np.zeros(4096, np.uint8))


def test_a_missing_signal_deadlocks() -> None:
    program = [Instr("vec_table", {"wait": 1 << 7}), Instr("halt")]
    with pytest.raises(TilewrightError, match="deadlock"):
        _chip("tiny8").run(program, np.zeros(4096, np.uint8))
