"""Which modules a build is made of: ours, and a user's in place of them or beside them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.spec.hardware import Hardware

RTL_FOLDER = Path(__file__).resolve().parents[1] / "rtl"
MODULES = (".sv", ".v")
HEADERS = (".svh", ".vh")
"""Included by others: they lie beside them in the build, but are not compiled themselves."""
PACKAGE = "tw_pkg"
"""Generated for the target."""


def rtl_sources(folder: Path | None = None) -> list[Path]:
    """Return the chip's modules, packages first.

    Args:
        folder: modules (`*.sv`, `*.v`) of a user. One of the name of ours, whatever its ending,
            takes its place; others are added.

    Raises:
        TilewrightError: E0701 when the folder cannot be read.
        UsageError: E0702 when it has no modules, or two of one name.
    """
    files = {file.stem: file for file in RTL_FOLDER.glob("*.sv")}
    headers: list[Path] = []
    if folder is not None:
        own = _listed(folder)
        headers = [file for file in own if file.suffix in HEADERS]
        names: dict[str, Path] = {}
        for file in own:
            if file.suffix not in MODULES:
                continue
            if file.stem in names:
                raise UsageError(
                    "E0702",
                    f"`{folder}` has `{names[file.stem].name}` and `{file.name}`",
                    hint="a module is one file: .sv or .v",
                )
            names[file.stem] = file
        if not names:
            raise UsageError("E0702", f"there are no modules (*.sv, *.v) in `{folder}`")
        files |= names
    return [*sorted(files.values(), key=_order), *headers]


def _listed(folder: Path) -> list[Path]:
    try:
        # Hidden ones are an editor's or a file system's.
        return sorted(Path(folder, name) for name in os.listdir(folder) if name[0] != ".")
    except NotADirectoryError as error:
        raise UsageError("E0702", f"`{folder}` is not a folder of modules") from error
    except OSError as error:
        raise TilewrightError("E0701", f"cannot read `{folder}`", [str(error)]) from error


def _order(file: Path) -> tuple[bool, str]:
    """Packages first: nothing may use one before it is declared."""
    if file.parent == RTL_FOLDER or not file.is_file():
        return not file.stem.endswith("_pkg"), file.name
    text = file.read_text("utf-8", "replace")
    return not re.search(r"^\s*package\s+\w", text, re.MULTILINE), file.name


def read_sources(
    files: Iterable[Path], hardware: Hardware, package: str
) -> tuple[dict[str, bytes], dict[str, Path]]:
    """Return the content of modules by name, and where those lie that are not ours.

    Raises:
        TilewrightError: E0701 when one cannot be read; E0803 when a `tw_pkg` among them is not the
            target's.
    """
    texts: dict[str, bytes] = {}
    own: dict[str, Path] = {}
    for file in files:
        try:
            content = file.read_bytes()
        except OSError as error:
            raise TilewrightError("E0701", f"cannot read `{file}`", [str(error)]) from error
        if file.stem == PACKAGE and file.suffix in MODULES:
            # Kept beside the modules for other tools; the build makes its own.
            if content.decode("utf-8", "replace").strip() == package.strip():
                continue
            raise TilewrightError(
                "E0803",
                f"`{file}` is not the package of target `{hardware.name}`",
                [],
                f"leave it out, or write it with `python -m tilewright.rtl.package "
                f"{hardware.name}`; constants of your own belong in a package of another name",
            )
        texts[file.name] = content
        if file.parent != RTL_FOLDER:
            own[file.name] = file
    return texts, own


def name_places(line: str, own: Mapping[str, Path]) -> str:
    """Put a user's own paths into a line of a tool, which knows only names."""
    for name, path in own.items():
        line = re.sub(rf"(?<![\w/.]){re.escape(name)}(?=:\d)", lambda _, p=path: str(p), line)
    return line


def missing_pins(
    lines: Sequence[str], texts: Mapping[str, bytes], own: Mapping[str, Path]
) -> list[str]:
    """Return, for each port that Verilator does not find, whose it should be."""
    found: list[str] = []
    for line in lines:
        # Verilator names the place that connects the port, not the module that lacks it.
        match = re.search(r"([\w.]+):(\d+):\d+: Pin not found: '(?:__pinNumber)?(\w+)'", line)
        if match is None or match[1] not in texts:
            continue
        above = texts[match[1]].decode("utf-8", "replace").splitlines()[: int(match[2])]
        heads = (re.match(r"\s*(tw_\w+)\s+(?:#|\w+\s*\()", text) for text in reversed(above))
        module = next((head[1] for head in heads if head), "")
        places = [path for name, path in own.items() if Path(name).stem == module]
        where = f"`{places[0]}`: " if places else ""
        found.append(f"{where}module `{module}` has no port `{match[3]}`")
    return found


def port_widths(hardware: Hardware) -> dict[str, tuple[str, int]]:
    """Return direction and bits of every port of `tw_top` that the harness needs."""
    unit, word = hardware.ddr_bus_bytes, hardware.sram_word_bytes
    words = hardware.sram_size // word
    inputs = {
        "clk": 1, "rst": 1, "run": 1, "config_write": 1, "config_register": 5, "config_value": 40,
        "code_length": 32, "fault": 8, "mem_read_data": 8 * unit, "counter_select": 6,
        "debug_address": (words - 1).bit_length(),
    }  # fmt: skip
    outputs = {
        "mem_valid": 1, "mem_write": 1, "mem_code": 1, "mem_address": 40, "mem_mask": unit,
        "mem_data": 8 * unit, "finished": 1, "trapped": 1, "target_digest": 64,
        "dispatch_valid": 1, "dispatch_engine": 3, "start": 6, "done": 6, "active": 1,
        "bank_stall": 6, "ddr_stall": 6, "accumulator_stall": 6, "queue_valid": 6,
        "engine_idle": 6, "semaphore_zero": 32, "counter_value": 48, "debug_data": 8 * word,
    }  # fmt: skip
    return {name: ("input", bits) for name, bits in inputs.items()} | {
        name: ("output", bits) for name, bits in outputs.items()
    }


def wrong_ports(header: str, hardware: Hardware) -> list[str]:
    """Return what Verilator's header of `tw_top` lacks for the harness, a line a port."""
    pattern = r"VL_(IN|OUT|INOUT)(?:8|16|64|W)?\(&(\w+),(\d+),(\d+)"
    directions = {"IN": "input", "OUT": "output", "INOUT": "inout"}
    have = {
        match[2]: (directions[match[1]], int(match[3]) - int(match[4]) + 1)
        for match in re.finditer(pattern, header)
    }
    lines: list[str] = []
    for name, must in port_widths(hardware).items():
        direction, bits = must
        what = f"{direction} `{name}` of {bits} bit{'' if bits == 1 else 's'}"
        if name not in have:
            lines.append(f"it has no {what}")
        elif have[name] != must:
            lines.append(f"it needs {what}, not {have[name][0]} of {have[name][1]}")
    return lines
