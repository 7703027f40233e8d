"""Operators on codes, written out with `DequantizeLinear`, the float operator, `QuantizeLinear`.

    QLinearConv(x, s_x, z_x, w, s_w, z_w, s_y, z_y, b)
  is
    QuantizeLinear(Conv(DequantizeLinear(x, s_x, z_x), DequantizeLinear(w, s_w, z_w),
                        DequantizeLinear(b, s_x * s_w)), s_y, z_y)

That is how ONNX and onnxruntime define them, up to the order in which floats are rounded. The float
operator keeps the user's name of the node. From there on both formats of quantised models are one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.frontends.onnx.infer import Value, node_title
from tilewright.frontends.onnx.reader import domain_of
from tilewright.frontends.onnx.scope import Scope, constant, label_of
from tilewright.frontends.onnx.tensors import malformed

if TYPE_CHECKING:
    from onnx import NodeProto

    from tilewright.frontends.onnx.graph import GraphWalker

BODY_OPSET = 21
"""The opset the written-out nodes are meant by: the first with 16-bit codes."""

MICROSOFT = "com.microsoft"

Build = Callable[["_Body"], str]
"""Adds the nodes of one operator; returns the name of its result."""


class _Body:
    """The nodes that stand for one node; operand `i` of that is called `i<i>`."""

    def __init__(self, node: NodeProto, inputs: Sequence[Value]) -> None:
        self.node = node
        self.inputs = inputs
        self.label = label_of(node)
        self.nodes: list[NodeProto] = []

    def given(self, index: int) -> str:
        """Return the name of operand `index`; empty if it is left out."""
        return f"i{index}" if index < len(self.inputs) and self.inputs[index].name else ""

    def needs(self, low: int, high: int | None = None) -> None:
        """Check the number of operands.

        Raises:
            TilewrightError: E0106.
        """
        count = len(self.inputs)
        if not low <= count <= (low if high is None else high):
            span = f"{low}" if high in (None, low) else f"{low} to {high}"
            raise malformed(
                f"{node_title(self.node)} has {count} inputs", f"{self.node.op_type} takes {span}"
            )

    def attributes(self, *names: str) -> dict[str, Any]:
        """Return those of the node's attributes that are there; others must not be.

        Raises:
            TilewrightError: E0106, the node has another attribute.
        """
        from onnx import helper

        found = {a.name: helper.get_attribute_value(a) for a in self.node.attribute}
        if strange := sorted(set(found) - set(names)):
            raise malformed(f"{node_title(self.node)} has the unknown attribute {strange[0]!r}")
        return found

    def add(self, op_type: str, inputs: Iterable[str], part: str = "", **extra: Any) -> str:
        """Add a node; without `part` it has the user's name. Returns its result's name."""
        return self.add_all(op_type, inputs, part, 1, **extra)[0]

    def add_all(
        self, op_type: str, inputs: Iterable[str], part: str, results: int, **extra: Any
    ) -> list[str]:
        """Add a node with several results."""
        from onnx import helper

        name = f"{self.label}/{part}" if part else self.label
        outputs = [f"t{len(self.nodes)}_{index}" for index in range(results)]
        operands = list(inputs)
        while operands and not operands[-1]:
            operands.pop()
        self.nodes.append(helper.make_node(op_type, operands, outputs, name=name, **extra))
        return outputs

    def real(self, index: int, part: str, axis: int | None = None) -> str:
        """Dequantise operand `index`, whose scale and zero point follow it."""
        extra = {} if axis is None else {"axis": axis}
        names = [self.given(index), self.given(index + 1), self.given(index + 2)]
        return self.add("DequantizeLinear", names, f"dequantize_{part}", **extra)

    def codes(self, value: str, index: int, like: int = 0) -> str:
        """Quantise `value` with scale and zero point of the operands from `index` on.

        Without a zero point the codes have the type of operand `like`.
        """
        extra = {} if self.given(index + 1) else {"output_dtype": self.inputs[like].elem_type}
        names = [value, self.given(index), self.given(index + 1)]
        return self.add("QuantizeLinear", names, "quantize", **extra)

    def rank(self, index: int) -> int:
        """Return the rank of operand `index`."""
        return len(self.inputs[index].shape or ())

    def bias(self, index: int, scales: tuple[int, int]) -> str:
        """Dequantise an int32 bias, whose scale is the product of two operands."""
        scale = self.add("Mul", [self.given(i) for i in scales], "bias_scale")
        return self.add("DequantizeLinear", [self.given(index), scale], "dequantize_bias", axis=0)


def _conv(body: _Body) -> str:
    body.needs(8, 9)
    names = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    extra = body.attributes(*names)
    operands = [body.real(0, "x"), body.real(3, "w", axis=0)]
    if body.given(8):
        operands.append(body.bias(8, (1, 4)))
    return body.codes(body.add("Conv", operands, **extra), 6)


def _matmul(body: _Body) -> str:
    body.needs(8)
    body.attributes()
    a = body.real(0, "a", axis=max(0, body.rank(0) - 2))
    b = body.real(3, "b", axis=max(0, body.rank(3) - 1))
    return body.codes(body.add("MatMul", [a, b]), 6)


def _gemm(body: _Body) -> str:
    body.needs(6, 9)
    extra = body.attributes("alpha", "transA", "transB")
    a, b = body.real(0, "a"), body.real(3, "b", axis=0 if extra.get("transB") else 1)
    operands = [a, b]
    if body.given(6):
        operands.append(body.bias(6, (1, 4)))
    result = body.add("Gemm", operands, **extra)
    return body.codes(result, 7) if body.given(7) else result


def _binary(op_type: str) -> Build:
    def build(body: _Body) -> str:
        body.needs(7, 8)
        body.attributes()
        result = body.add(op_type, [body.real(0, "a"), body.real(3, "b")])
        return body.codes(result, 6)

    return build


def _unary(op_type: str, *names: str, dropped: tuple[str, ...] = ()) -> Build:
    def build(body: _Body) -> str:
        body.needs(4, 5)
        extra = body.attributes(*names, *dropped)
        if extra.get("channels_last"):
            raise malformed(f"{node_title(body.node)}: `channels_last` is not supported")
        if op_type == "Softmax" and extra.get("opset", 13) < 13:
            axis = extra.get("axis", 1)
            if axis not in (-1, body.rank(0) - 1):
                raise malformed(
                    f"{node_title(body.node)}: a softmax over several axes is not supported"
                )
            extra["axis"] = -1
        kept = {key: value for key, value in extra.items() if key not in dropped}
        if op_type == "ReduceMean" and "axes" in kept:
            return _reduce(body, kept)
        return body.codes(body.add(op_type, [body.real(0, "x")], **kept), 3)

    return build


def _reduce(body: _Body, extra: dict[str, Any]) -> str:
    from onnx import helper, numpy_helper

    axes = numpy_helper.from_array(np.array(extra.pop("axes"), np.int64), "axes")
    body.nodes.append(
        helper.make_node("Constant", [], ["axes"], name=f"{body.label}/axes", value=axes)
    )
    return body.codes(body.add("ReduceMean", [body.real(0, "x"), "axes"], **extra), 3)


def _concat(body: _Body) -> str:
    count = len(body.inputs) - 2
    if count < 3 or count % 3:
        raise malformed(f"{node_title(body.node)} has {count + 2} inputs", "it takes 2 + 3 n")
    extra = body.attributes("axis")
    parts = [body.real(2 + 3 * i, f"x{i}") for i in range(count // 3)]
    return body.codes(body.add("Concat", parts, **extra), 0, like=2)


def _where(body: _Body) -> str:
    body.needs(9)
    body.attributes()
    operands = [body.given(0), body.real(1, "x"), body.real(4, "y")]
    return body.codes(body.add("Where", operands), 7, like=1)


def _quantize(op_type: str) -> Build:
    def build(body: _Body) -> str:
        body.needs(2, 3)
        extra = body.attributes("axis", "block_size")
        names = [body.given(0), body.given(1), body.given(2)]
        return body.add(op_type, names, **extra)

    return build


def _dynamic_matmul(body: _Body) -> str:
    """`DynamicQuantizeMatMul(a, b, s_b, z_b, bias)`: the four nodes it was fused from."""
    body.needs(3, 5)
    body.attributes()
    codes, scale, zero = body.add_all("DynamicQuantizeLinear", ["i0"], "quantize", 3)
    return _scaled(body, [codes, "i1", zero, body.given(3)], (scale, "i2"), body.given(4))


def _matmul_to_float(body: _Body) -> str:
    """`MatMulIntegerToFloat(a, b, s_a, s_b, z_a, z_b, bias)`."""
    body.needs(4, 7)
    body.attributes()
    operands = ["i0", "i1", body.given(4), body.given(5)]
    return _scaled(body, operands, ("i2", "i3"), body.given(6))


def _scaled(body: _Body, operands: list[str], scales: tuple[str, str], bias: str) -> str:
    sums = body.add("MatMulInteger", operands)
    real = body.add("Cast", [sums], "cast", to=1)
    factor = body.add("Mul", scales, "scale")
    result = body.add("Mul", [real, factor], "scaled")
    return body.add("Add", [result, bias], "biased") if bias else result


_POOL = ("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")

BUILDERS: dict[tuple[str, str], Build] = {
    ("", "QLinearConv"): _conv,
    ("", "QLinearMatMul"): _matmul,
    (MICROSOFT, "QLinearConv"): _conv,
    (MICROSOFT, "QLinearAdd"): _binary("Add"),
    (MICROSOFT, "QLinearMul"): _binary("Mul"),
    (MICROSOFT, "QLinearSigmoid"): _unary("Sigmoid"),
    (MICROSOFT, "QLinearLeakyRelu"): _unary("LeakyRelu", "alpha"),
    (MICROSOFT, "QLinearSoftmax"): _unary("Softmax", "axis", dropped=("opset",)),
    (MICROSOFT, "QLinearGlobalAveragePool"): _unary(
        "GlobalAveragePool", dropped=("channels_last",)
    ),
    (MICROSOFT, "QLinearAveragePool"): _unary("AveragePool", *_POOL, dropped=("channels_last",)),
    (MICROSOFT, "QLinearReduceMean"): _unary("ReduceMean", "axes", "keepdims"),
    (MICROSOFT, "QLinearConcat"): _concat,
    (MICROSOFT, "QLinearWhere"): _where,
    (MICROSOFT, "QGemm"): _gemm,
    (MICROSOFT, "QuantizeLinear"): _quantize("QuantizeLinear"),
    (MICROSOFT, "DequantizeLinear"): _quantize("DequantizeLinear"),
    (MICROSOFT, "DynamicQuantizeMatMul"): _dynamic_matmul,
    (MICROSOFT, "MatMulIntegerToFloat"): _matmul_to_float,
}
"""By domain and operator."""


def expand_quantised(
    walker: GraphWalker, node: NodeProto, inputs: list[Value], scope: Scope, depth: int
) -> list[Value] | None:
    """Walk the nodes that stand for an operator on codes; None if `node` is none.

    Raises:
        TilewrightError: E0106, operands or attributes are not those of the operator.
    """
    domain = domain_of(node.domain)
    build = BUILDERS.get((domain, node.op_type))
    if build is None:
        return None
    if domain and domain not in scope.opsets:
        return None
    body = _Body(node, inputs)
    result = build(body)
    inner = Scope(
        {**scope.opsets, "": max(BODY_OPSET, scope.opsets.get("", 0))}, None, scope.prefix
    )
    for index, value in enumerate(inputs):
        if value.name:
            inner.names[f"i{index}"] = value
    first = len(walker.records)
    walker.walk(body.nodes, inner, depth=depth + 1)
    return [walker.given_out(inner, result, node.output[0], node, first)]


def widen_codes(node: NodeProto, inputs: list[Value]) -> list[Value]:
    """Return the operands of a `DequantizeLinear` with constant 4-bit (2-bit) codes as 8-bit ones.

    No numbers change: only constants are stored so, and `top` has no such element types.
    """
    from onnx import TensorProto as T

    if node.op_type != "DequantizeLinear" or domain_of(node.domain):
        return inputs
    wide = {
        getattr(T, name): (kind, np.dtype(dtype))
        for name, kind, dtype in (
            ("INT4", T.INT8, np.int8),
            ("UINT4", T.UINT8, np.uint8),
            ("INT2", T.INT8, np.int8),
            ("UINT2", T.UINT8, np.uint8),
        )
        if hasattr(T, name)
    }
    found = list(inputs)
    for index in (0, 2):
        if index < len(found) and found[index].elem_type in wide:
            value = found[index]
            if value.constant is None:
                return inputs
            kind, dtype = wide[value.elem_type]
            found[index] = constant(value.name, value.constant.astype(dtype), kind)
    return found
