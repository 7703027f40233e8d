"""What `vec_softmax` and `vec_layer_norm` do: docs/concepts/numerics.md, "Rows"."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tilewright.sim.state import MachineError, State

I64 = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int8]
Fields = dict[str, int]
TABLE_BYTES = 512


def _views(state: State, f: Fields) -> tuple[Codes, Codes]:
    shape = (f["n2"], f["n1"], f["n0"])
    src, dst = (
        state.view(name, f[name], shape, (f[f"{name}_s2"], f[f"{name}_s1"], 1))
        for name in ("src", "dst")
    )
    return src, dst


def _bits(value: I64) -> I64:
    """Return the number of bits of each positive value below 2^53."""
    # A float64 holds the value exactly, as a fraction of 1/2..1 times a power of two.
    return np.frexp(value.astype(np.float64))[1].astype(np.int64)


def _clamp(f: Fields, value: I64) -> Codes:
    value += f["zp"]
    return np.clip(value, f["lo"], f["hi"]).astype(np.int8)


def vec_softmax(state: State, f: Fields) -> None:
    """Softmax of rows.

    Raises:
        MachineError: the table's first entry is 0, so that a sum may be.
    """
    src, dst = _views(state, f)
    registers = -(-TABLE_BYTES // state.v.shape[1])
    content = state.vector_registers("v_table", f["v_table"], registers).reshape(-1)
    table = np.ascontiguousarray(content[:TABLE_BYTES]).view("<u2").astype(np.int64)
    if not table[0]:
        raise MachineError("v_table: entry 0 of the table of exponentials must not be 0")
    codes = src.astype(np.int64)
    powers = table[codes.max(axis=2, keepdims=True) - codes]
    total = powers.sum(axis=2, keepdims=True)
    bits = _bits(total)
    powers *= (np.int64(f["multiplier"]) << bits) // total
    shift = bits + f["shift"]
    powers += np.int64(1) << (shift - 1)
    powers >>= shift
    dst[...] = _clamp(f, powers)


def vec_layer_norm(state: State, f: Fields) -> None:
    """Layer normalisation of rows."""
    src, dst = _views(state, f)
    n, lanes = f["n0"], state.hardware.vector_lanes
    blocks = -(-n // lanes)
    shape = (blocks, lanes)
    addend, factor = (
        state.view("params", f["params"] + at, shape, (6 * lanes, size), dtype)
        .astype(np.int64)
        .reshape(-1)[:n]
        for at, size, dtype in ((0, 4, np.dtype("<i4")), (4 * lanes, 2, np.dtype("<i2")))
    )
    codes = src.astype(np.int64)
    total = codes.sum(axis=2, keepdims=True)
    squares = (codes * codes).sum(axis=2, keepdims=True)
    # Below 2^51, of which 8 bits are fractional.
    spread = ((n * squares - total * total) << 8) + f["epsilon"]
    bits = _bits(spread)
    bits += bits & 1
    scaled = np.where(bits < 32, spread << np.maximum(32 - bits, 0), spread >> (bits - 32).clip(0))
    # Exact: the root of no integer below 2^32 lies within a rounding of the next integer.
    root = np.sqrt(scaled.astype(np.float64)).astype(np.int64)
    codes *= n
    codes -= total
    codes *= np.minimum((1 << 31) // root, (1 << 16) - 1)
    codes >>= ((bits >> 1) - 4).clip(0)
    codes *= factor
    codes += addend
    codes >>= f["shift"]
    dst[...] = _clamp(f, codes)
