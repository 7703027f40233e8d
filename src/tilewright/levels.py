"""The levels of the compiler, in order, and how a module of each is executed.

A level is known by its dialects. Executors are imported when one is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import TilewrightError

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp

    from tilewright.ir.context import CompileContext

Array = npt.NDArray[Any]

LEVELS = ("onnx", "top", "quant", "linalg", "affine", "tpu")
"""From the user's model to the machine."""

_DIALECTS = {
    "onnx": "onnx",
    "top": "top",
    "quant": "quant",
    "linalg": "linalg",
    "tensor": "linalg",
    "affine": "affine",
    "memref": "affine",
    "tpu": "tpu",
}

EXECUTORS = {
    "top": "tilewright.runtime.float_executor:run_top",
    "quant": "tilewright.quant.reference:run_quant",
    "linalg": "tilewright.interp.run:run_linalg",
    "affine": "tilewright.interp.run:run_affine",
    "tpu": "tilewright.sim.functional:run_module",
}
"""What executes a level: `f(module, weights, inputs) -> outputs`, all by name."""

LIMITS = "tilewright.codegen.verify:check_module"
"""Checks a module of instructions: `f(module, target)`."""


def level_of(module: ModuleOp) -> str:
    """Return the lowest level that `module` has operations of ("top" for an empty module).

    A module that mixes levels (host parts of a lowered model stay `top`) counts as its lowest.
    """
    rank = max(
        (
            LEVELS.index(level)
            for op in module.walk()
            if (level := _DIALECTS.get(op.name.split(".", 1)[0])) is not None
        ),
        default=LEVELS.index("top"),
    )
    return LEVELS[rank]


def execute(
    module: ModuleOp, context: CompileContext, inputs: Mapping[str, Array]
) -> dict[str, Array]:
    """Run `module` at whatever level it is and return its outputs by name.

    Raises:
        TilewrightError: E0501 for the `onnx` level, which only its source framework runs.
    """
    level = level_of(module)
    if level not in EXECUTORS:
        raise TilewrightError(
            "E0501",
            f"a module at level `{level}` cannot be executed",
            hint="lower it first: `--convert-onnx-to-top`",
        )
    place, attribute = EXECUTORS[level].split(":")
    run = getattr(import_module(place), attribute)
    outputs: dict[str, Array] = run(module, context.weights, dict(inputs))
    return outputs


def check_limits(module: ModuleOp, context: CompileContext) -> None:
    """Check instructions against the limits of `context.target`; other levels have none.

    Raises:
        TilewrightError: E0501, for example `length 300 not divisible by burst_size 256`.
    """
    if level_of(module) != "tpu":
        return
    place, attribute = LIMITS.split(":")
    check = getattr(import_module(place), attribute)
    check(module, context.target)


def seeded_inputs(module: ModuleOp, seed: int = 0) -> dict[str, Array]:
    """Return random inputs for `@main`: floats normal, int8 over its range, other integers 0 or 1.

    The same seed and signature give the same arrays on every machine.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    return {name: _random(generator, shape, kind) for name, shape, kind in signature(module)}


def _random(generator: np.random.Generator, shape: tuple[int, ...], kind: str) -> Array:
    if kind.startswith("f"):
        return generator.standard_normal(shape, np.float32).astype(f"f{int(kind[1:]) // 8}")
    if kind == "i1":
        return generator.integers(0, 2, shape).astype(np.bool_)
    if kind == "i8":
        return generator.integers(-128, 128, shape).astype(np.int8)
    # Indices and lengths: small values are valid for any axis of two elements or more.
    return generator.integers(0, 2, shape).astype(f"i{int(kind[1:]) // 8}")


def signature(module: ModuleOp) -> list[tuple[str, tuple[int, ...], str]]:
    """Return (name, shape, element type) of each argument of `@main`, or of the only function.

    Names are the function attribute `arg_names`, or `arg0`, `arg1`... without it.

    Raises:
        TilewrightError: E0501 when there is no such function.
    """
    from xdsl.dialects.builtin import ArrayAttr, ShapedType, StringAttr
    from xdsl.dialects.func import FuncOp

    functions = {op.sym_name.data: op for op in module.body.ops if isinstance(op, FuncOp)}
    main = functions.get("main") or (
        next(iter(functions.values())) if len(functions) == 1 else None
    )
    if main is None:
        raise TilewrightError("E0501", "the module has no function @main")
    names = main.attributes.get("arg_names")
    known = (
        [item.data for item in names if isinstance(item, StringAttr)]
        if isinstance(names, ArrayAttr)
        else []
    )
    found: list[tuple[str, tuple[int, ...], str]] = []
    for index, kind in enumerate(main.function_type.inputs):
        name = known[index] if index < len(known) else f"arg{index}"
        if isinstance(kind, ShapedType):
            shape, element = kind.get_shape(), str(getattr(kind, "element_type", kind))
        else:
            shape, element = (), str(kind)
        if element.startswith("!quant"):
            element = "i8"
        found.append((name, tuple(shape), element))
    return found
