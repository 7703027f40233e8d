"""Random programs on the chip itself: a sample in every run, thousands by night."""

from __future__ import annotations

import json

import pytest

from tests.cosim.support import needs_verilator
from tilewright.tools.testgen import main

BACKENDS = ["--backends", "functional,cycle,rtl", "--json"]


def campaign(capsys: pytest.CaptureFixture[str], *arguments: str) -> int:
    """Run programs on all levels; return how many agreed."""
    code = main([*arguments, *BACKENDS])
    report = json.loads(capsys.readouterr().out)
    assert report["failures"] == []
    assert code == 0
    return report["tests"]


@needs_verilator
def test_a_sample(capsys: pytest.CaptureFixture[str]) -> None:
    assert campaign(capsys, "--target", "tiny8", "--profile", "all", "--count", "10") >= 70
    pattern = ["--test-stall-pattern", "prime_k"]
    assert campaign(capsys, "--target", "tiny8", "--count", "15", *pattern) == 15
    assert campaign(capsys, "--target", "edge16", "--profile", "mixed", "--count", "10") == 10


@needs_verilator
@pytest.mark.slow
def test_thousands(capsys: pytest.CaptureFixture[str]) -> None:
    seed = ["--seed", "100000"]
    done = campaign(capsys, "--target", "tiny8", "--profile", "all", "--count", "280", *seed)
    pattern = ["--test-stall-pattern", "prime_k"]
    done += campaign(capsys, "--target", "tiny8", "--count", "200", *pattern, *seed)
    assert done >= 2000
    assert campaign(capsys, "--target", "edge16", "--profile", "all", "--count", "45", *seed) >= 300


@needs_verilator
@pytest.mark.slow
@pytest.mark.parametrize("target", ["tiny8", "edge16"])
def test_models(capsys: pytest.CaptureFixture[str], target: str) -> None:
    assert campaign(capsys, "--target", target, "--models", "25") == 25
