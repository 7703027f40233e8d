"""Softmax and layer normalisation: which have an integer form, and building it.

The chip needs the row instructions (`vector_rows` of the target); `docs/concepts/numerics.md`,
"Rows", says what they compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from xdsl.dialects.builtin import i16, i32
from xdsl.ir import Operation, SSAValue

from tilewright.dialects import quant
from tilewright.dialects._quant_rows import MAX_ROW
from tilewright.dialects.quant import UniformType, quantised, shape_of
from tilewright.dialects.top.base import Attrs, is_absent
from tilewright.quant.graph import KEEP_FLOAT, layer_of
from tilewright.quant.parameters import output_bounds
from tilewright.quant.rowwise import (
    exponential_table,
    layer_norm_parameters,
    layer_norm_refusal,
    softmax_multiplier,
)
from tilewright.schedule.rows import row_misfit
from tilewright.transforms.quant.classify import (
    constant_name,
    host_reason,
    is_constant,
    operands_reason,
)

if TYPE_CHECKING:
    from tilewright.ir.weights import WeightStore
    from tilewright.spec.hardware import Hardware
    from tilewright.transforms.quant.emit import Emitter

STAGE = "quantize"
ROW_OPS = frozenset({"top.softmax", "top.layer_norm"})


def rule_for(target: Hardware | None) -> Callable[[Operation, WeightStore], str | None]:
    """Return the function that tells why an op stays float (None: it has an integer form)."""
    if target is None or not target.vector_rows:
        return host_reason

    def reason(op: Operation, weights: WeightStore) -> str | None:
        if op.name in ROW_OPS and KEEP_FLOAT not in op.attributes:
            return operands_reason(op) or row_reason(op, target)
        return host_reason(op, weights)

    return reason


def row_reason(op: Operation, target: Hardware) -> str | None:
    """Return why a softmax or layer normalisation has no integer form, scales left aside."""
    shape = shape_of(op.operands[0])
    axis = Attrs(op.attributes).axis(len(shape))
    if op.name == "top.softmax":
        if axis != len(shape) - 1:
            return f"it works along axis {axis} of {len(shape)}; the chip along the last"
        row = shape[-1]
    else:
        for value, what in zip(op.operands[1:], ("scale", "bias"), strict=True):
            if not is_absent(value) and not is_constant(value):
                return f"its {what} is computed at run time"
        row = math.prod(shape[axis:])
    if row > MAX_ROW:
        return f"its rows have {row} elements; the chip takes {MAX_ROW}"
    if needed := row_misfit(target, row, op.name == "top.softmax"):
        return f"a row of {row} elements takes {needed} bytes; SRAM has {target.sram_size}"
    return None


def scale_refusal(emit: Emitter, op: Operation) -> str | None:
    """Return why the scales around a softmax or layer normalisation permit no integer form.

    None for all other ops.
    """
    if op.name not in ROW_OPS:
        return None
    target = emit.scales.of(op.results[0]).step
    if op.name == "top.softmax":
        return None if 2.0**-14 <= target <= 1.0 else f"its result has scale {target:.6g}"
    gamma, beta = _affine(emit, op)
    if not np.isfinite(gamma).all() or not np.isfinite(beta).all():
        return "its scale or bias is not finite"
    return layer_norm_refusal(
        gamma.size,
        Attrs(op.attributes).number("epsilon") or 0.0,
        emit.scales.of(op.operands[0]).step,
        float(np.abs(gamma).max()) / target,
        float(np.abs(beta).max()) / target,
    )


def softmax(emit: Emitter, op: Operation) -> SSAValue:
    """`top.softmax` along the last axis to `quant.softmax`."""
    codes, layer = emit.as_codes(op.operands[0]), layer_of(op)
    result = emit.result(op)
    target = result.element_type
    mult, shift = softmax_multiplier(target.step)
    table = emit.weights.add(f"{layer}.table", exponential_table(quantised(codes).step))
    _decide(emit, op, f"table of exp, one reciprocal a row; output scale {target.step:.6g}")
    return emit.append(
        quant.SoftmaxOp.make(
            [codes],
            result,
            table=table,
            mult=mult,
            shift=shift,
            **_end(op, target),
        )
    )


def layer_norm(emit: Emitter, op: Operation) -> SSAValue:
    """`top.layer_norm` to `quant.layer_norm`."""
    codes, layer = emit.as_codes(op.operands[0]), layer_of(op)
    result, attrs = emit.result(op), Attrs(op.attributes)
    target = result.element_type
    gamma, beta = _affine(emit, op)
    p = layer_norm_parameters(
        layer,
        gamma,
        beta,
        epsilon=attrs.number("epsilon") or 0.0,
        input_scale=quantised(codes).step,
        output_scale=target.step,
    )
    _decide(emit, op, f"exact sums, one reciprocal root a row; output scale {target.step:.6g}")
    return emit.append(
        quant.LayerNormOp.make(
            [
                codes,
                emit.constant(f"{layer}.gain", p.gain, i16),
                emit.constant(f"{layer}.offset", p.bias, i32),
            ],
            result,
            axis=attrs.axis(len(shape_of(codes))),
            epsilon=p.epsilon,
            shift=p.shift,
            **_end(op, target),
        )
    )


def _decide(emit: Emitter, op: Operation, what: str) -> None:
    emit.ctx.decide(layer_of(op), STAGE, True, what)


def _end(op: Operation, target: UniformType) -> dict[str, Any]:
    """Return zero point, clamp and what names the layer."""
    attrs = Attrs(op.attributes)
    low, high = output_bounds(
        target.step, target.zero, attrs.number("clamp_min"), attrs.number("clamp_max")
    )
    kept: dict[str, Any] = {"zp": target.zero, "lo": low, "hi": high, "name": layer_of(op)}
    if "fused" in op.attributes:
        kept["fused"] = op.attributes["fused"]
    return kept


def _affine(
    emit: Emitter, op: Operation
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return scale and bias of a layer normalisation for every element of a row."""
    shape = shape_of(op.operands[0])
    tail = shape[Attrs(op.attributes).axis(len(shape)) :]
    found = [
        np.broadcast_to(
            np.full((), default)
            if is_absent(value)
            else emit.weights.get(constant_name(value)).astype(np.float64),
            tail,
        ).reshape(-1)
        for value, default in zip(op.operands[1:], (1.0, 0.0), strict=True)
    ]
    return found[0], found[1]
