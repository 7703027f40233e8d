"""The standard suite, and which of its tests finds each fault that can be planted in the RTL.

The suite is a fixed list of targets, profiles and seeds; no test knows a fault. A fault counts as
caught by a wrong value, a wrong cycle, a trap, an access outside memory, or a run that hangs
(bounded by what the simulators say the program takes). A tool that is missing or breaks catches
nothing: it ends the run. The clean chip must pass all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from tilewright.cosim.driver import RtlSimulator
from tilewright.rtl.faults import FAULTS, Fault
from tilewright.spec.hardware import Hardware, load_target
from tilewright.testgen.programs import PRIME_K, PROFILES, ROWS, SATURATION, Case, generate
from tilewright.testgen.run import OF_THE_CHIP, Expected, Finding, expect, run_rtl

SUITE: tuple[tuple[str, str, range], ...] = (
    *(("tiny8", profile, range(1, 7)) for profile in PROFILES if profile != "address"),
    ("tiny8", PRIME_K, range(1, 7)),
    ("tiny8", ROWS, range(1, 7)),
    ("tiny8_a40", "address", range(1, 9)),
    ("tiny8", SATURATION, range(1, 2)),
    ("tiny8_wrap", SATURATION, range(1, 2)),
)
"""Target, profile and seeds, of `VARIANTS` too."""
VARIANTS: dict[str, dict[str, int | bool]] = {
    "tiny8_a40": {"ddr_address_bits": 40},
    "tiny8_wrap": {"mac_saturation": False},
}
"""Targets of the suite by what they have other than `tiny8`."""


def suite_target(name: str) -> Hardware:
    """Return a target of the suite."""
    if name in VARIANTS:
        return load_target("tiny8").model_copy(update={"name": name, **VARIANTS[name]})
    return load_target(name)


@dataclass
class Test:
    """A test of the suite; what it expects is computed once."""

    __test__ = False

    target: str
    profile: str
    seed: int

    @property
    def name(self) -> str:
        """Target, profile and seed."""
        return f"{self.target}/{self.profile}-{self.seed}"

    @cached_property
    def case(self) -> Case:
        """The program."""
        return generate(suite_target(self.target), self.profile, self.seed)

    @cached_property
    def expected(self) -> tuple[Expected | None, list[Finding]]:
        """What the simulators say."""
        return expect(self.case, ("cycle",))


@dataclass(frozen=True)
class Verdict:
    """What the suite said of the chip with one fault."""

    fault: Fault | None
    """None: the clean chip."""
    test: str
    """First test that noticed; empty when none did."""
    finding: Finding | None
    tests: int
    """Tests run."""

    @property
    def good(self) -> bool:
        """Whether a fault was caught, or the clean chip passed."""
        return (self.finding is None) == (self.fault is None)


def suite() -> list[Test]:
    """Return the standard suite."""
    return [Test(target, profile, seed) for target, profile, seeds in SUITE for seed in seeds]


def _refuse(findings: Sequence[Finding]) -> None:
    """Raise what a finding is about that says nothing of the chip."""
    for finding in findings:
        if finding.error is not None:
            raise finding.error


def run_catalogue(
    faults: Sequence[Fault | None] = (None, *FAULTS),
    progress: Callable[[str], None] = lambda _: None,
    tests: Sequence[Test] | None = None,
) -> Iterator[Verdict]:
    """Run the suite on chips with faults; yield what it says of each.

    Args:
        faults: the faults; None is the clean chip (built with the same input).
        progress: told what is being done.
        tests: other tests than the standard suite.

    Raises:
        TilewrightError: E0701, E0801..E0803 when the RTL cannot be built or run; what a simulator
            says of a test that is not legal.
    """
    tests = suite() if tests is None else tests
    simulators = {
        name: RtlSimulator(suite_target(name), faults=True, progress=progress)
        for name in dict.fromkeys(test.target for test in tests)
    }
    for simulator in simulators.values():
        simulator.library  # noqa: B018  what does not build is said before anything runs
    for fault in faults:
        progress(f"fault {fault.number} {fault.name}" if fault else "no fault")
        verdict = Verdict(fault, "", None, len(tests))
        for count, test in enumerate(tests, 1):
            expected, findings = test.expected
            _refuse(findings)
            assert expected is not None, "or there was an error"
            number = fault.number if fault else 0
            findings = run_rtl(test.case, expected, simulators[test.target], number)
            _refuse([finding for finding in findings if finding.kind not in OF_THE_CHIP])
            if findings:
                verdict = Verdict(fault, test.name, findings[0], count)
                break
        yield verdict
