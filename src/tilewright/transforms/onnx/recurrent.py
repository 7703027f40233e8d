"""RNN, GRU and LSTM, unrolled over time.

The input products of all steps are one matrix product with both biases in it; each step adds the
product of its state::

    gates(t) = (x @ W^T + b)[t] + h(t-1) @ R^T

`Y[t]` belongs to the step that read `x[t]`, in both directions. Where an entry of the batch is
shorter than the tensor its state stays as it was and its row of `Y` is 0, so that the backward half
of a short entry begins at its own last step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from xdsl.dialects.builtin import TensorType
from xdsl.ir import SSAValue

from tilewright.dialects import top
from tilewright.ir.weights import Array
from tilewright.transforms.onnx.base import Node, RefusedError, element, rule, shape_of

MAX_STEPS = 512
"""Steps (times directions) that are unrolled."""

PLAIN = {
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "relu": "relu",
    "softsign": "softsign",
    "softplus": "softplus",
}
"""Activations without parameters, and the `top` op."""

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
DEFAULTS = {
    "RNN": ["Tanh"],
    "GRU": ["Sigmoid", "Tanh"],
    "LSTM": ["Sigmoid", "Tanh", "Tanh"],
}

Activation = Callable[[SSAValue], SSAValue]


@dataclass
class Direction:
    """One direction of a node: its constants, and functions for its gates."""

    input_weights: Array
    """[gates * hidden, input]"""
    state_weights: Array
    """[gates * hidden, hidden]"""
    input_bias: Array
    state_bias: Array
    peepholes: Array | None
    """[3 * hidden] for input, output and forget gate."""
    activations: list[Activation]
    reverse: bool


@dataclass
class Shape:
    """Sizes of a node."""

    steps: int
    batch: int
    hidden: int
    gates: int


@rule("RNN", "GRU", "LSTM")
def _recurrent(node: Node) -> list[SSAValue | None]:
    batch_first = bool(node.integer("layout", 0))
    if node.has("clip"):
        raise RefusedError("`clip` is not supported")
    node.must_be("input_forget", 0, [0], "coupled gates are not supported")
    x = node.operand(0)
    if batch_first and len(shape_of(x)) == 3:
        x = node.emit("transpose", [x], {"perm": [1, 0, 2]})
    weights = node.needs_constant(1, "the weights `W`")
    recurrence = node.needs_constant(2, "the weights `R`")
    count = GATES[node.op_type]
    if len(shape_of(x)) != 3 or weights.ndim != 3 or recurrence.ndim != 3:
        raise RefusedError("`X`, `W` and `R` must be of rank 3")
    steps, batch, _ = shape_of(x)
    hidden = recurrence.shape[-1]
    if node.integer("hidden_size", hidden) != hidden:
        raise RefusedError(f"`hidden_size` is not the {hidden} of `R`")
    shape = Shape(steps, batch, hidden, count)
    directions = _directions(node, weights, recurrence, shape)
    if steps * len(directions) > MAX_STEPS:
        raise RefusedError(f"{steps} steps are too many to unroll; the limit is {MAX_STEPS}")
    masks = _masks(node, shape)
    sequences: list[SSAValue] = []
    finals: list[list[SSAValue]] = []
    initial = [_initial(node, 5, len(directions), shape, batch_first)]
    if node.op_type == "LSTM":
        initial.append(_initial(node, 6, len(directions), shape, batch_first))
    before_reset = bool(node.integer("linear_before_reset", 0))
    for number, direction in enumerate(directions):
        states = [_part(node, value, number) for value in initial]
        outputs, states = _run(node, x, direction, states, masks, shape, before_reset)
        sequences.append(_stack(node, outputs, shape))
        finals.append(states)
    results: list[SSAValue | None] = [
        sequences[0] if len(sequences) == 1 else node.emit("concat", sequences, {"axis": 1})
    ]
    for index in range(len(initial)):
        parts = [node.reshape(states[index], [1, batch, hidden]) for states in finals]
        results.append(parts[0] if len(parts) == 1 else node.emit("concat", parts, {"axis": 0}))
    if not batch_first:
        return results
    perms = [[2, 0, 1, 3], [1, 0, 2], [1, 0, 2]]
    return [
        node.emit("transpose", [value], {"perm": perm})
        for value, perm in zip(results, perms, strict=False)
        if value is not None
    ]


def _directions(node: Node, weights: Array, recurrence: Array, shape: Shape) -> list[Direction]:
    names = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}
    kind = node.string("direction", "forward")
    if kind not in names:
        raise RefusedError(f"`direction` is {kind!r}")
    flags = names[kind]
    rows = shape.gates * shape.hidden
    if len(weights) != len(flags) or weights.shape[1] != rows:
        raise RefusedError(f"`W` of shape {list(weights.shape)} does not fit {kind}")
    bias = np.zeros((len(flags), 2 * rows), weights.dtype)
    if node.given(3):
        bias = node.needs_constant(3, "the bias `B`")
        if bias.shape != (len(flags), 2 * rows):
            raise RefusedError(f"`B` has shape {list(bias.shape)}, needs {[len(flags), 2 * rows]}")
    peepholes = node.needs_constant(7, "the peepholes `P`") if node.given(7) else None
    if peepholes is not None and peepholes.shape != (len(flags), 3 * shape.hidden):
        raise RefusedError(f"`P` has shape {list(peepholes.shape)}")
    if recurrence.shape[:2] != (len(flags), rows):
        raise RefusedError(f"`R` of shape {list(recurrence.shape)} does not fit {kind}")
    activations = _activations(node, len(flags))
    return [
        Direction(
            weights[i],
            recurrence[i],
            bias[i, :rows],
            bias[i, rows:],
            None if peepholes is None else peepholes[i],
            activations[i],
            reverse,
        )
        for i, reverse in enumerate(flags)
    ]


def _activations(node: Node, directions: int) -> list[list[Activation]]:
    defaults = DEFAULTS[node.op_type]
    names = node.strings("activations") or defaults * directions
    if len(names) != len(defaults) * directions:
        raise RefusedError(f"`activations` {names} are not {len(defaults)} for each direction")
    if node.has("activation_alpha") or node.has("activation_beta"):
        raise RefusedError("parameters of activations are not supported")
    unknown = [name for name in names if name.lower() not in PLAIN]
    if unknown:
        raise RefusedError(f"activation {unknown[0]!r} is not supported")

    def function(name: str) -> Activation:
        return lambda value: node.emit(PLAIN[name.lower()], [value])

    each = [function(name) for name in names]
    return [each[i * len(defaults) : (i + 1) * len(defaults)] for i in range(directions)]


def _masks(node: Node, shape: Shape) -> list[SSAValue] | None:
    """Return for each step which entries of the batch have it, i1 [batch, 1]; None for all."""
    if not node.given(4):
        return None
    lengths = node.constant(4)
    if lengths is None:
        column = node.reshape(node.operand(4), [shape.batch, 1])
        return [
            node.emit("greater", [column, node.scalar(step, column, "step")])
            for step in range(shape.steps)
        ]
    if lengths.shape != (shape.batch,):
        raise RefusedError(f"`sequence_lens` has shape {list(lengths.shape)}")
    if (lengths == shape.steps).all():
        return None
    return [
        node.weight((lengths > step).reshape(shape.batch, 1), "active")
        for step in range(shape.steps)
    ]


def _initial(node: Node, index: int, directions: int, shape: Shape, batch_first: bool) -> SSAValue:
    """Return a starting state [directions, batch, hidden]; zeros if it is not given."""
    if node.given(index):
        state = node.operand(index)
        return node.emit("transpose", [state], {"perm": [1, 0, 2]}) if batch_first else state
    dtype = top.numpy_dtype(element(node.operand(0)))
    return node.weight(np.zeros((directions, shape.batch, shape.hidden), dtype), "zeros")


def _part(node: Node, value: SSAValue, index: int) -> SSAValue:
    """Return `value[index]`."""
    rest = list(shape_of(value))[1:]
    first = [index] + [0] * len(rest)
    result = TensorType(element(value), [1, *rest])
    if shape_of(value)[0] == 1:
        return node.reshape(value, rest)
    one = node.emit("slice", [value], {"starts": first, "steps": [1] * len(first)}, [result])
    return node.reshape(one, rest)


def _run(
    node: Node,
    x: SSAValue,
    direction: Direction,
    states: list[SSAValue],
    masks: list[SSAValue] | None,
    shape: Shape,
    before_reset: bool,
) -> tuple[list[SSAValue], list[SSAValue]]:
    """Unroll one direction; return the result of each step, in the order of `x`, and the states."""
    split = shape.hidden * (shape.gates - 1) if node.op_type == "GRU" and before_reset else None
    bias = direction.input_bias + direction.state_bias
    if split is not None:
        # The bias of the state's candidate is multiplied by the reset gate: not to be merged.
        bias = bias.copy()
        bias[split:] = direction.input_bias[split:]
    all_gates = node.emit(
        "linear",
        [x, node.weight(direction.input_weights, "W"), node.weight(bias, "B")],
    )
    step = _Step(node, direction, shape, split)
    outputs: list[SSAValue | None] = [None] * shape.steps
    order = range(shape.steps)
    for t in reversed(order) if direction.reverse else order:
        gates = _part(node, all_gates, t)
        new = step.advance(gates, states)
        outputs[t] = new[0]
        if masks is not None:
            zero = node.scalar(0, new[0], "zero")
            outputs[t] = node.emit("where", [masks[t], new[0], zero])
            new = [
                node.emit("where", [masks[t], after, before])
                for after, before in zip(new, states, strict=True)
            ]
        states = new
    return [value for value in outputs if value is not None], states


class _Step:
    """One step of one direction."""

    def __init__(self, node: Node, direction: Direction, shape: Shape, split: int | None) -> None:
        self.node = node
        self.direction = direction
        self.shape = shape
        self.split = split
        weights, hidden = direction.state_weights, shape.hidden
        none = node.optional(99)
        if node.op_type == "GRU":
            own = hidden * 2
            self.first = (node.weight(weights[:own], "Rzr"), none)
            candidate_bias = (
                none if split is None else node.weight(direction.state_bias[split:], "Rbh")
            )
            self.second = (node.weight(weights[own:], "Rh"), candidate_bias)
        else:
            self.first = (node.weight(weights, "R"), none)
            self.second = self.first
        peepholes = direction.peepholes
        self.peepholes = (
            None
            if peepholes is None
            else [node.weight(peepholes[i * hidden : (i + 1) * hidden], "P") for i in range(3)]
        )

    def advance(self, gates: SSAValue, states: list[SSAValue]) -> list[SSAValue]:
        """Return the new states from `gates` [batch, gates * hidden] (inputs' part) and states."""
        match self.node.op_type:
            case "RNN":
                return [self.direction.activations[0](self._add(gates, states[0]))]
            case "GRU":
                return [self._gru(gates, states[0])]
            case _:
                return self._lstm(gates, states[0], states[1])

    def _add(self, gates: SSAValue, state: SSAValue) -> SSAValue:
        product = self.node.emit("linear", [state, *self.first])
        return self.node.emit("add", [gates, product])

    def _gate(self, gates: SSAValue, index: int, count: int = 1) -> SSAValue:
        """Return gates `index`..`index + count`."""
        hidden = self.shape.hidden
        result = TensorType(element(gates), [self.shape.batch, hidden * count])
        attributes: dict[str, top.AttrValue] = {"starts": [0, index * hidden], "steps": [1, 1]}
        return self.node.emit("slice", [gates], attributes, [result])

    def _gru(self, gates: SSAValue, state: SSAValue) -> SSAValue:
        emit, (gate_function, candidate_function) = self.node.emit, self.direction.activations
        both = gate_function(self._add(self._gate(gates, 0, 2), state))
        update, reset = self._gate(both, 0), self._gate(both, 1)
        if self.split is None:
            product = emit("linear", [emit("mul", [reset, state]), *self.second])
        else:
            product = emit("mul", [reset, emit("linear", [state, *self.second])])
        candidate = candidate_function(emit("add", [self._gate(gates, 2), product]))
        # (1 - z) * c + z * h
        change = emit("mul", [update, emit("sub", [state, candidate])])
        return emit("add", [candidate, change])

    def _lstm(self, gates: SSAValue, state: SSAValue, cell: SSAValue) -> list[SSAValue]:
        emit, (gate_function, input_function, output_function) = (
            self.node.emit,
            self.direction.activations,
        )
        total = self._add(gates, state)
        enter, leave, forget, candidate = (self._gate(total, i) for i in range(4))
        if self.peepholes is not None:
            enter = emit("add", [enter, emit("mul", [self.peepholes[0], cell])])
            forget = emit("add", [forget, emit("mul", [self.peepholes[2], cell])])
        kept = emit("mul", [gate_function(forget), cell])
        cell = emit("add", [kept, emit("mul", [gate_function(enter), input_function(candidate)])])
        if self.peepholes is not None:
            leave = emit("add", [leave, emit("mul", [self.peepholes[1], cell])])
        return [emit("mul", [gate_function(leave), output_function(cell)]), cell]


def _stack(node: Node, values: list[SSAValue], shape: Shape) -> SSAValue:
    """Return step results [batch, hidden] as [steps, 1, batch, hidden]."""
    rows = [node.reshape(value, [1, 1, shape.batch, shape.hidden]) for value in values]
    return rows[0] if len(rows) == 1 else node.emit("concat", rows, {"axis": 0})
