"""Checks that a `Program` is self-consistent, before it is packed and after it is read.

A package may come from anywhere, so the loader relies on every rule here: nothing later looks up a
name, reads a tensor or allocates memory that was not checked.
"""

from __future__ import annotations

import math

from tilewright.codegen.program import (
    ITEM_BYTES,
    HostStep,
    LoadStep,
    Port,
    Program,
    StoreStep,
    TensorInfo,
    TpuStep,
)
from tilewright.diagnostics import TilewrightError
from tilewright.spec.hardware import Hardware
from tilewright.spec.isa import INSTRUCTION_BYTES

MAX_DDR_BYTES = 1 << 33
"""Largest workspace that is allocated, whatever the target could address."""
MAX_RANK = 8
MAX_ELEMENTS = 1 << 31


def _wrong(what: str, *details: str) -> TilewrightError:
    return TilewrightError("E0601", f"program is inconsistent: {what}", list(details))


def check_program(program: Program, target: Hardware) -> None:
    """Check names, shapes, addresses and the order of steps.

    Raises:
        TilewrightError: E0601 saying what is wrong.
    """
    for port in (*program.inputs, *program.outputs):
        _check_port(port)
    if not program.outputs:
        raise _wrong("the model has no outputs")
    for kind, ports in (("inputs", program.inputs), ("outputs", program.outputs)):
        if len({port.name for port in ports}) != len(ports):
            raise _wrong(f"two {kind} have one name")
    room = min(target.ddr_size, MAX_DDR_BYTES)
    if not 0 <= program.workspace_bytes <= room or program.constants.nbytes > room:
        raise _wrong(
            "it does not fit DDR",
            f"workspace {program.workspace_bytes} bytes, constants {program.constants.nbytes}",
            f"largest: {room} bytes each",
        )
    if not 0 <= program.sram_peak_bytes <= target.sram_size:
        raise _wrong(f"SRAM peak {program.sram_peak_bytes} of {target.sram_size} bytes")
    for name, tensor in program.tensors.items():
        if name != tensor.name:
            raise _wrong(f"tensor `{tensor.name}` is listed as `{name}`")
        _check_tensor(tensor, program.workspace_bytes, target)
    names = [step.name for step in program.steps if isinstance(step, TpuStep | HostStep)]
    if len(set(names)) != len(names):
        # They name what is decoded and compiled once.
        raise _wrong("two steps have one name")
    _check_steps(program)


def _check_shape(name: str, shape: tuple[int, ...], least: int) -> None:
    if len(shape) > MAX_RANK or any(not least <= size <= MAX_ELEMENTS for size in shape):
        raise _wrong(f"`{name}` has shape {list(shape)}")
    if math.prod(shape) > MAX_ELEMENTS:
        raise _wrong(f"`{name}` has {math.prod(shape)} elements")


def _check_port(port: Port) -> None:
    _check_shape(port.name, port.shape, least=0)
    if port.dtype not in ITEM_BYTES:
        raise _wrong(f"`{port.name}` has element type `{port.dtype}`")


def _check_tensor(tensor: TensorInfo, workspace: int, target: Hardware) -> None:
    _check_shape(tensor.name, tensor.shape, least=1)
    if tensor.dtype not in ("int8", "fp16", "int32"):
        raise _wrong(f"tensor `{tensor.name}` has element type `{tensor.dtype}`")
    if tensor.offset < 0 or tensor.offset % target.tensor_alignment:
        raise _wrong(
            f"tensor `{tensor.name}` lies at {tensor.offset}",
            f"a multiple of {target.tensor_alignment} is needed",
        )
    if tensor.offset + tensor.size_bytes > workspace:
        raise _wrong(
            f"tensor `{tensor.name}` ends at {tensor.offset + tensor.size_bytes}",
            f"the workspace has {workspace} bytes",
        )
    if tensor.dtype == "int8":
        scale = tensor.scale
        if scale is None or not math.isfinite(scale) or scale <= 0:
            raise _wrong(f"tensor `{tensor.name}` has scale {scale}")
        if not -128 <= tensor.zero_point <= 127 or tensor.low not in (-128, -127):
            raise _wrong(
                f"tensor `{tensor.name}` has zero point {tensor.zero_point}, low {tensor.low}"
            )


def _check_perm(name: str, perm: tuple[int, ...] | None, rank: int | None) -> None:
    if perm is None:
        return
    if sorted(perm) != list(range(len(perm))) or rank not in (None, len(perm)):
        raise _wrong(f"`{name}` is transposed by {list(perm)}")


def _check_steps(program: Program) -> None:
    values = {port.name: math.prod(port.shape) for port in program.inputs}
    ranks = {port.name: len(port.shape) for port in program.inputs}
    written: set[str] = set()
    names: set[str] = set()

    def tensor(name: str, step: str) -> TensorInfo:
        if name not in program.tensors:
            raise _wrong(f"step `{step}` uses tensor `{name}`, which does not exist")
        return program.tensors[name]

    def value(name: str, step: str) -> None:
        if name not in ranks:
            raise _wrong(f"step `{step}` uses value `{name}` before it exists")

    for index, step in enumerate(program.steps):
        if isinstance(step, StoreStep):
            what = f"store {step.value}"
            value(step.value, what)
            target = tensor(step.tensor, what)
            _check_perm(what, step.perm, ranks[step.value] if step.value in values else None)
            if values.get(step.value, math.prod(target.shape)) != math.prod(target.shape):
                raise _wrong(f"value `{step.value}` and tensor `{step.tensor}` differ in size")
            written.add(step.tensor)
        elif isinstance(step, LoadStep):
            what = f"load {step.tensor}"
            source = tensor(step.tensor, what)
            if step.tensor not in written:
                raise _wrong(f"tensor `{step.tensor}` is read before it is written")
            _check_shape(step.value, step.shape, least=1)
            _check_perm(what, step.perm, len(source.shape))
            if math.prod(step.shape) != math.prod(source.shape):
                raise _wrong(f"tensor `{step.tensor}` and value `{step.value}` differ in size")
            values[step.value] = math.prod(step.shape)
            ranks[step.value] = len(step.shape)
        elif isinstance(step, HostStep):
            for name in step.inputs:
                value(name, step.name)
            for name in step.outputs:
                # Shapes of host results are only known when onnxruntime has made them.
                ranks[name] = -1
                values.pop(name, None)
        else:
            _check_tpu_step(step)
            for name in step.inputs:
                tensor(name, step.name)
                if name not in written:
                    raise _wrong(f"`{step.name}` reads tensor `{name}` before it is written")
            for name in step.outputs:
                tensor(name, step.name)
            written.update(step.outputs)
        if isinstance(step, HostStep | TpuStep):
            if step.name in names:
                raise _wrong(f"two steps are called `{step.name}` (the second is step {index})")
            names.add(step.name)
    for port in program.outputs:
        value(port.name, "end")
        if values.get(port.name, math.prod(port.shape)) != math.prod(port.shape):
            raise _wrong(f"output `{port.name}` is not of shape {list(port.shape)}")


def _check_tpu_step(step: TpuStep) -> None:
    count, rest = divmod(len(step.code), INSTRUCTION_BYTES)
    if rest or not count:
        raise _wrong(f"`{step.name}` has {len(step.code)} bytes of code")
    if len(step.layers) != count:
        raise _wrong(f"`{step.name}` has {count} instructions and {len(step.layers)} layer names")
