# pyright: basic
"""One set of buffers under search: its arrays, its memory of failed states, its orders."""

from __future__ import annotations

import random

import numpy as np

from tilewright.schedule import allocator_beam as beam
from tilewright.schedule import allocator_kernel as kernel
from tilewright.schedule.allocator_arrays import prepare, room_for
from tilewright.schedule.allocator_model import Problem

MEMORY = 1 << 18
"""Failed states remembered; 16 bytes each."""
TRAIL = 2_000_000
NOISE = 0.5


class Search:
    """A set of buffers that touches no other, and how far it is searched."""

    def __init__(self, problem: Problem, indices: list[int], places: list[int]) -> None:
        from tilewright.schedule.allocator import CONFIGURATIONS, ranks

        fixed = [i for i, b in enumerate(problem.buffers) if b.offset is not None]
        kept = {old: new for new, old in enumerate([*indices, *fixed])}
        part = Problem(
            tuple(problem.buffers[i] for i in kept),
            problem.capacity,
            tuple((kept[i], kept[j]) for i, j in problem.apart if i in kept and j in kept),
            problem.bank_bytes,
        )
        self.places = np.array(places, np.int64)
        self.arrays = prepare(part)
        self.orders = ranks(self.arrays, {order for _, order in CONFIGURATIONS})
        self.offsets = np.zeros(0, np.int64)
        self.state = self._state(room_for(self.arrays, problem.capacity))

    def _state(self, room: int) -> kernel.State:
        static = self.arrays.static
        count, sections = len(static.size), len(static.member_at) - 1
        depth = 20 * count + 1000

        def zeros(length: int) -> np.ndarray:
            return np.zeros(length, np.int64)

        control = zeros(kernel.CONTROL)
        control[kernel.C_ROOM] = room
        return kernel.State(
            control, zeros(count), zeros(count), zeros(count), zeros(count), zeros(sections),
            zeros(sections), zeros(sections), zeros(count), zeros(3 * count + 10),
            zeros(3 * count + 10), zeros(depth), zeros(depth), zeros(depth), zeros(depth),
            zeros(depth), np.zeros(2 * depth, np.int64), zeros(TRAIL), zeros(TRAIL),
            zeros(TRAIL), zeros(count + 2), zeros(count + 2), zeros(count + 2), zeros(count + 2),
            zeros(2 * MEMORY),
        )  # fmt: skip

    def _order(self, order: str, seed: int) -> np.ndarray:
        """Return the buffers in an order; with a seed, lives count as if a little shorter."""
        if not seed:
            return self.orders[order]
        draw = random.Random(seed)
        width = (self.arrays.upper - self.arrays.lower).astype(float)
        return np.argsort([-x * (1 - NOISE * draw.random()) for x in width], kind="stable")

    def run(self, configuration: tuple[int, str, int], room: int, budget, chunk: int) -> str:
        """Search from the root for `room` steps; return placed, infeasible or unknown."""
        problem, search = self._start(configuration)
        control = self.state.control
        first = last = int(control[kernel.C_STEPS])
        room = min(room, budget.limit - budget.used)
        status = int(control[kernel.C_STATUS])
        while status == kernel.RUNNING and last < first + room and not budget.over:
            status = kernel.search(problem, search, min(last + chunk, first + room))
            budget.used += int(control[kernel.C_STEPS]) - last
            last = int(control[kernel.C_STEPS])
        return self._outcome(status)

    def run_beam(self, configuration: tuple[int, str, int], width: int, budget) -> str:
        """Search by a beam of so many states; return placed, infeasible or unknown."""
        problem, search = self._start(configuration)
        control = self.state.control
        count, sections = len(self.arrays.static.size), len(self.state.total)
        status = int(control[kernel.C_STATUS])
        row = 3 * count + 3 * sections
        here, there = np.zeros((2, 2 * width, row), np.int64)
        values, next_values = np.full((2, 2 * width), beam.GONE)
        seen = np.zeros(4 * width, np.int64)
        beam.keep(search, here, values)
        for level in range(count):
            last = int(control[kernel.C_STEPS])
            if status != kernel.RUNNING or budget.over:
                break
            status = beam.advance(
                problem, search, here, values, there, next_values, seen, level,
                last + budget.limit - budget.used,
            )  # fmt: skip
            budget.used += int(control[kernel.C_STEPS]) - last
            here, there, values, next_values = there, here, next_values, values
        return self._outcome(status)

    def _start(self, configuration: tuple[int, str, int]) -> tuple[np.ndarray, np.ndarray]:
        """Go back to the root; return the addresses of problem and state."""
        mode, order, seed = configuration
        state, static = self.state, self.arrays.static
        state.control[kernel.C_MODE] = mode
        state.rank[self._order(order, seed)] = np.arange(len(static.size))
        problem, search = kernel.addresses(static), kernel.addresses(state)
        kernel.start(problem, search)
        return problem, search

    def _outcome(self, status: int) -> str:
        if status == kernel.SOLVED:
            self.offsets = self.state.low.copy()
            return "placed"
        return "infeasible" if status == kernel.INFEASIBLE else "unknown"
