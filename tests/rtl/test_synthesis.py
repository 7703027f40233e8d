"""A synthesis tool reads the RTL."""

import json

import pytest

from tilewright.rtl.synthesis import elaborate, main
from tilewright.spec.hardware import load_target


def test_the_synthesis_tool_reads_tiny8() -> None:
    elaborate(load_target("tiny8"))


@pytest.mark.slow
def test_counts_of_tiny8(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", "tiny8", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    total, modules = result["total"], result["modules"]
    for name in ("gates", "flip_flops", "memory_bits", "memories"):
        assert total[name] == sum(module[name] for module in modules.values()) > 0
    # Eight products of 8 x 8 bits a column, and every SRAM byte in a memory.
    assert modules["tw_mac"]["gates"] > 64 * 64
    assert modules["tw_sram"]["memory_bits"] >= 8 * 32768
    assert total["flip_flops"] < 50_000, "memories have become flip-flops"
