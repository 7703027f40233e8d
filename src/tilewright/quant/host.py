"""Float ops beside the integer graph, executed one at a time as the device's host would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from xdsl.ir import Operation

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
        if op not in self.sessions:
            self.sessions[op] = self._session(op)
        session = self.sessions[op]
        feed = {
            f"arg{index}": array
            for index, array in enumerate(operands)
            if f"arg{index}" in session.inputs
        }
        outputs = session.run(feed)
        return [outputs[f"result{index}"] for index in range(len(op.results))]

    def _session(self, op: Operation) -> TopSession:
        from xdsl.ir import Operation

        from tilewright.ir.weights import WeightStore
        from tilewright.quant.graph import layer_of
        from tilewright.runtime.float_executor import TopSession

        store = WeightStore()
        for operand in op.operands:
            owner = operand.owner
            if isinstance(owner, Operation) and owner.name == "top.weight":
                store.set(layer_of(owner), self.weights.get(layer_of(owner)))
        return TopSession(single_op_module(op), store)


def single_op_module(op: Operation) -> Any:
    """Return a module whose `@main` is a copy of `op`; its constants stay constants.

    Arguments are `arg<i>` for operand `i`, results `result<i>`.
    """
    from xdsl.dialects.builtin import ArrayAttr, ModuleOp, StringAttr
    from xdsl.dialects.func import FuncOp, ReturnOp
    from xdsl.ir import Block, Operation, Region, SSAValue

    constant: dict[int, Operation] = {}
    for index, operand in enumerate(op.operands):
        owner = operand.owner
        if isinstance(owner, Operation) and owner.name in ("top.weight", "top.none"):
            constant[index] = owner
    given = [index for index in range(len(op.operands)) if index not in constant]
    block = Block(arg_types=[op.operands[index].type for index in given])
    mapping: dict[SSAValue, SSAValue] = {
        op.operands[index]: argument for index, argument in zip(given, block.args, strict=True)
    }
    for index, owner in constant.items():
        if op.operands[index] not in mapping:
            copy = owner.clone()
            block.add_op(copy)
            mapping[op.operands[index]] = copy.results[0]
    clone = op.clone(value_mapper=mapping)
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


def _shape(op: Operation) -> tuple[int, ...]:
    from tilewright.dialects.quant import shape_of

    return shape_of(op.results[0])
