"""Counts at the ends of their fields: few bytes, very many steps."""

from __future__ import annotations

from tilewright.spec.program import Instr
from tilewright.testgen import patterns
from tilewright.testgen.builder import Builder, Fields


def dma(b: Builder) -> bool:
    """Add a DMA instruction with a long count or much padding."""
    pick = b.pick
    f: Fields = {"channel": patterns.channel(b)}
    if pick.chance(0.4):
        count = pick.of(1021, 2048, 4099)
        f |= {"n1": count, "sram_s1": 1} if pick.chance(0.5) else {"n2": count, "sram_s2": 1}
        return b.add("dma_fill", f | {"sram": b.sram(count), "fill": pick.between(0, 255)})
    n0 = pick.of(1, 2, 3)
    pads = {pick.of("pad1_lo", "pad1_hi"): 255, pick.of("pad2_lo", "pad2_hi"): pick.of(0, 1, 2)}
    if pick.chance(0.5):
        pads = {pick.of("pad2_lo", "pad2_hi"): 255, "pad1_lo": pick.of(0, 1)}
    f |= pads | {"n0": n0, "stream": 1, "fill": pick.between(0, 255)}
    rows = 1 + f.get("pad1_lo", 0) + f.get("pad1_hi", 0)
    planes = 1 + f.get("pad2_lo", 0) + f.get("pad2_hi", 0)
    f |= {"sram_s1": n0, "sram_s2": n0 * rows}
    f |= b.address("ddr", b.ddr(n0), 40)
    return b.add("dma_load", f | b.address("sram", b.sram(n0 * rows * planes)))


def vector(b: Builder) -> bool:
    """Add an instruction of the vector unit with a long count."""
    pick = b.pick
    kind = pick.of("vec_pool", "vec_copy", "vec_eltwise")
    f: Fields
    if kind == "vec_pool":
        f = {pick.of("k_w", "k_h"): 256, "n0": pick.of(1, 5), "kx_stride": pick.of(0, 1, 3)}
        f |= {"ky_stride": pick.of(0, 1, 3), "src": b.sram(800, read=True), "dst": b.sram(8)}
    elif kind == "vec_copy":
        size = pick.of(4099, 8191) if b.hardware.sram_size >= 1 << 15 else 512
        f = {"n0": size, "src_s0": pick.of(0, 1), "dst_s0": 1}
        f |= {"src": b.sram(size), "dst": b.sram(size)}
        f["src_s0"] = 1 if size > 5000 else f["src_s0"]
    else:
        count = pick.of(509, 1021)
        f = {"n1": count, "a_s1": 1, "b_s1": pick.of(0, 1), "dst_s1": 1, "op": pick.of(3, 4)}
        f |= {name: b.sram(count, read=name != "dst") for name in ("a", "b", "dst")}
    return b.add(kind, f)


def mac(b: Builder) -> bool:
    """Add a convolution of very many steps, or very many pixels of one step."""
    pick, hw = b.pick, b.hardware
    if not b.v_written.any() and not patterns.param(b):
        return False
    v = int(b.v_written.argmax())
    f: Fields = {"c_last": pick.size(min(8, hw.array_size)), "cols_last": pick.size(hw.array_size)}
    kind = pick.of("kernel", "blocks", "rows")
    shape: Fields = {"cols_last": f["cols_last"], "m_half": pick.of(0, 1)}
    if kind == "kernel":
        f |= {pick.of("k_w", "k_h"): 256, "kx_stride": pick.of(0, 1), "ky_stride": pick.of(0, 1)}
    elif kind == "blocks":
        f |= {"c_blocks": 1024, "cb_stride": pick.of(0, 1), "diag": 1, "c_rows": 1}
    else:
        shape |= {"out_h": pick.of(127, 251), "block_rows": pick.of(1, 2, 7)}
        f["oy_stride"] = pick.of(0, 1, 3)
    f |= {"wgt_pitch": pick.of(0, 1), "act": b.sram(1100, banks=[0]), "wgt": hw.bank_size}
    drain = shape | {"raw": 1, "v": v}
    drain |= {"oy_stride": 4 * hw.array_size, "dst": (hw.sram_banks - 1) * hw.bank_size}
    if not (b.fits("mac_conv", f | shape) and b.fits("vec_drain", drain)):
        return False
    if patterns.meets(b, drain, [f | shape]):
        return False
    b.append(Instr("mac_conv", f | shape))
    b.append(Instr("vec_drain", drain))
    return True
