"""Put a program together: host steps from the quant level, chip steps from the tpu level.

The partitioned quant module says what happens in which order and on which device; the tpu module
holds the chip's programs and where every tensor lies.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from xdsl.dialects import func
from xdsl.dialects.builtin import (
    ArrayAttr,
    DenseArrayBase,
    DictionaryAttr,
    IntegerAttr,
    ModuleOp,
    StringAttr,
    TensorType,
)
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue

from tilewright.codegen.program import (
    DType,
    HostStep,
    LoadStep,
    Port,
    Program,
    Step,
    StoreStep,
    TensorInfo,
    TpuStep,
)
from tilewright.diagnostics import TilewrightError
from tilewright.dialects.quant import int_list, quantised, shape_of, uniform_of
from tilewright.dialects.tpu import ProgramOp
from tilewright.ir.weights import WeightStore
from tilewright.runtime.top_to_onnx import boundary_names, main_function, top_to_onnx
from tilewright.schedule.bound import layer_bounds
from tilewright.schedule.footprint import align
from tilewright.spec.hardware import Hardware
from tilewright.spec.program import encode_program

_CONSTANTS = ("top.weight", "top.none")

HOST_DTYPES: dict[str, DType] = {
    "f32": "float32",
    "i64": "int64",
    "i32": "int32",
    "i1": "bool",
    "i8": "int8",
    "ui8": "uint8",
    "i16": "int16",
    "ui16": "uint16",
}
"""Types of a model's inputs and outputs, by element type."""


def assemble(quant: ModuleOp, tpu: ModuleOp, weights: WeightStore, hardware: Hardware) -> Program:
    """Return the program of a model.

    Args:
        quant: the partitioned integer graph (every op has `segment` and `device`).
        tpu: the same graph lowered to `tpu.program`s.
        weights: constants of both levels.
        hardware: the target.

    Raises:
        TilewrightError: E0501, the modules are not of these levels or do not belong together.
    """
    return _Assembly(quant, tpu, weights, hardware).run()


class _Assembly:
    def __init__(
        self, quant: ModuleOp, tpu: ModuleOp, weights: WeightStore, hardware: Hardware
    ) -> None:
        self.main = main_function(quant)
        self.tpu = tpu
        self.weights = weights
        self.hardware = hardware
        block = self.main.body.block
        self.arguments = boundary_names(self.main, "arg_names", len(block.args), "arg")
        last = block.last_op
        assert isinstance(last, func.ReturnOp)
        self.returned = list(last.arguments)
        self.results = boundary_names(self.main, "result_names", len(self.returned), "result")
        self.names: dict[SSAValue, str] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.steps: list[Step] = []
        self.workspace = _int(tpu, "workspace_bytes")
        table = tpu.attributes.get("tensors")
        self.offsets = table.data if isinstance(table, DictionaryAttr) else {}

    def run(self) -> Program:
        self._name_values()
        programs = {op.sym_name.data: op for op in self.tpu.ops if isinstance(op, ProgramOp)}
        for segment, device, ops in self._segments():
            for op in ops:
                for result in op.results:
                    if on_chip(result):
                        self._tensor(result, op)
            if device == "tpu":
                program = programs.get(f"tpu_{segment}")
                if program is None:
                    raise TilewrightError("E0501", f"the tpu module has no program @tpu_{segment}")
                self.steps.append(self._tpu_step(program))
            else:
                self._host_segment(segment, ops)
        self._copies()
        constants = _name(self.tpu, "constants")
        sram = self.tpu.attributes.get("sram_bytes")
        peaks = {
            layer: value.value.data
            for layer, value in (sram.data.items() if isinstance(sram, DictionaryAttr) else ())
            if isinstance(value, IntegerAttr)
        }
        members = self.tpu.attributes.get("members")
        nests = {
            layer: value.data
            for layer, value in (
                members.data.items() if isinstance(members, DictionaryAttr) else ()
            )
            if isinstance(value, StringAttr)
        }
        info = layer_bounds(self.main, self.weights, self.hardware, peaks, nests)
        packed = self.tpu.attributes.get("half_byte_weights")
        if isinstance(packed, DictionaryAttr):
            for row in info:
                if row["name"] in packed.data:
                    row["half_bytes"], row["padding_bytes"] = int_list(packed.data[row["name"]])
        steps = self.tpu.attributes.get("steps_of")
        if isinstance(steps, DictionaryAttr):
            for row in info:
                step = steps.data.get(row["name"])
                if isinstance(step, IntegerAttr):
                    row["step"] = step.value.data
        return Program(
            inputs=[
                Port(name, shape_of(argument), _host_dtype(argument))
                for name, argument in zip(self.arguments, self.main.body.block.args, strict=True)
            ],
            outputs=[
                Port(name, shape_of(value), _host_dtype(value))
                for name, value in zip(self.results, self.returned, strict=True)
            ],
            constants=np.array(self.weights.get(constants), np.uint8)
            if constants
            else np.zeros(0, np.uint8),
            workspace_bytes=self.workspace,
            tensors=self.tensors,
            steps=self.steps,
            sram_peak_bytes=_int(self.tpu, "sram_peak_bytes"),
            layer_info=info,
        )

    def _name_values(self) -> None:
        """Name host values: the user's names at the boundary, else the op's, made unique."""
        block = self.main.body.block
        taken = {*self.arguments, *self.results}
        for name, argument in zip(self.arguments, block.args, strict=True):
            self.names[argument] = name
        for name, value in zip(self.results, self.returned, strict=True):
            if value not in self.names and value.owner.name not in _CONSTANTS:  # pyright: ignore[reportAttributeAccessIssue]
                self.names[value] = name
        for op in block.ops:
            if op.name == "top.none":
                continue  # an optional operand left out has neither value nor name
            for index, result in enumerate(op.results):
                if result in self.names:
                    continue
                wish = _layer(op) + (f":{index}" if index else "")
                name, count = wish, 0
                while name in taken:
                    count += 1
                    name = f"{wish}#{count}"
                taken.add(name)
                self.names[result] = name

    def _segments(self) -> list[tuple[int, str, list[Operation]]]:
        found: dict[int, tuple[str, list[Operation]]] = {}
        for op in self.main.body.block.ops:
            if op.name in _CONSTANTS or isinstance(op, func.ReturnOp):
                continue
            number, device = op.attributes.get("segment"), op.attributes.get("device")
            if not isinstance(number, IntegerAttr) or not isinstance(device, StringAttr):
                raise TilewrightError("E0501", f'"{_layer(op)}" belongs to no segment')
            found.setdefault(number.value.data, (device.data, []))[1].append(op)
        return [(number, *found[number]) for number in sorted(found)]

    def _tensor(self, value: SSAValue, op: Operation) -> None:
        name, shape = _layer(op), shape_of(value)
        half, wide = (_element(value) == kind for kind in ("f16", "i32"))
        entry = self.offsets.get(name)
        if isinstance(entry, DictionaryAttr):
            offset = entry.data["offset"]
            assert isinstance(offset, IntegerAttr)
            place = offset.value.data
        elif _on_host(op):
            # Only the host touches it: it needs a place of its own.
            place = align(self.workspace, self.hardware.tensor_alignment)
            item = 2 if half else 4 if wide else 1
            self.workspace = place + int(np.prod(shape, dtype=np.int64)) * item
        else:
            return  # lives in SRAM only, or shares its producer's bytes
        if half or wide:
            kind = "fp16" if half else "int32"
            self.tensors[name] = TensorInfo(name, shape, place, kind, layer=name)
            return
        kind = quantised(value)
        low = op.attributes.get("lo") if enters_chip(op) else None
        least = -127 if kind.zero == 0 else -128
        if isinstance(low, IntegerAttr):
            least = low.value.data
        self.tensors[name] = TensorInfo(
            name, shape, place, "int8", kind.step, kind.zero, least, name
        )

    def _tpu_step(self, program: ProgramOp) -> TpuStep:
        instructions = program.instructions()
        return TpuStep(
            program.sym_name.data,
            encode_program(instructions),
            tuple(instr.layer for instr in instructions),
            _strings(program, "inputs"),
            _strings(program, "outputs"),
        )

    def _host_segment(self, segment: int, ops: list[Operation]) -> None:
        pending: list[Operation] = []
        folded: set[Operation] = set()
        stored: set[str] = set()

        def flush() -> None:
            kept = [op for op in pending if op not in folded]
            if kept:
                self.steps.append(self._host_step(f"host_{segment}_{len(self.steps)}", kept))
            pending.clear()

        for op in ops:
            if enters_chip(op):
                source, perm = op.operands[0], None
                producer = source.owner
                if (
                    isinstance(producer, Operation)
                    and producer.name == "top.transpose"
                    and producer in pending
                    and all(enters_chip(use.operation) for use in source.uses)
                ):
                    folded.add(producer)
                    perm, source = _perm(producer), producer.operands[0]
                flush()
                self.steps.append(StoreStep(self.names[source], _layer(op), perm))
                stored.add(_layer(op))
            elif leaves_chip(op):
                source = op.operands[0]
                name = _layer(source.owner)
                if name in stored:
                    flush()
                result, perm = op.results[0], None
                uses = list(result.uses)
                if (
                    len(uses) == 1
                    and uses[0].operation.name == "top.transpose"
                    and uses[0].operation in ops
                ):
                    transpose = uses[0].operation
                    folded.add(transpose)
                    perm, result = _perm(transpose), transpose.results[0]
                self.steps.append(LoadStep(name, self.names[result], shape_of(result), perm))
            elif any(on_chip(value) for value in (*op.operands, *op.results)):
                raise TilewrightError("E0501", f'"{_layer(op)}" ({op.name}) cannot run on the host')
            elif op not in folded:
                pending.append(op)
        flush()

    def _host_step(self, name: str, ops: list[Operation]) -> HostStep:
        """Make an ONNX model of float ops; its inputs and outputs are host values."""
        inside = set(ops)
        outer: dict[SSAValue, None] = {}
        for op in ops:
            for value in op.operands:
                owner = value.owner
                if isinstance(owner, Operation) and (owner in inside or owner.name in _CONSTANTS):
                    continue
                outer[value] = None
        outputs = [
            result
            for op in ops
            for result in op.results
            if result in self.returned or any(use.operation not in inside for use in result.uses)
        ]
        inputs = list(outer)
        block = Block(arg_types=[value.type for value in inputs])
        mapper: dict[SSAValue, SSAValue] = dict(zip(inputs, block.args, strict=True))
        used = WeightStore()
        for op in ops:
            for value in op.operands:
                owner = value.owner
                if (
                    isinstance(owner, Operation)
                    and owner.name in _CONSTANTS
                    and value not in mapper
                ):
                    block.add_op(owner.clone(mapper))
                    if owner.name == "top.weight" and (constant := _layer(owner)) not in used:
                        used.set(constant, self.weights.get(constant))
            block.add_op(op.clone(mapper))
        block.add_op(func.ReturnOp(*(mapper[value] for value in outputs)))
        function = func.FuncOp(
            "main", ([v.type for v in inputs], [v.type for v in outputs]), Region(block)
        )
        for key, values in (("arg_names", inputs), ("result_names", outputs)):
            function.attributes[key] = ArrayAttr(StringAttr(self.names[v]) for v in values)
        model = top_to_onnx(ModuleOp([function]), used)
        reasons = dict.fromkeys(
            reason.data for op in ops if isinstance(reason := op.attributes.get("host"), StringAttr)
        )
        return HostStep(
            name,
            model.SerializeToString(deterministic=True),
            tuple(self.names[value] for value in inputs),
            tuple(self.names[value] for value in outputs),
            "; ".join(reasons) or "float arithmetic",
            tuple(_layer(op) for op in ops),
        )

    def _copies(self) -> None:
        """Add results that are inputs, constants or earlier results under another name."""
        import onnx
        from onnx import TensorProto, helper, numpy_helper

        for name, value in zip(self.results, self.returned, strict=True):
            if self.names.get(value) == name:
                continue
            owner = value.owner
            shape = list(shape_of(value))
            kind = {
                "float32": TensorProto.FLOAT,
                "int64": TensorProto.INT64,
                "int32": TensorProto.INT32,
                "bool": TensorProto.BOOL,
                "int8": TensorProto.INT8,
                "uint8": TensorProto.UINT8,
                "int16": TensorProto.INT16,
                "uint16": TensorProto.UINT16,
            }[_host_dtype(value)]
            result = helper.make_tensor_value_info(name, kind, shape)
            if isinstance(owner, Operation) and owner.name == "top.weight":
                array = numpy_helper.from_array(np.array(self.weights.get(_layer(owner))), "value")
                node = helper.make_node("Constant", [], [name], value=array)
                inputs: list[str] = []
            else:
                inputs = [self.names[value]]
                node = helper.make_node("Identity", inputs, [name])
            graph = helper.make_graph(
                [node],
                name,
                [helper.make_tensor_value_info(i, kind, shape) for i in inputs],
                [result],
            )
            model: onnx.ModelProto = helper.make_model(
                graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9
            )
            content = model.SerializeToString(deterministic=True)
            reason = "the result is a copy"
            self.steps.append(HostStep(f"copy_{name}", content, tuple(inputs), (name,), reason))


def on_chip(value: SSAValue) -> bool:
    """Tell whether a value is one the chip computes: codes, fp16, or a layer's 32-bit sums."""
    if _element(value) == "i32":
        owner = value.owner
        return isinstance(owner, Operation) and owner.name in ("quant.linear", "quant.matmul")
    return uniform_of(value) is not None or _element(value) == "f16"


def enters_chip(op: Operation) -> bool:
    """Tell whether an op turns a float of the host into the chip's number type."""
    half = op.name == "top.cast" and _element(op.results[0]) == "f16"
    return op.name == "quant.quantize" or half


def leaves_chip(op: Operation) -> bool:
    """Tell whether an op turns the chip's number type into a float of the host."""
    half = op.name == "top.cast" and _element(op.operands[0]) == "f16"
    return op.name == "quant.dequantize" or half


def _element(value: SSAValue) -> str:
    kind = value.type
    return str(kind.element_type) if isinstance(kind, TensorType) else str(kind)


def _on_host(op: Operation) -> bool:
    device = op.attributes.get("device")
    return isinstance(device, StringAttr) and device.data == "host"


def _layer(op: Operation | Block) -> str:
    assert isinstance(op, Operation)
    attribute = op.attributes.get("name", op.properties.get("name"))
    assert isinstance(attribute, StringAttr), op.name
    return attribute.data


def _perm(op: Operation) -> tuple[int, ...]:
    attribute = op.attributes.get("perm", op.properties.get("perm"))
    if isinstance(attribute, ArrayAttr):
        items: Iterable[Attribute] = attribute.data
        return tuple(item.value.data for item in items if isinstance(item, IntegerAttr))
    assert isinstance(attribute, DenseArrayBase)
    return tuple(int(item) for item in attribute.iter_values())


def _host_dtype(value: SSAValue) -> DType:
    kind = value.type
    assert isinstance(kind, TensorType)
    return host_dtype(str(kind.element_type))


def host_dtype(element: str) -> DType:
    """Return the type of a model's input or output.

    Raises:
        TilewrightError: E0501, models cannot have such inputs or outputs.
    """
    if element not in HOST_DTYPES:
        raise TilewrightError(
            "E0501", f"a model input or output of type {element} is not supported"
        )
    return HOST_DTYPES[element]


def _int(module: ModuleOp, key: str) -> int:
    value = module.attributes.get(key)
    return value.value.data if isinstance(value, IntegerAttr) else 0


def _name(module: ModuleOp, key: str) -> str:
    value = module.attributes.get(key)
    return value.data if isinstance(value, StringAttr) else ""


def _strings(op: Operation, key: str) -> tuple[str, ...]:
    value = op.attributes.get(key)
    items: Iterable[Attribute] = value.data if isinstance(value, ArrayAttr) else ()
    return tuple(item.data for item in items if isinstance(item, StringAttr))
