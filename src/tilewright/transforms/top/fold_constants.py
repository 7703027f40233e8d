"""`top-fold-constants`: operations on constants alone are computed now, by onnxruntime.

    %t = top.transpose %w {perm = ...}   ->   %t = top.weight {name = "t"}

A result larger than `max-bytes` and than its operands (an expanded scalar, say) is not stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ArrayAttr, ModuleOp, StringAttr, TensorType
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.passes import ModulePass

from tilewright.diagnostics import TilewrightError
from tilewright.dialects import top
from tilewright.ir.weights import Array
from tilewright.runtime.float_executor import TopSession
from tilewright.transforms.top.graph import Graph, keep_scale


def _bytes(kind: Attribute) -> int | None:
    """Return the size of a tensor type in bytes; None if numpy cannot hold it."""
    if not isinstance(kind, TensorType):
        return None
    try:
        item = top.numpy_dtype(kind.get_element_type()).itemsize
    except TypeError:
        return None
    size = item
    for dim in kind.get_shape():
        size *= dim
    return size


def _evaluate(graph: Graph, ops: list[Operation], wanted: Sequence[SSAValue]) -> list[Array]:
    """Run constant operations (in order, operands included) and return the wanted values."""
    function = FuncOp("main", ([], [value.type for value in wanted]))
    block = function.body.block
    mapping: dict[SSAValue, SSAValue] = {}
    for op in ops:
        block.add_op(op.clone(mapping))
    block.add_op(ReturnOp(*(mapping[value] for value in wanted)))
    names = [f"result{index}" for index in range(len(wanted))]
    function.attributes["result_names"] = ArrayAttr([StringAttr(name) for name in names])
    session = TopSession(ModuleOp([function]), graph.weights, threads=1, optimise=False)
    results = session.run({})
    return [results[name] for name in names]


def _with_sources(ops: list[top.TopOp], graph: Graph) -> list[Operation]:
    """Return the operations and the constants they use, in the block's order."""
    needed: set[Operation] = set(ops)
    for op in ops:
        needed.update(v.owner for v in op.operands if isinstance(v.owner, Operation))
    return [op for op in graph.block.ops if op in needed]


@dataclass(frozen=True)
class FoldConstantsPass(ModulePass):
    """Evaluate operations whose operands are all constants."""

    name = "top-fold-constants"

    max_bytes: int = 1 << 26

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Run the pass."""
        graph = Graph(ctx, op, self.name)
        folded = self._foldable(graph)
        if not folded:
            return
        inside = set(folded)
        kept = [
            layer
            for layer in folded
            if any(use.operation not in inside for result in layer.results for use in result.uses)
        ]
        if not kept:
            return
        try:
            self._fold(graph, folded, kept)
        except TilewrightError:
            # One of them cannot be run; find out which, and fold the others.
            for layer in folded:
                if any(not isinstance(v.owner, top.WeightOp | top.NoneOp) for v in layer.operands):
                    continue
                try:
                    self._fold(graph, [layer], [layer])
                except TilewrightError as error:
                    graph.refused(layer.layer_name, error.message)

    def _foldable(self, graph: Graph) -> list[top.TopOp]:
        """Return all operations that depend on constants only, in order."""
        constant: set[SSAValue] = set()
        folded: list[top.TopOp] = []
        for op in graph.block.ops:
            if isinstance(op, top.WeightOp | top.NoneOp):
                constant.update(op.results)
            elif isinstance(op, top.DequantizeLinearOp):
                continue  # its codes are wanted: `top-absorb-weights`, `top-absorb-qdq`
            elif isinstance(op, top.TopOp) and all(value in constant for value in op.operands):
                sizes = [_bytes(result.type) for result in op.results]
                if any(size is None for size in sizes):
                    continue
                sources = sum(_bytes(value.type) or 0 for value in op.operands)
                total = sum(size or 0 for size in sizes)
                if total > max(self.max_bytes, sources):
                    graph.refused(op.layer_name, f"its constant result would take {total} bytes")
                    continue
                constant.update(op.results)
                folded.append(op)
        return folded

    @staticmethod
    def _fold(graph: Graph, ops: list[top.TopOp], kept: list[top.TopOp]) -> None:
        """Evaluate `ops`, and replace those of `kept` by constants."""
        wanted = [result for layer in kept for result in layer.results if result.first_use]
        arrays = dict(zip(wanted, _evaluate(graph, _with_sources(ops, graph), wanted), strict=True))
        for layer in reversed(kept):
            for index, result in enumerate(layer.results):
                if result in arrays:
                    suffix = f":{index}" if index else ""
                    name = f"{layer.layer_name}{suffix}"
                    value = graph.weight(name, arrays[result], layer)
                    source = result
                    while isinstance(source.owner, top.ReshapeOp | top.TransposeOp):
                        source = source.owner.operands[0]
                    keep_scale(source, value)
                    result.replace_all_uses_with(value)
            graph.fired(layer.layer_name, "depends on constants only: evaluated")
            graph.remove(layer)
