"""Reading of `.onnx` files and what is checked before the graph is looked at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.diagnostics import TilewrightError
from tilewright.frontends.onnx.tensors import malformed

if TYPE_CHECKING:
    from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto

MAX_NAME = 1024
"""Longer names come from broken files; packages hold them with what passes append."""

FIRST_OPSET = 7
"""Older files use other broadcasting rules."""


@dataclass(frozen=True)
class Model:
    """A model as read: the protobuf, and the folder that external data are relative to."""

    proto: ModelProto
    folder: Path | None
    opsets: dict[str, int]
    functions: dict[tuple[str, str], FunctionProto]


def domain_of(domain: str) -> str:
    """Return the domain with the default one spelled as the empty string."""
    return "" if domain == "ai.onnx" else domain


def read_model(source: Path | str | ModelProto) -> Model:
    """Read a model; tensors in other files are not touched.

    Raises:
        TilewrightError: E0101 the file cannot be read, E0106 it is malformed, E0104 its opset is
            not supported.
    """
    from onnx import ModelProto

    folder: Path | None = None
    if isinstance(source, ModelProto):
        proto = source
    else:
        path = Path(source)
        folder = path.parent
        proto = _parse(path)
    if not proto.HasField("graph") or not proto.opset_import:
        raise TilewrightError(
            "E0101",
            f"{_title(source)} is not an ONNX model",
            ["it has no graph" if not proto.HasField("graph") else "it names no operator set"],
        )
    check_text(proto)
    return Model(proto, folder, _opsets(proto), _functions(proto))


def _title(source: object) -> str:
    return f"`{source}`" if isinstance(source, Path | str) else "the model"


def _parse(path: Path) -> ModelProto:
    from google.protobuf.message import DecodeError
    from onnx import ModelProto

    try:
        data = path.read_bytes()
    except OSError as error:
        raise TilewrightError(
            "E0101", f"cannot read `{path}`", [error.strerror or str(error)]
        ) from None
    if not data:
        raise TilewrightError("E0101", f"`{path}` is empty")
    if data.startswith(b"version https://git-lfs"):
        raise TilewrightError(
            "E0101",
            f"`{path}` is a Git LFS pointer, not the model",
            [],
            "fetch it with `git lfs pull`",
        )
    try:
        return ModelProto.FromString(data)
    except DecodeError as error:
        raise TilewrightError(
            "E0101",
            f"`{path}` is not an ONNX model, or is damaged",
            [f"{len(data)} bytes; the protobuf parser says: {error}"],
            "check that the download is complete",
        ) from None


def _opsets(proto: ModelProto) -> dict[str, int]:
    from onnx import defs

    opsets: dict[str, int] = {}
    for entry in proto.opset_import:
        domain = domain_of(entry.domain)
        if opsets.setdefault(domain, entry.version) != entry.version:
            raise malformed(
                f"the model names two versions of the operator set {domain or 'ai.onnx'!r}",
                f"{opsets[domain]} and {entry.version}",
            )
    newest = defs.onnx_opset_version()
    # A model of functions only need not import the default domain.
    version = opsets.get("", FIRST_OPSET)
    if not FIRST_OPSET <= version <= newest:
        raise TilewrightError(
            "E0104",
            f"the model's operator set is version {version}",
            [f"versions {FIRST_OPSET} to {newest} are supported"],
            "export again, or convert with `onnx.version_converter`",
        )
    return opsets


def _functions(proto: ModelProto) -> dict[tuple[str, str], FunctionProto]:
    functions: dict[tuple[str, str], FunctionProto] = {}
    for function in proto.functions:
        key = (domain_of(function.domain), function.name)
        if key in functions:
            raise malformed(f"the model defines the function {function.name!r} twice")
        functions[key] = function
    return functions


def check_text(proto: ModelProto) -> None:
    """Check that all names are short UTF-8: protobuf hands out bytes where they are not.

    Raises:
        TilewrightError: E0106.
    """
    names: list[object] = [entry.domain for entry in proto.opset_import]
    for function in proto.functions:
        names += [function.name, function.domain, *function.attribute]
        names += [*function.input, *function.output]
        names += [entry.domain for entry in function.opset_import]
        _attribute_names(function.attribute_proto, names)
        _node_names(function.node, names)
    _graph_names(proto.graph, names)
    for name in names:
        if isinstance(name, bytes):
            raise malformed("the model has a name that is not UTF-8 text", repr(name))
        if isinstance(name, str) and len(name) > MAX_NAME:
            raise malformed(
                f"the model has a name of {len(name)} characters",
                f"it begins {name[:60]!r}; the limit is {MAX_NAME}",
            )


def _graph_names(graph: GraphProto, names: list[object]) -> None:
    for info in [*graph.input, *graph.output]:
        names.append(info.name)
        names += [dim.dim_param for dim in info.type.tensor_type.shape.dim]
    names += [tensor.name for tensor in graph.initializer]
    names += [sparse.values.name for sparse in graph.sparse_initializer]
    for tensor in [*graph.initializer, *(s.values for s in graph.sparse_initializer)]:
        names += [text for entry in tensor.external_data for text in (entry.key, entry.value)]
    _node_names(graph.node, names)


def _node_names(nodes: Iterable[NodeProto], names: list[object]) -> None:
    for node in nodes:
        names += [node.name, node.op_type, node.domain, *node.input, *node.output]
        _attribute_names(node.attribute, names)


def _attribute_names(attributes: Iterable[AttributeProto], names: list[object]) -> None:
    for attribute in attributes:
        names += [attribute.name, attribute.ref_attr_name]
        if attribute.HasField("g"):
            _graph_names(attribute.g, names)


def attribute_value(attribute: AttributeProto) -> object:
    """Return the Python value of an `AttributeProto`: a number, a string, or a list of one kind.

    Raises:
        TilewrightError: E0106, a string is not UTF-8.
        TypeError: it holds a tensor, graph or type.
    """
    from onnx import AttributeProto as A

    match attribute.type:
        case A.INT:
            return int(attribute.i)
        case A.FLOAT:
            return float(attribute.f)
        case A.STRING:
            return _text(attribute, attribute.s)
        case A.INTS:
            return [int(item) for item in attribute.ints]
        case A.FLOATS:
            return [float(item) for item in attribute.floats]
        case A.STRINGS:
            return [_text(attribute, item) for item in attribute.strings]
        case _:
            raise TypeError(A.AttributeType.Name(attribute.type))


def _text(attribute: AttributeProto, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise malformed(
            f"the attribute {attribute.name!r} is not UTF-8 text", repr(value)
        ) from None
