"""Read attributes of `top` and `quant` ops, wherever the op keeps them (attribute or property)."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import FloatAttr, IntegerAttr, StringAttr
from xdsl.ir import Attribute, Operation

from tilewright.diagnostics import TilewrightError
from tilewright.dialects.quant import int_list, int_of


def find(op: Operation, key: str) -> Attribute | None:
    """Return the attribute or property called `key`, or None."""
    return op.attributes.get(key, op.properties.get(key))


def ints(op: Operation, key: str, default: Sequence[int] | None = None) -> list[int]:
    """Return a list-of-integers attribute.

    Raises:
        TilewrightError: E0501, it is missing and has no default.
    """
    found = find(op, key)
    if found is not None:
        return int_list(found)
    if default is None:
        raise _missing(op, key)
    return list(default)


def integer(op: Operation, key: str) -> int:
    """Return an integer attribute.

    Raises:
        TilewrightError: E0501, it is missing.
    """
    found = find(op, key)
    if found is None:
        raise _missing(op, key)
    return int_of(found)


def text(op: Operation, key: str, default: str) -> str:
    """Return a string attribute."""
    found = find(op, key)
    return found.data if isinstance(found, StringAttr) else default


def number(op: Operation, key: str, default: float) -> float:
    """Return a float or integer attribute as a float."""
    found = find(op, key)
    if isinstance(found, FloatAttr):
        return float(found.value.data)
    return float(found.value.data) if isinstance(found, IntegerAttr) else default


def layer_name(op: Operation) -> str:
    """Return the user's node name of `op`, or the op's own name if it has none."""
    return text(op, "name", op.name)


def _missing(op: Operation, key: str) -> TilewrightError:
    return TilewrightError("E0501", f'{op.name} "{layer_name(op)}" lacks the attribute "{key}"')
