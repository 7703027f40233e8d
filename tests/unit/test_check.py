"""`--check-each-pass` must notice every kind of changed number, and name the pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from xdsl.context import Context
from xdsl.dialects.builtin import FloatAttr, ModuleOp, f32
from xdsl.passes import ModulePass

from tilewright.diagnostics import TilewrightError
from tilewright.ir.check import CheckEachPass, compare
from tilewright.ir.context import CompileContext, compile_context
from tilewright.ir.io import new_context, parse_text
from tilewright.levels import execute, level_of, seeded_inputs, signature
from tilewright.passes import VerifyEach, run_passes

TEXT = """
func.func @main(%x: tensor<2x3xf32>, %k: tensor<4xi64>) -> (tensor<2x3xf32>, tensor<4xi64>)
    attributes {arg_names = ["x", "k"], result_names = ["y", "n"]} {
  %w = top.weight {name = "w"} : tensor<3xf32>
  %y = top.add %x, %w {name = "add"} : (tensor<2x3xf32>, tensor<3xf32>) -> tensor<2x3xf32>
  %z = top.leaky_relu %y {name = "act", alpha = 0.5 : f32} : (tensor<2x3xf32>) -> tensor<2x3xf32>
  %n = top.neg %k {name = "neg"} : (tensor<4xi64>) -> tensor<4xi64>
  func.return %z, %n : tensor<2x3xf32>, tensor<4xi64>
}
"""


def make() -> tuple[ModuleOp, CompileContext]:
    context = new_context()
    context.weights.set("w", np.array([1, 2, 3], np.float32))
    return parse_text(TEXT, context), context


@dataclass(frozen=True)
class Innocent(ModulePass):
    """Changes the weights by less than the tolerance."""

    name = "innocent"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        store = compile_context(ctx).weights
        store.set("w", store.get("w") * np.float32(1 + 1e-6))


@dataclass(frozen=True)
class Guilty(ModulePass):
    """Changes a slope by one part in ten."""

    name = "guilty"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for inner in op.walk():
            if inner.name == "top.leaky_relu":
                holder = inner.attributes if "alpha" in inner.attributes else inner.properties
                holder["alpha"] = FloatAttr(0.45, f32)


@dataclass(frozen=True)
class Breaking(ModulePass):
    """Leaves a module that does not verify."""

    name = "breaking"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for inner in op.walk():
            inner.attributes.pop("alpha", None)
            inner.properties.pop("alpha", None)


def test_first_guilty_pass_is_named() -> None:
    module, context = make()
    hook = CheckEachPass(seed=5)
    with pytest.raises(TilewrightError) as caught:
        run_passes(module, context, [Innocent(), Guilty(), Innocent()], [hook])
    assert caught.value.code == "E0502"
    assert caught.value.message == "pass `guilty` changed a number"
    assert "output 'y'" in caught.value.details[0]
    assert hook.checked == ["innocent"]


def test_innocent_passes_pass() -> None:
    module, context = make()
    hook = CheckEachPass()
    run_passes(module, context, [Innocent(), Innocent()], [VerifyEach(), hook])
    assert hook.checked == ["innocent", "innocent"]
    assert "2 passes changed no number" in hook.summary()


def test_verify_each_names_the_pass() -> None:
    module, context = make()
    with pytest.raises(TilewrightError, match="after pass `breaking`") as caught:
        run_passes(module, context, [Innocent(), Breaking()], [VerifyEach()])
    assert caught.value.code == "E0501"


def test_onnx_level_is_skipped_and_said_so() -> None:
    context = new_context()
    text = """func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
      %y = "onnx.Relu"(%x) {name = "r"} : (tensor<2xf32>) -> tensor<2xf32>
      func.return %y : tensor<2xf32>
    }"""
    context.allow_unregistered = True
    module = parse_text(text, context)
    assert level_of(module) == "onnx"
    hook = CheckEachPass()
    run_passes(module, context, [Innocent2()], [hook])
    assert hook.checked == []
    assert "was not checked" in hook.summary()


@dataclass(frozen=True)
class Innocent2(ModulePass):
    """Does nothing."""

    name = "nothing"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        del ctx, op


def test_seeded_inputs_are_the_same_everywhere() -> None:
    module, context = make()
    one, two = seeded_inputs(module, context, 1), seeded_inputs(module, context, 1)
    assert list(one) == ["x", "k"]
    assert one["x"].dtype == np.float32
    assert one["k"].dtype == np.int64
    assert all(np.array_equal(one[name], two[name]) for name in one)
    assert not np.array_equal(one["x"], seeded_inputs(module, context, 2)["x"])
    # Written down once: another generator or order of draws would change every recorded run.
    assert one["x"].ravel()[:2].tolist() == pytest.approx([1.7291036, -1.4284534])


def test_execute_and_signature() -> None:
    module, context = make()
    assert signature(module, context) == [("x", (2, 3), "f32"), ("k", (4,), "i64")]
    inputs = {"x": np.full((2, 3), -2, np.float32), "k": np.arange(4)}
    outputs = execute(module, context, inputs)
    assert outputs["y"].tolist() == [[-0.5, 0, 1]] * 2
    assert outputs["n"].tolist() == [0, -1, -2, -3]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ([1, 2], [1, 2], None),
        ([1, 2], [1, 3], "1 of 2 integers differ"),
        ([1.0, 2.0], [1.0, 2.001], None),
        ([1.0, 2.0], [1.0, 2.01], "differs by 0.01"),
        ([np.nan, 2.0], [np.nan, 2.0], None),
        ([np.nan, 2.0], [0.0, 2.0], "became 0.0"),
        ([0.0, 2.0], [np.nan, 2.0], "became nan"),
        ([np.inf, 2.0], [np.inf, 2.0], None),
        ([np.inf, 2.0], [-np.inf, 2.0], "became -inf"),
        ([np.inf, 2.0], [np.inf, 2.1], "differs by 0.1"),
        ([0.0, 0.0], [1e-9, 0.0], "allowed 0"),
        ([], [], None),
        ([1.0], [1.0, 1.0], "was float64[1], now float64[2]"),
        ([1.0], [1], "now int64[1]"),
        ([True, False], [True, True], "1 of 2 integers differ"),
    ],
)
def test_compare(old: list[float], new: list[float], says: str | None) -> None:
    found = compare({"y": np.array(old)}, {"y": np.array(new)})
    assert (found is None) == (says is None), found
    if says:
        assert says in (found or "")


def test_compare_wide_integers_and_names() -> None:
    low, high = np.array([-(2**63)]), np.array([2**63 - 1])
    assert compare({"y": low}, {"y": high}) is not None
    assert compare({"y": low}, {"z": low}) == "outputs were ['y'], now ['z']"
    small, large = np.array([-128], np.int8), np.array([127], np.int8)
    assert "at most by 255" in (compare({"y": small}, {"y": large}) or "")


def test_compare_shows_the_worst_output() -> None:
    old = {"a": np.zeros(3, np.int8), "b": np.zeros(3, np.int8)}
    new = {"a": np.array([0, 1, 0], np.int8), "b": np.array([0, 0, 9], np.int8)}
    assert (compare(old, new) or "").startswith("output 'b'")
