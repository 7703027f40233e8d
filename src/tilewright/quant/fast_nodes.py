"""How each operation of a quantised module becomes float32 ONNX nodes, for `quant/fast.py`.

A tensor of codes `q` with zero point `z` is the float32 tensor `q - z`, so that zero padding is
zero and zero points drop out of every sum. Images are kept channels first while the module has
them channels last: a transpose is emitted only where an operation looks at another order of axes.

The factor `m / 2^s` of a requantised sum is multiplied into float32 weights; one clamp and one
rounding follow. Products of codes stay below 2^24 in magnitude for most layers, so that only a sum
close to a tie can come out one code off.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from xdsl.dialects.builtin import TensorType
from xdsl.ir import Attribute, Operation, SSAValue

from tilewright.diagnostics import TilewrightError
from tilewright.dialects import top
from tilewright.dialects.quant import quantised, shape_of, uniform_of
from tilewright.dialects.top.base import Attrs
from tilewright.ir.weights import WeightStore
from tilewright.quant.graph import layer_of
from tilewright.runtime.onnx_nodes import HANDLERS, Exporter, export_op

Array = npt.NDArray[Any]

TO_NCHW = (0, 3, 1, 2)
TO_NHWC = (0, 2, 3, 1)

EACH_ELEMENT = frozenset(
    {
        "add", "sub", "mul", "div", "min", "max", "pow", "relu", "sigmoid", "tanh", "clip", "gelu",
        "hard_sigmoid", "hard_swish", "leaky_relu", "elu", "silu", "exp", "neg", "abs", "sqrt",
        "mish", "softplus",
    }
)  # fmt: skip
"""Float operations that treat all elements alike, in whatever order of axes."""

FAR_BELOW = -1024.0
"""Less than any code less its zero point: what padding of a maximum holds."""


@dataclass(frozen=True)
class Form:
    """A value in the ONNX graph."""

    name: str
    planar: bool
    """Whether axes are batch, channel, height, width while the module's are channels last."""


class FastGraph:
    """The ONNX graph being made; `add` takes the operations in order."""

    def __init__(
        self, weights: WeightStore, unclamped: Collection[Operation] = frozenset()
    ) -> None:
        """Begin an empty graph; the clamps of the float operations `unclamped` are left out."""
        self.weights = weights
        self.unclamped = unclamped
        self.graph = Exporter(weights, external=True)
        self.forms: dict[SSAValue, Form] = {}
        self.fixed: set[str] = set()
        """Names of inputs and of the module's constants: they cannot be outputs as they are."""
        self.turned: dict[tuple[SSAValue, bool], str] = {}
        self.handlers: dict[str, Callable[[Operation], Form]] = {
            "quant.quantize": self._quantize,
            "quant.dequantize": self._dequantize,
            "quant.conv": self._conv,
            "quant.linear": self._linear,
            "quant.matmul": self._matmul,
            "quant.avg_pool": self._avg_pool,
            "quant.add": self._add,
            "quant.sub": self._add,
            "quant.mul": self._mul,
            "quant.requantize": self._requantize,
            "quant.lut": self._lut,
            "quant.resize": self._resize,
            "quant.softmax": self._softmax,
            "quant.layer_norm": self._layer_norm,
            "top.reshape": self._reshape,
            "top.transpose": self._transpose,
            "top.concat": self._concat,
            "top.slice": self._slice,
            "top.pad": self._pad,
            "top.max_pool": self._max_pool,
        }

    # Values

    def declare(self, value: SSAValue, name: str, planar: bool = False) -> None:
        """Make `name`, an input of the graph, the form of `value`."""
        self.graph.taken.add(name)
        self.fixed.add(name)
        self.forms[value] = Form(name, planar)

    def add(self, op: Operation) -> None:
        """Emit one operation.

        Raises:
            TilewrightError: E0402, it has no form in float32 here.
        """
        if op.name in ("top.weight", "top.none"):
            return
        if any("f16" in str(getattr(value.type, "element_type", "")) for value in op.results):
            raise TilewrightError("E0402", f'"{layer_of(op)}" is fp16: it has no fast execution')
        movers = op.name in ("top.reshape", "top.transpose")
        if op.name in self.handlers and (
            movers or op.name.startswith("quant.") or uniform_of(op.results[0]) is not None
        ):
            self.forms[op.results[0]] = self.handlers[op.name](op)
        elif op.name.startswith("quant.") or uniform_of(op.results[0]) is not None:
            raise TilewrightError(
                "E0402", f'"{layer_of(op)}" ({op.name}) has no fast execution of codes'
            )
        else:
            self._float(op)

    def actual(self, value: SSAValue) -> str:
        """Return the name of `value` with the module's order of axes."""
        return self._ordered(value, planar=False)

    def image(self, op: Operation, value: SSAValue) -> str:
        """Return the name of `value`, an image in the layout of `op`, channels first."""
        nhwc = Attrs(op.attributes).string("layout", "nchw") == "nhwc"
        return self._ordered(value, planar=nhwc)

    def _ordered(self, value: SSAValue, planar: bool) -> str:
        form = self.form(value)
        if form.planar == planar:
            return form.name
        key = (value, planar)
        if key not in self.turned:
            perm = TO_NCHW if planar else TO_NHWC
            self.turned[key] = self.graph.emit("Transpose", [form.name], perm=perm)
        return self.turned[key]

    def form(self, value: SSAValue) -> Form:
        """Return how `value` is held; constants enter the graph when first asked for."""
        if value not in self.forms:
            owner = value.owner
            if not isinstance(owner, Operation):
                raise TilewrightError("E0501", "a value is used before it is computed")
            if owner.name == "top.none":
                self.forms[value] = Form("", False)
            elif owner.name == "top.weight":
                array = self.weights.get(layer_of(owner))
                kind = uniform_of(value)
                if kind is not None:
                    array = array.astype(np.float32) - np.float32(kind.zero)
                name = self.graph.unique(layer_of(owner))
                self.graph.initializer(name, np.array(array, order="C"))
                self.fixed.add(name)
                self.forms[value] = Form(name, False)
            else:
                raise TilewrightError("E0501", f'"{layer_of(owner)}" is used before it is computed')
        return self.forms[value]

    def array(self, value: SSAValue) -> Array:
        """Return the constant behind an operand of a layer."""
        owner = value.owner
        if not isinstance(owner, Operation) or owner.name != "top.weight":
            raise TilewrightError("E0402", "weights that are not constants have no fast execution")
        return self.weights.get(layer_of(owner))

    def constant(self, op: Operation, suffix: str, array: Array) -> str:
        """Return the name of a new float32 constant of `op`."""
        name = self.graph.unique(f"{layer_of(op)}.{suffix}")
        self.graph.initializer(name, np.ascontiguousarray(array, dtype=np.float32))
        return name

    def scalar(self, value: float) -> str:
        """Return the name of a float32 scalar."""
        return self.graph.constant(np.array(value, np.float32))

    def scaled(self, name: str, factor: float) -> str:
        """Return `factor` times a tensor."""
        return name if factor == 1 else self.graph.emit("Mul", [name, self.scalar(factor)])

    def moved(self, name: str, offset: float) -> str:
        """Return a tensor plus `offset`."""
        return name if offset == 0 else self.graph.emit("Add", [name, self.scalar(offset)])

    # The end of every arithmetic operation

    def finish(self, op: Operation, planar: bool, plan: Rounding, name: str) -> Form:
        """Clamp and round `name`, a sum in output steps to which `plan.offset` was added."""
        attrs, zero, out = Attrs(op.attributes), quantised(op.results[0]).zero, layer_of(op)
        low, high = attrs.integer("lo") - zero, attrs.integer("hi") - zero
        kinds = {"floor": "Floor", "even": "Round"}
        if plan.kind in kinds:
            clamped = self.graph.emit("Clip", [name, self.scalar(low), self.scalar(high)])
            return Form(self._named(kinds[plan.kind], [clamped], out), planar)
        size = self.graph.emit("Abs", [name])
        size = self.graph.emit("Floor", [self.moved(size, 0.5 if plan.kind == "away" else 0.0)])
        rounded = self.graph.emit("Mul", [self.graph.emit("Sign", [name]), size])
        rounded = self.moved(rounded, plan.after)
        return Form(
            self._named("Clip", [rounded, self.scalar(low), self.scalar(high)], out), planar
        )

    def _named(self, kind: str, inputs: Sequence[str], wish: str, **attributes: Any) -> str:
        return self.graph.emit(kind, inputs, [self.graph.unique(wish)], **attributes)

    # Arithmetic

    def _quantize(self, op: Operation) -> Form:
        kind, source = quantised(op.results[0]), self.form(op.operands[0])
        ratio = self.graph.emit("Div", [source.name, self.scalar(kind.step)])
        least = -127 if kind.zero == 0 else -128
        bounds = [self.scalar(least - kind.zero), self.scalar(127 - kind.zero)]
        clipped = self.graph.emit("Clip", [self.graph.emit("Round", [ratio]), *bounds])
        return Form(clipped, source.planar)

    def _dequantize(self, op: Operation) -> Form:
        source, kind = self.form(op.operands[0]), uniform_of(op.operands[0])
        if kind is None:
            return source
        return Form(
            self.graph.emit("Mul", [source.name, self.scalar(kind.step)]),
            source.planar,
        )

    def _channels(self, op: Operation, zero: int) -> tuple[Array, Array, Rounding]:
        """Return float32 weights and biases in output steps, and how the sum is rounded."""
        weight = self.array(op.operands[1]).astype(np.float64)
        bias, mult, shift = (self.array(op.operands[i]).astype(np.float64) for i in (2, 3, 4))
        channels = weight.shape[0]
        factor = mult / 2.0**shift
        whole = bias + zero * weight.reshape(channels, -1).sum(axis=1)
        plan = rounding_plan(op, mult, shift, bits=16)
        column = factor.reshape(-1, *([1] * (weight.ndim - 1)))
        return weight * column, whole * factor + plan.offset, plan

    def _conv(self, op: Operation) -> Form:
        attrs = Attrs(op.attributes)
        weight, bias, plan = self._channels(op, quantised(op.operands[0]).zero)
        total = self.graph.emit(
            "Conv",
            [
                self.image(op, op.operands[0]),
                self.constant(op, "weight", weight),
                self.constant(op, "bias", bias),
            ],
            strides=attrs.ints("strides"),
            pads=attrs.ints("pads"),
            dilations=attrs.ints("dilations"),
            group=attrs.integer("group"),
        )
        return self.finish(op, _nhwc(op), plan, total)

    def _linear(self, op: Operation) -> Form:
        x, zero = self.actual(op.operands[0]), quantised(op.operands[0]).zero
        plan = None
        if uniform_of(op.results[0]) is None:
            weight = self.array(op.operands[1]).astype(np.float64)
            bias = self.array(op.operands[2]) + zero * weight.sum(axis=1)
        else:
            weight, bias, plan = self._channels(op, zero)
        if len(shape_of(op.operands[0])) == 2:
            operands = [x, self.constant(op, "weight", weight), self.constant(op, "bias", bias)]
            total = self.graph.emit("Gemm", operands, transB=1)
        else:
            total = self.graph.emit("MatMul", [x, self.constant(op, "weight", weight.T)])
            total = self.graph.emit("Add", [total, self.constant(op, "bias", bias)])
        if plan is None:
            return Form(total, False)
        return self.finish(op, False, plan, total)

    def _matmul(self, op: Operation) -> Form:
        product = self.graph.emit("MatMul", [self.actual(value) for value in op.operands])
        if uniform_of(op.results[0]) is None:
            return Form(self.moved(product, Attrs(op.attributes).integer("bias")), False)
        if uniform_of(op.results[0]) is None:
            return Form(self.moved(product, float(Attrs(op.attributes).integer("bias"))), False)
        return self._single_bias(op, False, product)

    def _single_bias(self, op: Operation, planar: bool, total: str, centre: float = 0.0) -> Form:
        """Requantise by one factor a sum without its bias; `centre` is added to the bias."""
        attrs = Attrs(op.attributes)
        mult, shift = attrs.integer("mult"), attrs.integer("shift")
        plan = rounding_plan(op, np.array([mult]), np.array([shift]), bits=24)
        factor = mult / 2.0**shift
        offset = (attrs.integer("bias") + centre) * factor + plan.offset
        return self.finish(op, planar, plan, self.moved(self.scaled(total, factor), offset))

    def _avg_pool(self, op: Operation) -> Form:
        attrs, source = Attrs(op.attributes), op.operands[0]
        kernel, strides, pads = (attrs.ints(key) for key in ("kernel", "strides", "pads"))
        x, zero = self.image(op, source), quantised(source).zero
        shape = shape_of(source)
        channels, size = (shape[3], shape[1:3]) if _nhwc(op) else (shape[1], shape[2:])
        if tuple(kernel) == tuple(size) and not any(pads):
            total = self.graph.emit("ReduceSum", [x, self.graph.ints([2, 3])], keepdims=1)
        else:
            ones = self.graph.constant(np.ones((channels, 1, *kernel), np.float32))
            total = self.graph.emit("Conv", [x, ones], strides=strides, pads=pads, group=channels)
        return self._single_bias(op, _nhwc(op), total, float(zero * kernel[0] * kernel[1]))

    def _wide(
        self, op: Operation, planar: bool, total: str, mults: Sequence[int], bits: int = 16
    ) -> Form:
        """End an operation that has a wide bias; `total`, of `bits` bits, is in output steps."""
        attrs = Attrs(op.attributes)
        shift = attrs.integer("shift")
        plan = rounding_plan(op, np.array(mults), np.full(len(mults), shift), bits)
        bias = attrs.integer("bias") * 2.0 ** (attrs.integer("bias_shift") - shift)
        return self.finish(op, planar, plan, self.moved(total, bias + plan.offset))

    def _pair(self, op: Operation) -> tuple[list[str], bool]:
        """Return both operands in one order of axes, and whether that is channels first."""
        return self._alike(list(op.operands))

    def _alike(self, values: Sequence[SSAValue]) -> tuple[list[str], bool]:
        planar = any(self.form(value).planar for value in values) and all(
            len(shape_of(value)) == 4 for value in values
        )
        return [self._ordered(value, planar) for value in values], planar

    def _add(self, op: Operation) -> Form:
        attrs, shift = Attrs(op.attributes), Attrs(op.attributes).integer("shift")
        mults = [attrs.integer("mult_a"), attrs.integer("mult_b")]
        names, planar = self._pair(op)
        sign = 1 if op.name == "quant.add" else -1
        parts = [
            self.scaled(names[0], mults[0] / 2.0**shift),
            self.scaled(names[1], sign * mults[1] / 2.0**shift),
        ]
        return self._wide(op, planar, self.graph.emit("Add", parts), mults)

    def _mul(self, op: Operation) -> Form:
        attrs = Attrs(op.attributes)
        names, planar = self._pair(op)
        mult = attrs.integer("mult")
        product = self.scaled(self.graph.emit("Mul", names), mult / 2.0 ** attrs.integer("shift"))
        return self._wide(op, planar, product, [mult])

    def _requantize(self, op: Operation) -> Form:
        attrs, source = Attrs(op.attributes), self.form(op.operands[0])
        mult = attrs.integer("mult")
        total = self.scaled(source.name, mult / 2.0 ** attrs.integer("shift"))
        return self._wide(op, source.planar, total, [mult])

    def _lut(self, op: Operation) -> Form:
        source = self.form(op.operands[0])
        zero = quantised(op.operands[0]).zero
        table = self.weights.get(Attrs(op.attributes).string("table")).astype(np.float32)
        values = self.constant(op, "table", table - np.float32(quantised(op.results[0]).zero))
        index = self.graph.emit("Cast", [self.moved(source.name, zero + 128.0)], to=6)
        return Form(self.graph.emit("Gather", [values, index], axis=0), source.planar)

    def _resize(self, op: Operation) -> Form:
        attrs = Attrs(op.attributes)
        shape = shape_of(op.operands[0])
        height, width = shape[1:3] if _nhwc(op) else shape[2:]
        rows = _weights_matrix(self.array(op.operands[1]), height)
        columns = _weights_matrix(self.array(op.operands[2]), width)
        x = self.image(op, op.operands[0])
        wide = self.graph.emit("MatMul", [x, self.constant(op, "columns", columns.T)])
        total = self.graph.emit("MatMul", [self.constant(op, "rows", rows), wide])
        mult = attrs.integer("mult")
        # The weights have 11 fractional bits each; as fractions they are exact.
        total = self.scaled(total, mult * 2.0 ** (22 - attrs.integer("shift")))
        return self._wide(op, _nhwc(op), total, [mult], bits=30)

    # Rows. Reciprocals of 16 bits are exact here: a code that is close to a tie may differ.

    def _softmax(self, op: Operation) -> Form:
        attrs, emit = Attrs(op.attributes), self.graph.emit
        x, last = self.actual(op.operands[0]), self.graph.ints([-1])
        below = emit("Sub", [emit("ReduceMax", [x, last], keepdims=1), x])
        # The store holds the 16 bits of an entry as int16.
        entries = self.weights.get(attrs.string("table")).astype(np.uint16)
        table = self.constant(op, "table", entries)
        powers = emit("Gather", [table, emit("Cast", [below], to=6)], axis=0)
        share = emit("Div", [powers, emit("ReduceSum", [powers, last], keepdims=1)])
        total = self.scaled(share, attrs.integer("mult") / 2.0 ** attrs.integer("shift"))
        offset = 0.5 + attrs.integer("zp") - quantised(op.results[0]).zero
        return self.finish(op, False, Rounding("floor", offset), self.moved(total, offset))

    def _layer_norm(self, op: Operation) -> Form:
        attrs = Attrs(op.attributes)
        gain, bias = (self.array(op.operands[i]).astype(np.float64) for i in (1, 2))
        unit = 2.0 ** -attrs.integer("shift")
        offset = attrs.integer("zp") - quantised(op.results[0]).zero
        operands = [
            self.graph.emit(
                "Reshape", [self.actual(op.operands[0]), self.graph.ints([-1, gain.size])]
            ),
            self.constant(op, "gain", gain.reshape(-1) * (unit * 2.0**15)),
            self.constant(op, "bias", bias.reshape(-1) * unit + offset),
        ]
        # The integer epsilon is that of n^2 times the variance of codes, with 8 fractional bits.
        epsilon = attrs.integer("epsilon") / (2.0**8 * gain.size**2)
        normal = self.graph.emit("LayerNormalization", operands, axis=-1, epsilon=epsilon)
        total = self.graph.emit("Reshape", [normal, self.graph.ints(shape_of(op.results[0]))])
        return self.finish(op, False, Rounding("floor", float(offset)), total)

    # Movers

    def _axes(self, value: SSAValue, planar: bool) -> list[int]:
        """Return the module's axis at each position of the graph's tensor."""
        return list(TO_NCHW) if planar else list(range(len(shape_of(value))))

    def _reshape(self, op: Operation) -> Form:
        shape = self.graph.ints(shape_of(op.results[0]))
        x = self.actual(op.operands[0])
        return Form(self._named("Reshape", [x, shape], layer_of(op), allowzero=1), False)

    def _transpose(self, op: Operation) -> Form:
        perm, source = Attrs(op.attributes).ints("perm"), self.form(op.operands[0])
        if perm == TO_NHWC and not source.planar:
            return Form(source.name, True)
        if perm == TO_NCHW and source.planar:
            return Form(source.name, False)
        x = self.actual(op.operands[0])
        return Form(self._named("Transpose", [x], layer_of(op), perm=perm), False)

    def _concat(self, op: Operation) -> Form:
        names, planar = self._alike(list(op.operands))
        axis = self._axes(op.results[0], planar).index(Attrs(op.attributes).integer("axis"))
        return Form(self._named("Concat", names, layer_of(op), axis=axis), planar)

    def _slice(self, op: Operation) -> Form:
        attrs, source = Attrs(op.attributes), self.form(op.operands[0])
        axes = self._axes(op.results[0], source.planar)
        shape = shape_of(op.operands[0])
        name = source.name
        for position, axis in enumerate(axes):
            start, step = attrs.ints("starts")[axis], attrs.ints("steps")[axis]
            size = shape_of(op.results[0])[axis]
            if (start, step, size) == (0, 1, shape[axis]):
                continue
            chosen = self.graph.ints(start + step * k for k in range(size))
            name = self.graph.emit("Gather", [name, chosen], axis=position)
        return Form(name, source.planar)

    def _pad(self, op: Operation) -> Form:
        attrs, source = Attrs(op.attributes), self.form(op.operands[0])
        axes = self._axes(op.results[0], source.planar)
        begins = [attrs.ints("pads_begin")[axis] for axis in axes]
        ends = [attrs.ints("pads_end")[axis] for axis in axes]
        name, sizes = source.name, [shape_of(op.operands[0])[axis] for axis in axes]
        if any(value < 0 for value in (*begins, *ends)):
            starts = [max(0, -value) for value in begins]
            stops = [size - max(0, -value) for size, value in zip(sizes, ends, strict=True)]
            name = self.graph.emit("Slice", [name, self.graph.ints(starts), self.graph.ints(stops)])
        widths = self.graph.ints(max(0, value) for value in (*begins, *ends))
        # The value of a constant pad is zero: the code less its zero point.
        mode = attrs.string("mode")
        return Form(self._named("Pad", [name, widths], layer_of(op), mode=mode), source.planar)

    def _max_pool(self, op: Operation) -> Form:
        attrs, source, nhwc = Attrs(op.attributes), op.operands[0], _nhwc(op)
        kernel, strides = attrs.ints("kernel"), attrs.ints("strides")
        pads, dilations = list(attrs.ints("pads")), attrs.ints("dilations")
        first = 1 if nhwc else 2
        x = self.image(op, source)
        for axis in range(2):
            count = shape_of(op.results[0])[first + axis]
            need = (count - 1) * strides[axis] + (kernel[axis] - 1) * dilations[axis] + 1
            size = shape_of(source)[first + axis]
            # What is left over behind the last window would make one more.
            pads[2 + axis] = need - size - pads[axis]
        own = all(0 <= pad < kernel[i % 2] for i, pad in enumerate(pads)) and max(dilations) == 1
        if any(pads) and not own:
            outer = [0, 0, *pads[:2], 0, 0, *pads[2:]]
            x = self.graph.emit("Pad", [x, self.graph.ints(outer), self.scalar(FAR_BELOW)])
        name = self.graph.emit(
            "MaxPool",
            [x],
            kernel_shape=kernel,
            strides=strides,
            dilations=dilations,
            pads=pads if own else [0] * 4,
        )
        if any(pads) and not own:
            # A window of nothing but padding.
            least = self.scalar(-128 - quantised(source).zero)
            name = self.graph.emit("Max", [name, least])
        return Form(name, nhwc)

    # Float operations

    def _float(self, op: Operation) -> None:
        """Emit an operation that stays float, channels first where its layout says so."""
        kind = op.name.removeprefix("top.")
        if not isinstance(op, top.TopOp) or kind not in HANDLERS:
            raise TilewrightError("E0402", f"{op.name} has no fast execution")
        outs = [self.graph.unique(layer_of(op) if i == 0 else f"{layer_of(op)}:{i}")
                for i in range(len(op.results))]  # fmt: skip
        values = list(op.operands)
        planar = False
        if kind in EACH_ELEMENT:
            ins, planar = self._alike(values)
        elif _nhwc(op) and len(shape_of(values[0])) == 4 and len(outs) == 1:
            ins, planar = [self.image(op, values[0]), *map(self.actual, values[1:])], True
        else:
            ins = [self.actual(value) for value in values]
        if planar or op in self.unclamped:
            self._directly(op, kind, ins, outs)
        else:
            export_op(self.graph, op, ins, outs)
        for value, name in zip(op.results, outs, strict=True):
            self.forms[value] = Form(name, planar)

    def _directly(self, op: top.TopOp, kind: str, ins: list[str], outs: list[str]) -> None:
        """Emit an operation whose operands have the channels where ONNX wants them."""
        attrs = op.attrs
        clamped = ("clamp_min" in attrs or "clamp_max" in attrs) and op not in self.unclamped
        raw = [self.graph.unique(f"{outs[0]}.unclamped")] if clamped else outs
        HANDLERS[kind](self.graph, op, ins, raw)
        if clamped:
            element = _element(op.results[0])
            low, high = attrs.number("clamp_min"), attrs.number("clamp_max")
            self.graph.clamp(raw[0], outs[0], low, high, element)


@dataclass(frozen=True)
class Rounding:
    """How a sum in output steps becomes codes less their zero point."""

    kind: str
    """`even`: nearest; `floor`; `away`: ties away from zero; `zero`: towards zero."""
    offset: float = 0.0
    """Added to the sum before rounding."""
    after: float = 0.0
    """Added after rounding, where that is not the same as before."""


def rounding_plan(op: Operation, mult: Array, shift: Array, bits: int) -> Rounding:
    """Return how to round exactly what an operation requantises.

    Where no sum of `bits` bits can lie exactly between two codes, the cheapest rounding is taken.
    """
    attrs = Attrs(op.attributes)
    rounding, low = attrs.string("rounding"), attrs.integer("lo")
    apart = attrs.integer("zp") - quantised(op.results[0]).zero
    unit = 2.0 ** np.maximum(np.asarray(shift, np.float64) - 1 - bits, 0)
    ties = bool((np.asarray(mult, np.float64) % unit == 0).any())
    if rounding == "truncate":
        if attrs.integer("zp") > low:
            # Values inside the range may be negative before the zero point is added.
            return Rounding("zero", after=float(apart))
        return Rounding("floor", float(apart))
    if rounding == "half_even" or not ties:
        return Rounding("even")
    return Rounding("floor", 0.5) if rounding == "half_up" else Rounding("away")


def _weights_matrix(table: Array, size: int) -> Array:
    """Return `[count, size]` of a resize's table: two positions and their weights a row."""
    matrix = np.zeros((table.shape[0], size), np.float32)
    rows = np.arange(table.shape[0])
    for index in range(2):
        np.add.at(matrix, (rows, table[:, index]), table[:, 2 + index] / np.float32(2048))
    return matrix


def _nhwc(op: Operation) -> bool:
    return Attrs(op.attributes).string("layout", "nchw") == "nhwc"


def _element(value: SSAValue) -> Attribute:
    assert isinstance(value.type, TensorType)
    return value.type.get_element_type()


__all__ = ["FastGraph", "Form", "Rounding", "rounding_plan"]
