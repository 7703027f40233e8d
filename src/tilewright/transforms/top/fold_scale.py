"""`top-fold-scale`: products and sums with constants disappear into the linear layer before.

    %c = top.conv %x, %w, %b
    %m = top.mul %c, %k                ->    %c = top.conv %x, %w', %b'

`%k` is one number or one a channel. `top.sub` and `top.div` likewise, and a product before a
convolution. The algebra is in `affine.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from tilewright.dialects import top
from tilewright.transforms.top.affine import (
    LINEAR,
    arithmetic_affine,
    fold_after,
    fold_before,
    linear_axis,
)
from tilewright.transforms.top.graph import Graph


def _into_producer(graph: Graph, op: top.TopOp) -> bool:
    """Fold `op` into the linear layer that makes its operand."""
    for value in op.operands:
        producer = value.owner
        if not isinstance(producer, LINEAR):
            continue
        affine = arithmetic_affine(graph, op, linear_axis(producer))
        if affine is None or affine.x is not value:
            return False
        reason = graph.shared(value)
        if reason is None:
            reason = fold_after(graph, producer, affine)
        else:
            reason = f'"{producer.layer_name}": {reason}'
        if reason is not None:
            graph.refused(op.layer_name, reason)
            return False
        graph.absorb(producer, op)
        graph.fired(op.layer_name, f'folded into "{producer.layer_name}" before it')
        graph.replace(op, producer.results[0])
        return True
    return False


def _into_consumer(graph: Graph, op: top.TopOp) -> bool:
    """Fold `op` into the linear layer that alone uses its result."""
    use = op.results[0].get_unique_use()
    if use is None or use.index != 0 or not isinstance(use.operation, LINEAR):
        return False
    consumer = use.operation
    affine = arithmetic_affine(graph, op, linear_axis(consumer))
    if affine is None:
        return False
    reason = fold_before(graph, affine, consumer)
    if reason is not None:
        graph.refused(op.layer_name, reason)
        return False
    graph.absorb(consumer, op)
    graph.fired(op.layer_name, f'folded into "{consumer.layer_name}" behind it')
    graph.replace(op, affine.x)
    return True


@dataclass(frozen=True)
class FoldScalePass(ModulePass):
    """Fold arithmetic with per-channel constants into linear layers."""

    name = "top-fold-scale"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Run the pass."""
        graph = Graph(ctx, op, self.name)
        for layer in graph.layers():
            _into_producer(graph, layer)
        # Backwards, so that a chain in front of a layer folds from its end.
        for layer in reversed(graph.layers()):
            _into_consumer(graph, layer)
