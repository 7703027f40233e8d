"""Tools that do not work, libraries that were damaged, builds that were ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.cosim.support import STUB, needs_verilator
from tilewright.cosim import build
from tilewright.cosim.build import build_library
from tilewright.cosim.driver import RtlSimulator
from tilewright.cosim.library import is_intact, library_problem, load_library
from tilewright.diagnostics import TilewrightError
from tilewright.spec.hardware import load_target

pytestmark = needs_verilator
TINY = load_target("tiny8")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "cache" / "rtl"


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def failed() -> TilewrightError:
    with pytest.raises(TilewrightError) as caught:
        build_library(TINY, sources=[STUB])
    return caught.value


def kept(cache: Path) -> list[str]:
    return [path.suffix for path in cache.iterdir()]


def test_damaged_library_is_built_again(cache: Path) -> None:
    first = build_library(TINY, sources=[STUB])
    whole = first.path.read_bytes()
    damages = [
        b"",
        whole[: len(whole) // 2],
        whole[:-1],
        whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:],
        whole[:-1] + bytes([whole[-1] ^ 1]),
    ]
    for damage in damages:
        # Another file: this process may have the first one loaded.
        first.path.unlink()
        first.path.write_bytes(damage)
        assert not is_intact(first.path)
        assert build_library(TINY, sources=[STUB]).built
        assert is_intact(first.path)
        assert not build_library(TINY, sources=[STUB]).built
    assert RtlSimulator(TINY, sources=(STUB,)).run(b"", np.zeros(64, np.uint8)).cycles == 10


def test_what_is_no_library(cache: Path, tmp_path: Path) -> None:
    made = build_library(TINY, sources=[STUB]).path
    assert library_problem(made) == ""
    assert library_problem(made, ["tw_run", "tw_nothing"]) == "it lacks tw_nothing"
    assert library_problem(tmp_path / "none") == "there is none"
    whole = made.read_bytes()
    part = tmp_path / "part.so"
    for length in (0, 3, 4, 63, 64, 100, 1000, len(whole) // 2, len(whole) * 9 // 10):
        part.write_bytes(whole[:length])
        assert library_problem(part), length
    part.write_bytes(whole[:18] + b"\xff\xff" + whole[20:])
    assert library_problem(part) == "it is for another processor"
    assert library_problem(Path(sys.executable)) != ""
    part.write_bytes(b"garbage")
    with pytest.raises(TilewrightError) as caught:
        load_library(part)
    assert caught.value.code == "E0803"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("exit 0", "made no library that can be used: there is none"),
        (
            'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo garbage > "$2"; shift; done',
            "made no library that can be used: its 8 bytes are not an ELF file",
        ),
        ("exec g++ -shared -o library.so -x c /dev/null -include errno.h", "it lacks tw_create"),
    ],
)
def test_compiler_that_makes_no_library(
    cache: Path, tmp_path: Path, text: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "CXX", str(program(tmp_path / "cxx", f'#!/bin/sh\n[ "$1" = --version ] && exit\n{text}\n'))
    )
    for _ in range(2):
        error = failed()
        assert error.code == "E0803"
        assert str(tmp_path / "cxx") in error.message
        assert says in error.message
        # Nothing was kept that the second would find.
        assert kept(cache) == [".log"]


def test_cxx_with_arguments(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    wrapper = program(
        tmp_path / "my tools" / "cxx", f'#!/bin/sh\necho "$1" >> {log}\nshift\nexec g++ "$@"\n'
    )
    monkeypatch.setenv("CXX", f"'{wrapper}' --mine")
    assert build_library(TINY, sources=[STUB]).built
    assert set(log.read_text().split()) == {"--mine"}
    monkeypatch.setenv("CXX", "  ")
    assert Path(build.find_tools().compiler[0]).name in ("g++", "clang++", "c++")


@pytest.mark.parametrize("value", ["/nonexistent", "/etc/passwd", "no-such-g++ -O2", "g++ 'x"])
def test_cxx_that_names_none(cache: Path, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", value)
    error = failed()
    assert error.code == "E0801"
    assert f"CXX={value}: " in error.details[0]
    assert not cache.exists()


@pytest.mark.parametrize("tool", ["verilator", "cxx"])
def test_tool_that_cannot_be_executed(
    cache: Path, tmp_path: Path, tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = program(tmp_path / "bin" / tool, "garbage")
    monkeypatch.setenv("PATH", f"{file.parent}{os.pathsep}{os.environ['PATH']}")
    if tool == "cxx":
        monkeypatch.setenv("CXX", tool)
    error = failed()
    assert error.code == "E0801"
    assert str(file) in error.details[0]


def test_verilator_that_makes_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = program(tmp_path / "bin" / "verilator", "#!/bin/sh\nexit 0\n")
    monkeypatch.setenv("PATH", f"{file.parent}{os.pathsep}{os.environ['PATH']}")
    error = failed()
    assert error.code == "E0803"
    assert "Verilator made no `Vtw_top.h`" in error.message


def test_folders_of_dead_builds_are_removed(cache: Path, tmp_path: Path) -> None:
    import fcntl

    names = ("build-dead", "build-busy", "build-old", "build-new")
    for name in names:
        (cache / name / "deep").mkdir(parents=True)
    for name in names[:2]:
        (cache / name / build.SCRATCH_LOCK).touch()
    before = time.time() - build.STALE_SECONDS - 60
    os.utime(cache / "build-old", (before, before))
    with (cache / "build-busy" / build.SCRATCH_LOCK).open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        build_library(TINY, sources=[STUB])
    assert sorted(path.name for path in cache.glob("build-*")) == ["build-busy", "build-new"]


BUILD = """
import signal
import sys
from pathlib import Path
from tilewright.cosim.build import build_library
from tilewright.spec.hardware import load_target

# As in a terminal, also when these tests are a shell's job in the background, which ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    build_library(load_target("tiny8"), sources=[Path(sys.argv[1])])
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_build_that_is_ended(
    cache: Path, tmp_path: Path, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left: no folder, no log, no compiler, nor what a compiler has started."""
    pids = tmp_path / "pids"
    text = (
        '#!/bin/sh\n[ "$1" = --version ] && exit\n'
        f"sh -c 'echo $PPID $$ >> {pids}; exec sleep 600'\nexit 1\n"
    )
    monkeypatch.setenv("CXX", str(program(tmp_path / "cxx", text)))
    monkeypatch.setenv("PATH", _without_ccache(tmp_path))
    command = [sys.executable, "-c", BUILD, str(STUB)]
    with subprocess.Popen(command, start_new_session=True) as process:
        deadline = time.monotonic() + 60
        while not (pids.is_file() and pids.read_text().endswith("\n")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        if how == signal.SIGINT:
            os.killpg(process.pid, how)  # as a terminal does
        else:
            process.send_signal(how)
        try:
            code = process.wait(60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert code == (130 if how == signal.SIGINT else -how)
    assert list(cache.iterdir()) == []
    deadline = time.monotonic() + 10
    for pid in pids.read_text().split():
        while _runs(pid):
            assert time.monotonic() < deadline, pid
            time.sleep(0.05)


def _runs(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def _without_ccache(folder: Path) -> str:
    """Return a PATH with Verilator alone, and the shell's own commands."""
    tools = folder / "tools"
    tools.mkdir()
    for name in ("verilator", "sh", "sleep", "perl", "env"):
        if path := shutil.which(name):
            (tools / name).symlink_to(Path(path).resolve() if name != "verilator" else path)
    return str(tools)
