"""Graphs of integer softmaxes and layer normalisations for tests, and inputs that reach corners."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from xdsl.ir import SSAValue

from tests.quant_graphs import Graph, codes
from tilewright.dialects import quant
from tilewright.dialects.quant import quantised, shape_of
from tilewright.quant.rowwise import exponential_table, layer_norm_parameters, softmax_multiplier


def softmax(graph: Graph, name: str, x: SSAValue, scale: float = 1 / 255) -> SSAValue:
    zero = 0 if scale == 1 / 127 else -128
    mult, shift = softmax_multiplier(scale)
    graph.weights.set(f"{name}.table", exponential_table(quantised(x).step))
    return graph.quant(
        quant.SoftmaxOp,
        name,
        [x],
        codes(shape_of(x), scale, zero),
        table=f"{name}.table",
        mult=mult,
        shift=shift,
        zp=zero,
        lo=-127 if zero == 0 else -128,
        hi=127,
    )


def layer_norm(
    graph: Graph,
    name: str,
    x: SSAValue,
    rng: np.random.Generator,
    axis: int | None = None,
    zero: int = 0,
    epsilon: float = 1e-5,
) -> SSAValue:
    shape = shape_of(x)
    axis = len(shape) - 1 if axis is None else axis
    size = int(np.prod(shape[axis:]))
    p = layer_norm_parameters(
        name,
        rng.normal(1, 0.5, size),
        rng.normal(0, 0.5, size),
        epsilon=epsilon,
        input_scale=quantised(x).step,
        output_scale=0.03,
    )
    return graph.quant(
        quant.LayerNormOp,
        name,
        [x, graph.weight(f"{name}.gain", p.gain), graph.weight(f"{name}.offset", p.bias)],
        codes(shape, 0.03, zero),
        axis=axis,
        epsilon=p.epsilon,
        shift=p.shift,
        zp=zero,
        lo=-127 if zero == 0 else -128,
        hi=127,
    )


def row_codes(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Return codes whose rows are constant, nearly so, extreme, narrow or wide, in turn."""
    rows, size = int(np.prod(shape[:-1])), shape[-1]
    made = rng.integers(-128, 128, (rows, size))
    for at, row in enumerate(made):
        match at % 6:
            case 0:
                row[:] = row[0]
            case 1:
                row[:] = min(row[0], 126)
                row[-1] += 1
            case 2:
                row[:] = np.where(row < 0, -128, 127)
            case 3:
                row[:] = np.clip(rng.normal(20, 3, size).round(), -128, 127)
            case _:
                pass
    return made.astype(np.int8).reshape(shape)
