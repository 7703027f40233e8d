"""Waveforms of the real RTL: their log is the chip's, and a planted fault is traced to its node."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.unit.sim_programs import ConvCase, conv_case
from tests.waves.runs import require_match
from tilewright.cosim.driver import RtlResult, RtlSimulator
from tilewright.rtl.faults import FAULTS
from tilewright.spec.hardware import load_target
from tilewright.spec.program import sequence
from tilewright.waves.difference import first_difference
from tilewright.waves.retire import read_retired

TINY = load_target("tiny8")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("verilator") is None, reason="Verilator is not installed"),
]


@dataclass(frozen=True)
class Traced:
    """A convolution whose instructions are nodes of their own."""

    case: ConvCase

    def run(self, path: Path, fault: str = "") -> tuple[RtlResult, bool]:
        """Run on the RTL; return the result and whether its bytes are right."""
        number = next((item.number for item in FAULTS if item.name == fault), 0)
        ddr = self.case.ddr.copy()
        result = RtlSimulator(TINY, faults=True, trace=path).run(
            self.case.program, ddr, fault=number
        )
        low, size = self.case.result
        right = ddr[low : low + size].view(np.int8) == self.case.expected.ravel()
        return result, bool(right.all())


@pytest.fixture(scope="module")
def traced() -> Traced:
    case = conv_case(TINY, 3, height=5, width=4)
    for number, instr in enumerate(case.program):
        instr.layer = f"node{number}"
    return Traced(case)


@pytest.mark.parametrize("kind", ["fst", "vcd"])
def test_the_log_of_a_trace_is_the_chips(tmp_path: Path, traced: Traced, kind: str) -> None:
    path = tmp_path / f"run.{kind}"
    result, right = traced.run(path)
    assert right
    found = read_retired(path)
    for key in ("engine", "issue", "start", "end"):
        np.testing.assert_array_equal(getattr(found, key), getattr(result.log, key), key)
    assert found.clock_fs == 10**9 // TINY.core_clock_mhz
    require_match(found, list(sequence(traced.case.program, TINY.scalar_registers)))
    assert first_difference(path, traced.case.program, TINY, traced.case.ddr) is None


@pytest.mark.parametrize("fault", ["weight_sign", "drain_early"])
def test_a_fault_is_traced_to_the_node(tmp_path: Path, traced: Traced, fault: str) -> None:
    path = tmp_path / "run.fst"
    _, right = traced.run(path, fault)
    assert not right
    found = first_difference(path, traced.case.program, TINY, traced.case.ddr)
    assert found is not None
    assert (found.kind, found.name, found.layer) == ("value", "vec_drain", "node5")
    assert traced.case.program[5].name == "vec_drain"
