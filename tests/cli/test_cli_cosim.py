"""`cosim` on small models: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cosim.support import needs_verilator
from tilewright.cli import main
from tilewright.cosim import compare, driver


@needs_verilator
def test_model_from_source(
    model: Path, samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = tmp_path / "x.npy"
    np.save(inputs, np.load(samples)["x"][0])
    command = [
        "cosim", str(model), "--target", "tiny8", "--calibration-data", str(samples), "--quiet",
    ]  # fmt: skip
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "small.onnx on tiny8: equal" in text
    assert "outputs equal bit for bit" in text
    assert "(measured)" in text
    assert "(simulated)" in text
    assert main([*command, "--input", str(inputs), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["equal"]
    assert content["outputs"] == {"y": True}
    (program,) = content["programs"]
    assert program["rtl_cycles"] == program["simulated_cycles"] > 100
    assert program["rtl_counters"]["mac"]["busy"] > 0
    assert program["differences"] == []


@needs_verilator
@pytest.mark.parametrize("suffix", ["vcd", "fst"])
def test_package_with_a_trace(
    package: Path, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / f"t.{suffix}"
    assert main(["cosim", str(package), "--trace", str(trace), "--segment", "tpu_0", "-q"]) == 0
    assert f"trace: {trace}" in capsys.readouterr().out
    content = trace.read_bytes()
    assert len(content) > 1000
    assert [path.name for path in tmp_path.iterdir()] == [trace.name]
    if suffix == "vcd":
        assert b"$scope module tw_top" in content


@needs_verilator
def test_differences_are_told(
    package: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = compare.functional_memory

    def wrong(*arguments: Any) -> Any:
        sram = real(*arguments)
        sram[1] ^= 1
        return sram

    monkeypatch.setattr(compare, "functional_memory", wrong)
    assert main(["cosim", str(package), "--quiet"]) == 1
    text = capsys.readouterr().out
    assert "NOT equal" in text
    assert "sram: 1 bytes differ; 0x1 must be" in text
    assert "instruction 0 (dma_load)" in text


@needs_verilator
def test_limit_of_cycles(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cosim", str(package), "--quiet", "--max-cycles", "10"]) == 1
    assert "error[E0804]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--trace", "x.json"], "must end in .vcd or .fst"),
        (["--trace-from", "5"], "need --trace FILE"),
        (["--max-cycles", "0"], "--max-cycles must be 1 or more, not 0"),
        (["--seed", "-1"], "--seed must be 0 or more, not -1"),
        (["--segment", "tpu_7"], "there is no program `tpu_7`"),
    ],
)
def test_wrong_options(
    package: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cosim", str(package), "--quiet", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_without_verilator(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["cosim", str(package), "--quiet"]) == 1
    said = capsys.readouterr().err
    assert "error[E0801]" in said
    assert "apt-get install verilator g++" in said


def test_model_that_runs_on_the_host(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(path: Path) -> None:
        raise AssertionError(path)

    monkeypatch.setattr(driver, "_load", never)
    assert main(["cosim", str(model), "--fp32", "--quiet"]) == 0
    assert "nothing to co-simulate" in capsys.readouterr().out


@pytest.fixture(scope="module")
def two_programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two convolutions with a softmax between them, which runs on the host."""
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(0)

    def weight(name: str) -> Any:
        return numpy_helper.from_array(random.normal(0, 0.2, (4, 4, 3, 3)).astype("f"), name)

    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["a"], "first"),
            helper.make_node("Softmax", ["a"], ["s"], "soft", axis=1),
            helper.make_node("Conv", ["s", "v"], ["y"], "second"),
        ],
        "two",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4, 9, 9])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 5, 5])],
        [weight("w"), weight("v")],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    made.ir_version = 8
    folder = tmp_path_factory.mktemp("two")
    source, made_package = folder / "two.onnx", folder / "two.tpupkg"
    source.write_bytes(made.SerializeToString())
    command = ["compile", str(source), "--target", "tiny8", "--random-calibration"]
    assert main([*command, "--no-simulate", "--quiet", "-o", str(made_package)]) == 0
    return made_package


@needs_verilator
def test_several_programs(
    two_programs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["cosim", str(two_programs), "--quiet", "--json"]
    assert main(command) == 0
    content = json.loads(capsys.readouterr().out)
    names = [program["name"] for program in content["programs"]]
    assert len(names) == 2
    trace = ["--trace", str(tmp_path / "t.vcd")]
    assert main([*command, *trace]) == 2
    assert "--trace takes one program; this model has 2" in capsys.readouterr().err
    assert main([*command, *trace, "--segment", names[1]]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [program["name"] for program in content["programs"]] == names[1:]
    assert content["outputs"] == {"y": True}
