"""Pieces of an instruction touch what the whole touches, and rows lie where they are said to."""

from __future__ import annotations

import pytest

from tilewright.spec.access import accesses
from tilewright.spec.hardware import load_target
from tilewright.spec.program import DEFAULTS
from tilewright.transforms.tpu.instruction import Instr, Region
from tilewright.transforms.tpu.rows import Rows, Unit

EDGE = load_target("edge16")
POOL = {
    "src": 64, "dst": 4096, "n0": 16, "out_h": 5, "out_w": 4, "k_h": 3, "k_w": 3, "src_sy": 256,
    "src_sx": 32, "ky_stride": 128, "kx_stride": 16, "dst_sy": 64, "dst_sx": 16,
}  # fmt: skip
ADD = {
    "a": 0, "b": 2048, "dst": 0, "n0": 12, "n1": 7, "n2": 1, "a_s1": 16, "b_s1": 32, "dst_s1": 16,
}  # fmt: skip
LOAD = {
    "ddr": 640, "ddr_r": 2, "sram": 128, "n0": 24, "n1": 6, "ddr_s1": 24, "sram_s1": 32,
    "pad1_lo": 2, "pad1_hi": 1, "stream": 1,
}  # fmt: skip


def _touched(name: str, fields: dict[str, int], write: bool, sram: bool) -> set[int]:
    return {
        int(start) + offset
        for region in accesses(EDGE, name, DEFAULTS[name] | fields)
        if region.write is write and region.sram is sram
        for start in region.starts()
        for offset in range(region.run)
    }


@pytest.mark.parametrize(
    ("name", "fields"), [("vec_pool", POOL), ("vec_eltwise", ADD), ("dma_load", LOAD)]
)
@pytest.mark.parametrize("cuts", [[1], [2, 4], [1, 2, 3, 4]])
def test_pieces_touch_what_the_whole_touches(
    name: str, fields: dict[str, int], cuts: list[int]
) -> None:
    far = [Region("ddr", 640, 1 << 12)] if name == "dma_load" else []
    unit = Unit(EDGE, [(0, Instr(name, fields, "x", far))])
    pieces = [unit.make(*piece)[0] for piece in unit.pieces(cuts)]
    assert len(pieces) == len(cuts) + 1
    for write in (False, True):
        for sram in (False, True):
            parts = [_touched(name, piece.fields, write, sram) for piece in pieces]
            assert set().union(*parts) == _touched(name, fields, write, sram)
            if write:
                # Written once each.
                assert sum(map(len, parts)) == len(_touched(name, fields, write, sram))


def test_a_reader_gets_the_rows_that_are_there() -> None:
    writer = Unit(EDGE, [(0, Instr("vec_eltwise", ADD | {"dst": 64}, "x"))])
    reader = Unit(EDGE, [(1, Instr("vec_pool", POOL | {"src_sy": 16, "ky_stride": 16}, "x"))])
    low, high = writer.hull()
    for row in range(1, writer.rows):
        end = writer.written_before(row)
        rows = reader.rows_within(low, end, high)
        read = _touched("vec_pool", reader.full[0] | {"out_h": max(rows, 1)}, False, True)
        assert rows == 0 or max(read) < end
        if rows < reader.rows:
            more = _touched("vec_pool", reader.full[0] | {"out_h": rows + 1}, False, True)
            assert max(more) >= end


def test_rows_below_an_address() -> None:
    rows = Rows(100, 10, 14)
    for end in range(90, 160):
        assert rows.before(end) == sum(100 + 10 * row + 14 <= end for row in range(20))
