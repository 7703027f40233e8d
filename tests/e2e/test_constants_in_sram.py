"""Constants that stay in SRAM: loaded once, before everything else; no integer changes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from xdsl.dialects import memref
from xdsl.dialects.linalg.ops import GenericOp
from xdsl.ir import Operation

from tests.e2e.test_fusion import residual_network
from tests.e2e.test_steps import TARGETS
from tests.level_checks import assert_levels_agree, normal_sample
from tests.random_networks import random_network
from tilewright.compare import compare
from tilewright.compiler import Compiled, Level, compile_model, front_end
from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.ptq.options import QuantOptions
from tilewright.spec.hardware import Hardware, load_target

each_target = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


PLAIN = QuantOptions(level=0)


def compiled(
    model: onnx.ModelProto,
    shape: tuple[int, ...],
    target: Hardware,
    names: tuple[str, ...] = ("all",),
    level: Level = 2,
) -> Compiled:
    samples = [normal_sample({"x": shape}, np.random.default_rng(0))]
    front = front_end(model, target)
    return compile_model(
        front,
        target,
        samples=samples,
        quant=PLAIN,
        level=level,
        constants_in_sram=names,
    )


def layers_that_load(made: Compiled, *, late: bool) -> set[str]:
    """Return layers whose weights are loaded in a loop or behind the first work, or before it."""
    found: set[str] = set()
    for function in made.stages["affine"].module.ops:
        block = function.regions[0].blocks.first if function.regions else None
        if block is None:
            continue
        started = False
        for op in block.ops:
            started |= any(isinstance(inner, GenericOp) for inner in op.walk())
            for inner in op.walk():
                weights = isinstance(inner, memref.CopyOp) and role(inner) == "weights"
                if weights and late == (started or inner is not op):
                    found.add(str(inner.attributes["layer"]).strip('"'))
    return found


def role(copy: memref.CopyOp) -> str:
    value = copy.destination
    while isinstance(value.owner, memref.SubviewOp):
        value = value.owner.source
    if not isinstance(value.owner, Operation):
        return ""  # A result of the function.
    return str(value.owner.attributes.get("role", "")).strip('"')


def test_all_constants_of_residual_networks_on_three_chips() -> None:
    for number, target in enumerate(TARGETS):
        model, shape = residual_network(number)
        made = compiled(model, shape, target)
        assert layers_that_load(made, late=False)
        assert not layers_that_load(made, late=True)
        assert_levels_agree(made, normal_sample({"x": shape}, np.random.default_rng(1)))


@each_target
def test_all_constants_of_random_networks(target: Hardware) -> None:
    model, shape = random_network(3)
    for level in (0, 2):
        made = compiled(model, shape, target, level=level)
        assert not layers_that_load(made, late=True)
        assert_levels_agree(made, normal_sample({"x": shape}, np.random.default_rng(1)))


def wide_network() -> tuple[onnx.ModelProto, tuple[int, ...]]:
    """More channels than one instruction covers, with a lookup; then a layer and a pool."""
    rng = np.random.default_rng(5)

    def weights(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array(rng.normal(0, 0.1, shape).astype(np.float32), name)

    nodes = [
        helper.make_node("Conv", ["x", "wide.w"], ["a"], "wide", pads=[1, 1, 1, 1]),
        helper.make_node("HardSwish", ["a"], ["b"], "swish"),
        helper.make_node("Conv", ["b", "narrow.w", "narrow.b"], ["c"], "narrow"),
        helper.make_node("Relu", ["c"], ["d"], "relu"),
        helper.make_node("MaxPool", ["d"], ["y"], "pool", kernel_shape=[2, 2]),
    ]
    shape = (1, 6, 9, 7)
    made = helper.make_graph(
        nodes,
        "wide",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 20, 8, 6])],
        [
            weights("wide.w", 300, 6, 3, 3),
            weights("narrow.w", 20, 300, 1, 1),
            weights("narrow.b", 20),
        ],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    return model, shape


@each_target
@pytest.mark.parametrize("level", [0, 2])
def test_ranges_of_channels_with_a_lookup(target: Hardware, level: Level) -> None:
    model, shape = wide_network()
    made = compiled(model, shape, target, level=level)
    assert layers_that_load(made, late=False) == {"wide", "narrow"}
    assert not layers_that_load(made, late=True)
    assert_levels_agree(made, normal_sample({"x": shape}, np.random.default_rng(1)))


def test_layers_by_fused_layers_and_by_constants() -> None:
    model, shape = wide_network()
    for names, layers in (
        (("wide.w",), {"wide"}),
        (("relu",), {"narrow"}),
        (("narrow.b", "wide"), {"narrow", "wide"}),
    ):
        made = compiled(model, shape, TARGETS[1], names)
        kept = {
            str(op.attributes["layer"]).strip('"')
            for op in made.stages["affine"].module.walk()
            if isinstance(op, memref.AllocOp) and "kept" in op.attributes
        }
        assert kept == layers
        told = {item.layer for item in made.decisions if "loaded once" in item.reason}
        assert told == layers


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pool", "has no constants"),
        ("narow.w", "did you mean `narrow.w`"),
        ("nothing", "is no layer and no constant"),
    ],
)
def test_other_names_are_refused(name: str, words: str) -> None:
    model, shape = wide_network()
    with pytest.raises(UsageError) as caught:
        compiled(model, shape, TARGETS[0], (name,))
    assert words in str(caught.value)


def test_what_does_not_fit_is_refused_with_its_bytes() -> None:
    model, shape = wide_network()
    small = load_target("tiny8").model_copy(update={"name": "small", "sram_size": 16384})
    for level in (0, 2):
        with pytest.raises(TilewrightError) as caught:
            compiled(model, shape, small, level=level)
        assert caught.value.code == "E0401"
        assert "constants that shall stay in SRAM do not fit" in str(caught.value)
        assert "SRAM has 16384" in str(caught.value)
    assert compiled(model, shape, small, ()).program.tpu_steps


def test_halves_keep_their_biases() -> None:
    target = TARGETS[-1]
    model, shape = wide_network()
    samples = [normal_sample({"x": shape}, np.random.default_rng(0))]
    made = compile_model(
        front_end(model, target), target, samples=samples, dtype="fp16", constants_in_sram=["all"]
    )
    assert layers_that_load(made, late=False) == {"wide", "narrow"}
    assert not layers_that_load(made, late=True)
    for level in ("affine", "tpu"):
        found = compare(made, "quant", level, samples[0])
        assert found.layers
        assert found.agrees, (level, found.layers[0])
