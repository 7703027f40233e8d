"""What `mac_conv` computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright.sim.numeric import INT32_MAX, saturate32
from tilewright.sim.state import MAX_ELEMENTS, MachineError, State

EXACT_CHUNK = 1024
"""Products of int8 codes that sum exactly in float32: 1024 * 2^14 = 2^24."""
GATHER_ELEMENTS = 1 << 22
"""Activations gathered at once; bounds the simulator's memory."""
MAX_WEIGHTS = 1 << 26
"""Weights of one instruction, repetitions by a pitch of zero counted: more than twice those the
largest SRAM holds, as int4."""
FP16, INT4 = 2, 1


def columns(f: dict[str, int], first: int, count: int) -> int:
    """Return the columns of output-channel blocks `first .. first + count`."""
    last = first + count == f["oc_blocks"]
    return (count - 1) * f["cols"] + (f["cols_last"] if last else f["cols"])


def convolve(
    state: State,
    f: dict[str, int],
    ob: int,
    count: int,
    row: int,
    rows: int,
    start: npt.NDArray[Any] | None,
) -> npt.NDArray[Any]:
    """Return the accumulators of output rows `row .. row + rows` of `count` blocks from `ob` on.

    `start` holds the accumulators to begin with (None: zero). The result is `[rows * out_w,
    columns]`, int32 or float32.
    """
    if f["diag"]:
        return _diagonal(state, f, ob, count, row, rows, start)
    if count > 1 and f["ob_stride"]:
        # Every output-channel block reads its own activations.
        parts: list[npt.NDArray[Any]] = []
        used = 0
        for block in range(ob, ob + count):
            width = columns(f, block, 1)
            begin = None if start is None else start[:, used : used + width]
            parts.append(convolve(state, f, block, 1, row, rows, begin))
            used += width
        return np.concatenate(parts, axis=1)
    weights = _dense_weights(state, f, ob, count)
    per_row = f["out_w"] * weights.shape[0]
    step = max(1, GATHER_ELEMENTS // per_row)
    pieces: list[npt.NDArray[Any]] = []
    for first in range(row, row + rows, step):
        taken = min(step, row + rows - first)
        activations = _gather(state, f, ob, first, taken)
        begin = None
        if start is not None:
            begin = start[(first - row) * f["out_w"] : (first - row + taken) * f["out_w"]]
        pieces.append(_product(state, f, activations, weights, begin))
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _activation_type(f: dict[str, int]) -> Any:
    return np.float16 if f["dtype"] == FP16 else np.int8


def _gather(
    state: State, f: dict[str, int], ob: int, row: int, rows: int
) -> npt.NDArray[np.float32]:
    """Return activations as float32 `[rows * out_w, k_h * k_w * channels]`."""
    dtype = _activation_type(f)
    size = np.dtype(dtype).itemsize
    base = f["act"] + ob * f["ob_stride"] + row * f["oy_stride"]
    outer = (rows, f["out_w"], f["k_h"], f["k_w"])
    strides = (f["oy_stride"], f["ox_stride"], f["ky_stride"], f["kx_stride"])
    full, c_rows, c_last = f["c_blocks"] - 1, f["c_rows"], f["c_last"]
    channels = full * c_rows + c_last
    if full == 0 or f["cb_stride"] == c_rows * size:
        view = state.view("act", base, (*outer, channels), (*strides, size), dtype)
        gathered = view.astype(np.float32, order="C")
    else:
        elements = rows * f["out_w"] * f["k_h"] * f["k_w"] * channels
        if elements > MAX_ELEMENTS:
            raise MachineError(
                f"act: {elements} elements are more than the simulator handles at once "
                f"({MAX_ELEMENTS})"
            )
        gathered = np.empty((*outer, channels), np.float32)
        blocks = state.view(
            "act", base, (*outer, full, c_rows), (*strides, f["cb_stride"], size), dtype
        )
        gathered[..., : full * c_rows] = blocks.reshape(*outer, full * c_rows)
        last = state.view(
            "act", base + full * f["cb_stride"], (*outer, c_last), (*strides, size), dtype
        )
        gathered[..., full * c_rows :] = last
    return gathered.reshape(rows * f["out_w"], -1)


def _weight_rows(
    state: State, f: dict[str, int], ob: int, count: int, rows: int, cols: int
) -> npt.NDArray[np.float32]:
    """Return float32 weights `[count, rows, cols]` of blocks of equal width."""
    base = f["wgt"] + ob * f["wgt_ob_stride"]
    strides = (f["wgt_ob_stride"], f["wgt_pitch"])
    if f["dtype"] == INT4:
        packed = state.view("wgt", base, (count, rows, (cols + 1) // 2), (*strides, 1), np.uint8)
        nibbles = np.stack((packed & 15, packed >> 4), axis=-1).reshape(count, rows, -1)
        signed = (nibbles[:, :, :cols] ^ 8).astype(np.int8) - 8
        return signed.astype(np.float32)
    dtype = _activation_type(f)
    size = np.dtype(dtype).itemsize
    return state.view("wgt", base, (count, rows, cols), (*strides, size), dtype).astype(
        np.float32, order="C"
    )


def _dense_weights(state: State, f: dict[str, int], ob: int, count: int) -> npt.NDArray[np.float32]:
    """Return weights `[k_h * k_w * channels, columns]`."""
    channels = (f["c_blocks"] - 1) * f["c_rows"] + f["c_last"]
    return _all_columns(state, f, ob, count, f["k_h"] * f["k_w"] * channels)


def _all_columns(
    state: State, f: dict[str, int], ob: int, count: int, rows: int
) -> npt.NDArray[np.float32]:
    width = columns(f, ob, count)
    if rows * width > MAX_WEIGHTS:
        raise MachineError(
            f"wgt: {rows} rows x {width} columns are more than the simulator handles at once "
            f"({MAX_WEIGHTS})"
        )
    has_last = ob + count == f["oc_blocks"]
    whole = count - 1 if has_last else count
    if not whole:
        return _weight_rows(state, f, ob, 1, rows, f["cols_last"])[0]
    result = np.empty((rows, width), np.float32)
    part = _weight_rows(state, f, ob, whole, rows, f["cols"])
    result[:, : whole * f["cols"]] = part.transpose(1, 0, 2).reshape(rows, -1)
    if has_last:
        part = _weight_rows(state, f, ob + whole, 1, rows, f["cols_last"])
        result[:, whole * f["cols"] :] = part[0]
    return result


def _step_bounds(f: dict[str, int]) -> Iterator[tuple[int, int]]:
    """Yield the rows of every step (kernel row, kernel column, channel block)."""
    position = 0
    for _ in range(f["k_h"] * f["k_w"]):
        for block in range(f["c_blocks"]):
            rows = f["c_last"] if block == f["c_blocks"] - 1 else f["c_rows"]
            yield position, position + rows
            position += rows


def _product(
    state: State,
    f: dict[str, int],
    activations: npt.NDArray[np.float32],
    weights: npt.NDArray[np.float32],
    start: npt.NDArray[Any] | None,
) -> npt.NDArray[Any]:
    depth = weights.shape[0]
    if f["dtype"] == FP16:
        total = np.zeros((activations.shape[0], weights.shape[1]), np.float32)
        if start is not None:
            total += start
        for low, high in _step_bounds(f):
            total += activations[:, low:high] @ weights[low:high]
        return total
    if not state.hardware.mac_saturation or _cannot_overflow(depth, start):
        total = None
        for low in range(0, depth, EXACT_CHUNK):
            high = min(low + EXACT_CHUNK, depth)
            part = (activations[:, low:high] @ weights[low:high]).astype(np.int32)
            total = part if total is None else np.add(total, part, out=total)
        assert total is not None
        return total if start is None else total + start
    wide = np.zeros((activations.shape[0], weights.shape[1]), np.int64)
    if start is not None:
        wide += start
    for low, high in _step_bounds(f):
        wide += (activations[:, low:high] @ weights[low:high]).astype(np.int64)
        np.clip(wide, -INT32_MAX - 1, INT32_MAX, out=wide)
    return saturate32(wide)


def _cannot_overflow(depth: int, start: npt.NDArray[Any] | None) -> bool:
    """Return whether no order of adding `depth` products to `start` can leave int32."""
    largest = 0
    if start is not None and start.size:
        largest = max(int(start.max()), -int(start.min()))
    return largest + depth * (1 << 14) <= INT32_MAX


def _diagonal(
    state: State,
    f: dict[str, int],
    ob: int,
    count: int,
    row: int,
    rows: int,
    start: npt.NDArray[Any] | None,
) -> npt.NDArray[Any]:
    dtype = _activation_type(f)
    size = np.dtype(dtype).itemsize
    steps = f["k_h"] * f["k_w"] * f["c_blocks"]
    width = columns(f, ob, count)
    weights = _all_columns(state, f, ob, count, steps)
    floating = f["dtype"] == FP16
    exact = not floating and start is None and steps <= EXACT_CHUNK
    total: npt.NDArray[Any] = np.zeros(
        (rows, f["out_w"], width), np.float32 if floating or exact else np.int64
    )
    if start is not None:
        total += start.reshape(total.shape)
    # Runs of equally wide blocks: (first block, blocks, columns of each).
    has_last = ob + count == f["oc_blocks"]
    whole = count - 1 if has_last else count
    groups = [(ob, whole, f["cols"])] if whole else []
    if has_last:
        groups.append((ob + whole, 1, f["cols_last"]))
    position = 0
    pixel_strides = (f["oy_stride"], f["ox_stride"])
    for first, blocks, cols in groups:
        part = total[:, :, position : position + blocks * cols]
        step = 0
        for ky in range(f["k_h"]):
            for kx in range(f["k_w"]):
                for cb in range(f["c_blocks"]):
                    base = f["act"] + first * f["ob_stride"] + row * f["oy_stride"]
                    base += ky * f["ky_stride"] + kx * f["kx_stride"] + cb * f["cb_stride"]
                    view = state.view(
                        "act",
                        base,
                        (rows, f["out_w"], blocks, cols),
                        (*pixel_strides, f["ob_stride"], size),
                        dtype,
                    )
                    values = view.astype(np.float32, order="C").reshape(
                        rows, f["out_w"], blocks * cols
                    )
                    values *= weights[step, position : position + blocks * cols]
                    if total.dtype == np.int64:
                        part += values.astype(np.int64)
                        if state.hardware.mac_saturation:
                            np.clip(part, -INT32_MAX - 1, INT32_MAX, out=part)
                    else:
                        part += values
                    step += 1
        position += blocks * cols
    flat = total.reshape(rows * f["out_w"], width)
    return flat if floating else flat.astype(np.int32)


def block_place(f: dict[str, int], block: int) -> tuple[int, int, int]:
    """Return output-channel block, first row and rows of a block by its number."""
    pixel_blocks = -(-f["out_h"] // f["block_rows"])
    ob, pb = divmod(block, pixel_blocks)
    row = pb * f["block_rows"]
    return ob, row, min(f["block_rows"], f["out_h"] - row)


def block_count(f: dict[str, int]) -> int:
    """Return the blocks of a `mac_conv` or `vec_drain`."""
    return -(-f["out_h"] // f["block_rows"]) * f["oc_blocks"]


def kept_start(state: State, f: dict[str, int], block: int) -> npt.NDArray[Any] | None:
    """Return what block `block` accumulates on: None for zero.

    Raises:
        MachineError: the half holds nothing, or a block of another shape.
    """
    if not f["accumulate"]:
        return None
    half = f["m_half"] ^ (block & 1)
    kept = state.halves[half].kept
    ob, _, rows = block_place(f, block)
    shape = (rows * f["out_w"], columns(f, ob, 1))
    if kept is None:
        raise MachineError(
            f"accumulate reads half {half} of the M registers, which holds nothing",
            "a mac_conv with push = 0 must have filled it, and nothing drained it since",
        )
    floating = f["dtype"] == FP16
    if kept.shape != shape or (kept.dtype == np.float32) != floating:
        raise MachineError(
            f"accumulate reads {shape[0]} pixels x {shape[1]} columns of half {half}, "
            f"which holds {kept.shape[0]} x {kept.shape[1]}"
        )
    return kept
