"""The interpreter proper: functions, structured control flow, tensors and memrefs.

Tensors and memrefs are both numpy arrays. A tensor is never changed once made, except that an
operation may write into the only
copy of its destination when nothing else uses it. A memref is the buffer itself, subviews are
numpy views of it.
Contents nothing wrote (`tensor.empty`, `memref.alloc`) are a fixed pattern of bytes, so that
reading them shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided
from xdsl.dialects import affine, func, memref, scf, tensor
from xdsl.dialects.builtin import (
    DYNAMIC_INDEX,
    AffineMapAttr,
    ArrayAttr,
    DenseArrayBase,
    IndexType,
    MemRefType,
    ModuleOp,
    StringAttr,
    TensorType,
)
from xdsl.dialects.linalg import ops as linalg
from xdsl.ir import Attribute, Block, Operation, SSAValue
from xdsl.ir.affine import AffineExpr

from tilewright.interp.body import Body
from tilewright.interp.generic import Generic
from tilewright.interp.scalars import constant, dtype_of, evaluator, fault
from tilewright.interp.views import evaluate

Array = npt.NDArray[Any]
HostFunction = Callable[[str, Sequence[Array]], Sequence[Array]]
"""Runs a function that has no body: its name and arguments to its results."""

UNWRITTEN = 0x5A
"""Each byte of memory that nothing wrote."""


class Machine:
    """Executes the functions of one module."""

    def __init__(
        self, module: ModuleOp, host: HostFunction | None = None, keep: bool = False
    ) -> None:
        self.functions = {
            op.sym_name.data: op for op in module.body.block.ops if isinstance(op, func.FuncOp)
        }
        self.host = host
        self.keep = keep
        self.kept: dict[str, Array] = {}
        self._generics: dict[Operation, Generic] = {}
        self._bodies: dict[Operation, Body] = {}
        self._mixed: dict[Operation, list[list[int | SSAValue]]] = {}
        self._affine: dict[Operation, list[_Bounds]] = {}
        self._deaths: dict[Block, dict[Operation, list[SSAValue]]] = {}
        self._env: dict[SSAValue, Any] = {}
        self._owned: set[SSAValue] = set()
        self._handlers: dict[str, Callable[[Any], None]] = {
            "func.call": self._call,
            "linalg.generic": self._generic,
            "linalg.fill": self._fill,
            "linalg.copy": self._linalg_copy,
            "tensor.empty": self._empty,
            "tensor.pad": self._pad,
            "tensor.cast": self._alias,
            "memref.cast": self._alias,
            "memref.memory_space_cast": self._alias,
            "tensor.collapse_shape": self._reshape,
            "tensor.expand_shape": self._reshape,
            "memref.collapse_shape": self._reshape,
            "memref.expand_shape": self._reshape,
            "tensor.extract_slice": self._extract_slice,
            "memref.subview": self._subview,
            "memref.reinterpret_cast": self._reinterpret,
            "tensor.insert_slice": self._insert_slice,
            "tensor.concat": self._concat,
            "tensor.dim": self._dim,
            "memref.dim": self._dim,
            "tensor.extract": self._load,
            "memref.load": self._load,
            "memref.store": self._store,
            "affine.load": self._affine_load,
            "affine.store": self._affine_store,
            "memref.alloc": self._alloc,
            "memref.alloca": self._alloc,
            "memref.dealloc": lambda op: None,
            "memref.copy": self._copy,
            "affine.for": self._affine_for,
            "affine.apply": lambda op: self._affine_bound(op, min),
            "affine.min": lambda op: self._affine_bound(op, min),
            "affine.max": lambda op: self._affine_bound(op, max),
            "scf.for": self._scf_for,
            "scf.if": self._scf_if,
            "arith.constant": self._constant,
        }

    def run(self, name: str, arguments: Sequence[Any]) -> list[Any]:
        """Execute a function and return what it returns.

        Raises:
            TilewrightError: E0501, the IR cannot be executed or its behaviour is undefined.
        """
        function = self.functions[name]
        if not function.body.blocks:
            return self._run_host(function, arguments)
        kinds = function.function_type.inputs.data
        if len(arguments) != len(kinds):
            raise fault(f"@{name} takes {len(kinds)} arguments, not {len(arguments)}")
        for argument, kind in zip(arguments, kinds, strict=True):
            _check_type(f"an argument of @{name}", argument, kind)
        outer, owned = self._env, self._owned
        self._env, self._owned = {}, set()
        try:
            self._bind(function.body.block.args, arguments)
            with np.errstate(all="ignore"):
                results = self._block(function.body.block)
            self._keep_buffers(function)
            return results
        finally:
            self._env, self._owned = outer, owned

    def _run_host(self, function: func.FuncOp, arguments: Sequence[Any]) -> list[Any]:
        name = function.sym_name.data
        if self.host is None:
            raise fault(f"@{name} runs on the host, and no host was given")
        results = list(self.host(name, arguments))
        kinds = function.function_type.outputs.data
        if len(results) != len(kinds):
            raise fault(f"@{name} gave {len(results)} results, not {len(kinds)}")
        for result, kind in zip(results, kinds, strict=True):
            _check_type(f"a result of @{name}", result, kind)
        if self.keep:
            names = strings(function.attributes.get("result_names"))
            self.kept.update(zip(names, results, strict=False))
        return results

    # Values

    def _bind(self, targets: Sequence[SSAValue], values: Sequence[Any]) -> None:
        for target, value in zip(targets, values, strict=True):
            self._env[target] = value

    def lookup(self, value: SSAValue) -> Any:
        """Return the current value of an SSA value."""
        return self._env[value]

    def _set(self, op: Operation, value: Any, owned: bool = False) -> None:
        target = op.results[0]
        if isinstance(target.type, IndexType):
            value = int(value)
        self._env[target] = value
        if owned and "result" not in op.attributes:
            self._owned.add(target)

    def _writable(self, value: SSAValue, user: Operation) -> Array:
        """Return an array of `value` to write to: its own if nobody else can see it."""
        array: Array = self._env[value]
        if isinstance(value.type, MemRefType):
            return array
        owner = value.owner
        if (
            value in self._owned
            and len(list(value.uses)) == 1
            and isinstance(owner, Operation)
            and owner.parent is user.parent
        ):
            return array
        return array.copy()

    def _indices(self, op: Operation, *fields: str) -> list[list[int]]:
        """Return the op's mixed index lists (`static_offsets` with `offsets`, and so on)."""
        known = self._mixed.get(op)
        if known is None:
            known = self._mixed[op] = [_mixed(op, field) for field in fields]
        env = self._env
        return [[item if isinstance(item, int) else env[item] for item in row] for row in known]

    # Control flow

    def _block(self, block: Block) -> list[Any]:
        env, handlers = self._env, self._handlers
        deaths = self._deaths.get(block)
        if deaths is None:
            deaths = self._deaths[block] = _last_uses(block)
        for op in block.ops:
            handler = handlers.get(op.name)
            if handler is not None:
                handler(op)
            elif op.name in ("func.return", "affine.yield", "scf.yield"):
                return [env[value] for value in op.operands]
            else:
                self._scalar(op)
            if self.keep and "result" in op.attributes and op.results:
                self._record(op)
            for value in deaths.get(op, ()):
                env.pop(value, None)
        return []

    def _record(self, op: Operation) -> None:
        name, target = op.attributes["result"], op.results[0]
        if isinstance(name, StringAttr) and isinstance(target.type, TensorType):
            self.kept[name.data] = self._env[target]

    def _keep_buffers(self, function: func.FuncOp) -> None:
        """Copy the buffers that hold a layer's value, as they are when the function ends."""
        if not self.keep:
            return
        results = set(strings(function.attributes.get("result_names")))
        names = strings(function.attributes.get("arg_names"))
        for name, argument in zip(names, function.body.block.args, strict=False):
            if name in results and isinstance(argument.type, MemRefType):
                self.kept[name] = self._env[argument].copy()
        for value, array in self._env.items():
            owner = value.owner
            if isinstance(owner, Operation) and isinstance(value.type, MemRefType):
                name = owner.attributes.get("result")
                if isinstance(name, StringAttr):
                    self.kept[name.data] = array.copy()

    def _call(self, op: func.CallOp) -> None:
        name = op.callee.root_reference.data
        results = self.run(name, [self._env[value] for value in op.arguments])
        self._bind(op.results, results)

    def _affine_for(self, op: affine.ForOp) -> None:
        bounds = self._affine.get(op)
        if bounds is None:
            bounds = self._affine[op] = [
                _Bounds.of(op.lowerBoundMap, op.lowerBoundOperands),
                _Bounds.of(op.upperBoundMap, op.upperBoundOperands),
            ]
        low, high = max(bounds[0].values(self._env)), min(bounds[1].values(self._env))
        self._loop(op, op.body.block, range(low, high, op.step.value.data), op.inits)

    def _scf_for(self, op: scf.ForOp) -> None:
        low, high, step = (int(self._env[value]) for value in (op.lb, op.ub, op.step))
        if step <= 0:
            raise fault("scf.for with a step below 1")
        self._loop(op, op.body.block, range(low, high, step), op.iter_args)

    def _loop(
        self, op: Operation, block: Block, counter: range, initial: Sequence[SSAValue]
    ) -> None:
        carried = [self._env[value] for value in initial]
        for index in counter:
            self._bind(block.args, [index, *carried])
            carried = self._block(block)
        self._bind(op.results, carried)

    def _scf_if(self, op: scf.IfOp) -> None:
        region = op.true_region if bool(self._env[op.cond]) else op.false_region
        self._bind(op.results, self._block(region.block) if region.blocks else [])

    def _bounds(self, op: Operation, operands: Sequence[SSAValue]) -> list[int]:
        """Return the results of the op's affine map on `operands`."""
        known = self._affine.get(op)
        if known is None:
            indexing = op.properties["map"]
            assert isinstance(indexing, AffineMapAttr)
            known = self._affine[op] = [_Bounds.of(indexing, operands)]
        return known[0].values(self._env)

    def _affine_bound(self, op: Operation, choose: Callable[[list[int]], int]) -> None:
        self._env[op.results[0]] = choose(self._bounds(op, op.operands))

    # Scalars

    def _constant(self, op: Operation) -> None:
        self._set(op, constant(op))

    def _scalar(self, op: Operation) -> None:
        function = evaluator(op)
        if function is None:
            raise fault(f"{op.name} is not known")
        operands = [np.asarray(self._env[value], dtype_of(value.type)) for value in op.operands]
        self._set(op, function(*operands))

    # linalg

    def _generic(self, op: linalg.GenericOp) -> None:
        plan = self._generics.get(op)
        if plan is None:
            plan = self._generics[op] = Generic(op)
        inputs = [np.asarray(self._env[value]) for value in plan.input_values]
        outputs = [self._writable(value, op) for value in plan.output_values]
        plan.run(inputs, outputs, self.lookup)
        if op.results:  # none on memrefs
            self._bind(op.results, outputs)
            if "result" not in op.attributes:
                self._owned.update(op.results)

    def _fill(self, op: linalg.FillOp) -> None:
        target = self._writable(op.outputs[0], op)
        target[...] = self._env[op.inputs[0]]
        self._finish(op, target)

    def _linalg_copy(self, op: linalg.CopyOp) -> None:
        target = self._writable(op.outputs[0], op)
        source: Array = self._env[op.inputs[0]]
        if source.dtype != target.dtype or source.shape != target.shape:
            raise fault("linalg.copy between different types")
        target[...] = source
        self._finish(op, target)

    def _finish(self, op: Operation, target: Array) -> None:
        if op.results:
            self._set(op, target, owned=True)

    # Tensors and memrefs

    def _empty(self, op: tensor.EmptyOp) -> None:
        self._set(op, self._unwritten(op.results[0].type, op.dynamic_sizes), owned=True)

    def _alloc(self, op: memref.AllocOp | memref.AllocaOp) -> None:
        self._set(op, self._unwritten(op.results[0].type, op.dynamic_sizes))

    def _unwritten(self, kind: Attribute, dynamic: Sequence[SSAValue]) -> Array:
        assert isinstance(kind, TensorType | MemRefType)
        values = iter(dynamic)
        shape = [
            int(self._env[next(values)]) if size == DYNAMIC_INDEX else int(size)
            for size in kind.get_shape()
        ]
        return unwritten(shape, dtype_of(kind))

    def _pad(self, op: tensor.PadOp) -> None:
        source: Array = self._env[op.source]
        low, high = self._indices(op, "low", "high")
        body = self._bodies.get(op)
        if body is None:
            body = self._bodies[op] = Body.of(op.region.block)
        if any(arg.uses for arg in op.region.block.args):
            raise fault("tensor.pad with a value that depends on the position")
        nothing = [np.array(0)] * len(op.region.block.args)
        value = body.run(nothing, self.lookup, [])[0]
        shape = [size + a + b for size, a, b in zip(source.shape, low, high, strict=True)]
        if any(amount < 0 for amount in (*low, *high)):
            raise fault("tensor.pad by a negative amount")
        result = np.full(shape, value, source.dtype)
        result[tuple(slice(a, a + n) for a, n in zip(low, source.shape, strict=True))] = source
        self._set(op, result, owned=True)

    def _alias(self, op: Operation) -> None:
        self._set(op, self._env[op.operands[0]])

    def _reshape(self, op: Operation) -> None:
        source: Array = self._env[op.operands[0]]
        kind = op.results[0].type
        assert isinstance(kind, TensorType | MemRefType)
        shape = [int(size) for size in kind.get_shape()]
        if DYNAMIC_INDEX in shape:
            raise fault(f"{op.name} to a dynamic shape")
        # A memref's result must be the same memory.
        copy = False if isinstance(kind, MemRefType) else None
        self._set(op, source.reshape(shape, copy=copy))

    def _window(
        self, op: tensor.ExtractSliceOp | tensor.InsertSliceOp | memref.SubviewOp, array: Array
    ) -> Array:
        """Return the part of `array` that the op's offsets, sizes and strides say."""
        offsets, sizes, strides = self._indices(op, "offsets", "sizes", "strides")
        for axis, (offset, size, stride) in enumerate(zip(offsets, sizes, strides, strict=True)):
            last = offset + (size - 1) * stride
            if stride < 1 or size < 0 or offset < 0 or (size and last >= array.shape[axis]):
                raise fault(
                    f"{op.name} takes {size} from {offset} by {stride} of {array.shape[axis]}",
                    f"axis {axis}",
                )
        return array[
            tuple(
                slice(offset, offset + max((size - 1) * stride + 1, 0) if size else offset, stride)
                for offset, size, stride in zip(offsets, sizes, strides, strict=True)
            )
        ]

    def _extract_slice(self, op: tensor.ExtractSliceOp) -> None:
        self._set(op, _reduced(op.result.type, self._window(op, self._env[op.source])))

    def _subview(self, op: memref.SubviewOp) -> None:
        self._set(op, _reduced(op.result.type, self._window(op, self._env[op.source])))

    def _reinterpret(self, op: memref.ReinterpretCastOp) -> None:
        source: Array = self._env[op.source]
        offsets, sizes, strides = self._indices(op, "offsets", "sizes", "strides")
        offset = offsets[0]
        flat = source.reshape(-1, copy=False)
        last = offset + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
        if offset < 0 or min(strides, default=0) < 0 or (0 not in sizes and last >= flat.size):
            raise fault(f"memref.reinterpret_cast beyond its source of {flat.size} elements")
        steps = [step * flat.itemsize for step in strides]
        self._set(op, as_strided(flat[offset:], sizes, steps))

    def _insert_slice(self, op: tensor.InsertSliceOp) -> None:
        target = self._writable(op.dest, op)
        source: Array = self._env[op.source]
        window = self._window(op, target)
        window[...] = source.reshape(window.shape)
        self._set(op, target, owned=True)

    def _concat(self, op: tensor.ConcatOp) -> None:
        parts = [self._env[value] for value in op.inputs]
        self._set(op, np.concatenate(parts, axis=op.dim.value.data), owned=True)

    def _dim(self, op: tensor.DimOp | memref.DimOp) -> None:
        source, index = op.operands
        self._set(op, self._env[source].shape[int(self._env[index])])

    def _position(self, array: Array, indices: Sequence[SSAValue]) -> tuple[int, ...]:
        return self._inside(array, [int(self._env[value]) for value in indices])

    def _inside(self, array: Array, position: Sequence[int]) -> tuple[int, ...]:
        if not all(0 <= item < size for item, size in zip(position, array.shape, strict=True)):
            raise fault(f"index {list(position)} into shape {list(array.shape)}")
        return tuple(position)

    def _load(self, op: tensor.ExtractOp | memref.LoadOp) -> None:
        array: Array = self._env[op.operands[0]]
        self._set(op, np.asarray(array[self._position(array, op.operands[1:])]))

    def _store(self, op: memref.StoreOp) -> None:
        array: Array = self._env[op.memref]
        array[self._position(array, op.indices)] = self._env[op.value]

    def _affine_load(self, op: affine.LoadOp) -> None:
        array: Array = self._env[op.memref]
        position = self._inside(array, self._bounds(op, op.indices))
        self._set(op, np.asarray(array[position]))

    def _affine_store(self, op: affine.StoreOp) -> None:
        array: Array = self._env[op.memref]
        array[self._inside(array, self._bounds(op, op.indices))] = self._env[op.value]

    def _copy(self, op: memref.CopyOp) -> None:
        source, target = self._env[op.source], self._env[op.destination]
        if source.shape != target.shape or source.dtype != target.dtype:
            raise fault(
                f"memref.copy of {source.dtype}{list(source.shape)} to "
                f"{target.dtype}{list(target.shape)}"
            )
        target[...] = source


@dataclass(frozen=True)
class _Bounds:
    """An affine map with its operands."""

    dims: list[SSAValue]
    symbols: list[SSAValue]
    results: tuple[AffineExpr, ...]

    @staticmethod
    def of(indexing: AffineMapAttr, operands: Sequence[SSAValue]) -> _Bounds:
        count = indexing.data.num_dims
        return _Bounds(list(operands[:count]), list(operands[count:]), indexing.data.results)

    def values(self, env: dict[SSAValue, Any]) -> list[int]:
        dims, symbols = [env[v] for v in self.dims], [env[v] for v in self.symbols]
        return [int(evaluate(expr, dims, symbols)) for expr in self.results]


def _mixed(op: Operation, field: str) -> list[int | SSAValue]:
    """Return a list of constants and SSA values, as `offsets` and `static_offsets` state it."""
    static = op.properties[f"static_{field}"]
    assert isinstance(static, DenseArrayBase)
    values = iter(getattr(op, field))
    return [next(values) if item == DYNAMIC_INDEX else int(item) for item in static.get_values()]


def unwritten(shape: Sequence[int], kind: np.dtype[Any]) -> Array:
    """Return an array of the pattern of memory that nothing wrote."""
    count = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    fill = np.full(count, UNWRITTEN if kind != np.bool_ else 1, np.uint8)
    return fill.view(kind).reshape(tuple(shape))


def _last_uses(block: Block) -> dict[Operation, list[SSAValue]]:
    """Return which tensors of a block are used for the last time by each of its ops."""
    order = {op: position for position, op in enumerate(block.ops)}
    deaths: dict[Operation, list[SSAValue]] = {}
    for op in order:
        for value in op.results:
            if not isinstance(value.type, TensorType):
                continue
            last = op
            for use in value.uses:
                user: Operation | None = use.operation
                while user is not None and user.parent is not block:
                    user = user.parent_op()
                if user is not None and order[user] > order[last]:
                    last = user
            deaths.setdefault(last, []).append(value)
    return deaths


def strings(attribute: Attribute | None) -> list[str]:
    """Return the strings of an array attribute (none if it is absent)."""
    if not isinstance(attribute, ArrayAttr):
        return []
    return [item.data for item in attribute.data if isinstance(item, StringAttr)]


def _reduced(kind: Attribute, array: Array) -> Array:
    """Drop size-1 axes that the result type of a rank-reducing slice lacks."""
    assert isinstance(kind, TensorType | MemRefType)
    wanted = [int(size) for size in kind.get_shape()]
    if len(wanted) == array.ndim:
        return array
    drop = array.ndim - len(wanted)
    kept, dropped = list[int](), list[int]()
    for axis, size in enumerate(array.shape):
        matches = len(kept) < len(wanted) and wanted[len(kept)] in (size, DYNAMIC_INDEX)
        # A static axis of 1 is dropped only where the result type has none at that place.
        if matches and (size != 1 or wanted[len(kept)] == 1 or len(dropped) == drop):
            kept.append(axis)
        elif size == 1:
            dropped.append(axis)
        else:
            raise fault(f"a slice of shape {list(array.shape)} for {kind}")
    if len(kept) != len(wanted):
        raise fault(f"a slice of shape {list(array.shape)} for {kind}")
    return np.squeeze(array, axis=tuple(dropped))


def _check_type(what: str, value: Any, kind: Attribute) -> None:
    if not isinstance(kind, TensorType | MemRefType):
        return
    if not isinstance(value, np.ndarray) or value.dtype != dtype_of(kind):
        got = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
        raise fault(f"{what} is {got}, not {kind}")
    shape = [int(size) for size in kind.get_shape()]
    if len(shape) != value.ndim or any(
        size not in (DYNAMIC_INDEX, actual) for size, actual in zip(shape, value.shape, strict=True)
    ):
        raise fault(f"{what} has shape {list(value.shape)}, not {kind}")
