"""Rebuild one function of the chip on buffers: take it apart, plan it, build the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from xdsl.dialects import func
from xdsl.dialects.builtin import (
    ArrayAttr,
    DictionaryAttr,
    IntegerAttr,
    IntegerType,
    MemRefType,
    StringAttr,
    TensorType,
    f16,
    f32,
    i64,
)
from xdsl.dialects.linalg.ops import GenericOp
from xdsl.ir import Attribute, Block, Region, SSAValue

from tilewright.diagnostics import TilewrightError
from tilewright.ir.context import CompileContext
from tilewright.schedule.box import BoxNoFit
from tilewright.schedule.plan import Plan
from tilewright.schedule.planner import (
    ConstantsDoNotFitError,
    Goal,
    UnitDoesNotFitError,
    plan_network,
)
from tilewright.spec.hardware import Hardware
from tilewright.transforms.affine.extract import Network, bind, extract
from tilewright.transforms.affine.nest import Constants, Nest
from tilewright.transforms.affine.reductions import no_tiling
from tilewright.transforms.affine.segment import (
    PASS,
    Buffers,
    element_of,
    number,
    out_of_memory,
    tensor_shape,
    text,
)
from tilewright.transforms.affine.steps import Emission

CODE_PARAMETERS = (("bias", np.int32), ("mult", np.int32), ("shift", np.int8))
"""What the requantisation of a channel's codes needs, and how it is stored."""


class Segment:
    """The work on one `@tpu_k`."""

    def __init__(
        self,
        context: CompileContext,
        target: Hardware,
        function: func.FuncOp,
        fuse: bool,
        effort: int,
        goal: Goal,
        keep: Callable[[str], bool],
    ) -> None:
        self.context = context
        self.target = target
        self.function = function
        self.fuse = fuse
        self.effort = effort if fuse else 0
        self.goal: Goal = goal
        self.keep = keep
        self.constants: set[str] = set()
        """Layers of the MAC array that have constants."""
        self.added: list[str] = []
        """Constants that became arguments: scalar requantisations, one value a channel."""
        self._scalars: dict[GenericOp, tuple[SSAValue, ...]] = {}

    def build(self) -> func.FuncOp:
        """Return the function on memrefs; the old one is left as it is.

        Raises:
            TilewrightError: a layer cannot be tiled for the target.
        """
        old = self.function.body.block
        last = old.last_op
        assert isinstance(last, func.ReturnOp)
        results = list(last.arguments)
        network = extract(self.context, self.target, self.function, self.fuse, self.keep)
        self.constants = network.constants
        plan = self._plan(network)
        self._log(plan)
        extra = self._scalar_parameters(old)
        inputs = [_buffer(arg.type) for arg in old.args]
        types = [*inputs, *extra, *(_buffer(value.type) for value in results)]
        block = Block(arg_types=types)
        nest = Nest(block, Constants(block))
        buffers = Buffers(self.context, self.target, nest)
        buffers.known.update(zip(old.args, block.args, strict=False))
        buffers.returned = set(results)
        buffers.apart = self.effort == 0
        added = iter(block.args[len(inputs) :])
        for op in self._scalars:
            count = 1 if element_of(op.results[0]) == f16 else len(CODE_PARAMETERS)
            buffers.parameters[op] = tuple(next(added) for _ in range(count))
        outputs = list(block.args[len(types) - len(results) :])
        bound, copied = bind(results)
        buffers.bound.update({value: outputs[at] for value, at in bound.items()})
        buffers.outputs = [outputs[at] for at in copied]
        Emission(buffers, network, plan).run()
        nest.layer = ""
        block.add_op(func.ReturnOp())
        new = func.FuncOp(self.function.sym_name.data, (types, []), Region(block))
        new.attributes.update(self.function.attributes)
        names = [*self._names("arg_names"), *self.added, *self._names("result_names")]
        new.attributes["arg_names"] = ArrayAttr([StringAttr(name) for name in names])
        new.attributes["steps_of"] = DictionaryAttr(
            {
                network.specs[unit].layer: IntegerAttr(at, i64)
                for at, step in enumerate(plan.steps)
                for unit in step.units
            }
        )
        return new

    def _plan(self, network: Network) -> Plan:
        try:
            told = self.context.progress
            more: dict[str, Any] = {} if told is None else {"progress": told}
            return plan_network(
                self.target,
                network.specs,
                network.tensors,
                effort=self.effort,
                goal=self.goal,
                **more,
            )
        except ConstantsDoNotFitError as error:
            raise self._too_many_constants(network, error) from error
        except UnitDoesNotFitError as error:
            layer, answer = network.units[error.unit].layer, error.answer
            if isinstance(answer, BoxNoFit):
                refusal = out_of_memory(layer, answer.buffers, answer.needed_bytes, self.target)
                raise refusal from error
            raise no_tiling(layer, answer, self.target) from error

    def _log(self, plan: Plan) -> None:
        """Note what the plan of the whole function comes to."""
        cascades = sum(1 for step in plan.steps if len(step.units) > 1)
        held = sum(1 for home in plan.homes if home.held)
        self.context.decide(
            self.function.sym_name.data,
            PASS,
            True,
            f"{len(plan.steps)} steps, {cascades} of them cascades; {held} tensors held in SRAM; "
            f"activations take {plan.activation_bytes} bytes at the most, in SRAM and DDR together",
            activation_bytes=plan.activation_bytes,
        )

    def _too_many_constants(
        self, network: Network, error: ConstantsDoNotFitError
    ) -> TilewrightError:
        size = self.target.sram_size
        free = size - error.needed_bytes
        reasons = [f"they take {error.wanted_bytes} bytes; SRAM has {size}"]
        if error.unit is None:
            reasons.append("beside them there is no room for the tiles of all layers")
        else:
            layer = network.units[error.unit].layer
            reasons.append(
                f'layer "{layer}" needs {error.needed_bytes} bytes besides: {max(0, free)} are free'
            )
        names = [unit.layer for unit in network.units if unit.work.keep is not None]
        reasons.append(f"of layers {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}")
        return TilewrightError(
            "E0401", "constants that shall stay in SRAM do not fit", reasons, "keep fewer of them"
        )

    def _names(self, key: str) -> list[str]:
        value = self.function.attributes[key]
        assert isinstance(value, ArrayAttr)
        return [item.data for item in value if isinstance(item, StringAttr)]

    def _scalar_parameters(self, block: Block) -> list[Attribute]:
        """Store the parameters of scalar requantisations by channel, as the chip reads them."""
        types: list[Attribute] = []
        for op in block.ops:
            if not isinstance(op, GenericOp) or text(op, "kind") != "requant" or len(op.inputs) > 1:
                continue
            channels = tensor_shape(op.results[0])[-1]
            if element_of(op.results[0]) == f16:
                wanted = {"bias": np.zeros(channels, np.float32)}
            else:
                wanted = {
                    key: np.full(channels, number(op, key), kind) for key, kind in CODE_PARAMETERS
                }
            for key, values in wanted.items():
                self.added.append(self.context.weights.add(f"{text(op, 'layer')}.{key}", values))
                types.append(MemRefType(stored_type(values.dtype), [channels]))
            self._scalars[op] = ()
        return types


def stored_type(dtype: np.dtype[Any]) -> Attribute:
    """Return the element type of a constant in the weight store."""
    if dtype.kind == "f":
        return {2: f16, 4: f32}[dtype.itemsize]
    return IntegerType(8 * dtype.itemsize)


def _buffer(kind: Attribute) -> Attribute:
    return MemRefType(kind.element_type, kind.get_shape()) if isinstance(kind, TensorType) else kind
