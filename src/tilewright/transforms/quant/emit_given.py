"""What the emitter does for scales the model gives, so that codes come out as ONNX has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from xdsl.dialects.builtin import TensorType
from xdsl.ir import Operation, SSAValue

from tilewright.dialects import quant
from tilewright.dialects.quant import UniformType, quantised, shape_of
from tilewright.quant.graph import layer_of
from tilewright.transforms.quant.classify import constant_name, is_constant
from tilewright.transforms.quant.given import exact_table, rounding_warning
from tilewright.transforms.quant.scales import EdgeScale, given_scale

if TYPE_CHECKING:
    from tilewright.transforms.quant.emit import Emitter


def as_read(emitter: Emitter, value: SSAValue) -> SSAValue:
    """Return a float value as the host reads it: where the model gives a scale, in its steps."""
    owner = value.owner
    whole = owner in emitter.hosted if isinstance(owner, Operation) else True
    if value not in emitter.scales.given or not whole or is_constant(value):
        return emitter.as_float(value)
    if isinstance(owner, Operation) and owner.name == "top.dequantize_linear":
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
