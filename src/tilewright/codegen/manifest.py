"""The readable part of a package: `manifest.json`, its schema, and its translation to a `Program`.

Strict: unknown keys, wrong types and missing keys are refused.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tilewright.codegen.program import (
    DType,
    HostStep,
    LoadStep,
    Port,
    Program,
    Step,
    StoreStep,
    TensorInfo,
    TpuStep,
)
from tilewright.diagnostics import TilewrightError

FORMAT = "tilewright-package"
VERSION = 1

Name = Annotated[str, Field(min_length=1, max_length=4096)]
Shape = Annotated[tuple[int, ...], Field(max_length=8)]
Scalar = str | int | float | bool | None


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Member(_Entry):
    """A file of the package."""

    size: Annotated[int, Field(ge=0)]
    sha3_256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class TargetEntry(_Entry):
    """The chip; the full description is `target.yaml`."""

    name: Name
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ModelEntry(_Entry):
    """The user's model."""

    name: Name
    sha3_256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class PortEntry(_Entry):
    """Mirrors `program.Port`."""

    name: Name
    shape: Shape
    dtype: DType


class TensorEntry(_Entry):
    """Mirrors `program.TensorInfo`."""

    name: Name
    offset: Annotated[int, Field(ge=0)]
    shape: Shape
    dtype: DType
    scale: float | None
    zero_point: int
    low: int
    layer: str


class StoreEntry(_Entry):
    """Mirrors `program.StoreStep`."""

    kind: Literal["store"]
    value: Name
    tensor: Name
    perm: Shape | None


class LoadEntry(_Entry):
    """Mirrors `program.LoadStep`."""

    kind: Literal["load"]
    tensor: Name
    value: Name
    shape: Shape
    perm: Shape | None


class HostEntry(_Entry):
    """Mirrors `program.HostStep`; the model is the member `model`."""

    kind: Literal["host"]
    name: Name
    model: Name
    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]
    reason: str
    layers: tuple[str, ...]


class TpuEntry(_Entry):
    """Mirrors `program.TpuStep`; the code is the member `image`.

    `layer_names` and `layer_runs` give the layer of each instruction: runs of (index, count).
    """

    kind: Literal["tpu"]
    name: Name
    image: Name
    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]
    layer_names: tuple[str, ...]
    layer_runs: tuple[tuple[int, int], ...]


StepEntry = Annotated[StoreEntry | LoadEntry | HostEntry | TpuEntry, Field(discriminator="kind")]


class Memory(_Entry):
    """What the program takes on the chip and in DDR."""

    constants_bytes: Annotated[int, Field(ge=0)]
    workspace_bytes: Annotated[int, Field(ge=0)]
    sram_peak_bytes: Annotated[int, Field(ge=0)]


class Manifest(_Entry):
    """`manifest.json`."""

    format: Literal["tilewright-package"]
    version: Literal[1]
    made_by: str
    model: ModelEntry
    target: TargetEntry
    inputs: tuple[PortEntry, ...]
    outputs: tuple[PortEntry, ...]
    memory: Memory
    preprocess: dict[str, Scalar | list[float] | list[int]] | None
    options: dict[str, Scalar | list[Scalar]]
    steps: tuple[StepEntry, ...]
    tensors: tuple[TensorEntry, ...]
    layers: tuple[dict[str, Scalar | list[Scalar]], ...]
    members: dict[str, Member]

    def to_text(self) -> str:
        """Return the JSON text: two spaces, one line for each short list and table row."""
        return compact_json(self.model_dump(mode="json")) + "\n"


def parse_manifest(text: bytes, where: str) -> Manifest:
    """Parse and check `manifest.json`.

    Raises:
        TilewrightError: E0601 with one line for each of the first wrong fields.
    """
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        details = [
            f"{'.'.join(str(part) for part in item['loc']) or 'manifest'}: {item['msg']}"
            for item in error.errors(include_url=False, include_input=False)[:5]
        ]
        raise TilewrightError(
            "E0601", f"`{where}` has a manifest that is malformed", details
        ) from error


def compact_json(value: Any, indent: int = 0) -> str:
    """Return JSON in which a value that fits 100 columns takes one line."""
    flat = json.dumps(value, ensure_ascii=False)
    if len(flat) + indent <= 100 or not isinstance(value, dict | list) or not value:
        return flat
    pad = " " * (indent + 2)
    if isinstance(value, dict):
        rows = [
            f"{pad}{json.dumps(str(key), ensure_ascii=False)}: {compact_json(item, indent + 2)}"
            for key, item in value.items()
        ]
        return "{\n" + ",\n".join(rows) + "\n" + " " * indent + "}"
    rows = [pad + compact_json(item, indent + 2) for item in value]
    return "[\n" + ",\n".join(rows) + "\n" + " " * indent + "]"


def encode_layers(layers: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[tuple[int, int], ...]]:
    """Return the distinct names in order of appearance, and runs of (index, count)."""
    index: dict[str, int] = {}
    runs: list[tuple[int, int]] = []
    for layer in layers:
        number = index.setdefault(layer, len(index))
        if runs and runs[-1][0] == number:
            runs[-1] = (number, runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return tuple(index), tuple(runs)


def decode_layers(entry: TpuEntry, count: int) -> tuple[str, ...]:
    """Undo `encode_layers`.

    Raises:
        TilewrightError: E0601 when the runs are not those of `count` instructions.
    """
    names: list[str] = []
    for index, run in entry.layer_runs:
        if not 0 <= index < len(entry.layer_names) or not 0 < run <= count - len(names):
            raise TilewrightError("E0601", f"layer names of `{entry.name}` do not fit its code")
        names += [entry.layer_names[index]] * run
    if len(names) != count:
        raise TilewrightError("E0601", f"layer names of `{entry.name}` do not fit its code")
    return tuple(names)


def step_entry(step: Step, index: int) -> StoreEntry | LoadEntry | HostEntry | TpuEntry:
    """Return the manifest's entry of the `index`-th TPU or host step."""
    if isinstance(step, StoreStep):
        return StoreEntry(kind="store", value=step.value, tensor=step.tensor, perm=step.perm)
    if isinstance(step, LoadStep):
        return LoadEntry(
            kind="load", tensor=step.tensor, value=step.value, shape=step.shape, perm=step.perm
        )
    if isinstance(step, HostStep):
        return HostEntry(
            kind="host",
            name=step.name,
            model=f"host/host_{index}.onnx",
            inputs=step.inputs,
            outputs=step.outputs,
            reason=step.reason,
            layers=step.layers,
        )
    names, runs = encode_layers(step.layers)
    return TpuEntry(
        kind="tpu",
        name=step.name,
        image=f"program_{index}.bin",
        inputs=step.inputs,
        outputs=step.outputs,
        layer_names=names,
        layer_runs=runs,
    )


def program_of(
    manifest: Manifest,
    constants: npt.NDArray[np.uint8],
    codes: dict[str, bytes],
    models: dict[str, bytes],
) -> Program:
    """Rebuild the `Program`.

    Args:
        manifest: The manifest.
        constants: Content of `constants.bin`.
        codes: Encoded instructions by image member.
        models: ONNX files by host member.
    """
    steps: list[Step] = []
    for entry in manifest.steps:
        if isinstance(entry, StoreEntry):
            steps.append(StoreStep(entry.value, entry.tensor, entry.perm))
        elif isinstance(entry, LoadEntry):
            steps.append(LoadStep(entry.tensor, entry.value, entry.shape, entry.perm))
        elif isinstance(entry, HostEntry):
            steps.append(
                HostStep(
                    entry.name,
                    models[entry.model],
                    entry.inputs,
                    entry.outputs,
                    entry.reason,
                    entry.layers,
                )
            )
        else:
            code = codes[entry.image]
            layers = decode_layers(entry, len(code) // 64)
            steps.append(TpuStep(entry.name, code, layers, entry.inputs, entry.outputs))
    tensors = {
        entry.name: TensorInfo(
            entry.name,
            entry.shape,
            entry.offset,
            entry.dtype,
            entry.scale,
            entry.zero_point,
            entry.low,
            entry.layer,
        )
        for entry in manifest.tensors
    }
    if len(tensors) != len(manifest.tensors):
        raise TilewrightError("E0601", "two tensors of the package have one name")
    return Program(
        inputs=[Port(entry.name, entry.shape, entry.dtype) for entry in manifest.inputs],
        outputs=[Port(entry.name, entry.shape, entry.dtype) for entry in manifest.outputs],
        constants=constants,
        workspace_bytes=manifest.memory.workspace_bytes,
        tensors=tensors,
        steps=steps,
        sram_peak_bytes=manifest.memory.sram_peak_bytes,
        layer_info=[dict(item) for item in manifest.layers],
    )
