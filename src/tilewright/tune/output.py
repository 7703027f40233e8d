"""A sweep as a text table, CSV, and a page with the scatter of time against area."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from html import escape

from tilewright.report.html import html_table, page
from tilewright.report.text import size, table
from tilewright.tune.run import Row, Sweep
from tilewright.tune.space import amount, describe


def sweep_text(sweep: Sweep) -> str:
    """Return the table, chips by area, and what could not be tried."""
    names = list(sweep.rows[0].point.settings) if sweep.rows else []
    rows = [
        (
            *(amount(name, row.point.settings[name]) for name in names),
            f"{row.area:,.0f}",
            *(f"{item.cycles:,}" if item.cycles else "failed" for item in row.results.values()),
            f"{row.milliseconds:,.3f}" if row.milliseconds else "",
            f"{row.ratio:.2f}" if row.ratio else "",
            "*" if row.front else "",
        )
        for row in by_area(sweep)
    ]
    heads = (*names, "area", *sweep.models, "ms", "x bound", "front")
    lines = [table(heads, rows, "r" * (len(heads) - 1) + "l")] if rows else []
    if rows:
        means = " (geometric means)" if len(sweep.models) > 1 else ""
        lines.append(
            f"cycles simulated; ms and x bound{means}; area in MAC cells, a proxy; "
            "* no other chip is better in area and time"
        )
    lines += failures(sweep)
    return "\n".join(lines)


def failures(sweep: Sweep) -> list[str]:
    """Return a line for each combination that is no chip, or does not run a model."""
    lines: list[str] = []
    for item in sweep.illegal:
        lines.append(f"no legal chip: {describe(item.settings)}: {'; '.join(item.reasons)}")
    for row in sweep.rows:
        for name, result in row.results.items():
            if result.error:
                details = f" ({'; '.join(result.details[:2])})" if result.details else ""
                chip = describe(row.point.settings)
                lines.append(f"failed: {name} {chip}".rstrip() + f": {result.error}{details}")
    return lines


def by_area(sweep: Sweep) -> list[Row]:
    """Return the chips, smallest first; of equal area in the order of the sweep."""
    return sorted(sweep.rows, key=lambda row: row.area)


def sweep_csv(sweep: Sweep) -> str:
    """Return one line for each chip and model, in the order of the sweep."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = list(sweep.rows[0].point.settings) if sweep.rows else []
    writer.writerow(
        [
            *names, "model", "cycles", "milliseconds", "bound_cycles", "array_use", "ddr_bytes",
            "sram_peak", "limited_by", "macs", "sram_bytes", "accumulator_bits", "lanes", "area",
            "front", "error",
        ]
    )  # fmt: skip
    for row in sweep.rows:
        parts = row.parts
        for model, item in row.results.items():
            figures = (
                item.cycles, item.milliseconds, item.bound_cycles, item.array_use, item.ddr_bytes,
                item.sram_peak, item.limited_by,
            )  # fmt: skip
            writer.writerow(
                [
                    *(row.point.settings[name] for name in names), model,
                    *(("",) * len(figures) if item.error else figures),
                    parts.mac, parts.sram_byte, parts.accumulator_bit, parts.lane, row.area,
                    int(row.front), item.error,
                ]
            )  # fmt: skip
    return out.getvalue()


def sweep_html(sweep: Sweep) -> str:
    """Return the page: scatter, table, and what could not be tried."""
    title = escape(f"{sweep.target} tuned for {', '.join(sweep.models)}")
    weights = ", ".join(f"{name} {value:g}" for name, value in sweep.weights.to_json().items())
    parts = [
        f"<h1>{title}</h1>",
        _scatter(sweep),
        '<p class="note">Each dot is a chip: its area (a proxy in multiply-accumulate cells; '
        f"weights: {escape(weights)}) against the time of the models (simulated"
        f"{', geometric mean' if len(sweep.models) > 1 else ''}). Orange: no other chip is better "
        "in both.</p>",
        "<h2>Chips</h2>",
        _rows(sweep),
    ]
    if lost := failures(sweep):
        parts += ["<h2>Not possible</h2>", f"<pre>{escape(chr(10).join(lost))}</pre>"]
    return page(title, parts)


def _rows(sweep: Sweep) -> str:
    heads = (
        "chip", "MACs", "SRAM", "M register bits", "lanes", "area",
        *(escape(name) for name in sweep.models), "ms", "x bound", "front",
    )  # fmt: skip
    cells = [
        (
            escape(describe(row.point.settings)),
            f"{row.parts.mac:,}",
            size(row.parts.sram_byte),
            f"{row.parts.accumulator_bit:,}",
            f"{row.parts.lane}",
            f"{row.area:,.0f}",
            *(
                f'<span title="{escape(item.error, quote=True)}">failed</span>'
                if item.error
                else f'<span title="limited by {escape(item.limited_by)}">{item.cycles:,}</span>'
                for item in row.results.values()
            ),
            f"{row.milliseconds:,.3f}" if row.milliseconds else "",
            f"{row.ratio:.2f}" if row.ratio else "",
            "*" if row.front else "",
        )
        for row in by_area(sweep)
    ]
    return f'<div class="scroll">{html_table(heads, cells)}</div>'


_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _MARGIN = 1000, 420, 80, 44, 16
_BLUE, _ORANGE = "#3b7dd8", "#e08a2e"


def _scale(values: Sequence[float], low: float, high: float) -> Callable[[float], float]:
    """Return the place of a value between `low` and `high`, logarithmic."""
    first, last = math.log(min(values)), math.log(max(values))
    room = max(last - first, 0.1)
    middle = (first + last) / 2

    def place(value: float) -> float:
        return (low + high) / 2 + (math.log(value) - middle) / (1.1 * room) * (high - low)

    return place


def _ticks(values: Sequence[float]) -> list[float]:
    """Return round numbers within the values' range, three or more if there are; else its ends."""
    low, high = min(values), max(values)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    inside: list[float] = []
    for steps in (
        (1,),
        (1, 2, 5),
        (1, 1.5, 2, 3, 4, 5, 7),
        tuple(at / 10 for at in range(10, 100)),
    ):
        found = [step * 10.0**power for power in powers for step in steps]
        inside = [value for value in found if low <= value <= high]
        if len(inside) >= 3:
            return inside
    return inside if len(inside) > 1 else sorted({low, high})


def _scatter(sweep: Sweep) -> str:
    able = [row for row in by_area(sweep) if row.milliseconds and row.area > 0]
    if not able:
        return '<p class="note">No chip runs all models.</p>'
    areas, times = [row.area for row in able], [row.milliseconds for row in able]
    x = _scale(areas, _LEFT, _WIDTH - _MARGIN)
    y = _scale(times, _HEIGHT - _BOTTOM, _MARGIN)
    front = sorted((row for row in able if row.front), key=lambda row: (row.area, row.milliseconds))
    shapes: list[str] = []
    path = [f"M{x(front[0].area):.1f} {y(front[0].milliseconds):.1f}"]
    for row in front[1:]:
        path.append(f"H{x(row.area):.1f}V{y(row.milliseconds):.1f}")
    shapes.append(f'<path d="{"".join(path)}" fill="none" stroke="{_ORANGE}" stroke-width="1.5"/>')
    # The front comes last, so that nothing hides it.
    for row in sorted(able, key=lambda row: row.front):
        tip = f"{describe(row.point.settings)}: area {row.area:,.0f}, {row.milliseconds:,.3f} ms"
        shapes.append(
            f'<circle cx="{x(row.area):.1f}" cy="{y(row.milliseconds):.1f}" r="5" '
            f'fill="{_ORANGE if row.front else _BLUE}" fill-opacity=".75">'
            f"<title>{escape(tip)}</title></circle>"
        )
    for value in _ticks(areas):
        shapes.append(
            f'<text x="{x(value):.1f}" y="{_HEIGHT - 24}" text-anchor="middle">{value:,.0f}</text>'
        )
    for value in _ticks(times):
        shapes.append(
            f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:,.4g}</text>'
        )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="time against area">'
        f"{''.join(shapes)}"
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 6}" text-anchor="middle">area (MAC cells)</text>'
        f'<text x="14" y="{_HEIGHT / 2}" transform="rotate(-90 14 {_HEIGHT / 2})" '
        f'text-anchor="middle">milliseconds</text></svg>'
    )
