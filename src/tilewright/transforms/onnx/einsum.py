"""Einsum as transposes, sums and batched matrix products.

Two operands at a time: a label of both that is still needed is a batch axis, one of both that is
not is summed by the product, one of a single operand that is not needed is summed before. ::

    bhqd,bhkd->bhqk: (bh)(q)(d) @ (bh)(d)(k)
"""

from __future__ import annotations

from math import prod

from xdsl.ir import SSAValue

from tilewright.transforms.onnx.base import Node, RefusedError, rule, shape_of


@rule("Einsum")
def _einsum(node: Node) -> SSAValue:
    operands = node.operands()
    terms, result = parse_equation(
        node.string("equation", ""), [len(shape_of(value)) for value in operands]
    )
    sizes: dict[str, int] = {}
    for term, value in zip(terms, operands, strict=True):
        for label, size in zip(term, shape_of(value), strict=True):
            if sizes.setdefault(label, size) != size:
                raise RefusedError(f"label {label!r} has sizes {sizes[label]} and {size}")
    labels, value = terms[0], operands[0]
    for place in range(1, len(terms)):
        needed = set(result).union(*terms[place + 1 :])
        labels, value = _product(
            node, (labels, value), (terms[place], operands[place]), needed, sizes
        )
    labels, value = _sum_unneeded(node, labels, value, set(result))
    return _ordered(node, labels, value, result)


def parse_equation(equation: str, ranks: list[int]) -> tuple[list[str], str]:
    """Return one label for each axis of the operands and of the result.

    An ellipsis becomes digits counted from the back (at most ten axes).

    Raises:
        RefusedError: the equation does not fit, or takes a diagonal.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        raise RefusedError(
            f"`equation` {equation!r} has {len(terms)} terms for {len(ranks)} operands"
        )
    widths = [
        rank - len(term.replace("...", "")) if "..." in term else 0
        for term, rank in zip(terms, ranks, strict=True)
    ]
    widest = max(widths)
    digits = "9876543210"
    if min(widths) < 0 or widest > len(digits):
        raise RefusedError(f"`equation` {equation!r} does not fit ranks {ranks}")
    full = [
        term.replace("...", digits[len(digits) - width :])
        for term, width in zip(terms, widths, strict=True)
    ]
    for term, rank in zip(full, ranks, strict=True):
        if len(term) != rank:
            raise RefusedError(f"`equation` {equation!r} does not fit ranks {ranks}")
        if len(set(term)) != len(term):
            raise RefusedError(f"`equation` {equation!r} takes a diagonal")
    every = "".join(full)
    rest = digits[len(digits) - widest :]
    if arrow:
        result = right.replace("...", rest)
    else:
        # Without an arrow: the ellipsis, then what occurs once, in alphabetical order.
        once = sorted(label for label in set(every) if every.count(label) == 1 and label.isalpha())
        result = rest + "".join(once)
    if len(set(result)) != len(result) or not set(result) <= set(every):
        raise RefusedError(f"the result of `equation` {equation!r} is not made of its operands")
    return full, result


def _sum_unneeded(
    node: Node, labels: str, value: SSAValue, needed: set[str]
) -> tuple[str, SSAValue]:
    axes = [axis for axis, label in enumerate(labels) if label not in needed]
    if axes:
        value = node.emit("reduce", [value], {"kind": "sum", "axes": axes, "keepdims": False})
    return "".join(label for label in labels if label in needed), value


def _ordered(node: Node, labels: str, value: SSAValue, wanted: str) -> SSAValue:
    """Return `value` with its axes in the order of `wanted` (the same labels)."""
    perm = [labels.index(label) for label in wanted]
    if perm == list(range(len(labels))):
        return value
    return node.emit("transpose", [value], {"perm": perm})


def _product(
    node: Node,
    left: tuple[str, SSAValue],
    right: tuple[str, SSAValue],
    needed: set[str],
    sizes: dict[str, int],
) -> tuple[str, SSAValue]:
    """Return labels and value of the product of two operands, summed over what is not needed."""
    a, x = _sum_unneeded(node, *left, needed | set(right[0]))
    b, y = _sum_unneeded(node, *right, needed | set(a))
    batch = "".join(label for label in a if label in b and label in needed)
    summed = "".join(label for label in a if label in b and label not in needed)
    rows = "".join(label for label in a if label not in b)
    columns = "".join(label for label in b if label not in a)

    def count(labels: str) -> int:
        return prod(sizes[label] for label in labels)

    x = _ordered(node, a, x, batch + rows + summed)
    y = _ordered(node, b, y, batch + summed + columns)
    x = node.reshape(x, [count(batch), count(rows), count(summed)])
    y = node.reshape(y, [count(batch), count(summed), count(columns)])
    labels = batch + rows + columns
    made = node.emit("matmul", [x, y])
    return labels, node.reshape(made, [sizes[label] for label in labels])
