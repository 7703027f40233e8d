"""Compute ops of the affine level: which instructions each kind becomes."""

from __future__ import annotations

import math
from collections.abc import Callable

from xdsl.dialects.linalg.ops import GenericOp
from xdsl.ir import Operation, SSAValue
from xdsl.ir.affine import AffineConstantExpr, AffineDimExpr

from tilewright.diagnostics import TilewrightError
from tilewright.schedule.footprint import ConvForm
from tilewright.transforms.tpu import emit_conv, emit_rows, emit_vector
from tilewright.transforms.tpu.emitter import Emitter
from tilewright.transforms.tpu.nests import (
    ALIASES,
    INDICES,
    Nests,
    attr_float,
    attr_int,
    attr_ints,
    attr_str,
    ends_in_half,
    is_held,
    layer_of,
    root,
    value_bytes,
)
from tilewright.transforms.tpu.views import DdrBuffer, Tile, View

Thunk = Callable[[], None]
Values = dict[SSAValue, View]


class Forms:
    """How reductions are laid on the array, each (op, tile size) worked out once."""

    def __init__(self, nests: Nests) -> None:
        self.nests = nests
        self._known: dict[tuple[GenericOp, tuple[int, ...]], tuple[ConvForm, int]] = {}
        self._outputs: dict[tuple[GenericOp, int], ConvForm] = {}

    def of_weights(self, conv: GenericOp, weights: tuple[int, ...]) -> tuple[ConvForm, int]:
        """Return how a conv runs with a weight tile [o, i/group, kh, kw], and the pitch."""
        key = (conv, weights)
        if key not in self._known:
            self._known[key] = self.nests.form(conv, weights)
        return self._known[key]

    def of_output(self, conv: GenericOp, out_channels: int) -> ConvForm:
        """Return how a reduction runs that makes `out_channels` channels."""
        key = (conv, out_channels)
        if key not in self._outputs:
            self._outputs[key] = self.nests.form_of_output(conv, out_channels)
        return self._outputs[key]


class Compute:
    """Makes a thunk of every compute op: what is static is read once, tiles when it runs."""

    def __init__(
        self,
        emitter: Emitter,
        nests: Nests,
        values: Values,
        forms: Forms,
        make: Callable[[Operation], Thunk],
    ) -> None:
        self.make = make
        self.emitter = emitter
        self.nests = nests
        self.values = values
        self.forms = forms

    def thunk(self, op: GenericOp) -> Thunk:
        """Return what emits the instructions of `op` for the current tiles."""
        kind, layer = attr_str(op, "kind"), layer_of(op)
        make = {
            "conv": self._reduction,
            "sum": self._reduction,
            "requant": self._requant,
            "lut": self._lut,
            "eltwise": self._eltwise,
            "copy": self._copy_tile,
            "pool": self._pool,
            "resize": self._resize,
            "row": _nothing,
            "softmax": self._softmax,
            "layer_norm": self._layer_norm,
        }.get(kind)
        if make is None:
            raise TilewrightError("E0402", f'"{layer}": no instruction for kind `{kind}`')
        inner, emitter = make(op), self.emitter

        def run() -> None:
            emitter.layer = layer
            inner()

        return run

    def _reduction(self, op: GenericOp) -> Thunk:
        ones = attr_str(op, "kind") == "sum"
        x, target = op.inputs[0], op.outputs[0]
        wgt = op.inputs[1]
        window = attr_ints(op, "kernel", (1, 1))
        strides, dilations = attr_ints(op, "strides", (1, 1)), attr_ints(op, "dilations", (1, 1))
        layer = layer_of(op)
        acc = root(target).owner
        assert isinstance(acc, Operation)
        split = acc.parent is not op.parent

        def run() -> None:
            act, out = self.values[x], self.values[target]
            if ones:
                form, kernel = self.forms.of_output(op, out.sizes[-1]), window
                tile = self.nests.ones_tile(op, self.emitter)
            else:
                weights = self.values[wgt]
                form, _ = self.forms.of_weights(op, weights.sizes)
                kernel = weights.sizes[2:]
                assert isinstance(weights.buffer, Tile)
                tile = weights.buffer
            work = emit_conv.Reduction(
                layer, form, act, tile, ones, out, (kernel[0], kernel[1]),
                (strides[0], strides[1]), (dilations[0], dilations[1]),
                self.nests.gathered.get(op),
            )  # fmt: skip
            emit_conv.reduce(self.emitter, work, split)

        return run

    def _requant(self, op: GenericOp) -> Thunk:
        acc, bias, target = op.inputs[0], op.inputs[1], op.outputs[0]
        half = value_bytes(target) == 2
        codes = emit_conv.CodeEnd(
            attr_int(op, "zp", 0),
            *(0, 0) if half else (attr_int(op, "lo"), attr_int(op, "hi")),
            raw=value_bytes(target) == 4,
        )
        function, clamp = attr_str(op, "function"), clamp_of(op)
        user = self.nests.joining_of(op)
        join = self._join(user) if user is not None else None
        # Views of the joined op's operands may be made only behind this op.
        views: list[Thunk] = []
        between = op.next_op
        while user is not None and between is not None and between is not user:
            if between.name in (*ALIASES, *INDICES):
                views.append(self.make(between))
            between = between.next_op
        held = is_held(target)

        def run() -> None:
            if held:
                # A lookup in place changes these drains, not those of rows before.
                tile = self.values[target].buffer
                assert isinstance(tile, Tile)
                tile.drains.clear()
            view = self.values[bias]
            parameters = view.buffer
            assert isinstance(parameters, Tile)
            end: emit_conv.CodeEnd | emit_conv.HalfEnd = codes
            if half:
                # The blocks of this tile, which may be the last and smaller one.
                form = self.forms.of_output(self.nests.reduction_of(acc), view.sizes[-1])
                end = emit_conv.HalfEnd(function, clamp, form.blocks)
            for make_view in views:
                make_view()
            emit_conv.requantise(
                self.emitter, self.values[acc], parameters, id(parameters), self.values[target],
                end, join,
            )  # fmt: skip
            # Keep the tile alive: its identity is the key of what the registers hold.
            self.nests.keep.append(parameters)

        return run

    def _lut(self, op: GenericOp) -> Thunk:
        x, entries, y = op.inputs[0], op.inputs[1], op.outputs[0]
        fused = self.nests.fused_of(op) is not None

        def run() -> None:
            source, target = self.values[x], self.values[y]
            tile = self.values[entries].buffer
            assert isinstance(tile, Tile)
            assert tile.source is not None
            assert isinstance(tile.source.buffer, DdrBuffer)
            key = tile.source.buffer.name
            assert isinstance(source.buffer, Tile)
            if fused:
                emit_conv.fuse_table(self.emitter, source, key, tile, target)
                return
            held = self.emitter.table(key, tile)
            counts, steps = loops_of(op, [source, target])
            emit_vector.copy(self.emitter, source, target, (steps[0], steps[1]), counts, held=held)

        return run

    def _join(self, op: GenericOp) -> Callable[[int, int], None]:
        """Return what emits an elementwise op on some channels of freshly drained tiles."""
        emit = self._elementwise(op)
        operands, layer = (*op.inputs, op.outputs[0]), layer_of(op)

        def run(first: int, count: int) -> None:
            self.emitter.layer = layer
            emit([channels_of(self.values[value], first, count) for value in operands])

        return run

    def _eltwise(self, op: GenericOp) -> Thunk:
        if self.nests.joined_to(op) is not None:
            # It is emitted with the drains.
            return lambda: None
        operands = [*op.inputs, op.outputs[0]]
        emit = self._elementwise(op)

        def run() -> None:
            emit([self.values[value] for value in operands])

        return run

    def _elementwise(self, op: GenericOp) -> Callable[[list[View]], None]:
        """Return what emits an elementwise op on views of its operands and its result."""
        function = attr_str(op, "function")
        plain = function in ("max", "min") and value_bytes(op.outputs[0]) == 1
        rescale = None if plain else output_of(op)
        scalars = None if plain else self.nests.scalar_tile(op)

        def run(views: list[View]) -> None:
            counts, steps = loops_of(op, views)
            if len(views) == 2:
                views, steps = [views[0], *views], [steps[0], *steps]
            emit_vector.eltwise(
                self.emitter, function, views[0], views[1], views[2],
                (steps[0], steps[1], steps[2]), counts, rescale, scalars,
            )  # fmt: skip

        return run

    def _copy_tile(self, op: GenericOp) -> Thunk:
        x, y = op.inputs[0], op.outputs[0]
        changed = "shift" in op.attributes or ends_in_half(op)
        rescale = output_of(op) if changed else None
        scalars = self.nests.scalar_tile(op) if changed else None

        def run() -> None:
            source, target = self.values[x], self.values[y]
            counts, steps = loops_of(op, [source, target])
            emit_vector.copy(
                self.emitter, source, target, (steps[0], steps[1]), counts, rescale, scalars
            )

        return run

    def _pool(self, op: GenericOp) -> Thunk:
        x, y = op.inputs[0], op.outputs[0]
        kernel, strides = attr_ints(op, "kernel", (1, 1)), attr_ints(op, "strides", (1, 1))
        dilations = attr_ints(op, "dilations", (1, 1))

        def run() -> None:
            emit_vector.pool(
                self.emitter, self.values[x], self.values[y],
                (kernel[0], kernel[1]), (strides[0], strides[1]), (dilations[0], dilations[1]),
            )  # fmt: skip

        return run

    def _resize(self, op: GenericOp) -> Thunk:
        x, table_y, table_x = op.inputs[:3]
        y, rescale, scalars = op.outputs[0], rescale_of(op), self.nests.scalar_tile(op)

        def run() -> None:
            tables = (self.values[table_y].buffer, self.values[table_x].buffer)
            assert isinstance(tables[0], Tile)
            assert isinstance(tables[1], Tile)
            emit_vector.resize(
                self.emitter, self.values[x], (tables[0], tables[1]), self.values[y], rescale,
                scalars,
            )  # fmt: skip

        return run

    def _softmax(self, op: GenericOp) -> Thunk:
        x, entries, y = op.inputs[0], op.inputs[4], op.outputs[0]
        end = {key: attr_int(op, key) for key in ("shift", "zp", "lo", "hi")}
        end["multiplier"] = attr_int(op, "mult")

        def run() -> None:
            table = self.values[entries].buffer
            assert isinstance(table, Tile)
            emit_rows.softmax(self.emitter, self.values[x], self.values[y], table, end)

        return run

    def _layer_norm(self, op: GenericOp) -> Thunk:
        x, bias, y = op.inputs[0], op.inputs[5], op.outputs[0]
        end = {key: attr_int(op, key) for key in ("epsilon", "shift", "zp", "lo", "hi")}

        def run() -> None:
            parameters = self.values[bias].buffer
            assert isinstance(parameters, Tile)
            emit_rows.layer_norm(self.emitter, self.values[x], self.values[y], parameters, end)

        return run


def _nothing(op: GenericOp) -> Thunk:
    """Return what a pass over rows emits: the instruction of the last pass does them all."""
    del op
    return lambda: None


def loops_of(op: GenericOp, views: list[View]) -> tuple[list[int], list[list[int]]]:
    """Return counts of the loop dimensions and byte steps of every given operand."""
    maps = list(op.indexing_maps)
    maps = [*maps[: len(views) - 1], maps[-1]]
    rank = maps[-1].data.num_dims
    counts = [1] * rank
    steps: list[list[int]] = []
    for view, attribute in zip(views, maps, strict=True):
        dims: list[int | None] = []
        for axis, expr in enumerate(attribute.data.results):
            if isinstance(expr, AffineDimExpr):
                dims.append(expr.position)
                counts[expr.position] = max(counts[expr.position], view.sizes[axis])
            else:
                assert isinstance(expr, AffineConstantExpr), "only plain dimensions"
                dims.append(None)
        steps.append(emit_vector.operand_steps(view, dims, rank))
    return counts, steps


def channels_of(view: View, first: int, count: int) -> View:
    """Return some channels of a tile view [h, w, c]."""
    *outer, _ = view.sizes
    return View(view.buffer, view.offset + first, (*outer, count), view.strides)


def clamp_of(op: GenericOp) -> tuple[float, float]:
    """Return the bounds of a float clamp, infinite where there is none."""
    return attr_float(op, "lo", -math.inf), attr_float(op, "hi", math.inf)


def output_of(op: GenericOp) -> emit_vector.Rescale | emit_vector.HalfOutput:
    """Return what an elementwise op does to its value: by integers, or in float."""
    if value_bytes(op.outputs[0]) == 1:
        return rescale_of(op)
    function = attr_str(op, "function") if attr_str(op, "kind") == "copy" else ""
    return emit_vector.HalfOutput(function or "none", clamp_of(op))


def rescale_of(op: GenericOp) -> emit_vector.Rescale:
    """Return the integer parameters of an elementwise op."""
    return emit_vector.Rescale(
        attr_int(op, "mult_a", attr_int(op, "mult", 1)), attr_int(op, "mult_b", 0),
        attr_int(op, "shift", 0), attr_int(op, "bias", 0), attr_int(op, "bias_shift", 0),
        attr_int(op, "za", 0), attr_int(op, "zb", 0), attr_int(op, "zp", 0),
        attr_int(op, "lo", -128), attr_int(op, "hi", 127),
    )  # fmt: skip
