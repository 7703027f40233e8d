"""Commands on a package that exists: inspect, explain, disasm, run, simulate, report, zoo."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewright.cli import main


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json", "--quiet"]) == 0
    return json.loads(capsys.readouterr().out)


def test_inspect(package: Path, capsys: pytest.CaptureFixture[str]):
    found = _json(capsys, "inspect", str(package))
    assert found["target"]["name"] == "tiny8"
    assert [step["kind"] for step in found["steps"]] == ["store", "tpu", "load", "host"]
    assert main(["inspect", str(package), "--tensors", "--layers"]) == 0
    text = capsys.readouterr().out
    assert "1x3x4x2" in text
    assert "plus" in text
    assert main(["inspect", str(package), "--ir", "quant"]) == 0
    assert capsys.readouterr().out == "module {}\n"
    found = _json(capsys, "inspect", str(package), "--ir", "quant")
    assert found == {"level": "quant", "ir": "module {}\n"}
    assert main(["inspect", str(package), "--ir", "rtl"]) == 2
    assert "quant" in capsys.readouterr().err


def test_explain(package: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["explain", str(package), "copy"]) == 0
    text = capsys.readouterr().out
    assert "copy: copy on the chip" in text
    assert "fuse did not: nothing to fuse" in text
    assert main(["explain", str(package), "plus"]) == 0
    assert "because a test" in capsys.readouterr().out
    assert len(_json(capsys, "explain", str(package), "--refused")["decisions"]) == 1
    assert main(["explain", str(package), "copi"]) == 2
    assert "near: copy" in capsys.readouterr().err


def test_disasm(package: Path, capsys: pytest.CaptureFixture[str]):
    from tilewright.codegen.assembler import assemble
    from tilewright.runtime.loader import read_package

    assert main(["disasm", str(package)]) == 0
    code = read_package(package).program.tpu_steps[0].code
    assert assemble(capsys.readouterr().out) == code
    listed = _json(capsys, "disasm", str(package), "--layer", "copy")["tpu_0"]
    assert [item["name"] for item in listed] == ["dma_load", "dma_store"]
    assert main(["disasm", str(package), "--layer", "cop"]) == 2
    assert main(["disasm", str(package), "--step", "tpu_9"]) == 2
    assert "tpu_0" in capsys.readouterr().err


def test_run(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    x = np.random.default_rng(0).normal(0, 5, (3, 2, 3, 4)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    out = tmp_path / "y.npz"
    found = _json(capsys, "run", str(package), "-i", str(tmp_path / "x.npz"), "-o", str(out))
    with np.load(out) as written:
        y = written["y"]
    expected = np.clip(np.rint(x / 0.5), -127, 127) * 0.5 + 1
    np.testing.assert_array_equal(y, expected[:, None].astype(np.float32))
    largest = found["samples"][0]["y"]["largest"][0]
    assert largest["index"] == int(expected[0].argmax())
    assert largest["value"] == float(expected[0].max())
    assert main(["run", str(package), "--random", "3", "--quiet"]) == 0
    first = capsys.readouterr().out
    assert main(["run", str(package), "--random", "3", "--quiet"]) == 0
    assert capsys.readouterr().out == first


def test_run_refuses_a_wrong_shape(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    np.save(tmp_path / "x.npy", np.zeros((2, 3, 5), np.float32))
    assert main(["run", str(package), "-i", str(tmp_path / "x.npy")]) == 1
    told = capsys.readouterr().err
    assert "x.npy" in told
    assert "[1, 2, 3, 4]" in told


def test_simulate(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trace = tmp_path / "t.json"
    found = _json(capsys, "simulate", str(package), "--trace", str(trace))
    assert found["cycles"] > 0
    assert found["labels"]["cycles"] == "simulated"
    assert sum(row["cycles"] for row in found["layers"]) <= found["cycles"]
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["args"].get("layer") for event in events if event["ph"] == "X"} == {"copy"}
    assert main(["simulate", str(package), "--layers", "3", "--quiet"]) == 0
    text = capsys.readouterr().out
    assert "(simulated)" in text
    assert len(text.split("\n\n")[0].splitlines()) <= 20
    first = _json(capsys, "simulate", str(package), "--level", "functional")
    assert (
        first["outputs_sha3_256"]
        == (_json(capsys, "simulate", str(package), "--level", "functional")["outputs_sha3_256"])
    )


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for key, value in attrs if key in ("src", "href")]
        if tag not in ("meta", "rect", "circle", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "circle", "polyline") or (self.open and self.open[-1] == tag):
            assert self.open.pop() == tag


def test_report_is_whole_and_self_contained(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    page = tmp_path / "r.html"
    assert main(["report", str(package), "-o", str(page), "--quiet"]) == 0
    text = page.read_text()
    # Circles and rects carry a title: their end tags are written out.
    parser = _Tags()
    parser.feed(text)
    assert parser.links == []
    assert "copy.onnx on tiny8" in text
    assert "a test" in text
    assert "http" not in text


def test_bad_package_is_refused_by_every_command(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    bad = tmp_path / "bad.tpupkg"
    bad.write_bytes(package.read_bytes()[:-40])
    for command in ("inspect", "explain", "disasm", "simulate", "report"):
        assert main([command, str(bad), "--quiet"]) == 1
        assert "error[E0601]" in capsys.readouterr().err
    assert [item.name for item in tmp_path.iterdir()] == ["bad.tpupkg"]


def test_zoo(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    listed = _json(capsys, "zoo")
    assert {"pplcnet", "efficientnet-lite0"} <= {row["name"] for row in listed}
    path = Path(_json(capsys, "zoo", "prepare", "squeezenet-light")["path"])
    assert path.is_file()
    assert main(["zoo"]) == 0
    assert "squeezenet-light" in capsys.readouterr().out
    out = tmp_path / "x.npz"
    made = _json(capsys, "zoo", "inputs", "ppocr-cls", "--count", "3", "-o", str(out))
    assert made["labels"] == [0, 1, 0]
    with np.load(out) as arrays:
        assert arrays["x"].shape == (3, 3, 48, 192)
