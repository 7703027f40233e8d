"""From a failing program to a small one that fails in the same way.

Delta debugging in three rounds, repeated while something goes: leave out instructions (with their
semaphores), cut loops, bring fields back to their defaults. Every candidate is made legal again
(`programs.finish`) and thrown away if it cannot be; so what is left is always a program that a
correct chip must execute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tilewright.diagnostics import TilewrightError
from tilewright.spec.isa import BY_NAME, Field, Kind
from tilewright.spec.program import DEFAULTS, SEQ, Instr, engine_of, full_fields
from tilewright.testgen.programs import Case
from tilewright.testgen.sync import GATE, GATE_END, is_loop_gated, loop_end, synchronise

Fails = Callable[[Case], bool]
SHARED = ("out_h", "out_w", "block_rows", "oc_blocks", "cols", "cols_last", "m_half")
"""Fields that change together in convolutions and their drains."""


def copied(program: Sequence[Instr]) -> list[Instr]:
    """Return instructions that may be changed."""
    return [Instr(instr.name, dict(instr.fields), instr.layer) for instr in program]


def _of_engines(program: Sequence[Instr], engines: set[int]) -> list[Instr]:
    return [instr for instr in program if engine_of(instr.name, full_fields(instr)) in engines]


def tidy(program: Sequence[Instr]) -> list[Instr]:
    """Drop empty loops, and gates of engines that a loop no longer uses."""
    result = list(program)
    start = 0
    while start < len(result):
        if result[start].name != "loop":
            start += 1
            continue
        end = loop_end(result, start)
        body = [i for i in result[start : end + 1] if engine_of(i.name, full_fields(i)) != SEQ]
        engines = {engine_of(i.name, full_fields(i)) for i in body}
        gated = is_loop_gated(result, start)
        if not body:
            result = result[:start] + result[end + 1 :]
        first, last = start, start - 1 if not body else end
        while gated and first > 0 and result[first - 1].layer == GATE:
            first -= 1
        while gated and last + 1 < len(result) and result[last + 1].layer == GATE_END:
            last += 1

        stop = start if not body else end + 1
        before = _of_engines(result[first:start], engines)
        behind = _of_engines(result[stop : last + 1], engines)
        middle = result[start:stop]
        result = result[:first] + before + middle + behind + result[last + 1 :]
        start = first + len(before) + (len(middle) if gated else (1 if body else 0))
    return result


def _matches(program: Sequence[Instr]) -> dict[tuple[int, int], int]:
    """Return, for straight code, the partner of every (position, semaphore) by count."""
    open_: dict[int, list[int]] = {}
    partner: dict[tuple[int, int], int] = {}
    for position, instr in enumerate(program):
        for number in range(32):
            if instr.fields.get("wait", 0) >> number & 1 and open_.get(number):
                source = open_[number].pop(0)
                partner[position, number] = source
                partner[source, number] = position
            if instr.fields.get("signal", 0) >> number & 1:
                open_.setdefault(number, []).append(position)
    return partner


def without(program: Sequence[Instr], gone: set[int]) -> list[Instr]:
    """Return the program without some instructions; semaphores of theirs go on both sides."""
    partner = _matches(program)
    result = copied(program)
    for position in gone:
        for key, other in (("wait", "signal"), ("signal", "wait")):
            mask = program[position].fields.get(key, 0)
            for number in range(32):
                if mask >> number & 1 and (position, number) in partner:
                    fields = result[partner[position, number]].fields
                    fields[other] = fields.get(other, 0) & ~(1 << number)
    return [instr for position, instr in enumerate(result) if position not in gone]


@dataclass
class Shrinker:
    """Shrinks one failing case."""

    fails: Fails
    limit: int = 600
    """Candidates tried at most."""
    tried: int = 0
    again: bool = True
    """Whether semaphores are derived anew (else only those of dropped instructions go)."""

    def run(self, case: Case) -> Case:
        """Return a small case that fails as `case` does."""
        renewed = self._legal(case, copied(case.program))
        if renewed is not None and self._fails(renewed):
            case = renewed
        else:
            self.again = False
        size = None
        while size != _weight(case) and self.tried < self.limit:
            size = _weight(case)
            length = None
            while length != _weight(case) and self.tried < self.limit:
                length = _weight(case)
                case = self._drop(case)
                case = self._loops(case)
                case = self._groups(case)
            case = self._empty(case)
            case = self._fields(case)
            case = self._registers(case)
        return case

    def _empty(self, case: Case) -> Case:
        """Replace what cannot be left out by an instruction that does nothing.

        Places matter to instruction fetch.
        """
        nothing = Instr("add_reg", {"rd": 1})
        for position in range(len(case.program) - 1):
            instr = case.program[position]
            if _is_structure(instr) or instr.name in ("add_reg", "set_reg"):
                continue
            program = without(case.program, {position})
            program.insert(position, nothing)
            smaller = self._try(case, program)
            if smaller is not None:
                case = smaller
        return case

    def _legal(self, case: Case, program: list[Instr]) -> Case | None:
        try:
            if self.again:
                program = tidy(program)
                program = synchronise(
                    program, case.hardware, case.registers, seed=case.seed, extra=0
                )
            result = case.with_program(program)
            result.verify()
        except (TilewrightError, ValueError):
            return None
        return result

    def _fails(self, case: Case) -> bool:
        self.tried += 1
        return self.tried <= self.limit and self.fails(case)

    def _try(self, case: Case, program: list[Instr]) -> Case | None:
        candidate = self._legal(case, program)
        return candidate if candidate is not None and self._fails(candidate) else None

    def _drop(self, case: Case) -> Case:
        """Leave out stretches of instructions, halving their length."""
        length = max(1, len(case.program) // 2)
        while length:
            end = len(case.program) - 1  # `halt` stays.
            while end > 0 and self.tried < self.limit:
                start = max(0, end - length)
                gone = {
                    position
                    for position in range(start, end)
                    if not _is_structure(case.program[position])
                }
                smaller = self._try(case, without(case.program, gone)) if gone else None
                if smaller is not None:
                    case = smaller
                end = min(start, len(case.program) - 1)
            length //= 2
        return case

    def _groups(self, case: Case) -> Case:
        """Leave out a drain with the convolutions before it, from the end."""
        position = len(case.program) - 1
        while position > 0 and self.tried < self.limit:
            position = min(position, len(case.program)) - 1
            if position < 0 or case.program[position].name != "vec_drain":
                continue
            convs = _convolutions(case.program, position)
            for count in (len(convs), 1):
                gone = {position, *convs[-count:]} if convs else set[int]()
                smaller = self._try(case, without(case.program, gone)) if gone else None
                if smaller is not None:
                    case = smaller
                    break
        return case

    def _loops(self, case: Case) -> Case:
        """Drop loops with their gates, unwrap them, or cut their counts."""
        start = 0
        while start < len(case.program) and self.tried < self.limit:
            if case.program[start].name != "loop":
                start += 1
                continue
            for program in _loop_candidates(case.program, start):
                smaller = self._try(case, program)
                if smaller is not None:
                    case = smaller
                    break
            else:
                start += 1
        return case

    def _fields(self, case: Case) -> Case:
        for position in range(len(case.program)):
            if position >= len(case.program):
                break
            for name in list(case.program[position].fields):
                if name in ("wait", "signal", "channel") or self.tried >= self.limit:
                    continue
                case = self._field(case, position, name)
        return case

    def _field(self, case: Case, position: int, name: str) -> Case:
        instr = case.program[position]
        if name not in instr.fields:
            return case
        item = BY_NAME[instr.name].field[name]
        for value in _simpler(item, instr.fields[name]):
            program = copied(case.program)
            changed = [position]
            if name in SHARED and instr.name in ("mac_conv", "vec_drain"):
                changed = _group(program, position)
            for at in changed:
                program[at].fields[name] = value
                if value == DEFAULTS[program[at].name][name]:
                    del program[at].fields[name]
            smaller = self._try(case, program)
            if smaller is not None:
                return smaller
        return case

    def _registers(self, case: Case) -> Case:
        from dataclasses import replace

        for number in list(case.registers):
            registers = {k: v for k, v in case.registers.items() if k != number}
            smaller = self._try(replace(case, registers=registers), copied(case.program))
            if smaller is not None:
                case = smaller
        return case


def _is_structure(instr: Instr) -> bool:
    return instr.name in ("loop", "end_loop", "halt") or instr.layer in (GATE, GATE_END)


def _weight(case: Case) -> tuple[int, int]:
    fields = sum(
        1 + abs(value)
        for instr in case.program
        for name, value in instr.fields.items()
        if name not in ("wait", "signal") and value != DEFAULTS[instr.name][name]
    )
    return len(case.program), fields + len(case.registers)


def _convolutions(program: Sequence[Instr], drain: int) -> list[int]:
    """Return the convolutions that a drain empties, accumulating ones before it included."""
    order = [p for p in range(drain + 1) if program[p].name == "vec_drain"].index(drain)
    pushes = [
        p
        for p in range(len(program))
        if program[p].name == "mac_conv" and program[p].fields.get("push", 1)
    ]
    if order >= len(pushes):
        return []
    chain = [pushes[order]]
    earlier = pushes[order]
    while program[earlier].fields.get("accumulate"):
        before = [p for p in range(earlier) if program[p].name == "mac_conv"]
        if not before:
            break
        earlier = before[-1]
        chain.insert(0, earlier)
    return chain


def _group(program: Sequence[Instr], position: int) -> list[int]:
    """Return the convolutions and the drain that `position` belongs to."""
    for drain in range(len(program)):
        if program[drain].name == "vec_drain":
            group = [*_convolutions(program, drain), drain]
            if position in group:
                return group
    return [position]


def _simpler(item: Field, value: int) -> Iterator[int]:
    """Yield simpler values than `value`, the simplest first."""
    if value == item.default:
        return
    yield item.default
    if item.kind in (Kind.SRAM, Kind.DDR):
        for align in (4096, 64, 8):
            if value % align:
                yield value - value % align
    elif item.kind in (Kind.SIZE, Kind.STRIDE, Kind.NUMBER):
        for smaller in (2, 3, value // 2, value - 1):
            if item.low <= smaller < value:
                yield smaller
        if value < 0:
            yield value // 2


def _loop_candidates(program: Sequence[Instr], start: int) -> Iterator[list[Instr]]:
    end = loop_end(program, start)
    first, last = start, end
    while is_loop_gated(program, start) and first > 0 and program[first - 1].layer == GATE:
        first -= 1
    while last + 1 < len(program) and program[last + 1].layer == GATE_END:
        last += 1
    yield without(program, set(range(first, last + 1)))
    count = program[start].fields.get("count", 1)
    body = {start, end, *range(first, start), *range(end + 1, last + 1)}
    yield without(program, body)
    nested = [p for p in range(start, end) if program[p].name == "loop" and p > start]
    if nested and nested[0] == start + 1 and program[end - 1].name == "end_loop":
        yield without(program, {start, end})
    for smaller in (2, 3, count // 2, count - 1):
        if 1 < smaller < count:
            result = copied(program)
            result[start].fields["count"] = smaller
            yield result


def shrink(case: Case, fails: Fails, limit: int = 600) -> Case:
    """Return a small case that still fails.

    Args:
        case: a legal case for which `fails` holds.
        fails: tells whether a case fails in the same way.
        limit: candidates tried at most.
    """
    return Shrinker(fails, limit).run(case)
