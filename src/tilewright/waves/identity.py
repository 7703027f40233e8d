"""Whether a waveform is a run of a given program on a given chip.

The chip shows the digest of its target, the number of its instructions, and the code it fetches: in
the cycle after `mem_valid && mem_code`, `mem_read_data` holds the unit at `mem_address` of the code
(microarchitecture.md, "Modules of the RTL"). A waveform of another simulator may lack these; then
engines, number and least possible times of the instructions are all there is to go by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.spec.access import accesses
from tilewright.spec.hardware import Hardware
from tilewright.spec.isa import INSTRUCTION_BYTES, IllegalInstructionError
from tilewright.spec.program import (
    MAC,
    SEQ,
    VEC,
    Dispatched,
    Instr,
    decode_program,
    encode_program,
    full_fields,
    where,
)
from tilewright.spec.timing import ceil_div, dma_to_core
from tilewright.waves.reader import Sampled, Waveform

if TYPE_CHECKING:
    from tilewright.waves.retire import Retired

DIGEST_DIGITS = 16
"""Hexadecimal digits of the target's digest that a chip shows."""
CONSTANTS = ("target_digest", "code_length")
FETCH = ("mem_valid", "mem_code", "mem_address", "mem_read_data")
_OTHER = "is of another program"
OWN_RUN = "give a waveform of this program's own run on this target"


@dataclass(frozen=True)
class Shown:
    """What a waveform shows of its chip and its code."""

    target: int | None = None
    """`target_digest`; None where it is not shown, or is tied to zero."""
    length: int | None = None
    """Instructions of the code."""
    units: tuple[tuple[int, int, bytes], ...] = ()
    """Fetched: (cycle of the data, first byte of the code, content)."""

    @property
    def missing(self) -> list[str]:
        """What is not shown, in words."""
        parts: list[str] = []
        if self.target is None:
            parts.append("its chip (`target_digest`)")
        if not self.units:
            parts.append("the code it fetches (`mem_read_data` and the other `mem_` signals)")
        return parts


def identity_places(wave: Waveform, scope: str) -> dict[str, str]:
    """Return the full names of those signals that a waveform has."""
    names = [name for name in CONSTANTS if wave.has(scope, name)]
    if all(wave.has(scope, name) for name in FETCH):
        names += FETCH
    return {name: f"{scope}.{name}" for name in names}


def shown_of(sampled: Sampled) -> Shown:
    """Return what sampled signals show."""
    signals = sampled.signals
    target, length = (signals[name][0] or None if name in signals else None for name in CONSTANTS)
    units: list[tuple[int, int, bytes]] = []
    if all(name in signals for name in FETCH):
        size = sampled.widths["mem_read_data"] // 8
        valid, code, address, data = (signals[name] for name in FETCH)
        for cycle in range(1, sampled.cycles):
            if valid[cycle - 1] and code[cycle - 1]:
                units.append((cycle, address[cycle - 1], data[cycle].to_bytes(size, "little")))
    return Shown(target, length, tuple(units))


def warning_of(retired: Retired) -> str:
    """Return one line about what a waveform does not prove, or nothing."""
    parts = retired.shown.missing
    if not parts:
        return ""
    return (
        f"`{retired.source}` does not show {' and '.join(parts)}: only the engines, "
        "number and least times of the instructions were compared with the program"
    )


def stranger(
    retired: Retired, hardware: Hardware, program: Sequence[Instr]
) -> TilewrightError | None:
    """Return how a waveform shows another chip or other code, or None."""
    shown, source = retired.shown, retired.source
    digest = hardware.digest()[:DIGEST_DIGITS]
    if shown.target is not None and shown.target != int(digest, 16):
        return TilewrightError(
            "E0603",
            f"`{source}` is of another chip than target `{hardware.name}`",
            [f"`target_digest` is 0x{shown.target:016x}, that of the target is 0x{digest}"],
            "give a waveform of the RTL that was built for this target",
        )
    code = encode_program(program)
    count = len(code) // INSTRUCTION_BYTES
    if shown.length is not None and shown.length != count:
        return TilewrightError(
            "E0603",
            f"`{source}` {_OTHER}: its code has {shown.length} instructions, this one {count}",
            [f"`code_length` in cycle 0 is {shown.length}"],
            OWN_RUN,
        )
    wrong = min(
        ((at, cycle, unit) for cycle, at, unit in shown.units if _differs(code, at, unit)),
        default=None,
    )
    if wrong is None:
        return None
    at, cycle, unit = wrong
    place = next(i for i in range(len(unit)) if unit[i : i + 1] != code[at + i : at + i + 1])
    index = (at + place) // INSTRUCTION_BYTES
    what = f"fetches beyond the {count} instructions"
    if index < count:
        what = f"differs first in {where(index, program[index])}"
    return TilewrightError(
        "E0603",
        f"`{source}` {_OTHER}: {what}",
        [
            *_fields(shown, code, index),
            f"byte {at + place} of the code: 0x{unit[place]:02x} fetched in cycle {cycle}"
            + (f", 0x{code[at + place]:02x} in the program" if index < count else ""),
        ],
        OWN_RUN,
    )


def _differs(code: bytes, at: int, unit: bytes) -> bool:
    own = code[at : at + len(unit)]
    # The last unit may reach beyond the code, into memory that holds anything; where that is not
    # known (x), neither is the unit, and reads as zero.
    unknown = len(own) < len(unit) and not any(unit)
    return not own or (unit[: len(own)] != own and not unknown)


def _instruction(code: bytes, index: int) -> Instr | None:
    word = code[index * INSTRUCTION_BYTES :][:INSTRUCTION_BYTES]
    try:
        return decode_program(word)[0]
    except IllegalInstructionError:
        return None


def _fields(shown: Shown, code: bytes, index: int) -> list[str]:
    """Return in which fields the fetched instruction differs, where it was fetched as a whole."""
    content = bytearray(len(code))
    known = bytearray(len(code))
    for _, at, unit in shown.units:
        own = unit[: max(0, len(code) - at)]
        content[at : at + len(own)] = own
        known[at : at + len(own)] = b"\1" * len(own)
    low = index * INSTRUCTION_BYTES
    if index < 0 or low >= len(code) or not all(known[low : low + INSTRUCTION_BYTES]):
        return []
    ran, must = _instruction(bytes(content), index), _instruction(code, index)
    if ran is None or must is None:
        return []
    if ran.name != must.name:
        return [f"fetched is {ran.name}"]
    theirs, own = full_fields(ran), full_fields(must)
    names = [name for name in own if theirs[name] != own[name]]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    listed = ", ".join(f"{name} = {theirs[name]} (here {own[name]})" for name in names[:4])
    return [f"fetched has {listed}{more}"]


def least_cycles(hardware: Hardware, item: Dispatched) -> int:
    """Return the cycles from start to end below which no run of an instruction can be.

    Every port moves a word a cycle, whole words, and nothing is waited for.
    """
    f = item.fields
    if item.engine == SEQ:
        return 1
    if item.engine == MAC:
        steps = f["oc_blocks"] * f["k_h"] * f["k_w"] * f["c_blocks"]
        # The pop, a cycle of weights, a cycle for each pixel of each step.
        return 2 + steps * f["out_h"] * f["out_w"] + hardware.mac_latency
    words = 1
    for region in accesses(hardware, item.name, f):
        if item.engine == VEC and not region.write:
            continue
        unit = hardware.sram_word_bytes if region.sram else hardware.ddr_bus_bytes
        words = max(words, ceil_div(region.runs * region.run, unit))
    if item.engine == VEC:
        # The pop and the first read.
        return 2 + hardware.vector_latency + words
    factor = hardware.dma_stream_latency_factor if f.get("stream", 0) else 1
    # The pop and the last word's write, which follows its move.
    return 2 + dma_to_core(hardware, hardware.dma_latency * factor) + words


def first_dispatch(hardware: Hardware) -> int:
    """Return the cycle in which the first instruction is dispatched: nothing disturbs its fetch."""
    core, ddr = hardware.core_clock_mhz, hardware.ddr_clock_mhz
    units = ceil_div(INSTRUCTION_BYTES, hardware.ddr_bus_bytes)
    cycle = dma_to_core(hardware, hardware.dma_latency)
    while units:
        cycle += 1
        # A unit is granted in cycles in which DDR's enable gives a beat.
        units -= (cycle + 1) * ddr // core > cycle * ddr // core
    return cycle + 2


def begins_late(retired: Retired, hardware: Hardware) -> TilewrightError | None:
    """Return that a waveform lacks the run's first cycles, or None."""
    first, least = int(retired.issue[0]) if len(retired.issue) else -1, first_dispatch(hardware)
    if first < 0 or first >= least:
        return None
    return TilewrightError(
        "E0603",
        f"`{retired.source}` begins after the run, or is of another chip: it shows the first "
        f"dispatch in cycle {first}, and code cannot be there before cycle {least}",
        [f"on target `{hardware.name}`; cycle 0 is the first in which `run` is high"],
        "trace the whole run, from reset on",
    )


def impossible(
    retired: Retired, hardware: Hardware, stream: Sequence[Dispatched]
) -> TilewrightError | None:
    """Return which instruction of a complete log ends sooner than it can, or None."""
    known: dict[int, int] = {}
    for place, item in enumerate(stream):
        took = retired.latency(place)
        least = known.get(item.index)
        if least is None:
            least = known[item.index] = least_cycles(hardware, item)
        if took < least:
            return TilewrightError(
                "E0603",
                f"`{retired.source}` is not a run of this program: instruction {item.index} "
                f'({item.name}) of layer "{item.layer}" takes {took} cycles from its start in '
                f"cycle {int(retired.start[place])}, and cannot take less than {least}",
                [f"on target `{hardware.name}`"],
                OWN_RUN,
            )
    return None


@dataclass(frozen=True)
class Candidate:
    """A program a waveform may be of."""

    name: str
    code: Sequence[Instr]
    stream: list[Dispatched]


def misfit(retired: Retired, hardware: Hardware, of: Candidate) -> TilewrightError | None:
    """Return why a waveform is not a complete run of a program, or None."""
    from tilewright.waves.retire import mismatch

    error = stranger(retired, hardware, of.code) or mismatch(retired, of.stream)
    if error is None and retired.shown.missing:
        error = impossible(retired, hardware, of.stream)
    return error or begins_late(retired, hardware)


def program_of(
    retired: Retired, hardware: Hardware, candidates: Sequence[Candidate], hint: str
) -> Candidate:
    """Return the program a waveform is a complete run of.

    Args:
        retired: the waveform's log.
        hardware: the target.
        candidates: the programs; at least one.
        hint: how to name one when it fits several.

    Raises:
        TilewrightError: E0603 it is of none of them.
        UsageError: E0702 it fits several.
    """
    errors = [(item, misfit(retired, hardware, item)) for item in candidates]
    fitting = [item for item, error in errors if error is None]
    if len(fitting) > 1:
        raise UsageError(
            "E0702", f"`{retired.source}` fits several programs",
            [", ".join(item.name for item in fitting)], hint,
        )  # fmt: skip
    if fitting:
        return fitting[0]
    found = [(item.name, error) for item, error in errors if error is not None]
    if len({error.message for _, error in found}) == 1:
        raise found[0][1]
    raise TilewrightError(
        "E0603",
        f"`{retired.source}` is of none of the programs",
        [f"{name}: {error.message}" for name, error in found],
        found[0][1].hint,
    )
