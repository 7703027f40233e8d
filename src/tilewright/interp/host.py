"""The host's part of a lowered model: functions whose `graph` attribute is their text.

The chip's integers are computed by the interpreter alone. What the host does around them (quantise,
dequantise, layers that stay float) is the same code at every level, so it is run here as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.dialects.func import FuncOp

from tilewright.interp.scalars import fault

if TYPE_CHECKING:
    from tilewright.ir.weights import WeightStore
    from tilewright.quant.reference import QuantSession

Array = npt.NDArray[Any]


class HostGraphs:
    """Runs the host functions of one module; each is parsed when it is first called."""

    def __init__(self, module: ModuleOp, weights: WeightStore, keep: bool = False) -> None:
        self.weights = weights
        self.keep = keep
        self.layers: dict[str, Array] = {}
        """With `keep`, the values of the layers inside the host functions run so far."""
        self.graphs = {
            op.sym_name.data: graph.data
            for op in module.body.block.ops
            if isinstance(op, FuncOp)
            and isinstance(graph := op.attributes.get("graph"), StringAttr)
        }
        self._sessions: dict[str, QuantSession] = {}

    def __call__(self, name: str, arguments: Sequence[Array]) -> list[Array]:
        """Return the results of a host function.

        Raises:
            TilewrightError: E0501, the function has no graph; others as running it does.
        """
        session = self._sessions.get(name)
        if session is None:
            session = self._sessions[name] = self._session(name)
        inputs = dict(zip(session.inputs, arguments, strict=True))
        if self.keep:
            outputs, layers = session.run_layers(inputs)
            self.layers.update(layers)
        else:
            outputs = session.run(inputs)
        return [outputs[key] for key in session.outputs]

    def _session(self, name: str) -> QuantSession:
        from tilewright.ir.io import new_context, parse_text
        from tilewright.quant.reference import QuantSession

        if name not in self.graphs:
            raise fault(f"@{name} runs on the host, and no host was given")
        module = parse_text(self.graphs[name], new_context(self.weights), f"@{name}")
        return QuantSession(module, self.weights)
