"""Proof that every instruction reads the parameters that are meant for it.

Registers of the vector unit (entries of the quantisation-parameter banks, V registers) are no
memory: nothing but the program says what is in them. This walks a program in its order, which is
its meaning (`verify` checks that the engines keep it), and follows constants from DDR over SRAM
into the registers. It knows nothing of how the compiler gave registers out.

Rules for programs of the compiler:

- what is read has been loaded, and by the kind of load that fits;
- the blocks of a `vec_drain` are consecutive blocks of one load, multipliers and biases of the same
  ones, and it is a load of the drain's own layer: so no entry was overwritten in between;
- what else is read (scalars, tables, bounds of a clamp, arrays of a layer normalisation) is one of
  the constants that `needs` says the layer asks for, whichever layer's load has brought it;
- with `wanted`, each read finds exactly the constant at the DDR address asked for;
- by policy `strict`, channels and scalars of a layer share no bank, and no load of a layer
  overwrites an entry the layer has read, with other blocks of the same tile or other scalars.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tilewright.diagnostics import TilewrightError
from tilewright.spec.access import FP16, Access, Fields, accesses, row_parameter_bytes
from tilewright.spec.hardware import Hardware
from tilewright.spec.isa import BY_NAME
from tilewright.spec.limits import row_table_registers, table_registers
from tilewright.spec.program import Dispatched, Instr, sequence

RESCALED = ("add", "sub", "mul")
"""Operations of `vec_eltwise` that have parameters."""
_OPS = BY_NAME["vec_eltwise"].field["op"].names
Needs = Mapping[str, Sequence[int]]
"""DDR addresses of the constants, other than channels' parameters, that each layer asks for."""
Wanted = Mapping[int, Mapping[str, int]]
"""By index of an instruction: DDR address of the first block that each field must name."""


@dataclass(frozen=True, slots=True)
class Block:
    """What one register or entry holds: block `number` of a load."""

    load: int
    """Position of the load among the dispatched instructions."""
    number: int
    name: str
    """Instruction that loaded it."""
    layer: str
    place: int | None
    """DDR address it was copied from; None if those bytes of SRAM are no plain copy."""
    tile: int
    """Position of the `dma_load` that brought it to SRAM; -1 if none did."""


Held = list[Block | None]
Blocks = tuple[Block | None, ...]
"""Of consecutive registers; None: nothing was loaded there."""


@dataclass(frozen=True, slots=True)
class Reads:
    """What an instruction reads from registers, by the field that names the first of them."""

    item: Dispatched
    blocks: dict[str, Blocks]


@dataclass(frozen=True)
class ParameterSummary:
    """What was proved."""

    reads: int
    """Instructions that read registers, loops unrolled."""
    loads: int


def verify_parameters(
    program: Sequence[Instr],
    hardware: Hardware,
    *,
    needs: Needs | None = None,
    wanted: Wanted | None = None,
    strict: bool = False,
) -> ParameterSummary:
    """Check what the instructions of a program of the compiler read from registers.

    Args:
        program: the instructions, with the layer of each.
        hardware: the target.
        needs: constants of layers; without, nothing is said of scalars, tables and clamps that
            another layer's load has brought.
        wanted: the constant every read must find, known where the program is made.
        strict: the program shall keep policy `strict`.

    Raises:
        TilewrightError: E0501 naming layer and instruction of the first wrong read or load.
    """
    walk = _Walk(program, hardware, strict)
    count = 0
    for reads in walk.run():
        count += 1
        for operand, blocks in reads.blocks.items():
            loaded = _check_loaded(reads.item, operand, blocks, hardware)
            if reads.item.name == "vec_drain" and operand in ("v", "param"):
                _check_own(reads.item, operand, loaded)
            elif needs is not None:
                _check_needs(reads.item, operand, loaded[0], needs)
            if wanted is not None:
                _check_wanted(reads.item, operand, loaded[0], wanted)
        _check_paired(reads)
        if strict:
            walk.check_banks(reads)
    return ParameterSummary(count, walk.loads)


def contents(program: Sequence[Instr], hardware: Hardware) -> list[tuple[int, str, object]]:
    """Return what instructions find, in order: index, field, and the blocks.

    A block is told by its DDR address, its number in its load, and the load's layer: what does not
    change when instructions are reordered.
    """
    return [
        (
            reads.item.index,
            operand,
            tuple(block and (block.place, block.number, block.layer) for block in blocks),
        )
        for reads in _Walk(program, hardware, strict=False).run()
        for operand, blocks in reads.blocks.items()
    ]


def _error(item: Dispatched, message: str, details: Sequence[str] = ()) -> TilewrightError:
    return TilewrightError(
        "E0501",
        f'layer "{item.layer}": instruction {item.index} ({item.name}): {message}',
        list(details),
    )


def _name(hardware: Hardware, operand: str, number: int) -> str:
    if operand == "param":
        bank, entry = divmod(number, hardware.quant_bank_entries)
        return f"entry {entry} of bank {bank}"
    return "its bytes of SRAM" if operand == "params" else f"V{number}"


def _origin(block: Block) -> str:
    place = "" if block.place is None else f" from DDR 0x{block.place:x}"
    return f'block {block.number} of a {block.name} of layer "{block.layer}"{place}'


def _check_loaded(
    item: Dispatched, operand: str, blocks: Blocks, hardware: Hardware
) -> tuple[Block, ...]:
    """Check that blocks are there, of the right kind, and follow one another."""
    found: list[Block] = []
    for number, block in enumerate(blocks):
        at = _name(hardware, operand, item.fields[operand] + number)
        if block is None:
            raise _error(item, f"{operand}: nothing has been loaded to {at}")
        table = operand == "v_table" and item.name != "vec_softmax"
        if (block.name == "vec_table") is not table:
            kind = "a lookup table" if table else "parameters"
            raise _error(item, f"{operand}: {at} does not hold {kind}", [_origin(block)])
        if number and not _follows(found[-1], block, hardware):
            raise _error(
                item,
                f"{operand}: what {at} holds does not follow what the register before it holds",
                [_origin(found[-1]), _origin(block)],
            )
        found.append(block)
    return tuple(found)


def _follows(before: Block, block: Block, hardware: Hardware) -> bool:
    if before.load == block.load:
        return block.number == before.number + 1
    # A table of more registers than one load has blocks.
    size = 4 * hardware.vector_lanes
    return (
        before.place is not None
        and block.place == before.place + size
        and (before.tile, before.layer) == (block.tile, block.layer)
    )


def _check_own(item: Dispatched, operand: str, blocks: tuple[Block, ...]) -> None:
    for block in blocks:
        if block.layer != item.layer:
            raise _error(item, f"{operand}: it reads parameters of another layer", [_origin(block)])


def _check_paired(reads: Reads) -> None:
    item, found = reads.item, reads.blocks
    if item.name != "vec_drain" or "param" not in found:
        return
    for entry, bias in zip(found["param"], found["v"], strict=True):
        if entry != bias:
            assert entry is not None
            assert bias is not None
            raise _error(
                item,
                "param and v: multipliers and biases are not of the same block",
                [f"multipliers: {_origin(entry)}", f"biases: {_origin(bias)}"],
            )


def _check_needs(item: Dispatched, operand: str, block: Block, needs: Needs) -> None:
    if block.place not in needs.get(item.layer, ()):
        raise _error(
            item,
            f'{operand}: it reads what layer "{item.layer}" does not ask for',
            [_origin(block)],
        )


def _check_wanted(item: Dispatched, operand: str, block: Block, wanted: Wanted) -> None:
    # Entries and biases of a drain are asked for by one address.
    names = wanted.get(item.index, {})
    place = names.get("v" if item.name == "vec_drain" and operand == "param" else operand)
    if place is None:
        raise _error(item, f"{operand}: it reads what nothing asked for", [_origin(block)])
    if block.place != place:
        raise _error(
            item, f"{operand}: it must read the constant at DDR 0x{place:x}", [_origin(block)]
        )


def _operands(hardware: Hardware, name: str, f: Fields) -> Iterator[tuple[str, int]]:
    """Yield the fields by which an instruction reads registers or entries, and how many."""
    floating = f.get("dtype", 0) == FP16
    match name:
        case "vec_drain":
            yield "v", f["oc_blocks"]
            if f["raw"]:
                return
            if floating:
                yield "v_clamp", 1
                return
            yield "param", f["oc_blocks"]
        case "vec_eltwise":
            if floating:
                yield "v_clamp", 1
            elif _OPS[f["op"]] in RESCALED:
                yield "param", 1
        case "vec_copy":
            if f["requantise"]:
                yield "v_clamp" if floating else "param", 1
        case "vec_resize":
            yield "param", 1
        case "vec_softmax":
            yield "v_table", row_table_registers(hardware)
        case _:
            return
    if f.get("use_table") and not floating:
        yield "v_table", table_registers(hardware)


class _Walk:
    """Follows parameters through a program; `run` yields what is read."""

    def __init__(self, program: Sequence[Instr], hardware: Hardware, strict: bool) -> None:
        self.hardware = hardware
        self.strict = strict
        self.stream = list(sequence(program, hardware.scalar_registers))
        self.loads = 0
        self.entries: Held = [None] * (hardware.quant_banks * hardware.quant_bank_entries)
        self.registers: Held = [None] * hardware.vector_registers
        self.copies = _Copies(self._sources())
        self.readers: list[dict[str, str]] = [{} for _ in self.entries]
        """By entry: layers that have read what it holds, and the instruction."""
        self.banks: dict[str, tuple[set[int], set[int]]] = {}
        """By layer: banks of its channels and of its scalars."""

    def _sources(self) -> list[tuple[int, int]]:
        """Return the ranges of SRAM that parameters are loaded from, merged and in order."""
        spans: set[tuple[int, int]] = set()
        for item in self.stream:
            source = self._source(item)
            if source is not None:
                spans.add(source)
        merged: list[tuple[int, int]] = []
        for low, high in sorted(spans):
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        return merged

    def _source(self, item: Dispatched) -> tuple[int, int] | None:
        f, lanes = item.fields, self.hardware.vector_lanes
        match item.name:
            case "vec_param":
                return f["src"], f["src"] + f["count"] * (4 if f["bias_only"] else 9) * lanes
            case "vec_table":
                return f["src"], f["src"] + 256
            case "vec_layer_norm":
                size = row_parameter_bytes(self.hardware, f["n0"])
                return f["params"], f["params"] + size
            case _:
                return None

    def run(self) -> Iterator[Reads]:
        """Yield what every instruction reads, before what it writes changes anything."""
        stored = _stored(self.hardware, self.stream)
        touched: dict[tuple[object, ...], list[Access]] = {}
        for position, item in enumerate(self.stream):
            if item.name in ("vec_param", "vec_table"):
                self._load(position, item, stored)
                continue
            if not item.name.startswith(("vec_", "dma_")) or item.name == "dma_store":
                continue
            blocks = self._read(item, stored)
            if blocks:
                yield Reads(item, blocks)
            # Wait and signal masks come first and touch nothing.
            key = (item.name, *list(item.fields.values())[2:])
            written = touched.get(key)
            if written is None:
                written = touched[key] = [
                    region
                    for region in accesses(self.hardware, item.name, item.fields)
                    if region.sram and region.write and self.copies.concern(region)
                ]
            for region in written:
                self.copies.write(region)
                if item.name == "dma_load" and _is_plain(item.fields):
                    self.copies.add(region, item.fields["ddr"], position)

    def _read(self, item: Dispatched, stored: tuple[int, int]) -> dict[str, Blocks]:
        f = item.fields
        found: dict[str, Blocks] = {}
        for operand, count in _operands(self.hardware, item.name, f):
            held = self.entries if operand == "param" else self.registers
            found[operand] = tuple(held[f[operand] : f[operand] + count])
        if item.name == "vec_layer_norm":
            source = self._source(item)
            assert source is not None
            copy = self.copies.find(*source)
            if copy is None:
                found["params"] = (None,)
            else:
                layer = self.stream[copy[3]].layer
                place = _constant(copy, source[0], source[1], stored)
                found["params"] = (Block(copy[3], 0, "dma_load", layer, place, copy[3]),)
        return found

    def _load(self, position: int, item: Dispatched, stored: tuple[int, int]) -> None:
        self.loads += 1
        f, lanes = item.fields, self.hardware.vector_lanes
        table = item.name == "vec_table"
        count = table_registers(self.hardware) if table else f["count"]
        size = 4 * lanes if table or f["bias_only"] else 9 * lanes
        for number in range(count):
            low = f["src"] + number * size
            high = min(low + size, f["src"] + 256) if table else low + size
            copy = self.copies.find(low, high)
            place = copy and _constant(copy, low, high, stored)
            tile = copy[3] if copy else -1
            block = Block(position, number, item.name, item.layer, place, tile)
            self.registers[f["v"] + number] = block
            if not table and not f["bias_only"]:
                self._fill(item, f["param"] + number, block)

    def _fill(self, item: Dispatched, entry: int, block: Block) -> None:
        """Put a block into an entry; by policy `strict` its layer must not have read another."""
        old, readers = self.entries[entry], self.readers[entry]
        if self.strict and old is not None and item.layer in readers and old.place != block.place:
            scalar = readers[item.layer] != "vec_drain"
            if scalar or old.tile == block.tile:
                what = "scalars" if scalar else "blocks of the same tile"
                raise _error(
                    item,
                    f"policy strict: {_name(self.hardware, 'param', entry)} wraps around: it holds "
                    f"other {what} that this layer has read",
                    [f"before: {_origin(old)}", f"after: {_origin(block)}"],
                )
        self.entries[entry] = block
        readers.clear()

    def check_banks(self, reads: Reads) -> None:
        """Check that a layer's channels and scalars lie in different banks."""
        item = reads.item
        if "param" not in reads.blocks:
            return
        first, size = item.fields["param"], self.hardware.quant_bank_entries
        channels, scalars = self.banks.setdefault(item.layer, (set(), set()))
        own = channels if item.name == "vec_drain" else scalars
        for entry in range(first, first + len(reads.blocks["param"])):
            self.readers[entry][item.layer] = item.name
            own.add(entry // size)
        both = channels & scalars
        if both:
            raise _error(
                item,
                f"policy strict: parameters of channels and of activations of this layer share "
                f"bank {min(both)}",
            )


Copy = tuple[int, int, int, int]
"""Bytes low..high (exclusive) of SRAM are those of DDR from an address on, by a `dma_load`."""


def _is_plain(f: Fields) -> bool:
    pads = f["pad1_lo"] or f["pad1_hi"] or f["pad2_lo"] or f["pad2_hi"]
    return f["n1"] == f["n2"] == f["n3"] == 1 and not pads


def _stored(hardware: Hardware, stream: Sequence[Dispatched]) -> tuple[int, int]:
    """Return the span of DDR the program writes; what lies there is no constant."""
    low, high = 1 << 62, 0
    for item in stream:
        if item.name == "dma_store":
            for region in accesses(hardware, item.name, item.fields):
                if region.write:
                    low, high = min(low, region.address), max(high, region.end)
    return low, high


def _constant(copy: Copy, low: int, high: int, stored: tuple[int, int]) -> int | None:
    place = copy[2] + low - copy[0]
    return None if place < stored[1] and stored[0] < place + high - low else place


class _Copies:
    """Which bytes of SRAM are plain copies of DDR, where parameters are loaded from."""

    def __init__(self, sources: list[tuple[int, int]]) -> None:
        self.sources = sources
        self.copies: list[Copy] = []
        """Disjoint, in order."""

    def concern(self, region: Access) -> bool:
        """Tell whether an access meets a range that parameters are loaded from."""
        index = bisect_left(self.sources, (region.end, 0)) - 1
        return index >= 0 and self.sources[index][1] > region.address

    def write(self, region: Access) -> None:
        """Forget the bytes an instruction writes."""
        first = bisect_right(self.copies, (region.address, 1 << 62, 0, 0)) - 1
        if first < 0 or self.copies[first][1] <= region.address:
            first += 1
        last = first
        kept: list[Copy] = []
        while last < len(self.copies) and self.copies[last][0] < region.end:
            copy = self.copies[last]
            low, high, place, position = copy
            last += 1
            if region.dims and not region.overlaps(Access("", True, False, low, high - low, ())):
                kept.append(copy)
                continue
            if region.dims:
                # Some of its bytes, here and there: all count as gone.
                continue
            if low < region.address:
                kept.append((low, region.address, place, position))
            if high > region.end:
                kept.append((region.end, high, place + region.end - low, position))
        self.copies[first:last] = kept

    def add(self, region: Access, place: int, position: int) -> None:
        """Take note of a copy of DDR bytes from `place` on; nothing else lies there now."""
        copy = (region.address, region.end, place, position)
        self.copies.insert(bisect_left(self.copies, copy), copy)

    def find(self, low: int, high: int) -> Copy | None:
        """Return the copy that bytes low..high (exclusive) are part of."""
        index = bisect_right(self.copies, (low, 1 << 62, 0, 0)) - 1
        if index >= 0 and self.copies[index][1] >= high:
            return self.copies[index]
        return None
