"""Parsing, exit codes, error wording, and what happens when things go wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tilewright.cli import main
from tilewright.cli.command import COMMANDS, write_repro


def test_help_lists_all_commands(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]):
    assert main([command, "--help"]) == 0
    assert "--json" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("tilewright 0.")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["compil"], "did you mean `compile`?"),
        (["qqq"], "commands: compile"),
        (["compile"], "model"),
        (["compile", "m.onnx", "--targt", "x"], "did you mean `--target`?"),
        (["compile", "m.onnx", "--calibration", "x"], "`--calibration-data`"),
        (["compile", "m.onnx", "n.onnx"], "`n.onnx` is one argument too many"),
        (["--nothing"], "--nothing"),
        (["zoo", "prepare"], "name of a model"),
        (["zoo", "prepare", "nope"], "pplcnet"),
        (["zoo", "inputs", "pplcnet"], "--output"),
        (["zoo", "inputs", "pplcnet", "-o", "x.txt"], ".npz"),
        (["zoo", "inputs", "pplcnet", "-o", "x.npz", "--count", "0"], "1 or more"),
        (["run", "x.tpupkg"], "either --input"),
        (["run", "x.tpupkg", "--random", "1", "-i", "y"], "either --input"),
        (["simulate", "x.tpupkg", "--level", "functional", "--trace", "t.json"], "--level cycle"),
        (["simulate", "x.tpupkg", "--level", "functional", "--layers", "3"], "--level cycle"),
        (["simulate", "x.tpupkg", "--layers", "-1"], "must be 1 or more"),
        (["simulate", "x.tpupkg", "--level", "functional", "--seed", "-1"], "must be 0 or more"),
        (["compile", "zoo:pplcnet", "--constant-in-sram", " , "], "names nothing"),
        (["compare", "m.onnx", "--levels", "quant"], "two different levels"),
        (["compare", "m.onnx", "--levels", "quant,quant"], "two different levels"),
        (["compare", "m.onnx", "--levels", "quant,rtl"], "two different levels"),
        (["compare", "m.onnx", "--fp32"], "int8"),
    ],
)
def test_usage_errors(arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert told.err.startswith("error[E0702]: ")
    assert word in told.err
    assert "Traceback" not in told.err
    assert told.out == ""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["compile", "no.onnx", "--calibration-data", "."], "E0101"),
        (["compile", "no.onnx"], "E0101"),
        (["compile", "no.onnx", "--fp32"], "E0101"),
        (["compile", "no.onnx", "--target", "nochip"], "E0201"),
        (["compile", "no.onnx", "-o", "missing/folder/x.tpupkg"], "E0701"),
        (["inspect", "no.tpupkg"], "E0701"),
        (["disasm", "no.bin"], "E0701"),
        (["run", "no.tpupkg", "--random", "1"], "E0701"),
    ],
)
def test_input_errors(
    arguments: list[str],
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "--json", "--quiet"]) == 1
    told = capsys.readouterr()
    assert told.err.startswith(f"error[{code}]: ")
    assert json.loads(told.out)["error"]["code"] == code
    assert list(tmp_path.iterdir()) == []


def _break(monkeypatch: pytest.MonkeyPatch, error: BaseException):
    def fail(*_: Any) -> int:
        raise error

    monkeypatch.setattr("tilewright.cli.doctor.run", fail)


def test_our_fault_is_said_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    _break(monkeypatch, RuntimeError("boom"))
    assert main(["doctor"]) == 70
    told = capsys.readouterr().err
    assert "internal error: RuntimeError: boom" in told
    assert "Traceback" not in told
    (folder,) = tmp_path.iterdir()
    assert str(folder) in told
    assert "boom" in (folder / "traceback.txt").read_text()
    about = json.loads((folder / "about.json").read_text())
    assert about["command"] == ["tilewright", "doctor"]
    assert about["versions"]["xdsl"]
    assert main(["doctor", "--debug"]) == 70
    assert "Traceback" in capsys.readouterr().err


def test_repro_copies_small_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("tilewright.cli.command.MAX_REPRO_BYTES", 10)
    small, large = tmp_path / "small.onnx", tmp_path / "large.onnx"
    small.write_bytes(b"12345")
    large.write_bytes(b"x" * 11)
    folder = write_repro(RuntimeError("x"), ["compile", str(small), str(large)])
    assert [item.name for item in folder.glob("input*")] == ["input1-small.onnx"]
    assert len(json.loads((folder / "about.json").read_text())["inputs"]) == 2


def test_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    _break(monkeypatch, KeyboardInterrupt())
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_reader_that_leaves(package: Path):
    """`tilewright disasm ... | head -1` ends without a word."""
    command = f"{sys.executable} -c 'from tilewright.cli import main; raise SystemExit(main())'"
    result = subprocess.run(
        ["bash", "-c", f"for i in 1 2 3; do {command} inspect {package} --json | head -c 1; done"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == "{{{"
    assert result.stderr == ""


def test_doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["healthy"]
    assert {"python", "xdsl", "onnxruntime", "targets", "float run"} <= {
        check["name"] for check in found["checks"]
    }


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("1.22.0", ">=1.22,<1.23", True),
        ("1.23.0", ">=1.22,<1.23", False),
        ("0.75.0", "==0.75.0", True),
        ("0.75.1", "==0.75.0", False),
        ("2.13.0+cpu", "<2.14,>=2.6", True),
        ("1.9", ">=1.10", False),
        ("3.0", "", True),
    ],
)
def test_version_bounds(version: str, wanted: str, fits: bool):
    from tilewright.cli.doctor import _satisfies

    assert _satisfies(version, wanted) is fits
