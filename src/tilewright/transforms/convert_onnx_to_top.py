"""`convert-onnx-to-top`: the user's graph in the hardware-independent dialect.

    %2 = "onnx.Conv"(%0, %1, %none) {name = "c", auto_pad = "SAME_UPPER"} : ...
  becomes
    %2 = top.conv %0, %1, %none {name = "c", strides = ..., pads = ..., dilations = ..., group = 1} : ...

Each operator has a rule (`transforms/onnx/`), which reads the node by the meaning of its opset. A node that cannot be expressed is
refused; all refusals of a model are reported at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, NoneType, StringAttr
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.utils.exceptions import VerifyException

from tilewright.diagnostics import TilewrightError
from tilewright.dialects import top
from tilewright.dialects.onnx import NoneOp, OnnxOp, WeightAttr, opset_of
from tilewright.ir.context import CompileContext, compile_context
from tilewright.transforms.onnx import elementwise, shaping, spatial
from tilewright.transforms.onnx.base import RULES, Namer, Node, RefusedError

RULE_MODULES = (elementwise, shaping, spatial)
"""Importing these fills `RULES`."""


@dataclass(frozen=True)
class ConvertOnnxToTopPass(ModulePass):
    """Replace every op of the `onnx` dialect by ops of `top`.

    Requires: a module as `import_onnx` makes it. Ensures: no op of `onnx` remains; constants nothing reads are gone from the store.

    Raises:
        TilewrightError: E0104, listing every node that cannot be expressed, and why.
    """

    name = "convert-onnx-to-top"

    @override
    def apply(self, ctx: Context, op: ModuleOp) -> None:
        context = compile_context(ctx)
        refusals: list[str] = []
        changed = False
        for function in [item for item in op.ops if isinstance(item, FuncOp)]:
            changed = _convert(function, context, refusals) or changed
        if refusals:
            raise TilewrightError(
                "E0104",
                f"{len(refusals)} node{'s'[: len(refusals) != 1]} cannot be compiled as written",
                refusals,
            )
        if not changed:
            return
        context.weights.keep_only(
            {item.layer_name for item in op.walk() if isinstance(item, top.WeightOp)}
        )


def _convert(function: FuncOp, ctx: CompileContext, refusals: list[str]) -> bool:
    """Convert one function; return whether it held any op of `onnx`."""
    block = function.body.block
    old = [op for op in block.ops if isinstance(op, OnnxOp | NoneOp)]
    namer = Namer([op.node_name for op in old if isinstance(op, OnnxOp)])
    values: dict[SSAValue, SSAValue] = {}
    for op in old:
        if isinstance(op, OnnxOp):
            # Behind a refused node there is nothing to build on.
            known = all(isinstance(v.owner, top.TopOp | top.NoneOp) or v in values or not
                        isinstance(v.owner, OnnxOp | NoneOp) for v in op.operands)
            made = _convert_node(op, [values.get(v, v) for v in op.operands], ctx, namer, refusals) if known else None
            results = made[1] if made is not None else None
            new = made[0] if made is not None else []
        else:
            none = top.NoneOp.create(result_types=[NoneType()])
            new, results = [none], [none.results[0]]
        for item in new:
            block.insert_op_before(item, op)
        if results is not None:
            for result, value in zip(op.results, results, strict=False):
                if value is not None:
                    values[result] = value
                    if value.name_hint is None:
                        value.name_hint = result.name_hint
    if refusals:
        return bool(old)
    last = block.last_op
    assert isinstance(last, ReturnOp)
    for index, operand in enumerate(last.operands):
        last.operands[index] = values.get(operand, operand)
    for op in reversed(old):
        op.detach()
        op.erase(safe_erase=False)
    for op in [o for o in block.ops if isinstance(o, top.WeightOp | top.NoneOp)]:
        if not any(result.uses for result in op.results):
            op.detach()
            op.erase()
    return bool(old)


def _convert_node(
    op: OnnxOp,
    operands: list[SSAValue],
    ctx: CompileContext,
    namer: Namer,
    refusals: list[str],
) -> tuple[list[Operation], list[SSAValue | None]] | None:
    """Return the new ops and the values of the results; None if the node is refused."""
    if op.op_type == "Constant":
        attribute = op.attributes.get("value")
        assert isinstance(attribute, WeightAttr)
        weight = top.WeightOp.create(
            attributes={"name": StringAttr(attribute.store_name.data)},
            result_types=[op.results[0].type],
        )
        return [weight], [weight.results[0]]
    opset = opset_of(op)
    assert opset is not None
    node = Node(op, opset, operands, ctx, namer)
    try:
        apply = RULES.get(op.op_type)
        if apply is None:
            raise RefusedError("the operator is not supported")
        found = apply(node)
        results = [found] if isinstance(found, SSAValue) else list(found)
        node.finish(results)
        if left := node.leftovers():
            raise RefusedError(f"{', '.join(left)}: not supported")
    except (RefusedError, VerifyException) as error:
        refusals.append(f'{op.op_type} "{op.node_name}": {error}')
        ctx.decide(op.node_name, ConvertOnnxToTopPass.name, False, str(error))
        return None
    return node.made, results
