"""How float32 values become fp16 results, spelled out in `arith` and `math`.

    y = truncf(min(max(function(v), lo), hi))

One rounding, at the end. Bounds that are infinite, and the function `none`, leave no operation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from xdsl.dialects import arith
from xdsl.dialects import math as mlir_math
from xdsl.dialects.builtin import f16, f32
from xdsl.ir import Operation, SSAValue

from tilewright.spec.isa import FUNCTIONS
from tilewright.transforms.linalg.attributes import number, text
from tilewright.transforms.linalg.emit import Body, BodyFunction

LOWEST = -65376.0
"""What padding of a maximum holds: the least fp16 whose two bytes are equal (0xFBFB), since a DMA
fills by bytes."""

CLAMPS = ("relu", "clip")
"""Functions of the float graph that are only a clamp."""


@dataclass(frozen=True)
class HalfOutput:
    """What happens to a float32 value on its way to fp16."""

    function: str = "none"
    """A function of the vector unit (`spec.isa.FUNCTIONS`)."""
    lo: float = -math.inf
    hi: float = math.inf

    @staticmethod
    def of(op: Operation) -> HalfOutput:
        """Read the clamp of a `top` op (`clamp_min`, `clamp_max`)."""
        bounds = ("clamp_min", -math.inf), ("clamp_max", math.inf)
        return HalfOutput("none", *(number(op, key, default) for key, default in bounds))

    @staticmethod
    def of_tags(op: Operation) -> HalfOutput:
        """Read what `tags` recorded on a lower level; `function` is that of one value."""
        function = text(op, "function", "none")
        if function not in FUNCTIONS:
            function = "none"  # of two values, which an elementwise op is
        return HalfOutput(function, number(op, "lo", -math.inf), number(op, "hi", math.inf))

    @staticmethod
    def of_function(op: Operation) -> HalfOutput:
        """Read a `top` function of one value."""
        name = op.name.removeprefix("top.")
        if name == "relu":
            return HalfOutput("none", 0.0)
        if name == "clip":
            bounds = ("min", -math.inf), ("max", math.inf)
            return HalfOutput("none", *(number(op, key, default) for key, default in bounds))
        return HalfOutput(name)

    @property
    def clamps(self) -> bool:
        """Whether a bound is finite."""
        return math.isfinite(self.lo) or math.isfinite(self.hi)

    @property
    def tags(self) -> dict[str, float]:
        """What later stages must know; bounds that are infinite are left out."""
        bounds = (("lo", self.lo), ("hi", self.hi))
        return {key: float(value) for key, value in bounds if math.isfinite(value)}

    def finish(self, body: Body, value: SSAValue) -> SSAValue:
        """Return the fp16 of a float32 value."""
        value = apply_function(body, self.function, value)
        if math.isfinite(self.lo):
            value = body.larger(value, body.constant(self.lo, f32))
        if math.isfinite(self.hi):
            value = body.smaller(value, body.constant(self.hi, f32))
        return body.add(arith.TruncFOp(value, f16))


def with_bias(output: HalfOutput) -> BodyFunction:
    """Return the body that ends a sum, for `(acc f32, bias f32, _)`."""

    def build(body: Body) -> SSAValue:
        return output.finish(body, body.plus(*body.args[:2]))

    return build


def without_bias(output: HalfOutput) -> BodyFunction:
    """Return the body for `(value, _)`; an fp16 value is widened first."""

    def build(body: Body) -> SSAValue:
        return output.finish(body, body.extend(body.args[0], f32))

    return build


def apply_function(body: Body, name: str, x: SSAValue) -> SSAValue:
    """Return a function of the vector unit of a float32 value.

    Raises:
        KeyError: there is no such function.
    """

    def of(value: float) -> SSAValue:
        return body.constant(value, f32)

    def divide(left: SSAValue, right: SSAValue) -> SSAValue:
        return body.add(arith.DivfOp(left, right))

    def hard_sigmoid() -> SSAValue:
        inside = body.plus(divide(x, of(6.0)), of(0.5))
        return body.smaller(body.larger(inside, of(0.0)), of(1.0))

    def sigmoid() -> SSAValue:
        # Through tanh: no overflow on either side.
        half = of(0.5)
        wave = body.add(mlir_math.TanhOp(body.times(half, x)))
        return body.times(half, body.plus(of(1.0), wave))

    def gelu() -> SSAValue:
        wave = body.add(mlir_math.ErfOp(divide(x, of(math.sqrt(2.0)))))
        return body.times(body.times(of(0.5), x), body.plus(of(1.0), wave))

    forms = {
        "none": lambda: x,
        "hard_sigmoid": hard_sigmoid,
        "hard_swish": lambda: body.times(x, hard_sigmoid()),
        "sigmoid": sigmoid,
        "silu": lambda: body.times(x, sigmoid()),
        "tanh": lambda: body.add(mlir_math.TanhOp(x)),
        "gelu": gelu,
        "exp": lambda: body.add(mlir_math.ExpOp(x)),
        "reciprocal": lambda: divide(of(1.0), x),
        "rsqrt": lambda: divide(of(1.0), body.add(mlir_math.SqrtOp(x))),
        "sqrt": lambda: body.add(mlir_math.SqrtOp(x)),
    }
    return forms[name]()


def is_half(op: Operation) -> bool:
    """Tell whether an op of the graph makes an fp16 value."""
    return bool(op.results) and getattr(op.results[0].type, "element_type", None) == f16
