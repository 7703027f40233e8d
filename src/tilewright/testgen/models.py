"""Random small models with prime sizes and odd scales, through compiler and all simulators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import TilewrightError
from tilewright.spec.hardware import Hardware
from tilewright.testgen.run import Finding, Outcome
from tilewright.testgen.values import Pick

if TYPE_CHECKING:
    import onnx

    from tilewright.cosim.driver import RtlSimulator

Floats = npt.NDArray[np.float32]
SIZES = (3, 5, 7, 11, 13, 17)
"""Heights and widths."""
CHANNELS = (1, 2, 3, 5, 7, 11, 13, 17, 19)
SCALES = (1.0, 0.3, 1e-3, 1e-6, 37.0, 1e4)
"""Of weights: the multipliers of requantisation follow."""


class _Net:
    """Grows a network; `shape` is that of the latest value, channels first."""

    def __init__(self, seed: int) -> None:
        self.pick = Pick(f"model/{seed}")
        self.rng = np.random.default_rng([seed, 3])
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.shape = (self.pick.one(CHANNELS), self.pick.one(SIZES), self.pick.one(SIZES))
        self.input = (1, *self.shape)
        self.value = "x"
        self.earlier: list[tuple[str, tuple[int, int, int]]] = []

    def constant(self, array: npt.NDArray[Any]) -> str:
        from onnx import numpy_helper

        self.constants.append(numpy_helper.from_array(array, f"c{len(self.constants)}"))
        return self.constants[-1].name

    def node(self, kind: str, inputs: Sequence[str], **attributes: Any) -> None:
        from onnx import helper

        name = f"{kind.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name=name, **attributes))
        self.value = name

    def weights(self, *shape: int) -> Floats:
        fan_in = int(np.prod(shape[1:]))
        scale = np.full(shape[0], 1 / np.sqrt(fan_in))
        if self.pick.chance(0.4):
            scale *= self.rng.choice(SCALES, shape[0])
        values = self.rng.standard_normal(shape) * scale.reshape(-1, *(1,) * (len(shape) - 1))
        return values.astype(np.float32)

    def conv(self, depthwise: bool) -> None:
        pick, (channels, height, width) = self.pick, self.shape
        kernel = [pick.of(1, 2, 3, 5) for _ in range(2)]
        strides = [pick.of(1, 1, 2, 3) for _ in range(2)]
        pads = [pick.between(0, size - 1) for size in (*kernel, *kernel)]
        size = [
            (have + pads[i] + pads[i + 2] - kernel[i]) // strides[i] + 1
            for i, have in enumerate((height, width))
        ]
        if min(size) < 1:
            return
        out = channels if depthwise else pick.one(CHANNELS)
        weight = self.weights(out, 1 if depthwise else channels, *kernel)
        inputs = [self.value, self.constant(weight)]
        if pick.chance(0.7):
            inputs.append(self.constant(self.rng.standard_normal(out).astype(np.float32)))
        self.node("Conv", inputs, kernel_shape=kernel, strides=strides, pads=pads,
                  group=channels if depthwise else 1)  # fmt: skip
        self.shape = (out, size[0], size[1])

    def pool(self) -> None:
        pick, (channels, height, width) = self.pick, self.shape
        kernel = [min(pick.of(1, 2, 3), height), min(pick.of(2, 3), width)]
        strides = [pick.of(1, 2), pick.of(1, 2, 3)]
        kind = pick.of("MaxPool", "AveragePool")
        self.node(kind, [self.value], kernel_shape=kernel, strides=strides)
        sizes = ((height - kernel[0]) // strides[0] + 1, (width - kernel[1]) // strides[1] + 1)
        self.shape = (channels, *sizes)

    def add(self) -> None:
        same = [name for name, shape in self.earlier if shape == self.shape]
        kind = self.pick.of("Add", "Mul", "Sub")
        self.node(kind, [self.value, self.pick.one(same) if same else self.value])

    def resize(self) -> None:
        channels, height, width = self.shape
        if height * width > 80:
            return
        height, width = height + self.pick.of(1, 2, 5), width * 2
        sizes = self.constant(np.array([1, channels, height, width], np.int64))
        self.node("Resize", [self.value, "", "", sizes], mode=self.pick.of("nearest", "linear"))
        self.shape = (channels, height, width)

    def activation(self) -> None:
        self.node(self.pick.of("Relu", "HardSwish", "Sigmoid", "LeakyRelu"), [self.value])

    def linear(self) -> None:
        features, out = int(np.prod(self.shape)), self.pick.of(2, 7, 13, 29)
        self.node("Flatten", [self.value])
        inputs = [self.value, self.constant(self.weights(out, features))]
        self.node("Gemm", inputs, transB=1)
        self.shape = (out, 1, 1)


def random_model(seed: int, layers: int = 5) -> tuple[onnx.ModelProto, tuple[int, ...]]:
    """Return a small network and its input's shape."""
    from onnx import TensorProto, helper

    net = _Net(seed)
    net.conv(depthwise=False)
    for _ in range(layers):
        net.earlier.append((net.value, net.shape))
        net.pick.one(
            (
                lambda: net.conv(depthwise=False), lambda: net.conv(depthwise=True), net.pool,
                net.add, net.resize, net.activation,
            )
        )()  # fmt: skip
    if not net.nodes:
        net.activation()
    result = [1, *net.shape]
    if net.pick.chance(0.5):
        net.linear()
        result = [1, net.shape[0]]
    graph = helper.make_graph(
        net.nodes, f"stress_{seed}",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(net.input))],
        [helper.make_tensor_value_info(net.value, TensorProto.FLOAT, result)],
        net.constants,
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 18)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9), net.input


def run_model(
    hardware: Hardware, seed: int, backends: Sequence[str], rtl: RtlSimulator | None = None
) -> Outcome:
    """Compile a random model; compare the integer reference with every chosen level."""
    from tilewright.compare import compare
    from tilewright.compiler import compile_model, front_end
    from tilewright.cosim.model import compare_model
    from tilewright.ptq.options import QuantOptions
    from tilewright.runtime.runtime import Executor
    from tilewright.runtime.simulation import tables_of
    from tilewright.sim.cycle import CycleSimulator
    from tilewright.sim.functional import FunctionalSimulator

    model, shape = random_model(seed)
    rng = np.random.default_rng([seed, 4])
    samples = [{"x": rng.standard_normal(shape).astype(np.float32)} for _ in range(3)]
    inputs = {"x": rng.standard_normal(shape).astype(np.float32) * np.float32(1.5)}
    outcome = Outcome()
    try:
        compiled = compile_model(
            front_end(model, hardware), hardware, samples=samples, quant=QuantOptions(level=0)
        )
        result = compare(compiled, "quant", "tpu", inputs)
        if not result.exact:
            worst = result.layers[0]
            outcome.findings.append(Finding("value", "model", f"quant and tpu differ: {worst}"))
        executor = Executor(compiled.program, hardware)
        executor.run(inputs)
        for step in compiled.program.tpu_steps:
            code = executor.code(step)
            outcome.instructions += len(code)
            if "functional" in backends:
                runs = [executor.ddr.copy() for _ in range(2)]
                simulator = FunctionalSimulator(hardware)
                simulator.run(code, runs[0], registers=executor.registers)
                simulator.run(code, runs[1], registers=executor.registers, order="random",
                              seed=seed)  # fmt: skip
                if not np.array_equal(runs[0], runs[1]):
                    message = f"{step.name}: another order of the engines gives other bytes"
                    outcome.findings.append(Finding("order", step.name, message))
            if "cycle" in backends:
                timed = CycleSimulator(hardware).run(
                    code, registers=executor.registers, tables=tables_of(executor, step)
                )
                outcome.cycles += timed.cycles
        if "rtl" in backends and rtl is not None:
            compared = compare_model(compiled.program, rtl, inputs)
            for name, item in compared.programs.items():
                if lines := item.lines():
                    kind = "value" if not item.same_values else "time"
                    outcome.findings.append(Finding(kind, name, f"{name}: {'; '.join(lines[:3])}"))
            for name, same in compared.outputs.items():
                if not same:
                    message = f"output {name} differs on the RTL"
                    outcome.findings.append(Finding("value", name, message))
    except TilewrightError as error:
        detail = "; ".join([error.message, *error.details[:2]])
        outcome.findings.append(Finding("model error", error.code, f"[{error.code}] {detail}"))
    return outcome
