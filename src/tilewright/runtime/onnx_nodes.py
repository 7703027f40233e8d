"""How each operation of `top` becomes ONNX nodes.

One handler an operation, in `HANDLERS`; most come from tables. Operations whose tensors are stored
channels-last are wrapped in transposes, which onnxruntime cancels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from xdsl.ir import Attribute

from tilewright.diagnostics import TilewrightError
from tilewright.dialects import top
from tilewright.dialects.top.module import tensor_type
from tilewright.ir.weights import Array, WeightStore

EXTERNAL_LOCATION = "in-memory"
"""Marks initialisers whose data is handed to the runtime beside the model."""

Handler: TypeAlias = Callable[["Exporter", top.TopOp, list[str], list[str]], None]
"""Emits one operation: its operands' and its results' names are given."""


@dataclass
class Exporter:
    """The ONNX graph being made."""

    weights: WeightStore
    external: bool = False
    nodes: list[Any] = field(default_factory=list[Any])
    initializers: list[Any] = field(default_factory=list[Any])
    taken: set[str] = field(default_factory=set[str])
    constants: dict[tuple[str, tuple[int, ...], bytes], str] = field(
        default_factory=dict[tuple[str, tuple[int, ...], bytes], str]
    )
    external_arrays: dict[str, Array] = field(default_factory=dict[str, Array])

    def unique(self, wish: str) -> str:
        """Return `wish`, or `wish#k` if that name is taken, and take it."""
        name = wish
        for count in itertools.count(1):
            if name not in self.taken:
                break
            name = f"{wish}#{count}"
        self.taken.add(name)
        return name

    def initializer(self, name: str, array: Array) -> None:
        """Add a constant of the model under exactly `name`."""
        import onnx

        proto = onnx.TensorProto()
        proto.name = name
        proto.data_type = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        proto.dims.extend(array.shape)
        if self.external and array.nbytes >= 1024:
            proto.data_location = onnx.TensorProto.EXTERNAL
            proto.external_data.add(key="location", value=EXTERNAL_LOCATION)
            self.external_arrays[name] = array
        else:
            proto.raw_data = array.tobytes()
        self.initializers.append(proto)

    def constant(self, array: Array) -> str:
        """Return the name of a small constant, one for equal ones."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self.constants:
            self.constants[key] = self.unique("constant")
            self.initializer(self.constants[key], array)
        return self.constants[key]

    def ints(self, values: Iterable[int]) -> str:
        """Return the name of a 1-D int64 constant."""
        return self.constant(np.array(list(values), np.int64))

    def scalar(self, value: float, element: Attribute) -> str:
        """Return the name of a scalar of an element type."""
        return self.constant(np.array(value, top.numpy_dtype(element)))

    def emit(
        self,
        op_type: str,
        inputs: Sequence[str],
        outputs: Sequence[str] | None = None,
        **attributes: Any,
    ) -> str:
        """Add a node; return the name of its first output (made up unless given)."""
        import onnx

        names = list(outputs) if outputs is not None else [self.unique(f"{op_type.lower()}.part")]
        inputs = list(inputs)
        while inputs and not inputs[-1]:
            inputs.pop()
        self.nodes.append(
            onnx.helper.make_node(op_type, inputs, names, name=names[0], **attributes)
        )
        return names[0]

    def clamp(
        self,
        x: str,
        output: str,
        low: float | None,
        high: float | None,
        element: Attribute,
    ) -> None:
        """Emit `min(max(x, low), high)`."""
        if low is None and high is None:
            self.emit("Identity", [x], [output])
        elif low == 0 and high is None:
            self.emit("Relu", [x], [output])
        else:
            bounds = ["" if v is None else self.scalar(v, element) for v in (low, high)]
            self.emit("Clip", [x, *bounds], [output])


def _simple(op_type: str, *floats: str) -> Handler:
    """A handler for an operation that is one node; `floats` are attributes copied over."""

    def handler(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
        values = {key: op.attrs.number(key) for key in floats}
        graph.emit(op_type, ins, outs, **{k: v for k, v in values.items() if v is not None})

    return handler


def _clip(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
    element = tensor_type(op.operands[0]).get_element_type()
    graph.clamp(ins[0], outs[0], op.attrs.number("min"), op.attrs.number("max"), element)


def _silu(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
    graph.emit("Mul", [ins[0], graph.emit("Sigmoid", ins)], outs)


def _rsqrt(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
    graph.emit("Reciprocal", [graph.emit("Sqrt", ins)], outs)


def _gelu(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
    graph.emit("Gelu", ins, outs, approximate=op.attrs.string("approximate"))


def _is_inf(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
    flags = {key: op.attrs.integer(key) & 1 for key in ("detect_negative", "detect_positive")}
    graph.emit("IsInf", ins, outs, **flags)


def _mod(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
    graph.emit("Mod", ins, outs, fmod=int(op.attrs.flag("fmod")))


def _bit_shift(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
    graph.emit("BitShift", ins, outs, direction=op.attrs.string("direction"))


def _conv(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
    attrs = op.attrs
    extra: dict[str, Any] = {}
    if "output_pads" in attrs:
        extra["output_padding"] = list(attrs.ints("output_pads"))
    graph.emit(
        "ConvTranspose" if isinstance(op, top.ConvTransposeOp) else "Conv",
        ins,
        outs,
        strides=list(attrs.ints("strides")),
        pads=list(attrs.ints("pads")),
        dilations=list(attrs.ints("dilations")),
        group=attrs.integer("group"),
        **extra,
    )


def _linear(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
    x, w, bias = ins
    if len(tensor_type(op.operands[0]).get_shape()) == 2:
        graph.emit("Gemm", [x, w, bias], outs, transB=1)
        return
    turned = graph.emit("Transpose", [w], perm=[1, 0])
    if bias:
        graph.emit("Add", [graph.emit("MatMul", [x, turned]), bias], outs)
    else:
        graph.emit("MatMul", [x, turned], outs)


def _max_pool(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
    attrs = op.attrs
    if len(outs) == 2 and attrs.string("layout", "nchw") == "nhwc":
        raise TilewrightError(
            "E0402", f'max_pool "{op.layer_name}": indices are defined for NCHW only'
        )
    kernel, pads = attrs.ints("kernel"), list(attrs.ints("pads"))
    ceil = attrs.flag("ceil_mode")
    if ceil:
        # onnxruntime's kernel and its shape inference disagree on windows that start in the
        # padding; explicit padding (minus infinity either way) leaves nothing to round.
        _, _, sizes = top.spatial.split_image(tensor_type(op.operands[0]).get_shape(), attrs)
        _, _, results = top.spatial.split_image(tensor_type(op.results[0]).get_shape(), attrs)
        ends = _reached(sizes, results, attrs)
        if all(end < size for end, size in zip(ends, kernel, strict=True)):
            ceil, pads[len(kernel) :] = False, ends
    graph.emit(
        "MaxPool",
        ins,
        outs,
        kernel_shape=list(kernel),
        strides=list(attrs.ints("strides")),
        pads=pads,
        dilations=list(attrs.ints("dilations")),
        ceil_mode=int(ceil),
        storage_order=attrs.integer("storage_order", 0),
    )


def _reached(sizes: Sequence[int], results: Sequence[int], attrs: top.Attrs) -> list[int]:
    """Return how far behind the input the last window of a pool reaches, an axis each."""
    kernel, strides = attrs.ints("kernel"), attrs.ints("strides")
    pads, dilations = attrs.ints("pads"), attrs.ints("dilations")
    last = [
        (result - 1) * strides[i] - pads[i] + dilations[i] * (kernel[i] - 1) + 1
        for i, result in enumerate(results)
    ]
    return [max(0, end - size) for end, size in zip(last, sizes, strict=True)]


def window_counts(
    sizes: Sequence[int], results: Sequence[int], attrs: top.Attrs
) -> list[np.ndarray[Any, Any]]:
    """Return, for each spatial axis, how many counted positions each window of an avg_pool has.

    Args:
        sizes: spatial sizes of the input.
        results: spatial sizes of the result.
        attrs: attributes of the pool.
    """
    kernel, strides = attrs.ints("kernel"), attrs.ints("strides")
    pads, dilations = attrs.ints("pads"), attrs.ints("dilations")
    include = attrs.flag("count_include_pad")
    counts: list[np.ndarray[Any, Any]] = []
    for i, (size, result) in enumerate(zip(sizes, results, strict=True)):
        begin, end = (pads[i], pads[i + len(sizes)]) if include else (0, 0)
        positions = (
            np.arange(result)[:, None] * strides[i]
            + np.arange(kernel[i])[None, :] * dilations[i]
            - pads[i]
        )
        counts.append(((positions >= -begin) & (positions < size + end)).sum(1))
    return counts


def _avg_pool(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
    """Emit AveragePool, or, for `ceil_mode` and dilations, an explicit sum over window counts.

    Runtimes differ in what a window beyond the padding divides by; the counts are ours.
    """
    attrs = op.attrs
    kernel, strides = attrs.ints("kernel"), attrs.ints("strides")
    pads, dilations = attrs.ints("pads"), attrs.ints("dilations")
    if not attrs.flag("ceil_mode") and all(step == 1 for step in dilations):
        graph.emit(
            "AveragePool",
            ins,
            outs,
            kernel_shape=list(kernel),
            strides=list(strides),
            pads=list(pads),
            count_include_pad=int(attrs.flag("count_include_pad")),
        )
        return
    source = tensor_type(op.operands[0])
    _, channels, sizes = top.spatial.split_image(source.get_shape(), attrs)
    _, _, results = top.spatial.split_image(tensor_type(op.results[0]).get_shape(), attrs)
    dtype = top.numpy_dtype(source.get_element_type())
    rank = len(sizes)
    ends = _reached(sizes, results, attrs)
    padded = graph.emit(
        "Pad",
        [
            ins[0],
            graph.ints([0, 0, *pads[:rank], 0, 0, *ends]),
            graph.scalar(0, source.get_element_type()),
        ],
    )
    # A depthwise convolution with ones sums each window.
    ones = graph.constant(np.ones((channels, 1, *kernel), dtype))
    summed = graph.emit(
        "Conv",
        [padded, ones],
        strides=list(strides),
        dilations=list(dilations),
        group=channels,
    )
    total = np.ones((1, 1, *results), np.float64)
    for axis, count in enumerate(window_counts(sizes, results, attrs)):
        total *= count.reshape([-1 if i == axis + 2 else 1 for i in range(rank + 2)])
    exact = graph.emit(
        "Slice",
        [
            summed,
            graph.ints([0] * rank),
            graph.ints(results),
            graph.ints(range(2, rank + 2)),
        ],
    )
    graph.emit("Div", [exact, graph.constant(total.astype(dtype))], outs)


def _resize(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
    attrs = op.attrs
    order = list(range(len(tensor_type(op.operands[0]).get_shape())))
    if attrs.string("layout", "nchw") == "nhwc":
        order = [0, order[-1], *order[1:-1]]
    shape = tensor_type(op.operands[0]).get_shape()
    result = tensor_type(op.results[0]).get_shape()
    scales = np.array(attrs.floats("scales"), np.float32)
    roi = ""
    if "roi" in attrs:
        values = np.array(attrs.floats("roi"), np.float32).reshape(2, -1)[:, order]
        roi = graph.constant(values.reshape(-1))
    # onnx's shape inference multiplies in float64, onnxruntime's kernel in float32.
    exact = all(
        np.floor(np.array(shape, kind) * scales.astype(kind)).tolist() == list(result)
        for kind in (np.float32, np.float64)
    )
    attributes: dict[str, Any] = {
        "mode": attrs.string("mode"),
        "coordinate_transformation_mode": attrs.string("coordinate"),
        "nearest_mode": attrs.string("nearest_mode", "round_prefer_floor"),
        "exclude_outside": attrs.integer("exclude_outside", 0) & 1,
        "antialias": attrs.integer("antialias", 0) & 1,
    }
    for key in ("cubic_coeff_a", "extrapolation_value"):
        if (value := attrs.number(key)) is not None:
            attributes[key] = value
    if "roi" in attrs or exact:
        graph.emit("Resize", [ins[0], roi, graph.constant(scales[order])], outs, **attributes)
    else:
        # Sizes were given and the float32 scale misses them by rounding.
        sizes = graph.ints(result[axis] for axis in order)
        graph.emit("Resize", [ins[0], roi, "", sizes], outs, **attributes)


def _batch_norm(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
    graph.emit("BatchNormalization", ins, outs, epsilon=op.attrs.number("epsilon"))


def _layer_norm(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
    graph.emit(
        "LayerNormalization",
        ins,
        outs,
        epsilon=op.attrs.number("epsilon"),
        axis=op.attrs.integer("axis"),
    )


def _lrn(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
    numbers = {key: op.attrs.number(key) for key in ("alpha", "beta", "bias")}
    graph.emit("LRN", ins, outs, size=op.attrs.integer("size"), **numbers)


def _along_axis(op_type: str) -> Handler:
    def handler(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
        graph.emit(op_type, ins, outs, axis=op.attrs.integer("axis"))

    return handler


def _cumsum(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
    axis = graph.constant(np.array(op.attrs.integer("axis"), np.int64))
    flags = {key: int(op.attrs.flag(key)) for key in ("exclusive", "reverse")}
    graph.emit("CumSum", [ins[0], axis], outs, **flags)


_REDUCTIONS = {
    "mean": ("ReduceMean", "Identity"),
    "sum": ("ReduceSum", "Identity"),
    "max": ("ReduceMax", "Identity"),
    "min": ("ReduceMin", "Identity"),
    "prod": ("ReduceProd", "Identity"),
    "l1": ("ReduceL1", "Abs"),
    "l2": ("ReduceL2", "Abs"),
    "log_sum": ("ReduceLogSum", "Log"),
    "log_sum_exp": ("ReduceLogSumExp", "Identity"),
    "sum_square": ("ReduceSumSquare", "Mul"),
}
"""By kind: the node, and what remains of it when no axis is reduced."""


def _reduce(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
    node, trivial = _REDUCTIONS[op.attrs.string("kind")]
    axes = op.attrs.ints("axes")
    if not axes:
        graph.emit(trivial, ins * (2 if trivial == "Mul" else 1), outs)
        return
    keep = int(op.attrs.flag("keepdims"))
    graph.emit(node, [ins[0], graph.ints(axes)], outs, keepdims=keep)


def _arg(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
    graph.emit(
        "ArgMax" if op.attrs.string("kind") == "max" else "ArgMin",
        ins,
        outs,
        axis=op.attrs.integer("axis"),
        keepdims=int(op.attrs.flag("keepdims")),
        select_last_index=int(op.attrs.flag("select_last")),
    )


def _topk(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
    graph.emit(
        "TopK",
        [ins[0], graph.ints([op.attrs.integer("k")])],
        outs,
        axis=op.attrs.integer("axis"),
        largest=int(op.attrs.flag("largest")),
        sorted=int(op.attrs.flag("sorted")),
    )


def _to_shape(op_type: str, **attributes: int) -> Handler:
    def handler(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
        shape = tensor_type(op.results[0]).get_shape()
        graph.emit(op_type, [ins[0], graph.ints(shape)], outs, **attributes)

    return handler


def _transpose(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
    graph.emit("Transpose", ins, outs, perm=list(op.attrs.ints("perm")))


def _slice(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
    shape = tensor_type(op.operands[0]).get_shape()
    sizes = tensor_type(op.results[0]).get_shape()
    starts, steps = list(op.attrs.ints("starts")), op.attrs.ints("steps")
    ends: list[int] = []
    for axis, size in enumerate(sizes):
        if size == 0:
            starts[axis] = 0
        end = starts[axis] + size * steps[axis] if size else 0
        # -1 would mean the last element; one more than a whole turn back stays before the first.
        ends.append(end if end >= 0 else -shape[axis] - 1)
    parts = [starts, ends, range(len(shape)), steps]
    graph.emit("Slice", [ins[0], *(graph.ints(part) for part in parts)], outs)


def _pad(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
    pads = graph.ints([*op.attrs.ints("pads_begin"), *op.attrs.ints("pads_end")])
    mode = op.attrs.string("mode")
    operands = [ins[0], pads]
    if mode == "constant":
        value = op.attrs.number("value") or 0.0
        operands.append(graph.scalar(value, tensor_type(op.operands[0]).get_element_type()))
    graph.emit("Pad", operands, outs, mode=mode)


def _gather_nd(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
    graph.emit("GatherND", ins, outs, batch_dims=op.attrs.integer("batch_dims"))


def _scatter(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
    reduction = op.attrs.string("reduction")
    if isinstance(op, top.ScatterElementsOp):
        axis = op.attrs.integer("axis")
        graph.emit("ScatterElements", ins, outs, axis=axis, reduction=reduction)
    else:
        graph.emit("ScatterND", ins, outs, reduction=reduction)


def _tile(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
    graph.emit("Tile", [ins[0], graph.ints(op.attrs.ints("repeats"))], outs)


def _cast(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
    import onnx

    dtype = top.numpy_dtype(tensor_type(op.results[0]).get_element_type())
    graph.emit("Cast", ins, outs, to=onnx.helper.np_dtype_to_tensor_dtype(dtype))


_ONE_NODE = (
    "relu sigmoid mish softplus softsign tanh erf exp log sqrt reciprocal neg abs sign floor ceil "
    "round sin cos tan asin acos atan sinh cosh asinh acosh atanh not bitwise_not add sub mul div "
    "pow min max and or xor bitwise_and bitwise_or bitwise_xor equal greater less where"
)
"""Operations that are one ONNX node of the same name, without attributes."""


def _camel(name: str) -> str:
    """Return ONNX's spelling of an operation: `bitwise_and` gives `BitwiseAnd`."""
    return "".join(part.capitalize() for part in name.split("_"))


def _along_scale(op_type: str) -> Handler:
    """A handler for quantising and dequantising: the axis counts where there are several scales."""

    def handler(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
        extra = {key: op.attrs.integer(key) for key in ("axis", "block_size") if key in op.attrs}
        graph.emit(op_type, ins, outs, **extra)

    return handler


def _conv_integer(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
    keys = ("strides", "pads", "dilations")
    lists = {key: list(op.attrs.ints(key)) for key in keys}
    graph.emit("ConvInteger", ins, outs, **lists, group=op.attrs.integer("group"))


HANDLERS: dict[str, Handler] = {
    **{name: _simple(_camel(name)) for name in _ONE_NODE.split()},
    "greater_equal": _simple("GreaterOrEqual"),
    "less_equal": _simple("LessOrEqual"),
    "hard_swish": _simple("HardSwish"),
    "is_nan": _simple("IsNaN"),
    "is_inf": _is_inf,
    "clip": _clip,
    "leaky_relu": _simple("LeakyRelu", "alpha"),
    "elu": _simple("Elu", "alpha"),
    "selu": _simple("Selu", "alpha", "gamma"),
    "celu": _simple("Celu", "alpha"),
    "thresholded_relu": _simple("ThresholdedRelu", "alpha"),
    "hard_sigmoid": _simple("HardSigmoid", "alpha", "beta"),
    "shrink": _simple("Shrink", "bias", "lambd"),
    "silu": _silu,
    "rsqrt": _rsqrt,
    "gelu": _gelu,
    "mod": _mod,
    "bit_shift": _bit_shift,
    "conv": _conv,
    "conv_transpose": _conv,
    "matmul": _simple("MatMul"),
    "linear": _linear,
    "prelu": _simple("PRelu"),
    "max_pool": _max_pool,
    "avg_pool": _avg_pool,
    "resize": _resize,
    "batch_norm": _batch_norm,
    "instance_norm": _simple("InstanceNormalization", "epsilon"),
    "layer_norm": _layer_norm,
    "lrn": _lrn,
    "softmax": _along_axis("Softmax"),
    "log_softmax": _along_axis("LogSoftmax"),
    "hardmax": _along_axis("Hardmax"),
    "concat": _along_axis("Concat"),
    "gather": _along_axis("Gather"),
    "gather_elements": _along_axis("GatherElements"),
    "gather_nd": _gather_nd,
    "scatter_elements": _scatter,
    "scatter_nd": _scatter,
    "cumsum": _cumsum,
    "reduce": _reduce,
    "arg": _arg,
    "topk": _topk,
    "reshape": _to_shape("Reshape", allowzero=1),
    "expand": _to_shape("Expand"),
    "transpose": _transpose,
    "slice": _slice,
    "pad": _pad,
    "tile": _tile,
    "cast": _cast,
    "quantize_linear": _along_scale("QuantizeLinear"),
    "dequantize_linear": _along_scale("DequantizeLinear"),
    "dynamic_quantize_linear": _simple("DynamicQuantizeLinear"),
    "matmul_integer": _simple("MatMulInteger"),
    "conv_integer": _conv_integer,
}
"""How each operation of `top` becomes ONNX nodes (`weight` and `none` are not nodes)."""

_CHANNEL_AXIS = ("batch_norm", "instance_norm", "lrn")
"""Operations whose `axis` is the channel axis, which ONNX wants to be 1."""


def _channel_perm(kind: str, op: top.TopOp) -> list[int] | None:
    """Return the permutation that brings the channels to axis 1, if they are not there."""
    rank = len(tensor_type(op.operands[0]).get_shape())
    axis = 1
    if op.attrs.string("layout", "nchw") == "nhwc":
        axis = rank - 1
    elif kind in _CHANNEL_AXIS:
        axis = op.attrs.integer("axis")
    if axis == 1:
        return None
    return [0, axis, *(i for i in range(1, rank) if i != axis)] if axis else None


def export_op(graph: Exporter, op: top.TopOp, ins: list[str], outs: list[str]) -> None:
    """Emit the nodes of one operation.

    Raises:
        TilewrightError: E0402, it has no float meaning.
    """
    kind = op.name.removeprefix("top.")
    handler = HANDLERS.get(kind)
    if handler is None:
        raise TilewrightError("E0402", f'{kind} "{op.layer_name}" has no float execution')
    perm = _channel_perm(kind, op)
    final = outs
    if perm is not None:
        ins = [graph.emit("Transpose", [ins[0]], perm=perm), *ins[1:]]
        outs = [graph.unique(f"{name}.channels_first") for name in outs]
    clamped = "clamp_min" in op.attrs or "clamp_max" in op.attrs
    raw = [graph.unique(f"{outs[0]}.unclamped")] if clamped else outs
    handler(graph, op, ins, raw)
    if clamped:
        element = tensor_type(op.results[0]).get_element_type()
        low, high = op.attrs.number("clamp_min"), op.attrs.number("clamp_max")
        graph.clamp(raw[0], outs[0], low, high, element)
    if perm is not None:
        back = [int(axis) for axis in np.argsort(perm)]
        for inner, outer in zip(outs, final, strict=True):
            graph.emit("Transpose", [inner], [outer], perm=back)
