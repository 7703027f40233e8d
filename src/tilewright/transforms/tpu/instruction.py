"""An instruction being built: fields, who it is for, and the bytes it touches."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilewright.spec.isa import BY_NAME, Engine

MAC, VEC = 4, 5
"""Engine numbers of docs/concepts/machine.md; DMA channels are 0..3, the sequencer has none."""
ENGINES = 6


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

    @property
    def engine(self) -> int:
        """Engine number, or -1 for the sequencer."""
        kind = BY_NAME[self.name].engine
        if kind is Engine.DMA:
            return self.fields["channel"]
        return {Engine.MAC: MAC, Engine.VEC: VEC, Engine.SEQ: -1}[kind]
