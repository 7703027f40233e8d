"""The planner's search: a beam over positions in program order.

A state says which tensors lie whole in SRAM before a unit, and when array and DDR are free by then;
the next step is that unit by itself or a cascade that starts with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product

from tilewright.schedule.box import BoxChoice, BoxProblem, BoxTiling, choose_box
from tilewright.schedule.cost import rates
from tilewright.schedule.footprint import align
from tilewright.schedule.planner_cascade import Chain, Outline, outlines, taken_bytes
from tilewright.schedule.planner_network import Network
from tilewright.schedule.planner_tiles import choose_few, tile_bytes
from tilewright.schedule.tiling import (
    Choice,
    ConvProblem,
    ConvTiling,
    NoFit,
    packed_bytes,
)

TRAFFIC_WEIGHT = 0.1
"""What a hidden cycle of DDR costs: of plans about equally fast the one with less traffic wins."""


@dataclass(frozen=True)
class Effort:
    """How much is tried."""

    width: int
    """States kept at a position."""
    longest: int
    """Units of a cascade."""
    thorough: bool = False
    """Cascades are tried where tensors could be held, too."""


EFFORTS = (Effort(1, 0), Effort(4, 0), Effort(8, 9), Effort(32, 14, thorough=True))
"""By the `effort` of `plan_network`."""


@dataclass(frozen=True)
class StepPrice:
    """What a step costs, as far as the steps around it matter."""

    engines: float
    memory: float
    head: float
    tail: float
    ddr_bytes: float
    used_bytes: int
    """SRAM, held tensors included."""
    early_bytes: int
    """SRAM of what can be loaded during the step before."""
    tile_bytes: int
    """SRAM of tiles of activations and of rolling buffers."""


@dataclass(frozen=True)
class Action:
    """A step of the search."""

    first: int
    last: int
    price: StepPrice
    tilings: tuple[ConvTiling | BoxTiling | None, ...]
    outline: Outline | None
    """Of a cascade."""
    chain: Chain | None
    numbers: tuple[int, ...]
    """Cascade: the tensors of its chain."""
    reserved: int
    """SRAM of held tensors, rounded up."""
    inner: frozenset[int]
    """Buffers that have no home outside the cascade."""


@dataclass(frozen=True)
class State:
    """What is known before a unit."""

    held: frozenset[int]
    """Buffers that lie whole in SRAM."""
    copied: frozenset[int]
    """Those of them that lie in DDR too."""
    engines: float = 0.0
    """When the engines are free."""
    ddr: float = 0.0
    """When DDR is."""
    begun: float = 0.0
    """When the step before began."""
    used_bytes: int = 0
    """SRAM of the step before."""
    traffic: float = 0.0
    ddr_bytes: float = 0.0
    peak: int = 0
    """The most bytes of activations, in SRAM and DDR, of any step so far."""
    before: State | None = field(default=None, repr=False)
    action: Action | None = field(default=None, repr=False)

    @property
    def score(self) -> tuple[float, float]:
        """Less is better."""
        time = max(self.engines, self.ddr) + TRAFFIC_WEIGHT * self.traffic
        return time, self.ddr_bytes


@dataclass(frozen=True)
class Size:
    """What is asked of the memory that activations take, in SRAM and DDR together."""

    limit: int | None = None
    """Bytes that no step may exceed; None: the fewest are wanted."""


class Search:
    """Finds the best plan of a network under extra reserves of SRAM by unit."""

    def __init__(
        self,
        network: Network,
        effort: Effort,
        reserve: dict[int, int],
        size: Size | None = None,
    ) -> None:
        self.size = size
        self.network = network
        self.hardware = network.hardware
        self.effort = effort
        self.reserve = reserve
        self.rate = rates(network.hardware)
        self._singles: dict[object, list[tuple[StepPrice, ConvTiling | BoxTiling | None]]] = {}
        self.failed = 0
        """The furthest unit that has no tile."""

    def run(self) -> State | None:
        """Return the best state behind the last unit; its chain of `before` is the plan."""
        count = len(self.network.units)
        layers: list[dict[tuple[frozenset[int], frozenset[int]], State]] = [
            {} for _ in range(count + 1)
        ]
        start = State(frozenset(), frozenset())
        layers[0][start.held, start.copied] = start
        for position in range(count):
            if self.network.progress is not None:
                self.network.progress(position / count)
            states = sorted(layers[position].values(), key=self._score)
            layers[position] = {}
            for state in states[: self.effort.width]:
                for following, after in self._following(position, state):
                    place = layers[after]
                    key = (following.held, following.copied)
                    known = place.get(key)
                    if known is None or self._score(following) < self._score(known):
                        place[key] = following
            if states and not any(layers[position + 1 :]):
                self.failed = position
        final = sorted(layers[count].values(), key=self._score)
        return final[0] if final else None

    def _score(self, state: State) -> tuple[float, ...]:
        """Return what states compare by: less is better."""
        if self.size is not None and self.size.limit is None:
            return (state.peak, *state.score)
        return state.score

    def _memory(self, state: State, first: int, last: int, held: frozenset[int]) -> int:
        """Return the bytes of activations during a step, beside its tiles and rolling buffers."""
        total = sum(self._held_bytes(buffer) for buffer in held)
        made = {
            self.network.buffer(self.network.units[unit].writes) for unit in range(first, last + 1)
        }
        for buffer, item in self.network.buffers.items():
            if buffer in made:
                later = item.last_reader > last or item.ddr_only or not item.readers
                in_ddr = (buffer not in held and later) or item.ddr_needed
            else:
                made_later = item.writers and item.writers[0] >= first
                finished = item.readers and item.last_reader < first
                alive = not made_later and not finished
                in_ddr = alive and (buffer not in state.held or buffer in state.copied)
            total += item.ddr_bytes if in_ddr else 0
        return total

    def _room(self, state: State, first: int, last: int, held: frozenset[int]) -> int | None:
        """Return the bytes that tiles may take; None if there is no limit."""
        if self.size is None or self.size.limit is None:
            return None
        return self.size.limit - self._memory(state, first, last, held)

    def _following(self, position: int, state: State) -> list[tuple[State, int]]:
        found: list[tuple[State, int]] = []
        for holds in self._holds(position, position, state):
            for action in self._single(position, state, holds):
                found += self._after(state, action, holds)
        longest = min(self.effort.longest, len(self.network.units) - position)
        if longest < 2 or not self.network.stripable(position):
            return found
        for last in range(position + 1, position + longest):
            if not self.network.stripable(last):
                break
            if not self._pays(position, last):
                continue
            any_fits = False
            for holds in self._holds(position, last, state):
                for action in self._cascades(position, last, state, holds):
                    any_fits = True
                    found += self._after(state, action, holds)
            # A longer cascade keeps more inside, and may take less memory.
            if not any_fits and self.size is None:
                break
        return found

    def _pays(self, first: int, last: int) -> bool:
        """Tell whether a tensor inside is too large to be held without ado."""
        if self.effort.thorough or self.size is not None:
            return True
        limit = self.hardware.sram_size / 6
        return any(
            first <= item.writers[0] and item.last_reader <= last and item.held_bytes > limit
            for item in (
                self.network.buffers[self.network.buffer(self.network.units[unit].writes)]
                for unit in range(first, last + 1)
            )
        )

    def _holds(self, first: int, last: int, state: State) -> list[tuple[int, ...]]:
        """Return which of the tensors made by a step could be held from then on."""
        options: list[int] = []
        for unit in range(first, last + 1):
            buffer = self.network.buffer(self.network.units[unit].writes)
            item = self.network.buffers[buffer]
            if buffer in state.held or buffer in options or item.ddr_only:
                continue
            if item.writers[0] < first or item.last_reader <= last:
                continue
            if item.held_bytes + sum(self._held_bytes(b) for b in state.held) > (
                self.hardware.sram_size
            ):
                continue
            options.append(buffer)
        choices = [(None, buffer) for buffer in options[:3]]
        return [
            tuple(buffer for buffer in chosen if buffer is not None) for chosen in product(*choices)
        ]

    def _held_bytes(self, buffer: int) -> int:
        return self.network.buffers[buffer].held_bytes

    def _reserved(self, first: int, last: int, held: frozenset[int]) -> int:
        """Return the SRAM that tiles must leave free, rounded up so that few values occur."""
        extra = max(self.reserve.get(unit, 0) for unit in range(first, last + 1))
        unit = max(self.hardware.bank_size // 8, self.hardware.sram_word_bytes)
        return align(sum(self._held_bytes(b) for b in held) + extra, unit)

    def _single(self, unit: int, state: State, holds: tuple[int, ...]) -> list[Action]:
        network = self.network
        spec = network.units[unit]
        held = state.held.union(holds)
        reserved = self._reserved(unit, unit, held)
        reads = network.reads(unit)
        flags = tuple(buffer in held for buffer in (*reads, network.buffer(spec.writes)))
        room = self._room(state, unit, unit, held)
        if room is not None:
            if room < 0:
                return []
            # Rounded down so that few values occur.
            room = min(room, self.hardware.sram_size)
            room -= room % max(self.hardware.sram_word_bytes, 1 << max(0, room.bit_length() - 4))
        key = (unit, flags, reserved, room)
        if key not in self._singles:
            self._singles[key] = self._choose(unit, flags, reserved, room)
        target = network.buffer(spec.writes)
        copied = target in holds and network.buffers[target].ddr_needed
        return [
            Action(
                unit,
                unit,
                self._copied(price, target) if copied else price,
                (tiling,),
                None,
                None,
                (),
                0,
                frozenset(),
            )
            for price, tiling in self._singles[key]
        ]

    def _copied(self, price: StepPrice, buffer: int) -> StepPrice:
        """Add the copy of a held tensor to DDR."""
        size = self.network.buffers[buffer].ddr_bytes
        cycles = self.rate.transfer(size, 1)
        return replace(
            price,
            memory=price.memory + cycles,
            tail=price.tail + cycles / 2,
            ddr_bytes=price.ddr_bytes + size,
        )

    def _choose(
        self, unit: int, flags: tuple[bool, ...], reserved: int, room: int | None
    ) -> list[tuple[StepPrice, ConvTiling | BoxTiling | None]]:
        spec, hardware = self.network.units[unit], self.hardware
        problem = spec.problem
        if problem is None:
            # It tiles itself; what it moves is known roughly only.
            buffers = [*self.network.reads(unit), self.network.buffer(spec.writes)]
            size = sum(self.network.buffers[buffer].ddr_bytes for buffer in buffers)
            memory = self.rate.transfer(size, len(buffers))
            if reserved > hardware.sram_size // 2:
                return []
            return [(StepPrice(memory, memory, 0.0, 0.0, size, hardware.sram_size, 0, 0), None)]
        if self.size is not None and room is None:
            return self._smallest(unit, flags, reserved)
        choices: tuple[Choice | BoxChoice, ...]
        if isinstance(problem, ConvProblem):
            names = ("input", "second") if problem.second else ("input",)
            names = (*names, "output")
            taken = tuple(name for name, flag in zip(names, flags, strict=True) if flag)
            if flags[-1] and self.network.tensors[spec.writes].inside is not None:
                taken = (*taken, "part")
            problem = replace(problem, held=taken).as_loaded()
            answer = choose_few(hardware, problem, reserved, room)
            choices = () if isinstance(answer, NoFit) else answer
        else:
            last = len(problem.operands) - 1
            places = (*range(len(flags) - 1), last)
            if spec.in_ddr is not None and not any(flags):
                problem = spec.in_ddr
            else:
                taken = tuple(at for at, flag in zip(places, flags, strict=True) if flag)
                problem = replace(problem, held=taken)
            choice = choose_box(hardware, problem, reserved, room)
            choices = (choice,) if isinstance(choice, BoxChoice) else ()
        return [(self._price(problem, choice, reserved), choice.tiling) for choice in choices]

    def _smallest(
        self, unit: int, flags: tuple[bool, ...], reserved: int
    ) -> list[tuple[StepPrice, ConvTiling | BoxTiling | None]]:
        """Return tilings with small tiles of activations."""
        room = self.hardware.sram_word_bytes
        while room < 2 * self.hardware.sram_size:
            if found := self._choose(unit, flags, reserved, room):
                return found
            room *= 2
        return []

    def _price(
        self, problem: ConvProblem | BoxProblem, choice: Choice | BoxChoice, reserved: int
    ) -> StepPrice:
        hardware, cost = self.hardware, choice.cost
        if isinstance(problem, ConvProblem):
            assert isinstance(choice, Choice)
            buffers = choice.tiling.buffers(hardware, problem)
        else:
            assert isinstance(choice, BoxChoice)
            buffers = choice.tiling.buffers(hardware, problem)
        early = sum(b.slots * b.size_bytes for b in buffers if b.role in ("weights", "bias"))
        return StepPrice(
            cost.engines() + cost.waiting,
            cost.memory,
            cost.head,
            cost.tail,
            cost.ddr_bytes,
            packed_bytes(hardware, buffers, reserved),
            early,
            tile_bytes(buffers),
        )

    def _cascades(
        self, first: int, last: int, state: State, holds: tuple[int, ...]
    ) -> list[Action]:
        held = state.held.union(holds)
        found = self.network.chain(first, last, held)
        if found is None:
            return []
        chain, numbers = found
        reserved = self._reserved(first, last, held)
        if reserved >= self.hardware.sram_size:
            return []
        made_here = {
            self.network.buffer(self.network.units[unit].writes) for unit in range(first, last + 1)
        }
        stored = {self.network.buffer(numbers[tensor]) for tensor in chain.stored}
        inner = frozenset(made_here - held - stored)
        actions: list[Action] = []
        for cascade, needed in self._outlines(state, first, last, chain, held, reserved):
            price = StepPrice(
                cascade.engines,
                cascade.memory,
                cascade.head,
                cascade.tail,
                cascade.ddr_bytes,
                needed,
                cascade.weight_bytes,
                cascade.rolling_bytes,
            )
            for buffer in holds:
                if self.network.buffers[buffer].ddr_needed:
                    price = self._copied(price, buffer)
            actions.append(Action(first, last, price, (), cascade, chain, numbers, reserved, inner))
        return actions

    def _outlines(
        self,
        state: State,
        first: int,
        last: int,
        chain: Chain,
        held: frozenset[int],
        reserved: int,
    ) -> list[tuple[Outline, int]]:
        """Return the best two ways to run a cascade that fit, with their SRAM.

        Only where nothing else fits, weights and rows lie in one bank.
        """
        room = self._room(state, first, last, held)
        every = outlines(self.hardware, chain)
        smallest = self.size is not None and self.size.limit is None
        for tight in (False, True):
            found: list[tuple[Outline, int]] = []
            for item in every if smallest else reversed(every):
                if room is not None and item.rolling_bytes > room:
                    continue
                others = item.other_bytes + reserved
                needed = taken_bytes(self.hardware, chain, item.weight_bytes, others, tight=tight)
                if needed <= self.hardware.sram_size:
                    found.append((item, needed))
            if found:
                return found[:2]
        return []

    def _after(
        self, state: State, action: Action, holds: tuple[int, ...]
    ) -> list[tuple[State, int]]:
        """Return the states behind a step, with the position."""
        price = action.price
        early = state.used_bytes + price.early_bytes <= self.hardware.sram_size
        ddr = max(state.ddr, state.begun if early else state.engines)
        begun = max(state.engines, ddr + price.head)
        # No more than the first weights is loaded before the step begins.
        ahead = min(price.memory, price.early_bytes / self.rate.ddr_bytes_per_cycle)
        ahead = max(ahead, price.head)
        loaded = max(ddr + price.memory, begun + price.memory - ahead)
        end = max(begun + price.engines, loaded)
        free = max(loaded, end + price.tail if price.tail else 0.0)
        held = state.held.union(holds)
        copied = state.copied.union(
            buffer for buffer in holds if self.network.buffers[buffer].ddr_needed
        )
        kept = frozenset(b for b in held if self.network.buffers[b].last_reader > action.last)
        peak = state.peak
        if self.size is not None:
            memory = self._memory(state, action.first, action.last, held) + price.tile_bytes
            peak = max(peak, memory)
        following = State(
            kept,
            copied & kept,
            end,
            free,
            begun,
            price.used_bytes,
            state.traffic + price.memory,
            state.ddr_bytes + price.ddr_bytes,
            peak,
            state,
            action,
        )
        found = [(following, action.last + 1)]
        if self.size is not None:
            return found
        # Early readers may take a tensor from SRAM and late ones from DDR.
        for buffer in sorted(kept):
            item = self.network.buffers[buffer]
            if buffer in copied or item.ddr_only or buffer not in holds:
                continue
            if len(item.readers) < 2:
                continue
            size, cycles = item.ddr_bytes, self.rate.transfer(item.ddr_bytes, 1)
            both = replace(
                following,
                copied=following.copied | {buffer},
                ddr=max(following.ddr, end) + cycles / 2,
                traffic=following.traffic + cycles,
                ddr_bytes=following.ddr_bytes + size,
            )
            found.append((both, action.last + 1))
        for item, after in list(found):
            droppable = [
                buffer
                for buffer in item.copied
                if buffer not in holds and action.last >= self.network.buffers[buffer].readers[0]
            ]
            for buffer in sorted(droppable):
                found.append(
                    (
                        replace(item, held=item.held - {buffer}, copied=item.copied - {buffer}),
                        after,
                    )
                )
        return found
