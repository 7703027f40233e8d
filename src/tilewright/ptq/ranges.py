"""Choosing the range of every value, by the error at the network's output where that is asked for.

The rules of `observers.py` look at one value by itself. Which of them serves a network shows only
at its output: clipping a peak may cost everything, or nothing. `best` runs the integer graph of
the whole network with each rule, and takes the best of them unless chance could explain it. Then it
tries, for one value after the other, what the other rules do to the output with all else in float,
and keeps what lowers the error by more than its variation from sample to sample. All these changes
together must lower the error of the integer graph, or else none is made.

A rule that was asked for by name is compared with `max` in the same way. Where it loses more than
`MARGIN`, single values go back to `max`, and a warning names them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewright.ptq.range_trials import (
    LEAST_SAMPLES,
    NetworkTrials,
    ValueTrials,
    trial_samples,
)
from tilewright.quant.calibrate import Statistics, require_method
from tilewright.quant.observers import METHODS, choose

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp

    from tilewright.ir.context import CompileContext
    from tilewright.ir.stage import Stage
    from tilewright.ptq.options import QuantOptions
    from tilewright.quant.table import CalibrationTable
    from tilewright.transforms.quant.scales import EdgeScale

FloatArray = npt.NDArray[np.float64]
Sample = Mapping[str, npt.NDArray[Any]]

STAGE = "choose-ranges"
"""Name of this step in the decision log."""

MARGIN = 0.5
"""Decibels that a rule may lose against `max` at the output before values are changed back."""

ASYMMETRIC_MARGIN = 0.25
"""Decibels that symmetric codes must win by to be taken: they have half as many codes for values
that are not negative, which other inputs may need."""

RULES = ("max", "mean", "percentile", "kl", "mse")
"""In the order in which they are taken when nothing tells them apart."""

VALUE_RULES = tuple(rule for rule in RULES if rule != "mean")
"""Those tried on single values. The mean of samples' ends cuts off the loudest of samples that
differ; the whole network's outputs show that, one value on a few samples may not."""


def choose_ranges(
    front: Stage,
    statistics: Statistics,
    context: CompileContext,
    samples: Sequence[Sample],
    options: QuantOptions,
    progress: Callable[[float], None] | None = None,
) -> CalibrationTable:
    """Return the range of every value, and which codes (`activations`) they are for.

    Args:
        front: the fused float graph that was observed.
        statistics: what was seen of it.
        context: gives the target; takes decisions and warnings (stage `choose-ranges`).
        samples: inputs for the search; those of another shape than the graph's are left out.
            Without any, `best` is `kl`, which looks at each value's own error only.
        options: `method`, `activations`, `level` (1: one rule for the whole network).
        progress: called with the fraction done.

    Raises:
        UsageError: E0702, there is no such method.
    """
    options = options.resolved()
    method = options.method or "best"
    require_method(method, ("best",))
    search = _Search(front, statistics, context, samples, options, progress or _ignore)
    table = search.run(method)
    table.method = method
    return table


def _ignore(done: float) -> None:
    del done


@dataclass(frozen=True)
class _Tried:
    """A table and its noise at the outputs."""

    table: CalibrationTable
    noise: FloatArray
    """Decibels of each sample."""

    def loss(self, other: _Tried) -> float:
        """Return by how many decibels this is noisier than `other`."""
        return float((self.noise - other.noise).mean())


class _Search:
    def __init__(
        self,
        front: Stage,
        statistics: Statistics,
        context: CompileContext,
        samples: Sequence[Sample],
        options: QuantOptions,
        progress: Callable[[float], None],
    ) -> None:
        self.front = front
        self.statistics = statistics
        self.context = context
        self.options = options
        self.samples = _fitting(front.module, samples)
        self.progress = progress
        self._network: NetworkTrials | None = None
        self._reasons: dict[str, str] = {}
        """Why single values got another rule than the network."""

    @property
    def network(self) -> NetworkTrials:
        if self._network is None:
            self._network = NetworkTrials(self.front, self.context, self.samples)
        return self._network

    def tried(self, table: CalibrationTable, activations: str) -> _Tried:
        """Run the network with `table` and these codes."""
        table.activations = activations
        return _Tried(table, self.network.noise(table, activations == "asymmetric"))

    def run(self, method: str) -> CalibrationTable:
        activations = self.options.activations or "auto"
        if not self.samples:
            table = self.statistics.table("kl" if method == "best" else method)
            table.activations = "symmetric" if activations == "symmetric" else "asymmetric"
            return table
        if method == "max" and activations != "auto":
            table = self.statistics.table("max")
            table.activations = activations
            return table
        plain = self._codes(activations)
        self.progress(0.2)
        if method == "max":
            return plain.table
        if method == "best" and self.options.level < 2:
            return self._whole_network(plain)[0].table
        if method == "best":
            return self._each_value(plain)
        return self._checked(method, plain)

    def _codes(self, activations: str) -> _Tried:
        """Return the network with the rule `max` and the codes that were asked for, or better."""
        if activations != "auto":
            return self.tried(self.statistics.table("max"), activations)
        symmetric = self.tried(self.statistics.table("max"), "symmetric")
        asymmetric = self.tried(self.statistics.table("max"), "asymmetric")
        gain = symmetric.loss(asymmetric)
        taken = asymmetric if gain > -ASYMMETRIC_MARGIN else symmetric
        self.context.decide(
            "main", STAGE, True,
            f"{taken.table.activations} activations: asymmetric ones change the noise at the "
            f"output by {-gain:+.2f} dB",
        )  # fmt: skip
        return taken

    def _whole_network(self, plain: _Tried) -> tuple[_Tried, str]:
        """Return the network with the rule that is best for all values alike, and the rule."""
        best, rule = plain, "max"
        for step, other in enumerate(RULES[1:]):
            tried = self.tried(self.statistics.table(other), plain.table.activations)
            # Ranges that clip fit the samples they were taken from better than others: they must
            # show more than `max`, which does not.
            if tried.loss(best) < 0 and _is_sure(plain.noise - tried.noise, 2.0):
                best, rule = tried, other
            self.progress(0.2 + 0.05 * (step + 1))
        self.context.decide(
            "main", STAGE, True,
            f"rule {rule} is best for all values alike: {best.loss(plain):+.2f} dB noise at the "
            "output against max",
        )  # fmt: skip
        return best, rule

    def _each_value(self, plain: _Tried) -> CalibrationTable:
        """Return the table of the rules that are best for single values."""
        best, rule = self._whole_network(plain)
        candidates = [rule, *(other for other in VALUE_RULES if other != rule)]
        rules = self._rules(candidates, plain.table.activations)
        changed = sum(other != rule for other in rules.values())
        if not changed:
            return best.table
        found = self.tried(self.statistics.table(rule, rules), plain.table.activations)
        loss = found.loss(best)
        taken = _is_sure(best.noise - found.noise)
        # What is better for each by itself need not be so for all together.
        self.context.decide(
            "main", STAGE, taken,
            f"other rules for {changed} of {len(rules)} values: {loss:+.2f} dB noise at the output"
            + ("" if taken else "; not taken"),
        )  # fmt: skip
        if not taken:
            return best.table
        for name, reason in self._reasons.items():
            self.context.decide(name, STAGE, True, reason)
        return found.table

    def _checked(self, method: str, plain: _Tried) -> CalibrationTable:
        """Return the table of one rule; of `max` for values where it costs the network too much."""
        asked = self.tried(self.statistics.table(method), plain.table.activations)
        loss = asked.loss(plain)
        if loss <= MARGIN:
            return asked.table
        rules = self._rules(("max", method), plain.table.activations)
        back = [name for name, rule in rules.items() if rule == "max"]
        mixed = self.tried(
            self.statistics.table(method, dict.fromkeys(back, "max")), plain.table.activations
        )
        what = f"{len(back)} values take their largest magnitude instead"
        if mixed.loss(plain) > MARGIN:
            mixed, what = plain, "all values take their largest magnitude instead"
        if not back:
            seen = asked.table.maxima()
            share = {
                name: t / seen[name] for name, t in asked.table.thresholds.items() if seen[name]
            }
            back = sorted(share, key=lambda name: share[name])[:3]
        layers = ", ".join(f"`{name}`" for name in back[:8]) + (", ..." if len(back) > 8 else "")
        warning = (
            f"the ranges of calibration method {method} are {loss:.1f} dB noisier at the output "
            f"than those of max; {what} (clipping costs most at {layers})"
        )
        for name in back:
            self.context.decide(
                name, STAGE, True, f"rule max: what {method} clips is needed at the output"
            )
        self.context.decide("main", STAGE, True, what, warning=warning, layers=back)
        return mixed.table

    def _rules(self, candidates: Sequence[str], activations: str) -> dict[str, str]:
        """Return the best rule for every value, by the error that it alone makes at the output.

        A value whose rules give the same scale takes the first of them. Nothing is returned where
        the search would take too long.
        """
        names = [name for name in _own_ranges(self.front) if name in self.statistics.observers]
        count = trial_samples(self.front.module, set(names), len(candidates))
        if count < min(LEAST_SAMPLES, len(self.samples)):
            self.context.decide(
                "main",
                STAGE,
                False,
                "single values are not tried: it would take long for this model",
            )
            return {}
        trials = ValueTrials(self.front, self.samples, count)
        signed = _symmetric_values(self.front.module) if activations == "asymmetric" else None
        rules: dict[str, str] = {}
        for index, name in enumerate(names):
            rules[name] = candidates[0]
            options = self._scales(name, candidates, signed is not None and name not in signed)
            if len(options) > 1:
                errors = trials.errors(name, list(options.values()))
                if errors is not None:
                    rules[name] = self._better(name, list(options), errors)
            self.progress(0.4 + 0.6 * (index + 1) / len(names))
        return rules

    def _scales(
        self, name: str, candidates: Sequence[str], asymmetric: bool
    ) -> dict[str, EdgeScale]:
        """Return the different scales that rules give a value, by rule."""
        from tilewright.quant.parameters import scale_of
        from tilewright.transforms.quant.scales import EdgeScale, asymmetric_scale

        found: dict[str, EdgeScale] = {}
        for rule in candidates:
            choice = choose(self.statistics.observers[name], rule)
            scale = (
                asymmetric_scale(choice.low, choice.high)
                if asymmetric
                else EdgeScale(scale_of(choice.threshold))
            )
            if all(
                abs(scale.step / other.step - 1) > 0.005 or abs(scale.zero - other.zero) > 1
                for other in found.values()
            ):
                found[rule] = scale
        return found

    def _better(self, name: str, rules: list[str], errors: FloatArray) -> str:
        """Return the rule of least error, or the first where the gain may be chance."""
        best = int(np.argmin(errors.mean(axis=1)))
        gain = errors[0] - errors[best]
        if best == 0 or not _is_sure(gain):
            return rules[0]
        ratio = errors[0].sum() / max(errors[best].sum(), 1e-300)
        self._reasons[name] = (
            f"rule {rules[best]}: its own noise at the output is {10 * math.log10(ratio):.1f} dB "
            f"below that of {rules[0]}"
        )
        return rules[best]


def _is_sure(gain: FloatArray, errors: float = 1.0) -> bool:
    """Whether the mean of gains, one a sample, exceeds so many of its standard errors."""
    if gain.size == 1:
        return bool(gain[0] > 0)
    return float(gain.mean()) > errors * float(gain.std(ddof=1)) / math.sqrt(gain.size)


def _fitting(module: ModuleOp, samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples that have the shapes of the module's inputs."""
    from tilewright.quant.graph import input_shapes

    shapes = input_shapes(module)
    return [
        sample
        for sample in samples
        if all(name in sample and sample[name].shape == shape for name, shape in shapes.items())
    ]


def _own_ranges(front: Stage) -> list[str]:
    """Return the values whose own range decides a scale of the integer graph, in order.

    Others take the scale of their operand, or stay float.
    """
    from tilewright.quant.graph import argument_names, main_function
    from tilewright.transforms.quant.classify import SCALE_KEEPERS, place
    from tilewright.transforms.quant.scales import exact_gain, given_scale, value_names

    main = main_function(front.module)
    ops = [
        op for op in main.body.block.ops if op.name not in ("top.weight", "top.none", "func.return")
    ]
    hosts = place(ops, front.weights)
    names = value_names(ops, dict(zip(main.body.block.args, argument_names(main), strict=True)))
    on_chip = {
        operand for op in ops if op not in hosts for operand in op.operands if operand in names
    }
    made = {
        result
        for op in ops
        if op not in hosts
        and op.name not in SCALE_KEEPERS
        and given_scale(op) is None
        and exact_gain(op, front.weights) is None
        for result in op.results
    }
    given = {
        value for value in names if value in on_chip and value.owner in (main.body.block, *hosts)
    }
    # A linear layer that only the host reads gives sums, not codes.
    sums = {
        op.results[0]
        for op in ops
        if op.name == "top.linear" and op not in hosts and op.results[0] not in on_chip
    }
    return [name for value, name in names.items() if value in made | given and value not in sums]


def _symmetric_values(module: ModuleOp) -> set[str]:
    """Return the values that have zero point 0 among asymmetric ones: operands of products."""
    from tilewright.quant.graph import argument_names, main_function
    from tilewright.transforms.quant.scales import feeds_product, value_names

    main = main_function(module)
    ops = [op for op in main.body.block.ops if op.name not in ("top.weight", "top.none")]
    names = value_names(ops, dict(zip(main.body.block.args, argument_names(main), strict=True)))
    return {name for value, name in names.items() if feeds_product(value)}


__all__ = ["METHODS", "choose_ranges"]
