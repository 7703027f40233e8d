"""What the passes on `top` share: constants, single users, replacing, and recording reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from xdsl.context import Context
from xdsl.dialects.builtin import (
    AnyFloat,
    ArrayAttr,
    FloatAttr,
    ModuleOp,
    NoneType,
    StringAttr,
    TensorType,
)
from xdsl.dialects.func import ReturnOp
from xdsl.ir import Attribute, Block, Operation, OpResult, SSAValue
from xdsl.traits import is_side_effect_free

from tilewright.dialects import top
from tilewright.dialects.top.module import main_function
from tilewright.ir.context import compile_context
from tilewright.ir.weights import Array


def shape_of(value: SSAValue) -> tuple[int, ...]:
    """Return the shape of a tensor value."""
    assert isinstance(value.type, TensorType), value.type
    return tuple(value.type.get_shape())


def element_of(value: SSAValue) -> Attribute:
    """Return the element type of a tensor value."""
    assert isinstance(value.type, TensorType), value.type
    return value.type.get_element_type()


def is_float(value: SSAValue) -> bool:
    """Return whether a value is a tensor of floats (not quantised)."""
    return isinstance(value.type, TensorType) and isinstance(element_of(value), AnyFloat)


def float32(value: float) -> float:
    """Round to the nearest float32, which is what an `f32` attribute holds."""
    return float(np.float32(value))


class Graph:
    """The block of `@main` and the store beside it, as one pass edits them."""

    def __init__(self, ctx: Context, module: ModuleOp, stage: str) -> None:
        """Find `@main`.

        Raises:
            TilewrightError: E0501, there is none.
        """
        self.ctx = compile_context(ctx)
        self.weights = self.ctx.weights
        self.stage = stage
        self.function = main_function(module)
        self.block: Block = self.function.body.block
        self._names = {
            op.layer_name
            for op in self.block.ops
            if isinstance(op, top.TopOp) and not isinstance(op, top.WeightOp)
        }
        self._refusals: set[tuple[str, str]] = set()

    # Reading

    def layers(self) -> list[top.TopOp]:
        """Return the operations of `top` in order, constants left out, as they are now."""
        return [
            op
            for op in self.block.ops
            if isinstance(op, top.TopOp) and not isinstance(op, top.WeightOp)
        ]

    def array(self, value: SSAValue) -> Array | None:
        """Return the array of a constant, or None if `value` is none."""
        if isinstance(value.owner, top.WeightOp):
            return self.weights.get(value.owner.layer_name)
        return None

    def scalar(self, value: SSAValue) -> float | None:
        """Return the number a constant float tensor of one element holds, else None."""
        if not isinstance(value.owner, top.WeightOp) or not is_float(value):
            return None
        array = self.weights.get(value.owner.layer_name)
        return float(array.reshape(-1)[0]) if array.size == 1 else None

    def uniform(self, value: SSAValue) -> float | None:
        """Return the number that fills a constant float tensor, else None."""
        if not isinstance(value.owner, top.WeightOp) or not is_float(value):
            return None
        array = self.weights.get(value.owner.layer_name)
        if array.size and (array == array.reshape(-1)[0]).all():
            return float(array.reshape(-1)[0])
        return None

    @staticmethod
    def shared(value: SSAValue) -> str | None:
        """Return why more than one operation depends on `value`, or None if only one does."""
        if value.has_one_use():
            return None
        if any(isinstance(use.operation, ReturnOp) for use in value.uses):
            return "its result is a graph output"
        return "its result has another user"

    # Changing

    def fresh(self, wish: str) -> str:
        """Return a layer name that no layer has: `wish`, or `wish#k`."""
        name, count = wish, 0
        while name in self._names:
            count += 1
            name = f"{wish}#{count}"
        self._names.add(name)
        return name

    def weight(self, name: str, array: Array, before: Operation) -> SSAValue:
        """Add a constant to the store and a `top.weight` for it; return its value."""
        key = self.weights.add(name, array)
        result = TensorType(top.element_type(array.dtype), list(array.shape))
        op = top.create(top.WeightOp, [], name=key, result_types=[result])
        self.block.insert_op_before(op, before)
        return op.results[0]

    def none(self, before: Operation) -> SSAValue:
        """Insert an absent operand."""
        op = top.NoneOp.create(result_types=[NoneType()])
        self.block.insert_op_before(op, before)
        return op.results[0]

    def insert(
        self,
        op_class: type[top.TopOp],
        operands: Sequence[SSAValue],
        attributes: Mapping[str, Any] | None = None,
        *,
        name: str,
        before: Operation,
        shape: Sequence[int] | None = None,
    ) -> SSAValue:
        """Insert an operation, return its first result.

        Args:
            op_class: its class.
            operands: its operands.
            attributes: Python values, see `top.to_attribute`.
            name: layer name as it shall be (`fresh` makes new ones).
            before: where to insert.
            shape: of the result, for operations whose result type carries it.
        """
        types = None
        if shape is not None:
            types = [TensorType(element_of(operands[0]), list(shape))]
        op = top.create(op_class, operands, attributes, name=name, result_types=types)
        self.block.insert_op_before(op, before)
        return op.results[0]

    def replace(self, op: Operation, *values: SSAValue) -> None:
        """Replace an operation's results, and remove it and what only it used."""
        for result, value in zip(op.results, values, strict=True):
            result.replace_all_uses_with(value)
        self.remove(op)

    def remove(self, op: Operation) -> None:
        """Remove an operation without users, and then what only it used."""
        pending = [op]
        while pending:
            dead = pending.pop()
            if dead.parent is None or any(result.first_use for result in dead.results):
                continue
            sources = {id(v.owner): v.owner for v in dead.operands if isinstance(v, OpResult)}
            dead.detach()
            dead.erase()
            pending += [
                source
                for source in sources.values()
                if isinstance(source, Operation) and is_side_effect_free(source)
            ]

    def set(self, op: Operation, **attributes: Any) -> None:
        """Change attributes of an operation; None removes one."""
        for key, value in attributes.items():
            if value is None:
                op.attributes.pop(key, None)
            else:
                op.attributes[key] = top.to_attribute(value)

    def absorb(self, keeper: Operation, *absorbed: Operation) -> None:
        """Note on `keeper` the layers it now stands for as well."""
        names = _fused(keeper)
        for op in absorbed:
            if isinstance(op, top.TopOp):
                names += [op.layer_name, *_fused(op)]
        own = keeper.layer_name if isinstance(keeper, top.TopOp) else None
        unique = [name for name in dict.fromkeys(names) if name != own]
        if unique:
            keeper.attributes["fused"] = ArrayAttr([StringAttr(name) for name in unique])

    # Reasons

    def fired(self, layer: str, reason: str, **details: Any) -> None:
        """Record that the pass changed a layer."""
        self.ctx.decide(layer, self.stage, True, reason, **details)

    def refused(self, layer: str, reason: str, **details: Any) -> None:
        """Record, once a run, that the pass left a layer alone although it looked at it."""
        if (layer, reason) in self._refusals:
            return
        self._refusals.add((layer, reason))
        self.ctx.decide(layer, self.stage, False, reason, **details)


def _fused(op: Operation) -> list[str]:
    names = op.attributes.get("fused")
    if not isinstance(names, ArrayAttr):
        return []
    return [item.data for item in names if isinstance(item, StringAttr)]


def clamp_of(op: Operation) -> tuple[float | None, float | None]:
    """Return the fused clamp of an operation: lower and upper bound."""
    bounds: list[float | None] = []
    for key in ("clamp_min", "clamp_max"):
        value = op.attributes.get(key)
        bounds.append(value.value.data if isinstance(value, FloatAttr) else None)
    return bounds[0], bounds[1]


def has_clamp(op: Operation) -> bool:
    """Return whether an operation has a fused clamp."""
    return clamp_of(op) != (None, None)


def clip_bounds(op: Operation) -> tuple[float | None, float | None] | None:
    """Return the bounds of a ReLU or Clip, or None if `op` is neither."""
    if isinstance(op, top.ReluOp):
        return 0.0, None
    if isinstance(op, top.ClipOp):
        return top.Attrs(op.attributes).number("min"), top.Attrs(op.attributes).number("max")
    return None


def compose_clamps(
    first: tuple[float | None, float | None], second: tuple[float | None, float | None]
) -> tuple[float | None, float | None]:
    """Return the one clamp that equals clamping by `first`, then by `second`."""
    low, high = second
    least, most = first

    def limit(value: float | None) -> float | None:
        if value is None:
            return None
        if low is not None:
            value = max(value, low)
        return min(value, high) if high is not None else value

    least, most = limit(least), limit(most)
    return (low if least is None else least), (high if most is None else most)


def keep_scale(old: SSAValue, new: SSAValue) -> None:
    """Give a constant the codes' scale of the one it was re-ordered from, if that has one."""
    if isinstance(old.owner, Operation) and isinstance(new.owner, Operation):
        for key in ("quant_scale", "quant_zero"):
            if key in old.owner.attributes:
                new.owner.attributes[key] = old.owner.attributes[key]


def channel_axis(op: Operation) -> int:
    """Return the channel axis of an image operation's tensors."""
    value = op.attributes.get("layout")
    last = isinstance(value, StringAttr) and value.data == "nhwc"
    return len(shape_of(op.results[0])) - 1 if last else 1


__all__ = [
    "Graph",
    "channel_axis",
    "clamp_of",
    "clip_bounds",
    "compose_clamps",
    "element_of",
    "float32",
    "has_clamp",
    "is_float",
    "keep_scale",
    "shape_of",
]
