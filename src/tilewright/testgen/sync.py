"""Semaphores for programs written without any: whatever program order means is kept.

`synchronise` gives every instruction its wait and signal masks: where two engines touch the same
bytes, one writing, the later instruction waits for the earlier, unless that already follows. The
convention of docs/concepts/machine.md (a semaphore an ordered pair of engines) makes matching by
count exact. A semaphore of a pair may also be used without need (`extra`), to exercise it.

Loops have fixed masks, so what happens between iterations must be the same every time:

- *fenced* loops: a `fence` before the loop and one at the end of every body; any nesting;
- *gated* loops: right before and behind the (nest of) loops every engine of the body has one
  instruction, a gate (layers `GATE`, `GATE_END`). The gates before hold the engines back until what
  precedes the loop is done and hand out the tokens that each iteration passes on to the next; the
  gates behind collect them and stand for the whole loop. Engine instructions stand in the innermost
  body only.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tilewright.spec.access import Access, accesses
from tilewright.spec.hardware import Hardware
from tilewright.spec.program import MAC, SEQ, Instr, engine_of, full_fields, sequence
from tilewright.spec.timing import pixel_blocks

GATE, GATE_END = "gate", "gate end"
"""Layers of the instructions before and behind a gated loop."""
FROM_ENGINE, TO_ENGINE = 30, 31
"""Semaphores an engine gives the sequencer, and the sequencer an engine."""


def semaphore(producer: int, consumer: int) -> int:
    """Return the number of the pair's semaphore."""
    return producer * 5 + consumer - (consumer > producer)


@dataclass(eq=False)
class _Node:
    """A static instruction of an engine, or a fence, with all it touches in all iterations."""

    instr: Instr
    engine: int
    regions: list[Access]
    span: tuple[int, int] = (0, 0)
    after_all_of: frozenset[int] = frozenset()
    """Engines whose earlier instructions must all be complete."""
    no_wait: frozenset[int] = frozenset()
    """Engines it must not wait for."""
    place: int = 0
    after: list[int] = field(default_factory=list[int])

    def conflicts(self, other: _Node) -> bool:
        return any(
            (mine.write or theirs.write) and mine.overlaps(theirs)
            for mine in self.regions
            for theirs in other.regions
        )


def is_loop_gated(program: Sequence[Instr], start: int) -> bool:
    """Tell whether the loop at `start` has gates before it."""
    return start > 0 and program[start - 1].layer == GATE


def loop_end(program: Sequence[Instr], start: int) -> int:
    """Return the position of the `end_loop` of the loop at `start`."""
    depth = 0
    for position in range(start, len(program)):
        depth += {"loop": 1, "end_loop": -1}.get(program[position].name, 0)
        if depth == 0:
            return position
    raise ValueError("the loop has no end")


def synchronise(
    program: Sequence[Instr],
    hardware: Hardware,
    registers: Mapping[int, int],
    *,
    seed: int = 0,
    extra: float = 0.1,
) -> list[Instr]:
    """Return the program with masks; those it had are dropped.

    Args:
        program: instructions, ending in `halt`.
        hardware: the target.
        registers: initial R registers.
        seed: of the order in which waits are chosen, and of the extra ones.
        extra: probability that an instruction also waits for some engine without need.

    Raises:
        ValueError: a drain has no convolution, or a gated loop not the gates it needs.
    """
    result = [
        Instr(instr.name, {k: v for k, v in instr.fields.items() if k not in ("wait", "signal")},
              instr.layer)
        for instr in program
    ]  # fmt: skip
    sync = _Sync(result, hardware, registers, random.Random(seed), extra)
    sync.run()
    return result


class _Sync:
    def __init__(
        self,
        program: list[Instr],
        hardware: Hardware,
        registers: Mapping[int, int],
        rng: random.Random,
        extra: float,
    ) -> None:
        self.program, self.rng, self.extra = program, rng, extra
        seen: list[set[tuple[tuple[str, int], ...]]] = [set() for _ in program]
        regions: list[list[Access]] = [[] for _ in program]
        for item in sequence(program, hardware.scalar_registers, registers):
            if item.engine == SEQ:
                continue
            key = tuple(item.fields.items())
            if key not in seen[item.index]:
                seen[item.index].add(key)
                regions[item.index] += accesses(hardware, item.name, item.fields)
        self.nodes = [
            _Node(instr, engine_of(instr.name, full_fields(instr)), own)
            for instr, own in zip(program, regions, strict=True)
        ]

    def run(self) -> None:
        straight: list[_Node] = []
        position = 0
        while position < len(self.program):
            instr = self.program[position]
            if instr.name == "loop" and is_loop_gated(self.program, position):
                end = loop_end(self.program, position)
                self._gated(position, end)
                position = end + 1
                continue
            if self.nodes[position].engine != SEQ or instr.name == "fence":
                straight.append(self.nodes[position])
            position += 1
        self._straight(straight)

    def _gated(self, start: int, end: int) -> None:
        """Order a gated loop's body; its gates stand for it in what is around."""
        body = [node for node in self.nodes[start : end + 1] if node.engine != SEQ]
        engines = sorted({node.engine for node in body})
        first, last = start, end
        while first > 0 and self.program[first - 1].layer == GATE:
            first -= 1
        while last + 1 < len(self.program) and self.program[last + 1].layer == GATE_END:
            last += 1
        before = {node.engine: node for node in self.nodes[first:start]}
        behind = {node.engine: node for node in self.nodes[end + 1 : last + 1]}
        if sorted(before) != engines or sorted(behind) != engines:
            raise ValueError("a gated loop needs one gate an engine before and behind it")
        others = frozenset(engines)
        self._straight(body)
        regions: dict[int, list[Access]] = {
            engine: [r for node in body if node.engine == engine for r in node.regions]
            for engine in engines
        }
        for engine in engines:
            # What lies before a gate is all complete; gates do not wait for each other.
            before[engine].regions = before[engine].regions + regions[engine]
            before[engine].after_all_of = others
            behind[engine].regions = behind[engine].regions + regions[engine]
            behind[engine].no_wait = others
        for producer in engines:
            for consumer in engines:
                if producer == consumer:
                    continue
                bit = 1 << semaphore(producer, consumer)
                own = [node for node in body if node.engine == consumer]
                theirs = [node for node in body if node.engine == producer]
                if own[0].instr.fields.get("wait", 0) & bit:
                    continue  # It waits for this iteration's, which follows the last one's.
                if theirs[-1].instr.fields.get("signal", 0) & bit:
                    continue  # The end of an iteration is waited for already.
                needed = any(a.conflicts(b) for a in own for b in theirs)
                if not needed and self.rng.random() >= self.extra:
                    continue
                for node in (before[producer], theirs[-1]):
                    node.instr.fields["signal"] = node.instr.fields.get("signal", 0) | bit
                for node in (own[0], behind[consumer]):
                    node.instr.fields["wait"] = node.instr.fields.get("wait", 0) | bit

    def _straight(self, nodes: Sequence[_Node]) -> None:
        """Order instructions executed once each, in this order."""
        history: list[list[_Node]] = [[] for _ in range(SEQ)]
        last: list[list[int]] = [[0] * SEQ for _ in range(SEQ)]
        pushed: list[_Node] = []
        gates: list[_Node] = []
        for node in nodes:
            instr, engine = node.instr, node.engine
            if instr.name == "fence":
                everything = [len(done) for done in history]
                last = [list(everything) for _ in range(SEQ)]
                gates = []
                continue
            start = list(last[engine])
            conv = None
            own: _Node | None = None
            if instr.name == "vec_drain":
                if not pushed:
                    raise ValueError("a drain has no convolution before it")
                conv = pushed.pop(0)
                if _blocks(conv.instr) > 2:
                    own = conv  # It cannot end before this begins.
            if instr.layer != GATE:
                gates = []
            needed = self._needed(node, history, start, own, gates)
            if instr.layer == GATE:
                gates.append(node)
            self.rng.shuffle(needed)
            for source in needed:
                if source.place <= start[source.engine]:
                    continue
                bit = 1 << semaphore(source.engine, engine)
                source.instr.fields["signal"] = source.instr.fields.get("signal", 0) | bit
                instr.fields["wait"] = instr.fields.get("wait", 0) | bit
                start = [max(pair) for pair in zip(start, source.after, strict=True)]
            history[engine].append(node)
            node.place = len(history[engine])
            node.after = start
            if conv is not None:
                node.after = [max(pair) for pair in zip(start, conv.after, strict=True)]
            node.after[engine] = node.place
            last[engine] = list(node.after)
            if instr.name == "mac_conv" and full_fields(instr)["push"]:
                pushed.append(node)

    def _needed(
        self,
        node: _Node,
        history: list[list[_Node]],
        start: list[int],
        own: _Node | None,
        gates: list[_Node],
    ) -> list[_Node]:
        """Return the latest instruction of every engine that `node` must wait for."""
        needed: list[_Node] = []
        extra = self.rng.randrange(SEQ) if self.rng.random() < self.extra else -1
        if node.instr.name == "vec_drain" and extra == MAC:
            extra = -1
        for other in range(SEQ):
            if other == node.engine or other in node.no_wait:
                continue
            pending = [item for item in history[other][start[other] :] if item not in gates]
            if own is not None and other == own.engine:
                pending = [item for item in pending if item.place < own.place]
            everything = other in node.after_all_of
            for item in reversed(pending):
                if everything or other == extra or node.conflicts(item):
                    needed.append(item)
                    break
        return needed


def _blocks(instr: Instr) -> int:
    f = full_fields(instr)
    return pixel_blocks(f)[0] * f["oc_blocks"]
