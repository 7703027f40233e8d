"""Turn the float graph into fp16 for targets that have it.

    %y = top.conv %x, %w, %b {name = "c"} : (tensor<..xf32>, ..) -> tensor<..xf32>
  becomes
    %0 = top.cast %x {name = "x/to_half"} : (tensor<..xf32>) -> tensor<..xf16>
    %y = top.conv %0, %w16, %b {name = "c"} : (tensor<..xf16>, tensor<..xf16>, tensor<..xf32>)
                                           -> tensor<..xf16>

Operands are fp16, sums float32, results rounded once; biases stay float32, as the array adds them.
Nothing may overflow: weights are checked here, activations against the calibrated largest values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
from tilewright.ir.context import compile_context
from tilewright.quant.functions import FUNCTIONS
from tilewright.quant.graph import argument_names, layer_of, main_function
from tilewright.quant.table import CALIBRATION_ATTRIBUTE, CalibrationTable, read_attribute
from tilewright.spec import isa
from tilewright.transforms.quant.classify import (
    constant_name,
    host_reason,
    is_constant,
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


def half_reason(op: Operation, weights: WeightStore) -> str | None:
    """Return why `op` stays float32 on the host, or None if the device has it in fp16."""
    function = op.name.removeprefix("top.")
    if function in FUNCTIONS and function != "pow":
        if function not in FLOAT_FUNCTIONS:
            return f"{function} is no fp16 function of the vector unit"
        kind = op.results[0].type
        wide = isinstance(kind, TensorType) and kind.element_type == f32
        return None if wide else f"it works on {kind} values"
    if op.name in ("top.div", "top.pow"):
        return f"{function} has no fp16 form"
    return host_reason(op, weights)


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
                hint="compile for int8, or scale the model's input",
            )

    def as_half(self, value: SSAValue) -> SSAValue:
        """Return the fp16 form of a value."""
        if value in self.half:
            return self.half[value]
        kind = TensorType(f16, shape_of(value))
        if is_constant(value):
            name = constant_name(value)
            array = self.ctx.weights.get(name)
            if array.size and not float(np.abs(array).max()) < OVERFLOW:
                raise TilewrightError("E0304", f'constant "{name}" overflows fp16')
            stored = self.ctx.weights.add(f"{name}.f16", array.astype(np.float16))
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

    def convert(self, op: Operation) -> None:
        """Append `op` in fp16."""
        mac = op.name in ("top.conv", "top.linear")
        operands: list[SSAValue] = []
        for index, value in enumerate(op.operands):
            bias = mac and index == 2
            operands.append(self.as_float(value) if bias else self.as_half(value))
        for result in op.results:
            self.check(result)
        made = type(op).create(
            operands=operands,
            result_types=[TensorType(f16, shape_of(result)) for result in op.results],
            attributes=op.attributes,
        )
        self.block.add_op(made)
        self.half.update(zip(op.results, made.results, strict=True))
        self.ctx.decide(layer_of(op), STAGE, True, "computed in fp16")

    def keep(self, op: Operation, reason: str | None) -> None:
        """Append a copy of `op` in float32; `reason` is None for constants."""
        clone = op.clone(value_mapper={value: self.as_float(value) for value in op.operands})
        if reason is not None:
            clone.attributes["host"] = StringAttr(reason)
            self.ctx.decide(layer_of(op), STAGE, False, reason)
        self.block.add_op(clone)
        self.floats.update(zip(op.results, clone.results, strict=True))


def convert_module(ctx: CompileContext, module: ModuleOp, largest: Mapping[str, float]) -> None:
    """Convert `@main` to fp16 in place.

    Args:
        ctx: holds weights, target and decision log.
        module: a float `top` module, fused, layout assigned.
        largest: largest magnitude calibration saw of every value, by name.

    Raises:
        TilewrightError: E0402, the target has no fp16; E0304, a value would overflow.
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
    hosts = place([op for op in ops if op not in constants], ctx.weights, half_reason)
    block = Block(arg_types=[argument.type for argument in old.args])
    converter = _Converter(ctx, value_names(ops, arguments), largest, block)
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

    @override
    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Convert `@main` in place.

        Raises:
            TilewrightError: E0301, there are no ranges; as `convert_module`.
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
        convert_module(context, op, table.maxima())
        op.attributes.pop(CALIBRATION_ATTRIBUTE, None)
