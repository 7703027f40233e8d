"""Architectural state of the machine and checked, strided views of its memories."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import TilewrightError
from tilewright.spec.hardware import Hardware
from tilewright.spec.program import ENGINE_NAMES, Dispatched

MAX_ELEMENTS = 1 << 28
"""Elements of one view, repetitions by overlapping strides counted."""

SRAM_RESET = 0xA5
"""SRAM's content before anything is written: not zero, so that relying on it shows."""


class MachineError(Exception):
    """A rule of the machine broken; the run loop adds which instruction did it."""

    code = "E0602"

    def __init__(self, message: str, *details: str) -> None:
        super().__init__(message)
        self.details = list(details)


class UnrepresentableError(MachineError):
    """A value has no place in the number type: not the program's fault, but the data's."""

    code = "E0304"


def machine_error(
    at: Dispatched, message: str, details: list[str], code: str = MachineError.code
) -> TilewrightError:
    """Return the user's error for what instruction `at` did."""
    return TilewrightError(
        code,
        f'layer "{at.layer}": instruction {at.index} ({at.name}) on {ENGINE_NAMES[at.engine]}: '
        f"{message}",
        details,
    )


@dataclass
class PushGroup:
    """Accumulators of one `mac_conv`, consumed by one `vec_drain`."""

    fields: dict[str, int]
    acc: npt.NDArray[Any]
    """`[out_h * out_w, columns]` int32 (int8) or float32 (fp16)."""
    pushed: int = 0
    """Blocks handed over so far."""
    drained: int = 0


@dataclass
class Half:
    """One half of the M registers."""

    full: bool = False
    """Holds a pushed block the vector unit has not emptied."""
    kept: npt.NDArray[Any] | None = None
    """`[pixels, columns]` left by a `mac_conv` without push; None when undefined."""


@dataclass
class State:
    """Memories and registers."""

    hardware: Hardware
    ddr: npt.NDArray[np.uint8]
    sram: npt.NDArray[np.uint8] = field(init=False)
    v: npt.NDArray[np.uint8] = field(init=False)
    """`[registers, 4 * lanes]` bytes."""
    v_written: npt.NDArray[np.bool_] = field(init=False)
    multiplier: npt.NDArray[np.int64] = field(init=False)
    """`[entries, lanes]`."""
    shift: npt.NDArray[np.int64] = field(init=False)
    param_written: npt.NDArray[np.bool_] = field(init=False)
    halves: tuple[Half, Half] = field(init=False)
    groups: list[PushGroup] = field(init=False)
    """Pushing `mac_conv`s not yet drained, oldest first."""

    def __post_init__(self) -> None:
        hardware = self.hardware
        lanes = hardware.vector_lanes
        entries = hardware.quant_banks * hardware.quant_bank_entries
        self.sram = np.full(hardware.sram_size, SRAM_RESET, np.uint8)
        self.v = np.zeros((hardware.vector_registers, 4 * lanes), np.uint8)
        self.v_written = np.zeros(hardware.vector_registers, np.bool_)
        self.multiplier = np.zeros((entries, lanes), np.int64)
        self.shift = np.zeros((entries, lanes), np.int64)
        self.param_written = np.zeros(entries, np.bool_)
        self.halves = (Half(), Half())
        self.groups = []

    def view(
        self,
        operand: str,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: Any = np.int8,
        ddr: bool = False,
    ) -> npt.NDArray[Any]:
        """Return a writable view of a memory; `strides` in bytes, none negative.

        Raises:
            MachineError: a byte of it lies outside the memory, or overlapping strides make it
                larger than any memory.
        """
        if prod(shape) > MAX_ELEMENTS:
            raise MachineError(
                f"{operand}: {prod(shape)} elements are more than the simulator handles at once "
                f"({MAX_ELEMENTS})"
            )
        memory = self.ddr if ddr else self.sram
        size = np.dtype(dtype).itemsize
        end = address + size
        for count, stride in zip(shape, strides, strict=True):
            end += (count - 1) * stride
        if end > memory.size:
            raise MachineError(
                f"{operand}: bytes 0x{address:x}..0x{end - 1:x} must lie in "
                f"{'DDR' if ddr else 'SRAM'}, which has 0x{memory.size:x} bytes"
            )
        return np.ndarray(shape, dtype, memory, address, strides)

    def vector_registers(self, name: str, first: int, count: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of `count` V registers, `[count, 4 * lanes]`.

        Raises:
            MachineError: one was never written.
        """
        if not self.v_written[first : first + count].all():
            missing = first + int(np.argmin(self.v_written[first : first + count]))
            raise MachineError(f"{name}: V{missing} is read but was never written")
        return self.v[first : first + count]

    def parameters(self, first: int, count: int) -> tuple[Any, Any]:
        """Return multipliers and shifts of `count` entries, each int64 `[count, lanes]`.

        Raises:
            MachineError: one was never written.
        """
        if not self.param_written[first : first + count].all():
            missing = first + int(np.argmin(self.param_written[first : first + count]))
            raise MachineError(f"param: entry {missing} is read but was never written")
        return self.multiplier[first : first + count], self.shift[first : first + count]
