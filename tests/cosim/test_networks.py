"""Real networks on the RTL of edge16: same bytes, same cycles."""

from __future__ import annotations

import json

import pytest

from tests.cosim.support import needs_verilator
from tests.unit.test_zoo_nets import needs_torch
from tilewright.cli import main


def cosim(capsys: pytest.CaptureFixture[str], model: str, target: str = "edge16") -> None:
    code = main(["cosim", f"zoo:{model}", "--target", target, "--json"])
    found = json.loads(capsys.readouterr().out)
    for program in found["programs"]:
        assert program["equal_values"], program
        assert program["equal_times"], program
        assert program["rtl_cycles"] == program["simulated_cycles"] > 100_000
    assert found["programs"]
    assert all(found["outputs"].values())
    assert code == 0


@needs_verilator
@pytest.mark.parametrize("model", ["pplcnet", "squeezenet-light"])
def test_a_network(capsys: pytest.CaptureFixture[str], model: str) -> None:
    cosim(capsys, model)


@needs_verilator
@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    ["opennsfw", "resnet50-light", pytest.param("mobilenet-v2", marks=needs_torch)],
)
def test_a_large_network(capsys: pytest.CaptureFixture[str], model: str) -> None:
    cosim(capsys, model)


@needs_verilator
@pytest.mark.slow
@pytest.mark.parametrize("model", ["pplcnet", "squeezenet-light", "ppocr-cls"])
def test_a_network_on_the_smallest_chip(capsys: pytest.CaptureFixture[str], model: str) -> None:
    cosim(capsys, model, "tiny8")
