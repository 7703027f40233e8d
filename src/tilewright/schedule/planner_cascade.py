"""Cascades as the planner sees them: the order of their stages, their buffers and their price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from tilewright.schedule.box import BoxProblem, BoxTiling
from tilewright.schedule.cascade import accesses, buffer_of
from tilewright.schedule.cost import (
    drain_cycles,
    drain_tail,
    join_cycles,
    mac_cycles,
    rates,
)
from tilewright.schedule.footprint import (
    activation_bytes,
    align,
    max_parameter_blocks,
    parameter_bytes,
    pixel_pitch,
)
from tilewright.schedule.plan import Stage, TensorSpec, UnitSpec
from tilewright.schedule.rolling import Event, least_capacity, roll
from tilewright.schedule.tiling import MAX_EXTENT, TABLE_BYTES, ConvProblem, ConvTiling, shares
from tilewright.spec.hardware import Hardware

STAGE_OVERHEAD_CYCLES = 24
"""What a stage costs beside its work: dispatch and semaphores."""
SKEW_LOSS = 0.2
"""The part of the rounds at both ends, in which not all units work, that is lost."""
ROUNDS = (2, 3, 4, 6, 8, 10, 14, 20, 28, 56, 112)
"""Rounds that are tried."""


@dataclass(frozen=True)
class Chain:
    """Consecutive units with their tensors numbered anew, so that equal cascades are equal."""

    units: tuple[UnitSpec, ...]
    """`layer` is empty."""
    tensors: tuple[TensorSpec, ...]
    """`name` is empty."""
    loaded: tuple[int, ...]
    """Tensors whose rows come from DDR."""
    stored: tuple[int, ...]
    """Tensors that are written to DDR."""
    whole: tuple[int, ...]
    """Buffers that are held whole; their bytes are counted by the caller."""


@dataclass(frozen=True)
class Outline:
    """One way to run a chain, estimated."""

    rows: int
    """Rows of the last unit a round."""
    skewed: bool
    weight_bytes: int
    other_bytes: int
    """Rolling buffers and parameters."""
    engines: float
    """Cycles of array and vector unit."""
    memory: float
    """Cycles of DDR."""
    head: float
    """Cycles of DDR before the first stage."""
    tail: float
    """Cycles of DDR after the last stage."""
    ddr_bytes: float
    rolling_bytes: int
    """Rolling buffers alone."""


@dataclass(frozen=True)
class Cascade:
    """The stages of a chain, and its buffers."""

    tilings: tuple[ConvTiling | BoxTiling, ...]
    stages: tuple[Stage, ...]
    capacity: tuple[tuple[int, int], ...]
    """Rows of the rolling buffers, by buffer."""


@dataclass(frozen=True)
class UnitForm:
    """The tiles of one unit in a cascade, and their bytes."""

    tiling: ConvTiling | BoxTiling
    weight_bytes: int
    parameter_bytes: int
    ddr_bytes: int
    gathered_bytes: int = 0
    """Of one of the two tiles that kernel rows are gathered into."""


def held_problem(problem: ConvProblem | BoxProblem, part: bool) -> ConvProblem | BoxProblem:
    """Return a unit's problem in a cascade; `part`: it writes a part of a concatenation."""
    if isinstance(problem, BoxProblem):
        return problem
    held = ("input", "second", "output")
    return replace(problem, held=(*held, "part") if part else held)


@lru_cache(maxsize=4096)
def unit_form(hardware: Hardware, problem: ConvProblem | BoxProblem) -> UnitForm | None:
    """Return a unit's widest tile of output channels (see `held_problem`); all weights stay.

    None: a pixel row, or its reduction, does not fit one instruction.
    """
    if isinstance(problem, BoxProblem):
        if problem.outer != 1 or len(problem.sizes) != 3:
            return None
        limits = problem.limits or problem.sizes
        tile = tuple(min(size, limit) for size, limit in zip(problem.sizes, limits, strict=True))
        if tile[1:] != problem.sizes[1:]:
            return None
        tiling = BoxTiling((1, *tile[1:]), (1,) * len(problem.operands))
        size = parameter_bytes(hardware, 1) if problem.parameters else 0
        size += align(TABLE_BYTES, hardware.sram_word_bytes) if problem.table else 0
        size += align(problem.row_bytes, hardware.sram_word_bytes)
        return UnitForm(tiling, 0, size, size)
    if problem.batch != 1 or problem.batched_weights:
        return None
    if problem.out_columns > hardware.accumulator_rows:
        return None
    size = hardware.array_size
    if problem.diagonal:
        tiles = [(groups, 1, 1) for groups in shares(problem.group, size)]
    elif problem.group > 1:
        tiles = [
            (groups, problem.group_out, problem.group_in)
            for groups in range(problem.group, 1, -1)
            if problem.group % groups == 0
        ]
    else:
        tiles = [(1, outs, problem.in_channels) for outs in shares(problem.out_channels, size)]
    for groups, outs, ins in tiles:
        tiling = ConvTiling(groups, outs, ins, problem.kernel, 1, problem.out_columns)
        tiling = min(
            (replace(tiling, packing=item) for item in tiling.packings(hardware, problem)),
            key=lambda item: _cycles(hardware, problem, item),
        )
        form = tiling.form(hardware, problem)
        if form.blocks > max_parameter_blocks(hardware) or form.row_blocks > 255:
            continue
        if max(problem.kernel) > 15:
            return None
        count = ceil(problem.group / groups) * ceil(problem.group_out / outs)
        weights = problem.weight_bytes(hardware, form)
        own = parameter_bytes(hardware, form.blocks, problem.element_bytes)
        once = align(TABLE_BYTES, hardware.sram_word_bytes) if problem.table else 0
        once += parameter_bytes(hardware, 1) if problem.second else 0
        gathered = form.stack_bytes(hardware, problem.out_rows, problem.out_columns)
        if problem.kept:
            return UnitForm(tiling, 0, once, once, gathered)
        if problem.kind == "sum":
            return UnitForm(tiling, weights, count * own + once, count * own + once)
        total = count * weights
        size = count * own + once
        return UnitForm(tiling, total, size, total + size, gathered)
    return None


def _cycles(hardware: Hardware, problem: ConvProblem, tiling: ConvTiling) -> float:
    """Return the cycles of some rows, with which packings compare."""
    form, rows = tiling.form(hardware, problem), min(4, problem.out_rows)
    return max(
        mac_cycles(hardware, form, rows, problem.out_columns),
        drain_cycles(hardware, form, rows, problem.out_columns),
    )


@dataclass(frozen=True)
class StageCost:
    """Cycles of a stage of one unit."""

    mac: float
    vector: float
    tail: float
    """From the array's end to the last result."""


@lru_cache(maxsize=65536)
def stage_cost(hardware: Hardware, problem: ConvProblem | BoxProblem, rows: int) -> StageCost:
    """Return the cost of `rows` rows of a unit's result, all operands in SRAM."""
    if isinstance(problem, BoxProblem):
        _, columns, channels = problem.sizes
        vectors = ceil(channels / hardware.vector_lanes) * max(1, problem.work)
        pixels = rows * columns * (vectors + problem.row_cycles)
        return StageCost(0.0, pixels + hardware.vector_latency, 0.0)
    made = unit_form(hardware, problem)
    assert made is not None
    assert isinstance(made.tiling, ConvTiling)
    tiling = made.tiling
    count = problem.group / tiling.groups * problem.group_out / tiling.out_channels
    form = tiling.form(hardware, problem)
    mac = vector = 0.0
    for part in _pieces(rows):
        mac += mac_cycles(hardware, form, part, problem.out_columns)
        vector += drain_cycles(hardware, form, part, problem.out_columns)
        if problem.second:
            join = join_cycles(hardware, form, part, problem.out_columns)
            vector += join.vector
            mac += join.stall
    return StageCost(
        mac * count, vector * count, drain_tail(hardware, form, rows, problem.out_columns)
    )


def _pieces(rows: int) -> list[int]:
    return [min(MAX_EXTENT, rows - at) for at in range(0, rows, MAX_EXTENT)]


def targets(chain: Chain, rows: int) -> list[list[int]]:
    """Return, by round, how many rows of every tensor's buffer are made (or loaded) by its end."""
    last = chain.units[-1]
    rounds: list[list[int]] = []
    read = {read.tensor for unit in chain.units for read in unit.reads}
    ends = [unit for unit in chain.units if buffer_of(chain.tensors, unit.writes) not in read]
    for end in [*range(rows, last.rows, rows), last.rows]:
        need = [0] * len(chain.tensors)
        finished = end == last.rows
        for unit in ends:
            need[unit.writes] = ceil(unit.rows * end / last.rows)
        for unit in reversed(chain.units):
            made = unit.rows if finished else min(unit.rows, _most(chain, need, unit.writes))
            need[unit.writes] = made
            for read in unit.reads:
                if made:
                    have = chain.tensors[read.tensor].rows
                    reach = have if read.whole else min(have, read.rows(0, made)[1])
                    need[read.tensor] = max(need[read.tensor], reach)
        rounds.append(need)
    return rounds


def _most(chain: Chain, need: list[int], tensor: int) -> int:
    """Return the rows needed of a tensor or of the concatenation it is a part of."""
    return max(need[tensor], need[buffer_of(chain.tensors, tensor)])


def stages_of(chain: Chain, rows: int, skewed: bool) -> list[Stage]:
    """Return the stages in order; loads run one round ahead of what reads them."""
    wanted = targets(chain, rows)
    count = len(wanted)
    depth = _depths(chain) if skewed else [0] * len(chain.units)
    latest = max(depth)
    done = [0] * len(chain.tensors)
    made: list[Stage] = []

    def to(kind: str, index: int, tensor: int, end: int) -> None:
        if end > done[tensor]:
            made.append(Stage(kind, index, done[tensor], end))  # pyright: ignore[reportArgumentType]
            done[tensor] = end

    sent = dict.fromkeys(chain.stored, 0)

    def store(tensor: int, end: int) -> None:
        if tensor in sent and end > sent[tensor]:
            made.append(Stage("store", tensor, sent[tensor], end))
            sent[tensor] = end

    order = range(len(chain.units))
    for time in range(-1, count + latest):
        for tensor in chain.loaded:
            to("load", tensor, tensor, wanted[min(time + 1, count - 1)][tensor])
        for index in reversed(order) if skewed else order:
            turn = time - depth[index]
            if 0 <= turn < count:
                unit = chain.units[index]
                to("compute", index, unit.writes, wanted[turn][unit.writes])
                store(unit.writes, wanted[turn][unit.writes])
    return made


def _depths(chain: Chain) -> list[int]:
    """Return, by unit, how many rounds after the first it works."""
    made: dict[int, int] = {}
    depths: list[int] = []
    for unit in chain.units:
        depth = 0
        for read in unit.reads:
            at = made.get(read.tensor)
            if at is not None:
                depth = max(depth, at + 1)
        depths.append(depth)
        for tensor in (unit.writes, buffer_of(chain.tensors, unit.writes)):
            made[tensor] = max(made.get(tensor, 0), depth)
    return depths


@lru_cache(maxsize=16384)
def outlines(hardware: Hardware, chain: Chain) -> tuple[Outline, ...]:
    """Return ways to run a chain, by memory, each faster than those before."""
    if any(unit_form(hardware, _problem(unit)) is None for unit in chain.units):
        return ()
    fixed = _fixed(hardware, chain)
    if taken_bytes(hardware, chain, fixed[0], fixed[1]) > hardware.sram_size:
        return ()
    last = chain.units[-1].rows
    options = sorted({ceil(last / rounds) for rounds in ROUNDS} | {1})
    made: list[Outline] = []
    for skewed in (False, True):
        late = _late(chain, skewed)
        made += [_outline(hardware, chain, rows, skewed, fixed, late) for rows in options]
    made = [
        item
        for item in made
        if taken_bytes(hardware, chain, item.weight_bytes, item.other_bytes) <= hardware.sram_size
    ]
    made.sort(key=lambda item: (item.other_bytes, item.engines))
    found: list[Outline] = []
    for item in made:
        if not found or item.engines + item.head < found[-1].engines + found[-1].head:
            found.append(item)
    return tuple(found)


def _problem(unit: UnitSpec) -> ConvProblem | BoxProblem:
    assert unit.problem is not None
    return unit.problem


def row_bytes(hardware: Hardware, tensor: TensorSpec) -> int:
    """Return the SRAM bytes of a row of a held tensor, padding at its sides included."""
    columns = tensor.columns + tensor.pads[1] + tensor.pads[3]
    return columns * pixel_pitch(hardware, tensor.channels, tensor.element_bytes)


def _fixed(hardware: Hardware, chain: Chain) -> tuple[int, int, int]:
    """Return bytes of weights, of parameters, and of both in DDR."""
    forms = [unit_form(hardware, _problem(unit)) for unit in chain.units]
    kept = [form for form in forms if form is not None]
    return (
        sum(form.weight_bytes for form in kept),
        sum(form.parameter_bytes + 2 * form.gathered_bytes for form in kept),
        sum(form.ddr_bytes for form in kept),
    )


def taken_bytes(
    hardware: Hardware, chain: Chain, weights: int, others: int, *, tight: bool = True
) -> int:
    """Return the SRAM that a cascade takes.

    Weights share no bank with the rows they are multiplied with. Of several units, one's weights
    may lie in a bank with another's rows: `tight`. Then they wait for each other now and then.
    """
    if tight and sum(isinstance(unit.problem, ConvProblem) for unit in chain.units) > 1:
        return weights + others
    return align(weights, hardware.bank_size) + align(others, hardware.bank_size)


def _late(chain: Chain, skewed: bool) -> tuple[dict[int, int], int]:
    """Return how many rounds the latest reader of every tensor is behind what makes it.

    And the most rounds that a unit is behind the first. Loads run one round ahead.
    """
    depth = _depths(chain) if skewed else [0] * len(chain.units)
    made: dict[int, int] = {}
    late: dict[int, int] = {}
    for index, unit in enumerate(chain.units):
        for read in unit.reads:
            behind = depth[index] - made.get(read.tensor, -1)
            late[read.tensor] = max(late.get(read.tensor, 0), behind)
        buffer = buffer_of(chain.tensors, unit.writes)
        made[buffer] = max(made.get(buffer, 0), depth[index])
    return late, max(depth)


def _outline(
    hardware: Hardware,
    chain: Chain,
    rows: int,
    skewed: bool,
    fixed: tuple[int, int, int],
    behind: tuple[dict[int, int], int],
) -> Outline:
    """Return the estimate of a cascade with this many rows a round.

    Rounds are taken to be alike; a rolling buffer to hold what readers keep and one round's new
    rows, of a round more where the reader works one round behind or DMA runs ahead.
    """
    rate = rates(hardware)
    weights, used, constant_bytes = fixed
    late, deepest = behind
    rounds = ceil(chain.units[-1].rows / rows)
    new: dict[int, int] = {chain.units[-1].writes: rows}
    keep: dict[int, int] = {}
    for unit in reversed(chain.units):
        buffer = buffer_of(chain.tensors, unit.writes)
        new[buffer] = made = max(new.get(unit.writes, 0), new.get(buffer, 0)) or 1
        new[unit.writes] = made
        for read in unit.reads:
            new[read.tensor] = max(new.get(read.tensor, 0), made * read.stride)
            keep[read.tensor] = max(keep.get(read.tensor, 0), read.extent - read.stride)
    copying, rolling = 0.0, 0
    for tensor, count in new.items():
        spec = chain.tensors[tensor]
        if tensor in chain.whole or spec.inside is not None:
            continue
        kept = keep.get(tensor, 0)
        # Rows of the rounds that the latest reader is behind are kept as well.
        if tensor in chain.loaded:
            kept += late.get(tensor, 0) * count
        elif skewed:
            kept += max(0, late.get(tensor, 0) - 1) * count
        capacity = min(max(kept + count, 2 * kept), spec.rows + spec.pads[0] + spec.pads[2])
        rolling += _bytes(hardware, spec, capacity)
        if capacity < spec.rows:
            moved = spec.rows / max(1, count) * kept
            copying += moved * row_bytes(hardware, spec) / hardware.sram_word_bytes
    mac = vector = engines = 0.0
    for unit in chain.units:
        count = min(new[unit.writes], unit.rows)
        times = unit.rows / count
        cost = stage_cost(hardware, _problem(unit), count)
        mac += times * (cost.mac + STAGE_OVERHEAD_CYCLES)
        vector += times * cost.vector
        engines += times * (max(cost.mac, cost.vector) + cost.tail + STAGE_OVERHEAD_CYCLES)
    # What reads rows that move waits for the copy, and the copy for the rows' last readers.
    engines = copying + (max(mac, vector) if skewed else engines)
    if skewed:
        engines += engines / rounds * deepest * SKEW_LOSS
    memory = rate.transfer(constant_bytes, 2 * len(chain.units))
    head, tail, ddr = memory + rate.latency_cycles, 0.0, float(constant_bytes)
    for tensor in (*chain.loaded, *chain.stored):
        spec = chain.tensors[tensor]
        size = spec.rows * spec.columns * spec.channels * spec.element_bytes
        cycles = max(
            rate.transfer(size, rounds if spec.inside is None else spec.rows * spec.columns),
            _runs(hardware, spec) * hardware.core_clock_mhz / hardware.dma_clock_mhz,
        )
        memory += cycles
        ddr += size
        if tensor in chain.stored:
            tail = max(tail, cycles / rounds + rate.latency_cycles)
        else:
            head += cycles / rounds
    return Outline(rows, skewed, weights, used + rolling, engines, memory, head, tail, ddr, rolling)


def _runs(hardware: Hardware, tensor: TensorSpec) -> int:
    """Return the contiguous runs in which rows move, at least one cycle each of one DMA channel."""
    dense = tensor.channels * tensor.element_bytes
    if pixel_pitch(hardware, tensor.channels, tensor.element_bytes) != dense:
        return tensor.rows * tensor.columns
    return tensor.rows


@lru_cache(maxsize=1024)
def build(
    hardware: Hardware, chain: Chain, rows: int, skewed: bool, reserved: int, grow: bool = True
) -> Cascade | None:
    """Return the stages and buffers of a cascade, or None if it does not fit.

    `reserved` bytes hold other tensors. With `grow` buffers take what room is left.
    """
    stages = stages_of(chain, rows, skewed)
    weights, parameters, _ = _fixed(hardware, chain)
    events = {
        buffer: [access.event for access in items]
        for buffer, items in accesses(stages, chain.units, chain.tensors).items()
        if buffer not in chain.whole
    }
    capacity: dict[int, int] = {}
    used = parameters
    for buffer, of_buffer in events.items():
        tensor = chain.tensors[buffer]
        capacity[buffer] = least_capacity(tensor.rows, of_buffer)
        used += _bytes(hardware, tensor, capacity[buffer])
    if taken_bytes(hardware, chain, weights, used + reserved) > hardware.sram_size:
        return None
    # Rows beyond the fewest are taken only where there is room for certain.
    room = hardware.sram_size - align(weights, hardware.bank_size) - used - reserved
    for buffer, of_buffer in events.items() if grow else ():
        room -= _grow(hardware, chain.tensors[buffer], of_buffer, buffer, capacity, room)
    return Cascade(
        tuple(_tiling(hardware, unit, stages, index) for index, unit in enumerate(chain.units)),
        tuple(stages),
        tuple(sorted(capacity.items())),
    )


def _tiling(
    hardware: Hardware, unit: UnitSpec, stages: Sequence[Stage], index: int
) -> ConvTiling | BoxTiling:
    """Return a unit's tiling with the rows of its largest stage."""
    most = max(s.last - s.first for s in stages if s.kind == "compute" and s.index == index)
    made = unit_form(hardware, _problem(unit))
    assert made is not None
    if isinstance(made.tiling, BoxTiling):
        return replace(made.tiling, tile=(most, *made.tiling.tile[1:]))
    return replace(made.tiling, rows=min(most, MAX_EXTENT))


def _bytes(hardware: Hardware, tensor: TensorSpec, rows: int) -> int:
    columns = tensor.columns + tensor.pads[1] + tensor.pads[3]
    return activation_bytes(hardware, rows * columns, tensor.channels, tensor.element_bytes)


def _grow(
    hardware: Hardware,
    tensor: TensorSpec,
    events: Sequence[Event],
    buffer: int,
    capacity: dict[int, int],
    room: int,
) -> int:
    """Enlarge a rolling buffer so that rows are copied seldom and DMA runs ahead; return bytes."""
    had = capacity[buffer]
    new = max((event.last - event.first for event in events if event.kind == "write"), default=0)
    most = tensor.rows + tensor.pads[0] + tensor.pads[2]
    for size in (had * 3, had * 2, had + new):
        wanted = min(size, most)
        extra = _bytes(hardware, tensor, wanted) - _bytes(hardware, tensor, had)
        if wanted <= had or extra > room / 2 or roll(tensor.rows, events, wanted) is None:
            continue
        capacity[buffer] = wanted
        return extra
    return 0
