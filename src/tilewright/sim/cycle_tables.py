"""What every `vec_resize` of a program finds in its tables, for the cycle simulator.

Which source words a `vec_resize` reads stands in SRAM, and the cycle simulator computes no values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tilewright.sim.functional import FunctionalSimulator
from tilewright.sim.state import State
from tilewright.spec.hardware import Hardware
from tilewright.spec.program import Dispatched, Instr

Indices = npt.NDArray[np.int64]


def table_indices(state: State, f: Mapping[str, int]) -> tuple[Indices, Indices]:
    """Return row and column indices that a `vec_resize` with all its fields `f` finds in SRAM."""

    def read(name: str, count: int) -> Indices:
        table = state.view(name, f[name], (count, 2), (8, 2), np.dtype("<u2"))
        return table.astype(np.int64)

    return read("table_y", f["out_h"]), read("table_x", f["out_w"])


def resize_tables(
    hardware: Hardware,
    code: bytes | Sequence[Instr],
    ddr: npt.NDArray[np.uint8],
    *,
    registers: Mapping[int, int] | None = None,
) -> list[tuple[Indices, Indices]]:
    """Run a program on a copy of `ddr`; return the indices of each `vec_resize`, in order.

    Raises:
        TilewrightError: as `FunctionalSimulator.run`.
    """
    found: list[tuple[Indices, Indices]] = []

    def look(instr: Dispatched, state: State) -> None:
        # Its result does not overlap its tables: they are as it read them.
        if instr.name == "vec_resize":
            found.append(table_indices(state, instr.fields))

    FunctionalSimulator(hardware).run(code, ddr.copy(), registers=registers, hook=look)
    return found
