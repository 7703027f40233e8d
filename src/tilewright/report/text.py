"""The report on a terminal: a summary of at most twenty lines, and the layer table."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.report.limits import SLOW, share
from tilewright.report.report import LayerRow, Report, StepRow, in_words


def size(count: float) -> str:
    """Return bytes with a binary unit: `1.50 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def _macs(count: int) -> str:
    """Return a number of multiply-accumulates, in millions when there are that many."""
    return f"{count / 1e6:,.1f} M" if count >= 1_000_000 else f"{count:,}"


def summary(report: Report) -> list[str]:
    """Return the closing summary; every figure says whether it is simulated or estimated."""
    lines = [f"{report.model} on {report.target}"]
    if not report.cycles:
        lines.append("everything runs on the host; nothing to simulate")
    else:
        lines += [
            f"  time       {report.cycles:,} cycles, {report.milliseconds:.3f} ms at "
            f"{report.clock_mhz} MHz (simulated)",
            f"  roofline   {report.bound:,.0f} cycles by {report.limit} (estimated); "
            f"{report.ratio:.2f} x bound",
            f"  parts      array {report.array_bound:,.0f}, vector {report.vector_bound:,.0f}, DDR "
            f"{report.ddr_bound:,.0f}, order {report.order_bound:,.0f} cycles (estimated)",
            f"  padded     {report.padded:,.0f} cycles with one pixel a pass (estimated); "
            f"{report.cycles / max(report.padded, 1):.2f} x",
            f"  floor      {report.floor:,.0f} cycles by {in_words(report.floor_by)} for any "
            "program (estimated)",
            f"  array      {report.array_use:.1%} of {report.array_size}x{report.array_size} "
            f"used over {_macs(report.macs)} MACs (simulated)",
            f"  DDR        {size(report.ddr_bytes)} moved (simulated), least "
            f"{size(report.min_ddr_bytes)} (estimated)",
            f"  waiting    {_waiting(report)}",
        ]
        if report.limited.what:
            lines.append(f"  limited    by {_limits(report)} (simulated)")
    lines += [
        f"  SRAM       {size(report.sram_peak)} of {size(report.sram_size)} at most (allocated)",
        f"  DDR holds  {size(report.constants_bytes)} constants, "
        f"{size(report.workspace_bytes)} workspace (allocated)",
    ]
    if report.half_bytes:
        lines.append(
            f"  4 bits     {size(report.half_bytes)} of weights, {size(report.padding_bytes)} "
            f"({report.padding_bytes / report.half_bytes:.1%}) of it alignment (allocated)"
        )
    on_host = sum(len(step["layers"]) for step in report.host)
    if on_host:
        reasons = "; ".join(dict.fromkeys(str(step["reason"]) for step in report.host))
        reasons = reasons if len(reasons) <= 60 else reasons[:57] + "..."
        read, written = (
            size(sum(step[key] for step in report.host)) for key in ("read_bytes", "write_bytes")
        )
        lines.append(
            f"  host       {on_host} layer{'s' * (on_host != 1)}, reads {read}, writes {written}, "
            f"not timed: {reasons}"
        )
    lines += [f"  {row.name:<10} {row.value} ({row.over})" for row in report.accuracy[:6]]
    return lines


def _waiting(report: Report) -> str:
    """Say how much of the time the array does not work, and what it then waits for."""
    mac = report.engines.get("mac")
    if not mac:
        return "the array is not used"
    idle = {
        "semaphores": mac.get("wait_semaphore", 0),
        "the vector unit": mac.get("wait_accumulator", 0),
        "a bank": mac.get("wait_bank", 0),
        "work": mac.get("idle", 0),
    }
    parts = [
        f"{count / report.cycles:.0%} for {what}"
        for what, count in sorted(idle.items(), key=lambda item: -item[1])
        if count / report.cycles >= 0.005
    ]
    busy = mac.get("busy", 0) / report.cycles
    return f"array busy {busy:.0%}, waits {', '.join(parts) or 'never'} (simulated)"


def _limits(report: Report) -> str:
    """Say what limits the network, and how many layers are slow, and why."""
    counts: dict[str, int] = {}
    for row in report.slow:
        counts[row.limited.what] = counts.get(row.limited.what, 0) + 1
    reasons = ", ".join(
        f"{name} {count}" for name, count in sorted(counts.items(), key=lambda pair: -pair[1])
    )
    on_chip = sum(row.device == "tpu" for row in report.layers)
    return f"{report.limited.what}; {len(report.slow)} of {on_chip} layers above {SLOW} x bound" + (
        f": {reasons}" if reasons else ""
    )


def _ratio(row: LayerRow | StepRow) -> str:
    return f"{row.ratio:.2f}" if row.ratio else ""


def layer_table(report: Report, limit: int | None = None) -> str:
    """Return the layers, slowest first when `limit` cuts the list."""
    rows = report.layers
    if limit is not None:
        rows = sorted(rows, key=lambda row: -row.cycles)[:limit]
    heads = ("layer", "op", "cycles", "share", "x bound", "bound by", "limited by", "DDR", "SRAM")
    return table(
        heads,
        [
            (
                row.name + (f" (+{len(row.fused)})" if row.fused else ""),
                row.op.split(".")[-1],
                f"{row.cycles:,}" if row.device == "tpu" else "host",
                f"{row.cycles / report.cycles:.1%}" if report.cycles else "",
                _ratio(row),
                row.limit if row.bound_cycles else "",
                row.limited.what,
                size(row.ddr_bytes),
                size(row.sram_bytes),
            )
            for row in rows
        ],
        "llrrrllrr",
    )


def step_table(report: Report) -> str:
    """Return the steps of the plan, in order: layers by themselves, and cascades."""
    return table(
        ("step", "layers", "cycles", "bound", "x bound", "bound by", "limited by", "DDR", "SRAM"),
        [
            (
                str(at),
                _joined(row.layers),
                f"{row.cycles:,}",
                f"{row.bound_cycles:,.0f}",
                _ratio(row),
                row.limit if row.bound_cycles else "",
                row.limited.what,
                size(row.ddr_bytes),
                size(row.sram_bytes),
            )
            for at, row in enumerate(report.steps)
        ],
        "rlrrrllrr",
    )


def _joined(names: Sequence[str]) -> str:
    """Return the layers of a step in a few words."""
    if len(names) == 1:
        return names[0]
    return f"{names[0]} .. {names[-1]} ({len(names)})"


SPAN_COLUMNS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("array", "mac", ("busy",)),
    ("alone", "mac", ("single",)),
    ("load", "mac", ("wait_load",)),
    ("store", "mac", ("wait_store",)),
    ("others", "mac", ("wait_compute", "wait_accumulator")),
    ("bank", "mac", ("wait_bank",)),
    ("vector", "vec", ("busy",)),
    ("alone", "vec", ("single",)),
    ("load", "vec", ("wait_load",)),
    ("store", "vec", ("wait_store",)),
    ("others", "vec", ("wait_compute", "wait_accumulator")),
    ("bank", "vec", ("wait_bank",)),
    ("DMA", "dma", ("busy",)),
    ("alone", "dma", ("single",)),
    ("DDR", "dma", ("wait_ddr",)),
    ("bank", "dma", ("wait_bank",)),
)
"""Columns of the table of spans: title, engine, parts that are added up."""


def span_cells(row: LayerRow) -> list[str]:
    """Return the columns of a layer's span, as shares of it; empty where the engine has no work."""
    spans = row.spans

    def cell(engine: str, parts: tuple[str, ...]) -> str:
        if not any(name.startswith(engine) for name in spans.engines):
            return ""
        return f"{sum(share(spans.engines, engine, part, spans.cycles) for part in parts):.0%}"

    return [cell(engine, parts) for _, engine, parts in SPAN_COLUMNS]


def span_table(report: Report, limit: int | None = None) -> str:
    """Return where each layer's span goes: what array, vector unit and DMA do in it."""
    rows = [row for row in report.layers if row.spans.cycles]
    if limit is not None:
        rows = sorted(rows, key=lambda row: -row.cycles)[:limit]
    heads = ("layer", "span", *(title for title, _, _ in SPAN_COLUMNS))
    cells = [(row.name, f"{row.spans.cycles:,}", *span_cells(row)) for row in rows]
    return table(heads, cells, "l" + "r" * (len(heads) - 1))


def slow_layers(report: Report) -> list[str]:
    """Return a line for each layer above `SLOW` times its bound: what limits it, and why."""
    rows = report.slow
    if not rows:
        return []
    spent = sum(row.cycles for row in rows) / report.cycles
    lines = [f"layers above {SLOW} x their bound ({spent:.0%} of the time):"]
    cells = [
        (
            f"  {row.name}",
            f"{row.cycles:,}",
            f"{row.ratio:.2f} x" if row.ratio else "no bound",
            row.limited.what,
            row.limited.why,
        )
        for row in rows
    ]
    return [
        *lines,
        *table(("  layer", "cycles", "bound", "limit", "why"), cells, "lrrll").split("\n"),
    ]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> str:
    """Return an aligned text table; columns marked `r` in `right` are right-aligned."""
    widths = [max(len(str(row[i])) for row in (heads, *rows)) for i in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(
            str(cell).rjust(width) if right[i : i + 1] == "r" else str(cell).ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()

    return "\n".join([line(heads), line(["-" * width for width in widths]), *map(line, rows)])
