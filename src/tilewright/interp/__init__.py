"""Execution of the linalg and affine levels: an oracle that runs the IR as it is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewright.interp.run import run_affine, run_linalg

__all__ = ["run_affine", "run_linalg"]


def __getattr__(name: str) -> Any:
    # xdsl takes a second to import; only those who run something pay.
    if name in __all__:
        from tilewright.interp import run

        return getattr(run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
