"""The walk over the user's graph: names, scopes, constants, function bodies, branches.

The walk makes a flat list of records, one for each node that must run; nodes that can be computed
at compile time leave only their value. What nothing reads is dropped before anything is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.diagnostics import TilewrightError
from tilewright.dialects.onnx import UnknownValueError, element_type, schema_of
from tilewright.frontends.onnx.constants import constant_node
from tilewright.frontends.onnx.control import CONTROL
from tilewright.frontends.onnx.infer import Value, evaluate, infer_types, node_title
from tilewright.frontends.onnx.quantised import expand_quantised, widen_codes
from tilewright.frontends.onnx.reader import Model, domain_of
from tilewright.frontends.onnx.scope import (
    ABSENT,
    Record,
    Scope,
    constant,
    label_of,
    origins_of,
)
from tilewright.frontends.onnx.tensors import densify, load_tensor, malformed
from tilewright.spec.ops import SHAPE_OPERANDS, importable

if TYPE_CHECKING:
    from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto
    from onnx.defs import OpSchema

    from tilewright.ir.context import CompileContext

STAGE = "import-onnx"
FOLD_LIMIT = 1 << 16
"""Constant nodes with float results are computed at import up to this many elements.

The rest is left to the graph passes.
"""
INDEX_FOLD_LIMIT = 1 << 22
"""The same for integers and booleans, which shape arithmetic is made of."""
MAX_NODES = 200_000
MAX_DEPTH = 64


@dataclass
class GraphWalker:
    """Turns the graph of `model` into `records`."""

    model: Model
    ctx: CompileContext
    records: list[Record] = field(default_factory=list[Record])
    _names: dict[str, int] = field(default_factory=dict[str, int])
    _visited: int = 0

    def unique(self, name: str) -> str:
        """Return `name`, or `name#1`, `name#2`... if it is taken."""
        candidate = name
        while candidate in self._names:
            self._names[name] += 1
            candidate = f"{name}#{self._names[name]}"
        self._names[candidate] = 0
        return candidate

    def define_initializers(self, graph: GraphProto, scope: Scope, skip: set[str]) -> None:
        """Make the constants of a graph known."""
        for tensor in graph.initializer:
            if not tensor.name:
                raise malformed("an initializer has no name")
            if tensor.name not in skip:
                array = load_tensor(tensor, self.model.folder)
                value = constant(tensor.name, array, tensor.data_type)
                scope.define(tensor.name, value, "an initializer")
        for sparse in graph.sparse_initializer:
            name = sparse.values.name
            if name not in skip:
                dense = densify(sparse, self.model.folder)
                value = constant(name, dense, sparse.values.data_type)
                scope.define(name, value, "a sparse initializer")

    def walk(
        self,
        nodes: Sequence[NodeProto],
        scope: Scope,
        references: Mapping[str, AttributeProto] | None = None,
        depth: int = 0,
    ) -> None:
        """Process `nodes` in order; `references` are the values of a function's attributes."""
        if depth > MAX_DEPTH:
            raise malformed(
                "functions or branches are nested too deeply", f"the limit is {MAX_DEPTH}"
            )
        scope.later = {name for node in nodes for name in node.output if name}
        for index, node in enumerate(nodes):
            self._visited += 1
            if self._visited > MAX_NODES:
                raise malformed(
                    "the model has too many nodes", f"the limit is {MAX_NODES}, functions expanded"
                )
            self._node(_resolve(node, references), scope, nodes, index, depth)

    def _node(
        self, node: NodeProto, scope: Scope, nodes: Sequence[NodeProto], index: int, depth: int
    ) -> None:
        where = node_title(node)
        inputs: list[Value] = []
        for name in node.input:
            value = scope.find(name) if name else ABSENT
            if value is None:
                raise _undefined(name, where, scope, nodes, index)
            if value.pending is not None:
                raise value.pending
            inputs.append(value)
        outputs = self.outputs(node, inputs, scope, depth)
        for name, value in zip(node.output, outputs, strict=False):
            if name:
                scope.define(name, value, where)

    def outputs(
        self, node: NodeProto, inputs: list[Value], scope: Scope, depth: int
    ) -> list[Value]:
        """Return the values of the node's outputs, making records on the way."""
        domain = domain_of(node.domain)
        function = self.model.functions.get((domain, node.op_type))
        if function is not None:
            return self._call(function, node, inputs, scope, depth)
        written_out = expand_quantised(self, node, inputs, scope, depth)
        if written_out is not None:
            return written_out
        inputs = widen_codes(node, inputs)
        opset = scope.opsets.get(domain)
        schema = None if opset is None else schema_of(node.op_type, opset, domain)
        if opset is None or schema is None:
            reason = "no such operator is known"
            if opset is None and domain in ("", "ai.onnx.ml"):
                reason = "the model does not import its domain"
            elif not domain:
                reason = f"operator set {opset} has no such operator"
            return self.refuse(node, inputs, scope, reason)
        _check_arity(node, schema, opset)
        if node.op_type == "Constant" and not domain:
            return [constant_node(node, self.model.folder)]
        if node.op_type in CONTROL and not domain:
            return CONTROL[node.op_type](self, node, inputs, scope, depth)
        if not all(value.known for value in inputs if value.name):
            return self._unknown(node, inputs, scope, schema)
        if node.op_type in ("Shape", "Size") and not domain:
            return [_shape_value(node, inputs[0])]
        inferred, complaint = infer_types(node, schema, inputs, scope.opsets)
        if (folded := self._fold(node, schema, inputs, inferred)) is not None:
            return folded
        status = importable(domain, node.op_type)
        if status != "direct" and not (status == "function" and _has_body(schema)):
            reason = (
                status if status not in ("direct", "function") else f"not in operator set {opset}"
            )
            return self.refuse(node, inputs, scope, reason)
        if status == "function":
            body = _schema_function(node, schema, inputs, opset)
            defaults = {
                name: spec.default_value
                for name, spec in schema.attributes.items()
                if spec.default_value.name
            }
            return self._expand(body, node, inputs, scope, depth, defaults)
        outputs = self._typed_outputs(node, inputs, inferred, complaint)
        self.record(node, inputs, outputs, scope, opset)
        return outputs

    def _call(
        self,
        function: FunctionProto,
        node: NodeProto,
        inputs: list[Value],
        scope: Scope,
        depth: int,
    ) -> list[Value]:
        """Inline a function the model defines."""
        defaults = {item.name: item for item in function.attribute_proto}
        extra = {a.name for a in node.attribute} - {*function.attribute, *defaults}
        if extra:
            raise malformed(
                f"{node_title(node)} gives attributes its function does not have",
                ", ".join(sorted(extra)),
            )
        return self._expand(function, node, inputs, scope, depth, defaults)

    def record(
        self,
        node: NodeProto,
        inputs: list[Value],
        outputs: list[Value],
        scope: Scope,
        opset: int,
        refused: str = "",
    ) -> None:
        """Add a record for `node`, under a name of its own."""
        wish = scope.prefix + label_of(node)
        name = self.unique(wish)
        if name != wish:
            self.ctx.decide(name, STAGE, True, f"renamed: another node is called {wish!r}")
        self.records.append(
            Record(
                node.op_type,
                domain_of(node.domain),
                name,
                opset,
                inputs,
                outputs,
                list(node.attribute),
                refused,
            )
        )

    def refuse(
        self,
        node: NodeProto,
        inputs: list[Value],
        scope: Scope,
        reason: str,
        unknown: frozenset[str] = frozenset(),
    ) -> list[Value]:
        """Record a node that is not supported (or, with no reason, one behind such a node)."""
        origins = origins_of(inputs)
        outputs = [Value(name, origins=origins) for name in node.output]
        self.record(node, inputs, outputs, scope, 0, reason)
        self.records[-1].unknown = unknown
        return outputs

    def _unknown(
        self, node: NodeProto, inputs: list[Value], scope: Scope, schema: OpSchema
    ) -> list[Value]:
        """A node behind one that is not supported: look only at whether it is supported itself."""
        status = importable(domain_of(node.domain), node.op_type)
        supported = status == "direct" or (status == "function" and _has_body(schema))
        return self.refuse(node, inputs, scope, "" if supported else status)

    def _typed_outputs(
        self,
        node: NodeProto,
        inputs: list[Value],
        inferred: list[tuple[int, tuple[int | None, ...] | None]],
        complaint: str,
    ) -> list[Value]:
        origins = origins_of(inputs)
        outputs: list[Value] = []
        for name, (elem_type, shape) in zip(node.output, inferred, strict=True):
            if not name:
                outputs.append(Value(""))
                continue
            if elem_type == 0 or shape is None or any(dim is None for dim in shape):
                error = _no_shape(node, inputs, name, complaint)
                if not outputs:
                    raise error
                # Rules of old opsets leave out a second result (a mask): wrong only if it is read.
                outputs.append(Value("", pending=error))
                continue
            static = tuple(dim for dim in shape if dim is not None)
            outputs.append(Value(name, elem_type, static, origins=origins))
        return outputs

    def _fold(
        self,
        node: NodeProto,
        schema: OpSchema,
        inputs: list[Value],
        inferred: list[tuple[int, tuple[int | None, ...] | None]],
    ) -> list[Value] | None:
        """Compute a node of constant operands, if it is cheap to hold the result."""
        from onnx import TensorProto as T

        given = [value for value in inputs if value.name]
        if node.op_type == "DequantizeLinear":
            # The codes are wanted, not only what they stand for.
            return None
        if any(value.constant is None for value in given) or _is_random(schema):
            return None
        if sum(value.size for value in given) > INDEX_FOLD_LIMIT:
            return None
        for elem_type, shape in inferred:
            if shape is not None and all(dim is not None for dim in shape):
                floating = elem_type in (T.FLOAT, T.FLOAT16, T.DOUBLE, T.BFLOAT16)
                if prod(d or 0 for d in shape) > (FOLD_LIMIT if floating else INDEX_FOLD_LIMIT):
                    return None
            elif not _bounded(node.op_type):
                return None
        arrays = evaluate(node, schema, inputs)
        if arrays is None:
            return None
        values: list[Value] = []
        for name, array, (elem_type, _) in zip(node.output, arrays, inferred, strict=True):
            if name and not elem_type:
                return None
            values.append(constant(name, array, elem_type) if name else ABSENT)
        self.ctx.decide(node.name or node.output[0], STAGE, True, "computed at compile time")
        return values

    def given_out(
        self, scope: Scope, inner: str, outer: str, node: NodeProto, first_record: int
    ) -> Value:
        """Return the value an inner graph or a function gives out as `inner`.

        It takes the caller's name for it (reports cite that one) if it was made inside.
        """
        found = scope.find(inner)
        if found is None:
            raise malformed(f"{node_title(node)} gives out {inner!r}, which nothing defines")
        made_inside = any(
            found is value for record in self.records[first_record:] for value in record.outputs
        )
        if outer and made_inside:
            found.name = outer
        return found

    def _expand(
        self,
        function: FunctionProto,
        node: NodeProto,
        inputs: list[Value],
        scope: Scope,
        depth: int,
        defaults: Mapping[str, AttributeProto],
    ) -> list[Value]:
        """Inline a function of the model, or the body a schema gives for its operator."""
        opsets = {domain_of(entry.domain): entry.version for entry in function.opset_import}
        inner = Scope({**scope.opsets, **opsets}, None, f"{scope.prefix}{label_of(node)}/")
        if len(inputs) > len(function.input) or len(node.output) > len(function.output):
            raise malformed(f"{node_title(node)} has more inputs or outputs than its function")
        for index, name in enumerate(function.input):
            inner.names[name] = inputs[index] if index < len(inputs) else ABSENT
        references = {**defaults, **{item.name: item for item in node.attribute}}
        first_record = len(self.records)
        self.walk(function.node, inner, references, depth + 1)
        return [
            self.given_out(inner, name, outer, node, first_record) if outer else ABSENT
            for name, outer in zip(function.output, node.output, strict=False)
        ]


def _resolve(node: NodeProto, references: Mapping[str, AttributeProto] | None) -> NodeProto:
    """Put a call's values in place of references to attributes, in inner graphs too."""
    from onnx import NodeProto

    if references is None or not any(a.ref_attr_name or a.HasField("g") for a in node.attribute):
        return node
    result = NodeProto()
    result.CopyFrom(node)
    del result.attribute[:]
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            value = references.get(attribute.ref_attr_name)
            if value is not None:
                result.attribute.add().CopyFrom(value)
                result.attribute[-1].name = attribute.name
            continue
        copy = result.attribute.add()
        copy.CopyFrom(attribute)
        if attribute.HasField("g"):
            resolved = [_resolve(inner, references) for inner in attribute.g.node]
            del copy.g.node[:]
            copy.g.node.extend(resolved)
    return result


def _undefined(
    name: str, where: str, scope: Scope, nodes: Sequence[NodeProto], index: int
) -> TilewrightError:
    if name not in scope.later:
        return malformed(f"{where} reads {name!r}, which nothing defines")
    if cycle := find_cycle(nodes):
        return malformed("the graph has a cycle", " -> ".join(cycle))
    return malformed(
        "the nodes of the graph are not in topological order",
        f"{where} (node {index}) reads {name!r}, which a later node gives",
        hint="sort the graph, for example with `onnx.compose` or `onnxslim`",
    )


def find_cycle(nodes: Sequence[NodeProto]) -> list[str]:
    """Return tensor names along a cycle, first and last the same; empty if there is none."""
    producer = {name: node for node in nodes for name in node.output if name}
    state: dict[str, int] = {}
    for start in producer:
        path: list[tuple[str, Any]] = []
        if state.get(start):
            continue
        state[start] = 1
        path.append((start, iter(producer[start].input)))
        while path:
            name, rest = path[-1]
            step = next((n for n in rest if n in producer and state.get(n) != 2), None)
            if step is None:
                state[name] = 2
                path.pop()
            elif state.get(step) == 1:
                names = [item for item, _ in path]
                cycle = names[names.index(step) :]
                return [*reversed(cycle), cycle[-1]]
            else:
                state[step] = 1
                path.append((step, iter(producer[step].input)))
    return []


def _check_arity(node: NodeProto, schema: OpSchema, opset: int) -> None:
    for what, count, low, high in (
        ("inputs", len(node.input), schema.min_input, schema.max_input),
        ("outputs", len(node.output), schema.min_output, schema.max_output),
    ):
        if not low <= count <= high:
            span = f"{low}" if low == high else f"{low} to {high}"
            raise malformed(
                f"{node_title(node)} has {count} {what}",
                f"{node.op_type} takes {span} in operator set {opset}",
            )
    formals: list[Any] = list(schema.inputs)
    for index, name in enumerate(node.input):
        formal = formals[min(index, len(formals) - 1)]
        if not name and formal.option.name != "Optional":
            raise malformed(f"{node_title(node)}: operand {index} ({formal.name}) must be given")
    if node.op_type == "Split":
        # ONNX's inference believes the number and reads beyond its own arrays.
        parts = next((int(a.i) for a in node.attribute if a.name == "num_outputs"), None)
        if parts is not None and parts != len(node.output):
            raise malformed(
                f"{node_title(node)}: `num_outputs` is not {len(node.output)}", f"{parts}"
            )


def _shape_value(node: NodeProto, value: Value) -> Value:
    from onnx import TensorProto as T

    assert value.shape is not None
    if node.op_type == "Size":
        return constant(node.output[0], np.array(value.size, np.int64), T.INT64)
    bounds = {a.name: a.i for a in node.attribute}
    rank = len(value.shape)
    start, end = bounds.get("start", 0), bounds.get("end", rank)
    start, end = (min(max(v + rank if v < 0 else v, 0), rank) for v in (start, end))
    return constant(node.output[0], np.array(value.shape[start:end], np.int64), T.INT64)


def _is_random(schema: OpSchema) -> bool:
    return schema.name.startswith("Random") or schema.name in (
        "Bernoulli",
        "Multinomial",
        "Dropout",
    )


def _bounded(op_type: str) -> bool:
    """Whether a result of unknown size cannot be larger than the operands by much."""
    return op_type in ("NonZero", "Unique", "Compress", "StringSplit", "StringConcat")


def _has_body(schema: OpSchema) -> bool:
    untyped: Any = schema  # ONNX's stubs lack these members.
    return bool(untyped.has_function or untyped.has_context_dependent_function)


def _schema_function(
    node: NodeProto, schema: OpSchema, inputs: list[Value], opset: int
) -> FunctionProto:
    """Return the body ONNX defines for an operator, for these operand types."""
    from onnx import FunctionProto

    untyped: Any = schema
    version = max((v for v in untyped.function_opset_versions if v <= opset), default=0)
    if version:
        return FunctionProto.FromString(untyped.get_function_with_opset_version(version))
    versions: list[int] = untyped.context_dependent_function_opset_versions
    version = max((v for v in versions if v <= opset), default=0)
    if not version:
        raise TilewrightError("E0104", f"{node_title(node)} has no body in operator set {opset}")
    types = [value.type_proto.SerializeToString() if value.name else b"" for value in inputs]
    body = untyped.get_context_dependent_function_with_opset_version(
        version, node.SerializeToString(), types
    )
    return FunctionProto.FromString(body)


def _no_shape(node: NodeProto, inputs: list[Value], output: str, complaint: str) -> TilewrightError:
    where = node_title(node)
    if complaint:
        return TilewrightError(
            "E0103", f"the operands of {where} do not fit", [complaint, *_shown(inputs)]
        )
    operands = SHAPE_OPERANDS.get(node.op_type, range(len(inputs)))
    dynamic = [
        inputs[i]
        for i in operands
        if i < len(inputs) and inputs[i].name and inputs[i].constant is None
    ]
    if not dynamic:
        return TilewrightError(
            "E0103", f"no static shape for {output!r}, which {where} gives", _shown(inputs)
        )
    origins = sorted(frozenset().union(*(value.origins for value in dynamic)))
    error = UnknownValueError(
        "E0103",
        f"the shape of {output!r}, which {where} gives, depends on values known only at run time",
        [
            f"operand {value.name!r}, computed from {', '.join(sorted(value.origins))}"
            for value in dynamic
        ],
        f"bind the input to a constant: {', '.join(origins)}" if origins else None,
    )
    error.inputs = tuple(origins)
    return error


def _shown(inputs: Sequence[Value]) -> list[str]:
    return [
        f"operand {value.name!r}: {element_type(value.elem_type) or value.elem_type} "
        f"{list(value.shape or ())}"
        for value in inputs
        if value.name
    ]
