"""What the rules share: reading a node so that nothing is overlooked, building `top` ops.

A rule is a function from a `Node` to the `top` values of its results. A node counts every attribute
and operand a rule asks for; what is left over when the rule is done makes the node refused, so an
attribute cannot be ignored by oversight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import numpy as np
from xdsl.dialects.builtin import FloatAttr, NoneType, StringAttr, TensorType, f32
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.utils.exceptions import VerifyException

from tilewright.dialects import top
from tilewright.dialects.onnx import OnnxOp, WeightAttr, decode_attribute
from tilewright.dialects.top.base import element_type
from tilewright.ir.context import CompileContext
from tilewright.ir.weights import Array

Rule: TypeAlias = Callable[["Node"], "Sequence[SSAValue | None] | SSAValue"]
RULES: dict[str, Rule] = {}
"""The rule for each operator of the default domain."""

MAX_MADE_ELEMENTS = 1 << 27
"""Largest constant a rule may make: a small file must not fill the memory."""

Default = TypeVar("Default")


class RefusedError(Exception):
    """A node cannot be expressed in `top`; the text says why."""


class UnknownOperandError(RefusedError):
    """An operand must be known at compile time and is not."""

    def __init__(self, index: int, text: str) -> None:
        super().__init__(text)
        self.index = index


def rule(*op_types: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators."""

    def register(function: Rule) -> Rule:
        for op_type in op_types:
            assert op_type not in RULES, op_type
            RULES[op_type] = function
        return function

    return register


class Namer:
    """Keeps the names of layers unique."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)

    def unique(self, wish: str) -> str:
        """Return `wish`, or `wish#1`, `wish#2`... if it is taken, and take it."""
        name, count = wish, 0
        while name in self._taken:
            count += 1
            name = f"{wish}#{count}"
        self._taken.add(name)
        return name


class Node:
    """One op of the `onnx` dialect being converted."""

    def __init__(
        self,
        op: OnnxOp,
        opset: int,
        operands: Sequence[SSAValue],
        ctx: CompileContext,
        namer: Namer,
    ) -> None:
        self.op_type = op.op_type
        self.name = op.node_name
        self.opset = opset
        self.ctx = ctx
        self.declared: list[Attribute] = [result.type for result in op.results]
        self.made: list[Operation] = []
        self._operands = list(operands)
        self._namer = namer
        self._attributes = op.user_attributes()
        self._unread = set(self._attributes)
        self._untouched = {
            index for index, v in enumerate(operands) if not isinstance(v.type, NoneType)
        }

    # What the node says.

    def given(self, index: int) -> bool:
        """Whether operand `index` is there."""
        return index < len(self._operands) and not isinstance(self._operands[index].type, NoneType)

    def operand(self, index: int) -> SSAValue:
        """Return operand `index`, which must be there."""
        if not self.given(index):
            raise RefusedError(f"operand {index} is missing")
        self._untouched.discard(index)
        return self._operands[index]

    def operands(self) -> list[SSAValue]:
        """Return all operands (of a variadic operator)."""
        return [self.operand(index) for index in range(len(self._operands))]

    def optional(self, index: int) -> SSAValue:
        """Return operand `index`, or a `top.none` value."""
        if self.given(index):
            return self.operand(index)
        op = top.NoneOp.create(result_types=[NoneType()])
        self.made.append(op)
        return op.results[0]

    def constant(self, index: int) -> Array | None:
        """Return the value of operand `index` if it is a constant; None also if it is absent."""
        if not self.given(index):
            return None
        array = self.value_of(self._operands[index])
        if array is not None:
            self._untouched.discard(index)
        return array

    def value_of(self, value: SSAValue) -> Array | None:
        """Return the array behind a `top.weight` value."""
        owner = value.owner
        return self.ctx.weights.get(owner.layer_name) if isinstance(owner, top.WeightOp) else None

    def needs_constant(self, index: int, what: str) -> Array:
        """Return operand `index`, which must be known at compile time."""
        if not self.given(index):
            raise RefusedError(f"{what} is missing")
        array = self.constant(index)
        if array is None:
            raise UnknownOperandError(index, f"{what} must be known at compile time")
        return array

    def needs_scalar(self, index: int, what: str) -> Array:
        """Return operand `index` as a rank-0 array; it must be one constant number."""
        array = self.needs_constant(index, what)
        if array.size != 1:
            raise RefusedError(f"{what} must be one number, has shape {list(array.shape)}")
        return array.reshape(())

    def needs_ints(self, index: int, what: str) -> list[int]:
        """Return operand `index` as a list of integers; it must be a constant."""
        return [int(item) for item in self.needs_constant(index, what).reshape(-1)]

    def settled(self, *indices: int) -> None:
        """Count operands as read whose meaning is in the result's type (a target shape)."""
        self._untouched.difference_update(indices)

    def has(self, key: str) -> bool:
        """Whether the attribute is written in the node."""
        return key in self._attributes

    def integer(self, key: str, default: int) -> int:
        """Return an integer attribute."""
        value = self._read(key, default)
        if not isinstance(value, int):
            raise RefusedError(f"attribute {key!r} must be an integer")
        return value

    def number(self, key: str, default: float) -> float:
        """Return a float attribute."""
        value = self._read(key, default)
        if not isinstance(value, float):
            raise RefusedError(f"attribute {key!r} must be a float")
        return value

    def string(self, key: str, default: str) -> str:
        """Return a string attribute."""
        value = self._read(key, default)
        if not isinstance(value, str):
            raise RefusedError(f"attribute {key!r} must be a string")
        return value

    def ints(self, key: str) -> list[int] | None:
        """Return a list of integers; None if it is absent."""
        value = self._read(key, None)
        if value is None:
            return None
        if not isinstance(value, list):
            raise RefusedError(f"attribute {key!r} must be a list of integers")
        return [int(item) for item in value]

    def floats(self, key: str) -> list[float] | None:
        """Return a list of floats; None if it is absent."""
        value = self._read(key, None)
        if value is None:
            return None
        if not isinstance(value, list):
            raise RefusedError(f"attribute {key!r} must be a list of floats")
        return [float(item) for item in value]

    def strings(self, key: str) -> list[str] | None:
        """Return a list of strings; None if it is absent."""
        value = self._read(key, None)
        if value is None:
            return None
        if not isinstance(value, list):
            raise RefusedError(f"attribute {key!r} must be a list of strings")
        return [str(item) for item in value]

    def tensor(self, key: str) -> Array | None:
        """Return a tensor attribute; None if it is absent."""
        attribute = self._attributes.get(key)
        self._unread.discard(key)
        if attribute is None:
            return None
        assert isinstance(attribute, WeightAttr)
        return self.ctx.weights.get(attribute.store_name.data)

    def meaningless(self, *keys: str) -> None:
        """Count attributes as read that have no effect on inference, by ONNX's own text."""
        self._unread.difference_update(keys)

    def must_be(self, key: str, default: int | str, legal: Sequence[int | str], why: str) -> None:
        """Refuse a value of an attribute that cannot be expressed."""
        value = self._read(key, default)
        if value not in legal:
            raise RefusedError(f"attribute {key!r} is {value!r}: {why}")

    def _read(self, key: str, default: Default) -> object | Default:
        self._unread.discard(key)
        attribute = self._attributes.get(key)
        return default if attribute is None else decode_attribute(attribute)

    def leftovers(self) -> list[str]:
        """Return what the rule did not look at."""
        return [f"attribute {key!r}" for key in sorted(self._unread)] + [
            f"operand {index}" for index in sorted(self._untouched)
        ]

    # Results.

    def wants(self, index: int) -> bool:
        """Whether result `index` is asked for."""
        return index < len(self.declared) and not isinstance(self.declared[index], NoneType)

    def result_type(self, index: int = 0) -> TensorType[Attribute]:
        """Return the type shape inference gave to result `index`."""
        declared = self.declared[index]
        if not isinstance(declared, TensorType):
            raise RefusedError(f"result {index} is left out")
        return declared

    def only_first_result(self) -> None:
        """Refuse if further results are asked for."""
        if any(self.wants(index) for index in range(1, len(self.declared))):
            raise RefusedError("results other than the first are not supported")

    def emit(
        self,
        kind: str,
        operands: Sequence[SSAValue],
        attributes: Mapping[str, top.AttrValue] | None = None,
        result_types: Sequence[Attribute] | None = None,
    ) -> SSAValue:
        """Build `top.<kind>` and return its first result; see `emit_all`."""
        return self.emit_all(kind, operands, attributes, result_types)[0]

    def emit_all(
        self,
        kind: str,
        operands: Sequence[SSAValue],
        attributes: Mapping[str, top.AttrValue] | None = None,
        result_types: Sequence[Attribute] | None = None,
    ) -> Sequence[SSAValue]:
        """Build `top.<kind>`; it gets a name of its own unless it gives a result of the node."""
        try:
            op = top.create(
                top.OPS[kind], operands, attributes, name=self.name, result_types=result_types
            )
            if result_types is not None:
                op.verify_()
        except VerifyException as error:
            raise RefusedError(str(error).partition("): ")[2] or str(error)) from error
        self.made.append(op)
        return op.results

    def weight(self, array: Array, label: str) -> SSAValue:
        """Store a constant of our own making and return it.

        Raises:
            RefusedError: it is larger than any such constant needs to be.
        """
        if array.size > MAX_MADE_ELEMENTS:
            raise RefusedError(f"it needs a constant of {array.size} elements")
        stored = self.ctx.weights.add(f"{self.name}/{label}", array)
        op = top.WeightOp.create(
            attributes={"name": StringAttr(stored)},
            result_types=[TensorType(element_type(array.dtype), list(array.shape))],
        )
        self.made.append(op)
        return op.results[0]

    def scalar(self, value: float, like: SSAValue, label: str) -> SSAValue:
        """Return a rank-0 constant of `like`'s element type."""
        return self.weight(np.array(value, top.numpy_dtype(element(like))), label)

    def reshape(self, value: SSAValue, shape: Sequence[int]) -> SSAValue:
        """Return `value` under another shape; nothing is emitted if it has it already."""
        if shape_of(value) == tuple(shape):
            return value
        return self.emit("reshape", [value], {}, [TensorType(element(value), list(shape))])

    def cast(self, value: SSAValue, to: Attribute) -> SSAValue:
        """Return `value` with another element type."""
        if element(value) == to:
            return value
        return self.emit("cast", [value], {}, [TensorType(to, list(shape_of(value)))])

    def finish(self, results: Sequence[SSAValue | None]) -> None:
        """Check results against inference and give all ops their names."""
        for index, (value, declared) in enumerate(zip(results, self.declared, strict=False)):
            if isinstance(declared, NoneType):
                continue
            if value is None:
                raise RefusedError(f"result {index} is not supported")
            if value.type != declared:
                raise RefusedError(
                    f"result {index} is {value.type} by our reading, "
                    f"{declared} by ONNX's shape inference"
                )
        if len(results) < len(self.declared) and self.wants(len(results)):
            raise RefusedError(f"result {len(results)} is not supported")
        owners = list(dict.fromkeys(value.owner for value in results if value is not None))
        owners = [op for op in owners if op in self.made]
        for op in self.made:
            if isinstance(op, top.TopOp) and not isinstance(op, top.WeightOp):
                place = owners.index(op) if op in owners else -1
                kind = op.name.removeprefix("top.")
                wish = {-1: f"{self.name}/{kind}", 0: self.name}.get(place, f"{self.name}:{place}")
                # The user's own names were reserved before any was made up.
                unique = wish if place == 0 else self._namer.unique(wish)
                op.attributes["name"] = StringAttr(unique)


def shape_of(value: SSAValue) -> tuple[int, ...]:
    """Return the static shape of a tensor value."""
    assert isinstance(value.type, TensorType), value.type
    return tuple(value.type.get_shape())


def element(value: SSAValue) -> Attribute:
    """Return the element type of a tensor value."""
    assert isinstance(value.type, TensorType), value.type
    return value.type.get_element_type()


def is_float(value: SSAValue) -> bool:
    """Whether a tensor holds floats of any width."""
    return top.numpy_dtype(element(value)).kind == "f"


def axis_of(axis: int, rank: int, what: str = "axis") -> int:
    """Return `axis` counted from the front."""
    if not -rank <= axis < max(rank, 1):
        raise RefusedError(f"{what} {axis} is outside rank {rank}")
    return axis % rank if rank else 0


def as_float(value: float) -> FloatAttr:
    """Return an f32 attribute of a number."""
    return FloatAttr(value, f32)
