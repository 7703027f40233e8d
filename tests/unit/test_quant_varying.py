"""Calibration samples of several sizes, and tables that are saved, edited and used again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tilewright.api import CompileOptions, build
from tilewright.cli.command import main
from tilewright.diagnostics import TilewrightError
from tilewright.ptq.options import QuantOptions
from tilewright.quant.table import CalibrationTable
from tilewright.spec.hardware import load_target

Array = npt.NDArray[Any]
TARGET = load_target("tiny8")


def model(path: Path, height: int | str) -> Path:
    """Write a network of two convolutions and a mean, of open or fixed height."""
    rng = np.random.default_rng(0)
    weights = {
        "w1": rng.normal(size=(8, 3, 3, 3)).astype(np.float32),
        "w2": rng.normal(size=(4, 8, 1, 1)).astype(np.float32),
    }
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w1"], ["a"], name="first", pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["a"], ["b"]),
            helper.make_node("Conv", ["b", "w2"], ["c"], name="second"),
            helper.make_node("GlobalAveragePool", ["c"], ["y"], name="mean"),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, height, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 1, 1])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


def folder(path: Path, heights: list[int]) -> Path:
    path.mkdir()
    rng = np.random.default_rng(1)
    for index, height in enumerate(heights):
        values = rng.normal(size=(1, 3, height, 8)).astype(np.float32)
        values[0, 0, 0, 0] = 10.0 + index
        np.save(path / f"{index}.npy", values)
    return path


def test_samples_of_open_sizes_are_observed_at_their_own(tmp_path: Path) -> None:
    made = build(
        model(tmp_path / "m.onnx", "h"),
        TARGET,
        CompileOptions(folder(tmp_path / "data", [8, 8, 12, 5]), shapes={"x": (1, 3, 8, 8)}),
    )
    assert made.compiled is not None
    table = made.compiled.table
    assert table.samples == 4
    assert table.maxima()["x"] == 13.0


def test_channels_balanced_on_request_refuse_samples_of_other_sizes(tmp_path: Path) -> None:
    options = CompileOptions(
        folder(tmp_path / "data", [8, 8, 12]),
        shapes={"x": (1, 3, 8, 8)},
        quant=QuantOptions(level=0, equalise=True),
    )
    with pytest.raises(TilewrightError) as caught:
        build(model(tmp_path / "m.onnx", "h"), TARGET, options)
    assert "calibration sample 3 does not fit the model" in str(caught.value)
    assert "--no-equalize" in str(caught.value)


def test_samples_of_other_sizes_than_fixed_ones_are_refused(tmp_path: Path) -> None:
    path, data = model(tmp_path / "m.onnx", 8), folder(tmp_path / "data", [8, 12])
    with pytest.raises(TilewrightError) as caught:
        build(path, TARGET, CompileOptions(data))
    assert "1.npy" in str(caught.value)
    assert "[1, 3, 12, 8]" in str(caught.value)


def test_samples_that_differ_where_the_model_is_fixed_are_refused(tmp_path: Path) -> None:
    path, data = model(tmp_path / "m.onnx", "h"), tmp_path / "data"
    data.mkdir()
    np.save(data / "0.npy", np.zeros((1, 3, 8, 9), np.float32))
    with pytest.raises(TilewrightError) as caught:
        build(path, TARGET, CompileOptions(data, shapes={"x": (1, 3, 8, 8)}))
    assert "calibration sample 1 does not fit the model" in str(caught.value)
    assert "x" in str(caught.value)


def test_a_table_is_saved_edited_and_used(tmp_path: Path) -> None:
    path, data = model(tmp_path / "m.onnx", 8), folder(tmp_path / "data", [8] * 4)
    saved = tmp_path / "t.yaml"
    common = ["--target", "tiny8", "--no-simulate", "-q", "-o", str(tmp_path / "m.tpupkg")]
    arguments = ["compile", str(path), "--calibration-data", str(data), *common]
    assert main([*arguments, "--save-calibration", str(saved)]) == 0
    table = CalibrationTable.load(saved)
    assert table.samples == 4
    assert not table.balanced
    name = next(name for name in table.thresholds if name.startswith("first"))
    low, high = table.ranges[name]
    text = saved.read_text().replace(f"high: {high!r}", "high: 3.75")
    assert text.count("high: 3.75") >= 1
    saved.write_text(text)
    assert main(["compile", str(path), "--calibration-table", str(saved), *common]) == 0
    made = build(path, TARGET, replace(CompileOptions(), table=CalibrationTable.load(saved)))
    assert made.compiled is not None
    assert made.compiled.table.ranges[name] == (low, 3.75)
    assert made.compiled.table.activations == "asymmetric"
    assert f"{3.75 / 255:.6g}"[:6] in str(made.compiled.stages["quant"].module)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--calibration-method", "kl"], "--calibration-method would be ignored"),
        (["--random-calibration"], "--random-calibration would be ignored"),
        (["--fp32"], "--calibration-table: in float32"),
    ],
)
def test_a_table_excludes_what_it_replaces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], said: str
) -> None:
    path, saved = model(tmp_path / "m.onnx", 8), tmp_path / "t.yaml"
    CalibrationTable({"x": 1.0}).save(saved)
    assert main(["compile", str(path), "--calibration-table", str(saved), *extra]) == 2
    assert said in capsys.readouterr().err


def test_a_table_of_balanced_channels_is_refused(tmp_path: Path) -> None:
    table = CalibrationTable({"x": 1.0}, balanced=True)
    table.save(tmp_path / "t.yaml")
    loaded = CalibrationTable.load(tmp_path / "t.yaml")
    with pytest.raises(TilewrightError, match="channels were balanced") as caught:
        build(model(tmp_path / "m.onnx", 8), TARGET, CompileOptions(table=loaded))
    assert "--smooth-quant 0" in str(caught.value.hint)
