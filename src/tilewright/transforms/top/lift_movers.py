"""Operations on codes that only move them, written on the values the codes stand for.

    %q = quantize_linear %x            %q = quantize_linear %x
    %p = max_pool %q             ->    %r = max_pool (dequantize_linear %q)
    %d = dequantize_linear %p          %p = quantize_linear %r
                                       %d = dequantize_linear %p

Moving an element, and choosing the largest (scales are positive), commutes with the conversion, so
that both sides are equal, code by code. The pairs that come together then are absorbed.
"""

from __future__ import annotations

from typing import Any

from xdsl.dialects.builtin import TensorType
from xdsl.ir import Operation, SSAValue

from tilewright.dialects import top
from tilewright.transforms.top.graph import Graph, element_of, shape_of
from tilewright.transforms.top.qdq import edge_of

MOVERS = (top.ReshapeOp, top.TransposeOp, top.SliceOp, top.MaxPoolOp, top.ConcatOp, top.ResizeOp)
"""Operations that may move codes; a resize does if it takes the nearest."""

Meaning = tuple[SSAValue, SSAValue]
"""Scale and zero point of codes."""


def lift_movers(graph: Graph) -> None:
    """Write movers of codes on floats where the codes' scale is known."""
    meanings: dict[SSAValue, Meaning] = {}
    for op in graph.layers():
        if isinstance(op, top.QuantizeLinearOp) and not isinstance(edge_of(graph, op), str):
            meanings[op.results[0]] = (op.scale, op.zero)
        elif _moves_codes(op):
            meaning = _meaning(graph, op, meanings)
            if meaning is not None:
                meanings[_lift(graph, op, meaning)] = meaning


def _moves_codes(op: top.TopOp) -> bool:
    if not isinstance(op, MOVERS) or len(op.results) != 1:
        return False
    if isinstance(op, top.ResizeOp) and op.attrs.string("mode") != "nearest":
        return False
    return str(element_of(op.results[0])) in ("i8", "ui8")


def _meaning(graph: Graph, op: top.TopOp, known: dict[SSAValue, Meaning]) -> Meaning | None:
    """Return the one meaning of all operands' codes, from what made them or from what reads."""
    if any(graph.array(value) is not None for value in op.operands):
        return None
    found = [known.get(value) for value in op.operands]
    if None in found and len(op.operands) == 1 and not isinstance(op.operands[0].owner, top.TopOp):
        return _reader(graph, op.results[0])
    first = found[0]
    if first is None or any(item is None or not _same(graph, item, first) for item in found):
        return None
    return first


def _reader(graph: Graph, value: SSAValue) -> Meaning | None:
    """Return the meaning that the readers of an input's codes give them; constants come first."""
    for use in value.uses:
        user = use.operation
        if isinstance(user, top.DequantizeLinearOp) and not isinstance(edge_of(graph, user), str):
            if top.is_absent(user.zero):
                return None
            return user.scale, user.zero
    return None


def _same(graph: Graph, one: Meaning, other: Meaning) -> bool:
    for a, b in zip(one, other, strict=True):
        x, y = graph.array(a), graph.array(b)
        if x is None or y is None or x.dtype != y.dtype or (x != y).any():
            return False
    return True


def _lift(graph: Graph, op: top.TopOp, meaning: Meaning) -> SSAValue:
    """Replace one mover; return the codes it gives."""
    name = op.layer_name
    scale, zero = (_before(value, op) for value in meaning)
    real: list[SSAValue] = []
    for value in op.operands:
        label = graph.fresh(f"{name}/dequantize")
        real.append(
            graph.insert(top.DequantizeLinearOp, [value, scale, zero], name=label, before=op)
        )
    kind = TensorType(element_of(real[0]), shape_of(op.results[0]))
    attributes: dict[str, Any] = {k: v for k, v in op.attributes.items() if k != "name"}
    moved = top.create(type(op), real, attributes, name=name, result_types=[kind])
    graph.block.insert_op_before(moved, op)
    codes = top.create(
        top.QuantizeLinearOp,
        [moved.results[0], scale, zero],
        name=graph.fresh(f"{name}/quantize"),
        result_types=[op.results[0].type],
    )
    graph.block.insert_op_before(codes, op)
    graph.fired(name, "moves codes: written on what they stand for")
    graph.replace(op, codes.results[0])
    return codes.results[0]


def _before(value: SSAValue, op: Operation) -> SSAValue:
    """Return a constant that stands before an operation, as a copy if need be."""
    owner = value.owner
    assert isinstance(owner, Operation)
    block = op.parent_block()
    assert block is not None
    for item in block.ops:
        if item is owner:
            return value
        if item is op:
            break
    copy = owner.clone()
    block.insert_op_before(copy, op)
    return copy.results[0]
