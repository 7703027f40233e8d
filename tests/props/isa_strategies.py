"""Hypothesis strategies over the whole instruction set."""

from __future__ import annotations

from hypothesis import strategies as st

from tilewright.spec.isa import INSTRUCTIONS, Instruction
from tilewright.spec.program import Instr


@st.composite
def instructions(draw: st.DrawFn, instruction: Instruction | None = None) -> Instr:
    """Any instruction with any legal values, some fields left out."""
    chosen = instruction if instruction is not None else draw(st.sampled_from(INSTRUCTIONS))
    fields: dict[str, int] = {}
    for field in chosen.fields:
        if draw(st.booleans()):
            edges = st.sampled_from((field.low, field.high))
            fields[field.name] = draw(edges | st.integers(field.low, field.high))
    return Instr(chosen.name, fields, draw(st.sampled_from(("", "conv1", 'a "b"\n\u2028;x'))))
