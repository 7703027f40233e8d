"""Which entries of the quantisation-parameter banks a program's parameters lie in.

Parameters of channels (multipliers and shifts of weights) and scalars (those of elementwise
operations on activations) are loaded by `vec_param`. What is resident is known here, and loaded
again when it is not any more; `codegen.verify_parameters` proves of the finished program, without
any of this, that every read finds what it wants.

Two policies:

- `shared`: channels alternate between banks 0 and 1, scalars take the entries of the other banks in
  turn. A chip of two banks has scalars in bank 1 too, and either evicts the other.
- `strict`: channels and scalars never share a bank (of two banks, each has one), and no load of a
  layer overwrites what the layer itself has read: the blocks of a tile lie one behind another in a
  bank, and a scalar takes no entry that holds another of the same layer. What does not fit so is
  refused.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

from tilewright.diagnostics import TilewrightError
from tilewright.schedule.footprint import max_parameter_blocks
from tilewright.spec.hardware import Hardware

Policy = Literal["shared", "strict"]
POLICIES: tuple[Policy, ...] = ("shared", "strict")
OPTION = "quant-bank-policy"


def policy_of(name: str) -> Policy:
    """Return the policy called `name`.

    Raises:
        TilewrightError: E0702, there is none.
    """
    for policy in POLICIES:
        if policy == name:
            return policy
    raise TilewrightError("E0702", f"{OPTION} must be one of {', '.join(POLICIES)}, not `{name}`")


@dataclass
class Use:
    """Entries a layer's parameters have lain in."""

    channels: set[int] = field(default_factory=set[int])
    scalars: set[int] = field(default_factory=set[int])


@dataclass
class _Bank:
    """What a bank for channels holds: blocks (first, count) of a tile, and where they begin."""

    key: Hashable = None
    blocks: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    filled: int = 0


class ParameterBanks:
    """Gives out entries; the caller loads what it is told is not resident."""

    def __init__(self, hardware: Hardware, policy: Policy) -> None:
        banks = hardware.quant_banks
        if policy == "strict" and banks < 2:
            raise TilewrightError(
                "E0402",
                f"{OPTION}=strict needs 2 quantisation-parameter banks, target `{hardware.name}` "
                f"has {banks}",
                ["parameters of channels and of activations lie in different banks"],
                f"{OPTION}=shared",
            )
        self.hardware = hardware
        self.policy: Policy = policy
        self.blocks = max_parameter_blocks(hardware)
        """Most blocks of one load."""
        self.channel_banks = (0,) if policy == "strict" and banks == 2 else (0, 1)
        self.scalar_banks = tuple(range(2, banks)) if banks > 2 else (1,)
        self.used: dict[str, Use] = {}
        """By layer."""
        self._entries = hardware.quant_bank_entries
        self._banks = {bank: _Bank() for bank in self.channel_banks}
        self._turn = 0
        self._scalars: dict[Hashable, int] = {}
        self._holds: dict[int, Hashable] = {}
        self._next = 0
        self._wanted: dict[str, dict[Hashable, None]] = {}

    def _use(self, layer: str) -> Use:
        return self.used.setdefault(layer, Use())

    def channels(
        self, layer: str, key: Hashable, first: int, count: int, total: int, entries: bool
    ) -> tuple[int, int, bool]:
        """Return (entry, V register, resident) for `count` of the `total` blocks of a tile.

        Without `entries` the blocks are biases only, which have no entries.

        Raises:
            TilewrightError: E0402, `strict` and the tile needs more entries than a bank has.
        """
        wanted = (first, count)
        for bank, held in self._banks.items():
            if held.key == key and wanted in held.blocks:
                return *self._place(layer, bank, held.blocks[wanted], count, entries), True
        bank, held = self._room(layer, key, count, total)
        at = held.blocks[wanted] = held.filled
        held.filled += count
        entry, register = self._place(layer, bank, at, count, entries)
        if entries:
            # Only a bank that both use has any there.
            self._drop_scalars(entry, count)
        return entry, register, False

    def _room(self, layer: str, key: Hashable, count: int, total: int) -> tuple[int, _Bank]:
        """Return a bank with room for blocks of tile `key` behind those it holds."""
        if self.policy == "strict":
            if total > self.blocks:
                raise TilewrightError(
                    "E0402",
                    f'"{layer}": a tile needs {total} entries of quantisation parameters, a bank '
                    f"takes {self.blocks}",
                    [
                        f"target `{self.hardware.name}` has {self._entries} entries a bank and "
                        f"{self.hardware.vector_registers} V registers",
                        f"{OPTION}=strict never overwrites an entry of the same tile",
                    ],
                    f"tiles of fewer output channels, or {OPTION}=shared",
                )
            for bank, held in self._banks.items():
                if held.key == key and held.filled + count <= self.blocks:
                    return bank, held
        bank = self.channel_banks[self._turn % len(self.channel_banks)]
        self._turn += 1
        held = self._banks[bank] = _Bank(key)
        return bank, held

    def _place(self, layer: str, bank: int, at: int, count: int, entries: bool) -> tuple[int, int]:
        entry = bank * self._entries + at
        if entries:
            self._use(layer).channels.update(range(entry, entry + count))
        return entry, bank * self.blocks + at

    def _drop_scalars(self, entry: int, count: int) -> None:
        for at in range(entry, entry + count):
            if at in self._holds:
                del self._scalars[self._holds.pop(at)]

    def scalars(self, layer: str, key: Hashable) -> tuple[int, bool]:
        """Return (entry, resident) for the parameters of an elementwise operation."""
        mine = self._wanted.setdefault(layer, {})
        mine[key] = None
        entry = self._scalars.get(key)
        resident = entry is not None
        if entry is None:
            entry = self._free(mine)
            if entry // self._entries in self._banks:
                # Channels use this bank too: forget what it held.
                self.evict(entry // self._entries)
            self._drop_scalars(entry, 1)
            self._scalars[key], self._holds[entry] = entry, key
        self._use(layer).scalars.add(entry)
        return entry, resident

    def _free(self, mine: dict[Hashable, None]) -> int:
        """Return the next entry for scalars; by `strict`, none with one of the same layer."""
        first, slots = self.scalar_banks[0] * self._entries, self._slots
        entry = first
        for _ in range(slots):
            entry = first + self._next % slots
            self._next += 1
            if self.policy == "shared" or self._holds.get(entry) not in mine:
                break
        return entry

    @property
    def _slots(self) -> int:
        return len(self.scalar_banks) * self._entries

    def evict(self, bank: int) -> None:
        """Forget what a bank for channels holds (its entries or biases are overwritten)."""
        if bank in self._banks:
            self._banks[bank] = _Bank()

    def finish(self) -> None:
        """Check that scalars found entries, once the program is complete.

        Raises:
            TilewrightError: E0402, `strict` and a layer has more scalars than there are entries.
        """
        if self.policy != "strict":
            return
        for layer, wanted in self._wanted.items():
            if len(wanted) > self._slots:
                banks = ", ".join(map(str, self.scalar_banks))
                raise TilewrightError(
                    "E0402",
                    f'"{layer}" needs {len(wanted)} entries of quantisation parameters for '
                    f"activations, there are {self._slots}",
                    [
                        f"bank {banks} of target `{self.hardware.name}`, {self._entries} entries "
                        "each",
                        f"{OPTION}=strict never overwrites an entry of the same layer",
                    ],
                    f"{OPTION}=shared loads them again whenever they are used",
                )

    def words(self, layer: str) -> str:
        """Return which banks a layer uses, in words."""
        use = self._use(layer)
        parts = [
            f"{what} in {_banks(used, self._entries)}"
            for what, used in (("channels", use.channels), ("activations", use.scalars))
            if used
        ]
        return f"parameters of {', of '.join(parts)} ({self.policy})"

    def banks(self, layer: str) -> tuple[list[int], list[int]]:
        """Return the banks of a layer's channels and of its scalars."""
        use = self._use(layer)
        return (
            sorted({entry // self._entries for entry in use.channels}),
            sorted({entry // self._entries for entry in use.scalars}),
        )


def _banks(entries: set[int], size: int) -> str:
    counts: dict[int, int] = {}
    for entry in sorted(entries):
        counts[entry // size] = counts.get(entry // size, 0) + 1
    return " and ".join(f"bank {bank} ({count} of {size})" for bank, count in counts.items())
