"""Turn each tiled function into a program of instructions with addresses and semaphores.

Before: `func.func @tpu_k` of loops, copies and tiles (docs/concepts/machine.md, "Conventions of the
affine level"). After: `tpu.program @tpu_k`, and on the module

- `constants = "name"`: the constants segment, a uint8 array in the weight store;
- `workspace_bytes`, `sram_peak_bytes`;
- `tensors = {name = {offset, shape}}`: where every DDR tensor lies in the workspace. Tensors that
  are not alive together share bytes;
- `sram_bytes = {layer = bytes}`;
- `half_byte_weights = {layer = [bytes, bytes of padding]}`: of layers with weights of 4 bits;
- `members = {layer = layer}`: layers that run in the nest of another one;
- `steps_of = {layer = step}`: the step of the plan that a nest is part of, all programs counted on.

On each program

- `written = {tensor = index}`: the instruction after which the tensor is complete;
- `parameters = {layer = [addresses]}`: constants, other than its channels' parameters, that a layer
  reads from the vector unit's registers (see `codegen/verify_parameters.py`);
- `quant_bank_policy`: `strict` if that was asked for.

Every instruction touches addresses only; the order between engines is derived from them
(`synchronize`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from xdsl.context import Context
from xdsl.dialects import func, memref
from xdsl.dialects.builtin import (
    ArrayAttr,
    DenseArrayBase,
    DictionaryAttr,
    IntegerAttr,
    MemRefType,
    ModuleOp,
    StringAttr,
    i64,
)
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass

from tilewright.codegen.verify_parameters import verify_parameters
from tilewright.diagnostics import TilewrightError
from tilewright.dialects.tpu import PARAMETERS, POLICY, ProgramOp
from tilewright.ir.context import CompileContext, compile_context
from tilewright.schedule.ddr import Lifetime, place_ddr
from tilewright.spec.hardware import Hardware
from tilewright.spec.program import Instr as EncodedInstr
from tilewright.spec.program import workspace_base
from tilewright.transforms.tpu.constants import ConstantSegment
from tilewright.transforms.tpu.emitter import (
    CONSTANTS_R,
    WORKSPACE_R,
    Emitter,
    ddr_argument,
)
from tilewright.transforms.tpu.evaluate import Evaluator
from tilewright.transforms.tpu.instruction import touch
from tilewright.transforms.tpu.layout import lay_out
from tilewright.transforms.tpu.nests import Nests, attr_str, item_bytes_of, memory_space
from tilewright.transforms.tpu.parameter_banks import Policy, policy_of
from tilewright.transforms.tpu.synchronize import synchronize
from tilewright.transforms.tpu.views import DdrBuffer, View, whole

CONSTANTS = "tpu.constants"
"""Name of the constants segment in the weight store."""
MUCH_PADDING = 0.05
"""A program whose weights of 4 bits are more than this part padding gets a warning."""


@dataclass
class _Tensor:
    """A DDR tensor of the workspace and the steps it is alive in."""

    view: View
    first: int
    last: int
    views: list[View] = field(default_factory=list[View])


@dataclass(frozen=True)
class LowerAffineToTpuPass(ModulePass):
    """Lower tiled functions to instructions.

    Requires: the affine level. Ensures: one `tpu.program` a TPU segment, no function with a body;
    every instruction reads the parameters that are meant for it.

    Options: `quant_bank_policy`: `shared`, or `strict`: parameters of channels and of activations
    of a layer never share a bank, and none is overwritten by the same layer; a layer that does not
    fit so is refused (`transforms/tpu/parameter_banks.py`). The results are the same.
    """

    name = "lower-affine-to-tpu"
    quant_bank_policy: str = "shared"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Rewrite the module in place.

        Raises:
            TilewrightError: E0401 when tiles do not fit, E0402 when an op has no instruction, E0501
            for malformed IR, E0702 for
            a policy that is none.
        """
        policy = policy_of(self.quant_bank_policy)
        context = compile_context(ctx)
        functions = [
            item
            for item in op.body.block.ops
            if isinstance(item, func.FuncOp) and item.sym_name.data.startswith("tpu_")
        ]
        if not functions:
            return
        if context.target is None:
            raise TilewrightError(
                "E0201", "lowering to instructions needs a target", [], "give --hardware-config"
            )
        _Lowering(context, context.target, op, functions, policy).run()


class _Lowering:
    """The lowering of one module."""

    def __init__(
        self,
        context: CompileContext,
        hardware: Hardware,
        module: ModuleOp,
        functions: list[func.FuncOp],
        policy: Policy,
    ) -> None:
        self.context = context
        self.hardware = hardware
        self.module = module
        self.functions = functions
        self.policy: Policy = policy
        self.tensors: dict[str, _Tensor] = {}
        self.arguments: dict[func.FuncOp, dict[SSAValue, View]] = {}
        self.nests: dict[func.FuncOp, Nests] = {}
        self.steps: dict[str, IntegerAttr] = {}

    def run(self) -> None:
        """Lower every function; attach programs and tables to the module."""
        self._collect()
        alignment = max(self.hardware.tensor_alignment, 64)
        lifetimes = [
            Lifetime(name, _buffer(tensor.view).size_bytes, tensor.first, tensor.last)
            for name, tensor in self.tensors.items()
        ]
        offsets, total = place_ddr(lifetimes, alignment)
        for name, tensor in self.tensors.items():
            for view in (tensor.view, *tensor.views):
                _buffer(view).offset = offsets[name]
        constants = ConstantSegment(self.hardware)
        emitters = [self._program(function, constants, total) for function in self.functions]
        content = constants.content()
        base = workspace_base(content.size)
        if base + total > self.hardware.ddr_size:
            raise TilewrightError(
                "E0401",
                "the model does not fit DDR",
                [
                    f"{content.size} bytes of constants and {total} of workspace; "
                    f"{self.hardware.ddr_address_bits} address bits reach {self.hardware.ddr_size}"
                ],
            )
        self.context.weights.set(CONSTANTS, content)
        for function, emitter in zip(self.functions, emitters, strict=True):
            self._count_steps(function)
            self._replace(function, emitter, base)
        self._attributes(offsets, total)
        self._report_padding(constants.half_bytes)
        # What is left is the host's part; its order and the programs' stays as a list of names.
        rest = [item for item in self.module.body.block.ops if isinstance(item, func.FuncOp)]
        for item in rest:
            if item.sym_name.data == "main":
                calls = [call for call in item.body.block.ops if isinstance(call, func.CallOp)]
                self.module.attributes["steps"] = _strings(
                    call.callee.string_value() for call in calls
                )
                item.detach()
                item.erase(safe_erase=False)

    def _collect(self) -> None:
        """Find every DDR tensor and when it is alive; positions count the ops of all functions."""
        position = 1
        for function in self.functions:
            names = _names(function, "arg_names") + _names(function, "result_names")
            block = function.body.block
            arguments: dict[SSAValue, View] = {}
            nests = Nests(function, self.hardware)
            if len(names) != len(block.args):
                names = _names(function, "arg_names")
            positions = {item: position + index for index, item in enumerate(block.ops)}
            end = position + len(positions)
            for name, argument in zip(names, block.args, strict=True):
                kind = argument.type
                assert isinstance(kind, MemRefType)
                constant = name in self.context.weights
                view = ddr_argument(name, kind.get_shape(), item_bytes_of(kind), constant)
                arguments[argument] = view
                if not constant:
                    # The host may fill or read it at any time up to the end of the model.
                    self._alive(name, view, 0, 1 << 40)
            for item in function.walk():
                if isinstance(item, memref.AllocOp):
                    kind = item.memref.type
                    assert isinstance(kind, MemRefType)
                    if memory_space(kind) != 0:
                        continue
                    name = (
                        attr_str(item, "value") or f"{function.sym_name.data}:{len(self.tensors)}"
                    )
                    view = whole(DdrBuffer(name, kind.get_shape(), item_bytes_of(kind), False))
                    nests.ddr[item.memref] = view
                    used = [positions[_top(user, block)] for user in _all_users(item.memref)]
                    self._alive(name, view, min(used, default=end), max(used, default=end))
            lay_out(nests)
            self.arguments[function] = arguments
            self.nests[function] = nests
            position = end + 1

    def _alive(self, name: str, view: View, first: int, last: int) -> None:
        known = self.tensors.get(name)
        if known is None:
            self.tensors[name] = _Tensor(view, first, last)
        else:
            known.first, known.last = min(known.first, first), max(known.last, last)
            known.views.append(view)

    def _program(
        self, function: func.FuncOp, constants: ConstantSegment, workspace_bytes: int
    ) -> Emitter:
        emitter = Emitter(self.hardware, self.context.weights, constants, self.policy)
        Evaluator(emitter, function, self.nests[function], self.arguments[function]).run()
        emitter.banks.finish()
        emitter.cut()
        for instr in emitter.program:
            touch(instr, self.hardware)
        synchronize(emitter.program, self.hardware, workspace_bytes)
        return emitter

    def _replace(self, function: func.FuncOp, emitter: Emitter, base: int) -> None:
        prologue = [
            EncodedInstr("set_reg", {"rd": CONSTANTS_R, "value": 0}),
            EncodedInstr("set_reg", {"rd": WORKSPACE_R, "value": base}),
        ]
        body = [EncodedInstr(instr.name, instr.fields, instr.layer) for instr in emitter.program]
        code = [*prologue, *body, EncodedInstr("halt")]
        needs = self._check_parameters(code, emitter, len(prologue))
        inputs = self._workspace_names(function, "arg_names")
        outputs = self._workspace_names(function, "result_names")
        attributes = {
            "target": StringAttr(self.hardware.name),
            "inputs": _strings(name for name in inputs if name not in outputs),
            "outputs": _strings(outputs),
            "written": DictionaryAttr(
                {
                    name: IntegerAttr(position + len(prologue), i64)
                    for name, position in emitter.written.items()
                }
            ),
            PARAMETERS: DictionaryAttr(
                {layer: DenseArrayBase.from_list(i64, places) for layer, places in needs.items()}
            ),
        }
        if self.policy != "shared":
            attributes[POLICY] = StringAttr(self.policy)
        new = ProgramOp.of(function.sym_name.data, code, attributes)
        block = function.parent_block()
        assert block is not None
        block.insert_op_before(new, function)
        function.detach()
        function.erase(safe_erase=False)

    def _check_parameters(
        self, code: list[EncodedInstr], emitter: Emitter, first: int
    ) -> dict[str, list[int]]:
        """Prove that what is read is what was asked for; return the constants layers ask for.

        `first` is the position of the emitter's first instruction. Constants lie at address 0.
        """
        wanted = {first + index: instr.wants for index, instr in enumerate(emitter.program)}
        needs: dict[str, set[int]] = {}
        for instr in emitter.program:
            for operand, place in instr.wants.items():
                if not (instr.name == "vec_drain" and operand == "v"):
                    needs.setdefault(instr.layer, set()).add(place)
        found = {layer: sorted(places) for layer, places in needs.items()}
        verify_parameters(
            code, self.hardware, needs=found, wanted=wanted, strict=self.policy == "strict"
        )
        stage = LowerAffineToTpuPass.name
        for layer in emitter.banks.used:
            channels, scalars = emitter.banks.banks(layer)
            self.context.decide(
                layer,
                stage,
                True,
                emitter.banks.words(layer),
                channel_banks=channels,
                activation_banks=scalars,
            )
        return found

    def _count_steps(self, function: func.FuncOp) -> None:
        """Note the steps of a function's layers, counted on from those before."""
        steps = function.attributes.get("steps_of")
        if not isinstance(steps, DictionaryAttr):
            return
        before = max((step.value.data + 1 for step in self.steps.values()), default=0)
        for layer, step in steps.data.items():
            if isinstance(step, IntegerAttr):
                self.steps[layer] = IntegerAttr(before + step.value.data, i64)

    def _report_padding(self, packed: Mapping[str, tuple[int, int]]) -> None:
        """Note how much of the weights of 4 bits is padding: rows take whole bytes, four at least.

        Rows of a block with fewer channels than the array has columns are as long as the others.
        """
        if not packed:
            return
        self.module.attributes["half_byte_weights"] = DictionaryAttr(
            {
                layer: ArrayAttr(IntegerAttr(size, i64) for size in sizes)
                for layer, sizes in packed.items()
            }
        )
        stage = LowerAffineToTpuPass.name
        for layer, (size, padding) in packed.items():
            self.context.decide(
                layer,
                stage,
                True,
                f"weights of 4 bits take {size} bytes, {padding} of them ({padding / size:.1%}) "
                "alignment padding",
                bytes=size,
                padding_bytes=padding,
            )
        size, padding = (sum(sizes) for sizes in zip(*packed.values(), strict=True))
        if padding <= MUCH_PADDING * size:
            return
        most = sorted(packed, key=lambda layer: -packed[layer][1])[:3]
        reason = (
            f"{padding / size:.1%} of the weights of 4 bits ({padding} of {size} bytes) is "
            f"alignment padding, most in {', '.join(most)}"
        )
        program = next(
            op.sym_name.data for op in self.module.body.block.ops if isinstance(op, ProgramOp)
        )
        self.context.decide(program, stage, False, reason, warning=reason)

    def _workspace_names(self, function: func.FuncOp, key: str) -> list[str]:
        return [name for name in _names(function, key) if name not in self.context.weights]

    def _attributes(self, offsets: dict[str, int], total: int) -> None:
        attributes = self.module.attributes
        attributes["target"] = StringAttr(self.hardware.name)
        attributes["constants"] = StringAttr(CONSTANTS)
        attributes["workspace_bytes"] = IntegerAttr(total, i64)
        attributes["sram_peak_bytes"] = IntegerAttr(
            max((nests.peak_bytes for nests in self.nests.values()), default=0), i64
        )
        attributes["tensors"] = DictionaryAttr(
            {
                name: DictionaryAttr(
                    {
                        "offset": IntegerAttr(offsets[name], i64),
                        "shape": ArrayAttr(
                            IntegerAttr(extent, i64) for extent in _buffer(tensor.view).shape
                        ),
                    }
                )
                for name, tensor in self.tensors.items()
            }
        )
        peaks: dict[str, int] = {}
        for nests in self.nests.values():
            for layer, size in nests.peaks.items():
                peaks[layer] = max(peaks.get(layer, 0), size)
        attributes["sram_bytes"] = DictionaryAttr(
            {layer: IntegerAttr(size, i64) for layer, size in peaks.items()}
        )
        attributes["members"] = DictionaryAttr(
            {
                member: StringAttr(layer)
                for nests in self.nests.values()
                for member, layer in nests.members.items()
            }
        )
        attributes["steps_of"] = DictionaryAttr(self.steps)


def _buffer(view: View) -> DdrBuffer:
    assert isinstance(view.buffer, DdrBuffer)
    return view.buffer


def _names(function: func.FuncOp, key: str) -> list[str]:
    value = function.attributes.get(key)
    assert isinstance(value, ArrayAttr), key
    return [item.data for item in value if isinstance(item, StringAttr)]


def _strings(items: Iterable[str]) -> ArrayAttr:
    return ArrayAttr(StringAttr(item) for item in items)


def _all_users(value: SSAValue) -> list[Operation]:
    found: list[Operation] = []
    stack = [value]
    while stack:
        for use in stack.pop().uses:
            found.append(use.operation)
            stack.extend(
                result for result in use.operation.results if isinstance(result.type, MemRefType)
            )
    return found


def _top(op: Operation, block: object) -> Operation:
    """Return the op of the function's body that holds `op`."""
    while op.parent is not block:
        parent = op.parent_op()
        assert parent is not None
        op = parent
    return op
