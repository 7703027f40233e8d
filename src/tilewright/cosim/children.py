"""Programs that a build runs: they end with it, whatever ends it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType


class Children:
    """Runs programs, from several threads, in the caller's process group.

    Ctrl-C in a terminal so reaches them as well; `end` is for what only tells this process.
    """

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._ended = False
        self._lock = threading.Lock()
        """Between a start and `end`: what starts during `end` would be missed."""

    def run(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> tuple[int, str]:
        """Return the exit code and all that was said.

        Raises:
            OSError: the program cannot be started; InterruptedError after `end`.
        """
        with self._lock:
            if self._ended:
                raise InterruptedError
            process = subprocess.Popen(
                command, cwd=folder, env=environment, text=True, errors="replace",
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            self._running.add(process)
        try:
            said, _ = process.communicate()
        finally:
            if process.poll() is None:
                _end(process)
            self._running.discard(process)
        return process.returncode, said

    def end(self) -> None:
        """End all that still run, and start none any more."""
        with self._lock:
            self._ended = True
            for process in tuple(self._running):
                _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """End a program and what it started: a compiler is the driver of others."""
    if process.returncode is not None:
        return  # its number may be another's by now
    for pid in (process.pid, *_descendants(process.pid)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name in parentheses may hold anything.
            rest = re.sub(r"^.*\)", "", file.read_text("utf-8", "replace"), flags=re.DOTALL)
            children.setdefault(int(rest.split()[1]), []).append(int(file.parent.name))
    found = list(children.get(pid, []))
    for other in found:
        found += children.get(other, [])
    return found


class _ToldToEndError(BaseException):
    """SIGTERM came. Not an `Exception`: nobody may take it for a failure and go on."""


@contextmanager
def cleanup_on_sigterm() -> Generator[None]:
    """Let SIGTERM unwind the block, so that it cleans up, and only then end the process.

    Without effect in other threads than the main one, or when a caller has a handler of its own.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def handler(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _ToldToEndError

    signal.signal(signal.SIGTERM, handler)
    told = False
    try:
        yield
    except _ToldToEndError:
        told = True
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if told:
            signal.raise_signal(signal.SIGTERM)
