"""Transformers compiled with the options a user has by default, on chips with row instructions."""

from __future__ import annotations

import numpy as np

from tests.level_checks import normal_sample
from tests.transformer_networks import encoder
from tilewright.compare import compare
from tilewright.compiler import compile_model, front_end
from tilewright.runtime.runtime import Executor
from tilewright.spec.hardware import load_target


def test_an_encoder_with_default_options() -> None:
    target = load_target("tiny8").model_copy(update={"vector_rows": True})
    rng = np.random.default_rng(0)
    samples = [normal_sample({"x": (1, 16, 32)}, rng) for _ in range(3)]
    compiled = compile_model(front_end(encoder(), target), target, samples=samples)
    executor = Executor(compiled.program, target)
    names = {item.name for step in compiled.program.tpu_steps for item in executor.code(step)}
    assert {"vec_softmax", "vec_layer_norm"} <= names
    assert compare(compiled, "quant", "tpu", samples[0]).exact
