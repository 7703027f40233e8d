"""What every compiled model must satisfy: the float graph is right, the integers agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import onnx
import onnxruntime

from tilewright.codegen.verify import verify_program
from tilewright.compare import compare
from tilewright.compiler import Compiled, compile_model, front_end
from tilewright.ptq.options import QuantOptions
from tilewright.runtime.float_executor import TopSession
from tilewright.runtime.runtime import Executor
from tilewright.sim.cycle import CycleSimulator
from tilewright.sim.functional import FunctionalSimulator
from tilewright.spec.hardware import Hardware

Sample = dict[str, np.ndarray]


def normal_sample(shapes: Mapping[str, tuple[int, ...]], rng: np.random.Generator) -> Sample:
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def assert_levels_agree(compiled: Compiled, inputs: Sample, seed: int = 0) -> None:
    """Run one input at every level, and the programs in order, out of order and in time."""
    target = compiled.target
    for level in ("linalg", "affine", "tpu") if compiled.program.tpu_steps else ("tpu",):
        result = compare(compiled, "quant", level, inputs)
        assert result.exact, (level, result.layers[0])
        assert result.layers
    executor = Executor(compiled.program, target)
    outputs = executor.run(inputs)
    assert outputs.keys() == {port.name for port in compiled.program.outputs}
    for step in compiled.program.tpu_steps:
        code = executor.code(step)
        verify_program(code, target)
        # Any order the semaphores allow gives the same bytes.
        before, again = executor.ddr.copy(), executor.ddr.copy()
        FunctionalSimulator(target).run(
            code, before, registers=executor.registers, order="random", seed=seed
        )
        FunctionalSimulator(target).run(code, again, registers=executor.registers)
        np.testing.assert_array_equal(before, again)
        assert CycleSimulator(target).run(code, registers=executor.registers).cycles > 0


def check_model(
    model: onnx.ModelProto,
    shapes: Mapping[str, tuple[int, ...]],
    target: Hardware,
    *,
    seed: int = 0,
    samples: Sequence[Sample] | None = None,
) -> Compiled:
    """Compile a model; check its float graph against onnxruntime and its levels against another."""
    rng = np.random.default_rng(seed)
    if samples is None:
        samples = [normal_sample(shapes, rng) for _ in range(2)]
    front = front_end(model, target)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    # onnxruntime drops inputs that no node reads.
    known = {item.name for item in session.get_inputs()}
    feed = {name: array for name, array in samples[0].items() if name in known}
    expected = cast("list[np.ndarray]", session.run(None, feed))
    got = TopSession(front.stage.module, front.stage.weights).run(samples[0])
    for one, other in zip(expected, got.values(), strict=True):
        assert one.shape == other.shape
        reach = max(1.0, float(np.abs(one).max(initial=0)))
        np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-4 * reach)
    compiled = compile_model(front, target, samples=samples, quant=QuantOptions(level=0))
    loud = {name: array * np.float32(1.5) for name, array in normal_sample(shapes, rng).items()}
    assert_levels_agree(compiled, loud, seed)
    return compiled
