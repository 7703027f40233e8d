"""`top-recognize-activations`: activation functions spelled out in arithmetic become one operation.

    clip(x + 3, 0, 6) / 6                       ->   hard_sigmoid {alpha = 1/6, beta = 1/2}
    x * hard_sigmoid(x), x * clip(x + 3, 0, 6) / 6   ->   hard_swish
    x * sigmoid(x)                              ->   silu
    x * tanh(softplus(x))                       ->   mish
    x / 2 * (1 + erf(x / sqrt(2)))              ->   gelu
    (x - mean(x)) / sqrt(var(x) + e) * g + b    ->   layer_norm
    max(x, 0), min(x, 6), clip(clip(x))         ->   relu, clip
    1 / sqrt(x), x ** -0.5                      ->   rsqrt

Products are matched as sets of factors, whatever their order and wherever the constants stand.
Constants must agree to 1e-5 relative: exporters write 1/6 as 0.1666667.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isclose, sqrt

import numpy as np
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue
from xdsl.passes import ModulePass

from tilewright.dialects import top
from tilewright.transforms.top.graph import (
    Graph,
    clip_bounds,
    float32,
    has_clamp,
    is_float,
    shape_of,
)


def _close(value: float | None, wanted: float) -> bool:
    return value is not None and isclose(value, wanted, rel_tol=1e-5, abs_tol=1e-7)


def _with_constant(
    graph: Graph, value: SSAValue, kinds: Sequence[str]
) -> tuple[str, SSAValue, float] | None:
    """Match an operation of `kinds` with a constant number: kind, other operand, number.

    The constant is the second operand, or either one of a commutative operation.
    """
    op = value.owner
    if not isinstance(op, top.BinaryOp) or has_clamp(op) or not is_float(value):
        return None
    kind = op.name.removeprefix("top.")
    if kind not in kinds:
        return None
    pairs = [(op.a, op.b)]
    if kind in ("add", "mul", "min", "max"):
        pairs.append((op.b, op.a))
    for x, constant in pairs:
        number = graph.scalar(constant)
        if number is not None and shape_of(x) == shape_of(value):
            return kind, x, number
    return None


def _product(
    graph: Graph, value: SSAValue, factors: list[SSAValue], used: list[top.TopOp]
) -> float:
    """Take a product apart: constant factor returned, others appended to `factors`.

    Operations inside that have other users are factors themselves.
    """
    op = value.owner
    inside = not used or value.has_one_use()
    if inside and isinstance(op, top.BinaryOp):
        scaled = _with_constant(graph, value, ("mul", "div"))
        if scaled is not None and scaled[2] != 0:
            used.append(op)
            inner = _product(graph, scaled[1], factors, used)
            return inner * scaled[2] if scaled[0] == "mul" else inner / scaled[2]
        plain = isinstance(op, top.MulOp)
        if plain and shape_of(op.a) == shape_of(op.b) == shape_of(value):
            used.append(op)
            return _product(graph, op.a, factors, used) * _product(graph, op.b, factors, used)
    factors.append(value)
    return 1.0


def _gate(graph: Graph, value: SSAValue) -> tuple[SSAValue, float, float] | None:
    """Match `clamp(x + shift)` to [0, high]: x, shift, high."""
    op = value.owner
    bounds = clip_bounds(op) if isinstance(op, top.TopOp) else None
    if isinstance(op, top.TopOp) and bounds is not None:
        if bounds[0] != 0 or bounds[1] is None:
            return None
        added = _with_constant(graph, op.operands[0], ("add", "sub"))
        if added is None:
            return op.operands[0], 0.0, bounds[1]
        shift = added[2] if added[0] == "add" else -added[2]
        return added[1], shift, bounds[1]
    if isinstance(op, top.AddOp) and has_clamp(op):
        # The clip may already be the clamp of the sum.
        low, high = top.Attrs(op.attributes).number("clamp_min"), op.attrs.number("clamp_max")
        for x, constant in ((op.a, op.b), (op.b, op.a)):
            number = graph.scalar(constant)
            if number is not None and low == 0 and high is not None:
                return x, number, high
    return None


def _match_pair(
    graph: Graph, x: SSAValue, gate: SSAValue, factor: float
) -> tuple[type[top.TopOp], dict[str, object]] | None:
    """Match `factor * x * gate` as an activation of `x`."""
    op = gate.owner
    if isinstance(op, top.SigmoidOp) and op.x is x and _close(factor, 1):
        return top.SiluOp, {}
    if isinstance(op, top.HardSigmoidOp) and op.x is x and _close(factor, 1):
        right = _close(op.attrs.number("alpha"), 1 / 6) and _close(op.attrs.number("beta"), 0.5)
        return (top.HardSwishOp, {}) if right else None
    clamped = _gate(graph, gate)
    if clamped is not None:
        inner, shift, high = clamped
        right = inner is x and shift == 3 and high == 6 and _close(factor, 1 / 6)
        return (top.HardSwishOp, {}) if right else None
    if isinstance(op, top.TanhOp):
        soft = op.x.owner
        if isinstance(soft, top.UNARY_OPS["softplus"]) and soft.x is x and _close(factor, 1):
            return top.UNARY_OPS["mish"], {}
        return None
    raised = _with_constant(graph, gate, ("add",))
    if raised is not None and _close(raised[2], 1):
        erf = raised[1].owner
        if isinstance(erf, top.UNARY_OPS["erf"]) and _close(factor, 0.5):
            parts: list[SSAValue] = []
            inside = _product(graph, erf.x, parts, [])
            if parts == [x] and _close(inside, 1 / sqrt(2)):
                return top.GeluOp, {"approximate": "none"}
        if isinstance(erf, top.TanhOp) and _close(factor, 0.5) and _is_gelu_cubic(graph, erf.x, x):
            return top.GeluOp, {"approximate": "tanh"}
    return None


def _is_gelu_cubic(graph: Graph, value: SSAValue, x: SSAValue) -> bool:
    """Match `sqrt(2 / pi) * (x + 0.044715 * x^3)`."""
    factors: list[SSAValue] = []
    factor = _product(graph, value, factors, [])
    if len(factors) != 1 or not _close(factor, sqrt(2 / np.pi)):
        return False
    total = factors[0].owner
    if not isinstance(total, top.AddOp) or has_clamp(total):
        return False
    for first, second in ((total.a, total.b), (total.b, total.a)):
        if first is not x:
            continue
        parts: list[SSAValue] = []
        small = _product(graph, second, parts, [])
        cube = len(parts) == 3 and all(part is x for part in parts)
        if len(parts) == 1:
            power = _with_constant(graph, parts[0], ("pow",))
            cube = power is not None and power[1] is x and power[2] == 3
        if cube and _close(small, 0.044715):
            return True
    return False


def _replace(
    graph: Graph,
    op: top.TopOp,
    op_class: type[top.TopOp],
    operands: Sequence[SSAValue],
    attributes: dict[str, object],
    used: Sequence[top.TopOp] = (),
) -> bool:
    value = graph.insert(op_class, operands, attributes, name=op.layer_name, before=op)
    assert isinstance(value.owner, top.TopOp)
    graph.absorb(value.owner, op, *used)
    graph.fired(op.layer_name, f"is {value.owner.name.removeprefix('top.')}")
    graph.replace(op, value)
    return True


def _bounds(graph: Graph, op: top.TopOp) -> bool:
    """max(x, 0) and the like."""
    matched = _with_constant(graph, op.results[0], ("min", "max"))
    if matched is None:
        return False
    kind, x, number = matched
    if kind == "max" and number == 0:
        return _replace(graph, op, top.ReluOp, [x], {})
    return _replace(graph, op, top.ClipOp, [x], {"min" if kind == "max" else "max": number})


def _hard_sigmoid(graph: Graph, op: top.TopOp) -> bool:
    """clip(x + b, 0, h) * (1 / h)."""
    factors: list[SSAValue] = []
    used: list[top.TopOp] = []
    factor = _product(graph, op.results[0], factors, used)
    if len(factors) != 1 or not used:
        return False
    gate = _gate(graph, factors[0])
    if gate is None:
        return False
    x, shift, high = gate
    if not _close(factor * high, 1):
        return False
    attributes: dict[str, object] = {"alpha": float32(factor), "beta": float32(factor * shift)}
    return _replace(graph, op, top.HardSigmoidOp, [x], attributes, used)


def _gated(graph: Graph, op: top.TopOp) -> bool:
    """X * f(x), with constants anywhere."""
    if not isinstance(op, top.MulOp | top.DivOp):
        return False
    factors: list[SSAValue] = []
    used: list[top.TopOp] = []
    factor = _product(graph, op.results[0], factors, used)
    if len(factors) != 2:
        return False
    for x, gate in (factors, reversed(factors)):
        found = _match_pair(graph, x, gate, factor)
        if found is not None:
            return _replace(graph, op, found[0], [x], found[1], used)
    return False


def _reciprocal_root(graph: Graph, op: top.TopOp) -> bool:
    """1 / sqrt(x), x ** -1/2."""
    power = _with_constant(graph, op.results[0], ("pow",))
    if power is not None and power[2] == -0.5:
        return _replace(graph, op, top.UNARY_OPS["rsqrt"], [power[1]], {})
    if isinstance(op, top.DivOp):
        one = graph.uniform(op.a)
        if one != 1 or shape_of(op.b) != shape_of(op.result):
            return False
        root = op.b.owner
    elif isinstance(op, top.UNARY_OPS["reciprocal"]):
        root = op.x.owner
    else:
        return False
    if not isinstance(root, top.UNARY_OPS["sqrt"]):
        return False
    return _replace(graph, op, top.UNARY_OPS["rsqrt"], [root.x], {})


def _square(graph: Graph, value: SSAValue) -> SSAValue | None:
    """Match `d * d` or `d ** 2`: d."""
    op = value.owner
    if isinstance(op, top.MulOp) and op.a is op.b:
        return op.a
    power = _with_constant(graph, value, ("pow",))
    return power[1] if power is not None and power[2] == 2 else None


def _mean(value: SSAValue) -> tuple[SSAValue, tuple[int, ...]] | None:
    """Match a mean that keeps its axes: operand, axes."""
    op = value.owner
    if not isinstance(op, top.ReduceOp) or op.attrs.string("kind") != "mean":
        return None
    return (op.x, op.attrs.ints("axes")) if op.attrs.flag("keepdims") else None


def _root(graph: Graph, op: top.TopOp) -> tuple[SSAValue, SSAValue] | None:
    """Match `d / sqrt(v)` or `d * rsqrt(v)`: d, v."""
    if isinstance(op, top.DivOp) and isinstance(op.b.owner, top.UNARY_OPS["sqrt"]):
        return op.a, op.b.owner.x
    if isinstance(op, top.MulOp):
        for d, root in ((op.a, op.b), (op.b, op.a)):
            if isinstance(root.owner, top.UNARY_OPS["rsqrt"]):
                return d, root.owner.x
    return None


def _layer_norm(graph: Graph, op: top.TopOp) -> bool:
    """(x - mean) / sqrt(mean((x - mean) ** 2) + epsilon)."""
    rooted = _root(graph, op)
    if rooted is None:
        return False
    centred, spread = rooted
    raised = _with_constant(graph, spread, ("add",))
    variance = _mean(raised[1]) if raised is not None else None
    if raised is None or variance is None or _square(graph, variance[0]) is not centred:
        return False
    difference = centred.owner
    if not isinstance(difference, top.SubOp):
        return False
    mean = _mean(difference.b)
    x = difference.a
    if mean is None or mean[0] is not x or mean[1] != variance[1]:
        return False
    shape = shape_of(x)
    axes = mean[1]
    if not axes or list(axes) != list(range(axes[0], len(shape))):
        graph.refused(op.layer_name, f"a normalisation over axes {list(axes)}, not the last ones")
        return False
    tail = shape[axes[0] :]
    name = op.layer_name
    scale, bias, last, used = np.ones(tail, np.float32), None, op, [difference, op]
    scaled = _affine_user(graph, op, top.MulOp, tail)
    if scaled is not None:
        last, scale = scaled
        used.append(last)
    shifted = _affine_user(graph, last, top.AddOp, tail)
    if shifted is not None:
        last, bias = shifted
        used.append(last)
    operands = [
        x,
        graph.weight(f"{name}.scale", scale, last),
        graph.none(last) if bias is None else graph.weight(f"{name}.bias", bias, last),
    ]
    attributes: dict[str, object] = {"epsilon": float32(raised[2]), "axis": axes[0]}
    return _replace(graph, last, top.LayerNormOp, operands, attributes, used)


def _affine_user(
    graph: Graph, op: top.TopOp, kind: type[top.TopOp], tail: tuple[int, ...]
) -> tuple[top.TopOp, np.ndarray] | None:
    """Match the only user of `op`: `kind` with a constant that varies over the last axes only."""
    use = op.results[0].get_unique_use()
    if use is None or not isinstance(use.operation, kind) or has_clamp(use.operation):
        return None
    array = graph.array(use.operation.operands[1 - use.index])
    if (
        array is None
        or array.dtype != np.float32
        or use.operation.results[0].type != op.results[0].type
    ):
        return None
    shape = array.shape
    while len(shape) > len(tail) and shape[0] == 1:
        shape = shape[1:]
    if len(shape) > len(tail):
        return None
    return use.operation, np.ascontiguousarray(np.broadcast_to(array.reshape(shape), tail))


RULES: tuple[Callable[[Graph, top.TopOp], bool], ...] = (
    _bounds,
    _reciprocal_root,
    _layer_norm,
    _hard_sigmoid,
    _gated,
)


@dataclass(frozen=True)
class RecognizeActivationsPass(ModulePass):
    """Replace decomposed activation functions by the operation they are."""

    name = "top-recognize-activations"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Run the pass."""
        graph = Graph(ctx, op, self.name)
        for layer in graph.layers():
            for rule in RULES:
                if layer.parent is None or not is_float(layer.results[0]):
                    break
                if rule(graph, layer):
                    break
