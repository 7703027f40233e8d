"""What the ops of the `quant` dialect share: the type of codes, checks, the base class.

`dialects/quant.py` and `dialects/_quant_rows.py` build on it; others import from the former.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

from xdsl.dialects.builtin import (
    ArrayAttr,
    DenseArrayBase,
    FloatAttr,
    IntAttr,
    IntegerAttr,
    IntegerType,
    StringAttr,
    TensorType,
    f32,
    f64,
    i8,
    i64,
)
from xdsl.ir import Attribute, ParametrizedAttribute, SSAValue, TypeAttribute
from xdsl.irdl import (
    IRDLOperation,
    irdl_attr_definition,
)
from xdsl.parser import AttrParser
from xdsl.printer import Printer
from xdsl.utils.exceptions import VerifyException

ROUNDINGS = ("half_up", "half_away", "half_even", "truncate")
LAYOUTS = ("nchw", "nhwc")

MAX_MULTIPLIER = 2**31 - 1
MAX_SHIFT = 62


def _float_literal(value: float) -> str:
    """Return `repr(value)` as an MLIR literal (a dot is needed before an exponent)."""
    text = repr(value)
    if "e" in text and "." not in text:
        mantissa, exponent = text.split("e")
        return f"{mantissa}.0e{exponent}"
    return text


@irdl_attr_definition
class UniformType(ParametrizedAttribute, TypeAttribute):
    """An int8 code `q` that stands for the real value `scale * (q - zero_point)`.

    ```mlir
    tensor<1x56x56x64x!quant.uniform<i8:f32, 0.025:0>>
    ```

    `scale` is a float64 and printed so that it reads back exactly; quantising and dequantising use
    it rounded to float32.
    """

    name = "quant.uniform"

    storage: IntegerType
    expressed: Attribute
    scale: FloatAttr
    zero_point: IntAttr

    @staticmethod
    def of(scale: float, zero_point: int = 0) -> UniformType:
        """Return the int8 type of float32 values with this scale and zero point."""
        return UniformType(i8, f32, FloatAttr(float(scale), f64), IntAttr(int(zero_point)))

    @property
    def step(self) -> float:
        """The scale as a Python float (real value of one code step)."""
        return float(self.scale.value.data)

    @property
    def zero(self) -> int:
        """The zero point, -128..127."""
        return int(self.zero_point.data)

    def verify(self) -> None:
        """Check that storage is i8, the scale normal and positive, the zero point a code."""
        if self.storage != i8:
            raise VerifyException(f"quant.uniform storage must be i8, not {self.storage}")
        if self.expressed != f32:
            raise VerifyException(f"quant.uniform expressed type must be f32, not {self.expressed}")
        if not 2.0**-126 <= self.step < 2.0**127:
            raise VerifyException(
                f"quant.uniform scale must be a positive normal float32, not {self.step!r}"
            )
        if not -128 <= self.zero <= 127:
            raise VerifyException(f"quant.uniform zero point must be -128..127, not {self.zero}")

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> list[Attribute]:
        """Parse `<i8:f32, scale:zero_point>`; a missing zero point is 0, as upstream has it."""
        with parser.in_angle_brackets():
            storage = parser.parse_type()
            parser.parse_punctuation(":")
            expressed = parser.parse_type()
            parser.parse_punctuation(",")
            scale = float(parser.parse_number())
            zero_point = 0
            if parser.parse_optional_punctuation(":") is not None:
                zero_point = parser.parse_integer(allow_boolean=False)
        return [storage, expressed, FloatAttr(scale, f64), IntAttr(zero_point)]

    def print_parameters(self, printer: Printer) -> None:
        """Print `<i8:f32, scale:zero_point>`."""
        with printer.in_angle_brackets():
            printer.print_attribute(self.storage)
            printer.print_string(":")
            printer.print_attribute(self.expressed)
            printer.print_string(f", {_float_literal(self.step)}:{self.zero}")


def uniform_of(value: SSAValue | Attribute) -> UniformType | None:
    """Return the quantised element type of a value or tensor type, or None if it has none."""
    kind = value.type if isinstance(value, SSAValue) else value
    if isinstance(kind, TensorType) and isinstance(kind.element_type, UniformType):
        return kind.element_type
    return None


def quantised(value: SSAValue | Attribute, what: str = "value") -> UniformType:
    """Return the quantised element type of a value or tensor type.

    Raises:
        VerifyException: it is not a tensor of `!quant.uniform`.
    """
    kind = uniform_of(value)
    if kind is None:
        got = value.type if isinstance(value, SSAValue) else value
        raise VerifyException(f"{what} must be a tensor of !quant.uniform, not {got}")
    return kind


def shape_of(value: SSAValue | Attribute) -> tuple[int, ...]:
    """Return the static shape of a tensor value or type.

    Raises:
        VerifyException: it is not a tensor, or has a dynamic size.
    """
    kind = value.type if isinstance(value, SSAValue) else value
    if not isinstance(kind, TensorType):
        raise VerifyException(f"expected a tensor, not {kind}")
    shape = tuple(int(size) for size in kind.get_shape())
    if any(size < 0 for size in shape):
        raise VerifyException(f"tensor shapes must be static, not {kind}")
    return shape


def int_list(attr: Attribute) -> list[int]:
    """Return the integers of an `array<i64: ...>` or `[...]` attribute."""
    if isinstance(attr, DenseArrayBase):
        return [int(value) for value in attr.get_values()]
    if isinstance(attr, ArrayAttr):
        return [int(item.value.data) for item in attr.data if isinstance(item, IntegerAttr)]
    raise VerifyException(f"expected a list of integers, not {attr}")


def int_of(attr: Attribute) -> int:
    """Return the value of an integer attribute."""
    if not isinstance(attr, IntegerAttr):
        raise VerifyException(f"expected an integer attribute, not {attr}")
    return int(attr.value.data)


def to_attribute(value: Any) -> Attribute:
    """Turn a Python int (i64), string, or list of ints (`array<i64>`) into an attribute."""
    if isinstance(value, Attribute):
        return value
    if isinstance(value, str):
        return StringAttr(value)
    if isinstance(value, int):
        return IntegerAttr(value, i64)
    if isinstance(value, (list, tuple)):
        return DenseArrayBase.from_list(i64, [int(item) for item in value])
    raise TypeError(f"no attribute for {value!r}")


def check_range(name: str, attr: Attribute, low: int, high: int) -> int:
    value = int_of(attr)
    if not low <= value <= high:
        raise VerifyException(f"{name} must be {low}..{high}, not {value}")
    return value


def check_weight(value: SSAValue, what: str, element: IntegerType, shape: tuple[int, ...]) -> None:
    kind = value.type
    if not isinstance(kind, TensorType) or kind.element_type != element or shape_of(kind) != shape:
        wanted = "x".join(map(str, (*shape, element)))
        raise VerifyException(f"{what} must be tensor<{wanted}>, not {kind}")


_Q = TypeVar("_Q", bound="QuantOp")


class QuantOp(IRDLOperation):
    """What all ops of the dialect share: making them, and checking requantising attributes."""

    SCALARS: ClassVar[tuple[str, ...]] = ()
    """Names of the op's `mult*`/`shift`/`bias`/`bias_shift` attributes, all range-checked."""

    @classmethod
    def make(
        cls: type[_Q], operands: Sequence[SSAValue], result: Attribute, /, **attributes: Any
    ) -> _Q:
        """Build the op from Python ints, strings, int lists or attributes (None is left out)."""
        return cls.build(
            operands=list(operands),
            result_types=[result],
            attributes={
                key: to_attribute(value) for key, value in attributes.items() if value is not None
            },
        )

    def check_output(self) -> None:
        """Check `zp`, `lo`, `hi`, `rounding` against the result type, and the scalars' ranges."""
        kind = quantised(self.results[0], "result")
        zp = check_range("zp", self.attributes["zp"], -256, 127)
        low = check_range("lo", self.attributes["lo"], -128, 127)
        high = check_range("hi", self.attributes["hi"], -128, 127)
        if low > high:
            raise VerifyException(f"lo ({low}) is above hi ({high})")
        rounding = self.attributes["rounding"]
        if not isinstance(rounding, StringAttr) or rounding.data not in ROUNDINGS:
            raise VerifyException(f"rounding must be one of {', '.join(ROUNDINGS)}, not {rounding}")
        legal = {kind.zero}
        if rounding.data == "truncate":
            legal.add(kind.zero - 128)
        if zp not in legal:
            raise VerifyException(
                f"zp is {zp}; the result type has zero point {kind.zero}"
                + (" (or that minus 128)" if rounding.data == "truncate" else "")
            )
        for name in self.SCALARS:
            if name.startswith("mult"):
                check_range(name, self.attributes[name], 0, MAX_MULTIPLIER)
            elif name == "bias":
                check_range(name, self.attributes[name], -(2**31), 2**31 - 1)
            else:
                check_range(name, self.attributes[name], 0, MAX_SHIFT)
        if "bias_shift" in self.SCALARS:
            self._check_wide_bias()

    def _check_wide_bias(self) -> None:
        # Largest |factor| times |multiplier| plus the bias must stay inside int64.
        offset = abs(int_of(self.attributes["bias"])) << int_of(self.attributes["bias_shift"])
        factor = self.largest_factor()
        product = sum(
            factor * int_of(self.attributes[name])
            for name in self.SCALARS
            if name.startswith("mult")
        )
        if product + offset >= 2**63:
            raise VerifyException("the sum before the shift could exceed 64 bits")

    def largest_factor(self) -> int:
        """Largest magnitude that a `mult` attribute multiplies."""
        return 255


def window_size(size: int, pads: int, kernel: int, stride: int, dilation: int) -> int:
    """Return how many windows fit along one axis (floor)."""
    return (size + pads - ((kernel - 1) * dilation + 1)) // stride + 1


def image_axes(layout: str) -> tuple[int, int, int]:
    """Return the positions of channel, height and width in a rank-4 tensor."""
    return (3, 1, 2) if layout == "nhwc" else (1, 2, 3)


def layout_axes(op: QuantOp, rank: SSAValue) -> tuple[int, int, int]:
    attr = op.attributes.get("layout", StringAttr("nchw"))
    if not isinstance(attr, StringAttr) or attr.data not in LAYOUTS:
        raise VerifyException(f"layout must be one of {', '.join(LAYOUTS)}, not {attr}")
    if len(shape_of(rank)) != 4:
        raise VerifyException(f"expected a rank-4 tensor, not {rank.type}")
    return image_axes(attr.data)


def lengths(op: QuantOp, **counts: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for name, count in counts.items():
        found[name] = int_list(op.attributes[name])
        if len(found[name]) != count:
            raise VerifyException(f"{name} must have {count} entries, not {len(found[name])}")
        low = 0 if name == "pads" else 1
        if any(value < low for value in found[name]):
            raise VerifyException(f"{name} must be at least {low}: {found[name]}")
    return found
