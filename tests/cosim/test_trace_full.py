"""A disk that fills while a trace is written: an error, and no file that looks like a trace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.cosim.support import needs_verilator
from tests.unit.sim_programs import pipeline
from tilewright.cosim.driver import RtlSimulator
from tilewright.cosim.fst import fst_problem
from tilewright.diagnostics import TilewrightError
from tilewright.spec.hardware import load_target
from tilewright.spec.program import Instr

TINY = load_target("tiny8")

RUN = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from tests.unit.sim_programs import pipeline
from tilewright.cosim.driver import RtlSimulator
from tilewright.diagnostics import TilewrightError
from tilewright.spec.hardware import load_target

path, limit, cycles = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
hardware = load_target("tiny8")
chip = RtlSimulator(hardware, trace=path)
chip.library
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    chip.run(pipeline(hardware, 5), np.zeros(1 << 17, np.uint8), max_cycles=cycles)
except TilewrightError as error:
    print(error)
"""


def limited(path: Path, limit: int, cycles: int = 1 << 40) -> str:
    """Run with files of at most so many bytes; return what was said."""
    command = [sys.executable, "-c", RUN, str(path), str(limit), str(cycles)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Of the whole traces."""
    found: dict[str, int] = {}
    for suffix in ("vcd", "fst"):
        trace = tmp_path_factory.mktemp("whole") / f"t.{suffix}"
        chip = RtlSimulator(TINY, trace=trace)
        chip.run(pipeline(TINY, 5), np.zeros(1 << 17, np.uint8))
        found[suffix] = trace.stat().st_size
    return found


@needs_verilator
@pytest.mark.parametrize("suffix", ["vcd", "fst"])
def test_disk_that_is_full(suffix: str, sizes: dict[str, int], tmp_path: Path) -> None:
    """At the first byte, in the list of signals, in the values and at the last."""
    trace = tmp_path / f"t.{suffix}"
    for limit in (0, 5000, sizes[suffix] // 2, sizes[suffix] - 1):
        said = limited(trace, limit)
        assert f"error[E0701]: cannot write `{trace}`" in said, limit
        assert list(tmp_path.iterdir()) == [], limit
    assert limited(trace, 1 << 30) == ""
    assert [path.name for path in tmp_path.iterdir()] == [trace.name]


@needs_verilator
def test_the_trace_before_stays(tmp_path: Path) -> None:
    trace = tmp_path / "t.fst"
    trace.write_bytes(b"before")
    assert "E0701" in limited(trace, 5000)
    assert trace.read_bytes() == b"before"


@needs_verilator
@pytest.mark.parametrize("suffix", ["vcd", "fst"])
def test_run_that_fails_leaves_its_trace(suffix: str, tmp_path: Path) -> None:
    """It shows why. When it is not whole there is none, and both are told."""
    trace = tmp_path / f"t.{suffix}"
    said = limited(trace, 1 << 30, cycles=50)
    assert "E0804" in said
    assert "cannot write" not in said
    assert trace.stat().st_size > 1000
    trace.unlink()
    said = limited(trace, 5000, cycles=50)
    assert "E0701" in said or "cannot write" in said
    assert list(tmp_path.iterdir()) == []


@needs_verilator
def test_any_cut_of_an_fst_is_seen(tmp_path: Path) -> None:
    trace = tmp_path / "t.fst"
    RtlSimulator(TINY, trace=trace).run([Instr("halt", {})], np.zeros(64, np.uint8))
    content = trace.read_bytes()
    assert fst_problem(trace, empty=False) == ""
    part = tmp_path / "p.fst"
    for length in [*range(0, len(content), 97), len(content) - 1]:
        part.write_bytes(content[:length])
        assert fst_problem(part, empty=True), length
    part.write_bytes(content + b"\0")
    assert fst_problem(part, empty=True)
    # Whole sections, but the header was never finished, or the values are missing.
    part.write_bytes(content[:17] + bytes(8) + content[25:])
    assert fst_problem(part, empty=False) == "it has no time at which it ends"
    part.write_bytes(content[:330] + b"\xff" + content[331:])
    assert "was not finished" in fst_problem(part, empty=False)
    part.write_bytes(content[:330])
    assert fst_problem(part, empty=False) == "it lacks a section"
    assert fst_problem(tmp_path / "none", empty=False)


@needs_verilator
def test_window_that_never_comes(tmp_path: Path) -> None:
    trace = tmp_path / "t.fst"
    chip = RtlSimulator(TINY, trace=trace, trace_from=2**64 + 1, trace_cycles=2**64 - 1)
    result = chip.run([Instr("halt", {})], np.zeros(64, np.uint8))
    assert result.cycles < 1000
    assert fst_problem(trace, empty=True) == ""
    assert fst_problem(trace, empty=False) != ""


@needs_verilator
def test_folder_that_vanished(tmp_path: Path) -> None:
    with pytest.raises(TilewrightError) as caught:
        RtlSimulator(TINY, trace=tmp_path / "no" / "t.fst").run(
            [Instr("halt", {})], np.zeros(64, np.uint8)
        )
    assert caught.value.code == "E0701"
