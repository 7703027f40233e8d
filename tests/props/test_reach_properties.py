"""What surely follows an element or a weight: never more than what follows by brute force."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.ir.io import new_context, parse_text
from tilewright.schedule.reach import Cost, Reach
from tilewright.spec.hardware import load_target

Bits = npt.NDArray[np.bool_]
Q = "!quant.uniform<i8:f32, 0.02:0>"
REST = 'zp = 0 : i32, lo = -127 : i32, hi = 127 : i32, rounding = "half_up"'


@dataclass(frozen=True)
class Layer:
    """A window operation, or the sum of the last two results where their shapes agree."""

    kind: str
    kernel: tuple[int, int]
    stride: int
    pads: tuple[int, int, int, int]
    channels: int


@dataclass(frozen=True)
class Node:
    """A layer of the built chain."""

    layer: Layer
    sources: tuple[int, ...]
    """Results it takes; -1 is the network's input."""
    shape: tuple[int, int, int]


layers = st.lists(
    st.builds(
        Layer,
        st.sampled_from(("conv", "conv", "depthwise", "max_pool", "add")),
        st.tuples(st.integers(1, 3), st.integers(1, 3)),
        st.integers(1, 2),
        st.tuples(*[st.integers(0, 1)] * 4),
        st.integers(1, 3),
    ),
    min_size=2,
    max_size=5,
)


def chain(size: tuple[int, int], channels: int, wanted: list[Layer]) -> list[Node]:
    """Return the layers that fit, one behind the other."""
    nodes: list[Node] = []
    shape = (*size, channels)
    for layer in wanted:
        if layer.kind == "add":
            if len(nodes) >= 2 and nodes[-2].shape == shape:
                nodes.append(Node(layer, (len(nodes) - 1, len(nodes) - 2), shape))
            continue
        sides = [
            (shape[k] + layer.pads[k] + layer.pads[k + 2] - layer.kernel[k]) // layer.stride + 1
            for k in (0, 1)
        ]
        # A window in padding alone depends on nothing: no network has any.
        inside = all(pad < kernel for pad, kernel in zip(layer.pads, layer.kernel * 2, strict=True))
        if min(sides) < 1 or not inside:
            continue
        shape = (sides[0], sides[1], layer.channels if layer.kind == "conv" else shape[2])
        nodes.append(Node(layer, (len(nodes) - 1,), shape))
    return nodes


def text(size: tuple[int, int], channels: int, nodes: list[Node]) -> str:
    """Return the chain as a module."""

    def tensor(number: int) -> str:
        rows, columns, count = nodes[number].shape if number >= 0 else (*size, channels)
        return f"tensor<1x{rows}x{columns}x{count}x{Q}>"

    lines: list[str] = []
    for number, node in enumerate(nodes):
        layer, kind = node.layer, node.layer.kind
        names = [f"%v{source}" if source >= 0 else "%x" for source in node.sources]
        kinds = [tensor(source) for source in node.sources]
        shared = f'name = "n{number}", device = "tpu"'
        window = (
            f'layout = "nhwc", strides = array<i64: {layer.stride}, {layer.stride}>, '
            f"pads = array<i64: {', '.join(map(str, layer.pads))}>, "
            f"dilations = array<i64: 1, 1>"
        )
        if kind in ("conv", "depthwise"):
            source = nodes[node.sources[0]].shape[2] if node.sources[0] >= 0 else channels
            group, target = (1, layer.channels) if kind == "conv" else (source, source)
            weight = f"tensor<{target}x{source // group}x{layer.kernel[0]}x{layer.kernel[1]}xi8>"
            for name, of in (("w", weight), ("b", f"tensor<{target}xi32>")):
                lines.append(f'%{name}{number} = "top.weight"() {{name = "{name}"}} : () -> {of}')
            lines.append(f'%s{number} = "top.weight"() {{name = "s"}} : () -> tensor<{target}xi8>')
            names += [f"%w{number}", *[f"%b{number}"] * 2, f"%s{number}"]
            kinds += [weight, *[f"tensor<{target}xi32>"] * 2, f"tensor<{target}xi8>"]
            op, attributes = "quant.conv", f"{window}, group = {group} : i64, {REST}"
        elif kind == "max_pool":
            kernel = f"kernel = array<i64: {layer.kernel[0]}, {layer.kernel[1]}>"
            op, attributes = "top.max_pool", f"{window}, {kernel}, ceil_mode = false"
        else:
            op = "quant.add"
            attributes = (
                "mult_a = 1 : i32, mult_b = 1 : i32, shift = 1 : i32, bias = 0 : i64, "
                f"bias_shift = 0 : i32, {REST}"
            )
        lines.append(
            f'%v{number} = "{op}"({", ".join(names)}) {{{shared}, {attributes}}} : '
            f"({', '.join(kinds)}) -> {tensor(number)}"
        )
    last = len(nodes) - 1
    body = "\n".join(lines)
    return (
        f"func.func @main(%x: {tensor(-1)}) -> {tensor(last)} {{\n{body}\n"
        f"func.return %v{last} : {tensor(last)}\n}}"
    )


def step(node: Node, inputs: list[Bits]) -> tuple[Bits, int]:
    """Return what of a layer's result depends on it, and how many of its weights are used."""
    if node.layer.kind == "add":
        return inputs[0] | inputs[1], 0
    source, layer = inputs[0], node.layer
    result = np.zeros(node.shape, np.bool_)
    dense = layer.kind == "conv"
    used = 0
    for ky in range(layer.kernel[0]):
        for kx in range(layer.kernel[1]):
            channels = np.zeros(source.shape[2], np.bool_)
            for r in range(node.shape[0]):
                for c in range(node.shape[1]):
                    y = r * layer.stride - layer.pads[0] + ky
                    x = c * layer.stride - layer.pads[1] + kx
                    if 0 <= y < source.shape[0] and 0 <= x < source.shape[1]:
                        channels |= source[y, x]
                        result[r, c] |= source[y, x].any() if dense else source[y, x]
            used += int(channels.sum()) * (node.shape[2] if dense else 1)
    return result, used if layer.kind in ("conv", "depthwise") else 0


def brute_force(
    nodes: list[Node], at: int, bits: Bits, source: Bits, costs: list[Cost]
) -> tuple[int, int, int]:
    """Return weights used, array and vector work that follows `bits` of a layer's result."""
    results = {number: np.zeros(node.shape, np.bool_) for number, node in enumerate(nodes)}
    results |= {-1: source, at: bits}
    weights = array = vector = 0
    for number in range(at + 1, len(nodes)):
        inputs = [results[source] for source in nodes[number].sources]
        results[number], used = step(nodes[number], inputs)
        weights += used
        # Every product has an operand that depends on it.
        array += costs[number].array if any(operand.all() for operand in inputs) else 0
        vector += costs[number].vector if results[number].all() else 0
    return weights, array, vector


@settings(max_examples=150, deadline=None)
@given(st.tuples(st.integers(1, 6), st.integers(1, 6)), st.integers(1, 3), layers)
def test_never_more_than_by_brute_force(
    size: tuple[int, int], channels: int, wanted: list[Layer]
) -> None:
    nodes = chain(size, channels, wanted)
    if not nodes:
        return
    module = parse_text(text(size, channels, nodes), new_context(target=load_target("edge16")))
    ops = [op for op in module.walk() if "device" in op.attributes]
    source = np.zeros((*size, channels), np.bool_)
    costs: list[Cost] = []
    for number, node in enumerate(nodes):
        ones = [np.ones(nodes[i].shape if i >= 0 else source.shape, np.bool_) for i in node.sources]
        weights = step(node, ones)[1]
        # Taps that only ever meet padding are no weights: one would have to be left out of both.
        full = weights and nodes[number].shape[2] * kernel_of(node, nodes, channels)
        if weights != full:
            return
        costs.append(Cost(weights, 1 << number, 1 << number))
    reach = Reach(ops, costs)
    for at, node in enumerate(nodes):
        found = reach.after_element(at)
        least: int | None = None
        for index in np.ndindex(*node.shape):
            bits = np.zeros(node.shape, np.bool_)
            bits[index] = True
            count = brute_force(nodes, at, bits, source, costs)[0]
            least = count if least is None else min(least, count)
        assert least is not None
        assert found.weights <= least
        if not costs[at].weights:
            continue
        found = reach.after_weight(at)
        layer, taken = node.layer, nodes[node.sources[0]].shape if node.sources[0] >= 0 else size
        for ky, kx, target in np.ndindex(*layer.kernel, node.shape[2]):
            bits = np.zeros(node.shape, np.bool_)
            for r, c in np.ndindex(*node.shape[:2]):
                y = r * layer.stride - layer.pads[0] + ky
                x = c * layer.stride - layer.pads[1] + kx
                bits[r, c, target] = 0 <= y < taken[0] and 0 <= x < taken[1]
            _, array, vector = brute_force(nodes, at, bits, source, costs)
            assert found.array & ~array == 0
            assert found.vector & ~vector == 0


def kernel_of(node: Node, nodes: list[Node], channels: int) -> int:
    """Return the weights of one result channel of a convolution."""
    source = nodes[node.sources[0]].shape[2] if node.sources[0] >= 0 else channels
    taps = node.layer.kernel[0] * node.layer.kernel[1]
    return taps * (source if node.layer.kind == "conv" else 1)


def test_the_brute_force_is_reached() -> None:
    # Two 3 x 3 layers behind one another: of the second all weights follow any element.
    layer = Layer("conv", (3, 3), 1, (1, 1, 1, 1), 2)
    nodes = chain((6, 6), 2, [layer] * 3)
    module = parse_text(text((6, 6), 2, nodes), new_context(target=load_target("edge16")))
    ops = [op for op in module.walk() if "device" in op.attributes]
    reach = Reach(ops, [Cost(36, 10, 1)] * 3)
    assert [reach.after_element(at).weights for at in range(3)] == [36, 0, 0]
    after = reach.after_weight(0)
    assert (after.array, after.vector) == (10, 2)
