"""Elementwise operators: activations, arithmetic, logic, comparisons, casts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from xdsl.dialects.builtin import TensorType, f32, f64
from xdsl.ir import Attribute, SSAValue

from tilewright.dialects import top
from tilewright.dialects.top.base import element_type
from tilewright.transforms.onnx.base import (
    MAX_MADE_ELEMENTS,
    Node,
    RefusedError,
    UnknownOperandError,
    axis_of,
    element,
    is_float,
    rule,
    shape_of,
)

PLAIN_UNARY = {
    "Relu": "relu",
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
    "Erf": "erf",
    "Exp": "exp",
    "Log": "log",
    "Sqrt": "sqrt",
    "Reciprocal": "reciprocal",
    "Neg": "neg",
    "Abs": "abs",
    "Sign": "sign",
    "Floor": "floor",
    "Ceil": "ceil",
    "Round": "round",
    "Softplus": "softplus",
    "Softsign": "softsign",
    "HardSwish": "hard_swish",
    "Mish": "mish",
    "Sin": "sin",
    "Cos": "cos",
    "Tan": "tan",
    "Asin": "asin",
    "Acos": "acos",
    "Atan": "atan",
    "Sinh": "sinh",
    "Cosh": "cosh",
    "Asinh": "asinh",
    "Acosh": "acosh",
    "Atanh": "atanh",
    "Not": "not",
    "BitwiseNot": "bitwise_not",
    "IsNaN": "is_nan",
}
"""Operators without attributes, and the `top` op that means the same."""

FLOAT_UNARY: dict[str, tuple[str, dict[str, float]]] = {
    "LeakyRelu": ("leaky_relu", {"alpha": 0.01}),
    "Elu": ("elu", {"alpha": 1.0}),
    "Celu": ("celu", {"alpha": 1.0}),
    "Selu": ("selu", {"alpha": 1.67326319217681884765625, "gamma": 1.05070102214813232421875}),
    "ThresholdedRelu": ("thresholded_relu", {"alpha": 1.0}),
    "HardSigmoid": ("hard_sigmoid", {"alpha": 0.2, "beta": 0.5}),
    "Shrink": ("shrink", {"bias": 0.0, "lambd": 0.5}),
}
"""Operators whose attributes are floats: the `top` op and the defaults."""

BINARY = {
    "Add": "add",
    "Sub": "sub",
    "Mul": "mul",
    "Div": "div",
    "And": "and",
    "Or": "or",
    "Xor": "xor",
    "BitwiseAnd": "bitwise_and",
    "BitwiseOr": "bitwise_or",
    "BitwiseXor": "bitwise_xor",
    "Equal": "equal",
    "Greater": "greater",
    "GreaterOrEqual": "greater_equal",
    "Less": "less",
    "LessOrEqual": "less_equal",
}
"""Operators of two operands without attributes."""


@rule(*PLAIN_UNARY)
def _plain(node: Node) -> SSAValue:
    return node.emit(PLAIN_UNARY[node.op_type], [node.operand(0)])


@rule(*FLOAT_UNARY)
def _float_unary(node: Node) -> SSAValue:
    kind, defaults = FLOAT_UNARY[node.op_type]
    numbers = {key: node.number(key, default) for key, default in defaults.items()}
    return node.emit(kind, [node.operand(0)], numbers)


@rule(*BINARY)
def _binary(node: Node) -> SSAValue:
    return node.emit(BINARY[node.op_type], [node.operand(0), node.operand(1)])


@rule("Pow")
def _pow(node: Node) -> SSAValue:
    """The exponent may have a type of its own; the result has the base's."""
    base, exponent = node.operand(0), node.operand(1)
    if element(base) == element(exponent):
        return node.emit("pow", [base, exponent])
    if is_float(base):
        return node.emit("pow", [base, node.cast(exponent, element(base))])
    # An integer to a float power is computed in double precision and cut back.
    wide = [node.cast(value, f64) for value in (base, exponent)]
    return node.cast(node.emit("pow", wide), element(base))


@rule("Sum", "Max", "Min", "Mean")
def _variadic(node: Node) -> SSAValue:
    values = node.operands()
    kind = {"Sum": "add", "Max": "max", "Min": "min", "Mean": "add"}[node.op_type]
    result = values[0]
    for value in values[1:]:
        result = node.emit(kind, [result, value])
    if node.op_type == "Mean" and len(values) > 1:
        result = node.emit("div", [result, node.scalar(len(values), result, "count")])
    return result


@rule("Mod")
def _mod(node: Node) -> SSAValue:
    fmod = bool(node.integer("fmod", 0))
    if not fmod and is_float(node.operand(0)):
        raise RefusedError("floats need `fmod = 1`")
    return node.emit("mod", [node.operand(0), node.operand(1)], {"fmod": fmod})


@rule("BitShift")
def _bit_shift(node: Node) -> SSAValue:
    direction = node.string("direction", "")
    return node.emit("bit_shift", [node.operand(0), node.operand(1)], {"direction": direction})


@rule("IsInf")
def _is_inf(node: Node) -> SSAValue:
    flags = {key: bool(node.integer(key, 1)) for key in ("detect_negative", "detect_positive")}
    return node.emit("is_inf", [node.operand(0)], flags)


@rule("Where")
def _where(node: Node) -> SSAValue:
    return node.emit("where", [node.operand(0), node.operand(1), node.operand(2)])


@rule("Cast")
def _cast(node: Node) -> SSAValue:
    node.integer("to", 0)
    # `saturate` and `round_mode` speak of 8-bit floats only, which are refused by type.
    node.meaningless("saturate", "round_mode")
    value, target = node.operand(0), node.result_type().get_element_type()
    narrow = np.dtype(top.numpy_dtype(target))
    if is_float(value) and narrow.kind in "iu" and narrow.itemsize < 4:
        # Values that do not fit are undefined by ONNX; through i32 they wrap, as in numpy.
        value = node.cast(value, element_type(np.dtype(np.int32)))
    return node.cast(value, target)


@rule("Identity")
def _identity(node: Node) -> SSAValue:
    return node.operand(0)


@rule("Dropout")
def _dropout(node: Node) -> Sequence[SSAValue | None]:
    """In inference the identity; the mask, if asked for, is all true."""
    node.meaningless("ratio", "seed")
    if node.opset >= 12:
        training = node.constant(2)
        ratio = node.constant(1)
        node.settled(1)
        if node.given(2) and training is None:
            raise UnknownOperandError(2, "`training_mode` must be known at compile time")
        if training is not None and bool(training) and (ratio is None or float(ratio) != 0.0):
            raise RefusedError("`training_mode` is set; only inference is compiled")
    x = node.operand(0)
    if not node.wants(1):
        return [x]
    mask_type = top.numpy_dtype(node.result_type(1).get_element_type())
    return [x, node.weight(np.ones(shape_of(x), mask_type), "mask")]


@rule("Clip")
def _clip(node: Node) -> SSAValue:
    """Bounds are attributes below opset 11, then operands that may be left out or computed."""
    x = node.operand(0)
    limit = float(np.finfo(np.float32).max)
    if node.opset < 11:
        low: float | None = node.number("min", -limit)
        high: float | None = node.number("max", limit)
        # The defaults stand for no bound.
        low = None if low is not None and low <= -limit else low
        high = None if high is not None and high >= limit else high
        return _clip_constant(node, x, low, high)
    if any(node.given(i) and shape_of(node.operand(i)) not in ((), (1,)) for i in (1, 2)):
        raise RefusedError("bounds must be scalars")
    bounds = [node.constant(1), node.constant(2)]
    known = all(b is not None or not node.given(i) for i, b in enumerate(bounds, 1))
    if known and is_float(x):
        numbers = [None if b is None else float(b.reshape(())) for b in bounds]
        if all(n is None or float(np.float32(n)) == n for n in numbers):
            return _clip_constant(node, x, numbers[0], numbers[1])
    # First the lower bound, then the upper: with min > max the result is max.
    for index, kind in ((1, "max"), (2, "min")):
        if node.given(index):
            x = node.emit(kind, [x, node.reshape(node.operand(index), [])])
    return x


def _clip_constant(node: Node, x: SSAValue, low: float | None, high: float | None) -> SSAValue:
    low = None if low is not None and low == -np.inf else low
    high = None if high is not None and high == np.inf else high
    if low is None and high is None:
        return x
    if low is not None and high is not None and low > high:
        x = node.emit("clip", [x], {"min": low})
        return node.emit("clip", [x], {"max": high})
    return node.emit("clip", [x], {"min": low, "max": high})


@rule("Gelu")
def _gelu(node: Node) -> SSAValue:
    return node.emit("gelu", [node.operand(0)], {"approximate": node.string("approximate", "none")})


@rule("Swish")
def _swish(node: Node) -> SSAValue:
    x, alpha = node.operand(0), node.number("alpha", 1.0)
    if alpha == 1.0:
        return node.emit("silu", [x])
    scaled = node.emit("mul", [x, node.scalar(alpha, x, "alpha")])
    return node.emit("mul", [x, node.emit("sigmoid", [scaled])])


@rule("PRelu")
def _prelu(node: Node) -> SSAValue:
    return node.emit("prelu", [node.operand(0), node.operand(1)])


@rule("Softmax", "LogSoftmax", "Hardmax")
def _softmax(node: Node) -> SSAValue:
    """Below opset 13 the operand is a matrix split at `axis` (default 1), normalised by rows."""
    kind = {"Softmax": "softmax", "LogSoftmax": "log_softmax", "Hardmax": "hardmax"}[node.op_type]
    x = node.operand(0)
    shape = shape_of(x)
    if node.opset >= 13:
        axis = axis_of(node.integer("axis", -1), len(shape))
        if not shape:
            raise RefusedError("a scalar has no axis to normalise")
        return node.emit(kind, [x], {"axis": axis})
    axis = node.integer("axis", 1)
    if not -len(shape) <= axis <= len(shape):
        raise RefusedError(f"axis {axis} is outside rank {len(shape)}")
    axis = axis + len(shape) if axis < 0 else axis
    if axis == len(shape) - 1:
        return node.emit(kind, [x], {"axis": axis})
    rows = int(np.prod(shape[:axis], dtype=np.int64))
    flat = node.reshape(x, [rows, int(np.prod(shape[axis:], dtype=np.int64))])
    return node.reshape(node.emit(kind, [flat], {"axis": 1}), shape)


@rule("CumSum")
def _cumsum(node: Node) -> SSAValue:
    x = node.operand(0)
    axis = axis_of(int(node.needs_scalar(1, "the axis")), len(shape_of(x)))
    flags = {key: bool(node.integer(key, 0)) for key in ("exclusive", "reverse")}
    return node.emit("cumsum", [x], {"axis": axis, **flags})


@rule("Trilu")
def _trilu(node: Node) -> SSAValue:
    """A constant mask keeps one triangle."""
    x = node.operand(0)
    shape = shape_of(x)
    k = int(node.needs_scalar(1, "the diagonal")) if node.given(1) else 0
    triangle = np.triu if node.integer("upper", 1) else np.tril
    if np.prod(shape[-2:], dtype=object) > MAX_MADE_ELEMENTS:
        raise RefusedError(f"it needs a mask of shape {list(shape[-2:])}")
    mask = node.weight(triangle(np.ones(shape[-2:], np.bool_), k), "mask")
    return node.emit("where", [mask, x, node.scalar(0, x, "zero")])


@rule("LpNormalization")
def _lp_normalization(node: Node) -> SSAValue:
    """`x / norm` along one axis; where the norm is 0 the result is 0."""
    x = node.operand(0)
    axis = axis_of(node.integer("axis", -1), len(shape_of(x)))
    order = node.integer("p", 2)
    if order not in (1, 2):
        raise RefusedError(f"`p` is {order}; ONNX defines 1 and 2")
    norm = node.emit("reduce", [x], {"kind": f"l{order}", "axes": [axis], "keepdims": True})
    zero = node.scalar(0, x, "zero")
    return node.emit("where", [node.emit("equal", [norm, zero]), zero, node.emit("div", [x, norm])])


@rule("OneHot")
def _one_hot(node: Node) -> SSAValue:
    """Compare indices with a ramp; negative ones count from the end, others give `off`."""
    depth = int(node.needs_scalar(1, "the depth"))
    indices, values = node.operand(0), node.operand(2)
    rank = len(shape_of(indices)) + 1
    axis = axis_of(node.integer("axis", -1), rank)
    if element(indices) != f32:
        wide = node.cast(indices, element_type(np.dtype(np.int64)))
    else:
        wide = indices
    count = node.scalar(depth, wide, "depth")
    negative = node.emit("less", [wide, node.scalar(0, wide, "zero")])
    wide = node.emit("where", [negative, node.emit("add", [wide, count]), wide])
    shape = shape_of(indices)
    wide = node.reshape(wide, [*shape[:axis], 1, *shape[axis:]])
    ramp = np.arange(depth, dtype=top.numpy_dtype(element(wide)))
    ramp = ramp.reshape([-1 if i == axis else 1 for i in range(rank)])
    hot = node.emit("equal", [wide, node.weight(ramp, "ramp")])
    off, on = (
        node.reshape(
            node.emit("slice", [values], {"starts": [i], "steps": [1]}, [_vector_type(values, 1)]),
            [],
        )
        for i in (0, 1)
    )
    return node.emit("where", [hot, on, off])


def _vector_type(like: SSAValue, size: int) -> TensorType[Attribute]:
    return TensorType(element(like), [size])
