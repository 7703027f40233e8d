"""The command: what it prints, writes and returns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cosim.own import slow_engine, wrong_constant
from tests.cosim.support import needs_verilator
from tilewright.diagnostics import TilewrightError
from tilewright.spec.hardware import Hardware, load_target
from tilewright.testgen import programs
from tilewright.testgen import run as run_module
from tilewright.testgen.programs import Case, generate
from tilewright.testgen.run import Finding, Outcome
from tilewright.testgen.text import from_text, to_text
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

    assert [i.name for i in from_text(text, load_target).program] == ["vec_pool", "halt"]
    # What was written can be run again.
    assert main(["--run", str(files[0]), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["failures"][0]["command"].startswith("tpu-mlir-testgen --run ")


def test_an_illegal_program_does_not_end_a_campaign(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(hardware: Hardware, profile: str, seed: int) -> Case:
        if seed == 2:
            raise TilewrightError("E0501", "instruction 3 (vec_drain): dst overlaps act", ["so"])
        return generate(hardware, profile, seed)

    monkeypatch.setattr(programs, "generate", broken)
    assert main(["--profile", "dma", "--count", "4", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["tests"] == 4
    (failure,) = report["failures"]
    assert (failure["name"], failure["kind"]) == ("dma-2", "illegal")
    assert failure["message"] == (
        "the generator made an illegal program: instruction 3 (vec_drain): dst overlaps act; so"
    )
    assert "--profile dma --seed 2 --count 1" in failure["command"]


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_folder_that_cannot_be_written_is_refused_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, place: str
) -> None:
    failing(monkeypatch)
    (tmp_path / "file").write_text("kept")
    folder = str(tmp_path / place)
    assert main(["--profile", "vector", "--count", "4", "--output", folder]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"error[E0701]: cannot write to the folder `{folder}`" in err
    assert "programs" not in err
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_failure_that_cannot_be_written_is_still_told(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    form: list[str],
) -> None:
    failing(monkeypatch)
    arguments = ["--profile", "vector", "--count", "4", "--output", str(tmp_path), *form]
    assert main(arguments) == 1
    first = capsys.readouterr().out
    written = sorted(tmp_path.iterdir())
    assert len(written) > 1
    written[0].unlink()
    written[0].mkdir()
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert f"error[E0701]: cannot write `{written[0]}`" in err
    assert "4 tests" in err
    if not form:
        assert out == first
        return
    files = [failure["file"] for failure in json.loads(out)["failures"]]
    assert files == ["", *(str(path) for path in written[1:])]


def test_a_missing_tool_is_no_caught_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build_library(*_: Any, **__: Any) -> Any:
        raise TilewrightError("E0801", "a tool that simulates the RTL is missing", ["verilator"])

    monkeypatch.setattr("tilewright.cosim.driver.build_library", build_library)
    for form in ([], ["--json"]):
        assert main(["--faults", *form]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("error[") == 1
        assert "error[E0801]: a tool that simulates the RTL is missing" in err


@pytest.mark.parametrize(
    ("line", "message"),
    [("; seed: -1", "seed must be 0.."), ("; window: 0x0 -5", "must be 0x1..0x4000000, not -5")],
)
def test_a_file_with_an_odd_head_runs_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, message: str
) -> None:
    good, odd = tmp_path / "good.tpuasm", tmp_path / "odd.tpuasm"
    good.write_text(to_text(generate(load_target("tiny8"), "dma", 1)))
    key = line.split(":")[0]
    lines = [line if old.startswith(key) else old for old in good.read_text().splitlines()]
    odd.write_text("\n".join(lines) + "\n")
    assert main(["--run", str(good), "--run", str(odd)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "programs" not in err
    assert "error[E0601]: line " in err
    assert message in err
    assert f"in `{odd}`" in err


def test_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--models", "2", "--target", "tiny8", "--seed", "3"]) == 0
    assert "2 tests" in capsys.readouterr().err


def test_a_chip_without_rows_has_no_such_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chip = load_target("tiny8").model_copy(update={"name": "plain", "vector_rows": False})
    path = tmp_path / "plain.yaml"
    path.write_text(chip.to_yaml())
    assert main(["--target", str(path), "--profile", "dma,rows"]) == 2
    assert "`--profile rows`: target `plain` has no `vector_rows`" in capsys.readouterr().err
    assert main(["--target", str(path), "--profile", "all", "--count", "1"]) == 0
    assert "7 tests" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "odd"], "`odd` must be all or among mixed"),
        (["--profile", "dma,nope"], "`--profile dma,nope`: `nope` must be all or among mixed"),
        (["--profile", "nope", "--models", "1"], "`nope` must be all or among mixed"),
        (["--profile", ""], "`` must be all or among mixed"),
        (["--seed", str(2**63)], f"it must be {2**62} or less"),
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
    out, err = capsys.readouterr()
    # Nothing was run before.
    assert "programs" not in err
    assert out == ""
    assert message in err


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


@pytest.mark.parametrize(
    "arguments",
    [["--faults", "--target", "edge16"], ["--faults", "--count", "1"], ["--faults", "--seed", "2"],
     ["--run", "x.tpuasm", "--target", "edge16"], ["--run", "x.tpuasm", "--profile", "dma"]],
)  # fmt: skip
def test_what_would_be_ignored_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert f"{arguments[-2]} has no effect with {arguments[0]}" in capsys.readouterr().err
