"""Calibration: run the float graph over sample inputs and keep statistics of every value.

`observe` gathers statistics, `Statistics.table` chooses a range for every value by one rule;
`ranges.choose_ranges` chooses by the error at the network's output. `calibrate` does both.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.quant.observers import METHODS, Observer, choose
from tilewright.quant.scores import Scores
from tilewright.quant.table import CalibrationTable

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp

    from tilewright.ir.weights import WeightStore
    from tilewright.runtime.float_executor import BoundValues, TopSession

Array = npt.NDArray[Any]
Sample = Mapping[str, Array]
Shapes = dict[str, tuple[int, ...]]
AtShape = Callable[[Shapes], "tuple[ModuleOp, WeightStore]"]
"""Returns the same model as a fused float graph for inputs of other shapes."""

BOTH_CORES_BYTES = 2**28
"""Two samples are observed at a time while the values of both take at most twice this."""


@dataclass
class Channels:
    """Sums over all samples, for every channel of a value that layers with weights read."""

    elements: int
    """Elements a channel."""
    sums: npt.NDArray[np.float64]
    squares: npt.NDArray[np.float64]
    peaks: npt.NDArray[np.float32]
    """Largest magnitude."""

    def merge(self, other: Channels) -> None:
        """Take in what `other` has seen."""
        self.elements += other.elements
        self.sums += other.sums
        self.squares += other.squares
        self.peaks = np.maximum(self.peaks, other.peaks)


@dataclass
class Statistics:
    """What calibration saw of every value."""

    observers: dict[str, Observer] = field(default_factory=dict[str, Observer])
    """By value: a layer's name (`layer:1`... for further results) or a graph input's."""
    channels: dict[str, Channels] = field(default_factory=dict[str, Channels])
    values: list[str] = field(default_factory=list[str])
    """All values in execution order, those that hold another's elements included."""
    same: dict[str, str] = field(default_factory=dict[str, str])
    """Values that hold the very elements of another one: reshaped, transposed."""
    samples: int = 0
    preprocessing: dict[str, Any] | None = None

    def table(
        self, method: str = "max", rules: Mapping[str, str] | None = None
    ) -> CalibrationTable:
        """Return the ranges of all values by one rule, or by another where `rules` names one.

        Raises:
            UsageError: E0702, there is no such method.
        """
        for name in {method, *(rules or {}).values()}:
            require_method(name)
        table = CalibrationTable({}, method, self.samples, self.preprocessing)
        for name in self.values:
            observer = self.observers.get(self.same.get(name, name))
            if observer is None:
                continue
            choice = choose(observer, (rules or {}).get(observer.name, method))
            table.thresholds[name] = choice.threshold
            table.ranges[name] = (choice.low, choice.high)
            table.details[name] = (
                {"rule": f"as {observer.name}"}
                if name in self.same
                else {"rule": choice.rule, "min": observer.least, "max": observer.greatest}
            )
        for name, seen in self.channels.items():
            table.means[name] = (seen.sums / seen.elements).astype(np.float32)
            table.squares[name] = (seen.squares / seen.elements).astype(np.float32)
            table.peaks[name] = seen.peaks
        return table


def require_method(method: str, extra: tuple[str, ...] = ()) -> None:
    """Refuse unknown rules.

    Raises:
        UsageError: E0702.
    """
    if method not in (*METHODS, *extra):
        raise UsageError(
            "E0702",
            f"there is no calibration method `{method}`",
            details=[f"legal are {', '.join((*extra, *METHODS))}"],
        )


def calibrate(
    module: ModuleOp,
    weights: WeightStore,
    samples: Iterable[Sample],
    *,
    method: str = "kl",
    limit: int | None = 200,
    preprocessing: dict[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
    at_shape: AtShape | None = None,
) -> CalibrationTable:
    """Observe every float value of `module` and return the table of their ranges by one rule.

    Args:
        module: a float `top` module.
        weights: its constants.
        samples: inputs by name, one mapping a sample.
        method: "max", "mean", "kl", "mse" or "percentile" (see `observers.choose`).
        limit: at most so many samples are used; None uses all.
        preprocessing: recorded in the table.
        progress: called with the number of samples done.
        at_shape: see `observe`.

    Raises:
        TilewrightError: E0301, no samples, or a value is not finite; E0702, unknown method.
    """
    require_method(method)
    return observe(
        module,
        weights,
        samples,
        limit=limit,
        histograms=method != "max",
        preprocessing=preprocessing,
        progress=progress,
        at_shape=at_shape,
    ).table(method)


def observe(
    module: ModuleOp,
    weights: WeightStore,
    samples: Iterable[Sample],
    *,
    limit: int | None = 200,
    histograms: bool = True,
    preprocessing: dict[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
    at_shape: AtShape | None = None,
) -> Statistics:
    """Run `module` over samples and return statistics of every float value.

    The module is run as it is: after fusion, so that a value is seen behind its fused clamp. Two
    samples are run at a time where there are two cores. The result does not depend on that.

    Args:
        module: a float `top` module.
        weights: its constants.
        samples: inputs by name, one mapping a sample.
        limit: at most so many samples are used; None uses all.
        histograms: keep histograms; the rule `max` needs none.
        preprocessing: recorded.
        progress: called with the number of samples done.
        at_shape: makes the graph anew for samples of other shapes than the module's; without it
            they are refused. One graph a shape is kept.

    Raises:
        TilewrightError: E0301, there are no samples, or a value is not finite (which input or
            layer, in which sample); E0103, a sample does not fit the model.
    """
    run = _Observation(module, weights, histograms, at_shape)
    found = Statistics(
        values=list(run.first.session.values), same=run.first.same, preprocessing=preprocessing
    )
    pools = [ThreadPoolExecutor(1) for _ in range(run.workers)]
    parts = [run.part() for _ in pools]
    waiting: deque[Future[None]] = deque()
    try:
        for index, sample in enumerate(samples):
            if limit is not None and index >= limit:
                break
            if len(waiting) == len(pools):
                waiting.popleft().result()
                found.samples += 1
                if progress is not None:
                    progress(found.samples)
            # Each worker takes its samples in turn, whichever is done first: sums do not depend
            # on time.
            worker = index % len(pools)
            waiting.append(pools[worker].submit(run.take, parts[worker], index, sample))
        while waiting:
            waiting.popleft().result()
            found.samples += 1
            if progress is not None:
                progress(found.samples)
    finally:
        for pool in pools:
            pool.shutdown(cancel_futures=True)
    if not found.samples:
        raise TilewrightError(
            "E0301",
            "there are no calibration samples",
            hint="give some typical inputs of the model; 100 to 200 are enough",
        )
    for part in parts:
        part.add_to(found)
    return found


class _Graph:
    """A float graph for inputs of one shape."""

    def __init__(self, module: ModuleOp, weights: WeightStore, threads: int) -> None:
        from tilewright.runtime.float_executor import TopSession

        self.session: TopSession = TopSession(module, weights, threads=threads)
        self.same = _aliases(module)
        self.axes = _weighted_inputs(module)
        self.scores = Scores(module)


class _Part:
    """What one worker has seen."""

    def __init__(self, histograms: bool) -> None:
        self.histograms = histograms
        self.observers: dict[str, Observer] = {}
        self.channels: dict[str, Channels] = {}
        self.bound: dict[int, BoundValues] = {}
        """Arrays for the values of each graph, by its identity."""

    def run(self, graph: _Graph, sample: Sample) -> dict[str, Array]:
        """Return every value of one sample, until the next is run."""
        from tilewright.runtime.float_executor import BoundValues

        if id(graph) not in self.bound:
            # One shape's arrays at a time: varying shapes must not add up.
            self.bound = {id(graph): BoundValues(graph.session)}
        return self.bound[id(graph)].run(sample)

    def observer(self, name: str) -> Observer:
        if name not in self.observers:
            self.observers[name] = Observer(name, self.histograms)
        return self.observers[name]

    def add_to(self, found: Statistics) -> None:
        for name, observer in self.observers.items():
            if name in found.observers:
                found.observers[name].merge(observer)
            else:
                found.observers[name] = observer
        for name, channels in self.channels.items():
            if name in found.channels:
                found.channels[name].merge(channels)
            else:
                found.channels[name] = channels


class _Observation:
    """Graphs by input shape, and how a sample is taken."""

    def __init__(
        self,
        module: ModuleOp,
        weights: WeightStore,
        histograms: bool,
        at_shape: AtShape | None,
    ) -> None:
        from tilewright.dialects.quant import shape_of
        from tilewright.quant.graph import argument_names, main_function

        main = main_function(module)
        self.shapes: Shapes = {
            name: tuple(shape_of(argument))
            for name, argument in zip(argument_names(main), main.body.block.args, strict=True)
        }
        size = sum(
            4 * math.prod(shape_of(result))
            for op in main.body.block.ops
            for result in op.results
            if op.name not in ("top.weight", "top.none")
        )
        self.workers = 2 if size <= BOTH_CORES_BYTES and (os.cpu_count() or 1) > 1 else 1
        # A sample on one core costs less time of the processor than one on two.
        self.threads = 1 if self.workers > 1 else 0
        self.first = _Graph(module, weights, self.threads)
        self.graphs: dict[tuple[tuple[int, ...], ...], _Graph] = {}
        self.histograms = histograms
        self.at_shape = at_shape

    def part(self) -> _Part:
        return _Part(self.histograms)

    def fits(self, sample: Sample) -> bool:
        """Whether a sample has the shapes of the module's inputs."""
        return set(sample) == set(self.shapes) and all(
            np.shape(sample[name]) == shape for name, shape in self.shapes.items()
        )

    def graph(self, sample: Sample) -> _Graph:
        if self.at_shape is None or set(sample) != set(self.shapes) or self.fits(sample):
            return self.first
        shapes = {name: tuple(np.shape(sample[name])) for name in self.shapes}
        key = tuple(shapes.values())
        if key not in self.graphs:
            self.graphs[key] = _Graph(*self.at_shape(shapes), self.threads)
        return self.graphs[key]

    def take(self, part: _Part, index: int, sample: Sample) -> None:
        """Run one sample and add it to `part`."""
        try:
            graph = self.graph(sample)
            values = graph.scores.bounded(part.run(graph, sample))
        except TilewrightError as error:
            if error.code != "E0103":
                raise
            details = [error.message, *error.details]
            message = f"calibration sample {index + 1} does not fit the model"
            raise TilewrightError("E0103", message, details, error.hint) from error
        for name, array in values.items():
            if array.dtype.kind != "f" or (name in graph.same and name not in graph.axes):
                continue
            array = array.astype(np.float32, copy=False)
            ends = None
            if name in graph.axes and array.size:
                ends = _take_channels(part, name, array, graph.axes[name])
            if array.size and (ends is None or not _finite(ends)):
                ends = float(array.min()), float(array.max())
                if not _finite(ends):
                    raise _not_finite(name, array, index, name in self.shapes)
            if name not in graph.same:
                part.observer(name).update(array, ends, index)


def _finite(ends: tuple[float, float]) -> bool:
    return math.isfinite(ends[0]) and math.isfinite(ends[1])


def _not_finite(name: str, array: Array, index: int, is_input: bool) -> TilewrightError:
    kind = "NaN" if np.isnan(array).any() else "infinity"
    if is_input:
        return TilewrightError(
            "E0301",
            f'input "{name}" of calibration sample {index + 1} holds {kind}',
            hint="check the sample and the model's preprocessing",
        )
    return TilewrightError(
        "E0301",
        f'"{name}" is not finite for calibration sample {index + 1}',
        [f"it is the first layer whose result holds {kind}; the inputs are finite"],
        "check the sample and the model's preprocessing, or whether the model needs a wider type",
    )


def _take_channels(
    part: _Part, name: str, array: npt.NDArray[np.float32], axis: int
) -> tuple[float, float]:
    """Add the sums of each channel to `part` and return the least and the greatest element."""
    if axis % array.ndim == array.ndim - 1:
        sums, squares, lows, highs = _last_axis(array)
    else:
        planes = np.ascontiguousarray(array).reshape(array.shape[0], array.shape[1], -1)
        lows, highs = planes.min(axis=(0, 2)), planes.max(axis=(0, 2))
        sums = planes.sum(axis=2).sum(axis=0, dtype=np.float64)
        squares = np.einsum("ncp,ncp->nc", planes, planes).sum(axis=0, dtype=np.float64)
    seen = Channels(
        array.size // max(sums.size, 1), sums, squares, np.maximum(np.abs(lows), np.abs(highs))
    )
    ends = float(lows.min()), float(highs.max())
    if not (np.isfinite(sums).all() and np.isfinite(squares).all()):
        # Not a number somewhere, or sums that overflow: the caller looks closer.
        ends = math.nan, math.nan
        seen.sums = np.nan_to_num(sums)
        seen.squares = np.nan_to_num(squares)
    known = part.channels.get(name)
    if known is None:
        part.channels[name] = seen
    else:
        known.merge(seen)
    return ends


def _last_axis(
    array: npt.NDArray[np.float32],
) -> tuple[
    npt.NDArray[np.float64],
    npt.NDArray[np.float64],
    npt.NDArray[np.float32],
    npt.NDArray[np.float32],
]:
    """Return sum, sum of squares, least and greatest of each channel, channels on the last axis."""
    from tilewright.quant.observer_kernel import channel_rows

    channels = array.shape[-1]
    rows = array.size // channels
    # Rows of few channels are taken several at a time.
    together = 1
    while channels * together < 128 and rows % (2 * together) == 0:
        together *= 2
    width = channels * together
    sums, squares = np.zeros(width), np.zeros(width)
    lows, highs = np.full(width, np.inf, np.float32), np.full(width, -np.inf, np.float32)
    channel_rows(np.ascontiguousarray(array).reshape(-1, width), sums, squares, lows, highs)
    grouped = (together, channels)
    return (
        sums.reshape(grouped).sum(axis=0),
        squares.reshape(grouped).sum(axis=0),
        lows.reshape(grouped).min(axis=0),
        highs.reshape(grouped).max(axis=0),
    )


def _weighted_inputs(module: ModuleOp) -> dict[str, int]:
    """Return the values that layers with constant weights read, and their channel axis."""
    from xdsl.ir import Operation

    from tilewright.dialects.top.base import Attrs
    from tilewright.quant.graph import argument_names, layer_of, main_function

    main = main_function(module)
    names: dict[object, str] = dict(zip(main.body.block.args, argument_names(main), strict=True))
    found: dict[str, int] = {}
    for op in main.body.block.ops:
        for index, result in enumerate(op.results):
            names[result] = layer_of(op) if index == 0 else f"{layer_of(op)}:{index}"
        if op.name not in ("top.conv", "top.linear", "top.matmul"):
            continue
        weight = op.operands[1].owner
        if isinstance(weight, Operation) and weight.name == "top.weight":
            planar = op.name == "top.conv" and (
                Attrs(op.attributes).string("layout", "nchw") == "nchw"
            )
            found[names[op.operands[0]]] = 1 if planar else -1
    return found


def _aliases(module: ModuleOp) -> dict[str, str]:
    """Return values that hold the very elements of another one: reshaped, transposed."""
    from xdsl.ir import Operation

    from tilewright.quant.graph import argument_names, layer_of, main_function

    main = main_function(module)
    arguments = dict(zip(main.body.block.args, argument_names(main), strict=True))
    found: dict[str, str] = {}
    for op in main.body.block.ops:
        if op.name not in ("top.reshape", "top.transpose"):
            continue
        operand = op.operands[0]
        owner = operand.owner
        if isinstance(owner, Operation):
            index = list(owner.results).index(operand)  # pyright: ignore[reportArgumentType]
            source = layer_of(owner) if index == 0 else f"{layer_of(owner)}:{index}"
        else:
            source = arguments[operand]  # pyright: ignore[reportArgumentType]
        found[layer_of(op)] = found.get(source, source)
    return found
