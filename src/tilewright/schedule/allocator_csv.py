"""Buffers as CSV: read with an answer for every bad line, written with their offsets."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tilewright.diagnostics import TilewrightError
from tilewright.schedule.allocator_model import MAX_BUFFERS, MAX_CAPACITY, Buffer, Problem, fault

NEEDED = ("id", "lower", "upper", "size")
OPTIONAL = ("alignment", "offset", "gaps", "regions", "apart")
MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class Table:
    """A CSV file and the buffers it tells of."""

    columns: list[str]
    rows: list[list[str]]
    buffers: tuple[Buffer, ...]
    apart: tuple[tuple[int, int], ...]

    def problem(self, capacity: int, bank_bytes: int) -> Problem:
        """Return the problem of placing the buffers."""
        return Problem(self.buffers, capacity, self.apart, bank_bytes)

    def write(self, path: Path, offsets: tuple[int, ...]) -> None:
        """Write the rows with the column `offset` filled in, or added as the last one."""
        columns = [name.strip() for name in self.columns]
        at = columns.index("offset") if "offset" in columns else len(columns)
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([*columns[:at], "offset", *columns[at + 1 :]])
            for row, offset in zip(self.rows, offsets, strict=True):
                writer.writerow([*row[:at], offset, *row[at + 1 :]])


def read_table(path: Path, capacity: int) -> Table:
    """Read a CSV of buffers.

    Raises:
        TilewrightError: E0701 the file cannot be read; E0401 a line is wrong, and which.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            _refuse(path, 0, f"the file has {size} bytes; at most {MAX_BYTES} are read")
        text = path.read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        raise TilewrightError("E0701", f"cannot read `{path}`", [str(error)]) from error
    reader = csv.reader(text.splitlines(), strict=True)
    try:
        lines = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except csv.Error as error:
        _refuse(path, reader.line_num, str(error))
    if not lines:
        _refuse(path, 1, "the file is empty", f"the first line names columns: {','.join(NEEDED)}")
    line, columns = lines[0]
    names = [name.strip() for name in columns]
    missing = [name for name in NEEDED if name not in names]
    if missing:
        _refuse(
            path, line, f"columns missing: {', '.join(missing)}",
            f"needed: {', '.join(NEEDED)}; optional: {', '.join(OPTIONAL)}",
        )  # fmt: skip
    if len(set(names)) < len(names):
        _refuse(path, line, "two columns have the same name")
    if len(lines) - 1 > MAX_BUFFERS:
        _refuse(path, lines[MAX_BUFFERS + 1][0], f"at most {MAX_BUFFERS} buffers can be placed")
    buffers: list[Buffer] = []
    first_line: dict[str, int] = {}
    for line, row in lines[1:]:
        if len(row) != len(names):
            _refuse(path, line, f"{len(row)} cells, but there are {len(names)} columns")
        cells = dict(zip(names, (cell.strip() for cell in row), strict=True))
        buffer = _buffer(path, line, cells)
        if buffer.name in first_line:
            _refuse(path, line, f"id `{buffer.name}` is already in line {first_line[buffer.name]}")
        first_line[buffer.name] = line
        problem = fault(buffer)
        if problem:
            _refuse(path, line, f"`{buffer.name}`: {problem}")
        if buffer.size > capacity:
            _refuse(path, line, f"`{buffer.name}`: size {buffer.size} is above the capacity")
        buffers.append(buffer)
    apart = _apart(path, lines[1:], names, {buffer.name: i for i, buffer in enumerate(buffers)})
    return Table(columns, [row for _, row in lines[1:]], tuple(buffers), apart)


def _buffer(path: Path, line: int, cells: dict[str, str]) -> Buffer:
    def integer(name: str, missing: int | None = None) -> int:
        text = cells.get(name, "")
        if not text and missing is not None:
            return missing
        if not re.fullmatch(r"-?[0-9]{1,25}", text):
            _refuse(path, line, f"{name} must be a whole number, not {text[:40]!r}")
        return int(text)

    def intervals(name: str) -> tuple[tuple[int, int], ...]:
        found: list[tuple[int, int]] = []
        for word in cells.get(name, "").split():
            match = re.fullmatch(r"(-?[0-9]{1,25})-(-?[0-9]{1,25})", word)
            if not match:
                _refuse(path, line, f"{name} must be FIRST-END pairs, not {word[:40]!r}")
            found.append((int(match[1]), int(match[2])))
        return tuple(found)

    name = cells["id"]
    if not name:
        _refuse(path, line, "the id is empty")
    if integer("lower") < 0:
        _refuse(path, line, f"lower must not be negative, but is {integer('lower')}")
    return Buffer(
        name,
        integer("lower"),
        integer("upper"),
        integer("size"),
        integer("alignment", 1),
        integer("offset") if cells.get("offset") else None,
        intervals("gaps"),
        intervals("regions") or None,
    )


def _apart(
    path: Path, lines: list[tuple[int, list[str]]], names: list[str], index: dict[str, int]
) -> tuple[tuple[int, int], ...]:
    if "apart" not in names:
        return ()
    at = names.index("apart")
    found: set[tuple[int, int]] = set()
    for i, (line, row) in enumerate(lines):
        for word in row[at].split():
            j = index.get(word)
            if j is None or j == i:
                _refuse(path, line, f"apart must name ids of other lines, not {word[:40]!r}")
            found.add((min(i, j), max(i, j)))
    return tuple(sorted(found))


def _refuse(path: Path, line: int, problem: str, hint: str | None = None) -> NoReturn:
    where = f"`{path}`, line {line}" if line else f"`{path}`"
    raise TilewrightError("E0401", f"{where}: {problem}", hint=hint)


__all__ = ["MAX_CAPACITY", "NEEDED", "OPTIONAL", "Table", "read_table"]
