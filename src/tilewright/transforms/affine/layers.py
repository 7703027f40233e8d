"""Rebuild one function of the chip on buffers, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
from xdsl.dialects import func, tensor
from xdsl.dialects.builtin import (
    ArrayAttr,
    FloatAttr,
    IntegerType,
    MemRefType,
    StringAttr,
    TensorType,
    f16,
    f32,
    i32,
)
from xdsl.dialects.linalg.ops import GenericOp
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue

from tilewright.diagnostics import TilewrightError
from tilewright.ir.context import CompileContext
from tilewright.schedule.tiling import Choice, ConvProblem, ConvTiling, choose_conv
from tilewright.spec.hardware import Hardware
from tilewright.transforms.affine import bodies, moves, vector
from tilewright.transforms.affine.convolution import ConvLayer, ConvNest, Join
from tilewright.transforms.affine.fusion import Joining, find_joining, joined
from tilewright.transforms.affine.nest import Constants, Nest
from tilewright.transforms.affine.segment import (
    PASS,
    RESHAPES,
    Buffers,
    element_of,
    item_bytes,
    number,
    numbers,
    out_of_memory,
    tensor_shape,
    text,
    values_of,
)
from tilewright.transforms.linalg.half import HalfOutput
from tilewright.transforms.linalg.rounding import Output

Shape = tuple[int, ...]
MAX_PADDING = 255
"""Rows or columns of padding one DMA writes."""
CODE_PARAMETERS = (("bias", np.int32), ("mult", np.int32), ("shift", np.int8))
"""What the requantisation of a channel's codes needs, and how it is stored."""
INEXACT = ("exp",)
"""Functions that enlarge the rounding of their operand: leaving it out would be another result."""


class Segment:
    """The work on one `@tpu_k`."""

    def __init__(
        self, context: CompileContext, target: Hardware, function: func.FuncOp, fuse: bool
    ) -> None:
        self.context = context
        self.target = target
        self.function = function
        self.fuse = fuse
        self.added: list[str] = []
        """Constants that became arguments: scalar requantisations, one value a channel."""
        self._scalars: dict[GenericOp, tuple[SSAValue, ...]] = {}
        self._fused: set[Operation] = set()
        self._returned: set[SSAValue] = set()
        self._order = {op: at for at, op in enumerate(function.body.block.ops)}

    def build(self) -> func.FuncOp:
        """Return the function on memrefs; the old one is left as it is.

        Raises:
            TilewrightError: a layer cannot be tiled for the target.
        """
        old = self.function.body.block
        last = old.last_op
        assert isinstance(last, func.ReturnOp)
        results = list(last.arguments)
        self._returned = set(results)
        extra = self._scalar_parameters(old)
        inputs = [_buffer(arg.type) for arg in old.args]
        types = [*inputs, *extra, *(_buffer(value.type) for value in results)]
        block = Block(arg_types=types)
        nest = Nest(block, Constants(block))
        buffers = Buffers(self.context, self.target, nest)
        buffers.known.update(zip(old.args, block.args, strict=False))
        buffers.returned = self._returned
        added = iter(block.args[len(inputs) :])
        for op in self._scalars:
            count = 1 if element_of(op.results[0]) == f16 else len(CODE_PARAMETERS)
            self._scalars[op] = tuple(next(added) for _ in range(count))
        outputs = list(block.args[len(types) - len(results) :])
        copies = self._bind(buffers, results, outputs)
        for op in old.ops:
            self._layer(buffers, op)
        for value, output in copies:
            moves.copy_whole(buffers, "output", buffers.of(value), output)
        nest.layer = ""
        block.add_op(func.ReturnOp())
        new = func.FuncOp(self.function.sym_name.data, (types, []), Region(block))
        new.attributes.update(self.function.attributes)
        names = [*self._names("arg_names"), *self.added, *self._names("result_names")]
        new.attributes["arg_names"] = ArrayAttr([StringAttr(name) for name in names])
        return new

    def _names(self, key: str) -> list[str]:
        value = self.function.attributes[key]
        assert isinstance(value, ArrayAttr)
        return [item.data for item in value if isinstance(item, StringAttr)]

    def _scalar_parameters(self, block: Block) -> list[Attribute]:
        """Store the parameters of scalar requantisations by channel, as the chip reads them."""
        types: list[Attribute] = []
        for op in block.ops:
            if not isinstance(op, GenericOp) or text(op, "kind") != "requant" or len(op.inputs) > 1:
                continue
            channels = tensor_shape(op.results[0])[-1]
            if element_of(op.results[0]) == f16:
                wanted = {"bias": np.zeros(channels, np.float32)}
            else:
                wanted = {
                    key: np.full(channels, number(op, key), kind) for key, kind in CODE_PARAMETERS
                }
            for key, values in wanted.items():
                self.added.append(self.context.weights.add(f"{text(op, 'layer')}.{key}", values))
                types.append(MemRefType(stored_type(values.dtype), [channels]))
            self._scalars[op] = ()
        return types

    def _bind(
        self, buffers: Buffers, results: Sequence[SSAValue], outputs: Sequence[SSAValue]
    ) -> list[tuple[SSAValue, SSAValue]]:
        """Let layers write straight into the function's results; returns what has to be copied."""
        copies: list[tuple[SSAValue, SSAValue]] = []
        for value, output in zip(results, outputs, strict=True):
            base = value
            while isinstance(base.owner, Operation) and _is_alias(base.owner):
                base = base.owner.operands[0]
            if not isinstance(base.owner, Operation) or base in buffers.bound:
                copies.append((value, output))
            else:
                buffers.bound[base] = output
        return copies

    def _layer(self, buffers: Buffers, op: Operation) -> None:
        buffers.nest.layer = text(op, "layer")
        if op in self._fused or op.name in RESHAPES:
            return
        match op:
            case tensor.PadOp():
                if not self._absorbs(op):
                    moves.lower_pad(buffers, op)
            case tensor.InsertSliceOp():
                moves.lower_insert(buffers, op)
            case tensor.ExtractSliceOp():
                moves.lower_extract(buffers, op)
            case GenericOp():
                self._generic(buffers, op)
            case _:
                known = ("arith.constant", "tensor.empty", "linalg.fill", "func.return")
                if op.name not in known:
                    raise TilewrightError("E0402", f"the tiler does not know {op.name}")

    def _generic(self, buffers: Buffers, op: GenericOp) -> None:
        match text(op, "kind"):
            case "conv" | "sum" | "matmul":
                pass  # with its requantisation
            case "requant":
                self._requant(buffers, op)
            case "eltwise":
                vector.lower_eltwise(buffers, op)
            case "lut":
                vector.lower_lookup(buffers, op)
            case "copy" if "perm" in op.attributes:
                if vector.moves_nothing(op):
                    shape = tensor_shape(op.results[0])
                    source = buffers.of(op.inputs[0])
                    buffers.known[op.results[0]] = buffers.nest.reshape(source, shape)
                else:
                    vector.lower_transpose(buffers, op)
            case "copy":
                vector.lower_rescale(buffers, op)
            case "pool":
                _need_nhwc(op)
                source, pad = _unpadded(op)
                vector.lower_pool(buffers, op, source, pad)
            case "resize":
                _need_nhwc(op)
                vector.lower_resize(buffers, op)
            case _:
                raise self._no_instruction(op)

    def _absorbs(self, op: tensor.PadOp) -> bool:
        """Tell whether a padding belongs to the window operation that reads it."""
        value: SSAValue = op.result
        users = [use.operation for use in value.uses]
        if len(users) == 1 and users[0].name == "tensor.expand_shape":
            users = [use.operation for use in users[0].results[0].uses]
        return (
            len(users) == 1
            and text(users[0], "kind") in ("conv", "sum", "pool")
            and text(users[0], "layer") == text(op, "layer")
        )

    # Reductions

    def _requant(self, buffers: Buffers, op: GenericOp) -> None:
        acc = op.inputs[0]
        if isinstance(acc.owner, tensor.CollapseShapeOp):
            acc = acc.owner.operands[0]
        reduce = acc.owner
        assert isinstance(reduce, GenericOp)
        layer = text(op, "layer")
        if text(reduce, "kind") not in ("conv", "sum", "matmul"):
            raise self._no_instruction(reduce)
        result, lut = op.results[0], None
        if element_of(result) == f16:
            requant, attributes, producer = self._half_end(op)
        else:
            requant, attributes, lut = self._code_end(op)
            producer = lut or op
        if producer is not op:
            self._fused.add(producer)
            result = producer.results[0]
        source, pad = _unpadded(reduce)
        problem, x_shape, y_shape, weights = self._problem(reduce, op, source, lut is not None)
        joining = self._joining(result, op, layer)
        if joining is not None:
            wider, reason = joined(self.target, problem, joining)
            if wider is None:
                self._apart(joining.op, layer, reason)
                joining = None
            else:
                problem, producer = wider, joining.op
                result = producer.results[0]
                self._fused.add(producer)
                self.context.decide(
                    text(producer, "layer"), PASS, True, f"joins the nest of {layer}"
                )
        tiling = self._choose(buffers, layer, problem)
        parameters = self._scalars.get(op) or tuple(buffers.of(v) for v in op.inputs[1:4])
        low = values_of(pad.static_low) if pad is not None else (0, 0, 0, 0)
        high = values_of(pad.static_high) if pad is not None else (0, 0, 0, 0)
        if max(*low, *high) > MAX_PADDING:
            raise TilewrightError(
                "E0402",
                f'layer "{layer}" cannot run on the chip',
                [f"it is padded by {max(*low, *high)}; the chip pads {MAX_PADDING}"],
            )
        nest = buffers.nest
        ConvNest(
            nest,
            ConvLayer(
                layer,
                problem,
                tiling,
                nest.reshape(buffers.of(source), x_shape),
                weights(buffers) if problem.kind == "conv" else None,
                parameters,
                nest.reshape(
                    buffers.make(result, producer, strided=y_shape == tensor_shape(result)), y_shape
                ),
                (low[1], low[2]) if pad is not None else (0, 0),
                moves.pad_value(pad) if pad is not None else 0,
                reduce,
                requant,
                attributes,
                lut,
                buffers.of(vector.table_of(lut)) if lut is not None else None,
                text(lut, "layer") if lut is not None else "",
                None
                if joining is None
                else Join(
                    joining.op,
                    text(joining.op, "layer"),
                    nest.reshape(buffers.of(joining.other), y_shape),
                    joining.first,
                    vector.scalars(joining.op),
                ),
            ),
        ).emit()

    def _joining(self, result: SSAValue, op: GenericOp, layer: str) -> Joining | None:
        """Return the elementwise operation that could be part of the nest that makes `result`."""
        if not self.fuse or result in self._returned:
            return None

        def log(user: GenericOp, reason: str) -> None:
            self._apart(user, layer, reason)

        return find_joining(result, self._order[op], self._order, log)

    def _apart(self, user: GenericOp, layer: str, reason: str) -> None:
        self.context.decide(
            text(user, "layer"), PASS, False, f"does not join the nest of {layer}: {reason}"
        )

    def _code_end(
        self, op: GenericOp
    ) -> tuple[Callable[[], Region], dict[str, Attribute], GenericOp | None]:
        """Return body and attributes of a requantisation, and the lookup fused to it.

        Raises:
            TilewrightError: E0501, it rounds as another chip does.
        """
        rounding = text(op, "rounding")
        if rounding != self.target.rounding:
            raise TilewrightError(
                "E0501",
                f'layer "{text(op, "layer")}" was quantised for another chip',
                [f"it rounds {rounding}; `{self.target.name}` rounds {self.target.rounding}"],
            )
        output = Output(number(op, "zp"), number(op, "lo"), number(op, "hi"), rounding)
        attributes = {key: op.attributes[key] for key in ("zp", "lo", "hi")}
        lut = self._only_user(op, "lut")
        if lut is not None:
            self._applied(lut, op)
        if element_of(op.results[0]) == i32:
            return bodies.sum_with_bias, attributes, lut
        return lambda: bodies.requantising(output), attributes, lut

    def _half_end(
        self, op: GenericOp
    ) -> tuple[Callable[[], Region], dict[str, Attribute], GenericOp]:
        """Return body and attributes of the end of float sums, and the op whose result it makes.

        A function or clamp that is the only user of the result is applied to the float32 value,
        before its rounding.
        """
        output, last = HalfOutput.of_tags(op), op
        user = self._only_user(op, "copy")
        if user is not None and "function" in user.attributes:
            own = HalfOutput.of_tags(user)
            if output.clamps or own.function in INEXACT:
                reason = "the layer before clamps" if output.clamps else "it enlarges rounding"
                self.context.decide(
                    text(user, "layer"),
                    PASS,
                    False,
                    f"not applied by {text(op, 'layer')}: {reason}",
                )
            else:
                output, last = own, user
                self._applied(user, op)
        attributes: dict[str, Attribute] = {
            key: FloatAttr(value, f32) for key, value in output.tags.items()
        }
        attributes["function"] = StringAttr(output.function)
        return lambda: bodies.rounding_to_half(output), attributes, last

    def _applied(self, user: GenericOp, op: GenericOp) -> None:
        self.context.decide(text(user, "layer"), PASS, True, f"applied by {text(op, 'layer')}")

    def _no_instruction(self, op: GenericOp) -> TilewrightError:
        return TilewrightError(
            "E0402",
            f'layer "{text(op, "layer")}" cannot run on the chip',
            [f"there is no instruction for `{text(op, 'kind') or text(op, 'role')}`"],
            "leave it to the host",
        )

    def _only_user(self, op: GenericOp, kind: str) -> GenericOp | None:
        """Return the result's only user, if it is of `kind` and the function keeps it inside."""
        value = op.results[0]
        users = [use.operation for use in value.uses]
        if value in self._returned or len(users) != 1:
            return None
        user = users[0]
        if not isinstance(user, GenericOp) or text(user, "kind") != kind:
            return None
        return user

    def _problem(
        self, reduce: GenericOp, op: GenericOp, source: SSAValue, table: bool
    ) -> tuple[ConvProblem, Shape, Shape, Callable[[Buffers], SSAValue]]:
        """Return sizes, x and y as [n, h, w, c], and what gives the weights as [o, i, kh, kw]."""
        kind, y = text(reduce, "kind"), tensor_shape(op.results[0])
        if kind == "matmul":
            return self._product(reduce, y, table)
        x = tensor_shape(source)
        if kind == "conv" and text(reduce, "layout") == "rows":
            rows = prod(x[:-1])
            x, y = (1, 1, rows, x[-1]), (1, 1, rows, y[-1])
        else:
            _need_nhwc(reduce)
        strides = _pair(numbers(reduce, "strides"))
        dilations, group = (1, 1), y[3]
        base = reduce.inputs[1]
        if kind == "conv":
            if isinstance(base.owner, tensor.ExpandShapeOp):
                base = base.owner.operands[0]
            shape = tensor_shape(base)
            group = number(reduce, "group")
            kernel = (shape[2], shape[3]) if len(shape) == 4 else (1, 1)
            dilations = _pair(numbers(reduce, "dilations"))
            shape = (*shape, 1, 1)[:4]
        else:
            kernel, shape = _pair(numbers(reduce, "kernel")), ()
        problem = ConvProblem(
            kind, x[0], x[1], x[2], x[3], y[1], y[2], y[3], kernel, strides, dilations, group,
            table, element_bytes=item_bytes(source), output_bytes=item_bytes(op.results[0]),
        )  # fmt: skip
        return problem, x, y, lambda buffers: buffers.nest.reshape(buffers.of(base), shape)

    def _product(
        self, reduce: GenericOp, y: Shape, table: bool
    ) -> tuple[ConvProblem, Shape, Shape, Callable[[Buffers], SSAValue]]:
        """As `_problem`, for a product of two activations: the right one takes the weights' place.

        Raises:
            TilewrightError: E0402, zero points (they would need sums of both operands), or batches
            that broadcast along some axes only.
        """
        left, right = (tensor_shape(value) for value in reduce.inputs)
        zeros = [number(reduce, key) for key in ("za", "zb")]
        images = [prod(left[:-2]), prod(right[:-2])]
        batch = prod(y[:-2])
        if any(zeros) or any(count not in (1, batch) for count in images):
            why = f"its operands have zero points {zeros[0]} and {zeros[1]}; the chip needs 0"
            if not any(zeros):
                why = f"it broadcasts {list(left)} against {list(right)} along some axes only"
            raise TilewrightError(
                "E0402", f'layer "{text(reduce, "layer")}" cannot run on the chip', [why]
            )
        rows, depth, columns = y[-2], left[-1], y[-1]
        problem = ConvProblem(
            "conv", batch, 1, rows, depth, 1, rows, columns, (1, 1),
            table=table, batched_weights=images[1] > 1, element_bytes=item_bytes(reduce.inputs[0]),
        )  # fmt: skip

        def weights(buffers: Buffers) -> SSAValue:
            dense = buffers.nest.reshape(buffers.of(reduce.inputs[1]), [images[1], depth, columns])
            return buffers.nest.transposed(dense, (0, 2, 1), 2)

        return problem, (images[0], 1, rows, depth), (batch, 1, rows, columns), weights

    def _choose(self, buffers: Buffers, layer: str, problem: ConvProblem) -> ConvTiling:
        choice = choose_conv(self.target, problem)
        if isinstance(choice, Choice):
            other = choice.runner_up
            buffers.decide(
                layer,
                choice.tiling.describe(problem),
                choice.cycles,
                choice.sram_bytes,
                other.describe(problem) if other else "",
                choice.runner_up_cycles,
            )
            return choice.tiling
        if choice.buffers:
            raise out_of_memory(layer, choice.buffers, choice.needed_bytes, self.target)
        raise TilewrightError(
            "E0402", f'layer "{layer}" cannot be mapped to `{self.target.name}`', [choice.reason]
        )


def _is_alias(op: Operation) -> bool:
    if op.name in RESHAPES:
        return True
    return (
        isinstance(op, GenericOp)
        and text(op, "kind") == "copy"
        and "perm" in op.attributes
        and vector.moves_nothing(op)
    )


def _unpadded(op: GenericOp) -> tuple[SSAValue, tensor.PadOp | None]:
    """Return the image a window operation reads, before padding and grouping, and its padding."""
    value, layer = op.inputs[0], text(op, "layer")
    if isinstance(value.owner, tensor.ExpandShapeOp) and text(value.owner, "layer") == layer:
        value = value.owner.operands[0]
    if isinstance(value.owner, tensor.PadOp) and text(value.owner, "layer") == layer:
        return value.owner.source, value.owner
    return value, None


def _need_nhwc(op: GenericOp) -> None:
    if text(op, "layout") != "nhwc":
        raise TilewrightError(
            "E0403",
            f'layer "{text(op, "layer")}" has layout {text(op, "layout")}; the chip stores nhwc',
            hint="run top-assign-layout before quantisation",
        )


def _pair(values: tuple[int, ...]) -> tuple[int, int]:
    return values[0], values[1]


def stored_type(dtype: np.dtype[Any]) -> Attribute:
    """Return the element type of a constant in the weight store."""
    if dtype.kind == "f":
        return {2: f16, 4: f32}[dtype.itemsize]
    return IntegerType(8 * dtype.itemsize)


def _buffer(kind: Attribute) -> Attribute:
    return MemRefType(kind.element_type, kind.get_shape()) if isinstance(kind, TensorType) else kind
