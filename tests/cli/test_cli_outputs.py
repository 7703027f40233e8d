"""Outputs that would destroy what they are made from, and places no file can be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tilewright.cli import main

Capture = pytest.CaptureFixture[str]


def _compile(model: Path, samples: Path, *more: str) -> list[str]:
    data = ["--calibration-data", str(samples)]
    return ["compile", str(model), "--target", "tiny8", *data, "--quiet", *more]


@pytest.mark.parametrize("option", ["-o", "--report"])
@pytest.mark.parametrize("link", [False, True])
def test_the_model_is_never_overwritten(
    option: str, link: bool, model: Path, samples: Path, tmp_path: Path, capsys: Capture
):
    own = tmp_path / "own.onnx"
    own.write_bytes(model.read_bytes())
    target = tmp_path / "link.onnx" if link else own
    if link:
        target.symlink_to(own)
    extra = [] if option == "-o" else ["-o", str(tmp_path / "p.tpupkg")]
    assert main(_compile(own, samples, option, str(target), *extra)) == 2
    assert "would be overwritten" in capsys.readouterr().err
    assert own.read_bytes() == model.read_bytes()


def test_report_and_package_are_two_files(model: Path, samples: Path, tmp_path: Path):
    both = str(tmp_path / "both")
    assert main(_compile(model, samples, "-o", both, "--report", both)) == 2
    assert list(tmp_path.iterdir()) == []


def test_packages_and_inputs_are_never_overwritten(package: Path, tmp_path: Path, capsys: Capture):
    own = tmp_path / "own.tpupkg"
    own.write_bytes(package.read_bytes())
    assert main(["report", str(own), "-o", str(own), "--quiet"]) == 2
    data = tmp_path / "in.npz"
    np.savez(data, x=np.zeros(3))
    before = data.read_bytes()
    assert main(["run", str(own), "--input", str(data), "-o", str(data), "--quiet"]) == 2
    assert (own.read_bytes(), data.read_bytes()) == (package.read_bytes(), before)
    assert capsys.readouterr().err.count("would be overwritten") == 2


@pytest.mark.parametrize("name", ["x" * 300, "zero\0byte"])
def test_names_no_file_can_have(name: str, model: Path, samples: Path, capsys: Capture):
    assert main(_compile(model, samples, "-o", name)) == 1
    assert "E0701" in capsys.readouterr().err


def test_a_negative_seed_is_refused(package: Path, capsys: Capture):
    assert main(["run", str(package), "--random", "-1", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "E0702"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize(
    ("where", "code", "said"), [(">/dev/full", 1, "E0701"), (">&-", 0, ""), ("| true", 0, "")]
)
def test_standard_output_that_takes_nothing(where: str, code: int, said: str, package: Path):
    script = "import sys; from tilewright.cli import main; sys.exit(main())"
    line = f'"{sys.executable}" -c "{script}" disasm "{package}" {where}'
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert said in done.stderr
    assert bool(said) == bool(done.stderr), done.stderr
