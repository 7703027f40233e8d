"""The built RTL as a file: sealed with a digest, checked before it is loaded.

The system's loader trusts what it maps: a library that was cut ends the process with SIGBUS. So a
library carries its length and digest behind its last byte, where loaders do not look. In one file
they cannot come apart, and a rename makes both appear at once.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from tilewright.diagnostics import TilewrightError

MAGIC = b"tw-rtl-1"
SEAL = struct.Struct("<8sQ32s")

_pointer, _number, _word = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32
_status = ctypes.c_int32
SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "tw_create": (_pointer, ()),
    "tw_destroy": (None, (_pointer,)),
    "tw_load": (
        _status,
        (_pointer, _pointer, _number, _pointer, _word, _pointer, _number, ctypes.c_uint8),
    ),
    "tw_trace": (_status, (_pointer, ctypes.c_char_p, _number, _number, _number)),
    "tw_trace_end": (_status, (_pointer,)),
    "tw_run": (_status, (_pointer, _number, _number)),
    "tw_message": (ctypes.c_char_p, (_pointer,)),
    "tw_cycle": (_number, (_pointer,)),
    "tw_target_digest": (_number, (_pointer,)),
    "tw_fault_address": (_number, (_pointer,)),
    "tw_fault_kind": (_word, (_pointer,)),
    "tw_dispatched": (_number, (_pointer,)),
    "tw_dispatch_cycle": (_pointer, (_pointer,)),
    "tw_dispatch_engine": (_pointer, (_pointer,)),
    "tw_starts": (_number, (_pointer, _word)),
    "tw_start_cycle": (_pointer, (_pointer, _word)),
    "tw_ends": (_number, (_pointer, _word)),
    "tw_done_cycle": (_pointer, (_pointer, _word)),
    "tw_state": (None, (_pointer, _pointer)),
    "tw_counters": (_status, (_pointer, _pointer)),
    "tw_sram": (_status, (_pointer, _pointer)),
}
"""Functions of harness.cpp: result and arguments."""


def seal(path: Path) -> None:
    """Append length and digest."""
    content = path.read_bytes()
    with path.open("ab") as file:
        file.write(SEAL.pack(MAGIC, len(content), hashlib.sha256(content).digest()))


def is_intact(path: Path) -> bool:
    """Tell whether a library is there and is what was sealed."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    if len(content) < SEAL.size:
        return False
    body = memoryview(content)[: -SEAL.size]
    magic, length, digest = SEAL.unpack_from(content, len(body))
    return magic == MAGIC and length == len(body) and digest == hashlib.sha256(body).digest()


@lru_cache
def load_library(path: Path) -> Any:
    """Load a built RTL.

    Raises:
        TilewrightError: E0803 when the loader refuses it.
    """
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise TilewrightError(
            "E0803", "the built RTL cannot be loaded", [str(error)], f"delete `{path}`, build again"
        ) from error
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, list(arguments)
    return library


# The parts of ELF (64 bits) that tell whether a file can be loaded.

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SHARED, _LOADED, _DYNAMIC_SYMBOLS = 3, 1, 11


def library_problem(path: Path, symbols: Iterable[str] = SIGNATURES) -> str:
    """Return why a file is no library with these functions; empty when it is one.

    Reads the file only: loading a damaged one could end the process.
    """
    if not path.is_file():
        return "there is none"
    content = path.read_bytes()
    if content[:4] != b"\x7fELF":
        return f"its {len(content)} bytes are not an ELF file"
    try:
        return _elf_problem(content, symbols)
    except struct.error:
        return f"it is cut after {len(content)} bytes"


def _elf_problem(content: bytes, symbols: Iterable[str]) -> str:
    header = _HEADER.unpack_from(content)
    with Path("/proc/self/exe").open("rb") as file:
        mine = _HEADER.unpack(file.read(_HEADER.size))
    # Class and byte order, then the processor.
    if header[0][4:6] != mine[0][4:6] or header[2] != mine[2]:
        return "it is for another processor"
    if header[1] != _SHARED:
        return "it is not a shared library"
    segments, sections = header[5], header[6]
    for i in range(header[10]):
        kind, _, offset, _, _, size, *_ = _SEGMENT.unpack_from(content, segments + i * header[9])
        if kind == _LOADED and offset + size > len(content):
            return f"it is cut after {len(content)} bytes"
    table = [_SECTION.unpack_from(content, sections + i * header[11]) for i in range(header[12])]
    found: set[str] = set()
    for section in table:
        if section[1] == _DYNAMIC_SYMBOLS and section[6] < len(table):
            names = table[section[6]]
            text = content[names[4] : names[4] + names[5]]
            for at in range(section[4], section[4] + section[5], _SYMBOL.size):
                name, _, _, place, _, _ = _SYMBOL.unpack_from(content, at)
                if place:
                    found.add(text[name : text.find(b"\0", name)].decode("utf-8", "replace"))
    missing = [name for name in symbols if name not in found]
    return f"it lacks {', '.join(missing[:4])}" if missing else ""
