"""What the layers of one function share while it is rebuilt on buffers: names, buffers, builder, log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from xdsl.dialects import memref
from xdsl.dialects.builtin import (
    ArrayAttr,
    DenseArrayBase,
    IntegerAttr,
    MemRefType,
    StringAttr,
    TensorType,
)
from xdsl.ir import Operation, SSAValue

from tilewright.diagnostics import TilewrightError
from tilewright.ir.context import CompileContext
from tilewright.schedule.placement import TileBuffer
from tilewright.spec.hardware import Hardware
from tilewright.transforms.affine.nest import SRAM, Nest

PASS = "tile-and-bufferize"
RESHAPES = ("tensor.expand_shape", "tensor.collapse_shape", "tensor.cast")


@dataclass
class Buffers:
    """Where every tensor of the function lies in DDR."""

    context: CompileContext
    hardware: Hardware
    nest: Nest
    known: dict[SSAValue, SSAValue] = field(default_factory=dict[SSAValue, SSAValue])
    bound: dict[SSAValue, SSAValue] = field(default_factory=dict[SSAValue, SSAValue])
    """Tensors that are written straight into a result of the function."""

    def of(self, value: SSAValue) -> SSAValue:
        """Return the buffer of a tensor; reshapes become other shapes of their source's buffer."""
        found = self.known.get(value)
        if found is None:
            owner = value.owner
            if not isinstance(owner, Operation) or owner.name not in RESHAPES:
                name = owner.name if isinstance(owner, Operation) else "an argument"
                raise TilewrightError("E0501", f"{name} has no buffer when it is read")
            found = self.nest.reshape(self.of(owner.operands[0]), tensor_shape(value))
            self.known[value] = found
        return found

    def make(self, value: SSAValue, producer: Operation) -> SSAValue:
        """Return a buffer for a tensor that a nest will write."""
        found = self.known.get(value)
        if found is not None:
            return found
        kind = value.type
        assert isinstance(kind, TensorType)
        bound = self.bound.get(value)
        if bound is not None:
            found = self.nest.reshape(bound, kind.get_shape())
        else:
            op = memref.AllocOp([], [], MemRefType(kind.element_type, kind.get_shape()))
            name = text(producer, "result") or text(producer, "layer")
            op.attributes["value"] = StringAttr(name)
            if "result" in producer.attributes:
                op.attributes["result"] = producer.attributes["result"]
            self.nest.add(op)
            found = op.results[0]
        self.known[value] = found
        return found

    def decide(
        self, layer: str, what: str, cycles: float, sram: int, other: str, other_cycles: float
    ) -> None:
        """Log a choice with its runner-up."""
        reason = f"{what}; {sram} bytes of SRAM; estimated {cycles:.0f} cycles"
        if other:
            reason += f" (next best: {other}, {other_cycles:.0f})"
        self.context.decide(layer, PASS, True, reason, cycles=int(cycles), sram_bytes=sram)


def out_of_memory(
    layer: str, buffers: Sequence[TileBuffer], needed: int, hardware: Hardware
) -> TilewrightError:
    """Return the error for a layer whose smallest tiles do not fit."""
    return TilewrightError(
        "E0401",
        f'Out of memory during allocation: no tile of layer "{layer}" fits the SRAM of '
        f"`{hardware.name}`",
        [
            *(f"{b.name}: {b.slots} x {b.size_bytes} bytes" for b in buffers),
            f"SRAM has {hardware.sram_size} bytes in {hardware.sram_banks} banks; weights need "
            "banks of their own",
        ],
        f"the smallest SRAM that would do has {needed} bytes",
    )


def tensor_shape(value: SSAValue) -> tuple[int, ...]:
    """Return the shape of a tensor or memref value."""
    kind = value.type
    assert isinstance(kind, TensorType | MemRefType)
    return tuple(kind.get_shape())


def text(op: Operation, key: str) -> str:
    """Return a string attribute, or an empty string."""
    value = op.attributes.get(key)
    return value.data if isinstance(value, StringAttr) else ""


def number(op: Operation, key: str) -> int:
    """Return an integer attribute.

    Raises:
        TilewrightError: E0501, it is missing.
    """
    value = op.attributes.get(key)
    if not isinstance(value, IntegerAttr):
        raise TilewrightError("E0501", f'layer "{text(op, "layer")}" lacks the attribute `{key}`')
    return value.value.data


def numbers(op: Operation, key: str) -> tuple[int, ...]:
    """Return an attribute that is a list of integers.

    Raises:
        TilewrightError: E0501, it is missing.
    """
    value = op.attributes.get(key)
    if not isinstance(value, ArrayAttr):
        raise TilewrightError("E0501", f'layer "{text(op, "layer")}" lacks the attribute `{key}`')
    return tuple(item.value.data for item in value if isinstance(item, IntegerAttr))


def values_of(array: DenseArrayBase) -> tuple[int, ...]:
    """Return the integers of a dense array attribute."""
    return tuple(int(item) for item in array.get_values())


__all__ = [
    "PASS",
    "RESHAPES",
    "SRAM",
    "Buffers",
    "number",
    "numbers",
    "out_of_memory",
    "tensor_shape",
    "text",
    "values_of",
]
