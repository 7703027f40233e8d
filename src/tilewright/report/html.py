"""The report as one HTML file: no script from elsewhere, no fonts, opens offline."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from html import escape
from itertools import count

from tilewright.report.report import LayerRow, Report
from tilewright.report.text import SPAN_COLUMNS, size, slow_layers, span_cells, summary

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1240px; padding: 0 1rem;
  color: #1d2733; background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px;
  width: 100% }
th, td { padding: 3px 8px; border-bottom: 1px solid #e3e8ee; text-align: right;
  white-space: nowrap }
th { position: sticky; top: 0; background: #f4f6f9 }
th:first-child, td:first-child, th.l, td.l { text-align: left }
td:first-child { max-width: 320px; overflow: hidden; text-overflow: ellipsis }
.bar { background: #3b7dd8; height: 9px; display: inline-block } .host { color: #a05a00 }
.scroll { max-height: 560px; overflow: auto; border: 1px solid #e3e8ee }
svg { width: 100%; height: auto; background: #fbfcfd; border: 1px solid #e3e8ee }
svg text { font: 11px system-ui, sans-serif; fill: #4a5866 }
pre { background: #f4f6f9; padding: .8rem 1rem; overflow: auto }
.note { color: #5b6877; font-size: 13px }
"""


def to_html(report: Report) -> str:
    """Return the page."""
    title = escape(f"{report.model} on {report.target}")
    parts = [
        f"<h1>{title}</h1>",
        f"<pre>{escape(chr(10).join(summary(report)[1:]))}</pre>",
    ]
    if report.cycles:
        parts += [
            "<h2>Where the time goes</h2>",
            _engines(report),
            "<h2>Roofline</h2>",
            _roofline(report),
            '<p class="note">Each dot is a layer: how much it computes a byte of DDR it moves, '
            "against how fast it runs (simulated). The line is what the array and DDR allow.</p>",
            "<h2>Memory over time</h2>",
            _memory(report),
            '<p class="note">DDR addresses (upwards) touched by DMA over the run: loads blue, '
            "stores orange. Constants lie at the bottom, the workspace above.</p>",
        ]
    parts += ["<h2>Layers</h2>", _layers(report)]
    if any(len(row.layers) > 1 for row in report.steps):
        parts += [
            "<h2>Steps</h2>",
            _steps(report),
            '<p class="note">A step is a layer by itself, or several computed some rows at a time: '
            "a cascade.</p>",
        ]
    if any(row.spans.cycles for row in report.layers):
        parts += [
            "<h2>What limits each layer</h2>",
            _spans(report),
            '<p class="note">Shares of a layer\'s span, from its first start to its last end: an '
            "engine works, works while no other does, waits for a load, a store, another engine, a "
            "bank or DDR (simulated). Of the DMA channels the largest share.</p>",
        ]
    if slow := slow_layers(report):
        parts.append(f"<pre>{escape(chr(10).join(slow))}</pre>")
    if report.accuracy:
        parts += ["<h2>Accuracy</h2>", _accuracy(report)]
    if report.host:
        parts += ["<h2>On the host</h2>", _host(report)]
    return page(title, parts)


def page(title: str, parts: Iterable[str]) -> str:
    """Return a whole page; `title` and `parts` are HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{title}</title><style>{STYLE}</style></head><body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def html_table(
    heads: Iterable[str], rows: Iterable[Iterable[str]], words: Collection[int] = ()
) -> str:
    """Return a table; cells are HTML. Numbers are right-aligned; the columns `words` are not."""

    def cells(tag: str, row: Iterable[str]) -> str:
        kinds = (' class="l"' if at in words else "" for at in count())
        return "".join(
            f"<{tag}{kind}>{item}</{tag}>" for kind, item in zip(kinds, row, strict=False)
        )

    head = cells("th", heads)
    body = "".join(f"<tr>{cells('td', row)}</tr>\n" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"


def _engines(report: Report) -> str:
    names = list(dict.fromkeys(key for counters in report.engines.values() for key in counters))
    rows = [
        [
            escape(engine),
            *(
                f"{counters[name] / report.cycles:.1%}" if name in counters else ""
                for name in names
            ),
        ]
        for engine, counters in report.engines.items()
    ]
    return html_table(("engine", *(escape(name.replace("_", " ")) for name in names)), rows)


def _layers(report: Report) -> str:
    longest = max((row.cycles for row in report.layers), default=0) or 1
    rows: list[list[str]] = []
    for row in report.layers:
        fused = f" <span class='note'>+ {escape(', '.join(row.fused))}</span>" if row.fused else ""
        ratio = f"{row.ratio:.2f}" if row.ratio else ""
        rows.append(
            [
                f'<span title="{escape(row.name, quote=True)}">{escape(row.name)}</span>{fused}',
                escape(row.op),
                f"{row.cycles:,}" if row.device == "tpu" else '<span class="host">host</span>',
                f'<span class="bar" style="width:{100 * row.cycles / longest:.0f}px"></span>',
                f'<span title="{escape(row.mapping, quote=True)}">{row.bound_cycles:,.0f}</span>'
                if row.bound_cycles
                else "",
                ratio,
                row.limit if row.bound_cycles else "",
                f'<span title="{escape(row.limited.why, quote=True)}">'
                f"{escape(row.limited.what)}</span>",
                f"{row.macs:,}" if row.macs else "",
                size(row.ddr_bytes) if row.ddr_bytes else "",
                size(row.sram_bytes) if row.sram_bytes else "",
            ]
        )
    heads = (
        "layer", "operation", "cycles (simulated)", "", "roofline (estimated)", "x bound",
        "bound by", "limited by", "MACs", "DDR (simulated)", "SRAM",
    )  # fmt: skip
    return f'<div class="scroll">{html_table(heads, rows, (1, 3, 6, 7))}</div>'


def _steps(report: Report) -> str:
    rows = [
        [
            escape(", ".join(row.layers)),
            f"{row.cycles:,}",
            f"{row.bound_cycles:,.0f}",
            f"{row.ratio:.2f}" if row.ratio else "",
            row.limit if row.bound_cycles else "",
            f'<span title="{escape(row.limited.why, quote=True)}">'
            f"{escape(row.limited.what)}</span>",
            size(row.ddr_bytes),
            size(row.sram_bytes),
        ]
        for row in report.steps
    ]
    heads = (
        "layers", "cycles (simulated)", "roofline (estimated)", "x bound", "bound by", "limited by",
        "DDR (simulated)", "SRAM",
    )  # fmt: skip
    return f'<div class="scroll">{html_table(heads, rows, (4, 5))}</div>'


def _spans(report: Report) -> str:
    names = {"mac": "array", "vec": "vector unit", "dma": "DMA"}
    heads = ["layer", "span"]
    for title, engine, parts in SPAN_COLUMNS:
        whole = title if parts == ("busy",) else f"{names[engine]}: {title}"
        heads.append(whole)
    rows = [
        [escape(row.name), f"{row.spans.cycles:,}", *span_cells(row)]
        for row in report.layers
        if row.spans.cycles
    ]
    return f'<div class="scroll">{html_table(heads, rows)}</div>'


def _accuracy(report: Report) -> str:
    return html_table(
        ("what", "value", "over"),
        [[escape(row.name), escape(row.value), escape(row.over)] for row in report.accuracy],
        (1, 2),
    )


def _host(report: Report) -> str:
    return html_table(
        ("step", "layers", "reads", "writes", "why"),
        [
            [
                escape(str(step["name"])),
                escape(", ".join(str(layer) for layer in step["layers"])),
                size(step["read_bytes"]),
                size(step["write_bytes"]),
                escape(str(step["reason"])),
            ]
            for step in report.host
        ],
        (1, 4),
    )


_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _MARGIN = 1000, 360, 70, 40, 14


def _roofline(report: Report) -> str:
    peak = float(report.array_size**2)
    points = [
        (row.macs / row.ddr_bytes, row.macs / row.cycles, row)
        for row in report.layers
        if row.macs and row.cycles and row.ddr_bytes
    ]
    if not points:
        return '<p class="note">No layer computes on the array.</p>'
    ridge = peak / report.ddr_bytes_per_cycle
    lows, highs = [*(p[0] for p in points), ridge], [*(p[1] for p in points), peak]
    x0, x1 = math.log10(min(lows)) - 0.3, math.log10(max(lows)) + 0.3
    y0, y1 = math.log10(min(highs)) - 0.2, math.log10(max(highs)) + 0.2

    def place(intensity: float, rate: float) -> tuple[float, float]:
        x = (math.log10(intensity) - x0) / (x1 - x0)
        y = (math.log10(rate) - y0) / (y1 - y0)
        return (
            _LEFT + x * (_WIDTH - _LEFT - _MARGIN),
            _HEIGHT - _BOTTOM - y * (_HEIGHT - _BOTTOM - _MARGIN),
        )

    start = max(10**x0, 10**y0 / report.ddr_bytes_per_cycle)
    corners = [
        place(start, start * report.ddr_bytes_per_cycle),
        place(ridge, peak),
        place(10**x1, peak),
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    dots = "".join(_dot(row, *place(intensity, rate)) for intensity, rate, row in points)
    ticks = "".join(
        f'<text x="{place(10.0**power, 10**y0)[0]:.1f}" y="{_HEIGHT - 22}" '
        f'text-anchor="middle">{_power(power)}</text>'
        for power in range(math.ceil(x0), math.floor(x1) + 1)
    ) + "".join(
        f'<text x="{_LEFT - 6}" y="{place(10**x0, 10.0**power)[1] + 4:.1f}" '
        f'text-anchor="end">{_power(power)}</text>'
        for power in range(math.ceil(y0), math.floor(y1) + 1)
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="roofline">'
        f'<polyline points="{line}" fill="none" stroke="#1d2733" stroke-width="1.5"/>{dots}{ticks}'
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 6}" text-anchor="middle">MACs a DDR byte</text>'
        f'<text x="14" y="{_HEIGHT / 2}" transform="rotate(-90 14 {_HEIGHT / 2})" '
        f'text-anchor="middle">MACs a cycle</text></svg>'
    )


def _power(power: int) -> str:
    return f"{10**power:,}" if power >= 0 else f"{10.0**power:g}"


def _dot(row: LayerRow, x: float, y: float) -> str:
    tip = f"{row.name}: {row.cycles:,} cycles, {row.macs:,} MACs, {size(row.ddr_bytes)} of DDR"
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="#3b7dd8" fill-opacity=".65">'
        f"<title>{escape(tip)}</title></circle>"
    )


def _memory(report: Report) -> str:
    if not report.transfers:
        return '<p class="note">Nothing is transferred.</p>'
    top = max(item.ddr_high for item in report.transfers)
    width, height = _WIDTH - _LEFT - _MARGIN, _HEIGHT - _BOTTOM - _MARGIN
    shapes: list[str] = []
    for item in report.transfers:
        x = _LEFT + item.start / report.cycles * width
        w = max(0.6, (item.end - item.start) / report.cycles * width)
        h = max(0.8, (item.ddr_high - item.ddr_low) / top * height)
        y = _MARGIN + height - item.ddr_low / top * height - h
        fill = "#3b7dd8" if item.kind == "load" else "#e08a2e"
        shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{fill}" '
            f'fill-opacity=".7"><title>{escape(f"{item.kind} {item.layer}")}</title></rect>'
        )
    labels = (
        f'<text x="{_LEFT - 6}" y="{_MARGIN + 8}" text-anchor="end">{size(top)}</text>'
        f'<text x="{_LEFT - 6}" y="{_MARGIN + height}" text-anchor="end">0</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT - 18}">0</text>'
        f'<text x="{_WIDTH - _MARGIN}" y="{_HEIGHT - 18}" text-anchor="end">'
        f"{report.cycles:,} cycles</text>"
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="memory over time">'
        f"{''.join(shapes)}{labels}</svg>"
    )
