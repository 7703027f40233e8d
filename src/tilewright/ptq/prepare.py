"""The steps of quantisation in order, as `tilewright compile` runs them.

`docs/concepts/quantisation.md` describes the steps; each is a function of its own module. Here is
only their order, and which samples each one sees: statistics are taken of all of them, the search
and the learning use a few that are spread over the whole set.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import TilewrightError
from tilewright.ir.stage import Stage
from tilewright.quant.compare import decibel

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp

    from tilewright.ir.context import CompileContext
    from tilewright.ir.weights import WeightStore
    from tilewright.passes import Hook
    from tilewright.ptq.options import QuantOptions
    from tilewright.quant.calibrate import AtShape, Shapes
    from tilewright.quant.table import CalibrationTable

Sample = Mapping[str, npt.NDArray[Any]]

HELD_OUT = 6
"""Every so many of the kept samples one takes no part in a fit, and judges it."""

LEAST_JUDGES = 4
"""With fewer the samples of the fit judge it as well."""

BEST_DB = 200.0
"""Decibels of equal arrays."""

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
    top: Stage
    """The float graph to quantise: the model's, or one that suits codes better."""


def observe_samples(
    top: Stage,
    context: CompileContext,
    samples: Iterable[Sample],
    options: QuantOptions,
    *,
    preprocessing: dict[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
    at_shape: AtShape | None = None,
) -> Prepared:
    """Condition the float graph, observe samples, and choose the range of every value.

    `options` are resolved. `at_shape` makes the graph for samples of other shapes (see `observe`).
    Channels are not balanced by default where some of the first samples have other shapes: it would
    have to be done alike to all graphs.

    Raises:
        TilewrightError: as `observe`, `condition`; E0103, a later sample has another shape and
            channels were balanced.
    """
    from tilewright.ptq.condition import SAMPLES, condition
    from tilewright.ptq.ranges import choose_ranges
    from tilewright.quant.calibrate import observe
    from tilewright.transforms.quant.given import brings_scales

    source = iter(samples)
    first = list(itertools.islice(source, min(SAMPLES, options.samples)))
    if brings_scales(top.module):
        # Its codes are what it was trained or calibrated with: only what is asked for is changed.
        options = replace(options, level=0, smooth=None, equalise=False)
        context.decide(
            "main", "condition", False, "a quantised model: given scales, codes and biases are kept"
        )
    original = top
    if at_shape is not None and not all(_fits(top, sample) for sample in first):
        options = replace(
            options,
            smooth=0.0 if options.smooth is None else options.smooth,
            equalise=bool(options.equalise),
        )
    if options.level >= 2 or options.float_layers or options.smooth or options.equalise:
        top = condition(top, context, _fitting(top, first), options)
    balanced = changed_constants(original, top)
    spread = Spread(itertools.chain(first, source), options.samples)
    statistics = observe(
        top.module,
        top.weights,
        spread,
        limit=None,
        histograms=options.method != "max",
        preprocessing=preprocessing,
        progress=progress,
        at_shape=_refuse_shapes if balanced and at_shape is not None else at_shape,
    )
    fitting = _fitting(top, spread.chosen())
    table = choose_ranges(top, statistics, context, fitting, options)
    table.balanced = balanced
    return Prepared(table, fitting, top)


def changed_constants(before: Stage, after: Stage) -> bool:
    """Whether a graph has other constants than another one: its channels were balanced."""
    if after is before:
        return False
    names = set(before.weights)
    return names != set(after.weights) or any(
        not np.array_equal(before.weights.get(name), after.weights.get(name)) for name in names
    )


def _refuse_shapes(shapes: Shapes) -> tuple[ModuleOp, WeightStore]:
    """Stand for `at_shape` where channels were balanced in the graph of the compiled shapes."""
    raise TilewrightError(
        "E0103",
        "its shape is not the one that is compiled, for which channels were balanced",
        [f"{name}: {list(shape)}" for name, shape in shapes.items()],
        "balance nothing: --smooth-quant 0 --no-equalize",
    )


def _fits(top: Stage, sample: Sample) -> bool:
    """Whether a sample has the shapes of the graph's inputs."""
    from tilewright.quant.graph import input_shapes

    return {name: np.shape(array) for name, array in sample.items()} == input_shapes(top.module)


def _fitting(top: Stage, samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples that the graph can be run on as it is; `observe` names what is wrong."""
    return [
        sample
        for sample in samples
        if _fits(top, sample)
        and all(np.isfinite(np.asarray(array, np.float64)).all() for array in sample.values())
    ]


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
    prepared: Prepared,
    options: QuantOptions,
    hooks: Sequence[Hook] = (),
) -> None:
    """Turn the float `module`, a copy of `prepared.top`'s, into integers; `options` are resolved.

    Codes and biases are the nearest; `improve_codes` fits them afterwards.

    Raises:
        TilewrightError: as the passes of the phase `quantise` do.
    """
    from tilewright.pipelines import run_phases
    from tilewright.quant.table import write_attribute
    from tilewright.transforms.quant.mark_weight_bits import mark_weight_bits

    table = prepared.table
    bits = {**table.bits, **options.layer_bits}
    mark_weight_bits(module, options.weight_bits, bits, context)
    table.bits = _bits_of(module)
    target = context.target
    if table.bits and target is not None and "int4" not in target.dtypes:
        context.decide(
            "network",
            "quant-mark-weight-bits",
            False,
            f"`{target.name}` keeps 4-bit weights as bytes",
            warning=f"target `{target.name}` has no int4: 4-bit weights cost accuracy and save "
            "nothing on it",
        )
    # Without means no bias takes anything back.
    write_attribute(module, replace(table, means={}) if options.bias == "none" else table)
    chosen = emission_options(options, prepared.table)
    text = " ".join(f"{key}={value}" for key, value in chosen.items())
    run_phases(module, context, ["quantise"], hooks, {"quantize": text})


def _bits_of(module: ModuleOp) -> dict[str, int]:
    """Return the layers whose weights have fewer than 8 bits."""
    from tilewright.dialects.top.base import Attrs
    from tilewright.quant.graph import layer_of, main_function

    found = {
        layer_of(op): Attrs(op.attributes).integer("weight_bits", 8)
        for op in main_function(module).body.block.ops
    }
    return {name: bits for name, bits in found.items() if bits != 8}


def improve_codes(
    prepared: Prepared, module: ModuleOp, options: QuantOptions, context: CompileContext
) -> None:
    """Fit weight codes and biases of the quant level to the float level, if that is asked for.

    Layers are fitted one by one, each judged by itself; what counts is the network. Samples kept
    out of the fit say whether its outputs came closer to the float ones, else all is taken back.
    """
    from tilewright.ptq.sequential import improve
    from tilewright.transforms.quant.given import brings_scales

    if brings_scales(prepared.top.module):
        return  # a quantised model: its codes are what it was trained or calibrated with
    stage, before = Stage(module, context.weights), context.weights.copy()
    fitted = [s for i, s in enumerate(prepared.samples) if i % HELD_OUT != HELD_OUT // 2]
    judged = prepared.samples[HELD_OUT // 2 :: HELD_OUT]
    if len(judged) < LEAST_JUDGES:
        fitted = judged = prepared.samples
    rows = improve(prepared.top, stage, fitted, options)
    if not rows:
        return
    judge = OutputJudge(prepared.top, judged)
    first, last = judge.decibels(Stage(module, before)), judge.decibels(stage)
    better = last >= first
    context.decide(
        "network",
        "improve",
        better,
        f"outputs {first:.2f} -> {last:.2f} dB on {len(judged)} samples kept out of the fit"
        + ("" if better else ": nearest codes and plain biases are kept"),
    )
    if not better:
        for name in before:
            context.weights.set(name, before.get(name))
        return
    for row in rows:
        changed = row.codes > 0 or row.channels > 0
        context.decide(
            row.layer,
            "improve",
            changed,
            f"error {_decibel(row.before)} -> {_decibel(row.after)}, {row.codes} codes and the "
            f"biases of {row.channels} of {row.total} channels changed"
            if changed
            else f"nothing lowers its error of {_decibel(row.before)} on other samples",
            before=row.before,
            after=row.after,
        )


class OutputJudge:
    """Says how close quantised networks come to one float network on a few samples."""

    def __init__(self, top: Stage, samples: Sequence[Sample]) -> None:
        """Run the float network, once for all that are judged."""
        from tilewright.runtime.float_executor import TopSession

        session = TopSession(top.module, top.weights)
        self.samples = list(samples)
        self._wanted = [session.run(sample) for sample in self.samples]

    def decibels(self, quant: Stage) -> float:
        """Return the outputs' signal-to-noise ratio in dB, averaged over the outputs.

        By the fast executor: for decisions, not for reports.
        """
        from tilewright.quant.fast import FastSession

        fast = FastSession(quant.module, quant.weights)
        signal: dict[str, float] = {}
        noise: dict[str, float] = {}
        for sample, wanted in zip(self.samples, self._wanted, strict=True):
            got = fast.run(sample)
            for name, array in wanted.items():
                exact = array.astype(np.float64)
                error = got[name].astype(np.float64) - exact
                signal[name] = signal.get(name, 0.0) + float(np.square(exact).sum())
                noise[name] = noise.get(name, 0.0) + float(np.square(error).sum())
        # An output without a signal, or without noise, says nothing; both bounds are beyond any
        # codes.
        levels = [
            decibel(signal[name], noise[name]) if noise[name] and signal[name] else BEST_DB
            for name in signal
        ]
        return min(sum(levels) / len(levels), BEST_DB) if levels else BEST_DB


def _decibel(share: float) -> str:
    return f"{10 * math.log10(share):.1f} dB" if share > 0 else "0"
