"""The bound of single operations, worked out by hand, and that no program beats it."""

from __future__ import annotations

from math import ceil
from pathlib import Path

import pytest
from xdsl.dialects.builtin import StringAttr

from tests.cli.conftest import small_cnn
from tilewright.api import CompileOptions, build
from tilewright.dialects.quant import shape_of
from tilewright.ir.io import new_context, parse_text
from tilewright.report.report import make_report
from tilewright.runtime.simulation import simulate
from tilewright.schedule.bound import array_work, bound_cycles, vector_work
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
    assert vector_work(op, hardware) == cycles
    assert array_work(op, hardware) == (0, 0)


def test_pooling_reads_each_element_of_a_window() -> None:
    assert vector_work(pool("1x8x8x16", "1x4x4x16", 2, 2, 0), EDGE) == 16 * 4
    assert vector_work(pool("2x8x8x40", "2x4x4x40", 2, 2, 0), EDGE) == 2 * 16 * 4 * ceil(40 / 16)


def test_padding_is_not_read() -> None:
    # Windows of 3 at 0 and 2 of a side of 4, padded by one: 2 + 3 positions a side.
    assert vector_work(pool("1x4x4x16", "1x2x2x16", 3, 2, 1), EDGE) == 25


def test_large_windows_go_by_rows_and_columns() -> None:
    # 13 x 13 at stride 1: of each axis 127 positions are in the picture.
    inside = sum(min(13, at + 7) - max(0, at - 6) for at in range(13))
    assert vector_work(pool("1x13x13x16", "1x13x13x16", 13, 1, 6), EDGE) == 2 * 13 * inside


def test_the_networks_bound_is_the_largest_sum() -> None:
    records = [
        {"padded_cycles": 10, "vector_cycles": 30, "min_ddr_bytes": 0},
        {"padded_cycles": 30, "vector_cycles": 20, "min_ddr_bytes": 64},
    ]
    assert bound_cycles(records, EDGE) == 50
    records[0]["min_ddr_bytes"] = 64000
    assert bound_cycles(records, EDGE) == 64064 / EDGE.ddr_bytes_per_cycle


def test_work_on_the_host_does_not_count() -> None:
    op = binary("mul", "1x5x5x16")
    assert shape_of(op.results[0]) == (1, 5, 5, 16)
    op.attributes["device"] = StringAttr("host")
    assert vector_work(op, EDGE) == 0


@pytest.mark.parametrize("target", ["tiny8", "edge16"])
def test_no_program_beats_it(target: str, tmp_path: Path) -> None:
    path = tmp_path / "small.onnx"
    path.write_bytes(small_cnn())
    hardware = load_target(target)
    made = build(path, hardware, CompileOptions(random_calibration=True))
    report = make_report(made.package, simulate(made.package))
    conv, pooling, linear = (row for row in report.layers if row.device == "tpu")
    lanes = hardware.vector_lanes
    # 3 x 3 x 3 products a pixel, 4 channels; one vector a pixel.
    assert (conv.array_bound, conv.vector_bound) == (144 * ceil(27 / lanes), 144)
    assert (pooling.array_bound, pooling.vector_bound) == (0, 36 * 4)
    # Five sums of 32 bits for the host.
    words = ceil(5 * 4 / hardware.sram_word_bytes)
    assert (linear.array_bound, linear.vector_bound) == (ceil(144 / lanes), words)
    assert report.vector_bound == 144 + 144 + words
    assert report.ratio >= 1
    assert all(row.spans.cycles >= row.bound_cycles > 0 for row in (conv, pooling, linear))
