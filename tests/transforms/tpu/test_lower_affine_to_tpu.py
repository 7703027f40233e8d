"""The lowering to instructions: fires, refuses with a reason, and does nothing twice."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from xdsl.dialects import memref
from xdsl.dialects.builtin import IntegerAttr, ModuleOp, StringAttr, i32

from tilewright.codegen.assemble import assemble
from tilewright.codegen.program import HostStep
from tilewright.compiler import Compiled, compile_model
from tilewright.diagnostics import TilewrightError
from tilewright.dialects.tpu import ProgramOp
from tilewright.ir.context import CompileContext
from tilewright.ir.io import new_context
from tilewright.passes import make_pass
from tilewright.ptq.options import QuantOptions
from tilewright.runtime.runtime import Executor
from tilewright.spec.hardware import Hardware, load_target

TINY = load_target("tiny8")


PLAIN = QuantOptions(level=0)


def small_network() -> onnx.ModelProto:
    """Return conv -> relu -> residual add -> hard_swish on a 3 x 9 x 7 image."""
    rng = np.random.default_rng(0)
    weight = (rng.standard_normal((3, 3, 3, 3)) / 5).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv1", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], name="relu1"),
        helper.make_node("Add", ["r", "x"], ["s"], name="sum1"),
        helper.make_node("HardSwish", ["s"], ["y"], name="act1"),
    ]
    shape = [1, 3, 9, 7]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def compiled(
    target: Hardware = TINY, model: onnx.ModelProto | None = None, fuse: bool = True
) -> Compiled:
    rng = np.random.default_rng(1)
    samples = [{"x": rng.standard_normal((1, 3, 9, 7)).astype(np.float32)} for _ in range(2)]
    return compile_model(model or small_network(), target, samples=samples, quant=PLAIN, fuse=fuse)


def lower(target: Hardware | None = TINY) -> tuple[CompileContext, ModuleOp]:
    """Return a context and the affine-level module of the small network, not yet lowered."""
    stage = compiled().stages["affine"]
    return new_context(stage.weights.copy(), target), stage.module.clone()


def test_programs_take_the_place_of_functions() -> None:
    context, module = lower()
    make_pass("lower-affine-to-tpu").apply(context, module)
    module.verify()
    programs = [op for op in module.ops if isinstance(op, ProgramOp)]
    assert [program.sym_name.data for program in programs] == ["tpu_1"]
    names = [instr.name for instr in programs[0].instructions()]
    assert {"dma_load", "mac_conv", "vec_drain", "vec_eltwise", "dma_store", "halt"} <= set(names)
    assert names.count("mac_conv") == names.count("vec_drain")
    layers = {instr.layer for instr in programs[0].instructions()}
    assert {"conv1", "sum1"} <= layers
    written = programs[0].attributes["written"]
    assert "act1" in str(written)


def test_a_second_run_changes_nothing() -> None:
    context, module = lower()
    make_pass("lower-affine-to-tpu").apply(context, module)
    before = str(module)
    make_pass("lower-affine-to-tpu").apply(context, module)
    assert str(module) == before


def test_a_target_is_needed() -> None:
    context, module = lower(target=None)
    with pytest.raises(TilewrightError, match="needs a target") as caught:
        make_pass("lower-affine-to-tpu").apply(context, module)
    assert caught.value.code == "E0201"


def test_tiles_that_do_not_fit_name_the_layer_and_the_sram_that_would_do() -> None:
    context, module = lower(TINY.model_copy(update={"sram_size": 4096}))
    for op in module.walk():
        if isinstance(op, memref.AllocOp) and "slots" in op.attributes:
            op.attributes["slots"] = IntegerAttr(40, i32)
    with pytest.raises(TilewrightError) as caught:
        make_pass("lower-affine-to-tpu").apply(context, module)
    assert caught.value.code == "E0401"
    assert "out of memory during allocation" in caught.value.message.lower()
    assert '"conv1"' in caught.value.message
    assert any("smallest SRAM that would do" in line for line in caught.value.details)


def test_compute_without_an_instruction_is_refused_by_name() -> None:
    context, module = lower()
    for op in module.walk():
        kind = op.attributes.get("kind")
        if isinstance(kind, StringAttr) and kind.data == "eltwise":
            op.attributes["kind"] = StringAttr("sort")
    with pytest.raises(TilewrightError, match='"sum1": no instruction for kind `sort`') as caught:
        make_pass("lower-affine-to-tpu").apply(context, module)
    assert caught.value.code == "E0402"


def test_a_model_larger_than_ddr_is_refused() -> None:
    context, module = lower(TINY.model_copy(update={"ddr_address_bits": 12}))
    with pytest.raises(TilewrightError, match="does not fit DDR") as caught:
        make_pass("lower-affine-to-tpu").apply(context, module)
    assert caught.value.code == "E0401"


def test_results_that_are_inputs_constants_or_twice_the_same() -> None:
    model = small_network()
    value = numpy_helper.from_array(np.arange(3, dtype=np.float32), "k")
    model.graph.initializer.append(value)
    for name, shape in (("x2", [1, 3, 9, 7]), ("k2", [3]), ("y2", [1, 3, 9, 7])):
        source = {"x2": "x", "k2": "k", "y2": "y"}[name]
        model.graph.node.append(helper.make_node("Identity", [source], [name], name=f"copy_{name}"))
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    result = compiled(model=model)
    x = np.random.default_rng(5).standard_normal((1, 3, 9, 7)).astype(np.float32)
    outputs = Executor(result.program, TINY).run({"x": x})
    assert list(outputs) == ["y", "x2", "k2", "y2"]
    np.testing.assert_array_equal(outputs["x2"], x)
    np.testing.assert_array_equal(outputs["k2"], np.arange(3, dtype=np.float32))
    np.testing.assert_array_equal(outputs["y2"], outputs["y"])


def test_what_the_chip_cannot_do_becomes_a_host_step_with_its_reason() -> None:
    model = small_network()
    del model.graph.output[:]
    model.graph.node.append(helper.make_node("Softmax", ["y"], ["p"], name="soft1", axis=1))
    shape = [1, 3, 9, 7]
    model.graph.output.append(helper.make_tensor_value_info("p", TensorProto.FLOAT, shape))
    result = compiled(model=model)
    (host,) = result.program.host_steps
    assert isinstance(host, HostStep)
    assert "soft1" in host.layers
    assert "softmax" in host.reason
    x = np.random.default_rng(6).standard_normal((1, 3, 9, 7)).astype(np.float32)
    outputs = Executor(result.program, TINY).run({"x": x})
    np.testing.assert_allclose(outputs["p"].sum(axis=1), 1, atol=1e-5)


def test_modules_that_do_not_belong_together_are_refused() -> None:
    result = compiled()
    with pytest.raises(TilewrightError, match="no program @tpu_1"):
        assemble(result.stages["quant"].module, ModuleOp([]), result.stages["tpu"].weights, TINY)
