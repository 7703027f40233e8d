"""`convert-onnx-to-top`: the user's graph in the hardware-independent dialect.

    %2 = "onnx.Conv"(%0, %1, %none) {name = "c", auto_pad = "SAME_UPPER"} : ...
  becomes
    %2 = top.conv %0, %1, %none {name = "c", strides = ..., pads = ..., dilations = ..., group = 1}
    : ...

Each operator has a rule (`transforms/onnx/`), which reads the node by the meaning of its opset. A
node that cannot be expressed is refused; all refusals of a model are reported at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from typing_extensions import override
from xdsl.context import Context
from xdsl.dialects.builtin import ArrayAttr, ModuleOp, NoneType, StringAttr
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass

from tilewright.diagnostics import TilewrightError
from tilewright.dialects import top
from tilewright.dialects.onnx import NoneOp, OnnxOp, UnknownValueError, WeightAttr, opset_of
from tilewright.ir.context import CompileContext, compile_context
from tilewright.transforms.onnx import (
    einsum,
    elementwise,
    quantised,
    recurrent,
    shaping,
    spatial,
)
from tilewright.transforms.onnx.base import RULES, Namer, Node, RefusedError, UnknownOperandError

RULE_MODULES = (einsum, elementwise, quantised, recurrent, shaping, spatial)
"""Importing these fills `RULES`."""


@dataclass
class _Refusals:
    """What was refused in a module."""

    lines: list[str] = field(default_factory=list[str])
    unknown: set[str] = field(default_factory=set[str])
    """Graph inputs whose values would have been needed."""


@dataclass(frozen=True)
class ConvertOnnxToTopPass(ModulePass):
    """Replace every op of the `onnx` dialect by ops of `top`.

    Requires: a module as `import_onnx` makes it. Ensures: no op of `onnx` remains; constants
    nothing reads are gone from the store.

    Raises:
        TilewrightError: E0104, listing every node that cannot be expressed, and why
            (`UnknownValueError` if binding some inputs to constants could help).
    """

    name = "convert-onnx-to-top"

    @override
    def apply(self, ctx: Context, op: ModuleOp) -> None:
        context = compile_context(ctx)
        refusals = _Refusals()
        changed = False
        for function in [item for item in op.ops if isinstance(item, FuncOp)]:
            changed = _convert(function, context, refusals) or changed
        if refusals.lines:
            count = len(refusals.lines)
            message = f"{count} node{'s'[: count != 1]} cannot be compiled as written"
            if not refusals.unknown:
                raise TilewrightError("E0104", message, refusals.lines)
            names = sorted(refusals.unknown)
            hint = f"bind to constants: {', '.join(names)}"
            error = UnknownValueError("E0104", message, refusals.lines, hint)
            error.inputs = tuple(names)
            raise error
        if changed:
            context.weights.keep_only(
                {item.layer_name for item in op.walk() if isinstance(item, top.WeightOp)}
            )


def _convert(function: FuncOp, ctx: CompileContext, refusals: _Refusals) -> bool:
    """Convert one function; return whether it held any op of `onnx`."""
    block = function.body.block
    old = [op for op in block.ops if isinstance(op, OnnxOp | NoneOp)]
    namer = Namer([op.node_name for op in old if isinstance(op, OnnxOp)])
    values: dict[SSAValue, SSAValue] = {}
    for op in old:
        operands = [values.get(value, value) for value in op.operands]
        if any(isinstance(value.owner, OnnxOp | NoneOp) for value in operands):
            # Behind a refused node there is nothing to build on.
            continue
        made = _convert_op(op, operands, ctx, namer, refusals)
        if made is None:
            continue
        for item in made[0]:
            block.insert_op_before(item, op)
        for result, value in zip(op.results, made[1], strict=False):
            if value is not None:
                values[result] = value
                value.name_hint = value.name_hint or result.name_hint
    if refusals.lines:
        return bool(old)
    last = block.last_op
    assert isinstance(last, ReturnOp)
    for index, operand in enumerate(last.operands):
        last.operands[index] = values.get(operand, operand)
    for op in reversed(old):
        op.detach()
        op.erase()
    for op in [item for item in block.ops if isinstance(item, top.WeightOp | top.NoneOp)]:
        if not any(result.uses for result in op.results):
            op.detach()
            op.erase()
    return bool(old)


Made: TypeAlias = tuple[Sequence[Operation], Sequence[SSAValue | None]]
"""New ops, and the values that stand for the results of the old one."""


def _convert_op(
    op: OnnxOp | NoneOp,
    operands: list[SSAValue],
    ctx: CompileContext,
    namer: Namer,
    refusals: _Refusals,
) -> Made | None:
    """Convert one op; None if it is refused."""
    if isinstance(op, NoneOp):
        none = top.NoneOp.create(result_types=[NoneType()])
        return [none], none.results
    if op.op_type == "Constant":
        attribute = op.attributes.get("value")
        assert isinstance(attribute, WeightAttr)
        weight = top.WeightOp.create(
            attributes={"name": StringAttr(attribute.store_name.data)},
            result_types=[op.results[0].type],
        )
        return [weight], weight.results
    opset = opset_of(op)
    if opset is None:
        raise TilewrightError(
            "E0501",
            f'the module does not say by which operator set "{op.node_name}" is meant',
            ["its attribute `onnx.opset` gives no version for the operator's domain"],
        )
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
    except RefusedError as error:
        refusals.lines.append(f'{op.op_type} "{op.node_name}": {error}')
        if isinstance(error, UnknownOperandError):
            refusals.unknown |= _graph_inputs(op.operands[error.index])
        ctx.decide(op.node_name, ConvertOnnxToTopPass.name, False, str(error))
        return None
    return node.made, results


def _graph_inputs(value: SSAValue) -> set[str]:
    """Return the names of the function's arguments that `value` is computed from."""
    found: set[str] = set()
    seen: set[SSAValue] = set()
    todo = [value]
    while todo:
        item = todo.pop()
        if item in seen:
            continue
        seen.add(item)
        owner = item.owner
        if isinstance(owner, Operation):
            todo.extend(owner.operands)
        elif isinstance(function := owner.parent_op(), FuncOp):
            names = function.attributes.get("arg_names")
            index = owner.args.index(item)
            if isinstance(names, ArrayAttr) and isinstance(names.data[index], StringAttr):
                found.add(names.data[index].data)
    return found
