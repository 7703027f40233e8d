"""Cut every layer into tiles that fit SRAM, and turn tensors into buffers in DDR and SRAM.

Before, one op chain a layer on whole tensors::

    %acc = linalg.generic {kind = "conv"} ins(%x, %w) outs(%zeros)
    %y = linalg.generic {kind = "requant"} ins(%acc, %bias, %mult, %shift)

After, one loop nest a layer (docs/concepts/machine.md, "Conventions of the affine level")::

    affine.for %h = 0 to 56 step 8 {
      %t = memref.alloc() {role = "input", slots = 2 : i32} : memref<10x58x64xi8, 1 : i32>
      memref.copy %x_box, %t ...
      linalg.generic {kind = "conv"} ins(%t, %w_tile) outs(%acc)
      ...

A requantisation belongs to the nest of the reduction it finishes, and so does a lookup that is the
only user of its result. So does, with `fuse`, an elementwise operation of that result and a tensor
made earlier (a residual addition). Reshapes are other views of the same buffer. What stays in SRAM
between nests, and which nests take turns row by row: docs/concepts/groups.md.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import func, memref
from xdsl.dialects.builtin import (
    ArrayAttr,
    MemRefType,
    ModuleOp,
    StringAttr,
    TensorType,
)
from xdsl.ir import Attribute, Block, Region, SSAValue
from xdsl.passes import ModulePass

from tilewright.diagnostics import TilewrightError
from tilewright.ir.context import CompileContext, compile_context
from tilewright.schedule.planner import GOALS, Goal
from tilewright.spec.hardware import Hardware
from tilewright.transforms.affine.layers import Segment, stored_type

CONSTANTS = "tilewright.constants_in_sram"
"""Attribute of a module: layers whose constants stay in SRAM."""
EVERY = "*"
"""Stands for all of them."""


@dataclass(frozen=True)
class TileAndBufferizePass(ModulePass):
    """Tile the linalg level for the target's SRAM, and keep what fits there from layer to layer.

    Without `fuse` every addition has its own nest, and every tensor lies in DDR; `effort` 0 keeps
    the latter only. More effort compares more plans. The plan has the fewest cycles (`goal`
    `speed`) or takes the least memory for activations (`size`).

    The constants of the layers that the module's attribute `tilewright.constants_in_sram` names (an
    array of strings; `["*"]`: all) are loaded once, before everything else, and stay.

    Requires: `lower-quant-to-linalg`, and a target. Ensures: functions on memrefs, results as their
    last arguments; `arg_names` names all arguments and `result_names` the results. A module without
    tensor functions of the chip is left alone.
    """

    name = "tile-and-bufferize"
    fuse: bool = True
    effort: int = 2
    goal: str = "speed"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Rewrite the module in place.

        Raises:
            TilewrightError: E0401 when a layer does not fit SRAM however it is cut, or constants
            that shall stay do not, E0402 when the
            chip has no instruction for it, E0403 for images that are not NHWC, E0702 for a goal
            or a layer that is none.
        """
        context = compile_context(ctx)
        functions = [item for item in op.body.block.ops if isinstance(item, func.FuncOp)]
        segments = [item for item in functions if _on_chip(item)]
        if not segments:
            return
        if context.target is None:
            raise TilewrightError("E0201", "tiling needs a target", [], "give --hardware-config")
        goal = _goal(self.goal)
        _Module(context, context.target, op, functions, self.fuse, self.effort, goal).run()


def _goal(name: str) -> Goal:
    for goal in GOALS:
        if goal == name:
            return goal
    raise TilewrightError(
        "E0702", f"the goal of a plan must be one of {', '.join(GOALS)}, not `{name}`"
    )


def _no_constants(name: str, known: set[str]) -> TilewrightError:
    near = difflib.get_close_matches(name, sorted(known), n=3)
    return TilewrightError(
        "E0702",
        f"the chip has no convolution or matrix product `{name}` with constants of its own",
        ["they are to stay in SRAM"],
        f"near: {', '.join(near)}" if near else "",
    )


def _on_chip(function: func.FuncOp) -> bool:
    if not function.sym_name.data.startswith("tpu_") or not function.body.blocks:
        return False
    return not any(isinstance(arg.type, MemRefType) for arg in function.body.block.args)


def buffer_type(kind: Attribute) -> Attribute:
    """Return the DDR buffer type of a tensor type; other types are unchanged."""
    return MemRefType(kind.element_type, kind.get_shape()) if isinstance(kind, TensorType) else kind


@dataclass
class _Module:
    context: CompileContext
    target: Hardware
    module: ModuleOp
    functions: list[func.FuncOp]
    fuse: bool
    effort: int
    goal: Goal

    def run(self) -> None:
        names = self.module.attributes.get(CONSTANTS)
        kept = (
            {item.data for item in names if isinstance(item, StringAttr)}
            if isinstance(names, ArrayAttr)
            else set[str]()
        )
        constants: set[str] = set()
        replaced: list[func.FuncOp] = []
        added: dict[str, list[str]] = {}
        for function in self.functions:
            name = function.sym_name.data
            if _on_chip(function):
                segment = Segment(
                    self.context,
                    self.target,
                    function,
                    self.fuse,
                    self.effort,
                    self.goal,
                    lambda layer: layer in kept or EVERY in kept,
                )
                replaced.append(segment.build())
                constants |= segment.constants
                added[name] = segment.added
            elif name == "main" and function.body.blocks:
                replaced.append(self._main(function, added))
            elif not function.body.blocks:
                replaced.append(self._declaration(function))
            else:
                raise TilewrightError("E0501", f"@{name} is not known at the affine level")
        for name in sorted(kept - constants - {EVERY}):
            raise _no_constants(name, constants)
        for function in self.functions:
            function.detach()
            function.erase(safe_erase=False)
        self.module.body.block.add_ops(replaced)

    def _declaration(self, function: func.FuncOp) -> func.FuncOp:
        """Host functions keep returning their results."""
        kinds = function.function_type
        new = func.FuncOp(
            function.sym_name.data,
            ([buffer_type(k) for k in kinds.inputs], [buffer_type(k) for k in kinds.outputs]),
            Region(),
            "private",
        )
        new.attributes.update(function.attributes)
        return new

    def _main(self, function: func.FuncOp, added: dict[str, list[str]]) -> func.FuncOp:
        """Calls pass result buffers; constants that tiling made become arguments."""
        old = function.body.block
        extra = list(dict.fromkeys(name for names in added.values() for name in names))
        types = [buffer_type(arg.type) for arg in old.args]
        types += [
            MemRefType(stored_type(array.dtype), list(array.shape))
            for array in (self.context.weights.get(name) for name in extra)
        ]
        block = Block(arg_types=types)
        values: dict[SSAValue, SSAValue] = dict(zip(old.args, block.args, strict=False))
        constants = dict(zip(extra, block.args[len(old.args) :], strict=True))
        returned: list[SSAValue] = []
        for op in old.ops:
            if isinstance(op, func.CallOp):
                self._call(op, block, values, constants, added)
            else:
                assert isinstance(op, func.ReturnOp), op.name
                returned = [values[value] for value in op.arguments]
                block.add_op(func.ReturnOp(*returned))
        new = func.FuncOp("main", (types, [value.type for value in returned]), Region(block))
        new.attributes.update(function.attributes)
        names = function.attributes["arg_names"]
        assert isinstance(names, ArrayAttr)
        new.attributes["arg_names"] = ArrayAttr([*names, *(StringAttr(name) for name in extra)])
        return new

    def _call(
        self,
        op: func.CallOp,
        block: Block,
        values: dict[SSAValue, SSAValue],
        constants: Mapping[str, SSAValue],
        added: dict[str, list[str]],
    ) -> None:
        name = op.callee.root_reference.data
        operands = [values[value] for value in op.arguments]
        kinds = [buffer_type(result.type) for result in op.results]
        if name not in added:
            call = func.CallOp(name, operands, kinds)
            block.add_op(call)
            values.update(zip(op.results, call.results, strict=True))
            return
        operands += [constants[item] for item in added[name]]
        for result, kind in zip(op.results, kinds, strict=True):
            buffer = memref.AllocOp([], [], kind)
            block.add_op(buffer)
            values[result] = buffer.results[0]
        operands += [values[result] for result in op.results]
        block.add_op(func.CallOp(name, operands, []))
