"""ONNX's own node tests: what is compiled must be right, what is not must say why."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.conformance.node_suite import Outcome, node_tests, run_all, tally

FLOOR_PLAIN = 1063
"""Tests that pass as they are. Raise it when more do; never lower it."""
FLOOR_ALL = 1362
"""The same, with those that pass once their shape operands are bound."""


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return run_all(node_tests())


def test_nothing_is_wrong(outcomes: list[Outcome], capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\nONNX node tests: {tally(outcomes)}")
    wrong = [f"{outcome.name}: {outcome.reason}" for outcome in outcomes if outcome.kind == "wrong"]
    assert not wrong


def test_enough_pass(outcomes: list[Outcome]) -> None:
    kinds = Counter(outcome.kind for outcome in outcomes)
    assert kinds["passed"] >= FLOOR_PLAIN
    assert kinds["passed"] + kinds["bound"] >= FLOOR_ALL


def test_all_are_there(outcomes: list[Outcome]) -> None:
    assert len(outcomes) >= 1765


def test_every_refusal_has_a_reason(outcomes: list[Outcome]) -> None:
    refused = [outcome for outcome in outcomes if outcome.kind == "refused"]
    assert refused
    assert all(len(outcome.reason) > len("E0102 ") for outcome in refused)
