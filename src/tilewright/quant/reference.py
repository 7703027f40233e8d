"""The meaning of a quantised module: every op executed in plain numpy, exactly.

`run_quant` walks `@main` in order. Integer ops use `tilewright.quant.kernels`; ops that stay float
run on the host's float executor, one at a time, as they will on the device's host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import TilewrightError
from tilewright.quant import kernels, kernels_rows
from tilewright.quant.graph import argument_names, layer_of, main_function, result_names
from tilewright.quant.host import HostOps

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp
    from xdsl.dialects.func import FuncOp
    from xdsl.ir import Operation, SSAValue

    from tilewright.ir.weights import WeightStore

Array = npt.NDArray[Any]


def run_quant(
    module: ModuleOp,
    weights: WeightStore,
    inputs: Mapping[str, Array],
    keep: bool = False,
) -> dict[str, Array]:
    """Execute `@main` once and return its outputs by name (codes int8, floats float32).

    Args:
        module: a module of `quant` and `top` ops.
        weights: its constants.
        inputs: an array for each argument: floats, or int8 codes where the argument is quantised.
        keep: return the value of every layer as well (see `QuantSession.run_layers`; a layer's
            value wins where an output has the same name).

    Raises:
        TilewrightError: E0104, an input is missing or has the wrong shape; E0105, a value to be
            quantised is not a number.
    """
    session = QuantSession(module, weights)
    if not keep:
        return session.run(inputs)
    outputs, layers = session.run_layers(inputs)
    return {**outputs, **layers}


class QuantSession:
    """A quantised module made ready once and run many times."""

    def __init__(self, module: ModuleOp, weights: WeightStore) -> None:
        self.main = main_function(module)
        self.weights = weights
        self.host = HostOps(weights)
        self.inputs = argument_names(self.main)
        self.outputs = result_names(self.main)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs by name; values are freed after their last use."""
        return self._run(inputs, keep=False, replace={})[0]

    def run_layers(
        self, inputs: Mapping[str, Array], replace: Mapping[str, Array] | None = None
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return the outputs by name, and every layer's value by the user's name.

        Further results of a layer are `name:1`... Helper ops beside a layer have names of their
        own, such as `conv1/requantize`.

        Args:
            inputs: an array for each argument.
            replace: values by layer that later layers read instead of the one computed here. Each
                layer is then computed from these, so that differences do not add up.
        """
        return self._run(inputs, True, replace or {})

    def _run(
        self, inputs: Mapping[str, Array], keep: bool, replace: Mapping[str, Array]
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        run = _Run(self.weights, self.host)
        run.bind(self.main, self.inputs, inputs)
        kept: dict[str, Array] = {}
        for op in self.main.body.block.ops:
            if op.name == "func.return":
                values = [run.values[value] for value in op.operands]
                return dict(zip(self.outputs, values, strict=True)), kept
            results = run.execute(op)
            for index, (value, array) in enumerate(zip(op.results, results, strict=True)):
                run.values[value] = array
                if keep and op.name not in ("top.weight", "top.none"):
                    layer = layer_of(op)
                    name = layer if index == 0 else f"{layer}:{index}"
                    kept[name] = array
                    if name in replace:
                        run.values[value] = replace[name].reshape(array.shape).astype(array.dtype)
            run.release(op)
        raise TilewrightError("E0501", "the function does not return")


class _Run:
    """Values of one execution."""

    def __init__(self, weights: WeightStore, host: HostOps) -> None:
        self.weights = weights
        self.host = host
        self.values: dict[SSAValue, Array] = {}
        self.uses: dict[SSAValue, int] = {}
        self.handlers: dict[str, Callable[[Operation], Array]] = {
            "quant.quantize": self.quantize,
            "quant.dequantize": self.dequantize,
            "quant.conv": self.conv,
            "quant.linear": self.linear,
            "quant.matmul": self.matmul,
            "quant.avg_pool": self.avg_pool,
            "quant.add": self.add,
            "quant.sub": self.add,
            "quant.mul": self.mul,
            "quant.requantize": self.requantize,
            "quant.lut": self.lut,
            "quant.resize": self.resize,
            "quant.softmax": self.softmax,
            "quant.layer_norm": self.layer_norm,
        }
        self.movers: dict[str, Callable[[Operation], Array]] = {
            "top.reshape": self.reshape,
            "top.transpose": self.transpose,
            "top.concat": self.concat,
            "top.slice": self.slice,
            "top.pad": self.pad,
            "top.max_pool": self.max_pool,
        }

    def bind(self, main: FuncOp, names: list[str], inputs: Mapping[str, Array]) -> None:
        """Check the inputs and make them the values of the function's arguments."""
        from tilewright.dialects.quant import shape_of, uniform_of

        arguments = main.body.block.args
        for name, argument in zip(names, arguments, strict=True):
            if name not in inputs:
                raise TilewrightError(
                    "E0104", f'no value for input "{name}"', details=[f"inputs: {', '.join(names)}"]
                )
            array = np.asarray(inputs[name])
            if array.shape != shape_of(argument):
                raise TilewrightError(
                    "E0104",
                    f'input "{name}" has the wrong shape',
                    details=[f"given {list(array.shape)}; needs {list(shape_of(argument))}"],
                )
            if uniform_of(argument) is not None and array.dtype != np.int8:
                raise TilewrightError(
                    "E0104", f'input "{name}" must be int8 codes, not {array.dtype}'
                )
            self.values[argument] = array
        for op in main.body.block.ops:
            for operand in op.operands:
                self.uses[operand] = self.uses.get(operand, 0) + 1

    def release(self, op: Operation) -> None:
        """Forget operands that have no later user."""
        for operand in op.operands:
            self.uses[operand] -= 1
            if self.uses[operand] == 0:
                self.values.pop(operand, None)

    def execute(self, op: Operation) -> list[Array]:
        """Return the results of one op."""
        from tilewright.dialects.quant import uniform_of

        if op.name == "top.weight":
            return [self.weights.get(layer_of(op))]
        if op.name == "top.none":
            return [np.zeros(0, np.float32)]
        if op.name in self.handlers:
            return [self.handlers[op.name](op)]
        if uniform_of(op.results[0]) is not None:
            if op.name not in self.movers:
                raise TilewrightError(
                    "E0501", f'"{layer_of(op)}" ({op.name}) has no integer meaning'
                )
            return [self.movers[op.name](op)]
        return self.host.run(op, [self.values[value] for value in op.operands])

    # Attributes and operands

    def operand(self, op: Operation, index: int) -> Array:
        """Return the array of operand `index`."""
        return self.values[op.operands[index]]

    def end(self, op: Operation) -> tuple[int, int, int, str]:
        """Return zp, lo, hi and rounding."""
        attrs = _attrs(op)
        return (
            attrs.integer("zp"),
            attrs.integer("lo"),
            attrs.integer("hi"),
            attrs.string("rounding"),
        )

    def wide(self, op: Operation, value: kernels.Wide) -> Array:
        """Finish an op that has a wide bias: `value + bias * 2^bias_shift`, shift, clamp."""
        attrs = _attrs(op)
        offset = np.int64(attrs.integer("bias")) << np.int64(attrs.integer("bias_shift"))
        zp, lo, hi, rounding = self.end(op)
        return kernels.finish(value + offset, attrs.integer("shift"), zp, lo, hi, rounding)

    # Arithmetic

    def quantize(self, op: Operation) -> Array:
        """`quant.quantize`."""
        from tilewright.dialects.quant import quantised

        kind = quantised(op.results[0])
        try:
            low = _attrs(op).integer("lo") if "lo" in op.attributes else None
            return kernels.quantize(self.operand(op, 0), kind.step, kind.zero, low)
        except ValueError as error:
            raise TilewrightError("E0105", f'"{layer_of(op)}": {error}') from error

    def dequantize(self, op: Operation) -> Array:
        """`quant.dequantize`."""
        from tilewright.dialects.quant import quantised, uniform_of

        if uniform_of(op.operands[0]) is None:
            return self.operand(op, 0).astype(np.float32)
        kind = quantised(op.operands[0])
        real = kernels.dequantize(self.operand(op, 0), kind.step, kind.zero)
        if _element(op.results[0]) == "f16":
            return real.astype(np.float16)
        return real

    def conv(self, op: Operation) -> Array:
        """`quant.conv`."""
        attrs = _attrs(op)
        acc = kernels.conv(
            _to_nhwc(op, self.operand(op, 0)),
            self.operand(op, 1),
            strides=attrs.ints("strides"),
            pads=attrs.ints("pads"),
            dilations=attrs.ints("dilations"),
            group=attrs.integer("group"),
            pad_code=_zero(op, 0),
        )
        return _from_nhwc(op, self._requant_channels(op, acc))

    def linear(self, op: Operation) -> Array:
        """`quant.linear`."""
        x, w = self.operand(op, 0), self.operand(op, 1)
        acc = kernels.exact_product(x.reshape(-1, x.shape[-1]), w.T)
        if _element(op.results[0]) == "i32":
            sums = (acc.astype(np.int64) + self.operand(op, 2)).astype(np.int32)
            return sums.reshape(*x.shape[:-1], w.shape[0])
        return self._requant_channels(op, acc).reshape(*x.shape[:-1], w.shape[0])

    def _requant_channels(self, op: Operation, acc: kernels.Acc) -> Array:
        bias, mult, shift = (self.operand(op, index) for index in (2, 3, 4))
        return kernels.requant(acc, bias, mult, shift, *self.end(op))

    def matmul(self, op: Operation) -> Array:
        """`quant.matmul`; float64 sums any depth that fits int32 exactly."""
        a, b = self.operand(op, 0), self.operand(op, 1)
        acc = (a.astype(np.float64) @ b.astype(np.float64)).astype(np.int64)
        attrs = _attrs(op)
        if _element(op.results[0]) == "i32":
            return (acc + attrs.integer("bias")).astype(np.int32)
        return kernels.requant(
            acc,
            attrs.integer("bias"),
            attrs.integer("mult"),
            attrs.integer("shift"),
            *self.end(op),
        )

    def avg_pool(self, op: Operation) -> Array:
        """`quant.avg_pool`."""
        attrs = _attrs(op)
        acc = kernels.windows_sum(
            _to_nhwc(op, self.operand(op, 0)),
            attrs.ints("kernel"),
            attrs.ints("strides"),
            attrs.ints("pads"),
            _zero(op, 0),
        )
        codes = kernels.requant(
            acc,
            attrs.integer("bias"),
            attrs.integer("mult"),
            attrs.integer("shift"),
            *self.end(op),
        )
        return _from_nhwc(op, codes)

    def add(self, op: Operation) -> Array:
        """`quant.add` and `quant.sub`."""
        attrs = _attrs(op)
        a = (self.operand(op, 0).astype(np.int64) - _zero(op, 0)) * attrs.integer("mult_a")
        b = (self.operand(op, 1).astype(np.int64) - _zero(op, 1)) * attrs.integer("mult_b")
        return self.wide(op, a + b if op.name == "quant.add" else a - b)

    def mul(self, op: Operation) -> Array:
        """`quant.mul`."""
        a = self.operand(op, 0).astype(np.int64) - _zero(op, 0)
        b = self.operand(op, 1).astype(np.int64) - _zero(op, 1)
        return self.wide(op, a * b * _attrs(op).integer("mult"))

    def requantize(self, op: Operation) -> Array:
        """`quant.requantize`."""
        a = self.operand(op, 0).astype(np.int64) - _zero(op, 0)
        return self.wide(op, a * _attrs(op).integer("mult"))

    def lut(self, op: Operation) -> Array:
        """`quant.lut`."""
        table = self.weights.get(_attrs(op).string("table"))
        return table[self.operand(op, 0).astype(np.int64) + 128]

    def resize(self, op: Operation) -> Array:
        """`quant.resize`."""
        value = kernels.interpolate(
            _to_nhwc(op, self.operand(op, 0)),
            _zero(op, 0),
            self.operand(op, 1),
            self.operand(op, 2),
        )
        return _from_nhwc(op, self.wide(op, value * _attrs(op).integer("mult")))

    def softmax(self, op: Operation) -> Array:
        """`quant.softmax`."""
        attrs = _attrs(op)
        table = self.weights.get(attrs.string("table"))
        numbers = [attrs.integer(key) for key in ("mult", "shift", "zp", "lo", "hi")]
        return kernels_rows.softmax(self.operand(op, 0), table, *numbers)

    def layer_norm(self, op: Operation) -> Array:
        """`quant.layer_norm`."""
        attrs, (x, gain, bias) = _attrs(op), (self.operand(op, index) for index in range(3))
        numbers = [attrs.integer(key) for key in ("epsilon", "shift", "zp", "lo", "hi")]
        rows = x.reshape(-1, gain.size)
        return kernels_rows.layer_norm(rows, gain, bias, *numbers).reshape(x.shape)

    # Movers

    def reshape(self, op: Operation) -> Array:
        """`top.reshape` of codes."""
        return self.operand(op, 0).reshape(_shape(op))

    def transpose(self, op: Operation) -> Array:
        """`top.transpose` of codes."""
        return np.ascontiguousarray(self.operand(op, 0).transpose(_attrs(op).ints("perm")))

    def concat(self, op: Operation) -> Array:
        """`top.concat` of codes."""
        parts = [self.values[value] for value in op.operands]
        return np.concatenate(parts, axis=_attrs(op).integer("axis"))

    def slice(self, op: Operation) -> Array:
        """`top.slice` of codes."""
        attrs = _attrs(op)
        array = self.operand(op, 0)
        for axis, (start, step, size) in enumerate(
            zip(attrs.ints("starts"), attrs.ints("steps"), _shape(op), strict=True)
        ):
            array = np.take(array, start + step * np.arange(size), axis=axis)
        return array

    def pad(self, op: Operation) -> Array:
        """`top.pad` of codes; a constant pad holds the zero point (the value is 0)."""
        attrs = _attrs(op)
        widths = list(zip(attrs.ints("pads_begin"), attrs.ints("pads_end"), strict=True))
        array = self.operand(op, 0)
        for axis, (begin, end) in enumerate(widths):
            cut = slice(max(0, -begin), array.shape[axis] - max(0, -end))
            array = array[(slice(None),) * axis + (cut,)]
        widths = [(max(0, begin), max(0, end)) for begin, end in widths]
        mode = attrs.string("mode")
        if mode == "constant":
            return np.pad(array, widths, constant_values=np.int8(_zero(op, 0)))
        if mode == "edge":
            return np.pad(array, widths, mode="edge")
        if mode == "reflect":
            return np.pad(array, widths, mode="reflect")
        return np.pad(array, widths, mode="wrap")

    def max_pool(self, op: Operation) -> Array:
        """`top.max_pool` of codes."""
        from tilewright.dialects.quant import image_axes

        attrs = _attrs(op)
        _, h, w = image_axes(attrs.string("layout", "nchw"))
        shape = _shape(op)
        codes = kernels.max_pool(
            _to_nhwc(op, self.operand(op, 0)),
            attrs.ints("kernel"),
            attrs.ints("strides"),
            attrs.ints("pads"),
            attrs.ints("dilations"),
            (shape[h], shape[w]),
        )
        return _from_nhwc(op, codes)


def _attrs(op: Operation) -> Any:
    from tilewright.dialects.top.base import Attrs

    return Attrs(op.attributes)


def _zero(op: Operation, index: int) -> int:
    """Return the zero point of operand `index`."""
    from tilewright.dialects.quant import quantised

    return quantised(op.operands[index]).zero


def _shape(op: Operation) -> tuple[int, ...]:
    from tilewright.dialects.quant import shape_of

    return shape_of(op.results[0])


def _element(value: SSAValue) -> str:
    return str(getattr(value.type, "element_type", value.type))


def _to_nhwc(op: Operation, array: Array) -> Array:
    if _attrs(op).string("layout", "nchw") == "nhwc":
        return array
    return array.transpose(0, 2, 3, 1)


def _from_nhwc(op: Operation, array: Array) -> Array:
    if _attrs(op).string("layout", "nchw") == "nhwc":
        return array
    return np.ascontiguousarray(array.transpose(0, 3, 1, 2))
