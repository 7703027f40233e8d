"""The scale and zero point of every edge of the integer graph.

A value's own scale comes from its calibrated threshold. Ops that only move codes pass their
operand's scale on. A concatenation has one scale, its result's; operands that nobody else reads
adopt it where they are computed, so that no requantisation is needed, others are requantised on
the edge.

Zero points are 0, unless asymmetric activations are asked for: then a value uses all 256 codes for
its range `low..high`, scale `(high - low) / 255`. A value that cannot be negative (behind a ReLU, a
sigmoid...; proven from the graph) has low 0 and zero point -128. That costs nothing on the chip,
since the zero point is folded into the bias of what reads it. Operands of a product of two
activations keep zero point 0: there it would cost sums.

Scales that the model itself gives (attributes `quant_scale` and `quant_zero`) win over all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xdsl.dialects.builtin import FloatAttr, IntegerAttr, StringAttr
from xdsl.ir import Operation, SSAValue

from tilewright.diagnostics import TilewrightError
from tilewright.dialects.top.base import is_absent
from tilewright.quant.graph import layer_of
from tilewright.quant.parameters import SMALLEST_SCALE, scale_of
from tilewright.transforms.quant.classify import (
    LAYOUT_OPS,
    SCALE_KEEPERS,
    constant_name,
    is_constant,
    scalar_operand,
    table_function,
)
from tilewright.transforms.quant.mask_ranges import masked_range

if TYPE_CHECKING:
    from tilewright.ir.weights import WeightStore


@dataclass(frozen=True)
class EdgeScale:
    """What one code step is worth, and the code that means zero."""

    step: float
    zero: int = 0


NEVER_NEGATIVE = frozenset(
    {"top.relu", "top.sigmoid", "top.hard_sigmoid", "top.abs", "top.exp", "top.softmax", "top.sqrt"}
)
"""Ops whose results cannot be negative, whatever they read."""
KEEP_SIGN = frozenset(
    {
        "top.reshape", "top.transpose", "top.slice", "top.pad", "top.max_pool", "top.avg_pool",
        "top.reduce", "top.concat", "top.add", "top.mul", "top.resize", "top.clip",
    }
)  # fmt: skip
"""Ops that make no negative result of operands that are not negative."""


def asymmetric_scale(low: float, high: float) -> EdgeScale:
    """Return the scale of 256 codes for `low..high`, `low <= 0 <= high`; real zero is a code.

    A range that is as wide on both sides is symmetric (127 codes a side, zero point 0), and so is
    an empty one.
    """
    if -low == high or (low == 0 and high == 0):
        return EdgeScale(scale_of(high))
    if low == 0:
        return EdgeScale(scale_of(high) * 127 / 255, -128)
    step = (high - low) / 255.0
    if step < SMALLEST_SCALE:
        return EdgeScale(scale_of(max(high, -low)))
    zero = min(max(round(-128.0 - low / step), -128), 127)
    # Rounding the zero point must not cut off an end: both stay within half a code.
    return EdgeScale(step, zero)


def given_scale(op: Operation) -> EdgeScale | None:
    """Return the scale that the model itself gives the result of `op`, if it does."""
    scale, zero = op.attributes.get("quant_scale"), op.attributes.get("quant_zero")
    if not isinstance(scale, FloatAttr):
        return None
    return EdgeScale(
        float(scale.value.data), int(zero.value.data) if isinstance(zero, IntegerAttr) else 0
    )


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


def feeds_product(value: SSAValue) -> bool:
    """Whether `value` is an operand of a product of two activations, which has no zero points."""
    stack, seen = [value], {value}
    while stack:
        for use in stack.pop().uses:
            user = use.operation
            if user.name == "top.matmul" and not any(map(is_constant, user.operands)):
                return True
            if user.name in SCALE_KEEPERS or user.name == "top.concat":
                for result in user.results:
                    if result not in seen:
                        seen.add(result)
                        stack.append(result)
    return False


class Scales:
    """Scales of all float values that the integer graph holds as codes."""

    def __init__(
        self,
        ops: list[Operation],
        hosts: Set[Operation],
        names: Mapping[SSAValue, str],
        thresholds: Mapping[str, float],
        weights: WeightStore,
        asymmetric: bool = False,
        ranges: Mapping[str, tuple[float, float]] | None = None,
        given: Mapping[SSAValue, EdgeScale] | None = None,
        unused: Mapping[SSAValue, EdgeScale] | None = None,
    ) -> None:
        """Work out all scales.

        Args:
            ops: the float graph in order, without constants.
            hosts: those that stay float.
            names: name of every value.
            thresholds: largest magnitude by name.
            weights: the constants.
            asymmetric: see the module's text.
            ranges: least and greatest value by name, for asymmetric codes.
            given: scales of values that are not results of ops (arguments).
            unused: any scale, for values that nobody reads as codes.
        """
        self.asymmetric = asymmetric
        self.ranges = ranges or {}
        self._signs: dict[SSAValue, bool] = {}
        self.hosts = hosts
        self.names = names
        self.thresholds = thresholds
        self.weights = weights
        self.known: dict[SSAValue, EdgeScale] = dict(given or {})
        for op in ops:
            scale = given_scale(op)
            if scale is not None:
                self.known[op.results[0]] = scale
            elif op.name in LAYOUT_OPS and op in hosts and op.operands[0] in self.known:
                # The host re-orders a value that has a scale; the elements are the same.
                self.known[op.results[0]] = self.known[op.operands[0]]
        self.given = frozenset(self.known)
        """Values whose scales the model gives: all 256 codes count, also with zero point 0."""
        self.known.update(unused or {})
        self._align_concats(ops)
        for op in ops:
            if op not in hosts:
                for operand in op.operands:
                    if not is_constant(operand) and not is_absent(operand):
                        self.of(operand)
                for result in op.results:
                    self.of(result)

    def of(self, value: SSAValue) -> EdgeScale:
        """Return scale and zero point of `value`'s codes.

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
            base = self.known[current]
            self.known[item] = EdgeScale(base.step * gain, base.zero)
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

    def _own(self, value: SSAValue) -> EdgeScale:
        name = self.names[value]
        if name not in self.thresholds:
            raise TilewrightError(
                "E0301",
                f'calibration has no range for "{name}"',
                hint="calibrate the same model, after the same passes",
            )
        threshold = self.thresholds[name]
        owner = value.owner
        if isinstance(owner, Operation) and owner.name == "top.softmax" and owner not in self.hosts:
            # Never beyond 1, and never negative; less if that is all that was seen.
            threshold = min(threshold, 1.0)
            if self.asymmetric and not feeds_product(value):
                return asymmetric_scale(0.0, threshold)
        masked = masked_range(value, self.hosts, self._range)
        if masked is not None:
            low, high = min(masked[0], 0.0), max(masked[1], 0.0)
            if self.asymmetric:
                return asymmetric_scale(low, high)
            return EdgeScale(scale_of(max(-low, high)))
        if not self.asymmetric or feeds_product(value):
            return EdgeScale(scale_of(threshold))
        low, high = self.ranges.get(name, (-threshold, threshold))
        return asymmetric_scale(low if self._negative(value) else 0.0, high)

    def _range(self, value: SSAValue) -> tuple[float, float] | None:
        """Return the range of a value, as far as it is known."""
        if is_constant(value):
            array = self.weights.get(constant_name(value))
            return (float(array.min()), float(array.max())) if array.size else None
        name = self.names.get(value, "")
        threshold = self.thresholds.get(name)
        return None if threshold is None else self.ranges.get(name, (-threshold, threshold))

    def _negative(self, value: SSAValue) -> bool:
        """Whether `value` may be negative, as far as the graph tells."""
        stack = [value]
        while stack:
            current = stack[-1]
            if current in self._signs:
                stack.pop()
                continue
            sources = self._sign_sources(current)
            if sources is None or any(self._signs.get(source) for source in sources):
                self._signs[current] = True
            else:
                waiting = [source for source in sources if source not in self._signs]
                if waiting:
                    stack += waiting
                    continue
                self._signs[current] = False
            stack.pop()
        return self._signs[value]

    def _sign_sources(self, value: SSAValue) -> list[SSAValue] | None:
        """Return the operands that must not be negative for `value` not to be; None: it may be."""
        op = value.owner
        if not isinstance(op, Operation):
            return None
        if is_constant(value):
            return None if bool((self.weights.get(constant_name(value)) < 0).any()) else []
        ceiling = op.attributes.get("clamp_max", op.attributes.get("max"))
        if isinstance(ceiling, FloatAttr) and ceiling.value.data < 0:
            return None
        bound = op.attributes.get("clamp_min", op.attributes.get("min"))
        if isinstance(bound, FloatAttr) and bound.value.data >= 0:
            return []
        if op.name in NEVER_NEGATIVE:
            return []
        if op.name not in KEEP_SIGN:
            return None
        kind = op.attributes.get("kind")
        if op.name == "top.reduce" and not (
            isinstance(kind, StringAttr) and kind.data in ("mean", "sum", "max", "min")
        ):
            return None
        filler = op.attributes.get("value")
        if op.name == "top.pad" and not (isinstance(filler, FloatAttr) and filler.value.data >= 0):
            return None
        mode = op.attributes.get("mode")
        if op.name == "top.resize" and isinstance(mode, StringAttr) and mode.data == "cubic":
            return None
        return [operand for operand in op.operands if not is_absent(operand)]

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
