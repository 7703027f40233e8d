"""The chip-level verifier: what a program must keep so that the machine computes what it says.

Program order is the meaning of a program. Engines run beside each other, so any two instructions of
different engines that touch a byte, one of them writing, must be ordered by semaphores as they are
in the program. The order that semaphores give is computed with vector clocks: entry `e` of an
instruction's clock is how many instructions of engine `e` have certainly completed before it
starts. Waits are matched to signals by count, which is exact because every semaphore has one
producing and one consuming engine and both queues are in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import TilewrightError
from tilewright.spec.access import Access, accesses, conv_accesses
from tilewright.spec.hardware import Hardware
from tilewright.spec.isa import BY_NAME
from tilewright.spec.limits import violations
from tilewright.spec.program import (
    ENGINE_NAMES,
    SEQ,
    Dispatched,
    Instr,
    sequence,
    where,
)

SEMAPHORE_MAX = 65535
PAIRED = ("out_h", "out_w", "block_rows", "oc_blocks", "cols_last", "m_half")
"""Fields a `vec_drain` shares with the `mac_conv` it drains."""


@dataclass(frozen=True)
class ProgramSummary:
    """What the verifier counted."""

    instructions: int
    """Dispatched, loops unrolled."""
    ddr_high: int
    """First DDR address no instruction reaches."""


def default_registers(hardware: Hardware) -> dict[int, int]:
    """Return R1 and R2 so far apart that constants and workspace cannot meet."""
    return {1: 0, 2: 1 << (hardware.ddr_address_bits - 1)}


def verify_program(
    program: Sequence[Instr],
    hardware: Hardware,
    *,
    registers: Mapping[int, int] | None = None,
) -> ProgramSummary:
    """Check a program against its chip.

    Args:
        program: the instructions; `tpu.program` ops give them by `instructions()`.
        hardware: the target.
        registers: initial R registers; by default R1 (constants) is 0 and R2 (workspace) lies in
            the upper half of DDR.

    Raises:
        TilewrightError: E0501 naming layer and instruction of the first broken rule.
    """
    _check_fields(program)
    initial = default_registers(hardware) if registers is None else registers
    try:
        stream = list(sequence(program, hardware.scalar_registers, initial))
    except TilewrightError as error:
        raise TilewrightError("E0501", error.message, error.details, error.hint) from error
    regions = _check_limits(stream, hardware)
    pairs = _check_pairs(stream)
    clocks = _clocks(stream, pairs)
    _check_progress(stream, hardware)
    _check_order(stream, regions, clocks, hardware)
    high = max((region.end for own in regions for region in own if not region.sram), default=0)
    return ProgramSummary(len(stream), high)


def _error(
    item: Dispatched, message: str, details: Sequence[str] = (), hint: str = ""
) -> TilewrightError:
    return TilewrightError(
        "E0501",
        f'layer "{item.layer}": instruction {item.index} ({item.name}): {message}',
        list(details),
        hint or None,
    )


_RANGES = {
    name: {field.name: (field.low, field.high) for field in instruction.fields}
    for name, instruction in BY_NAME.items()
}


def _check_fields(program: Sequence[Instr]) -> None:
    for index, instr in enumerate(program):
        ranges = _RANGES.get(instr.name)
        if ranges is None:
            raise TilewrightError("E0501", f"{where(index, instr)}: unknown instruction")
        for name, value in instr.fields.items():
            limits = ranges.get(name)
            if limits is None:
                raise TilewrightError("E0501", f"{where(index, instr)}: there is no field `{name}`")
            if not limits[0] <= value <= limits[1]:
                raise TilewrightError(
                    "E0501",
                    f"{where(index, instr)}: {name} must be {limits[0]}..{limits[1]}, not {value}",
                )


def _check_limits(stream: list[Dispatched], hardware: Hardware) -> list[list[Access]]:
    """Check each instruction by itself; return what it touches, one list for all equal ones."""
    known: dict[tuple[object, ...], list[Access]] = {}
    regions: list[list[Access]] = []
    for item in stream:
        f = item.fields
        # Wait and signal masks come first and touch nothing.
        key = (item.name, *list(f.values())[2:])
        own = known.get(key)
        if own is None:
            own = known[key] = accesses(hardware, item.name, f)
            broken = list(violations(hardware, item.name, f, own))
            if broken:
                raise _error(
                    item, broken[0].message, [rule.message for rule in broken[1:]], broken[0].hint
                )
        regions.append(own)
    return regions


def _check_pairs(stream: list[Dispatched]) -> dict[int, int]:
    """Return the `mac_conv` of every `vec_drain`, by position."""
    waiting: deque[int] = deque()
    pairs: dict[int, int] = {}
    kept: list[tuple[int, int, bool] | None] = [None, None]
    for position, item in enumerate(stream):
        f = item.fields
        if item.name == "mac_conv":
            if f["push"]:
                waiting.append(position)
            _check_kept(item, kept)
        elif item.name == "vec_drain":
            if not waiting:
                raise _error(item, "there is no mac_conv with push = 1 before it to drain")
            partner = pairs[position] = waiting.popleft()
            _check_geometry(item, stream[partner])
    if waiting:
        item = stream[waiting[0]]
        raise _error(item, "its accumulators are pushed but never drained")
    return pairs


def _check_geometry(drain: Dispatched, conv: Dispatched) -> None:
    f, g = drain.fields, conv.fields
    names = (*PAIRED, "cols") if f["oc_blocks"] > 1 else PAIRED
    for name in names:
        if f[name] != g[name]:
            raise _error(
                drain,
                f"{name} must be {g[name]} as in the mac_conv it drains, not {f[name]}",
                [f'mac_conv: instruction {conv.index} of layer "{conv.layer}"'],
            )
    if (f["dtype"] == 2) != (g["dtype"] == 2):
        raise _error(drain, "dtype must be fp16 exactly when that of the mac_conv it drains is")
    for write in conv_accesses("vec_drain", f):
        for read in conv_accesses("mac_conv", g):
            if write.write and not read.write and write.overlaps(read):
                raise _error(
                    drain,
                    f"dst overlaps {read.operand} of the mac_conv it drains: both run at once",
                    [f'mac_conv: instruction {conv.index} of layer "{conv.layer}"'],
                )


def _check_kept(item: Dispatched, kept: list[tuple[int, int, bool] | None]) -> None:
    """Check that `accumulate` finds accumulators of its shape; note what halves hold after it."""
    f = item.fields
    pixel_blocks = -(-f["out_h"] // f["block_rows"])
    blocks = min(2, pixel_blocks * f["oc_blocks"])
    for block in range(blocks):
        half = f["m_half"] ^ block
        ob, pb = divmod(block, pixel_blocks)
        rows = min(f["block_rows"], f["out_h"] - pb * f["block_rows"])
        cols = f["cols_last"] if ob == f["oc_blocks"] - 1 else f["cols"]
        shape = (rows * f["out_w"], cols, f["dtype"] == 2)
        if f["accumulate"]:
            found = kept[half]
            if found is None:
                raise _error(
                    item,
                    f"accumulate reads half {half} of the M registers, which holds nothing",
                    hint="a mac_conv with push = 0 must fill it first",
                )
            if found != shape:
                raise _error(
                    item,
                    f"accumulate reads {shape[0]} pixels x {shape[1]} columns of half {half}, "
                    f"which holds {found[0]} x {found[1]}",
                )
        kept[half] = None if f["push"] else shape


# Clocks.


@dataclass
class _Clocks:
    """`before[i, e]`: instructions of engine e completed before instruction i starts."""

    before: npt.NDArray[np.int64]
    place: npt.NDArray[np.int64]
    """1-based number of every instruction on its engine."""


@cache
def _bits(mask: int) -> tuple[int, ...]:
    return tuple(number for number in range(32) if mask >> number & 1)


def _clocks(stream: list[Dispatched], pairs: dict[int, int]) -> _Clocks:
    count = SEQ + 1
    before: list[list[int]] = []
    after: list[list[int]] = []
    places: list[int] = []
    done = [0] * count
    last: list[list[int]] = [[0] * count for _ in range(count)]
    signals: list[deque[int]] = [deque() for _ in range(32)]
    producers: list[int | None] = [None] * 32
    consumers: list[int | None] = [None] * 32
    fence = [0] * count
    for position, item in enumerate(stream):
        engine = item.engine
        start = [max(pair) for pair in zip(last[engine], fence, strict=True)]
        f = item.fields
        if f["wait"]:
            for number in _bits(f["wait"]):
                _one_engine(consumers, number, item, "waited for")
                if not signals[number]:
                    raise _error(
                        item,
                        f"it waits for semaphore {number}, which no earlier instruction signals",
                    )
                source = after[signals[number].popleft()]
                start = [max(pair) for pair in zip(start, source, strict=True)]
        if item.name in ("fence", "halt"):
            for other in last:
                start = [max(pair) for pair in zip(start, other, strict=True)]
            fence = start
        done[engine] += 1
        complete = list(start)
        if item.name == "vec_drain":
            # The last block is drained after its mac_conv has made it.
            conv = after[pairs[position]]
            complete = [max(pair) for pair in zip(complete, conv, strict=True)]
        complete[engine] = done[engine]
        before.append(start)
        after.append(complete)
        places.append(done[engine])
        last[engine] = complete
        if f["signal"]:
            for number in _bits(f["signal"]):
                _one_engine(producers, number, item, "signalled")
                signals[number].append(position)
                if len(signals[number]) > SEMAPHORE_MAX:
                    raise _error(item, f"semaphore {number} may overflow {SEMAPHORE_MAX}")
    for number, left in enumerate(signals):
        if left:
            raise _error(
                stream[left[0]],
                f"semaphore {number} is signalled {len(left)} times more than it is waited for",
            )
    return _Clocks(np.array(before, np.int64).reshape(-1, count), np.array(places, np.int64))


def _one_engine(engines: list[int | None], number: int, item: Dispatched, verb: str) -> None:
    known = engines[number]
    if known is None:
        engines[number] = item.engine
    elif known != item.engine:
        raise _error(
            item,
            f"semaphore {number} must be {verb} by one engine, not by both "
            f"{ENGINE_NAMES[known]} and {ENGINE_NAMES[item.engine]}",
        )


def _blocks(item: Dispatched) -> int:
    """Return the blocks of a mac_conv or vec_drain, else 0."""
    if item.name not in ("mac_conv", "vec_drain"):
        return 0
    f = item.fields
    return -(-f["out_h"] // f["block_rows"]) * f["oc_blocks"]


def _check_progress(stream: list[Dispatched], hardware: Hardware) -> None:
    """Execute queues, semaphores and the handshake of the halves without time or values.

    Every wait has one waiter, so whether the machine gets stuck does not depend on the order.
    """
    semaphores = [0] * 32
    queues: list[deque[int]] = [deque() for _ in range(SEQ)]
    blocks_left = [0] * SEQ
    running = [-1] * SEQ
    full = [False, False]
    pushed = drained = 0

    def begin(engine: int) -> bool:
        item = stream[queues[engine][0]]
        waits = _bits(item.fields["wait"])
        if not all(semaphores[number] for number in waits):
            return False
        for number in waits:
            semaphores[number] -= 1
        running[engine] = queues[engine].popleft()
        blocks_left[engine] = _blocks(item)
        return True

    def step(engine: int) -> bool:
        nonlocal pushed, drained
        moved = False
        if running[engine] < 0:
            if not queues[engine] or not begin(engine):
                return False
            moved = True
        item = stream[running[engine]]
        f = item.fields
        while blocks_left[engine]:
            number = _blocks(item) - blocks_left[engine]
            half = f["m_half"] ^ (number & 1)
            if item.name == "mac_conv":
                if full[half]:
                    break
                if f["push"]:
                    full[half] = True
                    pushed += 1
            elif pushed == drained:
                break
            else:
                full[half] = False
                drained += 1
            blocks_left[engine] -= 1
            moved = True
        if not blocks_left[engine]:
            for number in _bits(item.fields["signal"]):
                semaphores[number] += 1
            running[engine] = -1
            moved = True
        return moved

    def run() -> bool:
        moved = False
        again = True
        while again:
            again = False
            for engine in range(SEQ):
                while (queues[engine] or running[engine] >= 0) and step(engine):
                    again = moved = True
        return moved

    def stuck(item: Dispatched, why: str) -> TilewrightError:
        details: list[str] = []
        for engine in range(SEQ):
            position = running[engine]
            if position < 0 and queues[engine]:
                position = queues[engine][0]
            if position < 0:
                continue
            held = stream[position]
            missing = [n for n in _bits(held.fields["wait"]) if not semaphores[n]]
            reason = f"semaphores {missing}" if running[engine] < 0 else "the M registers' halves"
            details.append(
                f"{ENGINE_NAMES[engine]}: instruction {held.index} ({held.name}) of layer "
                f'"{held.layer}" waits for {reason}'
            )
        return _error(item, f"deadlock: {why}", details)

    for position, item in enumerate(stream):
        if item.engine == SEQ:
            run()
            waits = _bits(item.fields["wait"])
            if not all(semaphores[number] for number in waits):
                raise stuck(item, "it waits for a semaphore")
            for number in waits:
                semaphores[number] -= 1
            for number in _bits(item.fields["signal"]):
                semaphores[number] += 1
            busy = any(queues) or any(other >= 0 for other in running)
            if item.name in ("fence", "halt") and busy:
                raise stuck(item, "it waits for all engines")
            continue
        queue = queues[item.engine]
        if len(queue) >= hardware.queue_depth:
            run()
            if len(queue) >= hardware.queue_depth:
                raise stuck(item, f"the queue of {ENGINE_NAMES[item.engine]} is full")
        queue.append(position)


# Order of accesses.


class _Memory:
    """Latest reader and writer of every granule, per engine (a program's length fits int32)."""

    def __init__(self, granules: int) -> None:
        self.read = np.zeros((SEQ, granules), np.int32)
        self.written = np.zeros((SEQ, granules), np.int32)


def _check_order(
    stream: list[Dispatched],
    all_regions: list[list[Access]],
    clocks: _Clocks,
    hardware: Hardware,
) -> None:
    word = hardware.sram_word_bytes
    sram = _Memory(hardware.sram_size // word)
    ddr = _DdrLog()
    latest = np.maximum.reduce
    history: list[list[int]] = [[] for _ in range(SEQ)]
    for position, item in enumerate(stream):
        engine = item.engine
        if engine == SEQ:
            continue
        before = clocks.before[position, :SEQ]
        place = int(clocks.place[position])
        regions = all_regions[position]
        for region in regions:
            if region.sram:
                span = slice(region.address // word, -(-region.end // word))
                # One's own engine is never late: all earlier on it counts as complete.
                late = latest(sram.written[:, span], axis=1) > before
                if region.write:
                    late |= latest(sram.read[:, span], axis=1) > before
                if not late.any():
                    continue
                for other_engine in np.flatnonzero(late):
                    # Words meet; look for bytes among what is not known to be complete.
                    pending = history[other_engine][int(before[other_engine]) :]
                    for other in pending:
                        _confirm_one(stream, all_regions, other, position, region)
            else:
                for other in ddr.conflicts(region, engine, before):
                    _confirm_one(stream, all_regions, other, position, region)
        for region in regions:
            if region.sram:
                span = slice(region.address // word, -(-region.end // word))
                (sram.written if region.write else sram.read)[engine, span] = place
            else:
                ddr.add(region, engine, place, position)
        history[engine].append(position)


def _confirm_one(
    stream: list[Dispatched],
    regions: list[list[Access]],
    other: int,
    position: int,
    region: Access,
) -> None:
    first, second = stream[other], stream[position]
    for earlier in regions[other]:
        if not (earlier.write or region.write) or not earlier.overlaps(region):
            continue
        kind = "write" if region.write else "read"
        past = "written" if earlier.write else "read"
        space = "SRAM" if region.sram else "DDR"
        low = max(earlier.address, region.address)
        raise _error(
            second,
            f"{region.operand}: it may {kind} {space} near 0x{low:x} before instruction "
            f'{first.index} ({first.name}) of layer "{first.layer}" has {past} it',
            [
                f"{ENGINE_NAMES[first.engine]} and {ENGINE_NAMES[second.engine]} are not ordered "
                f"here by a semaphore",
                f"{first.name}.{earlier.operand}: 0x{earlier.address:x}..0x{earlier.end - 1:x}",
                f"{second.name}.{region.operand}: 0x{region.address:x}..0x{region.end - 1:x}",
            ],
            f"signal a semaphore in instruction {first.index} and wait for it in "
            f"instruction {second.index}",
        )


class _DdrLog:
    """DDR regions by engine and direction, with intervals in arrays for fast search."""

    def __init__(self) -> None:
        self.lists = {(engine, write): _Intervals() for engine in range(4) for write in (0, 1)}

    def add(self, region: Access, engine: int, place: int, position: int) -> None:
        self.lists[engine, int(region.write)].add(region, place, position)

    def conflicts(self, region: Access, engine: int, before: npt.NDArray[np.int64]) -> list[int]:
        found: list[int] = []
        for (other, write), intervals in self.lists.items():
            if other != engine and (write or region.write):
                found += intervals.meeting(region, int(before[other]))
        return found


class _Intervals:
    """Growing arrays of (low, high, place, position), in order of place."""

    def __init__(self) -> None:
        self.rows = np.zeros((4, 64), np.int64)
        self.count = 0
        self.latest = 0
        """Place of the last."""

    def add(self, region: Access, place: int, position: int) -> None:
        if self.count == self.rows.shape[1]:
            self.rows = np.concatenate((self.rows, np.zeros_like(self.rows)), axis=1)
        self.rows[:, self.count] = (region.address, region.end, place, position)
        self.count += 1
        self.latest = place

    def meeting(self, region: Access, completed: int) -> list[int]:
        if self.latest <= completed:
            return []
        low, high, place, position = self.rows[:, : self.count]
        first = int(np.searchsorted(place, completed, side="right"))
        hit = (low[first:] < region.end) & (high[first:] > region.address)
        return position[first:][hit].tolist()
