"""`top-replace-dynamic`: products with scales found at run time become float layers.

    %q, %s, %z = top.dynamic_quantize_linear %x
    %i = top.matmul_integer %q, %codes, %z, %zero
    %f = top.cast %i
    %y = top.mul %f, (top.mul %s, %c)
  becomes
    %w = top.dequantize_linear %codes, %c, %zero
    %y = top.matmul %x, %w

A chip's scales are fixed when the model is compiled. Without calibration data these operations stay
on the host, exactly as ONNX defines them; with it (`calibrated`) the float layer they approximate
is quantised with calibrated ranges, and its weights keep the model's own codes. The results are not
those of the dynamic model, bit for bit: the log names every layer it was done for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue
from xdsl.passes import ModulePass

from tilewright.dialects import top
from tilewright.ir.weights import Array
from tilewright.transforms.top.graph import Graph, element_of, shape_of

RUN_TIME = "its scale is found at run time; with calibration data it would be a layer of the chip"


@dataclass(frozen=True)
class ReplaceDynamicPass(ModulePass):
    """Write dynamically quantised layers as float layers with the codes of their weights."""

    name = "top-replace-dynamic"

    calibrated: bool = False
    """Ranges will be calibrated; without, the operations stay on the host."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Run the pass."""
        graph = Graph(ctx, op, self.name)
        for layer in graph.layers():
            if not isinstance(layer, top.MatmulIntegerOp | top.ConvIntegerOp):
                continue
            if not self.calibrated:
                graph.set(layer, host=RUN_TIME)
                graph.refused(layer.layer_name, RUN_TIME)
                continue
            found = _match(graph, layer)
            if isinstance(found, str):
                graph.set(layer, host=found)
                graph.refused(layer.layer_name, found)
            else:
                _replace(graph, layer, found)


@dataclass(frozen=True)
class _Layer:
    """A dynamically quantised layer."""

    x: SSAValue
    codes: SSAValue
    zero: Array
    scale: Array
    """Of the weights: rank 0, or one a channel of the result."""
    last: top.TopOp
    """What gives the layer's float result."""


def _match(graph: Graph, op: top.TopOp) -> _Layer | str:
    """Find the quantiser before and the products behind a product of integers."""
    quantiser = op.operands[0].owner
    if not isinstance(quantiser, top.DynamicQuantizeLinearOp):
        return "its operand is not quantised dynamically: it has no scale"
    if op.operands[2] is not quantiser.zero or op.operands[0] is not quantiser.codes:
        return "its zero point is not the one its operand was quantised with"
    codes = graph.array(op.operands[1])
    if codes is None:
        return "its weights are computed at run time"
    zero: Array | None = np.zeros((), codes.dtype)
    if not top.is_absent(op.operands[3]):
        zero = graph.array(op.operands[3])
    if zero is None:
        return "the zero point of its weights is computed at run time"
    use = op.results[0].get_unique_use()
    if use is None or not isinstance(use.operation, top.CastOp):
        return "its sums are used as integers"
    if str(element_of(use.operation.results[0])) != "f32":
        return "its sums are used as integers"
    factors: list[Array] = []
    scaled, last = False, use.operation
    while (use := last.results[0].get_unique_use()) and isinstance(use.operation, top.MulOp):
        found = _factors(graph, use.operation.operands[1 - use.index], quantiser.scale)
        if found is None or (scaled and found[1]):
            break
        factors, scaled, last = [*factors, *found[0]], scaled or found[1], use.operation
        if scaled and factors:
            break
    if not scaled:
        return "its sums are not multiplied by the scale of its operand"
    scale = _channels(op, factors)
    if scale is None:
        return "the scales of its weights are not one a channel"
    channels = codes.shape[0 if isinstance(op, top.ConvIntegerOp) else -1]
    if zero.size not in (1, channels):
        return "it has more zero points than scales"
    return _Layer(quantiser.x, op.operands[1], zero, scale, last)


def _factors(graph: Graph, value: SSAValue, dynamic: SSAValue) -> tuple[list[Array], bool] | None:
    """Return the constants in a factor, and whether the dynamic scale is in it."""
    if value is dynamic:
        return [], True
    array = graph.array(value)
    if array is not None:
        return [array], False
    if isinstance(value.owner, top.MulOp):
        parts = [_factors(graph, operand, dynamic) for operand in value.owner.operands]
        if None not in parts:
            arrays = [array for part in parts if part for array in part[0]]
            return arrays, any(part[1] for part in parts if part)
    return None


def _channels(op: top.TopOp, factors: list[Array]) -> Array | None:
    """Return the product of the constants, if it varies along the result's channels only."""
    shape = shape_of(op.results[0])
    axis = 1 if isinstance(op, top.ConvIntegerOp) else len(shape) - 1
    product = np.ones((), np.float32)
    for factor in factors:
        product = product * factor.astype(np.float32)
    if product.size == 1:
        return product.reshape(())
    full = (1,) * (len(shape) - product.ndim) + product.shape
    if len(full) != len(shape):
        return None
    if any(dim != 1 for place, dim in enumerate(full) if place != axis):
        return None
    return product.reshape(-1) if full[axis] == shape[axis] else None


def _replace(graph: Graph, op: top.TopOp, layer: _Layer) -> None:
    name = op.layer_name
    single = layer.scale.ndim == 0 and layer.zero.size == 1
    count = () if single else (max(layer.scale.size, layer.zero.size),)
    scales = np.array(np.broadcast_to(layer.scale.astype(np.float32), count))
    zeros = np.array(np.broadcast_to(layer.zero.reshape(() if single else -1), count))
    scale = graph.weight(f"{name}/weight_scale", scales, op)
    zero = graph.weight(f"{name}/weight_zero", zeros, op)
    convolution = isinstance(op, top.ConvIntegerOp)
    axis = 0 if convolution else len(shape_of(layer.codes)) - 1
    weights = graph.insert(
        top.DequantizeLinearOp,
        [layer.codes, scale, zero],
        {} if single else {"axis": axis},
        name=graph.fresh(f"{name}/weights"),
        before=op,
    )
    if convolution:
        keys = ("strides", "pads", "dilations", "group")
        attributes = {key: op.attributes[key] for key in keys}
        operands = [layer.x, weights, graph.none(op)]
        value = graph.insert(top.ConvOp, operands, attributes, name=name, before=op)
    else:
        value = graph.insert(top.MatmulOp, [layer.x, weights], name=name, before=op)
    assert isinstance(value.owner, top.TopOp)
    graph.absorb(value.owner, layer.last)
    graph.fired(
        name,
        "scales found at run time are replaced by a calibrated range",
        warning=f"`{name}`: the model finds the scale of its input at run time; it gets a "
        "calibrated one, so that results differ from the dynamic model's",
    )
    graph.replace(layer.last, value)
