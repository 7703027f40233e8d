"""The roofline of a layer: no way the compiler lays a tile on the array is faster."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.schedule.footprint import ConvForm, Packing, conv_form, pixel_pitch
from tilewright.schedule.mapping import Reduction, best_mapping, maxima
from tilewright.spec.hardware import Hardware, load_target

TARGETS = [load_target(name) for name in ("tiny8", "edge16", "tpu_v2")]
TARGETS.append(TARGETS[1].model_copy(update={"sram_word_bytes": 8}))
TARGETS.append(TARGETS[1].model_copy(update={"sram_word_bytes": 64, "ddr_bus_bytes": 32}))


@dataclass(frozen=True)
class Layer:
    """A convolution without padding, and the sizes of its tiles."""

    rows: int
    columns: int
    groups: int
    deep: int
    """Input channels of a group."""
    wide: int
    """Output channels of a group."""
    kernel: tuple[int, int]
    stride: int
    dilation: int
    element_bytes: int

    @property
    def inputs(self) -> int:
        """Pixels that windows read."""
        taps = {x * self.stride + k * self.dilation for x in range(self.columns)
                for k in range(self.kernel[1])}  # fmt: skip
        return (self.rows - 1 + self.kernel[0]) * len(taps)

    def reduction(self) -> Reduction:
        return Reduction(
            self.rows * self.columns,
            self.columns,
            self.groups * self.deep,
            self.groups * self.wide,
            self.groups,
            self.kernel,
            self.stride,
            self.dilation,
            self.inputs,
            self.element_bytes,
        )


layers = st.builds(
    Layer,
    st.integers(1, 12),
    st.integers(1, 20),
    st.sampled_from([1, 1, 2, 3, 8, 20, 48]),
    st.sampled_from([1, 1, 2, 3, 8, 24, 40]),
    st.sampled_from([1, 1, 2, 3, 8, 24, 40]),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([1, 1, 2]),
)


def cycles_of(hardware: Hardware, form: ConvForm, pixels: int) -> Fraction:
    """Return the cycles of a tile of whole, aligned vectors; the rest of a row left out."""
    item = form.element_bytes

    def reads(elements: int) -> int:
        return ceil(elements * item / hardware.sram_word_bytes)

    if form.diagonal:
        step, weights = reads(form.columns), 1
    else:
        full = form.row_blocks - 1
        step, weights = full * reads(form.rows) + reads(form.last_rows), form.vector
    passes = Fraction(pixels, form.pixel_pack)
    times = form.kernel_steps * form.blocks
    loads = times * weights * ceil(ceil(passes) / hardware.accumulator_rows)
    return max(passes * step * times, Fraction(loads))


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(TARGETS),
    layers,
    st.integers(1, 20),
    st.sampled_from([(False, False), (True, False), (True, True)]),
    st.integers(1, 48),
    st.integers(1, 3),
    st.booleans(),
)
def test_no_tile_is_faster(
    hardware: Hardware,
    layer: Layer,
    pixels: int,
    runs: tuple[bool, bool],
    part: int,
    cut: int,
    held: bool,
) -> None:
    packing = Packing(min(pixels, layer.columns), *runs)
    groups = min(part, layer.groups)
    # Channels are cut inside a group only where a tile is part of one group.
    wide = layer.wide if groups > 1 else ceil(layer.wide / cut)
    item = layer.element_bytes
    every = layer.groups * layer.deep
    pitch = every * item if packing.dense else pixel_pitch(hardware, every, item)
    if not held:
        pitch = groups * layer.deep * item if packing.dense else None
    total = Fraction(0)
    for first in range(0, layer.groups, groups):
        mine = min(groups, layer.groups - first)
        for begin in range(0, layer.wide, wide):
            outs = min(wide, layer.wide - begin) * mine
            form = conv_form(
                hardware, mine * layer.deep, outs, mine, layer.kernel, layer.dilation, pitch, item,
                True, layer.stride, None, packing,
            )  # fmt: skip
            total += cycles_of(hardware, form, layer.rows * layer.columns)
    if not held and groups < layer.groups:
        # What the tile holds apart from the rest of its pixels comes from DDR, in whole units.
        unit, run = hardware.ddr_bus_bytes, groups * layer.deep * item
        rest = layer.groups % groups * layer.deep * item
        units = layer.groups // groups * ceil(run / unit) + ceil(rest / unit)
        loaded = layer.inputs * units * unit / hardware.ddr_bytes_per_cycle
        total = max(total, Fraction(ceil(loaded)))
    assert best_mapping(hardware, layer.reduction()).cycles <= ceil(total)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12))
def test_maxima_by_doubling_or_one_by_one(kernel: int, stride: int) -> None:
    found = maxima(kernel, stride)
    assert found <= max(kernel - 1, 0)
    # Every new pixel of a window takes part in a comparison.
    assert found >= min(kernel - 1, stride - 1 if kernel > stride else kernel - 1)


def test_packing_is_found() -> None:
    hardware = load_target("edge16")
    # Two pixels of 8 channels to 8: 16 rows and 16 columns.
    assert best_mapping(hardware, Reduction(64, 8, 8, 8)).cycles == 32
    # Four of 4 channels, over the ends of rows too.
    assert best_mapping(hardware, Reduction(64, 2, 4, 4)).cycles == 16
    # As fp16, of which a word has 8: two words for the same 16 rows.
    assert best_mapping(hardware, Reduction(64, 8, 8, 8, element_bytes=2)).cycles == 64
