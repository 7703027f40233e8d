"""Builds the integer form of one float op: parameters worked out, constants stored, ops created."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from xdsl.dialects.builtin import (
    FloatAttr,
    IntegerAttr,
    StringAttr,
    TensorType,
    UnitAttr,
    f32,
    f64,
    i8,
    i16,
    i32,
)
from xdsl.dialects.func import ReturnOp
from xdsl.ir import Attribute, Block, Operation, SSAValue

from tilewright.diagnostics import TilewrightError
from tilewright.dialects import quant, top
from tilewright.dialects.quant import (
    WEIGHT_CODES,
    UniformType,
    i4,
    image_axes,
    quantised,
    shape_of,
)
from tilewright.dialects.top.base import Attrs, is_absent
from tilewright.quant.functions import lookup_table
from tilewright.quant.graph import layer_of
from tilewright.quant.parameters import (
    ChannelParameters,
    output_bounds,
    pool_parameters,
    quantise_channels,
    scalar_parameters,
    scale_of,
)
from tilewright.transforms.quant import emit_given, emit_rows
from tilewright.transforms.quant.classify import (
    LAYOUT_OPS,
    constant_name,
    is_constant,
    scalar_operand,
    table_function,
)
from tilewright.transforms.quant.given import exact_table, given_bias
from tilewright.transforms.quant.mask_ranges import masked_floor
from tilewright.transforms.quant.resize_tables import resize_table
from tilewright.transforms.quant.scales import EdgeScale, Scales, exact_gain

if TYPE_CHECKING:
    from tilewright.ir.context import CompileContext

STAGE = "quantize"


class Emitter:
    """Appends integer ops to a new block; remembers which codes stand for which float value."""

    def __init__(
        self,
        ctx: CompileContext,
        scales: Scales,
        rounding: str,
        block: Block,
        means: Mapping[str, npt.NDArray[np.float32]],
    ) -> None:
        self.ctx = ctx
        self.means = means
        self.squares: Mapping[str, npt.NDArray[np.float32]] = {}
        """Mean square of every channel of layers' inputs; with `clip_weights`."""
        self.clip_weights = False
        self.weights = ctx.weights
        self.scales = scales
        self.rounding = rounding
        self.block = block
        self.codes: dict[SSAValue, SSAValue] = {}
        """Float value of the old function: its codes in the new one."""
        self.floats: dict[SSAValue, SSAValue] = {}
        """Float value of the old function: the same in the new one, where it exists."""
        self.hosted: set[Operation] = set()
        """Ops of the old function that the host computes."""
        self.stepped: dict[SSAValue, SSAValue] = {}
        """Float value that the host computes: the same in steps of its given scale."""
        self.rescaled: dict[tuple[SSAValue, float, int], SSAValue] = {}
        self.names: set[str] = set()
        self.forms: dict[str, Callable[[Operation], SSAValue]] = {
            "top.conv": self.conv,
            "top.linear": self.linear,
            "top.matmul": self.matmul,
            "top.add": self.add,
            "top.sub": self.add,
            "top.mul": self.mul,
            "top.avg_pool": self.avg_pool,
            "top.reduce": self.reduce,
            "top.concat": self.concat,
            "top.resize": self.resize,
            "top.softmax": lambda op: emit_rows.softmax(self, op),
            "top.layer_norm": lambda op: emit_rows.layer_norm(self, op),
            **{
                f"top.{name}": self.mover
                for name in ("reshape", "transpose", "slice", "pad", "max_pool")
            },
        }

    # Plumbing

    def append(self, op: Operation) -> SSAValue:
        """Add `op` to the block and return its (first) result."""
        self.block.add_op(op)
        return op.results[0]

    def unique(self, name: str) -> str:
        """Return `name`, made unique among the helper ops."""
        candidate, count = name, 1
        while candidate in self.names:
            count += 1
            candidate = f"{name}#{count}"
        self.names.add(candidate)
        return candidate

    def constant(self, name: str, array: np.ndarray[Any, Any], element: Attribute) -> SSAValue:
        """Store `array` under a name like `name` and return it as a `top.weight`."""
        stored = self.weights.add(name, array)
        op = top.create(
            top.WeightOp, [], name=stored, result_types=[TensorType(element, array.shape)]
        )
        return self.append(op)

    def kind(self, value: SSAValue) -> UniformType:
        """Return the element type of a float value's codes."""
        edge = self.scales.of(value)
        return UniformType.of(edge.step, edge.zero)

    def as_codes(self, value: SSAValue) -> SSAValue:
        """Return the codes of a float value, quantising it if only the float exists."""
        if value not in self.codes:
            kind = self.kind(value)
            name = self.unique(f"{self.scales.names[value]}/quantize")
            op = quant.QuantizeOp.make(
                [self.floats[value]],
                TensorType(kind, shape_of(value)),
                name=name,
                lo=-128 if kind.zero == 0 and value in self.scales.given else None,
            )
            self.codes[value] = self.append(op)
        return self.codes[value]

    def as_float(self, value: SSAValue) -> SSAValue:
        """Return a float value in the new function, dequantising its codes if needed."""
        if value not in self.floats:
            name = self.unique(f"{self.scales.names[value]}/dequantize")
            op = quant.DequantizeOp.make([self.codes[value]], value.type, name=name)
            self.floats[value] = self.append(op)
        return self.floats[value]

    def rescale(self, codes: SSAValue, target: UniformType, layer: str) -> SSAValue:
        """Return `codes` at another scale, requantising them once for all users that want it."""
        kind = quantised(codes)
        if (kind.step, kind.zero) == (target.step, target.zero):
            return codes
        key = (codes, target.step, target.zero)
        if key not in self.rescaled:
            p = scalar_parameters((kind.step / target.step,), target.zero, self.rounding)
            low, high = output_bounds(target.step, target.zero)
            op = quant.RequantizeOp.make(
                [codes],
                TensorType(target, shape_of(codes)),
                mult=p.multipliers[0],
                shift=p.shift,
                bias=p.bias,
                bias_shift=p.bias_shift,
                zp=p.zp,
                lo=low,
                hi=high,
                rounding=self.rounding,
                name=self.unique(f"{layer}/requantize"),
            )
            self.rescaled[key] = self.append(op)
        return self.rescaled[key]

    def operand(self, op: Operation, index: int) -> SSAValue:
        """Return the codes of operand `index`; a constant is quantised with a scale of its own."""
        value = op.operands[index]
        if is_constant(value) and value not in self.codes:
            codes = emit_given.constant_codes(self, value)
            if codes is None:
                array = self.weights.get(constant_name(value)).astype(np.float64)
                floor = masked_floor(op, index, self.scales.of)
                low = False
                if floor is not None and array.size and array.min() < floor:
                    low = True
                    array = np.maximum(array, floor)
                    reason = f'"{constant_name(value)}" ends at {floor:g}, the scores\' least code'
                    self.ctx.decide(layer_of(op), STAGE, True, reason)
                scale = scale_of(float(np.abs(array).max()) if array.size else 0.0)
                rounded = np.clip(np.rint(array / scale), -127, 127).astype(np.int8)
                name = f"{constant_name(value)}.i8"
                codes = self.constant(name, rounded, UniformType.of(scale))
                if low:  # Not to share: each sum has a floor of its own.
                    return codes
            self.codes[value] = codes
        return self.as_codes(value)

    def result(self, op: Operation) -> TensorType[UniformType]:
        """Return the quantised type of an op's result."""
        return TensorType(self.kind(op.results[0]), shape_of(op.results[0]))

    def emit(self, op: Operation) -> None:
        """Append the integer form of `op`."""
        gain = exact_gain(op, self.weights)
        if gain is not None and op.results[0] not in self.scales.given:
            made = self.gain(op, gain)
        elif scalar_operand(op) is not None or op.name not in self.forms:
            made = self.table(op)
        elif self._keeps_sums(op):
            wide = self.wide_linear if self._matrix(op) is not None else self.wide_matmul
            self.floats[op.results[0]] = wide(op)
            return
        elif (refusal := emit_rows.scale_refusal(self, op)) is not None:
            self.host(op, refusal)
            return
        else:
            made = self.forms[op.name](op)
        self.codes[op.results[0]] = made

    def _carry(self, op: Operation) -> dict[str, Any]:
        """Return the attributes that name the layer and what was fused into it."""
        kept: dict[str, Any] = {"name": layer_of(op)}
        if "fused" in op.attributes:
            kept["fused"] = op.attributes["fused"]
        return kept

    # Arithmetic

    def conv(self, op: Operation) -> SSAValue:
        """`top.conv` to `quant.conv`."""
        attrs = Attrs(op.attributes)
        weight = self.weights.get(constant_name(op.operands[1]))
        operands, extra = self._channels(op, op.operands[0], weight, constant_name(op.operands[1]))
        return self.append(
            quant.ConvOp.make(
                operands,
                self.result(op),
                strides=list(attrs.ints("strides")),
                pads=list(attrs.ints("pads")),
                dilations=list(attrs.ints("dilations")),
                group=attrs.integer("group"),
                layout=attrs.string("layout", "nchw"),
                **extra,
            )
        )

    def linear(self, op: Operation) -> SSAValue:
        """`top.linear` to `quant.linear`."""
        weight = self.weights.get(constant_name(op.operands[1]))
        operands, extra = self._channels(op, op.operands[0], weight, constant_name(op.operands[1]))
        return self.append(quant.LinearOp.make(operands, self.result(op), **extra))

    def _matrix(self, op: Operation) -> np.ndarray[Any, Any] | None:
        """Return the constant `[N, K]` a linear layer or product multiplies by, if it has one."""
        if op.name == "top.linear":
            return self.weights.get(constant_name(op.operands[1]))
        if op.name != "top.matmul" or is_constant(op.operands[0]):
            return None
        weight = op.operands[1]
        if not is_constant(weight) or len(shape_of(weight)) != 2:
            return None
        return np.ascontiguousarray(self.weights.get(constant_name(weight)).T)

    def _keeps_sums(self, op: Operation) -> bool:
        """Whether a product's result is only read as floats, so that its sums need no codes.

        Eight bits leave ties among the classes of a classifier: its last layer keeps 32.
        """
        if op.name not in ("top.linear", "top.matmul"):
            return False
        attrs = Attrs(op.attributes)
        clamped = attrs.number("clamp_min") is not None or attrs.number("clamp_max") is not None
        return (
            not clamped
            and op.results[0] not in self.scales.given
            and all(
                use.operation in self.scales.hosts or isinstance(use.operation, ReturnOp)
                for use in op.results[0].uses
            )
        )

    def wide_linear(self, op: Operation) -> SSAValue:
        """A linear layer whose int32 sums leave the chip; returns them as floats."""
        weight, layer = self._matrix(op), layer_of(op)
        assert weight is not None
        operands, extra = self._channels(
            op, op.operands[0], weight, constant_name(op.operands[1]), wide=True
        )
        sums = self.append(
            quant.LinearOp.make(operands, TensorType(i32, shape_of(op.results[0])), **extra)
        )
        real = self.append(
            quant.DequantizeOp.make(
                [sums], op.results[0].type, name=self.unique(f"{layer}/dequantize")
            )
        )
        step = quantised(operands[0]).step
        scale = self.weights.get(extra["weight_scale"]).astype(np.float64) * step
        factor = self.constant(f"{layer}.output_scale", scale.astype(np.float32), f32)
        name = self.unique(f"{layer}/scale")
        product = top.create(top.OPS["mul"], [real, factor], {}, name=name)
        product.attributes["host"] = StringAttr("a float for every channel's 32-bit sum")
        return self.append(product)

    def _channels(
        self,
        op: Operation,
        x: SSAValue,
        weight: np.ndarray[Any, Any],
        weight_name: str,
        wide: bool = False,
    ) -> tuple[list[SSAValue], dict[str, Any]]:
        """Quantise weights and bias per channel; return operands and attributes of the op.

        `wide`: the sums are not requantised. The multiplier is then one, and nothing is rounded
        that a truncating chip would have to make up for.
        """
        layer, codes, attrs = layer_of(op), self.as_codes(x), Attrs(op.attributes)
        bits = attrs.integer("weight_bits", 8)
        if bits not in WEIGHT_CODES:
            raise TilewrightError("E0501", f'weights of "{layer}" have 8 or 4 bits, not {bits}')
        stored = i4 if bits == 4 and self._stores_half_bytes(layer) else i8
        source, target = quantised(codes), self.result(op).element_type
        bias = None
        if len(op.operands) > 2 and not is_absent(op.operands[2]):
            bias = self.weights.get(constant_name(op.operands[2]))
        p = quantise_channels(
            layer,
            weight,
            bias,
            input_scale=source.step,
            input_zero=source.zero,
            output_scale=target.step,
            output_zero=target.zero,
            rounding="half_up" if wide else self.rounding,
            input_mean=self.means.get(self.scales.names[x]),
            group=attrs.integer("group", 1),
            qmax=WEIGHT_CODES[bits],
            given=self.weights.get(attrs.string("weight_scale"))
            if "weight_scale" in op.attributes
            else None,
            clip=self.clip_weights,
            input_square=self.squares.get(self.scales.names[x]),
            given_bias=given_bias(op, self.weights),
        )
        low, high = (-128, 127) if wide else self._bounds(op, target)
        mult = np.ones_like(p.mult) if wide else p.mult
        shift = np.zeros_like(p.shift) if wide else p.shift
        operands = [
            codes,
            self.constant(f"{weight_name}.{stored}", p.weight, stored),
            self.constant(f"{layer}.bias", p.bias, i32),
            self.constant(f"{layer}.mult", mult, i32),
            self.constant(f"{layer}.shift", shift, i8),
        ]
        scale = self.weights.add(f"{layer}.weight_scale", p.scale)
        self._report(layer, p, "a 32-bit sum" if wide else f"output scale {target.step:.6g}")
        if not wide:
            factors = source.step * p.scale.astype(np.float64) / target.step
            emit_given.warn_ties(self, op, [[float(ratio)] for ratio in factors], whole=True)
        extra = {
            "zp": 0 if wide else p.zp,
            "lo": low,
            "hi": high,
            "rounding": self.rounding,
            "weight_scale": scale,
            "weight_bits": IntegerAttr(bits, i32) if bits != 8 else None,
            **self._carry(op),
        }
        return operands, extra

    def _stores_half_bytes(self, layer: str) -> bool:
        """Tell, and note, whether the chip stores a layer's weights of 4 bits two a byte.

        Every `mac_conv` takes such weights, diagonal ones too: what the layer is does not matter.
        """
        target = self.ctx.target
        if target is not None and "int4" in target.dtypes:
            self.ctx.decide(layer, STAGE, True, "weights of 4 bits, two a byte")
            return True
        why = "no target is known" if target is None else f"`{target.name}` has no int4"
        self.ctx.decide(layer, STAGE, False, f"weights of 4 bits take a byte each: {why}")
        return False

    def _decide(
        self, op: Operation, target: UniformType, ratios: list[float], whole: bool = False
    ) -> None:
        """Record a layer's scale; warn if many of its sums are ties, which ONNX rounds to even."""
        self.ctx.decide(layer_of(op), STAGE, True, f"output scale {target.step:.6g}")
        emit_given.warn_ties(self, op, [ratios], whole=whole)

    def _report(self, layer: str, p: ChannelParameters, result: str) -> None:
        notes = [result]
        if p.dead:
            notes.append(f"{len(p.dead)} dead channels")
        if p.raised:
            notes.append(f"{len(p.raised)} channels with a raised scale so that the bias fits")
        self.ctx.decide(
            layer, STAGE, True, "; ".join(notes), dead=list(p.dead), raised=list(p.raised)
        )

    def _bounds(self, op: Operation, target: UniformType) -> tuple[int, int]:
        attrs = Attrs(op.attributes)
        return output_bounds(
            target.step,
            target.zero,
            attrs.number("clamp_min"),
            attrs.number("clamp_max"),
            full=op.results[0] in self.scales.given,
        )

    def matmul(self, op: Operation) -> SSAValue:
        """`top.matmul`: by a constant matrix `quant.linear`, else `quant.matmul`."""
        matrix = self._matrix(op)
        if matrix is not None:
            name = constant_name(op.operands[1])
            operands, extra = self._channels(op, op.operands[0], matrix, name)
            return self.append(quant.LinearOp.make(operands, self.result(op), **extra))
        a, b = emit_given.factors(self, op)
        target = self.result(op).element_type
        layer, depth = layer_of(op), shape_of(a)[-1]
        # Both operands are codes, so a product reaches 128 * 128.
        p = pool_parameters(
            layer,
            quantised(a).step * quantised(b).step / target.step,
            depth * 128,
            0,
            target.zero,
            self.rounding,
        )
        low, high = self._bounds(op, target)
        product = quantised(a).step * quantised(b).step / target.step
        self._decide(op, target, [product], whole=True)
        return self.append(
            quant.MatmulOp.make(
                [a, b],
                self.result(op),
                bias=p.bias,
                mult=p.mult,
                shift=p.shift,
                zp=p.zp,
                lo=low,
                hi=high,
                rounding=self.rounding,
                **self._carry(op),
            )
        )

    def wide_matmul(self, op: Operation) -> SSAValue:
        """A product of two activations whose int32 sums leave the chip; returns them as floats."""
        a, b = emit_given.factors(self, op)
        layer = layer_of(op)
        # Both operands are codes, so a product reaches 128 * 128: the proof that sums fit.
        pool_parameters(layer, 1.0, shape_of(a)[-1] * 128, 0, 0, "half_up")
        sums = self.append(
            quant.MatmulOp.make(
                [a, b],
                TensorType(i32, shape_of(op.results[0])),
                bias=0,
                mult=1,
                shift=0,
                zp=0,
                lo=-128,
                hi=127,
                rounding=self.rounding,
                **self._carry(op),
            )
        )
        self.ctx.decide(layer, STAGE, True, "a 32-bit sum")
        real = self.append(
            quant.DequantizeOp.make(
                [sums], op.results[0].type, name=self.unique(f"{layer}/dequantize")
            )
        )
        scale = np.array(quantised(a).step * quantised(b).step, np.float32)
        factor = self.constant(f"{layer}.output_scale", scale, f32)
        product = top.create(top.OPS["mul"], [real, factor], {}, name=self.unique(f"{layer}/scale"))
        product.attributes["host"] = StringAttr("a float for every 32-bit sum")
        return self.append(product)

    def add(self, op: Operation) -> SSAValue:
        """`top.add` and `top.sub`: both operands in one fixed point, one rounding."""
        a, b = self.operand(op, 0), self.operand(op, 1)
        target = self.result(op).element_type
        p = scalar_parameters(
            (quantised(a).step / target.step, quantised(b).step / target.step),
            target.zero,
            self.rounding,
        )
        low, high = self._bounds(op, target)
        kind = quant.AddOp if op.name == "top.add" else quant.SubOp
        self._decide(op, target, [quantised(v).step / target.step for v in (a, b)])
        return self.append(
            kind.make(
                [a, b],
                self.result(op),
                mult_a=p.multipliers[0],
                mult_b=p.multipliers[1],
                shift=p.shift,
                bias=p.bias,
                bias_shift=p.bias_shift,
                zp=p.zp,
                lo=low,
                hi=high,
                rounding=self.rounding,
                **self._carry(op),
            )
        )

    def mul(self, op: Operation) -> SSAValue:
        """`top.mul` of two activations (or with a constant tensor)."""
        a, b = self.operand(op, 0), self.operand(op, 1)
        target = self.result(op).element_type
        ratio = quantised(a).step * quantised(b).step / target.step
        return self._single(quant.MulOp, op, [a, b], ratio)

    def _single(
        self,
        kind: type[quant.QuantOp],
        op: Operation,
        operands: list[SSAValue],
        ratio: float,
        unit: float = 1.0,
        **attributes: Any,
    ) -> SSAValue:
        """Append an op with one multiplier and a wide bias; its sums are multiples of `unit`."""
        target = self.result(op).element_type
        p = scalar_parameters((ratio,), target.zero, self.rounding)
        low, high = self._bounds(op, target)
        self._decide(op, target, [ratio * unit])
        return self.append(
            kind.make(
                operands,
                self.result(op),
                mult=p.multipliers[0],
                shift=p.shift,
                bias=p.bias,
                bias_shift=p.bias_shift,
                zp=p.zp,
                lo=low,
                hi=high,
                rounding=self.rounding,
                **attributes,
                **self._carry(op),
            )
        )

    def gain(self, op: Operation, gain: float) -> SSAValue:
        """Multiplication by a positive scalar: the same codes at another scale, exactly."""
        index = scalar_operand(op)
        assert index is not None
        target = self.result(op).element_type
        self.ctx.decide(
            layer_of(op), STAGE, True, f"the codes stay; the scale becomes {target.step:.6g}"
        )
        return self.append(
            quant.RequantizeOp.make(
                [self.as_codes(op.operands[1 - index])],
                self.result(op),
                mult=1,
                shift=0,
                bias=0,
                bias_shift=0,
                zp=target.zero,
                lo=-128,
                hi=127,
                rounding=self.rounding,
                gain=FloatAttr(gain, f64),
                **self._carry(op),
            )
        )

    def table(self, op: Operation) -> SSAValue:
        """Any function of one activation as 256 codes."""
        function, parameters = table_function(op, self.weights)
        index = scalar_operand(op)
        codes = self.as_codes(op.operands[0 if index is None else 1 - index])
        source, target = quantised(codes), self.result(op).element_type
        layer = layer_of(op)
        if op.results[0] in self.scales.given:
            codes_of = exact_table(
                function,
                parameters,
                EdgeScale(source.step, source.zero),
                EdgeScale(target.step, target.zero),
            )
        else:
            codes_of = lookup_table(
                function,
                parameters,
                input_scale=source.step,
                input_zero=source.zero,
                output_scale=target.step,
                output_zero=target.zero,
            )
        low, high = self._bounds(op, target)
        table = self.weights.add(f"{layer}.table", np.clip(codes_of, low, high))
        self.ctx.decide(layer, STAGE, True, f"table of {function}, scale {target.step:.6g}")
        return self.append(
            quant.LutOp.make(
                [codes], self.result(op), table=table, function=function, **self._carry(op)
            )
        )

    def avg_pool(self, op: Operation) -> SSAValue:
        """`top.avg_pool`, whose windows all count the same number of elements."""
        attrs = Attrs(op.attributes)
        return self._pool(
            op,
            self.as_codes(op.operands[0]),
            self.result(op),
            kernel=attrs.ints("kernel"),
            strides=attrs.ints("strides"),
            pads=attrs.ints("pads"),
            layout=attrs.string("layout", "nchw"),
        )

    def _pool(
        self,
        op: Operation,
        codes: SSAValue,
        result: TensorType[UniformType],
        *,
        kernel: tuple[int, ...],
        strides: tuple[int, ...],
        pads: tuple[int, ...],
        layout: str,
        divide: bool = True,
    ) -> SSAValue:
        source, target = quantised(codes), result.element_type
        window = kernel[0] * kernel[1]
        p = pool_parameters(
            layer_of(op),
            source.step / target.step / (window if divide else 1),
            window,
            source.zero,
            target.zero,
            self.rounding,
        )
        low, high = self._bounds(op, target)
        ratio = source.step / target.step / (window if divide else 1)
        self._decide(op, target, [ratio], whole=True)
        return self.append(
            quant.AvgPoolOp.make(
                [codes],
                result,
                kernel=list(kernel),
                strides=list(strides),
                pads=list(pads),
                layout=layout,
                bias=p.bias,
                mult=p.mult,
                shift=p.shift,
                zp=p.zp,
                lo=low,
                hi=high,
                rounding=self.rounding,
                sum=None if divide else UnitAttr(),
                **self._carry(op),
            )
        )

    def reduce(self, op: Operation) -> SSAValue:
        """Mean or sum over neighbouring axes: one window over an image of a fitting shape."""
        attrs = Attrs(op.attributes)
        axes, source = attrs.ints("axes"), shape_of(op.operands[0])
        first, last = axes[0], axes[-1] + 1
        codes = self.as_codes(op.operands[0])
        element = self.result(op).element_type
        if len(source) == 4 and axes == (2, 3):
            # Planes: each is an image of one channel.
            planes, window = source[0] * source[1], (source[2], source[3])
            pooled = (planes, 1, 1, 1)
            codes = self._reshape(codes, (planes, *window, 1), f"{layer_of(op)}/image")
        elif len(source) == 4 and axes == (1, 2):
            window, pooled = (source[1], source[2]), (source[0], 1, 1, source[3])
        else:
            lead = int(np.prod(source[:first], dtype=np.int64))
            middle = int(np.prod(source[first:last], dtype=np.int64))
            tail = int(np.prod(source[last:], dtype=np.int64))
            window, pooled = (middle, 1), (lead, 1, 1, tail)
            codes = self._reshape(codes, (lead, middle, 1, tail), f"{layer_of(op)}/image")
        result = self._pool(
            op,
            codes,
            TensorType(element, pooled),
            kernel=window,
            strides=(1, 1),
            pads=(0, 0, 0, 0),
            layout="nhwc",
            divide=attrs.string("kind") == "mean",
        )
        return self._reshape(result, shape_of(op.results[0]), f"{layer_of(op)}/reshape")

    def _reshape(self, codes: SSAValue, shape: tuple[int, ...], name: str) -> SSAValue:
        if shape_of(codes) == shape:
            return codes
        kind = TensorType(quantised(codes), shape)
        return self.append(
            top.create(top.ReshapeOp, [codes], name=self.unique(name), result_types=[kind])
        )

    # Movers

    def mover(self, op: Operation) -> SSAValue:
        """Ops that only move codes stay `top` ops, with quantised types."""
        codes = self.as_codes(op.operands[0])
        kind = TensorType(quantised(codes), shape_of(op.results[0]))
        made = type(op).create(operands=[codes], result_types=[kind], attributes=op.attributes)
        self.ctx.decide(layer_of(op), STAGE, True, "moves codes")
        moved = self.append(made)
        target = self.kind(op.results[0])
        if op.results[0] in self.scales.given and quantised(moved) != target:
            return emit_given.restep(self, moved, target, layer_of(op))
        return moved

    def concat(self, op: Operation) -> SSAValue:
        """`top.concat`; operands of another scale are requantised."""
        kind = self.result(op)
        scale, zero = kind.element_type.step, kind.element_type.zero
        operands: list[SSAValue] = []
        for index, value in enumerate(op.operands):
            if is_constant(value):
                array = self.weights.get(constant_name(value)).astype(np.float64)
                low, high = output_bounds(scale, zero)
                codes = np.clip(np.rint(array / scale) + zero, low, high).astype(np.int8)
                operands.append(
                    self.constant(f"{constant_name(value)}.i8", codes, kind.element_type)
                )
            else:
                codes = self.operand(op, index)
                if op.results[0] in self.scales.given:
                    codes = emit_given.restep(self, codes, kind.element_type, layer_of(op))
                operands.append(self.rescale(codes, kind.element_type, layer_of(op)))
        self.ctx.decide(layer_of(op), STAGE, True, f"output scale {scale:.6g}")
        return self.append(
            type(op).create(operands=operands, result_types=[kind], attributes=op.attributes)
        )

    def resize(self, op: Operation) -> SSAValue:
        """`top.resize`, nearest or linear, with 11-bit weights."""
        attrs = Attrs(op.attributes)
        layout = attrs.string("layout", "nchw")
        _, h, w = image_axes(layout)
        source, target = shape_of(op.operands[0]), shape_of(op.results[0])
        codes = self.as_codes(op.operands[0])
        tables = [
            self.constant(
                f"{layer_of(op)}.table_{name}",
                resize_table(
                    source[axis],
                    target[axis],
                    attrs.floats("scales")[axis],
                    mode=attrs.string("mode"),
                    coordinate=attrs.string("coordinate"),
                    nearest_mode=attrs.string("nearest_mode", "round_prefer_floor"),
                ),
                i16,
            )
            for name, axis in (("y", h), ("x", w))
        ]
        ratio = quantised(codes).step / self.scales.of(op.results[0]).step / 2**22
        unit = math.prod(emit_given.common_weight(self, table) for table in tables)
        kept = {"layout": layout, "mode": attrs.string("mode")}
        return self._single(quant.ResizeOp, op, [codes, *tables], ratio, unit, **kept)

    def host(self, op: Operation, reason: str) -> None:
        """Copy a float op; its operands are dequantised where they are codes."""
        # What only re-orders elements reads them as they are: its own readers quantise.
        mapping = {
            value: self.as_float(value)
            if op.name in LAYOUT_OPS
            else emit_given.as_read(self, value)
            for value in op.operands
        }
        clone = op.clone(value_mapper=mapping)
        if op.name not in ("top.weight", "top.none"):
            clone.attributes["host"] = StringAttr(reason)
            self.ctx.decide(layer_of(op), STAGE, False, reason)
        self.block.add_op(clone)
        self.hosted.add(op)
        for old, new in zip(op.results, clone.results, strict=True):
            self.floats[old] = new
