"""Rules a single instruction must keep on a chip: ranges, banks, registers, burst sizes.

The verifier reports these at compile time, the simulators at run time; rules between instructions
(order, semaphores, pairing) are the verifier's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tilewright.spec.access import MAX_RUNS, Access, Fields, access, accesses, element_bytes
from tilewright.spec.hardware import Hardware
from tilewright.spec.isa import DTYPES
from tilewright.spec.timing import pixel_blocks, share_bank

MAX_BIAS_BITS = 62
INT64_BITS = 63
ROWS = ("vec_softmax", "vec_layer_norm")
"""Instructions of targets with `vector_rows`."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule, in words."""

    message: str
    hint: str = ""


def violations(
    hardware: Hardware, name: str, f: Fields, regions: list[Access] | None = None
) -> Iterator[Violation]:
    """Yield the rules that instruction `name` with all its fields `f` breaks.

    `regions` are its `accesses`, if the caller has them already.
    """
    dtype = f.get("dtype", 0)
    if DTYPES[dtype] not in hardware.dtypes:
        yield Violation(
            f"dtype must be one of {', '.join(hardware.dtypes)}, not {DTYPES[dtype]}",
            f"target `{hardware.name}` does not execute {DTYPES[dtype]}",
        )
    if regions is None:
        regions = accesses(hardware, name, f)
    yield from _ranges(hardware, regions)
    yield from _once(name, f)
    if name.startswith("dma_"):
        yield from _dma(hardware, f, regions)
    elif name == "mac_conv":
        yield from _mac(hardware, f, regions)
    elif name.startswith("vec_"):
        yield from _vec(hardware, name, f, regions)


def _ranges(hardware: Hardware, regions: list[Access]) -> Iterator[Violation]:
    for region in regions:
        limit = hardware.sram_size if region.sram else hardware.ddr_size
        if region.end > limit:
            space = "SRAM" if region.sram else "DDR"
            yield Violation(
                f"{region.operand}: bytes 0x{region.address:x}..0x{region.end - 1:x} must lie in "
                f"{space} (0x0..0x{limit - 1:x})"
            )


def _dma(hardware: Hardware, f: Fields, regions: list[Access]) -> Iterator[Violation]:
    if f["channel"] >= hardware.dma_channels:
        yield Violation(f"channel must be 0..{hardware.dma_channels - 1}, not {f['channel']}")
    if "ddr" not in f or f["stream"]:
        return
    burst = hardware.dma_burst_size
    region = next(region for region in regions if not region.sram)
    hint = f"use stream mode, or pad to a multiple of {burst} bytes"
    if region.run % burst:
        yield Violation(f"length {region.run} not divisible by burst_size {burst}", hint)
    if region.address % burst:
        yield Violation(f"address 0x{region.address:x} not divisible by burst_size {burst}", hint)
    for _, stride in region.dims:
        if stride % burst:
            yield Violation(f"stride {stride} not divisible by burst_size {burst}", hint)


def _mac(hardware: Hardware, f: Fields, regions: list[Access]) -> Iterator[Violation]:
    array = hardware.array_size
    rows = () if f["diag"] else (("c_rows", f["c_blocks"] > 1), ("c_last", True))
    cols = (("cols", f["oc_blocks"] > 1), ("cols_last", True))
    for field, used in (*rows, *cols):
        if used and f[field] > array:
            yield Violation(f"{field} must be 1..{array} (the array), not {f[field]}")
    yield from _half(hardware, f)
    blocks = pixel_blocks(f)[0] * f["oc_blocks"]
    if (f["accumulate"] or not f["push"]) and blocks > 2:
        yield Violation(
            f"a mac_conv that accumulates or keeps its result has at most 2 blocks, not {blocks}"
        )
    activations = [region for region in regions if region.operand == "act"]
    weights = [region for region in regions if region.operand == "wgt"]
    if any(share_bank(hardware, a, w) for a in activations for w in weights):
        yield Violation(
            f"act (0x{f['act']:x}) and wgt (0x{f['wgt']:x}) must not share a bank "
            f"of {hardware.bank_size} bytes"
        )


def _half(hardware: Hardware, f: Fields) -> Iterator[Violation]:
    pixels = pixel_blocks(f)[1]
    if pixels > hardware.accumulator_rows:
        yield Violation(
            f"block_rows * out_w must be at most {hardware.accumulator_rows} (a half of the M "
            f"registers), not {pixels}"
        )


def _registers(hardware: Hardware, name: str, first: int, count: int) -> Iterator[Violation]:
    if first + count > hardware.vector_registers:
        last = hardware.vector_registers - 1
        yield Violation(f"{name}: V{first}..V{first + count - 1} must lie in V0..V{last}")


def _entries(hardware: Hardware, first: int, count: int) -> Iterator[Violation]:
    total = hardware.quant_banks * hardware.quant_bank_entries
    if first + count > total:
        yield Violation(f"param: entries {first}..{first + count - 1} must lie in 0..{total - 1}")


def table_registers(hardware: Hardware) -> int:
    """Return the V registers a lookup table takes."""
    return -(-256 // (4 * hardware.vector_lanes))


def row_table_registers(hardware: Hardware) -> int:
    """Return the V registers the table of a `vec_softmax` takes."""
    return -(-512 // (4 * hardware.vector_lanes))


def _rows(hardware: Hardware, name: str, f: Fields) -> Iterator[Violation]:
    if not hardware.vector_rows:
        yield Violation(
            f"{name} must not be used",
            f"target `{hardware.name}` has no `vector_rows`",
        )
    if name == "vec_softmax":
        yield from _registers(hardware, "v_table", f["v_table"], row_table_registers(hardware))
        if not f["multiplier"] >> 14:
            yield Violation(f"multiplier must be {1 << 14}..{(1 << 15) - 1}, not {f['multiplier']}")
    elif not 1 <= f["epsilon"] <= 1 << 50:
        yield Violation(f"epsilon must be 1..2^50, not {f['epsilon']}")


def _vec(hardware: Hardware, name: str, f: Fields, regions: list[Access]) -> Iterator[Violation]:
    floating = DTYPES[f.get("dtype", 0)] == "fp16"
    if f.get("dtype", 0) == DTYPES.index("int4"):
        yield Violation("the vector unit computes int8 and fp16; int4 is a type of weights")
    if name == "vec_param":
        yield from _registers(hardware, "v", f["v"], f["count"])
        entries = hardware.quant_bank_entries
        if not f["bias_only"]:
            yield from _entries(hardware, f["param"], f["count"])
            if f["param"] // entries != (f["param"] + f["count"] - 1) // entries:
                yield Violation(
                    f"param: {f['count']} entries from {f['param']} must stay inside one bank of "
                    f"{entries} entries"
                )
    elif name == "vec_table":
        yield from _registers(hardware, "v", f["v"], table_registers(hardware))
    elif name == "vec_drain":
        yield from _half(hardware, f)
        yield from _registers(hardware, "v", f["v"], f["oc_blocks"])
        for field in ("cols", "cols_last"):
            if (field == "cols_last" or f["oc_blocks"] > 1) and f[field] > hardware.array_size:
                yield Violation(f"{field} must be 1..{hardware.array_size}, not {f[field]}")
        if not f["raw"] and not floating:
            yield from _entries(hardware, f["param"], f["oc_blocks"])
    elif name in ROWS:
        yield from _rows(hardware, name, f)
    elif name != "vec_pool" and not floating:
        used = name != "vec_copy" or f["requantise"]
        if used and not (name == "vec_eltwise" and f["op"] >= 3):
            yield from _entries(hardware, f["param"], 1)
    if f.get("use_table") and not floating and not f.get("raw"):
        yield from _registers(hardware, "v_table", f["v_table"], table_registers(hardware))
    if floating and name != "vec_pool":
        yield from _registers(hardware, "v_clamp", f["v_clamp"], 1)
    if "lo" in f and f["lo"] > f["hi"]:
        yield Violation(f"lo must be at most hi ({f['hi']}), not {f['lo']}")
    if "bias_shift" in f and abs(f["bias"]) << f["bias_shift"] >= 1 << MAX_BIAS_BITS:
        yield Violation(f"bias * 2^bias_shift must be below 2^{MAX_BIAS_BITS} in magnitude")
    yield from _overlap(name, regions)


def overlaps_itself(run: int, dims: tuple[tuple[int, int], ...]) -> bool:
    """Return whether runs of `run` bytes at all steps of `dims` (count, stride) share a byte.

    Exact up to `MAX_RUNS` runs; above, runs that do not simply nest count as overlapping.
    """
    extent = run
    nested = True
    for count, stride in sorted((dim for dim in dims if dim[0] > 1), key=lambda dim: dim[1]):
        nested &= stride >= extent
        extent += (count - 1) * stride
    if nested:
        return False
    if any(count > 1 and stride == 0 for count, stride in dims):
        return True
    region = Access("", True, True, 0, run, tuple(dim for dim in dims if dim[0] > 1))
    if region.runs > MAX_RUNS:
        return True
    starts = region.starts()
    return len(starts) < region.runs or bool((starts[1:] - starts[:-1] < run).any())


def _written(name: str, f: Fields) -> tuple[int, tuple[tuple[int, int], ...]] | None:
    """Return bytes and steps (count, stride) of the runs an instruction writes, if any."""
    size = element_bytes(f)
    match name:
        case "dma_load":
            n1, n2 = f["pad1_lo"] + f["n1"] + f["pad1_hi"], f["pad2_lo"] + f["n2"] + f["pad2_hi"]
            return f["n0"], ((n1, f["sram_s1"]), (n2, f["sram_s2"]), (f["n3"], f["sram_s3"]))
        case "dma_store":
            return f["n0"], tuple((f[f"n{i}"], f[f"ddr_s{i}"]) for i in (1, 2, 3))
        case "dma_fill":
            return f["n0"], ((f["n1"], f["sram_s1"]), (f["n2"], f["sram_s2"]))
        case "vec_eltwise" | "vec_softmax" | "vec_layer_norm":
            return f["n0"] * size, ((f["n1"], f["dst_s1"]), (f["n2"], f["dst_s2"]))
        case "vec_copy":
            return size, tuple((f[f"n{i}"], f[f"dst_s{i}"]) for i in range(4))
        case "vec_pool" | "vec_resize":
            return f["n0"] * size, ((f["out_w"], f["dst_sx"]), (f["out_h"], f["dst_sy"]))
        case _:
            return None


def _drain_overlaps(f: Fields) -> bool:
    """Return whether a `vec_drain` writes a byte twice; its last block may be narrower."""
    size = 4 if f["raw"] else element_bytes(f)
    blocks, stride, last = f["oc_blocks"], f["ob_stride"], f["cols_last"] * size
    pixels = ((f["out_w"], f["ox_stride"]), (f["out_h"], f["oy_stride"]))
    if blocks == 1 or stride == f["cols"] * size:
        return overlaps_itself((blocks - 1) * stride + last, pixels)
    run, others = f["cols"] * size, (*pixels, (blocks - 1, stride))
    return (
        overlaps_itself(last, pixels)
        or overlaps_itself(run, others)
        or access("", True, True, 0, run, *others).overlaps(
            access("", True, True, (blocks - 1) * stride, last, *pixels)
        )
    )


def _once(name: str, f: Fields) -> Iterator[Violation]:
    """An instruction writes each byte once: which value stayed would depend on the order inside."""
    written = _written(name, f)
    twice = _drain_overlaps(f) if name == "vec_drain" else written and overlaps_itself(*written)
    if twice:
        yield Violation(
            "the runs it writes must not overlap each other",
            "strides of dimensions with a count above 1 must be at least what lies inside them",
        )


def _overlap(name: str, regions: list[Access]) -> Iterator[Violation]:
    if name == "vec_drain":
        return
    in_place = name in ("vec_copy", "vec_eltwise", *ROWS)
    for result in (region for region in regions if region.write):
        for source in (region for region in regions if not region.write):
            same = (source.address, source.run, source.dims) == (
                result.address,
                result.run,
                result.dims,
            )
            if not (same and in_place) and source.overlaps(result):
                yield Violation(
                    f"dst (0x{result.address:x}) must not overlap {source.operand} "
                    f"(0x{source.address:x}) unless both have the same address and strides"
                )
