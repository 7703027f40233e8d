"""Turn the float graph into fp16 for targets that have it.

    %y = top.conv %x, %w, %b {name = "c"} : (tensor<..xf32>, ..) -> tensor<..xf32>
  becomes
    %0 = top.cast %x {name = "x/to_half"} : (tensor<..xf32>) -> tensor<..xf16>
    %y = top.conv %0, %w16, %b {name = "c"} : (tensor<..xf16>, tensor<..xf16>, tensor<..xf32>)
                                           -> tensor<..xf16>

Operands are fp16, sums float32, results rounded once; biases stay float32, as the array adds them.
Nothing may overflow: weights are checked here, activations against the calibrated largest values.
What would overflow stays float32 on the host with that reason (`overflow=host`), or the model is
refused (`overflow=refuse`). The usual place is a normalisation spelled out, whose squares leave the
range long before its result does:

    %2 = top.mul %1, %1 {name = "sq"}     179413 seen: %2 and what reads it stay float32
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override
from xdsl.context import Context
from xdsl.dialects.builtin import Float16Type, ModuleOp, StringAttr, TensorType, f16, f32
from xdsl.dialects.func import ReturnOp
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.passes import ModulePass

from tilewright.diagnostics import TilewrightError
from tilewright.dialects import top
from tilewright.dialects.quant import shape_of
from tilewright.dialects.top.base import Attrs, is_absent
from tilewright.ir.context import compile_context
from tilewright.quant.functions import FUNCTIONS
from tilewright.quant.graph import argument_names, layer_of, main_function
from tilewright.quant.table import CALIBRATION_ATTRIBUTE, CalibrationTable, read_attribute
from tilewright.spec import isa
from tilewright.transforms.quant.classify import (
    constant_name,
    host_reason,
    is_constant,
    operands_reason,
    place,
)
from tilewright.transforms.quant.scales import value_names

if TYPE_CHECKING:
    from tilewright.ir.context import CompileContext
    from tilewright.ir.weights import WeightStore

STAGE = "convert-to-half"

OVERFLOW = 65520.0
"""Magnitudes from here on round to infinity in fp16."""

FLOAT_FUNCTIONS = frozenset({*isa.FUNCTIONS, "relu", "clip"}) - {"none"}
"""Functions of one value that the vector unit has in fp16; ReLU and Clip are its clamp."""

OVERFLOWS = ("host", "refuse")
"""What may be done about layers that would overflow."""

BINARY = ("top.add", "top.sub", "top.mul", "top.min", "top.max")
"""Operations of two values that the vector unit has in fp16."""

LARGEST_WINDOW = 1 << 14
"""Elements of a window whose reciprocal is a normal fp16 number: an average is a weighted sum."""


def half_reason(op: Operation, weights: WeightStore) -> str | None:
    """Return why `op` stays float32 on the host, or None if the device has it in fp16."""
    function = op.name.removeprefix("top.")
    if function in FUNCTIONS and function != "pow":
        return operands_reason(op) or _function_reason(op, function)
    if op.name in BINARY:
        return operands_reason(op)
    if op.name in ("top.div", "top.pow", "top.prelu", "top.resize"):
        return f"{function} has no fp16 form"
    reason = host_reason(op, weights)
    if reason is None and op.name in ("top.avg_pool", "top.reduce"):
        window = _window(op)
        if window > LARGEST_WINDOW:
            reason = f"its windows of {window} elements are too large to average in fp16"
    return reason


def _function_reason(op: Operation, function: str) -> str | None:
    """Return why a function of one value is not what the vector unit computes."""
    if function not in FLOAT_FUNCTIONS:
        return f"{function} is no fp16 function of the vector unit"
    attrs = Attrs(op.attributes)
    if function == "hard_sigmoid":
        alpha, beta = attrs.number("alpha") or 0.0, attrs.number("beta") or 0.0
        if max(abs(alpha), abs(beta)) > 1:
            return f"slope {alpha:g} and offset {beta:g} could overflow before its clamp"
    if function == "gelu" and attrs.string("approximate", "none") != "none":
        return "the vector unit's gelu is the exact one"
    return None


def _window(op: Operation) -> int:
    """Return how many elements an average pool or a reduction adds up."""
    attrs = Attrs(op.attributes)
    if op.name == "top.avg_pool":
        return math.prod(attrs.ints("kernel"))
    shape = shape_of(op.operands[0])
    return math.prod(shape[axis] for axis in attrs.ints("axes"))


class _Ranges:
    """Which ops cannot be fp16 because a value they read or make would overflow."""

    def __init__(
        self, ctx: CompileContext, names: Mapping[SSAValue, str], largest: Mapping[str, float]
    ) -> None:
        self.ctx = ctx
        self.names = names
        self.largest = largest
        self.found: dict[str, float] = {}
        """Largest magnitude of every value that overflows, by name."""

    def reason(self, op: Operation, weights: WeightStore) -> str | None:
        """Return why `op` stays float32: its kind, or its values."""
        own = half_reason(op, weights)
        if own is not None:
            return own
        worst: tuple[float, str] | None = None
        for value in (*op.operands, *op.results):
            seen = self._magnitude(op, value)
            if seen >= OVERFLOW and (worst is None or seen > worst[0]):
                name = constant_name(value) if is_constant(value) else self.names[value]
                worst = seen, name
                self.found[name] = seen
        if worst is None:
            return None
        seen, name = worst
        return f'"{name}" reaches {seen:.6g}; the largest fp16 is 65504'

    def _magnitude(self, op: Operation, value: SSAValue) -> float:
        """Return the largest magnitude of a value as `op` holds it; 0 if it stays float32."""
        if is_absent(value):
            return 0.0
        if not is_constant(value):
            return self.largest.get(self.names[value], 0.0)
        if op.name in ("top.conv", "top.linear") and value is not op.operands[1]:
            return 0.0  # biases are added in float32
        array = self.ctx.weights.get(constant_name(value))
        return float(np.abs(array).max()) if array.size else 0.0


def _is_spelled_out(op: Operation) -> bool:
    """Tell whether an op is the square of a normalisation in single operations."""
    square = op.name == "top.mul" and op.operands[0] is op.operands[1]
    if not square and op.name != "top.pow":
        return False
    return any(use.operation.name == "top.reduce" for use in op.results[0].uses)


class _Converter:
    """Appends fp16 ops to a new block; remembers both forms of every value."""

    def __init__(
        self,
        ctx: CompileContext,
        names: Mapping[SSAValue, str],
        largest: Mapping[str, float],
        block: Block,
    ) -> None:
        self.ctx = ctx
        self.names = names
        self.largest = largest
        self.block = block
        self.half: dict[SSAValue, SSAValue] = {}
        self.floats: dict[SSAValue, SSAValue] = {}

    def append(self, op: Operation) -> SSAValue:
        self.block.add_op(op)
        return op.results[0]

    def check(self, value: SSAValue) -> None:
        """Raise E0304 if calibration saw `value` overflow."""
        name = self.names[value]
        seen = self.largest.get(name, 0.0)
        if seen >= OVERFLOW:
            raise TilewrightError(
                "E0304",
                f'"{name}" overflows fp16',
                details=[f"calibration saw {seen:.6g}; the largest fp16 is 65504"],
                hint="leave out `overflow=refuse` (--fp16-overflow refuse): such layers then stay "
                "float32 on the host; or compile for int8, or scale the model's input",
            )

    def narrow(self, name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return a constant rounded to fp16.

        Raises:
            TilewrightError: E0304, it overflows.
        """
        if array.size and not float(np.abs(array).max()) < OVERFLOW:
            raise TilewrightError("E0304", f'constant "{name}" overflows fp16')
        return array.astype(np.float16)

    def as_half(self, value: SSAValue) -> SSAValue:
        """Return the fp16 form of a value."""
        if value in self.half:
            return self.half[value]
        kind = TensorType(f16, shape_of(value))
        if is_constant(value):
            name = constant_name(value)
            array = self.narrow(name, self.ctx.weights.get(name))
            stored = self.ctx.weights.add(f"{name}.f16", array)
            op = top.create(top.WeightOp, [], name=stored, result_types=[kind])
        else:
            self.check(value)
            op = top.create(
                top.CastOp,
                [self.floats[value]],
                name=f"{self.names[value]}/to_half",
                result_types=[kind],
            )
        self.half[value] = self.append(op)
        return self.half[value]

    def as_float(self, value: SSAValue) -> SSAValue:
        """Return the float32 form of a value."""
        if value not in self.floats:
            op = top.create(
                top.CastOp,
                [self.half[value]],
                name=f"{self.names[value]}/to_float",
                result_types=[value.type],
            )
            self.floats[value] = self.append(op)
        return self.floats[value]

    def constant(self, name: str, array: np.ndarray[Any, Any], element: Attribute) -> SSAValue:
        """Store `array` under a name like `name` and return it as a `top.weight`."""
        stored = self.ctx.weights.add(name, array)
        kind = TensorType(element, array.shape)
        return self.append(top.create(top.WeightOp, [], name=stored, result_types=[kind]))

    def convert(self, op: Operation) -> None:
        """Append `op` in fp16."""
        for result in op.results:
            self.check(result)
        if op.name in ("top.conv", "top.linear"):
            self.half[op.results[0]] = self._product(op, type(op), self.as_half(op.operands[1]))
        elif op.name == "top.matmul" and _is_matrix(op):
            name = constant_name(op.operands[1])
            matrix = np.ascontiguousarray(self.ctx.weights.get(name).T)
            weight = self.constant(f"{name}.f16", self.narrow(name, matrix), f16)
            self.half[op.results[0]] = self._product(op, top.LinearOp, weight)
        elif op.name == "top.reduce":
            self._reduce(op)
        elif op.name == "top.hard_sigmoid" and not _is_standard(op):
            self._hard_sigmoid(op)
        else:
            self._same(op, [self.as_half(value) for value in op.operands])
        self.ctx.decide(layer_of(op), STAGE, True, "computed in fp16")

    def _same(self, op: Operation, operands: list[SSAValue]) -> None:
        made = type(op).create(
            operands=operands,
            result_types=[TensorType(f16, shape_of(result)) for result in op.results],
            attributes=op.attributes,
        )
        self.block.add_op(made)
        self.half.update(zip(op.results, made.results, strict=True))

    def _product(self, op: Operation, kind: type[Operation], weight: SSAValue) -> SSAValue:
        """Append a product with constant weights; a bias that is absent becomes zeros."""
        channels = shape_of(weight)[0]
        if len(op.operands) > 2 and not is_absent(op.operands[2]):
            bias = self.as_float(op.operands[2])
        else:
            bias = self.constant(f"{layer_of(op)}.bias", np.zeros(channels, np.float32), f32)
        made = kind.create(
            operands=[self.as_half(op.operands[0]), weight, bias],
            result_types=[TensorType(f16, shape_of(op.results[0]))],
            attributes=op.attributes,
        )
        return self.append(made)

    def _hard_sigmoid(self, op: Operation) -> None:
        """Append one of another slope than the vector unit's as a product and a clamped sum."""
        attrs, layer = Attrs(op.attributes), layer_of(op)
        slope, offset = (
            self.constant(f"{layer}.{key}", np.array(attrs.number(key), np.float16), f16)
            for key in ("alpha", "beta")
        )
        kind = TensorType(f16, shape_of(op.results[0]))
        value = self.append(
            top.create(
                top.MulOp,
                [self.as_half(op.operands[0]), slope],
                name=f"{layer}/scaled",
                result_types=[kind],
            )
        )
        bounds = {"clamp_min": 0.0, "clamp_max": 1.0}
        self.half[op.results[0]] = self.append(
            top.create(top.AddOp, [value, offset], bounds, name=layer, result_types=[kind])
        )

    def _reduce(self, op: Operation) -> None:
        """Append a mean as an average pool over an image of a fitting shape.

        A sum is the mean times the count.
        """
        attrs, layer = Attrs(op.attributes), layer_of(op)
        axes, source = attrs.ints("axes"), shape_of(op.operands[0])
        value, layout = self.as_half(op.operands[0]), "nhwc"
        first, last = axes[0], axes[-1] + 1
        if len(source) == 4 and axes == (1, 2):
            window, pooled = (source[1], source[2]), (source[0], 1, 1, source[3])
        else:
            lead, middle, tail = (
                math.prod(part) for part in (source[:first], source[first:last], source[last:])
            )
            window, pooled = (middle, 1), (lead, 1, 1, tail)
            value = self._reshape(value, (lead, middle, 1, tail), f"{layer}/image")
        divide, shape = attrs.string("kind") == "mean", shape_of(op.results[0])
        pool = top.create(
            top.AvgPoolOp,
            [value],
            {
                "kernel": window,
                "strides": (1, 1),
                "pads": (0, 0, 0, 0),
                "dilations": (1, 1),
                "ceil_mode": False,
                "count_include_pad": False,
                "layout": layout,
            },
            name=layer if divide else f"{layer}/mean",
            result_types=[TensorType(f16, pooled)],
        )
        if divide and "fused" in op.attributes:
            pool.attributes["fused"] = op.attributes["fused"]
        value = self.append(pool)
        if not divide:
            count = self.constant(f"{layer}.count", np.array(math.prod(window), np.float16), f16)
            kind = TensorType(f16, pooled)
            value = self.append(
                top.create(top.MulOp, [value, count], name=layer, result_types=[kind])
            )
        self.half[op.results[0]] = self._reshape(value, shape, f"{layer}/reshape")

    def _reshape(self, value: SSAValue, shape: tuple[int, ...], name: str) -> SSAValue:
        if shape_of(value) == shape:
            return value
        kind = TensorType(f16, shape)
        return self.append(top.create(top.ReshapeOp, [value], name=name, result_types=[kind]))

    def keep(self, op: Operation, reason: str | None) -> None:
        """Append a copy of `op` in float32; `reason` is None for constants."""
        clone = op.clone(value_mapper={value: self.as_float(value) for value in op.operands})
        if reason is not None:
            clone.attributes["host"] = StringAttr(reason)
            self.ctx.decide(layer_of(op), STAGE, False, reason)
        self.block.add_op(clone)
        self.floats.update(zip(op.results, clone.results, strict=True))


def _is_standard(op: Operation) -> bool:
    """Tell whether a `top.hard_sigmoid` is the vector unit's: slope 1/6, offset 1/2."""
    attrs = Attrs(op.attributes)
    return abs((attrs.number("alpha") or 0.0) - 1 / 6) <= 1e-6 and attrs.number("beta") == 0.5


def _is_matrix(op: Operation) -> bool:
    """Tell whether a `top.matmul` has a constant matrix on the right: it is a linear layer."""
    weight = op.operands[1]
    return is_constant(weight) and len(shape_of(weight)) == 2 and not is_constant(op.operands[0])


def convert_module(
    ctx: CompileContext,
    module: ModuleOp,
    largest: Mapping[str, float],
    overflow: str = "host",
) -> None:
    """Convert `@main` to fp16 in place.

    Args:
        ctx: holds weights, target and decision log.
        module: a float `top` module, fused, layout assigned.
        largest: largest magnitude calibration saw of every value, by name.
        overflow: `host`: layers whose values would overflow stay float32 on the host; `refuse`.

    Raises:
        TilewrightError: E0402, the target has no fp16; E0304, a value would overflow and
            `overflow` is `refuse`.
    """
    if ctx.target is not None and "fp16" not in ctx.target.dtypes:
        raise TilewrightError(
            "E0402",
            f"target `{ctx.target.name}` has no fp16",
            details=[f"its number types: {', '.join(ctx.target.dtypes)}"],
        )
    main = main_function(module)
    old = main.body.block
    ops = [op for op in old.ops if not isinstance(op, ReturnOp)]
    arguments: dict[SSAValue, str] = dict(zip(old.args, argument_names(main), strict=True))
    constants = {op for op in ops if op.name in ("top.weight", "top.none")}
    names = value_names(ops, arguments)
    ranges = _Ranges(ctx, names, largest)
    layers = [op for op in ops if op not in constants]
    hosts = place(layers, ctx.weights, ranges.reason if overflow == "host" else half_reason)
    if ranges.found:
        _warn(ctx, layers, hosts, ranges)
    block = Block(arg_types=[argument.type for argument in old.args])
    converter = _Converter(ctx, names, largest, block)
    for before, after in zip(old.args, block.args, strict=True):
        after.name_hint = before.name_hint
        converter.floats[before] = after
    for op in ops:
        if op in constants or op in hosts:
            converter.keep(op, hosts.get(op))
        else:
            converter.convert(op)
    last = old.last_op
    assert isinstance(last, ReturnOp)
    block.add_op(ReturnOp(*(converter.as_float(value) for value in last.operands)))
    main.detach_region(main.body)
    main.add_region(Region(block))
    kept: set[str] = set()
    for op in reversed(list(block.ops)):
        if op.name not in ("top.weight", "top.none"):
            continue
        if not op.results[0].uses:
            op.detach()
            op.erase()
        elif op.name == "top.weight":
            kept.add(layer_of(op))
    ctx.weights.keep_only(kept)


def _warn(
    ctx: CompileContext, layers: list[Operation], hosts: Mapping[Operation, str], ranges: _Ranges
) -> None:
    """Record which layers stay float32 for their range, and what can be done."""
    kept = [layer_of(op) for op in layers if "the largest fp16 is" in hosts.get(op, "")]
    name, seen = max(ranges.found.items(), key=lambda item: item[1])
    what = f'{len(kept)} layer{"s" * (len(kept) != 1)} stay float32 on the host: "{name}" reaches'
    advice = "scale the model's input, or compile for int8"
    for op in layers:
        if _is_spelled_out(op) and ranges.found.keys() & {layer_of(op)}:
            advice = (
                f'"{layer_of(op)}" is the square of a normalisation in single operations: export '
                "it as one (LayerNormalization of opset 17), or compile for int8"
            )
            break
    text = f"{what} {seen:.6g}, beyond the 65504 of fp16; {advice}"
    ctx.decide(kept[0], STAGE, False, text, warning=text, layers=kept)


def _has_half(kind: Attribute) -> bool:
    return isinstance(kind, TensorType) and isinstance(kind.element_type, Float16Type)


@dataclass(frozen=True)
class ConvertToHalfPass(ModulePass):
    """Convert a float graph to fp16.

    Requires: `top` module, fused, layout assigned; ranges in the module or in `table`. Ensures: ops
    on the device have fp16 operands and results, nothing calibration saw overflows.
    """

    name = "convert-to-half"

    table: str = ""
    """Calibration table (YAML) to use instead of the ranges in the module."""
    overflow: str = "host"
    """`host`: what would overflow stays float32 on the host; `refuse`: it is an error."""

    @override
    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Convert `@main` in place.

        Raises:
            TilewrightError: E0301, there are no ranges; E0702, `overflow` is not legal; as
                `convert_module`.
        """
        context = compile_context(ctx)
        if any(
            _has_half(r.type) for item in main_function(op).body.block.ops for r in item.results
        ):
            return
        table = CalibrationTable.load(self.table) if self.table else read_attribute(op)
        if table is None:
            raise TilewrightError(
                "E0301",
                "fp16 needs calibrated ranges: an overflow must not go unseen",
                hint="give `--calibration-data FOLDER`, or `convert-to-half{table=FILE}`",
            )
        if self.overflow not in OVERFLOWS:
            raise TilewrightError(
                "E0702", f"overflow must be {' or '.join(OVERFLOWS)}, not `{self.overflow}`"
            )
        convert_module(context, op, table.maxima(), self.overflow)
        op.attributes.pop(CALIBRATION_ATTRIBUTE, None)
