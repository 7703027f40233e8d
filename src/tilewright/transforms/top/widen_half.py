"""`top-widen-half`: a quantised model written in float16 is read in float32.

    %d = top.dequantize_linear ...     : f32       %d = top.dequantize_linear ... : f32
    %h = top.cast %d                   : f16   ->  %y = top.conv %d, ...          : f32
    %y = top.conv %h, ...              : f16

Between its codes such a model computes in half precision because its hardware does; the chip
computes there in exact integers, of which float32 is the nearer description. Inputs and outputs
become float32 too (float16 arrays are taken as well). Models without codes are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from xdsl.context import Context
from xdsl.dialects.builtin import (
    Float16Type,
    FunctionType,
    ModuleOp,
    StringAttr,
    TensorType,
    f32,
)
from xdsl.dialects.func import ReturnOp
from xdsl.ir import SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import Rewriter

from tilewright.dialects import top
from tilewright.dialects.top.quantised import QUANTISED_OPS
from tilewright.transforms.top.graph import Graph, shape_of


@dataclass(frozen=True)
class WidenHalfPass(ModulePass):
    """Compute in float32 what a quantised model computes in float16."""

    name = "top-widen-half"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Run the pass."""
        graph = Graph(ctx, op, self.name)
        ops = [item for item in graph.block.ops if not isinstance(item, ReturnOp)]
        if not any(isinstance(item, tuple(QUANTISED_OPS)) for item in ops):
            return
        halves = [item for item in ops if any(_is_half(result) for result in item.results)]
        arguments = [argument for argument in graph.block.args if _is_half(argument)]
        if not halves and not arguments:
            return
        for item in halves:
            if isinstance(item, top.WeightOp):
                _widen_constant(graph, item)
        values = [*graph.block.args, *(result for item in halves for result in item.results)]
        for value in values:
            if _is_half(value):
                Rewriter.replace_value_with_new_type(value, TensorType(f32, shape_of(value)))
        for item in graph.layers():
            if isinstance(item, top.CastOp) and item.operands[0].type == item.results[0].type:
                graph.replace(item, item.operands[0])
        last = graph.block.last_op
        assert isinstance(last, ReturnOp)
        graph.function.properties["function_type"] = FunctionType.from_lists(
            [argument.type for argument in graph.block.args], [v.type for v in last.operands]
        )
        graph.fired("main", "float16 between codes, and at inputs and outputs, becomes float32")


def _is_half(value: SSAValue) -> bool:
    return isinstance(value.type, TensorType) and isinstance(value.type.element_type, Float16Type)


def _widen_constant(graph: Graph, op: top.WeightOp) -> None:
    array = graph.weights.get(op.layer_name).astype(np.float32)
    op.attributes["name"] = StringAttr(graph.weights.add(op.layer_name, array))
