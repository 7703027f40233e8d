"""Softmax and layer normalisation as the tiler sees them: whole rows, and what they share."""

from __future__ import annotations

from tilewright.schedule.box import BoxAxis, BoxNoFit, BoxOperand, BoxProblem, choose_box
from tilewright.schedule.footprint import row_table_bytes
from tilewright.spec.access import row_parameter_bytes
from tilewright.spec.hardware import Hardware
from tilewright.spec.isa import BY_NAME
from tilewright.spec.timing import LAYER_NORM_WAIT, SOFTMAX_WAIT, VECTOR_PIPELINE


def row_problem(hardware: Hardware, image: tuple[int, int, int], softmax: bool) -> BoxProblem:
    """Return the problem of an image each of whose pixels is a row."""
    axes = (BoxAxis(0), BoxAxis(1), BoxAxis(2))
    field = BY_NAME["vec_softmax"].field
    passes, extra = _passes(hardware, softmax)
    return BoxProblem(
        image,
        (BoxOperand("input", axes, image), BoxOperand("output", axes, image)),
        work=passes,
        row_bytes=row_table_bytes(hardware)
        if softmax
        else row_parameter_bytes(hardware, image[-1]),
        row_cycles=extra,
        limits=(field["n2"].high, field["n1"].high, field["n0"].high),
    )


def _passes(hardware: Hardware, softmax: bool) -> tuple[int, int]:
    """Return the passes over a row, and the cycles between them."""
    gap = hardware.vector_latency + VECTOR_PIPELINE
    return (3, 2 * gap + SOFTMAX_WAIT) if softmax else (2, gap + LAYER_NORM_WAIT)


def row_cycles(hardware: Hardware, size: int, taken: int, softmax: bool) -> int:
    """Return the cycles of a row of `size` elements of which `taken` are read in one."""
    passes, extra = _passes(hardware, softmax)
    return passes * -(-size // taken) + extra


def row_misfit(hardware: Hardware, size: int, softmax: bool) -> int:
    """Return the SRAM bytes that a row of `size` elements needs, or 0 if there are as many."""
    choice = choose_box(hardware, row_problem(hardware, (1, 1, size), softmax))
    return choice.needed_bytes if isinstance(choice, BoxNoFit) else 0
