"""Random small networks give the same integers at every level, on every target."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from tests.random_networks import random_network
from tilewright.codegen.verify import verify_program
from tilewright.compare import compare
from tilewright.compiler import compile_model, front_end
from tilewright.ptq.options import Activations, QuantOptions
from tilewright.runtime.float_executor import TopSession
from tilewright.runtime.runtime import Executor
from tilewright.sim.cycle import CycleSimulator
from tilewright.sim.functional import FunctionalSimulator
from tilewright.spec.hardware import Hardware, load_target

SMALL = load_target("tiny8").model_copy(update={"name": "tiny8_4k", "sram_size": 4096})
"""A quarter of a page of SRAM: everything is cut into many tiles."""
TARGETS = [SMALL, *(load_target(name) for name in ("tiny8", "edge16", "tpu_v2", "tpu_v2_1m"))]


def check(
    seed: int, target: Hardware, layers: int = 8, activations: Activations = "symmetric"
) -> None:
    model, shape = random_network(seed, layers)
    rng = np.random.default_rng(seed)
    samples = [{"x": rng.standard_normal(shape).astype(np.float32)} for _ in range(3)]
    front = front_end(model, target)

    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString())
    expected: Any = session.run(None, samples[0])[0]
    (got,) = TopSession(front.stage.module, front.stage.weights).run(samples[0]).values()
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)

    compiled = compile_model(
        front, target, samples=samples, quant=QuantOptions(level=0, activations=activations)
    )
    inputs = {"x": rng.standard_normal(shape).astype(np.float32) * 1.5}
    for level in ("linalg", "affine", "tpu"):
        result = compare(compiled, "quant", level, inputs)
        assert result.exact, (level, result.layers[0])
        assert result.layers
    executor = Executor(compiled.program, target)
    outputs = executor.run(inputs)
    for step in compiled.program.tpu_steps:
        code = executor.code(step)
        verify_program(code, target)
        # Any order the semaphores allow gives the same bytes.
        before = executor.ddr.copy()
        FunctionalSimulator(target).run(
            code, before, registers=executor.registers, order="random", seed=seed
        )
        again = executor.ddr.copy()
        FunctionalSimulator(target).run(code, again, registers=executor.registers)
        np.testing.assert_array_equal(before, again)
        assert CycleSimulator(target).run(code, registers=executor.registers).cycles > 0
    assert outputs.keys() == {port.name for port in compiled.program.outputs}


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("seed", range(4))
def test_every_level_gives_the_same_integers(seed: int, target: Hardware) -> None:
    check(seed, target)


@pytest.mark.parametrize("target", TARGETS[1:4], ids=lambda target: target.name)
@pytest.mark.parametrize("seed", range(20, 23))
def test_zero_points_that_are_not_zero(seed: int, target: Hardware) -> None:
    check(seed, target, activations="asymmetric")


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("seed", range(100, 140))
def test_many_more_networks(seed: int, target: Hardware, activations: Activations) -> None:
    check(seed, target, 12, activations)


def test_the_generator_is_seeded() -> None:
    one, two = random_network(7)[0], random_network(7)[0]
    assert one.SerializeToString(deterministic=True) == two.SerializeToString(deterministic=True)
    onnx.checker.check_model(one, full_check=True)
