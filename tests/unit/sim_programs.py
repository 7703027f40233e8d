"""Small programs and slow, plain definitions that the simulator tests compare with."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tilewright.spec.hardware import Hardware
from tilewright.spec.program import DEFAULTS, Instr

DMA0, DMA1, MAC, VEC = 0, 1, 4, 5


def semaphore(producer: int, consumer: int) -> int:
    """Return the semaphore of an ordered pair of engines (docs/concepts/machine.md)."""
    return producer * 5 + consumer - (consumer > producer)


def bit(producer: int, consumer: int) -> int:
    return 1 << semaphore(producer, consumer)


def rshift(value: int, shift: int, rounding: str) -> int:
    """The rounding shift on Python integers, as docs/concepts/numerics.md has it."""
    if shift == 0:
        return value
    half, unit = 1 << (shift - 1), 1 << shift
    sign = -1 if value < 0 else 1
    if rounding == "half_up":
        return (value + half) // unit
    if rounding == "half_away":
        return sign * ((abs(value) + half) // unit)
    if rounding == "truncate":
        return sign * (abs(value) // unit)
    low, rest = divmod(value, unit)
    return low + (1 if rest > half or (rest == half and low % 2) else 0)


def clamp(value: int, low: int, high: int) -> int:
    return min(max(value, low), high)


def wrap32(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


@dataclass
class ConvCase:
    """A convolution on SRAM-resident operands: load, mac, drain, store."""

    program: list[Instr]
    ddr: np.ndarray[Any, Any]
    result: tuple[int, int]
    """DDR address and size of the result."""
    expected: np.ndarray[Any, Any]


def parameter_block(
    lanes: int,
    bias: np.ndarray[Any, Any],
    mult: np.ndarray[Any, Any],
    shift: np.ndarray[Any, Any],
) -> bytes:
    def pad(values: np.ndarray[Any, Any], dtype: str) -> bytes:
        full = np.zeros(lanes, dtype)
        full[: len(values)] = values
        return full.tobytes()

    return pad(bias, "<i4") + pad(mult, "<u4") + pad(shift, "u1")


def full(name: str, **fields: int) -> dict[str, int]:
    return {**DEFAULTS[name], **fields}


def conv_case(
    hardware: Hardware,
    seed: int,
    *,
    height: int = 6,
    width: int = 5,
    channels: int = 8,
    outputs: int = 8,
    kernel: int = 3,
    stride: int = 1,
    depthwise: bool = False,
    block_rows: int = 2,
    zp: int = 3,
    large: bool = False,
) -> ConvCase:
    """Return a program for one convolution and what it must give, by plain loops."""
    rng = np.random.default_rng(seed)
    array, lanes = hardware.array_size, hardware.vector_lanes
    x = rng.integers(-128, 128, (height, width, channels))
    out_h, out_w = (height - kernel) // stride + 1, (width - kernel) // stride + 1
    if depthwise:
        outputs = channels
        w = rng.integers(-128, 128, (kernel, kernel, channels))
    else:
        w = rng.integers(-128, 128, (kernel, kernel, channels, outputs))
    if large:
        w = np.full_like(w, 127)
        x = np.full_like(x, 127)
    bias = rng.integers(-(2**20), 2**20, outputs)
    mult = rng.integers(2**29, 2**31, outputs)
    shift = rng.integers(34, 46, outputs)
    oc_blocks = -(-outputs // array)
    cols = min(outputs, array)
    cols_last = outputs - (oc_blocks - 1) * cols
    c_rows = min(channels, array)
    c_blocks = 1 if depthwise else -(-channels // c_rows)
    c_last = c_rows if depthwise else channels - (c_blocks - 1) * c_rows
    # Weights, packed block by block in the order mac_conv reads.
    pitch = -(-cols // 4) * 4
    blocks = []
    for ob in range(oc_blocks):
        n = cols_last if ob == oc_blocks - 1 else cols
        columns = w[..., ob * cols : ob * cols + n].reshape(-1, n)
        padded = np.zeros((columns.shape[0], pitch), np.int8)
        padded[:, :n] = columns
        blocks.append(padded)
    packed = np.concatenate(blocks).astype(np.int8)
    params = b"".join(
        parameter_block(lanes, bias[b : b + cols], mult[b : b + cols], shift[b : b + cols])
        for b in range(0, outputs, cols)
    )
    images = [x.astype(np.int8).tobytes(), packed.tobytes(), params]
    ddr = np.zeros(1 << 16, np.uint8)
    address, places = 0, []
    for image in images:
        ddr[address : address + len(image)] = np.frombuffer(image, np.uint8)
        places.append(address)
        address = -(-(address + len(image)) // 64) * 64
    out_size = out_h * out_w * outputs
    bank = hardware.bank_size
    act, wgt, par, dst = 0, bank, 2 * bank, 3 * bank
    program = [
        Instr("dma_load", {"ddr": places[0], "sram": act, "n0": len(images[0]), "stream": 1,
                           "signal": bit(DMA0, MAC)}, "c"),
        Instr("dma_load", {"ddr": places[2], "sram": par, "n0": len(images[2]), "stream": 1,
                           "channel": 1, "signal": bit(DMA1, VEC)}, "c"),
        Instr("dma_load", {"ddr": places[1], "sram": wgt, "n0": len(images[1]), "stream": 1,
                           "channel": 1, "signal": bit(DMA1, MAC)}, "c"),
        Instr("vec_param", {"src": par, "count": oc_blocks, "v": 1, "param": 2,
                            "wait": bit(DMA1, VEC)}, "c"),
        Instr("mac_conv", {
            "wait": bit(DMA0, MAC) | bit(DMA1, MAC), "diag": int(depthwise), "act": act,
            "wgt": wgt, "out_h": out_h, "out_w": out_w, "block_rows": block_rows,
            "oy_stride": stride * width * channels, "ox_stride": stride * channels,
            "k_h": kernel, "k_w": kernel, "ky_stride": width * channels, "kx_stride": channels,
            "c_blocks": c_blocks, "cb_stride": c_rows, "c_rows": c_rows, "c_last": c_last,
            "oc_blocks": oc_blocks, "ob_stride": cols if depthwise else 0, "cols": cols,
            "cols_last": cols_last, "wgt_pitch": pitch, "wgt_ob_stride": blocks[0].size,
        }, "c"),
        Instr("vec_drain", {
            "dst": dst, "out_h": out_h, "out_w": out_w, "block_rows": block_rows,
            "oc_blocks": oc_blocks, "cols": cols, "cols_last": cols_last,
            "oy_stride": out_w * outputs, "ox_stride": outputs, "ob_stride": cols,
            "param": 2, "v": 1, "zp": zp, "lo": -100, "hi": 120, "signal": bit(VEC, DMA0),
        }, "c"),
        Instr("dma_store", {"ddr": 1 << 15, "sram": dst, "n0": out_size, "stream": 1,
                            "wait": bit(VEC, DMA0)}, "c"),
        Instr("halt", {}, ""),
    ]  # fmt: skip
    expected = np.zeros((out_h, out_w, outputs), np.int8)
    for oy in range(out_h):
        for ox in range(out_w):
            patch = x[oy * stride : oy * stride + kernel, ox * stride : ox * stride + kernel]
            for o in range(outputs):
                if depthwise:
                    total = int((patch[..., o] * w[..., o]).sum())
                else:
                    total = int((patch * w[..., o]).sum())
                value = wrap32(total + int(bias[o])) * int(mult[o])
                code = rshift(value, int(shift[o]), hardware.rounding) + zp
                expected[oy, ox, o] = clamp(code, -100, 120)
    return ConvCase(program, ddr, (1 << 15, out_size), expected)


def pipeline(hardware: Hardware, tiles: int, *, layers: int = 1, seed: int = 0) -> list[Instr]:
    """Return a double-buffered, correctly synchronised convolution pipeline of `tiles` tiles.

    Per tile: activations by channel 0, weights by channel 1, mac_conv, vec_drain, store by channel
    0. Two slots each; a slot is filled again only when its reader has signalled.
    """
    rng = np.random.default_rng(seed)
    bank, array = hardware.bank_size, hardware.array_size
    side, k = 6, 3
    channels = min(array, 16)
    act_bytes = side * side * channels
    wgt_bytes = k * k * channels * channels
    out_bytes = 16 * channels
    half = bank // 2
    act = [0, half]
    wgt = [bank, bank + half]
    out = [2 * bank, 2 * bank + half]
    par = 3 * bank
    params = 9 * hardware.vector_lanes
    base = 1 << 12
    program = [
        Instr("dma_load", {"ddr": 0, "sram": par, "n0": params, "stream": 1,
                           "signal": bit(DMA0, VEC)}, "layer0"),
        Instr("vec_param", {"src": par, "count": 1, "wait": bit(DMA0, VEC)}, "layer0"),
    ]  # fmt: skip
    for tile in range(tiles):
        slot, layer = tile % 2, f"layer{tile * layers // tiles}"
        reuse = tile >= 2
        source = base + int(rng.integers(0, 8)) * 64
        program += [
            Instr("dma_load", {"ddr": source, "sram": act[slot], "n0": act_bytes, "stream": 1,
                               "wait": bit(MAC, DMA0) if reuse else 0,
                               "signal": bit(DMA0, MAC)}, layer),
            Instr("dma_load", {"ddr": source + 64, "sram": wgt[slot], "n0": wgt_bytes,
                               "channel": 1, "stream": 1,
                               "wait": bit(MAC, DMA1) if reuse else 0,
                               "signal": bit(DMA1, MAC)}, layer),
            Instr("mac_conv", {
                "wait": bit(DMA0, MAC) | bit(DMA1, MAC),
                "signal": (bit(MAC, DMA0) | bit(MAC, DMA1)) if tile + 2 < tiles else 0,
                "act": act[slot], "wgt": wgt[slot], "out_h": 4, "out_w": 4, "block_rows": 2,
                "oy_stride": side * channels, "ox_stride": channels, "k_h": k, "k_w": k,
                "ky_stride": side * channels, "kx_stride": channels, "c_rows": channels,
                "c_last": channels, "cols": channels, "cols_last": channels,
                "wgt_pitch": channels,
            }, layer),
            Instr("vec_drain", {
                "wait": bit(DMA0, VEC) if reuse else 0, "signal": bit(VEC, DMA0),
                "dst": out[slot], "out_h": 4, "out_w": 4, "block_rows": 2, "cols": channels,
                "cols_last": channels, "oy_stride": 4 * channels, "ox_stride": channels,
            }, layer),
            Instr("dma_store", {"ddr": (1 << 15) + tile % 64 * out_bytes, "sram": out[slot],
                                "n0": out_bytes, "stream": 1, "wait": bit(VEC, DMA0),
                                "signal": bit(DMA0, VEC) if tile + 2 < tiles else 0}, layer),
        ]  # fmt: skip
    program.append(Instr("halt"))
    return program


def enables(step: int, core: int, cycle: int) -> int:
    """Return the pulses in `cycle` of a clock of `step` MHz derived from `core` MHz."""
    return (cycle + 1) * step // core - cycle * step // core


def dma_alone(hardware: Hardware, name: str, f: dict[str, int], start: int) -> int:
    """Return the `end` of a DMA instruction that has the machine for itself.

    Slow and plain: lists of units and chunks made beforehand, a cycle at a time.
    """
    g, w = hardware.ddr_bus_bytes, hardware.sram_word_bytes
    factor = hardware.dma_stream_latency_factor if f.get("stream") else 1
    wait = -(-hardware.dma_latency * factor * hardware.core_clock_mhz // hardware.dma_clock_mhz)
    load, store = name == "dma_load", name == "dma_store"
    lo1, hi1, lo2, hi2 = (f.get(f"pad{side}", 0) for side in ("1_lo", "1_hi", "2_lo", "2_hi"))
    source_unit, sink_unit = (w, g) if store else (g, w)
    source: list[int] = []
    chunks: list[tuple[int, int | None, int]] = []  # bytes, source unit, sink unit
    for i3 in range(f.get("n3", 1)):
        for i2 in range(-lo2, f["n2"] + hi2):
            for i1 in range(-lo1, f["n1"] + hi1):
                data = 0 <= i2 < f["n2"] and 0 <= i1 < f["n1"] and (load or store)
                sram = f["sram"] + i3 * f.get("sram_s3", 0)
                sram += (i2 + lo2) * f["sram_s2"] + (i1 + lo1) * f["sram_s1"]
                ddr = f.get("ddr", 0) + i3 * f.get("ddr_s3", 0)
                ddr += i2 * f.get("ddr_s2", 0) + i1 * f.get("ddr_s1", 0)
                one, other = (sram, ddr) if store else (ddr, sram)
                if data:
                    first = one // source_unit
                    last = (one + f["n0"] - 1) // source_unit
                    source += [unit * source_unit for unit in range(first, last + 1)]
                cuts = {0, f["n0"]}
                for byte in range(1, f["n0"]):
                    if (other + byte) % sink_unit == 0 or (
                        data and (one + byte) % source_unit == 0
                    ):
                        cuts.add(byte)
                ordered = sorted(cuts)
                for a, b in pairwise(ordered):
                    unit = (one + a) // source_unit * source_unit if data else None
                    chunks.append((b - a, unit, (other + a) // sink_unit * sink_unit))
    bus = budget = hardware.dma_bus_bytes
    fifo: list[int] = []
    arriving: list[int] = []
    held = collector = output = previous = None
    cycle = start + 1 + wait
    while True:
        beats = enables(hardware.ddr_clock_mhz, hardware.core_clock_mhz, cycle)
        ticks = enables(hardware.dma_clock_mhz, hardware.core_clock_mhz, cycle)
        space = len(fifo) + len(arriving) < 4
        # Grants: a load's source and a store's sink use DDR, once a cycle and channel.
        skip = bool(source) and source[0] == previous
        read = bool(source) and not skip and space and (store or beats > 0)
        written = output is not None and (not store or beats > 0)
        moved_all = not chunks
        if moved_all and collector is None and written:
            return cycle + 1
        free = output is None or written
        if written:
            output = None
        spent = 0
        if moved_all:
            if collector is not None and free:
                output, collector = collector, None
        else:
            size, unit, sink = chunks[0]
            there = unit is None or unit == held or bool(fifo)
            if budget > 0 and there and (collector is None or collector == sink or free):
                if unit is not None and unit != held:
                    held = fifo.pop(0)
                    assert held == unit, "units arrive in the order they are needed"
                if collector is not None and collector != sink:
                    output = collector
                collector = sink
                spent = size
                chunks.pop(0)
        fifo += arriving
        arriving = [source[0]] if read else []
        if read or skip:
            previous = source.pop(0)
        budget = min(budget - spent + ticks * bus, bus)
        cycle += 1
