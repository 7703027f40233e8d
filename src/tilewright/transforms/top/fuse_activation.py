"""`top-fuse-activation`: a ReLU or Clip becomes the clamp of the layer before it.

    %c = top.conv %x, %w, %b
    %r = top.relu %c                   ->    %c = top.conv %x, %w, %b {clamp_min = 0.0}

Clamping by [a, b] and then by [c, d] is clamping by [clamp(a), clamp(b)] of the second; so
chains of activations fuse too, also those behind a layer that has no clamp.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from tilewright.dialects import top
from tilewright.transforms.top.graph import Graph, clamp_of, clip_bounds, compose_clamps, is_float

CLAMPED = (top.ConvOp, top.ConvTransposeOp, top.LinearOp, top.AddOp)
"""Operations that have a clamp."""


@dataclass(frozen=True)
class FuseActivationPass(ModulePass):
    """Fuse ReLU and Clip into convolutions, linear layers and sums that only they use."""

    name = "top-fuse-activation"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Run the pass."""
        graph = Graph(ctx, op, self.name)
        for layer in graph.layers():
            bounds = clip_bounds(layer)
            source = layer.operands[0] if layer.operands else None
            if bounds is None or source is None or not is_float(source):
                continue
            producer = source.owner
            if not isinstance(producer, (*CLAMPED, top.ReluOp, top.ClipOp)):
                if isinstance(producer, top.TopOp) and not isinstance(producer, top.WeightOp):
                    kind = producer.name.removeprefix("top.")
                    graph.refused(layer.layer_name, f'{kind} "{producer.layer_name}" has no clamp')
                continue
            reason = graph.shared(source)
            if "quant_scale" in producer.attributes or "quant_scale" in layer.attributes:
                reason = "the model quantises between the two"
            if reason is not None:
                graph.refused(layer.layer_name, f'"{producer.layer_name}": {reason}')
                continue
            inner = clip_bounds(producer)
            if inner is not None:
                low, high = compose_clamps(inner, bounds)
                value = graph.insert(
                    top.ClipOp,
                    [producer.operands[0]],
                    {"min": low, "max": high},
                    name=layer.layer_name,
                    before=layer,
                )
                assert isinstance(value.owner, top.TopOp)
                graph.absorb(value.owner, producer, layer)
                graph.fired(layer.layer_name, f'joined with "{producer.layer_name}"')
                graph.replace(layer, value)
                continue
            low, high = compose_clamps(clamp_of(producer), bounds)
            graph.set(producer, clamp_min=low, clamp_max=high)
            graph.absorb(producer, layer)
            graph.fired(layer.layer_name, f'became the clamp of "{producer.layer_name}"')
            graph.replace(layer, source)
