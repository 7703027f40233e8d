"""The command: what it prints, writes and returns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cosim.own import slow_engine, wrong_constant
from tests.cosim.support import needs_verilator
from tilewright.testgen import run as run_module
from tilewright.testgen.programs import Case, from_text
from tilewright.testgen.run import Finding, Outcome
from tilewright.tools.testgen import main


def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every program with a `vec_pool` fail."""

    def run_case(case: Case, backends: Any, rtl: Any = None, fault: int = 0) -> Outcome:
        del backends, rtl, fault
        found = [i for i in case.program if i.name == "vec_pool"]
        return Outcome([Finding("value", "vec_pool sram", "a byte differs")] if found else [], 9, 1)

    monkeypatch.setattr(run_module, "run_case", run_case)


def test_programs_that_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", "tiny8", "--count", "2", "--profile", "dma,vector"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "4 tests" in err
    assert "0 failures" in err


def test_stall_pattern(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--test-stall-pattern=prime_k", "--count", "2", "--backends", "functional"]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tests"] == 2
    assert report["failures"] == []
    assert report["backends"] == ["functional"]


def test_a_failure_is_a_line_with_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    failing(monkeypatch)
    folder = tmp_path / "failures"
    arguments = ["--profile", "vector", "--count", "4", "--shrink", "--output", str(folder)]
    assert main(arguments) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines
    for line in lines:
        assert "value: a byte differs | tpu-mlir-testgen --target tiny8 --profile vector " in line
        assert "--count 1 --backends functional,cycle" in line
    files = sorted(folder.iterdir())
    assert len(files) == len(lines)
    text = files[0].read_text("utf-8")
    assert "; cause: value: a byte differs\n" in text

    def target(name: str) -> Any:
        from tilewright.spec.hardware import load_target

        return load_target(name)

    assert [i.name for i in from_text(text, target).program] == ["vec_pool", "halt"]
    # What was written can be run again.
    assert main(["--run", str(files[0]), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["failures"][0]["command"].startswith("tpu-mlir-testgen --run ")


def test_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--models", "2", "--target", "tiny8", "--seed", "3"]) == 0
    assert "2 tests" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "odd"], "it must be all or among mixed"),
        (["--test-stall-pattern=prime"], "it must be prime_k"),
        (["--backends", "cycle,verilog"], "`verilog` must be one of functional, cycle, rtl"),
        (["--count", "-1"], "it must be 0 or more"),
        (["--rtl", "x", "--backends", "cycle"], "`--rtl` needs the level rtl"),
        (["--rtl", "x", "--faults"], "not with --rtl"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@needs_verilator
def test_own_modules(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("wrong", "slow", "broken")]
    for folder in folders:
        folder.mkdir()
    wrong, slow, broken = folders
    wrong_constant(wrong)
    slow_engine(slow)
    (broken / "tw_sem.v").write_text("module tw_sem(; endmodule\n")
    arguments = ["--target", "tiny8", "--profile", "mac", "--count", "2", "--json"]
    for folder, kind in ((wrong, "value"), (slow, "time")):
        assert main([*arguments, "--rtl", str(folder)]) == 1
        report = json.loads(capsys.readouterr().out)
        assert report["backends"] == ["functional", "cycle", "rtl"]
        assert [failure["kind"] for failure in report["failures"]] == [kind, kind]
        assert report["failures"][0]["command"].endswith(
            f"--backends functional,cycle,rtl --rtl {folder}"
        )
    # What does not build is said once, and is no failure of a program.
    assert main([*arguments, "--rtl", str(broken)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "error[E0803]" in err
    assert f"{broken}/tw_sem.v:1:" in err
    assert main([*arguments, "--rtl", str(tmp_path / "nowhere")]) == 1
    assert "E0701" in capsys.readouterr().err


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--run", "/nowhere/x.tpuasm"]) == 1
    assert "E0701" in capsys.readouterr().err
