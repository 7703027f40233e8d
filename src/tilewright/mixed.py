"""Compiling with mixed precision: two uniform compiles, a choice, and the compile of the choice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.diagnostics import TilewrightError, UsageError

if TYPE_CHECKING:
    from tilewright.api import Build, CompileOptions
    from tilewright.compiler import Progress
    from tilewright.ptq.precision import LayerPrecision, Outcome
    from tilewright.spec.hardware import Hardware

STAGE = "choose-precision"


def build_mixed(
    model: Path | str, target: Hardware, options: CompileOptions, progress: Progress
) -> tuple[Build, Outcome]:
    """Compile a model with as many 4-bit layers as `options.budget` allows.

    Raises:
        UsageError: E0702, the options contradict each other.
        TilewrightError: E0402, the target has no 4-bit weights; E0301, there are no samples; as
        `build`.
    """
    from tilewright.api import build
    from tilewright.ptq.precision import choose
    from tilewright.runtime.float_executor import TopSession

    budget = options.budget
    assert budget is not None
    if options.dtype != "int8" or options.quant.weight_bits != 8 or options.quant.layer_bits:
        raise UsageError(
            "E0702",
            "an accuracy budget chooses the bits of weights itself",
            hint="leave out --weight-bits, --layer-bits and --dtype",
        )
    if "int4" not in target.dtypes:
        raise TilewrightError(
            "E0402",
            f"target `{target.name}` has no int4: every layer keeps 8 bits",
            [f"its number types: {', '.join(target.dtypes)}"],
            "choose another target, or leave out --accuracy-budget",
        )
    samples = _samples(model, target, options)
    plain = replace(options, calibration=samples, budget=None, keep_ir=())
    eight = build(model, target, plain, _part(progress, 0.0))
    quarter = replace(plain, quant=replace(plain.quant, weight_bits=4))
    four = build(model, target, quarter, _part(progress, 0.3))
    assert eight.compiled is not None
    assert four.compiled is not None
    cycles8, cycles4 = _cycles(eight), _cycles(four)
    cycles = {name: (count, cycles4.get(name, count)) for name, count in cycles8.items()}
    top = eight.compiled.stages["top"]
    session = TopSession(top.module, top.weights)
    progress("choose precision", 0.6)
    outcome = choose(
        eight.compiled.stages["quant"],
        four.compiled.stages["quant"],
        cycles,
        samples,
        [session.run(sample) for sample in samples],
        budget,
    )
    bits = {name: count for name, count in outcome.layer_bits.items() if count != 8}
    chosen = replace(plain, quant=replace(plain.quant, layer_bits=bits), keep_ir=options.keep_ir)
    made = build(model, target, chosen, _part(progress, 0.7))
    made.package.content.options["accuracy_budget"] = str(budget)
    made.package.content.decisions += [_decision(row) for row in outcome.layers]
    return made, outcome


def _decision(row: LayerPrecision) -> dict[str, Any]:
    return {
        "layer": row.layer,
        "stage": STAGE,
        "fired": row.bits == 4,
        "reason": f"{row.bits}-bit weights: 4 bits save {row.gain} of {row.cycles8} cycles and "
        f"move the outputs by {row.noise_db:.1f} dB",
        "details": {"noise_db": str(row.noise_db), "cycles8": row.cycles8, "cycles4": row.cycles4},
    }


def _part(progress: Progress, start: float) -> Progress:
    """Return the progress of one of three compiles."""
    return lambda phase, done: progress(phase, start + 0.3 * done)


def _samples(model: Path | str, target: Hardware, options: CompileOptions) -> list[Any]:
    """Return the calibration samples, to be gone through several times."""
    from tilewright.api import float_inputs

    found = float_inputs(model, target, options)
    if not found or options.random_calibration:
        raise TilewrightError(
            "E0301",
            "mixed precision needs samples to measure on",
            hint="give --calibration-data FOLDER",
        )
    return found


def _cycles(build: Build) -> dict[str, int]:
    """Return the simulated cycles of every layer, by its name and those fused into it."""
    from tilewright.report.report import make_report
    from tilewright.runtime.simulation import simulate

    report = make_report(build.package, simulate(build.package))
    found: dict[str, int] = {}
    for row in report.layers:
        for name in (row.name, *row.fused):
            found[name] = row.cycles
    return found
