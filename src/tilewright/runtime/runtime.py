"""Running packages: the host's part by onnxruntime, the chip's by the functional simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from tilewright.codegen.program import (
    HostStep,
    LoadStep,
    Port,
    Program,
    StoreStep,
    TensorInfo,
    TpuStep,
)
from tilewright.diagnostics import TilewrightError
from tilewright.runtime.convert import from_stored, read_tensor, to_stored, write_tensor
from tilewright.runtime.loader import read_package

if TYPE_CHECKING:
    import onnxruntime

    from tilewright.codegen.package import PackageContent
    from tilewright.runtime.simulation import Simulation
    from tilewright.sim.state import State
    from tilewright.spec.hardware import Hardware
    from tilewright.spec.program import Dispatched, Instr

Array = npt.NDArray[Any]
Hook = Callable[["Dispatched", "State"], None]

UNWRITTEN = 0x5A
"""What the workspace holds before anything is written: not zero, so that relying on it shows."""
_NUMPY: dict[str, Any] = {
    "float32": np.float32,
    "fp16": np.float16,
    "int8": np.int8,
    "int32": np.int32,
    "int64": np.int64,
    "bool": np.bool_,
    "uint8": np.uint8,
    "int16": np.int16,
    "uint16": np.uint16,
}


class Executor:
    """Runs a program: one DDR, one host, any number of inputs one after another."""

    def __init__(self, program: Program, target: Hardware) -> None:
        self.program = program
        self.target = target
        self._sessions: dict[str, onnxruntime.InferenceSession] = {}
        self._decoded: dict[str, list[Instr]] = {}

    @cached_property
    def base(self) -> int:
        """Address of the workspace (R2); constants lie at 0 (R1)."""
        from tilewright.spec.program import workspace_base

        return workspace_base(self.program.constants.nbytes)

    @cached_property
    def ddr(self) -> npt.NDArray[np.uint8]:
        """All of DDR that the program uses."""
        ddr = np.full(self.base + self.program.workspace_bytes, UNWRITTEN, np.uint8)
        ddr[: self.program.constants.nbytes] = self.program.constants
        return ddr

    @property
    def workspace(self) -> npt.NDArray[np.uint8]:
        """The part of DDR that tensors lie in (a view)."""
        return self.ddr[self.base :]

    @property
    def registers(self) -> dict[int, int]:
        """Initial R registers."""
        return {1: 0, 2: self.base}

    def code(self, step: TpuStep) -> list[Instr]:
        """Return the decoded instructions of a step, with their layers."""
        if step.name not in self._decoded:
            from tilewright.spec.isa import IllegalInstructionError
            from tilewright.spec.program import decode_program

            try:
                self._decoded[step.name] = decode_program(step.code, step.layers)
            except IllegalInstructionError as error:
                raise TilewrightError(
                    "E0601", f"the code of `{step.name}` cannot be decoded", [str(error)]
                ) from error
        return self._decoded[step.name]

    def run(self, inputs: Mapping[str, Array], hook: Hook | None = None) -> dict[str, Array]:
        """Execute all steps and return the outputs by name.

        Args:
            inputs: An array for each input, of its shape; float64 is rounded to float32.
            hook: Called after each instruction of the functional simulator.

        Raises:
            TilewrightError: E0103 for inputs that do not fit, E0304 for values that cannot be
                represented, E0602 when a program breaks a rule of the machine.
        """
        values = self._bind(inputs)
        for step in self.program.steps:
            if isinstance(step, StoreStep):
                tensor = self.program.tensors[step.tensor]
                if values[step.value].size != int(np.prod(tensor.shape)):
                    raise TilewrightError(
                        "E0601",
                        f"host value `{step.value}` has shape {list(values[step.value].shape)}, "
                        f"tensor `{step.tensor}` {list(tensor.shape)}",
                    )
                stored = to_stored(values[step.value], step, tensor)
                write_tensor(self.workspace, tensor, stored)
            elif isinstance(step, LoadStep):
                tensor = self.program.tensors[step.tensor]
                stored = read_tensor(self.workspace, tensor)
                values[step.value] = from_stored(stored, step, tensor)
            elif isinstance(step, HostStep):
                values.update(self._host(step, values))
            else:
                self._tpu(step, hook)
        return {port.name: self._output(port, values[port.name]) for port in self.program.outputs}

    def _bind(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        ports = {port.name: port for port in self.program.inputs}
        if set(inputs) != set(ports):
            raise TilewrightError(
                "E0103",
                f"the model's inputs are {', '.join(f'`{name}`' for name in ports)}",
                [f"given: {', '.join(f'`{name}`' for name in inputs) or 'none'}"],
            )
        values: dict[str, Array] = {}
        for name, port in ports.items():
            array = np.asarray(inputs[name])
            wanted = np.dtype(_NUMPY[port.dtype])
            if array.shape != port.shape:
                raise TilewrightError(
                    "E0103",
                    f"input `{name}` has shape {list(array.shape)}, not {list(port.shape)}",
                )
            if array.dtype != wanted and (array.dtype.kind, wanted.kind) != ("f", "f"):
                raise TilewrightError("E0103", f"input `{name}` holds {array.dtype}, not {wanted}")
            values[name] = array.astype(wanted)
        return values

    def _output(self, port: Port, value: Array) -> Array:
        if value.shape != port.shape:
            raise TilewrightError(
                "E0601",
                f"output `{port.name}` came out as {list(value.shape)}, not {list(port.shape)}",
            )
        return value

    def _tpu(self, step: TpuStep, hook: Hook | None) -> None:
        from tilewright.sim.functional import FunctionalSimulator

        FunctionalSimulator(self.target).run(
            self.code(step), self.ddr, registers=self.registers, hook=hook
        )
        constants = self.program.constants
        if not np.array_equal(self.ddr[: constants.nbytes], constants):
            raise TilewrightError("E0602", f"program `{step.name}` overwrote its constants in DDR")

    def _host(self, step: HostStep, values: dict[str, Array]) -> dict[str, Array]:
        import onnxruntime
        from onnxruntime.capi.onnxruntime_pybind11_state import (
            Fail,
            InvalidArgument,
            InvalidGraph,
            InvalidProtobuf,
            RuntimeException,
        )
        from onnxruntime.capi.onnxruntime_pybind11_state import (
            NotImplemented as NotSupported,
        )

        errors = (
            Fail,
            InvalidArgument,
            InvalidGraph,
            InvalidProtobuf,
            NotSupported,
            RuntimeException,
            ValueError,  # a model with other inputs or outputs than the step names
        )
        try:
            if step.name not in self._sessions:
                options = onnxruntime.SessionOptions()
                # As the reference runs the same operations: one by one, nothing fused.
                options.graph_optimization_level = (
                    onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
                )
                options.log_severity_level = 4
                self._sessions[step.name] = onnxruntime.InferenceSession(
                    step.onnx, options, providers=["CPUExecutionProvider"]
                )
            feed = {name: values[name] for name in step.inputs}
            results = self._sessions[step.name].run(list(step.outputs), feed)
        except errors as error:
            raise TilewrightError(
                "E0601",
                f"host step `{step.name}` ({', '.join(step.layers)}) cannot run",
                str(error).splitlines()[:3],
            ) from error
        return dict(zip(step.outputs, cast("list[Array]", results), strict=True))

    def run_tensors(
        self, inputs: Mapping[str, Array], writers: Mapping[str, Iterable[str]] | None = None
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Run, and return the outputs and every tensor the chip wrote, in stored form.

        Memory is reused, so each tensor is caught while its layer writes it.

        Args:
            inputs: As for `run`.
            writers: Tensors written by the instructions of a layer; by default those whose `layer`
                it is, or runs in its loop nest. A fused function has no instruction of its own:
                then the first layer names the instructions, the last the tensor.
        """
        catcher = _Catcher(self, writers)
        for step in self.program.steps:
            if isinstance(step, StoreStep):
                catcher.stored.add(step.tensor)
        outputs = self.run(inputs, catcher.hook)
        return outputs, catcher.tensors()


class _Catcher:
    """Copies what a layer's `dma_store`s write into a shadow of that layer's tensors."""

    def __init__(self, executor: Executor, writers: Mapping[str, Iterable[str]] | None) -> None:
        self.executor = executor
        self.stored: set[str] = set()
        self.by_layer: dict[str, list[TensorInfo]] = {}
        tensors = executor.program.tensors
        if writers is None:
            nests = {row.get("name"): row.get("nest") for row in executor.program.layer_info}
            for tensor in tensors.values():
                layer = nests.get(tensor.layer) or tensor.layer
                self.by_layer.setdefault(layer, []).append(tensor)
        else:
            self.by_layer = {
                layer: [tensors[name] for name in sorted(names) if name in tensors]
                for layer, names in writers.items()
            }
        self.shadows: dict[str, npt.NDArray[np.uint8]] = {}

    def hook(self, at: Dispatched, state: State) -> None:
        if at.name != "dma_store":
            return
        f = at.fields
        low = f["ddr"] - self.executor.base
        high = low + f["n0"] + sum((f[f"n{i}"] - 1) * f[f"ddr_s{i}"] for i in (1, 2, 3))
        for tensor in self.by_layer.get(at.layer, ()):
            begin, end = max(low, tensor.offset), min(high, tensor.offset + tensor.size_bytes)
            if begin >= end:
                continue
            shadow = self.shadows.get(tensor.name)
            if shadow is None:
                shadow = self.shadows[tensor.name] = np.full(tensor.size_bytes, UNWRITTEN, np.uint8)
            # Bytes between the runs are copied too; their own stores come and correct them.
            workspace = state.ddr[self.executor.base :]
            shadow[begin - tensor.offset : end - tensor.offset] = workspace[begin:end]

    def tensors(self) -> dict[str, Array]:
        kinds: dict[str, Any] = {"int8": np.int8, "fp16": np.float16, "int32": np.int32}
        return {
            name: shadow.view(kinds[info.dtype]).reshape(info.shape)
            for name, shadow in self.shadows.items()
            if name not in self.stored and (info := self.executor.program.tensors[name])
        }


class Package:
    """A compiled model, ready to run."""

    def __init__(self, content: PackageContent, path: Path | None = None) -> None:
        self.content = content
        self.path = path

    @cached_property
    def executor(self) -> Executor:
        """Runs the program; keeps its memory between runs."""
        return Executor(self.content.program, self.content.target)

    @property
    def inputs(self) -> list[Port]:
        """The model's inputs."""
        return self.content.program.inputs

    @property
    def outputs(self) -> list[Port]:
        """The model's outputs."""
        return self.content.program.outputs

    def run(self, inputs: Mapping[str, Array] | Array) -> dict[str, Array]:
        """Run the model on float inputs, bit for bit as the chip would.

        Args:
            inputs: Arrays by input name, or one array for a model with one input.

        Raises:
            TilewrightError: as `Executor.run`.
        """
        if isinstance(inputs, np.ndarray):
            if len(self.inputs) != 1:
                raise TilewrightError(
                    "E0103", f"the model has {len(self.inputs)} inputs; give a dictionary"
                )
            inputs = {self.inputs[0].name: inputs}
        return self.executor.run(cast("Mapping[str, Array]", inputs))

    def simulate(self) -> Simulation:
        """Simulate the chip's part cycle by cycle; no values are computed.

        Raises:
            TilewrightError: E0602 when a program breaks a limit or deadlocks.
        """
        from tilewright.runtime.simulation import simulate

        return simulate(self)

    def save(self, path: Path | str) -> int:
        """Write the package; return its size in bytes.

        Raises:
            TilewrightError: E0701 when it cannot be written.
        """
        from tilewright.codegen.package import write_package

        return write_package(Path(path), self.content)

    def __repr__(self) -> str:
        return f"Package({self.content.model_name!r} for {self.content.target.name!r})"


def load(path: Path | str, target: Hardware | None = None) -> Package:
    """Load a package; it may come from anywhere.

    Raises:
        TilewrightError: E0601 or E0701, see `read_package`.
    """
    return Package(read_package(Path(path), target), Path(path))
