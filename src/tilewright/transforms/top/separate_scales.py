"""`top-separate-scales`: a layer whose result is quantised in several ways is computed for each.

    %c = top.conv %x                         %c = top.conv %x       %d = top.conv %x
    quantize_linear (top.relu %c), %s   ->   ... (top.relu %c), %s
    quantize_linear (top.clip %c), %t                               ... (top.clip %d), %t

The chip gives a layer's result one scale, in one rounding; a second one made of the first would
round twice. Computing the layer again is exact. It is done for up to `most` ways, if nothing but
activations stands between the layer and its quantisers; a value read otherwise stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass

from tilewright.dialects import top
from tilewright.transforms.top.graph import Graph
from tilewright.transforms.top.qdq import Edge, edge_of

LAYERS = (top.ConvOp, top.LinearOp, top.AddOp)
ACTIVATIONS = (top.ReluOp, top.ClipOp)

Chain = tuple[Operation, ...]


@dataclass(frozen=True)
class SeparateScalesPass(ModulePass):
    """Compute a layer once for each scale its result is quantised with."""

    name = "top-separate-scales"

    most: int = 4
    """At most so many copies of a layer."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Run the pass."""
        graph = Graph(ctx, op, self.name)
        for layer in graph.layers():
            if not isinstance(layer, LAYERS):
                continue
            ways: dict[tuple[Chain, Edge], list[Operation]] = {}
            if not _collect(graph, layer.results[0], (), ways) or len(ways) < 2:
                continue
            name = layer.layer_name
            if len(ways) > self.most:
                graph.refused(name, f"its result is quantised in {len(ways)} ways")
                continue
            for (chain, _), quantisers in list(ways.items())[1:]:
                value = _copied(graph, layer, chain)
                for quantiser in quantisers:
                    quantiser.operands[0] = value
            for chain in {chain for chain, _ in ways}:
                for item in reversed(chain):
                    graph.remove(item)
            graph.fired(name, f"computed once for each of {len(ways)} ways it is quantised")


def _collect(
    graph: Graph, value: SSAValue, chain: Chain, ways: dict[tuple[Chain, Edge], list[Operation]]
) -> bool:
    """Gather the quantisers behind a value by activations and scale; False if others read it."""
    for use in value.uses:
        user = use.operation
        if isinstance(user, ACTIVATIONS):
            if not _collect(graph, user.results[0], (*chain, user), ways):
                return False
        elif isinstance(user, top.QuantizeLinearOp) and use.index == 0:
            edge = edge_of(graph, user)
            if isinstance(edge, str):
                return False
            ways.setdefault((chain, edge), []).append(user)
        else:
            return False
    return True


def _copied(graph: Graph, layer: top.TopOp, chain: Chain) -> SSAValue:
    """Insert a copy of a layer, and of the activations behind it; return what these give."""
    value: SSAValue | None = None
    for op in (layer, *chain):
        assert isinstance(op, top.TopOp)
        copy = op.clone()
        copy.attributes["name"] = StringAttr(graph.fresh(op.layer_name))
        if value is not None:
            copy.operands[0] = value
        graph.block.insert_op_after(copy, op if value is None else value.owner)  # pyright: ignore[reportArgumentType]
        value = copy.results[0]
    assert value is not None
    return value
