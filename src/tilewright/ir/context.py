"""What passes share beside the module: weights, target, and the log of decisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xdsl.context import Context

from tilewright.ir.weights import WeightStore

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp

    from tilewright.spec.hardware import Hardware


@dataclass(frozen=True)
class Decision:
    """Why a pass did, or did not do, something to a layer; `tilewright explain` shows these."""

    layer: str
    """The user's node name."""
    stage: str
    """Name of the pass."""
    fired: bool
    """Whether the pass changed the layer."""
    reason: str
    details: dict[str, Any] = field(default_factory=dict[str, Any])


class CompileContext(Context):
    """An xDSL context that also carries the weight store, the target and the decision log."""

    def __init__(self, weights: WeightStore | None = None, target: Hardware | None = None) -> None:
        super().__init__()
        self.weights = weights if weights is not None else WeightStore()
        self.target = target
        self.decisions: list[Decision] = []
        self.progress: Callable[[float], None] | None = None
        """Told what part of a long pass is done, 0 to 1."""
        self.graph: ModuleOp | None = None
        """The partitioned integer graph that lowering began from; assembling needs it again."""

    def decide(self, layer: str, stage: str, fired: bool, reason: str, **details: Any) -> None:
        """Record a decision about `layer`."""
        self.decisions.append(Decision(layer, stage, fired, reason, details))


def compile_context(context: Context) -> CompileContext:
    """Return `context` as a `CompileContext`, which all passes of ours need.

    Raises:
        TypeError: a plain xDSL context was given.
    """
    if not isinstance(context, CompileContext):
        raise TypeError("this pass needs a tilewright.ir.context.CompileContext")
    return context
