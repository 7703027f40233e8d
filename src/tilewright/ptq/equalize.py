"""Cross-channel equalisation: give every channel of an activation a fair share of the code range.

One scale serves a whole activation, so a channel that stays small uses few codes. Where an
activation `y` is read by convolutions only, channel `c` may be made larger at no cost in the float
graph:

    y[c] = clamp(conv1(x)[c])          ->   k[c] * y[c]   (weights and bias of conv1 times k[c])
    conv2 reads sum_c w2[:, c] * y[c]  ->   w2[:, c] / k[c]

`clamp` commutes with a positive factor for ReLU. An upper bound `hi` becomes `hi / k[c]` for the
original channel; with `k[c] >= 1` and `k[c] * m[c] <= max(m) / 2`, `m[c]` being the largest value
that calibration saw, it still lies at twice that or above: it clips only what calibration came
nowhere near. A channel that hardly ever fires is not known well enough for that, so gains stay
small and channels that never fired are left alone.

The default pipeline leaves layers with an upper bound alone: where channels fire rarely
(EfficientNet-Lite0) a few samples know too little of them, and it costs more than it gains.

A depthwise consumer has a weight scale for each channel, so `k` fills the range. Others share a
scale among input channels; `k` then balances activation and weight precision (geometric mean).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewright.ptq.peaks import channel_peaks
from tilewright.quant.graph import layer_of, main_function, weight_name

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp
    from xdsl.ir import Operation, SSAValue

    from tilewright.ir.context import CompileContext

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float64]

STAGE = "equalize"

HEADROOM = 2.0
"""How far above its calibrated maximum a channel may reach before an upper bound clips it."""

LARGEST_GAIN = 8.0
"""Channels are not raised by more: three bits of the eight are won back by then."""


@dataclass(frozen=True)
class Pair:
    """A producer whose output channels may be scaled, and the convolutions that read them."""

    producer: Operation
    consumers: tuple[Operation, ...]


def equalize(
    ctx: CompileContext,
    module: ModuleOp,
    samples: Iterable[Mapping[str, Array]],
    bounded: bool = True,
) -> int:
    """Equalise the channels of `@main` in place and return how many layers were changed.

    Args:
        ctx: holds the weights, which are replaced, and the decision log.
        module: a fused float `top` module.
        samples: inputs by name; they give the largest magnitude of every channel.
        bounded: also layers with an upper bound, whose function changes where a channel exceeds
            `HEADROOM` times what the samples showed.
    """
    pairs = find_pairs(module)
    if not pairs:
        return 0
    axes = {pair.producer: _channel_axis(pair.producer) for pair in pairs}
    maxima = channel_peaks(ctx, module, axes, samples)
    changed = 0
    for pair in pairs:
        changed += _equalize_pair(ctx, pair, maxima[pair.producer], bounded)
    return changed


def find_pairs(module: ModuleOp) -> list[Pair]:
    """Return the convolutions whose result only convolutions with weights of their own read."""
    users: dict[SSAValue, int] = {}
    ops = list(main_function(module).body.block.ops)
    for op in ops:
        for operand in op.operands:
            users[operand] = users.get(operand, 0) + 1
    found: list[Pair] = []
    for op in ops:
        if not _scalable(op, users):
            continue
        consumers = tuple(use.operation for use in op.results[0].uses)
        if consumers and all(
            _scalable(user, users) and user.operands[0] is op.results[0] for user in consumers
        ):
            found.append(Pair(op, consumers))
    return found


def _scalable(op: Operation, users: Mapping[SSAValue, int]) -> bool:
    from tilewright.dialects.top.base import is_absent

    if op.name != "top.conv":
        return False
    # A constant shared with another layer must not change.
    return (
        weight_name(op.operands[1]) is not None
        and users[op.operands[1]] == 1
        and (
            is_absent(op.operands[2])
            or (weight_name(op.operands[2]) is not None and users[op.operands[2]] == 1)
        )
    )


def _channel_axis(op: Operation) -> int:
    from tilewright.dialects.top.base import Attrs

    return -1 if Attrs(op.attributes).string("layout", "nchw") == "nhwc" else 1


def _equalize_pair(ctx: CompileContext, pair: Pair, maxima: FloatArray, bounded: bool) -> bool:
    from tilewright.dialects.top.base import Attrs, is_absent

    layer = layer_of(pair.producer)
    attrs = Attrs(pair.producer.attributes)
    low = attrs.number("clamp_min")
    if low not in (None, 0.0):
        ctx.decide(layer, STAGE, False, f"its lower bound {low:g} does not scale")
        return False
    high = attrs.number("clamp_max")
    if high is not None and np.isfinite(high) and not bounded:
        ctx.decide(layer, STAGE, False, f"its upper bound {high:g} would cut scaled channels")
        return False
    total = float(maxima.max())
    if not np.isfinite(total) or total <= 0:
        ctx.decide(layer, STAGE, False, "it was always zero")
        return False
    headroom = 1.0 if high is None else HEADROOM
    room = np.maximum(total / np.maximum(headroom * maxima, total / LARGEST_GAIN), 1.0)
    gain = np.where(maxima > 0, room, 1.0)
    for consumer in pair.consumers:
        gain = np.minimum(gain, _wanted(ctx, consumer, maxima, total))
    gain = np.clip(gain, 1.0, room)
    # Quarter octaves: the same gains from one machine to another despite float noise.
    gain = np.exp2(np.floor(np.log2(gain) * 4) / 4)
    if not (gain > 1).any():
        ctx.decide(layer, STAGE, False, "its channels have like ranges")
        return False
    weight = weight_name(pair.producer.operands[1])
    assert weight is not None
    array = ctx.weights.get(weight)
    column = gain.reshape(-1, *([1] * (array.ndim - 1)))
    ctx.weights.set(weight, (array * column).astype(array.dtype))
    if not is_absent(pair.producer.operands[2]):
        bias = weight_name(pair.producer.operands[2])
        assert bias is not None
        values = ctx.weights.get(bias)
        ctx.weights.set(bias, (values * gain).astype(values.dtype))
    for consumer in pair.consumers:
        _divide_inputs(ctx, consumer, gain)
    ctx.decide(
        layer,
        STAGE,
        True,
        f"{int((gain > 1).sum())} of {gain.size} channels raised, by up to {gain.max():.3g}",
    )
    return True


def _per_input(op: Operation, weight: Array) -> Array:
    """Return a conv's weights as `[group, out, in, kernel...]`."""
    from tilewright.dialects.top.base import Attrs

    group = Attrs(op.attributes).integer("group")
    return weight.reshape(group, weight.shape[0] // group, *weight.shape[1:])


def _wanted(
    ctx: CompileContext, consumer: Operation, maxima: FloatArray, total: float
) -> FloatArray:
    """Return the gain of each input channel that suits `consumer`."""
    name = weight_name(consumer.operands[1])
    assert name is not None
    weight = np.abs(_per_input(consumer, ctx.weights.get(name)).astype(np.float64))
    if weight.shape[2] == 1:
        # Depthwise: dividing a channel's weights changes nothing but its scale.
        return np.full(maxima.size, np.inf)
    # Weight of each input channel relative to the largest of its output channel, at its largest.
    spatial = weight.max(axis=tuple(range(3, weight.ndim))) if weight.ndim > 3 else weight
    share = spatial / np.maximum(spatial.max(axis=2, keepdims=True), 1e-30)
    share = share.max(axis=1).reshape(-1)
    return np.sqrt(share * total / np.maximum(maxima, 1e-30))


def _divide_inputs(ctx: CompileContext, consumer: Operation, gain: FloatArray) -> None:
    name = weight_name(consumer.operands[1])
    assert name is not None
    weight = ctx.weights.get(name)
    grouped = _per_input(consumer, weight)
    factor = gain.reshape(grouped.shape[0], 1, grouped.shape[2], *([1] * (grouped.ndim - 3)))
    ctx.weights.set(name, (grouped / factor).reshape(weight.shape).astype(weight.dtype))
