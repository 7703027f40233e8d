"""The placement solver against trying every offset, on tiny problems."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.schedule import allocator
from tilewright.schedule.allocator import Buffer, Problem, check, minimise, solve


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Up to six buffers in up to ten bytes, plain or with every extra there is."""
    capacity = draw(st.integers(1, 10))
    end = draw(st.integers(2, 7))
    rich = draw(st.booleans())
    buffers = [
        _buffer(draw, str(i), capacity, end, rich) for i in range(draw(st.integers(1, 6)))
    ]  # fmt: skip
    apart: tuple[tuple[int, int], ...] = ()
    if rich and len(buffers) > 1:
        index = st.integers(0, len(buffers) - 1)
        pairs = st.tuples(index, index).filter(lambda pair: pair[0] != pair[1])
        apart = tuple(draw(st.lists(pairs, max_size=3)))
    return Problem(tuple(buffers), capacity, apart, draw(st.integers(1, 4)))


def _buffer(draw: st.DrawFn, name: str, capacity: int, end: int, rich: bool) -> Buffer:
    lower = draw(st.integers(0, end - 1))
    upper = draw(st.integers(lower + 1, end))
    size = draw(st.integers(1, min(capacity, draw(st.sampled_from([2, 3, 5, 10])))))
    plain = Buffer(name, lower, upper, size)
    if not rich:
        return plain
    alignment = draw(st.sampled_from([1, 1, 1, 2, 3, 4]))
    offset = draw(st.integers(0, capacity)) // alignment * alignment
    gaps: list[tuple[int, int]] = []
    if upper - lower > 2 and draw(st.booleans()):
        first = draw(st.integers(lower + 1, upper - 2))
        gaps.append((first, draw(st.integers(first + 1, upper - 1))))
    regions: list[tuple[int, int]] = []
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        first = draw(st.integers(0, capacity - 1))
        regions.append((first, draw(st.integers(first + 1, capacity))))
    fixed = draw(st.sampled_from([False, False, False, True]))
    return replace(
        plain, alignment=alignment, offset=offset if fixed else None, gaps=tuple(gaps),
        regions=tuple(regions) or None,
    )  # fmt: skip


def possible(problem: Problem, offsets: tuple[int, ...] = ()) -> bool:
    """Try every offset of every buffer, with the definition of a placement as the judge."""
    count = len(offsets)
    part = Problem(
        problem.buffers[:count], problem.capacity,
        tuple(pair for pair in problem.apart if max(pair) < count), problem.bank_bytes,
    )  # fmt: skip
    if check(part, offsets):
        return False
    if count == len(problem.buffers):
        return True
    places = range(problem.capacity - problem.buffers[count].size + 1)
    return any(possible(problem, (*offsets, at)) for at in places)


@pytest.mark.parametrize("heuristics", [True, False])
@settings(max_examples=150)
@given(problem=problems())
def test_found_exactly_when_there_is_one(heuristics: bool, problem: Problem) -> None:
    rounds = allocator.GREEDY_ORDERS
    allocator.GREEDY_ORDERS = rounds if heuristics else ()
    try:
        answer = solve(problem)
    finally:
        allocator.GREEDY_ORDERS = rounds
    assert answer.status == ("placed" if possible(problem) else "infeasible")
    if answer.offsets is not None:
        assert not check(problem, answer.offsets)
        assert answer.bound <= answer.peak <= problem.capacity
    else:
        assert answer.reason


@settings(max_examples=100)
@given(problem=problems())
def test_the_least_capacity(problem: Problem) -> None:
    answer = minimise(problem)
    if answer.offsets is None:
        assert answer.status == "infeasible"
        assert not possible(problem)
        return
    assert not check(replace(problem, capacity=max(answer.peak, 1)), answer.offsets)
    assert answer.optimal
    assert answer.peak <= 1 or not possible(replace(problem, capacity=answer.peak - 1))
