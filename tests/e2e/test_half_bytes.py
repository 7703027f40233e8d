"""Weights of 4 bits: the same integers at every level, on chips that pack them and on others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from xdsl.dialects.builtin import TensorType
from xdsl.dialects.linalg.ops import GenericOp

from tests.e2e.test_edges import graph, normal
from tests.level_checks import Sample, assert_levels_agree, normal_sample
from tests.random_networks import random_network
from tests.random_targets import random_target
from tilewright.compiler import Compiled, compile_model, front_end
from tilewright.diagnostics import TilewrightError
from tilewright.dialects.quant import i4
from tilewright.dialects.tpu import ProgramOp
from tilewright.ptq.options import QuantOptions
from tilewright.quant.graph import layer_of, main_function
from tilewright.quant.reference import run_quant
from tilewright.report.network import floor
from tilewright.runtime.runtime import Executor
from tilewright.sim.cycle import CycleSimulator
from tilewright.spec.hardware import Hardware, load_target
from tilewright.spec.program import full_fields
from tilewright.transforms.tpu.nests import attr_ints

Network = tuple[onnx.ModelProto, tuple[int, ...]]
LAYERS = ("top.conv", "top.linear", "top.matmul")


def with_int4(target: Hardware) -> Hardware:
    """Return a chip that has int4 besides."""
    name = f"{target.name}_int4"
    return target.model_copy(update={"name": name, "dtypes": ("int8", "int4")})


def odd_network() -> Network:
    """Layers of 17, 1, 129 and 10 channels: plain, depthwise, grouped; kernels that are no square.

    Layer `wide` makes the 129.
    """
    nodes: list[onnx.NodeProto] = []
    weights: dict[str, np.ndarray] = {}
    shape, value = (1, 3, 9, 7), "x"

    def conv(name: str, out: int, depth: int, kernel: tuple[int, int], **attributes: Any) -> None:
        nonlocal value
        weights[f"{name}.w"] = normal(out, depth, *kernel, seed=len(nodes)) / np.float32(
            np.sqrt(depth * kernel[0] * kernel[1])
        )
        weights[f"{name}.b"] = normal(out, seed=len(nodes)) * np.float32(0.2)
        pads = [kernel[0] // 2, kernel[1] // 2] * 2
        nodes.append(
            helper.make_node(
                "Conv", [value, f"{name}.w", f"{name}.b"], [name], name=name, pads=pads,
                **attributes,
            )
        )  # fmt: skip
        value = name

    conv("first", 17, 3, (3, 3))
    conv("depthwise", 17, 1, (3, 3), group=17)
    conv("strided", 17, 1, (5, 3), group=17, strides=[2, 1])
    conv("one", 1, 17, (1, 1))
    conv("wide", 129, 1, (3, 1))
    conv("grouped", 129, 43, (1, 3), group=3)
    conv("last", 10, 129, (1, 1))
    nodes.append(helper.make_node("Flatten", [value], ["flat"], name="flat"))
    size = 10 * 5 * 7
    weights["fc.w"] = normal(3, size, seed=99) / np.float32(np.sqrt(size))
    nodes.append(helper.make_node("Gemm", ["flat", "fc.w"], ["y"], name="fc", transB=1))
    return graph(nodes, {"x": shape}, ["y"], **weights), shape


def compiled(
    network: Network, target: Hardware, bits: Mapping[str, int], seed: int = 0
) -> tuple[Compiled, Sample]:
    """Compile with 4 bits, but what `bits` says; return an input too."""
    model, shape = network
    rng = np.random.default_rng(seed)
    samples = [normal_sample({"x": shape}, rng) for _ in range(2)]
    options = QuantOptions(level=0, weight_bits=4, layer_bits=bits)
    made = compile_model(front_end(model, target), target, samples=samples, quant=options)
    return made, {"x": normal_sample({"x": shape}, rng)["x"] * np.float32(1.5)}


def mixed(network: Network, target: Hardware, seed: int) -> tuple[Compiled, Sample]:
    """Compile with every layer at 4 or 8 bits, as chance has it."""
    rng = np.random.default_rng(seed)
    module = front_end(network[0], target).stage.module
    names = [layer_of(op) for op in main_function(module).body.block.ops if op.name in LAYERS]
    return compiled(network, target, {name: int(rng.choice([4, 8])) for name in names}, seed)


def instructions(made: Compiled) -> list[dict[str, int]]:
    """Return the fields of all `mac_conv` of the programs."""
    return [
        full_fields(instr)
        for op in made.stages["tpu"].module.body.block.ops
        if isinstance(op, ProgramOp)
        for instr in op.instructions()
        if instr.name == "mac_conv"
    ]


def weights_of(made: Compiled) -> dict[str, np.ndarray]:
    """Return the weights of 4 bits by name, as the quantised graph has them."""
    stage = made.stages["quant"]
    return {
        layer_of(op): stage.weights.get(layer_of(op))
        for op in stage.module.walk()
        if op.name == "top.weight"
        and isinstance(kind := op.results[0].type, TensorType)
        and kind.element_type == i4
    }


SHIPPED = [load_target("tpu_v2"), *(with_int4(load_target(name)) for name in ("tiny8", "edge16"))]


@pytest.mark.parametrize("target", SHIPPED, ids=lambda target: target.name)
def test_odd_channels_at_every_level(target: Hardware) -> None:
    made, inputs = compiled(odd_network(), target, {"wide": 8})
    assert_levels_agree(made, inputs)
    weights = weights_of(made)
    assert len(weights) == 7
    assert not any(name.startswith("wide") for name in weights)
    for name, codes in weights.items():
        assert codes.dtype == np.int8
        assert (codes.min(), codes.max()) == (-7, 7) or codes.size < 50, name
    kinds = {(f["dtype"], f["diag"]) for f in instructions(made)}
    assert kinds >= {(1, 0), (1, 1), (0, 0)}


def test_chips_without_int4_compute_the_same_integers() -> None:
    """A byte a weight, and the decision log says why; of the same codes."""
    plain = load_target("edge16")
    one, inputs = compiled(odd_network(), plain, {})
    two, _ = compiled(odd_network(), with_int4(plain), {})
    assert not weights_of(one)
    assert len(weights_of(two)) == 8
    assert {f["dtype"] for f in instructions(one)} == {0}
    outputs = [
        run_quant(made.stages["quant"].module, made.stages["quant"].weights, inputs, keep=True)
        for made in (one, two)
    ]
    assert outputs[0].keys() == outputs[1].keys()
    for name, value in outputs[0].items():
        np.testing.assert_array_equal(value, outputs[1][name], err_msg=name)
    reasons = [item.reason for item in one.decisions if item.layer == "one"]
    assert "weights of 4 bits take a byte each: `edge16` has no int4" in reasons
    assert two.program.constants.nbytes < one.program.constants.nbytes


@pytest.mark.parametrize("seed", range(8))
def test_mixed_layers_on_random_chips(seed: int) -> None:
    assert_random(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_many_more_mixed_layers_on_random_chips(seed: int) -> None:
    assert_random(seed)


def assert_random(seed: int) -> None:
    target = with_int4(random_target(seed))
    try:
        made, inputs = mixed(random_network(seed), target, seed)
    except TilewrightError as error:
        if error.code != "E0401":
            raise
        return  # chips of two banks of 2 KB hold no layer of a hundred columns
    assert_levels_agree(made, inputs, seed)


def test_forms_of_weights() -> None:
    """Each way in which weights lie in SRAM occurs with 4 bits, and gives the right integers."""
    small = with_int4(load_target("tiny8").model_copy(update={"sram_size": 4096}))
    seen: set[str] = set()
    for target, seed in ((small, 7), (small, 23), (SHIPPED[0], 7), (SHIPPED[2], 22)):
        made, inputs = compiled(random_network(seed), target, {}, seed)
        assert_levels_agree(made, inputs, seed)
        for op in made.stages["affine"].module.walk():
            if isinstance(op, GenericOp) and "packing" in op.attributes:
                pixels, runs, *stack = attr_ints(op, "packing", ())
                seen.add(f"{'runs' if runs else 'diagonal'} of {'many' if pixels > 1 else 1}")
                seen |= {"stack"} if stack and stack[0] else set()
        for f in instructions(made):
            assert f["dtype"] == 1 or not f["wgt_pitch"]
            seen |= {key for key in ("diag", "accumulate") if f[key]}
            seen |= {"blocks"} if f["oc_blocks"] > 1 else set()
            seen |= {"odd"} if f["cols_last"] % 2 else set()
    assert seen >= {
        "diag", "accumulate", "blocks", "odd", "stack", "runs of many", "runs of 1",
        "diagonal of many",
    }  # fmt: skip


def test_constants_that_stay_take_half_the_bytes() -> None:
    """`--constant-in-sram`: weights of all layers in SRAM throughout, two a byte."""
    target = with_int4(load_target("edge16"))
    model, shape = odd_network()
    samples = [normal_sample({"x": shape}, np.random.default_rng(3))]
    sizes: list[int] = []
    for bits in (8, 4):
        options = QuantOptions(level=0, weight_bits=bits)
        made = compile_model(
            front_end(model, target), target, samples=samples, quant=options,
            constants_in_sram=["all"],
        )  # fmt: skip
        assert_levels_agree(made, samples[0])
        sizes.append(made.program.sram_peak_bytes)
    weights = sum(codes.size for codes in weights_of(made).values())
    assert sizes[0] - sizes[1] > 0.4 * weights


@pytest.mark.parametrize("seed", range(4))
def test_no_program_beats_the_floor(seed: int) -> None:
    """Where a word is narrower than the array, 4-bit weights enter it twice as fast as bytes."""
    narrow = {"sram_word_bytes": 4, "sram_banks": 4, "sram_size": 16384}
    target = with_int4(load_target("edge16").model_copy(update=narrow))
    made, inputs = compiled(random_network(seed), target, {}, seed)
    executor = Executor(made.program, target)
    executor.run(inputs)
    cycles = sum(
        CycleSimulator(target).run(executor.code(step), registers=executor.registers).cycles
        for step in made.program.tpu_steps
    )
    assert cycles >= floor(made.program.layer_info, target).cycles > 0
