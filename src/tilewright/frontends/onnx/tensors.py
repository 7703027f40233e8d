"""Tensors of an ONNX file as numpy arrays, checked before any memory is taken.

A declared size is believed only if as many bytes are there, so a hostile file cannot make us
allocate more than it holds. External data is memory-mapped, never read as a whole.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import TilewrightError

if TYPE_CHECKING:
    from onnx import SparseTensorProto, TensorProto

Array = npt.NDArray[Any]

MAX_ELEMENTS = 1 << 34
"""More elements in one tensor than any chip's memory holds: a malformed or hostile file."""

MAX_DENSIFIED_BYTES = 1 << 28
"""Largest dense form of a sparse initialiser that is made."""


def malformed(what: str, *details: str, hint: str | None = None) -> TilewrightError:
    """Return the error for a file that breaks ONNX's rules."""
    return TilewrightError("E0106", what, list(details), hint)


def check_dims(name: str, dims: list[int]) -> int:
    """Return the number of elements of a shape.

    Raises:
        TilewrightError: E0106, a negative or an absurd size.
    """
    count = 1
    for dim in dims:
        if dim < 0:
            raise malformed(f"tensor {name!r} has a negative dimension", f"its shape is {dims}")
        count *= dim
    if count > MAX_ELEMENTS:
        raise malformed(
            f"tensor {name!r} is absurdly large",
            f"its shape is {dims}: {count} elements; the limit is {MAX_ELEMENTS}",
        )
    return count


def load_tensor(tensor: TensorProto, folder: Path | None) -> Array:
    """Return the values of `tensor`; external data are mapped from a file below `folder`.

    The result may share memory with `tensor`. Strings come as an object array.

    Raises:
        TilewrightError: E0106 for a malformed tensor, E0101 for external data that are missing or
            outside `folder`.
    """
    from onnx import TensorProto as T
    from onnx import helper, numpy_helper

    name = tensor.name or "(unnamed)"
    dims = list(tensor.dims)
    count = check_dims(name, dims)
    if tensor.HasField("segment"):
        raise malformed(f"tensor {name!r} is stored in segments, which ONNX no longer defines")
    if tensor.data_type not in T.DataType.values() or tensor.data_type == T.UNDEFINED:
        raise malformed(f"tensor {name!r} has the unknown data type {tensor.data_type}")
    if tensor.data_type == T.STRING:
        if len(tensor.string_data) != count:
            raise _wrong_amount(name, dims, "strings", len(tensor.string_data), count)
        return np.array([bytes(s) for s in tensor.string_data], dtype=object).reshape(dims)
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
    bits = _bits(T.DataType.Name(tensor.data_type), dtype)
    size_bytes = (count * bits + 7) // 8
    if tensor.data_location == T.EXTERNAL:
        raw = _external(tensor, name, folder, size_bytes)
        if bits >= 8:
            return raw.view(dtype.newbyteorder("<")).reshape(dims)
        copy = T()
        copy.CopyFrom(tensor)
        copy.ClearField("external_data")
        copy.data_location = T.DEFAULT
        copy.raw_data = raw.tobytes()
        return numpy_helper.to_array(copy)
    if tensor.HasField("raw_data"):
        if len(tensor.raw_data) != size_bytes:
            raise _wrong_amount(name, dims, "bytes", len(tensor.raw_data), size_bytes)
        if bits >= 8:
            return np.frombuffer(tensor.raw_data, dtype=dtype.newbyteorder("<")).reshape(dims)
        return numpy_helper.to_array(tensor)
    field = helper.tensor_dtype_to_field(tensor.data_type)
    stored = len(getattr(tensor, field))
    per_element = 2 if dtype.kind == "c" else 1
    wanted = (count * bits + 7) // 8 if bits < 8 else count * per_element
    if stored != wanted:
        raise _wrong_amount(name, dims, f"values in {field}", stored, wanted)
    try:
        return numpy_helper.to_array(tensor)
    except (ValueError, OverflowError, TypeError) as error:
        raise malformed(
            f"tensor {name!r} has values that its type cannot hold", str(error)
        ) from None


def densify(sparse: SparseTensorProto, folder: Path | None) -> Array:
    """Return the dense form of a sparse tensor.

    Raises:
        TilewrightError: E0106 if it is malformed, E0104 if the dense form is larger than
            `MAX_DENSIFIED_BYTES`.
    """
    name = sparse.values.name or "(unnamed)"
    dims = list(sparse.dims)
    count = check_dims(name, dims)
    values = load_tensor(sparse.values, folder).reshape(-1)
    indices = load_tensor(sparse.indices, folder)
    if count * values.dtype.itemsize > MAX_DENSIFIED_BYTES:
        raise TilewrightError(
            "E0104",
            f"sparse tensor {name!r} is too large when dense",
            [f"its shape is {dims}; at most {MAX_DENSIFIED_BYTES} bytes are made dense"],
        )
    if indices.dtype != np.int64 or indices.shape not in ((values.size,), (values.size, len(dims))):
        raise malformed(
            f"sparse tensor {name!r} has indices of {indices.dtype} {list(indices.shape)}"
        )
    if indices.ndim == 2:
        if (indices < 0).any() or (indices >= np.array(dims, np.int64)).any():
            raise malformed(f"sparse tensor {name!r} has an index outside its shape {dims}")
        indices = (
            np.ravel_multi_index(tuple(indices.T), tuple(dims)) if dims else indices[:, :0].sum(1)
        )
    if indices.size and (indices.min() < 0 or indices.max() >= count):
        raise malformed(f"sparse tensor {name!r} has an index outside its shape {dims}")
    dense = np.zeros(count, values.dtype)
    dense[indices] = values
    return dense.reshape(dims)


def _bits(type_name: str, dtype: np.dtype[Any]) -> int:
    if type_name.endswith("INT4") or type_name.startswith("FLOAT4"):
        return 4
    return 2 if type_name.endswith("INT2") else dtype.itemsize * 8


def _wrong_amount(
    name: str, dims: list[int], unit: str, found: int, wanted: int
) -> TilewrightError:
    return malformed(
        f"tensor {name!r} does not hold what it declares",
        f"its shape {dims} needs {wanted} {unit}; the file has {found}",
    )


def _external(
    tensor: TensorProto, name: str, folder: Path | None, size_bytes: int
) -> npt.NDArray[np.uint8]:
    """Map the bytes of an external tensor, checking that the place is inside `folder`."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    if folder is None:
        raise TilewrightError(
            "E0101",
            f"the data of tensor {name!r} are in another file, and the model was given in memory",
            [f"file: {location!r}"],
            "give the path of the model",
        )
    if not location:
        raise malformed(f"external tensor {name!r} names no file")
    root = folder.resolve()
    try:
        path = (root / location).resolve()
        missing = not path.is_file()
    except (OSError, ValueError, RuntimeError) as error:
        # Too long, a zero byte, or a loop of links.
        raise TilewrightError(
            "E0101",
            f"the data file of tensor {name!r} cannot be found",
            [f"file: {location[:200]!r}", str(error)[:200]],
        ) from None
    if Path(location).is_absolute() or not path.is_relative_to(root):
        raise TilewrightError(
            "E0101",
            f"the data of tensor {name!r} lie outside the model's folder",
            [f"file: {location!r}"],
            "external data must be beside the model or below it",
        )
    if missing:
        raise TilewrightError(
            "E0101", f"the data file of tensor {name!r} is missing", [f"file: {path}"]
        )
    try:
        offset = int(entries.get("offset", 0))
        length = int(entries.get("length", size_bytes))
    except ValueError:
        raise malformed(
            f"external tensor {name!r} has an offset or length that is no number"
        ) from None
    if length != size_bytes:
        raise _wrong_amount(name, list(tensor.dims), "bytes", length, size_bytes)
    available = path.stat().st_size
    if offset < 0 or offset + size_bytes > available:
        raise TilewrightError(
            "E0101",
            f"the data file of tensor {name!r} is too short",
            [f"file: {path}, {available} bytes", f"needed: {offset} to {offset + size_bytes}"],
        )
    if checksum := entries.get("checksum"):
        with path.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha1").hexdigest()
        if found != checksum.lower():
            raise TilewrightError(
                "E0101",
                f"the data file of tensor {name!r} has another checksum than the model says",
                [f"file: {path}, SHA-1 {found}; the model says {checksum}"],
            )
    if size_bytes == 0:
        return np.empty(0, np.uint8)
    return np.memmap(path, np.uint8, "r", offset, (size_bytes,))
