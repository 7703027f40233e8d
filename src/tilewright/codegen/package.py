"""Packages (`.tpupkg`): one zip file with everything that runs a model on one chip.

| member | content |
|---|---|
| `manifest.json` | readable: inputs, outputs, tensors, steps, memory, checksums of the others |
| `target.yaml` | the chip |
| `program_K.bin` | image of a TPU step (`codegen/image.py`), its constants left out |
| `constants.bin` | packed weights, parameters and tables, as they lie in DDR |
| `host/host_K.onnx` | a part that runs on the host |
| `decisions.json` | what the compiler decided about each layer, and why |
| `weights.safetensors`, `ir/LEVEL.mlir` | the levels of the compiler (optional) |

Members are stored, not compressed, in sorted order and with a fixed date: the same compile gives
the same bytes on every machine, and a small file cannot unfold into a large one.
`runtime/loader.py` reads them.
"""

from __future__ import annotations

import hashlib
import io
import re
import stat
import zipfile
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tilewright.codegen.check_program import check_program
from tilewright.codegen.files import atomic_output
from tilewright.codegen.image import Image, write_image
from tilewright.codegen.manifest import (
    FORMAT,
    VERSION,
    HostEntry,
    Manifest,
    Member,
    Memory,
    ModelEntry,
    PortEntry,
    TargetEntry,
    TensorEntry,
    TpuEntry,
    compact_json,
    step_entry,
)
from tilewright.codegen.program import HostStep, LoadStep, Program, StoreStep
from tilewright.spec.hardware import Hardware

MANIFEST = "manifest.json"
TARGET = "target.yaml"
CONSTANTS = "constants.bin"
DECISIONS = "decisions.json"
EXTRA = re.compile(r"^(weights\.safetensors|ir/[A-Za-z0-9_.-]+)$")
_DATE = (1980, 1, 1, 0, 0, 0)


@dataclass
class PackageContent:
    """What a package holds."""

    program: Program
    target: Hardware
    model_name: str
    """For people: the model file's name without folder."""
    model_sha3: str
    """SHA3-256 of the model file, hex."""
    preprocess: dict[str, Any] | None = None
    """`runtime.preprocess.Preprocess.to_json()` when the model was calibrated on pictures."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the compile was asked for; plain JSON values."""
    decisions: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """`layer`, `stage`, `fired`, `reason`, `details` of each decision."""
    extras: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """`weights.safetensors` and `ir/LEVEL.mlir`."""
    digest: str = ""
    """SHA3-256 of the manifest, hex: names the package's whole content. Set by the loader."""


def package_bytes(content: PackageContent) -> bytes:
    """Return the package as bytes; the same content gives the same bytes.

    Raises:
        TilewrightError: E0601 when the program is inconsistent.
    """
    program, target = content.program, content.target
    check_program(program, target)
    members: dict[str, bytes] = {
        TARGET: target.to_yaml().encode(),
        CONSTANTS: program.constants.tobytes(),
        DECISIONS: (compact_json(content.decisions) + "\n").encode(),
    }
    for name, data in content.extras.items():
        if not EXTRA.match(name):
            raise ValueError(f"a package has no place for {name!r}")
        members[name] = data
    steps: list[Any] = []
    tpu_count = host_count = 0
    for step in program.steps:
        if isinstance(step, StoreStep | LoadStep):
            steps.append(step_entry(step, 0))
        elif isinstance(step, HostStep):
            entry = step_entry(step, host_count)
            assert isinstance(entry, HostEntry)
            members[entry.model] = step.onnx
            steps.append(entry)
            host_count += 1
        else:
            entry = step_entry(step, tpu_count)
            assert isinstance(entry, TpuEntry)
            image = Image(target.digest(), step.code, b"", program.workspace_bytes)
            members[entry.image] = write_image(image)
            steps.append(entry)
            tpu_count += 1
    manifest = Manifest(
        format=FORMAT,
        version=VERSION,
        made_by=f"tilewright {version('tilewright')}",
        model=ModelEntry(name=content.model_name, sha3_256=content.model_sha3),
        target=TargetEntry(name=target.name, digest=target.digest()),
        inputs=tuple(PortEntry(name=p.name, shape=p.shape, dtype=p.dtype) for p in program.inputs),
        outputs=tuple(
            PortEntry(name=p.name, shape=p.shape, dtype=p.dtype) for p in program.outputs
        ),
        memory=Memory(
            constants_bytes=program.constants.nbytes,
            workspace_bytes=program.workspace_bytes,
            sram_peak_bytes=program.sram_peak_bytes,
        ),
        preprocess=content.preprocess,
        options=content.options,
        steps=tuple(steps),
        tensors=tuple(
            TensorEntry(
                name=t.name,
                offset=t.offset,
                shape=t.shape,
                dtype=t.dtype,
                scale=t.scale,
                zero_point=t.zero_point,
                low=t.low,
                layer=t.layer,
            )
            for t in program.tensors.values()
        ),
        layers=tuple(program.layer_info),
        members={
            name: Member(size=len(data), sha3_256=sha3(data))
            for name, data in sorted(members.items())
        },
    )
    return _zip({MANIFEST: manifest.to_text().encode(), **members})


def sha3(data: bytes) -> str:
    """Return the SHA3-256 as hex."""
    return hashlib.sha3_256(data).hexdigest()


def _zip(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        # The manifest comes first, so that `unzip -p` and people find it at once.
        for name in sorted(members, key=lambda item: (item != MANIFEST, item)):
            info = zipfile.ZipInfo(name, _DATE)
            info.create_system = 3
            info.external_attr = (stat.S_IFREG | 0o644) << 16
            archive.writestr(info, members[name])
    return buffer.getvalue()


def write_package(path: Path, content: PackageContent) -> int:
    """Write a package, all of it or nothing; return its size in bytes.

    Raises:
        TilewrightError: E0601 as `package_bytes`, E0701 when the file cannot be written.
    """
    data = package_bytes(content)
    with atomic_output(Path(path)) as scratch:
        scratch.write_bytes(data)
    return len(data)
