"""The `arith` and some `math` operations on whole arrays, with MLIR's exact integer widths.

Sums, differences and products wrap at the type's width. What MLIR leaves undefined (a shift by
the width or more, a division by zero) raises, since an oracle must not pick a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from xdsl.dialects.builtin import (
    BFloat16Type,
    DenseIntOrFPElementsAttr,
    Float16Type,
    Float32Type,
    Float64Type,
    FloatAttr,
    IndexType,
    IntegerAttr,
    IntegerType,
    MemRefType,
    TensorType,
)
from xdsl.ir import Attribute, Operation

from tilewright.diagnostics import TilewrightError

Array = npt.NDArray[Any]
Evaluator = Callable[..., Array]


def fault(message: str, *details: str) -> TilewrightError:
    """Return the error for IR that cannot be executed, or whose behaviour is undefined."""
    return TilewrightError("E0501", f"the interpreter cannot go on: {message}", list(details))


def dtype_of(kind: Attribute) -> np.dtype[Any]:
    """Return the numpy type that holds a scalar, or the elements of a tensor or memref."""
    if isinstance(kind, TensorType | MemRefType):
        return dtype_of(kind.element_type)
    if isinstance(kind, IndexType):
        return np.dtype(np.int64)
    if isinstance(kind, IntegerType):
        width = kind.width.data
        if width == 1:
            return np.dtype(np.bool_)
        if width == 4:
            # Weights, a byte each; only `arith.extsi` takes them (`evaluator`).
            return np.dtype(np.int8)
        if width in (8, 16, 32, 64):
            return np.dtype(f"int{width}")
    if isinstance(kind, Float16Type):
        return np.dtype(np.float16)
    if isinstance(kind, Float32Type):
        return np.dtype(np.float32)
    if isinstance(kind, Float64Type):
        return np.dtype(np.float64)
    if isinstance(kind, BFloat16Type):
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    raise fault(f"no number type for {kind}")


def constant(op: Operation) -> Array:
    """Return the value of an `arith.constant`, rank 0 for scalars."""
    value, kind = op.properties["value"], op.results[0].type
    if isinstance(value, IntegerAttr | FloatAttr):
        data: Any = value.value.data
        if kind == IntegerType(1):
            return np.array(bool(data))
        if isinstance(value, IntegerAttr):
            # An unsigned literal (255 : i8) means the same bits.
            bits = dtype_of(kind).itemsize * 8
            data = (int(data) + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))
        return np.array(data, dtype_of(kind))
    if isinstance(value, DenseIntOrFPElementsAttr) and isinstance(kind, TensorType | MemRefType):
        shape = tuple(int(size) for size in kind.get_shape())
        data = np.array(value.get_values(), dtype_of(kind))
        return (
            np.broadcast_to(data.reshape(-1), (int(np.prod(shape)),)).reshape(shape)
            if (data.size == 1)
            else data.reshape(shape)
        )
    raise fault(f"unknown constant {value}")


def _unsigned(value: Array) -> Array:
    if value.dtype == np.bool_:
        return value.astype(np.uint8)
    return value.view(np.dtype(f"uint{value.dtype.itemsize * 8}"))


def _as_signed(value: Array, like: Array) -> Array:
    return value.astype(np.bool_) if like.dtype == np.bool_ else value.view(like.dtype)


def _shift_amount(value: Array, amount: Array) -> Array:
    bits = value.dtype.itemsize * 8
    if amount.size and not (int(amount.min()) >= 0 and int(amount.max()) < bits):
        raise fault(f"a shift of an i{bits} by {int(amount.min())}..{int(amount.max())} bits")
    return amount


def _shift_left(value: Array, amount: Array) -> Array:
    return np.left_shift(value, _shift_amount(value, amount))


def _shift_right(value: Array, amount: Array) -> Array:
    return np.right_shift(value, _shift_amount(value, amount))


def _shift_right_unsigned(value: Array, amount: Array) -> Array:
    amount = _shift_amount(value, amount)
    return _as_signed(np.right_shift(_unsigned(value), _unsigned(amount)), value)


def _divisor(value: Array, divisor: Array) -> Array:
    if not np.all(divisor):
        raise fault("a division by zero")
    if np.any((divisor == -1) & (value == np.iinfo(value.dtype).min)):
        raise fault("a division that overflows")
    return divisor


def _floor_divide(value: Array, divisor: Array) -> Array:
    return np.floor_divide(value, _divisor(value, divisor))


def _divide(value: Array, divisor: Array) -> Array:
    quotient = np.floor_divide(value, _divisor(value, divisor))
    inexact = quotient * divisor != value
    return quotient + (inexact & ((value < 0) != (divisor < 0))).astype(value.dtype)


def _ceil_divide(value: Array, divisor: Array) -> Array:
    quotient = np.floor_divide(value, _divisor(value, divisor))
    return quotient + (quotient * divisor != value).astype(value.dtype)


def _remainder(value: Array, divisor: Array) -> Array:
    return np.fmod(value, _divisor(value, divisor))


def _on_unsigned(function: Evaluator) -> Evaluator:
    def run(left: Array, right: Array) -> Array:
        return _as_signed(function(_unsigned(left), _unsigned(right)), left)

    return run


def _wrapping(function: Evaluator) -> Evaluator:
    def run(left: Array, right: Array) -> Array:
        if left.dtype == np.bool_:
            return (function(left.astype(np.uint8), right.astype(np.uint8)) & 1).astype(np.bool_)
        return function(left, right)

    return run


def _leading_zeros(value: Array) -> Array:
    left, width = _unsigned(value).astype(np.uint64), value.dtype.itemsize * 8
    bits = np.zeros(value.shape, value.dtype)
    for step in (32, 16, 8, 4, 2, 1):
        high = left >> np.uint64(step)
        bits += np.where(high > 0, step, 0).astype(value.dtype)
        left = np.where(high > 0, high, left)
    return width - bits - left.astype(value.dtype)


_BINARY: dict[str, Evaluator] = {
    "arith.addi": _wrapping(np.add),
    "arith.subi": _wrapping(np.subtract),
    "arith.muli": _wrapping(np.multiply),
    "arith.divsi": _divide,
    "arith.floordivsi": _floor_divide,
    "arith.ceildivsi": _ceil_divide,
    "arith.remsi": _remainder,
    "arith.divui": _on_unsigned(_floor_divide),
    "arith.remui": _on_unsigned(_remainder),
    "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or,
    "arith.xori": np.bitwise_xor,
    "arith.shli": _shift_left,
    "arith.shrsi": _shift_right,
    "arith.shrui": _shift_right_unsigned,
    "arith.minsi": np.minimum,
    "arith.maxsi": np.maximum,
    "arith.minui": _on_unsigned(np.minimum),
    "arith.maxui": _on_unsigned(np.maximum),
    "arith.addf": np.add,
    "arith.subf": np.subtract,
    "arith.mulf": np.multiply,
    "arith.divf": np.divide,
    "arith.maximumf": np.maximum,
    "arith.minimumf": np.minimum,
    "arith.maxnumf": np.fmax,
    "arith.minnumf": np.fmin,
    "arith.select": np.where,
    "arith.negf": np.negative,
    "math.absi": np.abs,
    "math.ctlz": _leading_zeros,
    "math.absf": np.abs,
    "math.erf": lambda value: _erf(value),
    "math.exp": np.exp,
    "math.log": np.log,
    "math.sqrt": np.sqrt,
    "math.rsqrt": lambda value: np.asarray(1, value.dtype) / np.sqrt(value),
    "math.tanh": np.tanh,
    "math.floor": np.floor,
    "math.ceil": np.ceil,
    "math.roundeven": np.rint,
}

_INTEGER_PREDICATES: list[Evaluator] = [
    np.equal,
    np.not_equal,
    np.less,
    np.less_equal,
    np.greater,
    np.greater_equal,
]
"""`arith.cmpi` predicates 0..5; 6..9 are the last four on unsigned values."""

_ORDERED: list[Evaluator] = [
    np.equal,
    np.greater,
    np.greater_equal,
    np.less,
    np.less_equal,
    np.not_equal,
]
"""`arith.cmpf` predicates 1..6 (false on NaN); 8..13 are the same, true on NaN."""


def _compare_integers(predicate: int) -> Evaluator:
    if predicate < 6:
        return _INTEGER_PREDICATES[predicate]
    function = _INTEGER_PREDICATES[predicate - 4]
    return lambda left, right: function(_unsigned(left), _unsigned(right))


def _compare_floats(predicate: int) -> Evaluator:
    def run(left: Array, right: Array) -> Array:
        unordered = np.isnan(left) | np.isnan(right)
        if predicate in (0, 15):
            return np.full(unordered.shape, predicate == 15)
        if predicate in (7, 14):
            return ~unordered if predicate == 7 else unordered
        result = _ORDERED[(predicate - 1) % 7](left, right)
        return result & ~unordered if predicate < 7 else result | unordered

    return run


def _extend_signed(target: np.dtype[Any]) -> Evaluator:
    def run(value: Array) -> Array:
        # The only bit of an i1 is its sign bit.
        return -value.astype(target) if value.dtype == np.bool_ else value.astype(target)

    return run


def _extend_unsigned(target: np.dtype[Any]) -> Evaluator:
    return lambda value: _unsigned(value).astype(target)


def _truncate(target: np.dtype[Any]) -> Evaluator:
    if target == np.bool_:
        return lambda value: (value & 1).astype(np.bool_)
    return lambda value: value.astype(target)


def _float_to_integer(target: np.dtype[Any]) -> Evaluator:
    def run(value: Array) -> Array:
        whole = np.trunc(value.astype(np.float64))
        limits = np.iinfo(target)
        if not np.all((whole >= float(limits.min)) & (whole < float(limits.max) + 1)):
            raise fault(f"a float that does not fit {target}")
        return whole.astype(target)

    return run


def _narrow_float(target: np.dtype[Any]) -> Evaluator:
    def run(value: Array) -> Array:
        result = value.astype(target)
        lost = np.isinf(result) & np.isfinite(value)
        if np.any(lost):
            # Defined (an infinity), but what the machine refuses must not go unseen here.
            worst = float(np.abs(value[lost]).max())
            raise TilewrightError(
                "E0304", f"a value overflows {target}", [f"its magnitude is {worst:.6g}"]
            )
        return result

    return run


_ERF = np.frompyfunc(math.erf, 1, 1)


def _erf(value: Array) -> Array:
    return np.asarray(_ERF(value.astype(np.float64)), np.float64).astype(value.dtype)


_CASTS: dict[str, Callable[[np.dtype[Any]], Evaluator]] = {
    "arith.extsi": _extend_signed,
    "arith.extui": _extend_unsigned,
    "arith.trunci": _truncate,
    "arith.index_cast": _extend_signed,
    "arith.index_castui": _extend_unsigned,
    "arith.sitofp": _extend_signed,
    "arith.uitofp": _extend_unsigned,
    "arith.fptosi": _float_to_integer,
    "arith.extf": lambda target: lambda value: value.astype(target),
    "arith.truncf": _narrow_float,
    "arith.bitcast": lambda target: lambda value: value.view(target),
}


def evaluator(op: Operation) -> Evaluator | None:
    """Return the array function of a scalar op (operands in order), or None if it is not one.

    Raises:
        TilewrightError: E0501, arithmetic on i4: nothing here wraps at 4 bits.
    """
    narrow = any(value.type == IntegerType(4) for value in op.operands)
    if any(value.type == IntegerType(4) for value in op.results) or (
        narrow and op.name != "arith.extsi"
    ):
        raise fault(f"{op.name} of i4")
    if op.name in _CASTS:
        return _CASTS[op.name](dtype_of(op.results[0].type))
    if op.name in ("arith.cmpi", "arith.cmpf"):
        predicate = op.properties["predicate"]
        assert isinstance(predicate, IntegerAttr)
        number = predicate.value.data
        return _compare_integers(number) if op.name == "arith.cmpi" else _compare_floats(number)
    return _BINARY.get(op.name)
