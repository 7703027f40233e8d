"""Random layers through tiling: the affine level computes what the linalg level does."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.quant_graphs import Graph, codes, random_codes
from tilewright.dialects import quant, top
from tilewright.dialects.quant import shape_of
from tilewright.interp import run_affine, run_linalg
from tilewright.spec.hardware import load_target
from tilewright.transforms.affine.tile_and_bufferize import TileAndBufferizePass


def check(graph: Graph, results: list[Any], target: str, seed: int) -> None:
    module = graph.lowered(*results)
    rng = np.random.default_rng(seed)
    shapes = {name: shape_of(arg) for name, arg in zip(graph.names, graph.block.args, strict=True)}
    inputs = {name: random_codes(rng, shape) for name, shape in shapes.items()}
    expected = run_linalg(module, graph.weights, inputs, keep=True)
    TileAndBufferizePass().apply(graph.context(target), module)
    module.verify()
    actual = run_affine(module, graph.weights, inputs, keep=True)
    assert actual
    for name, value in actual.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


@st.composite
def layers(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["plain", "plain", "depthwise", "grouped"]))
    channels = draw(st.integers(1, 40))
    group, out = 1, draw(st.integers(1, 40))
    if kind == "depthwise":
        group = out = channels
    elif kind == "grouped":
        group = draw(st.sampled_from([2, 3, 4]))
        channels, out = group * draw(st.integers(1, 9)), group * draw(st.integers(1, 9))
    kernel = draw(st.sampled_from([(1, 1), (3, 3), (5, 5), (1, 7), (3, 2)]))
    dilations = draw(st.sampled_from([(1, 1), (1, 1), (2, 2), (1, 3)]))
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    return {
        "target": draw(st.sampled_from(["tiny8", "edge16"])),
        "size": [draw(st.integers(r, r + 40)) for r in reach],
        "channels": channels,
        "out": out,
        "zero": draw(st.integers(-128, 127)),
        "seed": draw(st.integers(0, 2**31)),
        "options": {
            "group": group,
            "kernel": kernel,
            "dilations": dilations,
            "strides": draw(st.sampled_from([(1, 1), (2, 2), (2, 1), (3, 3)])),
            "pads": tuple(draw(st.integers(0, (reach[k % 2] - 1) // 2)) for k in range(4)),
        },
    }


@settings(max_examples=40, deadline=None, derandomize=True)
@given(layers())
def test_convolutions(case: dict[str, Any]) -> None:
    rng = np.random.default_rng(case["seed"])
    h, w = case["size"]
    assume(h * w * case["channels"] < 60000)
    graph = Graph(x=codes([1, h, w, case["channels"]], zero=case["zero"]))
    rounding = load_target(case["target"]).rounding
    y = graph.conv("c", graph.input("x"), rng, case["out"], rounding=rounding, **case["options"])
    check(graph, [y], case["target"], case["seed"])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.integers(1, 3), st.integers(3, 40), st.integers(3, 40), st.integers(1, 40),
    st.sampled_from(["max", "mean", "add", "concat", "transpose", "lut"]), st.integers(0, 2**31),
)  # fmt: skip
def test_vector_layers(batch: int, h: int, w: int, c: int, kind: str, seed: int) -> None:
    """Layers without weights, in sizes that do not divide into tiles."""
    assume(batch * h * w * c < 40000)
    rounding = load_target("tiny8").rounding
    end = {"zp": 0, "lo": -127, "hi": 127, "rounding": rounding}
    shape = [batch, h, w, c]
    graph = Graph(x=codes(shape), y=codes(shape))
    x, y = graph.input("x"), graph.input("y")
    if kind == "max":
        size = [(h - 1) // 2 + 1, (w - 1) // 2 + 1]
        options = {"kernel": [3, 3], "strides": [2, 2], "pads": [1] * 4, "dilations": [1, 1]}
        out = codes([batch, *size, c])
        z = graph.top(top.MaxPoolOp, "z", [x], out, ceil_mode=False, layout="nhwc", **options)
    elif kind == "mean":
        options = {"kernel": [h, w], "strides": [1, 1], "pads": [0] * 4, "layout": "nhwc"}
        mult = max(round(2**31 / (h * w)) * 2, 1)
        scalars = {"bias": 0, "mult": min(mult, 2**31 - 1), "shift": 31, **end}
        z = graph.quant(quant.AvgPoolOp, "z", [x], codes([batch, 1, 1, c]), **options, **scalars)
    elif kind == "add":
        scalars = {"mult_a": 2**30, "mult_b": 2**29 + 1, "shift": 31, "bias": 0, "bias_shift": 0}
        z = graph.quant(quant.AddOp, "z", [x, y], codes(shape), **scalars, **end)
    elif kind == "concat":
        z = graph.top(top.ConcatOp, "z", [x, y, x], codes([batch, h, w, 3 * c]), axis=3)
    elif kind == "transpose":
        z = graph.top(top.TransposeOp, "z", [x], codes([batch, c, h, w]), perm=[0, 3, 1, 2])
    else:
        table = np.random.default_rng(seed).integers(-128, 128, 256).astype(np.int8)
        graph.weights.set("table", table)
        z = graph.quant(quant.LutOp, "z", [x], codes(shape), table="table", function="f")
    check(graph, [z], "tiny8", seed)
