"""A proxy for a chip's area: what it is made of, weighted. Not an estimate of any process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace

from tilewright.diagnostics import UsageError
from tilewright.spec.hardware import Hardware


@dataclass(frozen=True)
class Weights:
    """Area of each part in units of one int8 multiply-accumulate cell with its weight registers.

    The defaults are round figures of the order seen in 28 nm libraries; set your own.
    """

    mac: float = 1.0
    sram_byte: float = 0.006
    accumulator_bit: float = 0.004
    lane: float = 12.0

    def to_json(self) -> dict[str, float]:
        """Return the weights by name."""
        return asdict(self)


@dataclass(frozen=True)
class Parts:
    """What a chip is made of."""

    mac: int
    """Cells of the array."""
    sram_byte: int
    accumulator_bit: int
    """M registers x rows x columns x 32."""
    lane: int
    """Lanes of the vector unit."""

    def to_json(self) -> dict[str, int]:
        """Return the counts by name."""
        return asdict(self)


def parts_of(hardware: Hardware) -> Parts:
    """Count the parts of a chip."""
    rows, columns = hardware.mac_array_size
    return Parts(
        rows * columns,
        hardware.sram_size,
        hardware.matrix_registers * hardware.matrix_register_rows * columns * 32,
        hardware.vector_lanes,
    )


def area(parts: Parts, weights: Weights) -> float:
    """Return the weighted sum, in multiply-accumulate cells."""
    counts, factors = parts.to_json(), weights.to_json()
    return sum(counts[name] * factors[name] for name in counts)


def parse_weights(texts: Sequence[str]) -> Weights:
    """Read `--area` values: `sram_byte=0.01`.

    Raises:
        UsageError: a part is unknown, or its weight is no finite number of 0 or more.
    """
    known = [item.name for item in fields(Weights)]
    weights = Weights()
    for text in texts:
        name, _, value = text.partition("=")
        if name not in known:
            raise UsageError(
                "E0702", f"--area `{text}` must be written PART=WEIGHT",
                [f"parts: {', '.join(known)}"],
            )  # fmt: skip
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not 0 <= number < float("inf"):
            raise UsageError("E0702", f"the weight of `{name}` must be 0 or more, not `{value}`")
        weights = replace(weights, **{name: number})
    return weights
