"""`top-fold-batch-norm`: batch norms disappear into the linear layer before or behind.

    %c = top.conv %x, %w, %b
    %n = top.batch_norm %c, ...        ->    %c = top.conv %x, %w', %b'

The algebra is in `affine.py`. A batch norm that no linear layer can take becomes a depthwise 1x1
convolution with weights `scale[c]` and bias `shift[c]` (images), else a product and a sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from tilewright.dialects import top
from tilewright.transforms.top.affine import (
    LINEAR,
    Affine,
    batch_norm_affine,
    fold_after,
    fold_before,
)
from tilewright.transforms.top.graph import Graph, shape_of


def _into_producer(graph: Graph, op: top.BatchNormOp, affine: Affine) -> bool:
    producer = op.x.owner
    if not isinstance(producer, LINEAR):
        return False
    reason = graph.shared(op.x)
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


def _into_consumer(graph: Graph, op: top.BatchNormOp, affine: Affine) -> bool:
    use = op.result.get_unique_use()
    if use is None or use.index != 0 or not isinstance(use.operation, LINEAR):
        return False
    consumer = use.operation
    reason = fold_before(graph, affine, consumer)
    if reason is not None:
        graph.refused(op.layer_name, reason)
        return False
    graph.absorb(consumer, op)
    graph.fired(op.layer_name, f'folded into "{consumer.layer_name}" behind it')
    graph.replace(op, affine.x)
    return True


def _alone(graph: Graph, op: top.BatchNormOp, affine: Affine) -> None:
    shape, axis, name = shape_of(op.x), affine.axis, op.layer_name
    channels = shape[axis]
    with np.errstate(over="ignore"):
        scale, shift = affine.scale.astype(np.float32), affine.shift.astype(np.float32)
    if not (np.isfinite(scale).all() and np.isfinite(shift).all()):
        graph.refused(name, "its scale or shift overflows float32")
        return
    if len(shape) == 4 and axis in (1, 3):
        value = graph.insert(
            top.ConvOp,
            [
                op.x,
                graph.weight(f"{name}.scale", scale.reshape(channels, 1, 1, 1), op),
                graph.weight(f"{name}.shift", shift, op),
            ],
            {
                "strides": [1, 1],
                "pads": [0, 0, 0, 0],
                "dilations": [1, 1],
                "group": channels,
                "layout": "nhwc" if axis == 3 else None,
            },
            name=name,
            before=op,
        )
        graph.fired(name, "stands alone: became a depthwise 1x1 convolution")
    else:
        wide = [channels if index == axis else 1 for index in range(len(shape))]
        product = graph.insert(
            top.MulOp,
            [op.x, graph.weight(f"{name}.scale", scale.reshape(wide), op)],
            name=graph.fresh(f"{name}/scale"),
            before=op,
        )
        value = graph.insert(
            top.AddOp,
            [product, graph.weight(f"{name}.shift", shift.reshape(wide), op)],
            name=name,
            before=op,
        )
        graph.fired(name, "stands alone: became a product and a sum")
    graph.replace(op, value)


@dataclass(frozen=True)
class FoldBatchNormPass(ModulePass):
    """Fold batch norms into linear layers; no batch norm with constant statistics remains."""

    name = "top-fold-batch-norm"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Run the pass."""
        graph = Graph(ctx, op, self.name)
        for layer in graph.layers():
            if not isinstance(layer, top.BatchNormOp):
                continue
            affine = batch_norm_affine(graph, layer)
            if isinstance(affine, str):
                graph.refused(layer.layer_name, affine)
                continue
            if _into_producer(graph, layer, affine) or _into_consumer(graph, layer, affine):
                continue
            _alone(graph, layer, affine)
