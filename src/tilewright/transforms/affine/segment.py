"""What the layers of one function share while it is rebuilt: buffers, builder, log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from xdsl.dialects import memref, tensor
from xdsl.dialects.builtin import (
    AnyFloat,
    ArrayAttr,
    DenseArrayBase,
    IntegerAttr,
    IntegerType,
    MemRefType,
    StringAttr,
    TensorType,
)
from xdsl.dialects.linalg.ops import GenericOp
from xdsl.ir import Operation, SSAValue

from tilewright.diagnostics import TilewrightError
from tilewright.ir.context import CompileContext
from tilewright.schedule.permutation import merged_permutation
from tilewright.schedule.placement import TileBuffer
from tilewright.schedule.tiling import ConvTiling
from tilewright.spec.hardware import Hardware
from tilewright.transforms.affine.index import Index
from tilewright.transforms.affine.nest import Nest, View, view_of

PASS = "tile-and-bufferize"
Scalar = IntegerType | AnyFloat
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
    returned: set[SSAValue] = field(default_factory=set[SSAValue])
    """Tensors the function returns."""
    inside: set[SSAValue] = field(default_factory=set[SSAValue])
    """Tensors that lie inside the buffer of a concatenation."""
    parameters: dict[GenericOp, tuple[SSAValue, ...]] = field(
        default_factory=dict[GenericOp, tuple[SSAValue, ...]]
    )
    """By channel, of requantisations whose own are scalars."""
    outputs: list[SSAValue] = field(default_factory=list[SSAValue])
    """Results of the function that are copies of other tensors."""
    apart: bool = False
    """Every layer is by itself, its tensors in DDR: the best tiling of each is its own."""
    held_bytes: int = 0
    """SRAM that tensors, and constants that stay, take during the current step."""
    kept: dict[GenericOp, list[tuple[dict[str, Index], dict[str, View]]]] = field(
        default_factory=dict[GenericOp, "list[tuple[dict[str, Index], dict[str, View]]]"]
    )
    """By requantisation: constants that stay, by range of output channels (`ConvNest.ranges`)."""
    tilings: dict[GenericOp, ConvTiling] = field(default_factory=dict[GenericOp, ConvTiling])
    """Of units that tile themselves and keep constants."""

    def of(self, value: SSAValue) -> SSAValue:
        """Return the buffer of a tensor; reshapes become other shapes of their source's buffer."""
        found = self.known.get(value)
        if found is None:
            owner = value.owner
            if not isinstance(owner, Operation) or not is_alias(owner):
                name = owner.name if isinstance(owner, Operation) else "an argument"
                raise TilewrightError("E0501", f"{name} has no buffer when it is read")
            found = self.nest.reshape(self.of(owner.operands[0]), tensor_shape(value))
            self.known[value] = found
        return found

    def make(self, value: SSAValue, producer: Operation, strided: bool = False) -> SSAValue:
        """Return a buffer for a tensor that a nest will write.

        With `strided` the nest can write a tensor that is not dense: an operand of a concatenation,
        used by nothing else, then lies inside the result's buffer.
        """
        found = self.known.get(value)
        if found is not None:
            return found
        if strided:
            found = self._inside_concatenation(value)
        if found is None:
            found = self._allocate(value, producer)
        self.known[value] = found
        return found

    def target(self, value: SSAValue, producer: Operation, shape: Sequence[int]) -> SSAValue:
        """Return the buffer of a tensor that a nest will write under another shape."""
        found = self.make(value, producer, strided=tuple(shape) == tensor_shape(value))
        return self.nest.reshape(found, shape)

    def _allocate(self, value: SSAValue, producer: Operation) -> SSAValue:
        kind = value.type
        assert isinstance(kind, TensorType)
        bound = self.bound.get(value)
        if bound is not None:
            return self.nest.reshape(bound, kind.get_shape())
        op = memref.AllocOp([], [], MemRefType(kind.element_type, kind.get_shape()))
        name = text(producer, "result") or text(producer, "layer")
        op.attributes["value"] = StringAttr(name)
        if "result" in producer.attributes:
            op.attributes["result"] = producer.attributes["result"]
        self.nest.add(op)
        return op.results[0]

    def _inside_concatenation(self, value: SSAValue) -> SSAValue | None:
        uses = list(value.uses)
        if value in self.returned or value in self.bound or len(uses) != 1:
            return None
        insert = uses[0].operation
        if not isinstance(insert, tensor.InsertSliceOp) or insert.source is not value:
            return None
        whole = self.concatenation(insert)
        offsets, sizes = values_of(insert.static_offsets), values_of(insert.static_sizes)
        self.inside.add(value)
        return self.nest.view(view_of(whole), offsets, sizes).value

    def concatenation(self, insert: tensor.InsertSliceOp) -> SSAValue:
        """Return the buffer of the concatenation that `insert` is part of; its chain shares it.

        Raises:
            TilewrightError: E0501, the chain does not start from a new tensor.
        """
        if insert.result in self.known:
            return self.known[insert.result]
        first = insert
        while isinstance(first.dest.owner, tensor.InsertSliceOp):
            first = first.dest.owner
        if not isinstance(first.dest.owner, tensor.EmptyOp):
            raise TilewrightError(
                "E0501", f'concat "{text(insert, "layer")}" writes into a tensor that is not new'
            )
        chain = [first.dest, first.result]
        while (following := insertion_into(chain[-1])) is not None:
            chain.append(following.result)
        producer = chain[-1].owner
        assert isinstance(producer, Operation)
        found = self.make(chain[-1], producer)
        self.known.update((item, found) for item in chain)
        return found

    def decide(
        self,
        layer: str,
        what: str,
        cycles: float | None,
        sram: int,
        other: str = "",
        other_cycles: float = 0,
    ) -> None:
        """Log a choice; with its estimate and its runner-up if it was made for the layer alone."""
        reason = f"{what}; {sram} bytes of SRAM"
        if cycles is None:
            reason += "; chosen with the steps around it"
            self.context.decide(layer, PASS, True, reason, sram_bytes=sram)
            return
        reason += f"; estimated {cycles:.0f} cycles"
        if other:
            reason += f" (next best: {other}, {other_cycles:.0f})"
        self.context.decide(layer, PASS, True, reason, cycles=int(cycles), sram_bytes=sram)


def moves_nothing(op: GenericOp) -> bool:
    """Tell whether a transposition is only another shape."""
    sizes, _ = merged_permutation(tensor_shape(op.inputs[0]), numbers(op, "perm"))
    return len(sizes) <= 1


def is_alias(op: Operation) -> bool:
    """Tell whether the result of an op is its operand under another shape."""
    if op.name in RESHAPES:
        return True
    return (
        isinstance(op, GenericOp)
        and text(op, "kind") == "copy"
        and "perm" in op.attributes
        and moves_nothing(op)
    )


def insertion_into(value: SSAValue) -> tensor.InsertSliceOp | None:
    """Return the insertion that continues the chain at `value`, its only user."""
    users = [use.operation for use in value.uses]
    if len(users) == 1 and isinstance(users[0], tensor.InsertSliceOp) and users[0].dest is value:
        return users[0]
    return None


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


def element_of(value: SSAValue) -> Scalar:
    """Return the type of the elements of a tensor or memref value."""
    kind = value.type
    assert isinstance(kind, TensorType | MemRefType)
    element = kind.element_type
    assert isinstance(element, IntegerType | AnyFloat)
    return element


def item_bytes(value: SSAValue) -> int:
    """Return the bytes of an element of a tensor or memref value."""
    return -(-element_of(value).bitwidth // 8)


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


def values_of(array: DenseArrayBase[IntegerType]) -> tuple[int, ...]:
    """Return the integers of a dense array attribute."""
    return tuple(int(item) for item in array.get_values())
