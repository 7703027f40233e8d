"""Stress tests as text: assembly with a head of comments, which says all that decides a test.

What is read may have been written by hand or by others: every value of the head is checked before
anything is made of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NoReturn

from tilewright.codegen.assembler import format_program, parse_program
from tilewright.diagnostics import TilewrightError
from tilewright.spec.hardware import Hardware
from tilewright.spec.program import REGISTER_MASK, Instr
from tilewright.testgen.memory import Window, catalogue
from tilewright.testgen.programs import Case

MAX_WINDOW_BYTES = 1 << 26
"""Bytes of all windows together: each run fills them anew."""
_HEAD = re.compile(r"; (target|name|seed|window|register|cause): (.*)")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")
_NUMBER = re.compile(r"0[xX][0-9a-fA-F]{1,32}|[0-9]{1,32}")
_ONCE = ("target", "name", "seed")


def to_text(case: Case, cause: str = "") -> str:
    """Return the case as assembly with a head of comments that `from_text` reads."""
    lines = [f"; name: {case.name}", f"; target: {case.hardware.name}"]
    if cause:
        lines.append(f"; cause: {' '.join(cause.split())}")
    lines.append(f"; seed: {case.seed}")
    lines += [f"; window: 0x{window.address:x} 0x{window.size:x}" for window in case.windows]
    lines += [f"; register: {number} 0x{value:x}" for number, value in case.registers.items()]
    plain = [Instr(i.name, i.fields, i.layer) for i in case.program]
    return "\n".join(lines) + "\n" + format_program(plain)


def from_text(text: str, hardware: Callable[[str], Hardware]) -> Case:
    """Read what `to_text` wrote; `hardware` gives the target of a name.

    Raises:
        TilewrightError: E0601 if the head is incomplete, a value of it is not legal (with its
            line), or the text is no program.
    """
    head: dict[str, list[tuple[int, str]]] = {}
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        match = _HEAD.fullmatch(line)
        if match:
            head.setdefault(match.group(1), []).append((number, match.group(2).strip()))
    missing = [key for key in (*_ONCE, "window") if key not in head]
    if missing:
        raise TilewrightError(
            "E0601", "the head of the stress test is incomplete",
            [f"there is no line `; {key}: `" for key in missing],
            "lines `; name: `, `; target: `, `; seed: `, `; window: ADDRESS SIZE` are needed",
        )  # fmt: skip
    for key in _ONCE:
        if len(head[key]) > 1:
            _fail(head[key][1][0], f"`; {key}: ` is given twice")
    ((at, name),) = head["name"]
    if not _NAME.fullmatch(name):
        _fail(at, f"name must be 1..100 of A-Z a-z 0-9 _ . -, not a dot first, not {name[:100]!r}")
    ((at, seed),) = head["seed"]
    target = hardware(head["target"][0][1])
    return Case(
        name,
        target,
        parse_program(text),
        _number(at, "seed", seed, 0, (1 << 63) - 1),
        _windows(head["window"], target),
        _registers(head.get("register", []), target),
    )


def _fail(line: int, message: str) -> NoReturn:
    raise TilewrightError("E0601", f"line {line}: {message}")


def _number(line: int, what: str, text: str, low: int, high: int, *, plain: bool = True) -> int:
    """Return a number, checked; the limits are told in hexadecimal unless `plain`."""
    limits = f"{low}..{high}" if plain else f"0x{low:x}..0x{high:x}"
    value = int(text, 16 if text[:2] in ("0x", "0X") else 10) if _NUMBER.fullmatch(text) else -1
    if not low <= value <= high:
        _fail(line, f"{what} must be {limits}, not {text[:100]}")
    return value


def _windows(lines: list[tuple[int, str]], target: Hardware) -> tuple[Window, ...]:
    """Return the windows; the first lines that are wrong are told."""
    windows: list[Window] = []
    left = MAX_WINDOW_BYTES
    size = target.ddr_size
    for at, text in lines:
        words = text.split()
        if len(words) != 2:
            _fail(at, f"window must be an address and a size, not {text[:100]!r}")
        address = _number(at, f"address of a window in the DDR of `{target.name}`", words[0], 0,
                          size - 1, plain=False)  # fmt: skip
        what = f"size of a window at 0x{address:x} in the DDR of `{target.name}`"
        if left < size - address:
            what = f"size of a window (all of them together: 0x{MAX_WINDOW_BYTES:x} bytes)"
        if not left:
            _fail(at, f"all windows together must be at most 0x{MAX_WINDOW_BYTES:x} bytes")
        window = Window(address, _number(at, what, words[1], 1, min(left, size - address),
                                         plain=False))  # fmt: skip
        left -= window.size
        windows.append(window)
    needed = catalogue(target).size
    if not any(window.holds(0, needed) for window in windows):
        _fail(
            lines[0][0],
            f"a window must hold the parameters and tables at 0x0..0x{needed - 1:x}: address 0, "
            f"size 0x{needed:x} or more",
        )
    return tuple(windows)


def _registers(lines: list[tuple[int, str]], target: Hardware) -> dict[int, int]:
    registers: dict[int, int] = {}
    for at, text in lines:
        words = text.split()
        if len(words) != 2:
            _fail(at, f"register must be a number and a value, not {text[:100]!r}")
        number = _number(at, "number of a register", words[0], 1, target.scalar_registers - 1)
        if number in registers:
            _fail(at, f"register {number} is given twice")
        what = f"value of register {number}"
        registers[number] = _number(at, what, words[1], 0, REGISTER_MASK, plain=False)
    return registers
