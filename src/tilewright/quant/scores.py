"""What matters of the scores before a softmax: how far below the best of its row a value counts.

A mask lowers scores by thousands, or by the largest float. Codes that reach so far would leave
nothing for the scores themselves. But a score that lies more than `reach(n)` below the largest of
its row of `n` takes no part in the result: it may as well lie there exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp
    from xdsl.ir import Operation, SSAValue

Array = npt.NDArray[Any]

PART = 512.0
"""All of a row that is left out together is at most one in so many: half a code of a softmax."""


def reach(count: int) -> float:
    """Return how far below the largest of `count` scores another still counts."""
    return math.log(PART * max(count, 1))


@dataclass(frozen=True)
class _Sum:
    """A value that only softmaxes along one axis read; if it is a sum, of what."""

    name: str
    axis: int
    operands: tuple[str, ...]
    """Those that nothing but such sums reads, and after it `others`, what the sum adds to each."""
    others: tuple[str, ...]


class Scores:
    """The values of a float graph that only softmaxes read, and what is added to make them."""

    def __init__(self, module: ModuleOp) -> None:
        """Find them; `module` is a float `top` module."""
        from tilewright.quant.graph import argument_names, main_function

        main = main_function(module)
        self._names: dict[SSAValue, str] = dict(
            zip(main.body.block.args, argument_names(main), strict=True)
        )
        self.sums: list[_Sum] = []
        read: dict[SSAValue, int] = {}
        for op in main.body.block.ops:
            axis = _softmax_axis(op)
            if axis is not None:
                read[op.results[0]] = axis
        within = [value.owner for value in read]
        for value, axis in read.items():
            owner: Any = value.owner
            pairs: list[tuple[str, str]] = []
            if owner.name == "top.add":
                for operand, other in (owner.operands, owner.operands[::-1]):
                    users = [use.operation for use in operand.uses]
                    name, beside = self._name(_source(operand)), self._name(other)
                    if name and beside and all(user in within for user in users):
                        pairs.append((name, beside))
            name = self._name(value)
            assert name is not None
            self.sums.append(
                _Sum(name, axis, tuple(a for a, _ in pairs), tuple(b for _, b in pairs))
            )

    def _name(self, value: SSAValue) -> str | None:
        """Return the name `value` is observed by; None for constants."""
        from xdsl.ir import Operation

        from tilewright.quant.graph import layer_of

        owner = value.owner
        if not isinstance(owner, Operation):
            return self._names[value]
        if owner.name in ("top.weight", "top.none"):
            return None
        index = list(owner.results).index(value)  # pyright: ignore[reportArgumentType]
        return layer_of(owner) if index == 0 else f"{layer_of(owner)}:{index}"

    def bounded(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Return the values of one sample, scores that do not count raised to where they begin to.

        Operands of a sum are raised no further than leaves all sums that count as they are.
        """
        found = dict(values)
        least: dict[str, float] = {}
        for item in self.sums:
            scores = values[item.name]
            if not scores.size:
                continue
            best = scores.max(axis=item.axis, keepdims=True)
            raised = np.maximum(scores, best - np.float32(reach(scores.shape[item.axis])))
            found[item.name] = raised
            bottom = float(raised.min())
            for name, other in zip(item.operands, item.others, strict=True):
                bound = bottom - float(values[other].max())
                least[name] = min(bound, least.get(name, math.inf))
        for name, bound in least.items():
            if math.isfinite(bound):
                found[name] = np.maximum(values[name], np.float32(min(bound, 0.0)))
        return found


def _source(value: SSAValue) -> SSAValue:
    """Return the value whose elements `value` alone holds, perhaps in another order."""
    from xdsl.ir import Operation

    while isinstance(value.owner, Operation) and value.owner.name in (
        "top.reshape",
        "top.transpose",
    ):
        before = value.owner.operands[0]
        if len(list(before.uses)) != 1:
            break
        value = before
    return value


def _softmax_axis(op: Operation) -> int | None:
    """Return the axis of the softmaxes that read `op`'s result, if nothing else does."""
    from tilewright.dialects.quant import shape_of
    from tilewright.dialects.top.base import Attrs

    if len(op.results) != 1 or op.name in ("top.weight", "top.none"):
        return None
    users = [use.operation for use in op.results[0].uses]
    if not users or any(user.name != "top.softmax" for user in users):
        return None
    rank = len(shape_of(op.results[0]))
    axes = {Attrs(user.attributes).axis(rank) for user in users}
    return axes.pop() if len(axes) == 1 else None
