"""How far the quantised model is from the float one: outputs and every layer, worst first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp

    from tilewright.ir.weights import WeightStore

Array = npt.NDArray[Any]


def sqnr(reference: Array, value: Array) -> float:
    """Return the signal to quantisation noise ratio in dB (infinite when equal).

    A reference of all zeros with any noise gives minus infinity.
    """
    a, b = reference.astype(np.float64), value.astype(np.float64)
    return _decibel(float((a**2).sum()), float(((a - b) ** 2).sum()))


def _decibel(signal: float, noise: float) -> float:
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


def max_abs_difference(reference: Array, value: Array) -> float:
    """Return the largest absolute difference (0 for empty arrays)."""
    if reference.size == 0:
        return 0.0
    return float(np.abs(reference.astype(np.float64) - value.astype(np.float64)).max())


def top1_agreement(references: Iterable[Array], values: Iterable[Array]) -> float:
    """Return the share of outputs (class scores on the last axis) whose best class is the same."""
    same = total = 0
    for a, b in zip(references, values, strict=True):
        equal = a.reshape(-1, a.shape[-1]).argmax(-1) == b.reshape(-1, b.shape[-1]).argmax(-1)
        same, total = same + int(equal.sum()), total + equal.size
    return same / total if total else 1.0


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
    scale: float | None = None
    """Scale of the codes; None for a float layer."""

    def update(self, reference: Array, value: Array) -> None:
        """Take in one sample."""
        a, b = reference.astype(np.float64).ravel(), value.astype(np.float64).ravel()
        self.signal += float(a @ a)
        self.noise += float(((a - b) ** 2).sum())
        self.dot += float(a @ b)
        self.energy += float(b @ b)
        self.largest = max(self.largest, max_abs_difference(reference, value))

    @property
    def sqnr(self) -> float:
        """Signal to noise, dB."""
        return _decibel(self.signal, self.noise)

    @property
    def cosine(self) -> float:
        """Cosine of the angle between float and quantised values."""
        norm = math.sqrt(self.signal * self.energy)
        return self.dot / norm if norm else float(self.noise == 0)


@dataclass
class Comparison:
    """Float against quantised over some samples."""

    layers: list[LayerError] = field(default_factory=list[LayerError])
    """Every layer present in both, in execution order; errors of earlier layers are included."""
    outputs: list[LayerError] = field(default_factory=list[LayerError])
    agreement: dict[str, float] = field(default_factory=dict[str, float])
    """Top-1 agreement of each output."""
    samples: int = 0

    def worst(self, count: int | None = None) -> list[LayerError]:
        """Return layers by rising SQNR."""
        return sorted(self.layers, key=lambda layer: layer.sqnr)[:count]


def compare(
    module: ModuleOp,
    weights: WeightStore,
    quantised_module: ModuleOp,
    quantised_weights: WeightStore,
    samples: Iterable[Mapping[str, Array]],
) -> Comparison:
    """Run both modules on `samples` and compare every layer that keeps its name and shape.

    Args:
        module: the float `top` module that was quantised.
        weights: its constants (from before quantisation).
        quantised_module: the integer module.
        quantised_weights: its constants.
        samples: inputs by name.
    """
    from tilewright.dialects.quant import uniform_of
    from tilewright.quant.graph import layer_of, main_function
    from tilewright.quant.kernels import dequantize
    from tilewright.quant.reference import QuantSession
    from tilewright.runtime.float_executor import TopSession

    reference = TopSession(module, weights)
    session = QuantSession(quantised_module, quantised_weights)
    kinds = {
        layer_of(op): uniform_of(op.results[0])
        for op in main_function(quantised_module).body.block.ops
        if op.results
    }
    layers: dict[str, LayerError] = {}
    outputs = {name: LayerError(name) for name in session.outputs}
    scores: dict[str, list[tuple[Array, Array]]] = {name: [] for name in session.outputs}
    count = 0
    for sample in samples:
        expected = reference.run_values(sample)
        wanted = reference.run(sample)
        got, values = session.run_layers(sample)
        for name, value in values.items():
            if name not in expected or expected[name].shape != value.shape:
                continue
            kind = kinds.get(name)
            entry = layers.setdefault(name, LayerError(name))
            if kind is not None:
                entry.scale = kind.step
                value = dequantize(value, kind.step, kind.zero)
            entry.update(expected[name], value)
        for name, error in outputs.items():
            error.update(wanted[name], got[name])
            scores[name].append((wanted[name], got[name]))
        count += 1
    agreement = {
        name: top1_agreement((a for a, _ in pairs), (b for _, b in pairs))
        for name, pairs in scores.items()
        if pairs and pairs[0][0].ndim
    }
    return Comparison(list(layers.values()), list(outputs.values()), agreement, count)
