"""`tilewright cosim`: the RTL beside both simulators, bit for bit and cycle for cycle."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewright.cosim.compare import Comparison
    from tilewright.cosim.model import ModelComparison
    from tilewright.runtime.runtime import Package


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    from tilewright.cli.compile import add_compile_options

    parser.epilog = (
        "tilewright cosim zoo:pplcnet --target tiny8\n"
        "tilewright cosim p.tpupkg --trace p.fst --trace-cycles 20000\n"
        "tilewright cosim p.tpupkg --rtl my_rtl/\n"
        "The RTL is built by Verilator when it is first needed, and kept. Memory must be equal\n"
        "to the functional simulator's, times to the cycle simulator's; exit code 1 when not.\n"
        "The model may be a package (.tpupkg): it brings its target, options of the compile have\n"
        "no effect.\n"
    )
    parser.add_argument(
        "--input", "-i", type=Path, metavar="PATH",
        help="picture, .npy or .npz (default: random, in the range the model was calibrated for)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of random inputs (default 0)")
    parser.add_argument(
        "--rtl", type=Path, metavar="FOLDER",
        help="modules of yours (*.sv, *.v): in place of ours of the same name, or added",
    )  # fmt: skip
    parser.add_argument(
        "--segment",
        metavar="NAME",
        help="only this program (tpu_1, ...; `tilewright inspect` lists them) runs on the RTL",
    )
    parser.add_argument("--max-cycles", type=int, metavar="N", help="give up after N cycles")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write signals of the chip (.vcd or .fst)"
    )
    parser.add_argument(
        "--trace-from", type=int, default=0, metavar="CYCLE", help="first cycle traced (default 0)"
    )
    parser.add_argument("--trace-cycles", type=int, metavar="N", help="cycles traced (default all)")
    add_compile_options(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command; exit code 1 when something differs."""
    from tilewright.cli.output import print_json
    from tilewright.cli.progress import Progress
    from tilewright.codegen.files import check_writable
    from tilewright.cosim.driver import RtlSimulator, trace_format
    from tilewright.cosim.model import compare_model
    from tilewright.cosim.sources import rtl_sources

    _check(options)
    sources = tuple(rtl_sources(options.rtl)) if options.rtl else None
    if options.trace:
        trace_format(options.trace)
        check_writable(options.trace, options.model, options.input)
    with Progress(options.quiet) as progress:
        package = _package(options, progress)
        content = package.content
        _check_segment(options, [step.name for step in content.program.tpu_steps])
        inputs = _inputs(options, package)
        simulator = RtlSimulator(
            content.target,
            trace=options.trace,
            sources=sources,
            trace_from=options.trace_from,
            trace_cycles=options.trace_cycles,
            progress=progress,
        )
        if content.program.tpu_steps:
            simulator.library  # noqa: B018  a build is a phase of its own
        progress("co-simulate")
        found = compare_model(
            content.program,
            simulator,
            inputs,
            segment=options.segment,
            max_cycles=options.max_cycles,
        )
    if options.json:
        print_json(_json(package, found))
    else:
        print("\n".join(_text(package, found)))
        if options.trace:
            print(f"  trace: {options.trace}{_untraced(options, found)}")
    return 0 if found.equal else 1


def _untraced(options: argparse.Namespace, found: ModelComparison) -> str:
    cycles = max((item.rtl.cycles for item in found.programs.values()), default=0)
    if options.trace_from < cycles:
        return ""
    return f" (without values: the program ended in cycle {cycles})"


def _check(options: argparse.Namespace) -> None:
    from tilewright.diagnostics import UsageError

    least = {"seed": 0, "max_cycles": 1, "trace_from": 0, "trace_cycles": 1}
    for name, low in least.items():
        value = getattr(options, name)
        if value is not None and value < low:
            flag = name.replace("_", "-")
            raise UsageError("E0702", f"--{flag} must be {low} or more, not {value}")
    if not options.trace and (options.trace_from or options.trace_cycles is not None):
        raise UsageError("E0702", "--trace-from and --trace-cycles need --trace FILE")


def _check_segment(options: argparse.Namespace, names: list[str]) -> None:
    from tilewright.diagnostics import UsageError

    if options.segment is not None and options.segment not in names:
        raise UsageError(
            "E0702",
            f"there is no program `{options.segment}`",
            hint=f"programs of this model: {', '.join(names) or 'none'}",
        )
    if options.trace and options.segment is None and len(names) > 1:
        raise UsageError(
            "E0702",
            f"--trace takes one program; this model has {len(names)}",
            hint=f"choose one with --segment: {', '.join(names)}",
        )


def _package(options: argparse.Namespace, progress: Any) -> Package:
    """Load the package, or compile the model."""
    import zipfile

    from tilewright.api import build, resolve_model
    from tilewright.cli.compile import compile_options
    from tilewright.runtime.runtime import load
    from tilewright.spec.hardware import load_target

    path = Path(options.model)
    if path.suffix == ".tpupkg" or (path.is_file() and zipfile.is_zipfile(path)):
        return load(path)
    resolve_model(options.model)
    asked = compile_options(options, "none")
    return build(options.model, load_target(options.target), asked, progress).package


def _inputs(options: argparse.Namespace, package: Package) -> dict[str, Any]:
    from tilewright.cli.run import random_inputs
    from tilewright.runtime.preprocess import Preprocess, load_samples

    if options.input is None:
        return random_inputs(package, options.seed)
    kept = package.content.preprocess
    preprocess = Preprocess.from_json(kept) if kept else None
    shapes = {port.name: port.shape for port in package.inputs}
    return next(iter(load_samples(options.input, shapes, preprocess, 1)))


def _speed(item: Comparison) -> float:
    return item.rtl.cycles / max(item.rtl.seconds, 1e-9)


def _text(package: Package, found: ModelComparison) -> list[str]:
    from tilewright.cli.output import number, table

    content = package.content
    head = f"{content.model_name} on {content.target.name}"
    if not found.programs:
        return [f"{head}: everything runs on the host, nothing to co-simulate"]
    heads = (
        "program", "instructions", "RTL cycles (measured)", "cycles (simulated)", "values",
        "times", "seconds", "cycles/s",
    )  # fmt: skip
    rows = [
        (
            name, number(len(item.stream)), number(item.rtl.cycles), number(item.cycle.cycles),
            "equal" if item.same_values else "DIFFER", "equal" if item.same_times else "DIFFER",
            f"{item.rtl.seconds:.2f}", number(_speed(item)),
        )
        for name, item in found.programs.items()
    ]  # fmt: skip
    wrong = [name for name, same in found.outputs.items() if not same]
    outputs = f"differ: {', '.join(wrong)}" if wrong else "equal bit for bit"
    lines = [
        f"{head}: {'equal' if found.equal else 'NOT equal'}",
        table(heads, rows, "lrrrllrr"),
        f"outputs {outputs}; seconds and cycles/s of the RTL, measured here",
    ]
    for name, item in found.programs.items():
        if not item.equal:
            lines += [f"{name}:", *(f"  {line}" for line in item.lines())]
        if not item.same_values:
            if name in found.traced:
                said = found.traced[name].lines()
            else:
                said = ["--trace FILE.fst shows the first write that is wrong"]
            lines += [f"  {line}" for line in said]
    return lines


def _traced_json(found: ModelComparison, name: str) -> dict[str, Any] | None:
    if (traced := found.traced.get(name)) is None:
        return None
    content = traced.difference.to_json() if traced.difference else {"note": traced.note}
    return {**content, "lines": traced.lines()}


def _json(package: Package, found: ModelComparison) -> dict[str, Any]:
    return {
        "model": package.content.model_name,
        "target": package.content.target.name,
        "equal": found.equal,
        "outputs": found.outputs,
        "programs": [
            {
                "name": name,
                "instructions": len(item.stream),
                "rtl_cycles": item.rtl.cycles,
                "simulated_cycles": item.cycle.cycles,
                "equal_values": item.same_values,
                "equal_times": item.same_times,
                "rtl_seconds": item.rtl.seconds,
                "rtl_cycles_per_second": _speed(item),
                "rtl_counters": item.rtl.counters,
                "differences": item.lines(),
                "first_difference": _traced_json(found, name),
            }
            for name, item in found.programs.items()
        ],
    }
