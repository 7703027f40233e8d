"""Truncating targets round half up for every zero point and every code."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tilewright.quant.kernels import finish, requant
from tilewright.quant.parameters import lift, pool_parameters, scalar_parameters


@given(st.integers(-128, 127), st.floats(1e-4, 0.9), st.integers(-(2**20), 2**20))
def test_a_rescaled_value_rounds_half_up(zero: int, ratio: float, value: int) -> None:
    p = scalar_parameters((ratio,), zero, "truncate")
    exact = value * p.multipliers[0]
    wanted = ((exact + (1 << (p.shift - 1))) >> p.shift) + zero
    wide = np.int64(exact + (p.bias << p.bias_shift))
    got = finish(np.array([wide]), p.shift, p.zp, -128, 127, "truncate")
    assert got[0] == min(max(wanted, -128), 127)


@given(st.integers(-128, 127), st.floats(1e-3, 0.9), st.integers(-(2**16), 2**16))
def test_a_sum_rounds_half_up_but_for_the_unit_of_its_bias(
    zero: int, ratio: float, total: int
) -> None:
    p = pool_parameters("pool", ratio, 512, 0, zero, "truncate")
    got = requant(np.array([total], np.int32), p.bias, p.mult, p.shift, p.zp, -128, 127, "truncate")
    # The term is a whole number of sums: ties may fall to the neighbour.
    wanted = {
        int(min(max(np.floor(total * ratio + 0.5 + nudge) + zero, -128), 127))
        for nudge in (-0.51 * ratio, 0.0, 0.51 * ratio)
    }
    assert int(got[0]) in wanted


def test_what_is_added_covers_the_least_code() -> None:
    assert lift(0) == 128
    assert lift(-128) == 128
    assert lift(127) == 255
    # The instruction's fields hold both ends.
    assert scalar_parameters((0.5,), 127, "truncate").bias == 511
    assert scalar_parameters((0.5,), 127, "truncate").zp == -128
    assert scalar_parameters((0.5,), -128, "truncate").zp == -256
