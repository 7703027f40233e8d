"""What the walk over a graph keeps: values by name in nested scopes, and records of nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewright.frontends.onnx.infer import Value
from tilewright.frontends.onnx.tensors import Array, malformed

if TYPE_CHECKING:
    from onnx import AttributeProto, NodeProto

ABSENT = Value("")
"""An optional operand that is left out."""


@dataclass(eq=False)
class Record:
    """A node that must run."""

    op_type: str
    domain: str
    name: str
    opset: int
    inputs: list[Value]
    outputs: list[Value]
    attributes: list[AttributeProto]
    refused: str = ""
    """Why the operator is not supported; empty if it is."""
    unknown: frozenset[str] = frozenset()
    """Graph inputs that, bound to constants, would make it supported."""


class Scope:
    """Names visible in one graph; inner graphs see those of outer ones."""

    def __init__(
        self, opsets: dict[str, int], parent: Scope | None = None, prefix: str = ""
    ) -> None:
        self.names: dict[str, Value] = {}
        self.opsets = opsets
        self.parent = parent
        self.prefix = prefix
        self.later: set[str] = set()

    def find(self, name: str) -> Value | None:
        """Return the value called `name`, looking outward."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        return None

    def define(self, name: str, value: Value, where: str) -> None:
        """Add a name; each may be defined once.

        Raises:
            TilewrightError: E0106, it is there already.
        """
        if name in self.names:
            raise malformed(f"tensor {name!r} is defined twice", f"the second time by {where}")
        self.names[name] = value


def constant(name: str, array: Array, elem_type: int) -> Value:
    """Return a value known at compile time."""
    return Value(name, elem_type, tuple(array.shape), array)


def label_of(node: NodeProto) -> str:
    """The user's name of a node, or one made of its operator and first output."""
    return node.name or f"{node.op_type}({next((o for o in node.output if o), '')})"


def origins_of(inputs: Iterable[Value]) -> frozenset[str]:
    """Return the graph inputs that values depend on."""
    sets = {value.origins for value in inputs if value.origins}
    if len(sets) <= 1:
        return next(iter(sets), frozenset())
    return frozenset().union(*sets)
