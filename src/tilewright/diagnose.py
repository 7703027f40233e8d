"""Measuring a build's accuracy, holding it against limits, and finding what is to blame.

What needs the front end, files or the command line's options is here; the judgements are in
`quant/advice.py`, `quant/accuracy.py` and `quant/variants.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.quant.accuracy import Accuracy, Limits, measure, too_large
from tilewright.quant.advice import (
    FusionCheck,
    Step,
    float_step,
    fusion_step,
    is_bad,
    layer_step,
    preprocess_step,
    scale_step,
)
from tilewright.quant.channels import Inspector, ScaleFinding, inspect_scales
from tilewright.quant.compare import Comparison, compare, decibel, holds_scores, saturating
from tilewright.quant.variants import PreprocessCheck, check_preprocess, picture_files, read_labels
from tilewright.runtime.preprocess import (
    PICTURE_SUFFIXES,
    Preprocess,
    list_samples,
    load_samples,
)

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp

    from tilewright.api import Build, CompileOptions, Samples
    from tilewright.compiler import Progress

Array = npt.NDArray[Any]

EVALUATED = 100
"""Samples an accuracy limit is measured on, at most, unless asked otherwise."""
FLOAT_SAMPLES = 2
"""Samples that the float graph is held against the model file on."""
LAYER_SAMPLES = 16
"""Samples that layers are compared on to name those to blame."""


@dataclass(frozen=True)
class Gate:
    """Limits of accuracy, and on what they are measured."""

    limits: Limits
    data: Path | None = None
    """Folder or file of samples; None: those of calibration."""
    labels: Path | None = None
    """CSV with columns file and label; only pictures and arrays it names count."""
    samples: int = EVALUATED


def samples_of(build: Build, source: Path | Samples, limit: int) -> Iterator[dict[str, Array]]:
    """Return inputs of a build from files, or samples as they are, in the model's number types.

    Raises:
        TilewrightError: E0301, a file does not fit the model.
    """
    ports = {port.name: port for port in build.package.inputs}
    if isinstance(source, Path):
        shapes = {name: port.shape for name, port in ports.items()}
        found: Any = load_samples(source, shapes, declared(build), limit)
    else:
        found = islice(source, limit)
    for sample in found:
        yield {
            name: np.asarray(array).astype(ports[name].dtype, copy=False)
            for name, array in sample.items()
        }


def declared(build: Build) -> Preprocess | None:
    """Return the preprocessing that a build's package records."""
    kept = build.package.content.preprocess
    return Preprocess.from_json(kept) if kept else None


def labelled_samples(
    build: Build, source: Path, labels: Mapping[str, int], limit: int
) -> tuple[Iterator[dict[str, Array]], list[int]]:
    """Return the samples of files that have a label, a sample a file, and their labels.

    Raises:
        TilewrightError: E0301, no file has a label.
    """
    files = [file for file in list_samples(source) if file.name in labels][:limit]
    if not files:
        raise TilewrightError(
            "E0301",
            f"no sample of `{source}` has a label",
            [f"the labels begin with {', '.join(list(labels)[:3])}"],
        )

    def read() -> Iterator[dict[str, Array]]:
        for file in files:
            yield from samples_of(build, file, 1)

    return read(), [labels[file.name] for file in files]


def evaluate(
    build: Build,
    source: Path | Samples,
    labels: Path | None = None,
    limit: int = EVALUATED,
    progress: Progress | None = None,
) -> Accuracy:
    """Measure a build on samples, those with a label if there are labels.

    Raises:
        UsageError: labels for samples that are no files.
        TilewrightError: as `measure`.
    """
    compiled = build.compiled
    assert compiled is not None
    told = None if progress is None else lambda done: progress("accuracy", 0.98)
    if labels is None:
        return measure(compiled, samples_of(build, source, limit), progress=told)
    if not isinstance(source, Path):
        raise UsageError("E0702", "--labels names files: give a folder of samples")
    samples, classes = labelled_samples(build, source, read_labels(labels), limit)
    return measure(compiled, samples, classes, progress=told)


def hold(
    build: Build,
    model: Path | str,
    asked: CompileOptions,
    gate: Gate,
    progress: Progress,
) -> Accuracy:
    """Measure a build and refuse it if its accuracy is beyond the limits.

    Raises:
        TilewrightError: E0303, it is, with the layers to blame and what to try.
        UsageError: there is nothing to measure on.
    """
    source = gate.data or asked.calibration
    if source is None or build.compiled is None:
        raise UsageError(
            "E0702",
            "a limit of accuracy needs samples and a quantised model",
            hint="give --evaluation-data FOLDER (or --calibration-data)",
        )
    progress("accuracy", 0.98)
    accuracy = evaluate(build, source, gate.labels, gate.samples, progress)
    broken = gate.limits.broken(accuracy)
    if not broken:
        return accuracy
    progress("advice", 0.98)
    comparison, findings = inspect(build, samples_of(build, source, LAYER_SAMPLES))
    steps = advise(
        build,
        comparison,
        findings,
        model,
        asked,
        source if isinstance(source, Path) else None,
        gate.labels,
        accuracy=accuracy,
        refused=True,
    )
    raise too_large(broken, [line for step in steps for line in step.lines(96)])


def inspect(
    build: Build, samples: Iterator[dict[str, Array]]
) -> tuple[Comparison, list[ScaleFinding]]:
    """Compare a build's float and quant levels, and look at the scales."""
    compiled = build.compiled
    assert compiled is not None
    top, quant = compiled.stages["top"], compiled.stages["quant"]
    watch = Inspector(top.module, compiled.table.maxima(), histograms=False)
    found = compare(top.module, top.weights, quant.module, quant.weights, samples, watch=watch)
    return found, inspect_scales(found, watch.found, top.module, top.weights, compiled.decisions)


def advise(
    build: Build,
    comparison: Comparison,
    findings: list[ScaleFinding],
    model: Path | str,
    asked: CompileOptions,
    source: Path | None,
    labels: Path | None = None,
    accuracy: Accuracy | None = None,
    refused: bool = False,
) -> list[Step]:
    """Return the five steps of the advice for a build.

    Args:
        build: the compiled model.
        comparison: its layers, float against quantised.
        findings: of the scale inspection.
        model: the model's file, or zoo:NAME.
        asked: what the compile was asked for.
        source: files of samples; None: there are none.
        labels: classes of pictures (CSV).
        accuracy: what was measured.
        refused: a limit is not kept, however good the outputs are.

    Raises:
        TilewrightError: a picture or the labels cannot be read.
    """
    compiled = build.compiled
    assert compiled is not None
    if accuracy is None and labels is not None and source is not None:
        accuracy = evaluate(build, source, labels)
    data = source or asked.calibration
    few = [] if data is None else list(samples_of(build, data, FLOAT_SAMPLES))
    against, why_not = model_against_float(build, model, few)
    check = fusion_check(build, model, asked, few) if few else None
    tried, reason = preprocess_check(build, source, labels)
    return [
        float_step(against, why_not, accuracy),
        layer_step(comparison, refused),
        scale_step(findings, refused or is_bad(comparison)),
        fusion_step(
            compiled.stages["top"].module,
            compiled.stages["quant"].module,
            compiled.table.thresholds,
            check,
        ),
        preprocess_step(tried, reason, declared(build)),
    ]


def model_against_float(
    build: Build, model: Path | str, samples: list[dict[str, Array]]
) -> tuple[float | None, str]:
    """Return the SQNR (dB) of our float graph against the model file, or None and why not."""
    import onnxruntime

    from tilewright.api import resolve_model
    from tilewright.runtime.float_executor import TopSession, runtime_errors

    if not samples:
        return None, "there are no samples"
    stage = build.front.stage
    if saturating(stage.module) is not stage.module:
        return None, "the model is quantised itself: its own result is one of codes"
    path = resolve_model(model)[0]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    # As written on both sides: fusing and re-laying change the last bits.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        with runtime_errors("prepare"):
            session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        ours = TopSession(stage.module, stage.weights, optimise=False)
        names = [item.name for item in session.get_outputs()]
        signal = noise = 0.0
        for sample in samples:
            with runtime_errors("run"):
                theirs: Any = session.run(names, sample)
            found = ours.run(sample)
            for name, wanted in zip(names, theirs, strict=True):
                if name not in found or found[name].shape != wanted.shape:
                    return None, f'output "{name}" has another shape there'
                if wanted.dtype.kind == "f":
                    a = wanted.astype(np.float64)
                    signal += float((a * a).sum())
                    noise += float(((a - found[name]) ** 2).sum())
    except TilewrightError as error:
        return None, (error.details or [error.message])[0].splitlines()[0][:120]
    return decibel(signal, noise), ""


def fusion_check(
    build: Build, model: Path | str, asked: CompileOptions, samples: list[dict[str, Array]]
) -> FusionCheck | None:
    """Compare the optimised float graph with the graph as imported, layer by layer.

    Both are made again from the model's file, without the layout of the target: that moves elements
    and is checked as part of the whole graph (`model_against_float`). None: the imported graph has
    operations without a float meaning of their own, or the model is quantised itself.
    """
    from tilewright.api import resolve_model
    from tilewright.frontends.onnx import import_onnx
    from tilewright.ir.io import new_context
    from tilewright.pipelines import run_phases
    from tilewright.runtime.float_executor import TopSession

    stage = build.front.stage
    if saturating(stage.module) is not stage.module:
        return None
    path, shapes, _ = resolve_model(model)
    context = new_context(target=build.package.content.target)
    module = import_onnx(path, {**shapes, **asked.shapes}, context)
    run_phases(module, context, ["convert"])
    imported, weights = module.clone(), context.weights.copy()
    run_phases(module, context, ["optimise"])
    worst, layer, compared = 0.0, "", 0
    try:
        plain, fused = TopSession(imported, weights), TopSession(module, context.weights)
        last = _stands_for(module, plain.values)
        for sample in samples:
            wanted, got = plain.run_values(sample), fused.run_values(sample)
            compared = 0
            for name, twin in last.items():
                value, other = got[name], wanted[twin]
                if other.shape != value.shape or value.dtype.kind != "f" or not value.size:
                    continue
                compared += 1
                largest = float(np.abs(other).max()) or 1.0
                apart = float(np.abs(value.astype(np.float64) - other).max()) / largest
                if apart > worst:
                    worst, layer = apart, name
    except TilewrightError:
        return None
    return FusionCheck(compared, worst, layer)


def _stands_for(module: ModuleOp, order: list[str]) -> dict[str, str]:
    """Return by layer of an optimised graph the last of the imported layers it stands for."""
    from xdsl.dialects.builtin import ArrayAttr, StringAttr

    from tilewright.quant.graph import layer_of, main_function

    place = {name: index for index, name in enumerate(order)}
    found: dict[str, str] = {}
    for op in main_function(module).body.block.ops:
        if op.name in ("top.weight", "top.none", "func.return"):
            continue
        fused = op.attributes.get("fused")
        parts = [layer_of(op)]
        if isinstance(fused, ArrayAttr):
            parts += [item.data for item in fused if isinstance(item, StringAttr)]
        known = [name for name in parts if name in place]
        if known:
            found[layer_of(op)] = max(known, key=lambda name: place[name])
    return found


def preprocess_check(
    build: Build, source: Path | None, labels: Path | None
) -> tuple[PreprocessCheck | None, str]:
    """Run variants of the recorded preprocessing through the float model, or say why not."""
    from tilewright.runtime.float_executor import TopSession

    used = declared(build)
    if used is None:
        return None, "the samples are no pictures: how they were made is not recorded"
    if source is None or not any(
        file.suffix.lower() in PICTURE_SUFFIXES for file in list_samples(source)
    ):
        return None, "there are no picture files to try variants on: give a folder of pictures"
    stage = build.front.stage
    session = TopSession(stage.module, stage.weights)
    [name] = session.inputs
    ports = {port.name: port.shape for port in build.package.outputs}
    scored = [output for output in session.outputs if holds_scores(tuple(ports[output]))]
    if not scored:
        return None, "no output holds class scores: variants cannot be judged without labels"
    known = read_labels(labels) if labels is not None else None
    files = picture_files(source, known)

    def run(value: Array) -> Array:
        return session.run({name: value})[scored[0]]

    return check_preprocess(run, files, used, known), ""
