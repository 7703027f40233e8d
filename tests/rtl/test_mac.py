"""The RTL's MAC array against the contract's model, to the cycle, and the simulator, to the bit."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest

from tests.cosim.support import needs_verilator
from tests.rtl.mac import bench, model
from tests.rtl.mac.bench import Bench, Job, Seen
from tests.rtl.mac.programs import Programs
from tilewright.rtl.faults import FAULTS, Fault
from tilewright.rtl.package import sv_package
from tilewright.spec.hardware import Hardware, load_target
from tilewright.spec.program import DEFAULTS

pytestmark = needs_verilator


def _changed(name: str, base: str, **changes: object) -> Hardware:
    content = load_target(base).model_dump() | changes | {"name": name}
    return Hardware.model_validate(content)


def _small(name: str, size: int, word: int, **changes: object) -> Hardware:
    return _changed(
        name,
        "tiny8",
        mac_array_size=(size, size),
        vector_lanes=size,
        vector_registers=128,
        sram_word_bytes=word,
        **changes,
    )


def _targets() -> dict[str, Hardware]:
    return {
        "tiny8": load_target("tiny8"),
        "edge16": load_target("edge16"),
        # Odd rows of a half, the shortest pipeline, vectors of up to two words.
        "small4": _small(
            "small4", 4, 4, mac_saturation=False, matrix_registers=6, matrix_register_rows=5,
            mac_latency=3,
        ),
        "int4": _small("int4", 8, 4, dtypes=("int8", "int4"), mac_saturation=False, mac_latency=4),
    }  # fmt: skip


def _odd_targets() -> dict[str, Hardware]:
    both = ("int8", "int4")
    targets = (
        _small("words_of_4", 16, 4, mac_latency=7, sram_size=131072, dtypes=both),
        _small("words_of_64", 4, 64, sram_size=61440, sram_banks=3, dtypes=both),
        _small("large", 32, 8, sram_size=1 << 24, sram_banks=64, matrix_register_rows=33),
        _small(
            "words_of_256", 8, 256, sram_size=65536, sram_banks=2, matrix_registers=2,
            matrix_register_rows=4, mac_latency=1000,
        ),
        _small("wide64", 64, 64, mac_saturation=False, sram_size=1 << 20, dtypes=both),
    )  # fmt: skip
    return {target.name: target for target in targets}


PAIRS = ("tiny8", "small4", "words_of_4", "words_of_64", "words_of_256")


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bench]:
    """Return a function that builds a target's harness once."""
    builder = bench.Builder(tmp_path_factory.mktemp("mac"))
    built: dict[str, Bench] = {}

    def get(name: str) -> Bench:
        if name not in built:
            # A chip that is built without planted faults is tested too.
            built[name] = builder.build(
                (_targets() | _odd_targets())[name], faults=name != "edge16", pair=name in PAIRS
            )
        return built[name]

    return get


def _difference(hardware: Hardware, job: Job, seen: Seen) -> str | None:
    """Return what the RTL did otherwise than the contract, or None."""
    wanted = model.predict(hardware, job)
    for number, (got, want) in enumerate(zip_longest(seen.log, wanted.log)):
        if got != want:
            before = "\n  ".join(wanted.log[max(0, number - 12) : number])
            return f"after\n  {before}\nthe RTL has\n  {got}\nthe contract\n  {want}"
    if not seen.ended:
        return "it hangs"
    for (half, rows), (want_half, sums) in zip(seen.full, wanted.full, strict=True):
        if half != want_half or (rows[: sums.shape[0], : sums.shape[1]] != sums).any():
            return f"half {half}:\n{rows}\nthe simulator\n{sums}"
    for index, blocks in enumerate(wanted.kept):
        for half, sums in blocks:
            _, rows = seen.kept[2 * index + half]
            if (rows[: sums.shape[0], : sums.shape[1]] != sums).any():
                return f"kept half {half}:\n{rows}\nthe simulator\n{sums}"
    return None


def _jobs(hardware: Hardware, count: int, seed: int) -> list[Job]:
    jobs: list[Job] = []
    for number, busy in enumerate((0.0, 0.1, 0.5, 0.8)):
        programs = Programs(hardware, 100 * seed + number)
        jobs.append(Job(programs.sequence(count), programs.memory(), programs.plan(busy)))
    return jobs


@pytest.mark.parametrize("name", list(_targets()))
def test_random_instructions(name: str, build: Callable[[str], Bench]) -> None:
    target = build(name)
    jobs = _jobs(target.hardware, 40, 1)
    for job, seen in zip(jobs, target.run(jobs), strict=True):
        assert _difference(target.hardware, job, seen) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", list(_odd_targets()))
def test_other_sizes(name: str, build: Callable[[str], Bench]) -> None:
    target = build(name)
    for seed in (10, 11):
        jobs = _jobs(target.hardware, 40, seed) + _near_limits(target, seed)
        for job, seen in zip(jobs, target.run(jobs), strict=True):
            assert _difference(target.hardware, job, seen) is None


def _conv(**fields: int) -> dict[str, int]:
    return DEFAULTS["mac_conv"] | fields


def _events(seen: Seen, what: str) -> list[int]:
    return [int(line.split()[0]) for line in seen.log if line.split()[1] == what]


def test_cycles_worked_out_by_hand(build: Callable[[str], Bench]) -> None:
    """Tiny8: words of 8 bytes, a latency of 12 cycles."""
    fields = _conv(
        act=3, wgt=8192, out_h=3, out_w=2, block_rows=2, oy_stride=16, ox_stride=8, c_rows=8,
        c_last=5, cols=8, cols_last=8, wgt_pitch=8, m_half=1, signal=5,
    )  # fmt: skip
    plan = bench.Plan(drains=(100,))
    job = Job([fields, fields], bytes(range(256)) * 128, plan)
    (seen,) = build("tiny8").run([job])
    log = [line for line in seen.log if line.split()[0] in ("0", "1", "5", "6", "9", "10", "11")]
    # Five rows of weights in 1..5. Block 0: four pixels of five bytes from byte 3, one word each,
    # in 6..9; the weights of block 1 beside them, until 10. Block 1: two pixels in 11 and 12.
    assert log == [
        "0 pop",
        "1 wgt 400",
        "5 wgt 404",
        "6 act 0",
        "6 wgt 400",
        "9 act 3",
        "9 wgt 403",
        "10 wgt 404",
        "11 act 4",
    ]
    # Block 0 ended in 10, block 1 in 12. The second instruction finds half 1 FULL until 23 + 100.
    assert _events(seen, "full")[:2] == [10 + 1 + 12, 12 + 1 + 12]
    assert _events(seen, "done")[0] == 12 + 12
    assert _events(seen, "pop")[1] == 25
    assert _events(seen, "stall")[:94] == list(range(25 + 6, 23 + 100 + 1))[:94]
    assert _events(seen, "act")[6] == 124


def _near_limits(target: Bench, seed: int) -> list[Job]:
    """Return jobs that accumulate on numbers a few steps below overflow, of either sign."""
    hardware = target.hardware
    jobs: list[Job] = []
    for number in range(6):
        programs = Programs(hardware, 1000 * seed + number)
        first = programs.instruction()
        while first["push"] or first["oc_blocks"] * first["out_h"] < 2:
            first = programs.instruction()
        fields = programs.instruction(first)
        shape = (2, hardware.accumulator_rows, hardware.array_size)
        distance = programs.rng.integers(0, 1 << 15, shape)
        signs = programs.rng.choice(np.array([-1, 1]), shape)
        values = (signs * ((1 << 31) - 1 - distance)).astype(np.int32)
        preloads = {(h, r): values[h, r] for h in range(2) for r in range(shape[1])}
        jobs.append(Job([fields], programs.memory(), programs.plan(0.2), preloads))
    return jobs


@pytest.mark.parametrize("name", list(_targets()))
def test_accumulators_overflow_as_the_target_says(name: str, build: Callable[[str], Bench]) -> None:
    target = build(name)
    jobs = _near_limits(target, 3)
    for job, seen in zip(jobs, target.run(jobs), strict=True):
        assert _difference(target.hardware, job, seen) is None
    # They do overflow: a target of the other kind has other results.
    content = target.hardware.model_dump()
    other = Hardware.model_validate(content | {"mac_saturation": not content["mac_saturation"]})
    assert any(
        (one != two).any()
        for job in jobs
        for one, two in zip(_sums(target.hardware, job), _sums(other, job), strict=True)
    )


def _sums(hardware: Hardware, job: Job) -> list[model.Sums]:
    wanted = model.predict(hardware, job)
    return [sums for blocks in (wanted.full, *wanted.kept) for _, sums in blocks]


def test_the_largest_counts(build: Callable[[str], Bench]) -> None:
    target = build("tiny8")
    place = {"wgt": 8192, "act": 5, "wgt_pitch": 9, "cols_last": 8}
    instructions = [
        _conv(out_h=4096, block_rows=3, out_w=2, oy_stride=1, ox_stride=1, c_last=1, **place),
        _conv(oc_blocks=64, ob_stride=63, wgt_ob_stride=77, cols=7, out_h=2, diag=1, **place),
        _conv(c_blocks=1024, cb_stride=3, c_rows=1, c_last=2, block_rows=4096, **place),
        _conv(out_w=64, ox_stride=100, k_w=9, kx_stride=31, k_h=2, c_last=3, **place),
    ]
    job = Job(instructions, Programs(target.hardware, 5).memory(), bench.Plan(wgt="1110"))
    (seen,) = target.run([job])
    assert _difference(target.hardware, job, seen) is None


@pytest.mark.parametrize("name", ["tiny8", "int4"])
def test_one_instruction_can_overflow(name: str, build: Callable[[str], Bench]) -> None:
    """More than 2^17 products of 2^14 leave int32; then a second instruction takes some away."""
    target = build(name)
    shape = {"m_half": 1, "c_rows": 8, "diag": 1, "cols": 8, "cols_last": 8, "out_w": 1}
    up = _conv(act=0, wgt=8192, k_h=256, k_w=256, c_blocks=3, push=0, **shape)
    down = _conv(act=0, wgt=8200, k_h=2, k_w=100, accumulate=1, **shape)
    sram = bytearray(target.hardware.sram_size)
    sram[0:8] = sram[8192:8200] = b"\x80" * 8
    sram[8200:8208] = b"\x7f" * 8
    job = Job([up, down], bytes(sram))
    (seen,) = target.run([job])
    assert _difference(target.hardware, job, seen) is None
    up_sum, down_sum = 3 * 2**16 * 2**14, 200 * 128 * 127
    wanted = 2**31 - 1 - down_sum if name == "tiny8" else up_sum - 2**32 - down_sum
    assert (seen.full[0][1][0] == wanted).all()


_FAULTS = [fault for fault in FAULTS if fault.module == "tw_mac"]


@pytest.mark.parametrize("fault", _FAULTS, ids=lambda fault: fault.name)
@pytest.mark.parametrize("name", ["tiny8", "small4", "int4"])
def test_planted_faults_are_seen(fault: Fault, name: str, build: Callable[[str], Bench]) -> None:
    target = build(name)
    hardware = target.hardware
    jobs = _near_limits(target, 3) if fault.name == "saturation" else _jobs(hardware, 15, 2)
    results = target.run(jobs, fault=fault.number, limit=60_000)
    differences = [
        _difference(hardware, job, seen) for job, seen in zip(jobs, results, strict=True)
    ]
    assert any(differences)
    for job, seen, difference in zip(jobs, results, differences, strict=True):
        wanted = model.predict(hardware, job)
        if fault.name == "stall_prime_k":
            assert seen.ended == (difference is None)
            continue
        # A fault of the data leaves the cycles as they are, in both forms of the array; but what
        # the set swapped to holds of an instruction before is not the same in both.
        early = fault.name == "swap_early"
        assert [line for line in seen.log if not (early and "differs" in line)] == wanted.log
        if fault.name == "weight_sign":
            for (_, rows), (_, sums) in zip(seen.full, wanted.full, strict=True):
                columns = min(sums.shape[1], hardware.array_size - 1)
                assert (rows[: len(sums), :columns] == sums[:, :columns]).all()


def test_stalls_hang_only_steps_of_an_odd_prime_number_of_rows(
    build: Callable[[str], Bench],
) -> None:
    target = build("tiny8")
    fault = next(fault for fault in _FAULTS if fault.name == "stall_prime_k")
    jobs = [
        Job([_conv(wgt=8192, c_last=rows, cols_last=8, wgt_pitch=8)], bytes(32768), plan)
        for rows in range(1, 9)
        for plan in (bench.Plan(), bench.Plan(wgt="1101"))
    ]
    ended = [seen.ended for seen in target.run(jobs, fault=fault.number, limit=200)]
    assert all(ended[0::2])
    assert [rows for rows in range(1, 9) if not ended[2 * rows - 1]] == [3, 5, 7]


def test_a_latency_below_the_pipeline_is_refused(tmp_path: Path) -> None:
    for latency, accepted in ((2, False), (3, True)):
        hardware = _changed("fast", "tiny8", mac_latency=latency)
        (tmp_path / "tw_pkg.sv").write_text(sv_package(hardware))
        done = subprocess.run(
            ["verilator", "--lint-only", "--top-module", "tw_mac", "tw_pkg.sv", *bench.sources()],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode == 0) == accepted
        assert ("mac_latency must be 3 or more" in done.stderr) != accepted
