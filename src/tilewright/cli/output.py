"""Printing data: tables in plain text, JSON, numbers with units."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def print_json(content: Any) -> None:
    """Print JSON on stdout."""
    print(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> str:
    """Return an aligned text table; `right` has an `r` at each right-aligned column."""
    widths = [max(len(str(row[i])) for row in (heads, *rows)) for i in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(
            str(cell).rjust(width) if right[i : i + 1] == "r" else str(cell).ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()

    return "\n".join([line(heads), line(["-" * width for width in widths]), *map(line, rows)])


def size(count: float) -> str:
    """Return bytes with a binary unit: `1.50 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def number(count: float) -> str:
    """Return a count with thin grouping: `1,234,567`."""
    return f"{count:,.0f}"
