"""The rules of single instructions (`spec/limits.py`), checked once for all equal instructions."""

from __future__ import annotations

from functools import lru_cache

from tilewright.sim.state import machine_error
from tilewright.spec.hardware import Hardware
from tilewright.spec.limits import violations
from tilewright.spec.program import Dispatched

MAX_KNOWN = 1 << 16
"""Legal instructions remembered; bounds memory (about 0.5 kB each), not what can be checked."""


class Checker:
    """Checks instructions against the limits of one target."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._legal: set[tuple[object, ...]] = set()

    def check(self, instr: Dispatched) -> None:
        """Accept an instruction.

        Raises:
            TilewrightError: E0602 with all limits it breaks.
        """
        # Wait and signal masks come first and no limit depends on them.
        key = (instr.name, *list(instr.fields.values())[2:])
        if key in self._legal:
            return
        broken = [rule.message for rule in violations(self._hardware, instr.name, instr.fields)]
        if broken:
            raise machine_error(instr, broken[0], broken[1:])
        if len(self._legal) >= MAX_KNOWN:
            self._legal.clear()
        self._legal.add(key)


@lru_cache(maxsize=4)
def checker(hardware: Hardware) -> Checker:
    """Return the checker of a target: what it accepted once needs no second look in a later run."""
    return Checker(hardware)
