"""Between float host values and integer tensors in DDR: quantise, lay out, and back.

The definitions of `docs/concepts/numerics.md`, written out here once more: the runtime shares no
arithmetic with the reference it is compared with.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright.codegen.program import LoadStep, StoreStep, TensorInfo
from tilewright.diagnostics import TilewrightError

Array = npt.NDArray[Any]
_STORED: dict[str, Any] = {"int8": np.int8, "fp16": np.float16, "int32": np.int32}


def to_stored(value: Array, step: StoreStep, tensor: TensorInfo) -> Array:
    """Return the host value as it lies in the workspace: int8 codes or fp16.

    int8: `clamp(round_half_even(x / scale) + zero_point, low, 127)`, the division in float32.

    Raises:
        TilewrightError: E0304 when a value is not finite, or overflows fp16.
    """
    if not np.all(np.isfinite(value)):
        raise TilewrightError(
            "E0304",
            f"`{step.value}` holds values that are not finite",
            [f"{int(np.count_nonzero(~np.isfinite(value)))} of {value.size} are NaN or infinite"],
        )
    if tensor.dtype == "int8":
        assert tensor.scale is not None
        with np.errstate(over="ignore"):
            # A tiny scale may overflow to infinity here; the clamp is right for it.
            rounded = np.rint(value.astype(np.float32) / np.float32(tensor.scale))
        stored = np.clip(rounded + np.float32(tensor.zero_point), tensor.low, 127).astype(np.int8)
    else:
        with np.errstate(over="ignore"):
            stored = value.astype(np.float16)
        if not np.all(np.isfinite(stored)):
            raise TilewrightError("E0304", f"`{step.value}` holds values too large for fp16")
    if step.perm is not None:
        stored = stored.transpose(step.perm)
    return np.ascontiguousarray(stored.reshape(tensor.shape))


def from_stored(stored: Array, step: LoadStep, tensor: TensorInfo) -> Array:
    """Return a workspace tensor as a float32 host value: `float32(code - zero_point) * scale`.

    Raises:
        TilewrightError: E0304 when an fp16 result overflowed.
    """
    if step.perm is not None:
        stored = stored.transpose(step.perm)
    stored = stored.reshape(step.shape)
    if tensor.dtype == "int8":
        assert tensor.scale is not None
        return (stored.astype(np.int32) - tensor.zero_point).astype(np.float32) * np.float32(
            tensor.scale
        )
    value = stored.astype(np.float32)
    if not np.all(np.isfinite(value)):
        raise TilewrightError(
            "E0304", f"`{step.value}` (layer `{tensor.layer}`) overflowed fp16 on the chip"
        )
    return value


def read_tensor(workspace: npt.NDArray[np.uint8], tensor: TensorInfo) -> Array:
    """Return a copy of a tensor of the workspace, in its stored shape and type."""
    raw = workspace[tensor.offset : tensor.offset + tensor.size_bytes]
    return raw.view(_STORED[tensor.dtype]).reshape(tensor.shape).copy()


def write_tensor(workspace: npt.NDArray[np.uint8], tensor: TensorInfo, stored: Array) -> None:
    """Write a stored array (shape and type of the tensor) to its place in the workspace."""
    raw = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
    workspace[tensor.offset : tensor.offset + tensor.size_bytes] = raw
