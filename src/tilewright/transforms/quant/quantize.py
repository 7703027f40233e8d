"""Turn the float graph into integers: every edge a scale, every op its integer parameters.

Before (calibrated ranges: x 2.54, conv1 6.0)::

    %y = top.conv %x, %w, %b {name = "conv1", clamp_min = 0.0 : f32, ...}

After::

    %q = quant.quantize %x {name = "x/quantize"} : ... -> tensor<..x!quant.uniform<i8:f32, 0.02:0>>
    %y = quant.conv %q, %w8, %bias, %mult, %shift {zp = 0, lo = 0, hi = 127, rounding = "half_up"}

Algebra, for scales `s_x`, `s_w[c]`, `s_y`: `y / s_y = sum(q_x * q_w) * (s_x * s_w / s_y)`; the
real factor becomes `mult / 2^shift` and the only rounding is that shift. Ops without an integer
form stay float between `quant.dequantize` and `quant.quantize`, and say why (`host = "..."`).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from xdsl.context import Context
from xdsl.dialects.builtin import ArrayAttr, FloatAttr, IntegerAttr, ModuleOp
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, Region, SSAValue
from xdsl.passes import ModulePass

from tilewright.diagnostics import TilewrightError
from tilewright.ir.context import compile_context
from tilewright.quant.graph import argument_names, layer_of, main_function
from tilewright.quant.table import CALIBRATION_ATTRIBUTE, CalibrationTable, read_attribute
from tilewright.transforms.quant.emit import Emitter
from tilewright.transforms.quant.emit_given import as_read
from tilewright.transforms.quant.emit_rows import rule_for
from tilewright.transforms.quant.given import gives_sums, place_given
from tilewright.transforms.quant.scales import EdgeScale, Scales, value_names

if TYPE_CHECKING:
    from tilewright.ir.context import CompileContext

ACTIVATIONS = ("symmetric", "asymmetric")


def quantize_module(
    ctx: CompileContext,
    module: ModuleOp,
    thresholds: Mapping[str, float],
    target_rounding: str,
    means: Mapping[str, npt.NDArray[np.float32]] | None = None,
    asymmetric: bool = False,
    ranges: Mapping[str, tuple[float, float]] | None = None,
    squares: Mapping[str, npt.NDArray[np.float32]] | None = None,
    clip_weights: bool = False,
) -> None:
    """Quantise `@main` in place: int8, weights per channel, activations per tensor.

    Args:
        ctx: holds the weights (float ones are replaced by codes) and the decision log.
        module: a float `top` module, fused, its layout assigned.
        thresholds: largest magnitude of every value, by layer or argument name.
        target_rounding: rounding of the target's requantising shift.
        means: mean of every channel of layers' inputs (`CalibrationTable.means`); with them biases
            take back the mean error of rounded weights.
        asymmetric: all 256 codes for `ranges`; zero point -128 for what cannot be negative.
        ranges: least and greatest value of every value, for `asymmetric` (`CalibrationTable`).
        squares: mean square of every channel of layers' inputs, for `clip_weights`.
        clip_weights: search each channel's weight scale for the least expected squared error.

    Raises:
        TilewrightError: E0301, a range is missing; E0302, an accumulator could overflow.
    """
    main = main_function(module)
    old = main.body.block
    ops = [op for op in old.ops if not isinstance(op, ReturnOp)]
    if any(op.name.startswith("quant.") for op in ops):
        return
    arguments: dict[SSAValue, str] = dict(zip(old.args, argument_names(main), strict=True))
    constants = {op for op in ops if op.name in ("top.weight", "top.none")}
    layers = [op for op in ops if op not in constants]
    names = value_names(ops, arguments)
    given = _given_arguments(main)
    hosts = place_given(
        layers,
        ctx.weights,
        rule_for(ctx.target),
        names,
        thresholds,
        given,
    )
    scales = Scales(
        layers,
        set(hosts),
        names,
        thresholds,
        ctx.weights,
        asymmetric,
        ranges,
        given,
        {
            op.results[0]: EdgeScale(1.0)
            for op in layers
            if op not in hosts and names[op.results[0]] not in thresholds and gives_sums(op, hosts)
        },
    )

    block = Block(arg_types=[argument.type for argument in old.args])
    emitter = Emitter(ctx, scales, target_rounding, block, means or {})
    emitter.squares = squares or {}
    emitter.clip_weights = clip_weights
    emitter.names.update(names.values())
    for before, after in zip(old.args, block.args, strict=True):
        after.name_hint = before.name_hint
        emitter.floats[before] = after
    for op in ops:
        if op in constants or op in hosts:
            emitter.host(op, hosts.get(op, ""))
        else:
            with _named(layer_of(op)):
                emitter.emit(op)
    last = old.last_op
    assert isinstance(last, ReturnOp)
    block.add_op(ReturnOp(*(as_read(emitter, value) for value in last.operands)))

    main.detach_region(main.body)
    main.add_region(Region(block))
    _drop_unused(block)
    kept = {op.attributes["name"].data for op in block.ops if op.name == "top.weight"}  # pyright: ignore[reportAttributeAccessIssue]
    for op in block.ops:
        for key in ("table", "weight_scale"):
            if key in op.attributes and op.name.startswith("quant."):
                kept.add(op.attributes[key].data)  # pyright: ignore[reportAttributeAccessIssue]
    ctx.weights.keep_only(kept)


def _given_arguments(main: FuncOp) -> dict[SSAValue, EdgeScale]:
    """Return the scales that the model gives its own inputs."""
    scales = main.attributes.get("arg_quant_scales")
    zeros = main.attributes.get("arg_quant_zeros")
    if not isinstance(scales, ArrayAttr) or not isinstance(zeros, ArrayAttr):
        return {}
    found: dict[SSAValue, EdgeScale] = {}
    for argument, scale, zero in zip(main.body.block.args, scales, zeros, strict=True):
        if isinstance(scale, FloatAttr) and isinstance(zero, IntegerAttr) and scale.value.data > 0:
            found[argument] = EdgeScale(float(scale.value.data), int(zero.value.data))
    return found


def _drop_unused(block: Block) -> None:
    """Remove float constants that only quantised layers used."""
    for op in reversed(list(block.ops)):
        if op.name in ("top.weight", "top.none") and not op.results[0].uses:
            op.detach()
            op.erase()


@dataclass(frozen=True)
class QuantizePass(ModulePass):
    """Quantise a calibrated float graph.

    Requires: `top` module, fused, layout assigned; ranges in the module (calibration
    puts them there) or in `table`. Ensures: every tensor on the device is `!quant.uniform`, every
    host op has a reason.
    """

    name = "quantize"

    table: str = ""
    """Calibration table (YAML) to use instead of the ranges in the module."""
    rounding: str = ""
    """Rounding of the requantising shift; default: the target's, half_up without a target."""
    activations: str = "symmetric"
    """`symmetric`: zero point 0 throughout. `asymmetric`: all 256 codes for each value's range."""
    clip_weights: bool = False
    """Search each channel's weight scale for the least expected squared error."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Quantise `op` in place.

        Raises:
            TilewrightError: E0301, there are no ranges; as `quantize_module`.
        """
        context = compile_context(ctx)
        if any(item.name.startswith("quant.") for item in main_function(op).body.block.ops):
            return
        table = CalibrationTable.load(self.table) if self.table else read_attribute(op)
        if table is None:
            raise TilewrightError(
                "E0301",
                "the module has no calibrated ranges",
                hint="give `--calibration-data FOLDER`, or `quantize{table=FILE}`",
            )
        if self.activations not in ACTIVATIONS:
            raise TilewrightError(
                "E0702",
                f"activations must be {' or '.join(ACTIVATIONS)}, not `{self.activations}`",
            )
        default = context.target.rounding if context.target is not None else "half_up"
        quantize_module(
            context,
            op,
            table.thresholds,
            self.rounding or default,
            table.means,
            self.activations == "asymmetric",
            table.ranges,
            table.squares,
            self.clip_weights,
        )
        op.attributes.pop(CALIBRATION_ATTRIBUTE, None)


@contextmanager
def _named(layer: str) -> Generator[None]:
    """Say which layer it is whose scales no multiplier spans; the arithmetic does not know."""
    try:
        yield
    except TilewrightError as error:
        if error.code != "E0304" or layer in error.message:
            raise
        message = f'the scales around "{layer}" are too far apart'
        raise TilewrightError("E0304", message, [error.message], error.hint) from error
