"""Signals of a VCD or FST file, sampled once a clock cycle.

A registered signal changes right after the clock's rising edge, a combinational one some time
later. What a signal *is* in a cycle is therefore its value just before the edge that ends the
cycle.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import TilewrightError

I64 = npt.NDArray[np.int64]
FEMTO = -15
TOP = "tw_top"
"""Name of the scope that is preferred where several have the signals asked for."""


@dataclass(frozen=True)
class Changes:
    """A signal: from `times[i]` on it has `values[i]`, None where a bit is unknown."""

    width: int
    times: I64
    values: list[int | None]

    def at(self, times: I64) -> list[int | None]:
        """Return the values just before each of `times`."""
        places = np.searchsorted(self.times, times, side="left") - 1
        return [None if place < 0 else self.values[place] for place in places.tolist()]


@dataclass(frozen=True)
class Sampled:
    """Signals of one scope, one value a clock cycle; cycle 0 is the first in which `run` is high.

    Unknown bits make a whole value 0: before reset nothing counts.
    """

    scope: str
    signals: dict[str, list[int]]
    widths: dict[str, int]
    clock_fs: int
    """Clock period in femtoseconds: the median of all."""
    edges: I64
    """Time of the edge that ends each cycle, in femtoseconds."""

    @property
    def cycles(self) -> int:
        """Cycles seen."""
        return len(self.edges)


def _library() -> Any:
    try:
        import pywellen
    except ImportError as error:
        raise TilewrightError(
            "E0703", "reading waveforms needs the library `pywellen`", [],
            "install it by `pip install tilewright[rtl]`",
        ) from error  # fmt: skip
    return pywellen


def _unreadable(path: Path, error: BaseException) -> TilewrightError:
    return TilewrightError(
        "E0701",
        f"the waveform `{path}` cannot be read",
        [line for line in str(error).splitlines() if line.strip()][:3],
        "VCD and FST files are understood",
    )


def _is_panic(error: BaseException) -> bool:
    """Tell whether the library gave up on a file: its panics are no `Exception`s."""
    return isinstance(error, RuntimeError) or type(error).__name__ == "PanicException"


_quiet = threading.RLock()


@contextmanager
def library_call(path: Path) -> Generator[None]:
    """Make an error of the library one of ours, without what it prints on stderr beforehand.

    The library is not written in Python: it writes to the file descriptor. What others write there
    meanwhile is held back, and is lost only with the library's own text.

    Raises:
        TilewrightError: E0701, the library gave up on the file.
    """
    with _quiet, tempfile.TemporaryFile() as held:
        try:
            kept = os.dup(2)
        except OSError:
            kept = -1  # there is no stderr
        lost = False
        try:
            if kept >= 0:
                os.dup2(held.fileno(), 2)
            yield
        except BaseException as error:
            if not _is_panic(error):
                raise
            lost = True
            raise _unreadable(path, error) from error
        finally:
            if kept >= 0:
                os.dup2(kept, 2)
                os.close(kept)
                _write_back(b"" if lost else _content(held.fileno()))


def _content(descriptor: int) -> bytes:
    os.lseek(descriptor, 0, os.SEEK_SET)
    return b"".join(iter(lambda: os.read(descriptor, 1 << 16), b""))


def _write_back(text: bytes) -> None:
    while text:
        try:
            text = text[os.write(2, text) :]
        except OSError:
            return  # nobody reads it


class Waveform:
    """An opened waveform file.

    Only the hierarchy is held; signals are streamed from the file when they are asked for.
    """

    def __init__(self, path: Path | str) -> None:
        """Open a file.

        Raises:
            TilewrightError: E0701 it cannot be read, E0703 the library is missing.
        """
        self.path = Path(path)
        stream = self._open()
        with library_call(self.path):
            variables = list(stream.all_vars())
            scale = stream.timescale
            names = [variable.full_name for variable in variables]
        exponent = scale.unit.to_exponent() if scale is not None else -12
        factor = scale.factor if scale is not None else 1
        if exponent is None or exponent < FEMTO:
            raise TilewrightError("E0701", f"the waveform `{path}` has no usable time scale")
        self.tick_fs = int(factor) * 10 ** (int(exponent) - FEMTO)
        """Femtoseconds of a step of time."""
        self._scopes: dict[str, set[str]] = {}
        for name in names:
            scope, _, leaf = name.rpartition(".")
            self._scopes.setdefault(scope, set()).add(leaf)

    def _open(self) -> Any:
        library = _library()
        if not self.path.is_file():
            raise TilewrightError("E0701", f"there is no waveform `{self.path}`")
        with library_call(self.path):
            return library.WaveformStream(str(self.path), multi_threaded=False)

    def scopes(self, names: Collection[str], prefix: str = "") -> list[str]:
        """Return the scopes that hold all of `names`, best first.

        `prefix` limits the search to a scope and those in it.
        """
        found = [
            scope
            for scope, leaves in self._scopes.items()
            if (not prefix or scope == prefix or scope.startswith(prefix + "."))
            and leaves.issuperset(names)
        ]
        return sorted(found, key=lambda s: (s.rpartition(".")[2] != TOP, s.count("."), s))

    def scope_with(self, names: Collection[str], prefix: str = "") -> str:
        """Return the scope that holds all of `names`.

        Raises:
            TilewrightError: E0603 there is none, or two of the same rank.
        """
        found = self.scopes(names, prefix)
        where = f" in scope `{prefix}`" if prefix else ""
        if not found:
            near = max(
                self._scopes.values(), key=lambda leaves: len(leaves & set(names)), default=()
            )
            missing = [name for name in names if name not in near]
            raise TilewrightError(
                "E0603",
                f"`{self.path}` shows no scope with the log of the chip{where}",
                [f"signals needed: {', '.join(names)}", f"not found: {', '.join(missing)}"],
                "trace the signals of `tw_top`, or give another scope",
            )
        if len(found) > 1:
            ranks = [(s.rpartition(".")[2] != TOP, s.count(".")) for s in found[:2]]
            if ranks[0] == ranks[1]:
                raise TilewrightError(
                    "E0603",
                    f"`{self.path}` has several scopes with the log of the chip{where}",
                    found[:8],
                    "name one of them",
                )
        return found[0]

    def has(self, scope: str, name: str) -> bool:
        """Return whether there is a signal `name` in a scope."""
        return name in self._scopes.get(scope, ())

    def changes(self, names: Iterable[str]) -> dict[str, Changes]:
        """Read signals by full name.

        Raises:
            TilewrightError: E0701, the file is damaged.
        """
        wanted = set(names)
        stream = self._open()
        chosen: dict[str, Any] = {}
        times: dict[str, list[int]] = {}
        values: dict[str, list[int | None]] = {}

        def note(time: int, key: Any, value: int | str | float) -> None:
            at = str(key)
            times[at].append(time)
            values[at].append(value if isinstance(value, int) else None)

        with library_call(self.path):
            for variable in stream.all_vars():
                if variable.full_name in wanted:
                    chosen.setdefault(variable.full_name, variable)
            for variable in chosen.values():
                times[str(variable.signal_id)] = []
                values[str(variable.signal_id)] = []
            stream.stream_changes(note, list(chosen.values()))
        found: dict[str, Changes] = {}
        for name, variable in chosen.items():
            key = str(variable.signal_id)
            width = variable.bitwidth
            found[name] = Changes(
                int(width or 1), np.array(times[key], np.int64), list(values[key])
            )
        return found

    def sample(self, places: Mapping[str, str], scope: str) -> Sampled:
        """Sample signals at the rising edges of `clk` of a scope.

        Args:
            places: full names of signals by what they are called in the result.
            scope: scope of `clk`, and of `run` and `rst` where they are traced.

        Raises:
            TilewrightError: E0603 without a running clock or when the chip never runs; E0701.
        """
        extra = {key: f"{scope}.{key}" for key in ("clk", "run", "rst") if self.has(scope, key)}
        found = self.changes({*places.values(), *extra.values()})
        clock = found.get(f"{scope}.clk")
        edges = _rising(clock) if clock is not None else np.zeros(0, np.int64)
        if len(edges) < 2:
            raise TilewrightError(
                "E0603",
                f"`{self.path}` shows no clock `{scope}.clk`",
                [f"its rising edges: {len(edges)}"],
                "trace `clk` at both edges",
            )
        period = int(np.median(np.diff(edges)))
        first = self._first_cycle(found, scope, edges)
        edges = edges[first:]
        sampled: dict[str, list[int]] = {}
        for key, name in places.items():
            sampled[key] = [value or 0 for value in found[name].at(edges)]
        widths = {key: found[name].width for key, name in places.items()}
        return Sampled(scope, sampled, widths, period * self.tick_fs, edges * self.tick_fs)

    def _first_cycle(self, found: Mapping[str, Changes], scope: str, edges: I64) -> int:
        ready = np.ones(len(edges), np.bool_)
        for key, level in (("run", 1), ("rst", 0)):
            signal = found.get(f"{scope}.{key}")
            if signal is not None:
                ready &= np.array([value == level for value in signal.at(edges)], np.bool_)
        if not ready.any():
            raise TilewrightError(
                "E0603", f"`{self.path}` never shows the chip running",
                [f"`{scope}.run` is never high while `rst` is low"],
            )  # fmt: skip
        return int(np.argmax(ready))


def _rising(clock: Changes) -> I64:
    last: int | None = None
    edges: list[int] = []
    for time, value in zip(clock.times.tolist(), clock.values, strict=True):
        if value == 1 and last == 0:
            edges.append(time)
        last = value
    return np.array(edges, np.int64)
