"""Random programs of the vector unit alone: every instruction and field, with what memory becomes.

The simulator's functions say what is computed; instructions they or the chip's limits refuse are
drawn again.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.rtl.vec import contract
from tilewright.sim import vector
from tilewright.sim.mac import columns
from tilewright.sim.state import MachineError, PushGroup, State
from tilewright.spec.hardware import Hardware
from tilewright.spec.isa import BY_NAME, IllegalInstructionError, Kind, encode
from tilewright.spec.limits import violations

Fields = dict[str, int]
Array = npt.NDArray[np.uint8]
KINDS = ("param", "table", "drain", "eltwise", "copy", "pool", "resize")
ROW_KINDS = ("softmax", "layer_norm")
"""Of chips that have them."""


@dataclass
class Block:
    """A block of accumulators a drain reads."""

    half: int
    gap: int
    """Cycles from its half's being free to its being full."""
    rows: npt.NDArray[np.int32]


@dataclass
class Scenario:
    """What the bench runs, and what must come of it."""

    hardware: Hardware
    memory: Array
    refused: bytes
    """Ports (1 A, 2 B, 4 write) refused in cycle t: element t modulo the length."""
    names: list[str] = field(default_factory=list[str])
    words: list[bytes] = field(default_factory=list[bytes])
    timed: list[contract.Timed] = field(default_factory=list[contract.Timed])
    pokes: list[tuple[int, int, bytes]] = field(default_factory=list[tuple[int, int, bytes]])
    """(instruction, address, bytes): memory changed in the cycle of its pop."""
    blocks: list[Block] = field(default_factory=list[Block])
    after: list[Array] = field(default_factory=list[Array])
    """Memory when each instruction has ended."""

    def write(self, path: Path, *, fault: int, limit: int) -> None:
        """Write the file the bench reads."""
        hardware = self.hardware
        lanes, rows = hardware.vector_lanes, hardware.accumulator_rows
        numbers = (hardware.sram_word_bytes, lanes, rows, fault, limit, self.memory.size)
        parts = [struct.pack("<6q", *numbers), self.memory.tobytes()]
        parts.append(struct.pack("<q", len(self.words)))
        for item, word in zip(self.timed, self.words, strict=True):
            parts += [struct.pack("<q", item.hold), word]
        parts.append(struct.pack("<q", len(self.pokes)))
        for number, address, data in self.pokes:
            parts += [struct.pack("<3q", number, address, len(data)), data]
        parts += [struct.pack("<q", len(self.refused)), self.refused]
        parts.append(struct.pack("<q", len(self.blocks)))
        parts += [struct.pack("<2q", block.half, block.gap) for block in self.blocks]
        for block in self.blocks:
            whole = np.full((rows, lanes), 0x12345678, np.int32)
            whole[: block.rows.shape[0], : block.rows.shape[1]] = block.rows
            parts.append(whole.tobytes())
        path.write_bytes(b"".join(parts))

    def expected(self) -> list[contract.Event]:
        """Return the events the contract wants."""
        gaps = ([b.gap for b in self.blocks if not b.half], [b.gap for b in self.blocks if b.half])
        hardware = self.hardware
        return contract.trace(
            self.timed, hardware.sram_word_bytes, hardware.vector_latency, self.refused,
            contract.Halves(gaps),
        )  # fmt: skip


class Builder:
    """Draws a scenario, instruction by instruction."""

    def __init__(self, hardware: Hardware, seed: int, refusal: float) -> None:
        self.hardware = hardware
        self.rng = np.random.default_rng(seed)
        self.state = State(hardware, np.zeros(0, np.uint8))
        self.state.sram[:] = self.rng.integers(0, 256, hardware.sram_size, np.uint8)
        refused = self.rng.random((1009, 3)) < refusal
        pattern = (refused @ np.array([1, 2, 4])).astype(np.uint8)
        pattern[0] = 0
        self.scenario = Scenario(hardware, self.state.sram.copy(), pattern.tobytes())
        self.entries = hardware.quant_banks * hardware.quant_bank_entries
        self.tables: list[int] = []
        self.acc: npt.NDArray[np.int32] | None = None
        self.pokes: list[tuple[int, bytes]] = []

    def pick(self, *options: int) -> int:
        return int(self.rng.choice(options))

    def below(self, count: int) -> int:
        return int(self.rng.integers(0, count))

    def fill(self) -> None:
        """Write every parameter entry and V register once, and a table."""
        registers = self.hardware.vector_registers
        per_bank = self.hardware.quant_bank_entries
        for first in range(0, self.entries, per_bank):
            start = first
            while start < first + per_bank:
                fits = self.hardware.sram_size // (9 * self.hardware.vector_lanes)
                count = min(4, first + per_bank - start, registers, fits)
                v = self.below(registers - count + 1)
                self.param({"param": start, "count": count, "v": v, "bias_only": 0})
                start += count
        for v in range(registers):
            self.param({"v": v, "count": 1, "bias_only": 1, "param": 0})
        self.add("vec_table", self.table())

    def draw(self, kind: str) -> None:
        """Add a random instruction of a kind."""
        for _ in range(2000):
            self.pokes = []
            self.acc = None
            if kind == "param":
                count = 1 + self.below(4)
                f = {
                    "param": self.below(self.entries), "count": count, "bias_only": self.below(2),
                    "v": self.below(max(1, self.hardware.vector_registers - count + 1)),
                }  # fmt: skip
                f = self.param_fields(f)
            else:
                f: Fields = getattr(self, kind)()
            if self.add("vec_" + kind, f):
                return
        raise AssertionError(f"no legal vec_{kind} in 2000 tries")

    def add(self, name: str, f: Fields) -> bool:
        """Append an instruction if it is legal; return whether it was."""
        instruction = BY_NAME[name]
        full = {field.name: f.get(field.name, field.default) for field in instruction.fields}
        full["signal"] = self.below(1 << 31)
        # What the unit does not read (registers, clamps of fp16) must not matter.
        for item in instruction.fields:
            if item.kind is Kind.R:
                full[item.name] = self.below(32)
        try:
            word = encode(name, full)
        except IllegalInstructionError:
            return False
        if next(violations(self.hardware, name, full), None) is not None:
            return False
        before = self.state.sram.copy()
        for address, data in self.pokes:
            if address + len(data) > before.size:
                self.state.sram[:] = before
                return False
            self.state.sram[address : address + len(data)] = np.frombuffer(data, np.uint8)
        source = self.state.sram.copy()
        try:
            if name == "vec_drain":
                assert self.acc is not None
                group = PushGroup({**full, "dtype": 0}, self.acc)
                vector.drain(self.state, full, group, 0, full["oc_blocks"], 0, full["out_h"])
            else:
                vector.ATOMIC[name](self.state, full)
        except MachineError:
            self.state.sram[:] = before
            return False
        scenario = self.scenario
        number = len(scenario.words)
        scenario.pokes += [(number, address, data) for address, data in self.pokes]
        if name == "vec_drain":
            self._blocks(full)
        scenario.names.append(name)
        scenario.words.append(word)
        lanes = self.hardware.vector_lanes
        vectors = list(contract.vectors(name, full, lanes, source))
        hold = self.pick(0, 0, 0, 1, 5, 40)
        scenario.timed.append(contract.Timed(vectors, hold, full["signal"]))
        scenario.after.append(self.state.sram.copy())
        self.pokes = []
        return True

    def _blocks(self, f: Fields) -> None:
        assert self.acc is not None
        half = f["m_half"]
        slow = self.pick(0, 1, 30)
        for ob in range(f["oc_blocks"]):
            left = ob * f["cols"]
            for row in range(0, f["out_h"], f["block_rows"]):
                end = min(row + f["block_rows"], f["out_h"])
                rows = self.acc[row * f["out_w"] : end * f["out_w"]]
                block = Block(half, self.below(slow + 1), rows[:, left : left + columns(f, ob, 1)])
                self.scenario.blocks.append(block)
                half ^= 1

    # Operands.

    def place(self, size: int) -> int:
        """Return an address; often aligned, sometimes the memory's very end."""
        last = self.hardware.sram_size - size
        if last < 0:
            return 0
        align = self.pick(1, 1, 2, self.hardware.sram_word_bytes)
        return last if self.below(12) == 0 else self.below(last + 1) // align * align

    def nest(self, run: int, counts: list[int], *, source: bool) -> tuple[list[int], int]:
        """Return strides of nested dimensions in a random order, and their span.

        A result's never overlap; a source's may, and may be zero.
        """
        strides = [0] * len(counts)
        span = run
        for axis in self.rng.permutation(len(counts)):
            stride = span + self.pick(0, 0, 1, 5, self.hardware.sram_word_bytes)
            if source and self.below(4) == 0:
                stride = self.pick(0, 1, stride // 2)
            if self.below(4) == 0:
                word = self.hardware.sram_word_bytes
                stride = -(-stride // word) * word
            strides[axis] = stride
            span += stride * (counts[axis] - 1)
        return strides, span

    def channels(self) -> int:
        lanes = self.hardware.vector_lanes
        return self.pick(1, 2, lanes - 1, lanes, lanes + 1, 2 * lanes, 1 + self.below(3 * lanes))

    def scale(self, ideal: int) -> Fields:
        """Return the fields of a requantisation.

        Args:
            ideal: bits a value should lose, for results that are mostly within the limits; every
                third has any entry, bias and zero point.
        """
        lo = self.pick(-128, -127, 0, self.below(256) - 128)
        f = {
            "za": self.code(), "zb": self.code(), "lo": lo,
            "hi": max(lo, self.pick(127, 127, self.below(256) - 128)),
        }  # fmt: skip
        if self.below(3) == 0:
            return f | {
                "param": self.below(self.entries),
                "bias": self.pick(0, -512, 511, self.below(1024) - 512),
                "bias_shift": self.pick(0, 1, self.below(16), self.below(54), self.below(64)),
                "zp": self.pick(-256, 255, self.below(512) - 256),
            }  # fmt: skip
        lost = self.state.shift[:, 0] - np.log2(np.maximum(self.state.multiplier[:, 0], 1))
        near = np.argsort(np.abs(lost - ideal))[:4]
        entry = int(near[self.below(len(near))])
        shift = int(self.state.shift[entry, 0])
        return f | {
            "param": entry,
            "bias": self.pick(0, 1, -1, self.below(200) - 100),
            "bias_shift": max(0, shift - self.pick(0, 1, 2, 5)),
            "zp": self.pick(0, 0, 3, -128, self.below(100) - 50),
        }  # fmt: skip

    def code(self) -> int:
        return self.pick(0, -128, 127, self.below(256) - 128)

    def only(self, name: str, f: Fields) -> Fields:
        """Return the fields that the instruction has."""
        return {key: value for key, value in f.items() if key in BY_NAME[name].field}

    # Instructions.

    def param_fields(self, f: Fields) -> Fields:
        """Put random blocks into memory; return the fields with their address."""
        lanes = self.hardware.vector_lanes
        data = b""
        for _ in range(f["count"]):
            bits = self.pick(1, 3, 6, 12, 20, 31)
            bias = self.rng.integers(-(1 << bits), 1 << bits, lanes)
            extreme = self.rng.random(lanes) < self.pick(0, 0, 1) * 0.2
            bias[extreme] = self.rng.choice([-(1 << 31), (1 << 31) - 1, 0], int(extreme.sum()))
            data += bias.astype("<i4").tobytes()
            if f["bias_only"]:
                continue
            multiplier, shift = self._factors(lanes)
            data += multiplier.astype("<u4").tobytes() + shift.astype(np.uint8).tobytes()
        address = self.place(len(data))
        self.pokes.append((address, data))
        return {**f, "src": address}

    def _factors(self, lanes: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return multipliers and shifts: ties, extremes, and what networks have."""
        kind = self.below(5)
        if kind == 0:  # ties
            return self.rng.integers(1, 4, lanes), self.rng.integers(0, 6, lanes)
        if kind == 1:  # any
            return self.rng.integers(0, 1 << 31, lanes), self.rng.integers(0, 63, lanes)
        if kind == 2:
            largest = np.full(lanes, (1 << 31) - 1, np.int64)
            return largest, self.rng.choice([62, 62, 61, 31, 32, 0], lanes)
        multiplier = self.rng.integers(1 << 30, 1 << 31, lanes)
        if kind == 3:  # powers of two: ties of large sums
            multiplier = np.full(lanes, 1 << self.below(31), np.int64)
        shift = np.log2(multiplier).astype(np.int64) + self.rng.integers(
            -2, self.pick(4, 24), lanes
        )
        return multiplier, np.clip(shift, 0, 62)

    def param(self, f: Fields) -> None:
        self.pokes = []
        assert self.add("vec_param", self.param_fields(f)), f

    def entry(self, number: int, v: int, bias: int, multiplier: int, shift: int) -> None:
        """Load a parameter entry and a bias, the same in all lanes."""
        lanes = self.hardware.vector_lanes
        block = struct.pack("<i", bias) * lanes + struct.pack("<I", multiplier) * lanes
        self.pokes = [(self.place(9 * lanes), block + bytes([shift]) * lanes)]
        f = {"src": self.pokes[0][0], "param": number, "count": 1, "v": v, "bias_only": 0}
        assert self.add("vec_param", f), f

    def drain_of(self, values: list[int], **f: int) -> None:
        """Drain given accumulators, a pixel and a lane after another."""
        lanes = self.hardware.vector_lanes
        values = values + values[: -len(values) % lanes]
        pixels = len(values) // lanes
        size = 4 * lanes if f.get("raw") else lanes
        self.acc = np.array(values, np.int64).astype(np.int32).reshape(pixels, lanes)
        self.pokes = []
        fields = {
            "dst": self.place(size * pixels), "out_h": pixels, "out_w": 1, "block_rows": 1,
            "oc_blocks": 1, "cols": lanes, "cols_last": lanes, "oy_stride": size, **f,
        }  # fmt: skip
        assert self.add("vec_drain", fields), fields

    def every_code(self, **f: int) -> None:
        """Copy all 256 codes."""
        self.pokes = [(0, bytes(range(256)))]
        fields = {"src": 0, "src_s0": 1, "dst": 256, "dst_s0": 1, "n0": 256, **f}
        assert self.add("vec_copy", fields), fields

    def table(self) -> Fields:
        self.pokes = []
        registers = -(-256 // (4 * self.hardware.vector_lanes))
        v = self.below(self.hardware.vector_registers - registers + 1)
        address = self.place(256)
        self.pokes.append((address, self.rng.integers(0, 256, 256, np.uint8).tobytes()))
        return {"src": address, "v": v}

    def v_table(self) -> int:
        registers = -(-256 // (4 * self.hardware.vector_lanes))
        return self.below(self.hardware.vector_registers - registers + 1)

    def drain(self) -> Fields:
        lanes, rows = self.hardware.vector_lanes, self.hardware.accumulator_rows
        out_w = 1 + self.below(min(rows, self.pick(1, 4, 12)))
        block_rows = 1 + self.below(min(4, rows // out_w))
        out_h = 1 + self.below(6)
        oc_blocks = self.pick(1, 1, 2, 3)
        cols, cols_last = (self.pick(1, lanes, lanes, 1 + self.below(lanes)) for _ in range(2))
        raw = int(self.below(4) == 0)
        run = max(cols if oc_blocks > 1 else 1, cols_last) * (4 if raw else 1)
        strides, span = self.nest(run, [out_h, out_w, oc_blocks], source=False)
        shape = (out_h * out_w, (oc_blocks - 1) * cols + cols_last)
        bits = self.pick(3, 6, 8, 12, 20, 31)
        self.acc = self.rng.integers(-(1 << bits), 1 << bits, shape).astype(np.int32)
        extreme = self.rng.random(shape) < self.pick(0, 1) * 0.1
        low, high = -(1 << 31), (1 << 31) - 1
        values = self.rng.choice(np.array([low, high, low + 1, 0, -1]), shape)
        self.acc[extreme] = values.astype(np.int32)[extreme]
        f = self.scale(8)
        v = self.below(max(1, self.hardware.vector_registers - oc_blocks + 1))
        if self.below(2) and f["param"] + oc_blocks <= self.entries:
            self._aim(f["param"], v, oc_blocks, cols)
        return self.only("vec_drain", {
            **f, "raw": raw, "use_table": int(self.below(3) == 0),
            "m_half": self.below(2), "dst": self.place(span), "out_h": out_h, "out_w": out_w,
            "block_rows": block_rows, "oc_blocks": oc_blocks, "cols": cols,
            "cols_last": cols_last, "oy_stride": strides[0], "ox_stride": strides[1],
            "ob_stride": strides[2], "v": v, "v_table": self.v_table(),
        })  # fmt: skip

    def _aim(self, param: int, v: int, blocks: int, cols: int) -> None:
        """Choose accumulators whose results are codes and halves between them."""
        assert self.acc is not None
        for column in range(self.acc.shape[1]):
            ob = min(column // cols, blocks - 1)
            lane = column - ob * cols
            multiplier = max(1, int(self.state.multiplier[param + ob, lane]))
            shift = int(self.state.shift[param + ob, lane])
            bias = int(self.state.v[v + ob].view("<i4")[lane])
            for pixel in range(self.acc.shape[0]):
                doubled = self.below(600) - 300
                total = ((doubled << shift) // (2 * multiplier) - bias) & 0xFFFFFFFF
                self.acc[pixel, column] = total - (total >> 31 << 32)

    def eltwise(self) -> Fields:
        n0, n1, n2 = self.channels(), 1 + self.below(4), 1 + self.below(3)
        op = self.below(5)
        f = {**self.scale(8 if op == 2 else 1), "op": op, "b_scalar": self.below(2)}
        f |= {"n0": n0, "n1": n1, "n2": n2}
        for name in ("a", "b", "dst"):
            strides, span = self.nest(n0, [n1, n2], source=name != "dst")
            f |= {name: self.place(span), f"{name}_s1": strides[0], f"{name}_s2": strides[1]}
        if self.below(4) == 0:  # in place
            f |= {"a": f["dst"], "a_s1": f["dst_s1"], "a_s2": f["dst_s2"]}
        return f

    def copy(self) -> Fields:
        counts = [1 + self.below(3) for _ in range(3)]
        dense = self.below(2)
        n0 = self.channels() if dense else self.pick(1, 2, 5)
        f = {
            **self.scale(0), "requantise": self.below(2), "use_table": int(self.below(3) == 0),
            "n0": n0, "n1": counts[0], "n2": counts[1], "n3": counts[2],
            "v_table": self.v_table(),
        }  # fmt: skip
        for name in ("src", "dst"):
            if dense:
                strides, span = self.nest(n0, counts, source=name == "src")
                strides = [1, *strides]
            else:
                strides, span = self.nest(1, [n0, *counts], source=name == "src")
            f[name] = self.place(span)
            f |= {f"{name}_s{i}": stride for i, stride in enumerate(strides)}
        if self.below(4) == 0:  # in place
            f |= {"src": f["dst"]} | {f"src_s{i}": f[f"dst_s{i}"] for i in range(4)}
        return self.only("vec_copy", f)

    def pool(self) -> Fields:
        n0, out_h, out_w = self.channels(), 1 + self.below(3), 1 + self.below(4)
        k_h, k_w = self.pick(1, 2, 3), self.pick(1, 2, 3)
        source, size = self.nest(n0, [out_h, out_w, k_h, k_w], source=True)
        result, span = self.nest(n0, [out_h, out_w], source=False)
        return {
            "src": self.place(size), "dst": self.place(span), "n0": n0, "out_h": out_h,
            "out_w": out_w, "k_h": k_h, "k_w": k_w, "src_sy": source[0], "src_sx": source[1],
            "ky_stride": source[2], "kx_stride": source[3], "dst_sy": result[0],
            "dst_sx": result[1],
        }  # fmt: skip

    def resize(self) -> Fields:
        n0, out_h, out_w = self.channels(), 1 + self.below(3), 1 + self.below(4)
        in_h, in_w = 1 + self.below(4), 1 + self.below(4)
        source, size = self.nest(n0, [in_h, in_w], source=True)
        result, span = self.nest(n0, [out_h, out_w], source=False)
        f = {
            **self.scale(22), "src": self.place(size), "dst": self.place(span), "n0": n0,
            "out_h": out_h, "out_w": out_w, "in_h": in_h, "in_w": in_w, "src_sy": source[0],
            "src_sx": source[1], "dst_sy": result[0], "dst_sx": result[1],
        }  # fmt: skip
        extreme = self.below(5) == 0
        for name, count, limit in (("table_y", out_h, in_h), ("table_x", out_w, in_w)):
            entries = np.zeros((count, 4), "<i2")
            entries[:, :2] = self.rng.integers(0, limit, (count, 2))
            entries[:, 2] = self.rng.integers(0, 2049, count)
            entries[:, 3] = 2048 - entries[:, 2]
            if extreme:
                entries[:, 2:] = self.rng.choice([-32768, 32767, 0, 1, -1], (count, 2))
            f[name] = self.place(8 * count)
            self.pokes.append((f[name], entries.tobytes()))
        return self.only("vec_resize", f)

    def powers(self, v: int, content: npt.NDArray[np.uint16]) -> None:
        """Load a table of 256 entries for softmax into V registers from `v` on."""
        size = 4 * self.hardware.vector_lanes
        data = content.astype("<u2").tobytes()
        data += b"\xff" * (-len(data) % size)
        for at in range(0, len(data), 16 * size):
            part = data[at : at + 16 * size]
            self.pokes = [(self.place(len(part)), part)]
            f = {"src": self.pokes[0][0], "count": len(part) // size, "v": v + at // size}
            assert self.add("vec_param", f | {"bias_only": 1, "param": 0}), f

    def rows(self) -> Fields:
        """Return what both instructions of rows share."""
        n0, n1, n2 = self.channels(), 1 + self.below(4), 1 + self.below(2)
        if self.below(6) == 0:
            n0 = 1 + self.below(200)
        lo = self.pick(-128, -127, 0, self.below(256) - 128)
        f = {"n0": n0, "n1": n1, "n2": n2, "lo": lo, "hi": max(lo, self.pick(127, 127, 100))}
        f["zp"] = self.pick(-128, -128, 0, -256, 255, self.below(200) - 100)
        for name in ("src", "dst"):
            strides, span = self.nest(n0, [n1, n2], source=name == "src")
            f |= {name: self.place(span), f"{name}_s1": strides[0], f"{name}_s2": strides[1]}
        if self.below(4) == 0:  # in place
            f |= {"src": f["dst"], "src_s1": f["dst_s1"], "src_s2": f["dst_s2"]}
        # Codes of all kinds of rows: far apart, near each other, all the same.
        spread = self.pick(1, 3, 40, 256)
        low = self.below(257 - spread)
        size = min(n0, 64)
        data = (self.rng.integers(low, low + spread, size) - 128).astype(np.int8).tobytes()
        self.pokes = [(f["src"], data)]
        return f

    def softmax(self) -> Fields:
        registers = -(-512 // (4 * self.hardware.vector_lanes))
        v = self.below(self.hardware.vector_registers - registers + 1)
        kind = self.below(4)
        if kind < 2:
            scale = float(self.rng.choice([0.003, 0.05, 0.3, 2.0]))
            self.powers(v, np.round(65535 * np.exp(-scale * np.arange(256))).astype(np.uint16))
        elif kind == 2:
            self.powers(v, np.full(256, self.pick(1, 2, 65535), np.uint16))
        f = self.rows()
        multiplier = self.pick(1 << 14, (1 << 15) - 1, (1 << 14) + self.below(1 << 14))
        return f | {"v_table": v, "multiplier": multiplier, "shift": self.pick(0, 7, 7, 8, 15)}

    def layer_norm(self) -> Fields:
        f = self.rows()
        lanes = self.hardware.vector_lanes
        blocks = -(-f["n0"] // lanes)
        shift = self.pick(1, 12, 20, 26, 31)
        bits = self.pick(3, 15, max(1, shift - 12))
        g = self.rng.integers(-(1 << min(bits, 15)), 1 << min(bits, 15), (blocks, lanes))
        g[self.rng.random(g.shape) < 0.05] = -(1 << 15)
        wide = min(31, shift + self.pick(0, 5, 31))
        b = self.rng.integers(-(1 << wide), 1 << wide, g.shape)
        parts = (b.astype("<i4").view(np.uint8), g.astype("<i2").view(np.uint8))
        data = np.concatenate(parts, 1).tobytes()
        f["params"] = self.place(len(data))
        self.pokes.append((f["params"], data))
        epsilon = self.pick(1, 2, 1 << self.below(51), 1 + self.below(1 << 20), 1 << 50)
        return f | {"shift": shift, "epsilon": epsilon}


def random_scenario(hardware: Hardware, seed: int, count: int, refusal: float) -> Scenario:
    """Return a program of `count` random instructions behind those that fill the registers.

    Args:
        hardware: the chip.
        seed: of everything drawn.
        count: instructions of all kinds, in turn but shuffled.
        refusal: how often a port is refused.
    """
    builder = Builder(hardware, seed, refusal)
    builder.fill()
    every = (*KINDS, *(ROW_KINDS if hardware.vector_rows else ()))
    kinds = [every[i % len(every)] for i in range(count)]
    builder.rng.shuffle(kinds)
    for kind in kinds:
        builder.draw(kind)
    return builder.scenario
