"""Rows on the machine: `vec_softmax` and `vec_layer_norm` in both simulators, limits, estimates."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.sim_programs import full
from tilewright.diagnostics import TilewrightError
from tilewright.sim import vector
from tilewright.sim.cycle import CycleSimulator
from tilewright.sim.state import MachineError, State
from tilewright.spec.hardware import Hardware, load_target, parse_target
from tilewright.spec.limits import violations
from tilewright.spec.program import Instr
from tilewright.spec.timing import LAYER_NORM_WAIT, SOFTMAX_WAIT, vec_cycles

TINY = load_target("tiny8").model_copy(update={"vector_rows": True})
EDGE = load_target("edge16").model_copy(update={"vector_rows": True})
V2 = load_target("tpu_v2").model_copy(update={"vector_rows": True})
CHIPS = (TINY, EDGE, V2)
WORD = 8
BANK = TINY.bank_size


def clamp(value: int, f: dict[str, int]) -> int:
    return min(max(value + f["zp"], f["lo"]), f["hi"])


def reciprocal(m: int, divisor: int) -> int:
    assert 2**31 <= divisor < 2**32
    assert 2**14 <= m <= 2**15
    return min(65535, m * 2**32 // divisor)


def softmax(q: list[int], table: list[int], f: dict[str, int]) -> list[int]:
    """Docs/concepts/numerics.md, "Rows", in Python's integers."""
    powers = [table[max(q) - code] for code in q]
    total = sum(powers)
    k = total.bit_length()
    factor = reciprocal(f["multiplier"], total << 32 - k)
    t = k + f["shift"]
    assert factor < 1 << 16
    return [clamp(((e * factor + (1 << t - 1)) >> t), f) for e in powers]


def layer_norm(q: list[int], g: list[int], b: list[int], f: dict[str, int]) -> list[int]:
    """Likewise."""
    n, s1, s2 = len(q), sum(q), sum(code * code for code in q)
    w = (n * s2 - s1 * s1) * 2**8 + f["epsilon"]
    bits = w.bit_length() + w.bit_length() % 2
    t = (w << 32) >> bits
    d = math.isqrt(t)
    r = reciprocal(1 << 15, d << 16)
    z = [(n * code - s1) * r >> max(0, bits // 2 - 4) for code in q]
    return [clamp((zi * gi + bi) >> f["shift"], f) for zi, gi, bi in zip(z, g, b, strict=True)]


def shape(rows: int, planes: int, n0: int, gap: int, dst: int) -> dict[str, int]:
    s1, s2 = n0 + gap, (n0 + gap) * rows + 3
    return {"dst": dst, "n0": n0, "n1": rows, "n2": planes, "src_s1": s1, "src_s2": s2,
            "dst_s1": n0, "dst_s2": n0 * rows}  # fmt: skip


def rows_of(state: State, f: dict[str, int], name: str) -> list[list[int]]:
    memory = state.sram.view(np.int8)
    starts = [
        f[name] + j * f[f"{name}_s2"] + i * f[f"{name}_s1"]
        for j in range(f["n2"])
        for i in range(f["n1"])
    ]
    return [memory[at : at + f["n0"]].tolist() for at in starts]


def codes(rng: np.random.Generator, size: int) -> np.ndarray:
    low, high = sorted(rng.choice([-128, -127, -20, -1, 0, 1, 30, 127], 2))
    return rng.integers(low, high + 1, size, np.int64).astype(np.int8)


DRAWN = {
    "hardware": st.sampled_from(CHIPS),
    "seed": st.integers(0, 1 << 30),
    "n0": st.integers(1, 70) | st.sampled_from([127, 128, 129, 255, 300]),
    "rows": st.integers(1, 4),
    "planes": st.integers(1, 2),
    "clamps": st.tuples(st.integers(-256, 255), st.integers(-128, 0), st.integers(0, 127)),
}


@settings(max_examples=120, deadline=None)
@given(**DRAWN, scale=st.floats(0.001, 3), shift=st.integers(0, 15), flat=st.booleans())
def test_softmax_is_the_contract(
    hardware: Hardware, seed: int, n0: int, rows: int, planes: int,
    clamps: tuple[int, int, int], scale: float, shift: int, flat: bool,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    state = State(hardware, np.zeros(0, np.uint8))
    f = shape(rows, planes, n0, int(rng.integers(0, 9)), 8192) | {"src": 5}
    f |= {"v_table": 2, "multiplier": int(rng.integers(1 << 14, 1 << 15)), "shift": shift}
    f |= dict(zip(("zp", "lo", "hi"), clamps, strict=True))
    state.sram[:8192] = codes(rng, 8192).view(np.uint8)
    if flat:
        state.sram[:8192] = 7
    table = np.round(65535 * np.exp(-scale * np.arange(256))).astype("<u2")
    if seed % 3 == 0:
        table = rng.integers(1, 1 << 16, 256).astype("<u2")
    state.v[2:].reshape(-1)[:512] = table.view(np.uint8)
    state.v_written[2:] = True
    source = rows_of(state, f, "src")
    vector.ATOMIC["vec_softmax"](state, f)
    expected = [softmax(row, table.tolist(), f) for row in source]
    assert rows_of(state, f, "dst") == expected


@settings(max_examples=120, deadline=None)
@given(**DRAWN, epsilon=st.sampled_from([1, 2, 3, 5, 77, 1 << 20, 1 << 49, 1 << 50]),
       shift=st.integers(1, 31), flat=st.booleans())  # fmt: skip
def test_layer_norm_is_the_contract(
    hardware: Hardware, seed: int, n0: int, rows: int, planes: int,
    clamps: tuple[int, int, int], epsilon: int, shift: int, flat: bool,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    state = State(hardware, np.zeros(0, np.uint8))
    lanes = hardware.vector_lanes
    f = shape(rows, planes, n0, int(rng.integers(0, 9)), 8192) | {"src": 5, "params": 16385}
    f |= {"epsilon": epsilon, "shift": shift}
    f |= dict(zip(("zp", "lo", "hi"), clamps, strict=True))
    state.sram[:8192] = codes(rng, 8192).view(np.uint8)
    if flat:
        state.sram[:8192] = 7
    blocks = -(-n0 // lanes)
    g = rng.integers(-(1 << 15), 1 << 15, (blocks, lanes)).astype("<i2")
    b = rng.integers(-(1 << 31), 1 << 31, (blocks, lanes)).astype("<i4")
    packed = np.concatenate([b.view(np.uint8), g.view(np.uint8)], 1).reshape(-1)
    state.sram[16385 : 16385 + packed.size] = packed
    source = rows_of(state, f, "src")
    vector.ATOMIC["vec_layer_norm"](state, f)
    factors, addends = g.reshape(-1)[:n0].tolist(), b.reshape(-1)[:n0].tolist()
    expected = [layer_norm(row, factors, addends, f) for row in source]
    assert rows_of(state, f, "dst") == expected


def test_the_longest_rows() -> None:
    """16384 equal codes, and half and half: the largest sums there are."""
    chip = V2.model_copy(update={"sram_size": 1 << 20})
    lanes, n0 = chip.vector_lanes, 16384
    state = State(chip, np.zeros(0, np.uint8))
    state.v_written[:] = True
    table = np.full(256, 65535, "<u2")
    state.v[0] = table.view(np.uint8)
    b, g = np.full(n0, -(1 << 31), "<i4"), np.full(n0, -(1 << 15), "<i2")
    packed = (b.view(np.uint8).reshape(-1, 4 * lanes), g.view(np.uint8).reshape(-1, 2 * lanes))
    state.sram[1 << 17 : (1 << 17) + 6 * n0] = np.concatenate(packed, 1).reshape(-1)
    for content in ([0x80], [0x80, 0x7F]):
        state.sram[:n0] = np.tile(np.array(content, np.uint8), n0 // len(content))
        row = state.sram[:n0].view(np.int8).tolist()
        f = full("vec_softmax", n0=n0, dst=32768, multiplier=(1 << 15) - 1)
        vector.ATOMIC["vec_softmax"](state, f)
        assert rows_of(state, f, "dst")[0] == softmax(row, table.tolist(), f)
        for epsilon in (1, 1 << 50):
            f = full("vec_layer_norm", n0=n0, dst=32768, params=1 << 17, epsilon=epsilon, shift=31)
            vector.ATOMIC["vec_layer_norm"](state, f)
            assert rows_of(state, f, "dst")[0] == layer_norm(row, g.tolist(), b.tolist(), f)


def test_in_place() -> None:
    state = State(TINY, np.zeros(0, np.uint8))
    rng = np.random.default_rng(1)
    state.v_written[:] = True
    table = rng.integers(1, 1 << 16, 256).astype("<u2")
    state.v[:16].reshape(-1)[:] = table.view(np.uint8)
    state.sram[:] = codes(rng, state.sram.size).view(np.uint8)
    f = full("vec_softmax", n0=13, n1=5, src_s1=14, dst_s1=14, src=3, dst=3)
    source = rows_of(state, f, "src")
    vector.ATOMIC["vec_softmax"](state, f)
    assert rows_of(state, f, "dst") == [softmax(row, table.tolist(), f) for row in source]
    assert not list(violations(TINY, "vec_softmax", f))


def test_softmax_refuses_a_table_that_begins_with_zero() -> None:
    state = State(TINY, np.zeros(0, np.uint8))
    state.v_written[:] = True
    with pytest.raises(MachineError, match="entry 0 of the table"):
        vector.ATOMIC["vec_softmax"](state, full("vec_softmax", dst=64))


@pytest.mark.parametrize(
    ("hardware", "name", "fields", "message"),
    [
        (load_target("tiny8").model_copy(update={"vector_rows": False}), "vec_softmax", {},
         "vec_softmax must not be used"),
        (TINY, "vec_softmax", {"multiplier": 16383}, "multiplier must be 16384..32767, not 16383"),
        (TINY, "vec_softmax", {"v_table": 17}, "V17..V32 must lie in V0..V31"),
        (TINY, "vec_softmax", {"lo": 3, "hi": 2}, "lo must be at most hi (2), not 3"),
        (TINY, "vec_layer_norm", {"epsilon": 0}, "epsilon must be 1..2^50, not 0"),
        (TINY, "vec_layer_norm", {"epsilon": (1 << 50) + 1}, "epsilon must be 1..2^50"),
        (TINY, "vec_layer_norm", {"params": 32768 - 95, "n0": 9}, "params: bytes 0x7fa1..0x8000"),
        (TINY, "vec_layer_norm", {"params": 4050}, "dst (0x1000) must not overlap params"),
        (TINY, "vec_softmax", {"n0": 9, "n1": 2, "dst_s1": 8}, "must not overlap each other"),
        (TINY, "vec_softmax", {"n0": 9, "src": 4090}, "dst (0x1000) must not overlap src (0xffa)"),
    ],
)  # fmt: skip
def test_limits(hardware: Hardware, name: str, fields: dict[str, int], message: str) -> None:
    f = full(name, **{"dst": 4096, "params": 8192, **fields} if "norm" in name else
             {"dst": 4096, **fields})  # fmt: skip
    found = [rule.message for rule in violations(hardware, name, f)]
    assert any(message in text for text in found), found


def test_a_target_with_rows_has_registers_for_the_table() -> None:
    text = TINY.to_yaml()
    assert parse_target(text).vector_rows
    wrong = text.replace("vector_registers: 32", "vector_registers: 17")
    with pytest.raises(TilewrightError) as caught:
        parse_target(wrong)
    assert "vector_registers must be 18 or more with vector_rows, not 17" in caught.value.details[0]


# Cycles.


def touched(address: int, size: int, word: int) -> int:
    return (address + size - 1) // word - address // word + 1


def plain_walk(hardware: Hardware, name: str, f: dict[str, int]) -> int:
    """Cycles from start to end when no port is ever refused, as microarchitecture.md says."""
    lanes, word, latency = hardware.vector_lanes, hardware.sram_word_bytes, hardware.vector_latency
    passes, wait = (3, SOFTMAX_WAIT) if name == "vec_softmax" else (2, LAYER_NORM_WAIT)
    free = 1
    """Cycle, counted from the start, in which the reader may begin its next vector."""
    retired: list[int] = []
    for plane in range(f["n2"]):
        for row in range(f["n1"]):
            src = f["src"] + plane * f["src_s2"] + row * f["src_s1"]
            dst = f["dst"] + plane * f["dst_s2"] + row * f["dst_s1"]
            for number in range(passes):
                last = number == passes - 1
                for at in range(0, f["n0"], lanes):
                    count = min(lanes, f["n0"] - at)
                    begin = free
                    if len(retired) >= latency + 3:
                        begin = max(begin, retired[-latency - 3] + 1)
                    if number and not at:
                        begin = max(begin, retired[-1] + 1 + (wait if last else 0))
                    reads = touched(src + at, count, word)
                    if last and name == "vec_layer_norm":
                        block = 6 * lanes
                        own = f["params"] + at // lanes * block
                        reads = max(reads, touched(own, block, word))
                    free = begin + reads
                    ready = free + latency
                    if retired:
                        ready = max(ready, retired[-1] + 1)
                    writes = touched(dst + at, count, word) if last else 1
                    retired.append(ready + writes - 1)
    return retired[-1] + 1


@settings(max_examples=80, deadline=None)
@given(
    hardware=st.sampled_from([*CHIPS, TINY.model_copy(update={"vector_latency": 1}),
                              TINY.model_copy(update={"sram_word_bytes": 4})]),
    name=st.sampled_from(["vec_softmax", "vec_layer_norm"]),
    n0=st.integers(1, 60) | st.integers(100, 300), rows=st.integers(1, 4),
    planes=st.integers(1, 2), gap=st.integers(0, 9), at=st.tuples(*[st.integers(0, 20)] * 3),
    skip=st.booleans(),
)  # fmt: skip
def test_cycles_are_the_contract(
    hardware: Hardware, name: str, n0: int, rows: int, planes: int, gap: int,
    at: tuple[int, int, int], skip: bool,
) -> None:  # fmt: skip
    bank = hardware.bank_size
    f = shape(rows, planes, n0, gap, bank + at[1]) | {"src": at[0]}
    if name == "vec_layer_norm":
        f["params"] = 2 * bank + at[2]
    program = [Instr("fence"), Instr(name, f, "x"), Instr("halt")]
    result = CycleSimulator(hardware, skip_ahead=skip).run(program)
    start, end = int(result.log.start[1]), int(result.log.end[1])
    assert end - start == plain_walk(hardware, name, full(name, **f))
    assert result.engines["vec"]["busy"] == end - start - 1


@pytest.mark.parametrize("name", ["vec_softmax", "vec_layer_norm"])
@pytest.mark.parametrize("n0", [8, 20, 64])
def test_estimates_are_near(name: str, n0: int) -> None:
    f = full(name, n0=n0, n1=6, src_s1=64, dst_s1=64, dst=BANK)
    if name == "vec_layer_norm":
        f["params"] = 2 * BANK
    exact = plain_walk(TINY, name, f)
    assert abs(vec_cycles(TINY, name, f) - exact) <= 0.03 * exact


def test_a_program_without_the_field_is_refused() -> None:
    plain = load_target("tiny8").model_copy(update={"vector_rows": False})
    with pytest.raises(TilewrightError, match=re.escape("vec_softmax must not be used")):
        CycleSimulator(plain).run([Instr("vec_softmax", {"dst": 64}, "s"), Instr("halt")])
