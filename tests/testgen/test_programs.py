"""Random programs: legal on any chip, the same for a seed, every field and semaphore in use."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.random_targets import random_target
from tilewright.diagnostics import TilewrightError
from tilewright.sim.functional import FunctionalSimulator
from tilewright.spec.hardware import load_target
from tilewright.spec.isa import INSTRUCTIONS, Kind
from tilewright.spec.program import Instr, encode_program, full_fields, sequence
from tilewright.testgen.catalogue import suite_target
from tilewright.testgen.memory import Window, catalogue, make_ddr
from tilewright.testgen.programs import (
    ALL_PROFILES,
    PRIME_K,
    PROFILES,
    ROWS,
    SATURATION,
    Case,
    finish,
    generate,
)
from tilewright.testgen.run import expect
from tilewright.testgen.sync import FROM_ENGINE, TO_ENGINE, semaphore, synchronise
from tilewright.testgen.values import is_prime

TINY = load_target("tiny8")
TINY_ROWS = TINY.model_copy(update={"vector_rows": True})
FP16_ONLY = {"v_clamp", "function"}
"""Fields only fp16 reads; random data would overflow it, so fp16 is left to models."""


@pytest.mark.parametrize("profile", [*PROFILES, PRIME_K, ROWS])
@pytest.mark.parametrize("seed", range(500, 504))
def test_every_order_of_the_engines_gives_the_same(profile: str, seed: int) -> None:
    expected, findings = expect(generate(TINY_ROWS, profile, seed), ("functional",))
    assert expected is not None
    assert findings == []


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("profile", ["mixed", "control", "address", ROWS])
def test_any_chip_has_programs(profile: str, seed: int) -> None:
    expected, findings = expect(generate(random_target(seed), profile, seed), ("functional",))
    assert expected is not None
    assert findings == []


@pytest.mark.parametrize("profile", ALL_PROFILES)
def test_programs_are_legal_on_many_chips(profile: str) -> None:
    for seed in range(1000, 1040):
        target = random_target(seed)
        if seed % 2:
            target = target.model_copy(update={"dtypes": ("int8", "int4")})
        case = generate(target, profile, seed)  # verifies
        if profile == PRIME_K:
            # What overlapped is moved, not dropped.
            assert any(instr.name == "mac_conv" for instr in case.program), seed


@pytest.mark.parametrize(("chip", "seed"), [(1002, 2), (1013, 3), (1016, 1), (1028, 2)])
def test_drains_keep_away_from_what_prime_convolutions_read(chip: int, seed: int) -> None:
    # Small banks: a drain at a bank's start reached into its neighbours.
    expected, findings = expect(generate(random_target(chip), PRIME_K, seed), ("functional",))
    assert expected is not None
    assert findings == []


def test_what_cannot_be_ordered_is_an_illegal_program() -> None:
    case = Case("odd", TINY, [Instr("vec_drain", {}), Instr("halt")], 1, (), {})
    with pytest.raises(TilewrightError, match="`odd` cannot be ordered: a drain has no") as caught:
        finish(case, 1)
    assert caught.value.code == "E0501"


def test_programs_are_seeded() -> None:
    for profile in PROFILES:
        first, again = generate(TINY, profile, 7), generate(TINY, profile, 7)
        assert encode_program(first.program) == encode_program(again.program)
        assert first.registers == again.registers
        other = generate(TINY, profile, 8)
        assert encode_program(first.program) != encode_program(other.program)


@pytest.fixture(scope="module")
def many() -> list[Case]:
    cases = [generate(TINY, profile, seed) for profile in PROFILES for seed in range(40)]
    return cases + [generate(TINY_ROWS, ROWS, seed) for seed in range(40)]


def test_every_field_of_every_instruction_is_exercised(many: list[Case]) -> None:
    seen: dict[tuple[str, str], set[int]] = defaultdict(set)
    for case in many:
        for instr in case.program:
            for name, value in full_fields(instr).items():
                seen[instr.name, name].add(value)
    for instruction in INSTRUCTIONS:
        for field in instruction.own_fields:
            if field.name in FP16_ONLY or (field.name == "dtype"):
                continue
            values = seen[instruction.name, field.name]
            enough = len(field.names) or (2 if field.bits == 1 else 3)
            if field.kind is Kind.CHANNEL:
                enough = TINY.dma_channels
            if (instruction.name, field.name) == ("vec_drain", "v_table"):
                enough = 2
            assert len(values) >= enough, (instruction.name, field.name, values)


def test_scales_and_codes_are_extreme(many: list[Case]) -> None:
    blocks = make_ddr(TINY, 3, many[0].windows).content[: 24 * 72].reshape(24, 72)
    multipliers = blocks[:, 32:64].copy().view("<u4")
    shifts = blocks[:, 64:]
    assert {0, 1, 2**31 - 1} <= set(multipliers.reshape(-1).tolist())
    assert multipliers.max() < 2**31
    assert {0, 1, 31, 32, 33, 61, 62} <= set(shifts.reshape(-1).tolist())
    assert shifts.max() <= 62


def test_every_pair_of_engines_meets(many: list[Case]) -> None:
    used: set[int] = set()
    for case in many:
        for instr in case.program:
            used |= {n for n in range(32) if instr.fields.get("wait", 0) >> n & 1}
    engines = (0, 1, 4, 5)
    pairs = {semaphore(p, c) for p in engines for c in engines if p != c}
    assert used == pairs | {FROM_ENGINE, TO_ENGINE}


def test_loops_are_larger_than_the_buffer_and_nest(many: list[Case]) -> None:
    longest = deepest = 0
    for case in many:
        open_: list[int] = []
        for position, instr in enumerate(case.program):
            if instr.name == "loop":
                open_.append(position)
                deepest = max(deepest, len(open_))
            elif instr.name == "end_loop":
                longest = max(longest, position - open_.pop() - 1)
    assert longest > 64
    assert deepest == 4


def test_queues_are_full(many: list[Case]) -> None:
    full: set[int] = set()
    for case in many:
        for engine in (0, 1, 4, 5):
            run = 0
            for item in sequence(case.program, TINY.scalar_registers, case.registers):
                run = run + 1 if item.engine == engine else 0
                if run > TINY.queue_depth:
                    full.add(engine)
    assert full == {0, 1, 4, 5}


def test_addresses_reach_the_last_line() -> None:
    target = suite_target("tiny8_a40")
    high: dict[str, int] = {}
    for seed in range(12):
        case = generate(target, "address", seed)
        for item in sequence(case.program, target.scalar_registers, case.registers):
            if "ddr" in item.fields:
                high[item.name] = max(high.get(item.name, 0), item.fields["ddr"])
    assert min(high.values()) > 2**39
    assert max(high.values()) > 2**40 - 2**15


def test_prime_k_reduces_over_primes_beside_traffic() -> None:
    for seed in range(10):
        case = generate(TINY, PRIME_K, seed)
        convs = [full_fields(i) for i in case.program if i.name == "mac_conv"]
        assert convs
        for f in convs:
            assert is_prime(f["c_last"])
            assert is_prime(f["c_rows"])
            assert TINY.array_size % f["c_last"]
        places = {f[name] // TINY.bank_size for f in convs for name in ("act", "wgt")}
        traffic = {
            i.fields["sram"] // TINY.bank_size
            for i in case.program
            if i.name.startswith("dma_") and "sram" in i.fields
        }
        assert places & traffic


def test_saturation_leaves_32_bits_on_both_sides() -> None:
    case = generate(TINY, SATURATION, 1)
    wrapping = TINY.model_copy(update={"mac_saturation": False})
    results: list[bytes] = []
    for target in (TINY, wrapping):
        ddr = case.ddr()
        found: list[bytes] = []
        FunctionalSimulator(target).run(
            case.program, ddr.content, registers=case.registers,
            hook=lambda at, state, found=found: found.append(state.sram[32:64].tobytes()),
        )  # fmt: skip
        results.append(found[-1])
    # Columns of either half differ between saturating and wrapping accumulators.
    assert results[0][:16] != results[1][:16]
    assert results[0][16:] != results[1][16:]


def test_ddr_shows_what_was_written_outside_the_windows() -> None:
    target = suite_target("tiny8_a40")
    windows = (Window(0, catalogue(target).size), Window((1 << 40) - 8192, 8192))
    ddr = make_ddr(target, 1, windows)
    assert ddr.content.size == 1 << 40
    assert ddr.strays() == []
    ddr.content[(1 << 36) + 5] = 1
    ddr.content[(1 << 40) - 8193] = 2
    assert ddr.strays() == [(1 << 36) + 5, (1 << 40) - 8193]


def test_unneeded_programs_get_no_semaphores() -> None:
    program = [
        Instr("dma_fill", {"n0": 8}),
        Instr("vec_copy", {"src": 64, "dst": 80}),
        Instr("halt"),
    ]
    assert all(not i.fields.get("wait") for i in synchronise(program, TINY, {}, extra=0))
    program[1].fields["src"] = 0
    waiting = synchronise(program, TINY, {}, extra=0)
    assert waiting[1].fields["wait"] == waiting[0].fields["signal"] == 1 << semaphore(0, 5)


def test_profiles_are_known() -> None:
    with pytest.raises(ValueError, match="profile must be one of mixed"):
        generate(TINY, "nonsense", 1)
    assert len(set(ALL_PROFILES)) == 10
