"""Export of the float `top` graph to ONNX: for execution by onnxruntime, and for Netron.

Names in the model: graph inputs and outputs are the user's (`arg_names`, `result_names` of the
function), every other value is named after its layer (`name:i` for further results).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.dialects.func import ReturnOp
from xdsl.ir import Attribute, SSAValue

from tilewright.diagnostics import TilewrightError
from tilewright.dialects import top
from tilewright.dialects.top.module import boundary_names, main_function, tensor_type
from tilewright.ir.weights import Array, WeightStore
from tilewright.runtime.onnx_nodes import Exporter, export_op

if TYPE_CHECKING:
    import onnx

OPSET = 20
IR_VERSION = 9
QUANTISED_OPSET = 21
"""The first with 16-bit codes and scales in blocks; for models that have Q/DQ left."""
MODEL_BYTES = 2**31 - 2**20
"""What an ONNX file can hold, with room for the graph."""


@dataclass
class ExportedModel:
    """An ONNX model of a `top` module, and how its names are found."""

    proto: onnx.ModelProto
    inputs: list[str]
    outputs: list[str]
    values: dict[str, str]
    """ONNX name by value name (function arguments, then `layer` and `layer:i`)."""
    types: dict[str, TensorType[Attribute]]
    """Type by ONNX name: of inputs, outputs and values."""
    external: dict[str, Array]
    """Constants that must be handed over beside the model, by initialiser."""

    def with_all_values(self) -> onnx.ModelProto:
        """Return the model with every value a graph output, after the function's own results."""
        import onnx

        proto = onnx.ModelProto()
        proto.CopyFrom(self.proto)
        known = {entry.name: entry for entry in proto.graph.value_info}
        shown = {entry.name for entry in proto.graph.output}
        proto.graph.output.extend(known[name] for name in known if name not in shown)
        del proto.graph.value_info[:]
        return proto


def _value_info(name: str, value: TensorType[Attribute], where: str) -> Any:
    import onnx

    try:
        dtype = top.numpy_dtype(value.get_element_type())
    except TypeError as error:
        raise TilewrightError(
            "E0402", f'"{where}" is {value}: only the float graph can be run by onnxruntime'
        ) from error
    code = onnx.helper.np_dtype_to_tensor_dtype(dtype)
    return onnx.helper.make_tensor_value_info(name, code, list(value.get_shape()))


def export(
    module: ModuleOp,
    weights: WeightStore,
    *,
    external: bool = False,
) -> ExportedModel:
    """Export `@main` of a float `top` module.

    Args:
        module: the module.
        weights: its constants.
        external: leave constants of 1 KB and more out of the model (`ExportedModel.external`).

    Raises:
        TilewrightError: E0402, an operation or type has no float meaning; E0501, two layers have
            one name.
    """
    import onnx

    function = main_function(module)
    block = function.body.block
    terminator = block.last_op
    assert isinstance(terminator, ReturnOp)
    inputs = boundary_names(function, "arg_names", len(block.args), "arg")
    outputs = boundary_names(function, "result_names", len(terminator.operands), "result")
    graph = Exporter(weights, external)
    graph.taken.update(inputs, outputs)
    names: dict[SSAValue, str] = dict(zip(block.args, inputs, strict=True))
    values: dict[str, str] = {name: name for name in inputs}
    types = {name: tensor_type(arg) for name, arg in zip(inputs, block.args, strict=True)}

    for operand, wish in zip(terminator.operands, outputs, strict=True):
        types[wish] = tensor_type(operand)
        if operand not in names and not isinstance(operand.owner, top.WeightOp):
            names[operand] = wish
    layers: dict[str, top.TopOp] = {}
    for op in block.ops:
        if not isinstance(op, top.TopOp) or isinstance(op, top.WeightOp):
            continue
        if layers.setdefault(op.layer_name, op) is not op:
            raise TilewrightError("E0501", f'two layers are called "{op.layer_name}"')
        for index, result in enumerate(op.results):
            own = op.layer_name if index == 0 else f"{op.layer_name}:{index}"
            if result not in names:
                names[result] = graph.unique(own)
            # A layer called like a graph input is told apart from it by its second name.
            values[own if own not in values else f"{own}#"] = names[result]
            types[names[result]] = tensor_type(result)

    info: list[Any] = []
    added: dict[str, str] = {}
    for op in block.ops:
        if isinstance(op, ReturnOp):
            break
        if isinstance(op, top.NoneOp):
            names[op.result] = ""
        elif isinstance(op, top.WeightOp):
            if op.result.first_use is None:
                # onnxruntime drops it, and would then not find what is handed over for it.
                continue
            key = op.layer_name
            if key not in added:
                if key not in weights:
                    raise TilewrightError("E0501", f'constant "{key}" is not in the weight store')
                array = weights.get(key)
                declared = tensor_type(op.result)
                if tuple(array.shape) != tuple(declared.get_shape()):
                    raise TilewrightError(
                        "E0501", f'constant "{key}" has shape {array.shape}, {declared} declared'
                    )
                added[key] = graph.unique(key)
                graph.initializer(added[key], array)
            names[op.result] = added[key]
        elif isinstance(op, top.TopOp):
            outs = [names[result] for result in op.results]
            for result, name in zip(op.results, outs, strict=True):
                info.append(_value_info(name, tensor_type(result), op.layer_name))
            export_op(graph, op, [names[operand] for operand in op.operands], outs)
        else:
            raise TilewrightError(
                "E0402", f"{op.name}: only the float graph can be run by onnxruntime"
            )
    for operand, wish in zip(terminator.operands, outputs, strict=True):
        if names[operand] != wish:
            graph.emit("Identity", [names[operand]], [wish])

    quantised = any(node.op_type.endswith("eLinear") for node in graph.nodes)
    model = onnx.helper.make_model(
        onnx.helper.make_graph(
            graph.nodes,
            "main",
            [_value_info(name, types[name], name) for name in inputs],
            [_value_info(name, types[name], name) for name in outputs],
            graph.initializers,
            value_info=[entry for entry in info if entry.name not in set(outputs)],
        ),
        producer_name="tilewright",
        opset_imports=[onnx.helper.make_opsetid("", QUANTISED_OPSET if quantised else OPSET)],
        ir_version=IR_VERSION + quantised,
    )
    return ExportedModel(model, inputs, outputs, values, types, graph.external_arrays)


def top_to_onnx(module: ModuleOp, weights: WeightStore) -> onnx.ModelProto:
    """Return `@main` of a float `top` module as an ONNX model (see the module's docstring).

    Raises:
        TilewrightError: E0402, an operation or type has no float meaning; or the model is larger
            than the 2 GB an ONNX file can hold.
    """
    total = sum(weights.get(name).nbytes for name in weights)
    if total >= MODEL_BYTES:
        raise TilewrightError(
            "E0402", f"the constants have {total} bytes; an ONNX file holds at most 2 GB"
        )
    return export(module, weights).proto


__all__ = ["ExportedModel", "boundary_names", "export", "main_function", "top_to_onnx"]
