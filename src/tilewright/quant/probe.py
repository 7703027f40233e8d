"""The float graph taken apart: every layer from given operands, and errors added to one value.

Both are the exported float model with other wires, run by onnxruntime:

    y = conv(x); z = relu(y)    `each`:    y = conv(x'); z = relu(y')    x', y' are given
                                `shifted`: y = conv(x) + e; z = relu(y)  e is given, else 0
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewright.runtime.float_executor import make_session, runtime_errors

if TYPE_CHECKING:
    import onnx
    import onnxruntime
    from xdsl.dialects.builtin import ModuleOp

    from tilewright.ir.weights import WeightStore
    from tilewright.runtime.top_to_onnx import ExportedModel

Array = npt.NDArray[Any]
GIVEN, RAW, ERROR = "//given", "//raw", "//error"
"""Endings of the names of added wires; names of layers may hold anything, but these are unlikely,
and a clash is an error of onnxruntime, not a wrong result."""


class FloatProbe:
    """A float `top` module whose layers can be run apart."""

    def __init__(self, module: ModuleOp, weights: WeightStore) -> None:
        """Export the module; sessions are made when first needed.

        Raises:
            TilewrightError: E0402, something in the module has no float meaning.
        """
        from tilewright.runtime.top_to_onnx import export

        self._model: ExportedModel = export(module, weights, external=True)
        self._each: onnxruntime.InferenceSession | None = None
        self._shifted: onnxruntime.InferenceSession | None = None
        inputs = set(self._model.inputs)
        self._wires = {
            name: wire for name, wire in self._model.values.items() if wire not in inputs
        }
        """ONNX name of every layer's value, by value name."""

    def each(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Return what every layer makes of `values`, float32.

        Args:
            values: what layers read, by name: the function's arguments and every layer's value.
        """
        session = self._each = self._each or self._session(self._apart())
        read = {entry.name for entry in session.get_inputs()}
        feed: dict[str, Array] = {}
        for name, wire in self._model.values.items():
            key = wire + GIVEN if name in self._wires else wire
            if key in read:
                feed[key] = values[name]
        wires = list(dict.fromkeys(self._wires.values()))
        if not wires:
            return {}
        with runtime_errors("run"):
            arrays: Any = session.run(wires, feed)
        found = dict(zip(wires, arrays, strict=True))
        return {name: found[wire] for name, wire in self._wires.items()}

    def shifted(
        self, inputs: Mapping[str, Array], name: str | None, error: Array | None = None
    ) -> dict[str, Array]:
        """Return the outputs by name with `error` added to the value `name`; None: to none.

        Values that are not float32 take no error.
        """
        session = self._shifted = self._shifted or self._session(self._with_errors())
        zero = np.zeros((), np.float32)
        feed: dict[str, Array] = {}
        given = None if name is None else self._model.values[name] + ERROR
        for entry in session.get_inputs():
            if entry.name == given and error is not None:
                feed[entry.name] = np.asarray(error, np.float32)
            else:
                feed[entry.name] = inputs.get(entry.name, zero)
        with runtime_errors("run"):
            arrays: Any = session.run(self._model.outputs, feed)
        return dict(zip(self._model.outputs, arrays, strict=True))

    @property
    def shiftable(self) -> set[str]:
        """Names of the values `shifted` can add an error to."""
        return {name for name, wire in self._model.values.items() if self._is_float(wire)}

    def _is_float(self, wire: str) -> bool:
        return str(self._model.types[wire].get_element_type()) == "f32"

    def _session(self, proto: onnx.ModelProto) -> onnxruntime.InferenceSession:
        return make_session(proto, self._model.external)

    def _apart(self) -> onnx.ModelProto:
        """Return the model whose layers read inputs of the model instead of each other."""
        proto = self._model.with_all_values()
        wires = set(self._wires.values())
        shapes = {entry.name: entry for entry in proto.graph.output}
        used: dict[str, None] = {}
        for node in proto.graph.node:
            for index, name in enumerate(node.input):
                if name in wires:
                    node.input[index] = name + GIVEN
                    used[name] = None
        for name in used:
            entry = proto.graph.input.add()
            entry.CopyFrom(shapes[name])
            entry.name = name + GIVEN
        return proto

    def _with_errors(self) -> onnx.ModelProto:
        """Return the model with a sum behind every float value."""
        import onnx

        proto = onnx.ModelProto()
        proto.CopyFrom(self._model.proto)
        wires = {wire for wire in self._model.values.values() if self._is_float(wire)}
        inputs = wires & set(self._model.inputs)
        nodes = list(proto.graph.node)
        del proto.graph.node[:]

        def sum_of(raw: str, wire: str, result: str) -> None:
            proto.graph.node.append(onnx.helper.make_node("Add", [raw, wire + ERROR], [result]))
            # Without a shape: a scalar zero where there is no error.
            proto.graph.input.append(
                onnx.helper.make_tensor_value_info(wire + ERROR, onnx.TensorProto.FLOAT, None)
            )

        for wire in self._model.inputs:
            if wire in inputs:
                sum_of(wire, wire, wire + GIVEN)
        for node in nodes:
            for index, name in enumerate(node.input):
                if name in inputs:
                    node.input[index] = name + GIVEN
            made = [name for name in node.output if name in wires]
            for index, name in enumerate(node.output):
                if name in wires:
                    node.output[index] = name + RAW
            proto.graph.node.append(node)
            for name in made:
                sum_of(name + RAW, name, name)
        return proto
