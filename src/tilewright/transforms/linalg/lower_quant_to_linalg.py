"""Turn each TPU segment into a function of upstream ops with explicit integer arithmetic.

Before, one graph whose ops carry `segment = k` and `device`::

    func.func @main(%x: tensor<..xf32>) {
      %0 = quant.quantize %x    {segment = 0, device = "host", name = "q"}
      %1 = quant.conv %0, %w .. {segment = 1, device = "tpu", name = "conv1"}
      %2 = quant.dequantize %1  {segment = 2, device = "host", name = "dq"}

After, weights as arguments, names in `arg_names` and `result_names`::

    func.func private @host_0(tensor<..xf32>) -> tensor<..xi8>
    func.func @tpu_1(%x: tensor<..xi8>, %w: tensor<..xi8>, ...) -> tensor<..xi8>
    func.func private @host_2(tensor<..xi8>) -> tensor<..xf32>
    func.func @main(%x, %w, ...)        // calls the three in order

A host function has no body here; its attribute `graph` holds the segment as the text of a module.
The last op of each layer carries `result = "value name"`, so that every layer's value can be
captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from io import StringIO

from xdsl.context import Context
from xdsl.dialects import func
from xdsl.dialects.builtin import ArrayAttr, IntegerAttr, ModuleOp, StringAttr, TensorType, i8, i16
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.ir.core import BlockArgument, OpResult
from xdsl.passes import ModulePass
from xdsl.printer import Printer

from tilewright.diagnostics import TilewrightError
from tilewright.ir.context import CompileContext, compile_context
from tilewright.spec.isa import FUNCTIONS
from tilewright.transforms.linalg import convolution, elementwise, movers, pooling, resize, rows
from tilewright.transforms.linalg.attributes import find, layer_name, text
from tilewright.transforms.linalg.emit import Emitter, storage_type
from tilewright.transforms.linalg.half import CLAMPS, is_half

Lowering = Callable[[Emitter, Operation, list[SSAValue]], SSAValue]

LOWERINGS: dict[str, Lowering] = {
    "quant.conv": convolution.lower_conv,
    "quant.linear": convolution.lower_linear,
    "quant.matmul": convolution.lower_matmul,
    "quant.avg_pool": pooling.lower_avg_pool,
    "quant.add": elementwise.lower_sum,
    "quant.sub": elementwise.lower_sum,
    "quant.mul": elementwise.lower_mul,
    "quant.requantize": elementwise.lower_requantize,
    "quant.lut": elementwise.lower_lut,
    "quant.resize": resize.lower_resize,
    "quant.softmax": rows.lower_softmax,
    "quant.layer_norm": rows.lower_layer_norm,
    "top.max_pool": pooling.lower_max_pool,
    "top.reshape": movers.lower_reshape,
    "top.transpose": movers.lower_transpose,
    "top.concat": movers.lower_concat,
    "top.slice": movers.lower_slice,
    "top.pad": movers.lower_pad,
}
"""One builder for each op of codes that a TPU segment may hold, and for those that only move."""

HALF_LOWERINGS: dict[str, Lowering] = {
    "top.conv": convolution.lower_conv,
    "top.linear": convolution.lower_linear,
    "top.matmul": convolution.lower_matmul,
    "top.avg_pool": pooling.lower_avg_pool,
    **{
        f"top.{name}": elementwise.lower_half_binary for name in ("add", "sub", "mul", "min", "max")
    },
    **{
        f"top.{name}": elementwise.lower_half_function
        for name in (*FUNCTIONS, *CLAMPS)
        if name != "none"
    },
}
"""Builders of `top` ops that compute in fp16."""

TABLES = {"quant.lut": i8, "quant.softmax": i16}
"""Ops with an attribute `table`, and the type of its 256 entries."""

DROPPED = ("onnx.", "tilewright.calibration")
"""Module attributes of higher levels; upstream cannot read the empty key of `onnx.opset`."""

CONSTANTS = ("top.weight", "top.none")


@dataclass
class _Segment:
    number: int
    device: str
    ops: list[Operation] = field(default_factory=list[Operation])

    @property
    def function(self) -> str:
        return f"{self.device}_{self.number}"


@dataclass(frozen=True)
class LowerQuantToLinalgPass(ModulePass):
    """Lower the partitioned integer graph to `linalg` on tensors.

    Requires: `segment` and `device` on every op of `@main` that is not a constant.
    Ensures: only `func`, `tensor`, `linalg`, `arith`; no weights in the IR. A module without
    segments is left alone.
    """

    name = "lower-quant-to-linalg"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Rewrite the module in place.

        Raises:
            TilewrightError: E0402 for an op the level cannot express, E0501 for a graph that was
            not partitioned.
        """
        main = _main(op)
        if main is None or not main.body.blocks or not _is_partitioned(main.body.block):
            return
        graph = _Graph(compile_context(ctx), main)
        functions = graph.lower()
        for key in [key for key in op.attributes if key.startswith(DROPPED)]:
            del op.attributes[key]
        main.detach()
        main.erase(safe_erase=False)
        op.body.block.add_ops(functions)


def _main(module: ModuleOp) -> func.FuncOp | None:
    for op in module.body.block.ops:
        if isinstance(op, func.FuncOp) and op.sym_name.data == "main":
            return op
    return None


def _is_partitioned(block: Block) -> bool:
    """Tell whether there is something to lower.

    Raises:
        TilewrightError: E0501, some ops have a segment and others do not.
    """
    ops = [op for op in block.ops if op.name not in CONSTANTS and not isinstance(op, func.ReturnOp)]
    without = [op for op in ops if find(op, "segment") is None and op.name != "func.call"]
    if without and (len(without) < len(ops) or any(op.name.startswith("quant.") for op in without)):
        raise TilewrightError(
            "E0501",
            f'{without[0].name} "{layer_name(without[0])}" belongs to no segment',
            ["lower-quant-to-linalg needs `segment` and `device` on every op"],
            "run the pass quant-partition first",
        )
    return any(find(op, "segment") is not None for op in ops)


class _Graph:
    """The work on one `@main`."""

    def __init__(self, ctx: CompileContext, main: func.FuncOp) -> None:
        self.ctx = ctx
        self.main = main
        self.arguments = main.body.block.args
        names = _strings(main.attributes.get("arg_names"))
        self.inputs = names or [f"arg{index}" for index in range(len(self.arguments))]
        if len(self.inputs) != len(self.arguments):
            raise TilewrightError("E0501", "@main: arg_names does not name every argument once")
        terminator = main.body.block.last_op
        assert isinstance(terminator, func.ReturnOp)
        self.returned = list(terminator.arguments)
        given = _strings(main.attributes.get("result_names"))
        self.results = given or [f"result{index}" for index in range(len(self.returned))]

    def value_name(self, value: SSAValue) -> str:
        """Return the name of a value: the argument's or its op's (`:k` for later results)."""
        if isinstance(value, BlockArgument):
            return self.inputs[value.index]
        assert isinstance(value, OpResult)
        name = layer_name(value.op)
        return name if value.index == 0 else f"{name}:{value.index}"

    def lower(self) -> list[Operation]:
        segments = self._segments()
        self._check_names(segments)
        functions, calls = list[Operation](), list[_Call]()
        uses = _LastUses(segments, self.returned)
        for segment in segments:
            inputs = _outside(segment)
            outputs: list[SSAValue] = [
                value for op in segment.ops for value in op.results if uses.leaves(value, segment)
            ]
            weights = list[tuple[str, Attribute]]()
            if segment.device == "tpu":
                function, weights = self._lower_segment(segment, inputs, outputs)
            else:
                function = self._declare(segment, inputs, outputs)
            functions.append(function)
            calls.append(_Call(segment.function, inputs, weights, outputs))
        return [*functions, self._call_all(calls)]

    def _segments(self) -> list[_Segment]:
        found: dict[int, _Segment] = {}
        for op in self.main.body.block.ops:
            if op.name in CONSTANTS or isinstance(op, func.ReturnOp):
                continue
            number, device = find(op, "segment"), text(op, "device", "")
            assert isinstance(number, IntegerAttr)
            segment = found.setdefault(
                number.value.data, _Segment(number.value.data, device or "host")
            )
            if device not in ("tpu", "host") or device != segment.device:
                raise TilewrightError(
                    "E0501",
                    f'"{layer_name(op)}": segment {segment.number} is of device '
                    f"{segment.device!r}, the op of {device!r}",
                )
            segment.ops.append(op)
        ordered = [found[number] for number in sorted(found)]
        ready: set[SSAValue] = set(self.arguments)
        for segment in ordered:
            for value in _outside(segment):
                if value not in ready:
                    raise TilewrightError(
                        "E0501",
                        f"segment {segment.number} needs a value of a later one: "
                        f'"{self.value_name(value)}"',
                    )
            ready.update(value for op in segment.ops for value in op.results)
        return ordered

    def _check_names(self, segments: list[_Segment]) -> None:
        seen = set(self.inputs)
        for segment in segments:
            for op in segment.ops:
                for value in op.results:
                    name = self.value_name(value)
                    if name in seen:
                        raise TilewrightError("E0501", f'two values are called "{name}"')
                    seen.add(name)

    def _lower_segment(
        self, segment: _Segment, inputs: list[SSAValue], outputs: list[SSAValue]
    ) -> tuple[func.FuncOp, list[tuple[str, Attribute]]]:
        weights = _weights(segment, self.ctx)
        types = [*(storage_type(value.type) for value in inputs), *(kind for _, kind in weights)]
        block = Block(arg_types=types)
        mapped: dict[SSAValue, SSAValue] = dict(zip(inputs, block.args, strict=False))
        constants = dict(zip((name for name, _ in weights), block.args[len(inputs) :], strict=True))
        for op in segment.ops:
            layer = layer_name(op)
            lowering = LOWERINGS.get(op.name)
            if lowering is None and is_half(op):
                lowering = HALF_LOWERINGS.get(op.name)
            if lowering is None:
                raise TilewrightError(
                    "E0402",
                    f'{op.name} "{layer}" cannot be lowered for the chip',
                    [f"lower-quant-to-linalg knows {', '.join(sorted(LOWERINGS))}"],
                )
            operands = [
                constants[text(value.owner, "name", "")]
                if isinstance(value.owner, Operation) and value.owner.name == "top.weight"
                else mapped[value]
                for value in op.operands
            ]
            if op.name in TABLES:
                operands.append(constants[text(op, "table", "")])
            result = lowering(Emitter(block, layer), op, operands)
            assert isinstance(result, OpResult)
            result.op.attributes["result"] = StringAttr(self.value_name(op.results[0]))
            mapped[op.results[0]] = result
            self.ctx.decide(layer, self.name, True, f"lowered into @{segment.function}")
        block.add_op(func.ReturnOp(*(mapped[value] for value in outputs)))
        function = func.FuncOp(
            segment.function,
            (types, [storage_type(value.type) for value in outputs]),
            Region(block),
        )
        names = [*map(self.value_name, inputs), *(name for name, _ in weights)]
        self._name(function, names, [self.value_name(value) for value in outputs])
        return function, weights

    name = LowerQuantToLinalgPass.name

    def _declare(
        self, segment: _Segment, inputs: list[SSAValue], outputs: list[SSAValue]
    ) -> func.FuncOp:
        kinds = ([storage_type(v.type) for v in inputs], [storage_type(v.type) for v in outputs])
        function = func.FuncOp(segment.function, kinds, Region(), "private")
        self._name(
            function, [self.value_name(v) for v in inputs], [self.value_name(v) for v in outputs]
        )
        layers = [layer_name(op) for op in segment.ops]
        function.attributes["graph"] = StringAttr(self._host_graph(segment, inputs, outputs))
        function.attributes["layers"] = ArrayAttr([StringAttr(layer) for layer in layers])
        for op, layer in zip(segment.ops, layers, strict=True):
            reason = text(op, "host", f"{op.name} runs on the host")
            self.ctx.decide(layer, self.name, False, reason, function=segment.function)
        return function

    def _host_graph(
        self, segment: _Segment, inputs: list[SSAValue], outputs: list[SSAValue]
    ) -> str:
        """Return the segment as the text of a module: upstream tools must not meet its dialects."""
        block = Block(arg_types=[value.type for value in inputs])
        mapped: dict[SSAValue, SSAValue] = dict(zip(inputs, block.args, strict=True))
        for op in segment.ops:
            for value in op.operands:
                owner = value.owner
                if isinstance(owner, Operation) and owner.name in CONSTANTS and value not in mapped:
                    block.add_op(owner.clone(mapped))
            block.add_op(op.clone(mapped))
        block.add_op(func.ReturnOp(*(mapped[value] for value in outputs)))
        kinds = ([value.type for value in inputs], [value.type for value in outputs])
        main = func.FuncOp("main", kinds, Region(block))
        self._name(
            main, [self.value_name(v) for v in inputs], [self.value_name(v) for v in outputs]
        )
        stream = StringIO()
        Printer(stream, print_generic_format=True).print_op(ModuleOp([main]))
        return stream.getvalue()

    def _call_all(self, calls: list[_Call]) -> func.FuncOp:
        weights: dict[str, Attribute] = {}
        for call in calls:
            weights.update(call.weights)
        returned_weights = {
            value: text(value.owner, "name", "")
            for value in self.returned
            if isinstance(value.owner, Operation) and value.owner.name == "top.weight"
        }
        weights.update((name, storage_type(value.type)) for value, name in returned_weights.items())
        types = [*(storage_type(value.type) for value in self.arguments), *weights.values()]
        block = Block(arg_types=types)
        mapped: dict[SSAValue, SSAValue] = dict(zip(self.arguments, block.args, strict=False))
        constants = dict(zip(weights, block.args[len(self.arguments) :], strict=True))
        mapped.update((value, constants[name]) for value, name in returned_weights.items())
        for call in calls:
            operands = [
                *(mapped[value] for value in call.inputs),
                *(constants[name] for name, _ in call.weights),
            ]
            kinds = [storage_type(value.type) for value in call.outputs]
            op = func.CallOp(call.function, operands, kinds)
            mapped.update(zip(call.outputs, op.results, strict=True))
            block.add_op(op)
        block.add_op(func.ReturnOp(*(mapped[value] for value in self.returned)))
        results = [storage_type(value.type) for value in self.returned]
        function = func.FuncOp("main", (types, results), Region(block))
        self._name(function, [*self.inputs, *weights], self.results)
        return function

    def _name(self, function: func.FuncOp, arguments: list[str], results: list[str]) -> None:
        function.attributes["arg_names"] = ArrayAttr([StringAttr(name) for name in arguments])
        function.attributes["result_names"] = ArrayAttr([StringAttr(name) for name in results])


@dataclass(frozen=True)
class _Call:
    function: str
    inputs: list[SSAValue]
    weights: list[tuple[str, Attribute]]
    outputs: list[SSAValue]


class _LastUses:
    """Which values are needed outside their segment."""

    def __init__(self, segments: list[_Segment], returned: Iterable[SSAValue]) -> None:
        self.needed: dict[SSAValue, set[int]] = {}
        for segment in segments:
            for op in segment.ops:
                for value in op.operands:
                    self.needed.setdefault(value, set()).add(segment.number)
        self.returned = set(returned)

    def leaves(self, value: SSAValue, segment: _Segment) -> bool:
        return value in self.returned or bool(self.needed.get(value, set()) - {segment.number})


def _outside(segment: _Segment) -> list[SSAValue]:
    """Return what a segment takes from elsewhere, constants apart, in order of first use."""
    inside = {value for op in segment.ops for value in op.results}
    found: dict[SSAValue, None] = {}
    for op in segment.ops:
        for value in op.operands:
            owner = value.owner
            constant = isinstance(owner, Operation) and owner.name in CONSTANTS
            if value not in inside and not constant:
                found[value] = None
    return list(found)


def _weights(segment: _Segment, ctx: CompileContext) -> list[tuple[str, Attribute]]:
    """Return name and type of the constants a segment reads, in order of first use."""
    found: dict[str, Attribute] = {}
    for op in segment.ops:
        for value in op.operands:
            owner = value.owner
            if isinstance(owner, Operation) and owner.name == "top.weight":
                found[text(owner, "name", "")] = storage_type(value.type)
        if op.name in TABLES:
            found[text(op, "table", "")] = TensorType(TABLES[op.name], [256])
    for name in found:
        if name not in ctx.weights:
            raise TilewrightError("E0501", f'the weight store has no "{name}"')
    return list(found.items())


def _strings(attribute: Attribute | None) -> list[str]:
    if not isinstance(attribute, ArrayAttr):
        return []
    items: Sequence[Attribute] = attribute.data
    return [item.data for item in items if isinstance(item, StringAttr)]
