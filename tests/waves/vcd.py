"""A small VCD writer: waveforms as the chip's would look, from a cycle simulator's retire log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewright.spec.program import SEQ


def write_vcd(
    path: Path,
    signals: Mapping[str, tuple[int, Sequence[int]]],
    *,
    period: int = 2000,
    timescale: str = "1ps",
    lead: int = 3,
) -> Path:
    """Write signals, by full name `(width, value in each cycle)`.

    `lead` cycles of reset come first. Signals change at rising edges, `clk` is in every scope.
    """
    count = max(len(values) for _, values in signals.values())
    scopes: dict[str, list[str]] = {}
    for name in signals:
        scope, _, leaf = name.rpartition(".")
        scopes.setdefault(scope, []).append(leaf)
    identifiers = {name: f"s{number}" for number, name in enumerate(signals)}
    lines = [f"$timescale {timescale} $end"]
    for scope, leaves in scopes.items():
        parts = scope.split(".")
        lines += [f"$scope module {part} $end" for part in parts]
        for leaf, key in (("clk", "c"), ("run", "r"), ("rst", "x")):
            lines.append(f"$var wire 1 {key} {leaf} $end")
        for leaf in leaves:
            name = f"{scope}.{leaf}"
            width = signals[name][0]
            suffix = f" [{width - 1}:0]" if width > 1 else ""
            lines.append(f"$var wire {width} {identifiers[name]} {leaf}{suffix} $end")
        lines += ["$upscope $end"] * len(parts)
    lines.append("$enddefinitions $end")

    def value(width: int, number: int, key: str) -> str:
        return f"{number}{key}" if width == 1 else f"b{number:b} {key}"

    last: dict[str, int] = {}
    lines += ["#0", "0c", "0r", "1x"]
    for cycle in range(-lead, count + 1):
        edge = (cycle + lead) * period + period // 2
        lines += [f"#{edge}", "1c"]
        if cycle == 0:
            lines += ["1r", "0x"]
        for name, (width, values) in signals.items():
            number = values[cycle] if 0 <= cycle < len(values) else 0
            if last.get(name) != number:
                last[name] = number
                lines.append(value(width, number, identifiers[name]))
        lines += [f"#{edge + period // 2}", "0c"]
    path.write_text("\n".join(lines) + "\n", "ascii")
    return path


def log_signals(log: Any, scope: str = "TOP.tw_top") -> dict[str, tuple[int, list[int]]]:
    """Return the signals of a retire log (`sim.retire.RetireLog`)."""
    cycles = int(log.end.max()) + 2
    valid, engine = [0] * cycles, [0] * cycles
    start, done = [0] * cycles, [0] * cycles
    for number, issue, begin, end in zip(
        log.engine.tolist(), log.issue.tolist(), log.start.tolist(), log.end.tolist(), strict=True
    ):
        valid[issue], engine[issue] = 1, number
        if number != SEQ:
            start[begin] |= 1 << number
            done[end - 1] |= 1 << number
    return {
        f"{scope}.dispatch_valid": (1, valid),
        f"{scope}.dispatch_engine": (3, engine),
        f"{scope}.start": (6, start),
        f"{scope}.done": (6, done),
    }
