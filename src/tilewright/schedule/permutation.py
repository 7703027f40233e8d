"""Permutations of axes as the chip moves them: few, merged axes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

MAX_RANK = 4
"""Dimensions of a DMA or a vector copy."""


def merged_permutation(shape: tuple[int, ...], perm: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return sizes of the merged result axes and the permutation between merged axes.

    Axes of size 1 go; result axes that are neighbours in the source too become one. A result of one
    axis means that nothing moves.
    """
    kept = [axis for axis in perm if shape[axis] != 1]
    groups: list[list[int]] = []
    for axis in kept:
        before = groups[-1][-1] if groups else None
        between = range(before + 1, axis) if before is not None else range(0)
        if before is not None and before < axis and all(shape[k] == 1 for k in between):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    sizes = [prod(shape[axis] for axis in group) for group in groups]
    order = sorted(range(len(groups)), key=lambda index: groups[index][0])
    return sizes, [order.index(index) for index in range(len(groups))]
