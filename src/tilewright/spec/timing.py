"""Estimated cycles of instructions when nothing has to wait (docs/concepts/machine.md).

Pure integer functions of the target and an instruction's fields (all of them, defaults included).
Schedules are made by these; how long an instruction really takes is known to the cycle simulator
alone (docs/concepts/microarchitecture.md). Words are counted at the worst alignment, each engine is
taken to be as fast as the slowest of its ports.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from tilewright.spec.access import (
    Access,
    Fields,
    accesses,
    element_bytes,
    reduction_rows,
    weight_row_bytes,
)
from tilewright.spec.hardware import Hardware
from tilewright.spec.isa import INSTRUCTION_BYTES

FETCH_INSTRUCTIONS = 16
"""Instructions the sequencer fetches from DDR at once."""
FETCH_BLOCKS = 4
"""Fetched blocks its buffer holds."""
FETCH_BYTES = FETCH_INSTRUCTIONS * INSTRUCTION_BYTES
POP = 1
"""The cycle in which an engine takes an instruction from its queue."""
DMA_PIPELINE = 4
"""From the last unit's read to the last word's write: arrival, move, passing on, write."""
VECTOR_PIPELINE = 1
"""What a vector takes besides `vector_latency` from its last read to its first write."""

SOFTMAX_WAIT = 17
"""From the retirement of the last vector of a row's sum to the first begun with its reciprocal."""
LAYER_NORM_WAIT = 34
"""The same for the root of a row's variance, its reciprocal and two products."""


def ceil_div(value: int, unit: int) -> int:
    """Return `value / unit` rounded up."""
    return -(-value // unit)


def words(hardware: Hardware, size_bytes: int, alignment: int) -> int:
    """Return the port cycles of `size_bytes` contiguous bytes whose address is a multiple of
    `alignment` (which divides the word size): the worst case over such addresses.
    """  # noqa: D205
    word = hardware.sram_word_bytes
    return ceil_div(word - alignment + size_bytes, word)


def dma_to_core(hardware: Hardware, dma_cycles: int) -> int:
    """Return DMA cycles in core cycles, rounded up."""
    return ceil_div(dma_cycles * hardware.core_clock_mhz, hardware.dma_clock_mhz)


def ddr_to_core(hardware: Hardware, size_bytes: int) -> int:
    """Return the core cycles DDR needs for `size_bytes` at its peak, rounded up."""
    return ceil_div(
        size_bytes * hardware.core_clock_mhz, hardware.ddr_bus_bytes * hardware.ddr_clock_mhz
    )


@dataclass(frozen=True, slots=True)
class PortUse:
    """Port cycles of one operand, spread evenly over the banks it spans."""

    operand: str
    low: int
    """First SRAM byte."""
    high: int
    """First SRAM byte after the region."""
    cycles: int


@dataclass(frozen=True, slots=True)
class MacTiming:
    """Estimated core cycles of a `mac_conv`."""

    first_load: int
    """Weights of the first step."""
    blocks: tuple[int, ...]
    """Cycles of each block, in order of execution."""
    latency: int
    ports: tuple[PortUse, ...]
    macs: int
    """Multiply-accumulates the instruction asks for."""
    padded_macs: int
    """Multiply-accumulates the array's cells go through: `blocks` times all cells."""

    @property
    def cycles(self) -> int:
        """All cycles from start to end."""
        return POP + self.first_load + sum(self.blocks) + self.latency


@dataclass(frozen=True, slots=True)
class DmaTiming:
    """Estimated core cycles and bytes of a DMA instruction."""

    latency: int
    channel: int
    """Cycles the channel's width asks for."""
    sram: int
    """SRAM port cycles."""
    ddr: int
    """Cycles at DDR's full bandwidth."""
    ddr_bytes: int
    """Bytes moved by DDR, granules and bursts whole."""
    bytes: int
    """Useful bytes."""
    ports: tuple[PortUse, ...]

    @property
    def data(self) -> int:
        """Cycles of the data phase when no other engine disturbs."""
        return max(1, self.channel, self.sram, self.ddr)

    @property
    def cycles(self) -> int:
        """All cycles from start to end."""
        return POP + self.latency + self.data + DMA_PIPELINE


@dataclass(frozen=True, slots=True)
class VecTiming:
    """Estimated core cycles of a vector instruction; a `vec_drain` has one entry a block."""

    blocks: tuple[int, ...]
    latency: int
    ports: tuple[PortUse, ...]

    @property
    def cycles(self) -> int:
        """All cycles from start to end."""
        return POP + sum(self.blocks) + self.latency + VECTOR_PIPELINE


def _port(region: Access, cycles: int) -> PortUse:
    return PortUse(region.operand, region.address, region.end, cycles)


def _merge_ports(ports: list[PortUse]) -> tuple[PortUse, ...]:
    merged: dict[str, PortUse] = {}
    for port in ports:
        known = merged.get(port.operand)
        if known is not None:
            port = PortUse(
                port.operand,
                min(port.low, known.low),
                max(port.high, known.high),
                port.cycles + known.cycles,
            )
        merged[port.operand] = port
    return tuple(merged.values())


def share_bank(hardware: Hardware, a: Access, b: Access) -> bool:
    """Return whether the spans of two SRAM regions have a bank in common."""
    bank = hardware.bank_size
    return a.address // bank <= (b.end - 1) // bank and b.address // bank <= (a.end - 1) // bank


def _gcd(word: int, address: int, *dims: tuple[int, int]) -> int:
    value = gcd(word, address)
    for count, stride in dims:
        if count > 1:
            value = gcd(value, stride)
    return value


def pixel_blocks(f: Fields) -> tuple[int, int, int]:
    """Return the pixel blocks of a `mac_conv` or `vec_drain`, pixels of a full and of the last."""
    count = ceil_div(f["out_h"], f["block_rows"])
    last = f["out_h"] - (count - 1) * f["block_rows"]
    return count, min(f["block_rows"], f["out_h"]) * f["out_w"], last * f["out_w"]


def mac_timing(hardware: Hardware, f: Fields) -> MacTiming:
    """Return the timing of a `mac_conv` with all its fields `f`."""
    size, array = element_bytes(f), hardware.array_size
    word = hardware.sram_word_bytes
    blocks, kernel = f["oc_blocks"], f["k_h"] * f["k_w"]
    act_align = _gcd(
        word,
        f["act"],
        (f["out_h"], f["oy_stride"]),
        (f["out_w"], f["ox_stride"]),
        (f["k_h"], f["ky_stride"]),
        (f["k_w"], f["kx_stride"]),
        (f["c_blocks"], f["cb_stride"]),
        (blocks, f["ob_stride"]),
    )
    row_align = _gcd(word, f["wgt"], (2, f["wgt_pitch"]), (blocks, f["wgt_ob_stride"]))
    pixel_count, pixels, last_pixels = pixel_blocks(f)
    tail = f["c_blocks"] - 1
    diagonal = bool(f["diag"])

    def load(rows: int, cols: int) -> int:
        row = words(hardware, weight_row_bytes(f, cols), row_align)
        return row if diagonal else rows * row

    def block(p: int, cols: int, next_cols: int | None) -> int:
        """Cycles of a block; the last step loads the next block's first weights, if any."""
        if diagonal:
            read = p * words(hardware, cols * size, act_align)
            step = max(read, load(1, cols))
            total = (kernel * (tail + 1) - 1) * step
            return total + (max(read, load(1, next_cols)) if next_cols is not None else read)
        read = p * words(hardware, f["c_rows"] * size, act_align)
        read_last = p * words(hardware, f["c_last"] * size, act_align)
        first_rows = f["c_rows"] if tail else f["c_last"]
        inner = max(0, tail - 1) * max(read, load(f["c_rows"], cols))
        if tail:
            inner += max(read, load(f["c_last"], cols))
        total = kernel * inner + (kernel - 1) * max(read_last, load(first_rows, cols))
        after = load(first_rows, next_cols) if next_cols is not None else 0
        return total + max(read_last, after)

    cycles: list[int] = []
    loads = reads = 0
    for ob in range(blocks):
        cols = f["cols"] if ob < blocks - 1 else f["cols_last"]
        following = None
        if ob < blocks - 1:
            following = f["cols"] if ob + 1 < blocks - 1 else f["cols_last"]
        if pixel_count > 1:
            cycles += [block(pixels, cols, cols)] * (pixel_count - 1)
        cycles.append(block(last_pixels, cols, following))
        # Words read over the whole of this output-channel block.
        image = f["out_h"] * f["out_w"]
        if diagonal:
            reads += image * kernel * (tail + 1) * words(hardware, cols * size, act_align)
            loads += pixel_count * kernel * (tail + 1) * load(1, cols)
        else:
            one = tail * words(hardware, f["c_rows"] * size, act_align)
            one += words(hardware, f["c_last"] * size, act_align)
            reads += image * kernel * one
            rows = tail * load(f["c_rows"], cols) + load(f["c_last"], cols)
            loads += pixel_count * kernel * rows
    columns = (blocks - 1) * f["cols"] + f["cols_last"]
    steps = kernel * f["c_blocks"] * blocks
    image = f["out_h"] * f["out_w"]
    depth = kernel * (f["c_blocks"] if diagonal else reduction_rows(f))
    regions = accesses(hardware, "mac_conv", f)
    ports = [_port(r, 0) for r in regions]
    act = next(p for p in _merge_ports(ports) if p.operand == "act")
    wgt = next(p for p in _merge_ports(ports) if p.operand == "wgt")
    return MacTiming(
        load(f["c_rows"] if tail else f["c_last"], f["cols"] if blocks > 1 else f["cols_last"]),
        tuple(cycles),
        hardware.mac_latency,
        (
            PortUse("act", act.low, act.high, reads),
            PortUse("wgt", wgt.low, wgt.high, loads),
        ),
        image * depth * columns,
        image * steps * array * array,
    )


def mac_cycles(hardware: Hardware, f: Fields) -> int:
    """Return the cycles of a `mac_conv`."""
    return mac_timing(hardware, f).cycles


def ddr_traffic(hardware: Hardware, region: Access, stream: bool) -> int:
    """Return the DDR bytes of a region: runs in granules (stream), or as they are (burst)."""
    runs = region.runs
    if not stream:
        return runs * region.run
    granule = hardware.ddr_bus_bytes
    offset = granule - region.alignment(granule)
    return runs * ceil_div(offset + region.run, granule) * granule


def dma_timing(hardware: Hardware, f: Fields, name: str = "dma_load") -> DmaTiming:
    """Return the timing of `dma_load`, `dma_store` or `dma_fill` with all its fields `f`."""
    regions = accesses(hardware, name, f)
    stream = bool(f.get("stream", 0))
    latency = hardware.dma_latency * (hardware.dma_stream_latency_factor if stream else 1)
    sram = next(region for region in regions if region.sram)
    port_words = sram.runs * words(hardware, sram.run, sram.alignment(hardware.sram_word_bytes))
    payload = ddr_bytes = ddr = 0
    if name == "dma_fill":
        moved = sram.runs * sram.run
        channel = ceil_div(moved, hardware.dma_bus_bytes)
    else:
        source = next(region for region in regions if not region.sram)
        runs = source.runs
        payload = runs * source.run
        channel = runs * (ceil_div(source.run, hardware.dma_bus_bytes) + (1 if stream else 0))
        ddr_bytes = ddr_traffic(hardware, source, stream)
        ddr = ddr_to_core(hardware, ddr_bytes)
    return DmaTiming(
        dma_to_core(hardware, latency),
        dma_to_core(hardware, channel),
        port_words,
        ddr,
        ddr_bytes,
        payload,
        (_port(sram, port_words),),
    )


def dma_cycles(hardware: Hardware, f: Fields, name: str = "dma_load") -> int:
    """Return the cycles of a DMA instruction that has DDR and its banks for itself."""
    return dma_timing(hardware, f, name).cycles


def _vector(
    hardware: Hardware,
    vectors: int,
    operands: list[tuple[Access, int]],
) -> VecTiming:
    """`vectors` steps, each using each operand's port the given number of cycles.

    Operands that share a bank add up; others are read and written at once.
    """
    step = 1
    for region, cost in operands:
        together = cost + sum(
            other_cost
            for other, other_cost in operands
            if other is not region and share_bank(hardware, region, other)
        )
        step = max(step, together)
    ports = [_port(region, vectors * cost) for region, cost in operands]
    return VecTiming((vectors * step,), hardware.vector_latency, _merge_ports(ports))


def _runs(
    hardware: Hardware, region: Access, elements: int, size: int, *dims: tuple[int, int]
) -> int:
    """Return the words of one vector of an operand read `lanes` elements at a time."""
    lanes = hardware.vector_lanes
    alignment = _gcd(hardware.sram_word_bytes, region.address, *dims)
    if elements > lanes:
        alignment = gcd(alignment, lanes * size)
    return words(hardware, min(elements, lanes) * size, alignment)


def _drain_timing(hardware: Hardware, f: Fields) -> VecTiming:
    size = 4 if f["raw"] else element_bytes(f)
    count, pixels, last_pixels = pixel_blocks(f)
    alignment = _gcd(
        hardware.sram_word_bytes,
        f["dst"],
        (f["out_h"], f["oy_stride"]),
        (f["out_w"], f["ox_stride"]),
        (f["oc_blocks"], f["ob_stride"]),
    )
    cycles: list[int] = []
    written = 0
    for ob in range(f["oc_blocks"]):
        cols = f["cols"] if ob < f["oc_blocks"] - 1 else f["cols_last"]
        vector = max(1, words(hardware, cols * size, alignment))
        cycles += [pixels * vector] * (count - 1) + [last_pixels * vector]
        written += f["out_h"] * f["out_w"] * vector
    ports = _merge_ports([_port(region, 0) for region in accesses(hardware, "vec_drain", f)])
    return VecTiming(
        tuple(cycles),
        hardware.vector_latency,
        (PortUse("dst", ports[0].low, ports[0].high, written),),
    )


def _rows_timing(hardware: Hardware, name: str, f: Fields, by_name: dict[str, Access]) -> VecTiming:
    """Passes over each row that only read it, then one that writes; a pass waits for the last."""
    chunks, rows = ceil_div(f["n0"], hardware.vector_lanes), f["n1"] * f["n2"]

    def cost(key: str) -> int:
        dims = ((f["n1"], f[f"{key}_s1"]), (f["n2"], f[f"{key}_s2"]))
        return _runs(hardware, by_name[key], f["n0"], 1, *dims)

    read = cost("src")
    operands = [(by_name["src"], read), (by_name["dst"], cost("dst"))]
    waits, wait = 2, SOFTMAX_WAIT
    if name == "vec_layer_norm":
        waits, wait = 1, LAYER_NORM_WAIT
        block = 6 * hardware.vector_lanes
        alignment = _gcd(hardware.sram_word_bytes, f["params"], (chunks, block))
        operands.append((by_name["params"], words(hardware, block, alignment)))
    last = _vector(hardware, rows * chunks, operands)
    before = rows * waits * (chunks * read + hardware.vector_latency + VECTOR_PIPELINE)
    ports = [_port(by_name["src"], waits * rows * chunks * read), *last.ports]
    cycles = before + rows * wait + last.blocks[0]
    return VecTiming((cycles,), last.latency, _merge_ports(ports))


def vec_timing(hardware: Hardware, name: str, f: Fields) -> VecTiming:
    """Return the timing of a vector instruction with all its fields `f`."""
    lanes, word = hardware.vector_lanes, hardware.sram_word_bytes
    if name == "vec_drain":
        return _drain_timing(hardware, f)
    regions = accesses(hardware, name, f)
    by_name = {region.operand: region for region in regions}
    size = element_bytes(f)
    if name == "vec_param":
        cost = ceil_div((4 if f["bias_only"] else 9) * lanes, word)
        return _vector(hardware, f["count"], [(regions[0], cost)])
    if name == "vec_table":
        return _vector(hardware, 1, [(regions[0], ceil_div(256, word))])
    if name == "vec_eltwise":
        operands = [
            (
                by_name[key],
                _runs(
                    hardware,
                    by_name[key],
                    1 if key == "b" and f["b_scalar"] else f["n0"],
                    size,
                    (f["n1"], f[f"{key}_s1"]),
                    (f["n2"], f[f"{key}_s2"]),
                ),
            )
            for key in ("a", "b", "dst")
        ]
        return _vector(hardware, f["n1"] * f["n2"] * ceil_div(f["n0"], lanes), operands)
    if name == "vec_copy":
        dense = f["n0"] == 1 or (f["src_s0"] == size and f["dst_s0"] == size)
        vectors = f["n1"] * f["n2"] * f["n3"]
        vectors *= ceil_div(f["n0"], lanes) if dense else f["n0"]
        operands = []
        for key in ("src", "dst"):
            outer = [(f[f"n{i}"], f[f"{key}_s{i}"]) for i in (1, 2, 3)]
            if not dense:
                outer.append((f["n0"], f[f"{key}_s0"]))
            cost = _runs(hardware, by_name[key], f["n0"] if dense else 1, size, *outer)
            operands.append((by_name[key], cost))
        return _vector(hardware, vectors, operands)
    if name in ("vec_softmax", "vec_layer_norm"):
        return _rows_timing(hardware, name, f, by_name)
    vectors = f["out_h"] * f["out_w"] * ceil_div(f["n0"], lanes)
    out = ((f["out_h"], f["dst_sy"]), (f["out_w"], f["dst_sx"]))
    result = (by_name["dst"], _runs(hardware, by_name["dst"], f["n0"], size, *out))
    if name == "vec_pool":
        window = (
            (f["out_h"], f["src_sy"]),
            (f["out_w"], f["src_sx"]),
            (f["k_h"], f["ky_stride"]),
            (f["k_w"], f["kx_stride"]),
        )
        one = _runs(hardware, by_name["src"], f["n0"], size, *window)
        return _vector(hardware, vectors, [(by_name["src"], f["k_h"] * f["k_w"] * one), result])
    assert name == "vec_resize", name
    source = ((f["in_h"], f["src_sy"]), (f["in_w"], f["src_sx"]))
    one = _runs(hardware, by_name["src"], f["n0"], size, *source)
    timing = _vector(hardware, vectors, [(by_name["src"], 4 * one), result])
    tables = [by_name["table_y"], by_name["table_x"]]
    extra = [_port(table, ceil_div(table.run, word)) for table in tables]
    setup = sum(port.cycles for port in extra)
    return VecTiming((timing.blocks[0] + setup,), timing.latency, (*timing.ports, *extra))


def vec_cycles(hardware: Hardware, name: str, f: Fields) -> int:
    """Return the cycles of a vector instruction."""
    return vec_timing(hardware, name, f).cycles
