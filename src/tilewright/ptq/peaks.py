"""How far the channels of single values reach, for what balances them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewright.quant.graph import layer_of

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp
    from xdsl.ir import Operation

    from tilewright.ir.context import CompileContext

Array = npt.NDArray[Any]


def channel_peaks(
    ctx: CompileContext,
    module: ModuleOp,
    axes: Mapping[Operation, int],
    samples: Iterable[Mapping[str, Array]],
) -> dict[Operation, npt.NDArray[np.float64]]:
    """Return the largest magnitude of every channel of layers' results over the samples.

    Args:
        ctx: holds the weights.
        module: a float `top` module.
        axes: the axis of the channels, by layer; negative ones count from the end.
        samples: inputs by name.
    """
    from tilewright.runtime.float_executor import TopSession

    session = TopSession(module, ctx.weights)
    names = {layer_of(op): op for op in axes}
    found: dict[Operation, npt.NDArray[np.float64]] = {}
    for sample in samples:
        for name, array in session.run(sample, list(names)).items():
            op = names[name]
            axis = axes[op] % array.ndim
            others = tuple(a for a in range(array.ndim) if a != axis)
            largest = np.abs(array).max(axis=others).astype(np.float64)
            seen = found.get(op)
            found[op] = largest if seen is None else np.maximum(seen, largest)
    return found
