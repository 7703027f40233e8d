"""The tpu dialect's two ways of parsing fields, and its builders."""

from __future__ import annotations

import pytest
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.utils.exceptions import VerifyException

from tilewright.diagnostics import TilewrightError
from tilewright.dialects.tpu import OPS, InstructionOp, ProgramOp, from_instr, tpu_op
from tilewright.ir.io import new_context, parse_text, print_module
from tilewright.spec.isa import BY_NAME
from tilewright.spec.program import Instr


def parsed(line: str) -> Instr:
    module = parse_text(f"tpu.program @p {{\n{line}\ntpu.halt\n}}", new_context())
    program = next(iter(module.body.block.ops))
    assert isinstance(program, ProgramOp)
    return program.instructions()[0]


@pytest.mark.parametrize(
    "text",
    [
        "#tpu.f<wait = [3, 14], op = mul, a = 0x40, za = -3>",
        "#tpu.f<op=2, za = -3, a = 64, wait = [14,3]>",
        "#tpu.f< wait = [3, 14], // why\n op = mul, a = 0x40, za = -3 >",
        "#tpu.f<wait = [3, 14], op = mul, a = 0x40, za = -3, b = 0x0, signal = []>",
    ],
)
def test_text_as_printed_and_text_by_hand_mean_the_same(text: str) -> None:
    want = Instr("vec_eltwise", {"wait": 1 << 3 | 1 << 14, "op": 2, "a": 64, "za": -3}, "x")
    assert parsed(f'tpu.vec_eltwise {text} {{layer = "x"}}') == want


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("a = mul", "tpu.f"),
        ("op = div", "op must be one of add, sub, mul, max, min, not div"),
        ("wait = 3", "'[' expected"),
        ("a = [3]", "tpu.f"),
        ("wait = [3, 3]", "wait must list different semaphores"),
        ("wait = [3, , 4]", "tpu.f"),
        ("a = 1, a = 2", "given twice"),
        ("nothing = 1", "no field `nothing`"),
        ("n0 = 16385", "n0 must be 1..16384, not 16385"),
    ],
)
def test_wrong_fields_are_errors(fields: str, message: str) -> None:
    with pytest.raises(TilewrightError) as error:
        parsed(f"tpu.vec_eltwise #tpu.f<{fields}>")
    assert message in str(error.value)


def test_every_instruction_has_its_op() -> None:
    assert OPS.keys() == BY_NAME.keys()
    for name, kind in OPS.items():
        assert kind.name == f"tpu.{name}"
        assert kind.__doc__ == BY_NAME[name].doc


def test_builders_leave_defaults_out_and_sort() -> None:
    op = tpu_op("loop", layer="a", count=7, wait=0)
    assert op.given == {"count": 7}
    assert op.values() == {"wait": 0, "signal": 0, "count": 7}
    assert op.instr() == Instr("loop", {"count": 7}, "a")
    same = from_instr(Instr("vec_pool", {"n0": 3, "wait": 1}, ""))
    assert list(same.given) == ["wait", "n0"]
    same.verify()


def test_verifier_of_an_op() -> None:
    for op, message in (
        (tpu_op("loop", count=0), "count must be 1..65536, not 0"),
        (tpu_op("halt", layer="", n0=4), "no field `n0`"),
    ):
        with pytest.raises(VerifyException, match=message):
            op.verify()


def test_a_program_holds_only_instructions() -> None:
    program = ProgramOp("p", [tpu_op("fence"), ModuleOp([]), tpu_op("halt")])
    with pytest.raises(VerifyException, match=r"not `builtin\.module`"):
        program.verify()


def test_attributes_of_programs_survive() -> None:
    program = ProgramOp.of("p", [Instr("halt", {}, "é\n")], {"target": StringAttr("tiny8")})
    module = ModuleOp([program])
    text = print_module(module)
    again = parse_text(text, new_context())
    assert again.is_structurally_equivalent(module)
    (op,) = program.body.block.ops
    assert isinstance(op, InstructionOp)
    assert op.instr().layer == "é\n"
