"""Printing data on stdout."""

from __future__ import annotations

import json
from typing import Any

from tilewright.report.text import size, table

__all__ = ["number", "print_json", "size", "table"]


def print_json(content: Any) -> None:
    """Print JSON on stdout; values that are not finite become strings, which JSON can hold."""
    print(json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value


def number(count: float) -> str:
    """Return a count with grouped digits: `1,234,567`."""
    return f"{count:,.0f}"
