"""Another float graph of the same function, before calibration, that suits codes better.

Three changes, each optional: layers whose codes would cost too much stay in float (`keep_float`),
outlying channels go into the weights behind normalisations (`smooth`), and channels are balanced
between convolutions (`equalize`). The last two are tried: they stay if the outputs of a plainly
quantised network come closer to the float ones on a few samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from tilewright.ir.stage import Stage

if TYPE_CHECKING:
    from tilewright.dialects.quant import UniformType
    from tilewright.ir.context import CompileContext
    from tilewright.ptq.options import QuantOptions
    from tilewright.ptq.prepare import OutputJudge

Sample = Mapping[str, npt.NDArray[Any]]

STAGE = "condition"

SAMPLES = 8
"""First samples that these decisions look at."""

SHARES = ((0.5, 0.5), (0.5, 0.75), (0.5, 1.0), (0.75, 0.75))
"""Shares of outlying channels that go into the weights, to try: behind normalisations, and behind
floats of the host, whose ranges have longer tails (the results of GELU)."""

LEAST_GAIN_DB = 0.1
"""A change that brings less is not worth another graph."""


def condition(
    top: Stage, context: CompileContext, samples: Sequence[Sample], options: QuantOptions
) -> Stage:
    """Return the float graph to quantise: `top` itself, or a changed copy.

    Args:
        top: the fused float graph.
        context: gives the target; takes the decisions.
        samples: a few inputs of the graph's shapes.
        options: resolved options: `float_layers`, `smooth`, `equalise`, `level`.

    Raises:
        UsageError: E0702, `float_layers` names no layer.
    """
    from tilewright.ptq.keep_float import keep_loud, mark_layers
    from tilewright.ptq.prepare import OutputJudge

    samples = list(samples)[:SAMPLES]
    judge = OutputJudge(top, samples)
    stage = Stage(top.module.clone(), top.weights.copy())
    changed = False
    if options.float_layers is not None:
        mark_layers(stage.module, options.float_layers, context)
        changed = bool(options.float_layers)
    elif options.level >= 2 and samples and _has_products(stage):
        types = _types(stage, context, samples, options)
        changed = keep_loud(stage, types, samples[: SAMPLES // 2], context) > 0
    if options.smooth is None:
        shares = SHARES if options.level >= 2 else ()
    else:
        shares = ((options.smooth, options.smooth),) if options.smooth > 0 else ()
    bounded = options.equalise is True
    wanted = options.level >= 2 if options.equalise is None else options.equalise
    steps: tuple[tuple[dict[str, Change], bool], ...] = (
        (
            {f"smoothing {a:g}, {b:g}": _smoothing(a, b) for a, b in shares},
            options.smooth is not None,
        ),
        ({"equalisation": _equalising(bounded)} if wanted else {}, bounded),
    )
    for changes, forced in steps if samples else ():
        better = _best(stage, judge, context, options, changes, forced)
        changed |= better is not stage
        stage = better
    return stage if changed else top


Change = Callable[["CompileContext", "Stage", Sequence[Sample]], int]


def _smoothing(share: float, float_share: float) -> Change:
    from tilewright.ptq.smooth import smooth

    return lambda context, stage, samples: smooth(
        context, stage.module, samples, share, float_share
    )


def _equalising(bounded: bool) -> Change:
    from tilewright.ptq.equalize import equalize

    return lambda context, stage, samples: equalize(context, stage.module, samples, bounded)


def _best(
    stage: Stage,
    judge: OutputJudge,
    context: CompileContext,
    options: QuantOptions,
    changes: Mapping[str, Change],
    forced: bool,
) -> Stage:
    """Return the stage with the change that serves it best, or the stage itself.

    What is forced is made whatever it brings.
    """
    best = stage
    before: float | None = None
    level = 0.0
    for name, change in changes.items():
        tried = Stage(stage.module.clone(), stage.weights.copy())
        scratch = _scratch(context, tried)
        if not change(scratch, tried, judge.samples):
            continue
        tried = Stage(tried.module, scratch.weights)
        if not forced:
            if before is None:
                # Measured only where there is something to compare with it.
                before = level = trial(stage, judge, context, options)
            reached = trial(tried, judge, context, options)
            better = reached > level + LEAST_GAIN_DB
            text = f"{name}: {before:.2f} -> {reached:.2f} dB at the outputs"
            context.decide("network", STAGE, better, text)
            if not better:
                continue
            level = reached
        context.decisions += scratch.decisions
        best = tried
    return best


def _scratch(context: CompileContext, stage: Stage) -> CompileContext:
    from tilewright.ir.io import new_context

    made = new_context(target=context.target)
    made.weights = stage.weights.copy()
    return made


def _has_products(stage: Stage) -> bool:
    """Whether there is a product whose sums could leave the chip."""
    from tilewright.ptq.keep_float import PRODUCTS
    from tilewright.quant.graph import main_function

    return any(op.name in PRODUCTS for op in main_function(stage.module).body.block.ops)


def _emitted(
    stage: Stage, context: CompileContext, samples: Sequence[Sample], options: QuantOptions
) -> Stage:
    """Return the stage quantised plainly, with ranges of these samples."""
    from tilewright.ptq.prepare import Prepared, quantise
    from tilewright.quant.calibrate import observe

    table = observe(stage.module, stage.weights, samples, histograms=False).table("max")
    symmetric = options.activations == "symmetric"
    table.activations = "symmetric" if symmetric else "asymmetric"
    plain = replace(options, rounding="nearest", bias="mean", activations=table.activations)
    scratch = _scratch(context, stage)
    module = stage.module.clone()
    quantise(module, scratch, Prepared(table, [], stage), plain)
    return Stage(module, scratch.weights)


def _types(
    stage: Stage, context: CompileContext, samples: Sequence[Sample], options: QuantOptions
) -> dict[str, UniformType]:
    """Return the codes every value would have."""
    from tilewright.dialects.quant import uniform_of
    from tilewright.quant.graph import layer_of, main_function

    found: dict[str, UniformType] = {}
    for op in main_function(_emitted(stage, context, samples, options).module).body.block.ops:
        kind = uniform_of(op.results[0]) if op.results else None
        if kind is not None:
            found.setdefault(layer_of(op).removesuffix("/quantize"), kind)
    return found


def trial(
    stage: Stage, judge: OutputJudge, context: CompileContext, options: QuantOptions
) -> float:
    """Return what `judge` says of the stage quantised plainly, with ranges of its samples."""
    return judge.decibels(_emitted(stage, context, judge.samples, options))
