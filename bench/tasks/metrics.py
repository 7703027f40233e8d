"""Figures of merit: pure functions of arrays and texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def sqnr_db(wanted: Sequence[Array], found: Sequence[Array]) -> float:
    """Return signal to quantisation noise over all arrays together, dB; infinite without noise."""
    signal = noise = 0.0
    for a, b in zip(wanted, found, strict=True):
        exact = a.astype(np.float64)
        signal += float((exact**2).sum())
        noise += float(((exact - b.astype(np.float64)) ** 2).sum())
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def top1(outputs: Sequence[Array], labels: Sequence[int]) -> float:
    """Return the share of outputs whose largest element is at the label."""
    hits = [int(a.argmax()) == label for a, label in zip(outputs, labels, strict=True)]
    return sum(hits) / len(hits)


def agreement(wanted: Sequence[Array], found: Sequence[Array]) -> float:
    """Return the share of outputs whose largest elements are at the same place."""
    return top1(found, [int(a.argmax()) for a in wanted])


def edit_distance(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the least number of insertions, deletions and replacements from `a` to `b`."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def character_error_rate(wanted: Sequence[str], found: Sequence[str]) -> float:
    """Return edits over characters, all texts together."""
    edits = sum(edit_distance(a, b) for a, b in zip(wanted, found, strict=True))
    return edits / sum(len(text) for text in wanted)


def ctc_greedy(scores: Array, characters: Sequence[str]) -> str:
    """Return the text of `scores[time, class]`: each time's best class, without repeats and blanks.

    Class 0 is the blank, class `i` is `characters[i - 1]`.
    """
    best = scores.argmax(1)
    kept = [int(item) for at, item in enumerate(best) if item and (at == 0 or item != best[at - 1])]
    return "".join(characters[item - 1] for item in kept)


def ranks(values: Sequence[float] | Array) -> Array:
    """Return the ranks from 1 on; equal values share the mean of theirs."""
    array = np.asarray(values, np.float64)
    _, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((last - counts + 1 + last) / 2)[inverse]


def spearman(a: Sequence[float] | Array, b: Sequence[float] | Array) -> float:
    """Return the rank correlation, -1..1; 0 if either does not vary."""
    x, y = ranks(a), ranks(b)
    x, y = x - x.mean(), y - y.mean()
    length = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / length if length else 0.0


def cosine(a: Array, b: Array) -> float:
    """Return the cosine of two vectors."""
    return float(a @ b) / (math.sqrt(float(a @ a) * float(b @ b)) or 1.0)


def pooled(tokens: Array, mask: Array) -> Array:
    """Return the mean of `tokens[1, n, width]` where `mask[1, n]` is set, at length 1 (float64)."""
    kept = tokens[0].astype(np.float64)[mask[0].astype(bool)]
    mean = kept.mean(0)
    return mean / (np.linalg.norm(mean) or 1.0)


def speech_frames(clean: Array, frame: int, below_db: float = 35.0) -> Array:
    """Return for every frame of clean sound whether somebody speaks.

    A frame counts if its energy is at most `below_db` under the loudest frame's; single gaps
    between such frames count, too, as the pauses inside words that they are.
    """
    count = len(clean) // frame
    energy = (clean[: count * frame].astype(np.float64).reshape(count, frame) ** 2).mean(1)
    loud = energy > energy.max() * 10 ** (-below_db / 10)
    gaps = ~loud[1:-1] & loud[:-2] & loud[2:]
    loud[1:-1] |= gaps
    return loud
