"""tilewright: compile trained models for your own systolic-array chip, and know why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewright.api import compile
    from tilewright.diagnostics import TilewrightError
    from tilewright.runtime.preprocess import Preprocess
    from tilewright.runtime.runtime import Package, load
    from tilewright.spec.hardware import load_target

__version__ = "0.1.0"
__all__ = ["Package", "Preprocess", "TilewrightError", "compile", "load", "load_target"]

_HOMES = {
    "Package": "tilewright.runtime.runtime",
    "Preprocess": "tilewright.runtime.preprocess",
    "TilewrightError": "tilewright.diagnostics",
    "compile": "tilewright.api",
    "load": "tilewright.runtime.runtime",
    "load_target": "tilewright.spec.hardware",
}


def __getattr__(name: str) -> Any:
    # Lazy, so that `import tilewright` costs milliseconds.
    if name not in _HOMES:
        raise AttributeError(f"module 'tilewright' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
