"""Retire logs read from waveforms: what was written comes back; what is wrong is said."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.unit.sim_programs import pipeline
from tests.waves.runs import require_match
from tests.waves.vcd import log_signals, write_vcd
from tilewright.diagnostics import TilewrightError
from tilewright.sim.cycle import CycleSimulator
from tilewright.sim.retire import RetireLog
from tilewright.spec.hardware import load_target
from tilewright.spec.program import Dispatched, Instr, sequence
from tilewright.waves.reader import Waveform, library_call
from tilewright.waves.retire import read_retired

TINY = load_target("tiny8")
SCOPE = "TOP.tw_top"


def program() -> list[Instr]:
    return pipeline(TINY, 2)


def stream() -> list[Dispatched]:
    return list(sequence(program(), TINY.scalar_registers))


def run_log() -> RetireLog:
    return CycleSimulator(TINY).run(program()).log


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_vcd(tmp_path / "run.vcd", log_signals(run_log()))


def test_the_log_comes_back_cycle_by_cycle(trace: Path) -> None:
    log, got = run_log(), read_retired(trace)
    assert got.scope == SCOPE
    for key in ("engine", "issue", "start", "end"):
        np.testing.assert_array_equal(getattr(got, key), getattr(log, key), key)
    assert got.clock_fs == 2_000_000
    require_match(got, stream())


@pytest.mark.parametrize(
    ("period", "timescale", "wanted"), [(10, "1ns", 10**7), (6, "10ps", 60_000)]
)
def test_the_clock_period_has_the_files_time_scale(
    tmp_path: Path, period: int, timescale: str, wanted: int
) -> None:
    path = write_vcd(tmp_path / "a.vcd", log_signals(run_log()), period=period, timescale=timescale)
    assert read_retired(path).clock_fs == wanted


def test_the_scope_is_found_or_chosen(tmp_path: Path) -> None:
    log = run_log()
    later = RetireLog(
        log.names, log.layers, log.index, log.engine, log.issue + 7, log.start + 7, log.end + 7
    )
    both = {**log_signals(log, "board.a.tw_top"), **log_signals(later, "board.b.tw_top")}
    path = write_vcd(tmp_path / "two.vcd", both)
    with pytest.raises(TilewrightError, match="several scopes") as caught:
        read_retired(path)
    assert caught.value.details == ["board.a.tw_top", "board.b.tw_top"]
    assert int(read_retired(path, "board.b").issue[0]) == int(log.issue[0]) + 7
    with pytest.raises(TilewrightError, match=r"no scope .* in scope `board.c`"):
        read_retired(path, "board.c")


def test_signals_that_are_missing_are_named(tmp_path: Path) -> None:
    signals = log_signals(run_log())
    del signals[f"{SCOPE}.done"]
    path = write_vcd(tmp_path / "a.vcd", signals)
    with pytest.raises(TilewrightError) as caught:
        read_retired(path)
    assert caught.value.code == "E0603"
    assert "not found: done" in caught.value.details


def test_a_file_without_a_clock_is_refused(tmp_path: Path, trace: Path) -> None:
    lines = [line for line in trace.read_text().splitlines() if line != "1c"]
    path = tmp_path / "still.vcd"
    path.write_text("\n".join(lines))
    with pytest.raises(TilewrightError, match="no clock"):
        read_retired(path)


def test_a_chip_that_never_runs_is_said(tmp_path: Path, trace: Path) -> None:
    path = tmp_path / "reset.vcd"
    path.write_text(trace.read_text().replace("\n1r\n", "\n0r\n"))
    with pytest.raises(TilewrightError, match="never shows the chip running"):
        read_retired(path)


@pytest.mark.parametrize(
    ("key", "cycle", "value", "message"),
    [
        ("start", 0, 1 << 5, "vec starts an instruction that was not dispatched"),
        ("done", 0, 1 << 4, "mac ends an instruction that did not start"),
        ("dispatch_engine", -1, 7, "there is no engine 7"),
    ],
)
def test_an_impossible_log_is_refused(
    tmp_path: Path, key: str, cycle: int, value: int, message: str
) -> None:
    signals = log_signals(run_log())
    if cycle < 0:
        cycle = int(run_log().issue[3])
    signals[f"{SCOPE}.{key}"][1][cycle] = value
    path = write_vcd(tmp_path / "a.vcd", signals)
    with pytest.raises(TilewrightError, match=message) as caught:
        read_retired(path)
    assert caught.value.code == "E0603"


def test_two_starts_without_an_end_are_refused(tmp_path: Path) -> None:
    log, signals = run_log(), log_signals(run_log())
    first = int(np.flatnonzero(log.engine == 0)[0])
    second = int(np.flatnonzero(log.engine == 0)[1])
    done = signals[f"{SCOPE}.done"][1]
    done[int(log.end[first]) - 1] &= ~1
    path = write_vcd(tmp_path / "a.vcd", signals)
    with pytest.raises(TilewrightError, match=f"cycle {int(log.start[second])} dma0 starts"):
        read_retired(path)


def test_another_programs_run_is_refused_with_the_place(trace: Path) -> None:
    items = stream()
    swapped = next(i for i, item in enumerate(items) if item.name == "mac_conv")
    items[swapped], items[swapped - 1] = items[swapped - 1], items[swapped]
    with pytest.raises(TilewrightError, match="is not a run of this program") as caught:
        require_match(read_retired(trace), items)
    assert f"instruction {items[swapped - 1].index} (mac_conv)" in caught.value.message
    with pytest.raises(TilewrightError, match="ends before the program"):
        require_match(read_retired(trace), [*stream(), *stream()])
    with pytest.raises(TilewrightError, match=r"dispatches .* instructions, the program 5"):
        require_match(read_retired(trace), stream()[:5])


def test_a_trace_cut_short_is_said(tmp_path: Path, trace: Path) -> None:
    text = trace.read_text()
    path = tmp_path / "cut.vcd"
    path.write_text(text[: text.rindex("\n#", 0, len(text) // 2)])
    with pytest.raises(TilewrightError, match="ends before the program"):
        require_match(read_retired(path), stream())


def test_damaged_files_give_errors_of_ours(tmp_path: Path, trace: Path) -> None:
    content = trace.read_bytes()
    rng = np.random.default_rng(3)
    path = tmp_path / "bad.vcd"
    codes: list[str] = []
    for case in range(24):
        cut = int(rng.integers(1, len(content))) if case % 3 == 0 else len(content)
        data = bytearray(content[:cut])
        for _ in range(case % 5):
            # Mostly the header: a few wrong bits in the body change values only.
            data[int(rng.integers(0, min(len(data), 400)))] = int(rng.integers(0, 256))
        path.write_bytes(data)
        # Anything but an error of ours would end the test.
        try:
            require_match(read_retired(path), stream())
        except TilewrightError as error:
            codes.append(error.code)
    assert len(codes) > 8
    assert set(codes) <= {"E0603", "E0701"}
    for data in (b"", b"\0" * 64, b"no waveform\n" * 9):
        path.write_bytes(data)
        with pytest.raises(TilewrightError, match="cannot be read"):
            read_retired(path)
    with pytest.raises(TilewrightError, match="there is no waveform"):
        Waveform(tmp_path / "none.vcd")


def test_the_library_prints_nothing(
    tmp_path: Path, trace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A panic writes to the descriptor of stderr before it becomes an exception."""
    content = trace.read_bytes()
    rng = np.random.default_rng(5)
    path = tmp_path / "bad.vcd"
    panics = 0
    for _ in range(60):
        data = bytearray(content)
        for _ in range(4):
            data[int(rng.integers(0, 400))] = int(rng.integers(0, 256))
        path.write_bytes(data)
        try:
            read_retired(path)
        except TilewrightError as error:
            panics += type(error.__cause__).__name__ == "PanicException"
    assert panics
    assert capfd.readouterr().err == ""


def test_what_others_print_meanwhile_is_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def call(text: bytes, error: BaseException | None = None) -> None:
        with library_call(tmp_path):
            os.write(2, text)
            if error is not None:
                raise error

    call(b"one\n")
    with pytest.raises(KeyboardInterrupt):
        call(b"two\n", KeyboardInterrupt())
    with pytest.raises(TilewrightError, match="cannot be read"):
        call(b"the library's\n", RuntimeError("broken"))
    os.write(2, b"three\n")
    assert capfd.readouterr().err == "one\ntwo\nthree\n"


def test_reading_works_without_stderr(trace: Path) -> None:
    code = (
        "import os, sys; os.close(2); from tilewright.waves.retire import read_retired;"
        "print(len(read_retired(sys.argv[1]).engine))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(trace)], capture_output=True, text=True, check=True
    )
    assert found.stdout == f"{len(stream())}\n"


def test_threads_read_at_once(trace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bad = trace.with_name("bad.vcd")
    bad.write_bytes(b"no waveform\n" * 9)

    def read(number: int) -> int:
        try:
            return len(read_retired(bad if number % 2 else trace).engine)
        except TilewrightError:
            return -1

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(read, range(12)))
    assert found == [len(stream()), -1] * 6
    os.write(2, b"still there\n")
    assert capfd.readouterr().err == "still there\n"


def test_the_library_missing_is_said(monkeypatch: pytest.MonkeyPatch, trace: Path) -> None:
    monkeypatch.setitem(sys.modules, "pywellen", None)
    with pytest.raises(TilewrightError) as caught:
        read_retired(trace)
    assert caught.value.code == "E0703"
    assert "tilewright[rtl]" in (caught.value.hint or "")


def test_an_fst_file_of_the_rtl() -> None:
    """A convolution traced by Verilator: two weights' loads, products, drain, store, halt."""
    found = read_retired(Path(__file__).with_name("data") / "conv-tiny8.fst")
    assert found.scope == "TOP.tw_top"
    assert found.engine.tolist() == [0, 1, 1, 5, 4, 5, 0, 6]
    assert found.clock_fs == 5_000_000
    assert found.end.tolist()[-1] == found.cycles == 457
    assert (found.end > found.start).all()
