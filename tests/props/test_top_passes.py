"""Random graphs through all passes on `top`: after each pass the numbers are the same.

The graphs mix image operations with everything that can stand between them: broadcast constants of
any rank, forks, reshapes, transposes, channel shuffles, axes of all kinds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xdsl.dialects.builtin import TensorType, f32
from xdsl.ir import SSAValue

from tests.unit.top_graphs import Net, assert_close
from tilewright.transforms.top import LAYOUT_PASSES, TOP_PASSES

Draw = Callable[[st.SearchStrategy[int]], int]


def shape(value: SSAValue) -> tuple[int, ...]:
    assert isinstance(value.type, TensorType)
    return tuple(value.type.get_shape())


def pick(draw: Draw, count: int) -> int:
    return draw(st.integers(0, count - 1))


def step(net: Net, draw: Draw, pool: list[SSAValue]) -> None:
    """Add one operation to a 4-D value of the pool; 4-D results join the pool."""
    x = pool[max(0, len(pool) - 1 - pick(draw, 3))]
    batch, channels, height, width = shape(x)
    kind = pick(draw, 31)
    if kind <= 2:
        group = channels if kind == 2 else 1
        out = channels if kind == 2 else [2, 4, 6][pick(draw, 3)]
        kernel = min([1, 3][pick(draw, 2)], height, width)
        pool.append(net.conv(x, out, kernel, pad=kernel // 2 * pick(draw, 2), group=group))
    elif kind == 3:
        pool.append(net.batch_norm(x))
    elif kind == 4:
        pool.append(net.op("relu", x))
    elif kind == 5:
        pool.append(net.op("clip", x, min=-0.5, max=1.5))
    elif kind == 6:
        other = [v for v in pool if shape(v) == shape(x)]
        pool.append(net.op(["add", "mul", "sub"][pick(draw, 3)], x, other[pick(draw, len(other))]))
    elif kind <= 8:
        sizes = [
            (),
            (1,),
            (width,),
            (height, 1),
            (channels, 1, 1),
            (1, channels, 1, 1),
            (channels, height, width),
        ][pick(draw, 7)]
        constant = net.weight(net.rng.uniform(0.5, 1.5, sizes).astype(np.float32), "k")
        operands = [x, constant] if pick(draw, 2) else [constant, x]
        pool.append(net.op(["add", "mul", "sub", "max"][pick(draw, 4)], *operands))
    elif kind == 9:
        same = [v for v in pool if shape(v)[0] == batch and shape(v)[2:] == (height, width)]
        pool.append(net.op("concat", x, same[pick(draw, len(same))], axis=1))
    elif kind == 10:
        pool.append(net.op("concat", x, x, axis=pick(draw, 4)))
    elif kind == 11:
        pool.append(net.op("softmax", x, axis=pick(draw, 4)))
    elif kind == 12:
        axes = sorted({pick(draw, 4), pick(draw, 4)})
        pool.append(net.op("reduce", x, kind="mean", axes=axes, keepdims=True))
    elif kind == 13:
        axes = sorted({pick(draw, 4), pick(draw, 4)})
        dropped = net.op("reduce", x, kind="max", axes=axes, keepdims=False)
        pool.append(
            net.op("reshape", dropped, shape=[(*shape(dropped), 1, 1, 1, 1)[i] for i in range(4)])
        )
    elif kind == 14:
        begin, end = [0, 0, 0, 0], [0, 0, 0, 0]
        begin[pick(draw, 4)], end[pick(draw, 4)] = 1, 1
        value = [0.0, 0.5][pick(draw, 2)]
        pool.append(net.op("pad", x, pads_begin=begin, pads_end=end, mode="constant", value=value))
    elif kind == 15:
        axis = pick(draw, 4)
        size = list(shape(x))
        steps = [1, 1, 1, 1]
        starts = [0, 0, 0, 0]
        if size[axis] > 1:
            starts[axis], steps[axis] = [(1, 1), (size[axis] - 1, -1)][pick(draw, 2)]
            size[axis] -= 1
        pool.append(net.op("slice", x, starts=starts, steps=steps, shape=size))
    elif kind == 16:
        perm = [[0, 2, 3, 1], [0, 3, 1, 2], [1, 0, 2, 3], [0, 1, 3, 2]][pick(draw, 4)]
        pool.append(net.op("transpose", x, perm=perm))
    elif kind == 17 and channels % 2 == 0:
        split = net.op("reshape", x, shape=[batch, 2, channels // 2, height, width])
        mixed = net.op("transpose", split, perm=[0, 2, 1, 3, 4])
        pool.append(net.op("reshape", mixed, shape=[batch, channels, height, width]))
    elif kind == 18:
        flat = net.op("reshape", x, shape=[batch, channels * height * width])
        dense = net.op("linear", flat, net.random(4, channels * height * width), net.none())
        pool.append(net.op("reshape", dense, shape=[batch, 4, 1, 1]))
    elif kind == 19 and min(height, width) >= 2:
        name = ["max_pool", "avg_pool"][pick(draw, 2)]
        pads = [[0, 0, 0, 0], [1, 1, 1, 1]][pick(draw, 2)]
        ceil = bool(pick(draw, 2))
        pool.append(net.pool(name, x, 2, strides=[2, 2], pads=pads, ceil_mode=ceil))
    elif kind == 20:
        pool.append(
            net.op(
                "resize",
                x,
                mode=["nearest", "linear"][pick(draw, 2)],
                coordinate="half_pixel",
                scales=[1.0, 1.0, 2.0, 1.5],
                shape=[batch, channels, 2 * height, int(1.5 * width)],
            )
        )
    elif kind == 21:
        gate = net.op("clip", net.op("add", x, net.weight(np.float32(3))), min=0.0, max=6.0)
        pool.append(net.op("div", net.op("mul", x, gate), net.weight(np.array([6.0], np.float32))))
    elif kind == 22:
        pool.append(net.op("mul", x, net.op("sigmoid", x)))
    elif kind == 23:
        slope = net.weight(net.rng.uniform(0.1, 0.9, (channels, 1, 1)).astype(np.float32), "slope")
        pool.append(net.op("prelu", x, slope))
    elif kind == 24:
        size = net.rng.normal(1, 0.3, channels).astype(np.float32)
        pool.append(
            net.op("instance_norm", x, net.weight(size), net.weight(size), epsilon=1e-2, axis=1)
        )
    elif kind == 25:
        product = net.op("matmul", x, net.random(width, 3))
        pool.append(net.op("add", product, net.random(3)))
    elif kind == 26:
        scattered = net.op(
            "conv_transpose",
            x,
            net.random(channels, 2, 2, 2),
            net.random(2),
            strides=[2, 1],
            pads=[0, 1, 1, 0],
            dilations=[1, 1],
            output_pads=[0, 0],
            group=1,
        )
        pool.append(scattered)
    elif kind == 27:
        row = net.op("reshape", x, shape=[batch, channels, height * width])
        c = net.op(
            "conv",
            row,
            net.random(3, channels, 1),
            net.none(),
            strides=[1],
            pads=[1, 0],
            dilations=[1],
            group=1,
        )
        pool.append(net.op("reshape", c, shape=[batch, 3, 1, height * width + 1]))
    elif kind == 28:
        axes = [[3], [2, 3], [1]][pick(draw, 3)]
        mean = net.op("reduce", x, kind="mean", axes=axes, keepdims=True)
        d = net.op("sub", x, mean)
        v = net.op("reduce", net.op("mul", d, d), kind="mean", axes=axes, keepdims=True)
        root = net.op("sqrt", net.op("add", v, net.weight(np.float32(0.5))))
        pool.append(net.op("mul", net.op("div", d, root), net.random(width)))
    elif kind == 29:
        arg = net.op("arg", x, kind="max", axis=pick(draw, 4), keepdims=True, select_last=True)
        pool.append(net.op("cast", arg, shape=shape(arg), element=f32))
    else:
        pool.append(net.op("expand", net.op("reduce", x, kind="sum", axes=[1], keepdims=True),
                           shape=[batch, 3, height, width]))  # fmt: skip


@st.composite
def nets(draw: st.DrawFn) -> Net:
    size = draw(st.integers(2, 5))
    net = Net([draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 4])), size, size + 1],
              seed=draw(st.integers(0, 3)))  # fmt: skip
    pool = [net.x]
    for _ in range(draw(st.integers(1, 10))):
        pool[:] = [v for v in pool if 0 < np.prod(shape(v)) < 4000]
        step(net, draw, pool)
    extra = [pool[draw(st.integers(0, len(pool) - 1))]] if draw(st.booleans()) else []
    return net.outputs(pool[-1], *extra)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(nets())
def test_every_pass_keeps_the_numbers(net: Net) -> None:
    feed = net.feed()
    before = net.run(feed)
    for text in (*TOP_PASSES, *LAYOUT_PASSES):
        net.apply(text)
        once = str(net.module)
        assert_close(net.run(feed), before, 1e-4)
        net.apply(text)
        assert str(net.module) == once, text
