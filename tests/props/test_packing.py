"""Packed pixels give the same codes: every factor that a layer allows, on the program's level."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from xdsl.dialects.builtin import ArrayAttr, IntegerAttr, ModuleOp, UnitAttr, i64
from xdsl.dialects.linalg.ops import GenericOp
from xdsl.ir import Operation

from tests.programs import run_program
from tests.quant_graphs import Graph, codes, random_codes
from tilewright.codegen.verify import default_registers, verify_program
from tilewright.dialects import quant
from tilewright.dialects.tpu import ProgramOp
from tilewright.interp.run import run_affine, run_linalg
from tilewright.schedule.footprint import Packing, pixel_pitch
from tilewright.spec.hardware import Hardware, load_target
from tilewright.spec.program import Dispatched, sequence
from tilewright.spec.timing import mac_cycles
from tilewright.transforms.affine.tile_and_bufferize import TileAndBufferizePass
from tilewright.transforms.tpu.lower_affine_to_tpu import LowerAffineToTpuPass
from tilewright.transforms.tpu.nests import root

QUICK = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


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
) -> list[Dispatched]:
    """Force a packing; compare the program with the levels above; return its instructions."""
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
        numbers = packing.pixels, int(packing.runs), packing.stack, packing.stack_pitch
        op.attributes["packing"] = ArrayAttr([IntegerAttr(number, i64) for number in numbers])
        source = root(op.inputs[0]).owner
        assert isinstance(source, Operation)
        source.attributes.pop("dense", None)
        if packing.dense:
            source.attributes["dense"] = UnitAttr()
    found = run_affine(module, graph.weights, inputs)
    programs = run_program(module, context, inputs, seed)
    expected = {name: layers[name] for name in programs}
    for value, other in zip(found.values(), expected.values(), strict=True):
        np.testing.assert_array_equal(value, other)
    for name, value in programs.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    LowerAffineToTpuPass().apply(context, module)
    (program,) = (op for op in module.walk() if isinstance(op, ProgramOp))
    code = program.instructions()
    verify_program(code, hardware)
    return list(sequence(code, hardware.scalar_registers, default_registers(hardware)))


def stacked(case: dict[str, Any], pixels: int, more: int) -> Packing:
    """Return a packing that gathers kernel rows, `more` bytes between units."""
    ins, (k_h, _) = case["ins"], case["kernel"]
    pixel = ins if case["dense"] else pixel_pitch(machine(case["lanes"], case["word"]), ins)
    size = k_h * ((pixels - 1) * pixel + ins)
    return Packing(1, True, case["dense"], pixels, size + more)


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


@QUICK
@given(layers(), st.data(), st.integers(0, 2**31))
def test_gathered_kernel_rows(case: dict[str, Any], data: st.DataObject, seed: int) -> None:
    case |= {"group": 1, "ins": 1 + case["ins"] % 9, "dilations": (case["dilations"][0], 1)}
    n, h, w = case["image"]
    k_h, k_w = case["kernel"]
    pads, reach = case["pads"], (k_h - 1) * case["dilations"][0] + 1
    assume(h + pads[0] + pads[2] >= reach and w + pads[1] + pads[3] >= k_w)
    stride = case["strides"][1]
    parts = [k_w, *(part for part in range(1, k_w) if k_w % part == stride % part == 0)]
    packing = stacked(case, data.draw(st.sampled_from(parts)), data.draw(st.integers(0, 9)))
    rng = np.random.default_rng(seed)
    graph = Graph(x=codes((n, h, w, case["ins"]), zero=-5))
    y = graph.conv(
        "conv", graph.input("x"), rng, case["outs"], (k_h, k_w), case["strides"], pads,
        case["dilations"],
    )  # fmt: skip
    packed_bits(graph, machine(case["lanes"], case["word"]), packing, seed, y)


Case = tuple[int, int, int, tuple[int, int], int, int, Packing]
NAMED: dict[str, Case] = {
    "a stem whose kernel rows are gathered": (
        3,
        40,
        1,
        (7, 7),
        2,
        27,
        Packing(1, True, True, 7, 160),
    ),
    "kernel rows gathered by the pixel": (3, 16, 1, (5, 5), 2, 27, Packing(1, True, False, 1, 16)),
    "a stem": (3, 8, 1, (7, 7), 2, 27, Packing(3, True, True)),
    "a kernel row beyond the array": (24, 16, 1, (3, 3), 1, 12, Packing(2, True)),
    "a pixel": (16, 8, 1, (1, 1), 1, 20, Packing(4, True)),
    "a depthwise layer on the diagonal": (7, 7, 7, (3, 5), 1, 21, Packing(4)),
    "a depthwise layer as runs": (8, 8, 8, (3, 3), 2, 17, Packing(4, True)),
    "groups": (12, 8, 4, (3, 3), 1, 14, Packing(3, True)),
}
"""Inputs, outputs, groups, kernel, stride, image columns, packing: all possible on 32 columns."""


def named_layer(case: Case, rows: int = 40) -> tuple[Graph, Any]:
    ins, outs, group, kernel, stride, columns, _ = case
    graph = Graph(x=codes((1, rows, columns, ins), zero=3))
    pads = (kernel[0] // 2, kernel[1] // 2, kernel[0] // 2, kernel[1] // 2)
    y = graph.conv(
        "conv", graph.input("x"), np.random.default_rng(5), outs, kernel, (stride, stride), pads,
        (1, 1), group,
    )  # fmt: skip
    return graph, y


@pytest.mark.parametrize("name", NAMED)
def test_packing_is_obeyed_and_faster(name: str) -> None:
    hardware, packing = machine(32, 32), NAMED[name][-1]
    cycles: list[int] = []
    columns: list[int] = []
    for wanted in (Packing(), packing):
        graph, y = named_layer(NAMED[name])
        code = packed_bits(graph, hardware, wanted, 1, y)
        convs = [item.fields for item in code if item.name == "mac_conv"]
        columns.append(max(f["out_w"] for f in convs))
        cycles.append(sum(mac_cycles(hardware, f) for f in convs))
    assert columns[1] == columns[0] // packing.pixels
    assert cycles[1] < cycles[0]


def test_pixels_with_a_table_and_an_addition() -> None:
    """Both follow the drains in place, over all packed pixels."""
    rng = np.random.default_rng(3)
    shape = (1, 9, 15, 8)
    graph = Graph(x=codes((1, 9, 15, 6)), z=codes(shape, zero=2))
    graph.weights.set("table", rng.integers(-128, 128, 256).astype(np.int8))
    y = graph.conv("conv", graph.input("x"), rng, 8, (3, 3), pads=(1, 1, 1, 1))
    t = graph.quant(quant.LutOp, "act", [y], codes(shape), table="table", function="x")
    joined = graph.quant(
        quant.AddOp, "sum", [t, graph.input("z")], codes(shape, zero=1),
        mult_a=2**30, mult_b=2**29 + 5, shift=30, bias=3, bias_shift=4, zp=1, lo=-100, hi=127,
        rounding="half_up",
    )  # fmt: skip
    code = packed_bits(graph, machine(32, 32), Packing(4, True), 2, joined)
    widths = {item.fields["out_w"] for item in code if item.name == "mac_conv"}
    assert widths == {3, 1}


def test_averages_are_packed_on_the_diagonal() -> None:
    graph = Graph(x=codes((1, 6, 13, 5)))
    y = graph.quant(
        quant.AvgPoolOp, "pool", [graph.input("x")], codes((1, 4, 11, 5), zero=1),
        kernel=[3, 3], strides=[1, 1], pads=[0, 0, 0, 0], layout="nhwc", bias=3,
        mult=2**30 + 12345, shift=36, zp=1, lo=-127, hi=127, rounding="half_up",
    )  # fmt: skip
    code = packed_bits(graph, machine(32, 32), Packing(4), 2, y)
    widths = {item.fields["out_w"] for item in code if item.name == "mac_conv"}
    assert widths == {2, 1}


def test_two_tiles_of_output_channels_are_not_packed() -> None:
    """The results of one would overwrite those of the other, which lie between its pixels."""
    graph = Graph(x=codes((1, 9, 15, 6)))
    rng = np.random.default_rng(3)
    y = graph.conv("conv", graph.input("x"), rng, 40, (3, 3), pads=(1, 1, 1, 1))
    code = packed_bits(graph, machine(32, 32), Packing(2, True), 2, y)
    assert {item.fields["out_w"] for item in code if item.name == "mac_conv"} == {15}
