"""Scale inspection: channels with outlying ranges, dead ones, ranges that clip or are too wide.

One code step serves a whole activation tensor, so one channel with values far above the others
leaves those few codes. Weights have a step for every output channel; there an outlier costs only
its own channel, and is shown because per-tensor weights, or equalisation, would feel it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp
    from xdsl.ir import SSAValue

    from tilewright.ir.context import Decision
    from tilewright.ir.weights import WeightStore
    from tilewright.quant.compare import Comparison, Layer

Array = npt.NDArray[Any]

OUTLIER = 8.0
"""A channel's range over the median channel's from which it is an outlier: it costs 3 bits."""

TOO_WIDE = 4.0
"""Codes' range over the largest value seen from which it is too wide: 2 bits are never used."""

WORTH_DB = 30.0
"""Codes of a value that are better than this are no reason to look at its range."""

CLIP_FACTOR = 2.0
"""Squared error of a value's codes over that of a range that clips nothing, from which clipping
costs more than it gains."""

NOTICEABLE = 0.005
"""Share of the outputs' error below which a layer's scales are no reason for it: masks of
attention, whose large negative values are cut off without any effect."""

IMAGE_OPS = ("top.conv", "top.conv_transpose", "top.max_pool", "top.avg_pool")
"""Ops whose images are stored channels first where they have no `layout`."""

BINS = 96
"""Bars of a histogram."""

Kind = Literal["clips", "too wide", "outlier channels", "dead channels", "raised scales"]


@dataclass
class Channels:
    """Ranges by channel, and a histogram, of one activation."""

    name: str
    axis: int | None
    low: Array = field(default_factory=lambda: np.zeros(0))
    high: Array = field(default_factory=lambda: np.zeros(0))
    edges: Array = field(default_factory=lambda: np.zeros(0))
    """Ends of the bars, `BINS + 1`."""
    real: Array = field(default_factory=lambda: np.zeros(BINS, np.int64))
    """Float values in each bar; those beyond the ends are in the first and the last."""
    coded: Array = field(default_factory=lambda: np.zeros(BINS, np.int64))
    """Dequantised values in each bar."""

    @property
    def magnitudes(self) -> Array:
        """Largest magnitude of every channel."""
        return np.maximum(np.abs(self.low), np.abs(self.high))

    @property
    def dead(self) -> list[int]:
        """Channels that are zero in every sample."""
        return [int(c) for c in np.flatnonzero(self.magnitudes == 0)]


def outliers(magnitudes: Array) -> tuple[list[int], float]:
    """Return channels whose magnitude is `OUTLIER` times the median up, and the largest ratio.

    The median is taken of channels that are not dead; fewer than four channels have no outliers.
    """
    alive = magnitudes[magnitudes > 0]
    if alive.size < 4:
        return [], 1.0
    ratio = magnitudes / float(np.median(alive))
    found = [int(c) for c in np.flatnonzero(ratio >= OUTLIER)]
    return sorted(found, key=lambda c: -float(ratio[c])), float(ratio.max())


class Inspector:
    """Watches a comparison and keeps channel ranges and histograms of every layer."""

    def __init__(
        self,
        module: ModuleOp,
        ranges: Mapping[str, float] | None = None,
        histograms: bool = True,
    ) -> None:
        """Find the channel axis of every value.

        Args:
            module: the float `top` module.
            ranges: largest magnitudes seen at calibration, by value: where histograms end.
            histograms: count values too, not only the ranges of channels.
        """
        self.histograms = histograms
        self.axes = channel_axes(module)
        self.ranges = dict(ranges or {})
        self.found: dict[str, Channels] = {}

    def __call__(self, layer: Layer, real: Array, coded: Array) -> None:
        """Take in one sample of one layer."""
        if not real.size:
            return
        axis = self.axes.get(layer.name)
        if axis is not None and axis >= real.ndim:
            axis = None
        if layer.name not in self.found:
            self.found[layer.name] = self._start(layer, axis, real)
        kept = self.found[layer.name]
        if axis is not None:
            others = tuple(a for a in range(real.ndim) if a != axis)
            low, high = real.min(axis=others), real.max(axis=others)
            first = not kept.low.size
            kept.low = low if first else np.minimum(kept.low, low)
            kept.high = high if first else np.maximum(kept.high, high)
        if not self.histograms:
            return
        kept.real += _histogram(real, kept.edges)
        kept.coded += _histogram(coded, kept.edges)

    def _start(self, layer: Layer, axis: int | None, real: Array) -> Channels:
        ends = [float(real.min()), float(real.max()), 0.0]
        ends += [end for end in (layer.low, layer.high) if end is not None]
        seen = self.ranges.get(layer.name, 0.0)
        ends += [seen] if layer.seen_low >= 0 else [seen, -seen]
        low, high = min(ends), max(ends)
        slack = 0.02 * (high - low) or 1.0
        edges = np.linspace(low - slack, high + slack, BINS + 1)
        return Channels(layer.name, axis, edges=edges)


def _histogram(values: Array, edges: Array) -> Array:
    width = (edges[-1] - edges[0]) / BINS
    index = ((values.ravel() - np.float32(edges[0])) * np.float32(1 / width)).astype(np.int32)
    np.clip(index, 0, BINS - 1, out=index)
    return np.bincount(index, minlength=BINS)


def channel_axes(module: ModuleOp) -> dict[str, int]:
    """Return the channel axis of every value of a `top` module that is known to have channels.

    Images have it by their layout, matrices and sequences last; it moves with transpositions and
    is lost by a reshape.
    """
    from tilewright.dialects.quant import shape_of
    from tilewright.dialects.top.base import Attrs, is_absent
    from tilewright.quant.graph import argument_names, layer_of, main_function

    main = main_function(module)
    axes: dict[SSAValue, int] = {}
    names: dict[SSAValue, str] = dict(zip(main.body.block.args, argument_names(main), strict=True))
    for op in main.body.block.ops:
        if op.name in ("top.weight", "top.none", "func.return"):
            continue
        for index, result in enumerate(op.results):
            names[result] = layer_of(op) if not index else f"{layer_of(op)}:{index}"
        result = op.results[0]
        rank = len(shape_of(result))
        attrs = Attrs(op.attributes)
        if op.name in ("top.linear", "top.matmul", "top.layer_norm"):
            axes[result] = rank - 1
        elif rank == 4 and ("layout" in op.attributes or op.name in IMAGE_OPS):
            axis = rank - 1 if attrs.string("layout", "nchw") == "nhwc" else 1
            axes[result] = axis
            axes.setdefault(op.operands[0], axis)
        elif op.name == "top.transpose":
            if op.operands[0] in axes:
                axes[result] = attrs.ints("perm").index(axes[op.operands[0]])
        elif op.name != "top.reshape":
            for operand in op.operands:
                if not is_absent(operand) and operand in axes and len(shape_of(operand)) == rank:
                    axes[result] = axes[operand]
                    break
    # A value whose reader said where its channels are says it of the value it was moved from.
    return {names[value]: axis for value, axis in axes.items() if value in names}


@dataclass(frozen=True)
class ScaleFinding:
    """Something about a layer's scales that costs accuracy."""

    layer: str
    kind: Kind
    text: str
    """What was seen, with figures."""
    channels: tuple[int, ...] = ()
    ratio: float = 1.0
    """How far out: range over median, range over largest value, or its inverse."""
    weights: bool = False
    """Of the layer's weights, not of its result."""
    to_output: float | None = None
    """The layer's share (0..1) of the outputs' error; None: not measured."""

    @property
    def noticeable(self) -> bool:
        """Whether the layer's error reaches the outputs (or that is not known)."""
        return self.to_output is None or self.to_output >= NOTICEABLE


def inspect_scales(
    comparison: Comparison,
    found: Mapping[str, Channels],
    module: ModuleOp | None = None,
    weights: WeightStore | None = None,
    decisions: Iterable[Decision] = (),
) -> list[ScaleFinding]:
    """Return what is wrong with scales: those of layers that matter most to the output first.

    Args:
        comparison: float against quantised.
        found: an `Inspector`'s channels.
        module: the float module, for its weights.
        weights: its constants.
        decisions: the compile's, for channels whose scale had to be raised.
    """
    findings: list[ScaleFinding] = []
    order = {layer.name: place for place, layer in enumerate(comparison.blamed())}
    for layer in comparison.layers:
        findings += _range_findings(layer)
        channels = found.get(layer.name)
        if channels is not None and channels.low.size:
            findings += _channel_findings(layer, channels)
    if module is not None and weights is not None:
        findings += _weight_findings(module, weights)
    for decision in decisions:
        raised = decision.details.get("raised")
        if raised:
            findings.append(
                ScaleFinding(
                    decision.layer,
                    "raised scales",
                    f"{len(raised)} output channels have a larger weight step so that their bias "
                    "fits 32 bits",
                    tuple(raised),
                    weights=True,
                )
            )
    shares = {layer.name: layer.to_output for layer in comparison.layers}
    findings = [replace(item, to_output=shares.get(item.layer)) for item in findings]
    last = len(order)
    rank: dict[Kind, int] = {"clips": 0, "too wide": 0, "outlier channels": 1}
    # Faults of a range first; then what the values themselves are like, of weights last.
    findings.sort(
        key=lambda item: (
            item.weights,
            not item.noticeable,
            rank.get(item.kind, 2),
            order.get(item.layer, last),
        )
    )
    return findings


def _range_findings(layer: Layer) -> list[ScaleFinding]:
    if layer.scale is None or layer.low is None or layer.high is None or not layer.elements:
        return []
    if layer.codes.sqnr >= WORTH_DB:
        return []
    seen = max(abs(layer.seen_low), abs(layer.seen_high))
    held = max(abs(layer.low), abs(layer.high))
    wider = layer.scale * max(1.0, seen / held if held else math.inf)
    if layer.clipped and layer.codes.noise > CLIP_FACTOR * wider**2 / 12 * layer.elements:
        return [
            ScaleFinding(
                layer.name,
                "clips",
                f"codes reach {_span(layer.low, layer.high)}, values "
                f"{_span(layer.seen_low, layer.seen_high)}: {layer.clipped_share:.2%} of them are "
                "cut off",
                ratio=seen / held if held else math.inf,
            )
        ]
    if 0 < seen * TOO_WIDE <= held:
        return [
            ScaleFinding(
                layer.name,
                "too wide",
                f"codes reach {_span(layer.low, layer.high)}, values only "
                f"{_span(layer.seen_low, layer.seen_high)}: {math.log2(held / seen):.1f} bits are "
                "never used",
                ratio=held / seen,
            )
        ]
    return []


def _channel_findings(layer: Layer, channels: Channels) -> list[ScaleFinding]:
    findings: list[ScaleFinding] = []
    magnitudes = channels.magnitudes
    chosen, ratio = outliers(magnitudes)
    if chosen and layer.scale is not None:
        median = float(np.median(magnitudes[magnitudes > 0]))
        steps = median / layer.scale
        findings.append(
            ScaleFinding(
                layer.name,
                "outlier channels",
                f"{_listed(chosen)} up to {magnitudes[chosen[0]]:.4g}, {ratio:.0f} times the "
                f"median channel's {median:.4g}, which is left {steps:.1f} code steps",
                tuple(chosen),
                ratio,
            )
        )
    dead = channels.dead
    if dead and len(dead) < len(magnitudes):
        findings.append(
            ScaleFinding(
                layer.name,
                "dead channels",
                f"{len(dead)} of {len(magnitudes)} channels are zero in every sample",
                tuple(dead),
            )
        )
    return findings


def weight_magnitudes(module: ModuleOp, weights: WeightStore) -> dict[str, Array]:
    """Return the largest magnitude of every output channel of layers with constant weights."""
    from tilewright.dialects.top.base import Attrs
    from tilewright.quant.graph import layer_of, main_function

    found: dict[str, Array] = {}
    for op in main_function(module).body.block.ops:
        if op.name not in ("top.conv", "top.linear", "top.matmul"):
            continue
        owner: Any = op.operands[1].owner
        if getattr(owner, "name", "") != "top.weight":
            continue
        array = np.abs(weights.get(Attrs(owner.attributes).string("name")))
        if op.name == "top.matmul":
            array = np.moveaxis(array, -1, 0)
        if array.size:
            found[layer_of(op)] = array.reshape(array.shape[0], -1).max(axis=1)
    return found


def _weight_findings(module: ModuleOp, weights: WeightStore) -> list[ScaleFinding]:
    findings: list[ScaleFinding] = []
    for name, magnitudes in weight_magnitudes(module, weights).items():
        chosen, ratio = outliers(magnitudes)
        if chosen:
            findings.append(
                ScaleFinding(
                    name,
                    "outlier channels",
                    f"weights of output {_listed(chosen)} are up to {ratio:.0f} times the "
                    "median channel's",
                    tuple(chosen),
                    ratio,
                    weights=True,
                )
            )
        dead = [int(c) for c in np.flatnonzero(magnitudes == 0)]
        if dead:
            findings.append(
                ScaleFinding(
                    name,
                    "dead channels",
                    f"{len(dead)} of {len(magnitudes)} output channels have no weights but zeros",
                    tuple(dead),
                    weights=True,
                )
            )
    return findings


def _span(low: float, high: float) -> str:
    return f"{low:.4g}..{high:.4g}"


def _listed(channels: list[int], most: int = 4) -> str:
    text = ("channels " if len(channels) > 1 else "channel ") + ", ".join(map(str, channels[:most]))
    return text + (f" and {len(channels) - most} more" if len(channels) > most else "")
