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

    from tilewright.codegen.program import Program
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
}
"""What executes a level above the machine: `f(module, weights, inputs) -> outputs`, all by name."""


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
    if level == "tpu":
        from tilewright.runtime.runtime import Executor

        program = program_of(module, context)
        assert context.target is not None, "program_of checks it"
        return Executor(program, context.target).run(inputs)
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
    from tilewright.codegen.verify_compiled import verify_compiled
    from tilewright.dialects.tpu import ProgramOp

    if context.target is None:
        raise TilewrightError("E0501", "the module does not say which chip it was lowered for")
    for op in module.body.ops:
        if isinstance(op, ProgramOp):
            verify_compiled(op, context.target)


def program_of(module: ModuleOp, context: CompileContext) -> Program:
    """Assemble a lowered module: code, constants, and what the host does around it.

    Raises:
        TilewrightError: E0501, the chip or the graph it was lowered from is not known.
    """
    from tilewright.codegen.assemble import assemble

    if context.target is None:
        raise TilewrightError("E0501", "the module does not say which chip it was lowered for")
    if context.graph is None:
        raise TilewrightError(
            "E0501",
            "the module does not carry the graph it was lowered from",
            hint="`tpu-mlir-opt --convert-top-to-tpu ... -o FILE` records it",
        )
    return assemble(context.graph, module, context.weights, context.target)


def seeded_inputs(module: ModuleOp, context: CompileContext, seed: int = 0) -> dict[str, Array]:
    """Return random inputs for `@main`: floats normal, int8 over its range, other integers 0 or 1.

    The same seed and signature give the same arrays on every machine.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    return {
        name: _random(generator, shape, kind) for name, shape, kind in signature(module, context)
    }


def _random(generator: np.random.Generator, shape: tuple[int, ...], kind: str) -> Array:
    if kind.startswith("f"):
        return generator.standard_normal(shape, np.float32).astype(f"f{int(kind[1:]) // 8}")
    if kind == "i1":
        return generator.integers(0, 2, shape).astype(np.bool_)
    if kind in ("i8", "ui8"):
        codes = generator.integers(-128, 128, shape)
        return codes.astype(np.int8) if kind == "i8" else (codes + 128).astype(np.uint8)
    if kind.startswith("u"):
        return generator.integers(0, 2, shape).astype(f"u{int(kind[2:]) // 8}")
    # Indices and lengths: small values are valid for any axis of two elements or more.
    return generator.integers(0, 2, shape).astype(f"i{int(kind[1:]) // 8}")


def signature(module: ModuleOp, context: CompileContext) -> list[tuple[str, tuple[int, ...], str]]:
    """Return (name, shape, element type) of each input of `@main`, or of the only function.

    Names are the function attribute `arg_names`, or `arg0`, `arg1`... without it. Arguments that
    are constants of the weight store, or memory for the outputs, are no inputs. A module of
    instructions has the inputs of the graph it was lowered from.

    Raises:
        TilewrightError: E0501 when there is no such function.
    """
    from xdsl.dialects.builtin import ArrayAttr, MemRefType, ShapedType, StringAttr
    from xdsl.dialects.func import FuncOp

    if level_of(module) == "tpu" and context.graph is not None:
        return signature(context.graph, context)
    functions = {op.sym_name.data: op for op in module.body.ops if isinstance(op, FuncOp)}
    main = functions.get("main") or (
        next(iter(functions.values())) if len(functions) == 1 else None
    )
    if main is None:
        raise TilewrightError("E0501", "the module has no function @main")

    def strings(key: str) -> list[str]:
        items = main.attributes.get(key)
        found = items if isinstance(items, ArrayAttr) else []
        return [item.data for item in found if isinstance(item, StringAttr)]

    known, outputs = strings("arg_names"), set(strings("result_names"))
    found: list[tuple[str, tuple[int, ...], str]] = []
    for index, kind in enumerate(main.function_type.inputs):
        name = known[index] if index < len(known) else f"arg{index}"
        if name in context.weights or (isinstance(kind, MemRefType) and name in outputs):
            continue
        if isinstance(kind, ShapedType):
            shape, element = kind.get_shape(), str(getattr(kind, "element_type", kind))
        else:
            shape, element = (), str(kind)
        if element.startswith("!quant"):
            element = "i8"
        found.append((name, tuple(shape), element))
    return found
