"""A compiled model before it is packed: constants, DDR tensors, and the steps that run it.

The steps work on two memories: *host values* (numpy arrays by name, logical shapes as in the
user's model) and the *workspace* (DDR bytes from register R2 on; tensors placed by
`TensorInfo.offset`). Constants lie from register R1 on. Values cross over only in `StoreStep`
(quantise, lay out, write) and `LoadStep` (read, undo the layout, dequantise), so every conversion
is visible and has one definition.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

DType = Literal["int8", "fp16", "float32", "int32", "int64", "bool", "uint8", "int16", "uint16"]
"""Element types of tensors; the workspace holds `int8` and `fp16` only."""

ITEM_BYTES: dict[str, int] = {
    "int8": 1,
    "fp16": 2,
    "float32": 4,
    "int32": 4,
    "int64": 8,
    "bool": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
}


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in the workspace, stored dense in C order."""

    name: str
    """Unique; the name used at the quant, linalg and affine levels, so that they compare."""
    shape: tuple[int, ...]
    """Shape as stored (NHWC for image tensors)."""
    offset: int
    """Bytes from the workspace's start; a multiple of the target's `tensor_alignment`."""
    dtype: DType = "int8"
    scale: float | None = None
    """Float32 scale of an int8 tensor; None for fp16."""
    zero_point: int = 0
    low: int = -128
    """Lowest code the quantiser produces (-127 for symmetric tensors)."""
    layer: str = ""
    """The user's node that produces it."""

    @property
    def size_bytes(self) -> int:
        """Bytes the tensor takes."""
        return int(np.prod(self.shape, dtype=np.int64)) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Port:
    """An input or output of the model, as the user sees it."""

    name: str
    shape: tuple[int, ...]
    """Logical shape, as in the user's model (NCHW)."""
    dtype: DType = "float32"


@dataclass(frozen=True)
class StoreStep:
    """Quantise a float host value as `numerics.md` says, transpose, write it to the workspace.

    Stored array = `quantise(value).transpose(perm).reshape(tensor.shape)`.
    """

    value: str
    tensor: str
    perm: tuple[int, ...] | None = None
    """Axes of the value in stored order ((0, 2, 3, 1) for NCHW to NHWC); None keeps them."""


@dataclass(frozen=True)
class LoadStep:
    """Read a workspace tensor and dequantise it into a host value.

    Value = `dequantise(stored).transpose(perm).reshape(shape)`.
    """

    tensor: str
    value: str
    shape: tuple[int, ...]
    """Logical shape of the value."""
    perm: tuple[int, ...] | None = None
    """Axes of the stored tensor in the value's order ((0, 3, 1, 2) for NHWC to NCHW)."""


@dataclass(frozen=True)
class HostStep:
    """A float ONNX model run by onnxruntime on host values."""

    name: str
    onnx: bytes
    """Serialised ModelProto; its input and output names are host values."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reason: str
    """Why this part is not on the chip."""
    layers: tuple[str, ...] = ()
    """The user's nodes in it."""


@dataclass(frozen=True)
class TpuStep:
    """A program of the chip: reads and writes workspace tensors."""

    name: str
    """`tpu_0`, `tpu_1`, ... as the function in the IR."""
    code: bytes
    """Encoded instructions, 64 bytes each (`spec.isa.encode`), ending in `halt`."""
    layers: tuple[str, ...]
    """The user's node of each instruction (fused nodes joined by `+`), "" for set-up."""
    inputs: tuple[str, ...] = ()
    """Workspace tensors read."""
    outputs: tuple[str, ...] = ()
    """Workspace tensors written that later steps read."""


Step = StoreStep | LoadStep | HostStep | TpuStep


@dataclass
class Program:
    """Everything that runs a model on one target."""

    inputs: list[Port]
    outputs: list[Port]
    """Host values of these names exist once all steps have run."""
    constants: npt.NDArray[np.uint8]
    """Bytes at R1: packed weights, parameters, tables."""
    workspace_bytes: int
    """Bytes of DDR at R2."""
    tensors: dict[str, TensorInfo]
    """Workspace tensors by name. Regions of tensors that are not alive together may overlap."""
    steps: list[Step]
    sram_peak_bytes: int = 0
    """Largest SRAM use of any layer."""
    layer_info: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """One a layer in execution order, for reports.

    Keys: `name`; `op`; `device` ("tpu" or "host"); `macs` (useful multiply-accumulates);
    `array_cycles`, `vector_cycles` (by the best mapping), `mapping` (of the array, in words),
    `padded_cycles` (of the array, one result pixel a pass);
    `array_floor`, `vector_floor` (for any program); `min_ddr_bytes` (weights and parameters once,
    and what passes between host and chip), `kernel_bytes` of them weights; `weights_after` (bytes
    of weights used after its last element, whichever that is), `array_after`, `vector_after`
    (cycles of work that needs its last weight, whichever that is), `array_floor_after`,
    `vector_floor_after`;
    `sram_bytes`; `reason` (host layers); `nest`: the layer whose loop nest it runs in, "" if that
    is its own; `step`: the step of the plan, where it is known; of layers with weights of 4 bits
    `half_bytes`, what these take as they lie in DDR, and `padding_bytes`, what of that only aligns.
    """

    @property
    def tpu_steps(self) -> list[TpuStep]:
        """The chip's programs in order."""
        return [step for step in self.steps if isinstance(step, TpuStep)]

    @property
    def host_steps(self) -> list[HostStep]:
        """The host's parts in order."""
        return [step for step in self.steps if isinstance(step, HostStep)]
