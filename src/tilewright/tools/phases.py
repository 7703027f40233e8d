"""The documents' steps (`--quantize` and the others) on a module in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.diagnostics import TilewrightError

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp

    from tilewright.ir.context import CompileContext
    from tilewright.passes import Hook
    from tilewright.ptq.options import Method, QuantLevel


@dataclass(frozen=True)
class CalibrationOptions:
    """Where the sample inputs are and how ranges and codes are chosen from them."""

    data: Path | None
    """Folder of pictures, .npy or .npz files, or one such file."""
    level: QuantLevel = 2
    """As `-Oq` of `tilewright compile`."""
    method: Method | None = None
    """How ranges are chosen; None: as the level has it."""
    samples: int = 200
    """At most this many inputs are used."""
    preprocess: str = "imagenet"
    """How pictures become inputs (`runtime.preprocess.parse_preprocess`)."""


def convert_onnx_to_top(
    module: ModuleOp, context: CompileContext, hooks: Sequence[Hook] = ()
) -> None:
    """Convert to `top` and optimise the float graph.

    Raises:
        TilewrightError: the module is not of the `onnx` level; as the passes do.
    """
    _require(module, "onnx", "--convert-onnx-to-top")
    _run(module, context, "convert-onnx-to-top", hooks)


def quantize(
    module: ModuleOp,
    context: CompileContext,
    options: CalibrationOptions,
    hooks: Sequence[Hook] = (),
) -> None:
    """Assign the target's layout, calibrate on samples, quantise and split for the host.

    Raises:
        TilewrightError: E0301 no samples or unusable ones; as the passes do.
    """
    from tilewright.ir.stage import Stage
    from tilewright.levels import signature
    from tilewright.pipelines import run_phases
    from tilewright.ptq import prepare
    from tilewright.ptq.options import QuantOptions
    from tilewright.quant.graph import main_function
    from tilewright.quant.table import CalibrationTable
    from tilewright.runtime.preprocess import load_samples, parse_preprocess
    from tilewright.transforms.quant.given import brings_scales

    _require(module, "top", "--quantize")
    if options.data is None and not brings_scales(module):
        raise TilewrightError(
            "E0301",
            "int8 needs calibration data",
            hint="give `--calibration-data FOLDER` (pictures, .npy or .npz)",
        )
    shapes = {name: shape for name, shape, _ in signature(module, context)}
    run_phases(module, context, ["layout"], hooks)
    asked = QuantOptions(
        level=options.level, method=options.method, samples=options.samples
    ).resolved()
    top = Stage(module.clone(), context.weights.copy())
    if options.data is None:
        # A quantised model says itself what its codes mean.
        prepared = prepare.Prepared(CalibrationTable({}, "given"), [], top)
        prepare.quantise(module, context, prepared, asked, hooks)
        return
    samples = load_samples(
        options.data, shapes, parse_preprocess(options.preprocess), options.samples
    )
    prepared = prepare.observe_samples(top, context, samples, asked)
    if prepared.top is not top:
        main, conditioned = (main_function(m) for m in (module, prepared.top.module.clone()))
        main.detach_region(main.body)
        main.add_region(conditioned.detach_region(conditioned.body))
        context.weights = prepared.top.weights.copy()
    prepare.quantise(module, context, prepared, asked, hooks)
    prepare.improve_codes(prepared, module, asked, context)


def convert_top_to_tpu(
    module: ModuleOp, context: CompileContext, hooks: Sequence[Hook] = ()
) -> None:
    """Lower a quantised module to the chip's instructions, by linalg and affine.

    Raises:
        TilewrightError: the module is not quantised; as the passes do.
    """
    _require(module, "quant", "--convert-top-to-tpu")
    context.graph = module.clone()
    _run(module, context, "convert-top-to-tpu", hooks)


def export_image(module: ModuleOp, context: CompileContext) -> bytes:
    """Return the `.bin` image of a lowered module with one chip program.

    Raises:
        TilewrightError: E0501 it is not lowered; E0601 the host is needed between two programs, or
            nothing runs on the chip.
    """
    from tilewright.codegen.image import Image, write_image
    from tilewright.levels import check_limits, program_of

    _require(module, "tpu", "--export-tpu")
    check_limits(module, context)
    program = program_of(module, context)
    assert context.target is not None, "program_of checks it"
    if len(program.tpu_steps) != 1:
        raise TilewrightError(
            "E0601",
            f"the model has {len(program.tpu_steps)} programs for the chip; an image holds one",
            [f"host: {', '.join(step.layers) or step.name}" for step in program.host_steps],
            "`tilewright compile` makes a package, which holds them all and what the host does",
        )
    return write_image(
        Image(
            context.target.digest(),
            program.tpu_steps[0].code,
            program.constants.tobytes(),
            program.workspace_bytes,
        )
    )


def _require(module: ModuleOp, wanted: str, flag: str) -> None:
    from tilewright.levels import LEVELS, level_of

    level = level_of(module)
    if level == wanted:
        return
    before = {"top": "--convert-onnx-to-top", "quant": "--quantize", "tpu": "--convert-top-to-tpu"}
    early = LEVELS.index(level) < LEVELS.index(wanted)
    raise TilewrightError(
        "E0501",
        f"`{flag}` takes a module of level `{wanted}`; this one is `{level}`",
        hint=f"run `{before[wanted]}` first" if early and wanted in before else None,
    )


def _run(module: ModuleOp, context: CompileContext, group: str, hooks: Sequence[Hook]) -> None:
    from tilewright.pipelines import GROUPS, run_phases

    run_phases(module, context, GROUPS[group], hooks)
