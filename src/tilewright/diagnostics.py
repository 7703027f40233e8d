"""Errors a user can understand: code, what, where, legal values, hint.

Every message a user may meet has a code in `CODES`; `docs/reference/errors.md` is generated from
that table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

CODES: dict[str, str] = {
    "E0101": "The model file cannot be read.",
    "E0102": "The model uses operators that are not supported.",
    "E0103": "A tensor shape is dynamic or inconsistent.",
    "E0104": "An operator has an attribute or input that is not supported.",
    "E0105": "The model contains values that are not finite.",
    "E0106": "The model is malformed.",
    "E0201": "The target file is wrong.",
    "E0301": "Calibration data is missing or unusable.",
    "E0302": "An accumulator could overflow.",
    "E0303": "Quantization accuracy drop too large.",
    "E0304": "A value cannot be represented in the requested number type.",
    "E0401": "Out of memory during allocation.",
    "E0402": "A layer cannot be mapped to the target.",
    "E0403": "Layout conversion failed.",
    "E0501": "The IR is malformed or breaks a limit of the chip.",
    "E0502": "Two levels of the compiler disagree.",
    "E0601": "A package or binary is malformed or does not fit.",
    "E0602": "A program deadlocks or breaks a rule of the machine.",
    "E0603": "A waveform is incomplete or does not belong to the program.",
    "E0701": "A file cannot be read or written.",
    "E0702": "A command-line argument is wrong.",
    "E0703": "An optional part of tilewright is not installed.",
    "E0801": "A tool that simulates the RTL is missing.",
    "E0802": "The target cannot be built in RTL, or a program needs what the RTL does not have.",
    "E0803": "The RTL does not build, or the built RTL does not work.",
    "E0804": "A run of the RTL reached its limit of cycles.",
}


@dataclass
class TilewrightError(Exception):
    """A problem with the user's input; printed without a traceback, exit code 1.

    Prints as::

        error[E0402]: conv "block3/conv2" cannot run on the array
          kernel height is 11; `edge16` supports 1..7
        hint: ...
    """

    code: str
    """A key of `CODES`."""
    message: str
    """One line: what, and where in the user's model."""
    details: list[str] = field(default_factory=list[str])
    """Further lines: the offending values and the legal ones."""
    hint: str | None = None

    def __post_init__(self) -> None:
        super().__init__(self.message)
        assert self.code in CODES, self.code

    def __str__(self) -> str:
        lines = [f"error[{self.code}]: {self.message}", *(f"  {line}" for line in self.details)]
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


class UsageError(TilewrightError):
    """The command line is wrong; exit code 2."""


def suggest(word: str, known: Iterable[str]) -> str | None:
    """Return a hint that names the known words nearest to `word`, or None."""
    import difflib

    near = difflib.get_close_matches(word, list(known), n=3)
    return f"did you mean {' or '.join(f'`{name}`' for name in near)}?" if near else None
