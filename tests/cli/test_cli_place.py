"""`tilewright place`: files in, files out, and an answer for every bad line."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tilewright.cli import main

SIX = "id,lower,upper,size\na,0,3,4\nb,3,9,4\nc,0,9,4\nd,9,21,4\ne,0,21,4\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "buffers.csv"
    path.write_text(text, "utf-8")
    return path


def test_rows_come_back_with_offsets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = write(tmp_path, SIX), tmp_path / "out.csv"
    assert main(["place", str(path), "--capacity", "12", "-o", str(output)]) == 0
    assert "12 of 12 bytes (no fewer bytes can do)" in capsys.readouterr().out
    with output.open(newline="") as file:
        rows = list(csv.DictReader(file))
    with path.open(newline="") as file:
        given = list(csv.DictReader(file))
    assert [{**row, "offset": ""} for row in rows] == [{**row, "offset": ""} for row in given]
    at = {row["id"]: int(row["offset"]) for row in rows}
    assert len({at["a"], at["c"], at["e"]}) == len({at["b"], at["c"], at["e"]}) == 3
    assert set(at.values()) <= {0, 4, 8}


def test_columns_of_every_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "id,note,lower,upper,size,alignment,offset,gaps,regions,apart\n"
        "a,x,0,10,4,,8,,,\n"
        'b,"y,z",0,10,3,4,,2-4,,c\n'
        "c,,2,4,4,,,,0-4 16-32,b\n"
        "d,,2,4,4,,,,0-4,\n"
    )
    path, output = write(tmp_path, text), tmp_path / "out.csv"
    command = ["place", str(path), "--capacity", "32", "-o", str(output)]
    assert main(command) == 2
    assert "needs --bank-bytes" in capsys.readouterr().err
    assert main([*command, "--bank-bytes", "16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "placed"
    at = found["offsets"]
    assert at["a"] == 8
    assert at["d"] == 0
    # b could lie at 0 by its lifetime; c must be in the other bank.
    assert at["b"] % 4 == 0
    assert at["b"] // 16 != at["c"] // 16
    rows = output.read_text().splitlines()
    assert rows[0] == "id,note,lower,upper,size,alignment,offset,gaps,regions,apart"
    assert rows[1] == "a,x,0,10,4,,8,,,"
    assert rows[2] == f'b,"y,z",0,10,3,4,{at["b"]},2-4,,c'


def test_no_placement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = write(tmp_path, SIX), tmp_path / "out.csv"
    assert main(["place", str(path), "--capacity", "11", "-o", str(output)]) == 1
    assert "no placement exists: buffers alive at once need 12 bytes" in capsys.readouterr().out
    assert not output.exists()
    assert main(["place", str(path), "--capacity", "11", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["bound"], found["offsets"]) == ("infeasible", 12, None)


def test_the_budget_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Never alive at once, but each needs a bank of its own; only the search sees that.
    text = "id,lower,upper,size,apart\na,0,1,2,b c\nb,1,2,2,c\nc,2,3,2,\n"
    path = write(tmp_path, text)
    banks = ["--bank-bytes", "4"]
    command = ["place", str(path), "--capacity", "8", *banks]
    assert main(command) == 1
    assert "no placement exists: the search has ruled out" in capsys.readouterr().out
    assert main([*command, "--steps", "1"]) == 1
    assert "no placement was found: the budget ended" in capsys.readouterr().out
    assert main(["place", str(path), "--capacity", "100", *banks, "--minimise", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["optimal"]
    assert found["peak"] == 10


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: the file is empty"),
        ("id,lower,size\n", "line 1: columns missing: upper"),
        ("id,lower,upper,size,size\n", "line 1: two columns have the same name"),
        ("id,lower,upper,size\na,0,1,2\na,0,1,2\n", "line 3: id `a` is already in line 2"),
        ("id,lower,upper,size\na,0,1\n", "line 2: 3 cells, but there are 4 columns"),
        ("id,lower,upper,size\n\na,-1,1,2\n", "line 3: lower must not be negative, but is -1"),
        ("id,lower,upper,size\na,0,1,-2\n", "line 2: `a`: size must be 1.."),
        ("id,lower,upper,size\na,5,5,2\n", "line 2: `a`: upper 5 must be above lower 5"),
        ("id,lower,upper,size\na,0,1,x\n", "line 2: size must be a whole number, not 'x'"),
        ("id,lower,upper,size\na,0,1,1.5\n", "line 2: size must be a whole number"),
        ("id,lower,upper,size\na,0,1,101\n", "line 2: `a`: size 101 is above the capacity"),
        ("id,lower,upper,size\na,0,1," + "9" * 40 + "\n", "line 2: size must be a whole number"),
        ("id,lower,upper,size\n,0,1,1\n", "line 2: the id is empty"),
        ('id,lower,upper,size\n"a,0,1,1\n', "line 2: "),
        ("id,lower,upper,size,gaps\na,0,9,1,3\n", "line 2: gaps must be FIRST-END pairs"),
        ("id,lower,upper,size,gaps\na,0,9,1,3-10\n", "line 2: `a`: gap 3..10 must lie in 0..9"),
        ("id,lower,upper,size,gaps\na,0,9,1,0-9\n", "line 2: `a`: its gaps leave nothing"),
        ("id,lower,upper,size,apart\na,0,9,1,b\n", "line 2: apart must name ids"),
        ("id,lower,upper,size,alignment\na,0,9,1,0\n", "line 2: `a`: alignment must be 1.."),
        ("id,lower,upper,size,alignment,offset\na,0,9,1,4,6\n", "multiple of alignment 4"),
    ],
)
def test_bad_lines(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = write(tmp_path, text), tmp_path / "out.csv"
    assert main(["place", str(path), "--capacity", "100", "-o", str(output)]) == 1
    error = capsys.readouterr().err
    assert "error[E0401]" in error
    assert message in error
    assert not output.exists()


def test_files_that_cannot_be_read_or_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "no.csv"
    assert main(["place", str(missing), "--capacity", "100"]) == 1
    assert "E0701" in capsys.readouterr().err
    path = write(tmp_path, SIX)
    assert main(["place", str(path), "--capacity", "100", "-o", str(path)]) == 2
    assert "would be overwritten" in capsys.readouterr().err
    path.write_bytes(b"\xff\xfe\x00")
    assert main(["place", str(path), "--capacity", "100"]) == 1
    assert "E0701" in capsys.readouterr().err


def test_huge_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "huge.csv"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    assert main(["place", str(path), "--capacity", "100"]) == 1
    assert "at most 268435456 are read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--capacity", "0"], "--capacity must be 1.."),
        (["--capacity", "1T"], "for example 1048576, 512K or 1M"),
        (["--capacity", "9", "--steps", "0"], "--steps must be above 0"),
        (["--capacity", "9", "--time-limit", "nan"], "--time-limit must be above 0"),
        (["--capacity", "9", "--bank-bytes", "-1"], "--bank-bytes must be above 0"),
        ([], "--capacity"),
    ],
)
def test_bad_options(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["place", str(write(tmp_path, SIX)), *words]) == 2
    assert message in capsys.readouterr().err
