"""Makers of random instructions for rows: softmax and layer normalisation."""

from __future__ import annotations

from tilewright.spec.access import row_parameter_bytes
from tilewright.spec.limits import row_table_registers
from tilewright.testgen import patterns
from tilewright.testgen.builder import Builder, Fields
from tilewright.testgen.memory import catalogue


def _shape(b: Builder, longest: int) -> Fields:
    """Return rows and their places; `longest` bounds their elements together."""
    pick, lanes = b.pick, b.hardware.vector_lanes
    n0 = pick.size(pick.of(3 * lanes, 6 * lanes, longest))
    n1, n2 = pick.split(max(1, min(12, longest // n0)), 2)
    f: Fields = {"n0": n0, "n1": n1, "n2": n2}
    room = patterns.stride_room(b)
    for name in ("src", "dst"):
        make = pick.write_strides if name == "dst" else pick.read_strides
        s1, s2 = make((n1, n2), n0, room)
        f |= {f"{name}_s1": s1, f"{name}_s2": s2}
        size = n0 + (n1 - 1) * s1 + (n2 - 1) * s2
        fresh = name == "src" and pick.chance(0.6)
        f |= b.address(name, _data(b, size) if fresh else b.sram(size, read=name == "src"))
    if pick.chance(0.2):  # in place
        for suffix in ("", "_r", "_s1", "_s2"):
            f[f"src{suffix}"] = f[f"dst{suffix}"]
    # Limits and zero points far away leave nothing of what was computed.
    return f | (patterns.clamp(b) if pick.chance(0.2) else {"zp": pick.of(0, -128, 5, -77)})


def _data(b: Builder, size: int) -> int:
    """Load bytes that differ from each other; return where they lie."""
    place = patterns.fetch_blob(b, b.ddr(size, low=True), size)
    if place is None:
        return b.sram(size, read=True)
    b.written(place, size)
    return place


def _unused(b: Builder, name: str, f: Fields) -> None:
    dims = {f"{key}_s{i}": f"n{i}" for key in ("src", "dst") for i in (1, 2)}
    patterns.unused(b, name, f, dims)


def softmax(b: Builder) -> bool:
    """Add the load of a table of exponentials and the `vec_softmax` that uses it."""
    pick, hw = b.pick, b.hardware
    registers = row_table_registers(hw)
    if not hw.vector_rows or registers > hw.vector_registers:
        return False
    mark = len(b.program)
    block = 4 * hw.vector_lanes
    size = registers * block
    place = patterns.fetch_blob(b, catalogue(hw).powers, size)
    if place is None:
        return False
    v = pick.between(0, hw.vector_registers - registers)
    for first in range(0, registers, 16):
        f = {"count": min(16, registers - first), "v": v + first, "bias_only": 1}
        f |= b.address("src", place + first * block, steady=True)
        if not b.add("vec_param", f):
            del b.program[mark:]
            return False
    b.v_written[v : v + registers] = True
    loaded = len(b.program)
    for _ in range(patterns.TRIES):
        del b.program[loaded:]
        f = _shape(b, 40 * hw.vector_lanes)
        f |= {"v_table": v, "shift": pick.of(6, 7, 7, 7, 8, 0, 15, pick.between(0, 15))}
        f["multiplier"] = pick.of(1 << 14, (1 << 15) - 1, pick.between(1 << 14, (1 << 15) - 1))
        _unused(b, "vec_softmax", f)
        if patterns.result(b, "vec_softmax", f):
            return True
    del b.program[mark:]
    return False


def layer_norm(b: Builder) -> bool:
    """Add a `vec_layer_norm` with whatever parameters there are."""
    pick, hw = b.pick, b.hardware
    if not hw.vector_rows:
        return False
    mark = len(b.program)
    for _ in range(patterns.TRIES):
        del b.program[mark:]
        f = _shape(b, 24 * hw.vector_lanes)
        size = row_parameter_bytes(hw, f["n0"])
        f |= b.address("params", _data(b, size) if pick.chance(0.7) else b.sram(size, read=True))
        f["epsilon"] = pick.of(1, 2, 3, pick.between(1, 9999), 1 << pick.between(0, 50), 1 << 50)
        # Parameters of any bits give codes within the limits with shifts of about 24.
        f["shift"] = pick.of(*range(22, 28), *range(22, 28), 31, 12, 1, 0, pick.between(0, 31))
        _unused(b, "vec_layer_norm", f)
        if patterns.result(b, "vec_layer_norm", f):
            return True
    del b.program[mark:]
    return False
