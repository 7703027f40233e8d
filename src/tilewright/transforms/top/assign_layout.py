"""`top-assign-layout{layout=nhwc}`: image tensors get the layout the target wants.

Convolutions and pools (the anchors) are re-laid, and with them every elementwise operation,
concatenation, pad, slice, softmax, reduction, ... that hangs together with one through 4-D values:
axes, per-axis lists and constants are rewritten. Where a re-laid value meets an operation that is
defined on the logical order (reshape, matmul, the graph's own inputs and outputs), an explicit
`top.transpose` stands between; it becomes a reshape if it only moves axes of size 1, and the
weights of a linear layer behind a flatten are permuted instead. What is left is recorded.

    %c = top.conv %x                   ->   %t = top.transpose %x {perm = [0, 2, 3, 1]}
    %r = top.relu %c                        %c = top.conv %t {layout = "nhwc"}
                                            %r = top.relu %c
                                            %u = top.transpose %r {perm = [0, 3, 1, 2]}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.ir import Attribute, BlockArgument, Operation, SSAValue
from xdsl.passes import ModulePass

from tilewright.diagnostics import UsageError
from tilewright.dialects import top
from tilewright.dialects.top.module import boundary_names
from tilewright.transforms.top.graph import Graph, element_of, keep_scale, shape_of
from tilewright.transforms.top.simplify_shapes import simplify

TO_NHWC = (0, 2, 3, 1)
"""Axis `i` of the re-laid tensor is logical axis `TO_NHWC[i]`."""
TO_NCHW = (0, 3, 1, 2)
"""The inverse; also the place of each logical axis in the re-laid tensor."""

ELEMENTWISE = (
    top.UnaryOp,
    top.PredicateOp,
    top.BinaryOp,
    top.CompareOp,
    top.WhereOp,
    top.PreluOp,
    top.CastOp,
    top.ExpandOp,
)
"""Operations whose operands broadcast, and that have no axes."""
BROADCAST = (*ELEMENTWISE, top.ConcatOp)
"""Operations all of whose operands are images."""
ONE_AXIS = (top.ConcatOp, top.shaping.AxisOp)
NORMS = (top.BatchNormOp, top.InstanceNormOp, top.LrnOp)
"""Operations with `axis`; operands after the first are vectors."""
PER_AXIS: dict[type[top.TopOp], tuple[str, ...]] = {
    top.PadOp: ("pads_begin", "pads_end"),
    top.SliceOp: ("starts", "steps"),
    top.TileOp: ("repeats",),
}
"""Operations with lists of one entry an axis."""


def _rank(value: SSAValue) -> int:
    return len(shape_of(value)) if isinstance(value.type, TensorType) else -1


def _is_anchor(op: top.TopOp) -> bool:
    """Return whether an operation itself wants the layout."""
    if _rank(op.operands[0]) != 4 or len(op.results) != 1:
        return False
    if isinstance(op, top.ResizeOp):
        # Of an image: batch and channels stay.
        return shape_of(op.operands[0])[:2] == shape_of(op.results[0])[:2]
    if isinstance(op, top.ReduceOp):
        # A global pool; over other axes the operand need not be an image.
        return _axes(op) == (2, 3) and op.attrs.flag("keepdims")
    return isinstance(op, top.ConvOp | top.ConvTransposeOp | top.PoolOp)


def _follows(op: top.TopOp) -> bool:
    """Return whether an operation can be re-laid when its neighbours are."""
    if len(op.results) != 1 or _rank(op.results[0]) != 4:
        return False
    if isinstance(op, ELEMENTWISE):
        return True
    if _rank(op.operands[0]) != 4:
        return False
    if isinstance(op, top.ReduceOp | top.ArgOp):
        return op.attrs.flag("keepdims")
    return isinstance(op, (*ONE_AXIS, *NORMS, *PER_AXIS, top.ResizeOp))


def _drains(op: top.TopOp) -> bool:
    """Return whether a reduction that drops axes keeps the order of the others when re-laid."""
    if (
        not isinstance(op, top.ReduceOp | top.ArgOp)
        or _rank(op.x) != 4
        or op.attrs.flag("keepdims")
    ):
        return False
    kept = [axis for axis in range(4) if axis not in _axes(op)]
    places = [TO_NCHW[axis] for axis in kept]
    return places == sorted(places)


def _axes(op: top.ReduceOp | top.ArgOp) -> tuple[int, ...]:
    if isinstance(op, top.ReduceOp):
        return op.attrs.ints("axes")
    return (op.attrs.integer("axis"),)


def _reordered(values: Sequence[Any]) -> list[Any]:
    return [values[axis] for axis in TO_NHWC]


def _moved_attributes(op: top.TopOp) -> dict[str, Any]:
    """Return an operation's attributes for re-laid operands."""
    changed: dict[str, Any] = {k: v for k, v in op.attributes.items() if k != "name"}
    if isinstance(op, top.ConvOp | top.ConvTransposeOp | top.PoolOp | top.ResizeOp):
        changed["layout"] = "nhwc"
    if isinstance(op, top.ResizeOp):
        changed["scales"] = _reordered(op.attrs.floats("scales"))
        if "roi" in op.attrs:
            roi = op.attrs.floats("roi")
            changed["roi"] = [*_reordered(roi[:4]), *_reordered(roi[4:])]
    elif isinstance(op, top.ReduceOp):
        changed["axes"] = sorted(TO_NCHW[axis] for axis in op.attrs.ints("axes"))
    elif isinstance(op, (*ONE_AXIS, *NORMS, top.ArgOp)):
        changed["axis"] = TO_NCHW[op.attrs.integer("axis")]
    for key in PER_AXIS.get(type(op), ()):
        changed[key] = _reordered(op.attrs.ints(key))
    return changed


class _Layout:
    """One run of the pass."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        count = len(graph.block.args)
        self.arguments = boundary_names(graph.function, "arg_names", count, "arg")
        self.selected = self.chosen()
        self.moved: dict[SSAValue, SSAValue] = {}
        """Re-laid result by the logical value it stands for."""
        self.forms: dict[tuple[SSAValue, str], SSAValue] = {}
        """Conversions made, by value and layout."""

    def chosen(self) -> set[Operation]:
        """Return the operations to re-lay: connected through 4-D values with an anchor."""
        group: dict[Operation, Operation] = {}

        def root(op: Operation) -> Operation:
            while group[op] is not op:
                group[op] = group[group[op]]
                op = group[op]
            return op

        anchored: list[Operation] = []
        for op in self.graph.layers():
            done = op.attrs.string("layout", "nchw") == "nhwc" or not op.operands
            anchor = not done and _is_anchor(op)
            if done or not (anchor or _follows(op)):
                continue
            group[op] = op
            if anchor:
                anchored.append(op)
            for value in op.operands:
                if (
                    isinstance(value.owner, Operation)
                    and value.owner in group
                    and _rank(value) == 4
                ):
                    group[root(value.owner)] = root(op)
        roots = {root(op) for op in anchored}
        return {op for op in group if root(op) in roots}

    def name_of(self, value: SSAValue) -> str:
        if isinstance(value, BlockArgument):
            return self.arguments[value.index]
        assert isinstance(value.owner, top.TopOp)
        return value.owner.layer_name

    def convert(self, value: SSAValue, layout: str, before: Operation) -> SSAValue:
        """Return `value` transposed to `layout`; one conversion a value."""
        perm = TO_NHWC if layout == "nhwc" else TO_NCHW
        key = (value, layout)
        if key in self.forms:
            return self.forms[key]
        inner = value.owner
        if isinstance(inner, top.TransposeOp):
            own = inner.attrs.ints("perm")
            if [own[axis] for axis in perm] == [0, 1, 2, 3]:
                self.forms[key] = inner.x
                return inner.x
        self.forms[key] = self.graph.insert(
            top.TransposeOp,
            [value],
            {"perm": list(perm)},
            name=self.graph.fresh(f"{self.name_of(value)}/to_{layout}"),
            before=before,
        )
        return self.forms[key]

    def nhwc(self, value: SSAValue, before: Operation) -> SSAValue:
        """Return the re-laid form of a 4-D value."""
        return self.moved[value] if value in self.moved else self.convert(value, "nhwc", before)

    def nchw(self, value: SSAValue, before: Operation) -> SSAValue:
        """Return the logical form of any value."""
        if value not in self.moved:
            return value
        return self.convert(self.moved[value], "nchw", before)

    def broadcast_operand(self, value: SSAValue, before: Operation) -> SSAValue:
        """Return the re-laid form of an operand that may have fewer axes."""
        graph = self.graph
        if not isinstance(value.type, TensorType) or prod(shape_of(value)) == 1:
            return self.nchw(value, before) if value not in self.moved else self.moved[value]
        full = [1] * (4 - _rank(value)) + list(shape_of(value))
        array = graph.array(value)
        key = (value, "nhwc")
        if array is not None:
            if key not in self.forms:
                relaid = np.ascontiguousarray(array.reshape(full).transpose(TO_NHWC))
                self.forms[key] = graph.weight(f"{self.name_of(value)}/nhwc", relaid, before)
                keep_scale(value, self.forms[key])
            return self.forms[key]
        if _rank(value) == 4:
            return self.nhwc(value, before)
        if key not in self.forms:
            raised = graph.insert(
                top.ReshapeOp,
                [value],
                name=graph.fresh(f"{self.name_of(value)}/raise"),
                before=before,
                shape=full,
            )
            self.forms[key] = self.convert(raised, "nhwc", before)
        return self.forms[key]

    def relay(self, op: top.TopOp) -> None:
        """Insert the re-laid form of an operation before it; the old one is removed later."""
        operands = list(op.operands)
        if isinstance(op, BROADCAST):
            operands = [self.broadcast_operand(value, op) for value in operands]
        else:
            vectors = [self.nchw(value, op) for value in operands[1:]]
            operands = [self.nhwc(operands[0], op), *vectors]
        kind: Attribute = op.results[0].type
        if op in self.selected:
            shape = _reordered(shape_of(op.results[0]))
            kind = TensorType(element_of(op.results[0]), shape)
        new = top.create(
            type(op), operands, _moved_attributes(op), name=op.layer_name, result_types=[kind]
        )
        new.verify_()
        self.graph.block.insert_op_before(new, op)
        if op in self.selected:
            self.moved[op.results[0]] = new.results[0]
        else:
            op.results[0].replace_all_uses_with(new.results[0])

    def flatten(self, op: top.TopOp) -> bool:
        """Let linear layers behind a flatten of a re-laid value take their weights permuted."""
        if not isinstance(op, top.ReshapeOp) or op.x not in self.moved:
            return False
        shape, target = shape_of(op.x), shape_of(op.result)
        if len(target) != 2 or target[0] != shape[0] or shape[1] == 1 or prod(shape[2:]) == 1:
            return False
        users = [use for use in op.result.uses]
        for use in users:
            linear = use.operation
            if use.index != 0 or not isinstance(linear, top.LinearOp):
                return False
            if self.graph.array(linear.w) is None:
                return False
        for use in sorted(users, key=lambda use: self._place(use.operation)):
            linear = use.operation
            assert isinstance(linear, top.LinearOp)
            assert isinstance(linear.w.owner, top.WeightOp)
            array = self.graph.array(linear.w)
            assert array is not None
            split = array.reshape(array.shape[0], *shape[1:]).transpose(TO_NHWC)
            permuted = np.ascontiguousarray(split.reshape(array.shape))
            linear.operands[1] = self.graph.weight(linear.w.owner.layer_name, permuted, linear)
        moved = self.moved[op.x]
        value = self.graph.insert(
            top.ReshapeOp, [moved], {"order": "nhwc"}, name=op.layer_name, before=op, shape=target
        )
        op.result.replace_all_uses_with(value)
        self.graph.fired(op.layer_name, "flattens channels last; the linear weights are permuted")
        return True

    def _place(self, op: Operation) -> str:
        return op.layer_name if isinstance(op, top.TopOp) else ""

    def relaid(self, op: top.TopOp) -> bool:
        """Insert the re-laid form of an operation if it has one."""
        if op in self.selected or (_drains(op) and op.operands[0] in self.moved):
            self.relay(op)
            return True
        return self.flatten(op)

    def run(self) -> None:
        """Re-lay the graph."""
        replaced: list[Operation] = []
        for op in list(self.graph.block.ops):
            if isinstance(op, top.TopOp) and self.relaid(op):
                replaced.append(op)
                continue
            for index, value in enumerate(op.operands):
                if value in self.moved:
                    op.operands[index] = self.nchw(value, op)
        for op in reversed(replaced):
            self.graph.remove(op)


@dataclass(frozen=True)
class AssignLayoutPass(ModulePass):
    """Store image tensors as the target wants, with explicit conversions at the edges."""

    name = "top-assign-layout"

    layout: str = "nhwc"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Run the pass.

        Raises:
            UsageError: E0702, an unknown layout.
        """
        if self.layout not in top.spatial.LAYOUTS:
            legal = ", ".join(top.spatial.LAYOUTS)
            raise UsageError("E0702", f"layout is `{self.layout}`; legal are {legal}")
        graph = Graph(ctx, op, self.name)
        if self.layout == "nhwc":
            _Layout(graph).run()
            simplify(graph)
            for layer in graph.layers():
                image = isinstance(layer, top.ConvOp | top.ConvTransposeOp | top.PoolOp)
                if image and layer.attrs.string("layout", "nchw") != "nhwc":
                    graph.refused(layer.layer_name, "not a 2-D image operation of one result")
        left = [layer.layer_name for layer in graph.layers() if isinstance(layer, top.TransposeOp)]
        graph.fired("main", f"{len(left)} transposes are left", transposes=left)
