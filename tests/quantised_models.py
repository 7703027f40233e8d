"""Quantised ONNX models for tests: built node by node, or by onnxruntime's own quantiser."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tilewright.compiler import Compiled, compile_model
from tilewright.quant.reference import QuantSession
from tilewright.runtime.runtime import Executor
from tilewright.spec.hardware import load_target

Array = np.ndarray[Any, Any]
F = TensorProto.FLOAT


def node(op_type: str, inputs: Sequence[str], outputs: Sequence[str], **extra: Any) -> NodeProto:
    return helper.make_node(op_type, inputs, outputs, name=outputs[0], **extra)


def pair(x: str, scale: str, zero: str, y: str, **extra: Any) -> list[NodeProto]:
    """Return Q and DQ; the codes are called `<y>.q`."""
    parameters = [scale, zero] if zero else [scale]
    return [
        node("QuantizeLinear", [x, *parameters], [f"{y}.q"], **extra),
        node("DequantizeLinear", [f"{y}.q", *parameters], [y], **extra),
    ]


def packed(name: str, array: Array, kind: int) -> TensorProto:
    """Return a constant of a 4-bit type."""
    return helper.make_tensor(name, kind, array.shape, array.flatten().tolist())


def model(
    nodes: Sequence[NodeProto],
    inputs: Mapping[str, Sequence[int]],
    outputs: Sequence[str],
    constants: Mapping[str, Any],
    *,
    opset: int = 21,
    kind: int = F,
) -> ModelProto:
    tensors = [
        value if isinstance(value, TensorProto) else numpy_helper.from_array(np.array(value), name)
        for name, value in constants.items()
    ]
    graph = helper.make_graph(
        list(nodes),
        "quantised",
        [helper.make_tensor_value_info(name, kind, shape) for name, shape in inputs.items()],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        tensors,
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10 if opset > 20 else 8)


def run_ort(proto: ModelProto, feed: Mapping[str, Array]) -> dict[str, Array]:
    """Run by onnxruntime without optimisations: its fused kernels may saturate in 16 bits."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = ort.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
    names = [item.name for item in session.get_outputs()]
    return dict(zip(names, map(np.asarray, session.run(names, dict(feed))), strict=True))


def compiled(
    proto: ModelProto, target: str = "tiny8", samples: list[dict[str, Array]] | None = None
) -> Compiled:
    return compile_model(proto, load_target(target), samples=samples)


def run_both(built: Compiled, feed: Mapping[str, Array]) -> dict[str, Array]:
    """Run the quantised graph and the program on the chip; both must give the same bits."""
    stage = built.stages["quant"]
    reference = QuantSession(stage.module, stage.weights).run(feed)
    outputs = Executor(built.program, built.target).run(feed)
    for name, array in reference.items():
        assert outputs[name].dtype == array.dtype, name
        np.testing.assert_array_equal(outputs[name], array, err_msg=name)
    return outputs


def host_reasons(built: Compiled) -> dict[str, str]:
    """Return why layers run on the host; conversions and layout left out."""
    found: dict[str, str] = {}
    for item in built.decisions:
        reason = item.reason.removeprefix("runs on the host: ")
        quiet = ("two number types", "layout of", "a float for every")
        told = item.stage == "quant-partition" and reason != item.reason
        if told and not reason.startswith(quiet):
            found[item.layer] = reason
    return found


def warnings(built: Compiled) -> list[str]:
    return [str(item.details["warning"]) for item in built.decisions if "warning" in item.details]


class _Feed:
    """Feeds onnxruntime's calibration."""

    def __init__(self, samples: list[dict[str, Array]]) -> None:
        self.rest: Iterator[dict[str, Array]] = iter(samples)

    def get_next(self) -> dict[str, Array] | None:
        return next(self.rest, None)


def float_net(seed: int) -> tuple[ModelProto, tuple[int, ...]]:
    """Return a small random float network, and the shape of its input `x`; its result is `y`."""
    rng = np.random.default_rng(seed)
    nodes: list[NodeProto] = []
    constants: dict[str, Array] = {"zero": np.array(0, np.float32), "six": np.array(6, np.float32)}

    def normal(*shape: int) -> str:
        name = f"w{len(constants)}"
        fan = max(1, int(np.prod(shape[1:])))
        constants[name] = (rng.standard_normal(shape) / np.sqrt(fan)).astype(np.float32)
        return name

    def add(op_type: str, *inputs: str, **extra: Any) -> str:
        nodes.append(node(op_type, inputs, [f"{op_type.lower()}{len(nodes)}"], **extra))
        return nodes[-1].output[0]

    channels, size, width = (int(rng.integers(*span)) for span in ((2, 6), (6, 11), (4, 9)))
    x = add("Relu", add("Conv", "x", normal(width, channels, 3, 3), normal(width), pads=[1] * 4))
    if seed % 2:
        wide = add("Conv", x, normal(width, 1, 3, 3), normal(width), pads=[1] * 4, group=width)
        z = add("Clip", wide, "zero", "six")
    else:
        z = add("Sigmoid", add("Conv", x, normal(width, width, 1, 1), normal(width)))
    match seed % 3:
        case 0:
            y = add("Add", x, z)
        case 1:
            y = add("Mul", x, z)
        case _:
            y, width = add("Concat", x, z, axis=1), 2 * width
    if seed % 2:
        y = add("MaxPool", y, kernel_shape=[2, 2], strides=[2, 2])
    if seed % 4 == 3:
        y = add("LeakyRelu", y, alpha=0.1)
    y = add("Flatten", add("GlobalAveragePool", y))
    y = (
        add("Gemm", y, normal(5, width), normal(5), transB=1)
        if seed % 2
        else add("MatMul", y, normal(width, 5))
    )
    if seed % 5 == 4:
        add("Softmax", y, axis=-1)
    nodes[-1].output[0] = "y"
    shape = (1, channels, size, size)
    proto = model(nodes, {"x": shape}, ["y"], constants, opset=17)
    return onnx.shape_inference.infer_shapes(proto), shape


def quantised_by_ort(
    proto: ModelProto,
    folder: Path,
    samples: list[dict[str, Array]],
    *,
    qdq: bool,
    activations: str,
    weights: str,
    per_channel: bool,
) -> ModelProto:
    """Return `proto` quantised statically by onnxruntime."""
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    logging.disable(logging.WARNING)
    source, result = folder / "float.onnx", folder / "quantised.onnx"
    onnx.save(proto, source)
    feed: Any = _Feed(samples)
    quantize_static(
        source,
        result,
        feed,
        quant_format=QuantFormat.QDQ if qdq else QuantFormat.QOperator,
        activation_type=QuantType.from_string(activations),
        weight_type=QuantType.from_string(weights),
        per_channel=per_channel,
    )
    logging.disable(logging.NOTSET)
    return onnx.load(result)
