"""Every switch of quantisation, and what the levels `-Oq0` to `-Oq3` set them to.

`docs/concepts/quantisation.md` is the contract.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from tilewright.diagnostics import UsageError

Method = Literal["best", "max", "mean", "kl", "mse", "percentile"]
Activations = Literal["auto", "symmetric", "asymmetric"]
Rounding = Literal["nearest", "learned"]
BiasCorrection = Literal["none", "mean", "sequential"]
QuantLevel = Literal[0, 1, 2, 3]

LEVELS: dict[int, dict[str, Any]] = {
    0: {"method": "max", "activations": "symmetric", "rounding": "nearest", "bias": "none"},
    1: {"method": "best", "activations": "symmetric", "rounding": "nearest", "bias": "mean"},
    2: {"method": "best", "activations": "auto", "rounding": "learned", "bias": "sequential"},
    3: {"method": "best", "activations": "auto", "rounding": "learned", "bias": "sequential"},
}
"""What a level sets where nothing else was asked for."""


@dataclass(frozen=True)
class QuantOptions:
    """What quantisation is asked for; None: as the level has it."""

    level: QuantLevel = 2
    """`-Oq`: 0 plain, 1 better ranges, 2 learned codes and biases, 3 more of it."""
    method: Method | None = None
    """Rule that chooses ranges."""
    samples: int = 200
    """At most so many samples are observed."""
    activations: Activations | None = None
    """`auto`: asymmetric if that lowers the error at the network's output."""
    weights: Literal["channel", "tensor"] = "channel"
    """One weight scale an output channel, or one a layer."""
    weight_bits: Literal[8, 4] = 8
    """Bits of the weights of every layer that `layer_bits` does not name."""
    layer_bits: Mapping[str, int] = field(default_factory=dict[str, int])
    """Bits of the weights of single layers, by name."""
    rounding: Rounding | None = None
    bias: BiasCorrection | None = None
    equalise: bool | None = None
    """Cross-layer equalisation before calibration; None: from level 2 on, where it helps."""
    smooth: float | None = None
    """Share of an activation's outliers moved into the weights of linear layers behind it (0..1);
    None: from level 2 on, where it helps."""
    float_layers: tuple[str, ...] | None = None
    """Elementwise layers that stay in float on the host; None: from level 2 on, those whose codes
    would cost the outputs too much."""
    clip_weights: bool | None = None
    """Search each channel's weight scale for the least squared error; None: from level 2 on."""
    seed: int = 0

    def resolved(self) -> QuantOptions:
        """Return the options with what the level sets filled in.

        Raises:
            UsageError: E0702, a value is not legal.
        """
        self._check()
        given = LEVELS[self.level]
        return replace(
            self,
            method=self.method or given["method"],
            activations=self.activations or given["activations"],
            rounding=self.rounding or given["rounding"],
            bias=self.bias or given["bias"],
            clip_weights=self.level >= 2 if self.clip_weights is None else self.clip_weights,
        )

    def _check(self) -> None:
        for what, value, legal in (
            ("level", self.level, get_args(QuantLevel)),
            ("calibration method", self.method, (None, *get_args(Method))),
            ("activations", self.activations, (None, *get_args(Activations))),
            ("weights", self.weights, ("channel", "tensor")),
            ("weight bits", self.weight_bits, (8, 4)),
            ("rounding", self.rounding, (None, *get_args(Rounding))),
            ("bias correction", self.bias, (None, *get_args(BiasCorrection))),
        ):
            if value not in legal:
                choices = ", ".join(str(item) for item in legal if item is not None)
                raise UsageError("E0702", f"{what} must be one of {choices}, not `{value}`")
        for layer, bits in self.layer_bits.items():
            if bits not in (8, 4):
                raise UsageError("E0702", f"weight bits of `{layer}` must be 8 or 4, not {bits}")
        if self.samples < 1:
            raise UsageError("E0702", f"at least one sample is needed, not {self.samples}")
        if self.smooth is not None and not 0 <= self.smooth <= 1:
            raise UsageError("E0702", f"smoothing must be 0..1, not {self.smooth}")
