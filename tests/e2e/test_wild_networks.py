"""Unusual networks, and usual ones on unusual chips: right at every level, or refused by name."""

from __future__ import annotations

import onnx
import pytest

from tests.level_checks import check_model
from tests.random_networks import random_network
from tests.random_targets import random_target
from tests.wild_networks import wild_network
from tilewright.diagnostics import TilewrightError
from tilewright.spec.hardware import Hardware, load_target

SMALL = load_target("tiny8").model_copy(update={"name": "tiny8_4k", "sram_size": 4096})
TARGETS = [SMALL, *(load_target(name) for name in ("tiny8", "edge16", "tpu_v2"))]
REFUSALS = {"E0302", "E0304", "E0401", "E0402"}
"""Scales no bias or multiplier spans, no tile that fits, no instruction that walks so far."""


def right_or_refused(
    model: onnx.ModelProto, shapes: dict[str, tuple[int, ...]], target: Hardware, seed: int
) -> bool:
    """Return whether it compiles; a refusal must say which layer of the user's."""
    try:
        check_model(model, shapes, target, seed=seed)
    except TilewrightError as error:
        named = any(f'"{node.name}"' in error.message for node in model.graph.node)
        if error.code in REFUSALS and named:
            return False
        raise
    return True


def check_wild(seed: int, target: Hardware, layers: int = 7) -> bool:
    model, shapes = wild_network(seed, layers)
    return right_or_refused(model, shapes, target, seed)


def check_target(seed: int) -> bool:
    if seed % 2:
        model, shape = random_network(seed, layers=4)
        return right_or_refused(model, {"x": shape}, random_target(seed), seed)
    return check_wild(seed, random_target(seed), layers=4)


@pytest.mark.parametrize("seed", range(12))
def test_wild_networks(seed: int) -> None:
    check_wild(seed, TARGETS[seed % len(TARGETS)])


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("seed", range(100, 160))
def test_many_more_wild_networks(seed: int, target: Hardware) -> None:
    check_wild(seed, target, layers=9)


def test_any_legal_chip() -> None:
    compiled = [check_target(seed) for seed in range(10)]
    assert sum(compiled) > 7, "most chips run most networks"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 300))
def test_many_more_chips(seed: int) -> None:
    check_target(seed)


def test_the_generators_are_seeded() -> None:
    one, two = wild_network(5)[0], wild_network(5)[0]
    assert one.SerializeToString(deterministic=True) == two.SerializeToString(deterministic=True)
    assert random_target(5) == random_target(5) != random_target(6)


def test_parameters_that_share_a_bank_replace_each_other() -> None:
    # Two resizes of one ratio with convolutions between: the second may not trust the first's.
    model, shape = random_network(33, layers=4)
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("Resize") == 2
    target = load_target("tiny8").model_copy(update={"name": "two_banks", "quant_banks": 2})
    check_model(model, {"x": shape}, target)


def test_scales_no_multiplier_spans_name_the_layer() -> None:
    model, shapes = wild_network(1009, layers=10)
    with pytest.raises(TilewrightError, match="scales around") as caught:
        check_model(model, shapes, TARGETS[1], seed=1009)
    assert caught.value.code == "E0304"
    assert any(f'"{node.name}"' in caught.value.message for node in model.graph.node)
