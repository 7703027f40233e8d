"""Which bytes an instruction reads and writes: strided regions of SRAM and DDR.

The verifier orders engines by these, the timing rules count port words and banks by them. Addresses
are those after R registers were added.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt

from tilewright.spec.hardware import Hardware

FP16 = 2
INT4 = 1
MAX_RUNS = 1 << 22
"""More runs than any memory of a chip has words; bounds what a hostile program can cost."""
Fields = dict[str, int]
Dims = tuple[tuple[int, int], ...]


def element_bytes(f: Fields) -> int:
    """Return the bytes of an activation element (int4 is a type of weights only)."""
    return 2 if f.get("dtype", 0) == FP16 else 1


@dataclass(frozen=True, slots=True)
class Access:
    """Runs of `run` bytes at `address` plus multiples of the strides."""

    operand: str
    """Name of the address field."""
    sram: bool
    """SRAM (else DDR)."""
    write: bool
    address: int
    run: int
    dims: Dims
    """(count, stride in bytes), innermost first; only counts above 1 with a stride."""

    @property
    def end(self) -> int:
        """First address after the last byte."""
        return self.address + sum((count - 1) * stride for count, stride in self.dims) + self.run

    def alignment(self, word: int) -> int:
        """Return the greatest common divisor of address, strides and `word`."""
        value = gcd(self.address, word)
        for _, stride in self.dims:
            value = gcd(value, stride)
        return value

    @property
    def runs(self) -> int:
        """Number of runs, repeated ones counted."""
        count = 1
        for steps, _ in self.dims:
            count *= steps
        return count

    def starts(self) -> npt.NDArray[np.int64]:
        """Return the sorted, distinct addresses of the runs."""
        starts = np.array([self.address], np.int64)
        for count, stride in self.dims:
            steps = np.arange(count, dtype=np.int64) * stride
            starts = (steps[:, None] + starts[None, :]).ravel()
        return np.unique(starts)

    def overlaps(self, other: Access) -> bool:
        """Return whether the two regions share a byte.

        Exact up to `MAX_RUNS` runs; above, regions whose spans meet count as overlapping.
        """
        if self.sram != other.sram or self.end <= other.address or other.end <= self.address:
            return False
        if max(self.runs, other.runs) > MAX_RUNS:
            return True
        mine, theirs = self.starts(), other.starts()
        # A run of theirs meets one of mine iff the last of mine that starts before its end
        # reaches beyond its start (runs of one region have equal length).
        before = np.searchsorted(mine, theirs + other.run, side="left") - 1
        valid = before >= 0
        return bool(np.any(mine[before[valid]] + self.run > theirs[valid]))


def access(
    operand: str, sram: bool, write: bool, address: int, run: int, *dims: tuple[int, int]
) -> Access:
    """Return a region; steps that make one longer run are merged, single ones dropped."""
    kept: list[tuple[int, int]] = []
    for count, stride in dims:
        if count == 1 or stride == 0:
            continue
        if not kept and stride == run:
            run *= count
        else:
            kept.append((count, stride))
    return Access(operand, sram, write, address, run, tuple(kept))


def _dma(f: Fields, load: bool) -> list[Access]:
    n1, n2, n3 = f["n1"], f["n2"], f["n3"]
    ddr = access(
        "ddr", False, not load, f["ddr"], f["n0"],
        (n1, f["ddr_s1"]), (n2, f["ddr_s2"]), (n3, f["ddr_s3"]),
    )  # fmt: skip
    if load:
        n1 += f["pad1_lo"] + f["pad1_hi"]
        n2 += f["pad2_lo"] + f["pad2_hi"]
    sram = access(
        "sram", True, load, f["sram"], f["n0"],
        (n1, f["sram_s1"]), (n2, f["sram_s2"]), (n3, f["sram_s3"]),
    )  # fmt: skip
    return [ddr, sram]


def reduction_rows(f: Fields) -> int:
    """Return the channels one output-channel block of a dense `mac_conv` reduces over."""
    return (f["c_blocks"] - 1) * f["c_rows"] + f["c_last"]


def weight_row_bytes(f: Fields, cols: int) -> int:
    """Return the bytes of a weight row of `cols` columns."""
    if f["dtype"] == INT4:
        return (cols + 1) // 2
    return cols * element_bytes(f)


def conv_accesses(name: str, f: Fields) -> list[Access]:
    """Return the regions of a `mac_conv` or `vec_drain`, which do not depend on the target."""
    return _mac(f) if name == "mac_conv" else _drain(f)


def _mac(f: Fields) -> list[Access]:
    size = element_bytes(f)
    pixels = (
        (f["k_w"], f["kx_stride"]),
        (f["out_w"], f["ox_stride"]),
        (f["k_h"], f["ky_stride"]),
        (f["out_h"], f["oy_stride"]),
    )
    act, blocks, row = f["act"], f["oc_blocks"], weight_row_bytes(f, f["cols"])
    regions: list[Access] = []

    def activations(offset: int, elements: int, *dims: tuple[int, int]) -> None:
        regions.append(access("act", True, False, act + offset, elements * size, *dims, *pixels))

    if f["diag"]:
        steps = f["k_h"] * f["k_w"] * f["c_blocks"]
        c_dim = (f["c_blocks"], f["cb_stride"])
        activations(0, f["cols"], c_dim, (blocks - 1, f["ob_stride"]))
        if blocks == 1:
            regions.pop()
        activations((blocks - 1) * f["ob_stride"], f["cols_last"], c_dim)
    else:
        steps = f["k_h"] * f["k_w"] * reduction_rows(f)
        ob_dim = (blocks, f["ob_stride"])
        last = f["c_blocks"] - 1
        if last and f["c_last"] == f["c_rows"]:
            activations(0, f["c_rows"], (last + 1, f["cb_stride"]), ob_dim)
        else:
            if last:
                activations(0, f["c_rows"], (last, f["cb_stride"]), ob_dim)
            activations(last * f["cb_stride"], f["c_last"], ob_dim)

    def weights(offset: int, width: int, *dims: tuple[int, int]) -> None:
        run = (steps - 1) * f["wgt_pitch"] + width
        regions.append(access("wgt", True, False, f["wgt"] + offset, run, *dims))

    if blocks > 1:
        weights(0, row, (blocks - 1, f["wgt_ob_stride"]))
    weights((blocks - 1) * f["wgt_ob_stride"], weight_row_bytes(f, f["cols_last"]))
    return regions


def _drain(f: Fields) -> list[Access]:
    size = 4 if f["raw"] else element_bytes(f)
    pixels = ((f["out_w"], f["ox_stride"]), (f["out_h"], f["oy_stride"]))
    blocks = f["oc_blocks"]
    last = f["dst"] + (blocks - 1) * f["ob_stride"]
    regions = [access("dst", True, True, last, f["cols_last"] * size, *pixels)]
    if blocks > 1:
        dims = ((blocks - 1, f["ob_stride"]), *pixels)
        regions.append(access("dst", True, True, f["dst"], f["cols"] * size, *dims))
    return regions


def _eltwise(f: Fields) -> list[Access]:
    size, n0 = element_bytes(f), f["n0"]
    return [
        access(
            name, True, name == "dst", f[name], size * (1 if name == "b" and f["b_scalar"] else n0),
            (f["n1"], f[f"{name}_s1"]), (f["n2"], f[f"{name}_s2"]),
        )
        for name in ("a", "b", "dst")
    ]  # fmt: skip


def _copy(f: Fields) -> list[Access]:
    size = element_bytes(f)
    return [
        access(
            name, True, name == "dst", f[name], size,
            (f["n0"], f[f"{name}_s0"]), (f["n1"], f[f"{name}_s1"]),
            (f["n2"], f[f"{name}_s2"]), (f["n3"], f[f"{name}_s3"]),
        )
        for name in ("src", "dst")
    ]  # fmt: skip


def _pool(f: Fields) -> list[Access]:
    run = f["n0"] * element_bytes(f)
    out = (f["out_w"], f["out_h"])
    window = ((f["k_w"], f["kx_stride"]), (f["k_h"], f["ky_stride"]))
    return [
        access(
            "src", True, False, f["src"], run, *window, (out[0], f["src_sx"]), (out[1], f["src_sy"])
        ),
        access("dst", True, True, f["dst"], run, (out[0], f["dst_sx"]), (out[1], f["dst_sy"])),
    ]


def _resize(f: Fields) -> list[Access]:
    # Which source pixels are read stands in the tables; all of them is what is known here.
    return [
        access(
            "src", True, False, f["src"], f["n0"],
            (f["in_w"], f["src_sx"]), (f["in_h"], f["src_sy"]),
        ),
        access("table_y", True, False, f["table_y"], 8 * f["out_h"]),
        access("table_x", True, False, f["table_x"], 8 * f["out_w"]),
        access(
            "dst", True, True, f["dst"], f["n0"],
            (f["out_w"], f["dst_sx"]), (f["out_h"], f["dst_sy"]),
        ),
    ]  # fmt: skip


def row_parameter_bytes(hardware: Hardware, n0: int) -> int:
    """Return the bytes of a `vec_layer_norm`'s blocks of addends and factors."""
    lanes = hardware.vector_lanes
    return -(-n0 // lanes) * 6 * lanes


def _rows(hardware: Hardware, name: str, f: Fields) -> list[Access]:
    regions = [
        access(
            key, True, key == "dst", f[key], f["n0"],
            (f["n1"], f[f"{key}_s1"]), (f["n2"], f[f"{key}_s2"]),
        )
        for key in ("src", "dst")
    ]  # fmt: skip
    if name == "vec_layer_norm":
        size = row_parameter_bytes(hardware, f["n0"])
        regions.insert(1, access("params", True, False, f["params"], size))
    return regions


def accesses(hardware: Hardware, name: str, f: Fields) -> list[Access]:
    """Return the regions instruction `name` with all its fields `f` touches."""
    lanes = hardware.vector_lanes
    match name:
        case "dma_load":
            return _dma(f, load=True)
        case "dma_store":
            return _dma(f, load=False)
        case "dma_fill":
            dims = ((f["n1"], f["sram_s1"]), (f["n2"], f["sram_s2"]))
            return [access("sram", True, True, f["sram"], f["n0"], *dims)]
        case "mac_conv":
            return _mac(f)
        case "vec_drain":
            return _drain(f)
        case "vec_param":
            size = (4 if f["bias_only"] else 9) * lanes * f["count"]
            return [access("src", True, False, f["src"], size)]
        case "vec_table":
            return [access("src", True, False, f["src"], 256)]
        case "vec_eltwise":
            return _eltwise(f)
        case "vec_copy":
            return _copy(f)
        case "vec_pool":
            return _pool(f)
        case "vec_resize":
            return _resize(f)
        case "vec_softmax" | "vec_layer_norm":
            return _rows(hardware, name, f)
        case _:
            return []
