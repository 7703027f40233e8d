"""Progress: one line a phase, a bar on a terminal, silence on request."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from tilewright.cli.progress import Progress


def test_one_line_a_phase(capsys: pytest.CaptureFixture[str]):
    with Progress(quiet=False) as progress:
        progress("import", 0.0)
        progress("calibrate", 0.2)
        progress("calibrate", 0.4)
        progress("pack", 0.9)
    told = capsys.readouterr()
    assert told.out == ""
    assert [line.split(":")[0] for line in told.err.splitlines()] == ["import", "calibrate", "pack"]
    assert list(progress.seconds) == ["import", "calibrate", "pack"]


def test_quiet(capsys: pytest.CaptureFixture[str]):
    with Progress(quiet=True) as progress:
        progress("import", 0.0)
    assert capsys.readouterr().err == ""


def test_an_error_ends_no_phase(capsys: pytest.CaptureFixture[str]):
    def fail() -> None:
        with Progress(quiet=False) as progress:
            progress("import", 0.0)
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        fail()
    assert capsys.readouterr().err == ""


def test_bar_never_goes_back():
    with Progress(quiet=True) as progress:
        progress("tpu", 0.7)
        progress("simulate", 0.0)
        assert progress.done == 0.7
        progress("simulate", 7.0)
        assert progress.done == 1.0


def test_a_terminal_gets_a_bar_on_stderr_only():
    code = (
        "from tilewright.cli.progress import Progress\n"
        "with Progress(False) as p:\n    p('calibrate', 0.5)\n"
    )
    master, terminal = pty.openpty()
    result = subprocess.run(
        [sys.executable, "-c", code], stderr=terminal, stdout=subprocess.PIPE, check=True
    )
    os.close(terminal)
    shown = b""
    try:
        while chunk := os.read(master, 4096):
            shown += chunk
    except OSError:
        pass  # Linux ends a closed terminal with EIO.
    os.close(master)
    assert result.stdout == b""
    assert b"calibrate" in shown
    assert b"50%" in shown
