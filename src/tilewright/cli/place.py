"""`tilewright place`: offsets in a memory for buffers with lifetimes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilewright.schedule.allocator import Answer


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.epilog = (
        "tilewright place buffers.csv --capacity 1048576 -o placed.csv\n"
        "tilewright place buffers.csv --capacity 1M --minimise\n"
        "Columns: id, lower, upper, size; optional: alignment, offset (fixed), gaps and regions\n"
        "(FIRST-END FIRST-END), apart (ids that must not share a bank). Exit code 1 when there is\n"
        "no placement or none was found; the reason is printed.\n"
    )
    parser.add_argument("buffers", type=Path, metavar="FILE.csv", help="the buffers, one a line")
    parser.add_argument(
        "--capacity", required=True, metavar="BYTES", help="size of the memory (K, M, G: 1024s)"
    )
    parser.add_argument("--output", "-o", type=Path, metavar="OUT.csv", help="the lines + offset")
    parser.add_argument("--minimise", action="store_true", help="use as few bytes as can be found")
    parser.add_argument(
        "--bank-bytes", type=int, metavar="B", help="bank size for the column `apart`"
    )
    parser.add_argument(
        "--steps", type=int, metavar="N", help="search budget (default 4000000); decides the answer"
    )
    parser.add_argument(
        "--time-limit", type=float, metavar="SECONDS", help="give up earlier, by the clock"
    )


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from tilewright.cli.output import print_json
    from tilewright.codegen.files import atomic_output, check_writable
    from tilewright.diagnostics import UsageError
    from tilewright.schedule import allocator
    from tilewright.schedule.allocator_csv import read_table

    capacity = _bytes(options.capacity)
    for name in ("bank_bytes", "steps", "time_limit"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise UsageError("E0702", f"--{name.replace('_', '-')} must be above 0, not {value}")
    if options.output is not None:
        check_writable(options.output, options.buffers)
    table = read_table(options.buffers, capacity)
    if table.apart and options.bank_bytes is None:
        raise UsageError("E0702", "the column `apart` needs --bank-bytes")
    problem = table.problem(capacity, options.bank_bytes or 1)
    work = allocator.minimise if options.minimise else allocator.solve
    answer = work(problem, steps=options.steps or allocator.STEPS, seconds=options.time_limit)
    if answer.offsets is not None and options.output is not None:
        with atomic_output(options.output) as path:
            table.write(path, answer.offsets)
    if options.json:
        print_json(
            {
                "status": answer.status,
                "buffers": len(problem.buffers),
                "capacity": capacity,
                "peak": answer.peak if answer.offsets is not None else None,
                "bound": answer.bound,
                "optimal": answer.optimal,
                "steps": answer.steps,
                "method": answer.method,
                "reason": answer.reason or None,
                "output": str(options.output) if options.output and answer.offsets else None,
                "offsets": None
                if answer.offsets is None
                else {b.name: o for b, o in zip(problem.buffers, answer.offsets, strict=True)},
            }
        )
    else:
        print(_text(answer, capacity, len(problem.buffers), options.output))
    return 0 if answer.status == "placed" else 1


def _bytes(text: str) -> int:
    import re

    from tilewright.diagnostics import UsageError
    from tilewright.schedule.allocator_model import MAX_CAPACITY

    match = re.fullmatch(r"([0-9]{1,15})([KMG]?)", text)
    value = int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]] if match else 0
    if not 0 < value <= MAX_CAPACITY:
        raise UsageError(
            "E0702",
            f"--capacity must be 1..{MAX_CAPACITY} bytes, not `{text}`",
            hint="for example 1048576, 512K or 1M",
        )
    return value


def _text(answer: Answer, capacity: int, count: int, output: Path | None) -> str:
    from tilewright.cli.output import number

    if answer.status != "placed":
        kind = "no placement exists" if answer.status == "infeasible" else "no placement was found"
        lines = [f"{kind}: {answer.reason}"]
        if answer.status == "unknown":
            lines.append(f"steps     {number(answer.steps)}; --steps sets the budget")
        return "\n".join(lines)
    least = "no fewer bytes can do" if answer.optimal else f"at least {number(answer.bound)} needed"
    lines = [
        f"placed    {number(count)} buffers",
        f"peak      {number(answer.peak)} of {number(capacity)} bytes ({least})",
        f"found by  {answer.method}, {number(answer.steps)} steps",
    ]
    if output is not None:
        lines.append(f"written   {output}")
    return "\n".join(lines)
