"""Mixed precision: which layers' weights may have 4 bits, under a budget of accuracy.

Two compiles are the ends: all weights with 8 bits, and all that can with 4. Both share every scale
of an activation, so the constants of one layer may be taken from either. A layer's *gain* is how
many simulated cycles it is faster with 4 bits; its *noise* is what the network's output moves when
only its constants are exchanged. Layers are exchanged in the order of gain for noise, and as many
as the budget allows: noise of layers adds up well enough to order them, but what decides is the
network with all of them exchanged, run on the samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import TilewrightError, UsageError

if TYPE_CHECKING:
    from xdsl.ir import Operation

    from tilewright.ir.stage import Stage
    from tilewright.ir.weights import WeightStore

Array = npt.NDArray[Any]
Sample = Mapping[str, Array]

LAYERS = ("quant.conv", "quant.linear")

PROBES = 8
"""Samples that the noise of single layers is measured on."""

EXACT = -math.inf
"""Decibels of a noise of zero."""


@dataclass(frozen=True)
class Budget:
    """How much may be lost against the same network with 8-bit weights."""

    amount: float
    unit: str
    """`%`: points of agreement with the float model's best class over the samples. `dB`: of the
    signal-to-noise ratio of the outputs."""

    @staticmethod
    def parse(text: str) -> Budget:
        """Read `0.5%` or `1dB`.

        Raises:
            UsageError: E0702, it is neither.
        """
        for unit in ("%", "dB"):
            number = text.strip().removesuffix(unit)
            if number == text.strip():
                continue
            try:
                amount = float(number)
            except ValueError:
                break
            if math.isfinite(amount) and amount >= 0:
                return Budget(amount, unit)
        raise UsageError(
            "E0702",
            f"an accuracy budget must be a share as `0.5%` or decibels as `1dB`, not `{text}`",
            ["%: points of agreement with the float model; dB: signal to noise of the outputs"],
        )

    def __str__(self) -> str:
        return f"{self.amount:g}{self.unit}"


@dataclass(frozen=True)
class LayerPrecision:
    """What 4 bits would do to a layer, and what was chosen."""

    layer: str
    bits: int
    noise_db: float
    """Power of what the outputs move, relative to the outputs, if only this layer has 4 bits."""
    cycles8: int
    cycles4: int
    """Simulated cycles of the layer in the two networks that have one kind throughout."""

    @property
    def gain(self) -> int:
        """Cycles that 4 bits save; may be negative."""
        return self.cycles8 - self.cycles4


@dataclass(frozen=True)
class Outcome:
    """The choice, and what the samples said about it."""

    layers: list[LayerPrecision]
    """In the order in which they would be exchanged."""
    loss8: float
    loss: float
    """What 8 bits throughout and the choice lose against the float model, in the budget's unit:
    points of agreement, or minus the signal-to-noise ratio in dB."""
    samples: int

    @property
    def layer_bits(self) -> dict[str, int]:
        """Bits of the weights by layer."""
        return {item.layer: item.bits for item in self.layers}


def choose(
    eight: Stage,
    four: Stage,
    cycles: Mapping[str, tuple[int, int]],
    samples: Sequence[Sample],
    expected: Sequence[Mapping[str, Array]],
    budget: Budget,
) -> Outcome:
    """Choose the layers whose weights get 4 bits.

    Args:
        eight: the quant level with 8-bit weights.
        four: the same network with 4-bit weights, from the same table.
        cycles: by layer, simulated cycles in either.
        samples: inputs.
        expected: the float model's outputs for them.
        budget: what may be lost.

    Raises:
        TilewrightError: E0301, there are no samples.
    """
    if not samples:
        raise TilewrightError(
            "E0301",
            "mixed precision needs samples to measure on",
            hint="give --calibration-data; ranges from a table alone are not enough",
        )
    mixed = _Mixture(eight, four)
    probes = samples[:: max(1, len(samples) // PROBES)][:PROBES]
    base = [mixed.outputs([], sample) for sample in probes]
    rows: list[LayerPrecision] = []
    for layer in mixed.layers:
        noise = signal = 0.0
        for sample, before in zip(probes, base, strict=True):
            after = mixed.outputs([layer], sample)
            signal += _power(before.values())
            noise += _power(after[name] - before[name] for name in before)
        level = 10 * math.log10(noise / signal) if noise > 0 and signal > 0 else EXACT
        rows.append(LayerPrecision(layer, 8, level, *cycles.get(layer, (0, 0))))
    order = sorted(rows, key=_worth)
    candidates = [row.layer for row in order if row.gain > 0]
    loss8 = mixed.loss([], samples, expected, budget)
    # By bisection: losses need not grow steadily, so a longer run may fit as well; but what is
    # taken has been measured itself, never inferred.
    low, high, loss = 0, len(candidates), loss8
    while low < high:
        middle = (low + high + 1) // 2
        found = mixed.loss(candidates[:middle], samples, expected, budget)
        if found - loss8 <= budget.amount + 1e-9:
            low, loss = middle, found
        else:
            high = middle - 1
    chosen = set(candidates[:low])
    layers = [
        LayerPrecision(
            row.layer, 4 if row.layer in chosen else 8, row.noise_db, row.cycles8, row.cycles4
        )
        for row in order
    ]
    return Outcome(layers, loss8, loss, len(samples))


def _worth(row: LayerPrecision) -> tuple[float, str]:
    """Return what sorts layers: least noise for a saved cycle first."""
    if row.gain <= 0:
        return math.inf, row.layer
    return 10.0 ** (row.noise_db / 10.0) / row.gain, row.layer


def _power(arrays: Any) -> float:
    return float(sum(np.square(array, dtype=np.float64).sum() for array in arrays))


class _Mixture:
    """A network whose layers have the constants of one of two compiles."""

    def __init__(self, eight: Stage, four: Stage) -> None:
        from tilewright.quant.graph import main_function

        self.module = eight.module
        self.original = eight.weights
        self.weights: WeightStore = eight.weights.copy()
        others = {
            _name(op): op for op in main_function(four.module).body.block.ops if op.name in LAYERS
        }
        self.layers: list[str] = []
        self._arrays: dict[str, list[tuple[str, Array]]] = {}
        for op in main_function(eight.module).body.block.ops:
            other = others.get(_name(op))
            if op.name not in LAYERS or other is None or other.name != op.name:
                continue
            pairs = [
                (_constant(mine), four.weights.get(_constant(its)))
                for mine, its in zip(op.operands[1:], other.operands[1:], strict=True)
            ]
            same = all(np.array_equal(self.original.get(name), array) for name, array in pairs)
            if not same:
                self.layers.append(_name(op))
                self._arrays[_name(op)] = pairs
        self._made: tuple[str, ...] | None = None
        self._session: Any = None

    def session(self, layers: Sequence[str]) -> Any:
        """Return the fast executor of the network with these layers exchanged."""
        from tilewright.quant.fast import FastSession

        key = tuple(layers)
        if self._session is None or key != self._made:
            for name in self._made or ():
                for constant, _ in self._arrays[name]:
                    self.weights.set(constant, self.original.get(constant))
            for name in key:
                for constant, array in self._arrays[name]:
                    self.weights.set(constant, array)
            self._session = FastSession(self.module, self.weights)
            self._made = key
        return self._session

    def outputs(self, layers: Sequence[str], sample: Sample) -> dict[str, Array]:
        """Return the outputs with these layers exchanged, as float64."""
        found = self.session(layers).run(sample)
        return {name: array.astype(np.float64) for name, array in found.items()}

    def loss(
        self,
        layers: Sequence[str],
        samples: Sequence[Sample],
        expected: Sequence[Mapping[str, Array]],
        budget: Budget,
    ) -> float:
        """Return what is lost against the float model: points of agreement, or minus decibels."""
        from tilewright.quant.compare import decibel, top1_agreement

        pairs: list[tuple[Array, Array]] = []
        for sample, wanted in zip(samples, expected, strict=True):
            got = self.outputs(layers, sample)
            pairs += [(wanted[name].astype(np.float64), got[name]) for name in wanted]
        if budget.unit == "%":
            same = top1_agreement((a for a, _ in pairs), (b for _, b in pairs))
            return 100.0 * (1.0 - same)
        noise = _power(a - b for a, b in pairs)
        signal = _power(a for a, _ in pairs)
        return -decibel(signal, noise)


def _name(op: Operation) -> str:
    from tilewright.quant.graph import layer_of

    return layer_of(op)


def _constant(value: Any) -> str:
    from tilewright.transforms.quant.classify import constant_name

    return constant_name(value)
