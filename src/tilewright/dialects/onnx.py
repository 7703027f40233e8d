"""The `onnx` dialect: the user's graph as found, one op per source node.

Classes are made on demand, one for each operator name in ONNX's own schemas; what an op must look
like (arity, attribute names and types, element types) is read from the schema of the module's opset
when it is verified, so that no second table can drift. ::

    %2 = "onnx.Conv"(%0, %1, %none) {name = "conv1", outputs = ["t"], strides = array<i64: 2, 2>}
        : (tensor<1x3x8x8xf32>, tensor<4x3x3x3xf32>, none) -> tensor<1x4x4x4xf32>

An absent optional operand is the result of `onnx.none`; an absent optional result has type `none`.
Tensors are `#onnx.weight<"name">`, a name in the weight store. Attributes `name`, `outputs`,
`bodies`, `domain`, `op_type` and `opset` are ours and never the user's; `opset` is there on ops
that come from a function of another opset than the module's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override
from xdsl.dialects.builtin import (
    ArrayAttr,
    DenseArrayBase,
    DictionaryAttr,
    Float16Type,
    Float32Type,
    Float64Type,
    FloatAttr,
    IntegerAttr,
    IntegerType,
    ModuleOp,
    NoneType,
    Signedness,
    StringAttr,
    TensorType,
    f32,
    i64,
)
from xdsl.ir import Attribute, Dialect, Operation, ParametrizedAttribute, Region, SSAValue
from xdsl.irdl import irdl_attr_definition, param_def, traits_def
from xdsl.utils.exceptions import VerifyException

from tilewright.diagnostics import TilewrightError

if TYPE_CHECKING:
    from onnx.defs import OpSchema

OURS = frozenset({"name", "outputs", "bodies", "domain", "op_type", "opset"})
"""Attribute names that are not the user's."""

DOMAINS = ("", "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training", "ai.onnx.training")


class UnknownValueError(TilewrightError):
    """Something depends on a value or a shape that is not known at compile time.

    Attributes:
        inputs: the graph inputs that must be bound to constants; empty where a shape is open.
    """

    inputs: tuple[str, ...] = ()


@irdl_attr_definition
class WeightAttr(ParametrizedAttribute):
    """A tensor attribute, by its name in the weight store: `#onnx.weight<"conv1.w">`."""

    name = "onnx.weight"

    store_name: StringAttr = param_def()


def element_type(elem_type: int) -> Attribute | None:
    """Return the MLIR element type of a `TensorProto.DataType`; None if there is none here."""
    return _element_types().get(elem_type)


@cache
def _element_types() -> dict[int, Attribute]:
    from onnx import TensorProto as T

    table: dict[int, Attribute] = {
        T.FLOAT: Float32Type(),
        T.FLOAT16: Float16Type(),
        T.DOUBLE: Float64Type(),
        T.BOOL: IntegerType(1),
    }
    for signed, unsigned, width in (
        (T.INT8, T.UINT8, 8),
        (T.INT16, T.UINT16, 16),
        (T.INT32, T.UINT32, 32),
        (T.INT64, T.UINT64, 64),
    ):
        table[signed] = IntegerType(width)
        table[unsigned] = IntegerType(width, Signedness.UNSIGNED)
    return table


def onnx_type_string(attribute: Attribute) -> str:
    """Return the schema's spelling of a type, such as `tensor(float)`; empty if there is none."""
    from onnx import TensorProto

    if not isinstance(attribute, TensorType):
        return ""
    for code, element in _element_types().items():
        if element == attribute.element_type:
            return f"tensor({TensorProto.DataType.Name(code).lower()})"
    return ""


class OnnxOp(Operation):
    """Base of all ops that stand for a node of the user's graph."""

    op_type: ClassVar[str] = ""
    traits = traits_def()

    @property
    def node_name(self) -> str:
        """The user's node name, made unique."""
        attribute = self.attributes.get("name")
        return attribute.data if isinstance(attribute, StringAttr) else ""

    @property
    def output_names(self) -> list[str]:
        """The user's names of the results; empty for those left out."""
        attribute = self.attributes.get("outputs")
        if not isinstance(attribute, ArrayAttr):
            return []
        return [item.data for item in attribute if isinstance(item, StringAttr)]

    def user_attributes(self) -> dict[str, Attribute]:
        """The attributes written in the user's node."""
        return {key: value for key, value in self.attributes.items() if key not in OURS}

    def verify_(self) -> None:
        """Check arity, attributes and element types against ONNX's schema of the module's opset."""
        version = opset_of(self)
        if version is not None:
            self.verify_against(version)

    def verify_against(self, version: int) -> None:
        """Check arity, attributes and element types against the schema of opset `version`.

        Raises:
            VerifyException: something does not fit.
        """
        if self.op_type == "Constant":
            # Stands for initialisers too, which may hold types that old Constant nodes may not.
            self._verify_constant()
            return
        schema = schema_of(self.op_type, version)
        if schema is None:
            raise VerifyException(f"opset {version} has no operator {self.op_type}")
        self._verify_arity(schema, version)
        self._verify_attributes(schema, version)
        self._verify_types(schema)

    def _verify_constant(self) -> None:
        results = [result.type for result in self.results]
        if self.operands or len(results) != 1 or not isinstance(results[0], TensorType):
            raise VerifyException("Constant takes no operands and gives one tensor")
        if not isinstance(self.attributes.get("value"), WeightAttr):
            raise VerifyException('Constant needs `value` as #onnx.weight<"name">')

    def _verify_arity(self, schema: OpSchema, version: int) -> None:
        for what, count, low, high in (
            ("inputs", len(self.operands), schema.min_input, schema.max_input),
            ("outputs", len(self.results), schema.min_output, schema.max_output),
        ):
            if not low <= count <= high:
                raise VerifyException(
                    f"{self.op_type} takes {low} to {high} {what} in opset {version}, not {count}"
                )

    def _verify_attributes(self, schema: OpSchema, version: int) -> None:
        known = schema.attributes
        body_names = _strings(self.attributes.get("bodies"))
        for key, value in self.user_attributes().items():
            if key not in known:
                raise VerifyException(
                    f"{self.op_type} has no attribute {key!r} in opset {version}; "
                    f"legal: {', '.join(sorted(known)) or 'none'}"
                )
            wanted = _enum_name(known[key].type)
            kind = _attribute_kind(value)
            if kind != wanted and not (kind == "EMPTY" and wanted.endswith("S")):
                raise VerifyException(f"attribute {key!r} must be {wanted}, not {value}")
        present = {*self.user_attributes(), *body_names}
        for key, spec in known.items():
            if spec.required and key not in present:
                raise VerifyException(f"{self.op_type} needs the attribute {key!r}")

    def _verify_types(self, schema: OpSchema) -> None:
        bound: dict[str, str] = {}
        constraints = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
        for what, values, formals in (
            ("input", self.operands, schema.inputs),
            ("output", self.results, schema.outputs),
        ):
            for index, value in enumerate(values):
                formal = formals[min(index, len(formals) - 1)]
                if isinstance(value.type, NoneType):
                    if _enum_name(formal.option) == "Single":
                        raise VerifyException(f"{what} {index} ({formal.name}) must be given")
                    continue
                found = onnx_type_string(value.type)
                legal = constraints.get(formal.type_str, {formal.type_str})
                if found not in legal:
                    raise VerifyException(
                        f"{what} {index} ({formal.name}) must be one of "
                        f"{', '.join(sorted(legal))}, not {found or value.type}"
                    )
                homogeneous = _enum_name(formal.option) != "Variadic" or formal.is_homogeneous
                if formal.type_str in constraints and homogeneous:
                    first = bound.setdefault(formal.type_str, found)
                    if first != found:
                        raise VerifyException(
                            f"{what} {index} ({formal.name}) must be {first} like the others "
                            f"of type {formal.type_str}, not {found}"
                        )


class NoneOp(Operation):
    """An optional operand that is left out: `%0 = "onnx.none"() : () -> none`."""

    name = "onnx.none"
    traits = traits_def()

    def verify_(self) -> None:
        """Check that it has no operands and one result of type `none`."""
        if self.operands or [r.type for r in self.results] != [NoneType()]:
            raise VerifyException("onnx.none must be () -> none")

    @classmethod
    def make(cls) -> NoneOp:
        """Create one."""
        return cls.create(result_types=[NoneType()])


class CustomOp(OnnxOp):
    """A node of a domain that has no schema here: `domain` and `op_type` say which."""

    name = "onnx.Custom"

    def verify_(self) -> None:
        """Check that the domain and the operator are named."""
        for key in ("domain", "op_type"):
            if not isinstance(self.attributes.get(key), StringAttr):
                raise VerifyException(f"onnx.Custom needs the string attribute {key!r}")


@cache
def onnx_op(op_type: str) -> type[OnnxOp]:
    """Return the class of `onnx.<op_type>`, made when first asked for."""
    return type(f"{op_type}Op", (OnnxOp,), {"name": f"onnx.{op_type}", "op_type": op_type})


@cache
def schema_of(op_type: str, opset: int, domain: str = "") -> OpSchema | None:
    """Return the schema in force at `opset`, or None."""
    from onnx import defs

    try:
        schema = defs.get_schema(op_type, opset, domain)
    except defs.SchemaError:
        return None
    return None if schema.deprecated else schema


def opset_of(op: Operation) -> int | None:
    """Return the opset of `op`: its own, or its module's for the default domain; None outside."""
    own = op.attributes.get("opset")
    if isinstance(own, IntegerAttr):
        return own.value.data
    parent: Operation | None = op
    while parent is not None and not isinstance(parent, ModuleOp):
        parent = parent.parent_op()
    if parent is None:
        return None
    table = parent.attributes.get("onnx.opset")
    version = table.data.get("") if isinstance(table, DictionaryAttr) else None
    return version.value.data if isinstance(version, IntegerAttr) else None


def make_op(
    op_type: str,
    operands: Sequence[SSAValue],
    result_types: Sequence[Attribute],
    name: str,
    outputs: Sequence[str],
    attributes: Mapping[str, Attribute],
    regions: Sequence[Region] = (),
) -> OnnxOp:
    """Build `onnx.<op_type>`; `outputs` are the user's tensor names."""
    return onnx_op(op_type).create(
        operands=operands,
        result_types=result_types,
        attributes={
            **attributes,
            "name": StringAttr(name),
            "outputs": ArrayAttr([StringAttr(item) for item in outputs]),
        },
        regions=regions,
    )


def encode_attribute(value: object) -> Attribute:
    """Encode an int, float, string, or a list of one kind of them.

    Floats are single precision, as in the file. An empty list is one of integers.

    Raises:
        TypeError: of another kind.
    """
    if isinstance(value, int):
        return IntegerAttr(value, i64)
    if isinstance(value, float):
        return FloatAttr(value, f32)
    if isinstance(value, str):
        return StringAttr(value)
    if isinstance(value, list):
        if all(isinstance(item, int) for item in value):
            return DenseArrayBase.from_list(i64, value)
        if all(isinstance(item, float) for item in value):
            # Not a dense array: xDSL cannot parse an infinity in one.
            return ArrayAttr([FloatAttr(item, f32) for item in value])
        if all(isinstance(item, str) for item in value):
            return ArrayAttr([StringAttr(item) for item in value])
    raise TypeError(f"cannot encode {type(value).__name__}")


def decode_attribute(
    attribute: Attribute,
) -> int | float | str | list[int] | list[float] | list[str]:
    """Reverse of `encode_attribute`; a `#onnx.weight` gives its store name.

    Raises:
        TypeError: an attribute that `encode_attribute` does not make.
    """
    match attribute:
        case IntegerAttr():
            return attribute.value.data
        case FloatAttr():
            return attribute.value.data
        case StringAttr():
            return attribute.data
        case WeightAttr():
            return attribute.store_name.data
        case DenseArrayBase():
            untyped: Any = attribute
            return list(untyped.get_values())
        case ArrayAttr():
            floats = [item.value.data for item in attribute if isinstance(item, FloatAttr)]
            return floats or _strings(attribute)
        case _:
            raise TypeError(f"not an attribute of the onnx dialect: {attribute}")


def _strings(attribute: Attribute | None) -> list[str]:
    if not isinstance(attribute, ArrayAttr):
        return []
    return [item.data for item in attribute if isinstance(item, StringAttr)]


def _enum_name(value: Any) -> str:
    """Return the name of one of ONNX's enumeration values, which its stubs do not type."""
    return str(value.name)


def _attribute_kind(attribute: Attribute) -> str:
    match attribute:
        case IntegerAttr():
            return "INT"
        case FloatAttr():
            return "FLOAT"
        case StringAttr():
            return "STRING"
        case WeightAttr():
            return "TENSOR"
        case DenseArrayBase():
            return "INTS" if len(attribute) else "EMPTY"
        case ArrayAttr():
            return "FLOATS" if isinstance(attribute.data[0], FloatAttr) else "STRINGS"
        case _:
            return ""


def _all_op_types() -> list[str]:
    from onnx import defs

    names = {s.name for s in defs.get_all_schemas_with_history() if s.domain in DOMAINS}
    return sorted(names)


class OnnxDialect(Dialect):
    """The dialect; its classes, one for every operator ONNX knows, are made when it is loaded."""

    @property
    @override
    def operations(self) -> Iterator[type[Operation]]:
        """All operation classes."""
        return iter([NoneOp, CustomOp, *map(onnx_op, _all_op_types())])


Onnx = OnnxDialect("onnx", [], [WeightAttr])
