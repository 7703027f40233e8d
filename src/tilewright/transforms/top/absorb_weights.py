"""`top-absorb-weights`: dequantised constants become float weights with given scales.

    %w = top.dequantize_linear %codes, %scale, %zero
    %y = top.conv %x, %w, %b           ->    %y = top.conv %x, %w', %b' {weight_scale = "c.scale"}

Exact: the weights of output channel `o` are `(code - zero) * scale[o]`, so `round(w / scale[o])`
gives the same integers back. Codes of an int32 bias are kept beside it (`bias_codes`,
`bias_scale`), since float32 has 24 bits. A constant matrix makes a product a linear layer, as
`top-normalize` does for floats, and a vector that is added behind it becomes its bias.

Weights are codes -128..127 without a zero point. What `code - zero` does not fit (-255..255) is
split in two or three parts that do, side by side along the input channels, with the input repeated:

    w . x  =  [w1 w2] . [x x]     with w = w1 + w2, and one sum, one rounding

A grouped convolution cannot be split so, and scales that differ inside an output channel have no
integer form: these stay exact, in float on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from xdsl.context import Context
from xdsl.dialects.builtin import IntegerAttr, ModuleOp, i32
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass

from tilewright.dialects import top
from tilewright.ir.weights import Array
from tilewright.transforms.top.graph import Graph, element_of, shape_of
from tilewright.transforms.top.qdq import Codes, constant_codes, quantise_constant, spread

LEAST, MOST = -128, 127
"""Codes a weight may have."""

FOUR_BITS = 7
"""Largest code of weights of 4 bits; the least is its negative."""

ROOM = 2**30 - 2**20
"""Bias and zero-point term of an accumulator stay below; see `quantise_channels`."""


@dataclass(frozen=True)
class AbsorbWeightsPass(ModulePass):
    """Give layers the codes of their constant weights.

    Requires: the graph as imported. Ensures: no Q works on constants, and no layer reads
    dequantised constants.
    """

    name = "top-absorb-weights"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Run the pass."""
        graph = Graph(ctx, op, self.name)
        for layer in graph.layers():
            if isinstance(layer, top.QuantizeLinearOp):
                _evaluate(graph, layer)
        for layer in graph.layers():
            if isinstance(layer, top.ConvOp | top.LinearOp | top.MatmulOp):
                _absorb(graph, layer)


def _evaluate(graph: Graph, op: top.QuantizeLinearOp) -> None:
    """Replace a quantiser of a constant by its codes."""
    x, scale, zero = (graph.array(value) for value in op.operands)
    if x is None or scale is None or zero is None:
        return
    shape = tuple(x.shape)
    dtype = top.numpy_dtype(element_of(op.results[0]))
    codes = quantise_constant(x, spread(scale, op, shape), spread(zero, op, shape), dtype)
    graph.fired(op.layer_name, "quantises a constant: evaluated")
    graph.replace(op, graph.weight(op.layer_name, codes, op))


def _absorb(graph: Graph, op: top.TopOp) -> None:
    """Take the weights of one layer, if they are dequantised constants."""
    found = constant_codes(graph, op.operands[1])
    if found is None:
        return
    if isinstance(op, top.MatmulOp):
        if found.codes.ndim < 2 or any(dim != 1 for dim in found.codes.shape[:-2]):
            return
        if len(shape_of(op.operands[0])) < max(2, found.codes.ndim):
            return
        found = Codes(*(a.reshape(a.shape[-2:]).T for a in (found.codes, found.scale, found.zero)))
        op = _linear(graph, op, found)
    elif isinstance(op, top.LinearOp | top.ConvOp):
        _set(graph, op, 1, found.real, "weights")
    bias = _bias(graph, op)
    name = op.layer_name
    steps, channels = found.steps, found.codes.shape[0]
    scales = found.scale.reshape(channels, -1).astype(np.float64)
    reason = _exact_reason(op, steps, scales, bias)
    if reason is not None:
        graph.set(op, host=reason)
        graph.refused(name, reason)
        return
    if steps.size and (steps.min() < LEAST or steps.max() > MOST):
        op = _split(graph, op, steps, found)
    if steps.size and np.abs(steps).max() <= FOUR_BITS:
        op.attributes["weight_bits"] = IntegerAttr(4, i32)
    graph.set(op, weight_scale=graph.weights.add(f"{name}.given_scale", scales[:, 0].copy()))
    if bias is not None:
        graph.set(
            op,
            bias_codes=graph.weights.add(f"{name}.bias_codes", bias.steps),
            bias_scale=graph.weights.add(f"{name}.bias_scale", bias.scale.astype(np.float64)),
        )
    graph.fired(name, f"takes the model's own codes of its weights, {channels} channels")


def _set(graph: Graph, op: top.TopOp, index: int, array: Array, label: str) -> None:
    """Make operand `index` a constant."""
    old = op.operands[index].owner
    op.operands[index] = graph.weight(f"{op.layer_name}.{label}", np.ascontiguousarray(array), op)
    if isinstance(old, Operation):
        graph.remove(old)


def _linear(graph: Graph, op: top.MatmulOp, found: Codes) -> top.TopOp:
    """Replace a product with a constant matrix by a linear layer."""
    weights = graph.weight(f"{op.layer_name}.weights", np.ascontiguousarray(found.real), op)
    value = graph.insert(
        top.LinearOp, [op.a, weights, graph.none(op)], name=op.layer_name, before=op
    )
    assert isinstance(value.owner, top.TopOp)
    graph.absorb(value.owner, op)
    graph.replace(op, value)
    return value.owner


def _bias(graph: Graph, op: top.TopOp) -> Codes | None:
    """Make a dequantised bias a constant and return its codes.

    A linear layer without one takes a vector that is added to its result.
    """
    if top.is_absent(op.operands[2]) and isinstance(op, top.LinearOp):
        _take_sum(graph, op)
    codes = constant_codes(graph, op.operands[2])
    if codes is not None:
        _set(graph, op, 2, codes.real, "bias")
    return codes


def _take_sum(graph: Graph, op: top.TopOp) -> None:
    use = op.results[0].get_unique_use()
    if use is None or not isinstance(use.operation, top.AddOp):
        return
    add = use.operation
    other = add.operands[1 - use.index]
    channels = shape_of(op.results[0])[-1]
    vector = shape_of(other)
    constant = graph.array(other) is not None or constant_codes(graph, other) is not None
    fits = vector[-1:] == (channels,) and all(dim == 1 for dim in vector[:-1])
    if not constant or not fits or add.results[0].type != op.results[0].type:
        return
    if len(vector) > 1:
        other = graph.insert(
            top.ReshapeOp, [other], name=graph.fresh(f"{op.layer_name}/bias"), before=op,
            shape=[channels],
        )  # fmt: skip
    else:
        _hoist(other, op)
    op.operands[2] = other
    if op.layer_name.startswith(f"{add.layer_name}/"):
        # Both are one node of the user's.
        op.attributes["name"] = add.attributes["name"]
    else:
        graph.absorb(op, add)
    for key in ("clamp_min", "clamp_max"):
        if key in add.attributes:
            op.attributes[key] = add.attributes[key]
    graph.fired(add.layer_name, "its constant is the bias of the product before it")
    graph.replace(add, op.results[0])


def _hoist(value: SSAValue, before: Operation) -> None:
    """Move what computes a constant in front of an operation (it depends on constants only)."""
    owner = value.owner
    assert isinstance(owner, Operation)
    for operand in owner.operands:
        _hoist(operand, before)
    owner.detach()
    block = before.parent_block()
    assert block is not None
    block.insert_op_before(owner, before)


def _exact_reason(op: top.TopOp, steps: Array, scales: Array, bias: Codes | None) -> str | None:
    """Return why the layer has no exact integer form; None if it has one."""
    if scales.size and (scales != scales[:, :1]).any():
        return "its weights have several scales inside an output channel"
    if not np.isfinite(scales).all() or (scales < 2.0**-126).any() or not scales.size:
        return "a scale of its weights is not a positive normal number"
    grouped = isinstance(op, top.ConvOp) and op.attrs.integer("group") != 1
    if grouped and (steps.min() < LEAST or steps.max() > MOST):
        return "the codes of its weights, zero point taken off, exceed 8 bits"
    rows = np.abs(steps).reshape(steps.shape[0], -1).sum(axis=1, dtype=np.int64) * 128
    if bias is not None:
        rows = rows + np.abs(bias.steps).reshape(-1)
    if (rows >= ROOM).any():
        return "its sums, bias included, could exceed 32 bits"
    return None


def _split(graph: Graph, op: top.TopOp, steps: Array, found: Codes) -> top.TopOp:
    """Write weights beyond 8 bits as a sum of parts over the repeated input."""
    parts: list[Array] = []
    rest = steps
    while not parts or rest.any():
        parts.append(np.clip(rest, LEAST, MOST))
        rest = rest - parts[-1]
    scale = found.scale.reshape(found.scale.shape[0], -1)[:, 0].astype(np.float32)
    wide = np.concatenate(parts, axis=1).astype(np.float32)
    wide *= scale.reshape(-1, *[1] * (wide.ndim - 1))
    axis = 1 if isinstance(op, top.ConvOp) else len(shape_of(op.operands[0])) - 1
    repeated = graph.insert(
        top.ConcatOp,
        [op.operands[0]] * len(parts),
        {"axis": axis},
        name=graph.fresh(f"{op.layer_name}/repeat"),
        before=op,
    )
    op.operands[0] = repeated
    _set(graph, op, 1, wide, "weights")
    graph.fired(
        op.layer_name,
        f"codes beyond 8 bits (zero points of the weights) in {len(parts)} parts side by side",
    )
    return op
