"""The chips of a sweep: every combination of the varied fields, and those that are no chip."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.spec.hardware import Hardware, field_range, parse_target

Settings = dict[str, int]
Vary = dict[str, tuple[int, ...]]
Accumulators = Literal["rows", "bits"]

MAX_POINTS = 4096
ARRAY = "mac_array_size"
NUMBER = re.compile(r"([0-9]+)([KkMm]?)")
FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20}


@dataclass(frozen=True)
class Point:
    """A chip of the sweep."""

    settings: Settings
    """The fields varied, and their values here."""
    derived: Settings
    """Fields that follow them and differ from the base target."""
    hardware: Hardware


@dataclass(frozen=True)
class Illegal:
    """A combination that is no legal chip."""

    settings: Settings
    reasons: list[str]


@dataclass
class Space:
    """All combinations."""

    points: list[Point] = field(default_factory=list[Point])
    illegal: list[Illegal] = field(default_factory=list[Illegal])


def numeric_fields() -> list[str]:
    """Return the fields of a target that can be varied."""
    return [
        name
        for name, info in Hardware.model_fields.items()
        if name == ARRAY or info.annotation is int
    ]


def parse_vary(texts: Sequence[str]) -> Vary:
    """Read `--vary` values: `sram_size=128K,256K,1M`.

    Raises:
        UsageError: a field is unknown or given twice, or a value is no number.
    """
    fields, vary = numeric_fields(), Vary()
    for text in texts:
        name, equals, rest = text.partition("=")
        if not equals or not rest:
            raise UsageError(
                "E0702", f"--vary `{text}` must be written FIELD=VALUE,VALUE...",
                ["for example sram_size=128K,256K,1M"],
            )  # fmt: skip
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            raise UsageError(
                "E0702",
                f"`{name}` is no numeric field of a target",
                hint=f"did you mean `{near[0]}`?" if near else f"fields: {', '.join(fields)}",
            )
        if name in vary:
            raise UsageError("E0702", f"--vary gives `{name}` twice")
        vary[name] = tuple(dict.fromkeys(_number(item, name) for item in rest.split(",")))
    return vary


def _number(text: str, name: str) -> int:
    match = NUMBER.fullmatch(text.strip())
    if match is None or len(text) > 12:
        raise UsageError(
            "E0702",
            f"`{text}` is no value of `{name}`",
            [f"legal: {field_range(name)}", "K stands for 1024, M for 1024 x 1024"],
        )
    return int(match[1]) * FACTORS[match[2].lower()]


def make_space(base: Hardware, vary: Vary, accumulators: Accumulators = "rows") -> Space:
    """Return every combination of the varied fields as a chip, or why it is none.

    Dependent fields follow unless they are varied themselves: `vector_lanes` is the array's
    columns, `sram_word_bytes` at least the lanes. Combinations come in the order given, the last
    field fastest.

    Args:
        base: the target whose other fields are kept.
        vary: values by field.
        accumulators: what stays when the array's size changes: the rows of an M register, or its
            bits (rows in inverse proportion to the columns).

    Raises:
        UsageError: more than `MAX_POINTS` combinations.
    """
    count = math.prod(len(values) for values in vary.values())
    if count > MAX_POINTS:
        raise UsageError("E0702", f"--vary asks for {count} chips; at most {MAX_POINTS} are tried")
    space = Space()
    for values in itertools.product(*vary.values()):
        settings = dict(zip(vary, values, strict=True))
        made = _make(base, settings, accumulators)
        if isinstance(made, Point):
            space.points.append(made)
        else:
            space.illegal.append(made)
    return space


def _make(base: Hardware, settings: Settings, accumulators: Accumulators) -> Point | Illegal:
    content: dict[str, Any] = base.model_dump(mode="json")
    content |= settings
    size = settings.get(ARRAY, base.array_size)
    content[ARRAY] = [size, size]
    if ARRAY in settings:
        if "vector_lanes" not in settings:
            content["vector_lanes"] = size
        if "sram_word_bytes" not in settings:
            content["sram_word_bytes"] = max(base.sram_word_bytes, size)
        if accumulators == "bits" and "matrix_register_rows" not in settings:
            content["matrix_register_rows"] = (
                base.matrix_register_rows * base.array_size // max(1, size)
            )
    derived = {
        name: content[name]
        for name in ("vector_lanes", "sram_word_bytes", "matrix_register_rows")
        if name not in settings and content[name] != getattr(base, name)
    }
    content["name"] = f"{base.name[:50]}-{_digest(content)[:8]}"
    content["description"] = f"{base.name} with {describe(settings) or 'nothing changed'}"[:200]
    try:
        # JSON is YAML; the same check, and the same words, as for a file of the user's.
        return Point(settings, derived, parse_target(json.dumps(content), describe(settings)))
    except TilewrightError as error:
        return Illegal(settings, error.details or [error.message])


def describe(settings: Mapping[str, int]) -> str:
    """Return settings in words: `mac_array_size=16 sram_size=256K`."""
    return " ".join(f"{name}={amount(name, value)}" for name, value in settings.items())


def amount(name: str, value: int) -> str:
    """Return a field's value as `--vary` takes it."""
    if name == "sram_size":
        for unit, factor in (("M", 1 << 20), ("K", 1 << 10)):
            if value and value % factor == 0:
                return f"{value // factor}{unit}"
    return str(value)


def chip_digest(hardware: Hardware) -> str:
    """Return the SHA3-256 of all that makes the chip: not what it is called."""
    return _digest(hardware.model_dump(mode="json"))


def _digest(content: Mapping[str, Any]) -> str:
    chip = {key: value for key, value in content.items() if key not in ("name", "description")}
    return hashlib.sha3_256(json.dumps(chip, sort_keys=True).encode()).hexdigest()
