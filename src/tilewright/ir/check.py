"""`--check-each-pass`: run the module before and after every pass and stop where a number changes.

Layout, fusion and rounding mistakes give wrong numbers without any error. With the same seeded
inputs on both sides of each pass, the first pass that changes an output is named at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import TilewrightError

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp
    from xdsl.passes import ModulePass

    from tilewright.ir.context import CompileContext

Array = npt.NDArray[Any]

FLOAT_TOLERANCE = 1e-3
"""Largest float difference over the output's largest magnitude: folding reorders float32 sums."""


def compare(
    before: Mapping[str, Array], after: Mapping[str, Array], tolerance: float = FLOAT_TOLERANCE
) -> str | None:
    """Return what differs, worst output first, or None.

    Integers and booleans must be equal. Floats may differ by `tolerance` times the largest finite
    magnitude of the output before; NaN and infinity must stand in the same places.
    """
    if sorted(before) != sorted(after):
        return f"outputs were {sorted(before)}, now {sorted(after)}"
    worst: tuple[float, str] | None = None
    for name, old in before.items():
        new = after[name]
        if old.shape != new.shape or old.dtype != new.dtype:
            return (
                f"output {name!r} was {old.dtype}{list(old.shape)}, "
                f"now {new.dtype}{list(new.shape)}"
            )
        excess, text = _difference(old, new, tolerance)
        if text and (worst is None or excess > worst[0]):
            worst = (excess, f"output {name!r}: {text}")
    return worst[1] if worst else None


def _difference(old: Array, new: Array, tolerance: float) -> tuple[float, str | None]:
    """Return (by how much the limit is exceeded, words), or (0, None)."""
    if not old.size:
        return 0.0, None
    if not np.issubdtype(old.dtype, np.inexact):
        delta = np.abs(old.astype(np.int64) - new.astype(np.int64))
        count = int(np.count_nonzero(delta))
        if not count:
            return 0.0, None
        at = _index(delta)
        words = f"{count} of {old.size} integers differ, at most by {int(delta.max())}: at {at} "
        return float(delta.max()), words + f"{old[at]} became {new[at]}"
    a, b = old.astype(np.float64), new.astype(np.float64)
    finite = np.isfinite(a)
    strange = ~finite | ~np.isfinite(b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if np.any(strange & ~same):
        at = _index(strange & ~same)
        return np.inf, f"at {at} {old[at]} became {new[at]}"
    limit = tolerance * (float(np.abs(a[finite]).max()) if finite.any() else 0.0)
    delta = np.where(strange, 0.0, np.abs(np.where(strange, 0, a) - np.where(strange, 0, b)))
    if float(delta.max()) <= limit:
        return 0.0, None
    at = _index(delta)
    words = f"differs by {delta.max():.3g}, allowed {limit:.3g}: at {at} {old[at]} became {new[at]}"
    return float(delta.max()) - limit, words


def _index(values: Array) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(values)), values.shape))


class CheckEachPass:
    """A hook of `passes.run_passes`; stops at the first pass that changes a number.

    Passes that leave float for integers, or enter or leave the `onnx` level (whose executor is the
    source framework), have nothing to be compared with: they are noted in `skipped` instead.
    """

    def __init__(self, seed: int = 0, tolerance: float = FLOAT_TOLERANCE) -> None:
        self.seed = seed
        self.tolerance = tolerance
        self.checked: list[str] = []
        """Passes after which all outputs were the same."""
        self.skipped: list[tuple[str, str]] = []
        """(pass, reason)."""
        self._last: tuple[str, dict[str, Array]] | None = None
        self._inputs: dict[str, Array] | None = None

    def before(self, step: ModulePass, module: ModuleOp, context: CompileContext) -> None:
        """Execute the module unless its numbers are known from the pass before."""
        if self._last is None:
            self._last = self._run(module, context)

    def after(self, step: ModulePass, module: ModuleOp, context: CompileContext) -> None:
        """Execute the module again and compare.

        Raises:
            TilewrightError: E0502, naming the pass and the worst output.
        """
        old, self._last = self._last, self._run(module, context)
        new = self._last
        if old is None or new is None:
            self.skipped.append((step.name, "the `onnx` level has no executor of ours"))
            return
        if old[0] != new[0] and old[0] == "top":
            self.skipped.append((step.name, f"`{old[0]}` is float, `{new[0]}` integer"))
            return
        found = compare(old[1], new[1], self.tolerance)
        if found:
            raise TilewrightError(
                "E0502",
                f"pass `{step.name}` changed a number",
                [found, f"inputs: seed {self.seed}; level `{old[0]}` before, `{new[0]}` after"],
                f"`--print-ir-before={step.name} --print-ir-after={step.name}` shows what it did",
            )
        self.checked.append(step.name)

    def summary(self) -> str:
        """Return what was checked and what was not, and why, one line each."""
        lines = [f"check: {len(self.checked)} passes changed no number (seed {self.seed})"]
        lines += [f"check: pass `{name}` was not checked: {why}" for name, why in self.skipped]
        return "\n".join(lines) + "\n"

    def _run(
        self, module: ModuleOp, context: CompileContext
    ) -> tuple[str, dict[str, Array]] | None:
        from tilewright.levels import execute, level_of, seeded_inputs

        level = level_of(module)
        if level == "onnx":
            return None
        if self._inputs is None:
            self._inputs = seeded_inputs(module, context, self.seed)
        return level, execute(module, context, self._inputs)
