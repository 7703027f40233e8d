"""From a model file to a program: the whole compile, one function a stage, all stages kept.

`compile_model` is what `tilewright compile`, the tests and the benches call; the phases and their
passes are listed in `pipelines.py`.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from tilewright.diagnostics import TilewrightError, UsageError, suggest
from tilewright.ir.stage import Stage

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import onnx
    from xdsl.dialects.builtin import ModuleOp

    from tilewright.codegen.program import Program
    from tilewright.ir.context import CompileContext, Decision
    from tilewright.ir.weights import WeightStore
    from tilewright.ptq.options import QuantOptions
    from tilewright.quant.calibrate import AtShape
    from tilewright.quant.table import CalibrationTable
    from tilewright.spec.hardware import Hardware

    Sample = Mapping[str, npt.NDArray[np.generic]]

LEVELS = ("top", "quant", "linalg", "affine", "tpu")
"""Levels a compile keeps, in order."""

Level = Literal[0, 1, 2, 3]
Goal = Literal["speed", "size"]
Progress = Callable[[str, float], None]
"""Called with the phase's name and the fraction of the compile done before it."""


@dataclass
class FrontEnd:
    """A model as the fused float graph in the target's layout: what calibration runs."""

    context: CompileContext
    stage: Stage
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    at_shape: AtShape | None = None
    """Makes the graph for inputs of other shapes."""


@dataclass
class Compiled:
    """A compiled model: the program, every level it went through, and why."""

    program: Program
    target: Hardware
    stages: dict[str, Stage]
    """By level: `top` (float), `quant`, `linalg`, `affine`, `tpu`."""
    table: CalibrationTable
    decisions: list[Decision]
    seconds: dict[str, float]
    """Wall time of every phase."""
    dtype: str = "int8"
    """Number type of the activations: `int8` or `fp16`."""


def _ignore(phase: str, done: float) -> None:
    del phase, done


def front_end(
    model: Path | onnx.ModelProto,
    target: Hardware,
    *,
    shapes: dict[str, tuple[int, ...]] | None = None,
    calibrated: bool = False,
    progress: Progress = _ignore,
) -> FrontEnd:
    """Import a model and optimise its float graph.

    Args:
        model: an ONNX file or model.
        target: the chip; its layout is assigned.
        shapes: shapes of inputs with dynamic dimensions, by name.
        calibrated: ranges will be calibrated: what a quantised model has no 8-bit scales for
            (scales found at run time, 16-bit codes) gets calibrated ones.
        progress: see `Progress`.

    Raises:
        TilewrightError: the model cannot be read, or is not supported.
    """
    from tilewright.frontends.onnx import import_onnx
    from tilewright.ir.io import new_context
    from tilewright.pipelines import run_phases

    context = new_context(target=target)
    seconds: dict[str, float] = {}
    progress("import", 0.0)
    start = time.perf_counter()
    module = import_onnx(model, shapes, context)
    seconds["import"] = time.perf_counter() - start
    for share, name in ((0.1, "convert"), (0.15, "optimise"), (0.2, "layout")):
        progress(name, share)
        start = time.perf_counter()
        run_phases(module, context, [name], options=CALIBRATED if calibrated else None)
        seconds[name] = time.perf_counter() - start
    made = FrontEnd(context, Stage(module, context.weights.copy()), seconds)

    def at_shape(other: dict[str, tuple[int, ...]]) -> tuple[ModuleOp, WeightStore]:
        stage = front_end(model, target, shapes=other, calibrated=calibrated).stage
        return stage.module, stage.weights

    made.at_shape = at_shape
    return made


CALIBRATED = {"top-replace-dynamic": "calibrated=true", "top-absorb-qdq": "wide=drop"}
"""Options of passes on quantised models when there is calibration data."""


def _level_options(level: Level, goal: Goal, fuse: bool) -> dict[str, str]:
    """Return the options of passes for a level of optimisation."""
    fuse = fuse and level > 0
    options = {"tile-and-bufferize": f"fuse={str(fuse).lower()} effort={level} goal={goal}"}
    if level == 0:
        options["schedule-instructions"] = "max-instructions=1"
    elif level == max(get_args(Level)):
        options["schedule-instructions"] = "max-instructions=0"
    return options


def _sample_counter(
    progress: Progress, samples: Iterable[Sample], limit: int | None
) -> Callable[[int], None] | None:
    """Return what tells of calibration sample by sample, if it is known how many there are."""
    count = len(samples) if isinstance(samples, Sized) else limit
    if not count:
        return None
    most = min(count, limit or count)
    return lambda done: progress("calibrate", 0.25 + 0.25 * min(1.0, done / most))


def layers_of_constants(module: ModuleOp, names: Sequence[str]) -> list[str]:
    """Return the layers of a top module that are meant by names of layers or of constants.

    Layers fused to another stand for it; `all` gives `*`, every layer.

    Raises:
        UsageError: E0702, nothing has one of the names, or it has no constants.
    """
    from xdsl.dialects.builtin import ArrayAttr, StringAttr

    from tilewright.dialects.top import WeightOp

    if "all" in names:
        return ["*"]
    known: dict[str, list[str]] = {}
    for op in module.walk():
        layer = op.attributes.get("name")
        if not isinstance(layer, StringAttr) or isinstance(op, WeightOp):
            continue
        weights = [value.owner for value in op.operands if isinstance(value.owner, WeightOp)]
        fused = op.attributes.get("fused")
        names_of = [layer.data]
        if isinstance(fused, ArrayAttr):
            names_of += [item.data for item in fused if isinstance(item, StringAttr)]
        for weight in weights:
            # A constant that was changed has a number behind its name.
            names_of += [weight.layer_name, weight.layer_name.rpartition("#")[0]]
        for name in dict.fromkeys(filter(None, names_of)):
            known.setdefault(name, []).extend([layer.data] if weights else [])
    found: dict[str, None] = {}
    for name in names:
        if not known.get(name):
            what = "has no constants" if name in known else "is no layer and no constant"
            raise UsageError(
                "E0702",
                f"`{name}` {what}: nothing to keep in SRAM",
                hint=suggest(name, (item for item in known if known[item])),
            )
        found.update(dict.fromkeys(known[name]))
    return list(found)


def _require_dtype(target: Hardware, dtype: str) -> None:
    """Raise E0402 if the target does not compute in `dtype`."""
    if dtype not in target.dtypes:
        raise TilewrightError(
            "E0402",
            f"target `{target.name}` has no {dtype}",
            [f"its number types: {', '.join(target.dtypes)}"],
            "choose one of them by --dtype, or another target",
        )


@contextmanager
def _rare_collections() -> Generator[None, None, None]:
    """Look for reference cycles rarely: each look visits all of the IR, and finds little in it."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(before[0], 100_000), 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@_rare_collections()
def compile_model(
    model: Path | onnx.ModelProto | FrontEnd,
    target: Hardware,
    *,
    samples: Iterable[Sample] | None = None,
    table: CalibrationTable | None = None,
    dtype: Literal["int8", "fp16"] = "int8",
    quant: QuantOptions | None = None,
    shapes: dict[str, tuple[int, ...]] | None = None,
    preprocessing: dict[str, Any] | None = None,
    timing: Path | None = None,
    fuse: bool = True,
    level: Level = 2,
    goal: Goal = "speed",
    constants_in_sram: Sequence[str] = (),
    overflow: Literal["host", "refuse"] = "host",
    bank_policy: Literal["shared", "strict"] = "shared",
    progress: Progress = _ignore,
) -> Compiled:
    """Compile a model to an int8 or fp16 program.

    Args:
        model: an ONNX file or model, or the result of `front_end` for the same target.
        target: the chip.
        samples: calibration inputs, by input name; int8 needs them unless `table` is given or the
            model is quantised already (what it gives no scale then stays in float). fp16
            uses them to see what would overflow (see `overflow`); without them it shows when the
            program runs.
        table: calibrated ranges, instead of calibrating.
        dtype: number type of the activations; the target must declare it.
        quant: how ranges, codes and biases are chosen; by default as `-Oq2` does.
        shapes: shapes of inputs with dynamic dimensions.
        preprocessing: recorded in the calibration table.
        timing: measured times to schedule by: a waveform of the program that is compiled without
            them, or a module with `tpu.timing_constraint`s.
        fuse: let additions join the loop nests of the layers that make their operands, and tensors
            stay in SRAM from layer to layer.
        level: how much is tried for a fast program: 0, layer by layer, in the order of its tiles;
            1, tensors are held in SRAM and instructions reordered; 2, cascades too; 3, more plans,
            and programs of any length are reordered. The results are the same.
        goal: `speed`, or `size`: the least memory for activations. Level 0 has no choice.
        constants_in_sram: layers, or their constants, by the model's names; `all`: every one. Their
            constants are loaded once, when the program starts, and stay in SRAM to its end.
        overflow: fp16: layers whose values would overflow stay float32 on the host, or the model is
            refused.
        bank_policy: `strict`: a layer's parameters of channels and of activations never share a
            bank of the chip, and it never overwrites its own; a layer that does not fit so is
            refused. The results are the same.
        progress: see `Progress`.

    Raises:
        TilewrightError: the model, the samples or the target do not allow it; the message says
        where and why.
    """
    from xdsl.dialects.builtin import ArrayAttr, StringAttr

    from tilewright.codegen.assemble import assemble
    from tilewright.pipelines import run_phases
    from tilewright.ptq.options import QuantOptions
    from tilewright.ptq.prepare import Prepared, Spread, improve_codes, observe_samples, quantise
    from tilewright.quant.table import CalibrationTable, write_attribute
    from tilewright.transforms.quant.given import brings_scales

    _require_dtype(target, dtype)
    asked = quant or QuantOptions()
    # fp16 has no codes: the samples only show the largest values.
    asked = (asked if dtype == "int8" else replace(asked, level=0, method="max")).resolved()
    if isinstance(model, FrontEnd):
        front = model
    else:
        calibrated = dtype == "int8" and (samples is not None or table is not None)
        front = front_end(model, target, shapes=shapes, calibrated=calibrated, progress=progress)
    seconds = dict(front.seconds)
    context, top = front.context, front.stage
    context.target = target
    context.weights = top.weights.copy()
    if table is None and samples is None and dtype == "fp16":
        table = CalibrationTable({}, "none")
    if table is None and samples is None and brings_scales(top.module):
        # A quantised model says itself what its codes mean.
        table = CalibrationTable({}, "given")
    prepared = None
    if table is not None:
        # Ranges are there already; samples serve to fit codes.
        if table.balanced:
            raise TilewrightError(
                "E0301",
                "the calibration table is of a graph whose channels were balanced",
                ["its ranges mean nothing for the model as it is"],
                "make the table with --smooth-quant 0 --no-equalize",
            )
        spread = Spread(samples if dtype == "int8" and samples is not None else (), asked.samples)
        deque(spread, maxlen=0)
        prepared = Prepared(table, spread.chosen(), top)
    if prepared is None:
        if samples is None:
            raise TilewrightError(
                "E0301",
                "int8 needs calibration data",
                ["no samples and no calibration table were given"],
                "give --calibration-data FOLDER (pictures, .npy or .npz), --fp32 for float on the "
                "host, or --random-calibration to see cycles only",
            )
        progress("calibrate", 0.25)
        start = time.perf_counter()
        prepared = observe_samples(
            top,
            context,
            samples,
            asked,
            preprocessing=preprocessing,
            progress=_sample_counter(progress, samples, asked.samples),
            at_shape=front.at_shape,
        )
        seconds["calibrate"] = time.perf_counter() - start
    table, top = prepared.table, prepared.top
    module, context.weights = top.module.clone(), top.weights.copy()
    if dtype == "fp16":
        write_attribute(module, table)
    layers = layers_of_constants(module, constants_in_sram)
    stages: dict[str, Stage] = {"top": top}
    passes = {
        "convert-to-half": f"overflow={overflow}",
        "lower-affine-to-tpu": f"quant-bank-policy={bank_policy}",
        **_level_options(level, goal, fuse),
    }
    for share, phase, made in (
        (0.5, "quantise" if dtype == "int8" else "half", "quant"),
        (0.6, "linalg", "linalg"),
        (0.65, "affine", "affine"),
        (0.75, "tpu", "tpu"),
    ):
        progress(phase, share)
        if phase == "affine" and progress is not _ignore:
            context.progress = lambda part: progress("affine", 0.65 + 0.1 * part)
        start = time.perf_counter()
        if phase == "affine" and layers:
            module.attributes["tilewright.constants_in_sram"] = ArrayAttr(
                [StringAttr(item) for item in layers]
            )
        if phase == "quantise":
            quantise(module, context, prepared, asked)
            seconds[phase] = time.perf_counter() - start
            phase, start = "fit", time.perf_counter()
            progress(phase, 0.55)
            improve_codes(prepared, module, asked, context)
        else:
            run_phases(module, context, [phase], options=passes)
        if made == "tpu" and timing is not None:
            from tilewright.transforms.tpu.annotate_timing import schedule_by

            schedule_by(timing, module, context)
        seconds[phase] = time.perf_counter() - start
        kept = module if made == "tpu" else module.clone()
        stages[made] = Stage(kept, context.weights.copy())
    context.progress = None
    progress("verify", 0.9)
    start = time.perf_counter()
    _verify(module, target)
    seconds["verify"] = time.perf_counter() - start
    progress("assemble", 0.95)
    start = time.perf_counter()
    program = assemble(stages["quant"].module, module, context.weights, target)
    seconds["assemble"] = time.perf_counter() - start
    return Compiled(program, target, stages, table, list(context.decisions), seconds, dtype)


def _verify(module: ModuleOp, target: Hardware) -> None:
    """Check every program against its chip: limits, banks, and that dependencies are waited for.

    Raises:
        TilewrightError: E0501, a fault of the compiler's own; nothing is built from such a program.
    """
    from tilewright.codegen.verify_compiled import verify_compiled
    from tilewright.dialects.tpu import ProgramOp

    for op in module.ops:
        if isinstance(op, ProgramOp):
            verify_compiled(op, target)
