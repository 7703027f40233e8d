"""Reading a `top` module: its function, the user's names, the types of values."""

from __future__ import annotations

from xdsl.dialects.builtin import ArrayAttr, ModuleOp, StringAttr, TensorType
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute, SSAValue

from tilewright.diagnostics import TilewrightError


def main_function(module: ModuleOp) -> FuncOp:
    """Return the function `@main` of a module.

    Raises:
        TilewrightError: E0501, there is none.
    """
    for op in module.ops:
        if isinstance(op, FuncOp) and op.sym_name.data == "main":
            return op
    raise TilewrightError("E0501", "the module has no function @main")


def boundary_names(function: FuncOp, key: str, count: int, stem: str) -> list[str]:
    """Return the user's names of the arguments (`arg_names`) or results (`result_names`)."""
    attribute = function.attributes.get(key)
    if attribute is None:
        return [f"{stem}{index}" for index in range(count)]
    if not isinstance(attribute, ArrayAttr) or len(attribute) != count:
        raise TilewrightError("E0501", f"@main: `{key}` must be an array of {count} strings")
    return [item.data for item in attribute if isinstance(item, StringAttr)]


def tensor_type(value: SSAValue) -> TensorType[Attribute]:
    """Return the type of a tensor value."""
    assert isinstance(value.type, TensorType), value.type
    return value.type
