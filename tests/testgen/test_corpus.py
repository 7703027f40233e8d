"""Shrunk programs worth keeping, and the standard suite's clean half.

Each file of `corpus` once told a faulty chip from a good one; `; cause:` says how.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from tests.cosim.support import needs_verilator
from tilewright.cosim.driver import RtlSimulator
from tilewright.rtl.faults import FAULTS, Fault
from tilewright.testgen.catalogue import run_catalogue, suite, suite_target
from tilewright.testgen.programs import SATURATION, Case
from tilewright.testgen.run import expect, run_rtl
from tilewright.testgen.text import from_text

FILES = sorted(Path(__file__).with_name("corpus").glob("*.tpuasm"))


def read(path: Path) -> Case:
    return from_text(path.read_text("utf-8"), suite_target)


@lru_cache
def rtl(name: str, faults: bool = False) -> RtlSimulator:
    return RtlSimulator(suite_target(name), faults=faults)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_simulators_agree(path: Path) -> None:
    case = read(path)
    case.verify()
    expected, findings = expect(case)
    assert expected is not None
    assert findings == []


@needs_verilator
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_chip_agrees(path: Path) -> None:
    case = read(path)
    expected, findings = expect(case, ("cycle",))
    assert expected is not None
    assert findings + run_rtl(case, expected, rtl(case.hardware.name)) == []


@needs_verilator
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_program_kept_for_a_fault_still_shows_it(fault: Fault) -> None:
    case = read(Path(__file__).with_name("corpus") / f"{fault.name}.tpuasm")
    expected, _ = expect(case, ("cycle",))
    assert expected is not None
    faulty = rtl(case.hardware.name, faults=True)
    assert run_rtl(case, expected, faulty, 0) == []
    assert run_rtl(case, expected, faulty, fault.number) != []


@needs_verilator
def test_every_planted_fault_is_caught_and_the_clean_chip_passes() -> None:
    verdicts = list(run_catalogue())
    assert [v.fault.number if v.fault else 0 for v in verdicts] == [
        0,
        *(fault.number for fault in FAULTS),
    ]
    assert [v.fault for v in verdicts if not v.good] == []


@needs_verilator
@pytest.mark.parametrize("target", ["tiny8", "tiny8_wrap"])
def test_the_suite_finds_both_halves_of_the_saturation_fault(target: str) -> None:
    (fault,) = [fault for fault in FAULTS if fault.name == "saturation"]
    tests = [test for test in suite() if test.target == target and test.profile == SATURATION]
    verdicts = list(run_catalogue((None, fault), tests=tests))
    assert [verdict.good for verdict in verdicts] == [True, True]
    assert verdicts[1].finding is not None
    assert verdicts[1].finding.kind == "value"


def test_there_is_a_program_for_every_fault() -> None:
    names = {path.stem for path in FILES}
    assert names >= {fault.name for fault in FAULTS}


def test_the_suite_is_fixed() -> None:
    names = [test.name for test in suite()]
    assert len(set(names)) == len(names)
    assert {test.target for test in suite()} == {"tiny8", "tiny8_a40", "tiny8_wrap"}
    assert suite_target("tiny8_a40").ddr_address_bits == 40
    assert not suite_target("tiny8_wrap").mac_saturation
