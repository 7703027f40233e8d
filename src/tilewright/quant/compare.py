"""How far the quantised model is from the float one: outputs and every layer, worst first.

Four errors of a layer are told apart, each against float values `f` of all layers on a sample:

| error | the value | what it holds |
|---|---|---|
| accumulated | as it arrives in the integer graph | everything before the layer, and the layer |
| isolated | the integer layer, of `f` of its operands, quantised | operands' codes, and the layer |
| own | the same, against the float layer of the same dequantised operands | the layer alone |
| codes | `f` of the layer, quantised | the scale and range of its result alone |

Own errors blame no layer for its operands. `Layer.to_output` is the error that an own error makes
at the network's outputs when it is the only one. All integers come from the exact reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp
    from xdsl.ir import Operation, SSAValue

    from tilewright.ir.weights import WeightStore
    from tilewright.quant.probe import FloatProbe

Array = npt.NDArray[Any]

INJECTED_SAMPLES = 2
"""Samples on which every layer's share of the output's error is measured, a float run each."""

SAME_CAUSE_DB = 3.0
"""A part of an error that has half its energy explains it."""

Cause = Literal["range", "operand", "weights", "none"]


def sqnr(reference: Array, value: Array) -> float:
    """Return the signal to quantisation noise ratio in dB (infinite when equal).

    A reference of all zeros with any noise gives minus infinity.
    """
    a, b = reference.astype(np.float64), value.astype(np.float64)
    return decibel(float((a**2).sum()), float(((a - b) ** 2).sum()))


def decibel(signal: float, noise: float) -> float:
    """Return `10 log10(signal / noise)`: infinite without noise, else -infinite without signal."""
    if noise == 0:
        return math.inf
    if signal == 0:
        return -math.inf
    return 10.0 * math.log10(signal / noise)


def cosine(reference: Array, value: Array) -> float:
    """Return the cosine of the angle between two arrays (1 when both are zero)."""
    a, b = reference.astype(np.float64).ravel(), value.astype(np.float64).ravel()
    norm = math.sqrt(float(a @ a) * float(b @ b))
    if norm == 0:
        return 1.0 if not a.any() and not b.any() else 0.0
    return float(a @ b) / norm


def top1_agreement(references: Iterable[Array], values: Iterable[Array]) -> float:
    """Return the share of outputs (class scores on the last axis) whose best class is the same."""
    same = total = 0
    for a, b in zip(references, values, strict=True):
        equal = a.reshape(-1, a.shape[-1]).argmax(-1) == b.reshape(-1, b.shape[-1]).argmax(-1)
        same, total = same + int(equal.sum()), total + equal.size
    return same / total if total else 1.0


def holds_scores(shape: tuple[int, ...]) -> bool:
    """Return whether an output of `shape` can be one picture's class scores: one axis of 2 up."""
    return bool(shape) and max(shape) >= 2 and math.prod(shape) == max(shape)


def _square(values: Array) -> float:
    """Return the sum of squares; float32 sums of blocks, float64 where those overflow."""
    flat = values.ravel()
    with np.errstate(over="ignore"):
        total = float(np.dot(flat, flat))
    return total if math.isfinite(total) else float((flat.astype(np.float64) ** 2).sum())


@dataclass
class LayerError:
    """Error of one value, summed over samples."""

    name: str
    signal: float = 0.0
    noise: float = 0.0
    dot: float = 0.0
    energy: float = 0.0
    """Sum of squares of the quantised value."""
    largest: float = 0.0
    """Largest absolute difference."""

    def update(self, reference: Array, value: Array) -> None:
        """Take in one sample (of floats, or of numbers and flags that are taken as such)."""
        a, b = (np.asarray(item, np.float32).ravel() for item in (reference, value))
        apart = a - b
        self.signal += _square(a)
        self.noise += _square(apart)
        self.energy += _square(b)
        # From |a - b|^2 = |a|^2 + |b|^2 - 2 a b, whose left side is known best.
        self.dot = (self.signal + self.energy - self.noise) / 2
        if apart.size:
            self.largest = max(self.largest, float(apart.max()), -float(apart.min()))

    @property
    def sqnr(self) -> float:
        """Signal to noise, dB."""
        return decibel(self.signal, self.noise)

    @property
    def cosine(self) -> float:
        """Cosine of the angle between float and quantised values, -1..1."""
        norm = math.sqrt(self.signal * self.energy)
        return max(-1.0, min(1.0, self.dot / norm)) if norm else float(self.noise == 0)


@dataclass
class Layer:
    """One layer (or input of the network) that both levels have a value of."""

    name: str
    kind: str
    """What it does: `conv`, `add`...; `input`."""
    accumulated: LayerError
    isolated: LayerError
    own: LayerError
    codes: LayerError
    scale: float | None = None
    """One code step; None for a float or fp16 value."""
    zero: int = 0
    low: float | None = None
    """Least value that codes represent."""
    high: float | None = None
    elements: int = 0
    clipped: int = 0
    """Float values out of the codes' range by more than half a step."""
    seen_low: float = math.inf
    """Least float value seen."""
    seen_high: float = -math.inf
    host: str | None = None
    """Why the layer stays float on the host, or None."""
    operands: tuple[str, ...] = ()
    """Values it reads, constants left out."""
    to_output: float | None = None
    """Share (0..1) of the sum of all layers' effects on the outputs' error; None: not measured."""

    @property
    def sqnr(self) -> float:
        """Signal to noise as it arrives, dB."""
        return self.accumulated.sqnr

    @property
    def steps(self) -> float | None:
        """Largest difference as it arrives, in steps of the codes."""
        return None if self.scale is None else self.accumulated.largest / self.scale

    @property
    def clipped_share(self) -> float:
        """Share of elements that the codes' range cuts off, 0..1."""
        return self.clipped / self.elements if self.elements else 0.0


@dataclass
class Comparison:
    """Float against quantised over some samples."""

    layers: list[Layer] = field(default_factory=list[Layer])
    """Every layer present in both, in execution order; inputs first."""
    outputs: list[LayerError] = field(default_factory=list[LayerError])
    agreement: dict[str, float] = field(default_factory=dict[str, float])
    """Top-1 agreement of each output that can be class scores."""
    samples: int = 0
    injected: int = 0
    """Samples that `Layer.to_output` was measured on."""

    def worst(self, count: int | None = None) -> list[Layer]:
        """Return layers by rising isolated SQNR; by what arrives where that is equal."""
        return sorted(self.layers, key=lambda layer: (layer.isolated.sqnr, layer.sqnr))[:count]

    def blamed(self, count: int | None = None) -> list[Layer]:
        """Return layers by falling share of the outputs' error, else by rising own SQNR."""
        return sorted(
            (layer for layer in self.layers if layer.own.noise > 0),
            key=lambda layer: (-(layer.to_output or 0.0), layer.own.sqnr),
        )[:count]

    def cause(self, layer: Layer) -> tuple[Cause, str]:
        """Return what makes most of a layer's isolated error, and the value that has it.

        `range`: the codes of its result (clipping or steps too coarse). `operand`: those of the
        value named. `weights`: what is left, rounding of weights and biases.
        """
        if layer.isolated.noise == 0:
            return "none", layer.name
        limit = layer.isolated.noise / 10 ** (SAME_CAUSE_DB / 10)
        if layer.codes.noise >= limit:
            return "range", layer.name
        if layer.own.noise >= limit:
            return "weights", layer.name
        known = {item.name: item for item in self.layers}
        read = [known[name] for name in layer.operands if name in known]
        if not read:
            return "weights", layer.name
        worst = min(read, key=lambda item: item.codes.sqnr)
        return "operand", worst.name


class Watcher(Protocol):
    """What looks at every layer's values as they are compared."""

    def __call__(self, layer: Layer, real: Array, coded: Array) -> None:
        """Take in one sample of one layer: float values, and what arrives, as floats."""
        ...


@dataclass(frozen=True)
class _Value:
    """Where the value of a float layer is found at the quant level."""

    name: str
    """In the quant level's `run_layers`."""
    step: float | None
    zero: int
    half: bool

    def encode(self, real: Array) -> Array:
        """Return float values as the quant level holds them."""
        from tilewright.quant.kernels import quantize

        if self.step is not None:
            return quantize(real, self.step, self.zero)
        if self.half:
            with np.errstate(over="ignore"):
                return real.astype(np.float16)
        return real

    def decode(self, held: Array, like: Array) -> Array:
        """Return what the quant level holds as float values, in the shape of `like`."""
        from tilewright.quant.kernels import dequantize

        if self.step is not None:
            held = dequantize(held, self.step, self.zero)
        elif held.dtype == np.float16:
            held = held.astype(np.float32)
        return held.reshape(like.shape)


def saturating(module: ModuleOp) -> ModuleOp:
    """Return the float module that a model with scales of its own means.

    Such a model may have left out an activation, because its codes end where that would cut: a
    ReLU in front of codes with zero point -128. Results with a given scale are clamped to what
    their codes represent. Without given scales this is `module` itself.
    """
    from xdsl.dialects.builtin import FloatAttr, f32

    from tilewright.dialects.top.base import Attrs
    from tilewright.quant.graph import main_function

    if not any("quant_scale" in op.attributes for op in main_function(module).body.block.ops):
        return module
    copy = module.clone()
    for op in main_function(copy).body.block.ops:
        attrs = Attrs(op.attributes)
        scale = attrs.number("quant_scale")
        if scale is None or "clamp_min" in op.attributes or "clamp_max" in op.attributes:
            continue
        zero = attrs.integer("quant_zero", 0)
        op.attributes["clamp_min"] = FloatAttr((-128 - zero) * scale, f32)
        op.attributes["clamp_max"] = FloatAttr((127 - zero) * scale, f32)
    return copy


class QuantComparer:
    """A float and a quantised module made ready once to be compared on many samples."""

    def __init__(
        self,
        module: ModuleOp,
        weights: WeightStore,
        quantised_module: ModuleOp,
        quantised_weights: WeightStore,
    ) -> None:
        """Prepare both; arguments as `compare`."""
        from tilewright.quant.probe import FloatProbe
        from tilewright.quant.reference import QuantSession
        from tilewright.runtime.float_executor import TopSession

        module = saturating(module)
        self.reference = TopSession(module, weights)
        self.session = QuantSession(quantised_module, quantised_weights)
        self.probe: FloatProbe = FloatProbe(module, weights)
        self.layers: dict[str, Layer] = {}
        self.values = self._values(quantised_module, module)
        self._named = self._same_names(quantised_module)

    def _values(self, quantised_module: ModuleOp, module: ModuleOp) -> dict[str, _Value]:
        """Return where each float value is at the quant level, and list the layers."""
        from tilewright.dialects.quant import uniform_of
        from tilewright.quant.graph import argument_names, layer_of, main_function

        found: dict[str, _Value] = {}
        hosts: dict[str, str] = {}
        named: dict[SSAValue, str] = {}
        main = main_function(quantised_module)
        named.update(zip(main.body.block.args, argument_names(main), strict=True))
        for op in main.body.block.ops:
            for index, result in enumerate(op.results):
                name = layer_of(op) if not index else f"{layer_of(op)}:{index}"
                named[result] = name
                if op.name in ("top.weight", "top.none"):
                    continue
                kind = uniform_of(result)
                element = str(getattr(result.type, "element_type", ""))
                held = _Value(
                    name,
                    None if kind is None else float(kind.step),
                    0 if kind is None else int(kind.zero),
                    element == "f16",
                )
                target = name
                if op.name == "quant.quantize" or (op.name == "top.cast" and held.half):
                    # The codes of a float value stand for it: of an input, or a host's result.
                    target = named[op.operands[0]]
                elif name.endswith("/scale"):
                    # A layer whose 32-bit sums are kept; the host makes floats of them beside it.
                    target = name.removesuffix("/scale")
                found[target] = held
                if "host" in op.attributes:
                    hosts[name] = getattr(op.attributes["host"], "data", "")
        self._list(module, found, hosts)
        return {name: held for name, held in found.items() if name in self.layers}

    def _list(
        self, module: ModuleOp, found: Mapping[str, _Value], hosts: Mapping[str, str]
    ) -> None:
        from tilewright.quant.graph import argument_names, layer_of, main_function

        main = main_function(module)
        named: dict[SSAValue, str] = dict(
            zip(main.body.block.args, argument_names(main), strict=True)
        )

        def listed(name: str, op: Operation | None) -> None:
            held = found.get(name)
            if held is None:
                return
            layer = Layer(
                name,
                "input" if op is None else op.name.removeprefix("top."),
                LayerError(name),
                LayerError(name),
                LayerError(name),
                LayerError(name),
                host=hosts.get(name),
                operands=tuple(named[v] for v in op.operands if v in named) if op else (),
            )
            if held.step is not None:
                least = -127 if held.zero == 0 else -128
                layer.scale, layer.zero = held.step, held.zero
                layer.low = (least - held.zero) * held.step
                layer.high = (127 - held.zero) * held.step
            self.layers[name] = layer

        for name in list(named.values()):
            listed(name, None)
        for op in main.body.block.ops:
            if op.name in ("top.weight", "top.none"):
                continue
            for index, result in enumerate(op.results):
                name = layer_of(op) if not index else f"{layer_of(op)}:{index}"
                named[result] = name
                listed(name, op)

    def _same_names(self, quantised_module: ModuleOp) -> set[str]:
        """Return the values of the quant level that are called like a float value."""
        from tilewright.quant.graph import layer_of, main_function

        found: set[str] = set()
        for op in main_function(quantised_module).body.block.ops:
            if op.name not in ("top.weight", "top.none"):
                name = layer_of(op)
                found.update(name if not i else f"{name}:{i}" for i in range(len(op.results)))
        return found & set(self.reference.values)

    def take(
        self, sample: Mapping[str, Array], isolated: bool, watch: Watcher | None = None
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Compare one sample; return the outputs of the float and of the quantised module."""
        real = self.reference.run_values(sample)
        outputs, arrived = self.session.run_layers(sample)
        for name, held in self.values.items():
            layer, wanted = self.layers[name], real[name]
            if held.name not in arrived or arrived[held.name].size != wanted.size:
                continue
            coded = held.decode(arrived[held.name], wanted)
            layer.accumulated.update(wanted, coded)
            _observe(layer, wanted)
            if watch is not None and wanted.dtype.kind == "f":
                watch(layer, wanted, coded)
        if isolated:
            for name, (alone, twin) in self.isolated(sample, real).items():
                layer, wanted = self.layers[name], real[name]
                layer.isolated.update(wanted, alone)
                if twin is not None:
                    layer.own.update(twin, alone)
                held = self.values[name]
                layer.codes.update(wanted, held.decode(held.encode(wanted), wanted))
        return self.reference.run(sample), outputs

    def isolated(
        self, sample: Mapping[str, Array], real: Mapping[str, Array]
    ) -> dict[str, tuple[Array, Array | None]]:
        """Return by layer: its value alone, and the float layer's twin of that.

        The twin is the float layer of the same dequantised operands; None for inputs' codes, whose
        error is that of their float value.
        """
        replace: dict[str, Array] = {name: real[name] for name in self._named}
        for name, held in self.values.items():
            if held.name in replace or held.name.endswith("/scale"):
                replace[held.name] = held.encode(real[name])
        _, alone = self.session.run_layers(sample, replace=self._fitting(replace))
        read = dict(real)
        found: dict[str, tuple[Array, Array | None]] = {}
        decoded: dict[str, Array] = {}
        for name, held in self.values.items():
            if held.name not in alone or alone[held.name].size != real[name].size:
                continue
            decoded[name] = held.decode(alone[held.name], real[name])
            given = held.encode(real[name])
            read[name] = held.decode(given, real[name]).astype(real[name].dtype, copy=False)
        twins = self.probe.each(read)
        for name, value in decoded.items():
            twin = twins.get(name, real[name] if self.layers[name].kind == "input" else None)
            found[name] = (value, twin)
        return found

    def _fitting(self, replace: Mapping[str, Array]) -> dict[str, Array]:
        """Leave out 32-bit sums: no float value is theirs."""
        sums = {
            held.name.removesuffix("/scale")
            for held in self.values.values()
            if held.name.endswith("/scale")
        }
        return {name: value for name, value in replace.items() if name not in sums}

    def inject(self, sample: Mapping[str, Array]) -> dict[str, float]:
        """Return the noise that each layer's own error alone makes at the outputs, by layer.

        Noise of an output is taken relative to its energy, and summed over outputs.
        """
        real = self.reference.run_values(sample)
        plain = self.probe.shifted(sample, None)
        energy = {name: _square(np.asarray(value, np.float32)) for name, value in plain.items()}
        found: dict[str, float] = {}
        for name, (alone, twin) in self.isolated(sample, real).items():
            if twin is None or name not in self.probe.shiftable:
                continue
            error = alone.astype(np.float32) - twin
            if not error.any():
                continue
            moved = self.probe.shifted(sample, name, error)
            found[name] = sum(
                _square((moved[key] - plain[key]).astype(np.float32)) / (energy[key] or 1.0)
                for key in plain
                if plain[key].dtype.kind == "f"
            )
        return found


def _observe(layer: Layer, real: Array) -> None:
    layer.elements += real.size
    if not real.size or real.dtype.kind != "f":
        return
    layer.seen_low = min(layer.seen_low, float(real.min()))
    layer.seen_high = max(layer.seen_high, float(real.max()))
    if layer.scale is None or layer.low is None or layer.high is None:
        return
    slack = layer.scale / 2
    if layer.seen_low < layer.low - slack or layer.seen_high > layer.high + slack:
        out = (real < layer.low - slack) | (real > layer.high + slack)
        layer.clipped += int(np.count_nonzero(out))


def compare(
    module: ModuleOp,
    weights: WeightStore,
    quantised_module: ModuleOp,
    quantised_weights: WeightStore,
    samples: Iterable[Mapping[str, Array]],
    *,
    isolated: bool = True,
    injected: int = INJECTED_SAMPLES,
    watch: Watcher | None = None,
    progress: Callable[[int], None] | None = None,
) -> Comparison:
    """Run both modules on `samples` and compare every layer that keeps its name.

    Args:
        module: the float `top` module that was quantised.
        weights: its constants (from before quantisation).
        quantised_module: the module of the quant level, int8 or fp16.
        quantised_weights: its constants.
        samples: inputs by name.
        isolated: also the errors of every layer by itself; else only what arrives.
        injected: on so many samples each layer's effect on the outputs is measured (needs
            `isolated`), at a run of the float model for every layer.
        watch: called with every layer's values.
        progress: called with the number of samples done.

    Raises:
        TilewrightError: E0402, something has no float meaning; as the executors.
    """
    comparer = QuantComparer(module, weights, quantised_module, quantised_weights)
    names = comparer.session.outputs
    outputs = {name: LayerError(name) for name in names}
    scores: dict[str, list[tuple[Array, Array]]] = {name: [] for name in names}
    effects: dict[str, float] = {}
    kept: list[Mapping[str, Array]] = []
    count = 0
    for sample in samples:
        if isolated and len(kept) < injected:
            kept.append(sample)
        wanted, got = comparer.take(sample, isolated, watch)
        for name, error in outputs.items():
            error.update(wanted[name], got[name])
            if holds_scores(wanted[name].shape):
                scores[name].append((wanted[name].reshape(-1), got[name].reshape(-1)))
        count += 1
        if progress is not None:
            progress(count)
    for sample in islice(kept, injected):
        for name, effect in comparer.inject(sample).items():
            effects[name] = effects.get(name, 0.0) + effect
    total = sum(effects.values())
    for name, layer in comparer.layers.items():
        if kept:
            layer.to_output = effects.get(name, 0.0) / total if total else 0.0
    agreement = {
        name: top1_agreement((a for a, _ in pairs), (b for _, b in pairs))
        for name, pairs in scores.items()
        if pairs
    }
    layers = [layer for layer in comparer.layers.values() if layer.elements]
    return Comparison(layers, list(outputs.values()), agreement, count, len(kept))
