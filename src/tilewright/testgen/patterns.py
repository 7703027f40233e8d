"""Makers of random instructions: every field at interesting values, cheap enough to simulate.

Each takes a `Builder` and returns whether it added something; a proposal that breaks a rule of the
machine is thrown away and another one drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.spec.access import accesses, weight_row_bytes
from tilewright.spec.isa import BY_NAME
from tilewright.spec.program import Instr, full_fields
from tilewright.testgen.builder import Builder, Fields
from tilewright.testgen.memory import (
    PARAM_BLOCKS,
    RESIZE_ENTRIES,
    RESIZE_LIMITS,
    WILD,
    catalogue,
    small_multiplier,
)

TRIES = 24


def unused(b: Builder, name: str, fields: Fields, counts: dict[str, str]) -> None:
    """Give strides of dimensions with a count of 1 any value: nothing may depend on them."""
    for stride, count in counts.items():
        if fields[count] == 1 and b.pick.chance(0.3):
            item = BY_NAME[name].field[stride]
            fields[stride] = b.pick.of(item.high, b.pick.between(0, item.high))


def stride_room(b: Builder) -> int:
    """Return the usual gap between runs."""
    return b.pick.of(0, 1, 3, b.hardware.sram_word_bytes, 2 * b.hardware.sram_word_bytes + 1)


def budget(b: Builder) -> int:
    """Return bytes a DMA moves at most."""
    return b.pick.of(16, 64, 200, 200, 600) * b.hardware.sram_word_bytes // 8


# DMA.

_DIMS = {"ddr_s1": "n1", "ddr_s2": "n2", "ddr_s3": "n3", "sram_s1": "n1", "sram_s2": "n2",
         "sram_s3": "n3"}  # fmt: skip


def channel(b: Builder) -> int:
    """Return a DMA channel."""
    return b.pick.between(0, b.hardware.dma_channels - 1)


def _transfer(b: Builder, load: bool) -> Fields:
    pick, hw = b.pick, b.hardware
    counts = [1, 1, 1]
    total = budget(b)
    burst = pick.chance(0.4)
    unit = hw.dma_burst_size if burst else 1
    rank = pick.of(0, 0, 1, 2, 3)
    n0 = unit * pick.size(max(1, (total if rank == 0 else total // 3) // unit))
    rest = pick.split(max(1, min(24, total // n0)), max(1, rank))
    for dim in range(rank):
        counts[dim] = rest[dim]
    f: Fields = {"channel": channel(b), "stream": int(not burst), "n0": n0}
    f |= {f"n{i + 1}": counts[i] for i in range(3)}
    padded = list(counts)
    if load and pick.chance(0.4):
        for dim, where in ((0, "pad1"), (1, "pad2")):
            low, high = (pick.of(0, 1, 2, 3, pick.between(0, 5)) for _ in range(2))
            f |= {f"{where}_lo": low, f"{where}_hi": high}
            padded[dim] += low + high
        f["fill"] = pick.of(0, 255, 128, 127, pick.between(0, 255))
    room = stride_room(b)
    if load:
        sram = pick.write_strides(padded, n0, room)
        ddr = pick.read_strides(counts, n0, room)
    else:
        sram = pick.read_strides(counts, n0, room)
        ddr = pick.write_strides(counts, n0, room)
    if burst:
        ddr = [-(-stride // unit) * unit for stride in ddr]
        if not load:
            ddr = _ordered(ddr, counts, n0)
    f |= {f"ddr_s{i + 1}": ddr[i] for i in range(3)}
    f |= {f"sram_s{i + 1}": sram[i] for i in range(3)}
    pads = f.get("pad1_lo", 0) + f.get("pad1_hi", 0), f.get("pad2_lo", 0) + f.get("pad2_hi", 0)
    dims = dict(_DIMS)
    if pads[0]:
        del dims["sram_s1"]
    if pads[1]:
        del dims["sram_s2"]
    span = n0 + sum((count - 1) * stride for count, stride in zip(counts, ddr, strict=True))
    place = b.ddr(span, unit)
    if len(b.windows) > 1 and counts == padded == [1, 1, 1] and pick.chance(0.3):
        place = _hop(b, f, unit, place)
    unused(b, "dma_load", f, dims)
    size = n0 + sum((count - 1) * stride for count, stride in zip(padded, sram, strict=True))
    f |= b.address("sram", b.sram(size, read=not load))
    f |= b.address("ddr", place, 40)
    return f


def _ordered(strides: Sequence[int], counts: Sequence[int], run: int) -> list[int]:
    """Return multiples of the burst that keep runs apart (nesting inside out)."""
    result: list[int] = []
    extent = run
    for stride, count in zip(strides, counts, strict=True):
        result.append(max(stride, extent))
        extent += (count - 1) * result[-1]
    return result


def _hop(b: Builder, f: Fields, unit: int, place: int) -> int:
    """Make a transfer jump from one window to another."""
    first, second = sorted((b.pick.one(b.windows[1:]), b.pick.one(b.windows)), key=lambda w: w.end)
    distance = second.end - first.end
    if first is second or not unit <= distance < 1 << 32 or distance % unit:
        return place
    f |= {"n3": 2, "ddr_s3": distance, "sram_s3": f["n0"] + b.pick.of(0, 3)}
    return first.end - f["n0"] - unit * b.pick.between(0, 40)


def load(b: Builder) -> bool:
    """Add a `dma_load`."""
    for _ in range(TRIES):
        f = _transfer(b, load=True)
        if b.add("dma_load", f):
            _note(b, "dma_load", f)
            return True
    return False


def store(b: Builder) -> bool:
    """Add a `dma_store`."""
    return any(b.add("dma_store", _transfer(b, load=False)) for _ in range(TRIES))


def fill(b: Builder) -> bool:
    """Add a `dma_fill`."""
    pick = b.pick
    for _ in range(TRIES):
        n0 = pick.size(budget(b))
        counts = pick.split(min(20, max(1, budget(b) // n0)), 2)
        strides = pick.write_strides(counts, n0, stride_room(b))
        size = n0 + sum((c - 1) * s for c, s in zip(counts, strides, strict=True))
        f: Fields = {"channel": channel(b), "n0": n0, "n1": counts[0], "n2": counts[1]}
        f |= {"sram_s1": strides[0], "sram_s2": strides[1], "fill": pick.between(0, 255)}
        unused(b, "dma_fill", f, {"sram_s1": "n1", "sram_s2": "n2"})
        f |= b.address("sram", b.sram(size))
        if b.add("dma_fill", f):
            return True
    return False


def _note(b: Builder, name: str, fields: Fields) -> None:
    f = full_fields(Instr(name, fields))
    for region in accesses(b.hardware, name, f):
        if region.sram and region.write and not any(f.get(f"{k}_r") for k in ("sram", "dst")):
            b.written(region.address, region.end - region.address)


def fetch_blob(b: Builder, ddr: int, size: int) -> int | None:
    """Load bytes of the catalogue to some place of SRAM and return it."""
    for _ in range(TRIES):
        f: Fields = {"channel": channel(b), "stream": 1, "n0": size}
        place = b.sram(size)
        f |= b.address("sram", place, steady=True) | b.address("ddr", ddr, 40, steady=True)
        if b.add("dma_load", f):
            return place
    return None


# Vector unit.


def entries(b: Builder) -> int:
    """Return the number of parameter entries."""
    return b.hardware.quant_banks * b.hardware.quant_bank_entries


def param(b: Builder, count: int | None = None) -> bool:
    """Add a load of parameter blocks and their `vec_param`."""
    pick, hw = b.pick, b.hardware
    per_bank = hw.quant_bank_entries
    largest = max(1, min(per_bank, 4, hw.sram_size // (8 * catalogue(hw).block_bytes)))
    count = min(count or pick.between(1, largest), largest)
    only = bool(b.entry) and pick.chance(0.15)
    block = pick.between(0, PARAM_BLOCKS - count)
    size = catalogue(hw).block_bytes
    place = fetch_blob(b, block * size, count * size)
    if place is None:
        return False
    # Entries that differ in one line of the address from one written before.
    first = pick.between(0, hw.quant_banks - 1) * per_bank + pick.between(0, per_bank - count)
    if b.entry and pick.chance(0.5):
        known = pick.one(sorted(b.entry))
        first = (known ^ 1 << pick.between(0, (entries(b) - 1).bit_length() - 1)) % entries(b)
    first = min(first, (first // per_bank + 1) * per_bank - count)
    v = pick.between(0, hw.vector_registers - count)
    f: Fields = {"param": first, "count": count, "v": v, "bias_only": int(only)}
    if not b.add("vec_param", f | b.address("src", place, steady=True)):
        return False
    b.v_written[v : v + count] = True
    if not only:
        b.entry |= {first + i: block + i for i in range(count)}
    return True


def table(b: Builder) -> bool:
    """Add a `vec_table` of whatever bytes there are."""
    v = b.pick.between(0, b.hardware.vector_registers - b.table_registers)
    f = {"v": v} | b.address("src", b.sram(256, read=True))
    if not b.add("vec_table", f):
        return False
    b.v_written[v : v + b.table_registers] = True
    return True


def written_v(b: Builder, count: int) -> int | None:
    """Return the first of `count` V registers that were all written, or None."""
    starts = [
        v
        for v in range(b.hardware.vector_registers - count + 1)
        if b.v_written[v : v + count].all()
    ]
    return b.pick.one(starts) if starts else None


def _entry(b: Builder, count: int = 1, *, small: bool = False) -> int | None:
    starts = [
        first
        for first in b.entry
        if all(first + i in b.entry for i in range(count))
        and (not small or (not b.in_loop and small_multiplier(b.entry[first])))
    ]
    return b.pick.one(sorted(starts)) if starts else None


def clamp(b: Builder) -> Fields:
    """Return a zero point and limits of codes."""
    pick = b.pick
    low, high = pick.of((-128, 127), (-128, 127), (-127, 127), (0, 127), (-128, -1), (5, 5))
    if pick.chance(0.2):
        low, high = sorted((pick.between(-128, 127), pick.between(-128, 127)))
    return {"zp": pick.of(0, 0, -256, 255, pick.between(-128, 127)), "lo": low, "hi": high}


def _scalar(b: Builder, entry: int) -> Fields:
    """Return the fields of the rescaling common to eltwise, copy and resize."""
    pick = b.pick
    f: Fields = {"param": entry, "za": pick.of(0, -128, 127, pick.between(-128, 127))}
    if pick.chance(0.6):
        f["bias"] = pick.of(-512, 511, 1, -1, pick.between(-512, 511))
        f["bias_shift"] = pick.of(0, 1, 31, 32, 50, pick.between(0, 50))
    return f | clamp(b)


def _lookup(b: Builder) -> Fields:
    v = written_v(b, b.table_registers)
    if v is None or b.pick.chance(0.5):
        return {}
    return {"use_table": 1, "v_table": v}


def result(b: Builder, name: str, f: Fields) -> bool:
    """Add an instruction whose result may be read; tell whether it is legal."""
    if not b.add(name, f):
        return False
    _note(b, name, f)
    return True


def eltwise(b: Builder) -> bool:
    """Add a `vec_eltwise`."""
    pick, lanes = b.pick, b.hardware.vector_lanes
    if _entry(b) is None and not param(b):
        return False
    for _ in range(TRIES):
        n0 = pick.size(6 * lanes)
        n1, n2 = pick.split(max(1, min(20, 80 * lanes // n0)), 2)
        room = stride_room(b)
        scalar = pick.chance(0.25)
        f: Fields = {"op": pick.between(0, 4), "b_scalar": int(scalar), "n0": n0, "n1": n1}
        f |= {"n2": n2, "zb": pick.of(0, -128, 127, pick.between(-128, 127))}
        entry = _entry(b)
        if entry is not None:
            f |= _scalar(b, entry)
        size = 0
        for name in ("a", "b", "dst"):
            run = 1 if name == "b" and scalar else n0
            make = pick.write_strides if name == "dst" else pick.read_strides
            s1, s2 = make((n1, n2), run, room)
            f |= {f"{name}_s1": s1, f"{name}_s2": s2}
            size = run + (n1 - 1) * s1 + (n2 - 1) * s2
            f |= b.address(name, b.sram(size, read=name != "dst"))
        if pick.chance(0.15):  # in place
            source = pick.of("a", "b") if not scalar else "a"
            for suffix in ("", "_r", "_s1", "_s2"):
                f[f"{source}{suffix}"] = f[f"dst{suffix}"]
        dims = {f"{name}_s{i}": f"n{i}" for name in ("a", "b", "dst") for i in (1, 2)}
        unused(b, "vec_eltwise", f, dims)
        if result(b, "vec_eltwise", f):
            return True
    return False


def copy(b: Builder) -> bool:
    """Add a `vec_copy`."""
    pick, lanes = b.pick, b.hardware.vector_lanes
    if _entry(b) is None and not param(b):
        return False
    for _ in range(TRIES):
        dense = pick.chance(0.5)
        n0 = pick.size(5 * lanes if dense else 12)
        most = max(1, min(16, (60 * lanes if dense else 90) // n0))
        counts = [n0, *pick.split(most, 3)]
        room = stride_room(b)
        f: Fields = {f"n{i}": counts[i] for i in range(4)}
        if pick.chance(0.6):
            entry = _entry(b)
            if entry is not None:
                f |= {"requantise": 1} | _scalar(b, entry)
        f |= _lookup(b)
        strides: dict[str, list[int]] = {}
        if dense:
            strides["dst"] = [1, *pick.write_strides(counts[1:], n0, room)]
            strides["src"] = [1, *pick.read_strides(counts[1:], n0, room)]
        else:
            strides["dst"] = pick.write_strides(counts, 1, min(room, 3))
            strides["src"] = pick.read_strides(counts, 1, min(room, 3))
        for name in ("src", "dst"):
            f |= {f"{name}_s{i}": strides[name][i] for i in range(4)}
            size = 1 + sum((c - 1) * s for c, s in zip(counts, strides[name], strict=True))
            f |= b.address(name, b.sram(size, read=name == "src"))
        if pick.chance(0.15):
            for suffix in ("", "_r", "_s0", "_s1", "_s2", "_s3"):
                f[f"src{suffix}"] = f[f"dst{suffix}"]
        dims = {f"{name}_s{i}": f"n{i}" for name in ("src", "dst") for i in range(4)}
        if n0 > 1 or pick.chance(0.5):
            unused(b, "vec_copy", f, dims)
        if result(b, "vec_copy", f):
            return True
    return False


_POOL_DIMS = {"kx_stride": "k_w", "ky_stride": "k_h", "src_sx": "out_w", "src_sy": "out_h",
              "dst_sx": "out_w", "dst_sy": "out_h"}  # fmt: skip


def pool(b: Builder) -> bool:
    """Add a `vec_pool`."""
    pick, lanes = b.pick, b.hardware.vector_lanes
    for _ in range(TRIES):
        n0 = pick.size(4 * lanes)
        k_h, k_w = (pick.of(1, 2, 3, 3, 5) for _ in range(2))
        work = max(1, 160 // (k_h * k_w * -(-n0 // lanes)))
        out_w, out_h = pick.split(min(30, work), 2)
        room = stride_room(b)
        f: Fields = {"n0": n0, "out_h": out_h, "out_w": out_w, "k_h": k_h, "k_w": k_w}
        dst = pick.write_strides((out_w, out_h), n0, room)
        f |= {"dst_sx": dst[0], "dst_sy": dst[1]}
        names = ("kx_stride", "ky_stride", "src_sx", "src_sy")
        counts = (k_w, k_h, out_w, out_h)
        step = n0 + room
        row = step * (out_w + k_w)
        src = (step, row, step * pick.of(1, 2), row) if pick.chance(0.6) else tuple(
            pick.between(0, step + 3) for _ in range(4)
        )  # fmt: skip
        f |= dict(zip(names, src, strict=True))
        size = n0 + sum((c - 1) * s for c, s in zip(counts, src, strict=True))
        unused(b, "vec_pool", f, _POOL_DIMS)
        f |= b.address("src", b.sram(size, read=True))
        f |= b.address("dst", b.sram(n0 + (out_w - 1) * dst[0] + (out_h - 1) * dst[1]))
        if result(b, "vec_pool", f):
            return True
    return False


def resize(b: Builder) -> bool:
    """Add loads of two tables and the `vec_resize` that uses them."""
    pick, hw = b.pick, b.hardware
    lanes = hw.vector_lanes
    wild = pick.chance(0.2)
    if _entry(b, small=wild) is None:
        wild = False
        if _entry(b) is None and not param(b):
            return False
    in_h, in_w = (pick.one(RESIZE_LIMITS) for _ in range(2))
    n0 = pick.size(3 * lanes)
    out_w, out_h = pick.split(max(1, 48 * lanes // n0), 2)
    out = {"x": min(out_w, RESIZE_ENTRIES), "y": min(out_h, RESIZE_ENTRIES)}
    mark = len(b.program)
    f: Fields = {"n0": n0, "out_h": out["y"], "out_w": out["x"], "in_h": in_h, "in_w": in_w}
    taken: list[tuple[int, int]] = []
    for axis, limit in (("y", in_h), ("x", in_w)):
        skip = pick.between(0, RESIZE_ENTRIES - out[axis])
        at = catalogue(hw).tables[limit + (WILD if wild else 0)] + 8 * skip
        size = 8 * out[axis]
        place = fetch_blob(b, at, size)
        if place is None or any(place < e and s < place + size for s, e in taken):
            del b.program[mark:]
            return False
        taken.append((place, place + size))
        f |= b.address(f"table_{axis}", place, steady=True)
    for _ in range(TRIES):
        room = stride_room(b)
        g = dict(f)
        entry = _entry(b, small=wild)
        assert entry is not None
        g |= _scalar(b, entry)
        src = pick.write_strides((in_w, in_h), n0, room)
        dst = pick.write_strides((out["x"], out["y"]), n0, room)
        g |= {"src_sx": src[0], "src_sy": src[1], "dst_sx": dst[0], "dst_sy": dst[1]}
        size = n0 + (in_w - 1) * src[0] + (in_h - 1) * src[1]
        g |= b.address("src", b.sram(size, read=True))
        size = n0 + (out["x"] - 1) * dst[0] + (out["y"] - 1) * dst[1]
        g |= b.address("dst", b.sram(size))
        unused(b, "vec_resize", g, {"src_sx": "in_w", "src_sy": "in_h", "dst_sx": "out_w",
                                    "dst_sy": "out_h"})  # fmt: skip
        if result(b, "vec_resize", g):
            return True
    del b.program[mark:]
    return False


# MAC array.


def conv_shape(b: Builder, blocks: int | None = None, prime: bool = False) -> Fields:
    """Return what a `mac_conv` and its `vec_drain` share."""
    pick, hw = b.pick, b.hardware
    out_w = pick.size(min(16, hw.accumulator_rows))
    block_rows = pick.size(max(1, min(hw.accumulator_rows // out_w, 40 // out_w + 1)))
    count = blocks or pick.of(1, 1, 2, 3, 4, 5)
    oc_blocks = pick.of(1, 1, count) if count <= 3 else pick.of(1, 2)
    pixel_blocks = max(1, count // oc_blocks)
    out_h = max(1, pixel_blocks * block_rows - pick.between(0, block_rows - 1))
    array = hw.array_size
    f: Fields = {"out_h": out_h, "out_w": out_w, "block_rows": block_rows}
    f |= {"oc_blocks": oc_blocks, "m_half": pick.of(0, 1)}
    f |= {"cols": pick.of(array, pick.size(array)), "cols_last": pick.of(array, pick.size(array))}
    if oc_blocks == 1 and pick.chance(0.3):
        f["cols"] = pick.between(1, 256)
    if prime:
        f["cols_last"] = array
    return f


def conv_fields(
    b: Builder, shape: Fields, *, budget: int = 400, prime: bool = False
) -> Fields | None:
    """Return a `mac_conv` of that shape whose work is within `budget` cycles, or None."""
    pick, hw = b.pick, b.hardware
    array = hw.array_size
    f = dict(shape)
    f |= {
        "k_h": pick.of(1, 1, 2, 3),
        "k_w": pick.of(1, 1, 2, 3, 5),
        "c_blocks": pick.of(1, 1, 2, 3),
    }
    primes = [value for value in (3, 5, 7, 11, 13, 17, 19, 23, 29, 31) if value < array]
    for name in ("c_rows", "c_last"):
        f[name] = pick.one(primes) if prime else pick.of(array, pick.size(array))
    f["diag"] = int(not prime and pick.chance(0.25))
    if "int4" in hw.dtypes and pick.chance(0.3):
        f["dtype"] = 1
    rows = f["k_h"] * f["k_w"] * f["c_blocks"]
    pixels = f["out_h"] * f["out_w"]
    per_step = max(2 * pixels, 1 if f["diag"] else 2 * max(f["c_rows"], f["c_last"]))
    if rows * per_step * f["oc_blocks"] > budget:
        return None
    room = stride_room(b)
    width = array if f["diag"] else max(f["c_rows"], f["c_last"])
    if pick.chance(0.6):
        step = width + room
        f |= {"cb_stride": step, "kx_stride": step * f["c_blocks"]}
        f["ox_stride"] = f["kx_stride"] * pick.of(1, 1, 2)
        f["ky_stride"] = f["kx_stride"] * (f["out_w"] + f["k_w"])
        f["oy_stride"] = f["ky_stride"] * pick.of(1, 2)
    else:
        for name in ("cb_stride", "kx_stride", "ox_stride", "ky_stride", "oy_stride"):
            f[name] = pick.of(0, 1, width, pick.between(0, 2 * width + room))
    f["ob_stride"] = pick.of(0, 0, width, pick.between(0, width))
    row = weight_row_bytes({"dtype": 0, **f}, array)
    f["wgt_pitch"] = pick.of(row, row, 0, row + 1, pick.between(0, row + 5))
    total = rows * (1 if f["diag"] else array) * f["wgt_pitch"]
    f["wgt_ob_stride"] = pick.of(total, total + 3, 0, pick.between(0, total + 8))
    split = pick.between(1, hw.sram_banks - 1)
    sides = [list(range(split)), list(range(split, hw.sram_banks))]
    pick.rng.shuffle(sides)
    full = full_fields(Instr("mac_conv", f))
    for name, banks in zip(("act", "wgt"), sides, strict=True):
        regions = accesses(hw, "mac_conv", full)
        size = max(region.end for region in regions if region.operand == name)
        place = b.sram(size, banks=banks)
        if name == "act" and b.live and pick.chance(0.6):
            start, _ = pick.one(b.live)
            if start // hw.bank_size in banks:
                place = start
        f |= b.address(name, place)
    unused(b, "mac_conv", f, {"oy_stride": "out_h", "ox_stride": "out_w", "ky_stride": "k_h",
                              "kx_stride": "k_w", "cb_stride": "c_blocks",
                              "wgt_ob_stride": "oc_blocks", "ob_stride": "oc_blocks"})  # fmt: skip
    if f["c_blocks"] == 1 and pick.chance(0.3):
        f["c_rows"] = pick.between(1, 256)
    if f["diag"] and pick.chance(0.3):
        f["c_last"] = pick.between(1, 256)
    return f


def drain_fields(b: Builder, shape: Fields) -> Fields | None:
    """Return a `vec_drain` of that shape."""
    pick = b.pick
    f = dict(shape)
    blocks = f["oc_blocks"]
    v = written_v(b, blocks)
    entry = _entry(b, blocks)
    if v is None:
        return None
    f["v"] = v
    f["raw"] = int(entry is None or pick.chance(0.25))
    if entry is not None:
        f |= {"param": entry} | clamp(b) | _lookup(b)
    run = max(f["cols_last"], f["cols"] if blocks > 1 else 1) * (4 if f["raw"] else 1)
    counts = (blocks, f["out_w"], f["out_h"])
    room = min(stride_room(b), 9)
    if pick.chance(0.5):
        strides = pick.write_strides(counts, run, room)
    else:
        inner = pick.write_strides(counts[1:], run, room)
        extent = run + sum((c - 1) * s for c, s in zip(counts[1:], inner, strict=True))
        strides = [extent + room, *inner]
    if strides[0] > 1023 and blocks == 1:
        strides[0] = 0
    f |= {"ob_stride": strides[0], "ox_stride": strides[1], "oy_stride": strides[2]}
    size = run + sum((c - 1) * s for c, s in zip(counts, strides, strict=True))
    unused(
        b, "vec_drain", f, {"oy_stride": "out_h", "ox_stride": "out_w", "ob_stride": "oc_blocks"}
    )
    return f | b.address("dst", b.sram(size))


def meets(b: Builder, drain: Fields, convs: Sequence[Fields]) -> bool:
    """Tell whether a drain would write what one of the convolutions reads, in any iteration."""

    def regions(name: str, f: Fields, keys: Sequence[str], values: dict[int, int]):
        at = full_fields(Instr(name, f))
        for key in keys:
            at[key] = (at[key] + values.get(at[f"{key}_r"], 0)) & ((1 << 40) - 1)
        return accesses(b.hardware, name, at)

    for values in b.values:
        writes = regions("vec_drain", drain, ("dst",), values)
        for conv in convs:
            reads = regions("mac_conv", conv, ("act", "wgt"), values)
            if any(w.overlaps(r) for w in writes for r in reads):
                return True
    return False


def _first(make: Callable[[], Fields | None], ok: Callable[[Fields], bool]) -> Fields | None:
    for _ in range(TRIES):
        f = make()
        if f is not None and ok(f):
            return f
    return None


def conv(
    b: Builder, between: Callable[[], object] | None = None, prime: bool = False, budget: int = 400
) -> bool:
    """Add convolutions and their drains: plain, accumulating chains, or two in flight.

    `between` adds other work between pushes and drains where that cannot deadlock.
    """
    pick = b.pick
    kind = pick.of("plain", "plain", "plain", "chain", "two")
    if prime:
        kind = pick.of("plain", "plain", "chain")
    for _ in range(4):
        if written_v(b, 3) is None or _entry(b, 3) is None:
            param(b, 3)
    if written_v(b, 1) is None:
        return False
    for _ in range(TRIES):
        blocks = {"plain": None, "chain": pick.of(1, 2), "two": 1}[kind]
        shapes = [conv_shape(b, blocks, prime)]
        if kind == "two":
            shapes.append(conv_shape(b, 1, prime))
            shapes[1]["m_half"] = 1 - shapes[0]["m_half"]
        total = sum(-(-s["out_h"] // s["block_rows"]) * s["oc_blocks"] for s in shapes)
        if kind != "plain" and total > 2:
            continue
        convs: list[Fields] = []
        length = pick.of(2, 2, 3) if kind == "chain" else 1
        for shape in shapes:
            for link in range(length):
                flags = {"accumulate": int(link > 0), "push": int(link == length - 1)}

                def make(shape: Fields = shape, flags: Fields = flags) -> Fields | None:
                    f = conv_fields(b, shape, budget=budget, prime=prime)
                    return None if f is None else f | flags

                f = _first(make, lambda f: b.fits("mac_conv", f))
                if f is not None:
                    convs.append(f)
        if len(convs) != length * len(shapes):
            continue
        drains: list[Fields] = []
        for shape in shapes:
            f = _first(
                lambda shape=shape: drain_fields(b, shape),
                lambda f, convs=convs: b.fits("vec_drain", f) and not meets(b, f, convs),
            )
            if f is not None:
                drains.append(f)
        if len(drains) != len(shapes):
            continue
        for f in convs:
            link = Instr("mac_conv", f)
            if f["accumulate"] and not f["push"] and not b.in_loop and pick.chance(0.5):
                # The half's content is kept from iteration to iteration.
                loop = Instr("loop", {"count": pick.of(2, 3, 5)})
                b.program += [Instr("fence"), loop, link, Instr("fence"), Instr("end_loop")]
                continue
            b.append(link)
            if between is not None and total <= 2 and kind == "chain" and pick.chance(0.3):
                between()
        if between is not None and total <= 2 and pick.chance(0.5):
            between()
        for f in drains:
            b.append(Instr("vec_drain", f))
            _note(b, "vec_drain", f)
        return True
    return False


def saturate(b: Builder) -> bool:
    """Add one long convolution whose sums leave 32 bits on both sides (some 130,000 cycles)."""
    hw = b.hardware
    array = hw.array_size
    kernel = 1
    while kernel * kernel * array * 128 * 127 < 1 << 31:
        kernel += 1
    side = hw.bank_size
    if not param(b) or kernel > 256:
        return False
    low, high = 0, (hw.sram_banks - 1) * side
    half = array // 2
    ok = b.add("dma_fill", {"sram": low, "n0": array, "fill": 128})
    ok &= b.add("dma_fill", {"sram": high, "n0": half, "fill": 128, "channel": 1})
    ok &= b.add("dma_fill", {"sram": high + half, "n0": array - half, "fill": 127, "channel": 1})
    shape = {"cols_last": array}
    work = {"act": low, "wgt": high, "k_h": kernel, "k_w": kernel, "c_last": array}
    v = written_v(b, 1)
    if v is None or not ok:
        return False
    ok &= b.add("mac_conv", shape | work)
    return ok and b.add("vec_drain", shape | {"raw": 1, "v": v, "dst": low + 4 * array})


# Sequencer.


def registers(b: Builder) -> bool:
    """Add a `set_reg` or `add_reg` (outside loops)."""
    pick, hw = b.pick, b.hardware
    if b.in_loop:
        return False
    number = pick.between(1, hw.scalar_registers - 1)
    if pick.chance(0.4):
        step = pick.of(
            1, -1, 4096, -4096, 65535, -(1 << 39), (1 << 39) - 1, pick.between(-999, 999)
        )
        return b.add("add_reg", {"rd": number, "value": step})
    window = pick.one(b.windows)
    value = pick.of(
        0, 1, window.address, window.address + pick.between(0, window.size - 1),
        (1 << 40) - pick.between(1, 70000), pick.between(0, hw.sram_size - 1), (1 << 16) - 1,
    )  # fmt: skip
    return b.add("set_reg", {"rd": number, "value": value})


def fence(b: Builder) -> bool:
    """Add a `fence`."""
    return b.add("fence", {})
