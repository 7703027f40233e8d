"""Which ops of a float graph have an integer form, and why the others stay float on the host."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from xdsl.dialects.builtin import Float32Type, FloatAttr, StringAttr, TensorType
from xdsl.ir import Operation, SSAValue

from tilewright.dialects.quant import image_axes, shape_of
from tilewright.dialects.top.base import Attrs, is_absent
from tilewright.quant.functions import FUNCTIONS
from tilewright.quant.graph import KEEP_FLOAT
from tilewright.schedule.permutation import MAX_RANK, merged_permutation
from tilewright.spec.isa import BY_NAME

if TYPE_CHECKING:
    from tilewright.ir.weights import WeightStore

LAYOUT_OPS = frozenset({"top.reshape", "top.transpose"})
"""Ops that only re-order elements: beside graph inputs and outputs they are the host's work."""

SCALE_KEEPERS = frozenset(
    {"top.reshape", "top.transpose", "top.slice", "top.pad", "top.max_pool", "top.resize"}
)
"""Ops whose result takes its operand's scale."""

SCALAR_FORMS = {
    ("top.add", 0): "add_scalar",
    ("top.add", 1): "add_scalar",
    ("top.sub", 1): "add_scalar",
    ("top.sub", 0): "rsub_scalar",
    ("top.mul", 0): "mul_scalar",
    ("top.mul", 1): "mul_scalar",
    ("top.div", 1): "mul_scalar",
    ("top.div", 0): "rdiv_scalar",
    ("top.pow", 1): "pow",
    ("top.min", 0): "min_scalar",
    ("top.min", 1): "min_scalar",
    ("top.max", 0): "max_scalar",
    ("top.max", 1): "max_scalar",
}
"""Binary ops that are functions of one activation when operand `index` is a scalar constant."""


def is_constant(value: SSAValue) -> bool:
    """Return whether `value` is a constant of the weight store."""
    return isinstance(value.owner, Operation) and value.owner.name == "top.weight"


def constant_name(value: SSAValue) -> str:
    """Return the store name of a constant."""
    assert isinstance(value.owner, Operation)
    return Attrs(value.owner.attributes).string("name")


def scalar_operand(op: Operation) -> int | None:
    """Return which operand of a binary op is a scalar constant that leaves the shape alone."""
    if len(op.operands) != 2:
        return None
    for index in (1, 0):
        constant, other = op.operands[index], op.operands[1 - index]
        if (
            is_constant(constant)
            and not is_constant(other)
            and math.prod(shape_of(constant)) == 1
            and shape_of(other) == shape_of(op.results[0])
            and (op.name, index) in SCALAR_FORMS
        ):
            return index
    return None


def window_is_full(op: Operation) -> bool:
    """Return whether every window of a `top.avg_pool` counts exactly its kernel's elements."""
    attrs = Attrs(op.attributes)
    _, h, w = image_axes(attrs.string("layout", "nchw"))
    source, target = shape_of(op.operands[0]), shape_of(op.results[0])
    pads, include = attrs.ints("pads"), attrs.flag("count_include_pad")
    for k, axis in enumerate((h, w)):
        kernel, stride = attrs.ints("kernel")[k], attrs.ints("strides")[k]
        before, after = (pads[k], pads[k + 2]) if include else (0, 0)
        first = -pads[k]
        last = first + (target[axis] - 1) * stride + kernel
        if first < -before or last > source[axis] + after:
            return False
    return True


def _conv(op: Operation, weights: WeightStore) -> str | None:
    if not is_constant(op.operands[1]):
        return "the weights are computed at run time"
    if not (is_absent(op.operands[2]) or is_constant(op.operands[2])):
        return "the bias is computed at run time"
    if len(shape_of(op.operands[0])) != 4:
        return "only two-dimensional convolutions have an integer form"
    return _padding(op)


def _padding(op: Operation) -> str | None:
    largest, legal = max(Attrs(op.attributes).ints("pads")), BY_NAME["dma_load"].field["pad1_lo"]
    if largest > legal.high:
        return f"it is padded by {largest}; the chip pads {legal.high}"
    return None


def _linear(op: Operation, weights: WeightStore) -> str | None:
    if not is_constant(op.operands[1]):
        return "the weights are computed at run time"
    if not (is_absent(op.operands[2]) or is_constant(op.operands[2])):
        return "the bias is computed at run time"
    return None


def _matmul(op: Operation, weights: WeightStore) -> str | None:
    if min(len(shape_of(value)) for value in op.operands) < 2:
        return "products with vectors have no integer form"
    batch = math.prod(shape_of(op.results[0])[:-2])
    if any(math.prod(shape_of(value)[:-2]) not in (1, batch) for value in op.operands):
        return "it broadcasts along some batch axes only"
    return None


def _binary(op: Operation, weights: WeightStore) -> str | None:
    index = scalar_operand(op)
    if index is not None:
        return _scalar(op, index, weights)
    if op.name in ("top.add", "top.sub", "top.mul"):
        return None
    return f"{op.name.removeprefix('top.')} of two tensors has no integer form"


def _scalar(op: Operation, index: int, weights: WeightStore) -> str | None:
    value = scalar_value(op, index, weights)
    if not math.isfinite(value):
        return "a constant is not finite"
    if op.name == "top.div" and index == 1 and value == 0:
        return "it divides by zero"
    return _table(op, weights)


def scalar_value(op: Operation, index: int, weights: WeightStore) -> float:
    """Return the value of operand `index`, a scalar constant."""
    return float(weights.get(constant_name(op.operands[index])).reshape(-1)[0])


def table_function(op: Operation, weights: WeightStore) -> tuple[str, dict[str, float | str]]:
    """Return the function of one activation that `op` computes, and its parameters."""
    parameters: dict[str, float | str] = {}
    index = scalar_operand(op)
    if index is not None:
        value = scalar_value(op, index, weights)
        if op.name == "top.pow":
            return "pow", {"exponent": value}
        if op.name == "top.sub" and index == 1:
            value = -value
        if op.name == "top.div" and index == 1:
            value = 1.0 / value
        return SCALAR_FORMS[op.name, index], {"value": value}
    if op.name == "top.prelu":
        return "leaky_relu", {"alpha": scalar_value(op, 1, weights)}
    for key, attr in op.attributes.items():
        if isinstance(attr, FloatAttr):
            parameters[key] = float(attr.value.data)
        elif isinstance(attr, StringAttr) and key == "approximate":
            parameters[key] = attr.data
    return op.name.removeprefix("top."), parameters


def _table(op: Operation, weights: WeightStore) -> str | None:
    function, parameters = table_function(op, weights)
    # Symmetric codes always include negative values, zero and positive ones.
    probe = np.array([-100.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 100.0])
    with np.errstate(all="ignore"):
        undefined = np.isnan(FUNCTIONS[function](probe, parameters))
    if undefined.any():
        return f"{function} is undefined for some codes of a symmetric scale"
    return None


def _max_pool(op: Operation, weights: WeightStore) -> str | None:
    if len(op.results) != 1:
        return "the indices of the maxima are needed"
    if len(shape_of(op.operands[0])) != 4:
        return "only two-dimensional pools have an integer form"
    kernel, longest = Attrs(op.attributes).ints("kernel"), BY_NAME["vec_pool"].field["k_h"].high
    if max(kernel) > longest:
        return f"its window is {kernel[0]} x {kernel[1]}; the chip walks {longest}"
    return _padding(op)


def _avg_pool(op: Operation, weights: WeightStore) -> str | None:
    if len(shape_of(op.operands[0])) != 4:
        return "only two-dimensional pools have an integer form"
    if any(step != 1 for step in Attrs(op.attributes).ints("dilations")):
        return "dilated average pools have no integer form"
    if not window_is_full(op):
        return "windows at the border average fewer elements than the others"
    return _padding(op)


def _reduce(op: Operation, weights: WeightStore) -> str | None:
    attrs = Attrs(op.attributes)
    kind, axes = attrs.string("kind"), attrs.ints("axes")
    if kind not in ("mean", "sum"):
        return f"a reduction to the {kind} has no integer form"
    if not axes or list(axes) != list(range(axes[0], axes[-1] + 1)):
        return "the reduced axes are not next to each other"
    return None


def _concat(op: Operation, weights: WeightStore) -> str | None:
    return None


def _mover(op: Operation, weights: WeightStore) -> str | None:
    return None


def _transpose(op: Operation, weights: WeightStore) -> str | None:
    perm = Attrs(op.attributes).ints("perm")
    sizes, _ = merged_permutation(shape_of(op.operands[0]), perm)
    if len(sizes) > MAX_RANK:
        return f"it permutes {len(sizes)} separate axes; the chip moves {MAX_RANK}"
    return None


def _slice(op: Operation, weights: WeightStore) -> str | None:
    if any(step < 0 for step in Attrs(op.attributes).ints("steps")):
        return "a slice that reverses an axis has no instruction"
    return None


def _pad(op: Operation, weights: WeightStore) -> str | None:
    attrs = Attrs(op.attributes)
    mode, value = attrs.string("mode"), attrs.number("value") or 0.0
    if mode != "constant":
        return f"padding of mode {mode} has no instruction"
    if value != 0:
        return f"padding with {value:g} has no integer form"
    return None


def _resize(op: Operation, weights: WeightStore) -> str | None:
    attrs = Attrs(op.attributes)
    source, target = shape_of(op.operands[0]), shape_of(op.results[0])
    if len(source) != 4:
        return "only images of rank 4 are resized in integers"
    c = image_axes(attrs.string("layout", "nchw"))[0]
    if source[0] != target[0] or source[c] != target[c]:
        return "batch or channels are resized"
    if attrs.string("mode") not in ("nearest", "linear"):
        return f"{attrs.string('mode')} interpolation has no integer form"
    if attrs.string("coordinate") == "tf_crop_and_resize":
        return "resizing of a cropped region has no integer form"
    if attrs.integer("antialias", 0) or attrs.integer("exclude_outside", 0):
        return "antialiased resizing has no integer form"
    if max(source) > 32767:
        return "the image is too large for 16-bit indices"
    return None


def _prelu(op: Operation, weights: WeightStore) -> str | None:
    slope = op.operands[1]
    if not is_constant(slope) or math.prod(shape_of(slope)) != 1:
        return "a slope for each channel has no integer form"
    return _table(op, weights)


_Rule = Callable[[Operation, "WeightStore"], "str | None"]

RULES: dict[str, _Rule] = {
    "top.conv": _conv,
    "top.linear": _linear,
    "top.matmul": _matmul,
    "top.add": _binary,
    "top.sub": _binary,
    "top.mul": _binary,
    "top.div": _binary,
    "top.pow": _binary,
    "top.min": _binary,
    "top.max": _binary,
    "top.max_pool": _max_pool,
    "top.avg_pool": _avg_pool,
    "top.reduce": _reduce,
    "top.concat": _concat,
    "top.reshape": _mover,
    "top.transpose": _transpose,
    "top.slice": _slice,
    "top.pad": _pad,
    "top.resize": _resize,
    "top.prelu": _prelu,
}
"""For each op with an integer form: when it does not apply. Functions of one value are tables."""

for _name in FUNCTIONS:
    RULES.setdefault(f"top.{_name}", _table)

HOST_REASONS = {
    "top.softmax": "softmax needs exponentials and a division; the target has no `vector_rows`",
    "top.log_softmax": "log-softmax needs exponentials and a logarithm",
    "top.layer_norm": (
        "normalisation needs a division by a computed deviation; the target has no `vector_rows`"
    ),
    "top.instance_norm": "normalisation needs a division by a computed deviation",
    "top.lrn": "normalisation needs a power of a computed sum",
    "top.batch_norm": "the batch normalisation was not folded into a layer before it",
    "top.conv_transpose": "transposed convolutions have no integer form yet",
}
"""Reasons for ops that never have an integer form."""


def operands_reason(op: Operation) -> str | None:
    """Return why the types of `op` keep it on the host: not float32, empty, or all constant."""
    for value in (*op.operands, *op.results):
        if is_absent(value):
            continue
        kind = value.type
        if not isinstance(kind, TensorType) or not isinstance(kind.element_type, Float32Type):
            return f"it works on {getattr(kind, 'element_type', kind)} values"
        if 0 in shape_of(value):
            return "a tensor is empty"
    if not any(not is_absent(value) and not is_constant(value) for value in op.operands):
        return "all its operands are constants"
    return None


def host_reason(op: Operation, weights: WeightStore) -> str | None:
    """Return why `op` stays float on the host, or None if it has an integer form."""
    kept = op.attributes.get(KEEP_FLOAT)
    if isinstance(kept, StringAttr):
        return kept.data
    reason = operands_reason(op)
    if reason is not None:
        return reason
    rule = RULES.get(op.name)
    if rule is None:
        kind = op.name.removeprefix("top.")
        return HOST_REASONS.get(op.name, f"{kind} has no integer form")
    return rule(op, weights)


def place(
    ops: list[Operation],
    weights: WeightStore,
    reason_of: _Rule = host_reason,
) -> dict[Operation, str]:
    """Return the ops that run on the host, each with its reason (`reason_of` gives an op's own).

    Layout changes beside graph inputs and outputs, and beside other host ops, are the host's: they
    cost it nothing as part of quantising and dequantising. So is what adds a mask to the operand of
    a softmax there, with what makes the mask: in eight bits only the mask would be left. And so is
    elementwise work between a product's 32-bit sums, or floats of the host, and readers that are
    all the host's: on the chip it would only lose bits. And so are squares that only the host
    reads: what is below a sixteenth of the largest value would be lost.
    """
    hosts: dict[Operation, str] = {}
    for op in ops:
        reason = reason_of(op, weights)
        if reason is None and op.name in LAYOUT_OPS:
            owner = op.operands[0].owner
            if not isinstance(owner, Operation):
                reason = "layout of a graph input"
            elif owner in hosts:
                reason = "layout of a value the host computes"
        if reason is not None:
            hosts[op] = reason
    for op in reversed(ops):
        if op not in hosts and _sums_squares(op):
            readers = [use.operation for use in op.results[0].uses]
            if readers and all(reader in hosts for reader in readers):
                hosts[op] = "squares of eight bits have sixteen, and only the host reads them"
        if op not in hosts and op.name == "top.add":
            _keep_mask(op, ops, hosts)
        if op in hosts:
            continue
        if _between_floats(op, hosts):
            sums = any(
                isinstance(value.owner, Operation) and value.owner.name in PRODUCTS
                for value in op.operands
                if value.owner not in hosts
            )
            hosts[op] = (
                "between the 32-bit sums of a product and the host"
                if sums
                else "between floats of the host"
            )
            continue
        if op.name not in (*LAYOUT_OPS, "top.softmax"):
            continue
        users = [use.operation for use in op.results[0].uses]
        if not all(user.name == "func.return" or user in hosts for user in users):
            continue
        if op.name == "top.softmax":
            # Eight bits would leave ties among the classes of a classifier.
            hosts[op] = "a softmax that only the host reads: eight bits would leave ties"
        else:
            hosts[op] = (
                "layout of a graph output"
                if any(user.name == "func.return" for user in users)
                else "layout of a value the host needs"
            )
    return hosts


PRODUCTS = ("top.linear", "top.matmul")
"""Ops whose 32-bit sums can leave the chip."""


def _is_laid_out_input(op: Operation) -> bool:
    """Whether an op only reshapes or transposes a graph input."""
    current: Operation | None = op
    while current is not None and current.name in LAYOUT_OPS:
        owner = current.operands[0].owner
        current = owner if isinstance(owner, Operation) else None
    return current is None


def _between_floats(op: Operation, hosts: dict[Operation, str]) -> bool:
    """Whether an op without weights reads only sums made for it, or floats, and the host reads it.

    Graph inputs may come as codes; what reads only them is left to the chip.
    """
    elementwise = op.name in RULES and RULES[op.name] in (_binary, _table, _prelu, _reduce)
    users = [use.operation for use in op.results[0].uses]
    if not elementwise or not users or not all(user in hosts for user in users):
        return False
    if "quant_scale" in op.attributes:
        return False
    floats = False
    for value in op.operands:
        owner = value.owner
        if is_absent(value) or is_constant(value) or not isinstance(owner, Operation):
            continue
        if owner in hosts:
            # A graph input that is only laid out anew is no float that was computed.
            floats |= not _is_laid_out_input(owner)
            continue
        attrs = Attrs(owner.attributes)
        clamped = attrs.number("clamp_min") is not None or attrs.number("clamp_max") is not None
        if owner.name not in PRODUCTS or clamped or not value.has_one_use():
            return False
        if "quant_scale" in owner.attributes:
            return False
        floats = True
    return floats


def _sums_squares(op: Operation) -> bool:
    """Return whether `op` is a square, a sum of two, or a sum or mean of one over axes."""
    if "quant_scale" in op.attributes:
        return False  # the model says how many bits are enough
    if op.name == "top.mul":
        return op.operands[0] is op.operands[1]
    if op.name == "top.reduce" and Attrs(op.attributes).string("kind") not in ("mean", "sum"):
        return False
    if op.name not in ("top.add", "top.reduce"):
        return False
    makers = [value.owner for value in op.operands if not is_absent(value)]
    return all(
        isinstance(maker, Operation)
        and maker.name == "top.mul"
        and maker.operands[0] is maker.operands[1]
        for maker in makers
    )


def _keep_mask(op: Operation, ops: list[Operation], hosts: dict[Operation, str]) -> None:
    """Give the host a sum that only softmaxes there read, and what makes a mask for it."""
    users = [use.operation for use in op.results[0].uses]
    if not users or not all(user.name == "top.softmax" and user in hosts for user in users):
        return
    hosts[op] = "a mask added before a softmax of the host would take the range of its codes"
    for operand in op.operands:
        makers = _makers(operand, hosts)
        # Last first, so that the readers of a value are decided before it.
        for maker in reversed([item for item in ops if item in makers] if makers else []):
            if all(use.operation in hosts for use in maker.results[0].uses):
                hosts[maker] = "it makes a mask for a softmax of the host"


def _makers(value: SSAValue, hosts: dict[Operation, str]) -> set[Operation]:
    """Return the simple ops that make `value` from inputs, constants and values of the host.

    Empty if a layer of the chip has a part in it.
    """
    found: set[Operation] = set()
    open_values = [value]
    while open_values:
        owner = open_values.pop().owner
        if not isinstance(owner, Operation) or owner in hosts or owner in found:
            continue
        if owner.name in ("top.weight", "top.none"):
            continue
        if owner.name not in LAYOUT_OPS and RULES.get(owner.name) not in (_binary, _table):
            return set()
        found.add(owner)
        open_values.extend(owner.operands)
    return found
