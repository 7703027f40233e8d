"""Fast execution of a quantised module: float32 arithmetic on integer values in onnxruntime.

Equal to `quant/reference.py` but for single codes where a sum lies within float32's error of a tie
(or exceeds 2^24). It serves searches; figures that are reported come from the reference.

```python
session = FastSession(module, weights)
outputs = session.run(sample)                     # as QuantSession.run
values = session.run_layers(sample, ["conv1"])    # codes of some layers
weights.set("conv1.w.i8", other)
session.update()                                  # reads the constants again
```
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import TilewrightError
from tilewright.quant.graph import argument_names, layer_of, main_function, result_names

if TYPE_CHECKING:
    import onnxruntime
    from xdsl.dialects.builtin import ModuleOp
    from xdsl.ir import Operation, SSAValue

    from tilewright.ir.weights import WeightStore

Array = npt.NDArray[Any]


class Segment:
    """Some operations of a module, in order, made ready once and run many times.

    Codes go in and out as float32 arrays of the code less its zero point. Images may be channels
    first where the module has them channels last (`planar`): that is how they are computed.
    """

    def __init__(
        self,
        ops: Iterable[Operation],
        weights: WeightStore,
        inputs: Mapping[SSAValue, bool],
        outputs: Sequence[SSAValue],
        *,
        unclamped: Collection[Operation] = frozenset(),
        threads: int = 0,
    ) -> None:
        """Make the operations one ONNX model.

        Args:
            ops: operations of `top` (float) and `quant` in an order in which they can run.
            weights: their constants.
            inputs: values that are given, and whether they are given channels first.
            outputs: values that are wanted.
            unclamped: float operations (`top.conv`, `top.linear`, `top.matmul`) whose fused clamps
                are left out.
            threads: threads inside an operation; 0 takes all cores.

        Raises:
            TilewrightError: E0402, an operation has no form in float32 here.
        """
        from tilewright.quant.fast_nodes import FastGraph

        graph = FastGraph(weights, unclamped)
        self._feeds: dict[SSAValue, str] = {}
        for index, (value, planar) in enumerate(inputs.items()):
            self._feeds[value] = f"in{index}"
            graph.declare(value, f"in{index}", planar)
        for op in ops:
            graph.add(op)
        self.planar: dict[SSAValue, bool] = {}
        """By output, whether it comes channels first."""
        self._fetches: dict[SSAValue, str] = {}
        for value in outputs:
            form = graph.form(value)
            name = form.name
            if name in graph.fixed or name in self._fetches.values():
                name = graph.graph.emit("Identity", [name])
            self._fetches[value] = name
            self.planar[value] = form.planar
        self._session = self._make(graph, threads)

    def _make(self, graph: Any, threads: int) -> onnxruntime.InferenceSession:
        import onnx

        from tilewright.runtime.float_executor import make_session
        from tilewright.runtime.top_to_onnx import IR_VERSION, OPSET

        model = onnx.helper.make_model(
            onnx.helper.make_graph(
                graph.graph.nodes,
                "main",
                [_info(name, value) for value, name in self._feeds.items()],
                [_info(name, value) for value, name in self._fetches.items()],
                graph.graph.initializers,
            ),
            opset_imports=[onnx.helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
        )
        return make_session(model, graph.graph.external_arrays, threads=threads)

    def run(self, values: Mapping[SSAValue, Array]) -> dict[SSAValue, Array]:
        """Return the outputs for arrays of the inputs (see the class for their form).

        Raises:
            TilewrightError: E0402, onnxruntime cannot run it.
        """
        from tilewright.runtime.float_executor import runtime_errors

        if not self._fetches:
            return {}
        feed = {name: values[value] for value, name in self._feeds.items()}
        with runtime_errors("run"):
            arrays = cast(list[Array], self._session.run(list(self._fetches.values()), feed))
        return dict(zip(self._fetches, arrays, strict=True))


class FastSession:
    """A quantised module made ready once and run many times; see the module's docstring."""

    def __init__(self, module: ModuleOp, weights: WeightStore, *, threads: int = 0) -> None:
        """Read the module; onnxruntime's sessions are made when first needed.

        Args:
            module: a module of `quant` and `top` ops (int8).
            weights: its constants; they are read when a session is made.
            threads: threads inside an operation; 0 takes all cores.
        """
        self.main = main_function(module)
        self.weights = weights
        self.inputs = argument_names(self.main)
        self.outputs = result_names(self.main)
        self._threads = threads
        self._segments: dict[tuple[str, ...], Segment] = {}
        block = self.main.body.block
        self._ops = [op for op in block.ops if op.name != "func.return"]
        self._results = [
            value for op in block.ops if op.name == "func.return" for value in op.operands
        ]
        self._layers: dict[str, SSAValue] = {}
        for op in self._ops:
            if op.name in ("top.weight", "top.none"):
                continue
            for index, value in enumerate(op.results):
                name = layer_of(op) if index == 0 else f"{layer_of(op)}:{index}"
                self._layers[name] = value

    def update(self) -> None:
        """Take the constants anew: call it after a change of the weight store."""
        self._segments.clear()

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs by name (codes int8, sums int32, floats float32).

        Raises:
            TilewrightError: E0104, an input is missing or has the wrong shape; E0402, an operation
                has no fast execution.
        """
        arrays = self._execute((), inputs)
        return {
            name: arrays[value] for name, value in zip(self.outputs, self._results, strict=True)
        }

    def run_layers(
        self, inputs: Mapping[str, Array], names: Sequence[str] | None = None
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return the outputs by name, and values of layers by the user's name (all by default).

        Raises:
            TilewrightError: as `run`; E0702, no layer has such a name.
        """
        chosen = tuple(self._layers) if names is None else tuple(names)
        for name in chosen:
            if name not in self._layers:
                raise TilewrightError("E0702", f'no layer is called "{name}"')
        arrays = self._execute(chosen, inputs)
        outputs = {
            name: arrays[value] for name, value in zip(self.outputs, self._results, strict=True)
        }
        return outputs, {name: arrays[self._layers[name]] for name in chosen}

    def _execute(
        self, layers: tuple[str, ...], inputs: Mapping[str, Array]
    ) -> dict[SSAValue, Array]:
        feed = self._feed(inputs)
        if layers not in self._segments:
            wanted = [*self._results, *(self._layers[name] for name in layers)]
            given: dict[SSAValue, bool] = dict.fromkeys(self.main.body.block.args, False)
            self._segments[layers] = Segment(
                self._ops, self.weights, given, list(dict.fromkeys(wanted)), threads=self._threads
            )
        segment = self._segments[layers]
        return {
            value: codes_of(value, array, segment.planar[value])
            for value, array in segment.run(feed).items()
        }

    def _feed(self, inputs: Mapping[str, Array]) -> dict[SSAValue, Array]:
        from tilewright.dialects.quant import shape_of, uniform_of

        feed: dict[SSAValue, Array] = {}
        for name, argument in zip(self.inputs, self.main.body.block.args, strict=True):
            if name not in inputs:
                raise TilewrightError(
                    "E0104", f'no value for input "{name}"', [f"inputs: {', '.join(self.inputs)}"]
                )
            array = np.asarray(inputs[name])
            if array.shape != shape_of(argument):
                raise TilewrightError(
                    "E0104",
                    f'input "{name}" has the wrong shape',
                    [f"given {list(array.shape)}; needs {list(shape_of(argument))}"],
                )
            kind = uniform_of(argument)
            feed[argument] = (
                array if kind is None else array.astype(np.float32) - np.float32(kind.zero)
            )
        return feed


def codes_of(value: SSAValue, array: Array, planar: bool) -> Array:
    """Return what a segment gave for `value` as the reference has it: int8, int32 or float."""
    from tilewright.dialects.quant import uniform_of

    if planar:
        array = np.ascontiguousarray(array.transpose(0, 2, 3, 1))
    kind = uniform_of(value)
    if kind is not None:
        return (array + np.float32(kind.zero)).astype(np.int8)
    if _is_sum(value):
        return np.clip(np.rint(array.astype(np.float64)), -(2**31), 2**31 - 1).astype(np.int32)
    return array


def _is_sum(value: SSAValue) -> bool:
    """Whether `value` is the 32-bit sum of a layer, which is float32 here."""
    from xdsl.ir import Operation

    return (
        isinstance(value.owner, Operation)
        and value.owner.name in ("quant.linear", "quant.matmul")
        and str(getattr(value.type, "element_type", "")) == "i32"
    )


def _info(name: str, value: SSAValue) -> Any:
    """Return the description of an input or output, its sizes left open."""
    import onnx

    from tilewright.dialects import top
    from tilewright.dialects.quant import uniform_of

    element: Any = getattr(value.type, "element_type", None)
    dtype = np.dtype(np.float32)
    if uniform_of(value) is None and not _is_sum(value):
        dtype = np.dtype(top.numpy_dtype(element))
    code = onnx.helper.np_dtype_to_tensor_dtype(dtype)
    return onnx.helper.make_tensor_value_info(name, code, None)
