"""Models that bring their own scales: what stays on the host without any, exact tables, rounding.

A value with a given scale is exactly the codes the model says, so nothing here is searched or
approximated. What has neither a given nor a calibrated scale is computed in float on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.dialects.func import ReturnOp
from xdsl.ir import Operation, SSAValue

from tilewright.dialects.top.base import is_absent
from tilewright.quant.functions import FUNCTIONS, Parameters
from tilewright.quant.graph import main_function
from tilewright.quant.parameters import encode_multiplier
from tilewright.transforms.quant.classify import (
    LAYOUT_OPS,
    SCALE_KEEPERS,
    constant_name,
    is_constant,
    place,
    scalar_operand,
)
from tilewright.transforms.quant.scales import EdgeScale, exact_gain, given_scale

if TYPE_CHECKING:
    from tilewright.ir.weights import WeightStore

TENSOR_OPERANDS = frozenset({"top.add", "top.sub", "top.mul", "top.concat", "top.matmul"})
"""Ops that read a constant as codes of one scale."""


QUANTISED = (
    "top.quantize_linear",
    "top.dequantize_linear",
    "top.dynamic_quantize_linear",
    "top.matmul_integer",
    "top.conv_integer",
)


def brings_scales(module: ModuleOp) -> bool:
    """Return whether a float module comes from a quantised model."""
    main = main_function(module)
    if "arg_quant_scales" in main.attributes:
        return True
    keys = ("quant_scale", "weight_scale")
    return any(
        op.name in QUANTISED or any(key in op.attributes for key in keys)
        for op in main.body.block.ops
    )


def has_given_scales(ops: list[Operation]) -> bool:
    """Return whether a model brings scales of its own."""
    return any("quant_scale" in op.attributes for op in ops)


class _Known:
    """Which values have a scale, in one walk over the graph."""

    def __init__(
        self,
        hosts: Mapping[Operation, str],
        names: Mapping[SSAValue, str],
        thresholds: Mapping[str, float],
        arguments: Mapping[SSAValue, EdgeScale],
        weights: WeightStore,
    ) -> None:
        self.hosts = hosts
        self.names = names
        self.thresholds = thresholds
        self.weights = weights
        self.edges: dict[SSAValue, EdgeScale | None] = dict(arguments)
        """Given scales; None: calibrated."""

    def has(self, value: SSAValue) -> bool:
        return value in self.edges or self.names.get(value) in self.thresholds

    def missing(self, op: Operation) -> str | None:
        """Return why an op of the chip cannot be one, and note the scales of its results."""
        source = self._source(op)
        for index, result in enumerate(op.results):
            given = given_scale(op) if index == 0 else None
            if given is not None:
                self.edges[result] = given
            elif source is not None and self.has(source):
                edge = self.edges.get(source)
                self.edges[result] = edge if op.name in SCALE_KEEPERS else None
        if op in self.hosts:
            return None
        return self._scales(op) or self._constants(op) or self._product(op)

    def _source(self, op: Operation) -> SSAValue | None:
        if op.name in LAYOUT_OPS or (op not in self.hosts and op.name in SCALE_KEEPERS):
            return op.operands[0]
        if op not in self.hosts and exact_gain(op, self.weights) is not None:
            index = scalar_operand(op)
            assert index is not None
            return op.operands[1 - index]
        return None

    def _scales(self, op: Operation) -> str | None:
        values = [v for v in op.operands if not is_constant(v) and not is_absent(v)]
        if not gives_sums(op, self.hosts):
            values += op.results
        for value in values:
            if not self.has(value):
                name = self.names[value]
                return f'no scale is given for "{name}", and there is no calibration data'
        return None

    def _constants(self, op: Operation) -> str | None:
        if op.name not in TENSOR_OPERANDS or scalar_operand(op) is not None or self.thresholds:
            return None
        for index, value in enumerate(op.operands):
            if not is_constant(value) or (op.name == "top.matmul" and index == 1):
                continue
            assert isinstance(value.owner, Operation)
            if given_scale(value.owner) is None:
                name = constant_name(value)
                return f'no scale is given for the constant "{name}"'
        return None

    def _product(self, op: Operation) -> str | None:
        if op.name != "top.matmul" or any(map(is_constant, op.operands)):
            return None
        parts = [
            len(split_tables(edge.zero)) if (edge := self.edges.get(value)) else 1
            for value in op.operands
        ]
        if math.prod(parts) > MAX_PARTS:
            return (
                f"its operands have zero points: {parts[0]} x {parts[1]} products of 8 bits would "
                "be summed"
            )
        return None


MAX_PARTS = 6
"""Products of 8 bits that one of two activations with zero points may be made of."""


def split_tables(zero: int) -> list[npt.NDArray[np.int8]]:
    """Return tables of 256 codes whose sum is `code - zero`, for codes -128..127; none for 0."""
    rest = np.arange(-128, 128) - zero
    if zero == 0:
        return [rest.astype(np.int8)]
    tables: list[npt.NDArray[np.int8]] = []
    while rest.any():
        part = np.clip(rest, -128, 127)
        tables.append(part.astype(np.int8))
        rest = rest - part
    return tables


def gives_sums(op: Operation, hosts: Mapping[Operation, str]) -> bool:
    """Return whether only floats are wanted of a product with constants: its sums need no scale."""
    if op.name not in ("top.linear", "top.matmul") or given_scale(op) is not None:
        return False
    if "clamp_min" in op.attributes or "clamp_max" in op.attributes:
        return False
    return all(
        use.operation in hosts or isinstance(use.operation, ReturnOp) for use in op.results[0].uses
    )


def place_given(
    ops: list[Operation],
    weights: WeightStore,
    reason_of: Callable[[Operation, WeightStore], str | None],
    names: Mapping[SSAValue, str],
    thresholds: Mapping[str, float],
    arguments: Mapping[SSAValue, EdgeScale],
) -> dict[Operation, str]:
    """Place ops as `place` does; those whose values have no scale run on the host."""
    reasons: dict[Operation, str] = {}

    def reason(op: Operation, store: WeightStore) -> str | None:
        host = op.attributes.get("host")
        if isinstance(host, StringAttr):
            return host.data
        return reasons.get(op) or reason_of(op, store)

    while True:
        hosts = place(ops, weights, reason)
        if thresholds and not (arguments or has_given_scales(ops)):
            return hosts
        known = _Known(hosts, names, thresholds, arguments, weights)
        found = {op: why for op in ops if (why := known.missing(op)) is not None}
        if not found:
            return hosts
        reasons.update(found)


def exact_table(
    function: str,
    parameters: Parameters,
    source: EdgeScale,
    target: EdgeScale,
) -> npt.NDArray[np.int8]:
    """Return the codes of a function for input codes -128..127, as Q(f(DQ(code))) gives them.

    Dequantised, divided and rounded (half to even) in float32, as ONNX does; saturated to
    -128..127. The function itself is computed in float64 and rounded once.

    Raises:
        ValueError: the function is undefined for some code.
    """
    codes = np.arange(-128, 128)
    real = (codes - source.zero).astype(np.float32) * np.float32(source.step)
    with np.errstate(all="ignore"):
        value = FUNCTIONS[function](real.astype(np.float64), parameters).astype(np.float32)
        ratio = np.rint(value / np.float32(target.step)).astype(np.float64)
    if np.isnan(ratio).any():
        raise ValueError(f"{function} is undefined for some codes of its operand")
    return np.clip(ratio + target.zero, -128, 127).astype(np.int8)


def given_bias(
    op: Operation, weights: WeightStore
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]] | None:
    """Return the codes of a layer's bias and their scales, if the model gives them."""
    codes, scale = op.attributes.get("bias_codes"), op.attributes.get("bias_scale")
    if not isinstance(codes, StringAttr) or not isinstance(scale, StringAttr):
        return None
    found = weights.get(codes.data).astype(np.int64).reshape(-1)
    return found, np.broadcast_to(weights.get(scale.data).astype(np.float64), found.shape)


MAX_TIE_BITS = 12
"""Ties rarer than one value in so many powers of two are not worth a warning."""


def tie_share(ratios: list[float]) -> float:
    """Return the share of sums that lie exactly between two codes, for factors in front of them.

    A factor that is an odd multiple of 2^-k puts every 2^k-th sum on a tie. Others never do, but
    for the float rounding of the model's own arithmetic.
    """
    bits = 0
    for ratio in ratios:
        mantissa, _ = math.frexp(ratio)
        # The trailing bit of the factor, as far as the multiplier's 31 bits resolve it.
        scaled, exponent = round(mantissa * 2**24), math.frexp(ratio)[1] - 24
        while scaled and scaled % 2 == 0:
            scaled, exponent = scaled // 2, exponent + 1
        bits = max(bits, -exponent)
    return 2.0**-bits if 0 < bits <= MAX_TIE_BITS else 0.0


DIFFERING = {"half_even": 0.0, "half_up": 0.5, "half_away": 0.5, "truncate": 0.5}
"""Share of ties that a rounding takes to another code than half to even (`truncate` is made to
round half up)."""


def offset_share(ratio: float) -> float:
    """Return the share of values that a truncating chip rounds differently, ties apart.

    What it adds to a 32-bit sum to round half up is a whole number of units of that sum, `e` off
    the exact one (see `truncation_term`). In an output step lie `1 / ratio` sums and one tie, and
    with probability `e` a sum between the two: so a share of `e * ratio`.
    """
    m, s = encode_multiplier(ratio)
    if m == 0 or s == 0:
        return 0.0
    twice = 257 << s
    return abs((twice + m) // (2 * m) - twice / (2 * m)) * ratio


NOTICEABLE = 1e-3
"""Share of a layer's values that is worth a warning."""


def rounding_warning(
    layer: str, ratios: Sequence[Sequence[float]], rounding: str, whole: bool
) -> str | None:
    """Return a warning if a chip rounds a noticeable share of a layer's values differently.

    Args:
        layer: its name.
        ratios: for every channel (or once for all), the factors in front of its sums.
        rounding: the chip's.
        whole: whether a truncating chip compensates in whole units of the sum.
    """
    count = max(1, len(ratios))
    ties = sum(tie_share(list(factors)) for factors in ratios) / count * DIFFERING[rounding]
    share, why = ties, "its scales put sums exactly between two codes, which ONNX rounds to even"
    if rounding == "truncate" and whole:
        share += sum(offset_share(factors[0]) for factors in ratios) / count
        if share > 2 * ties:
            why = "its sums are coarse, and a truncating chip makes up for that in whole units"
    if share < NOTICEABLE:
        return None
    return f"`{layer}`: {why}: about {100 * share:.2g} % of the values may differ by one code"


__all__ = [
    "exact_table",
    "given_bias",
    "gives_sums",
    "has_given_scales",
    "place_given",
    "rounding_warning",
    "tie_share",
]
