"""Assembly text (`.tpuasm`) to instructions and back; the round trip keeps every byte.

One instruction a line; fields that have their default are left out; `; ...` is a comment. A comment
`;; layer NAME` names the layer of the instructions after it:

```
;; layer "conv1"
dma_load signal=[3] ddr=0x1000 ddr_r=R1 n0=4096
mac_conv wait=[3] act=0x40 out_h=8 out_w=8
halt
```
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import NoReturn

from tilewright.diagnostics import TilewrightError
from tilewright.spec.isa import BY_NAME, Field, IllegalInstructionError, Kind
from tilewright.spec.program import DEFAULTS, Instr, decode_program, encode_program

_HEX = (Kind.SRAM, Kind.DDR)
_LETTER = {Kind.R: "R", Kind.V: "V"}
_LAYER = ";; layer "
_WORD = re.compile(r"[A-Za-z_]\w*")
_FIELD = re.compile(r"([A-Za-z_]\w*)=(\[[^\]]*\]|[^\s;\[]+)")
_NUMBER = re.compile(r"-?(0x[0-9A-Fa-f]+|[0-9]+)")


def _format(field: Field, value: int) -> str:
    if field.kind is Kind.MASK:
        numbers = (str(bit) for bit in range(field.bits) if value >> bit & 1)
        return f"[{','.join(numbers)}]"
    if field.kind is Kind.ENUM:
        return field.names[value]
    if field.kind in _HEX:
        return hex(value)
    return _LETTER.get(field.kind, "") + str(value)


def format_instruction(instr: Instr) -> str:
    """Return the line of an instruction."""
    fields = BY_NAME[instr.name].field
    defaults = DEFAULTS[instr.name]
    parts = [instr.name]
    for name, field in fields.items():
        value = instr.fields.get(name, defaults[name])
        if value != defaults[name]:
            parts.append(f"{name}={_format(field, value)}")
    return " ".join(parts)


def format_program(program: Iterable[Instr]) -> str:
    """Return the text of a program, layers as comments."""
    lines: list[str] = []
    layer = ""
    for instr in program:
        if instr.layer != layer:
            layer = instr.layer
            lines.append(f"{_LAYER}{json.dumps(layer)}")
        lines.append(format_instruction(instr))
    return "\n".join(lines) + "\n"


def disassemble(code: bytes, layers: Sequence[str] = ()) -> str:
    """Return the text of encoded instructions; `layers` gives each instruction's layer.

    Raises:
        TilewrightError: E0601 if a word is not an instruction.
    """
    try:
        return format_program(decode_program(code, layers))
    except IllegalInstructionError as error:
        raise TilewrightError("E0601", f"illegal instruction {error}") from error


def _fail(line: int, column: int, message: str, details: list[str] | None = None) -> NoReturn:
    raise TilewrightError("E0601", f"line {line}, column {column + 1}: {message}", details or [])


def _value(field: Field, text: str) -> int | str:
    """Return the value `text` gives `field`, or what is wrong with it."""
    if field.kind is Kind.MASK:
        if not (text.startswith("[") and text.endswith("]")):
            return "must be a list of semaphores, such as [3,9]"
        mask = 0
        for part in filter(None, (piece.strip() for piece in text[1:-1].split(","))):
            if not part.isascii() or not part.isdigit() or int(part) >= field.bits:
                return f"must list semaphores 0..{field.bits - 1}, not {part!r}"
            mask |= 1 << int(part)
        return mask
    if field.kind is Kind.ENUM:
        if text in field.names:
            return field.names.index(text)
        return f"must be one of {', '.join(field.names)}, not {text!r}"
    letter = _LETTER.get(field.kind, "")
    number = text[1:] if letter and text.startswith(letter) else text
    if not _NUMBER.fullmatch(number) or len(number) > 20:
        return f"must be a number {letter}{field.low}..{letter}{field.high}, not {text!r}"
    value = int(number, 0) if "x" in number else int(number)
    if not field.low <= value <= field.high:
        return f"must be {letter}{field.low}..{letter}{field.high}, not {text}"
    return value


def parse_program(text: str) -> list[Instr]:
    """Parse assembly text.

    Raises:
        TilewrightError: E0601 with line and column of the first mistake.
    """
    program: list[Instr] = []
    layer = ""
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        if line.startswith(_LAYER):
            try:
                name = json.loads(line[len(_LAYER) :])
            except ValueError:
                name = None
            if not isinstance(name, str):
                _fail(number, len(_LAYER), "the layer must be a quoted string")
            layer = str(name)
            continue
        instr = _parse_line(number, line, layer)
        if instr is not None:
            program.append(instr)
    return program


def _parse_line(number: int, line: str, layer: str) -> Instr | None:
    position = len(line) - len(line.lstrip())
    if position == len(line) or line[position] == ";":
        return None
    match = _WORD.match(line, position)
    if match is None or match.group() not in BY_NAME:
        word = line[position:].split()[0]
        _fail(
            number, position, f"unknown instruction {word!r}",
            [f"instructions: {', '.join(BY_NAME)}"],
        )  # fmt: skip
    instruction = BY_NAME[match.group()]
    fields: dict[str, int] = {}
    position = match.end()
    while True:
        start = position
        while position < len(line) and line[position].isspace():
            position += 1
        if position == len(line) or line[position] == ";":
            return Instr(instruction.name, fields, layer)
        match = _FIELD.match(line, position)
        if match is None or position == start:
            _fail(number, position, "expected `field=value`")
        name, text = match.groups()
        field = instruction.field.get(name)
        if field is None:
            _fail(
                number, position, f"{instruction.name} has no field {name!r}",
                [f"fields: {', '.join(instruction.field)}"],
            )  # fmt: skip
        if name in fields:
            _fail(number, position, f"{name} is given twice")
        value = _value(field, text)
        if isinstance(value, str):
            _fail(number, match.start(2), f"{name} {value}")
        else:
            fields[name] = value
        position = match.end()


def assemble(text: str) -> bytes:
    """Return the encoded instructions of assembly text.

    Raises:
        TilewrightError: E0601 with line and column of the first mistake.
    """
    return encode_program(parse_program(text))
