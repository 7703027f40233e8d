"""The retire log as a trace for https://ui.perfetto.dev (JSON trace events).

One track an engine; its slices never overlap, because an engine executes one instruction at a time.
A counter track shows DDR bandwidth. Times are simulated.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from tilewright.sim.retire import CycleResult
from tilewright.spec.hardware import Hardware
from tilewright.spec.program import ENGINE_NAMES, SEQ

PROCESS = 1


def trace_events(result: CycleResult, hardware: Hardware) -> list[dict[str, Any]]:
    """Return the events of a run; times in microseconds of the core clock."""
    clock = hardware.core_clock_mhz
    events: list[dict[str, Any]] = [
        {
            "ph": "M",
            "name": "process_name",
            "pid": PROCESS,
            "args": {"name": f"{hardware.name} (simulated)"},
        }
    ]
    log = result.log
    for engine in sorted(set(log.engine.tolist()) - {SEQ}):
        events.append(
            {
                "ph": "M",
                "name": "thread_name",
                "pid": PROCESS,
                "tid": engine + 1,
                "args": {"name": ENGINE_NAMES[engine]},
            }
        )
    columns = zip(
        log.names,
        log.layers,
        log.index.tolist(),
        log.engine.tolist(),
        log.issue.tolist(),
        log.start.tolist(),
        log.end.tolist(),
        strict=True,
    )
    for name, layer, index, engine, issue, start, end in columns:
        if engine == SEQ:
            continue
        events.append(
            {
                "ph": "X",
                "name": f"{layer} {name}" if layer else name,
                "cat": name,
                "pid": PROCESS,
                "tid": engine + 1,
                "ts": start / clock,
                "dur": (end - start) / clock,
                "args": {"index": index, "layer": layer, "issue_cycle": issue, "cycle": start},
            }
        )
    times = np.round(result.ddr_time / clock, 6).tolist()
    for time, rate in zip(times, result.ddr_rate.tolist(), strict=True):
        events.append(
            {
                "ph": "C",
                "name": "DDR bandwidth (GB/s)",
                "pid": PROCESS,
                "ts": time,
                "args": {"GB/s": round(rate * clock / 1000, 4)},
            }
        )
    return events


def trace_json(result: CycleResult, hardware: Hardware) -> str:
    """Return the trace file's text."""
    content = {"traceEvents": trace_events(result, hardware), "displayTimeUnit": "ns"}
    return json.dumps(content, separators=(",", ":"))
