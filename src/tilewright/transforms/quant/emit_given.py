"""What the emitter does for scales the model gives, so that codes come out as ONNX has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from xdsl.dialects.builtin import IntegerAttr, StringAttr, TensorType, i64
from xdsl.ir import Operation, SSAValue

from tilewright.dialects import quant, top
from tilewright.dialects.quant import UniformType, quantised, shape_of
from tilewright.quant.graph import layer_of
from tilewright.transforms.quant.classify import LAYOUT_OPS, constant_name, is_constant
from tilewright.transforms.quant.given import exact_table, rounding_warning, split_tables
from tilewright.transforms.quant.scales import EdgeScale, given_scale

if TYPE_CHECKING:
    from tilewright.transforms.quant.emit import Emitter


def as_read(emitter: Emitter, value: SSAValue) -> SSAValue:
    """Return a float value as the host reads it: where the model gives a scale, in its steps."""
    if value not in emitter.scales.given or is_constant(value):
        return emitter.as_float(value)
    owner = value.owner
    while isinstance(owner, Operation) and owner.name in LAYOUT_OPS and owner in emitter.hosted:
        owner = owner.operands[0].owner
    # Codes of the chip, or of the model's own integers, are in steps already.
    coded = isinstance(owner, Operation) and (
        owner not in emitter.hosted or owner.name == "top.dequantize_linear"
    )
    if coded:
        return emitter.as_float(value)
    if value not in emitter.stepped:
        codes = emitter.as_codes(value)
        name = emitter.unique(f"{emitter.scales.names[value]}/dequantize")
        op = quant.DequantizeOp.make([codes], value.type, name=name)
        emitter.stepped[value] = emitter.append(op)
    return emitter.stepped[value]


def restep(emitter: Emitter, codes: SSAValue, target: UniformType, layer: str) -> SSAValue:
    """Return codes at a scale the model gives: a table, so that ties go where ONNX has them."""
    source = quantised(codes)
    if source == target:
        return codes
    table = exact_table(
        "clip", {}, EdgeScale(source.step, source.zero), EdgeScale(target.step, target.zero)
    )
    stored = emitter.weights.add(f"{layer}.table", table)
    name = emitter.unique(f"{layer}/requantize")
    kind = TensorType(target, shape_of(codes))
    return emitter.append(quant.LutOp.make([codes], kind, table=stored, function="clip", name=name))


def factors(emitter: Emitter, op: Operation) -> tuple[SSAValue, SSAValue]:
    """Return the operands of a product of two activations, as codes of zero point 0.

    Codes with a zero point, `a - za` in -255..255, are a sum of parts of 8 bits, each a table of
    the code. Parts lie side by side along the summed axis, every part of one operand beside every
    part of the other: one exact sum, one rounding::

        (a1 + a2) . (b1 + b2) = [a1 a1 a2 a2] . [b1 b2 b1 b2]
    """
    left = _parts(emitter, op, 0)
    right = _parts(emitter, op, 1)
    if len(left) == len(right) == 1:
        return left[0], right[0]
    pairs = [(a, b) for a in left for b in right]
    rank = len(shape_of(left[0]))
    a = _beside(emitter, f"{layer_of(op)}/a", [pair[0] for pair in pairs], rank - 1)
    rank = len(shape_of(right[0]))
    b = _beside(emitter, f"{layer_of(op)}/b", [pair[1] for pair in pairs], rank - 2)
    return a, b


def _parts(emitter: Emitter, op: Operation, index: int) -> list[SSAValue]:
    codes = emitter.operand(op, index)
    kind = quantised(codes)
    if kind.zero == 0:
        return [codes]
    layer = f"{layer_of(op)}/{'ab'[index]}"
    found: list[SSAValue] = []
    for table in split_tables(kind.zero):
        name = emitter.unique(f"{layer}{len(found)}")
        stored = emitter.weights.add(f"{name}.table", table)
        result = TensorType(UniformType.of(kind.step), shape_of(codes))
        found.append(
            emitter.append(
                quant.LutOp.make([codes], result, table=stored, function="clip", name=name)
            )
        )
    return found


def _beside(emitter: Emitter, name: str, parts: list[SSAValue], axis: int) -> SSAValue:
    shape = list(shape_of(parts[0]))
    shape[axis] *= len(parts)
    op = top.ConcatOp.create(
        operands=parts,
        result_types=[TensorType(quantised(parts[0]), shape)],
        attributes={
            "name": StringAttr(emitter.unique(name)),
            "axis": IntegerAttr(axis, i64),
        },
    )
    return emitter.append(op)


def common_weight(emitter: Emitter, table: SSAValue) -> int:
    """Return the greatest number that divides all weights of a table of interpolation."""
    array = emitter.weights.get(constant_name(table))
    return max(1, int(np.gcd.reduce(array[:, 2:].astype(np.int64), axis=None)))


def constant_codes(emitter: Emitter, value: SSAValue) -> SSAValue | None:
    """Return the model's own codes of a constant; None if it gives no scale for it."""
    assert isinstance(value.owner, Operation)
    edge = given_scale(value.owner)
    if edge is None:
        return None
    array = emitter.weights.get(constant_name(value)).astype(np.float64)
    codes = np.clip(np.rint(array / edge.step) + edge.zero, -128, 127).astype(np.int8)
    kind = UniformType.of(edge.step, edge.zero)
    return emitter.constant(f"{constant_name(value)}.i8", codes, kind)


def warn_ties(
    emitter: Emitter, op: Operation, ratios: Sequence[Sequence[float]], *, whole: bool
) -> None:
    """Warn if a noticeable share of a layer's values is rounded otherwise than by ONNX.

    Only of results whose codes the model defines.
    """
    if op.results[0] not in emitter.scales.given:
        return
    warning = rounding_warning(layer_of(op), ratios, emitter.rounding, whole)
    if warning is not None:
        emitter.ctx.decide(
            layer_of(op), "quantize", True, "rounds as the chip does", warning=warning
        )
