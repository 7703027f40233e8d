"""From what was measured to what to do, in a fixed order: cheap and common causes come first.

1. fp32 run: is the float model right at all, and is our float graph the user's model?
2. Layer by layer: which layers make the output's error?
3. Scale inspection: ranges that clip or are too wide, outlier channels.
4. Fusion: is the fused graph the same function, are thresholds those behind the fused clamps?
5. Preprocessing: do other means, ranges or colours fit the model better?

A step says `suspect` only with evidence, `unknown` where it could not be made.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tilewright.quant.parameters import output_bounds

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp

    from tilewright.quant.accuracy import Accuracy
    from tilewright.quant.channels import ScaleFinding
    from tilewright.quant.compare import Comparison
    from tilewright.quant.variants import PreprocessCheck
    from tilewright.runtime.preprocess import Preprocess

Verdict = Literal["ok", "suspect", "unknown"]

TITLES = ("fp32 run", "layer by layer", "scale inspection", "fusion", "preprocessing")

SAME_FLOAT_DB = 60.0
"""Two float32 executions of one network agree by this much; ten bits."""

GOOD_DB = 20.0
"""Output SQNR from which quantisation is not the first suspect: the error is a tenth."""

GOOD_AGREEMENT = 0.99
NAMED = 3
"""Layers and findings that a step names."""


@dataclass
class Step:
    """One step of the advice: what was looked at, what was seen, what to try."""

    number: int
    verdict: Verdict
    evidence: list[str] = field(default_factory=list[str])
    tries: list[str] = field(default_factory=list[str])
    names: list[str] = field(default_factory=list[str])
    """Layers, values or options that are to blame."""

    @property
    def title(self) -> str:
        """Name of the step."""
        return TITLES[self.number - 1]

    def lines(self, columns: int = 100) -> list[str]:
        """Return the step for a terminal."""
        found = [f"{self.number}. {self.title}: {self.verdict}"]
        for mark, texts in (("   ", self.evidence), ("   try: ", self.tries)):
            for item in texts:
                found += textwrap.wrap(
                    item,
                    columns,
                    initial_indent=mark,
                    subsequent_indent="     ",
                    break_on_hyphens=False,
                    break_long_words=False,
                )
        return found

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "step": self.number,
            "title": self.title,
            "verdict": self.verdict,
            "evidence": self.evidence,
            "try": self.tries,
            "names": self.names,
        }


@dataclass(frozen=True)
class FusionCheck:
    """The fused float graph against the graph as imported."""

    compared: int
    """Layers that both have."""
    worst: float
    """Largest difference over the layer's largest magnitude."""
    layer: str
    """The layer that has it."""


def float_step(against_model: float | None, why_not: str, accuracy: Accuracy | None) -> Step:
    """Return step 1.

    Args:
        against_model: SQNR in dB of our float graph against the user's file; None: not run.
        why_not: why it was not run.
        accuracy: float against quantised, with labels where there are some.
    """
    step = Step(1, "unknown")
    if against_model is None:
        step.evidence.append(f"the model file itself was not run: {why_not}")
    elif against_model < SAME_FLOAT_DB:
        step.verdict = "suspect"
        step.evidence.append(
            f"the float graph is only {against_model:.0f} dB from the model file's own result"
        )
        step.tries.append("report this: a pass on the float graph changed the function")
    else:
        step.verdict = "ok"
        close = "equal to" if math.isinf(against_model) else f"{against_model:.0f} dB from"
        step.evidence.append(f"the float graph is {close} the model file run by onnxruntime")
    if accuracy is not None and accuracy.top1_float is not None:
        step.evidence.append(
            f"top-1 of the float model: {accuracy.top1_float:.1%} of {accuracy.labelled} labelled "
            "samples. What it gets wrong, no quantisation mends"
        )
    return step


def is_bad(comparison: Comparison) -> bool:
    """Return whether the outputs are so far from float that quantisation is a suspect."""
    worst = min((item.sqnr for item in comparison.outputs), default=math.inf)
    return worst < GOOD_DB or min(comparison.agreement.values(), default=1.0) < GOOD_AGREEMENT


def layer_step(comparison: Comparison, refused: bool = False) -> Step:
    """Return step 2; `refused`: a limit is not kept, however good the outputs are."""
    worst = min((item.sqnr for item in comparison.outputs), default=math.inf)
    agreement = min(comparison.agreement.values(), default=1.0)
    bad = refused or is_bad(comparison)
    step = Step(2, "suspect" if bad else "ok")
    seen = f"the output arrives with {worst:.1f} dB over {comparison.samples} samples"
    if comparison.agreement:
        seen += f", the best class is the same for {agreement:.1%}"
    step.evidence.append(seen)
    for layer in comparison.blamed(NAMED):
        kind, name = comparison.cause(layer)
        mostly = {
            "range": "the codes of its result",
            "operand": f'codes of "{name}" that it reads',
            "weights": "its weights and biases",
            "none": "nothing",
        }[kind]
        share = "" if layer.to_output is None else f"{layer.to_output:.0%} of the output's error, "
        step.names.append(layer.name)
        step.evidence.append(
            f'"{layer.name}": {share}own SQNR {layer.own.sqnr:.1f} dB; mostly {mostly}'
        )
    if bad:
        step.tries.append("a higher `-Oq` level: codes and biases fitted to the float layers")
        step.tries.append("`--dtype fp16` on a chip that has it")
    return step


REMEDIES: Mapping[str, str] = {
    "clips": "more, and more typical, calibration samples; `--calibration-method max`; the value's "
    "range in the calibration table",
    "too wide": "the value's range in the calibration table, if it was edited; "
    "`--calibration-method best`; samples without freaks",
    "outlier channels": "`--equalize`, or `--smooth-quant 0.5` in front of linear layers: outliers "
    "move into the weights",
    "raised scales": "`--equalize`: large biases beside small weights",
    "dead channels": "",
}


def scale_step(findings: Sequence[ScaleFinding], bad: bool = True) -> Step:
    """Return step 3; dead channels cost nothing, and weights' outliers only themselves.

    Where the outputs are not `bad`, what was found is said, but is no suspect.
    """
    costly = [
        item
        for item in findings
        if item.kind != "dead channels" and not item.weights and item.noticeable
    ]
    step = Step(3, "suspect" if costly and bad else "ok")
    if not costly:
        step.evidence.append("no range clips or is too wide, no channel stands out")
    for item in costly[:NAMED]:
        step.names.append(item.layer)
        step.evidence.append(f'"{item.layer}": {item.text}')
    if len(costly) > NAMED:
        step.evidence.append(f"and {len(costly) - NAMED} findings more")
    for kind in dict.fromkeys(item.kind for item in costly):
        if REMEDIES[kind]:
            step.tries.append(REMEDIES[kind])
    raised = [item for item in findings if item.kind == "raised scales"]
    if raised:
        step.evidence.append(f'"{raised[0].layer}": {raised[0].text}')
    return step


SLACK = 1.001
"""A threshold beyond a fused clamp by more was observed in front of it."""

SAME_FUSED = 1e-3
"""Difference of a fused layer, over its largest magnitude, that float32 rounding explains."""


def clamps(module: ModuleOp) -> dict[str, tuple[float | None, float | None]]:
    """Return the fused clamp of every layer of a `top` module that has one."""
    from tilewright.dialects.top.base import Attrs
    from tilewright.quant.graph import layer_of, main_function

    found: dict[str, tuple[float | None, float | None]] = {}
    for op in main_function(module).body.block.ops:
        attrs = Attrs(op.attributes)
        bounds = attrs.number("clamp_min"), attrs.number("clamp_max")
        if bounds != (None, None):
            found[layer_of(op)] = bounds
    return found


def wrong_bounds(module: ModuleOp, quantised: ModuleOp) -> list[str]:
    """Return layers whose codes are not clamped where the fused float clamp is."""
    from tilewright.dialects.quant import uniform_of
    from tilewright.dialects.top.base import Attrs
    from tilewright.quant.graph import layer_of, main_function

    known = clamps(module)
    found: list[str] = []
    for op in main_function(quantised).body.block.ops:
        if layer_of(op) not in known or "lo" not in op.attributes:
            continue
        kind = uniform_of(op.results[0])
        if kind is None:
            continue
        attrs = Attrs(op.attributes)
        wanted = output_bounds(float(kind.step), int(kind.zero), *known[layer_of(op)])
        if (attrs.integer("lo"), attrs.integer("hi")) != wanted:
            found.append(layer_of(op))
    return found


def fusion_step(
    module: ModuleOp,
    quantised: ModuleOp | None,
    thresholds: Mapping[str, float],
    check: FusionCheck | None,
) -> Step:
    """Return step 4.

    Args:
        module: the fused float module.
        quantised: the quant level; None: not looked at.
        thresholds: calibrated ranges.
        check: fused against unfused in float; None: not made.
    """
    fused = clamps(module)
    step = Step(4, "ok")
    late: list[str] = []
    for name, (low, high) in fused.items():
        if low is None or high is None or name not in thresholds:
            continue
        most = max(abs(low), abs(high))
        if thresholds[name] > most * SLACK:
            late.append(name)
            step.evidence.append(
                f'"{name}" is clamped to {low:g}..{high:g}, but has a threshold of '
                f"{thresholds[name]:.4g}: that was observed in front of the clamp"
            )
    wrong = [] if quantised is None else wrong_bounds(module, quantised)
    for name in wrong:
        step.evidence.append(f'the codes of "{name}" are not clamped where its activation is')
    step.names += [*late, *wrong]
    if late:
        step.tries.append("calibrate again: the table belongs to another graph, or was edited")
    if check is None:
        step.evidence.append("the graph was not compared with its unfused form")
        step.verdict = "unknown"
    elif check.worst > SAME_FUSED:
        step.names.append(check.layer)
        step.evidence.append(
            f'fused and unfused float graphs differ at "{check.layer}" by {check.worst:.2g} of its '
            "largest value"
        )
        step.tries.append("report this: a pass on the float graph changed the function")
    else:
        step.evidence.append(
            f"{check.compared} layers are the same fused and unfused (within {check.worst:.1g}); "
            f"{len(fused)} have a fused activation"
        )
    if step.names:
        step.verdict = "suspect"
    return step


def preprocess_step(
    check: PreprocessCheck | None, why_not: str, declared: Preprocess | None = None
) -> Step:
    """Return step 5; `check` is None where there was nothing to run variants on."""
    from tilewright.quant.variants import option_text

    if check is None:
        return Step(5, "unknown", [why_not])
    verdicts: dict[str, Verdict] = {"fits": "ok", "wrong": "suspect", "unknown": "unknown"}
    step = Step(5, verdicts[check.verdict], [f"{check.reason}; {check.pictures} pictures"])
    if check.best is not None and declared is not None:
        step.names += check.best.variant.changes
        step.tries.append(f"--preprocess {option_text(declared, check.best.variant.preprocess)}")
    return step
