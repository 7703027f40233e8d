"""Programs in memory: instructions with their layer, encoded and decoded fast.

Also the sequencer: which instructions reach the engines, in which order, at which addresses. Both
simulators and the verifier use this one definition of loops and R registers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tilewright.diagnostics import TilewrightError
from tilewright.spec.isa import (
    BY_NAME,
    BY_OPCODE,
    INSTRUCTION_BYTES,
    INSTRUCTIONS,
    OPCODE_BITS,
    Engine,
    IllegalInstructionError,
    Instruction,
    Kind,
)

MAX_LOOP_DEPTH = 4
REGISTER_MASK = (1 << 40) - 1
MAX_DISPATCHED = 1 << 20
"""Instructions a program may dispatch, loops unrolled; more is refused as a runaway program."""

SEQ, MAC, VEC = 6, 4, 5
ENGINE_COUNT = 7
ENGINE_NAMES = ("dma0", "dma1", "dma2", "dma3", "mac", "vec", "seq")
"""Engines by number, as in the semaphore convention of docs/concepts/machine.md."""


WORKSPACE_ALIGNMENT = 4096


def workspace_base(constants_bytes: int) -> int:
    """Return the DDR address of the workspace (R2): constants lie at 0 (R1), it follows them.

    The compiler puts the address into the program, the runtime lays out DDR by it.
    """
    return -(-constants_bytes // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT


@dataclass(slots=True)
class Instr:
    """An instruction: fields left out have their defaults."""

    name: str
    fields: dict[str, int] = field(default_factory=dict[str, int])
    layer: str = ""
    """The user's node name; not part of the encoding."""


DEFAULTS: dict[str, dict[str, int]] = {
    instruction.name: {item.name: item.default for item in instruction.fields}
    for instruction in INSTRUCTIONS
}
"""Default of every field of every instruction."""

ADDRESSES: dict[str, tuple[tuple[str, str], ...]] = {
    instruction.name: tuple(
        (item.name, f"{item.name}_r")
        for item in instruction.fields
        if item.kind in (Kind.SRAM, Kind.DDR)
    )
    for instruction in INSTRUCTIONS
}
"""Address fields of every instruction with the field of the R register added to them."""


def full_fields(instr: Instr) -> dict[str, int]:
    """Return all fields of `instr`, defaults included."""
    return {**DEFAULTS[instr.name], **instr.fields}


def engine_of(name: str, fields: Mapping[str, int]) -> int:
    """Return the engine number (DMA channels 0..3, MAC 4, VEC 5, sequencer 6)."""
    engine = BY_NAME[name].engine
    if engine is Engine.DMA:
        return fields["channel"]
    return MAC if engine is Engine.MAC else VEC if engine is Engine.VEC else SEQ


# name -> (field -> (bit, mask, low, high, bias, encoded default)), word of all defaults
_Codes = dict[str, tuple[int, int, int, int, int, int]]


def _codes(instruction: Instruction) -> tuple[_Codes, int]:
    codes: _Codes = {}
    word = instruction.opcode
    for item in instruction.fields:
        mask = (1 << item.bits) - 1
        encoded = (item.default - item.bias) & mask
        bit = instruction.positions[item.name]
        codes[item.name] = (bit, mask, item.low, item.high, item.bias, encoded)
        word |= encoded << bit
    return codes, word


_ENCODERS = {instruction.name: _codes(instruction) for instruction in INSTRUCTIONS}


def encode_program(program: Iterable[Instr]) -> bytes:
    """Encode instructions one after another, 64 bytes each.

    Raises:
        IllegalInstructionError: unknown instruction or field, or a value outside its range; the
            message starts with the instruction's index.
    """
    words: list[bytes] = []
    for index, instr in enumerate(program):
        entry = _ENCODERS.get(instr.name)
        if entry is None:
            raise IllegalInstructionError(f"{index}: unknown instruction {instr.name!r}")
        codes, word = entry
        for name, value in instr.fields.items():
            code = codes.get(name)
            if code is None:
                raise IllegalInstructionError(f"{index}: {instr.name} has no field {name!r}")
            bit, mask, low, high, bias, default = code
            if not low <= value <= high:
                raise IllegalInstructionError(
                    f"{index}: {instr.name}.{name} must be {low}..{high}, not {value}"
                )
            word += (((value - bias) & mask) - default) << bit
        words.append(word.to_bytes(INSTRUCTION_BYTES, "little"))
    return b"".join(words)


_DECODERS = {
    instruction.opcode: (
        instruction,
        tuple(
            (
                item.name,
                instruction.positions[item.name],
                (1 << item.bits) - 1,
                1 << (item.bits - 1) if item.signed else 0,
                item.bias,
                item.high,
            )
            for item in instruction.fields
        ),
    )
    for instruction in INSTRUCTIONS
}


def decode_program(code: bytes, layers: Sequence[str] = ()) -> list[Instr]:
    """Decode a program; every instruction gets all its fields, and `layers[i]` if given.

    Raises:
        IllegalInstructionError: as `isa.decode`; the message starts with the instruction's index.
    """
    if len(code) % INSTRUCTION_BYTES:
        raise IllegalInstructionError(
            f"code must be a multiple of {INSTRUCTION_BYTES} bytes, not {len(code)}"
        )
    program: list[Instr] = []
    for index in range(len(code) // INSTRUCTION_BYTES):
        start = index * INSTRUCTION_BYTES
        word = int.from_bytes(code[start : start + INSTRUCTION_BYTES], "little")
        entry = _DECODERS.get(word & ((1 << OPCODE_BITS) - 1))
        if entry is None:
            raise IllegalInstructionError(f"{index}: opcode 0x{word & 0xFF:02x} is not assigned")
        instruction, items = entry
        if word >> instruction.used_bits:
            raise IllegalInstructionError(f"{index}: {instruction.name}: reserved bits are set")
        values: dict[str, int] = {}
        for name, bit, mask, sign, bias, high in items:
            raw = (word >> bit) & mask
            if raw & sign:
                raw -= mask + 1
            raw += bias
            if raw > high:
                low = instruction.field[name].low
                raise IllegalInstructionError(
                    f"{index}: {instruction.name}.{name} must be {low}..{high}, not {raw}"
                )
            values[name] = raw
        program.append(Instr(instruction.name, values, layers[index] if layers else ""))
    return program


def as_program(code: bytes | Sequence[Instr], layers: Sequence[str] = ()) -> Sequence[Instr]:
    """Return `code` decoded if it is bytes; `layers` are those of the instructions, if known.

    Raises:
        TilewrightError: E0602 if it does not decode.
    """
    if not isinstance(code, bytes | bytearray | memoryview):
        return code
    try:
        return decode_program(bytes(code), layers)
    except IllegalInstructionError as error:
        raise TilewrightError("E0602", f"illegal instruction {error}") from error


@dataclass(slots=True)
class Dispatched:
    """An instruction as its engine sees it: all fields, R registers added to the addresses."""

    index: int
    """Position in the program (equal for all iterations of a loop)."""
    name: str
    engine: int
    fields: dict[str, int]
    layer: str


def where(index: int, instr: Instr) -> str:
    """Return the place of an instruction for messages."""
    return f'instruction {index} ({instr.name}) of layer "{instr.layer}"'


def _matching_loops(program: Sequence[Instr]) -> dict[int, int]:
    starts: list[int] = []
    matches: dict[int, int] = {}
    for index, instr in enumerate(program):
        if instr.name == "loop":
            starts.append(index)
            if len(starts) > MAX_LOOP_DEPTH:
                raise TilewrightError(
                    "E0602",
                    f"{where(index, instr)}: loops must nest at most {MAX_LOOP_DEPTH} deep",
                )
        elif instr.name == "end_loop":
            if not starts:
                raise TilewrightError("E0602", f"{where(index, instr)}: there is no open loop")
            matches[index] = starts.pop()
    if starts:
        index = starts[-1]
        raise TilewrightError("E0602", f"{where(index, program[index])}: the loop has no end")
    return matches


def sequence(
    program: Sequence[Instr],
    scalar_registers: int,
    registers: Mapping[int, int] | None = None,
) -> Iterator[Dispatched]:
    """Run the sequencer: yield every instruction fetched, loops executed, up to `halt`.

    `registers` are the initial R registers (others are 0; R0 stays 0). Instructions of the
    sequencer are yielded too (they take a cycle).

    Raises:
        TilewrightError: E0602 for loops that do not nest, registers that do not exist, a program
            without `halt`, or one that dispatches more than `MAX_DISPATCHED` instructions.
    """
    matches = _matching_loops(program)
    complete: list[dict[str, int] | None] = [None] * len(program)
    values = [0] * 32
    for number, value in (registers or {}).items():
        if not 0 < number < scalar_registers:
            raise TilewrightError(
                "E0602", f"R{number} must be R1..R{scalar_registers - 1} to be given a value"
            )
        values[number] = value & REGISTER_MASK
    remaining: dict[int, int] = {}
    position = count = 0
    while position < len(program):
        instr = program[position]
        fields = complete[position]
        if fields is None:
            fields = complete[position] = full_fields(instr)
        name = instr.name
        count += 1
        if count > MAX_DISPATCHED:
            raise TilewrightError(
                "E0602", f"the program dispatches more than {MAX_DISPATCHED} instructions"
            )
        for address, register in ADDRESSES[name]:
            number = fields[register]
            if number:
                if number >= scalar_registers:
                    raise TilewrightError(
                        "E0602",
                        f"{where(position, instr)}: {register} must be R0..R"
                        f"{scalar_registers - 1}, not R{number}",
                    )
                if fields is complete[position]:
                    # Iterations without registers share one dictionary; this one cannot.
                    fields = dict(fields)
                fields[address] = (fields[address] + values[number]) & REGISTER_MASK
        yield Dispatched(position, name, engine_of(name, fields), fields, instr.layer)
        if name == "halt":
            return
        if name in ("set_reg", "add_reg"):
            number = fields["rd"]
            if not 0 < number < scalar_registers:
                raise TilewrightError(
                    "E0602",
                    f"{where(position, instr)}: rd must be R1..R{scalar_registers - 1}, "
                    f"not R{number}",
                )
            base = values[number] if name == "add_reg" else 0
            values[number] = (base + fields["value"]) & REGISTER_MASK
        elif name == "loop":
            remaining[position] = fields["count"]
        elif name == "end_loop":
            start = matches[position]
            remaining[start] -= 1
            if remaining[start]:
                position = start
        position += 1
    raise TilewrightError("E0602", "the program has no `halt`")


assert len(BY_OPCODE) == len(INSTRUCTIONS) == len(BY_NAME), "opcodes and names are unique"
