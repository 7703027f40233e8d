"""The step `improve`: what it changes, what it leaves alone, and that it lowers the error."""

from __future__ import annotations

from typing import cast

import numpy as np
import onnx
import pytest

from tests.odd_networks import odd_network
from tests.quant_modules import Sample, normal_samples, quantised_stages
from tests.random_networks import random_network
from tilewright.compare import compare
from tilewright.compiler import Stage, compile_model
from tilewright.dialects.quant import ConvOp
from tilewright.ptq import sequential
from tilewright.ptq.layer_fit import Geometry, Layer, fit_layer
from tilewright.ptq.options import QuantOptions
from tilewright.ptq.sequential import improve
from tilewright.quant import kernels
from tilewright.quant.graph import main_function
from tilewright.quant.reference import QuantSession
from tilewright.runtime.float_executor import TopSession
from tilewright.spec.hardware import load_target

LEARNED = QuantOptions(level=2).resolved()
ROUNDINGS = ("half_up", "half_away", "half_even", "truncate")


def noise(top: Stage, quant: Stage, samples: list[Sample]) -> float:
    """Return the squared error at the outputs as a share of the signal."""
    exact, codes = TopSession(top.module, top.weights), QuantSession(quant.module, quant.weights)
    signal = apart = 0.0
    for sample in samples:
        wanted, got = exact.run(sample), codes.run(sample)
        for one, other in zip(wanted.values(), got.values(), strict=True):
            signal += float((one.astype(float) ** 2).sum())
            apart += float(((one.astype(float) - other) ** 2).sum())
    return apart / signal


def arrays(stage: Stage) -> dict[str, np.ndarray]:
    return {name: stage.weights.get(name) for name in stage.weights}


def smooth_samples(shape: tuple[int, ...], count: int, seed: int = 0) -> list[Sample]:
    """Return inputs whose channels and neighbours are alike, as those of pictures are."""
    rng = np.random.default_rng(seed)
    found: list[Sample] = []
    for _ in range(count):
        coarse = rng.standard_normal((1, 2, shape[2] // 4 + 1, shape[3] // 4 + 1))
        fine = coarse.repeat(4, axis=2).repeat(4, axis=3)[:, :, : shape[2], : shape[3]]
        mixed = np.einsum("oc,nchw->nohw", np.linspace(-1, 1, 2 * shape[1]).reshape(-1, 2), fine)
        x = mixed + 0.1 * rng.standard_normal(shape)
        found.append({"x": x.astype(np.float32)})
    return found


@pytest.mark.parametrize("rounding", ["half_up", "truncate"])
def test_the_error_falls_on_other_samples(rounding: str) -> None:
    model, shape = odd_network("residuals")
    samples = smooth_samples(shape, 16)
    top, stage = quantised_stages(model, samples, rounding=rounding, weight_bits=4)
    fresh = smooth_samples(shape, 4, seed=99)
    before = noise(top, stage, fresh)
    found = improve(top, stage, samples, LEARNED)
    assert found
    assert all(row.after <= row.before for row in found)
    assert sum(row.codes for row in found) > 0
    assert noise(top, stage, fresh) < 0.5 * before


@pytest.mark.parametrize("seed", range(4))
def test_only_codes_and_biases_change(seed: int) -> None:
    model, shape = random_network(seed, 6)
    bits = (8, 4)[seed % 2]
    samples = normal_samples(shape, 8)
    top, stage = quantised_stages(model, samples, rounding=ROUNDINGS[seed], weight_bits=bits)
    text, before, floats = str(stage.module), arrays(stage), arrays(top)
    improve(top, stage, samples, LEARNED)
    after = arrays(stage)
    assert str(stage.module) == text
    assert after.keys() == before.keys()
    for name, array in after.items():
        assert (array.dtype, array.shape) == (before[name].dtype, before[name].shape)
        if not name.endswith((".i8", ".bias")):
            np.testing.assert_array_equal(array, before[name])
        elif name.endswith(".i8"):
            assert np.abs(array.astype(int)).max(initial=0) <= (7 if bits == 4 else 127)
    for name, array in arrays(top).items():
        assert array is floats[name]


def test_the_same_again() -> None:
    model, shape = random_network(5, 6)
    samples = normal_samples(shape, 8)
    stores: list[dict[str, np.ndarray]] = []
    for _ in range(2):
        top, stage = quantised_stages(model, samples, weight_bits=4)
        improve(top, stage, samples, LEARNED)
        stores.append(arrays(stage))
    for name, array in stores[0].items():
        np.testing.assert_array_equal(array, stores[1][name], err_msg=name)


def test_biases_alone_with_nearest_codes() -> None:
    model, shape = odd_network("residuals")
    samples = normal_samples(shape, 12)
    top, stage = quantised_stages(model, samples, weight_bits=4)
    before = arrays(stage)
    options = QuantOptions(level=2, rounding="nearest").resolved()
    found = improve(top, stage, samples, options)
    assert any(row.channels for row in found)
    assert not any(row.codes for row in found)
    for name, array in arrays(stage).items():
        if not name.endswith(".bias"):
            np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize(
    ("options", "count"),
    [(QuantOptions(level=1), 8), (QuantOptions(level=0), 8), (QuantOptions(level=2), 3)],
)
def test_nothing_is_done_unless_asked_for(options: QuantOptions, count: int) -> None:
    model, shape = random_network(2, 4)
    samples = normal_samples(shape, count)
    top, stage = quantised_stages(model, samples)
    before = arrays(stage)
    assert improve(top, stage, samples, options.resolved()) == []
    for name, array in arrays(stage).items():
        assert array is before[name]


def test_all_is_taken_back_if_the_outputs_are_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    model, shape = odd_network("residuals")
    samples = normal_samples(shape, 8)
    top, stage = quantised_stages(model, samples, weight_bits=4)
    before = arrays(stage)
    figures = iter([-20.0, -19.9])
    monkeypatch.setattr(sequential, "output_noise", lambda *_: next(figures))
    found = improve(top, stage, samples, LEARNED)
    assert found
    assert not any(row.codes or row.channels or row.gain for row in found)
    for name, array in arrays(stage).items():
        np.testing.assert_array_equal(array, before[name])


def test_a_few_wild_positions_do_not_spoil_the_others() -> None:
    """One position in fifty is wrong by far: the bias stays right for the others."""
    rng = np.random.default_rng(4)
    layer = exact_layer(rng)
    inputs = [rng.integers(-128, 128, (1, 5, 10, 10)).astype(np.float32) for _ in range(8)]
    targets = results(layer, inputs)
    for y in targets:
        y += rng.normal(0, 1, y.shape)
        y[:, :, 0, :2] += 1e4
    change = fit_layer(layer, Geometry(), inputs, targets, learned=False, thorough=False, seed=0)
    assert np.abs(change.bias - layer.bias).max() <= 2


def test_a_network_without_weights_stays() -> None:
    nodes = [onnx.helper.make_node("Relu", ["x"], ["y"])]
    values = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 2, 3, 4])
        for name in ("x", "y")
    ]
    graph = onnx.helper.make_graph(nodes, "g", values[:1], values[1:])
    opsets = [onnx.helper.make_opsetid("", 18)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9)
    samples = normal_samples((1, 2, 3, 4), 8)
    assert improve(*quantised_stages(model, samples), samples, LEARNED) == []


def exact_layer(rng: np.random.Generator, term: int = 0) -> Layer:
    """Return a layer whose codes are exactly its weights."""
    weight = rng.integers(-7, 8, (6, 5, 1, 1), dtype=np.int8)
    return Layer(
        name="conv",
        weight_name="w",
        bias_name="b",
        weight=weight,
        bias=rng.integers(-90, 90, 6) + term,
        real=weight.astype(np.float64),
        unit=np.full(6, 0.5),
        zero=-128,
        term=np.full(6, term),
        low=np.full(6, -np.inf),
        high=np.full(6, np.inf),
        limit=7,
    )


def results(layer: Layer, inputs: list[np.ndarray]) -> list[np.ndarray]:
    matrix = layer.weight.reshape(6, 5).astype(np.float64)
    bias = layer.bias - layer.term + layer.zero * matrix.sum(axis=1)
    return [
        (np.einsum("ok,nkhw->nohw", matrix, x) + bias.reshape(1, 6, 1, 1)) * 0.5 for x in inputs
    ]


@pytest.mark.parametrize("term", [0, 12345])
@pytest.mark.parametrize("learned", [True, False])
def test_what_cannot_be_better_stays(term: int, learned: bool) -> None:
    rng = np.random.default_rng(1)
    layer = exact_layer(rng, term)
    inputs = [rng.integers(-128, 128, (1, 5, 4, 4)).astype(np.float32) for _ in range(8)]
    change = fit_layer(
        layer, Geometry(), inputs, results(layer, inputs), learned=learned, thorough=False, seed=0
    )
    assert change.channels == 0
    np.testing.assert_array_equal(change.weight, layer.weight)
    np.testing.assert_array_equal(change.bias, layer.bias)


def test_what_only_fits_the_samples_is_refused() -> None:
    """Targets that say something else in every sample: no change helps the samples held out."""
    rng = np.random.default_rng(2)
    layer = exact_layer(rng)
    inputs = [rng.integers(-128, 128, (1, 5, 2, 2)).astype(np.float32) for _ in range(400)]
    targets = [y + rng.normal(0, 300, y.shape) for y in results(layer, inputs)]
    change = fit_layer(layer, Geometry(), inputs, targets, learned=True, thorough=True, seed=0)
    np.testing.assert_array_equal(change.weight, layer.weight)


def test_a_wrong_bias_is_put_right() -> None:
    rng = np.random.default_rng(3)
    layer = exact_layer(rng, term=999)
    inputs = [rng.integers(-128, 128, (1, 5, 4, 4)).astype(np.float32) for _ in range(8)]
    targets = [y + np.arange(6).reshape(1, 6, 1, 1) for y in results(layer, inputs)]
    change = fit_layer(layer, Geometry(), inputs, targets, learned=True, thorough=False, seed=0)
    np.testing.assert_array_equal(change.bias - layer.bias, 2 * np.arange(6))
    assert change.after < 1e-9 < change.before


@pytest.mark.parametrize("seed", range(10))
def test_columns_are_what_the_convolution_reads(seed: int) -> None:
    """Sums over unfolded inputs equal the reference's, at borders too, for every group."""
    rng = np.random.default_rng(seed)
    group, inner, outputs, zero = (int(rng.integers(1, 4)) for _ in range(4))
    kernel, strides, dilations = (
        cast("tuple[int, int]", tuple(int(v) for v in rng.integers(1, 4, 2))) for _ in range(3)
    )
    pads = cast("tuple[int, int, int, int]", tuple(int(v) for v in rng.integers(0, 3, 4)))
    batch = int(rng.integers(1, 3))
    x = rng.integers(-128, 128, (batch, 9, 10, group * inner), dtype=np.int8)
    w = rng.integers(-7, 8, (group * outputs, inner, *kernel), dtype=np.int8)
    sums = kernels.conv(
        x, w, strides=strides, pads=pads, dilations=dilations, group=group, pad_code=zero
    )
    wanted = sums - zero * w.reshape(len(w), -1).sum(axis=1, dtype=np.int64)
    size = (wanted.shape[1], wanted.shape[2])
    places = np.sort(rng.choice(batch * size[0] * size[1], 5, replace=False))
    geometry = Geometry(kernel, strides, pads, dilations, group)
    out = np.empty((group * inner, kernel[0] * kernel[1], len(places)), np.float32)
    centred = (x.astype(np.int16) - zero).transpose(0, 3, 1, 2)
    geometry.columns(centred, size, places, slice(0, group * inner), out)
    got = w.reshape(group, outputs, -1) @ out.reshape(group, -1, len(places))
    expected = wanted.reshape(-1, len(w))[places].T
    np.testing.assert_array_equal(got.reshape(len(w), -1), expected)


@pytest.mark.parametrize("target", ["tiny8", "tpu_v2"])
def test_all_levels_give_the_improved_integers(target: str) -> None:
    model, shape = random_network(11, 6)
    samples = normal_samples(shape, 8)
    chip = load_target(target)
    plain = compile_model(model, chip, samples=samples, quant=QuantOptions(level=1))
    compiled = compile_model(model, chip, samples=samples, quant=QuantOptions(level=2))
    changed = [item for item in compiled.decisions if item.stage == "improve" and item.fired]
    assert changed
    for level in ("linalg", "affine", "tpu"):
        result = compare(compiled, "quant", level, normal_samples(shape, 1, seed=5)[0])
        assert result.exact, (level, result.layers[0])
    convs = [
        sum(isinstance(op, ConvOp) for op in main_function(item.stages["quant"].module).walk())
        for item in (plain, compiled)
    ]
    assert convs[0] == convs[1]
