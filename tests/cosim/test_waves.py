"""The RTL's own traces, read back: the log they show is the harness's, the bytes the program's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cosim.support import needs_verilator
from tests.unit.sim_programs import conv_case
from tilewright.cosim.driver import RtlSimulator
from tilewright.spec.hardware import load_target
from tilewright.waves.difference import first_difference
from tilewright.waves.retire import read_retired

TINY = load_target("tiny8")


@needs_verilator
@pytest.mark.parametrize("suffix", ["vcd", "fst"])
def test_traces_tell_what_happened(suffix: str, tmp_path: Path) -> None:
    case = conv_case(TINY, 3)
    before = case.ddr.copy()
    trace = tmp_path / f"t.{suffix}"
    result = RtlSimulator(TINY, trace=trace).run(case.program, case.ddr)
    read = read_retired(trace)
    assert read.cycles == result.cycles
    assert read.clock_fs == 10**9 // TINY.core_clock_mhz
    assert read.scope.endswith("tw_top")
    for name in ("engine", "issue", "start", "end"):
        assert np.array_equal(getattr(read, name), getattr(result.log, name)), name
    assert first_difference(trace, case.program, TINY, before) is None
    # As if the chip had read its first activation wrong.
    before[0] ^= 1
    found = first_difference(trace, case.program, TINY, before)
    assert found is not None
    assert found.index == 0
