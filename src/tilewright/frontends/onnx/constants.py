"""`Constant` nodes in all their forms."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tilewright.frontends.onnx.infer import Value, node_title
from tilewright.frontends.onnx.scope import constant
from tilewright.frontends.onnx.tensors import densify, load_tensor, malformed

if TYPE_CHECKING:
    from onnx import NodeProto


def constant_node(node: NodeProto, folder: Path | None) -> Value:
    """The value of a `Constant` node, in any of its forms."""
    from onnx import TensorProto as T

    if len(node.attribute) != 1:
        raise malformed(f"{node_title(node)} must have exactly one value")
    attribute = node.attribute[0]
    name = node.output[0]
    match attribute.name:
        case "value":
            array = load_tensor(attribute.t, folder)
            return constant(name, array, attribute.t.data_type)
        case "sparse_value":
            sparse = attribute.sparse_tensor
            return constant(name, densify(sparse, folder), sparse.values.data_type)
        case "value_int":
            return constant(name, np.array(attribute.i, np.int64), T.INT64)
        case "value_ints":
            return constant(name, np.array(attribute.ints, np.int64), T.INT64)
        case "value_float":
            return constant(name, np.array(attribute.f, np.float32), T.FLOAT)
        case "value_floats":
            return constant(name, np.array(attribute.floats, np.float32), T.FLOAT)
        case "value_string":
            return constant(name, np.array(attribute.s, object), T.STRING)
        case "value_strings":
            return constant(name, np.array(list(attribute.strings), object), T.STRING)
        case other:
            raise malformed(f"{node_title(node)} has the unknown attribute {other!r}")
