"""What the planner knows of a function: who writes and reads every buffer, and what may be held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tilewright.schedule.cascade import buffer_of
from tilewright.schedule.footprint import activation_bytes
from tilewright.schedule.plan import Read, TensorSpec, UnitSpec
from tilewright.schedule.planner_cascade import Chain, held_problem, unit_form
from tilewright.schedule.tiling import ConvProblem
from tilewright.spec.hardware import Hardware


@dataclass(frozen=True)
class Buffer:
    """A tensor with its parts, if it is a concatenation."""

    tensor: int
    writers: tuple[int, ...]
    """Units, in order; none for an argument."""
    readers: tuple[int, ...]
    """Units, in order, each once."""
    held_bytes: int
    """SRAM bytes of the whole, padding included."""
    ddr_bytes: int
    ddr_only: str
    """Why it cannot be held whole; empty if it can."""
    ddr_needed: bool
    """A reader takes it from DDR only."""

    @property
    def last_reader(self) -> int:
        """The last unit that reads it, or -1."""
        return self.readers[-1] if self.readers else -1


class Network:
    """Units and tensors, and the buffers that follow from them."""

    def __init__(
        self,
        hardware: Hardware,
        units: Sequence[UnitSpec],
        tensors: Sequence[TensorSpec],
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self.hardware = hardware
        self.progress = progress
        """Told what part of the units is planned."""
        self.units = units
        self.tensors = tensors
        writers: dict[int, list[int]] = {}
        readers: dict[int, list[int]] = {}
        reasons: dict[int, str] = {}
        opaque: set[int] = set()
        for number, unit in enumerate(units):
            target = self.buffer(unit.writes)
            writers.setdefault(target, []).append(number)
            if unit.problem is None:
                reasons.setdefault(target, f"{unit.layer or 'its writer'} works on DDR only")
            for source in dict.fromkeys(self.buffer(read.tensor) for read in unit.reads):
                readers.setdefault(source, []).append(number)
                if unit.problem is None:
                    opaque.add(source)
        for number, tensor in enumerate(tensors):
            if tensor.ddr_only:
                reasons.setdefault(self.buffer(number), tensor.ddr_only)
        self.kept_bytes = sum(_kept_bytes(hardware, unit) for unit in units)
        """SRAM of the weights and parameters that stay for the whole program, about."""
        self._near: dict[tuple[int, int], frozenset[int]] = {}
        self._chains: dict[object, tuple[Chain, tuple[int, ...]] | None] = {}
        self.buffers: dict[int, Buffer] = {}
        for number, tensor in enumerate(tensors):
            if tensor.inside is not None:
                continue
            made, read = tuple(writers.get(number, ())), tuple(readers.get(number, ()))
            reason = reasons.get(number, "")
            if not made:
                reason = reason or "an argument"
            elif not read:
                reason = reason or "nothing reads it"
            elif read[0] < made[-1]:
                reason = reason or "it is read before it is complete"
            top, left, bottom, right = tensor.pads
            pixels = (tensor.rows + top + bottom) * (tensor.columns + left + right)
            size = activation_bytes(hardware, pixels, tensor.channels, tensor.element_bytes)
            dense = tensor.rows * tensor.columns * tensor.channels * tensor.element_bytes
            self.buffers[number] = Buffer(number, made, read, size, dense, reason, number in opaque)

    def buffer(self, tensor: int) -> int:
        """Return the tensor that a tensor lies in."""
        return buffer_of(self.tensors, tensor)

    def reads(self, unit: int) -> list[int]:
        """Return the buffers of a unit's operands, in order."""
        return [self.buffer(read.tensor) for read in self.units[unit].reads]

    def stripable(self, unit: int) -> bool:
        """Tell whether a unit can be part of a cascade."""
        spec = self.units[unit]
        if not spec.stripable or spec.problem is None:
            return False
        return not any(read.whole for read in spec.reads)

    def rolls(self, buffer: int) -> bool:
        """Tell whether rows of a tensor in DDR may lie in a rolling buffer with its padding."""
        item, tensor = self.buffers[buffer], self.tensors[buffer]
        return not item.ddr_only or not any(tensor.pads) or len(item.readers) <= 1

    def near(self, first: int, last: int) -> frozenset[int]:
        """Return the buffers that units `first..last` read or write."""
        key = (first, last)
        if key not in self._near:
            units = range(first, last + 1)
            self._near[key] = frozenset(
                buffer
                for unit in units
                for buffer in (*self.reads(unit), self.buffer(self.units[unit].writes))
            )
        return self._near[key]

    def chain(
        self, first: int, last: int, held: frozenset[int]
    ) -> tuple[Chain, tuple[int, ...]] | None:
        """Return units `first..last` as a chain, and its tensors' numbers here.

        Args:
            first: unit.
            last: unit, inclusive.
            held: buffers that are held whole by then, or from then on.
        """
        key = (first, last, held & self.near(first, last))
        if key not in self._chains:
            self._chains[key] = self._chain(*key)
        return self._chains[key]

    def _chain(
        self, first: int, last: int, held: frozenset[int]
    ) -> tuple[Chain, tuple[int, ...]] | None:
        known: dict[int, int] = {}
        numbers: list[int] = []

        def number(tensor: int) -> int:
            if tensor not in known:
                known[tensor] = len(numbers)
                numbers.append(tensor)
            return known[tensor]

        made: set[int] = set()
        loaded: dict[int, None] = {}
        stored: dict[int, None] = {}
        whole: dict[int, None] = {}
        units: list[UnitSpec] = []
        for index in range(first, last + 1):
            spec = self.units[index]
            reads: list[Read] = []
            for read in spec.reads:
                buffer = self.buffer(read.tensor)
                reads.append(replace(read, tensor=number(buffer)))
                if buffer in held:
                    whole[number(buffer)] = None
                elif buffer not in made:
                    if not self.rolls(buffer):
                        return None
                    loaded[number(buffer)] = None
            buffer, part = self.buffer(spec.writes), number(spec.writes)
            number(buffer)
            made.add(buffer)
            item = self.buffers[buffer]
            elsewhere = any(not first <= writer <= last for writer in item.writers)
            if elsewhere and buffer not in held:
                # Some parts of the concatenation are made in other steps.
                return None
            if buffer in held:
                whole[number(buffer)] = None
            elif item.ddr_needed or item.ddr_only or item.last_reader > last:
                if not self.rolls(buffer):
                    return None
                stored[part] = None
            assert spec.problem is not None
            units.append(
                replace(
                    spec,
                    layer="",
                    problem=held_problem(spec.problem, buffer != spec.writes),
                    reads=tuple(reads),
                    writes=part,
                    in_ddr=None,
                )
            )
        tensors: list[TensorSpec] = []
        for tensor in numbers:
            spec = self.tensors[tensor]
            inside = None if spec.inside is None else known[spec.inside]
            tensors.append(replace(spec, name="", ddr_only="", inside=inside))
        chain = Chain(tuple(units), tuple(tensors), tuple(loaded), tuple(stored), tuple(whole))
        return chain, tuple(numbers)


def _kept_bytes(hardware: Hardware, unit: UnitSpec) -> int:
    """Return the SRAM of a unit's weights and parameters if they stay, unless it has no form."""
    problem = unit.problem
    if not isinstance(problem, ConvProblem) or not problem.kept:
        return unit.kept_bytes
    apart = unit_form(hardware, held_problem(replace(problem, kept=False), part=False))
    rest = unit_form(hardware, held_problem(problem, part=False))
    if apart is None or rest is None:
        return 0
    return apart.weight_bytes + apart.parameter_bytes - rest.parameter_bytes
