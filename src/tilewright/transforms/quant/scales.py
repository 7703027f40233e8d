"""The scale of every edge of the integer graph.

A value's own scale comes from its calibrated threshold. Ops that only move codes pass their
operand's scale on. A concatenation has one scale, its result's; operands that nobody else reads
adopt it where they are computed, so that no requantisation is needed, others are requantised on
the edge.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING

from xdsl.ir import Operation, SSAValue

from tilewright.diagnostics import TilewrightError
from tilewright.dialects.top.base import is_absent
from tilewright.quant.graph import layer_of
from tilewright.quant.parameters import scale_of
from tilewright.transforms.quant.classify import (
    SCALE_KEEPERS,
    is_constant,
    scalar_operand,
    table_function,
)

if TYPE_CHECKING:
    from tilewright.ir.weights import WeightStore


def value_names(ops: list[Operation], arguments: Mapping[SSAValue, str]) -> dict[SSAValue, str]:
    """Return the name of every value: an argument's, `layer`, or `layer:i` for further results."""
    names: dict[SSAValue, str] = dict(arguments)
    for op in ops:
        for index, result in enumerate(op.results):
            names[result] = layer_of(op) if index == 0 else f"{layer_of(op)}:{index}"
    return names


def exact_gain(op: Operation, weights: WeightStore) -> float | None:
    """Return the positive constant an op multiplies by: the codes stay, the scale changes."""
    if scalar_operand(op) is None:
        return None
    function, parameters = table_function(op, weights)
    gain = parameters.get("value")
    if function == "mul_scalar" and isinstance(gain, float) and gain > 0:
        return gain
    return None


class Scales:
    """Scales of all float values that the integer graph holds as codes."""

    def __init__(
        self,
        ops: list[Operation],
        hosts: Set[Operation],
        names: Mapping[SSAValue, str],
        thresholds: Mapping[str, float],
        weights: WeightStore,
    ) -> None:
        self.hosts = hosts
        self.names = names
        self.thresholds = thresholds
        self.weights = weights
        self.known: dict[SSAValue, float] = {}
        self._align_concats(ops)
        for op in ops:
            if op not in hosts:
                for operand in op.operands:
                    if not is_constant(operand) and not is_absent(operand):
                        self.of(operand)
                for result in op.results:
                    self.of(result)

    def of(self, value: SSAValue) -> float:
        """Return the scale of `value`'s codes.

        Raises:
            TilewrightError: E0301, calibration did not see the value.
        """
        # Iterative: chains of movers may be long.
        chain: list[tuple[SSAValue, float]] = []
        current = value
        while current not in self.known:
            source = self._source(current)
            if source is None:
                self.known[current] = self._own(current)
                break
            chain.append((current, source[1]))
            current = source[0]
        for item, gain in reversed(chain):
            self.known[item] = self.known[current] * gain
            current = item
        return self.known[value]

    def _source(self, value: SSAValue) -> tuple[SSAValue, float] | None:
        """Return the operand whose scale `value` takes and a factor, or None for its own scale."""
        op = value.owner
        if not isinstance(op, Operation) or op in self.hosts:
            return None
        if op.name in SCALE_KEEPERS:
            return op.operands[0], 1.0
        gain = exact_gain(op, self.weights)
        if gain is not None:
            index = scalar_operand(op)
            assert index is not None
            return op.operands[1 - index], gain
        return None

    def _own(self, value: SSAValue) -> float:
        name = self.names[value]
        if name not in self.thresholds:
            raise TilewrightError(
                "E0301",
                f'calibration has no range for "{name}"',
                hint="calibrate the same model, after the same passes",
            )
        return scale_of(self.thresholds[name])

    def _align_concats(self, ops: list[Operation]) -> None:
        """Give operands of concatenations the result's scale where that costs nothing."""
        for op in reversed(ops):
            if op.name != "top.concat" or op in self.hosts:
                continue
            result = op.results[0]
            if result not in self.known:
                self.known[result] = self._own(result)
            for operand in op.operands:
                root = self._private_root(operand)
                if root is not None:
                    self.known[root] = self.known[result]

    def _private_root(self, value: SSAValue) -> SSAValue | None:
        """Return where `value`'s scale is set, if nothing else depends on that scale."""
        current = value
        while True:
            if is_constant(current) or current in self.known or not current.has_one_use():
                return None
            op = current.owner
            if not isinstance(op, Operation) or op in self.hosts:
                # Quantised for this one use: any scale may be chosen.
                return current
            if op.name not in SCALE_KEEPERS:
                return current if exact_gain(op, self.weights) is None else None
            current = op.operands[0]
