"""The `tpu` dialect: one op per instruction, generated from `spec/isa.py`.

```mlir
tpu.program @tpu_0 attributes {target = "edge16"} {
  tpu.dma_load #tpu.f<signal = [3], ddr = 0x1000, ddr_r = 1, n0 = 4096> {layer = "conv1"}
  tpu.mac_conv #tpu.f<wait = [3], act = 0x40, out_h = 8, out_w = 8, k_h = 3, k_w = 3, c_rows = 16>
  tpu.halt
}
tpu.timing_constraint "dma_load" #tpu.f<n0 = 4096> cycles 412 {clock_fs = 2000000 : i64, ...}
```

A program has tens of thousands of ops, so all field values of an op are one `Data` attribute that
holds the fields differing from their defaults, in the order of the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from xdsl.dialects.builtin import (
    DenseArrayBase,
    DictionaryAttr,
    IntegerAttr,
    StringAttr,
    SymbolNameConstraint,
    i64,
)
from xdsl.ir import Attribute, Block, Data, Dialect, Operation, Region
from xdsl.irdl import (
    IRDLOperation,
    irdl_attr_definition,
    irdl_op_definition,
    opt_prop_def,
    prop_def,
    region_def,
    traits_def,
)
from xdsl.parser import AttrParser, Parser
from xdsl.printer import Printer
from xdsl.traits import NoTerminator
from xdsl.utils.exceptions import VerifyException

from tilewright.spec.isa import BY_NAME, INSTRUCTIONS, Field, Instruction, Kind
from tilewright.spec.program import DEFAULTS, Instr

PARAMETERS, POLICY = "parameters", "quant_bank_policy"
"""Attributes of a program: constants its layers read from registers; how banks were given out."""

_HEX = (Kind.SRAM, Kind.DDR)


def _fields_by_name() -> dict[str, Field]:
    fields: dict[str, Field] = {}
    for instruction in INSTRUCTIONS:
        for field in instruction.fields:
            known = fields.setdefault(field.name, field)
            # The attribute does not know its op, so a field name must print the same in all.
            assert (known.kind in _HEX) == (field.kind in _HEX), field.name
            assert (known.kind is Kind.MASK) == (field.kind is Kind.MASK), field.name
            assert known.names == field.names, field.name
    return fields


_FIELDS = _fields_by_name()
FieldValues = tuple[tuple[str, int], ...]


def format_field(name: str, value: int) -> str:
    """Return the text of a field's value: enum name, `[semaphores]`, hexadecimal address, number.

    Values outside an enum print as numbers, so that wrong IR can still be shown.
    """
    field = _FIELDS.get(name)
    if field is None:
        return str(value)
    if field.kind is Kind.MASK and value >= 0:
        numbers = (str(bit) for bit in range(value.bit_length()) if value >> bit & 1)
        return f"[{', '.join(numbers)}]"
    if field.kind is Kind.ENUM and 0 <= value < len(field.names):
        return field.names[value]
    if field.kind in _HEX and value >= 0:
        return hex(value)
    return str(value)


@irdl_attr_definition
class FieldsAttr(Data[FieldValues]):
    """Fields of an instruction that differ from their defaults, as `(name, value)` pairs."""

    name = "tpu.f"

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> FieldValues:
        """Parse `<name = value, ...>`."""
        fast = _parse_plain(parser)
        if fast is not None:
            return fast
        pairs = parser.parse_comma_separated_list(
            parser.Delimiter.ANGLE, lambda: _parse_field(parser)
        )
        names = [name for name, _ in pairs]
        if len(set(names)) != len(names):
            parser.raise_error("a field is given twice")
        return tuple(pairs)

    def print_parameter(self, printer: Printer) -> None:
        """Print `<name = value, ...>`."""
        printer.print_string(f"<{self.text()}>")

    def text(self) -> str:
        """Return `name = value, ...`."""
        return ", ".join(f"{name} = {format_field(name, value)}" for name, value in self.data)


_ONE = r"[A-Za-z_]\w* = (?:\[[0-9, ]*\]|-?[0-9]+|0x[0-9a-f]+|[a-z]\w*)"
_PLAIN = re.compile(rf"<((?:{_ONE}(?:, {_ONE})*)?)>", re.ASCII)
_PAIR = re.compile(r"(\w+) = (\[[^\]]*\]|[^,]+)(?:, )?")


def _parse_plain(parser: AttrParser) -> FieldValues | None:
    """Parse fields that look as we print them, without the lexer: ten times as fast.

    Returns None, with nothing consumed, for anything else; the parser proper then finds the fault.
    """
    start = parser._current_token.span.start
    match = _PLAIN.match(parser.lexer.input.content, start)
    if match is None:
        return None
    pairs: list[tuple[str, int]] = []
    for name, text in _PAIR.findall(match.group(1)):
        field = _FIELDS.get(name)
        if text[0] == "[":
            if field is None or field.kind is not Kind.MASK:
                return None
            parts = text[1:-1].split(",") if len(text) > 2 else []
            if not all(part.strip().isdigit() for part in parts):
                return None
            numbers = [int(part) for part in parts]
            if len(set(numbers)) != len(numbers) or max(numbers, default=0) >= field.bits:
                return None
            value = sum(1 << number for number in numbers)
        elif field is not None and field.kind is Kind.MASK:
            return None
        elif text[0].isalpha():
            if field is None or text not in field.names:
                return None
            value = field.names.index(text)
        else:
            value = int(text, 16) if text.startswith("0x") else int(text)
        pairs.append((name, value))
    if len({name for name, _ in pairs}) != len(pairs):
        return None
    parser._resume_from(match.end())
    return tuple(pairs)


def _parse_field(parser: AttrParser) -> tuple[str, int]:
    name = parser.parse_identifier(context_msg=" as field name")
    parser.parse_punctuation("=")
    field = _FIELDS.get(name)
    if field is not None and field.kind is Kind.MASK:
        numbers = parser.parse_comma_separated_list(
            parser.Delimiter.SQUARE,
            lambda: parser.parse_integer(allow_boolean=False, allow_negative=False),
        )
        if any(number >= field.bits for number in numbers) or len(set(numbers)) != len(numbers):
            parser.raise_error(f"{name} must list different semaphores 0..{field.bits - 1}")
        return name, sum(1 << number for number in numbers)
    if field is not None and field.kind is Kind.ENUM:
        word = parser.parse_optional_identifier()
        if word is not None:
            if word not in field.names:
                parser.raise_error(f"{name} must be one of {', '.join(field.names)}, not {word}")
            return name, field.names.index(word)
    return name, parser.parse_integer(allow_boolean=False)


class InstructionOp(IRDLOperation):
    """Base of all instruction ops."""

    SPEC: ClassVar[Instruction]

    f = opt_prop_def(FieldsAttr)

    @property
    def given(self) -> dict[str, int]:
        """The fields that differ from their defaults."""
        return dict(self.f.data) if self.f is not None else {}

    def values(self) -> dict[str, int]:
        """Return all fields, defaults included."""
        return {**DEFAULTS[self.SPEC.name], **self.given}

    def instr(self) -> Instr:
        """Return the instruction in the compact form encoder and simulators take."""
        layer = self.attributes.get("layer")
        name = layer.data if isinstance(layer, StringAttr) else ""
        return Instr(self.SPEC.name, self.given, name)

    def synchronise(self, wait: int, signal: int) -> None:
        """Replace the masks of semaphores waited for and signalled."""
        masks = tuple((name, mask) for name, mask in (("wait", wait), ("signal", signal)) if mask)
        # They are the first fields of the table.
        rest = self.f.data if self.f is not None else ()
        pairs = (*masks, *(pair for pair in rest if pair[0] not in ("wait", "signal")))
        if pairs:
            self.properties["f"] = FieldsAttr(pairs)
        else:
            self.properties.pop("f", None)

    def verify_(self) -> None:
        """Check that fields exist, are in range, in order, and differ from their defaults."""
        if self.f is None:
            return
        last = -1
        table, order = _TABLES[self.SPEC.name]
        for name, value in self.f.data:
            field = table.get(name)
            if field is None:
                raise VerifyException(f"{self.name} has no field `{name}`")
            if not field.low <= value <= field.high:
                raise VerifyException(
                    f"{self.name}: {name} must be {field.low}..{field.high}, not {value}"
                )
            if value == field.default:
                raise VerifyException(f"{self.name}: {name} = {value} is the default: leave it out")
            if order[name] <= last:
                raise VerifyException(f"{self.name}: {name} is not in the order of the table")
            last = order[name]

    @classmethod
    def parse(cls, parser: Parser) -> InstructionOp:
        """Parse `#tpu.f<...>? attr-dict`; fields in any order, defaults allowed."""
        given = parser.parse_optional_attribute()
        attributes = parser.parse_optional_attr_dict()
        if given is None:
            return cls.create(attributes=attributes)
        if isinstance(given, DictionaryAttr) and not attributes:
            return cls.create(attributes=given.data)
        if not isinstance(given, FieldsAttr):
            parser.raise_error("expected #tpu.f<...>")
        return cls.create(
            properties=_properties(cls.SPEC.name, dict(given.data)), attributes=attributes
        )

    def print(self, printer: Printer) -> None:
        """Print `#tpu.f<...>? attr-dict`."""
        if self.f is not None:
            printer.print_string(f" #tpu.f<{self.f.text()}>")
        if self.attributes:
            printer.print_op_attributes(self.attributes)


_TABLES = {
    instruction.name: (
        instruction.field,
        {field.name: position for position, field in enumerate(instruction.fields)},
    )
    for instruction in INSTRUCTIONS
}


def _properties(name: str, fields: Mapping[str, int]) -> dict[str, Attribute]:
    defaults, order = DEFAULTS[name], _TABLES[name][1]
    # Unknown fields are kept (last), so that the verifier can name them.
    pairs = [item for item in fields.items() if defaults.get(item[0]) != item[1]]
    pairs.sort(key=lambda item: order.get(item[0], len(order)))
    return {"f": FieldsAttr(tuple(pairs))} if pairs else {}


def _define(instruction: Instruction) -> type[InstructionOp]:
    title = "".join(part.capitalize() for part in instruction.name.split("_")) + "Op"
    body: dict[str, Any] = {
        "__doc__": instruction.doc,
        "__module__": __name__,
        "name": f"tpu.{instruction.name}",
        "SPEC": instruction,
        "__annotations__": {"SPEC": ClassVar[Instruction]},
    }
    return irdl_op_definition(type(title, (InstructionOp,), body))


OPS: dict[str, type[InstructionOp]] = {
    instruction.name: _define(instruction) for instruction in INSTRUCTIONS
}
"""Op classes by instruction name."""

_layers: dict[str, StringAttr] = {}


def tpu_op(name: str, *, layer: str = "", **fields: int) -> InstructionOp:
    """Return the op of an instruction; `fields` left out take their defaults.

    Values are checked when the op is verified.
    """
    return _build(name, fields, layer)


def _build(name: str, fields: Mapping[str, int], layer: str) -> InstructionOp:
    attributes: dict[str, Attribute] = {}
    if layer:
        known = _layers.get(layer)
        if known is None:
            known = _layers[layer] = StringAttr(layer)
        attributes["layer"] = known
    return OPS[name].create(properties=_properties(name, fields), attributes=attributes)


def from_instr(instr: Instr) -> InstructionOp:
    """Return the op of a compact instruction."""
    return _build(instr.name, instr.fields, instr.layer)


@irdl_op_definition
class ProgramOp(IRDLOperation):
    """Instructions of one segment, in program order, ended by `tpu.halt`."""

    name = "tpu.program"

    sym_name = prop_def(SymbolNameConstraint())
    body = region_def("single_block")
    traits = traits_def(NoTerminator())

    def __init__(
        self,
        sym_name: str | StringAttr,
        body: Region | Iterable[Operation],
        attributes: Mapping[str, Attribute] | None = None,
    ) -> None:
        region = body if isinstance(body, Region) else Region(Block(body))
        symbol = StringAttr(sym_name) if isinstance(sym_name, str) else sym_name
        super().__init__(
            properties={"sym_name": symbol}, regions=[region], attributes=dict(attributes or {})
        )

    @classmethod
    def of(
        cls, sym_name: str, program: Iterable[Instr], attributes: Mapping[str, Attribute] | None
    ) -> ProgramOp:
        """Return the program of these instructions."""
        return cls(sym_name, [from_instr(instr) for instr in program], attributes)

    def instructions(self) -> list[Instr]:
        """Return the instructions in the compact form."""
        return [op.instr() for op in self.body.block.ops if isinstance(op, InstructionOp)]

    def needs(self) -> dict[str, tuple[int, ...]] | None:
        """Return the addresses of the constants each layer reads from registers, if it says."""
        known = self.attributes.get(PARAMETERS)
        if not isinstance(known, DictionaryAttr):
            return None
        return {
            layer: tuple(int(place) for place in places.get_values())
            for layer, places in known.data.items()
            if isinstance(places, DenseArrayBase)
        }

    @property
    def strict_banks(self) -> bool:
        """Whether the program keeps policy `strict` of the parameter banks."""
        return self.attributes.get(POLICY) == StringAttr("strict")

    def verify_(self) -> None:
        """Check that the block holds only instructions, and `tpu.halt` exactly at the end."""
        ops = list(self.body.block.ops)
        for op in ops:
            if not isinstance(op, InstructionOp):
                raise VerifyException(f"tpu.program holds only tpu instructions, not `{op.name}`")
        halts = [index for index, op in enumerate(ops) if op.name == "tpu.halt"]
        if halts != [len(ops) - 1]:
            raise VerifyException("tpu.program must end with its only `tpu.halt`")

    @classmethod
    def parse(cls, parser: Parser) -> ProgramOp:
        """Parse `@name (attributes {...})? { ... }`."""
        name = parser.parse_symbol_name()
        attributes = parser.parse_optional_attr_dict_with_keyword()
        region = parser.parse_region()
        if not region.blocks:
            region.add_block(Block())
        return cls(name, region, attributes.data if attributes is not None else None)

    def print(self, printer: Printer) -> None:
        """Print `@name (attributes {...})? { ... }`."""
        printer.print_string(" ")
        printer.print_symbol_name(self.sym_name.data)
        if self.attributes:
            printer.print_op_attributes(self.attributes, print_keyword=True)
        printer.print_string(" ")
        printer.print_region(self.body)


@irdl_op_definition
class TimingConstraintOp(IRDLOperation):
    """Measured cycles, from start to end, of the instructions of a layer with these fields.

    `f` holds the fields that decide how long the instruction takes
    (`schedule.constraints.duration_fields`), so that a later compile finds them again. `cycles` is
    the mean of `count` measurements, rounded up, which were `lowest` to `highest`; `waveform` names
    the file, `clock_fs` is the clock period it shows. Not part of any program: a module has these
    beside its programs, and no binary holds them.
    """

    name = "tpu.timing_constraint"

    instruction = prop_def(StringAttr)
    f = opt_prop_def(FieldsAttr)
    cycles = prop_def(IntegerAttr)

    NUMBERS: ClassVar = ("clock_fs", "count", "highest", "lowest")
    STRINGS: ClassVar = ("layer", "waveform")

    @classmethod
    def of(
        cls,
        instruction: str,
        fields: Mapping[str, int],
        cycles: int,
        *,
        layer: str,
        waveform: str,
        **numbers: int,
    ) -> TimingConstraintOp:
        """Return the constraint; `numbers` are those of `NUMBERS`."""
        attributes: dict[str, Attribute] = {
            name: IntegerAttr(value, i64) for name, value in numbers.items()
        }
        attributes |= {"layer": StringAttr(layer), "waveform": StringAttr(waveform)}
        properties: dict[str, Attribute] = {
            "instruction": StringAttr(instruction),
            "cycles": IntegerAttr(cycles, i64),
            **_properties(instruction, fields),
        }
        return cls.create(properties=properties, attributes=dict(sorted(attributes.items())))

    @property
    def given(self) -> FieldValues:
        """The fields that differ from their defaults."""
        return self.f.data if self.f is not None else ()

    def number(self, name: str) -> int:
        """Return one of `NUMBERS`."""
        value = self.attributes[name]
        assert isinstance(value, IntegerAttr), "verified"
        return value.value.data

    def text(self, name: str) -> str:
        """Return one of `STRINGS`."""
        value = self.attributes[name]
        assert isinstance(value, StringAttr), "verified"
        return value.data

    def verify_(self) -> None:
        """Check the instruction, its fields, and that cycles were measured."""
        name = self.instruction.data
        if name not in _TABLES:
            raise VerifyException(f"{self.name}: there is no instruction `{name}`")
        for field_name, value in self.given:
            field = _TABLES[name][0].get(field_name)
            if field is None:
                raise VerifyException(f"{self.name}: {name} has no field `{field_name}`")
            if not field.low <= value <= field.high:
                raise VerifyException(
                    f"{self.name}: {field_name} must be {field.low}..{field.high}, not {value}"
                )
        for key in self.NUMBERS:
            value = self.attributes.get(key)
            if not isinstance(value, IntegerAttr) or value.value.data < 1:
                raise VerifyException(f"{self.name}: `{key}` must be an integer of 1 or more")
        for key in self.STRINGS:
            if not isinstance(self.attributes.get(key), StringAttr):
                raise VerifyException(f"{self.name}: `{key}` must be a string")
        cycles = self.cycles.value.data
        if not self.number("lowest") <= cycles <= self.number("highest"):
            raise VerifyException(f"{self.name}: cycles must lie in lowest..highest, not {cycles}")

    @classmethod
    def parse(cls, parser: Parser) -> TimingConstraintOp:
        """Parse `"instruction" #tpu.f<...>? cycles N attr-dict`."""
        instruction = parser.parse_str_literal()
        given = parser.parse_optional_attribute()
        if given is not None and not isinstance(given, FieldsAttr):
            parser.raise_error("expected #tpu.f<...>")
        parser.parse_keyword("cycles")
        cycles = parser.parse_integer(allow_boolean=False)
        attributes = parser.parse_optional_attr_dict()
        properties: dict[str, Attribute] = {
            "instruction": StringAttr(instruction),
            "cycles": IntegerAttr(cycles, i64),
        }
        if given is not None:
            properties["f"] = given
        return cls.create(properties=properties, attributes=attributes)

    def print(self, printer: Printer) -> None:
        """Print `"instruction" #tpu.f<...>? cycles N attr-dict`."""
        printer.print_string(" ")
        printer.print_string_literal(self.instruction.data)
        if self.f is not None:
            printer.print_string(f" #tpu.f<{self.f.text()}>")
        printer.print_string(f" cycles {self.cycles.value.data}")
        printer.print_op_attributes(self.attributes)


assert BY_NAME.keys() == OPS.keys(), "every instruction has its op"

Tpu = Dialect("tpu", [ProgramOp, TimingConstraintOp, *OPS.values()], [FieldsAttr])
