"""`tpu-mlir-testgen`: random programs and models that stress a chip, compared level by level."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.tools.common import ToolParser, load_target, run_tool

if TYPE_CHECKING:
    from tilewright.cosim.driver import RtlSimulator
    from tilewright.spec.hardware import Hardware
    from tilewright.testgen.programs import Case
    from tilewright.testgen.run import Finding, Outcome

DESCRIPTION = """\
Run seeded random programs on the functional simulator, the cycle simulator and the RTL, and
compare memories and the times of all instructions.

  tpu-mlir-testgen --target tiny8 --count 200 --profile mixed,dma --backends functional,cycle,rtl

  tpu-mlir-testgen --target tiny8 --count 50 --test-stall-pattern=prime_k --backends cycle,rtl

  tpu-mlir-testgen --models 20 --target edge16 --shrink --output failures/

  tpu-mlir-testgen --run failures/mixed-17.tpuasm --backends functional,cycle,rtl

  tpu-mlir-testgen --target tiny8 --count 500 --rtl my_rtl/

  tpu-mlir-testgen --faults
"""
PATTERNS = ("prime_k",)
MOST = 1 << 62
"""Largest seed and count: what is written must be a legal head of a test."""


def build_parser() -> ToolParser:
    """Return the parser."""
    parser = ToolParser("tpu-mlir-testgen", DESCRIPTION)
    add = parser.add_argument
    add("--target", metavar="TARGET", help="chip: name or YAML file (default tiny8)")
    add("--count", type=int, metavar="N", help="programs a profile (default 50)")
    add("--seed", type=int, metavar="N", help="first seed (default 1)")
    add(
        "--profile",
        metavar="NAME,...",
        help="mixed (default), dma, mac, vector, control, contention, address, saturation, or all",
    )
    add(
        "--test-stall-pattern",
        metavar="PATTERN",
        help="prime_k: convolutions with prime reductions while DMA and vector unit use their "
        "banks; instead of a profile",
    )
    add("--models", type=int, metavar="N", default=0, help="random models instead of programs")
    add(
        "--backends",
        metavar="NAME,...",
        help="levels to compare: functional, cycle, rtl (default functional,cycle; with --rtl all)",
    )
    add(
        "--rtl",
        metavar="FOLDER",
        help="modules of yours (*.sv, *.v): in place of ours of the same name, or added",
    )
    add("--run", metavar="FILE", action="append", default=[], help="run a written test again")
    add("--shrink", action="store_true", help="shrink failing programs")
    add("--output", metavar="DIR", help="write failing programs there, as assembly")
    add("--faults", action="store_true", help="plant each hardware fault in the RTL and look for "
        "it with the standard suite")  # fmt: skip
    add("--json", action="store_true", help="print a report as JSON")
    return parser


@dataclass(frozen=True)
class Failure:
    """A test that failed."""

    name: str
    kind: str
    message: str
    command: str
    file: str


class _Note:
    """Progress on standard error, not more than a line a few seconds."""

    def __init__(self) -> None:
        self.last = 0.0

    def __call__(self, text: str, *, now: bool = False) -> None:
        if now or time.monotonic() - self.last > 5:
            self.last = time.monotonic()
            print(text, file=sys.stderr, flush=True)


@dataclass
class _Session:
    options: Any
    hardware: Hardware
    backends: tuple[str, ...]
    note: _Note
    failures: list[Failure]
    sources: tuple[Path, ...] | None = None
    """The RTL's modules; the shipped ones when None."""
    tests: int = 0
    cycles: int = 0
    instructions: int = 0

    def simulator(self, hardware: Hardware) -> RtlSimulator | None:
        """Return the built RTL of a target, if it is asked for."""
        if "rtl" not in self.backends:
            return None
        from tilewright.cosim.driver import RtlSimulator

        simulator = RtlSimulator(
            hardware,
            sources=self.sources,
            progress=lambda text: self.note(text, now=True),
        )
        simulator.library  # noqa: B018  what does not build is no failure of a test
        return simulator

    def command(self, command: str) -> str:
        """Return a command with the levels compared and the RTL."""
        own = f" --rtl {shlex.quote(self.options.rtl)}" if self.options.rtl else ""
        return f"{command} --backends {','.join(self.backends)}{own}"

    def add(self, outcome: Outcome) -> None:
        """Count a test."""
        self.tests += 1
        self.cycles += outcome.cycles
        self.instructions += outcome.instructions

    def failed(self, name: str, finding: Finding, command: str) -> None:
        """Report a failure: one line."""
        self.failures.append(Failure(name, finding.kind, finding.message, command, ""))
        if not self.options.json:
            print(f"{name}: {finding.kind}: {finding.message} | {command}", flush=True)

    def wrote(self, file: Path) -> None:
        """Note the file of the latest failure."""
        self.failures[-1] = replace(self.failures[-1], file=str(file))


@dataclass(frozen=True)
class _Test:
    """A program to run."""

    name: str
    make: Callable[[], Case]
    """Raises TilewrightError when the generator's program is not legal."""
    command: str
    """Makes it again."""


def _written(options: Any, hardware: Hardware) -> list[Case]:
    """Return the tests of the files to run; the first file that is wrong is refused."""
    from tilewright.testgen.catalogue import suite_target
    from tilewright.testgen.text import from_text

    def target(wanted: str) -> Hardware:
        return hardware if wanted == hardware.name else suite_target(wanted)

    cases: list[Case] = []
    for name in options.run:
        try:
            text = Path(name).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TilewrightError("E0701", f"cannot read `{name}`", [str(error)]) from error
        try:
            cases.append(from_text(text, target))
        except TilewrightError as error:
            error.details.append(f"in `{name}`")
            raise
    return cases


def _generated(options: Any, hardware: Hardware) -> Iterator[_Test]:
    """Yield random programs."""
    from tilewright.testgen.programs import generate

    pattern = options.test_stall_pattern
    for profile in _profiles(options, hardware):
        choice = f"--test-stall-pattern={pattern}" if pattern else f"--profile {profile}"
        for seed in range(options.seed, options.seed + _count(options)):
            yield _Test(
                f"{profile}-{seed}",
                partial(generate, hardware, profile, seed),
                f"tpu-mlir-testgen --target {shlex.quote(options.target)} {choice} --seed {seed} "
                "--count 1",
            )


def _profiles(options: Any, hardware: Hardware | None = None) -> list[str]:
    """Return the profiles asked for; unknown ones, and those `hardware` lacks, are refused."""
    from tilewright.testgen.programs import ALL_PROFILES, PROFILES, ROWS

    pattern = options.test_stall_pattern
    if pattern is not None:
        if pattern not in PATTERNS:
            raise UsageError(
                "E0702", f"`--test-stall-pattern={pattern}`: it must be {', '.join(PATTERNS)}"
            )
        return [pattern]
    if options.profile == "all":
        return [*PROFILES, *([ROWS] if hardware is not None and hardware.vector_rows else [])]
    profiles = options.profile.split(",")
    for profile in profiles:
        if profile not in ALL_PROFILES:
            raise UsageError(
                "E0702",
                f"`--profile {options.profile}`: `{profile}` must be all or among "
                f"{', '.join(ALL_PROFILES)}",
            )
    if hardware is not None and ROWS in profiles and not hardware.vector_rows:
        raise UsageError(
            "E0702", f"`--profile {ROWS}`: target `{hardware.name}` has no `vector_rows`"
        )
    return profiles


def _count(options: Any) -> int:
    return 50 if options.count is None else options.count


def _programs(session: _Session) -> None:
    options = session.options
    tests: Iterable[_Test]
    targets = {session.hardware.name: session.hardware}
    if options.run:
        cases = _written(options, session.hardware)
        tests = [
            _Test(case.name, lambda case=case: case, f"tpu-mlir-testgen --run {shlex.quote(name)}")
            for case, name in zip(cases, options.run, strict=True)
        ]
        targets = {case.hardware.name: case.hardware for case in cases}
    else:
        tests = _generated(options, session.hardware)
    # What does not build is said before anything runs.
    simulators = {name: session.simulator(hardware) for name, hardware in targets.items()}
    for test in tests:
        _program(session, test, simulators)
        session.note(f"{test.name}: {session.tests} programs, {len(session.failures)} failures")


def _program(session: _Session, test: _Test, simulators: dict[str, RtlSimulator | None]) -> None:
    from tilewright.testgen.run import Finding, Outcome, run_case

    options, command = session.options, session.command(test.command)
    try:
        case = test.make()
    except TilewrightError as error:
        session.add(Outcome())
        text = "; ".join([f"the generator made an illegal program: {error.message}",
                          *error.details[:2]])  # fmt: skip
        session.failed(test.name, Finding("illegal", "", text), command)
        return
    rtl = simulators[case.hardware.name]
    outcome = run_case(case, session.backends, rtl)
    session.add(outcome)
    if not outcome.findings:
        return
    finding = outcome.findings[0]
    session.failed(case.name, finding, command)
    if options.shrink:
        case, finding = _shrunk(session, case, finding, rtl)
    if options.output is not None:
        try:
            session.wrote(_write(Path(options.output), case, finding))
        except TilewrightError as error:
            # The failure has been told; the other programs still are to be run.
            print(error, file=sys.stderr, flush=True)


def _shrunk(
    session: _Session, case: Case, finding: Finding, rtl: RtlSimulator | None
) -> tuple[Case, Finding]:
    from tilewright.testgen.run import run_case
    from tilewright.testgen.shrink import shrink

    session.note(f"{case.name}: shrink", now=True)
    # Random orders are slow and only needed when they are what fails.
    backends = [
        name for name in session.backends if finding.kind == "order" or name != "functional"
    ]
    last = finding

    def fails(candidate: Case) -> bool:
        nonlocal last
        for found in run_case(candidate, backends, rtl).findings:
            if found.signature == finding.signature:
                last = found
                return True
        return False

    small = shrink(case, fails)
    for found in run_case(small, backends, rtl).findings:
        if found.signature == finding.signature:
            last = found
    return small, last


def _write(folder: Path, case: Case, finding: Finding) -> Path:
    from tilewright.ir.io import write_atomically
    from tilewright.testgen.text import to_text

    path = folder / f"{case.hardware.name}-{case.name}.tpuasm"
    text = to_text(case, f"{finding.kind}: {finding.message}")
    write_atomically(path, text.encode())
    return path


def _models(session: _Session) -> None:
    from tilewright.testgen.models import run_model

    options = session.options
    rtl = session.simulator(session.hardware)
    for seed in range(options.seed, options.seed + options.models):
        outcome = run_model(session.hardware, seed, session.backends, rtl)
        session.add(outcome)
        session.note(f"model {seed}: {len(session.failures)} failures")
        for finding in outcome.findings[:1]:
            command = f"tpu-mlir-testgen --target {options.target} --models 1 --seed {seed}"
            session.failed(f"model-{seed}", finding, session.command(command))


def _faults(options: Any, note: Callable[[str], None]) -> int:
    from tilewright.testgen.catalogue import run_catalogue

    rows: list[dict[str, Any]] = []
    good = True
    for verdict in run_catalogue(progress=note):
        good &= verdict.good
        fault, finding = verdict.fault, verdict.finding
        row: dict[str, Any] = {
            "fault": fault.number if fault else 0,
            "name": fault.name if fault else "none",
            "module": fault.module if fault else "",
            "good": verdict.good,
            "test": verdict.test,
            "tests": verdict.tests,
            "how": finding.kind if finding else "",
            "message": finding.message if finding else "",
        }
        rows.append(row)
        if not options.json:
            state = "ok" if verdict.good else "NOT CAUGHT" if fault else "FALSE ALARM"
            where = f"{verdict.test} (test {verdict.tests}): " if finding else ""
            text = f"{row['how']}: {row['message']}" if finding else f"{verdict.tests} tests pass"
            print(f"{row['fault']:2} {row['name']:16} {state:11} {where}{text}", flush=True)
    if options.json:
        print(json.dumps({"good": good, "faults": rows}, indent=1))
    else:
        caught = sum(row["good"] for row in rows[1:])
        print(f"{caught} of {len(rows) - 1} faults caught; clean chip: "
              f"{'passes' if rows[0]['good'] else 'FALSE ALARM'}")  # fmt: skip
    return 0 if good else 1


def _backends(text: str | None, rtl: str | None) -> tuple[str, ...]:
    from tilewright.testgen.run import BACKENDS

    if text is None:
        return BACKENDS if rtl else ("functional", "cycle")
    names = tuple(text.split(","))
    for name in names:
        if name not in BACKENDS:
            raise UsageError(
                "E0702", f"`--backends {text}`: `{name}` must be one of {', '.join(BACKENDS)}"
            )
    if rtl and "rtl" not in names:
        raise UsageError("E0702", f"`--rtl` needs the level rtl, `--backends {text}` has it not")
    return names


def _check_output(folder: Path) -> None:
    """Make the folder for failures, and see that files can be written there.

    Raises:
        TilewrightError: E0701.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise TilewrightError(
            "E0701", f"cannot write to the folder `{folder}`", [error.strerror or str(error)],
            "`--output` must be a folder that can be written, or one that can be made",
        ) from error  # fmt: skip


def _defaults(options: Any) -> None:
    """Fill in what was not asked for; refuse what would be ignored."""
    suite = ("target", "count", "seed", "profile", "test_stall_pattern", "backends", "output")
    fixed = {"faults": suite, "run": ("target", "count", "seed", "profile", "test_stall_pattern")}
    for mode, ignored in fixed.items():
        for name in ignored if getattr(options, mode) else ():
            if getattr(options, name) is not None:
                flag = name.replace("_", "-")
                own = "the standard suite has" if mode == "faults" else "the written test has"
                raise UsageError("E0702", f"--{flag} has no effect with --{mode}: {own} its own")
    for name, value in (("target", "tiny8"), ("seed", 1), ("profile", "mixed")):
        if getattr(options, name) is None:
            setattr(options, name, value)


def _sources(options: Any) -> tuple[Path, ...] | None:
    if not options.rtl:
        return None
    if options.faults:
        raise UsageError("E0702", "--faults plants faults in the shipped modules: not with --rtl")
    from tilewright.cosim.sources import rtl_sources

    return tuple(rtl_sources(Path(options.rtl)))


def run(argv: list[str]) -> int:
    """Do what the arguments say; see `main`."""
    options = build_parser().parse(argv)
    note = _Note()
    for name in ("count", "models", "seed"):
        value = getattr(options, name)
        if value is not None and value < 0:
            raise UsageError("E0702", f"`--{name} {value}`: it must be 0 or more")
        if value is not None and value > MOST:
            raise UsageError("E0702", f"`--{name} {value}`: it must be {MOST} or less")
    _defaults(options)
    _profiles(options)
    backends, sources = _backends(options.backends, options.rtl), _sources(options)
    if options.faults:
        return _faults(options, lambda text: note(text, now=True))
    hardware = load_target(options.target)
    _profiles(options, hardware)
    if options.output is not None:
        _check_output(Path(options.output))
    session = _Session(options, hardware, backends, note, [], sources)
    began = time.monotonic()
    if options.models:
        _models(session)
    if not options.models or options.count is not None or options.run:
        _programs(session)
    report = {
        "target": options.target,
        "backends": session.backends,
        "tests": session.tests,
        "cycles": session.cycles,
        "instructions": session.instructions,
        "seconds": round(time.monotonic() - began, 1),
        "failures": [asdict(failure) for failure in session.failures],
    }
    if options.json:
        print(json.dumps(report, indent=1))
    note(
        f"{session.tests} tests, {session.instructions} instructions, {session.cycles} cycles, "
        f"{len(session.failures)} failures, {report['seconds']} s",
        now=True,
    )
    return 1 if session.failures else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run_tool(run, argv)


if __name__ == "__main__":
    sys.exit(main())
