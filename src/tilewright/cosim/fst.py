"""Whether an FST file is whole, by its sections; its writer does not say when the disk is full."""

from __future__ import annotations

import struct
from pathlib import Path

HEADER, UNFINISHED = 0, 255
HEADER_LENGTH = 329
GEOMETRY = (3,)
HIERARCHY = (4, 6, 7)
CHANGES = (1, 5, 8)
"""Tags of the sections; the several of a kind are ways to compress it."""
END_TIME = 17
"""Where the header has it."""
_length = struct.Struct(">Q")


def fst_problem(path: Path, *, empty: bool) -> str:
    """Return what is wrong with a file that was just written; empty when it is whole.

    Args:
        path: the file.
        empty: whether no cycle was to be traced.
    """
    tags: list[int] = []
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(HEADER_LENGTH + 1)
            at = 0
            while at < size:
                file.seek(at)
                start = file.read(1 + _length.size)
                if len(start) < 1 + _length.size:
                    return f"it is cut after {size} bytes"
                (length,) = _length.unpack_from(start, 1)
                tags.append(start[0])
                if length < _length.size or start[0] == UNFINISHED:
                    return f"its section at byte {at} was not finished"
                at += 1 + length
    except OSError as error:
        return error.strerror or str(error)
    if at != size or len(header) <= HEADER_LENGTH or tags[0] != HEADER:
        return f"it is cut after {size} bytes"
    kinds = (GEOMETRY, HIERARCHY) if empty else (GEOMETRY, HIERARCHY, CHANGES)
    if not all(any(tag in kind for tag in tags) for kind in kinds):
        return "it lacks a section"
    (end,) = _length.unpack_from(header, END_TIME)
    return "" if end or empty else "it has no time at which it ends"
