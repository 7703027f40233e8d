"""Small models at the edges, each of which once came out wrong or not at all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.level_checks import check_model
from tilewright.compare import compare
from tilewright.spec.hardware import Hardware, load_target

TARGETS = [load_target(name) for name in ("tiny8", "tpu_v2")]
Shapes = dict[str, tuple[int, ...]]


def graph(
    nodes: Sequence[onnx.NodeProto],
    inputs: Shapes,
    outputs: Sequence[str],
    **constants: np.ndarray,
) -> onnx.ModelProto:
    def info(name: str, shape: tuple[int, ...] | None) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    made = helper.make_graph(
        list(nodes),
        "edge",
        [info(name, shape) for name, shape in inputs.items()],
        [info(name, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 20)]
    return helper.make_model(made, opset_imports=opsets, ir_version=9)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


each_target = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


@each_target
@pytest.mark.parametrize("kind", ["Add", "Mul", "Concat"])
def test_whole_tensor_constants_are_read_from_the_constants(kind: str, target: Hardware) -> None:
    join = helper.make_node(kind, ["c", "k"], ["y"], name="join")
    if kind == "Concat":
        join.attribute.append(helper.make_attribute("axis", 1))
    model = graph(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
            join,
        ],
        {"x": (1, 3, 6, 5)},
        ["y"],
        w=normal(4, 3, 1, 1),
        k=normal(1, 4, 6, 5, seed=1),
    )
    compiled = check_model(model, {"x": (1, 3, 6, 5)}, target)
    sample = {"x": normal(1, 3, 6, 5, seed=3) * np.float32(0.5)}
    rows = {row.layer: row for row in compare(compiled, "float", "quant", sample).layers}
    assert (rows["join"].sqnr_db or 0) > 20


@each_target
def test_optional_operands_on_the_host(target: Hardware) -> None:
    # ConvTranspose without a bias beside an operation that stays on the host.
    model = graph(
        [
            helper.make_node("ConvTranspose", ["x", "w"], ["t"], name="up", dilations=[2, 2]),
            helper.make_node("Softplus", ["t"], ["y"], name="soft"),
        ],
        {"x": (1, 5, 2, 3)},
        ["y"],
        w=normal(5, 2, 3, 3),
    )
    check_model(model, {"x": (1, 5, 2, 3)}, target)


@each_target
def test_a_resize_alone_gets_the_layout(target: Hardware) -> None:
    model = graph(
        [helper.make_node("Resize", ["x", "", "s"], ["y"], name="up", mode="nearest")],
        {"x": (1, 3, 4, 5)},
        ["y"],
        s=np.array([1, 1, 2, 2], np.float32),
    )
    compiled = check_model(model, {"x": (1, 3, 4, 5)}, target)
    assert compiled.program.tpu_steps


@pytest.mark.parametrize("word", [4, 16, 128])
@pytest.mark.parametrize("lanes", [8, 64])
def test_the_port_may_be_narrower_or_wider_than_the_array(word: int, lanes: int) -> None:
    edge = load_target("edge16").model_dump()
    size = {"mac_array_size": (lanes, lanes), "vector_lanes": lanes, "sram_word_bytes": word}
    target = Hardware.model_validate({**edge, **size, "name": f"array{lanes}_word{word}"})
    model = graph(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
            helper.make_node("HardSwish", ["c"], ["h"], name="swish"),
            helper.make_node("GlobalAveragePool", ["h"], ["g"], name="mean"),
            helper.make_node("Conv", ["g", "v"], ["s"], name="gate"),
            helper.make_node("Mul", ["h", "s"], ["y"], name="mul"),
        ],
        {"x": (1, 5, 6, 7)},
        ["y"],
        w=normal(70, 5, 1, 1),
        v=normal(70, 70, 1, 1, seed=1),
    )
    check_model(model, {"x": (1, 5, 6, 7)}, target)


def test_a_chip_without_room_for_biases_beside_a_table_is_refused() -> None:
    tiny = load_target("tiny8").model_dump()
    for rows, least in ((False, 10), (True, 18)):
        chip = {**tiny, "vector_rows": rows}
        made = Hardware.model_validate({**chip, "vector_registers": least})
        assert made.vector_registers == least
        with pytest.raises(ValueError, match=f"must be {least} or more.*, not {least - 1}"):
            Hardware.model_validate({**chip, "vector_registers": least - 1})
