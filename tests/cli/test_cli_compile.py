"""`compile` and `compare` on a small network, and compiles that must leave nothing behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewright
from tilewright.cli import main
from tilewright.spec.hardware import load_target


def _compile(model: Path, samples: Path, out: Path, *more: str) -> list[str]:
    return [
        "compile", str(model), "--target", "tiny8", "--calibration-data", str(samples),
        "-o", str(out), "--quiet", *more,
    ]  # fmt: skip


def test_compile_run_and_same_bytes(
    model: Path, samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    first, second = tmp_path / "a.tpupkg", tmp_path / "b.tpupkg"
    report = tmp_path / "a.html"
    assert main(_compile(model, samples, first, "--report", str(report))) == 0
    text = capsys.readouterr().out
    assert "(simulated)" in text
    assert "(estimated)" in text
    assert len(text.splitlines()) <= 20
    assert report.is_file()
    assert main(_compile(model, samples, second, "--no-simulate", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == first.stat().st_size
    assert first.read_bytes() == second.read_bytes()

    import onnxruntime

    with np.load(samples) as arrays:
        x = arrays["x"]
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    package = tilewright.load(first)
    for sample in x[:3]:
        expected: Any = session.run(None, {"x": sample[None]})[0]
        found = package.run(sample[None])["y"]
        assert np.abs(found - expected).max() < 0.1 * np.abs(expected).max()


def test_float_package_equals_the_model(
    model: Path, samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    import onnxruntime

    out = tmp_path / "f.tpupkg"
    assert main(["compile", str(model), "--fp32", "-o", str(out), "--quiet"]) == 0
    assert "nothing to simulate" in capsys.readouterr().out
    with np.load(samples) as arrays:
        x = arrays["x"][:1]
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    expected: Any = session.run(None, {"x": x})[0]
    np.testing.assert_allclose(tilewright.load(out).run(x)["y"], expected, rtol=1e-4, atol=1e-5)


def test_python_api_gives_the_same_package(model: Path, samples: Path, tmp_path: Path):
    made = tilewright.compile(model, "tiny8", calibration=samples)
    made.save(tmp_path / "a.tpupkg")
    assert main(_compile(model, samples, tmp_path / "b.tpupkg", "--no-simulate")) == 0
    assert (tmp_path / "a.tpupkg").read_bytes() == (tmp_path / "b.tpupkg").read_bytes()


def test_public_names_are_lazy_and_few():
    assert len(tilewright.__all__) <= 6
    for name in tilewright.__all__:
        assert getattr(tilewright, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tilewright.nothing  # noqa: B018  # pyright: ignore


def test_a_changed_copy_that_kept_its_name_is_noticed(
    model: Path, samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shipped = load_target("tiny8").to_yaml()
    for text, noticed in (
        (shipped, False),
        (shipped.replace("sram_size: 32768", "sram_size: 16384"), True),
        (shipped.replace("sram_size: 32768", "sram_size: 16384").replace("tiny8", "mine"), False),
    ):
        chip = tmp_path / "chip.yaml"
        chip.write_text(text)
        out = tmp_path / "a.tpupkg"
        arguments = ["compile", str(model), "--calibration-data", str(samples), "--no-simulate"]
        assert main([*arguments, "--target", str(chip), "-o", str(out), "--quiet"]) == 0
        assert ("a `name` of its own" in capsys.readouterr().err) is noticed


def test_integer_levels_are_equal(model: Path, samples: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["compare", str(model), "--target", "tiny8", "--calibration-data", str(samples)]
    assert main([*arguments, "--levels", "all", "--quiet", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"]
    assert [item["second"] for item in found["comparisons"]] == ["linalg", "affine", "tpu"]
    assert all(item["layers"] for item in found["comparisons"])
    assert main([*arguments, "--levels", "float,quant", "--quiet"]) == 0
    text = capsys.readouterr().out
    assert "worst first" in text
    assert max(map(len, text.splitlines())) <= 100
    assert main([*arguments, "--levels", "float,tpu", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["equal"] is None
    assert main([*arguments, "--levels", "float,quant", "--quiet", "--json"]) == 0
    layers = json.loads(capsys.readouterr().out)["accuracy"]["layers"]
    values = [layer["isolated_db"] for layer in layers if layer["isolated_db"] != "inf"]
    assert values == sorted(values)
    assert values[0] > 15


def test_explain_names_the_users_layers(
    model: Path, samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "a.tpupkg"
    assert main(_compile(model, samples, out, "--no-simulate")) == 0
    capsys.readouterr()
    assert main(["explain", str(out), "conv"]) == 0
    assert "on the chip" in capsys.readouterr().out
    assert main(["explain", str(out), "relu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["decisions"]
    assert main(["explain", str(out), "tpu_1"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("tpu_1: a program of the chip\n")
    assert "activations take" in told


@pytest.mark.parametrize(
    ("change", "code", "exit_code"),
    [
        (["--shape", "x"], "E0702", 2),
        (["--shape", "x=0x3"], "E0702", 2),
        (["--calibration-samples", "0"], "E0702", 2),
        (["--calibration-method", "guess"], "E0702", 2),
        (["--keep-ir", "rtl"], "E0702", 2),
        (["--preprocess", "imagnet"], "E0702", 2),
        (["--target", "nochip"], "E0201", 1),
        (["--calibration-data", "nowhere"], "E0301", 1),
        (["--report", "no/where.html"], "E0701", 1),
    ],
)
def test_wrong_options_leave_nothing(
    change: list[str],
    code: str,
    exit_code: int,
    model: Path,
    samples: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    assert main([*_compile(model, samples, tmp_path / "a.tpupkg"), *change]) == exit_code
    told = capsys.readouterr().err
    assert f"error[{code}]" in told
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_with_the_model_is_said_before_calibration_is_asked_for(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(model.read_bytes()[:-40])
    assert main(["compile", str(broken), "-o", str(tmp_path / "a.tpupkg"), "-q"]) == 1
    assert "error[E0101]" in capsys.readouterr().err
    assert main(["compile", str(model), "-o", str(tmp_path / "a.tpupkg"), "-q"]) == 1
    told = capsys.readouterr().err
    assert "error[E0301]: int8 needs calibration data" in told
    assert "--calibration-data" in told
    assert "--fp32" in told
    assert not (tmp_path / "a.tpupkg").exists()


def test_cycles_can_be_had_without_data(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "a.tpupkg"
    command = ["compile", str(model), "--target", "tiny8", "-o", str(out), "-q"]
    assert main([*command, "--random-calibration"]) == 0
    told = capsys.readouterr().out
    assert "mean nothing: ranges come from random inputs" in told
    assert "cycles" in told
    first = out.read_bytes()
    assert main([*command, "--random-calibration"]) == 0
    assert out.read_bytes() == first
    assert main([*command, "--random-calibration", "--calibration-data", str(tmp_path)]) == 2


def test_one_corrupt_picture_is_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    from PIL import Image

    folder = tmp_path / "pictures"
    folder.mkdir()
    Image.new("RGB", (20, 20)).save(folder / "a.png")
    (folder / "b.png").write_bytes((folder / "a.png").read_bytes()[:30])
    out = tmp_path / "a.tpupkg"
    assert main(_compile(model, folder, out)) == 1
    told = capsys.readouterr().err
    assert "b.png" in told
    assert "error[E0301]" in told
    assert [item.name for item in tmp_path.iterdir()] == ["pictures"]


@pytest.mark.parametrize("kind", ["cut", "empty", "text"])
def test_broken_models(
    kind: str, model: Path, samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    data = {"cut": model.read_bytes()[:-300], "empty": b"", "text": b"hello"}[kind]
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(data)
    assert main(_compile(bad, samples, tmp_path / "a.tpupkg")) == 1
    assert "error[E010" in capsys.readouterr().err
    assert [item.name for item in tmp_path.iterdir()] == ["bad.onnx"]


def test_interrupted_compile_leaves_nothing(
    model: Path, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupt(*_: Any) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr("tilewright.codegen.package.package_bytes", interrupt)
    assert main(_compile(model, samples, tmp_path / "a.tpupkg")) == 130
    assert list(tmp_path.iterdir()) == []


def test_progress_is_one_line_a_phase(
    model: Path, samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = [*_compile(model, samples, tmp_path / "a.tpupkg"), "--no-simulate"]
    arguments.remove("--quiet")
    assert main(arguments) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 5
    assert all(line.endswith(" s") for line in lines)
    assert len({line.split(":")[0] for line in lines}) == len(lines)


def test_progress_moves_while_samples_are_seen_and_steps_planned(model: Path) -> None:
    from tilewright.compiler import compile_model

    told: list[tuple[str, float]] = []
    generator = np.random.default_rng(0)
    samples = [{"x": generator.normal(size=(1, 3, 12, 12)).astype(np.float32)} for _ in range(4)]
    compile_model(
        model, load_target("tiny8"), samples=samples, progress=lambda *item: told.append(item)
    )
    fractions = [fraction for _, fraction in told]
    assert fractions == sorted(fractions)
    assert [part for phase, part in told if phase == "calibrate"] == pytest.approx(
        [0.25, 0.3125, 0.375, 0.4375, 0.5]
    )
    assert len({part for phase, part in told if phase == "affine"}) >= 3


def test_without_fusion_every_addition_has_its_own_nest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    from tests.e2e.test_fusion import block

    model = tmp_path / "m.onnx"
    model.write_bytes(block("Add").SerializeToString())
    cycles: list[int] = []
    for name, more in (("fused", []), ("apart", ["--no-fusion"])):
        out = str(tmp_path / f"{name}.tpupkg")
        asked = ["compile", str(model), "--target", "edge16", "--random-calibration", "-o", out]
        assert main([*asked, "--json", "--quiet", *more]) == 0
        cycles.append(json.loads(capsys.readouterr().out)["report"]["cycles"])
        assert main(["explain", out, "sum"]) == 0
        assert ("joins the nest of b" in capsys.readouterr().out) == (not more)
    assert cycles[0] < cycles[1]


def test_levels_of_optimisation_give_the_same_results(
    model: Path, samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with np.load(samples) as arrays:
        x = arrays["x"][0][None]
    found: list[Any] = []
    for level in range(4):
        out = tmp_path / f"{level}.tpupkg"
        assert main(_compile(model, samples, out, f"-O{level}", "--no-simulate")) == 0
        package = tilewright.load(out)
        assert package.content.options["level"] == level
        found.append(package.run(x)["y"])
        reasons = " ".join(item["reason"] for item in package.content.decisions)
        assert ("in SRAM until step" in reasons) == (level > 0)
        assert ("are above max-instructions" in reasons) == (level == 0)
    assert all(np.array_equal(item, found[0]) for item in found)
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "3.tpupkg")]) == 0
    assert "level 3, optimise speed" in capsys.readouterr().out


def test_optimising_for_size(
    model: Path, samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "s.tpupkg"
    assert main(_compile(model, samples, out, "--optimise", "size", "--no-simulate")) == 0
    assert tilewright.load(out).content.options["optimise"] == "size"
    for alone in ("-O0", "--no-fusion"):
        bad = tmp_path / "bad.tpupkg"
        assert main(_compile(model, samples, bad, "--optimise", "size", alone)) == 2
        assert "nothing to choose" in capsys.readouterr().err
        assert not bad.exists()
