"""Random programs by profile and seed, legal by construction for a chip.

A program is a list of instructions, R registers, and DDR windows with seeded content
(`memory.py`): together a `Case`, which can be written as text (`text.py`) and read again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tilewright.codegen.verify import verify_program
from tilewright.diagnostics import TilewrightError
from tilewright.spec.access import accesses
from tilewright.spec.hardware import Hardware
from tilewright.spec.program import SEQ, Instr, engine_of, full_fields
from tilewright.testgen import extremes, patterns, rows
from tilewright.testgen.builder import Builder, Fields, valuations
from tilewright.testgen.memory import Ddr, Window, far_windows, low_window, make_ddr
from tilewright.testgen.sync import FROM_ENGINE, TO_ENGINE, synchronise
from tilewright.testgen.values import Pick

PROFILES = ("mixed", "dma", "mac", "vector", "control", "contention", "address")
PRIME_K, SATURATION = "prime_k", "saturation"
ROWS = "rows"
"""Only where the chip has `vector_rows` are there any of its own instructions."""
ALL_PROFILES = (*PROFILES, PRIME_K, SATURATION, ROWS)


@dataclass(frozen=True)
class Case:
    """A stress test: everything that decides what must happen."""

    name: str
    hardware: Hardware
    program: list[Instr]
    seed: int
    """Of DDR's content."""
    windows: tuple[Window, ...]
    registers: dict[int, int]

    def ddr(self) -> Ddr:
        """Return a fresh DDR."""
        return make_ddr(self.hardware, self.seed, self.windows)

    def with_program(self, program: list[Instr]) -> Case:
        """Return the case with other instructions."""
        return replace(self, program=program)

    def verify(self) -> None:
        """Check the program against its chip.

        Raises:
            TilewrightError: E0501.
        """
        verify_program(self.program, self.hardware, registers=self.registers)


Maker = Callable[[Builder], object]


def _weighted(b: Builder, makers: dict[Maker, int]) -> None:
    maker = b.pick.rng.choices(list(makers), list(makers.values()))[0]
    maker(b)


def _other_work(b: Builder) -> Callable[[], object]:
    """Return what adds work that may stand between a push and its drain."""

    def add() -> None:
        for _ in range(b.pick.between(1, 3)):
            _weighted(b, {patterns.load: 2, patterns.fill: 2, patterns.store: 2, patterns.copy: 2,
                          patterns.eltwise: 1, patterns.pool: 1})  # fmt: skip

    return add


def _conv(b: Builder) -> bool:
    return patterns.conv(b, _other_work(b))


MIX: dict[str, dict[Maker, int]] = {
    "mixed": {
        patterns.load: 5, patterns.store: 4, patterns.fill: 2, patterns.param: 2,
        patterns.table: 1, _conv: 6, patterns.eltwise: 3, patterns.copy: 3, patterns.pool: 3,
        patterns.resize: 2, patterns.registers: 2, patterns.fence: 1, extremes.dma: 1,
    },
    "dma": {
        patterns.load: 8, patterns.store: 8, patterns.fill: 3, patterns.registers: 2,
        patterns.fence: 1, patterns.copy: 1, extremes.dma: 1,
    },
    "mac": {
        _conv: 10, patterns.load: 3, patterns.store: 2, patterns.param: 2, patterns.table: 1,
        patterns.registers: 1, extremes.mac: 1,
    },
    "vector": {
        patterns.eltwise: 5, patterns.copy: 5, patterns.pool: 4, patterns.resize: 4,
        patterns.param: 3, patterns.table: 2, patterns.load: 2, patterns.store: 2,
        patterns.registers: 1, patterns.fence: 1, extremes.vector: 1,
    },
    "control": {
        patterns.load: 3, patterns.store: 2, patterns.fill: 3, patterns.copy: 2,
        patterns.registers: 4, patterns.fence: 2, _conv: 2, patterns.eltwise: 1,
    },
    "contention": {
        patterns.load: 4, patterns.store: 4, patterns.fill: 4, _conv: 5, patterns.copy: 3,
        patterns.eltwise: 3, patterns.pool: 2,
    },
    "address": {
        patterns.load: 8, patterns.store: 8, patterns.registers: 4, patterns.fill: 1,
        patterns.copy: 1,
    },
    ROWS: {
        rows.softmax: 6, rows.layer_norm: 6, patterns.load: 3, patterns.store: 2, patterns.fill: 2,
        patterns.copy: 2, patterns.eltwise: 1, patterns.pool: 1, patterns.param: 1, _conv: 1,
    },
}  # fmt: skip

_BODY: dict[Maker, int] = {
    patterns.load: 4, patterns.store: 3, patterns.fill: 3, patterns.copy: 3, _conv: 3,
    patterns.eltwise: 2, patterns.pool: 1, patterns.param: 1, patterns.resize: 1,
}  # fmt: skip


def loop(b: Builder, parts: int, *, small: bool = False, body: dict[Maker, int] = _BODY) -> None:
    """Add a loop or a nest of loops around random instructions.

    Args:
        b: the builder.
        parts: instructions of the body, about.
        small: tiny instructions only (bodies larger than the instruction buffer).
        body: what makes the others.
    """
    pick = b.pick
    if b.in_loop:
        return
    if parts >= 60:
        counts = [pick.of(2, 3)]
    else:
        counts = [pick.of(1, 2, 3, 5, 7)]
        for _ in range(pick.of(0, 0, 0, 1, 2, 3)):
            counts.append(pick.of(1, 2, 2, 3))
    total = 1
    for count in counts:
        total *= count
    steps: dict[int, int] = {}
    for _ in range(pick.of(0, 1, 2)):
        number = pick.between(1, b.hardware.scalar_registers - 1)
        size = b.hardware.sram_word_bytes
        steps[number] = pick.of(1, -1, size, -size, 17, -64, 64)
        base = pick.of(0, 4096, 1 << 15, 65500, (1 << 40) - 100, pick.between(0, 5000))
        b.append(Instr("set_reg", {"rd": number, "value": base}))
    b.in_loop = True
    first = dict(b.values[0])
    b.values = valuations(first, steps, total)
    start = len(b.program)
    for _ in range(parts):
        if small:
            tiny(b, pick.of(*engines(b)))
        else:
            _weighted(b, body)
    if len(b.program) == start:
        patterns.fill(b)
    if len(b.program) > start:
        b.close_loop(start, counts, steps, gated=pick.chance(0.6))
    b.in_loop = False
    after = dict(first)
    if len(b.program) > start:
        for number, step in steps.items():
            after[number] = (after.get(number, 0) + total * step) & ((1 << 40) - 1)
    b.values = [after]


def engines(b: Builder) -> list[int]:
    """Return the numbers of all engines of the chip."""
    return [*range(b.hardware.dma_channels), 4, 5]


def tiny(b: Builder, engine: int) -> None:
    """Add an instruction of an engine that takes a few cycles."""
    pick, hw = b.pick, b.hardware
    if engine == 4:
        side = hw.bank_size
        f: Fields = {"push": 0, "c_last": pick.size(hw.array_size), "m_half": pick.of(0, 1)}
        f |= {"act": b.sram(hw.array_size, banks=[0]), "wgt": side + pick.between(0, 40)}
        f |= {"cols_last": pick.size(hw.array_size), "wgt_pitch": pick.of(0, hw.array_size)}
        b.add("mac_conv", f)
    elif engine == 5:
        f = {"n0": pick.size(2 * hw.vector_lanes), "src_s0": 1, "dst_s0": 1}
        f |= {"src": b.sram(64, read=True), "dst": b.sram(64)}
        b.add("vec_copy", f)
    else:
        f = {
            "channel": engine,
            "n0": pick.size(32),
            "sram": b.sram(32),
            "fill": pick.between(0, 255),
        }
        b.add("dma_fill", f)


def flood(b: Builder) -> None:
    """Fill an engine's queue behind a long instruction, then keep the sequencer waiting."""
    pick = b.pick
    engine = pick.one(engines(b))
    {4: _conv, 5: patterns.pool}.get(engine, patterns.load)(b)
    for _ in range(b.hardware.queue_depth + pick.between(1, 6)):
        tiny(b, engine)


def fork_join(b: Builder) -> None:
    """Start equal work on all DMA channels by one semaphore each, and wait for all of it.

    They run in step, so that signals, requests and ends meet in one cycle.
    """
    pick, hw = b.pick, b.hardware
    size = pick.size(200)
    bank = pick.between(0, hw.sram_banks - 1)
    apart = pick.chance(0.5)
    places: list[int] = []
    for number in range(hw.dma_channels):
        home = (bank + number) % hw.sram_banks if apart else bank
        places.append(home * hw.bank_size + number * 256 % (hw.bank_size - 200))
    span = {"n0": 1, "n1": hw.dma_channels, "src_s1": 0, "dst_s1": 0}
    low, high = min(places), max(places)
    reach = {"n0": 2, "dst_s0": high - low, "src_s0": 0} if high - low < 1 << 18 else span
    source = b.sram(1, banks=[(bank + hw.dma_channels) % hw.sram_banks])
    b.add("vec_copy", reach | {"src": source, "dst": low})
    for number, place in enumerate(places):
        b.add(
            "dma_fill", {"channel": number, "sram": place, "n0": size, "fill": pick.between(0, 255)}
        )
    stored = pick.chance(0.5)
    reader: Fields = {"n0": 2, "src_s0": high - low, "dst_s0": 1, "src": low, "dst": source}
    if stored or high - low >= 1 << 18:
        b.add("dma_store", {"channel": pick.between(0, hw.dma_channels - 1), "stream": 1, "n0": 8,
                            "sram": places[0], "ddr": b.ddr(8)})  # fmt: skip
    else:
        b.add("vec_copy", reader)


def disturb(b: Builder, conv: Fields) -> None:
    """Add DMA and vector traffic in the banks a convolution reads, in bytes it does not."""
    pick, hw = b.pick, b.hardware
    for name in pick.rng.sample(("act", "wgt", "act", "wgt"), 4):
        bank = conv[name] // hw.bank_size
        size = pick.size(160, 20)
        place = bank * hw.bank_size + pick.between(hw.bank_size // 2, hw.bank_size - 2 * size - 64)
        kind = pick.of("fill", "load", "copy", "store")
        dma: Fields = {"channel": pick.between(0, hw.dma_channels - 1), "n0": size, "sram": place}
        if kind == "fill":
            b.add("dma_fill", dma)
        elif kind == "load":
            b.add("dma_load", dma | {"stream": 1, "ddr": b.ddr(size)})
        elif kind == "store":
            b.add("dma_store", dma | {"stream": 1, "ddr": b.ddr(size)})
        else:
            b.add("vec_copy", {"n0": size, "src_s0": 1, "dst_s0": 1, "src": place,
                               "dst": place + size + pick.between(0, 9)})  # fmt: skip


def _prime_conv(b: Builder, small: bool) -> Fields:
    """Return a convolution with prime reductions; `small`: with little around them."""
    pick, hw = b.pick, b.hardware
    primes = [value for value in (3, 5, 7, 11, 13, 17, 19, 23, 29, 31) if value < hw.array_size]
    banks = pick.rng.sample(range(hw.sram_banks), 2)
    c_blocks = pick.of(1, 2, 3)
    rows = {"c_rows": pick.one(primes), "c_last": pick.one(primes)}
    array = hw.array_size
    out_w, out_h = pick.between(2, 9), pick.of(1, 2, 3)
    f: Fields = rows | {"c_blocks": c_blocks, "k_w": pick.of(1, 3, 5), "k_h": pick.of(1, 2)}
    f |= {"out_w": out_w, "out_h": out_h, "block_rows": pick.of(1, out_h), "cols_last": array}
    f["block_rows"] = min(f["block_rows"], max(1, hw.accumulator_rows // out_w))
    f |= {"wgt_pitch": pick.of(array, array + 1, array - 1), "cb_stride": pick.of(array, 7, 13)}
    f |= {
        "kx_stride": pick.of(5, 11, array),
        "ky_stride": pick.of(37, 64),
        "ox_stride": pick.of(7, 8),
    }
    f |= {"oy_stride": pick.of(41, 64), "m_half": pick.of(0, 1)}
    f |= {"act": banks[0] * hw.bank_size + pick.between(0, 60)}
    f |= {"wgt": banks[1] * hw.bank_size + pick.between(0, 60)}
    if small:
        f |= {"c_blocks": 1, "k_w": 1, "k_h": 1, "out_w": 2, "out_h": 1, "block_rows": 1}
        f |= {"cols_last": pick.size(array), "wgt_pitch": pick.of(0, 1, array)}
        for name, bank in zip(("act", "wgt"), banks, strict=True):
            f[name] = bank * hw.bank_size
    return f


def _apart(b: Builder, conv: Fields, drain: Fields) -> Fields | None:
    """Return the drain at the first place that leaves what the convolution reads alone."""
    hw = b.hardware
    used = {conv[name] // hw.bank_size for name in ("act", "wgt")}
    banks = sorted(range(hw.sram_banks), key=lambda bank: bank in used)
    span = max(r.end for r in accesses(hw, "vec_drain", full_fields(Instr("vec_drain", drain))))
    places = [bank * hw.bank_size + start for start in (0, hw.bank_size // 2) for bank in banks]
    for place in (*places, max(0, hw.sram_size - span)):
        placed = drain | {"dst": place}
        if b.fits("vec_drain", placed) and not patterns.meets(b, placed, [conv]):
            return placed
    return None


def prime_k(b: Builder) -> None:
    """Add a convolution with prime reductions whose operands' banks others keep busy."""
    # In reach of the disturbance while it runs: everything else of the convolution lies in the
    # lower half of its banks, and what disturbs in the upper half.
    if not b.v_written.any():
        patterns.param(b, 2)
    if not b.v_written.any():
        return
    for attempt in range(patterns.TRIES):
        f = _prime_conv(b, small=attempt >= patterns.TRIES // 2)
        if not b.fits("mac_conv", f):
            continue
        shape = {key: f[key] for key in ("out_w", "out_h", "block_rows", "cols_last", "m_half")}
        drain: Fields = shape | {"raw": 1, "ox_stride": 4 * b.hardware.array_size}
        drain["oy_stride"] = drain["ox_stride"] * f["out_w"]
        placed = _apart(b, f, drain)
        if placed is None:
            continue
        # Before and behind: the array begins while the others are at work.
        disturb(b, f)
        v = patterns.written_v(b, 1)
        assert v is not None, "one was written"
        b.append(Instr("mac_conv", f))
        b.append(Instr("vec_drain", placed | {"v": v}))
        disturb(b, f)
        disturb(b, f)
        return


def _prologue(b: Builder, profile: str) -> None:
    """Load data and parameters, so that what follows has something to read."""
    pick, hw = b.pick, b.hardware
    size = min(hw.sram_size // 16, 768 if hw.sram_word_bytes <= 8 else 2048)
    rows = 1 if profile in ("control", "address") else 2
    for number in range(rows):
        chunk = min(size, 1 << 19)
        place = b.sram(chunk)
        f = {"channel": number % hw.dma_channels, "stream": 1, "n0": chunk}
        if b.add("dma_load", f | {"ddr": b.ddr(chunk, low=True), "sram": place}):
            b.written(place, chunk)
    if profile in ("dma", "address"):
        patterns.registers(b)
        return
    for _ in range(pick.of(1, 2, 3)):
        patterns.param(b)
    if pick.chance(0.5):
        patterns.table(b)


def _length(profile: str, pick: Pick) -> int:
    if profile == ROWS:
        return pick.between(4, 12)
    return {"control": pick.between(6, 30), "mac": pick.between(3, 9), "dma": pick.between(8, 24),
            "address": pick.between(8, 24)}.get(profile, pick.between(6, 18))  # fmt: skip


def _grow(b: Builder, profile: str) -> None:
    pick = b.pick
    if profile == SATURATION:
        patterns.saturate(b)
        return
    _prologue(b, profile)
    if profile == PRIME_K:
        for _ in range(pick.between(2, 4)):
            prime_k(b)
        return
    if profile == "contention" or (profile == ROWS and pick.chance(0.2)):
        b.banks = tuple(sorted(pick.rng.sample(range(b.hardware.sram_banks), 2)))
        if b.banks[1] != b.banks[0] + 1:
            b.banks = (b.banks[0],)
    loops = {"control": 0.5, "mixed": 0.12, "contention": 0.1}.get(profile, 0.06)
    for _ in range(_length(profile, pick)):
        if profile == "control" and pick.chance(0.12):
            flood(b)
        elif profile in ("contention", "control") and pick.chance(0.2):
            fork_join(b)
        elif pick.chance(loops):
            long = profile == "control" and pick.chance(0.15)
            body = MIX[ROWS] if profile == ROWS else _BODY
            loop(b, pick.between(60, 75) if long else pick.between(1, 6), small=long, body=body)
        else:
            _weighted(b, MIX[profile])
    if profile == "control" and pick.chance(0.3):
        for _ in range(pick.between(64, 140)):
            tiny(b, pick.one(engines(b)))
    for _ in range(3):
        patterns.store(b)


def sequencer_semaphores(case: Case, pick: Pick) -> None:
    """Let engines and the sequencer wait for each other at a few places (in place)."""
    program = case.program
    depth = 0
    outside: list[int] = []
    for position, instr in enumerate(program):
        depth += {"loop": 1, "end_loop": -1}.get(instr.name, 0)
        if not depth and instr.name not in ("loop", "end_loop", "halt"):
            outside.append(position)
    owner = {p: engine_of(program[p].name, full_fields(program[p])) for p in outside}
    waits = [p for p in outside if owner[p] == SEQ]
    for number, giver in ((FROM_ENGINE, True), (TO_ENGINE, False)):
        engine = pick.of(0, 1, 5)
        last = -1
        for position in waits:
            if pick.chance(0.5):
                continue
            if giver:
                partners = [p for p in outside if last < p < position and owner[p] == engine]
            else:
                partners = [p for p in outside if p > max(position, last) and owner[p] == engine]
            if not partners:
                continue
            partner = partners[-1] if giver else partners[0]
            last = partner
            first, second = sorted((partner, position))
            for at, key in ((first, "signal"), (second, "wait")):
                fields = program[at].fields
                fields[key] = fields.get(key, 0) | 1 << number


def generate(hardware: Hardware, profile: str, seed: int) -> Case:
    """Return the random program of a profile and seed.

    Raises:
        TilewrightError: E0501: it is not legal, a fault of the generator.
    """
    if profile not in ALL_PROFILES:
        raise ValueError(f"profile must be one of {', '.join(ALL_PROFILES)}, not {profile!r}")
    pick = Pick(f"{hardware.name}/{profile}/{seed}")
    windows = [low_window(hardware)]
    if profile == "address" or (profile == "mixed" and pick.chance(0.2)):
        windows += far_windows(hardware)
    registers: dict[int, int] = {}
    for number in range(1, hardware.scalar_registers):
        if pick.chance(0.3):
            registers[number] = pick.of(0, 8, 4095, (1 << 40) - 8, windows[-1].address)
    b = Builder(hardware, pick, tuple(windows), registers)
    _grow(b, profile)
    b.program.append(Instr("halt"))
    return finish(
        Case(f"{profile}-{seed}", hardware, b.program, seed, tuple(windows), registers), seed
    )


def finish(case: Case, seed: int, *, sequencer: bool = True) -> Case:
    """Return the case with semaphores, verified.

    Raises:
        TilewrightError: E0501: it cannot be made legal.
    """
    try:
        program = synchronise(case.program, case.hardware, case.registers, seed=seed)
    except ValueError as error:
        raise TilewrightError("E0501", f"`{case.name}` cannot be ordered: {error}") from error
    result = case.with_program(program)
    if sequencer:
        sequencer_semaphores(result, Pick(f"sequencer/{seed}"))
    result.verify()
    return result
