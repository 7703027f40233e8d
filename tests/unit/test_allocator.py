"""The placement solver: known answers, the same every time, and the definition itself."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tilewright.diagnostics import TilewrightError
from tilewright.schedule import allocator
from tilewright.schedule.allocator import Buffer, Problem, check, minimise, solve
from tilewright.schedule.allocator_csv import read_table
from tilewright.schedule.allocator_search import Search


def pieces(seed: int, count: int) -> Problem:
    """Cut 64 bytes x 64 times into buffers, so that they fit without a byte to spare."""
    draw = random.Random(seed)
    found = [(0, 64, 0, 64)]
    while len(found) < count:
        t0, t1, m0, m1 = found.pop(draw.randrange(len(found)))
        if t1 - t0 > 1 and (m1 - m0 < 2 or draw.random() < 0.5):
            at = draw.randint(t0 + 1, t1 - 1)
            found += [(t0, at, m0, m1), (at, t1, m0, m1)]
        elif m1 - m0 > 1:
            at = draw.randint(m0 + 1, m1 - 1)
            found += [(t0, t1, m0, at), (t0, t1, at, m1)]
        else:
            found.append((t0, t1, m0, m1))
    draw.shuffle(found)
    buffers = [Buffer(str(i), t0, t1, m1 - m0) for i, (t0, t1, m0, m1) in enumerate(found)]
    return Problem(tuple(buffers), 64)


@pytest.mark.parametrize("seed", range(6))
def test_perfect_packings_are_found(seed: int) -> None:
    problem = pieces(seed, 40)
    answer = solve(problem)
    assert answer.offsets is not None
    assert not check(problem, answer.offsets)
    assert answer.optimal
    assert answer.bound == answer.peak == 64
    short = solve(replace(problem, capacity=63))
    assert (short.status, short.method) == ("infeasible", "bound")


def test_the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "GREEDY_ORDERS", ())
    problem = pieces(3, 60)
    first = solve(problem)
    assert first.method == "search"
    assert first == solve(problem)
    # Looks at the clock in other places change nothing.
    monkeypatch.setattr(allocator, "CHUNK", 7)
    assert first == solve(problem, seconds=1000)


def test_a_budget_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "GREEDY_ORDERS", ())
    problem = pieces(3, 60)
    needed = solve(problem).steps
    assert solve(problem, steps=needed).status == "placed"
    short = solve(problem, steps=needed - 1)
    assert (short.status, short.steps) == ("unknown", needed - 1)
    assert solve(problem, seconds=0).status == "unknown"


@pytest.mark.parametrize("mode", [0, 1])
def test_a_beam_places_what_fits_exactly(mode: int) -> None:
    problem = pieces(3, 30)
    everything = list(range(30))
    budget = allocator.Budget(100_000, None)
    search = Search(problem, everything, everything)
    assert search.run_beam((mode, "WA", 0), 100, budget) == "placed"
    assert not check(problem, [int(at) for at in search.offsets])
    used = budget.used
    # One step less does not do, and the same search taken up again finds the same.
    short = allocator.Budget(used - 1, None)
    assert search.run_beam((mode, "WA", 0), 100, short) == "unknown"
    assert short.used == used - 1
    first = search.offsets
    assert search.run_beam((mode, "WA", 0), 100, allocator.Budget(used, None)) == "placed"
    assert first.tolist() == search.offsets.tolist()


def test_a_beam_gives_up_on_what_cannot_be() -> None:
    """Three banks are wanted, two are there: the beam ends, and says nothing."""
    buffers = tuple(Buffer(str(i), i, i + 1, 2) for i in range(3))
    problem = Problem(buffers, 8, ((0, 1), (0, 2), (1, 2)), 4)
    search = Search(problem, [0, 1, 2], [0, 1, 2])
    budget = allocator.Budget(1000, None)
    assert search.run_beam((0, "WA", 0), 10, budget) == "unknown"
    assert 0 < budget.used < 1000


def test_many_independent_sets() -> None:
    """Far more buffers than one search could take: each set is decided by itself."""
    parts = [pieces(seed, 24) for seed in range(100)]
    buffers = [
        Buffer(f"{k}.{item.name}", item.lower + 100 * k, item.upper + 100 * k, item.size)
        for k, part in enumerate(parts)
        for item in part.buffers
    ]
    problem = Problem(tuple(buffers), 64)
    answer = solve(problem)
    assert answer.offsets is not None
    assert not check(problem, answer.offsets)


def test_nothing_to_place() -> None:
    answer = solve(Problem((), 8))
    assert (answer.status, answer.offsets, answer.peak) == ("placed", (), 0)
    fixed = Problem((Buffer("a", 0, 2, 4, offset=4),), 8)
    assert solve(fixed).offsets == (4,)
    assert minimise(fixed).peak == 8
    assert minimise(fixed).optimal


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (Problem((Buffer("a", 0, 2, 4, offset=6),), 8), "ends beyond the capacity"),
        (
            Problem((Buffer("a", 0, 2, 4, offset=0), Buffer("b", 1, 3, 4, offset=3)), 8),
            "two fixed buffers overlap at 3",
        ),
        (Problem((Buffer("a", 0, 2, 4, offset=0, regions=((4, 8),)),), 8), "outside its regions"),
        (Problem((Buffer("a", 0, 2, 4, regions=((0, 3),)),), 8), "`a` has no legal offset"),
        (
            Problem(
                (Buffer("a", 0, 1, 1, offset=0), Buffer("b", 1, 2, 1, offset=3)), 8, ((0, 1),), 4
            ),
            "fixed in the same bank",
        ),
        (Problem((Buffer("a", 0, 2, 4), Buffer("b", 1, 2, 5)), 8), "need 9 bytes, 8 are there"),
    ],
)
def test_reasons(problem: Problem, reason: str) -> None:
    answer = solve(problem)
    assert answer.status == "infeasible"
    assert reason in answer.reason


def test_the_definition_finds_every_fault() -> None:
    a, b = Buffer("a", 0, 4, 4), Buffer("b", 3, 5, 4)
    problem = Problem((a, b), 8, ((0, 1),), 4)
    assert not check(problem, (0, 4))
    assert check(problem, (0, 3)) == ["`b` and `a` overlap", "`a` and `b` share a bank"]
    assert "leaves the memory" in check(problem, (0, 5))[0]
    assert "leaves the memory" in check(problem, (-4, 4))[0]
    assert not check(Problem((a, replace(b, lower=4)), 8), (0, 0))
    assert not check(Problem((replace(a, gaps=((3, 4),)), b), 8), (0, 0))
    assert "not aligned" in check(Problem((replace(a, alignment=4),), 8), (2,))[0]
    assert "not at 4" in check(Problem((replace(a, offset=4),), 8), (2,))[0]
    assert "regions" in check(Problem((replace(a, regions=((0, 5), (5, 8))),), 8), (3,))[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Problem((), 0),
        lambda: Problem((Buffer("a", 0, 0, 1),), 8),
        lambda: Problem((Buffer("a", 0, 1, 0),), 8),
        lambda: Problem((Buffer("a", 0, 1, 1),), 8, ((0, 0),)),
        lambda: Problem((Buffer("a", 0, 1, 1),), 8, (), 0),
    ],
)
def test_what_is_no_problem(make: object) -> None:
    assert callable(make)
    with pytest.raises(TilewrightError, match="cannot be placed"):
        make()


def test_table_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id, lower,upper,size\na,0,2,4\nb,1,3,4\n", "utf-8")
    table = read_table(path, 8)
    answer = solve(table.problem(8, 1))
    assert answer.offsets is not None
    table.write(path, answer.offsets)
    again = read_table(path, 8)
    assert [item.offset for item in again.buffers] == list(answer.offsets)
    assert solve(again.problem(8, 1)).offsets == answer.offsets
