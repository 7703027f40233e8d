"""The `top` dialect: result types are inferred, wrong ones name the layer, text round-trips."""

from __future__ import annotations

from io import StringIO
from typing import Any

import numpy as np
import pytest
from xdsl.context import Context
from xdsl.dialects.builtin import (
    Builtin,
    IntegerType,
    ModuleOp,
    NoneType,
    Signedness,
    TensorType,
    bf16,
    f16,
    f32,
    f64,
    i1,
    i8,
    i64,
)
from xdsl.dialects.func import Func
from xdsl.parser import Parser
from xdsl.printer import Printer
from xdsl.utils.exceptions import VerifyException
from xdsl.utils.test_value import create_ssa_value

from tests.unit.top_graphs import Net
from tilewright.dialects import top

CONV: dict[str, Any] = {"strides": [1, 1], "pads": [0] * 4, "dilations": [1, 1], "group": 1}
POOL: dict[str, Any] = {
    "kernel": [2, 2],
    "strides": [2, 2],
    "pads": [0] * 4,
    "dilations": [1, 1],
    "ceil_mode": False,
}


def make(
    kind: str, /, *shapes: list[int] | None, result: list[int] | None = None, **attributes: Any
) -> Any:
    operands = [
        create_ssa_value(NoneType() if shape is None else TensorType(f32, shape))
        for shape in shapes
    ]
    types = None if result is None else [TensorType(f32, result)]
    op = top.create(top.OPS[kind], operands, attributes, name="my/layer", result_types=types)
    op.verify()
    return op


GOOD: list[tuple[str, list[Any], dict[str, Any], list[int]]] = [
    ("conv", [[1, 4, 9, 9], [8, 4, 3, 3], [8]], CONV, [1, 8, 7, 7]),
    ("conv", [[1, 4, 9, 9], [8, 2, 3, 3], None], {**CONV, "group": 2}, [1, 8, 7, 7]),
    ("conv", [[1, 9, 9, 4], [8, 4, 3, 3], None], {**CONV, "layout": "nhwc"}, [1, 7, 7, 8]),
    ("conv", [[1, 4, 9, 9], [8, 4, 3, 3], None], {**CONV, "strides": [2, 2], "pads": [1, 1, 1, 1]},
     [1, 8, 5, 5]),
    ("conv", [[1, 4, 9], [8, 4, 3], None],
     {"strides": [1], "pads": [1, 1], "dilations": [2], "group": 1}, [1, 8, 7]),
    ("conv_transpose", [[1, 4, 5, 5], [4, 3, 3, 3], [6]],
     {**CONV, "group": 2, "strides": [2, 2], "output_pads": [1, 0]}, [1, 6, 12, 11]),
    ("matmul", [[2, 1, 3, 4], [5, 4, 6]], {}, [2, 5, 3, 6]),
    ("matmul", [[4], [4]], {}, []),
    ("matmul", [[3, 4], [4]], {}, [3]),
    ("matmul", [[4], [2, 4, 3]], {}, [2, 3]),
    ("linear", [[2, 7, 4], [5, 4], [5]], {}, [2, 7, 5]),
    ("add", [[2, 3, 1], [4]], {"clamp_min": 0.0}, [2, 3, 4]),
    ("max_pool", [[1, 2, 5, 6]], POOL, [1, 2, 2, 3]),
    ("max_pool", [[1, 2, 5, 6]], {**POOL, "ceil_mode": True}, [1, 2, 3, 3]),
    # A last window that would start in the end padding is dropped.
    ("max_pool", [[1, 2, 5, 5]], {**POOL, "ceil_mode": True, "pads": [1, 1, 1, 1]}, [1, 2, 3, 3]),
    ("reduce", [[2, 3, 4]], {"kind": "mean", "axes": [0, 2], "keepdims": False}, [3]),
    ("reduce", [[2, 3, 4]], {"kind": "mean", "axes": [0, 2], "keepdims": True}, [1, 3, 1]),
    ("transpose", [[2, 3, 4]], {"perm": [2, 0, 1]}, [4, 2, 3]),
    ("concat", [[2, 3], [2, 4]], {"axis": 1}, [2, 7]),
    ("pad", [[2, 3]],
     {"pads_begin": [0, 1], "pads_end": [-1, 2], "mode": "constant", "value": 0.0}, [1, 6]),
    ("gather", [[5, 6], [2, 2]], {"axis": 0}, [2, 2, 6]),
    ("gather_nd", [[5, 6, 7], [4, 2]], {"batch_dims": 0}, [4, 7]),
    ("tile", [[2, 3]], {"repeats": [2, 1]}, [4, 3]),
    ("layer_norm", [[2, 3, 4], [3, 4], [4]], {"epsilon": 1e-5, "axis": 1}, [2, 3, 4]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "shapes", "attributes", "result"), GOOD)
def test_result_types_are_inferred(
    kind: str, shapes: list[Any], attributes: dict[str, Any], result: list[int]
) -> None:
    op = make(kind, *shapes, **attributes)
    assert op.results[0].type == TensorType(f32, result)
    assert op.infer_result_type() == [op.results[0].type]


@pytest.mark.parametrize(("kind", "shapes", "attributes", "result"), GOOD)
def test_a_wrong_result_type_names_the_layer(
    kind: str, shapes: list[Any], attributes: dict[str, Any], result: list[int]
) -> None:
    operands = [create_ssa_value(NoneType() if s is None else TensorType(f32, s)) for s in shapes]
    op = top.create(
        top.OPS[kind],
        operands,
        attributes,
        name="my/layer",
        result_types=[TensorType(f32, [*result, 2])],
    )
    with pytest.raises(VerifyException, match=rf'layer "my/layer" \(top.{kind}\): result is '):
        op.verify()


BAD: list[tuple[str, list[Any], dict[str, Any], list[int] | None, str]] = [
    ("conv", [[1, 4, 9, 9], [8, 3, 3, 3], None], CONV, None, "do not fit"),
    ("conv", [[1, 4, 9, 9], [8, 4, 3, 3], [7]], CONV, None, r"bias has shape \[7\], needs \[8\]"),
    ("conv", [[1, 4, 2, 9], [8, 4, 3, 3], None], CONV, None, "larger than padded input"),
    ("conv", [[1, 4, 9, 9], [8, 4, 3, 3], None], {**CONV, "strides": [0, 1]}, None, "at least 1"),
    ("conv", [[1, 4, 9, 9], [8, 4, 3, 3], None], {**CONV, "pads": [0, 0]}, None, "needs 4"),
    ("conv", [[1, 4, 9, 9], [8, 4, 3, 3], None], {**CONV, "layout": "hwcn"}, None, "nchw, nhwc"),
    ("conv", [[1, 4, 9, 9], [8, 4, 3, 3], None], {**CONV, "clamp_min": 6.0, "clamp_max": 0.0},
     None, "is above"),
    ("conv", [[1, 4, 9, 9], [8, 4, 3], None], CONV, None, "need rank 4"),
    ("conv", [[4, 9], [8, 4, 3], None], CONV, None, "rank 3 or more"),
    ("conv_transpose", [[1, 4, 5, 5], [3, 3, 3, 3], None], {**CONV, "output_pads": [0, 0]}, None,
     "do not fit"),
    ("matmul", [[2, 3], [4, 5]], {}, None, "inner sizes"),
    ("linear", [[2, 3], [5, 4], None], {}, None, "do not fit"),
    ("add", [[2, 3], [2, 4]], {}, None, "do not broadcast"),
    ("clip", [[2]], {"min": 1.0, "max": 0.0}, None, "is above"),
    ("softmax", [[2, 3]], {"axis": -1}, None, "operand has rank 2"),
    ("reduce", [[2, 3]], {"kind": "median", "axes": [0], "keepdims": True}, None, "legal are"),
    ("reduce", [[2, 3]], {"kind": "max", "axes": [1, 0], "keepdims": True}, None, "sorted"),
    ("arg", [[2, 3]], {"kind": "max", "axis": 2, "keepdims": True, "select_last": False}, None,
     "rank 2"),
    ("topk", [[2, 3]], {"k": 4, "axis": 1, "largest": True, "sorted": True}, None, "`k` is 4"),
    ("reshape", [[2, 3]], {}, [7], "other than the elements"),
    ("reshape", [[2, 3]], {}, None, "result type must be given"),
    ("transpose", [[2, 3]], {"perm": [0, 0]}, None, "does not permute"),
    ("concat", [[2, 3], [3, 3]], {"axis": 1}, None, "differ outside axis 1"),
    ("slice", [[4]], {"starts": [2], "steps": [2]}, [2], "leave 0..3"),
    ("slice", [[4]], {"starts": [2], "steps": [0]}, [1], "leave 0..3"),
    ("pad", [[2]], {"pads_begin": [-2], "pads_end": [-1], "mode": "constant", "value": 0.0}, None,
     "more than there is"),
    ("expand", [[2]], {}, [3], "do not broadcast"),
    ("prelu", [[2], [3, 2]], {}, None, "does not broadcast"),
    ("where", [[2], [2], [2]], {}, None, "condition must be i1"),
    ("batch_norm", [[1, 3], [3], [3], [3], [2]], {"epsilon": 1e-5, "axis": 1}, None,
     "var has shape"),
    ("resize", [[1, 1, 4, 4]], {"mode": "cubical", "coordinate": "asymmetric",
     "scales": [1.0] * 4}, None, "legal are nearest"),
    ("resize", [[1, 1, 4, 4]], {"mode": "linear", "coordinate": "asymmetric",
     "scales": [1.0, 1.0, 2.0, 2.0]}, [1, 1, 8, 5], "is not 5"),
    ("max_pool", [[1, 1, 1, 4]], POOL, None, "larger than the padded input"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "shapes", "attributes", "result", "message"), BAD)
def test_what_does_not_fit_is_refused(
    kind: str,
    shapes: list[Any],
    attributes: dict[str, Any],
    result: list[int] | None,
    message: str,
) -> None:
    with pytest.raises(VerifyException, match=rf'layer "my/layer" \(top.{kind}\):.*{message}'):
        make(kind, *shapes, result=result, **attributes)


def test_element_types_must_agree() -> None:
    a = create_ssa_value(TensorType(f32, [2]))
    b = create_ssa_value(TensorType(i64, [2]))
    with pytest.raises(VerifyException, match="element types differ: f32, i64"):
        top.create(top.AddOp, [a, b], name="l")


def test_dynamic_shapes_are_refused() -> None:
    x = create_ssa_value(TensorType(f32, [-1, 2]))
    with pytest.raises(VerifyException, match="dynamic shape"):
        top.create(top.ReluOp, [x], name="l")


def test_movers_take_quantised_types() -> None:
    from tilewright.dialects.quant import UniformType

    element = UniformType.of(0.5, 3)
    x = create_ssa_value(TensorType(element, [1, 2, 4, 4]))
    movers: list[tuple[str, dict[str, Any], list[int] | None]] = [
        ("reshape", {}, [2, 16]),
        ("transpose", {"perm": [0, 2, 3, 1]}, None),
        ("max_pool", POOL, None),
        ("slice", {"starts": [0] * 4, "steps": [1] * 4}, [1, 1, 4, 4]),
    ]
    for kind, attributes, shape in movers:
        types = None if shape is None else [TensorType(element, shape)]
        op = top.create(top.OPS[kind], [x], attributes, name=kind, result_types=types)
        op.verify()
        result = op.results[0].type
        assert isinstance(result, TensorType)
        assert result.get_element_type() == element


def mixed() -> Net:
    net = Net([1, 4, 8, 8])
    c = net.conv(net.x, 4, pad=1, clamp_min=0.0, clamp_max=6.0)
    p = net.pool("avg_pool", net.op("hard_swish", c), 2)
    flat = net.op("reshape", p, shape=[1, 196])
    dense = net.op("linear", flat, net.random(3, 196), net.none())
    kinds = net.op("cast", dense, shape=[1, 3], element=i64)
    return net.outputs(net.op("softmax", dense, axis=1), kinds)


@pytest.mark.parametrize("generic", [False, True])
def test_text_round_trips(generic: bool) -> None:
    module = mixed().module
    stream = StringIO()
    Printer(stream, print_generic_format=generic).print_op(module)
    ctx = Context()
    for dialect in (Builtin, Func, top.Top):
        ctx.load_dialect(dialect)
    again = Parser(ctx, stream.getvalue()).parse_module()
    again.verify()
    assert again.is_structurally_equivalent(module)
    assert isinstance(again, ModuleOp)


@pytest.mark.parametrize("kind", top.UNARY_OPS)
def test_every_unary_keeps_its_type(kind: str) -> None:
    attributes: dict[str, Any] = {
        key: ("none" if form == "str" else 1.0)
        for key, form in top.elementwise.UNARY[kind][1].items()
    }
    op = make(kind, [2, 3], **attributes)
    assert op.results[0].type == op.operands[0].type


def test_a_missing_attribute_is_refused() -> None:
    with pytest.raises(VerifyException, match="alpha"):
        make("leaky_relu", [2])


@pytest.mark.parametrize(
    ("element", "name"),
    [
        (f32, "float32"), (f16, "float16"), (f64, "float64"), (bf16, "bfloat16"), (i1, "bool"),
        (i8, "int8"), (i64, "int64"), (IntegerType(8, Signedness.UNSIGNED), "uint8"),
    ],
)  # fmt: skip
def test_element_types_and_numpy_types(element: Any, name: str) -> None:
    dtype = top.numpy_dtype(element)
    assert dtype.name == name
    assert top.element_type(dtype) == element


def test_types_numpy_lacks_are_refused() -> None:
    with pytest.raises(TypeError):
        top.numpy_dtype(IntegerType(4))
    with pytest.raises(TypeError):
        top.element_type(np.dtype(np.complex64))


def test_python_values_become_attributes() -> None:
    def show(value: Any) -> str:
        return str(top.to_attribute(value))

    assert show(True) == "true"
    assert show(3) == "3 : i64"
    assert show(0.5) == "5.000000e-01 : f32"
    assert show([1, 2]) == "array<i64: 1, 2>"
    assert show([1.0, 2]) == "array<f32: 1.000000e+00, 2.000000e+00>"
    assert show("a") == '"a"'
    assert show(["a", "b"]) == '["a", "b"]'
    with pytest.raises(TypeError):
        top.to_attribute(object())  # pyright: ignore[reportArgumentType]
