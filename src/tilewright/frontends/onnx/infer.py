"""Static types and compile-time values of single nodes.

Types come from ONNX's own per-node inference, given the values of small constant operands; nothing
is ever serialised as a whole model, so weights beyond 2 GB are no obstacle. Constant nodes are
evaluated by onnxruntime without optimisations, one node at a time.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.diagnostics import TilewrightError
from tilewright.frontends.onnx.tensors import Array, check_dims, malformed

if TYPE_CHECKING:
    from onnx import NodeProto, TensorProto, TypeProto
    from onnx.defs import OpSchema
    from xdsl.ir import SSAValue

AXIS_ATTRIBUTES = frozenset(
    ("axis", "axes", "perm", "batch_axis", "time_axis", "batch_dims", "start", "end")
)
"""Attributes that count axes."""

COUNT_ATTRIBUTES = frozenset(
    (
        "q_num_heads",
        "kv_num_heads",
        "num_groups",
        "group",
        "blocksize",
        "strides",
        "dilations",
        "kernel_shape",
    )
)
"""Attributes that are at least 1: ONNX's inference divides by some of them unseen."""

DATA_LIMIT = 1 << 16
"""Constants of at most this many elements are shown to shape inference."""


@dataclass(eq=False)
class Value:
    """A tensor of the graph being imported."""

    name: str
    """The user's tensor name; empty for one that is left out."""
    elem_type: int = 0
    """`TensorProto.DataType`; 0 when unknown (made by an operator that is not supported)."""
    shape: tuple[int, ...] | None = None
    """Static shape; None when unknown."""
    constant: Array | None = None
    """The value, when it is known at compile time."""
    origins: frozenset[str] = frozenset()
    """Graph inputs it depends on."""
    ssa: SSAValue | None = field(default=None, repr=False)
    """Set when the value is emitted."""
    pending: TilewrightError | None = None
    """What is wrong with the value, reported only if something reads it."""

    @property
    def known(self) -> bool:
        """Whether type and shape are known."""
        return self.elem_type != 0 and self.shape is not None

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape or (), dtype=object))

    @cached_property
    def type_proto(self) -> TypeProto:
        """The type as ONNX states it."""
        from onnx import helper

        return helper.make_tensor_type_proto(self.elem_type, self.shape)

    @cached_property
    def tensor_proto(self) -> TensorProto:
        """The constant as ONNX states it."""
        return to_proto(self.name, self.elem_type, self.constant)


def to_proto(name: str, elem_type: int, array: Array | None) -> TensorProto:
    """Return `array` as a `TensorProto`."""
    from onnx import TensorProto as T
    from onnx import numpy_helper

    assert array is not None
    if elem_type == T.STRING:
        tensor = T(name=name, data_type=elem_type, dims=array.shape)
        tensor.string_data.extend(array.reshape(-1).tolist())
        return tensor
    return numpy_helper.from_array(np.asarray(array), name)


def node_title(node: NodeProto) -> str:
    """Name a node for a message: `Conv "conv1"`."""
    if node.name:
        return f'{node.op_type} "{node.name}"'
    return f"{node.op_type} (unnamed, gives {next((o for o in node.output if o), 'nothing')!r})"


def infer_types(
    node: NodeProto, schema: OpSchema, inputs: Sequence[Value], opsets: dict[str, int]
) -> tuple[list[tuple[int, tuple[int | None, ...] | None]], str]:
    """Return element type and shape of each output, and ONNX's complaint if it made one.

    An element type is 0 and a shape None where inference says nothing; None stands for a single
    unknown dimension.
    """
    from onnx import OperatorSetIdProto
    from onnx.checker import ValidationError
    from onnx.shape_inference import InferenceError, infer_node_outputs

    _check_attributes(node, inputs)
    probe, types, data = _renamed(node, inputs)
    try:
        found = infer_node_outputs(
            schema,
            probe,
            types,
            data,
            None,
            [OperatorSetIdProto(domain=d, version=v) for d, v in opsets.items()],
        )
    except ValidationError as error:
        raise malformed(f"{node_title(node)} is not valid", _first_line(str(error))) from None
    except (InferenceError, ValueError, IndexError, RuntimeError) as error:
        # Its C++ code throws others than its own for attributes that make no sense.
        return [(0, None)] * len(node.output), _first_line(str(error))
    if node.op_type == "Compress" and (shape := _compressed(node, inputs)) is not None:
        return [(inputs[0].elem_type, shape)], ""
    result: list[tuple[int, tuple[int | None, ...] | None]] = []
    for index, name in enumerate(node.output):
        type_proto = found.get(f"o{index}")
        if not name or type_proto is None or not type_proto.HasField("tensor_type"):
            result.append((0, None))
            continue
        tensor = type_proto.tensor_type
        shape = None
        if tensor.HasField("shape"):
            shape = tuple(
                d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim
            )
            check_dims(name, [d for d in shape if d is not None])
        result.append((tensor.elem_type, shape))
    return result, ""


def _check_attributes(node: NodeProto, inputs: Sequence[Value]) -> None:
    """Refuse what crashes ONNX's inference: axes far outside any operand, counts below 1.

    Raises:
        TilewrightError: E0106.
    """
    # Unsqueeze counts in the result, which has an axis more for each entry.
    rank = max((len(value.shape) for value in inputs if value.shape is not None), default=0)
    rank += max((value.size for value in inputs[1:] if value.constant is not None), default=1)
    for attribute in node.attribute:
        if attribute.name in COUNT_ATTRIBUTES:
            counts = list(attribute.ints) if attribute.ints else [attribute.i]
            if min(counts) < 1:
                raise malformed(f"{node_title(node)}: `{attribute.name}` must be at least 1")
        if attribute.name in AXIS_ATTRIBUTES:
            found = [int(attribute.i), *(int(v) for v in attribute.ints)]
            limit = rank + len(attribute.ints)
            if wrong := [axis for axis in found if not -limit <= axis <= limit]:
                raise malformed(
                    f"{node_title(node)}: `{attribute.name}` {wrong[0]} is outside the operands",
                    *(f"operand {v.name!r}: shape {list(v.shape or ())}" for v in inputs if v.name),
                )


def _renamed(
    node: NodeProto, inputs: Sequence[Value]
) -> tuple[NodeProto, dict[str, TypeProto], dict[str, TensorProto]]:
    """Return a copy of `node` under names of ours (the user's may repeat), types, constants."""
    from onnx import NodeProto

    probe = NodeProto(op_type=node.op_type, domain=node.domain)
    probe.attribute.extend(node.attribute)
    if node.op_type == "Slice":
        _sort_axes(probe)
    types: dict[str, TypeProto] = {}
    data: dict[str, TensorProto] = {}
    for index, value in enumerate(inputs):
        if not value.name:
            probe.input.append("")
            continue
        name = f"i{index}"
        probe.input.append(name)
        types[name] = value.type_proto
        if value.constant is not None and value.size <= DATA_LIMIT:
            data[name] = value.tensor_proto
    probe.output.extend(f"o{index}" if name else "" for index, name in enumerate(node.output))
    return probe, types, data


def _compressed(node: NodeProto, inputs: Sequence[Value]) -> tuple[int, ...] | None:
    """Return the shape of a Compress of known condition, which ONNX does not infer."""
    condition, shape = inputs[1].constant, inputs[0].shape
    if condition is None or shape is None:
        return None
    axis = next((int(a.i) for a in node.attribute if a.name == "axis"), None)
    if axis is not None and not -len(shape) <= axis < len(shape):
        return None
    length = inputs[0].size if axis is None else shape[axis]
    if condition.ndim != 1 or len(condition) > length:
        return None
    kept = int(np.count_nonzero(condition))
    if axis is None:
        return (kept,)
    axis %= len(shape)
    return (*shape[:axis], kept, *shape[axis + 1 :])


def _sort_axes(slice_node: NodeProto) -> None:
    """Order the attributes of an old Slice by axis, without which ONNX infers no shape."""
    lists = {a.name: a for a in slice_node.attribute if a.name in ("axes", "starts", "ends")}
    if "axes" not in lists or any(axis < 0 for axis in lists["axes"].ints):
        return
    axes = list(lists["axes"].ints)
    if any(len(item.ints) != len(axes) for item in lists.values()):
        return
    order = sorted(range(len(axes)), key=axes.__getitem__)
    for item in lists.values():
        item.ints[:] = [item.ints[place] for place in order]


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "shape inference failed"


def evaluate(node: NodeProto, schema: OpSchema, inputs: Sequence[Value]) -> list[Array] | None:
    """Return the outputs of a node of constant operands; None if onnxruntime has no kernel for it.

    Raises:
        TilewrightError: E0106, the operands are wrong for the operator.
    """
    import onnxruntime as ort
    from onnx import helper

    probe, types, _ = _renamed(node, inputs)
    names = [name for name in probe.output if name]
    graph = helper.make_graph(
        [probe],
        "constant",
        [helper.make_value_info(name, types[name]) for name in dict.fromkeys(probe.input) if name],
        [helper.make_empty_tensor_value_info(name) for name in names],
    )
    # A schema holds from its own opset to the next change, so its first opset serves for all.
    opset = helper.make_opsetid(
        node.domain if node.domain != "ai.onnx" else "", max(schema.since_version, 7)
    )
    model = helper.make_model(graph, opset_imports=[opset], ir_version=10)
    # A compiled module without stubs.
    state: Any = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    feeds: dict[str, Any] = {
        f"i{index}": np.ascontiguousarray(value.constant).reshape(value.shape or ())
        for index, value in enumerate(inputs)
        if value.name and value.constant is not None
    }
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        results = session.run(names, feeds)
    except (state.NotImplemented, state.InvalidGraph, state.Fail):
        return None
    except (state.InvalidArgument, state.RuntimeException) as error:
        raise malformed(
            f"{node_title(node)} cannot be computed from its constant operands",
            _first_line(str(error)),
        ) from None
    found = dict(zip(names, results, strict=True))
    if any(not isinstance(item, np.ndarray) for item in results):
        return None
    return [np.asarray(found[name]) if name else np.empty(0) for name in probe.output]
