"""`top-absorb-pad`: explicit padding becomes the padding of the convolution or pool behind it.

    %p = top.pad %x {value = 0.0}
    %c = top.conv %p {pads = [0, ..]}  ->   %c = top.conv %x {pads = [1, ..]}

Exact, hence done, only when the values agree: zeros into a convolution; minus infinity into a
max_pool, or zeros if `x` is never negative and every window meets `x`; zeros into an avg_pool that
counts padding, or has none of its own (it then counts).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue
from xdsl.passes import ModulePass
from xdsl.utils.exceptions import VerifyException

from tilewright.dialects import top
from tilewright.transforms.top.graph import (
    Graph,
    channel_axis,
    clamp_of,
    clip_bounds,
    is_float,
    shape_of,
)


def _never_negative(value: SSAValue) -> bool:
    """Return whether a value is known to be zero or more."""
    op = value.owner
    if not isinstance(op, top.TopOp):
        return False
    if isinstance(op, top.SigmoidOp | top.HardSigmoidOp | top.SoftmaxOp):
        return True
    if isinstance(op, top.MaxPoolOp | top.AvgPoolOp):
        return _never_negative(op.x)
    low = (clip_bounds(op) or clamp_of(op))[0]
    return low is not None and low >= 0


def _pool_reason(op: top.PoolOp, pad: top.PadOp, pads: list[int], value: float) -> str | None:
    """Return why a pool may not take the padding, or None."""
    kernel = op.attrs.ints("kernel")
    own = op.attrs.ints("pads")
    if op.attrs.flag("ceil_mode"):
        return "a pool that rounds its size up would drop other windows"
    if len(op.results) != 1:
        return "the pool's indices count the padding"
    # Runtimes refuse it, and windows of padding alone would be undefined.
    if any(pads[i] >= size or pads[i + len(kernel)] >= size for i, size in enumerate(kernel)):
        return "the padding is as large as the window"
    if isinstance(op, top.AvgPoolOp):
        if value != 0:
            return f"it pads with {value}, an avg_pool with 0"
        if any(own) and not op.attrs.flag("count_include_pad"):
            return "the avg_pool does not count padding"
        return None
    if value == -inf:
        return None
    if value == 0 and _never_negative(pad.x) and all(d == 1 for d in op.attrs.ints("dilations")):
        return None
    return f"it pads with {value}, a max_pool with minus infinity"


def _reason(graph: Graph, op: top.ConvOp | top.PoolOp, pad: top.PadOp) -> str | list[int]:
    """Return the joined pads, or why there are none."""
    axis = channel_axis(op)
    rank = len(shape_of(pad.x)) - 2
    spatial = [index for index in range(rank + 2) if index not in (0, axis)]
    begin, end = pad.attrs.ints("pads_begin"), pad.attrs.ints("pads_end")
    if pad.attrs.string("mode") != "constant":
        return f"it pads by {pad.attrs.string('mode')}"
    if any(begin[index] or end[index] for index in (0, axis)):
        return "it pads batch or channels"
    if min(*begin, *end) < 0:
        return "it cuts off instead of padding"
    value = pad.attrs.number("value")
    assert value is not None
    own = op.attrs.ints("pads")
    extra = [begin[index] for index in spatial] + [end[index] for index in spatial]
    pads = [a + b for a, b in zip(own, extra, strict=True)]
    if isinstance(op, top.ConvOp):
        if value != 0:
            return f"it pads with {value}, a convolution with 0"
        return pads
    return _pool_reason(op, pad, pads, value) or pads


@dataclass(frozen=True)
class AbsorbPadPass(ModulePass):
    """Move explicit padding into convolutions and pools where that is exact."""

    name = "top-absorb-pad"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Run the pass."""
        graph = Graph(ctx, op, self.name)
        for layer in graph.layers():
            if not isinstance(layer, top.ConvOp | top.MaxPoolOp | top.AvgPoolOp):
                continue
            pad = layer.operands[0].owner
            if not isinstance(pad, top.PadOp) or not is_float(pad.result):
                continue
            pads = _reason(graph, layer, pad)
            if isinstance(pads, str):
                graph.refused(pad.layer_name, f'not into "{layer.layer_name}": {pads}')
                continue
            changes: dict[str, object] = {"pads": pads}
            if isinstance(layer, top.AvgPoolOp):
                changes["count_include_pad"] = True
            before = dict(layer.attributes), layer.operands[0]
            graph.set(layer, **changes)
            layer.operands[0] = pad.x
            try:
                layer.verify_()
            except VerifyException:
                layer.attributes.clear()
                layer.attributes.update(before[0])
                layer.operands[0] = before[1]
                graph.refused(pad.layer_name, f'not into "{layer.layer_name}": the shape changes')
                continue
            graph.absorb(layer, pad)
            graph.fired(pad.layer_name, f'became padding of "{layer.layer_name}"')
            graph.remove(pad)
