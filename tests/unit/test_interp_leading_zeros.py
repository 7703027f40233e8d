"""`math.ctlz` on whole arrays, at every width."""

from __future__ import annotations

import numpy as np
import pytest
from xdsl.dialects import arith, math
from xdsl.dialects.builtin import IntegerAttr, IntegerType

from tilewright.interp.scalars import evaluator


@pytest.mark.parametrize("width", [8, 16, 32, 64])
def test_leading_zeros(width: int) -> None:
    kind = IntegerType(width)
    function = evaluator(math.CountLeadingZerosOp(arith.ConstantOp(IntegerAttr(1, kind)).result))
    assert function is not None
    values = [0, 1, 2, 3, *(1 << bit for bit in range(width - 1)), (1 << (width - 1)) - 1, -1]
    got = function(np.array(values, f"int{width}"))
    assert got.tolist() == [width - (item % (1 << width)).bit_length() for item in values]
