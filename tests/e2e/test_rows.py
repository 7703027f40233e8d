"""Transformers on chips with row instructions: the same integers at every level, cut in any way."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.level_checks import check_model
from tests.random_targets import random_target
from tests.transformer_networks import encoder
from tilewright.compiler import Compiled, compile_model, front_end
from tilewright.ptq.options import QuantOptions
from tilewright.quant.reference import QuantSession
from tilewright.runtime.float_executor import TopSession
from tilewright.runtime.runtime import Executor
from tilewright.spec.hardware import Hardware, load_target


def with_rows(target: str, **changes: object) -> Hardware:
    changes = {"name": f"{target}_rows", "vector_rows": True, **changes}
    return load_target(target).model_copy(update=changes)


TARGETS = [
    with_rows("tiny8", name="tiny8_8k", sram_size=8192),
    with_rows("tiny8"),
    with_rows("edge16"),
    with_rows("tpu_v2"),
]


def hosts(compiled: Compiled) -> dict[str, str]:
    """Return the layers that stay float, with their reasons."""
    found = [d for d in compiled.decisions if d.stage == "quantize" and not d.fired]
    return {d.layer: d.reason for d in found}


def instructions(compiled: Compiled) -> list[str]:
    executor = Executor(compiled.program, compiled.target)
    return [item.name for step in compiled.program.tpu_steps for item in executor.code(step)]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_an_encoder_runs_on_the_chip_as_a_whole(target: Hardware) -> None:
    compiled = check_model(encoder(layers=2), {"x": (1, 16, 32)}, target)
    assert len(compiled.program.tpu_steps) == 1
    assert {"vec_softmax", "vec_layer_norm"} <= set(instructions(compiled))
    assert hosts(compiled) == {}


@pytest.mark.parametrize("seed", [3, 25, 36])
def test_encoders_on_random_chips(seed: int) -> None:
    """Odd widths and lengths, chips of any size: rows are cut from each other in many ways."""
    rng = np.random.default_rng(seed)
    tokens, heads = (int(rng.choice(options)) for options in ((1, 7, 33), (1, 2, 3)))
    width = heads * int(rng.choice([4, 5, 8]))
    target = random_target(seed).model_copy(update={"vector_rows": True})
    model = encoder(tokens=tokens, width=width, heads=heads, hidden=17, seed=seed)
    compiled = check_model(model, {"x": (1, tokens, width)}, target, seed=seed)
    assert {"vec_softmax", "vec_layer_norm"} <= set(instructions(compiled))


def single(kind: str, shape: tuple[int, ...], **attributes: object) -> onnx.ModelProto:
    """Return `x -> relu -> kind -> relu`, with a row of scales for a normalisation."""
    operands, weights = ["r"], []
    if kind == "LayerNormalization":
        tail = shape[int(str(attributes["axis"])) :]
        rng = np.random.default_rng(0)
        for name in ("gamma", "beta"):
            array = rng.standard_normal(tail).astype(np.float32)
            weights.append(numpy_helper.from_array(array, name))
            operands.append(name)
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], name="r"),
        helper.make_node(kind, operands, ["s"], name="s", **attributes),  # pyright: ignore[reportArgumentType]
        helper.make_node("Relu", ["s"], ["y"], name="y"),
    ]
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape))] for name in "xy"]
    graph = helper.make_graph(nodes, "g", ends[0], ends[1], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    return model


SHAPES = [(1, 300), (7, 5), (2, 3, 4, 33), (1, 9, 11, 24), (1, 1, 1), (40, 257)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("target", [TARGETS[0], TARGETS[3]], ids=lambda target: target.name)
def test_rows_of_any_shape(shape: tuple[int, ...], target: Hardware) -> None:
    softmax = check_model(single("Softmax", shape, axis=-1), {"x": shape}, target)
    assert "vec_softmax" in instructions(softmax)
    for axis in {len(shape) - 1, max(0, len(shape) - 2)}:
        model = single("LayerNormalization", shape, axis=axis)
        compiled = check_model(model, {"x": shape}, target)
        if "s" in hosts(compiled):
            assert target is TARGETS[0]
            assert "a row of 10280 elements takes" in hosts(compiled)["s"]
        else:
            assert "vec_layer_norm" in instructions(compiled)


def between_convolutions(kind: str) -> onnx.ModelProto:
    """Return `x -> conv -> softmax or normalisation of the channels -> conv` on images."""
    rng = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array((rng.standard_normal(shape) / 5).astype(np.float32), name)
        for name, shape in (
            ("w0", (16, 8, 3, 3)),
            ("w1", (8, 16, 3, 3)),
            ("g", (16,)),
            ("b", (16,)),
        )
    ]
    nodes = [helper.make_node("Conv", ["x", "w0"], ["a"], name="a", pads=[1] * 4)]
    if kind == "Softmax":
        nodes.append(helper.make_node(kind, ["a"], ["s"], name="s", axis=1))
    else:
        nodes += [
            helper.make_node("Transpose", ["a"], ["t"], name="t", perm=[0, 2, 3, 1]),
            helper.make_node(kind, ["t", "g", "b"], ["u"], name="s", axis=-1),
            helper.make_node("Transpose", ["u"], ["s"], name="v", perm=[0, 3, 1, 2]),
        ]
    nodes.append(helper.make_node("Conv", ["s", "w1"], ["y"], name="y", pads=[1] * 4))
    ends = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 8, 30, 30])] for name in "xy"
    ]
    graph = helper.make_graph(nodes, "g", ends[0], ends[1], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    return model


@pytest.mark.parametrize("kind", ["Softmax", "LayerNormalization"])
def test_rows_in_a_cascade(kind: str) -> None:
    """Pixels of an image are rows: they are computed a few lines at a time between two layers."""
    compiled = check_model(between_convolutions(kind), {"x": (1, 8, 30, 30)}, with_rows("tiny8"))
    assert "vec_softmax" in instructions(compiled) or kind != "Softmax"
    assert any(
        item.layer == "s" and "computes a, s, y a few rows at a time" in item.reason
        for item in compiled.decisions
    )
    assert "s" not in hosts(compiled)


def test_what_stays_on_the_host_and_why() -> None:
    target, shape = with_rows("tiny8"), (1, 6, 20)
    samples = [{"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}]

    def reasons(model: onnx.ModelProto, chip: Hardware = target) -> dict[str, str]:
        quant = QuantOptions(level=0)
        return hosts(compile_model(front_end(model, chip), chip, samples=samples, quant=quant))

    last = single("Softmax", shape, axis=-1)
    last.graph.node.pop()
    last.graph.output[0].name = "s"
    assert reasons(last)["s"] == "a softmax that only the host reads: eight bits would leave ties"
    across = reasons(single("Softmax", shape, axis=1))
    assert across["s"] == "it works along axis 1 of 3; the chip along the last"
    for kind, axis in (("Softmax", -1), ("LayerNormalization", 2)):
        found = reasons(single(kind, shape, axis=axis), with_rows("tiny8", vector_rows=False))
        assert "the target has no `vector_rows`" in found["s"]


def test_accuracy_is_that_of_the_host() -> None:
    """Softmax and normalisation in integers cost the encoder little beside its 8-bit tensors."""
    model, rng = encoder(layers=2), np.random.default_rng(3)
    samples = [{"x": rng.standard_normal((1, 16, 32)).astype(np.float32)} for _ in range(8)]
    errors: dict[bool, float] = {}
    for rows in (False, True):
        target = with_rows("edge16", vector_rows=rows)
        front = front_end(model, target)
        compiled = compile_model(front, target, samples=samples, quant=QuantOptions(level=0))
        session = QuantSession(compiled.stages["quant"].module, compiled.stages["quant"].weights)
        exact = TopSession(front.stage.module, front.stage.weights)
        pairs = [(session.run(item)["y"], exact.run(item)["y"]) for item in samples]
        noise = sum(float(((got - want) ** 2).sum()) for got, want in pairs)
        errors[rows] = noise / sum(float((want**2).sum()) for _, want in pairs)
    # What is lost is in the sums before the normalisations: on the host they are floats.
    assert errors[True] < 2 * errors[False]
    assert errors[True] < 0.01


def test_a_mask_takes_no_codes_from_the_scores() -> None:
    """Masked tokens change nothing, and the scores are as exact as without a mask."""
    rng = np.random.default_rng(4)
    target, tokens = with_rows("edge16"), 16
    noise: list[float] = []
    for masked in (False, True):
        model = encoder(tokens=tokens, masked=masked)
        samples = [{"x": rng.standard_normal((1, tokens, 32)).astype(np.float32)} for _ in range(6)]
        for index, sample in enumerate(samples if masked else ()):
            sample["mask"] = (np.arange(tokens) < 10 + index)[None].astype(np.float32)
        front = front_end(model, target)
        compiled = compile_model(front, target, samples=samples, quant=QuantOptions(level=0))
        assert "vec_softmax" in instructions(compiled)
        session = QuantSession(compiled.stages["quant"].module, compiled.stages["quant"].weights)
        exact = TopSession(front.stage.module, front.stage.weights)
        error = power = 0.0
        for sample in samples:
            seen = sample["mask"][0] > 0 if masked else np.ones(tokens, np.bool_)
            got, want = (run.run(sample)["y"][0, seen] for run in (session, exact))
            error += float(((got - want) ** 2).sum())
            power += float((want**2).sum())
            if masked:
                other = dict(sample, x=np.where(seen[:, None], sample["x"], 0).astype(np.float32))
                np.testing.assert_array_equal(session.run(other)["y"][0, seen], got)
        noise.append(error / power)
    assert noise[1] < 2 * noise[0]
