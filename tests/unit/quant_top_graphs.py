"""Small float graphs for the tests of quantisation, built op by op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from xdsl.dialects.builtin import ArrayAttr, ModuleOp, StringAttr, TensorType, f32
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, Region, SSAValue

from tilewright.dialects import top
from tilewright.ir.context import CompileContext

NO_PADS = (0, 0, 0, 0)


class TopGraph:
    """A float `@main` under construction; `ctx` holds its weights."""

    def __init__(self, **inputs: Sequence[int]) -> None:
        self.ctx = CompileContext()
        self.names = list(inputs)
        self.block = Block(arg_types=[TensorType(f32, list(shape)) for shape in inputs.values()])

    def input(self, name: str) -> SSAValue:
        return self.block.args[self.names.index(name)]

    def weight(self, name: str, array: Any) -> SSAValue:
        values = np.asarray(array, np.float32)
        stored = self.ctx.weights.add(name, values)
        op = top.create(
            top.WeightOp, [], name=stored, result_types=[TensorType(f32, list(values.shape))]
        )
        self.block.add_op(op)
        return op.results[0]

    def none(self) -> SSAValue:
        from xdsl.dialects.builtin import NoneType

        op = top.NoneOp.create(result_types=[NoneType()])
        self.block.add_op(op)
        return op.results[0]

    def op(
        self,
        kind: str,
        name: str,
        operands: Sequence[SSAValue],
        shape: Sequence[int] | None = None,
        /,
        **attributes: Any,
    ) -> SSAValue:
        types = None if shape is None else [TensorType(f32, list(shape))]
        made = top.create(top.OPS[kind], list(operands), attributes, name=name, result_types=types)
        self.block.add_op(made)
        return made.results[0]

    def conv(
        self,
        name: str,
        x: SSAValue,
        w: Any,
        bias: Any = None,
        **attributes: Any,
    ) -> SSAValue:
        settings = {
            "strides": (1, 1),
            "pads": NO_PADS,
            "dilations": (1, 1),
            "group": 1,
            **attributes,
        }
        b = self.none() if bias is None else self.weight(f"{name}.b", bias)
        return self.op("conv", name, [x, self.weight(f"{name}.w", w), b], **settings)

    def finish(self, **results: SSAValue) -> ModuleOp:
        """Return the module; it verifies."""
        self.block.add_op(ReturnOp(*results.values()))
        main = FuncOp(
            "main",
            ([a.type for a in self.block.args], [value.type for value in results.values()]),
            Region(self.block),
        )
        main.attributes["arg_names"] = ArrayAttr([StringAttr(name) for name in self.names])
        main.attributes["result_names"] = ArrayAttr([StringAttr(name) for name in results])
        module = ModuleOp([main])
        module.verify()
        return module
