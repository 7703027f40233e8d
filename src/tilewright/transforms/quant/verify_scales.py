"""Check that every edge of the integer graph has a scale, and that both ends mean the same one.

An op that only moves codes must have the scale of its operands; where they differ a
`quant.requantize` is put on the edge::

    %r = top.reshape %q {name = "r"} : (tensor<4x!quant.uniform<i8:f32, 0.1:0>>)
                                    -> tensor<2x2x!quant.uniform<i8:f32, 0.2:0>>
  becomes
    %0 = quant.requantize %q {mult = 1073741824, shift = 31, ..., name = "r/requantize"}
    %r = top.reshape %0 {name = "r"}

Arithmetic is checked, not mended: its multipliers must be the ratio of the scales in the types.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from typing_extensions import override
from xdsl.context import Context
from xdsl.dialects.builtin import FloatAttr, ModuleOp, StringAttr, TensorType
from xdsl.ir import Operation
from xdsl.passes import ModulePass

from tilewright.diagnostics import TilewrightError
from tilewright.dialects import quant
from tilewright.dialects.quant import quantised, shape_of, uniform_of
from tilewright.dialects.top.base import Attrs
from tilewright.ir.context import CompileContext, compile_context
from tilewright.quant.graph import layer_of, main_function
from tilewright.quant.parameters import scalar_parameters

STAGE = "quant-verify-scales"

TOLERANCE = 1e-6
"""Relative: 31-bit multipliers are closer than 2^-31, stored float32 weight scales than 2^-24."""

SOFTMAX_TOLERANCE = 2.0**-14
"""Relative: the multiplier of a softmax has 15 bits."""


def _error(op: Operation, what: str, *details: str) -> TilewrightError:
    return TilewrightError("E0501", f'"{layer_of(op)}" ({op.name}): {what}', list(details))


def _default_rounding(module: ModuleOp, context: CompileContext) -> str:
    for op in module.walk():
        rounding = op.attributes.get("rounding")
        if op.name.startswith("quant.") and isinstance(rounding, StringAttr):
            return rounding.data
    return context.target.rounding if context.target is not None else "half_up"


def _mend_mover(op: Operation, rounding: str, context: CompileContext) -> None:
    """Requantise operands of a code-moving op that have another scale than its result."""
    target = quantised(op.results[0])
    for index, operand in enumerate(op.operands):
        source = uniform_of(operand)
        if source is None:
            raise _error(op, "an operand has no scale, the result has", f"operand {index}")
        if source == target:
            continue
        p = scalar_parameters((source.step / target.step,), target.zero, rounding)
        mended = quant.RequantizeOp.make(
            [operand],
            TensorType(target, shape_of(operand)),
            mult=p.multipliers[0],
            shift=p.shift,
            bias=p.bias,
            bias_shift=p.bias_shift,
            zp=p.zp,
            lo=-127 if target.zero == 0 else -128,
            hi=127,
            rounding=rounding,
            name=f"{layer_of(op)}/requantize" + (f":{index}" if index else ""),
        )
        block = op.parent_block()
        assert block is not None
        block.insert_op_before(mended, op)
        op.operands[index] = mended.results[0]
        context.decide(
            layer_of(op),
            STAGE,
            True,
            f"operand {index} requantised from scale {source.step:.6g} to {target.step:.6g}",
        )


def _check_ratio(op: Operation, what: str, m: int, s: int, ratio: float) -> None:
    found = math.ldexp(m, -s)
    # A multiplier is right to half a unit, which for small ones is more than the tolerance.
    if abs(found - ratio) > ratio * TOLERANCE + math.ldexp(0.51, -s):
        raise _error(
            op,
            f"{what} does not fit the scales of its operands and result",
            f"{what} / 2^shift is {found:.9g}; the scales give {ratio:.9g}",
        )


def _check_arithmetic(op: quant.QuantOp, context: CompileContext) -> None:
    """Check that the multipliers of an arithmetic op are the ratios of its scales."""
    attrs = Attrs(op.attributes)
    if isinstance(op, quant.QuantizeOp | quant.DequantizeOp | quant.LutOp):
        return
    if isinstance(op, quant.ConvOp | quant.LinearOp):
        _check_weight_codes(op, context)
    if isinstance(op, quant.LinearOp | quant.MatmulOp) and op.wide:
        return  # nothing is rescaled
    target = quantised(op.results[0]).step
    if isinstance(op, quant.SoftmaxOp):
        found = math.ldexp(attrs.integer("mult"), -attrs.integer("shift"))
        if abs(found * target - 1) > SOFTMAX_TOLERANCE:
            raise _error(
                op,
                "mult does not fit the scale of its result",
                f"mult / 2^shift is {found:.9g}; the scale gives {1 / target:.9g}",
            )
        return
    if isinstance(op, quant.LayerNormOp):
        return  # its gain and epsilon are in integers only
    scales = [kind.step for value in op.operands if (kind := uniform_of(value)) is not None]
    if isinstance(op, quant.ConvOp | quant.LinearOp):
        _check_channels(op, scales[0], target, context)
        return
    shift = attrs.integer("shift")
    if isinstance(op, quant.AddOp | quant.SubOp):
        largest = max(scales) / target
        for key, scale in zip(("mult_a", "mult_b"), scales, strict=True):
            # The smaller addend's multiplier has the larger one's shift.
            if scale / target >= largest * 2.0**-20:
                _check_ratio(op, key, attrs.integer(key), shift, scale / target)
        return
    ratio = math.prod(scales) / target
    if isinstance(op, quant.ResizeOp):
        ratio /= 2.0**22
    if isinstance(op, quant.AvgPoolOp):
        window = math.prod(attrs.ints("kernel"))
        if "sum" not in op.attributes:
            ratio /= window
    gain = op.attributes.get("gain")
    if isinstance(gain, FloatAttr):
        ratio *= gain.value.data
    _check_ratio(op, "mult", attrs.integer("mult"), shift, ratio)


def _check_weight_codes(op: quant.ConvOp | quant.LinearOp, context: CompileContext) -> None:
    """Check that weights of 4 bits are int8 arrays of -7..7."""
    owner = op.w.owner
    limit = quant.weight_code_limit(op)
    if limit == 127 or not isinstance(owner, Operation) or layer_of(owner) not in context.weights:
        return
    codes = context.weights.get(layer_of(owner))
    if codes.dtype != np.int8:
        raise _error(op, f"weights of 4 bits lie in an array of int8, not of {codes.dtype}")
    if codes.size and max(int(codes.max()), -int(codes.min())) > limit:
        raise _error(
            op,
            f"weights of 4 bits must be -{limit}..{limit}",
            f"they reach {int(codes.min())}..{int(codes.max())}",
        )


def _check_channels(
    op: quant.ConvOp | quant.LinearOp, source: float, target: float, context: CompileContext
) -> None:
    if op.weight_scale is None or op.weight_scale.data not in context.weights:
        return
    owners = [value.owner for value in (op.mult, op.shift)]
    if not all(isinstance(owner, Operation) and owner.name == "top.weight" for owner in owners):
        return
    mult, shift = (
        context.weights.get(layer_of(owner)) for owner in owners if isinstance(owner, Operation)
    )
    for channel, scale in enumerate(context.weights.get(op.weight_scale.data)):
        _check_ratio(
            op,
            f"the multiplier of channel {channel}",
            int(mult[channel]),
            int(shift[channel]),
            source * float(scale) / target,
        )


@dataclass(frozen=True)
class VerifyScalesPass(ModulePass):
    """Check all scales; put a requantisation where code-moving ops change them.

    Requires: a quantised module. Ensures: every edge between integer ops has one scale, which both
    its ends agree on.
    """

    name = "quant-verify-scales"

    @override
    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Check `@main`.

        Raises:
            TilewrightError: E0501 naming the layer whose scales are missing or contradict it.
        """
        context = compile_context(ctx)
        rounding = _default_rounding(op, context)
        for item in list(main_function(op).body.block.ops):
            if item.name in ("top.weight", "top.none", "func.return"):
                continue
            if isinstance(item, quant.QuantOp):
                _check_arithmetic(item, context)
            elif any(uniform_of(value) is not None for value in item.results):
                _mend_mover(item, rounding, context)
            elif any(uniform_of(value) is not None for value in item.operands):
                raise _error(item, "a float op reads codes; `quant.dequantize` is missing")
