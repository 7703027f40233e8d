"""The critical chain: its links cover the run, each for the reason that held it up."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from tests.unit.sim_programs import conv_case, pipeline
from tilewright.sim.cycle import CycleSimulator
from tilewright.spec.hardware import load_target
from tilewright.spec.program import Dispatched, Instr, sequence
from tilewright.waves.critical import Clock, Link, Times, TimingReport, critical_chain

TINY = load_target("tiny8")


def chain_of(program: list[Instr]) -> tuple[list[Link], int]:
    result = CycleSimulator(TINY).run(program)
    log = result.log
    stream = list(sequence(program, TINY.scalar_registers))
    links = critical_chain(stream, TINY, Times(log.issue, log.start, log.end))
    return links, result.cycles


@pytest.mark.parametrize("tiles", [1, 5])
def test_links_follow_each_other_from_start_to_end(tiles: int) -> None:
    links, end = chain_of(pipeline(TINY, tiles))
    assert links[0].begin == 0
    assert links[-1].end == end
    for one, two in pairwise(links):
        assert one.end == two.begin
        assert one.cycles > 0
    assert sum(link.cycles for link in links) == end


def test_the_chain_of_a_convolution_goes_through_semaphores_and_accumulators() -> None:
    links, _ = chain_of(conv_case(TINY, 1).program)
    names = [link.name for link in links]
    # Its weights or its activations, whichever come last, then down to the store.
    assert names[-4:] == ["mac_conv", "vec_drain", "dma_store", "halt"]
    assert "dma_load" in names
    after = {link.name: link.after for link in links}
    assert after["vec_drain"] == "accumulators"
    assert after["dma_store"] == "semaphore 25 of vec"
    assert after["mac_conv"].startswith("semaphore")
    assert after["halt"] == "all engines"


@pytest.mark.parametrize(
    "program",
    [
        [Instr("halt")],
        [*[Instr("set_reg", {"rd": 3, "value": i}) for i in range(40)], Instr("halt")],
        [*pipeline(TINY, 2)[:-1], Instr("fence"), *pipeline(TINY, 1)],
        [*pipeline(TINY, 2)[:-1], *[Instr("add_reg", {"rd": 3})] * 900, Instr("halt")],
    ],
)
def test_the_sequencer_is_part_of_the_chain(program: list[Instr]) -> None:
    links, cycles = chain_of(program)
    assert links[-1].name == "halt"
    assert (links[0].begin, links[-1].end) == (0, cycles)
    assert sum(link.cycles for link in links) == cycles
    assert all(one.end == two.begin for one, two in pairwise(links))


def test_what_follows_a_fence_waited_for_what_the_fence_waited_for() -> None:
    stream, times = made([
        ("dma_load", 0, {}, 10, 11, 500),
        ("fence", 6, {}, 500, 500, 501),
        ("vec_copy", 5, {}, 501, 502, 600),
    ])  # fmt: skip
    links = critical_chain(stream, TINY, times)
    assert [(link.name, link.after, link.begin, link.end) for link in links] == [
        ("dma_load", "start", 0, 500), ("vec_copy", "dispatch", 500, 600),
    ]  # fmt: skip


def made(
    rows: list[tuple[str, int, dict[str, int], int, int, int]],
) -> tuple[list[Dispatched], Times]:
    """Return instructions (name, engine, fields, issue, start, end) and their times."""
    stream = [
        Dispatched(i, name, engine, {"wait": 0, "signal": 0, "push": 1, **fields}, f"l{i}")
        for i, (name, engine, fields, *_) in enumerate(rows)
    ]
    columns = np.array([row[3:] for row in rows], np.int64)
    return stream, Times(columns[:, 0], columns[:, 1], columns[:, 2])


def test_what_was_latest_is_the_reason() -> None:
    stream, times = made([
        ("dma_load", 0, {"signal": 1}, 10, 11, 50),
        ("dma_load", 1, {"signal": 2}, 11, 12, 70),
        ("vec_copy", 5, {"wait": 3}, 12, 70, 90),
        ("vec_copy", 5, {}, 13, 90, 95),
    ])  # fmt: skip
    links = critical_chain(stream, TINY, times)
    assert [(link.index, link.after, link.begin, link.end) for link in links] == [
        (1, "start", 0, 70), (2, "semaphore 1 of dma1", 70, 90), (3, "engine order", 90, 95),
    ]  # fmt: skip


def test_a_full_queue_leads_to_the_instruction_that_made_room() -> None:
    depth = TINY.queue_depth
    rows = [("dma_load", 0, {}, 10 + i, 20 + 100 * i, 120 + 100 * i) for i in range(depth + 1)]
    # The next one is dispatched only when the second starts, and an independent copy behind it.
    rows.append(("dma_load", 0, {}, 121, 20 + 100 * (depth + 1), 120 + 100 * (depth + 1)))
    rows.append(("vec_copy", 5, {}, 122, 123, 5000))
    links = critical_chain(*(lambda pair: (pair[0], TINY, pair[1]))(made(rows)))
    assert [(link.index, link.after) for link in links] == [
        (0, "start"), (depth + 2, "queue full"),
    ]  # fmt: skip
    assert [(link.begin, link.end) for link in links] == [(0, 120), (120, 5000)]


def test_the_clock_and_the_deadline() -> None:
    links = [Link(0, "dma_load", "a", "dma0", 0, 30, "start"),
             Link(1, "vec_copy", "b", "vec", 30, 100, "semaphore 4 of dma0")]  # fmt: skip
    slow = TimingReport("tpu_0", "run.vcd", 100, Clock(2_000_000, 2_500_000), links, 0.2)
    text = "\n".join(slow.lines())
    assert "measured 2,500.0 ps: MISSED by 500.0 ps" in text
    assert "MISSED, slack -0.050 us" in text
    assert slow.nanoseconds == 250
    fast = TimingReport("tpu_0", "run.vcd", 100, Clock(2_000_000, 1_900_000), links, 1.0)
    text = "\n".join(fast.lines())
    assert "measured 1,900.0 ps: met" in text
    assert "met, slack 0.810 us" in text
    assert fast.shares("layer") == [("b", 70), ("a", 30)]
    found = slow.to_json()
    assert found["clock"] == {
        "target_ps": 2000.0, "measured_ps": 2500.0, "slack_ps": -500.0, "met": False,
    }  # fmt: skip
    assert found["layers"] == {"b": 70, "a": 30}
    assert [link["end"] for link in found["chain"]] == [30, 100]
    simulated = TimingReport("tpu_0", "simulated", 100, Clock(2_000_000, None), links)
    assert simulated.to_json()["clock"]["met"] is None
    assert not any("deadline" in line for line in simulated.lines())
