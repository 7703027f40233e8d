"""The weight store: constants of a module, by name, outside the IR.

Weights in IR text cost gigabytes and minutes, so a module only *names* them
(`top.weight {name = "conv1.w"}`) and the arrays live here: new ones in memory, loaded ones
memory-mapped from a safetensors file and read when asked for.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import TilewrightError

Array = npt.NDArray[Any]


class MissingWeightError(TilewrightError, KeyError):
    """A module names a constant that the store does not have."""


class WeightStore:
    """Named constant arrays; names are unique, arrays are read-only once added."""

    def __init__(self) -> None:
        self._arrays: dict[str, Array] = {}
        self._lazy: dict[str, Any] = {}
        self.version = 0
        """Counts the changes; equal versions of one store mean equal content."""

    def __contains__(self, name: str) -> bool:
        return name in self._arrays or name in self._lazy

    def __iter__(self) -> Iterator[str]:
        yield from sorted({*self._arrays, *self._lazy})

    def __len__(self) -> int:
        return len({*self._arrays, *self._lazy})

    def add(self, name: str, array: Array) -> str:
        """Store `array` under `name`, or `name#1`, `name#2`... if taken; return the name used."""
        unique, count = name, 0
        while unique in self:
            count += 1
            unique = f"{name}#{count}"
        self.set(unique, array)
        return unique

    def set(self, name: str, array: Array) -> None:
        """Store `array` under exactly `name`, replacing what was there."""
        # Not ascontiguousarray: that turns rank 0 into rank 1.
        value = np.array(array, order="C", copy=None)
        view = value.view()
        view.flags.writeable = False
        self.version += 1
        self._arrays[name] = view
        self._lazy.pop(name, None)

    def get(self, name: str) -> Array:
        """Return the array called `name` (read-only).

        Raises:
            MissingWeightError: no such constant.
        """
        if name in self._arrays:
            return self._arrays[name]
        if name not in self._lazy:
            raise MissingWeightError(
                "E0501",
                f"constant {name!r} is not in the weight store",
                hint="a module names its weights file in the attribute `tilewright.weights`",
            )
        array: Array = self._lazy[name].get_tensor(name)
        array.flags.writeable = False
        return array

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the array called `name` without reading it.

        Raises:
            KeyError: no such constant.
        """
        if name in self._arrays:
            return self._arrays[name].shape
        return tuple(self._lazy[name].get_slice(name).get_shape())

    def remove(self, name: str) -> None:
        """Forget `name`; nothing happens if it is not there."""
        self.version += 1
        self._arrays.pop(name, None)
        self._lazy.pop(name, None)

    def keep_only(self, names: set[str]) -> None:
        """Drop every constant whose name is not in `names`."""
        for name in list(self):
            if name not in names:
                self.remove(name)

    def copy(self) -> WeightStore:
        """Return a store that shares the (read-only) arrays but not the name table."""
        other = WeightStore()
        other.version = self.version
        other._arrays = dict(self._arrays)
        other._lazy = dict(self._lazy)
        return other

    def save(self, path: Path) -> None:
        """Write all constants to a safetensors file, in name order (same content, same bytes)."""
        from safetensors.numpy import save_file

        path = Path(path)
        scratch = path.with_name(path.name + ".partial")
        # Copies, since the target may be the very file the lazy tensors are mapped from.
        save_file(
            {
                name: np.ascontiguousarray(self.get(name)).reshape(self.get(name).shape)
                for name in self
            },
            scratch,
        )
        # The library makes private files; give what a plain open() would.
        mask = os.umask(0)
        os.umask(mask)
        scratch.chmod(0o666 & ~mask)
        scratch.replace(path)

    @classmethod
    def load(cls, path: Path) -> WeightStore:
        """Open a safetensors file; tensors are read from the map when first asked for.

        Raises:
            OSError, safetensors.SafetensorError: the file is missing or malformed.
        """
        from safetensors import safe_open

        store = cls()
        handle = safe_open(str(path), framework="np")
        for name in handle.keys():  # noqa: SIM118 - the handle is not a mapping
            store._lazy[name] = handle
        return store

    def digest(self) -> str:
        """Return the SHA3-256 of all names, types, shapes and bytes."""
        state = hashlib.sha3_256()
        for name in self:
            array = self.get(name)
            state.update(f"{name}\0{array.dtype}\0{array.shape}\0".encode())
            state.update(np.ascontiguousarray(array).tobytes())
        return state.hexdigest()
