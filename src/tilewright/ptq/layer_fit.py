"""One layer of the step `improve`: sampling its inputs and targets, fitting, and checking the fit.

Everything is in units of the accumulator: a target is the float layer's result before its clamp,
divided by `s_in * s_w[channel]`; inputs are codes less their zero point, so that zero padding is
zero. The stored bias is then `b - za * sum(q) + t`, `t` the term of truncating targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewright.ptq.reconstruct import Moments, fit_codes
from tilewright.quant.parameters import BIAS_LIMIT, prove_accumulator, truncation_term

if TYPE_CHECKING:
    from xdsl.ir import Operation

    from tilewright.dialects.quant import ConvOp, LinearOp
    from tilewright.ir.weights import WeightStore

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float64]

MOST_POSITIONS = 16384
"""Positions of a dense layer that are looked at, over all samples."""

FEW_POSITIONS = 6144
"""The same for depthwise layers, which have few weights a channel."""

CHUNK_BYTES = 96 << 20
"""Unfolded inputs held at once."""

TRIALS = ((0.1, 0.5), (0.3, 0.0))
"""Damping and trust (see `fit_codes`) of the fits that are judged against each other."""

MORE_TRIALS = ((0.03, 0.0), (0.1, 0.5), (0.3, 1.0))
"""The same for 4-bit codes, which are worth more, and on the highest level."""

OUTLIER = 6.0
"""Times the usual squared error from which a position's error counts no more than that."""

USUAL = 0.95
"""Share of the positions, those of least error, whose mean squared error is the usual one."""

SHOWN_CHANNELS = 64
"""About so many output channels tell which positions are outliers."""

HELD_OUT = 4
"""Every so many samples one takes no part in the fit, and judges it."""


@dataclass(frozen=True)
class Geometry:
    """Where the inputs of one output position lie; a linear layer is one position a row."""

    kernel: tuple[int, int] = (1, 1)
    strides: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilations: tuple[int, int] = (1, 1)
    group: int = 1

    @staticmethod
    def of(op: Operation) -> Geometry:
        """Read a `quant.conv` or `quant.linear`."""
        from tilewright.dialects.quant import shape_of
        from tilewright.dialects.top.base import Attrs

        if op.name != "quant.conv":
            return Geometry()
        attrs, shape = Attrs(op.attributes), shape_of(op.operands[1])
        strides, pads, dilations = (attrs.ints(key) for key in ("strides", "pads", "dilations"))
        return Geometry(
            (shape[2], shape[3]),
            (strides[0], strides[1]),
            (pads[0], pads[1], pads[2], pads[3]),
            (dilations[0], dilations[1]),
            attrs.integer("group"),
        )

    def columns(
        self,
        x: Array,
        size: tuple[int, int],
        positions: npt.NDArray[np.int64],
        part: slice,
        out: npt.NDArray[np.float32],
    ) -> None:
        """Write into `out[C, kernel, P]` what output positions read of channels of `x`.

        Args:
            x: codes less their zero point, `[N, C, H, W]`.
            size: output height and width.
            positions: indices into `[N, height, width]` of the output.
            part: the channels that are wanted.
            out: takes the result.
        """
        top, left, bottom, right = self.pads
        wanted = x[:, part]
        if any(self.pads):
            wanted = np.pad(wanted, ((0, 0), (0, 0), (top, bottom), (left, right)))
        batch, channels, height, width = wanted.shape
        flat = wanted.transpose(1, 0, 2, 3).reshape(channels, batch * height * width)
        image, rest = np.divmod(positions, size[0] * size[1])
        row, column = np.divmod(rest, size[1])
        base = (image * height + row * self.strides[0]) * width + column * self.strides[1]
        if len(base) == flat.shape[1] and self.kernel == (1, 1):
            out[:, 0] = flat
            return
        for i in range(self.kernel[0]):
            for j in range(self.kernel[1]):
                offset = i * self.dilations[0] * width + j * self.dilations[1]
                out[:, i * self.kernel[1] + j] = flat.take(base + offset, axis=1)


@dataclass(frozen=True)
class Layer:
    """What a quantised layer and its float twin are made of."""

    name: str
    weight_name: str
    bias_name: str
    weight: npt.NDArray[np.int8]
    """Codes, output channel first."""
    bias: npt.NDArray[np.int64]
    """Biases as stored."""
    real: FloatArray
    """Float weights in code steps, shaped as `weight`."""
    unit: FloatArray
    """Real value of one step of each channel's accumulator."""
    zero: int
    """Zero point of the input."""
    term: npt.NDArray[np.int64]
    """What a truncating target adds to each bias."""
    low: FloatArray
    """Accumulator (with bias) below which the result is the least code; may be -inf."""
    high: FloatArray
    limit: int
    """Codes are `-limit..limit`."""

    @staticmethod
    def read(
        op: ConvOp | LinearOp, twin: Operation, weights: WeightStore, floats: WeightStore
    ) -> Layer | None:
        """Read a layer; None where its float weights do not fit its codes."""
        from tilewright.dialects.quant import quantised, uniform_of, weight_code_limit
        from tilewright.dialects.top.base import Attrs

        attrs = Attrs(op.attributes)
        names = [_constant_name(op.operands[index]) for index in range(1, 5)]
        weight, bias, mult, shift = (weights.get(name) for name in names)
        source, target = quantised(op.operands[0]), uniform_of(op.results[0])
        term = np.zeros(weight.shape[0], np.int64)
        if target is None:
            if "weight_scale" not in op.attributes:
                return None
            scale = weights.get(attrs.string("weight_scale")).astype(np.float64)
            low, high = np.full(len(scale), -np.inf), np.full(len(scale), np.inf)
        else:
            factor = mult.astype(np.float64) / 2.0 ** shift.astype(np.float64)
            if not (factor > 0).all():
                return None
            scale = factor * target.step / source.step
            low = (attrs.integer("lo") - target.zero) / factor
            high = (attrs.integer("hi") - target.zero) / factor
            if attrs.string("rounding") == "truncate" and attrs.integer("zp") != target.zero:
                term = np.array(
                    [
                        truncation_term(names[0], int(m), int(s), target.zero)
                        for m, s in zip(mult, shift, strict=True)
                    ],
                    np.int64,
                )
        real = floats.get(_constant_name(twin.operands[1])).astype(np.float64)
        if twin.name == "top.matmul":
            real = real.T
        if real.shape != weight.shape or not (scale > 0).all():
            return None
        return Layer(
            _layer(op),
            names[0],
            names[1],
            weight,
            bias.astype(np.int64),
            real / scale.reshape(-1, *([1] * (weight.ndim - 1))),
            scale * source.step,
            source.zero,
            term,
            low,
            high,
            weight_code_limit(op),
        )


@dataclass(frozen=True)
class Change:
    """What came of a layer."""

    weight: npt.NDArray[np.int8]
    bias: npt.NDArray[np.int32]
    before: float
    """Error behind the clamp on held out samples, outliers bounded, as a share of the targets'
    variance."""
    after: float
    channels: int
    """Output channels that changed."""


def fit_layer(
    layer: Layer,
    geometry: Geometry,
    inputs: Sequence[Array],
    targets: Sequence[Array],
    *,
    learned: bool,
    thorough: bool,
    seed: int,
) -> Change:
    """Fit a layer's codes and biases to its targets.

    Args:
        layer: the layer as it is.
        geometry: how its inputs are read.
        inputs: of every sample, codes less their zero point: `[N, C, H, W]` or `[rows, C]`.
        targets: of every sample, what the float layer gives before its clamp, likewise.
        learned: whether codes may change; otherwise only biases.
        thorough: whether more fits are tried, with more sweeps.
        seed: of the choice of positions.

    Raises:
        TilewrightError: E0302, an accumulator could overflow.
    """
    order = _judged_last(len(inputs))
    images = [inputs[i] if inputs[i].ndim == 4 else inputs[i][:, :, None, None] for i in order]
    wanted = [targets[i] if targets[i].ndim == 4 else targets[i][:, :, None, None] for i in order]
    fitted = len(order) - len(order) // HELD_OUT
    size = (wanted[0].shape[2], wanted[0].shape[3])
    group = geometry.group
    outputs, depth = layer.weight.shape[0] // group, int(np.prod(layer.weight.shape[1:]))
    inner, taps = images[0].shape[1] // group, geometry.kernel[0] * geometry.kernel[1]
    places = _positions(wanted, depth, group, seed)
    shape = (group, outputs, depth)
    codes = layer.weight.reshape(shape).astype(np.float64)
    real = layer.real.reshape(shape)
    sums = layer.weight.reshape(len(layer.bias), -1).sum(axis=1, dtype=np.int64)
    biases = layer.bias + layer.zero * sums - layer.term
    biases = biases.astype(np.float64).reshape(group, outputs)
    unit, low, high = (
        array.reshape(group, outputs) for array in (layer.unit, layer.low, layer.high)
    )
    new_codes, new_biases = codes.copy(), biases.copy()
    plan = _Plan(
        (MORE_TRIALS if thorough or layer.limit < 127 else TRIALS) if learned else (),
        12 if thorough else 4,
        layer.limit,
    )
    before = after = spread = 0.0
    each = len(places[0])
    step = max(1, min(group, CHUNK_BYTES // (4 * depth * each * len(places))))
    for first in range(0, group, step):
        part = slice(first, min(group, first + step))
        count = part.stop - first
        channels = slice(first * inner, part.stop * inner)
        rows = slice(first * outputs, part.stop * outputs)
        x = np.empty((count * inner, taps, len(places), each), np.float32)
        y = np.empty((count * outputs, len(places), each), np.float32)
        step_of = (1 / unit[part]).reshape(-1, 1).astype(np.float32)
        for index, (image, target, place) in enumerate(zip(images, wanted, places, strict=True)):
            geometry.columns(image, size, place, channels, x[:, :, index])
            y[:, index] = _taken(target, place, rows) * step_of
        problem = _Part(
            x.reshape(count, depth, len(places), each),
            y.reshape(count, outputs, len(places), each),
            fitted,
            low[part],
            high[part],
        )
        result = problem.solve(codes[part], biases[part], real[part], plan)
        new_codes[part], new_biases[part] = result.codes, result.biases
        # Back in real units, so that channels can be added up.
        square = unit[part] ** 2
        before += float((result.before * square).sum())
        after += float((result.after * square).sum())
        spread += float((result.spread * square).sum())
    return _stored(layer, new_codes, new_biases, before, after, spread)


def judged(count: int) -> list[int]:
    """Return which of so many samples take no part in fits, but judge them."""
    return list(range(HELD_OUT - 1, count, HELD_OUT))


def _judged_last(count: int) -> list[int]:
    """Return the samples in order, but those that judge the fit at the end."""
    last = judged(count)
    return [i for i in range(count) if i not in last] + last


def _stored(
    layer: Layer,
    codes: FloatArray,
    biases: FloatArray,
    before: float,
    after: float,
    spread: float,
) -> Change:
    """Return codes and biases as the quant level stores them; what does not fit stays as it was."""
    channels = len(layer.bias)
    weight = codes.reshape(layer.weight.shape).astype(np.int8)
    sums = weight.reshape(channels, -1).sum(axis=1, dtype=np.int64)
    whole = np.rint(biases.reshape(channels)).astype(np.int64) - layer.zero * sums + layer.term
    wrong = np.abs(whole) > BIAS_LIMIT
    weight[wrong], whole[wrong] = layer.weight[wrong], layer.bias[wrong]
    prove_accumulator(layer.name, weight.reshape(channels, -1).astype(np.int64), whole)
    flat = (weight != layer.weight).reshape(channels, -1).any(axis=1) | (whole != layer.bias)
    least = max(spread, 1e-30)
    return Change(weight, whole.astype(np.int32), before / least, after / least, int(flat.sum()))


@dataclass(frozen=True)
class _Plan:
    """Which fits are tried."""

    trials: tuple[tuple[float, float], ...]
    """Damping and trust of each; none: only biases change."""
    sweeps: int
    limit: int
    """Codes are `-limit..limit`."""


@dataclass(frozen=True)
class _Result:
    codes: FloatArray
    biases: FloatArray
    before: FloatArray
    """Mean squared error `[group, O]` behind the clamp, held out."""
    after: FloatArray
    spread: FloatArray
    """Variance of the targets behind the clamp."""


class _Part:
    """Some groups of a layer: `x[group, K, sample, P]`, `y[group, O, sample, P]`."""

    def __init__(
        self,
        x: npt.NDArray[np.float32],
        y: npt.NDArray[np.float32],
        fitted: int,
        low: FloatArray,
        high: FloatArray,
    ) -> None:
        """Take the samples: the first `fitted` to fit to, the others to judge the fit."""
        groups, depth, samples, each = x.shape
        self.x = x.reshape(groups, depth, samples * each)
        self.y = y.reshape(groups, y.shape[1], samples * each)
        self.samples, self.fitted, self.cut = samples, fitted, fitted * each
        self.low, self.high = (array[..., None].astype(np.float32) for array in (low, high))
        self.wanted = np.clip(self.y[:, :, self.cut :], self.low, self.high)

    def solve(
        self, codes: FloatArray, biases: FloatArray, real: FloatArray, plan: _Plan
    ) -> _Result:
        """Return the best of: what was, the same with a new bias, new codes with a new bias."""
        weight = self.weights_of(codes, biases)
        means = self.means_of(weight)
        best = (codes, biases)
        sums = self.products(codes)
        held = weight[:, self.cut :]
        before = least = self.judge(sums, biases, held)
        candidates = [(codes, sums)]
        if plan.trials:
            fit = (self.x[:, :, : self.cut], self.y[:, :, : self.cut], weight[:, : self.cut])
            moments = Moments.of(*fit)
            for damping, trust in plan.trials:
                fitted = fit_codes(
                    codes,
                    real,
                    moments,
                    limit=plan.limit,
                    damping=damping,
                    trust=trust,
                    sweeps=plan.sweeps,
                )
                candidates.append((fitted, self.products(fitted)))
        for fitted, sums in candidates:
            bias = means.bias_of(fitted, biases + means.change(codes, fitted))
            error = self.judge(sums, bias, held)
            better = error < least
            least = np.where(better, error, least)
            best = (np.where(better[..., None], fitted, best[0]), np.where(better, bias, best[1]))
        return _Result(best[0], best[1], before, least, self.spread(held))

    def weights_of(self, codes: FloatArray, biases: FloatArray) -> npt.NDArray[np.float32]:
        """Return how much each position counts, `[group, N]`, 0..1.

        A few positions of a few samples may be wrong by orders of magnitude more than all others
        (a range that clips on purpose what hardly ever occurs); fitted to, they would spoil the
        rest. From `OUTLIER` times the usual squared error on, a position's counts no more.
        """
        step = max(1, codes.shape[1] // SHOWN_CHANNELS)
        some = slice(None, None, step)
        got = codes[:, some].astype(np.float32) @ self.x
        got += biases[:, some, None].astype(np.float32)
        low, high = self.low[:, some], self.high[:, some]
        np.clip(got, low, high, out=got)
        got -= np.clip(self.y[:, some], low, high)
        energy = np.einsum("gon,gon->gn", got, got)
        count = energy.shape[1]
        lowest = np.partition(energy, max(0, int(count * USUAL) - 1), axis=1)
        usual = lowest[:, : max(1, int(count * USUAL))].mean(axis=1, keepdims=True)
        most = OUTLIER * usual
        # At most 1, without dividing by what may be next to nothing.
        return (most / np.maximum(energy, np.maximum(most, 1e-30))).astype(np.float32)

    def means_of(self, weight: npt.NDArray[np.float32]) -> _Means:
        """Return the weighted means of every sample that is fitted to."""
        groups, count = weight.shape[0], self.fitted
        part = np.ascontiguousarray(weight[:, : self.cut]).reshape(groups, count, -1)

        def each(array: npt.NDArray[np.float32]) -> FloatArray:
            block = array[..., : self.cut].reshape(groups, -1, count, part.shape[2])
            return np.einsum("gksp,gsp->gks", block, part).astype(np.float64)

        share = np.maximum(part.sum(axis=2, dtype=np.float64), 1e-12)[:, None]
        return _Means(
            each(self.x) / share, each(self.y) / share, share / share.sum(axis=2, keepdims=True)
        )

    def products(self, codes: FloatArray) -> npt.NDArray[np.float32]:
        """Return the sums without bias on the samples held out."""
        return codes.astype(np.float32) @ self.x[:, :, self.cut :]

    def judge(
        self, sums: npt.NDArray[np.float32], biases: FloatArray, weight: npt.NDArray[np.float32]
    ) -> FloatArray:
        """Return the weighted mean squared error behind the clamp on the samples held out."""
        got = sums + biases[..., None].astype(np.float32)
        np.clip(got, self.low, self.high, out=got)
        got -= self.wanted
        total = np.maximum(weight.sum(axis=1, dtype=np.float64), 1e-12)
        return np.einsum("gon,gon,gn->go", got, got, weight) / total[:, None]

    def spread(self, weight: npt.NDArray[np.float32]) -> FloatArray:
        """Return the weighted variance of the targets behind the clamp."""
        total = np.maximum(weight.sum(axis=1, dtype=np.float64), 1e-12)[:, None]
        mean = np.einsum("gon,gn->go", self.wanted, weight) / total
        square = np.einsum("gon,gon,gn->go", self.wanted, self.wanted, weight) / total
        return np.maximum(square - mean**2, 0)


@dataclass(frozen=True)
class _Means:
    """Weighted means of single samples."""

    x: FloatArray
    """`[group, K, sample]`"""
    y: FloatArray
    """`[group, O, sample]`"""
    share: FloatArray
    """`[group, 1, sample]`: how much each sample counts, in all 1."""

    def change(self, old: FloatArray, new: FloatArray) -> FloatArray:
        """Return what the bias takes over when codes change."""
        return np.einsum("gok,gk->go", old - new, (self.x * self.share).sum(axis=2))

    def bias_of(self, codes: FloatArray, biases: FloatArray) -> FloatArray:
        """Return `biases` and the mean error that is left, as far as the samples agree on it.

        With `e` the mean over samples and `v` its variance (from how the samples' own means
        differ), `e^2 / (e^2 + v)` of it is taken.
        """
        apart = self.y - codes @ self.x - biases[..., None]
        if apart.shape[2] < 2:
            return biases
        mean = (apart * self.share).sum(axis=2)
        doubt = ((apart - mean[..., None]) ** 2 * self.share**2).sum(axis=2)
        return biases + mean * mean**2 / np.maximum(mean**2 + doubt, 1e-30)


def _positions(
    targets: Sequence[Array], depth: int, group: int, seed: int
) -> list[npt.NDArray[np.int64]]:
    """Return for each sample which output positions are looked at, sorted."""
    # Enough that moments of so many inputs are known; more cost time and gain nothing.
    most = min(MOST_POSITIONS, max(4096, 32 * depth)) if group == 1 else FEW_POSITIONS
    # More inputs than fit in memory at once are not unfolded for one group.
    most = max(256, min(most, CHUNK_BYTES // (4 * depth)))
    share = max(1, most // len(targets))
    rng = np.random.default_rng(seed)
    found: list[npt.NDArray[np.int64]] = []
    for target in targets:
        count = target.shape[0] * target.shape[2] * target.shape[3]
        if count <= share:
            found.append(np.arange(count))
        else:
            found.append(np.sort(rng.choice(count, share, replace=False)))
    return found


def _taken(target: Array, place: npt.NDArray[np.int64], rows: slice) -> Array:
    """Return `[O, P]`: some channels of `target[N, O, H, W]` at flat positions."""
    part = target[:, rows].transpose(1, 0, 2, 3)
    return part.reshape(part.shape[0], -1).take(place, axis=1)


def _constant_name(value: Any) -> str:
    return _layer(value.owner)


def _layer(op: Operation) -> str:
    from tilewright.quant.graph import layer_of

    return layer_of(op)
