"""The calibration table: a readable, editable file of the range of every value.

```yaml
version: 1
method: kl
samples: 200
activations: asymmetric
preprocessing: {resize: stretch, size: [224, 224], ...}
values:
  conv1: {threshold: 5.97, low: 0.0, high: 5.99, rule: kl, min: 0.0, max: 6.0}
bits: {conv7: 4}
```

A layer's `threshold` (symmetric codes), its `low` and `high` (asymmetric codes), `activations` and
`bits` (of a layer's weights) may be edited by hand; the rest is a record of how they came about.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import yaml

from tilewright.diagnostics import TilewrightError

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp

VERSION = 1

LARGEST = float(np.finfo(np.float32).max)
"""Values of a network are float32."""

CALIBRATION_ATTRIBUTE = "tilewright.calibration"
"""Module attribute that holds the ranges between `quant-calibrate` and `quantize`."""


@dataclass
class CalibrationTable:
    """Largest magnitude to represent, for every value of a model."""

    thresholds: dict[str, float]
    """By layer name (`layer:1`... for further results) or graph input name."""
    method: str = "max"
    samples: int = 0
    """How many inputs were observed."""
    preprocessing: dict[str, Any] | None = None
    """How images became inputs, as plain data."""
    details: dict[str, dict[str, float | str]] = field(
        default_factory=dict[str, dict[str, "float | str"]]
    )
    """For each value what was seen, `min` and `max`, and the `rule` that chose its range."""
    means: dict[str, npt.NDArray[np.float32]] = field(
        default_factory=dict[str, "npt.NDArray[np.float32]"]
    )
    """Mean of every channel of the values that layers with weights read (bias correction)."""
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict[str, "tuple[float, float]"])
    """Least and greatest real value to represent with asymmetric codes, `low <= 0 <= high`; a value
    without an entry takes its threshold."""
    squares: dict[str, npt.NDArray[np.float32]] = field(
        default_factory=dict[str, "npt.NDArray[np.float32]"]
    )
    """Mean square of the channels that `means` has (what an error of a weight costs)."""
    activations: str = "symmetric"
    """`symmetric` or `asymmetric`: which codes were found better, or asked for."""
    peaks: dict[str, npt.NDArray[np.float32]] = field(
        default_factory=dict[str, "npt.NDArray[np.float32]"]
    )
    """Largest magnitude of the channels that `means` has (smoothing, equalisation)."""
    bits: dict[str, int] = field(default_factory=dict[str, int])
    """Bits of the weights of layers that do not have 8, by name."""
    balanced: bool = False
    """Whether channels were balanced (smoothing, equalisation) before their values were observed:
    the ranges are not those of the model as it is."""

    def maxima(self) -> dict[str, float]:
        """Return the largest magnitude seen of every value; its threshold where that is unknown."""
        found: dict[str, float] = {}
        for name, threshold in self.thresholds.items():
            seen = self.details.get(name, {})
            ends = [abs(float(seen[key])) for key in ("min", "max") if key in seen]
            found[name] = max(ends, default=threshold)
        return found

    def save(self, path: str | Path) -> None:
        """Write the table as YAML, values in execution order.

        Raises:
            TilewrightError: E0701, the file cannot be written.
        """
        values = {
            name: {
                "threshold": float(threshold),
                **_bounds(self.ranges.get(name)),
                **self.details.get(name, {}),
            }
            for name, threshold in self.thresholds.items()
        }
        data = {
            "version": VERSION,
            "method": self.method,
            "samples": self.samples,
            "activations": self.activations,
            "preprocessing": self.preprocessing,
            "values": values,
            "bits": dict(self.bits),
            **({"balanced": True} if self.balanced else {}),
            "means": _encoded(self.means),
            "squares": _encoded(self.squares),
            "peaks": _encoded(self.peaks),
        }
        text = (
            "# Calibration table. `threshold` is the largest magnitude that symmetric codes\n"
            "# represent, `low` and `high` are the ends of asymmetric codes; `activations` says\n"
            "# which are used. `min` and `max` are what was seen. `bits`: of layers' weights.\n"
            "# `means`, `squares`, `peaks`: mean, mean square, largest magnitude of every channel\n"
            "# of layers' inputs (base64 float32); optional.\n"
        )
        text += yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=100)
        target = Path(path)
        scratch = target.with_name(target.name + ".partial")
        try:
            scratch.write_text(text, "utf-8")
            scratch.replace(target)
        except OSError as error:
            raise TilewrightError(
                "E0701", f'the calibration table "{path}" cannot be written', [str(error)]
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> CalibrationTable:
        """Read a table.

        Raises:
            TilewrightError: E0701, the file cannot be read; E0301, it is malformed, with the place.
        """
        try:
            text = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TilewrightError(
                "E0701", f'the calibration table "{path}" cannot be read', [str(error)]
            ) from error
        try:
            data: Any = yaml.load(text, _Loader)
        except (yaml.YAMLError, RecursionError, ValueError, TypeError) as error:
            # The last two: a date that does not exist, a mapping for a key.
            raise _malformed(path, str(error)) from error
        if not isinstance(data, Mapping) or data.get("version") != VERSION:
            raise _malformed(path, f"it needs `version: {VERSION}`")
        values: Any = data.get("values")
        if not isinstance(values, Mapping):
            raise _malformed(path, "it needs `values`, a mapping of layer names")
        thresholds: dict[str, float] = {}
        details: dict[str, dict[str, float | str]] = {}
        ranges: dict[str, tuple[float, float]] = {}
        for name, entry in values.items():
            raw: Any = entry.get("threshold") if isinstance(entry, Mapping) else entry
            if not _is_number(raw) or not 0 <= raw <= LARGEST:
                raise _malformed(
                    path, f"`{name}`: threshold must be a number >= 0 of float32, not {raw!r}"
                )
            thresholds[str(name)] = float(raw)
            if isinstance(entry, Mapping):
                details[str(name)] = {
                    str(key): value
                    for key, value in entry.items()
                    if key not in ("threshold", "low", "high")
                }
                if "low" in entry or "high" in entry:
                    ranges[str(name)] = _read_range(path, str(name), entry)
                for key in ("min", "max"):
                    if key in entry and not _is_number(entry[key]):
                        raise _malformed(
                            path, f"`{name}`: {key} must be a finite number, not {entry[key]!r}"
                        )
        samples: Any = data.get("samples", 0)
        if not isinstance(samples, int) or isinstance(samples, bool) or samples < 0:
            raise _malformed(path, f"`samples` must be a count, not {samples!r}")
        return cls(
            thresholds,
            str(data.get("method", "max")),
            samples,
            data.get("preprocessing"),
            details,
            _read_rows(path, "means", data.get("means") or {}),
            ranges,
            _read_rows(path, "squares", data.get("squares") or {}),
            _read_activations(path, data.get("activations", "symmetric")),
            _read_rows(path, "peaks", data.get("peaks") or {}),
            _read_bits(path, data.get("bits") or {}),
            data.get("balanced", False) is True,
        )


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice: one of the two would be ignored."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            text = str(key.value)
            if text in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"`{text}` is given twice", key.start_mark
                )
            seen.add(text)
        return super().construct_mapping(node, deep)


def _is_number(value: Any) -> bool:
    """Whether `value` is a finite number that float64 can hold."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _read_bits(path: str | Path, entries: Any) -> dict[str, int]:
    if not isinstance(entries, Mapping):
        raise _malformed(path, "`bits` must be a mapping of layer names")
    for name, bits in entries.items():
        if isinstance(bits, bool) or bits not in (4, 8):
            raise _malformed(path, f"`bits`: `{name}` must have 4 or 8, not {bits!r}")
    return {str(name): int(bits) for name, bits in entries.items()}


def _read_activations(path: str | Path, value: Any) -> str:
    if value not in ("symmetric", "asymmetric"):
        raise _malformed(path, f"`activations` must be symmetric or asymmetric, not {value!r}")
    return str(value)


def _bounds(ends: tuple[float, float] | None) -> dict[str, float]:
    return {} if ends is None else {"low": float(ends[0]), "high": float(ends[1])}


def _encoded(rows: Mapping[str, npt.NDArray[np.float32]]) -> dict[str, str]:
    return {
        name: base64.b64encode(row.astype("<f4").tobytes()).decode() for name, row in rows.items()
    }


def _read_range(path: str | Path, name: str, entry: Mapping[Any, Any]) -> tuple[float, float]:
    ends: list[float] = []
    for key in ("low", "high"):
        value: Any = entry.get(key)
        if not _is_number(value) or abs(value) > LARGEST:
            raise _malformed(
                path, f"`{name}`: {key} must be a finite number of float32, not {value!r}"
            )
        ends.append(float(value))
    if not ends[0] <= 0.0 <= ends[1]:
        raise _malformed(
            path,
            f"`{name}`: low must be at most 0 and high at least 0, not {ends[0]!r}, {ends[1]!r}",
        )
    return ends[0], ends[1]


def _read_rows(path: str | Path, what: str, entries: Any) -> dict[str, npt.NDArray[np.float32]]:
    if not isinstance(entries, Mapping):
        raise _malformed(path, f"`{what}` must be a mapping")
    found: dict[str, npt.NDArray[np.float32]] = {}
    for name, text in entries.items():
        try:
            data = base64.b64decode(str(text), validate=True)
            mean = np.frombuffer(data, "<f4").astype(np.float32)
        except ValueError as error:
            raise _malformed(path, f"`{what}`: `{name}` is not base64 of float32") from error
        if not np.isfinite(mean).all():
            raise _malformed(path, f"`{what}`: `{name}` is not finite")
        found[str(name)] = mean
    return found


def _malformed(path: str | Path, what: str) -> TilewrightError:
    return TilewrightError("E0301", f'the calibration table "{path}" is malformed', [what])


def write_attribute(module: ModuleOp, table: CalibrationTable) -> None:
    """Record the ranges in the module: names, thresholds and largest values seen, float64."""
    from xdsl.dialects.builtin import ArrayAttr, DictionaryAttr, FloatAttr, StringAttr, f64

    # A value without a range of its own is written as the symmetric one it takes.
    ends = [table.ranges.get(name, (-t, t)) for name, t in table.thresholds.items()]
    module.attributes[CALIBRATION_ATTRIBUTE] = DictionaryAttr(
        {
            "method": StringAttr(table.method),
            "activations": StringAttr(table.activations),
            "names": ArrayAttr([StringAttr(name) for name in table.thresholds]),
            "thresholds": ArrayAttr([FloatAttr(v, f64) for v in table.thresholds.values()]),
            "maxima": ArrayAttr([FloatAttr(v, f64) for v in table.maxima().values()]),
            "lows": ArrayAttr([FloatAttr(v, f64) for v, _ in ends]),
            "highs": ArrayAttr([FloatAttr(v, f64) for _, v in ends]),
            **_rows_attributes("mean", table.means),
            **_rows_attributes("square", table.squares),
            **_rows_attributes("peak", table.peaks),
            "bits": DictionaryAttr({name: StringAttr(str(n)) for name, n in table.bits.items()}),
        }
    )


def _rows_attributes(kind: str, rows: Mapping[str, npt.NDArray[np.float32]]) -> dict[str, Any]:
    from xdsl.dialects.builtin import ArrayAttr, DenseArrayBase, StringAttr, f32

    return {
        f"{kind}_names": ArrayAttr([StringAttr(name) for name in rows]),
        f"{kind}s": ArrayAttr(
            [DenseArrayBase.from_list(f32, [float(v) for v in row]) for row in rows.values()]
        ),
    }


def _rows_of(kind: str, data: Mapping[str, Any]) -> dict[str, npt.NDArray[np.float32]]:
    from xdsl.dialects.builtin import ArrayAttr, DenseArrayBase, StringAttr

    owners, rows = data.get(f"{kind}_names"), data.get(f"{kind}s")
    found: dict[str, npt.NDArray[np.float32]] = {}
    if isinstance(owners, ArrayAttr) and isinstance(rows, ArrayAttr):
        for owner, row in zip(owners, rows, strict=False):
            if isinstance(owner, StringAttr) and isinstance(row, DenseArrayBase):
                found[owner.data] = np.array(row.get_values(), np.float32)
    return found


def _bits_of(record: Any) -> dict[str, int]:
    from xdsl.dialects.builtin import DictionaryAttr, StringAttr

    if not isinstance(record, DictionaryAttr):
        return {}
    return {
        name: int(value.data)
        for name, value in record.data.items()
        if isinstance(value, StringAttr) and value.data in ("4", "8")
    }


def read_attribute(module: ModuleOp) -> CalibrationTable | None:
    """Return the ranges recorded in the module, or None.

    Raises:
        TilewrightError: E0301, the record is malformed.
    """
    from xdsl.dialects.builtin import ArrayAttr, DictionaryAttr, FloatAttr, StringAttr

    record = module.attributes.get(CALIBRATION_ATTRIBUTE)
    if record is None:
        return None
    data = record.data if isinstance(record, DictionaryAttr) else {}
    names, method, chosen = data.get("names"), data.get("method"), data.get("activations")
    columns = [data.get(key) for key in ("thresholds", "maxima")]
    if "lows" in data or "highs" in data:
        columns += [data.get("lows"), data.get("highs")]
    if not isinstance(names, ArrayAttr):
        raise TilewrightError("E0301", f"`{CALIBRATION_ATTRIBUTE}` needs `names`")
    keys = [item.data for item in names if isinstance(item, StringAttr)]
    numbers = [
        [float(item.value.data) for item in column if isinstance(item, FloatAttr)]
        if isinstance(column, ArrayAttr)
        else []
        for column in columns
    ]
    if any(len(column) != len(names) for column in (keys, *numbers)):
        raise TilewrightError("E0301", f"`{CALIBRATION_ATTRIBUTE}` is malformed")
    return CalibrationTable(
        dict(zip(keys, numbers[0], strict=True)),
        method.data if isinstance(method, StringAttr) else "max",
        details={key: {"max": value} for key, value in zip(keys, numbers[1], strict=True)},
        means=_rows_of("mean", data),
        ranges={
            key: (low, high)
            for key, threshold, low, high in zip(keys, numbers[0], *numbers[2:], strict=True)
            if (low, high) != (-threshold, threshold)
        }
        if numbers[2:]
        else {},
        squares=_rows_of("square", data),
        activations=chosen.data if isinstance(chosen, StringAttr) else "symmetric",
        peaks=_rows_of("peak", data),
        bits=_bits_of(data.get("bits")),
    )
