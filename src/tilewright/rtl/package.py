"""The SystemVerilog package `tw_pkg` of a target: sizes, latencies, encodings, port types.

Everything in it comes from `spec/`: the RTL holds no number of its own. `python -m
tilewright.rtl.package TARGET` prints it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from tilewright.diagnostics import TilewrightError
from tilewright.rtl.faults import FAULTS
from tilewright.spec.hardware import Hardware, load_target
from tilewright.spec.isa import (
    BY_NAME,
    DTYPES,
    INSTRUCTION_BITS,
    INSTRUCTIONS,
    ISA_VERSION,
    OPCODE_BITS,
    Engine,
    Field,
    Instruction,
    Kind,
)
from tilewright.spec.limits import ROWS
from tilewright.spec.program import ADDRESSES, MAC, SEQ, VEC
from tilewright.spec.timing import LAYER_NORM_WAIT, SOFTMAX_WAIT, dma_to_core

_KEYWORDS = {"wait": "wait_mask", "signal": "signal_mask", "function": "function_code"}
"""Fields whose names SystemVerilog reserves."""
_ROUNDINGS = ("half_up", "half_away", "half_even", "truncate")


def field_name(field: Field) -> str:
    """Return the field's name in SystemVerilog."""
    return _KEYWORDS.get(field.name, field.name)


def _parameters(hardware: Hardware) -> dict[str, int]:
    latency = hardware.dma_latency
    return {
        "ISA_VERSION": ISA_VERSION,
        "N": hardware.array_size,
        "LANES": hardware.vector_lanes,
        "HAS_INT4": int("int4" in hardware.dtypes),
        "MAC_SATURATES": int(hardware.mac_saturation),
        "V_REGISTERS": hardware.vector_registers,
        "R_REGISTERS": hardware.scalar_registers,
        "HALF_ROWS": hardware.accumulator_rows,
        "QUANT_BANKS": hardware.quant_banks,
        "QUANT_BANK_ENTRIES": hardware.quant_bank_entries,
        "SRAM_SIZE": hardware.sram_size,
        "SRAM_BANKS": hardware.sram_banks,
        "BANK_SIZE": hardware.bank_size,
        "BANK_WORDS": hardware.bank_size // hardware.sram_word_bytes,
        "W": hardware.sram_word_bytes,
        "G": hardware.ddr_bus_bytes,
        "CORE_MHZ": hardware.core_clock_mhz,
        "DDR_MHZ": hardware.ddr_clock_mhz,
        "DMA_MHZ": hardware.dma_clock_mhz,
        "DDR_ADDRESS_BITS": hardware.ddr_address_bits,
        "CHANNELS": hardware.dma_channels,
        "DMA_BUS": hardware.dma_bus_bytes,
        "BURST": hardware.dma_burst_size,
        "DMA_LATENCY": dma_to_core(hardware, latency),
        "DMA_STREAM_LATENCY": dma_to_core(hardware, latency * hardware.dma_stream_latency_factor),
        "MAC_LATENCY": hardware.mac_latency,
        "VECTOR_LATENCY": hardware.vector_latency,
        "SOFTMAX_WAIT": SOFTMAX_WAIT,
        "LAYER_NORM_WAIT": LAYER_NORM_WAIT,
        "QUEUE_DEPTH": hardware.queue_depth,
        "INSTRUCTION_BITS": INSTRUCTION_BITS,
    }


def _struct(instruction: Instruction) -> Iterator[str]:
    yield f"  // {instruction.name}: fields with (+n) hold value - n."
    yield "  typedef struct packed {"
    spare = INSTRUCTION_BITS - instruction.used_bits
    if spare:
        yield f"    logic [{spare - 1}:0] reserved_bits;"
    for field in reversed(instruction.fields):
        sign = " signed" if field.signed else ""
        note = f"  // +{field.bias}" if field.bias else ""
        yield f"    logic{sign} [{field.bits - 1}:0] {field_name(field)};{note}"
    yield f"    logic [{OPCODE_BITS - 1}:0] opcode;"
    yield f"  }} {instruction.name}_t;"
    yield ""


def _slice(instruction: Instruction, name: str) -> str:
    low = instruction.positions[name]
    return f"{low + instruction.field[name].bits - 1}:{low}"


def _with_registers() -> Iterator[str]:
    yield "  // The word with R registers added to its addresses."
    yield "  function automatic logic [511:0] with_registers("
    yield "      input logic [511:0] word, input logic [R_REGISTERS-1:0][39:0] r,"
    yield "      input logic carry_lost);"
    yield "    logic [511:0] w;"
    yield "    w = word;"
    yield "    case (word[7:0])"
    for name, pairs in ADDRESSES.items():
        if not pairs:
            continue
        instruction = BY_NAME[name]
        yield f"      OP_{name.upper()}: begin"
        for address, register in pairs:
            bits = instruction.field[address].bits
            where, chosen = _slice(instruction, address), _slice(instruction, register)
            total = f"plus_register(40'(word[{where}]), r[R_BITS'(word[{chosen}])], carry_lost)"
            yield f"        w[{where}] = {bits}'({total});"
        yield "      end"
    yield "      default: ;"
    yield "    endcase"
    yield "    with_registers = w;"
    yield "  endfunction"


def _legal(hardware: Hardware) -> Iterator[str]:
    yield "  // Whether a word decodes: opcode assigned, reserved bits zero, ENUMs in range."
    yield "  function automatic logic is_legal(input logic [511:0] word);"
    yield "    case (word[7:0])"
    for instruction in INSTRUCTIONS:
        if instruction.name in ROWS and not hardware.vector_rows:
            continue
        terms: list[str] = []
        if instruction.used_bits < INSTRUCTION_BITS:
            terms.append(f"word[511:{instruction.used_bits}] == '0")
        terms += [
            f"word[{_slice(instruction, field.name)}] <= {field.bits}'d{field.high}"
            for field in instruction.fields
            if field.kind is Kind.ENUM and field.high < (1 << field.bits) - 1
        ]
        terms += [
            f"32'(word[{_slice(instruction, field.name)}]) < R_REGISTERS"
            for field in instruction.fields
            if field.kind is Kind.R
        ]
        if instruction.name in ("set_reg", "add_reg"):
            terms.append(f"word[{_slice(instruction, 'rd')}] != '0")
        if instruction.engine is Engine.DMA:
            terms.append(f"32'(word[{_slice(instruction, 'channel')}]) < CHANNELS")
        yield f"      OP_{instruction.name.upper()}: is_legal = {' && '.join(terms) or 1};"
    yield "      default: is_legal = 1'b0;"
    yield "    endcase"
    yield "  endfunction"


def _engine_of() -> Iterator[str]:
    yield "  // DMA channels 0..3, MAC 4, vector unit 5, sequencer 6."
    yield "  function automatic logic [2:0] engine_of(input logic [511:0] word);"
    yield "    case (word[7:0])"
    for instruction in INSTRUCTIONS:
        if instruction.engine is Engine.DMA:
            value = f"3'(word[{_slice(instruction, 'channel')}])"
        else:
            number = {Engine.MAC: MAC, Engine.VEC: VEC, Engine.SEQ: SEQ}[instruction.engine]
            value = f"3'd{number}"
        yield f"      OP_{instruction.name.upper()}: engine_of = {value};"
    yield "      default: engine_of = 3'd6;"
    yield "    endcase"
    yield "  endfunction"


_TYPES = """\
  localparam int unsigned R_BITS = $clog2(R_REGISTERS);
  localparam int unsigned WORD_ADDRESS_BITS = $clog2(SRAM_SIZE / W);
  localparam int unsigned WB = 8 * W;
  localparam int unsigned GB = 8 * G;
  localparam int unsigned PORTS = 9;

  // A word access of an SRAM port; held until granted. Read data follow in the next cycle.
  typedef struct packed {
    logic valid;
    logic write;
    logic [WORD_ADDRESS_BITS-1:0] address;  // in words
    logic [W-1:0] mask;
    logic [WB-1:0] data;
  } sram_request_t;

  // An access of one DDR unit; held until granted. Read data follow in the next cycle.
  typedef struct packed {
    logic valid;
    logic write;
    logic burst;                            // of an instruction in burst mode
    logic [39:0] address;                   // in bytes, a multiple of G
    logic [G-1:0] mask;
    logic [GB-1:0] data;
  } ddr_request_t;

  // 40-bit sum of an address and a register (and the planted fault of a lost carry).
  function automatic logic [39:0] plus_register(
      input logic [39:0] a, input logic [39:0] b, input logic carry_lost);
    if (carry_lost) plus_register = {a[39:16] + b[39:16], 16'(a[15:0] + b[15:0])};
    else plus_register = a + b;
  endfunction
"""


def sv_package(hardware: Hardware, *, faults: bool = False) -> str:
    """Return the text of `tw_pkg.sv` for a target.

    Args:
        hardware: the target.
        faults: whether the build has the input that plants a fault.
    """
    lines = [f"// tw_pkg: target {hardware.name}. Generated from the tables; do not edit.", ""]
    # No build uses every parameter, and functions look only at some bits of a word.
    lines += ["/* verilator lint_off UNUSEDPARAM */", "/* verilator lint_off UNUSEDSIGNAL */"]
    lines += ["package tw_pkg;"]
    for name, value in _parameters(hardware).items():
        lines.append(f"  localparam int unsigned {name} = {value};")
    for number, name in enumerate(_ROUNDINGS):
        lines.append(f"  localparam int unsigned ROUND_{name.upper()} = {number};")
    lines.append(f"  localparam int unsigned ROUNDING = {_ROUNDINGS.index(hardware.rounding)};")
    for number, name in enumerate(DTYPES):
        lines.append(f"  localparam logic [1:0] DTYPE_{name.upper()} = 2'd{number};")
    digest = hardware.digest()[:16]
    lines += [
        "  // First 64 bits of the target's digest, as in image headers.",
        f"  localparam logic [63:0] TARGET_DIGEST = 64'h{digest};",
        "",
        f"  localparam bit HAS_ROWS = 1'b{int(hardware.vector_rows)};",
        f"  localparam bit FAULTS_BUILT = 1'b{int(faults)};",
    ]
    for fault in FAULTS:
        lines.append(f"  localparam logic [7:0] FAULT_{fault.name.upper()} = 8'd{fault.number};")
    lines.append("")
    for instruction in INSTRUCTIONS:
        code = f"{OPCODE_BITS}'h{instruction.opcode:02x}"
        lines.append(f"  localparam logic [7:0] OP_{instruction.name.upper()} = {code};")
    lines.append("")
    for instruction in INSTRUCTIONS:
        lines += _struct(instruction)
    lines += _TYPES.splitlines()
    for part in (_with_registers(), _legal(hardware), _engine_of()):
        lines += ["", *part]
    lines += ["endpackage"]
    lines += ["/* verilator lint_on UNUSEDPARAM */", "/* verilator lint_on UNUSEDSIGNAL */", ""]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Print the package of the target that is the only argument."""
    given = sys.argv[1:] if arguments is None else arguments
    if len(given) != 1:
        print("usage: python -m tilewright.rtl.package TARGET", file=sys.stderr)
        return 2
    try:
        print(sv_package(load_target(given[0])), end="")
    except TilewrightError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
