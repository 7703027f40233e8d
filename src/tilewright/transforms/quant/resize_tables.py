"""Which two rows (or columns) each output position of a resize reads, and with what weights."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UNIT = 2048
"""Eleven fractional bits: a pair of weights sums to this."""


def source_positions(
    size_in: int, size_out: int, scale: float, coordinate: str
) -> npt.NDArray[np.float32]:
    """Return the input coordinate of each output position by ONNX Resize's rules.

    In float32, as onnxruntime computes it, so that ties of `nearest` fall the same way.
    """
    out = np.arange(size_out, dtype=np.float32)
    step = np.float32(scale)
    half = np.float32(0.5)
    if coordinate == "asymmetric":
        return out / step
    if coordinate == "align_corners":
        if size_out == 1:
            return np.zeros(1, np.float32)
        return out * np.float32(size_in - 1) / np.float32(size_out - 1)
    if coordinate == "pytorch_half_pixel" and size_out == 1:
        return np.zeros(1, np.float32)
    if coordinate in ("half_pixel", "pytorch_half_pixel"):
        return (out + half) / step - half
    if coordinate == "half_pixel_symmetric":
        adjustment = np.float32(size_out) / (step * np.float32(size_in))
        offset = np.float32(size_in) / np.float32(2) * (np.float32(1) - adjustment)
        return offset + (out + half) / step - half
    raise ValueError(f"unknown coordinate transformation {coordinate!r}")


def resize_table(
    size_in: int,
    size_out: int,
    scale: float,
    *,
    mode: str,
    coordinate: str,
    nearest_mode: str = "round_prefer_floor",
) -> npt.NDArray[np.int16]:
    """Return `[size_out, 4]`: first index, second index, their weights (sum 2048).

    Coordinates outside the input take the nearest edge.
    """
    position = source_positions(size_in, size_out, scale, coordinate)
    last = size_in - 1
    table = np.zeros((size_out, 4), dtype=np.int16)
    if mode == "nearest" or (size_in == size_out and scale == 1.0):
        index = np.clip(_nearest(position, nearest_mode), 0, last)
        table[:, 0] = table[:, 1] = index
        table[:, 2] = UNIT
        return table
    inside = np.clip(position.astype(np.float64), 0, last)
    first = np.floor(inside)
    weight = np.rint((inside - first) * UNIT)
    table[:, 0] = first
    table[:, 1] = np.minimum(first + 1, last)
    table[:, 2] = UNIT - weight
    table[:, 3] = weight
    return table


def _nearest(position: npt.NDArray[np.float32], mode: str) -> npt.NDArray[np.float32]:
    if mode == "floor":
        return np.floor(position)
    if mode == "ceil":
        return np.ceil(position)
    if mode == "round_prefer_ceil":
        return np.floor(position + np.float32(0.5))
    return np.ceil(position - np.float32(0.5))
