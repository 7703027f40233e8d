"""Random programs: what the verifier accepts gives the same bytes in every order."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.props.random_programs import Generator, drop_one, setup, synchronise
from tests.unit.sim_programs import parameter_block
from tilewright.codegen.verify import verify_program
from tilewright.diagnostics import TilewrightError
from tilewright.sim.cycle import CycleSimulator
from tilewright.sim.functional import FunctionalSimulator
from tilewright.spec.hardware import load_target
from tilewright.spec.program import Instr, engine_of, full_fields

TINY = load_target("tiny8")
HALT = Instr("halt")


def memory(seed: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    lanes = TINY.vector_lanes
    ddr = rng.integers(0, 256, 4096).astype(np.uint8)
    block = parameter_block(
        lanes, rng.integers(-99, 99, lanes), np.full(lanes, 2**30 + 7), np.full(lanes, 34)
    )
    ddr[2048 : 2048 + len(block)] = np.frombuffer(block, np.uint8)
    return ddr


def refused(program: list[Instr]) -> str | None:
    """Return the verifier's message, or None if it accepts the program."""
    try:
        verify_program(program, TINY, registers={})
    except TilewrightError as error:
        return error.message
    return None


def final(program: list[Instr], seed: int, order: Any, at: int = 0) -> bytes:
    """Run and return DDR with SRAM's work area behind it."""
    ddr = memory(seed)
    states: list[Any] = []
    FunctionalSimulator(TINY).run(
        program, ddr, order=order, seed=at, hook=lambda _, state: states.append(state)
    )
    return ddr.tobytes() + states[-1].sram.tobytes()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 25))
def test_synchronised_random_programs_do_not_depend_on_the_order(seed: int, length: int) -> None:
    body = synchronise(setup(TINY) + Generator(TINY, seed).program(length), TINY)
    program = [*body, HALT]
    refusal = refused(program)
    if refusal is not None:
        # The generator may put a wait between a mac_conv and its drain that closes a circle.
        assert "deadlock" in refusal
        return
    reference = final(program, seed, "program")
    for at in range(4):
        assert final(program, seed, "random", at) == reference
    CycleSimulator(TINY).run(program)


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 10**9), st.integers(4, 20))
def test_a_dropped_wait_is_refused_or_harmless(seed: int, length: int) -> None:
    body = synchronise(setup(TINY) + Generator(TINY, seed).program(length), TINY)
    what = drop_one(body, random.Random(seed))
    program = [*body, HALT]
    if refused(program) is not None:
        return
    reference = final(program, seed, "program")
    for at in range(6):
        assert final(program, seed, "random", at) == reference, what


def test_dropped_waits_are_mostly_refused() -> None:
    """The test above would pass if the verifier refused nothing; count."""
    counts = {"refused": 0, "accepted": 0}
    for seed in range(60):
        body = synchronise(setup(TINY) + Generator(TINY, seed).program(12), TINY)
        if refused([*body, HALT]) is None and drop_one(body, random.Random(seed)):
            counts["accepted" if refused([*body, HALT]) is None else "refused"] += 1
    assert counts["refused"] > 20
    assert counts["accepted"] < counts["refused"]


def gets_stuck(run: Callable[[], object]) -> bool:
    try:
        run()
    except TilewrightError as error:
        if "deadlock" not in error.message:
            raise
        return True
    return False


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), st.integers(3, 20))
def test_all_simulators_agree_on_deadlock(seed: int, length: int) -> None:
    rng = random.Random(seed)
    body = synchronise(setup(TINY) + Generator(TINY, seed).program(length), TINY)
    for _ in range(rng.randrange(9)):
        waiting = [instr for instr in body[2:] if instr.fields.get("wait")]
        if not waiting:
            break
        giver, taker = rng.choice(waiting), rng.choice(waiting)
        # A wait moved to another instruction of the same engine: legal, but often a circle.
        engines = [engine_of(instr.name, full_fields(instr)) for instr in (giver, taker)]
        number = (giver.fields["wait"] & -giver.fields["wait"]).bit_length() - 1
        if engines[0] == engines[1] and not taker.fields["wait"] >> number & 1:
            giver.fields["wait"] ^= 1 << number
            taker.fields["wait"] |= 1 << number
    signalling = [instr for instr in body[2:] if instr.fields.get("signal")]
    if signalling and rng.random() < 0.4:
        rng.choice(signalling).fields["signal"] = 0
    program = [*body, HALT]
    functional = FunctionalSimulator(TINY)
    stuck = gets_stuck(lambda: CycleSimulator(TINY).run(program))
    assert gets_stuck(lambda: functional.run(program, memory(seed))) == stuck
    for at in range(3):
        run = partial(functional.run, program, memory(seed), order="random", seed=at)
        assert gets_stuck(run) == stuck
    if stuck:
        assert refused(program) is not None
