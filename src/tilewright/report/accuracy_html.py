"""The accuracy report as one HTML file: drawings are SVG in the page, nothing comes from elsewhere.

Along the network: isolated and accumulated SQNR of every layer. For the worst layers: histograms
of float and dequantised values with the codes' range marked, and the range of every channel.
"""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Any

from tilewright.report.accuracy import AccuracyReport, cause_text, decibels, names, percent
from tilewright.report.html import html_table, page

if TYPE_CHECKING:
    from tilewright.quant.channels import Channels
    from tilewright.quant.compare import Layer

WIDTH, HEIGHT, LEFT, BOTTOM, MARGIN = 1000, 260, 50, 34, 12
DRAWN = 12
"""Layers whose distribution and channels are drawn."""
CEILING = 60.0
"""dB at the top of the bar chart; what is better is drawn to there."""
BLUE, ORANGE, RED, GREY = "#3b7dd8", "#e08a2e", "#c23b3b", "#9aa7b5"


def accuracy_html(report: AccuracyReport) -> str:
    """Return the page."""
    found = report.comparison
    title = escape(f"{report.model} on {report.target}: float against {report.dtype}")
    parts = [
        f"<h1>{title}</h1>",
        f'<p class="note">{found.samples} samples; effects on the output on {found.injected} of '
        "them. All integers are those of the exact reference.</p>",
        "<h2>Outputs</h2>",
        html_table(
            ("output", "SQNR dB", "cosine", "largest difference", "same best class"),
            [
                [
                    escape(item.name),
                    decibels(item.sqnr),
                    f"{item.cosine:.5f}",
                    f"{item.largest:.4g}",
                    percent(found.agreement[item.name]) if item.name in found.agreement else "",
                ]
                for item in found.outputs
            ],
        ),
        "<h2>Along the network</h2>",
        _network(report),
        '<p class="note">SQNR of every layer in order of execution: <b style="color:'
        f'{BLUE}">isolated</b> (the layer by itself, of quantised float inputs) and <b style="color'
        f":{ORANGE}\">accumulated</b> (as it arrives, with all before). Grey bars: the layer's "
        "share of the output's error, on a scale of its own. Point at a bar for its name.</p>",
        "<h2>Layers, worst first</h2>",
        _layers(report),
        "<h2>Scale inspection</h2>",
        _findings(report),
        "<h2>Distributions of the worst layers</h2>",
        f'<p class="note"><b style="color:{BLUE}">float</b> against <b style="color:{ORANGE}">'
        "dequantised</b> values as they arrive, counts on a logarithmic scale; the red lines are "
        "the ends of the codes' range.</p>",
        *_worst(report),
    ]
    return page(title, parts)


def _worst(report: AccuracyReport) -> list[str]:
    """Return the drawings of the layers with most effect, and of the worst by themselves."""
    found = report.comparison
    chosen = [*found.blamed(DRAWN // 2), *found.worst(DRAWN)]
    parts: list[str] = []
    for layer in list({item.name: item for item in chosen}.values())[:DRAWN]:
        channels = report.channels.get(layer.name)
        if channels is None:
            continue
        parts += [
            f"<h3>{escape(layer.name)}</h3>",
            f'<p class="note">{escape(layer.kind)}, isolated {decibels(layer.isolated.sqnr)} dB, '
            f"arrives {decibels(layer.sqnr)} dB, {percent(layer.clipped_share)} clipped; mostly "
            f"{escape(cause_text(found, layer)) or 'nothing'}</p>",
            _histogram(layer, channels),
        ]
        if len(channels.magnitudes) > 1:
            parts.append(_channels(layer, channels))
    return parts


def _bar(x: float, y: float, w: float, h: float, fill: str, tip: str, opacity: float = 0.75) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(w, 0.5):.2f}" height="{max(h, 0):.1f}" '
        f'fill="{fill}" fill-opacity="{opacity}"><title>{escape(tip)}</title></rect>'
    )


def _text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(label: str, shapes: list[str], height: int = HEIGHT) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label, quote=True)}">'
        f"{''.join(shapes)}</svg>"
    )


def _network(report: AccuracyReport) -> str:
    layers = report.comparison.layers
    if not layers:
        return '<p class="note">The levels share no layer.</p>'
    width, height = WIDTH - LEFT - MARGIN, HEIGHT - BOTTOM - MARGIN
    pitch = width / len(layers)
    most = max((layer.to_output or 0.0 for layer in layers), default=0.0) or 1.0
    shapes: list[str] = []

    def tall(db: float) -> float:
        return height * min(max(db, 0.0), CEILING) / CEILING

    for place, layer in enumerate(layers):
        x = LEFT + place * pitch
        tip = (
            f"{layer.name} ({layer.kind}): isolated {decibels(layer.isolated.sqnr)} dB, arrives "
            f"{decibels(layer.sqnr)} dB"
        )
        share = layer.to_output
        if share:
            h = height * share / most
            shapes.append(_bar(x, MARGIN + height - h, pitch, h, GREY, f"{tip}, {share:.1%}", 0.3))
        for at, db, fill in ((0.1, layer.isolated.sqnr, BLUE), (0.5, layer.sqnr, ORANGE)):
            h = tall(db)
            shapes.append(_bar(x + at * pitch, MARGIN + height - h, 0.4 * pitch, h, fill, tip))
    for db in range(0, int(CEILING) + 1, 20):
        shapes.append(_text(LEFT - 6, MARGIN + height - tall(db) + 4, f"{db} dB", "end"))
    shapes.append(_text(LEFT, HEIGHT - 12, "first layer", "start"))
    shapes.append(_text(WIDTH - MARGIN, HEIGHT - 12, "last layer", "end"))
    return _svg("SQNR along the network", shapes)


def _layers(report: AccuracyReport) -> str:
    found = report.comparison
    rows = [
        [
            f'<span title="{escape(layer.name, quote=True)}">{escape(layer.name)}</span>',
            escape(layer.kind),
            decibels(layer.isolated.sqnr),
            decibels(layer.own.sqnr),
            decibels(layer.codes.sqnr),
            decibels(layer.sqnr),
            f"{layer.accumulated.cosine:.5f}",
            "" if layer.steps is None else f"{layer.steps:.1f}",
            percent(layer.clipped_share) if layer.scale is not None else "",
            "" if layer.to_output is None else percent(layer.to_output),
            "" if layer.scale is None else f"{layer.scale:.4g}",
            escape(f"on the host: {layer.host}" if layer.host else cause_text(found, layer)),
        ]
        for layer in found.worst()
    ]
    heads = (
        "layer", "operation", "isolated dB", "own dB", "codes dB", "arrives dB", "cosine",
        "largest, steps", "clipped", "of the output's error", "step", "mostly",
    )  # fmt: skip
    return f'<div class="scroll">{html_table(heads, rows, (1, 11))}</div>'


def _findings(report: AccuracyReport) -> str:
    if not report.findings:
        return '<p class="note">No channel and no range stands out.</p>'
    rows = [
        [
            escape(item.layer),
            escape(item.kind),
            "weights" if item.weights else "result",
            escape(item.text),
            escape(names([str(channel) for channel in item.channels], 16)),
        ]
        for item in report.findings
    ]
    heads = ("layer", "what", "of", "seen", "channels")
    return f'<div class="scroll">{html_table(heads, rows, (1, 2, 3, 4))}</div>'


def _histogram(layer: Layer, channels: Channels) -> str:
    real: Any = channels.real
    coded: Any = channels.coded
    width, height = WIDTH - LEFT - MARGIN, HEIGHT - BOTTOM - MARGIN
    most = math.log10(1 + max(int(real.max()), int(coded.max()), 1))
    low, high = float(channels.edges[0]), float(channels.edges[-1])
    pitch = width / len(real)
    shapes: list[str] = []
    for place in range(len(real)):
        x = LEFT + place * pitch
        at = f"{channels.edges[place]:.4g}..{channels.edges[place + 1]:.4g}"
        for offset, counts, fill, word in (
            (0.05, real, BLUE, "float"),
            (0.5, coded, ORANGE, "dequantised"),
        ):
            count = int(counts[place])
            if count:
                h = height * math.log10(1 + count) / most
                tip = f"{at}: {count:,} {word}"
                y = MARGIN + height - h
                shapes.append(_bar(x + offset * pitch, y, 0.45 * pitch, h, fill, tip))

    def across(value: float) -> float:
        return LEFT + (value - low) / (high - low) * width

    for end in (layer.low, layer.high):
        if end is not None:
            x = across(end)
            shapes.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{MARGIN}" y2="{MARGIN + height}" '
                f'stroke="{RED}" stroke-width="1.5"/>'
            )
            shapes.append(_text(x, HEIGHT - 4, f"{end:.4g}"))
    shapes.append(_text(LEFT, HEIGHT - 18, f"{low:.4g}", "start"))
    shapes.append(_text(WIDTH - MARGIN, HEIGHT - 18, f"{high:.4g}", "end"))
    return _svg(f"distribution of {layer.name}", shapes)


def _channels(layer: Layer, channels: Channels) -> str:
    """Draw the range of every channel; outliers are red."""
    height, tall = 150, 150 - BOTTOM - MARGIN
    width = WIDTH - LEFT - MARGIN
    low = min(0.0, float(channels.low.min()))
    high = max(0.0, float(channels.high.max()))
    span = (high - low) or 1.0
    count = len(channels.low)
    pitch = width / count
    marked = _outlying(channels)
    shapes: list[str] = []
    for place in range(count):
        top, bottom = float(channels.high[place]), float(channels.low[place])
        y = MARGIN + (high - top) / span * tall
        tip = f"channel {place}: {bottom:.4g}..{top:.4g}"
        fill = RED if place in marked else BLUE
        h = max((top - bottom) / span * tall, 0.5)
        shapes.append(_bar(LEFT + place * pitch, y, 0.9 * pitch, h, fill, tip))
    shapes.append(_text(LEFT - 6, MARGIN + 8, f"{high:.3g}", "end"))
    shapes.append(_text(LEFT - 6, MARGIN + tall, f"{low:.3g}", "end"))
    shapes.append(_text(LEFT, height - 12, "channel 0", "start"))
    shapes.append(_text(WIDTH - MARGIN, height - 12, f"channel {count - 1}", "end"))
    return _svg(f"channels of {layer.name}", shapes, height)


def _outlying(channels: Channels) -> set[int]:
    from tilewright.quant.channels import outliers

    return set(outliers(channels.magnitudes)[0])
