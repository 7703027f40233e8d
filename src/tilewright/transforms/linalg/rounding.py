"""The rounding shift and the requantising tail, spelled out in `arith` (docs/concepts/numerics.md).

With `h = (1 << s) >> 1` (0 when `s` is 0) and `>>` the arithmetic shift:

- half_up: `(v + h) >> s`
- half_away: `(abs(v) + h) >> s`, the sign of `v` put back
- half_even: `(v + max(h - 1 + (v >> s) mod 2, 0)) >> s`; the maximum is only for `s = 0`
- truncate: `abs(v) >> s`, the sign put back
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from xdsl.dialects import arith
from xdsl.dialects.builtin import StringAttr, i8, i32, i64
from xdsl.ir import Operation, SSAValue

from tilewright.diagnostics import TilewrightError
from tilewright.dialects.quant import ROUNDINGS, int_of
from tilewright.transforms.linalg.emit import Body, BodyFunction


@dataclass(frozen=True)
class Output:
    """How a wide value becomes a code: `clamp(rshift(v, s, rounding) + zp, lo, hi)`."""

    zp: int
    lo: int
    hi: int
    rounding: str

    @staticmethod
    def of(op: Operation) -> Output:
        """Read the attributes of a `quant` op."""
        rounding = op.attributes["rounding"]
        assert isinstance(rounding, StringAttr)
        assert rounding.data in ROUNDINGS
        zp, lo, hi = (int_of(op.attributes[key]) for key in ("zp", "lo", "hi"))
        return Output(zp, lo, hi, rounding.data)

    @property
    def tags(self) -> dict[str, int | str]:
        """What later stages must know."""
        return {"zp": self.zp, "lo": self.lo, "hi": self.hi, "rounding": self.rounding}


def scalar_tags(op: Operation, *keys: str) -> dict[str, int | str]:
    """Return the named parameters of a `quant` op and its output clamp, for later stages."""
    return {**{key: int_of(op.attributes[key]) for key in keys}, **Output.of(op).tags}


def rounding_shift(body: Body, value: SSAValue, shift: SSAValue, rounding: str) -> SSAValue:
    """Return `rshift(value, shift, rounding)`; all are i64, `value + h` must fit."""
    if rounding == "truncate":
        return _signed(body, value, lambda size: body.add(arith.ShRSIOp(size, shift)))
    one = body.constant(1, i64)
    half = body.add(arith.ShRUIOp(body.add(arith.ShLIOp(one, shift)), one))
    if rounding == "half_up":
        return body.add(arith.ShRSIOp(body.plus(value, half), shift))
    if rounding == "half_away":
        return _signed(
            body, value, lambda size: body.add(arith.ShRSIOp(body.plus(size, half), shift))
        )
    odd = body.add(arith.AndIOp(body.add(arith.ShRSIOp(value, shift)), one))
    nudge = body.plus(body.minus(half, one), odd)
    nudge = body.add(arith.MaxSIOp(nudge, body.constant(0, i64)))
    return body.add(arith.ShRSIOp(body.plus(value, nudge), shift))


def _signed(body: Body, value: SSAValue, magnitude: Callable[[SSAValue], SSAValue]) -> SSAValue:
    zero = body.constant(0, i64)
    negative = body.add(arith.CmpiOp(value, zero, "slt"))
    size = body.add(arith.SelectOp(negative, body.minus(zero, value), value))
    result = magnitude(size)
    return body.add(arith.SelectOp(negative, body.minus(zero, result), result))


def to_code(body: Body, value: SSAValue, shift: SSAValue, output: Output) -> SSAValue:
    """Shift an i64, add the zero point, clamp, and truncate to i8."""
    result = rounding_shift(body, value, shift, output.rounding)
    if output.zp != 0:
        result = body.plus(result, body.constant(output.zp, i64))
    result = body.add(arith.MaxSIOp(result, body.constant(output.lo, i64)))
    result = body.add(arith.MinSIOp(result, body.constant(output.hi, i64)))
    return body.add(arith.TruncIOp(result, i8))


def requantise(output: Output) -> BodyFunction:
    """Return the per-channel body, for `(acc i32, bias i32, mult i32, shift i8, _)`."""

    def build(body: Body) -> SSAValue:
        acc, bias, mult, shift = body.args[:4]
        value = body.extend(body.plus(acc, bias), i64)
        value = body.times(value, body.extend(mult, i64))
        return to_code(body, value, body.extend(shift, i64), output)

    return build


def requantise_scalar(op: Operation, output: Output) -> BodyFunction:
    """Return a body for `(acc i32, _)` with the `bias`, `mult`, `shift` attributes of `op`."""
    bias, mult, shift = (int_of(op.attributes[key]) for key in ("bias", "mult", "shift"))

    def build(body: Body) -> SSAValue:
        acc = body.args[0]
        if bias != 0:
            acc = body.plus(acc, body.constant(bias, i32))
        value = body.times(body.extend(acc, i64), body.constant(mult, i64))
        return to_code(body, value, body.constant(shift, i64), output)

    return build


@dataclass(frozen=True)
class WideSum:
    """The constants of `(sum + bias * 2^bias_shift) >> shift`, in 64 bits, rounded once."""

    offset: int
    shift: int

    @staticmethod
    def of(op: Operation, layer: str, largest: int) -> WideSum:
        """Read the attributes of `op`, whose products sum to at most `largest` in magnitude.

        Raises:
            TilewrightError: E0302, the sum with its rounding term could leave 64 bits.
        """
        offset = int_of(op.attributes["bias"]) << int_of(op.attributes["bias_shift"])
        shift = int_of(op.attributes["shift"])
        half = (1 << shift) >> 1
        if largest + abs(offset) + half >= 1 << 63:
            raise TilewrightError(
                "E0302",
                f'layer "{layer}" could overflow 64 bits before its rounding shift',
                [f"largest product sum {largest}, bias {offset}, rounding term {half}"],
            )
        return WideSum(offset, shift)

    def finish(self, body: Body, value: SSAValue, output: Output) -> SSAValue:
        """Add the bias to an i64 sum, round, clamp."""
        if self.offset != 0:
            value = body.plus(value, body.constant(self.offset, i64))
        return to_code(body, value, body.constant(self.shift, i64), output)
