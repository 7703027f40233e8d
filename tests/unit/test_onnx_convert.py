"""`convert-onnx-to-top`: each operator by the opset of the file, against onnxruntime and numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto, defs, helper

from tests.unit.onnx_graphs import model_of, normal, run_ort, run_ours, to_top, top_ops
from tilewright.diagnostics import TilewrightError
from tilewright.dialects import top
from tilewright.dialects.onnx import UnknownValueError
from tilewright.frontends.onnx import import_onnx
from tilewright.ir.context import CompileContext
from tilewright.ir.weights import Array
from tilewright.spec.ops import ONNX_OPS, TOP_OPS, importable
from tilewright.transforms.convert_onnx_to_top import ConvertOnnxToTopPass
from tilewright.transforms.onnx.base import RULES, RefusedError
from tilewright.transforms.onnx.shaping import resolve_slice
from tilewright.transforms.onnx.spatial import same_pads


def node_model(
    op_type: str,
    shape: list[int],
    constants: Mapping[str, Array] | None = None,
    *,
    opset: int = 17,
    outputs: int = 1,
    operands: list[str] | None = None,
    **attributes: Any,
) -> ModelProto:
    """One node on input `x`, then `constants` in order (or `operands` by name)."""
    constants = constants or {}
    names = operands if operands is not None else ["x", *constants]
    results = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(op_type, names, results, name="n", **attributes)
    return model_of([node], {"x": shape}, results, constants, opset)


def check(model: ModelProto, shape: list[int], atol: float = 1e-6) -> list[str]:
    """Compare with onnxruntime; return the `top` ops."""
    feed = {"x": normal(*shape)}
    for got, want in zip(run_ours(model, feed), run_ort(model, feed), strict=True):
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=atol)
    return top_ops(to_top(model)[0])


def refusal(model: ModelProto) -> str:
    ctx = CompileContext()
    module = import_onnx(model, None, ctx)
    with pytest.raises(TilewrightError) as caught:
        ConvertOnnxToTopPass().apply(ctx, module)
    assert caught.value.code == "E0104"
    assert '"n"' in caught.value.details[0]
    refused = [d for d in ctx.decisions if d.stage == "convert-onnx-to-top"]
    assert [d.fired for d in refused] == [False]
    assert refused[0].reason in caught.value.details[0]
    return caught.value.details[0]


# The pass.


def test_twice_is_once() -> None:
    module, ctx = to_top(node_model("Relu", [2, 3]))
    text = str(module)
    ConvertOnnxToTopPass().apply(ctx, module)
    assert str(module) == text


def test_all_refusals_at_once() -> None:
    nodes = [
        helper.make_node("Dropout", ["x", "r", "t"], ["a"], name="first"),
        helper.make_node("Relu", ["a"], ["b"], name="behind"),
        helper.make_node("Mod", ["x", "x"], ["c"], name="second"),
    ]
    constants: dict[str, Array] = {"r": np.array(0.5, np.float32), "t": np.array(True)}
    model = model_of(nodes, {"x": [2]}, ["b", "c"], constants)
    ctx = CompileContext()
    module = import_onnx(model, None, ctx)
    with pytest.raises(TilewrightError) as caught:
        ConvertOnnxToTopPass().apply(ctx, module)
    assert len(caught.value.details) == 2
    assert "first" in caught.value.details[0]
    assert "second" in caught.value.details[1]


def test_weights_nothing_reads_are_dropped() -> None:
    model = node_model("Slice", [4, 4], {"s": np.array([1]), "e": np.array([3])})
    _, ctx = to_top(model)
    assert list(ctx.weights) == []


def test_operand_known_only_at_run_time() -> None:
    model = node_model("CumSum", [3], operands=["x", "axis"])
    model.graph.input.append(helper.make_tensor_value_info("axis", TensorProto.INT64, []))
    ctx = CompileContext()
    module = import_onnx(model, None, ctx)
    with pytest.raises(UnknownValueError) as caught:
        ConvertOnnxToTopPass().apply(ctx, module)
    assert caught.value.inputs == ("axis",)


def test_names_of_parts() -> None:
    module, _ = to_top(node_model("Softmax", [2, 3, 4], opset=11))
    found = [
        op.layer_name
        for op in module.walk()
        if isinstance(op, top.TopOp) and not isinstance(op, top.WeightOp)
    ]
    assert found == ["n/reshape", "n/softmax", "n"]


# The table.


def test_rules_and_table_agree() -> None:
    direct = {name for name in ONNX_OPS if importable("", name) == "direct"}
    assert direct == set(RULES)
    assert all(op in TOP_OPS for row in ONNX_OPS.values() for op in row.top)
    assert set(TOP_OPS) == set(top.OPS)
    assert all(row.reason for row in ONNX_OPS.values() if row.how == "refused")
    assert all(row.reason for row in TOP_OPS.values() if row.place == "host")


def test_table_says_what_the_quantiser_does() -> None:
    """An op is listed for the device if, and only if, there is a rule for its integer form."""
    from tilewright.quant.functions import FUNCTIONS
    from tilewright.transforms.quant.classify import RULES as INTEGER_RULES
    from tilewright.transforms.quant.emit_rows import ROW_OPS

    device = {name for name, row in TOP_OPS.items() if row.place not in ("host", "none")}
    rules = {name.removeprefix("top.") for name in INTEGER_RULES} & set(TOP_OPS)
    # Functions with holes have a table, but no symmetric scale they can be used with.
    probe = np.array([-1.0, 0.0, 1.0])
    with np.errstate(all="ignore"):
        holes = {n for n in ("log", "sqrt", "rsqrt") if np.isnan(FUNCTIONS[n](probe, {})).any()}
    rows = {name.removeprefix("top.") for name in ROW_OPS}
    assert device - {"batch_norm"} - rows == rules - holes


def test_table_covers_every_operator() -> None:
    known = {
        s.name for s in defs.get_all_schemas_with_history() if s.domain == "" and not s.deprecated
    }
    assert known <= set(ONNX_OPS)


# Opsets.


@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("axis", [None, 0, 1, 2, -1])
def test_softmax_below_13_flattens(op_type: str, axis: int | None) -> None:
    attributes: dict[str, Any] = {} if axis is None else {"axis": axis}
    for opset in (11, 13):
        model = node_model(op_type, [2, 3, 4], opset=opset, **attributes)
        check(model, [2, 3, 4])


def test_softmax_11_by_hand() -> None:
    x = normal(2, 3, 4)
    flat = np.exp(x.reshape(2, 12))
    wanted = (flat / flat.sum(1, keepdims=True)).reshape(x.shape)
    found = run_ours(node_model("Softmax", [2, 3, 4], opset=11), {"x": x})[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize(
    "op_type", ["ReduceMean", "ReduceSum", "ReduceMax", "ReduceL2", "ReduceProd"]
)
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("axes", [None, [1], [-1, 0]])
def test_reductions_by_attribute_and_operand(
    op_type: str, keepdims: int, axes: list[int] | None
) -> None:
    attributes: dict[str, Any] = {} if axes is None else {"axes": axes}
    check(node_model(op_type, [2, 3, 4], opset=11, keepdims=keepdims, **attributes), [2, 3, 4])
    constants: dict[str, Array] = {} if axes is None else {"a": np.array(axes)}
    check(node_model(op_type, [2, 3, 4], constants, opset=18, keepdims=keepdims), [2, 3, 4])


def test_reduction_without_axes_that_does_nothing_but_squares() -> None:
    x = normal(3, 2, 2)
    for op_type, wanted in (
        ("ReduceSumSquare", x * x),
        ("ReduceSum", x),
        ("ReduceL1", abs(x)),
        ("ReduceLogSumExp", x),
    ):
        model = node_model(op_type, [3, 2, 2], opset=18, noop_with_empty_axes=1)
        np.testing.assert_allclose(run_ours(model, {"x": x})[0], wanted, rtol=1e-5)


def test_squeeze_and_unsqueeze_by_attribute_and_operand() -> None:
    check(node_model("Squeeze", [1, 3, 1, 4], opset=11, axes=[2]), [1, 3, 1, 4])
    check(node_model("Squeeze", [1, 3, 1, 4], {"a": np.array([-2])}, opset=13), [1, 3, 1, 4])
    check(node_model("Squeeze", [1, 3, 1, 4], opset=13), [1, 3, 1, 4])
    check(node_model("Unsqueeze", [3, 4], opset=11, axes=[0, 3]), [3, 4])
    check(node_model("Unsqueeze", [3, 4], {"a": np.array([0, -1])}, opset=13), [3, 4])


def test_rank_0_stays_rank_0() -> None:
    found = run_ours(node_model("ReduceSum", [2, 3], opset=13, keepdims=0), {"x": normal(2, 3)})
    assert found[0].shape == ()


def test_clip_in_three_forms() -> None:
    assert check(node_model("Clip", [9], opset=9, min=-0.5, max=0.25), [9]) == ["top.clip"]
    bounds: dict[str, Array] = {"lo": np.array(-0.5, np.float32), "hi": np.array(0.25, np.float32)}
    assert check(node_model("Clip", [9], bounds), [9]) == ["top.clip"]
    assert check(node_model("Clip", [9], bounds, operands=["x", "", "hi"]), [9]) == ["top.clip"]
    assert check(node_model("Clip", [9]), [9]) == []
    reversed_bounds = {"lo": bounds["hi"], "hi": bounds["lo"]}
    assert check(node_model("Clip", [9], reversed_bounds), [9]) == ["top.clip"] * 2
    assert "scalars" in refusal(node_model("Clip", [9], operands=["x", "x"]))
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["low"], keepdims=0),
        helper.make_node("Clip", ["x", "low"], ["y"], name="n"),
    ]
    assert "top.max" in check(model_of(nodes, {"x": [9]}, ["y"]), [9])


def test_upsample_and_old_resize() -> None:
    scales: dict[str, Array] = {"s": np.array([1, 1, 2, 3], np.float32)}
    for mode in ("nearest", "linear"):
        x = normal(1, 2, 3, 4)
        old = node_model("Upsample", [1, 2, 3, 4], opset=7, mode=mode, scales=[1.0, 1.0, 2.0, 3.0])
        new = node_model("Upsample", [1, 2, 3, 4], scales, opset=9, mode=mode)
        ten = node_model("Resize", [1, 2, 3, 4], scales, opset=10, mode=mode)
        results = [run_ours(model, {"x": x})[0] for model in (old, new, ten)]
        np.testing.assert_array_equal(results[0], results[1])
        np.testing.assert_array_equal(results[0], results[2])
        np.testing.assert_allclose(results[0], run_ort(new, {"x": x})[0], rtol=1e-5)
    shrink: dict[str, Array] = {"s": np.array([1, 1, 0.7, 0.7], np.float32)}
    assert "nearest" in refusal(node_model("Resize", [1, 2, 9, 9], shrink, opset=10))


@pytest.mark.parametrize(
    "coordinate", ["half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"]
)
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("scale", [(2.0, 1.5), (0.5, 0.75)])
def test_resize(coordinate: str, mode: str, scale: tuple[float, float]) -> None:
    constants: dict[str, Array] = {"s": np.array([1, 1, *scale], np.float32)}
    model = node_model(
        "Resize",
        [1, 2, 6, 8],
        constants,
        operands=["x", "", "s"],
        mode=mode,
        coordinate_transformation_mode=coordinate,
    )
    check(model, [1, 2, 6, 8], atol=1e-5)


def test_resize_refusals() -> None:
    constants: dict[str, Array] = {"s": np.array([1, 1, 0.7, 0.7], np.float32)}
    fields: dict[str, Any] = {"operands": ["x", "", "s"], "mode": "linear", "opset": 18}
    fraction = node_model(
        "Resize", [1, 1, 9, 9], constants, coordinate_transformation_mode="align_corners", **fields
    )
    assert "align_corners" in refusal(fraction)
    fields["mode"] = "cubic"
    sharp = node_model("Resize", [1, 1, 9, 9], constants, antialias=1, cubic_coeff_a=-0.5, **fields)
    assert "antialias" in refusal(sharp)
    crop = node_model(
        "Resize",
        [1, 1, 9, 9],
        constants,
        coordinate_transformation_mode="tf_crop_and_resize",
        **fields,
    )
    assert "roi" in refusal(crop)


def test_split_in_four_forms() -> None:
    for model in (
        node_model("Split", [2, 6], outputs=2, opset=11, axis=1, split=[2, 4]),
        node_model("Split", [2, 6], {"s": np.array([2, 4])}, outputs=2, opset=13, axis=-1),
        node_model("Split", [2, 6], outputs=3, opset=13, axis=1),
        node_model("Split", [2, 7], outputs=3, opset=18, axis=1, num_outputs=3),
    ):
        shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
        assert set(check(model, shape)) == {"top.slice"}


def test_pad_by_attribute_and_operand() -> None:
    check(node_model("Pad", [2, 3], opset=10, pads=[0, 1, 1, 0], value=2.5), [2, 3])
    pads: dict[str, Array] = {"p": np.array([0, 1, 1, 0]), "v": np.array(2.5, np.float32)}
    for opset in (11, 18, 21):
        check(node_model("Pad", [2, 3], pads, opset=opset), [2, 3])
    for mode in ("reflect", "edge", "wrap"):
        model = node_model("Pad", [3, 3], {"p": np.array([1, 2, 0, 1])}, opset=19, mode=mode)
        check(model, [3, 3])
    some: dict[str, Array] = {
        "p": np.array([1, 2]),
        "v": np.array(-np.inf, np.float32),
        "a": np.array([-1]),
    }
    check(node_model("Pad", [2, 3], some, opset=18), [2, 3])
    cut: dict[str, Array] = {"p": np.array([0, -1, 0, 1])}
    check(node_model("Pad", [2, 3], cut), [2, 3])
    beyond = node_model("Pad", [2, 3], {"p": np.array([2, 0, 0, 0])}, mode="reflect")
    assert "reflection" in refusal(beyond)


def test_dropout() -> None:
    check(node_model("Dropout", [2, 3], opset=7, ratio=0.5), [2, 3])
    x = normal(2, 3)
    y, mask = run_ours(node_model("Dropout", [2, 3], outputs=2, opset=13), {"x": x})
    np.testing.assert_array_equal(y, x)
    assert mask.dtype == np.bool_
    assert mask.all()
    train: dict[str, Array] = {"r": np.array(0.5, np.float32), "t": np.array(True)}
    assert "training_mode" in refusal(node_model("Dropout", [2, 3], train))


def test_batch_norm_uses_stored_statistics() -> None:
    stats = {name: np.abs(normal(3, seed=i)) + 0.5 for i, name in enumerate("sbmv")}
    for opset in (7, 9, 15):
        model = node_model("BatchNormalization", [2, 3, 4, 4], stats, opset=opset, epsilon=1e-3)
        assert check(model, [2, 3, 4, 4]) == ["top.batch_norm"]
    model = node_model("BatchNormalization", [2, 3, 4, 4], stats, opset=7, spatial=0)
    # With spatial = 0 the statistics have the shape of an image: shape inference may object first.
    with pytest.raises(TilewrightError):
        to_top(model)
    training = node_model(
        "BatchNormalization", [2, 3, 4, 4], stats, opset=15, outputs=3, training_mode=1
    )
    assert "results other than the first" in refusal(training)
    only_mode = node_model("BatchNormalization", [2, 3, 4, 4], stats, opset=15, training_mode=1)
    with pytest.raises(TilewrightError):
        to_top(only_mode)


# Convolutions and pools.


@pytest.mark.parametrize("auto_pad", ["NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize(
    ("kernel", "stride", "dilation"), [(3, 1, 1), (2, 2, 1), (4, 3, 1), (3, 1, 2)]
)
def test_conv_auto_pad(auto_pad: str, kernel: int, stride: int, dilation: int) -> None:
    weights = {"w": normal(4, 2, kernel, kernel, seed=1), "b": normal(4, seed=2)}
    model = node_model(
        "Conv",
        [1, 4, 9, 10],
        weights,
        auto_pad=auto_pad,
        strides=[stride, stride],
        dilations=[dilation, dilation],
        group=2,
    )
    if dilation > 1 and auto_pad.startswith("SAME"):
        # onnxruntime refuses this pair: compare with the padding spelled out.
        pads = same_pads(
            [9, 10], [kernel] * 2, [stride] * 2, [dilation] * 2, auto_pad == "SAME_UPPER"
        )
        explicit = node_model(
            "Conv", [1, 4, 9, 10], weights, pads=pads, dilations=[dilation] * 2, group=2
        )
        feed = {"x": normal(1, 4, 9, 10)}
        np.testing.assert_allclose(run_ours(model, feed)[0], run_ort(explicit, feed)[0], rtol=1e-4)
        return
    assert check(model, [1, 4, 9, 10], atol=1e-5) == ["top.conv"]


def test_conv_in_one_and_three_dimensions() -> None:
    check(node_model("Conv", [2, 3, 9], {"w": normal(4, 3, 3)}, pads=[1, 2]), [2, 3, 9])
    check(node_model("Conv", [1, 2, 4, 5, 6], {"w": normal(3, 2, 2, 2, 2)}), [1, 2, 4, 5, 6])


def test_conv_refusals() -> None:
    weights: dict[str, Array] = {"w": normal(4, 3, 3, 3)}
    both = node_model("Conv", [1, 3, 8, 8], weights, auto_pad="VALID", pads=[1, 1, 1, 1])
    assert "contradict" in refusal(both)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 30),
    kernel=st.integers(1, 6),
    stride=st.integers(1, 5),
    dilation=st.integers(1, 3),
)
def test_same_pads_give_the_ceiling(size: int, kernel: int, stride: int, dilation: int) -> None:
    upper = same_pads([size], [kernel], [stride], [dilation], True)
    lower = same_pads([size], [kernel], [stride], [dilation], False)
    assert upper == lower[::-1]
    assert 0 <= upper[1] - upper[0] <= 1
    padded = size + sum(upper)
    reach = dilation * (kernel - 1) + 1
    assert padded >= reach or stride > 1 or padded == size
    if padded >= reach:
        assert (padded - reach) // stride + 1 == -(-size // stride)


@pytest.mark.parametrize(
    "attributes",
    [
        {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]},
        {"strides": [2, 3], "output_shape": [9, 10]},
        {"strides": [2, 2], "auto_pad": "SAME_UPPER"},
        {"strides": [3, 2], "auto_pad": "SAME_LOWER"},
        {"strides": [2, 2], "auto_pad": "VALID"},
        {"dilations": [2, 2], "group": 2},
    ],
)
def test_conv_transpose(attributes: dict[str, Any]) -> None:
    out = 4 // attributes.get("group", 1)
    weights: dict[str, Array] = {"w": normal(4, out, 3, 3, seed=1), "b": normal(4, seed=2)}
    model = node_model("ConvTranspose", [1, 4, 5, 4], weights, **attributes)
    if attributes.get("auto_pad") == "SAME_LOWER":
        # By ONNX's text; some runtimes read the odd pixel the other way.
        to_top(model)
        return
    assert check(model, [1, 4, 5, 4], atol=1e-5) == ["top.conv_transpose"]


@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"strides": [2, 2]},
        {"pads": [1, 0, 0, 1], "strides": [2, 1]},
        {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
        {"auto_pad": "SAME_LOWER", "strides": [2, 2]},
    ],
)
def test_pools(op_type: str, attributes: dict[str, Any]) -> None:
    model = node_model(op_type, [1, 2, 7, 8], kernel_shape=[3, 2], **attributes)
    check(model, [1, 2, 7, 8])


def test_average_of_a_window_past_the_end_by_hand() -> None:
    model = node_model(
        "AveragePool", [1, 1, 5], opset=19, kernel_shape=[2], strides=[2], ceil_mode=1
    )
    x = np.array([[[1, 2, 3, 4, 5]]], np.float32)
    np.testing.assert_array_equal(run_ours(model, {"x": x})[0], [[[1.5, 3.5, 5.0]]])


def test_average_with_padding_on_two_sides_by_hand() -> None:
    model = node_model(
        "AveragePool",
        [1, 1, 2, 2],
        kernel_shape=[2, 2],
        pads=[0, 0, 1, 1],
        count_include_pad=1,
    )
    found = run_ours(model, {"x": np.ones((1, 1, 2, 2), np.float32)})[0]
    np.testing.assert_array_equal(found, [[[[1, 0.5], [0.5, 0.25]]]])


@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool"])
def test_window_wholly_in_padding_is_refused(op_type: str) -> None:
    choices: list[dict[str, Any]] = [
        {"kernel_shape": [1, 1], "strides": [3, 3], "pads": [1, 1, 1, 1]},
        {"kernel_shape": [2, 2], "dilations": [3, 3], "pads": [1, 1, 1, 1]},
    ]
    for fields in choices:
        model = node_model(op_type, [1, 1, 2, 2], opset=19, **fields)
        assert "wholly in the padding" in refusal(model)


def test_a_module_without_operator_sets_is_refused() -> None:
    ctx = CompileContext()
    module = import_onnx(node_model("Relu", [2]), None, ctx)
    del module.attributes["onnx.opset"]
    with pytest.raises(TilewrightError, match="operator set") as caught:
        ConvertOnnxToTopPass().apply(ctx, module)
    assert caught.value.code == "E0501"


def test_huge_window_is_refused_before_it_takes_memory() -> None:
    fields: dict[str, Any] = {"kernel_shape": [1, 2**31], "auto_pad": "SAME_UPPER"}
    assert "limit" in refusal(node_model("MaxPool", [1, 1, 4, 4], **fields))


def test_operands_of_the_wrong_size_are_refused() -> None:
    two: dict[str, Array] = {"a": np.array([0, 1])}
    with pytest.raises(TilewrightError):
        to_top(node_model("CumSum", [3], two))
    lengths: dict[str, Array] = {"n": np.array([1, 2, 3])}
    with pytest.raises(TilewrightError):
        to_top(node_model("ReverseSequence", [4, 2], lengths))


def test_window_past_the_data() -> None:
    """Newer text drops a window that begins behind the data; older shape rules keep it."""
    fields: dict[str, Any] = {"kernel_shape": [2, 2], "strides": [3, 3], "pads": [1, 1, 1, 1]}
    for opset in (10, 12):
        model = node_model("MaxPool", [1, 1, 4, 4], opset=opset, ceil_mode=1, **fields)
        assert "shape inference" in refusal(model)
    model = node_model("MaxPool", [1, 1, 4, 4], opset=22, ceil_mode=1, **fields)
    found = run_ours(model, {"x": normal(1, 1, 4, 4)})[0]
    assert found.shape == (1, 1, 2, 2)
    assert np.isfinite(found).all()


# Products.


@pytest.mark.parametrize("trans_a", [0, 1])
@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize("c_shape", [None, (), (1,), (5,), (3, 1), (1, 5), (3, 5)])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_gemm(trans_a: int, trans_b: int, c_shape: tuple[int, ...] | None, scale: float) -> None:
    constants = {"b": normal(*((5, 4) if trans_b else (4, 5)), seed=1)}
    if c_shape is not None:
        constants["c"] = np.asarray(normal(*c_shape, seed=2))
    shape = [4, 3] if trans_a else [3, 4]
    model = node_model(
        "Gemm", shape, constants, transA=trans_a, transB=trans_b, alpha=scale, beta=scale
    )
    ops = check(model, shape)
    plain = scale == 1.0 and c_shape in (None, (5,), (1, 5))
    assert ("top.linear" in ops) == plain


# Slices.


@settings(max_examples=300, deadline=None)
@given(
    size=st.integers(0, 12),
    start=st.integers(-20, 20) | st.just(-(2**63)),
    end=st.integers(-20, 20) | st.sampled_from([2**63 - 1, -(2**63), 2**31 - 1]),
    step=st.integers(-4, 4).filter(bool),
)
def test_slice_of_one_axis_is_that_of_python(size: int, start: int, end: int, step: int) -> None:
    if step < 0 and (end in (2**63 - 1, 2**31 - 1) or start < -size):
        with pytest.raises(RefusedError, match="differently by tools"):
            resolve_slice(size, start, end, step)
        return
    data = np.arange(size)
    # Python reads an end below -size, with a negative step, as "before the first", as ONNX does.
    wanted = data[start:end:step]
    first, stride, count = resolve_slice(size, start, end, step)
    np.testing.assert_array_equal(data[first + stride * np.arange(count)], wanted)


def test_slice_disputed_end_is_refused() -> None:
    constants: dict[str, Array] = {
        "s": np.array([-1]),
        "e": np.array([2**63 - 1]),
        "a": np.array([0]),
        "t": np.array([-1]),
    }
    with pytest.raises(TilewrightError):
        to_top(node_model("Slice", [5], constants))


def test_slice_by_attribute() -> None:
    model = node_model("Slice", [5, 6], opset=9, axes=[1, 0], starts=[1, -3], ends=[-1, 2**31 - 1])
    assert check(model, [5, 6]) == ["top.slice"]


# Composed operators.


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("op_type", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("lengths", [None, [4, 2, 1]])
def test_recurrent(op_type: str, direction: str, lengths: list[int] | None) -> None:
    count, gates = (
        2 if direction == "bidirectional" else 1,
        {"RNN": 1, "GRU": 3, "LSTM": 4}[op_type],
    )
    constants: dict[str, Array] = {
        "W": normal(count, gates * 5, 2, seed=1),
        "R": normal(count, gates * 5, 5, seed=2) / 2,
        "B": normal(count, gates * 10, seed=3),
        "h": normal(count, 3, 5, seed=4),
    }
    operands = ["x", "W", "R", "B", "", "h"]
    if lengths is not None:
        constants["n"] = np.array(lengths, np.int32)
        operands[4] = "n"
    extra: list[dict[str, Any]] = [{}]
    if op_type == "GRU":
        extra.append({"linear_before_reset": 1})
    if op_type == "LSTM":
        constants |= {"c": normal(count, 3, 5, seed=5), "P": normal(count, 15, seed=6)}
        operands += ["c", "P"]
    for attributes in extra:
        model = node_model(
            op_type,
            [4, 3, 2],
            constants,
            operands=operands,
            outputs=3 if op_type == "LSTM" else 2,
            hidden_size=5,
            direction=direction,
            **attributes,
        )
        check(model, [4, 3, 2], atol=1e-5)


def test_recurrent_refusals() -> None:
    constants: dict[str, Array] = {"W": normal(1, 5, 2), "R": normal(1, 5, 5)}
    fields: dict[str, Any] = {"hidden_size": 5, "outputs": 1}
    assert "clip" in refusal(node_model("RNN", [4, 3, 2], constants, clip=1.0, **fields))
    odd = node_model("RNN", [4, 3, 2], constants, activations=["Affine"], **fields)
    assert "Affine" in refusal(odd)
    assert "too many" in refusal(node_model("RNN", [600, 1, 2], constants, **fields))


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_depth_to_space(mode: str) -> None:
    check(node_model("DepthToSpace", [1, 8, 2, 3], blocksize=2, mode=mode), [1, 8, 2, 3])


def test_cumsum_reversed_and_exclusive() -> None:
    for reverse in (0, 1):
        for exclusive in (0, 1):
            model = node_model(
                "CumSum", [3, 4], {"a": np.array(-1)}, reverse=reverse, exclusive=exclusive
            )
            check(model, [3, 4])


def test_body_of_onnx_is_used() -> None:
    stats = {"s": normal(4, seed=1), "b": normal(4, seed=2)}
    model = node_model("GroupNormalization", [2, 4, 3, 3], stats, opset=21, num_groups=2)
    x = normal(2, 4, 3, 3)
    grouped = x.reshape(2, 2, -1)
    centred = grouped - grouped.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    wanted = scaled.reshape(x.shape) * stats["s"][:, None, None] + stats["b"][:, None, None]
    np.testing.assert_allclose(run_ours(model, {"x": x})[0], wanted, rtol=1e-4, atol=1e-5)


def test_attribute_a_rule_does_not_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "Elu", lambda node: node.emit("relu", [node.operand(0)]))
    assert "attribute 'alpha': not supported" in refusal(node_model("Elu", [2], alpha=0.5))
    monkeypatch.setitem(RULES, "Add", lambda node: node.emit("relu", [node.operand(0)]))
    assert "operand 1: not supported" in refusal(node_model("Add", [2], {"w": normal(2)}))
