"""Say of which layers the weights shall be codes of 4 bits.

    %y = top.conv %x, %w, %b {name = "conv1", ...}
  becomes
    %y = top.conv %x, %w, %b {name = "conv1", weight_bits = 4 : i32, ...}

What the attribute means: docs/concepts/quantisation.md, "Weights".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override
from xdsl.context import Context
from xdsl.dialects.builtin import IntegerAttr, ModuleOp, i32
from xdsl.passes import ModulePass

from tilewright.diagnostics import UsageError, suggest
from tilewright.dialects.quant import WEIGHT_CODES
from tilewright.ir.context import compile_context
from tilewright.quant.graph import layer_of, main_function
from tilewright.transforms.quant.classify import is_constant

if TYPE_CHECKING:
    from tilewright.ir.context import CompileContext

STAGE = "quant-mark-weight-bits"

LAYERS = ("top.conv", "top.linear", "top.matmul")
"""Operations whose second operand may be weights."""


def mark_weight_bits(
    module: ModuleOp,
    bits: int,
    layer_bits: Mapping[str, int],
    context: CompileContext | None = None,
) -> None:
    """Give every layer that has constant weights the bits of these.

    Args:
        module: a `top` module.
        bits: of all layers that `layer_bits` does not name; 8 leaves them as they are.
        layer_bits: 8 or 4, by layer.
        context: notes what was decided.

    Raises:
        UsageError: E0702, a number of bits that is not legal, or a name that is no such layer.
    """
    for name, value in (("weight bits", bits), *layer_bits.items()):
        if value not in WEIGHT_CODES:
            raise UsageError("E0702", f"`{name}`: weights have 8 or 4 bits, not {value}")
    layers = {
        layer_of(op): op
        for op in main_function(module).body.block.ops
        if op.name in LAYERS and is_constant(op.operands[1])
    }
    for name in layer_bits:
        if name not in layers:
            raise UsageError(
                "E0702",
                f"`{name}` is no layer with weights",
                hint=suggest(name, layers),
            )
    for name, op in layers.items():
        if "weight_scale" in op.attributes:
            # The model's own codes have the bits they have.
            continue
        chosen = layer_bits.get(name, bits)
        if chosen == 8:
            if name not in layer_bits:
                continue
            op.attributes.pop("weight_bits", None)
            if bits != 8 and context is not None:
                context.decide(name, STAGE, False, "its weights keep 8 bits, as asked for")
            continue
        op.attributes["weight_bits"] = IntegerAttr(chosen, i32)
        if context is not None:
            context.decide(name, STAGE, True, f"its weights shall have {chosen} bits")


@dataclass(frozen=True)
class QuantMarkWeightBitsPass(ModulePass):
    """Mark layers whose weights shall have 4 bits.

    Requires: a `top` module. Ensures: `weight_bits = 4 : i32` on the `top.conv`, `top.linear` and
    `top.matmul` with constant weights that were asked for.
    """

    name = "quant-mark-weight-bits"

    bits: int = 4
    """Of all layers that `layers` does not name; 8 leaves them as they are."""
    layers: tuple[str, ...] = ()
    """Bits of single layers, each `NAME=BITS`."""

    @override
    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Mark the layers of `@main`.

        Raises:
            UsageError: E0702, as `mark_weight_bits`, or an entry of `layers` is not `NAME=BITS`.
        """
        chosen: dict[str, int] = {}
        for item in self.layers:
            name, _, value = item.rpartition("=")
            if not name or not value.isdecimal():
                raise UsageError("E0702", f"`{item}` is not NAME=BITS", hint='such as "conv1=8"')
            chosen[name] = int(value)
        mark_weight_bits(op, self.bits, chosen, compile_context(ctx))
