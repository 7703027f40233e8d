"""Split the quantised graph into runs of device and host ops.

    %0 = quant.quantize %x {name = "x/quantize"}
    %1 = quant.conv %0, ... {name = "conv1"}
  becomes
    %0 = quant.quantize %x {name = "x/quantize", device = "host", segment = 0 : i32}
    %1 = quant.conv %0, ... {name = "conv1", device = "tpu", segment = 1 : i32}

Every switch between device and host costs a hand-over, so there should be few. Ops are taken in an
order that stays on one device while anything is ready there; this "exhaust, then switch" rule gives
the fewest segments for a given first device, and both first devices are tried. Ops move in the
block accordingly, otherwise keeping their order. Constants belong to no segment.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from typing_extensions import override
from xdsl.context import Context
from xdsl.dialects.builtin import Float16Type, IntegerAttr, ModuleOp, StringAttr, TensorType, i32
from xdsl.ir import Block, Operation, SSAValue
from xdsl.passes import ModulePass

from tilewright.dialects.quant import uniform_of
from tilewright.ir.context import CompileContext, compile_context
from tilewright.quant.graph import layer_of, main_function

CONSTANTS = ("top.weight", "top.none")
TPU, HOST = "tpu", "host"


def device_of(op: Operation) -> str:
    """Return where an op runs: the device if all its results are codes or fp16, else the host."""
    if op.name in ("quant.quantize", "quant.dequantize", "top.cast"):
        return HOST
    if op.name in ("quant.linear", "quant.matmul"):
        return TPU  # also where it keeps its 32-bit sums
    return TPU if op.results and all(_on_device(result) for result in op.results) else HOST


def _on_device(value: SSAValue) -> bool:
    kind = value.type
    half = isinstance(kind, TensorType) and isinstance(kind.element_type, Float16Type)
    return half or uniform_of(kind) is not None


def _schedule(ops: list[Operation], first: str) -> list[list[Operation]]:
    """Return the ops as alternating segments, the first one of device `first` if it has any."""
    position = {op: index for index, op in enumerate(ops)}
    waiting = {op: sum(1 for operand in op.operands if operand.owner in position) for op in ops}
    ready: dict[str, list[int]] = {TPU: [], HOST: []}
    for op in ops:
        if waiting[op] == 0:
            heapq.heappush(ready[device_of(op)], position[op])
    segments: list[list[Operation]] = []
    device = first
    while ready[TPU] or ready[HOST]:
        if not ready[device]:
            device = HOST if device == TPU else TPU
        segment: list[Operation] = []
        while ready[device]:
            op = ops[heapq.heappop(ready[device])]
            segment.append(op)
            for result in op.results:
                for use in result.uses:
                    user = use.operation
                    if user in waiting:
                        waiting[user] -= 1
                        if waiting[user] == 0:
                            heapq.heappush(ready[device_of(user)], position[user])
        segments.append(segment)
    return segments


def partition(ops: list[Operation]) -> list[list[Operation]]:
    """Return `ops` (no constants) in segments of one device each, as few as possible."""
    host_first, tpu_first = _schedule(ops, HOST), _schedule(ops, TPU)
    return tpu_first if len(tpu_first) < len(host_first) else host_first


def _reorder(block: Block, segments: list[list[Operation]]) -> None:
    """Put the ops of `block` in the order of `segments`, constants just before their first user."""
    last = block.last_op
    assert last is not None
    constants = [op for op in block.ops if op.name in CONSTANTS]
    order: list[Operation] = []
    placed: set[Operation] = set()
    for op in (*(op for segment in segments for op in segment), last):
        for operand in op.operands:
            owner = operand.owner
            if isinstance(owner, Operation) and owner.name in CONSTANTS and owner not in placed:
                placed.add(owner)
                order.append(owner)
        if op is not last:
            order.append(op)
    order = [op for op in constants if op not in placed] + order
    if order == [op for op in block.ops if op is not last]:
        return
    for op in order:
        op.detach()
    block.insert_ops_before(order, last)


@dataclass(frozen=True)
class PartitionPass(ModulePass):
    """Give every op of `@main` a device and a segment.

    Requires: a quantised module. Ensures: `segment = k : i32` and `device` on every op that is no
    constant; a segment reads values of earlier segments only.
    """

    name = "quant-partition"

    @override
    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Partition `@main` in place."""
        context = compile_context(ctx)
        block = main_function(op).body.block
        ops = [item for item in block.ops if item.name not in (*CONSTANTS, "func.return")]
        segments = partition(ops)
        for number, segment in enumerate(segments):
            for item in segment:
                device = device_of(item)
                before = item.attributes.get("device")
                item.attributes["device"] = StringAttr(device)
                item.attributes["segment"] = IntegerAttr(number, i32)
                if before is None:
                    _explain(context, item, device, number)
        _reorder(block, segments)


def _explain(context: CompileContext, op: Operation, device: str, number: int) -> None:
    reason = op.attributes.get("host")
    if device == TPU:
        text = f"runs on the device, segment {number}"
    elif isinstance(reason, StringAttr):
        text = f"runs on the host: {reason.data}"
    elif op.name in ("quant.quantize", "quant.dequantize", "top.cast"):
        text = "runs on the host: two number types meet here"
    else:
        text = "runs on the host: it has no integer form"
    context.decide(layer_of(op), "quant-partition", device == TPU, text, segment=number)
