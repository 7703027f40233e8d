"""Reading packages (`codegen/package.py` writes them).

A package is treated as hostile: nothing is unpacked to disk, sizes and names are checked before
anything is read, every member must be listed with its checksum, and the program must be consistent.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.codegen.check_program import check_program
from tilewright.codegen.image import read_image
from tilewright.codegen.manifest import (
    HostEntry,
    Manifest,
    TpuEntry,
    parse_manifest,
    program_of,
)
from tilewright.codegen.package import (
    CONSTANTS,
    DECISIONS,
    EXTRA,
    MANIFEST,
    TARGET,
    PackageContent,
    sha3,
)
from tilewright.diagnostics import TilewrightError
from tilewright.runtime.preprocess import Preprocess
from tilewright.spec.hardware import Hardware, differences, parse_target

MAX_MEMBERS = 4096
MAX_TEXT_BYTES = 64 * 1024 * 1024
MAX_TOTAL_BYTES = 8 * 1024 * 1024 * 1024
_NAME = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*$")


def read_package(path: Path, target: Hardware | None = None) -> PackageContent:
    """Read and check a package; it is treated as hostile.

    Args:
        path: The `.tpupkg` file.
        target: The chip it must be made for; None accepts any.

    Raises:
        TilewrightError: E0701 when there is no such file; E0601 for everything wrong inside it.
    """
    path = Path(path)
    try:
        members = _read_members(path)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, UnicodeDecodeError) as error:
        raise _bad(path, "is not a package, or was cut off", str(error)) from error
    except (ValueError, OverflowError) as error:
        # zipfile meets offsets outside the file with these.
        raise _bad(path, "is damaged", str(error)) from error
    except OSError as error:
        raise TilewrightError("E0701", f"cannot read `{path}`", [str(error)]) from error
    if MANIFEST not in members:
        raise _bad(path, f"has no {MANIFEST}")
    text = members.pop(MANIFEST)
    manifest = parse_manifest(text, str(path))
    _check_members(path, manifest, members)
    chip = parse_target(members[TARGET].decode("utf-8", "replace"), f"{path}:{TARGET}")
    if (chip.name, chip.digest()) != (manifest.target.name, manifest.target.digest):
        raise _bad(path, "names another target than its target.yaml describes")
    if target is not None and target.digest() != chip.digest():
        raise TilewrightError(
            "E0601",
            f"`{path}` was made for target `{chip.name}`, not for `{target.name}`",
            differences(chip, target),
            "compile the model again for this target",
        )
    constants = np.frombuffer(members[CONSTANTS], np.uint8)
    if constants.nbytes != manifest.memory.constants_bytes:
        raise _bad(path, f"says {manifest.memory.constants_bytes} bytes of constants")
    program = program_of(
        manifest,
        constants,
        {
            entry.image: _code(path, entry.image, members[entry.image], chip)
            for entry in manifest.steps
            if isinstance(entry, TpuEntry)
        },
        {e.model: members[e.model] for e in manifest.steps if isinstance(e, HostEntry)},
    )
    check_program(program, chip)
    if manifest.preprocess:
        Preprocess.from_json(manifest.preprocess)
    return PackageContent(
        program=program,
        target=chip,
        model_name=manifest.model.name,
        model_sha3=manifest.model.sha3_256,
        preprocess=dict(manifest.preprocess) if manifest.preprocess else None,
        options=dict(manifest.options),
        decisions=_decisions(path, members[DECISIONS]),
        extras={name: data for name, data in members.items() if EXTRA.match(name)},
        digest=sha3(text),
    )


def _code(path: Path, name: str, data: bytes, target: Hardware) -> bytes:
    image = read_image(data, target)
    if image.constants:
        raise _bad(path, f"has constants in `{name}`; they belong into `{CONSTANTS}`")
    return image.code


def _bad(path: Path, what: str, *details: str) -> TilewrightError:
    hint = "write it again with `tilewright compile`"
    if path.suffix.lower() == ".onnx":
        hint = f"this command takes a package: `tilewright compile {path}` makes one"
    return TilewrightError(
        "E0601", f"package `{path}` {what}", [line for line in details if line], hint
    )


def _read_members(path: Path) -> dict[str, bytes]:
    if not path.is_file():
        raise TilewrightError("E0701", f"there is no file `{path}`")
    total = path.stat().st_size
    if total > MAX_TOTAL_BYTES:
        raise _bad(path, f"has {total} bytes; at most {MAX_TOTAL_BYTES} are read")
    members: dict[str, bytes] = {}
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if len(entries) > MAX_MEMBERS:
            raise _bad(path, f"has {len(entries)} members; at most {MAX_MEMBERS} are read")
        # Members may overlap in a hostile file: what they claim together must fit the file.
        if sum(entry.file_size for entry in entries) > total:
            raise _bad(path, "claims more content than it has bytes")
        for entry in entries:
            name = entry.filename
            if not _NAME.match(name) or len(name) > 255:
                raise _bad(path, f"has a member called {name!r}")
            if name in members:
                raise _bad(path, f"has two members called `{name}`")
            if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                raise _bad(path, f"member `{name}` is compressed; members must be stored")
            if entry.flag_bits & 0x1:
                raise _bad(path, f"member `{name}` is encrypted")
            if name.endswith((".json", ".yaml")) and entry.file_size > MAX_TEXT_BYTES:
                raise _bad(path, f"member `{name}` has {entry.file_size} bytes")
            members[name] = archive.read(entry)
    return members


def _check_members(path: Path, manifest: Manifest, members: dict[str, bytes]) -> None:
    listed, found = set(manifest.members), set(members)
    used: set[str] = {TARGET, CONSTANTS, DECISIONS}
    for entry in manifest.steps:
        if isinstance(entry, TpuEntry):
            used.add(entry.image)
        elif isinstance(entry, HostEntry):
            used.add(entry.model)
    problems = [
        *(f"`{name}` is missing" for name in sorted((listed | used) - found)),
        *(f"`{name}` is not listed" for name in sorted((found | used) - listed)),
        *(f"`{name}` has no use" for name in sorted(found - used) if not EXTRA.match(name)),
    ]
    for name in sorted(listed & found):
        if len(members[name]) != manifest.members[name].size:
            problems.append(
                f"`{name}` has {len(members[name])} bytes, not {manifest.members[name].size}"
            )
        elif sha3(members[name]) != manifest.members[name].sha3_256:
            problems.append(f"`{name}` does not match its checksum")
    if problems:
        raise _bad(path, "has wrong members", *problems[:8])


def _decisions(path: Path, data: bytes) -> list[dict[str, Any]]:
    try:
        content: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"has a {DECISIONS} that is not JSON", str(error)) from error
    keys = {"layer": str, "stage": str, "fired": bool, "reason": str, "details": dict}
    rows: Iterable[Any] = content if isinstance(content, list) else [None]
    for row in rows:
        if not isinstance(row, dict) or any(
            not isinstance(row.get(key), kind) for key, kind in keys.items()
        ):
            raise _bad(path, f"has a {DECISIONS} that is malformed")
    return content
