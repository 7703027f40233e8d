"""The sweep itself: workers, the cache of results, and the Pareto front of what came out."""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewright.diagnostics import TilewrightError
from tilewright.spec.hardware import Hardware
from tilewright.tune.area import Parts, Weights, area, parts_of
from tilewright.tune.evaluate import Result, Task, evaluate, ignore_interrupts
from tilewright.tune.prepare import Calibration, Prepared, code_digest, prepare
from tilewright.tune.space import Illegal, Point, Space, chip_digest, describe

Tell = Callable[[str], None]

IN_PROCESS = 1
"""So many jobs need no processes of their own."""


@dataclass(frozen=True)
class Row:
    """A chip with what it costs and what it does."""

    point: Point
    parts: Parts
    area: float
    """Weighted parts (`area.Weights`)."""
    results: dict[str, Result]
    """By model."""
    front: bool = False
    """No chip of the sweep is smaller and at least as fast, or faster and not larger."""

    @property
    def failed(self) -> list[str]:
        """Models that this chip does not run, with the error."""
        return [f"{name}: {item.error}" for name, item in self.results.items() if item.error]

    @property
    def milliseconds(self) -> float:
        """Geometric mean over the models; 0 if one failed."""
        return self._mean([item.milliseconds for item in self.results.values()])

    @property
    def ratio(self) -> float:
        """Geometric mean of cycles over bound; 0 if a model failed."""
        return self._mean([item.ratio for item in self.results.values()])

    def _mean(self, values: Sequence[float]) -> float:
        if self.failed or not values:
            return 0.0
        return math.exp(sum(math.log(value) for value in values) / len(values))

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "settings": self.point.settings,
            "derived": self.point.derived,
            "parts": self.parts.to_json(),
            "area": self.area,
            "milliseconds": self.milliseconds or None,
            "ratio": self.ratio or None,
            "front": self.front,
            "results": {name: item.to_json() for name, item in self.results.items()},
        }


@dataclass
class Sweep:
    """All that came out."""

    target: str
    models: list[str]
    weights: Weights
    rows: list[Row]
    illegal: list[Illegal]
    known: int = 0
    """Results that were in the cache."""
    faults: list[str] = field(default_factory=list[str])
    """What went wrong inside tilewright; such results are not cached."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values: the same for the same sweep, cached or not."""
        return {
            "target": self.target,
            "models": self.models,
            "area_weights": self.weights.to_json(),
            "points": [row.to_json() for row in self.rows],
            "illegal": [
                {"settings": item.settings, "reasons": item.reasons} for item in self.illegal
            ],
        }


def run_sweep(
    models: Sequence[str],
    base: Hardware,
    space: Space,
    *,
    cache: Path,
    jobs: int = 2,
    weights: Weights | None = None,
    calibration: Calibration | None = None,
    tell: Tell | None = None,
) -> Sweep:
    """Compile and simulate every model on every chip.

    Args:
        models: ONNX files or `zoo:NAME`.
        base: the target that is varied.
        space: its variants.
        cache: folder of quantised models and results; results of an earlier, interrupted sweep in
            it are used.
        jobs: processes; with 1 everything runs in this one.
        weights: of the area proxy.
        calibration: where ranges come from.
        tell: called with a line for each step.

    Raises:
        TilewrightError: a model cannot be used; the cache cannot be written.
    """
    tell = tell or (lambda line: None)
    code, calibration = code_digest(), calibration or Calibration()
    prepared: list[Prepared] = []
    for model in models:
        start = time.monotonic()
        prepared.append(prepare(model, base, calibration, cache / "models", code))
        tell(f"{model}: quantised ({time.monotonic() - start:.1f} s)")
    store = _Store(cache / "results")
    cells = [(point, model) for point in space.points for model in prepared]
    keys = {(id(point), model.name): _key(point, model) for point, model in cells}
    results: dict[tuple[int, str], Result] = {}
    todo: list[tuple[Point, Prepared]] = []
    for point, model in cells:
        found = store.get(keys[id(point), model.name])
        if found is None:
            todo.append((point, model))
        else:
            results[id(point), model.name] = found
    sweep = Sweep(base.name, list(models), weights or Weights(), [], space.illegal, len(results))
    if results:
        tell(f"{len(results)} of {len(cells)} results are known")
    for done, (at, outcome, seconds) in enumerate(_outcomes(todo, jobs), start=1):
        point, model = todo[at]
        what = f"{model.name} {describe(point.settings)}".rstrip()
        if isinstance(outcome, Result):
            store.put(keys[id(point), model.name], outcome)
            text = outcome.error or f"{outcome.cycles:,} cycles"
        else:
            text = f"fault of tilewright: {type(outcome).__name__}: {outcome}"
            sweep.faults.append(f"{what}: {text}")
            outcome = Result(error=text)
        results[id(point), model.name] = outcome
        tell(f"[{done}/{len(todo)}] {what}: {text} ({seconds:.1f} s)")
    rows: list[Row] = []
    for point in space.points:
        parts = parts_of(point.hardware)
        of_models = {model.name: results[id(point), model.name] for model in prepared}
        rows.append(Row(point, parts, area(parts, sweep.weights), of_models))
    sweep.rows = mark_front(rows)
    return sweep


def _key(point: Point, model: Prepared) -> str:
    # The model's key covers the code.
    return hashlib.sha3_256(f"{model.key} {chip_digest(point.hardware)}".encode()).hexdigest()[:32]


def _outcomes(
    todo: Sequence[tuple[Point, Prepared]], jobs: int
) -> Iterator[tuple[int, Result | BaseException, float]]:
    """Yield (index, result or what was raised, seconds) as they are done."""
    tasks = [Task(model.name, model.path, point.hardware) for point, model in todo]
    if jobs == IN_PROCESS:
        for at, task in enumerate(tasks):
            start = time.monotonic()
            yield at, evaluate(task), time.monotonic() - start
        return
    begun: dict[Future[Result], tuple[int, float]] = {}
    waiting = iter(enumerate(tasks))
    pool = _pool(jobs)
    try:
        while True:
            # As many as there are workers: what is interrupted then is little.
            while len(begun) < jobs and (item := next(waiting, None)) is not None:
                begun[pool.submit(evaluate, item[1])] = (item[0], time.monotonic())
            if not begun:
                return
            done = wait(begun, return_when=FIRST_COMPLETED).done
            broken = any(isinstance(future.exception(), BrokenProcessPool) for future in done)
            if broken:
                # A worker died, of too little memory perhaps: what ran then is lost with it.
                done = wait(begun).done
                pool.shutdown()
                pool = _pool(jobs)
            for future in done:
                at, start = begun.pop(future)
                error = future.exception()
                yield at, error or future.result(), time.monotonic() - start
    finally:
        pool.shutdown(cancel_futures=True)


def _pool(jobs: int) -> ProcessPoolExecutor:
    # Processes are started anew: a fork would copy the locks of numba's and BLAS' threads.
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), ignore_interrupts)


def mark_front(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, those marked that no other is better than in area and time."""
    able = [row for row in rows if row.milliseconds]

    def beaten(row: Row) -> bool:
        return any(
            other.area <= row.area
            and other.milliseconds <= row.milliseconds
            and (other.area < row.area or other.milliseconds < row.milliseconds)
            for other in able
        )

    return [
        Row(row.point, row.parts, row.area, row.results, bool(row.milliseconds) and not beaten(row))
        for row in rows
    ]


class _Store:
    """Results in files of their own, named by what they were made from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TilewrightError("E0701", f"cannot write `{folder}`", [str(error)]) from error

    def get(self, key: str) -> Result | None:
        """Return a result kept before, or None; a damaged file counts as none."""
        try:
            content: Any = json.loads((self.folder / f"{key}.json").read_text("utf-8"))
            return Result(**content)
        except (OSError, ValueError, TypeError):
            return None

    def put(self, key: str, result: Result) -> None:
        from tilewright.codegen.files import atomic_output

        with atomic_output(self.folder / f"{key}.json") as scratch:
            scratch.write_text(json.dumps(result.to_json()) + "\n", "utf-8")
