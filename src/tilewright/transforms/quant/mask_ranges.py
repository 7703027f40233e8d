"""Ranges of sums with masks in front of a softmax of the chip.

A mask adds a large negative number to what shall not be looked at. With codes for that number none
would be left for the scores. But a softmax sees differences alone, and what lies `NEGLIGIBLE` below
every score that counts has no share any more: the sum's range ends there, and codes saturate. So
does the mask's own range, as far down as the sum's reaches. A constant mask, be it -inf, is raised
to what still takes the largest score to the sum's least code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from typing import TYPE_CHECKING

from xdsl.ir import Operation, SSAValue

if TYPE_CHECKING:
    from tilewright.transforms.quant.scales import EdgeScale

Range = tuple[float, float]
RangeOf = Callable[[SSAValue], Range | None]

NEGLIGIBLE = math.log(2 * 65535)
"""Below a row's largest value by so much, the entry of the table of exponentials is a half."""


def masked_range(value: SSAValue, hosts: Set[Operation], range_of: RangeOf) -> Range | None:
    """Return the range that a value's codes need because of softmaxes, if that is a smaller one.

    Args:
        value: a value of the float graph.
        hosts: ops that stay float.
        range_of: least and greatest value of a value, if known.
    """
    own = range_of(value)
    if own is None:
        return None
    users = [use.operation for use in value.uses]
    if not users or any(user in hosts for user in users):
        return None
    if all(user.name == "top.softmax" for user in users):
        floor = _floor(value, range_of)
        return None if floor is None or own[0] >= floor else (floor, max(own[1], floor))
    # A mask: all it is added to reads scores, and only softmaxes read the sums.
    reach = 0.0
    for user in users:
        if user.name != "top.add" or user in hosts:
            return None
        readers = [use.operation for use in user.results[0].uses]
        if not readers or any(item.name != "top.softmax" or item in hosts for item in readers):
            return None
        other = range_of(user.operands[1 if user.operands[0] is value else 0])
        floor = _floor(user.results[0], range_of)
        if other is None or floor is None:
            return None
        reach = max(reach, other[1] - floor)
    return None if own[0] >= -reach else (-reach, max(own[1], 0.0))


def _floor(value: SSAValue, range_of: RangeOf) -> float | None:
    """Return what the sum of scores and a mask needs no codes below."""
    owner = value.owner
    if not isinstance(owner, Operation) or owner.name != "top.add":
        return None
    ranges = [range_of(operand) for operand in owner.operands]
    if ranges[0] is None or ranges[1] is None:
        return None
    # The mask is what reaches further down.
    mask, scores = sorted((ranges[0], ranges[1]))
    return scores[0] - abs(mask[1]) - NEGLIGIBLE


def masked_floor(
    op: Operation, index: int, scale_of: Callable[[SSAValue], EdgeScale]
) -> float | None:
    """Return what a constant operand of a sum need not lie below; None: `op` masks no scores.

    A constant there takes every code of the other operand to the sum's least code, as one further
    down does, so that raising it changes no code of the sum.

    Args:
        op: an op of the chip.
        index: which of its operands is constant.
        scale_of: scales of activations.
    """
    users = [use.operation for use in op.results[0].uses]
    if op.name != "top.add" or not users or any(user.name != "top.softmax" for user in users):
        return None
    total, other = scale_of(op.results[0]), scale_of(op.operands[1 - index])
    least, most = (-128 - total.zero) * total.step, (127 - other.zero) * other.step
    # A step of the sum more, for what the constant's own codes are rounded by.
    return least - max(most, 0.0) - total.step
