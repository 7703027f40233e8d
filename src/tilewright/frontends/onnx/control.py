"""If, Loop and Scan whose course is known at compile time: the branch taken, the steps unrolled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tilewright.frontends.onnx.infer import Value, node_title
from tilewright.frontends.onnx.scope import Scope, constant, label_of
from tilewright.frontends.onnx.tensors import malformed

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

    from tilewright.frontends.onnx.graph import GraphWalker

STAGE = "import-onnx"
MAX_STEPS = 1024
"""Most steps a loop is unrolled to."""

Expander: TypeAlias = Callable[["GraphWalker", "NodeProto", list[Value], Scope, int], list[Value]]


def expand_if(
    walker: GraphWalker, node: NodeProto, inputs: list[Value], scope: Scope, depth: int
) -> list[Value]:
    """Take the branch of an `If` whose condition is known."""
    condition = inputs[0]
    if condition.constant is None or condition.size != 1:
        reason = "its condition is not known at compile time" if condition.known else ""
        return walker.refuse(node, inputs, scope, reason, condition.origins)
    wanted = "then_branch" if bool(condition.constant.reshape(-1)[0]) else "else_branch"
    graph = _graph(node, wanted)
    if len(graph.output) != len(node.output):
        raise malformed(f"{node_title(node)} and its {wanted} differ in outputs")
    first_record = len(walker.records)
    inner = Scope(scope.opsets, scope, scope.prefix)
    found = _run_body(walker, node, graph, inner, [], depth)
    walker.ctx.decide(label_of(node), STAGE, True, f"condition known: {wanted} taken")
    return _named(walker, node, found, first_record)


def expand_loop(
    walker: GraphWalker, node: NodeProto, inputs: list[Value], scope: Scope, depth: int
) -> list[Value]:
    """Unroll a `Loop` whose number of steps and condition are known."""
    if not all(value.known for value in inputs if value.name):
        return walker.refuse(node, inputs, scope, "")
    count, condition = inputs[0], inputs[1]
    for value, what in ((count, "number of steps"), (condition, "condition")):
        if value.name and (value.constant is None or value.size != 1):
            reason = f"the {what} of the loop is not known at compile time"
            return walker.refuse(node, inputs, scope, reason, value.origins)
    limit = int(count.constant.reshape(-1)[0]) if count.constant is not None else None
    goes_on = condition.constant is None or bool(condition.constant.reshape(-1)[0])
    body = _graph(node, "body")
    states = inputs[2:]
    if len(body.input) != len(states) + 2 or len(body.output) != len(node.output) + 1:
        raise malformed(f"{node_title(node)} and its body differ in inputs or outputs")
    first_record = len(walker.records)
    stacked: list[list[Value]] = [[] for _ in range(len(node.output) - len(states))]
    step = 0
    while goes_on and (limit is None or step < limit):
        if step >= MAX_STEPS:
            return walker.refuse(node, inputs, scope, f"more than {MAX_STEPS} steps to unroll")
        inner = _step_scope(node, scope, step)
        fixed = [_number(step), _truth(True)]
        found = _run_body(walker, node, body, inner, [*fixed, *states], depth)
        condition = found[0]
        if condition.constant is None:
            reason = "whether the loop goes on is not known at compile time"
            return walker.refuse(node, inputs, scope, reason if condition.known else "")
        goes_on = bool(condition.constant.reshape(-1)[0])
        states = found[1 : 1 + len(states)]
        for collected, value in zip(stacked, found[1 + len(states) :], strict=True):
            collected.append(value)
        step += 1
    if stacked and not step:
        return walker.refuse(
            node, inputs, scope, "a loop of no steps has results of no known shape"
        )
    results = list(states)
    results += [
        _stack(walker, node, values, 0, place, scope, depth) for place, values in enumerate(stacked)
    ]
    walker.ctx.decide(label_of(node), STAGE, True, f"unrolled to {step} steps")
    return _named(walker, node, results, first_record)


def expand_scan(
    walker: GraphWalker, node: NodeProto, inputs: list[Value], scope: Scope, depth: int
) -> list[Value]:
    """Unroll a `Scan` over the axis it walks along."""
    if scope.opsets.get("", 0) < 9:
        return walker.refuse(node, inputs, scope, "the form of operator set 8 is not supported")
    if not all(value.known for value in inputs):
        return walker.refuse(node, inputs, scope, "")
    lists = {item.name: [int(v) for v in item.ints] for item in node.attribute if item.ints}
    scans = next((int(a.i) for a in node.attribute if a.name == "num_scan_inputs"), 0)
    body = _graph(node, "body")
    held = len(inputs) - scans
    outs = len(node.output) - held
    if scans < 1 or held < 0 or outs < 0 or len(body.input) != len(inputs):
        raise malformed(f"{node_title(node)} and its body differ in inputs or outputs")
    if len(body.output) != len(node.output):
        raise malformed(f"{node_title(node)} and its body differ in outputs")
    axes = _option(node, lists, "scan_input_axes", scans)
    backward = _option(node, lists, "scan_input_directions", scans)
    out_axes = _option(node, lists, "scan_output_axes", outs)
    out_backward = _option(node, lists, "scan_output_directions", outs)
    sizes: set[int] = set()
    for value, axis in zip(inputs[held:], axes, strict=True):
        shape = value.shape or ()
        if not -len(shape) <= axis < len(shape):
            raise malformed(f"{node_title(node)} scans axis {axis} of {value.name!r}")
        sizes.add(shape[axis])
    if len(sizes) != 1:
        raise malformed(
            f"{node_title(node)} scans operands of different lengths", f"{sorted(sizes)}"
        )
    steps = sizes.pop()
    if not 1 <= steps <= MAX_STEPS:
        return walker.refuse(
            node, inputs, scope, f"{steps} steps to unroll; legal: 1 to {MAX_STEPS}"
        )
    first_record = len(walker.records)
    states = inputs[:held]
    stacked: list[list[Value]] = [[] for _ in range(outs)]
    for step in range(steps):
        inner = _step_scope(node, scope, step)
        parts = [
            _taken(walker, node, value, axis, steps - 1 - step if back else step, inner, depth)
            for value, axis, back in zip(inputs[held:], axes, backward, strict=True)
        ]
        found = _run_body(walker, node, body, inner, [*states, *parts], depth)
        states = found[:held]
        for collected, value in zip(stacked, found[held:], strict=True):
            collected.append(value)
    results = list(states)
    for place, values in enumerate(stacked):
        ordered = values[::-1] if out_backward[place] else values
        results.append(_stack(walker, node, ordered, out_axes[place], place, scope, depth))
    walker.ctx.decide(label_of(node), STAGE, True, f"unrolled to {steps} steps")
    return _named(walker, node, results, first_record)


CONTROL: dict[str, Expander] = {"If": expand_if, "Loop": expand_loop, "Scan": expand_scan}
"""Operators with inner graphs."""


def _graph(node: NodeProto, key: str) -> GraphProto:
    graph = next((a.g for a in node.attribute if a.name == key and a.HasField("g")), None)
    if graph is None:
        raise malformed(f"{node_title(node)} has no {key}")
    return graph


def _option(node: NodeProto, lists: dict[str, list[int]], key: str, count: int) -> list[int]:
    values = lists.get(key, [0] * count)
    if len(values) != count:
        raise malformed(f"{node_title(node)}: `{key}` has {len(values)} entries, needs {count}")
    return values


def _step_scope(node: NodeProto, scope: Scope, step: int) -> Scope:
    return Scope(scope.opsets, scope, f"{scope.prefix}{label_of(node)}/{step}/")


def _run_body(
    walker: GraphWalker,
    node: NodeProto,
    graph: GraphProto,
    inner: Scope,
    arguments: list[Value],
    depth: int,
) -> list[Value]:
    """Walk an inner graph in its scope; return the values of its outputs."""
    for info, value in zip(graph.input, arguments, strict=True):
        inner.define(info.name, value, "an input of an inner graph")
    walker.define_initializers(graph, inner, {info.name for info in graph.input})
    walker.walk(graph.node, inner, None, depth + 1)
    found: list[Value] = []
    for info in graph.output:
        value = inner.find(info.name)
        if value is None:
            raise malformed(f"{node_title(node)} gives out {info.name!r}, which nothing defines")
        if value.pending is not None:
            raise value.pending
        found.append(value)
    return found


def _named(
    walker: GraphWalker, node: NodeProto, values: list[Value], first_record: int
) -> list[Value]:
    """Give values made inside the names the node's outputs have outside."""
    made = {id(value) for record in walker.records[first_record:] for value in record.outputs}
    for name, value in zip(node.output, values, strict=True):
        if name and id(value) in made:
            value.name = name
    return values


def _number(value: int) -> Value:
    from onnx import TensorProto

    return constant(f"step {value}", np.array(value, np.int64), TensorProto.INT64)


def _truth(value: bool) -> Value:
    from onnx import TensorProto

    return constant("condition", np.array(value), TensorProto.BOOL)


def _taken(
    walker: GraphWalker,
    node: NodeProto,
    value: Value,
    axis: int,
    index: int,
    scope: Scope,
    depth: int,
) -> Value:
    """Return entry `index` of `value` along `axis`, without that axis."""
    from onnx import helper

    name = f"{value.name}[{index}]"
    gather = helper.make_node(
        "Gather", [value.name, "index"], [name], name=f"{label_of(node)}/part", axis=axis
    )
    return walker.outputs(gather, [value, _number(index)], scope, depth)[0]


def _stack(
    walker: GraphWalker,
    node: NodeProto,
    values: list[Value],
    axis: int,
    place: int,
    scope: Scope,
    depth: int,
) -> Value:
    """Join `values` along a new axis."""
    from onnx import TensorProto, helper

    label = label_of(node)
    if not all(value.known for value in values):
        return Value(f"{label}:{place}")
    rank = len(values[0].shape or ()) + 1
    axis = axis + rank if axis < 0 else axis
    if not 0 <= axis < rank:
        raise malformed(f"{label}: output axis {axis} is outside rank {rank}")
    rows: list[Value] = []
    for value in values:
        shape = list(value.shape or ())
        target = np.array([*shape[:axis], 1, *shape[axis:]], np.int64)
        reshape = helper.make_node(
            "Reshape", [value.name, "shape"], [f"{label}:{place}/row"], name=f"{label}/row"
        )
        operands = [value, constant("shape", target, TensorProto.INT64)]
        rows += walker.outputs(reshape, operands, scope, depth)
    concat = helper.make_node(
        "Concat", [row.name for row in rows], [f"{label}:{place}"], name=label, axis=axis
    )
    return walker.outputs(concat, rows, scope, depth)[0]
