"""The phases of the compiler, in order: which passes each runs. Nothing else is decided here.

`tpu-mlir-opt --convert-onnx-to-top`, `--quantize` and `--convert-top-to-tpu` run groups of phases;
so does `tilewright compile`. Names are resolved when a phase runs: importing this module is cheap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewright.transforms.top import LAYOUT_PASSES, TOP_PASSES

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp

    from tilewright.ir.context import CompileContext
    from tilewright.passes import Hook


@dataclass(frozen=True)
class Phase:
    """A named run of passes."""

    name: str
    """What `--dump-stages` and progress call it."""
    level: str
    """Level of the module afterwards (see `levels.LEVELS`)."""
    passes: tuple[str, ...]
    """Passes in order, each `name` or `name{option=value}`."""


PHASES: tuple[Phase, ...] = (
    Phase("convert", "top", ("convert-onnx-to-top",)),
    Phase("optimise", "top", TOP_PASSES),
    Phase("layout", "top", LAYOUT_PASSES),
    Phase("quantise", "quant", ("quantize", "quant-verify-scales", "quant-partition")),
    Phase("linalg", "linalg", ("lower-quant-to-linalg",)),
    Phase("affine", "affine", ("tile-and-bufferize",)),
    Phase("tpu", "tpu", ("lower-affine-to-tpu", "schedule-instructions")),
)
"""Everything between import and encoding."""

HALF = Phase("half", "quant", ("convert-to-half", "quant-partition"))
"""What fp16 does in place of the phase `quantise`."""

GROUPS: dict[str, tuple[str, ...]] = {
    "convert-onnx-to-top": ("convert", "optimise"),
    "quantize": ("layout", "quantise"),
    "convert-top-to-tpu": ("linalg", "affine", "tpu"),
}
"""The documents' three flags, and the phases each stands for."""


def phase(name: str) -> Phase:
    """Return the phase called `name`."""
    return next(item for item in (*PHASES, HALF) if item.name == name)


def run_phases(
    module: ModuleOp,
    context: CompileContext,
    names: Iterable[str],
    hooks: Sequence[Hook] = (),
    options: Mapping[str, str] | None = None,
) -> None:
    """Run the phases called `names` on `module`, in place.

    `options` are the options of passes by name, as in a pipeline: `{"quantize": "table=t.yaml"}`.

    Raises:
        TilewrightError: as the passes and hooks do.
    """
    from tilewright.passes import make_pass, run_passes

    for name in names:
        texts = [
            f"{text}{{{options[text]}}}" if options and text in options else text
            for text in phase(name).passes
        ]
        run_passes(module, context, [make_pass(text) for text in texts], hooks)
