"""Units of the MAC array: reductions with what finishes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from xdsl.dialects import tensor
from xdsl.dialects.builtin import FloatAttr, StringAttr, f16, f32, i32
from xdsl.dialects.linalg.ops import GenericOp
from xdsl.ir import Attribute, Operation, Region, SSAValue

from tilewright.diagnostics import TilewrightError
from tilewright.dialects.quant import i4
from tilewright.ir.context import CompileContext
from tilewright.schedule.footprint import align
from tilewright.schedule.planner_items import constant_tiles
from tilewright.schedule.tiling import Choice, ConvProblem, ConvTiling, NoFit, choose_conv
from tilewright.spec.hardware import Hardware
from tilewright.transforms.affine import bodies, moves, vector
from tilewright.transforms.affine.convolution import ConvLayer, ConvNest, Join
from tilewright.transforms.affine.fusion import Joining, find_joining, joined
from tilewright.transforms.affine.held import Place, SramImage
from tilewright.transforms.affine.nest import view_of
from tilewright.transforms.affine.segment import (
    PASS,
    Buffers,
    element_of,
    item_bytes,
    number,
    numbers,
    out_of_memory,
    tensor_shape,
    text,
    values_of,
)
from tilewright.transforms.affine.units import Image, Reading, Strip, Tiling, Unit, Work
from tilewright.transforms.linalg.half import HalfOutput
from tilewright.transforms.linalg.rounding import Output

Shape = tuple[int, int, int, int]
MAX_PADDING = 255
"""Rows or columns of padding one DMA writes."""
INEXACT = ("exp",)
"""Functions that enlarge the rounding of their operand: leaving it out would be another result."""


@dataclass(frozen=True)
class ConvWork:
    """A layer of the MAC array: how its nest is built."""

    layer: str
    problem: ConvProblem
    source: SSAValue
    x_shape: Shape
    y_shape: Shape
    weights: Callable[[Buffers], SSAValue]
    pads: tuple[int, int]
    zero: float
    reduce: GenericOp
    op: GenericOp
    """The requantisation."""
    requant: Callable[[], Region]
    attributes: dict[str, Attribute]
    lut: GenericOp | None
    joining: Joining | None
    result: SSAValue
    producer: Operation

    def alone(
        self,
        buffers: Buffers,
        tiling: Tiling | None,
        sources: Sequence[SramImage | None],
        target: SramImage | None,
    ) -> None:
        """Append the nest."""
        assert tiling is None or isinstance(tiling, ConvTiling)
        nest = buffers.nest
        names = ("input", *(["second"] if self.problem.second else []), "output")
        places = zip(names, (*sources[: len(names) - 1], target), strict=True)
        held = tuple(name for name, place in places if place is not None)
        work = self if sources[0] else replace(self, problem=self.problem.as_loaded())
        tiling = work._choose(buffers, tiling, held)
        x = sources[0] or self._in_ddr(buffers)
        layer = work._layer(buffers, tiling, x)
        y = target or buffers.target(self.result, self.producer, self.y_shape)
        other = None
        if self.joining is not None:
            second = self.joining.other
            other = sources[1] or nest.reshape(buffers.of(second), self.y_shape)
        ConvNest(nest, layer(y, other)).emit(buffers.kept.get(self.op))

    def keep(self, buffers: Buffers, tiling: Tiling | None, reserved: int) -> None:
        """Append constants that stay for the whole program."""
        if tiling is None:
            problem = self.problem.as_loaded()
            choice = choose_conv(buffers.hardware, problem, reserved)
            if isinstance(choice, NoFit):
                raise no_tiling(self.layer, choice, buffers.hardware)
            tiling = buffers.tilings[self.op] = choice.tiling
        assert isinstance(tiling, ConvTiling)
        buffers.nest.layer = self.layer
        once = replace(tiling, weight_slots=1)
        made = ConvNest(buffers.nest, self._layer(buffers, once, self.source)(self.result, None))
        made.load_constants(stay=True)
        buffers.kept[self.op] = made.ranges
        tiles = f"{len(made.ranges)} tile{'s' if len(made.ranges) > 1 else ''}"
        reason = f"its weights and parameters are loaded once and stay in SRAM, in {tiles}"
        buffers.context.decide(self.layer, PASS, True, reason)

    def _in_ddr(self, buffers: Buffers) -> SSAValue:
        """Return the input in DDR; of one that is mostly passed over, the pixels that are used."""
        nest, problem = buffers.nest, self.problem
        x = nest.reshape(buffers.of(self.source), self.x_shape)
        if not problem.skips:
            return x
        sizes = [self.x_shape[0], problem.out_rows, problem.out_columns, problem.in_channels]
        return nest.view(view_of(x), [0] * 4, sizes, strides=[1, *problem.strides, 1]).value

    def begin(self, buffers: Buffers, tiling: Tiling) -> Strip:
        """Append what all rows share; returns what appends some rows."""
        assert isinstance(tiling, ConvTiling)
        buffers.nest.layer = self.layer
        values = (self.source, self.result)
        other = self.joining.other if self.joining is not None else None
        made = ConvNest(buffers.nest, self._layer(buffers, tiling, values[0])(values[1], other))
        kept = buffers.kept.get(self.op)
        if kept is None:
            made.load_constants()
        else:
            made.take_constants(kept)

        def strip(first: int, last: int, sources: Sequence[SramImage], target: SramImage) -> None:
            made.strip(first, last, sources[0], target, sources[1] if other is not None else None)

        return strip

    def _layer(
        self, buffers: Buffers, tiling: ConvTiling, x: Place
    ) -> Callable[[Place, Place | None], ConvLayer]:
        """Return what makes the layer from the places of its result and of what is joined to it."""
        parameters = buffers.parameters.get(self.op) or tuple(
            buffers.of(value) for value in self.op.inputs[1:4]
        )
        weights = self.weights(buffers) if self.problem.kind == "conv" else None
        lut, joining = self.lut, self.joining

        def made(y: Place, other: Place | None) -> ConvLayer:
            join = None
            if joining is not None and other is not None:
                attributes, label = vector.scalars(joining.op), text(joining.op, "layer")
                join = Join(joining.op, label, other, joining.first, attributes)
            return ConvLayer(
                self.layer,
                self.problem,
                tiling,
                x,
                weights,
                parameters,
                y,
                self.pads,
                self.zero,
                self.reduce,
                self.requant,
                self.attributes,
                (element_of(self.source), element_of(self.result)),
                lut,
                buffers.of(vector.table_of(lut)) if lut is not None else None,
                text(lut, "layer") if lut is not None else "",
                join,
            )

        return made

    def _choose(
        self, buffers: Buffers, tiling: ConvTiling | None, held: tuple[str, ...]
    ) -> ConvTiling:
        """Return the plan's tiling, or the best by itself; log it."""
        problem, hardware = self.problem, buffers.hardware
        choice = None
        if tiling is None:
            tiling = buffers.tilings.get(self.op)
        if tiling is None:
            choice = choose_conv(hardware, problem, buffers.held_bytes)
        elif buffers.apart:
            # The plan has asked just this: the answer is known.
            choice = choose_conv(hardware, problem)
        if tiling is not None and not (isinstance(choice, Choice) and choice.tiling == tiling):
            tiles = tiling.buffers(hardware, replace(problem, held=held))
            size = sum(tile.slots * tile.size_bytes for tile in tiles)
            buffers.decide(self.layer, tiling.describe(problem), None, size)
            return tiling
        assert choice is not None
        if isinstance(choice, NoFit):
            raise no_tiling(self.layer, choice, hardware)
        other = choice.runner_up
        buffers.decide(
            self.layer,
            choice.tiling.describe(problem),
            choice.cycles,
            choice.sram_bytes,
            other.describe(problem) if other else "",
            choice.runner_up_cycles,
        )
        return choice.tiling


def no_tiling(layer: str, answer: NoFit, hardware: Hardware) -> TilewrightError:
    """Return the error for a layer that has no tiling."""
    if answer.buffers:
        return out_of_memory(layer, answer.buffers, answer.needed_bytes, hardware)
    return TilewrightError(
        "E0402", f'layer "{layer}" cannot be mapped to `{hardware.name}`', [answer.reason]
    )


@dataclass
class Reductions:
    """Makes units of a function's reductions."""

    context: CompileContext
    target: Hardware
    fuse: bool
    returned: set[SSAValue]
    order: Mapping[Operation, int]
    keep: Callable[[str], bool]
    """Whether the constants of a layer shall stay in SRAM."""
    constants: set[str] = field(default_factory=set[str])
    """Layers that have constants."""
    fused: set[Operation] = field(default_factory=set[Operation])
    """Ops that became part of a unit."""

    def unit(self, op: GenericOp) -> Unit:
        """Return the unit of a requantisation: with the reduction before it, and what follows."""
        acc = op.inputs[0]
        if isinstance(acc.owner, tensor.CollapseShapeOp):
            acc = acc.owner.operands[0]
        reduce = acc.owner
        assert isinstance(reduce, GenericOp)
        layer = text(op, "layer")
        if text(reduce, "kind") not in ("conv", "sum", "matmul"):
            raise no_instruction(reduce)
        result, lut = op.results[0], None
        if element_of(result) == f16:
            requant, attributes, producer = self._half_end(op)
        else:
            requant, attributes, lut = self._code_end(op)
            producer = lut or op
        if producer is not op:
            self.fused.add(producer)
            result = producer.results[0]
        source, pad = unpadded(reduce)
        problem, x_shape, y_shape, weights = self._problem(reduce, op, source, lut is not None)
        if problem.kind == "conv" and problem.kernel == (1, 1) and pad is None:
            problem = replace(problem, skips=max(problem.strides) > 1)
        if problem.kind == "conv" and text(reduce, "kind") != "matmul":
            self.constants.add(layer)
            problem = replace(problem, kept=self.keep(layer))
        joining = self._joining(result, op, layer)
        if joining is not None:
            wider, reason = joined(self.target, problem, joining)
            if wider is None:
                self._apart(joining.op, layer, reason)
                joining = None
            else:
                problem, producer = wider, joining.op
                result = producer.results[0]
                self.fused.add(producer)
                self.context.decide(
                    text(producer, "layer"), PASS, True, f"joins the nest of {layer}"
                )
        low = values_of(pad.static_low) if pad is not None else (0, 0, 0, 0)
        high = values_of(pad.static_high) if pad is not None else (0, 0, 0, 0)
        if max(*low, *high) > MAX_PADDING:
            raise TilewrightError(
                "E0402",
                f'layer "{layer}" cannot run on the chip',
                [f"it is padded by {max(*low, *high)}; the chip pads {MAX_PADDING}"],
            )
        work = ConvWork(
            layer,
            problem,
            source,
            x_shape,
            y_shape,
            weights,
            (low[1], low[2]) if pad is not None else (0, 0),
            moves.pad_value(pad) if pad is not None else 0,
            reduce,
            op,
            requant,
            attributes,
            lut,
            joining,
            result,
            producer,
        )
        why = ""
        if text(reduce, "kind") == "matmul":
            why = "it multiplies two activations"
        elif problem.batch > 1:
            why = f"it has {problem.batch} images"
        image: Image = y_shape[1:]
        reads = [_reading(work)]
        if text(reduce, "kind") == "matmul":
            reads.append(Reading(reduce.inputs[1], (0, 0, 0), whole=True))
        if joining is not None:
            reads.append(Reading(joining.other, image))
        return Unit(
            layer,
            tuple(reads),
            result,
            producer,
            Work(work.alone, work.begin, work.keep if problem.kept else None),
            None if why else problem,
            image=image,
            strided=y_shape == tensor_shape(result),
            kept_bytes=self._kept_bytes(problem, layer) if problem.kept else 0,
            why_opaque=why,
        )

    def _kept_bytes(self, problem: ConvProblem, layer: str) -> int:
        """Return the SRAM of constants that stay, of the best tiling by itself."""
        choice = choose_conv(self.target, problem.as_loaded())
        if isinstance(choice, NoFit):
            raise no_tiling(layer, choice, self.target)
        count, *sizes = constant_tiles(self.target, problem.as_loaded(), choice.tiling)
        return count * sum(align(size, self.target.sram_word_bytes) for size in sizes)

    def _joining(self, result: SSAValue, op: GenericOp, layer: str) -> Joining | None:
        """Return the elementwise operation that could be part of the nest that makes `result`."""
        if not self.fuse or result in self.returned:
            return None

        def log(user: GenericOp, reason: str) -> None:
            self._apart(user, layer, reason)

        return find_joining(result, self.order[op], self.order, log)

    def _apart(self, user: GenericOp, layer: str, reason: str) -> None:
        self.context.decide(
            text(user, "layer"), PASS, False, f"does not join the nest of {layer}: {reason}"
        )

    def _code_end(
        self, op: GenericOp
    ) -> tuple[Callable[[], Region], dict[str, Attribute], GenericOp | None]:
        """Return body and attributes of a requantisation, and the lookup fused to it.

        Raises:
            TilewrightError: E0501, it rounds as another chip does.
        """
        rounding = text(op, "rounding")
        if rounding != self.target.rounding:
            raise TilewrightError(
                "E0501",
                f'layer "{text(op, "layer")}" was quantised for another chip',
                [f"it rounds {rounding}; `{self.target.name}` rounds {self.target.rounding}"],
            )
        output = Output(number(op, "zp"), number(op, "lo"), number(op, "hi"), rounding)
        attributes = {key: op.attributes[key] for key in ("zp", "lo", "hi")}
        lut = self._only_user(op, "lut")
        if lut is not None:
            self._applied(lut, op)
        if element_of(op.results[0]) == i32:
            return bodies.sum_with_bias, attributes, lut
        return bodies.requantising(output), attributes, lut

    def _half_end(
        self, op: GenericOp
    ) -> tuple[Callable[[], Region], dict[str, Attribute], GenericOp]:
        """Return body and attributes of the end of float sums, and the op whose result it makes.

        A function or clamp that is the only user of the result is applied to the float32 value,
        before its rounding.
        """
        output, last = HalfOutput.of_tags(op), op
        user = self._only_user(op, "copy")
        if user is not None and "function" in user.attributes:
            own = HalfOutput.of_tags(user)
            if output.clamps or own.function in INEXACT:
                reason = "the layer before clamps" if output.clamps else "it enlarges rounding"
                self.context.decide(
                    text(user, "layer"),
                    PASS,
                    False,
                    f"not applied by {text(op, 'layer')}: {reason}",
                )
            else:
                output, last = own, user
                self._applied(user, op)
        attributes: dict[str, Attribute] = {
            key: FloatAttr(value, f32) for key, value in output.tags.items()
        }
        attributes["function"] = StringAttr(output.function)
        return lambda: bodies.rounding_to_half(output), attributes, last

    def _applied(self, user: GenericOp, op: GenericOp) -> None:
        self.context.decide(text(user, "layer"), PASS, True, f"applied by {text(op, 'layer')}")

    def _only_user(self, op: GenericOp, kind: str) -> GenericOp | None:
        """Return the result's only user, if it is of `kind` and the function keeps it inside."""
        value = op.results[0]
        users = [use.operation for use in value.uses]
        if value in self.returned or len(users) != 1:
            return None
        user = users[0]
        if not isinstance(user, GenericOp) or text(user, "kind") != kind:
            return None
        return user

    def _problem(
        self, reduce: GenericOp, op: GenericOp, source: SSAValue, table: bool
    ) -> tuple[ConvProblem, Shape, Shape, Callable[[Buffers], SSAValue]]:
        """Return sizes, x and y as [n, h, w, c], and what gives the weights as [o, i, kh, kw]."""
        kind, y = text(reduce, "kind"), tensor_shape(op.results[0])
        if kind == "matmul":
            return self._product(reduce, op, y, table)
        x = tensor_shape(source)
        if kind == "conv" and text(reduce, "layout") == "rows":
            rows = prod(x[:-1])
            x, y = (1, 1, rows, x[-1]), (1, 1, rows, y[-1])
        else:
            need_nhwc(reduce)
            x, y = (x[0], x[1], x[2], x[3]), (y[0], y[1], y[2], y[3])
        strides = _pair(numbers(reduce, "strides"))
        dilations, group = (1, 1), y[3]
        base = reduce.inputs[1]
        if kind == "conv":
            if isinstance(base.owner, tensor.ExpandShapeOp):
                base = base.owner.operands[0]
            shape = tensor_shape(base)
            group = number(reduce, "group")
            kernel = (shape[2], shape[3]) if len(shape) == 4 else (1, 1)
            dilations = _pair(numbers(reduce, "dilations"))
            shape = (*shape, 1, 1)[:4]
        else:
            kernel, shape = _pair(numbers(reduce, "kernel")), ()
        problem = ConvProblem(
            kind, x[0], x[1], x[2], x[3], y[1], y[2], y[3], kernel, strides, dilations, group,
            table, element_bytes=item_bytes(source), output_bytes=item_bytes(op.results[0]),
            half_bytes=kind == "conv" and element_of(base) == i4,
        )  # fmt: skip
        return problem, x, y, lambda buffers: buffers.nest.reshape(buffers.of(base), shape)

    def _product(
        self, reduce: GenericOp, op: GenericOp, y: tuple[int, ...], table: bool
    ) -> tuple[ConvProblem, Shape, Shape, Callable[[Buffers], SSAValue]]:
        """As `_problem`, for a product of two activations: the right one takes the weights' place.

        Raises:
            TilewrightError: E0402, zero points (they would need sums of both operands), or batches
            that broadcast along some axes only.
        """
        left, right = (tensor_shape(value) for value in reduce.inputs)
        zeros = [number(reduce, key) for key in ("za", "zb")]
        images = [prod(left[:-2]), prod(right[:-2])]
        batch = prod(y[:-2])
        if any(zeros) or any(count not in (1, batch) for count in images):
            why = f"its operands have zero points {zeros[0]} and {zeros[1]}; the chip needs 0"
            if not any(zeros):
                why = f"it broadcasts {list(left)} against {list(right)} along some axes only"
            raise TilewrightError(
                "E0402", f'layer "{text(reduce, "layer")}" cannot run on the chip', [why]
            )
        rows, depth, columns = y[-2], left[-1], y[-1]
        problem = ConvProblem(
            "conv", batch, 1, rows, depth, 1, rows, columns, (1, 1),
            table=table, batched_weights=images[1] > 1, computed_weights=True,
            element_bytes=item_bytes(reduce.inputs[0]), output_bytes=item_bytes(op.results[0]),
        )  # fmt: skip

        def weights(buffers: Buffers) -> SSAValue:
            dense = buffers.nest.reshape(buffers.of(reduce.inputs[1]), [images[1], depth, columns])
            return buffers.nest.transposed(dense, (0, 2, 1), 2)

        return problem, (images[0], 1, rows, depth), (batch, 1, rows, columns), weights


def _reading(work: ConvWork) -> Reading:
    """Return which rows of its image a layer reads for a row of its result."""
    problem = work.problem
    extents = [
        (kernel - 1) * dilation + 1
        for kernel, dilation in zip(problem.kernel, problem.dilations, strict=True)
    ]
    outs, ins = (
        (problem.out_rows, problem.out_columns),
        (problem.in_rows, problem.in_columns),
    )
    after = [
        max(0, (out - 1) * stride + extent - before - full)
        for out, stride, extent, before, full in zip(
            outs, problem.strides, extents, work.pads, ins, strict=True
        )
    ]
    return Reading(
        work.source,
        work.x_shape[1:],
        problem.strides[0],
        extents[0],
        work.pads[0],
        pads=(*work.pads, after[0], after[1]),
        fill=work.zero,
    )


def no_instruction(op: GenericOp) -> TilewrightError:
    """Return the error for an op that the chip has nothing for."""
    return TilewrightError(
        "E0402",
        f'layer "{text(op, "layer")}" cannot run on the chip',
        [f"there is no instruction for `{text(op, 'kind') or text(op, 'role')}`"],
        "leave it to the host",
    )


def unpadded(op: GenericOp) -> tuple[SSAValue, tensor.PadOp | None]:
    """Return the image a window operation reads, before padding and grouping, and its padding."""
    value, layer = op.inputs[0], text(op, "layer")
    if isinstance(value.owner, tensor.ExpandShapeOp) and text(value.owner, "layer") == layer:
        value = value.owner.operands[0]
    if isinstance(value.owner, tensor.PadOp) and text(value.owner, "layer") == layer:
        return value.owner.source, value.owner
    return value, None


def need_nhwc(op: GenericOp) -> None:
    """Refuse an op on images of another layout (E0403)."""
    if text(op, "layout") != "nhwc":
        raise TilewrightError(
            "E0403",
            f'layer "{text(op, "layer")}" has layout {text(op, "layout")}; the chip stores nhwc',
            hint="run top-assign-layout before quantisation",
        )


def _pair(values: tuple[int, ...]) -> tuple[int, int]:
    return values[0], values[1]
