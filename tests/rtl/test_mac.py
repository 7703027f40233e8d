"""The RTL's MAC array against the contract's model, to the cycle, and the simulator, to the bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import zip_longest

import pytest

from tests.rtl.mac import bench, model
from tests.rtl.mac.bench import Bench, Job, Seen
from tests.rtl.mac.programs import Programs
from tilewright.spec.hardware import Hardware, load_target

pytestmark = pytest.mark.skipif(
    shutil.which("verilator") is None or shutil.which("g++") is None,
    reason="needs Verilator and g++",
)


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


PAIRS = ("tiny8", "small4")


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bench]:
    """Return a function that builds a target's harness once."""
    built: dict[str, Bench] = {}

    def get(name: str) -> Bench:
        if name not in built:
            folder = tmp_path_factory.mktemp(name)
            # The chip that is built without planted faults is tested too.
            built[name] = bench.build(
                _targets()[name], folder, faults=name != "edge16", pair=name in PAIRS
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
