"""Passes that make graphs smaller: constants, dead code, common expressions, shapes, spellings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from xdsl.dialects.builtin import IntegerType, i64

from tests.unit.top_graphs import Net, refusals
from tilewright.dialects import top
from tilewright.transforms.top.simplify_shapes import reshape_groups

# top-fold-constants


def test_constant_subgraphs_are_evaluated() -> None:
    net = Net([1, 3, 6, 6])
    w = net.op("transpose", net.op("mul", net.random(3, 3, 3, 4), net.random(4)), perm=[3, 0, 1, 2])
    shared = net.op("neg", net.random(4))
    c = net.op("conv", net.x, w, shared, strides=[1, 1], pads=[0] * 4, dilations=[1, 1], group=1)
    net.outputs(c, net.op("exp", shared))
    decisions = net.check("top-fold-constants")
    assert net.kinds() == ["conv"]
    assert {d.layer for d in decisions if d.fired} == {"transpose0", "neg0", "exp0"}


def test_integer_constants() -> None:
    net = Net([4, 5])
    index = net.op("cast", net.op("floor", net.random(3, name="i")), shape=[3], element=i64)
    small = net.op("mod", index, net.weight(np.array([4])), fmod=False)
    net.outputs(net.op("gather", net.x, small, axis=0))
    net.check("top-fold-constants")
    assert net.kinds() == ["gather"]


def test_large_results_and_unknown_operations_stay() -> None:
    net = Net([1000, 100])
    large = net.op("expand", net.random(1), shape=[1000, 100])
    odd = net.op("erf", net.weight(np.zeros(100, np.int16)))
    kept = net.op("exp", net.random(100))
    net.outputs(net.op("add", net.op("add", net.x, large), kept), odd)
    decisions = net.apply("top-fold-constants{max-bytes=1000}")
    assert net.kinds() == ["expand", "erf", "add", "add"]
    reasons = refusals(decisions)
    assert reasons[0] == "its constant result would take 400000 bytes"
    assert reasons[1].startswith("onnxruntime cannot")


# top-eliminate-dead-code


def test_dead_code_goes_and_its_constants_too() -> None:
    net = Net([1, 3, 6, 6], [2])
    net.batch_norm(net.conv(net.x, 4))
    net.outputs(net.op("relu", net.x))
    decisions = net.check("top-eliminate-dead-code")
    assert net.kinds() == ["relu"]
    assert list(net.ctx.weights) == []
    assert [d.layer for d in decisions] == ["batch_norm0", "conv0"]
    assert len(net.block.args) == 2


def test_constants_named_elsewhere_stay() -> None:
    net = Net([2])
    y = net.op("relu", net.x)
    net.random(3, name="table")
    assert isinstance(y.owner, top.TopOp)
    y.owner.attributes["table"] = top.to_attribute("table")
    net.outputs(y)
    net.check("top-eliminate-dead-code")
    assert list(net.ctx.weights) == ["table"]


# top-common-subexpressions


def test_equal_operations_merge() -> None:
    net = Net([2, 4])
    a, b = net.op("relu", net.x), net.op("relu", net.x)
    w = np.arange(4, dtype=np.float32)
    c, d = net.op("add", a, net.weight(w)), net.op("add", b, net.weight(w.copy()))
    net.outputs(net.op("mul", c, d))
    decisions = net.check("top-common-subexpressions")
    assert net.kinds() == ["relu", "add", "mul"]
    assert [d.reason for d in decisions] == [
        'computes what "relu0" computes',
        'computes what "add0" computes',
    ]


def test_unlike_operations_do_not_merge() -> None:
    net = Net([2, 4])
    x = net.x
    net.outputs(
        net.op("leaky_relu", x, alpha=0.1),
        net.op("leaky_relu", x, alpha=0.2),
        net.op("reshape", x, shape=[8]),
        net.op("reshape", x, shape=[4, 2]),
        net.op("add", x, net.weight(np.zeros(4, np.float32))),
        net.op("add", x, net.weight(np.zeros((1, 4), np.float32))),
    )
    before = net.kinds()
    net.check("top-common-subexpressions")
    assert net.kinds() == before


# top-simplify-shapes


def test_identities_disappear() -> None:
    net = Net([2, 3, 4, 4])
    x = net.x
    x = net.op("reshape", x, shape=[2, 3, 4, 4])
    x = net.op("transpose", x, perm=[0, 1, 2, 3])
    x = net.op("slice", x, starts=[0] * 4, steps=[1] * 4, shape=[2, 3, 4, 4])
    x = net.op("pad", x, pads_begin=[0] * 4, pads_end=[0] * 4, mode="constant", value=1.0)
    x = net.op("concat", x, axis=1)
    x = net.op("tile", x, repeats=[1] * 4)
    x = net.op("expand", x, shape=[2, 3, 4, 4])
    x = net.op("cast", x, shape=[2, 3, 4, 4])
    x = net.op("clip", x)
    x = net.pool("max_pool", x, 1)
    x = net.op("resize", x, mode="linear", coordinate="half_pixel", scales=[1.0] * 4,
               shape=[2, 3, 4, 4])  # fmt: skip
    net.outputs(net.op("neg", x))
    net.check("top-simplify-shapes")
    assert net.kinds() == ["neg"]


def test_what_only_looks_like_an_identity_stays() -> None:
    net = Net([4, 4])
    x = net.op("slice", net.x, starts=[3, 0], steps=[-1, 1], shape=[4, 4])
    x = net.op("transpose", x, perm=[1, 0])
    x = net.op("pad", x, pads_begin=[1, 0], pads_end=[-1, 0], mode="constant", value=1.0)
    net.outputs(x)
    net.check("top-simplify-shapes")
    assert net.kinds() == ["slice", "transpose", "pad"]


def test_an_identity_that_is_the_output() -> None:
    net = Net([4])
    net.outputs(net.op("reshape", net.x, shape=[4]))
    net.check("top-simplify-shapes")
    assert net.kinds() == []


def test_compositions() -> None:
    net = Net([2, 3, 4])
    x = net.x
    turned = net.op("transpose", net.op("transpose", x, perm=[2, 0, 1]), perm=[2, 1, 0])
    shaped = net.op("reshape", net.op("reshape", x, shape=[6, 4]), shape=[24])
    cut = net.op("slice", x, starts=[0, 0, 3], steps=[1, 1, -1], shape=[2, 3, 4])
    cut = net.op("slice", cut, starts=[1, 0, 1], steps=[1, 2, 2], shape=[1, 2, 2])
    joined = net.op("concat", net.op("concat", x, x, axis=1), x, axis=1)
    net.outputs(turned, shaped, cut, joined)
    net.check("top-simplify-shapes")
    assert net.kinds() == ["transpose", "reshape", "slice", "concat"]


def test_transposes_of_unit_axes_are_reshapes() -> None:
    net = Net([1, 5, 1, 1])
    net.outputs(net.op("transpose", net.x, perm=[0, 2, 3, 1]))
    net.check("top-simplify-shapes")
    assert net.kinds() == ["reshape"]


def test_transposes_meet_through_reshapes() -> None:
    # Channels last -> first, shuffle, and back: one transpose is left.
    net = Net([2, 4, 5, 6])
    first = net.op("transpose", net.x, perm=[0, 3, 1, 2])
    split = net.op("reshape", first, shape=[2, 3, 2, 4, 5])
    mixed = net.op("transpose", split, perm=[0, 2, 1, 3, 4])
    whole = net.op("reshape", mixed, shape=[2, 6, 4, 5])
    net.outputs(net.op("transpose", whole, perm=[0, 2, 3, 1]))
    net.check("top-simplify-shapes")
    assert net.kinds() == ["reshape", "transpose", "reshape"]


@pytest.mark.parametrize(
    ("before", "after", "groups"),
    [
        ([2, 6], [2, 2, 3], [([0], [0]), ([1], [1, 2])]),
        ([2, 3, 4], [6, 4], [([0, 1], [0]), ([2], [1])]),
        ([4, 6], [6, 4], [([0, 1], [0, 1])]),
        ([1, 6], [1, 2, 3], [([0], [0]), ([1], [1, 2])]),
        ([6, 1], [6], None),
        ([0, 2], [0, 3], None),
        ([], [], []),
    ],
)
def test_reshape_groups(before: list[int], after: list[int], groups: Any) -> None:
    assert reshape_groups(before, after) == groups


# top-normalize


def test_matmul_with_a_constant() -> None:
    net = Net([2, 5, 4])
    y = net.op("matmul", net.op("matmul", net.x, net.random(4, 3)), net.random(1, 3, 2))
    net.outputs(y)
    net.check("top-normalize")
    assert net.kinds() == ["linear", "linear"]


def test_matmuls_that_stay() -> None:
    net = Net([2, 5, 4], [2, 4, 3])
    a = net.op("matmul", *net.inputs)
    b = net.op("matmul", net.x, net.random(2, 4, 3))
    net.outputs(a, b)
    reasons = refusals(net.check("top-normalize"))
    assert reasons == ["a constant that differs from one batch to the next"]
    assert net.kinds() == ["matmul", "matmul"]


def test_global_pools() -> None:
    net = Net([2, 3, 4, 4])
    x = net.x
    whole = net.pool("avg_pool", x, 4)
    dropped = net.op("reduce", x, kind="mean", axes=[2, 3], keepdims=False)
    twice = net.op("reduce", net.op("reduce", x, kind="mean", axes=[3], keepdims=True),
                   kind="mean", axes=[2], keepdims=True)  # fmt: skip
    highest = net.op("reduce", x, kind="max", axes=[2, 3], keepdims=True)
    net.outputs(whole, dropped, twice, highest)
    net.check("top-normalize")
    assert net.kinds() == ["reduce", "reduce", "reshape", "reduce", "max_pool"]


def test_pools_that_only_nearly_cover_the_image() -> None:
    net = Net([2, 3, 4, 5])
    net.outputs(net.pool("avg_pool", net.x, 4), net.pool("avg_pool", net.x, 5, pads=[1, 0, 1, 0]))
    net.check("top-normalize")
    assert net.kinds() == ["avg_pool", "avg_pool"]


def test_one_dimensional_layers() -> None:
    net = Net([2, 3, 9])
    y = net.op("conv", net.x, net.random(4, 3, 3), net.random(4), strides=[2], pads=[1, 2],
               dilations=[2], group=1)  # fmt: skip
    y = net.op("conv_transpose", y, net.random(4, 2, 3), net.none(), strides=[2], pads=[1, 0],
               dilations=[1], output_pads=[1], group=1)  # fmt: skip
    y = net.op("max_pool", y, kernel=[2], strides=[1], pads=[1, 0], dilations=[1], ceil_mode=False)
    net.outputs(y)
    net.check("top-normalize")
    net.check("top-simplify-shapes")
    kinds = [kind for kind in net.kinds() if kind != "reshape"]
    assert kinds == ["conv", "conv_transpose", "max_pool"]
    assert all(len(net.layer(f"{kind}0/2d").attrs.ints("strides")) == 2 for kind in kinds)


def test_one_dimensional_weights_must_be_constant() -> None:
    net = Net([2, 3, 9], [4, 3, 3])
    net.outputs(net.op("conv", *net.inputs, net.none(), strides=[1], pads=[0, 0], dilations=[1],
                       group=1))  # fmt: skip
    assert refusals(net.check("top-normalize")) == ["its weights are not constants"]


def test_constants_take_the_simple_form() -> None:
    net = Net([2, 4])
    y = net.op("sub", net.x, net.random(4))
    y = net.op("div", y, net.weight(np.array([2.0, 4.0, 0.5, 3.0])))
    y = net.op("pow", y, net.weight(np.float32(2)))
    y = net.op("pow", net.op("abs", y), net.weight(np.float32(0.5)))
    y = net.op("add", y, net.weight(np.zeros(4, np.float32)))
    y = net.op("mul", net.weight(np.ones((1, 1), np.float32)), y)
    y = net.op("prelu", y, net.weight(np.full(4, 0.25)))
    net.outputs(y)
    net.check("top-normalize")
    assert net.kinds() == ["add", "mul", "mul", "abs", "sqrt", "leaky_relu"]


def test_constants_that_have_no_simple_form() -> None:
    net = Net([1, 4], [4], elements=[IntegerType(64)] * 2)
    whole = net.op("div", net.x, net.weight(np.array([2])))  # integers: no product equals it
    net.outputs(net.op("sub", whole, net.inputs[1]))
    net.check("top-normalize")
    assert net.kinds() == ["div", "sub"]
    net = Net([1, 4])
    y = net.op("div", net.x, net.weight(np.array([1.0, 0.0, 1.0, 1e-45])))
    y = net.op("add", y, net.weight(np.zeros((3, 4), np.float32)))  # broadcasts: not an identity
    net.outputs(net.op("prelu", y, net.random(4)))
    before = net.kinds()
    net.apply("top-normalize")
    assert net.kinds() == before


def test_a_quotient_that_is_rounded_stays_a_quotient() -> None:
    net = Net([64])
    shifted = net.op(
        "add", net.op("div", net.x, net.weight(np.float32(49))), net.weight(np.zeros(1, np.float32))
    )
    net.outputs(net.op("floor", net.op("neg", shifted)))
    x = {"in0": (49 * np.arange(64)).astype(np.float32)}
    reasons = refusals(net.check("top-normalize"))
    assert reasons == ["its result is rounded: a product could miss a multiple"]
    assert net.kinds() == ["div", "neg", "floor"]
    np.testing.assert_array_equal(net.run(x)[0], -np.arange(64))
