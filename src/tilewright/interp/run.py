"""Run a linalg or affine module on named arrays: `run_linalg`, `run_affine`.

Neither knows the compiler's arithmetic: they execute the IR as written, so they can check every
other level.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from xdsl.dialects.builtin import MemRefType, ModuleOp
from xdsl.dialects.func import FuncOp

from tilewright.interp.host import HostGraphs
from tilewright.interp.machine import HostFunction, Machine, strings, unwritten
from tilewright.interp.scalars import dtype_of, fault
from tilewright.ir.weights import WeightStore

Array = npt.NDArray[Any]


def run_linalg(
    module: ModuleOp,
    weights: WeightStore,
    inputs: Mapping[str, Array],
    keep: bool = False,
    *,
    function: str | None = None,
    host: HostFunction | None = None,
) -> dict[str, Array]:
    """Execute a linalg-level module and return its results by name.

    Args:
        module: functions on tensors, as `lower-quant-to-linalg` makes them.
        weights: where arguments come from that are not in `inputs`.
        inputs: arrays by the names in the function's `arg_names`; types and shapes must be the
            arguments'.
        keep: also return every layer's value (ops with a `result` attribute; results of host
            functions).
        function: what to run; `main`, or else the only function with a body.
        host: runs functions without a body, from name and arguments to results; by default
            their `graph`.

    Raises:
        TilewrightError: E0501, the IR cannot be executed, an input is missing, or behaviour is
            undefined.
    """
    graphs = HostGraphs(module, weights, keep)
    machine = Machine(module, host or graphs, keep)
    target = _entry(machine, function)
    arguments, outputs = list[Array](), dict[str, Array]()
    names = strings(target.attributes.get("arg_names"))
    kinds = target.function_type.inputs.data
    if len(names) != len(kinds):
        raise fault(f"@{target.sym_name.data}: arg_names does not name every argument")
    result_names = strings(target.attributes.get("result_names"))
    for name, kind in zip(names, kinds, strict=True):
        if name in inputs:
            arguments.append(np.asarray(inputs[name]))
        elif name in weights:
            arguments.append(weights.get(name))
        elif isinstance(kind, MemRefType) and name in result_names:
            outputs[name] = unwritten([int(n) for n in kind.get_shape()], dtype_of(kind))
            arguments.append(outputs[name])
        else:
            raise fault(f'no value for the argument "{name}"')
    from threadpoolctl import threadpool_limits

    # Tiles make small products; a second BLAS thread that has to wait for a busy core makes each
    # of them take milliseconds (ResNet-50's affine level: 40 s instead of 6 s on a loaded machine).
    with threadpool_limits(1, "blas"):
        results = machine.run(target.sym_name.data, arguments)
    returned = [name for name in result_names if name not in outputs]
    if len(returned) != len(results):
        raise fault(f"@{target.sym_name.data}: result_names does not name every result")
    return {**graphs.layers, **machine.kept, **outputs, **dict(zip(returned, results, strict=True))}


def run_affine(
    module: ModuleOp,
    weights: WeightStore,
    inputs: Mapping[str, Array],
    keep: bool = False,
    *,
    function: str | None = None,
    host: HostFunction | None = None,
) -> dict[str, Array]:
    """Execute an affine-level module (memrefs, tile loops, copies) and return its results by name.

    A memref argument named in `result_names` and not given is an output: it starts as unwritten
    memory and is returned. With `keep`,
    a buffer whose defining op has a `result` attribute is returned as it is when its function
    ends. Else as `run_linalg`.

    Raises:
        TilewrightError: E0501, the IR cannot be executed, an input is missing, or behaviour is
            undefined.
    """
    return run_linalg(module, weights, inputs, keep, function=function, host=host)


def _entry(machine: Machine, name: str | None) -> FuncOp:
    if name is not None:
        if name not in machine.functions:
            raise fault(f"no function @{name}")
        return machine.functions[name]
    if "main" in machine.functions:
        return machine.functions["main"]
    bodies = [op for op in machine.functions.values() if op.body.blocks]
    if len(bodies) != 1:
        raise fault("the module has no @main and not exactly one function")
    return bodies[0]
