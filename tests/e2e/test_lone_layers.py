"""Small models that once ended in a traceback or a needless refusal, on their own."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from tests.e2e.test_edges import TARGETS, each_target, graph, normal
from tests.level_checks import check_model
from tilewright.spec.hardware import Hardware


@each_target
@pytest.mark.parametrize("op", ["GlobalAveragePool", "ReduceMean"])
def test_a_mean_alone_runs_on_the_chip(op: str, target: Hardware) -> None:
    # Without an image operation near it; ReduceMean drops the axes, so it keeps the order.
    axes = {"a": np.array([2, 3], np.int64)} if op == "ReduceMean" else {}
    node = helper.make_node(op, ["x", *axes], ["y"], name="mean")
    if axes:
        node.attribute.append(helper.make_attribute("keepdims", 0))
    model = graph(
        [node],
        {"x": (2, 3, 20, 30)},
        ["y"],
        **axes,
    )
    compiled = check_model(model, {"x": (2, 3, 20, 30)}, target)
    assert compiled.program.tpu_steps


@each_target
def test_a_reversed_slice_stays_on_the_host(target: Hardware) -> None:
    ends = {"a": [-1], "b": [-100], "d": [3], "s": [-2]}
    model = graph(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
            helper.make_node("Slice", ["c", *ends], ["y"], name="reverse"),
        ],
        {"x": (1, 3, 6, 5)},
        ["y"],
        w=normal(4, 3, 1, 1),
        **{name: np.array(value, np.int64) for name, value in ends.items()},
    )
    compiled = check_model(model, {"x": (1, 3, 6, 5)}, target)
    reasons = {item.layer: item.reason for item in compiled.decisions if not item.fired}
    assert "reverses" in reasons["reverse"]


@each_target
def test_a_maximum_over_more_than_the_chip_walks_is_the_hosts(target: Hardware) -> None:
    model = graph(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
            helper.make_node("GlobalMaxPool", ["c"], ["y"], name="largest"),
        ],
        {"x": (1, 2, 1, 300)},
        ["y"],
        w=normal(3, 2, 1, 1),
    )
    compiled = check_model(model, {"x": (1, 2, 1, 300)}, target)
    reasons = {item.layer: item.reason for item in compiled.decisions if not item.fired}
    assert "1 x 300" in reasons["largest"]


@each_target
def test_a_scalar_becomes_one_pixel(target: Hardware) -> None:
    model = graph(
        [
            helper.make_node("Relu", ["x"], ["r"], name="relu"),
            helper.make_node("Sigmoid", ["r"], ["y"], name="sigmoid"),
        ],
        {"x": ()},
        ["y"],
    )
    check_model(model, {"x": ()}, target)


def test_a_model_of_no_layers_hands_its_input_on() -> None:
    model = graph([], {"x": (1, 3)}, ["x"])
    compiled = check_model(model, {"x": (1, 3)}, TARGETS[0])
    assert not compiled.program.tpu_steps
