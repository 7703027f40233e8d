"""What the instructions of the vector unit and the DMA engines do."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright.sim.mac import columns
from tilewright.sim.numeric import float_function, scale_codes
from tilewright.sim.rows import vec_layer_norm, vec_softmax
from tilewright.sim.state import MachineError, PushGroup, State, UnrepresentableError
from tilewright.spec.isa import FUNCTIONS

FP16 = 2
Fields = dict[str, int]
OPS = ("add", "sub", "mul", "max", "min")


def _dma_views(state: State, f: Fields, load: bool) -> tuple[Any, Any]:
    counts = (f["n3"], f["n2"], f["n1"], f["n0"])
    ddr_strides = (f["ddr_s3"], f["ddr_s2"], f["ddr_s1"], 1)
    sram_strides = (f["sram_s3"], f["sram_s2"], f["sram_s1"], 1)
    ddr = state.view("ddr", f["ddr"], counts, ddr_strides, np.uint8, ddr=True)
    if load:
        n2 = f["pad2_lo"] + f["n2"] + f["pad2_hi"]
        n1 = f["pad1_lo"] + f["n1"] + f["pad1_hi"]
        counts = (f["n3"], n2, n1, f["n0"])
    sram = state.view("sram", f["sram"], counts, sram_strides, np.uint8)
    return ddr, sram


def dma_load(state: State, f: Fields) -> None:
    """Copy from DDR to SRAM; padding first, so that only runs without data keep it."""
    ddr, sram = _dma_views(state, f, load=True)
    if ddr.shape != sram.shape:
        sram[...] = f["fill"]
    low2, low1 = f["pad2_lo"], f["pad1_lo"]
    sram[:, low2 : low2 + f["n2"], low1 : low1 + f["n1"]] = ddr


def dma_store(state: State, f: Fields) -> None:
    """Copy from SRAM to DDR."""
    ddr, sram = _dma_views(state, f, load=False)
    ddr[...] = sram


def dma_fill(state: State, f: Fields) -> None:
    """Fill runs of SRAM with a byte."""
    counts = (f["n2"], f["n1"], f["n0"])
    view = state.view("sram", f["sram"], counts, (f["sram_s2"], f["sram_s1"], 1), np.uint8)
    view[...] = f["fill"]


def vec_param(state: State, f: Fields) -> None:
    """Load biases, multipliers and shifts."""
    lanes, count = state.hardware.vector_lanes, f["count"]
    block = (4 if f["bias_only"] else 9) * lanes
    raw = state.view("src", f["src"], (count, block), (block, 1), np.uint8)
    state.v[f["v"] : f["v"] + count] = raw[:, : 4 * lanes]
    state.v_written[f["v"] : f["v"] + count] = True
    if f["bias_only"]:
        return
    multiplier = np.ascontiguousarray(raw[:, 4 * lanes : 8 * lanes]).view("<u4").astype(np.int64)
    shift = raw[:, 8 * lanes :].astype(np.int64)
    if int(multiplier.max()) >= 1 << 31:
        raise MachineError(f"multiplier {int(multiplier.max())} must be below 2^31")
    if int(shift.max()) > 62:
        raise MachineError(f"shift {int(shift.max())} must be 0..62")
    entries = slice(f["param"], f["param"] + count)
    state.multiplier[entries] = multiplier
    state.shift[entries] = shift
    state.param_written[entries] = True


def vec_table(state: State, f: Fields) -> None:
    """Load a lookup table into V registers."""
    size = state.v.shape[1]
    count = -(-256 // size)
    registers = state.v[f["v"] : f["v"] + count].reshape(-1)
    registers[:256] = state.view("src", f["src"], (256,), (1,), np.uint8)
    registers[256:] = 0
    state.v_written[f["v"] : f["v"] + count] = True


def _lookup(state: State, f: Fields, codes: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
    count = -(-256 // state.v.shape[1])
    table = state.vector_registers("v_table", f["v_table"], count).reshape(-1)[:256].view(np.int8)
    return table[codes.view(np.uint8) ^ 0x80]


def _clamp_half(
    state: State, f: Fields, value: npt.NDArray[np.float32], clamp: bool = True
) -> npt.NDArray[np.float16]:
    if clamp:
        bounds = state.vector_registers("v_clamp", f["v_clamp"], 1)[0].view("<f4")
        value = np.clip(value, bounds[0], bounds[1])
    with np.errstate(over="ignore"):
        result = value.astype(np.float16)
    if not np.isfinite(result).all():
        raise UnrepresentableError("an fp16 result overflows or is not a number")
    return result


def drain(
    state: State, f: Fields, group: PushGroup, ob: int, count: int, row: int, rows: int
) -> None:
    """Requantise rows `row .. row + rows` of `count` output-channel blocks from `ob` on."""
    width = columns(f, ob, count)
    left = ob * f["cols"]
    pixels = slice(row * f["out_w"], (row + rows) * f["out_w"])
    acc = group.acc[pixels, left : left + width]
    lanes = state.hardware.vector_lanes
    floating = f["dtype"] == FP16
    if (group.fields["dtype"] == FP16) != floating:
        raise MachineError("dtype differs from that of the mac_conv being drained")
    last = ob + count == f["oc_blocks"]

    def per_column(entries: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return `[columns]` of per-entry lanes `[count, lanes]`."""
        used = entries[:, : f["cols"]] if count > 1 else entries[:, :width]
        flat = used.reshape(-1)
        if last and count > 1:
            head = entries[:-1, : f["cols"]].reshape(-1)
            flat = np.concatenate((head, entries[-1, : f["cols_last"]]))
        return flat

    registers = state.vector_registers("v", f["v"] + ob, count)
    if floating:
        bias = per_column(registers.view("<f4").reshape(count, lanes))
        with np.errstate(all="ignore"):  # Checked for finite results below.
            value = float_function(FUNCTIONS[f["function"]], acc + bias)
        if f["raw"]:
            _write_drain(state, f, value, ob, count, row, rows, np.float32)
            return
        _write_drain(state, f, _clamp_half(state, f, value), ob, count, row, rows, np.float16)
        return
    bias = per_column(registers.view("<i4").reshape(count, lanes))
    total = acc + bias  # int32: wraps, as the adder does
    if f["raw"]:
        _write_drain(state, f, total, ob, count, row, rows, np.int32)
        return
    multiplier, shift = state.parameters(f["param"] + ob, count)
    product = total.astype(np.int64)
    product *= per_column(multiplier)
    codes = scale_codes(
        product, per_column(shift), state.hardware.rounding, f["zp"], f["lo"], f["hi"]
    )
    if f["use_table"]:
        codes = _lookup(state, f, codes)
    _write_drain(state, f, codes, ob, count, row, rows, np.int8)


def _write_drain(
    state: State,
    f: Fields,
    value: npt.NDArray[Any],
    ob: int,
    count: int,
    row: int,
    rows: int,
    dtype: Any,
) -> None:
    size = np.dtype(dtype).itemsize
    base = f["dst"] + row * f["oy_stride"] + ob * f["ob_stride"]
    last = ob + count == f["oc_blocks"]
    whole = count - 1 if last else count
    strides = (f["oy_stride"], f["ox_stride"], f["ob_stride"], size)
    if whole:
        shape = (rows, f["out_w"], whole, f["cols"])
        view = state.view("dst", base, shape, strides, dtype)
        view[...] = value[:, : whole * f["cols"]].reshape(shape)
    if last:
        shape = (rows, f["out_w"], 1, f["cols_last"])
        view = state.view("dst", base + whole * f["ob_stride"], shape, strides, dtype)
        view[...] = value[:, whole * f["cols"] :].reshape(shape)


def _rescale(state: State, f: Fields, value: npt.NDArray[np.int64], bound: int) -> Any:
    """Add the bias, shift, add the zero point, clamp; `bound` is the largest `abs(value)`."""
    _, shift = state.parameters(f["param"], 1)
    amount = int(shift[0, 0])
    bias = f["bias"] << f["bias_shift"]
    if bound + abs(bias) + (1 << amount) >= 1 << 63:
        raise MachineError(
            "the sum before the shift may leave 64 bits",
            f"largest value {bound}, bias {f['bias']} * 2^{f['bias_shift']}, shift {amount}",
        )
    value += bias
    return scale_codes(
        value, np.asarray([amount], np.int64), state.hardware.rounding, f["zp"], f["lo"], f["hi"]
    )


def vec_eltwise(state: State, f: Fields) -> None:
    """Elementwise operation of two operands."""
    floating = f["dtype"] == FP16
    dtype: Any = np.float16 if floating else np.int8
    size = np.dtype(dtype).itemsize
    shape = (f["n2"], f["n1"], f["n0"])

    def operand(name: str, inner: int) -> npt.NDArray[Any]:
        strides = (f[f"{name}_s2"], f[f"{name}_s1"], inner)
        if inner == 0:
            return state.view(name, f[name], (*shape[:2], 1), (*strides[:2], size), dtype)
        return state.view(name, f[name], shape, strides, dtype)

    a = operand("a", size)
    b = operand("b", 0 if f["b_scalar"] else size)
    dst = operand("dst", size)
    op = OPS[f["op"]]
    if floating:
        wide_a, wide_b = a.astype(np.float32), b.astype(np.float32)
        value = {
            "add": np.add, "sub": np.subtract, "mul": np.multiply,
            "max": np.maximum, "min": np.minimum,
        }[op](wide_a, wide_b)  # fmt: skip
        dst[...] = _clamp_half(state, f, value)
        return
    if op in ("max", "min"):
        dst[...] = np.maximum(a, b) if op == "max" else np.minimum(a, b)
        return
    multiplier, _ = state.parameters(f["param"], 1)
    first, second = int(multiplier[0, 0]), int(multiplier[0, 1])
    value_a = a.astype(np.int64)
    value_a -= f["za"]
    value_b = b.astype(np.int64)
    value_b -= f["zb"]
    if op == "mul":
        value_a *= value_b
        value_a *= first
        bound = 255 * 255 * first
    else:
        value_a *= first
        value_b *= second if op == "add" else -second
        value_a += value_b
        bound = 255 * (first + second)
    dst[...] = _rescale(state, f, value_a, bound)


def vec_copy(state: State, f: Fields) -> None:
    """Move elements with arbitrary strides, optionally changing them."""
    floating = f["dtype"] == FP16
    dtype: Any = np.float16 if floating else np.int8
    shape = (f["n3"], f["n2"], f["n1"], f["n0"])
    src, dst = (
        state.view(name, f[name], shape, tuple(f[f"{name}_s{i}"] for i in (3, 2, 1, 0)), dtype)
        for name in ("src", "dst")
    )
    if floating:
        if not f["requantise"] and FUNCTIONS[f["function"]] == "none":
            dst[...] = src.copy()
            return
        value = float_function(FUNCTIONS[f["function"]], src.astype(np.float32))
        dst[...] = _clamp_half(state, f, value, clamp=bool(f["requantise"]))
        return
    result = src.copy()
    if f["requantise"]:
        multiplier = int(state.parameters(f["param"], 1)[0][0, 0])
        value = result.astype(np.int64)
        value -= f["za"]
        value *= multiplier
        result = _rescale(state, f, value, 255 * multiplier)
    if f["use_table"]:
        result = _lookup(state, f, result)
    dst[...] = result


def vec_pool(state: State, f: Fields) -> None:
    """Maximum over a window."""
    dtype: Any = np.float16 if f["dtype"] == FP16 else np.int8
    size = np.dtype(dtype).itemsize
    shape = (f["out_h"], f["out_w"], f["n0"])
    result = None
    for ky in range(f["k_h"]):
        for kx in range(f["k_w"]):
            address = f["src"] + ky * f["ky_stride"] + kx * f["kx_stride"]
            view = state.view("src", address, shape, (f["src_sy"], f["src_sx"], size), dtype)
            result = view.copy() if result is None else np.maximum(result, view, out=result)
    state.view("dst", f["dst"], shape, (f["dst_sy"], f["dst_sx"], size), dtype)[...] = result


def _neighbours(state: State, f: Fields, name: str, count: int, limit: int) -> Any:
    table = state.view(name, f[name], (count, 4), (8, 2), np.dtype("<i2"))
    index = np.ascontiguousarray(table[:, :2]).view(np.uint16).astype(np.int64)
    if int(index.max()) >= limit:
        raise MachineError(f"{name}: index {int(index.max())} must be below {limit}")
    return index, table[:, 2:].astype(np.int64)


def vec_resize(state: State, f: Fields) -> None:
    """Interpolate between four neighbours."""
    rows, weight_y = _neighbours(state, f, "table_y", f["out_h"], f["in_h"])
    cols, weight_x = _neighbours(state, f, "table_x", f["out_w"], f["in_w"])
    shape = (f["in_h"], f["in_w"], f["n0"])
    src = state.view("src", f["src"], shape, (f["src_sy"], f["src_sx"], 1)).astype(np.int64)
    src -= f["za"]
    value = np.zeros((f["out_h"], f["out_w"], f["n0"]), np.int64)
    for i in range(2):
        for j in range(2):
            weight = weight_y[:, i, None] * weight_x[None, :, j]
            value += src[rows[:, i]][:, cols[:, j]] * weight[:, :, None]
    # Weights are any int16 in the table, so the bound is that of the values at hand.
    largest = max(int(value.max()), -int(value.min()))
    multiplier = int(state.parameters(f["param"], 1)[0][0, 0])
    if largest * multiplier >= 1 << 62:
        raise MachineError("the interpolated value times the multiplier may leave 64 bits")
    value *= multiplier
    result = _rescale(state, f, value, largest * multiplier)
    out = (f["out_h"], f["out_w"], f["n0"])
    state.view("dst", f["dst"], out, (f["dst_sy"], f["dst_sx"], 1))[...] = result


ATOMIC = {
    "dma_load": dma_load,
    "dma_store": dma_store,
    "dma_fill": dma_fill,
    "vec_param": vec_param,
    "vec_table": vec_table,
    "vec_eltwise": vec_eltwise,
    "vec_copy": vec_copy,
    "vec_pool": vec_pool,
    "vec_resize": vec_resize,
    "vec_softmax": vec_softmax,
    "vec_layer_norm": vec_layer_norm,
}
"""Instructions executed in one step."""
