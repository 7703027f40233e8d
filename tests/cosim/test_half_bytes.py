"""Weights of 4 bits on the RTL: same bytes, same cycles as the simulators."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cosim.support import needs_verilator
from tests.cosim.test_steps import assert_equal
from tests.e2e.test_half_bytes import instructions, odd_network
from tests.level_checks import normal_sample
from tests.random_networks import random_network
from tilewright.compiler import compile_model, front_end
from tilewright.ptq.options import QuantOptions
from tilewright.spec.hardware import load_target

TINY = load_target("tiny8").model_copy(
    update={"name": "tiny8_int4", "dtypes": ("int8", "int4"), "rounding": "half_even"}
)


@needs_verilator
def test_a_network_of_odd_channels() -> None:
    """Plain, grouped and depthwise layers, 1 and 17 channels, one layer left at 8 bits."""
    model, shape = odd_network()
    samples = [normal_sample({"x": shape}, np.random.default_rng(1))]
    options = QuantOptions(level=0, weight_bits=4, layer_bits={"wide": 8})
    made = compile_model(front_end(model, TINY), TINY, samples=samples, quant=options)
    assert {(f["dtype"], f["diag"]) for f in instructions(made)} >= {
        (1, 0), (1, 1), (0, 0)
    }  # fmt: skip
    assert_equal(made, shape, 2)


@needs_verilator
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_networks(seed: int) -> None:
    model, shape = random_network(seed)
    samples = [normal_sample({"x": shape}, np.random.default_rng(seed))]
    options = QuantOptions(level=0, weight_bits=4)
    assert_equal(
        compile_model(front_end(model, TINY), TINY, samples=samples, quant=options), shape, seed
    )
