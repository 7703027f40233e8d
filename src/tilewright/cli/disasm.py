"""`tilewright disasm`: the programs of a package as assembly."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilewright.spec.program import Instr


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("package", type=Path, help="the .tpupkg file, or a .bin image")
    parser.add_argument("--layer", help="only the instructions of this layer")
    parser.add_argument(
        "--step", help="only this program (tpu_1, ...; `tilewright inspect` lists them)"
    )


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from tilewright.cli.output import print_json
    from tilewright.codegen.assembler import format_program
    from tilewright.diagnostics import UsageError

    programs = _programs(options.package)
    if options.step is not None:
        if options.step not in programs:
            raise UsageError(
                "E0702",
                f"the package has no program `{options.step}`",
                hint=f"programs: {', '.join(programs)}",
            )
        programs = {options.step: programs[options.step]}
    if options.layer is not None:
        layers = {item.layer for program in programs.values() for item in program}
        if options.layer not in layers:
            import difflib

            near = difflib.get_close_matches(options.layer, layers, n=3, cutoff=0.4)
            raise UsageError(
                "E0702",
                f"no instruction belongs to layer `{options.layer}`",
                hint=f"near: {', '.join(near)}" if near else None,
            )
        programs = {
            name: [item for item in program if item.layer == options.layer]
            for name, program in programs.items()
        }
    if options.json:
        print_json(
            {
                name: [
                    {"name": item.name, "fields": item.fields, "layer": item.layer}
                    for item in program
                ]
                for name, program in programs.items()
            }
        )
        return 0
    for name, program in programs.items():
        print(f"; {name}: {len(program)} instructions")
        print(format_program(program), end="")
    return 0


def _programs(path: Path) -> dict[str, list[Instr]]:
    from tilewright.runtime.runtime import load

    if path.suffix == ".bin":
        return {path.stem: _image(path)}
    executor = load(path).executor
    return {step.name: executor.code(step) for step in executor.program.tpu_steps}


def _image(path: Path) -> list[Instr]:
    from tilewright.codegen.image import read_image
    from tilewright.diagnostics import TilewrightError
    from tilewright.spec.isa import IllegalInstructionError
    from tilewright.spec.program import decode_program

    try:
        return decode_program(read_image(path.read_bytes()).code)
    except OSError as error:
        raise TilewrightError("E0701", f"cannot read `{path}`", [str(error)]) from error
    except IllegalInstructionError as error:
        raise TilewrightError("E0601", f"`{path}` cannot be decoded", [str(error)]) from error
