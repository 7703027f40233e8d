"""Float ops beside the integer graph, executed one at a time as the device's host would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from xdsl.ir import Attribute, Operation, SSAValue

    from tilewright.ir.weights import WeightStore
    from tilewright.runtime.float_executor import TopSession

Array = npt.NDArray[Any]


class HostOps:
    """Runs float `top` ops; sessions of the float executor are made once for each op."""

    def __init__(self, weights: WeightStore) -> None:
        self.weights = weights
        self.sessions: dict[Operation, TopSession] = {}

    def run(self, op: Operation, operands: Sequence[Array]) -> list[Array]:
        """Return the results of `op` for these operand values (constants and absent ones included).

        Raises:
            TilewrightError: E0402, the op has no float meaning or cannot be run.
        """
        from tilewright.dialects.top.base import Attrs

        attrs = Attrs(op.attributes)
        if op.name == "top.transpose":
            return [np.ascontiguousarray(operands[0].transpose(attrs.ints("perm")))]
        if op.name == "top.reshape":
            return [operands[0].reshape(_shape(op))]
        if op.name == "top.cast" and "f16" in (_element(op.operands[0]), _element(op.results[0])):
            target = np.float16 if _element(op.results[0]) == "f16" else np.float32
            return [
                to_half(op, operands[0]) if target is np.float16 else operands[0].astype(target)
            ]
        half = is_half(op)
        if op not in self.sessions:
            self.sessions[op] = self._session(op)
        session = self.sessions[op]
        feed = {
            f"arg{index}": array.astype(np.float32) if half else array
            for index, array in enumerate(operands)
            if f"arg{index}" in session.inputs
        }
        outputs = session.run(feed)
        results = [outputs[f"result{index}"] for index in range(len(op.results))]
        return [to_half(op, array) for array in results] if half else results

    def _session(self, op: Operation) -> TopSession:
        from xdsl.ir import Operation

        from tilewright.ir.weights import WeightStore
        from tilewright.quant.graph import layer_of
        from tilewright.runtime.float_executor import TopSession

        store = WeightStore()
        for operand in op.operands:
            owner = operand.owner
            if isinstance(owner, Operation) and owner.name == "top.weight":
                array = self.weights.get(layer_of(owner))
                wide = array.astype(np.float32) if array.dtype == np.float16 else array
                store.set(layer_of(owner), wide)
        # As the runtime runs host parts: nothing fused, so that both round alike.
        return TopSession(single_op_module(op), store, optimise=False)


def single_op_module(op: Operation) -> Any:
    """Return a module whose `@main` is a copy of `op`; its constants stay constants.

    Arguments are `arg<i>` for operand `i`, results `result<i>`. An fp16 op becomes the float32 op:
    it sums in float32 and its result is rounded once, afterwards.
    """
    from xdsl.dialects.builtin import ArrayAttr, ModuleOp, StringAttr
    from xdsl.dialects.func import FuncOp, ReturnOp
    from xdsl.ir import Block, Operation, Region

    constant: dict[int, Operation] = {}
    for index, operand in enumerate(op.operands):
        owner = operand.owner
        if isinstance(owner, Operation) and owner.name in ("top.weight", "top.none"):
            constant[index] = owner
    given = [index for index in range(len(op.operands)) if index not in constant]
    block = Block(arg_types=[_widen(op.operands[index].type) for index in given])
    mapping: dict[SSAValue, SSAValue] = {
        op.operands[index]: argument for index, argument in zip(given, block.args, strict=True)
    }
    for index, owner in constant.items():
        if op.operands[index] not in mapping:
            copy = type(owner).create(
                result_types=[_widen(owner.results[0].type)], attributes=owner.attributes
            )
            block.add_op(copy)
            mapping[op.operands[index]] = copy.results[0]
    clone = type(op).create(
        operands=[mapping[operand] for operand in op.operands],
        result_types=[_widen(result.type) for result in op.results],
        attributes=op.attributes,
        properties=op.properties,
    )
    block.add_ops([clone, ReturnOp(*clone.results)])
    main = FuncOp(
        "main",
        ([argument.type for argument in block.args], [result.type for result in clone.results]),
        Region(block),
    )
    main.attributes["arg_names"] = ArrayAttr([StringAttr(f"arg{index}") for index in given])
    main.attributes["result_names"] = ArrayAttr(
        [StringAttr(f"result{index}") for index in range(len(clone.results))]
    )
    return ModuleOp([main])


def is_half(op: Operation) -> bool:
    """Return whether an op computes in fp16 (its result is)."""
    return bool(op.results) and _element(op.results[0]) == "f16"


def to_half(op: Operation, array: Array) -> Array:
    """Round to the nearest fp16.

    Raises:
        TilewrightError: E0304, a finite value overflows to infinity.
    """
    from tilewright.diagnostics import TilewrightError
    from tilewright.quant.graph import layer_of

    with np.errstate(over="ignore"):
        half = array.astype(np.float16)
    lost = np.isinf(half) & np.isfinite(array)
    if lost.any():
        value = float(array.reshape(-1)[int(np.flatnonzero(lost)[0])])
        raise TilewrightError(
            "E0304",
            f'"{layer_of(op)}" overflows fp16',
            details=[f"value {value:.6g}; the largest fp16 is 65504"],
            hint="compile for int8 or keep the layer in float",
        )
    return half


def _widen(kind: Attribute) -> Attribute:
    """Return a tensor type with float32 in place of fp16."""
    from xdsl.dialects.builtin import Float16Type, TensorType, f32

    if isinstance(kind, TensorType) and isinstance(kind.element_type, Float16Type):
        return TensorType(f32, kind.get_shape())
    return kind


def _element(value: SSAValue) -> str:
    return str(getattr(value.type, "element_type", value.type))


def _shape(op: Operation) -> tuple[int, ...]:
    from tilewright.dialects.quant import shape_of

    return shape_of(op.results[0])
