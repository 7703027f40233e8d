"""Float against quantised, layer by layer: on a terminal (at most 100 columns), and as plain data.

`report.accuracy_html` draws the same as a page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tilewright.report.text import table

if TYPE_CHECKING:
    from tilewright.quant.channels import Channels, ScaleFinding
    from tilewright.quant.compare import Comparison, Layer

NAME = 32
"""Columns for a layer's name; a longer one keeps its end, where names differ."""
FINDINGS = 8
"""Findings of the scale inspection on a terminal."""


@dataclass
class AccuracyReport:
    """What a comparison of float and quantised found."""

    model: str
    target: str
    dtype: str
    comparison: Comparison
    findings: list[ScaleFinding] = field(default_factory=list["ScaleFinding"])
    channels: dict[str, Channels] = field(default_factory=dict[str, "Channels"])
    weights: dict[str, Any] = field(default_factory=dict[str, Any])
    """Largest magnitude of every output channel of layers with constant weights."""


def short(name: str, columns: int = NAME) -> str:
    """Return a name of at most so many columns."""
    return name if len(name) <= columns else "…" + name[1 - columns :]


def decibels(value: float) -> str:
    """Return a ratio in dB; `exact` without noise."""
    if value == math.inf:
        return "exact"
    return "none" if value == -math.inf else f"{value:.1f}"


def percent(value: float) -> str:
    """Return a share in three significant digits at most: `12 %`, `0.3 %`, `<0.1 %`."""
    if value == 0:
        return "0"
    if value < 0.0005:
        return "<0.1 %"
    return f"{value:.1%}".replace("%", " %") if value < 0.1 else f"{100 * value:.0f} %"


CAUSES = {"range": "range", "operand": "operand", "weights": "weights", "none": ""}


def cause_text(comparison: Comparison, layer: Layer) -> str:
    """Say what makes most of a layer's isolated error."""
    kind, name = comparison.cause(layer)
    return {
        "range": "the codes of its result",
        "operand": f"the codes of `{name}`, which it reads",
        "weights": "rounding of its weights and biases",
        "none": "",
    }[kind]


def text(report: AccuracyReport, rows: int = 20) -> list[str]:
    """Return the lines for a terminal, the `rows` worst layers among them."""
    found = report.comparison
    lines = [
        f"float against {report.dtype}: {len(found.layers)} layers over {found.samples} "
        f"sample{'s' * (found.samples != 1)}, worst first"
    ]
    for output in found.outputs:
        agreement = found.agreement.get(output.name)
        best = "" if agreement is None else f", same best class {percent(agreement)}"
        lines.append(
            f"  output {short(output.name, 40)}: SQNR {decibels(output.sqnr)} dB, cosine "
            f"{output.cosine:.5f}{best}"
        )
    shown = [layer for layer in found.worst() if layer.isolated.noise or layer.accumulated.noise]
    if not shown:
        return [*lines, "  every layer is exact"]
    lines += table(
        ("layer", "isolated", "own", "arrives", "cosine", "steps", "clipped", "output", "mostly"),
        [_row(found, layer) for layer in shown[:rows]],
        "lrrrrrrrl",
    ).splitlines()
    if len(shown) > rows:
        lines.append(f"  and {len(shown) - rows} layers more (--rows, --json, --html)")
    lines.append(
        "  dB: isolated, the integer layer of quantised float inputs; own, less those inputs;"
    )
    lines.append(
        "  arrives, with all before. steps: largest difference that arrives. output: share of its"
    )
    lines.append("  error that the layer alone makes. mostly: what the isolated error comes from.")
    return lines + blame(report) + scales(report)


def blame(report: AccuracyReport) -> list[str]:
    """Return which layers make the output's error."""
    found = report.comparison
    if not found.injected:
        return []
    worst = [layer for layer in found.blamed(5) if (layer.to_output or 0) > 0]
    if not worst:
        return []
    parts = [f"{short(layer.name)} {percent(layer.to_output or 0)}" for layer in worst]
    return [
        f"most of the output's error (measured on {found.injected} samples):",
        *(f"  {part}" for part in parts),
    ]


def scales(report: AccuracyReport) -> list[str]:
    """Return the first findings of the scale inspection."""
    if not report.findings:
        return []
    lines = ["scales:"]
    for item in report.findings[:FINDINGS]:
        lines += wrapped(f"{short(item.layer)}: {item.text}")
    more = len(report.findings) - FINDINGS
    if more > 0:
        lines.append(f"  and {more} findings more (--json, --html)")
    return lines


def wrapped(line: str, indent: str = "  ") -> list[str]:
    """Return a line broken to 100 columns."""
    import textwrap

    return textwrap.wrap(
        line, 100, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
    )


def _row(found: Comparison, layer: Layer) -> tuple[str, ...]:
    steps = layer.steps
    return (
        short(layer.name),
        decibels(layer.isolated.sqnr),
        decibels(layer.own.sqnr),
        decibels(layer.sqnr),
        f"{layer.accumulated.cosine:.4f}",
        "" if steps is None else f"{steps:.1f}" if steps < 100 else f"{steps:.0f}",
        percent(layer.clipped_share) if layer.scale is not None else "",
        "" if layer.to_output is None else percent(layer.to_output),
        "host" if layer.host is not None else CAUSES[found.cause(layer)[0]],
    )


def to_json(report: AccuracyReport) -> dict[str, Any]:
    """Return everything as plain data; dB that are infinite stay so."""
    found = report.comparison
    return {
        "model": report.model,
        "target": report.target,
        "dtype": report.dtype,
        "samples": found.samples,
        "injected_samples": found.injected,
        "outputs": [
            {
                "name": item.name,
                "sqnr_db": item.sqnr,
                "cosine": item.cosine,
                "largest": item.largest,
                "agreement": found.agreement.get(item.name),
            }
            for item in found.outputs
        ],
        "layers": [layer_json(found, layer) for layer in found.worst()],
        "blamed": [layer.name for layer in found.blamed()],
        "scales": [finding_json(item) for item in report.findings],
    }


def layer_json(found: Comparison, layer: Layer) -> dict[str, Any]:
    """Return one layer as plain data."""
    kind, name = found.cause(layer)
    return {
        "layer": layer.name,
        "op": layer.kind,
        "isolated_db": layer.isolated.sqnr,
        "own_db": layer.own.sqnr,
        "codes_db": layer.codes.sqnr,
        "accumulated_db": layer.sqnr,
        "cosine": layer.accumulated.cosine,
        "largest_steps": layer.steps,
        "clipped": layer.clipped_share,
        "to_output": layer.to_output,
        "cause": kind,
        "cause_value": name,
        "scale": layer.scale,
        "zero": layer.zero,
        "range": None if layer.low is None else [layer.low, layer.high],
        "seen": [layer.seen_low, layer.seen_high] if layer.seen_low <= layer.seen_high else None,
        "host": layer.host,
    }


def finding_json(item: ScaleFinding) -> dict[str, Any]:
    """Return one finding as plain data."""
    return {
        "layer": item.layer,
        "kind": item.kind,
        "text": item.text,
        "channels": list(item.channels),
        "ratio": item.ratio,
        "weights": item.weights,
        "to_output": item.to_output,
    }


def names(items: Sequence[str], most: int = 4) -> str:
    """Return names in one line, the first `most`."""
    more = len(items) - most
    return ", ".join(items[:most]) + (f" and {more} more" if more > 0 else "")
