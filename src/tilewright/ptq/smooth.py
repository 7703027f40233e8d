"""SmoothQuant: move outlying channels of a normalised activation into the weights behind it.

One scale serves a whole activation, so a few channels that reach far leave the others few codes. A
layer normalisation ends in a factor and a summand for each channel, and a linear layer reads the
result through a column of weights for each; for any positive `s`

    y[c] = n[c] * gamma[c] + beta[c],   z = W y   =   (W * s) (n * gamma / s + beta / s)

so `s[c] = max|y[c]|^share / max|W[:, c]|^(1 - share)` shares the range between both (Xiao et al.,
2023, eq. 4). Where others read `y` too, as the residual additions of most encoders do, they keep
the old one: the layer normalisation is done twice, with other constants. What a layer gives that
stays in float on the host (`keep_float`) is multiplied there, before it becomes codes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewright.ptq.peaks import channel_peaks
from tilewright.quant.graph import KEEP_FLOAT, layer_of, main_function, weight_name

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp
    from xdsl.ir import Operation, SSAValue

    from tilewright.ir.context import CompileContext

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float64]

STAGE = "smooth"

LARGEST_FACTOR = 2.0**6
"""Factors lie between its reciprocal and it: a channel that hardly ever fires is not known well
enough for more."""


@dataclass(frozen=True)
class Place:
    """A layer normalisation, or a float of the host, and the layers with weights that read it."""

    norm: Operation
    readers: tuple[Operation, ...]
    others: bool
    """Whether anything else reads it."""


def smooth(
    ctx: CompileContext,
    module: ModuleOp,
    samples: Iterable[Mapping[str, Array]],
    share: float = 0.5,
    float_share: float | None = None,
) -> int:
    """Smooth all layer normalisations of `@main` in place; return how many.

    Args:
        ctx: holds the weights, which are replaced, and the decision log.
        module: a fused float `top` module.
        samples: inputs by name; they give the largest magnitude of every channel.
        share: how much of the range goes into the weights, 0..1.
        float_share: the same of floats of the host; None: alike.
    """
    places = find_places(module)
    if not places:
        return 0
    peaks = channel_peaks(ctx, module, {place.norm: -1 for place in places}, samples)
    of_floats = share if float_share is None else float_share
    return sum(
        _smooth(
            ctx,
            place,
            peaks[place.norm],
            share if place.norm.name == "top.layer_norm" else of_floats,
        )
        for place in places
    )


def find_places(module: ModuleOp) -> list[Place]:
    """Return the layer normalisations of one axis, and the floats, that linear layers read."""
    users: dict[SSAValue, int] = {}
    ops = list(main_function(module).body.block.ops)
    for op in ops:
        for operand in op.operands:
            users[operand] = users.get(operand, 0) + 1
    found: list[Place] = []
    for op in ops:
        kept = KEEP_FLOAT in op.attributes and len(op.results) == 1
        norm = op.name == "top.layer_norm" and weight_name(op.operands[1]) is not None
        if not (kept or norm):
            continue
        shape: tuple[int, ...] = tuple(op.results[0].type.get_shape())  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]
        if not shape:
            continue
        channels = shape[-1]
        constants = [v for v in op.operands[1:3] if norm and weight_name(v) is not None]
        # Factors a channel need constants a channel, and only one normalised axis.
        if any(tuple(v.type.get_shape()) != (channels,) for v in constants):  # pyright: ignore[reportAttributeAccessIssue, reportUnknownArgumentType, reportUnknownMemberType]
            continue
        readers: list[Operation] = []
        others = False
        for use in op.results[0].uses:
            user = use.operation
            if use.index == 0 and _columns(user) == channels and users[user.operands[1]] == 1:
                readers.append(user)
            else:
                others = True
        if readers:
            # Uses come in the order of a set: that of the program is the same in every run.
            order = {item: index for index, item in enumerate(ops)}
            found.append(Place(op, tuple(sorted(readers, key=order.__getitem__)), others))
    return found


def _columns(op: Operation) -> int | None:
    """Return how many input channels a layer with a constant matrix reads, or None."""
    if op.name not in ("top.linear", "top.matmul") or weight_name(op.operands[1]) is None:
        return None
    shape: tuple[int, ...] = tuple(op.operands[1].type.get_shape())  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]
    if len(shape) != 2:
        return None
    return shape[1] if op.name == "top.linear" else shape[0]


def _smooth(ctx: CompileContext, place: Place, peaks: FloatArray, share: float) -> int:
    from xdsl.dialects.builtin import StringAttr

    layer = layer_of(place.norm)
    weight = np.zeros_like(peaks)
    for reader in place.readers:
        matrix = np.abs(_matrix(ctx, reader).astype(np.float64))
        weight = np.maximum(weight, matrix.max(axis=0))
    if not np.isfinite(peaks).all() or not (peaks > 0).any() or not (weight > 0).any():
        ctx.decide(layer, STAGE, False, "it is constant, or its readers' weights are zero")
        return 0
    alive = (peaks > 0) & (weight > 0)
    factor = np.ones_like(peaks)
    factor[alive] = peaks[alive] ** share / weight[alive] ** (1.0 - share)
    # Only ratios matter; around one, so that nothing overflows.
    factor[alive] /= np.exp(np.mean(np.log(factor[alive])))
    # Powers of two: the float function stays what it was, to the last bit.
    factor = np.exp2(np.rint(np.log2(np.clip(factor, 1 / LARGEST_FACTOR, LARGEST_FACTOR))))
    if (factor == factor[0]).all():
        ctx.decide(layer, STAGE, False, "its channels have like ranges")
        return 0
    norm = place.norm
    if norm.name != "top.layer_norm":
        _multiply(ctx, place, 1.0 / factor)
    elif place.others:
        twin = norm.clone()
        twin.attributes["name"] = StringAttr(f"{layer}/smooth")
        block = norm.parent
        assert block is not None
        block.insert_ops_after([twin], norm)
        for reader in place.readers:
            reader.operands[0] = twin.results[0]
        norm = twin
    for index in (1, 2) if norm.name == "top.layer_norm" else ():
        name = weight_name(norm.operands[index])
        if name is not None:
            array = ctx.weights.get(name)
            _replace(ctx, norm, index, f"{name}/smooth", (array / factor).astype(array.dtype))
    for reader in place.readers:
        name = weight_name(reader.operands[1])
        assert name is not None
        array = ctx.weights.get(name)
        scaled = array * (factor if reader.name == "top.linear" else factor[:, None])
        ctx.weights.set(name, scaled.astype(array.dtype))
    ctx.decide(
        layer,
        STAGE,
        True,
        f"channels from 1/{factor.max():g} to {1 / factor.min():g} times, into "
        f"{', '.join(layer_of(reader) for reader in place.readers)}",
    )
    return 1


def _multiply(ctx: CompileContext, place: Place, factor: FloatArray) -> None:
    """Let the readers of a float have it times a factor for each channel."""
    from xdsl.dialects.builtin import StringAttr, TensorType, f32

    from tilewright.dialects import top

    layer, value = layer_of(place.norm), place.norm.results[0]
    name = ctx.weights.add(f"{layer}/smooth.factor", factor.astype(np.float32))
    constant = top.create(
        top.WeightOp, [], name=name, result_types=[TensorType(f32, [factor.size])]
    )
    product = top.create(top.OPS["mul"], [value, constant.results[0]], {}, name=f"{layer}/smooth")
    product.attributes[KEEP_FLOAT] = StringAttr("smoothing of a float of the host")
    block = place.norm.parent
    assert block is not None
    block.insert_ops_after([constant, product], place.norm)
    for reader in place.readers:
        reader.operands[0] = product.results[0]


def _matrix(ctx: CompileContext, op: Operation) -> Array:
    """Return a layer's weights as `[out, in]`."""
    name = weight_name(op.operands[1])
    assert name is not None
    array = ctx.weights.get(name)
    return array if op.name == "top.linear" else array.T


def _replace(ctx: CompileContext, op: Operation, index: int, name: str, array: Array) -> None:
    """Give operand `index` of `op` a constant of its own."""
    from xdsl.dialects.builtin import StringAttr

    old = op.operands[index].owner
    from xdsl.ir import Operation

    assert isinstance(old, Operation)
    made = old.clone()
    made.attributes["name"] = StringAttr(ctx.weights.add(name, array))
    block = op.parent
    assert block is not None
    block.insert_ops_before([made], op)
    op.operands[index] = made.results[0]
