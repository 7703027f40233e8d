"""How much memory the activations of a plan take at the largest instant."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.schedule.cascade import buffer_of, held_at
from tilewright.schedule.plan import Plan, TensorSpec, UnitSpec
from tilewright.schedule.planner_items import items_of
from tilewright.spec.hardware import Hardware

ACTIVATIONS = frozenset(("held", "input", "output"))
"""Roles of SRAM buffers that hold activations."""


def activation_bytes(
    hardware: Hardware, units: Sequence[UnitSpec], tensors: Sequence[TensorSpec], plan: Plan
) -> int:
    """Return the bytes of SRAM and DDR that activations take during the step that needs most.

    In SRAM: tensors held, rolling buffers and tiles, padding and gaps between pixels included. In
    DDR: every tensor that lies there, densely, from the step that first writes it (an argument:
    from the start) to the last that takes it from there (what nothing reads: to the end). Weights
    and parameters do not count, nor do the tiles of units that tile themselves.
    """
    count = len(plan.steps)
    if not count:
        return 0
    bytes_at = [0] * count
    for item in items_of(hardware, units, tensors, plan):
        if item.role in ACTIVATIONS:
            for step in range(item.first, min(item.last, count - 1) + 1):
                bytes_at[step] += item.slots * item.size_bytes
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    read: set[int] = set()
    for number, step in enumerate(plan.steps):
        for unit in step.units:
            target = buffer_of(tensors, units[unit].writes)
            first.setdefault(target, number)
            last[target] = max(last.get(target, number), number)
            for source in units[unit].reads:
                buffer = buffer_of(tensors, source.tensor)
                read.add(buffer)
                if units[unit].problem is None or not held_at(plan.homes[buffer], number):
                    last[buffer] = number
    for tensor, home in enumerate(plan.homes):
        spec = tensors[tensor]
        if not home.ddr or spec.inside is not None:
            continue
        end = last.get(tensor, 0) if tensor in read else count - 1
        size = spec.rows * spec.columns * spec.channels * spec.element_bytes
        for step in range(first.get(tensor, 0), end + 1):
            bytes_at[step] += size
    return max(bytes_at)
