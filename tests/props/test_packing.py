"""Packed pixels give the same codes: every factor that a layer allows, on the program's level."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from xdsl.dialects.builtin import ArrayAttr, IntegerAttr, ModuleOp, UnitAttr, i64
from xdsl.dialects.linalg.ops import GenericOp
from xdsl.ir import Operation

from tests.programs import run_program
from tests.quant_graphs import Graph, codes, random_codes
from tilewright.interp.run import run_affine, run_linalg
from tilewright.schedule.footprint import Packing
from tilewright.spec.hardware import Hardware, load_target
from tilewright.transforms.affine.tile_and_bufferize import TileAndBufferizePass
from tilewright.transforms.tpu.nests import root

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def machine(lanes: int, word: int, sram: int = 1 << 20) -> Hardware:
    """Return a chip of `lanes` x `lanes` with words that need not be as wide."""
    return load_target("tiny8").model_copy(
        update={
            "sram_size": sram,
            "sram_banks": 8,
            "sram_word_bytes": word,
            "mac_array_size": (lanes, lanes),
            "vector_lanes": lanes,
            "vector_registers": 64,
        }
    )


def reductions(module: ModuleOp) -> list[GenericOp]:
    """Return the ops that may carry a packing."""
    return [
        op
        for op in module.walk()
        if isinstance(op, GenericOp) and str(op.attributes.get("kind")) in ('"conv"', '"sum"')
    ]


def packed_bits(
    graph: Graph, hardware: Hardware, packing: Packing, seed: int, *results: Any
) -> ModuleOp:
    """Force a packing and compare the program with the levels above; return the tiled module."""
    module = graph.lowered(*results)
    rng = np.random.default_rng(seed)
    inputs = {
        name: random_codes(rng, arg.type.get_shape())  # pyright: ignore[reportAttributeAccessIssue]
        for name, arg in zip(graph.names, graph.block.args, strict=True)
    }
    layers = run_linalg(module, graph.weights, inputs, keep=True)
    context = graph.context()
    context.target = hardware
    TileAndBufferizePass().apply(context, module)
    for op in reductions(module):
        op.attributes["packing"] = ArrayAttr(
            [IntegerAttr(packing.pixels, i64), IntegerAttr(int(packing.runs), i64)]
        )
        source = root(op.inputs[0]).owner
        assert isinstance(source, Operation)
        if packing.dense:
            source.attributes["dense"] = UnitAttr()
    found = run_affine(module, graph.weights, inputs)
    programs = run_program(module, context, inputs, seed)
    expected = {name: layers[name] for name in programs}
    for value, other in zip(found.values(), expected.values(), strict=True):
        np.testing.assert_array_equal(value, other)
    for name, value in programs.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    return module


@st.composite
def layers(draw: st.DrawFn) -> dict[str, Any]:
    depthwise = draw(st.booleans())
    group = draw(st.integers(2, 40)) if depthwise else draw(st.sampled_from([1, 1, 1, 2, 4]))
    return {
        "group": group,
        "ins": group if depthwise else group * draw(st.integers(1, 200 // group)),
        "outs": group if depthwise else group * draw(st.integers(1, 40 // group)),
        "image": (draw(st.integers(1, 2)), draw(st.integers(1, 12)), draw(st.integers(1, 23))),
        "kernel": (draw(st.integers(1, 7)), draw(st.integers(1, 7))),
        "strides": (draw(st.integers(1, 3)), draw(st.integers(1, 3))),
        "dilations": draw(st.sampled_from([(1, 1), (1, 1), (1, 2), (2, 1)])),
        "pads": tuple(draw(st.integers(0, 3)) for _ in range(4)),
        "lanes": draw(st.sampled_from([8, 16, 32])),
        "word": draw(st.sampled_from([8, 16, 32])),
        "pixels": draw(st.integers(1, 8)),
        "runs": draw(st.booleans()),
        "dense": draw(st.booleans()),
    }


@QUICK
@given(layers(), st.integers(0, 2**31))
def test_packed_convolution(case: dict[str, Any], seed: int) -> None:
    n, h, w = case["image"]
    reach = [(k - 1) * d + 1 for k, d in zip(case["kernel"], case["dilations"], strict=True)]
    pads = case["pads"]
    assume(h + pads[0] + pads[2] >= reach[0] and w + pads[1] + pads[3] >= reach[1])
    columns = (w + pads[1] + pads[3] - reach[1]) // case["strides"][1] + 1
    assume(columns >= case["pixels"])
    rng = np.random.default_rng(seed)
    graph = Graph(x=codes((n, h, w, case["ins"]), zero=-5))
    y = graph.conv(
        "conv", graph.input("x"), rng, case["outs"], case["kernel"], case["strides"], pads,
        case["dilations"], case["group"],
    )  # fmt: skip
    hardware = machine(case["lanes"], case["word"])
    packing = Packing(case["pixels"], case["runs"], case["dense"])
    packed_bits(graph, hardware, packing, seed, y)
