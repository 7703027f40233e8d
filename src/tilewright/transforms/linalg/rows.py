"""Lower `quant.softmax` and `quant.layer_norm`: a few passes over every row, in exact integers.

A row is the last axis (layer normalisation: several, merged). Passes that give one number a row
are ops of kind `"row"`; the last one, of kind `"softmax"` or `"layer_norm"`, gives the elements::

    softmax:     M = max(q);  S = sum(E[M - q]);  R = floor(m * 2^k / S);  (E[M - q] * R) >> t
    layer_norm:  S1, S2 = sum(q), sum(q*q);  W;  R = 1 / sqrt(W);  z = (n*q - S1) * R;  z*g + B

`docs/concepts/numerics.md`, "Rows", has the definition and why no sum overflows.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects import arith, math, tensor
from xdsl.dialects.builtin import IndexType, IntegerType, i8, i16, i32, i64
from xdsl.ir import Operation, SSAValue
from xdsl.ir.affine import AffineMap

from tilewright.dialects.quant import shape_of
from tilewright.transforms.linalg.attributes import integer
from tilewright.transforms.linalg.emit import Body, BodyFunction, Emitter, affine_map, dims, tag

ROOT_BITS = 16
"""Bits of the square root of a normalised variance."""


def lower_softmax(emit: Emitter, op: Operation, operands: list[SSAValue]) -> SSAValue:
    """Lower a `quant.softmax`; `operands` are the codes and the table `tensor<256xi16>`."""
    source, table = operands
    mult, shift = integer(op, "mult"), integer(op, "shift")
    alone = len(shape_of(source)) == 1
    if alone:
        source = emit.expand(source, [[1, *shape_of(source)]])
    passes = _Passes(emit, source)

    def largest(body: Body) -> SSAValue:
        return body.larger(body.args[0], body.args[1])

    def power(body: Body, kind: IntegerType) -> SSAValue:
        code, most = (body.extend(value, i32) for value in body.args[:2])
        position = body.add(arith.IndexCastOp(body.minus(most, code), IndexType()))
        entry = body.add(tensor.ExtractOp(table, [position], i16))
        return body.add(arith.ExtUIOp(entry, kind))

    def add_power(body: Body) -> SSAValue:
        return body.plus(body.args[2], power(body, i32))

    def reciprocal(body: Body) -> SSAValue:
        total = body.extend(body.args[0], i64)
        numerator = _shift_left(body, body.constant(mult, i64), _bits(body, total))
        quotient = body.add(arith.DivUIOp(numerator, total))
        return body.add(arith.TruncIOp(quotient, i32))

    def finish(body: Body) -> SSAValue:
        total, scale = (body.extend(value, i64) for value in body.args[2:4])
        amount = body.plus(_bits(body, total), body.constant(shift, i64))
        one = body.constant(1, i64)
        half = _shift_left(body, one, body.minus(amount, one))
        product = body.plus(body.times(power(body, i64), scale), half)
        return _code(body, op, body.add(arith.ShRSIOp(product, amount)))

    most = passes.reduce([source], -128, i8, largest)
    total = passes.reduce([source, most], 0, i32, add_power)
    scale = passes.each([total], i32, reciprocal)
    result = passes.elements([source, most, total, scale], finish)
    tag(result, "softmax", {"mult": mult, "shift": shift, **_end(op)})
    return emit.collapse(result, [2]) if alone else result


def lower_layer_norm(emit: Emitter, op: Operation, operands: list[SSAValue]) -> SSAValue:
    """Lower a `quant.layer_norm`; `operands` are the codes, gain and bias of every element."""
    source, gain, bias = operands
    shape, axis = shape_of(source), integer(op, "axis")
    epsilon, shift = integer(op, "epsilon"), integer(op, "shift")
    merged = len(shape) - axis
    if merged > 1:
        source = emit.collapse(source, [*([1] * axis), merged])
    alone = axis == 0
    if alone:
        source = emit.expand(source, [[1, *shape_of(source)]])
    count = shape_of(source)[-1]
    passes = _Passes(emit, source)

    def add_code(body: Body) -> SSAValue:
        return body.plus(body.args[1], body.extend(body.args[0], i32))

    def add_square(body: Body) -> SSAValue:
        code = body.extend(body.args[0], i32)
        return body.plus(body.args[1], body.times(code, code))

    def spread(body: Body) -> SSAValue:
        total, squares = (body.extend(value, i64) for value in body.args[:2])
        value = body.minus(body.times(squares, body.constant(count, i64)), body.times(total, total))
        value = _shift_left(body, value, body.constant(8, i64))
        return body.plus(value, body.constant(epsilon, i64))

    def reciprocal(body: Body) -> SSAValue:
        value = body.args[0]
        bits = _even_bits(body, value)
        # Two shifts, of which one is by nothing: to 32 bits from below or from above.
        up = body.larger(body.minus(body.constant(32, i64), bits), body.constant(0, i64))
        down = body.larger(body.minus(bits, body.constant(32, i64)), body.constant(0, i64))
        value = body.add(arith.ShRSIOp(_shift_left(body, value, up), down))
        quotient = body.add(arith.DivUIOp(body.constant(1 << 31, i64), _root(body, value)))
        quotient = body.smaller(quotient, body.constant(65535, i64))
        return body.add(arith.TruncIOp(quotient, i32))

    def finish(body: Body) -> SSAValue:
        code, total, value, scale, factor, addend = (
            body.extend(item, i64) for item in body.args[:6]
        )
        centred = body.minus(body.times(code, body.constant(count, i64)), total)
        half = body.add(arith.ShRSIOp(_even_bits(body, value), body.constant(1, i64)))
        amount = body.larger(body.minus(half, body.constant(4, i64)), body.constant(0, i64))
        normal = body.add(arith.ShRSIOp(body.times(centred, scale), amount))
        result = body.plus(body.times(normal, factor), addend)
        return _code(body, op, body.add(arith.ShRSIOp(result, body.constant(shift, i64))))

    total = passes.reduce([source], 0, i32, add_code)
    squares = passes.reduce([source], 0, i32, add_square)
    value = passes.each([total, squares], i64, spread)
    scale = passes.each([value], i32, reciprocal)
    result = passes.elements([source, total, value, scale], finish, [gain, bias])
    tag(result, "layer_norm", {"epsilon": epsilon, "shift": shift, **_end(op)})
    if alone:
        result = emit.collapse(result, [2])
    if merged > 1:
        result = emit.expand(result, [*([size] for size in shape[:axis]), list(shape[axis:])])
    return result


class _Passes:
    """Builds passes over the rows of one tensor, of rank 2 or more."""

    def __init__(self, emit: Emitter, source: SSAValue) -> None:
        self.emit = emit
        self.shape = shape_of(source)
        space = dims(len(self.shape))
        self.whole = affine_map(len(space), space)
        self.rows = affine_map(len(space), space[:-1])
        self.columns = affine_map(len(space), space[-1:])

    def _operand(self, value: SSAValue) -> tuple[SSAValue, AffineMap]:
        return value, self.whole if shape_of(value) == self.shape else self.rows

    def reduce(
        self, inputs: Sequence[SSAValue], start: int, kind: IntegerType, body: BodyFunction
    ) -> SSAValue:
        """Append a reduction of every row; the body's last argument is what was reduced so far."""
        result = self.emit.generic(
            "row",
            [self._operand(value) for value in inputs],
            (self.emit.filled(start, self.shape[:-1], kind), self.rows),
            body,
            reductions=(len(self.shape) - 1,),
        )
        return tag(result, "row", {})

    def each(self, inputs: Sequence[SSAValue], kind: IntegerType, body: BodyFunction) -> SSAValue:
        """Append an op on numbers of rows."""
        identity = AffineMap.identity(len(self.shape) - 1)
        pairs = [(value, identity) for value in inputs]
        return tag(self.emit.elementwise("row", pairs, self.shape[:-1], kind, body), "row", {})

    def elements(
        self,
        inputs: Sequence[SSAValue],
        body: BodyFunction,
        vectors: Sequence[SSAValue] = (),
    ) -> SSAValue:
        """Append the op that gives the codes; `vectors` have one number a column."""
        pairs = [self._operand(value) for value in inputs]
        pairs += [(value, self.columns) for value in vectors]
        return self.emit.elementwise("rows", pairs, self.shape, i8, body)


def _end(op: Operation) -> dict[str, int]:
    return {key: integer(op, key) for key in ("zp", "lo", "hi")}


def _code(body: Body, op: Operation, value: SSAValue) -> SSAValue:
    """Add the zero point to an i64, clamp, truncate to i8."""
    value = body.plus(value, body.constant(integer(op, "zp"), i64))
    value = body.larger(value, body.constant(integer(op, "lo"), i64))
    value = body.smaller(value, body.constant(integer(op, "hi"), i64))
    return body.add(arith.TruncIOp(value, i8))


def _shift_left(body: Body, value: SSAValue, amount: SSAValue) -> SSAValue:
    return body.add(arith.ShLIOp(value, amount))


def _bits(body: Body, value: SSAValue) -> SSAValue:
    """Return the number of bits of a positive i64."""
    zeros = body.add(math.CountLeadingZerosOp(value))
    return body.minus(body.constant(64, i64), zeros)


def _even_bits(body: Body, value: SSAValue) -> SSAValue:
    """Return the number of bits of a positive i64, made even upwards."""
    one = body.constant(1, i64)
    halves = body.add(arith.ShRSIOp(body.plus(_bits(body, value), one), one))
    return _shift_left(body, halves, one)


def _root(body: Body, value: SSAValue) -> SSAValue:
    """Return the square root of an i64 of 32 bits, rounded down, bit by bit."""
    root = body.constant(0, i64)
    for bit in reversed(range(ROOT_BITS)):
        larger = body.plus(root, body.constant(1 << bit, i64))
        fits = body.add(arith.CmpiOp(body.times(larger, larger), value, "sle"))
        root = body.add(arith.SelectOp(fits, larger, root))
    return root
