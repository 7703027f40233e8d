"""The documents' tools as a user meets them: five commands, looking inside, mistakes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tilewright.codegen.image import read_image
from tilewright.spec.hardware import load_target
from tilewright.tools import opt, runner, translate

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run a tool in a scratch folder; returns exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    mains = {"opt": opt.main, "translate": translate.main, "runner": runner.main}

    def call(tool: str, *arguments: str) -> tuple[int, str, str]:
        code = mains[tool](list(arguments))
        out, err = capsys.readouterr()
        return code, out, err

    return call


def make_net(folder: Path, batch: int | str = 1) -> None:
    """Write net.onnx (convolution, ReLU, pooling, linear) and cal/ with eight inputs."""
    generator = np.random.default_rng(3)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array(
            (generator.standard_normal(shape) * 0.3).astype(np.float32), name
        )

    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["a"], "conv1", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"], "relu1"),
        helper.make_node("GlobalAveragePool", ["b"], ["c"], "gap"),
        helper.make_node("Flatten", ["c"], ["d"], "flat"),
        helper.make_node("MatMul", ["d", "w2"], ["y"], "fc"),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 3, 12, 12])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, 5])],
        [weight("w1", 8, 3, 3, 3), weight("b1", 8), weight("w2", 8, 5)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, str(folder / "net.onnx"))
    (folder / "cal").mkdir(exist_ok=True)
    for index in range(8):
        sample = generator.standard_normal((1, 3, 12, 12)).astype(np.float32)
        np.save(folder / "cal" / f"{index}.npy", sample)


TARGETS = ("edge16", "tiny8", "tpu_v2", "my_chip.yaml")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("joined", [True, False], ids=["equals", "space"])
def test_the_five_commands(run: Run, tmp_path: Path, target: str, joined: bool) -> None:
    make_net(tmp_path)
    own = load_target("edge16").model_copy(update={"name": "my_chip", "sram_size": 128 * 1024})
    (tmp_path / "my_chip.yaml").write_text(own.to_yaml())

    def flag(name: str, value: str) -> list[str]:
        return [f"{name}={value}"] if joined else [name, value]

    steps = (
        ("translate", "--import-onnx", "net.onnx", "-o", "net.mlir"),
        ("opt", "--convert-onnx-to-top", "net.mlir", "-o", "net_top.mlir", "--check-each-pass"),
        (
            "opt",
            "--quantize",
            *flag("--calibration-data", "cal"),
            *flag("--calibration-method", "kl"),
            *flag("--calibration-samples", "200"),
            *flag("--hardware-config", target),
            "net_top.mlir",
            "-o",
            "net_quant.mlir",
            "--check-each-pass",
        ),
        (
            "opt",
            "--convert-top-to-tpu",
            "net_quant.mlir",
            "-o",
            "net_tpu.mlir",
            "--check-each-pass",
        ),
        ("translate", "--export-tpu", "net_tpu.mlir", "-o", "net.bin"),
    )
    for step in steps:
        code, out, err = run(*step)
        assert (code, out) == (0, ""), err
    code, out, _ = run("opt", "--print-op-stats", "net_tpu.mlir")
    assert code == 0
    assert "tpu.mac_conv" in out
    moved = {line.split(":")[0]: int(line.split()[-2]) for line in out.splitlines() if ": " in line}
    # At least every weight and the input are read, and the output is written.
    assert moved["dma_load"] >= 8 * 3 * 9 + 8 * 5 + 3 * 12 * 12
    assert moved["dma_store"] >= 5
    image = read_image((tmp_path / "net.bin").read_bytes(), load_target(target))
    assert image.code
    assert image.constants

    outputs: dict[str, np.ndarray] = {}
    for level in ("top", "quant", "tpu"):
        code, out, err = run("runner", f"net_{level}.mlir", "--outputs", f"{level}.npz")
        assert code == 0, err
        assert out.startswith("y  float32  1x5  min ")
        outputs[level] = np.load(tmp_path / f"{level}.npz")["y"]
    assert np.array_equal(outputs["quant"], outputs["tpu"])
    error = np.abs(outputs["quant"] - outputs["top"]).max()
    assert 0 < error < 0.1 * np.abs(outputs["top"]).max()


@pytest.mark.parametrize("tool", ["opt", "translate", "runner"])
def test_version(run: Run, tool: str) -> None:
    code, out, err = run(tool, "--version")
    assert (code, err) == (0, "")
    assert out.startswith(f"tpu-mlir-{tool} (tilewright 0.")


def test_same_input_same_bytes(run: Run, tmp_path: Path) -> None:
    make_net(tmp_path)
    for name in ("a", "b"):
        run("translate", "--import-onnx", "net.onnx", "-o", f"{name}.mlir")
        code, _, err = run(
            "opt", f"{name}.mlir", "--convert-onnx-to-top", "--quantize", "--calibration-data=cal",
            "--convert-top-to-tpu", "--hardware-config=edge16", "-o", f"{name}_tpu.mlir",
        )  # fmt: skip
        assert code == 0, err
        assert run("translate", "--export-tpu", f"{name}_tpu.mlir", "-o", f"{name}.bin")[0] == 0
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()


def test_order_of_flags_is_the_order_of_passes(run: Run, tmp_path: Path) -> None:
    make_net(tmp_path)
    run("translate", "--import-onnx", "net.onnx", "-o", "net.mlir")
    run("opt", "--convert-onnx-to-top", "net.mlir", "-o", "top.mlir")
    code, _, err = run(
        "opt", "--timing", "top.mlir", "--canonicalize", "-o", "out.mlir",
        "--pass-pipeline", "builtin.module(func.func(top-fold-constants))", "--top-normalize",
    )  # fmt: skip
    assert code == 0
    names = [line.split()[-1] for line in err.splitlines()]
    assert names == ["canonicalize", "top-fold-constants", "top-normalize"]


def test_standard_input_keeps_what_the_module_records(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_net(tmp_path)
    run("translate", "--import-onnx", "net.onnx", "-o", "net.mlir")
    run("opt", "--convert-onnx-to-top", "net.mlir", "-o", "top.mlir")
    arguments = ("--quantize", "--calibration-data=cal", "--hardware-config=tpu_v2")
    assert run("opt", "top.mlir", *arguments, "-o", "q.mlir")[0] == 0

    def pipe(name: str, *more: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO((tmp_path / name).read_text()))
        return run(*more)

    code, told, err = pipe("top.mlir", "runner", "--json")
    assert code == 0, err
    assert told == run("runner", "top.mlir", "--json")[1]
    # Quantised for a truncating chip: lowering it for another would give other numbers in silence.
    code, _, err = pipe("q.mlir", "opt", "--convert-top-to-tpu", "--hardware-config=edge16")
    assert code == 1
    assert "was made for target `tpu_v2`, not for `edge16`" in err
    code, out, err = run("opt", "top.mlir", *arguments)
    assert code == 0
    assert 'tilewright.target = "tpu_v2"' in out
    assert "tilewright.weights" not in out
    # Text that goes on naming a weights file must not mean other weights than it was printed with.
    assert "tilewright.weights" in run("opt", "top.mlir", "--canonicalize")[1]
    code, out, err = run("opt", "net.mlir", "--convert-onnx-to-top")
    assert code == 0
    assert ("tilewright.weights" in out) != ("weights have changed" in err)


def test_dumps(run: Run, tmp_path: Path) -> None:
    make_net(tmp_path)
    run("translate", "--import-onnx", "net.onnx", "-o", "net.mlir")
    code, out, err = run(
        "opt", "--print-ir-before=top-fuse-activation", "--print-ir-after", "top-fuse-activation",
        "--convert-onnx-to-top", "--dump-stages", "stages", "net.mlir",
    )  # fmt: skip
    assert code == 0
    before, after = err.split("IR Dump After top-fuse-activation")
    assert "IR Dump Before top-fuse-activation" in before
    assert "top.relu" in before
    assert "top.relu" not in after
    assert "top.relu" not in out
    stages = sorted((tmp_path / "stages").glob("*.mlir"))
    assert stages[0].name == "00-input.mlir"
    assert len(stages) > 8
    # Every stage runs by itself.
    for stage in stages[2:]:
        code, told, err = run("runner", str(stage), "--json")
        assert code == 0, err
        assert json.loads(told)[0]["shape"] == [1, 5]
    _, _, everything = run("opt", "--canonicalize", "--print-ir-after-all", str(stages[-1]))
    assert "IR Dump After canonicalize" in everything
    _, _, bare = run("opt", "--canonicalize", "--print-ir-before", str(stages[-1]))
    assert "IR Dump Before canonicalize" in bare


def test_op_stats(run: Run, tmp_path: Path) -> None:
    make_net(tmp_path)
    run("translate", "--import-onnx", "net.onnx", "-o", "net.mlir")
    code, out, _ = run("opt", "--print-op-stats", "net.mlir")
    assert code == 0
    rows = dict(line.split() for line in out.splitlines()[1:])
    assert rows["onnx.Conv"] == "1"
    assert int(rows["total"]) == sum(int(n) for name, n in rows.items() if name != "total")


def test_dynamic_batch_needs_a_shape(run: Run, tmp_path: Path) -> None:
    make_net(tmp_path, "N")
    code, _, err = run("translate", "--import-onnx", "net.onnx", "-o", "net.mlir")
    assert code == 1
    assert "error[E0103]" in err
    assert not (tmp_path / "net.mlir").exists()
    for shape in ("x=2x3x12x12", "N=2"):
        code, _, err = run(
            "translate", "--import-onnx", "net.onnx", "--shape", shape, "-o", "net.mlir"
        )
        assert code == 0, err
        assert "tensor<2x5xf32>" in (tmp_path / "net.mlir").read_text()


def test_inputs_must_fit(run: Run, tmp_path: Path) -> None:
    make_net(tmp_path)
    run("translate", "--import-onnx", "net.onnx", "-o", "net.mlir")
    run("opt", "--convert-onnx-to-top", "net.mlir", "-o", "top.mlir")
    x = np.load(tmp_path / "cal" / "0.npy")
    np.savez(tmp_path / "good.npz", x=x)
    np.savez(tmp_path / "double.npz", x=x.astype(np.float64))
    np.savez(tmp_path / "more.npz", x=x, z=x)
    np.savez(tmp_path / "object.npz", x=np.array([{}], object))
    (tmp_path / "junk.npz").write_bytes(b"PK\x03\x04junk")
    assert run("runner", "top.mlir", "--inputs", "good.npz")[0] == 0
    for name, says in (
        ("double", "float64"),
        ("more", "no input 'z'"),
        ("object", "not an .npz"),
        ("junk", "not an .npz"),
        ("none", "cannot read"),
    ):
        code, out, err = run("runner", "top.mlir", "--inputs", f"{name}.npz")
        assert (code, out) == (1, "")
        assert says in err


BURST = """builtin.module attributes {tilewright.target = "tpu_v2"} {
  tpu.program @tpu_0 {
    tpu.dma_load #tpu.f<n0 = 300> {layer = "conv1"}
    tpu.halt
  }
}
"""


def test_the_documents_burst_message(run: Run, tmp_path: Path) -> None:
    (tmp_path / "m.mlir").write_text(BURST)
    code, _, err = run("runner", "--hardware-config=tpu_v2.yaml", "m.mlir")
    assert code == 1
    assert "length 300 not divisible by burst_size 256" in err
    assert 'layer "conv1"' in err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("opt", "--fold-bm", "m.mlir"), 2, "there is no option `--fold-bm`"),
        (("opt", "--canonicalise", "m.mlir"), 2, "did you mean `--canonicalize`"),
        (("opt", "--pass-pipeline=builtin.module(nosuch)", "m.mlir"), 2, "no pass `nosuch`"),
        (("opt", "--pass-pipeline"), 2, "needs a pipeline"),
        (("opt", "--canonicalize=speed=3", "m.mlir"), 2, "cannot be made"),
        (("opt", "--calibration-samples=many", "m.mlir"), 2, "--calibration-samples"),
        (("opt", "--print-ir-after=nosuch", "m.mlir"), 2, "no pass `nosuch`"),
        (("opt", "a.mlir", "b.mlir"), 2, "`b.mlir` is another"),
        (("opt", "nosuch.mlir"), 1, "E0701"),
        (("opt", "--hardware-config=nosuch", "m.mlir"), 1, "nosuch"),
        (("opt", "--quantize", "m.mlir"), 1, "calibration data"),
        (("opt", "--convert-top-to-tpu", "m.mlir"), 1, "run `--quantize` first"),
        (("opt", "m.mlir", "-o", "no/such/folder/m.mlir"), 1, "cannot write"),
        (("opt", "m.mlir", "-o", "."), 1, "cannot write"),
        (("translate", "m.mlir"), 2, "say what to do"),
        (("translate", "--import-onnx", "--export-tpu", "m.mlir"), 2, "say what to do"),
        (("translate", "--import-onnx", "m.mlir", "--shape", "x"), 2, "cannot be read"),
        (("translate", "--import-onnx", "m.mlir", "--shape", "x=1x0"), 2, "1 or more"),
        (("translate", "--import-onnx", "m.mlir"), 1, "E0101"),
        (("translate", "--export-tpu", "m.mlir", "-o", "m.bin"), 1, "which chip"),
        (("runner", "m.mlir", "--outputs", "out.txt"), 2, "end in .npz"),
    ],
)
def test_mistakes(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], code: int, says: str
) -> None:
    text = (
        'func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {\n  %y = top.relu %x {name = "r"} : '
    )
    (tmp_path / "m.mlir").write_text(
        text + "(tensor<2xf32>) -> tensor<2xf32>\n  func.return %y : tensor<2xf32>\n}\n"
    )
    got, out, err = run(*arguments)
    assert (got, out) == (code, ""), err
    assert "error[E" in err
    assert says in err
    assert "Traceback" not in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.mlir"], "nothing half-written"


def test_missing_calibration_folder_and_corrupt_sample(run: Run, tmp_path: Path) -> None:
    make_net(tmp_path)
    run("translate", "--import-onnx", "net.onnx", "-o", "net.mlir")
    run("opt", "--convert-onnx-to-top", "net.mlir", "-o", "top.mlir")
    arguments = ("opt", "--quantize", "top.mlir", "-o", "q.mlir", "--calibration-data")
    code, _, err = run(*arguments, "nosuch")
    assert code == 1
    assert "E0301" in err
    (tmp_path / "cal" / "3.npy").write_bytes(b"junk")
    code, _, err = run(*arguments, "cal")
    assert code == 1
    assert "3.npy" in err
    assert not (tmp_path / "q.mlir").exists()


def test_internal_faults_exit_70(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("oops")

    monkeypatch.setattr("tilewright.ir.io.parse_text", broken)
    (tmp_path / "m.mlir").write_text("builtin.module {}")
    code, _, err = run("opt", "m.mlir")
    assert code == 70
    assert "internal error: RuntimeError: oops" in err
    assert "Traceback" not in err
    assert "Traceback" in run("opt", "--debug", "m.mlir")[2]


@pytest.mark.parametrize("tool", ["opt", "translate", "runner"])
def test_as_processes(tool: str, tmp_path: Path) -> None:
    """One real process each: entry point, exit code, a reader that goes away."""
    module = f"tilewright.tools.{tool}"
    told = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True
    )
    assert told.stdout.startswith(f"usage: tpu-mlir-{tool}")
    failed = subprocess.run(
        [sys.executable, "-m", module, "--nosuch"], capture_output=True, text=True, check=False
    )
    assert (failed.returncode, failed.stdout) == (2, "")


def test_closed_pipe_is_no_error_message(tmp_path: Path) -> None:
    (tmp_path / "m.mlir").write_text("builtin.module {}")
    line = f"{sys.executable} -m tilewright.tools.opt --list-passes | head -1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""
