"""`tilewright simulate`: cycles of a package, or one functional run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("package", type=Path, help="the .tpupkg file")
    parser.add_argument(
        "--level", choices=("cycle", "functional"), default="cycle",
        help="cycle: time, no values (default); functional: values on random inputs, no time",
    )  # fmt: skip
    parser.add_argument("--layers", type=int, metavar="N", help="also list the N slowest layers")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE.json", help="write a trace for ui.perfetto.dev"
    )
    timing = parser.add_argument_group("timing report")
    timing.add_argument(
        "--timing-report", action="store_true",
        help="the critical chain of instructions, the clock, and the time against a deadline",
    )  # fmt: skip
    timing.add_argument(
        "--waveform", type=Path, metavar="FILE",
        help="measured times of one program's run (VCD or FST) instead of simulated ones",
    )  # fmt: skip
    timing.add_argument("--program", default="", metavar="NAME", help="only this program")
    timing.add_argument(
        "--scope", default="", metavar="PATH", help="the chip's scope in the waveform (searched)"
    )
    timing.add_argument(
        "--deadline-us",
        type=float,
        metavar="T",
        help="time allowed, in microseconds; exit code 1 when it or the clock is missed",
    )
    parser.add_argument("--seed", type=int, default=0, help="functional: seed of the inputs")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from tilewright.cli.output import print_json
    from tilewright.cli.progress import Progress
    from tilewright.codegen.files import atomic_output, check_writable
    from tilewright.diagnostics import UsageError
    from tilewright.runtime.runtime import load

    if options.trace:
        if options.level != "cycle":
            raise UsageError("E0702", "--trace needs --level cycle")
        check_writable(options.trace, options.package)
    _check(options)
    package = load(options.package)
    if options.level == "functional":
        return _functional(options)
    if options.timing_report:
        return _timing(options)

    from tilewright.report.report import make_report
    from tilewright.report.text import layer_table, slow_layers, span_table, step_table, summary
    from tilewright.runtime.simulation import simulate

    with Progress(options.quiet) as progress:
        progress("simulate")
        simulation = simulate(package)
        if options.trace:
            progress("trace")
            from tilewright.runtime.simulation import write_trace

            with atomic_output(options.trace) as scratch:
                write_trace(simulation, package, scratch)
    report = make_report(package, simulation)
    if options.json:
        print_json(report.to_json())
        return 0
    print("\n".join(summary(report)))
    if options.trace:
        print(f"  trace      {options.trace} (open it at ui.perfetto.dev)")
    if options.layers:
        print()
        print(layer_table(report, options.layers))
        print()
        print(span_table(report, options.layers))
        if any(len(row.layers) > 1 for row in report.steps):
            print()
            print(step_table(report))
    if slow := slow_layers(report):
        print()
        print("\n".join(slow))
    return 0


def _check(options: argparse.Namespace) -> None:
    from tilewright.diagnostics import UsageError

    for name, low in (("seed", 0), ("layers", 1)):
        value = getattr(options, name)
        if value is not None and value < low:
            raise UsageError("E0702", f"--{name} must be {low} or more, not {value}")
    if options.layers is not None and options.level != "cycle":
        raise UsageError("E0702", "--layers needs the cycles of --level cycle")
    given = [
        name
        for name in ("waveform", "program", "scope", "deadline_us")
        if getattr(options, name) not in (None, "")
    ]
    if given and not options.timing_report:
        flag = given[0].replace("_", "-")
        raise UsageError("E0702", f"--{flag} needs --timing-report")
    if options.timing_report and (options.level != "cycle" or options.trace or options.layers):
        raise UsageError("E0702", "--timing-report goes without --level, --trace and --layers")
    if options.scope and not options.waveform:
        raise UsageError("E0702", "--scope needs --waveform")
    deadline = options.deadline_us
    if deadline is not None and not 0 < deadline < float("inf"):
        raise UsageError("E0702", f"--deadline-us must be above 0, not {deadline}")


def _timing(options: argparse.Namespace) -> int:
    from tilewright.cli.output import print_json
    from tilewright.cli.progress import Progress
    from tilewright.runtime.runtime import load
    from tilewright.waves.critical import timing_reports

    with Progress(options.quiet) as progress:
        progress("read" if options.waveform else "simulate")
        reports = timing_reports(
            load(options.package),
            waveform=options.waveform,
            program=options.program,
            scope=options.scope,
            deadline_us=options.deadline_us,
        )
    for report in reports:
        if report.warning:
            print(f"warning: {report.warning}", file=sys.stderr)
    if options.json:
        print_json([report.to_json() for report in reports])
    else:
        print("\n".join(line for report in reports for line in report.lines()))
    return 0 if all(report.met for report in reports) else 1


def _functional(options: argparse.Namespace) -> int:
    import hashlib
    import time

    from tilewright.cli.output import number, print_json
    from tilewright.cli.run import random_inputs
    from tilewright.runtime.runtime import load

    package = load(options.package)
    inputs = random_inputs(package, options.seed)
    start = time.perf_counter()
    outputs = package.run(inputs)
    seconds = time.perf_counter() - start
    digests = {
        name: hashlib.sha3_256(array.tobytes()).hexdigest() for name, array in outputs.items()
    }
    count = sum(len(step.layers) for step in package.content.program.tpu_steps)
    if options.json:
        print_json({"seconds": seconds, "instructions": count, "outputs_sha3_256": digests})
        return 0
    print(f"{number(count)} instructions executed in {seconds:.2f} s (measured here)")
    for name, digest in digests.items():
        print(f"{name}: SHA3-256 {digest[:32]}...")
    return 0
