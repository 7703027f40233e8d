"""The region of a `linalg.generic`, compiled once to steps on whole arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from xdsl.dialects.affine import ApplyOp
from xdsl.dialects.builtin import IntegerAttr
from xdsl.ir import Block, Operation, SSAValue

from tilewright.interp.scalars import constant, dtype_of, evaluator, fault
from tilewright.interp.views import Range, evaluate, gather, loop_index

Array = npt.NDArray[Any]
Lookup = Callable[[SSAValue], Any]
"""Gives the value of something defined outside the region."""

Step = Callable[[dict[SSAValue, Array], Lookup, Sequence[Range]], Array]


@dataclass
class Body:
    """A straight-line region: `steps` in order, then the values it yields."""

    arguments: list[SSAValue]
    steps: list[tuple[SSAValue, Step]] = field(default_factory=list[tuple[SSAValue, Step]])
    yields: list[SSAValue] = field(default_factory=list[SSAValue])
    captured: set[SSAValue] = field(default_factory=set[SSAValue])
    """Tensors, memrefs and scalars used from outside."""

    @staticmethod
    def of(block: Block) -> Body:
        """Compile a block that ends in a yield.

        Raises:
            TilewrightError: E0501, an op in it cannot be executed.
        """
        body = Body(list(block.args))
        inside: set[SSAValue] = set(block.args)
        for op in block.ops:
            for value in op.operands:
                if value not in inside:
                    body.captured.add(value)
            if op.name in ("linalg.yield", "tensor.yield"):
                body.yields = list(op.operands)
                return body
            inside.update(op.results)
            body.steps.append((op.results[0], _step(op, body)))
        raise fault("a region without a yield")

    def run(
        self, arguments: Sequence[Array], lookup: Lookup, ranges: Sequence[Range]
    ) -> list[Array]:
        """Evaluate the region at all points at once; results broadcast to the iteration space."""
        values: dict[SSAValue, Array] = dict(zip(self.arguments, arguments, strict=True))
        for target, step in self.steps:
            values[target] = step(values, lookup, ranges)
        return [self.fetch(value, values, lookup) for value in self.yields]

    def fetch(self, value: SSAValue, values: dict[SSAValue, Array], lookup: Lookup) -> Array:
        """Return a value computed inside, or a scalar from outside."""
        if value in self.captured:
            return np.asarray(lookup(value), dtype_of(value.type))
        return values[value]

    def slice_of(self, value: SSAValue) -> list[tuple[SSAValue, Step]]:
        """Return the steps that `value` depends on, in order."""
        needed, kept = {value}, list[tuple[SSAValue, Step]]()
        for target, step in reversed(self.steps):
            if target in needed:
                kept.append((target, step))
                owner = target.owner
                assert isinstance(owner, Operation)
                needed.update(owner.operands)
        return kept[::-1]


def _step(op: Operation, body: Body) -> Step:
    operands = list(op.operands)
    if op.name == "arith.constant":
        value = constant(op)
        return lambda values, lookup, ranges: value
    if op.name == "linalg.index":
        axis = op.properties["dim"]
        assert isinstance(axis, IntegerAttr)
        return lambda values, lookup, ranges: loop_index(axis.value.data, ranges)
    if op.name in ("tensor.extract", "memref.load"):
        source, positions = operands[0], operands[1:]

        def load(values: dict[SSAValue, Array], lookup: Lookup, ranges: Sequence[Range]) -> Array:
            index = [body.fetch(value, values, lookup) for value in positions]
            return np.asarray(gather(np.asarray(lookup(source)), index))

        return load
    if isinstance(op, ApplyOp):
        indexing = op.map.data

        def apply(values: dict[SSAValue, Array], lookup: Lookup, ranges: Sequence[Range]) -> Array:
            index = [body.fetch(value, values, lookup) for value in operands]
            count = indexing.num_dims
            return np.asarray(evaluate(indexing.results[0], index[:count], index[count:]))

        return apply
    function = evaluator(op)
    if function is None or op.regions:
        raise fault(f"{op.name} inside a region")
    if not any(value in body.captured for value in operands):
        if len(operands) == 1:
            only = operands[0]
            return lambda values, lookup, ranges: function(values[only])
        if len(operands) == 2:
            left, right = operands
            return lambda values, lookup, ranges: function(values[left], values[right])
    return lambda values, lookup, ranges: function(
        *(body.fetch(value, values, lookup) for value in operands)
    )
