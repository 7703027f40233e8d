"""`import_onnx`: a file, or a model in memory, to a module of the `onnx` dialect."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from xdsl.dialects.builtin import (
    ArrayAttr,
    DictionaryAttr,
    FunctionType,
    IntegerAttr,
    ModuleOp,
    NoneType,
    StringAttr,
    TensorType,
    i64,
)
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.utils.exceptions import VerifyException

from tilewright.diagnostics import TilewrightError
from tilewright.dialects.onnx import (
    NoneOp,
    UnknownValueError,
    WeightAttr,
    element_type,
    encode_attribute,
    make_op,
)
from tilewright.frontends.onnx.graph import STAGE, GraphWalker
from tilewright.frontends.onnx.infer import Value
from tilewright.frontends.onnx.inputs import ShapeBinder, Shapes, check_tensor_input
from tilewright.frontends.onnx.reader import Model, attribute_value, read_model
from tilewright.frontends.onnx.scope import Record, Scope, constant
from tilewright.frontends.onnx.tensors import Array, load_tensor, malformed

if TYPE_CHECKING:
    from onnx import AttributeProto, ModelProto

    from tilewright.ir.context import CompileContext

INFINITY_TAKERS = frozenset(
    """
    Clip Pad Where Min Max Add Sub Equal Less LessOrEqual Greater GreaterOrEqual IsInf Expand Concat
    Identity Cast Reshape Unsqueeze Squeeze Slice Gather Tile Trilu ScatterND ScatterElements Resize
    """.split()  # noqa: SIM905 - a table of words
)
"""Operators that take an infinite constant on purpose: bounds, fillers, attention masks."""


CHUNK = 1 << 22
"""Elements looked at in one go."""


def import_onnx(
    source: Path | str | ModelProto,
    shapes: Shapes | None,
    ctx: CompileContext,
    bind: Mapping[str, Array] | None = None,
) -> ModuleOp:
    """Import a model; its weights go to `ctx.weights`, decisions to `ctx`.

    Args:
        source: path of the file (external data are found beside it), or a model in memory.
        shapes: static shapes by input name, or one size by name of a symbolic dimension.
        ctx: receives weights and decisions.
        bind: graph inputs to be turned into constants.

    Returns:
        A verified module: one function `main` with the attributes `arg_names` and `result_names`
        (the user's tensor names); all shapes static.

    Raises:
        TilewrightError: E0101 unreadable, E0102 operators not supported (all of them), E0103
            shapes, E0104 types,
            E0105 values that are not finite, E0106 malformed.
    """
    return _import(read_model(source), shapes or {}, ctx, bind or {})


def _import(
    model: Model, shapes: Shapes, ctx: CompileContext, bind: Mapping[str, Array]
) -> ModuleOp:
    graph = model.proto.graph
    walker = GraphWalker(model, ctx)
    scope = Scope(model.opsets)
    inputs = _define_inputs(model, walker, scope, shapes, bind)
    walker.walk(graph.node, scope)
    outputs: list[tuple[str, Value]] = []
    for info in graph.output:
        value = scope.names.get(info.name)
        if value is None:
            raise malformed(f"nothing gives the graph output {info.name!r}")
        if value.pending is not None:
            raise value.pending
        if any(name == info.name for name, _ in outputs):
            raise malformed(f"the graph output {info.name!r} is listed twice")
        outputs.append((info.name, value))
    if not outputs:
        raise malformed("the graph has no outputs")
    live = _live_records(walker.records, [value for _, value in outputs])
    _refuse_unsupported(live, outputs)
    return _Emitter(model, ctx, live).emit(inputs, outputs)


def _define_inputs(
    model: Model,
    walker: GraphWalker,
    scope: Scope,
    shapes: Shapes,
    bind: Mapping[str, Array],
) -> list[Value]:
    """Define initialisers and graph inputs; return the inputs that remain."""
    graph = model.proto.graph
    defaults = {t.name for t in graph.initializer} | {
        t.values.name for t in graph.sparse_initializer
    }
    infos = [info for info in graph.input if info.name not in defaults]
    if unknown := sorted(set(bind) - {info.name for info in graph.input}):
        raise TilewrightError(
            "E0103",
            f"the model has no input {unknown[0]!r} to bind",
            [f"inputs: {', '.join(info.name for info in graph.input)}"],
        )
    walker.define_initializers(graph, scope, set(bind))
    for info in graph.input:
        if info.name in defaults and info.name not in bind and model.proto.ir_version >= 4:
            walker.ctx.decide(
                info.name, STAGE, True, "the input has a default value, which is now a constant"
            )
    binder = ShapeBinder([info for info in infos if info.name not in bind], shapes)
    inputs: list[Value] = []
    for info in graph.input:
        if info.name in bind:
            value = _bound(info.name, check_tensor_input(info), bind[info.name])
            scope.define(info.name, value, "a graph input")
            walker.ctx.decide(info.name, STAGE, True, "bound to a constant by the user")
    for info in infos:
        if info.name in bind:
            continue
        if not info.name:
            raise malformed("a graph input has no name")
        elem_type = check_tensor_input(info)
        value = Value(info.name, elem_type, None, origins=frozenset({info.name}))
        scope.define(info.name, value, "a graph input")
        if element_type(elem_type) is None:
            raise TilewrightError(
                "E0104",
                f"input {info.name!r} holds {_type_name(elem_type)}",
                ["supported: float16, float32, float64, integers of 8 to 64 bits, booleans"],
            )
        value.shape = binder.bind(info)
        inputs.append(value)
    return inputs


def _bound(name: str, elem_type: int, array: Array) -> Value:
    from onnx import helper

    wanted = np.dtype(helper.tensor_dtype_to_np_dtype(elem_type))
    if wanted.kind != "O" and array.dtype != wanted:
        raise TilewrightError(
            "E0103",
            f"the constant for input {name!r} has the wrong type",
            [f"it is {array.dtype}; the model says {wanted}"],
        )
    return constant(name, array, elem_type)


def _type_name(elem_type: int) -> str:
    from onnx import TensorProto

    try:
        return TensorProto.DataType.Name(elem_type).lower()
    except ValueError:
        return f"the unknown type {elem_type}"


def _live_records(records: list[Record], outputs: list[Value]) -> list[Record]:
    """Return the records something depends on, in order."""
    wanted = {id(value) for value in outputs}
    live: list[Record] = []
    for record in reversed(records):
        if any(id(value) in wanted for value in record.outputs):
            live.append(record)
            wanted.update(id(value) for value in record.inputs)
    return live[::-1]


def _refuse_unsupported(records: list[Record], outputs: list[tuple[str, Value]]) -> None:
    """Name every operator that cannot be compiled, with all its nodes.

    Raises:
        TilewrightError: E0102.
    """
    found: dict[tuple[str, str, str], list[str]] = {}
    for record in records:
        reason = record.refused
        if not reason:
            strange = sorted(
                {
                    _type_name(value.elem_type)
                    for value in [*record.inputs, *record.outputs]
                    if value.name and value.known and element_type(value.elem_type) is None
                }
            )
            reason = f"tensors of {', '.join(strange)} are not supported" if strange else ""
        if reason:
            key = (record.domain or "ai.onnx", record.op_type, reason)
            found.setdefault(key, []).append(record.name)
    for name, value in outputs:
        if value.known and element_type(value.elem_type) is None:
            raise TilewrightError("E0104", f"output {name!r} holds {_type_name(value.elem_type)}")
    if found:
        kinds = len({(domain, op_type) for domain, op_type, _ in found})
        count = sum(map(len, found.values()))
        unknown = [record.unknown for record in records if record.refused]
        error = UnknownValueError(
            "E0102",
            f"the model uses {kinds} operator{'s'[: kinds != 1]} that cannot be compiled "
            f"({count} node{'s'[: count != 1]})",
            [
                f"{op_type} (domain {domain}): {reason}; nodes: "
                + ", ".join(f'"{n}"' for n in names)
                for (domain, op_type, reason), names in sorted(found.items())
            ],
            "docs/reference/ops.md lists what is supported",
        )
        if all(unknown):
            error.inputs = tuple(sorted(frozenset().union(*unknown)))
        raise error


class _Emitter:
    """Writes records as ops."""

    def __init__(self, model: Model, ctx: CompileContext, records: list[Record]) -> None:
        self.model = model
        self.ctx = ctx
        self.records = records
        self.block = Block()
        self.none: SSAValue | None = None
        self.readers: dict[int, list[Record]] = {}
        for record in records:
            for value in record.inputs:
                self.readers.setdefault(id(value), []).append(record)

    def emit(self, inputs: list[Value], outputs: list[tuple[str, Value]]) -> ModuleOp:
        """Return the module."""
        arg_types = [self._type(value) for value in inputs]
        for value, arg_type in zip(inputs, arg_types, strict=True):
            value.ssa = self.block.insert_arg(arg_type, len(self.block.args))
            _hint(value.ssa, value.name)
        for record in self.records:
            self._emit_record(record)
        results = [self._use(value) for _, value in outputs]
        self.block.add_op(ReturnOp(*results))
        function = FuncOp(
            "main",
            FunctionType.from_lists(arg_types, [r.type for r in results]),
            Region(self.block),
        )
        function.attributes["arg_names"] = ArrayAttr([StringAttr(value.name) for value in inputs])
        function.attributes["result_names"] = ArrayAttr([StringAttr(name) for name, _ in outputs])
        versions: dict[str, Attribute] = {
            domain: IntegerAttr(version, i64)
            for domain, version in sorted(self.model.opsets.items())
        }
        return ModuleOp([function], {"onnx.opset": DictionaryAttr(versions)})

    def _type(self, value: Value) -> TensorType[Attribute]:
        element = element_type(value.elem_type)
        assert element is not None, value.name
        assert value.shape is not None, value.name
        return TensorType(element, value.shape)

    def _use(self, value: Value) -> SSAValue:
        """Return the SSA value, making constants when first used."""
        if not value.name:
            if self.none is None:
                op = NoneOp.make()
                self._add(op)
                self.none = op.results[0]
            return self.none
        if value.ssa is None:
            assert value.constant is not None, value.name
            self._check_finite(value)
            stored = self.ctx.weights.add(value.name, value.constant)
            attributes: dict[str, Attribute] = {"value": WeightAttr(StringAttr(stored))}
            op = make_op("Constant", [], [self._type(value)], value.name, [value.name], attributes)
            self._add(op)
            value.ssa = op.results[0]
            _hint(value.ssa, value.name)
        return value.ssa

    def _add(self, op: Operation) -> None:
        self.block.add_op(op)

    def _check_finite(self, value: Value) -> None:
        assert value.constant is not None
        nans, infinite = count_not_finite(value.constant)
        readers = self.readers.get(id(value), [])
        where = [f"read by {record.op_type} {record.name!r}" for record in readers]
        if nans:
            message = f"the constant {value.name!r} has {nans} values that are not numbers (NaN)"
            raise TilewrightError("E0105", message, where)
        wrong = any(record.op_type not in INFINITY_TAKERS for record in readers)
        if infinite and value.size > 1 and wrong:
            message = f"the constant {value.name!r} has {infinite} infinite values"
            raise TilewrightError("E0105", message, where)

    def _emit_record(self, record: Record) -> None:
        operands = [self._use(value) for value in record.inputs]
        types = [self._type(v) if v.name else NoneType() for v in record.outputs]
        attributes: dict[str, Attribute] = {}
        for attribute in record.attributes:
            if attribute.name in attributes:
                raise malformed(f"{record.op_type} {record.name!r} has {attribute.name!r} twice")
            attributes[attribute.name] = self._attribute(record, attribute)
        if record.opset != self.model.opsets.get(record.domain):
            attributes["opset"] = IntegerAttr(record.opset, i64)
        names = [value.name for value in record.outputs]
        op = make_op(record.op_type, operands, types, record.name, names, attributes)
        self._add(op)
        for value, result in zip(record.outputs, op.results, strict=True):
            value.ssa = result
            _hint(result, value.name)
        # Checked here and not over the module, so that the message can cite the user's node.
        try:
            op.verify_against(record.opset)
        except VerifyException as error:
            raise malformed(f"{record.op_type} {record.name!r} is not valid", str(error)) from None

    def _attribute(self, record: Record, attribute: AttributeProto) -> Attribute:
        from onnx import AttributeProto as A

        if attribute.type == A.TENSOR:
            name = f"{record.name}.{attribute.name}"
            array = load_tensor(attribute.t, self.model.folder)
            if count_not_finite(array)[0]:
                raise TilewrightError("E0105", f"the attribute {name!r} has values that are NaN")
            stored = self.ctx.weights.add(name, array)
            return WeightAttr(StringAttr(stored))
        try:
            return encode_attribute(attribute_value(attribute))
        except TypeError as error:
            raise TilewrightError(
                "E0104",
                f"{record.op_type} {record.name!r}: attribute {attribute.name!r} is a {error}",
                ["such attributes are not supported"],
            ) from None


def count_not_finite(array: Array) -> tuple[int, int]:
    """Return how many values are not numbers, and how many infinite; takes little memory."""
    if array.dtype.kind != "f" or not array.size:
        return 0, 0
    with np.errstate(over="ignore", invalid="ignore"):
        # One value that is not finite makes the sum so; the reverse need not hold.
        if np.isfinite(array.sum()):
            return 0, 0
    nans = infinite = 0
    flat = array.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        part = flat[start : start + CHUNK]
        nans += int(np.isnan(part).sum())
        infinite += int(np.isinf(part).sum())
    return nans, infinite


def _hint(value: SSAValue, name: str) -> None:
    if name and SSAValue.is_valid_name(name):
        value.name_hint = name
