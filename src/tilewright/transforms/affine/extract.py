"""Take a function of the linalg level apart: its units, and the tensors between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from xdsl.dialects import func, tensor
from xdsl.dialects.builtin import ArrayAttr, StringAttr
from xdsl.dialects.linalg.ops import GenericOp
from xdsl.ir import Operation, SSAValue

from tilewright.diagnostics import TilewrightError
from tilewright.ir.context import CompileContext
from tilewright.schedule.plan import Read, TensorSpec, UnitSpec
from tilewright.spec.hardware import Hardware
from tilewright.transforms.affine import moves, rows, vector
from tilewright.transforms.affine.held import SramImage
from tilewright.transforms.affine.reductions import (
    Reductions,
    need_nhwc,
    no_instruction,
    unpadded,
)
from tilewright.transforms.affine.segment import (
    Buffers,
    insertion_into,
    is_alias,
    item_bytes,
    moves_nothing,
    tensor_shape,
    text,
    values_of,
)
from tilewright.transforms.affine.units import Reading, Tiling, Unit, Work, image_of

IGNORED = ("arith.constant", "tensor.empty", "linalg.fill", "func.return")


@dataclass
class Network:
    """A function's units and tensors; both in the order in which the function makes them."""

    units: list[Unit]
    specs: list[UnitSpec]
    tensors: list[TensorSpec]
    values: list[SSAValue | None]
    """By tensor; None for a result that is a copy of another."""
    constants: set[str]
    """Layers of the MAC array that have constants."""


def extract(
    context: CompileContext,
    target: Hardware,
    function: func.FuncOp,
    fuse: bool,
    keep: Callable[[str], bool],
) -> Network:
    """Return what a function does; `keep` tells whether a layer's constants shall stay in SRAM.

    Raises:
        TilewrightError: E0401, their layer has no tiling with them; E0402, the chip has no
            instruction for an op; E0403, an image is not NHWC.
    """
    return _Extraction(context, target, function, fuse, keep).run()


def opaque(
    layer: str,
    op: Operation,
    reads: Sequence[SSAValue],
    emit: Callable[[Buffers], None],
    why: str,
) -> Unit:
    """Return the unit of an op that works on DDR only and tiles itself."""

    def alone(
        buffers: Buffers,
        tiling: Tiling | None,
        sources: Sequence[SramImage | None],
        target: SramImage | None,
    ) -> None:
        del sources
        assert tiling is None
        assert target is None
        emit(buffers)

    readings = tuple(Reading(value, (0, 0, 0), whole=True) for value in reads)
    return Unit(layer, readings, op.results[0], op, Work(alone), why_opaque=why)


class _Extraction:
    def __init__(
        self,
        context: CompileContext,
        target: Hardware,
        function: func.FuncOp,
        fuse: bool,
        keep: Callable[[str], bool],
    ) -> None:
        self.target = target
        self.function = function
        self.block = function.body.block
        last = self.block.last_op
        assert isinstance(last, func.ReturnOp)
        self.results = list(last.arguments)
        self.returned = set(self.results)
        self.bound, self.copied = bind(self.results)
        order = {op: at for at, op in enumerate(self.block.ops)}
        self.reductions = Reductions(context, target, fuse, self.returned, order, keep)
        self.in_place: dict[SSAValue, tensor.InsertSliceOp] = {}
        """Results that their units write into the concatenation they are inserted into."""
        self.units: list[Unit] = []

    def run(self) -> Network:
        for op in self.block.ops:
            unit = self._unit(op)
            if unit is not None:
                self.units.append(unit)
        return _Tables(self).network()

    def _unit(self, op: Operation) -> Unit | None:
        if op in self.reductions.fused or op.name in IGNORED or is_alias(op):
            return None
        layer = text(op, "layer")
        match op:
            case tensor.PadOp():
                if _absorbed(op):
                    return None
                return opaque(
                    layer, op, [op.source], lambda buffers: moves.lower_pad(buffers, op), "it pads"
                )
            case tensor.InsertSliceOp():
                if op.source in self.in_place:
                    return None
                return opaque(
                    layer,
                    op,
                    [op.source],
                    lambda buffers: moves.lower_insert(buffers, op),
                    "it moves a part of a concatenation",
                )
            case tensor.ExtractSliceOp():
                return opaque(
                    layer,
                    op,
                    [op.source],
                    lambda buffers: moves.lower_extract(buffers, op),
                    "it is a slice",
                )
            case GenericOp():
                return self._generic(op)
            case _:
                raise TilewrightError("E0402", f"the tiler does not know {op.name}")

    def _generic(self, op: GenericOp) -> Unit | None:
        layer, result = text(op, "layer"), op.results[0]
        match text(op, "kind"):
            case "conv" | "sum" | "matmul":
                return None  # with its requantisation
            case rows.PASS:
                return None  # with the last pass over the rows
            case "softmax" | "layer_norm":
                return rows.row_unit(self.target, op)
            case "requant":
                unit = self.reductions.unit(op)
                assert unit.result is not None
                if unit.strided:
                    self._place(unit.result)
                return unit
            case "copy" if "perm" in op.attributes:
                assert not moves_nothing(op)
                return opaque(
                    layer,
                    op,
                    list(op.inputs),
                    lambda buffers: vector.lower_transpose(buffers, op),
                    "it is a transposition",
                )
            case "eltwise" | "lut" | "copy":
                work = vector.elementwise_of(op)
                in_place = len(tensor_shape(result)) == 4 and tensor_shape(result)[0] == 1
                unit = vector.elementwise_unit(self.target, work, in_place and self._place(result))
                if unit.problem is None:
                    self.in_place.pop(result, None)
                return unit
            case "pool":
                need_nhwc(op)
                source, pad = unpadded(op)
                self._place(result)
                return vector.pool_unit(op, source, pad)
            case "resize":
                need_nhwc(op)
                self._place(result)
                reads = [vector.table_of(op), op.inputs[0], op.inputs[4]]
                return opaque(
                    layer,
                    op,
                    reads,
                    lambda buffers: vector.lower_resize(buffers, op),
                    "a resize gathers rows from all over its operand",
                )
            case _:
                raise no_instruction(op)

    def _place(self, value: SSAValue) -> bool:
        """Note that a tensor is written into the concatenation that is its only use, if so."""
        uses = list(value.uses)
        if value in self.returned or value in self.bound or len(uses) != 1:
            return False
        insert = uses[0].operation
        if not isinstance(insert, tensor.InsertSliceOp) or insert.source is not value:
            return False
        self.in_place[value] = insert
        return True

    def root(self, value: SSAValue) -> SSAValue:
        """Return the tensor that a value is another shape, or an unfinished part, of."""
        while isinstance(value.owner, Operation):
            if is_alias(value.owner):
                value = value.owner.operands[0]
            elif (following := insertion_into(value)) is not None:
                value = following.result
            else:
                break
        return value

    def argument_name(self, value: SSAValue) -> str:
        """Return the name of an argument of the function."""
        names = self.function.attributes["arg_names"]
        assert isinstance(names, ArrayAttr)
        name = names.data[self.block.args.index(value)]
        assert isinstance(name, StringAttr)
        return name.data


def bind(
    results: Sequence[SSAValue],
) -> tuple[dict[SSAValue, int], list[int]]:
    """Return which tensors are written straight into a function's results.

    By tensor the position of the result; and the positions of results that have to be copied.
    """
    bound: dict[SSAValue, int] = {}
    copies: list[int] = []
    for number, value in enumerate(results):
        base = value
        while isinstance(base.owner, Operation) and is_alias(base.owner):
            base = base.owner.operands[0]
        if not isinstance(base.owner, Operation) or base in bound:
            copies.append(number)
        else:
            bound[base] = number
    return bound, copies


def _absorbed(op: tensor.PadOp) -> bool:
    """Tell whether a padding belongs to the window operation that reads it."""
    value: SSAValue = op.result
    users = [use.operation for use in value.uses]
    if len(users) == 1 and users[0].name == "tensor.expand_shape":
        users = [use.operation for use in users[0].results[0].uses]
    return (
        len(users) == 1
        and text(users[0], "kind") in ("conv", "sum", "pool")
        and text(users[0], "layer") == text(op, "layer")
    )


@dataclass
class _Row:
    """What is found out about a tensor."""

    value: SSAValue | None
    image: tuple[int, int, int]
    name: str
    element_bytes: int
    reason: str = ""
    inside: int | None = None
    channel: int = 0
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    fills: set[float] = field(default_factory=set[float])


class _Tables:
    """Numbers the tensors, and finds out which can be held."""

    def __init__(self, extraction: _Extraction) -> None:
        self.extraction = extraction
        self.rows: list[_Row] = []
        self.numbers: dict[SSAValue, int] = {}

    def network(self) -> Network:
        extraction = self.extraction
        units = extraction.units
        for unit in units:
            self._check_shapes(unit)
        copies = [extraction.results[at] for at in extraction.copied]
        for at, value in enumerate(copies):
            units.append(_copy_unit(at, value))
        touched: list[tuple[list[int], int]] = []
        for unit in units:
            reads = [self._number(read.value) for read in unit.reads]
            if unit.result is None:
                self.rows.append(_Row(None, (1, 1, 1), "output", 1, "it is a result"))
                writes = len(self.rows) - 1
            else:
                writes = self._number(unit.result)
            if unit.problem is None:
                self._refuse(writes, f"{unit.layer} writes to DDR only: {unit.why_opaque}")
            for read, number in zip(unit.reads, reads, strict=True):
                row = self.rows[number]
                if unit.problem is not None and any(read.pads):
                    row.fills.add(read.fill)
                    top, left, bottom, right = (
                        max(pair) for pair in zip(row.pads, read.pads, strict=True)
                    )
                    row.pads = (top, left, bottom, right)
            touched.append((reads, writes))
        for row in self.rows:
            if len(row.fills) > 1:
                row.reason = row.reason or "its readers want different padding"
        for row in self.rows:
            if row.inside is not None:
                row.reason = self.rows[row.inside].reason
        specs = [
            self._spec(unit, reads, writes)
            for unit, (reads, writes) in zip(units, touched, strict=True)
        ]
        tensors = [
            TensorSpec(
                row.name,
                *row.image,
                row.element_bytes,
                row.pads,
                next(iter(row.fills)) if len(row.fills) == 1 else 0,
                row.reason,
                row.inside,
                row.channel,
            )
            for row in self.rows
        ]
        constants = extraction.reductions.constants
        return Network(units, specs, tensors, [row.value for row in self.rows], constants)

    def _check_shapes(self, unit: Unit) -> None:
        """Make a unit opaque that sees a tensor as another image than its writer does."""
        if unit.problem is None:
            return
        pairs = [(read.value, read.image) for read in unit.reads]
        assert unit.result is not None
        for value, image in [*pairs, (unit.result, unit.image)]:
            root = self.extraction.root(value)
            own = image_of(tensor_shape(value if value is unit.result else root))
            if own != image:
                unit.problem = unit.in_ddr = None
                unit.why_opaque = (
                    f"it sees {'x'.join(map(str, own))} as {'x'.join(map(str, image))}"
                )
                return

    def _number(self, value: SSAValue) -> int:
        value = self.extraction.root(value)
        if value in self.numbers:
            return self.numbers[value]
        owner = value.owner
        shape = tensor_shape(value)
        row = _Row(value, image_of(shape), "", item_bytes(value))
        if isinstance(owner, Operation):
            row.name = text(owner, "result") or text(owner, "layer")
        else:
            row.name = self.extraction.argument_name(value)
            row.reason = "it is an argument"
        if any(self.extraction.root(result) is value for result in self.extraction.returned):
            row.reason = row.reason or "it is a result"
        self.rows.append(row)
        number = self.numbers[value] = len(self.rows) - 1
        insert = self.extraction.in_place.get(value)
        if insert is not None:
            whole = self._number(insert.result)
            target = self.rows[whole]
            offsets = values_of(insert.static_offsets)
            if row.image[:2] == target.image[:2]:
                row.inside, row.channel = whole, offsets[-1]
            else:
                target.reason = target.reason or "it is put together along another axis"
                row.reason = "it is a part of a tensor along another axis than channels"
        return number

    def _refuse(self, number: int, reason: str) -> None:
        row = self.rows[number]
        row.reason = row.reason or reason
        if row.inside is not None:
            self._refuse(row.inside, reason)

    def _spec(self, unit: Unit, reads: Sequence[int], writes: int) -> UnitSpec:
        row = self.rows[writes]
        partial = row.inside is None and row.value in self.extraction.in_place
        stripable = (
            unit.problem is not None
            and unit.work.begin is not None
            and not partial
            and all(len(self.rows[number].fills) < 2 for number in (*reads, writes))
        )
        return UnitSpec(
            unit.layer,
            unit.problem,
            tuple(
                Read(number, read.stride, read.extent, read.before, read.whole)
                for number, read in zip(reads, unit.reads, strict=True)
            ),
            writes,
            unit.image[0],
            stripable,
            unit.in_ddr,
            unit.kept_bytes if unit.problem is None else 0,
        )


def _copy_unit(at: int, value: SSAValue) -> Unit:
    """Return the unit that copies a tensor to a result that is bound to another."""

    def alone(
        buffers: Buffers,
        tiling: Tiling | None,
        sources: Sequence[SramImage | None],
        target: SramImage | None,
    ) -> None:
        del tiling, sources, target
        moves.copy_whole(buffers, "output", buffers.of(value), buffers.outputs[at])

    reads = (Reading(value, (0, 0, 0), whole=True),)
    return Unit("output", reads, None, None, Work(alone), why_opaque="it copies a result")
