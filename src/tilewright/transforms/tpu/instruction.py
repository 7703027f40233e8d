"""An instruction being built: fields, who it is for, and the bytes it touches."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilewright.spec.access import accesses
from tilewright.spec.hardware import Hardware
from tilewright.spec.isa import BY_NAME
from tilewright.spec.program import SEQ, engine_of

ENGINES = SEQ
"""Engines with a queue: all numbers below the sequencer's."""


@dataclass(frozen=True)
class Region:
    """A range of bytes an instruction touches; strided accesses give their hull."""

    space: str
    """`sram`, `ddr` (the workspace) or `const`."""
    low: int
    high: int
    """First byte after the range."""


@dataclass
class Instr:
    """One instruction of the program, before encoding; addresses are relative to R registers."""

    name: str
    fields: dict[str, int]
    layer: str
    reads: list[Region] = field(default_factory=list[Region])
    writes: list[Region] = field(default_factory=list[Region])
    wants: dict[str, int] = field(default_factory=dict[str, int])
    """Where in the constants segment the first block lies that a field (`param`, `v`, `v_table`,
    `v_clamp`, `params`) must name; blocks of a `vec_drain` have multipliers and biases in one."""

    @property
    def engine(self) -> int:
        """Engine number (`spec.program.ENGINE_NAMES`)."""
        return engine_of(self.name, self.fields)


_DEFAULTS = {
    name: {item.name: item.default for item in instruction.fields}
    for name, instruction in BY_NAME.items()
}


def touch(instr: Instr, hardware: Hardware) -> None:
    """Narrow the SRAM regions of an instruction from whole tiles to what its fields reach."""
    found = accesses(hardware, instr.name, _DEFAULTS[instr.name] | instr.fields)
    for write, regions in ((False, instr.reads), (True, instr.writes)):
        regions[:] = [
            *(region for region in regions if region.space != "sram"),
            *(
                Region("sram", item.address, item.end)
                for item in found
                if item.sram and item.write is write
            ),
        ]
