"""Progress on stderr: a bar on a terminal, one line a phase otherwise, nothing with `--quiet`."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self


class Progress:
    """Shows phases of a long command; call it as `progress("calibrate", 0.25)`.

    A phase begins when its name first appears and ends when another begins or the context is left.
    The number is how much of the whole command is done; the bar never goes back.
    """

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.start = time.monotonic()
        self.phase: str | None = None
        self.began = self.start
        self.done = 0.0
        self.seconds: dict[str, float] = {}
        """Time spent in each phase so far."""
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if not self.quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description:<12}"),
                BarColumn(bar_width=30),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("start", total=1.0)
        return self

    def __call__(self, phase: str, fraction: float = 0.0) -> None:
        """Say that `phase` is under way, `fraction` (0..1) of the command done."""
        if phase != self.phase:
            self._finish()
            self.phase, self.began = phase, time.monotonic()
        self.done = min(1.0, max(self.done, fraction))
        if self._bar is not None:
            self._bar.update(self._task, description=phase, completed=self.done)

    def _finish(self) -> None:
        if self.phase is None:
            return
        spent = time.monotonic() - self.began
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + spent
        if self._bar is None and not self.quiet:
            print(f"{self.phase}: {spent:.1f} s", file=sys.stderr, flush=True)
        self.phase = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._finish()
        if self._bar is not None:
            self._bar.stop()
