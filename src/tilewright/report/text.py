"""The report on a terminal: a summary of at most twenty lines, and the layer table."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.report.report import Report


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
            f"  bound      {report.bound:,.0f} cycles by {report.limit} (estimated); "
            f"{report.ratio:.2f} x bound",
            f"  array      {report.array_use:.1%} of {report.array_size}x{report.array_size} "
            f"used over {_macs(report.macs)} MACs (simulated)",
            f"  DDR        {size(report.ddr_bytes)} moved (simulated), least "
            f"{size(report.min_ddr_bytes)} (estimated)",
            f"  waiting    {_waiting(report)}",
        ]
    lines += [
        f"  SRAM       {size(report.sram_peak)} of {size(report.sram_size)} at most (allocated)",
        f"  DDR holds  {size(report.constants_bytes)} constants, "
        f"{size(report.workspace_bytes)} workspace (allocated)",
    ]
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


def layer_table(report: Report, limit: int | None = None) -> str:
    """Return the layers, slowest first when `limit` cuts the list."""
    rows = report.layers
    if limit is not None:
        rows = sorted(rows, key=lambda row: -row.cycles)[:limit]
    heads = ("layer", "op", "cycles", "share", "x bound", "limit", "DDR", "SRAM")
    return table(
        heads,
        [
            (
                row.name + (f" (+{len(row.fused)})" if row.fused else ""),
                row.op.split(".")[-1],
                f"{row.cycles:,}" if row.device == "tpu" else "host",
                f"{row.cycles / report.cycles:.1%}" if report.cycles else "",
                f"{row.cycles / row.bound_cycles:.2f}" if row.bound_cycles and row.cycles else "",
                row.limit if row.bound_cycles else "",
                size(row.ddr_bytes),
                size(row.sram_bytes),
            )
            for row in rows
        ],
        "llrrrlrr",
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> str:
    """Return an aligned text table; columns marked `r` in `right` are right-aligned."""
    widths = [max(len(str(row[i])) for row in (heads, *rows)) for i in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(
            str(cell).rjust(width) if right[i : i + 1] == "r" else str(cell).ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()

    return "\n".join([line(heads), line(["-" * width for width in widths]), *map(line, rows)])
