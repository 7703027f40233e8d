"""`top-assign-layout`: conversions only at the edges, every axis and constant rewritten."""

from __future__ import annotations

import numpy as np
import pytest
from xdsl.ir import SSAValue

from tests.unit.top_graphs import Net, refusals
from tilewright.diagnostics import TilewrightError

PASS = "top-assign-layout"


def transposes(net: Net) -> list[str]:
    found = [d for d in net.ctx.decisions if d.layer == "main" and d.stage == PASS]
    return found[-1].details["transposes"]


def test_six_convolutions_and_a_sum_need_two_conversions() -> None:
    net = Net([1, 3, 8, 8])
    x = net.conv(net.x, 4, pad=1)
    skip = x
    for _ in range(5):
        x = net.op("relu", net.conv(x, 4, pad=1))
    net.outputs(net.op("add", x, skip))
    net.check(PASS)
    assert transposes(net) == ["in0/to_nhwc", "add0/to_nchw"]
    assert all(net.layer(f"conv{i}").attrs.string("layout") == "nhwc" for i in range(6))


def test_axes_constants_and_pads_follow() -> None:
    net = Net([2, 3, 5, 6])
    x = net.conv(net.x, 4)
    x = net.op("mul", x, net.random(4, 1, 1))
    x = net.op("add", net.random(4), x)  # along the width, not the channels
    x = net.op("sub", x, net.random(4, 3, 4))
    x = net.op("concat", x, net.op("neg", x), axis=1)
    x = net.op("concat", x, x, axis=3)
    x = net.op("pad", x, pads_begin=[0, 1, 2, 3], pads_end=[0, 0, 1, 0], mode="reflect", value=0.0)
    x = net.op("slice", x, starts=[0, 8, 1, 0], steps=[1, -2, 1, 3], shape=[2, 4, 3, 3])
    x = net.op("softmax", x, axis=1)
    x = net.op("cumsum", x, axis=2, exclusive=False, reverse=True)
    x = net.batch_norm(x)
    x = net.op("instance_norm", x, net.random(4), net.random(4), epsilon=1e-2, axis=1)
    x = net.op("prelu", x, net.random(4, 1, 1))
    x = net.op("tile", x, repeats=[1, 2, 1, 3])
    x = net.op("resize", x, mode="linear", coordinate="half_pixel", scales=[1.0, 1.0, 2.0, 3.0],
               shape=[2, 8, 6, 27])  # fmt: skip
    x = net.op("reduce", x, kind="max", axes=[1], keepdims=True)
    x = net.op("expand", x, shape=[2, 5, 6, 27])
    x = net.op("where", net.op("greater", x, net.weight(np.float32(0))), x, net.random(5, 1, 1))
    arg = net.op("arg", x, kind="max", axis=1, keepdims=True, select_last=False)
    net.outputs(net.conv(x, 2), arg)
    net.check(PASS)
    assert len(transposes(net)) == 2  # the argument's result has one channel: a reshape
    assert "batch_norm" in net.kinds()


@pytest.mark.parametrize(
    ("axes", "order_kept"),
    [([2, 3], True), ([1], True), ([1, 2], True), ([2], False), ([0], False)],
)
def test_reductions_that_drop_axes(axes: list[int], order_kept: bool) -> None:
    net = Net([2, 3, 5, 6])
    net.outputs(net.op("reduce", net.conv(net.x, 4), kind="sum", axes=axes, keepdims=False))
    net.check(PASS)
    assert (len(transposes(net)) == 1) == order_kept


def test_segmentation_argmax() -> None:
    net = Net([2, 3, 5, 6])
    c = net.conv(net.x, 4)
    net.outputs(net.op("arg", c, kind="max", axis=1, keepdims=False, select_last=False))
    net.check(PASS)
    assert transposes(net) == ["in0/to_nhwc"]


def test_classifier_head_needs_no_conversion() -> None:
    net = Net([2, 3, 5, 6])
    pooled = net.op("reduce", net.conv(net.x, 4), kind="mean", axes=[2, 3], keepdims=True)
    flat = net.op("reshape", pooled, shape=[2, 4])
    net.outputs(net.op("linear", flat, net.random(7, 4), net.random(7)))
    net.check(PASS)
    assert net.kinds() == ["transpose", "conv", "reduce", "reshape", "linear"]


def test_flatten_permutes_the_weights_behind() -> None:
    net = Net([2, 3, 5, 6])
    flat = net.op("reshape", net.conv(net.x, 4), shape=[2, 48])
    net.outputs(
        net.op("linear", flat, net.random(7, 48), net.random(7)),
        net.op("linear", flat, net.random(5, 48), net.none()),
    )
    net.check(PASS)
    assert transposes(net) == ["in0/to_nhwc"]
    assert net.layer("reshape0").attrs.string("order") == "nhwc"


def test_flatten_with_another_user_is_converted() -> None:
    net = Net([2, 3, 5, 6])
    flat = net.op("reshape", net.conv(net.x, 4), shape=[2, 48])
    net.outputs(net.op("linear", flat, net.random(7, 48), net.random(7)), flat)
    net.check(PASS)
    assert transposes(net) == ["in0/to_nhwc", "conv0/to_nchw"]


def shuffle(net: Net, x: SSAValue) -> SSAValue:
    split = net.op("reshape", x, shape=[1, 2, 2, 5, 6])
    return net.op("reshape", net.op("transpose", split, perm=[0, 2, 1, 3, 4]), shape=[1, 4, 5, 6])


def test_channel_shuffle_stays_in_the_layout() -> None:
    net = Net([1, 4, 5, 6])
    x = shuffle(net, net.conv(net.x, 4, pad=1, group=2))
    net.outputs(net.conv(shuffle(net, net.conv(x, 4, pad=1, group=2)), 4))
    net.check(PASS)
    # The two edges, and one transpose for each shuffle.
    assert len(transposes(net)) == 4
    assert transposes(net)[0] == "in0/to_nhwc"
    assert transposes(net)[-1] == "conv2/to_nchw"


def test_channels_last_models_lose_their_own_transposes() -> None:
    net = Net([1, 5, 6, 3])
    x = net.conv(net.op("transpose", net.x, perm=[0, 3, 1, 2]), 4)
    net.outputs(net.op("transpose", net.op("relu", x), perm=[0, 2, 3, 1]))
    net.check(PASS)
    assert transposes(net) == []


def test_operands_of_lower_rank() -> None:
    net = Net([1, 4, 5, 6], [4, 1, 1], [6])
    x = net.conv(net.inputs[0], 4, pad=1)
    net.outputs(net.op("add", net.op("mul", x, net.inputs[1]), net.inputs[2]))
    net.check(PASS)
    assert transposes(net) == ["in0/to_nhwc", "add0/to_nchw"]


def test_weights_computed_from_images() -> None:
    net = Net([1, 4, 5, 6], [4, 4, 3, 3])
    w = net.op("softmax", net.conv(net.inputs[1], 4, 1), axis=1)
    c = net.op("conv", net.inputs[0], w, net.none(), strides=[1, 1], pads=[0] * 4,
               dilations=[1, 1], group=1)  # fmt: skip
    net.outputs(c)
    net.check(PASS)


def test_graphs_without_images_stay() -> None:
    net = Net([2, 3, 4, 4])
    x = net.op("matmul", net.op("softmax", net.x, axis=3), net.random(4, 4))
    net.outputs(net.op("relu", x))
    before = str(net.module)
    net.check(PASS)
    assert str(net.module) == before


def test_what_is_not_two_dimensional_is_said() -> None:
    net = Net([1, 2, 4, 4, 4])
    c = net.op("conv", net.x, net.random(3, 2, 3, 3, 3), net.none(), strides=[1] * 3, pads=[0] * 6,
               dilations=[1] * 3, group=1)  # fmt: skip
    net.outputs(c)
    assert refusals(net.check(PASS)) == ["not a 2-D image operation of one result"]


def test_nchw_changes_nothing_and_other_layouts_are_refused() -> None:
    net = Net([1, 3, 8, 8])
    net.outputs(net.conv(net.x, 4))
    before = str(net.module)
    net.check(PASS + "{layout=nchw}")
    assert str(net.module) == before
    with pytest.raises(TilewrightError, match=r"E0702.*legal are nchw, nhwc"):
        net.apply(PASS + "{layout=hwc}")
