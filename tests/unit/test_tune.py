"""Sweeps over a target: which chips, what they cost, what is kept, what comes out."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
from pathlib import Path

import pytest

from tests.cli.conftest import small_cnn
from tilewright.api import CompileOptions, build
from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.ptq.options import QuantOptions
from tilewright.spec.hardware import load_target
from tilewright.tune import evaluate as evaluating
from tilewright.tune import run as running
from tilewright.tune.area import Weights, area, parse_weights, parts_of
from tilewright.tune.evaluate import Result, Task
from tilewright.tune.output import sweep_csv, sweep_html, sweep_text
from tilewright.tune.prepare import Calibration, prepare
from tilewright.tune.run import Row, Sweep, mark_front, run_sweep
from tilewright.tune.space import (
    MAX_POINTS,
    Illegal,
    Point,
    chip_digest,
    describe,
    make_space,
    numeric_fields,
    parse_vary,
)

TINY, EDGE = load_target("tiny8"), load_target("edge16")


def test_values_are_read() -> None:
    found = parse_vary(["sram_size=128K,1m,4096", "mac_array_size=8,16,8"])
    assert found == {"sram_size": (131072, 1048576, 4096), "mac_array_size": (8, 16)}
    assert "rounding" not in numeric_fields()
    assert {"dma_latency", "sram_banks", "core_clock_mhz"} <= set(numeric_fields())


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["sram_size"], "must be written FIELD=VALUE"),
        (["sram_size="], "must be written FIELD=VALUE"),
        (["sram_sise=1"], "no numeric field"),
        (["rounding=1"], "no numeric field"),
        (["sram_size=1", "sram_size=2"], "twice"),
        (["sram_size=1,x"], "`x` is no value of `sram_size`"),
        (["sram_size=-1"], "`-1` is no value"),
        (["sram_size=1,,2"], "`` is no value"),
        (["sram_size=" + "9" * 5000], "is no value"),
    ],
)
def test_wrong_values_are_refused(texts: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_vary(texts)
    assert message in caught.value.message


def test_dependent_fields_follow() -> None:
    space = make_space(EDGE, {"mac_array_size": (8, 32)})
    small, large = (point.hardware for point in space.points)
    assert (small.mac_array_size, small.vector_lanes, small.sram_word_bytes) == ((8, 8), 8, 16)
    assert (large.mac_array_size, large.vector_lanes, large.sram_word_bytes) == ((32, 32), 32, 32)
    assert small.matrix_register_rows == large.matrix_register_rows == EDGE.matrix_register_rows
    assert space.points[1].derived == {"vector_lanes": 32, "sram_word_bytes": 32}
    # What is varied itself is left alone.
    (given,) = make_space(EDGE, {"mac_array_size": (32,), "sram_word_bytes": (16,)}).points
    assert given.hardware.sram_word_bytes == 16
    bits = make_space(EDGE, {"mac_array_size": (8, 16, 32)}, "bits").points
    assert [point.hardware.matrix_register_rows for point in bits] == [32, 16, 8]
    assert len({parts_of(point.hardware).accumulator_bit for point in bits}) == 1


def test_illegal_combinations_say_why() -> None:
    space = make_space(EDGE, {"mac_array_size": (16, 12, 0), "sram_size": (128 << 10, 1000)})
    assert [point.settings for point in space.points] == [
        {"mac_array_size": 16, "sram_size": 128 << 10}
    ]
    assert len(space.illegal) == 5
    reasons = {describe(item.settings): item.reasons for item in space.illegal}
    assert "power of two" in reasons["mac_array_size=12 sram_size=128K"][0]
    assert "4096..16777216" in reasons["mac_array_size=16 sram_size=1000"][0]
    with pytest.raises(UsageError, match="at most"):
        make_space(EDGE, {"dma_latency": tuple(range(MAX_POINTS + 1))})


def test_the_order_is_that_of_the_values_given() -> None:
    space = make_space(EDGE, {"dma_latency": (9, 4), "mac_latency": (1, 2)})
    order = [tuple(point.settings.values()) for point in space.points]
    assert order == [(9, 1), (9, 2), (4, 1), (4, 2)]


def test_the_name_is_no_part_of_the_chip() -> None:
    (same,) = make_space(EDGE, {"dma_latency": (EDGE.dma_latency,)}).points
    assert same.hardware.name != EDGE.name
    assert chip_digest(same.hardware) == chip_digest(EDGE)
    (other,) = make_space(EDGE, {"dma_latency": (EDGE.dma_latency + 1,)}).points
    assert chip_digest(other.hardware) != chip_digest(EDGE)


def test_area_is_a_weighted_sum() -> None:
    parts = parts_of(EDGE)
    assert parts.to_json() == {
        "mac": 256, "sram_byte": 262144, "accumulator_bit": 16 * 16 * 16 * 32, "lane": 16
    }  # fmt: skip
    weights = parse_weights(["mac=2", "sram_byte=0.5", "accumulator_bit=0", "lane=1e1"])
    assert weights == Weights(2, 0.5, 0, 10)
    assert area(parts, weights) == 512 + 131072 + 160


@pytest.mark.parametrize("text", ["mac", "mac=", "mac=-1", "mac=nan", "mac=inf", "macs=1", "mac=x"])
def test_wrong_weights_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_weights([text])


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    # Somebody may be editing the code while this runs.
    monkeypatch.setattr(running, "code_digest", lambda: "code")
    path = tmp_path / "small.onnx"
    path.write_bytes(small_cnn())
    return str(path)


def test_the_quantised_model_gives_the_program_of_a_compile(model: str, tmp_path: Path) -> None:
    asked = CompileOptions(random_calibration=True, quant=QuantOptions(level=0), keep_ir=())
    kept = prepare(model, TINY, Calibration(), tmp_path / "cache", "code")
    # One graph for all chips that round alike.
    (other,) = make_space(TINY, {"mac_array_size": (16,), "sram_size": (64 << 10,)}).points
    assert prepare(model, other.hardware, Calibration(), tmp_path / "cache", "code") == kept
    assert prepare(model, EDGE, Calibration(), tmp_path / "cache", "code").key != kept.key
    assert prepare(model, TINY, Calibration(), tmp_path / "cache", "other").key != kept.key
    for hardware in (TINY, other.hardware):
        direct = build(Path(model), hardware, asked).package.content.program
        tuned = evaluating.compile_quantised(kept.path, hardware)
        assert [step.code for step in tuned.tpu_steps] == [step.code for step in direct.tpu_steps]
        assert (tuned.constants == direct.constants).all()


def sweep_of(model: str, cache: Path, lines: list[str] | None = None) -> Sweep:
    space = make_space(TINY, {"mac_array_size": (8, 16, 5), "sram_size": (4096, 32 << 10)})
    tell = lines.append if lines is not None else None
    return run_sweep([model], TINY, space, cache=cache, jobs=1, tell=tell)


def test_a_sweep_goes_on_where_it_was(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Task] = []

    def stopping(task: Task) -> Result:
        if len(tried) == 2:
            raise KeyboardInterrupt
        tried.append(task)
        return evaluating.evaluate(task)

    monkeypatch.setattr(running, "evaluate", stopping)
    with pytest.raises(KeyboardInterrupt):
        sweep_of(model, tmp_path / "cache")
    monkeypatch.undo()
    monkeypatch.setattr(running, "code_digest", lambda: "code")
    lines: list[str] = []
    sweep = sweep_of(model, tmp_path / "cache", lines)
    assert (sweep.known, len(sweep.rows), len(sweep.illegal)) == (2, 4, 2)
    assert "2 of 4 results are known" in lines
    assert sum(line.startswith("[") for line in lines) == 2

    def never(task: Task) -> Result:
        raise AssertionError(task)

    monkeypatch.setattr(running, "evaluate", never)
    again = sweep_of(model, tmp_path / "cache")
    assert again.known == 4
    whole = sweep_of(model, tmp_path / "cache")
    assert json.dumps(again.to_json()) == json.dumps(sweep.to_json()) == json.dumps(whole.to_json())
    monkeypatch.undo()
    monkeypatch.setattr(running, "code_digest", lambda: "code")
    fresh = sweep_of(model, tmp_path / "fresh")
    assert fresh.known == 0
    assert fresh.to_json() == sweep.to_json()
    assert all(row.results[model].cycles > 0 for row in sweep.rows)


def test_a_damaged_result_is_made_anew(model: str, tmp_path: Path) -> None:
    space = make_space(TINY, {})
    first = run_sweep([model], TINY, space, cache=tmp_path / "cache", jobs=1)
    (path,) = (tmp_path / "cache" / "results").iterdir()
    for content in ("", "[1]", '{"cycles": 3, "surprise": 1}'):
        path.write_text(content)
        again = run_sweep([model], TINY, space, cache=tmp_path / "cache", jobs=1)
        assert again.known == 0
        assert again.to_json() == first.to_json()


def test_what_a_chip_cannot_run_is_a_result(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, hardware: object) -> None:
        raise TilewrightError("E0401", "no tile fits", ["needs more"])

    monkeypatch.setattr(evaluating, "compile_quantised", refuse)
    space = make_space(TINY, {"sram_size": (4096,)})
    sweep = run_sweep([model], TINY, space, cache=tmp_path / "cache", jobs=1)
    (row,) = sweep.rows
    assert row.failed == [f"{model}: E0401: no tile fits"]
    assert (row.milliseconds, row.ratio, row.front) == (0, 0, False)
    assert "failed" in sweep_text(sweep)
    assert "E0401: no tile fits (needs more)" in sweep_text(sweep)
    assert "No chip runs all models" in sweep_html(sweep)
    assert run_sweep([model], TINY, space, cache=tmp_path / "cache", jobs=1).known == 1


def dies(task: Task) -> Result:
    """Stand in for `evaluate` in a worker; one chip is its end, another a fault."""
    if task.hardware.sram_size == 4096:
        os._exit(3)
    if task.hardware.sram_size == 8192:
        raise ZeroDivisionError("of ours")
    return Result(cycles=7, milliseconds=1.0, ratio=2.0)


def test_a_worker_that_dies_takes_little_with_it(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "evaluate", dies)
    space = make_space(TINY, {"sram_size": (16384, 4096, 8192, 32768)})
    with monkeypatch.context() as patch:
        # One at a time, but in a process of its own: all others come through.
        patch.setattr(running, "IN_PROCESS", 0)
        sweep = run_sweep([model], TINY, space, cache=tmp_path / "cache", jobs=1)
    errors = [item.results[model].error for item in sweep.rows]
    assert [bool(error) for error in errors] == [False, True, True, False]
    assert "BrokenProcessPool" in errors[1]
    assert errors[2] == "fault of tilewright: ZeroDivisionError: of ours"
    assert len(sweep.faults) == 2
    # Faults are tried again, results kept.
    assert len(list((tmp_path / "cache" / "results").iterdir())) == 2


def row(size: float, *times: float) -> Row:
    point = Point({"sram_size": int(size) << 10}, {}, EDGE)
    results = {
        f"m{at}": Result(cycles=1, milliseconds=time, ratio=1.5) for at, time in enumerate(times)
    }
    return Row(point, parts_of(EDGE), size, results)


def test_the_front() -> None:
    rows = [row(1, 9), row(2, 9), row(2, 4), row(3, 4), row(4, 1), row(5, 2), row(4, 1)]
    assert [item.front for item in mark_front(rows)] == [
        True,
        False,
        True,
        False,
        True,
        False,
        True,
    ]
    failed = dataclasses.replace(row(0.1, 1), results={"m0": Result(error="E0401: no")})
    assert [item.front for item in mark_front([failed, row(1, 9)])] == [False, True]


def test_means_are_geometric() -> None:
    item = row(1, 2, 8)
    assert item.milliseconds == pytest.approx(4)
    assert item.ratio == pytest.approx(1.5)


def test_the_forms(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>.onnx"
    rows = mark_front([row(300, 1), row(100, 9), row(200, 9)])
    rows = [dataclasses.replace(item, results={hostile: item.results["m0"]}) for item in rows]
    illegal = [Illegal({"sram_size": 7}, ["<b>no</b>"])]
    sweep = Sweep("edge16", [hostile], Weights(), rows, illegal)
    html = sweep_html(sweep)
    assert "<script" not in html
    assert "<b>no" not in html
    assert html.count("<circle") == 3
    assert html.count('fill="#e08a2e"') == 2
    text = sweep_text(sweep)
    assert [line.split()[0] for line in text.splitlines()[2:5]] == ["100K", "200K", "300K"]
    assert "no legal chip: sram_size=7: <b>no</b>" in text
    lines = list(csv.DictReader(io.StringIO(sweep_csv(sweep))))
    assert [line["front"] for line in lines] == ["1", "1", "0"]
    assert {line["model"] for line in lines} == {hostile}
