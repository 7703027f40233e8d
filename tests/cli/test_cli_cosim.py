"""`cosim` on small models: what it prints, writes and refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cosim.own import slow_engine, wrong_constant
from tests.cosim.support import needs_verilator
from tilewright.cli import main
from tilewright.cosim import compare, driver
from tilewright.runtime.runtime import load
from tilewright.runtime.simulation import tables_of


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
def test_window_of_a_trace(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its end does not wrap at 2^64, and one that never comes is said to be without values."""
    trace = tmp_path / "t.vcd"
    command = ["cosim", str(package), "--trace", str(trace), "--segment", "tpu_0", "-q"]
    assert main([*command, "--trace-from", "5", "--trace-cycles", str(2**64 - 1)]) == 0
    assert capsys.readouterr().out.endswith(f"trace: {trace}\n")
    times = [line for line in trace.read_text().splitlines() if line.startswith("#")]
    assert len(times) > 10
    assert main([*command, "--trace-from", str(2**64 + 1)]) == 0
    assert "without values: the program ended in cycle" in capsys.readouterr().out
    assert not any(line.startswith("#") for line in trace.read_text().splitlines())


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
    assert "--trace FILE.fst shows the first write that is wrong" in text


@pytest.fixture(scope="module")
def convolutions(model: Path, samples: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model as a package."""
    made = tmp_path_factory.mktemp("convolutions") / "small.tpupkg"
    command = ["compile", str(model), "--target", "tiny8", "--calibration-data", str(samples)]
    assert main([*command, "--no-simulate", "--quiet", "-o", str(made)]) == 0
    return made


@needs_verilator
def test_own_modules_that_compute_something_else(
    convolutions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The trace names the drain of the first layer that wrote a wrong sum, and where it is from."""
    own = tmp_path / "my_rtl"
    own.mkdir()
    trace = tmp_path / "t.fst"
    command = ["cosim", str(convolutions), "-q", "--rtl", str(wrong_constant(own))]
    traced = [*command, "--trace", str(trace)]
    assert main(traced) == 1
    text = capsys.readouterr().out
    assert "NOT equal" in text
    assert "first in the trace: cycle " in text
    assert "vec writes a wrong value" in text
    assert '(vec_drain) of layer "' in text
    assert "tpu.vec_drain" in text
    assert main([*traced, "--json"]) == 1
    (program,) = json.loads(capsys.readouterr().out)["programs"]
    assert not program["equal_values"]
    assert program["equal_times"]
    found = program["first_difference"]
    assert found["kind"] == "value"
    assert found["name"] == "vec_drain"
    assert found["engine"] == "vec"
    assert found["layer"] == "conv"
    assert 0 < found["cycle"] < program["rtl_cycles"]
    assert found["lines"][0].startswith(f"first in the trace: cycle {found['cycle']}: vec writes")
    # Without what is needed for it the comparison stands all the same, and says why.
    assert main([*traced, "--trace-from", "5", "--json"]) == 1
    (program,) = json.loads(capsys.readouterr().out)["programs"]
    assert program["first_difference"]["note"] == "it begins in cycle 5, not 0"
    monkeypatch.setitem(sys.modules, "pywellen", None)
    assert main(traced) == 1
    assert "pip install tilewright[rtl]" in capsys.readouterr().out
    assert main([*command, "--json"]) == 1
    (program,) = json.loads(capsys.readouterr().out)["programs"]
    assert program["first_difference"] is None


@needs_verilator
def test_own_modules_that_take_longer(
    convolutions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["cosim", str(convolutions), "-q", "--rtl", str(slow_engine(tmp_path))]
    assert main([*command, "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["outputs"] == {"y": True}
    (program,) = content["programs"]
    assert program["equal_values"]
    assert not program["equal_times"]
    assert program["rtl_cycles"] > program["simulated_cycles"]
    assert any(line.startswith("mac: instruction") for line in program["differences"])
    assert main(command) == 1
    assert "DIFFER" in capsys.readouterr().out


@needs_verilator
def test_resize_with_a_table_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rows and columns it reads stand in its table: all simulators must look there."""
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(0)
    weight = numpy_helper.from_array(random.normal(0, 0.2, (20, 3, 3, 3)).astype("f"), "w")
    sizes = numpy_helper.from_array(np.array([1, 20, 13, 7], np.int64), "sizes")
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["a"], "conv", pads=[1, 1, 1, 1]),
            helper.make_node(
                "Resize", ["a", "", "", "sizes"], ["y"], "resize", mode="linear",
                coordinate_transformation_mode="align_corners",
            ),
        ],
        "resize",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 9, 11])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 20, 13, 7])],
        [weight, sizes],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    made.ir_version = 8
    source, made_package = tmp_path / "r.onnx", tmp_path / "r.tpupkg"
    source.write_bytes(made.SerializeToString())
    command = ["compile", str(source), "--target", "tiny8", "--random-calibration"]
    assert main([*command, "--no-simulate", "--quiet", "-o", str(made_package)]) == 0
    capsys.readouterr()
    assert main(["cosim", str(made_package), "--quiet", "--json"]) == 0
    (program,) = json.loads(capsys.readouterr().out)["programs"]
    loaded = load(made_package)
    executor = loaded.executor
    (step,) = executor.program.tpu_steps
    code = executor.code(step)
    assert any(instr.name == "vec_resize" for instr in code)
    assert loaded.simulate().cycles == program["rtl_cycles"] == program["simulated_cycles"]
    # Not those of an even resize, which are taken where nothing is known of the table.
    tables = tables_of(executor, step)
    assert tables is not None
    ((rows, columns),) = tables
    assert rows[:, 0].tolist() == [i * 8 // 12 for i in range(13)]
    assert columns[:, 0].tolist() == [i * 10 // 6 for i in range(7)]


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [("nowhere", 1, "cannot read"), ("empty", 2, "there are no modules (*.sv, *.v)")],
)
def test_own_modules_that_are_not_there(
    package: Path, name: str, code: int, says: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "empty").mkdir()
    assert main(["cosim", str(package), "--rtl", str(tmp_path / name)]) == code
    assert says in capsys.readouterr().err


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

    monkeypatch.setattr(driver, "load_library", never)
    assert main(["cosim", str(model), "--fp32", "--quiet"]) == 0
    assert "nothing to co-simulate" in capsys.readouterr().out


@pytest.fixture(scope="module")
def two_programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two convolutions with a softmax between them, which is kept on the host."""
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
    command = ["compile", str(source), "--target", "tiny8", "--random-calibration", "-Oq0"]
    command += ["--float-layers", "soft"]
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
