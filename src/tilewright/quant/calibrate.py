"""Calibration: run the float graph over sample inputs and choose a range for every value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.quant.observers import METHODS, Observer, choose
from tilewright.quant.table import CalibrationTable

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp

    from tilewright.ir.weights import WeightStore

Array = npt.NDArray[Any]


def calibrate(
    module: ModuleOp,
    weights: WeightStore,
    samples: Iterable[Mapping[str, Array]],
    *,
    method: str = "kl",
    limit: int | None = 200,
    preprocessing: dict[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> CalibrationTable:
    """Observe every float value of `module` and return the table of their ranges.

    The module is run as it is: after fusion, so that a value is seen behind its fused clamp.

    Args:
        module: a float `top` module.
        weights: its constants.
        samples: inputs by name, one mapping a sample (see `tilewright.quant.data`).
        method: "max", "kl", "mse" or "percentile" (see `observers.choose`).
        limit: at most so many samples are used; None uses all.
        preprocessing: recorded in the table.
        progress: called with the number of samples done.

    Raises:
        TilewrightError: E0301, no samples, or a value is not finite; E0702, unknown method.
    """
    from tilewright.runtime.float_executor import TopSession

    if method not in METHODS:
        raise UsageError(
            "E0702",
            f"there is no calibration method `{method}`",
            details=[f"legal are {', '.join(METHODS)}"],
        )
    session = TopSession(module, weights)
    same = _aliases(module)
    observers: dict[str, Observer] = {}
    axes = _weighted_inputs(module)
    sums: dict[str, npt.NDArray[np.float64]] = {}
    done = 0
    for sample in samples:
        if limit is not None and done >= limit:
            break
        for name, array in session.run_values(sample).items():
            if name in axes:
                others = tuple(a for a in range(array.ndim) if a != axes[name] % array.ndim)
                sums[name] = array.mean(axis=others, dtype=np.float64) + sums.get(name, 0.0)
            if name in same or not np.issubdtype(array.dtype, np.floating):
                continue
            if name not in observers:
                observers[name] = Observer(name, histogram=method != "max")
            observers[name].update(array)
        done += 1
        if progress is not None:
            progress(done)
    if not done:
        raise TilewrightError("E0301", "there are no calibration samples")
    table = CalibrationTable({}, method, done, preprocessing)
    table.means = {name: (total / done).astype(np.float32) for name, total in sums.items()}
    for name in session.values:
        if name in observers:
            choice = choose(observers[name], method)
            table.thresholds[name] = choice.threshold
            table.details[name] = {"max": choice.maximum, "chosen": choice.chosen}
    for name, source in same.items():
        if source in table.thresholds:
            table.thresholds[name] = table.thresholds[source]
            table.details[name] = {"chosen": f"as {source}"}
    return table


def _weighted_inputs(module: ModuleOp) -> dict[str, int]:
    """Return the values that layers with constant weights read, and their channel axis."""
    from xdsl.ir import Operation

    from tilewright.dialects.top.base import Attrs
    from tilewright.quant.graph import argument_names, layer_of, main_function

    main = main_function(module)
    names: dict[object, str] = dict(zip(main.body.block.args, argument_names(main), strict=True))
    found: dict[str, int] = {}
    for op in main.body.block.ops:
        for index, result in enumerate(op.results):
            names[result] = layer_of(op) if index == 0 else f"{layer_of(op)}:{index}"
        if op.name not in ("top.conv", "top.linear", "top.matmul"):
            continue
        weight = op.operands[1].owner
        if isinstance(weight, Operation) and weight.name == "top.weight":
            planar = op.name == "top.conv" and (
                Attrs(op.attributes).string("layout", "nchw") == "nchw"
            )
            found[names[op.operands[0]]] = 1 if planar else -1
    return found


def _aliases(module: ModuleOp) -> dict[str, str]:
    """Return values that hold the very elements of another one: reshaped, transposed."""
    from xdsl.ir import Operation

    from tilewright.quant.graph import argument_names, layer_of, main_function

    main = main_function(module)
    arguments = dict(zip(main.body.block.args, argument_names(main), strict=True))
    found: dict[str, str] = {}
    for op in main.body.block.ops:
        if op.name not in ("top.reshape", "top.transpose"):
            continue
        operand = op.operands[0]
        owner = operand.owner
        if isinstance(owner, Operation):
            index = list(owner.results).index(operand)  # pyright: ignore[reportArgumentType]
            source = layer_of(owner) if index == 0 else f"{layer_of(owner)}:{index}"
        else:
            source = arguments[operand]  # pyright: ignore[reportArgumentType]
        found[layer_of(op)] = found.get(source, source)
    return found
