"""Lookup tables: any function of one activation as 256 int8 codes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Parameters = Mapping[str, float | str]
Function = Callable[[FloatArray, Parameters], FloatArray]


def _number(parameters: Parameters, name: str, default: float) -> float:
    return float(parameters.get(name, default))


def _sigmoid(x: FloatArray) -> FloatArray:
    # Through tanh: no overflow on either side.
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def _erf(x: FloatArray) -> FloatArray:
    return np.array([math.erf(value) for value in x.ravel()], dtype=np.float64).reshape(x.shape)


def _hard_sigmoid(x: FloatArray, p: Parameters) -> FloatArray:
    return np.clip(_number(p, "alpha", 0.2) * x + _number(p, "beta", 0.5), 0.0, 1.0)


def _gelu(x: FloatArray, p: Parameters) -> FloatArray:
    if p.get("approximate", "none") == "tanh":
        return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0)))


def _softplus(x: FloatArray) -> FloatArray:
    return np.logaddexp(0.0, x)


FUNCTIONS: dict[str, Function] = {
    "abs": lambda x, _: np.abs(x),
    "celu": lambda x, p: (
        np.maximum(x, 0.0)
        + np.minimum(
            0.0, _number(p, "alpha", 1.0) * np.expm1(np.minimum(x, 0.0) / _number(p, "alpha", 1.0))
        )
    ),
    "ceil": lambda x, _: np.ceil(x),
    "clip": lambda x, p: np.clip(x, _number(p, "min", -math.inf), _number(p, "max", math.inf)),
    "cos": lambda x, _: np.cos(x),
    "elu": lambda x, p: np.where(x > 0, x, _number(p, "alpha", 1.0) * np.expm1(np.minimum(x, 0.0))),
    "erf": lambda x, _: _erf(x),
    "exp": lambda x, _: np.exp(x),
    "floor": lambda x, _: np.floor(x),
    "gelu": _gelu,
    "hard_sigmoid": _hard_sigmoid,
    "hard_swish": lambda x, _: x * np.clip(x / 6.0 + 0.5, 0.0, 1.0),
    "leaky_relu": lambda x, p: np.where(x >= 0, x, _number(p, "alpha", 0.01) * x),
    "log": lambda x, _: np.log(x),
    "mish": lambda x, _: x * np.tanh(_softplus(x)),
    "neg": lambda x, _: -x,
    "pow": lambda x, p: np.power(x, _number(p, "exponent", 1.0)),
    "reciprocal": lambda x, _: 1.0 / x,
    "relu": lambda x, _: np.maximum(x, 0.0),
    "round": lambda x, _: np.rint(x),
    "rsqrt": lambda x, _: 1.0 / np.sqrt(x),
    "selu": lambda x, p: (
        _number(p, "gamma", 1.0507009873554805)
        * np.where(x > 0, x, _number(p, "alpha", 1.6732632423543772) * np.expm1(np.minimum(x, 0.0)))
    ),
    "sigmoid": lambda x, _: _sigmoid(x),
    "sign": lambda x, _: np.sign(x),
    "silu": lambda x, _: x * _sigmoid(x),
    "sin": lambda x, _: np.sin(x),
    "softplus": lambda x, _: _softplus(x),
    "softsign": lambda x, _: x / (1.0 + np.abs(x)),
    "sqrt": lambda x, _: np.sqrt(x),
    "tanh": lambda x, _: np.tanh(x),
    # Arithmetic with a scalar constant is a function of one activation too.
    "add_scalar": lambda x, p: x + _number(p, "value", 0.0),
    "rsub_scalar": lambda x, p: _number(p, "value", 0.0) - x,
    "mul_scalar": lambda x, p: x * _number(p, "value", 1.0),
    "rdiv_scalar": lambda x, p: _number(p, "value", 1.0) / x,
    "min_scalar": lambda x, p: np.minimum(x, _number(p, "value", math.inf)),
    "max_scalar": lambda x, p: np.maximum(x, _number(p, "value", -math.inf)),
}
"""Float64 definition of every function that may become a table, by the name of its `top` op."""


def lookup_table(
    function: str,
    parameters: Parameters,
    *,
    input_scale: float,
    input_zero: int,
    output_scale: float,
    output_zero: int,
) -> npt.NDArray[np.int8]:
    """Return the 256 codes of `function` for input codes -128..127, in that order.

    The function is evaluated in float64 on the dequantised code, divided by the output scale and
    rounded half to even; infinities saturate.

    Raises:
        ValueError: the function is not defined for some code (square root of a negative value...).
    """
    codes = np.arange(-128, 128, dtype=np.float64)
    with np.errstate(all="ignore"):
        real = FUNCTIONS[function](input_scale * (codes - input_zero), parameters)
    if np.isnan(real).any():
        bad = int(codes[np.flatnonzero(np.isnan(real))[0]])
        value = input_scale * (bad - input_zero)
        raise ValueError(
            f"{function} is undefined at {value:.6g}, which the input's scale can hold"
        )
    least = -127 if output_zero == 0 else -128
    return np.clip(np.rint(real / output_scale) + output_zero, least, 127).astype(np.int8)
