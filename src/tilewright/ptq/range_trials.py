"""What a range costs at the network's output: one value at a time, or the whole network.

`ValueTrials` quantises a single value of the float graph and runs what lies behind it, everything
else in float. `NetworkTrials` emits the integer graph and runs it by the fast executor.

Errors are measured at every output of the network; where an output is a softmax or a sigmoid,
before that too, as behind it an error may hide in saturation until the one input comes that
matters; and where it has few elements, at what the last layer with weights reads: the error of two
numbers is too much a matter of chance to choose by. Each counts by how many elements it has.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import TilewrightError

if TYPE_CHECKING:
    import onnx
    from xdsl.dialects.builtin import ModuleOp
    from xdsl.ir import Operation, SSAValue

    from tilewright.ir.context import CompileContext
    from tilewright.ir.stage import Stage
    from tilewright.quant.table import CalibrationTable
    from tilewright.transforms.quant.scales import EdgeScale

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float64]
Sample = Mapping[str, Array]

TRIAL_SAMPLES = 16
"""Samples that `ValueTrials` runs at most."""

LEAST_SAMPLES = 4
"""With fewer samples `ValueTrials` would choose by chance."""

TRIAL_WORK = 1e12
"""What `ValueTrials` may cost, in multiply-accumulations and `ELEMENT_WORK` for each element; about
6 s of one core's time."""

ELEMENT_WORK = 20
"""Time that an element of a value takes by itself, in multiply-accumulations."""

NETWORK_SAMPLES = 32
"""Samples that `NetworkTrials` runs at most."""

NETWORK_BYTES = 2**30
"""Float values that `NetworkTrials` runs through, one sample after the other: fewer samples of a
large network."""

FEW = 64
"""Elements below which the error of an output is a matter of chance."""

MANY = 256
"""Elements from which on a measured value counts in full."""

TRIAL_BYTES = 2**28
"""Memory for the float values of all samples that `ValueTrials` holds; it takes fewer samples of a
network whose values are large."""

SATURATING = frozenset({"top.softmax", "top.log_softmax", "top.sigmoid"})

QUIET = 1e-9
"""Noise below this share of the signal (90 dB) counts as this much: less of it gains nothing."""


def saturating_operands(module: ModuleOp) -> list[SSAValue]:
    """Return the operands of softmaxes and sigmoids that results of `@main` come from."""
    from xdsl.ir import Operation

    found: dict[SSAValue, None] = {}
    for value in _results(module):
        owner = _source(value).owner
        # An input of the network has no noise to measure.
        if (
            isinstance(owner, Operation)
            and owner.name in SATURATING
            and isinstance(owner.operands[0].owner, Operation)
        ):
            found[owner.operands[0]] = None
    return list(found)


def features(module: ModuleOp) -> list[SSAValue]:
    """Return what the last layers with weights read, where their results have few elements."""
    from xdsl.ir import Operation

    from tilewright.dialects.quant import shape_of

    found: dict[SSAValue, None] = {}
    for value in (*_results(module), *saturating_operands(module)):
        source = _source(value)
        owner = source.owner
        if (
            isinstance(owner, Operation)
            and owner.name in ("top.linear", "top.conv", "top.matmul")
            and math.prod(shape_of(source)) < FEW
        ):
            found[_source(owner.operands[0])] = None
    return list(found)


def _results(module: ModuleOp) -> list[SSAValue]:
    from xdsl.dialects.func import ReturnOp

    from tilewright.quant.graph import main_function

    terminator = main_function(module).body.block.last_op
    assert isinstance(terminator, ReturnOp)
    return list(terminator.operands)


def _source(value: SSAValue) -> SSAValue:
    """Return the value whose elements `value` holds in another order."""
    from xdsl.ir import Operation

    while isinstance(value.owner, Operation) and value.owner.name in (
        "top.reshape",
        "top.transpose",
    ):
        value = value.owner.operands[0]
    return value


def _weight(elements: int) -> float:
    """Return how much the error of a value counts."""
    return min(elements, MANY) / MANY


def spread(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Return at most `count` of the samples, from all over them."""
    if len(samples) <= count:
        return list(samples)
    picks = np.linspace(0, len(samples) - 1, count).round().astype(int)
    return [samples[index] for index in picks]


def trial_samples(module: ModuleOp, names: Collection[str], rules: int) -> int:
    """Return how many samples `ValueTrials` can run in `TRIAL_WORK` and `TRIAL_BYTES`.

    Args:
        module: the float graph.
        names: values to be tried.
        rules: scales of each.
    """
    from tilewright.dialects.quant import shape_of
    from tilewright.quant.graph import main_function

    known = _names_of(module)
    behind: dict[SSAValue, int] = {}
    work: list[float] = []
    size = 0
    # From the end: the operations behind a value are its readers and those behind their results.
    for op in reversed(list(main_function(module).body.block.ops)):
        if op.name in ("top.weight", "top.none", "func.return"):
            continue
        elements = sum(math.prod(shape_of(result)) for result in op.results)
        size += 4 * elements
        reached = 1 << len(work)
        for result in op.results:
            reached |= behind.get(result, 0)
        work.append(elements * (ELEMENT_WORK + _products(op)))
        for operand in op.operands:
            behind[operand] = behind.get(operand, 0) | reached
    total = sum(
        sum(cost for index, cost in enumerate(work) if mask >> index & 1)
        for value, mask in behind.items()
        if known.get(value) in names
    )
    return min(
        TRIAL_SAMPLES,
        int(TRIAL_WORK / max(total * rules, 1.0)),
        TRIAL_BYTES // max(size, 1),
    )


def _products(op: Operation) -> int:
    """Return how many products an element of the result of `op` sums."""
    from tilewright.dialects.quant import shape_of

    if op.name == "top.conv":
        return math.prod(shape_of(op.operands[1])[1:])
    if op.name in ("top.linear", "top.matmul"):
        return shape_of(op.operands[0])[-1]
    return 0


@dataclass
class _Part:
    """The nodes behind a value, and what they read and give."""

    nodes: list[onnx.NodeProto]
    reads: list[str]
    gives: list[str]
    constants: set[str]


class ValueTrials:
    """A float graph in which one value at a time is quantised."""

    def __init__(self, stage: Stage, samples: Sequence[Sample], count: int = 16) -> None:
        """Run the samples and keep every float value.

        Args:
            stage: a float `top` module and its constants.
            samples: inputs of exactly the module's shapes, one at least.
            count: at most so many of them are run.
        """
        from tilewright.runtime.float_executor import TopSession

        session = TopSession(stage.module, stage.weights, threads=1)
        self._model = session._model  # pyright: ignore[reportPrivateUsage]
        self.values = [session.run_values(sample) for sample in spread(samples, count)]
        first = self.values[0]
        """Every value of each sample, by name."""
        self._wires = self._model.values
        self._names = {wire: name for name, wire in self._wires.items()}
        initialisers = {item.name for item in self._model.proto.graph.initializer}
        self._constants = initialisers | set(self._model.external)
        names = _names_of(stage.module)
        measured = [
            *_results(stage.module), *saturating_operands(stage.module), *features(stage.module)
        ]  # fmt: skip
        self._measured = list(
            dict.fromkeys(self._wires[names[value]] for value in measured if value in names)
        )
        self._unit = {
            wire: max(sum(_square(sample[self._names[wire]]) for sample in self.values), 1e-300)
            / _weight(first[self._names[wire]].size)
            for wire in self._measured
        }
        """Noise that counts as 1."""

    def errors(self, name: str, scales: Sequence[EdgeScale]) -> FloatArray | None:
        """Return the error at the outputs for each scale of value `name` and each sample.

        An error is noise over signal, summed over where it is measured. None: nothing that is
        measured lies behind the value.
        """
        from tilewright.runtime.float_executor import runtime_errors

        part = self._behind(self._wires[name])
        if not part.gives:
            return None
        session = self._session(part)
        found = np.zeros((len(scales), len(self.values)))
        for index, values in enumerate(self.values):
            feed = {wire: values[self._names[wire]] for wire in part.reads}
            for row, scale in enumerate(scales):
                feed[self._wires[name]] = quantised(values[name], scale)
                with runtime_errors("run"):
                    given = cast(list[Array], session.run(part.gives, feed))
                for wire, array in zip(part.gives, given, strict=True):
                    noise = _square(array - values[self._names[wire]])
                    found[row, index] += noise / self._unit[wire]
        return found

    def _behind(self, wire: str) -> _Part:
        reached, nodes = {wire}, list[Any]()
        for node in self._model.proto.graph.node:
            if not reached.isdisjoint(node.input):
                nodes.append(node)
                reached.update(node.output)
        nodes = self._with_helpers(nodes)
        made = {output for node in nodes for output in node.output}
        # In the order of first use, without absent operands.
        read = dict.fromkeys(item for node in nodes for item in node.input if item)
        return _Part(
            nodes,
            [item for item in read if item not in made and item not in self._constants],
            [item for item in self._measured if item in made],
            self._constants & set(read),
        )

    def _with_helpers(self, nodes: list[Any]) -> list[Any]:
        """Add what computes the operands that are no values of the module, such as a transpose."""
        graph = self._model.proto.graph
        known = {entry.name for entry in (*graph.input, *graph.output, *graph.value_info)}
        known |= self._constants
        chosen = {node.output[0] for node in nodes}
        wanted = {item for node in nodes for item in node.input} - known
        for node in reversed(graph.node):
            if node.output[0] not in chosen and not wanted.isdisjoint(node.output):
                chosen.add(node.output[0])
                wanted.update(set(node.input) - known)
        return [node for node in graph.node if node.output[0] in chosen]

    def _session(self, part: _Part) -> Any:
        import onnx

        from tilewright.runtime.float_executor import make_session

        known = {
            entry.name: entry
            for group in ("input", "output", "value_info")
            for entry in getattr(self._model.proto.graph, group)
        }
        model = onnx.helper.make_model(
            onnx.helper.make_graph(
                part.nodes,
                "main",
                [known[wire] for wire in part.reads],
                [known[wire] for wire in part.gives],
                [
                    item
                    for item in self._model.proto.graph.initializer
                    if item.name in part.constants
                ],
            ),
            opset_imports=list(self._model.proto.opset_import),
            ir_version=self._model.proto.ir_version,
        )
        external = {
            wire: array for wire, array in self._model.external.items() if wire in part.constants
        }
        return make_session(model, external, threads=1)


def quantised(array: Array, scale: EdgeScale) -> npt.NDArray[np.float32]:
    """Return the values that int8 codes of this scale stand for."""
    from tilewright.quant.observer_kernel import quantise_flat

    out = np.empty(array.shape, np.float32)
    lowest = -127 if scale.zero == 0 else -128
    quantise_flat(
        np.ascontiguousarray(array, np.float32).reshape(-1),
        np.float32(scale.step),
        np.float32(lowest - scale.zero),
        np.float32(127 - scale.zero),
        out.reshape(-1),
    )
    return out


class NetworkTrials:
    """The integer graph of a whole network, for several tables."""

    def __init__(
        self,
        stage: Stage,
        context: CompileContext,
        samples: Sequence[Sample],
    ) -> None:
        """Run the samples in float.

        Args:
            stage: a float `top` module and its constants.
            context: gives the target.
            samples: inputs of exactly the module's shapes, one at least.
        """
        from tilewright.runtime.float_executor import TopSession

        self._stage = stage
        self._target = context.target
        session = TopSession(stage.module, stage.weights, threads=1)
        size = 4 * _elements(stage.module)
        self._samples = spread(
            samples, max(LEAST_SAMPLES, min(NETWORK_SAMPLES, NETWORK_BYTES // max(size, 1)))
        )
        names = _names_of(stage.module)
        self._outputs = session.outputs
        self._saturating = _known(saturating_operands(stage.module), names)
        self._features = _known(features(stage.module), names)
        wanted = [*self._outputs, *self._saturating, *self._features]
        self._wanted = [session.run(sample, wanted) for sample in self._samples]

    def noise(self, table: CalibrationTable, asymmetric: bool) -> FloatArray:
        """Return noise over signal, dB, of each sample: the mean over where it is measured.

        Raises:
            TilewrightError: as `quantize_module`.
        """
        module, context = self._emit(table, asymmetric)
        layers = self._layers(module)
        found: list[float] = []
        for want, (outputs, values) in zip(
            self._wanted, self._runs(module, context, list(layers.values())), strict=True
        ):
            got = {name: _real(module, layer, values[layer]) for name, layer in layers.items()}
            got |= outputs
            weights = [_weight(want[name].size) for name in got]
            ratios = [max(_ratio(want[name], array), QUIET) for name, array in got.items()]
            found.append(float(np.average(10.0 * np.log10(ratios), weights=weights)))
        return np.array(found)

    def _emit(self, table: CalibrationTable, asymmetric: bool) -> tuple[ModuleOp, CompileContext]:
        from tilewright.ir.context import CompileContext
        from tilewright.quant.table import write_attribute
        from tilewright.transforms.quant.quantize import QuantizePass

        context = CompileContext(self._stage.weights.copy(), self._target)
        module = self._stage.module.clone()
        write_attribute(module, table)
        # The search for clipped weights takes longer than all the rest, and adds the same to all.
        QuantizePass(activations="asymmetric" if asymmetric else "symmetric").apply(context, module)
        return module, context

    def _runs(
        self, module: ModuleOp, context: CompileContext, inner: list[str]
    ) -> list[tuple[dict[str, Array], dict[str, Array]]]:
        from tilewright.quant.fast import FastSession
        from tilewright.quant.reference import QuantSession

        try:
            fast = FastSession(module, context.weights, threads=1)
            return [fast.run_layers(sample, inner) for sample in self._samples]
        except TilewrightError as error:
            if error.code != "E0402":
                raise
        # An operation has no fast form: the reference has them all.
        slow = QuantSession(module, context.weights)
        return [slow.run_layers(sample) for sample in self._samples]

    def _layers(self, module: ModuleOp) -> dict[str, str]:
        """Return where the integer graph has the measured values: its layer by the value's name."""
        from tilewright.dialects.quant import shape_of, uniform_of

        names = _names_of(module)
        values = {name: value for value, name in names.items()}
        found: dict[str, str] = {}
        inner = [
            names[value]
            for value in saturating_operands(module)
            if value in names and str(getattr(value.type, "element_type", "")) == "f32"
        ]
        # Where one of them is codes, the sigmoid is a table: measured at the output only.
        if len(inner) == len(self._saturating):
            found = dict(zip(self._saturating, inner, strict=True))
        for name in self._features:
            value = values.get(name)
            if (
                value is not None
                and uniform_of(value) is not None
                and shape_of(value) == self._wanted[0][name].shape
            ):
                found[name] = name
        return found


def _names_of(module: ModuleOp) -> dict[SSAValue, str]:
    """Return the name of every value, as calibration has it."""
    from tilewright.quant.graph import argument_names, main_function
    from tilewright.transforms.quant.scales import value_names

    main = main_function(module)
    ops: list[Operation] = [
        op for op in main.body.block.ops if op.name not in ("top.weight", "top.none")
    ]
    return value_names(ops, dict(zip(main.body.block.args, argument_names(main), strict=True)))


def _elements(module: ModuleOp) -> int:
    """Return the elements of all values."""
    from tilewright.dialects.quant import shape_of

    return sum(math.prod(shape_of(value)) for value in _names_of(module))


def _known(values: list[SSAValue], names: Mapping[SSAValue, str]) -> list[str]:
    return [names[value] for value in values if value in names]


def _real(module: ModuleOp, layer: str, array: Array) -> Array:
    """Return a layer's value in the integer graph as real numbers."""
    from tilewright.dialects.quant import uniform_of
    from tilewright.quant.kernels import dequantize

    for value, name in _names_of(module).items():
        kind = uniform_of(value)
        if name == layer and kind is not None:
            return dequantize(array, kind.step, kind.zero)
    return array


def _square(array: Array) -> float:
    flat = array.astype(np.float64).reshape(-1)
    return float(flat @ flat)


def _ratio(reference: Array, value: Array) -> float:
    """Return noise over signal; infinite where there is noise but no signal."""
    signal = _square(reference)
    noise = _square(reference.astype(np.float64) - value)
    if signal == 0.0:
        return math.inf if noise else 0.0
    return noise / signal
