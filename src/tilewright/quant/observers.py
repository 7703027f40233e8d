"""Streaming observation of value ranges: memory does not depend on how many samples are seen.

Each value keeps its largest magnitude and a histogram of magnitudes. When a sample exceeds the
histogram's range, the range doubles and neighbouring bins merge, so that nothing is lost and the
order of samples matters only through the bin width, which stays below 1/2048 of the maximum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import TilewrightError

BINS = 4096
"""Bins of the histogram; the maximum lies in the upper half, so at least 2048 are in use."""

LEVELS = 128
"""Magnitudes an int8 code can hold."""

KL_CANDIDATES = 256
MSE_CANDIDATES = 200

METHODS = ("max", "kl", "mse", "percentile")

PERCENTILE = 99.99
"""Share of magnitudes (zeros not counted) that `percentile` represents without clipping."""

Histogram = npt.NDArray[np.int64]


class Observer:
    """Range of one value, seen sample by sample."""

    def __init__(self, name: str, histogram: bool = True) -> None:
        self.name = name
        self.maximum = 0.0
        self.zeros = 0
        """Exact zeros: any scale represents them, so they do not count in the histogram."""
        self.count = 0
        self.bins: Histogram | None = np.zeros(BINS, np.int64) if histogram else None
        self.range = 0.0
        """Upper end of the histogram; bin `i` holds magnitudes from `i * range / BINS`."""

    def update(self, values: npt.NDArray[np.floating]) -> None:
        """Take in one sample's values.

        Raises:
            TilewrightError: E0301, a value is not finite.
        """
        if values.size == 0:
            return
        magnitude = np.abs(values, dtype=np.float32).ravel()
        largest = float(magnitude.max())
        if not math.isfinite(largest):
            raise TilewrightError(
                "E0301",
                f'"{self.name}" is not finite for a calibration sample',
                hint="check the sample and the model's preprocessing",
            )
        self.maximum = max(self.maximum, largest)
        self.count += values.size
        if self.bins is None or largest == 0.0:
            self.zeros += values.size if largest == 0.0 else 0
            return
        self._grow(largest)
        index = (magnitude * np.float32(BINS / self.range)).astype(np.int32)
        np.minimum(index, BINS - 1, out=index)
        self.bins += np.bincount(index, minlength=BINS)
        zeros = int(np.count_nonzero(magnitude == 0))
        self.bins[0] -= zeros
        self.zeros += zeros

    def _grow(self, largest: float) -> None:
        assert self.bins is not None
        if self.range == 0.0:
            # A little above, so that the largest value does not sit on the end.
            self.range = max(largest * (1 + 2.0**-10), 2.0**-100)
        while largest >= self.range:
            merged = self.bins.reshape(-1, 2).sum(axis=1)
            self.bins = np.concatenate([merged, np.zeros(BINS // 2, np.int64)])
            self.range *= 2.0

    def used(self) -> tuple[Histogram, float]:
        """Return the bins up to the maximum, and the width of one."""
        assert self.bins is not None
        width = self.range / BINS
        last = min(int(self.maximum / width) + 1, BINS) if width else 0
        return self.bins[:last], width


@dataclass(frozen=True)
class Choice:
    """A threshold and how it was chosen."""

    threshold: float
    chosen: str
    """Rule that won: "max", "kl", "mse" or "percentile"."""
    maximum: float


def choose(observer: Observer, method: str) -> Choice:
    """Return the threshold for a value by `method`.

    - `max`: the largest magnitude seen.
    - `kl`: the clipping point whose 128-level histogram diverges least from the observed one, kept
      only if its expected squared error does not exceed that of `max`. (Divergence weighs rare
      peaks by how often they occur, not by what clipping them costs.) Where it is refused,
      `percentile` is taken under the same condition, and `mse` where that is refused too.
    - `mse`: the clipping point of least expected squared error.
    - `percentile`: 99.99 % of the magnitudes other than zero are not clipped.
    """
    maximum = observer.maximum
    if method == "max" or maximum == 0.0 or observer.bins is None:
        return Choice(maximum, "max", maximum)
    bins, width = observer.used()
    if bins.sum() == 0:
        return Choice(maximum, "max", maximum)
    if method == "kl":
        candidates = [min(kl_threshold(bins, width), maximum), _percentile(bins, width, maximum)]
        errors = squared_errors(bins, width, np.array([*candidates, maximum]))
        for candidate, error, rule in zip(candidates, errors, ("kl", "percentile"), strict=False):
            if error <= errors[-1]:
                return Choice(candidate, rule if candidate < maximum else "max", maximum)
        return Choice(_mse(bins, width, maximum), "mse", maximum)
    if method == "mse":
        return Choice(_mse(bins, width, maximum), "mse", maximum)
    if method == "percentile":
        return Choice(_percentile(bins, width, maximum), "percentile", maximum)
    raise TilewrightError(
        "E0702",
        f"there is no calibration method `{method}`",
        details=[f"legal are {', '.join(METHODS)}"],
    )


def _mse(bins: Histogram, width: float, maximum: float) -> float:
    """Return the clipping point of least expected squared error; of equals the largest."""
    candidates = maximum * np.linspace(0.1, 1.0, MSE_CANDIDATES)
    errors = squared_errors(bins, width, candidates)
    return float(candidates[len(candidates) - 1 - int(np.argmin(errors[::-1]))])


def _percentile(bins: Histogram, width: float, maximum: float) -> float:
    """Return the end of the bin below which `PERCENTILE` % of the magnitudes lie."""
    share = np.cumsum(bins) / bins.sum()
    index = int(np.searchsorted(share, PERCENTILE / 100.0))
    return min((index + 1) * width, maximum)


def squared_errors(
    bins: Histogram, width: float, thresholds: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return the expected squared error of int8 codes for each threshold, by bin centres."""
    centre = (np.arange(len(bins)) + 0.5) * width
    weight = bins / max(int(bins.sum()), 1)
    step = (thresholds / 127.0)[:, None]
    code = np.minimum(np.rint(centre / step), 127.0)
    return ((centre - code * step) ** 2 @ weight).astype(np.float64)


def kl_threshold(bins: Histogram, width: float) -> float:
    """Return the clipping point of least divergence between the histogram and its 128-level form.

    For a clipping point after `i` bins the reference `P` is the first `i` bins with everything
    beyond added to the last; the candidate `Q` spreads each level's mass over its non-empty bins.
    Empty bins, even long runs of them, are fine.
    """
    total = len(bins)
    if total <= LEVELS:
        return total * width
    mass = bins.astype(np.float64)
    beyond = mass.sum() - np.cumsum(mass)
    candidates = np.unique(
        np.linspace(LEVELS, total, min(KL_CANDIDATES, total - LEVELS + 1)).astype(np.int64)
    )
    best, best_divergence = total, math.inf
    for i in candidates:
        head = mass[:i]
        p = head.copy()
        p[-1] += beyond[i - 1]
        level = np.arange(i) * LEVELS // i
        occupied = head > 0
        sums = np.bincount(level, head, LEVELS)
        counts = np.bincount(level, occupied, LEVELS)
        q = np.where(occupied, (sums / np.maximum(counts, 1))[level], 0.0)
        if q.sum() == 0:
            continue
        divergence = _divergence(p / p.sum(), q / q.sum())
        # Equal divergence: the larger threshold clips less.
        if divergence <= best_divergence:
            best, best_divergence = int(i), divergence
    return best * width


def _divergence(p: npt.NDArray[np.float64], q: npt.NDArray[np.float64]) -> float:
    there = p > 0
    # Where Q is empty (clipped mass on an empty last bin) a tiny mass stands in for zero.
    return float(np.sum(p[there] * np.log(p[there] / np.maximum(q[there], 1e-12))))
