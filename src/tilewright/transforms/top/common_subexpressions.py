"""`top-common-subexpressions`: equal operations on equal operands are computed once.

    %a = top.relu %x
    %b = top.relu %x                   ->    %a, for both

Constants are equal if they have one name, or equal bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation
from xdsl.passes import ModulePass
from xdsl.traits import is_side_effect_free

from tilewright.dialects import top
from tilewright.transforms.top.graph import Graph

_OWN = frozenset({"name", "fused"})
"""Attributes that say where an operation comes from, not what it computes."""


@dataclass(frozen=True)
class CommonSubexpressionsPass(ModulePass):
    """Merge operations that compute the same."""

    name = "top-common-subexpressions"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Run the pass."""
        graph = Graph(ctx, op, self.name)
        known: dict[Any, Operation] = {}
        digests: dict[str, bytes] = {}
        for layer in list(graph.block.ops):
            if not layer.results or layer.regions or not is_side_effect_free(layer):
                continue
            if isinstance(layer, top.WeightOp):
                name = layer.layer_name
                if name not in digests:
                    digests[name] = hashlib.sha256(graph.weights.get(name).tobytes()).digest()
                given = (layer.attributes.get(key) for key in ("quant_scale", "quant_zero"))
                what: Any = (digests[name], *given)
            else:
                what = frozenset(
                    (key, value) for key, value in layer.attributes.items() if key not in _OWN
                )
            key = (
                layer.name,
                tuple(layer.operands),
                what,
                tuple(result.type for result in layer.results),
            )
            first = known.setdefault(key, layer)
            if first is layer:
                continue
            if isinstance(layer, top.TopOp) and not isinstance(layer, top.WeightOp):
                assert isinstance(first, top.TopOp)
                graph.absorb(first, layer)
                graph.fired(layer.layer_name, f'computes what "{first.layer_name}" computes')
            graph.replace(layer, *first.results)
