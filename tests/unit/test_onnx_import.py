"""The ONNX front end: what it reads, and how it says no."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from xdsl.dialects.builtin import ArrayAttr, StringAttr
from xdsl.dialects.func import FuncOp

from tests.unit.onnx_graphs import F, model_of, normal, run_ort, run_ours, to_top, top_ops
from tilewright.diagnostics import TilewrightError
from tilewright.dialects.onnx import OnnxOp, UnknownValueError
from tilewright.frontends.onnx import import_onnx
from tilewright.ir.context import CompileContext
from tilewright.ir.weights import Array


def refuse(model: ModelProto | Path, **kwargs: Any) -> TilewrightError:
    """Import, which must fail in an orderly way."""
    shapes = kwargs.pop("shapes", None)
    with pytest.raises(TilewrightError) as caught:
        import_onnx(model, shapes, CompileContext(), **kwargs)
    return caught.value


def relu(**kwargs: Any) -> ModelProto:
    shape = kwargs.pop("shape", [1, 4])
    return model_of(
        [helper.make_node("Relu", ["x"], ["y"], name="r")], {"x": shape}, ["y"], **kwargs
    )


def names(model: ModelProto) -> list[str]:
    ctx = CompileContext()
    module = import_onnx(model, None, ctx)
    return [op.node_name for op in module.walk() if isinstance(op, OnnxOp)]


# Files.


def test_missing_file(tmp_path: Path) -> None:
    error = refuse(tmp_path / "none.onnx")
    assert error.code == "E0101"
    assert "none.onnx" in error.message


def test_folder_and_empty_file(tmp_path: Path) -> None:
    assert refuse(tmp_path).code == "E0101"
    path = tmp_path / "empty.onnx"
    path.write_bytes(b"")
    assert "empty" in refuse(path).message


@pytest.mark.parametrize("keep", [1, 10, 60, 100, 140])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    data = model_of(
        [helper.make_node("Add", ["x", "w"], ["y"])], {"x": [4]}, ["y"], {"w": normal(4)}
    ).SerializeToString()
    path = tmp_path / "cut.onnx"
    path.write_bytes(data[: min(keep, len(data) - 1)])
    assert refuse(path).code in ("E0101", "E0106")


def test_random_bytes_never_trace_back(tmp_path: Path) -> None:
    data = bytearray(relu(weights={"w": normal(3)}).SerializeToString())
    rng = np.random.default_rng(5)
    path = tmp_path / "noise.onnx"
    outcomes: set[str] = set()
    for _ in range(300):
        noisy = bytearray(data)
        for place in rng.integers(0, len(noisy), 3):
            noisy[place] = rng.integers(0, 256)
        path.write_bytes(noisy)
        try:
            import_onnx(path, None, CompileContext())
        except TilewrightError as error:
            outcomes.add(error.code)
    assert {"E0101", "E0106"} <= outcomes


def test_text_file_and_lfs_pointer(tmp_path: Path) -> None:
    path = tmp_path / "text.onnx"
    path.write_text("this is no model")
    assert refuse(path).code == "E0101"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git lfs pull" in (refuse(path).hint or "")


def external(tmp_path: Path, location: str = "w.bin", **entries: str) -> Path:
    """Write a model whose weight is in another file, behind 16 bytes of filler."""
    model = model_of(
        [helper.make_node("Add", ["x", "w"], ["y"])], {"x": [4]}, ["y"], {"w": normal(4)}
    )
    tensor = model.graph.initializer[0]
    (tmp_path / "w.bin").write_bytes(b"\xff" * 16 + tensor.raw_data + b"\xff" * 8)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": "16", "length": "16", **entries}.items():
        tensor.external_data.add(key=key, value=value)
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def test_external_data_is_mapped_at_its_offset(tmp_path: Path) -> None:
    ctx = CompileContext()
    import_onnx(external(tmp_path), None, ctx)
    np.testing.assert_array_equal(ctx.weights.get("w"), normal(4))


@pytest.mark.parametrize(
    ("entries", "part"),
    [
        ({"location": "../w.bin"}, "outside"),
        ({"location": "/etc/passwd"}, "outside"),
        ({"location": "no.bin"}, "missing"),
        ({"location": ""}, "names no file"),
        ({"offset": "32"}, "too short"),
        ({"offset": "-4"}, "too short"),
        ({"offset": "x"}, "no number"),
        ({"length": "12"}, "does not hold"),
        ({"checksum": "00"}, "checksum"),
    ],
)
def test_external_data_that_is_wrong(tmp_path: Path, entries: dict[str, str], part: str) -> None:
    assert part in refuse(external(tmp_path, **entries)).message


def test_external_link_out_of_the_folder(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    path = external(inner)
    (inner / "w.bin").rename(tmp_path / "w.bin")
    (inner / "w.bin").symlink_to(tmp_path / "w.bin")
    assert "outside" in refuse(path).message


def test_endless_names(tmp_path: Path) -> None:
    node = onnx.helper.make_node("Relu", ["x"], ["y"], name="n" * 5000)
    info = [onnx.helper.make_tensor_value_info(name, 1, [1]) for name in "xy"]
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", info[:1], info[1:]))
    assert "name of 5000 characters" in refuse(model).message


@pytest.mark.parametrize("location", ["w.bin\0x", "a" * 1000, "loop"])
def test_external_data_at_places_no_file_can_have(tmp_path: Path, location: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    error = refuse(external(tmp_path, location=location))
    assert error.code == "E0101"
    assert "cannot be found" in error.message


def test_external_data_of_a_model_in_memory(tmp_path: Path) -> None:
    model = onnx.load(external(tmp_path), load_external_data=False)
    assert "path of the model" in (refuse(model).hint or "")


# Shapes.


def test_dynamic_dimension_names_input_axis_and_flag() -> None:
    error = refuse(relu(shape=["N", 3, None, 224]))
    assert error.code == "E0103"
    assert "'x'" in error.message
    assert [d for d in error.details if "axis 0 ('N')" in d]
    assert [d for d in error.details if "axis 2" in d]
    assert "--shape x=Nx3x?x224" in (error.hint or "")
    assert "--shape N=1" in (error.hint or "")


def test_shapes_by_input_and_by_symbol() -> None:
    for shapes in ({"x": (2, 3)}, {"N": (2,)}):
        module = import_onnx(relu(shape=["N", 3]), shapes, CompileContext())
        assert "tensor<2x3xf32>" in str(module)


def test_question_marks_are_not_one_symbol() -> None:
    module = import_onnx(relu(shape=["?", "?"]), {"x": (2, 3)}, CompileContext())
    assert "tensor<2x3xf32>" in str(module)


@pytest.mark.parametrize(
    ("shapes", "part"),
    [
        ({"z": (1, 3)}, "fits nothing"),
        ({"x": (1, 3, 3)}, "3 dimensions"),
        ({"x": (1, 4)}, "axis 1"),
        ({"x": (0, 3)}, "below 1"),
        ({"x": (1, 3), "N": (2,)}, "axis 0"),
        ({"N": (2, 2)}, "fits nothing"),
    ],
)
def test_shapes_that_are_wrong(shapes: dict[str, tuple[int, ...]], part: str) -> None:
    error = refuse(relu(shape=["N", 3]), shapes=shapes)
    assert error.code == "E0103"
    assert part in error.message


def test_one_symbol_is_one_size() -> None:
    model = model_of([helper.make_node("Add", ["a", "b"], ["y"])], {"a": ["N"], "b": ["N"]}, ["y"])
    assert "two sizes" in refuse(model, shapes={"a": (2,), "b": (3,)}).message
    assert import_onnx(model, {"a": (2,), "b": (2,)}, CompileContext())


def test_operands_that_do_not_fit_name_the_node() -> None:
    nodes = [helper.make_node("MatMul", ["a", "b"], ["y"], name="mm")]
    error = refuse(model_of(nodes, {"a": [2, 3], "b": [4, 5]}, ["y"]))
    assert error.code == "E0103"
    assert '"mm"' in error.message
    assert any("[2, 3]" in line for line in error.details)


def test_shape_arithmetic_is_computed() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["n"]),
        helper.make_node("Unsqueeze", ["n", "axis"], ["n1"]),
        helper.make_node("Concat", ["n1", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"], name="flat"),
    ]
    weights: dict[str, Array] = {
        "zero": np.array(0),
        "axis": np.array([0]),
        "rest": np.array([-1]),
    }
    model = model_of(nodes, {"x": [2, 3, 4]}, ["y"], weights)
    assert names(model) == ["target", "flat"]
    module, _ = to_top(model)
    assert top_ops(module) == ["top.reshape"]
    assert "tensor<2x12xf32>" in str(module)


def test_value_known_only_at_run_time_names_the_input_to_bind() -> None:
    nodes = [helper.make_node("Reshape", ["x", "s"], ["y"], name="flat")]
    model = model_of(nodes, {"x": [2, 3]}, ["y"])
    model.graph.input.append(helper.make_tensor_value_info("s", TensorProto.INT64, [1]))
    with pytest.raises(UnknownValueError) as caught:
        import_onnx(model, None, CompileContext())
    assert caught.value.inputs == ("s",)
    bound = import_onnx(model, None, CompileContext(), {"s": np.array([6])})
    assert "tensor<6xf32>" in str(bound)
    assert "wrong type" in refuse(model, bind={"s": np.array([6.0])}).message
    assert "no input" in refuse(model, bind={"t": np.array([6])}).message


def test_absurd_sizes_take_no_memory() -> None:
    assert "absurdly" in refuse(relu(shape=[2**40])).message
    nodes = [helper.make_node("ConstantOfShape", ["s"], ["y"], name="big")]
    weights: dict[str, Array] = {"s": np.array([2**20, 2**20])}
    assert "absurdly" in refuse(model_of(nodes, {"x": [1]}, ["y"], weights)).message
    weights = {"s": np.array([2**14, 2**14])}
    with pytest.raises(TilewrightError, match="cannot be compiled"):
        to_top(model_of(nodes, {"x": [1]}, ["y"], weights))


def test_declared_size_of_a_weight_is_not_believed() -> None:
    model = model_of([helper.make_node("Add", ["x", "w"], ["y"])], {"x": [4]}, ["y"])
    tensor = model.graph.initializer.add(name="w", data_type=F, dims=[2**33])
    tensor.raw_data = b"1234"
    assert "does not hold" in refuse(model).message
    tensor.dims[0] = -1
    assert "negative" in refuse(model).message
    tensor.ClearField("raw_data")
    tensor.dims[0] = 4
    tensor.float_data.extend([1.0, 2.0])
    assert "does not hold" in refuse(model).message
    tensor.data_type = 99
    assert refuse(model).code == "E0106"


# Structure.


def test_nodes_out_of_order() -> None:
    nodes = [helper.make_node("Relu", ["t"], ["y"]), helper.make_node("Relu", ["x"], ["t"])]
    error = refuse(model_of(nodes, {"x": [1]}, ["y"]))
    assert error.code == "E0106"
    assert "topological order" in error.message


def test_cycle_is_shown() -> None:
    nodes = [
        helper.make_node("Add", ["x", "c"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
    ]
    error = refuse(model_of(nodes, {"x": [1]}, ["c"]))
    assert "cycle" in error.message
    assert error.details[0].count("->") == 3


@pytest.mark.parametrize(
    ("nodes", "outputs", "part"),
    [
        ([helper.make_node("Relu", ["nowhere"], ["y"])], ["y"], "nothing defines"),
        ([helper.make_node("Relu", ["x"], ["y"])] * 2, ["y"], "defined twice"),
        ([helper.make_node("Relu", ["x"], ["x"])], ["x"], "defined twice"),
        ([helper.make_node("Relu", ["x"], ["y"])], ["z"], "nothing gives"),
        ([helper.make_node("Relu", ["x"], ["y"])], [], "no outputs"),
        ([helper.make_node("Relu", ["x"], ["y"])], ["y", "y"], "listed twice"),
        ([helper.make_node("Relu", ["x", "x"], ["y"])], ["y"], "2 inputs"),
        ([helper.make_node("Relu", ["x"], ["y"], alpha=1.0)], ["y"], "is not valid"),
        ([helper.make_node("Concat", ["x"], ["y"])], ["y"], "is not valid"),
        ([helper.make_node("Softmax", ["x"], ["y"], axis=1.0)], ["y"], "is not valid"),
    ],
)
def test_malformed_graphs(nodes: list[Any], outputs: list[str], part: str) -> None:
    error = refuse(model_of(nodes, {"x": [2]}, outputs))
    assert error.code in ("E0103", "E0106")
    assert part in error.message


def test_wrong_element_types() -> None:
    nodes = [helper.make_node("Add", ["x", "i"], ["y"], name="mixed")]
    error = refuse(model_of(nodes, {"x": [2]}, ["y"], {"i": np.array([1, 2])}))
    assert error.code == "E0106"
    assert "mixed" in error.message


@pytest.mark.parametrize("opset", [1, 6, 99])
def test_opset_out_of_range(opset: int) -> None:
    error = refuse(relu(opset=opset))
    assert error.code == "E0104"
    assert str(opset) in error.message


def test_operator_newer_than_the_opset() -> None:
    nodes = [helper.make_node("Gelu", ["x"], ["y"])]
    error = refuse(model_of(nodes, {"x": [2]}, ["y"], opset=17))
    assert error.code == "E0102"
    assert "operator set 17 has no such operator" in error.details[0]


def test_unsupported_operators_are_all_listed() -> None:
    nodes = [
        helper.make_node("FooBar", ["x"], ["a"], name="f1", domain="acme"),
        helper.make_node("Relu", ["a"], ["b"], name="fine"),
        helper.make_node("NonZero", ["b"], ["c"], name="n1"),
        helper.make_node("FooBar", ["b"], ["d"], name="f2", domain="acme"),
        helper.make_node("NonZero", ["d"], ["dead"], name="unused"),
    ]
    error = refuse(model_of(nodes, {"x": [2]}, ["c", "d"]))
    assert error.code == "E0102"
    assert "2 operators" in error.message
    assert "3 nodes" in error.message
    text = "\n".join(error.details)
    assert '"f1", "f2"' in text
    assert '"n1"' in text
    assert "acme" in text
    assert "unused" not in text
    assert "fine" not in text


def test_sequences_and_strings_are_refused() -> None:
    model = relu()
    model.graph.input[0].CopyFrom(helper.make_tensor_sequence_value_info("x", F, [1]))
    assert refuse(model).code == "E0104"
    assert refuse(relu(elem_type=TensorProto.STRING)).code == "E0104"
    assert refuse(relu(elem_type=TensorProto.BFLOAT16)).code == "E0104"


# Constants.


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_named(value: float) -> None:
    weights = normal(4, 4).copy()
    weights[1, 2] = value
    nodes = [helper.make_node("MatMul", ["x", "conv.w"], ["y"], name="mm")]
    error = refuse(model_of(nodes, {"x": [1, 4]}, ["y"], {"conv.w": weights}))
    assert error.code == "E0105"
    assert "'conv.w'" in error.message
    assert "mm" in error.details[0]


def test_infinite_masks_and_bounds_are_meant() -> None:
    mask = np.array([0, -np.inf, 0, 0], np.float32)
    nodes = [
        helper.make_node("Add", ["x", "mask"], ["m"]),
        helper.make_node("Softmax", ["m"], ["s"]),
        helper.make_node("Clip", ["s", "low", "high"], ["y"]),
    ]
    weights: dict[str, Array] = {
        "mask": mask,
        "low": np.array(-np.inf, np.float32),
        "high": np.array(0.5, np.float32),
    }
    model = model_of(nodes, {"x": [1, 4]}, ["y"], weights)
    feed = {"x": normal(1, 4)}
    np.testing.assert_allclose(run_ours(model, feed)[0], run_ort(model, feed)[0], rtol=1e-6)


def test_every_form_of_constant() -> None:
    sparse = helper.make_sparse_tensor(
        numpy_helper.from_array(np.array([3.0, 4.0], np.float32)),
        numpy_helper.from_array(np.array([0, 2])),
        [3],
    )
    forms: dict[str, tuple[Any, str]] = {
        "value": (numpy_helper.from_array(np.array([1.0, 2, 3], np.float32)), "f32"),
        "value_float": (2.5, "f32"),
        "value_floats": ([1.0, 2.0, 3.0], "f32"),
        "value_int": (2, "i64"),
        "value_ints": ([1, 2, 3], "i64"),
        "sparse_value": (sparse, "f32"),
    }
    for key, (value, element) in forms.items():
        nodes = [
            helper.make_node("Constant", [], ["c"], **{key: value}),
            helper.make_node("Cast", ["c"], ["f"], to=F),
            helper.make_node("Mul", ["x", "f"], ["y"]),
        ]
        model = model_of(nodes, {"x": [3]}, ["y"])
        feed = {"x": normal(3)}
        np.testing.assert_array_equal(run_ours(model, feed)[0], run_ort(model, feed)[0], key)
        assert element in ("f32", "i64")


def test_sparse_initializer_is_made_dense() -> None:
    model = model_of([helper.make_node("Mul", ["x", "w"], ["y"])], {"x": [2, 3]}, ["y"])
    values = numpy_helper.from_array(np.array([5.0, 7.0], np.float32), "w")
    sparse = helper.make_sparse_tensor(
        values, numpy_helper.from_array(np.array([[0, 1], [1, 2]])), [2, 3]
    )
    model.graph.sparse_initializer.append(sparse)
    found = run_ours(model, {"x": np.ones((2, 3), np.float32)})[0]
    np.testing.assert_array_equal(found, np.array([[0, 5, 0], [0, 0, 7]], np.float32))
    model.graph.sparse_initializer[0].indices.CopyFrom(
        numpy_helper.from_array(np.array([[0, 1], [2, 2]]))
    )
    assert "outside its shape" in refuse(model).message


@pytest.mark.parametrize("ir_version", [3, 8])
def test_initializer_listed_as_input(ir_version: int) -> None:
    model = model_of(
        [helper.make_node("Mul", ["x", "w"], ["y"])],
        {"x": [3], "w": [3]},
        ["y"],
        {"w": normal(3)},
        opset=8,
        ir_version=ir_version,
    )
    ctx = CompileContext()
    module = import_onnx(model, None, ctx)
    function = next(op for op in module.ops if isinstance(op, FuncOp))
    assert function.attributes["arg_names"] == ArrayAttr([StringAttr("x")])
    assert bool([d for d in ctx.decisions if "default value" in d.reason]) == (ir_version >= 4)


# Names.


def test_names_stay_apart() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a-b"]),
        helper.make_node("Relu", ["a-b"], ["a_b"]),
        helper.make_node("Relu", ["a_b"], ["t"], name="same"),
        helper.make_node("Relu", ["t"], ["für\tint"], name="same"),
        helper.make_node("Add", ["für\tint", "x"], ["y"], name='"quoted" \\ name'),
    ]
    model = model_of(nodes, {"x": [2]}, ["y"])
    found = names(model)
    assert found == ["Relu(a-b)", "Relu(a_b)", "same", "same#1", '"quoted" \\ name']
    module, ctx = to_top(model)
    assert [d.layer for d in ctx.decisions if d.reason.startswith("renamed")] == ["same#1"]
    layers = [op.attributes["name"] for op in module.walk() if op.name.startswith("top.")]
    assert len(set(layers)) == len(layers) == 5


def test_text_round_trip_of_hostile_names() -> None:
    from tilewright.ir.io import new_context, parse_text

    nodes = [helper.make_node("Relu", ["x"], ["int \t\"'\\ 漢"], name="\x01%0\n")]
    module = import_onnx(model_of(nodes, {"x": [2]}, ["int \t\"'\\ 漢"]), None, CompileContext())
    text = str(module)
    assert str(parse_text(text, new_context())) == text


def test_name_that_is_not_utf8(tmp_path: Path) -> None:
    data = relu().SerializeToString().replace(b"\x1a\x01r", b"\x1a\x01\xff")
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    assert refuse(path).code in ("E0101", "E0106")


def test_output_that_is_an_input_or_a_constant() -> None:
    model = model_of(
        [helper.make_node("Identity", ["w"], ["c"])], {"x": [2]}, ["x", "c"], {"w": normal(2)}
    )
    feed = {"x": normal(2, seed=1)}
    found = run_ours(model, feed)
    np.testing.assert_array_equal(found[0], feed["x"])
    np.testing.assert_array_equal(found[1], normal(2))


# Functions and branches.


def function_model(body_opset: int = 17) -> ModelProto:
    """`y = leak(x; 0.25) + leak(x; default 0.5)` with a function that calls another."""
    inner_node = helper.make_node("LeakyRelu", ["a"], ["b"], name="leaky")
    inner_node.attribute.append(
        AttributeProto(name="alpha", type=AttributeProto.FLOAT, ref_attr_name="slope")
    )
    inner = helper.make_function(
        "own",
        "Leak",
        ["a"],
        ["b"],
        [inner_node],
        [helper.make_opsetid("", body_opset)],
        attribute_protos=[helper.make_attribute("slope", 0.5)],
    )
    call = helper.make_node("Leak", ["p"], ["q"], domain="own", name="call")
    call.attribute.append(
        AttributeProto(name="slope", type=AttributeProto.FLOAT, ref_attr_name="s")
    )
    outer = helper.make_function(
        "own", "Outer", ["p"], ["q"], [call], [helper.make_opsetid("own", 1)], ["s"]
    )
    nodes = [
        helper.make_node("Outer", ["x"], ["u"], domain="own", name="one", s=0.25),
        helper.make_node("Leak", ["x"], ["v"], domain="own", name="two"),
        helper.make_node("Add", ["u", "v"], ["y"], name="sum"),
    ]
    model = model_of(nodes, {"x": [8]}, ["y"], functions=[inner, outer])
    model.opset_import.append(helper.make_opsetid("own", 1))
    return model


def test_local_functions_are_inlined() -> None:
    model = function_model()
    x = normal(8)
    wanted = np.where(x < 0, 0.25 * x, x) + np.where(x < 0, 0.5 * x, x)
    np.testing.assert_allclose(run_ours(model, {"x": x})[0], wanted, rtol=1e-6)
    assert names(model) == ["one/call/leaky", "two/leaky", "sum"]


def test_function_of_another_opset_keeps_its_meaning() -> None:
    body = [helper.make_node("Softmax", ["a"], ["b"])]
    function = helper.make_function(
        "own", "Soft", ["a"], ["b"], body, [helper.make_opsetid("", 11)]
    )
    nodes = [helper.make_node("Soft", ["x"], ["y"], domain="own")]
    model = model_of(nodes, {"x": [2, 3, 4]}, ["y"], functions=[function])
    model.opset_import.append(helper.make_opsetid("own", 1))
    x = normal(2, 3, 4)
    flat = np.exp(x).reshape(2, 12)
    wanted = (flat / flat.sum(1, keepdims=True)).reshape(x.shape)
    np.testing.assert_allclose(run_ours(model, {"x": x})[0], wanted, rtol=1e-5)


def test_function_that_calls_itself() -> None:
    body = [helper.make_node("Loop", ["a"], ["b"], domain="own")] * 1
    function = helper.make_function(
        "own", "Loop", ["a"], ["b"], body, [helper.make_opsetid("own", 1)]
    )
    nodes = [helper.make_node("Loop", ["x"], ["y"], domain="own")]
    model = model_of(nodes, {"x": [2]}, ["y"], functions=[function])
    model.opset_import.append(helper.make_opsetid("own", 1))
    assert "nested too deeply" in refuse(model).message


def test_function_attribute_it_does_not_have() -> None:
    model = function_model()
    model.graph.node[1].attribute.append(helper.make_attribute("other", 1))
    assert "other" in refuse(model).details[0]


def test_functions_that_multiply() -> None:
    """Each function calls the one before twice: 2^40 nodes if expanded."""
    functions: list[Any] = []
    imports = [helper.make_opsetid("own", 1), helper.make_opsetid("", 17)]
    for level in range(40):
        inner = "Relu" if level == 0 else f"F{level - 1}"
        domain = "" if level == 0 else "own"
        body = [
            helper.make_node(inner, ["a"], ["m"], domain=domain),
            helper.make_node(inner, ["m"], ["b"], domain=domain),
        ]
        functions.append(helper.make_function("own", f"F{level}", ["a"], ["b"], body, imports))
    nodes = [helper.make_node("F39", ["x"], ["y"], domain="own")]
    model = model_of(nodes, {"x": [2]}, ["y"], functions=functions)
    model.opset_import.append(helper.make_opsetid("own", 1))
    assert "too many nodes" in refuse(model).message


def test_branch_on_a_run_time_value_is_refused() -> None:
    branch = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["o"])],
        "b",
        [],
        [helper.make_tensor_value_info("o", F, [2])],
    )
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
        helper.make_node("Cast", ["s"], ["c"], to=TensorProto.BOOL),
        helper.make_node("If", ["c"], ["y"], name="choice", then_branch=branch, else_branch=branch),
    ]
    error = refuse(model_of(nodes, {"x": [2]}, ["y"]))
    assert error.code == "E0102"
    assert "choice" in error.details[0]
    assert "condition" in error.details[0]


def test_import_is_deterministic() -> None:
    model = function_model()
    texts: set[str] = set()
    digests: set[str] = set()
    for _ in range(2):
        module, ctx = to_top(model)
        texts.add(str(module))
        digests.add(ctx.weights.digest())
    assert len(texts) == len(digests) == 1


def test_old_opset_with_integer_initializers() -> None:
    nodes = [helper.make_node("Gather", ["x", "i"], ["y"])]
    model = model_of(nodes, {"x": [3]}, ["y"], {"i": np.array([2, 0])}, opset=7)
    np.testing.assert_array_equal(run_ours(model, {"x": normal(3)})[0], normal(3)[[2, 0]])


@pytest.mark.parametrize(
    "node",
    [
        helper.make_node("LayerNormalization", ["x", "w"], ["y"], axis=2**31),
        helper.make_node("Split", ["x"], ["y"], num_outputs=2**30),
        helper.make_node("Squeeze", ["x"], ["y"], axes=[2**40]),
        helper.make_node("Transpose", ["x"], ["y"], perm=[0, -(2**63)]),
        helper.make_node("Attention", ["x", "x", "x"], ["y"], q_num_heads=3, kv_num_heads=0),
        helper.make_node("AveragePool", ["x"], ["y"], kernel_shape=[1], strides=[0]),
        helper.make_node("Shape", [""], ["y"]),
        helper.make_node("Add", ["x", ""], ["y"]),
        helper.make_node("Concat", ["x", ""], ["y"], axis=0),
    ],
    ids=lambda node: node.op_type,
)
def test_nodes_that_would_crash_native_code(node: NodeProto) -> None:
    opset = {"Squeeze": 11, "Attention": 23}.get(node.op_type, 18)
    error = refuse(model_of([node], {"x": [2, 3]}, ["y"], {"w": normal(3)}, opset=opset))
    assert error.code == "E0106"
    assert node.op_type in error.message


def test_infinity_far_into_a_large_weight_is_found() -> None:
    weights = np.zeros(5_000_000, np.float32)
    weights[4_999_999] = np.inf
    nodes = [helper.make_node("Mul", ["x", "w"], ["y"])]
    assert refuse(model_of(nodes, {"x": [1]}, ["y"], {"w": weights})).code == "E0105"
    weights[:] = 3e38
    assert import_onnx(model_of(nodes, {"x": [1]}, ["y"], {"w": weights}), None, CompileContext())
