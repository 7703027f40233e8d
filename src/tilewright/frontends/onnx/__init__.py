"""The ONNX front end: files to modules of the `onnx` dialect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewright.dialects.onnx import UnknownValueError
    from tilewright.frontends.onnx.importer import import_onnx

__all__ = ["UnknownValueError", "import_onnx"]


def __getattr__(name: str) -> Any:
    # Lazy: this package is importable from the command line's start-up without xDSL and onnx.
    if name == "import_onnx":
        from tilewright.frontends.onnx.importer import import_onnx

        return import_onnx
    if name == "UnknownValueError":
        from tilewright.dialects.onnx import UnknownValueError

        return UnknownValueError
    raise AttributeError(name)
