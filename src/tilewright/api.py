"""The Python API: `compile` a model, `load` a package, `run` it.

import tilewright

package = tilewright.compile("m.onnx", "edge16", calibration="pictures/")
package.save("m.tpupkg")
outputs = tilewright.load("m.tpupkg").run({"x": array})
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.ptq.options import QuantOptions
from tilewright.runtime.preprocess import Preprocess, load_samples, parse_preprocess
from tilewright.runtime.runtime import Package

if TYPE_CHECKING:
    from tilewright.codegen.package import PackageContent
    from tilewright.codegen.program import Program
    from tilewright.compiler import Compiled, FrontEnd, Progress
    from tilewright.diagnose import Gate
    from tilewright.ptq.precision import Budget
    from tilewright.quant.table import CalibrationTable
    from tilewright.spec.hardware import Hardware

Array = npt.NDArray[Any]
Samples = Iterable[Mapping[str, Array]]


def _silent(phase: str, done: float) -> None:
    del phase, done


RANDOM_SAMPLES = 4
"""Inputs drawn for `random_calibration`."""


@dataclass(frozen=True)
class CompileOptions:
    """What a compile is asked for."""

    calibration: Path | Samples | None = None
    """Folder of pictures or arrays, an .npz, or samples themselves (arrays by input name)."""
    random_calibration: bool = False
    """Take ranges from seeded random inputs: cycles are right, results are not."""
    table: CalibrationTable | None = None
    """Calibrated ranges; `calibration` then serves only to fit codes."""
    quant: QuantOptions = field(default_factory=QuantOptions)
    """How ranges, codes and biases are chosen."""
    budget: Budget | None = None
    """Mixed precision: as many layers with 4-bit weights as this allows to lose."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, "tuple[int, ...]"])
    """Shapes of inputs with dynamic dimensions."""
    preprocess: Preprocess | None = None
    """From pictures to the input; ImageNet's when None."""
    dtype: Literal["int8", "fp16", "float32"] = "int8"
    """Number type of the activations; the target must declare it. `fp16` needs no calibration, but
    samples show at compile time what would overflow. `float32`: no quantisation; everything runs on
    the host (a check of the front half)."""
    overflow: Literal["host", "refuse"] = "host"
    """fp16: layers whose values would overflow stay float32 on the host, or the model is refused
    (`refuse`)."""
    timing: Path | None = None
    """Measured times to schedule by: a waveform of the program that is compiled without them, or a
    module with `tpu.timing_constraint`s."""
    fuse: bool = True
    """Let additions join the loop nests of the layers that make their operands, and tensors stay in
    SRAM from layer to layer."""
    level: Literal[0, 1, 2, 3] = 2
    """How much is tried for a fast program: 0, layer by layer; 3, everything. The results are the
    same."""
    optimise: Literal["speed", "size"] = "speed"
    """`size`: the least memory for activations comes before cycles."""
    constants_in_sram: tuple[str, ...] = ()
    """Layers, or their constants, by the model's names; `all`: every one. They are loaded once,
    when the program starts, and stay in SRAM to its end."""
    bank_policy: Literal["shared", "strict"] = "shared"
    """`strict`: a layer's parameters of channels and of activations never share a bank of the chip,
    and it never overwrites its own; a layer that does not fit so is refused."""
    keep_ir: tuple[str, ...] = ("quant",)
    """Levels whose IR goes into the package."""


@dataclass
class Build:
    """A package and, unless all of it runs on the host, the compile it came from."""

    package: Package
    compiled: Compiled | None
    front: FrontEnd


def resolve_model(model: Path | str) -> tuple[Path, dict[str, tuple[int, ...]], Preprocess | None]:
    """Return a model's file, known shapes and preprocessing; `zoo:NAME` names a zoo model.

    Raises:
        TilewrightError: E0101 when there is no such file.
    """
    text = str(model)
    if text.startswith("zoo:"):
        from tilewright.zoo import find, prepare

        recipe = find(text[4:])
        return prepare(recipe.name), {recipe.input_name: recipe.input_shape}, recipe.preprocess
    path = Path(model)
    if not path.is_file():
        raise TilewrightError(
            "E0101", f"there is no model file `{path}`", hint="`tilewright zoo` lists models to try"
        )
    return path, {}, None


def build(
    model: Path | str, target: Hardware, options: CompileOptions, progress: Progress = _silent
) -> Build:
    """Compile a model and keep its levels.

    Raises:
        TilewrightError: the model, the samples or the target do not allow it.
    """
    from tilewright.compiler import compile_model, front_end
    from tilewright.levels import signature

    if options.budget is not None:
        from tilewright.mixed import build_mixed

        return build_mixed(model, target, options, progress)[0]
    path, shapes, preprocess = resolve_model(model)
    preprocess = options.preprocess or preprocess
    front = front_end(
        path,
        target,
        shapes={**shapes, **options.shapes},
        calibrated=options.dtype == "int8"
        and (
            options.calibration is not None
            or options.random_calibration
            or options.table is not None
        ),
        progress=progress,
    )
    inputs = signature(front.stage.module, front.context)
    asked: dict[str, Any] = {"target": target.name, "dtype": options.dtype}
    used = _Fed(preprocess, inputs, _has_open_sizes(path))
    if options.dtype == "float32":
        program, compiled = float_program(front), None
        decisions = front.context.decisions
    else:
        compiled = compile_model(
            front,
            target,
            samples=used.samples(options),
            table=options.table,
            dtype=options.dtype,
            quant=options.quant,
            timing=options.timing,
            fuse=options.fuse,
            level=options.level,
            goal=options.optimise,
            constants_in_sram=options.constants_in_sram,
            overflow=options.overflow,
            bank_policy=options.bank_policy,
            progress=progress,
        )
        program, decisions = compiled.program, compiled.decisions
        asked |= {"method": compiled.table.method, "samples": compiled.table.samples}
        if options.dtype == "int8":
            asked |= quant_record(options.quant, compiled.table)
        if options.random_calibration:
            asked["calibration"] = "random"
        if options.timing is not None:
            asked["timing"] = readable(options.timing.name)
        if not options.fuse:
            asked["fusion"] = "off"
        asked |= {"level": options.level, "optimise": options.optimise}
        if options.constants_in_sram:
            asked["constants_in_sram"] = list(options.constants_in_sram)
        if options.bank_policy != "shared":
            asked["quant_bank_policy"] = options.bank_policy
    from tilewright.codegen.package import PackageContent

    content = PackageContent(
        program=program,
        target=target,
        model_name=readable(path.name if str(model) == str(path) else str(model)),
        model_sha3=hashlib.sha3_256(path.read_bytes()).hexdigest(),
        preprocess=used.recorded(),
        options=asked,
        decisions=[
            {
                "layer": item.layer,
                "stage": item.stage,
                "fired": item.fired,
                "reason": item.reason,
                "details": _plain(item.details),
            }
            for item in decisions
        ],
    )
    if compiled is not None:
        progress("package", 0.98)
        _add_ir(content, compiled, options.keep_ir)
    return Build(Package(content), compiled, front)


def quant_record(options: QuantOptions, table: CalibrationTable) -> dict[str, Any]:
    """Return what a package records of how its numbers were chosen."""
    asked = options.resolved()
    found: dict[str, Any] = {
        "quant_level": asked.level,
        "activations": asked.activations if asked.activations != "auto" else table.activations,
        "rounding": asked.rounding,
        "bias_correction": asked.bias,
        "weight_bits": asked.weight_bits,
    }
    if asked.layer_bits:
        found["layer_bits"] = [f"{name}={bits}" for name, bits in asked.layer_bits.items()]
    return found


def readable(name: str) -> str:
    """Return a file name as text that can be written: bytes that are no UTF-8 are replaced."""
    return os.fsencode(name).decode("utf-8", "replace")


def _input_type(element: str) -> np.dtype[Any]:
    """Return the numpy type of a model's input from its element type."""
    if element == "i1":
        return np.dtype(np.bool_)
    kind = {"f": "f", "i": "i", "u": "u"}[element[0]]
    return np.dtype(f"{kind}{int(element.lstrip('fui')) // 8}")


def _has_open_sizes(path: Path) -> bool:
    """Whether a model leaves sizes of its inputs open; samples may then differ in them."""
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    constants = {item.name for item in graph.initializer}
    return any(
        not size.HasField("dim_value")
        for entry in graph.input
        if entry.name not in constants
        for size in entry.type.tensor_type.shape.dim
    )


class _Fed:
    """Samples for calibration, and whether pictures were among them."""

    def __init__(
        self,
        preprocess: Preprocess | None,
        inputs: list[tuple[str, tuple[int, ...], str]],
        varying: bool = False,
    ) -> None:
        self.preprocess = preprocess
        self.inputs = {name: shape for name, shape, _ in inputs}
        self.types = {name: _input_type(element) for name, _, element in inputs}
        self.pictures = preprocess is not None
        self.varying = varying

    def samples(self, options: CompileOptions) -> Samples | None:
        source = options.calibration
        if options.random_calibration:
            return self._drawn()
        if source is None or not isinstance(source, Path):
            return source
        return self._read(source, options.quant.samples)

    def _drawn(self) -> Iterator[dict[str, Array]]:
        generator = np.random.default_rng(0)
        for _ in range(RANDOM_SAMPLES):
            yield {name: self._random(name, generator) for name in self.inputs}

    def _random(self, name: str, generator: np.random.Generator) -> Array:
        kind, shape = self.types[name], self.inputs[name]
        if kind.kind in "iu" and kind.itemsize <= 2:
            limits = np.iinfo(kind)
            return generator.integers(limits.min, limits.max, shape, kind, endpoint=True)
        return generator.standard_normal(shape).astype(kind)

    def _read(self, source: Path, limit: int) -> Iterator[dict[str, Array]]:
        from tilewright.runtime.preprocess import PICTURE_SUFFIXES, list_samples

        if any(file.suffix.lower() in PICTURE_SUFFIXES for file in list_samples(source)):
            self.pictures = True
        for sample in load_samples(source, self.inputs, self.preprocess, limit, self.varying):
            yield {name: array.astype(self.types[name]) for name, array in sample.items()}

    def recorded(self) -> dict[str, Any] | None:
        """Return the preprocessing to keep in the package: when pictures are this model's input."""
        from tilewright.runtime.preprocess import PRESETS, fit_to_shape

        if not self.pictures or len(self.inputs) != 1:
            return None
        shape = next(iter(self.inputs.values()))
        return fit_to_shape(self.preprocess or PRESETS["imagenet"], shape).to_json()


def _plain(value: Any) -> Any:
    """Return `value` as JSON can hold it."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        return [_plain(item) for item in items]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _add_ir(content: PackageContent, compiled: Compiled, levels: Iterable[str]) -> None:
    """Put the IR of some levels, and the constants they name, into the package."""
    import tempfile

    from tilewright.ir.io import print_module
    from tilewright.ir.weights import WeightStore

    store = WeightStore()
    for level in levels:
        if level not in compiled.stages:
            raise UsageError(
                "E0702",
                f"there is no level `{level}` to keep",
                hint=f"levels: {', '.join(compiled.stages)}",
            )
        stage = compiled.stages[level]
        text = print_module(stage.module)
        content.extras[f"ir/{level}.mlir"] = text.encode()
        for name in stage.weights:
            if name not in store and f'"{name}"' in text:
                store.set(name, stage.weights.get(name))
    if not len(store):
        return
    with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
        path = Path(folder) / "weights.safetensors"
        store.save(path)
        content.extras["weights.safetensors"] = path.read_bytes()


def float_inputs(
    model: Path | str, target: Hardware, options: CompileOptions
) -> list[dict[str, Array]]:
    """Return the calibration samples of a model as a list; none without calibration data.

    Raises:
        TilewrightError: the model or the samples cannot be read.
    """
    from tilewright.compiler import front_end
    from tilewright.levels import signature

    path, shapes, preprocess = resolve_model(model)
    front = front_end(path, target, shapes={**shapes, **options.shapes})
    inputs = signature(front.stage.module, front.context)
    samples = _Fed(options.preprocess or preprocess, inputs).samples(options)
    return [dict(item) for item in itertools.islice(samples or (), options.quant.samples)]


def float_program(front: FrontEnd) -> Program:
    """Return a program that runs a whole model in float32 on the host.

    Raises:
        TilewrightError: E0402, something in the model has no float meaning.
    """
    from tilewright.codegen.assemble import host_dtype
    from tilewright.codegen.program import HostStep, Port, Program
    from tilewright.levels import signature
    from tilewright.runtime.top_to_onnx import export

    model = export(front.stage.module, front.stage.weights)
    inputs = [
        Port(name, shape, host_dtype(element))
        for name, shape, element in signature(front.stage.module, front.context)
    ]
    outputs = [
        Port(
            name,
            tuple(model.types[name].get_shape()),
            host_dtype(str(model.types[name].get_element_type())),
        )
        for name in model.outputs
    ]
    step = HostStep(
        "float",
        model.proto.SerializeToString(deterministic=True),
        tuple(model.inputs),
        tuple(model.outputs),
        "the model was compiled without quantisation",
        tuple(name for name in model.values if name not in model.inputs),
    )
    return Program(inputs, outputs, np.zeros(0, np.uint8), 0, {}, [step])


def compile(
    model: Path | str,
    target: Hardware | str | Path = "edge16",
    *,
    calibration: Path | str | Samples | None = None,
    quant: QuantOptions | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    preprocess: Preprocess | str | None = None,
    dtype: Literal["int8", "fp16", "float32"] = "int8",
    level: Literal[0, 1, 2, 3] = 2,
    optimise: Literal["speed", "size"] = "speed",
    constants_in_sram: Sequence[str] = (),
    gate: Gate | None = None,
) -> Package:
    """Compile a model for a chip.

    Args:
        model: An ONNX file, or `zoo:NAME`.
        target: A target, its name, or its YAML file.
        calibration: Folder of pictures or arrays, an .npz, or samples (arrays by input name).
        quant: How ranges, codes and biases are chosen; by default as `-Oq2` does.
        shapes: Shapes of inputs with dynamic dimensions.
        preprocess: For pictures; see `tilewright.runtime.preprocess`.
        dtype: Number type of the activations: int8, fp16 where the target has it, or float32 on
            the host alone.
        level: How much is tried for a fast program, 0 to 3; the results are the same.
        optimise: `speed`, or `size`: the least memory for activations.
        constants_in_sram: Layers, or their constants, by the model's names, or `all`: loaded once,
            when the program starts, and never again.
        gate: Limits of accuracy the package must keep (`tilewright.diagnose.Gate`).

    Raises:
        TilewrightError: the model, the samples or the target do not allow it; E0303, a limit of
            accuracy is not kept.
    """
    from tilewright.spec.hardware import Hardware, load_target

    options = CompileOptions(
        calibration=Path(calibration) if isinstance(calibration, str) else calibration,
        quant=quant or QuantOptions(),
        shapes=dict(shapes or {}),
        preprocess=parse_preprocess(preprocess) if isinstance(preprocess, str) else preprocess,
        dtype=dtype,
        level=level,
        optimise=optimise,
        constants_in_sram=tuple(constants_in_sram),
    )
    hardware = target if isinstance(target, Hardware) else load_target(target)
    made = build(model, hardware, options)
    if gate is not None:
        from tilewright.diagnose import hold

        accuracy = hold(made, model, options, gate, _silent)
        made.package.content.options.update(accuracy.record())
    return made.package
