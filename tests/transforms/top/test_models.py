"""Whole networks from onnx's own package through all passes, with weights that mean something."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx.backend.test
import pytest
from xdsl.dialects.builtin import ModuleOp

from tilewright.dialects import top
from tilewright.frontends.onnx import import_onnx
from tilewright.ir.context import CompileContext
from tilewright.passes import make_pass
from tilewright.runtime.float_executor import TopSession
from tilewright.transforms.top import LAYOUT_PASSES, TOP_PASSES

LIGHT = Path(onnx.backend.test.__file__).parent / "data" / "light"


def spread_weights(module: ModuleOp, ctx: CompileContext) -> None:
    """Replace the light models' constant weights, which no mistake would change, by random ones."""
    rng = np.random.default_rng(5)
    for op in module.walk():
        if not isinstance(op, top.WeightOp):
            continue
        array = ctx.weights.get(op.layer_name)
        use = next(iter(op.result.uses))
        kind = use.operation.name
        if array.dtype != np.float32 or array.size == 1:
            continue
        if kind == "top.batch_norm":
            positive = use.index in (1, 4)
            value: Any = rng.uniform(0.5, 1.5, array.shape)
            value = value if positive else rng.normal(0, 0.2, array.shape)
        elif array.ndim >= 2 and kind in ("top.conv", "top.linear", "top.matmul"):
            value = rng.normal(0, (2 / np.prod(array.shape[1:])) ** 0.5, array.shape)
        else:
            value = rng.normal(1, 0.2, array.shape)
        ctx.weights.set(op.layer_name, value.astype(np.float32))


def fused(op: top.TopOp) -> list[str]:
    names: Any = op.attributes.get("fused", ())
    return [item.data for item in names]


@pytest.mark.parametrize(
    ("model", "left", "kinds"),
    [
        ("squeezenet", 1, {"conv": 26, "concat": 8, "max_pool": 3, "reduce": 1}),
        ("resnet50", 1, {"conv": 53, "add": 16, "max_pool": 1, "linear": 1}),
        ("shufflenet", 17, {"conv": 49, "linear": 1, "concat": 3}),
    ],
)
def test_networks(model: str, left: int, kinds: dict[str, int]) -> None:
    ctx = CompileContext()
    module = import_onnx(LIGHT / f"light_{model}.onnx", {}, ctx)
    make_pass("convert-onnx-to-top").apply(ctx, module)
    spread_weights(module, ctx)
    plain = TopSession(module, ctx.weights)
    rng = np.random.default_rng(0)
    feed = {
        name: rng.normal(0, 1, plain._model.types[name].get_shape()).astype(np.float32)
        for name in plain.inputs
    }
    want = plain.run_values(feed)
    order = {name: place for place, name in enumerate(want)}
    for text in (*TOP_PASSES, *LAYOUT_PASSES):
        make_pass(text).apply(ctx, module)
        module.verify()
    got = TopSession(module, ctx.weights).run_values(feed)
    layers = [op for op in module.walk() if isinstance(op, top.TopOp) and op.layer_name in got]
    count = Counter(op.name.removeprefix("top.") for op in layers)
    assert {kind: count[kind] for kind in kinds} == kinds
    assert count["transpose"] == left
    assert not {"batch_norm", "matmul"} & set(count)
    compared = 0
    for op in layers:
        # A layer gives what the last of the layers it stands for gave.
        names = [name for name in (op.layer_name, *fused(op)) if name in order]
        value = got[op.layer_name]
        if not names or (value.ndim != 4 and value.ndim != 2):
            continue
        before = want[max(names, key=order.__getitem__)]
        after = value.transpose(0, 3, 1, 2) if value.ndim == 4 else value
        if after.shape != before.shape:
            continue
        scale = float(np.abs(before).max())
        np.testing.assert_allclose(after, before, rtol=0, atol=1e-4 * scale, err_msg=op.layer_name)
        compared += 1
    assert compared >= sum(kinds.values()) - 1
