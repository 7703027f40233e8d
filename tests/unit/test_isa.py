"""The instruction table and its codec."""

from __future__ import annotations

import pytest

from tilewright.spec.isa import (
    BY_NAME,
    INSTRUCTION_BITS,
    INSTRUCTION_BYTES,
    INSTRUCTIONS,
    IllegalInstructionError,
    Kind,
    decode,
    encode,
)
from tilewright.spec.program import Instr, decode_program, encode_program


def test_table_is_consistent() -> None:
    assert len({item.opcode for item in INSTRUCTIONS}) == len(INSTRUCTIONS)
    for item in INSTRUCTIONS:
        assert item.used_bits <= INSTRUCTION_BITS
        assert len(item.field) == len(item.fields), item.name
        for field in item.fields:
            assert field.low <= field.default <= field.high, (item.name, field.name)
            assert (field.kind is Kind.ENUM) == bool(field.names)
            if field.kind in (Kind.SRAM, Kind.DDR):
                assert item.field[f"{field.name}_r"].kind is Kind.R


def test_fields_are_packed_from_bit_0_upwards() -> None:
    # opcode 0x04, wait 1, signal 2^31, rd 5 bits, value 40 bits signed: written out by hand.
    word = 0x04 | 1 << 8 | 1 << (8 + 32 + 31) | 3 << 72 | ((1 << 40) - 2) << 77
    fields = {"wait": 1, "signal": 1 << 31, "rd": 3, "value": -2}
    assert encode("add_reg", fields) == word.to_bytes(INSTRUCTION_BYTES, "little")


def test_a_size_of_one_is_stored_as_zero() -> None:
    assert encode("loop", {"count": 1})[9:] == bytes(INSTRUCTION_BYTES - 9)
    assert encode("loop", {"count": 65536})[9:11] == b"\xff\xff"


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("jump", {}, "unknown instruction 'jump'"),
        ("halt", {"n0": 1}, "halt has no field 'n0'"),
        ("loop", {"count": 0}, "loop.count must be 1..65536, not 0"),
        ("loop", {"count": 65537}, "loop.count must be 1..65536, not 65537"),
        ("vec_drain", {"zp": 256}, "vec_drain.zp must be -256..255, not 256"),
        ("mac_conv", {"dtype": 3}, "mac_conv.dtype must be 0..2, not 3"),
    ],
)
def test_encoders_refuse_what_does_not_exist(
    name: str, fields: dict[str, int], message: str
) -> None:
    with pytest.raises(IllegalInstructionError) as single:
        encode(name, fields)
    assert str(single.value) == message
    with pytest.raises(IllegalInstructionError) as many:
        encode_program([Instr("halt"), Instr(name, fields)])
    assert str(many.value) == f"1: {message}"


def test_decoders_refuse_unassigned_words() -> None:
    reserved = bytearray(encode("halt", {}))
    reserved[63] = 0x80
    unknown = bytes([0xFF]) + bytes(63)
    enum = bytearray(encode("vec_eltwise", {}))
    bit = BY_NAME["vec_eltwise"].positions["op"]
    word = int.from_bytes(enum, "little") | 7 << bit
    for data, message in (
        (bytes(reserved), "reserved bits"),
        (unknown, "opcode 0xff is not assigned"),
        (word.to_bytes(64, "little"), "vec_eltwise.op must be 0..4, not 7"),
    ):
        with pytest.raises(IllegalInstructionError, match=message):
            decode(data)
        with pytest.raises(IllegalInstructionError, match=f"1: .*{message}"):
            decode_program(encode("halt", {}) + data)
    with pytest.raises(IllegalInstructionError, match="64 bytes, not 63"):
        decode(bytes(63))
    with pytest.raises(IllegalInstructionError, match="multiple of 64"):
        decode_program(bytes(65))
