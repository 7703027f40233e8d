"""Which packings a tile tries."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.schedule.footprint import PLAIN, Packing, pixel_pitch
from tilewright.schedule.packing import PackingProblem, packings
from tilewright.schedule.tiling import ConvProblem, ConvTiling
from tilewright.spec.hardware import Hardware, load_target

WIDE = load_target("tpu_v2")
RESIDUAL = PackingProblem(64, 64, 1, (3, 3), 1, 1, 56, 56, 56)
STEM = PackingProblem(3, 64, 1, (7, 7), 2, 1, 16, 112, 112, (37, 224))
DEPTHWISE = PackingProblem(32, 32, 32, (3, 3), 1, 1, 112, 112, 112)
SHIPPED = [WIDE, load_target("edge16"), load_target("tiny8")]


@given(
    st.sampled_from(SHIPPED),
    st.integers(1, 200),
    st.integers(1, 200),
    st.booleans(),
    st.tuples(st.integers(1, 7), st.integers(1, 7)),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 60),
    st.integers(1, 60),
)
def test_packings_are_possible_and_worth_their_weights(
    chip: Hardware,
    ins: int,
    outs: int,
    depthwise: bool,
    kernel: tuple[int, int],
    stride: int,
    dilation: int,
    rows: int,
    columns: int,
) -> None:
    outs = ins if depthwise else outs
    least = 1 + columns // 2
    problem = PackingProblem(
        ins, outs, ins if depthwise else 1, kernel, stride, dilation, rows, columns, least
    )
    found = packings(chip, problem)
    assert found[0] == PLAIN
    cycles = [problem.cycles(chip, item) for item in found]
    assert cycles == sorted(cycles, reverse=True)
    weights = [problem.form(chip, item).weight_bytes(chip) for item in found]
    assert weights[1:] == sorted(weights[1:])
    for packing in found[1:]:
        form = problem.form(chip, packing)
        assert form.pixel_pack == packing.pixels <= least
        assert form.part_out_channels <= chip.array_size or packing.pixels == 1
        assert form.pixel_channels == outs
        if packing.pixels > 1:
            assert form.out_pitch == pixel_pitch(chip, outs)
            assert (form.parts, form.part_blocks) == (1, 1)


@pytest.mark.parametrize(
    ("problem", "fastest", "gain"),
    [(RESIDUAL, 2, 2.5), (STEM, 2, 1.8), (DEPTHWISE, 4, 4.0)],
)
def test_wide_arrays_take_several_pixels(
    problem: PackingProblem, fastest: int, gain: float
) -> None:
    best = packings(WIDE, problem)[-1]
    assert best.pixels == fastest
    assert problem.cycles(WIDE, PLAIN) > gain * problem.cycles(WIDE, best)


def test_a_stem_is_loaded_by_rows() -> None:
    assert packings(WIDE, STEM)[-1] == Packing(2, True, True)
    held = replace(STEM, loaded=None)
    assert not any(item.dense for item in packings(WIDE, held))


@pytest.mark.parametrize(("chip", "least"), [("edge16", 10), ("tiny8", 19)])
def test_narrow_arrays_gather_the_rows_of_a_stem(chip: str, least: int) -> None:
    """One vector a window, without gaps: as many steps as its elements need rows."""
    hardware = load_target(chip)
    problem = replace(STEM, out_channels=hardware.array_size)
    wide = replace(STEM, out_channels=64)
    best = packings(hardware, wide)[-1]
    form = wide.form(hardware, best)
    assert best.stack == 7
    assert form.row_blocks * form.kernel_steps == least
    assert wide.cycles(hardware, PLAIN) > 1.9 * wide.cycles(hardware, best)
    # With one block of results a gathered row is read once: gathering takes longer than it saves.
    assert problem.cycles(hardware, packings(hardware, problem)[-1]) <= problem.cycles(
        hardware, PLAIN
    )


def test_gathering_is_not_for_pixels_that_fill_the_array() -> None:
    for chip in SHIPPED:
        assert not any(item.stack for item in packings(chip, RESIDUAL))
        assert not any(item.stack for item in packings(chip, DEPTHWISE))


def test_a_narrow_last_tile_bounds_the_pixels() -> None:
    narrow = replace(RESIDUAL, least_columns=1)
    assert all(item.pixels == 1 for item in packings(WIDE, narrow))


@pytest.mark.parametrize(
    "change", [{"element_bytes": 2}, {"output_bytes": 4}, {"batched_weights": True}]
)
def test_only_codes_by_constant_weights_are_packed(change: dict[str, int]) -> None:
    problem = ConvProblem("conv", 1, 58, 58, 32, 56, 56, 16, (3, 3))
    tiling = ConvTiling(1, 16, 32, (3, 3), 8, 56)
    assert tiling.packings(WIDE, problem)[-1].pixels > 1
    assert tiling.packings(WIDE, replace(problem, **change)) == (PLAIN,)
