"""Assembly text."""

from __future__ import annotations

import pytest

from tilewright.codegen.assembler import assemble, disassemble, parse_program
from tilewright.diagnostics import TilewrightError
from tilewright.spec.program import Instr, encode_program

TEXT = """\
;; layer "conv1"
dma_load signal=[3,7] ddr=0x1000 ddr_r=R1 n0=4096
vec_drain dtype=fp16 v=V4 function=gelu zp=-3
;; layer ""
halt
"""


def test_text_of_a_small_program() -> None:
    program = [
        Instr("dma_load", {"signal": 136, "ddr": 4096, "ddr_r": 1, "n0": 4096}, "conv1"),
        Instr("vec_drain", {"dtype": 2, "v": 4, "function": 6, "zp": -3}, "conv1"),
        Instr("halt"),
    ]
    code = encode_program(program)
    assert disassemble(code, [instr.layer for instr in program]) == TEXT
    assert assemble(TEXT) == code
    assert [instr.layer for instr in parse_program(TEXT)] == ["conv1", "conv1", ""]


def test_spaces_and_comments_are_free() -> None:
    assert assemble("\n  ; nothing\n\tloop   count=3 ; three times\r\nend_loop;x\nhalt") == (
        encode_program([Instr("loop", {"count": 3}), Instr("end_loop"), Instr("halt")])
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("halt\n  jump a=1", "line 2, column 3: unknown instruction 'jump'"),
        ("loop cnt=1", "line 1, column 6: loop has no field 'cnt'"),
        ("loop count=0", "line 1, column 12: count must be 1..65536, not 0"),
        ("loop count=x", "line 1, column 12: count must be a number 1..65536, not 'x'"),
        ("loop count", "line 1, column 6: expected `field=value`"),
        ("loop count=1 count=2", "line 1, column 14: count is given twice"),
        ("set_reg rd=R32", "line 1, column 12: rd must be R0..R31, not R32"),
        ("set_reg rd=V3", "line 1, column 12: rd must be a number R0..R31, not 'V3'"),
        ("fence wait=[32]", "line 1, column 12: wait must list semaphores 0..31, not '32'"),
        ("fence wait=3", "line 1, column 12: wait must be a list of semaphores"),
        ("mac_conv dtype=int2", "column 16: dtype must be one of int8, int4, fp16, not 'int2'"),
        (';; layer "a', "line 1, column 10: the layer must be a quoted string"),
    ],
)
def test_mistakes_have_line_and_column(text: str, message: str) -> None:
    with pytest.raises(TilewrightError) as error:
        assemble(text)
    assert message in error.value.message
    assert error.value.code == "E0601"


def test_disassembling_garbage_names_the_word() -> None:
    with pytest.raises(TilewrightError, match="1: opcode 0xff is not assigned"):
        disassemble(encode_program([Instr("halt")]) + b"\xff" + bytes(63))
