"""Which elementwise operation joins the nest of the layer that makes one of its operands.

A residual addition reads two tensors. When one of them is used by nothing else, and the other is
complete by then, the nest that makes the one loads tiles of the other and stores the sum: the one
never goes through DDR. The integers are those of two nests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from xdsl.dialects.builtin import f16, i8
from xdsl.dialects.linalg.ops import GenericOp
from xdsl.ir import Block, Operation, SSAValue

from tilewright.schedule.planner_tiles import choose_few
from tilewright.schedule.tiling import ConvProblem, NoFit
from tilewright.spec.hardware import Hardware
from tilewright.transforms.affine import vector
from tilewright.transforms.affine.segment import RESHAPES, element_of, tensor_shape, text

Log = Callable[[GenericOp, str], None]
"""Called with an operation that stays alone, and why."""


@dataclass(frozen=True)
class Joining:
    """An operation that may join a nest."""

    op: GenericOp
    other: SSAValue
    """The operand that the nest does not make."""
    first: bool
    """Whether the nest makes the first operand."""


def find_joining(
    value: SSAValue, made_at: int, order: Mapping[Operation, int], log: Log
) -> Joining | None:
    """Return the operation that could join the nest that makes `value`.

    Args:
        value: the result of the nest; its only use decides.
        made_at: the position where the nest is emitted.
        order: positions of all operations of the function.
        log: told why an operation of the right kind cannot.
    """
    uses = list(value.uses)
    if len(uses) != 1:
        return None
    op = uses[0].operation
    if not isinstance(op, GenericOp) or text(op, "kind") != "eltwise" or len(op.inputs) != 2:
        return None
    first = op.inputs[0] is value
    other = op.inputs[1 if first else 0]
    result = op.results[0]
    if not tensor_shape(other) == tensor_shape(value) == tensor_shape(result):
        log(op, "its operands have different shapes")
        return None
    elements = {element_of(item) for item in (value, other, result)}
    if len(elements) != 1 or not elements <= {i8, f16}:
        return None
    if not _complete(other, made_at, order):
        # Mostly the nest of the other operand comes later, and takes it.
        return None
    return Joining(op, other, first)


def _complete(value: SSAValue, position: int, order: Mapping[Operation, int]) -> bool:
    """Tell whether a tensor lies in DDR before the nest of a position starts."""
    while isinstance(value.owner, Operation) and value.owner.name in RESHAPES:
        value = value.owner.operands[0]
    return isinstance(value.owner, Block) or order[value.owner] < position


def joined(
    hardware: Hardware, problem: ConvProblem, joining: Joining
) -> tuple[ConvProblem | None, str]:
    """Return the problem of a nest with an operation joined to it, or why it stays alone."""
    both = replace(problem, second=True)
    # What the planner asks too: each is worked out once.
    together, alone = (choose_few(hardware, item.as_loaded(), 0, None) for item in (both, problem))
    if isinstance(together, NoFit):
        return None, "no tile has room for its second operand"
    if not isinstance(alone, NoFit):
        joint = together[0].cycles
        apart = alone[0].cycles + vector.elementwise_cycles(hardware, joining.op)
        if apart < joint:
            return None, f"two nests are estimated at {apart:.0f} cycles, one at {joint:.0f}"
    return both, ""
