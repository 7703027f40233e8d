"""Shrinking: small, legal, failing in the same way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tilewright.diagnostics import TilewrightError
from tilewright.sim import vector
from tilewright.spec.hardware import load_target
from tilewright.spec.program import Instr, full_fields
from tilewright.testgen.programs import PROFILES, Case, generate
from tilewright.testgen.run import expect
from tilewright.testgen.shrink import shrink, tidy, without
from tilewright.testgen.sync import GATE

TINY = load_target("tiny8")


def with_instruction(profile: str, holds: Any, first: int = 0) -> Case:
    """Return a case of the profile that `holds`."""
    for seed in range(first, first + 60):
        case = generate(TINY, profile, seed)
        if holds(case):
            return case
    raise AssertionError("no such program")


def test_what_does_not_matter_goes() -> None:
    def fails(case: Case) -> bool:
        return any(i.name == "vec_pool" and full_fields(i)["n0"] % 8 for i in case.program)

    case = with_instruction("vector", fails)
    small = shrink(case, fails)
    small.verify()
    assert [i.name for i in small.program] == ["vec_pool", "halt"]
    assert small.program[0].fields["dst"] != small.program[0].fields.get("src", 0)
    # Everything else of it is at its default, the count as small as it may be.
    assert full_fields(small.program[0])["n0"] == 1
    assert full_fields(small.program[0])["k_h"] == full_fields(small.program[0])["out_h"] == 1
    assert small.registers == {}


def test_semaphores_that_are_needed_stay() -> None:
    def fails(case: Case) -> bool:
        stored = [i for i in case.program if i.name == "dma_store" and i.fields.get("wait")]
        return bool(stored) and any(i.name == "vec_drain" for i in case.program)

    small = shrink(with_instruction("mixed", fails), fails)
    small.verify()
    names = [i.name for i in small.program]
    assert len(names) <= 8
    assert names.index("mac_conv") < names.index("vec_drain")


def test_loops_are_cut_and_gates_go_with_their_engines() -> None:
    def fails(case: Case) -> bool:
        body = False
        for instr in case.program:
            if instr.name == "loop" and full_fields(instr)["count"] > 2:
                body = True
            elif instr.name == "end_loop":
                body = False
            elif body and instr.name == "vec_copy":
                return True
        return False

    case = with_instruction(
        "control", lambda c: fails(c) and any(i.layer == GATE for i in c.program)
    )
    small = shrink(case, fails, limit=1500)
    small.verify()
    counts = [full_fields(i)["count"] for i in small.program if i.name == "loop"]
    assert counts == [3]
    assert len(small.program) <= 6


@pytest.mark.parametrize("profile", PROFILES)
def test_a_planted_fault_of_the_simulator_is_found_and_shrunk(
    profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fills lose their last byte: the memories of a chip with that fault differ."""
    good = vector.ATOMIC["dma_fill"]

    def bad(state: Any, f: dict[str, int]) -> None:
        good(state, {**f, "n0": f["n0"] - 1} if f["n0"] > 4 else f)

    def fails(case: Case) -> bool:
        want, _ = expect(case, ())
        with monkeypatch.context() as patch:
            patch.setitem(vector.ATOMIC, "dma_fill", bad)
            have, _ = expect(case, ())
        if want is None or have is None:
            return False
        return not np.array_equal(want.sram, have.sram)

    case = next(
        (c for c in (generate(TINY, profile, seed) for seed in range(40)) if fails(c)), None
    )
    if case is None:
        assert profile in ("mac", "vector"), "only profiles with few fills may miss it"
        return
    small = shrink(case, fails)
    assert [i.name for i in small.program] == ["dma_fill", "halt"]
    assert full_fields(small.program[0])["n0"] in (5, 6, 7)


def test_a_limit_ends_the_search() -> None:
    tried = 0

    def fails(case: Case) -> bool:
        nonlocal tried
        del case
        tried += 1
        return tried % 2 == 1

    case = generate(TINY, "control", 3)
    shrink(case, fails, limit=20)
    assert tried <= 20


def test_dropping_takes_both_sides_of_a_semaphore() -> None:
    program = [
        Instr("dma_fill", {"signal": 1 << 4 | 1 << 0}),
        Instr("vec_copy", {"wait": 1 << 4}),
        Instr("dma_fill", {"channel": 1, "wait": 1 << 0}),
        Instr("halt"),
    ]
    left = without(program, {1})
    assert [i.name for i in left] == ["dma_fill", "dma_fill", "halt"]
    assert left[0].fields["signal"] == 1 << 0
    assert left[1].fields["wait"] == 1 << 0


def test_empty_loops_are_dropped_with_their_gates() -> None:
    gate = Instr("dma_fill", {}, GATE)
    program = [gate, Instr("loop"), Instr("end_loop"), Instr("halt")]
    assert [i.name for i in tidy(program)] == ["halt"]


def test_an_illegal_program_is_not_a_smaller_one() -> None:
    """A drain without its convolution is refused, however small."""

    def fails(case: Case) -> bool:
        return any(i.name == "vec_drain" for i in case.program)

    small = shrink(with_instruction("mac", fails), fails)
    small.verify()
    assert [i.name for i in small.program] == ["mac_conv", "vec_drain", "halt"]
    with pytest.raises(TilewrightError):
        small.with_program(small.program[1:]).verify()
