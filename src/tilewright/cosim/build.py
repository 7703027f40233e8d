"""Builds the RTL of a target into a shared library, once: `tw_pkg`, the modules, the harness.

Libraries lie in the user's cache folder under a name made from everything they depend on, so that
a changed module, target, flag, tool or processor makes another one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil
from pathlib import Path
from typing import Literal

from tilewright.cosim.children import Children, cleanup_on_sigterm
from tilewright.cosim.library import is_intact, library_problem, seal
from tilewright.cosim.sources import (
    MODULES,
    missing_pins,
    name_places,
    read_sources,
    rtl_sources,
    wrong_ports,
)
from tilewright.diagnostics import TilewrightError
from tilewright.rtl.package import sv_package
from tilewright.spec.hardware import Hardware

TraceFormat = Literal["vcd", "fst"]
TOP = "tw_top"
HARNESS = Path(__file__).resolve().with_name("harness.cpp")

MAX_ARRAY = 64
MIN_MAC_LATENCY = 3
"""Depth of the pipeline in `tw_mac`."""
LOG_LINES = 12
SCRATCH = "build-"
"""How names of the folders begin that builds work in; each holds a lock of this name."""
SCRATCH_LOCK = "lock"
STALE_SECONDS = 3600
"""Age of a folder without a lock that nobody works in any more."""

VERILATE = (
    "--cc", "-O3", "--x-assign", "fast", "--x-initial", "fast", "--noassert", "--no-timing",
    # Loops over lanes and ports are unrolled, those over the words of a bank must not be.
    "--unroll-count", "64", "--unroll-stmts", "30000", "--output-split", "30000",
    "--top-module", TOP, "--prefix", f"V{TOP}", "--Mdir", ".",
    # Lint is a test of the modules; a newer Verilator's new warnings must not stop a build.
    # A module declared twice is a mistake: one of the two would be dropped unseen.
    "-Wno-fatal", "-Wno-lint", "-Wno-style", "-Werror-MODDUP",
)  # fmt: skip
COMPILE = (
    "-std=gnu++17", "-fPIC", "-march=native", "-fvisibility=hidden", "-w",
    "-DVL_USER_FINISH", "-DVL_USER_STOP", "-DVL_USER_FATAL", "-DVM_COVERAGE=0", "-DVM_SC=0",
)  # fmt: skip
SIZES = ("TW_W", "TW_G", "TW_SRAM_WORDS")
OPTIMISE, OPTIMISE_SLOW = "-O3", "-O1"
"""The second for what runs once (constructors, the list of traced signals)."""


@dataclass(frozen=True)
class Library:
    """A built RTL."""

    path: Path
    """The shared library."""
    built: bool
    """Whether it was built now (else found in the cache)."""


@dataclass(frozen=True)
class _Tools:
    verilator: str
    verilator_version: str
    compiler: tuple[str, ...]
    """With the arguments that `CXX` gives it."""
    compiler_version: str
    ccache: str | None


def unbuildable(hardware: Hardware) -> list[str]:
    """Return why a target cannot be built in RTL, a line a reason: field, value, legal values."""
    core = hardware.core_clock_mhz
    reasons = [
        f"{field}: {getattr(hardware, field)}; the RTL needs 1..{core} (core_clock_mhz)"
        for field in ("ddr_clock_mhz", "dma_clock_mhz")
        if getattr(hardware, field) > core
    ]
    if hardware.array_size > MAX_ARRAY:
        size = hardware.array_size
        reasons.append(
            f"mac_array_size: [{size}, {size}]; the RTL needs [{MAX_ARRAY}, {MAX_ARRAY}] or less"
        )
    if hardware.mac_latency < MIN_MAC_LATENCY:
        reasons.append(
            f"mac_latency: {hardware.mac_latency}; the RTL needs {MIN_MAC_LATENCY} or more"
        )
    return reasons


def quiet_limit(hardware: Hardware) -> int:
    """Return how many cycles without any activity mean that nothing will move again.

    Between two signs of life lie at most a latency, a few enables of the slower clocks, or a
    channel that fills a word byte by byte at the pace of its bus.
    """
    core = hardware.core_clock_mhz
    slow = ceil(core / hardware.ddr_clock_mhz) + ceil(core / hardware.dma_clock_mhz)
    stream = hardware.dma_latency * hardware.dma_stream_latency_factor
    latency = ceil(stream * core / hardware.dma_clock_mhz)
    filling = 4 * max(hardware.sram_word_bytes, hardware.ddr_bus_bytes) * slow
    return 64 + 2 * (latency + hardware.mac_latency + hardware.vector_latency) + filling


def build_library(
    hardware: Hardware,
    *,
    faults: bool = False,
    trace: TraceFormat | None = None,
    sources: Sequence[Path] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Library:
    """Return the library of a target, building it if the cache has none.

    Args:
        hardware: the target.
        faults: with the input that plants a fault (slower).
        trace: with the writer of such a trace file (slower).
        sources: other modules than the shipped ones (`rtl_sources`).
        progress: told before a build begins.

    Raises:
        TilewrightError: E0801 when a tool is missing or does not run, E0802 when the target has no
            RTL, E0803 when the build fails or the chip lacks a port, E0701 when a module cannot be
            read or the cache not be written.
    """
    if reasons := unbuildable(hardware):
        raise TilewrightError(
            "E0802",
            f"target `{hardware.name}` cannot be built in RTL",
            reasons,
            "the simulators run it all the same: `tilewright simulate`",
        )
    files = rtl_sources() if sources is None else list(sources)
    texts, own = read_sources(files, hardware, sv_package(hardware))
    tools = find_tools()
    package = sv_package(hardware, faults=faults)
    verilate, compile_flags, link = _flags(hardware, trace)
    harness = HARNESS.read_bytes()
    key = _key(
        [package, *verilate, *compile_flags, *link, OPTIMISE, OPTIMISE_SLOW],
        [tools.verilator_version, *tools.compiler, tools.compiler_version, _processor()],
        {**texts, HARNESS.name: harness},
    )
    variant = "".join(("-faults" if faults else "", f"-{trace}" if trace else ""))
    from tilewright.zoo import cache_folder

    folder = cache_folder() / "rtl"
    target = folder / f"{hardware.name}{variant}-{key[:20]}.so"
    if is_intact(target):
        return Library(target, False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with cleanup_on_sigterm(), _lock(folder / f"{target.stem}.lock"):
            # Another process may have built it while this one waited.
            if is_intact(target):
                return Library(target, False)
            if progress is not None:
                progress("build RTL")
            with _scratch(folder) as place:
                (place / "tw_pkg.sv").write_text(package, "utf-8")
                for name, text in {**texts, HARNESS.name: harness}.items():
                    (place / name).write_bytes(text)
                job = _Job(place, tools, folder / f"{target.stem}.log", texts, own)
                modules = [name for name in texts if Path(name).suffix in MODULES]
                try:
                    job.verilate([*verilate, "tw_pkg.sv", *modules])
                    job.check_ports(hardware)
                    made = job.compile(compile_flags, link)
                except _FailedError as failed:
                    raise job.told(failed) from None
                seal(made)
                os.replace(made, target)
    except OSError as error:
        raise TilewrightError("E0701", f"cannot write `{folder}`", [str(error)]) from error
    return Library(target, True)


@contextmanager
def _scratch(folder: Path) -> Generator[Path]:
    """Give a folder to build in; first remove those of builds that were killed."""
    for old in folder.glob(f"{SCRATCH}*"):
        _remove_stale(old)
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder) as scratch:
        place = Path(scratch)
        with (place / SCRATCH_LOCK).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield place


def _remove_stale(old: Path) -> None:
    with suppress(OSError):  # somebody works there, or has just removed it
        try:
            with (old / SCRATCH_LOCK).open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(old, ignore_errors=True)
        except FileNotFoundError:
            # It may be in the making.
            if time.time() - old.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(old, ignore_errors=True)


def find_tools() -> _Tools:
    """Return the programs a build needs.

    Raises:
        TilewrightError: E0801.
    """
    verilator = shutil.which("verilator")
    compiler = _compiler()
    missing = [
        f"{what} is not on the PATH"
        for what, found in (("verilator", verilator), ("a C++ compiler (g++)", compiler))
        if found is None
    ]
    if verilator is None or compiler is None:
        raise TilewrightError(
            "E0801",
            "a tool that simulates the RTL is missing",
            missing,
            "`apt-get install verilator g++` (Debian and Ubuntu)",
        )
    return _Tools(
        verilator, _version((verilator,)), compiler, _version(compiler), shutil.which("ccache")
    )


def _compiler() -> tuple[str, ...] | None:
    """Return the compiler: what `CXX` says, with its arguments, or one of the usual names.

    Raises:
        TilewrightError: E0801 when `CXX` names none.
    """
    asked = os.environ.get("CXX", "")
    if not asked.strip():
        found = (shutil.which(name) for name in ("g++", "clang++", "c++"))
        return next(((path,) for path in found if path), None)
    try:
        program, *arguments = shlex.split(asked)
        path = shutil.which(program)
        problem = f"`{program}` is not a program"
    except ValueError as error:  # a quotation without an end
        path, arguments, problem = None, [], str(error)
    if path is None:
        raise TilewrightError(
            "E0801",
            "CXX does not name a C++ compiler",
            [f"CXX={asked}: {problem}"],
            "unset CXX to use the g++ or clang++ on the PATH",
        )
    return path, *arguments


@lru_cache
def _version(command: tuple[str, ...]) -> str:
    """Return what a program says it is.

    Raises:
        TilewrightError: E0801 when it cannot be run.
    """
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, errors="replace", check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError as error:
        raise TilewrightError(
            "E0801",
            "a tool that simulates the RTL does not run",
            [f"`{command[0]}`: {error.strerror or error}"],
            "`apt-get install verilator g++` (Debian and Ubuntu)",
        ) from error
    return (done.stdout.splitlines() or [""])[0]


@lru_cache
def _processor() -> str:
    """Return what `-march=native` depends on."""
    info = Path("/proc/cpuinfo")
    text = info.read_text("utf-8", "replace") if info.is_file() else str(os.uname())
    kept = re.findall(r"^(?:model name|flags|Features|CPU part)\s*:.*$", text, re.MULTILINE)
    return "\n".join(sorted(set(kept))) or str(os.uname().machine)


def _flags(hardware: Hardware, trace: TraceFormat | None) -> tuple[list[str], list[str], list[str]]:
    """Return the flags of Verilator, of the compiler and of the linker."""
    verilate = list(VERILATE)
    words = hardware.sram_size // hardware.sram_word_bytes
    sizes = (hardware.sram_word_bytes, hardware.ddr_bus_bytes, words)
    compile_flags = [
        *COMPILE,
        *(f"-D{name}={size}" for name, size in zip(SIZES, sizes, strict=True)),
    ]
    if trace is not None:
        # Ports of the top and of its modules; structs by field, so that data stay narrow.
        widest = 8 * max(hardware.sram_word_bytes, hardware.ddr_bus_bytes, 32)
        verilate += ["--trace" if trace == "vcd" else "--trace-fst", "--trace-structs"]
        verilate += ["--trace-depth", "2", "--trace-max-width", str(widest)]
        compile_flags += [f"-DTW_{trace.upper()}"]
    compile_flags += [
        f"-DVM_TRACE={int(trace is not None)}",
        f"-DVM_TRACE_VCD={int(trace == 'vcd')}",
        f"-DVM_TRACE_FST={int(trace == 'fst')}",
    ]
    link = ["-shared", "-Wl,-Bsymbolic", "-pthread"]
    if trace == "fst":
        # harness.cpp looks at what the writer of these files does not.
        link += ["-lz", *(f"-Wl,--wrap={name}" for name in ("fclose", "mmap", "mmap64"))]
    return verilate, compile_flags, link


def _key(texts: Sequence[str], versions: Sequence[str], files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha3_256()
    for item in (*texts, *versions):
        digest.update(item.encode() + b"\0")
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


@contextmanager
def _lock(path: Path) -> Generator[None]:
    """Hold a file's lock, so that two processes do not build the same."""
    while True:
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # Whoever held it before has removed the file, and a third may hold the next one.
            try:
                same = os.path.samestat(os.fstat(file.fileno()), path.stat())
            except FileNotFoundError:
                same = False
            if not same:
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


class _FailedError(Exception):
    """A program of a build failed, or made nothing that can be used."""

    def __init__(self, message: str, command: Sequence[str], said: str) -> None:
        super().__init__(message)
        self.message = message
        self.command = command
        self.said = said


@dataclass
class _Job:
    """A build in a scratch folder. Its steps raise `_FailedError`."""

    folder: Path
    tools: _Tools
    log: Path
    """Where what failed said is kept."""
    texts: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """The modules, by name."""
    own: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """Where those lie that are not ours."""
    children: Children = field(default_factory=Children)

    def verilate(self, arguments: Sequence[str]) -> None:
        command = [self.tools.verilator, *arguments]
        said = self._run("Verilator", command)
        for name in (f"V{TOP}.h", self._list().name):
            if not (self.folder / name).is_file():
                raise _FailedError(f"Verilator made no `{name}`", command, said)

    def check_ports(self, hardware: Hardware) -> None:
        """Refuse a chip that the harness cannot be connected to; the compiler would not say why.

        Raises:
            TilewrightError: E0803.
        """
        lines = wrong_ports((self.folder / f"V{TOP}.h").read_text("utf-8"), hardware)
        if not lines:
            return
        paths = [str(path) for name, path in self.own.items() if Path(name).stem == TOP]
        raise TilewrightError(
            "E0803",
            f"the RTL does not build: `{(paths or [TOP])[0]}` lacks ports of `{TOP}`",
            lines,
            "docs/concepts/microarchitecture.md, `Modules of the RTL`, has them all",
        )

    def compile(self, flags: Sequence[str], link: Sequence[str]) -> Path:
        include = self._include()
        common = [*flags, "-I.", f"-I{include}", f"-I{include}/vltstd"]
        compiler, names = self.tools.compiler, [Path(word).name for word in self.tools.compiler]
        if not any("clang" in name for name in (*names, self.tools.compiler_version)):
            # Libraries of several targets live in one process: they must not share statics.
            common.append("-fno-gnu-unique")
        units = sorted(file.name for file in self.folder.glob("*.cpp"))
        units += [str(include / f"{name}.cpp") for name in self._runtime()]
        # It refuses to be called by itself.
        prefix = [self.tools.ccache] if self.tools.ccache and "ccache" not in names else []

        def unit(source: str) -> str:
            slow = "__Slow" in source or "__Syms" in source
            made = f"{Path(source).stem}.o"
            how = [OPTIMISE_SLOW if slow else OPTIMISE, "-c", source, "-o", made]
            self._run("the C++ compiler", [*prefix, *compiler, *common, *how])
            return made

        objects: list[str] = []
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            try:
                objects += pool.map(unit, units)
            finally:
                # One failed, or this was interrupted: the pool waits for the others.
                if len(objects) < len(units):
                    self.children.end()
        command = [*compiler, *objects, *link, "-o", "library.so"]
        said = self._run("the linker", command)
        made = self.folder / "library.so"
        if problem := library_problem(made):
            name = shlex.join(compiler)
            message = f"the C++ compiler `{name}` made no library that can be used: {problem}"
            raise _FailedError(message, command, said)
        return made

    def told(self, failed: _FailedError) -> TilewrightError:
        """Keep all that a program said; return what to tell of it."""
        self.log.write_text(" ".join(failed.command) + "\n" + failed.said, "utf-8")
        lines = [line for line in failed.said.splitlines() if line.strip()]
        errors = [line for line in lines if "rror" in line and line not in lines[-LOG_LINES:]]
        said = [name_places(line, self.own) for line in (*errors[:3], *lines[-LOG_LINES:])]
        return TilewrightError(
            "E0803",
            f"the RTL does not build: {failed.message}",
            [*missing_pins(lines, self.texts, self.own), *said],
            f"all it said: `{self.log}`",
        )

    def _include(self) -> Path:
        """Return the folder of Verilator's run-time library."""
        done = self._run("Verilator", [self.tools.verilator, "--getenv", "VERILATOR_ROOT"])
        return Path(done.strip()) / "include"

    def _list(self) -> Path:
        return self.folder / f"V{TOP}_classes.mk"

    def _runtime(self) -> list[str]:
        """Return the parts of Verilator's run-time library that the generated code needs."""
        text = self._list().read_text("utf-8")
        found = re.findall(r"^VM_GLOBAL_(?:FAST|SLOW) \+=((?:.*\\\n)*.*)$", text, re.MULTILINE)
        return [name for names in found for name in names.replace("\\", " ").split()]

    def _run(self, what: str, command: Sequence[str]) -> str:
        # Paths relative to the folder: ccache then knows the same text in another folder.
        environment = {**os.environ, "CCACHE_NOHASHDIR": "1", "LC_ALL": "C"}
        try:
            code, said = self.children.run(command, self.folder, environment)
        except OSError as error:
            problem = f"{what} does not run: {error.strerror or error}"
            raise _FailedError(problem, command, "") from error
        if code:
            raise _FailedError(f"{what} ended with {code}", command, said)
        return said
