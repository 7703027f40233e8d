"""Streaming observation of value ranges: memory does not depend on how many samples are seen.

Each value keeps its least and greatest element, exactly, and a histogram of signed values. The
histogram reaches to the next power of two on both sides of zero. When a sample exceeds it, the
reach doubles and neighbouring bins merge. Bin widths are powers of two, so that an element's bin is
computed without rounding, and observers of different samples can be merged.

Of a large tensor the histogram takes a part: runs of 16 neighbouring elements at equal distances
(coprime to the tensor's sizes, from another first run in every sample). Each counts for those left
out, and the sample's least and greatest element are always counted.

Exact zeros are counted by themselves: any range represents them, so they decide nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import TilewrightError

BINS = 4096
"""Bins on each side of zero; the largest magnitude lies in the outer half, so 2048 are in use."""

LEVELS = 128
"""Magnitudes an int8 code can hold; for KL divergence."""

SYMMETRIC_STEPS = 254
"""Steps from the lowest to the highest symmetric code, -127..127."""

ASYMMETRIC_STEPS = 255

METHODS = ("max", "mean", "kl", "mse", "percentile")
"""Rules for single values; `best` (see `ranges.py`) chooses among them."""

PERCENTILE = 99.99
"""Share of the elements other than zero that `percentile` represents without clipping."""

LEAST_EXPONENT = -100
"""The histogram reaches at least to `2^-100`."""

SAMPLED = 2048
"""Elements a tensor that the histogram takes at least, where there are as many."""

SAMPLED_FIRST = 131072
"""Elements of the first sample's tensors; of the i-th this over i, but never below `SAMPLED`."""

Histogram = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


class Observer:
    """Range of one value, seen sample by sample."""

    def __init__(self, name: str, histogram: bool = True) -> None:
        """Start with nothing seen.

        Args:
            name: the value's name, for errors.
            histogram: count elements too; without, only `low` and `high` are known.
        """
        self.name = name
        self.low = 0.0
        """Least element seen, or 0 where all were positive."""
        self.high = 0.0
        """Greatest element seen, or 0 where all were negative."""
        self.least = math.inf
        """Least element seen."""
        self.greatest = -math.inf
        self.count = 0
        self.zeros = 0
        self.samples = 0
        self.sums = [0, 0, 0]
        """Sums over the samples of least element (at most 0), greatest (at least 0) and largest
        magnitude, as whole numbers of 2^-149, of which every float32 is a multiple: exact, so that
        the order of the samples does not matter."""
        self.exponent: int | None = None
        """The histogram reaches from `-2^exponent` to `2^exponent`; None while it is empty."""
        self.bins: Histogram | None = np.zeros(2 * BINS, np.int64) if histogram else None
        """Bin `i` holds elements from `(i - BINS) * width`, exact zeros excepted."""

    @property
    def maximum(self) -> float:
        """Largest magnitude seen."""
        return max(-self.low, self.high)

    @property
    def width(self) -> float:
        """Width of a bin; a power of two."""
        return 0.0 if self.exponent is None else math.ldexp(1.0 / BINS, self.exponent)

    def update(
        self,
        values: npt.NDArray[np.floating],
        ends: tuple[float, float] | None = None,
        turn: int | None = None,
    ) -> None:
        """Take in one sample's values.

        Args:
            values: of any shape.
            ends: their least and greatest, if known already.
            turn: number of the sample, from 0, that decides which part of a large tensor the
                histogram takes; by default how many were seen before.

        Raises:
            TilewrightError: E0301, a value is not finite.
        """
        turn = self.samples if turn is None else turn
        self.samples += 1
        if values.size == 0:
            return
        least, greatest = ends or (float(values.min()), float(values.max()))
        if not (math.isfinite(least) and math.isfinite(greatest)):
            raise TilewrightError(
                "E0301",
                f'"{self.name}" is not finite for a calibration sample',
                hint="check the sample and the model's preprocessing",
            )
        self.least, self.greatest = min(self.least, least), max(self.greatest, greatest)
        self.low, self.high = min(self.low, least), max(self.high, greatest)
        ends_of = (min(least, 0.0), max(greatest, 0.0), max(-least, greatest))
        self.sums = [a + int(math.ldexp(b, 149)) for a, b in zip(self.sums, ends_of, strict=True)]
        self.count += values.size
        if self.bins is None:
            return
        if least == greatest == 0.0:
            self.zeros += values.size
            return
        self._reach(max(-least, greatest))
        self._count(np.ascontiguousarray(values, np.float32).reshape(-1), least, greatest, turn)

    def _count(
        self, flat: npt.NDArray[np.float32], least: float, greatest: float, turn: int
    ) -> None:
        from tilewright.quant.observer_kernel import RUN, count_bins

        assert self.bins is not None
        assert self.exponent is not None
        wanted = max(SAMPLED, SAMPLED_FIRST // (turn + 1))
        stride = _coprime(flat.size // wanted, flat.size)
        runs = -(-flat.size // RUN)
        scale = math.ldexp(BINS, -self.exponent)
        zeros = count_bins(flat, stride, turn % min(stride, runs), scale, self.bins, stride)
        self.zeros += int(zeros) * stride
        if stride > 1:
            for end in (least, greatest):
                if end:
                    self.bins[BINS + math.floor(end / self.width)] += 1

    def _reach(self, largest: float) -> None:
        """Make the histogram reach beyond `largest`."""
        exponent = max(math.frexp(largest)[1], LEAST_EXPONENT)
        if self.exponent is None:
            self.exponent = exponent
        elif exponent > self.exponent:
            assert self.bins is not None
            self.bins = _merged(self.bins, exponent - self.exponent)
            self.exponent = exponent

    def merge(self, other: Observer) -> None:
        """Take in what `other` has seen; the order of merging does not matter."""
        self.least, self.greatest = (
            min(self.least, other.least),
            max(self.greatest, other.greatest),
        )
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.count += other.count
        self.zeros += other.zeros
        self.samples += other.samples
        self.sums = [a + b for a, b in zip(self.sums, other.sums, strict=True)]
        if self.bins is None or other.bins is None or other.exponent is None:
            return
        self._reach(math.ldexp(0.5, other.exponent))
        assert self.exponent is not None
        self.bins += _merged(other.bins, self.exponent - other.exponent)

    def magnitudes(self) -> tuple[Histogram, float]:
        """Return the histogram of magnitudes up to the largest, and the width of a bin."""
        assert self.bins is not None
        folded = self.bins[BINS:] + self.bins[:BINS][::-1]
        last = min(int(self.maximum / self.width) + 1, BINS) if self.width else 0
        return folded[:last], self.width

    def occupied(self) -> tuple[FloatArray, FloatArray]:
        """Return the centres of the bins that are not empty, and how much they hold (sum 1)."""
        assert self.bins is not None
        where = np.flatnonzero(self.bins)
        centres = (where - BINS + 0.5) * self.width
        # A centre may lie beyond the end of what was seen; no element does.
        mass = self.bins[where].astype(np.float64)
        return np.clip(centres, self.low, self.high).astype(np.float64), mass / max(mass.sum(), 1.0)


def _coprime(wanted: int, size: int) -> int:
    """Return the least number from `wanted` on that shares no factor with `size`; 1 at least."""
    stride = max(wanted, 1)
    while math.gcd(stride, size) != 1:
        stride += 1
    return stride


def _merged(bins: Histogram, doublings: int) -> Histogram:
    """Return the histogram with a reach of `2^doublings` times as much."""
    if doublings == 0:
        return bins
    target = BINS + ((np.arange(2 * BINS) - BINS) >> min(doublings, 40))
    merged = np.zeros(2 * BINS, np.int64)
    np.add.at(merged, target, bins)
    return merged


@dataclass(frozen=True)
class Choice:
    """The range of a value and how it was chosen."""

    threshold: float
    """Largest magnitude of symmetric codes."""
    low: float
    """Least value of asymmetric codes, at most 0."""
    high: float
    """Greatest value of asymmetric codes, at least 0."""
    rule: str
    """Rule that won: "max", "mean", "kl", "mse" or "percentile"."""


def choose(observer: Observer, method: str) -> Choice:
    """Return the range of a value by `method`.

    - `max`: everything seen.
    - `mean`: from the mean of the samples' least elements to the mean of their greatest; the mean
      of their largest magnitudes. One odd sample does not stretch it.
    - `kl`: the clipping point whose 128-level histogram of magnitudes diverges least from the
      observed one, kept only if its expected squared error does not exceed that of `max`.
      (Divergence weighs rare peaks by how often they occur, not by what clipping them costs.) Where
      it is refused, `percentile` is taken under the same condition, and `mse` where that is
      refused too. The asymmetric range is clipped at that point on both sides.
    - `mse`: the range of least expected squared error.
    - `percentile`: 99.99 % of the elements other than zero are not clipped; the asymmetric range
      leaves out half of the others on each side, all on one where the other is empty.

    Raises:
        TilewrightError: E0702, there is no such method.
    """
    if method not in METHODS:
        raise TilewrightError(
            "E0702",
            f"there is no calibration method `{method}`",
            details=[f"legal are {', '.join(METHODS)}"],
        )
    everything = Choice(observer.maximum, observer.low, observer.high, "max")
    if method == "max" or observer.maximum == 0.0:
        return everything
    if method == "mean":
        low, high, largest = (_mean(total, observer.samples) for total in observer.sums)
        return Choice(largest, low + 0.0, high + 0.0, "mean")
    if observer.bins is None:
        return everything
    if method == "mse":
        return _least_squares(observer)
    if method == "percentile":
        return _percentile(observer)
    for choice in (_least_divergence(observer), _percentile(observer)):
        if choice.threshold >= observer.maximum:
            return everything
        symmetric, asymmetric = expected_errors(observer, [choice, everything])
        if symmetric[0] <= symmetric[1] and asymmetric[0] <= asymmetric[1]:
            return choice
    return _least_squares(observer)


def _mean(total: int, samples: int) -> float:
    """Return the mean of whole numbers of 2^-149."""
    return math.ldexp(total / samples, -149)


def expected_errors(observer: Observer, choices: list[Choice]) -> tuple[FloatArray, FloatArray]:
    """Return the mean squared error of elements other than zero for symmetric, asymmetric codes."""
    from tilewright.quant.observer_kernel import range_errors

    centres, mass = observer.occupied()
    thresholds = np.array([choice.threshold for choice in choices])
    lows = np.array([choice.low for choice in choices])
    highs = np.array([choice.high for choice in choices])
    return (
        range_errors(centres, mass, -thresholds, thresholds, SYMMETRIC_STEPS),
        range_errors(centres, mass, lows, highs, ASYMMETRIC_STEPS),
    )


MSE_SHARES = np.linspace(1.0, 0.1, 181)
"""Shares of the largest magnitude that `mse` tries, widest first: of equals it is taken."""

MSE_END_SHARES = np.concatenate([np.linspace(1.0, 0.1, 61), [0.05, 0.02, 0.0]])
"""Shares of one end of an asymmetric range."""


def _least_squares(observer: Observer) -> Choice:
    from tilewright.quant.observer_kernel import range_errors

    centres, mass = observer.occupied()
    thresholds = observer.maximum * MSE_SHARES
    errors = range_errors(centres, mass, -thresholds, thresholds, SYMMETRIC_STEPS)
    threshold = float(thresholds[int(np.argmin(errors))])
    # One end after the other, twice: the ends matter to each other only through the step.
    low, high = observer.low, observer.high
    for _ in range(2 if low < 0 < high else 1):
        if high > 0:
            tried = observer.high * (MSE_END_SHARES if low < 0 else MSE_SHARES)
            errors = range_errors(centres, mass, np.full(tried.size, low), tried, ASYMMETRIC_STEPS)
            high = float(tried[int(np.argmin(errors))])
        if low < 0:
            tried = observer.low * (MSE_END_SHARES if high > 0 else MSE_SHARES)
            errors = range_errors(centres, mass, tried, np.full(tried.size, high), ASYMMETRIC_STEPS)
            low = float(tried[int(np.argmin(errors))])
    return Choice(threshold, low + 0.0, high + 0.0, "mse")


def _percentile(observer: Observer) -> Choice:
    folded, width = observer.magnitudes()
    share = np.cumsum(folded) / folded.sum()
    threshold = (int(np.searchsorted(share, PERCENTILE / 100.0)) + 1) * width
    assert observer.bins is not None
    tail = 1.0 - PERCENTILE / 100.0
    if observer.low < 0 < observer.high:
        tail /= 2
    share = np.cumsum(observer.bins) / observer.bins.sum()
    last = int(np.searchsorted(share, 1.0 - tail))
    share = np.cumsum(observer.bins[::-1]) / observer.bins.sum()
    first = 2 * BINS - 1 - int(np.searchsorted(share, 1.0 - tail))
    return Choice(
        min(threshold, observer.maximum),
        max(observer.low, min((first - BINS) * width, 0.0)),
        min(observer.high, max((last + 1 - BINS) * width, 0.0)),
        "percentile",
    )


def _least_divergence(observer: Observer) -> Choice:
    bins, width = observer.magnitudes()
    threshold = min(kl_threshold(bins, width), observer.maximum)
    return Choice(threshold, max(observer.low, -threshold), min(observer.high, threshold), "kl")


def kl_threshold(bins: Histogram, width: float) -> float:
    """Return the clipping point of least divergence between the histogram and its 128-level form.

    Bins are merged until there are at most 2048, and every one of them from the 128th on is tried;
    of equals the largest is taken. Empty bins, even long runs of them, are fine.
    """
    from tilewright.quant.observer_kernel import divergences

    if bins.size > BINS // 2:
        padded = np.append(bins, np.zeros(bins.size % 2, np.int64))
        bins, width = padded.reshape(-1, 2).sum(axis=1), 2 * width
    if bins.size <= LEVELS:
        return bins.size * width
    found = divergences(bins.astype(np.float64), LEVELS)
    # The last of the least; differences below rounding are none.
    least = np.flatnonzero(found <= found.min() + 1e-12)[-1]
    return float((LEVELS + int(least)) * width)
