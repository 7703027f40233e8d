"""Small readings of a module that calibration, quantisation and the reference share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewright.diagnostics import TilewrightError

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp
    from xdsl.dialects.func import FuncOp
    from xdsl.ir import Operation, SSAValue


KEEP_FLOAT = "keep_float"
"""Attribute of a float op: it stays in float on the host; its text says why."""


def main_function(module: ModuleOp) -> FuncOp:
    """Return `@main`, or the only function.

    Raises:
        TilewrightError: E0501, there is none.
    """
    from xdsl.dialects.func import FuncOp

    functions = [op for op in module.body.ops if isinstance(op, FuncOp)]
    for function in functions:
        if function.sym_name.data == "main":
            return function
    if len(functions) == 1:
        return functions[0]
    raise TilewrightError("E0501", "the module has no function @main")


def layer_of(op: Operation) -> str:
    """Return the user's name of an op, or its kind if it has none."""
    from xdsl.dialects.builtin import StringAttr

    name = op.attributes.get("name")
    return name.data if isinstance(name, StringAttr) else op.name


def weight_name(value: SSAValue) -> str | None:
    """Return the store name of a constant, or None if `value` is none."""
    from xdsl.ir import Operation

    owner = value.owner
    return layer_of(owner) if isinstance(owner, Operation) and owner.name == "top.weight" else None


def input_shapes(module: ModuleOp) -> dict[str, tuple[int, ...]]:
    """Return the shapes of `@main`'s arguments by name."""
    from tilewright.dialects.quant import shape_of

    main = main_function(module)
    return {
        name: tuple(shape_of(argument))
        for name, argument in zip(argument_names(main), main.body.block.args, strict=True)
    }


def argument_names(main: FuncOp) -> list[str]:
    """Return the names of a function's arguments (`arg_names`, or arg0, arg1...)."""
    return _names(main, "arg_names", "arg", len(main.function_type.inputs))


def result_names(main: FuncOp) -> list[str]:
    """Return the names of a function's results (`result_names`, or result0, result1...)."""
    return _names(main, "result_names", "result", len(main.function_type.outputs))


def _names(main: FuncOp, key: str, prefix: str, count: int) -> list[str]:
    from xdsl.dialects.builtin import ArrayAttr, StringAttr

    attr = main.attributes.get(key)
    known = (
        [item.data for item in attr if isinstance(item, StringAttr)]
        if isinstance(attr, ArrayAttr)
        else []
    )
    return known if len(known) == count else [f"{prefix}{i}" for i in range(count)]
