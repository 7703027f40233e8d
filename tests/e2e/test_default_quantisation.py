"""Default quantisation of unusual models and tables: what must stay as it is stays."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tilewright.compiler import compile_model, front_end
from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.ptq.options import QuantLevel, QuantOptions
from tilewright.quant.reference import QuantSession
from tilewright.quant.table import CalibrationTable
from tilewright.spec.hardware import load_target

EDGE = load_target("edge16")
RNG = np.random.default_rng(0)


def model(
    nodes: list[onnx.NodeProto], shape: list[int], weights: dict[str, np.ndarray]
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def samples(shape: list[int], count: int = 12) -> list[dict[str, np.ndarray]]:
    return [{"x": RNG.normal(size=shape).astype(np.float32)} for _ in range(count)]


def quantised_pair() -> onnx.ModelProto:
    """Return two convolutions between Q/DQ pairs, with biases."""
    nodes: list[onnx.NodeProto] = []
    weights: dict[str, np.ndarray] = {"zero": np.array(0, np.int8)}

    def scale(name: str, value: float) -> str:
        weights[name] = np.array(value, np.float32)
        return name

    def pair(name: str, source: str, step: float) -> str:
        ends = [scale(f"{name}.s", step), "zero"]
        nodes.append(helper.make_node("QuantizeLinear", [source, *ends], [f"{name}.q"]))
        nodes.append(helper.make_node("DequantizeLinear", [f"{name}.q", *ends], [f"{name}.r"]))
        return f"{name}.r"

    value, step = pair("x", "x", 0.03), 0.03
    for index, out in enumerate((0.05, 0.1)):
        name = f"conv{index}"
        weights[f"{name}.w"] = RNG.integers(-120, 121, (6, 6, 3, 3)).astype(np.int8)
        weights[f"{name}.b"] = RNG.integers(-3000, 3001, 6).astype(np.int32)
        weights["zero32"] = np.array(0, np.int32)
        ends = [scale(f"{name}.ws", 0.002), "zero"]
        nodes.append(helper.make_node("DequantizeLinear", [f"{name}.w", *ends], [f"{name}.wr"]))
        bias = [scale(f"{name}.bs", float(np.float32(step) * np.float32(0.002))), "zero32"]
        nodes.append(helper.make_node("DequantizeLinear", [f"{name}.b", *bias], [f"{name}.br"]))
        nodes.append(
            helper.make_node(
                "Conv", [value, f"{name}.wr", f"{name}.br"], [f"{name}.y"], name=name, pads=[1] * 4
            )
        )
        value, step = pair(name, f"{name}.y", out), out
    nodes.append(helper.make_node("Identity", [value], ["y"]))
    return model(nodes, [1, 6, 8, 8], weights)


def test_a_quantised_model_keeps_its_codes_and_biases_also_with_samples() -> None:
    made = quantised_pair()
    cases: tuple[tuple[list[dict[str, np.ndarray]] | None, QuantLevel], ...] = (
        (None, 2),
        (samples([1, 6, 8, 8]), 0),
        (samples([1, 6, 8, 8]), 2),
    )
    given = [
        compile_model(made, EDGE, samples=data, quant=QuantOptions(level=level))
        for data, level in cases
    ]
    stores = [item.stages["quant"] for item in given]
    sample = samples([1, 6, 8, 8], 1)[0]
    outputs = [QuantSession(item.module, item.weights).run(sample)["y"] for item in stores]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    np.testing.assert_array_equal(outputs[0], outputs[2])


def test_a_lone_softmax_compiles() -> None:
    made = model([helper.make_node("Softmax", ["x"], ["y"], axis=-1)], [5, 31], {})
    compiled = compile_model(made, EDGE, samples=samples([5, 31]))
    assert compiled.stages["quant"].module is not None


def linear() -> onnx.ModelProto:
    weights = {"w": RNG.normal(size=(16, 8)).astype(np.float32)}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="fc"),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "v"], ["y"], name="last"),
    ]
    weights["v"] = RNG.normal(size=(8, 4)).astype(np.float32)
    return model(nodes, [3, 16], weights)


def test_bits_of_a_saved_table_are_those_of_the_next_compile(tmp_path: Path) -> None:
    chip = load_target("tpu_v2")
    first = compile_model(
        linear(), chip, samples=samples([3, 16]), quant=QuantOptions(layer_bits={"fc": 4})
    )
    assert first.table.bits == {"fc": 4}
    first.table.save(tmp_path / "t.yaml")
    table = CalibrationTable.load(tmp_path / "t.yaml")
    again = compile_model(linear(), chip, table=table)
    marked = [d.layer for d in again.decisions if d.stage == "quant-mark-weight-bits" and d.fired]
    assert marked == ["fc"]
    table.bits = {"fcc": 4}
    with pytest.raises(UsageError, match="no layer with weights"):
        compile_model(linear(), chip, table=table)


@pytest.mark.parametrize("text", ["low: -1.0e+308, high: 1.0e+308", "threshold: 1.0e+308"])
def test_ranges_beyond_float32_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    values = text if "threshold" in text else f"threshold: 1.0, {text}"
    path.write_text(f"version: 1\nvalues:\n  x: {{{values}}}\n")
    with pytest.raises(TilewrightError, match="float32") as caught:
        CalibrationTable.load(path)
    assert caught.value.code == "E0301"


def test_a_front_end_is_not_changed_by_compiling() -> None:
    front = front_end(linear(), EDGE)
    before = str(front.stage.module)
    compile_model(front, EDGE, samples=samples([3, 16]))
    assert str(front.stage.module) == before


def test_four_bits_on_a_chip_without_them_are_warned_of() -> None:
    options = QuantOptions(level=0, weight_bits=4)
    compiled = compile_model(linear(), EDGE, samples=samples([3, 16]), quant=options)
    warnings = [d.details["warning"] for d in compiled.decisions if "warning" in d.details]
    assert any("no int4" in text for text in warnings)
    chip = load_target("tpu_v2")
    compiled = compile_model(linear(), chip, samples=samples([3, 16]), quant=options)
    assert not any("no int4" in d.details.get("warning", "") for d in compiled.decisions)
