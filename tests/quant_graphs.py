"""Small partitioned integer graphs for tests, built op by op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from xdsl.dialects import func
from xdsl.dialects.builtin import (
    ArrayAttr,
    IntegerAttr,
    IntegerType,
    ModuleOp,
    StringAttr,
    TensorType,
    f32,
    i8,
    i32,
)
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue

from tilewright.dialects import quant, top
from tilewright.dialects.quant import WEIGHT_CODES, UniformType, i4, shape_of, window_size
from tilewright.ir.context import CompileContext
from tilewright.ir.weights import WeightStore
from tilewright.spec.hardware import load_target
from tilewright.transforms.linalg.lower_quant_to_linalg import LowerQuantToLinalgPass


def codes(shape: Sequence[int], scale: float = 0.05, zero: int = 0) -> TensorType[Attribute]:
    return TensorType(UniformType.of(scale, zero), list(shape))


class Graph:
    """A `@main` under construction; ops go into TPU segment 0 unless told otherwise."""

    def __init__(self, **inputs: Attribute) -> None:
        self.weights = WeightStore()
        self.block = Block(arg_types=list(inputs.values()))
        self.names = list(inputs)
        self.device, self.segment = "tpu", 0

    def input(self, name: str) -> SSAValue:
        return self.block.args[self.names.index(name)]

    def on(self, device: str, segment: int) -> None:
        self.device, self.segment = device, segment

    def weight(self, name: str, array: np.ndarray, kind: Attribute | None = None) -> SSAValue:
        self.weights.set(name, array)
        element = IntegerType(array.dtype.itemsize * 8)
        op = top.WeightOp.build(
            result_types=[kind or TensorType(element, list(array.shape))],
            attributes={"name": StringAttr(name)},
        )
        self.block.add_op(op)
        return op.results[0]

    def place(self, op: Operation, name: str) -> SSAValue:
        op.attributes["name"] = StringAttr(name)
        op.attributes["segment"] = IntegerAttr(self.segment, i32)
        op.attributes["device"] = StringAttr(self.device)
        op.verify()
        self.block.add_op(op)
        return op.results[0]

    def top(
        self,
        kind: type[Any],
        name: str,
        operands: Sequence[SSAValue],
        result: Attribute,
        **attributes: Any,
    ) -> SSAValue:
        op = kind.create(
            operands=list(operands),
            result_types=[result],
            attributes={key: top.to_attribute(value) for key, value in attributes.items()},
        )
        return self.place(op, name)

    def quant(
        self,
        kind: type[quant.QuantOp],
        name: str,
        operands: Sequence[SSAValue],
        result: Attribute,
        **attributes: Any,
    ) -> SSAValue:
        return self.place(kind.make(operands, result, **attributes), name)

    def parameters(
        self,
        name: str,
        rng: np.random.Generator,
        channels: int,
        spread: int = 4000,
        rounding: str = "half_up",
    ) -> list[SSAValue]:
        """Random bias, multiplier and shift; real multipliers of about `127 / spread`."""
        bias = rng.integers(-spread, spread, channels)
        mult = rng.integers(2**30, 2**31, channels, dtype=np.int64)
        base = 31 + max(int(np.log2(max(spread, 128) / 128)), 0)
        shift = rng.integers(base - 1, base + 2, channels)
        if rounding == "truncate":
            bias += np.rint(128.5 * 2.0**shift / mult).astype(np.int64)
        return [
            self.weight(f"{name}.bias", bias.astype(np.int32)),
            self.weight(f"{name}.mult", mult.astype(np.int32)),
            self.weight(f"{name}.shift", shift.astype(np.int8)),
        ]

    def conv(
        self,
        name: str,
        x: SSAValue,
        rng: np.random.Generator,
        out_channels: int,
        kernel: tuple[int, int] = (3, 3),
        strides: tuple[int, int] = (1, 1),
        pads: tuple[int, int, int, int] = (0, 0, 0, 0),
        dilations: tuple[int, int] = (1, 1),
        group: int = 1,
        layout: str = "nhwc",
        rounding: str = "half_up",
        zero: int = 0,
        bits: int = 8,
    ) -> SSAValue:
        shape = shape_of(x)
        n, (h, w), c = (
            shape[0],
            (shape[1:3] if layout == "nhwc" else shape[2:4]),
            shape[3 if layout == "nhwc" else 1],
        )
        size = [
            window_size(dim, pads[k] + pads[k + 2], kernel[k], strides[k], dilations[k])
            for k, dim in enumerate((h, w))
        ]
        result = [n, *size, out_channels] if layout == "nhwc" else [n, out_channels, *size]
        largest = WEIGHT_CODES[bits]
        weights = (out_channels, c // group, *kernel)
        weight = rng.integers(-largest, largest + 1, weights, dtype=np.int8)
        spread = int(64 * (largest + 1) // 2 * np.sqrt(weight[0].size)) + 1
        return self.quant(
            quant.ConvOp,
            name,
            [
                x,
                self.weight(f"{name}.w", weight, TensorType(i4, weights) if bits == 4 else None),
                *self.parameters(name, rng, out_channels, spread, rounding),
            ],
            codes(result, 0.05, zero),
            strides=list(strides),
            pads=list(pads),
            dilations=list(dilations),
            group=group,
            layout=layout,
            zp=zero - 128 if rounding == "truncate" else zero,
            lo=-127,
            hi=127,
            rounding=rounding,
        )

    def module(self, *results: SSAValue) -> ModuleOp:
        self.block.add_op(func.ReturnOp(*results))
        kinds = ([arg.type for arg in self.block.args], [value.type for value in results])
        main = func.FuncOp("main", kinds, Region(self.block))
        main.attributes["arg_names"] = ArrayAttr([StringAttr(name) for name in self.names])
        module = ModuleOp([main])
        module.verify()
        return module

    def context(self, target: str | None = None) -> CompileContext:
        return CompileContext(self.weights, load_target(target) if target else None)

    def lowered(self, *results: SSAValue) -> ModuleOp:
        module = self.module(*results)
        LowerQuantToLinalgPass().apply(self.context(), module)
        module.verify()
        return module


def random_codes(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    return rng.integers(-128, 128, list(shape), dtype=np.int8)


__all__ = ["Graph", "codes", "f32", "i8", "random_codes"]
