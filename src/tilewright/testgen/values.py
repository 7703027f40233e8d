"""Interesting values: ends of ranges, primes, neighbours of powers of two."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")

PRIMES = (
    2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97,
    101, 127, 131, 149, 173, 191, 211, 251, 257, 383, 509, 521, 769, 1021, 1031,
)  # fmt: skip


def is_prime(value: int) -> bool:
    """Tell whether a small number is prime."""
    return value > 1 and all(value % factor for factor in range(2, int(value**0.5) + 1))


class Pick:
    """Seeded choices."""

    def __init__(self, seed: int | str) -> None:
        self.rng = random.Random(seed)

    def chance(self, probability: float) -> bool:
        """Return true with that probability."""
        return self.rng.random() < probability

    def of(self, *options: T) -> T:
        """Return one of the options."""
        return self.rng.choice(options)

    def one(self, options: Sequence[T]) -> T:
        """Return one of the options."""
        return self.rng.choice(options)

    def between(self, low: int, high: int) -> int:
        """Return a number of `low .. high`, both included."""
        return self.rng.randint(low, max(low, high))

    def size(self, high: int, low: int = 1) -> int:
        """Return a count: an end of the range, a prime, beside a power of two, or any."""
        if high <= low:
            return low
        kind = self.rng.random()
        if kind < 0.12:
            return low
        if kind < 0.24:
            return high
        if kind < 0.55:
            options = [value for value in PRIMES if low <= value <= high]
            if options:
                return self.rng.choice(options)
        if kind < 0.75:
            power = 1 << self.rng.randint(0, high.bit_length() - 1)
            return min(high, max(low, power + self.rng.choice((-1, 0, 0, 1))))
        return low + int((high - low + 1) ** self.rng.random()) - 1

    def split(self, total: int, parts: int) -> list[int]:
        """Return `parts` counts whose product is at most `total`, in random order."""
        counts: list[int] = []
        left = max(1, total)
        for _ in range(parts):
            count = self.size(max(1, left)) if left > 1 else 1
            counts.append(count)
            left //= count
        self.rng.shuffle(counts)
        return counts

    def write_strides(self, counts: Sequence[int], run: int, slack: int) -> list[int]:
        """Return strides (one a count) whose runs never overlap, in any nesting order."""
        order = list(range(len(counts)))
        if self.chance(0.3):
            self.rng.shuffle(order)
        strides = [0] * len(counts)
        extent = run
        for dim in order:
            gap = 0 if self.chance(0.4) else self.between(0, slack)
            strides[dim] = extent + gap
            if counts[dim] > 1:
                extent += (counts[dim] - 1) * strides[dim]
        return strides

    def read_strides(self, counts: Sequence[int], run: int, slack: int) -> list[int]:
        """Return strides that may be zero, overlap or skip."""
        if self.chance(0.5):
            return self.write_strides(counts, run, slack)
        return [self.of(0, 1, run, run + 1, max(0, run - 1), self.between(0, run + slack))
                for _ in counts]  # fmt: skip


assert all(is_prime(value) for value in PRIMES), "only primes"
assert all(a < b for a, b in pairwise(PRIMES)), "sorted"
