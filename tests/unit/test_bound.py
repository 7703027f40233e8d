"""Floor and roofline of single operations, worked out by hand, and that no program beats them."""

from __future__ import annotations

from math import ceil
from pathlib import Path

import numpy as np
import pytest
from xdsl.dialects import func
from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Operation

from tests.cli.conftest import small_cnn
from tilewright.api import CompileOptions, build
from tilewright.dialects.quant import shape_of
from tilewright.ir.io import new_context, parse_text
from tilewright.ir.weights import WeightStore
from tilewright.report.network import floor, roofline
from tilewright.report.report import make_report
from tilewright.runtime.simulation import simulate
from tilewright.schedule.bound import (
    array_floor,
    array_mapping,
    layer_bounds,
    padded_work,
    vector_floor,
    vector_roofline,
)
from tilewright.schedule.mapping import maxima
from tilewright.schedule.reach import Axis
from tilewright.spec.hardware import Hardware, load_target

EDGE = load_target("edge16")  # 16 lanes, words of 16 bytes
WIDE = EDGE.model_copy(update={"sram_word_bytes": 8})

Q = "!quant.uniform<i8:f32, 0.02:0>"


def operation(text: str):
    module = parse_text(text, new_context(target=EDGE))
    return next(op for op in module.walk() if "device" in op.attributes)


def pool(shape: str, result: str, kernel: int, stride: int, pad: int):
    return operation(
        f"""func.func @main(%x: tensor<{shape}x{Q}>) -> tensor<{result}x{Q}> {{
        %y = "top.max_pool"(%x) {{name = "p", device = "tpu", layout = "nhwc",
          kernel = array<i64: {kernel}, {kernel}>, strides = array<i64: {stride}, {stride}>,
          pads = array<i64: {pad}, {pad}, {pad}, {pad}>, dilations = array<i64: 1, 1>,
          ceil_mode = false}} : (tensor<{shape}x{Q}>) -> tensor<{result}x{Q}>
        func.return %y : tensor<{result}x{Q}>
        }}"""
    )


def binary(name: str, shape: str):
    return operation(
        f"""func.func @main(%x: tensor<{shape}x{Q}>) -> tensor<{shape}x{Q}> {{
        %y = "quant.{name}"(%x, %x) {{name = "e", device = "tpu", mult_a = 1 : i32,
          mult_b = 1 : i32, mult = 1 : i32, shift = 1 : i32, bias = 0 : i64, bias_shift = 0 : i32,
          zp = 0 : i32, lo = -127 : i32, hi = 127 : i32, rounding = "half_up"}}
          : (tensor<{shape}x{Q}>, tensor<{shape}x{Q}>) -> tensor<{shape}x{Q}>
        func.return %y : tensor<{shape}x{Q}>
        }}"""
    )


@pytest.mark.parametrize(
    ("hardware", "shape", "cycles"),
    [
        (EDGE, "1x5x5x16", 25),
        # A whole tensor is one run: 175 elements are 11 vectors.
        (EDGE, "1x5x5x7", 11),
        # A vector of 16 codes takes two words of 8 bytes.
        (WIDE, "1x5x5x16", 50),
    ],
)
def test_elementwise(hardware: Hardware, shape: str, cycles: int) -> None:
    op = binary("add", shape)
    assert vector_floor(op, hardware) == cycles
    assert array_floor(op, hardware) == (0, 0)


def test_maxima_compare_two_values_at_a_time() -> None:
    # Windows of 4 apart from each other: three comparisons each.
    assert vector_floor(pool("1x8x8x16", "1x4x4x16", 2, 2, 0), EDGE) == 16 * 3
    # Images and channels one after another: 2 x 16 x 40 x 3 comparisons, 16 a cycle.
    assert vector_floor(pool("2x8x8x40", "2x4x4x40", 2, 2, 0), EDGE) == 2 * 16 * 40 * 3 // 16


def test_windows_that_overlap_share_comparisons() -> None:
    # Windows of 3 at 0 and 2 of a side of 4, padded by one: together they read all 16 pixels.
    assert vector_floor(pool("1x4x4x16", "1x2x2x16", 3, 2, 1), EDGE) == 15
    # 13 x 13 at stride 1: every result is the maximum of other pixels; a comparison each.
    assert vector_floor(pool("1x13x13x16", "1x13x13x16", 13, 1, 6), EDGE) == 169


def test_results_that_are_twins_are_made_once() -> None:
    # Every window of 13 covers all of a side of 5.
    assert vector_floor(pool("1x5x5x16", "1x5x5x16", 13, 1, 6), EDGE) == 24


def test_windows_along_an_axis() -> None:
    axis = Axis(source=4, target=2, kernel=3, stride=2, dilation=1, before=1)
    assert axis.inside().sum(axis=1).tolist() == [2, 3]
    assert axis.uses().tolist() == [1, 2, 1, 1]
    rows = np.arange(4)
    low, high = axis.reached(rows, rows)
    assert list(zip(low.tolist(), high.tolist(), strict=True)) == [(0, 0), (0, 1), (1, 1), (1, 1)]
    # Row 1 is the last of one window and the first of the next.
    assert axis.taps(rows, rows).tolist() == [1, 2, 1, 1]
    skipping = Axis(source=4, target=2, kernel=1, stride=2, dilation=1, before=0)
    low, high = skipping.reached(rows, rows)
    assert (low <= high).tolist() == [True, False, True, False]


def conv(size: int, channels: tuple[int, int], kernel: int, group: int = 1, stride: int = 1):
    source, target = channels
    pad = kernel // 2
    side = (size + 2 * pad - kernel) // stride + 1
    weight = f"{target}x{source // group}x{kernel}x{kernel}xi8"
    return operation(
        f"""func.func @main(%x: tensor<1x{size}x{size}x{source}x{Q}>)
          -> tensor<1x{side}x{side}x{target}x{Q}> {{
        %w = "top.weight"() {{name = "w"}} : () -> tensor<{weight}>
        %b = "top.weight"() {{name = "b"}} : () -> tensor<{target}xi32>
        %s = "top.weight"() {{name = "s"}} : () -> tensor<{target}xi8>
        %y = "quant.conv"(%x, %w, %b, %b, %s) {{name = "c", device = "tpu", layout = "nhwc",
          strides = array<i64: {stride}, {stride}>, pads = array<i64: {pad}, {pad}, {pad}, {pad}>,
          dilations = array<i64: 1, 1>, group = {group} : i64, zp = 0 : i64, lo = -127 : i64,
          hi = 127 : i64, rounding = "half_up"}} : (tensor<1x{size}x{size}x{source}x{Q}>,
          tensor<{weight}>, tensor<{target}xi32>, tensor<{target}xi32>, tensor<{target}xi8>)
          -> tensor<1x{side}x{side}x{target}x{Q}>
        func.return %y : tensor<1x{side}x{side}x{target}x{Q}>
        }}"""
    )


@pytest.mark.parametrize(
    ("op", "least", "best", "mapping"),
    [
        # A result takes two columns' cycles for 24 products, 40 results a pixel. Two pixels are 5
        # blocks of columns, each of which reads both: three words.
        (conv(8, (24, 40), 1), 64 * 2 * 40 // 16, 64 * 2 * 3, "plain"),
        # An input is fed twice, to 24 results.
        (conv(8, (144, 24), 1), 64 * 144 * 2 // 16, 64 * 18, "plain"),
        # Four results a pixel, two pixels a pass.
        (conv(8, (8, 4), 1), 64 * 4 // 16 * 2, 64 // 2, "2 pixels"),
        # Two pixels fill three blocks of columns.
        (conv(8, (8, 24), 1), 64 * 24 // 16, 64 * 3 // 2, "2 pixels"),
        # Depthwise: every input is fed once, to the windows around it. Kernel rows of two pixels of
        # 4 channels are 16 inputs, in four tiles; fewer channels take longer to load.
        (conv(8, (16, 16), 3, 16), 64, 64 * 3 * 4 // 2, "2 pixels x 4 groups x 3 kernel columns"),
        # With a stride pixels are too far apart for that.
        (conv(8, (16, 16), 3, 16, 2), 64, 16 * 9, "diagonal"),
        # A picture of one pixel: one of nine taps is no padding. Its weights are 16 rows.
        (conv(1, (16, 16), 3), 16, 16, "plain"),
        # 4 pixels: every weight enters the array by itself, and rows are whole.
        (conv(2, (64, 20), 1), 64 * 20 // 16, 2 * 64, "plain"),
        # Groups of 4 to 4 side by side: 4 of them fill the array.
        (conv(8, (32, 32), 1, 8), 64 * 32 // 16, 64 * 2, "4 groups"),
        # A kernel row of 3 channels is 9 of the array's 16 rows; 27 products are two vectors, if
        # kernel rows are gathered.
        (conv(8, (3, 16), 3), 124, 64 * 2, "3 kernel rows x 3 kernel columns"),
    ],
)
def test_convolutions(op: Operation, least: int, best: int, mapping: str) -> None:
    assert array_floor(op, EDGE)[1] == least
    found = array_mapping(op, EDGE)
    assert found is not None
    assert (found.cycles, str(found)) == (best, mapping)


@pytest.mark.parametrize(
    ("op", "cycles"),
    [
        (conv(8, (24, 40), 1), 64 * 2 * 3),
        (conv(8, (8, 4), 1), 64),
        (conv(8, (16, 16), 3, 16), 64 * 9),
        # One pixel: the rows of the weights, 144 for each of two blocks of results.
        (conv(1, (16, 20), 3), 2 * 144),
        (conv(8, (32, 32), 1, 8), 64 * 2),
        (conv(8, (3, 16), 3), 64 * 2),
    ],
)
def test_padded_products(op: Operation, cycles: int) -> None:
    """One result pixel a pass, whole blocks."""
    assert padded_work(op, EDGE) == cycles


@pytest.mark.parametrize(
    ("kernel", "stride", "comparisons"),
    [(1, 1, 0), (2, 1, 1), (3, 1, 2), (5, 1, 3), (13, 1, 3), (2, 2, 1), (3, 2, 2), (5, 2, 3),
     (2, 3, 1), (9, 3, 4)],
)  # fmt: skip
def test_maxima_of_neighbours(kernel: int, stride: int, comparisons: int) -> None:
    assert maxima(kernel, stride) == comparisons


def test_maxima_one_axis_after_the_other() -> None:
    # 8 rows of 4 maxima of two columns, then 4 x 4 of two rows.
    assert vector_roofline(pool("1x8x8x16", "1x4x4x16", 2, 2, 0), EDGE) == 8 * 4 + 16
    # 8 channels: rows are dense, two pixels a vector; columns a stride apart are one each.
    assert vector_roofline(pool("1x8x8x8", "1x4x4x8", 2, 2, 0), EDGE) == 4 * 8 // 2 + 16
    # 3 x 3 at a stride of 2, padded: two comparisons for all 8 rows, two for each result.
    assert vector_roofline(pool("1x8x8x16", "1x4x4x16", 3, 2, 1), EDGE) == 8 * 4 * 2 + 16 * 2


def test_narrow_words_feed_the_array_slowly() -> None:
    op = conv(8, (32, 16), 1)
    assert array_floor(op, EDGE)[1] == 64 * 2
    assert array_floor(op, WIDE)[1] == 64 * 4


def record(**given: int) -> dict[str, int]:
    return given


LATENCY = 2 * EDGE.dma_latency * EDGE.core_clock_mhz // EDGE.dma_clock_mhz


def test_the_networks_bound_is_the_largest_part() -> None:
    last = EDGE.vector_latency + LATENCY // 2
    rows = [record(array_cycles=10, vector_cycles=90), record(array_cycles=80, vector_cycles=20)]
    bound = roofline(rows, EDGE)
    assert (bound.array, bound.vector, bound.ddr, bound.limit) == (90, 110, 0, "vector")
    assert bound.cycles == LATENCY + 110 + last
    rows[0]["array_cycles"] = 40
    bound = roofline(rows, EDGE)
    assert (bound.limit, bound.cycles) == ("array", LATENCY + 120 + EDGE.mac_latency + last)
    rows[0]["min_ddr_bytes"] = 64000
    bound = roofline(rows, EDGE)
    assert (bound.limit, bound.cycles) == ("ddr", LATENCY + 64000 / EDGE.ddr_bytes_per_cycle)


def test_weights_that_do_not_fit_are_loaded_behind_the_work_before_them() -> None:
    rate, much = EDGE.ddr_bytes_per_cycle, 1_000_000
    rows = [
        record(array_cycles=5000, weights_after=much),
        record(array_cycles=5000, kernel_bytes=much, min_ddr_bytes=much),
    ]
    # The whole of them takes longer than 5000 cycles of work and what is left of them.
    assert roofline(rows, EDGE).limit == "ddr"
    room = EDGE.sram_size + 4 * EDGE.array_size**2 + 3 * (5 * 8 + 2 * 16)
    rows[0]["array_cycles"] = 50000
    bound = roofline(rows, EDGE)
    assert (bound.limit, bound.cycles) == ("order", LATENCY + 50000 + (much - room) / rate)


def test_work_that_needs_the_last_weight_comes_after_it() -> None:
    rate = EDGE.ddr_bytes_per_cycle
    rows = [
        record(kernel_bytes=6400, min_ddr_bytes=6400, array_after=700, vector_after=900),
        record(kernel_bytes=6400, min_ddr_bytes=6400, array_after=800, vector_after=300),
    ]
    assert roofline(rows, EDGE).order == LATENCY + max(
        6400 / rate + 900, 12800 / rate + max(700, 300)
    )


def test_nothing_on_the_chip_has_no_bound() -> None:
    assert roofline([record()], EDGE).cycles == 0


CHAIN = f"""func.func @main(%x: tensor<1x8x8x16x{Q}>) -> tensor<1x32x{Q}> {{
  %w = "top.weight"() {{name = "w"}} : () -> tensor<16x16x3x3xi8>
  %v = "top.weight"() {{name = "v"}} : () -> tensor<16x16x3x3xi8>
  %u = "top.weight"() {{name = "u"}} : () -> tensor<32x16xi8>
  %b = "top.weight"() {{name = "b"}} : () -> tensor<16xi32>
  %s = "top.weight"() {{name = "s"}} : () -> tensor<16xi8>
  %c = "top.weight"() {{name = "c"}} : () -> tensor<32xi32>
  %t = "top.weight"() {{name = "t"}} : () -> tensor<32xi8>
  %1 = "quant.conv"(%x, %w, %b, %b, %s) {{name = "one", CONV}}
  %2 = "quant.conv"(%1, %v, %b, %b, %s) {{name = "two", CONV}}
  %3 = "quant.avg_pool"(%2) {{name = "mean", device = "tpu", layout = "nhwc",
    kernel = array<i64: 8, 8>, strides = array<i64: 1, 1>, pads = array<i64: 0, 0, 0, 0>,
    bias = 0 : i64, mult = 1 : i64, shift = 6 : i64, REST}} : (tensor<1x8x8x16x{Q}>)
    -> tensor<1x1x1x16x{Q}>
  %4 = "top.reshape"(%3) {{name = "flat", device = "tpu"}} : (tensor<1x1x1x16x{Q}>)
    -> tensor<1x16x{Q}>
  %5 = "quant.linear"(%4, %u, %c, %c, %t) {{name = "full", device = "tpu", REST}}
    : (tensor<1x16x{Q}>, tensor<32x16xi8>, tensor<32xi32>, tensor<32xi32>, tensor<32xi8>)
    -> tensor<1x32x{Q}>
  func.return %5 : tensor<1x32x{Q}>
}}""".replace(
    "CONV}",
    """device = "tpu", layout = "nhwc", group = 1 : i64, strides = array<i64: 1, 1>,
    pads = array<i64: 1, 1, 1, 1>, dilations = array<i64: 1, 1>, REST} : (tensor<1x8x8x16xQ>,
    tensor<16x16x3x3xi8>, tensor<16xi32>, tensor<16xi32>, tensor<16xi8>)
    -> tensor<1x8x8x16xQ>""".replace("xQ", f"x{Q}"),
).replace("REST", 'zp = 0 : i64, lo = -127 : i64, hi = 127 : i64, rounding = "half_up"')


def test_what_follows_the_last_of_a_layer() -> None:
    module = parse_text(CHAIN, new_context(target=EDGE))
    main = next(op for op in module.walk() if isinstance(op, func.FuncOp))
    weights = WeightStore()
    for name, shape in (("w", (16, 16, 3, 3)), ("v", (16, 16, 3, 3)), ("u", (32, 16))):
        weights.set(name, np.zeros(shape, np.int8))
    for name, size in (("b", 16), ("c", 32)):
        weights.set(name, np.zeros(size, np.int32))
    for name, size in (("s", 16), ("t", 32)):
        weights.set(name, np.zeros(size, np.int8))
    found = {row["name"]: row for row in layer_bounds(main, weights, EDGE, {}, {})}
    one, two, mean, full = (found[name] for name in ("one", "two", "mean", "full"))
    assert (one["kernel_bytes"], two["kernel_bytes"], full["kernel_bytes"]) == (2304, 2304, 512)
    # Biases are multipliers too, and shared by both: counted once.
    assert one["min_ddr_bytes"] == 2304 + 64 + 16
    assert two["min_ddr_bytes"] == 2304
    # One channel of a pixel uses no whole kernel of the next layer, but all channels of it follow.
    assert (one["weights_after"], two["weights_after"], full["weights_after"]) == (512, 0, 0)
    # A corner tap of `one` leaves a row and a column of its result alone, but none of `two`'s.
    assert one["array_after"] == mean["array_cycles"] + full["array_cycles"]
    # `two`'s own: one channel of all means, all of `full`'s results but one of its inputs.
    assert two["array_after"] == 0
    assert (one["vector_after"], two["vector_after"]) == (64 + 1 + 2, 2)


def test_work_on_the_host_does_not_count() -> None:
    op = binary("mul", "1x5x5x16")
    assert shape_of(op.results[0]) == (1, 5, 5, 16)
    op.attributes["device"] = StringAttr("host")
    assert vector_floor(op, EDGE) == 0


@pytest.mark.parametrize("target", ["tiny8", "edge16"])
def test_no_program_beats_it(target: str, tmp_path: Path) -> None:
    path = tmp_path / "small.onnx"
    path.write_bytes(small_cnn())
    hardware = load_target(target)
    made = build(path, hardware, CompileOptions(random_calibration=True))
    report = make_report(made.package, simulate(made.package))
    conv, pooling, linear = (row for row in report.layers if row.device == "tpu")
    # Every layer knows its step of the plan.
    steps = [row.step for row in (conv, pooling, linear)]
    assert steps == sorted(steps)
    assert steps[0] == 0
    lanes = hardware.vector_lanes
    # 12 x 12 pixels, 3 channels to 4: kernel rows of three pixels are 15 inputs to 12 results, of
    # two pixels 12 inputs to 8.
    packed = {16: 144 * 3 // 3, 8: 144 * 3 * 2 // 2}
    assert conv.array_bound == packed[lanes]
    assert conv.vector_bound == 144 * 4 // lanes
    # Two rows of 12 pixels at a time, then a vector for each of 36 results.
    assert (pooling.array_bound, pooling.vector_bound) == (0, 6 * 12 * 4 // lanes + 36)
    # Five sums of 32 bits for the host; 144 rows of weights enter the array.
    words = ceil(5 * 4 / hardware.sram_word_bytes)
    assert (linear.array_bound, linear.vector_bound) == (144, words)
    assert report.vector_bound == conv.vector_bound + pooling.vector_bound + words
    assert report.ratio >= 1
    # For any program: at a side two thirds of the products are none of padding.
    places = ((100, 9), (40, 6), (4, 4))
    sums = sum(count * ceil(3 * taps / lanes) for count, taps in places) * 4 / lanes
    fed = sum(count * ceil(4 * taps / lanes) for count, taps in places) * 3 / lanes
    least = ceil(max(sums, fed)) + 720 // lanes
    rows = made.package.content.program.layer_info
    assert floor(rows, hardware).array == least
    assert report.floor <= report.bound
    assert all(row.spans.cycles >= row.bound_cycles > 0 for row in (conv, pooling, linear))
