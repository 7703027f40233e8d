"""Softmax and layer normalisation: units of the vector unit whose pixels are rows.

A tile holds whole rows (its channels). The passes of the linalg level work on it one by one, their
numbers a row in space 2, as accumulators are; the last one stands for the instruction::

    linalg.generic {kind = "row"} ...                                // one a pass
    linalg.generic ins(x, M, S, R, table) outs(y) {kind = "softmax", mult, shift, zp, lo, hi}
    linalg.generic ins(x, S1, W, R, gain, bias) outs(y) {kind = "layer_norm", epsilon, shift, ...}
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import IntegerAttr, i16
from xdsl.dialects.linalg.ops import FillOp, GenericOp
from xdsl.ir import Operation, Region, SSAValue
from xdsl.ir.affine import AffineMap

from tilewright.schedule.rows import row_problem
from tilewright.spec.hardware import Hardware
from tilewright.transforms.affine import bodies
from tilewright.transforms.affine.nest import ACCUMULATORS, Nest, View, dims, table, view_of
from tilewright.transforms.affine.segment import Buffers, element_of, tensor_shape, text
from tilewright.transforms.affine.units import Reading, Unit, Work, image_of
from tilewright.transforms.affine.vector import BoxLayer, table_of

KINDS = ("softmax", "layer_norm")
PASS = "row"
"""Kind of the ops that give one number a row."""
KEYS = ("mult", "epsilon", "shift", "zp", "lo", "hi")


def row_unit(hardware: Hardware, op: GenericOp) -> Unit:
    """Return the unit of a softmax or layer normalisation, given its last pass."""
    layer, source, result = text(op, "layer"), op.inputs[0], op.results[0]
    image = image_of(tensor_shape(result))
    softmax = text(op, "kind") == "softmax"
    problem = row_problem(hardware, image, softmax)
    loaded: list[View] = []

    def prepare(buffers: Buffers) -> None:
        loaded.clear()
        if softmax:
            loaded.append(_load(buffers, table_of(op), "row_table"))
        else:
            loaded.extend(
                _load(buffers, value, role)
                for value, role in zip(op.inputs[4:6], ("row_gain", "row_bias"), strict=True)
            )

    def compute(nest: Nest, tiles: list[View], shared: View | None) -> None:
        del shared
        _emit(nest, op, tiles[0], tiles[1], loaded)

    box = BoxLayer(layer, problem, ((source, image),), result, op, prepare, compute)
    reads = (Reading(source, image),)
    return Unit(layer, reads, result, op, Work(box.alone, box.begin), problem, None, image)


def _load(buffers: Buffers, value: SSAValue, role: str) -> View:
    nest = buffers.nest
    tile = nest.alloc(tensor_shape(value), element_of(value), role, 1)
    nest.copy(view_of(buffers.of(value)), tile)
    return tile


def _passes(op: GenericOp) -> list[GenericOp]:
    """Return the passes that a last one needs, in their order."""
    found: list[GenericOp] = []

    def visit(value: SSAValue) -> None:
        owner = value.owner
        if isinstance(owner, GenericOp) and text(owner, "kind") == PASS and owner not in found:
            for operand in owner.inputs:
                visit(operand)
            found.append(owner)

    for value in op.inputs[1:]:
        visit(value)
    return found


def _emit(nest: Nest, op: GenericOp, x: View, y: View, loaded: Sequence[View]) -> None:
    """Append all passes over the rows of a tile [h, w, n]."""
    known: dict[SSAValue, View] = {op.inputs[0]: x}
    space = dims(3)
    whole, rows, columns = AffineMap.identity(3), table(3, space[:2]), table(3, space[2:])

    def operand(value: SSAValue) -> tuple[View, AffineMap]:
        view = known[value]
        return view, whole if view is x else rows

    for item in _passes(op):
        made = item.results[0]
        shape = [size.high for size in x.sizes[:2]]
        numbers = nest.alloc(shape, element_of(made), "rows", 1, ACCUMULATORS)
        numbers = nest.view(numbers, [0, 0], x.sizes[:2])
        known[made] = numbers
        body = _reading(item, loaded)
        filled = item.outputs[0].owner
        if isinstance(filled, FillOp):
            nest.fill(_constant(filled), numbers)
            inputs = [operand(value) for value in item.inputs]
            nest.generic(PASS, inputs, (numbers, rows), body, {}, reductions=1)
        else:
            identity = AffineMap.identity(2)
            inputs = [(known[value], identity) for value in item.inputs]
            nest.generic(PASS, inputs, (numbers, identity), body, {})
    inputs = [operand(value) for value in op.inputs[:4]]
    if text(op, "kind") == "softmax":
        body = bodies.load_from(bodies.reordered(op, [0, 1, 2, 3, i16, 4]), loaded[0].value)
        inputs.append((loaded[0], table(3, [0])))
    else:
        body = bodies.plain(op)
        inputs += [(view, columns) for view in loaded]
    attributes = {key: op.attributes[key] for key in KEYS if key in op.attributes}
    nest.generic(text(op, "kind"), inputs, (y, whole), body, attributes)


def _reading(item: GenericOp, loaded: Sequence[View]) -> Region:
    """Return a copy of a pass's body; a table is read where it was loaded to."""
    return bodies.load_from(bodies.plain(item), loaded[0].value)


def _constant(op: FillOp) -> int:
    owner = op.inputs[0].owner
    assert isinstance(owner, Operation)
    value = owner.properties["value"]
    assert isinstance(value, IntegerAttr)
    return value.value.data
