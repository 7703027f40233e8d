"""Rolling buffers: every read finds the rows it asks for, whatever was moved before."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.schedule.rolling import Event, least_capacity, roll

FILL = -1


@st.composite
def streams(draw: st.DrawFn) -> tuple[int, list[Event]]:
    """Return the rows of an image and the events of a windowed reader behind its writer."""
    rows = draw(st.integers(1, 40))
    stride, extent = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    before = draw(st.integers(0, extent - 1))
    results = max(1, (rows + 2 * before - extent) // stride + 1)
    step, lag = draw(st.integers(1, 9)), draw(st.integers(0, 2))
    events: list[Event] = []
    written = 0
    reads: list[Event] = []
    for first in range(0, results, step):
        last = min(results, first + step)
        low, high = first * stride - before, (last - 1) * stride - before + extent
        until = min(rows, max(written, high))
        if until > written:
            events.append(Event("write", written, until))
            written = until
        reads.append(Event("read", low, high))
        if len(reads) > lag:
            events.append(reads.pop(0))
    return rows, [*events, *reads]


@settings(max_examples=300, deadline=None)
@given(streams(), st.integers(0, 5))
def test_reads_find_their_rows(stream: tuple[int, list[Event]], extra: int) -> None:
    """The buffer, acted out: what is read is what was written there, or padding."""
    rows, events = stream
    capacity = least_capacity(rows, events) + extra
    places = roll(rows, events, capacity)
    assert places is not None
    buffer: list[int | None] = [None] * capacity
    for event, place in zip(events, places, strict=True):
        for action in place.actions:
            if action.kind == "fill":
                buffer[action.target : action.target + action.count] = [FILL] * action.count
            else:
                assert action.source >= action.target + action.count
                buffer[action.target : action.target + action.count] = buffer[
                    action.source : action.source + action.count
                ]
        assert place.position + event.last - event.first <= capacity
        for row in range(event.first, event.last):
            at = place.position + row - event.first
            if event.kind == "write":
                buffer[at] = row
            else:
                assert buffer[at] == (row if 0 <= row < rows else FILL)


def test_too_little_is_refused() -> None:
    """One row less than the least does not do."""
    events = [Event("write", 0, 4), Event("read", -1, 4), Event("write", 4, 8)]
    events.append(Event("read", 2, 9))
    least = least_capacity(8, events)
    assert roll(8, events, least) is not None
    assert roll(8, events, least - 1) is None


def test_rows_out_of_order() -> None:
    """Gaps in what is written, and reads of what is not there, are faults of the caller."""
    with pytest.raises(ValueError, match="after row"):
        roll(8, [Event("write", 1, 2)], 8)
    with pytest.raises(ValueError, match="are read"):
        roll(8, [Event("write", 0, 2), Event("read", 0, 3)], 8)
