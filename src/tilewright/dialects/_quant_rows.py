"""Ops of the `quant` dialect that work on whole rows: softmax and layer normalisation.

`docs/concepts/numerics.md`, "Rows", defines them. They round half up on every target, so they carry
no `rounding`.
"""

from __future__ import annotations

from typing import ClassVar

from xdsl.dialects.builtin import IntegerAttr, StringAttr, TensorType, i16, i32
from xdsl.irdl import attr_def, irdl_op_definition, operand_def, result_def, traits_def
from xdsl.traits import Pure
from xdsl.utils.exceptions import VerifyException

from tilewright.dialects._quant_base import (
    QuantOp,
    check_range,
    check_weight,
    quantised,
    shape_of,
)

MAX_ROW = 16384
"""Elements of a row: sums of that many fit the widths of the contract."""


class _RowOp(QuantOp):
    LIMITS: ClassVar[dict[str, tuple[int, int]]] = {}
    """Legal range of the op's own integer attributes."""

    def check_rows(self, row: int) -> None:
        """Check types, shapes, the row's length and the integer attributes."""
        quantised(self.operands[0], "input")
        kind = quantised(self.results[0], "result")
        if shape_of(self.operands[0]) != shape_of(self.results[0]):
            raise VerifyException(f"{self.name} must not change the shape")
        if not 1 <= row <= MAX_ROW:
            raise VerifyException(f"a row must have 1..{MAX_ROW} elements, not {row}")
        for name, (low, high) in self.LIMITS.items():
            check_range(name, self.attributes[name], low, high)
        low = check_range("lo", self.attributes["lo"], -128, 127)
        high = check_range("hi", self.attributes["hi"], -128, 127)
        if low > high:
            raise VerifyException(f"lo ({low}) is above hi ({high})")
        if check_range("zp", self.attributes["zp"], -128, 127) != kind.zero:
            raise VerifyException(f"zp must be the result's zero point, {kind.zero}")


@irdl_op_definition
class SoftmaxOp(_RowOp):
    """Softmax of every row (the last axis): table of exponentials, one reciprocal a row.

    ```mlir
    %y = quant.softmax %x {table = "scores.table", mult = 32640, shift = 7, zp = -128, ...}
    ```

    `table` names 256 values of the weight store, the bits of uint16: entry d is
    `65535 * exp(-d * s_in)`.
    """

    name = "quant.softmax"
    x = operand_def(TensorType)
    result = result_def(TensorType)
    table = attr_def(StringAttr)
    mult = attr_def(IntegerAttr)
    shift = attr_def(IntegerAttr)
    zp = attr_def(IntegerAttr)
    lo = attr_def(IntegerAttr)
    hi = attr_def(IntegerAttr)
    traits = traits_def(Pure())
    assembly_format = "$x attr-dict `:` functional-type(operands, results)"
    LIMITS: ClassVar[dict[str, tuple[int, int]]] = {
        "mult": (2**14, 2**15 - 1),
        "shift": (0, 15),
    }

    def verify_(self) -> None:
        """Check types, shapes and ranges."""
        shape = shape_of(self.x)
        if not shape:
            raise VerifyException("softmax needs at least one axis")
        self.check_rows(shape[-1])
        if not self.table.data:
            raise VerifyException("softmax needs the name of its table")


@irdl_op_definition
class LayerNormOp(_RowOp):
    """Normalise every row (axes `axis`.. to the last), scale and shift each of its elements.

    ```mlir
    %y = quant.layer_norm %x, %gain, %bias {axis = 2, epsilon = 41, shift = 23, zp = 3, ...}
    ```

    `gain` is `tensor<Nxi16>`, `bias` `tensor<Nxi32>`, N the elements of a row in memory order;
    `epsilon` is `2^8 * n^2 * epsilon / s_in^2` as an integer.
    """

    name = "quant.layer_norm"
    x = operand_def(TensorType)
    gain = operand_def(TensorType)
    bias = operand_def(TensorType)
    result = result_def(TensorType)
    axis = attr_def(IntegerAttr)
    epsilon = attr_def(IntegerAttr)
    shift = attr_def(IntegerAttr)
    zp = attr_def(IntegerAttr)
    lo = attr_def(IntegerAttr)
    hi = attr_def(IntegerAttr)
    traits = traits_def(Pure())
    assembly_format = "$x `,` $gain `,` $bias attr-dict `:` functional-type(operands, results)"
    LIMITS: ClassVar[dict[str, tuple[int, int]]] = {"epsilon": (1, 2**50), "shift": (1, 31)}

    @property
    def row(self) -> int:
        """Elements of a row."""
        row = 1
        for size in shape_of(self.x)[int(self.axis.value.data) :]:
            row *= size
        return row

    def verify_(self) -> None:
        """Check types, shapes and ranges."""
        shape = shape_of(self.x)
        check_range("axis", self.axis, 0, len(shape) - 1)
        self.check_rows(self.row)
        check_weight(self.gain, "gain", i16, (self.row,))
        check_weight(self.bias, "bias", i32, (self.row,))
