"""`top-absorb-qdq`: quantise-dequantise pairs become the scales of what they stand behind.

    %y = top.conv %x, %w, %b           ->   %y = top.conv %x, %w, %b
    %q = top.quantize_linear %y, %s, %z         {quant_scale = 0.02 : f64, quant_zero = 3 : i32}
    %d = top.dequantize_linear %q, %s, %z   (users of %d read %y)

It runs after activations were fused: a ReLU before the quantiser has become the clamp of the layer,
which the quantised graph keeps as bounds of codes, so that it is dropped only where the lowest code
is real zero anyway. uint8 codes are int8 codes plus 128, scale and real value unchanged.

- One value, one scale. A value that is quantised with two scales keeps its Q and DQ, which run on
  the host.
- A DQ that is quantised again with another scale (a requantisation) becomes a `top.clip` without
  bounds that carries the new scale: a table of 256 codes on the chip.
- Q and DQ at the model's integer inputs and outputs stay: the host executes them, exactly.
- Operations that only move codes (a max pool, a reshape between Q and DQ) move values instead.
- Constants keep their codes the same way (`quant_scale` on `top.weight`).
- What the chip has no codes for (16 bits, scales computed at run time, a scale for each channel of
  an activation) stays as it is, with the reason. `wide` is "drop" when there is calibration data:
  then pairs of 16 bits are left out, and the value gets an 8-bit range of its own. Their saturation
  stays, as a clamp: exporters leave out a ReLU or Clip whose bounds are those of the codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from xdsl.context import Context
from xdsl.dialects.builtin import ArrayAttr, FloatAttr, IntegerAttr, ModuleOp, f64, i32
from xdsl.dialects.func import ReturnOp
from xdsl.ir import BlockArgument, Operation, OpResult, SSAValue
from xdsl.passes import ModulePass

from tilewright.diagnostics import UsageError
from tilewright.dialects import top
from tilewright.transforms.top.fuse_activation import CLAMPED
from tilewright.transforms.top.graph import (
    Graph,
    clamp_of,
    clip_bounds,
    compose_clamps,
    element_of,
)
from tilewright.transforms.top.lift_movers import lift_movers
from tilewright.transforms.top.qdq import Edge, constant_codes, edge_of, given_edge

WIDE = ("keep", "drop")

LAYOUT = (top.ReshapeOp, top.TransposeOp)


@dataclass(frozen=True)
class AbsorbQdqPass(ModulePass):
    """Turn Q/DQ pairs on activations into given scales.

    Requires: activations fused, `top-absorb-weights` done. Ensures: the Q and DQ that are left run
    on the host, and the log says why.
    """

    name = "top-absorb-qdq"

    wide: str = "keep"
    """`keep` pairs of 16 bits on the host, or `drop` them."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Run the pass.

        Raises:
            UsageError: E0702, `wide` has another value.
        """
        if self.wide not in WIDE:
            raise UsageError("E0702", f"wide is `{self.wide}`; legal are {', '.join(WIDE)}")
        graph = Graph(ctx, op, self.name)
        kinds = (top.QuantizeLinearOp, top.DequantizeLinearOp)
        if not any(isinstance(layer, kinds) for layer in graph.layers()):
            return
        run = _Absorption(graph)
        lift_movers(graph)
        run.constants()
        if self.wide == "drop":
            run.drop_wide()
        run.requantisations()
        run.quantisers()
        run.dequantisers()
        run.repeats()
        run.explain()
        run.arguments()


class _Absorption:
    """One run of the pass."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.args: dict[int, Edge] = {}
        """Scales of function arguments, by index."""
        self._read_arguments()

    # Constants

    def constants(self) -> None:
        """Fold dequantised constants that no layer took as weights."""
        graph = self.graph
        for op in graph.layers():
            if not isinstance(op, top.DequantizeLinearOp):
                continue
            found = constant_codes(graph, op.results[0])
            if found is None:
                continue
            value = graph.weight(op.layer_name, found.real, op)
            edge = edge_of(graph, op)
            if isinstance(edge, Edge):
                assert isinstance(value.owner, Operation)
                value.owner.attributes.update(edge.attributes())
            graph.fired(op.layer_name, "dequantises a constant")
            graph.replace(op, value)

    # 16 bits

    def drop_wide(self) -> None:
        """Leave out pairs of 16-bit codes; where they saturate, the value still does."""
        graph = self.graph
        for op in graph.layers():
            if not isinstance(op, top.QuantizeLinearOp) or _bits(op.results[0]) <= 8:
                continue
            pairs = self._pairs(op)
            ends = _ends(graph, op)
            if not pairs or ends is None:
                continue
            value = self._saturated(op, *ends)
            for pair in pairs:
                graph.fired(
                    op.layer_name,
                    "16-bit codes are replaced by 8-bit ones of a calibrated range",
                    warning=f"`{op.layer_name}`: the model asks for 16-bit activations; "
                    "they get 8 bits, with calibrated ranges",
                )
                graph.replace(pair, value)
            if op.parent is not None and op.results[0].first_use is None:
                graph.remove(op)

    def _saturated(self, q: top.QuantizeLinearOp, low: float, high: float) -> SSAValue:
        """Return what `q` reads, clamped to the ends of its codes."""
        graph, x = self.graph, q.x
        least, most = _bounds(x)
        # What the value exceeds its codes by less than a step is within their rounding.
        step = (high - low) / ((1 << _bits(q.results[0])) - 1)
        if least >= low - step and most <= high + step:
            return x
        owner = x.owner
        if isinstance(owner, CLAMPED) and x.has_one_use() and given_edge(owner) is None:
            least, most = compose_clamps(clamp_of(owner), (low, high))
            graph.set(owner, clamp_min=least, clamp_max=most)
            graph.fired(q.layer_name, f'its saturation is the clamp of "{owner.layer_name}"')
            return x
        graph.fired(q.layer_name, "its saturation is a clip")
        return graph.insert(
            top.ClipOp,
            [x],
            {"min": low, "max": high},
            name=graph.fresh(f"{q.layer_name}/saturate"),
            before=q,
        )

    # Activations

    def requantisations(self) -> None:
        """Put a carrier of the new scale between a DQ and a Q of another scale."""
        graph = self.graph
        for op in graph.layers():
            if not isinstance(op, top.DequantizeLinearOp):
                continue
            own = edge_of(graph, op)
            carriers: dict[Edge, SSAValue] = {}
            for use in list(op.results[0].uses):
                quantiser = use.operation
                if not isinstance(quantiser, top.QuantizeLinearOp) or use.index != 0:
                    continue
                edge = edge_of(graph, quantiser)
                if isinstance(own, str) or isinstance(edge, str) or edge == own:
                    continue
                if edge not in carriers:
                    carriers[edge] = self._carrier(op.results[0], edge, quantiser)
                quantiser.operands[0] = carriers[edge]

    def _carrier(self, value: SSAValue, edge: Edge, before: Operation) -> SSAValue:
        """Insert an operation that changes nothing but the scale."""
        assert isinstance(before, top.TopOp)
        carrier = self.graph.insert(
            top.ClipOp, [value], name=self.graph.fresh(f"{before.layer_name}/requantize"),
            before=before,
        )  # fmt: skip
        assert isinstance(carrier.owner, Operation)
        carrier.owner.attributes.update(edge.attributes())
        return carrier

    def quantisers(self) -> None:
        """Give values the scale of the quantiser behind them."""
        graph = self.graph
        seen: set[SSAValue] = set()
        for op in graph.layers():
            if not isinstance(op, top.QuantizeLinearOp) or op.x in seen:
                continue
            seen.add(op.x)
            self._value(op.x)

    def _value(self, x: SSAValue) -> None:
        graph = self.graph
        users = [use.operation for use in x.uses if use.index == 0]
        quantisers = [user for user in users if isinstance(user, top.QuantizeLinearOp)]
        edges = {edge for q in quantisers if isinstance(edge := edge_of(graph, q), Edge)}
        if not edges:
            return
        first = next(q for q in quantisers if isinstance(edge_of(graph, q), Edge))
        if len(edges) > 1:
            for q in quantisers:
                graph.refused(q.layer_name, "the value is quantised with several scales")
            return
        edge = edges.pop()
        carrying = self._give(x, edge, first)
        if carrying is None:
            return
        others = [user for user in users if not isinstance(user, top.QuantizeLinearOp)]
        if others:
            named = ", ".join(
                f'"{user.layer_name}"' if isinstance(user, top.TopOp) else "an output"
                for user in others
            )
            graph.fired(first.layer_name, f"{named} read the value as its codes give it")
        for q in quantisers:
            if not isinstance(edge_of(graph, q), Edge):
                continue
            q.operands[0] = carrying
            for pair in self._pairs(q):
                graph.replace(pair, carrying)
            if q.parent is not None and q.results[0].first_use is None:
                scale = f"{edge.scale:.6g}:{edge.zero}"
                graph.fired(q.layer_name, f"is the scale {scale} of what it reads")
                graph.remove(q)

    def _pairs(self, q: top.QuantizeLinearOp) -> list[top.DequantizeLinearOp]:
        """Return the DQs that undo a quantiser: the same scale and zero point."""
        found: list[top.DequantizeLinearOp] = []
        for use in list(q.results[0].uses):
            dq = use.operation
            if isinstance(dq, top.DequantizeLinearOp) and use.index == 0 and self._undoes(dq, q):
                found.append(dq)
        return found

    def _undoes(self, dq: top.DequantizeLinearOp, q: top.QuantizeLinearOp) -> bool:
        if dq.results[0].type != q.x.type:
            return False
        keys = ("axis", "block_size")
        if any(dq.attributes.get(key) != q.attributes.get(key) for key in keys):
            return False
        for mine, theirs in zip(dq.operands[1:], q.operands[1:], strict=True):
            a, b = self.graph.array(mine), self.graph.array(theirs)
            if top.is_absent(mine) and b is not None:
                a = np.zeros_like(b)
            if a is None or b is None or not np.array_equal(a, b):
                return False
        return True

    def _give(self, x: SSAValue, edge: Edge, before: top.TopOp) -> SSAValue | None:
        """Give the value a scale; return the value that has it, None if there can be none."""
        graph = self.graph
        known = self._known(x)
        if known is not None:
            if known != edge:
                graph.refused(before.layer_name, "the value has another scale already")
            return x if known == edge else None
        if isinstance(x, BlockArgument):
            self.args[x.index] = edge
            return x
        assert isinstance(x, OpResult)
        op = x.owner
        if x.index != 0 or isinstance(op, top.WeightOp | top.DequantizeLinearOp):
            graph.refused(before.layer_name, "it quantises a result that cannot carry a scale")
            return None
        if isinstance(op, LAYOUT):
            # The elements are those of the operand, and so is their scale.
            source = op.operands[0]
            if self._known(source) == edge:
                return x
            if self._known(source) is None and source.has_one_use():
                return x if self._give(source, edge, before) is not None else None
            return self._carrier(x, edge, before)
        op.attributes.update(edge.attributes())
        return x

    def _known(self, x: SSAValue) -> Edge | None:
        """Return the scale a value has already."""
        while True:
            if isinstance(x, BlockArgument):
                return self.args.get(x.index)
            assert isinstance(x, OpResult)
            op = x.owner
            if isinstance(op, top.DequantizeLinearOp):
                edge = edge_of(self.graph, op)
                return edge if isinstance(edge, Edge) else None
            if x.index == 0 and (known := given_edge(op)) is not None:
                return known
            if not isinstance(op, LAYOUT):
                return None
            x = op.operands[0]

    def dequantisers(self) -> None:
        """Say what scale the floats have that the remaining DQs make."""
        for op in self.graph.layers():
            if isinstance(op, top.DequantizeLinearOp) and given_edge(op) is None:
                edge = edge_of(self.graph, op)
                if isinstance(edge, Edge):
                    op.attributes.update(edge.attributes())

    def repeats(self) -> None:
        """Give a value beside itself (see `top-absorb-weights`) the value's scale."""
        for op in self.graph.layers():
            if isinstance(op, top.ConcatOp) and len(set(op.operands)) == 1:
                edge = self._known(op.operands[0])
                if edge is not None and given_edge(op) is None:
                    op.attributes.update(edge.attributes())

    def explain(self) -> None:
        """Record why Q and DQ are left."""
        graph = self.graph
        for op in graph.layers():
            if not isinstance(op, top.QuantizeLinearOp | top.DequantizeLinearOp):
                continue
            edge = edge_of(graph, op)
            if isinstance(edge, str):
                graph.set(op, host=edge)
                graph.refused(op.layer_name, edge)
            elif isinstance(op, top.QuantizeLinearOp):
                outputs = any(isinstance(use.operation, ReturnOp) for use in op.results[0].uses)
                reason = "codes are an output of the model" if outputs else "its codes are read"
                graph.set(op, host=reason)
            else:
                graph.set(op, host="codes that the model's input or the host gives")

    # Arguments

    def _read_arguments(self) -> None:
        function = self.graph.function
        scales = function.attributes.get("arg_quant_scales")
        zeros = function.attributes.get("arg_quant_zeros")
        if isinstance(scales, ArrayAttr) and isinstance(zeros, ArrayAttr):
            for index, (scale, zero) in enumerate(zip(scales, zeros, strict=True)):
                assert isinstance(scale, FloatAttr)
                assert isinstance(zero, IntegerAttr)
                if scale.value.data > 0:
                    self.args[index] = Edge(scale.value.data, zero.value.data)

    def arguments(self) -> None:
        """Write the scales of arguments."""
        if not self.args:
            return
        none = Edge(0.0, 0)
        edges = [self.args.get(index, none) for index in range(len(self.graph.block.args))]
        attributes = self.graph.function.attributes
        attributes["arg_quant_scales"] = ArrayAttr([FloatAttr(e.scale, f64) for e in edges])
        attributes["arg_quant_zeros"] = ArrayAttr([IntegerAttr(e.zero, i32) for e in edges])


def _bits(value: SSAValue) -> int:
    return 8 * top.numpy_dtype(element_of(value)).itemsize


def _ends(graph: Graph, q: top.QuantizeLinearOp) -> tuple[float, float] | None:
    """Return the real values (float32) of the least and greatest code; None for several scales."""
    scale, zero = graph.array(q.scale), graph.array(q.zero)
    if scale is None or zero is None or scale.ndim:
        return None
    info = np.iinfo(top.numpy_dtype(element_of(q.results[0])))
    step, offset = np.float32(scale), int(zero.reshape(-1)[0])
    low, high = (float(np.float32(code - offset) * step) for code in (info.min, info.max))
    return (low, high) if np.isfinite([low, high]).all() and low < high else None


def _bounds(x: SSAValue) -> tuple[float, float]:
    """Return bounds of a value that follow from what computes it."""
    while isinstance(x.owner, LAYOUT):
        x = x.owner.operands[0]
    op = x.owner
    if isinstance(op, top.SoftmaxOp | top.SigmoidOp):
        return 0.0, 1.0
    least, most = None, None
    if isinstance(op, Operation):
        least, most = clip_bounds(op) or clamp_of(op)
    return -np.inf if least is None else least, np.inf if most is None else most
