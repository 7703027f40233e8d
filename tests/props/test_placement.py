"""Properties of placing all buffers of a function together."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.schedule.placement import Item, TileBuffer, TileDoesNotFit, place_network
from tilewright.schedule.tiling import packed_bytes
from tilewright.spec.hardware import Hardware, load_target

TINY = load_target("tiny8")
ROLES = ("input", "output", "weights", "bias", "held", "scalar")


@st.composite
def item_lists(draw: st.DrawFn) -> list[Item]:
    """Buffers of a made-up function, some of which must be or had better be apart."""
    count = draw(st.integers(1, 16))
    largest = draw(st.sampled_from([500, 4000, 16000]))
    items: list[Item] = []
    for index in range(count):
        first = draw(st.integers(0, 12))
        others = [f"b{other}" for other in range(count) if other != index]
        names = (
            st.lists(st.sampled_from(others), max_size=2, unique=True) if others else st.just([])
        )
        items.append(
            Item(
                f"b{index}", draw(st.sampled_from(ROLES)), draw(st.integers(0, largest)),
                draw(st.integers(1, 2)), first, first + draw(st.integers(0, 4)),
                tuple(draw(names)) if draw(st.booleans()) else (), tuple(draw(names)),
                draw(st.one_of(st.none(), st.integers(0, first))),
            )
        )  # fmt: skip
    return items


def banks(hardware: Hardware, low: int, size: int) -> set[int]:
    """Return the banks of some bytes."""
    return set(range(low // hardware.bank_size, (low + size - 1) // hardware.bank_size + 1))


def live_bytes(hardware: Hardware, items: list[Item]) -> int:
    """Return the most bytes alive at one position, whole words counted."""
    word = hardware.sram_word_bytes
    return max(
        sum(
            item.slots * -(-item.size_bytes // word) * word
            for item in items
            if item.first <= position <= item.last
        )
        for position in {item.first for item in items}
    )


@given(item_lists())
def test_what_is_alive_together_never_overlaps_and_banks_stay_apart(items: list[Item]) -> None:
    placed = place_network(TINY, items)
    if isinstance(placed, TileDoesNotFit):
        assert placed.needed_bytes > TINY.sram_size
        at = [item for item in items if item.first <= placed.position <= item.last]
        assert live_bytes(TINY, at) == live_bytes(TINY, items)
        return
    spans: list[tuple[Item, int]] = []
    for item in items:
        assert len(placed[item.name]) == item.slots
        for address in placed[item.name]:
            assert address % TINY.sram_word_bytes == 0
            assert 0 <= address <= address + item.size_bytes <= TINY.sram_size
            spans.append((item, address))
    for (one, low), (two, low2) in itertools.combinations(spans, 2):
        if not one.size_bytes or not two.size_bytes:
            continue
        if one.first > two.last or two.first > one.last:
            continue
        assert low + one.size_bytes <= low2 or low2 + two.size_bytes <= low
        if two.name in one.apart or one.name in two.apart:
            first = banks(TINY, low, one.size_bytes)
            assert not first & banks(TINY, low2, two.size_bytes)


@given(item_lists())
def test_the_answer_is_the_same_again_and_wishes_do_not_decide_it(items: list[Item]) -> None:
    placed = place_network(TINY, items)
    assert place_network(TINY, items) == placed
    plain = [replace(item, beside=(), early=None) for item in items]
    fits = not isinstance(place_network(TINY, plain), TileDoesNotFit)
    assert fits is not isinstance(placed, TileDoesNotFit)


@given(
    st.lists(
        st.tuples(st.sampled_from(ROLES), st.integers(1, 9000), st.integers(1, 2)), min_size=1,
        max_size=6,
    )
)  # fmt: skip
def test_what_a_tiler_fits_is_placed(tiles: list[tuple[str, int, int]]) -> None:
    buffers = [
        TileBuffer(f"b{i}", role, size, slots) for i, (role, size, slots) in enumerate(tiles)
    ]
    weights = tuple(buffer.name for buffer in buffers if buffer.role == "weights")
    items = [
        Item(b.name, b.role, b.size_bytes, b.slots, 3, 3, () if b.name in weights else weights)
        for b in buffers
    ]
    if packed_bytes(TINY, buffers) <= TINY.sram_size:
        assert not isinstance(place_network(TINY, items), TileDoesNotFit)


def test_more_bytes_than_there_are_is_refused_at_the_largest_instant() -> None:
    third = TINY.sram_size // 3 + TINY.sram_word_bytes
    items = [
        Item("a", "held", third, 1, 0, 2),
        Item("b", "held", third, 1, 1, 2),
        Item("c", "input", third, 1, 2, 3),
    ]
    answer = place_network(TINY, items)
    assert isinstance(answer, TileDoesNotFit)
    assert answer.needed_bytes >= 3 * third
    assert answer.position == 2
    assert str(answer.needed_bytes) in answer.reason


def test_banks_that_cannot_be_apart_are_refused() -> None:
    # Each of the two touches every bank but one at least.
    most = TINY.sram_size - TINY.bank_size
    items = [Item("x", "input", most, 1, 0, 0, ("w",)), Item("w", "weights", most, 1, 0, 0)]
    assert isinstance(place_network(TINY, items), TileDoesNotFit)
    small = [replace(items[0], size_bytes=8), replace(items[1], size_bytes=most)]
    assert not isinstance(place_network(TINY, small), TileDoesNotFit)
    tight = [
        Item("x", "input", TINY.sram_size // 2 + 8, 1, 0, 0, ("w",)),
        Item("w", "weights", TINY.sram_size // 2 - 8, 1, 0, 0),
    ]
    answer = place_network(TINY, tight)
    assert isinstance(answer, TileDoesNotFit)
    assert answer.needed_bytes > TINY.sram_size


def test_wishes_are_kept_while_there_is_room() -> None:
    bank = TINY.bank_size
    items = [
        Item("x", "input", 100, 2, 2, 2, ("w",), ("y",), 1),
        Item("y", "output", 100, 1, 2, 2),
        Item("w", "weights", 100, 1, 2, 2, (), (), 1),
        Item("before", "weights", 100, 1, 1, 1),
    ]
    placed = place_network(TINY, items)
    assert not isinstance(placed, TileDoesNotFit)
    used = [*placed["x"], *placed["y"], *placed["w"]]
    assert len({address // bank for address in used}) == 4
    # Alive early: not where the weights before it lie.
    assert abs(placed["w"][0] - placed["before"][0]) >= 100


def test_names_must_be_there_once() -> None:
    with pytest.raises(ValueError, match="one name"):
        place_network(TINY, [Item("a", "held", 8, 1, 0, 0), Item("a", "held", 8, 1, 1, 1)])
    with pytest.raises(ValueError, match="not there"):
        place_network(TINY, [Item("a", "held", 8, 1, 0, 0, ("b",))])
