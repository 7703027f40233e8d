"""`top-normalize`: several spellings of one computation become one.

matmul(x, constant)                         ->   linear
avg_pool over the whole image               ->   reduce mean over the spatial axes, kept
reduce mean that drops the spatial axes     ->   the kept one, and a reshape
mean of a mean                              ->   one mean
reduce max over the spatial axes            ->   max_pool over the whole image
1-D convolution or pool                     ->   the 2-D one on images of height 1
x / c, x - c                                ->   x * (1 / c), x + (-c)
x ** 2, x ** 0.5                            ->   x * x, sqrt(x)
x + 0, x * 1                                ->   x
prelu of one slope                          ->   leaky_relu
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue
from xdsl.passes import ModulePass

from tilewright.dialects import top
from tilewright.transforms.top.graph import Graph, channel_axis, has_clamp, is_float, shape_of


def _swap(
    graph: Graph,
    op: top.TopOp,
    op_class: type[top.TopOp],
    operands: Sequence[SSAValue],
    attributes: dict[str, Any] | None = None,
    reason: str = "",
) -> bool:
    """Replace `op` by one operation of the same name."""
    value = graph.insert(op_class, operands, attributes, name=op.layer_name, before=op)
    assert isinstance(value.owner, top.TopOp)
    graph.absorb(value.owner, op)
    graph.fired(op.layer_name, reason)
    graph.replace(op, value)
    return True


def _linear(graph: Graph, op: top.TopOp) -> bool:
    if not isinstance(op, top.MatmulOp) or not is_float(op.result):
        return False
    array = graph.array(op.b)
    if array is None or array.ndim < 2 or len(shape_of(op.a)) < max(2, array.ndim):
        return False
    if any(dim != 1 for dim in array.shape[:-2]):
        graph.refused(op.layer_name, "a constant that differs from one batch to the next")
        return False
    assert isinstance(op.b.owner, top.WeightOp)
    turned = np.ascontiguousarray(array.reshape(array.shape[-2:]).T)
    w = graph.weight(op.b.owner.layer_name, turned, op)
    return _swap(graph, op, top.LinearOp, [op.a, w, graph.none(op)], reason="became linear")


def _spatial(op: top.TopOp) -> tuple[int, ...]:
    channels = channel_axis(op)
    return tuple(axis for axis in range(len(shape_of(op.operands[0]))) if axis not in (0, channels))


def _global_pool(graph: Graph, op: top.TopOp) -> bool:
    if not isinstance(op, top.AvgPoolOp):
        return False
    axes = _spatial(op)
    shape = shape_of(op.x)
    whole = op.attrs.ints("kernel") == tuple(shape[axis] for axis in axes)
    single = all(shape_of(op.result)[axis] == 1 for axis in axes)
    if not (whole and single) or any(op.attrs.ints("pads")):
        return False
    if any(step != 1 for step in op.attrs.ints("dilations")):
        return False
    attributes = {"kind": "mean", "axes": axes, "keepdims": True}
    return _swap(graph, op, top.ReduceOp, [op.x], attributes, "covers the whole image: is a mean")


def _kept_mean(graph: Graph, op: top.TopOp) -> bool:
    """Make a mean over the spatial axes of an image keep them; a reshape drops them."""
    if not isinstance(op, top.ReduceOp) or op.attrs.flag("keepdims"):
        return False
    if op.attrs.string("kind") not in ("mean", "max") or len(shape_of(op.x)) != 4:
        return False
    axes = op.attrs.ints("axes")
    if axes != (2, 3):
        return False
    kept = graph.insert(
        top.ReduceOp,
        [op.x],
        {"kind": op.attrs.string("kind"), "axes": axes, "keepdims": True},
        name=op.layer_name,
        before=op,
    )
    shape = shape_of(op.result)
    value = graph.insert(
        top.ReshapeOp, [kept], name=graph.fresh(f"{op.layer_name}/drop"), before=op, shape=shape
    )
    graph.fired(op.layer_name, "keeps its axes, a reshape drops them")
    graph.replace(op, value)
    return True


def _nested_mean(graph: Graph, op: top.TopOp) -> bool:
    if not isinstance(op, top.ReduceOp) or not op.attrs.flag("keepdims"):
        return False
    inner = op.x.owner
    kind = op.attrs.string("kind")
    if not isinstance(inner, top.ReduceOp) or not inner.attrs.flag("keepdims"):
        return False
    if not op.x.has_one_use():
        return False
    if kind not in ("mean", "sum", "max", "min") or inner.attrs.string("kind") != kind:
        return False
    axes = sorted({*op.attrs.ints("axes"), *inner.attrs.ints("axes")})
    attributes = {"kind": kind, "axes": axes, "keepdims": True}
    return _swap(graph, op, top.ReduceOp, [inner.x], attributes, "joined with the one before")


def _global_max(graph: Graph, op: top.TopOp) -> bool:
    if not isinstance(op, top.ReduceOp) or op.attrs.string("kind") != "max":
        return False
    shape = shape_of(op.x)
    if len(shape) != 4 or not op.attrs.flag("keepdims") or op.attrs.ints("axes") != (2, 3):
        return False
    attributes = {
        "kernel": shape[2:],
        "strides": [1, 1],
        "pads": [0, 0, 0, 0],
        "dilations": [1, 1],
        "ceil_mode": False,
    }
    return _swap(graph, op, top.MaxPoolOp, [op.x], attributes, "is a pool over the whole image")


_PER_AXIS = {"strides": 1, "dilations": 1, "output_pads": 0, "kernel": 1}
"""Attributes with one entry an axis, and the entry of the added one."""


def _two_dimensional(graph: Graph, op: top.TopOp) -> bool:
    kinds = (top.ConvOp, top.ConvTransposeOp, top.MaxPoolOp, top.AvgPoolOp)
    if not isinstance(op, kinds) or len(shape_of(op.operands[0])) != 3 or len(op.results) != 1:
        return False
    if op.attrs.string("layout", "nchw") != "nchw" or not is_float(op.results[0]):
        return False
    name, operands = op.layer_name, list(op.operands)

    def raised(value: SSAValue) -> list[int]:
        batch, channels, length = shape_of(value)
        return [batch, channels, 1, length]

    if len(operands) > 1:
        source = operands[1].owner
        array = graph.array(operands[1])
        if array is None or not isinstance(source, top.WeightOp):
            graph.refused(name, "its weights are not constants")
            return False
        operands[1] = graph.weight(source.layer_name, np.expand_dims(array, 2), op)
    operands[0] = graph.insert(
        top.ReshapeOp,
        [operands[0]],
        name=graph.fresh(f"{name}/raise"),
        before=op,
        shape=raised(operands[0]),
    )
    attributes: dict[str, Any] = {k: v for k, v in op.attributes.items() if k != "name"}
    for key, entry in _PER_AXIS.items():
        if key in attributes:
            attributes[key] = [entry, *op.attrs.ints(key)]
    begin, end = op.attrs.ints("pads")
    attributes["pads"] = [0, begin, 0, end]
    wide = graph.insert(type(op), operands, attributes, name=graph.fresh(f"{name}/2d"), before=op)
    value = graph.insert(top.ReshapeOp, [wide], name=name, before=op, shape=shape_of(op.results[0]))
    graph.fired(name, "one dimension: runs on images of height 1")
    graph.replace(op, value)
    return True


_ROUNDING = frozenset({"top.floor", "top.ceil", "top.round", "top.cast", "top.mod", "top.sign"})
_EXACT = (top.UnaryOp, top.BinaryOp, top.ReshapeOp, top.TransposeOp, top.ExpandOp, top.SliceOp)
"""Operations that hand an error in the last place on as it is."""


def _is_rounded(value: SSAValue) -> bool:
    """Return whether a value reaches a rounding or comparing operation through exact ones.

    `floor(49 / 49)` is 1, but `floor(49 * (1 / 49))` may be 0 in float32.
    """
    pending, seen = [value], {value}
    while pending:
        for use in pending.pop().uses:
            user = use.operation
            if user.name in _ROUNDING or isinstance(user, top.CompareOp):
                return True
            if isinstance(user, _EXACT) and user.results[0] not in seen:
                seen.add(user.results[0])
                pending.append(user.results[0])
    return False


def _arithmetic(graph: Graph, op: top.TopOp) -> bool:
    """Constants as second operands: no effect, or the simpler operation."""
    if not isinstance(op, top.BinaryOp) or has_clamp(op) or not is_float(op.result):
        return False
    kind = op.name.removeprefix("top.")
    pairs = [(op.a, op.b)] + ([(op.b, op.a)] if kind in ("add", "mul") else [])
    for x, constant in pairs:
        number = graph.uniform(constant)
        neutral = {"add": 0.0, "sub": 0.0, "mul": 1.0, "div": 1.0, "pow": 1.0}.get(kind)
        if number is not None and number == neutral and x.type == op.result.type:
            graph.fired(op.layer_name, f"{kind} with {number} changes nothing")
            graph.replace(op, x)
            return True
    array = graph.array(op.b)
    if array is None or graph.array(op.a) is not None:
        return False
    if kind == "pow" and op.a.type == op.result.type:
        number = graph.uniform(op.b)
        if number == 2:
            return _swap(graph, op, top.MulOp, [op.a, op.a], reason="is a product")
        if number == 0.5:
            return _swap(graph, op, top.UNARY_OPS["sqrt"], [op.a], reason="is a square root")
        return False
    assert isinstance(op.b.owner, top.WeightOp)
    name = op.b.owner.layer_name
    if kind == "sub":
        return _swap(graph, op, top.AddOp, [op.a, graph.weight(name, -array, op)], reason="is add")
    if kind == "div" and not (array == 0).any():
        if _is_rounded(op.result):
            graph.refused(op.layer_name, "its result is rounded: a product could miss a multiple")
            return False
        with np.errstate(over="ignore"):
            inverse = (1 / np.asarray(array, np.float64)).astype(array.dtype)
        if np.isfinite(inverse).all() and (inverse != 0).all():
            constant = graph.weight(name, inverse, op)
            return _swap(graph, op, top.MulOp, [op.a, constant], reason="is a product")
    return False


def _leaky(graph: Graph, op: top.TopOp) -> bool:
    if not isinstance(op, top.PreluOp):
        return False
    slope = graph.uniform(op.slope)
    if slope is None:
        return False
    return _swap(graph, op, top.UNARY_OPS["leaky_relu"], [op.x], {"alpha": slope}, "has one slope")


RULES: tuple[Callable[[Graph, top.TopOp], bool], ...] = (
    _linear,
    _two_dimensional,
    _global_pool,
    _kept_mean,
    _nested_mean,
    _global_max,
    _arithmetic,
    _leaky,
)


@dataclass(frozen=True)
class NormalizePass(ModulePass):
    """Bring computations into the one form that later passes know."""

    name = "top-normalize"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Run the pass."""
        graph = Graph(ctx, op, self.name)
        changed = True
        while changed:
            changed = False
            for layer in graph.layers():
                for rule in RULES:
                    if layer.parent is None:
                        break
                    changed = rule(graph, layer) or changed
