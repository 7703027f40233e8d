"""The RTL's core (all but the engines) against a plain model of the contract, to the cycle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from tests.cosim.support import needs_verilator
from tests.rtl.core import bench, model
from tests.rtl.core.programs import MAC, REGISTERS, VEC, Random, dma, mac, semaphore, vec
from tilewright.rtl.faults import FAULTS
from tilewright.spec.hardware import Hardware, load_target
from tilewright.spec.program import Instr, encode_program

pytestmark = needs_verilator

LIMIT = 100_000
HALT = Instr("halt")
END = Instr("end_loop")
Bench = tuple[Hardware, Path]
Build = Callable[[str], Bench]


def _targets() -> dict[str, Hardware]:
    def changed(name: str, **changes: Any) -> Hardware:
        content = load_target("tiny8").model_dump() | changes | {"name": name}
        return Hardware.model_validate(content)

    return {
        "tiny8": load_target("tiny8"),
        "edge16": load_target("edge16"),
        # Sizes that are no powers of two, a DDR unit that is half an instruction.
        "odd": changed(
            "odd",
            sram_size=3 * 1000 * 4,
            sram_banks=3,
            sram_word_bytes=4,
            scalar_registers=5,
            dma_channels=3,
            queue_depth=3,
            ddr_bus_bytes=32,
            dma_burst_size=64,
            core_clock_mhz=333,
            ddr_clock_mhz=91,
            dma_clock_mhz=101,
            dma_latency=1,
        ),
        # A DDR unit of two instructions, four channels, a burst of one unit.
        "wide": changed(
            "wide",
            dma_channels=4,
            queue_depth=2,
            ddr_bus_bytes=128,
            dma_burst_size=128,
            ddr_clock_mhz=199,
            dma_latency=40,
            sram_banks=64,
        ),
        "line": changed("line", ddr_bus_bytes=64, dma_burst_size=512, ddr_clock_mhz=150),
    }


FAST = ["tiny8"]
SLOW = ["edge16", "odd", "wide", "line"]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Return a function that builds a target's bench once."""
    built: dict[str, Bench] = {}

    def get(name: str) -> Bench:
        if name not in built:
            hardware = _targets()[name]
            built[name] = hardware, bench.build(hardware, tmp_path_factory.mktemp(name))
        return built[name]

    return get


def _encode(program: Sequence[Instr | None]) -> bytes:
    """Encode a program; None becomes a word of ones."""
    return b"".join(b"\xff" * 64 if item is None else encode_program([item]) for item in program)


def _compare(
    target: Bench,
    program: Sequence[Instr | None],
    *,
    code: bytes | None = None,
    registers: Mapping[int, int] = REGISTERS,
    fault: int = 0,
) -> tuple[bench.Seen, str | None]:
    """Run RTL and model; return what was seen and the first difference."""
    hardware, path = target
    wanted = model.Core(hardware, program, registers)
    wanted.run(LIMIT)
    seen = bench.run(path, code or _encode(program), LIMIT, fault=fault, registers=registers)
    lines = zip_longest(seen.log, wanted.log)
    for number, (got, want) in enumerate(lines):
        if got != want and not (want and want[0] == "R" and not seen.end.startswith("fin")):
            before = "\n  ".join(wanted.log[max(0, number - 8) : number])
            return seen, f"after\n  {before}\nthe RTL has\n  {got}\nthe contract\n  {want}"
    if seen.rest or seen.end != wanted.end:
        return seen, f"{seen.rest} {seen.end}, not {wanted.end}"
    if seen.end.startswith("finished"):
        counters = [seen.counters[8 * engine : 8 * engine + 4] for engine in range(6)]
        if counters != wanted.counters or seen.counters[48] != wanted.t:
            return seen, f"counters {counters}, not {wanted.counters}"
        if seen.sram != bytes(wanted.sram):
            return seen, "SRAM differs"
    return seen, None


def _agree(target: Bench, program: Sequence[Instr | None], **more: Any) -> bench.Seen:
    seen, difference = _compare(target, program, **more)
    assert difference is None, difference
    return seen


def _fetches(seen: bench.Seen) -> int:
    return sum(" mem 10 " in line for line in seen.log)


def _cycles(seen: bench.Seen, what: str) -> list[int]:
    """Return the cycles whose line contains `what`."""
    return [int(line.split()[0]) for line in seen.log if what in line]


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW)])
def test_random_programs(name: str, build: Build) -> None:
    target = build(name)
    for seed in range(20):
        program = Random(target[0], seed).program(150)
        seen = _agree(target, program)
        assert seen.end.startswith("finished")


def test_banks_are_granted_in_cyclic_order(build: Build) -> None:
    # Six ports read one bank; they begin together, so nothing but the order decides.
    program = [
        *(dma(channel, 0, 8, store=True, wait=1 << channel) for channel in (0, 1)),
        mac(8, 8, wait=1 << MAC),
        vec(8, 8, 0, wait=1 << VEC),
        Instr("set_reg", {"rd": 1, "value": 0, "signal": 1 | 2 | 1 << MAC | 1 << VEC}),
        HALT,
    ]
    seen = _agree(build("tiny8"), program)
    order = [int(line.split()[1]) for line in seen.log if line.startswith("R")]
    middle = order[6:-6]
    ring = [0, 1, 2, 3, 5, 6]
    start = ring.index(middle[0])
    assert middle == [ring[(start + i) % 6] for i in range(len(middle))]


@pytest.mark.slow
def test_ddr_follows_its_clock(build: Build) -> None:
    target = build("edge16")
    seen = _agree(target, [dma(0, 60, 0), HALT])
    cycles = _cycles(seen, " mem 00 ")
    assert len(cycles) == 60
    # 400 MHz in 500 MHz: of five cycles the first, where the accumulator is short, has no beat.
    assert all(cycle % 5 != 0 for cycle in cycles)
    # The others are all used, by the channel or by fetch.
    busy = [cycle for cycle in _cycles(seen, " mem ") if cycles[0] <= cycle <= cycles[-1]]
    assert busy == [cycle for cycle in range(cycles[0], cycles[-1] + 1) if cycle % 5]


def test_bursts_keep_ddr_and_streams_share_it(build: Build) -> None:
    target = build("tiny8")

    def units(stream: int) -> list[int]:
        program = [
            dma(0, 32, 0, ddr=0x1000, stream=stream, wait=1),
            dma(1, 32, 0, ddr=0x8000, stream=stream, wait=2),
            *(Instr("set_reg", {"rd": 1, "value": 0}) for _ in range(8)),
            Instr("set_reg", {"rd": 1, "value": 0, "signal": 3}),
            HALT,
        ]
        seen = _agree(target, program)
        words = [line.split() for line in seen.log if " mem 00 " in line]
        return [int(word[word.index("mem") + 2], 16) >> 15 for word in words]

    assert units(0) == ([0] * 8 + [1] * 8) * 4
    assert units(1) == [0, 1] * 32


@pytest.mark.parametrize(("size", "resident"), [(1, True), (16, True), (17, True), (40, False)])
def test_loops_stay_in_the_buffer_or_are_fetched_again(
    size: int, resident: bool, build: Build
) -> None:
    # The body's first instruction stalls, so that fetch has time to run ahead (and to overwrite).
    body = [dma(0, 0, 0, 90), *(dma(i % 2, 0, 0) for i in range(size - 2))]
    program = [Instr("loop", {"count": 6}), *body[: size - 1], END]
    program += [*(dma(1, 0, 0) for _ in range(100)), HALT]
    seen = _agree(build("tiny8"), program)
    units = ceil(len(program) * 64 / 8)
    assert (_fetches(seen) == units) == resident
    dispatched = len([line for line in seen.log if line[0] != "R" and line.split()[1] != "-1"])
    assert dispatched == 1 + 6 * size + 101


def test_nested_loops_and_registers(build: Build) -> None:
    def loop(count: int, body: list[Instr]) -> list[Instr]:
        return [Instr("loop", {"count": count}), *body, END]

    step = Instr("add_reg", {"rd": 3, "value": -0x40})
    inner = loop(3, [dma(0, 1, 1, ddr_r=3, sram_r=3, stream=1), step])
    program = [
        Instr("set_reg", {"rd": 3, "value": 0x4000}),
        *loop(2, loop(1, [*loop(2, [mac(1, 0, act_r=3), *inner]), vec(1, 0, 1, src_r=3)])),
        HALT,
    ]
    seen = _agree(build("tiny8"), program)
    assert len(_cycles(seen, " mem 00 ")) == 12


def test_a_full_queue_stalls_dispatch(build: Build) -> None:
    target = build("tiny8")
    depth = target[0].queue_depth
    program = [*(dma(0, 0, 0, 300) for _ in range(depth + 3)), dma(1, 0, 0), HALT]
    seen = _agree(target, program)
    starts = _cycles(seen, " start 1 ")
    issues = [int(line.split()[0]) for line in seen.log if line.split()[1] == "0"]
    # The queue is full from then on: a pop makes room that dispatch sees a cycle later.
    assert issues[depth + 1 :] == [cycle + 1 for cycle in starts[1:3]]


def test_semaphores_count_all_of_a_cycle(build: Build) -> None:
    # Two channels signal the same semaphore in one cycle, while an instruction takes another.
    both = semaphore(0, MAC)
    program = [
        dma(0, 0, 0, 20, signal=both, wait=1 << 31),
        dma(1, 0, 0, 20, signal=both, wait=1 << 30),
        Instr("set_reg", {"rd": 1, "value": 0, "signal": 3 << 30}),
        mac(0, 0, wait=both, signal=semaphore(MAC, VEC)),
        mac(0, 0, wait=both),
        vec(0, 0, 0, wait=semaphore(MAC, VEC)),
        HALT,
    ]
    target = build("tiny8")
    seen = _agree(target, program)
    assert len(_cycles(seen, " done 3 ")) == 1
    assert seen.end.startswith("finished")
    lost = next(fault for fault in FAULTS if fault.name == "semaphore_lost")
    assert bench.run(target[1], _encode(program), 5000, fault=lost.number).end == "limit 5000"


_RESERVED = bytearray(encode_program([Instr("fence")]))
_RESERVED[40] = 1
_CASES: dict[str, list[Instr | None]] = {
    "opcode": [dma(0, 0, 0, 5), None, HALT],
    "no halt": [dma(0, 0, 0), mac(1, 1)],
    "empty": [],
    "fifth loop": [*(Instr("loop", {"count": 2}) for _ in range(5)), *([END] * 5), HALT],
    "no loop": [END, HALT],
}


@pytest.mark.parametrize("case", list(_CASES))
def test_traps(case: str, build: Build) -> None:
    seen = _agree(build("tiny8"), _CASES[case])
    assert seen.end.startswith("trapped")


@pytest.mark.parametrize(
    "word",
    [
        bytes(_RESERVED),
        encode_program([Instr("dma_fill", {"channel": 3})]),
        encode_program([Instr("set_reg", {"rd": 0})]),
        encode_program([Instr("set_reg", {"rd": 16})]),
        encode_program([Instr("dma_load", {"ddr_r": 16})]),
        encode_program([Instr("vec_copy", {"function": 10})])[:50] + bytes([0x3C]) + bytes(13),
    ],
    ids=["reserved", "channel", "R0", "register", "address", "enum"],
)
def test_words_that_do_not_decode_trap(word: bytes, build: Build) -> None:
    program = [dma(0, 0, 0, 5), None, HALT]
    code = encode_program([dma(0, 0, 0, 5)]) + word + encode_program([HALT])
    seen = _agree(build("tiny8"), program, code=code)
    assert seen.end.startswith("trapped")


def test_a_full_queue_does_not_hide_a_trap(build: Build) -> None:
    program: list[Instr | None] = [dma(0, 0, 0, 4000) for _ in range(17)]
    seen = _agree(build("tiny8"), [*program, None])
    assert int(seen.end.split()[1]) < 4000


CORE = ("tw_seq", "tw_queue", "tw_sem", "tw_sram")
CORE_FAULTS = [fault for fault in FAULTS if fault.module in CORE]


@pytest.mark.parametrize("fault", CORE_FAULTS, ids=lambda fault: fault.name)
def test_planted_faults_show(fault: Any, build: Build) -> None:
    target = build("tiny8")
    for seed in range(30):
        program = Random(target[0], seed).program(150)
        if _compare(target, program, fault=fault.number)[1] is not None:
            return
    pytest.fail(f"{fault.name} has no effect")


def test_faults_of_other_modules_do_not_touch_the_core(build: Build) -> None:
    program = Random(load_target("tiny8"), 1).program(100)
    for fault in FAULTS:
        if fault not in CORE_FAULTS:
            _agree(build("tiny8"), program, fault=fault.number)
