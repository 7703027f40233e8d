"""`tilewright tune`: two processes, files, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tilewright.cli import main


def test_a_sweep_in_two_processes(
    model: Path,
    samples: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tilewright.tune.run.code_digest", lambda: "code")
    table, page = tmp_path / "t.csv", tmp_path / "t.html"
    command = [
        "tune", str(model), "--target", "tiny8", "--vary", "sram_size=16K,32K,1",
        "--calibration-data", str(samples), "--csv", str(table), "--html", str(page),
    ]  # fmt: skip
    assert main([*command, "--json"]) == 0
    told = capsys.readouterr()
    content = json.loads(told.out)
    assert [point["settings"]["sram_size"] for point in content["points"]] == [16 << 10, 32 << 10]
    assert content["points"][0]["front"]
    assert content["illegal"][0]["settings"] == {"sram_size": 1}
    assert "[2/2]" in told.err
    assert len(table.read_text().splitlines()) == 3
    assert "<svg" in page.read_text()
    assert main([*command, "--jobs", "1", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == content
    assert "2 of 2 results are known" in told.err
    assert main([*command, "--quiet"]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    assert "no legal chip: sram_size=1" in told.out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--jobs", "0"], 2, "--jobs must be 1 or more"),
        (["--vary", "sram=1"], 2, "no numeric field"),
        (["--area", "x=1"], 2, "PART=WEIGHT"),
        (["--target", "nope"], 1, "no target `nope`"),
        (["--vary", "mac_array_size=3"], 1, "no combination is a legal chip"),
        (["--calibration-data", "no-such-folder"], 1, "no-such-folder"),
        (["zoo:nope"], 2, "no model `nope`"),
        (["--csv", "no/such/folder/x.csv"], 1, "E0701"),
    ],
)
def test_what_is_refused(
    model: Path, words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["tune", *([] if words[0].startswith("zoo") else [str(model)]), *words]
    assert main(command) == code
    assert message in capsys.readouterr().err


def test_one_model_once(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(model), str(model)]) == 2
    assert "given twice" in capsys.readouterr().err
