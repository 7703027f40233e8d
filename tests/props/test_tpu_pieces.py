"""Properties of the pieces the tpu lowering is made of."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.schedule.ddr import Lifetime, place_ddr
from tilewright.schedule.footprint import conv_form, pixel_pitch
from tilewright.spec.hardware import load_target
from tilewright.spec.program import MAC, VEC
from tilewright.transforms.tpu.constants import pack_weights
from tilewright.transforms.tpu.instruction import ENGINES, Instr, Region
from tilewright.transforms.tpu.synchronize import semaphore, synchronize
from tilewright.transforms.tpu.views import Loop, fit_loops, merge_loops

TINY = load_target("tiny8")


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 20), st.integers(0, 20)), max_size=25)
)
def test_tensors_alive_together_never_share_bytes(items: list[tuple[int, int, int]]) -> None:
    tensors = [
        Lifetime(f"t{index}", size, min(a, b), max(a, b))
        for index, (size, a, b) in enumerate(items)
    ]
    offsets, total = place_ddr(tensors, 64)
    for one in tensors:
        assert offsets[one.name] % 64 == 0
        assert offsets[one.name] + one.size_bytes <= total
    for one, two in itertools.combinations(tensors, 2):
        if one.first <= two.last and two.first <= one.last:
            low, high = offsets[one.name], offsets[two.name]
            assert low + one.size_bytes <= high or high + two.size_bytes <= low


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 50)), max_size=5),
    st.lists(st.integers(1, 16), min_size=1, max_size=3),
)
def test_merging_and_cutting_loops_visits_the_same_places(
    nest: list[tuple[int, int]], limits: list[int]
) -> None:
    while np.prod([count for count, _ in nest]) > 3000:
        nest = nest[1:]
    loops = [Loop(count, (step, 2 * step)) for count, step in nest]

    def places(base: tuple[int, ...], loops: list[Loop]) -> list[tuple[int, ...]]:
        found = [base]
        for loop in loops:
            found = [
                tuple(p + s * i for p, s in zip(place, loop.steps, strict=True))
                for place in found
                for i in range(loop.count)
            ]
        return found

    expected = sorted(places((0, 0), loops))
    pieces = fit_loops(merge_loops(loops), limits, 2)
    seen: list[tuple[int, ...]] = []
    for offset, piece in pieces:
        assert len(piece) == len(limits)
        assert all(loop.count <= limit for loop, limit in zip(piece, limits, strict=True))
        seen += places(offset, piece)
    assert sorted(seen) == expected


@settings(deadline=None)
@given(
    group=st.integers(1, 6),
    group_in=st.integers(1, 11),
    group_out=st.integers(1, 19),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    seed=st.integers(0, 1000),
)
def test_packed_weights_give_the_convolution_of_one_pixel(
    group: int, group_in: int, group_out: int, kernel: tuple[int, int], seed: int
) -> None:
    """Read the packed rows as `mac_conv` does and compare with the plain sum."""
    rng = np.random.default_rng(seed)
    k_h, k_w = kernel
    channels = group * group_in
    weights = rng.integers(-127, 128, (group * group_out, group_in, k_h, k_w), np.int8)
    image = rng.integers(-128, 128, (k_h, k_w, channels), np.int8)
    pitch = pixel_pitch(TINY, channels)
    form = conv_form(TINY, channels, group * group_out, group, kernel, 1)
    packed = pack_weights(form, weights, pitch).view(np.int8)
    packed = packed.reshape(form.parts, form.part_blocks, form.weight_rows, form.weight_pitch)
    padded = np.zeros((k_h, k_w, pitch), np.int8)
    padded[:, :, :channels] = image

    expected = np.zeros(group * group_out, np.int64)
    for o in range(group * group_out):
        part = image[:, :, o // group_out * group_in :][:, :, :group_in]
        expected[o] = (part.transpose(2, 0, 1).astype(int) * weights[o].astype(int)).sum()

    got = np.zeros_like(expected)
    for part in range(form.parts):
        for block in range(form.part_blocks):
            first = part * form.part_out_channels + block * form.columns
            last = min(first + form.columns, (part + 1) * form.part_out_channels)
            rows = packed[part, block].astype(np.int64)
            if form.diagonal:
                vectors = padded[:, :, first:last].reshape(k_h * k_w, -1)
                got[first:last] = (vectors * rows[:, : last - first]).sum(axis=0)
                continue
            start = part * form.part_in_channels
            if form.merge_kernel_row:
                vector = padded.reshape(k_h, -1)
            else:
                vector = image.reshape(k_h * k_w, channels)[:, start : start + form.vector]
            got[first:last] = vector.reshape(-1).astype(np.int64) @ rows[:, : last - first]
    np.testing.assert_array_equal(got, expected)


@st.composite
def programs(draw: st.DrawFn) -> list[Instr]:
    """Return instructions on random engines touching random SRAM ranges."""
    result: list[Instr] = []
    for _ in range(draw(st.integers(1, 30))):
        engine = draw(st.integers(0, 5))
        name = {MAC: "mac_conv", VEC: "vec_copy"}.get(engine, "dma_load")
        fields = {"channel": engine} if engine < MAC else {"push": 0} if engine == MAC else {}
        regions: list[list[Region]] = []
        for _ in range(2):
            low = draw(st.integers(0, 40)) * 8
            regions.append([Region("sram", low, low + 8 * draw(st.integers(1, 5)))])
        result.append(Instr(name, dict(fields), "", regions[0], regions[1]))
    return result


@settings(deadline=None)
@given(programs(), st.integers(0, 2**32 - 1))
def test_semaphores_order_every_conflict_in_any_interleaving(
    program: list[Instr], seed: int
) -> None:
    """Run engines at random; an instruction may only run after all it conflicts with."""
    synchronize(program, TINY, 1)
    rng = np.random.default_rng(seed)
    queues: list[list[int]] = [[] for _ in range(ENGINES)]
    for index, instr in enumerate(program):
        queues[instr.engine].append(index)
    counts = [0] * 32
    done: set[int] = set()
    while any(queues):
        ready: list[int] = []
        for engine, queue in enumerate(queues):
            if queue:
                mask = program[queue[0]].fields.get("wait", 0)
                if all(counts[bit] > 0 for bit in range(32) if mask >> bit & 1):
                    ready.append(engine)
        assert ready, "deadlock"
        index = queues[int(rng.choice(ready))].pop(0)
        instr = program[index]
        for earlier in range(index):
            other = program[earlier]
            if _conflict(other, instr):
                assert earlier in done, (earlier, index)
        for bit in range(32):
            counts[bit] -= instr.fields.get("wait", 0) >> bit & 1
            counts[bit] += instr.fields.get("signal", 0) >> bit & 1
        done.add(index)


def _conflict(one: Instr, two: Instr) -> bool:
    pairs = itertools.chain(
        itertools.product(one.writes, two.reads),
        itertools.product(one.reads, two.writes),
        itertools.product(one.writes, two.writes),
    )
    return any(a.low < b.high and b.low < a.high for a, b in pairs)


def test_every_pair_of_engines_has_a_semaphore_of_its_own() -> None:
    pairs = [(a, b) for a in range(ENGINES) for b in range(ENGINES) if a != b]
    numbers = {semaphore(a, b) for a, b in pairs}
    assert len(numbers) == 30
    assert numbers <= set(range(30))
