"""The checks of a program of the compiler: the rules of the chip, and the right parameters.

A program that does not say which constants its layers read was written by hand: it keeps the chip's
rules alone.
"""

from __future__ import annotations

from tilewright.codegen.verify import verify_program
from tilewright.codegen.verify_parameters import verify_parameters
from tilewright.dialects.tpu import ProgramOp
from tilewright.spec.hardware import Hardware


def verify_compiled(program: ProgramOp, hardware: Hardware) -> None:
    """Check a program against its chip and against what its layers need.

    Raises:
        TilewrightError: E0501 naming layer and instruction of the first broken rule.
    """
    instructions = program.instructions()
    verify_program(instructions, hardware)
    needs = program.needs()
    if needs is not None:
        verify_parameters(instructions, hardware, needs=needs, strict=program.strict_banks)
