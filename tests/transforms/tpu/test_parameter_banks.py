"""Policies of the parameter banks: what is given out, what is refused, and that results agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bank_networks import SHAPE, chip, compiled, programs
from tilewright.codegen.verify_parameters import verify_parameters
from tilewright.compiler import Compiled
from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.ir.io import new_context
from tilewright.passes import make_pass
from tilewright.runtime.runtime import Executor
from tilewright.transforms.tpu.parameter_banks import POLICIES, ParameterBanks, Policy

STRICT = "lower-affine-to-tpu{quant-bank-policy=strict}"
CHIPS = [(2, 4), (2, 16), (3, 5), (4, 4), (4, 16)]


def outputs(made: Compiled) -> list[np.ndarray]:
    x = np.random.default_rng(9).standard_normal(SHAPE).astype(np.float32) * 2
    return list(Executor(made.program, made.target).run({"x": x}).values())


def banks_of(made: Compiled) -> dict[str, tuple[set[int], set[int]]]:
    """Return the banks that channels and activations of every layer are read from."""
    found: dict[str, tuple[set[int], set[int]]] = {}
    size = made.target.quant_bank_entries
    for program in programs(made):
        for instr in program.instructions():
            f = instr.fields
            if instr.name == "vec_drain":
                first = f.get("param", 0)
                entries = range(first, first + f.get("oc_blocks", 1))
                found.setdefault(instr.layer, (set(), set()))[0].update(e // size for e in entries)
            elif (instr.name == "vec_eltwise" and f.get("op", 0) < 3) or f.get("requantise"):
                found.setdefault(instr.layer, (set(), set()))[1].add(f.get("param", 0) // size)
    return found


@pytest.mark.parametrize(("banks", "entries"), CHIPS)
@pytest.mark.parametrize(("kind", "size"), [("wide", 0), ("joined", 4), ("deep", 6)])
def test_strict_separates_banks_and_changes_no_result(
    kind: str, size: int, banks: int, entries: int
) -> None:
    hardware = chip(banks, entries)
    shared = compiled(kind, size, hardware)
    strict = compiled(kind, size, hardware, "strict")
    for one, other in zip(outputs(shared), outputs(strict), strict=True):
        np.testing.assert_array_equal(one, other)
    all_channels: set[int] = set()
    all_scalars: set[int] = set()
    for channels, scalars in banks_of(strict).values():
        all_channels |= channels
        all_scalars |= scalars
    assert all_channels
    assert all_scalars
    assert not all_channels & all_scalars
    for program in programs(strict):
        assert program.strict_banks
        verify_parameters(program.instructions(), hardware, needs=program.needs(), strict=True)


@pytest.mark.parametrize("policy", ["shared", "strict"])
@pytest.mark.parametrize(("banks", "entries"), [(2, 4)])
def test_more_layers_than_entries(policy: Policy, banks: int, entries: int) -> None:
    hardware = chip(banks, entries)
    made = compiled("deep", 72, hardware, policy, level=1)
    layers = banks_of(made)
    assert sum(1 for channels, _ in layers.values() if channels) > 64
    told = {item.layer: item for item in made.decisions if "channel_banks" in item.details}
    for layer, (channels, scalars) in layers.items():
        assert told[layer].details["channel_banks"] == sorted(channels), layer
        assert told[layer].details["activation_banks"] == sorted(scalars), layer
        assert f"({policy})" in told[layer].reason
    reference = compiled("deep", 72, chip(4, 16), "shared", level=1)
    for one, other in zip(outputs(made), outputs(reference), strict=True):
        np.testing.assert_array_equal(one, other)


def test_shared_is_not_strict_on_two_banks() -> None:
    hardware = chip(2, 4)
    made = compiled("wide", 0, hardware)
    (program,) = programs(made)
    assert not program.strict_banks
    verify_parameters(program.instructions(), hardware, needs=program.needs())
    found = banks_of(made)
    assert any(1 in channels for channels, _ in found.values())
    assert any(1 in scalars for _, scalars in found.values())


def test_a_layer_with_too_many_scalars_is_refused_with_numbers() -> None:
    for policy in POLICIES:
        banks = ParameterBanks(chip(2, 4), policy)
        for number in range(4):
            assert banks.scalars("concat", number) == (4 + number, False)
        assert banks.scalars("concat", 0) == (4, True)
        banks.finish()
        banks.scalars("concat", 4)
        banks.scalars("concat", 5)
        if policy == "shared":
            banks.finish()
            continue
        with pytest.raises(TilewrightError) as caught:
            banks.finish()
        assert caught.value.code == "E0402"
        assert '"concat" needs 6 entries' in caught.value.message
        assert "there are 4" in caught.value.message
        assert "bank 1 of target `tiny8`, 4 entries each" in caught.value.details


def test_a_tile_with_too_many_blocks_is_refused_with_numbers() -> None:
    hardware = chip(4, 4)
    banks = ParameterBanks(hardware, "strict")
    with pytest.raises(TilewrightError) as caught:
        banks.channels("conv7", "tile", 0, 3, total=6, entries=True)
    assert '"conv7": a tile needs 6 entries' in caught.value.message
    assert "a bank takes 4" in caught.value.message
    assert ParameterBanks(hardware, "shared").channels("conv7", "tile", 0, 3, 6, True) == (
        0, 0, False,
    )  # fmt: skip


def test_a_chip_of_one_bank_is_refused_by_name() -> None:
    with pytest.raises(TilewrightError, match=r"needs 2 .* banks, target `tiny8` has 1") as caught:
        ParameterBanks(chip(1, 16), "strict")
    assert caught.value.code == "E0402"


def test_legal_policies_are_listed() -> None:
    made = compiled("deep", 2, chip(4, 16))
    stage = made.stages["affine"]
    context = new_context(stage.weights.copy(), made.target)
    step = make_pass("lower-affine-to-tpu{quant-bank-policy=loose}")
    with pytest.raises(TilewrightError, match="one of shared, strict, not `loose`") as caught:
        step.apply(context, stage.module.clone())
    assert caught.value.code == "E0702"
    with pytest.raises(UsageError, match="lower-affine-to-tpu"):
        make_pass("lower-affine-to-tpu{bank=strict}")


def test_strict_is_deterministic_and_idempotent() -> None:
    made = compiled("wide", 0, chip(3, 5))
    stage = made.stages["affine"]
    texts: list[str] = []
    for _ in range(2):
        context = new_context(stage.weights.copy(), made.target)
        module = stage.module.clone()
        make_pass(STRICT).apply(context, module)
        texts.append(str(module))
        make_pass(STRICT).apply(context, module)
        assert str(module) == texts[-1]
    assert texts[0] == texts[1]
    assert 'quant_bank_policy = "strict"' in texts[0]


Asked = tuple[str, int, int]


@settings(max_examples=100, deadline=None)
@given(
    policy=st.sampled_from(["shared", "strict"]),
    banks=st.integers(2, 4),
    entries=st.integers(4, 16),
    asked=st.lists(
        st.tuples(st.sampled_from(["drain", "scalar"]), st.integers(0, 5), st.integers(0, 3)),
        max_size=60,
    ),
)
def test_what_is_called_resident_is_there(
    policy: Policy, banks: int, entries: int, asked: list[Asked]
) -> None:
    """Blocks of tile t: t % 4 + 1 chunks of one block, asked for in any order."""
    given_out = ParameterBanks(chip(banks, entries), policy)
    held: dict[int, object] = {}
    for kind, number, part in asked:
        layer = f"layer{number % 3}"
        if kind == "drain":
            total = number % 4 + 1
            what: object = (number, part % total)
            entry, register, resident = given_out.channels(
                layer, number, part % total, 1, total, True
            )
            assert 0 <= register < 2 * given_out.blocks
        else:
            what = ("scalar", layer, part)
            entry, resident = given_out.scalars(layer, what)
        if resident:
            assert held[entry] == what
        elif policy == "strict":
            old = held.get(entry)
            assert (old is None) or isinstance(old, tuple)
            if kind == "scalar":
                assert old is None or old[1] != layer
        held[entry] = what
        if policy == "strict":
            mine = given_out.banks(layer)
            assert not set(mine[0]) & set(mine[1])
    given_out.finish()
