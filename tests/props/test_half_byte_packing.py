"""Weights of 4 bits lie as bytes would, two in each; sizes of tiles are those of what is packed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.diagnostics import TilewrightError
from tilewright.schedule.footprint import PLAIN, ConvForm, Packing, conv_form, pixel_pitch
from tilewright.spec.hardware import Hardware, load_target
from tilewright.transforms.tpu.constants import pack_weights, two_a_byte

CHIPS = [load_target(name) for name in ("tiny8", "edge16", "tpu_v2")]
COUNTS = st.one_of(st.integers(1, 40), st.sampled_from([1, 3, 17, 127, 128, 129, 255, 257]))
PACKINGS = [PLAIN, Packing(2, True), Packing(3, False), Packing(1, True), Packing(1, True, True)]


def rows_of(form: ConvForm, packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return packed.reshape(form.parts, form.part_blocks, form.weight_rows, form.weight_pitch)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(CHIPS),
    COUNTS,
    COUNTS,
    st.sampled_from(["plain", "depthwise", "grouped"]),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from(PACKINGS),
    st.integers(0, 2**32 - 1),
)
def test_nibbles_lie_in_the_order_of_bytes(
    chip: Hardware, ins: int, outs: int, kind: str, kernel: tuple[int, int], packing: Packing,
    seed: int,
) -> None:  # fmt: skip
    group = {"plain": 1, "depthwise": ins, "grouped": 3}[kind]
    if kind == "depthwise":
        outs = ins
    elif kind == "grouped":
        ins, outs = min(ins, 60) * 3, min(outs, 60) * 3
    form = conv_form(chip, ins, outs, group, kernel, 1, packing=packing, half_bytes=True)
    wide = conv_form(chip, ins, outs, group, kernel, 1, packing=packing)
    assert replace(form, half_bytes=False) == wide
    codes = np.random.default_rng(seed).integers(-8, 8, (outs, ins // group, *kernel), np.int8)
    pitch = pixel_pitch(chip, ins)
    packed, bytewise = pack_weights(form, codes, pitch), pack_weights(wide, codes, pitch)
    assert packed.size <= form.weight_bytes(chip) <= wide.weight_bytes(chip)
    assert form.filled_bytes <= packed.size
    pairs, single = rows_of(form, packed), rows_of(wide, bytewise).view(np.int8)
    columns = min(form.part_out_channels, form.columns)
    nibbles = np.stack((pairs & 15, pairs >> 4), axis=-1).reshape(*pairs.shape[:-1], -1)
    signed = (nibbles ^ 8).astype(np.int8) - 8
    np.testing.assert_array_equal(signed[..., :columns], single[..., :columns])
    assert not signed[..., columns:].any()


@given(st.integers(1, 600), st.sampled_from(CHIPS))
def test_rows_are_whole_bytes_and_padding_is_counted(outs: int, chip: Hardware) -> None:
    form = conv_form(chip, 8, outs, 1, (1, 1), 1, half_bytes=True)
    columns = min(outs, chip.array_size)
    assert form.row_bytes(columns) == (columns + 1) // 2
    assert form.weight_pitch % 4 == 0
    assert 0 <= form.weight_pitch - form.row_bytes(columns) < 4
    stored = form.blocks * form.weight_rows * form.weight_pitch
    assert form.filled_bytes == (8 * outs + 1) // 2 <= stored
    if outs % (2 * chip.array_size) == 0:
        assert form.filled_bytes == stored


@pytest.mark.parametrize("code", [8, -9, 127])
def test_codes_that_do_not_fit_are_refused(code: int) -> None:
    with pytest.raises(TilewrightError, match=r"weights of 4 bits are -8\.\.7"):
        two_a_byte(np.array([0, code], np.int8))
    np.testing.assert_array_equal(two_a_byte(np.array([1, -8, 7, -1], np.int8)), [0x81, 0xF7])
