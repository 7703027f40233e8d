"""Accuracy on the command line: limits of a compile, the comparison's page, and advice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewright.cli import main
from tilewright.quant.table import CalibrationTable


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten pictures, with labels of the model's classes."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(4)
    rows = ["file,label"]
    for index in range(10):
        pixels = rng.integers(0, 256, (4, 4, 3)).astype(np.uint8)
        Image.fromarray(pixels).resize((24, 24)).save(folder / f"{index}.png")
        rows.append(f"{index}.png,{index % 5}")
    (folder / "labels.csv").write_text("\n".join(rows))
    return folder


@pytest.fixture(scope="module")
def wrecked(model: Path, samples: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration table with one range that an editor got wrong."""
    folder = tmp_path_factory.mktemp("table")
    path = folder / "table.yaml"
    arguments = ["compile", str(model), "--target", "tiny8", "--calibration-data", str(samples)]
    arguments += ["--no-simulate", "--quiet", "-o", str(folder / "a.tpupkg")]
    assert main([*arguments, "-Oq0", "--save-calibration", str(path)]) == 0
    table = CalibrationTable.load(path)
    table.thresholds["conv"] /= 20
    table.ranges = {name: ends for name, ends in table.ranges.items() if name != "conv"}
    table.save(path)
    return path


def compiling(model: Path, samples: Path, out: Path) -> list[str]:
    return [
        "compile", str(model), "--target", "tiny8", "--calibration-data", str(samples),
        "--no-simulate", "--quiet", "-Oq0", "-o", str(out),
    ]  # fmt: skip


def test_a_limit_that_is_kept_is_recorded(
    model: Path, samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.tpupkg"
    arguments = compiling(model, samples, out)
    assert main([*arguments, "--max-drop", "20%", "--min-sqnr", "20"]) == 0
    assert "accuracy   SQNR" in capsys.readouterr().out
    from tilewright.runtime.runtime import load

    kept = load(out).content.options
    assert kept["accuracy_samples"] == 8
    assert kept["accuracy_sqnr_db"] > 20
    assert main([*arguments, "--min-sqnr", "20", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"]["sqnr_db"] == kept["accuracy_sqnr_db"]


def test_a_drop_that_is_too_large_writes_nothing_and_names_the_layer(
    model: Path, samples: Path, wrecked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.tpupkg"
    arguments = [*compiling(model, samples, out), "--calibration-table", str(wrecked)]
    assert main([*arguments, "--min-sqnr", "20"]) == 1
    text = capsys.readouterr().err
    assert "error[E0303]: quantization accuracy drop too large" in text
    assert 'output "y" has an SQNR of' in text
    assert '"conv": codes reach' in text
    assert "no package was written" in text
    assert not out.exists()
    assert max(map(len, text.splitlines())) <= 110
    # In the documents' order.
    titles = ("1. fp32 run", "2. layer by layer", "3. scale", "4. fusion", "5. preprocessing")
    places = [text.index(title) for title in titles]
    assert places == sorted(places)
    # Without a limit the same compile is allowed.
    assert main(arguments) == 0
    assert out.exists()


def test_the_limit_holds_from_python_too(model: Path, samples: Path) -> None:
    import tilewright
    from tilewright.diagnose import Gate
    from tilewright.diagnostics import TilewrightError
    from tilewright.quant.accuracy import Limits

    made = tilewright.compile(model, "tiny8", calibration=samples, gate=Gate(Limits(0.2, 20)))
    assert made.content.options["accuracy_samples"] == 8
    with pytest.raises(TilewrightError, match="accuracy drop too large") as caught:
        tilewright.compile(model, "tiny8", calibration=samples, gate=Gate(Limits(min_sqnr=200)))
    assert caught.value.code == "E0303"


def test_other_data_and_labels(
    model: Path, samples: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = compiling(model, samples, tmp_path / "a.tpupkg")
    measured = ["--evaluation-data", str(pictures), "--labels", str(pictures / "labels.csv")]
    assert main([*arguments, "--preprocess", "unit", "--max-drop", "100%", *measured]) == 0
    assert "over 10 samples" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--max-drop", "much"], "must be a share of samples"),
        (["--labels", "x.csv"], "serves a limit of accuracy"),
        (["--min-sqnr", "20", "--fp32"], "float32 is not quantised"),
        (["--min-sqnr", "nan"], "must be a number of dB"),
        (["--min-sqnr", "20", "--evaluation-samples", "0"], "must be 1 or more"),
        (["--min-sqnr", "20", "--labels", "none.csv"], "cannot be read"),
        (["--min-sqnr", "20", "--evaluation-data", "none"], "there is no file or folder"),
    ],
)
def test_limits_that_make_no_sense(
    model: Path, samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    extra: list[str], message: str,
) -> None:  # fmt: skip
    out = tmp_path / "a.tpupkg"
    assert main([*compiling(model, samples, out), *extra]) in (1, 2)
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_compare_writes_a_page_and_finds_the_cause(
    model: Path, samples: Path, wrecked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "a.html"
    arguments = ["compare", str(model), "--target", "tiny8", "--calibration-data", str(samples)]
    arguments += ["--levels", "float,quant", "--quiet", "-Oq0", "--calibration-table", str(wrecked)]
    assert main([*arguments, "--html", str(page), "--advice", "--samples", "3"]) == 0
    text = capsys.readouterr().out
    assert "over 3 samples" in text
    assert "3. scale inspection: suspect" in text
    assert "4. fusion: ok" in text
    assert "how they were made is not recorded" in text
    assert max(map(len, text.splitlines())) <= 100
    assert page.read_text("utf-8").startswith("<!doctype html>")
    assert main([*arguments, "--json", "--advice"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["accuracy"]["blamed"][0] == "conv"
    assert [step["step"] for step in found["advice"]] == [1, 2, 3, 4, 5]
    assert found["advice"][0]["verdict"] == "ok"
    assert found["advice"][2]["names"][0] == "conv"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--samples", "0"], "--samples must be 1 or more"),
        (["--levels", "quant,tpu", "--html", "a.html"], "goes with `--levels float,quant`"),
        (["--levels", "all", "--advice"], "goes with `--levels float,quant`"),
        (["--labels", "a.csv"], "serves --advice"),
    ],
)
def test_options_of_compare_that_do_not_go_together(
    model: Path, capsys: pytest.CaptureFixture[str], extra: list[str], message: str
) -> None:
    assert main(["compare", str(model), *extra]) == 2
    assert message in capsys.readouterr().err
