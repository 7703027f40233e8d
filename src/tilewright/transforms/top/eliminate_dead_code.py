"""`top-eliminate-dead-code`: operations without users, and their constants, are removed.

Function arguments stay: they are the model's interface. Constants that no string in the module
names any more leave the store.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ArrayAttr, ModuleOp, StringAttr
from xdsl.passes import ModulePass
from xdsl.traits import is_side_effect_free

from tilewright.dialects import top
from tilewright.transforms.top.graph import Graph


@dataclass(frozen=True)
class EliminateDeadCodePass(ModulePass):
    """Remove operations whose results nothing uses."""

    name = "top-eliminate-dead-code"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Run the pass."""
        graph = Graph(ctx, op, self.name)
        # Users come after what they use, so one backward walk finds everything.
        for layer in reversed(list(graph.block.ops)):
            if any(result.first_use for result in layer.results) or not layer.results:
                continue
            if not is_side_effect_free(layer):
                continue
            if isinstance(layer, top.TopOp) and not isinstance(layer, top.WeightOp):
                graph.fired(layer.layer_name, "nothing uses its result")
            layer.detach()
            layer.erase()
        graph.weights.keep_only(_mentioned(op))


def _mentioned(module: ModuleOp) -> set[str]:
    """Return all strings in attributes: constants may be named there too (tables, scales)."""
    names: set[str] = set()
    for op in module.walk():
        pending = list(op.attributes.values())
        while pending:
            value = pending.pop()
            if isinstance(value, StringAttr):
                names.add(value.data)
            elif isinstance(value, ArrayAttr):
                pending += list(value)
    return names
