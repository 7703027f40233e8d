"""Softmax and layer normalisation of the rows of SRAM tiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tilewright.transforms.tpu.emitter import Emitter, place_of
from tilewright.transforms.tpu.views import (
    DdrBuffer,
    Loop,
    Tile,
    View,
    fit_loops,
    merge_loops,
    tile_address,
    tile_strides,
)

LIMITS = (1 << 12, 1 << 14)
"""Most rows of the two dimensions of an instruction."""


def softmax(
    emitter: Emitter, source: View, target: View, table: Tile, end: Mapping[str, int]
) -> None:
    """Issue a softmax of every pixel of a tile [h, w, n]; `end` has the instruction's numbers."""
    assert table.source is not None
    assert isinstance(table.source.buffer, DdrBuffer)
    held = emitter.row_table(table.source.buffer.name, table)
    for places in _places(source, target):
        emitter.add(
            "vec_softmax",
            reads=[_tile(source).region],
            writes=[_tile(target).region],
            **held,
            **places,
            **end,
        )


def layer_norm(
    emitter: Emitter, source: View, target: View, parameters: Tile, end: Mapping[str, int]
) -> None:
    """Issue a layer normalisation of every pixel of a tile [h, w, n]."""
    for places in _places(source, target):
        emitter.add(
            "vec_layer_norm",
            reads=[_tile(source).region, parameters.region],
            writes=[_tile(target).region],
            params=parameters.address,
            want_params=place_of(parameters)[0],
            **places,
            **end,
        )


def _tile(view: View) -> Tile:
    assert isinstance(view.buffer, Tile)
    return view.buffer


def _places(source: View, target: View) -> Iterator[dict[str, int]]:
    """Yield addresses, counts and strides of the instructions that take all rows."""
    views = source.squeezed(3), target.squeezed(3)
    steps = [tile_strides(view)[:2] for view in views]
    loops = merge_loops(
        [Loop(count, (steps[0][k], steps[1][k])) for k, count in enumerate(views[0].sizes[:2])]
    )
    for (from_source, from_target), (outer, inner) in fit_loops(loops, LIMITS, 2):
        yield {
            "src": tile_address(source) + from_source, "dst": tile_address(target) + from_target,
            "n0": views[0].sizes[2], "n1": inner.count, "n2": outer.count,
            "src_s1": inner.steps[0], "src_s2": outer.steps[0],
            "dst_s1": inner.steps[1], "dst_s2": outer.steps[1],
        }  # fmt: skip
