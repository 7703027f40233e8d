"""Convolutions, products and window sums: `mac_conv` and the `vec_drain` that empties it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import ceil

from tilewright.diagnostics import TilewrightError
from tilewright.schedule.cost import join_blocks
from tilewright.schedule.footprint import ConvForm, Stack
from tilewright.spec.hardware import Hardware
from tilewright.spec.isa import BY_NAME, DTYPES, FUNCTIONS
from tilewright.transforms.tpu.emitter import WANT, Emitter
from tilewright.transforms.tpu.instruction import Instr
from tilewright.transforms.tpu.views import (
    Accumulator,
    Alternating,
    Tile,
    View,
    tile_address,
    tile_strides,
    whole,
)

Fields = dict[str, int]
HALF = DTYPES.index("fp16")
INT4 = DTYPES.index("int4")


def dtype_field(item_bytes: int) -> Fields:
    """Return the field that says the elements' type, if it is not the default (int8)."""
    return {"dtype": HALF} if item_bytes == 2 else {}


@dataclass
class Reduction:
    """One `conv` or `sum` op of the affine level, with its tile sizes known."""

    layer: str
    form: ConvForm
    act: View
    """Input tile [h, w, c], padding included."""
    weights: Tile
    """Packed weights, or a row of equal ones for window sums."""
    ones: bool
    out: View
    """Accumulator view [oh, ow, o]."""
    kernel: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    gathered: Alternating | None = None
    """The tiles into which kernel rows are gathered (`ConvForm.stack`)."""


@dataclass(frozen=True)
class CodeEnd:
    """How sums of codes become codes: after the channels' own parameters."""

    zp: int
    lo: int
    hi: int
    raw: bool = False
    """The 32-bit sums, with their biases, are written as they are."""

    def fields(self, emitter: Emitter, key: Hashable, tile: Tile, first: int, count: int) -> Fields:
        """Make the parameters of blocks resident; return the fields of their `vec_drain`."""
        held = emitter.channel_parameters(key, tile, first, count)
        if self.raw:
            return held | {"raw": 1}
        return held | {"zp": self.zp, "lo": self.lo, "hi": self.hi}


@dataclass(frozen=True)
class HalfEnd:
    """How float32 sums become fp16: bias, function, clamp."""

    function: str
    clamp: tuple[float, float]
    blocks: int
    """Blocks of biases in the parameter tile; the clamp's bounds lie behind them."""

    def fields(self, emitter: Emitter, key: Hashable, tile: Tile, first: int, count: int) -> Fields:
        """As `CodeEnd.fields`."""
        held = emitter.channel_parameters(key, tile, first, count, half=True)
        behind = self.blocks * 4 * emitter.hardware.vector_lanes
        return {
            "dtype": HALF,
            **held,
            **emitter.clamp(self.clamp, tile, behind),
            "function": FUNCTIONS.index(self.function),
        }


@dataclass(frozen=True)
class _Chunk:
    """A run of output-channel blocks of one part: what one `mac_conv`/`vec_drain` pair covers."""

    part: int
    first: int
    count: int


def _chunks(form: ConvForm, limit: int) -> list[_Chunk]:
    return [
        _Chunk(part, first, min(limit, form.part_blocks - first))
        for part in range(form.parts)
        for first in range(0, form.part_blocks, limit)
    ]


def _pieces(
    emitter: Emitter, form: ConvForm, limit: int, out: View, fine: bool
) -> Iterator[tuple[_Chunk, _Chunk]]:
    """Yield chunks of blocks and their pieces: `fine` ones if more follows every drain."""
    for chunk in _chunks(form, limit):
        rows, columns, _ = out.sizes
        step = join_blocks(emitter.hardware, rows, form.vectors(columns)) if fine else chunk.count
        for first in range(chunk.first, chunk.first + chunk.count, step):
            count = min(step, chunk.first + chunk.count - first)
            yield chunk, _Chunk(chunk.part, first, count)


@dataclass(frozen=True)
class _Span:
    """Output columns of one instruction: `vectors` of `pixel_pack` pixels from `first` on."""

    first: int
    vectors: int


def _spans(emitter: Emitter, form: ConvForm, columns: int) -> list[_Span]:
    """Return what covers a row; what is left of it is one vector that ends with the row."""
    pack = form.pixel_pack
    if columns < pack:
        raise TilewrightError(
            "E0402",
            f'"{emitter.layer}" packs {pack} output pixels; a row of its tile has {columns}',
        )
    spans = [_Span(0, columns // pack)]
    if columns % pack:
        spans.append(_Span(columns - pack, 1))
    return spans


def _block_rows(emitter: Emitter, out_h: int, out_w: int) -> int:
    """Return the output rows of a pixel block: as even a split as the M registers allow."""
    rows = emitter.hardware.accumulator_rows // out_w
    if rows == 0:
        raise TilewrightError(
            "E0402",
            f'an output row of "{emitter.layer}" does not fit the accumulators',
            [f"{out_w} pixels; a half holds {emitter.hardware.accumulator_rows}"],
        )
    return ceil(out_h / ceil(out_h / rows))


def _cols(form: ConvForm, chunk: _Chunk) -> tuple[int, int]:
    """Return columns of full and last block of a chunk."""
    first = chunk.first * form.columns
    total = min(form.part_out_channels - first, chunk.count * form.columns)
    last = total - (chunk.count - 1) * form.columns
    return (form.columns if chunk.count > 1 else last), last


def issue_mac(
    emitter: Emitter, work: Reduction, chunk: _Chunk, span: _Span, accumulate: bool
) -> Instr:
    """Append the `mac_conv` of a chunk (not pushing yet)."""
    form, act = work.form, work.act.squeezed(3)
    tile = act.buffer
    assert isinstance(tile, Tile)
    row, pixel, _ = tile_strides(act)
    row = row or tile.shape[-2] * tile.pitch
    pixel = pixel or tile.pitch
    out_h, out_w = work.out.squeezed(3).sizes[0], span.vectors
    k_h, k_w = work.kernel
    advance = pixel * work.strides[1]
    cols, cols_last = _cols(form, chunk)
    pitch = 0 if work.ones else form.weight_pitch
    block_bytes = 0 if work.ones else form.weight_rows * form.weight_pitch
    block = chunk.part * form.part_blocks + chunk.first
    channel, item = chunk.part * form.part_in_channels, form.element_bytes
    if form.diagonal:
        channel += chunk.first * form.columns
    emitter.layer = work.layer
    return emitter.add(
        "mac_conv",
        reads=[tile.region, work.weights.region],
        writes=(),
        diag=int(form.diagonal),
        accumulate=int(accumulate),
        push=0,
        m_half=emitter.half,
        act=tile_address(act) + span.first * advance + channel * item,
        wgt=work.weights.address + block * block_bytes,
        out_h=out_h,
        out_w=out_w,
        block_rows=_block_rows(emitter, out_h, out_w),
        oy_stride=row * work.strides[0] if out_h > 1 else 0,
        ox_stride=advance * form.pixel_pack if out_w > 1 else 0,
        k_h=k_h,
        k_w=1 if form.merge_kernel_row else k_w,
        ky_stride=row * work.dilations[0] if k_h > 1 else 0,
        kx_stride=0 if form.merge_kernel_row or k_w == 1 else pixel * work.dilations[1],
        c_blocks=1 if form.diagonal else form.row_blocks,
        cb_stride=0 if form.diagonal or form.row_blocks == 1 else form.rows * item,
        c_rows=cols if form.diagonal else form.rows,
        c_last=cols if form.diagonal else form.last_rows,
        oc_blocks=chunk.count,
        ob_stride=form.columns * item if form.diagonal and chunk.count > 1 else 0,
        cols=cols,
        cols_last=cols_last,
        wgt_pitch=pitch,
        wgt_ob_stride=block_bytes if chunk.count > 1 else 0,
        **({"dtype": INT4} if form.half_bytes else dtype_field(item)),
    )


def _rows_of(view: View, first: int, count: int) -> View:
    """Return some rows of a view [h, w, c]."""
    offset = view.offset + first * view.strides[0]
    return View(view.buffer, offset, (count, *view.sizes[1:]), view.strides)


@dataclass(frozen=True)
class _Gathered:
    """Kernel rows of some output rows in one of a reduction's two tiles for them."""

    work: Reduction
    first: int
    """First output row."""
    rows: int
    tile: Tile

    @property
    def stack(self) -> Stack:
        """How they lie there."""
        assert self.work.form.stack is not None
        return self.work.form.stack

    def units(self, hardware: Hardware) -> int:
        """Return the units of a row."""
        columns = self.work.out.squeezed(3).sizes[1]
        return self.stack.row_units(hardware, columns, self.work.form.steps[0])

    def copy(self, emitter: Emitter, begin: int, end: int) -> None:
        """Append the copy of kernel rows `begin..end` (exclusive)."""
        work, stack = self.work, self.stack
        act = work.act.squeezed(3)
        source = act.buffer
        assert isinstance(source, Tile)
        row, pixel, _ = tile_strides(act)
        row = row or source.shape[-2] * source.pitch
        assert pixel in (0, stack.pixel), (pixel, stack)
        columns = work.out.squeezed(3).sizes[1]
        emitter.layer = work.layer
        emitter.add(
            "vec_copy",
            reads=[source.region],
            writes=[self.tile.region],
            src=tile_address(act)
            + (self.first * work.strides[0] + begin * work.dilations[0]) * row,
            dst=self.tile.address + begin * stack.run,
            n0=stack.run,
            n1=(columns - 1) * work.form.steps[0] + stack.units,
            n2=end - begin,
            n3=self.rows,
            src_s0=1,
            src_s1=stack.advance * stack.pixel,
            src_s2=work.dilations[0] * row,
            src_s3=work.strides[0] * row,
            dst_s0=1,
            dst_s1=stack.pitch,
            dst_s2=stack.run,
            dst_s3=self.units(emitter.hardware) * stack.pitch,
        )

    def reduction(self, hardware: Hardware) -> Reduction:
        """Return the reduction over it: a kernel of one row of units."""
        work, stack = self.work, self.stack
        shape = (self.rows, self.units(hardware), stack.pitch)
        tile = Tile(self.tile.role, shape, self.tile.address, stack.pitch, self.tile.size_bytes)
        return replace(
            work,
            act=whole(tile),
            out=_rows_of(work.out.squeezed(3), self.first, self.rows),
            kernel=(1, stack.units),
            strides=(1, work.form.steps[0]),
            dilations=(1, 1),
        )


def _gather(emitter: Emitter, work: Reduction) -> list[_Gathered]:
    """Return what the instructions of a reduction that gathers kernel rows cover."""
    hardware = emitter.hardware
    rows, columns, _ = work.out.squeezed(3).sizes
    assert work.gathered is not None
    step = min(
        work.form.piece_rows(hardware, rows, columns),
        work.gathered.tiles[0].size_bytes // work.form.stack_bytes(hardware, 1, columns),
    )
    return [
        _Gathered(work, first, min(step, rows - first), work.gathered.take())
        for first in range(0, rows, step)
    ]


def _reduce_gathered(
    emitter: Emitter, work: Reduction, chunk: _Chunk, out: View, fields: Fields
) -> None:
    """Append the instructions of a chunk of a reduction that gathers kernel rows.

    While the array works, the vector unit gathers what the array needs next: a share of it before
    every drain of as many blocks as the accumulators hold, so that the array need not wait.
    """
    hardware, tile = emitter.hardware, out.buffer
    assert isinstance(tile, Tile)
    parts = _gather(emitter, work)
    columns = work.out.squeezed(3).sizes[1]
    (span,) = _spans(emitter, work.form, columns)
    kernel_rows = parts[0].stack.kernel_rows
    parts[0].copy(emitter, 0, kernel_rows)
    for part, following in zip_longest(parts, parts[1:]):
        reduction = part.reduction(hardware)
        step = join_blocks(hardware, part.rows, columns)
        shares = ceil(chunk.count / step)
        for share in range(shares):
            begin, end = (number * kernel_rows // shares for number in (share, share + 1))
            if following is not None and begin < end:
                following.copy(emitter, begin, end)
            first = share * step
            piece = _Chunk(chunk.part, chunk.first + first, min(step, chunk.count - first))
            mac = issue_mac(emitter, reduction, piece, span, accumulate=False)
            mac.fields["push"] = 1
            tile.drains.append(len(emitter.program))
            own = emitter.from_block(fields, first)
            _drain(emitter, work.form, mac, _rows_of(out, part.first, part.rows), piece, span, own)


def reduce(emitter: Emitter, work: Reduction, split: bool) -> None:
    """Take up a reduction op: issue it now if it is a piece of a split one, else with its drain."""
    acc = work.out.buffer
    assert isinstance(acc, Accumulator)
    if not split:
        assert acc.pending is None
        acc.pending = work
        return
    chunks = _chunks(work.form, emitter.blocks)
    (span,) = _spans(emitter, work.form, work.out.squeezed(3).sizes[1])
    instr = issue_mac(emitter, work, chunks[0], span, accumulate=bool(acc.chunks))
    blocks = instr.fields["oc_blocks"] * ceil(instr.fields["out_h"] / instr.fields["block_rows"])
    if len(chunks) > 1 or blocks > 2:
        raise TilewrightError(
            "E0402", f'the split reduction of "{work.layer}" does not stay in the accumulators',
            [f"{len(chunks)} parts, {blocks} blocks; at most 1 and 2"],
        )  # fmt: skip
    acc.chunks.append(instr)
    acc.pending = work


def requantise(
    emitter: Emitter,
    acc_view: View,
    parameters: Tile,
    key: Hashable,
    target: View,
    end: CodeEnd | HalfEnd,
    join: Callable[[int, int], None] | None = None,
) -> None:
    """Issue what is left of the reduction on `acc_view`, and the drains into `target`.

    `join` is called after the drains of a few blocks, with their first channel and the channels.
    """
    acc, out = acc_view.buffer, target.squeezed(3)
    assert isinstance(acc, Accumulator)
    tile = out.buffer
    assert isinstance(tile, Tile)
    work = acc.pending
    assert isinstance(work, Reduction)
    form = work.form
    stride = BY_NAME["vec_drain"].field["ob_stride"]
    blocks = emitter.blocks if form.columns * tile.item_bytes <= stride.high else 1
    spans = _spans(emitter, form, out.sizes[1])
    fine = join is not None and not acc.chunks and form.stack is None
    for chunk, piece in _pieces(emitter, form, blocks, out, fine):
        emitter.layer = work.layer
        fields = end.fields(
            emitter, key, parameters, chunk.part * form.part_blocks + chunk.first, chunk.count
        )
        # The parameters of the whole chunk are resident; the piece starts inside.
        fields = emitter.from_block(fields, piece.first - chunk.first)
        if form.stack is not None:
            _reduce_gathered(emitter, work, piece, out, fields)
        for span in spans if form.stack is None else ():
            mac = acc.chunks[-1] if acc.chunks else issue_mac(emitter, work, piece, span, False)
            mac.fields["push"] = 1
            tile.drains.append(len(emitter.program))
            _drain(emitter, form, mac, out, piece, span, fields)
        if join is not None:
            channel = piece.part * form.part_out_channels + piece.first * form.columns
            last = form.part_out_channels - piece.first * form.columns
            join(
                channel,
                form.pixel_channels
                if form.pixel_pack > 1
                else min(last, piece.count * form.columns),
            )
    acc.chunks.clear()
    acc.pending = None


def _drain(
    emitter: Emitter,
    form: ConvForm,
    mac: Instr,
    out: View,
    piece: _Chunk,
    span: _Span,
    fields: Fields,
) -> None:
    """Append the `vec_drain` of a `mac_conv` into `out` [h, w, c]."""
    tile = out.buffer
    assert isinstance(tile, Tile)
    row, pixel, _ = tile_strides(out)
    channel = piece.part * form.part_out_channels + piece.first * form.columns
    emitter.add(
        "vec_drain",
        reads=(),
        writes=[tile.region],
        m_half=mac.fields["m_half"],
        dst=tile_address(out) + span.first * pixel + channel * tile.item_bytes,
        out_h=mac.fields["out_h"],
        out_w=mac.fields["out_w"],
        block_rows=mac.fields["block_rows"],
        oc_blocks=piece.count,
        cols=mac.fields["cols"],
        cols_last=mac.fields["cols_last"],
        oy_stride=row if out.sizes[0] > 1 else 0,
        ox_stride=pixel * form.pixel_pack if span.vectors > 1 else 0,
        ob_stride=form.columns * tile.item_bytes if piece.count > 1 else 0,
        **fields,
    )
    blocks = piece.count * ceil(mac.fields["out_h"] / mac.fields["block_rows"])
    emitter.half = (mac.fields["m_half"] + blocks) % 2


def fuse_table(emitter: Emitter, source: View, key: Hashable, table: Tile, target: View) -> None:
    """Make the drains that produced `source` apply a table and write to `target` instead."""
    old, new = source.buffer, target.buffer
    assert isinstance(old, Tile)
    assert isinstance(new, Tile)
    first = old.drains[0]
    before = len(emitter.program)
    held = emitter.table(key, table, before=first)
    moved = len(emitter.program) - before
    shift = tile_address(target) - tile_address(source)
    for position in old.drains:
        drain = emitter.program[position + moved]
        drain.fields |= {
            "use_table": 1,
            "v_table": held["v_table"],
            "dst": drain.fields["dst"] + shift,
        }
        drain.wants["v_table"] = held[f"{WANT}v_table"]
        drain.writes = [new.region]
