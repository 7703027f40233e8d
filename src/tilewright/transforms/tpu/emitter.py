"""The program being written: instructions, constants, and what the vector unit's registers hold."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tilewright.diagnostics import TilewrightError
from tilewright.ir.weights import WeightStore
from tilewright.schedule.footprint import parameter_bytes, table_registers
from tilewright.spec.hardware import Hardware
from tilewright.spec.isa import BY_NAME
from tilewright.spec.limits import row_table_registers
from tilewright.transforms.tpu.constants import ConstantSegment, pack_clamp, pack_scalars
from tilewright.transforms.tpu.cut_rows import cut_rows
from tilewright.transforms.tpu.instruction import Instr, Region
from tilewright.transforms.tpu.parameter_banks import ParameterBanks, Policy
from tilewright.transforms.tpu.views import (
    DdrBuffer,
    Loop,
    Tile,
    View,
    dense_strides,
    fit_loops,
    merge_loops,
    tile_address,
    tile_strides,
)

CONSTANTS_R, WORKSPACE_R = 1, 2
"""R registers with the bases of the two DDR segments (docs/concepts/machine.md)."""

_DMA_LIMITS = (1 << 12, 1 << 14, 1 << 14)
_RUN_LIMIT = 1 << 20
WANT = "want_"
"""Put before a field's name: where the constants lie that the field must name (`Instr.wants`)."""


class Emitter:
    """Appends instructions to a program; one method a kind of transfer.

    Entries of the parameter banks are given out by `ParameterBanks`. The vector unit's queue is in
    order, so an entry can be rewritten as soon as the instructions that read it are issued. What
    every instruction must find in registers goes into its `wants`.
    """

    def __init__(
        self,
        hardware: Hardware,
        weights: WeightStore,
        constants: ConstantSegment,
        policy: Policy = "shared",
    ) -> None:
        self.hardware = hardware
        self.weights = weights
        self.constants = constants
        self.program: list[Instr] = []
        self.layer = ""
        self.written: dict[str, int] = {}
        """Position in the program of the last store to every DDR tensor."""
        self.half = 0
        """Half of the M registers the next pushing `mac_conv` starts with."""
        self.banks = ParameterBanks(hardware, policy)
        self.blocks = self.banks.blocks
        self._table: object = None
        self._row_table: object = None
        self._clamps: dict[tuple[float, float], int] = {}
        self._clamp_places: dict[tuple[float, float], int] = {}
        self._clamp_next = 0
        last = hardware.dma_channels - 1
        self.channel_input = 0
        self.channel_weights = 1 if last >= 2 else 0
        self.channel_second = 2 if last >= 3 else self.channel_weights
        self.channel_store = last

    def add(
        self, name: str, reads: Sequence[Region] = (), writes: Sequence[Region] = (), **fields: int
    ) -> Instr:
        """Append an instruction for the current layer; fields with `WANT` become its `wants`."""
        wants = {key.removeprefix(WANT): fields.pop(key) for key in list(fields) if WANT in key}
        instr = Instr(name, fields, self.layer, list(reads), list(writes), wants)
        if name in ("vec_param", "vec_table"):
            # It may take registers that a softmax's table lay in; that is rare and loaded again.
            self._row_table = None
        self.program.append(instr)
        return instr

    def cut(self) -> None:
        """Cut what is written by rows (`cut_rows`), once the program is complete."""
        stores = {name: self.program[position] for name, position in self.written.items()}
        self.program = cut_rows(self.program, self.hardware)
        places = {id(instr): position for position, instr in enumerate(self.program)}
        self.written = {name: places[id(instr)] for name, instr in stores.items()}

    # -- DDR <-> SRAM ---------------------------------------------------------------------------

    def load(self, source: View, target: View, channel: int) -> None:
        """Copy a DDR view into an SRAM tile view, padding what the tile's pending fill covers."""
        tile = target.buffer
        assert isinstance(tile, Tile)
        if 0 in target.sizes:
            # The tile lies wholly in padding.
            if tile.fill is not None:
                self.fill(*tile.fill)
                tile.fill = None
            return
        pads, base, fill = (0, 0, 0, 0), target, 0
        if tile.fill is not None:
            filled, fill = tile.fill
            tile.fill = None
            pads = self._pads(filled, target)
            if max(pads) > 255:
                self.fill(filled, fill)
                pads = (0, 0, 0, 0)
            elif any(pads):
                base = filled
                pixel = tile.shape[-1] * tile.item_bytes
                if tile.pitch == pixel < self.hardware.sram_word_bytes:
                    # Rows are whole runs, not one a short pixel, if their sides are filled apart.
                    base = self._fill_sides(filled, pads[:2], fill)
                    pads = (0, 0, *pads[2:])
        self._dma(source, target, True, channel, pads=pads, base=base, fill=fill)

    def store(self, source: View, target: View) -> None:
        """Copy an SRAM tile view to a DDR view."""
        self._dma(target, source, False, self.channel_store)

    def fill(self, target: View, value: int) -> None:
        """Write a constant byte to a tile view."""
        tile = target.buffer
        assert isinstance(tile, Tile)
        steps = tile_strides(target)
        loops = merge_loops(
            [Loop(size, (step,)) for size, step in zip(target.sizes, steps, strict=True)]
        )
        run, loops = self._run(loops, 1, tile.item_bytes)
        for (offset,), (outer, inner) in fit_loops(loops, _DMA_LIMITS[1:], 1):
            self.add(
                "dma_fill", writes=[tile.region], channel=self.channel_input,
                sram=tile_address(target) + offset, n0=run, n1=inner.count, n2=outer.count,
                sram_s1=inner.steps[0], sram_s2=outer.steps[0], fill=value & 0xFF,
            )  # fmt: skip

    def _fill_sides(self, filled: View, sides: tuple[int, int], fill: int) -> View:
        """Fill columns before and after the others of a view; return the view of these."""
        *outer, columns, channels = filled.sizes
        step, (before, after) = filled.strides[-2], sides
        for first, count in ((0, before), (columns - after, after)):
            if count:
                offset = filled.offset + first * step
                part = View(filled.buffer, offset, (*outer, count, channels), filled.strides)
                self.fill(part, fill)
        inner = (*outer, columns - before - after, channels)
        return View(filled.buffer, filled.offset + before * step, inner, filled.strides)

    def load_constant(self, offset: int, size: int, tile: Tile, channel: int) -> None:
        """Copy `size` bytes of the constants segment to the start of a tile."""
        assert size <= tile.size_bytes, (size, tile)
        tile.constants = (offset, size)
        self.add(
            "dma_load",
            reads=[Region("const", offset, offset + size)],
            writes=[tile.region],
            channel=channel,
            ddr=offset,
            ddr_r=CONSTANTS_R,
            sram=tile.address,
            n0=size,
            stream=int(not self._burst(offset, size, ())),
        )

    def _burst(self, address: int, run: int, steps: Sequence[int]) -> bool:
        burst = self.hardware.dma_burst_size
        return all(value % burst == 0 for value in (address, run, *steps))

    def _pads(self, filled: View, target: View) -> tuple[int, int, int, int]:
        """Return padding (columns before and after, rows before and after) around `target`."""
        outer, inner = filled.squeezed(3), target.squeezed(3)
        starts = [b - a for a, b in zip(filled.starts()[-3:], target.starts()[-3:], strict=True)]
        starts = [0] * (3 - len(starts)) + starts
        after = [
            whole_size - start - size
            for whole_size, start, size in zip(outer.sizes, starts, inner.sizes, strict=True)
        ]
        assert (starts[2], after[2]) == (0, 0), "channels are never padded"
        return starts[1], after[1], starts[0], after[0]

    def _run(self, loops: list[Loop], operands: int, item: int) -> tuple[int, list[Loop]]:
        """Split the innermost contiguous run, in bytes, off a loop nest over elements of `item`."""
        if loops and loops[-1].steps == (item,) * operands:
            size = loops[-1].count * item
            if size <= _RUN_LIMIT:
                return size, loops[:-1]
        return item, loops

    def _dma(
        self,
        ddr: View,
        sram: View,
        load: bool,
        channel: int,
        pads: tuple[int, int, int, int] = (0, 0, 0, 0),
        base: View | None = None,
        fill: int = 0,
    ) -> None:
        buffer, tile = ddr.buffer, sram.buffer
        assert isinstance(buffer, DdrBuffer)
        assert isinstance(tile, Tile)
        rank = max(len(ddr.sizes), len(sram.sizes))
        far, near = ddr.squeezed(rank), sram.squeezed(rank)
        assert far.sizes == near.sizes, (far.sizes, near.sizes)
        item = tile.item_bytes
        assert buffer.item_bytes == item, (buffer, tile)
        far_steps = [step * item for step in far.strides]
        loops = [
            Loop(size, steps)
            for size, *steps_ in zip(far.sizes, far_steps, tile_strides(near), strict=True)
            for steps in [tuple(steps_)]
        ]
        start = tile_address(sram)
        if any(pads):
            assert base is not None
            start = tile_address(base)
            # Rows and columns must stay separate dimensions for the padding to apply to them.
            while len(loops) < 3:
                loops.insert(0, Loop(1, (0, 0)))
            by_rows = pads[:2] == (0, 0)
            run, rest = self._run(merge_loops(loops[1 if by_rows else 2 :]), 2, item)
            if rest and by_rows:
                by_rows = False
                run, rest = self._run(merge_loops(loops[2:]), 2, item)
            if rest:
                raise TilewrightError(
                    "E0402", f'padding of "{self.layer}" is not over whole pixels'
                )
            steps = tile_strides(near)
            row, column = Loop(loops[0].count, (far_steps[-3], steps[-3])), loops[1]
            if by_rows or loops[1].count == 1:
                column = Loop(1, (0, tile.pitch))
            if loops[0].count == 1:
                row = Loop(1, (0, tile.shape[-2] * tile.pitch))
            pieces = [((0, 0), [Loop(1, (0, 0)), row, column])]
        else:
            run, rest = self._run(merge_loops(loops), 2, item)
            pieces = fit_loops(rest, _DMA_LIMITS, 2)
        space, base_register, origin = self._place(buffer)
        for (far_offset, near_offset), (outer, middle, inner) in pieces:
            address = origin + ddr.offset * item + far_offset
            nest = (inner, middle, outer)
            span = sum((loop.count - 1) * loop.steps[0] for loop in nest) + run
            burst = self._burst(address, run, [loop.steps[0] for loop in nest if loop.count > 1])
            far_region = Region(space, address, address + span)
            fields = {
                "channel": channel, "ddr": address, "ddr_r": base_register,
                "sram": start + near_offset,
                "n0": run, "n1": inner.count, "n2": middle.count, "n3": outer.count,
                "ddr_s1": inner.steps[0], "ddr_s2": middle.steps[0], "ddr_s3": outer.steps[0],
                "sram_s1": inner.steps[1], "sram_s2": middle.steps[1], "sram_s3": outer.steps[1],
                "stream": int(not burst),
            }  # fmt: skip
            if load:
                fields |= {
                    "pad1_lo": pads[0], "pad1_hi": pads[1], "pad2_lo": pads[2], "pad2_hi": pads[3],
                    "fill": fill & 0xFF,
                }  # fmt: skip
                self.add("dma_load", reads=[far_region], writes=[tile.region], **fields)
            else:
                self.written[buffer.name] = len(self.program)
                self.add("dma_store", reads=[tile.region], writes=[far_region], **fields)

    def _place(self, buffer: DdrBuffer) -> tuple[str, int, int]:
        """Return the segment, base register and byte offset of a DDR buffer.

        A constant that is walked like an activation (an operand of an addition) lies in the
        constants segment, dense, as it is.
        """
        if not buffer.constant:
            return "ddr", WORKSPACE_R, buffer.offset
        key = ("tensor", buffer.name)
        found = self.constants.lookup(key)
        if found is None:
            found = self.constants.add(key, self.weights.get(buffer.name))
        return "const", CONSTANTS_R, found[0]

    # -- registers of the vector unit -----------------------------------------------------------

    def channel_parameters(
        self, key: Hashable, tile: Tile, first: int, count: int, half: bool = False
    ) -> dict[str, int]:
        """Make `count` parameter blocks of a tile resident; return the fields that name them.

        With `half` a block is biases only, and there is no entry.
        """
        block_bytes = self.block_bytes(half)
        offset, size = place_of(tile)
        entry, register, resident = self.banks.channels(
            self.layer, key, first, count, size // block_bytes - half, not half
        )
        names = {"v": register} if half else {"param": entry, "v": register}
        if not resident:
            self.add(
                "vec_param",
                reads=[tile.region],
                writes=(),
                src=tile.address + first * block_bytes,
                count=count,
                **names,
                **({"bias_only": 1} if half else {}),
            )
        return names | {f"{WANT}v": offset + first * block_bytes}

    def block_bytes(self, half: bool) -> int:
        """Return the bytes of a block of channels' parameters, or of biases only."""
        return (4 if half else 9) * self.hardware.vector_lanes

    def from_block(self, fields: dict[str, int], first: int) -> dict[str, int]:
        """Return the fields of a `vec_drain` of blocks from the `first` of a chunk on."""
        half = "param" not in fields
        steps = {"param": 1, "v": 1, f"{WANT}v": self.block_bytes(half)}
        return {name: value + first * steps.get(name, 0) for name, value in fields.items()}

    def clamp(
        self, bounds: tuple[float, float], tile: Tile, offset: int | None = None
    ) -> dict[str, int]:
        """Make the bounds of a float clamp resident; return the fields that name them.

        They lie at `offset` bytes into `tile`, or are brought there first.
        """
        register = self._clamps.get(bounds)
        if register is None:
            register = self._load_clamp(bounds, tile, offset)
        return {"v_clamp": register, f"{WANT}v_clamp": self._clamp_places[bounds]}

    def _load_clamp(self, bounds: tuple[float, float], tile: Tile, offset: int | None) -> int:
        if offset is None:
            offset = 0
            place = self.constants.add(("clamp", *bounds), pack_clamp(self.hardware, bounds))
            self.load_constant(*place, tile, self.channel_weights)
        # Registers above the biases; if there are none, those that a table would take.
        tables = self.hardware.vector_registers - table_registers(self.hardware)
        low, high = 2 * self.blocks, tables
        if low >= high:
            low, high, self._table = tables, self.hardware.vector_registers, None
        register = low + self._clamp_next % (high - low)
        self._clamp_next += 1
        self._forget_clamps(register, 1)
        self._clamps[bounds] = register
        self._clamp_places[bounds] = place_of(tile)[0] + offset
        source = tile.address + offset
        self.add(
            "vec_param", reads=[tile.region], src=source, count=1, v=register, bias_only=1
        )  # fmt: skip
        return register

    def scalar_parameters(self, mult_a: int, mult_b: int, shift: int, tile: Tile) -> dict[str, int]:
        """Make the parameters of an elementwise operation resident; return the fields for them."""
        key = (mult_a, mult_b, shift)
        entry, resident = self.banks.scalars(self.layer, key)
        offset, size = self.constants.add(
            ("scalars", *key), pack_scalars(self.hardware, mult_a, mult_b, shift)
        )
        names = {"param": entry, f"{WANT}param": offset}
        if resident:
            return names
        assert size <= parameter_bytes(self.hardware, 1)
        self.load_constant(offset, size, tile, self.channel_weights)
        # Biases that come along are zero; V registers above the channel biases and table are spare.
        spare = self.hardware.vector_registers - table_registers(self.hardware) - 1
        if spare < 2 * self.blocks:
            self.banks.evict(1)
            spare = self.blocks
        self._forget_clamps(spare, 1)
        self.add("vec_param", reads=[tile.region], src=tile.address, param=entry, count=1, v=spare)
        return names

    def _forget_clamps(self, first: int, count: int) -> None:
        """Forget the bounds in V registers that are overwritten."""
        for old in [old for old, at in self._clamps.items() if first <= at < first + count]:
            del self._clamps[old]

    def table(self, key: object, tile: Tile, before: int | None = None) -> dict[str, int]:
        """Make a lookup table resident; return the fields that name it.

        `before`: position in the program to put the load at (for drains already written).
        """
        register = self.hardware.vector_registers - table_registers(self.hardware)
        if self._table != key:
            self._table = key
            self._forget_clamps(register, table_registers(self.hardware))
            self.add("vec_table", reads=[tile.region], src=tile.address, v=register)
            if before is not None:
                # Drains already written move up by one; they are not stored yet.
                assert all(position < before for position in self.written.values())
                self.program.insert(before, self.program.pop())
        return {"v_table": register, f"{WANT}v_table": place_of(tile)[0]}

    def row_table(self, key: object, tile: Tile) -> dict[str, int]:
        """Make a softmax's table resident; return the fields that name it.

        It takes the last registers, those of a lookup table among them.
        """
        count = row_table_registers(self.hardware)
        first = self.hardware.vector_registers - count
        if self._row_table != key:
            self._table = None
            self._forget_clamps(first, count)
            for bank in (0, 1):
                if (bank + 1) * self.blocks > first:
                    self.banks.evict(bank)
            most = BY_NAME["vec_param"].field["count"].high
            size = 4 * self.hardware.vector_lanes
            for at in range(0, count, most):
                self.add(
                    "vec_param", reads=[tile.region], src=tile.address + at * size,
                    count=min(most, count - at), v=first + at, bias_only=1,
                )  # fmt: skip
            self._row_table = key
        return {"v_table": first, f"{WANT}v_table": place_of(tile)[0]}


def place_of(tile: Tile) -> tuple[int, int]:
    """Return offset and bytes of what a tile was loaded with from the constants segment."""
    assert tile.constants is not None, tile
    return tile.constants


def ddr_argument(name: str, shape: tuple[int, ...], item_bytes: int, constant: bool) -> View:
    """Return the view of a whole DDR argument."""
    return View(DdrBuffer(name, shape, item_bytes, constant), 0, shape, dense_strides(shape))
