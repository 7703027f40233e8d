"""Elementwise families of `top`, made from tables: a new function is one row.

A row is `name: (meaning, attributes)`; attributes are `key: kind` with kind one of `f32`, `i64`,
`i1`, `str`, and `?` appended if optional.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import override
from xdsl.dialects.builtin import FloatAttr, IntegerAttr, StringAttr, TensorType, i1
from xdsl.ir import Attribute
from xdsl.irdl import attr_def, irdl_op_definition, operand_def, opt_attr_def, result_def
from xdsl.utils.exceptions import VerifyException

from tilewright.dialects.top.base import (
    Attrs,
    TopOp,
    Types,
    broadcast,
    same_element,
    tensor,
    with_shape,
)

Row = tuple[str, dict[str, str]]

UNARY: dict[str, Row] = {
    "relu": ("max(x, 0)", {}),
    "clip": (
        "min(max(x, min), max); an absent bound does not bound",
        {"min": "f32?", "max": "f32?"},
    ),
    "leaky_relu": ("x if x >= 0 else alpha * x", {"alpha": "f32"}),
    "elu": ("x if x >= 0 else alpha * (exp(x) - 1)", {"alpha": "f32"}),
    "selu": ("gamma * (x if x > 0 else alpha * (exp(x) - 1))", {"alpha": "f32", "gamma": "f32"}),
    "celu": ("max(0, x) + min(0, alpha * (exp(x / alpha) - 1))", {"alpha": "f32"}),
    "thresholded_relu": ("x if x > alpha else 0", {"alpha": "f32"}),
    "sigmoid": ("1 / (1 + exp(-x))", {}),
    "hard_sigmoid": ("max(0, min(1, alpha * x + beta))", {"alpha": "f32", "beta": "f32"}),
    "hard_swish": ("x * max(0, min(1, x / 6 + 1 / 2))", {}),
    "silu": ("x * sigmoid(x)", {}),
    "mish": ("x * tanh(softplus(x))", {}),
    "softplus": ("log(exp(x) + 1)", {}),
    "softsign": ("x / (1 + abs(x))", {}),
    "shrink": (
        "x + bias if x < -lambd, x - bias if x > lambd, else 0",
        {"bias": "f32", "lambd": "f32"},
    ),
    "gelu": ('x / 2 * (1 + erf(x / sqrt(2))), or its "tanh" approximation', {"approximate": "str"}),
    "tanh": ("tanh(x)", {}),
    "erf": ("the error function", {}),
    "exp": ("e to the x", {}),
    "log": ("natural logarithm", {}),
    "sqrt": ("square root", {}),
    "rsqrt": ("1 / sqrt(x)", {}),
    "reciprocal": ("1 / x", {}),
    "neg": ("-x", {}),
    "abs": ("absolute value", {}),
    "sign": ("-1, 0 or 1", {}),
    "floor": ("rounded towards minus infinity", {}),
    "ceil": ("rounded towards plus infinity", {}),
    "round": ("rounded to nearest, ties to even", {}),
    "sin": ("sine", {}),
    "cos": ("cosine", {}),
    "tan": ("tangent", {}),
    "asin": ("arcsine", {}),
    "acos": ("arccosine", {}),
    "atan": ("arctangent", {}),
    "sinh": ("hyperbolic sine", {}),
    "cosh": ("hyperbolic cosine", {}),
    "asinh": ("inverse hyperbolic sine", {}),
    "acosh": ("inverse hyperbolic cosine", {}),
    "atanh": ("inverse hyperbolic tangent", {}),
    "not": ("logical not of i1", {}),
    "bitwise_not": ("all bits flipped", {}),
}

PREDICATES: dict[str, Row] = {
    "is_nan": ("whether x is not a number", {}),
    "is_inf": ("whether x is infinite", {"detect_negative": "i1", "detect_positive": "i1"}),
}

CLAMP = {"clamp_min": "f32?", "clamp_max": "f32?"}
"""A fused ReLU or Clip, applied to the float result."""

BINARY: dict[str, Row] = {
    "add": ("a + b, then the clamp", CLAMP),
    "sub": ("a - b", {}),
    "mul": ("a * b", {}),
    "div": ("a / b; integers: towards zero", {}),
    "pow": ("a to the b", {}),
    "min": ("the smaller", {}),
    "max": ("the larger", {}),
    "mod": ("remainder; sign of b, with fmod sign of a", {"fmod": "i1"}),
    "and": ("logical and of i1", {}),
    "or": ("logical or of i1", {}),
    "xor": ("logical exclusive or of i1", {}),
    "bitwise_and": ("bitwise and", {}),
    "bitwise_or": ("bitwise or", {}),
    "bitwise_xor": ("bitwise exclusive or", {}),
    "bit_shift": ('a shifted by b bits to the "LEFT" or "RIGHT"', {"direction": "str"}),
}

COMPARE: dict[str, Row] = {
    "equal": ("a = b", {}),
    "greater": ("a > b", {}),
    "greater_equal": ("a >= b", {}),
    "less": ("a < b", {}),
    "less_equal": ("a <= b", {}),
}

_KINDS: dict[str, Any] = {
    "f32": FloatAttr,
    "i64": IntegerAttr,
    "i1": IntegerAttr,
    "str": StringAttr,
}


class UnaryOp(TopOp):
    """A function of each element; the result has the operand's type."""

    x = operand_def()
    result = result_def()

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        low, high = attrs.number("min"), attrs.number("max")
        if low is not None and high is not None and low > high:
            raise VerifyException(f"`min` {low} is above `max` {high}")
        return [tensor(types, 0)]


class PredicateOp(TopOp):
    """A truth value of each element."""

    x = operand_def()
    result = result_def()

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        return [TensorType(i1, tensor(types, 0).get_shape())]


class BinaryOp(TopOp):
    """A function of two elements; shapes broadcast as in numpy, element types are equal."""

    a = operand_def()
    b = operand_def()
    result = result_def()

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        a, b = tensor(types, 0), tensor(types, 1)
        # In the quantised graph each edge has its own scale; only `quant` ops do arithmetic there.
        same_element(a, b)
        return [with_shape(a, broadcast(a.get_shape(), b.get_shape()))]


class CompareOp(TopOp):
    """A truth value of two elements; shapes broadcast as in numpy."""

    a = operand_def()
    b = operand_def()
    result = result_def()

    @classmethod
    @override
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        a, b = tensor(types, 0), tensor(types, 1)
        same_element(a, b)
        return [TensorType(i1, broadcast(a.get_shape(), b.get_shape()))]


def class_name(name: str) -> str:
    """Return the class name of an operation: `leaky_relu` gives `LeakyReluOp`."""
    return "".join(part.capitalize() for part in name.split("_")) + "Op"


def _family(base: type[Any], rows: Mapping[str, Row]) -> dict[str, type[Any]]:
    """Make one operation class for each row."""
    classes: dict[str, type[Any]] = {}
    for name, (meaning, attributes) in rows.items():
        fields: dict[str, Any] = {
            "name": f"top.{name}",
            "__doc__": f"Elementwise: {meaning}.",
            "__module__": __name__,
        }
        for key, kind in attributes.items():
            define: Any = opt_attr_def if kind.endswith("?") else attr_def
            fields[f"{key}_attr"] = define(_KINDS[kind.rstrip("?")], attr_name=key)
        made: Any = type(class_name(name), (base,), fields)
        classes[name] = irdl_op_definition(made)
    return classes


UNARY_OPS: dict[str, type[UnaryOp]] = _family(UnaryOp, UNARY)
PREDICATE_OPS: dict[str, type[PredicateOp]] = _family(PredicateOp, PREDICATES)
BINARY_OPS: dict[str, type[BinaryOp]] = _family(BinaryOp, BINARY)
COMPARE_OPS: dict[str, type[CompareOp]] = _family(CompareOp, COMPARE)

ReluOp = UNARY_OPS["relu"]
ClipOp = UNARY_OPS["clip"]
SigmoidOp = UNARY_OPS["sigmoid"]
HardSigmoidOp = UNARY_OPS["hard_sigmoid"]
HardSwishOp = UNARY_OPS["hard_swish"]
SiluOp = UNARY_OPS["silu"]
GeluOp = UNARY_OPS["gelu"]
TanhOp = UNARY_OPS["tanh"]
AddOp = BINARY_OPS["add"]
SubOp = BINARY_OPS["sub"]
MulOp = BINARY_OPS["mul"]
DivOp = BINARY_OPS["div"]
PowOp = BINARY_OPS["pow"]
MinOp = BINARY_OPS["min"]
MaxOp = BINARY_OPS["max"]
