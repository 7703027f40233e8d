"""Round trips over the whole instruction set: bytes, assembly text, IR text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xdsl.dialects.builtin import ModuleOp

from tests.props.isa_strategies import instructions
from tilewright.codegen.assembler import assemble, disassemble, format_program, parse_program
from tilewright.dialects.tpu import ProgramOp
from tilewright.ir.io import new_context, parse_text, print_module
from tilewright.spec.isa import (
    BY_OPCODE,
    INSTRUCTIONS,
    IllegalInstructionError,
    decode,
    encode,
)
from tilewright.spec.program import Instr, decode_program, encode_program, full_fields


@given(instructions())
def test_both_codecs_agree_and_invert(instr: Instr) -> None:
    data = encode(instr.name, instr.fields)
    assert encode_program([instr]) == data
    name, fields = decode(data)
    assert (name, fields) == (instr.name, full_fields(instr))
    (decoded,) = decode_program(data)
    assert (decoded.name, decoded.fields) == (name, fields)
    assert encode(name, fields) == data


@given(st.binary(min_size=64, max_size=64), st.sampled_from(INSTRUCTIONS), st.integers(0, 3))
def test_any_64_bytes_decode_to_what_encodes_back_or_are_refused(
    data: bytes, instruction: object, mode: int
) -> None:
    if mode:
        # Random bits under a real opcode, cut to the bits it uses: mostly legal.
        chosen = next(item for item in INSTRUCTIONS if item is instruction)
        word = int.from_bytes(data, "little") >> 8 << 8 | chosen.opcode
        word &= (1 << chosen.used_bits) - 1
        data = word.to_bytes(64, "little")
    try:
        name, fields = decode(data)
    except IllegalInstructionError:
        with pytest.raises(IllegalInstructionError):
            decode_program(data)
        return
    assert encode(name, fields) == data


@given(instructions(), st.data())
def test_reserved_bits_are_refused(instr: Instr, data: st.DataObject) -> None:
    word = encode(instr.name, instr.fields)
    used = BY_OPCODE[word[0]].used_bits
    bit = data.draw(st.integers(used, 511))
    spoiled = int.from_bytes(word, "little") | 1 << bit
    with pytest.raises(IllegalInstructionError, match="reserved"):
        decode(spoiled.to_bytes(64, "little"))


@given(st.integers(0, 255).filter(lambda value: value not in BY_OPCODE))
def test_unknown_opcodes_are_refused(opcode: int) -> None:
    with pytest.raises(IllegalInstructionError, match="not assigned"):
        decode(bytes([opcode]) + bytes(63))


@given(st.lists(instructions(), max_size=6))
def test_assembly_keeps_every_byte_and_layer(program: list[Instr]) -> None:
    code = encode_program(program)
    layers = [instr.layer for instr in program]
    text = disassemble(code, layers)
    assert assemble(text) == code
    assert [instr.layer for instr in parse_program(text)] == layers
    assert format_program(program) == text


@settings(max_examples=40)
@given(st.lists(instructions(), max_size=4))
def test_ir_text_keeps_every_field(program: list[Instr]) -> None:
    program = [instr for instr in program if instr.name != "halt"] + [Instr("halt")]
    module = ModuleOp([ProgramOp.of("p", program, None)])
    module.verify()
    parsed = parse_text(print_module(module), new_context())
    assert parsed.is_structurally_equivalent(module)
    (op,) = parsed.ops
    assert isinstance(op, ProgramOp)
    assert encode_program(op.instructions()) == encode_program(program)
