"""Which elementwise layers stay in float on the host, because their eight bits cost too much.

Some values have no eight-bit form worth having: the residual sums of an encoder reach hundreds in
one channel and matter to the second decimal in the others. What such a value costs is measured: the
float network is run with the rounding error of its codes added to this value only. If the noise at
the outputs exceeds `LOUD_DB`, and no convolution or product reads the value
(those need codes), the elementwise layers around it get the attribute `keep_float`: they run in
float32 on the host, and the product that makes the value gives its 32-bit sums.

    %s = top.add %a, %b {name = "residual"}   ->   {..., keep_float = "its codes alone ..."}
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import UsageError, suggest
from tilewright.quant.graph import KEEP_FLOAT, layer_of, main_function

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp
    from xdsl.ir import Operation, SSAValue

    from tilewright.dialects.quant import UniformType
    from tilewright.ir.context import CompileContext
    from tilewright.ir.stage import Stage

Array = npt.NDArray[Any]
Sample = Mapping[str, Array]

STAGE = "keep-float"

LOUD_DB = 40.0
"""A value whose codes alone bring the outputs below this signal-to-noise ratio is loud: a hundred
values at it leave 20 dB."""

MATRIX = frozenset({"top.conv", "top.conv_transpose", "top.linear", "top.matmul"})
"""Work of the array: it reads codes, whatever else is decided."""

PRODUCTS = frozenset({"top.linear", "top.matmul"})
"""Of these, what can give 32-bit sums."""

MOVERS = frozenset({"top.reshape", "top.transpose"})


def mark_layers(module: ModuleOp, names: Iterable[str], context: CompileContext) -> None:
    """Keep the layers called `names` in float, because the user says so.

    Raises:
        UsageError: E0702, there is no such layer.
    """
    layers = {
        layer_of(op): op
        for op in main_function(module).body.block.ops
        if op.name not in ("top.weight", "top.none", "func.return")
    }
    for name in names:
        if name not in layers:
            raise UsageError(
                "E0702",
                f"there is no layer `{name}` to keep in float",
                hint=suggest(name, layers),
            )
        _mark(layers[name], "kept in float, as asked for", context)


def keep_loud(
    top: Stage,
    types: Mapping[str, UniformType],
    samples: Sequence[Sample],
    context: CompileContext,
) -> int:
    """Mark the elementwise layers around loud values of `top.module`; return how many.

    Args:
        top: the float graph.
        types: the codes of every value that would have some, by value name.
        samples: inputs to measure on.
        context: notes the decisions.
    """
    candidates = _candidates(top.module, types)
    if not candidates or not samples:
        return 0
    loud = output_noise(top, {name: types[name] for name in candidates}, samples)
    marked: set[str] = set()
    for name, layers in candidates.items():
        if loud[name] >= LOUD_DB:
            continue
        for op in layers:
            if layer_of(op) not in marked:
                marked.add(layer_of(op))
                why = f"the codes of `{name}` alone would leave the outputs {loud[name]:.1f} dB"
                _mark(op, why, context)
    return len(marked)


def _mark(op: Operation, why: str, context: CompileContext) -> None:
    from xdsl.dialects.builtin import StringAttr

    op.attributes[KEEP_FLOAT] = StringAttr(why)
    context.decide(layer_of(op), STAGE, True, why)


def _candidates(module: ModuleOp, types: Mapping[str, UniformType]) -> dict[str, list[Operation]]:
    """Return the values that could be floats, and the layers that would have to be for that."""
    found: dict[str, list[Operation]] = {}
    for op in main_function(module).body.block.ops:
        if op.name in ("top.weight", "top.none", "func.return") or len(op.results) != 1:
            continue
        name, value = layer_of(op), op.results[0]
        if name not in types or op.name in MOVERS:
            continue
        producer: Operation | None = op
        if op.name in MATRIX:
            clamps = {"clamp_min", "clamp_max"} & set(op.attributes)
            if op.name not in PRODUCTS or clamps:
                continue
            producer = None
        readers = _readers(value)
        if not readers or any(reader.name in MATRIX for reader in readers):
            continue
        kept = [reader for reader in readers if reader.name != "func.return"]
        found[name] = [*([producer] if producer is not None else []), *kept]
    return found


def _readers(value: SSAValue) -> list[Operation]:
    """Return what reads a value, seen through reshapes and transpositions."""
    found: list[Operation] = []
    stack = [value]
    while stack:
        for use in stack.pop().uses:
            if use.operation.name in MOVERS:
                stack.append(use.operation.results[0])
            else:
                found.append(use.operation)
    return found


def output_noise(
    top: Stage, types: Mapping[str, UniformType], samples: Sequence[Sample]
) -> dict[str, float]:
    """Return for each value the outputs' signal-to-noise ratio, in dB, if only it had codes."""
    from tilewright.quant.probe import FloatProbe
    from tilewright.quant.scores import Scores
    from tilewright.runtime.float_executor import TopSession

    probe, session = FloatProbe(top.module, top.weights), TopSession(top.module, top.weights)
    # A masked score, perhaps -inf, has no error: the codes' least one takes no part either.
    scores = Scores(top.module)
    beside = {n for s in scores.sums for n in (s.name, *s.operands, *s.others)}
    names = [name for name in types if name in probe.shiftable]
    noise = dict.fromkeys(types, 0.0)
    signal = 0.0
    for sample in samples:
        wanted = dict.fromkeys([*names, *sorted(beside)])
        values = scores.bounded(
            {**sample, **session.run(sample, [n for n in wanted if n not in sample])}
        )
        base = probe.shifted(sample, None)
        signal += sum(float(np.square(array, dtype=np.float64).sum()) for array in base.values())
        for name in names:
            kind, real = types[name], values[name].astype(np.float64)
            codes = np.clip(np.rint(real / kind.step) + kind.zero, -128, 127)
            error = ((codes - kind.zero) * kind.step - real).astype(np.float32)
            after = probe.shifted(sample, name, error)
            noise[name] += sum(
                float(np.square(after[key] - array, dtype=np.float64).sum())
                for key, array in base.items()
            )
    return {
        name: math.inf if power == 0 else 10 * math.log10(max(signal, 1e-300) / power)
        for name, power in noise.items()
    }
