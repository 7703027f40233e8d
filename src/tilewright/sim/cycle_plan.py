"""A dispatched program as integer arrays, as the kernel of the cycle simulator reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tilewright.sim import cycle_state as kernel
from tilewright.sim.retire import Work
from tilewright.sim.state import machine_error
from tilewright.spec.access import (
    Access,
    Fields,
    accesses,
    element_bytes,
    reduction_rows,
    weight_row_bytes,
)
from tilewright.spec.hardware import Hardware
from tilewright.spec.limits import ROWS, violations
from tilewright.spec.program import Dispatched
from tilewright.spec.timing import LAYER_NORM_WAIT, SOFTMAX_WAIT, ceil_div, dma_to_core

I64 = npt.NDArray[np.int64]
ResizeTables = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Row and column indices of a `vec_resize`: `[out_h, 2]` and `[out_w, 2]`."""


@dataclass(frozen=True)
class Plans:
    """The stream of a program: what is the same for many instructions once in `rows`."""

    rows: I64
    work: list[Work]
    """What each row asks for, in bytes and multiply-accumulates."""
    plan: I64
    """Row of every instruction dispatched; the arrays below likewise."""
    engine: I64
    wait: I64
    signal: I64
    index: I64
    table_at: I64
    """Where the indices of a `vec_resize` begin in `tables`."""
    tables: I64


def hardware_row(hardware: Hardware, code_length: int) -> I64:
    """Return the sizes and latencies the kernel needs."""
    words = hardware.bank_size // hardware.sram_word_bytes
    return np.array(
        [
            hardware.sram_word_bytes.bit_length() - 1,
            hardware.ddr_bus_bytes,
            hardware.core_clock_mhz,
            hardware.ddr_clock_mhz,
            hardware.dma_clock_mhz,
            hardware.dma_bus_bytes,
            hardware.dma_burst_size,
            -1 if words & (words - 1) else words.bit_length() - 1,
            words,
            hardware.mac_latency,
            hardware.vector_latency,
            hardware.queue_depth,
            hardware.dma_channels,
            dma_to_core(hardware, hardware.dma_latency),
            code_length,
        ],
        np.int64,
    )


def make_plans(
    hardware: Hardware, stream: Sequence[Dispatched], tables: Sequence[ResizeTables] | None
) -> Plans:
    """Encode a dispatched program.

    `tables` are the contents of the tables of every `vec_resize`, in order; without them its
    source pixels are taken to lie evenly.

    Raises:
        TilewrightError: E0602 if an instruction breaks a limit of the target.
    """
    known: dict[tuple[object, ...], int] = {}
    by_object: dict[int, int] = {}
    rows: list[list[int]] = []
    work: list[Work] = []
    plan: list[int] = []
    for item in stream:
        f = item.fields
        # Iterations of a loop share their fields, which live as long as the stream.
        row = by_object.get(id(f))
        if row is None:
            # Wait and signal masks come first and do not change what the engine does.
            key = (item.name, *list(f.values())[2:])
            row = known.get(key)
            if row is None:
                row = known[key] = len(rows)
                regions = accesses(hardware, item.name, f)
                broken = [rule.message for rule in violations(hardware, item.name, f, regions)]
                if broken:
                    raise machine_error(item, broken[0], broken[1:])
                values = _plan(hardware, item.name, f)
                rows.append(values + [0] * (kernel.PLAN_COLUMNS - len(values)))
                work.append(_work(hardware, item.name, f, regions))
            by_object[id(f)] = row
        plan.append(row)
    table_at, table = _tables(stream, tables)
    return Plans(
        np.array(rows, np.int64).reshape(-1, kernel.PLAN_COLUMNS),
        work,
        np.array(plan, np.int64),
        np.array([item.engine for item in stream], np.int64),
        np.array([item.fields["wait"] for item in stream], np.int64),
        np.array([item.fields["signal"] for item in stream], np.int64),
        np.array([item.index for item in stream], np.int64),
        table_at,
        table,
    )


def _tables(stream: Sequence[Dispatched], tables: Sequence[ResizeTables] | None) -> tuple[I64, I64]:
    at = np.zeros(len(stream), np.int64)
    parts: list[I64] = [np.zeros(1, np.int64)]
    length = 1
    count = 0
    for number, item in enumerate(stream):
        if item.name != "vec_resize":
            continue
        f = item.fields
        if tables is None:
            pair = (_even(f["out_h"], f["in_h"]), _even(f["out_w"], f["in_w"]))
        else:
            pair = tables[count]
        count += 1
        at[number] = length
        for table in pair:
            parts.append(np.ascontiguousarray(table, np.int64).reshape(-1))
            length += parts[-1].size
    return at, np.concatenate(parts)


def _even(out: int, source: int) -> I64:
    """Return the neighbours of an even resize that does not know its table."""
    first = np.arange(out, dtype=np.int64) * source // out
    return np.stack((first, np.minimum(first + 1, source - 1)), axis=1)


def _work(hardware: Hardware, name: str, f: Fields, regions: list[Access]) -> Work:
    if name in ("dma_load", "dma_store"):
        source = next(region for region in regions if not region.sram)
        moved = source.runs * source.run
        return Work(loaded=moved) if name == "dma_load" else Work(stored=moved)
    if name != "mac_conv":
        return Work()
    kernel_size, image = f["k_h"] * f["k_w"], f["out_h"] * f["out_w"]
    columns = (f["oc_blocks"] - 1) * f["cols"] + f["cols_last"]
    depth = kernel_size * (f["c_blocks"] if f["diag"] else reduction_rows(f))
    steps = kernel_size * f["c_blocks"] * f["oc_blocks"]
    return Work(macs=image * depth * columns, padded_macs=image * steps * hardware.array_size**2)


def _plan(hardware: Hardware, name: str, f: Fields) -> list[int]:
    if name.startswith("dma_"):
        return _dma(hardware, name, f)
    if name == "mac_conv":
        return _mac(f)
    if name == "vec_drain":
        return _drain(f)
    if name == "vec_resize":
        return _resize(hardware, f)
    if name in ROWS:
        return _rows(hardware, name, f)
    if name.startswith("vec_"):
        return _vector(hardware, name, f)
    return [{"fence": kernel.FENCE, "halt": kernel.HALT}.get(name, kernel.PLAIN)]


def _dma(hardware: Hardware, name: str, f: Fields) -> list[int]:
    stream = bool(f.get("stream", 0))
    latency = hardware.dma_latency * (hardware.dma_stream_latency_factor if stream else 1)
    head = [dma_to_core(hardware, latency), int(not stream), f["n0"]]
    word, granule = hardware.sram_word_bytes, hardware.ddr_bus_bytes
    if name == "dma_fill":
        sink = [f["sram"], f["sram_s1"], f["sram_s2"], 0]
        # No data runs: all are in the padding.
        return [
            kernel.FILL, *head, 0, 0, 1, 0, 0, 0, 0, *sink, 0, f["n1"], 0, f["n2"], granule, word,
        ]  # fmt: skip
    counts = [f["n1"], f["n2"], f["n3"]]
    ddr = [f["ddr"], f["ddr_s1"], f["ddr_s2"], f["ddr_s3"]]
    sram = [f["sram"], f["sram_s1"], f["sram_s2"], f["sram_s3"]]
    if name == "dma_store":
        return [
            kernel.STORE, *head, *counts, *sram, *ddr, 0, f["n1"], 0, f["n2"], word, granule,
        ]  # fmt: skip
    pads = [
        f["pad1_lo"], f["pad1_lo"] + f["n1"] + f["pad1_hi"],
        f["pad2_lo"], f["pad2_lo"] + f["n2"] + f["pad2_hi"],
    ]  # fmt: skip
    return [kernel.LOAD, *head, *counts, *ddr, *sram, *pads, granule, word]


def _mac(f: Fields) -> list[int]:
    size = element_bytes(f)
    rows = (1, 1) if f["diag"] else (f["c_rows"], f["c_last"])
    return [
        kernel.CONV, f["act"], f["wgt"], f["out_h"], f["out_w"], f["block_rows"], f["oy_stride"],
        f["ox_stride"], f["k_h"], f["k_w"], f["ky_stride"], f["kx_stride"], f["c_blocks"],
        f["cb_stride"], f["oc_blocks"], f["ob_stride"], f["wgt_pitch"], f["wgt_ob_stride"],
        f["diag"], f["push"], f["m_half"], *rows, f["c_rows"] * size, f["c_last"] * size,
        weight_row_bytes(f, f["cols"]), weight_row_bytes(f, f["cols_last"]), f["cols"] * size,
        f["cols_last"] * size,
    ]  # fmt: skip


_NONE = [0] * 7
_NO_B = [0, *_NONE]


def _drain(f: Fields) -> list[int]:
    size = 4 if f["raw"] else element_bytes(f)
    result = [
        1, f["dst"], f["ob_stride"], f["oy_stride"], f["ox_stride"], 0, f["cols"] * size,
        f["cols_last"] * size,
    ]  # fmt: skip
    loops = [f["oc_blocks"], f["out_h"], f["out_w"]]
    total = loops[0] * loops[1] * loops[2]
    return [
        kernel.DRAIN, *loops, 1, 1, 1, 0, 0, total, *_NONE, *_NO_B, *result, f["block_rows"],
        f["m_half"],
    ]  # fmt: skip


def _chunks(n0: int, lanes: int, size: int) -> tuple[int, list[int]]:
    """Return the chunks of a run, and an operand's bytes between them, of one, of the last."""
    count = ceil_div(n0, lanes)
    return count, [lanes * size, lanes * size, (n0 - (count - 1) * lanes) * size]


def _resize(hardware: Hardware, f: Fields) -> list[int]:
    count, sizes = _chunks(f["n0"], hardware.vector_lanes, 1)
    source = [f["src"], 0, 0, 0, *sizes]
    result = [1, f["dst"], 0, f["dst_sy"], f["dst_sx"], *sizes]
    total = f["out_h"] * f["out_w"] * count
    return [
        kernel.RESIZE, 1, f["out_h"], f["out_w"], count, 2, 2, 0, 0, total, *source, *_NO_B,
        *result, 1, 0, f["table_y"], f["table_x"], f["src_sy"], f["src_sx"],
    ]  # fmt: skip


def _rows(hardware: Hardware, name: str, f: Fields) -> list[int]:
    lanes = hardware.vector_lanes
    count, sizes = _chunks(f["n0"], lanes, 1)
    # Loop 1 goes over the passes of a row, which read the same bytes.
    passes, wait, second = 3, SOFTMAX_WAIT, _NO_B
    if name == "vec_layer_norm":
        block = 6 * lanes
        passes, wait, second = 2, LAYER_NORM_WAIT, [1, f["params"], 0, 0, 0, block, block, block]
    loops = [f["n2"], f["n1"], passes]
    source = [f["src"], f["src_s2"], f["src_s1"], 0, *sizes]
    result = [1, f["dst"], f["dst_s2"], f["dst_s1"], 0, *sizes]
    total = loops[0] * loops[1] * loops[2] * count
    return [
        kernel.ROWS, *loops, count, 1, 1, 0, 0, total, *source, *second, *result, 1, 0, 0, 0, 0, 0,
        wait,
    ]  # fmt: skip


def _vector(hardware: Hardware, name: str, f: Fields) -> list[int]:
    lanes, size = hardware.vector_lanes, element_bytes(f)
    second, result, window = _NO_B, [0, *_NONE], [1, 1, 0, 0]
    loops = [1, 1, 1]
    if name == "vec_param":
        block = (4 if f["bias_only"] else 9) * lanes
        count, first = f["count"], [f["src"], 0, 0, 0, block, block, block]
    elif name == "vec_table":
        count, first = 1, [f["src"], 0, 0, 0, 0, 256, 256]
    elif name == "vec_eltwise":
        loops = [1, f["n2"], f["n1"]]
        count, sizes = _chunks(f["n0"], lanes, size)
        first = [f["a"], 0, f["a_s2"], f["a_s1"], *sizes]
        other = [0, size, size] if f["b_scalar"] else sizes
        second = [1, f["b"], 0, f["b_s2"], f["b_s1"], *other]
        result = [1, f["dst"], 0, f["dst_s2"], f["dst_s1"], *sizes]
    elif name == "vec_copy":
        loops = [f["n3"], f["n2"], f["n1"]]
        sides = {key: [f[key], f[f"{key}_s3"], f[f"{key}_s2"], f[f"{key}_s1"]]
                 for key in ("src", "dst")}  # fmt: skip
        if f["n0"] == 1 or (f["src_s0"] == size and f["dst_s0"] == size):
            count, sizes = _chunks(f["n0"], lanes, size)
            first, result = [*sides["src"], *sizes], [1, *sides["dst"], *sizes]
        else:
            count = f["n0"]
            first = [*sides["src"], f["src_s0"], size, size]
            result = [1, *sides["dst"], f["dst_s0"], size, size]
    else:
        assert name == "vec_pool", name
        loops = [1, f["out_h"], f["out_w"]]
        window = [f["k_h"], f["k_w"], f["ky_stride"], f["kx_stride"]]
        count, sizes = _chunks(f["n0"], lanes, size)
        first = [f["src"], 0, f["src_sy"], f["src_sx"], *sizes]
        result = [1, f["dst"], 0, f["dst_sy"], f["dst_sx"], *sizes]
    total = loops[0] * loops[1] * loops[2] * count
    return [kernel.VECTOR, *loops, count, *window, total, *first, *second, *result]
