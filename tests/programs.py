"""Lower a tiled module of one segment to a program and run it on the functional simulator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from xdsl.dialects.builtin import DictionaryAttr, IntegerAttr, ModuleOp, StringAttr
from xdsl.ir import Attribute

from tilewright.dialects.tpu import ProgramOp
from tilewright.ir.context import CompileContext
from tilewright.sim.functional import FunctionalSimulator
from tilewright.spec.program import workspace_base
from tilewright.transforms.tpu.lower_affine_to_tpu import LowerAffineToTpuPass

GARBAGE = 0x77
"""What DDR holds where nothing was written."""


def _number(attribute: Attribute) -> int:
    assert isinstance(attribute, IntegerAttr)
    return attribute.value.data


def run_program(
    tiled: ModuleOp, context: CompileContext, inputs: Mapping[str, np.ndarray], seed: int
) -> dict[str, np.ndarray]:
    """Return all result tensors by name; the engines run in a random legal order."""
    assert context.target is not None
    module = tiled.clone()
    LowerAffineToTpuPass().apply(context, module)
    module.verify()
    (program,) = (op for op in module.walk() if isinstance(op, ProgramOp))
    constants = context.weights.get("tpu.constants").view(np.uint8)
    base = workspace_base(constants.size)
    ddr = np.full(base + _number(module.attributes["workspace_bytes"]), GARBAGE, np.uint8)
    ddr[: constants.size] = constants
    tensors: dict[str, tuple[int, tuple[int, ...]]] = {}
    table = module.attributes["tensors"]
    assert isinstance(table, DictionaryAttr)
    for name, entry in table.data.items():
        assert isinstance(entry, DictionaryAttr)
        shape: Any = entry.data["shape"]
        offset = base + _number(entry.data["offset"])
        tensors[name] = (offset, tuple(_number(item) for item in shape))
    for name, value in inputs.items():
        if name in tensors:
            start = tensors[name][0]
            ddr[start : start + value.size] = value.reshape(-1).view(np.uint8)
    simulator = FunctionalSimulator(context.target)
    simulator.run(program.instructions(), ddr, order="random", seed=seed)
    outputs: Any = program.attributes["outputs"]
    found: dict[str, np.ndarray] = {}
    for item in outputs:
        assert isinstance(item, StringAttr)
        start, shape = tensors[item.data]
        size = int(np.prod(shape))
        found[item.data] = ddr[start : start + size].view(np.int8).reshape(shape)
    return found
