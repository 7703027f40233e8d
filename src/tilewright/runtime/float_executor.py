"""Float execution of the `top` graph by onnxruntime: the reference, and what calibration runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from tilewright.diagnostics import TilewrightError
from tilewright.ir.weights import Array, WeightStore

if TYPE_CHECKING:
    import onnx
    import onnxruntime
    from xdsl.dialects.builtin import ModuleOp

    from tilewright.runtime.top_to_onnx import ExportedModel


class TopSession:
    """A float `top` module made ready once and run many times.

    Attributes:
        inputs: the function's argument names.
        outputs: the function's result names.
        values: names of all values: arguments, then `layer` and `layer:i` for further results.
    """

    def __init__(
        self,
        module: ModuleOp,
        weights: WeightStore,
        *,
        threads: int = 0,
        optimise: bool = True,
    ) -> None:
        """Export the module; the runtime's session is made at the first run.

        Args:
            module: a module with a float `top` function `@main`.
            weights: its constants.
            threads: threads inside an operation; 0 takes all cores.
            optimise: let onnxruntime fuse and re-lay operations (results differ in the last bits).

        Raises:
            TilewrightError: E0402, something in the module has no float meaning.
        """
        from tilewright.runtime.top_to_onnx import export

        self._threads = threads
        self._optimise = optimise
        # Constants stay outside the model: no copy is made, and protobuf's 2 GB do not matter.
        self._model: ExportedModel = export(module, weights, external=True)
        self._sessions: dict[bool, onnxruntime.InferenceSession] = {}
        self.inputs: list[str] = self._model.inputs
        self.outputs: list[str] = self._model.outputs
        self.values: list[str] = list(self._model.values)

    def _session(self, full: bool) -> onnxruntime.InferenceSession:
        """Return the session; with `full` the one that gives every value."""
        if full not in self._sessions:
            proto = self._model.with_all_values() if full else self._model.proto
            self._sessions[full] = make_session(
                proto, self._model.external, threads=self._threads, optimise=self._optimise
            )
        return self._sessions[full]

    def _feed(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Check the inputs against the function's arguments."""
        from tilewright.dialects import top

        if set(inputs) != set(self.inputs):
            raise TilewrightError(
                "E0103",
                f"inputs {sorted(inputs)} were given, the model has {sorted(self.inputs)}",
            )
        feed: dict[str, Array] = {}
        for name in self.inputs:
            expected = self._model.types[name]
            array = np.asarray(inputs[name])
            dtype = top.numpy_dtype(expected.get_element_type())
            if array.dtype != dtype or array.shape != tuple(expected.get_shape()):
                raise TilewrightError(
                    "E0103",
                    f'input "{name}" is {array.dtype}{list(array.shape)}, '
                    f"the model takes {dtype}{list(expected.get_shape())}",
                )
            feed[name] = array
        return feed

    def run(
        self, inputs: Mapping[str, Array], outputs: Sequence[str] | None = None
    ) -> dict[str, Array]:
        """Return results (all by default) by name; `outputs` may name values of layers too.

        Raises:
            TilewrightError: E0103, an input does not fit; E0402, onnxruntime cannot run an
                operation; E0702, no value has such a name.
        """
        wanted = list(self.outputs if outputs is None else outputs)
        feed = self._feed(inputs)
        full = any(name not in self.outputs for name in wanted)
        model, session = self._model, self._session(full)
        result: dict[str, Array] = {}
        fetched: dict[str, str] = {}
        for name in wanted:
            if name in model.outputs:
                fetched[name] = name
            elif name in feed:
                result[name] = feed[name]
            elif name in model.values:
                fetched[name] = model.values[name]
            else:
                raise TilewrightError("E0702", f'no layer or result is called "{name}"')
        if fetched:
            unique = list(dict.fromkeys(fetched.values()))
            with runtime_errors("run"):
                arrays = cast(list[Array], session.run(unique, feed))
            by_name = dict(zip(unique, arrays, strict=True))
            for name, key in fetched.items():
                result[name] = self._checked(name, by_name[key], model.types[key].get_shape())
        return {name: result[name] for name in wanted}

    def run_values(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return every value by name: arguments, then all layers' results.

        Raises:
            TilewrightError: as `run`.
        """
        feed = self._feed(inputs)
        model, session = self._model, self._session(True)
        unique = list(dict.fromkeys(key for key in model.values.values() if key not in feed))
        arrays: list[Array] = []
        if unique:  # onnxruntime takes an empty list for all results
            with runtime_errors("run"):
                arrays = cast(list[Array], session.run(unique, feed))
        by_name = {**feed, **dict(zip(unique, arrays, strict=True))}
        return {
            name: self._checked(name, by_name[key], model.types[key].get_shape())
            for name, key in model.values.items()
        }

    @staticmethod
    def _checked(name: str, array: Array, shape: Sequence[int]) -> Array:
        """Guard against the runtime and our shape inference meaning different things."""
        if array.shape != tuple(shape):
            raise TilewrightError(
                "E0502",
                f'"{name}": onnxruntime computed shape {list(array.shape)}, '
                f"the module says {list(shape)}",
            )
        return array


class BoundValues:
    """Runs a session for every value, into the same arrays each time.

    What one run gives is overwritten by the next: for whoever looks at values once. Several of
    these may run one session at the same time.
    """

    def __init__(self, session: TopSession) -> None:
        from tilewright.dialects import top

        self._owner = session
        # Everything here is for this module: it is the session's other half.
        self._model = session._model  # pyright: ignore[reportPrivateUsage]
        self._session = session._session(True)  # pyright: ignore[reportPrivateUsage]
        self._binding: Any = self._session.io_binding()
        self._arrays: dict[str, Array] = {}
        for key in dict.fromkeys(self._model.values.values()):
            if key in self._model.inputs:
                continue
            kind = self._model.types[key]
            array = np.zeros(tuple(kind.get_shape()), top.numpy_dtype(kind.get_element_type()))
            self._arrays[key] = array
            self._binding.bind_output(key, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return every value by name, as `TopSession.run_values` does, until the next run.

        Raises:
            TilewrightError: as `TopSession.run`.
        """
        feed = {
            name: np.ascontiguousarray(array)
            for name, array in self._owner._feed(inputs).items()  # pyright: ignore[reportPrivateUsage]
        }
        if self._arrays:
            with runtime_errors("run"):
                for name, array in feed.items():
                    self._binding.bind_cpu_input(name, array)
                self._session.run_with_iobinding(self._binding)
        return {
            name: feed[key] if key in feed else self._arrays[key]
            for name, key in self._model.values.items()
        }


class runtime_errors:  # noqa: N801 - reads as a statement
    """Turns onnxruntime's exceptions into ours; they do not share a base class."""

    def __init__(self, doing: str) -> None:
        self.doing = doing

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        import importlib

        # A compiled module without stubs.
        state: Any = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
        known = (
            state.NotImplemented,
            state.InvalidGraph,
            state.InvalidArgument,
            state.Fail,
            state.RuntimeException,
        )
        if isinstance(error, known):
            raise TilewrightError(
                "E0402", f"onnxruntime cannot {self.doing} the float graph", [str(error)]
            ) from error


def make_session(
    proto: onnx.ModelProto,
    external: Mapping[str, Array],
    *,
    threads: int = 0,
    optimise: bool = True,
) -> onnxruntime.InferenceSession:
    """Return onnxruntime's session for an exported model.

    Args:
        proto: the model (`top_to_onnx.export`), or one made from it.
        external: constants that are handed over beside it.
        threads: threads inside an operation; 0 takes all cores.
        optimise: let onnxruntime fuse and re-lay operations.

    Raises:
        TilewrightError: E0402, onnxruntime cannot prepare it.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    # Spinning threads would take the cores from whoever prepares the next input.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimise else levels.ORT_DISABLE_ALL
    if external:
        values = [onnxruntime.OrtValue.ortvalue_from_numpy(item) for item in external.values()]
        options.add_external_initializers(list(external), values)
    with runtime_errors("prepare"):
        return onnxruntime.InferenceSession(
            proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )


def run_top(
    module: ModuleOp,
    weights: WeightStore,
    inputs: Mapping[str, Array],
    outputs: Sequence[str] | None = None,
) -> dict[str, Array]:
    """Run a float `top` module once; see `TopSession.run`."""
    return TopSession(module, weights).run(inputs, outputs)
