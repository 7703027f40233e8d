"""The quantise pass: every op's integer form against the float op, placement, scales, reasons."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue

from tests.unit.quant_top_graphs import NO_PADS, TopGraph
from tilewright.diagnostics import TilewrightError
from tilewright.dialects.quant import quantised, uniform_of
from tilewright.ir.context import CompileContext
from tilewright.quant.calibrate import calibrate
from tilewright.quant.graph import layer_of, main_function
from tilewright.quant.reference import QuantSession, run_quant
from tilewright.quant.table import CalibrationTable, read_attribute, write_attribute
from tilewright.runtime.float_executor import TopSession
from tilewright.transforms.quant.partition import PartitionPass
from tilewright.transforms.quant.quantize import QuantizePass, quantize_module
from tilewright.transforms.quant.verify_scales import VerifyScalesPass

ROUNDINGS = ("half_up", "half_away", "half_even", "truncate")
CASES = Path(__file__).parents[1] / "cases"

Build = Callable[[TopGraph], SSAValue]


def exact_weights(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Weights that int8 represents exactly: codes over 127, each channel reaching the end."""
    codes = np.random.default_rng(seed).integers(-127, 128, shape)
    codes.reshape(shape[0], -1)[:, 0] = 127
    return codes / 127.0


def pool(layout: str = "nchw", pads: tuple[int, ...] = NO_PADS, include: int = 0) -> Build:
    def build(g: TopGraph) -> SSAValue:
        return g.op(
            "avg_pool",
            "y",
            [g.input("x")],
            kernel=(2, 2),
            strides=(2, 2),
            pads=pads,
            dilations=(1, 1),
            ceil_mode=False,
            count_include_pad=bool(include),
            layout=layout,
        )

    return build


def resize(mode: str, coordinate: str, shape: tuple[int, ...], **extra: str) -> Build:
    def build(g: TopGraph) -> SSAValue:
        scales = [n / o for n, o in zip(shape, (1, 6, 6, 4), strict=True)]
        return g.op(
            "resize", "y", [g.input("x")], shape, mode=mode, coordinate=coordinate, scales=scales,
            **extra,
        )  # fmt: skip

    return build


UNARY = {
    "relu": {},
    "clip": {"min": -1.0, "max": 2.0},
    "leaky_relu": {"alpha": 0.1},
    "elu": {"alpha": 1.0},
    "sigmoid": {},
    "hard_sigmoid": {"alpha": 0.2, "beta": 0.5},
    "hard_swish": {},
    "silu": {},
    "tanh": {},
    "gelu": {"approximate": "none"},
    "erf": {},
    "mish": {},
    "softplus": {},
    "neg": {},
    "abs": {},
    "exp": {},
}

FORMS: dict[str, Build] = {
    **{
        f"unary {name}": (lambda g, n=name, a=attrs: g.op(n, "y", [g.input("x")], **a))
        for name, attrs in UNARY.items()
    },
    "gelu tanh": lambda g: g.op("gelu", "y", [g.input("x")], approximate="tanh"),
    "conv": lambda g: g.conv("y", g.input("x"), exact_weights((5, 6, 3, 3)), np.arange(5.0)),
    "conv dilated strided padded": lambda g: g.conv(
        "y", g.input("x"), exact_weights((4, 3, 2, 3)), strides=(2, 1), pads=(1, 0, 2, 1),
        dilations=(2, 1), group=2,
    ),
    "conv depthwise clamped": lambda g: g.conv(
        "y", g.input("x"), exact_weights((12, 1, 3, 3)), group=6, pads=(1, 1, 1, 1),
        clamp_min=-0.5, clamp_max=3.0,
    ),
    "conv nhwc": lambda g: g.conv(
        "y", g.input("x"), exact_weights((5, 4, 3, 3)), np.arange(5.0), layout="nhwc"
    ),
    "linear": lambda g: g.op(
        "linear",
        "y",
        [g.input("x"), g.weight("w", exact_weights((3, 4))), g.weight("b", [1.0, -2.0, 0.5])],
        clamp_min=0.0,
    ),
    "matmul by constant": lambda g: g.op(
        "matmul", "y", [g.input("x"), g.weight("w", exact_weights((3, 4)).T)]
    ),
    "matmul of activations": lambda g: g.op(
        "matmul",
        "y",
        [g.input("x"), g.op("transpose", "t", [g.input("x")], perm=(0, 1, 3, 2))],
    ),
    "add scalar": lambda g: g.op("add", "y", [g.input("x"), g.weight("c", 1.25)]),
    "scalar minus": lambda g: g.op("sub", "y", [g.weight("c", [1.25]), g.input("x")]),
    "minus scalar": lambda g: g.op("sub", "y", [g.input("x"), g.weight("c", [1.25])]),
    "add scalar clamped": lambda g: g.op(
        "add", "y", [g.input("x"), g.weight("c", 1.25)], clamp_min=0.0, clamp_max=3.0
    ),
    "mul scalar": lambda g: g.op("mul", "y", [g.input("x"), g.weight("c", 3.7)]),
    "mul negative scalar": lambda g: g.op("mul", "y", [g.weight("c", -3.7), g.input("x")]),
    "div scalar": lambda g: g.op("div", "y", [g.input("x"), g.weight("c", 3.7)]),
    "max scalar": lambda g: g.op("max", "y", [g.input("x"), g.weight("c", 0.5)]),
    "square": lambda g: g.op("pow", "y", [g.input("x"), g.weight("c", 2.0)]),
    "add channels": lambda g: g.op(
        "add", "y", [g.input("x"), g.weight("c", exact_weights((1, 4)))], clamp_min=0.0
    ),
    "sub itself shifted": lambda g: g.op(
        "sub", "y", [g.op("add", "s", [g.input("x"), g.weight("c", 2.0)]), g.input("x")]
    ),
    "mul channels": lambda g: g.op(
        "mul", "y", [g.input("x"), g.weight("c", exact_weights((1, 4)))]
    ),
    "square by itself": lambda g: g.op("mul", "y", [g.input("x"), g.input("x")]),
    "avg_pool": pool(),
    "avg_pool nhwc": pool("nhwc"),
    "avg_pool counting its padding": pool(pads=(1, 1, 1, 1), include=1),
    "mean of image": lambda g: g.op(
        "reduce", "y", [g.input("x")], kind="mean", axes=(2, 3), keepdims=False
    ),
    "mean of nhwc image": lambda g: g.op(
        "reduce", "y", [g.input("x")], kind="mean", axes=(1, 2), keepdims=True
    ),
    "mean of last axis": lambda g: g.op(
        "reduce", "y", [g.input("x")], kind="mean", axes=(3,), keepdims=True
    ),
    "sum of channels": lambda g: g.op(
        "reduce", "y", [g.input("x")], kind="sum", axes=(1,), keepdims=False
    ),
    "resize nearest": resize("nearest", "asymmetric", (1, 6, 12, 8), nearest_mode="floor"),
    "resize nearest half pixel": resize("nearest", "half_pixel", (1, 6, 9, 5)),
    "resize linear": resize("linear", "half_pixel", (1, 6, 12, 8)),
    "resize linear down": resize("linear", "pytorch_half_pixel", (1, 6, 3, 2)),
    "resize corners": resize("linear", "align_corners", (1, 6, 11, 7)),
}  # fmt: skip
"""Each computes `y` from `x`, `(1, 6, 6, 4)`."""


def quantise(
    g: TopGraph, module: ModuleOp, samples: list[dict[str, np.ndarray]], rounding: str
) -> tuple[ModuleOp, CompileContext]:
    """Calibrate by maximum and quantise a copy."""
    table = calibrate(module, g.ctx.weights, samples, method="max")
    copy, ctx = module.clone(), CompileContext(g.ctx.weights.copy())
    quantize_module(ctx, copy, table.thresholds, rounding)
    copy.verify()
    return copy, ctx


def on_codes(seed: int = 0, threshold: float = 4.0) -> dict[str, np.ndarray]:
    """An input whose values are exactly codes times `threshold / 127`."""
    codes = np.random.default_rng(seed).integers(-127, 128, (1, 6, 6, 4))
    codes[0, 0, 0, 0] = 127
    return {"x": (codes * np.float32(threshold / 127)).astype(np.float32)}


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("form", FORMS)
def test_integer_forms_follow_the_float_op(form: str, rounding: str) -> None:
    """With operands on codes, the result is the float's to one rounding of the target."""
    g = TopGraph(x=(1, 6, 6, 4))
    module = g.finish(out=FORMS[form](g))
    sample = on_codes()
    expected = TopSession(module, g.ctx.weights).run(sample)["out"]
    copy, ctx = quantise(g, module, [sample], rounding)
    hosts = [d.layer for d in ctx.decisions if not d.fired]
    assert set(hosts) <= {"t"}, ctx.decisions
    VerifyScalesPass().apply(ctx, copy)
    outputs, layers = QuantSession(copy, ctx.weights).run_layers(sample)
    last = main_function(copy).body.block.last_op
    assert last is not None
    end = uniform_of(last.operands[0].owner.operands[0])  # type: ignore[union-attr]
    if end is None:
        # A product at the end keeps its sums: only float32 rounds.
        assert form in ("matmul by constant", "matmul of activations")
        assert layers["y"].dtype == np.int32
        np.testing.assert_allclose(outputs["out"], expected, rtol=1e-6, atol=1e-6)
        return
    step = end.step
    # Half a step of the result; linear weights of 11 bits and two stages add a little.
    slack = {"resize linear": 0.15, "sub": 0.6, "matmul of": 0.02}
    if rounding == "truncate":
        # The term in a pool's bias is a whole number of sums, each up to half a step.
        slack |= {"avg_pool": 0.25, "mean": 0.25, "sum": 0.25}
    extra = next((more for key, more in slack.items() if form.startswith(key)), 0.02)
    error = np.abs(outputs["out"].astype(np.float64) - expected).max()
    assert error <= (0.5 + extra) * step + 1e-6
    assert layers["y" if "y" in layers else "y/reshape"].dtype == np.int8


def residual_net(g: TopGraph) -> ModuleOp:
    """Convolutions, a residual, a concatenation, pooling and a softmax at the end."""
    rng = np.random.default_rng(1)
    x = g.input("x")
    t = g.op("transpose", "to_nhwc", [x], perm=(0, 2, 3, 1))
    c1 = g.conv(
        "c1", t, rng.normal(size=(8, 3, 3, 3)) * 0.3, rng.normal(size=8), pads=(1, 1, 1, 1),
        clamp_min=0.0, layout="nhwc",
    )  # fmt: skip
    c2 = g.conv(
        "c2", c1, rng.normal(size=(8, 1, 3, 3)) * 0.4, rng.normal(size=8), pads=(1, 1, 1, 1),
        group=8, clamp_min=0.0, clamp_max=6.0, layout="nhwc",
    )  # fmt: skip
    add = g.op("add", "add", [c1, c2], clamp_min=0.0)
    c3 = g.conv("c3", add, rng.normal(size=(4, 8, 1, 1)), layout="nhwc")
    cat = g.op("concat", "cat", [c3, add], axis=3)
    swish = g.op("hard_swish", "swish", [cat])
    mean = g.op("reduce", "mean", [swish], kind="mean", axes=(1, 2), keepdims=False)
    logits = g.op("linear", "fc", [mean, g.weight("fc.w", rng.normal(size=(5, 12))), g.none()])
    soft = g.op("softmax", "soft", [logits], axis=1)
    back = g.op("transpose", "to_nchw", [swish], perm=(0, 3, 1, 2))
    return g.finish(soft=soft, logits=logits, image=back)


def net_samples(count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(2)
    return [{"x": rng.normal(size=(1, 3, 9, 9)).astype(np.float32)} for _ in range(count)]


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_net_keeps_its_signal(rounding: str) -> None:
    g = TopGraph(x=(1, 3, 9, 9))
    module = residual_net(g)
    copy, ctx = quantise(g, module, net_samples(20), rounding)
    VerifyScalesPass().apply(ctx, copy)
    session, reference = QuantSession(copy, ctx.weights), TopSession(module, g.ctx.weights)
    for name in ("logits", "image"):
        signal = noise = 0.0
        for sample in net_samples(8):
            a = reference.run(sample)[name].astype(np.float64)
            b = session.run(sample)[name]
            signal, noise = signal + float((a**2).sum()), noise + float(((a - b) ** 2).sum())
        assert 10 * np.log10(signal / noise) > 28


def test_placement_and_reasons() -> None:
    g = TopGraph(x=(1, 3, 9, 9))
    copy, ctx = quantise(g, residual_net(g), net_samples(4), "half_up")
    refused = {d.layer: d.reason for d in ctx.decisions if not d.fired}
    assert refused == {
        "to_nhwc": "layout of a graph input",
        "soft": "softmax needs exponentials and a division; the target has no `vector_rows`",
        "to_nchw": "layout of a graph output",
    }
    ops = {layer_of(op): op for op in main_function(copy).body.block.ops}
    assert (
        str(ops["soft"].attributes["host"])
        == '"softmax needs exponentials and a division; the target has no `vector_rows`"'
    )
    # The float weights are gone from the store, the codes are there.
    assert "c1.w" not in ctx.weights
    assert ctx.weights.get("c1.w.i8").dtype == np.int8
    # `c3` has one user and adopts the concatenation's scale; `add` has two and is requantised.
    cat = ops["cat"]
    scale = quantised(cat.results[0])
    assert quantised(ops["c3"].results[0]) == scale
    assert "add/requantize" not in ops
    assert ops["cat/requantize"].operands[0] is ops["add"].results[0]
    assert {uniform_of(value) for value in cat.operands} == {scale}


def test_quantising_twice_changes_nothing() -> None:
    g = TopGraph(x=(1, 3, 9, 9))
    copy, ctx = quantise(g, residual_net(g), net_samples(4), "half_up")
    text, digest = str(copy), ctx.weights.digest()
    QuantizePass().apply(ctx, copy)
    assert str(copy) == text
    assert ctx.weights.digest() == digest


def test_same_input_same_bytes() -> None:
    texts: list[tuple[str, str]] = []
    for _ in range(2):
        g = TopGraph(x=(1, 3, 9, 9))
        copy, ctx = quantise(g, residual_net(g), net_samples(4), "truncate")
        PartitionPass().apply(ctx, copy)
        texts.append((str(copy), ctx.weights.digest()))
    assert texts[0] == texts[1]


HOST_FORMS: dict[str, tuple[Build, str]] = {
    "border windows": (pool(pads=(1, 1, 1, 1)), "windows at the border average fewer elements"),
    "square root": (lambda g: g.op("sqrt", "y", [g.input("x")]), "sqrt is undefined"),
    "division": (lambda g: g.op("div", "y", [g.input("x"), g.input("x")]), "div of two tensors"),
    "cubic": (resize("cubic", "half_pixel", (1, 6, 12, 8)), "cubic interpolation"),
    "transposed": (
        lambda g: g.op(
            "conv_transpose",
            "y",
            [g.input("x"), g.weight("w", np.ones((6, 2, 2, 2))), g.none()],
            strides=(2, 2),
            pads=NO_PADS,
            dilations=(1, 1),
            output_pads=(0, 0),
            group=1,
        ),
        "transposed convolutions",
    ),
}


@pytest.mark.parametrize("form", HOST_FORMS)
def test_ops_without_integer_form_stay_float_and_say_why(form: str) -> None:
    build, reason = HOST_FORMS[form]
    g = TopGraph(x=(1, 6, 6, 4))
    relu = g.op("relu", "before", [g.input("x")])
    g.names, inputs = ["x"], g.block.args
    y = build(g)
    module = g.finish(out=y, relu=relu)
    assert len(inputs) == 1
    sample = {"x": np.abs(on_codes()["x"]) + np.float32(0.1)}
    copy, ctx = quantise(g, module, [sample], "half_up")
    [decision] = [d for d in ctx.decisions if not d.fired]
    assert decision.layer == "y"
    assert reason in decision.reason
    expected = TopSession(module, g.ctx.weights).run(sample)["out"]
    np.testing.assert_allclose(run_quant(copy, ctx.weights, sample)["out"], expected, rtol=1e-5)


def test_missing_range_is_named() -> None:
    g = TopGraph(x=(1, 6, 6, 4))
    module = g.finish(out=g.op("relu", "act/1", [g.input("x")]))
    with pytest.raises(TilewrightError, match='no range for "act/1"') as caught:
        quantize_module(g.ctx, module, {"x": 1.0}, "half_up")
    assert caught.value.code == "E0301"


def test_accumulators_that_could_overflow_are_refused() -> None:
    g = TopGraph(x=(1, 140_000))
    weight = g.weight("w", np.ones((1, 140_000)))
    module = g.finish(out=g.op("linear", "wide", [g.input("x"), weight, g.none()]))
    with pytest.raises(TilewrightError, match='accumulator of "wide"') as caught:
        quantize_module(g.ctx, module, {"x": 1.0, "wide": 1e5}, "half_up")
    assert caught.value.code == "E0302"


def test_pass_reads_the_module_or_a_table(tmp_path: Path) -> None:
    def graph() -> tuple[TopGraph, ModuleOp]:
        g = TopGraph(x=(1, 6, 6, 4))
        return g, g.finish(out=g.op("tanh", "t", [g.input("x")]))

    g, module = graph()
    with pytest.raises(TilewrightError, match="no calibrated ranges"):
        QuantizePass().apply(g.ctx, module)
    table = CalibrationTable({"x": 4.0, "t": 1.0}, "kl", 3)
    write_attribute(module, table)
    found = read_attribute(module)
    assert found is not None
    assert found.thresholds == table.thresholds
    QuantizePass().apply(g.ctx, module)
    assert "tilewright.calibration" not in module.attributes

    g2, second = graph()
    table.save(tmp_path / "t.yaml")
    QuantizePass(table=str(tmp_path / "t.yaml")).apply(g2.ctx, second)
    assert str(second) == str(module)


@pytest.mark.parametrize("group", [1, 4])
def test_biases_take_back_the_mean_error_of_rounded_weights(group: int) -> None:
    rng = np.random.default_rng(5)
    g = TopGraph(x=(1, 8, 12, 12))
    # One large weight a channel makes the step coarse for the others.
    weight = rng.uniform(0.2, 1, (8, 8 // group, 1, 1)) / 127 * 0.9
    weight[:, 0] = 1.0
    module = g.finish(y=g.conv("c", g.input("x"), weight, group=group))
    samples = [
        {"x": (rng.normal(size=(1, 8, 12, 12)) * 0.1 + np.arange(8).reshape(1, 8, 1, 1)).astype(
            np.float32
        )}
        for _ in range(4)
    ]  # fmt: skip
    table = calibrate(module, g.ctx.weights, samples, method="max")
    assert table.means["x"] == pytest.approx(np.arange(8), abs=0.05)
    bias: list[float] = []
    for means in (None, table.means):
        copy, ctx = module.clone(), CompileContext(g.ctx.weights.copy())
        quantize_module(ctx, copy, table.thresholds, "half_up", means)
        errors = [
            run_quant(copy, ctx.weights, s)["y"] - TopSession(module, g.ctx.weights).run(s)["y"]
            for s in samples
        ]
        bias.append(float(np.abs(np.mean(errors, axis=(0, 1, 3, 4))).max()))
    # What remains is the rounding of the result, and of the bias itself.
    assert bias[1] < bias[0] / 2


def case(name: str) -> tuple[TopGraph, ModuleOp, list[dict[str, np.ndarray]], dict, np.ndarray]:
    """Load a case: its float graph, calibration samples, input and expected output."""
    import onnx

    folder = CASES / name
    model = onnx.load(folder / "model.onnx")
    weights = {i.name: onnx.numpy_helper.to_array(i) for i in model.graph.initializer}
    with np.load(folder / "calib.npz") as data:
        samples = [{"x": sample} for sample in data["x"]]
    with np.load(folder / "inputs.npz") as data:
        inputs = {"x": data["x"]}
    with np.load(folder / "outputs.npz") as data:
        expected = data["y"].astype(np.float64)
    g = TopGraph(x=inputs["x"].shape)
    if name == "quant-bias-overflows-int32":
        y = g.conv("c", g.input("x"), weights["w"], weights["b"])
    else:
        hidden = g.conv("c1", g.input("x"), weights["w1"], clamp_min=0.0)
        y = g.conv("c2", hidden, weights["w2"], pads=(1, 1, 1, 1))
    return g, g.finish(y=y), samples, inputs, expected


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_case_bias_overflows_int32(rounding: str) -> None:
    g, module, samples, inputs, expected = case("quant-bias-overflows-int32")
    table = calibrate(module, g.ctx.weights, samples)
    quantize_module(g.ctx, module, table.thresholds, rounding)
    got = run_quant(module, g.ctx.weights, inputs)["y"]
    assert np.abs(got - expected).max() <= 0.1
    [decision] = [d for d in g.ctx.decisions if d.layer == "c"]
    assert decision.details["raised"] == [0, 2]


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_case_kl_keeps_sparse_peaks(rounding: str) -> None:
    g, module, samples, inputs, expected = case("quant-kl-sparse-peaks")
    table = calibrate(module, g.ctx.weights, samples)
    quantize_module(g.ctx, module, table.thresholds, rounding)
    got = run_quant(module, g.ctx.weights, inputs)["y"].astype(np.float64)
    assert 10 * np.log10((expected**2).sum() / ((got - expected) ** 2).sum()) >= 25
