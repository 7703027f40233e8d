"""The proof that instructions read the right parameters: every planted wrong one is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.bank_networks import Policy, changed, chip, compiled, programs
from tilewright.codegen.verify_compiled import verify_compiled
from tilewright.codegen.verify_parameters import contents, verify_parameters
from tilewright.diagnostics import TilewrightError
from tilewright.dialects.tpu import ProgramOp
from tilewright.spec.hardware import Hardware, load_target
from tilewright.spec.program import Instr

TINY = load_target("tiny8")
LANES = TINY.vector_lanes
HALT = Instr("halt")


def program_of(kind: str, size: int, hardware: Hardware, policy: Policy = "shared") -> ProgramOp:
    (program,) = programs(compiled(kind, size, hardware, policy))
    return program


def refused(program: list[Instr], **options: object) -> str:
    with pytest.raises(TilewrightError) as caught:
        verify_parameters([*program, HALT], TINY, **options)  # pyright: ignore[reportArgumentType]
    assert caught.value.code == "E0501"
    return str(caught.value)


def load(place: int, sram: int, blocks: int = 1, layer: str = "a") -> Instr:
    return Instr("dma_load", {"ddr": place, "sram": sram, "n0": 9 * LANES * blocks}, layer)


def param(src: int, entry: int, v: int, count: int = 1, layer: str = "a") -> Instr:
    return Instr("vec_param", {"src": src, "param": entry, "v": v, "count": count}, layer)


def drain(entry: int, v: int, blocks: int = 1, layer: str = "a") -> Instr:
    return Instr("vec_drain", {"param": entry, "v": v, "oc_blocks": blocks}, layer)


def add(entry: int, layer: str = "a") -> Instr:
    return Instr("vec_eltwise", {"param": entry}, layer)


BLOCK = 9 * LANES
GOOD = [load(0x1000, 512, 2), param(512, 0, 0, 2), drain(0, 0, 2)]


def test_good_programs_pass() -> None:
    found = verify_parameters([*GOOD, HALT], TINY, strict=True, wanted={2: {"v": 0x1000}})
    assert (found.reads, found.loads) == (1, 1)
    assert contents([*GOOD, HALT], TINY)[0] == (
        2, "v", ((0x1000, 0, "a"), (0x1000 + BLOCK, 1, "a")),
    )  # fmt: skip


RULES: list[tuple[list[Instr], dict[str, object], str]] = [
    ([drain(16, 0)], {}, "v: nothing has been loaded to V0"),
    ([*GOOD, drain(17, 0)], {}, "param: nothing has been loaded to entry 1 of bank 1"),
    ([*GOOD, drain(1, 0)], {}, "multipliers and biases are not of the same block"),
    ([*GOOD, drain(0, 0, layer="b")], {}, "v: it reads parameters of another layer"),
    ([*GOOD, param(512, 1, 1, layer="b"), drain(0, 0, 2)], {}, "does not follow what the register"),
    ([*GOOD, add(0)], {"needs": {"a": [0x2000]}}, 'reads what layer "a" does not ask for'),
    ([*GOOD, Instr("vec_copy", {"use_table": 1}, "a")], {}, "V0 does not hold a lookup table"),
    ([*GOOD], {"wanted": {2: {"v": 0x1048}}}, "it must read the constant at DDR 0x1048"),
    ([*GOOD], {"wanted": {}}, "it reads what nothing asked for"),
    # Between the copy and the load something else is written there.
    ([GOOD[0], Instr("dma_fill", {"sram": 512, "n0": 1}, "a"), param(512, 0, 0), drain(0, 0)],
     {"wanted": {3: {"v": 0x1000}}}, "it must read the constant at DDR 0x1000"),
    # Entries of the same layer and bank.
    ([*GOOD, load(0x2000, 1024), param(1024, 2, 2), add(2)], {"strict": True}, "share bank 0"),
    ([*GOOD, param(512 + BLOCK, 0, 0), drain(0, 0)], {"strict": True},
     "entry 0 of bank 0 wraps around: it holds other blocks of the same tile"),
    ([load(0x2000, 512, 2), param(512, 32, 9), add(32), param(512 + BLOCK, 32, 9), add(32)],
     {"strict": True}, "entry 0 of bank 2 wraps around: it holds other scalars"),
]  # fmt: skip


@pytest.mark.parametrize(("program", "options", "message"), RULES)
def test_rules(program: list[Instr], options: dict[str, object], message: str) -> None:
    assert message in refused(program, **options)


def test_new_tiles_may_take_the_place_of_old_ones() -> None:
    program = [
        *GOOD, load(0x2000, 512, 2), param(512, 0, 0, 2), drain(0, 0, 2),
        load(0x3000, 1024, layer="b"), param(1024, 32, 9, layer="b"), add(32, "b"), add(32, "c"),
    ]  # fmt: skip
    needs = {"b": [0x3000], "c": [0x3000]}
    verify_parameters([*program, HALT], TINY, needs=needs, strict=True)
    assert 'layer "c" does not ask' in refused(program, needs={"b": [0x3000]})


def uses_entry(instr: Instr) -> bool:
    f = instr.fields
    return (
        instr.name == "vec_drain"
        or (instr.name == "vec_eltwise" and f.get("op", 0) < 3)
        or bool(f.get("requantise"))
    )


def loads_entries(instr: Instr) -> bool:
    return instr.name == "vec_param" and not instr.fields.get("bias_only")


@pytest.mark.parametrize("chosen", [uses_entry, loads_entries])
@pytest.mark.parametrize(("policy", "banks"), [("shared", 4), ("strict", 4), ("strict", 2)])
@pytest.mark.parametrize(("kind", "size"), [("wide", 0), ("deep", 10), ("joined", 3)])
def test_a_wrong_bank_anywhere_is_found(
    kind: str, size: int, policy: Policy, banks: int, chosen: Callable[[Instr], bool]
) -> None:
    hardware = chip(banks, 16)
    op = program_of(kind, size, hardware, policy)
    verify_compiled(op, hardware)
    program = op.instructions()
    places = [index for index, instr in enumerate(program) if chosen(instr)]
    assert places
    for index in places:
        old = program[index].fields.get("param", 0)
        for bank in range(1, banks):
            wrong = changed(program, index, param=(old + 16 * bank) % (16 * banks))
            with pytest.raises(TilewrightError) as caught:
                verify_parameters(wrong, hardware, needs=op.needs(), strict=policy == "strict")
            assert caught.value.code == "E0501"
            assert 'layer "' in caught.value.message


def test_the_module_says_what_its_layers_need() -> None:
    op = program_of("deep", 4, chip(4, 16))
    needs = op.needs()
    assert needs is not None
    assert set(needs) == {"sum1", "sum3"}
    del op.attributes["parameters"]
    assert op.needs() is None
    verify_compiled(op, chip(4, 16))
