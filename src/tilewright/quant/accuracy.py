"""What quantisation costs: one measurement of a compiled model, and the limits it must keep.

The integer side is the exact reference, which every lower level equals bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt

from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.quant.compare import LayerError, decibel, holds_scores, saturating

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp

    from tilewright.ir.weights import WeightStore

Array = npt.NDArray[Any]


class StageLike(Protocol):
    """A module and its constants (`compiler.Stage`)."""

    module: ModuleOp
    weights: WeightStore


class CompiledLike(Protocol):
    """What has a float and a quantised level (`compiler.Compiled`)."""

    @property
    def stages(self) -> Mapping[str, StageLike]:
        """Levels by name: `top` and `quant`."""
        ...


@dataclass(frozen=True)
class OutputAccuracy:
    """One output over all samples."""

    name: str
    sqnr_db: float
    """Of the sums over all samples."""
    worst_sqnr_db: float
    """Of the worst sample."""
    cosine: float
    agreement: float | None
    """Share (0..1) of samples with the same best class; None if it cannot be class scores."""


@dataclass(frozen=True)
class Accuracy:
    """A quantised model against the float one."""

    samples: int
    outputs: tuple[OutputAccuracy, ...]
    labelled: int = 0
    """Samples with a label."""
    top1_float: float | None = None
    """Share (0..1) of labelled samples the float model is right about."""
    top1_quant: float | None = None

    @property
    def sqnr_db(self) -> float:
        """SQNR of the worst output, over all samples."""
        return min((item.sqnr_db for item in self.outputs), default=math.inf)

    @property
    def worst_sqnr_db(self) -> float:
        """SQNR of the worst sample of the worst output."""
        return min((item.worst_sqnr_db for item in self.outputs), default=math.inf)

    @property
    def agreement(self) -> float | None:
        """Share of samples with the same best class, of the worst output that has classes."""
        shares = [item.agreement for item in self.outputs if item.agreement is not None]
        return min(shares) if shares else None

    @property
    def drop(self) -> float | None:
        """Loss of top-1 (with labels), else share of samples whose best class changed; 0..1."""
        if self.top1_float is not None and self.top1_quant is not None:
            return max(0.0, self.top1_float - self.top1_quant)
        return None if self.agreement is None else 1.0 - self.agreement

    def words(self) -> str:
        """Return the figures in one line."""
        parts = [f"SQNR {self.sqnr_db:.1f} dB"]
        if self.agreement is not None:
            parts.append(f"same best class {self.agreement:.1%}")
        if self.top1_float is not None and self.top1_quant is not None:
            parts.append(f"top-1 {self.top1_quant:.1%}, float {self.top1_float:.1%}")
        return f"{', '.join(parts)}, over {self.samples} samples (measured)"

    def record(self) -> dict[str, float | int | None]:
        """Return what a package records among its options: plain numbers."""
        found: dict[str, float | int | None] = {
            "accuracy_samples": self.samples,
            "accuracy_sqnr_db": _finite(self.sqnr_db),
            "accuracy_agreement": self.agreement,
        }
        if self.labelled:
            found |= {"accuracy_top1": self.top1_quant, "accuracy_float_top1": self.top1_float}
        return found

    def to_json(self) -> dict[str, Any]:
        """Return plain data; dB are None where there is no noise, which JSON cannot say."""
        return {
            **asdict(self),
            "outputs": [
                {key: _finite(value) for key, value in asdict(item).items()}
                for item in self.outputs
            ],
            "sqnr_db": _finite(self.sqnr_db),
            "worst_sqnr_db": _finite(self.worst_sqnr_db),
            "agreement": self.agreement,
            "drop": self.drop,
        }


def _finite(value: Any) -> Any:
    return value if not isinstance(value, float) or math.isfinite(value) else None


@dataclass
class _Output:
    total: LayerError
    worst: float = math.inf
    same: int = 0
    scored: bool = False


def measure(
    compiled: CompiledLike,
    samples: Iterable[Mapping[str, Array]],
    labels: Sequence[int] | None = None,
    *,
    progress: Callable[[int], None] | None = None,
) -> Accuracy:
    """Run the float and the quantised level on `samples` and compare all outputs.

    Args:
        compiled: a compiled model, int8 or fp16.
        samples: inputs by name.
        labels: the class of every sample, as many as samples; judged by the first output that can
            hold class scores.
        progress: called with the number of samples done.

    Raises:
        TilewrightError: E0301, there are no samples, or labels do not fit them or the outputs.
    """
    from tilewright.quant.reference import QuantSession
    from tilewright.runtime.float_executor import TopSession

    top, quant = compiled.stages["top"], compiled.stages["quant"]
    reference = TopSession(saturating(top.module), top.weights)
    session = QuantSession(quant.module, quant.weights)
    found = {name: _Output(LayerError(name)) for name in session.outputs}
    right = [0, 0]
    scores: str | None = None
    count = 0
    for sample in samples:
        wanted, got = reference.run(sample), session.run(sample)
        for name, output in found.items():
            a, b = wanted[name], got[name]
            one = LayerError(name)
            one.update(a, b)
            output.total.update(a, b)
            output.worst = min(output.worst, decibel(one.signal, one.noise))
            output.scored = holds_scores(a.shape) and a.dtype.kind == "f"
            if output.scored:
                output.same += int(a.argmax() == b.argmax())
                scores = scores or name
        if labels is not None:
            if scores is None:
                raise TilewrightError(
                    "E0301",
                    "labels were given, but no output holds class scores",
                    [f"outputs: {', '.join(f'{n} {list(v.shape)}' for n, v in wanted.items())}"],
                    "without labels the signal to noise ratio is measured: --min-sqnr",
                )
            if count >= len(labels):
                raise TilewrightError("E0301", f"there are more samples than labels ({count})")
            for place, values in enumerate((wanted[scores], got[scores])):
                right[place] += int(values.reshape(-1).argmax() == labels[count])
        count += 1
        if progress is not None:
            progress(count)
    if not count:
        raise TilewrightError("E0301", "there are no samples to measure the accuracy on")
    outputs = tuple(
        OutputAccuracy(
            name,
            output.total.sqnr,
            output.worst,
            output.total.cosine,
            output.same / count if output.scored else None,
        )
        for name, output in found.items()
    )
    if labels is None:
        return Accuracy(count, outputs)
    return Accuracy(count, outputs, count, right[0] / count, right[1] / count)


@dataclass(frozen=True)
class Limits:
    """What a compile must keep; None: no limit."""

    max_drop: float | None = None
    """Largest loss of top-1, or share of changed answers without labels; 0..1."""
    min_sqnr: float | None = None
    """Least SQNR of the worst output over all samples, dB."""

    def __bool__(self) -> bool:
        """Whether there is a limit."""
        return self.max_drop is not None or self.min_sqnr is not None

    def broken(self, accuracy: Accuracy) -> list[str]:
        """Return what is beyond the limits, in words with figures; nothing if all is kept.

        Raises:
            UsageError: E0702, `max_drop` is asked for and no output holds class scores.
        """
        found: list[str] = []
        if self.max_drop is not None:
            drop = accuracy.drop
            if drop is None:
                raise UsageError(
                    "E0702",
                    "--max-drop needs an output of class scores, and the model has none",
                    hint="give --min-sqnr DB instead",
                )
            if drop > self.max_drop + 1e-12:
                found.append(_drop_text(accuracy, self.max_drop))
        if self.min_sqnr is not None and accuracy.sqnr_db < self.min_sqnr:
            worst = min(accuracy.outputs, key=lambda item: item.sqnr_db)
            found.append(
                f'output "{worst.name}" has an SQNR of {worst.sqnr_db:.1f} dB over '
                f"{accuracy.samples} samples; at least {self.min_sqnr:g} dB are asked for"
            )
        return found


def _drop_text(accuracy: Accuracy, limit: float) -> str:
    if accuracy.top1_float is not None and accuracy.top1_quant is not None:
        return (
            f"top-1 is {accuracy.top1_quant:.1%}, of the float model {accuracy.top1_float:.1%}, "
            f"over {accuracy.labelled} labelled samples; a loss of {limit:.2%} at most is allowed"
        )
    changed = round((1 - (accuracy.agreement or 0.0)) * accuracy.samples)
    return (
        f"the best class differs from the float model's for {changed} of {accuracy.samples} "
        f"samples; {limit:.2%} at most are allowed"
    )


def parse_drop(text: str) -> float:
    """Read `--max-drop`: `1%`, or a share `0.01`.

    Raises:
        UsageError: E0702, it is neither, or not 0..100 %.
    """
    body = text.strip()
    try:
        value = float(body.removesuffix("%")) / (100 if body.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise UsageError(
            "E0702",
            f"--max-drop `{text}` must be a share of samples",
            ["for example 1% or 0.01; 0% to 100%"],
        )
    return value


def too_large(broken: Sequence[str], details: Sequence[str]) -> TilewrightError:
    """Return the error of limits that are not kept: what is beyond, then causes and remedies."""
    return TilewrightError(
        "E0303",
        "quantization accuracy drop too large",
        [*broken, *details],
        "no package was written; `tilewright compare MODEL --levels float,quant --advice` shows "
        "all layers",
    )
