"""What all `top` operations share: attributes from Python values, result types from operand types.

An operation class declares its operands and attributes with xDSL's field definitions and one class
method `infer`, which gives the result types that follow from operand types and attributes. The
verifier compares them with the declared ones, the constructor `create` uses them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
from typing_extensions import override
from xdsl.dialects.builtin import (
    ArrayAttr,
    DenseArrayBase,
    FloatAttr,
    IntegerAttr,
    IntegerType,
    NoneType,
    Signedness,
    StringAttr,
    TensorType,
    bf16,
    f16,
    f32,
    f64,
    i1,
    i64,
)
from xdsl.ir import Attribute, SSAValue
from xdsl.irdl import IRDLOperation, attr_def, traits_def
from xdsl.traits import Pure
from xdsl.utils.exceptions import VerifyException

AttrValue: TypeAlias = (
    Attribute | bool | int | float | str | Sequence[int] | Sequence[float] | Sequence[str] | None
)
"""Python values `to_attribute` accepts."""

Types: TypeAlias = Sequence[Attribute]
OpT = TypeVar("OpT", bound="TopOp")


def to_attribute(value: AttrValue) -> Attribute:
    """Return the attribute for a Python value.

    bool: `i1`; int: `i64`; float: `f32`; str: string; sequence of int: `array<i64>`; sequence with
    a float: `array<f32>`; sequence of str: array of strings. An empty sequence is `array<i64>`.

    Raises:
        TypeError: `value` is of another type.
    """
    if isinstance(value, Attribute):
        return value
    if isinstance(value, bool):
        return IntegerAttr(int(value), i1)
    if isinstance(value, int):
        return IntegerAttr(value, i64)
    if isinstance(value, float):
        return FloatAttr(value, f32)
    if isinstance(value, str):
        return StringAttr(value)
    if isinstance(value, Sequence):
        items = list(value)
        if items and all(isinstance(item, str) for item in items):
            return ArrayAttr([StringAttr(str(item)) for item in items])
        if any(isinstance(item, float) for item in items):
            return DenseArrayBase.from_list(f32, [float(item) for item in items])
        return DenseArrayBase.from_list(i64, [int(item) for item in items])
    raise TypeError(f"no attribute for {type(value).__name__}")


class Attrs:
    """Typed reading of an attribute dictionary; a wrong or missing one raises `VerifyException`."""

    def __init__(self, data: Mapping[str, Attribute]) -> None:
        self.data = data

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def ints(self, key: str) -> tuple[int, ...]:
        """Return an `array<i64>` attribute."""
        value = self.data.get(key)
        if not isinstance(value, DenseArrayBase):
            raise VerifyException(f"needs `{key}` as array<i64: ...>")
        return tuple(int(item) for item in value.get_values())

    def floats(self, key: str) -> tuple[float, ...]:
        """Return an `array<f32>` attribute."""
        value = self.data.get(key)
        if not isinstance(value, DenseArrayBase):
            raise VerifyException(f"needs `{key}` as array<f32: ...>")
        return tuple(float(item) for item in value.get_values())

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer attribute, or `default` if it is absent."""
        value = self.data.get(key)
        if isinstance(value, IntegerAttr):
            return value.value.data
        if value is None and default is not None:
            return default
        raise VerifyException(f"needs `{key}` as integer")

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return a boolean attribute, or `default` if it is absent."""
        return bool(self.integer(key, None if default is None else int(default)))

    def number(self, key: str) -> float | None:
        """Return a float attribute, or None if it is absent."""
        value = self.data.get(key)
        if value is None:
            return None
        if isinstance(value, FloatAttr | IntegerAttr):
            return float(value.value.data)
        raise VerifyException(f"needs `{key}` as a number")

    def string(self, key: str, default: str | None = None) -> str:
        """Return a string attribute, or `default` if it is absent."""
        value = self.data.get(key)
        if isinstance(value, StringAttr):
            return value.data
        if value is None and default is not None:
            return default
        raise VerifyException(f"needs `{key}` as string")

    def choice(self, key: str, legal: Sequence[str], default: str | None = None) -> str:
        """Return a string attribute that must be one of `legal`."""
        value = self.string(key, default)
        if value not in legal:
            raise VerifyException(f'`{key}` is "{value}"; legal are {", ".join(legal)}')
        return value

    def axis(self, rank: int, key: str = "axis") -> int:
        """Return an axis, checked to be resolved: `0 <= axis < rank`."""
        value = self.integer(key)
        if not 0 <= value < rank:
            raise VerifyException(f"`{key}` is {value}, the operand has rank {rank}")
        return value

    def per_axis(self, key: str, count: int, least: int | None = None) -> tuple[int, ...]:
        """Return an integer array of exactly `count` entries, none below `least`."""
        values = self.ints(key)
        if len(values) != count:
            raise VerifyException(f"`{key}` has {len(values)} entries, needs {count}")
        if least is not None and any(value < least for value in values):
            raise VerifyException(f"`{key}` is {list(values)}; entries must be at least {least}")
        return values


def tensor(types: Types, index: int, what: str = "operand") -> TensorType[Attribute]:
    """Return operand type `index`, checked to be a static tensor."""
    value = types[index]
    if not isinstance(value, TensorType):
        raise VerifyException(f"{what} {index} must be a tensor, is {value}")
    if any(dim < 0 for dim in value.get_shape()):
        raise VerifyException(f"{what} {index} has a dynamic shape: {value}")
    return value


def with_shape(like: TensorType[Attribute], shape: Sequence[int]) -> TensorType[Attribute]:
    """Return a tensor type of `like`'s element type and another shape."""
    return TensorType(like.get_element_type(), list(shape))


def same_element(*types: TensorType[Attribute]) -> None:
    """Check that all tensors have one element type."""
    elements = [value.get_element_type() for value in types]
    if any(element != elements[0] for element in elements):
        raise VerifyException("element types differ: " + ", ".join(str(e) for e in elements))


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """Return the numpy broadcast of `shapes`."""
    rank = max(len(shape) for shape in shapes)
    result = [1] * rank
    for shape in shapes:
        for axis, dim in enumerate(shape, rank - len(shape)):
            if dim != 1 and result[axis] not in (1, dim):
                listed = " and ".join(str(list(shape)) for shape in shapes)
                raise VerifyException(f"shapes {listed} do not broadcast")
            if dim != 1:
                result[axis] = dim
    return tuple(result)


class TopOp(IRDLOperation):
    """Base of all `top` operations."""

    layer = attr_def(StringAttr, attr_name="name")
    """The user's node name (for `top.weight`: the name in the weight store)."""

    traits = traits_def(Pure())
    assembly_format = "operands attr-dict `:` functional-type(operands, results)"

    @classmethod
    @abstractmethod
    def infer(cls, types: Types, attrs: Attrs, declared: Types) -> list[TensorType[Attribute]]:
        """Return the result types.

        Args:
            types: operand types.
            attrs: all attributes.
            declared: the result types written down; empty when an op is being created. Used by
                operations whose result type carries information (reshape, slice, ...) and to tell
                how many optional results there are.

        Raises:
            VerifyException: types and attributes do not fit (the layer's name is added by the
                caller).
        """

    @property
    def attrs(self) -> Attrs:
        """Typed access to the attributes."""
        return Attrs(self.attributes)

    @property
    def layer_name(self) -> str:
        """The user's name of this layer."""
        return self.layer.data

    def infer_result_type(self) -> list[TensorType[Attribute]]:
        """Return the result types that follow from the operands and attributes.

        Raises:
            VerifyException: they do not fit together; the message names the layer.
        """
        try:
            return self.infer(
                [value.type for value in self.operands],
                self.attrs,
                [value.type for value in self.results],
            )
        except VerifyException as error:
            raise VerifyException(f'layer "{self.layer_name}" ({self.name}): {error}') from error

    @override
    def verify_(self) -> None:
        inferred = self.infer_result_type()
        declared = [value.type for value in self.results]
        if inferred != declared:
            shown = ", ".join(str(item) for item in declared)
            right = ", ".join(str(item) for item in inferred)
            raise VerifyException(
                f'layer "{self.layer_name}" ({self.name}): result is {shown}, '
                f"its operands and attributes give {right}"
            )


def create(
    op_class: type[OpT],
    operands: Sequence[SSAValue],
    attributes: Mapping[str, AttrValue] | None = None,
    *,
    name: str,
    result_types: Sequence[Attribute] | None = None,
) -> OpT:
    """Build an operation, inferring its result types unless they are given.

    Args:
        op_class: class of the operation.
        operands: all operands in order; an absent one is a `top.none` value.
        attributes: Python values (see `to_attribute`); None values are left out.
        name: the user's layer name.
        result_types: needed for operations whose result type carries information.

    Raises:
        VerifyException: operands and attributes do not fit; the message names the layer.
    """
    converted: dict[str, Attribute] = {"name": StringAttr(name)}
    for key, value in (attributes or {}).items():
        if value is not None:
            converted[key] = to_attribute(value)
    if result_types is None:
        try:
            result_types = op_class.infer([v.type for v in operands], Attrs(converted), [])
        except VerifyException as error:
            raise VerifyException(f'layer "{name}" ({op_class.name}): {error}') from error
    return op_class.create(operands=operands, result_types=result_types, attributes=converted)


def is_absent(value: SSAValue) -> bool:
    """Return whether `value` is an absent optional operand (`top.none`)."""
    return isinstance(value.type, NoneType)


_FLOATS: dict[Attribute, str] = {bf16: "bfloat16", f16: "float16", f32: "float32", f64: "float64"}
_FLOAT_BY_NAME = {name: element for element, name in _FLOATS.items()}


def numpy_dtype(element: Attribute) -> np.dtype[Any]:
    """Return the numpy type of an element type: `i1` is bool, signless integers are signed.

    Raises:
        TypeError: there is none (quantised types among others).
    """
    if element in _FLOATS:
        if _FLOATS[element] == "bfloat16":
            import ml_dtypes

            return np.dtype(ml_dtypes.bfloat16)
        return np.dtype(_FLOATS[element])
    if isinstance(element, IntegerType):
        width = element.width.data
        if width == 1:
            return np.dtype(np.bool_)
        if width in (8, 16, 32, 64):
            unsigned = element.signedness.data == Signedness.UNSIGNED
            return np.dtype(f"{'uint' if unsigned else 'int'}{width}")
    raise TypeError(f"no numpy type for {element}")


def element_type(dtype: np.dtype[Any]) -> Attribute:
    """Return the element type of a numpy type; the inverse of `numpy_dtype`.

    Raises:
        TypeError: there is none (complex numbers, strings).
    """
    if dtype.name in _FLOAT_BY_NAME:
        return _FLOAT_BY_NAME[dtype.name]
    if dtype.kind == "b":
        return i1
    if dtype.kind == "i":
        return IntegerType(8 * dtype.itemsize)
    if dtype.kind == "u":
        return IntegerType(8 * dtype.itemsize, Signedness.UNSIGNED)
    raise TypeError(f"no element type for {dtype}")
