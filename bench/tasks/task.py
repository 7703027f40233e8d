"""What a task is: a model, inputs to calibrate on and to judge by, and how results are judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Feed = dict[str, Any]
"""Arrays by the name of an input or output."""
Run = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""One run of a model."""


@dataclass
class Task:
    """A model with inputs and a judge."""

    name: str
    """Of the zoo's model."""
    model: Path
    shapes: dict[str, tuple[int, ...]]
    calibration: list[Feed]
    evaluation: list[Feed]
    metric: str
    """What `score` is called."""
    score: Callable[[Sequence[Feed]], float]
    """From the outputs for `evaluation`."""
    signal: Callable[[int, Feed], Any]
    """From place and outputs of one evaluation to the array that noise is measured on."""
    agree: bool = True
    """Whether the largest elements of `signal` are a decision that may agree with float's."""
    carry: dict[str, str] = field(default_factory=dict[str, str])
    """Inputs that take the output of this name of the run before, where a feed has none."""
    transformer: bool = False
    remark: str = ""


def evaluate(run: Run, feeds: Sequence[Feed], carry: Mapping[str, str]) -> list[Feed]:
    """Return the outputs for every feed, in order, with what is carried from run to run."""
    results: list[Feed] = []
    for feed in feeds:
        inputs = dict(feed)
        for name, source in carry.items():
            if name not in inputs:
                inputs[name] = results[-1][source]
        results.append(dict(run(inputs)))
    return results
