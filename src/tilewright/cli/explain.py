"""`tilewright explain`: what was decided about a layer, and why."""

from __future__ import annotations

import argparse
import re
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("package", type=Path, help="the .tpupkg file")
    parser.add_argument("layer", nargs="?", help="a layer (your node's name); all if left out")
    parser.add_argument("--refused", action="store_true", help="only what was not done")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from tilewright.cli.output import number, print_json
    from tilewright.diagnostics import UsageError
    from tilewright.runtime.loader import read_package

    content = read_package(options.package)
    known = {str(row.get("name", "")): row for row in content.program.layer_info}
    decisions = content.decisions
    if options.layer is not None:
        names = {*known, *(row["layer"] for row in decisions)}
        if options.layer not in names:
            import difflib

            near = difflib.get_close_matches(options.layer, names, n=3, cutoff=0.4)
            raise UsageError(
                "E0702",
                f"the model has no layer `{options.layer}`",
                hint=f"near: {', '.join(near)}" if near else "`inspect --layers` lists them",
            )
        decisions = [row for row in decisions if row["layer"] == options.layer]
        known = {name: row for name, row in known.items() if name == options.layer}
    if options.refused:
        decisions = [row for row in decisions if not row["fired"]]
    if options.json:
        print_json({"layers": list(known.values()), "decisions": decisions})
        return 0
    by_layer: dict[str, list[str]] = {name: [] for name in known}
    for row in decisions:
        mark = "did" if row["fired"] else "did not"
        # What the sentence already says, and empty lists, are left to --json.
        extra = ", ".join(
            f"{key} {value}"
            for key, value in row["details"].items()
            if value not in ([], {}, "", None) and not _says(row["reason"], value)
        )
        by_layer.setdefault(row["layer"], []).append(
            f"  {row['stage']} {mark}: {row['reason']}" + (f" ({extra})" if extra else "")
        )
    programs = {step.name for step in content.program.tpu_steps}
    for name, lines in by_layer.items():
        if options.refused and not lines:
            continue
        row = known.get(name, {})
        where = {"tpu": "on the chip", "host": "on the host"}.get(str(row.get("device")), "")
        what = "a program of the chip" if name in programs else "folded away"
        print(f"{name}: {row.get('op', what)} {where}".rstrip())
        if row.get("reason"):
            print(f"  because {row['reason']}")
        if row.get("macs"):
            print(f"  {number(row['macs'])} MACs, {number(row.get('sram_bytes', 0))} bytes of SRAM")
        for line in lines:
            print(line)
    return 0


def _says(reason: str, value: object) -> bool:
    """Tell whether a sentence contains a detail's value as a word."""
    return re.search(rf"(?<![\w.]){re.escape(str(value))}(?![\w.])", reason) is not None
