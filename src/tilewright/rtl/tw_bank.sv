// tw_bank: one single-ported SRAM bank with byte mask, synchronous read and a port for debugging.
//
// The module to exchange for a memory macro. Implements the timing of "SRAM banks" of
// docs/concepts/microarchitecture.md: read data in the next cycle, written data from it on.

module tw_bank import tw_pkg::*; #(
    localparam int unsigned ADDRESS_BITS = BANK_WORDS > 1 ? $clog2(BANK_WORDS) : 1
) (
    input  logic                    clk,
    input  logic                    rst,
    input  logic                    valid,
    input  logic                    write,
    input  logic [ADDRESS_BITS-1:0] address,
    input  logic [W-1:0]            mask,
    input  logic [WB-1:0]           data,
    output logic [WB-1:0]           read_data,
    input  logic [ADDRESS_BITS-1:0] debug_address,
    output logic [WB-1:0]           debug_data
);
  logic [WB-1:0] memory_q[BANK_WORDS];
  logic [WB-1:0] read_q;

  // Not zero, so that a program that relies on memory it never wrote shows.
  initial for (int unsigned i = 0; i < BANK_WORDS; i++) memory_q[i] = {W{8'hA5}};

  assign read_data = read_q;
  assign debug_data = memory_q[debug_address];

  always_ff @(posedge clk) begin
    if (valid && write && !rst) begin
      // One write of a merged word (synthesis finds the byte enables) simulates fastest.
      automatic logic [WB-1:0] merged = memory_q[address];
      for (int unsigned i = 0; i < W; i++) if (mask[i]) merged[8*i+:8] = data[8*i+:8];
      memory_q[address] <= merged;
    end
    if (valid && !write) read_q <= memory_q[address];
  end
endmodule
