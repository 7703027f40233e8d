"""The step `improve`: weight codes and biases fitted, layer after layer, to the float network.

Layers are visited in order. Two executions go side by side: the float network on float inputs, and
the quantised one, its layers so far improved. At each convolution or linear layer both are sampled
at the same positions; `reconstruct.py` fits the layer's codes to what the float layer gives there.
A change is kept, channel by channel, only if it lowers the error on samples that took no part in
the fit; all of it is taken back if the error of the network's outputs on them has grown.

```python
changes = improve(top_stage, quant_stage, samples, options.resolved())
```

Only arrays of weight codes and of int32 biases in `quant.weights` change: scales, multipliers,
shifts and the module stay as they are. It needs about four samples; sixty-four serve better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewright.ptq.layer_fit import Change, Geometry, Layer, fit_layer, judged
from tilewright.quant.fast import Segment
from tilewright.quant.graph import argument_names, layer_of, main_function

if TYPE_CHECKING:
    from xdsl.ir import Operation, SSAValue

    from tilewright.dialects.quant import ConvOp, LinearOp
    from tilewright.ir.stage import Stage
    from tilewright.ptq.options import QuantOptions

Array = npt.NDArray[Any]
Sample = Mapping[str, Array]

MOST_SAMPLES = 64
"""At most so many samples are used."""

LEAST_SAMPLES = 4
"""With fewer there is nothing to check a fit against."""

MEMORY = 600 << 20
"""Bytes that values of all samples may take at once."""


@dataclass(frozen=True)
class LayerImprovement:
    """What became of one layer."""

    layer: str
    """The user's name."""
    before: float
    """Error of the layer's results (behind its clamp) on samples not fitted to, as a share of
    their variance; errors of layers before it included."""
    after: float
    """The same with the codes and biases that were kept."""
    codes: int
    """Weight codes that changed."""
    channels: int
    """Output channels that changed, of `total`."""
    total: int

    @property
    def gain(self) -> float:
        """How much smaller the error is, dB (0 where nothing changed)."""
        if self.after <= 0 or self.before <= 0:
            return 0.0
        return 10 * math.log10(self.before / self.after)


def improve(
    top: Stage,
    quant: Stage,
    samples: Sequence[Sample],
    options: QuantOptions,
    progress: Callable[[float], None] | None = None,
) -> list[LayerImprovement]:
    """Fit weight codes and biases in `quant.weights` to what the float layers give; in place.

    Nothing is done with `rounding = "nearest"` and `bias` other than `"sequential"`; with nearest
    rounding only biases change.

    Args:
        top: the float level that was quantised.
        quant: the quantised level made from it (int8 activations).
        samples: inputs by name; at most 64 are used, spread over all that are given. With fewer
            than four nothing is changed.
        options: resolved options; `rounding`, `bias`, `level` and `seed` are read.
        progress: called with the share that is done, 0..1.

    Returns:
        What changed, a layer each, in order; layers that cannot be improved are left out.

    Raises:
        TilewrightError: E0402, an operation cannot be run by onnxruntime.
    """
    learned = options.rounding == "learned"
    if not learned and options.bias != "sequential":
        return []
    if len(samples) < LEAST_SAMPLES or not _pairs(top, quant):
        return []
    walk = _Walk(top, quant, samples, options)
    judges = [walk.samples[index] for index in judged(len(walk.samples))]
    before = output_noise(top, quant, judges)
    kept = {name: quant.weights.get(name) for name in quant.weights}
    found: list[LayerImprovement] = []
    for index in range(len(walk.layers)):
        found += walk.visit(index, learned)
        if progress is not None:
            progress((index + 1) / len(walk.layers))
    if output_noise(top, quant, judges) <= before:
        return found
    for name, array in kept.items():
        if quant.weights.get(name) is not array:
            quant.weights.set(name, array)
    return [replace(row, after=row.before, codes=0, channels=0) for row in found]


def output_noise(top: Stage, quant: Stage, samples: Sequence[Sample]) -> float:
    """Return the error at the float outputs relative to their size, dB, averaged over samples.

    The fast executor runs the quantised network. An average of decibels weighs all samples alike.
    """
    from tilewright.quant.fast import FastSession
    from tilewright.runtime.float_executor import TopSession

    exact = TopSession(top.module, top.weights)
    codes = FastSession(quant.module, quant.weights)
    total = 0.0
    for sample in samples:
        wanted, got = exact.run(sample), codes.run(sample)
        share = 1e-12
        for one, other in zip(wanted.values(), got.values(), strict=True):
            if one.dtype != np.float32 or not one.size:
                continue
            signal = float(np.einsum("i,i->", one.ravel(), one.ravel(), dtype=np.float64))
            apart = (one - other).ravel()
            noise = float(np.einsum("i,i->", apart, apart, dtype=np.float64))
            share += noise / max(signal, 1e-30)
        total += 10 * math.log10(share)
    return total / max(1, len(samples))


class _Side:
    """One of the two networks, executed piece by piece for all samples."""

    def __init__(self, stage: Stage, cuts: Sequence[Operation], own: bool) -> None:
        """Cut the module in pieces.

        Args:
            stage: the module and its constants.
            cuts: one operation a layer, in order: a piece ends behind it (`own`, float) or before
                it (quantised: its codes are not known before).
            own: whether a piece contains the operation it ends with.
        """
        self.stage = stage
        self.own = own
        self.cuts = list(cuts)
        main = main_function(stage.module)
        self.arguments = dict(zip(main.body.block.args, argument_names(main), strict=True))
        block = main.body.block
        self.ops = [
            op for op in block.ops if op.name not in ("top.weight", "top.none", "func.return")
        ]
        self.place = {op: index for index, op in enumerate(self.ops)}
        ends = [self.place[op] + own for op in cuts]
        self.pieces = [
            self.ops[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)
        ]
        self.last: dict[SSAValue, int] = {}
        """Value: the last piece that reads it (a layer's input: the piece that ends at it)."""
        for index, piece in enumerate(self.pieces):
            for op in piece:
                for operand in op.operands:
                    self.last[operand] = index
        for index, op in enumerate(cuts):
            self.last[op.operands[0]] = max(index, self.last.get(op.operands[0], 0))
        self.values: list[dict[SSAValue, Array]] = []
        """By sample: values that are still wanted; codes as int16, less their zero point."""
        self.planar: dict[SSAValue, bool] = {}

    def peak(self) -> int:
        """Return how many bytes the values of one sample take at most."""
        made: dict[SSAValue, int] = dict.fromkeys(self.arguments, 0)
        for index, piece in enumerate(self.pieces):
            for op in piece:
                made.update(dict.fromkeys(op.results, index))
        return max(
            (
                sum(
                    _bytes(value)
                    for value, start in made.items()
                    if start <= index <= self.last.get(value, -1)
                )
                for index in range(len(self.pieces))
            ),
            default=0,
        )

    def begin(self, samples: Sequence[Sample]) -> None:
        """Take the samples as values of the arguments."""
        from tilewright.dialects.quant import uniform_of

        for sample in samples:
            held: dict[SSAValue, Array] = {}
            for argument, name in self.arguments.items():
                array = np.asarray(sample[name])
                kind = uniform_of(argument)
                held[argument] = array if kind is None else array.astype(np.int16) - kind.zero
            self.values.append(held)
        self.planar = dict.fromkeys(self.arguments, False)

    def run(self, index: int) -> list[Array]:
        """Run piece `index` for all samples; return the layer's results (float) or its inputs.

        They have the channels first.
        """
        piece, cut = self.pieces[index], self.cuts[index]
        inside: set[SSAValue] = {value for op in piece for value in op.results}
        wanted = cut.results[0] if self.own else cut.operands[0]
        outputs: list[SSAValue] = [
            value for op in piece for value in op.results if self.last.get(value, -1) > index
        ]
        if wanted in inside and wanted not in outputs:
            outputs.append(wanted)
        given: dict[SSAValue, bool] = {}
        for op in piece:
            for operand in op.operands:
                if operand in self.planar and operand not in inside:
                    given[operand] = self.planar[operand]
        unclamped = frozenset({cut}) if self.own else frozenset[Any]()
        segment = Segment(piece, self.stage.weights, given, outputs, unclamped=unclamped)
        self.planar.update(segment.planar)
        results: list[Array] = []
        for held in self.values:
            feed = {value: _to_float(held[value]) for value in given}
            for value, array in segment.run(feed).items():
                held[value] = array if self.own else _to_store(value, array)
            array = held[wanted]
            results.append(_channels_first(cut, array, self.planar[wanted]))
            if self.own:
                held[wanted] = _clamped(cut, array)
            for value in [item for item in held if self.last.get(item, -1) <= index]:
                del held[value]
        return results


class _Walk:
    """The state between layers."""

    def __init__(
        self, top: Stage, quant: Stage, samples: Sequence[Sample], options: QuantOptions
    ) -> None:
        self.quant = quant
        self.top = top
        self.options = options
        self.layers = _pairs(top, quant)
        self.floats = _Side(top, [pair[1] for pair in self.layers], own=True)
        self.codes = _Side(quant, [pair[0] for pair in self.layers], own=False)
        peak = max(1, self.floats.peak() + self.codes.peak())
        count = min(len(samples), MOST_SAMPLES, max(LEAST_SAMPLES, MEMORY // peak))
        picks = np.linspace(0, len(samples) - 1, count).round().astype(int)
        chosen = [samples[index] for index in picks]
        self.samples = chosen
        self.floats.begin(chosen)
        self.codes.begin(chosen)

    def visit(self, index: int, learned: bool) -> list[LayerImprovement]:
        """Improve one layer."""
        op, twin = self.layers[index]
        targets = self.floats.run(index)
        inputs = self.codes.run(index)
        layer = Layer.read(op, twin, self.quant.weights, self.top.weights)
        if layer is None:
            return []
        geometry = Geometry.of(op)
        change = fit_layer(
            layer,
            geometry,
            inputs,
            targets,
            learned=learned,
            thorough=self.options.level >= 3,
            seed=self.options.seed + index,
        )
        if change.channels:
            self.quant.weights.set(layer.weight_name, change.weight)
            self.quant.weights.set(layer.bias_name, change.bias)
        return [_report(layer, change)]


def _report(layer: Layer, change: Change) -> LayerImprovement:
    return LayerImprovement(
        layer.name,
        change.before,
        change.after,
        int((change.weight != layer.weight).sum()),
        change.channels,
        layer.weight.shape[0],
    )


def _pairs(top: Stage, quant: Stage) -> list[tuple[ConvOp | LinearOp, Operation]]:
    """Return the layers with constant weights and their float twins, in an order both have."""
    from xdsl.ir import Operation

    from tilewright.dialects.quant import ConvOp, LinearOp

    twins = {
        layer_of(op): (index, op)
        for index, op in enumerate(main_function(top.module).body.block.ops)
        if op.name in ("top.conv", "top.linear", "top.matmul")
    }
    found: list[tuple[ConvOp | LinearOp, Operation]] = []
    least = -1
    for op in main_function(quant.module).body.block.ops:
        if not isinstance(op, ConvOp | LinearOp) or layer_of(op) not in twins:
            continue
        place, twin = twins[layer_of(op)]
        weight = twin.operands[1].owner
        constant = isinstance(weight, Operation) and weight.name == "top.weight"
        if place > least and constant:
            found.append((op, twin))
            least = place
    return found


def _bytes(value: SSAValue) -> int:
    from tilewright.dialects.quant import shape_of, uniform_of

    return math.prod(shape_of(value)) * (4 if uniform_of(value) is None else 2)


def _to_float(array: Array) -> Array:
    return array.astype(np.float32) if array.dtype == np.int16 else array


def _to_store(value: SSAValue, array: Array) -> Array:
    from tilewright.dialects.quant import uniform_of

    return array if uniform_of(value) is None else array.astype(np.int16)


def _channels_first(op: Operation, array: Array, planar: bool) -> Array:
    """Return a layer's tensor as `[N, C, H, W]` (convolutions) or `[rows, C]`."""
    from tilewright.dialects.top.base import Attrs

    if not op.name.endswith("conv"):
        return array.reshape(-1, array.shape[-1])
    nhwc = Attrs(op.attributes).string("layout", "nchw") == "nhwc"
    return array.transpose(0, 3, 1, 2) if nhwc and not planar else array


def _clamped(op: Operation, array: Array) -> Array:
    from tilewright.dialects.top.base import Attrs

    attrs = Attrs(op.attributes)
    low, high = attrs.number("clamp_min"), attrs.number("clamp_max")
    return array if low is None and high is None else np.clip(array, low, high)
