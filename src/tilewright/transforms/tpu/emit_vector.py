"""Work of the vector unit on SRAM tiles: elementwise, copies and tables, pooling, resizing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.spec.isa import BY_NAME, FUNCTIONS
from tilewright.transforms.tpu.emit_conv import dtype_field
from tilewright.transforms.tpu.emitter import Emitter
from tilewright.transforms.tpu.views import (
    Loop,
    Tile,
    View,
    fit_loops,
    merge_loops,
    tile_address,
    tile_strides,
)


@dataclass(frozen=True)
class Rescale:
    """Integer parameters of an elementwise operation (docs/concepts/numerics.md)."""

    mult_a: int
    mult_b: int
    shift: int
    bias: int
    bias_shift: int
    za: int
    zb: int
    zp: int
    lo: int
    hi: int

    def fields(self, emitter: Emitter, scalars: Tile) -> dict[str, int]:
        """Make the parameters resident and return the instruction fields."""
        return {
            **emitter.scalar_parameters(self.mult_a, self.mult_b, self.shift, scalars),
            "bias": self.bias,
            "bias_shift": self.bias_shift,
            "za": self.za,
            "zp": self.zp,
            "lo": self.lo,
            "hi": self.hi,
        }


@dataclass(frozen=True)
class HalfOutput:
    """What happens to a float32 value before it is rounded to fp16."""

    function: str
    """Of one value; `none` in operations of two."""
    clamp: tuple[float, float]

    def fields(self, emitter: Emitter, scalars: Tile) -> dict[str, int]:
        """Make the clamp resident and return the instruction fields."""
        return emitter.clamp(self.clamp, scalars)


def _tile(view: View) -> Tile:
    assert isinstance(view.buffer, Tile)
    return view.buffer


def operand_steps(view: View, dims: Sequence[int | None], rank: int) -> list[int]:
    """Return the byte step of every loop dimension for an operand.

    `dims[r]` is the loop dimension that indexes axis r of the view, or None where the axis is
    indexed by a constant.
    """
    steps = [0] * rank
    for axis, (dim, step) in enumerate(zip(dims, tile_strides(view), strict=True)):
        if dim is not None and view.sizes[axis] > 1:
            steps[dim] += step
    return steps


def eltwise(
    emitter: Emitter,
    function: str,
    a: View,
    b: View,
    target: View,
    steps: tuple[list[int], list[int], list[int]],
    counts: Sequence[int],
    rescale: Rescale | HalfOutput | None,
    scalars: Tile | None,
) -> None:
    """Issue an elementwise operation of two tiles; `steps` are those of a, b and the target."""
    loops = [Loop(count, (sa, sb, st)) for count, sa, sb, st in zip(counts, *steps, strict=True)]
    item = _tile(target).item_bytes
    loops = merge_loops(loops) or [Loop(1, (item, item, item))]
    inner = loops[-1].steps
    if loops[-1].count > 1 and inner[0] == 0 and inner[1] == item and function != "sub":
        # Only b can be a scalar of a run; the operation commutes.
        if isinstance(rescale, Rescale):
            assert function in ("add", "mul")
            rescale = Rescale(
                rescale.mult_b if function == "add" else rescale.mult_a,
                rescale.mult_a, rescale.shift, rescale.bias, rescale.bias_shift,
                rescale.zb, rescale.za, rescale.zp, rescale.lo, rescale.hi,
            )  # fmt: skip
        a, b = b, a
        loops = [Loop(loop.count, (loop.steps[1], loop.steps[0], loop.steps[2])) for loop in loops]
        inner = loops[-1].steps
    if loops[-1].count > 1 and (inner[0] != item or inner[2] != item or inner[1] not in (0, item)):
        # Not contiguous: runs of one element.
        loops.append(Loop(1, (0, 0, 0)))
        inner = loops[-1].steps
    operation = BY_NAME["vec_eltwise"].field["op"].names.index(function)
    common = {"op": operation, "b_scalar": int(loops[-1].count > 1 and inner[1] == 0)}
    common |= dtype_field(item)
    if rescale is not None:
        assert scalars is not None
        common |= rescale.fields(emitter, scalars)
    if isinstance(rescale, Rescale):
        common["zb"] = rescale.zb
    for (off_a, off_b, off_t), (outer, middle, run) in fit_loops(
        loops, (1 << 12, 1 << 14, 1 << 14), 3
    ):
        emitter.add(
            "vec_eltwise",
            reads=[_tile(a).region, _tile(b).region],
            writes=[_tile(target).region],
            a=tile_address(a) + off_a, b=tile_address(b) + off_b,
            dst=tile_address(target) + off_t,
            n0=run.count, n1=middle.count, n2=outer.count,
            a_s1=middle.steps[0], b_s1=middle.steps[1], dst_s1=middle.steps[2],
            a_s2=outer.steps[0], b_s2=outer.steps[1], dst_s2=outer.steps[2],
            **common,
        )  # fmt: skip


def copy(
    emitter: Emitter,
    source: View,
    target: View,
    steps: tuple[list[int], list[int]],
    counts: Sequence[int],
    rescale: Rescale | HalfOutput | None = None,
    scalars: Tile | None = None,
    held: dict[str, int] | None = None,
) -> None:
    """Move (and rescale, look up, or apply a function to) a tile, in any order of dimensions.

    `held` names the lookup table, if there is one (`Emitter.table`).
    """
    loops = [
        Loop(count, pair)
        for count, *pair_ in zip(counts, *steps, strict=True)
        for pair in [tuple(pair_)]
    ]
    # Walk the result in storage order: the innermost loop is the one with the smallest step there.
    loops.sort(key=lambda loop: -loop.steps[1])
    item = _tile(target).item_bytes
    loops = merge_loops(loops) or [Loop(1, (item, item))]
    common = dtype_field(item)
    if rescale is not None:
        assert scalars is not None
        common |= {"requantise": 1, **rescale.fields(emitter, scalars)}
        if isinstance(rescale, HalfOutput):
            common["function"] = FUNCTIONS.index(rescale.function)
    if held is not None:
        common |= {"use_table": 1, **held}
    limits = (1 << 12, 1 << 14, 1 << 14, 1 << 16)
    for (off_s, off_t), (third, second, first, inner) in fit_loops(loops, limits, 2):
        emitter.add(
            "vec_copy",
            reads=[_tile(source).region],
            writes=[_tile(target).region],
            src=tile_address(source) + off_s, dst=tile_address(target) + off_t,
            n0=inner.count, n1=first.count, n2=second.count, n3=third.count,
            src_s0=inner.steps[0], src_s1=first.steps[0],
            src_s2=second.steps[0], src_s3=third.steps[0],
            dst_s0=inner.steps[1], dst_s1=first.steps[1],
            dst_s2=second.steps[1], dst_s3=third.steps[1],
            **common,
        )  # fmt: skip


def _pixels(view: View) -> tuple[int, int]:
    """Return the byte steps of rows and columns of a tile view [h, w, c]."""
    tile = _tile(view)
    row, pixel, _ = tile_strides(view.squeezed(3))
    return row or (tile.shape[-2] if len(tile.shape) > 1 else 1) * tile.pitch, pixel or tile.pitch


def pool(
    emitter: Emitter,
    source: View,
    target: View,
    kernel: tuple[int, int],
    strides: tuple[int, int],
    dilations: tuple[int, int],
) -> None:
    """Issue a window maximum over a tile [h, w, c] (padding included)."""
    row, pixel = _pixels(source)
    out_row, out_pixel = _pixels(target)
    out_h, out_w, channels = target.squeezed(3).sizes
    emitter.add(
        "vec_pool",
        reads=[_tile(source).region],
        writes=[_tile(target).region],
        src=tile_address(source), dst=tile_address(target), n0=channels, out_h=out_h, out_w=out_w,
        k_h=kernel[0], k_w=kernel[1],
        src_sy=row * strides[0] if out_h > 1 else 0, src_sx=pixel * strides[1] if out_w > 1 else 0,
        ky_stride=row * dilations[0] if kernel[0] > 1 else 0,
        kx_stride=pixel * dilations[1] if kernel[1] > 1 else 0,
        dst_sy=out_row if out_h > 1 else 0, dst_sx=out_pixel if out_w > 1 else 0,
        **dtype_field(_tile(target).item_bytes),
    )  # fmt: skip


def resize(
    emitter: Emitter,
    source: View,
    tables: tuple[Tile, Tile],
    target: View,
    rescale: Rescale,
    scalars: Tile,
) -> None:
    """Issue an interpolation of a tile [h, w, c] by index and weight tables."""
    row, pixel = _pixels(source)
    out_row, out_pixel = _pixels(target)
    out_h, out_w, channels = target.squeezed(3).sizes
    in_h, in_w, _ = source.squeezed(3).sizes
    emitter.add(
        "vec_resize",
        reads=[_tile(source).region, tables[0].region, tables[1].region],
        writes=[_tile(target).region],
        src=tile_address(source), dst=tile_address(target),
        table_y=tables[0].address, table_x=tables[1].address, n0=channels, out_h=out_h, out_w=out_w,
        in_h=in_h, in_w=in_w, src_sy=row, src_sx=pixel, dst_sy=out_row, dst_sx=out_pixel,
        **rescale.fields(emitter, scalars),
    )  # fmt: skip


def resize_table_bytes(rows: np.ndarray) -> np.ndarray:
    """Return a resize table [n, 4] int16 as the bytes `vec_resize` reads."""
    return np.ascontiguousarray(rows.astype("<i2")).view(np.uint8).reshape(-1)
