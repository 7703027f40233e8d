"""The standard ONNX Backend API over import, conversion to `top` and float execution.

import tilewright.onnx_backend as backend
outputs = backend.prepare(model).run([x])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx.backend.base import Backend, BackendRep, namedtupledict

from tilewright.diagnostics import TilewrightError
from tilewright.dialects.onnx import UnknownValueError
from tilewright.frontends.onnx import import_onnx
from tilewright.ir.context import CompileContext
from tilewright.ir.weights import Array
from tilewright.runtime.float_executor import TopSession
from tilewright.transforms.convert_onnx_to_top import ConvertOnnxToTopPass

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


class TilewrightRep(BackendRep):
    """A model ready to run.

    Attributes:
        inputs: names of the graph inputs still to be fed, in order.
        outputs: names of the graph outputs, in order.
        bound: values of the inputs that were made constants.
    """

    def __init__(
        self, session: TopSession, inputs: Sequence[str], bound: Mapping[str, Array]
    ) -> None:
        self.session = session
        self.inputs = list(inputs)
        self.outputs = list(session.outputs)
        self.bound = dict(bound)

    def run(self, inputs: Sequence[Array] | Mapping[str, Array], **kwargs: Any) -> tuple[Any, ...]:
        """Run once; inputs by position (the graph inputs that are not bound) or by name.

        Raises:
            TilewrightError: E0103, an input does not fit.
        """
        if isinstance(inputs, Mapping):
            feed = {name: np.asarray(inputs[name]) for name in self.inputs if name in inputs}
        else:
            if len(inputs) != len(self.inputs):
                raise TilewrightError(
                    "E0103",
                    f"{len(inputs)} inputs were given, the model takes {len(self.inputs)}",
                    [f"inputs: {', '.join(self.inputs)}"],
                )
            feed = {name: np.asarray(v) for name, v in zip(self.inputs, inputs, strict=True)}
        results = self.session.run(feed)
        return namedtupledict("Outputs", self.outputs)(*(results[name] for name in self.outputs))


class DeferredRep(BackendRep):
    """A model with an open shape, or with an operand that must be known at compile time.

    It is compiled at each run, for the shapes and values given there.
    """

    def __init__(self, model: ModelProto, device: str) -> None:
        self.model = model
        self.device = device

    def run(self, inputs: Sequence[Array] | Mapping[str, Array], **kwargs: Any) -> tuple[Any, ...]:
        """Compile for these inputs and run.

        Raises:
            TilewrightError: the model cannot be compiled or run.
        """
        rep, feed = prepare_for(self.model, inputs, self.device)
        return rep.run(feed)


class TilewrightBackend(Backend):
    """Runs models by the compiler's float graph, on the host."""

    @classmethod
    def prepare(
        cls,
        model: ModelProto,
        device: str = "CPU",
        *,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        bind: Mapping[str, Array] | None = None,
        **kwargs: Any,
    ) -> TilewrightRep | DeferredRep:
        """Compile a model to `top` and make it ready.

        A model that needs to know shapes or values of its inputs is compiled when it is first run.

        Args:
            model: the model.
            device: only "CPU".
            shapes: static shapes of dynamic inputs, as `import_onnx` takes them.
            bind: inputs to be turned into constants.
            kwargs: accepted and unused, as the interface demands.

        Raises:
            TilewrightError: the model cannot be compiled.
        """
        if not cls.supports_device(device):
            raise TilewrightError("E0702", f"device must be CPU, not {device!r}")
        try:
            return _compiled(model, shapes, bind)
        except UnknownValueError:
            if shapes or bind:
                raise
            return DeferredRep(model, device)

    @classmethod
    def run_model(
        cls, model: ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any
    ) -> tuple[Any, ...]:
        """Compile and run once.

        The values are at hand, so dynamic dimensions take the shapes of `inputs`, and inputs that
        must be known at compile time (a target shape) are bound to their values.

        Raises:
            TilewrightError: the model cannot be compiled or run.
        """
        rep, feed = prepare_for(model, inputs, device)
        return rep.run(feed)

    @classmethod
    def run_node(
        cls,
        node: NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[tuple[np.dtype[Any], tuple[int, ...]]] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Run one node of the newest operator set, or of `opset_version`.

        Raises:
            TilewrightError: the node cannot be compiled or run.
        """
        from onnx import defs, helper

        version = int(kwargs.get("opset_version", defs.onnx_opset_version()))
        names = [name for name in node.input if name]
        arrays = dict(zip(names, (np.asarray(item) for item in inputs), strict=True))
        infos = [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
            )
            for name, array in arrays.items()
        ]
        outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
        model = helper.make_model(
            helper.make_graph([node], "node", infos, outputs),
            opset_imports=[helper.make_opsetid(node.domain, version)],
        )
        return cls.run_model(model, arrays, device)

    @classmethod
    def is_compatible(cls, model: ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        """Whether the model can be compiled as it is, without a look at its inputs."""
        try:
            return isinstance(cls.prepare(model, device), TilewrightRep)
        except TilewrightError:
            return False

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether `device` is the host."""
        return device.partition(":")[0] == "CPU"


def _compiled(
    model: ModelProto,
    shapes: Mapping[str, tuple[int, ...]] | None,
    bind: Mapping[str, Array] | None,
) -> TilewrightRep:
    ctx = CompileContext()
    module = import_onnx(model, shapes, ctx, bind)
    ConvertOnnxToTopPass().apply(ctx, module)
    session = TopSession(module, ctx.weights, optimise=False)
    return TilewrightRep(session, session.inputs, bind or {})


def prepare_for(
    model: ModelProto, inputs: Any, device: str = "CPU"
) -> tuple[TilewrightRep, dict[str, Array]]:
    """Prepare `model` for these inputs (see `run_model`); return what is still to be fed.

    Raises:
        TilewrightError: the model cannot be compiled.
    """
    feed = _named(model, inputs)
    constants = {item.name for item in model.graph.initializer} if model.ir_version < 4 else set()
    shapes = {
        info.name: feed[info.name].shape
        for info in model.graph.input
        if info.name in feed and info.name not in constants and feed[info.name].size
    }
    if not TilewrightBackend.supports_device(device):
        raise TilewrightError("E0702", f"device must be CPU, not {device!r}")
    defaults = {item.name for item in model.graph.initializer}
    # A default that is overridden is a constant of another value.
    bind = {name: array for name, array in feed.items() if name in defaults - constants}
    shapes = {name: shape for name, shape in shapes.items() if name not in bind}
    while True:
        try:
            rep = _compiled(model, shapes, bind)
        except UnknownValueError as error:
            wanted = [name for name in error.inputs if name in feed and name not in bind]
            if not wanted:
                raise
            for name in wanted:
                bind[name] = feed[name]
                shapes.pop(name, None)
            continue
        return rep, {name: feed[name] for name in rep.inputs if name in feed}


def _named(model: ModelProto, inputs: Any) -> dict[str, Array]:
    """Return inputs by name; by position they leave out those that have defaults."""
    if isinstance(inputs, Mapping):
        return {str(name): np.asarray(value) for name, value in inputs.items()}
    names = [info.name for info in model.graph.input]
    values = [inputs] if isinstance(inputs, np.ndarray) else list(inputs)
    if len(values) < len(names):
        defaults = {item.name for item in model.graph.initializer}
        names = [name for name in names if name not in defaults]
    if len(values) > len(names):
        raise TilewrightError(
            "E0103", f"{len(values)} inputs were given, the model takes {len(names)}"
        )
    return {name: np.asarray(value) for name, value in zip(names, values, strict=False)}


prepare = TilewrightBackend.prepare
run_model = TilewrightBackend.run_model
run_node = TilewrightBackend.run_node
is_compatible = TilewrightBackend.is_compatible
supports_device = TilewrightBackend.supports_device
