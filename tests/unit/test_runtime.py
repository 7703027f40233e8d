"""Running packages: conversions at the border, host steps, and what may go wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.unit.package_samples import copy_content, copy_program
from tilewright.codegen.program import HostStep, LoadStep, StoreStep, TensorInfo, TpuStep
from tilewright.diagnostics import TilewrightError
from tilewright.runtime.convert import from_stored, to_stored
from tilewright.runtime.runtime import Executor, Package, load
from tilewright.spec.hardware import load_target
from tilewright.spec.program import Instr, encode_program


def test_round_trip_through_the_chip(tmp_path: Path):
    Package(copy_content()).save(tmp_path / "c.tpupkg")
    package = load(tmp_path / "c.tpupkg")
    x = np.random.default_rng(0).normal(0, 20, (1, 2, 3, 4)).astype(np.float32)
    expected = np.clip(np.rint(x / np.float32(0.5)), -127, 127) * 0.5 + 1
    for _ in range(2):
        np.testing.assert_array_equal(package.run(x)["y"], expected)
        np.testing.assert_array_equal(package.run({"x": x})["y"], expected)


def test_tensors_are_caught():
    executor = Executor(copy_program(), load_target("tiny8"))
    x = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
    _, tensors = executor.run_tensors({"x": x})
    assert list(tensors) == ["t"]
    np.testing.assert_array_equal(tensors["t"], (2 * x).transpose(0, 2, 3, 1).astype(np.int8))


INFO = TensorInfo("t", (5,), 0, scale=0.1, zero_point=-3, low=-128)


def test_quantise_rounds_half_even_and_saturates():
    info = replace(INFO, scale=2.0, zero_point=1, low=-127)
    x = np.array([1.0, 3.0, -1.0, 1e30, -1e30], np.float32)
    codes = to_stored(x, StoreStep("x", "t"), info)
    assert codes.tolist() == [1, 3, 1, 127, -127]
    back = from_stored(codes, LoadStep("t", "x", (5,)), info)
    assert back.dtype == np.float32
    assert back.tolist() == [0.0, 4.0, 0.0, 252.0, -256.0]


def test_division_is_in_float32():
    x = np.array([0.35, 0.05, 0.15, 0.25, -0.45], np.float32)
    expected = np.rint(x / np.float32(0.1)).astype(int) - 3
    assert to_stored(x, StoreStep("x", "t"), INFO).tolist() == expected.tolist()


def test_every_code_survives_a_round_trip():
    info = replace(INFO, shape=(256,), scale=0.037)
    codes = np.arange(-128, 128).astype(np.int8)
    value = from_stored(codes, LoadStep("t", "x", (256,)), info)
    np.testing.assert_array_equal(to_stored(value, StoreStep("x", "t"), info), codes)


def test_layouts():
    info = replace(INFO, shape=(1, 2, 2, 3), scale=1.0, zero_point=0)
    x = np.arange(12, dtype=np.float32).reshape(1, 3, 2, 2)
    stored = to_stored(x, StoreStep("x", "t", (0, 2, 3, 1)), info)
    assert stored[0, 1, 0].tolist() == [2, 6, 10]
    load_step = LoadStep("t", "x", (1, 3, 2, 2), (0, 3, 1, 2))
    np.testing.assert_array_equal(from_stored(stored, load_step, info), x)


def test_fp16_overflow_is_not_silent():
    info = TensorInfo("t", (2,), 0, "fp16")
    with pytest.raises(TilewrightError, match="too large for fp16"):
        to_stored(np.array([1, 1e6], np.float32), StoreStep("x", "t"), info)
    with pytest.raises(TilewrightError, match="overflowed"):
        from_stored(np.array([1, np.inf], np.float16), LoadStep("t", "x", (2,)), info)


@pytest.mark.parametrize(
    ("inputs", "code"),
    [
        ({}, "E0103"),
        ({"z": np.zeros((1, 2, 3, 4), np.float32)}, "E0103"),
        ({"x": np.zeros((1, 2, 4, 3), np.float32)}, "E0103"),
        ({"x": np.zeros((1, 2, 3, 4), np.int32)}, "E0103"),
        ({"x": np.full((1, 2, 3, 4), np.nan, np.float32)}, "E0304"),
        ({"x": np.full((1, 2, 3, 4), np.inf, np.float32)}, "E0304"),
    ],
)
def test_wrong_inputs(inputs: dict[str, np.ndarray], code: str):
    with pytest.raises(TilewrightError) as caught:
        Package(copy_content()).run(inputs)
    assert caught.value.code == code


def _with(step: int, **changes: object) -> Executor:
    program = copy_program()
    program.steps[step] = replace(program.steps[step], **changes)
    return Executor(program, load_target("tiny8"))


X = {"x": np.zeros((1, 2, 3, 4), np.float32)}


def test_broken_host_model():
    with pytest.raises(TilewrightError, match="cannot run") as caught:
        _with(3, onnx=b"nonsense").run(X)
    assert caught.value.code == "E0601"


def test_host_model_of_other_inputs():
    from onnx import TensorProto, helper

    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("other", "y")]
    node = helper.make_node("Relu", ["other"], ["y"])
    graph = helper.make_graph([node], "g", info[:1], info[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    with pytest.raises(TilewrightError, match="cannot run") as caught:
        _with(3, onnx=model.SerializeToString()).run(X)
    assert caught.value.code == "E0601"


def test_host_result_of_another_shape():
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [helper.make_node("Flatten", ["copied"], ["y"])],
        "g",
        [helper.make_tensor_value_info("copied", TensorProto.FLOAT, [1, 2, 3, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    with pytest.raises(TilewrightError, match="output `y` came out as"):
        _with(3, onnx=model.SerializeToString()).run(X)


def test_undecodable_code():
    with pytest.raises(TilewrightError, match="cannot be decoded"):
        _with(1, code=b"\xff" * 192).run(X)


def test_program_that_writes_its_constants():
    code = encode_program(
        [
            Instr("dma_fill", {"sram": 0, "n0": 64, "fill": 7, "signal": 1}),
            Instr("dma_store", {"ddr": 0, "ddr_r": 1, "sram": 0, "n0": 64, "stream": 1, "wait": 1}),
            Instr("halt", {}),
        ]
    )
    program = copy_program()
    step = program.steps[1]
    assert isinstance(step, TpuStep)
    program.steps[1] = replace(step, code=code)
    with pytest.raises(TilewrightError, match="overwrote its constants"):
        Executor(program, load_target("tiny8")).run(X)


def test_store_into_a_smaller_tensor():
    program = copy_program()
    host = program.steps[3]
    assert isinstance(host, HostStep)
    program.steps += [StoreStep("y", "x", None)]
    program.tensors["x"] = replace(program.tensors["x"], shape=(1, 3, 4, 1))
    program.steps.pop(0)
    program.steps.pop(0)
    program.steps.pop(0)
    program.inputs[0] = replace(program.inputs[0], name="copied")
    with pytest.raises(TilewrightError, match="has shape"):
        Executor(program, load_target("tiny8")).run({"copied": X["x"]})
