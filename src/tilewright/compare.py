"""Comparing two levels of a compiled model, layer by layer.

Integer levels (quant, linalg, affine, tpu) must agree in every code; those of fp16 within a
relative `HALF_TOLERANCE` of the layer's largest magnitude, each layer of the quant level computed
from the other's operands (else differences of rounding would add up). The float level is compared
with a lower one by signal to noise: the float value against the dequantised codes, or the fp16
value.

The quant and tpu levels run the whole model. The linalg and affine levels run segment by segment,
each fed with the quant level's codes, so a fault shows in the segment that has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import TilewrightError, UsageError

if TYPE_CHECKING:
    from tilewright.compiler import Compiled

Array = npt.NDArray[Any]
HALF_TOLERANCE = 2.0**-9
"""How far two fp16 levels may be apart, relative to the layer's largest magnitude."""
LEVELS = ("float", "quant", "linalg", "affine", "tpu")


@dataclass(frozen=True)
class LayerDifference:
    """How far two levels are apart at one layer."""

    layer: str
    elements: int
    differing: int
    """Elements that are not equal."""
    largest: float
    """Largest absolute difference: codes, or real values when one level is float."""
    sqnr_db: float | None
    """Signal to noise of the second level against the float one; None between integer levels."""
    cosine: float | None
    relative: float | None = None
    """Of fp16 levels: largest difference over largest magnitude."""

    @property
    def agrees(self) -> bool:
        """Whether two levels below float are as close as their number type asks for."""
        if self.relative is not None:
            return self.relative <= HALF_TOLERANCE
        return not self.differing


@dataclass(frozen=True)
class Comparison:
    """Two levels compared."""

    first: str
    second: str
    layers: list[LayerDifference]
    """Worst first."""
    only_first: list[str]
    """Layers the second level has no value of (folded, or kept on the chip)."""
    in_sram: list[str] = field(default_factory=list[str])
    """Of these, the results that a level of buffers keeps in SRAM from their writer to their last
    reader: a compile without fusion has them in DDR, where they are compared."""

    @property
    def exact(self) -> bool:
        """Whether all values that both levels have are equal."""
        return all(not layer.differing for layer in self.layers)

    @property
    def agrees(self) -> bool:
        """Whether all values that both levels have are close enough: equal, for integers."""
        return all(layer.agrees for layer in self.layers)


def level_values(
    compiled: Compiled,
    level: str,
    inputs: Mapping[str, Array],
    replace: Mapping[str, Array] | None = None,
    fed: dict[str, Array] | None = None,
) -> dict[str, Array]:
    """Return every layer's value at a level: float32, or codes in the layout they are stored in.

    With `replace`, another level's values, the quant level computes each layer from those. `fed` is
    filled with what the segments of the linalg and affine levels were given.

    Raises:
        UsageError: unknown level.
        TilewrightError: as the level's executor.
    """
    from tilewright.quant.reference import QuantSession
    from tilewright.runtime.float_executor import TopSession
    from tilewright.runtime.runtime import Executor

    if level not in LEVELS:
        raise UsageError("E0702", f"there is no level `{level}`", hint=f"{', '.join(LEVELS)}")
    if level == "float":
        top = compiled.stages["top"]
        return TopSession(top.module, top.weights).run_values(inputs)
    if level == "tpu":
        executor = Executor(compiled.program, compiled.target)
        outputs, tensors = executor.run_tensors(inputs, writers(compiled))
        return {**tensors, **{f"output {name}": array for name, array in outputs.items()}}
    quant = compiled.stages["quant"]
    session = QuantSession(quant.module, quant.weights)
    outputs, layers = session.run_layers(inputs, replace if level == "quant" else None)
    if level == "quant":
        return {**layers, **{f"output {name}": array for name, array in outputs.items()}}
    return _segments(compiled, level, layers, {} if fed is None else fed)


def _segments(
    compiled: Compiled, level: str, codes: dict[str, Array], all_fed: dict[str, Array]
) -> dict[str, Array]:
    """Run each function of the linalg or affine level on the codes of the quant level."""
    from xdsl.dialects.func import FuncOp

    from tilewright.interp.machine import strings
    from tilewright.interp.run import run_affine, run_linalg

    stage = compiled.stages[level]
    run = run_linalg if level == "linalg" else run_affine
    values: dict[str, Array] = {}
    for op in stage.module.ops:
        if not isinstance(op, FuncOp) or not op.sym_name.data.startswith("tpu_"):
            continue
        results = set(strings(op.attributes.get("result_names")))
        # Where levels may differ, a value has one meaning: that of the first segment that has it.
        known = {**codes, **values} if compiled.dtype == "fp16" else codes
        fed = {
            name: known[name].reshape(codes[name].shape)
            for name in strings(op.attributes.get("arg_names"))
            if name in codes and name not in results
        }
        all_fed.update(fed)
        values.update(run(stage.module, stage.weights, fed, keep=True, function=op.sym_name.data))
    return values


def writers(compiled: Compiled) -> dict[str, set[str]]:
    """Return the DDR tensors that the instructions of each layer write.

    Read off the affine level: the copies into a DDR buffer carry the layer that instructions do.
    """
    from xdsl.dialects.builtin import StringAttr
    from xdsl.dialects.func import FuncOp
    from xdsl.ir import Block, Operation

    from tilewright.interp.machine import strings

    found: dict[str, set[str]] = {}
    for function in compiled.stages["affine"].module.ops:
        if not isinstance(function, FuncOp) or not function.body.blocks:
            continue
        arguments = strings(function.attributes.get("arg_names"))
        for op in function.walk():
            layer = op.attributes.get("layer")
            if op.name != "memref.copy" or not isinstance(layer, StringAttr):
                continue
            target = op.operands[1]
            while isinstance(target.owner, Operation) and target.owner.operands:
                target = target.owner.operands[0]
            if isinstance(target.owner, Block):
                inner = target.owner is not function.body.block
                name = None if inner else arguments[target.index]  # pyright: ignore
            else:
                value = target.owner.attributes.get("value")
                name = value.data if isinstance(value, StringAttr) else None
            if name is not None:
                found.setdefault(layer.data, set()).add(name)
    return found


def scales(compiled: Compiled) -> dict[str, tuple[float, int]]:
    """Return scale and zero point of every layer with int8 codes."""
    from tilewright.dialects.quant import quantised, uniform_of
    from tilewright.quant.graph import layer_of, main_function

    found: dict[str, tuple[float, int]] = {}
    for op in main_function(compiled.stages["quant"].module).body.block.ops:
        for index, value in enumerate(op.results):
            if op.name != "top.weight" and uniform_of(value) is not None:
                kind = quantised(value)
                name = layer_of(op) if not index else f"{layer_of(op)}:{index}"
                found[name] = (float(kind.step), int(kind.zero))
    return found


def compare(compiled: Compiled, first: str, second: str, inputs: Mapping[str, Array]) -> Comparison:
    """Run two levels on the same inputs and compare every layer both have a value of.

    Raises:
        UsageError: unknown level.
        TilewrightError: E0502 when the levels have no layer in common.
    """
    fed: dict[str, Array] = {}
    right = level_values(compiled, second, inputs, fed=fed)
    replace = {**fed, **right} if compiled.dtype == "fp16" else None
    left = level_values(compiled, first, inputs, replace)
    known = scales(compiled)
    layers: list[LayerDifference] = []
    for name, array in left.items():
        if name not in right:
            continue
        other = right[name].reshape(array.shape)
        kinds = {array.dtype.kind, other.dtype.kind}
        if kinds == {"i", "f"}:
            if name in known:
                pair = [_dequantise(item, known[name]) for item in (array, other)]
            else:
                # A layer that keeps its 32-bit sums; the host makes floats of them beside it.
                pair = [side.get(f"{name}/scale", side[name]) for side in (left, right)]
                if any(item.dtype.kind != "f" for item in pair):
                    continue
            layers.append(_real(name, *pair))
        elif "float" in (first, second):
            layers.append(_real(name, array, other))
        else:
            layers.append(_apart(name, array, other, compiled.dtype == "fp16"))
    if not layers:
        raise TilewrightError("E0502", f"levels `{first}` and `{second}` share no layer")
    layers.sort(
        key=lambda item: (
            item.sqnr_db if item.sqnr_db is not None else math.inf,
            -(item.relative or 0.0),
            -item.differing / max(1, item.elements),
        )
    )
    missing = [name for name in left if name not in right]
    held = results_in_sram(compiled, missing) if second in ("affine", "tpu") else []
    return Comparison(first, second, layers, missing, held)


def results_in_sram(compiled: Compiled, missing: Iterable[str]) -> list[str]:
    """Return which of the layers that a level of buffers has no value of end a loop nest.

    What stands before the end of a nest is never a tensor of its own, nor is a layer without
    instructions (a reshape).
    """
    working = {
        part
        for step in compiled.program.tpu_steps
        for layer in step.layers
        for part in layer.split("+")
    }
    ends: dict[str, str] = {}
    for row in compiled.program.layer_info:
        nest = str(row.get("nest") or row.get("name"))
        if nest in working:
            ends[nest] = str(row.get("name"))
    results = set(ends.values())
    return [name for name in missing if name in results]


def _dequantise(array: Array, scale: tuple[float, int]) -> Array:
    if array.dtype.kind == "f":
        return array
    return (array.astype(np.int32) - scale[1]).astype(np.float32) * np.float32(scale[0])


def _apart(name: str, a: Array, b: Array, tolerant: bool) -> LayerDifference:
    """Compare two levels below float; `tolerant` measures the difference against the values."""
    wide = np.float64 if a.dtype.kind == "f" else np.int64
    apart = np.abs(a.astype(wide) - b.astype(wide))
    largest, relative = float(apart.max(initial=0)), None
    if tolerant:
        magnitude = float(np.abs(a.astype(wide)).max(initial=0))
        relative = largest / magnitude if magnitude else (0.0 if not largest else math.inf)
        if not math.isfinite(relative):
            relative = math.inf  # a NaN on either side agrees with nothing
    return LayerDifference(
        name, a.size, int(np.count_nonzero(apart)), largest, None, None, relative
    )


def _real(name: str, reference: Array, value: Array) -> LayerDifference:
    """Compare with the first as the reference."""
    a, b = reference.astype(np.float64).ravel(), value.astype(np.float64).ravel()
    noise, signal = float(np.sum((a - b) ** 2)), float(np.sum(a * a))
    norms = math.sqrt(signal) * float(np.linalg.norm(b))
    return LayerDifference(
        name,
        a.size,
        int(np.count_nonzero(a != b)),
        float(np.abs(a - b).max(initial=0)),
        sqnr_db(signal, noise),
        float(a @ b) / norms if norms else (1.0 if not noise else 0.0),
    )


def sqnr_db(signal: float, noise: float) -> float:
    """Return `10 log10(signal / noise)`; infinite without noise, 0 for noise without signal."""
    if not noise:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else 0.0
