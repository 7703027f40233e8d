"""The instruction set: the only definition of fields, ranges, engines and encodings.

Encoder, decoder, assembler, documentation, `tpu` dialect, random program generator and the
RTL's package come from `INSTRUCTIONS`. What an instruction *does* is stated in its docstring
here and executed in one place, `sim/functional.py`.

An instruction is 64 bytes, little endian, fields packed from bit 0 upwards in the order of the
table; bits not assigned must be zero. Every instruction starts with the common header: opcode,
wait mask (semaphores decremented before it starts), signal mask (semaphores incremented when it
has completed).

An instruction writes no byte twice (its destination strides do not fold), so that the order inside
it has no meaning; where it may work in place, source and destination are the same addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

ISA_VERSION = 1
INSTRUCTION_BYTES = 64
INSTRUCTION_BITS = 8 * INSTRUCTION_BYTES


class Engine(Enum):
    """Who executes an instruction."""

    SEQ = "seq"
    DMA = "dma"
    MAC = "mac"
    VEC = "vec"


class Kind(Enum):
    """What a field's value means; decides how it is checked and printed."""

    NUMBER = "number"
    FLAG = "flag"
    SRAM = "sram"  # byte address in SRAM, R register added
    DDR = "ddr"  # byte address in DDR, R register added
    STRIDE = "stride"  # bytes
    SIZE = "size"  # a count; at least 1
    MASK = "mask"  # set of semaphores
    R = "R"  # scalar register
    V = "V"  # vector register
    M = "M"  # half of the M registers
    CHANNEL = "channel"
    ENUM = "enum"


@dataclass(frozen=True)
class Field:
    """A field of an instruction.

    Stored values are `value - bias`, so that a size of 1 is encoded as 0.
    """

    name: str
    bits: int
    doc: str
    kind: Kind = Kind.NUMBER
    signed: bool = False
    bias: int = 0
    names: tuple[str, ...] = ()
    """Names of the values of an ENUM field."""
    default: int = 0

    @property
    def low(self) -> int:
        """Smallest legal value."""
        return (-(1 << (self.bits - 1)) if self.signed else 0) + self.bias

    @property
    def high(self) -> int:
        """Largest legal value."""
        if self.kind is Kind.ENUM:
            return len(self.names) - 1
        return (1 << (self.bits - 1 if self.signed else self.bits)) - 1 + self.bias


@dataclass(frozen=True)
class Instruction:
    """An instruction: its fields (after the common header) and its meaning."""

    name: str
    opcode: int
    engine: Engine
    doc: str
    own_fields: tuple[Field, ...] = ()

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """All fields but the opcode: header, then the instruction's own."""
        return HEADER + self.own_fields

    @cached_property
    def field(self) -> dict[str, Field]:
        """Fields by name."""
        return {field.name: field for field in self.fields}

    @cached_property
    def positions(self) -> dict[str, int]:
        """Lowest bit of every field."""
        positions: dict[str, int] = {}
        bit = OPCODE_BITS
        for field in self.fields:
            positions[field.name] = bit
            bit += field.bits
        assert bit <= INSTRUCTION_BITS, (self.name, bit)
        return positions

    @cached_property
    def used_bits(self) -> int:
        """Bits assigned, opcode included."""
        return OPCODE_BITS + sum(field.bits for field in self.fields)


OPCODE_BITS = 8
DTYPES = ("int8", "int4", "fp16")
FUNCTIONS = (
    "none",
    "hard_sigmoid",
    "hard_swish",
    "sigmoid",
    "silu",
    "tanh",
    "gelu",
    "exp",
    "reciprocal",
    "rsqrt",
    "sqrt",
)

HEADER = (
    Field(
        "wait",
        32,
        "Semaphores each decremented by one before the instruction starts (it waits until "
        "all are above zero).",
        Kind.MASK,
    ),
    Field(
        "signal",
        32,
        "Semaphores each incremented by one when the instruction has completed.",
        Kind.MASK,
    ),
)


def _size(name: str, bits: int, doc: str) -> Field:
    return Field(name, bits, doc, Kind.SIZE, bias=1, default=1)


def _sram(name: str, doc: str) -> tuple[Field, Field]:
    return (
        Field(name, 24, doc, Kind.SRAM),
        Field(
            f"{name}_r",
            5,
            f"R register added to `{name}` when the instruction is dispatched.",
            Kind.R,
        ),
    )


def _ddr(name: str, doc: str) -> tuple[Field, Field]:
    return (
        Field(name, 40, doc, Kind.DDR),
        Field(
            f"{name}_r",
            5,
            f"R register added to `{name}` when the instruction is dispatched.",
            Kind.R,
        ),
    )


def _stride(name: str, bits: int, doc: str) -> Field:
    return Field(name, bits, doc, Kind.STRIDE)


def _dtype() -> Field:
    return Field("dtype", 2, "Number type of the elements.", Kind.ENUM, names=DTYPES)


_CHANNEL = Field("channel", 2, "DMA channel whose queue takes the instruction.", Kind.CHANNEL)
_CLAMP = (
    Field("zp", 9, "Zero point added after the shift.", signed=True),
    Field("lo", 8, "Lowest code of the result (relu, clip).", signed=True, default=-128),
    Field("hi", 8, "Highest code of the result.", signed=True, default=127),
)
_SCALAR_PARAMETERS = (
    Field(
        "param",
        6,
        "Quantisation-parameter entry (bank * entries + entry): lane 0 holds multiplier a "
        "and the shift, lane 1 multiplier b.",
    ),
    Field("bias", 10, "Constant added before the shift, times 2^bias_shift.", signed=True),
    Field("bias_shift", 6, "See `bias`."),
)
_ROWS_SHAPE = (
    _size("n0", 14, "Elements of a row."),
    _size("n1", 14, "Count of dimension 1."),
    _size("n2", 12, "Count of dimension 2."),
    _stride("src_s1", 22, "Source bytes between steps of dimension 1."),
    _stride("src_s2", 22, "Source bytes between steps of dimension 2."),
    _stride("dst_s1", 22, "Result bytes between steps of dimension 1."),
    _stride("dst_s2", 22, "Result bytes between steps of dimension 2."),
)
_DMA_SHAPE = (
    _size("n0", 20, "Bytes of the innermost, contiguous run."),
    _size("n1", 14, "Count of dimension 1."),
    _size("n2", 14, "Count of dimension 2."),
    _size("n3", 12, "Count of dimension 3."),
    _stride("ddr_s1", 32, "DDR bytes between steps of dimension 1."),
    _stride("ddr_s2", 32, "DDR bytes between steps of dimension 2."),
    _stride("ddr_s3", 32, "DDR bytes between steps of dimension 3."),
    _stride("sram_s1", 22, "SRAM bytes between steps of dimension 1."),
    _stride("sram_s2", 24, "SRAM bytes between steps of dimension 2."),
    _stride("sram_s3", 24, "SRAM bytes between steps of dimension 3."),
    Field(
        "stream",
        1,
        "Stream mode (any address and length) instead of burst mode (multiples of the burst size).",
        Kind.FLAG,
    ),
)

INSTRUCTIONS: tuple[Instruction, ...] = (
    Instruction("halt", 0x01, Engine.SEQ, "Wait until every engine is idle, then end the program."),
    Instruction(
        "fence", 0x02, Engine.SEQ, "Wait until every engine is idle and every queue is empty."
    ),
    Instruction(
        "set_reg",
        0x03,
        Engine.SEQ,
        "R[rd] = value. Writing R0 is illegal.",
        (Field("rd", 5, "Register.", Kind.R), Field("value", 40, "New content.")),
    ),
    Instruction(
        "add_reg",
        0x04,
        Engine.SEQ,
        "R[rd] = (R[rd] + value) mod 2^40. Writing R0 is illegal.",
        (Field("rd", 5, "Register.", Kind.R), Field("value", 40, "Signed step.", signed=True)),
    ),
    Instruction(
        "loop",
        0x05,
        Engine.SEQ,
        "Execute the instructions up to the matching `end_loop` `count` times. Loops nest up "
        "to 4 deep.",
        (_size("count", 16, "Iterations."),),
    ),
    Instruction("end_loop", 0x06, Engine.SEQ, "End of the innermost loop's body."),
    Instruction(
        "dma_load",
        0x10,
        Engine.DMA,
        """Copy up to four dimensions from DDR to SRAM, padding dimensions 1 and 2 by a constant.

        For i3 < n3, i2 < n2, i1 < n1: `sram[sram + i3*sram_s3 + (i2 + pad2_lo)*sram_s2 + (i1 +
        pad1_lo)*sram_s1 + (0..n0)] = ddr[ddr + i3*ddr_s3 + i2*ddr_s2 + i1*ddr_s1 + (0..n0)]`.
        The SRAM region spans `pad1_lo + n1 + pad1_hi` steps of dimension 1 and `pad2_lo + n2 +
        pad2_hi` of dimension 2; runs of it not written by the copy are filled with the byte
        `fill`.""",
        (
            _CHANNEL,
            *_ddr("ddr", "DDR byte address of the source."),
            *_sram("sram", "SRAM byte address of the destination."),
            *_DMA_SHAPE,
            Field("pad1_lo", 8, "Padding steps before dimension 1."),
            Field("pad1_hi", 8, "Padding steps after dimension 1."),
            Field("pad2_lo", 8, "Padding steps before dimension 2."),
            Field("pad2_hi", 8, "Padding steps after dimension 2."),
            Field("fill", 8, "Byte written to padding."),
        ),
    ),
    Instruction(
        "dma_store",
        0x11,
        Engine.DMA,
        "Copy up to four dimensions from SRAM to DDR: `ddr[ddr + i3*ddr_s3 + i2*ddr_s2 + "
        "i1*ddr_s1 + (0..n0)] = sram[sram + i3*sram_s3 + i2*sram_s2 + i1*sram_s1 + "
        "(0..n0)]`.",
        (
            _CHANNEL,
            *_ddr("ddr", "DDR byte address of the destination."),
            *_sram("sram", "SRAM byte address of the source."),
            *_DMA_SHAPE,
        ),
    ),
    Instruction(
        "dma_fill",
        0x12,
        Engine.DMA,
        "Write the byte `fill` to n2 x n1 runs of n0 bytes of SRAM.",
        (
            _CHANNEL,
            *_sram("sram", "SRAM byte address."),
            _size("n0", 20, "Bytes of a run."),
            _size("n1", 14, "Count of dimension 1."),
            _size("n2", 14, "Count of dimension 2."),
            _stride("sram_s1", 22, "SRAM bytes between steps of dimension 1."),
            _stride("sram_s2", 24, "SRAM bytes between steps of dimension 2."),
            Field("fill", 8, "The byte."),
        ),
    ),
    Instruction(
        "mac_conv",
        0x20,
        Engine.MAC,
        """Convolution of an SRAM-resident tile into M accumulators (also matrix products: k_h =
        k_w = 1).

        Loops, outermost first: output-channel block `ob < oc_blocks`; pixel block `pb` (each
        `block_rows` output rows, the last may be shorter). For every (ob, pb) the accumulators
        `acc[oy][ox][column]` of one half of the M registers are computed: the first block uses
        half `m_half`, each next one the other. The reduction runs over `ky < k_h`, `kx < k_w`,
        `cb < c_blocks`; step (ky, kx, cb) has `rows = c_last if cb == c_blocks - 1 else
        c_rows`, `cols = cols_last if ob == oc_blocks - 1 else cols`. Activation vector of pixel
        (oy, ox): `rows` elements at `act + ob*ob_stride + oy*oy_stride + ox*ox_stride +
        ky*ky_stride + kx*kx_stride + cb*cb_stride`. Weights: steps are packed one after another
        from `wgt + ob*wgt_ob_stride`; dense (`diag = 0`): `rows` rows of `cols` elements each
        `wgt_pitch` bytes apart, and the next step starts `rows * wgt_pitch` further;
        `acc[column] += sum(act[r] * w[r][column])`. Diagonal (`diag = 1`, depthwise): one row
        of `cols` elements, next step `wgt_pitch` further, `acc[column] += act[column] *
        w[column]` (`rows` is ignored; `cols` elements of activations are read).

        Accumulators start from zero, or with `accumulate = 1` from what the half holds (then, and
        when `push = 0`, there are at most two blocks).
        int8: int32 sums; the column sum of one step is exact, adding it to the accumulator wraps
        or saturates as the target says. int4: activations are int8, weights are packed two a
        byte, low nibble first, rows padded to whole bytes. fp16: float32 sums.
        With `push = 1` each finished block is handed to the vector unit. No block starts before
        its half has been emptied of an earlier pushed block. A drained half holds nothing: to
        accumulate on it is illegal. `block_rows * out_w` must fit a half. What `vec_drain` writes
        must not overlap what its `mac_conv` reads: both run at once.""",
        (
            _dtype(),
            Field("diag", 1, "Diagonal weights (depthwise).", Kind.FLAG),
            Field("accumulate", 1, "Start from the half's content instead of zero.", Kind.FLAG),
            Field("push", 1, "Hand finished blocks to the vector unit.", Kind.FLAG, default=1),
            Field("m_half", 1, "Half of the M registers the first block uses.", Kind.M),
            *_sram("act", "Activations."),
            *_sram("wgt", "Weights."),
            _size("out_h", 12, "Output rows."),
            _size("out_w", 12, "Output columns."),
            _size("block_rows", 12, "Output rows of a pixel block."),
            _stride("oy_stride", 24, "Activation bytes between output rows."),
            _stride("ox_stride", 16, "Activation bytes between output columns."),
            _size("k_h", 8, "Kernel rows."),
            _size("k_w", 8, "Kernel columns."),
            _stride("ky_stride", 22, "Activation bytes between kernel rows."),
            _stride("kx_stride", 20, "Activation bytes between kernel columns."),
            _size("c_blocks", 10, "Input-channel blocks."),
            _stride("cb_stride", 10, "Activation bytes between input-channel blocks."),
            _size("c_rows", 8, "Rows of an input-channel block (1..array rows)."),
            _size("c_last", 8, "Rows of the last input-channel block."),
            _size("oc_blocks", 6, "Output-channel blocks."),
            _stride(
                "ob_stride",
                10,
                "Activation bytes between output-channel blocks (depthwise), else 0.",
            ),
            _size("cols", 8, "Columns of an output-channel block (1..array columns)."),
            _size("cols_last", 8, "Columns of the last output-channel block."),
            _stride("wgt_pitch", 10, "Weight bytes between rows."),
            _stride("wgt_ob_stride", 24, "Weight bytes between output-channel blocks."),
        ),
    ),
    Instruction(
        "vec_param",
        0x30,
        Engine.VEC,
        """Load quantisation parameters from SRAM. Block i of `count` takes `9 * lanes` bytes:
        `lanes` int32 biases -> V[v + i], `lanes` uint32 multipliers and `lanes` uint8 shifts ->
        entry `param + i`. `param + count` must stay inside one bank; multipliers are below 2^31,
        shifts at most 62. With `bias_only = 1` a
        block is the `4 * lanes` bytes of biases (float32 for fp16).""",
        (
            *_sram("src", "Parameter blocks."),
            Field("param", 6, "First entry: bank * entries + entry."),
            _size("count", 4, "Blocks."),
            Field("v", 7, "First V register.", Kind.V),
            Field("bias_only", 1, "Load only biases.", Kind.FLAG),
        ),
    ),
    Instruction(
        "vec_table",
        0x31,
        Engine.VEC,
        "Load a 256-byte lookup table from SRAM into the V registers from `v` on (`4 * "
        "lanes` bytes each, the last padded).",
        (*_sram("src", "The table: entry code + 128."), Field("v", 7, "First V register.", Kind.V)),
    ),
    Instruction(
        "vec_drain",
        0x32,
        Engine.VEC,
        """Requantise the accumulator blocks of one pushing `mac_conv` (same loops over `oc_blocks`
        and pixel blocks) into SRAM.

        int8: `y = clamp(rshift(int64(int32(acc + V[v + ob][lane])) * multiplier[lane],
        shift[lane]) + zp, lo, hi)` with entry `param + ob`, the target's rounding; then, with
        `use_table = 1`, `y = table[y + 128]`. Written to `dst + ob*ob_stride + oy*oy_stride +
        ox*ox_stride + column`. `raw = 1` writes the int32 `acc + bias` itself (4 bytes a
        column). The bias adder wraps on every target.
        fp16: `y = fp16(clamp(function(acc + bias), float lo, float hi))` with float32 biases in
        V; the clamp bounds lie in V[v_clamp] lanes 0 and 1 as float32.""",
        (
            _dtype(),
            Field("raw", 1, "Write int32 instead of requantising.", Kind.FLAG),
            Field("use_table", 1, "Apply the table in V[v_table...] to the result.", Kind.FLAG),
            Field("m_half", 1, "Half of the M registers the first block is in.", Kind.M),
            *_sram("dst", "Results."),
            _size("out_h", 12, "Output rows."),
            _size("out_w", 12, "Output columns."),
            _size("block_rows", 12, "Output rows of a pixel block."),
            _size("oc_blocks", 6, "Output-channel blocks."),
            _size("cols", 8, "Columns of a block."),
            _size("cols_last", 8, "Columns of the last block."),
            _stride("oy_stride", 24, "Result bytes between output rows."),
            _stride("ox_stride", 16, "Result bytes between output columns."),
            _stride("ob_stride", 10, "Result bytes between output-channel blocks."),
            Field("param", 6, "First entry: bank * entries + entry."),
            Field("v", 7, "First V register of the biases.", Kind.V),
            Field("v_table", 7, "First V register of the table.", Kind.V),
            Field("v_clamp", 7, "V register of the float clamp.", Kind.V),
            Field("function", 4, "Function applied (fp16).", Kind.ENUM, names=FUNCTIONS),
            *_CLAMP,
        ),
    ),
    Instruction(
        "vec_eltwise",
        0x33,
        Engine.VEC,
        """Elementwise operation of two tensors of n2 x n1 runs of n0 elements; strides of 0
        broadcast, `b_scalar = 1` uses the first element of b's run for the whole run.

        int8, with `a - za`, `b - zb`: add `v = a*multiplier[0] + b*multiplier[1]`, sub with
        minus, mul `v = a*b*multiplier[0]`; `v += bias * 2^bias_shift`; `y = clamp(rshift(v,
        shift[0]) + zp, lo, hi)`. max, min: the larger or smaller code (no rescaling). fp16: the
        float operation in float32, rounded once, clamped by V[v_clamp].""",
        (
            _dtype(),
            Field("op", 3, "Operation.", Kind.ENUM, names=("add", "sub", "mul", "max", "min")),
            Field("b_scalar", 1, "b has one element a run.", Kind.FLAG),
            *_sram("a", "First operand."),
            *_sram("b", "Second operand."),
            *_sram("dst", "Result."),
            _size("n0", 14, "Elements of a run."),
            _size("n1", 14, "Count of dimension 1."),
            _size("n2", 12, "Count of dimension 2."),
            _stride("a_s1", 18, "Bytes of a between steps of dimension 1."),
            _stride("a_s2", 22, "Bytes of a between steps of dimension 2."),
            _stride("b_s1", 18, "Bytes of b between steps of dimension 1."),
            _stride("b_s2", 22, "Bytes of b between steps of dimension 2."),
            _stride("dst_s1", 18, "Bytes of the result between steps of dimension 1."),
            _stride("dst_s2", 22, "Bytes of the result between steps of dimension 2."),
            Field("za", 8, "Zero point of a.", signed=True),
            Field("zb", 8, "Zero point of b.", signed=True),
            *_SCALAR_PARAMETERS,
            Field("v_clamp", 7, "V register of the float clamp.", Kind.V),
            *_CLAMP,
        ),
    ),
    Instruction(
        "vec_copy",
        0x34,
        Engine.VEC,
        """Move n3 x n2 x n1 x n0 elements from SRAM to SRAM with arbitrary strides (layout
        conversion, slice, upsampling by strides of 0), optionally changing values.

        int8: `requantise = 1`: `v = (a - za)*multiplier[0] + bias * 2^bias_shift`, `y =
        clamp(rshift(v, shift[0]) + zp, lo, hi)`; then `use_table = 1`: `y = table[y + 128]`.
        fp16: `function`, then the clamp of V[v_clamp] when `requantise = 1`. Source and
        destination must not overlap unless they are the same addresses with the same strides.""",
        (
            _dtype(),
            Field("requantise", 1, "Rescale (int8) or clamp (fp16).", Kind.FLAG),
            Field("use_table", 1, "Apply the table in V[v_table...].", Kind.FLAG),
            *_sram("src", "Source."),
            *_sram("dst", "Destination."),
            _size("n0", 16, "Count of dimension 0 (innermost)."),
            _size("n1", 14, "Count of dimension 1."),
            _size("n2", 14, "Count of dimension 2."),
            _size("n3", 12, "Count of dimension 3."),
            _stride("src_s0", 18, "Source bytes between elements."),
            _stride("src_s1", 22, "Source bytes between steps of dimension 1."),
            _stride("src_s2", 22, "Source bytes between steps of dimension 2."),
            _stride("src_s3", 22, "Source bytes between steps of dimension 3."),
            _stride("dst_s0", 18, "Destination bytes between elements."),
            _stride("dst_s1", 22, "Destination bytes between steps of dimension 1."),
            _stride("dst_s2", 22, "Destination bytes between steps of dimension 2."),
            _stride("dst_s3", 22, "Destination bytes between steps of dimension 3."),
            Field("za", 8, "Zero point of the source.", signed=True),
            *_SCALAR_PARAMETERS,
            Field("v_table", 7, "First V register of the table.", Kind.V),
            Field("v_clamp", 7, "V register of the float clamp.", Kind.V),
            Field("function", 4, "Function applied (fp16).", Kind.ENUM, names=FUNCTIONS),
            *_CLAMP,
        ),
    ),
    Instruction(
        "vec_pool",
        0x35,
        Engine.VEC,
        "Maximum over a k_h x k_w window for n0 channels: `dst[oy*dst_sy + ox*dst_sx + c] = "
        "max over ky, kx of src[oy*src_sy + ox*src_sx + ky*ky_stride + kx*kx_stride + c]`.",
        (
            _dtype(),
            *_sram("src", "Source, padding included."),
            *_sram("dst", "Result."),
            _size("n0", 14, "Channels."),
            _size("out_h", 12, "Output rows."),
            _size("out_w", 12, "Output columns."),
            _size("k_h", 8, "Window rows."),
            _size("k_w", 8, "Window columns."),
            _stride("src_sy", 24, "Source bytes between output rows."),
            _stride("src_sx", 18, "Source bytes between output columns."),
            _stride("ky_stride", 24, "Source bytes between window rows."),
            _stride("kx_stride", 18, "Source bytes between window columns."),
            _stride("dst_sy", 24, "Result bytes between output rows."),
            _stride("dst_sx", 18, "Result bytes between output columns."),
        ),
    ),
    Instruction(
        "vec_resize",
        0x36,
        Engine.VEC,
        """Interpolate n0 channels between four neighbours given by tables of 8 bytes an output row
        or column: uint16 index0, uint16 index1, int16 weight0, int16 weight1.

        `v = sum over i, j in {0, 1} of (src[row_i*src_sy + col_j*src_sx + c] - za) * wy_i *
        wx_j`, `y = clamp(rshift(v*multiplier[0] + bias*2^bias_shift, shift[0]) + zp, lo, hi)`.
        Pairs of weights sum to 2048 (11 fractional bits).""",
        (
            *_sram("src", "Source."),
            *_sram("dst", "Result."),
            *_sram("table_y", "Row table."),
            *_sram("table_x", "Column table."),
            _size("n0", 14, "Channels."),
            _size("out_h", 12, "Output rows."),
            _size("out_w", 12, "Output columns."),
            _size("in_h", 12, "Source rows; row indices of the table are below."),
            _size("in_w", 12, "Source columns; column indices of the table are below."),
            _stride("src_sy", 24, "Source bytes between rows."),
            _stride("src_sx", 18, "Source bytes between columns."),
            _stride("dst_sy", 24, "Result bytes between rows."),
            _stride("dst_sx", 18, "Result bytes between columns."),
            Field("za", 8, "Zero point of the source.", signed=True),
            *_SCALAR_PARAMETERS,
            *_CLAMP,
        ),
    ),
    Instruction(
        "vec_softmax",
        0x37,
        Engine.VEC,
        """Softmax of n2 x n1 rows of n0 int8 codes (targets with `vector_rows`).

        The 256 uint16 entries `E` are the first 512 bytes of the V registers from `v_table` on
        (loaded by `vec_param` with `bias_only`); entry 0 is not 0. For each row with codes `q`:
        `M = max(q)`, `S = sum(E[M - q])`, `k` the number of bits of S, `R = floor(multiplier * 2^k
        / S)`, `t = k + shift`, `y = clamp(((E[M - q]*R + 2^(t-1)) >> t) + zp, lo, hi)`, whatever
        the target's rounding. `multiplier` is 2^14 or more. Source and destination must not
        overlap unless they are the same addresses with the same strides.""",
        (
            *_sram("src", "Source."),
            *_sram("dst", "Result."),
            *_ROWS_SHAPE,
            Field("v_table", 7, "First V register of the table.", Kind.V),
            Field(
                "multiplier",
                15,
                "Multiplier of 1 over the result's scale, 2^14..2^15-1.",
                default=1 << 14,
            ),
            Field("shift", 4, "Its shift: 1 over the result's scale is multiplier / 2^shift."),
            *_CLAMP,
        ),
    ),
    Instruction(
        "vec_layer_norm",
        0x38,
        Engine.VEC,
        """Layer normalisation of n2 x n1 rows of n0 int8 codes (targets with `vector_rows`).

        Element c has a factor `g[c]` and an addend `B[c]`, the same for all rows, at `params` in
        blocks of `6 * lanes` bytes: `lanes` int32 addends, then `lanes` int16 factors, for `lanes`
        elements each (those beyond n0 are read, and have no meaning). For each row with codes `q`:
        `S1 = sum(q)`, `W = (n0*sum(q*q) - S1*S1)*2^8 + epsilon`, `b` the number of bits of W made
        even upwards, `D = floor(sqrt(floor(W * 2^32 / 2^b)))`, `R = min(65535, floor(2^31 / D))`,
        `z = ((n0*q - S1)*R) >> max(0, b/2 - 4)` (below 0 only where n0*q = S1 for the whole row),
        `y = clamp(((z*g[c] + B[c]) >> shift) + zp, lo, hi)`, shifts being floors whatever the
        target's rounding. `epsilon` is 1..2^50. Source and destination must not overlap unless
        they are the same addresses with the same strides.""",
        (
            *_sram("src", "Source."),
            *_sram("dst", "Result."),
            *_sram("params", "Blocks of addends and factors."),
            *_ROWS_SHAPE,
            Field("epsilon", 51, "Added to 2^8 * n0^2 times the variance; 1..2^50.", default=1),
            Field("shift", 5, "Shift of the result."),
            *_CLAMP,
        ),
    ),
)

BY_NAME: dict[str, Instruction] = {instruction.name: instruction for instruction in INSTRUCTIONS}
BY_OPCODE: dict[int, Instruction] = {
    instruction.opcode: instruction for instruction in INSTRUCTIONS
}


class IllegalInstructionError(ValueError):
    """A word that decodes to nothing, or a field outside its range."""


def encode(name: str, values: dict[str, int]) -> bytes:
    """Encode an instruction; fields left out take their defaults.

    Raises: IllegalInstructionError: unknown instruction or field, or a value outside the
    field's range.

    """
    instruction = BY_NAME.get(name)
    if instruction is None:
        raise IllegalInstructionError(f"unknown instruction {name!r}")
    unknown = values.keys() - instruction.field.keys()
    if unknown:
        raise IllegalInstructionError(f"{name} has no field {sorted(unknown)[0]!r}")
    word = instruction.opcode
    positions = instruction.positions
    for field in instruction.fields:
        value = values.get(field.name, field.default)
        if not field.low <= value <= field.high:
            raise IllegalInstructionError(
                f"{name}.{field.name} must be {field.low}..{field.high}, not {value}"
            )
        word |= ((value - field.bias) & ((1 << field.bits) - 1)) << positions[field.name]
    return word.to_bytes(INSTRUCTION_BYTES, "little")


def decode(data: bytes) -> tuple[str, dict[str, int]]:
    """Decode 64 bytes into a name and all field values.

    Raises: IllegalInstructionError: wrong length, unknown opcode, an enum out of range, or a
    reserved bit set.

    """
    if len(data) != INSTRUCTION_BYTES:
        raise IllegalInstructionError(
            f"an instruction has {INSTRUCTION_BYTES} bytes, not {len(data)}"
        )
    word = int.from_bytes(data, "little")
    instruction = BY_OPCODE.get(word & ((1 << OPCODE_BITS) - 1))
    if instruction is None:
        raise IllegalInstructionError(f"opcode 0x{data[0]:02x} is not assigned")
    if word >> instruction.used_bits:
        raise IllegalInstructionError(f"{instruction.name}: reserved bits are set")
    values: dict[str, int] = {}
    for field in instruction.fields:
        raw = (word >> instruction.positions[field.name]) & ((1 << field.bits) - 1)
        if field.signed and raw >> (field.bits - 1):
            raw -= 1 << field.bits
        value = raw + field.bias
        if value > field.high:
            raise IllegalInstructionError(
                f"{instruction.name}.{field.name} must be {field.low}..{field.high}, not {value}"
            )
        values[field.name] = value
    return instruction.name, values
