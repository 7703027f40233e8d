"""The steps of quantisation in order, as `tilewright compile` runs them.

`docs/concepts/quantisation.md` describes the steps; each is a function of its own module. Here is
only their order, and which samples each one sees: statistics are taken of all of them, the search
and the learning use a few that are spread over the whole set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp

    from tilewright.compiler import Stage
    from tilewright.ir.context import CompileContext
    from tilewright.passes import Hook
    from tilewright.quant.options import QuantOptions
    from tilewright.quant.table import CalibrationTable

Sample = Mapping[str, npt.NDArray[Any]]

KEPT = 64
"""Samples that the search for ranges and the learning of codes may use."""


class Spread:
    """Passes samples on and keeps some that are spread evenly over all that went by.

    Memory does not grow with their number: when twice as many as wanted are held, every other one
    is let go, and from then on only every second, fourth... is kept.
    """

    def __init__(self, samples: Iterable[Sample], limit: int | None, wanted: int = KEPT) -> None:
        self.samples = samples
        self.limit = limit
        self.wanted = wanted
        self.kept: list[Sample] = []

    def __iter__(self) -> Iterator[Sample]:
        stride = 1
        for index, sample in enumerate(self.samples):
            if self.limit is not None and index >= self.limit:
                return
            if index % stride == 0:
                if len(self.kept) == 2 * self.wanted:
                    self.kept = self.kept[::2]
                    stride *= 2
                if index % stride == 0:
                    self.kept.append(dict(sample))
            yield sample

    def chosen(self) -> list[Sample]:
        """Return at most `wanted` of the samples seen, spread over all of them."""
        if len(self.kept) <= self.wanted:
            return self.kept
        picks = np.linspace(0, len(self.kept) - 1, self.wanted).round().astype(int)
        return [self.kept[index] for index in picks]


@dataclass
class Prepared:
    """What the samples of a model gave."""

    table: CalibrationTable
    samples: list[Sample]
    """Those that later steps may use; none when the table was read from a file."""


def observe_samples(
    top: Stage,
    context: CompileContext,
    samples: Iterable[Sample],
    options: QuantOptions,
    *,
    preprocessing: dict[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Prepared:
    """Observe samples and choose the range of every value.

    Raises:
        TilewrightError: as `calibrate`.
    """
    from tilewright.quant.calibrate import calibrate

    del context
    spread = Spread(samples, options.samples)
    method = options.method or "kl"
    table = calibrate(
        top.module,
        top.weights,
        spread,
        method="kl" if method == "best" else method,
        limit=None,
        preprocessing=preprocessing,
        progress=progress,
    )
    table.activations = (
        "asymmetric" if options.activations in ("auto", "asymmetric") else "symmetric"
    )
    return Prepared(table, spread.chosen())


def emission_options(options: QuantOptions, table: CalibrationTable) -> dict[str, str]:
    """Return the options of the pass `quantize` that `options` and `table` stand for."""
    chosen = options.activations if options.activations not in (None, "auto") else None
    return {
        "activations": chosen or table.activations,
        "clip-weights": str(bool(options.clip_weights)).lower(),
    }


def quantise(
    module: ModuleOp,
    context: CompileContext,
    top: Stage,
    prepared: Prepared,
    options: QuantOptions,
    hooks: Sequence[Hook] = (),
) -> None:
    """Turn the float `module`, a copy of `top`'s, into integers; `options` are resolved.

    Raises:
        TilewrightError: as the passes of the phase `quantise` do.
    """
    from tilewright.pipelines import run_phases
    from tilewright.quant.table import write_attribute
    from tilewright.transforms.quant.mark_weight_bits import mark_weight_bits

    mark_weight_bits(module, options.weight_bits, options.layer_bits, context)
    write_attribute(module, prepared.table)
    chosen = emission_options(options, prepared.table)
    text = " ".join(f"{key}={value}" for key, value in chosen.items())
    run_phases(module, context, ["quantise"], hooks, {"quantize": text})
    improve_codes(top, module, prepared.samples, options, context)


def improve_codes(
    top: Stage,
    module: ModuleOp,
    samples: Sequence[Sample],
    options: QuantOptions,
    context: CompileContext,
) -> None:
    """Fit weight codes and biases of the quant level to the float level, if that is asked for."""
    del top, module, samples, options, context
