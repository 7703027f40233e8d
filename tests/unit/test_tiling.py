"""The tiler: everything fits, on every target, within the chip's limits."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, prod
from typing import Any

import numpy as np
import pytest

from tests.quant_graphs import Graph, codes
from tilewright.diagnostics import TilewrightError
from tilewright.dialects import quant, top
from tilewright.schedule.box import BoxAxis, BoxChoice, BoxOperand, BoxProblem, choose_box
from tilewright.schedule.footprint import max_parameter_blocks
from tilewright.schedule.placement import Item, TileDoesNotFit, place_network
from tilewright.schedule.tiling import (
    Choice,
    ConvProblem,
    ConvTiling,
    NoFit,
    TileLoop,
    choose_conv,
    loads,
    shares,
)
from tilewright.spec.hardware import Hardware, load_target, shipped_targets
from tilewright.transforms.affine.tile_and_bufferize import TileAndBufferizePass


def conv(size: int, ins: int, outs: int, kernel: int, stride: int = 1, **more: Any) -> ConvProblem:
    out = ceil(size / stride)
    return ConvProblem(
        "conv", 1, size, size, ins, out, out, outs, (kernel, kernel), (stride, stride), **more
    )


LAYERS = {
    "stem": conv(224, 3, 64, 7, 2),
    "wide stem": ConvProblem("conv", 1, 640, 640, 3, 640, 640, 32, (3, 3)),
    "residual": conv(56, 64, 64, 3),
    "late": conv(7, 512, 512, 3),
    "point": conv(14, 1024, 256, 1),
    "point and addition": conv(56, 64, 256, 1, second=True),
    "late and addition": conv(7, 512, 512, 3, second=True),
    "split and addition": conv(14, 1024, 1024, 7, second=True),
    "odd groups and addition": conv(13, 35, 70, 3, group=7, second=True),
    "mean and addition": ConvProblem(
        "sum", 1, 35, 35, 288, 35, 35, 288, (3, 3), group=288, second=True
    ),
    "huge kernel": conv(14, 1024, 1024, 7),
    "depthwise": conv(112, 96, 96, 3, 2, group=96),
    "depthwise with table": conv(28, 240, 240, 5, 1, group=240, table=True),
    "resnext": conv(56, 128, 128, 3, group=32),
    "two groups": conv(27, 96, 256, 5, group=2),
    "odd groups": conv(13, 35, 70, 3, group=7),
    "vgg fc": ConvProblem("conv", 1, 1, 1, 25088, 1, 1, 4096, (1, 1)),
    "batched fc": ConvProblem("conv", 1, 1, 2000, 768, 1, 2000, 3072, (1, 1)),
    "dilated": conv(33, 256, 256, 3, dilations=(12, 12)),
    "mean": ConvProblem("sum", 1, 112, 112, 64, 1, 1, 64, (112, 112), group=64),
    "huge mean": ConvProblem("sum", 1, 300, 300, 32, 1, 1, 32, (300, 300), group=32),
    "mean of one channel": ConvProblem("sum", 1, 9, 9, 1, 1, 1, 1, (9, 9), group=1),
    "average": ConvProblem("sum", 1, 35, 35, 288, 35, 35, 288, (3, 3), group=288),
}


@pytest.mark.parametrize("target", shipped_targets())
@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_fits_every_target(layer: str, target: str) -> None:
    hardware, problem = load_target(target), LAYERS[layer]
    choice = choose_conv(hardware, problem)
    assert isinstance(choice, Choice)
    tiling = choice.tiling
    buffers = tiling.buffers(hardware, problem)
    weights = tuple(b.name for b in buffers if b.role == "weights")
    items = [
        Item(b.name, b.role, b.size_bytes, b.slots, 0, 0, () if b.name in weights else weights)
        for b in buffers
    ]
    assert not isinstance(place_network(hardware, items), TileDoesNotFit)
    form = tiling.form(hardware, problem)
    assert form.blocks <= max_parameter_blocks(hardware)
    assert tiling.columns <= hardware.accumulator_rows
    assert max(tiling.kernel) <= 256
    assert form.row_blocks <= 1024
    counts = {loop.name: loop.count for loop in tiling.loops(problem)}
    if counts["k"] * counts["kr"] * counts["kc"] > 1:
        rows = hardware.accumulator_rows // tiling.columns
        assert form.blocks * ceil(tiling.rows / rows) <= 2
        assert form.parts == 1
    if tiling.groups > 1:
        assert (tiling.out_channels, tiling.in_channels) == (problem.group_out, problem.group_in)
        assert problem.diagonal or problem.group % tiling.groups == 0
    if problem.kind == "sum":
        assert problem.kernel[0] % tiling.kernel[0] == problem.kernel[1] % tiling.kernel[1] == 0


def test_choice_does_not_depend_on_what_was_asked_before() -> None:
    hardware = load_target("edge16")
    first = [choose_conv(hardware, problem) for problem in LAYERS.values()]
    choose_conv.cache_clear()
    again = [choose_conv(hardware, problem) for problem in reversed(LAYERS.values())]
    assert first == again[::-1]


def test_loads_count_the_loops_around() -> None:
    loops = [TileLoop("o", 10, 5), TileLoop("h", 9, 3), TileLoop("k", 4, 4)]
    assert loads(loops, ("o",)) == 2
    assert loads(loops, ("h",)) == 6
    assert loads(loops, ("k",)) == 1
    assert loads(loops, ()) == 1


@pytest.mark.parametrize(("size", "unit"), [(1, 1), (7, 1), (100, 16), (5, 8), (1000, 128)])
def test_shares_are_whole_units(size: int, unit: int) -> None:
    parts = shares(size, unit)
    assert parts[0] == size
    assert parts == sorted(set(parts), reverse=True)
    assert all(part % unit == 0 or part == size for part in parts)
    assert parts[-1] == min(size, unit)


ORDERED = [
    conv(112, 64, 512, 1),
    conv(14, 2048, 1024, 1),
    conv(28, 512, 1024, 3),
    conv(56, 64, 64, 3),
]


@pytest.mark.parametrize("problem", ORDERED)
def test_with_slow_memory_the_order_of_the_loops_moves_least(problem: ConvProblem) -> None:
    slow = load_target("edge16").model_copy(update={"ddr_clock_mhz": 8})
    choice = choose_conv(slow, problem)
    assert isinstance(choice, Choice)

    def traffic(tiling: ConvTiling) -> int:
        loops = tiling.loops(problem)
        rows, columns = tiling.in_extent(problem)
        activations = rows * columns * tiling.in_channels
        weights = tiling.out_channels * tiling.in_channels * prod(problem.kernel)
        return loads(loops, "nhwgk") * activations + loads(loops, "gok") * weights

    other = replace(choice.tiling, weights_outer=not choice.tiling.weights_outer)
    assert traffic(choice.tiling) <= traffic(other)


def test_both_orders_are_chosen_somewhere() -> None:
    slow = load_target("edge16").model_copy(update={"ddr_clock_mhz": 8})
    choices = [choose_conv(slow, problem) for problem in [*ORDERED, *LAYERS.values()]]
    orders = {item.tiling.weights_outer for item in choices if isinstance(item, Choice)}
    assert orders == {True, False}


def test_box_that_cannot_be_cut_reports_what_would_do() -> None:
    whole = BoxOperand(
        "input", (BoxAxis(-1, 1, 300), BoxAxis(-1, 1, 300), BoxAxis(0)), (300, 300, 4)
    )
    result = BoxOperand("output", (BoxAxis(0),), (4,))
    answer = choose_box(load_target("tiny8"), BoxProblem((4,), (whole, result)))
    assert not isinstance(answer, BoxChoice)
    assert answer.needed_bytes >= 300 * 300
    larger = load_target("tiny8").model_copy(update={"sram_size": 2 * answer.needed_bytes})
    assert isinstance(choose_box(larger, BoxProblem((4,), (whole, result))), BoxChoice)


def test_smallest_sram_that_would_do_does() -> None:
    problem = ConvProblem("conv", 1, 8, 8, 400, 8, 8, 400, (3, 3))
    bank = 32
    small = load_target("tiny8").model_copy(update={"sram_size": 4 * bank, "sram_banks": 4})
    answer = choose_conv(small, problem)
    assert isinstance(answer, NoFit)
    banks = answer.needed_bytes // bank
    enough = small.model_copy(update={"sram_size": banks * bank, "sram_banks": banks})
    assert isinstance(choose_conv(enough, problem), Choice)


def tile(graph: Graph, hardware: Hardware | None, *results: Any, effort: int = 2) -> list[Any]:
    module = graph.lowered(*results)
    context = graph.context()
    context.target = hardware
    TileAndBufferizePass(effort=effort).apply(context, module)
    return context.decisions


def test_out_of_memory_names_layer_tensors_and_the_smallest_sram() -> None:
    graph = Graph(x=codes((1, 300, 300, 4)))
    rows = np.tile(np.array([[0, 1, 2048, 0]], np.int16), (2, 1))
    y = graph.quant(
        quant.ResizeOp,
        "neck/resize",
        [graph.input("x"), graph.weight("ty", rows), graph.weight("tx", rows)],
        codes((1, 2, 2, 4)),
        layout="nhwc", mode="linear", mult=2**20, shift=42, bias=0, bias_shift=0,
        zp=0, lo=-127, hi=127, rounding="half_up",
    )  # fmt: skip
    with pytest.raises(TilewrightError, match="Out of memory during allocation") as caught:
        tile(graph, load_target("tiny8"), y)
    text = str(caught.value)
    assert caught.value.code == "E0401"
    assert '"neck/resize"' in text
    assert "input 0: 1 x 90000 bytes" in text
    assert "smallest SRAM that would do" in text


def test_products_that_broadcast_along_some_axes_are_refused() -> None:
    graph = Graph(a=codes((2, 1, 4, 8)), b=codes((1, 3, 8, 4)))
    y = graph.quant(
        quant.MatmulOp,
        "attention/qk",
        [graph.input("a"), graph.input("b")],
        codes((2, 3, 4, 4)),
        bias=0, mult=2**30, shift=40, zp=0, lo=-127, hi=127, rounding="half_up",
    )  # fmt: skip
    with pytest.raises(TilewrightError, match="attention/qk") as caught:
        tile(graph, load_target("tiny8"), y)
    assert caught.value.code == "E0402"
    assert "along some axes only" in str(caught.value)


def test_images_in_another_layout_are_refused() -> None:
    graph = Graph(x=codes((1, 3, 8, 8)))
    y = graph.conv("c", graph.input("x"), np.random.default_rng(0), 4, layout="nchw")
    with pytest.raises(TilewrightError, match="layout nchw") as caught:
        tile(graph, load_target("tiny8"), y)
    assert caught.value.code == "E0403"


def test_tiling_needs_a_target() -> None:
    graph = Graph(x=codes((1, 8, 8, 3)))
    y = graph.conv("c", graph.input("x"), np.random.default_rng(0), 4)
    with pytest.raises(TilewrightError, match="needs a target"):
        tile(graph, None, y)


def test_decisions_layer_by_layer_say_what_came_second() -> None:
    graph = Graph(x=codes((1, 40, 40, 32)))
    y = graph.conv("conv1", graph.input("x"), np.random.default_rng(0), 64)
    z = graph.top(top.TransposeOp, "turn", [y], codes((1, 64, 38, 38)), perm=[0, 3, 1, 2])
    decisions = tile(graph, load_target("tiny8"), z, effort=0)
    by_layer = {item.layer: item for item in decisions}
    assert "pixels" in by_layer["conv1"].reason
    assert "next best" in by_layer["conv1"].reason
    assert by_layer["conv1"].details["sram_bytes"] <= 32768
    assert by_layer["turn"].reason.startswith("tiles of ")


def test_decisions_of_a_plan_say_which_step_and_tile_were_chosen() -> None:
    graph = Graph(x=codes((1, 12, 12, 16)))
    generator = np.random.default_rng(0)
    y = graph.conv("conv1", graph.input("x"), generator, 16)
    z = graph.conv("conv2", y, generator, 16)
    reasons = {"conv1": "", "conv2": "", "tpu_0": ""}
    for item in tile(graph, load_target("tiny8"), z):
        reasons[item.layer] += item.reason + "\n"
    whole = reasons.pop("tpu_0")
    assert "2 steps, 0 of them cascades; 1 tensors held in SRAM" in whole
    assert "bytes at the most" in whole
    assert "stay in SRAM until step 1" in reasons["conv1"]
    assert "conv1 in SRAM" in reasons["conv2"]
    for reason in reasons.values():
        assert "chosen with the steps around it" in reason
        assert "bytes of SRAM" in reason
