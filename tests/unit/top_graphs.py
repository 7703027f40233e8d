"""Small `top` graphs for tests: built op by op, run, compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from xdsl.dialects.builtin import ArrayAttr, ModuleOp, StringAttr, TensorType, f32
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Attribute, SSAValue

from tilewright.dialects import top
from tilewright.ir.context import CompileContext, Decision
from tilewright.passes import make_pass
from tilewright.runtime.float_executor import TopSession

Arrays = dict[str, np.ndarray]


class Net:
    """A graph under construction; inputs first, then `op`, then `outputs`."""

    def __init__(self, *shapes: Sequence[int], elements: Sequence[Attribute] = (), seed: int = 0):
        self.rng = np.random.default_rng(seed)
        self.ctx = CompileContext()
        kinds = [
            TensorType(elements[i] if elements else f32, list(shape))
            for i, shape in enumerate(shapes)
        ]
        self.function = FuncOp("main", (kinds, []))
        self.block = self.function.body.block
        self.inputs: tuple[SSAValue, ...] = tuple(self.block.args)
        self.names: Counter[str] = Counter()
        self.module = ModuleOp([self.function])

    @property
    def x(self) -> SSAValue:
        return self.inputs[0]

    def weight(self, array: Any, name: str = "w") -> SSAValue:
        value = np.asarray(array)
        if value.dtype == np.float64:
            value = value.astype(np.float32)
        key = self.ctx.weights.add(name, value)
        kind = TensorType(top.element_type(value.dtype), list(value.shape))
        op = top.create(top.WeightOp, [], name=key, result_types=[kind])
        self.block.add_op(op)
        return op.results[0]

    def random(self, *shape: int, name: str = "w") -> SSAValue:
        return self.weight(self.rng.normal(0, 1, shape).astype(np.float32), name)

    def none(self) -> SSAValue:
        from xdsl.dialects.builtin import NoneType

        op = top.NoneOp.create(result_types=[NoneType()])
        self.block.add_op(op)
        return op.results[0]

    def op(
        self,
        kind: str,
        /,
        *operands: SSAValue,
        name: str | None = None,
        shape: Sequence[int] | None = None,
        element: Attribute | None = None,
        results: Sequence[Attribute] | None = None,
        **attributes: Any,
    ) -> SSAValue:
        if name is None:
            count = self.names[kind]
            self.names[kind] += 1
            name = f"{kind}{count}"
        types = results
        if shape is not None:
            first = operands[0].type
            assert isinstance(first, TensorType)
            types = [TensorType(element or first.get_element_type(), list(shape))]
        op = top.create(top.OPS[kind], list(operands), attributes, name=name, result_types=types)
        self.block.add_op(op)
        return op.results[0]

    def conv(
        self,
        x: SSAValue,
        out: int,
        kernel: int = 3,
        *,
        pad: int = 0,
        stride: int = 1,
        group: int = 1,
        bias: bool = True,
        w: SSAValue | None = None,
        **attributes: Any,
    ) -> SSAValue:
        assert isinstance(x.type, TensorType)
        channels = x.type.get_shape()[1]
        if w is None:
            w = self.random(out, channels // group, kernel, kernel, name="conv.w")
        b = self.random(out, name="conv.b") if bias else self.none()
        return self.op(
            "conv",
            x,
            w,
            b,
            strides=[stride, stride],
            pads=[pad] * 4,
            dilations=[1, 1],
            group=group,
            **attributes,
        )

    def batch_norm(self, x: SSAValue, axis: int = 1) -> SSAValue:
        assert isinstance(x.type, TensorType)
        size = x.type.get_shape()[axis]
        rng = self.rng
        return self.op(
            "batch_norm",
            x,
            self.weight(rng.normal(1, 0.5, size), "gamma"),
            self.weight(rng.normal(0, 1, size), "beta"),
            self.weight(rng.normal(0, 1, size), "mean"),
            self.weight(rng.uniform(0.5, 2, size), "var"),
            epsilon=1e-5,
            axis=axis,
        )

    def pool(self, kind: str, x: SSAValue, kernel: int, **attributes: Any) -> SSAValue:
        chosen: dict[str, Any] = {
            "kernel": [kernel, kernel],
            "strides": [1, 1],
            "pads": [0, 0, 0, 0],
            "dilations": [1, 1],
            "ceil_mode": False,
        }
        if kind == "avg_pool":
            chosen["count_include_pad"] = False
        return self.op(kind, x, **{**chosen, **attributes})

    def outputs(self, *values: SSAValue) -> Net:
        self.block.add_op(ReturnOp(*values))
        self.function.update_function_type()
        names = [StringAttr(f"out{i}") for i in range(len(values))]
        self.function.attributes["result_names"] = ArrayAttr(names)
        arguments = [StringAttr(f"in{i}") for i in range(len(self.inputs))]
        self.function.attributes["arg_names"] = ArrayAttr(arguments)
        self.module.verify()
        return self

    # Looking at it

    def feed(self, low: float = -3.0, high: float = 3.0) -> Arrays:
        rng = np.random.default_rng(17)
        arrays: Arrays = {}
        for index, value in enumerate(self.inputs):
            assert isinstance(value.type, TensorType)
            dtype = top.numpy_dtype(value.type.get_element_type())
            data = rng.uniform(low, high, value.type.get_shape())
            arrays[f"in{index}"] = data.astype(dtype)
        return arrays

    def run(self, inputs: Mapping[str, np.ndarray] | None = None) -> list[np.ndarray]:
        session = TopSession(self.module, self.ctx.weights, threads=1, optimise=False)
        return list(session.run(self.feed() if inputs is None else inputs).values())

    def kinds(self) -> list[str]:
        return [
            op.name.removeprefix("top.")
            for op in self.block.ops
            if isinstance(op, top.TopOp) and not isinstance(op, top.WeightOp)
        ]

    def layer(self, name: str) -> top.TopOp:
        return next(
            op
            for op in self.block.ops
            if isinstance(op, top.TopOp)
            and not isinstance(op, top.WeightOp)
            and op.layer_name == name
        )

    def apply(self, text: str) -> list[Decision]:
        """Run one pass, verify, and return the decisions it took."""
        before = len(self.ctx.decisions)
        make_pass(text).apply(self.ctx, self.module)
        self.module.verify()
        return self.ctx.decisions[before:]

    def check(self, text: str, tolerance: float = 1e-5) -> list[Decision]:
        """Run one pass twice: the numbers must stay, and the second run must change nothing."""
        feed = self.feed()
        before = self.run(feed)
        decisions = self.apply(text)
        assert_close(self.run(feed), before, tolerance)
        once = str(self.module)
        self.apply(text)
        assert str(self.module) == once, "the pass is not idempotent"
        return decisions


def assert_close(
    got: Sequence[np.ndarray], want: Sequence[np.ndarray], tolerance: float = 1e-5
) -> None:
    """Compare by the largest magnitude of each result."""
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        if a.dtype.kind != "f":
            np.testing.assert_array_equal(a, b)
            continue
        scale = max(1.0, float(np.abs(b[np.isfinite(b)]).max(initial=0)))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)


def refusals(decisions: Sequence[Decision]) -> list[str]:
    return [decision.reason for decision in decisions if not decision.fired]
