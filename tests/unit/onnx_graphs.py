"""Small ONNX models for tests, and the two ways to run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from xdsl.dialects.builtin import ModuleOp

from tilewright.frontends.onnx import import_onnx
from tilewright.ir.context import CompileContext
from tilewright.ir.weights import Array
from tilewright.runtime.float_executor import TopSession
from tilewright.transforms.convert_onnx_to_top import ConvertOnnxToTopPass

F = TensorProto.FLOAT
Shape = Sequence[int | str | None]


def model_of(
    nodes: Sequence[NodeProto],
    inputs: Mapping[str, Shape],
    outputs: Sequence[str],
    weights: Mapping[str, Array] | None = None,
    opset: int = 17,
    elem_type: int = F,
    **extra: Any,
) -> ModelProto:
    """Return a model; outputs need no types."""
    graph = helper.make_graph(
        list(nodes),
        "test",
        [helper.make_tensor_value_info(name, elem_type, shape) for name, shape in inputs.items()],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(np.asarray(a), name) for name, a in (weights or {}).items()],
    )
    ir_version = extra.pop("ir_version", 8)
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version, **extra
    )


def to_top(
    model: ModelProto, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> tuple[ModuleOp, CompileContext]:
    """Import and convert, verifying both levels."""
    ctx = CompileContext()
    module = import_onnx(model, shapes, ctx)
    module.verify()
    ConvertOnnxToTopPass().apply(ctx, module)
    module.verify()
    return module, ctx


def run_ours(model: ModelProto, feed: Mapping[str, Array]) -> list[Array]:
    """Run by way of `top`."""
    module, ctx = to_top(model)
    session = TopSession(module, ctx.weights, optimise=False)
    results = session.run(feed)
    return [results[name] for name in session.outputs]


def run_ort(model: ModelProto, feed: Mapping[str, Array]) -> list[Array]:
    """Run the model as it is."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    return [np.asarray(item) for item in session.run(None, dict(feed))]


def top_ops(module: ModuleOp) -> list[str]:
    """Names of all `top` ops but weights and absent operands, in order."""
    return [
        op.name
        for op in module.walk()
        if op.name.startswith("top.") and op.name not in ("top.weight", "top.none")
    ]


def normal(*shape: int, seed: int = 0) -> Array:
    """Return standard normal float32 values."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
