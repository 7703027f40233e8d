"""Where the SRAM buffers of a function lie: their lives, what must be apart, their addresses.

Positions count the ops of the function's block. A buffer is alive from the position of its
`memref.alloc` (or of the loop around it) to that of its last use. Multiplications are issued with
the requantisation that takes up their sums, and results are written then: that is where operands
are read and where a lookup's own result begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from xdsl.dialects import memref
from xdsl.dialects.builtin import MemRefType
from xdsl.dialects.linalg.ops import GenericOp
from xdsl.ir import Operation, SSAValue

from tilewright.diagnostics import TilewrightError
from tilewright.schedule.footprint import align, ones_bytes, parameter_bytes
from tilewright.schedule.placement import Item, TileDoesNotFit, place_network
from tilewright.transforms.tpu.nests import (
    HELD,
    Nests,
    attr_int,
    attr_str,
    ends_in_half,
    layer_of,
    memory_space,
    root,
    users,
    value_bytes,
)
from tilewright.transforms.tpu.views import Alternating, Tile

KEPT = "kept"
"""Attribute of tiles of constants that stay to the end of the program: no nest's own."""
STREAMED = ("input", "output", HELD)
"""Roles of buffers that two engines work on at the same time; others are small or read once."""


@dataclass
class _Nest:
    """Ops that share tiles: what one layer, and what is fused to it, does."""

    allocs: list[memref.AllocOp] = field(default_factory=list[memref.AllocOp])
    generics: list[GenericOp] = field(default_factory=list[GenericOp])
    first: int = 1 << 60
    last: int = -1
    layer: str = ""
    items: list[str] = field(default_factory=list[str])


@dataclass
class _Buffer:
    """What becomes an `Item`."""

    name: str
    role: str
    size: int
    slots: int
    first: int
    last: int
    layer: str
    early: int | None = None
    apart: list[str] = field(default_factory=list[str])
    beside: list[str] = field(default_factory=list[str])

    def use(self, *positions: int) -> None:
        """Make it alive at some positions."""
        self.first = min(self.first, *positions)
        self.last = max(self.last, *positions)


def lay_out(nests: Nests) -> None:
    """Give every SRAM buffer of the function its addresses.

    Raises:
        TilewrightError: E0401, naming the layer and the buffers alive where most are.
    """
    _Layout(nests).run()


class _Layout:
    def __init__(self, nests: Nests) -> None:
        self.nests = nests
        self.hardware = nests.hardware
        self.position: dict[Operation, int] = {}
        self.allocs: list[memref.AllocOp] = []
        self.generics: list[GenericOp] = []
        for index, top in enumerate(nests.function.body.block.ops):
            for op in top.walk():
                self.position[op] = index
                if isinstance(op, memref.AllocOp) and _space(op.memref) != 0:
                    self.allocs.append(op)
                elif isinstance(op, GenericOp):
                    self.generics.append(op)
        self.buffers: dict[str, _Buffer] = {}
        self.names: dict[SSAValue, str] = {}
        self.implicit: dict[GenericOp, str] = {}
        self.issued: dict[SSAValue, int] = {}
        """Where the reductions on an accumulator are issued at the latest."""

    def run(self) -> None:
        nests = self.nests
        for op in self.generics:
            kind = attr_str(op, "kind")
            if kind == "requant":
                acc = root(op.inputs[0])
                self.issued[acc] = max(self.issued.get(acc, 0), self.position[op])
            elif kind == "eltwise" and len(op.inputs) > 1:
                # In the nest of a convolution the one that is loaded, else the second.
                swapped = root(op.inputs[1]) is root(op.outputs[0])
                nests.second_inputs.add(root(op.inputs[0 if swapped else 1]))
        for op in self.allocs:
            if _space(op.memref) == 1:
                self._add(op)
        groups = self._groups()
        for group in groups:
            self._implicit_tiles(group)
        for op in self.generics:
            self._relate(op)
        for group in groups:
            self._wishes(group)
        self._steps(groups)
        items = [
            Item(
                b.name, b.role, b.size, b.slots, b.first, b.last, tuple(dict.fromkeys(b.apart)),
                tuple(dict.fromkeys(b.beside)), b.early,
            )
            for b in self.buffers.values()
        ]  # fmt: skip
        alive = self._alive()
        placed = place_network(self.hardware, items)
        if isinstance(placed, TileDoesNotFit):
            raise self._refusal(placed, groups)
        nests.peak_bytes = max(alive, default=0)
        for group in groups:
            used = max(alive[group.first : group.last + 1], default=0)
            nests.peaks[group.layer] = max(nests.peaks.get(group.layer, 0), used)
            for op in group.generics:
                if (member := layer_of(op)) != group.layer:
                    nests.members[member] = group.layer
        for op in self.allocs:
            name = self.names.get(op.memref)
            if name is not None:
                nests.tiles[op] = (placed[name], self.buffers[name].size)
        made: dict[str, Tile] = {}
        gathered: dict[str, Alternating] = {}
        for op, name in self.implicit.items():
            size = self.buffers[name].size
            role = self.buffers[name].role
            if role == "gathered":
                tiles = tuple(Tile(role, (size,), at, size, size) for at in placed[name])
                nests.gathered[op] = gathered.setdefault(name, Alternating(tiles))
                continue
            made.setdefault(name, Tile(role, (size,), placed[name][0], size, size))
            nests.implicit[op] = made[name]

    def _add(self, op: memref.AllocOp) -> None:
        name = f"{len(self.buffers)}"
        at = self.position[op]
        buffer = _Buffer(
            name, attr_str(op, "role"), self.nests.tile_bytes(op), attr_int(op, "slots", 1), at, at,
            layer_of(op),
        )  # fmt: skip
        if KEPT in op.attributes:
            buffer.use(max(self.position.values()))
        for user in users(op.memref):
            buffer.use(self.position[user])
            if not isinstance(user, GenericOp):
                continue
            kind = attr_str(user, "kind")
            if kind in ("conv", "sum"):
                buffer.use(self.issued.get(root(user.outputs[0]), 0) or self.position[user])
            fused = self.nests.fused_of(user) if kind == "lut" else None
            if fused is not None and root(user.outputs[0]) is op.memref:
                buffer.use(self.position[fused])
        self.buffers[name] = buffer
        self.names[op.memref] = name

    def _groups(self) -> list[_Nest]:
        """Return the ops that share tiles; held buffers belong to no group."""
        parent: dict[object, object] = {}

        def find(key: object) -> object:
            while parent[key] is not key:
                parent[key] = parent[parent[key]]
                key = parent[key]
            return key

        def join(one: object, two: object) -> None:
            for key in (one, two):
                parent.setdefault(key, key)
            parent[find(two)] = find(one)

        tiles = {
            op.memref: op
            for op in self.allocs
            if attr_str(op, "role") != HELD and KEPT not in op.attributes
        }
        for op in self.generics:
            parent.setdefault(op, op)
            own = [root(value) for value in (*op.inputs, *op.outputs) if root(value) in tiles]
            for value in own:
                join(op, value)
            if not own:
                join(("held", layer_of(op)), op)
            if attr_str(op, "kind") == "requant":
                joined = self.nests.joining_of(op)
                if joined is not None:
                    join(op, joined)
            elif attr_str(op, "kind") == "lut":
                fused = self.nests.fused_of(op)
                if fused is not None:
                    join(op, fused)
        for value in tiles:
            parent.setdefault(value, value)
        found: dict[object, _Nest] = {}
        for op in self.generics:
            found.setdefault(find(op), _Nest()).generics.append(op)
        for value, op in tiles.items():
            found.setdefault(find(value), _Nest()).allocs.append(op)
        for group in found.values():
            ops = [*group.generics, *group.allocs]
            group.layer = next((layer_of(op) for op in ops if layer_of(op)), "")
            group.items = [self.names[op.memref] for op in group.allocs if op.memref in self.names]
            used = [self.position[op] for op in ops]
            for name in group.items:
                used += (self.buffers[name].first, self.buffers[name].last)
            group.first, group.last = min(used), max(used)
        return sorted(found.values(), key=lambda group: (group.first, group.last))

    def _implicit_tiles(self, group: _Nest) -> None:
        """Add the tiles that ops need for their own parameters, one a layer and kind."""
        shared: dict[tuple[str, str], str] = {}
        for op in group.generics:
            kind, layer = attr_str(op, "kind"), layer_of(op)
            changed = "shift" in op.attributes or ends_in_half(op)
            slots = 1
            if gathered := self.nests.gathered_bytes(op):
                role, size, slots = "gathered", gathered, 2
            elif kind == "sum":
                role = "weights"
                size = ones_bytes(self.hardware, value_bytes(op.inputs[0]))
            elif kind in ("eltwise", "resize") or (kind == "copy" and changed):
                role, size = "scalar", parameter_bytes(self.hardware, 1)
            else:
                continue
            at = self.position[op]
            if kind in ("conv", "sum"):
                at = max(at, self.issued.get(root(op.outputs[0]), at))
            name = shared.get((role, layer))
            if name is None:
                name = shared[role, layer] = f"{len(self.buffers)}"
                self.buffers[name] = _Buffer(name, role, size, slots, at, at, layer)
                group.items.append(name)
            self.buffers[name].size = max(self.buffers[name].size, size)
            self.buffers[name].use(at, self.position[op], self._joined_at(op))
            self.implicit[op] = name

    def _joined_at(self, op: GenericOp) -> int:
        """Return where an op's instructions are issued at the earliest."""
        requant = self.nests.joined_to(op)
        return self.position[op if requant is None else requant]

    def _relate(self, op: GenericOp) -> None:
        """Note what one instruction reads and may not share a bank."""
        kind = attr_str(op, "kind")
        if kind not in ("conv", "sum"):
            return
        gathered = self.implicit.get(op) if kind == "conv" else None
        x = gathered or self.names[root(op.inputs[0])]
        weights = self.implicit[op] if kind == "sum" else self.names[root(op.inputs[1])]
        self.buffers[x].apart.append(weights)

    def _wishes(self, group: _Nest) -> None:
        """Note which streamed buffers of a nest are in use at the same time."""
        names: list[str] = []
        for op in group.generics:
            for value in (*op.inputs, *op.outputs):
                name = self.names.get(root(value))
                if name is not None and self.buffers[name].role in STREAMED:
                    names.append(name)
            if op in self.implicit and self.buffers[self.implicit[op]].role == "gathered":
                names.append(self.implicit[op])
        names = list(dict.fromkeys(names))
        for index, name in enumerate(names):
            self.buffers[name].beside += names[index + 1 :]

    def _steps(self, groups: Sequence[_Nest]) -> None:
        """Let the tiles of a nest by itself live together, and those of all begin a step early."""
        steps: list[list[_Nest]] = []
        end = -1
        for group in groups:
            if group.first > end:
                steps.append([])
            steps[-1].append(group)
            end = max(end, group.last)
        for before, step in pairwise([[], *steps]):
            start = min((group.first for group in before), default=0)
            for group in step:
                for name in group.items:
                    buffer = self.buffers[name]
                    if len(step) == 1:
                        buffer.use(group.first, group.last)
                    buffer.early = min(start, buffer.first)

    def _alive(self) -> list[int]:
        """Return the bytes alive at every position."""
        word = self.hardware.sram_word_bytes
        change = [0] * (2 + max(self.position.values(), default=0))
        for buffer in self.buffers.values():
            size = buffer.slots * align(buffer.size, word)
            change[buffer.first] += size
            change[buffer.last + 1] -= size
        total, alive = 0, list[int]()
        for step in change[:-1]:
            total += step
            alive.append(total)
        return alive

    def _refusal(self, answer: TileDoesNotFit, groups: Iterable[_Nest]) -> TilewrightError:
        at = answer.position
        layer = next((g.layer for g in groups if g.first <= at <= g.last and g.layer), "")
        return TilewrightError(
            "E0401",
            f'out of memory during allocation of "{layer}"',
            [
                *(
                    f"{b.role}: {b.slots} x {b.size} bytes"
                    for b in self.buffers.values()
                    if b.first <= at <= b.last and b.size
                ),
                answer.reason,
                f"smallest SRAM that would do: {answer.needed_bytes} bytes; "
                f"{self.hardware.name} has {self.hardware.sram_size}",
            ],
        )


def _space(value: SSAValue) -> int:
    kind = value.type
    assert isinstance(kind, MemRefType)
    return memory_space(kind)
